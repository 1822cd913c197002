"""Sizes and limits: literal values, and the split of positions over ranks, pages and columns."""

from __future__ import annotations

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from inputs import INT_MAX

from msa_icp_jax import IndexerGeometry, msa_icp_decode_score_columns
from msa_icp_jax import geometry as geo

quick = hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)

worlds = st.sampled_from([2, 4])
page_sizes = st.sampled_from([128, 256])


def geometry(**changes: int) -> IndexerGeometry:
    limits: dict[str, int] = {
        "world_size": 4,
        "num_index_heads": 4,
        "page_size": 128,
        "init_blocks": 0,
        "local_blocks": 1,
        "max_decode_tokens": 64,
        "max_decode_query_len": 4,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 32,
        "max_model_len": 131072,
        "num_sparse_layers": 3,
    }
    return IndexerGeometry(**limits | changes)


@pytest.mark.parametrize(
    ("max_model_len", "page_size", "columns"),
    [
        (1, 128, 4),
        (512, 128, 4),
        (513, 128, 8),
        (1024, 256, 4),
        (1025, 256, 8),
        (131072, 128, 1024),
        (131072, 256, 512),
        (131073, 128, 1028),
        (1048576, 128, 8192),
        (1048577, 128, 8192),
        (1048576, 256, 4096),
        (2097153, 256, 8192),
        (INT_MAX, 128, 8192),
    ],
)
def test_score_columns(max_model_len, page_size, columns):
    assert msa_icp_decode_score_columns(max_model_len, page_size) == columns
    assert geometry(max_model_len=max_model_len, page_size=page_size).score_columns == columns


@quick
@hypothesis.given(length=st.integers(1, 1 << 20), page_size=page_sizes)
def test_the_columns_hold_every_page_and_little_more(length, page_size):
    columns = msa_icp_decode_score_columns(length, page_size)
    assert columns % 4 == 0
    assert 0 <= columns * page_size - length < 4 * page_size


@pytest.mark.parametrize(
    ("world_size", "page_size", "rows", "scale", "offsets"),
    [
        (2, 128, 64, 1, [0, 0]),
        (4, 128, 32, 1, [0, 0, 0, 0]),
        (2, 256, 128, 2, [0, 1]),
        (4, 256, 64, 2, [0, 0, 1, 1]),
    ],
)
def test_the_four_layouts(world_size, page_size, rows, scale, offsets):
    layout = geometry(world_size=world_size, page_size=page_size)
    assert layout.rows_per_page == rows
    assert layout.index_scale == scale
    assert layout.compact == (page_size == 256)
    assert layout.heads_per_rank == 4 // world_size
    assert [layout.index_offset(rank) for rank in range(world_size)] == offsets
    traced = jax.jit(layout.index_offset)
    assert [int(traced(jnp.int32(rank))) for rank in range(world_size)] == offsets


@quick
@hypothesis.given(position=st.integers(0, (1 << 20) - 1), world_size=worlds, page_size=page_sizes)
def test_every_position_has_one_owner_whose_column_names_its_block(position, world_size, page_size):
    layout = geometry(world_size=world_size, page_size=page_size)
    rows = layout.rows_per_page
    page, row = divmod(position, page_size)
    owners = [rank for rank in range(world_size) if rank * rows <= row < (rank + 1) * rows]
    (rank,) = owners
    assert layout.index_scale * page + layout.index_offset(rank) == position // 128


@quick
@hypothesis.given(a=st.integers(0, INT_MAX), b=st.sampled_from([4, 64, 128, 256, 512]))
def test_ceiling_division_never_overflows(a, b):
    assert geo.cdiv(a, b) == (a + b - 1) // b
    assert int(geo.cdiv(jnp.int32(a), b)) == (a + b - 1) // b
    assert geo.round_up(a, b) - a in range(b)


def test_the_prefill_window_stays_within_its_scratch():
    assert geometry(max_model_len=131072).window_tokens == 8192
    assert geometry(max_model_len=1048576).window_tokens == 2048
    assert geometry(max_model_len=131072, max_num_batched_tokens=100).window_tokens == 100
    assert geometry(max_model_len=1 << 24, page_size=256).window_tokens == 2048
    widest = geometry(max_model_len=1048576, max_num_batched_tokens=1 << 20)
    assert widest.window_tokens * 4 * widest.score_columns * 4 <= 256 << 20


def test_a_geometry_is_frozen_and_hashable():
    layout = geometry()
    assert hash(layout) == hash(geometry())
    assert layout == geometry()
    assert layout != geometry(world_size=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.world_size = 2  # type: ignore[misc]


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.uint32, np.uint64])
def test_columns_of_numpy_integers_are_those_of_ints(kind):
    length = min(8192, int(np.iinfo(kind).max))
    columns = msa_icp_decode_score_columns(kind(length), np.int16(128))
    assert columns == msa_icp_decode_score_columns(length, 128)
    assert type(columns) is int
