"""The prefill window plan in torch operations: the JAX package's leaves, bit for bit.

See `msa_icp_jax.ops.prefill_plan.balance` for what the tables mean; this is the same arithmetic.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from msa_icp_jax import MSAIcpScorePlan
from msa_icp_jax.geometry import BLOCK_SIZE, HEAD_DIM, MAX_SUM, MAX_TOKENS, cdiv
from msa_icp_jax.ops.prefill_plan import balance
from msa_icp_jax.ops.prefill_plan.balance import PrefillWork

_LENGTHS = ("qo_starts", "qo_lens", "kv_lens", "qo_offset")


@dataclasses.dataclass(frozen=True, eq=False)
class WindowPlan(MSAIcpScorePlan):
    """A window plan whose leaves are torch tensors, for the direct route."""

    def num_valid_pages(self, num_tokens: int | None = None) -> Any:
        """Visible blocks int32 [num_tokens] of every query row, 0 for padding rows."""
        starts: Any = self.qo_starts
        row = _range(self.total_q if num_tokens is None else num_tokens, starts)
        if self.num_segments == 0:
            return torch.zeros_like(row)
        inside = row[:, None] - starts
        live = (inside >= 0) & (inside < self.qo_lens)
        position = torch.where(live, inside + self.qo_offset, -1).amax(dim=1)
        return torch.where(position >= 0, position // BLOCK_SIZE + 1, 0)


def hidden_keys(device: torch.device) -> torch.Tensor:
    """NaN keys: float8_e4m3fn [128, 128], loaded in place of pages that cannot be read."""
    codes = torch.full((HEAD_DIM, HEAD_DIM), 0x7F, dtype=torch.uint8, device=device)
    return codes.view(torch.float8_e4m3fn)


def build(
    lengths: tuple[torch.Tensor, ...],
    hidden: torch.Tensor,
    *,
    total_q: int,
    max_query_len: int,
    max_seq_len: int,
    ctas: int,
) -> WindowPlan:
    """`MSAIcpIndexerPlan.prefill_window_plan` of the Mosaic backend, for a grid of `ctas`.

    `lengths` are qo_segment_lens, kv_segment_lens and qo_offset, `hidden` is from `hidden_keys`.
    """
    qo_segment_lens, kv_segment_lens, qo_offset = lengths
    sums = qo_segment_lens.clamp(0, MAX_SUM).cumsum(0, dtype=torch.int64).clamp(max=MAX_SUM)
    starts = torch.cat([sums.new_zeros(1), sums])[:-1].to(torch.int32).clamp(max=total_q)
    lens: dict[str, Any] = {
        "qo_starts": starts,
        "qo_lens": torch.minimum(qo_segment_lens.clamp(0, max_query_len), total_q - starts),
        "kv_lens": kv_segment_lens.clamp(0, max_seq_len),
        "qo_offset": qo_offset.clamp(max=MAX_TOKENS),
    }
    plan = WindowPlan(**lens, total_q=total_q, max_query_len=max_query_len, max_seq_len=max_seq_len)
    if plan.num_segments == 0:
        return plan
    return dataclasses.replace(plan, work=_work(plan, hidden, ctas))


def leaves(plan: Any) -> dict[str, torch.Tensor]:
    """The tensors of a window plan by name, in the order that kernels take them."""
    lengths = {name: getattr(plan, name) for name in _LENGTHS}
    if plan.work is None:
        return lengths
    return lengths | {f"work.{name}": leaf for name, leaf in plan.work._asdict().items()}


@functools.cache
def shapes(
    segments: int, total_q: int, ctas: int
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """What `leaves` must be like: the dtype and shape of each, by name."""
    nowhere = torch.device("meta")
    lengths = torch.zeros((3, segments), dtype=torch.int32, device=nowhere).unbind()
    bounds = {"total_q": total_q, "max_query_len": 0, "max_seq_len": 0}
    plan = build(lengths, hidden_keys(nowhere), ctas=ctas, **bounds)
    return {name: (leaf.dtype, tuple(leaf.shape)) for name, leaf in leaves(plan).items()}


def _work(plan: Any, hidden: torch.Tensor, ctas: int) -> PrefillWork:
    first = plan.qo_starts // balance.TILE_TOKENS
    ends = plan.qo_starts + plan.qo_lens
    count = torch.where(plan.qo_lens > 0, cdiv(ends, balance.TILE_TOKENS) - first, 0)
    running = _running_sum(count)
    tiles = _tiles(plan, first, running)
    ranges, slots = _equal_ranges(cdiv(tiles[:, balance.SCORED], balance.UNIT_POSITIONS), ctas)
    tiles = torch.cat([tiles, slots], dim=1)
    first_tiles = tiles[ranges[:, balance.RANGE_TILE]]
    leaves: dict[str, Any] = {
        "ranges": torch.cat([ranges, first_tiles], dim=1),
        "tiles": tiles,
        "tile_of": _tile_of_rows(plan, first, running),
        "hidden": hidden,
        "counters": tiles.new_zeros((tiles.shape[0], balance.COUNTERS)),
    }
    return PrefillWork(**leaves)


def _tiles(plan: Any, first: torch.Tensor, running: torch.Tensor) -> torch.Tensor:
    starts, ends = plan.qo_starts, plan.qo_starts + plan.qo_lens
    index = _range(cdiv(plan.total_q, balance.TILE_TOKENS) + plan.num_segments, starts)
    segment = _segment_of(running, index)
    tile = first[segment] + index - _before(running, segment)
    row = tile * balance.TILE_TOKENS
    begin = torch.maximum(starts[segment], row)
    end = torch.minimum(ends[segment], row + balance.TILE_TOKENS)
    position = plan.qo_offset[segment] + row - starts[segment]
    keys = plan.kv_lens[segment]
    fields = {
        balance.TILE: tile,
        balance.FIRST_ROW: begin - row,
        balance.END_ROW: end - row,
        balance.SEGMENT: segment,
        balance.POSITION: position,
        balance.KEYS: keys,
        balance.SCORED: torch.minimum((position + end - row).clamp(min=0), keys),
    }
    table = torch.stack([fields[i] for i in range(balance.FIRST_SLOT)], dim=1)
    return torch.where((index < running[-1])[:, None], table, 0)


def _equal_ranges(units: torch.Tensor, ctas: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ranges [ctas, RANGE_FIELDS] and the tiles' (FIRST_SLOT, PARTS) [n, 2]."""
    last_tile = units.shape[0] - 1
    cost = torch.where(units > 0, units * balance.UNIT_COST + balance.TILE_COST, 0)
    cost_end, unit_end = _running_sum(cost), _running_sum(units)
    unit_start = unit_end - units

    share, rest = cost_end[-1] // ctas, cost_end[-1] % ctas
    cta = _range(ctas + 1, units)
    cut = cta * share + torch.minimum(cta, rest)
    tile = _count_up_to(cost_end, cut).clamp(max=last_tile)
    inside = cut - (cost_end - cost)[tile] - balance.TILE_COST
    nearest = (inside + balance.UNIT_COST // 2) // balance.UNIT_COST
    nearest = torch.minimum(nearest.clamp(min=0), units[tile])
    bound = torch.where(cta < ctas, unit_start[tile] + nearest, unit_end[-1])

    begin, end = bound[:-1], bound[1:]
    first = _count_up_to(unit_end, begin).clamp(max=last_tile)
    last = _count_up_to(unit_end, end - 1).clamp(max=last_tile)
    works = end > begin
    number = _running_sum(works) - works.to(torch.int32)
    fields = {
        balance.RANGE_TILE: first,
        balance.RANGE_TILES: torch.where(works, last - first + 1, 0),
        balance.RANGE_BEGIN: begin - unit_start[first],
        balance.RANGE_END: end - unit_start[last],
        balance.RANGE_SLOT: first + number,
    }
    ranges = torch.stack([fields[i] for i in range(balance.RANGE_FIELDS)], dim=1)

    opener = number[_count_up_to(end, unit_start).clamp(max=ctas - 1)]
    closer = number[_count_up_to(end, unit_end - 1).clamp(max=ctas - 1)]
    slot = _range(units.shape[0], units) + opener
    return ranges, torch.stack([slot, torch.where(units > 0, closer - opener + 1, 0)], dim=1)


def _tile_of_rows(plan: Any, first: torch.Tensor, running: torch.Tensor) -> torch.Tensor:
    """The tile of each query row, -1 for rows of no segment."""
    row = _range(max(plan.total_q, 1), running)
    ends = plan.qo_starts + plan.qo_lens
    segment = _segment_of(ends, row)
    inside = (row >= plan.qo_starts[segment]) & (row < ends[segment])
    tile = _before(running, segment) + row // balance.TILE_TOKENS - first[segment]
    return torch.where(inside, tile, -1)


def _before(running: torch.Tensor, segment: torch.Tensor) -> torch.Tensor:
    """Tiles of the segments before each."""
    return torch.where(segment > 0, running[segment - 1], 0)


def _segment_of(ends: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The first segment whose end lies past index; the last one if none does."""
    return _count_up_to(ends, index).clamp(max=ends.shape[0] - 1)


def _count_up_to(values: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """How many of the values are at most `limit`, for each limit."""
    return (values[None, :] <= limit[:, None]).sum(dim=1, dtype=torch.int32)


def _running_sum(values: torch.Tensor) -> torch.Tensor:
    return values.cumsum(0, dtype=torch.int32)


def _range(size: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(size, dtype=torch.int32, device=like.device)
