"""The portable owner merge against the reference, literal answers and protocol faults."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
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

from msa_icp_jax import msa_icp_merge_candidates, msa_icp_topk_select_publish
from msa_icp_jax.ops.merge import MSAIcpMerge

TOKENS, CAPACITY = 30, 33
INF, NAN, NEG_NAN = np.float32(np.inf), np.float32(np.nan), hard_rows.NEG_NAN
both_worlds = pytest.mark.parametrize("world_size", [2, 4])


@functools.cache
def merger(init: int, local: int, prefill: bool = False) -> Any:
    """merge(recv, nvp, output, errors, expected) -> MSAIcpMerge, all but nvp donated."""

    def merge(recv, nvp, output, errors, expected) -> MSAIcpMerge:
        return msa_icp_merge_candidates(
            recv,
            nvp,
            output,
            errors,
            init_blocks=init,
            local_blocks=local,
            expected_generations=expected,
            prefill=prefill,
            backend="xla",
        )

    return jax.jit(merge, donate_argnums=(0, 2, 3, 4))


def run(
    recv: np.ndarray,
    nvp: np.ndarray,
    init: int,
    local: int,
    *,
    expected: np.ndarray | None = None,
    prefill: bool = False,
) -> MSAIcpMerge:
    """Merges into an output full of 77 with two rows to spare; errors start at 5."""
    heads = recv.shape[1]
    output = jnp.full((len(nvp) + 2, heads, 16), 77, jnp.int32)
    counters = None if expected is None else jnp.asarray(expected.copy())
    errors = jnp.array([5], jnp.int32)
    # Copies: donated memory must not be that of the arrays to compare with.
    merged = merger(init, local, prefill)(jnp.asarray(recv.copy()), nvp, output, errors, counters)
    assert (np.asarray(merged.output[len(nvp) :]) == 77).all()
    return merged._replace(output=merged.output[: len(nvp)])


def received(world_size: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows [W, hpr, C, 33] of every kind and the counts of the first TOKENS of them."""
    rng = np.random.default_rng(seed)
    rows = hard_rows.received_rows(world_size, 4 // world_size, CAPACITY, rng)
    nvp = rng.integers(1, 400, TOKENS)
    nvp[:12] = [0, 1, 15, 16, 17, 18, 8192, 8193, 9000, INT_MAX, -3, INT_MIN]
    return rows, nvp.astype(np.int32)


def tagged(rows: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The same rows as the next generation of some counters [hpr, C] would send them."""
    values = [0, 1, -1, INT_MAX, INT_MIN, 12345]
    expected = np.random.default_rng(seed).choice(values, rows.shape[1:3]).astype(np.int32)
    return oracle.tag_rows(rows, expected[None].repeat(len(rows), 0))[0], expected


def check(merged: MSAIcpMerge, want: oracle.Merge) -> None:
    np.testing.assert_array_equal(merged.output, want.output)
    np.testing.assert_array_equal(merged.recv_slot, want.received)
    assert np.asarray(merged.errors).tolist() == [5 + want.errors]
    if want.expected is None:
        assert merged.expected_generations is None
    else:
        np.testing.assert_array_equal(merged.expected_generations, want.expected)


# ---- against the reference ----


@pytest.mark.parametrize(
    ("world_size", "init", "local"),
    [(2, 0, 0), (2, 8, 8), (2, 0, 16), (4, 1, 2), (4, 16, 0)],
)
def test_hard_rows(world_size, init, local):
    rows, nvp = received(world_size)
    check(run(rows, nvp, init, local), oracle.merge_legacy(rows, nvp, init, local))
    pairs, expected = tagged(rows)
    want = oracle.merge_tagged(pairs, expected, nvp, init, local)
    check(run(pairs, nvp, init, local, expected=expected), want)
    merged = run(rows, nvp, init, local, prefill=True)
    ids = oracle.merge(rows, nvp, init, local, prefill=True)
    check(merged, oracle.Merge(ids, rows, None, 0))


@pytest.mark.parametrize(("world_size", "page_size"), [(2, 128), (4, 128), (2, 256), (4, 256)])
def test_select_then_merge_is_the_global_top16(world_size, page_size):
    """Ties, NaN, -inf and split blocks: no rank alone can know, and the merge still does."""
    rng = np.random.default_rng(page_size + world_size)
    columns, init, local = 60, 1, 2
    planes = [hard_rows.score_plane(TOKENS, columns, rng) for _ in range(world_size)]
    nvp = hard_rows.visible_counts(TOKENS, columns, page_size // 128, rng)
    nvp = np.minimum(nvp, columns * page_size // 128)
    select = jax.jit(
        functools.partial(
            msa_icp_topk_select_publish,
            world_size=world_size,
            heads_per_rank=4 // world_size,
            force_begin_blocks=init,
            force_end_blocks=local,
            index_scale=page_size // 128,
            backend="xla",
        )
    )
    sent = []
    for rank, plane in enumerate(planes):
        offset = oracle.Shard(rank, world_size, page_size).index_offset
        found = select(plane, nvp, rank=jnp.int32(rank), index_offset=jnp.int32(offset))
        sent.append(np.asarray(found.rows))
    heads = [
        run(np.stack([rows[owner] for rows in sent]), nvp, init, local).output
        for owner in range(world_size)
    ]
    got = np.concatenate(heads, axis=1)
    oracle.check_ids(got, nvp)
    want = oracle.answer(oracle.join_planes(planes, page_size), nvp, init, local)
    np.testing.assert_array_equal(got, want)


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True, database=None)
@hypothesis.given(data=st.data())
def test_any_rows(data):
    """One token, two heads: few ids and few scores, so that everything collides."""
    ids = data.draw(st.lists(st.integers(-2, 45), min_size=1, max_size=60))
    special = [1.0, -1.0, 0.0, -0.0, float(INF), -float(INF)]
    words = np.array([*special, NAN, NEG_NAN], np.float32).view(np.int32)
    few = data.draw(st.lists(st.sampled_from(words.tolist()), min_size=1))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    rows = np.ones((2, 2, 1, 33), np.int32)
    rows[..., :16] = rng.choice(few, (2, 2, 1, 16))
    rows[..., 16:32] = rng.choice(ids, (2, 2, 1, 16))
    nvp = np.array([data.draw(st.integers(-1, 50))], np.int32)
    init, local = data.draw(st.sampled_from([(0, 0), (1, 2), (8, 8)]))
    check(run(rows, nvp, init, local), oracle.merge_legacy(rows, nvp, init, local))


# ---- literal answers ----


def merge_two(
    first: Mapping[int, float],
    second: Mapping[int, float],
    nvp: int,
    init: int = 0,
    local: int = 0,
    prefill: bool = False,
) -> list[int]:
    """Ids from two sources' {id: score}, the same for both heads."""
    rows = np.ones((2, 2, 1, 33), np.int32)
    rows[..., :16] = -8388608
    rows[..., 16:32] = -1
    for source, scores in enumerate((first, second)):
        words = np.array(list(scores.values()), np.float32).view(np.int32)
        rows[source, :, 0, : len(scores)] = words
        rows[source, :, 0, 16 : 16 + len(scores)] = list(scores)
    merged = run(rows, np.array([nvp], np.int32), init, local, prefill=prefill)
    assert np.asarray(merged.errors).tolist() == [5]
    assert (merged.output[:, 0] == merged.output[:, 1]).all()
    return np.asarray(merged.output)[0, 0].tolist()


def padded(ids: Sequence[int]) -> list[int]:
    return [*ids, *[-1] * (16 - len(ids))]


def test_the_worked_example():
    """Two ranks, five blocks, one local block, two places beside fourteen sure winners."""
    sure = dict.fromkeys(range(5, 19), 100.0)
    first = {1: 9.0, 4: 0.5}
    second = {0: 8.0, 4: -float(INF)}
    rows = [{**first, **{b: s for b, s in sure.items() if b % 2}}, {**second, **sure}]
    assert merge_two(*rows, 19) == [0, 1, *range(5, 19)]
    assert merge_two(first, second, 5, local=1) == padded([0, 1, 4])


def test_blocks_on_both_ranks_count_once():
    shared = {block: 50.0 + block for block in range(8)}
    first = {**shared, **dict.fromkeys(range(8, 16), 1.0)}
    second = {**shared, **dict.fromkeys(range(16, 24), 2.0)}
    assert merge_two(first, second, 24) == [*range(8), *range(16, 24)]


def test_a_repeated_block_keeps_its_largest_score():
    rivals = dict.fromkeys(range(16), 5.0)
    for scores, wins in [((1.0, 9.0), True), ((9.0, 1.0), True), ((1.0, 4.0), False)]:
        first = {20: scores[0]}
        second = {**{b: s for b, s in rivals.items() if b < 15}, 20: scores[1]}
        got = merge_two({**first, 15: 5.0}, second, 24)
        assert (20 in got) == wins
    second = {**dict.fromkeys(range(15), 5.0), 20: 6.0}
    for nan in (NAN, NEG_NAN):
        assert 20 in merge_two({20: nan, 15: 5.0}, second, 24)


def test_infinity_wins_over_finite_and_loses_to_forced():
    first = dict.fromkeys(range(16), 3e38)
    assert merge_two(first, {20: INF}, 24) == [*range(15), 20]
    infinite = dict.fromkeys(range(4, 20), INF)
    forced = {0: -INF, 22: NAN, 23: -1.0}
    assert merge_two(infinite, forced, 24, init=1, local=2) == [0, *range(4, 17), 22, 23]


@pytest.mark.parametrize("nan", [NAN, NEG_NAN], ids=["NaN", "-NaN"])
def test_nan_ranks_as_minus_infinity(nan):
    finite = dict.fromkeys(range(1, 17), -1e30)
    assert merge_two(finite, {0: nan}, 24) == list(range(1, 17))
    infinite = dict.fromkeys(range(1, 17), -INF)
    assert merge_two(infinite, {0: nan}, 24) == list(range(16))
    assert merge_two(infinite, {20: nan}, 24) == list(range(1, 17))


def test_zero_is_one_value():
    """Block 16 is -0.0 on one rank and +0.0 on the other, its rivals are +0.0: the id decides."""
    rivals = dict.fromkeys(range(15), 0.0)
    assert merge_two({**rivals, 16: -0.0}, {15: 0.0, 16: 0.0}, 24) == list(range(16))
    rivals = dict.fromkeys(range(1, 16), 0.0)
    assert merge_two({**rivals, 0: -0.0}, {16: 0.0}, 24) == list(range(16))


def test_impossible_ids_fall_away():
    bad = {-1: INF, -2: INF, 24: INF, 8192: INF, INT_MAX: INF, INT_MIN: INF}
    assert merge_two(bad, {3: 1.0, 23: 1.0}, 24) == padded([3, 23])
    assert merge_two({8191: 1.0, 8192: INF}, {}, INT_MAX) == padded([8191])


def test_a_short_context_is_its_blocks_then_minus_one():
    scores = {0: NAN, 1: -INF, 2: 5.0}
    assert merge_two(scores, scores, 3) == padded([0, 1, 2])


def test_padding_rows():
    some = {0: 1.0, 1: 2.0}
    for nvp in (0, -1, INT_MIN):
        assert merge_two(some, some, nvp, init=1, local=1) == padded([])
        assert merge_two(some, some, nvp, init=1, local=1, prefill=True) == padded([0])


def test_forced_windows_that_overlap_and_outnumber_the_blocks():
    scores = {block: float(block) for block in range(10)}
    assert merge_two(scores, scores, 10, init=8, local=8) == padded(range(10))
    assert merge_two(scores, {}, 3, init=0, local=16) == padded(range(3))


def test_the_forced_end_counts_from_the_raw_number():
    first = dict.fromkeys(range(15), 1.0)
    assert merge_two({**first, 8190: 0.0}, {8191: 0.0, 20: 1.0}, 8193, local=2)[-1] == 8191
    assert merge_two({**first, 8190: 0.0}, {8191: 0.0, 20: 1.0}, 8194, local=2)[-1] == 20


def test_the_same_answer_every_time():
    rows, nvp = received(4, seed=9)
    first = np.asarray(run(rows, nvp, 1, 2).output)
    for _ in range(10):
        np.testing.assert_array_equal(run(rows, nvp, 1, 2).output, first)


# ---- protocol faults ----


@both_worlds
def test_a_flag_that_is_not_one_is_a_fault(world_size):
    rows, nvp = received(world_size)
    sound = np.asarray(run(rows, nvp, 1, 2).output)
    last = world_size - 1
    rows[0, 0, 3, 32] = 0
    rows[last, 0, 3, 32] = 2  # a second failed source of the same token and head
    rows[last, -1, 5, 32] = -1
    rows[last, 0, TOKENS, 32] = 0  # past the tokens: nobody looks
    merged = run(rows, nvp, 1, 2)
    assert np.asarray(merged.errors).tolist() == [5 + 3]
    want = sound.copy()
    want[3, 0] = want[5, 4 // world_size - 1] = -1
    np.testing.assert_array_equal(merged.output, want)
    check(merged, oracle.merge_legacy(rows, nvp, 1, 2))  # flags cleared as usual


@both_worlds
def test_a_tag_that_is_not_the_next_generation_is_a_fault(world_size):
    rows, nvp = received(world_size)
    pairs, expected = tagged(rows)
    sound = np.asarray(run(pairs, nvp, 1, 2, expected=expected).output)
    pairs[0, 0, 3, :, 1] -= 1  # the row of the call before
    pairs[1, 0, 4, 31, 1] ^= 1  # one word of 32
    pairs[1, -1, 5, 0, 1] = 0
    pairs[0, 0, TOKENS, :, 1] ^= 1  # past the tokens: nobody looks
    merged = run(pairs, nvp, 1, 2, expected=expected)
    assert np.asarray(merged.errors).tolist() == [5 + 3]
    want = sound.copy()
    want[3, 0] = want[4, 0] = want[5, 4 // world_size - 1] = -1
    np.testing.assert_array_equal(merged.output, want)
    check(merged, oracle.merge_tagged(pairs, expected, nvp, 1, 2))  # counters advance as usual


def test_a_fault_hides_a_prefill_row_too_and_changes_no_flag():
    rows, nvp = received(2)
    rows[1, 0, [0, 20], 32] = 0  # token 0 has no blocks
    merged = run(rows, nvp, 1, 2, prefill=True)
    want = oracle.merge(rows, nvp, 1, 2, prefill=True)
    want[[0, 20], 0] = -1
    check(merged, oracle.Merge(want, rows, None, 2))


def test_generations_wrap_around_and_skip_zero():
    """Seven calls across both borders: the merge keeps expecting what a publisher sends next."""
    rows, nvp = received(4)
    for start, generations in ((INT_MAX - 1, [INT_MAX, INT_MIN, INT_MIN + 1]), (-2, [-1, 1, 2])):
        expected = np.full((1, CAPACITY), start, np.int32)
        for generation in generations:
            pairs = np.stack([rows[..., :32], np.full_like(rows[..., :32], generation)], -1)
            merged = run(pairs, nvp, 1, 2, expected=expected)
            assert np.asarray(merged.errors).tolist() == [5]
            expected = np.asarray(merged.expected_generations)
            assert (expected[:, :TOKENS] == generation).all()
            assert (expected[:, TOKENS:] == start).all()


def test_no_tokens():
    rows, _ = received(2)
    none = np.zeros(0, np.int32)
    check(run(rows, none, 1, 2), oracle.Merge(np.zeros((0, 2, 16), np.int32), rows, None, 0))
    pairs, expected = tagged(rows)
    merged = run(pairs, none, 1, 2, expected=expected)
    check(merged, oracle.Merge(np.zeros((0, 2, 16), np.int32), pairs, expected, 0))


def test_one_executable_serves_every_call():
    cases = [received(4, seed) for seed in range(3)]
    outputs = [jnp.zeros((TOKENS, 1, 16), jnp.int32) for _ in cases]
    errors = [jnp.zeros(1, jnp.int32) for _ in cases]
    merge = merger(3, 4)
    merge(cases[0][0], cases[0][1], outputs[0], errors[0], None)
    with inputs.nothing_compiles():
        for i in (1, 2):
            merge(cases[i][0], cases[i][1], outputs[i], errors[i], None)
