"""Operands that are slices of larger buffers, at addresses of every alignment, on the GPU.

XLA may hand a slice to a kernel in place; a serving loop slices all the time (a layer of a stack, a
bucket of requests, a receive slot).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msa_icp_jax as icp

WORLD_SIZE = 4
PAGE_SIZE = 128
COLUMNS = 20
PAGES = 48
# Lengths [32] and counts [32] have 128 bytes, tables [32, 5] and rows [2, 2, 8, 33] an odd
# multiple of it: every other slice of a stack of them is aligned to 128 bytes only.
TOKENS = 32


def _inputs(rng: np.random.Generator) -> dict[str, Any]:
    lengths = rng.integers(0, 640, TOKENS).astype(np.int32)
    return {
        "q": jnp.asarray(rng.standard_normal((TOKENS, 4, 128)), jnp.float8_e4m3fn),
        "table": jnp.asarray(rng.integers(0, PAGES, (TOKENS, 5)), jnp.int32),
        "lengths": jnp.asarray(lengths),
        "counts": jnp.asarray((lengths + 127) // 128, jnp.int32),
        "scores": jnp.full((TOKENS, 4, COLUMNS), -jnp.inf, jnp.float32),
        "carrier": jnp.zeros((4, TOKENS, 33), jnp.int32),
        "output": jnp.zeros((TOKENS, 1, 16), jnp.int32),
        "errors": jnp.zeros(1, jnp.int32),
    }


def _decode(x: dict[str, Any], index_k: jax.Array) -> Any:
    scores = icp.msa_icp_decode_index_score_sharded(
        x["q"],
        index_k,
        x["table"],
        x["lengths"],
        x["scores"],
        rank=1,
        world_size=WORLD_SIZE,
        page_size=PAGE_SIZE,
        decode_query_len=1,
        max_decode_query_len=1,
        backend="mosaic",
    )
    carrier = icp.msa_icp_topk_select_prefill(
        scores, x["counts"], x["carrier"], force_end_blocks=1, backend="mosaic"
    )
    received = jnp.stack([carrier[:1]] * WORLD_SIZE)
    merged = icp.msa_icp_merge_candidates(
        received,
        x["counts"],
        x["output"],
        x["errors"],
        init_blocks=0,
        local_blocks=1,
        prefill=True,
        backend="mosaic",
    )
    return scores, carrier, merged.output


def _prefill(x: dict[str, Any], index_k: jax.Array) -> Any:
    lengths = jnp.full(TOKENS, 1, jnp.int32)
    plan = icp.msa_icp_index_score_sharded_plan_device(
        lengths,
        jnp.maximum(x["lengths"], 1),
        jnp.arange(TOKENS + 1, dtype=jnp.int32),
        jnp.arange(TOKENS + 1, dtype=jnp.int32),
        jnp.maximum(x["lengths"], 1) - 1,
        4,
        total_q=TOKENS,
        max_query_len=TOKENS,
        max_seq_len=640,
    )
    common = {"rank": 1, "tp": WORLD_SIZE, "backend": "mosaic"}
    scores = icp.msa_icp_index_score_sharded(
        x["q"], index_k, x["table"], plan, max_score=x["scores"], **common
    )
    carrier = icp.msa_icp_prefill_score_select(
        x["q"], index_k, x["table"], plan, x["counts"], x["carrier"], **common
    )
    return scores, carrier


def _merge_slot(x: dict[str, Any], index_k: jax.Array) -> Any:
    """A legacy receive slot of 8 tokens: [2, 2, 8, 33] words, an odd multiple of 128 bytes."""
    del index_k
    received = x["carrier"][:, :8].reshape(2, 2, 8, 33).at[..., 32].set(1)
    merged = icp.msa_icp_merge_candidates(
        received,
        x["counts"][:8],
        jnp.zeros((8, 2, 16), jnp.int32),
        x["errors"],
        init_blocks=0,
        local_blocks=1,
        backend="mosaic",
    )
    return merged.output, merged.recv_slot


def _same(one: Any, other: Any) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize("program", [_decode, _prefill, _merge_slot])
def test_a_layer_of_a_stack(program):
    """A scan over stacked operands, its results stacked in turn."""
    rng = np.random.default_rng(0)
    index_k = jnp.asarray(rng.standard_normal((PAGES, 32, 128)), jnp.float8_e4m3fn)
    layers = [_inputs(rng) for _ in range(3)]
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)

    @jax.jit
    def scanned(stack: Any, index_k: jax.Array) -> Any:
        return jax.lax.scan(lambda _, x: (None, program(x, index_k)), None, stack)[1]

    alone = jax.jit(program)
    expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[alone(x, index_k) for x in layers])
    _same(scanned(stack, index_k), expected)


@pytest.mark.parametrize("program", [_decode, _prefill, _merge_slot])
@pytest.mark.parametrize("first", [1, 2, 3])
def test_a_slice_of_longer_operands(program, first):
    """A part that starts `first` rows into every operand."""
    rng = np.random.default_rng(1)
    index_k = jnp.asarray(rng.standard_normal((PAGES, 32, 128)), jnp.float8_e4m3fn)
    inputs = _inputs(rng)
    longer = {
        name: jnp.concatenate([jnp.zeros((first, *x.shape[1:]), x.dtype), x])
        for name, x in inputs.items()
    }

    @jax.jit
    def sliced(longer: Any, index_k: jax.Array) -> Any:
        return program({name: x[first:] for name, x in longer.items()}, index_k)

    _same(sliced(longer, index_k), jax.jit(program)(inputs, index_k))


def test_a_running_slot_of_the_receive_storage():
    """Decode through persistent receive storage, the slot a traced value."""
    plan = icp.prepare_msa_icp_indexer(
        world_size=2,
        num_index_heads=4,
        page_size=PAGE_SIZE,
        init_blocks=0,
        local_blocks=1,
        max_decode_tokens=8,
        max_decode_query_len=1,
        max_num_batched_tokens=8,
        max_num_seqs=8,
        max_model_len=640,
        num_sparse_layers=3,
        backend="mosaic",
    )
    rng = np.random.default_rng(2)
    index_k = jnp.asarray(rng.standard_normal((2, PAGES, 64, 128)), jnp.float8_e4m3fn)
    x = _inputs(rng)
    q, table, lengths, counts = (x[name][:8] for name in ("q", "table", "lengths", "counts"))

    def decode(index_k: jax.Array, comm: Any, slot: Any) -> Any:
        output, _, comm = plan.decode(
            q, index_k, table, lengths, counts, comm=comm, slot=slot, decode_query_len=1
        )
        return output, comm

    step = jax.jit(jax.vmap(decode, in_axes=(0, 0, None), axis_name="icp"))
    comm = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), plan.init_comm())
    plain = jax.jit(
        jax.vmap(
            lambda k: plan.decode(q, k, table, lengths, counts, decode_query_len=1)[0],
            axis_name="icp",
        )
    )(index_k)
    for call in range(5):
        output, comm = step(index_k, comm, jnp.int32(call % 3))
        _same(output, plain)
    assert not np.asarray(comm.errors).any()
