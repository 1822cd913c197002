"""Maxima of products over the pages of a step.

The maximum over a page's keys is taken in registers first, each lane over its own columns, then
over the four lanes that share a row, by two exchanges. After both, lane l of warp w has the maxima
of row ``16 w + 8 (q // 2) + l // 4``, q = l % 4: an even lane those of the first half of the pages,
an odd one of the second. Of a single page both have the maximum.

*Quick maxima* are those of the bits as integers: two nested ones are one instruction. They are the
floats' unless one is NaN, which is looked for, or all are negative; then they are negative, too. A
NaN of negative sign is below every value that is not negative, so it does no harm.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from msa_icp_jax.ops._mosaic import lanes
from msa_icp_jax.ops._mosaic.lanes import (
    Context,
    Lane,
    Value,
    as_array,
    f32,
    i32,
    int32,
    maximum,
    of_array,
    where,
)
from msa_icp_jax.ops.prefill_score.wgmma import (
    KEYS,
    PRODUCTS,
    SCALAR,
    layout_of,
    type_of,
)

_LOWEST = float("-inf")
_INF_BITS = 0x7F800000


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

    @property
    def elements(self) -> int:
        """Maxima that a lane has of its own columns: (i, page)."""
        return 2 * self.count

    @property
    def kept(self) -> int:
        """Maxima of a row that a lane ends with."""
        return max(self.count // 2, 1)


class Causal(NamedTuple):
    """What decides which of a step's keys a row sees, as scalars."""

    position: Any  # of row 0's token
    keys: Any  # of the segment
    first_key: Any  # position of the step's key 0


def lane_maxima(products: jax.Array, causal: Causal | None, pages: StepPages) -> jax.Array:
    """Each lane's maxima over its own columns of every page, (i, page) from (0, 0) on.

    Args:
      products: the settled products of 64 query rows and the step's keys.
      causal: None where all rows see all keys.
      pages: the pages of the step.
    """
    scalars = causal or ()

    @plgpu.inline_mgpu(
        arg_types=(PRODUCTS, *[SCALAR] * len(scalars)), return_type=type_of(pages.elements)
    )
    def reduce(_: Context, products: Value, *scalars: Value) -> Any:
        place = Place()
        hides = Causal(*(lanes.scalar(s) for s in scalars)) if scalars else None
        best = [
            _float_maximum(pairs, hides and _visible_below(place, i, g, hides, pages))
            for i, g, pairs in _by_page(products, pages)
        ]
        return as_array(best, layout_of(pages.elements))

    return reduce(products, *scalars)


def integer_maxima(products: jax.Array, pages: StepPages) -> jax.Array:
    """As `lane_maxima` where all rows see all keys, but integer maxima, floats if a key is NaN.

    A NaN key's products with all rows are NaN, so one row tells each warp.
    """

    @plgpu.inline_mgpu(arg_types=(PRODUCTS,), return_type=type_of(pages.elements))
    def reduce(_: Context, products: Value) -> Any:
        parts = [pairs for _, _, pairs in _by_page(products, pages)]
        integers = [_integer_maximum(pairs) for pairs in parts]
        nan = lanes.warp_any(is_nan(integers[: pages.count]))  # row i = 0
        best = lanes.choose(
            nan,
            [f32()] * pages.elements,
            lambda: [_float_maximum(pairs, None) for pairs in parts],
            lambda: integers,
        )
        return as_array(best, layout_of(pages.elements))

    return reduce(products)


def row_maxima(found: jax.Array, pages: StepPages, sm_scale: float) -> jax.Array:
    """The maxima over all columns of every page, scaled, that a lane ends with.

    Args:
      found: from `lane_maxima` or `integer_maxima`.
      pages: the pages of the step.
      sm_scale: factor. What is not visible, or nothing but NaN, is -inf under any; a zero is +0.0.
    """

    @plgpu.inline_mgpu(arg_types=(layout_of(pages.elements),), return_type=type_of(pages.kept))
    def share(_: Context, found: Value) -> Any:
        best = share_row(Place(), of_array(found))
        return as_array([_finish(x, sm_scale) for x in best], layout_of(pages.kept))

    return share(found)


# ---- parts of the inline code: each emits the program of one CUDA thread ----


class Place:
    """Where this thread's data lies, see the module's text."""

    def __init__(self) -> None:
        # Fresh, so that what follows from it is not kept in registers that products need.
        thread = lanes.fresh(lanes.thread()) & 127
        lane = thread & 31
        self.warp, self.of_warp, self.quad = thread >> 5, lane >> 2, lane & 3

    @property
    def high(self) -> Lane:
        """Whether the first exchange leaves this lane the row i = 1."""
        return self.quad >= 2

    @property
    def odd(self) -> Lane:
        """Whether the second exchange leaves this lane the second half of the pages."""
        return (self.quad & 1).ne(0)

    def row(self, i: Lane | None = None) -> Lane:
        """The row whose maxima this lane ends with, or its row i of the products."""
        return self.warp * 16 + self.of_warp + (self.quad >> 1 if i is None else i) * 8

    def first_page(self, pages: StepPages) -> Lane:
        """The first of the pages whose maxima this lane ends with."""
        return (self.quad & 1) * (pages.count // 2)

    def stores(self, pages: StepPages) -> Lane:
        """Whether it is this lane that stores them."""
        return ~self.odd if pages.count == 1 else self.quad >= 0


def share_row(place: Place, found: list[Lane]) -> list[Lane]:
    """Both exchanges: of (i, page) those of one row and half of the pages, NaN where all are."""
    middle = len(found) // 2
    row = [
        exchange(place.high, a, b, 2) for a, b in zip(found[:middle], found[middle:], strict=True)
    ]
    middle = max(len(row) // 2, 1)
    return [exchange(place.odd, a, b, 1) for a, b in zip(row[:middle], row[-middle:], strict=True)]


def exchange(upper: Lane, low: Lane, high: Lane, distance: int) -> Lane:
    """Upper lanes keep `high`, the others `low`, joined with the partner's copy of the same."""
    keep, send = where(upper, high, low), where(upper, low, high)
    received = lanes.warp_xor(send.bits(i32()), distance).bits(f32())
    return maximum(keep, received)


def is_nan(found: list[Lane]) -> Lane:
    """Whether one of integer maxima is NaN."""
    return functools.reduce(maximum, [x.bits(i32()) for x in found]) > _INF_BITS


def seen_keys(position: Lane, keys: Lane) -> Lane:
    """Keys that a token at `position` sees of its segment's `keys`."""
    return maximum(lanes.minimum(position + 1, keys), 0)


def _by_page(products: Any, pages: StepPages) -> list[tuple[int, int, Any]]:
    """(i, page, [tiles, 2] products): of every 8 columns two of row 0 and two of row 8 below it."""
    tiles = np.array(of_array(products), dtype=object)
    tiles = tiles.reshape(pages.count, pages.rows // 8, 2, 2)
    return [(i, g, tiles[g, :, i]) for i in range(2) for g in range(pages.count)]


def _visible_below(place: Place, i: int, page: int, causal: Causal, pages: StepPages) -> Lane:
    """Row i sees this lane's column 8 n + e of a page where 8 n + e is below this."""
    token = place.row(int32(i)) >> 2
    seen = seen_keys(causal.position + token, causal.keys)
    return seen - causal.first_key - place.quad * 2 - page * pages.size


def _float_maximum(pairs: Any, limit: Lane | None) -> Lane:
    values = []
    for n, pair in enumerate(pairs):
        for e, value in enumerate(pair):
            if limit is not None:
                value = where(limit > 8 * n + e, value, _LOWEST)
            values.append(value)
    while len(values) > 1:
        values = [maximum(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def _integer_maximum(pairs: Any) -> Lane:
    values = [x.bits(i32()) for pair in pairs for x in pair]
    while len(values) > 2:
        values = [*values[3:], maximum(maximum(values[0], values[1]), values[2])]
    return maximum(*values).bits(f32())


def _finish(x: Lane, sm_scale: float) -> Lane:
    x = maximum(x, _LOWEST)
    if sm_scale != 1.0:
        x = where(x > _LOWEST, x * sm_scale, x)
    return where(x.eq(0.0), 0.0, x)
