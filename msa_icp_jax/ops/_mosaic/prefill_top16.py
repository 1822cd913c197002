"""A running Top16 of every query row of the prefill scorer, and the rows made of it.

While a CTA walks a tile's columns in ascending order, each thread looks after one row of its own
(see `prefill_pieces`: a step leaves a row's page maxima in one lane). Columns that beat the 16th
best so far are appended to the row's *log* in shared memory, which holds the best 16 of earlier
columns in its first places. When a log of the warpgroup is nearly full, all its logs are *cut* back
to their best 16 at once: alone, each of the four warps would keep the other three waiting.

A cut sorts scores only: a network merges the log's new scores with the 16 best, kept sorted in
registers; the new 16th best is the bar that an entry must reach to stay. A log is always in the
order of its columns, so of equal scores at the bar the first ones stay: the lower ids.

Scores of hidden pages, -inf, are carried as a number below all real scores, so that -inf is free to
mean an empty place. Forced columns are known from their numbers alone: they bypass the log, their
scores go to a buffer of their own.

A tile's parts leave one log each; `finish_rows` joins them in the order of their columns.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
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
    LaneMaxima,
    Place,
    StepPages,
    as_array,
    maxima_layout,
    of_array,
    row_maxima,
)
from msa_icp_jax.ops.prefill_plan import balance
from msa_icp_jax.rows import NEG_INF_WORD, NO_BLOCK, READY, ROW_WORDS

_NEW = 16  # places for new entries
PLACE_WORDS = 2 * ROWS  # one place of all logs: (score, column) of every thread
LOG_SHAPE = (TOPK + _NEW, PLACE_WORDS)  # shared memory of a warpgroup's logs, int32
LIST_SHAPE = (TOPK, PLACE_WORDS)  # what a warpgroup leaves of them, int32
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
    """Each row's candidates, columns [0, stop), of which [0, front) and [back, stop) are forced.

    Three arrays int32 [128].
    """

    front: Any
    back: Any
    stop: Any


class Best(NamedTuple):
    """The state of a warpgroup's logs.

    Attributes:
      scores: float32 [16 * 128], the best scores, i-th best of row r at i * 128 + r.
      kept: int32 [128], entries in the log's first places that these scores are of.
      count: int32 [128], all entries in the log.
    """

    scores: Any
    kept: Any
    count: Any


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
        return _best_arrays([lanes.constant(_EMPTY, f32())] * TOPK, int32(0), int32(0))

    return Best(*empty())


def push(
    maxima: LaneMaxima,
    best: Best,
    bounds: Bounds,
    logs: Any,
    forced: Any,
    row: Any,
    column: Any,
    facts: Selection,
) -> Best:
    """Takes in the page maxima of one step.

    Args:
      maxima: of the step's products, see `prefill_pieces.lane_maxima`.
      best, bounds: see there.
      logs: ref of this warpgroup's logs in shared memory.
      forced: ref, float32 [16, padded_rows], of the forced columns' scores: column c < front of a
        row at place c, column c >= back at place front + c - back.
      row: query row (4 token + head) of row 0.
      column: first column of the step.
      facts: see `Selection`.
    """
    if facts.interpret:
        return _push_stock(maxima, best, bounds, logs, forced, row, column, facts)
    per_lane = maxima_layout(facts.pages)

    @plgpu.inline_mgpu(
        arg_types=(
            *(per_lane, per_lane),
            *(_PER_LIST, _PER_ROW, _PER_ROW),
            *(_PER_ROW, _PER_ROW, _PER_ROW),
            *(plgpu.RefType(), plgpu.RefType()),
            *(_SCALAR, _SCALAR),
        ),
        return_type=_best_types(),
    )
    def take(
        _: Any,
        upper: Any,
        lower: Any,
        scores: Any,
        kept: Any,
        count: Any,
        front: Any,
        back: Any,
        stop: Any,
        logs: Any,
        forced: Any,
        row: Any,
        column: Any,
    ) -> Any:
        row, column = lanes.scalar(row), lanes.scalar(column)
        place = Place()
        new = row_maxima(place, upper, lower, facts.pages)
        new = [maximum(x, _HIDDEN) for x in new]
        log = _Log(logs, place, of_array(scores), of_array(kept)[0], of_array(count)[0])
        limits = Bounds(*(of_array(x)[0] for x in (front, back, stop)))
        for g, score in enumerate(new):
            at = column + g
            log.append(score, at, (score > log.bar) & (at >= limits.front) & (at < limits.back))
        _store_forced(new, column, limits, Words.of(forced) + (row + place.row()), facts)
        crowded = log.count - log.kept > _NEW - facts.pages.count
        types = [f32()] * TOPK + [i32(), i32()]
        *scores, kept, count = lanes.choose(_any_of_team(crowded), types, log.cut, log.state)
        return _best_arrays(scores, kept, count)

    return Best(*take(*maxima, *best, *bounds, logs, forced, row, column))


def publish(best: Best, logs: Any, target: Any, facts: Selection) -> None:
    """Writes the logs, cut, to `target`, a ref int32 LIST_SHAPE; empty places have column -1."""
    if facts.interpret:
        place = jnp.arange(TOPK)[:, None]
        words = jnp.where(place < jnp.repeat(best.kept, 2), logs[:TOPK], NO_BLOCK)
        target[...] = words
        return

    @plgpu.inline_mgpu(arg_types=(_PER_LIST, _PER_ROW, _PER_ROW, plgpu.RefType(), plgpu.RefType()))
    def write(_: Any, scores: Any, kept: Any, count: Any, logs: Any, target: Any) -> None:
        place = Place()
        log = _Log(logs, place, of_array(scores), of_array(kept)[0], of_array(count)[0])
        *_, kept, _ = log.cut()
        at = Words.of(target) + place.thread * 2
        for i in range(TOPK):
            score, column = log.entry(i)
            _store_pair(at + i * PLACE_WORDS, score, where(kept > i, column, NO_BLOCK))

    write(*best, logs, target)


class Joined(NamedTuple):
    """Refs that `finish_rows` reads."""

    tiles: Any  # of the work list
    tile_of: Any
    lists: Any  # int32 [slots, 2, *LIST_SHAPE]
    forced: Any  # float32 [16, padded_rows]
    counts: Any  # num_valid_pages


def finish_rows(
    refs: Joined, carrier: Any, logs: Any, stage: Any, offset: Any, part: Any, facts: Selection
) -> None:
    """One warpgroup: the candidate rows of tokens [32 part, 32 part + 32).

    Args:
      refs: see `Joined`.
      carrier: ref of the rows, int32 [4, capacity, 33].
      logs: ref of logs in shared memory.
      stage: ref, int32 [128 * 33], shared memory.
      offset: block of column 0.
      part: see above.
      facts: see `Selection`.
    """
    if facts.interpret:
        _finish_stock(refs, carrier, offset, part, facts)
        return
    listed, capacity = refs.tile_of.shape[0], carrier.shape[1]

    @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * 8, _SCALAR, _SCALAR))
    def finish(
        _: Any,
        tiles: Any,
        tile_of: Any,
        lists: Any,
        forced: Any,
        counts: Any,
        carrier: Any,
        logs: Any,
        stage: Any,
        offset: Any,
        part: Any,
    ) -> None:
        offset, part = lanes.scalar(offset), lanes.scalar(part)
        place = Place()
        row, first = place.row(), part * (ROWS // NUM_HEADS)
        token = first + (row >> 2)
        tile = (Words.of(tile_of) + minimum(token, listed - 1)).load()
        count = (Words.of(counts) + minimum(token, facts.tokens - 1)).load()
        live = (token < listed) & (tile >= 0)
        fields = Words.of(tiles) + maximum(tile, 0) * balance.TILE_FIELDS
        slot = (fields + balance.FIRST_SLOT).load()
        parts = where(live, (fields + balance.PARTS).load(), 0)
        # Columns that the scorer went through; those behind them are -inf.
        seen = _steps((fields + balance.SCORED).load(), facts) * facts.pages.count
        seen = where(live, seen, 0)
        bounds = _bounds(where(live, count, 0), offset, facts)

        source = Words.of(lists) + (slot * 2 + (part & 1)).to_i64() * (TOPK * PLACE_WORDS)
        log = _join(_Log.empty(logs, place), source + place.thread * 2, parts)
        row_of = _Row(Words.of(stage) + row * ROW_WORDS, bounds, seen, offset, facts)
        row_of.store_chosen(log)
        row_of.store_forced(Words.of(forced) + (part * ROWS + row))
        row_of.store_tail()
        lanes.team_barrier()
        _store_rows(Words.of(stage), Words.of(carrier), first, capacity, facts)

    finish(*refs, carrier, logs, stage, offset, part)


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
    """The best 16 of the first axis, in its order; of equal ones the first; _EMPTY is none."""
    best = jnp.lexsort((-scores,), axis=0)[:TOPK]
    best = jnp.sort(
        jnp.where(jnp.take_along_axis(scores, best, axis=0) > _EMPTY, best, len(scores)), axis=0
    )
    scores = jnp.concatenate([scores, jnp.full_like(scores[:1], _EMPTY)])
    columns = jnp.concatenate([columns, jnp.full_like(columns[:1], NO_BLOCK)])
    return jnp.take_along_axis(scores, best, axis=0), jnp.take_along_axis(columns, best, axis=0)


def _push_stock(
    maxima: LaneMaxima,
    best: Best,
    bounds: Bounds,
    logs: Any,
    forced: Any,
    row: Any,
    column: Any,
    facts: Selection,
) -> Best:
    """Cuts at every step; the log's first places are all the state there is."""
    new = jnp.maximum(jnp.concatenate(maxima), _HIDDEN).T
    at = jnp.broadcast_to(column + jnp.arange(facts.pages.count)[:, None], new.shape)
    inside = (at >= bounds.front) & (at < bounds.back)
    place = jnp.arange(TOPK)[:, None]
    words = logs[:TOPK].reshape(TOPK, ROWS, 2)
    old = lax.bitcast_convert_type(words[..., 0], jnp.float32)
    scores, columns = _keep_best(
        jnp.concatenate(
            [jnp.where(place < best.kept, old, _EMPTY), jnp.where(inside, new, _EMPTY)]
        ),
        jnp.concatenate([words[..., 1], at]),
    )
    words = jnp.stack([lax.bitcast_convert_type(scores, jnp.int32), columns], axis=-1)
    logs[:TOPK] = words.reshape(TOPK, PLACE_WORDS)
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

    kept = jnp.sum(scores > _EMPTY, axis=0, dtype=jnp.int32)
    return Best(best.scores, kept, kept)


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
            words = pl.ds(t * 2 * NUM_HEADS, 2 * NUM_HEADS)
            new = refs.lists[slot + i, lax.rem(part, 2), :, words].reshape(TOPK, NUM_HEADS, 2)
            scores = lax.bitcast_convert_type(new[..., 0], jnp.float32)
            scores = jnp.where(new[..., 1] >= 0, scores, _EMPTY)
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
        stored = jnp.stack([refs.forced[i, rows] for i in range(TOPK)])
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


def _columns(facts: Selection) -> int:
    return MAX_BLOCKS // facts.scale


# ---- parts of the inline code: each emits the program of one CUDA thread ----


class _Log:
    """This thread's log: `count` entries, of which the first `kept` have the sorted `scores`."""

    def __init__(
        self, logs: Any, place: Place, scores: list[Lane], kept: Lane, count: Lane
    ) -> None:
        self.logs, self.place = logs, place
        self.start = Words.of(logs) + place.thread * 2
        self.scores, self.kept, self.count = scores, kept, count

    @staticmethod
    def empty(logs: Any, place: Place) -> _Log:
        return _Log(logs, place, [lanes.constant(_EMPTY, f32())] * TOPK, int32(0), int32(0))

    @property
    def bar(self) -> Lane:
        """What a new score has to exceed."""
        return self.scores[-1]

    def state(self) -> list[Lane]:
        return [*self.scores, self.kept, self.count]

    def entry(self, place: Lane | int) -> tuple[Lane, Lane]:
        score, column = (self.start + place * PLACE_WORDS).load_vector(i32(), 2)
        return score.bits(f32()), column

    def append(self, score: Lane, column: Lane, enters: Lane) -> None:
        with when(enters):
            _store_pair(self.start + self.count * PLACE_WORDS, score, column)
        self.count = self.count + enters.to_i32()

    def cut(self) -> list[Lane]:
        """The state with the best 16 entries left; all lanes of a warp come here together."""
        scores, best_lost = _best_of_two(self.scores, self._new_scores())
        bar = scores[-1]
        ties = best_lost.eq(bar) & (bar > _EMPTY)  # more than 16 entries reach the bar

        def keep_all() -> list[Lane]:
            return [self._compact(lambda score: score >= bar)]

        def keep_first() -> list[Lane]:
            return [self._compact(_at_bar(bar, _count_equal(scores, bar)))]

        some = lanes.warp_ballot(ties).ne(0)
        kept = lanes.choose(some, [i32()], keep_first, keep_all)[0]
        return [*scores, kept, kept]

    def _new_scores(self) -> list[Lane]:
        found = []
        for i in range(_NEW):
            place = self.kept + i
            score = (self.start + place * PLACE_WORDS).load(f32())
            found.append(where(place < self.count, score, _EMPTY))
        return found

    def _compact(self, stays: Callable[[Lane], Lane]) -> Lane:
        """Moves the entries that stay to the front; returns how many. At most 16 may stay."""
        kept = int32(0)
        for half in (range(TOPK), range(TOPK, TOPK + _NEW)):
            # None of these is overwritten before it is read: 16 entries stay at most.
            entries = [self.entry(i) for i in half]
            for i, (score, column) in zip(half, entries, strict=True):
                stay = (self.count > i) & stays(score)
                with when(stay):
                    _store_pair(self.start + kept * PLACE_WORDS, score, column)
                kept = kept + stay.to_i32()
        return kept


def _at_bar(bar: Lane, places: Lane) -> Callable[[Lane], Lane]:
    """A predicate for scores in their order: above the bar, or among the first `places` at it."""
    left = places

    def stays(score: Lane) -> Lane:
        nonlocal left
        at_bar = score.eq(bar) & (left > 0)
        left = left - at_bar.to_i32()
        return (score > bar) | at_bar

    return stays


def _count_equal(scores: list[Lane], bar: Lane) -> Lane:
    count = int32(0)
    for score in scores:
        count = count + score.eq(bar).to_i32()
    return count


def _best_of_two(old: list[Lane], new: list[Lane]) -> tuple[list[Lane], Lane]:
    """The 16 best of 16 descending and 16 unsorted scores, descending, and the best of the rest."""
    new = list(new)
    for a, b in _sorting_network(TOPK):
        new[a], new[b] = maximum(new[a], new[b]), _lower(new[a], new[b])
    pairs = list(zip(old, reversed(new), strict=True))
    both = [maximum(x, y) for x, y in pairs]
    lost = [_lower(x, y) for x, y in pairs]
    step = TOPK // 2
    while step:
        for i in range(TOPK):
            if not i & step:
                x, y = both[i], both[i + step]
                both[i], both[i + step] = maximum(x, y), _lower(x, y)
        lost = [maximum(x, y) for x, y in zip(lost[:step], lost[step:], strict=True)]
        step //= 2
    return both, lost[0]


def _lower(a: Lane, b: Lane) -> Lane:
    return Lane(arith.minnumf(a.value, b.value))


def _any_of_team(condition: Lane) -> Lane:
    """Whether the predicate holds in any thread of the warpgroup."""
    barrier = Lane(mgpu.utils.warpgroup_barrier_idx(sync=False))
    text = """{ .reg .pred p, q; setp.ne.s32 p, $1, 0;
        bar.red.or.pred q, $2, 128, p; selp.s32 $0, 1, 0, q; }"""
    return lanes.ptx(text, condition.to_i32(), barrier, result=i32(), collective=True).ne(0)


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


def _join(log: _Log, source: Words, parts: Lane) -> _Log:
    """A row's log of `parts` lists, which are in the order of their columns."""

    def one(part: Lane, *state: Lane) -> list[Lane]:
        *scores, kept, _ = state
        joined = _Log(log.logs, log.place, scores, kept, kept)
        start = source + part * (2 * TOPK * PLACE_WORDS)
        pairs = [(start + i * PLACE_WORDS).load_vector(i32(), 2) for i in range(TOPK)]
        for score, column in pairs:
            joined.append(score.bits(f32()), column, (part < parts) & (column >= 0))
        return joined.cut()

    most = int32(0) - lanes.warp_min(int32(0) - parts)  # a cut needs the whole warp
    *scores, kept, count = lanes.loop(int32(0), most, 1, log.state(), one)
    return _Log(log.logs, log.place, scores, kept, count)


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

    def store_chosen(self, log: _Log) -> None:
        """The best `need` entries, then columns that the scorer did not go through: -inf."""
        bar, at_bar = lanes.constant(float("inf"), f32()), int32(0)
        for i, score in enumerate(log.scores):
            bar = where(self.need > i, score, bar)
        for i, score in enumerate(log.scores):
            at_bar = at_bar + ((self.need > i) & score.eq(bar)).to_i32()
        stays = _at_bar(bar, at_bar)
        stored = int32(0)
        for i in range(TOPK):
            score, column = log.entry(i)
            stay = (log.kept > i) & stays(score)
            with when(stay):
                self._store(self.bounds.front + stored, score, column)
            stored = stored + stay.to_i32()

        behind = maximum(self.bounds.front, self.seen) - stored

        def fill(i: Lane) -> tuple[()]:
            hidden = lanes.constant(_HIDDEN, f32())
            self._store(self.bounds.front + i, hidden, behind + i)
            return ()

        lanes.loop(stored, self.need, 1, (), fill)

    def store_forced(self, scores: Words) -> None:
        front, back = self.bounds.front, self.bounds.back

        def one(f: Lane) -> tuple[()]:
            column = where(f < front, f, back + f - front)
            score = (scores + f * self.facts.padded_rows).load(f32())
            score = where(column < self.seen, score, _HIDDEN)
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
    per_row = plgpu.ShapeDtypeStruct((ROWS,), np.dtype(np.int32), _PER_ROW)
    return (
        plgpu.ShapeDtypeStruct((TOPK * ROWS,), np.dtype(np.float32), _PER_LIST),
        per_row,
        per_row,
    )


def _best_arrays(scores: Any, kept: Lane, count: Lane) -> Any:
    return as_array(scores, _PER_LIST), as_array([kept], _PER_ROW), as_array([count], _PER_ROW)
