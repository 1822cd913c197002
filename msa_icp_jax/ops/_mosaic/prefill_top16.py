"""A running Top16 of every query row of the prefill scorer, and the rows made of it.

While a CTA walks a tile's columns in ascending order, each thread keeps the best 16 of its own row
(see `prefill_pieces`: a step leaves a row's page maxima in one lane), sorted, in registers. Sorting
a column in costs far more than the few columns that may enter are worth interrupting all 32 rows
of a warp for, so columns that beat the 16th best are first queued in shared memory; when a lane's
queue is nearly full, the warp sorts in all queues at once, an entry of every lane at a time.

Columns come in ascending order and only a better one displaces another, so of equal scores the
lower id stays. An empty place is NaN, which every score "beats", -inf too. Forced columns are known
from their numbers alone: they bypass the list, their scores go to a buffer of their own.

A tile's parts leave one list each; `finish_rows` joins them in the order of their columns.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from msa_icp_jax.geometry import MAX_BLOCKS, NUM_HEADS, TOPK, cdiv
from msa_icp_jax.ops._mosaic import lanes
from msa_icp_jax.ops._mosaic.lanes import (
    Lane,
    Words,
    f32,
    i32,
    int32,
    maximum,
    minimum,
    when,
    where,
)
from msa_icp_jax.ops._mosaic.prefill_pieces import (
    ROWS,
    Causal,
    Place,
    StepPages,
    page_maxima_stock,
    row_maxima,
)
from msa_icp_jax.ops.prefill_plan import balance
from msa_icp_jax.rows import NEG_INF_WORD, NO_BLOCK, READY, ROW_WORDS

LIST_WORDS = 2 * TOPK  # of a row: 16 scores, then their columns
QUEUE_WORDS = 2 * ROWS  # of one place of all queues: (score, column) of every thread
_QUEUE = 16  # places of a queue
QUEUE_SHAPE = (_QUEUE, QUEUE_WORDS)  # of the shared memory of a warpgroup's queues, in words
_LOWEST = float("-inf")
_NOTHING = float("nan")
_LAST = 0x7FFFFFFF

_SCALAR = plgpu.Layout.WG_SPLAT
_PER_ROW = plgpu.Layout.WG_STRIDED((ROWS,), 1)
_PER_LIST = plgpu.Layout.WG_STRIDED((TOPK * ROWS,), 1)


@dataclasses.dataclass(frozen=True)
class Selection:
    """Static facts of the selection.

    Attributes:
      pages: the pages of a step.
      tokens: query tokens.
      scale: blocks from one column to the next.
      begin, end: forced blocks at both ends of the visible ones.
      interpret: take the stock ops, in which row r stands where thread r's data stands otherwise.
    """

    pages: StepPages
    tokens: int
    scale: int
    begin: int
    end: int
    interpret: bool

    @property
    def positions(self) -> int:
        """Positions of a step."""
        return self.pages.count * self.pages.size

    @property
    def padded_rows(self) -> int:
        """Query rows of whole tiles."""
        return cdiv(self.tokens, balance.TILE_TOKENS) * balance.TILE_TOKENS * NUM_HEADS


class Bounds(NamedTuple):
    """The candidates of each row, int32 [128] each: columns [0, stop), of which [0, front) and
    [back, stop) are forced."""

    front: Any
    back: Any
    stop: Any


class Best(NamedTuple):
    """The lists of a warpgroup's rows: place i of row r at i * 128 + r."""

    scores: Any  # float32 [16 * 128]
    columns: Any  # int32 [16 * 128]
    queued: Any  # int32 [128]


def row_bounds(
    counts: Any, offset: Any, token: Any, begin: Any, end: Any, facts: Selection
) -> Bounds:
    """The bounds of 128 rows, the first of which is of `token`; none for rows out of [begin, end).

    `counts` is the ref of num_valid_pages, `offset` the block of column 0.
    """
    if facts.interpret:
        row = jnp.arange(ROWS)
        found = jnp.zeros((ROWS // NUM_HEADS,), jnp.int32)

        def load(i: Any, found: jax.Array) -> jax.Array:
            return found.at[i].set(counts[jnp.minimum(token + i, facts.tokens - 1)])

        found = jnp.repeat(lax.fori_loop(0, ROWS // NUM_HEADS, load, found), NUM_HEADS)
        return _bounds_stock(jnp.where((row >= begin) & (row < end), found, 0), offset, facts)

    result = plgpu.ShapeDtypeStruct((ROWS,), jnp.int32, _PER_ROW)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *[_SCALAR] * 4), return_type=(result, result, result)
    )
    def bounds(_: Any, counts: Any, *scalars: Any) -> Any:
        offset, token, begin, end = (lanes.scalar(x) for x in scalars)
        row = Place().row()
        count = (Words.of(counts) + minimum(token + (row >> 2), facts.tokens - 1)).load()
        count = where((row >= begin) & (row < end), count, 0)
        return tuple(_array([x], _PER_ROW) for x in _bounds(count, offset, facts))

    return Bounds(*bounds(counts, offset, token, begin, end))


def nothing_yet(facts: Selection) -> Best:
    """Empty lists."""
    if facts.interpret:
        return Best(
            jnp.full((TOPK * ROWS,), jnp.nan, jnp.float32),
            jnp.full((TOPK * ROWS,), NO_BLOCK, jnp.int32),
            jnp.zeros((ROWS,), jnp.int32),
        )

    @plgpu.inline_mgpu(return_type=_best_types())
    def empty(_: Any) -> Any:
        nothing = lanes.constant(_NOTHING, f32())
        return _best_arrays([nothing] * TOPK, [int32(NO_BLOCK)] * TOPK, int32(0))

    return Best(*empty())


def push(
    products: jax.Array,
    best: Best,
    bounds: Bounds,
    queues: Any,
    forced: Any,
    row: Any,
    column: Any,
    causal: Causal | None,
    facts: Selection,
) -> Best:
    """Takes in the page maxima of one step.

    Args:
      products: float32 [128, 128], query rows x keys.
      best, bounds: see there.
      queues: ref of this warpgroup's queues in shared memory.
      forced: ref, float32 [16, padded_rows], of the forced columns' scores: column c < front of a
        row at place c, column c >= back at place front + c - back.
      row: query row (4 token + head) of row 0.
      column: first column of the step.
      causal: None where all rows see all keys.
      facts: see `Selection`.
    """
    if facts.interpret:
        return _push_stock(products, best, bounds, forced, row, column, causal, facts)
    scalars = (row, column, *(causal or ()))

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.Layout.WGMMA,
            *(_PER_LIST, _PER_LIST, _PER_ROW),
            *(_PER_ROW, _PER_ROW, _PER_ROW),
            *(plgpu.RefType(), plgpu.RefType()),
            *[_SCALAR] * len(scalars),
        ),
        return_type=_best_types(),
    )
    def take(
        _: Any,
        products: Any,
        scores: Any,
        columns: Any,
        queued: Any,
        front: Any,
        back: Any,
        stop: Any,
        queues: Any,
        forced: Any,
        *scalars: Any,
    ) -> Any:
        row, column, *causal = (lanes.scalar(x) for x in scalars)
        place = Place()
        new = row_maxima(place, products, causal, facts.pages)
        new = [maximum(x, _LOWEST) for x in new]
        mine = _List(scores, columns, queued, queues, place)
        limits = Bounds(*(_elements(x)[0] for x in (front, back, stop)))
        for g, score in enumerate(new):
            mine.queue(score, column + g, limits)
        _store_forced(new, column, limits, Words.of(forced) + (row + place.row()), facts)
        crowded = mine.queued > _QUEUE - facts.pages.count
        return mine.arrays_after(lanes.warp_ballot(crowded).ne(0))

    return Best(*take(products, *best, *bounds, queues, forced, *scalars))


def publish(best: Best, queues: Any, target: Any, facts: Selection) -> None:
    """Writes the lists to `target`, a ref int32 [32, 128]."""
    if facts.interpret:
        words = lax.bitcast_convert_type(best.scores, jnp.int32)
        target[...] = jnp.concatenate([words, best.columns]).reshape(LIST_WORDS, ROWS)
        return

    @plgpu.inline_mgpu(arg_types=(_PER_LIST, _PER_LIST, _PER_ROW, plgpu.RefType(), plgpu.RefType()))
    def write(_: Any, scores: Any, columns: Any, queued: Any, queues: Any, target: Any) -> None:
        place = Place()
        mine = _List(scores, columns, queued, queues, place)
        scores, columns = mine.sorted_in()
        at = Words.of(target) + place.thread
        for i, word in enumerate([*scores, *columns]):
            (at + i * ROWS).store(word)

    write(*best, queues, target)


class Joined(NamedTuple):
    """Refs that `finish_rows` reads."""

    tiles: Any  # of the work list
    tile_of: Any
    lists: Any  # int32 [slots, 2, 32, 128]
    forced: Any  # float32 [16, padded_rows]
    counts: Any  # num_valid_pages


def finish_rows(
    refs: Joined, carrier: Any, stage: Any, offset: Any, part: Any, facts: Selection
) -> None:
    """One warpgroup: the candidate rows of tokens [32 part, 32 part + 32).

    Args:
      refs: see `Joined`.
      carrier: ref of the rows, int32 [4, capacity, 33].
      stage: ref, int32 [128 * 33], shared memory.
      offset: block of column 0.
      part: see above.
      facts: see `Selection`.
    """
    if facts.interpret:
        _finish_stock(refs, carrier, offset, part, facts)
        return
    listed, capacity = refs.tile_of.shape[0], carrier.shape[1]

    @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * 7, _SCALAR, _SCALAR))
    def finish(
        _: Any,
        tiles: Any,
        tile_of: Any,
        lists: Any,
        forced: Any,
        counts: Any,
        carrier: Any,
        stage: Any,
        offset: Any,
        part: Any,
    ) -> None:
        offset, part = lanes.scalar(offset), lanes.scalar(part)
        place = Place()
        row, first = place.row(), part * (ROWS // NUM_HEADS)
        token = first + (row >> 2)
        tile = (Words.of(tile_of) + minimum(token, listed - 1)).load()
        live = (token < listed) & (tile >= 0)
        fields = Words.of(tiles) + maximum(tile, 0) * balance.TILE_FIELDS
        slot = (fields + balance.FIRST_SLOT).load()
        parts = where(live, (fields + balance.PARTS).load(), 0)
        # Columns that the scorer went through; those behind them are -inf.
        seen = _steps((fields + balance.SCORED).load(), facts) * facts.pages.count
        seen = where(live, seen, 0)
        count = (Words.of(counts) + minimum(token, facts.tokens - 1)).load()
        bounds = _bounds(where(live, count, 0), offset, facts)

        source = Words.of(lists) + (slot * 2 + (part & 1)).to_i64() * (LIST_WORDS * ROWS)
        scores, columns = _join(source + place.thread, parts)
        need = minimum(
            maximum(int32(TOPK) - bounds.front - bounds.stop + bounds.back, 0),
            bounds.back - bounds.front,
        )
        scores, columns = _fill_up(scores, columns, maximum(bounds.front, seen))
        scores, columns = _by_column(scores, columns, need)

        target = Words.of(stage) + row * ROW_WORDS
        for i in range(TOPK):
            with when(need > i):
                _store_entry(target + bounds.front + i, scores[i], columns[i], offset, facts)
        source = Words.of(forced) + (part * ROWS + row)
        forced_count = bounds.front + bounds.stop - bounds.back

        def store_forced(f: Lane) -> tuple[()]:
            column = where(f < bounds.front, f, bounds.back + f - bounds.front)
            at = where(f < bounds.front, f, f + need)
            score = (source + f * facts.padded_rows).load(f32())
            score = where(column < seen, score, _LOWEST)
            _store_entry(target + at, score, column, offset, facts)
            return ()

        def store_tail(i: Lane) -> tuple[()]:
            (target + i).store(int32(NEG_INF_WORD))
            (target + i + TOPK).store(int32(NO_BLOCK))
            return ()

        lanes.loop(int32(0), forced_count, 1, (), store_forced)
        lanes.loop(forced_count + need, int32(TOPK), 1, (), store_tail)
        (target + 2 * TOPK).store(int32(READY))
        lanes.team_barrier()
        _store_rows(Words.of(stage), Words.of(carrier), first, capacity, facts)

    finish(*refs, carrier, stage, offset, part)


# ---- the stock twins ----


def _bounds_stock(count: jax.Array, offset: Any, facts: Selection) -> Bounds:
    def columns_below(block: Any) -> Any:
        return jnp.clip((block - offset + facts.scale - 1) // facts.scale, 0, _columns(facts))

    count = jnp.maximum(count, 0)
    stop = columns_below(jnp.minimum(count, MAX_BLOCKS))
    front = jnp.minimum(columns_below(facts.begin), stop)
    back = jnp.clip(columns_below(jnp.minimum(count - facts.end, MAX_BLOCKS)), front, stop)
    return Bounds(front, back, stop)


def _keep_best(scores: jax.Array, columns: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The best 16 of the first axis, best first; of equal ones the first; NaN is no candidate."""
    order = jnp.lexsort((-scores, jnp.isnan(scores)), axis=0)[:TOPK]
    return (
        jnp.take_along_axis(scores, order, axis=0),
        jnp.take_along_axis(columns, order, axis=0),
    )


def _push_stock(
    products: jax.Array,
    best: Best,
    bounds: Bounds,
    forced: Any,
    row: Any,
    column: Any,
    causal: Causal | None,
    facts: Selection,
) -> Best:
    new = page_maxima_stock(products, causal, facts.pages).T
    at = jnp.broadcast_to(column + jnp.arange(facts.pages.count)[:, None], new.shape)
    inside = (at >= bounds.front) & (at < bounds.back)
    scores, columns = _keep_best(
        jnp.concatenate([best.scores.reshape(TOPK, ROWS), jnp.where(inside, new, jnp.nan)]),
        jnp.concatenate([best.columns.reshape(TOPK, ROWS), at]),
    )
    store = ~inside & (at < bounds.stop)
    slot = jnp.where(at < bounds.front, at, bounds.front + at - bounds.back)

    @pl.when(store.any())
    def _() -> None:
        @pl.loop(0, ROWS, step=NUM_HEADS)
        def _(r: Any) -> None:
            for g in range(facts.pages.count):

                @pl.when(store[g, r])
                def _(g: int = g) -> None:
                    values = lax.dynamic_slice_in_dim(new[g], r, NUM_HEADS)
                    forced[slot[g, r], pl.ds(row + r, NUM_HEADS)] = values

    return Best(scores.reshape(-1), columns.reshape(-1), best.queued)


def _finish_stock(refs: Joined, carrier: Any, offset: Any, part: Any, facts: Selection) -> None:
    first = part * (ROWS // NUM_HEADS)
    listed = refs.tile_of.shape[0]
    place = jnp.arange(TOPK)[:, None]

    @pl.loop(0, jnp.clip(facts.tokens - first, 0, ROWS // NUM_HEADS))
    def _(t: Any) -> None:
        token = first + t
        tile = refs.tile_of[jnp.minimum(token, listed - 1)]
        live = (token < listed) & (tile >= 0)
        tile = jnp.maximum(tile, 0)
        parts = jnp.where(live, refs.tiles[tile, balance.PARTS], 0)
        slot = refs.tiles[tile, balance.FIRST_SLOT]
        steps = cdiv(refs.tiles[tile, balance.SCORED], facts.positions)
        seen = jnp.where(live, steps * facts.pages.count, 0)
        front, back, stop = _bounds_stock(jnp.where(live, refs.counts[token], 0), offset, facts)

        def join(i: Any, best: Any) -> Any:
            words = refs.lists[slot + i, lax.rem(part, 2), :, pl.ds(t * NUM_HEADS, NUM_HEADS)]
            new = lax.bitcast_convert_type(words[:TOPK], jnp.float32)
            return _keep_best(
                jnp.concatenate([best[0], new]), jnp.concatenate([best[1], words[TOPK:]])
            )

        nothing = (
            jnp.full((TOPK, NUM_HEADS), jnp.nan, jnp.float32),
            jnp.full((TOPK, NUM_HEADS), NO_BLOCK, jnp.int32),
        )
        scores, columns = lax.fori_loop(0, parts, join, nothing)
        held = jnp.sum(~jnp.isnan(scores), axis=0)
        columns = jnp.where(place < held, columns, jnp.maximum(front, seen) + place - held)
        scores = jnp.where(place < held, scores, -jnp.inf)
        need = jnp.minimum(jnp.maximum(TOPK - front - stop + back, 0), back - front)
        columns = jnp.where(place < need, columns, _LAST)
        order = jnp.argsort(columns, axis=0)
        chosen = jnp.clip(place - front, 0, TOPK - 1)
        chosen = jnp.take_along_axis(order, jnp.broadcast_to(chosen, order.shape), axis=0)
        scores = jnp.take_along_axis(scores, chosen, axis=0)
        columns = jnp.take_along_axis(columns, chosen, axis=0)

        is_chosen = (place >= front) & (place < front + need)
        f = jnp.where(place < front, place, place - need)
        column = jnp.where(f < front, f, back + f - front)
        rows = pl.ds(token * NUM_HEADS, NUM_HEADS)
        stored = jnp.stack([refs.forced[i, rows] for i in range(TOPK)])
        stored = jnp.take_along_axis(
            stored, jnp.broadcast_to(jnp.clip(f, 0, TOPK - 1), stored.shape), axis=0
        )
        scores = jnp.where(is_chosen, scores, jnp.where(column < seen, stored, -jnp.inf))
        columns = jnp.where(is_chosen, columns, column)
        used = place < front + need + stop - back
        scores = jnp.where(scores == 0, 0.0, jnp.where(used, scores, -jnp.inf))
        ids = jnp.where(used, columns * facts.scale + offset, NO_BLOCK)
        words = lax.bitcast_convert_type(scores, jnp.int32)
        flag = jnp.full((1, NUM_HEADS), READY, jnp.int32)
        carrier[:, token, :] = jnp.concatenate([words, ids, flag]).T


def _columns(facts: Selection) -> int:
    return MAX_BLOCKS // facts.scale


# ---- parts of the inline code: each emits the program of one CUDA thread ----


class _List:
    """This thread's list and queue."""

    def __init__(self, scores: Any, columns: Any, queued: Any, queues: Any, place: Place) -> None:
        self.scores, self.columns = _elements(scores), _elements(columns)
        self.queued = _elements(queued)[0]
        self.place = Words.of(queues) + place.thread * 2

    def queue(self, score: Lane, column: Lane, bounds: Bounds) -> None:
        """Queues a column that may enter the list."""
        enters = _beats(score, self.scores[-1]) & (column >= bounds.front) & (column < bounds.back)
        with when(enters):
            _store_pair(self.place + self.queued * QUEUE_WORDS, score, column)
        self.queued = self.queued + enters.to_i32()

    def sorted_in(self) -> tuple[list[Lane], list[Lane]]:
        """The list with all queued entries, an entry of every lane of the warp at a time."""

        def one(i: Lane, *entries: Lane) -> list[Lane]:
            score, column = (self.place + i * QUEUE_WORDS).load_vector(i32(), 2)
            return _insert(entries, score.bits(f32()), column, i < self.queued)

        longest = int32(0) - lanes.warp_min(int32(0) - self.queued)
        found = lanes.loop(int32(0), longest, 1, [*self.scores, *self.columns], one)
        return list(found[:TOPK]), list(found[TOPK:])

    def arrays_after(self, crowded: Lane) -> Any:
        """The state, the queue emptied where the warp's predicate `crowded` holds."""

        def emptied() -> list[Lane]:
            scores, columns = self.sorted_in()
            return [*scores, *columns, int32(0)]

        types = [f32()] * TOPK + [i32()] * (TOPK + 1)
        found = lanes.choose(
            crowded, types, emptied, lambda: [*self.scores, *self.columns, self.queued]
        )
        return _best_arrays(found[:TOPK], found[TOPK : 2 * TOPK], found[-1])


def _beats(score: Lane, other: Lane) -> Lane:
    """Whether a score takes the place of `other`; any score takes an empty one."""
    return (score <= other) ^ 1


def _insert(entries: Any, score: Lane, column: Lane, valid: Lane) -> list[Lane]:
    """A sorted list (16 scores, 16 columns) with a column that is behind all of it."""
    scores, columns = entries[:TOPK], entries[TOPK:]
    beats = [valid & _beats(score, s) for s in scores]
    after: list[list[Lane]] = [[], []]
    for old, new, out in ((scores, score, after[0]), (columns, column, after[1])):
        out.append(where(beats[0], new, old[0]))
        for i in range(1, TOPK):
            out.append(where(beats[i], where(beats[i - 1], old[i - 1], new), old[i]))
    return after[0] + after[1]


def _store_forced(
    scores: list[Lane], column: Lane, bounds: Bounds, row: Words, facts: Selection
) -> None:
    """Stores the scores of the step's forced columns, of which most steps have none."""
    count = len(scores)
    some = (column < bounds.front) | ((column + count > bounds.back) & (column < bounds.stop))
    with when(some):
        for g, score in enumerate(scores):
            at = column + g
            is_first = at < bounds.front
            place = where(is_first, at, bounds.front + at - bounds.back)
            with when((is_first | (at >= bounds.back)) & (at < bounds.stop)):
                (row + place * facts.padded_rows).store(score)


def _bounds(count: Lane, offset: Lane, facts: Selection) -> Bounds:
    shift = facts.scale.bit_length() - 1

    def columns_below(block: Lane) -> Lane:
        return lanes.clip((block - offset + (facts.scale - 1)) >> shift, 0, _columns(facts))

    count = maximum(count, 0)
    stop = columns_below(minimum(count, MAX_BLOCKS))
    front = minimum(columns_below(int32(facts.begin)), stop)
    back = lanes.clip(columns_below(minimum(count - facts.end, MAX_BLOCKS)), front, stop)
    return Bounds(front, back, stop)


def _steps(positions: Lane, facts: Selection) -> Lane:
    shift = facts.positions.bit_length() - 1
    return (positions + (facts.positions - 1)) >> shift


def _join(source: Words, parts: Lane) -> tuple[list[Lane], list[Lane]]:
    """The best 16 of a row's `parts` lists, which are in the order of their columns."""
    of_word = [f32()] * TOPK + [i32()] * TOPK

    def load_first() -> list[Lane]:
        return [(source + i * ROWS).load(of) for i, of in enumerate(of_word)]

    def none() -> list[Lane]:
        return [lanes.constant(_NOTHING, f32())] * TOPK + [int32(NO_BLOCK)] * TOPK

    entries = lanes.choose(parts > 0, of_word, load_first, none)

    def one_list(part: Lane, *entries: Lane) -> tuple[Lane, ...]:
        start = source + part * (2 * LIST_WORDS * ROWS)

        def one_entry(i: Lane, *entries: Lane) -> list[Lane]:
            at = start + i * ROWS
            score = at.load(f32())
            return _insert(entries, score, (at + TOPK * ROWS).load(), score.eq(score))

        return lanes.loop(int32(0), int32(TOPK), 1, entries, one_entry)

    entries = lanes.loop(int32(1), parts, 1, entries, one_list)
    return list(entries[:TOPK]), list(entries[TOPK:])


def _fill_up(
    scores: list[Lane], columns: list[Lane], behind: Lane
) -> tuple[list[Lane], list[Lane]]:
    """Gives empty places the columns from `behind` on, whose scores are -inf."""
    for i in range(TOPK):
        empty = scores[i].ne(scores[i])
        scores[i], columns[i] = where(empty, _LOWEST, scores[i]), where(empty, behind, columns[i])
        behind = behind + empty.to_i32()
    return scores, columns


def _by_column(
    scores: list[Lane], columns: list[Lane], need: Lane
) -> tuple[list[Lane], list[Lane]]:
    """The first `need` entries in the order of their columns."""
    columns = [where(need > i, column, _LAST) for i, column in enumerate(columns)]
    for a, b in _sorting_network(TOPK):
        swap = columns[a] > columns[b]
        for values in (scores, columns):
            low, high = values[a], values[b]
            values[a], values[b] = where(swap, high, low), where(swap, low, high)
    return scores, columns


def _sorting_network(size: int) -> list[tuple[int, int]]:
    """The comparators of Batcher's odd-even merge sort, for a power of two."""

    def merge(low: int, count: int, step: int) -> list[tuple[int, int]]:
        if 2 * step >= count:
            return [(low, low + step)]
        pairs = merge(low, count, 2 * step) + merge(low + step, count, 2 * step)
        return pairs + [(i, i + step) for i in range(low + step, low + count - step, 2 * step)]

    def sort(low: int, count: int) -> list[tuple[int, int]]:
        if count == 1:
            return []
        half = count // 2
        return sort(low, half) + sort(low + half, half) + merge(low, count, 1)

    return sort(0, size)


def _store_entry(place: Words, score: Lane, column: Lane, offset: Lane, facts: Selection) -> None:
    place.store(where(score.eq(0.0), 0.0, score))
    (place + TOPK).store(column * facts.scale + offset)


def _store_rows(stage: Words, carrier: Words, first: Lane, capacity: int, facts: Selection) -> None:
    """Copies 32 tokens' rows to their four heads' places, neighbouring words together."""
    thread = lanes.thread() & (ROWS - 1)
    words = ROWS // NUM_HEADS * ROW_WORDS
    live = minimum((int32(facts.tokens) - first) * ROW_WORDS, words)
    for head in range(NUM_HEADS):
        target = carrier + (first.to_i64() + head * capacity) * ROW_WORDS

        def one(i: Lane, head: int = head, target: Words = target) -> tuple[()]:
            token = Lane(arith.divui(i.value, int32(ROW_WORDS).value))
            source = i + (token * (NUM_HEADS - 1) + head) * ROW_WORDS
            (target + i).store((stage + source).load())
            return ()

        lanes.loop(thread, live, ROWS, (), one)


def _store_pair(place: Words, score: Lane, column: Lane) -> None:
    pair = llvm.mlir_undef(ir.VectorType.get((2,), i32()))
    for i, word in enumerate((score.bits(i32()), column)):
        pair = llvm.insertelement(pair, word.value, int32(i).value)
    llvm.store(pair, place.pointer, alignment=8)


def _best_types() -> Any:
    return (
        plgpu.ShapeDtypeStruct((TOPK * ROWS,), jnp.float32, _PER_LIST),
        plgpu.ShapeDtypeStruct((TOPK * ROWS,), jnp.int32, _PER_LIST),
        plgpu.ShapeDtypeStruct((ROWS,), jnp.int32, _PER_ROW),
    )


def _best_arrays(scores: Any, columns: Any, queued: Lane) -> Any:
    return _array(scores, _PER_LIST), _array(columns, _PER_LIST), _array([queued], _PER_ROW)


def _array(elements: Any, layout: Any) -> Any:
    """An array with len(elements) elements a thread."""
    vector_type = ir.VectorType.get((1,), elements[0].type)
    registers = np.empty((len(elements),), dtype=object)
    for i, x in enumerate(elements):
        registers[i] = llvm.insertelement(llvm.mlir_undef(vector_type), x.value, int32(0).value)
    signed = None if isinstance(elements[0].type, ir.FloatType) else True
    return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=signed)


def _elements(array: Any) -> list[Lane]:
    """This thread's elements of an array."""
    return [Lane(llvm.extractelement(x, int32(0).value)) for x in array.registers.flat]
