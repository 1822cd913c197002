"""The merge in stock operations, which the interpreter runs: the plain definition, row by row."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from msa_icp_jax import rows as candidate_rows
from msa_icp_jax.geometry import NUM_SLOTS, TOPK, cdiv
from msa_icp_jax.ops._mosaic.launch import CTA
from msa_icp_jax.ops.merge.kernel import Merge
from msa_icp_jax.rows import INVALID_KEY, NO_BLOCK, READY, ROW_WORDS


def no_faults(facts: Merge) -> jax.Array:
    """What stands for the errors: without an atomic add every row counts its own faults."""
    return jnp.zeros(facts.rows, jnp.int32)


def merge(recv: Any, counts: Any, *others: Any, shared: Any, facts: Merge, ctas: int) -> None:
    """The kernel's body on `ctas` CTAs; `others` are as the kernel has them.

    Nothing arrives while the interpreter runs this, so one look is as good as many.
    """
    del shared
    *given, output = others
    faults = given.pop() if facts.lasts else None

    @pl.loop(0, cdiv(facts.rows, ctas))
    def _(turn: Any) -> None:
        row = turn * ctas + lax.axis_index(CTA)

        @pl.when(row < facts.rows)
        def _() -> None:
            _merge_row(recv, counts, given, output, faults, row, facts)


def _merge_row(
    recv: Any, counts: Any, given: list[Any], output: Any, faults: Any, row: Any, facts: Merge
) -> None:
    slot = [lax.rem(given[0][0], NUM_SLOTS)] if facts.waits else []
    token, head = lax.div(row, facts.heads), lax.rem(row, facts.heads)
    received = recv[*slot, :, head, token]
    if facts.tagged:
        tag = given[-1][*slot, head, token]
        if facts.waits:
            tag = candidate_rows.next_generation(tag)
            given[-1][*slot, head, token] = tag
        arrived = (received[..., 1] == tag).all(axis=-1)
        received = received[..., 0]
    else:
        arrived = received[:, ROW_WORDS - 1] == READY
    best = _best_ids(received, counts[token], facts)
    output[token, head] = jnp.where(arrived.all(), best, NO_BLOCK)
    if facts.lasts:
        faults[row] = jnp.sum(~arrived, dtype=jnp.int32)
    if facts.clears:
        recv[*slot, :, head, token, ROW_WORDS - 1] = jnp.zeros(facts.sources, jnp.int32)


def _best_ids(received: jax.Array, count: jax.Array, facts: Merge) -> jax.Array:
    """The merged ids [16] of one (token, head)."""
    words, ids = (x.reshape(-1) for x in candidate_rows.unpack(received))
    ids, _, words = lax.sort((ids, ~candidate_rows.order_keys(words), words), num_keys=2)
    keys = candidate_rows.candidate_keys(words, ids, count, facts.begin, facts.end)
    repeated = jnp.concatenate([jnp.full(1, False), ids[1:] == ids[:-1]])
    keys = jnp.where(repeated, INVALID_KEY, keys)
    best = candidate_rows.ascending(candidate_rows.take_top16(keys, words, ids)[2])[0]
    if facts.prefill:
        only_block_zero = jnp.where(jnp.arange(TOPK) == 0, 0, NO_BLOCK)
        best = jnp.where(count <= 0, only_block_zero, best)
    return best
