"""A running Top16 of every query row of the prefill scorer, and the rows made of it.

While a CTA walks a tile's columns in ascending order, each thread of a selecting warpgroup looks
after one row of its consumer (see `prefill_pieces`: thread t after row `Place.row()`). Columns that
beat the row's *bar*, the 16th best score so far, are appended to the row's *log* in global memory.
Their scores alone are noted in shared memory too; when a row of the warp has nearly as many notes
as there is room for, a network merges the notes of all its rows with the 16 best scores, which a
thread keeps sorted in registers: the new 16th is the bar from then on. A log that runs full is cut
back to its best 16 entries, which few rows ever need.

A log is always in the order of its columns, so of equal scores at the bar the first ones stay: the
lower ids. Scores of hidden pages, -inf, are carried as a number below all real scores, so that -inf
is free to mean an empty place. Forced columns are known from their numbers alone: they bypass the
log, their scores go to a buffer of their own.

A tile's parts leave one log each, and their 16 best scores. The warp that ends last joins them and
writes the rows: it finds the bar of all parts' scores, then passes through the logs in the order of
their columns. It is told by a counter that all warps of a tile's parts add to.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
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
    Place,
    StepPages,
    as_array,
    of_array,
    shared_maxima,
)
from msa_icp_jax.ops.prefill_plan import balance
from msa_icp_jax.rows import NEG_INF_WORD, NO_BLOCK, READY, ROW_WORDS

_NOTES = 16  # scores noted between two changes of the bar
_PLACES = 64  # of a log
_CHUNK = 8  # places that are read at a time
LOG_SHAPE = (_PLACES, 2 * ROWS)  # a warpgroup's logs, int32: (score, column) of every thread
NOTES_SHAPE = (_NOTES, ROWS)  # its notes, float32
RANKED_SHAPE = (TOPK, ROWS)  # what the best scores are left in, float32
_WARPS = 4
STAGE_SHAPE = (_WARPS, 32 * ROW_WORDS)  # where a warpgroup puts rows together, int32
_HIDDEN = -1e30  # real scores are below 448 * 448 * 128 in size
_EMPTY = float("-inf")

_SCALAR = plgpu.Layout.WG_SPLAT
_PER_ROW = plgpu.Layout.WG_STRIDED((ROWS,), 1)
_PER_LIST = plgpu.Layout.WG_STRIDED((TOPK * ROWS,), 1)


@dataclasses.dataclass(frozen=True)
class Selection:
    """Static facts of the selection.

    Attributes:
      pages: the pages of a step.
      tokens: query tokens.
      columns: columns that are candidates at most.
      scale: blocks from one column to the next.
      begin, end: forced blocks at both ends of the visible ones.
      interpret: take the stock ops, in which row r stands where thread r's data stands otherwise.
    """

    pages: StepPages
    tokens: int
    columns: int
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
    """Each row's candidates, columns [0, stop), of which [0, front) and [back, stop) are forced.

    Three arrays int32 [128].
    """

    front: Any
    back: Any
    stop: Any


class Best(NamedTuple):
    """What a thread knows of its row.

    Attributes:
      scores: float32 [16 * 128], the best scores, i-th best of row r at i * 128 + r; the bar is the
        last of them. In stock ops the log's entries are all there is.
      notes: int32 [128], scores noted since.
      count: int32 [128], entries in the log.
    """

    scores: Any
    notes: Any
    count: Any


class Scratch(NamedTuple):
    """Refs to what the parts of all tiles leave.

    Attributes:
      logs: int32 [slots, 2, *LOG_SHAPE].
      counts: int32 [slots, 2, 128], entries of the logs.
      ranked: float32 [slots, 2, *RANKED_SHAPE].
      forced: float32 [16, padded rows], the forced columns' scores: column c < front of a row at
        place c, column c >= back at place front + c - back.
    """

    logs: Any
    counts: Any
    ranked: Any
    forced: Any

    @staticmethod
    def types(slots: int, facts: Selection) -> Scratch:
        return Scratch(
            jax.ShapeDtypeStruct((slots, 2, *LOG_SHAPE), jnp.int32),
            jax.ShapeDtypeStruct((slots, 2, ROWS), jnp.int32),
            jax.ShapeDtypeStruct((slots, 2, *RANKED_SHAPE), jnp.float32),
            jax.ShapeDtypeStruct((TOPK, facts.padded_rows), jnp.float32),
        )


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

    result = plgpu.ShapeDtypeStruct((ROWS,), np.dtype(np.int32), _PER_ROW)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *[_SCALAR] * 4), return_type=(result, result, result)
    )
    def bounds(_: Any, counts: Any, *scalars: Any) -> Any:
        offset, token, begin, end = (lanes.scalar(x) for x in scalars)
        row = Place().row()
        count = (Words.of(counts) + minimum(token + (row >> 2), facts.tokens - 1)).load()
        count = where((row >= begin) & (row < end), count, 0)
        return tuple(as_array([x], _PER_ROW) for x in _bounds(count, offset, facts))

    return Bounds(*bounds(counts, offset, token, begin, end))


def nothing_yet(facts: Selection) -> Best:
    """Empty logs."""
    if facts.interpret:
        none = jnp.zeros((ROWS,), jnp.int32)
        return Best(jnp.full((TOPK * ROWS,), _EMPTY, jnp.float32), none, none)

    @plgpu.inline_mgpu(return_type=_best_types())
    def empty(_: Any) -> Any:
        scores = [lanes.constant(_EMPTY, f32())] * TOPK
        none = as_array([int32(0)], _PER_ROW)
        return as_array(scores, _PER_LIST), none, none

    return Best(*empty())


def push(
    fresh: Any,
    best: Best,
    bounds: Bounds,
    notes: Any,
    log: Any,
    forced: Any,
    row: Any,
    column: Any,
    facts: Selection,
) -> Best:
    """Takes in the page maxima of one step.

    Args:
      fresh: ref of the maxima in shared memory, see `prefill_pieces.share_maxima`.
      best, bounds: see there.
      notes: ref of this warpgroup's notes in shared memory.
      log: ref of this part's logs, LOG_SHAPE.
      forced: see `Scratch`.
      row: query row (4 token + head) of row 0.
      column: first column of the step.
      facts: see `Selection`.
    """
    if facts.interpret:
        return _push_stock(fresh, best, bounds, log, forced, row, column, facts)

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(),
            *(_PER_LIST, _PER_ROW, _PER_ROW),
            *(_PER_ROW, _PER_ROW, _PER_ROW),
            *[plgpu.RefType()] * 3,
            *(_SCALAR, _SCALAR),
        ),
        return_type=_best_types(),
    )
    def take(
        _: Any,
        fresh: Any,
        scores: Any,
        noted: Any,
        count: Any,
        front: Any,
        back: Any,
        stop: Any,
        notes: Any,
        log: Any,
        forced: Any,
        row: Any,
        column: Any,
    ) -> Any:
        row, column = lanes.scalar(row), lanes.scalar(column)
        place = Place()
        new = [maximum(x, _HIDDEN) for x in shared_maxima(place, fresh, facts.pages)]
        state = (of_array(scores), of_array(noted)[0], of_array(count)[0])
        running = _Running(Words.of(notes), Words.of(log), place, *state)
        limits = Bounds(*(of_array(x)[0] for x in (front, back, stop)))
        for g, score in enumerate(new):
            at = column + g
            enters = (score > running.bar) & (at >= limits.front) & (at < limits.back)
            running.append(score, at, enters)
        _store_forced(new, column, limits, Words.of(forced) + (row + place.row()), facts)
        running.make_room(facts.pages.count)
        return running.arrays()

    return Best(*take(fresh, *best, *bounds, notes, log, forced, row, column))


class Part(NamedTuple):
    """One half of a tile's part in a CTA's range, as scalars.

    Attributes:
      half: 0 or 1.
      slot: of the part.
      tile: number of the tile.
      first_slot, parts: of the tile.
      scored: positions that the tile's last token sees.
      row: query row (4 token + head) of row 0 of the half.
      begin, end: rows of the half that belong to the tile.
      offset: block of column 0.
    """

    half: Any
    slot: Any
    tile: Any
    first_slot: Any
    parts: Any
    scored: Any
    row: Any
    begin: Any
    end: Any
    offset: Any


def finish_part(
    best: Best,
    bounds: Bounds,
    notes: Any,
    scratch: Scratch,
    counters: Any,
    carrier: Any,
    stage: Any,
    part: Part,
    facts: Selection,
) -> None:
    """Leaves what a part has found; the warp that is the last of its tile writes the rows.

    Args:
      best, bounds: see there.
      notes: ref of this warpgroup's notes in shared memory.
      scratch: see there.
      counters: ref, int32 [tiles, balance.COUNTERS], 0 before and after the launch.
      carrier: ref of the rows, int32 [4, capacity, 33].
      stage: ref of this warpgroup's STAGE_SHAPE, shared memory.
      part: see there.
      facts: see `Selection`.
    """
    if facts.interpret:  # rows are then made by a launch of their own
        _publish_stock(best, scratch, part)
        return
    capacity = carrier.shape[1]

    @plgpu.inline_mgpu(
        arg_types=(
            *(_PER_LIST, _PER_ROW, _PER_ROW),
            *(_PER_ROW, _PER_ROW, _PER_ROW),
            *[plgpu.RefType()] * 8,
            *[_SCALAR] * len(part),
        )
    )
    def finish(
        _: Any,
        scores: Any,
        noted: Any,
        count: Any,
        front: Any,
        back: Any,
        stop: Any,
        notes: Any,
        logs: Any,
        counts: Any,
        ranked: Any,
        forced: Any,
        counters: Any,
        carrier: Any,
        stage: Any,
        *part: Any,
    ) -> None:
        at = Part(*(lanes.scalar(x) for x in part))
        place = Place()
        own = _Lists(Words.of(logs), Words.of(counts), Words.of(ranked), at.half, place)
        state = (of_array(scores), of_array(noted)[0], of_array(count)[0])
        running = _Running(Words.of(notes), own.log(at.slot), place, *state)
        running.rank_notes()
        own.leave(at.slot, running)
        warp = place.thread >> 5
        counter = Words.of(counters) + (at.tile * balance.COUNTERS + at.half * _WARPS + warp)
        with when(_is_last(counter, at.parts)):
            limits = Bounds(*(of_array(x)[0] for x in (front, back, stop)))
            row = place.row()
            live = (row >= at.begin) & (row < at.end)
            writer = _Rows(Words.of(stage), Words.of(carrier), capacity, place, at.offset, facts)
            seen = _steps(at.scored, facts) * facts.pages.count
            best_scores = own.best(at.first_slot, at.parts)
            out = writer.row(limits, seen)
            out.store_chosen(best_scores, own, at.first_slot, at.parts)
            out.store_forced(Words.of(forced) + (at.row + row))
            out.store_tail()
            writer.copy(at.row >> 2, live)

    finish(*best, *bounds, notes, *scratch, counters, carrier, stage, *part)


def write_unscored(
    tiles: Any,
    tile_of: Any,
    counts: Any,
    carrier: Any,
    stage: Any,
    first: Any,
    offset: Any,
    facts: Selection,
) -> None:
    """Writes the rows of those of 32 tokens that no CTA scores anything for.

    Args:
      tiles, tile_of: refs of the work list.
      counts: ref of num_valid_pages.
      carrier, stage: as in `finish_part`.
      first: the first of the tokens.
      offset: block of column 0.
      facts: see `Selection`.
    """
    if facts.interpret:
        return
    listed, capacity = tile_of.shape[0], carrier.shape[1]

    @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * 5, _SCALAR, _SCALAR))
    def write(
        _: Any,
        tiles: Any,
        tile_of: Any,
        counts: Any,
        carrier: Any,
        stage: Any,
        first: Any,
        offset: Any,
    ) -> None:
        first, offset = lanes.scalar(first), lanes.scalar(offset)
        place = Place()
        token = first + (place.row() >> 2)
        tile = (Words.of(tile_of) + minimum(token, listed - 1)).load()
        tile = where(token < listed, tile, -1)
        parts = (Words.of(tiles) + (maximum(tile, 0) * balance.TILE_FIELDS + balance.PARTS)).load()
        live = (token < facts.tokens) & ((tile < 0) | parts.eq(0))
        with when(lanes.warp_ballot(live).ne(0)):
            count = (Words.of(counts) + minimum(token, facts.tokens - 1)).load()
            limits = _bounds(where(tile < 0, 0, count), offset, facts)
            writer = _Rows(Words.of(stage), Words.of(carrier), capacity, place, offset, facts)
            out = writer.row(limits, int32(0))
            out.store_hidden(int32(0))
            out.store_forced(None)
            out.store_tail()
            writer.copy(first, live)

    write(tiles, tile_of, counts, carrier, stage, first, offset)


# ---- the stock twins ----


def _bounds_stock(count: jax.Array, offset: Any, facts: Selection) -> Bounds:
    def columns_below(block: Any) -> Any:
        return jnp.clip((block - offset + facts.scale - 1) // facts.scale, 0, facts.columns)

    count = jnp.maximum(count, 0)
    stop = columns_below(jnp.minimum(count, MAX_BLOCKS))
    front = jnp.minimum(columns_below(facts.begin), stop)
    back = jnp.clip(columns_below(jnp.minimum(count - facts.end, MAX_BLOCKS)), front, stop)
    return Bounds(front, back, stop)


def _keep_best(scores: jax.Array, columns: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The best 16 of the first axis, in its order; of equal ones the first; _EMPTY is none."""
    best = jnp.lexsort((-scores,), axis=0)[:TOPK]
    best = jnp.sort(
        jnp.where(jnp.take_along_axis(scores, best, axis=0) > _EMPTY, best, len(scores)), axis=0
    )
    scores = jnp.concatenate([scores, jnp.full_like(scores[:1], _EMPTY)])
    columns = jnp.concatenate([columns, jnp.full_like(columns[:1], NO_BLOCK)])
    return jnp.take_along_axis(scores, best, axis=0), jnp.take_along_axis(columns, best, axis=0)


def _push_stock(
    fresh: Any,
    best: Best,
    bounds: Bounds,
    log: Any,
    forced: Any,
    row: Any,
    column: Any,
    facts: Selection,
) -> Best:
    """Cuts the log back at every step; its first places are all the state there is."""
    new = fresh[pl.ds(0, ROWS * facts.pages.count)].reshape(ROWS, facts.pages.count)
    new = jnp.maximum(new, _HIDDEN).T
    at = jnp.broadcast_to(column + jnp.arange(facts.pages.count)[:, None], new.shape)
    inside = (at >= bounds.front) & (at < bounds.back)
    place = jnp.arange(TOPK)[:, None]
    words = log[:TOPK].reshape(TOPK, ROWS, 2)
    old = lax.bitcast_convert_type(words[..., 0], jnp.float32)
    scores, columns = _keep_best(
        jnp.concatenate(
            [jnp.where(place < best.count, old, _EMPTY), jnp.where(inside, new, _EMPTY)]
        ),
        jnp.concatenate([words[..., 1], at]),
    )
    words = jnp.stack([lax.bitcast_convert_type(scores, jnp.int32), columns], axis=-1)
    log[:TOPK] = words.reshape(TOPK, 2 * ROWS)
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

    return best._replace(count=jnp.sum(scores > _EMPTY, axis=0, dtype=jnp.int32))


def _publish_stock(best: Best, scratch: Scratch, part: Part) -> None:
    scratch.counts[part.slot, part.half] = best.count


def write_rows_stock(
    tiles: Any,
    tile_of: Any,
    counts: Any,
    scratch: Scratch,
    carrier: Any,
    offset: Any,
    part: Any,
    facts: Selection,
) -> None:
    """The rows of tokens [32 part, 32 part + 32), of what `finish_part` left in stock ops."""
    first = part * (ROWS // NUM_HEADS)
    listed = tile_of.shape[0]
    place = jnp.arange(TOPK)[:, None]

    @pl.loop(0, jnp.clip(facts.tokens - first, 0, ROWS // NUM_HEADS))
    def _(t: Any) -> None:
        token = first + t
        tile = tile_of[jnp.minimum(token, listed - 1)]
        live = (token < listed) & (tile >= 0)
        tile = jnp.maximum(tile, 0)
        parts = jnp.where(live, tiles[tile, balance.PARTS], 0)
        slot = tiles[tile, balance.FIRST_SLOT]
        steps = cdiv(tiles[tile, balance.SCORED], facts.positions)
        seen = jnp.where(live, steps * facts.pages.count, 0)
        front, back, stop = _bounds_stock(jnp.where(live, counts[token], 0), offset, facts)

        def join(i: Any, best: Any) -> Any:
            half = lax.rem(part, 2)
            words = pl.ds(t * 2 * NUM_HEADS, 2 * NUM_HEADS)
            new = scratch.logs[slot + i, half, pl.ds(0, TOPK), words].reshape(TOPK, NUM_HEADS, 2)
            count = scratch.counts[slot + i, half, pl.ds(t * NUM_HEADS, NUM_HEADS)]
            scores = lax.bitcast_convert_type(new[..., 0], jnp.float32)
            scores = jnp.where(place < count, scores, _EMPTY)
            return _keep_best(
                jnp.concatenate([best[0], scores]), jnp.concatenate([best[1], new[..., 1]])
            )

        nothing = (
            jnp.full((TOPK, NUM_HEADS), _EMPTY, jnp.float32),
            jnp.full((TOPK, NUM_HEADS), NO_BLOCK, jnp.int32),
        )
        scores, columns = lax.fori_loop(0, parts, join, nothing)
        need = jnp.minimum(jnp.maximum(TOPK - front - stop + back, 0), back - front)
        rank = jnp.argsort(jnp.argsort(-scores, axis=0), axis=0)
        scores, columns = _keep_best(jnp.where(rank < need, scores, _EMPTY), columns)
        held = jnp.sum(scores > _EMPTY, axis=0)
        columns = jnp.where(place < held, columns, jnp.maximum(front, seen) + place - held)
        chosen = jnp.broadcast_to(jnp.clip(place - front, 0, TOPK - 1), scores.shape)
        scores = jnp.take_along_axis(scores, chosen, axis=0)
        columns = jnp.take_along_axis(columns, chosen, axis=0)

        is_chosen = (place >= front) & (place < front + need)
        f = jnp.where(place < front, place, place - need)
        column = jnp.where(f < front, f, back + f - front)
        rows = pl.ds(token * NUM_HEADS, NUM_HEADS)
        stored = jnp.stack([scratch.forced[i, rows] for i in range(TOPK)])
        stored = jnp.take_along_axis(
            stored, jnp.broadcast_to(jnp.clip(f, 0, TOPK - 1), stored.shape), axis=0
        )
        scores = jnp.where(is_chosen, scores, jnp.where(column < seen, stored, -jnp.inf))
        columns = jnp.where(is_chosen, columns, column)
        used = place < front + need + stop - back
        scores = jnp.where(used & (scores > _HIDDEN), scores, -jnp.inf)
        scores = jnp.where(scores == 0, 0.0, scores)
        ids = jnp.where(used, columns * facts.scale + offset, NO_BLOCK)
        words = lax.bitcast_convert_type(scores, jnp.int32)
        flag = jnp.full((1, NUM_HEADS), READY, jnp.int32)
        carrier[:, token, :] = jnp.concatenate([words, ids, flag]).T


# ---- parts of the inline code: each emits the program of one CUDA thread ----


class _Running:
    """This thread's notes, log and best scores."""

    def __init__(
        self, notes: Words, log: Words, place: Place, scores: list[Lane], noted: Lane, count: Lane
    ) -> None:
        self.notes, self.log = notes + place.thread, log + place.thread * 2
        self.scores, self.noted, self.count = scores, noted, count

    @property
    def bar(self) -> Lane:
        """What a new score has to exceed."""
        return self.scores[-1]

    def arrays(self) -> Any:
        return (
            as_array(self.scores, _PER_LIST),
            as_array([self.noted], _PER_ROW),
            as_array([self.count], _PER_ROW),
        )

    def append(self, score: Lane, column: Lane, enters: Lane) -> None:
        with when(enters):
            (self.notes + self.noted * ROWS).store(score)
            _store_pair(self.log + self.count * (2 * ROWS), score, column)
        self.noted = self.noted + enters.to_i32()
        self.count = self.count + enters.to_i32()

    def make_room(self, wanted: int) -> None:
        """Makes room for `wanted` entries; all lanes of a warp come here together."""
        types = [f32()] * TOPK + [i32(), i32()]
        full = self.count > _PLACES - wanted
        crowded = lanes.warp_ballot(full | (self.noted > _NOTES - wanted)).ne(0)

        def rank() -> list[Lane]:
            inside = copy.copy(self)
            inside.rank_notes()
            (count,) = lanes.choose(
                lanes.warp_ballot(full).ne(0), [i32()], inside._cut, lambda: [self.count]
            )
            return [*inside.scores, inside.noted, count]

        state = [*self.scores, self.noted, self.count]
        *self.scores, self.noted, self.count = lanes.choose(crowded, types, rank, lambda: state)

    def rank_notes(self) -> None:
        """Brings the notes among the best scores."""
        found = [(self.notes + i * ROWS).load(f32()) for i in range(_NOTES)]
        found = [where(self.noted > i, x, _EMPTY) for i, x in enumerate(found)]
        self.scores = _best_of_two(self.scores, found)
        self.noted = int32(0)

    def _cut(self) -> list[Lane]:
        """Leaves the log's best 16 entries and returns how many there are; no notes are open."""
        stays = _AtBar(self.bar, _count_equal(self.scores, self.bar))

        def some(first: Lane, kept: Lane, left: Lane) -> list[Lane]:
            stays.left = left
            start = self.log + first * (2 * ROWS)
            pairs = [(start + i * (2 * ROWS)).load_vector(i32(), 2) for i in range(_CHUNK)]
            for i, (word, column) in enumerate(pairs):
                stay = stays(word.bits(f32())) & (first + i < self.count)
                with when(stay):
                    _store_pair(self.log + kept * (2 * ROWS), word.bits(f32()), column)
                kept = kept + stay.to_i32()
            return [kept, stays.left]

        kept, _ = lanes.loop(int32(0), int32(_PLACES), _CHUNK, [int32(0), stays.left], some)
        return [kept]


class _Lists:
    """This thread's places in what parts leave."""

    def __init__(self, logs: Words, counts: Words, ranked: Words, half: Lane, place: Place) -> None:
        self.logs, self.counts, self.ranked = logs, counts, ranked
        self.half, self.thread = half, place.thread

    def _own(self, slot: Lane) -> Lane:
        return (slot * 2 + self.half).to_i64()

    def log(self, slot: Lane) -> Words:
        """The logs of a slot."""
        return self.logs + self._own(slot) * (_PLACES * 2 * ROWS)

    def _count(self, slot: Lane) -> Words:
        return self.counts + self._own(slot) * ROWS + self.thread

    def _ranked(self, slot: Lane) -> Words:
        return self.ranked + self._own(slot) * (TOPK * ROWS) + self.thread

    def leave(self, slot: Lane, running: _Running) -> None:
        self._count(slot).store(running.count)
        for i, score in enumerate(running.scores):
            (self._ranked(slot) + i * ROWS).store(score)

    def best(self, slot: Lane, parts: Lane) -> list[Lane]:
        """The best 16 scores of `parts` >= 1 slots, descending."""

        def of_slot(slot: Lane) -> list[Lane]:
            return [(self._ranked(slot) + i * ROWS).load(f32()) for i in range(TOPK)]

        def one(other: Lane, *scores: Lane) -> list[Lane]:
            return _best_of_descending(list(scores), of_slot(other))

        return list(lanes.loop(slot + 1, slot + parts, 1, of_slot(slot), one))

    def entries(self, slot: Lane, carry: list[Lane], body: Callable[..., list[Lane]]) -> Any:
        """`carry = body(score, column, is_one, *carry)` for the entries of a slot in order."""
        count = self._count(slot).load()
        log = self.log(slot) + self.thread * 2

        def some(first: Lane, *carry: Lane) -> list[Lane]:
            start = log + first * (2 * ROWS)
            pairs = [(start + i * (2 * ROWS)).load_vector(i32(), 2) for i in range(_CHUNK)]
            for i, (word, column) in enumerate(pairs):
                carry = tuple(body(word.bits(f32()), column, first + i < count, *carry))
            return list(carry)

        return lanes.loop(int32(0), count, _CHUNK, carry, some)


def _is_last(counter: Words, parts: Lane) -> Lane:
    """Whether this warp is the last of `parts` to come here; the counter is 0 again then.

    What the others wrote before is visible to it.
    """
    one = int32(1)

    def count() -> list[Lane]:
        _device_fence()
        lanes.warp_barrier()
        leads = (lanes.thread() & 31).eq(0)
        address = Lane(llvm.ptrtoint(lanes.i64(), counter.pointer))
        text = "atom.global.inc.u32 $0, [$1], $2;"  # after parts - 1 comes 0
        (before,) = lanes.choose(
            leads,
            [i32()],
            lambda: [lanes.ptx(text, address, parts - 1, result=i32())],
            lambda: [one],
        )
        before = lanes.warp_from(before, 0)
        _device_fence()
        return [before.eq(parts - 1)]

    return lanes.choose(parts > 1, [lanes.i1()], count, lambda: [one.eq(1)])[0]


def _device_fence() -> None:
    """Orders this thread's memory accesses before it and after it for the whole device."""
    llvm.fence(llvm.AtomicOrdering.acq_rel, syncscope="device")


class _AtBar:
    """A predicate for scores in their order: above the bar, or among the first `left` at it."""

    def __init__(self, bar: Lane, left: Lane) -> None:
        self.bar, self.left = bar, left

    def __call__(self, score: Lane) -> Lane:
        at_bar = score.eq(self.bar) & (self.left > 0)
        self.left = self.left - at_bar.to_i32()
        return (score > self.bar) | at_bar


def _count_equal(scores: list[Lane], bar: Lane) -> Lane:
    count = int32(0)
    for score in scores:
        count = count + score.eq(bar).to_i32()
    return count


def _best_of_two(old: list[Lane], new: list[Lane]) -> list[Lane]:
    """The 16 best of 16 descending and 16 unsorted scores, descending."""
    new = list(new)
    for a, b in _sorting_network(TOPK):
        new[a], new[b] = maximum(new[a], new[b]), _lower(new[a], new[b])
    return _best_of_descending(old, new)


def _best_of_descending(old: list[Lane], new: list[Lane]) -> list[Lane]:
    """The 16 best of twice 16 descending scores, descending."""
    both = [maximum(x, y) for x, y in zip(old, reversed(new), strict=True)]
    step = TOPK // 2
    while step:
        for i in range(TOPK):
            if not i & step:
                x, y = both[i], both[i + step]
                both[i], both[i + step] = maximum(x, y), _lower(x, y)
        step //= 2
    return both


def _lower(a: Lane, b: Lane) -> Lane:
    return Lane(arith.minnumf(a.value, b.value))


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
        return lanes.clip((block - offset + (facts.scale - 1)) >> shift, 0, facts.columns)

    count = maximum(count, 0)
    stop = columns_below(minimum(count, MAX_BLOCKS))
    front = minimum(columns_below(int32(facts.begin)), stop)
    back = lanes.clip(columns_below(minimum(count - facts.end, MAX_BLOCKS)), front, stop)
    return Bounds(front, back, stop)


def _steps(positions: Lane, facts: Selection) -> Lane:
    shift = facts.positions.bit_length() - 1
    return (positions + (facts.positions - 1)) >> shift


class _Row:
    """A row's 33 words in shared memory."""

    def __init__(
        self, target: Words, bounds: Bounds, seen: Lane, offset: Lane, facts: Selection
    ) -> None:
        self.target, self.bounds, self.seen = target, bounds, seen
        self.offset, self.facts = offset, facts
        self.forced = bounds.front + bounds.stop - bounds.back
        self.need = minimum(maximum(int32(TOPK) - self.forced, 0), bounds.back - bounds.front)

    def _store(self, place: Lane, score: Lane, column: Lane) -> None:
        score = where(score > _HIDDEN, score, float("-inf"))
        (self.target + place).store(where(score.eq(0.0), 0.0, score))
        (self.target + place + TOPK).store(column * self.facts.scale + self.offset)

    def store_chosen(self, scores: list[Lane], lists: _Lists, slot: Lane, parts: Lane) -> None:
        """The best `need` entries, then columns that the scorer did not go through.

        `scores` are the best of the `parts` lists from `slot` on, descending.
        """
        bar, at_bar = lanes.constant(float("inf"), f32()), int32(0)
        for i, score in enumerate(scores):
            bar = where(self.need > i, score, bar)
        for i, score in enumerate(scores):
            at_bar = at_bar + ((self.need > i) & score.eq(bar)).to_i32()
        stays = _AtBar(bar, at_bar)

        def entry(score: Lane, column: Lane, is_one: Lane, left: Lane, stored: Lane) -> list[Lane]:
            stays.left = left
            stay = is_one & stays(where(is_one, score, _EMPTY))
            with when(stay):
                self._store(self.bounds.front + stored, score, column)
            return [stays.left, stored + stay.to_i32()]

        def of_part(part: Lane, *carry: Lane) -> Any:
            return lists.entries(part, list(carry), entry)

        _, stored = lanes.loop(slot, slot + parts, 1, [at_bar, int32(0)], of_part)
        self.store_hidden(stored)

    def store_hidden(self, stored: Lane) -> None:
        """Fills up `stored` entries to `need` with columns that the scorer did not go through."""
        behind = maximum(self.bounds.front, self.seen) - stored

        def fill(i: Lane) -> tuple[()]:
            hidden = lanes.constant(_HIDDEN, f32())
            self._store(self.bounds.front + i, hidden, behind + i)
            return ()

        lanes.loop(stored, self.need, 1, (), fill)

    def store_forced(self, scores: Words | None) -> None:
        """The forced columns; without `scores` the scorer went through none."""
        front, back = self.bounds.front, self.bounds.back

        def one(f: Lane) -> tuple[()]:
            column = where(f < front, f, back + f - front)
            score = lanes.constant(_HIDDEN, f32())
            if scores is not None:
                stored = (scores + f * self.facts.padded_rows).load(f32())
                score = where(column < self.seen, stored, _HIDDEN)
            self._store(where(f < front, f, f + self.need), score, column)
            return ()

        lanes.loop(int32(0), self.forced, 1, (), one)

    def store_tail(self) -> None:
        """What no candidate takes, and the ready flag."""

        def one(i: Lane) -> tuple[()]:
            (self.target + i).store(int32(NEG_INF_WORD))
            (self.target + i + TOPK).store(int32(NO_BLOCK))
            return ()

        lanes.loop(self.forced + self.need, int32(TOPK), 1, (), one)
        (self.target + 2 * TOPK).store(int32(READY))


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


class _Rows:
    """A warp's 32 rows: they belong to 8 tokens, two stretches of four, and 4 heads."""

    def __init__(
        self,
        stage: Words,
        carrier: Words,
        capacity: int,
        place: Place,
        offset: Lane,
        facts: Selection,
    ) -> None:
        self.carrier, self.capacity, self.offset, self.facts = carrier, capacity, offset, facts
        self.lane, self.warp = place.thread & 31, place.thread >> 5
        self.stage = stage + self.warp * (32 * ROW_WORDS)
        row = place.row()
        self.token = ((row >> 2) & 3) + (row >> 6) * 4  # number of this lane's token among the 8
        self.head = row & 3

    def row(self, bounds: Bounds, seen: Lane) -> _Row:
        """This lane's row, to be put together in shared memory."""
        target = self.stage + (self.head * 8 + self.token) * ROW_WORDS
        return _Row(target, bounds, seen, self.offset, self.facts)

    def copy(self, first: Lane, live: Lane) -> None:
        """Copies the rows to their places, those of live lanes alone.

        `first` is the token of the warpgroup's row 0.
        """
        lanes.warp_barrier()
        mask = lanes.warp_ballot(live & self.head.eq(0))
        target = self.carrier + (first + self.warp * 4).to_i64() * ROW_WORDS
        for i in range(cdiv(8 * ROW_WORDS, 32)):
            word = self.lane + i * 32
            token = _quotient(word, ROW_WORDS)
            late = token >> 2
            # The lane that holds head 0 of this token.
            holder = (token & 1) * 16 + ((token >> 1) & 1) + late * 2
            is_live = (mask >> (holder & 31)) & 1
            with when((word < 8 * ROW_WORDS) & is_live.ne(0)):
                for head in range(NUM_HEADS):
                    value = (self.stage + (word + head * 8 * ROW_WORDS)).load()
                    place = word + late * (12 * ROW_WORDS)
                    (target + head * self.capacity * ROW_WORDS + place).store(value)
        lanes.warp_barrier()  # before the shared memory is used again


def _quotient(x: Lane, divisor: int) -> Lane:
    return Lane(arith.divui(x.value, int32(divisor).value))


def _store_pair(place: Words, score: Lane, column: Lane) -> None:
    pair = llvm.mlir_undef(ir.VectorType.get((2,), i32()))
    for i, word in enumerate((score.bits(i32()), column)):
        pair = llvm.insertelement(pair, word.value, int32(i).value)
    llvm.store(pair, place.pointer, alignment=8)


def _best_types() -> Any:
    per_row = plgpu.ShapeDtypeStruct((ROWS,), np.dtype(np.int32), _PER_ROW)
    return (
        plgpu.ShapeDtypeStruct((TOPK * ROWS,), np.dtype(np.float32), _PER_LIST),
        per_row,
        per_row,
    )
