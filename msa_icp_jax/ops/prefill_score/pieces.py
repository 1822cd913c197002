"""What the prefill kernel is built of, in the form for the machine; `interpret` has the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from msa_icp_jax.ops.prefill_score import maxima, plane, wgmma


class Pieces(NamedTuple):
    """The pieces of one form; each is documented where its machine form is."""

    start_products: Callable[..., Any]
    settle_products: Callable[..., Any]
    lane_maxima: Callable[..., Any]
    integer_maxima: Callable[..., Any]
    any_nan: Callable[..., Any]
    lower_maxima: Callable[..., Any]
    store_maxima: Callable[..., Any]
    open_columns: Callable[..., Any]
    none_counted: Callable[..., Any]
    store_and_count: Callable[..., Any]
    no_maxima: Callable[..., Any]
    no_half: Callable[..., Any]
    store_upper_rows: Callable[..., Any]
    store_lower_rows: Callable[..., Any]
    store_pair: Callable[..., Any]
    fill_hidden: Callable[..., Any]


MACHINE = Pieces(
    wgmma.start_products,
    wgmma.settle_products,
    maxima.lane_maxima,
    maxima.integer_maxima,
    maxima.any_nan,
    maxima.lower_maxima,
    plane.store_maxima,
    plane.open_columns,
    plane.none_counted,
    plane.store_and_count,
    plane.no_maxima,
    plane.no_maxima,
    plane.store_upper_rows,
    plane.store_lower_rows,
    plane.store_pair,
    plane.fill_hidden,
)
