"""Temporary memory of the chains at serving sizes: compiled from shapes alone, nothing is run."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from chains import AXIS, make_mesh, make_plan
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from msa_icp_jax import MSAIcpIndexerPlan, msa_icp_write_index_k

GIB = 1 << 30
CONTEXT = 131072
TOKENS = 8192
REQUESTS = 32
PAGES = (1_000, 100_000)


def serving_plan(**changes: Any) -> MSAIcpIndexerPlan:
    limits = {
        "max_decode_tokens": REQUESTS,
        "max_decode_query_len": 1,
        "max_num_batched_tokens": TOKENS,
        "max_num_seqs": REQUESTS,
        "max_model_len": CONTEXT,
    }
    return make_plan(4, 128, **limits | changes)


def shape(dtype: Any, *sizes: int, sharding: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)


def prefill_memory(plan: MSAIcpIndexerPlan, pages: int, fused: bool) -> Any:
    """Memory of prefill_local of one full window on one rank."""
    geometry = plan.geometry
    assert plan.prefill_window_tokens() == TOKENS
    lengths = shape(jnp.int32, geometry.max_num_seqs)

    def window(qo: jax.Array, kv: jax.Array, offset: jax.Array) -> Any:
        bounds = {"total_q": TOKENS, "max_query_len": TOKENS, "max_seq_len": CONTEXT}
        return plan.prefill_window_plan(qo, kv, offset, **bounds)

    def local(*arrays: Any) -> Any:
        return plan.prefill_local(*arrays, fused=fused)

    arguments = (
        shape(jnp.float8_e4m3fn, TOKENS, 4, 128),
        shape(jnp.float8_e4m3fn, pages, geometry.rows_per_page, 128),
        shape(jnp.int32, geometry.max_num_seqs, CONTEXT // geometry.page_size),
        jax.eval_shape(window, lengths, lengths, lengths),
        shape(jnp.float32, *plan.prefill_score_shape()),
        shape(jnp.int32, TOKENS),
        shape(jnp.int32, 4, TOKENS, 33),
    )
    return jax.jit(local, donate_argnums=(4, 6)).lower(*arguments).compile().memory_analysis()


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_prefill_temporaries_do_not_grow_with_the_cache(fused: bool) -> None:
    plan = serving_plan(rank=1)
    few, many = (prefill_memory(plan, pages, fused) for pages in PAGES)
    assert few.temp_size_in_bytes == many.temp_size_in_bytes
    assert few.temp_size_in_bytes < GIB
    scratch = TOKENS * 4 * plan.geometry.score_columns * 4
    carrier = 4 * TOKENS * 33 * 4
    assert scratch <= 256 << 20
    assert many.alias_size_in_bytes == scratch + carrier
    assert many.output_size_in_bytes - many.alias_size_in_bytes < 1024  # the tuple of pointers


def decode_memory(plan: MSAIcpIndexerPlan, pages: int, fused: bool) -> Any:
    """Memory of one device of a whole decode step over four."""
    mesh, geometry = make_mesh(4), plan.geometry

    def over(spec: P, dtype: Any, *sizes: int) -> jax.ShapeDtypeStruct:
        return shape(dtype, *sizes, sharding=NamedSharding(mesh, spec))

    arguments = (
        over(P(), jnp.float8_e4m3fn, REQUESTS, 4, 128),
        over(P(None, AXIS), jnp.float8_e4m3fn, pages, geometry.page_size, 128),
        over(P(), jnp.int32, REQUESTS, CONTEXT // geometry.page_size),
        over(P(), jnp.int32, REQUESTS),
        over(P(), jnp.int32, REQUESTS),
        over(P(None, None, AXIS), jnp.float32, REQUESTS, 4, 4 * geometry.score_columns),
        over(P(None, AXIS), jnp.int32, REQUESTS, 4, 16),
    )
    program = plan.decode_program(mesh, decode_query_len=1, fused=fused)
    return program.lower(*arguments).compile().memory_analysis()


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_decode_temporaries_do_not_grow_with_the_cache(fused: bool) -> None:
    plan = serving_plan()
    few, many = (decode_memory(plan, pages, fused) for pages in PAGES)
    assert few.temp_size_in_bytes == many.temp_size_in_bytes
    assert few.temp_size_in_bytes < GIB
    scores, output = REQUESTS * 4 * plan.geometry.score_columns * 4, REQUESTS * 16 * 4
    assert many.alias_size_in_bytes == scores + output


def test_index_key_write_is_in_place() -> None:
    """The donated cache is aliased whole and never copied.

    XLA on CPU has no float8 data movement, so there the write is one pass over the cache with a
    map of 4 bytes for each row of 128; on a GPU it is a scatter.
    """
    pages, rows = 1_000, 32

    def write(index_k: jax.Array, new_k: jax.Array, slots: jax.Array) -> jax.Array:
        options: dict[str, Any] = {"world_size": 4, "page_size": 128, "backend": "xla"}
        return msa_icp_write_index_k(index_k, new_k, slots, rank=1, **options)

    lowered = jax.jit(write, donate_argnums=0).lower(
        shape(jnp.float8_e4m3fn, pages, rows, 128),
        shape(jnp.float8_e4m3fn, TOKENS, 128),
        shape(jnp.int32, TOKENS),
    )
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes == memory.output_size_in_bytes == pages * rows * 128
    assert memory.temp_size_in_bytes < pages * rows * 128 // 8
