"""The arithmetic that the plain definitions of both scorers share."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from chains import (
    Ranks,
    check_decoded,
    check_prefilled,
    make_mesh,
    make_plan,
    random_decode,
    random_prefill,
)

from msa_icp_jax.geometry import INDEX_DTYPES
from msa_icp_jax.ops import _portable
from msa_icp_jax.ops._portable import Tuning, e4m3_values


def test_every_code_has_its_value():
    codes = np.arange(256, dtype=np.uint8)
    found = np.asarray(e4m3_values(jnp.asarray(codes.view(jnp.float8_e4m3fn))))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, oracle.decode(codes))
    np.testing.assert_array_equal(found, codes.view(jnp.float8_e4m3fn).astype(np.float32))


# What operands of products are on each platform. Only the first has been run by its own tests.
OPERANDS = {"cpu": "f32", "cuda": "f16", "rocm": "f16", "tpu": "bf16"}


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@pytest.mark.parametrize("platform", OPERANDS)
@pytest.mark.parametrize("fused", [False, True])
def test_products_are_exact_on_every_platform(platform, fused, index_dtype):
    """XLA on a GPU would multiply in fp8, which loses bits of the sum, if both operands came so."""
    ranks = Ranks(make_plan(2, 128, backend="xla", index_dtype=index_dtype), None)
    decode = random_decode([300, 40], 4, 128, index_dtype=index_dtype)
    prefill = random_prefill([(40, 260, 300)], 64, 128, index_dtype=index_dtype)
    programs = [
        (ranks.plan.decode_program(decode_query_len=4, fused=fused), ranks.decode_arrays(decode)),
        (ranks.plan.prefill_program(fused=fused), ranks.prefill_arrays(prefill)),
    ]
    operand = OPERANDS[platform]
    if index_dtype == "bfloat16" and platform != "cpu":
        operand = "bf16"
    for program, arrays in programs:
        text = program.trace(*arrays).lower(lowering_platforms=(platform,)).as_text()
        products = re.findall(r"stablehlo\.dot_general.*: (\(.*)", text)
        assert products
        for types in products:
            left, right, result = re.findall(r"x([a-z]+\d+)>", types)
            assert (left, right, result) == (operand, operand, "f32")
        # Queries, the left operands, never are float8 numbers to XLA.
        if index_dtype == "bfloat16":
            continue
        converted = re.findall(r"stablehlo\.convert.*f8E4M3FN", text)
        assert len(converted) == (0 if platform == "cpu" else len(products))


# As the platforms have them, but with steps of few columns.
TUNINGS = {
    "cpu": Tuning(jnp.float32, jnp.uint8, 2048, 16),
    "gpu": Tuning(jnp.float16, jnp.uint32, 2048, 16),
    "other": Tuning(jnp.bfloat16, jnp.uint8, 2048, 16),
}


@pytest.fixture
def _fresh_programs():
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.usefixtures("_fresh_programs")
@pytest.mark.parametrize(
    ("platform", "mesh", "fused"),
    [("cpu", True, True), ("gpu", False, False), ("other", False, False)],
)
def test_steps_and_tiles_make_no_difference(platform, mesh, fused, monkeypatch):
    """Many steps, tiles that hang over, requests of all lengths, every platform's tuning."""
    monkeypatch.setattr(_portable, "_CPU", TUNINGS[platform])
    ranks = Ranks(make_plan(2, 128, max_model_len=8000), make_mesh(2) if mesh else None)
    decode = random_decode([7000, 40, 0, 3100, 1], 2, 128)
    check_decoded(ranks.plan, decode, ranks.decode(decode, fused=False), fused=False)
    prefill = random_prefill([(40, 6260, 6300), (1, 0, 1), (20, 100, 120)], 64, 128)
    found = ranks.prefill(prefill, fused=fused)
    check_prefilled(ranks.plan, prefill, found, fused=fused)
