"""The machine's ceilings, measured in the run that uses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.cases import Ceilings
from benchmarks.timing import on_clock, timed

_READ_BYTES = {"gpu": 2 << 30, "cpu": 64 << 20}
_MATMUL = 8192
_RUNS = 7


def measure(torch: Any) -> Ceilings:
    """The best of several sums of a large array, and of fp8 products where a unit does them.

    On the GPU that torch sees; without torch by JAX.
    """
    size = _READ_BYTES[jax.default_backend()]
    if torch is not None:
        sum_us, product_us = (_best(call, torch) for call in _in_torch(torch, size))
    else:
        sum_us, product_us = (call and _best(call, None) for call in _in_jax(size))
    return Ceilings(size / sum_us / 1e6, product_us and 2 * _MATMUL**3 / product_us / 1e6)


def _best(call: Callable[[], Any], torch: Any) -> float:
    call()
    if torch is not None:
        return min(timed(call, _RUNS, torch.cuda.synchronize))
    return on_clock(lambda: jax.block_until_ready(call()), _RUNS, 1, "jit").spread[0]


def _in_torch(torch: Any, size: int) -> tuple[Any, Any]:
    words = torch.empty(size // 8, dtype=torch.int64, device="cuda").random_()
    shape = (_MATMUL, _MATMUL)
    a, b = (torch.randn(shape, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")
    options = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16}
    return words.sum, lambda: torch._scaled_mm(a, b.t(), **options)


def _in_jax(size: int) -> tuple[Any, Any]:
    words, total = jnp.ones(size // 4, jnp.int32), jax.jit(jnp.sum)
    if jax.default_backend() == "cpu":
        return lambda: total(words), None
    keys = (jax.random.key(i) for i in range(2))
    a, b = (jax.random.normal(x, (_MATMUL,) * 2).astype(jnp.float8_e4m3fn) for x in keys)
    dims = (((1,), (1,)), ((), ()))
    dot = jax.jit(lambda a, b: lax.dot_general(a, b, dims, preferred_element_type=jnp.bfloat16))
    return lambda: total(words), lambda: dot(a, b)
