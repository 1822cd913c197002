"""JAX's own modes, which a program sets for all its libraries: none is needed, none a failure.

Rank promotion "raise" and dtype promotion "strict" are on in every test of this suite: conftest.
"""

from __future__ import annotations

import re
from typing import Any

import chains
import jax
import numpy as np
import pytest
from chains import Ranks, random_decode, random_prefill

from msa_icp_jax import msa_icp_index_score_sharded_plan


def decode_case() -> chains.Decode:
    return random_decode([300, 900, 3], 2, 256, pages=8, width=4)


def prefill_case() -> chains.Prefill:
    return random_prefill([(3, 0, 3), (5, 900, 905)], 10, 256, pages=8, width=4)


def ranks_of(backend: str = "xla") -> Ranks:
    limits = {"max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    return Ranks(chains.make_plan(2, 256, backend=backend, **limits), None)


def test_promotions_are_forbidden_in_this_suite() -> None:
    assert jax.config.jax_numpy_rank_promotion == "raise"
    assert jax.config.jax_numpy_dtype_promotion == "strict"


# ---- 64 bits ----


@pytest.mark.parametrize("tagged", [False, True])
def test_decode_with_64_bits_on(tagged: bool) -> None:
    ranks, case = ranks_of(), decode_case()
    with jax.enable_x64(True):
        found = ranks.decode(case, ranks.put_comm(ranks.zero_comm()), 4, tagged=tagged)
    chains.check_decoded(ranks.plan, case, found, fused=False)


def test_prefill_with_64_bits_on() -> None:
    ranks, case = ranks_of(), prefill_case()
    with jax.enable_x64(True):
        found = ranks.prefill(case, fused=False)
    chains.check_prefilled(ranks.plan, case, found, fused=False)


def kernels_of(program: Any, arrays: Any) -> list[str]:
    """The kernels of a program lowered for CUDA."""
    lowered = program.trace(*arrays).lower(lowering_platforms=("cuda",))
    return re.findall(r"custom_call @mosaic_gpu_v2.*?module = \"(.*?)\"", lowered.as_text())


def test_kernels_are_the_same_with_64_bits_on() -> None:
    ranks = ranks_of("mosaic")
    decode = ranks.plan.decode_program(decode_query_len=2)
    prefill = ranks.plan.prefill_program()
    steps = ranks.decode_arrays(decode_case()), ranks.prefill_arrays(prefill_case())
    want = kernels_of(decode, steps[0]), kernels_of(prefill, steps[1])
    assert [len(kernels) for kernels in want] == [3, 3]
    with jax.enable_x64(True):
        assert (kernels_of(decode, steps[0]), kernels_of(prefill, steps[1])) == want


# ---- the default device ----


class _Hopper:
    platform = "gpu"
    compute_capability = "9.0"
    device_kind = "a Hopper GPU"


@pytest.mark.parametrize("chosen", ["cpu", jax.devices("cpu")[1]], ids=["platform", "device"])
def test_auto_follows_the_default_device(chosen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = {None: [_Hopper()], "cpu": jax.devices("cpu")}
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: devices[backend])
    assert chains.make_plan(2, 128, backend="auto").backend == "mosaic"
    with jax.default_device(chosen):
        assert chains.make_plan(2, 128, backend="auto").backend == "xla"


def test_a_host_plan_lies_on_the_default_device() -> None:
    first, second = jax.devices("cpu")[:2]
    lengths: list[Any] = [[3, 0], [5, 0], 4]
    with jax.default_device(second):
        plan = msa_icp_index_score_sharded_plan(*lengths, qo_offset=[2, 0])
        asked = msa_icp_index_score_sharded_plan(*lengths, qo_offset=[2, 0], device=first)
    assert plan.qo_lens.devices() == {second} and not plan.qo_lens.committed
    assert asked.qo_lens.devices() == {first}
    np.testing.assert_array_equal(plan.qo_lens, asked.qo_lens)
