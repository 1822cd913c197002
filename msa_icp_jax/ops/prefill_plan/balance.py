"""The prefill kernels' work list: a window's causal triangles cut into equal shares, one a CTA.

A *tile* is 64 consecutive query rows of the window (at multiples of 64) as far as they belong to
one segment; rows 3 to 70 of a segment that starts at row 0 lie in two tiles, and a 64-row stretch
that three segments share makes three tiles. A tile must score the keys below the position of its
last token. These are counted in *units* of 512 positions, the largest step that any shard layout
scores at once; all tiles' units, laid end to end, are cut into equal ranges, one for each CTA of a
persistent grid. So long and short segments, prefix hits, causal triangles and zero-length segments
all end at the same time, and a long tile is shared by as many CTAs as it takes.

A column of the score plane is the maximum over one page alone, and no page lies in two units, so
the parts of a split tile need no reduction.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from msa_icp_jax.geometry import HEAD_DIM, cdiv
from msa_icp_jax.ops.prefill_plan import MSAIcpScorePlan

TILE_TOKENS = 64
UNIT_POSITIONS = 512

# Fields of a tile.
TILE = 0  # its 64 query rows start at 64 * TILE
FIRST_ROW = 1  # of these 64 rows, those in [FIRST_ROW, END_ROW) belong to the tile
END_ROW = 2
SEGMENT = 3  # row of the block table
POSITION = 4  # position of the first of the 64 rows, were it in the segment; may be negative
KEYS = 5  # keys of the segment
SCORED = 6  # positions that the tile's last token sees
FIRST_UNIT = 7  # units of the tiles before it
TILE_FIELDS = 8

# Fields of a CTA's range.
RANGE_TILE = 0  # first tile it has a part of
RANGE_TILES = 1  # tiles it has a part of
RANGE_BEGIN = 2  # units [RANGE_BEGIN, RANGE_END) of all tiles laid end to end
RANGE_END = 3
RANGE_FIELDS = 4


class PrefillWork(NamedTuple):
    """What the prefill kernels read about a window; all arrays, none of it read by the host.

    Attributes:
      ranges: int32 [ctas, RANGE_FIELDS].
      tiles: int32 [ceil(total_q / 64) + B, TILE_FIELDS]; the unused tail is never reached.
      scored: int32 [max(total_q, 1)], SCORED of each query row's tile, 0 for padding rows.
      hidden: float8_e4m3fn [128, 128], NaN keys, loaded in place of pages that cannot be read.
    """

    ranges: jax.Array
    tiles: jax.Array
    scored: jax.Array
    hidden: jax.Array


def prefill_work(plan: MSAIcpScorePlan, ctas: int) -> PrefillWork:
    """Builds the work list of a window for a grid of `ctas`; fit for jit.

    It depends on neither rank nor page size nor world size, so all layers of a step share it.
    """
    tiles, units = _tiles(plan)
    ends = jnp.cumsum(units, dtype=jnp.int32)
    tiles = tiles.at[:, FIRST_UNIT].set(ends - units)
    return PrefillWork(
        ranges=_equal_ranges(ends, ctas),
        tiles=tiles,
        scored=_scored_positions(plan),
        hidden=jnp.full((HEAD_DIM, HEAD_DIM), jnp.nan, jnp.float8_e4m3fn),
    )


def _tiles(plan: MSAIcpScorePlan) -> tuple[jax.Array, jax.Array]:
    """All tiles (FIRST_UNIT still 0) and their units, segment by segment."""
    starts, ends = plan.qo_starts, plan.qo_starts + plan.qo_lens
    first = starts // TILE_TOKENS
    count = jnp.where(plan.qo_lens > 0, cdiv(ends, TILE_TOKENS) - first, 0)
    running = jnp.cumsum(count, dtype=jnp.int32)

    index = jnp.arange(cdiv(plan.total_q, TILE_TOKENS) + plan.num_segments, dtype=jnp.int32)
    segment = _segment_of(running, index)
    tile = first[segment] + index - (running - count)[segment]
    begin = jnp.maximum(starts[segment], tile * TILE_TOKENS)
    end = jnp.minimum(ends[segment], (tile + 1) * TILE_TOKENS)
    position = plan.qo_offset[segment] + tile * TILE_TOKENS - starts[segment]
    keys = plan.kv_lens[segment]
    scored = jnp.clip(position + end - tile * TILE_TOKENS, 0, keys)
    used = index < running[-1]
    fields = {
        TILE: tile,
        FIRST_ROW: begin - tile * TILE_TOKENS,
        END_ROW: end - tile * TILE_TOKENS,
        SEGMENT: segment,
        POSITION: position,
        KEYS: keys,
        SCORED: scored,
        FIRST_UNIT: jnp.zeros_like(tile),
    }
    table = jnp.stack([fields[i] for i in range(TILE_FIELDS)], axis=1)
    return (
        jnp.where(used[:, None], table, 0),
        jnp.where(used, cdiv(scored, UNIT_POSITIONS), 0),
    )


def _equal_ranges(ends: jax.Array, ctas: int) -> jax.Array:
    """Cuts the units below ends[-1] into `ctas` ranges that differ by one unit at most."""
    share, rest = ends[-1] // ctas, ends[-1] % ctas
    cta = jnp.arange(ctas + 1, dtype=jnp.int32)
    bounds = cta * share + jnp.minimum(cta, rest)
    begin, end = bounds[:-1], bounds[1:]
    first = jnp.searchsorted(ends, begin, side="right", method="compare_all")
    last = jnp.searchsorted(ends, end, side="left", method="compare_all")
    fields = {
        RANGE_TILE: first,
        RANGE_TILES: jnp.where(end > begin, last - first + 1, 0),
        RANGE_BEGIN: begin,
        RANGE_END: end,
    }
    return jnp.stack([fields[i] for i in range(RANGE_FIELDS)], axis=1).astype(jnp.int32)


def _scored_positions(plan: MSAIcpScorePlan) -> jax.Array:
    """SCORED of the tile that each query row lies in; 0 for rows of no segment."""
    row = jnp.arange(max(plan.total_q, 1), dtype=jnp.int32)
    ends = plan.qo_starts + plan.qo_lens
    segment = _segment_of(ends, row)
    start, end = plan.qo_starts[segment], ends[segment]
    last = jnp.minimum(end, (row // TILE_TOKENS + 1) * TILE_TOKENS) - 1
    seen = jnp.clip(plan.qo_offset[segment] + last - start + 1, 0, plan.kv_lens[segment])
    return jnp.where((row >= start) & (row < end), seen, 0)


def _segment_of(ends: jax.Array, index: jax.Array) -> jax.Array:
    """The first segment whose (non-decreasing) end lies past index; the last one if none does."""
    segment = jnp.searchsorted(ends, index, side="right", method="compare_all")
    return jnp.minimum(segment, ends.shape[0] - 1).astype(jnp.int32)
