"""Rounding index queries and keys to float8."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from msa_icp_jax import checks

if TYPE_CHECKING:
    from msa_icp_jax.arrays import Array, Float, Float8e4m3fn

E4M3_MAX = float(jnp.finfo(jnp.float8_e4m3fn).max)  # 448


def msa_icp_quantize_index(x: Float[Array, "*shape"]) -> Float8e4m3fn[Array, "*shape"]:
    """Rounds index queries or keys to float8_e4m3fn: to nearest, ties to even, saturating.

    What is larger than 448 becomes 448, infinities too. ``x.astype(jnp.float8_e4m3fn)`` alone
    makes NaN of it, and products with NaN are skipped: such a key never wins. NaN stays NaN.
    There is no scale: a positive one would change no choice of blocks.

    Args:
      x: float16, bfloat16 or float32 of any shape. (float64 is refused: libraries round it to
        float32 on the way, so do that by hand where it is wanted.)

    Returns:
      float8_e4m3fn of the same shape.

    Raises:
      TypeError: `x` is not an array of these dtypes.
    """
    checks.array_of("x", x, jnp.float16, jnp.bfloat16, jnp.float32)
    return jnp.clip(x, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)
