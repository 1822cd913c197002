"""The sweep over a kernel's tuning: what it takes, and that kernels are lowered with it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.mosaic import gpu as mosaic_gpu
from jaxlib.mlir import ir

from benchmarks.cases import FULL
from msa_icp_jax import msa_icp_decode_index_score_sharded
from msa_icp_jax.ops._mosaic import aot
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


def test_a_kernel_is_lowered_with_the_config_in_use():
    configs = tune.configs_of("decode_score")
    committed = configs["CONFIG"]

    def modules() -> Any:
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
        lowered = aot.lower(score, query, keys, table, lens, struct((2, 4, 4), jnp.float32))
        return [_text(step.module) for step in lowered.steps if isinstance(step, aot.Kernel)]

    before = modules()
    with tune.using(configs, "CONFIG", dataclasses.replace(committed, stages=1)):
        during = modules()
    assert during != before == modules()
    assert configs["CONFIG"] is committed


def _text(module: bytes) -> str:
    """A kernel's text without its places in the source."""
    with ir.Context() as context:
        mosaic_gpu.dialect.register_dialect(context)
        context.allow_unregistered_dialects = True
        return str(ir.Module.parse(module))
