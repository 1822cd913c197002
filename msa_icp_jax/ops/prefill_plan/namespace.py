"""The array functions that window plans are computed with, in JAX as in torch."""

from __future__ import annotations

from typing import Any, Protocol

type AnyArray = Any  # of JAX or of torch: what is written for both depends on neither


class Namespace(Protocol):
    """A few functions as `jax.numpy` has them; axes are passed by position.

    `jax.numpy` itself is one. Where a scalar stands for an array (`minimum` of an array and an int)
    frameworks differ, so `clip` is called with scalars and `minimum` with arrays alone.
    """

    int32: Any
    amax: Any
    arange: Any
    clip: Any
    concatenate: Any
    cumsum: Any
    maximum: Any
    minimum: Any
    stack: Any
    where: Any
    zeros_like: Any
