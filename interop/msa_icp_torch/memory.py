"""Peace between JAX's allocator and torch's on one GPU.

JAX's default is to take three quarters of the free GPU memory when its backend starts. The switch
against it is an environment variable that only counts until then.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import MutableMapping

import jax
from jax._src import xla_bridge  # no public way to ask without starting the backend

SWITCH = "XLA_PYTHON_CLIENT_PREALLOCATE"
_ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
_OFF = ("false", "False", "0")


def leave_room_for_torch(environ: MutableMapping[str, str] = os.environ) -> None:
    """Turns JAX's preallocation off; warns where that is too late or was ruled out by the user."""
    preallocates = environ.get(_ALLOCATOR, "").lower() != "platform" and (
        environ.get(SWITCH, "") not in _OFF
    )
    if not preallocates:
        return
    if gpu_backend_is_up():
        warnings.warn(
            f"JAX has preallocated GPU memory that torch can no longer use. Set {SWITCH}=false, or "
            "import msa_icp_torch, before the first JAX computation.",
            RuntimeWarning,
            stacklevel=3,
        )
    elif environ.get(SWITCH):
        warnings.warn(
            f"{SWITCH}={environ[SWITCH]} is set: on a GPU, JAX will take most of the memory that "
            "torch could use. Set it to false, or leave it unset.",
            RuntimeWarning,
            stacklevel=3,
        )
    else:
        environ[SWITCH] = "false"


def gpu_backend_is_up() -> bool:
    """Whether JAX already runs on a GPU; starts nothing."""
    if not xla_bridge.backends_are_initialized():
        return False
    return any(device.platform == "gpu" for device in jax.local_devices())
