"""The prefill kernel's pieces in stock operations, for the interpreter: the same results, slowly.

Arrays lie as they are written: products are [64, 128], the maxima of a half [64, pages].
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from msa_icp_jax.geometry import MAX_BLOCKS, NUM_HEADS, TOPK, cdiv
from msa_icp_jax.ops.prefill_plan import balance
from msa_icp_jax.ops.prefill_score.maxima import Causal, LaneMaxima, StepPages
from msa_icp_jax.ops.prefill_score.pieces import Pieces
from msa_icp_jax.ops.prefill_score.plane import Plane, Rows
from msa_icp_jax.ops.prefill_score.wgmma import HALF, KEYS, ROWS


def _start_products(queries: Any, keys: Any) -> jax.Array:
    """Multiplies at once."""

    def multiply(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, queries, keys.T)
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((HALF, KEYS), jnp.float32))


def _settle_products(products: jax.Array, in_flight: int, after: Any = None) -> tuple[Any, Any]:
    del in_flight
    return products, after


def _lane_maxima(products: jax.Array, m: int, causal: Causal | None, pages: StepPages) -> jax.Array:
    products = products.reshape(HALF, pages.count, pages.rows)
    if causal is not None:
        page, key = jnp.arange(pages.count), jnp.arange(pages.rows)
        at = causal.first_key + page[:, None] * pages.size + key[None]
        seen = _seen(causal)[m * HALF :][:HALF]
        products = jnp.where(at[None] < seen[:, None, None], products, -jnp.inf)
    return jnp.where(jnp.isnan(products), -jnp.inf, products).max(axis=2)


def _seen(causal: Causal) -> jax.Array:
    """Keys that each row sees."""
    token = jnp.arange(ROWS) // NUM_HEADS
    return jnp.clip(causal.position + token + 1, 0, causal.keys)


def _integer_maxima(products: jax.Array, pages: StepPages) -> jax.Array:
    """Where all are negative some other negative value, as the machine has it."""
    found = _lane_maxima(products, 0, None, pages)
    return jnp.where(found < 0, 2 * found - 1, found)


def _any_nan(upper: jax.Array, pages: StepPages) -> jax.Array:
    """NaN is skipped by these maxima anyhow."""
    del upper, pages
    return jnp.int32(0)


def _lower_maxima(
    products: tuple[jax.Array, jax.Array], upper: jax.Array, nan: jax.Array, pages: StepPages
) -> LaneMaxima:
    del nan
    return upper, _integer_maxima(products[1], pages)


def _store_maxima(
    maxima: LaneMaxima, scores: Any, rows: Rows, column: Any, causal: Causal | None, plane: Plane
) -> None:
    best = _finished(jnp.concatenate(maxima), plane)
    at = column + jnp.arange(plane.pages.count)
    written = jnp.broadcast_to(at[None] < plane.columns, best.shape)
    if causal is not None and plane.hidden == "none":
        written &= at[None] * plane.pages.size < _seen(causal)[:, None]
    _store(best, written, scores, rows, column)


def _finished(best: jax.Array, plane: Plane) -> jax.Array:
    best = jnp.where(best > -jnp.inf, best * plane.sm_scale, -jnp.inf)
    return jnp.where(best == 0, 0.0, best)


def _store(best: jax.Array, written: jax.Array, scores: Any, rows: Rows, column: Any) -> None:
    """Stores maxima [128, columns] of the rows that are wanted where `written` says so."""
    count = best.shape[1]

    @pl.loop(lax.div(rows.begin, NUM_HEADS), lax.div(rows.end, NUM_HEADS))
    def _(token: Any) -> None:
        values = lax.dynamic_slice_in_dim(best, token * NUM_HEADS, NUM_HEADS)
        flags = lax.dynamic_slice_in_dim(written, token * NUM_HEADS, 1)[0]
        target = lax.div(rows.first, NUM_HEADS) + token
        for g in range(count):

            @pl.when(flags[g])
            def _(g: int = g) -> None:
                scores[target, :, column + g] = values[:, g]


def _open_columns(
    counts: Any, offset: Any, rows: Rows, tokens: int, plane: Plane
) -> tuple[jax.Array, jax.Array]:
    assert plane.forced is not None
    begin_blocks, end_blocks = plane.forced

    def columns_below(block: Any) -> Any:
        return jnp.clip(cdiv(block - offset, plane.scale), 0, plane.columns)

    def one_token(token: Any, found: tuple[Any, Any]) -> tuple[Any, Any]:
        count = counts[jnp.minimum(lax.div(rows.first, NUM_HEADS) + token, tokens - 1)]
        count = jnp.maximum(count, 0)
        stop = columns_below(jnp.minimum(count, MAX_BLOCKS))
        front = jnp.minimum(columns_below(jnp.int32(begin_blocks)), stop)
        back = jnp.clip(columns_below(jnp.minimum(count - end_blocks, MAX_BLOCKS)), front, stop)
        return jnp.maximum(found[0], front), jnp.minimum(found[1], back)

    bounds = lax.div(rows.begin, NUM_HEADS), lax.div(rows.end, NUM_HEADS)
    return lax.fori_loop(*bounds, one_token, (jnp.int32(0), jnp.int32(plane.columns)))


def _none_counted() -> jax.Array:
    return jnp.zeros((ROWS,), jnp.float32)


def _store_and_count(
    maxima: LaneMaxima,
    scores: Any,
    rows: Rows,
    column: Any,
    front: Any,
    counted: jax.Array,
    plane: Plane,
) -> tuple[jax.Array, jax.Array]:
    _store_maxima(maxima, scores, rows, column, None, plane)
    best = _finished(jnp.concatenate(maxima), plane)
    at = column + jnp.arange(plane.pages.count)
    counted = counted + ((best >= 0) & (at[None] >= front)).sum(axis=1, dtype=jnp.float32)
    row = jnp.arange(ROWS)
    done = (counted >= TOPK) | (row < rows.begin) | (row >= rows.end)
    return counted, done.all().astype(jnp.int32)


def _no_maxima(pages: StepPages) -> jax.Array:
    return jnp.full((HALF, pages.count), -jnp.inf, jnp.float32)


def _no_half(pages: StepPages) -> jax.Array:
    return jnp.full((ROWS, pages.count), -jnp.inf, jnp.float32)


def _store_upper_rows(
    half: jax.Array,
    second: LaneMaxima,
    pin: jax.Array,
    scores: Any,
    rows: Rows,
    columns: tuple[Any, Any],
    plane: Plane,
) -> jax.Array:
    """Stores all rows: which ones come first is the machine's business."""
    del pin
    _store_pair(half, second, scores, rows, columns, plane)
    return half


def _store_lower_rows(
    rest: jax.Array,
    following: LaneMaxima,
    pin: jax.Array,
    scores: Any,
    rows: Rows,
    columns: tuple[Any, Any],
    plane: Plane,
) -> jax.Array:
    del rest, pin, scores, rows, columns, plane
    return jnp.concatenate(following)


def _store_pair(
    half: jax.Array,
    second: LaneMaxima,
    scores: Any,
    rows: Rows,
    columns: tuple[Any, Any],
    plane: Plane,
) -> None:
    column, first = columns
    best = _finished(jnp.concatenate([half, jnp.concatenate(second)], axis=1), plane)
    written = jnp.broadcast_to(column >= first, best.shape)
    _store(best, written, scores, rows, column)


def _fill_hidden(
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


PIECES = Pieces(
    _start_products,
    _settle_products,
    _lane_maxima,
    _integer_maxima,
    _any_nan,
    _lower_maxima,
    _store_maxima,
    _open_columns,
    _none_counted,
    _store_and_count,
    _no_maxima,
    _no_half,
    _store_upper_rows,
    _store_lower_rows,
    _store_pair,
    _fill_hidden,
)
