"""What the prefill kernel is built of, in the form for the machine; `interpret` has the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from msa_icp_jax.ops.prefill_score import maxima, plane, wgmma


class Parts(NamedTuple):
    """The parts of one form; each is documented where its machine form is."""

    start_products: Callable[..., Any]
    settle_products: Callable[..., Any]
    lane_maxima: Callable[..., Any]
    integer_maxima: Callable[..., Any]
    row_maxima: Callable[..., Any]
    store_maxima: Callable[..., Any]
    stage_maxima: Callable[..., Any]
    write_stage: Callable[..., Any]
    open_columns: Callable[..., Any]
    none_counted: Callable[..., Any]
    count_maxima: Callable[..., Any]
    fill_hidden: Callable[..., Any]


MACHINE = Parts(
    wgmma.start_products,
    wgmma.settle_products,
    maxima.lane_maxima,
    maxima.integer_maxima,
    maxima.row_maxima,
    plane.store_maxima,
    plane.stage_maxima,
    plane.write_stage,
    plane.open_columns,
    plane.none_counted,
    plane.count_maxima,
    plane.fill_hidden,
)
