"""Device time of kernels launched without the JAX runtime, from replays of a CUDA graph.

The plain way to a kernel's own time: no dispatch, no operation between links, and launches may
overlap as they ask to (programmatic dependent launch), which they cannot inside a jitted program.
Peers' figures are taken in this way too.

A `Program` lowers a function and compiles each Mosaic kernel in it through the C symbols of JAX's
CUDA plugin; `bind` fixes the buffers; the launchers then go on torch's current stream, where torch
captures and times them. The symbols are not a public interface: this works for the versions of JAX
that the package supports, and raises `Unlaunchable` where it cannot.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import functools
import importlib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mosaic_gpu
from jax.extend.core import Literal
from jaxlib.mlir import ir, passmanager

from benchmarks.inputs import Inputs
from benchmarks.stages import Part, Stage, initial
from benchmarks.timing import Times
from msa_icp_jax.rows import READY

_TARGET = "mosaic_gpu_v2"
_MAX_LINKS = 512


class Unlaunchable(RuntimeError):
    """The function cannot run without JAX: something in it is no kernel."""


# ---- where a buffer comes from ----


@dataclasses.dataclass(frozen=True)
class _Argument:
    index: int


@dataclasses.dataclass(frozen=True)
class _Result:
    call: int
    index: int


@dataclasses.dataclass(frozen=True)
class _Constant:
    value: np.ndarray


_Source = _Argument | _Result | _Constant


@dataclasses.dataclass(frozen=True)
class _Call:
    """One kernel: its module, where its operands come from, its results."""

    module: bytes
    operands: tuple[_Source, ...]
    results: tuple[jax.ShapeDtypeStruct, ...]
    aliases: dict[int, int]  # results that are an operand, written in place


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A function's kernels in order, and where its results lie."""

    calls: tuple[_Call, ...]
    returned: tuple[_Source, ...]


def lower(function: Callable[..., Any], *arguments: Any) -> Lowered:
    """Lowers `function` for CUDA (no GPU is needed) and takes its kernels apart.

    Raises:
      Unlaunchable: an operand or a result is computed outside kernels.
    """
    leaves = jax.tree.leaves(arguments)
    folded = functools.partial(_evaluate, jax.make_jaxpr(function)(*arguments))
    lowered = jax.jit(folded, keep_unused=True).trace(*leaves)
    module = lowered.lower(lowering_platforms=("cuda",)).compiler_ir()
    with module.context:
        mosaic_gpu.dialect.register_inliner_extensions(module.context)
        inline = passmanager.PassManager.parse("builtin.module(inline{default-pipeline=})")
        inline.run(module.operation)
        main = next(op for op in module.body.operations if op.name.value == "main")
        block = main.body.blocks[0]
        kernels = [op for op in block.operations if _is_kernel(op)]
        origin = _Origins(list(block.arguments), kernels)
        ret = list(block.operations)[-1]
        return Lowered(
            tuple(_call(op, origin) for op in kernels),
            tuple(origin(value) for value in ret.operands),
        )


def _evaluate(traced: Any, *leaves: Any) -> list[Any]:
    """Evaluates a jaxpr under jit, at once where nothing depends on an argument (on the rank)."""
    env = dict(zip(traced.jaxpr.constvars, traced.consts, strict=True))
    env.update(zip(traced.jaxpr.invars, leaves, strict=True))

    def value(x: Any) -> Any:
        return x.val if isinstance(x, Literal) else env[x]

    for eqn in traced.jaxpr.eqns:
        inputs = [value(x) for x in eqn.invars]
        known = not eqn.effects and not any(isinstance(x, jax.core.Tracer) for x in inputs)
        params = eqn.primitive.get_bind_params(eqn.params)
        with jax.ensure_compile_time_eval() if known else contextlib.nullcontext():
            results = eqn.primitive.bind(*inputs, **params)
        results = results if eqn.primitive.multiple_results else [results]
        env.update(zip(eqn.outvars, results, strict=True))
    return [value(x) for x in traced.jaxpr.outvars]


def _is_kernel(op: Any) -> bool:
    name = op.operation.name
    return name == "stablehlo.custom_call" and _TARGET in str(op.attributes["call_target_name"])


def _call(op: Any, origin: _Origins) -> _Call:
    operands = tuple(origin(value) for value in op.operands)
    aliases = {}
    if "output_operand_aliases" in op.attributes:
        for alias in op.attributes["output_operand_aliases"]:
            text = str(alias)
            result = re.search(r"output_tuple_indices = \[(\d*)\]", text)
            operand = re.search(r"operand_index = (\d+)", text)
            assert result and operand
            aliases[int(result[1] or 0)] = int(operand[1])
    if any(isinstance(operands[operand], _Constant) for operand in aliases.values()):
        raise Unlaunchable("a buffer that a kernel writes is filled outside the kernels")
    return _Call(
        op.attributes["mhlo.backend_config"]["module"].value_bytes,
        operands,
        tuple(_struct(value.type) for value in op.results),
        aliases,
    )


class _Origins:
    """Finds where values of a lowered function come from."""

    def __init__(self, arguments: list[Any], kernels: list[Any]) -> None:
        self._known: list[tuple[Any, _Source]] = [
            (value, _Argument(i)) for i, value in enumerate(arguments)
        ]
        for call, op in enumerate(kernels):
            self._known += [(value, _Result(call, i)) for i, value in enumerate(op.results)]

    def __call__(self, value: Any) -> _Source:
        for known, source in self._known:
            if known == value:
                return source
        op = value.owner
        inputs = [self(x) for x in op.operands]
        if op.name == "stablehlo.optimization_barrier":
            return inputs[list(op.results).index(value)]
        if op.name == "stablehlo.reshape" and not isinstance(inputs[0], _Constant):
            return inputs[0]
        constants = [x.value for x in inputs if isinstance(x, _Constant)]
        if len(constants) == len(inputs):
            return _Constant(_fold(op, constants, _struct(value.type)))
        raise Unlaunchable(f"{op.name} of {value.type} runs outside the kernels")


def _fold(op: Any, inputs: list[np.ndarray], result: jax.ShapeDtypeStruct) -> np.ndarray:
    """The value of a constant, perhaps in another shape."""
    match op.name:
        case "stablehlo.constant":
            return np.array(op.attributes["value"]).astype(result.dtype)
        case "stablehlo.reshape" | "stablehlo.convert":
            return inputs[0].astype(result.dtype).reshape(result.shape)
        case "stablehlo.broadcast_in_dim" if inputs[0].size == 1:
            return np.full(result.shape, inputs[0].item(), result.dtype)
    raise Unlaunchable(f"{op.name} of constants runs outside the kernels")


def _struct(tensor: Any) -> jax.ShapeDtypeStruct:
    names = {"i32": jnp.int32, "f32": jnp.float32, "i1": jnp.bool_}
    shaped = ir.ShapedType(tensor)
    element = str(shaped.element_type)
    if element not in names:
        raise Unlaunchable(f"{tensor} is made outside the caller's buffers")
    return jax.ShapeDtypeStruct(tuple(shaped.shape), names[element])


# ---- compiling and launching ----


@functools.cache
def _plugin() -> Any:
    """The CUDA plugin's library."""
    for version in ("13", "12"):
        try:
            folder = _folder(f"jax_plugins.xla_cuda{version}")
            runtime = _folder(f"jax_cuda{version}_plugin") / "libmosaic_gpu_runtime.so"
        except ImportError:
            continue
        os.environ["MOSAIC_GPU_RUNTIME_LIB_PATH"] = str(runtime)
        library = ctypes.CDLL(str(folder / "xla_cuda_plugin.so"))
        library.MosaicGpuCompile.argtypes = [ctypes.c_char_p, ctypes.c_int]
        library.MosaicGpuCompile.restype = ctypes.POINTER(ctypes.c_void_p)
        return library
    raise Unlaunchable("no CUDA plugin of JAX is installed")


def _folder(module: str) -> Path:
    return Path(next(iter(importlib.import_module(module).__path__)))


_LAUNCHER = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


@functools.cache
def _compile(module: bytes) -> tuple[Any, int]:
    """(host launcher, kernel) of a Mosaic module, in torch's CUDA context."""
    import torch

    torch.cuda.current_stream().synchronize()  # makes the context current in this thread
    handle = _plugin().MosaicGpuCompile(module, len(module))
    if not handle:
        raise RuntimeError("MosaicGpuCompile failed")
    return _LAUNCHER(handle[1]), handle[0]


class Bound:
    """The kernels of a lowered function with their buffers.

    Results that are not written in place lie in `scratch`, which several may share whose launches
    follow one another.
    """

    def __init__(
        self, lowered: Lowered, arguments: Sequence[Any], scratch: dict[_Result, Any]
    ) -> None:
        self._arguments = arguments
        self._made: dict[_Result, Any] = {}
        self._steps = []
        for number, call in enumerate(lowered.calls):
            buffers = [self._buffer(source) for source in call.operands]
            for i, struct in enumerate(call.results):
                place = _Result(number, i)
                if i in call.aliases:
                    self._made[place] = buffers[call.aliases[i]]
                else:
                    if place not in scratch:
                        scratch[place] = empty(struct)
                    self._made[place] = scratch[place]
            buffers += [self._made[_Result(number, i)] for i in range(len(call.results))]
            pointers = (ctypes.c_void_p * len(buffers))(*(_address(x) for x in buffers))
            # The buffers stay here to be kept alive.
            self._steps.append((*_compile(call.module), pointers, buffers))
        self.results = [self._buffer(source) for source in lowered.returned]

    def launch(self) -> None:
        """Launches all kernels on torch's current stream."""
        import torch

        stream = torch.cuda.current_stream().cuda_stream
        for launcher, kernel, pointers, _ in self._steps:
            launcher(kernel, stream, ctypes.cast(pointers, ctypes.c_void_p))

    def _buffer(self, source: _Source) -> Any:
        match source:
            case _Argument(index):
                return self._arguments[index]
            case _Constant(value):
                return _on_device(value)
        return self._made[source]


def _on_device(value: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(np.ascontiguousarray(value)).cuda()


def empty(like: jax.ShapeDtypeStruct, fill: int | None = None) -> Any:
    """A torch tensor on the GPU."""
    import torch

    dtype = {"int32": torch.int32, "float32": torch.float32, "bool": torch.bool}[like.dtype.name]
    made = torch.empty(tuple(like.shape), dtype=dtype, device="cuda")
    return made if fill is None else made.fill_(fill)


def _address(x: Any) -> int:
    return x.unsafe_buffer_pointer() if isinstance(x, jax.Array) else x.data_ptr()


# ---- timing a stage ----


class GraphRun:
    """A stage's links, each on the next input set, ready to be captured."""

    def __init__(
        self,
        stage: Stage,
        inputs: Inputs,
        shapes: dict[str, Any],
        links: int,
        lowered: dict[str, Lowered],
    ) -> None:
        """Lowers, compiles and binds; there are `links` links (at most 512), or one a set.

        `lowered` holds the parts that stages of the same case and precision have lowered, by name.
        """
        self._stage = stage
        self._shapes = shapes
        self._inputs = inputs
        self._abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs.fixed | inputs.sets[0]
        )
        self._written: list[dict[str, Any]] = [{} for _ in inputs.sets]
        self._lowered = lowered
        self._scratch: dict[str, dict[_Result, Any]] = collections.defaultdict(dict)
        self.links = min(_MAX_LINKS, max(links, len(inputs.sets)))
        self._received = self._receive() if self._merges else None
        self._prelude = [
            bound for i in range(len(inputs.sets)) for bound in self._bind(stage.prelude, i)[0]
        ]
        bound = [self._bind(stage.parts, i) for i in range(self.links)]
        self._links = [link for link, _ in bound]
        self._first = bound[0][1]

    def run(self) -> dict[str, Any]:
        """Runs the prelude and the first link; all arrays of the first link."""
        import torch

        self._arm()
        for bound in (*self._prelude, *self._links[0]):
            bound.launch()
        torch.cuda.synchronize()
        return self._first

    def times(self, runs: int) -> Times:
        """Times `runs` replays of a graph of all links."""
        import torch

        self._arm()
        for link in self._links:  # loads every kernel and touches every buffer
            for bound in link:
                bound.launch()
        torch.cuda.synchronize()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for link in self._links:
                for bound in link:
                    bound.launch()
        return replays(graph, runs, self.links, before=self._arm)

    @property
    def _merges(self) -> bool:
        return any("received" in part.reads for part in self._stage.parts)

    def _bind(self, parts: Sequence[Part], link: int) -> tuple[list[Bound], dict[str, Any]]:
        """Launches of a link, and its arrays: a set has buffers of its own to write into."""
        number = link % len(self._inputs.sets)
        arrays = self._inputs.fixed | self._inputs.sets[number] | self._written[number]
        if self._received is not None:
            arrays["received"] = self._received[link]
        launches = []
        for part in parts:
            for name in part.reads:
                if name not in arrays:
                    if name not in self._written[number]:
                        self._written[number][name] = empty(self._shapes[name], initial(name))
                    arrays[name] = self._written[number][name]
            flat = jax.tree.leaves([arrays[name] for name in part.reads])
            launches.append(Bound(self._lower(part), flat, self._scratch[part.name]))
            arrays.update(zip(part.writes, launches[-1].results, strict=True))
        return launches, arrays

    def _lower(self, part: Part) -> Lowered:
        if part.name not in self._lowered:
            structs = self._shapes | self._abstract
            self._lowered[part.name] = lower(part.run, *(structs[name] for name in part.reads))
        return self._lowered[part.name]

    def _receive(self) -> Any:
        """Each link's own received rows [links, W, hpr, T, 33]: a merge clears their flags."""
        import torch

        sets = [
            _on_device(np.array((self._inputs.fixed | one_set)["received"]))
            for one_set in self._inputs.sets
        ]
        return torch.stack([sets[i % len(sets)] for i in range(self.links)])

    def _arm(self) -> None:
        if self._received is not None:
            self._received[..., -1] = READY


def replays(graph: Any, runs: int, links: int, before: Callable[[], None] = lambda: None) -> Times:
    """Times replays of a captured graph of `links` links."""
    import torch

    found = []
    for replay in range(runs + 1):
        before()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if replay:  # the first one uploads the graph
            found.append(begin.elapsed_time(end) * 1e3 / links)
    return Times(tuple(found), "graph")
