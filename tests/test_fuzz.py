"""Chains under hostile metadata, on XLA: the oracle's answer, or nothing; never a neighbour's."""

from __future__ import annotations

import functools
from typing import Any

import chains
import hostile
import hypothesis
import hypothesis.strategies as st
import numpy as np
import oracle
import pytest
from chains import GROUPS, Ranks, make_plan

WIDTH, PAGES = 9, 24
REQUESTS, QUERY_LEN = 3, 2
SEGMENTS, TOKENS = 4, 24

fuzz = hypothesis.settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
FUSED = pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
GROUP = pytest.mark.parametrize(("world_size", "page_size"), GROUPS)


@functools.cache
def ranks_of(world_size: int, page_size: int) -> Ranks:
    """A table wider than the longest context, and columns that end before the table does."""
    limits = {"max_model_len": 7 * page_size, "max_decode_tokens": 8, "max_num_batched_tokens": 64}
    return Ranks(make_plan(world_size, page_size, **limits), None)


@FUSED
@GROUP
@fuzz
@hypothesis.given(data=st.data())
def test_decode(world_size: int, page_size: int, fused: bool, data: Any) -> None:
    ranks = ranks_of(world_size, page_size)
    sizes = {"width": WIDTH, "pages": PAGES}
    case = hostile.decode_case(data.draw, ranks.plan, REQUESTS, QUERY_LEN, **sizes)
    chains.check_decoded(ranks.plan, case, ranks.decode(case, fused=fused), fused=fused)

    wrong, right = hostile.with_counts(data.draw, case)
    output = ranks.decode(wrong, fused=fused).output
    tokens = len(wrong.counts)
    np.testing.assert_array_equal(output[:tokens][right], case.answer(ranks.plan)[right])
    hostile.check_form(output[:tokens], wrong.counts)
    assert (output[tokens:] == chains.OLD_WORD).all()


@FUSED
@GROUP
@fuzz
@hypothesis.given(data=st.data())
def test_prefill(world_size: int, page_size: int, fused: bool, data: Any) -> None:
    ranks = ranks_of(world_size, page_size)
    sizes = {"width": WIDTH, "pages": PAGES}
    case = hostile.prefill_case(data.draw, ranks.plan, SEGMENTS, TOKENS, **sizes)
    chains.check_prefilled(ranks.plan, case, ranks.prefill(case, fused=fused), fused=fused)

    wrong, right = hostile.with_counts(data.draw, case)
    output = ranks.prefill(wrong, fused=fused).output
    np.testing.assert_array_equal(output[:TOKENS][right], case.answer(ranks.plan)[right])
    hostile.check_form(output[:TOKENS], wrong.counts, prefill=True)
    assert (output[TOKENS:] == chains.OLD_WORD).all()


@pytest.mark.parametrize("tagged", [False, True], ids=["legacy", "tagged"])
@pytest.mark.parametrize(("world_size", "page_size"), [(2, 256), (4, 128)])
@fuzz
@hypothesis.given(data=st.data())
def test_receive_storage(world_size: int, page_size: int, tagged: bool, data: Any) -> None:
    """Storage of any content, every rank at a count of its own: right, or -1 and counted."""
    ranks = ranks_of(world_size, page_size)
    sizes = {"width": WIDTH, "pages": PAGES}
    case = hostile.decode_case(data.draw, ranks.plan, REQUESTS, QUERY_LEN, **sizes)
    tokens, call = len(case.query), data.draw(st.integers(0, 2**31 - 1))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    storage = ranks.zero_comm()
    for name in ("recv", "tagged_recv"):
        storage[name][:] = rng.integers(-(2**31), 2**31, storage[name].shape)
    storage["errors"][:] = rng.integers(0, 1000, world_size)
    flags = storage["recv"][..., 32]
    flags[:] = np.where(rng.random(flags.shape) < 0.9, 0, flags)
    start = data.draw(st.sampled_from([0, -1, 2**31 - 1, 7]))
    for name in ("publish_generations", "expected_generations"):
        skew = rng.random(storage[name].shape) < 0.05
        storage[name][:] = np.where(skew, start + 1 if start < 2**31 - 1 else 0, start)

    found = ranks.decode(case, ranks.put_comm(storage), call, tagged=tagged)
    after = ranks.get_comm(found.comm)
    failed = _failed_rows(storage, call % 3, tokens, tagged)
    lost = failed.any(0).T[..., None]
    want = np.where(lost, -1, case.answer(ranks.plan))
    np.testing.assert_array_equal(found.output[:tokens], want)
    grown = failed.reshape(world_size, world_size, -1, tokens).sum((0, 2, 3))
    np.testing.assert_array_equal(after["errors"] - storage["errors"], grown)


def _failed_rows(storage: dict[str, Any], slot: int, tokens: int, tagged: bool) -> Any:
    """Which rows [W sources, 4 heads, T] cannot be trusted."""
    if not tagged:
        return storage["recv"][slot, :, :, :tokens, 32] != 0
    expected = oracle.next_generation(storage["expected_generations"][slot, :, :tokens])
    # Every rank counts the rows of all four heads: [W 4, C] is [W sources, 4 heads, C].
    sent = storage["publish_generations"][slot].reshape(-1, *storage["recv"].shape[2:4])
    return oracle.next_generation(sent[:, :, :tokens]) != expected
