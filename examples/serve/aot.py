"""The decode step ahead of time: exported, saved, loaded where nothing of the model is traced.

One export is for one platform: the plain XLA backend for the CPU, the Mosaic kernels for CUDA. The
latter is made on a machine without a GPU just as well; it runs where there is one.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export as jax_export
from jax.sharding import Mesh

from msa_icp_jax.demo import NpzError, read_npz
from serve.indexers import make_plan
from serve.model import BLOCK, HEADS, INDEX_DIM, Cache, Config, Params, Report, Schedule, State
from serve.server import Programs

REQUESTS = 2  # decode bucket that is exported
WORLD_SIZE = 2
BACKENDS = {"cpu": "xla", "cuda": "mosaic"}  # by platform
RUN = "run.npz"  # inputs and outputs of one call, to compare a loaded step with
MOST_VERSION_BYTES = 64


class Unloadable(RuntimeError):
    """There is no saved step here that this process could run."""


class Unsavable(RuntimeError):
    """The export cannot be written where it should go."""


def save(config: Config, params: Params, mesh: Mesh | None, folder: Path) -> dict[str, Any]:
    """Exports the decode step for each platform; runs this machine's once, for `load` to compare.

    With a mesh the loading process needs as many devices, without one it needs a single device.

    Raises:
      Unsavable: the folder cannot be made or written; before anything is compiled, if that shows.
    """
    register()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        return write(config, params, mesh, folder)
    except OSError as error:
        raise Unsavable(f"--export {folder} cannot be written: {one_line(error)}") from error


def write(config: Config, params: Params, mesh: Mesh | None, folder: Path) -> dict[str, Any]:
    """Exports the step for each platform into the folder; returns what `save` does."""
    saved = {}
    for platform, backend in BACKENDS.items():
        programs = Programs(config, make_plan(config, WORLD_SIZE, backend), mesh)
        arguments = example_arguments(config, params, programs)
        exported = jax_export.export(programs.step, platforms=[platform])(*arguments)
        data = exported.serialize()
        file_of(folder, platform).write_bytes(data)
        kernels = exported.mlir_module().count("@mosaic_gpu")
        saved[platform] = {"backend": backend, "bytes": len(data), "mosaic_kernels": kernels}
        if platform == this_platform():
            leaves = {f"in{i}": to_host(x) for i, x in enumerate(jax.tree.leaves(arguments))}
            outputs = jax.tree.leaves(programs.step(*arguments))
            leaves |= {f"out{i}": to_host(x) for i, x in enumerate(outputs)}
            version = np.frombuffer(jax.__version__.encode(), np.uint8)
            np.savez(folder / RUN, jax=version, **leaves)
    return {"saved": saved}


def load(folder: Path, mesh_of: Any) -> dict[str, Any]:
    """Runs this platform's saved step on the saved inputs. Nothing of the model is traced.

    An exported step is a program: load only what you would also run.

    Raises:
      Unloadable: a file is missing or damaged, or the step needs more devices than there are.
    """
    register()
    platform = this_platform()
    file, run_file = file_of(folder, platform), folder / RUN
    exported = read(file)
    if not run_file.is_file():
        raise Unloadable(f"{run_file} is missing: export on a {platform} machine")
    if exported.nr_devices > jax.device_count():
        raise Unloadable(
            f"the step was exported for {exported.nr_devices} devices, this process has "
            f"{jax.device_count()}: export with --one-device"
        )
    inputs, wanted, made_with = read_run(run_file, exported)
    mesh = mesh_of(exported.nr_devices) if exported.nr_devices > 1 else None
    # This broad, since a damaged program may fail anywhere in the compiler or the runtime.
    try:
        arguments, found = run(exported, inputs, mesh)
    except Exception as error:
        raise Unloadable(f"{file} cannot be run: {one_line(error)}") from error
    same = all(a.tobytes() == b.tobytes() for a, b in zip(found, wanted, strict=True))
    donated = all(x.is_deleted() for x in jax.tree.leaves(arguments[1:3]))
    return {
        "identical": same,
        "platform": platform,
        "devices": exported.nr_devices,
        "jax": jax.__version__,
        "exported_with_jax": made_with,
        "donated": donated,
        "decoded": found[-2].tolist(),
    }


def read(file: Path) -> jax_export.Exported:
    """The export in a file."""
    if not file.is_file():
        raise Unloadable(f"{file} is missing: --export writes it")
    try:
        exported = jax_export.deserialize(bytearray(file.read_bytes()))
        exported.mlir_module()  # parses the program, which deserialize leaves for later
    except ImportError:
        raise
    except Exception as error:  # whatever the readers meet in a broken file
        raise Unloadable(f"{file} is no exported step: {one_line(error)}") from error
    return exported


def read_run(
    file: Path, exported: jax_export.Exported
) -> tuple[list[np.ndarray], list[np.ndarray], str]:
    """The inputs, the outputs and the JAX version of the call that `save` made."""
    wanted = {
        f"{kind}{i}": (host_dtype(aval), aval.shape)
        for kind, avals in (("in", exported.in_avals), ("out", exported.out_avals))
        for i, aval in enumerate(avals)
    }
    sizes = {name: dtype.itemsize * math.prod(shape) for name, (dtype, shape) in wanted.items()}
    try:
        run = read_npz(file, sizes | {"jax": MOST_VERSION_BYTES})
    except NpzError as error:
        raise Unloadable(str(error)) from error
    check_arrays(run, wanted)
    inputs = [run[f"in{i}"].view(aval.dtype) for i, aval in enumerate(exported.in_avals)]
    outputs = [run[f"out{i}"] for i in range(len(exported.out_avals))]
    return inputs, outputs, bytes(run["jax"]).decode("ascii", "replace")


def check_arrays(
    run: Mapping[str, np.ndarray], wanted: Mapping[str, tuple[np.dtype, tuple[int, ...]]]
) -> None:
    """Raises unless the arrays are those of the step, and `jax` is a version's bytes."""
    for name, (dtype, shape) in wanted.items():
        found = run[name]
        if (found.dtype, found.shape) != (dtype, shape):
            raise Unloadable(
                f"{name} must be {dtype} {list(shape)} as in the step, got {found.dtype} "
                f"{list(found.shape)}"
            )
    version = run["jax"]
    if version.dtype != np.uint8 or version.ndim != 1 or not 0 < version.size <= MOST_VERSION_BYTES:
        raise Unloadable(
            f"jax must be a version's bytes, got {version.dtype} {list(version.shape)}"
        )


def run(
    exported: jax_export.Exported, inputs: list[np.ndarray], mesh: Mesh | None
) -> tuple[Any, list[np.ndarray]]:
    """Places the inputs and runs the step; returns its arguments and what came out."""
    placing = exported.in_shardings_jax(mesh) if mesh else [None] * len(inputs)
    leaves = [
        jax.device_put(x, where, may_alias=False)  # some are donated
        for x, where in zip(inputs, placing, strict=True)
    ]
    arguments, _ = jax.tree.unflatten(exported.in_tree, leaves)
    step = jax.jit(exported.call, donate_argnums=(1, 2))  # cache and state
    return arguments, [to_host(x) for x in jax.tree.leaves(step(*arguments))]


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def example_arguments(config: Config, params: Params, programs: Programs) -> tuple[Any, ...]:
    """A step's arguments in the middle of serving: one short request and one past 16 blocks."""
    rng = np.random.default_rng(7)
    rows = (config.layers * config.pages, config.page_size, INDEX_DIM)
    heads = (config.kv_blocks, HEADS, BLOCK, config.head_dim)
    cache = Cache(
        rng.integers(-24, 25, rows).astype(jnp.float8_e4m3fn),
        rng.standard_normal(heads, np.float32),
        rng.standard_normal(heads, np.float32),
    )
    width = config.table_width
    tables = np.zeros((config.slots, width), np.int32)
    tables[:REQUESTS] = rng.permutation(config.pages)[: REQUESTS * width].reshape(REQUESTS, width)
    lengths = np.ones(config.slots, np.int32)
    lengths[:REQUESTS] = 700, config.max_len - 200
    state = State(
        rng.integers(0, config.vocab, (config.slots, config.max_len), np.int32),
        lengths,
        lengths + 50,
        tables,
    )
    schedule = programs.idle_schedule(REQUESTS, 0)
    schedule.decode_slots[:] = range(REQUESTS)
    put = programs.put
    return put(params), programs.put_cache(cache), put(state), put(schedule)


def register() -> None:
    """Readies a process for jax.export: names the pytrees of the step's signature, once."""
    # Tells the CUDA runtime where the kernels' support library lies; tracing a kernel does so too,
    # but a process that only loads a step traces none.
    importlib.import_module("jax.experimental.mosaic.gpu")
    for kind in (Cache, State, Schedule, Report):
        with contextlib.suppress(ValueError):  # registered before
            jax_export.register_namedtuple_serialization(kind, serialized_name=kind.__qualname__)


def file_of(folder: Path, platform: str) -> Path:
    return folder / f"decode_step.{platform}.jax"


def this_platform() -> str:
    platform = jax.default_backend()
    return "cuda" if platform == "gpu" else platform


def to_host(x: jax.Array) -> np.ndarray:
    """float8 as bytes, which every npz reader knows."""
    return np.asarray(x).view(host_dtype(x))


def host_dtype(x: Any) -> np.dtype:
    return np.dtype(np.uint8 if x.dtype == jnp.float8_e4m3fn else x.dtype)
