"""Prefill scores, the plain definition: query tiles of one segment against columns of its pages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from msa_icp_jax import rows
from msa_icp_jax.backend import start_at, vary_as
from msa_icp_jax.geometry import MAX_BLOCKS, NUM_HEADS, Forced, cdiv
from msa_icp_jax.ops import _portable
from msa_icp_jax.ops._portable import RunningTop16, Tuning
from msa_icp_jax.ops.arguments import Shard
from msa_icp_jax.ops.prefill_plan import MSAIcpScorePlan, prefill_tiles

if TYPE_CHECKING:
    from msa_icp_jax.arrays import Array, Bool, Float32, IndexFloat, Int32


# Jitted for eager callers, whose loops would otherwise compile anew in each call.
@functools.partial(jax.jit, static_argnames=("sm_scale", "initialize"))
@_portable.tuned
def prefill_scores(
    q: IndexFloat[Array, "T 4 128"],
    shard: Shard,
    block_table: Int32[Array, "B width"],
    plan: MSAIcpScorePlan,
    max_score: Float32[Array, "rows 4 K"],
    *,
    sm_scale: float,
    initialize: bool,
    tuning: Tuning,
) -> Float32[Array, "rows 4 K"]:
    """Writes every token's causal columns (all of them when `initialize`)."""
    columns = max_score.shape[2]
    tile_tokens = min(tuning.tile_tokens, q.shape[0])
    step = _portable.columns_per_step(shard, 1, tile_tokens * NUM_HEADS, columns, tuning)
    max_score = vary_as(max_score, q, *_varying(shard, block_table, plan))
    if initialize:
        clear = jnp.full((q.shape[0], NUM_HEADS, columns), _portable.NEG_INF, jnp.float32)
        max_score = lax.dynamic_update_slice(max_score, clear, (0, 0, 0))

    def one_tile(tile: _Tile, plane: jax.Array) -> jax.Array:
        seen = jnp.minimum(tile.positions + 1, tile.kv_len)
        causal = cdiv(seen, shard.page_size)  # columns that a token may see

        def body(i: jax.Array, plane: jax.Array) -> jax.Array:
            first = jnp.minimum(i * step, columns - step)  # the last step may score some again
            cols = first + jnp.arange(step, dtype=jnp.int32)
            scores = tile.scores(q, shard, block_table, cols, tuning)
            scores = jnp.where(scores == _portable.NEG_INF, scores, scores * sm_scale)
            start = start_at(tile.start, 0, first)
            old = lax.dynamic_slice(plane, start, scores.shape)
            write = (tile.live[:, None] & (cols[None] < causal[:, None]))[:, None]
            # A product with sm_scale can make a zero negative again.
            new = jnp.where(write, jnp.where(scores == 0, 0.0, scores), old)
            return lax.dynamic_update_slice(plane, new, start)

        last = jnp.minimum(jnp.where(tile.live, causal, 0).max(), columns)
        return _portable.for_each_step(last, step, columns, body, plane)

    return _for_each_tile(plan, tile_tokens, q.shape[0], one_tile, max_score)


@functools.partial(jax.jit, static_argnames=("forced", "columns"))
@_portable.tuned
def prefill_rows(
    q: IndexFloat[Array, "T 4 128"],
    shard: Shard,
    block_table: Int32[Array, "B width"],
    plan: MSAIcpScorePlan,
    num_valid_pages: Int32[Array, " T"],
    carrier: Int32[Array, "4 carrier_rows 33"],
    forced: Forced,
    *,
    columns: int,
    tuning: Tuning,
) -> Int32[Array, "4 carrier_rows 33"]:
    """Writes candidate rows into the carrier without a score plane: a running Top16.

    Candidates are among the first `columns` columns.
    """
    candidates = shard.candidates(forced)
    tile_tokens = min(tuning.tile_tokens, q.shape[0])
    step = _portable.columns_per_step(shard, 1, tile_tokens * NUM_HEADS, columns, tuning)
    carrier = vary_as(carrier, q, num_valid_pages, *_varying(shard, block_table, plan))
    no_candidate = vary_as(rows.empty_rows(NUM_HEADS, q.shape[0]), carrier)
    carrier = lax.dynamic_update_slice(carrier, no_candidate, (0, 0, 0))

    def one_tile(tile: _Tile, carrier: Int32[Array, "4 carrier_rows 33"]) -> jax.Array:
        counts = lax.dynamic_slice(num_valid_pages, (tile.start,), tile.live.shape)
        per_head = jnp.broadcast_to(counts[:, None], (counts.shape[0], NUM_HEADS))

        def body(i: jax.Array, best: RunningTop16) -> RunningTop16:
            first = jnp.minimum(i * step, columns - step)
            cols = first + jnp.arange(step, dtype=jnp.int32)
            return best.fold(
                tile.scores(q, shard, block_table, cols, tuning),
                cols,
                cols >= i * step,
                per_head,
                candidates,
            )

        empty = RunningTop16.empty(*per_head.shape)
        empty = RunningTop16(*(vary_as(x, carrier) for x in empty))
        blocks = jnp.clip(jnp.where(tile.live, counts, 0).max(), 0, MAX_BLOCKS)
        last = jnp.minimum(cdiv(blocks, candidates.scale), columns)
        best = _portable.for_each_step(last, step, columns, body, empty)
        found = best.rows().swapaxes(0, 1)
        start = start_at(0, tile.start, 0)
        old = lax.dynamic_slice(carrier, start, found.shape)
        new = jnp.where(tile.live[None, :, None], found, old)
        return lax.dynamic_update_slice(carrier, new, start)

    return _for_each_tile(plan, tile_tokens, q.shape[0], one_tile, carrier)


def _varying(
    shard: Shard, block_table: Int32[Array, "B width"], plan: MSAIcpScorePlan
) -> tuple[int | jax.Array, ...]:
    """What decides over which mesh axes results vary, beside the queries."""
    return shard.index_k, shard.rank, block_table, plan.qo_lens


class _Tile(NamedTuple):
    """A run of query rows of one segment; rows of the slice outside the segment are not live."""

    segment: Int32[Array, ""]
    start: Int32[Array, ""]
    live: Bool[Array, " tile"]
    positions: Int32[Array, " tile"]
    kv_len: Int32[Array, ""]

    def scores(
        self,
        q: IndexFloat[Array, "T 4 128"],
        shard: Shard,
        block_table: Int32[Array, "B width"],
        columns: Int32[Array, " columns"],
        tuning: Tuning,
    ) -> Float32[Array, "tile 4 columns"]:
        """Raw scores float32 [tile, 4, columns] of some columns."""
        query = lax.dynamic_slice(q, start_at(self.start, 0, 0), (self.live.shape[0], *q.shape[1:]))
        table = lax.dynamic_slice(block_table, start_at(self.segment, 0), (1, block_table.shape[1]))
        return _portable.column_scores(
            query[None],
            shard,
            table,
            columns[None],
            self.positions[None],
            self.kv_len[None],
            tuning,
        )[0]


def _for_each_tile[Carry](
    plan: MSAIcpScorePlan,
    tile_tokens: int,
    num_rows: int,
    one_tile: Callable[[_Tile, Carry], Carry],
    carry: Carry,
) -> Carry:
    """Folds `one_tile` over the query tiles of all segments, `tile_tokens` (<= num_rows) each."""
    ends = prefill_tiles(plan, tile_tokens)

    def body(i: jax.Array, carry: Carry) -> Carry:
        segment = jnp.searchsorted(ends, i, side="right").astype(jnp.int32)
        in_segment = (i - jnp.where(segment > 0, ends[segment - 1], 0)) * tile_tokens
        first = plan.qo_starts[segment] + in_segment
        start = jnp.minimum(first, num_rows - tile_tokens)  # a slice never hangs over the end
        row = start + jnp.arange(tile_tokens, dtype=jnp.int32)
        in_segment = row - plan.qo_starts[segment]
        live = (row >= first) & (in_segment < plan.qo_lens[segment])
        positions = jnp.where(live, plan.qo_offset[segment] + in_segment, -1)
        tile = _Tile(segment, start, live, positions, plan.kv_lens[segment])
        return one_tile(tile, carry)

    return lax.fori_loop(0, ends[-1], body, carry)
