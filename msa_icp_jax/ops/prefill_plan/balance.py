"""The prefill kernels' work list: a window's causal triangles cut into equal shares, one a CTA.

A *tile* is 64 consecutive query rows of the window (at multiples of 64) as far as they belong to
one segment; rows 3 to 70 of a segment that starts at row 0 lie in two tiles, and a 64-row stretch
that three segments share makes three tiles. A tile must score the keys below the position of its
last token, in *units* of 512 positions, the largest step that any shard layout scores at once. All
tiles, laid end to end, are cut between units into ranges of equal cost, one for each CTA of a
persistent grid. So long and short segments, prefix hits, causal triangles and zero-length segments
all end at the same time, and a long tile is shared by as many CTAs as it takes.

A column of the score plane is the maximum over one page alone, and no page lies in two units, so
the parts of a split tile need no reduction. Where each part leaves a result of its own to be joined
later (the Top16 of its columns), a tile's parts have consecutive *slots*.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from msa_icp_jax.geometry import HEAD_DIM, MAX_TOKENS, cdiv
from msa_icp_jax.ops.prefill_plan import MSAIcpScorePlan

TILE_TOKENS = 64
COUNTERS = 8  # of a tile: its rows are joined by eighths, a warp's rows each
UNIT_POSITIONS = 512

# Fields of a tile.
TILE = 0  # its 64 query rows start at 64 * TILE
FIRST_ROW = 1  # of these 64 rows, those in [FIRST_ROW, END_ROW) belong to the tile
END_ROW = 2
SEGMENT = 3  # row of the block table
POSITION = 4  # position of the first of the 64 rows, were it in the segment; may be negative
KEYS = 5  # keys of the segment
SCORED = 6  # positions that the tile's last token sees, up to where no plane has a column
FIRST_SLOT = 7  # slot of the tile's first part
PARTS = 8  # CTAs that share the tile
TILE_FIELDS = 9

# Fields of a CTA's range; a copy of its first tile follows them.
RANGE_TILE = 0  # first tile it has a part of
RANGE_TILES = 1  # tiles it has a part of
RANGE_BEGIN = 2  # unit of the first tile where its part begins
RANGE_END = 3  # unit of the last tile where its part ends
RANGE_SLOT = 4  # slot of its first part; the next parts have the next slots
RANGE_FIELDS = 5

# Loading a tile's queries and masking its last keys costs as much as some of a unit's keys.
UNIT_COST, TILE_COST = 4, 3


class PrefillWork(NamedTuple):
    """What the prefill kernels read about a window; all arrays, none of it read by the host.

    Attributes:
      ranges: int32 [ctas, RANGE_FIELDS + TILE_FIELDS].
      tiles: int32 [n = ceil(total_q / 64) + B, TILE_FIELDS]; the unused tail is never reached.
      tile_of: int32 [max(total_q, 1)], the tile of each query row, -1 for rows of no segment.
      hidden: float8_e4m3fn [128, 128], NaN keys, loaded in place of pages that cannot be read.
      counters: int32 [n, COUNTERS], zeros: how many parts of a tile are done, kept by the kernel
        that joins them (in a copy of its own, or in place: it leaves zeros behind).
    """

    ranges: jax.Array
    tiles: jax.Array
    tile_of: jax.Array
    hidden: jax.Array
    counters: jax.Array

    @property
    def slots(self) -> int:
        """Parts of tiles there can be."""
        return self.tiles.shape[0] + self.ranges.shape[0]


def prefill_work(plan: MSAIcpScorePlan, ctas: int) -> PrefillWork:
    """Builds the work list of a window for a grid of `ctas`; fit for jit.

    It depends on neither rank nor page size nor world size, so all layers of a step share it.
    """
    first, running = _tile_counts(plan)
    tiles = _tiles(plan, first, running)
    ranges, slots = _equal_ranges(cdiv(tiles[:, SCORED], UNIT_POSITIONS), ctas)
    tiles = jnp.concatenate([tiles, slots], axis=1)
    return PrefillWork(
        ranges=jnp.concatenate([ranges, tiles[ranges[:, RANGE_TILE]]], axis=1),
        tiles=tiles,
        tile_of=_tile_of_rows(plan, first, running, tiles.shape[0]),
        hidden=jnp.full((HEAD_DIM, HEAD_DIM), jnp.nan, jnp.float8_e4m3fn),
        counters=jnp.zeros((tiles.shape[0], COUNTERS), jnp.int32),
    )


def _tile_counts(plan: MSAIcpScorePlan) -> tuple[jax.Array, jax.Array]:
    """Per segment: the 64-row stretch of its first tile, and the tiles up to its last one."""
    first = plan.qo_starts // TILE_TOKENS
    count = jnp.where(plan.qo_lens > 0, cdiv(plan.qo_starts + plan.qo_lens, TILE_TOKENS) - first, 0)
    return first, jnp.cumsum(count, dtype=jnp.int32)


def _tiles(plan: MSAIcpScorePlan, first: jax.Array, running: jax.Array) -> jax.Array:
    """All tiles up to SCORED, segment by segment, then rows of zeros."""
    starts, ends = plan.qo_starts, plan.qo_starts + plan.qo_lens
    index = jnp.arange(cdiv(plan.total_q, TILE_TOKENS) + plan.num_segments, dtype=jnp.int32)
    segment = _segment_of(running, index)
    before = jnp.where(segment > 0, running[segment - 1], 0)
    tile = first[segment] + index - before
    begin = jnp.maximum(starts[segment], tile * TILE_TOKENS)
    end = jnp.minimum(ends[segment], (tile + 1) * TILE_TOKENS)
    position = plan.qo_offset[segment] + tile * TILE_TOKENS - starts[segment]
    keys = plan.kv_lens[segment]
    fields = {
        TILE: tile,
        FIRST_ROW: begin - tile * TILE_TOKENS,
        END_ROW: end - tile * TILE_TOKENS,
        SEGMENT: segment,
        POSITION: position,
        KEYS: keys,
        SCORED: jnp.clip(position + end - tile * TILE_TOKENS, 0, jnp.minimum(keys, MAX_TOKENS)),
    }
    table = jnp.stack([fields[i] for i in range(FIRST_SLOT)], axis=1)
    return jnp.where((index < running[-1])[:, None], table, 0)


def _equal_ranges(units: jax.Array, ctas: int) -> tuple[jax.Array, jax.Array]:
    """Cuts tiles of `units` [n] into ranges of equal cost.

    Returns the ranges [ctas, RANGE_FIELDS] and the tiles' (FIRST_SLOT, PARTS) [n, 2].
    """
    cost = jnp.where(units > 0, units * UNIT_COST + TILE_COST, 0)
    cost_end = jnp.cumsum(cost, dtype=jnp.int32)
    unit_end = jnp.cumsum(units, dtype=jnp.int32)
    unit_start = unit_end - units

    # Where equal shares of the cost end, and the nearest place between two units of that tile.
    share, rest = cost_end[-1] // ctas, cost_end[-1] % ctas
    cta = jnp.arange(ctas + 1, dtype=jnp.int32)
    cut = cta * share + jnp.minimum(cta, rest)
    tile = jnp.minimum(_count_up_to(cost_end, cut), units.shape[0] - 1)
    inside = cut - (cost_end - cost)[tile] - TILE_COST
    nearest = jnp.clip((inside + UNIT_COST // 2) // UNIT_COST, 0, units[tile])
    bound = jnp.where(cta < ctas, unit_start[tile] + nearest, unit_end[-1])

    begin, end = bound[:-1], bound[1:]
    first = jnp.minimum(_count_up_to(unit_end, begin), units.shape[0] - 1)
    last = jnp.minimum(_count_up_to(unit_end, end - 1), units.shape[0] - 1)
    works = end > begin
    # The CTAs that have work, numbered; tile + CTA is a number that no two parts have in common.
    number = jnp.cumsum(works, dtype=jnp.int32) - works
    fields = {
        RANGE_TILE: first,
        RANGE_TILES: jnp.where(works, last - first + 1, 0),
        RANGE_BEGIN: begin - unit_start[first],
        RANGE_END: end - unit_start[last],
        RANGE_SLOT: first + number,
    }
    ranges = jnp.stack([fields[i] for i in range(RANGE_FIELDS)], axis=1)

    opener = number[jnp.minimum(_count_up_to(end, unit_start), ctas - 1)]
    closer = number[jnp.minimum(_count_up_to(end, unit_end - 1), ctas - 1)]
    slot = jnp.arange(units.shape[0], dtype=jnp.int32) + opener
    return ranges, jnp.stack([slot, jnp.where(units > 0, closer - opener + 1, 0)], axis=1)


def _tile_of_rows(
    plan: MSAIcpScorePlan, first: jax.Array, running: jax.Array, tiles: int
) -> jax.Array:
    """The tile of each query row, -1 for rows of no segment.

    Segments that overlap (starts are device data) may need more `tiles` than there are: their rows
    past the last one belong to no segment, too.
    """
    row = jnp.arange(max(plan.total_q, 1), dtype=jnp.int32)
    ends = plan.qo_starts + plan.qo_lens
    segment = _segment_of(ends, row)
    before = jnp.where(segment > 0, running[segment - 1], 0)
    tile = before + row // TILE_TOKENS - first[segment]
    inside = (row >= plan.qo_starts[segment]) & (row < ends[segment])
    return jnp.where(inside & (tile < tiles), tile, -1)


def _segment_of(ends: jax.Array, index: jax.Array) -> jax.Array:
    """The first segment whose (non-decreasing) end lies past index; the last one if none does."""
    return jnp.minimum(_count_up_to(ends, index), ends.shape[0] - 1)


def _count_up_to(values: jax.Array, limit: jax.Array) -> jax.Array:
    """How many of the non-decreasing `values` are at most `limit`, for each limit."""
    count = jnp.searchsorted(values, limit, side="right", method="compare_all")
    return count.astype(jnp.int32)
