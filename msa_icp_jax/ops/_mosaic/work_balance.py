"""How a decode batch is divided over the CTAs of a grid, by the CTAs themselves.

The unit of work is a *step*: four neighbouring pages of a request, one a warp. Every warp reads all
lengths, sums the steps of the requests and takes its part of the total. No other kernel, no
atomics; a ragged batch is as balanced as an even one.

SMs do not read memory equally fast. So where there is much to do, the CTAs that fill the GPU take
equal parts of the first seven eighths, and as many *late* CTAs, which start one by one as the first
ones end, take small parts of the rest: fast SMs get more of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from msa_icp_jax.ops._mosaic import lanes
from msa_icp_jax.ops._mosaic.lanes import Lane, Words, int32, where
from msa_icp_jax.ops._mosaic.launch import CTA

STEP_PAGES = 4
WARP = 32
_LATE_SHIFT = 3  # late CTAs take an eighth of all steps
_SCALAR = plgpu.Layout.WG_SPLAT


@dataclasses.dataclass(frozen=True)
class Batch:
    """Static facts of a decode batch.

    Attributes:
      requests: requests B.
      page_size: positions of a page, a power of two.
      columns: score columns of a request; its pages past them are left out.
    """

    requests: int
    page_size: int
    columns: int

    def pages(self, length: Any) -> Any:
        """Pages of a request of `length` tokens (a traced scalar or array)."""
        shift = self.page_size.bit_length() - 1
        # (length - 1 >> shift) + 1 is the ceiling without overflow at any int32 length.
        return jnp.minimum((jnp.maximum(length, 0) - 1 >> shift) + 1, self.columns)

    def steps(self, length: Any) -> Any:
        """Steps of a request of `length` tokens."""
        return self.pages(length) + STEP_PAGES - 1 >> 2

    def pages_in_lane(self, length: Lane) -> Lane:
        """`pages` for inline code."""
        shift = self.page_size.bit_length() - 1
        return lanes.minimum((lanes.maximum(length, 0) - 1 >> shift) + 1, self.columns)

    def steps_in_lane(self, length: Lane) -> Lane:
        """`steps` for inline code."""
        return self.pages_in_lane(length) + (STEP_PAGES - 1) >> 2


@dataclasses.dataclass(frozen=True)
class Grid:
    """CTAs of a launch: `resident` ones that fill the GPU, then `late` ones (or none)."""

    resident: int
    late: int

    @property
    def ctas(self) -> int:
        """All of them."""
        return self.resident + self.late


class Share(NamedTuple):
    """A CTA's part: `steps` steps from step `first` of `request` on, running into later requests.

    `length` is the length of `request`. With no steps the other fields mean nothing.
    """

    request: Any
    length: Any
    first: Any
    steps: Any


def find_share(lengths: Any, batch: Batch, grid: Grid, interpret: bool) -> Share:
    """This CTA's share.

    Args:
      lengths: ref of the lengths, int32 [B].
      batch: see `Batch`.
      grid: the CTAs that share the batch.
      interpret: take the stock ops.
    """
    find = _find_share_stock if interpret else _find_share_inline
    return find(lengths, batch, grid)


def _find_share_stock(lengths: Any, batch: Batch, grid: Grid) -> Share:
    values = lengths[...]
    ends = jnp.cumsum(batch.steps(values))
    start, steps = _part_stock(ends[-1], lax.axis_index(CTA), grid)
    passed = jnp.sum(ends <= start)
    request = jnp.minimum(passed, batch.requests - 1)
    first = start - jnp.where(passed > 0, ends[jnp.maximum(request - 1, 0)], 0)
    return Share(request, values[request], first, steps)


def _part_stock(total: Any, cta: Any, grid: Grid) -> tuple[Any, Any]:
    def equal(total: Any, ctas: int, cta: Any) -> tuple[Any, Any]:
        base, rest = total // ctas, total % ctas
        return cta * base + jnp.minimum(cta, rest), base + jnp.where(cta < rest, 1, 0)

    if not grid.late:
        return equal(total, grid.ctas, cta)
    early = total - (total >> _LATE_SHIFT)
    start, steps = equal(early, grid.resident, cta)
    late_start, late_steps = equal(total - early, grid.late, cta - grid.resident)
    first_ones = cta < grid.resident
    return jnp.where(first_ones, start, early + late_start), jnp.where(
        first_ones, steps, late_steps
    )


def _find_share_inline(lengths: Any, batch: Batch, grid: Grid) -> Share:
    scalar = plgpu.ShapeDtypeStruct((), np.dtype(np.int32), _SCALAR)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), _SCALAR), return_type=(scalar, scalar, scalar, scalar)
    )
    def find(_: Any, lengths: Any, cta: Any) -> Any:
        cta = lanes.scalar(cta)
        lane = lanes.thread() & (WARP - 1)
        values = _load_lengths(Words.of(lengths), lane, batch.requests)
        ends, total = [], int32(0)
        for value in values:
            ends.append(lanes.warp_prefix_sum(batch.steps_in_lane(value), lane) + total)
            total = lanes.warp_from(ends[-1], WARP - 1)

        start, steps = _part_inline(total, cta, grid)
        request, before, length = int32(0), int32(0), int32(0)
        for end in ends:
            passed = lanes.popcount(lanes.warp_ballot(end <= start))
            request += passed
            before = where(passed > 0, _of_lane(end, (passed - 1) & 31), before)
        for chunk, value in enumerate(values):
            length = where((request >> 5).eq(chunk), _of_lane(value, request & 31), length)
        return tuple(_scalar_result(x) for x in (request, length, start - before, steps))

    return Share(*find(lengths, lax.axis_index(CTA)))


def _part_inline(total: Lane, cta: Lane, grid: Grid) -> tuple[Lane, Lane]:
    def equal(total: Lane, ctas: int, cta: Lane) -> tuple[Lane, Lane]:
        base = Lane(arith.divui(total.value, int32(ctas).value))
        rest = total - base * ctas
        return cta * base + lanes.minimum(cta, rest), base + (cta < rest).to_i32()

    if not grid.late:
        return equal(total, grid.ctas, cta)
    early = total - (total >> _LATE_SHIFT)
    start, steps = equal(early, grid.resident, cta)
    late_start, late_steps = equal(total - early, grid.late, cta - grid.resident)
    first_ones = cta < grid.resident
    return where(first_ones, start, early + late_start), where(first_ones, steps, late_steps)


def _load_lengths(lengths: Words, lane: Lane, requests: int) -> list[Lane]:
    """All lengths, 32 a register, 0 past the last; all loads are under way together."""
    values = []
    for chunk in range(0, requests, WARP):
        at = lanes.minimum(lane + chunk, requests - 1)
        value = load_fresh(lengths + at)
        values.append(where(lane + chunk < requests, value, 0))
    return values


def load_fresh(place: Words) -> Lane:
    """A 32-bit integer from global memory, never from this SM's cache.

    What was read as a hint before the earlier kernel ended may have changed since.
    """
    return lanes.ptx("ld.relaxed.gpu.global.b32 $0, [$1];", Lane(place.pointer), result=lanes.i32())


def _of_lane(x: Lane, lane: Lane) -> Lane:
    """x of a lane chosen at run time."""
    text = f"shfl.sync.idx.b32 $0, $1, $2, 31, {lanes.ALL_LANES};"
    return lanes.ptx(text, x, lane, result=lanes.i32(), collective=True)


def _scalar_result(x: Lane) -> Any:
    return mgpu.FragmentedArray.splat(x.value, (), is_signed=True)
