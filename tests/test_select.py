"""The portable select against the reference and literal answers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import hard_rows
import hypothesis
import hypothesis.strategies as st
import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from inputs import INT_MAX, INT_MIN

from msa_icp_jax import msa_icp_topk_select_prefill, msa_icp_topk_select_publish

TOKENS, ROOM = 36, 40  # the planes, carriers and counters have four rows to spare
INF, NAN, NEG_NAN = np.float32(np.inf), np.float32(np.nan), hard_rows.NEG_NAN
MINUS_INF_WORD = -8388608


@functools.cache
def publisher(begin: int, end: int, scale: int = 1, world_size: int = 4) -> Any:
    """publish(scores, nvp, generations, slot, offset, rank) -> MSAIcpRows."""

    def publish(scores, nvp, generations, slot, offset, rank):
        return msa_icp_topk_select_publish(
            scores,
            nvp,
            rank=rank,
            world_size=world_size,
            heads_per_rank=4 // world_size,
            force_begin_blocks=begin,
            force_end_blocks=end,
            index_scale=scale,
            index_offset=offset,
            generations=generations,
            slot=slot,
            backend="xla",
        )

    return jax.jit(publish)


@functools.cache
def prefill_selector(begin: int, end: int, scale: int = 1) -> Any:
    """select(scores, nvp, carrier, offset) -> carrier, donated."""

    def select(scores, nvp, carrier, offset):
        return msa_icp_topk_select_prefill(
            scores,
            nvp,
            carrier,
            force_begin_blocks=begin,
            force_end_blocks=end,
            index_scale=scale,
            index_offset=offset,
            backend="xla",
        )

    return jax.jit(select, donate_argnums=2)


def publish_rows(scores: Any, nvp: Any, begin: int, end: int, scale: int = 1, offset: int = 0):
    """Head-major rows [4, T, 33]."""
    publish = publisher(begin, end, scale)
    sent = publish(scores, nvp, None, jnp.int32(0), jnp.int32(offset), jnp.int32(1))
    assert sent.generations is None
    return np.asarray(sent.rows).reshape(4, -1, 33)


def select_row(row: Any, count: int, begin: int = 0, end: int = 0) -> tuple[list[int], np.ndarray]:
    """Ids and raw score words of one row, from four rows of a plane that hold it."""
    plane = np.asarray(row, np.float32)[None, None].repeat(4, 1)
    found = publish_rows(plane, np.array([count], np.int32), begin, end)
    assert (found[..., 32] == 1).all()
    np.testing.assert_array_equal(found, found[:1].repeat(4, 0))
    return found[0, 0, 16:32].tolist(), found[0, 0, :16]


def bits(*values: float) -> list[int]:
    return np.array(values, np.float32).view(np.int32).tolist()


# ---- against the reference ----


@pytest.mark.parametrize(
    ("columns", "scale", "begin", "end"),
    [
        (1, 1, 0, 0),
        (24, 1, 1, 2),
        (130, 2, 8, 8),
        (1023, 1, 0, 1),
        (1024, 1, 16, 0),
        (2049, 2, 0, 16),
        (8192, 1, 1, 1),
    ],
)
def test_hard_rows_bit_for_bit(columns, scale, begin, end):
    rng = np.random.default_rng(columns)
    plane = hard_rows.score_plane(ROOM, columns, rng)
    nvp = hard_rows.visible_counts(TOKENS, columns, scale, rng)
    nvp[:2] = columns * scale, INT_MAX
    select = prefill_selector(begin, end, scale)
    for offset in range(scale):
        want = oracle.select(
            plane[:TOKENS], nvp, begin, end, index_scale=scale, index_offset=offset
        )
        np.testing.assert_array_equal(publish_rows(plane, nvp, begin, end, scale, offset), want)
        carrier = rng.integers(INT_MIN, INT_MAX, (4, ROOM, 33)).astype(np.int32)
        got = np.asarray(select(plane, nvp, carrier, jnp.int32(offset)))
        np.testing.assert_array_equal(got[:, :TOKENS], want)
        np.testing.assert_array_equal(got[:, TOKENS:], carrier[:, TOKENS:])


def test_prefill_takes_more_columns_than_there_are_ids():
    columns = 12287
    plane = hard_rows.score_plane(5, columns, np.random.default_rng(0))
    plane[:, :, 8192:] = INF
    nvp = np.array([8192, columns, INT_MAX, 3, 8200], np.int32)
    carrier = np.zeros((4, 5, 33), np.int32)
    got = np.asarray(prefill_selector(1, 2)(plane, nvp, carrier, jnp.int32(0)))
    want = oracle.select(plane, nvp, 1, 2)
    np.testing.assert_array_equal(got, want)
    assert (got[..., 16:32] < 8192).all()


SPECIAL_WORDS = [
    *[0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x00000000, 0x80000000, 0x00000001],
    *[0x80000001, 0x3F800000, 0x3F800001, 0xBF800000, 0x7F7FFFFF, 0xFF7FFFFF],
]
SPECIAL = np.array(SPECIAL_WORDS, np.uint32).view(np.int32).tolist()


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)
@hypothesis.given(data=st.data())
def test_any_bits_and_counts(data):
    columns, tokens = 40, 4
    few = data.draw(st.lists(st.sampled_from(SPECIAL), min_size=1))
    seed = data.draw(st.integers(0, 1000))
    words = np.random.default_rng(seed).choice(few, (tokens, 4, columns)).astype(np.int32)
    if data.draw(st.booleans()):
        words[0, 0] = data.draw(
            st.lists(st.integers(INT_MIN, INT_MAX), min_size=columns, max_size=columns)
        )
    count = st.one_of(st.integers(-1, 85), st.integers(INT_MIN, INT_MAX))
    nvp = np.array(data.draw(st.lists(count, min_size=tokens, max_size=tokens)), np.int32)
    begin, end, scale = data.draw(st.sampled_from([(0, 0, 1), (2, 3, 2), (8, 8, 1)]))
    offset = data.draw(st.integers(0, scale - 1))
    plane = words.view(np.float32)
    want = oracle.select(plane, nvp, begin, end, index_scale=scale, index_offset=offset)
    np.testing.assert_array_equal(publish_rows(plane, nvp, begin, end, scale, offset), want)


# ---- ties ----


def test_ten_winners_among_8182_equal_scores():
    row = np.zeros(8192, np.float32)
    winners = [3, 64, 65, 1000, 2047, 2048, 4095, 4096, 8190, 8191]
    row[winners] = np.arange(1, 11)
    ids, words = select_row(row, 8192)
    assert ids == sorted([*winners, 0, 1, 2, 4, 5, 6])
    assert sorted(words.view(np.float32).tolist()) == [0] * 6 + list(range(1, 11))


@pytest.mark.parametrize("order", ["ascending", "descending", "permuted"])
def test_scores_within_one_narrow_range(order):
    step = np.arange(8192)
    if order == "descending":
        step = step[::-1]
    elif order == "permuted":
        step = np.random.default_rng(0).permutation(8192)
    row = (1 + step * 2.0**-23).astype(np.float32)
    assert len(set(row.tolist())) == 8192
    assert select_row(row, 8192)[0] == np.flatnonzero(step >= 8192 - 16).tolist()


def test_equal_scores_take_the_lowest_ids_every_time():
    for score in (0.0, -1.5, 7.0, INF, -INF, NAN):
        row = np.full(40, score, np.float32)
        answers = {tuple(select_row(row, 40)[0]) for _ in range(20)}
        assert answers == {tuple(range(16))}


# ---- special values ----


def test_nan_of_both_signs_ranks_as_minus_infinity_and_keeps_its_bits():
    row = [NAN, NEG_NAN, -INF, *range(1, 15), -INF, NAN]  # 14 finite, then the lowest two of five
    ids, words = select_row(row, 19)
    assert ids == [0, 1, *range(3, 17)]
    assert words.tolist() == bits(NAN, NEG_NAN, *range(1, 15))
    assert words[1] == np.int32(np.uint32(0xFFC00001).view(np.int32))


def test_both_zeros_are_one_value_and_keep_their_bits():
    zeros = [-0.0, 0.0] * 10
    ids, words = select_row(zeros, 20)
    assert ids == list(range(16))
    assert words.tolist() == [-(2**31), 0] * 8
    assert select_row([-0.0, *[0.0] * 16], 17)[0] == list(range(16))
    assert select_row([*[0.0] * 16, -0.0], 17)[0] == list(range(16))
    smallest = np.float32(1e-45)
    assert select_row([-smallest, *[-0.0] * 15, smallest], 17)[0] == list(range(1, 17))


def test_infinity_ranks_above_finite_and_below_forced():
    row = np.full(40, 3e38, np.float32)
    row[30] = INF
    assert select_row(row, 40)[0] == [*range(15), 30]
    row[:] = INF
    row[[0, 38, 39]] = -INF
    assert select_row(row, 40, begin=1, end=2)[0] == [*range(14), 38, 39]


def test_a_minus_infinity_block_is_a_candidate():
    row = np.full(40, -INF, np.float32)
    row[35] = 1
    ids, words = select_row(row, 40)
    assert ids == [*range(15), 35]
    assert words.tolist() == [MINUS_INF_WORD] * 15 + bits(1)


@pytest.mark.parametrize("count", [0, 1, 5, 15, 16])
def test_up_to_sixteen_blocks_are_all_chosen_whatever_the_scores(count):
    row = np.array([NAN, -INF, NEG_NAN, INF] * 10, np.float32)
    ids, words = select_row(row, count)
    assert ids == [*range(count), *[-1] * (16 - count)]
    assert words.tolist() == [*bits(*row[:count]), *[MINUS_INF_WORD] * (16 - count)]


# ---- forced windows and counts ----


@pytest.mark.parametrize(
    ("count", "begin", "end", "ids"),
    [
        (40, 2, 3, [0, 1, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39]),
        (40, 16, 0, range(16)),
        (40, 0, 16, range(24, 40)),
        (20, 8, 8, [*range(8), *range(12, 20)]),
        (18, 8, 8, [*range(8), *range(10, 18)]),
        (10, 8, 8, range(10)),
        (1, 8, 8, [0]),
        (3, 0, 16, range(3)),
        (0, 8, 8, []),
        (-9, 8, 8, []),
        (INT_MIN, 0, 16, []),
    ],
)
def test_forced_windows(count, begin, end, ids):
    ids = list(ids)
    row = np.arange(40, dtype=np.float32)
    assert select_row(row, count, begin, end)[0] == [*ids, *[-1] * (16 - len(ids))]


@pytest.mark.parametrize(
    ("count", "last"), [(8192, [8190, 8191]), (8193, [8191]), (8194, []), (INT_MAX, [])]
)
def test_the_forced_end_counts_from_the_raw_number(count, last):
    row = -np.arange(8192, dtype=np.float32)
    assert select_row(row, count, 0, 2)[0] == [*range(16 - len(last)), *last]


def test_counts_belong_to_their_own_tokens():
    plane = np.arange(20, dtype=np.float32)[None, None].repeat(3, 0).repeat(4, 1)
    found = publish_rows(plane, np.array([1, 5, 9000], np.int32), 0, 0)[0, :, 16:32].tolist()
    assert found == [[0] + [-1] * 15, [*range(5)] + [-1] * 11, [*range(4, 20)]]


# ---- layout, generations, sizes ----


@pytest.mark.parametrize("world_size", [2, 4])
def test_head_h_goes_to_rank_h_over_hpr(world_size):
    """Token t, head h chooses ids that name both: a reshape in the wrong order shows."""
    columns = np.arange(160)
    plane = np.zeros((2, 4, 160), np.float32)
    for token, head in np.ndindex(2, 4):
        first = (token * 4 + head) * 16
        plane[token, head, (columns >= first) & (columns < first + 16)] = 1
    nvp = np.full(2, 160, np.int32)
    publish = publisher(0, 0, 1, world_size)
    sent = publish(plane, nvp, None, jnp.int32(0), jnp.int32(0), jnp.int32(0))
    rows = np.asarray(sent.rows)
    per_rank = 4 // world_size
    assert rows.shape == (world_size, per_rank, 2, 33)
    for owner, head, token in np.ndindex(world_size, per_rank, 2):
        first = (token * 4 + owner * per_rank + head) * 16
        assert rows[owner, head, token, 16:32].tolist() == list(range(first, first + 16))


def test_tagged_rows_and_counters_wrap_and_leave_the_rest_alone():
    rng = np.random.default_rng(3)
    plane = hard_rows.score_plane(TOKENS, 24, rng)
    nvp = hard_rows.visible_counts(TOKENS, 24, 1, rng)
    want_rows = oracle.select(plane, nvp, 1, 2)
    expected = rng.choice([0, 1, -1, INT_MAX, INT_MIN], (3, 4, ROOM)).astype(np.int32)
    counters = jnp.asarray(expected.copy())
    publish = publisher(1, 2)
    for call in (0, 1, 2, 3, 7, INT_MAX):  # a running count of calls, taken mod 3
        sent = publish(plane, nvp, counters, jnp.int32(call), jnp.int32(0), jnp.int32(2))
        counters = sent.generations
        slot = call % 3
        tagged, bumped = oracle.tag_rows(want_rows, expected[slot, :, :TOKENS])
        expected[slot, :, :TOKENS] = bumped
        np.testing.assert_array_equal(sent.rows, oracle.rows_by_owner(tagged, 4))
        np.testing.assert_array_equal(counters, expected)
    assert 0 not in expected[:, :, :TOKENS]


def test_one_executable_serves_every_rank_offset_and_slot():
    plane = np.zeros((TOKENS, 4, 24), np.float32)
    nvp = np.full(TOKENS, 24, np.int32)
    counters = [jnp.zeros((3, 4, ROOM), jnp.int32) for _ in range(3)]
    carriers = [jnp.zeros((4, ROOM, 33), jnp.int32) for _ in range(2)]
    publish, select = publisher(2, 3, 2), prefill_selector(2, 3, 2)
    publish(plane, nvp, counters[0], jnp.int32(0), jnp.int32(0), jnp.int32(0))
    select(plane, nvp, carriers[0], jnp.int32(0))
    with inputs.nothing_compiles():
        publish(plane, nvp, counters[1], jnp.int32(4), jnp.int32(1), jnp.int32(3))
        publish(plane, nvp, counters[2], jnp.int32(2), jnp.int32(0), jnp.int32(2))
        select(plane, nvp, carriers[1], jnp.int32(1))


def test_static_scalars_give_the_bits_of_traced_ones():
    rng = np.random.default_rng(4)
    plane = hard_rows.score_plane(TOKENS, 24, rng)
    nvp = hard_rows.visible_counts(TOKENS, 24, 2, rng)
    generations = np.full((3, 4, ROOM), 7, np.int32)
    publish = publisher(2, 3, 2)
    traced = publish(plane, nvp, generations, jnp.int32(5), jnp.int32(1), jnp.int32(3))
    static = jax.jit(functools.partial(publish.__wrapped__, slot=5, offset=1, rank=3))
    for want, got in zip(traced, static(plane, nvp, generations), strict=True):
        np.testing.assert_array_equal(got, want)


def test_no_tokens():
    plane = np.zeros((3, 4, 24), np.float32)
    none = np.zeros(0, np.int32)
    scalars: Sequence[Any] = (jnp.int32(1), jnp.int32(0), jnp.int32(0))
    sent = publisher(1, 2)(plane, none, None, *scalars)
    assert sent.rows.shape == (4, 1, 0, 33)
    generations = np.full((3, 4, 2), 9, np.int32)
    sent = publisher(1, 2)(plane, none, generations, *scalars)
    assert sent.rows.shape == (4, 1, 0, 32, 2)
    np.testing.assert_array_equal(sent.generations, generations)
    carrier = np.full((4, 2, 33), 9, np.int32)
    kept = prefill_selector(0, 0)(plane, none, carrier, jnp.int32(0))
    np.testing.assert_array_equal(kept, carrier)


def test_the_rows_of_random_bytes_keep_every_bit():
    plane = inputs.any_bits(np.random.default_rng(5), (TOKENS, 4, 24))
    nvp = np.full(TOKENS, 24, np.int32)
    want = oracle.select(plane, nvp, 1, 2)
    np.testing.assert_array_equal(publish_rows(plane, nvp, 1, 2), want)
