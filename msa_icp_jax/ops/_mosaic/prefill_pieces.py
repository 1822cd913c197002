"""Machine pieces of the prefill kernels, each with its stock-op twin.

A consumer warpgroup holds the products of 128 query rows and 128 keys in the layout of a WGMMA
accumulator: lane l of warp w has rows ``64 m + 16 w + 8 i + l // 4`` (m and i are 0 or 1) and
columns ``8 n + 2 (l % 4) + {0, 1}``. The maximum over a page's columns is taken in registers; two
shuffles then both finish it within the four lanes of a row and hand each lane one whole row:
lane l ends with all page maxima of row ``64 (q // 2) + 16 w + 8 (q % 2) + l // 4``, q = l % 4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
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

from msa_icp_jax.geometry import BLOCK_SIZE, HEAD_DIM, MAX_BLOCKS, NUM_HEADS, cdiv
from msa_icp_jax.ops._mosaic import lanes
from msa_icp_jax.ops._mosaic.lanes import Lane, Words, int32, maximum, when, where
from msa_icp_jax.ops.prefill_plan import balance

ROWS = 128  # query rows of a warpgroup: 32 tokens x 4 heads
KEYS = 128  # keys of a step
_SCALAR = plgpu.Layout.WG_SPLAT
_LOWEST = float("-inf")
_HALF = ROWS // 2  # query rows that are multiplied at once
_FRAGMENT = _HALF * KEYS // 128  # products of a thread
_PRODUCTS = plgpu.Layout.WG_STRIDED((_HALF * KEYS,), 1)
_PRODUCTS_TYPE = plgpu.ShapeDtypeStruct((_HALF * KEYS,), np.dtype(np.float32), _PRODUCTS)
_ATOM = 128  # bytes of a row that lie together


@dataclasses.dataclass(frozen=True)
class StepPages:
    """The pages of a step.

    Attributes:
      rows: keys of a step that belong to one page (32, 64 or 128).
      size: positions of a page, those on other ranks included.
    """

    rows: int
    size: int

    @property
    def count(self) -> int:
        """Pages, hence columns, of a step."""
        return KEYS // self.rows


@dataclasses.dataclass(frozen=True)
class Plane:
    """Static facts of a score plane.

    Attributes:
      pages: the pages of a step.
      columns: columns of the plane.
      sm_scale: factor on the maxima.
      hidden: whether columns past a row's causal prefix are written too: "all" of them, those that
        are "candidates" by the row's count, or "none".
    """

    pages: StepPages
    columns: int
    sm_scale: float
    hidden: str

    @property
    def scale(self) -> int:
        """Blocks from one column to the next."""
        return self.pages.size // BLOCK_SIZE


class Causal(NamedTuple):
    """What decides which of a step's keys a row sees, as scalars."""

    position: Any  # of row 0's token
    keys: Any  # of the segment
    first_key: Any  # position of the step's key 0


# ---- products: 64 query rows x 128 keys, multiplied while the warpgroup does something else ----


def rows_layout(dtype: Any) -> tuple[Any, Any]:
    """The transforms of [.., rows, 128] matrices in shared memory that can be multiplied."""
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    return tiling((8, _ATOM // jnp.dtype(dtype).itemsize)), swizzle(_ATOM)


def start_products(queries: Any, keys: Any, interpret: bool) -> jax.Array:
    """Starts multiplying; the result may be read after `settle_products`.

    Not `plgpu.wgmma`: that one adds to registers that must be set to zero first, and the compiler
    lets no instruction touch registers of that kind while other products are in flight.

    Args:
      queries: ref, float8_e4m3fn or float16 [64, 128], shared memory.
      keys: ref, [128, 128] of the same type, shared memory.
      interpret: take the stock ops, which multiply at once.
    """
    if interpret:

        def multiply(acc: Any) -> jax.Array:
            plgpu.wgmma(acc, queries, keys.T)
            return acc[...]

        return pl.run_scoped(multiply, plgpu.ACC((_HALF, KEYS), jnp.float32)).reshape(-1)

    fp8 = queries.dtype == jnp.float8_e4m3fn
    row_bytes = HEAD_DIM * queries.dtype.itemsize
    kind = "k32.f32.e4m3.e4m3" if fp8 else "k16.f32.f16.f16"
    flags = "1, 1" if fp8 else "1, 1, 0, 0"  # no negation, no transposition
    tiled = rows_layout(queries.dtype)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(tiled), plgpu.RefType(tiled)), return_type=_PRODUCTS_TYPE
    )
    def start(_: Any, queries: Any, keys: Any) -> Any:
        anything = [Lane(llvm.mlir_undef(lanes.f32()))] * _FRAGMENT
        out = ", ".join(f"${i}" for i in range(_FRAGMENT))
        a, b = f"${2 * _FRAGMENT}", f"${2 * _FRAGMENT + 1}"
        text = ["{ .reg .pred adds; .reg .b64 a, b;", "wgmma.fence.sync.aligned;"]
        for at in range(0, row_bytes, 32):
            # Of 8 rows, 128 bytes each lie together.
            offset = at // _ATOM * 8 * _ATOM + at % _ATOM
            text += [
                f"setp.ne.b32 adds, {min(at, 1)}, 0;",
                f"add.s64 a, {a}, {offset >> 4};",
                f"add.s64 b, {b}, {offset >> 4};",
                f"wgmma.mma_async.sync.aligned.m64n128{kind} {{{out}}}, a, b, adds, {flags};",
            ]
        text += ["wgmma.commit_group.sync.aligned; }"]
        operands = [_matrix(x, row_bytes) for x in (queries, keys)]
        return as_array(_in_place("\n".join(text), anything, operands), _PRODUCTS)

    return start(queries, keys)


def settle_products(
    products: jax.Array, in_flight: int, after: jax.Array | None, interpret: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Waits until only the last `in_flight` multiplications may be going on.

    Args:
      products: of the multiplication that is over then.
      in_flight: see above.
      after: None, or `lane_maxima` to be computed before the wait: left alone, the compiler waits
        first.
      interpret: take the stock ops.

    Returns:
      The products and `after`.
    """
    if interpret:
        return products, after
    kept = [] if after is None else [after]
    layouts = [plgpu.Layout.WG_STRIDED(x.shape, 1) for x in kept]
    types = [
        plgpu.ShapeDtypeStruct(x.shape, np.dtype(np.float32), layout)
        for x, layout in zip(kept, layouts, strict=True)
    ]

    @plgpu.inline_mgpu(arg_types=(_PRODUCTS, *layouts), return_type=(_PRODUCTS_TYPE, *types))
    def settle(_: Any, *arrays: Any) -> Any:
        registers = [x for array in arrays for x in of_array(array)]
        text = f"wgmma.wait_group.sync.aligned {in_flight};"
        found = _in_place(text, registers, [])
        return (
            as_array(found[:_FRAGMENT], _PRODUCTS),
            *(as_array(found[_FRAGMENT:], layout) for layout in layouts),
        )

    products, *kept = settle(products, *kept)
    return products, kept[0] if kept else None


def _matrix(tile: Any, row_bytes: int) -> Lane:
    """The descriptor of a K-major tile in shared memory with the 128-byte swizzle."""
    address = Lane(llvm.ptrtoint(lanes.i64(), mgpu.utils.memref_ptr(tile)))
    eight_rows = 8 * row_bytes >> 4
    return ((address & 0x3FFFF) >> 4) | ((1 << 62) | (eight_rows << 32))


def _in_place(text: str, registers: list[Lane], operands: list[Lane]) -> list[Lane]:
    """Inline PTX that changes float registers $0, .. in place; the operands follow their inputs."""
    count = len(registers)
    constraints = ["=f"] * count + [str(i) for i in range(count)] + ["l"] * len(operands)
    result = llvm.inline_asm(
        llvm.StructType.get_literal([lanes.f32()] * count),
        [x.value for x in (*registers, *operands)],
        text,
        ",".join(constraints),
        asm_dialect=0,
        has_side_effects=True,
    )
    return [Lane(llvm.extractvalue(lanes.f32(), result, [i])) for i in range(count)]


# ---- maxima ----

# The maxima of a step's upper and lower 64 query rows, as `lane_maxima` leaves them.
type LaneMaxima = tuple[jax.Array, jax.Array]


def maxima_layout(pages: StepPages) -> Any:
    """How `lane_maxima` lies in registers: element 2 pages a lane, (i, page) from (0, 0) on."""
    return plgpu.Layout.WG_STRIDED((2 * pages.count * ROWS,), 1)


def lane_maxima(
    products: jax.Array, m: int, causal: Causal | None, pages: StepPages, interpret: bool
) -> jax.Array:
    """Each lane's maxima over its own columns of every page.

    Args:
      products: the settled products of query rows 64 m onwards and the step's keys.
      m: 0 or 1.
      causal: None where all rows see all keys.
      pages: the pages of the step.
      interpret: take the stock ops; they return all columns' maxima [64, pages].
    """
    if interpret:
        return _page_maxima_stock(products, m, causal, pages)
    layout = maxima_layout(pages)
    count = 2 * pages.count
    scalars = causal or ()

    @plgpu.inline_mgpu(
        arg_types=(_PRODUCTS, *[_SCALAR] * len(scalars)),
        return_type=plgpu.ShapeDtypeStruct((count * ROWS,), np.dtype(np.float32), layout),
    )
    def reduce(_: Any, products: Any, *scalars: Any) -> Any:
        place = Place()
        hides = Causal(*(lanes.scalar(s) for s in scalars)) if scalars else None
        # Four elements of every 8 columns: two of row 0, two of row 8 below it.
        tiles = np.array(of_array(products), dtype=object)
        tiles = tiles.reshape(pages.count, pages.rows // 8, 2, 2)
        best = [
            _page_maximum(tiles[g, :, i], hides and _visible_below(place, m, i, g, hides, pages))
            for i in range(2)
            for g in range(pages.count)
        ]
        return as_array(best, layout)

    return reduce(products, *scalars)


def _page_maxima_stock(
    products: jax.Array, m: int, causal: Causal | None, pages: StepPages
) -> jax.Array:
    products = products.reshape(ROWS // 2, pages.count, pages.rows)
    if causal is not None:
        page, key = jnp.arange(pages.count), jnp.arange(pages.rows)
        at = causal.first_key + page[:, None] * pages.size + key[None]
        seen = _seen_stock(causal)[m * ROWS // 2 :][: ROWS // 2]
        products = jnp.where(at[None] < seen[:, None, None], products, -jnp.inf)
    return jnp.where(jnp.isnan(products), -jnp.inf, products).max(axis=2)


def _seen_stock(causal: Causal) -> jax.Array:
    """Keys that each row sees."""
    token = jnp.arange(ROWS) // NUM_HEADS
    return jnp.clip(causal.position + token + 1, 0, causal.keys)


def store_maxima(
    maxima: LaneMaxima,
    scores: Any,
    rows: tuple[Any, Any, Any],
    column: Any,
    causal: Causal | None,
    plane: Plane,
    interpret: bool,
) -> None:
    """Writes the page maxima of one step's products to the score plane.

    Args:
      maxima: see `lane_maxima`.
      scores: ref of the plane, float32 [tokens, 4, columns].
      rows: (first, begin, end): row 0 is plane row `first` (4 token + head); rows in [begin, end)
        are written.
      column: first column of the step.
      causal: None where all rows see all keys and all columns exist.
      plane: see `Plane`.
      interpret: take the stock ops.
    """
    write = _store_maxima_stock if interpret else _store_maxima_inline
    write(maxima, scores, rows, column, causal, plane)


def _store_maxima_stock(
    maxima: LaneMaxima, scores: Any, rows: Any, column: Any, causal: Causal | None, plane: Plane
) -> None:
    pages = plane.pages
    best = jnp.concatenate(maxima)
    best = jnp.where(best > -jnp.inf, best * plane.sm_scale, -jnp.inf)
    best = jnp.where(best == 0, 0.0, best)
    at = column + jnp.arange(pages.count)
    written = jnp.broadcast_to(at < plane.columns, best.shape)
    if causal is not None and plane.hidden == "none":
        written &= at * pages.size < _seen_stock(causal)[:, None]
    first, begin, end = rows

    @pl.loop(lax.div(begin, NUM_HEADS), lax.div(end, NUM_HEADS))
    def _(token: Any) -> None:
        values = lax.dynamic_slice_in_dim(best, token * NUM_HEADS, NUM_HEADS)
        flags = lax.dynamic_slice_in_dim(written, token * NUM_HEADS, 1)[0]
        target = lax.div(first, NUM_HEADS) + token
        for g in range(pages.count):

            @pl.when(flags[g])
            def _(g: int = g) -> None:
                scores[target, :, column + g] = values[:, g]


def _store_maxima_inline(
    maxima: LaneMaxima, scores: Any, rows: Any, column: Any, causal: Causal | None, plane: Plane
) -> None:
    pages = plane.pages
    layout = maxima_layout(pages)
    scalars = (*rows, column, *(causal or ()))

    @plgpu.inline_mgpu(arg_types=(layout, layout, plgpu.RefType(), *[_SCALAR] * len(scalars)))
    def store(_: Any, upper: Any, lower: Any, scores: Any, *scalars: Any) -> None:
        first, begin, end, column, *causal = (lanes.scalar(s) for s in scalars)
        place = Place()
        best = [_finish(x, plane.sm_scale) for x in row_maxima(place, upper, lower, pages)]

        row = place.row()
        live = (row >= begin) & (row < end)
        target = _plane_row(scores, first + row, plane.columns) + column
        if not causal:
            with when(live):
                _store_row(target, best, plane.columns)
            return
        position, keys, _ = causal
        seen = _seen(position + (row >> 2), keys)
        for g, value in enumerate(best):
            written = live & (column + g < plane.columns)
            if plane.hidden == "none":
                written &= (column + g) * pages.size < seen
            with when(written):
                (target + g).store(value)

    store(*maxima, scores, *scalars)


def shared_words(pages: StepPages) -> int:
    """Words of shared memory that `share_maxima` fills."""
    return 4 * ROWS * pages.count


def share_maxima(maxima: LaneMaxima, target: Any, pages: StepPages, interpret: bool) -> None:
    """Leaves the lanes' maxima of one step in shared memory, for `shared_maxima`.

    Args:
      maxima: see `lane_maxima`.
      target: ref, float32 [shared_words].
      pages: the pages of the step.
      interpret: take the stock ops, which fill the first quarter.
    """
    if interpret:
        target[pl.ds(0, ROWS * pages.count)] = jnp.concatenate(maxima).reshape(-1)
        return
    layout = maxima_layout(pages)

    @plgpu.inline_mgpu(arg_types=(layout, layout, plgpu.RefType()))
    def share(_: Any, upper: Any, lower: Any, target: Any) -> None:
        start = Words.of(target) + Place().thread * pages.count
        for q, best in enumerate(_by_row(upper, lower, pages)):
            (start + q * (ROWS * pages.count)).store_vector(best)

    share(*maxima, target)


def fill_hidden(
    scores: Any,
    work: tuple[Any, Any],
    counts: Any,
    first: Any,
    stride: Any,
    tokens: int,
    offset: Any,
    plane: Plane,
    interpret: bool,
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
      interpret: take the stock ops.
    """
    fill = _fill_hidden_stock if interpret else _fill_hidden_inline
    fill(scores, work, counts, first, stride, tokens, offset, plane)


def _fill_hidden_stock(
    scores: Any,
    work: tuple[Any, Any],
    counts: Any,
    first: Any,
    stride: Any,
    tokens: int,
    offset: Any,
    plane: Plane,
) -> None:
    tiles, tile_of = work
    listed, step = tile_of.shape[0], plane.pages.count * plane.pages.size

    @pl.loop(0, cdiv(tokens, stride))
    def _(turn: Any) -> None:
        token = first + turn * stride

        @pl.when(token < tokens)
        def _() -> None:
            tile = jnp.where(token < listed, tile_of[jnp.minimum(token, listed - 1)], -1)
            scored = jnp.where(tile >= 0, tiles[jnp.maximum(tile, 0), balance.SCORED], 0)
            stop = jnp.int32(plane.columns)
            if plane.hidden == "candidates":
                count = jnp.minimum(jnp.maximum(counts[token], 0), MAX_BLOCKS)
                stop = jnp.clip(cdiv(count - offset, plane.scale), 0, plane.columns)

            @pl.loop(cdiv(scored, step) * plane.pages.count, stop)
            def _(c: Any) -> None:
                scores[token, :, c] = jnp.full((NUM_HEADS,), -jnp.inf, jnp.float32)


def _fill_hidden_inline(
    scores: Any,
    work: tuple[Any, Any],
    counts: Any,
    first: Any,
    stride: Any,
    tokens: int,
    offset: Any,
    plane: Plane,
) -> None:
    listed, step = work[1].shape[0], plane.pages.count * plane.pages.size

    @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * 4, *[_SCALAR] * 3))
    def fill(_: Any, scores: Any, tiles: Any, tile_of: Any, counts: Any, *scalars: Any) -> None:
        first, stride, offset = (lanes.scalar(x) for x in scalars)
        lane = lanes.thread() & 31
        lowest = lanes.constant(_LOWEST, lanes.f32())

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


# ---- parts of the inline code: each emits the program of one CUDA thread ----


class Place:
    """Where this thread's data lies, see the module's text."""

    def __init__(self) -> None:
        self.thread = lanes.thread() & 127
        lane = self.thread & 31
        self.quad = lane & 3
        self.first_row = (self.thread >> 5) * 16 + (lane >> 2)  # of (m, i) = (0, 0)

    def row(self) -> Lane:
        """The row whose maxima this lane ends with."""
        return self.first_row + (self.quad >> 1) * 64 + (self.quad & 1) * 8


def row_maxima(place: Place, upper: Any, lower: Any, pages: StepPages) -> list[Lane]:
    """The page maxima of this lane's row, of both halves' `lane_maxima`.

    NaN where all of a page's products are NaN.
    """
    return _row_per_lane(place, _by_row(upper, lower, pages))


def _by_row(upper: Any, lower: Any, pages: StepPages) -> list[list[Lane]]:
    """A lane's maxima of its rows (m, i) = (0, 0), (0, 1), (1, 0), (1, 1)."""
    return [of_array(x)[i * pages.count :][: pages.count] for x in (upper, lower) for i in range(2)]


def shared_maxima(place: Place, shared: Any, pages: StepPages) -> list[Lane]:
    """The page maxima of row `place.row()`, of what `share_maxima` left; NaN as in `row_maxima`."""
    row = Words.of(shared) + place.quad * (ROWS * pages.count)
    first = place.thread & ~3
    best: list[Lane] | None = None
    for i in range(4):
        # The four lanes of a row start with different ones, which lie in different banks.
        other = first + ((place.quad + i) & 3)
        found = (row + other * pages.count).load_vector(lanes.f32(), pages.count)
        best = [maximum(a, b) for a, b in zip(best, found, strict=True)] if best else list(found)
    assert best is not None
    return best


def _visible_below(
    place: Place, m: int, i: int, page: int, causal: Causal, pages: StepPages
) -> Lane:
    """Row (m, i) sees this lane's column 8 n + e of a page where 8 n + e is below this."""
    token = (place.first_row + (64 * m + 8 * i)) >> 2
    seen = _seen(causal.position + token, causal.keys)
    return seen - causal.first_key - place.quad * 2 - page * pages.size


def as_array(elements: Sequence[Lane], layout: Any) -> Any:
    """An array with len(elements) elements a thread, of layout WG_STRIDED(.., 1)."""
    vector_type = ir.VectorType.get((1,), elements[0].type)
    registers = np.empty((len(elements),), dtype=object)
    for i, x in enumerate(elements):
        registers[i] = llvm.insertelement(llvm.mlir_undef(vector_type), x.value, int32(0).value)
    signed = None if isinstance(elements[0].type, ir.FloatType) else True
    return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=signed)


def of_array(array: Any) -> list[Lane]:
    """This thread's elements of such an array."""
    return [Lane(llvm.extractelement(x, int32(0).value)) for x in array.registers.flat]


def _page_maximum(pairs: Any, limit: Lane | None) -> Lane:
    values = []
    for n, pair in enumerate(pairs):
        for e, value in enumerate(pair):
            if limit is not None:
                value = where(limit > 8 * n + e, value, _LOWEST)
            values.append(value)
    while len(values) > 1:
        values = [maximum(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def _row_per_lane(place: Place, best: list[list[Lane]]) -> list[Lane]:
    """Finishes the maxima over the four lanes of a row; lane q keeps those of (m, i) = q."""
    high, odd = place.quad >= 2, (place.quad & 1).ne(0)
    even_rows, odd_rows = (
        [_exchange(high, a, b, 2) for a, b in zip(best[q], best[q + 2], strict=True)]
        for q in range(2)
    )
    return [_exchange(odd, a, b, 1) for a, b in zip(even_rows, odd_rows, strict=True)]


def _exchange(upper: Lane, low: Lane, high: Lane, distance: int) -> Lane:
    """Upper lanes keep `high`, the others `low`, joined with the partner's copy of the same."""
    keep, send = where(upper, high, low), where(upper, low, high)
    received = lanes.warp_xor(send.bits(lanes.i32()), distance).bits(lanes.f32())
    return maximum(keep, received)


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


def _seen(position: Lane, keys: Lane) -> Lane:
    """Keys that a token at `position` sees of its segment's `keys`."""
    return maximum(lanes.minimum(position + 1, keys), 0)


def _plane_row(plane: Any, row: Lane, columns: int) -> Words:
    """The start of a row of a score plane; in 64 bits, a plane may pass 2 GiB."""
    return Words.of(plane) + row.to_i64() * columns
