"""Runs kernel pieces that are written thread by thread (`ops/_mosaic/lanes.py`) in numpy.

A piece builds its program out of `Lane` values and a few functions. Given these stand-ins instead,
the same Python code computes at once, with one array element for each of a warpgroup's 128 threads.
Where threads branch apart, all sides run and a mask decides whose stores count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

THREADS, WARP = 128, 32
_masks: list[np.ndarray] = [np.full(THREADS, True)]


class Lane:
    """One value of each thread."""

    def __init__(self, value: Any) -> None:
        self.value = np.broadcast_to(np.asarray(value), (THREADS,))

    def _with(self, other: Any, op: Any) -> Lane:
        right = other.value if isinstance(other, Lane) else self.value.dtype.type(other)
        return Lane(op(self.value, right))

    __add__ = lambda a, b: a._with(b, np.add)  # noqa: E731
    __sub__ = lambda a, b: a._with(b, np.subtract)  # noqa: E731
    __mul__ = lambda a, b: a._with(b, np.multiply)  # noqa: E731
    __and__ = lambda a, b: a._with(b, np.bitwise_and)  # noqa: E731
    __or__ = lambda a, b: a._with(b, np.bitwise_or)  # noqa: E731
    __xor__ = lambda a, b: a._with(b, np.bitwise_xor)  # noqa: E731
    __lshift__ = lambda a, b: a._with(b, np.left_shift)  # noqa: E731
    __rshift__ = lambda a, b: a._with(b, np.right_shift)  # noqa: E731
    __lt__ = lambda a, b: a._with(b, np.less)  # noqa: E731
    __le__ = lambda a, b: a._with(b, np.less_equal)  # noqa: E731
    __gt__ = lambda a, b: a._with(b, np.greater)  # noqa: E731
    __ge__ = lambda a, b: a._with(b, np.greater_equal)  # noqa: E731
    __invert__ = lambda a: Lane(~a.value)  # noqa: E731
    eq = lambda a, b: a._with(b, np.equal)  # noqa: E731
    ne = lambda a, b: a._with(b, np.not_equal)  # noqa: E731

    def bits(self, of: type) -> Lane:
        return Lane(np.ascontiguousarray(self.value).view(of))

    def to_i32(self) -> Lane:
        return Lane(self.value.astype(np.int32))

    def to_i64(self) -> Lane:
        return Lane(self.value.astype(np.int64))


class Words:
    """A place in a memory of int32 words."""

    def __init__(self, memory: np.ndarray, at: Any = 0) -> None:
        self.memory, self.at = memory, np.broadcast_to(np.asarray(at, np.int64), (THREADS,))

    @staticmethod
    def of(memory: np.ndarray) -> Words:
        return Words(memory)

    def __add__(self, words: Any) -> Words:
        return type(self)(
            self.memory, self.at + (words.value if isinstance(words, Lane) else words)
        )

    def load(self, of: type = np.int32) -> Lane:
        inside = np.where(_masks[-1], self.at, 0)
        assert (inside >= 0).all(), "numpy would count from the end"
        return Lane(self.memory.view(np.int32)[inside].view(of))

    def load_vector(self, of: type, count: int) -> tuple[Lane, ...]:
        return tuple((self + i).load(of) for i in range(count))

    def store(self, value: Lane) -> None:
        live = _masks[-1]
        assert (self.at[live] >= 0).all(), "numpy would count from the end"
        self.memory.view(np.int32)[self.at[live]] = value.value.view(np.int32)[live]

    def store_vector(self, values: Sequence[Lane]) -> None:
        for i, value in enumerate(values):
            (self + i).store(value)


def running() -> np.ndarray:
    """Which threads run what is simulated now."""
    return _masks[-1]


@contextlib.contextmanager
def _when(condition: Lane) -> Iterator[None]:
    _masks.append(_masks[-1] & condition.value)
    yield
    _masks.pop()


def _where(condition: Lane, a: Any, b: Any) -> Lane:
    model = a if isinstance(a, Lane) else b
    a, b = (x if isinstance(x, Lane) else Lane(model.value.dtype.type(x)) for x in (a, b))
    return Lane(np.where(condition.value, a.value, b.value))


def _maximum(a: Lane, b: Any) -> Lane:
    return a._with(b, np.fmax)


def _minimum(a: Lane, b: Any) -> Lane:
    return a._with(b, np.fmin)


def _per_warp(x: Lane, op: Any) -> Lane:
    return Lane(np.repeat(op(x.value.reshape(-1, WARP), axis=1), WARP))


def _from_lane(x: Lane, source: Any) -> Lane:
    source = source.value if isinstance(source, Lane) else np.asarray(source)
    source = np.broadcast_to(source, (THREADS,))
    by_warp = x.value.reshape(-1, WARP), source.reshape(-1, WARP) % WARP
    return Lane(np.take_along_axis(*by_warp, axis=1).ravel())


def _choose(condition: Lane, _: Any, then: Any, otherwise: Any) -> tuple[Lane, ...]:
    with _when(condition):
        yes = then()
    with _when(Lane(~condition.value)):
        no = otherwise()
    return tuple(_where(condition, a, b) for a, b in zip(yes, no, strict=True))


def _loop(start: Lane, stop: Lane, step: int, carry: Any, body: Any) -> tuple[Lane, ...]:
    carry, i = tuple(carry), start
    while (i.value < stop.value)[_masks[-1]].any():
        goes_on = i < stop
        with _when(goes_on):
            after = body(i, *carry)
        carry = tuple(_where(goes_on, a, b) for a, b in zip(after, carry, strict=True))
        i = i + step
    return carry


def _repeat_while(carry: Any, condition: Any, body: Any) -> tuple[Lane, ...]:
    carry = tuple(carry)
    while (goes_on := Lane(condition(*carry).value & _masks[-1])).value.any():
        with _when(goes_on):
            after = body(*carry)
        carry = tuple(_where(goes_on, a, b) for a, b in zip(after, carry, strict=True))
    return carry


def ballot(condition: Lane) -> Lane:
    """Bit l: lane l's predicate, as int32."""
    bits = condition.value.reshape(-1, WARP).astype(np.uint64) << np.arange(WARP, dtype=np.uint64)
    return Lane(np.repeat(bits.sum(axis=1), WARP).astype(np.uint32).view(np.int32))


def _lowest_bit(x: Lane) -> Lane:
    low = (x.value & -x.value.astype(np.int64)).astype(np.float64)
    return Lane(np.log2(np.maximum(np.abs(low), 1)).astype(np.int32))


def _popcount(x: Lane) -> Lane:
    return Lane(np.bitwise_count(np.ascontiguousarray(x.value).view(np.uint32)).astype(np.int32))


def _mask(conditions: Sequence[Lane]) -> Lane:
    bits = sum(x.value.astype(np.uint64) << np.uint64(i) for i, x in enumerate(conditions))
    return Lane(bits.astype(np.uint32).view(np.int32))


def _which_pass(values: Sequence[Lane], threshold: Lane) -> Lane:
    """By the signs of differences, as the machine does it; a NaN's sign is positive there."""
    with np.errstate(invalid="ignore", over="ignore"):
        differences = [(threshold.value + np.float32(0)) - x.value for x in values]
    return _mask([Lane(np.signbit(x) & ~np.isnan(x)) for x in differences])


def _which_reach(values: Sequence[Lane], threshold: Lane) -> Lane:
    low = np.nextafter(
        np.where(threshold.value == 0, 0, threshold.value), -np.inf, dtype=np.float32
    )
    return _which_pass(values, Lane(low))


def _store_where(place: Words, value: Lane, wanted: Lane) -> None:
    with _when(wanted):
        place.store(value)


def _copy(
    place: Words, source: Words, words: int, wanted: Lane | None = None, further: int = 0
) -> None:
    with contextlib.nullcontext() if wanted is None else _when(wanted):
        (place + further).store_vector([(source + (further + i)).load() for i in range(words)])


def _low_bits(number: Lane) -> Lane:
    bits = (np.int64(1) << np.clip(number.value, 0, WARP).astype(np.int64)) - 1
    return Lane(bits.astype(np.uint32).view(np.int32))


def simulate(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    """Makes `module`'s pieces compute in numpy; memory references are flat arrays of words."""
    lanes = SimpleNamespace(
        constant=lambda x, of: Lane(of(x)),
        f32=lambda: np.float32,
        choose=_choose,
        loop=_loop,
        repeat_while=_repeat_while,
        lowest_bit=_lowest_bit,
        thread=lambda: Lane(np.arange(THREADS, dtype=np.int32)),
        clip=lambda x, low, high: _minimum(_maximum(x, low), high),
        minimum=_minimum,
        minimum_or_nan=lambda a, b: a._with(b, np.minimum),
        maximum=_maximum,
        maximum_of_negated=lambda a, b: _maximum(a, Lane(-b.value)),
        load_fresh=lambda place: place.load(),
        low_bits=_low_bits,
        popcount=_popcount,
        which_reach=_which_reach,
        which_pass=_which_pass,
        store_where=_store_where,
        copy=_copy,
        await_copies=lambda: None,
        when=_when,
        fresh=lambda x: x,
        warp_barrier=lambda: None,
        warp_from=_from_lane,
        warp_xor=lambda x, distance: _from_lane(x, np.arange(THREADS) ^ distance),
        warp_max=lambda x: _per_warp(x, np.max),
        warp_min=lambda x: _per_warp(x, np.min),
        warp_ballot=ballot,
        warp_any=lambda x: _per_warp(x, np.any),
    )
    names = {
        "lanes": lanes,
        "Lane": Lane,
        "Words": Words,
        "f32": lambda: np.float32,
        "i1": lambda: np.bool_,
        "i32": lambda: np.int32,
        "int32": lambda x: Lane(np.int32(x)),
        "maximum": _maximum,
        "minimum": _minimum,
        "when": _when,
        "where": _where,
    }
    for name, stand_in in names.items():
        monkeypatch.setattr(module, name, stand_in, raising=False)
