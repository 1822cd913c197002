"""The prefill scorer on Hopper: WGMMA, a persistent grid that walks the window's work list.

A CTA has one producer warp and two consumer warpgroups. It walks its range of the work list (see
`prefill_plan.balance`) piece by piece: the 256 query rows of a tile (64 tokens x 4 heads, 128 rows
a consumer), against the keys of the tile's part, 128 local keys a step. The producer keeps a ring
of key steps filled, page by page through the block table, and loads the next piece's queries while
the present one is worked on. Both consumers multiply every key step; they fall out of step with
each other by themselves, one multiplies while the other takes maxima.

Both take the maxima of one half of their rows while the other half is multiplied.

Keys that do not exist (bad page ids, pages past the segment or the table) arrive as NaN, which a
maximum skips; positions are compared only in the steps that reach past the first token's position.

In exact precision another warpgroup converts the keys to float16 on their way to the consumers,
whose products are then summed in float32; fp8 products are summed in about 14 bits.

What becomes of the maxima is a sink's business: `_PlaneSink` stores them; `_RowSink` hands each
consumer's to a selecting warpgroup, which keeps the Top16 of every row while the consumer goes on,
and makes candidate rows of them.
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
    NUM_HEADS,
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
    share_maxima,
    shared_words,
    start_products,
    store_maxima,
)
from msa_icp_jax.ops._mosaic.prefill_top16 import (
    NOTES_SHAPE,
    STAGE_SHAPE,
    Part,
    Scratch,
    Selection,
)
from msa_icp_jax.ops.prefill_plan import MSAIcpScorePlan, balance
from msa_icp_jax.ops.prefill_plan.balance import TILE_TOKENS, UNIT_POSITIONS
from msa_icp_jax.ops.select.kernel import select_rows

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
      maxima_slots: steps of each consumer whose maxima wait to be selected from; 0: no selection.
      registers: of a thread of the consumers, of the producer, and of the converter or the
        selecting warpgroups.
    """

    query_slots: int
    key_slots: int
    raw_slots: int
    maxima_slots: int
    registers: tuple[int, ...]

    @property
    def exact(self) -> bool:
        return self.raw_slots > 0

    @property
    def selects(self) -> bool:
        return self.maxima_slots > 0

    @property
    def warpgroups(self) -> int:
        return _CONSUMERS + 1 + self.exact + self.selects * _CONSUMERS

    def take_registers(self, role: int) -> None:
        """Sets the registers of a warpgroup by the place of its kind in `registers`."""
        given = _SM_REGISTERS // (128 * self.warpgroups) // 8 * 8
        wanted = self.registers[role]
        plgpu.set_max_registers(wanted, action="increase" if wanted > given else "decrease")


_SM_REGISTERS = 1 << 16
_FAST = _Shape(2, 8, 0, 0, (232, 40))
_FAST_SELECTING = _Shape(2, 5, 0, 2, (160, 24, 64))
_EXACT = _Shape(1, 3, 3, 0, (184, 40, 104))


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
    num_valid_pages: jax.Array | None = None,
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
      num_valid_pages: None, or int32 [T]: without `initialize`, columns that are candidates by
        these counts are all written, so that the selection never meets an old value.
    """
    hidden = "all" if initialize else "none" if num_valid_pages is None else "candidates"
    scores = launch.writable(max_score)
    steps = _Steps(world_size, page_size, row_offset, q.shape[0], max_score.shape[2])
    _score_plane(
        (q, k, block_table, plan, num_valid_pages),
        steps,
        Plane(steps.step_pages, steps.columns, sm_scale, hidden),
        scores,
        rank=rank,
        precision=precision,
        enable_pdl=enable_pdl,
        target=target,
    )
    return launch.written(scores)


def _score_plane(
    inputs: tuple[Any, ...],
    steps: _Steps,
    plane: Plane,
    scores: Any,
    *,
    rank: Any,
    precision: str,
    enable_pdl: bool,
    target: Target,
) -> Any:
    """Scores (q, k, block_table, plan, num_valid_pages) into a ref, or where that is None, anew."""
    q, k, block_table, plan, counts = inputs
    work = _work_of(plan)
    shape = jax.ShapeDtypeStruct((steps.tokens, NUM_HEADS, plane.columns), jnp.float32)
    return _run(
        "prefill_scores",
        functools.partial(_PlaneSink, steps, plane, target),
        q,
        k,
        block_table,
        work,
        rank,
        (
            work.tile_of,
            work.tile_of if counts is None else counts,
            *([] if scores is None else [scores]),
        ),
        shape=_EXACT if precision == "exact" else _FAST,
        steps=steps,
        pdl=enable_pdl,
        target=target,
        out_type=shape if scores is None else (),
    )


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
    columns: int,
    precision: str,
    enable_pdl: bool,
    target: Target,
) -> jax.Array:
    """Candidate rows of a window, written into `carrier`, without a score plane.

    The scorer keeps the Top16 of every row's columns. Where several CTAs share a tile, the one that
    ends last joins what they have found and writes the rows.

    In exact precision an SM has no registers left for that: the rows are then selected from a
    temporary score plane of `columns` columns.

    Args:
      num_valid_pages: int32 [T].
      carrier: int32 [4, >= T, 33].
      force_begin_blocks, force_end_blocks: forced blocks at both ends of the visible ones.
      columns: columns that are scored and can be candidates at most.
      q, k, block_table, plan, rank, world_size, page_size, row_offset, precision, enable_pdl,
        target: as in `prefill_scores`.
    """
    steps = _Steps(world_size, page_size, row_offset, q.shape[0], columns)
    if precision == "exact":
        scores = _score_plane(
            (q, k, block_table, plan, num_valid_pages),
            steps,
            Plane(steps.step_pages, columns, 1.0, "candidates"),
            None,
            rank=rank,
            precision=precision,
            enable_pdl=enable_pdl,
            target=target,
        )
        return select_rows(
            scores,
            num_valid_pages,
            carrier,
            None,
            index_scale=column_scale(page_size),
            index_offset=column_offset(rank, world_size, page_size),
            force_begin_blocks=force_begin_blocks,
            force_end_blocks=force_end_blocks,
            enable_pdl=enable_pdl,
            target=target,
        )
    work = _work_of(plan)
    facts = Selection(
        steps.step_pages,
        steps.tokens,
        columns,
        column_scale(page_size),
        force_begin_blocks,
        force_end_blocks,
        target.interpret,
    )
    zeros = work.counters
    if not isinstance(rank, int):
        zeros = zeros + 0 * rank  # where ranks are mapped over, each has its own
    counters, rows = launch.writable(zeros), launch.writable(carrier)
    scratch = _run(
        "prefill_rows",
        functools.partial(_RowSink, facts),
        q,
        k,
        block_table,
        work,
        rank,
        (num_valid_pages, work.tile_of, counters, rows),
        shape=_FAST_SELECTING,
        steps=steps,
        pdl=enable_pdl,
        target=target,
        out_type=Scratch.types(work.slots, facts),
        scratch={
            "notes": plgpu.SMEM((_CONSUMERS, *NOTES_SHAPE), jnp.float32),
            "stage": plgpu.SMEM((_CONSUMERS, *STAGE_SHAPE), jnp.int32),
        },
    )
    if target.interpret:  # CTAs that wait for one another's results cannot be simulated
        launch.launch(
            functools.partial(_write_rows_stock, facts=facts),
            name="prefill_rows_stock",
            target=target,
            grid=(facts.padded_rows // ROWS,),
        )(work.tiles, work.tile_of, num_valid_pages, *scratch, _rank_scalars(rank, steps), rows)
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


class _Maxima(NamedTuple):
    """Slots for the page maxima of a step, a ring for each consumer."""

    data: Any
    full: Any
    free: Any

    @staticmethod
    def types(slots: int, pages: StepPages) -> _Maxima:
        all_slots = _CONSUMERS * slots
        return _Maxima(
            plgpu.SMEM((all_slots, shared_words(pages)), jnp.float32),
            plgpu.Barrier(num_arrivals=1, num_barriers=all_slots),
            plgpu.Barrier(num_arrivals=1, num_barriers=all_slots),
        )

    def ring(self, half: Any) -> _MaximaRing:
        return _MaximaRing(self, half, self.data.shape[0] // _CONSUMERS)


class _MaximaRing(NamedTuple):
    """The slots of one consumer, filled in turn."""

    maxima: _Maxima
    half: Any
    slots: int

    def _slot(self, turn: Any) -> Any:
        return self.half * self.slots + lax.rem(turn, self.slots)

    def data(self, turn: Any) -> Any:
        return self.maxima.data.at[self._slot(turn)]

    def wait_full(self, turn: Any) -> None:
        plgpu.barrier_wait(self.maxima.full.at[self._slot(turn)])

    def publish(self, turn: Any) -> None:
        plgpu.barrier_arrive(self.maxima.full.at[self._slot(turn)])

    def wait_free(self, turn: Any) -> None:
        @pl.when(turn >= self.slots)
        def _() -> None:
            plgpu.barrier_wait(self.maxima.free.at[self._slot(turn)])

    def release(self, turn: Any) -> None:
        plgpu.barrier_arrive(self.maxima.free.at[self._slot(turn)])

    def drain(self, turns: Any) -> None:
        @pl.loop(jnp.maximum(turns - self.slots, 0), turns)
        def _(turn: Any) -> None:
            plgpu.barrier_wait(self.maxima.free.at[self._slot(turn)])


class _Ring(NamedTuple):
    """Shared memory between the producer, the converter, the consumers and the selection."""

    queries: _Buffer
    keys: _Buffer
    raw: _Buffer | None
    maxima: _Maxima | None

    @staticmethod
    def types(pages: StepPages, shape: _Shape) -> _Ring:
        fp8 = jnp.float8_e4m3fn
        dtype = jnp.float16 if shape.exact else fp8
        key_fills = 1 if shape.exact else pages.count
        return _Ring(
            _Buffer.types(shape.query_slots, (_CONSUMERS, ROWS), dtype, _CONSUMERS, _CONSUMERS),
            _Buffer.types(shape.key_slots, (KEYS,), dtype, key_fills, _CONSUMERS),
            _Buffer.types(shape.raw_slots, (KEYS,), fp8, pages.count, 1) if shape.exact else None,
            _Maxima.types(shape.maxima_slots, pages) if shape.selects else None,
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
        scratch_types={"ring": _Ring.types(steps.step_pages, shape), **(scratch or {})},
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
        # In this order: a kernel that starts early then finds all that was made before this one.
        plgpu.griddepcontrol_wait()
        plgpu.griddepcontrol_launch_dependents()
    work = _Range.load(ranges, tiles)
    sink = make_sink(work, ring, scalars, *sink_refs, **sink_scratch)
    warpgroup = lax.axis_index(WARPGROUP)

    @pl.when(warpgroup < _CONSUMERS)
    def _() -> None:
        shape.take_registers(0)
        _consume(work, ring, sink, scalars[0], steps, target.interpret)

    @pl.when(warpgroup == _CONSUMERS)
    def _() -> None:
        shape.take_registers(1)

        @plgpu.warp_map
        def _(warp: Any) -> None:
            @pl.when(warp == 0)
            def _() -> None:
                _produce(work, ring, query, k, block_table, hidden, steps)

            sink.run_aside(warp - 1)

    if shape.warpgroups > _CONSUMERS + 1:

        @pl.when(warpgroup > _CONSUMERS)
        def _() -> None:
            shape.take_registers(2)
            if shape.exact:
                _convert(work, ring, steps)
            else:
                sink.select(warpgroup - _CONSUMERS - 1, steps)


class _Piece(NamedTuple):
    """A tile's part in a CTA's range, as scalars.

    Steps [begin, end) of the segment are to be scored for rows [first_row, end_row) of the 64 query
    rows of `tile`; the first of the 64 would sit at `position`. The tile's last token sees `scored`
    positions; its `parts` have the slots from `first_slot` on.
    """

    tile: Any
    first_row: Any
    end_row: Any
    segment: Any
    position: Any
    keys: Any
    begin: Any
    end: Any
    scored: Any
    first_slot: Any
    parts: Any


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
            field(balance.SCORED),
            field(balance.FIRST_SLOT),
            field(balance.PARTS),
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

        # Copies and products, which are asynchronous, come after what was read and written here.
        plgpu.commit_smem()
        raw.release(turn)
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
    """One warpgroup: 128 query rows of every piece against all its keys."""
    half = lax.axis_index(WARPGROUP)

    def one_piece(index: Any, carry: Any) -> Any:
        piece, done = carry
        following = work.piece(index + 1, steps)
        ring.queries.wait_full(index)
        queries = ring.queries.data.at[ring.queries.slot(index), half]
        _consume_piece(piece, done, queries, ring, sink, rank, steps, interpret)
        ring.queries.release(index)
        return following, done + jnp.maximum(piece.end - piece.begin, 0)

    start = (work.first_piece(steps), jnp.int32(0))
    _, done = lax.fori_loop(0, work.count, one_piece, start)
    sink.drain(half, done)


def _consume_piece(
    piece: _Piece,
    done: Any,
    queries: Any,
    ring: _Ring,
    sink: Any,
    rank: Any,
    steps: _Steps,
    interpret: bool,
) -> None:
    """The steps of one piece; `done` steps came before it.

    The rows are multiplied as two halves of 64, and the maxima of one are taken while the other is
    still under way. Both are started at once: the tensor cores then finish one consumer's step
    before they turn to the other's, which takes its maxima meanwhile.
    """
    rows = _Rows.of(piece, lax.axis_index(WARPGROUP))

    def one_step(step: Any, may_hide: bool) -> None:
        turn = done + step - piece.begin
        first_key = step * steps.positions + rank * steps.rows
        causal = Causal(rows.position, piece.keys, first_key) if may_hide else None

        def maxima(products: jax.Array, m: int) -> jax.Array:
            return lane_maxima(products, m, causal, steps.step_pages, interpret)

        ring.keys.wait_full(turn)
        keys = ring.keys.data.at[ring.keys.slot(turn)]
        upper, lower = (
            start_products(queries.at[pl.ds(m * ROWS // 2, ROWS // 2)], keys, interpret)
            for m in range(2)
        )
        # The second half's products are still under way while the first half's maxima are taken.
        upper, _ = settle_products(upper, 1, None, interpret)
        lower, best = settle_products(lower, 0, maxima(upper, 0), interpret)
        assert best is not None
        ring.keys.release(turn)
        sink.take((best, maxima(lower, 1)), rows, turn, step * steps.pages, causal)

    whole = rows.whole_steps(piece, steps)
    pl.loop(piece.begin, whole)(functools.partial(one_step, may_hide=False))
    pl.loop(whole, piece.end)(functools.partial(one_step, may_hide=True))


class _PlaneSink:
    """Stores the maxima to the score plane."""

    def __init__(
        self,
        steps: _Steps,
        plane: Plane,
        target: Target,
        work: _Range,
        ring: _Ring,
        scalars: Any,
        tile_of: Any,
        counts: Any,
        scores: Any,
    ) -> None:
        del ring
        self.steps, self.plane, self.target = steps, plane, target
        self.work, self.offset = work, scalars[1]
        self.tile_of, self.counts, self.scores = tile_of, counts, scores

    def take(
        self, maxima: LaneMaxima, rows: _Rows, turn: Any, column: Any, causal: Causal | None
    ) -> None:
        """One consumer's maxima of a step, the turn-th of the CTA."""
        del turn
        store_maxima(
            maxima,
            self.scores,
            (rows.first, rows.begin, rows.end),
            column,
            causal,
            self.plane,
            self.target.interpret,
        )

    def drain(self, half: Any, turns: Any) -> None:
        """Called by a consumer after its last step."""

    def run_aside(self, warp: Any) -> None:
        """The three idle warps: -inf into the hidden columns that no piece writes."""
        if self.plane.hidden == "none":
            return
        ctas = self.work.ranges.shape[0]

        @pl.when(warp >= 0)
        def _() -> None:
            fill_hidden(
                self.scores,
                (self.work.tiles, self.tile_of),
                self.counts,
                warp * ctas + lax.axis_index(CTA),
                3 * ctas,
                self.steps.tokens,
                self.offset,
                self.plane,
                self.target.interpret,
            )


class _RowSink:
    """Keeps the Top16 of every row and makes candidate rows of them."""

    def __init__(
        self,
        facts: Selection,
        work: _Range,
        ring: _Ring,
        scalars: Any,
        counts: Any,
        tile_of: Any,
        counters: Any,
        carrier: Any,
        *scratch: Any,
        notes: Any,
        stage: Any,
    ) -> None:
        assert ring.maxima is not None
        self.facts, self.work, self.maxima, self.offset = facts, work, ring.maxima, scalars[1]
        self.counts, self.tile_of, self.counters = counts, tile_of, counters
        self.carrier, self.scratch = carrier, Scratch(*scratch)
        self.notes, self.stage = notes, stage

    def take(
        self, maxima: LaneMaxima, rows: _Rows, turn: Any, column: Any, causal: Causal | None
    ) -> None:
        """One consumer's maxima of a step, the turn-th of the CTA."""
        del column, causal
        ring = self.maxima.ring(rows.half)
        ring.wait_free(turn)
        share_maxima(maxima, ring.data(turn), self.facts.pages, self.facts.interpret)
        ring.publish(turn)

    def drain(self, half: Any, turns: Any) -> None:
        """Called by a consumer after its last step."""
        self.maxima.ring(half).drain(turns)

    def run_aside(self, warp: Any) -> None:
        """Called by the three idle warps."""

    def select(self, half: Any, steps: _Steps) -> None:
        """One warpgroup: the Top16 of a consumer's rows, from the maxima that it leaves."""
        self._write_unscored(half)

        def one_piece(index: Any, done: Any) -> Any:
            piece = self.work.piece(index, steps)

            # A part without steps ends as well (all its columns may be missing): its tile waits.
            @pl.when(piece.parts > 0)
            def _() -> None:
                self._select_piece(piece, half, index, done, steps)

            return done + jnp.maximum(piece.end - piece.begin, 0)

        lax.fori_loop(0, self.work.count, one_piece, jnp.int32(0))

    def _write_unscored(self, half: Any) -> None:
        """Rows that have no part: a CTA sees to every stride-th stretch of 64 tokens."""
        stride = self.work.ranges.shape[0]

        @pl.loop(0, cdiv(cdiv(self.facts.tokens, TILE_TOKENS), stride))
        def _(turn: Any) -> None:
            stretch = turn * stride + lax.axis_index(CTA)
            prefill_top16.write_unscored(
                self.work.tiles,
                self.tile_of,
                self.counts,
                self.carrier,
                self.stage.at[half],
                stretch * TILE_TOKENS + half * _CONSUMER_TOKENS,
                self.offset,
                self.facts,
            )

    def _select_piece(self, piece: _Piece, half: Any, index: Any, done: Any, steps: _Steps) -> None:
        facts, rows = self.facts, _Rows.of(piece, half)
        token = lax.div(rows.first, NUM_HEADS)
        bounds = prefill_top16.row_bounds(
            self.counts, self.offset, token, rows.begin, rows.end, facts
        )
        ring, notes = self.maxima.ring(half), self.notes.at[half]
        slot = self.work.slot + index
        log = self.scratch.logs.at[slot, half]

        def one_step(step: Any, best: Any) -> Any:
            turn = done + step - piece.begin
            ring.wait_full(turn)
            best = prefill_top16.push(
                ring.data(turn),
                best,
                bounds,
                notes,
                log,
                self.scratch.forced,
                rows.first,
                step * steps.pages,
                facts,
            )
            ring.release(turn)
            return best

        nothing = prefill_top16.nothing_yet(facts)
        best = lax.fori_loop(piece.begin, piece.end, one_step, nothing)
        part = Part(
            half,
            slot,
            self.work.first + index,
            piece.first_slot,
            piece.parts,
            piece.scored,
            rows.first,
            rows.begin,
            rows.end,
            self.offset,
        )
        prefill_top16.finish_part(
            best,
            bounds,
            notes,
            self.scratch,
            self.counters,
            self.carrier,
            self.stage.at[half],
            part,
            facts,
        )


def _write_rows_stock(
    tiles: Any,
    tile_of: Any,
    counts: Any,
    logs: Any,
    log_counts: Any,
    ranked: Any,
    forced: Any,
    scalars: Any,
    rows: Any,
    *,
    facts: Selection,
) -> None:
    scratch = Scratch(logs, log_counts, ranked, forced)
    prefill_top16.write_rows_stock(
        tiles, tile_of, counts, scratch, rows, scalars[1], lax.axis_index(CTA), facts
    )


def _cdiv(a: Any, b: int) -> Any:
    """Ceiling division of a scalar >= 0."""
    return lax.div(a + (b - 1), b)
