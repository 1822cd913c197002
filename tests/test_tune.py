"""The sweep over a kernel's tuning: what it takes, and that kernels are lowered with it."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks.cases import FULL
from msa_icp_jax import msa_icp_decode_index_score_sharded
from tools import tune


def test_combinations_are_those_of_the_values_named():
    committed = tune.configs_of("decode_score")["CONFIG"]
    found = tune.combinations(committed, ["stages=1,2", "late_from=5"])
    assert list(found) == ["committed", "stages=1 late_from=5", "stages=2 late_from=5"]
    assert found["committed"] is committed
    assert found["stages=1 late_from=5"] == dataclasses.replace(committed, stages=1, late_from=5)
    (*_, last) = tune.combinations(tune.configs_of("prefill_score")["FAST"], ["registers=(9, 8)"])
    assert last == "registers=(9, 8)"


@pytest.mark.parametrize("wrong", ["stages", "stages=", "stage=1", "stages=1,,"])
def test_what_is_no_value_of_a_field_is_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        tune.main(["decode_score", wrong])
    assert "usage: python tools/tune.py" in capsys.readouterr().err


def test_without_a_gpu_nothing_is_timed(capsys):
    assert tune.main(["merge", "warp_rows_per_sm=2"]) == 2
    assert "nothing can be timed here" in capsys.readouterr().out


@pytest.mark.parametrize("kernel", tune.STAGES)
def test_every_kernel_has_a_config_and_cases(kernel):
    configs = tune.configs_of(kernel)
    assert dataclasses.is_dataclass(configs["CONFIG" if "CONFIG" in configs else "FAST"])
    stem = tune.CASES[kernel].removesuffix("*")
    assert any(case.name.startswith(stem) and tune.STAGES[kernel] in case.stages for case in FULL)


def test_a_kernel_is_built_with_the_config_in_use():
    configs = tune.configs_of("decode_score")
    committed = configs["CONFIG"]

    def shapes() -> Any:
        def score(*arrays: Any) -> Any:
            return msa_icp_decode_index_score_sharded(
                *arrays,
                rank=0,
                world_size=4,
                page_size=128,
                decode_query_len=1,
                max_decode_query_len=1,
                backend="mosaic",
            )

        struct = jax.ShapeDtypeStruct
        query = struct((2, 4, 128), jnp.float8_e4m3fn)
        keys = struct((8, 32, 128), jnp.float8_e4m3fn)
        table, lens = struct((2, 4), jnp.int32), struct((2,), jnp.int32)
        arguments = (query, keys, table, lens, struct((2, 4, 4), jnp.float32))
        text = str(jax.make_jaxpr(score)(*arguments))
        return re.findall(r"\b[a-z]+\d+\[[\d,]*\]", text)

    before = shapes()
    with tune.using(configs, "CONFIG", dataclasses.replace(committed, stages=1)):
        during = shapes()
    assert during != before == shapes()
    assert configs["CONFIG"] is committed
