"""The machine's ceilings, measured in the run that uses them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.cases import BFLOAT16, FLOAT8, Ceilings
from benchmarks.timing import on_clock, timed

_READ_BYTES = {"gpu": 2 << 30, "cpu": 64 << 20}
_MATMUL = 8192
_RUNS = 7


def measure(torch: Any) -> Ceilings:
    """The best of several sums of a large array, and of products, fp8 and bf16, on a GPU.

    On the one that torch sees; without torch by JAX.
    """
    size = _READ_BYTES[jax.default_backend()]
    calls = _in_jax(size) if torch is None else _in_torch(torch, size)
    sum_us, *product_us = (_best(call, torch) for call in calls)
    rates = [2 * _MATMUL**3 / us / 1e6 for us in product_us]
    return Ceilings(size / sum_us / 1e6, *(rates or [None]))


def _best(call: Callable[[], Any], torch: Any) -> float:
    call()
    if torch is not None:
        return min(timed(call, _RUNS, torch.cuda.synchronize))
    return on_clock(lambda: jax.block_until_ready(call()), _RUNS, 1, "jit").spread[0]


def _in_torch(torch: Any, size: int) -> list[Callable[[], Any]]:
    words = torch.empty(size // 8, dtype=torch.int64, device="cuda").random_()
    shape = (_MATMUL, _MATMUL)
    wide = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    a, b = (x.to(torch.float8_e4m3fn) for x in wide)
    one = torch.ones((), device="cuda")
    options = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16}
    product = functools.partial(torch._scaled_mm, a, b.t(), **options)
    return [words.sum, product, lambda: wide[0] @ wide[1].t()]


def _in_jax(size: int) -> list[Callable[[], Any]]:
    words, total = jnp.ones(size // 4, jnp.int32), jax.jit(jnp.sum)
    calls = [lambda: total(words)]
    if jax.default_backend() == "cpu":
        return calls
    dims = (((1,), (1,)), ((), ()))
    dot = jax.jit(lambda a, b: lax.dot_general(a, b, dims, preferred_element_type=jnp.bfloat16))
    for dtype in (FLOAT8, BFLOAT16):
        keys = (jax.random.key(i) for i in range(2))
        pair = [jax.random.normal(key, (_MATMUL,) * 2).astype(dtype) for key in keys]
        calls.append(functools.partial(dot, *pair))
    return calls
