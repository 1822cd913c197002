"""The words that arguments take, as types: a misspelt one is found by a type checker.

The functions check them too and raise a ValueError that names the argument and what it may be.
"""

from __future__ import annotations

from typing import Literal

Backend = Literal["auto", "mosaic", "xla"]
"""How the stages are computed: Mosaic GPU kernels, plain XLA, or whichever the device takes."""

ResolvedBackend = Literal["mosaic", "xla"]
"""What `Backend` came to: the `backend` of a plan."""

Precision = Literal["auto", "exact", "fast"]
"""How the kernels add float8 products; "auto" is exact decode and fast prefill."""

Transport = Literal["collective", "one-sided", "auto"]
"""How decode's candidate rows reach the ranks that own their heads."""

ResolvedTransport = Literal["collective", "one-sided"]
"""What `Transport` came to: the `transport` of a plan."""

IndexDtype = Literal["float8_e4m3fn", "bfloat16"]
"""Of index keys and queries, both alike."""

Route = Literal["auto", "dlpack", "direct"]
"""How `msa_icp_torch` launches the kernels."""

ResolvedRoute = Literal["dlpack", "direct"]
"""What `Route` came to: the `route` of a plan of `msa_icp_torch`."""
