"""What every test of this folder needs: two GPUs that the kernels run on."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    if not ours:
        return
    gpus = sum(getattr(x, "compute_capability", "") == "9.0" for x in jax.devices())
    reason = f"needs two GPUs of compute capability 9.0, this machine has {gpus}"
    for item in ours:
        item.add_marker(pytest.mark.multigpu)
        item.add_marker(pytest.mark.skipif(gpus < 2, reason=reason))
