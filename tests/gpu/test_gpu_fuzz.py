"""The kernels under hostile metadata on the GPU.

More examples: FUZZ_EXAMPLES=500. For addresses, run it under compute-sanitizer's memcheck, which
stops the process at the first access out of bounds.
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
from chains import Ranks
from hostile import FUSED, GROUP

WIDTH, PAGES = 20, 40

fuzz = hostile.fuzz(examples=8)


@functools.cache
def ranks_of(world_size: int, page_size: int) -> Ranks:
    """A table wider than the longest context, whose last column is the plane's last."""
    limits = {"max_model_len": 16 * page_size, "max_num_batched_tokens": 512}
    plan = chains.make_plan(world_size, page_size, backend="mosaic", precision="exact", **limits)
    return Ranks(plan, None)


@GROUP
@fuzz
@hypothesis.given(data=st.data())
def test_decode(world_size: int, page_size: int, data: Any) -> None:
    ranks = ranks_of(world_size, page_size)
    case = hostile.decode_case(data.draw, ranks.plan, 5, 3, width=WIDTH, pages=PAGES)
    chains.check_decoded(ranks.plan, case, ranks.decode(case), fused=False)

    wrong, right = hostile.with_counts(data.draw, case)
    output = ranks.decode(wrong).output
    tokens = len(wrong.counts)
    np.testing.assert_array_equal(output[:tokens][right], case.answer(ranks.plan)[right])
    hostile.check_form(output[:tokens], wrong.counts)


@FUSED
@GROUP
@fuzz
@hypothesis.given(data=st.data())
def test_prefill(world_size: int, page_size: int, fused: bool, data: Any) -> None:
    ranks = ranks_of(world_size, page_size)
    case = hostile.prefill_case(data.draw, ranks.plan, 4, 150, width=WIDTH, pages=PAGES)
    chains.check_prefilled(ranks.plan, case, ranks.prefill(case, fused=fused), fused=fused)

    wrong, right = hostile.with_counts(data.draw, case)
    output = ranks.prefill(wrong, fused=fused).output
    np.testing.assert_array_equal(output[:150][right], case.answer(ranks.plan)[right])
    hostile.check_form(output[:150], wrong.counts, prefill=True)


@pytest.mark.parametrize("tagged", [False, True], ids=["legacy", "tagged"])
@GROUP
@fuzz
@hypothesis.given(data=st.data())
def test_receive_storage(world_size: int, page_size: int, tagged: bool, data: Any) -> None:
    ranks = ranks_of(world_size, page_size)
    case = hostile.decode_case(data.draw, ranks.plan, 5, 3, width=WIDTH, pages=PAGES)
    hostile.check_storage(data.draw, ranks, case, tagged=tagged)
