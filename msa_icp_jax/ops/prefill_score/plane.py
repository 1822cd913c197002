"""The score plane: what the prefill kernel's warps store."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith, llvm

from msa_icp_jax.geometry import BLOCK_SIZE, MAX_BLOCKS, NUM_HEADS, TOPK
from msa_icp_jax.ops._mosaic import lanes
from msa_icp_jax.ops._mosaic.lanes import Lane, Words, f32, int32, maximum, when, where
from msa_icp_jax.ops.prefill_plan import balance
from msa_icp_jax.ops.prefill_score.maxima import (
    Causal,
    LaneMaxima,
    Place,
    StepPages,
    exchange,
    halve,
    row_maxima,
    seen_keys,
)
from msa_icp_jax.ops.prefill_score.wgmma import (
    INT,
    SCALAR,
    as_array,
    layout_of,
    of_array,
    type_of,
)
from msa_icp_jax.ops.select.long_rows import find_bounds

_LOWEST = float("-inf")


@dataclasses.dataclass(frozen=True)
class Plane:
    """Static facts of a score plane.

    Attributes:
      pages: the pages of a step.
      columns: columns of the plane.
      sm_scale: factor on the maxima.
      hidden: whether columns past a row's causal prefix are written too: "all" of them, those that
        are "candidates" by the row's count, or "none".
      forced: None, or (begin, end), the forced blocks of the selection that alone reads the plane:
        scores that it cannot choose may then be any negative ones.
    """

    pages: StepPages
    columns: int
    sm_scale: float
    hidden: str
    forced: tuple[int, int] | None = None

    @property
    def scale(self) -> int:
        """Blocks from one column to the next."""
        return self.pages.size // BLOCK_SIZE


class Rows(NamedTuple):
    """A consumer's rows of the plane, as scalars.

    Row 0 is plane row `first` (4 token + head); rows in [begin, end) are written.
    """

    first: Any
    begin: Any
    end: Any


def store_maxima(
    maxima: LaneMaxima, scores: Any, rows: Rows, column: Any, causal: Causal | None, plane: Plane
) -> None:
    """Writes the page maxima of one step's products to the score plane.

    Args:
      maxima: see `maxima.lane_maxima`.
      scores: ref of the plane, float32 [tokens, 4, columns].
      rows: see `Rows`.
      column: first column of the step.
      causal: None where all rows see all keys and all columns exist.
      plane: see `Plane`.
    """
    layout = layout_of(plane.pages.elements)
    scalars = (*rows, column, *(causal or ()))

    @plgpu.inline_mgpu(arg_types=(layout, layout, plgpu.RefType(), *[SCALAR] * len(scalars)))
    def store(_: Any, upper: Any, lower: Any, scores: Any, *scalars: Any) -> None:
        first, begin, end, column, *causal = (lanes.scalar(s) for s in scalars)
        place = Place()
        best = [_finish(x, plane.sm_scale) for x in row_maxima(place, upper, lower)]
        row = place.row()
        live = (row >= begin) & (row < end)
        target = _plane_row(scores, first + row, plane.columns) + column
        if not causal:
            with when(live):
                _store_row(target, best, plane.columns)
            return
        position, keys, _ = causal
        seen = seen_keys(position + (row >> 2), keys)
        for g, value in enumerate(best):
            written = live & (column + g < plane.columns)
            if plane.hidden == "none":
                written &= (column + g) * plane.pages.size < seen
            with when(written):
                (target + g).store(value)

    store(*maxima, scores, *scalars)


# ---- planes that only a selection reads ----


def open_columns(
    counts: Any, offset: Any, rows: Rows, tokens: int, plane: Plane
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
    def run(_: Any, counts: Any, *scalars: Any) -> Any:
        offset, first, begin, end = (lanes.scalar(x) for x in scalars)
        lane = lanes.thread() & 31  # of the consumer's 32 tokens
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
        return tuple(mgpu.FragmentedArray.splat(x.value, (), is_signed=True) for x in (front, back))

    front, back = run(counts, offset, *rows)
    return front, back


def none_counted() -> jax.Array:
    """The count of every row at first, see `store_and_count`."""

    @plgpu.inline_mgpu(return_type=type_of(1))
    def zeros(_: Any) -> Any:
        return as_array([lanes.constant(0.0, f32())], layout_of(1))

    return zeros()


def store_and_count(
    maxima: LaneMaxima,
    scores: Any,
    rows: Rows,
    column: Any,
    front: Any,
    counted: jax.Array,
    plane: Plane,
) -> tuple[jax.Array, jax.Array]:
    """`store_maxima` where all rows see all keys; counts columns that are not negative.

    Args:
      front: columns below it are not counted.
      counted: of every row, so far.
      others: as for `store_maxima`.

    Returns:
      The counts, and 1 where every row that is written has 16, so that no negative score of a
      later column is chosen (a zero of a later column neither), else 0.
    """
    layout = layout_of(plane.pages.elements)
    scalars = (*rows, column, front)

    @plgpu.inline_mgpu(
        arg_types=(layout, layout, layout_of(1), plgpu.RefType(), *[SCALAR] * len(scalars)),
        return_type=(type_of(1), INT),
    )
    def store(_: Any, upper: Any, lower: Any, counted: Any, scores: Any, *scalars: Any) -> Any:
        first, begin, end, column, front = (lanes.scalar(s) for s in scalars)
        place = Place()
        best = [_finish(x, plane.sm_scale) for x in row_maxima(place, upper, lower)]
        row = place.row()
        live = (row >= begin) & (row < end)
        with when(live):
            target = _plane_row(scores, first + row, plane.columns) + column
            _store_row(target, best, plane.columns)
        (number,) = of_array(counted)
        for g, value in enumerate(best):
            number = where((value >= 0.0) & (column + g >= front), number + 1.0, number)
        ready = lanes.team_all((number >= float(TOPK)) | ~live).to_i32()
        return (
            as_array([number], layout_of(1)),
            mgpu.FragmentedArray.splat(ready.value, (), is_signed=True),
        )

    counted, ready = store(*maxima, counted, scores, *scalars)
    return counted, ready


# Two steps' maxima go to the plane together, while the next two are multiplied: in the first of
# these `store_upper_rows`, in the second `store_lower_rows`.


def no_maxima(pages: StepPages) -> jax.Array:
    """Stands for what the first two steps find."""

    @plgpu.inline_mgpu(return_type=type_of(pages.elements))
    def nothing(_: Any) -> Any:
        values = [lanes.constant(_LOWEST, f32())] * pages.elements
        return as_array(values, layout_of(pages.elements))

    return nothing()


def store_upper_rows(
    half: jax.Array,
    second: LaneMaxima,
    pin: jax.Array,
    scores: Any,
    rows: Rows,
    columns: tuple[Any, Any],
    plane: Plane,
) -> jax.Array:
    """Writes two steps' maxima of the rows i = 0.

    Args:
      half: the first step's maxima after the first exchange.
      second: the second step's maxima.
      pin: an array that is there before this is wanted, see `maxima.Place.later_than`.
      scores, rows, plane: as for `store_maxima`.
      columns: (column, first): of the first step; nothing is written if it lies before `first`.

    Returns:
      What is left for the rows i = 1.
    """
    layout = layout_of(plane.pages.elements)
    scalars = (*rows, *columns)

    @plgpu.inline_mgpu(
        arg_types=(*[layout] * 4, plgpu.RefType(), *[SCALAR] * len(scalars)),
        return_type=type_of(plane.pages.elements),
    )
    def store(
        _: Any, half: Any, upper: Any, lower: Any, pin: Any, scores: Any, *others: Any
    ) -> Any:
        place = Place().later_than(pin)
        first, second = of_array(half), halve(place, upper, lower)
        middle = plane.pages.count
        pair = _Pair(place, scores, [lanes.scalar(x) for x in others], plane)
        pair.store(0, first[:middle], second[:middle])
        return as_array([*first[middle:], *second[middle:]], layout)

    return store(half, *second, pin, scores, *scalars)


def store_lower_rows(
    rest: jax.Array,
    following: LaneMaxima,
    pin: jax.Array,
    scores: Any,
    rows: Rows,
    columns: tuple[Any, Any],
    plane: Plane,
) -> jax.Array:
    """Writes two steps' maxima of the rows i = 1.

    Args:
      rest: from `store_upper_rows`.
      following: the maxima of the step that follows the two.
      others: as for `store_upper_rows`.

    Returns:
      The following step's maxima after the first exchange.
    """
    layout = layout_of(plane.pages.elements)
    scalars = (*rows, *columns)

    @plgpu.inline_mgpu(
        arg_types=(*[layout] * 4, plgpu.RefType(), *[SCALAR] * len(scalars)),
        return_type=type_of(plane.pages.elements),
    )
    def store(
        _: Any, rest: Any, upper: Any, lower: Any, pin: Any, scores: Any, *others: Any
    ) -> Any:
        place = Place().later_than(pin)
        found, middle = of_array(rest), plane.pages.count
        next_half = halve(place, upper, lower)
        pair = _Pair(place, scores, [lanes.scalar(x) for x in others], plane)
        pair.store(1, found[:middle], found[middle:])
        return as_array(next_half, layout)

    return store(rest, *following, pin, scores, *scalars)


def store_pair(
    half: jax.Array,
    second: LaneMaxima,
    scores: Any,
    rows: Rows,
    columns: tuple[Any, Any],
    plane: Plane,
) -> None:
    """Writes two steps' maxima of all rows; arguments as for `store_upper_rows`."""
    layout = layout_of(plane.pages.elements)
    scalars = (*rows, *columns)

    @plgpu.inline_mgpu(arg_types=(*[layout] * 3, plgpu.RefType(), *[SCALAR] * len(scalars)))
    def store(_: Any, half: Any, upper: Any, lower: Any, scores: Any, *others: Any) -> None:
        place = Place()
        first, second = of_array(half), halve(place, upper, lower)
        middle = plane.pages.count
        pair = _Pair(place, scores, [lanes.scalar(x) for x in others], plane)
        for i in range(2):
            part = slice(i * middle, (i + 1) * middle)
            pair.store(i, first[part], second[part])

    store(half, *second, scores, *scalars)


class _Pair:
    """Stores two steps' maxima, of one thread: two rows, and one of the steps."""

    def __init__(self, place: Place, scores: Any, scalars: list[Lane], plane: Plane) -> None:
        self.place, self.scores, self.plane = place, scores, plane
        self.first, self.begin, self.end, column, first_column = scalars
        self.wanted = column >= first_column
        self.column = column + (Place().quad & 1) * plane.pages.count

    def store(self, i: int, first: list[Lane], second: list[Lane]) -> None:
        """Row i: the second exchange, after which the two lanes of a row have a step each."""
        best = [
            _finish(exchange(self.place.odd, a, b, 1), self.plane.sm_scale)
            for a, b in zip(first, second, strict=True)
        ]
        row = Place().row_of_pair(i)
        with when((row >= self.begin) & (row < self.end) & self.wanted):
            target = _plane_row(self.scores, self.first + row, self.plane.columns)
            _store_row(target + self.column, best, self.plane.columns)


# ---- columns that no consumer writes ----


def fill_hidden(
    scores: Any,
    work: tuple[Any, Any],
    counts: Any,
    first: Any,
    stride: Any,
    tokens: int,
    offset: Any,
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
    def fill(_: Any, scores: Any, tiles: Any, tile_of: Any, counts: Any, *scalars: Any) -> None:
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


def _finish(x: Lane, sm_scale: float) -> Lane:
    """Nothing visible, or nothing but NaN, is -inf under any scale; a zero is +0.0."""
    x = maximum(x, _LOWEST)
    if sm_scale != 1.0:
        x = where(x > _LOWEST, x * sm_scale, x)
    return where(x.eq(0.0), 0.0, x)


def _store_row(target: Words, values: list[Lane], columns: int) -> None:
    """Neighbouring columns of one row, in one store where all rows are aligned to it."""
    count = len(values)
    if count == 1 or columns % count:
        for g, value in enumerate(values):
            (target + g).store(value)
        return
    operands = ", ".join(f"${g + 1}" for g in range(count))
    place = Lane(llvm.ptrtoint(lanes.i64(), target.pointer))
    lanes.ptx(f"st.global.v{count}.f32 [$0], {{{operands}}};", place, *values)


def _plane_row(plane: Any, row: Lane, columns: int) -> Words:
    """The start of a row of a score plane; in 64 bits, a plane may pass 2 GiB."""
    return Words.of(plane) + row.to_i64() * columns
