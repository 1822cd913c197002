"""Top16 of eight narrow rows at once: four lanes a row.

A warp copies its rows' candidates to shared memory. Forced columns become +inf there, and what is
no candidate -inf.

Every 32nd column of a row is of the same *class*, and a lane looks after 8 classes. The 16th
largest of the 32 classes' maxima is the row's *cutoff*, which at least 16 columns reach. Those
(about 22 of random scores) are listed in ascending order, and the list's 16th largest value is the
row's *threshold*: columns above it win, and of those equal to it as many as there are places left,
forced ones first, then lower ones.

Where more than 32 columns reach the cutoff, those above it are counted. If they are no more than
there are places, the cutoff is the threshold, whatever ties there. Otherwise (best scores that
crowd in few classes) the row is left open, for the caller to select in another way.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from msa_icp_jax.geometry import TOPK, cdiv
from msa_icp_jax.ops._mosaic import lanes
from msa_icp_jax.ops._mosaic.lanes import Lane, Words, f32, i1, i32, int32, where
from msa_icp_jax.ops.select.networks import sixteenth_of_quad
from msa_icp_jax.rows import NEG_INF_WORD, NO_BLOCK, READY, ROW_WORDS

TOKENS = 2  # of a warp
HEADS = 4
ROWS = HEADS * TOKENS
CAPACITY = 256  # columns
_LISTED = 32  # columns that a row's list has room for
_OF_LANE = 8  # classes, or entries of the list, of one lane
_QUAD = 4  # lanes of a row
_VECTOR = 4  # neighbouring columns that a lane has of a chunk
_CHUNK = _QUAD * _VECTOR
_WARP = 32
_LIST_PITCH = _LISTED + _VECTOR  # words from one row's list to the next: vectors of other banks
_INF = float("inf")

# Shared memory of a warp, in words: lists, in whose place the rows found come, then the rows.
FOUND_AT = _LISTS_AT = 0
_ROWS_AT = ROWS * max(ROW_WORDS, _LIST_PITCH)


def warp_words(columns: int) -> int:
    """Words of shared memory of a warp."""
    return _ROWS_AT + ROWS * _pitch(columns)


def _chunks(columns: int) -> int:
    """Chunks of a row, 4, 8 or 16: a lane's bits of them fill a half, one or two words."""
    return next(x for x in (4, 8, 16) if x * _CHUNK >= min(columns, CAPACITY))


def _pitch(columns: int) -> int:
    """Words from one row to the next: vectors of two rows lie in different banks."""
    return _chunks(columns) * _CHUNK + _CHUNK


@dataclasses.dataclass
class Rows:
    """One lane of the warp that selects eight neighbouring rows; its own row is lane // 4.

    Attributes:
      scores: the first of the rows.
      columns: columns of a row.
      first, front, back, stop, need: `long_rows.Bounds` of this lane's row, with stop at most
        `CAPACITY`.
      begin, end: forced columns at either end at most.
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
    begin: int
    end: int
    ids: tuple[int, Lane]
    lane: Lane
    shared: Words

    def find_top16(self) -> Lane:
        """Leaves the candidate rows in shared memory, [head, token, 33].

        Returns:
          Bit l: whether lane l's row is left open, and what is there means nothing.
        """
        self._start_copies()
        self._fill()
        lanes.await_copies()
        lanes.warp_barrier()
        forced = self._mark()
        lanes.warp_barrier()
        cutoff = self._cutoff()
        masks = self._reach(cutoff)
        before, total = self._count(masks)
        crowded = total > _LISTED
        *masks, before, total, is_open = lanes.choose(
            lanes.warp_any(crowded),
            [*[i32()] * (len(masks) + 2), i1()],
            lambda: self._at_the_cutoff(cutoff, masks, crowded),
            lambda: [*masks, before, total, lanes.constant(0, i1())],
        )
        self._list(masks, before)
        lanes.warp_barrier()
        self._put_winners(total)
        lanes.warp_barrier()
        self._complete(forced)
        lanes.warp_barrier()
        return lanes.warp_ballot(is_open)

    @property
    def _row(self) -> Lane:
        return self.lane >> 2

    @property
    def _quarter(self) -> Lane:
        """This lane of its row."""
        return self.lane & (_QUAD - 1)

    @property
    def _wanted(self) -> Lane:
        """Winners, forced ones included."""
        return self.front - self.first + self.need + self.stop - self.back

    @property
    def _chunks(self) -> int:
        return _chunks(self.columns)

    @property
    def _start(self) -> Lane:
        """First column of this lane's quarter."""
        return self._quarter * (self._chunks * _CHUNK // _QUAD)

    @property
    def _scores(self) -> Words:
        """This lane's row."""
        return self.scores + self._row * self.columns

    @property
    def _copied(self) -> Words:
        """This lane's row in shared memory."""
        return self.shared + self._row * _pitch(self.columns) + _ROWS_AT

    # ---- copying ----

    def _start_copies(self) -> None:
        """Starts to copy the candidates' columns, whole vectors of them where rows are aligned."""
        vector = _VECTOR if self.columns % _VECTOR == 0 else 1
        first = self._quarter * _VECTOR
        row, copied = self._scores + first, self._copied + first
        for at in range(0, self._chunks * _CHUNK, _CHUNK):
            for i in range(at, at + _VECTOR, vector):
                lanes.copy(copied, row, vector, self.stop - first > i, i)

    def _fill(self) -> None:
        """Puts -inf behind the last candidates, as far as maxima are taken, and lists it."""
        lowest = [_constant(-_INF)] * _VECTOR
        first = ((self.stop - 1) & -(4 * _CHUNK)) + self._quarter * _VECTOR
        for at in range(0, 4 * _CHUNK, _CHUNK):
            with lanes.when(first + at >= self.stop):
                (self._copied + first + at).store_vector(lowest)
        behind = self._chunks * _CHUNK  # a column past all others
        with lanes.when(self._quarter.eq(0)):
            (self._copied + behind).store(lowest[0])
        for at in range(0, _OF_LANE, _VECTOR):
            (self._entries + at).store_vector([int32(behind)] * _VECTOR)

    def _mark(self) -> list[tuple[Lane, Lane, Lane]]:
        """Makes forced columns +inf, and those -inf that share vectors with candidates.

        Returns:
          Which of these columns are forced, the places they win, and their scores' bits.
        """
        found = []

        def mark(column: Lane, marked: Lane, forced: Lane, place: Lane) -> None:
            copied = self._copied + column

            def replace() -> list[Lane]:
                word = copied.load()
                copied.store(where(forced, _constant(_INF), _constant(-_INF)))
                return [word]

            (word,) = lanes.choose(marked, [i32()], replace, lambda: [int32(0)])
            found.append((forced, place, word))

        last = (self.stop + (_VECTOR - 1)) & -_VECTOR
        for i in range(0, self.begin, _QUAD):
            place = self._quarter + i
            column = self.first + place
            mark(column, column < self.front, column < self.front, place)
        for i in range(0, self.end + _VECTOR - 1, _QUAD):
            column = self.back + self._quarter + i
            place = self._wanted - self.stop + column
            mark(column, column < last, column < self.stop, place)

        def before_first(column: Lane) -> list[Lane]:
            (self._copied + column).store(_constant(-_INF))
            return []

        lanes.loop(self._quarter, self.first, _QUAD, [], before_first)
        return found

    @property
    def _entries(self) -> Words:
        """Where this lane's part of its row's list is."""
        return self.shared + (self._row * _LIST_PITCH + self._quarter * _OF_LANE) + _LISTS_AT

    def _values(self, place: Words, chunks: int) -> list[Lane]:
        """This lane's columns of some chunks of its row, from `place` on."""
        place = place + self._quarter * _VECTOR
        vectors = ((place + i * _CHUNK).load_vector(f32(), _VECTOR) for i in range(chunks))
        return [x for vector in vectors for x in vector]

    # ---- the cutoff, and what reaches it ----

    def _cutoff(self) -> Lane:
        """A value that at least 16 columns of this lane's row reach, -inf at the least."""

        def maxima(best: list[Lane], at: int) -> list[Lane]:
            values = self._values(self._copied + at, 4)
            pairs = zip(values[:_OF_LANE], values[_OF_LANE:], strict=True)
            larger = (lanes.maximum(x, y) for x, y in pairs)
            return [lanes.maximum(x, y) for x, y in zip(best, larger, strict=True)]

        best = maxima([_constant(-_INF)] * _OF_LANE, 0)
        for at in range(4 * _CHUNK, self._chunks * _CHUNK, 4 * _CHUNK):
            with_more: Callable[[], list[Lane]] = functools.partial(maxima, best, at)
            as_is: Callable[[], list[Lane]] = functools.partial(list[Lane], best)
            best = list(lanes.choose(self.stop > at, [f32()] * _OF_LANE, with_more, as_is))
        return sixteenth_of_quad(best, self.lane)

    def _reach(self, cutoff: Lane) -> list[Lane]:
        """Which columns of this lane's quarter reach the cutoff: all candidates if it is -inf."""
        all_do = where(cutoff.eq(-_INF), int32(-1), 0)
        return self._which(lambda values: lanes.which_reach(values, cutoff) | all_do)

    def _which(self, which: Callable[[list[Lane]], Lane]) -> list[Lane]:
        """`which` of the candidates in this lane's quarter, 32 at most a word."""
        together = min(self._chunks, _WARP // _VECTOR)
        every = range(0, self._chunks, together)
        masks = []
        for chunk in every:
            masks.append(which(self._values(self._copied + chunk * _CHUNK, together)))
            lanes.warp_barrier()  # or all the values would lie in registers
        masks = self._in_order(masks)
        within = self._between(self.first, self.stop)
        return [mask & inside for mask, inside in zip(masks, within, strict=True)]

    def _between(self, start: Lane, stop: Lane) -> list[Lane]:
        """Which columns of this lane's quarter are in [start, stop)."""
        start, stop = start - self._start, stop - self._start
        words = range(cdiv(self._chunks, 8))
        return [
            lanes.low_bits(stop - i * _WARP) & ~lanes.low_bits(start - i * _WARP) for i in words
        ]

    def _in_order(self, masks: list[Lane]) -> list[Lane]:
        """This lane's quarter of the row's mask, of which the lanes have bits of every chunk.

        A lane's bits are four a chunk. Those for one lane are eight at most in each word of the
        answer, where they lie sixteen apart.
        """
        bits = self._chunks  # of a lane that another one gets
        answer = [int32(0)] * len(masks)
        for distance in range(_QUAD):
            beside = self._quarter ^ distance
            if bits > 8:
                part = where(beside >= 2, masks[1], masks[0]) >> ((beside & 1) << 4)
            else:
                part = masks[0] >> (beside * bits)
            part = lanes.warp_xor(part, distance) if distance else part
            apart = int32(0x1001) << (beside << 2)
            kept = int32(0xF000F if bits > 4 else 0xF) << (beside << 2)
            for i in range(len(answer)):
                answer[i] = answer[i] | (((part >> (8 * i)) & 0xFF) * apart & kept)
        return answer

    def _count(self, masks: list[Lane]) -> tuple[Lane, Lane]:
        """Set bits of the lower lanes of this row, and of all its lanes."""
        number = functools.reduce(lambda a, b: a + b, (lanes.popcount(x) for x in masks))
        beside = lanes.warp_xor(number, 1)
        pair = number + beside
        others = lanes.warp_xor(pair, 2)
        quarter = self._quarter
        before = where((quarter & 1).ne(0), beside, 0) + where(quarter >= 2, others, 0)
        return before, pair + others

    def _at_the_cutoff(self, cutoff: Lane, masks: list[Lane], crowded: Lane) -> list[Lane]:
        """Of a crowded row the winners, if the cutoff is its threshold; else nothing."""
        passing = self._which(lambda values: lanes.which_pass(values, cutoff))
        chosen_from = self._between(self.front, self.back)
        above = [x | (y & ~z) for x, y, z in zip(passing, masks, chosen_from, strict=True)]
        winners, number = self._above_and_lowest(above, masks)
        is_open = crowded & (number > self._wanted)
        chosen = [
            where(is_open, 0, where(crowded, x, y)) for x, y in zip(winners, masks, strict=True)
        ]
        return [*chosen, *self._count(chosen), is_open]

    def _above_and_lowest(self, above: list[Lane], reach: list[Lane]) -> tuple[list[Lane], Lane]:
        """`above` and the lowest others that are in `reach`, as many as the row needs.

        Returns:
          These, and the number of those above.
        """
        equal = [x & ~y for x, y in zip(reach, above, strict=True)]
        number = self._count(above)[1]
        left = self._wanted - number - self._count(equal)[0]
        chosen = []
        for x, y in zip(above, equal, strict=True):

            def keep(mask: Lane, rest: Lane, left: Lane) -> list[Lane]:
                after = rest & (rest - 1)
                return [mask | (rest ^ after), after, left - 1]

            mask, _, left = lanes.repeat_while(
                [x, y, left], lambda _, rest, left: rest.ne(0) & (left > 0), keep
            )
            chosen.append(mask)
        return chosen, number

    def _list(self, masks: list[Lane], before: Lane) -> None:
        """Lists the columns of the masks of this lane's row in ascending order."""
        place = self._row * _LIST_PITCH + before
        for word, mask in enumerate(masks):

            def put(left: Lane, place: Lane, word: int = word) -> list[Lane]:
                column = self._start + word * _WARP + lanes.lowest_bit(left)
                (self.shared + place + _LISTS_AT).store(column)
                return [left & (left - 1), place + 1]

            _, place = lanes.repeat_while([mask, place], lambda left, _: left.ne(0), put)

    # ---- winners ----

    @property
    def _found(self) -> Words:
        """Where the candidate row of this lane's row comes."""
        token, head = self._row >> 2, self._row & (HEADS - 1)
        return self.shared + (head * TOKENS + token) * ROW_WORDS + FOUND_AT

    def _put_winners(self, total: Lane) -> None:
        """Puts the listed columns that win in their places; the list is `total` long."""
        place = self._entries
        columns = (*place.load_vector(i32(), 4), *(place + 4).load_vector(i32(), 4))
        words = [(self._copied + column).load() for column in columns]
        values = [lanes.maximum(word.bits(f32()), -_INF) for word in words]  # NaN is -inf
        lanes.warp_barrier()  # before winners come in the lists' place
        threshold = sixteenth_of_quad(values, self.lane)
        listed = lanes.low_bits(total - self._quarter * _OF_LANE)
        wins = _bits([v >= threshold for v in values]) & listed
        before, number = self._count([wins])

        def without_last_ties() -> list[Lane]:
            pairs = zip(columns, values, strict=True)
            above = [(v > threshold) | (c < self.front) | (c >= self.back) for c, v in pairs]
            (kept,), _ = self._above_and_lowest([_bits(above) & wins], [wins])
            return [kept, self._count([kept])[0]]

        tied = lanes.warp_any(number > self._wanted)
        wins, before = lanes.choose(tied, [i32()] * 2, without_last_ties, lambda: [wins, before])
        scale, offset = self.ids
        place = self._found + before
        for i, (word, column) in enumerate(zip(words, columns, strict=True)):
            won = (wins >> i) & 1
            with lanes.when(won.ne(0)):
                place.store(word)
                (place + TOPK).store(column * scale + offset)
            place = place + won

    def _complete(self, forced: list[tuple[Lane, Lane, Lane]]) -> None:
        """Puts the forced columns' scores, the tail and the flag in their places."""
        found, quarter = self._found, self._quarter
        for is_forced, place, word in forced:
            with lanes.when(is_forced):
                (found + place).store(word)
        with lanes.when(lanes.warp_any(self._wanted < TOPK)):
            for i in range(0, TOPK, _QUAD):
                place = quarter + i
                with lanes.when(place >= self._wanted):
                    (found + place).store(int32(NEG_INF_WORD))
                    (found + place + TOPK).store(int32(NO_BLOCK))
        with lanes.when(quarter.eq(3)):
            (found + 2 * TOPK).store(int32(READY))


def _bits(conditions: list[Lane]) -> Lane:
    """Bit i: condition i."""
    bits = (where(x, int32(1 << i), 0) for i, x in enumerate(conditions))
    return functools.reduce(lambda a, b: a | b, bits)


def _constant(value: float) -> Lane:
    return lanes.constant(value, f32())
