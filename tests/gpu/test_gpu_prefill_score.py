"""The prefill kernels on the GPU: the machine pieces against the oracle.

The interpreter tests hold the twins in plain Pallas to the same oracle, so both forms agree.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from msa_icp_jax.geometry import Forced
from msa_icp_jax.ops._mosaic.launch import Launch, current_launch, current_target
from msa_icp_jax.ops.arguments import Candidates, Shard
from msa_icp_jax.ops.prefill_plan import MSAIcpScorePlan, balance
from msa_icp_jax.ops.prefill_plan import msa_icp_index_score_sharded_plan_device as device_plan
from msa_icp_jax.ops.prefill_score import config, kernel
from msa_icp_jax.ops.select.kernel import select_rows

_EPS = {"fast": 2**-10, "exact": 2**-17}
_FLOAT8, _BF16 = "float8_e4m3fn", "bfloat16"
_FORMS = pytest.mark.parametrize(
    ("precision", "index_dtype"), [("fast", _FLOAT8), ("exact", _FLOAT8), ("fast", _BF16)]
)
_SHARDS = [(4, 128), (2, 128), (4, 256), (2, 256)]
# Query tokens, first position, keys: prefix hits, nothing, a whole prompt, a lone late token.
_QO, _OFFSET, _KV = [3, 0, 70, 1, 150], [600, 0, 0, 19999, 5000], [700, 50, 70, 20000, 5100]
_TAIL = 5  # query rows of no segment


def _plan(qo: list[int], offset: list[int], kv: list[int], tail: int) -> MSAIcpScorePlan:
    starts, key_starts = (np.concatenate([[0], np.cumsum(x)]) for x in (qo, kv))
    arrays = (jnp.asarray(x, jnp.int32) for x in (qo, kv, starts, key_starts, offset))
    total = sum(qo) + tail
    plan = device_plan(*arrays, 4, total_q=total, max_query_len=total, max_seq_len=1 << 20)
    return replace(plan, work=balance.prefill_work(plan, current_target().sms))


def _rows(q: Any, shard: Shard, *arrays: Any, forced: Forced, columns: int, launch: Launch) -> Any:
    """Candidate rows, selected from a plane that is made for them."""
    *others, counts, carrier = arrays
    plane = jax.ShapeDtypeStruct((counts.shape[0], 4, columns), jnp.float32)
    scores = kernel.candidate_scores(q, shard, *others, plane, counts, forced, launch)
    launch = replace(launch, pdl=True)
    return select_rows(scores, counts, carrier, None, shard.candidates(forced), launch)


def _jitted(run: Any, shard: oracle.Shard, launch: Launch, *, donate: int, **options: Any) -> Any:
    """A kernel under jit; the rank is traced, the buffer donated."""
    call = functools.partial(run, launch=launch, **options)

    def with_rank(rank: Any, q: Any, k: Any, *arrays: Any) -> Any:
        return call(q, inputs.with_keys(shard, k, rank), *arrays)

    return jax.jit(with_rank, donate_argnums=donate + 1)


def _repeat(call: Any, rank: int, arrays: tuple[Any, ...], donate: int) -> np.ndarray:
    """The result of a call in place; five more give the same bits."""

    def once() -> np.ndarray:
        given = [jnp.array(x) if i == donate else x for i, x in enumerate(arrays)]
        pointer = given[donate].unsafe_buffer_pointer()
        out = call(jnp.int32(rank), *given)
        assert out.unsafe_buffer_pointer() == pointer
        return np.asarray(out)

    first = once()
    for _ in range(5):
        np.testing.assert_array_equal(once().view(np.int32), first.view(np.int32))
    return first


def _scores(
    shard: oracle.Shard,
    queries: np.ndarray,
    keys: np.ndarray,
    columns: int,
    precision: str,
    *,
    sm_scale: float = 1.0,
    initialize: bool = True,
    pdl: bool = True,
) -> tuple[np.ndarray, np.ndarray, oracle.ScorePlane]:
    rng = np.random.default_rng(1)
    width = -(-max(_KV) // shard.page_size)
    table = inputs.block_table(rng, _KV, shard.page_size, width, len(keys), bad_share=0.1)
    before = inputs.any_bits(rng, (len(queries) + 3, 4, columns))
    call = _jitted(
        kernel.prefill_scores,
        shard,
        current_launch(pdl, precision),
        donate=4,
        sm_scale=sm_scale,
        initialize=initialize,
    )
    arrays = (inputs.index_array(queries), inputs.index_array(keys), jnp.asarray(table))
    actual = _repeat(call, shard.rank, (*arrays, _plan(_QO, _OFFSET, _KV, _TAIL), before), donate=4)
    plane = oracle.prefill_plane(
        queries,
        keys,
        table,
        _QO,
        _KV,
        _OFFSET,
        columns,
        shard,
        sm_scale=sm_scale,
        initialize=initialize,
    )
    return actual, before, plane


@_FORMS
@pytest.mark.parametrize(("world_size", "page_size"), _SHARDS)
def test_integer_scores_are_bit_exact(world_size, page_size, precision, index_dtype):
    rng = np.random.default_rng(page_size)
    shard = oracle.Shard(world_size - 1, world_size, page_size)
    queries = inputs.integer_queries(rng, sum(_QO) + _TAIL, index_dtype)
    keys = inputs.integer_keys(rng, 300, shard.rows, index_dtype)
    actual, before, plane = _scores(shard, queries, keys, 161, precision)
    oracle.check_scores(actual, before, plane, 0.0)


@pytest.mark.parametrize(("world_size", "page_size"), _SHARDS)
def test_infinities_are_values_and_their_nan_products_are_skipped(world_size, page_size):
    """Of single queries: infinity times zero, and sums of both infinities."""
    rng = np.random.default_rng(page_size)
    shard = oracle.Shard(world_size - 1, world_size, page_size)
    queries = inputs.integer_queries(rng, sum(_QO) + _TAIL, _BF16)
    keys = inputs.integer_keys(rng, 300, shard.rows, _BF16)
    for element, infinity in ((6, 0x7F80), (7, 0xFF80), (8, 0x7F80)):
        keys[rng.random(keys.shape[:2]) < 0.01, element] = infinity
    queries[5, 2, 9] = 0x7F80
    actual, before, plane = _scores(shard, queries, keys, 160, "fast", initialize=False)
    assert np.isposinf(plane.scores).any()
    oracle.check_scores(actual, before, plane, 0.0)


@pytest.mark.parametrize(
    ("make", "precision"),
    [
        (inputs.normal_bytes, "fast"),
        (inputs.normal_bytes, "exact"),
        (inputs.two_scale_bytes, "fast"),
        (inputs.two_scale_bytes, "exact"),
        (inputs.normal_bfloat16, "exact"),
    ],
)
def test_sums_are_as_precise_as_promised(make, precision):
    rng = np.random.default_rng(3)
    shard = oracle.Shard(1, 4, 128)
    queries = make(rng, (sum(_QO) + _TAIL, 4, 128))
    keys = make(rng, (300, shard.rows, 128))
    actual, before, plane = _scores(
        shard, queries, keys, 160, precision, sm_scale=-0.5, initialize=False, pdl=False
    )
    oracle.check_scores(actual, before, plane, _EPS[precision])


@pytest.mark.parametrize("index_dtype", [_FLOAT8, _BF16])
def test_compound_pages(index_dtype):
    rng = np.random.default_rng(4)
    shard = oracle.Shard(3, 4, 128, row_offset=288)
    queries = inputs.integer_queries(rng, sum(_QO) + _TAIL, index_dtype)
    keys = inputs.integer_keys(rng, 300, shard.rows, index_dtype)
    keys = oracle.compound_cache(keys, 352, 288)
    actual, before, plane = _scores(shard, queries, keys, 160, "fast", initialize=False)
    oracle.check_scores(actual, before, plane, 0.0)


@pytest.mark.parametrize("index_dtype", [_FLOAT8, _BF16])
def test_cache_over_two_gib(index_dtype):
    """A tile's pages at both ends of a cache whose byte offsets pass 2**31 and 2**32."""
    shard, rng = oracle.Shard(1, 2, 256), np.random.default_rng(5)
    keys = inputs.integer_keys(rng, 16, shard.rows, index_dtype)
    pages = (1 << 32) // keys[0].nbytes + 64
    queries = inputs.integer_queries(rng, 64, index_dtype)
    table = np.concatenate([np.arange(8), np.arange(pages - 8, pages)]).astype(np.int32)[None]
    plan = _plan([64], [4032], [4096], 0)
    cache = jnp.zeros((pages, shard.rows, 128), keys.dtype)
    cache = jax.jit(lambda c, k: c.at[:8].set(k[:8]).at[-8:].set(k[8:]), donate_argnums=0)(
        cache, keys
    )
    before = np.zeros((64, 4, 16), np.float32)
    call = _jitted(
        kernel.prefill_scores,
        shard,
        current_launch(True, "fast"),
        donate=4,
        sm_scale=1.0,
        initialize=True,
    )
    cache = jax.lax.bitcast_convert_type(cache, jnp.dtype(index_dtype))
    actual = call(
        jnp.int32(1),
        inputs.index_array(queries),
        cache,
        jnp.asarray(table),
        plan,
        jnp.asarray(before),
    )
    plane = oracle.prefill_plane(
        queries, keys, np.arange(16)[None], [64], [4096], [4032], 16, shard
    )
    oracle.check_scores(np.asarray(actual), before, plane, 0.0)


@pytest.mark.parametrize("data", ["integers", "normal", "zeros"])
@pytest.mark.parametrize(("world_size", "page_size"), _SHARDS)
@pytest.mark.parametrize(("begin", "end"), [(0, 1), (2, 3)])
def test_rows_are_the_selection_of_the_kernels_own_scores(world_size, page_size, begin, end, data):
    """Bit for bit, ties included: 20,000 positions are cut over many CTAs."""
    rng = np.random.default_rng(6)
    shard = oracle.Shard(world_size - 1, world_size, page_size)
    tokens = sum(_QO) + _TAIL
    queries = {
        "integers": inputs.integer_queries(rng, tokens),
        "normal": inputs.normal_bytes(rng, (tokens, 4, 128)),
        "zeros": np.zeros((tokens, 4, 128), np.uint8),
    }[data]
    keys = inputs.normal_bytes(rng, (300, shard.rows, 128))
    if data == "integers":
        keys = inputs.integer_keys(rng, 300, shard.rows)
    columns = -(-max(_KV) // shard.page_size)
    scores, _, _ = _scores(shard, queries, keys, columns, "fast")
    table = inputs.block_table(
        np.random.default_rng(1), _KV, page_size, columns, len(keys), bad_share=0.1
    )
    counts = oracle.prefill_num_valid_pages(_QO, _OFFSET, tokens)
    before = rng.integers(-9, 9, (4, tokens + 2, 33)).astype(np.int32)
    call = _jitted(
        _rows,
        shard,
        current_launch(True, "fast"),
        donate=5,
        forced=Forced(begin, end),
        columns=columns,
    )
    arrays = (inputs.index_array(queries), inputs.index_array(keys), jnp.asarray(table))
    actual = _repeat(
        call,
        shard.rank,
        (*arrays, _plan(_QO, _OFFSET, _KV, _TAIL), jnp.asarray(counts), before),
        donate=5,
    )
    expected = oracle.select(
        scores[:tokens],
        counts,
        begin,
        end,
        index_scale=shard.index_scale,
        index_offset=shard.index_offset,
    )
    np.testing.assert_array_equal(actual[:, :tokens], expected)
    np.testing.assert_array_equal(actual[:, tokens:], before[:, tokens:])


@pytest.mark.parametrize("form", ["fast", "exact", "integers", "bfloat16"])
@pytest.mark.parametrize(("world_size", "page_size"), _SHARDS)
def test_rows_of_a_large_window(monkeypatch, world_size, page_size, form):
    """Every CTA has a share: 4,160 tokens of three segments. Integers: with integer maxima."""
    monkeypatch.setattr(config, "LONG_STEPS", 0 if form == "integers" else float("inf"))
    precision = "exact" if form == "exact" else "fast"
    rng = np.random.default_rng(7)
    shard = oracle.Shard(0, world_size, page_size)
    qo, offset, kv = [3000, 60, 1100], [30000, 0, 12345], [33000, 60, 13445]
    tokens, scale = sum(qo), shard.index_scale
    columns = -(-max(kv) // page_size)
    make = inputs.normal_bfloat16 if form == "bfloat16" else inputs.normal_bytes
    keys, queries = make(rng, (600, shard.rows, 128)), make(rng, (tokens, 4, 128))
    if form == "integers":  # whole pages of negative scores, others of positive ones, a NaN key
        queries &= 0x7F
        keys[::3] |= 0x80
        keys[1::3] &= 0x7F
        keys[50, 3, 7] = 0xFF
    keys, queries = inputs.index_array(keys), inputs.index_array(queries)
    table = jnp.asarray(inputs.block_table(rng, kv, page_size, columns, 600))
    plan = _plan(qo, offset, kv, 0)
    counts = jnp.asarray(oracle.prefill_num_valid_pages(qo, offset, tokens))
    forced, launch = Forced(1, 2), current_launch(True, precision)
    score = _jitted(kernel.prefill_scores, shard, launch, donate=4, sm_scale=1.0, initialize=False)
    select = _jitted(_rows, shard, launch, donate=5, columns=columns, forced=forced)
    plane = jnp.full((tokens, 4, columns), jnp.nan, jnp.float32)
    plane = score(jnp.int32(0), queries, keys, table, plan, plane)
    candidates = Candidates(forced, scale, shard.index_offset)
    want = select_rows(plane, counts, None, None, candidates, current_launch(False))
    carrier = jnp.zeros((4, tokens, 33), jnp.int32)
    rows = _repeat(select, 0, (queries, keys, table, plan, counts, carrier), donate=5)
    np.testing.assert_array_equal(rows, want)
