"""Top16 of score rows on Hopper, thread by thread, and its stock-op twin.

How a row is selected. Forced blocks are known from their numbers alone, and they lie at both ends
of the visible columns; what remains is an interval [front, back) of columns, of which the best
`need` = 16 - forced are wanted. A *team* works on a row: one warp, or the four warps of a
warpgroup where rows are few and long.

1. At most 64 columns: all of them are contenders. Otherwise every lane keeps the maximum of the
   columns it loaded. The need-th largest of the 32 lanes' maxima is a *bar* that at least `need`
   columns reach: only columns at or above it (about 22 of random scores) are contenders.
2. Should more than 64 columns reach the bar, or the bar be -inf (many equal scores; rows of -inf
   or NaN), the row is streamed in ascending order through a list of at most 64 entries, which is
   cut back to the best 16 whenever it holds more than 32.
3. A contender's rank is the number of better ones, counted against all of them. Those of rank
   below `need` win; a winner's place is the number of winners with a lower id.

An *entry* is an unsigned 64-bit integer, the order key (sign flipped) above 0x7fffffff - column:
the larger entry comes first in the contract's order, no two are equal, and 0 is below them all.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from msa_icp_jax import rows as candidate_rows
from msa_icp_jax.geometry import MAX_BLOCKS, NUM_HEADS, TOPK, cdiv
from msa_icp_jax.ops._mosaic import lanes
from msa_icp_jax.ops._mosaic.lanes import Lane, Words, f32, i32, i64, int32, where
from msa_icp_jax.rows import NEG_INF_WORD, NO_BLOCK, READY, ROW_WORDS

WARPS = 4  # of a warpgroup
_WARP = 32
_CONTENDERS = 64  # most that are ranked: two a lane
_LAST_COLUMN = 0x7FFFFFFF
_NEG_INF_KEY = NEG_INF_WORD ^ 0x7FFFFFFF
_NO_ENTRY = 0

# Shared memory of one team, in words; entries and maxima are read 16 bytes at a time.
_ENTRY_WORDS = 2 * (_CONTENDERS + 4)  # the last four pad a group of four
_WORDS_AT = 0  # the 32 words of the row to be stored
_PICKED_AT = _WORDS_AT + 2 * TOPK  # columns of the winners
_COUNT_AT = _PICKED_AT + TOPK
_COLUMNS_AT = _COUNT_AT + 4  # columns of the contenders
_MAXIMA_AT = _COLUMNS_AT + _CONTENDERS
_ENTRIES_AT = _MAXIMA_AT + _WARP * WARPS
TEAM_WORDS = _ENTRIES_AT + _ENTRY_WORDS * WARPS


@dataclasses.dataclass(frozen=True)
class Select:
    """The static facts of one select.

    Attributes:
      tokens: rows are those of [0, tokens) x 4 heads.
      columns: columns of the score plane.
      index_scale: blocks from one column to the next.
      begin, end: forced blocks at the start, and visible ones at the end.
      tagged: whether the rows are tagged.
      team: warps that share a row, 1 or 4.
    """

    tokens: int
    columns: int
    index_scale: int
    begin: int
    end: int
    tagged: bool
    team: int

    @property
    def rows(self) -> int:
        return self.tokens * NUM_HEADS

    @property
    def rows_at_once(self) -> int:
        """Rows that a warpgroup works on side by side."""
        return WARPS // self.team

    @property
    def vector(self) -> int:
        """Neighbouring columns that a lane loads at once: rows are 16-byte aligned, or not."""
        return 4 if self.columns % 4 == 0 else 1

    @property
    def chunks(self) -> int:
        """Loads of a lane that cover a row."""
        return cdiv(self.columns, self.vector * _WARP * self.team)


def select_rows(
    scores: Any,
    counts: Any,
    index_offset: Any,
    generations: Any | None,
    rows: Any,
    shared: Any,
    turn: Any,
    facts: Select,
    interpret: bool,
) -> None:
    """Selects rows ``[n turn, n turn + n)``, n = facts.rows_at_once; row = 4 token + head.

    Args:
      scores: ref float32 [>= tokens, 4, columns].
      counts: ref int32 [tokens], the visible blocks.
      index_offset: ref int32 [1], the block of column 0.
      generations: ref int32 [4, tokens] of the rows' tags, or None.
      rows: ref int32 [4, >= tokens, 33], or [4, tokens, 32, 2] when tagged.
      shared: ref int32 [4, TEAM_WORDS] in shared memory; not used by the stock ops.
      turn: which rows.
      facts: see `Select`.
      interpret: take the stock ops.
    """
    if interpret:
        for i in range(facts.rows_at_once):
            row = turn * facts.rows_at_once + i
            pl.when(row < facts.rows)(
                lambda row=row: _select_stock(
                    scores, counts, index_offset, generations, rows, row, facts
                )
            )
        return

    refs = [scores, counts, index_offset, rows, shared]
    if generations is not None:
        refs.append(generations)

    @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * len(refs), plgpu.Layout.WG_SPLAT))
    def select(_: Any, *arguments: Any) -> None:
        *refs, turn = arguments
        scores, counts, index_offset, rows, shared, *tags = (Words.of(ref) for ref in refs)
        capacity = ir.MemRefType(arguments[3].type).shape[1]
        _Team(facts).select(
            scores, counts, index_offset, rows, capacity, shared, tags, lanes.scalar(turn)
        )

    select(*refs, turn)


def _select_stock(
    scores: Any,
    counts: Any,
    index_offset: Any,
    generations: Any | None,
    rows: Any,
    row: Any,
    facts: Select,
) -> None:
    token, head = lax.div(row, NUM_HEADS), lax.rem(row, NUM_HEADS)
    count = jnp.maximum(counts[token], 0)
    ids = jnp.arange(facts.columns, dtype=jnp.int32) * facts.index_scale + index_offset[0]
    words = lax.bitcast_convert_type(scores[token, head], jnp.int32)
    keys = candidate_rows.candidate_keys(words, ids, count, facts.begin, facts.end)
    found = candidate_rows.pack(*candidate_rows.take_top16(keys, words, ids)[1:])
    if generations is not None:
        found = candidate_rows.tag(found, generations[head, token])
    rows[head, token] = found


# ---- the machine pieces ----


def order_key(score: Lane) -> Lane:
    """The int32 key that orders as the contract orders scores; see `rows.order_keys`."""
    score = where(score.ne(score), float("-inf"), score)
    score = where(score.eq(0.0), 0.0, score)
    return _flip(score.bits(i32()))


def order_key_of_word(word: Lane) -> Lane:
    """The order key of a score's bits."""
    return order_key(word.bits(f32()))


def flip_sign(key: Lane) -> Lane:
    """A signed key as one that orders unsigned, and back."""
    return key ^ -(1 << 31)


def _flip(word: Lane) -> Lane:
    """Float bits to key and back: negative floats order in reverse."""
    return word ^ ((word >> 31) & 0x7FFFFFFF)


def entry(key: Lane, column: Lane) -> Lane:
    """The 64-bit entry of a column and its order key."""
    return (flip_sign(key).to_i64() << 32) | (int32(_LAST_COLUMN) - column).to_i64()


def entry_column(of: Lane) -> Lane:
    return int32(_LAST_COLUMN) - of.to_i32()


def entry_key(of: Lane) -> Lane:
    return flip_sign((of >> 32).to_i32())


def count_better(
    entries: Words, count: Lane | int, mine: Lane, part: Lane | None = None, parts: int = 1
) -> Lane:
    """How many of the first `count` unsigned 64-bit entries in shared memory exceed `mine`.

    They are read in pairs, `parts` threads taking every parts-th pair. The entries behind them, up
    to a multiple of four, must be 0.
    """
    # Three instructions an entry: the borrow of a 64-bit subtraction is counted, with a minus sign.
    text = """{ .reg .b32 t, a, b, x, y; mov.b64 {a, b}, $1; mov.b64 {x, y}, $2;
        sub.cc.u32 t, a, x; subc.cc.u32 t, b, y; subc.u32 $0, $3, 0; }"""
    start = entries if part is None else entries + part * 4

    def pair(minus: Lane, at: Words) -> Lane:
        for other in at.load_vector(i64(), 2):
            minus = lanes.ptx(text, mine, other, minus, result=i32(), pure=True)
        return minus

    if isinstance(count, int):
        minus = int32(0)
        for i in range(0, 2 * count, 4 * parts):
            minus = pair(minus, start + i)
        return int32(0) - minus

    def two_pairs(i: Lane, minus: Lane) -> list[Lane]:
        return [pair(pair(minus, start + i * 2), start + (i * 2 + 4))]

    return int32(0) - lanes.loop(int32(0), count, 4, [int32(0)], two_pairs)[0]


class RunningTop16:
    """A warp's list of the best entries of columns that come in ascending order.

    The list lies in shared memory (`_ENTRY_WORDS` words, 16-byte aligned) and its state, carried
    through the caller's loop, is (entries held, key to exceed). `insert` takes one column a lane.
    """

    def __init__(self, entries: Words, need: Lane, lane: Lane) -> None:
        self.entries, self.need, self.lane = entries, need, lane

    def insert(self, score: Lane, column: Lane, valid: Lane, state: tuple[Lane, Lane]) -> Any:
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
            held > _CONTENDERS - _WARP,
            [i32(), i32()],
            lambda: self.cut(held),
            lambda: [held, key_to_exceed],
        )

    def cut(self, held: Lane) -> list[Lane]:
        """Keeps the best `need` of the entries held, best first; columns still to come must beat
        the last of them, for they have higher ids."""
        self._pad(held)
        lanes.warp_barrier()
        mine = [self._mine(i, held) for i in range(2)]
        ranks = [count_better(self.entries, held, x) for x in mine]
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


@dataclasses.dataclass
class _Row:
    """What a team knows about its row; columns, not blocks."""

    scores: Words
    first: Lane  # candidates are the columns [first, stop)
    front: Lane  # forced: [first, front) and [back, stop)
    back: Lane
    stop: Lane
    need: Lane  # columns to choose of [front, back), at most their number
    offset: Lane

    @property
    def open(self) -> Lane:
        """Columns that are not forced."""
        return self.back - self.front


class _Team:
    """The program of one thread of the warpgroup."""

    def __init__(self, facts: Select) -> None:
        self.facts = facts
        thread = lanes.thread() & (WARPS * _WARP - 1)
        self.lane = thread & (_WARP - 1)
        # Read from lane 0, which tells the compiler that it is the same in the whole warp.
        self.warp = lanes.warp_from(thread >> 5, 0)
        self.leads = (self.warp & (facts.team - 1)).eq(0)  # the warp that finishes the row

    def select(
        self,
        scores: Words,
        counts: Words,
        index_offset: Words,
        rows: Words,
        capacity: int,
        shared: Words,
        tags: list[Words],
        turn: Lane,
    ) -> None:
        facts = self.facts
        row = turn * facts.rows_at_once
        if facts.team == 1:
            row = row + self.warp
            shared = shared + self.warp * TEAM_WORDS
        with lanes.when(row < facts.rows):
            token, head = row >> 2, row & 3
            place = scores + row.to_i64() * facts.columns
            found = self._bounds((counts + token).load(), index_offset.load(), place)
            target = rows + (head.to_i64() * capacity + token.to_i64()) * (
                2 * candidate_rows.TAGGED_WORDS if facts.tagged else ROW_WORDS
            )
            self._store_forced(found, shared)
            count = self._contenders(found, shared)
            with lanes.when(self.leads):
                self._finish(found, count, shared)
                tag = (tags[0] + head * facts.tokens + token).load() if tags else None
                self._store(shared, target, tag)
            # The next row uses the same shared memory.
            lanes.team_barrier() if facts.team > 1 else lanes.warp_barrier()

    def _bounds(self, count: Lane, offset: Lane, scores: Words) -> _Row:
        """Where the candidates and the forced blocks among them lie."""
        facts = self.facts
        shift = facts.index_scale.bit_length() - 1

        def columns_below(block: Lane) -> Lane:
            return lanes.clip((block - offset + (facts.index_scale - 1)) >> shift, 0, facts.columns)

        count = lanes.maximum(count, 0)
        first = columns_below(int32(0))
        stop = columns_below(lanes.minimum(count, MAX_BLOCKS))
        front = lanes.clip(columns_below(int32(facts.begin)), first, stop)
        back = lanes.clip(columns_below(lanes.minimum(count - facts.end, MAX_BLOCKS)), front, stop)
        need = int32(TOPK) - (front - first) - (stop - back)
        return _Row(scores, first, front, back, stop, lanes.minimum(need, back - front), offset)

    def _id(self, column: Lane, row: _Row) -> Lane:
        return column * self.facts.index_scale + row.offset

    def _store_forced(self, row: _Row, shared: Words) -> None:
        """Puts the forced blocks and the tail in their places; the chosen ones stay open."""
        place = self.lane
        column = row.first + place
        chosen_at = row.front - row.first
        behind = place - (chosen_at + row.need)
        column = where(place < chosen_at, column, row.back + behind)
        is_open = (place >= chosen_at) & (behind < 0)
        with lanes.when(self.leads & (place < TOPK) & (is_open ^ 1)):
            live = column < row.stop

            def forced() -> list[Lane]:
                return [(row.scores + column).load(), self._id(column, row)]

            def tail() -> list[Lane]:
                return [int32(NEG_INF_WORD), int32(NO_BLOCK)]

            word, block = lanes.choose(live, [i32(), i32()], forced, tail)
            (shared + (place + _WORDS_AT)).store(word)
            (shared + (place + (_WORDS_AT + TOPK))).store(block)

    def _contenders(self, row: _Row, shared: Words) -> Lane:
        """Leaves the columns that may win in shared memory; returns how many.

        At most 64 columns are not written anywhere: contender i is then column front + i.
        """
        return lanes.choose(
            (row.open <= _CONTENDERS) | row.need.eq(0),
            [i32()],
            lambda: [where(row.need.eq(0), 0, row.open)],
            lambda: [self._scan(row, shared)],
        )[0]

    def _scan(self, row: _Row, shared: Words) -> Lane:
        """Contenders of a long row."""
        team = self.facts.team
        values = self._load(row)
        self._publish_maximum(values, shared)
        bar_key = self._bar(row, shared)
        bar = _flip(bar_key).bits(f32())
        found = self._collect(values, bar, row, shared)
        overflow = (found > _CONTENDERS) | (bar_key <= _NEG_INF_KEY)

        def stream() -> list[Lane]:
            self._stream(row, bar_key, shared)
            return [int32(TOPK * team)]

        return lanes.choose(overflow, [i32()], stream, lambda: [found])[0]

    def _column(self, chunk: Lane | int) -> Lane:
        """First column that this lane loads in a chunk."""
        team, vector = self.facts.team, self.facts.vector
        lane = self.lane if team == 1 else self.warp * _WARP + self.lane
        return int32(0).like(chunk) * (_WARP * team * vector) + lane * vector

    def _load(self, row: _Row) -> list[Lane]:
        """This lane's scores, NaN where a load would leave [front, back).

        The up to three columns at either end that share a load with columns outside are left to
        `_collect`, which takes them without looking at them.
        """
        vector = self.facts.vector
        stride = vector * _WARP * self.facts.team
        column = self._column(0)
        place = row.scores + column
        low, high = row.front - column, row.back - column - vector
        results = ", ".join(f"${i}" for i in range(vector))
        moves = " ".join(f"mov.b32 ${i}, 0x7fffffff;" for i in range(vector))
        kind = f"v{vector}.f32 {{{results}}}" if vector > 1 else f"f32 {results}"
        text = f"{moves} @${vector + 1} ld.global.{kind}, [${vector}];"
        values: list[Lane] = []
        for chunk in range(self.facts.chunks):
            inside = (low <= chunk * stride) & (high >= chunk * stride)
            pointer = Lane((place + chunk * stride).pointer)
            values += lanes.ptx(text, pointer, inside, result=[f32()] * vector)
        return values

    def _publish_maximum(self, values: list[Lane], shared: Words) -> None:
        bests = [lanes.constant(float("-inf"), f32())] * 4  # four short chains, not a long one
        for i, value in enumerate(values):
            bests[i % 4] = lanes.maximum(bests[i % 4], value)
        best = functools.reduce(lanes.maximum, bests)
        maxima = shared + _MAXIMA_AT
        if self.facts.team == 1:
            (maxima + self.lane).store(best)
            lanes.warp_barrier()
            return
        (maxima + (self.warp * _WARP + self.lane)).store(best)
        with lanes.when(self.leads & self.lane.eq(0)):
            (shared + _COUNT_AT).store(int32(0))
        lanes.team_barrier()

    def _bar(self, row: _Row, shared: Words) -> Lane:
        """Key of the need-th largest of the lanes' maxima."""
        maxima = shared + _MAXIMA_AT
        if self.facts.team > 1:
            # Lanes of the same number in all warps become one, in this warp's own copy.
            parts = [(maxima + (self.lane + _WARP * w)).load(f32()) for w in range(WARPS)]
            mine = parts[0]
            for part in parts[1:]:
                mine = lanes.maximum(mine, part)
            maxima = shared + (self.warp * _ENTRY_WORDS + _ENTRIES_AT)
            (maxima + self.lane).store(mine)
            lanes.warp_barrier()
        else:
            mine = (maxima + self.lane).load(f32())
        minus_larger = int32(0)
        for i in range(0, _WARP, 4):
            for other in (maxima + i).load_vector(f32(), 4):
                minus_larger = minus_larger + lanes.ones_where_greater(other, mine)
        key = _flip(mine.bits(i32()))
        return lanes.warp_min(where(minus_larger + row.need > 0, key, 0x7FFFFFFF))

    def _collect(self, values: list[Lane], bar: Lane, row: _Row, shared: Words) -> Lane:
        """Writes the columns that reach the bar, up to 64 of them; returns how many reach it."""
        team, vector = self.facts.team, self.facts.vector
        masks = []
        for start in range(0, len(values), _WARP):
            mask = int32(0)
            for bit, value in enumerate(values[start : start + _WARP]):
                mask = mask | (lanes.ones_where_greater(value, bar, equal=True) & (1 << bit))
            masks.append(mask)

        columns = shared + _COLUMNS_AT
        edges = self._edges(row, columns) if vector > 1 else int32(0)
        number = lanes.popcount(masks[0])
        for mask in masks[1:]:
            number = number + lanes.popcount(mask)
        upto = lanes.warp_prefix_sum(number, self.lane)
        total = lanes.warp_from(upto, _WARP - 1)
        place = edges + upto - number
        if team > 1:
            base = lanes.choose(
                self.lane.eq(0),
                [i32()],
                lambda: [(shared + _COUNT_AT).atomic_add(total)],
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
        if team == 1:
            lanes.warp_barrier()
            return edges + total
        lanes.team_barrier()
        return edges + (shared + _COUNT_AT).load()

    def _edges(self, row: _Row, columns: Words) -> Lane:
        """Takes the columns of [front, back) that `_load` left out; returns their number."""
        vector = self.facts.vector
        inner = (row.front + (vector - 1)) & -vector
        before = inner - row.front
        after = row.back & (vector - 1)
        column = where(self.lane < before, row.front, row.back - after - before) + self.lane
        with lanes.when(self.leads & (self.lane < before + after)):
            (columns + self.lane).store(column)
        return before + after

    def _stream(self, row: _Row, bar_key: Lane, shared: Words) -> None:
        """Contenders the slow way, whatever the scores: the best 16 of each warp's part of the row.

        Columns below the bar cannot win, which leaves few to insert in most rows. Places that are
        not taken get column -1.
        """
        team = self.facts.team
        warp = self.warp & (team - 1)
        entries = shared + (warp * _ENTRY_WORDS + _ENTRIES_AT)
        best = RunningTop16(entries, row.need, self.lane)
        share = ((row.open + (team * _WARP - 1)) >> (5 + team.bit_length() - 1)) << 5
        start = row.front + warp * share
        stop = lanes.minimum(start + share, row.back)

        def eight(first: Lane, held: Lane, key: Lane) -> tuple[Lane, ...]:
            """Loads 256 columns together, then inserts them in order."""
            state = (held, key)
            columns = [first + (self.lane + i * _WARP) for i in range(8)]
            scores = []
            for column in columns:
                pointer = Lane((row.scores + column).pointer)
                text = "mov.b32 $0, 0; @$2 ld.global.f32 $0, [$1];"
                scores.append(lanes.ptx(text, pointer, column < stop, result=f32()))
            for column, score in zip(columns, scores, strict=True):
                state = best.insert(score, column, column < stop, state)
            return state

        held, _ = lanes.loop(start, stop, 8 * _WARP, [int32(0), bar_key - 1], eight)
        lanes.warp_barrier()
        held, _ = best.cut(held)
        place = warp * TOPK + self.lane
        with lanes.when(self.lane < TOPK):
            found = entry_column((entries + self.lane * 2).load(i64()))
            (shared + _COLUMNS_AT + place).store(where(self.lane < held, found, -1))
        lanes.team_barrier() if team > 1 else lanes.warp_barrier()

    def _finish(self, row: _Row, count: Lane, shared: Words) -> None:
        """Ranks the contenders and puts the winners in their places."""
        entries, picked = shared + _ENTRIES_AT, shared + _PICKED_AT
        direct = row.open <= _CONTENDERS

        def contender(which: int) -> tuple[Lane, Lane, Lane]:
            """Column, raw word and entry of this lane's first or second contender."""
            index = self.lane + which * _WARP
            column = where(
                direct, row.front + index, (shared + _COLUMNS_AT + index).load()
            )
            live = (index < count) & (column >= 0)
            pointer = Lane((row.scores + column).pointer)
            text = "mov.b32 $0, 0; @$2 ld.global.f32 $0, [$1];"
            score = lanes.ptx(text, pointer, live, result=f32())
            mine = where(live, entry(order_key(score), column), _NO_ENTRY)
            (entries + index * 2).store(mine)
            return column, score.bits(i32()), mine

        def place(column: Lane, word: Lane, wins: Lane) -> None:
            """Stores a winner where its id belongs among the other winners'."""
            lower = int32(0)
            for i in range(0, TOPK, 4):
                for other in (picked + i).load_vector(i32(), 4):
                    lower = lower - ((other - column) >> 31)  # both are >= 0: no overflow
            at = row.front - row.first + lower
            with lanes.when(wins):
                (shared + (at + _WORDS_AT)).store(word)
                (shared + (at + (_WORDS_AT + TOPK))).store(self._id(column, row))

        with lanes.when(self.lane < TOPK):
            (picked + self.lane).store(int32(_LAST_COLUMN))
        first = contender(0)
        many = count > _WARP
        second = lanes.choose(
            many,
            [i32(), i32(), i64()],
            lambda: contender(1),
            lambda: [int32(0), int32(0), lanes.constant(_NO_ENTRY, i64())],
        )
        lanes.warp_barrier()
        rank = count_better(entries, count, first[2])
        wins = (rank < row.need) & first[2].ne(_NO_ENTRY)
        with lanes.when(wins):
            (picked + rank).store(first[0])

        def rank_second() -> list[Lane]:
            rank = count_better(entries, count, second[2])
            wins = (rank < row.need) & second[2].ne(_NO_ENTRY)
            with lanes.when(wins):
                (picked + rank).store(second[0])
            return [wins]

        second_wins = lanes.choose(
            many, [lanes.i1()], rank_second, lambda: [lanes.constant(0, lanes.i1())]
        )[0]
        lanes.warp_barrier()
        place(first[0], first[1], wins)
        with lanes.when(many):
            place(second[0], second[1], second_wins)
        lanes.warp_barrier()

    def _store(self, shared: Words, target: Words, tag: Lane | None) -> None:
        """Stores the row's 32 words together, one a lane, and the flag or the tags."""
        word = (shared + (self.lane + _WORDS_AT)).load()
        if tag is None:
            (target + self.lane).store(word)
            with lanes.when(self.lane.eq(0)):
                (target + 2 * TOPK).store(int32(READY))
            return
        pair = target + self.lane * 2
        pair.store(word)
        (pair + 1).store(tag)
