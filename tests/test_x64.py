"""The chains with x64 switched on: never needed, and no reason to fail."""

from __future__ import annotations

from collections.abc import Iterator

import chains
import jax
import pytest
from chains import Ranks, random_decode, random_prefill


@pytest.fixture(autouse=True)
def _x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("tagged", [False, True])
def test_decode(tagged: bool) -> None:
    ranks = Ranks(chains.make_plan(2, 256), None)
    case = random_decode([300, 2500, 3], 2, 256)
    found = ranks.decode(case, ranks.put_comm(ranks.zero_comm()), 4, tagged=tagged)
    chains.check_decoded(ranks.plan, case, found, fused=False)


@pytest.mark.parametrize("fused", [False, True])
def test_prefill(fused: bool) -> None:
    ranks = Ranks(chains.make_plan(2, 256), None)
    case = random_prefill([(3, 0, 3), (5, 2000, 2005)], 10, 256)
    chains.check_prefilled(ranks.plan, case, ranks.prefill(case, fused=fused), fused=fused)
