"""Device time of a stage: replays of a CUDA graph, or one jitted program that repeats it.

*graph*: `lower` takes a function's kernels apart, `Bound` fixes their buffers (torch's); launches
then go on torch's current stream, where torch captures and times them. The plain way to a kernel's
own time: no dispatch, no operation between links, and launches may overlap as they ask to
(programmatic dependent launch). Baselines' figures are taken in this way too.

*jit*: a program runs the stage *links* times over all input sets in turn, writing into donated
buffers. Each link's smallest input depends on the result of the link before, so that no two links
overlap and none can be dropped; that and taking the set cost a few microseconds a link on a GPU.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.cases import Case
from benchmarks.inputs import Inputs
from benchmarks.stages import Part, Stage, build, initial, run
from msa_icp_jax.ops._mosaic import aot
from msa_icp_jax.ops._mosaic.aot import Lowered, lower
from msa_icp_jax.ops._mosaic.launch import Target, building_for
from msa_icp_jax.rows import READY

_MAX_LINKS = 512  # of a graph

Launch = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Times:
    """Microseconds of one link, one figure a program run, and how they were taken.

    `more` is what else the row says.
    """

    us: tuple[float, ...]
    method: str
    more: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.us)

    @property
    def spread(self) -> tuple[float, float]:
        return min(self.us), max(self.us)


# ---- in a CUDA graph ----


class Bound:
    """The steps of a lowered function with their buffers.

    `scratch` holds the buffers of its own, made when it comes empty; several may share it whose
    launches follow one another.
    """

    def __init__(self, lowered: Lowered, arguments: Sequence[Any], scratch: list[Any]) -> None:
        import torch

        torch.cuda.current_stream().query()  # makes the context current in this thread
        if not scratch:
            scratch += [empty(struct, 0) for struct in lowered.scratch]
        tensors = [x if torch.is_tensor(x) else torch.from_dlpack(x) for x in arguments]
        program = aot.Program(lowered, scratch, on_device)
        self._launches = program.bind(tensors)
        self._alive = (program, tensors)
        self.results = [program.buffer(source, tensors) for source in lowered.returned]

    def __call__(self) -> None:
        """Launches everything on torch's current stream."""
        import torch

        aot.launch(self._launches, torch.cuda.current_stream().cuda_stream)


def on_device(value: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(np.array(value)).cuda()


def empty(like: jax.ShapeDtypeStruct, fill: int) -> Any:
    """A torch tensor on the GPU."""
    import torch

    dtype = getattr(torch, like.dtype.name)
    return torch.full(tuple(like.shape), fill, dtype=dtype, device="cuda")


def in_graph(
    links: Sequence[Sequence[Launch]], runs: int, before: Callable[[], Any] = lambda: None
) -> Times:
    """Times replays of a graph of all links; `before` runs ahead of each, untimed."""
    import torch

    def launch_all() -> None:
        for launches in links:
            for launch in launches:
                launch()

    before()
    launch_all()  # loads every kernel and touches every buffer
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        launch_all()
    timed(graph.replay, 1, before)  # uploads the graph
    return Times(tuple(us / len(links) for us in timed(graph.replay, runs, before)), "graph")


def timed(call: Launch, runs: int, before: Callable[[], Any]) -> list[float]:
    """Microseconds of the GPU for each of `runs` calls."""
    import torch

    found = []
    for _ in range(runs):
        before()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1e3)
    return found


class GraphRun:
    """A stage's links, each on the next input set, ready to be captured."""

    def __init__(
        self,
        stage: Stage,
        inputs: Inputs,
        shapes: dict[str, Any],
        links: int,
        lower: Callable[[Part, dict[str, Any]], Lowered],
    ) -> None:
        """Lowers, compiles and binds; there are `links` links (at most 512), or one a set."""
        self._shapes, self._lower = shapes, lower
        self._structs = shapes | inputs.structs
        self._sets = [inputs.fixed | one_set for one_set in inputs.sets]
        self._scratch: dict[str, list[Any]] = collections.defaultdict(list)
        links = min(_MAX_LINKS, max(links, len(self._sets)))
        self._received = None
        if any("received" in part.reads for part in stage.parts):
            # Each link's own received rows [links, W, hpr, T, 33]: a merge clears their flags.
            rows = [np.array(arrays["received"]) for arrays in self._sets]
            self._received = on_device(np.stack([rows[i % len(rows)] for i in range(links)]))
        preludes = [self._bind(stage.prelude, i)[0] for i in range(len(self._sets))]
        self._prelude = [launch for launches in preludes for launch in launches]
        bound = [self._bind(stage.parts, i) for i in range(links)]
        self._links, self._first = [launches for launches, _ in bound], bound[0][1]

    def run(self) -> dict[str, Any]:
        """Runs the prelude and the first link; all arrays of the first link."""
        import torch

        self._arm()
        for launch in (*self._prelude, *self._links[0]):
            launch()
        torch.cuda.synchronize()
        return self._first

    def times(self, runs: int) -> Times:
        return in_graph(self._links, runs, self._arm)

    def _bind(self, parts: Sequence[Part], link: int) -> tuple[list[Bound], dict[str, Any]]:
        """Launches of a link, and its arrays: a set has buffers of its own to write into."""
        own = self._sets[link % len(self._sets)]
        arrays = dict(own)
        if self._received is not None:
            arrays["received"] = self._received[link]
        launches = []
        for part in parts:
            for name in part.reads:
                if name not in arrays:
                    arrays[name] = own[name] = empty(self._shapes[name], initial(name))
            flat = jax.tree.leaves([arrays[name] for name in part.reads])
            lowered = self._lower(part, self._structs)
            launches.append(Bound(lowered, flat, self._scratch[part.name]))
            arrays.update(zip(part.writes, launches[-1].results, strict=True))
        return launches, arrays

    def _arm(self) -> None:
        if self._received is not None:
            self._received[..., -1] = READY


class Lowering:
    """Lowered parts of Mosaic stages, kept by case, precision, part and shapes."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, ...], Lowered] = {}

    def of(self, case: Case, precision: str, part: Part, structs: dict[str, Any]) -> Lowered:
        """The part lowered for arguments of these shapes."""
        key = _key(case, precision, part, structs)
        if key not in self._kept:
            self._kept[key] = lower(part.run, *(structs[name] for name in part.reads))
        return self._kept[key]

    def prepare(self, tasks: Sequence[Task], sms: int) -> None:
        """Lowers and compiles what will be timed on all cores, before anything is.

        Lowering is Python's work, so it is done in processes, which see no GPU; compiling in
        threads.

        Args:
          tasks: case, precision, stages, and the shapes of their arrays.
          sms: streaming multiprocessors of the GPU.
        """
        count = max(1, (os.cpu_count() or 1) - 2)
        spawn = multiprocessing.get_context("spawn")
        with (
            ThreadPoolExecutor(count) as threads,
            ProcessPoolExecutor(count, spawn, _see_no_gpu) as pool,
        ):
            for found in threads.map(lambda task: _compiled(pool, task, sms), tasks):
                self._kept.update(found)


Task = tuple[Case, str, tuple[str, ...], dict[str, Any]]
Kept = dict[tuple[str, ...], Lowered]


def _key(case: Case, precision: str, part: Part, structs: dict[str, Any]) -> tuple[str, ...]:
    return case.name, precision, part.name, repr([structs[name] for name in part.reads])


def _see_no_gpu() -> None:
    jax.config.update("jax_platforms", "cpu")


def lower_task(task: Task, sms: int) -> Kept:
    """Every part of a task's stages."""
    case, precision, stages, structs = task
    built = [build(case, stage, "mosaic", precision) for stage in stages]
    parts = {part.name: part for stage in built for part in (*stage.prelude, *stage.parts)}
    found: Kept = {}
    with building_for(Target(sms)):
        for part in parts.values():
            lowered = lower(part.run, *(structs[name] for name in part.reads))
            found[_key(case, precision, part, structs)] = lowered
    return found


def _compiled(pool: Executor, task: Task, sms: int) -> Kept:
    """A task lowered in the pool, with its kernels compiled in this thread; none if it fails.

    The run lowers such a task as it comes to it, and says then what is wrong.
    """
    try:
        found = pool.submit(lower_task, task, sms).result()
        compile_all(found.values())
    except Exception as error:
        print(f"not compiled ahead: {task[0].name}, {type(error).__name__}")
        return {}
    return found


def compile_all(programs: Iterable[Lowered]) -> None:
    """Compiles kernels; `aot.compile_kernel`, which does one at a time, then finds them."""
    import torch

    torch.cuda.current_stream().synchronize()  # makes the context current in this thread
    library = aot._plugin()
    steps = [step for lowered in programs for step in lowered.steps]
    for module in {step.module for step in steps if isinstance(step, aot.Kernel)}:
        if handle := library.MosaicGpuCompile(module, len(module)):
            kernel = aot._LAUNCHER(handle[1]), handle[0]
            aot._compiled.setdefault(module, kernel)


# ---- in one jitted program ----


class JitRun:
    """A stage's program of `links` links with its buffers."""

    def __init__(
        self,
        stage: Stage,
        inputs: Inputs,
        shapes: dict[str, Any],
        links: int,
        compiled: Callable[..., Any] | None = None,
    ) -> None:
        """Compiles, unless it is compiled."""
        sets = [_after_prelude(stage, inputs.fixed, x, shapes) for x in inputs.sets]
        self.links, self.last_set = links, inputs.fixed | sets[(links - 1) % len(sets)]
        self._inputs = (inputs.fixed, jax.tree.map(lambda *x: jnp.stack(x), *sets))
        results = jax.eval_shape(stage.run, inputs.fixed | sets[0] | shapes)
        self._written = {k: jnp.full(v.shape, initial(k), v.dtype) for k, v in results.items()}
        self._program = compiled or compile_program(stage, links, *self._inputs, shapes)

    def run(self) -> dict[str, Any]:
        """Runs once; the arrays written, as the last link (of the last set) left them."""
        self._written = jax.block_until_ready(self._program(*self._inputs, self._written))
        return self._written

    def times(self, runs: int) -> Times:
        return on_clock(self.run, runs, self.links, "jit")


def on_clock(call: Launch, runs: int, each: int, method: str) -> Times:
    """Times `runs` calls of `each` links by the host's clock."""
    found = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        found.append((time.perf_counter() - start) * 1e6 / each)
    return Times(tuple(found), method)


def compile_program(stage: Stage, links: int, fixed: Any, sets: Any, shapes: Any) -> Any:
    """The program for (fixed arrays, the stacked sets, written arrays), or for their shapes."""
    one_set = jax.eval_shape(lambda sets: jax.tree.map(lambda x: x[0], sets), sets)
    written = jax.eval_shape(stage.run, fixed | one_set | shapes)
    return program(stage, links).lower(fixed, sets, written).compile()


def program(stage: Stage, links: int) -> Any:
    """The jitted program of (fixed arrays, the stacked sets, written arrays)."""

    @functools.partial(jax.jit, donate_argnums=2)
    def repeat(fixed: Any, sets: Any, written: Any) -> Any:
        def once(link: Any, written: Any) -> Any:
            one_set = jax.tree.map(lambda x: x[link % len(x)], sets)
            arrays = fixed | one_set | written
            arrays[stage.hinge] = arrays[stage.hinge] + _zero(written)
            # The barrier: every link's results are wanted whole, not just the word in _zero.
            return lax.optimization_barrier(stage.run(arrays))

        return lax.fori_loop(0, links, once, written)

    return repeat


def _zero(written: dict[str, jax.Array]) -> jax.Array:
    """0, but only the written arrays' values say so: the bits of one word are never these."""
    words = [lax.bitcast_convert_type(x.ravel()[0], jnp.int32) for x in written.values()]
    return sum(((word == 0x7FABCDEF).astype(jnp.int32) for word in words), jnp.int32(0))


def _after_prelude(
    stage: Stage, fixed: dict[str, Any], one_set: dict[str, Any], shapes: dict[str, Any]
) -> dict[str, Any]:
    """A set with what the stage's prelude makes of it."""
    if not stage.prelude:
        return one_set
    names = {name for part in stage.prelude for name in part.writes}
    fresh = {n: jnp.full(shapes[n].shape, initial(n), shapes[n].dtype) for n in names}
    after = jax.jit(functools.partial(run, stage.prelude))(fixed | one_set | fresh)
    return one_set | {name: after[name] for name in names}
