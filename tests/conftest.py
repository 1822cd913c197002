"""Gives JAX four virtual CPU devices, one for each rank of the largest group, and no promotions.

The flag counts only until JAX starts its backend, the modes (of processes that tests start, too)
only until JAX is imported, so they are set before any test module is imported.
"""

import os
from collections.abc import Iterator

import pytest

_FLAG = "--xla_force_host_platform_device_count=4"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}".strip()
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"


@pytest.fixture(autouse=True)
def _modes() -> Iterator[None]:
    """A test in which a global mode stays changed fails, and those behind it do not."""
    from global_modes import kept  # on demand: it imports JAX

    with kept():
        yield
