"""Whole chains of the kernels in interpret mode: public functions, all ranks, one CPU device."""

from __future__ import annotations

from collections.abc import Iterator

import chains
import pytest
import race_free
from chains import Ranks, random_decode, random_prefill
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from msa_icp_jax.ops._mosaic import launch


@pytest.fixture(autouse=True)
def _simulated_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU of two CTAs; any race fails the test."""
    monkeypatch.setattr(launch, "current_target", lambda: race_free.interpreter(2).target)
    yield
    races = gpu_callbacks.get_races().races_found
    gpu_callbacks.reset_gpu_interpret_mode_state()
    assert not races


def ranks_of(world_size: int, page_size: int) -> Ranks:
    limits = {"max_model_len": 1024, "max_num_seqs": 2, "max_num_batched_tokens": 64}
    return Ranks(chains.make_plan(world_size, page_size, backend="mosaic", **limits), None)


@pytest.mark.parametrize(("world_size", "page_size"), [(2, 128), (4, 256)])
def test_decode(world_size: int, page_size: int) -> None:
    ranks = ranks_of(world_size, page_size)
    case = random_decode([700, 0], 1, page_size, pages=8, width=8)
    chains.check_decoded(ranks.plan, case, ranks.decode(case, fused=False), fused=False)


def test_prefill() -> None:
    ranks = ranks_of(2, 128)
    case = random_prefill([(10, 300, 310), (20, 0, 20)], 40, 128, pages=8, width=8)
    chains.check_prefilled(ranks.plan, case, ranks.prefill(case, fused=False), fused=False)
