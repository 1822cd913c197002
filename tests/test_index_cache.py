"""Writing index keys: every token lands on the rank that owns its row, and nowhere else."""

from __future__ import annotations

import functools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from inputs import INT_MAX, INT_MIN
from oracle import Shard

from msa_icp_jax import msa_icp_write_index_k

PAGES, TOKENS = 6, 24
LAYOUTS = [(2, 128, 0, 0), (4, 128, 8, 48), (2, 256, 16, 176), (4, 256, 0, 0)]
by_layout = pytest.mark.parametrize(
    ("world_size", "page_size", "row_offset", "pitch"),
    LAYOUTS,
)


@functools.cache
def writer(world_size: int, page_size: int, row_offset: int) -> Any:
    """write(index_k, new_k, slots, rank), index_k donated; one executable for every rank."""

    def write(index_k, new_k, slots, rank):
        return msa_icp_write_index_k(
            index_k,
            new_k,
            slots,
            rank=rank,
            world_size=world_size,
            page_size=page_size,
            row_offset=row_offset,
            backend="xla",
        )

    return jax.jit(write, donate_argnums=0)


def run(cache: np.ndarray, new: np.ndarray, slots: Any, shard: Shard) -> np.ndarray:
    write = writer(shard.world_size, shard.page_size, shard.row_offset)
    slots = np.asarray(slots, np.int32)
    after = write(
        inputs.index_array(cache.copy()), inputs.index_array(new), slots, jnp.int32(shard.rank)
    )
    return np.asarray(after).view(cache.dtype)


def any_bytes(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(0, 256, shape).astype(np.uint8)


def any_codes(rng: np.random.Generator, dtype: Any, *shape: int) -> np.ndarray:
    """Codes of float8 (uint8) or bfloat16 (uint16) numbers."""
    return rng.integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16], ids=["float8", "bfloat16"])
@by_layout
def test_each_rank_stores_its_own_rows_bit_for_bit(world_size, page_size, row_offset, pitch, dtype):
    rng = np.random.default_rng(0)
    pitch = pitch or page_size // world_size
    new = any_codes(rng, dtype, TOKENS, 128)  # every code travels, NaN of both signs included
    size = PAGES * page_size
    odd = [-1, -1, -2, -page_size, INT_MIN, size, size + 1, INT_MAX]
    slots = np.array([*rng.choice(size, TOKENS - len(odd), replace=False), *odd])
    slots = rng.permutation(slots)
    stored = 0
    for rank in range(world_size):
        shard = Shard(rank, world_size, page_size, row_offset)
        cache = any_codes(rng, dtype, PAGES, pitch, 128)
        after = run(cache, new, slots, shard)
        np.testing.assert_array_equal(after, oracle.write_index_k(cache, new, slots, shard))
        stored += (after != cache).any(-1).sum()
    assert stored == TOKENS - len(odd)


@by_layout
def test_page_edges(world_size, page_size, row_offset, pitch):
    """The first and last row of every rank, in the first and the last page."""
    pitch, rows = pitch or page_size // world_size, page_size // world_size
    new = np.full((TOKENS, 128), 0x38, np.uint8)
    edges = [
        page * page_size + rank * rows + row
        for page in (0, PAGES - 1)
        for rank in range(world_size)
        for row in (0, rows - 1)
    ]
    slots = edges + [-1] * (TOKENS - len(edges))
    for rank in range(world_size):
        cache = np.zeros((PAGES, pitch, 128), np.uint8)
        after = run(cache, new, slots, Shard(rank, world_size, page_size, row_offset))
        where = np.argwhere((after == 0x38).all(-1)).tolist()
        last = row_offset + rows - 1
        assert where == [[0, row_offset], [0, last], [PAGES - 1, row_offset], [PAGES - 1, last]]


def test_of_two_tokens_with_one_slot_one_stays_whole():
    cache = np.zeros((PAGES, 64, 128), np.uint8)
    new = np.arange(TOKENS, dtype=np.uint8)[:, None].repeat(128, 1)
    slots = np.full(TOKENS, 2 * 128 + 5)
    after = run(cache, new, slots, Shard(0, 2, 128)).copy()
    winner = after[2, 5]
    assert (winner == winner[0]).all()
    assert winner[0] in range(TOKENS)
    after[2, 5] = 0
    assert not after.any()


def test_no_tokens_write_nothing():
    cache = any_bytes(np.random.default_rng(1), PAGES, 64, 128)
    after = run(cache, np.zeros((0, 128), np.uint8), [], Shard(1, 2, 128))
    np.testing.assert_array_equal(after, cache)


def test_one_executable_serves_every_rank():
    rng = np.random.default_rng(3)
    cache, new = any_bytes(rng, PAGES, 32, 128), any_bytes(rng, TOKENS, 128)
    slots = np.arange(TOKENS)
    run(cache, new, slots, Shard(0, 4, 128))
    with inputs.nothing_compiles():
        for rank in (1, 2, 3):
            run(cache, new, slots + rank, Shard(rank, 4, 128))


def test_a_static_rank_gives_the_bits_of_a_traced_one():
    rng = np.random.default_rng(2)
    cache, new = any_bytes(rng, PAGES, 64, 128), any_bytes(rng, TOKENS, 128)
    slots = rng.choice(PAGES * 128, TOKENS, replace=False).astype(np.int32)
    static = jax.jit(functools.partial(writer(2, 128, 0).__wrapped__, rank=1))
    after = static(inputs.index_array(cache), inputs.index_array(new), slots)
    want = run(cache, new, slots, Shard(1, 2, 128))
    np.testing.assert_array_equal(np.asarray(after).view(np.uint8), want)


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True, database=None)
@hypothesis.given(data=st.data())
def test_any_slots(data):
    world_size, page_size, row_offset, pitch = data.draw(st.sampled_from(LAYOUTS))
    size = PAGES * page_size
    slot = st.one_of(st.integers(0, size - 1), st.integers(INT_MIN, INT_MAX), st.just(-1))
    slots = data.draw(
        st.lists(
            slot,
            min_size=TOKENS,
            max_size=TOKENS,
            unique_by=lambda s: s if 0 <= s < size else object(),
        )
    )
    rank = data.draw(st.integers(0, world_size - 1))
    shard = Shard(rank, world_size, page_size, row_offset)
    rng = np.random.default_rng(0)
    cache = any_bytes(rng, PAGES, pitch or page_size // world_size, 128)
    new = any_bytes(rng, TOKENS, 128)
    want = oracle.write_index_k(cache, new, slots, shard)
    np.testing.assert_array_equal(run(cache, new, slots, shard), want)
