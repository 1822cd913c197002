"""Memory that kernels of several GPUs use at once: loads and stores at system scope.

Two ways to hand a row over. A *flag* stored with release after the row, and loaded with acquire
before it, orders every word of the row; a *tagged* word travels with its tag in one 64-bit access,
so a reader sees each word whole and needs no order among them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from msa_icp_jax.geometry import NUM_SLOTS
from msa_icp_jax.ops._mosaic import lanes
from msa_icp_jax.ops._mosaic.lanes import Lane, Words, i64, int32, where

_GMEM = 1  # NVPTX address space


def at_address(place: Words) -> Words:
    """The memory at a device address, which lies as two words (low, high) at `place`."""
    return _memory(*((place + i).load() for i in range(2)))


def at_address_of(places: Words, number: Lane, count: int) -> Words:
    """The memory at one of `count` device addresses, which lie in turn at `places`.

    All are loaded, so that none of the loads waits for `number`.
    """
    pairs = [[(places + (2 * i + half)).load() for half in range(2)] for i in range(count)]
    found = pairs[0]
    for i, pair in enumerate(pairs):
        found = [where(number.eq(i), x, last) for x, last in zip(pair, found, strict=True)]
    return _memory(*found)


def _memory(low: Lane, high: Lane) -> Words:
    unsigned = (Lane(arith.extui(i64(), x.value)) for x in (low, high))
    address = next(unsigned) | (next(unsigned) << 32)
    return Words(llvm.inttoptr(llvm.PointerType.get(_GMEM), address.value))


def slot_from(count: Lane) -> Lane:
    """The slot of a running count of calls (not negative)."""
    return Lane(arith.remui(count.value, int32(NUM_SLOTS).value))


def load_flag(place: Words) -> Lane:
    """Loads a flag; what was stored before the flag's release is seen by later loads."""
    return lanes.ptx("ld.acquire.sys.global.b32 $0, [$1];", _address(place), result=lanes.i32())


def store_flag(place: Words, flag: int) -> None:
    """Stores a flag behind all that this thread has stored or has seen stored."""
    lanes.ptx("st.release.sys.global.b32 [$0], $1;", _address(place), int32(flag))


def store_word(place: Words, word: Lane) -> None:
    """Stores a word, in no order with others: one of a row whose flag follows, say."""
    lanes.ptx("st.relaxed.sys.global.b32 [$0], $1;", _address(place), word)


def load_tagged(place: Words) -> tuple[Lane, Lane]:
    """Loads (word, tag)."""
    text = "ld.relaxed.sys.global.b64 $0, [$1];"
    pair = lanes.ptx(text, _address(place), result=i64())
    return pair.to_i32(), (pair >> 32).to_i32()


def store_tagged(place: Words, word: Lane, tag: Lane) -> None:
    """Stores (word, tag)."""
    pair = (word.to_i64() & 0xFFFFFFFF) | (tag.to_i64() << 32)
    lanes.ptx("st.relaxed.sys.global.b64 [$0], $1;", _address(place), pair)


def poll(
    look: Callable[[], Sequence[Lane]], ready: Callable[..., Lane], limit: int
) -> tuple[Lane, ...]:
    """What look() gave when it was first ready(*values), or at the last of `limit` looks."""

    def goes_on(looks: Lane, *values: Lane) -> Lane:
        return (looks < limit) & (ready(*values) ^ 1)

    def once_more(looks: Lane, *_: Lane) -> Sequence[Lane]:
        return [looks + 1, *look()]

    return lanes.repeat_while([int32(1), *look()], goes_on, once_more)[1:]


def _address(place: Words) -> Any:
    assert isinstance(place.pointer, ir.Value)
    return Lane(place.pointer)
