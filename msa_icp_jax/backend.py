"""Choice of the backend: the Mosaic GPU kernels on Hopper, the plain XLA definitions elsewhere."""

from __future__ import annotations

import functools
import warnings
from typing import Any, get_args

import jax
import jax.numpy as jnp

from msa_icp_jax import checks
from msa_icp_jax.ambient import check_unsplit
from msa_icp_jax.typing import Backend, Precision, ResolvedBackend

BACKENDS = get_args(Backend)
PRECISIONS = get_args(Precision)


def resolve_backend(backend: Backend, device: jax.Device | None = None) -> ResolvedBackend:
    """Returns "mosaic" or "xla" for "auto", "mosaic" or "xla".

    "auto" takes Mosaic on a GPU of compute capability 9.0 and XLA elsewhere; on another GPU or a
    TPU it warns once. Without `device` it looks at JAX's default one. "mosaic" is taken at its word
    wherever a program is built (it can be exported for a GPU from a machine without one).

    Raises:
      ValueError: `backend` is not one of the three.
    """
    checks.one_of("backend", backend, BACKENDS)
    if backend != "auto":
        return backend
    device = device if device is not None else default_device()
    if device.platform == "cpu":
        return "xla"
    if device.platform == "gpu" and getattr(device, "compute_capability", None) == "9.0":
        return "mosaic"
    _warn_portable(f"{device.device_kind} (they need compute capability 9.0)")
    return "xla"


def check_kernels_run(device: jax.Device) -> None:
    """Raises where the Mosaic kernels cannot run: they can be built for export there."""
    capability = getattr(device, "compute_capability", None)
    if device.platform != "gpu" or capability != "9.0":
        raise ValueError(
            'backend "mosaic" runs on Hopper GPUs (compute capability 9.0), got '
            f"{device.device_kind}: its programs can be lowered and exported here; to run here "
            'prepare the plan with backend "auto" or "xla"'
        )


def default_device() -> jax.Device:
    """The device of arrays that name none: the configured `jax_default_device`, else the first."""
    chosen = jax.config.jax_default_device
    if isinstance(chosen, str):  # a platform
        return jax.local_devices(backend=chosen)[0]
    return chosen if chosen is not None else jax.local_devices()[0]


def check_precision(precision: Precision) -> Precision:
    """Raises unless `precision` is "auto", "exact" or "fast"."""
    return checks.one_of("precision", precision, PRECISIONS)


def takes_mosaic(backend: Backend, *arrays: Any) -> bool:
    """Whether `backend` resolves to Mosaic.

    Raises:
      ValueError: `backend` is unknown, `arrays` are split over Explicit mesh axes, or a kernel
        would get them under shard_map's check_vma=True: kernels write into refs, and refs cannot
        carry varying manual axes.
    """
    check_unsplit(*arrays)
    if resolve_backend(backend) == "xla":
        return False
    if any(varying_axes(x) for x in arrays):
        raise ValueError(
            'backend="mosaic" needs jax.shard_map(..., check_vma=False), got check_vma=True'
        )
    return True


def varying_axes(x: Any) -> frozenset[str]:
    """The manual mesh axes over which `x` varies (empty outside shard_map(check_vma=True))."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def vary_as(x: jax.Array, *others: Any) -> jax.Array:
    """Marks `x` as varying over every axis that one of `others` varies over.

    Loops need it under shard_map(check_vma=True): a carry must vary from the start as it does at
    the end. A no-op elsewhere.
    """
    axes = frozenset[str]().union(*(varying_axes(o) for o in others)) - varying_axes(x)
    return jax.lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x


def start_at(*indices: Any) -> tuple[jax.Array, ...]:
    """Start indices of a dynamic slice, all int32: with x64 on, Python ints would be int64."""
    return tuple(jnp.asarray(index, jnp.int32) for index in indices)


@functools.cache
def _warn_portable(what: str) -> None:
    warnings.warn(
        f"msa_icp_jax: no Mosaic kernels for {what}; the portable XLA path runs instead",
        stacklevel=3,
    )
