"""bfloat16 index keys on the GPU: decode, prefill and the write of one plan, all in kernels."""

from __future__ import annotations

import functools
from typing import Any

import chains
import hostile
import hypothesis
import hypothesis.strategies as st
import numpy as np
import oracle
from chains import INDEX_K, Ranks, make_plan, random_decode, random_prefill
from hostile import GROUP

BF16 = "bfloat16"


@functools.cache
def ranks_of(world_size: int, page_size: int, **limits: Any) -> Ranks:
    plan = make_plan(world_size, page_size, backend="auto", index_dtype=BF16, **limits)
    assert plan.backend == "mosaic"
    return Ranks(plan, None)


@GROUP
def test_decode(world_size, page_size):
    ranks = ranks_of(world_size, page_size)
    case = random_decode([300, 0, 4000, 1], 2, page_size, index_dtype=BF16)
    for tagged in (False, True):
        found = ranks.decode(case, ranks.put_comm(ranks.zero_comm()), slot=4, tagged=tagged)
        chains.check_decoded(ranks.plan, case, found, fused=False)
    chains.check_decoded(ranks.plan, case, ranks.decode(case, fused=True), fused=True)


@GROUP
def test_prefill(world_size, page_size):
    ranks = ranks_of(world_size, page_size)
    segments = [(40, 2600, 2640), (0, 0, 0), (57, 0, 57)]
    case = random_prefill(segments, 128, page_size, index_dtype=BF16)
    for fused in (False, True):
        found = ranks.prefill(case, fused=fused)
        chains.check_prefilled(ranks.plan, case, found, fused=fused)


@GROUP
def test_new_keys_are_stored(world_size, page_size):
    ranks, pages = ranks_of(world_size, page_size), 9
    rng = np.random.default_rng(0)
    cache = rng.integers(0, 1 << 16, (pages, page_size, 128), np.uint16)
    new_k = rng.integers(0, 1 << 16, (300, 128), np.uint16)
    slots = rng.permutation(pages * page_size)[:300].astype(np.int32)
    slots[::7] = -1
    written = ranks.plan.write_program(None)(
        ranks.put_codes(cache, INDEX_K), ranks.put_codes(new_k), ranks.put(slots)
    )
    whole = oracle.Shard(0, 1, page_size)
    want = oracle.write_index_k(cache, new_k, slots, whole)
    np.testing.assert_array_equal(ranks.get(written, INDEX_K).view(np.uint16), want)


@GROUP
@hostile.fuzz(examples=8)
@hypothesis.given(data=st.data())
def test_decode_under_hostile_metadata(world_size, page_size, data):
    limits = {"max_model_len": 16 * page_size, "max_num_batched_tokens": 512}
    ranks = ranks_of(world_size, page_size, **limits)
    case = hostile.decode_case(data.draw, ranks.plan, 5, 3, width=20, pages=40)
    chains.check_decoded(ranks.plan, case, ranks.decode(case), fused=False)


@hostile.FUSED
@hostile.fuzz(examples=8)
@hypothesis.given(data=st.data())
def test_prefill_under_hostile_metadata(fused, data):
    limits = {"max_model_len": 16 * 128, "max_num_batched_tokens": 512}
    ranks = ranks_of(2, 128, **limits)
    case = hostile.prefill_case(data.draw, ranks.plan, 3, 70, width=20, pages=40)
    found = ranks.prefill(case, fused=fused)
    chains.check_prefilled(ranks.plan, case, found, fused=fused)
