"""The select, merge and index-key write kernels on the GPU: the machine pieces against the oracle.

The interpreter tests hold the twins in plain Pallas to the same oracle, so both forms agree.
"""

from __future__ import annotations

import functools
from typing import Any

import hard_rows
import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from msa_icp_jax.geometry import Forced
from msa_icp_jax.ops._mosaic.launch import current_launch
from msa_icp_jax.ops.arguments import Candidates
from msa_icp_jax.ops.index_cache import kernel as index_cache
from msa_icp_jax.ops.merge import kernel as merge
from msa_icp_jax.ops.select import kernel as select

_UNTOUCHED = 77

SELECT_CASES = [
    # tokens, columns, scale, begin, end: four warps a row, a warp a row, a warp a token
    *[(20, columns, 1, 0, 1) for columns in (1, 7, 64, 200, 1024)],
    (20, 1021, 2, 2, 3),
    (14, 8192, 1, 1, 1),
    (14, 8192, 2, 0, 2),
    (14, 12287, 1, 0, 2),
    (200, 1024, 1, 1, 1),
    (200, 1000, 2, 16, 0),
    (200, 1021, 1, 0, 16),
    (140, 2048, 1, 3, 0),
    (700, 64, 1, 0, 1),
    (700, 128, 2, 2, 2),
    (700, 256, 2, 5, 4),
    (700, 203, 1, 1, 1),
    (3000, 100, 1, 9, 7),
    (3000, 256, 1, 0, 0),
    (300, 2048, 1, 0, 1),
    (300, 1501, 2, 1, 2),
    (700, 300, 1, 1, 1),
]


@pytest.mark.parametrize("form", ["fresh", "in place", "tagged"])
@pytest.mark.parametrize(("tokens", "columns", "scale", "begin", "end"), SELECT_CASES)
def test_select(tokens, columns, scale, begin, end, form):
    rng = np.random.default_rng(columns)
    offset = scale - 1
    scores = hard_rows.score_plane(tokens + 2, columns, rng)
    counts = hard_rows.visible_counts(tokens, columns, scale, rng)
    rows = np.full((4, tokens + 3, 33), _UNTOUCHED, np.int32) if form == "in place" else None
    tags = rng.integers(-(2**31), 2**31, (4, tokens)).astype(np.int32)
    kernel = functools.partial(
        select.select_rows,
        launch=current_launch(True),
    )

    def with_offset(s: Any, n: Any, r: Any, t: Any, offset: Any) -> Any:
        return kernel(s, n, r, t, Candidates(Forced(begin, end), scale, offset))

    call = jax.jit(with_offset, donate_argnums=2)

    def once() -> np.ndarray:
        arrays = (scores, counts, None if rows is None else jnp.asarray(rows))
        return np.asarray(call(*arrays, tags if form == "tagged" else None, jnp.int32(offset)))

    actual = once()
    want = oracle.select(
        scores[:tokens], counts, begin, end, index_scale=scale, index_offset=offset
    )
    if form == "tagged":
        np.testing.assert_array_equal(actual[..., 0], want[..., :32])
        assert (actual[..., 1] == tags[..., None]).all()
    else:
        np.testing.assert_array_equal(actual[:, :tokens], want)
        assert (actual[:, tokens:] == _UNTOUCHED).all()
    for _ in range(3):
        np.testing.assert_array_equal(once(), actual)


@pytest.mark.parametrize("tokens", [37, 1500])
@pytest.mark.parametrize("sources", [2, 4])
@pytest.mark.parametrize("form", ["flagged", "tagged", "prefill"])
def test_merge(form, sources, tokens):
    rng = np.random.default_rng(sources)
    heads, capacity = 4 // sources, tokens + 3
    recv = hard_rows.received_rows(sources, heads, capacity, rng)
    counts = hard_rows.visible_counts(tokens, 400, 1, rng)
    missing = rng.random(recv.shape[:3]) < 0.1
    tags = None
    if form == "tagged":
        expected = rng.integers(-(2**31), 2**31, (heads, capacity)).astype(np.int32)
        tags = oracle.next_generation(expected)
        carried = np.broadcast_to(tags[None, ..., None], (*recv.shape[:3], 32)).copy()
        for source, head, token in np.argwhere(missing):
            carried[source, head, token, rng.integers(32)] ^= 1 << rng.integers(31)
        recv = np.stack([recv[..., :32], carried], -1).astype(np.int32)
        want = oracle.merge_tagged(recv, expected, counts, 1, 2)
        tags = np.ascontiguousarray(tags[:, :tokens])
    elif form == "flagged":
        recv[..., 32] = np.where(missing, rng.choice([0, 2, -1], missing.shape), 1)
        want = oracle.merge_legacy(recv, counts, 1, 2)
    else:
        want = oracle.Merge(oracle.merge(recv, counts, 1, 2, prefill=True), recv, None, 0)
    kernel = functools.partial(
        merge.merge_rows,
        forced=Forced(1, 2),
        prefill=form == "prefill",
        launch=current_launch(True),
    )
    output = jnp.full((tokens + 2, heads, 16), _UNTOUCHED, jnp.int32)
    errors = jnp.full(1, 5, jnp.int32)
    call = jax.jit(kernel, donate_argnums=(0, 2, 3))
    output, received, errors = call(jnp.asarray(recv), counts, output, errors, tags)
    np.testing.assert_array_equal(output[:tokens], want.output)
    assert (np.asarray(output[tokens:]) == _UNTOUCHED).all()
    np.testing.assert_array_equal(received, want.received)
    assert int(errors[0]) == 5 + want.errors


@pytest.mark.parametrize(
    ("shard", "pages", "pitch", "tokens"),
    [
        (oracle.Shard(0, 2, 128), 500, 64, 777),
        (oracle.Shard(3, 4, 256), 500, 64, 33),
        (oracle.Shard(2, 4, 128, 672), 26_000, 704, 5000),  # 2.3 GB
    ],
)
def test_index_key_write(shard, pages, pitch, tokens):
    rng = np.random.default_rng(0)
    slots = rng.choice(pages * shard.page_size, tokens, replace=False).astype(np.int32)
    slots[:4] = [-1, -(2**31), 2**31 - 1, pages * shard.page_size]
    slots[4] = (pages - 1) * shard.page_size + shard.rank * shard.rows
    new_k = rng.integers(0, 256, (tokens, 128)).astype(np.uint8)

    def bits(x: Any, dtype: Any) -> jax.Array:
        return jax.lax.bitcast_convert_type(x, dtype)

    before = jnp.full((pages, pitch, 128), 0x11, jnp.uint8)
    cache = bits(before, jnp.float8_e4m3fn)
    new = bits(jnp.asarray(new_k), jnp.float8_e4m3fn)

    def write(index_k: Any, new_k: Any, slots: Any, rank: Any) -> Any:
        cache = inputs.with_keys(shard, index_k, rank)
        return index_cache.write_rows(cache, new_k, slots, launch=current_launch(False))

    call = jax.jit(write, donate_argnums=0)
    after = bits(call(cache, new, slots, jnp.int32(shard.rank)), jnp.uint8)

    page, row = slots // shard.page_size, slots % shard.page_size
    owned = (slots >= 0) & (page < pages) & (row // shard.rows == shard.rank)
    place = (page[owned], shard.row_offset + row[owned] % shard.rows)
    np.testing.assert_array_equal(after[place], new_k[owned])
    assert int((after != before).any(-1).sum()) == int((new_k[owned] != 0x11).any(-1).sum())


def test_rows_are_written_in_place():
    scores, counts = jnp.zeros((40, 4, 128)), jnp.full(40, 100, jnp.int32)
    rows = jnp.zeros((4, 50, 33), jnp.int32)
    pointer = rows.unsafe_buffer_pointer()
    kernel = functools.partial(
        select.select_rows,
        candidates=Candidates(Forced(0, 1), 1, 0),
        launch=current_launch(False),
    )
    call = jax.jit(lambda s, n, r: kernel(s, n, r, None), donate_argnums=2)
    assert call(scores, counts, rows).unsafe_buffer_pointer() == pointer
