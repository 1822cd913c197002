"""The prefill scorer on Hopper: WGMMA, a persistent grid that walks the window's work list.

A CTA has one producer warp and two consumer warpgroups. It walks its range of the work list (see
`prefill_plan.balance`) piece by piece: the 256 query rows of a tile (64 tokens x 4 heads, 128 rows
a consumer), against the keys of the tile's part, 128 local keys a step. The producer keeps a ring
of key steps filled, page by page through the block table, and loads the next piece's queries while
the present one is worked on. Both consumers multiply every key step; they fall out of step with
each other by themselves, one multiplies while the other takes maxima.

Keys that do not exist (bad page ids, pages past the segment or the table) arrive as NaN, which a
maximum skips; positions are compared only in the steps that reach past the first token's position.

In exact precision a third warpgroup converts the keys to float16 on their way to the consumers,
whose products are then summed in float32; fp8 products are summed in about 14 bits.

What becomes of the maxima is a sink's business: `_PlaneSink` stores them, `_ListSink` keeps the
Top16 of every row.
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

from msa_icp_jax.geometry import (
    HEAD_DIM,
    MAX_BLOCKS,
    NUM_HEADS,
    TOPK,
    cdiv,
    column_offset,
    column_scale,
    round_up,
    rows_per_page,
)
from msa_icp_jax.ops._mosaic import launch, prefill_top16
from msa_icp_jax.ops._mosaic.launch import CTA, WARPGROUP, Target
from msa_icp_jax.ops._mosaic.prefill_pieces import (
    KEYS,
    ROWS,
    Causal,
    LaneMaxima,
    Plane,
    StepPages,
    fill_hidden,
    lane_maxima,
    rows_layout,
    settle_products,
    start_products,
    store_maxima,
)
from msa_icp_jax.ops._mosaic.prefill_top16 import LIST_SHAPE, LOG_SHAPE, Joined, Selection
from msa_icp_jax.ops.prefill_plan import MSAIcpScorePlan, balance
from msa_icp_jax.ops.prefill_plan.balance import TILE_TOKENS, UNIT_POSITIONS
from msa_icp_jax.rows import ROW_WORDS

_CONSUMERS = 2
_TILE_ROWS = TILE_TOKENS * NUM_HEADS
_CONSUMER_TOKENS = TILE_TOKENS // _CONSUMERS


@dataclasses.dataclass(frozen=True)
class _Shape:
    """How the shared memory and the registers of an SM are spent.

    Attributes:
      query_slots: pieces whose queries are held.
      key_slots: key steps held, ready to be multiplied.
      raw_slots: key steps held that wait to be converted to float16; 0: keys are multiplied as fp8.
      registers: of a thread of the consumers, the producer and the converter.
    """

    query_slots: int
    key_slots: int
    raw_slots: int
    registers: tuple[int, ...]

    @property
    def exact(self) -> bool:
        return self.raw_slots > 0

    @property
    def warpgroups(self) -> int:
        return _CONSUMERS + 1 + self.exact


_FAST = _Shape(2, 8, 0, (232, 40))
_FAST_BESIDE_LOGS = _Shape(2, 6, 0, (232, 40))
_EXACT = _Shape(1, 3, 3, (184, 40, 104))
_EXACT_BESIDE_LOGS = _Shape(1, 2, 2, (224, 24, 40))


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
      plan: the window's segments and their work list, with total_q <= T.
      max_score: float32 [>= T, 4, K].
      rank: int or traced int32 scalar.
      world_size, page_size, row_offset, sm_scale, initialize, enable_pdl: as in the contract.
      precision: "fast" (fp8 products, about 14 bits) or "exact" (float32 sums).
      target: the machine to build for.
    """
    work = _work_of(plan)
    steps = _Steps(world_size, page_size, row_offset, q.shape[0], max_score.shape[2])
    plane = Plane(steps.step_pages, steps.columns, sm_scale, initialize)
    scores = launch.writable(max_score)
    _run(
        "prefill_scores",
        functools.partial(_PlaneSink, steps, plane, target),
        q,
        k,
        block_table,
        work,
        rank,
        (work.tile_of, scores),
        shape=_EXACT if precision == "exact" else _FAST,
        steps=steps,
        pdl=enable_pdl,
        target=target,
    )
    return launch.written(scores)


def prefill_rows(
    q: jax.Array,
    k: jax.Array,
    block_table: jax.Array,
    plan: MSAIcpScorePlan,
    num_valid_pages: jax.Array,
    carrier: jax.Array,
    *,
    rank: Any,
    world_size: int,
    page_size: int,
    row_offset: int,
    force_begin_blocks: int,
    force_end_blocks: int,
    precision: str,
    enable_pdl: bool,
    target: Target,
) -> jax.Array:
    """Candidate rows of a window, written into `carrier`, without a score plane.

    The scorer keeps the Top16 of every row's columns; a second kernel joins the lists of tiles that
    several CTAs shared and writes the rows.

    Args:
      num_valid_pages: int32 [T].
      carrier: int32 [4, >= T, 33].
      force_begin_blocks, force_end_blocks: forced blocks at both ends of the visible ones.
      q, k, block_table, plan, rank, world_size, page_size, row_offset, precision, enable_pdl,
        target: as in `prefill_scores`.
    """
    work = _work_of(plan)
    scale = column_scale(page_size)
    steps = _Steps(world_size, page_size, row_offset, q.shape[0], MAX_BLOCKS // scale)
    facts = Selection(
        steps.step_pages,
        steps.tokens,
        scale,
        force_begin_blocks,
        force_end_blocks,
        target.interpret,
    )
    lists, forced = _run(
        "prefill_lists",
        functools.partial(_ListSink, facts),
        q,
        k,
        block_table,
        work,
        rank,
        (num_valid_pages,),
        shape=_EXACT_BESIDE_LOGS if precision == "exact" else _FAST_BESIDE_LOGS,
        steps=steps,
        pdl=enable_pdl,
        target=target,
        out_type=(
            jax.ShapeDtypeStruct((work.slots, _CONSUMERS, *LIST_SHAPE), jnp.int32),
            jax.ShapeDtypeStruct((TOPK, facts.padded_rows), jnp.float32),
        ),
        scratch={"logs": plgpu.SMEM((_CONSUMERS, *LOG_SHAPE), jnp.int32)},
    )
    rows = launch.writable(carrier)
    launch.launch(
        functools.partial(_finish_kernel, facts=facts, pdl=enable_pdl),
        name="prefill_rows",
        target=target,
        grid=(facts.padded_rows // ROWS,),
        scratch_types={
            "logs": plgpu.SMEM(LOG_SHAPE, jnp.int32),
            "stage": plgpu.SMEM((ROWS * ROW_WORDS,), jnp.int32),
        },
    )(
        work.tiles,
        work.tile_of,
        lists,
        forced,
        num_valid_pages,
        _rank_scalars(rank, steps),
        rows,
    )
    return launch.written(rows)


@dataclasses.dataclass(frozen=True)
class _Steps:
    """Static facts; how positions fall into steps of 128 local keys, and where pages lie.

    Attributes:
      world_size, page_size, row_offset: the shard layout.
      tokens: query tokens T.
      columns: columns that are scored at most.
    """

    world_size: int
    page_size: int
    row_offset: int
    tokens: int
    columns: int

    @property
    def step_pages(self) -> StepPages:
        return StepPages(self.rows, self.page_size)

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


def _rank_scalars(rank: Any, steps: _Steps) -> jax.Array:
    """int32 [2]: the rank and the block of its column 0, operands so that ranks share a kernel."""
    rank = jnp.asarray(rank, jnp.int32)
    offset = column_offset(rank, steps.world_size, steps.page_size)
    return jnp.stack([rank, jnp.asarray(offset, jnp.int32)])


def _work_of(plan: MSAIcpScorePlan) -> balance.PrefillWork:
    if plan.work is None:
        raise ValueError('plan must be built for backend "mosaic": it has no work list')
    return plan.work


class _Buffer(NamedTuple):
    """Slots of shared memory, filled in turn by one side and freed by the other."""

    data: Any
    full: Any
    free: Any

    @staticmethod
    def types(slots: int, shape: tuple[int, ...], dtype: Any, fills: int, frees: int) -> _Buffer:
        return _Buffer(
            plgpu.SMEM((slots, *shape, HEAD_DIM), dtype, transforms=rows_layout(dtype)),
            plgpu.Barrier(num_arrivals=fills, num_barriers=slots),
            plgpu.Barrier(num_arrivals=frees, num_barriers=slots),
        )

    @property
    def slots(self) -> int:
        return self.data.shape[0]

    def slot(self, turn: Any) -> Any:
        return lax.rem(turn, self.slots)

    def wait_full(self, turn: Any) -> None:
        plgpu.barrier_wait(self.full.at[self.slot(turn)])

    def release(self, turn: Any) -> None:
        plgpu.barrier_arrive(self.free.at[self.slot(turn)])

    def wait_free(self, turn: Any) -> None:
        """Waits until the slot of this turn may be filled."""

        @pl.when(turn >= self.slots)
        def _() -> None:
            plgpu.barrier_wait(self.free.at[self.slot(turn)])

    def drain(self, turns: Any) -> None:
        """Waits until all slots are free: every phase of a barrier has to be waited for."""

        @pl.loop(jnp.maximum(turns - self.slots, 0), turns)
        def _(turn: Any) -> None:
            plgpu.barrier_wait(self.free.at[self.slot(turn)])


class _Ring(NamedTuple):
    """Shared memory between the producer, the converter and the consumers."""

    queries: _Buffer
    keys: _Buffer
    raw: _Buffer | None

    @staticmethod
    def types(pages: int, shape: _Shape) -> _Ring:
        fp8 = jnp.float8_e4m3fn
        dtype = jnp.float16 if shape.exact else fp8
        key_fills = 1 if shape.exact else pages
        raw = _Buffer.types(shape.raw_slots, (KEYS,), fp8, pages, 1) if shape.exact else None
        return _Ring(
            _Buffer.types(shape.query_slots, (_CONSUMERS, ROWS), dtype, _CONSUMERS, _CONSUMERS),
            _Buffer.types(shape.key_slots, (KEYS,), dtype, key_fills, _CONSUMERS),
            raw,
        )

    @property
    def loaded(self) -> _Buffer:
        """Where keys arrive."""
        return self.keys if self.raw is None else self.raw


def _run(
    name: str,
    make_sink: Callable[..., Any],
    q: jax.Array,
    k: jax.Array,
    block_table: jax.Array,
    work: balance.PrefillWork,
    rank: Any,
    more: tuple[Any, ...],
    *,
    shape: _Shape,
    steps: _Steps,
    pdl: bool,
    target: Target,
    out_type: Any = (),
    scratch: dict[str, Any] | None = None,
) -> Any:
    """Launches the scorer. `make_sink` gets the refs of `more` and the outputs, and the scratch."""
    query = q.reshape(-1, HEAD_DIM)
    padding = round_up(steps.tokens, TILE_TOKENS) * NUM_HEADS - query.shape[0]
    if padding:
        query = jnp.pad(query, ((0, padding), (0, 0)))
    if shape.exact:
        query = query.astype(jnp.float16)
    kernel = functools.partial(
        _kernel, make_sink=make_sink, shape=shape, steps=steps, pdl=pdl, target=target
    )
    return launch.launch(
        kernel,
        name=name,
        target=target,
        grid=(work.ranges.shape[0],),
        warpgroups=shape.warpgroups,
        out_type=out_type,
        scratch_types={"ring": _Ring.types(steps.pages, shape), **(scratch or {})},
    )(
        query,
        k,
        block_table,
        work.ranges,
        work.tiles,
        work.hidden,
        _rank_scalars(rank, steps),
        *more,
    )


def _kernel(
    query: Any,
    k: Any,
    block_table: Any,
    ranges: Any,
    tiles: Any,
    hidden: Any,
    scalars: Any,
    *sink_refs: Any,
    make_sink: Callable[..., Any],
    shape: _Shape,
    steps: _Steps,
    pdl: bool,
    target: Target,
    ring: _Ring,
    **sink_scratch: Any,
) -> None:
    if pdl and not target.interpret:
        plgpu.griddepcontrol_launch_dependents()
        plgpu.griddepcontrol_wait()
    work = _Range.load(ranges, tiles)
    sink = make_sink(work, scalars, *sink_refs, **sink_scratch)
    warpgroup = lax.axis_index(WARPGROUP)

    @pl.when(warpgroup < _CONSUMERS)
    def _() -> None:
        plgpu.set_max_registers(shape.registers[0], action="increase")
        _consume(work, ring, sink, scalars[0], steps, target.interpret)

    @pl.when(warpgroup == _CONSUMERS)
    def _() -> None:
        plgpu.set_max_registers(shape.registers[1], action="decrease")

        @plgpu.warp_map
        def _(warp: Any) -> None:
            @pl.when(warp == 0)
            def _() -> None:
                _produce(work, ring, query, k, block_table, hidden, steps)

            sink.run_aside(warp - 1)

    if shape.exact:

        @pl.when(warpgroup == _CONSUMERS + 1)
        def _() -> None:
            plgpu.set_max_registers(shape.registers[2], action="decrease")
            _convert(work, ring, steps)


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
    slot: Any

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
            ranges[row, balance.RANGE_SLOT],
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


def _produce(
    work: _Range,
    ring: _Ring,
    query: Any,
    k: Any,
    block_table: Any,
    hidden: Any,
    steps: _Steps,
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
        queries = ring.queries
        slot = queries.slot(index)
        queries.wait_free(index)
        for half in range(_CONSUMERS):
            rows = pl.ds(piece.tile * _TILE_ROWS + half * ROWS, ROWS)
            plgpu.copy_gmem_to_smem(
                query.at[rows], queries.data.at[slot, half], queries.full.at[slot]
            )

        def one_step(step: Any, carry: Any) -> Any:
            loaded, ids = carry
            next_ids = page_ids(piece, step + 1)  # under way while this step is copied
            slot = ring.loaded.slot(loaded)
            ring.loaded.wait_free(loaded)
            for g, page in enumerate(ids):
                place = ring.loaded.data.at[slot, pl.ds(g * steps.rows, steps.rows)]
                load_page(page, place, ring.loaded.full.at[slot])
            return loaded + 1, next_ids

        loaded, _ = lax.fori_loop(piece.begin, piece.end, one_step, (loaded, ids))
        return following, loaded

    start = (work.first_piece(steps), jnp.int32(0))
    _, loaded = lax.fori_loop(0, work.count, one_piece, start)

    ring.queries.drain(work.count)
    ring.loaded.drain(loaded)


def _convert(work: _Range, ring: _Ring, steps: _Steps) -> None:
    """One warpgroup: keys from float8_e4m3fn to float16, which holds every value of it."""
    raw, keys = ring.raw, ring.keys
    assert raw is not None

    def one_step(turn: Any) -> None:
        raw.wait_full(turn)
        keys.wait_free(turn)

        @pl.loop(0, KEYS // 64)
        def _(part: Any) -> None:  # a loop, so that the registers of one part do for all
            rows = pl.ds(part * 64, 64)
            some = plgpu.load(
                raw.data.at[raw.slot(turn), rows], layout=plgpu.Layout.WGMMA_UPCAST_2X
            )
            some = plgpu.layout_cast(some.astype(jnp.float16), plgpu.Layout.WGMMA)
            keys.data[keys.slot(turn), rows] = some

        raw.release(turn)
        plgpu.commit_smem()
        plgpu.barrier_arrive(keys.full.at[keys.slot(turn)])

    def one_piece(index: Any, carry: Any) -> Any:
        piece, turn = carry
        end = turn + jnp.maximum(piece.end - piece.begin, 0)
        pl.loop(turn, end)(one_step)
        return work.piece(index + 1, steps), end

    start = (work.first_piece(steps), jnp.int32(0))
    _, turns = lax.fori_loop(0, work.count, one_piece, start)
    keys.drain(turns)


class _Rows(NamedTuple):
    """A consumer's 128 query rows (4 token + head) of a piece, as scalars.

    Row 0 is query row `first`, and its token would sit at `position`; rows [begin, end) belong to
    the piece.
    """

    half: Any
    first: Any
    begin: Any
    end: Any
    position: Any

    @staticmethod
    def of(piece: _Piece, half: Any) -> _Rows:
        return _Rows(
            half,
            piece.tile * _TILE_ROWS + half * ROWS,
            jnp.clip(piece.first_row * NUM_HEADS - half * ROWS, 0, ROWS),
            jnp.clip(piece.end_row * NUM_HEADS - half * ROWS, 0, ROWS),
            piece.position + half * _CONSUMER_TOKENS,
        )

    def whole_steps(self, piece: _Piece, steps: _Steps) -> Any:
        """The first step of the piece in which a row may not see a key or a column is missing."""
        earliest = jnp.minimum(self.position + lax.div(self.begin, NUM_HEADS) + 1, piece.keys)
        whole = lax.div(jnp.maximum(earliest, 0), steps.positions)
        whole = jnp.minimum(whole, steps.columns // steps.pages)
        return jnp.clip(whole, piece.begin, jnp.maximum(piece.begin, piece.end))


def _consume(
    work: _Range, ring: _Ring, sink: Any, rank: Any, steps: _Steps, interpret: bool
) -> None:
    """One warpgroup: 128 query rows of every piece against all its keys.

    While the tensor cores work on a step, the warpgroup deals with the maxima of the step before.
    The rows are multiplied as two halves of 64, so that it can begin with the maxima of one while
    the other is still under way.
    """
    half = lax.axis_index(WARPGROUP)

    def one_piece(index: Any, carry: Any) -> Any:
        piece, done = carry
        following = work.piece(index + 1, steps)
        ring.queries.wait_full(index)

        @pl.when(piece.begin < piece.end)
        def _() -> None:
            queries = ring.queries.data.at[ring.queries.slot(index), half]
            _consume_piece(piece, index, done, queries, ring, sink, rank, steps, interpret)

        ring.queries.release(index)
        return following, done + jnp.maximum(piece.end - piece.begin, 0)

    lax.fori_loop(0, work.count, one_piece, (work.first_piece(steps), jnp.int32(0)))


def _consume_piece(
    piece: _Piece,
    index: Any,
    done: Any,
    queries: Any,
    ring: _Ring,
    sink: Any,
    rank: Any,
    steps: _Steps,
    interpret: bool,
) -> None:
    """One piece, which has steps; `done` steps came before it."""
    rows = _Rows.of(piece, lax.axis_index(WARPGROUP))

    def causal_of(step: Any) -> Causal:
        return Causal(rows.position, piece.keys, step * steps.positions + rank * steps.rows)

    def take(step: Any, maxima: Any, state: Any, may_hide: bool) -> Any:
        causal = causal_of(step) if may_hide else None
        return sink.take(maxima, state, rows, step * steps.pages, causal)

    def multiply(step: Any, may_hide: bool, meanwhile: Callable[[], Any]) -> Any:
        """The step's maxima, and the result of what is done while its products are under way."""
        turn = done + step - piece.begin
        ring.keys.wait_full(turn)
        keys = ring.keys.data.at[ring.keys.slot(turn)]
        products = [
            start_products(queries.at[pl.ds(m * ROWS // 2, ROWS // 2)], keys, interpret)
            for m in range(2)
        ]
        result = meanwhile()
        maxima = []
        for m in range(2):
            settled = settle_products(products[m], 1 - m, interpret)
            if m:
                ring.keys.release(turn)
            causal = causal_of(step) if may_hide else None
            maxima.append(lane_maxima(settled, m, causal, steps.step_pages, interpret))
        return tuple(maxima), result

    def one_step(step: Any, carry: Any, may_hide: bool) -> Any:
        maxima, state = carry
        return multiply(step, may_hide, lambda: take(step - 1, maxima, state, may_hide))

    first = piece.begin + 1
    whole = jnp.maximum(rows.whole_steps(piece, steps), first)
    carry = multiply(piece.begin, True, lambda: sink.start(rows))
    carry = lax.fori_loop(first, whole, functools.partial(one_step, may_hide=False), carry)
    carry = lax.fori_loop(whole, piece.end, functools.partial(one_step, may_hide=True), carry)
    maxima, state = carry
    sink.finish(take(piece.end - 1, maxima, state, True), rows, index)


class _PlaneSink:
    """Stores the maxima to the score plane."""

    def __init__(
        self,
        steps: _Steps,
        plane: Plane,
        target: Target,
        work: _Range,
        scalars: Any,
        tile_of: Any,
        scores: Any,
    ) -> None:
        del scalars
        self.steps, self.plane, self.target = steps, plane, target
        self.tiles, self.tile_of, self.scores = work.tiles, tile_of, scores
        self.ctas = work.ranges.shape[0]

    def start(self, rows: _Rows) -> tuple[()]:
        return ()

    def take(
        self, maxima: LaneMaxima, state: tuple[()], rows: _Rows, column: Any, causal: Causal | None
    ) -> tuple[()]:
        store_maxima(
            maxima,
            self.scores,
            (rows.first, rows.begin, rows.end),
            column,
            causal,
            self.plane,
            self.target.interpret,
        )
        return ()

    def finish(self, state: tuple[()], rows: _Rows, index: Any) -> None:
        pass

    def run_aside(self, warp: Any) -> None:
        """The three idle warps: -inf into the columns that no piece writes, a token at a time."""
        if not self.plane.initialize:
            return
        stride = 3 * self.ctas

        @pl.when(warp >= 0)
        def _() -> None:
            @pl.loop(0, cdiv(self.steps.tokens, stride))
            def _(turn: Any) -> None:
                token = turn * stride + warp * self.ctas + lax.axis_index(CTA)

                @pl.when(token < self.steps.tokens)
                def _() -> None:
                    column = self._scored_columns(token)
                    fill_hidden(self.scores, token, column, self.plane, self.target.interpret)

    def _scored_columns(self, token: Any) -> Any:
        """Columns of a token that the consumers write."""
        listed = self.tile_of.shape[0]
        tile = jnp.where(token < listed, self.tile_of[jnp.minimum(token, listed - 1)], -1)
        scored = jnp.where(tile >= 0, self.tiles[jnp.maximum(tile, 0), balance.SCORED], 0)
        return _cdiv(scored, self.steps.positions) * self.steps.pages


class _ListSink:
    """Keeps the Top16 of every row and leaves it in the slot of the piece."""

    def __init__(
        self,
        facts: Selection,
        work: _Range,
        scalars: Any,
        counts: Any,
        lists: Any,
        forced: Any,
        *,
        logs: Any,
    ) -> None:
        self.facts, self.slot, self.offset = facts, work.slot, scalars[1]
        self.counts, self.lists, self.forced, self.logs = counts, lists, forced, logs

    def start(self, rows: _Rows) -> Any:
        bounds = prefill_top16.row_bounds(
            self.counts,
            self.offset,
            lax.div(rows.first, NUM_HEADS),
            rows.begin,
            rows.end,
            self.facts,
        )
        return prefill_top16.nothing_yet(self.facts), bounds

    def take(
        self, maxima: LaneMaxima, state: Any, rows: _Rows, column: Any, causal: Causal | None
    ) -> Any:
        best, bounds = state
        logs = self.logs.at[rows.half]
        best = prefill_top16.push(
            maxima, best, bounds, logs, self.forced, rows.first, column, self.facts
        )
        return best, bounds

    def finish(self, state: Any, rows: _Rows, index: Any) -> None:
        target = self.lists.at[self.slot + index, rows.half]
        prefill_top16.publish(state[0], self.logs.at[rows.half], target, self.facts)

    def run_aside(self, warp: Any) -> None:
        pass


def _finish_kernel(
    tiles: Any,
    tile_of: Any,
    lists: Any,
    forced: Any,
    counts: Any,
    scalars: Any,
    rows: Any,
    *,
    logs: Any,
    stage: Any,
    facts: Selection,
    pdl: bool,
) -> None:
    if pdl and not facts.interpret:
        plgpu.griddepcontrol_launch_dependents()
        plgpu.griddepcontrol_wait()
    refs = Joined(tiles, tile_of, lists, forced, counts)
    prefill_top16.finish_rows(refs, rows, logs, stage, scalars[1], lax.axis_index(CTA), facts)


def _cdiv(a: Any, b: int) -> Any:
    """Ceiling division of a scalar >= 0."""
    return lax.div(a + (b - 1), b)
