"""Hypothesis strategies for metadata that nobody should send, and the chains' cases made of it.

Every value that only the device knows is drawn from all of int32: lengths, offsets, pages, counts,
slots, flags, generations. The oracle says what must come out wherever the contract does; where it
does not (counts past what was scored) `check_form` says what still holds.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import chains
import hypothesis
import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import oracle
import pytest
from chains import Cache, Decode, Prefill, Ranks
from inputs import INT_MAX, INT_MIN

from msa_icp_jax import MSAIcpIndexerPlan

Array = npt.NDArray[Any]

INDEX_DTYPE = pytest.mark.parametrize("index_dtype", ["float8_e4m3fn", "bfloat16"])
FUSED = pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
GROUP = pytest.mark.parametrize(("world_size", "page_size"), chains.GROUPS)


def fuzz(examples: int, **more: Any) -> hypothesis.settings:
    """Settings of a fuzz: the same examples in every run, FUZZ_EXAMPLES of them where it is set."""
    return hypothesis.settings(
        max_examples=int(os.environ.get("FUZZ_EXAMPLES", examples)),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        **more,
    )


INT32 = st.integers(INT_MIN, INT_MAX)
EXTREMES = st.sampled_from([INT_MIN, INT_MIN + 1, -129, -1, 0, 1, 127, 128, 129, INT_MAX])


def near(low: int, high: int) -> st.SearchStrategy[int]:
    """Mostly integers of [low, high], else any int32."""
    return st.one_of(st.integers(low, high), st.integers(low, high), EXTREMES, INT32)


def vector(draw: Any, values: st.SearchStrategy[int], *shape: int) -> Array:
    size = int(np.prod(shape))
    drawn = draw(st.lists(values, min_size=size, max_size=size))
    return np.array(drawn, np.int64).astype(np.int32).reshape(shape)


def cache(page_size: int, pages: int, index_dtype: str) -> Array:
    """Keys of every page, each live for some request: integers, NaN, and rows that would win."""
    rng = np.random.default_rng(5)
    _, least, nan, _ = chains.POISON[index_dtype]
    keys = chains.small_keys(rng, pages, page_size, index_dtype=index_dtype)
    keys[rng.random((pages, page_size)) < 0.03] = nan
    keys[rng.random((pages, page_size)) < 0.03] = least
    return keys


def queries(tokens: int, index_dtype: str) -> Array:
    """Small integers; the last token is all NaN, which must stay its own affair."""
    made = chains.small_queries(np.random.default_rng(6), tokens, index_dtype)
    made[-1] = chains.POISON[index_dtype][3]
    return made


def decode_case(
    draw: Any, plan: MSAIcpIndexerPlan, requests: int, query_len: int, *, width: int, pages: int
) -> Decode:
    """A decode step of hostile lengths and tables, with the counts that belong to the lengths."""
    geometry = plan.geometry
    keys = cache(geometry.page_size, pages, geometry.index_dtype)
    lengths = vector(draw, near(-2, geometry.max_model_len), requests)
    table = vector(draw, near(-1, pages), requests, width)
    blocks = geometry.score_columns * geometry.index_scale
    counts = np.minimum(oracle.decode_num_valid_pages(lengths, query_len), blocks)
    made = queries(requests * query_len, geometry.index_dtype)
    return Decode(made, Cache(keys, table), lengths, query_len, counts)


def prefill_case(
    draw: Any, plan: MSAIcpIndexerPlan, segments: int, tokens: int, *, width: int, pages: int
) -> Prefill:
    """A window of hostile segments, with the counts that belong to them."""
    geometry = plan.geometry
    longest = geometry.max_model_len
    qo_lens = vector(draw, near(-1, tokens), segments)
    kv_lens = vector(draw, near(-1, longest), segments)
    offsets = vector(draw, near(-9, longest), segments)
    table = vector(draw, near(-1, pages), segments, width)
    blocks = geometry.score_columns * geometry.index_scale
    counts = oracle.prefill_num_valid_pages(qo_lens, offsets, tokens)
    return Prefill(
        queries(tokens, geometry.index_dtype),
        Cache(cache(geometry.page_size, pages, geometry.index_dtype), table),
        qo_lens,
        kv_lens,
        offsets,
        np.minimum(counts, blocks),
    )


def with_counts(draw: Any, case: Any) -> tuple[Any, Array]:
    """The case with some tokens' counts replaced by any int32; also which ones are still right."""
    tokens = len(case.counts)
    keep = np.array(draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens)))
    counts = np.where(keep, case.counts, vector(draw, near(-3, 9000), tokens))
    return dataclasses.replace(case, counts=counts.astype(np.int32)), keep


def check_form(output: Array, counts: Array, *, prefill: bool = False) -> None:
    """What holds for any count: ids below it, each once, ascending, then exactly -1."""
    for token, count in enumerate(np.clip(counts.astype(np.int64), 0, 8192).tolist()):
        for row in output[token].tolist():
            ids = [block for block in row if block != -1]
            assert row == ids + [-1] * (16 - len(ids)), row
            assert ids == sorted(set(ids)), row
            assert all(0 <= block < max(count, 1 if prefill else 0) for block in ids), (row, count)


def check_storage(draw: Any, ranks: Ranks, case: Decode, *, tagged: bool) -> None:
    """One step on storage of any content, every rank at a count of its own.

    Asserts that every (token, head) is right or -1 sixteen times, and that errors are counted.
    """
    world_size, tokens = ranks.plan.geometry.world_size, len(case.query)
    call = draw(st.integers(0, INT_MAX))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    storage = ranks.zero_comm()
    for name in ("recv", "tagged_recv"):
        storage[name][:] = rng.integers(INT_MIN, INT_MAX, storage[name].shape)
    storage["errors"][:] = rng.integers(0, 1000, world_size)
    flags = storage["recv"][..., 32]
    flags[:] = np.where(rng.random(flags.shape) < 0.9, 0, flags)
    start = draw(st.sampled_from([0, -1, INT_MAX, 7]))
    for name in ("publish_generations", "expected_generations"):
        skewed = rng.random(storage[name].shape) < 0.05
        storage[name][:] = np.where(skewed, oracle.next_generation(start), start)

    found = ranks.decode(case, ranks.put_comm(storage), call, tagged=tagged)
    after = ranks.get_comm(found.comm)
    failed = _failed_rows(storage, call % 3, tokens, tagged)
    lost = failed.any(0).T[..., None]
    want = np.where(lost, -1, case.answer(ranks.plan))
    np.testing.assert_array_equal(found.output[:tokens], want)
    grown = failed.reshape(world_size, world_size, -1, tokens).sum((0, 2, 3))
    np.testing.assert_array_equal(after["errors"] - storage["errors"], grown)


def _failed_rows(storage: dict[str, Array], slot: int, tokens: int, tagged: bool) -> Array:
    """Which rows [W sources, 4 heads, T] cannot be trusted."""
    if not tagged:
        return storage["recv"][slot, :, :, :tokens, 32] != 0
    expected = oracle.next_generation(storage["expected_generations"][slot, :, :tokens])
    # Every rank counts the rows of all four heads: [W 4, C] is [W sources, 4 heads, C].
    sent = storage["publish_generations"][slot].reshape(-1, *storage["recv"].shape[2:4])
    return oracle.next_generation(sent[:, :, :tokens]) != expected
