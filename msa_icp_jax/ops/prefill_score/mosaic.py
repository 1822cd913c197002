"""The prefill scorer on Hopper: fp8 WGMMA, a persistent grid that walks the window's work list.

A CTA has one producer warp and two consumer warpgroups. It walks its range of the work list (see
`prefill_plan.balance`) piece by piece: the 256 query rows of a tile (64 tokens x 4 heads, 128 rows
a consumer), against the keys of the tile's part, 128 local keys a step. The producer keeps a ring
of key steps filled, page by page through the block table, and loads the next piece's queries while
the present one is worked on. Both consumers multiply every key step; they fall out of step with
each other by themselves, one multiplies while the other takes maxima.

Keys that do not exist (bad page ids, pages past the segment or the table) arrive as NaN, which a
maximum skips; positions are compared only in the steps that reach past the first token's position.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from msa_icp_jax.geometry import HEAD_DIM, NUM_HEADS, cdiv, round_up, rows_per_page
from msa_icp_jax.ops._mosaic import launch
from msa_icp_jax.ops._mosaic.launch import CTA, WARPGROUP, Target
from msa_icp_jax.ops._mosaic.prefill_pieces import (
    KEYS,
    ROWS,
    ScoreStore,
    fill_hidden,
    store_maxima,
)
from msa_icp_jax.ops.prefill_plan import MSAIcpScorePlan, balance
from msa_icp_jax.ops.prefill_plan.balance import TILE_TOKENS, UNIT_POSITIONS

_STAGES = 8  # key steps in flight
_CONSUMERS = 2
_TILE_ROWS = TILE_TOKENS * NUM_HEADS
_CONSUMER_TOKENS = TILE_TOKENS // _CONSUMERS
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = 224, 40


def prefill_scores(
    q: jax.Array,
    k: jax.Array,
    block_table: jax.Array,
    plan: MSAIcpScorePlan,
    max_score: jax.Array,
    *,
    rank: Any,
    world_size: int,
    page_size: int,
    row_offset: int,
    sm_scale: float,
    initialize: bool,
    precision: str,
    enable_pdl: bool,
    target: Target,
) -> jax.Array:
    """Scores of a window, written into `max_score` (in place where that is donated).

    Args:
      q: float8_e4m3fn [T, 4, 128].
      k: float8_e4m3fn [pages, rows, 128]; this rank's rows of a page start at `row_offset`.
      block_table: int32 [B, width].
      plan: the window's segments, with total_q = T.
      max_score: float32 [>= T, 4, K].
      rank: int or traced int32 scalar.
      world_size, page_size, row_offset, sm_scale, initialize, enable_pdl: as in the contract.
      precision: "fast" (fp8 products, about 14 bits) or "exact" (float32 sums).
      target: the machine to build for.
    """
    del precision  # for now
    work = balance.prefill_work(plan, target.sms)
    rows = round_up(q.shape[0], TILE_TOKENS) * NUM_HEADS
    query = q.reshape(-1, HEAD_DIM)
    if rows != query.shape[0]:
        query = jnp.pad(query, ((0, rows - query.shape[0]), (0, 0)))
    scores = jax.new_ref(max_score)
    columns = max_score.shape[2]
    kernel = functools.partial(
        _kernel,
        steps=_Steps(world_size, page_size, row_offset, q.shape[0], columns),
        facts=ScoreStore(
            rows_per_page(world_size, page_size), page_size, columns, sm_scale, initialize
        ),
        pdl=enable_pdl,
        target=target,
    )
    launch.launch(
        kernel,
        name="prefill_scores",
        target=target,
        grid=(target.sms,),
        warpgroups=_CONSUMERS + 1,
        scratch_types=_scratch(KEYS // rows_per_page(world_size, page_size)),
    )(query, k, block_table, *work, jnp.asarray(rank, jnp.int32).reshape(1), scores)
    return jax.freeze(scores)


@dataclasses.dataclass(frozen=True)
class _Steps:
    """Static facts; how positions fall into steps of 128 local keys, and where pages lie.

    Attributes:
      world_size, page_size, row_offset: the shard layout.
      tokens: query tokens T.
      columns: columns of the score plane.
    """

    world_size: int
    page_size: int
    row_offset: int
    tokens: int
    columns: int

    @property
    def rows(self) -> int:
        """Local rows of a page."""
        return rows_per_page(self.world_size, self.page_size)

    @property
    def pages(self) -> int:
        """Pages, hence columns, of a step."""
        return KEYS // self.rows

    @property
    def positions(self) -> int:
        """Positions of a step, those on other ranks included."""
        return KEYS * self.world_size


class _Piece(NamedTuple):
    """A tile's part in a CTA's range, as scalars.

    Steps [begin, end) of the segment are to be scored for rows [first_row, end_row) of the 64 query
    rows of `tile`; the first of the 64 would sit at `position`.
    """

    tile: Any
    first_row: Any
    end_row: Any
    segment: Any
    position: Any
    keys: Any
    begin: Any
    end: Any


class _Range(NamedTuple):
    """A CTA's range of the work list."""

    ranges: Any
    tiles: Any
    first: Any
    count: Any
    begin: Any
    end: Any

    @staticmethod
    def load(ranges: Any, tiles: Any) -> _Range:
        row = lax.axis_index(CTA)
        return _Range(
            ranges,
            tiles,
            ranges[row, balance.RANGE_TILE],
            ranges[row, balance.RANGE_TILES],
            ranges[row, balance.RANGE_BEGIN],
            ranges[row, balance.RANGE_END],
        )

    def first_piece(self, steps: _Steps) -> _Piece:
        row = lax.axis_index(CTA)
        return self._piece(0, lambda i: self.ranges[row, balance.RANGE_FIELDS + i], steps)

    def piece(self, index: Any, steps: _Steps) -> _Piece:
        """The index-th piece; past the last one, some piece that nobody works on."""
        tile = jnp.minimum(self.first + index, self.tiles.shape[0] - 1)
        return self._piece(index, lambda i: self.tiles[tile, i], steps)

    def _piece(self, index: Any, field: Callable[[int], Any], steps: _Steps) -> _Piece:
        per_unit = UNIT_POSITIONS // steps.positions
        # Steps that hold a scored position, and a column: a plane may have fewer than that.
        end = jnp.minimum(
            _cdiv(field(balance.SCORED), steps.positions), cdiv(steps.columns, steps.pages)
        )
        last = index == self.count - 1
        return _Piece(
            field(balance.TILE),
            field(balance.FIRST_ROW),
            field(balance.END_ROW),
            field(balance.SEGMENT),
            field(balance.POSITION),
            field(balance.KEYS),
            jnp.where(index == 0, self.begin * per_unit, 0),
            jnp.where(last, jnp.minimum(self.end * per_unit, end), end),
        )


def _scratch(pages: int) -> dict[str, Any]:
    fp8 = jnp.float8_e4m3fn
    layout = (plgpu.TilingTransform((8, HEAD_DIM)), plgpu.SwizzleTransform(HEAD_DIM))
    return dict(
        queries=plgpu.SMEM((2, _CONSUMERS, ROWS, HEAD_DIM), fp8, transforms=layout),
        keys=plgpu.SMEM((_STAGES, KEYS, HEAD_DIM), fp8, transforms=layout),
        queries_full=plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=2),
        queries_free=plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=2),
        keys_full=plgpu.Barrier(num_arrivals=pages, num_barriers=_STAGES),
        keys_free=plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=_STAGES),
    )


def _kernel(
    query: Any,
    k: Any,
    block_table: Any,
    ranges: Any,
    tiles: Any,
    scored: Any,
    hidden: Any,
    rank: Any,
    scores: Any,
    *,
    steps: _Steps,
    facts: ScoreStore,
    pdl: bool,
    target: Target,
    **shared: Any,
) -> None:
    if pdl and not target.interpret:
        plgpu.griddepcontrol_launch_dependents()
        plgpu.griddepcontrol_wait()
    work = _Range.load(ranges, tiles)
    warpgroup = lax.axis_index(WARPGROUP)

    @pl.when(warpgroup < _CONSUMERS)
    def _() -> None:
        plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
        _consume(work, rank[0], scores, steps, facts, target, **shared)

    @pl.when(warpgroup == _CONSUMERS)
    def _() -> None:
        plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")

        @plgpu.warp_map
        def _(warp: Any) -> None:
            @pl.when(warp == 0)
            def _() -> None:
                _produce(work, query, k, block_table, hidden, steps, **shared)

            if facts.initialize:

                @pl.when(warp > 0)
                def _() -> None:
                    _fill(warp - 1, scored, scores, steps, facts, target)


def _produce(
    work: _Range,
    query: Any,
    k: Any,
    block_table: Any,
    hidden: Any,
    steps: _Steps,
    *,
    queries: Any,
    keys: Any,
    queries_full: Any,
    queries_free: Any,
    keys_full: Any,
    keys_free: Any,
) -> None:
    """One warp: keeps queries and keys coming."""
    num_pages, width = k.shape[0], block_table.shape[1]

    def page_ids(piece: _Piece, step: Any) -> list[Any]:
        """The step's physical pages, -1 where there is none to read."""
        pages = [step * steps.pages + g for g in range(steps.pages)]
        entries = [block_table[piece.segment, jnp.minimum(page, width - 1)] for page in pages]
        return [
            jnp.where((page < width) & (page * steps.page_size < piece.keys), entry, -1)
            for page, entry in zip(pages, entries, strict=True)
        ]

    def load_page(page: Any, place: Any, full: Any) -> None:
        def copy() -> None:
            rows = pl.ds(steps.row_offset, steps.rows)
            plgpu.copy_gmem_to_smem(k.at[page, rows], place, full)

        def hide() -> None:
            plgpu.copy_gmem_to_smem(hidden.at[pl.ds(0, steps.rows)], place, full)

        lax.cond((page >= 0) & (page < num_pages), copy, hide)

    def one_piece(index: Any, carry: Any) -> Any:
        piece, loaded = carry
        following = work.piece(index + 1, steps)
        ids = page_ids(piece, piece.begin)
        slot = lax.rem(index, 2)
        _wait_free(queries_free.at[slot], index >= 2)
        for half in range(_CONSUMERS):
            rows = pl.ds(piece.tile * _TILE_ROWS + half * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(query.at[rows], queries.at[slot, half], queries_full.at[slot])

        def one_step(step: Any, carry: Any) -> Any:
            loaded, ids = carry
            next_ids = page_ids(piece, step + 1)  # under way while this step is copied
            slot = lax.rem(loaded, _STAGES)
            _wait_free(keys_free.at[slot], loaded >= _STAGES)
            for g, page in enumerate(ids):
                place = keys.at[slot, pl.ds(g * steps.rows, steps.rows)]
                load_page(page, place, keys_full.at[slot])
            return loaded + 1, next_ids

        loaded, _ = lax.fori_loop(piece.begin, piece.end, one_step, (loaded, ids))
        return following, loaded

    start = (work.first_piece(steps), jnp.int32(0))
    _, loaded = lax.fori_loop(0, work.count, one_piece, start)

    # Every phase of a barrier is waited for, the last ones too.
    @pl.loop(jnp.maximum(work.count - 2, 0), work.count)
    def _(index: Any) -> None:
        plgpu.barrier_wait(queries_free.at[lax.rem(index, 2)])

    @pl.loop(jnp.maximum(loaded - _STAGES, 0), loaded)
    def _(step: Any) -> None:
        plgpu.barrier_wait(keys_free.at[lax.rem(step, _STAGES)])


def _wait_free(barrier: Any, used: Any) -> None:
    @pl.when(used)
    def _() -> None:
        plgpu.barrier_wait(barrier)


def _consume(
    work: _Range,
    rank: Any,
    scores: Any,
    steps: _Steps,
    facts: ScoreStore,
    target: Target,
    *,
    queries: Any,
    keys: Any,
    queries_full: Any,
    queries_free: Any,
    keys_full: Any,
    keys_free: Any,
) -> None:
    """One warpgroup: 128 query rows of every piece against all its keys."""
    half = lax.axis_index(WARPGROUP)

    def one_piece(index: Any, carry: Any) -> Any:
        piece, done = carry
        following = work.piece(index + 1, steps)
        slot = lax.rem(index, 2)
        first = piece.tile * _TILE_ROWS + half * ROWS
        begin = jnp.clip(piece.first_row * NUM_HEADS - half * ROWS, 0, ROWS)
        end = jnp.clip(piece.end_row * NUM_HEADS - half * ROWS, 0, ROWS)
        position = piece.position + half * _CONSUMER_TOKENS
        earliest = jnp.minimum(position + lax.div(begin, NUM_HEADS) + 1, piece.keys)
        # Steps whose keys every row sees, and whose columns all exist.
        whole = jnp.minimum(
            lax.div(jnp.maximum(earliest, 0), steps.positions), steps.columns // steps.pages
        )
        whole = jnp.clip(whole, piece.begin, jnp.maximum(piece.begin, piece.end))

        def one_step(step: Any, done: Any, causal: bool) -> Any:
            key_slot = lax.rem(done, _STAGES)
            plgpu.barrier_wait(keys_full.at[key_slot])

            def multiply(acc: Any) -> Any:
                plgpu.wgmma(acc, queries.at[slot, half], keys.at[key_slot].T)
                return acc[...]

            products = pl.run_scoped(multiply, plgpu.ACC((ROWS, KEYS)))
            plgpu.barrier_arrive(keys_free.at[key_slot])
            key = step * steps.positions + rank * steps.rows
            store_maxima(
                products,
                scores,
                (first, begin, end),
                step * steps.pages,
                (position, piece.keys, key) if causal else None,
                facts,
                target.interpret,
            )
            return done + 1

        plgpu.barrier_wait(queries_full.at[slot])
        done = lax.fori_loop(
            piece.begin, whole, functools.partial(one_step, causal=False), done
        )
        done = lax.fori_loop(whole, piece.end, functools.partial(one_step, causal=True), done)
        plgpu.barrier_arrive(queries_free.at[slot])
        return following, done

    lax.fori_loop(0, work.count, one_piece, (work.first_piece(steps), jnp.int32(0)))


def _fill(
    warp: Any, scored: Any, scores: Any, steps: _Steps, facts: ScoreStore, target: Target
) -> None:
    """One of three warps: -inf into the columns that no piece writes, of every grid-th token."""
    stride = 3 * target.sms
    listed = scored.shape[0]

    @pl.loop(0, cdiv(steps.tokens, stride))
    def _(turn: Any) -> None:
        token = turn * stride + warp * target.sms + lax.axis_index(CTA)

        @pl.when(token < steps.tokens)
        def _() -> None:
            done = jnp.where(token < listed, scored[jnp.minimum(token, listed - 1)], 0)
            column = _cdiv(done, steps.positions) * steps.pages
            fill_hidden(scores, token, column, facts, target.interpret)


def _cdiv(a: Any, b: int) -> Any:
    """Ceiling division of a scalar >= 0."""
    return lax.div(a + (b - 1), b)
