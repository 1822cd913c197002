"""The machine's ceilings, measured in the run that uses them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_GPU_READ_BYTES = 2 << 30
_CPU_READ_BYTES = 64 << 20
_MATMUL = 8192
_RUNS = 7


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """The two rates that bound a kernel.

    Attributes:
      read_tbps: bytes read, in TB/s: best of several sums of a large array.
      fp8_tflops: 8192^3 fp8 product of random data, in TFLOP/s; None where no unit does it.
    """

    read_tbps: float
    fp8_tflops: float | None


def measure(torch: Any) -> Ceilings:
    """Measures both ceilings, through torch where it is given (and sees a GPU)."""
    if torch is not None:
        return Ceilings(_torch_read(torch), _torch_matmul(torch))
    if jax.default_backend() == "gpu":
        return Ceilings(_jax_read(_GPU_READ_BYTES), _jax_matmul())
    return Ceilings(_jax_read(_CPU_READ_BYTES), None)


def _torch_read(torch: Any) -> float:
    words = torch.empty(_GPU_READ_BYTES // 8, dtype=torch.int64, device="cuda").random_()
    return _GPU_READ_BYTES / _torch_seconds(torch, words.sum, 1) / 1e12


def _torch_matmul(torch: Any) -> float:
    shape = (_MATMUL, _MATMUL)
    a, b = (torch.randn(shape, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    scale = torch.ones((), device="cuda")

    def product() -> Any:
        return torch._scaled_mm(a, b.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)

    return 2 * _MATMUL**3 / _torch_seconds(torch, product, 4) / 1e12


def _torch_seconds(torch: Any, run: Callable[[], Any], repeats: int) -> float:
    """The best time of one call."""
    run()
    best = float("inf")
    for _ in range(_RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e-3 / repeats)
    return best


def _jax_read(size: int) -> float:
    words = jax.random.bits(jax.random.key(0), (size // 4,)).astype(jnp.int32)
    return size / _jax_seconds(jax.jit(jnp.sum), words) / 1e12


def _jax_matmul() -> float:
    draw = jax.jit(lambda key: jax.random.normal(key, (_MATMUL,) * 2).astype(jnp.float8_e4m3fn))
    a, b = draw(jax.random.key(0)), draw(jax.random.key(1))
    contract = (((1,), (1,)), ((), ()))
    product = jax.jit(
        lambda a, b: lax.dot_general(a, b, contract, preferred_element_type=jnp.bfloat16)
    )
    return 2 * _MATMUL**3 / _jax_seconds(product, a, b) / 1e12


def _jax_seconds(run: Callable[..., Any], *arrays: Any) -> float:
    """The best time of one call."""
    jax.block_until_ready(run(*arrays))
    best = float("inf")
    for _ in range(_RUNS):
        start = time.perf_counter()
        jax.block_until_ready(run(*arrays))
        best = min(best, time.perf_counter() - start)
    return best
