"""Rounding index queries and keys to float8, on torch tensors."""

from __future__ import annotations

import torch

E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max  # 448
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def msa_icp_quantize_index(x: torch.Tensor) -> torch.Tensor:
    """Rounds index queries or keys to float8_e4m3fn: to nearest, ties to even, saturating.

    The same bytes as `msa_icp_jax.msa_icp_quantize_index`: what is larger than 448 becomes 448,
    infinities too, NaN stays NaN, and there is no scale. Nothing but torch is called, so it may be
    captured in a CUDA graph.

    Args:
      x: float16, bfloat16 or float32 of any shape, on any device. (float64 is refused: torch
        rounds it to float32 on the way, so do that by hand where it is wanted.)

    Returns:
      float8_e4m3fn of the same shape, a new tensor.

    Raises:
      TypeError: `x` is not a tensor of these dtypes.
    """
    if not isinstance(x, torch.Tensor) or x.dtype not in _DTYPES:
        got = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
        raise TypeError(f"x must be a float16, bfloat16 or float32 tensor, got {got}")
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
