"""The array types of this package's signatures: what an array holds, and its shape.

``Int32[Array, "T hpr 16"]`` is an int32 array of three axes, the last one of 16. An axis of the
same name has the same size throughout a signature, and ``*row`` is any number of them. To a type
checker all of them are `Array`. They are jaxtyping's, so that its decorator can check a call.

Names are the contract's: T tokens, B requests or segments, W ranks, hpr heads of a rank, C tokens
that the receive storage has room for, R rows of a page (or all of a compound page). ``rows``,
``out_rows`` and ``carrier_rows`` are those of buffers that may have more than T.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jax import Array
from jaxtyping import AbstractDtype, BFloat16, Bool, Float, Float8e4m3fn, Float32, Int32, Shaped

if TYPE_CHECKING:
    from typing import Annotated as IndexFloat
else:

    class IndexFloat(AbstractDtype):
        """Index queries and keys: float8_e4m3fn or bfloat16."""

        dtypes = ("float8_e4m3fn", "bfloat16")


__all__ = [
    "Array",
    "BFloat16",
    "Bool",
    "Float",
    "Float8e4m3fn",
    "Float32",
    "IndexFloat",
    "Int32",
    "Shaped",
]
