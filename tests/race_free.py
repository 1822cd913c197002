"""Runs kernels in the interpreter, where any race between threads or CTAs fails the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from msa_icp_jax.ops._mosaic.launch import Launch, Target


def interpreter(ctas: int, pdl: bool = True, precision: str = "exact") -> Launch:
    """On a machine of `ctas` CTAs at a time; race detection costs their square, so at most 16."""
    assert ctas <= 16
    return Launch(Target(sms=ctas, interpret=True), pdl, precision)


def run(call: Callable[..., Any], *arrays: Any) -> Any:
    """call(*arrays) under jit, as numpy arrays."""
    try:
        out = jax.tree.map(np.asarray, jax.jit(call)(*arrays))
        assert not gpu_callbacks.get_races().races_found
        return out
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()
