"""The prefill scorer on Hopper: WGMMA, a persistent grid that walks the window's work list.

A CTA has one producer warp and four consumer warpgroups. It walks its range of the work list (see
`prefill_plan.balance`) piece by piece: the 256 query rows of a tile (64 tokens x 4 heads, 64 rows
a consumer), against the keys of the tile's part, 128 local keys a step. The producer keeps a ring
of key steps filled, page by page through the block table, and loads the next piece's queries while
the present one is worked on. All consumers multiply every key step; they fall out of step with
each other by themselves, one multiplies while the others take maxima and store them.

Keys that do not exist (bad page ids, pages past the segment or the table) arrive as NaN, which a
maximum skips; positions are compared only in the steps that reach past the first token's position.

Where only a selection reads the plane, negative scores are no matter once every row has sixteen
that are not negative. From there on a consumer takes integer maxima, half as many instructions.

bfloat16 products are summed in float32, fp8 ones in about 14 bits. In exact precision another
warpgroup converts fp8 keys to float16 on their way to the consumers, which is summed in float32,
too. For both there are two consumers of 128 rows, whose maxima are taken by halves.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from msa_icp_jax.geometry import (
    HEAD_DIM,
    NUM_HEADS,
    Forced,
    cdiv,
    column_offset,
    round_up,
    rows_per_page,
)
from msa_icp_jax.ops._mosaic.launch import CTA, WARPGROUP, Launch, writable, written
from msa_icp_jax.ops.arguments import Shard
from msa_icp_jax.ops.prefill_plan import MSAIcpScorePlan, balance
from msa_icp_jax.ops.prefill_plan.balance import TILE_TOKENS, UNIT_POSITIONS
from msa_icp_jax.ops.prefill_score import interpret
from msa_icp_jax.ops.prefill_score.config import Config, config_of
from msa_icp_jax.ops.prefill_score.maxima import Causal, StepPages
from msa_icp_jax.ops.prefill_score.parts import MACHINE, Parts
from msa_icp_jax.ops.prefill_score.plane import Plane, Rows, stage_pitch
from msa_icp_jax.ops.prefill_score.wgmma import KEYS, ROWS, rows_layout

if TYPE_CHECKING:
    from msa_icp_jax.arrays import Array, Float32, IndexFloat, Int32

_TILE_ROWS = TILE_TOKENS * NUM_HEADS


def prefill_scores(
    q: IndexFloat[Array, "T 4 128"],
    shard: Shard,
    block_table: Int32[Array, "B width"],
    plan: MSAIcpScorePlan,
    max_score: Float32[Array, "rows 4 K"],
    launch: Launch,
    *,
    sm_scale: float,
    initialize: bool,
) -> Float32[Array, "rows 4 K"]:
    """Scores of a window, written into `max_score` (in place where that is donated).

    Args:
      q: float8_e4m3fn or bfloat16 [T, 4, 128].
      shard: the keys, of the dtype of `q`.
      block_table: int32 [B, width].
      plan: the window's segments and their work list, with total_q <= T.
      max_score: float32 [>= T, 4, K].
      launch: how to launch; sums of bfloat16 products are float32 in any precision.
      sm_scale, initialize: as in the contract.
    """
    steps = _steps_of(shard, q, max_score)
    hidden = "all" if initialize else "none"
    config = _config_of(q, steps, plan, launch)
    plane = Plane(steps.step_pages, steps.columns, sm_scale, hidden, staged=config.staged_columns)
    counts = _work_of(plan).tile_of  # not looked at
    inputs = q, shard, block_table, plan, counts
    return _score(inputs, max_score, steps, plane, config, launch)


def candidate_scores(
    q: IndexFloat[Array, "T 4 128"],
    shard: Shard,
    block_table: Int32[Array, "B width"],
    plan: MSAIcpScorePlan,
    max_score: Float32[Array, "rows 4 K"] | jax.ShapeDtypeStruct,
    num_valid_pages: Int32[Array, " T"],
    forced: Forced,
    launch: Launch,
) -> Float32[Array, "rows 4 K"]:
    """Scores of a window for a selection that alone reads them.

    Columns that are candidates by `num_valid_pages` are all written, so that the selection never
    meets an old value; negative scores that it cannot choose may be other negative ones.

    Args:
      max_score: as for `prefill_scores`, or the shape of a plane that is to be made.
      num_valid_pages: int32 [T].
      forced: what the selection always chooses.
      others: as for `prefill_scores`.
    """
    steps = _steps_of(shard, q, max_score)
    config = _config_of(q, steps, plan, launch)
    plane = Plane(
        steps.step_pages,
        steps.columns,
        1.0,
        "candidates",
        forced if config.integer_maxima else None,
        config.staged_columns,
    )
    inputs = q, shard, block_table, plan, num_valid_pages
    return _score(inputs, max_score, steps, plane, config, launch)


def _score(
    inputs: tuple[jax.Array, Shard, jax.Array, MSAIcpScorePlan, jax.Array],
    max_score: Float32[Array, "rows 4 K"] | jax.ShapeDtypeStruct,
    steps: _Steps,
    plane: Plane,
    config: Config,
    launch: Launch,
) -> Float32[Array, "rows 4 K"]:
    """Launches the kernel on (q, shard, block_table, plan, counts)."""
    q, shard, block_table, plan, counts = inputs
    work = _work_of(plan)
    query = q.reshape(-1, HEAD_DIM)
    padding = round_up(steps.tokens, TILE_TOKENS) * NUM_HEADS - query.shape[0]
    if padding:
        query = jnp.pad(query, ((0, padding), (0, 0)))
    if config.converts:
        query = query.astype(jnp.float16)
    run = launch.kernel(
        functools.partial(_kernel, config=config, steps=steps, plane=plane, launch=launch),
        name="prefill_scores",
        grid=(work.ranges.shape[0],),
        warpgroups=config.warpgroups,
        out_type=max_score if isinstance(max_score, jax.ShapeDtypeStruct) else (),
        scratch_types={"ring": _Ring.types(steps.step_pages, config, q.dtype)},
    )
    hidden = work.hidden_keys(q.dtype)
    lists = work.ranges, work.tiles, hidden, _rank_scalars(shard), work.tile_of
    operands = (query, shard.index_k, block_table, *lists, counts)
    if isinstance(max_score, jax.ShapeDtypeStruct):
        found: jax.Array = run(*operands)
        return found
    scores = writable(max_score)
    run(*operands, scores)
    return written(scores)


@dataclasses.dataclass(frozen=True)
class _Steps:
    """Static parameters: how positions fall into steps of 128 local keys, and where pages lie.

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


def _steps_of(
    shard: Shard,
    q: IndexFloat[Array, "T 4 128"],
    max_score: Float32[Array, "rows 4 K"] | jax.ShapeDtypeStruct,
) -> _Steps:
    layout = shard.world_size, shard.page_size, shard.row_offset
    return _Steps(*layout, q.shape[0], max_score.shape[2])


def _config_of(q: jax.Array, steps: _Steps, plan: MSAIcpScorePlan, launch: Launch) -> Config:
    all_steps = cdiv(steps.tokens, TILE_TOKENS) * cdiv(steps.columns, steps.pages)
    steps_of_cta = all_steps / _work_of(plan).ranges.shape[0]
    return config_of(q.dtype, launch.precision, steps_of_cta, steps.pages)


def _rank_scalars(shard: Shard) -> Int32[Array, " 2"]:
    """int32 [2]: the rank and the block of its column 0, operands so that ranks share a kernel."""
    rank = jnp.asarray(shard.rank, jnp.int32)
    offset = column_offset(rank, shard.world_size, shard.page_size)
    return jnp.stack([rank, jnp.asarray(offset, jnp.int32)])


def _work_of(plan: MSAIcpScorePlan) -> balance.PrefillWork:
    if plan.work is None:
        raise ValueError('plan must be built for backend "mosaic": it has no work list')
    return plan.work


class _Buffer(NamedTuple):
    """Slots of shared memory, filled in turn by one side and freed by the other."""

    data: Any  # refs, or what they are made from
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

    def slot(self, turn: jax.Array) -> jax.Array:
        return lax.rem(turn, self.slots)

    def wait_full(self, turn: jax.Array) -> None:
        plgpu.barrier_wait(self.full.at[self.slot(turn)])

    def release(self, turn: jax.Array) -> None:
        plgpu.barrier_arrive(self.free.at[self.slot(turn)])

    def wait_free(self, turn: jax.Array) -> None:
        """Waits until the slot of this turn may be filled."""

        @pl.when(turn >= self.slots)
        def _() -> None:
            plgpu.barrier_wait(self.free.at[self.slot(turn)])

    def drain(self, turns: jax.Array) -> None:
        """Waits until all slots are free: every phase of a barrier has to be waited for."""

        @pl.loop(jnp.maximum(turns - self.slots, 0), turns)
        def _(turn: jax.Array) -> None:
            plgpu.barrier_wait(self.free.at[self.slot(turn)])


class _Ring(NamedTuple):
    """Shared memory between the producer, the converter and the consumers."""

    queries: _Buffer
    keys: _Buffer
    raw: _Buffer | None
    stage: Any  # see `plane.stage_maxima`, None where nothing is staged

    @staticmethod
    def types(pages: StepPages, config: Config, dtype: Any) -> _Ring:
        """For index keys of `dtype`."""
        operand = jnp.float16 if config.converts else dtype
        consumers, pitch = config.consumers, stage_pitch(config.staged_columns)
        rows = _TILE_ROWS // consumers
        return _Ring(
            _Buffer.types(config.query_slots, (consumers, rows), operand, consumers, consumers),
            _Buffer.types(
                config.key_slots, (KEYS,), operand, 1 if config.converts else pages.count, consumers
            ),
            _Buffer.types(config.raw_slots, (KEYS,), dtype, pages.count, 1)
            if config.converts
            else None,
            plgpu.SMEM((consumers, rows, pitch), jnp.float32) if config.staged_columns else None,
        )

    @property
    def loaded(self) -> _Buffer:
        """Where keys arrive."""
        return self.keys if self.raw is None else self.raw


def _kernel(
    query: jax.Ref,
    k: jax.Ref,
    block_table: jax.Ref,
    ranges: jax.Ref,
    tiles: jax.Ref,
    hidden: jax.Ref,
    scalars: jax.Ref,
    tile_of: jax.Ref,
    counts: jax.Ref,
    scores: jax.Ref,
    *,
    config: Config,
    steps: _Steps,
    plane: Plane,
    launch: Launch,
    ring: _Ring,
) -> None:
    if launch.pdl and not launch.target.interpret:
        # In this order: a kernel that starts early then finds all that was made before this one.
        plgpu.griddepcontrol_wait()
        plgpu.griddepcontrol_launch_dependents()
    parts = interpret.PARTS if launch.target.interpret else MACHINE
    work = _Range.load(ranges, tiles)
    rank_and_offset = scalars[0], scalars[1]
    warpgroup = lax.axis_index(WARPGROUP)

    @pl.when(warpgroup < config.consumers)
    def _() -> None:
        config.take_registers(0)
        _Consumer(parts, work, ring, scores, counts, *rank_and_offset, steps, plane).run()

    @pl.when(warpgroup == config.consumers)
    def _() -> None:
        config.take_registers(1)

        @plgpu.warp_map
        def _(warp: jax.Array) -> None:
            @pl.when(warp == 0)
            def _() -> None:
                _produce(work, ring, query, k, block_table, hidden, steps)

            if plane.hidden != "none":

                @pl.when(warp > 0)
                def _() -> None:  # the three warps that are idle else
                    ctas = ranges.shape[0]
                    parts.fill_hidden(
                        scores,
                        (tiles, tile_of),
                        counts,
                        (warp - 1) * ctas + lax.axis_index(CTA),
                        3 * ctas,
                        steps.tokens,
                        rank_and_offset[1],
                        plane,
                    )

    if config.converts:

        @pl.when(warpgroup > config.consumers)
        def _() -> None:
            config.take_registers(2)
            _convert(work, ring, steps)


class _Piece(NamedTuple):
    """A tile's part in a CTA's range, as scalars.

    Steps [begin, end) of the segment are to be scored for rows [first_row, end_row) of the 64 query
    rows of `tile`; the first of the 64 would sit at `position`.
    """

    tile: jax.Array
    first_row: jax.Array
    end_row: jax.Array
    segment: jax.Array
    position: jax.Array
    keys: jax.Array
    begin: jax.Array
    end: jax.Array


class _Range(NamedTuple):
    """A CTA's range of the work list."""

    ranges: jax.Ref
    tiles: jax.Ref
    first: jax.Array
    count: Any
    begin: jax.Array
    end: jax.Array

    @staticmethod
    def load(ranges: jax.Ref, tiles: jax.Ref) -> _Range:
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

    def piece(self, index: jax.Array, steps: _Steps) -> _Piece:
        """The index-th piece; past the last one, some piece that nobody works on."""
        tile = jnp.minimum(self.first + index, self.tiles.shape[0] - 1)
        return self._piece(index, lambda i: self.tiles[tile, i], steps)

    def _piece(
        self, index: int | jax.Array, field: Callable[[int], jax.Array], steps: _Steps
    ) -> _Piece:
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
    query: jax.Ref,
    k: jax.Ref,
    block_table: jax.Ref,
    hidden: jax.Ref,
    steps: _Steps,
) -> None:
    """One warp: keeps queries and keys coming."""
    num_pages, width = k.shape[0], block_table.shape[1]

    def page_ids(piece: _Piece, step: jax.Array) -> list[jax.Array]:
        """The step's physical pages, -1 where there is none to read."""
        pages = [step * steps.pages + g for g in range(steps.pages)]
        entries = [block_table[piece.segment, jnp.minimum(page, width - 1)] for page in pages]
        return [
            jnp.where((page < width) & (page * steps.page_size < piece.keys), entry, -1)
            for page, entry in zip(pages, entries, strict=True)
        ]

    def load_page(page: jax.Array, place: Any, full: Any) -> None:
        def copy() -> None:
            rows = pl.ds(steps.row_offset, steps.rows)
            plgpu.copy_gmem_to_smem(k.at[page, rows], place, full)

        def hide() -> None:
            plgpu.copy_gmem_to_smem(hidden.at[pl.ds(0, steps.rows)], place, full)

        lax.cond((page >= 0) & (page < num_pages), copy, hide)

    def one_piece(index: jax.Array, carry: Any) -> Any:
        piece, loaded = carry
        following = work.piece(index + 1, steps)
        ids = page_ids(piece, piece.begin)
        queries = ring.queries
        slot = queries.slot(index)
        queries.wait_free(index)
        _, consumers, count, _ = queries.data.shape
        for part in range(consumers):
            rows = pl.ds(piece.tile * _TILE_ROWS + part * count, count)
            plgpu.copy_gmem_to_smem(
                query.at[rows], queries.data.at[slot, part], queries.full.at[slot]
            )

        def one_step(step: jax.Array, carry: Any) -> Any:
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

    def one_step(turn: jax.Array) -> None:
        raw.wait_full(turn)
        keys.wait_free(turn)

        @pl.loop(0, KEYS // 64)
        def _(part: jax.Array) -> None:  # a loop, so that the registers of one part do for all
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

    def one_piece(index: jax.Array, carry: Any) -> Any:
        piece, turn = carry
        end = turn + jnp.maximum(piece.end - piece.begin, 0)
        pl.loop(turn, end)(one_step)
        return work.piece(index + 1, steps), end

    start = (work.first_piece(steps), jnp.int32(0))
    _, turns = lax.fori_loop(0, work.count, one_piece, start)
    keys.drain(turns)


class _Consumer(NamedTuple):
    """A warpgroup that multiplies its rows of every piece with all its keys."""

    parts: Parts
    work: _Range
    ring: _Ring
    scores: jax.Ref
    counts: jax.Ref
    rank: jax.Array
    offset: jax.Array  # block of column 0
    steps: _Steps
    plane: Plane

    def run(self) -> None:
        """Does all pieces of the CTA's range."""
        part = lax.axis_index(WARPGROUP)
        queries = self.ring.queries

        def one_piece(index: jax.Array, carry: Any) -> Any:
            piece, done = carry
            following = self.work.piece(index + 1, self.steps)
            rows = queries.data.at[queries.slot(index), part]
            consumer = _PieceConsumer.of(self, piece, done, rows)
            open_columns = consumer.open_columns()  # while queries and keys are on their way
            queries.wait_full(index)
            consumer.run(*open_columns)
            queries.release(index)
            return following, done + jnp.maximum(piece.end - piece.begin, 0)

        start = (self.work.first_piece(self.steps), jnp.int32(0))
        lax.fori_loop(0, self.work.count, one_piece, start)


class _PieceConsumer(NamedTuple):
    """What a consumer does with a piece; `done` steps came before it."""

    consumer: _Consumer
    piece: _Piece
    done: jax.Array
    queries: jax.Ref  # [64 or 128, 128]
    rows: list[Rows]  # of every 64
    stages: list[jax.Ref]  # where the maxima of every 64 are staged, empty where nothing is
    position: jax.Array  # where row 0's token would sit

    @staticmethod
    def of(consumer: _Consumer, piece: _Piece, done: jax.Array, queries: jax.Ref) -> _PieceConsumer:
        part, count = lax.axis_index(WARPGROUP), queries.shape[0]
        before, stage = part * count, consumer.ring.stage
        rows = [
            Rows(
                piece.tile * _TILE_ROWS + at,
                jnp.clip(piece.first_row * NUM_HEADS - at, 0, ROWS),
                jnp.clip(piece.end_row * NUM_HEADS - at, 0, ROWS),
            )
            for at in (before + m for m in range(0, count, ROWS))
        ]
        staged = range(0, 0 if stage is None else count, ROWS)
        stages = [stage.at[part, pl.ds(m, ROWS)] for m in staged]
        position = piece.position + lax.div(before, NUM_HEADS)
        return _PieceConsumer(consumer, piece, done, queries, rows, stages, position)

    def open_columns(self) -> tuple[()] | tuple[jax.Array, jax.Array]:
        """The columns [front, back) by which integer maxima are taken, if they are."""
        consumer = self.consumer
        if consumer.plane.forced is None:
            return ()
        (rows,) = self.rows
        return consumer.parts.open_columns(
            consumer.counts, consumer.offset, rows, consumer.steps.tokens, consumer.plane
        )

    def run(self, *open_columns: jax.Array) -> None:
        """Scores all steps, whose queries have come, by what `open_columns` says."""
        piece, whole = self.piece, self._whole_steps()
        if open_columns:
            whole = self._integer_steps(whole, *open_columns)
        else:
            pl.loop(piece.begin, whole)(lambda step: self._put(step, self._maxima(step)))
        self._put_last(whole)
        pl.loop(whole, piece.end)(self._last_step)

    def _whole_steps(self) -> jax.Array:
        """The first step in which a row may not see a key or a column is missing."""
        piece, steps = self.piece, self.consumer.steps
        earliest = self.position + lax.div(self.rows[0].begin, NUM_HEADS) + 1
        whole = lax.div(jnp.maximum(jnp.minimum(earliest, piece.keys), 0), steps.positions)
        whole = jnp.minimum(whole, steps.columns // steps.pages)
        return jnp.clip(whole, piece.begin, jnp.maximum(piece.begin, piece.end))

    def _column(self, step: jax.Array) -> jax.Array:
        return step * self.consumer.steps.pages

    def _maxima(
        self,
        step: jax.Array,
        hides: Callable[[int], Causal] | None = None,
        integer_maxima: bool = False,
    ) -> list[jax.Array]:
        """The row maxima of a step's products, of every 64 rows.

        Args:
          step: see above.
          hides: what the m-th 64 rows see, None: all.
          integer_maxima: take integer maxima.
        """
        consumer = self.consumer
        parts, plane, keys = consumer.parts, consumer.plane, consumer.ring.keys
        turn = self.done + step - self.piece.begin
        keys.wait_full(turn)
        slot = keys.data.at[keys.slot(turn)]
        started = [
            parts.start_products(self.queries.at[pl.ds(m * ROWS, ROWS)], slot)
            for m in range(len(self.rows))
        ]
        found: list[jax.Array] = []
        for m, products in enumerate(started):
            before = found.pop() if found else None
            products, before = parts.settle_products(products, len(started) - 1 - m, before)
            found += [] if before is None else [before]
            if m == len(started) - 1:
                keys.release(turn)
            if integer_maxima:
                found.append(parts.integer_maxima(products, plane.pages))
            else:
                found.append(parts.lane_maxima(products, hides and hides(m), plane.pages))
        return [parts.row_maxima(x, plane.pages, plane.sm_scale) for x in found]

    def _last_step(self, step: jax.Array) -> None:
        """A step in which a row may not see a key."""
        consumer = self.consumer
        steps = consumer.steps
        first_key = step * steps.positions + consumer.rank * steps.rows

        def hides(m: int) -> Causal:
            return Causal(self.position + m * ROWS // NUM_HEADS, self.piece.keys, first_key)

        for m, best in enumerate(self._maxima(step, hides)):
            consumer.parts.store_maxima(
                best, consumer.scores, self.rows[m], self._column(step), hides(m), consumer.plane
            )

    def _put(self, step: jax.Array, found: list[jax.Array]) -> None:
        """Writes the maxima of a step in which all rows see all keys."""
        consumer, plane = self.consumer, self.consumer.plane
        if not plane.staged:
            for rows, best in zip(self.rows, found, strict=True):
                consumer.parts.store_maxima(
                    best, consumer.scores, rows, self._column(step), None, plane
                )
            return
        place = lax.rem(step, self._block_steps)
        for best, stage in zip(found, self.stages, strict=True):
            consumer.parts.stage_maxima(best, stage, self._column(place), plane)
        pl.when(place == self._block_steps - 1)(lambda: self._write_block(step))

    def _put_last(self, end: jax.Array) -> None:
        """Writes what is staged of the steps before `end`."""
        if self.consumer.plane.staged:
            pending = (end > self.piece.begin) & (lax.rem(end, self._block_steps) > 0)
            pl.when(pending)(lambda: self._write_block(end - 1))

    def _write_block(self, step: jax.Array) -> None:
        """Writes the block of steps that `step` lies in, as far as they are this piece's."""
        consumer = self.consumer
        first = step - lax.rem(step, self._block_steps)
        begin = jnp.maximum(self.piece.begin - first, 0)
        for rows, stage in zip(self.rows, self.stages, strict=True):
            consumer.parts.write_stage(
                stage,
                consumer.scores,
                rows,
                self._column(first),
                self._column(begin),
                self._column(step + 1 - first),
                consumer.plane,
            )

    @property
    def _block_steps(self) -> int:
        """Steps whose columns are staged together."""
        return self.consumer.plane.staged // self.consumer.steps.pages

    def _integer_steps(self, whole: jax.Array, front: jax.Array, back: jax.Array) -> jax.Array:
        """Scores the steps before `whole`, but perhaps the last ones; returns where they stop.

        With integer maxima as soon as negative scores are no matter.
        """
        consumer, parts = self.consumer, self.consumer.parts
        (rows,) = self.rows
        last = jnp.clip(lax.div(back, consumer.steps.pages), self.piece.begin, whole)

        def goes_on(state: Any) -> Any:
            step, _, ready = state
            return (step < last) & (ready == 0)

        def one_step(state: Any) -> Any:
            step, counted, _ = state
            (best,) = found = self._maxima(step)
            self._put(step, found)
            counted, ready = parts.count_maxima(
                best, rows, self._column(step), front, counted, consumer.plane
            )
            return step + 1, counted, ready

        start = (self.piece.begin, parts.none_counted(), jnp.int32(0))
        begin, _, _ = lax.while_loop(goes_on, one_step, start)
        pl.loop(begin, last)(lambda step: self._put(step, self._maxima(step, integer_maxima=True)))
        return last


def _cdiv(a: jax.Array, b: int) -> jax.Array:
    """Ceiling division of a scalar >= 0."""
    return lax.div(a + (b - 1), b)
