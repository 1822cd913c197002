"""The score plane: what the prefill kernel's warps store.

Sixteen bytes of a row at a time, a store takes the memory pipe 32 cycles, and as much of it as a
product's operands in shared memory. So a warp gathers its sixteen rows' maxima of neighbouring
steps in shared memory and stores whole lines of the plane.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith, llvm

from msa_icp_jax.geometry import BLOCK_SIZE, MAX_BLOCKS, NUM_HEADS, TOPK
from msa_icp_jax.ops._mosaic import lanes
from msa_icp_jax.ops._mosaic.lanes import (
    Context,
    Lane,
    Memory,
    Value,
    Words,
    as_array,
    as_scalar,
    f32,
    int32,
    maximum,
    of_array,
    when,
    where,
)
from msa_icp_jax.ops.prefill_plan import balance
from msa_icp_jax.ops.prefill_score.maxima import (
    Causal,
    Place,
    StepPages,
    seen_keys,
)
from msa_icp_jax.ops.prefill_score.wgmma import (
    INT,
    SCALAR,
    layout_of,
    type_of,
)
from msa_icp_jax.ops.select import eight_rows
from msa_icp_jax.ops.select.long_rows import find_bounds

_LOWEST = float("-inf")
_WARP = 32


@dataclasses.dataclass(frozen=True)
class Plane:
    """Static parameters of a score plane.

    Attributes:
      pages: the pages of a step.
      columns: columns of the plane.
      sm_scale: factor on the maxima.
      hidden: whether columns past a row's causal prefix are written too: "all" of them, those that
        are "candidates" by the row's count, or "none".
      forced: None, or (begin, end), the forced blocks of the selection that alone reads the plane:
        scores that it cannot choose may then be any negative ones.
      staged: columns that are gathered before they are stored, 0: none.
    """

    pages: StepPages
    columns: int
    sm_scale: float
    hidden: str
    forced: tuple[int, int] | None = None
    staged: int = 0

    @property
    def scale(self) -> int:
        """Blocks from one column to the next."""
        return self.pages.size // BLOCK_SIZE

    @property
    def kept(self) -> bool:
        """Whether stores are to stay in the L2 cache until a selection, which comes next, reads."""
        return self.hidden == "candidates" and self.columns <= eight_rows.CAPACITY


class Rows(NamedTuple):
    """64 rows of the plane, as scalars.

    Row 0 is plane row `first` (4 token + head); rows in [begin, end) are written.
    """

    first: jax.Array
    begin: jax.Array
    end: jax.Array


def store_maxima(
    best: jax.Array,
    scores: jax.Ref,
    rows: Rows,
    column: jax.Array,
    causal: Causal | None,
    plane: Plane,
) -> None:
    """Writes the page maxima of one step's products to the score plane.

    Args:
      best: see `maxima.row_maxima`.
      scores: ref of the plane, float32 [tokens, 4, columns].
      rows: see `Rows`.
      column: first column of the step.
      causal: None where all rows see all keys and all columns exist.
      plane: see `Plane`.
    """
    pages, scalars = plane.pages, (*rows, column, *(causal or ()))

    @plgpu.inline_mgpu(arg_types=(layout_of(pages.kept), plgpu.RefType(), *[SCALAR] * len(scalars)))
    def store(_: Context, best: Value, scores: Memory, *scalars: Value) -> None:
        first, begin, end, column, *causal = (lanes.scalar(s) for s in scalars)
        place = Place()
        row, column = place.row(), column + place.first_page(pages)
        live = (row >= begin) & (row < end) & place.stores(pages)
        target = _plane_row(scores, first + row, plane.columns) + column
        if not causal:
            with when(live):
                _store_row(target, of_array(best), plane)
            return
        position, keys = causal[:2]
        seen = seen_keys(position + (row >> 2), keys)
        for g, value in enumerate(of_array(best)):
            written = live & (column + g < plane.columns)
            if plane.hidden == "none":
                written &= (column + g) * pages.size < seen
            with when(written):
                (target + g).store(value)

    store(best, scores, *scalars)


# ---- whole lines ----

_STAGE_PADDING = 4  # words of a staged row, so that no two rows of a store lie in the same banks


def stage_pitch(columns: int) -> int:
    """Words of a staged row."""
    return columns + _STAGE_PADDING


def stage_maxima(best: jax.Array, stage: jax.Ref, column: jax.Array, plane: Plane) -> None:
    """Keeps the page maxima of one step's products for `write_stage`.

    A warp's rows lie together, rows i = 0 and 1 of a lane as neighbours.

    Args:
      best: see `maxima.row_maxima`.
      stage: ref of this warpgroup's part of shared memory, float32 [64, pitch].
      column: first staged column of the step.
      plane: see `Plane`.
    """
    pages = plane.pages

    @plgpu.inline_mgpu(arg_types=(layout_of(pages.kept), plgpu.RefType(), SCALAR))
    def put(_: Context, best: Value, stage: Memory, column: Value) -> None:
        place = Place()
        staged = place.warp * 16 + place.of_warp * 2 + (place.quad >> 1)
        first = lanes.scalar(column) + place.first_page(pages)
        with when(place.stores(pages)):
            (Words.of(stage) + (staged * stage_pitch(plane.staged) + first)).store_vector(
                of_array(best)
            )

    put(best, stage, column)


def write_stage(
    stage: jax.Ref,
    scores: jax.Ref,
    rows: Rows,
    column: jax.Array,
    begin: jax.Array,
    end: jax.Array,
    plane: Plane,
) -> None:
    """Writes staged columns [begin, end) of all rows, a lane a column.

    Args:
      stage: see `stage_maxima`.
      scores, rows, plane: as for `store_maxima`.
      column: the plane's column of the first staged one.
      begin, end: see above.
    """
    assert plane.staged <= _WARP
    scalars, pitch = (*rows, column, begin, end), stage_pitch(plane.staged)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), *[SCALAR] * len(scalars)))
    def write(_: Context, stage: Memory, scores: Memory, *scalars: Value) -> None:
        first, begin, end, column, begin_column, end_column = (lanes.scalar(s) for s in scalars)
        thread = lanes.fresh(lanes.thread()) & 127  # or the compiler keeps all rows' addresses
        warp, lane = thread >> 5, thread & (_WARP - 1)
        source = Words.of(stage) + warp * (16 * pitch)
        target = _plane_row(scores, first + warp * 16, plane.columns) + column

        def live(staged_row: Lane) -> tuple[Lane, Lane]:
            """The row of the warp's, and whether it is written."""
            row = (staged_row & 1) * 8 + (staged_row >> 1)
            at = warp * 16 + row
            return row, (at >= begin) & (at < end)

        def write_lines() -> None:
            """A lane has four columns, the warp four rows at a time."""
            chunk = (lane & 7) * 4
            places = [(lane >> 3) + at for at in range(0, 16, 4)]
            lines = [(source + (x * pitch + chunk)).load_vector(f32(), 4) for x in places]
            for x, values in zip(places, lines, strict=True):
                row, wanted = live(x)
                with when(wanted):
                    _store_row(target + (row * plane.columns + chunk), list(values), plane)

        def write_columns() -> None:
            """A lane has a column."""
            wanted = (lane >= begin_column) & (lane < end_column)
            place = lanes.minimum(lane, plane.staged - 1)
            values = [(source + (place + at * pitch)).load(f32()) for at in range(16)]
            for at, value in enumerate(values):
                row, of_rows = live(int32(at))
                lanes.store_where(target + (row * plane.columns + lane), value, wanted & of_rows)

        lanes.warp_barrier()
        whole = begin_column.eq(0) & end_column.eq(_WARP)
        if plane.staged < _WARP or plane.columns % 4:
            write_columns()
        else:
            with when(whole):
                write_lines()
            with when(~whole):
                write_columns()
        lanes.warp_barrier()  # before others are kept there

    write(stage, scores, *scalars)


# ---- planes that only a selection reads ----


def open_columns(
    counts: jax.Ref, offset: jax.Array, rows: Rows, tokens: int, plane: Plane
) -> tuple[jax.Array, jax.Array]:
    """The columns [front, back) that are candidates of all the rows and forced for none.

    Args:
      counts: ref of num_valid_pages, int32 [tokens].
      offset: block of column 0.
      rows: see `Rows`.
      tokens: see above.
      plane: see `Plane`.
    """
    assert plane.forced is not None
    begin_blocks, end_blocks = plane.forced

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[SCALAR] * 4), return_type=(INT, INT))
    def run(_: Context, counts: Memory, *scalars: Value) -> Any:
        offset, first, begin, end = (lanes.scalar(x) for x in scalars)
        lane = lanes.thread() & 31  # a token's, of the 16 that the rows are of
        token = lanes.minimum((first >> 2) + lane, tokens - 1)
        bounds = find_bounds(
            (Words.of(counts) + token).load(),
            offset,
            scale=plane.scale,
            columns=plane.columns,
            begin=begin_blocks,
            end=end_blocks,
        )
        row = lane * NUM_HEADS
        live = (row >= begin) & (row < end)
        front = lanes.warp_max(where(live, bounds.front, 0))
        back = lanes.warp_min(where(live, bounds.back, plane.columns))
        return tuple(as_scalar(x) for x in (front, back))

    front, back = run(counts, offset, *rows)
    return front, back


def none_counted() -> jax.Array:
    """The counts at first, see `count_maxima`."""

    @plgpu.inline_mgpu(return_type=type_of(1))
    def zeros(_: Context) -> Any:
        return as_array([lanes.constant(0.0, f32())], layout_of(1))

    return zeros()


def count_maxima(
    best: jax.Array,
    rows: Rows,
    column: jax.Array,
    front: jax.Array,
    counted: jax.Array,
    plane: Plane,
) -> tuple[jax.Array, jax.Array]:
    """Counts columns that are not negative.

    Args:
      best: see `maxima.row_maxima`.
      rows: see `Rows`.
      column: first column of the step.
      front: columns below it are not counted.
      counted: of every lane's row and pages, so far.
      plane: see `Plane`.

    Returns:
      The counts, and 1 where every row that is written has 16, so that no negative score of a
      later column is chosen (a zero of a later column neither), else 0.
    """
    pages, scalars = plane.pages, (*rows, column, front)
    needed = TOPK if pages.count == 1 else TOPK // 2  # of each of the two lanes of a row

    @plgpu.inline_mgpu(
        arg_types=(layout_of(pages.kept), layout_of(1), *[SCALAR] * len(scalars)),
        return_type=(type_of(1), INT),
    )
    def count(_: Context, best: Value, counted: Value, *scalars: Value) -> Any:
        begin, end, column, front = (lanes.scalar(s) for s in scalars[1:])
        place = Place()
        row, column = place.row(), column + place.first_page(pages)
        (number,) = of_array(counted)
        for g, value in enumerate(of_array(best)):
            number = where((value >= 0.0) & (column + g >= front), number + 1.0, number)
        live = (row >= begin) & (row < end)
        ready = lanes.warpgroup_all((number >= float(needed)) | ~live).to_i32()
        ready = lanes.warp_from(ready, 0)  # known to be the same in all lanes: steps go by it
        return (
            as_array([number], layout_of(1)),
            as_scalar(ready),
        )

    counted, ready = count(best, counted, *scalars)
    return counted, ready


# ---- columns that no consumer writes ----


def fill_hidden(
    scores: jax.Ref,
    work: tuple[jax.Ref, jax.Ref],
    counts: jax.Ref,
    first: jax.Array,
    stride: jax.Array,
    tokens: int,
    offset: jax.Array,
    plane: Plane,
) -> None:
    """One warp writes -inf to hidden columns that no consumer writes.

    Args:
      scores: ref of the plane.
      work: refs (tiles, tile_of) of the work list.
      counts: ref of num_valid_pages where candidates alone are filled, else any int32 ref.
      first, stride: the warp sees to tokens first, first + stride, .. below `tokens`.
      tokens: see above.
      offset: block of column 0.
      plane: see `Plane`.
    """
    listed, step = work[1].shape[0], plane.pages.count * plane.pages.size

    @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * 4, *[SCALAR] * 3))
    def fill(
        _: Context, scores: Memory, tiles: Memory, tile_of: Memory, counts: Memory, *scalars: Value
    ) -> None:
        first, stride, offset = (lanes.scalar(x) for x in scalars)
        lane = lanes.thread() & 31
        lowest = lanes.constant(_LOWEST, f32())

        def hidden(token: Lane) -> tuple[Lane, Lane]:
            """The columns [start, stop) of a token that are to be filled."""
            tile = (Words.of(tile_of) + lanes.minimum(token, listed - 1)).load()
            tile = where(token < listed, tile, -1)
            place = maximum(tile, 0) * balance.TILE_FIELDS + balance.SCORED
            scored = where(tile >= 0, (Words.of(tiles) + place).load(), 0)
            start = ((scored + (step - 1)) >> (step.bit_length() - 1)) * plane.pages.count
            stop = int32(plane.columns)
            if plane.hidden == "candidates":
                count = (Words.of(counts) + lanes.minimum(token, tokens - 1)).load()
                count = lanes.minimum(maximum(count, 0), MAX_BLOCKS)
                shift = plane.scale.bit_length() - 1
                below = (count - offset + (plane.scale - 1)) >> shift
                stop = lanes.clip(below, 0, plane.columns)
            return start, where(token < tokens, stop, 0)

        def fill_token(token: Lane, start: Lane, stop: Lane) -> None:
            for head in range(NUM_HEADS):
                row = _plane_row(scores, token * NUM_HEADS + head, plane.columns)

                def one(at: Lane, row: Words = row) -> tuple[()]:
                    (row + at).store(lowest)
                    return ()

                lanes.loop(start + lane, stop, 32, (), one)

        def some(turn: Lane) -> tuple[()]:  # 32 tokens, a lane each
            token = first + (turn + lane) * stride
            start, stop = hidden(token)

            def one(left: Lane) -> list[Lane]:
                source = lanes.lowest_bit(left)
                values = (lanes.warp_from(x, source) for x in (token, start, stop))
                fill_token(*values)
                return [left & (left - 1)]

            left = lanes.warp_ballot(start < stop)
            lanes.repeat_while([left], lambda left: left.ne(0), one)
            return ()

        turns = Lane(arith.divsi((int32(tokens - 1) - first + stride).value, stride.value))
        lanes.loop(int32(0), turns, 32, (), some)

    fill(scores, *work, counts, first, stride, offset)


def _store_row(target: Words, values: list[Lane], plane: Plane) -> None:
    """Neighbouring columns of one row, in one store where all rows are aligned to it."""
    count = len(values)
    if count == 1 or plane.columns % count:
        for g, value in enumerate(values):
            (target + g).store(value)
        return
    operands = ", ".join(f"${g + 1}" for g in range(count))
    place = Lane(llvm.ptrtoint(lanes.i64(), target.pointer))
    text = f"st.global.v{count}.f32 [$0], {{{operands}}};"
    if plane.kept:
        text = f"st.global.L2::cache_hint.v{count}.f32 [$0], {{{operands}}}, policy;"
        text = lanes.with_policy(lanes.EVICT_LAST, text)
    lanes.ptx(text, place, *values)


def _plane_row(plane: Memory, row: Lane, columns: int) -> Words:
    """The start of a row of a score plane; in 64 bits, a plane may pass 2 GiB."""
    return Words.of(plane) + row.to_i64() * columns
