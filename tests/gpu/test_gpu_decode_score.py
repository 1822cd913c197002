"""The decode kernel on the GPU: the machine pieces against the oracle.

The interpreter tests hold the twins in plain Pallas to the same oracle, so both forms agree.
"""

from __future__ import annotations

import functools
from typing import Any

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from msa_icp_jax import msa_icp_decode_index_score_sharded, msa_icp_decode_score_publish
from msa_icp_jax.geometry import INDEX_DTYPES
from msa_icp_jax.ops._mosaic.launch import current_launch
from msa_icp_jax.ops.decode_score import kernel as decode_kernel

_EXACT = 2**-17
_RAGGED = (700, 0, -5, 131, 20000, 128, 1, 3)


def _call(shard: oracle.Shard, query_len: int, pdl: bool = True) -> Any:
    """The jitted kernel; the rank is traced, the score buffer donated."""
    kernel = functools.partial(
        decode_kernel.decode_scores,
        launch=current_launch(pdl),
    )

    def call(q: Any, k: Any, table: Any, lengths: Any, scores: Any, rank: Any) -> Any:
        return kernel(q, inputs.with_keys(shard, k, rank), table, lengths, scores)

    return jax.jit(call, donate_argnums=4)


def _check(
    shard: oracle.Shard,
    lengths: tuple[int, ...],
    query_len: int,
    queries: np.ndarray,
    keys: np.ndarray,
    *,
    columns: int,
    width: int,
    eps: float,
    pdl: bool = True,
) -> None:
    rng = np.random.default_rng(1)
    tokens = len(lengths) * query_len
    table = inputs.block_table(rng, lengths, shard.page_size, width, len(keys), bad_share=0.1)
    before = inputs.any_bits(rng, (tokens + 3, 4, columns))
    plane = oracle.decode_plane(queries, keys, table, lengths, columns, shard, query_len)
    arrays = (inputs.index_array(queries), inputs.index_array(keys), jnp.asarray(table))
    call = _call(shard, query_len, pdl)

    def once() -> np.ndarray:
        scores = jnp.asarray(before)
        pointer = scores.unsafe_buffer_pointer()
        out = call(*arrays, jnp.asarray(lengths, jnp.int32), scores, jnp.int32(shard.rank))
        assert out.unsafe_buffer_pointer() == pointer
        return np.asarray(out)

    actual = once()
    oracle.check_scores(actual, before, plane, eps)
    for _ in range(5):
        np.testing.assert_array_equal(once().view(np.int32), actual.view(np.int32))


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@pytest.mark.parametrize("query_len", range(1, 9))
@pytest.mark.parametrize(("world_size", "page_size"), [(4, 128), (2, 128), (4, 256), (2, 256)])
def test_integers_are_bit_exact(world_size, page_size, query_len, index_dtype):
    rng = np.random.default_rng(query_len)
    shard = oracle.Shard(query_len % world_size, world_size, page_size)
    queries = inputs.integer_queries(rng, len(_RAGGED) * query_len, index_dtype)
    keys = inputs.integer_keys(rng, 300, shard.rows, index_dtype)
    _check(
        shard,
        _RAGGED,
        query_len,
        queries,
        keys,
        columns=160,
        width=150,
        eps=0.0,
        pdl=query_len % 2 == 1,
    )


@pytest.mark.parametrize(
    "make", [inputs.normal_bytes, inputs.two_scale_bytes, inputs.normal_bfloat16]
)
@pytest.mark.parametrize(("world_size", "page_size"), [(4, 128), (2, 128), (2, 256)])
def test_sums_are_float32(world_size, page_size, make):
    rng = np.random.default_rng(4)
    shard = oracle.Shard(1, world_size, page_size)
    queries = make(rng, (2 * len(_RAGGED), 4, 128))
    keys = make(rng, (300, shard.rows, 128))
    _check(shard, _RAGGED, 2, queries, keys, columns=160, width=157, eps=_EXACT)


@pytest.mark.parametrize("query_len", [1, 4])
def test_sums_of_the_plain_definition_are_float32(query_len):
    """XLA would make fp8 products of operands that it sees converted from float8."""
    rng = np.random.default_rng(7)
    shard = oracle.Shard(1, 4, 128)
    queries = inputs.normal_bytes(rng, (query_len * len(_RAGGED), 4, 128))
    keys = inputs.normal_bytes(rng, (300, shard.rows, 128))
    table = inputs.block_table(rng, _RAGGED, 128, 157, len(keys), bad_share=0.1)
    before = inputs.any_bits(rng, (len(queries), 4, 160))
    scores = msa_icp_decode_index_score_sharded(
        inputs.index_array(queries),
        inputs.index_array(keys),
        jnp.asarray(table),
        jnp.asarray(_RAGGED, jnp.int32),
        jnp.asarray(before),
        rank=shard.rank,
        world_size=shard.world_size,
        page_size=shard.page_size,
        decode_query_len=query_len,
        max_decode_query_len=query_len,
        backend="xla",
    )
    plane = oracle.decode_plane(queries, keys, table, _RAGGED, 160, shard, query_len)
    oracle.check_scores(np.asarray(scores), before, plane, _EXACT)


def test_most_requests_most_columns():
    rng = np.random.default_rng(5)
    shard = oracle.Shard(2, 4, 128)
    lengths = (*rng.integers(-3, 900, 255).tolist(), 1 << 20)
    queries = inputs.integer_queries(rng, 256)
    keys = inputs.integer_keys(rng, 4096, shard.rows)
    _check(shard, lengths, 1, queries, keys, columns=8192, width=8192, eps=0.0)


def test_compound_pages():
    rng = np.random.default_rng(6)
    shard = oracle.Shard(3, 4, 128, row_offset=288)
    queries = inputs.integer_queries(rng, len(_RAGGED))
    keys = oracle.compound_cache(inputs.integer_keys(rng, 300, shard.rows), 352, 288)
    _check(shard, _RAGGED, 1, queries, keys, columns=160, width=157, eps=0.0)


@pytest.mark.parametrize("query_len", [1, 2, 4, 8])
@pytest.mark.parametrize(("world_size", "page_size"), [(4, 128), (2, 128), (4, 256), (2, 256)])
@pytest.mark.parametrize("tagged", [False, True])
def test_rows_without_a_plane(world_size, page_size, query_len, tagged):
    """Few values, so that scores tie; counts that need not fit the lengths."""
    rng = np.random.default_rng(query_len)
    shard = oracle.Shard(world_size - 1, world_size, page_size)
    queries = oracle.e4m3_encode(rng.integers(-1, 2, (len(_RAGGED) * query_len, 4, 128)))
    keys = oracle.e4m3_encode(rng.integers(-1, 2, (300, shard.rows, 128)))
    _check_rows(shard, _RAGGED, query_len, queries, keys, width=150, tagged=tagged)


@pytest.mark.parametrize(
    "lengths", [(1 << 20, 300000, 77), (40000,) * 32, (2500,) * 200, (70000, 0, 9000)]
)
def test_rows_of_long_and_many_requests(lengths):
    rng = np.random.default_rng(len(lengths))
    shard = oracle.Shard(1, 4, 128)
    queries = inputs.integer_queries(rng, len(lengths))
    keys = inputs.integer_keys(rng, 500, shard.rows)
    _check_rows(shard, lengths, 1, queries, keys, width=-(-min(max(lengths), 1 << 20) // 128))


def _check_rows(
    shard: oracle.Shard,
    lengths: tuple[int, ...],
    query_len: int,
    queries: np.ndarray,
    keys: np.ndarray,
    *,
    width: int,
    tagged: bool = False,
) -> None:
    rng = np.random.default_rng(2)
    tokens, columns = len(lengths) * query_len, 8192 // (shard.page_size // 128)
    held = [min(length, width * shard.page_size) for length in lengths]
    table = inputs.block_table(rng, held, shard.page_size, width, len(keys), bad_share=0.1)
    counts = np.clip(oracle.decode_num_valid_pages(lengths, query_len), 0, 9000).astype(np.int32)
    counts[::3] += rng.integers(-20, 40, counts[::3].shape, np.int32)
    generations = rng.integers(1, 9, (3, 4, tokens)).astype(np.int32) if tagged else None
    publish = functools.partial(
        msa_icp_decode_score_publish,
        world_size=shard.world_size,
        page_size=shard.page_size,
        decode_query_len=query_len,
        row_offset=shard.row_offset,
        force_begin_blocks=1,
        force_end_blocks=2,
        enable_pdl=not tagged,
    )
    call = jax.jit(
        lambda rank, generations, *arrays: publish(*arrays, rank=rank, generations=generations)
    )
    arrays = (inputs.index_array(queries), inputs.index_array(keys), jnp.asarray(table))
    arrays = (*arrays, jnp.asarray(lengths, jnp.int32), jnp.asarray(counts))
    found = call(jnp.int32(shard.rank), generations, *arrays).rows
    for _ in range(3):
        again = call(jnp.int32(shard.rank), generations, *arrays).rows
        np.testing.assert_array_equal(again, found)
    actual = np.asarray(found).reshape(4, tokens, *found.shape[3:])

    plane = oracle.decode_plane(queries, keys, table, lengths, columns, shard, query_len)
    scores = plane.scores.astype(np.float32)
    scale, offset = shard.index_scale, shard.index_offset
    want = oracle.select(scores, counts, 1, 2, index_scale=scale, index_offset=offset)
    if tagged:
        np.testing.assert_array_equal(actual[..., 0], want[..., :32])
        assert (actual[..., 1] == generations[0, ..., None] + 1).all()
    else:
        np.testing.assert_array_equal(actual, want)


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
def test_cache_over_two_gib(index_dtype):
    """Pages at both ends of a cache whose byte offsets pass 2**31 and 2**32."""
    shard, rng = oracle.Shard(1, 2, 256), np.random.default_rng(7)
    keys = inputs.integer_keys(rng, 16, shard.rows, index_dtype)
    pages = (1 << 32) // keys[0].nbytes + 64
    queries = inputs.integer_queries(rng, 1, index_dtype)
    near = np.arange(16, dtype=np.int32)[None]
    far = np.where(near < 8, near, pages - 16 + near).astype(np.int32)
    far[0, 5], near = near[0, 4], near.copy()
    near[0, 5] = near[0, 4]
    cache = jnp.zeros((pages, shard.rows, 128), index_dtype)
    cache = jax.jit(lambda c, a, b: c.at[:8].set(a).at[-8:].set(b), donate_argnums=0)(
        cache, inputs.index_array(keys[:8]), inputs.index_array(keys[8:])
    )
    lengths = (16 * 256 - 30,)
    before = np.zeros((1, 4, 16), np.float32)
    out = _call(shard, 1)(
        inputs.index_array(queries),
        cache,
        jnp.asarray(far),
        jnp.asarray(lengths, jnp.int32),
        jnp.asarray(before),
        jnp.int32(1),
    )
    plane = oracle.decode_plane(queries, keys, near, lengths, 16, shard, 1)
    oracle.check_scores(np.asarray(out), before, plane, eps=0.0)


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
def test_inputs_written_just_before(index_dtype):
    """Dependent launches: lengths, table and keys come from the kernels right before this one."""
    rng = np.random.default_rng(8)
    shard = oracle.Shard(0, 4, 128)
    lengths = np.array([5000, 300, 0, 9000], np.int32)
    queries = inputs.integer_queries(rng, 4, index_dtype)
    keys = inputs.integer_keys(rng, 200, shard.rows, index_dtype)
    table = inputs.block_table(rng, lengths.tolist(), 128, 72, 200)
    codes = jnp.dtype(keys.dtype)
    kernel = _call(shard, 1)

    @jax.jit
    def chain(flag: jax.Array, q: Any, k: Any, table: Any, lengths: Any, plane: Any) -> Any:
        first = kernel(q, k, table * 0, lengths // 3, plane, jnp.int32(0))
        # Both depend on the first call's scores, without changing with them.
        zero = jnp.where(jnp.isnan(first[0, 0, 0]), 1, 0) * flag
        k = jax.lax.bitcast_convert_type(
            jax.lax.bitcast_convert_type(k, codes) + zero.astype(codes), k.dtype
        )
        return kernel(q, k, table + zero, lengths + zero, jnp.zeros_like(plane), jnp.int32(0))

    before = np.zeros((4, 4, 72), np.float32)
    plane = oracle.decode_plane(queries, keys, table, lengths.tolist(), 72, shard, 1)
    arrays = (
        inputs.index_array(queries),
        inputs.index_array(keys),
        jnp.asarray(table),
        jnp.asarray(lengths),
    )
    for _ in range(20):
        actual = np.asarray(chain(jnp.int32(0), *arrays, jnp.asarray(before)))
        oracle.check_scores(actual, before, plane, eps=0.0)
