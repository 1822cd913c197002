"""What every test of this folder needs: a GPU that the kernels run on."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    if not ours:
        return
    device = jax.devices()[0]
    hopper = device.platform == "gpu" and getattr(device, "compute_capability", "") == "9.0"
    skip = pytest.mark.skipif(not hopper, reason="needs a GPU of compute capability 9.0")
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        item.add_marker(skip)
