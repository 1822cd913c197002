"""The machine's ceilings, measured in the run that uses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.cases import Ceilings
from benchmarks.timing import on_clock, timed

_GPU_BYTES, _CPU_BYTES = 2 << 30, 64 << 20
_MATMUL = 8192
_RUNS = 7


def measure(torch: Any) -> Ceilings:
    """The best of several sums of a large array, and of fp8 products of random data.

    On the GPU that torch sees; without torch the sum alone, by JAX.
    """
    if torch is None:
        words = jnp.ones(_CPU_BYTES // 4, jnp.int32)
        total = jax.jit(jnp.sum).lower(words).compile()
        us = on_clock(lambda: jax.block_until_ready(total(words)), _RUNS, 1, "jit").spread[0]
        return Ceilings(_CPU_BYTES / us / 1e6, None)

    def best_us(call: Callable[[], Any]) -> float:
        call()
        return min(timed(call, _RUNS, torch.cuda.synchronize))

    words = torch.empty(_GPU_BYTES // 8, dtype=torch.int64, device="cuda").random_()
    shape = (_MATMUL, _MATMUL)
    a, b = (torch.randn(shape, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")
    rates = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16}
    product_us = best_us(lambda: torch._scaled_mm(a, b.t(), **rates))
    return Ceilings(_GPU_BYTES / best_us(words.sum) / 1e6, 2 * _MATMUL**3 / product_us / 1e6)
