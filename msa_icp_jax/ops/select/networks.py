"""Sorting networks on lists of floats in a thread's registers, largest first and NaN last."""

from __future__ import annotations

from msa_icp_jax.ops._mosaic import lanes
from msa_icp_jax.ops._mosaic.lanes import Lane


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


def _exchange(values: list[Lane], i: int, j: int) -> None:
    """Puts the larger value first."""
    a, b = values[i], values[j]
    values[i], values[j] = lanes.maximum(a, b), lanes.minimum_or_nan(a, b)
