"""Top16 of one row of any length and any scores, by a warp or by the four warps of a warpgroup.

Forced blocks are known from their numbers alone, and they lie at both ends of the visible columns.
What remains is an interval [front, back) of columns, of which the best `need` = 16 - forced are
wanted.

1. At most 64 columns: all of them are contenders. Otherwise every lane keeps the maximum of the
   columns it loaded. The need-th largest of the 32 lanes' maxima is a *threshold* that at least
   `need` columns reach: only columns at or above it (about 22 of random scores) are contenders.
2. Should more than 64 columns reach the threshold, or it be -inf (many equal scores; rows of -inf
   or NaN), the row is streamed in ascending order through a list of at most 64 entries, which is
   cut back to the best 16 whenever it holds more than 32.
3. A contender's rank is the number of larger ones, counted against all of them. Those of rank below
   `need` win, unless equal scores make them more than that: then entries are ranked. A winner's
   place is the number of winners with a lower column.
"""

from __future__ import annotations

import dataclasses
import functools

from jaxlib.mlir import ir

from msa_icp_jax.geometry import MAX_BLOCKS, TOPK, cdiv
from msa_icp_jax.ops._mosaic import lanes
from msa_icp_jax.ops._mosaic.lanes import Lane, Words, f32, i32, i64, int32, where
from msa_icp_jax.ops._mosaic.top16 import (
    LAST_COLUMN,
    LIST_ENTRIES,
    LIST_WORDS,
    RunningTop16,
    count_better,
    entry,
    entry_column,
    flip,
    order_key,
)
from msa_icp_jax.rows import NEG_INF_WORD, NO_BLOCK

WARPS = 4  # of a warpgroup
_WARP = 32
_CONTENDERS = LIST_ENTRIES  # most that are ranked: two a lane
_NEG_INF_KEY = NEG_INF_WORD ^ 0x7FFFFFFF
_FAR = 1 << 30  # an offset as good as any farther one: differences with it fit int32

# Shared memory of a row's warps, in words; entries and maxima are read 16 bytes at a time.
WORDS_AT = 0  # the 32 words of the row to be stored
_PICKED_AT = WORDS_AT + 2 * TOPK  # columns of the winners
_COUNT_AT = _PICKED_AT + TOPK
SPARE_AT = _COUNT_AT + 1  # three words that nothing here touches
COLUMNS_AT = _COUNT_AT + 4  # columns of the contenders
_MAXIMA_AT = COLUMNS_AT + _CONTENDERS
_ENTRIES_AT = _MAXIMA_AT + _WARP * WARPS
SHARED_WORDS = _ENTRIES_AT + LIST_WORDS * WARPS


def vector_of(columns: int) -> int:
    """Neighbouring columns that a lane loads at once: rows are 16-byte aligned, or not."""
    return 4 if columns % 4 == 0 else 1


@dataclasses.dataclass
class Bounds:
    """Where a token's candidates lie; columns, not blocks."""

    first: Lane  # candidates are the columns [first, stop)
    front: Lane  # forced: [first, front) and [back, stop)
    back: Lane
    stop: Lane
    need: Lane  # columns to choose of [front, back), at most their number

    @property
    def open(self) -> Lane:
        """Columns that are not forced."""
        return self.back - self.front

    @property
    def chosen_at(self) -> Lane:
        """The first place of a row that is not forced."""
        return self.front - self.first


def find_bounds(
    count: Lane, offset: Lane, *, scale: int, columns: int, begin: int, end: int
) -> Bounds:
    """Where the candidates of a token with `count` visible blocks lie, and the forced among them.

    Args:
      count: visible blocks, perhaps negative or too many.
      offset: block of column 0, perhaps nonsense.
      scale: blocks from one column to the next, 1 or 2.
      columns: columns there are.
      begin, end: forced blocks at the start, and visible ones at the end.
    """

    def columns_below(block: Lane) -> Lane:
        column = (block - offset + (scale - 1)) >> (scale.bit_length() - 1)
        return lanes.clip(column, 0, columns)

    count = lanes.maximum(count, 0)
    offset = lanes.clip(offset, -_FAR, _FAR)
    first = columns_below(int32(0))
    stop = columns_below(lanes.minimum(count, MAX_BLOCKS))
    front = lanes.clip(columns_below(int32(begin)), first, stop)
    back = lanes.clip(columns_below(lanes.minimum(count - end, MAX_BLOCKS)), front, stop)
    need = int32(TOPK) - (front - first) - (stop - back)
    return Bounds(first, front, back, stop, lanes.minimum(need, back - front))


@dataclasses.dataclass
class Row(Bounds):
    """A row: where its candidates lie, and its scores."""

    scores: Words


@dataclasses.dataclass
class _Forced:
    """The place of a row that this lane fills if no chosen block comes there (lanes 0 to 15).

    Attributes:
      here: whether that is so.
      live: whether there is a block, or the place is one of the tail.
      column: its column.
      word: the bits of its score, -inf in the tail.
    """

    here: Lane
    live: Lane
    column: Lane
    word: Lane

    @staticmethod
    def of_row(row: Row, lane: Lane) -> _Forced:
        behind = lane - (row.chosen_at + row.need)
        column = where(lane < row.chosen_at, row.first + lane, row.back + behind)
        here = (lane < TOPK) & ((lane < row.chosen_at) | (behind >= 0))
        live = here & (column < row.stop)
        pointer = Lane((row.scores + column).pointer)
        text = "mov.b32 $0, 0xff800000; @$2 ld.global.b32 $0, [$1];"
        return _Forced(here, live, column, lanes.ptx(text, pointer, live, result=i32()))


@dataclasses.dataclass
class _Contender:
    """A column that may win."""

    column: Lane
    word: Lane  # its score's bits
    value: Lane  # its score, comparable: neither NaN nor -0.0
    live: Lane  # whether there is a column at all

    @staticmethod
    def nothing() -> _Contender:
        low = lanes.constant(float("-inf"), f32())
        return _Contender(int32(0), int32(0), low, lanes.constant(0, lanes.i1()))

    def parts(self) -> list[Lane]:
        return [self.column, self.word, self.value, self.live]

    def types(self) -> list[ir.Type]:
        return [x.type for x in self.parts()]


def _maximum(values: list[Lane]) -> Lane:
    bests = [lanes.constant(float("-inf"), f32())] * 4  # four short chains, not a long one
    for i, value in enumerate(values):
        bests[i % 4] = lanes.maximum(bests[i % 4], value)
    return functools.reduce(lanes.maximum, bests)


@dataclasses.dataclass
class RowSelector:
    """One thread of the warps that select a row together.

    Attributes:
      columns: columns of the score plane.
      warps: 1 or 4.
      ids: (scale, offset): column c has block id scale c + offset.
      lane, warp: this thread's place in its warp, and its warp's in the warpgroup.
      shared: the shared memory of the row's warps, `SHARED_WORDS` words.
    """

    columns: int
    warps: int
    ids: tuple[int, Lane]
    lane: Lane
    warp: Lane
    shared: Words

    @property
    def leads(self) -> Lane:
        """Whether this warp is the one that finishes the row."""
        return (self.warp & (self.warps - 1)).eq(0)

    @property
    def _vector(self) -> int:
        return vector_of(self.columns)

    def select(self, row: Row, values: list[Lane] | None = None) -> None:
        """Leaves the row's 16 words and 16 ids in the leading warp's view of `shared`.

        Args:
          row: the row.
          values: what `load` returned, where the caller has loaded the row already.
        """
        forced = _Forced.of_row(row, self.lane)  # looked at late: nothing waits for its word
        count = self._contenders(row, values)
        with lanes.when(self.leads):
            self._put_forced(forced)
            self._finish(row, count)

    def _id(self, column: Lane) -> Lane:
        scale, offset = self.ids
        return column * scale + offset

    def _put_forced(self, forced: _Forced) -> None:
        """Puts the forced blocks and the tail in their places; the chosen ones stay open."""
        with lanes.when(forced.here):
            (self.shared + (self.lane + WORDS_AT)).store(forced.word)
            block = where(forced.live, self._id(forced.column), NO_BLOCK)
            (self.shared + (self.lane + (WORDS_AT + TOPK))).store(block)

    def _contenders(self, row: Row, values: list[Lane] | None) -> Lane:
        """Leaves the columns that may win in shared memory; returns how many.

        At most 64 columns are not written anywhere: contender i is then column front + i.
        """
        return lanes.choose(
            (row.open <= _CONTENDERS) | row.need.eq(0),
            [i32()],
            lambda: [where(row.need.eq(0), 0, row.open)],
            lambda: [self._scan(row, values)],
        )[0]

    def _scan(self, row: Row, values: list[Lane] | None) -> Lane:
        """Contenders of a long row."""
        values = self.load(row) if values is None else values
        self._publish(_maximum(values))
        threshold_key = self._threshold(row)
        found = self._collect(values, flip(threshold_key).bits(f32()), row)
        overflow = (found > _CONTENDERS) | (threshold_key <= _NEG_INF_KEY)

        def stream() -> list[Lane]:
            self._stream(row, threshold_key)
            return [int32(TOPK * self.warps)]

        return lanes.choose(overflow, [i32()], stream, lambda: [found])[0]

    def _column(self, chunk: Lane | int) -> Lane:
        """First column that this lane loads in a chunk."""
        warps, vector = self.warps, self._vector
        lane = self.lane if warps == 1 else self.warp * _WARP + self.lane
        return int32(0).like(chunk) * (_WARP * warps * vector) + lane * vector

    def load(self, row: Row) -> list[Lane]:
        """This lane's scores, NaN where a load would leave [front, back).

        The up to three columns at either end that share a load with columns outside are left to
        `_collect`, which takes them without looking at them.
        """
        vector = self._vector
        stride = vector * _WARP * self.warps
        column = self._column(0)
        place = row.scores + column
        low, high = (lanes.fresh(x) for x in (row.front - column, row.back - column - vector))
        results = ", ".join(f"${i}" for i in range(vector))
        moves = " ".join(f"mov.b32 ${i}, 0x7fffffff;" for i in range(vector))
        kind = f"v{vector}.f32 {{{results}}}" if vector > 1 else f"f32 {results}"
        text = f"{moves} @${vector + 1} ld.global.{kind}, [${vector}];"
        values: list[Lane] = []
        for chunk in range(cdiv(self.columns, stride)):
            inside = (low <= chunk * stride) & (high >= chunk * stride)
            pointer = Lane((place + chunk * stride).pointer)
            values += lanes.ptx(text, pointer, inside, result=[f32()] * vector)
        return values

    def _publish(self, best: Lane) -> None:
        """Shows this lane's maximum to the row's other warps."""
        maxima = self.shared + _MAXIMA_AT
        if self.warps == 1:
            (maxima + self.lane).store(best)
            lanes.warp_barrier()
            return
        (maxima + (self.warp * _WARP + self.lane)).store(best)
        with lanes.when(self.leads & self.lane.eq(0)):
            (self.shared + _COUNT_AT).store(int32(0))
        lanes.warpgroup_barrier()

    def _threshold(self, row: Row) -> Lane:
        """Key of the need-th largest of the lanes' maxima."""
        maxima = self.shared + _MAXIMA_AT
        if self.warps > 1:
            # Lanes of the same number in all warps become one, in this warp's own copy.
            parts = [(maxima + (self.lane + _WARP * w)).load(f32()) for w in range(WARPS)]
            mine = parts[0]
            for part in parts[1:]:
                mine = lanes.maximum(mine, part)
            maxima = self.shared + (self.warp * LIST_WORDS + _ENTRIES_AT)
            (maxima + self.lane).store(mine)
            lanes.warp_barrier()
        else:
            mine = (maxima + self.lane).load(f32())
        larger = int32(0)
        for i in range(0, _WARP, 4):
            for other in (maxima + i).load_vector(f32(), 4):
                larger = larger + lanes.is_negative(mine - other)
        key = flip(mine.bits(i32()))
        return lanes.warp_min(where(larger < row.need, key, 0x7FFFFFFF))

    def _collect(self, values: list[Lane], threshold: Lane, row: Row) -> Lane:
        """Writes up to 64 of the columns that reach the threshold; returns how many reach it."""
        warps, vector = self.warps, self._vector
        masks = []
        for start in range(0, len(values), _WARP):
            masks.append(lanes.which_reach(values[start : start + _WARP], threshold))
        columns = self.shared + COLUMNS_AT
        edges = self._edges(row, columns) if vector > 1 else int32(0)
        number = lanes.popcount(masks[0])
        for mask in masks[1:]:
            number = number + lanes.popcount(mask)
        upto = lanes.warp_prefix_sum(number, self.lane)
        total = lanes.warp_from(upto, _WARP - 1)
        place = edges + upto - number
        if warps > 1:
            base = lanes.choose(
                self.lane.eq(0),
                [i32()],
                lambda: [(self.shared + _COUNT_AT).atomic_add(total)],
                lambda: [int32(0)],
            )[0]
            place = place + lanes.warp_from(base, 0)
        for word, mask in enumerate(masks):
            first_chunk = word * _WARP // vector

            def write_one(place: Lane, mask: Lane, first_chunk: int = first_chunk) -> list[Lane]:
                bit = lanes.lowest_bit(mask)
                chunk = (bit >> (vector.bit_length() - 1)) + first_chunk
                with lanes.when(place < _CONTENDERS):
                    column = self._column(chunk) + (bit & (vector - 1))
                    (columns + place).store(column)
                return [place + 1, mask & (mask - 1)]

            place, _ = lanes.repeat_while([place, mask], lambda _, mask: mask.ne(0), write_one)
        if warps > 1:
            lanes.warpgroup_barrier()
            return edges + (self.shared + _COUNT_AT).load()
        found = edges + total
        lanes.warp_barrier()
        return found

    def _edges(self, row: Row, columns: Words) -> Lane:
        """Takes the columns of [front, back) that `load` left out; returns their number."""
        vector = self._vector
        inner = (row.front + (vector - 1)) & -vector
        before = inner - row.front
        after = row.back & (vector - 1)
        column = where(self.lane < before, row.front, row.back - after - before) + self.lane
        with lanes.when(self.leads & (self.lane < before + after)):
            (columns + self.lane).store(column)
        return before + after

    def _stream(self, row: Row, threshold_key: Lane) -> None:
        """Contenders the slow way, whatever the scores: the best 16 of each warp's part of the row.

        Columns below the threshold cannot win, which leaves few to insert in most rows. Places
        that are not taken get column -1.
        """
        warps = self.warps
        warp = self.warp & (warps - 1)
        entries = self.shared + (warp * LIST_WORDS + _ENTRIES_AT)
        best = RunningTop16(entries, row.need, self.lane)
        share = ((row.open + (warps * _WARP - 1)) >> (5 + warps.bit_length() - 1)) << 5
        start = row.front + warp * share
        stop = lanes.minimum(start + share, row.back)

        def eight(first: Lane, held: Lane, key: Lane) -> tuple[Lane, ...]:
            """Loads 256 columns together, then inserts them in order."""
            state: tuple[Lane, ...] = (held, key)
            columns = [first + (self.lane + i * _WARP) for i in range(8)]
            scores = []
            for column in columns:
                pointer = Lane((row.scores + column).pointer)
                text = "mov.b32 $0, 0; @$2 ld.global.f32 $0, [$1];"
                scores.append(lanes.ptx(text, pointer, column < stop, result=f32()))
            for column, score in zip(columns, scores, strict=True):
                state = best.insert(score, column, column < stop, state)
            return state

        held, _ = lanes.loop(start, stop, 8 * _WARP, [int32(0), threshold_key - 1], eight)
        lanes.warp_barrier()
        held, _ = best.cut(held)
        place = warp * TOPK + self.lane
        with lanes.when(self.lane < TOPK):
            found = entry_column((entries + self.lane * 2).load(i64()))
            (self.shared + COLUMNS_AT + place).store(where(self.lane < held, found, -1))
        lanes.warpgroup_barrier() if warps > 1 else lanes.warp_barrier()

    def _finish(self, row: Row, count: Lane) -> None:
        """Ranks the contenders and puts the winners in their places."""
        many = count > _WARP
        first = self._contender(0, row, count)
        nothing = _Contender.nothing()
        second = _Contender(
            *lanes.choose(
                many, nothing.types(), lambda: self._contender(1, row, count).parts(), nothing.parts
            )
        )
        with lanes.when(self.lane < TOPK):
            (self.shared + (_PICKED_AT + self.lane)).store(int32(LAST_COLUMN))
        lanes.warp_barrier()
        wins = self._rank(first, second, row, count)
        ballots = [lanes.warp_ballot(x) for x in wins]
        below = (int32(1) << self.lane) - 1
        places = [lanes.popcount(x & below) for x in ballots]
        places[1] = places[1] + lanes.popcount(ballots[0])
        for contender, won, place in zip((first, second), wins, places, strict=True):
            with lanes.when(won):
                (self.shared + (_PICKED_AT + place)).store(contender.column)
        lanes.warp_barrier()
        self._put_winner(first, wins[0], row)
        with lanes.when(many):
            self._put_winner(second, wins[1], row)
        lanes.warp_barrier()

    def _contender(self, which: int, row: Row, count: Lane) -> _Contender:
        """This lane's first or second contender; its value goes to shared memory, too."""
        index = self.lane + which * _WARP
        listed = (self.shared + (COLUMNS_AT + index)).load()
        column = where(row.open <= _CONTENDERS, row.front + index, listed)
        live = (index < count) & (column >= 0)
        pointer = Lane((row.scores + column).pointer)
        text = "mov.b32 $0, 0xff800000; @$2 ld.global.f32 $0, [$1];"
        score = lanes.ptx(text, pointer, live, result=f32())
        value = lanes.maximum(score, float("-inf")) + 0.0  # NaN is -inf, -0.0 is +0.0
        (self.shared + (_MAXIMA_AT + index)).store(value)
        return _Contender(column, score.bits(i32()), value, live)

    def _rank(
        self, first: _Contender, second: _Contender, row: Row, count: Lane
    ) -> tuple[Lane, ...]:
        """Whether this lane's contenders win."""
        values = self.shared + _MAXIMA_AT

        def larger_than(*mine: Lane) -> list[Lane]:
            def four(i: Lane, *larger: Lane) -> list[Lane]:
                for other in (values + i).load_vector(f32(), 4):
                    larger = tuple(
                        n + lanes.is_negative(x - other) for n, x in zip(larger, mine, strict=True)
                    )
                return list(larger)

            return list(lanes.loop(int32(0), count, 4, [int32(0)] * len(mine), four))

        larger = lanes.choose(
            count > _WARP,
            [i32()] * 2,
            lambda: larger_than(first.value, second.value),
            lambda: [*larger_than(first.value), int32(TOPK)],
        )
        contenders = (first, second)
        wins = [x.live & (n < row.need) for x, n in zip(contenders, larger, strict=True)]
        won = lanes.popcount(lanes.warp_ballot(wins[0])) + lanes.popcount(
            lanes.warp_ballot(wins[1])
        )

        def with_ties() -> list[Lane]:
            """Scores tie for the last places: the lower columns win."""
            entries = self.shared + _ENTRIES_AT
            mine = [where(x.live, entry(order_key(x.value), x.column), 0) for x in contenders]
            for i, x in enumerate(mine):
                (entries + (self.lane + i * _WARP) * 2).store(x)
            lanes.warp_barrier()
            ranks = count_better(entries, count, mine)
            return [x.live & (n < row.need) for x, n in zip(contenders, ranks, strict=True)]

        return lanes.choose(won.ne(row.need), [lanes.i1()] * 2, with_ties, lambda: wins)

    def _put_winner(self, contender: _Contender, wins: Lane, row: Row) -> None:
        """Puts a winner where its id belongs among the other winners'."""
        lower = row.chosen_at
        for i in range(0, TOPK, 4):
            for other in (self.shared + (_PICKED_AT + i)).load_vector(i32(), 4):
                lower = lower + lanes.is_negative(other - contender.column)  # both are >= 0
        with lanes.when(wins):
            (self.shared + (lower + WORDS_AT)).store(contender.word)
            (self.shared + (lower + (WORDS_AT + TOPK))).store(self._id(contender.column))
