"""Choice of the route: direct launches on Hopper, jitted JAX programs elsewhere."""

from __future__ import annotations

import functools
import warnings
from typing import Any, get_args

import torch

from msa_icp_jax import checks
from msa_icp_jax.backend import BACKENDS
from msa_icp_jax.typing import Backend, ResolvedRoute, Route
from msa_icp_torch import calls
from msa_icp_torch.bridge import is_rocm


def choose_route(route: Route, backend: Backend, device: torch.device) -> ResolvedRoute:
    """Returns "direct" or "dlpack" for "auto", "dlpack" or "direct".

    Raises:
      ValueError: `route` or `backend` is none of its three, direct is asked of another backend or
        device, or Mosaic of a CPU.
      RuntimeError: direct is asked where JAX's CUDA plugin is not as expected.
    """
    checks.one_of("route", route, get_args(Route))
    checks.one_of("backend", backend, BACKENDS)
    if backend == "mosaic" and device.type == "cpu":
        raise ValueError(
            'backend must be "auto" or "xla" on cpu: the kernels are for Hopper GPUs (compute '
            'capability 9.0), got "mosaic"'
        )
    may_be_direct = backend != "xla" and device.type == "cuda"
    if route == "dlpack" or (route == "auto" and not may_be_direct):
        return "dlpack"
    if backend == "xla":
        raise ValueError('route must be "auto" or "dlpack" where backend is "xla", got "direct"')
    if not _is_hopper(device):
        if route == "auto":
            return "dlpack"
        raise ValueError(
            f'route must be "auto" or "dlpack" on {_name(device)}: "direct" is Hopper\'s'
        )
    from msa_icp_jax.ops._mosaic import aot  # on demand: importing Pallas takes a while

    reason = aot.unavailable()
    if reason is None:
        return "direct"
    if route == "direct":
        raise RuntimeError(f"there is no direct route here: {reason}")
    _warn_dlpack(reason)
    return "dlpack"


def direct_route(plan: Any, device: torch.device, group: Any, spin_limit: int) -> calls.Route:
    """A `DirectRoute` for this device's GPU."""
    from msa_icp_torch.direct import DirectRoute

    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return DirectRoute(plan, device, group, spin_limit, sms)


def _is_hopper(device: torch.device) -> bool:
    if device.type != "cuda" or is_rocm():  # an AMD GPU's capability may read (9, 0), too
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


@functools.cache
def _warn_dlpack(reason: str) -> None:
    warnings.warn(
        f"msa_icp_torch: the dlpack route runs instead of the direct one: {reason}",
        RuntimeWarning,
        stacklevel=4,
    )
