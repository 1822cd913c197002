"""The merge in plain Pallas, which the interpreter runs: the plain definition, row by row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from msa_icp_jax import rows as candidate_rows
from msa_icp_jax.geometry import NUM_SLOTS, TOPK, cdiv
from msa_icp_jax.ops._mosaic.launch import CTA
from msa_icp_jax.ops.merge.kernel import MergeParams
from msa_icp_jax.rows import INVALID_KEY, NO_BLOCK, READY, ROW_WORDS


def no_faults(params: MergeParams) -> jax.Array:
    """What stands for the errors: without an atomic add every row counts its own faults."""
    return jnp.zeros(params.rows, jnp.int32)


def merge(
    recv: jax.Ref,
    counts: jax.Ref,
    *others: jax.Ref,
    shared: jax.Ref,
    params: MergeParams,
    ctas: int,
) -> None:
    """The kernel's body on `ctas` CTAs; `others` are as the kernel has them.

    Nothing arrives while the interpreter runs this, so one look is as good as many.
    """
    del shared
    *given, output = others
    faults = given.pop() if params.lasts else None

    @pl.loop(0, cdiv(params.rows, ctas))
    def _(turn: jax.Array) -> None:
        row = turn * ctas + lax.axis_index(CTA)

        @pl.when(row < params.rows)
        def _() -> None:
            _merge_row(recv, counts, given, output, faults, row, params)


def _merge_row(
    recv: jax.Ref,
    counts: jax.Ref,
    given: list[jax.Ref],
    output: jax.Ref,
    faults: jax.Ref | None,
    row: jax.Array,
    params: MergeParams,
) -> None:
    slot = [lax.rem(given[0][0], NUM_SLOTS)] if params.waits else []
    token, head = lax.div(row, params.heads), lax.rem(row, params.heads)
    received = recv[*slot, :, head, token]
    if params.tagged:
        tag = given[-1][*slot, head, token]
        if params.waits:
            tag = candidate_rows.next_generation(tag)
            given[-1][*slot, head, token] = tag
        arrived = (received[..., 1] == tag).all(axis=-1)
        received = received[..., 0]
    else:
        arrived = received[:, ROW_WORDS - 1] == READY
    best = _best_ids(received, counts[token], params)
    output[token, head] = jnp.where(arrived.all(), best, NO_BLOCK)
    if faults is not None:
        faults[row] = jnp.sum(~arrived, dtype=jnp.int32)
    if params.clears:
        recv[*slot, :, head, token, ROW_WORDS - 1] = jnp.zeros(params.sources, jnp.int32)


def _best_ids(received: jax.Array, count: jax.Array, params: MergeParams) -> jax.Array:
    """The merged ids [16] of one (token, head)."""
    words, ids = (x.reshape(-1) for x in candidate_rows.unpack(received))
    ids, _, words = lax.sort((ids, ~candidate_rows.order_keys(words), words), num_keys=2)
    keys = candidate_rows.candidate_keys(words, ids, count, params.begin, params.end)
    repeated = jnp.concatenate([jnp.full(1, False), ids[1:] == ids[:-1]])
    keys = jnp.where(repeated, INVALID_KEY, keys)
    best = candidate_rows.ascending(candidate_rows.take_top16(keys, words, ids)[2])[0]
    if params.prefill:
        only_block_zero = jnp.where(jnp.arange(TOPK) == 0, 0, NO_BLOCK)
        best = jnp.where(count <= 0, only_block_zero, best)
    return best
