"""Order keys, entries and running lists: what the Top16 kernels share, thread by thread.

An *entry* is an unsigned 64-bit integer that stands for a column and its score: the order key (sign
flipped) above 0x7fffffff - column. The larger entry comes first in the contract's order, no two are
equal, and 0 is below them all.
"""

from __future__ import annotations

from collections.abc import Sequence

from msa_icp_jax.ops._mosaic import lanes
from msa_icp_jax.ops._mosaic.lanes import Lane, Words, f32, i32, i64, int32, where

LAST_COLUMN = 0x7FFFFFFF
LIST_ENTRIES = 64  # most that a running list holds: two a lane
LIST_WORDS = 2 * (LIST_ENTRIES + 4)  # in shared memory; the last four pad a group of four
_WARP = 32
_NO_ENTRY = 0


def order_key(score: Lane) -> Lane:
    """The int32 key that orders as the contract orders scores; see `rows.order_keys`."""
    score = where(score.ne(score), float("-inf"), score)
    score = where(score.eq(0.0), 0.0, score)
    return flip(score.bits(i32()))


def order_key_of_word(word: Lane) -> Lane:
    """The order key of a score's bits."""
    return order_key(word.bits(f32()))


def flip_sign(key: Lane) -> Lane:
    """A signed key as one that orders unsigned, and back."""
    return key ^ -(1 << 31)


def flip(word: Lane) -> Lane:
    """Float bits (not NaN) to key and back: negative floats order in reverse."""
    return word ^ ((word >> 31) & 0x7FFFFFFF)


def entry(key: Lane, column: Lane) -> Lane:
    """The 64-bit entry of a column and its order key."""
    return (flip_sign(key).to_i64() << 32) | (int32(LAST_COLUMN) - column).to_i64()


def entry_column(of: Lane) -> Lane:
    """The column of an entry."""
    return int32(LAST_COLUMN) - of.to_i32()


def entry_key(of: Lane) -> Lane:
    """The order key of an entry."""
    return flip_sign((of >> 32).to_i32())


def count_better(
    entries: Words,
    count: Lane | int,
    mine: Sequence[Lane],
    part: Lane | None = None,
    parts: int = 1,
) -> list[Lane]:
    """How many of the first `count` unsigned 64-bit entries in shared memory exceed each of `mine`.

    They are read in pairs, `parts` threads taking every parts-th pair. The entries behind them, up
    to a multiple of four, must be 0.
    """
    # Three instructions an entry: the borrow of a 64-bit subtraction is counted, with a minus sign.
    text = """{ .reg .b32 t, a, b, x, y; mov.b64 {a, b}, $1; mov.b64 {x, y}, $2;
        sub.cc.u32 t, a, x; subc.cc.u32 t, b, y; subc.u32 $0, $3, 0; }"""
    start = entries if part is None else entries + part * 4
    minus = [int32(0)] * len(mine)

    def pair(minus: Sequence[Lane], at: Words) -> list[Lane]:
        for other in at.load_vector(i64(), 2):
            minus = [
                lanes.ptx(text, x, other, m, result=i32(), pure=True)
                for x, m in zip(mine, minus, strict=True)
            ]
        return list(minus)

    def two_pairs(i: Lane, *minus: Lane) -> list[Lane]:
        return pair(pair(minus, start + i * 2), start + (i * 2 + 4))

    if isinstance(count, int):
        for i in range(0, 2 * count, 4 * parts):
            minus = pair(minus, start + i)
    else:
        minus = list(lanes.loop(int32(0), count, 4, minus, two_pairs))
    return [int32(0) - m for m in minus]


class RunningTop16:
    """A warp's list of the best entries of columns that come in ascending order.

    The list lies in shared memory (`LIST_WORDS` words, 16-byte aligned) and its state, carried
    through the caller's loop, is (entries held, key to exceed). `insert` takes one column a lane.
    """

    def __init__(self, entries: Words, need: Lane, lane: Lane) -> None:
        self.entries, self.need, self.lane = entries, need, lane

    def insert(
        self, score: Lane, column: Lane, valid: Lane, state: tuple[Lane, ...]
    ) -> tuple[Lane, ...]:
        """Adds the lanes' columns that may still win; cuts the list where it grew long."""
        held, key_to_exceed = state
        key = order_key(score)
        enters = valid & (key > key_to_exceed)
        ballot = lanes.warp_ballot(enters)
        place = held + lanes.popcount(ballot & ((int32(1) << self.lane) - 1))
        with lanes.when(enters):
            (self.entries + place * 2).store(entry(key, column))
        held = held + lanes.popcount(ballot)
        return lanes.choose(
            held > LIST_ENTRIES - _WARP,
            [i32(), i32()],
            lambda: self.cut(held),
            lambda: [held, key_to_exceed],
        )

    def cut(self, held: Lane) -> list[Lane]:
        """Keeps the best `need` of the entries held, best first.

        Columns still to come must beat the last of them, for they have higher ids.
        """
        self._pad(held)
        lanes.warp_barrier()
        mine = [self._mine(i, held) for i in range(2)]
        ranks = count_better(self.entries, held, mine)
        lanes.warp_barrier()
        for x, rank in zip(mine, ranks, strict=True):
            with lanes.when((rank < self.need) & x.ne(_NO_ENTRY)):
                (self.entries + rank * 2).store(x)
        lanes.warp_barrier()
        kept = lanes.minimum(held, self.need)
        last = (self.entries + lanes.maximum(kept - 1, 0) * 2).load(i64())
        return [kept, entry_key(last)]

    def _pad(self, held: Lane) -> None:
        with lanes.when(self.lane < 4):
            (self.entries + (held + self.lane) * 2).store(lanes.constant(_NO_ENTRY, i64()))

    def _mine(self, which: int, held: Lane) -> Lane:
        """This lane's first or second entry of the list."""
        index = self.lane + which * _WARP
        found = (self.entries + index * 2).load(i64())
        return where(index < held, found, _NO_ENTRY)
