"""The prefill kernel's parts in plain Pallas, for the interpreter: the same results, slowly.

Arrays lie as they are written: products are [64, 128], maxima [64, pages].
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
from msa_icp_jax.ops.prefill_score.maxima import Causal, StepPages
from msa_icp_jax.ops.prefill_score.parts import Parts
from msa_icp_jax.ops.prefill_score.plane import Plane, Rows
from msa_icp_jax.ops.prefill_score.wgmma import KEYS, ROWS


def _start_products(queries: Any, keys: Any) -> jax.Array:
    """Multiplies at once."""

    def multiply(acc: Any) -> jax.Array:
        plgpu.wgmma(acc, queries, keys.T)
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((ROWS, KEYS), jnp.float32))


def _settle_products(
    products: jax.Array, in_flight: int, after: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    del in_flight
    return products, after


def _lane_maxima(products: jax.Array, causal: Causal | None, pages: StepPages) -> jax.Array:
    products = products.reshape(ROWS, pages.count, pages.rows)
    if causal is not None:
        page, key = jnp.arange(pages.count), jnp.arange(pages.rows)
        at = causal.first_key + page[:, None] * pages.size + key[None]
        products = jnp.where(at[None] < _seen(causal)[:, None, None], products, -jnp.inf)
    return jnp.where(jnp.isnan(products), -jnp.inf, products).max(axis=2)


def _seen(causal: Causal) -> jax.Array:
    """Keys that each row sees."""
    token = jnp.arange(ROWS) // NUM_HEADS
    return jnp.clip(causal.position + token + 1, 0, causal.keys)


def _integer_maxima(products: jax.Array, pages: StepPages) -> jax.Array:
    """Where all are negative some other negative value, as the machine has it."""
    found = _lane_maxima(products, None, pages)
    return jnp.where(found < 0, 2 * found - 1, found)


def _row_maxima(found: jax.Array, pages: StepPages, sm_scale: float) -> jax.Array:
    del pages
    best = jnp.where(found > -jnp.inf, found * sm_scale, -jnp.inf)
    return jnp.where(best == 0, 0.0, best)


def _store_maxima(
    best: jax.Array,
    scores: jax.Ref,
    rows: Rows,
    column: jax.Array,
    causal: Causal | None,
    plane: Plane,
) -> None:
    at = column + jnp.arange(plane.pages.count)
    written = jnp.broadcast_to(at[None] < plane.columns, best.shape)
    if causal is not None and plane.hidden == "none":
        written &= at[None] * plane.pages.size < _seen(causal)[:, None]
    _store(best, written, scores, rows, column)


def _store(
    best: jax.Array, written: jax.Array, scores: jax.Ref, rows: Rows, column: jax.Array
) -> None:
    """Stores maxima [64, columns] of the rows that are wanted where `written` says so."""
    count = best.shape[1]

    @pl.loop(lax.div(rows.begin, NUM_HEADS), lax.div(rows.end, NUM_HEADS))
    def _(token: jax.Array) -> None:
        values = lax.dynamic_slice_in_dim(best, token * NUM_HEADS, NUM_HEADS)
        flags = lax.dynamic_slice_in_dim(written, token * NUM_HEADS, 1)[0]
        target = lax.div(rows.first, NUM_HEADS) + token
        for g in range(count):

            @pl.when(flags[g])
            def _(g: int = g) -> None:
                scores[target, :, column + g] = values[:, g]


def _stage_maxima(best: jax.Array, stage: jax.Ref, column: jax.Array, plane: Plane) -> None:
    stage[:, pl.ds(column, plane.pages.count)] = best


def _write_stage(
    stage: jax.Ref,
    scores: jax.Ref,
    rows: Rows,
    column: jax.Array,
    begin: jax.Array,
    end: jax.Array,
    plane: Plane,
) -> None:
    count = plane.pages.count

    @pl.loop(lax.div(rows.begin, NUM_HEADS), lax.div(rows.end, NUM_HEADS))
    def _(token: jax.Array) -> None:
        @pl.loop(begin, end, step=count)
        def _(c: jax.Array) -> None:
            values = stage[pl.ds(token * NUM_HEADS, NUM_HEADS), pl.ds(c, count)]
            target = lax.div(rows.first, NUM_HEADS) + token
            scores[target, :, pl.ds(column + c, count)] = values


def _open_columns(
    counts: jax.Ref, offset: jax.Array, rows: Rows, tokens: int, plane: Plane
) -> tuple[jax.Array, jax.Array]:
    assert plane.forced is not None
    begin_blocks, end_blocks = plane.forced

    def columns_below(block: jax.Array) -> jax.Array:
        return jnp.clip(cdiv(block - offset, plane.scale), 0, plane.columns)

    def one_token(
        token: jax.Array, found: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
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


def _count_maxima(
    best: jax.Array,
    rows: Rows,
    column: jax.Array,
    front: jax.Array,
    counted: jax.Array,
    plane: Plane,
) -> tuple[jax.Array, jax.Array]:
    at = column + jnp.arange(plane.pages.count)
    counted = counted + ((best >= 0) & (at[None] >= front)).sum(axis=1, dtype=jnp.float32)
    row = jnp.arange(ROWS)
    done = (counted >= TOPK) | (row < rows.begin) | (row >= rows.end)
    return counted, done.all().astype(jnp.int32)


def _fill_hidden(
    scores: jax.Ref,
    work: tuple[jax.Ref, jax.Ref],
    counts: jax.Ref,
    first: jax.Array,
    stride: Any,
    tokens: int,
    offset: jax.Array,
    plane: Plane,
) -> None:
    tiles, tile_of = work
    listed, step = tile_of.shape[0], plane.pages.count * plane.pages.size

    @pl.loop(0, cdiv(tokens, stride))
    def _(turn: jax.Array) -> None:
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
            def _(c: jax.Array) -> None:
                scores[token, :, c] = jnp.full((NUM_HEADS,), -jnp.inf, jnp.float32)


PARTS = Parts(
    _start_products,
    _settle_products,
    _lane_maxima,
    _integer_maxima,
    _row_maxima,
    _store_maxima,
    _stage_maxima,
    _write_stage,
    _open_columns,
    _none_counted,
    _count_maxima,
    _fill_hidden,
)
