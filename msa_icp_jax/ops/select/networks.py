"""Sorting networks on lists of floats in a thread's registers, largest first and NaN last."""

from __future__ import annotations

import functools

from msa_icp_jax.ops._mosaic import lanes
from msa_icp_jax.ops._mosaic.lanes import Lane, f32, i32


def best_half(a: list[Lane], b: list[Lane]) -> list[Lane]:
    """The larger half of two descending lists of the same length, as a bitonic sequence."""
    return [lanes.maximum(x, y) for x, y in zip(a, b[::-1], strict=True)]


def descending(values: list[Lane]) -> list[Lane]:
    """Descending, by Batcher's odd-even merge network (the length is a power of two)."""
    values, size = list(values), len(values)
    run = 1
    while run < size:
        step = run
        while step:
            for start in range(step % run, size - step, 2 * step):
                for i in range(start, min(start + step, size - step)):
                    if i // (2 * run) == (i + step) // (2 * run):
                        _exchange(values, i, i + step)
            step //= 2
        run *= 2
    return values


def descending_of_bitonic(values: list[Lane]) -> list[Lane]:
    """A bitonic sequence (rising then falling, or rotated), descending."""
    values, step = list(values), len(values) // 2
    while step:
        for i in range(len(values)):
            if not i & step:
                _exchange(values, i, i + step)
        step //= 2
    return values


def sixteenth_of_quad(values: list[Lane], lane: Lane) -> Lane:
    """The 16th largest of the 32 values, none of them NaN, that four neighbouring lanes hold.

    Each lane has 8, and each gets the answer. Odd lanes work on negated values, so that what is the
    smaller half for them is a maximum, too.
    """
    negated = (lane & 1) << 31
    mine = descending([(x.bits(i32()) ^ negated).bits(f32()) for x in values])
    # Lanes 0 and 1 (2 and 3) become a descending list of 16, the latter's half upside down.
    mine = descending_of_bitonic(_larger_half(mine, 1))
    # Lanes 0 and 2 have each a half of the larger half of both lists.
    least = functools.reduce(lanes.minimum, _larger_half(mine, 3))
    least = lanes.minimum(least, _from_lane(least, 2))
    return lanes.warp_from(least.bits(i32()), lane & -2).bits(f32())


def _larger_half(mine: list[Lane], distance: int) -> list[Lane]:
    """The larger ones of this lane's values and of another one's, which are negated."""
    return [lanes.maximum_of_negated(x, _from_lane(x, distance)) for x in mine]


def _from_lane(x: Lane, distance: int) -> Lane:
    return lanes.warp_xor(x.bits(i32()), distance).bits(f32())


def _exchange(values: list[Lane], i: int, j: int) -> None:
    """Puts the larger value first."""
    a, b = values[i], values[j]
    values[i], values[j] = lanes.maximum(a, b), lanes.minimum_or_nan(a, b)
