"""The jitted JAX halves of the chains: what runs before and after the exchange.

Each is made once for a plan and its options. Where `donate` is set, a program writes into the
caller's buffers. Buffers come last; None stands for one that a mode does not have.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from msa_icp_jax import MSAIcpComm, MSAIcpIndexerPlan, MSAIcpScorePlan, one_sided
from msa_icp_jax.comm import mark_rows


@functools.cache
def decode_local(
    plan: MSAIcpIndexerPlan, query_len: int, tagged: bool, enable_pdl: bool, donate: bool
) -> Any:
    """Score and select: ``f(inputs, num_valid_pages, slot, scores, parts, sent)``.

    `inputs` are index_q, index_k, block_table, seq_lens, and `parts` the first `storage_parts`.
    Returns (rows, scores, parts); the rows are marked with the call (see `comm.mark_rows`), as
    `decode_merge` expects them. They go where `sent` lies, which is of their shape; None: to
    memory of their own.
    """

    def local(
        inputs: Any, num_valid_pages: Any, slot: Any, scores: Any, parts: Any, sent: Any
    ) -> Any:
        del sent  # donated, it is what the rows are written into
        index_q, index_k, block_table, seq_lens = inputs
        found, scores, comm = plan.decode_local(
            index_q,
            index_k,
            block_table,
            seq_lens,
            num_valid_pages,
            scores,
            comm=comm_of(plan, parts),
            slot=slot,
            tagged=tagged,
            decode_query_len=query_len,
            enable_pdl=enable_pdl,
            fused=False,
            marked=True,
        )
        return found, scores, _parts(comm, parts)

    return _jit(local, donate, 3, 4, 5)


@functools.cache
def decode_merge(plan: MSAIcpIndexerPlan, tagged: bool, enable_pdl: bool, donate: bool) -> Any:
    """Store and merge: ``f(received, num_valid_pages, slot, output, parts)``.

    `parts` are the second `storage_parts`. Returns (output, parts).
    """

    def merge(received: Any, num_valid_pages: Any, slot: Any, output: Any, parts: Any) -> Any:
        output, comm = plan.decode_merge(
            mark_rows(received, slot, -1),
            num_valid_pages,
            output,
            comm=comm_of(plan, parts),
            slot=slot,
            tagged=tagged,
            enable_pdl=enable_pdl,
        )
        return output, _parts(comm, parts)

    return _jit(merge, donate, 3, 4)


def storage_parts(tagged: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The parts of the receive storage that select and merge of this form of rows write."""
    if tagged:
        return ("publish_generations",), ("tagged_recv", "expected_generations", "errors")
    return (), ("recv", "errors")


def comm_of(plan: MSAIcpIndexerPlan, parts: dict[str, jax.Array]) -> MSAIcpComm:
    """Storage that has these parts; nothing looks at the others, so no program makes them."""
    geometry = plan.geometry
    nothing = MSAIcpComm.zeros(geometry.world_size, geometry.max_decode_tokens)
    return dataclasses.replace(nothing, **parts)


def _parts(comm: MSAIcpComm | None, parts: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: getattr(comm, name) for name in parts}


@functools.cache
def prefill_window_plan(
    plan: MSAIcpIndexerPlan, total_q: int, max_query_len: int, max_seq_len: int
) -> Any:
    """``f(qo_segment_lens, kv_segment_lens, qo_offset)`` returning the window plan."""

    def build(qo_segment_lens: Any, kv_segment_lens: Any, qo_offset: Any) -> MSAIcpScorePlan:
        return plan.prefill_window_plan(
            qo_segment_lens,
            kv_segment_lens,
            qo_offset,
            total_q=total_q,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
        )

    return jax.jit(build)


@functools.cache
def prefill_local(plan: MSAIcpIndexerPlan, fused: bool, donate: bool) -> Any:
    """Score and select: ``f(inputs, window_plan, num_valid_pages, score_scratch, carrier)``.

    `inputs` are query, index_k, block_table; `score_scratch` is None when fused. Returns
    (carrier, score_scratch).
    """

    def local(
        inputs: Any, window_plan: Any, num_valid_pages: Any, score_scratch: Any, carrier: Any
    ) -> Any:
        query, index_k, block_table = inputs
        return plan.prefill_local(
            query,
            index_k,
            block_table,
            window_plan,
            score_scratch,
            num_valid_pages,
            carrier,
            fused=fused,
        )

    return _jit(local, donate, 3, 4)


@functools.cache
def prefill_merge(plan: MSAIcpIndexerPlan, donate: bool) -> Any:
    """``f(received, num_valid_pages, output)`` returning output."""
    return _jit(plan.prefill_merge, donate, 2)


def _jit(function: Any, donate: bool, *buffers: int) -> Any:
    """A program that writes into these of its arguments, where it donates: on GPUs.

    An unused buffer may be one whose memory a result takes. A graph of a few kernels costs the host
    more than their launches.
    """
    if not donate:
        return jax.jit(function)
    options = one_sided.COMPILER_OPTIONS
    return jax.jit(function, donate_argnums=buffers, keep_unused=True, compiler_options=options)
