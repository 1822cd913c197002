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
    """The best of several sums of a large array, and of fp8 products of random data.

    Through torch where it is given (and sees a GPU), else through JAX.
    """
    size = _READ_BYTES[jax.default_backend()]
    if torch is not None:
        words = torch.empty(size // 8, dtype=torch.int64, device="cuda").random_()
        return Ceilings(
            size / _best_us(torch, words.sum) / 1e6,
            2 * _MATMUL**3 / _best_us(torch, _torch_product(torch)) / 1e6,
        )
    bits = jax.random.bits(jax.random.key(0), (size // 4,)).astype(jnp.int32)
    read = size / _best_us(None, _jitted(jnp.sum, bits)) / 1e6
    if jax.default_backend() == "cpu":
        return Ceilings(read, None)
    return Ceilings(read, 2 * _MATMUL**3 / _best_us(None, _jax_product()) / 1e6)


def _best_us(torch: Any, call: Callable[[], Any]) -> float:
    call()
    if torch is not None:
        return min(timed(call, _RUNS, torch.cuda.synchronize))
    return on_clock(call, _RUNS, 1, "jit").spread[0]


def _torch_product(torch: Any) -> Callable[[], Any]:
    shape = (_MATMUL, _MATMUL)
    a, b = (torch.randn(shape, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    scale = torch.ones((), device="cuda")
    return lambda: torch._scaled_mm(
        a, b.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16
    )


def _jax_product() -> Callable[[], Any]:
    draw = jax.jit(lambda key: jax.random.normal(key, (_MATMUL,) * 2).astype(jnp.float8_e4m3fn))
    contract = (((1,), (1,)), ((), ()))
    return _jitted(
        lambda a, b: lax.dot_general(a, b, contract, preferred_element_type=jnp.bfloat16),
        *(draw(jax.random.key(i)) for i in range(2)),
    )


def _jitted(function: Callable[..., Any], *arrays: Any) -> Callable[[], Any]:
    compiled = jax.jit(function)
    return lambda: jax.block_until_ready(compiled(*arrays))
