"""The arithmetic that the plain definitions of both scorers share."""

from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from chains import Ranks, make_plan, random_decode, random_prefill

from msa_icp_jax.ops._portable import e4m3_values


def test_every_code_has_its_value():
    codes = np.arange(256, dtype=np.uint8)
    found = np.asarray(e4m3_values(jnp.asarray(codes)))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, oracle.e4m3_decode(codes))
    np.testing.assert_array_equal(found, codes.view(jnp.float8_e4m3fn).astype(np.float32))


@pytest.mark.parametrize("fused", [False, True])
def test_no_float8_value_is_on_its_way_to_a_product(fused):
    """XLA on a GPU would multiply such operands in fp8, which loses bits of the sum."""
    ranks = Ranks(make_plan(2, 128, backend="xla"), None)
    decode, prefill = random_decode([300, 40], 4, 128), random_prefill([(40, 260, 300)], 64, 128)
    lowered = [
        ranks.plan.decode_program(decode_query_len=4, fused=fused).lower(
            *ranks.decode_arrays(decode)
        ),
        ranks.plan.prefill_program(fused=fused).lower(*ranks.prefill_arrays(prefill)),
    ]
    for text in (x.as_text() for x in lowered):
        assert "stablehlo.dot_general" in text
        of_float8 = [line for line in text.splitlines() if "f8E4M3FN" in line]
        assert of_float8
        assert not [x for x in of_float8 if re.search(r"stablehlo\.(convert|dot_general)\b", x)]
