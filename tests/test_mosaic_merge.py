"""The owner merge kernel's logic (plain Pallas, in the interpreter) against the oracle."""

from __future__ import annotations

import functools
from typing import Any

import hard_rows
import numpy as np
import numpy.typing as npt
import oracle
import pytest
import race_free

from msa_icp_jax.geometry import Forced
from msa_icp_jax.ops.merge import kernel as merge_kernel

Array = npt.NDArray[Any]

_UNTOUCHED = 77
_TOKENS, _CAPACITY = 30, 33


def merge(
    recv: Array,
    counts: Array,
    tags: Array | None = None,
    *,
    begin: int = 0,
    end: int = 1,
    prefill: bool = False,
    ctas: int = 5,
) -> tuple[Array, Array, Array]:
    """(output with two rows too many, recv, errors grown from 5)."""
    output = np.full((len(counts) + 2, recv.shape[1], 16), _UNTOUCHED, np.int32)
    kernel = functools.partial(
        merge_kernel.merge_rows,
        forced=Forced(begin, end),
        prefill=prefill,
        launch=race_free.interpreter(ctas),
    )
    arrays = [recv, counts, output, np.array([5], np.int32)]
    if tags is None:
        return race_free.run(lambda *a: kernel(*a, None), *arrays)
    return race_free.run(kernel, *arrays, tags)


def check(actual: tuple[Array, Array, Array], want: oracle.Merge) -> None:
    output, recv, errors = actual
    tokens = len(want.output)
    np.testing.assert_array_equal(output[:tokens], want.output)
    assert (output[tokens:] == _UNTOUCHED).all()
    np.testing.assert_array_equal(recv, want.received)
    assert errors.tolist() == [5 + want.errors]


@pytest.mark.parametrize(
    ("sources", "begin", "end"), [(2, 0, 1), (2, 16, 0), (4, 2, 3), (4, 9, 7), (4, 0, 16)]
)
def test_flagged_rows(sources, begin, end):
    rng = np.random.default_rng(sources + 10 * begin)
    recv = hard_rows.received_rows(sources, 4 // sources, _CAPACITY, rng)
    missing = rng.random(recv.shape[:3]) < 0.1
    recv[..., 32] = np.where(missing, rng.choice([0, 2, -1], missing.shape), 1)
    counts = hard_rows.visible_counts(_TOKENS, 400, 1, rng)
    want = oracle.merge_legacy(recv, counts, begin, end)
    assert want.errors > 0
    check(merge(recv, counts, begin=begin, end=end), want)


@pytest.mark.parametrize("sources", [2, 4])
def test_tagged_rows(sources):
    rng = np.random.default_rng(sources)
    heads = 4 // sources
    words = hard_rows.received_rows(sources, heads, _CAPACITY, rng)[..., :32]
    expected = rng.integers(-(2**31), 2**31, (heads, _CAPACITY)).astype(np.int32)
    expected[0, :2] = [-1, 2**31 - 1]  # the next are 1 and the most negative number
    bumped = oracle.next_generation(expected)
    tags = np.broadcast_to(bumped[None, ..., None], words.shape).copy()
    for source, head, token in np.argwhere(rng.random(words.shape[:3]) < 0.1):
        tags[source, head, token, rng.integers(32)] ^= 1 << rng.integers(31)
    recv = np.stack([words, tags], -1).astype(np.int32)
    counts = hard_rows.visible_counts(_TOKENS, 400, 1, rng)
    want = oracle.merge_tagged(recv, expected, counts, 1, 1)
    assert want.errors > 0
    check(merge(recv, counts, np.ascontiguousarray(bumped[:, :_TOKENS]), begin=1), want)


@pytest.mark.parametrize("sources", [2, 4])
def test_prefill_rows(sources):
    rng = np.random.default_rng(sources)
    recv = hard_rows.received_rows(sources, 4 // sources, _CAPACITY, rng)
    counts = hard_rows.visible_counts(_TOKENS, 400, 1, rng)
    assert (counts <= 0).any()
    output = oracle.merge(recv, counts, 1, 2, prefill=True)
    want = oracle.Merge(output, recv, None, 0)  # flags stay
    check(merge(recv, counts, begin=1, end=2, prefill=True), want)


def test_a_prefill_row_that_did_not_arrive_is_a_fault():
    recv = np.ones((4, 1, 2, 33), np.int32)
    recv[..., 16:32] = np.arange(16)
    recv[2, 0, 0, 32] = 0
    recv[1, 0, 1, 32] = 3
    counts = np.array([16, 0], np.int32)
    output, _, errors = merge(recv, counts, prefill=True)
    assert (output[:2] == -1).all()
    assert errors.tolist() == [7]


def test_worked_example():
    scores = np.array([[4, 9, 1, 7, 0.5], [8, 2, 6, 7, -np.inf]], np.float32)
    plane = np.repeat(scores[:, None, None], 4, axis=2)
    counts = np.array([5], np.int32)
    rows = [oracle.select(p, counts, 0, 1) for p in plane]
    output, _, _ = merge(oracle.exchange(rows)[1], counts)
    np.testing.assert_array_equal(output[0, :, :5], np.tile(np.arange(5), (2, 1)))
    assert (output[0, :, 5:] == -1).all()


def test_duplicates_drop_out_before_the_cut():
    recv = np.ones((2, 2, 1, 33), np.int32)
    scores = np.arange(32, dtype=np.float32).reshape(2, 16)
    recv[..., :16] = scores.view(np.int32)[:, None, None]
    recv[0, ..., 16:32] = [*range(8), *range(20, 28)]
    recv[1, ..., 16:32] = [*range(8), *range(30, 38)]
    output, _, _ = merge(recv, np.array([100], np.int32), end=0)
    np.testing.assert_array_equal(output[0, 0], [*range(8), *range(30, 38)])


# ---- the whole receive storage, as the one-sided exchange leaves it ----


def merge_arriving(
    recv: Array,
    counts: Array,
    expected: Array | None,
    slot: int,
) -> tuple[Array, Array, Array, Array | None]:
    output = np.full((len(counts) + 2, recv.shape[2], 16), _UNTOUCHED, np.int32)

    def run(recv: Any, counts: Any, output: Any, errors: Any, slot: Any, *expected: Any) -> Any:
        return merge_kernel.merge_arriving_rows(
            recv,
            counts,
            output,
            errors,
            expected[0] if expected else None,
            Forced(1, 2),
            race_free.interpreter(5),
            slot=slot,
            spin_limit=10,
        )

    counters = [] if expected is None else [expected]
    return race_free.run(run, recv, counts, output, np.array([5], np.int32), np.int32(slot),
                         *counters)  # fmt: skip


# The last slot is 1 mod 3.
@pytest.mark.parametrize(("sources", "slot"), [(2, 0), (4, 2), (2, 4), (4, 2**31 - 1)])
def test_arriving_flagged_rows(sources, slot):
    rng = np.random.default_rng(slot)
    recv = np.stack([hard_rows.received_rows(sources, 4 // sources, _CAPACITY, rng)] * 3)
    recv[..., 32] = rng.random(recv.shape[:4]) > 0.1
    counts = hard_rows.visible_counts(_TOKENS, 400, 1, rng)
    want = oracle.merge_legacy(recv[slot % 3], counts, 1, 2)
    assert want.errors > 0
    output, after, errors, expected = merge_arriving(recv, counts, None, slot)
    assert expected is None
    check((output, after[slot % 3], errors), want)
    others = [i for i in range(3) if i != slot % 3]
    np.testing.assert_array_equal(after[others], recv[others])


@pytest.mark.parametrize(("sources", "slot"), [(4, 1), (2, 3), (4, 5)])
def test_arriving_tagged_rows(sources, slot):
    rng = np.random.default_rng(slot)
    heads = 4 // sources
    words = hard_rows.received_rows(3 * sources, heads, _CAPACITY, rng)[..., :32]
    words = words.reshape(3, sources, heads, _CAPACITY, 32)
    expected = rng.integers(-(2**31), 2**31, (3, heads, _CAPACITY)).astype(np.int32)
    expected[:, 0, :2] = [-1, 2**31 - 1]  # the next are 1 and the most negative number
    tags = oracle.next_generation(expected)[:, None, ..., None] * np.ones_like(words)
    for at in np.argwhere(rng.random(words.shape[:4]) < 0.1):
        tags[(*at, rng.integers(32))] ^= 1 << rng.integers(31)
    recv = np.stack([words, tags], -1).astype(np.int32)
    counts = hard_rows.visible_counts(_TOKENS, 400, 1, rng)
    want = oracle.merge_tagged(recv[slot % 3], expected[slot % 3], counts, 1, 2)
    assert want.errors > 0
    output, after, errors, advanced = merge_arriving(recv, counts, expected, slot)
    np.testing.assert_array_equal(after, recv)
    check((output, after[slot % 3], errors), want)
    all_slots = expected.copy()
    all_slots[slot % 3] = want.expected
    np.testing.assert_array_equal(advanced, all_slots)
