"""Kernels without the JAX runtime: lowered by JAX, launched by address on a stream of the caller's.

1. `lower` traces a function of the package for CUDA (no GPU is needed), takes its kernels apart and
   says where each of their buffers comes from: a `Lowered`.
2. A `Compiled` compiles the kernels through the C symbols of JAX's CUDA plugin; `bind` fixes the
   addresses.
3. `launch` puts that on a CUDA stream, also while the stream is captured into a CUDA graph. It
   allocates nothing and waits for nothing.

Memory is the caller's, as torch tensors: the kernels' own scratch buffers are listed in
`Lowered.scratch`. The symbols are no public interface of JAX: `unavailable` says whether this
installation has them as expected.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib.util
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax._src import xla_bridge  # no public way to ask without starting a backend
from jax.experimental.mosaic import gpu as mosaic_gpu
from jax.extend.core import Literal, Var
from jaxlib.mlir import ir, passmanager

from msa_icp_jax.ambient import own_mesh

_TARGET = "mosaic_gpu_v2"
_VERSIONS = ((0, 11), (0, 12))  # of jaxlib, whose symbols are as used here
_DTYPES = {
    "i1": jnp.bool_,
    "i32": jnp.int32,
    "f16": jnp.float16,
    "bf16": jnp.bfloat16,
    "f32": jnp.float32,
    "f8E4M3FN": jnp.float8_e4m3fn,
}


class Unlaunchable(RuntimeError):
    """The function cannot run without JAX: something in it is neither kernel, fill nor copy."""


# ---- where a buffer comes from ----


@dataclasses.dataclass(frozen=True)
class Argument:
    """An argument of the lowered function, in memory as it came."""

    index: int


@dataclasses.dataclass(frozen=True)
class Scratch:
    """A buffer of the caller's that only these kernels use, `Lowered.scratch[index]`."""

    index: int


@dataclasses.dataclass(frozen=True, eq=False)
class Constant:
    """An array that never changes."""

    value: np.ndarray


Source = Argument | Scratch | Constant


# ---- what runs ----


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel: its module, and its operands and results; what is written in place is in both."""

    module: bytes
    buffers: tuple[Source, ...]


@dataclasses.dataclass(frozen=True)
class Fill:
    """A scratch buffer is filled with one value, before a kernel writes parts of it."""

    scratch: Scratch
    value: float


@dataclasses.dataclass(frozen=True)
class Copy:
    """An argument's elements go to the front of a scratch buffer, converted to its dtype.

    The scratch buffer is zero behind them.
    """

    argument: Argument
    scratch: Scratch


Step = Kernel | Fill | Copy


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A function's steps in order, its scratch buffers, and where its results lie."""

    steps: tuple[Step, ...]
    scratch: tuple[jax.ShapeDtypeStruct, ...]
    returned: tuple[Source, ...]


def lower(function: Callable[..., Any], *arguments: Any) -> Lowered:
    """Lowers `function` for CUDA and takes its kernels apart.

    Args:
      function: a jittable function of pytrees of arrays.
      *arguments: arrays or ShapeDtypeStructs in its arguments' places. `Argument.index` counts
        their leaves.

    Raises:
      Unlaunchable: an operand or a result is computed outside kernels.
    """
    leaves = jax.tree.leaves(arguments)
    with on_cpu():
        folded = functools.partial(_evaluate, jax.make_jaxpr(function)(*arguments))
        lowered = jax.jit(folded, keep_unused=True).trace(*leaves)
        module = lowered.lower(lowering_platforms=("cuda",)).compiler_ir()
    with module.context:
        mosaic_gpu.dialect.register_inliner_extensions(module.context)
        inline = passmanager.PassManager.parse("builtin.module(inline{default-pipeline=})")
        inline.run(module.operation)
        main = next(op for op in module.body.operations if op.name.value == "main")
        return _Reader(main.body.blocks[0]).read()


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Lowers on the CPU and leaves JAX as it was, where JAX has no backend yet.

    Lowering asks JAX for a device, and that would start every backend, a CUDA client included.
    Where backends are up already they are used. Neither an ambient mesh nor 64-bit mode, in which
    Python ints between kernels would be 64-bit buffers, makes a difference.
    """
    with _backend_lock, own_mesh(None), jax.enable_x64(False):
        if xla_bridge.backends_are_initialized():
            yield
            return
        platforms = jax.config.jax_platforms
        jax.config.update("jax_platforms", "cpu")
        try:
            yield
        finally:
            jax.extend.backend.clear_backends()
            jax.config.update("jax_platforms", platforms)


_backend_lock = threading.RLock()


def _evaluate(traced: Any, *leaves: jax.Array) -> list[jax.Array]:
    """Evaluates a jaxpr under jit, at once where nothing depends on an argument (on the rank)."""
    env = dict(zip(traced.jaxpr.constvars, traced.consts, strict=True))
    env.update(zip(traced.jaxpr.invars, leaves, strict=True))

    def value(x: Literal | Var) -> Any:
        return x.val if isinstance(x, Literal) else env[x]

    for eqn in traced.jaxpr.eqns:
        inputs = [value(x) for x in eqn.invars]
        known = not eqn.effects and not any(isinstance(x, jax.core.Tracer) for x in inputs)
        small = all(var.aval.size <= 1 << 10 for var in eqn.outvars)  # a large fill stays a fill
        params = eqn.primitive.get_bind_params(eqn.params)
        with jax.ensure_compile_time_eval() if known and small else contextlib.nullcontext():
            results = eqn.primitive.bind(*inputs, **params)
        results = results if eqn.primitive.multiple_results else [results]
        env.update(zip(eqn.outvars, results, strict=True))
    return [value(x) for x in traced.jaxpr.outvars]


class _Reader:
    """Reads the block of a lowered function."""

    def __init__(self, block: ir.Block) -> None:
        self._operations = list(block.operations)
        self._known: list[tuple[ir.Value, Source]] = [
            (value, Argument(i)) for i, value in enumerate(block.arguments)
        ]
        self._steps: list[Step] = []
        self._scratch: list[jax.ShapeDtypeStruct] = []

    def read(self) -> Lowered:
        for op in self._operations:
            if _is_kernel(op):
                self._read_kernel(op)
        returned = tuple(self._source(value) for value in self._operations[-1].operands)
        return Lowered(tuple(self._steps), tuple(self._scratch), returned)

    def _read_kernel(self, op: ir.OpView) -> None:
        aliases = _aliases(op)
        operands = [
            self._filled(value) if i in aliases.values() else self._source(value)
            for i, value in enumerate(op.operands)
        ]
        results: list[Source] = [
            operands[aliases[i]] if i in aliases else self._new_scratch(_struct(value.type))
            for i, value in enumerate(op.results)
        ]
        self._known += zip(op.results, results, strict=True)
        module = op.attributes["mhlo.backend_config"]["module"].value_bytes
        self._steps.append(Kernel(module, (*operands, *results)))

    def _source(self, value: ir.Value) -> Source:
        for known, source in self._known:
            if known == value:
                return source
        op = value.owner
        if op.name == "stablehlo.optimization_barrier":  # there for XLA alone
            place = next(i for i, result in enumerate(op.results) if result == value)
            source = self._source(op.operands[place])
        else:
            source = self._computed(op, _struct(value.type))
        self._known.append((value, source))
        return source

    def _computed(self, op: ir.Operation, result: jax.ShapeDtypeStruct) -> Source:
        """The source of a value made outside the kernels."""
        if op.name == "stablehlo.constant":
            return Constant(_constant(op, result))
        inputs = [self._source(x) for x in op.operands]
        first = inputs[0]
        if isinstance(first, Constant):
            return Constant(_fold(op, inputs, result))
        if op.name == "stablehlo.reshape":
            return first
        if _is_copy(op, inputs):
            return self._copy(first, result)
        raise Unlaunchable(f"{op.name} to {result.dtype}{list(result.shape)} is no kernel")

    def _copy(self, source: Source, result: jax.ShapeDtypeStruct) -> Source:
        """A padded or converted argument; a pad and a conversion of it are one copy."""
        if isinstance(source, Scratch):
            step = next(s for s in self._steps if isinstance(s, Copy) and s.scratch == source)
            self._scratch[source.index] = result
            assert isinstance(step, Copy)
            return source
        assert isinstance(source, Argument)
        scratch = self._new_scratch(result)
        self._steps.append(Copy(source, scratch))
        return scratch

    def _filled(self, value: ir.Value) -> Source:
        """The source of a buffer that a kernel writes: a constant one is filled each time."""
        source = self._source(value)
        if not isinstance(source, Constant):
            return source
        first = source.value.flat[0]
        if not (source.value == first).all():
            raise Unlaunchable("a buffer that a kernel writes holds an array at first")
        scratch = self._new_scratch(jax.ShapeDtypeStruct(source.value.shape, source.value.dtype))
        self._steps.append(Fill(scratch, first.item()))
        return scratch

    def _new_scratch(self, struct: jax.ShapeDtypeStruct) -> Scratch:
        self._scratch.append(struct)
        return Scratch(len(self._scratch) - 1)


def _is_kernel(op: ir.OpView) -> bool:
    name = op.operation.name
    return name == "stablehlo.custom_call" and _TARGET in str(op.attributes["call_target_name"])


def _aliases(op: ir.OpView) -> dict[int, int]:
    """The operand that each result written in place is."""
    found = {}
    if "output_operand_aliases" in op.attributes:
        for alias in op.attributes["output_operand_aliases"]:
            text = str(alias)
            result = re.search(r"output_tuple_indices = \[(\d*)\]", text)
            operand = re.search(r"operand_index = (\d+)", text)
            assert result and operand
            found[int(result[1] or 0)] = int(operand[1])
    return found


def _is_copy(op: ir.Operation, inputs: list[Source]) -> bool:
    """Whether an op pads its operand with zeros at the end, or converts it."""
    if isinstance(inputs[0], Constant):
        return False
    if op.name == "stablehlo.convert":
        return True
    if op.name != "stablehlo.pad":
        return False
    low, inside, high = (
        list(op.attributes[f"{name}_padding"] if name == "interior" else op.attributes[name])
        for name in ("edge_padding_low", "interior", "edge_padding_high")
    )
    zero = inputs[1]
    only_behind = not any(low) and not any(inside) and not any(high[1:])
    return only_behind and isinstance(zero, Constant) and not zero.value.astype(np.float32).any()


def _constant(op: ir.Operation, result: jax.ShapeDtypeStruct) -> np.ndarray:
    value = op.attributes["value"]
    if value.is_splat:
        element = value.get_splat_value().value
        return np.broadcast_to(np.asarray(element).astype(result.dtype), result.shape)
    return np.array(value).astype(result.dtype).reshape(result.shape)


def _fold(op: ir.Operation, inputs: list[Source], result: jax.ShapeDtypeStruct) -> np.ndarray:
    """The value of a constant in another shape or dtype."""
    value = inputs[0].value if isinstance(inputs[0], Constant) else None
    match op.name:
        case "stablehlo.reshape" | "stablehlo.convert" if value is not None:
            return value.astype(result.dtype).reshape(result.shape)
        case "stablehlo.broadcast_in_dim" if value is not None and value.size == 1:
            return np.broadcast_to(value.reshape(()).astype(result.dtype), result.shape)
    raise Unlaunchable(f"{op.name} of constants is no kernel")


def _struct(tensor: ir.Type) -> jax.ShapeDtypeStruct:
    shaped = ir.ShapedType(tensor)
    element = str(shaped.element_type)
    if element not in _DTYPES:
        raise Unlaunchable(f"{tensor} is no dtype of a buffer")
    return jax.ShapeDtypeStruct(tuple(shaped.shape), _DTYPES[element])


# ---- compiling and launching ----


def unavailable() -> str | None:
    """Why kernels cannot be compiled here without the JAX runtime; None: they can."""
    version = tuple(int(x) for x in jaxlib.__version__.split(".")[:2])
    if version not in _VERSIONS:
        return f"jaxlib {jaxlib.__version__} may have other C symbols than 0.11 and 0.12"
    try:
        _plugin()
    except (Unlaunchable, OSError, AttributeError) as error:
        return str(error)
    return None


@functools.cache
def _plugin() -> ctypes.CDLL:
    """The CUDA plugin's library."""
    for version in ("13", "12"):
        plugin, kernels = f"jax_plugins.xla_cuda{version}", f"jax_cuda{version}_plugin"
        folders = _folder(plugin), _folder(kernels)
        if folders[0] is None or folders[1] is None:
            continue
        runtime = folders[1] / "libmosaic_gpu_runtime.so"
        os.environ["MOSAIC_GPU_RUNTIME_LIB_PATH"] = str(runtime)
        library = ctypes.CDLL(str(folders[0] / "xla_cuda_plugin.so"))
        library.MosaicGpuCompile.argtypes = [ctypes.c_char_p, ctypes.c_int]
        library.MosaicGpuCompile.restype = ctypes.POINTER(ctypes.c_void_p)
        return library
    raise Unlaunchable("no CUDA plugin of JAX is installed (extra cuda12 or cuda13)")


def _folder(module: str) -> Path | None:
    """Where a module lies; it is not imported."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        return None
    places = spec.submodule_search_locations if spec else None
    return Path(next(iter(places))) if places else None


# void launch(kernel, stream, addresses); the interpreter's lock is released meanwhile.
_LAUNCHER = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)

type Launcher = Callable[..., object]  # a `_LAUNCHER`, or what runs in place of a kernel

_compile_lock = threading.Lock()
_compiled: dict[bytes, tuple[Launcher, int]] = {}


def compile_kernel(module: bytes) -> tuple[Launcher, int]:
    """(launcher, kernel) of a Mosaic module, in this thread's current CUDA context."""
    with _compile_lock:
        if module not in _compiled:
            handle = _plugin().MosaicGpuCompile(module, len(module))
            if not handle:
                raise RuntimeError("JAX's CUDA plugin could not compile a kernel for this GPU")
            _compiled[module] = (_LAUNCHER(handle[1]), handle[0])
        return _compiled[module]


class BoundStep(NamedTuple):
    """A bound step.

    Attributes:
      launcher: what launches a kernel, or does another step when it is called.
      kernel: the kernel's handle; None: the step is another.
      address: that of the arguments.
      arguments: the buffers' addresses, a ctypes array; None: the step is another.
    """

    launcher: Launcher
    kernel: int | None = None
    address: int | None = None
    arguments: Any = None

    def at(self, place: int, buffer: int) -> BoundStep:
        """The launch with another buffer in one place among the arguments."""
        arguments = type(self.arguments).from_buffer_copy(self.arguments)
        arguments[place] = buffer
        return bound_kernel(self.launcher, self.kernel, arguments)


def bound_kernel(launcher: Launcher, kernel: int | None, arguments: Any) -> BoundStep:
    """A kernel's launch; it takes the array's address, which ctypes passes on sooner."""
    return BoundStep(launcher, kernel, ctypes.addressof(arguments), arguments)


Launches = list[BoundStep]


class Compiled:
    """A lowered function, compiled in this thread's current CUDA context, with its own buffers.

    Buffers are torch tensors (anything with torch's `data_ptr`, `view`, `fill_` and `copy_`) on the
    GPU of that context; kernels take their first byte and their lowered shape for granted.

    Where arguments are copied (see `Copy`), bound steps keep those alive.

    Attributes:
      returned: where the function's results lie.
    """

    def __init__(
        self, lowered: Lowered, scratch: Sequence[Any], upload: Callable[[np.ndarray], Any]
    ) -> None:
        """Compiles.

        Args:
          lowered: from `lower`.
          scratch: buffers of `Lowered.scratch`, zero at first. Programs may share them that follow
            one another on a stream.
          upload: makes a buffer of a constant array.
        """
        self._steps = lowered.steps
        self._scratch = scratch
        self._kernels = {
            step.module: compile_kernel(step.module)
            for step in lowered.steps
            if isinstance(step, Kernel)
        }
        self._constants = {
            source: upload(source.value)
            for source in (*_operands(lowered.steps), *lowered.returned)
            if isinstance(source, Constant)
        }
        self.returned = lowered.returned

    def bind(self, arguments: Sequence[Any]) -> Launches:
        """The steps on these argument leaves, for `launch`."""
        return [self._bind(step, arguments) for step in self._steps]

    def buffer(self, source: Source, arguments: Sequence[Any]) -> Any:
        """The buffer that a source is."""
        match source:
            case Argument(index):
                return arguments[index]
            case Scratch(index):
                return self._scratch[index]
        return self._constants[source]

    def _bind(self, step: Step, arguments: Sequence[Any]) -> BoundStep:
        match step:
            case Kernel(module, buffers):
                addresses = [self.buffer(x, arguments).data_ptr() for x in buffers]
                array = (ctypes.c_void_p * len(addresses))(*addresses)
                return bound_kernel(*self._kernels[module], array)
            case Fill(target, value):
                fill = self.buffer(target, arguments).fill_
                return BoundStep(functools.partial(fill, value))
            case Copy(source, target):
                flat = self.buffer(source, arguments).view(-1)
                front = self.buffer(target, arguments).view(-1)[: flat.numel()]
                return BoundStep(functools.partial(front.copy_, flat))


def _operands(steps: Sequence[Step]) -> Iterator[Source]:
    for step in steps:
        if isinstance(step, Kernel):
            yield from step.buffers


def launch(launches: Launches, stream: int) -> None:
    """Puts bound steps on a CUDA stream: torch's current one, where some are fills or copies."""
    for launcher, kernel, address, _ in launches:
        if kernel is None:
            launcher()
        else:
            launcher(kernel, stream, address)
