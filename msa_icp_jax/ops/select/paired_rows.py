"""Top16 of sixteen narrow rows at once: two lanes a row.

A warp copies its rows' candidates to shared memory, where each lane has one half of a row. A lane
keeps the 16 largest values of its half, in order, by sorting networks; joined with those of the
other lane they give the row's 16th largest, the *threshold*. Columns above it win, and of those
equal to it as many as there are places left, the lower lane's first.

Of rows that may be longer than 64 columns not all is sorted. The 16th largest of 32 maxima, each of
a class of columns, is a threshold that at least 16 columns reach. Those (about 22 of random scores)
are listed, and the list's 16th largest is the row's. Where more than 32 reach it (scores that tie),
or where it is -inf, all is sorted after all.

Forced columns have +inf for a score while thresholds are looked for, and what is no candidate -inf;
NaN sorts below everything else.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from msa_icp_jax.geometry import TOPK, cdiv
from msa_icp_jax.ops._mosaic import lanes
from msa_icp_jax.ops._mosaic.lanes import Lane, Words, f32, i32, int32, where
from msa_icp_jax.ops.select.networks import best_half, descending, descending_of_bitonic
from msa_icp_jax.rows import NEG_INF_WORD, NO_BLOCK, READY, ROW_WORDS

TOKENS = 4  # of a warp
ROWS = 4 * TOKENS
CAPACITY = 256  # columns; longer rows are better off with a warp of their own
_SORTED = 64  # columns of a plane up to which all is sorted
_LISTED = 32  # columns that a row's list has room for
_CHUNK = 16  # columns that a lane looks at together
_PIECE = 2 * _CHUNK  # columns of a row that are copied together
_VECTOR = 4  # neighbouring columns that a lane copies
_WARP = 32
_INF = float("inf")

# Shared memory of a warp, in words: rows found, and before that the lists; then the lanes' halves.
_HALVES_AT = ROWS * ROW_WORDS


def warp_words(columns: int) -> int:
    """Words of shared memory of a warp; a word of a mask may reach past the last half."""
    return _HALVES_AT + _WARP * _pitch(columns) + _CHUNK


def _pitch(columns: int) -> int:
    """Words from one lane's half to the next: their vectors lie in different banks."""
    return cdiv(columns, _PIECE) * _CHUNK + _VECTOR


@dataclasses.dataclass
class Rows:
    """One lane of the warp that selects 16 neighbouring rows; its own row is lane // 2.

    Attributes:
      scores: the first of the 16 rows; rows are 16-byte aligned.
      columns: columns of a row, a multiple of 4, at most `CAPACITY`.
      first, front, back, stop, need: `long_rows.Bounds` of this lane's row; the same for the four
        rows of a token.
      ids: (scale, offset): column c has block id scale c + offset.
      lane: this lane of the warp.
      shared: the warp's shared memory, `warp_words` words.
    """

    scores: Words
    columns: int
    first: Lane
    front: Lane
    back: Lane
    stop: Lane
    need: Lane
    ids: tuple[int, Lane]
    lane: Lane
    shared: Words

    def find_top16(self) -> None:
        """Leaves the candidate rows in shared memory, [head, token, 33]."""
        self._copy()
        self._mark()
        lanes.warp_barrier()
        threshold = self._sixteenth_largest()
        lanes.warp_barrier()  # before rows come where the lists were
        self._put_forced()
        self._put_winners(threshold)
        lanes.await_copies()
        lanes.warp_barrier()

    @property
    def _side(self) -> Lane:
        """0 for a row's first lane, 1 for its second one."""
        return self.lane & 1

    @property
    def _pitch(self) -> int:
        return _pitch(self.columns)

    @property
    def _chunks(self) -> Lane:
        """Chunks of a half of this lane's row, at least one."""
        return lanes.maximum((self.stop + (_PIECE - 1)) >> _PIECE.bit_length() - 1, 1)

    @property
    def _begin(self) -> Lane:
        """First column of this lane's half."""
        return self._side * self._chunks * _CHUNK

    @property
    def _half(self) -> Words:
        """This lane's half of its row."""
        return self.shared + (self.lane * self._pitch + _HALVES_AT)

    @property
    def _found(self) -> Words:
        """Where the candidate row of this lane's row comes."""
        row = self.lane >> 1
        return self.shared + ((row & 3) * TOKENS + (row >> 2)) * ROW_WORDS

    def _place(self, row: Lane, chunks: Lane, column: Lane) -> Words:
        """Where a column of a row lies whose halves have so many chunks."""
        half = chunks * _CHUNK
        beside = where(column >= half, int32(self._pitch) - half, 0)
        return self.shared + (row * (2 * self._pitch) + column + beside + _HALVES_AT)

    def _copy(self) -> None:
        """Copies the candidates' columns, 32 of four rows together; -inf follows them."""
        head, quad = self.lane >> 3, (self.lane & 7) * _VECTOR
        lowest = [_constant(-_INF)] * _VECTOR
        for token in range(TOKENS):
            stop, chunks = (lanes.warp_from(x, 8 * token) for x in (self.stop, self._chunks))
            row = head + 4 * token

            def one_piece(
                piece: Lane, stop: Lane = stop, chunks: Lane = chunks, row: Lane = row
            ) -> list[Lane]:
                column = piece * _PIECE + quad
                place = self._place(row, chunks, column)
                source = self.scores + (row * self.columns + column)
                lanes.copy_four(place, source, column < stop)
                with lanes.when(column >= stop):
                    place.store_vector(lowest)
                return []

            lanes.loop(int32(0), chunks, 1, [], one_piece)
        lanes.await_copies()
        lanes.warp_barrier()

    def _mark(self) -> None:
        """Marks what is forced, and what is no candidate before the first and beside the last."""
        upper = self._side.ne(0)
        row, chunks = self.lane >> 1, self._chunks

        def fill(start: Lane, stop: Lane, value: float) -> None:
            def one(column: Lane) -> list[Lane]:
                self._place(row, chunks, column).store(_constant(value))
                return []

            lanes.loop(start, stop, 1, [], one)

        last = (self.stop + (_VECTOR - 1)) & -_VECTOR
        fill(where(upper, self.stop, 0), where(upper, last, self.first), -_INF)
        fill(*self._forced(), _INF)

    def _forced(self) -> tuple[Lane, Lane]:
        """The forced columns that this lane sees to: those at the start, or those at the end."""
        upper = self._side.ne(0)
        return where(upper, self.back, self.first), where(upper, self.stop, self.front)

    # ---- the threshold ----

    def _sixteenth_largest(self) -> Lane:
        """The 16th largest of the row, -inf where that is NaN."""
        if self.columns <= _SORTED:
            return self._join(self._sorted_half())

        def one_chunk(i: Lane, *best: Lane) -> list[Lane]:
            return [lanes.maximum(a, b) for a, b in zip(best, self._load(i), strict=True)]

        classes = lanes.loop(int32(1), self._chunks, 1, self._load(int32(0)), one_chunk)
        threshold = self._join(descending(list(classes)))
        masks = self._reach(threshold, int32(0), self.stop)
        number = _number(masks)
        many = (number + lanes.warp_xor(number, 1) > _LISTED) | threshold.eq(-_INF)
        return self._join(
            lanes.choose(
                lanes.warp_any(many),
                [f32()] * TOPK,
                self._sorted_half,
                lambda: self._sorted_list(masks),
            )
        )

    def _join(self, best: list[Lane] | tuple[Lane, ...]) -> Lane:
        """The 16th largest of what both lanes of a row have: descending lists of 16."""
        others = [lanes.warp_xor(x.bits(i32()), 1).bits(f32()) for x in best]
        least = functools.reduce(lanes.minimum_or_nan, best_half(list(best), others))
        return lanes.maximum(least, -_INF)

    def _sorted_half(self) -> list[Lane]:
        """The 16 largest of this lane's half, descending."""

        def one_chunk(i: Lane, *best: Lane) -> list[Lane]:
            return descending_of_bitonic(best_half(list(best), descending(self._load(i))))

        first = descending(self._load(int32(0)))
        return list(lanes.loop(int32(1), self._chunks, 1, first, one_chunk))

    def _sorted_list(self, masks: list[Lane]) -> list[Lane]:
        """This lane's part of the list of what the masks of both lanes say, descending.

        Entry k of row r is word 16 k + r. The first lane writes entries 0, 1, .., the second 31,
        30, ..; then the first reads entries 0 to 15, the second those from 16 on.
        """
        for i in range(0, _LISTED * ROWS, _WARP * _VECTOR):
            place = self.shared + (self.lane * _VECTOR + i)
            place.store_vector([_constant(-_INF)] * _VECTOR)
        lanes.warp_barrier()
        row = self.lane >> 1
        entry = self._side * ((_LISTED - 1) * ROWS) + row
        step = int32(ROWS) - self._side * (2 * ROWS)
        for word, mask in enumerate(masks):

            def put(left: Lane, entry: Lane, word: int = word) -> list[Lane]:
                column = lanes.lowest_bit(left) + word * _WARP
                (self.shared + entry).store((self._half + column).load(f32()))
                return [left & (left - 1), entry + step]

            _, entry = lanes.repeat_while([mask, entry], lambda left, _: left.ne(0), put)
        lanes.warp_barrier()
        mine = self.shared + (self._side * (TOPK * ROWS) + row)
        return descending([(mine + i * ROWS).load(f32()) for i in range(TOPK)])

    def _load(self, chunk: Lane) -> list[Lane]:
        """16 neighbouring values of this lane's half."""
        return self._values(chunk * _CHUNK, _CHUNK)

    def _values(self, at: Lane | int, count: int) -> list[Lane]:
        place = self._half + at
        return [
            x for i in range(0, count, _VECTOR) for x in (place + i).load_vector(f32(), _VECTOR)
        ]

    # ---- winners ----

    def _reach(self, threshold: Lane, start: Lane, stop: Lane) -> list[Lane]:
        """Words of a mask: which columns of this lane's half in [start, stop) reach `threshold`.

        All of them do if it is -inf.
        """
        all_do = where(threshold.eq(-_INF), int32(-1), 0)
        masks = self._masks(lambda values: lanes.which_reach(values, threshold) | all_do)
        return self._within(masks, start, stop)

    def _masks(self, which: Callable[[list[Lane]], Lane]) -> list[Lane]:
        """`which` of 32 values each of this lane's half; anything past its end."""
        masks: list[Lane] = []
        for word in range(cdiv(cdiv(self.columns, _PIECE) * _CHUNK, _WARP)):

            def some(word: int = word) -> list[Lane]:
                return [which(self._values(word * _WARP, _WARP))]

            there = self._chunks > 2 * word
            masks += lanes.choose(there, [i32()], some, lambda: [int32(0)]) if word else some()
        return masks

    def _within(self, masks: list[Lane], start: Lane, stop: Lane) -> list[Lane]:
        """The bits of columns [start, stop)."""
        begin = self._begin
        end = lanes.minimum(stop - begin, self._chunks * _CHUNK)
        return [
            mask
            & lanes.low_bits(end - word * _WARP)
            & ~lanes.low_bits(start - begin - word * _WARP)
            for word, mask in enumerate(masks)
        ]

    def _put_winners(self, threshold: Lane) -> None:
        """Puts the open columns that win in their places."""
        reach = self._reach(threshold, self.front, self.back)
        number = _number(reach)
        tied = number + lanes.warp_xor(number, 1) > self.need
        masks = lanes.choose(
            lanes.warp_any(tied),
            [i32()] * len(reach),
            lambda: self._without_last_ties(reach, threshold),
            lambda: reach,
        )
        lower = lanes.warp_xor(_number(masks), 1)
        place = self.front - self.first + where(self._side.eq(0), 0, lower)
        for word, mask in enumerate(masks):

            def put(left: Lane, place: Lane, word: int = word) -> list[Lane]:
                column = lanes.lowest_bit(left) + word * _WARP
                self._put(place, (self._half + column).load(), self._begin + column)
                return [left & (left - 1), place + 1]

            _, place = lanes.repeat_while([mask, place], lambda left, _: left.ne(0), put)

    def _without_last_ties(self, reach: list[Lane], threshold: Lane) -> list[Lane]:
        """Of those equal to the threshold, only as many as there are places left."""
        above = self._masks(lambda values: lanes.which_pass(values, threshold))
        above = [x & y for x, y in zip(above, reach, strict=True)]
        equal = [x & ~y for x, y in zip(reach, above, strict=True)]
        number = _number(above)
        left = self.need - number - lanes.warp_xor(number, 1)
        lower = lanes.warp_xor(_number(equal), 1)
        left = left - where(self._side.eq(0), 0, lower)
        kept = []
        for x, y in zip(above, equal, strict=True):

            def keep(mask: Lane, rest: Lane, left: Lane) -> list[Lane]:
                after = rest & (rest - 1)
                return [mask | (rest ^ after), after, left - 1]

            mask, _, left = lanes.repeat_while(
                [x, y, left], lambda _, rest, left: rest.ne(0) & (left > 0), keep
            )
            kept.append(mask)
        return kept

    def _put(self, place: Lane, word: Lane, column: Lane) -> None:
        """Puts a score's bits and a block's id in a place of the row."""
        scale, offset = self.ids
        (self._found + place).store(word)
        (self._found + (place + TOPK)).store(column * scale + offset)

    def _put_forced(self) -> None:
        """Puts forced columns, the tail and the flag in their places; scores come by themselves."""
        found, upper = self._found, self._side.ne(0)
        start, stop = self._forced()
        number = self.front - self.first + self.need + self.stop - self.back
        before = where(upper, number - self.stop, int32(0) - self.first)
        row = self.scores + (self.lane >> 1) * self.columns
        scale, offset = self.ids

        def one(column: Lane) -> list[Lane]:
            place = column + before
            lanes.copy_one(found + place, row + column)
            (found + (place + TOPK)).store(column * scale + offset)
            return []

        def nothing(place: Lane) -> list[Lane]:
            (found + place).store(int32(NEG_INF_WORD))
            (found + (place + TOPK)).store(int32(NO_BLOCK))
            return []

        lanes.loop(start, stop, 1, [], one)
        lanes.loop(where(upper, number, TOPK), int32(TOPK), 1, [], nothing)
        with lanes.when(upper):
            (found + 2 * TOPK).store(int32(READY))


def _number(masks: list[Lane] | tuple[Lane, ...]) -> Lane:
    """Bits that are set."""
    return functools.reduce(lambda a, b: a + b, (lanes.popcount(x) for x in masks))


def _constant(value: float) -> Lane:
    return lanes.constant(value, f32())
