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
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith

from msa_icp_jax.geometry import round_up
from msa_icp_jax.ops._mosaic import lanes
from msa_icp_jax.ops._mosaic.lanes import Context, Lane, Memory, Value, Words, int32, where
from msa_icp_jax.ops._mosaic.launch import CTA, ScratchTypes
from msa_icp_jax.ops.decode_score import config

STEP_PAGES = 4
WARP = 32
_SCALAR = plgpu.Layout.WG_SPLAT
PER_THREAD = plgpu.Layout.WG_STRIDED((4 * WARP,), vec_size=1)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Static parameters of a decode batch.

    Attributes:
      requests: requests B.
      page_size: positions of a page, a power of two.
      columns: score columns of a request; its pages past them are left out.
    """

    requests: int
    page_size: int
    columns: int

    def scratch(self) -> ScratchTypes:
        """Shared memory of a CTA: the lengths."""
        return {"kept_lengths": plgpu.SMEM((round_up(self.requests, 4 * WARP),), jnp.int32)}

    def read_lengths(self, lengths: jax.Ref) -> list[jax.Array]:
        """Starts to read the lengths, a ref of int32 [B], for `find_work`."""
        return _read_lengths(lengths, self)

    def keep_lengths(self, kept: jax.Ref, values: list[jax.Array]) -> None:
        """Keeps what `read_lengths` returned in shared memory; a barrier has to follow."""
        _keep_lengths(kept, values)

    def find_work(self, values: list[jax.Array], grid: Grid) -> Work:
        """This CTA's work of the batch among `grid`, from what `read_lengths` returned."""
        return _find_work(values, self, grid)

    def pages(self, length: jax.Array) -> jax.Array:
        """Pages of a request of `length` tokens (a traced scalar or array)."""
        shift = self.page_size.bit_length() - 1
        # (length - 1 >> shift) + 1 is the ceiling without overflow at any int32 length.
        return jnp.minimum((jnp.maximum(length, 0) - 1 >> shift) + 1, self.columns)

    def steps(self, length: jax.Array) -> jax.Array:
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

    @property
    def late_from(self) -> int:
        """Steps of a batch from which on the late CTAs get some."""
        return config.CONFIG.late_from * self.resident


class Work(NamedTuple):
    """A CTA's part: `steps` steps from step `first` of `request` on, running into later requests.

    `length` is the length of `request`, which is always one of the batch. With no steps the other
    fields mean nothing.
    """

    request: jax.Array
    length: jax.Array
    first: jax.Array
    steps: jax.Array


def _read_lengths(lengths: jax.Ref, batch: Batch) -> list[jax.Array]:
    """All lengths in every warp, 32 an array, 0 past the last."""
    chunks = range(0, batch.requests, WARP)
    result = plgpu.ShapeDtypeStruct((4 * WARP,), np.dtype(np.int32), PER_THREAD)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=(result,) * len(chunks))
    def read(_: Context, lengths: Memory) -> tuple[Value, ...]:
        lane = lanes.thread() & (WARP - 1)
        values = []
        for chunk in chunks:
            at = lanes.minimum(lane + chunk, batch.requests - 1)
            value = lanes.load_fresh(Words.of(lengths) + at)
            value = where(lane + chunk < batch.requests, value, 0)
            values.append(lanes.as_array([value], PER_THREAD))
        return tuple(values)

    return list(read(lengths))


def _keep_lengths(kept: jax.Ref, values: list[jax.Array]) -> None:
    """Every warp has all of them: warp w stores array w, w + 4 and so on."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[PER_THREAD] * len(values)))
    def keep(_: Context, kept: Memory, *values: Value) -> None:
        warp, lane = lanes.thread() >> 5, lanes.thread() & (WARP - 1)
        for i, value in enumerate(values):
            with lanes.when(warp.eq(i % 4)):
                (Words.of(kept) + (i * WARP + lane)).store(*lanes.of_array(value))

    keep(kept, *values)


def _find_work(lengths: list[jax.Array], batch: Batch, grid: Grid) -> Work:
    scalar = plgpu.ShapeDtypeStruct((), np.dtype(np.int32), _SCALAR)

    @plgpu.inline_mgpu(
        arg_types=(_SCALAR, *[PER_THREAD] * len(lengths)),
        return_type=(scalar, scalar, scalar, scalar),
    )
    def find(_: Context, cta: Value, *lengths: Value) -> tuple[Value, ...]:
        lane = lanes.thread() & (WARP - 1)
        values = [x for chunk in lengths for x in lanes.of_array(chunk)]
        work = work_in_lanes(values, lanes.scalar(cta), lane, batch, grid)
        return tuple(lanes.as_scalar(x) for x in work)

    return Work(*find(lax.axis_index(CTA), *lengths))


def work_in_lanes(
    values: list[Lane], cta: Lane, lane: Lane, batch: Batch, grid: Grid
) -> tuple[Lane, Lane, Lane, Lane]:
    """The fields of a CTA's `Work`, from lengths of requests (32 i + lane)."""
    ends, total = step_ends(values, batch, lane)
    start, steps = _part(total, cta, grid)
    request, before, length = int32(0), int32(0), int32(0)
    for end in ends:
        passed = lanes.popcount(lanes.warp_ballot(end <= start))
        request = request + passed
        before = where(passed > 0, lanes.warp_from(end, (passed - 1) & 31), before)
    # Without steps all ends are passed, those of the lanes behind the last request too.
    request = lanes.minimum(request, batch.requests - 1)
    for chunk, value in enumerate(values):
        length = where((request >> 5).eq(chunk), lanes.warp_from(value, request & 31), length)
    return request, length, start - before, steps


def step_ends(values: list[Lane], batch: Batch, lane: Lane) -> tuple[list[Lane], Lane]:
    """For lengths of requests (32 i + lane): the steps up to each one's end, and of all."""
    # All sums go on together: a shuffle takes its time, but not its turn.
    ends = lanes.warp_prefix_sums([batch.steps_in_lane(value) for value in values], lane)
    totals = [lanes.warp_from(end, WARP - 1) for end in ends]
    total = int32(0)
    for i, (end, of_chunk) in enumerate(zip(ends, totals, strict=True)):
        ends[i] = end + total
        total = total + of_chunk
    return ends, total


def divide(a: Lane, b: Lane) -> Lane:
    """The quotient of integers that are not negative."""
    return Lane(arith.divui(a.value, b.value))


def _part(total: Lane, cta: Lane, grid: Grid) -> tuple[Lane, Lane]:
    def equal(total: Lane, ctas: int, cta: Lane) -> tuple[Lane, Lane]:
        base = divide(total, int32(ctas))
        rest = total - base * ctas
        return cta * base + lanes.minimum(cta, rest), base + (cta < rest).to_i32()

    if not grid.late:
        return equal(total, grid.ctas, cta)
    early = total - where(total >= grid.late_from, total >> config.CONFIG.late_shift, 0)
    start, steps = equal(early, grid.resident, cta)
    late_start, late_steps = equal(total - early, grid.late, cta - grid.resident)
    first_ones = cta < grid.resident
    return where(first_ones, start, early + late_start), where(first_ones, steps, late_steps)
