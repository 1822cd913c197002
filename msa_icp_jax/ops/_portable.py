"""The arithmetic that the plain (XLA) definitions of both scorers share.

Decode and prefill score the same way: `requests` groups of query tokens against a few columns of
each group's pages at a time. Prefill is the case of one group, a tile of one segment's tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from msa_icp_jax import rows
from msa_icp_jax.geometry import HEAD_DIM, TOPK, cdiv
from msa_icp_jax.ops.arguments import Candidates, Shard

if TYPE_CHECKING:
    from jax.typing import DTypeLike

    from msa_icp_jax.arrays import (
        Array,
        Bool,
        Float8e4m3fn,
        Float32,
        IndexFloat,
        Int32,
        Shaped,
    )

NEG_INF = -jnp.inf
_PRODUCT_BYTES_PER_STEP = 64 << 20  # float32 products that one scoring step holds


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How a platform scores: what it multiplies, and how much at a time.

    Attributes:
      operand: dtype of the products' operands. Each holds every float8_e4m3fn value, and sums are
        float32, so that products are exact with all of them. bfloat16 keys are multiplied as they
        are where this is a 16-bit dtype.
      unit: unsigned integers that pages are gathered as, at least as wide as a number.
      key_rows: key rows that one scoring step gathers.
      tile_tokens: query tokens of a prefill tile.
    """

    operand: DTypeLike
    unit: DTypeLike
    key_rows: int
    tile_tokens: int


# CPUs multiply in float32 and want their keys in the cache. Elsewhere matrix units take 16-bit
# operands, and a loop costs a wait for the host each time round: steps are as large as memory
# allows, 128 MiB of float8 keys. GPUs gather words at twice the speed of bytes; other layouts of
# memory may have no view of bytes as words.
_CPU = Tuning(jnp.float32, jnp.uint8, 1 << 15, 128)
_GPU = Tuning(jnp.float16, jnp.uint32, 1 << 20, 512)
_OTHER = Tuning(jnp.bfloat16, jnp.uint8, 1 << 20, 512)


def tuned[Result](score: Callable[..., Result]) -> Callable[..., Result]:
    """`score` with its argument `tuning` taken from the platform that it is lowered for."""

    @functools.wraps(score)
    def on_platform(*args: Any, **kwargs: Any) -> Result:
        def with_tuning(tuning: Tuning) -> Callable[[], Result]:
            return lambda: score(*args, **kwargs, tuning=tuning)

        gpu = with_tuning(_GPU)
        return lax.platform_dependent(
            cpu=with_tuning(_CPU), cuda=gpu, rocm=gpu, default=with_tuning(_OTHER)
        )

    return on_platform


def columns_per_step(shard: Shard, groups: int, queries: int, limit: int, tuning: Tuning) -> int:
    """Columns scored at a time: a multiple of four that bounds the memory of keys and products.

    Args:
      shard: the keys.
      groups: requests that are scored together.
      queries: query rows of each.
      limit: columns that there are.
      tuning: the platform's.
    """
    key_rows = tuning.key_rows // shard.index_k.dtype.itemsize
    key_rows = min(key_rows, _PRODUCT_BYTES_PER_STEP // (4 * queries))
    return min(limit, max(4, key_rows // (groups * shard.rows) // 4 * 4))


def for_each_step[Carry](
    used: Int32[Array, ""],
    step: int,
    columns: int,
    body: Callable[[Any, Carry], Carry],
    carry: Carry,
) -> Carry:
    """Folds `body` over the steps that cover `used` of `columns` columns; a single one always."""
    if step == columns:
        return body(jnp.int32(0), carry)
    return lax.fori_loop(0, cdiv(used, step), body, carry)


def pages_of(
    table: Int32[Array, "groups width"],
    lengths: Int32[Array, " groups"],
    columns: Int32[Array, "groups columns"],
    shard: Shard,
) -> Int32[Array, "groups columns"]:
    """Physical pages int32 [groups, columns], -1 where there is none to read.

    None to read: the column is at or past ``ceil(length / page_size)`` or the table's width, or the
    entry lies outside the cache. Such entries are never used as an address, whatever they hold.

    Args:
      table: int32 [groups, width].
      lengths: int32 [groups].
      columns: int32 [groups, columns], ascending by one.
      shard: the keys.
    """
    width, num_pages = table.shape[1], shard.index_k.shape[0]
    entries = jnp.take_along_axis(table, jnp.minimum(columns, width - 1), axis=1)
    used = (columns < width) & (columns < cdiv(lengths, shard.page_size)[:, None])
    return jnp.where(used & (entries >= 0) & (entries < num_pages), entries, -1)


def column_scores(
    query: IndexFloat[Array, "groups tokens heads 128"],
    shard: Shard,
    table: Int32[Array, "groups width"],
    columns: Int32[Array, "groups columns"],
    positions: Int32[Array, "groups tokens"],
    lengths: Int32[Array, " groups"],
    tuning: Tuning,
) -> Float32[Array, "groups tokens heads columns"]:
    """Maxima of q.k over the rank's visible rows of some columns: exact products, float32 sums.

    Args:
      query: the keys' dtype, [groups, tokens, heads, 128].
      shard: the keys.
      table: int32 [groups, width], the groups' block tables.
      columns: int32 [groups, columns], the columns' page numbers within the request.
      positions: int32 [groups, tokens], negative for a token that sees nothing.
      lengths: int32 [groups], keys at or past it are invisible.
      tuning: the platform's.

    Returns:
      float32 [groups, tokens, heads, columns]; -inf where no row is visible.
    """
    groups, tokens, heads, _ = query.shape
    count = columns.shape[1]
    pages = pages_of(table, lengths, columns, shard)
    keys = _gathered_keys(shard, pages, tuning).reshape(groups, count * shard.rows, HEAD_DIM)
    queries = _values(query).astype(keys.dtype).reshape(groups, tokens * heads, HEAD_DIM)
    products = lax.dot_general(
        queries,
        keys,
        (((2,), (2,)), ((0,), (0,))),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    ).reshape(groups, tokens, heads, count, shard.rows)

    first = columns * shard.page_size + shard.rank * shard.rows
    key_positions = first[..., None] + jnp.arange(shard.rows, dtype=jnp.int32)[None, None]
    key_positions = key_positions[:, None]
    visible = (
        (pages >= 0)[:, None, :, None]
        & (key_positions <= positions[:, :, None, None])
        & (key_positions < lengths[:, None, None, None])
    )[:, :, None]
    # A NaN product is skipped: the only rule under which split and whole blocks agree.
    best = jnp.where(visible & ~jnp.isnan(products), products, NEG_INF).max(-1)
    return jnp.where(best == 0, 0.0, best)


class RunningTop16(NamedTuple):
    """The best 16 candidates so far of [..., 16] (keys, score words, ids)."""

    keys: Int32[Array, "*rows 16"]
    words: Int32[Array, "*rows 16"]
    ids: Int32[Array, "*rows 16"]

    @staticmethod
    def empty(*shape: int) -> RunningTop16:
        """No candidate yet."""
        full = (*shape, TOPK)
        return RunningTop16(
            jnp.full(full, rows.INVALID_KEY, jnp.int32),
            jnp.full(full, rows.NEG_INF_WORD, jnp.int32),
            jnp.full(full, rows.NO_BLOCK, jnp.int32),
        )

    def fold(
        self,
        scores: Float32[Array, "*rows columns"],
        columns: Int32[Array, " columns"],
        fresh: Bool[Array, " columns"],
        num_valid_pages: Int32[Array, "*rows"],
        candidates: Candidates,
    ) -> RunningTop16:
        """Folds in scores [..., columns] of columns that all lie past the earlier ones.

        `fresh` [columns] marks those not folded before; `num_valid_pages` has the scores' leading
        shape.
        """
        words = lax.bitcast_convert_type(scores, jnp.int32)
        ids = jnp.broadcast_to(columns * candidates.scale + candidates.offset, words.shape)
        keys = rows.candidate_keys(words, ids, num_valid_pages[..., None], *candidates.forced)
        keys = jnp.where(fresh, keys, rows.INVALID_KEY)
        # Earlier candidates stand first, so among equal keys the lower id keeps winning.
        joined = (
            jnp.concatenate(pair, axis=-1)
            for pair in ((self.keys, keys), (self.words, words), (self.ids, ids))
        )
        return RunningTop16(*rows.take_top16(*joined))

    def rows(self) -> Int32[Array, "*rows 33"]:
        """Candidate rows int32 [..., 33]."""
        return rows.pack(self.words, self.ids)


def _gathered_keys(
    shard: Shard, pages: Int32[Array, "groups columns"], tuning: Tuning
) -> Shaped[Array, "groups columns R 128"]:
    """The values of the rank's rows of `pages`, [groups, columns, rows, 128] operands.

    XLA on CPU has no data movement of such narrow numbers: it would convert the whole cache before
    a gather of them, so integers are gathered. The first barrier ties the cache to the loop's step,
    or the view as integers would be made once, outside the loop, as a copy of the whole cache. The
    second keeps conversion out of the gather: it belongs to the product, or the operands would go
    through memory, too.
    """
    cache, pages = lax.optimization_barrier((shard.index_k, pages))
    dtype = cache.dtype
    unit = tuning.unit if jnp.dtype(tuning.unit).itemsize >= dtype.itemsize else jnp.uint16
    units = _as_units(cache, unit)
    pages = jnp.maximum(pages, 0)  # one that cannot be read reads page 0: no index is out of range
    start = jnp.stack([pages, jnp.full_like(pages, shard.row_offset)], axis=-1)
    gathered = lax.gather(
        units,
        start,
        lax.GatherDimensionNumbers(
            offset_dims=(2, 3), collapsed_slice_dims=(0,), start_index_map=(0, 1)
        ),
        slice_sizes=(1, shard.rows, units.shape[-1]),
        mode=lax.GatherScatterMode.CLIP,
    )
    if tuning.operand == jnp.float32:
        return _values(_from_units(gathered, dtype))
    keys = _from_units(lax.optimization_barrier(gathered), dtype)
    return keys if dtype == jnp.bfloat16 else keys.astype(tuning.operand)


def _as_units(x: Shaped[Array, "*shape n"], unit: DTypeLike) -> Shaped[Array, "*shape m"]:
    """The bits of `x` as wider or equal units along the last axis."""
    ratio = jnp.dtype(unit).itemsize // x.dtype.itemsize
    if ratio > 1:
        x = x.reshape(*x.shape[:-1], x.shape[-1] // ratio, ratio)
    return lax.bitcast_convert_type(x, unit)


def _from_units(units: Shaped[Array, "*shape m"], dtype: DTypeLike) -> Shaped[Array, "*shape n"]:
    """`_as_units` undone."""
    x = lax.bitcast_convert_type(units, dtype)
    return x if x.ndim == units.ndim else x.reshape(*units.shape[:-1], -1)


def _values(x: IndexFloat[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """The float32 values of float8_e4m3fn or bfloat16 numbers."""
    return x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else e4m3_values(x)


def e4m3_values(x: Float8e4m3fn[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """The float32 values of float8_e4m3fn numbers of any shape.

    It stands for `astype`, because XLA makes a float8 product of two that lead to a product,
    whatever the product's `precision` says, and Hopper's keep about 14 bits of the sum. So queries,
    one side of every product, are converted with integers alone; and a CPU's conversion is slow.

    A code is a sign, four bits of exponent (7 is 2^0; 0: no leading one) and three of fraction, so
    every value is an integer below 2^18 times 2^-9; 0x7F and 0xFF are NaN, and -0 becomes 0.
    """
    code = lax.bitcast_convert_type(x, jnp.uint8).astype(jnp.int32)
    exponent, fraction = (code >> 3) & 15, code & 7
    size = jnp.where(exponent > 0, (8 | fraction) << jnp.maximum(exponent - 1, 0), fraction)
    value = jnp.where(code >= 0x80, -size, size).astype(jnp.float32) * 2.0**-9
    return jnp.where((code & 0x7F) == 0x7F, jnp.nan, value)
