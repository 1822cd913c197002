"""Rounding to float8 on the GPU, whose conversion instructions are not the CPU's."""

from __future__ import annotations

import inputs
import jax
import jax.numpy as jnp
import test_quantize
from test_quantize import by_dtype

from msa_icp_jax import msa_icp_quantize_index


@by_dtype
def test_every_edge(dtype):
    x = inputs.rounding_edges(dtype)
    device = jnp.asarray(x)
    test_quantize.check(x, msa_icp_quantize_index(device))
    behind_other_work = jax.jit(lambda x: msa_icp_quantize_index(x[::-1]))
    test_quantize.check(x[::-1], behind_other_work(device))
