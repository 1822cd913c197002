"""The window plan: what a scorer reads about a window's segments."""

from __future__ import annotations

import functools
from collections.abc import Sequence
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

from msa_icp_jax import (
    MSAIcpScorePlan,
    msa_icp_index_score_plan_storage,
    msa_icp_index_score_sharded_plan,
    msa_icp_index_score_sharded_plan_device,
)
from msa_icp_jax.ops.prefill_plan import prefill_tiles

TOTAL_Q, MAX_QUERY, MAX_SEQ = 300, 200, 5000


@functools.cache
def builder(total_q: int = TOTAL_Q) -> Any:
    """build(qo_lens, kv_lens, qo_offset) -> plan, with exact prefix sums."""

    def build(qo_lens, kv_lens, qo_offset) -> MSAIcpScorePlan:
        return msa_icp_index_score_sharded_plan_device(
            qo_lens,
            kv_lens,
            jnp.pad(jnp.cumsum(jnp.maximum(qo_lens, 0)), (1, 0)),
            jnp.pad(jnp.cumsum(jnp.maximum(kv_lens, 0)), (1, 0)),
            qo_offset,
            4,
            total_q=total_q,
            max_query_len=MAX_QUERY,
            max_seq_len=MAX_SEQ,
            backend="xla",
        )

    return jax.jit(build)


def build(qo_lens: Sequence[int], kv_lens: Sequence[int], qo_offset: Sequence[int]):
    return builder()(*(np.array(x, np.int32) for x in (qo_lens, kv_lens, qo_offset)))


def fields(plan: MSAIcpScorePlan) -> list[list[int]]:
    leaves = (plan.qo_starts, plan.qo_lens, plan.kv_lens, plan.qo_offset)
    return [np.asarray(leaf).tolist() for leaf in leaves]


def test_host_and_device_plans_agree():
    qo_lens, kv_lens, offsets = [3, 0, 70, 1], [700, 50, 70, 1800], [600, 0, 0, 1799]
    want = [[0, 3, 3, 73], qo_lens, kv_lens, offsets]
    host = msa_icp_index_score_sharded_plan(qo_lens, kv_lens, 4, qo_offset=offsets, backend="xla")
    assert fields(host) == want
    assert (host.total_q, host.max_query_len, host.max_seq_len) == (74, 70, 1800)
    assert fields(build(qo_lens, kv_lens, offsets)) == want


def test_host_lengths_may_be_arrays_and_none():
    lens = np.array([5, 2], np.int64)
    plan = msa_icp_index_score_sharded_plan(lens, lens, 4, qo_offset=lens * 0, backend="xla")
    assert fields(plan) == [[0, 5], [5, 2], [5, 2], [0, 0]]
    assert all(leaf.dtype == jnp.int32 for leaf in jax.tree.leaves(plan))
    empty = msa_icp_index_score_sharded_plan([], [], 4, qo_offset=[], backend="xla")
    assert (empty.num_segments, empty.total_q, empty.max_query_len, empty.max_seq_len) == (0,) * 4
    assert empty.num_valid_pages().shape == (0,)
    assert np.asarray(empty.num_valid_pages(3)).tolist() == [0, 0, 0]


def test_a_prefix_hit_counts_new_tokens_only():
    """Three new tokens after 512 cached ones: offsets come from the query lengths."""
    plan = msa_icp_index_score_sharded_plan([3], [515], 4, qo_offset=[512], backend="xla")
    assert plan.total_q == 3
    assert np.asarray(plan.num_valid_pages()).tolist() == [5, 5, 5]
    for kv_len, offset in ((514, 512), (515, 513), (2, 0)):
        with pytest.raises(ValueError, match=r"qo_offset\[0\] \+ qo_segment_lens\[0\]"):
            msa_icp_index_score_sharded_plan([3], [kv_len], 4, qo_offset=[offset], backend="xla")
    idle = msa_icp_index_score_sharded_plan([0], [2], 4, qo_offset=[900], backend="xla")
    assert idle.total_q == 0  # a segment without queries may stand anywhere


def test_rows_before_position_0_count_no_blocks():
    """A negative offset keeps its value: row 150 is the first with a position that exists."""
    plan = msa_icp_index_score_sharded_plan_device(
        *(jnp.array(x, jnp.int32) for x in ([300], [1000], [0, 300], [0, 1000], [-150])),
        4,
        total_q=300,
        max_query_len=300,
        max_seq_len=1000,
        backend="xla",
    )
    want = [0] * 150 + [1] * 128 + [2] * 22
    assert np.asarray(plan.num_valid_pages()).tolist() == want


def test_a_chunk_may_end_before_its_keys_do():
    plan = msa_icp_index_score_sharded_plan([100], [4000], 4, qo_offset=[128], backend="xla")
    assert np.asarray(plan.num_valid_pages()).tolist() == [2] * 100


@pytest.mark.parametrize(
    ("qo_lens", "starts", "cut"),
    [
        ([150, 160, 10], [0, 150, 300], [150, 150, 0]),  # a sum above total_q is cut
        ([250, 60, 0], [0, 250, 300], [200, 50, 0]),  # so is a segment above its limit
        ([-5, 20, -1], [0, 0, 20], [0, 20, 0]),
        ([INT_MIN, INT_MIN, 3], [0, 0, 0], [0, 0, 3]),
        ([0, INT_MAX, 0], [0, 0, 300], [0, 200, 0]),
    ],
)
def test_device_lengths_are_kept_within_the_bounds(qo_lens, starts, cut):
    plan = build(qo_lens, [-1, 6000, INT_MAX], [0, -7, INT_MIN])
    assert fields(plan) == [starts, cut, [0, 5000, 5000], [0, -7, INT_MIN]]


def test_device_starts_are_kept_within_the_window():
    """Prefix sums are device data too: whatever they hold, no row lies outside [0, total_q]."""
    lens = jnp.full(5, 7, jnp.int32)
    starts = jnp.array([0, -3, 299, 5000, INT_MAX, 0], jnp.int32)
    plan = msa_icp_index_score_sharded_plan_device(
        lens,
        lens,
        starts,
        starts,
        lens,
        4,
        total_q=TOTAL_Q,
        max_query_len=MAX_QUERY,
        max_seq_len=MAX_SEQ,
        backend="xla",
    )
    assert fields(plan)[:2] == [[0, 0, 299, 300, 300], [7, 7, 1, 0, 0]]


def test_huge_offsets_do_not_wrap():
    plan = build([3], [5000], [INT_MAX])
    assert (np.asarray(plan.num_valid_pages())[:3] > 8192).all()
    assert fields(plan)[3][0] >= 8192 * 128


def test_one_executable_serves_every_window_of_the_same_bounds():
    build([1, 2, 3], [9, 9, 9], [0, 0, 0])
    count = jax.jit(MSAIcpScorePlan.num_valid_pages)
    count(build([1, 2, 3], [9, 9, 9], [0, 0, 0]))
    with inputs.nothing_compiles():
        plan = build([200, 0, 100], [5000, 1, 100], [4000, 9, 0])
        count(plan)
    assert isinstance(hash(jax.tree.structure(plan)), int)


def test_tiles_are_counted_by_segment():
    plan = build([0, 1, 128, 129, 0], [200] * 5, [0] * 5)
    assert np.asarray(prefill_tiles(plan, 128)).tolist() == [0, 1, 2, 4, 4]
    assert np.asarray(prefill_tiles(plan, 64)).tolist() == [0, 1, 3, 6, 6]


def test_plan_storage():
    sizes = msa_icp_index_score_plan_storage(num_qo_heads=4, total_q=8192, batch=32)
    assert set(sizes) == {"work_range_numel", "work_info_numel", "workspace_bytes"}
    if jax.default_backend() == "cpu":
        assert sizes == {"work_range_numel": 0, "work_info_numel": 0, "workspace_bytes": 512}
    empty = msa_icp_index_score_plan_storage(num_qo_heads=4, total_q=0, batch=0)
    assert empty["workspace_bytes"] == 0


@hypothesis.settings(max_examples=80, deadline=None, derandomize=True, database=None)
@hypothesis.given(
    segments=st.lists(
        st.tuples(st.integers(-3, MAX_QUERY), st.integers(-2, 6000), st.integers(-300, 1 << 20)),
        min_size=5,
        max_size=5,
    )
)
def test_visible_blocks_and_starts_of_any_segments(segments):
    qo_lens, kv_lens, offsets = ([s[i] for s in segments] for i in range(3))
    plan = build(qo_lens, kv_lens, offsets)
    want = oracle.prefill_num_valid_pages(qo_lens, offsets, TOTAL_Q)
    np.testing.assert_array_equal(plan.num_valid_pages(), want)
    starts, lens, keys, _ = fields(plan)
    end = 0
    for start, length, asked, kv, kv_asked in zip(
        starts, lens, qo_lens, keys, kv_lens, strict=True
    ):
        assert start == min(end, TOTAL_Q)
        assert length == min(max(asked, 0), TOTAL_Q - start)
        assert kv == min(max(kv_asked, 0), MAX_SEQ)
        end += max(asked, 0)


def test_traced_lengths_are_pointed_to_the_device_plan():
    def under_jit(lengths):
        return msa_icp_index_score_sharded_plan(lengths, [9], 4, qo_offset=[0], backend="xla")

    with pytest.raises(TypeError, match=r"qo_segment_lens .* traced .*sharded_plan_device"):
        jax.jit(under_jit)(np.array([1], np.int32))
