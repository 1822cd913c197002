"""The fused decode's memory between its two kernels: short lists instead of a score plane.

The scorer's CTAs go through the batch in order, so a CTA and a request meet in one piece of work,
and `CTA + request` numbers these pieces: no two are alike. A CTA leaves the best 16 of a piece (by
the contract's order) in the *slot* of that number, once for every query row of the request. The
slots of a request lie side by side and in the order of its columns.

Forced blocks win whatever their score. They stay out of the lists; their scores lie beside them, by
the place that they take in the candidate row.

The second kernel takes the Top16 of a request's slots. Blocks that nobody scored (past the keys of
the request, yet visible by its count) follow with -inf.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from msa_icp_jax import rows as candidate_rows
from msa_icp_jax.geometry import MAX_BLOCKS, NUM_HEADS, TOPK
from msa_icp_jax.ops._mosaic import lanes
from msa_icp_jax.ops._mosaic.lanes import Lane, Words, f32, i32, i64, int32, when, where
from msa_icp_jax.ops._mosaic.launch import CTA
from msa_icp_jax.ops._mosaic.long_rows import Bounds, Forced, Row, find_bounds
from msa_icp_jax.ops._mosaic.page_ring import SEGMENT_PAGES
from msa_icp_jax.ops._mosaic.top16 import (
    LIST_WORDS,
    RunningTop16,
    entry_column,
    entry_key,
    flip,
)
from msa_icp_jax.ops._mosaic.work_balance import (
    PER_THREAD,
    STEP_PAGES,
    WARP,
    Batch,
    Grid,
    Share,
    cta_of_step,
    divide,
    load_fresh,
    of_lane,
    of_thread,
    part_stock,
    per_thread,
    step_ends,
)

_SCALAR = plgpu.Layout.WG_SPLAT
_NO_SCORE = 0x7FFFFFFF  # a NaN: no column is listed here
_NO_COLUMN = -1
_LOWEST_KEY = -(1 << 31)  # below the key of every score


@dataclasses.dataclass(frozen=True)
class Lists:
    """Static facts of the lists.

    Attributes:
      batch: the decode batch.
      grid: the scorer's CTAs.
      tokens: query tokens of a request.
      world_size: W.
      scale: blocks from one column to the next.
      begin, end: forced blocks at the start, and visible ones at the end.
    """

    batch: Batch
    grid: Grid
    tokens: int
    world_size: int
    scale: int
    begin: int
    end: int

    @property
    def rows(self) -> int:
        """Query rows of a request."""
        return self.tokens * NUM_HEADS

    @property
    def slots(self) -> int:
        """Pieces of work at most, and a few that do not occur."""
        return self.grid.ctas + self.batch.requests

    def memory(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Listed scores and columns, and the scores of forced blocks."""
        listed = (self.rows, self.slots * TOPK)
        tokens = self.batch.requests * self.tokens
        return (
            jax.ShapeDtypeStruct(listed, jnp.float32),
            jax.ShapeDtypeStruct(listed, jnp.int32),
            jax.ShapeDtypeStruct((tokens, NUM_HEADS, TOPK), jnp.float32),
        )

    def bounds(self, count: Lane, rank: Lane) -> Bounds:
        """Where a token's candidates lie."""
        return find_bounds(
            count,
            self.offset(rank),
            scale=self.scale,
            columns=self.batch.columns,
            begin=self.begin,
            end=self.end,
        )

    def offset(self, rank: Any) -> Any:
        """Block of column 0, of a Lane or an array."""
        if self.scale == 1:
            return rank - rank
        return rank >> (self.world_size.bit_length() - 2)


# ---- the scorer's side ----


def scratch(rows: int, interpret: bool) -> dict[str, Any]:
    """Shared memory of a CTA: the lists of `rows` query rows, their state, the visible blocks."""
    if interpret:
        return {
            "best": plgpu.SMEM((2, rows, TOPK), jnp.int32),
            "visible": plgpu.SMEM((8,), jnp.int32),
        }
    # One array: each takes a kibibyte at least, and five CTAs have to fit.
    return {"best": plgpu.SMEM((rows * (LIST_WORDS + 2) + 8,), jnp.int32)}


def start(scratch: dict[str, Any], lists: Lists, interpret: bool) -> None:
    """Empties a CTA's lists."""
    if interpret:
        _empty_stock(scratch)
    else:
        _empty_inline(scratch, lists)


def _empty_stock(scratch: dict[str, Any]) -> None:
    scratch["best"][...] = jnp.full(scratch["best"].shape, _NO_COLUMN, jnp.int32)


def _empty_inline(scratch: dict[str, Any], lists: Lists) -> None:
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def empty(_: Any, best: Any) -> None:
        with when(lanes.thread() < lists.rows):
            state = _states(best, lists) + lanes.thread() * 2
            state.store_vector([int32(0), int32(_LOWEST_KEY)])

    empty(scratch["best"])


def _states(best: Any, lists: Lists) -> Words:
    """(entries held, key to exceed) of each list."""
    return Words.of(best) + lists.rows * LIST_WORDS


def _visible(best: Any, lists: Lists) -> Words:
    """Visible blocks of each token."""
    return _states(best, lists) + lists.rows * 2


def read_counts(counts: Any, request: Any, lists: Lists, interpret: bool) -> jax.Array:
    """Starts to read the visible blocks of a request's tokens, for `keep_counts`."""
    if interpret:
        return counts[pl.ds(request * lists.tokens, lists.tokens)]
    return _read_counts_inline(counts, request, lists)


def _read_counts_inline(counts: Any, request: Any, lists: Lists) -> jax.Array:
    result = plgpu.ShapeDtypeStruct((STEP_PAGES * WARP,), np.dtype(np.int32), PER_THREAD)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR), return_type=result)
    def read(_: Any, counts: Any, request: Any) -> Any:
        token = lanes.minimum(lanes.thread(), lists.tokens - 1)
        at = lanes.scalar(request) * lists.tokens + token
        return per_thread(load_fresh(Words.of(counts) + at))

    return read(counts, request)


def keep_counts(scratch: dict[str, Any], found: jax.Array, lists: Lists, interpret: bool) -> None:
    """Keeps what `read_counts` returned; a barrier has to follow."""
    if interpret:
        scratch["visible"][pl.ds(0, lists.tokens)] = found
    else:
        _keep_counts_inline(scratch, found, lists)


def _keep_counts_inline(scratch: dict[str, Any], found: jax.Array, lists: Lists) -> None:
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), PER_THREAD))
    def keep(_: Any, best: Any, found: Any) -> None:
        with when(lanes.thread() < lists.tokens):
            (_visible(best, lists) + lanes.thread()).store(of_thread(found))

    keep(scratch["best"], found)


def fold(
    scratch: dict[str, Any],
    memory: tuple[Any, ...],
    share: Share,
    steps: Any,
    ends: Any,
    rank: Any,
    lists: Lists,
    interpret: bool,
) -> None:
    """Adds a segment's scores to the lists; where the piece of work ends, writes them out."""
    fold = _fold_stock if interpret else _fold_inline
    fold(scratch, memory, share, steps, ends, rank, lists)


def _fold_stock(
    scratch: dict[str, Any],
    memory: tuple[Any, ...],
    share: Share,
    steps: Any,
    ends: Any,
    rank: Any,
    lists: Lists,
) -> None:
    best, tokens = scratch["best"], lists.tokens
    start = share.first * STEP_PAGES
    number = jnp.arange(SEGMENT_PAGES)
    column = start + number
    counts = scratch["visible"][pl.ds(0, tokens)]
    front, back, stop, need = (x[:, None, None] for x in _bounds_stock(counts, rank, lists))
    is_open = (number < steps * STEP_PAGES) & (column >= front) & (column < back)
    scores = scratch["found"][...]
    scores = jnp.where(scores == 0, 0.0, scores).reshape(tokens, NUM_HEADS, SEGMENT_PAGES)
    columns = jnp.broadcast_to(jnp.where(is_open, column, _NO_COLUMN), scores.shape)
    words = lax.bitcast_convert_type(scores, jnp.int32)
    words, columns = (
        jnp.concatenate([old.reshape(tokens, NUM_HEADS, TOPK), new], axis=-1)
        for old, new in ((best[0], words), (best[1], columns))
    )
    keys = candidate_rows.candidate_keys(words, columns, jnp.int32(MAX_BLOCKS), 0, 0)
    _, words, columns = candidate_rows.take_top16(keys, words, columns)
    best[0] = jnp.where(columns < 0, _NO_SCORE, words).reshape(-1, TOPK)
    best[1] = columns.reshape(-1, TOPK)

    @pl.loop(0, tokens * TOPK)
    def keep_forced(i: Any) -> None:
        token, place = lax.div(i, TOPK), lax.rem(i, TOPK)
        at_back = place - (front[token, 0, 0] + need[token, 0, 0])
        at = jnp.where(place < front[token, 0, 0], place, back[token, 0, 0] + at_back)
        is_forced = (place < front[token, 0, 0]) | ((at_back >= 0) & (at < stop[token, 0, 0]))

        @pl.when(is_forced & (at >= start) & (at < start + steps * STEP_PAGES))
        def _() -> None:
            heads = pl.ds(token * NUM_HEADS, NUM_HEADS)
            score = scratch["found"][heads, at - start]
            memory[2][share.request * tokens + token, :, place] = jnp.where(score == 0, 0.0, score)

    @pl.when(ends)
    def write() -> None:
        slot = pl.ds((lax.axis_index(CTA) + share.request) * TOPK, TOPK)
        memory[0][:, slot] = lax.bitcast_convert_type(best[0], jnp.float32)
        memory[1][:, slot] = best[1]
        _empty_stock(scratch)


def _bounds_stock(counts: Any, rank: Any, lists: Lists) -> tuple[Any, ...]:
    """(front, back, stop, need) of tokens with `counts` visible blocks; see `find_bounds`."""

    def columns_below(block: Any) -> Any:
        column = (block - lists.offset(rank) + (lists.scale - 1)) >> (lists.scale.bit_length() - 1)
        return jnp.clip(column, 0, lists.batch.columns)

    counts = jnp.maximum(counts, 0)
    stop = columns_below(jnp.minimum(counts, MAX_BLOCKS))
    front = jnp.minimum(columns_below(jnp.int32(lists.begin)), stop)
    back = jnp.clip(columns_below(jnp.minimum(counts - lists.end, MAX_BLOCKS)), front, stop)
    return front, back, stop, jnp.minimum(TOPK - front - (stop - back), back - front)


def _fold_inline(
    scratch: dict[str, Any],
    memory: tuple[Any, ...],
    share: Share,
    steps: Any,
    ends: Any,
    rank: Any,
    lists: Lists,
) -> None:
    refs = [scratch["best"], scratch["found"], *memory]
    scalars = [share.request, share.first, steps, ends.astype(jnp.int32), rank, lax.axis_index(CTA)]

    @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * len(refs), *[_SCALAR] * len(scalars)))
    def fold(_: Any, *arguments: Any) -> None:
        kept = (_states(arguments[0], lists), _visible(arguments[0], lists))
        words: list[Any] = [Words.of(ref) for ref in arguments[: len(refs)]]
        numbers: list[Any] = [lanes.scalar(x) for x in arguments[len(refs) :]]
        piece = _Piece(lists, *kept, *words, *numbers)

        def one_token(token: Lane) -> list[Lane]:
            piece.fold(token)
            return []

        lanes.loop(int32(0), int32(lists.tokens), 1, [], one_token)

    fold(*refs, *scalars)


@dataclasses.dataclass
class _Piece:
    """One thread's view of a segment and its lists; a warp has the rows of one head."""

    lists: Lists
    held: Words
    visible: Words
    best: Words
    found: Words
    scores: Words
    columns: Words
    forced: Words
    request: Lane
    first: Lane
    steps: Lane
    ends: Lane
    rank: Lane
    cta: Lane

    def fold(self, token: Lane) -> None:
        """Adds a token's scores."""
        lane = lanes.thread() & (WARP - 1)
        head = lanes.warp_from(lanes.thread() >> 5, 0)
        row = token * NUM_HEADS + head
        bounds = self.lists.bounds((self.visible + token).load(), self.rank)
        best = RunningTop16(self.best + row * LIST_WORDS, int32(TOPK), lane)
        held = self.held + row * 2
        state: tuple[Lane, ...] = held.load_vector(i32(), 2)
        lanes.warp_barrier()  # before the state is written again
        here = (self.request * self.lists.tokens + token) * NUM_HEADS + head

        def some(i: Lane, *state: Lane) -> tuple[Lane, ...]:
            """32 columns."""
            column = self.first * STEP_PAGES + i + lane
            score = (self.found + (row * SEGMENT_PAGES + i + lane)).load(f32())
            score = where(score.eq(0.0), 0.0, score)
            inside = i + lane < self.steps * STEP_PAGES
            is_open = inside & (column >= bounds.front) & (column < bounds.back)
            at_front = (column >= bounds.first) & (column < bounds.front)
            at_back = (column >= bounds.back) & (column < bounds.stop)
            behind = bounds.chosen_at + bounds.need + (column - bounds.back)
            with when(inside & (at_front | at_back)):
                place = where(at_front, column - bounds.first, behind)
                (self.forced + (here * TOPK + place)).store(score)
            return best.insert(score, column, is_open, state)

        state = lanes.loop(int32(0), self.steps * STEP_PAGES, WARP, state, some)

        def write() -> list[Lane]:
            self._write(best, row, lane, state[0])
            return [int32(0), int32(_LOWEST_KEY)]

        state = lanes.choose(self.ends.ne(0), [i32()] * 2, write, lambda: state)
        with when(lane.eq(0)):
            held.store_vector(list(state))

    def _write(self, best: RunningTop16, row: Lane, lane: Lane, held: Lane) -> None:
        """Writes the best 16 of the piece of work to its slot."""
        (held,) = lanes.choose(held > TOPK, [i32()], lambda: best.cut(held)[:1], lambda: [held])
        lanes.warp_barrier()
        entry = (best.entries + lane * 2).load(i64())
        lanes.warp_barrier()  # before the list is filled again
        listed = lane < held
        slot = row * self.lists.slots + (self.cta + self.request)
        at = slot * TOPK + lane
        with when(lane < TOPK):
            (self.scores + at).store(where(listed, flip(entry_key(entry)), _NO_SCORE))
            (self.columns + at).store(where(listed, entry_column(entry), _NO_COLUMN))


# ---- the other side ----


def locate(counts: Any, lengths: Any, token_shift: int, lists: Lists) -> tuple[Any, ...]:
    """(visible blocks, first slot, entries, columns scored) of this CTA's token.

    They do not depend on the scorer, which has waited for whatever wrote them.
    """
    scalar = plgpu.ShapeDtypeStruct((), np.dtype(np.int32), _SCALAR)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), _SCALAR), return_type=(scalar,) * 4
    )
    def find(_: Any, counts: Any, lengths: Any, cta: Any) -> Any:
        batch, lane = lists.batch, lanes.thread() & (WARP - 1)
        token = lanes.scalar(cta) >> token_shift
        request = divide(token, int32(lists.tokens))
        count = load_fresh(Words.of(counts) + token)
        mine = load_fresh(Words.of(lengths) + request)
        values = []
        for chunk in range(0, batch.requests, WARP):
            at = lanes.minimum(lane + chunk, batch.requests - 1)
            value = load_fresh(Words.of(lengths) + at)
            values.append(where(lane + chunk < batch.requests, value, 0))
        ends, total = step_ends(values, batch, lane)
        end = int32(0)
        for chunk, upto in enumerate(ends):
            end = where((request >> 5).eq(chunk), of_lane(upto, request & 31), end)
        steps = batch.steps_in_lane(mine)
        first = cta_of_step(end - steps, total, lists.grid)
        last = cta_of_step(lanes.maximum(end - 1, 0), total, lists.grid)
        entries = where(steps > 0, (last - first + 1) * TOPK, 0)
        found = count, first + request, entries, steps * STEP_PAGES
        return tuple(mgpu.FragmentedArray.splat(x.value, (), is_signed=True) for x in found)

    return tuple(find(counts, lengths, lax.axis_index(CTA)))


def plane_stock(
    counts: Any,
    lengths: Any,
    rank: Any,
    memory: tuple[Any, ...],
    token: Any,
    head: Any,
    lists: Lists,
) -> jax.Array:
    """A (token, head)'s scores by column, -inf where none was kept: such a column does not win."""
    scores, columns, forced = memory
    batch, request = lists.batch, lax.div(token, lists.tokens)
    steps = batch.steps(lengths[...])
    ends = jnp.cumsum(steps)
    end = ends[request]
    cta = jnp.arange(lists.grid.ctas)
    start, mine = part_stock(ends[-1], cta, lists.grid)
    touches = (mine > 0) & (start < end) & (start + mine > end - steps[request])
    row = lax.rem(token, lists.tokens) * NUM_HEADS + head
    slots = pl.ds(request * TOPK, lists.grid.ctas * TOPK)
    listed = jnp.where(jnp.repeat(touches, TOPK), columns[row, slots], _NO_COLUMN)
    listed = jnp.where(listed < 0, batch.columns, listed)
    plane = jnp.full((batch.columns,), -jnp.inf, jnp.float32)
    plane = plane.at[listed].set(scores[row, slots], mode="drop")

    front, back, stop, need = _bounds_stock(counts[token], rank, lists)
    place = jnp.arange(TOPK)
    at = jnp.where(place < front, place, back + place - (front + need))
    known = (place < front) | ((place >= front + need) & (at < stop))
    known &= at < steps[request] * STEP_PAGES
    return plane.at[jnp.where(known, at, batch.columns)].set(forced[token, head], mode="drop")


def merged_row(
    memory: tuple[Words, ...],
    place: tuple[Lane, ...],
    token: Lane,
    head: Lane,
    lane: Lane,
    rank: Lane,
    lists: Lists,
) -> tuple[Row, Forced]:
    """A (token, head)'s lists as a row, and what comes to the places that are not chosen."""
    scores, columns, forced = memory
    count, slot, entries, scored = place
    bounds = lists.bounds(count, rank)
    there = lanes.maximum(lanes.minimum(bounds.back, scored) - bounds.front, 0)
    need = lanes.minimum(bounds.need, there)
    query_row = (token - divide(token, int32(lists.tokens)) * lists.tokens) * NUM_HEADS + head
    at = (query_row * lists.slots + slot) * TOPK
    row = Row(
        first=int32(0) - bounds.chosen_at,
        front=int32(0),
        back=entries,
        stop=entries,
        need=need,
        scores=scores + at,
        listed=columns + at,
    )
    at_front = lane < bounds.chosen_at
    unscored = lane - (bounds.chosen_at + need)
    behind = lane - (bounds.chosen_at + bounds.need)
    column = where(behind < 0, lanes.maximum(bounds.front, scored) + unscored, bounds.back + behind)
    column = where(at_front, bounds.first + lane, column)
    here = (lane < TOPK) & (at_front | (unscored >= 0))
    live = here & (column < bounds.stop)
    known = live & (column < scored) & (at_front | (behind >= 0))
    word = forced + ((token * NUM_HEADS + head) * TOPK + lane)
    return row, Forced(here, live, column, word, known)
