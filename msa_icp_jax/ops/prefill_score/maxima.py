"""Maxima of products over the pages of a step.

The maximum over a page's keys is taken in registers first, each lane over its own columns, then
over the four lanes that share a row, by two exchanges. After both, lane l of warp w has all page
maxima of row ``64 (q // 2) + 16 w + 8 (q % 2) + l // 4``, q = l % 4.

Two steps together can be exchanged so that full sectors of the score plane are stored: even lanes
end with the first step's maxima of the rows (q // 2, i), i = 0 and 1, odd ones with the second's.

*Integer maxima* are those of the bits: two nested ones are one instruction. They are the floats'
unless one is NaN or all are negative; in the latter case they are negative, too. A NaN of negative
sign is below every value that is not negative, so it does no harm.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from msa_icp_jax.ops._mosaic import lanes
from msa_icp_jax.ops._mosaic.lanes import Lane, f32, i32, maximum, where
from msa_icp_jax.ops.prefill_score.wgmma import (
    INT,
    KEYS,
    PRODUCTS,
    SCALAR,
    as_array,
    layout_of,
    of_array,
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
        """Maxima that a thread has of 64 rows: (i, page)."""
        return 2 * self.count


class Causal(NamedTuple):
    """What decides which of a step's keys a row sees, as scalars."""

    position: Any  # of row 0's token
    keys: Any  # of the segment
    first_key: Any  # position of the step's key 0


# The maxima of a step's upper and lower 64 query rows, each as `lane_maxima` leaves them.
type LaneMaxima = tuple[jax.Array, jax.Array]


def lane_maxima(products: jax.Array, m: int, causal: Causal | None, pages: StepPages) -> jax.Array:
    """Each lane's maxima over its own columns of every page, (i, page) from (0, 0) on.

    Args:
      products: the settled products of query rows 64 m onwards and the step's keys.
      m: 0 or 1.
      causal: None where all rows see all keys.
      pages: the pages of the step.
    """
    scalars = causal or ()

    @plgpu.inline_mgpu(
        arg_types=(PRODUCTS, *[SCALAR] * len(scalars)), return_type=type_of(pages.elements)
    )
    def reduce(_: Any, products: Any, *scalars: Any) -> Any:
        place = Place()
        hides = Causal(*(lanes.scalar(s) for s in scalars)) if scalars else None
        best = [
            _float_maximum(pairs, hides and _visible_below(place, m, i, g, hides, pages))
            for i, g, pairs in _by_page(products, pages)
        ]
        return as_array(best, layout_of(pages.elements))

    return reduce(products, *scalars)


def integer_maxima(products: jax.Array, pages: StepPages) -> jax.Array:
    """As `lane_maxima` where all rows see all keys, but integer maxima."""

    @plgpu.inline_mgpu(arg_types=(PRODUCTS,), return_type=type_of(pages.elements))
    def reduce(_: Any, products: Any) -> Any:
        best = [_integer_maximum(pairs) for _, _, pairs in _by_page(products, pages)]
        return as_array(best, layout_of(pages.elements))

    return reduce(products)


def any_nan(upper: jax.Array, pages: StepPages) -> jax.Array:
    """Whether a key of the step is NaN, 0 or 1, as each warp sees it.

    Args:
      upper: integer maxima of the upper half. A NaN key's products with all rows are NaN, so one
        row tells; its maximum then is NaN, too.
      pages: the pages of the step.
    """

    @plgpu.inline_mgpu(arg_types=(layout_of(pages.elements),), return_type=INT)
    def look(_: Any, upper: Any) -> Any:
        found = lanes.warp_any(is_nan(of_array(upper)[: pages.count]))  # row i = 0
        return mgpu.FragmentedArray.splat(found.to_i32().value, (), is_signed=True)

    return look(upper)


def lower_maxima(
    products: tuple[jax.Array, jax.Array], upper: jax.Array, nan: jax.Array, pages: StepPages
) -> LaneMaxima:
    """Integer maxima of the lower half beside those of the upper; floats of both where `nan`."""

    @plgpu.inline_mgpu(
        arg_types=(*[PRODUCTS] * 2, layout_of(pages.elements), SCALAR),
        return_type=(type_of(pages.elements),) * 2,
    )
    def reduce(_: Any, first: Any, second: Any, upper: Any, nan: Any) -> Any:
        def floats() -> list[Lane]:
            halves = (_by_page(products, pages) for products in (first, second))
            return [_float_maximum(pairs, None) for half in halves for _, _, pairs in half]

        def integers() -> list[Lane]:
            lower = [_integer_maximum(pairs) for _, _, pairs in _by_page(second, pages)]
            return [*of_array(upper), *lower]

        count = pages.elements
        best = lanes.choose(lanes.scalar(nan).ne(0), [f32()] * (2 * count), floats, integers)
        layout = layout_of(count)
        return as_array(best[:count], layout), as_array(best[count:], layout)

    upper, lower = reduce(*products, upper, nan)
    return upper, lower


# ---- parts of the inline code: each emits the program of one CUDA thread ----


class Place:
    """Where this thread's data lies, see the module's text."""

    def __init__(self) -> None:
        self.thread = lanes.thread() & 127
        lane = self.thread & 31
        self.quad = lane & 3
        self.first_row = (self.thread >> 5) * 16 + (lane >> 2)  # of (m, i) = (0, 0)

    @property
    def high(self) -> Lane:
        """Whether the first exchange leaves this lane the lower 64 rows."""
        return self.quad >= 2

    @property
    def odd(self) -> Lane:
        """Whether the second exchange leaves this lane the later rows, or the second step."""
        return (self.quad & 1).ne(0)

    def row(self) -> Lane:
        """The row whose maxima this lane ends with."""
        return self.first_row + (self.quad >> 1) * 64 + (self.quad & 1) * 8

    def row_of_pair(self, i: int) -> Lane:
        """The i-th row of which this lane ends with a step's maxima, of two steps together."""
        return self.first_row + ((self.quad >> 1) * 64 + i * 8)

    def later_than(self, pin: Any) -> Place:
        """This place, but for the compiler it depends on an array.

        Its exchanges then come after that array's elements: the compiler would put them between
        the multiplications' issue, which delays those. The dependence is a zero that it cannot
        know.
        """
        zero = lanes.ptx("mov.u32 $0, %ctaid.z;", result=i32(), pure=True)
        self.quad = self.quad ^ (of_array(pin)[-1].bits(i32()) & zero)
        return self


def halve(place: Place, upper: Any, lower: Any) -> list[Lane]:
    """The first exchange: (i, page) of this lane's half of the rows, q // 2."""
    return [
        exchange(place.high, a, b, 2) for a, b in zip(of_array(upper), of_array(lower), strict=True)
    ]


def row_maxima(place: Place, upper: Any, lower: Any) -> list[Lane]:
    """Both exchanges of one step: the page maxima of this lane's row, NaN where all are NaN."""
    half = halve(place, upper, lower)
    middle = len(half) // 2
    return [exchange(place.odd, a, b, 1) for a, b in zip(half[:middle], half[middle:], strict=True)]


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


def _visible_below(
    place: Place, m: int, i: int, page: int, causal: Causal, pages: StepPages
) -> Lane:
    """Row (m, i) sees this lane's column 8 n + e of a page where 8 n + e is below this."""
    token = (place.first_row + (64 * m + 8 * i)) >> 2
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
