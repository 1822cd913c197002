"""The index-key write kernel's logic (plain Pallas, in the interpreter) against the oracle."""

from __future__ import annotations

import functools
from typing import Any

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import oracle
import pytest
import race_free

from msa_icp_jax.ops.index_cache import kernel as write_kernel

Array = npt.NDArray[Any]


def as_keys(raw: Any) -> jax.Array:
    dtype = jnp.float8_e4m3fn if raw.dtype == jnp.uint8 else jnp.bfloat16
    return jax.lax.bitcast_convert_type(jnp.asarray(raw), dtype)


def write(index_k: Array, new_k: Array, slots: Array, shard: oracle.Shard, ctas: int) -> Array:
    """Runs the kernel on raw codes, the rank traced."""
    kernel = functools.partial(
        write_kernel.write_rows,
        launch=race_free.interpreter(ctas),
    )

    def call(index_k: jax.Array, new_k: jax.Array, slots: jax.Array, rank: jax.Array) -> jax.Array:
        cache = inputs.with_keys(shard, as_keys(index_k), rank)
        written = kernel(cache, as_keys(new_k), slots)
        return jax.lax.bitcast_convert_type(written, index_k.dtype)

    return race_free.run(call, index_k, new_k, slots, jnp.int32(shard.rank))


CASES = [
    # shard, pitch in rows, tokens, ctas
    pytest.param(oracle.Shard(0, 2, 128), 64, 40, 4, id="w2-p128"),
    pytest.param(oracle.Shard(3, 4, 128), 32, 150, 4, id="w4-p128"),
    pytest.param(oracle.Shard(1, 2, 256), 128, 70, 16, id="w2-p256"),
    pytest.param(oracle.Shard(2, 4, 256, 24), 96, 1, 1, id="w4-p256-compound-one-token"),
    pytest.param(oracle.Shard(1, 4, 128, 136), 176, 90, 3, id="w4-p128-compound"),
]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16], ids=["float8", "bfloat16"])
@pytest.mark.parametrize(("shard", "pitch", "tokens", "ctas"), CASES)
def test_owned_rows_are_stored_and_nothing_else(shard, pitch, tokens, ctas, dtype):
    rng = np.random.default_rng(tokens)
    pages, largest = 5, np.iinfo(dtype).max
    index_k = rng.integers(0, largest, (pages, pitch, 128), dtype, endpoint=True)
    new_k = rng.integers(0, largest, (tokens, 128), dtype, endpoint=True)
    slots = rng.permutation(pages * shard.page_size)[:tokens].astype(np.int32)
    out_of_range = [-1, -128, -(2**31), pages * shard.page_size, 2**31 - 1]
    slots[1 : 1 + len(out_of_range)] = out_of_range[: max(tokens - 1, 0)]
    slots[0] = (pages - 1) * shard.page_size + shard.rank * shard.rows  # owned for certain
    actual = write(index_k, new_k, slots, shard, ctas)
    np.testing.assert_array_equal(actual, oracle.write_index_k(index_k, new_k, slots, shard))
    assert (actual != index_k).any()


def test_ranks_together_store_every_token():
    rng = np.random.default_rng(0)
    new_k = rng.integers(1, 256, (256, 128)).astype(np.uint8)
    slots = rng.permutation(256).astype(np.int32)
    empty = np.zeros((2, 32, 128), np.uint8)
    parts = [write(empty, new_k, slots, oracle.Shard(r, 4, 128), 8) for r in range(4)]
    whole = np.stack(parts, axis=1).reshape(256, 128)
    np.testing.assert_array_equal(whole[slots], new_k)
