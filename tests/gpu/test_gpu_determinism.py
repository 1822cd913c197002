"""Same inputs, same bits on the GPU, whatever else is in the batch."""

from __future__ import annotations

import chains
import numpy as np
import pytest
from chains import Ranks
from test_determinism import decode_case, requests, rounded


def ranks_of(world_size: int, page_size: int) -> Ranks:
    return Ranks(chains.make_plan(world_size, page_size, backend="mosaic"), None)


@pytest.mark.parametrize(("world_size", "page_size"), [(2, 256), (4, 128)])
def test_a_request_does_not_depend_on_its_batch(world_size, page_size):
    ranks, case = ranks_of(world_size, page_size), decode_case(page_size)
    whole = ranks.decode(case)
    for picked in ([0], [3], [0, 1], [3, 2, 1], [1] * 8):
        part, tokens = requests(case, picked)
        found = ranks.decode(part)
        np.testing.assert_array_equal(found.output[: len(tokens)], whole.output[tokens])
        np.testing.assert_array_equal(found.scores[:, : len(tokens)], whole.scores[:, tokens])


@pytest.mark.parametrize("fused", [False, True])
def test_repeats_give_the_same_bits(fused):
    ranks = ranks_of(4, 128)
    decode = decode_case(128)
    window = rounded(chains.random_prefill([(160, 2500, 2660), (20, 0, 20)], 200, 128, pages=80))
    first = ranks.decode(decode, fused=fused), ranks.prefill(window, fused=fused)
    for _ in range(50):
        again = ranks.decode(decode, fused=fused), ranks.prefill(window, fused=fused)
        np.testing.assert_array_equal(again[0].output, first[0].output)
        np.testing.assert_array_equal(again[0].scores, first[0].scores)
        for mine, theirs in zip(again[1], first[1], strict=True):
            np.testing.assert_array_equal(mine, theirs)
