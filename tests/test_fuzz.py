"""Chains under hostile metadata, on XLA: the oracle's answer, or nothing; never a neighbour's.

More examples: FUZZ_EXAMPLES=200.
"""

from __future__ import annotations

import functools
from typing import Any

import chains
import hostile
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from chains import Ranks, make_plan

WIDTH, PAGES = 9, 24
REQUESTS, QUERY_LEN = 3, 2
SEGMENTS, TOKENS = 4, 24

fuzz = hostile.fuzz(examples=8)
# Pages and ranks of every kind, each number of ranks and each page size with both types of keys.
KINDS = [
    (2, 128, "float8_e4m3fn"),
    (2, 256, "bfloat16"),
    (4, 128, "bfloat16"),
    (4, 256, "float8_e4m3fn"),
]


@functools.cache
def ranks_of(world_size: int, page_size: int, index_dtype: str = "float8_e4m3fn") -> Ranks:
    """A table wider than the longest context, whose last column is the plane's last.

    Keys past the longest context are cut off by a prefill plan, which the oracle doesn't know of.
    """
    limits = {"max_model_len": 8 * page_size, "max_decode_tokens": 8, "max_num_batched_tokens": 64}
    return Ranks(make_plan(world_size, page_size, index_dtype=index_dtype, **limits), None)


@pytest.mark.parametrize(("world_size", "page_size", "index_dtype"), KINDS)
@fuzz
@hypothesis.given(data=st.data())
def test_decode(world_size: int, page_size: int, index_dtype: str, data: Any) -> None:
    ranks = ranks_of(world_size, page_size, index_dtype)
    sizes = {"width": WIDTH, "pages": PAGES}
    case = hostile.decode_case(data.draw, ranks.plan, REQUESTS, QUERY_LEN, **sizes)
    chains.check_decoded(ranks.plan, case, ranks.decode(case), fused=False)

    wrong, right = hostile.with_counts(data.draw, case)
    output = ranks.decode(wrong).output
    tokens = len(wrong.counts)
    np.testing.assert_array_equal(output[:tokens][right], case.answer(ranks.plan)[right])
    hostile.check_form(output[:tokens], wrong.counts)
    assert (output[tokens:] == chains.OLD_WORD).all()


@pytest.mark.parametrize(
    ("world_size", "page_size", "index_dtype", "fused"),
    [(*kind, fused) for kind, fused in zip(KINDS, (True, True, False, False), strict=True)],
)
@fuzz
@hypothesis.given(data=st.data())
def test_prefill(world_size: int, page_size: int, index_dtype: str, fused: bool, data: Any) -> None:
    ranks = ranks_of(world_size, page_size, index_dtype)
    sizes = {"width": WIDTH, "pages": PAGES}
    case = hostile.prefill_case(data.draw, ranks.plan, SEGMENTS, TOKENS, **sizes)
    chains.check_prefilled(ranks.plan, case, ranks.prefill(case, fused=fused), fused=fused)

    wrong, right = hostile.with_counts(data.draw, case)
    output = ranks.prefill(wrong, fused=fused).output
    np.testing.assert_array_equal(output[:TOKENS][right], case.answer(ranks.plan)[right])
    hostile.check_form(output[:TOKENS], wrong.counts, prefill=True)
    assert (output[TOKENS:] == chains.OLD_WORD).all()


@pytest.mark.parametrize(("world_size", "page_size", "tagged"), [(2, 256, False), (4, 128, True)])
@fuzz
@hypothesis.given(data=st.data())
def test_receive_storage(world_size: int, page_size: int, tagged: bool, data: Any) -> None:
    """Storage of any content, every rank at a count of its own: right, or -1 and counted."""
    ranks = ranks_of(world_size, page_size)
    sizes = {"width": WIDTH, "pages": PAGES}
    case = hostile.decode_case(data.draw, ranks.plan, REQUESTS, QUERY_LEN, **sizes)
    hostile.check_storage(data.draw, ranks, case, tagged=tagged)
