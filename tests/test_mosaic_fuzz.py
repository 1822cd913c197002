"""Chains of the kernels in interpret mode, where any race fails the test: all ranks, any metadata.

More examples: FUZZ_EXAMPLES=30.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import chains
import hard_rows
import hostile
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import race_free
from chains import Ranks
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from msa_icp_jax import msa_icp_merge_candidates, msa_icp_write_index_k
from msa_icp_jax.ops._mosaic import launch

WIDTH, PAGES = 5, 8
GROUPS = pytest.mark.parametrize(("world_size", "page_size"), [(2, 128), (4, 256)])

fuzz = hostile.fuzz(
    examples=3,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],  # no shrinking: it takes hours
)


@pytest.fixture(autouse=True, scope="module")
def _simulated_gpu() -> Iterator[None]:
    """A GPU of two CTAs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "current_target", lambda: race_free.interpreter(2).target)
        yield


@functools.cache
def ranks_of(world_size: int, page_size: int, **changes: Any) -> Ranks:
    limits = {"max_model_len": 4 * page_size, "max_num_seqs": 2, "max_num_batched_tokens": 64}
    plan = chains.make_plan(world_size, page_size, backend="mosaic", **limits | changes)
    return Ranks(plan, None)


def without_races(call: Any, *arguments: Any, **options: Any) -> Any:
    try:
        found = call(*arguments, **options)
        assert not gpu_callbacks.get_races().races_found
        return found
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()


@GROUPS
def test_an_ordinary_decode(world_size: int, page_size: int) -> None:
    ranks = ranks_of(world_size, page_size)
    case = chains.random_decode([500, 0], 1, page_size, pages=PAGES, width=WIDTH)
    found = without_races(ranks.decode, case)
    chains.check_decoded(ranks.plan, case, found, fused=False)


@GROUPS
@fuzz
@hypothesis.given(data=st.data())
def test_decode(world_size: int, page_size: int, data: Any) -> None:
    ranks = ranks_of(world_size, page_size)
    case = hostile.decode_case(data.draw, ranks.plan, 2, 1, width=WIDTH, pages=PAGES)
    found = without_races(ranks.decode, case)
    chains.check_decoded(ranks.plan, case, found, fused=False)


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # inf - inf
def test_an_ordinary_prefill() -> None:
    ranks = ranks_of(2, 128)
    case = chains.random_prefill([(4, 300, 304), (6, 0, 6)], 12, 128, pages=PAGES, width=WIDTH)
    found = without_races(ranks.prefill, case, fused=False)
    chains.check_prefilled(ranks.plan, case, found, fused=False)


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # inf - inf
@pytest.mark.parametrize(
    ("fused", "index_dtype"),
    [(False, "float8_e4m3fn"), (True, "bfloat16")],
)
@fuzz
@hypothesis.given(data=st.data())
def test_prefill(fused: bool, index_dtype: str, data: Any) -> None:
    ranks = ranks_of(2, 128, index_dtype=index_dtype)
    case = hostile.prefill_case(data.draw, ranks.plan, 2, 12, width=WIDTH, pages=PAGES)
    found = without_races(ranks.prefill, case, fused=fused)
    chains.check_prefilled(ranks.plan, case, found, fused=fused)


@pytest.mark.parametrize("tagged", [False, True], ids=["legacy", "tagged"])
@fuzz
@hypothesis.given(data=st.data())
def test_merge(tagged: bool, data: Any) -> None:
    """Rows, flags, tags and counts of any int32."""
    sources, heads, tokens, capacity = 4, 1, 6, 7
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    received = hard_rows.received_rows(sources, heads, capacity, rng)
    ids = received[..., 16:32]
    ids[rng.random(ids.shape) < 0.1] = data.draw(hostile.near(-1, 9000))
    counts = hostile.vector(data.draw, hostile.near(-1, 400), tokens)
    expected = hostile.vector(data.draw, hostile.INT32, heads, capacity)
    if tagged:
        tags = np.broadcast_to(expected, (sources, heads, capacity))
        received, _ = oracle.tag_rows(received, tags)
        torn = rng.random(received.shape[:-1]) < 0.005
        received[torn, 1] = data.draw(hostile.INT32)
        want = oracle.merge_tagged(received, expected, counts, 1, 2)
    else:
        flags = received[..., 32]
        flags[:] = np.where(rng.random(flags.shape) < 0.9, 1, data.draw(hostile.INT32))
        want = oracle.merge_legacy(received, counts, 1, 2)

    def call(received: Any, counts: Any, output: Any, errors: Any, expected: Any) -> Any:
        options = {"init_blocks": 1, "local_blocks": 2, "backend": "mosaic"}
        if tagged:
            options["expected_generations"] = expected
        return msa_icp_merge_candidates(received, counts, output, errors, **options)

    output = np.full((capacity, heads, 16), chains.OLD_WORD, np.int32)
    found = race_free.run(call, received, counts, output, np.zeros(1, np.int32), expected)
    np.testing.assert_array_equal(found.output[:tokens], want.output)
    assert (found.output[tokens:] == chains.OLD_WORD).all()
    np.testing.assert_array_equal(found.recv_slot, want.received)
    assert found.errors.tolist() == [want.errors]
    if tagged:
        np.testing.assert_array_equal(found.expected_generations, want.expected)


@fuzz
@hypothesis.given(data=st.data())
def test_write_index_k(data: Any) -> None:
    """Slots of any int32; only those that this rank owns are stored."""
    pages, tokens, shard = 3, 20, oracle.Shard(data.draw(st.integers(0, 3)), 4, 128)
    inside = st.lists(st.integers(-1, pages * 128), min_size=tokens, max_size=tokens, unique=True)
    slots = np.array(data.draw(inside), np.int64)
    outside = np.array(data.draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens)))
    huge = hostile.vector(data.draw, hostile.INT32, tokens)
    outside &= (huge < 0) | (huge >= pages * 128)
    slots = np.where(outside, huge, slots).astype(np.int32)
    rng = np.random.default_rng(0)
    index_k = rng.integers(0, 256, (pages, 32, 128)).astype(np.uint8)
    new_k = rng.integers(0, 256, (tokens, 128)).astype(np.uint8)

    def call(index_k: Any, new_k: Any, slots: Any) -> Any:
        cache, new = (jax.lax.bitcast_convert_type(x, jnp.float8_e4m3fn) for x in (index_k, new_k))
        sizes = {"rank": shard.rank, "world_size": 4, "page_size": 128}
        written = msa_icp_write_index_k(cache, new, slots, backend="mosaic", **sizes)
        return jax.lax.bitcast_convert_type(written, jnp.uint8)

    found = race_free.run(call, index_k, new_k, slots)
    np.testing.assert_array_equal(found, oracle.write_index_k(index_k, new_k, slots, shard))
