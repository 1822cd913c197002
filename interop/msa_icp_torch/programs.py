"""The jitted JAX halves of the chains: what runs before and after the exchange.

Each is made once for a plan and its options. Where `donate` is set, a program writes into the
caller's buffers. Buffers come last; None stands for one that a mode does not have.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import lax

from msa_icp_jax import (
    MSAIcpIndexerPlan,
    MSAIcpScorePlan,
    msa_icp_decode_index_score_sharded,
    msa_icp_merge_candidates,
    msa_icp_topk_select_publish,
)
from msa_icp_jax.comm import mark_rows, store_legacy, store_tagged


@functools.cache
def decode_rows(plan: MSAIcpIndexerPlan, query_len: int, enable_pdl: bool, donate: bool) -> Any:
    """Score and select: ``f(inputs, num_valid_pages, slot, scores, generations)``.

    `inputs` are index_q, index_k, block_table, seq_lens; `generations` is None for legacy rows.
    Returns (message, scores, generations); the message is marked
    with the call (see `comm.exchange_in_slot`), as `decode_merge` expects it.
    """
    geometry, rank = plan.geometry, _rank(plan)
    shard: dict[str, Any] = {
        "rank": rank,
        "world_size": geometry.world_size,
        "page_size": geometry.page_size,
        "decode_query_len": query_len,
        "precision": plan.precision,
        "row_offset": geometry.row_offset,
    }
    select: dict[str, Any] = {
        "force_begin_blocks": geometry.init_blocks,
        "force_end_blocks": geometry.local_blocks,
    }
    launch: dict[str, Any] = {"enable_pdl": enable_pdl, "backend": plan.backend}

    def rows(inputs: Any, num_valid_pages: Any, slot: Any, scores: Any, generations: Any) -> Any:
        index_q, index_k, block_table, seq_lens = inputs
        scores = msa_icp_decode_index_score_sharded(
            index_q,
            index_k,
            block_table,
            seq_lens,
            scores,
            max_decode_query_len=geometry.max_decode_query_len,
            **shard,
            **launch,
        )
        message = msa_icp_topk_select_publish(
            scores,
            num_valid_pages,
            rank=rank,
            world_size=geometry.world_size,
            heads_per_rank=geometry.heads_per_rank,
            index_scale=geometry.index_scale,
            index_offset=geometry.index_offset(rank),
            generations=generations,
            slot=slot,
            **select,
            **launch,
        )
        return mark_rows(message.rows, slot, 1), scores, message.generations

    return _jit(rows, donate, 3, 4)


@functools.cache
def decode_merge(plan: MSAIcpIndexerPlan, enable_pdl: bool, donate: bool) -> Any:
    """Store and merge: ``f(received, num_valid_pages, slot, recv_slot, output, errors, expected)``.

    `recv_slot` is one slot of the storage, `expected` all expected generations or None for legacy
    rows. Returns (recv_slot, output, errors, expected).
    """
    geometry = plan.geometry

    def merge(
        received: Any,
        num_valid_pages: Any,
        slot: Any,
        recv_slot: Any,
        output: Any,
        errors: Any,
        expected: Any,
    ) -> Any:
        tagged = expected is not None
        store = store_tagged if tagged else store_legacy
        merged = msa_icp_merge_candidates(
            store(recv_slot[None], 0, mark_rows(received, slot, -1))[0],
            num_valid_pages,
            output,
            errors,
            init_blocks=geometry.init_blocks,
            local_blocks=geometry.local_blocks,
            enable_pdl=enable_pdl,
            expected_generations=(
                lax.dynamic_index_in_dim(expected, slot, keepdims=False) if tagged else None
            ),
            backend=plan.backend,
        )
        if tagged:
            expected = lax.dynamic_update_index_in_dim(
                expected, merged.expected_generations, slot, 0
            )
        return merged.recv_slot, merged.output, merged.errors, expected

    return _jit(merge, donate, 3, 4, 5, 6)


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


def _rank(plan: MSAIcpIndexerPlan) -> int:
    assert plan.rank is not None  # a torch plan always has one
    return plan.rank


def _jit(function: Any, donate: bool, *buffers: int) -> Any:
    return jax.jit(function, donate_argnums=buffers if donate else ())
