"""Meshes of the caller's: the one in context, and axes that kernels and loops cannot be split over.

`jax.set_mesh` changes what every array made behind it is typed with. A program has a mesh of its
own, or none, and does not depend on that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh


def own_mesh(mesh: Mesh | None) -> Any:
    """The context to call a program over `mesh` in (None: one device), whatever mesh is ambient.

    Raises:
      ValueError: the call is traced (inside the caller's `jit`, say) under another mesh.
    """
    ambient = jax.sharding.get_abstract_mesh()
    if ambient.empty:
        return contextlib.nullcontext()
    try:
        return jax.set_mesh(None)
    except ValueError:  # traced: the mesh is that of the caller's function
        pass
    if mesh is None:
        if AxisType.Manual in ambient.axis_types:  # one device of it
            return contextlib.nullcontext()
        return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))
    if mesh.abstract_mesh != ambient:
        raise ValueError(
            f"mesh must be the ambient one where the call is traced, {ambient}, got "
            f"{mesh.abstract_mesh}"
        )
    return contextlib.nullcontext()


def check_one_device(arguments: Mapping[str, Any]) -> None:
    """Raises, by name, for an array whose type has an Explicit mesh: it is not one device's."""
    for name, value in arguments.items():
        for leaf in jax.tree.leaves(value):
            mesh = jax.typeof(leaf).sharding.mesh
            if AxisType.Explicit in mesh.axis_types:
                raise ValueError(
                    f"{name} must lie on one device where mesh=None, got {jax.typeof(leaf)} on "
                    f"Explicit axes {dict(mesh.shape)}: pass the mesh, or move it by "
                    "jax.device_put(array, device)"
                )


def check_unsplit(*arrays: Any) -> None:
    """Raises for an array that is split over an Explicit axis: what computes with it is not."""
    for x in arrays:
        sharding = getattr(jax.typeof(x), "sharding", None)
        if sharding is not None and any(axes is not None for axes in sharding.spec):
            raise ValueError(
                f"arrays must not be split over Explicit mesh axes, got {jax.typeof(x)}: make the "
                "axes Manual (name them in jax.shard_map's axis_names, or leave that out) or Auto"
            )
