"""Top16 of sixteen short rows at once: two lanes a row, in registers.

The first lane of a row has the lower half of its columns, the second lane the upper half. Each
keeps the 16 largest values that it has met, in order, by sorting networks; joined they give the
row's 16th largest, the *bar*. The columns that reach it are the answer if there are exactly 16 of
them, however the bar came about; otherwise (scores that tie at the bar, NaN in the network) the
caller has to take another way. The first lane puts its winners in places 0, 1, .. of the row, the
second lane in places 15, 14, .., so that neither needs to know the other's number.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from msa_icp_jax.geometry import TOPK
from msa_icp_jax.ops._mosaic import lanes
from msa_icp_jax.ops._mosaic.lanes import Lane, Words, f32, i32, int32, where
from msa_icp_jax.ops._mosaic.networks import best_half, descending, descending_of_bitonic
from msa_icp_jax.rows import NEG_INF_WORD, NO_BLOCK

ROWS = 16  # of a warp
CAPACITY = 256  # columns; longer rows are better off with a warp of their own
_CHUNK = 16  # columns that a lane looks at together
_VECTOR = 4  # neighbouring columns of a load
_WARP = 32
_INF = float("inf")

# Shared memory of a warp, in words.
_PITCH = 2 * TOPK + 1  # from one row found to the next: in different banks
_FOUND_AT = 4  # the place before the first row's may be written
_TILE_AT = _FOUND_AT + ROWS * _PITCH + 4  # 4 words to spare; 16-byte aligned, as vectors must be
_TILE_PITCH = _CHUNK + _VECTOR
WARP_WORDS = _TILE_AT + _WARP * _TILE_PITCH


def place_of(row: Lane, index: Lane, lower: Lane) -> Lane:
    """Where in the warp's shared memory word `index` (0 to 31) of a row lies.

    `lower`: how many places the row's first lane filled.
    """
    place = index & (TOPK - 1)
    mirrored = lower + (TOPK - 1) - place
    return where(place < lower, place, mirrored) + (index & TOPK) + (row * _PITCH + _FOUND_AT)


@dataclasses.dataclass
class Rows:
    """One lane of the warp that selects 16 neighbouring rows; its own row is lane // 2.

    Attributes:
      scores: the first of the 16 rows; rows are 16-byte aligned.
      columns: columns of a row, a multiple of 4, at most `CAPACITY`.
      front, back: columns below front and from back on win.
      stop: columns [0, stop) are candidates.
      ids: (scale, offset): column c has block id scale c + offset.
      lane: this lane of the warp.
      shared: the warp's shared memory, `WARP_WORDS` words.
    """

    scores: Words
    columns: int
    front: Lane
    back: Lane
    stop: Lane
    ids: tuple[int, Lane]
    lane: Lane
    shared: Words

    def find_top16(self) -> tuple[Lane, Lane]:
        """Leaves the words and ids of each row's best 16 in shared memory, see `place_of`.

        Returns:
          Whether the answer is good for this lane's row, and how many places the row's first lane
          filled.
        """
        few = self.stop <= TOPK  # then all of them win
        rows = dataclasses.replace(self, front=where(few, self.stop, self.front))
        own = (self.stop + (2 * _CHUNK - 1)) >> (2 * _CHUNK).bit_length() - 1
        first = self._side * own * _CHUNK
        chunks = lanes.warp_max(own)

        def column(i: Lane) -> Lane:
            """Of this lane's i-th chunk; lanes load together, so some go on past their last."""
            return where(i < own, first + i * _CHUNK, self.stop)

        def entries(i: Lane) -> tuple[list[Lane], list[Lane], list[Lane]]:
            words, values = rows._load(column(i))
            scale, offset = self.ids
            block = lanes.fresh(column(i) * scale + offset)
            return words, values, [block + j * scale for j in range(_CHUNK)]

        bar = _sixteenth_largest(lambda i: rows._load(column(i))[1], chunks)
        bar = where(few | bar.eq(-_INF), _inf(), bar)
        number, other = rows._put_winners(entries, chunks, bar)
        start = self._row_found

        def fill_tail(place: Lane) -> list[Lane]:
            (start + place).store(int32(NEG_INF_WORD))
            (start + (place + TOPK)).store(int32(NO_BLOCK))
            return []

        with lanes.when(few & self._side.eq(0)):
            lanes.loop(number, int32(TOPK) - other, 1, [], fill_tail)
        good = (number + other).eq(lanes.minimum(self.stop, TOPK))
        return good, where(self._side.eq(0), number, other)

    @property
    def _side(self) -> Lane:
        """0 for a row's first lane, 1 for its second one."""
        return self.lane & 1

    @property
    def _row_found(self) -> Words:
        """Place 0 of this lane's row."""
        return self.shared + ((self.lane >> 1) * _PITCH + _FOUND_AT)

    def _load(self, column: Lane) -> tuple[list[Lane], list[Lane]]:
        """The 16 scores at `column`, and the same with forced ones +inf, past the end -inf.

        The lanes load for one another, four lanes 64 neighbouring bytes. In one word a lane tells
        the others what it wants: in 24 bits where its columns begin, counted from the first of the
        16 rows (less than 16 x 256), and above them how many it wants, 0 to 16.
        """
        lane = lanes.fresh(self.lane)  # else all that follows from it would be held in registers
        left = lanes.clip(self.stop - column, 0, _CHUNK)
        wanted = ((lane >> 1) * self.columns + column) | (left << 24)
        quarter = (lane & 3) * _VECTOR
        tile = self.shared + _TILE_AT
        source = lane >> 2
        loaded = []
        for i in range(0, _WARP, 8):
            of = lanes.warp_from(wanted, source + i)
            inside = quarter < (of >> 24)
            loaded.append(_load_four(self.scores + ((of & 0xFFFFFF) + quarter), inside))
        for i, values in enumerate(loaded):
            (tile + ((source + 8 * i) * _TILE_PITCH + quarter)).store_vector(values)
        lanes.warp_barrier()
        mine = tile + lane * _TILE_PITCH
        raw: list[Lane] = []
        for i in range(0, _CHUNK, _VECTOR):
            raw += (mine + i).load_vector(f32(), _VECTOR)
        lanes.warp_barrier()  # before the tile is used again

        def masked() -> list[Lane]:
            front, back, stop = (
                lanes.fresh(x - column) for x in (self.front, self.back, self.stop)
            )
            values = []
            for j, value in enumerate(raw):
                value = where(back > j, value, where(stop > j, _inf(), -_INF))
                values.append(where(front > j, _INF, value))
            return values

        plain = (column >= self.front) & (column + _CHUNK <= self.back)
        return raw, list(lanes.choose(plain, [f32()] * _CHUNK, lambda: raw, masked))

    def _put_winners(
        self, load: Callable[[Lane], tuple[list[Lane], ...]], chunks: Lane, bar: Lane
    ) -> tuple[Lane, Lane]:
        """Puts what reaches the bar in its places; how much that is of this lane, of the other.

        More than 16 are one too many: the places after the 17th are left alone.

        Args:
          load: words, values and ids of a chunk.
          chunks: how many there are.
          bar: see above.
        """
        step = int32(4) - self._side * 8  # bytes from one place to the next
        first = _address(self._row_found + self._side * (TOPK - 1))
        end = first + step * (TOPK + 1)

        def one_chunk(i: Lane, place: Lane) -> list[Lane]:
            for word, value, block in zip(*load(i), strict=True):
                place = _put_if(value, bar, place, end, (word, block), step)
            return [place]

        (place,) = lanes.loop(int32(0), chunks, 1, [first], one_chunk)
        number = where(self._side.eq(0), place - first, first - place) >> 2
        return number, lanes.warp_xor(number, 1)


def _load_four(place: Words, inside: Lane) -> list[Lane]:
    """Four neighbouring scores, anything where they are not `inside`."""
    text = "@$5 ld.global.v4.f32 {$0, $1, $2, $3}, [$4];"
    return list(lanes.ptx(text, Lane(place.pointer), inside, result=[f32()] * _VECTOR))


def _put_if(
    value: Lane, bar: Lane, place: Lane, end: Lane, found: tuple[Lane, Lane], step: Lane
) -> Lane:
    """Puts a word and an id in a place unless the value is below the bar or the place is the end.

    Returns the next place, `step` bytes further on if this one was taken.
    """
    text = f"""{{ .reg .pred wins;
        setp.ge.f32 wins, $2, $3;
        setp.ne.and.s32 wins, $1, $4, wins;
        @wins st.shared.f32 [$1], $5;
        @wins st.shared.s32 [$1 + {4 * TOPK}], $6;
        mov.b32 $0, $1;
        @wins add.s32 $0, $1, $7; }}"""
    return lanes.ptx(text, place, value, bar, end, *found, step, result=i32())


def _inf() -> Lane:
    return lanes.constant(_INF, f32())


def _address(place: Words) -> Lane:
    """A place in shared memory as a number."""
    return lanes.ptx("mov.b32 $0, $1;", Lane(place.pointer), result=i32())


def _sixteenth_largest(load: Callable[[Lane], list[Lane]], chunks: Lane) -> Lane:
    """The 16th largest of what the two lanes of a row load; each gets it."""

    def one_chunk(i: Lane, *best: Lane) -> list[Lane]:
        return descending_of_bitonic(best_half(list(best), descending(load(i))))

    best = list(lanes.loop(int32(1), chunks, 1, descending(load(int32(0))), one_chunk))
    others = [lanes.warp_xor(x.bits(i32()), 1).bits(f32()) for x in best]
    return functools.reduce(lanes.minimum, best_half(best, others))
