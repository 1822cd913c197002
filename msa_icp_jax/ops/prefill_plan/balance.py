"""The prefill kernels' work list: a window's causal triangles cut into equal shares, one a CTA.

A *tile* is 64 consecutive query rows of the window (at multiples of 64) as far as they belong to
one segment; rows 3 to 70 of a segment that starts at row 0 lie in two tiles, and a 64-row stretch
that three segments share makes three tiles. A tile must score the keys below the position of its
last token, in *units* of 512 positions, the largest step that any shard layout scores at once. All
tiles, laid end to end, are cut between units into ranges of equal cost, one for each CTA of a
persistent grid. So long and short segments, prefix hits, causal triangles and zero-length segments
all end at the same time, and a long tile is shared by as many CTAs as it takes.

A column of the score plane is the maximum over one page alone, and no page lies in two units, so
the parts of a split tile need no reduction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp

from msa_icp_jax.geometry import HEAD_DIM, MAX_INT32, MAX_TOKENS, cdiv
from msa_icp_jax.ops.prefill_plan import MSAIcpScorePlan
from msa_icp_jax.ops.prefill_plan.namespace import AnyArray, Namespace

if TYPE_CHECKING:
    from jax.typing import DTypeLike

    from msa_icp_jax.arrays import Array, BFloat16, Float8e4m3fn, IndexFloat, Int32

TILE_TOKENS = 64
UNIT_POSITIONS = 512

# Fields of a tile.
TILE = 0  # its 64 query rows start at 64 * TILE
FIRST_ROW = 1  # of these 64 rows, those in [FIRST_ROW, END_ROW) belong to the tile
END_ROW = 2
SEGMENT = 3  # row of the block table
POSITION = 4  # position of the first of the 64 rows, were it in the segment; may be negative
KEYS = 5  # keys of the segment
SCORED = 6  # positions that the tile's last token sees, up to where no plane has a column
TILE_FIELDS = 7

# Fields of a CTA's range; a copy of its first tile follows them.
RANGE_TILE = 0  # first tile it has a part of
RANGE_TILES = 1  # tiles it has a part of
RANGE_BEGIN = 2  # unit of the first tile where its part begins
RANGE_END = 3  # unit of the last tile where its part ends
RANGE_FIELDS = 4

# Loading a tile's queries and masking its last keys costs as much as some of a unit's keys.
UNIT_COST, TILE_COST = 4, 3


class PrefillWork(NamedTuple):
    """What the prefill kernels read about a window; all arrays, none of it read by the host.

    Attributes:
      ranges: int32 [ctas, RANGE_FIELDS + TILE_FIELDS].
      tiles: int32 [n = ceil(total_q / 64) + B, TILE_FIELDS]; the unused tail is never reached.
      tile_of: int32 [max(total_q, 1)], the tile of each query row, -1 for rows of no segment.
      hidden: float8_e4m3fn [128, 128], NaN keys, loaded in place of pages that cannot be read.
      hidden_bfloat16: bfloat16 [128, 128], the same in place of pages of that type.
    """

    ranges: Int32[Array, "ctas 11"]
    tiles: Int32[Array, "n 7"]
    tile_of: Int32[Array, " total_q"]
    hidden: Float8e4m3fn[Array, "128 128"]
    hidden_bfloat16: BFloat16[Array, "128 128"]

    def hidden_keys(self, dtype: DTypeLike) -> IndexFloat[Array, "128 128"]:
        """NaN keys of a cache's type."""
        return self.hidden_bfloat16 if dtype == jnp.bfloat16 else self.hidden


def prefill_work(plan: MSAIcpScorePlan, ctas: int) -> PrefillWork:
    """Builds the work list of a window for a grid of `ctas`; fit for jit.

    It depends on neither rank nor page size nor world size, so all layers of a step share it.

    Raises:
      ValueError: as `work_tables` does.
    """
    ranges, tiles, tile_of = work_tables(plan, ctas, jnp)
    hidden = (
        jnp.full((HEAD_DIM, HEAD_DIM), jnp.nan, dtype)
        for dtype in (jnp.float8_e4m3fn, jnp.bfloat16)
    )
    return PrefillWork(ranges, tiles, tile_of, *hidden)


def work_tables(
    plan: MSAIcpScorePlan, ctas: int, xp: Namespace
) -> tuple[Int32[AnyArray, "ctas 11"], Int32[AnyArray, "n 7"], Int32[AnyArray, " total_q"]]:
    """The `PrefillWork` leaves (ranges, tiles, tile_of) of a window whose leaves are arrays of xp.

    Raises:
      ValueError: a sum over as many tiles as the window's bounds allow would pass an int32.
    """
    _check_sums(plan)
    first, running = _tile_counts(plan, xp)
    tiles = _tiles(plan, first, running, xp)
    ranges = _equal_ranges(cdiv(tiles[:, SCORED], UNIT_POSITIONS), ctas, xp)
    ranges = xp.concatenate([ranges, tiles[ranges[:, RANGE_TILE]]], 1)
    return ranges, tiles, _tile_of_rows(plan, first, running, tiles.shape[0], xp)


def _check_sums(plan: MSAIcpScorePlan) -> None:
    """Raises unless positions and every running sum fit an int32, whatever the lengths hold."""
    query_len = min(plan.max_query_len, plan.total_q)
    tiles = cdiv(plan.total_q, TILE_TOKENS) + plan.num_segments
    units = cdiv(min(plan.max_seq_len, MAX_TOKENS), UNIT_POSITIONS)
    cost = units * UNIT_COST + TILE_COST
    counted = plan.num_segments * (cdiv(query_len, TILE_TOKENS) + 1)
    if max(tiles * cost, counted, MAX_TOKENS + query_len) > MAX_INT32:
        raise ValueError(
            f"total_q, max_query_len and max_seq_len must allow a work list that int32 can count "
            f"(ceil(total_q / 64) + segments at most {MAX_INT32 // cost} at this max_seq_len), got "
            f"{plan.total_q}, {plan.max_query_len} and {plan.max_seq_len} for {plan.num_segments} "
            "segments"
        )


def _tile_counts(
    plan: MSAIcpScorePlan, xp: Namespace
) -> tuple[Int32[AnyArray, " B"], Int32[AnyArray, " B"]]:
    """Per segment: the 64-row stretch of its first tile, and the tiles up to its last one."""
    first = plan.qo_starts // TILE_TOKENS
    count = cdiv(plan.qo_starts + plan.qo_lens, TILE_TOKENS) - first
    return first, _running_sum(xp.where(plan.qo_lens > 0, count, 0), xp)


def _tiles(
    plan: MSAIcpScorePlan,
    first: Int32[AnyArray, " B"],
    running: Int32[AnyArray, " B"],
    xp: Namespace,
) -> Int32[AnyArray, "n 7"]:
    """All tiles up to SCORED, segment by segment, then rows of zeros."""
    starts, ends = plan.qo_starts, plan.qo_starts + plan.qo_lens
    index = _range(cdiv(plan.total_q, TILE_TOKENS) + plan.num_segments, xp)
    segment = _segment_of(running, index, xp)
    tile = first[segment] + index - _before(running, segment, xp)
    row = tile * TILE_TOKENS
    begin = xp.maximum(starts[segment], row)
    end = xp.minimum(ends[segment], row + TILE_TOKENS)
    position = plan.qo_offset[segment] + row - starts[segment]
    keys = plan.kv_lens[segment]
    fields = {
        TILE: tile,
        FIRST_ROW: begin - row,
        END_ROW: end - row,
        SEGMENT: segment,
        POSITION: position,
        KEYS: keys,
        SCORED: xp.minimum(xp.clip(position + end - row, 0, MAX_TOKENS), keys),
    }
    table = xp.stack([fields[i] for i in range(TILE_FIELDS)], 1)
    return xp.where((index < running[-1])[:, None], table, 0)


def _equal_ranges(
    units: Int32[AnyArray, " n"], ctas: int, xp: Namespace
) -> Int32[AnyArray, "ctas 4"]:
    """Cuts tiles of `units` [n] into ranges [ctas, RANGE_FIELDS] of equal cost."""
    last_tile = units.shape[0] - 1
    cost = xp.where(units > 0, units * UNIT_COST + TILE_COST, 0)
    cost_end, unit_end = _running_sum(cost, xp), _running_sum(units, xp)
    unit_start = unit_end - units

    # Where equal shares of the cost end, and the nearest place between two units of that tile.
    share, rest = cost_end[-1] // ctas, cost_end[-1] % ctas
    cta = _range(ctas + 1, xp)
    cut = cta * share + xp.minimum(cta, rest)
    tile = xp.clip(_count_up_to(cost_end, cut, xp), None, last_tile)
    inside = cut - (cost_end - cost)[tile] - TILE_COST
    nearest = xp.clip((inside + UNIT_COST // 2) // UNIT_COST, 0, None)
    nearest = xp.minimum(nearest, units[tile])
    bound = xp.where(cta < ctas, unit_start[tile] + nearest, unit_end[-1])

    begin, end = bound[:-1], bound[1:]
    first = xp.clip(_count_up_to(unit_end, begin, xp), None, last_tile)
    last = xp.clip(_count_up_to(unit_end, end - 1, xp), None, last_tile)
    works = xp.clip(end - begin, 0, 1)
    fields = {
        RANGE_TILE: first,
        RANGE_TILES: works * (last - first + 1),
        RANGE_BEGIN: begin - unit_start[first],
        RANGE_END: end - unit_start[last],
    }
    return xp.stack([fields[i] for i in range(RANGE_FIELDS)], 1)


def _tile_of_rows(
    plan: MSAIcpScorePlan,
    first: Int32[AnyArray, " B"],
    running: Int32[AnyArray, " B"],
    tiles: int,
    xp: Namespace,
) -> Int32[AnyArray, " total_q"]:
    """The tile of each query row, -1 for rows of no segment.

    Segments that overlap (starts are device data) may need more `tiles` than there are: their rows
    past the last one belong to no segment, too.
    """
    row = _range(max(plan.total_q, 1), xp)
    ends = plan.qo_starts + plan.qo_lens
    segment = _segment_of(ends, row, xp)
    tile = _before(running, segment, xp) + row // TILE_TOKENS - first[segment]
    inside = (row >= plan.qo_starts[segment]) & (row < ends[segment])
    return xp.where(inside & (tile < tiles), tile, -1)


def _before(
    running: Int32[AnyArray, " B"], segment: Int32[AnyArray, " n"], xp: Namespace
) -> Int32[AnyArray, " n"]:
    """Tiles of the segments before each."""
    return xp.where(segment > 0, running[xp.clip(segment - 1, 0, None)], 0)


def _segment_of(
    ends: Int32[AnyArray, " B"], index: Int32[AnyArray, " n"], xp: Namespace
) -> Int32[AnyArray, " n"]:
    """The first segment whose (non-decreasing) end lies past index; the last one if none does."""
    return xp.clip(_count_up_to(ends, index, xp), None, ends.shape[0] - 1)


def _count_up_to(
    values: Int32[AnyArray, " m"], limit: Int32[AnyArray, " n"], xp: Namespace
) -> Int32[AnyArray, " n"]:
    """How many of the `values` are at most `limit`, for each limit."""
    return (values[None, :] <= limit[:, None]).sum(1, dtype=xp.int32)


def _running_sum(values: Int32[AnyArray, " n"], xp: Namespace) -> Int32[AnyArray, " n"]:
    return xp.cumsum(values, 0, dtype=xp.int32)


def _range(size: int, xp: Namespace) -> Int32[AnyArray, " size"]:
    return xp.arange(size, dtype=xp.int32)
