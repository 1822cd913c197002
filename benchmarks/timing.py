"""Device time of a stage: replays of a CUDA graph, or one jitted program that repeats it.

*graph*: a stage's kernels are taken apart (`aot.lower`) and bound to torch's buffers; launches then
go on torch's current stream, where torch captures and times them. The plain way to a kernel's own
time: no dispatch, no operation between links, and launches may overlap as they ask to (programmatic
dependent launch). Baselines' figures are taken in this way too.

*jit*: a program runs the stage *links* times over all input sets in turn, writing into donated
buffers. Each link waits for the results of the link before, so that no two links overlap and none
can be dropped; that and taking the set cost a few microseconds a link on a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.cases import Case, Ceilings
from benchmarks.stages import POISON, Arrays, Inputs, Stage, build
from msa_icp_jax.ops._mosaic import aot
from msa_icp_jax.ops._mosaic.launch import Target, building_for
from msa_icp_jax.rows import READY

_MAX_LINKS = 512  # of a graph
_READ_BYTES = {True: 2 << 30, False: 64 << 20}  # for the ceilings, of a GPU or not
_MATMUL, _CEILING_RUNS, _CEILING_SECONDS = 8192, 7, 0.3

Launch = Callable[[], Any]
# A stage's, and its prelude's if it has one: names of what is written, and the function lowered.
Kernels = list[tuple[list[str], aot.Lowered]]


@dataclasses.dataclass(frozen=True)
class Times:
    """Microseconds of one link, one figure a program run; how they were taken; more of the row."""

    us: tuple[float, ...]
    method: str
    more: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.us)

    @property
    def spread(self) -> tuple[float, float]:
        return min(self.us), max(self.us)


def on_clock(call: Launch, runs: int, each: int, method: str, before: Launch = list) -> Times:
    """Times `runs` calls that count `each`-fold by the host's clock; `before` is untimed."""
    found = []
    for _ in range(runs):
        before()
        start = time.perf_counter()
        call()
        found.append((time.perf_counter() - start) * 1e6 / each)
    return Times(tuple(found), method)


# ---- in a CUDA graph ----


def in_graph(links: Sequence[Launch], runs: int, before: Launch = list) -> Times:
    """Times replays of a graph of all links; `before` runs ahead of each, untimed."""
    import torch

    def launch_all() -> None:
        for launch in links:
            launch()

    before()
    launch_all()  # loads every kernel and touches every buffer
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        launch_all()
    timed(graph.replay, 1, before)  # uploads the graph
    return Times(tuple(us / len(links) for us in timed(graph.replay, runs, before)), "graph")


def timed(call: Launch, runs: int, before: Launch) -> list[float]:
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
    """A stage's links, each on the next input set, ready to be captured.

    There are `links` (at most 512), or one a set; `kernels` are those of `lowered`.
    """

    def __init__(self, kernels: Kernels, inputs: Inputs, shapes: Arrays, links: int) -> None:
        import torch

        torch.cuda.current_stream().query()  # makes the context current in this thread
        own = [{name: _empty(x, _start(name)) for name, x in shapes.items()} for _ in inputs.sets]
        sets = [o | inputs.fixed | x for o, x in zip(own, inputs.sets, strict=True)]
        stage, *prelude = (_Bindable(*named) for named in kernels)
        self._prelude = [bindable.bind(arrays)[0] for bindable in prelude for arrays in sets]
        arrays = [sets[i % len(sets)] for i in range(min(_MAX_LINKS, max(links, len(sets))))]
        self._received = None
        if "output" in stage.names:  # received rows are each link's own: a merge clears their flags
            self._received = _on_device(np.stack([x["received"] for x in arrays]))
            pairs = zip(arrays, self._received, strict=True)
            arrays = [x | {"received": rows} for x, rows in pairs]
        bound = [stage.bind(x) for x in arrays]
        self._links, self._first = [launch for launch, _ in bound], arrays[0] | bound[0][1]

    def run(self) -> Arrays:
        """Runs the prelude and the first link; all arrays of the first link."""
        import torch

        self._arm()
        for launch in (*self._prelude, self._links[0]):
            launch()
        torch.cuda.synchronize()
        return self._first

    def times(self, runs: int) -> Times:
        return in_graph(self._links, runs, self._arm)

    def _arm(self) -> None:
        if self._received is not None:
            self._received[..., -1] = READY


class _Bindable:
    """A lowered function; its scratch buffers serve all launches, which come one by one."""

    def __init__(self, names: list[str], found: aot.Lowered) -> None:
        self.names, scratch = names, [_empty(struct, 0) for struct in found.scratch]
        self._program = aot.Compiled(found, scratch, _on_device)

    def bind(self, arrays: Arrays) -> tuple[Launch, Arrays]:
        """What launches it on torch's current stream, and the buffers of what it writes."""
        import torch

        leaves = jax.tree.leaves(arrays)
        tensors = [x if torch.is_tensor(x) else torch.from_dlpack(x) for x in leaves]
        launches = self._program.bind(tensors)
        written = [self._program.buffer(x, tensors) for x in self._program.returned]

        def launch(_alive: Any = (self._program, tensors)) -> None:
            aot.launch(launches, torch.cuda.current_stream().cuda_stream)

        return launch, dict(zip(self.names, written, strict=True))


def _on_device(value: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(np.array(value)).cuda()


def _empty(like: jax.ShapeDtypeStruct, fill: int) -> Any:
    import torch

    return torch.full(like.shape, fill, dtype=getattr(torch, like.dtype.name), device="cuda")


def kernels_of(stage: Stage, structs: Arrays) -> Kernels:
    """The kernels of a stage and its prelude, for arrays of these shapes."""

    def lowered(run: Callable[[Arrays], Arrays]) -> tuple[list[str], aot.Lowered]:
        names: list[str] = []

        def values(arrays: Arrays) -> list[Any]:
            written = run(arrays)
            names[:] = written
            return list(written.values())

        return names, aot.lower(values, structs)

    return [lowered(run) for run in (stage.run, stage.prelude) if run]


Task = tuple[Case, str, str, Arrays]  # stage, precision, shapes of all arrays


def compile_kernels(tasks: Iterable[Task], sms: int) -> list[Kernels | None]:
    """Lowers and compiles what will be timed on all cores, for a GPU of `sms` multiprocessors.

    Lowering is Python's work, so it is done in processes, which see no GPU; compiling in threads.
    One that fails is None and left to the run, which says what is wrong when it comes to it.
    """

    def compiled(task: Task) -> Kernels | None:
        try:
            found = pool.submit(_lower_task, task, sms).result()
            _compile(found)
        except Exception as error:
            print(f"not compiled ahead: {task[0].name} {task[1]}, {type(error).__name__}")
            return None
        return found

    count, spawn = max(1, (os.cpu_count() or 1) - 2), multiprocessing.get_context("spawn")
    workers = ProcessPoolExecutor(count, spawn, _see_no_gpu)
    with ThreadPoolExecutor(count) as threads, workers as pool:
        return list(threads.map(compiled, tasks))


def _see_no_gpu() -> None:
    jax.config.update("jax_platforms", "cpu")


def _lower_task(task: Task, sms: int) -> Kernels:
    case, stage, precision, structs = task
    with building_for(Target(sms)):
        return kernels_of(build(case, stage, "mosaic", precision), structs)


def _compile(kernels: Kernels) -> None:
    """Compiles; `aot.compile_kernel`, which does one at a time, then finds them."""
    import torch

    torch.cuda.current_stream().synchronize()  # makes the context current in this thread
    library = aot._plugin()
    steps = [step for _, found in kernels for step in found.steps]
    for module in {step.module for step in steps if isinstance(step, aot.Kernel)}:
        if module in aot._compiled:
            continue
        if handle := library.MosaicGpuCompile(module, len(module)):
            aot._compiled.setdefault(module, (aot._LAUNCHER(handle[1]), handle[0]))


# ---- in one jitted program ----


class JitRun:
    """A stage's program of `links` links with its buffers; compiles it unless it is."""

    def __init__(
        self, stage: Stage, inputs: Inputs, shapes: Arrays, links: int, compiled: Any = None
    ) -> None:
        sets = [_after_prelude(stage, inputs.fixed, x, shapes) for x in inputs.sets]
        self.links, self.last_set = links, inputs.fixed | sets[(links - 1) % len(sets)]
        self._inputs = (inputs.fixed, jax.tree.map(lambda *x: jnp.stack(x), *sets))
        self._written = _fresh(jax.eval_shape(stage.run, shapes | inputs.fixed | sets[0]))
        self._program = compiled or _compiled(stage, links, *self._inputs, self._written)

    def run(self) -> Arrays:
        """Runs once; the arrays written, as the last link (of the last set) left them."""
        self._written = jax.block_until_ready(self._program(*self._inputs, self._written))
        return self._written

    def times(self, runs: int) -> Times:
        return on_clock(self.run, runs, self.links, "jit")


def compile_for(stage: Stage, links: int, inputs: Inputs, sets: int, shapes: Arrays) -> Any:
    """The compiled program for inputs of these shapes."""
    (one_set,) = inputs.sets
    stacked = {k: jax.ShapeDtypeStruct((sets, *x.shape), x.dtype) for k, x in one_set.items()}
    written = jax.eval_shape(stage.run, shapes | inputs.fixed | one_set)
    return _compiled(stage, links, inputs.fixed, stacked, written)


def _compiled(stage: Stage, links: int, *arguments: Any) -> Any:
    return program(stage, links).lower(*arguments).compile()


def program(stage: Stage, links: int) -> Any:
    """The jitted program of (fixed arrays, the stacked sets, written arrays)."""

    @functools.partial(jax.jit, donate_argnums=2)
    def repeat(fixed: Any, sets: Any, written: Any) -> Any:
        def once(link: Any, written: Any) -> Any:
            one_set = jax.tree.map(lambda x: x[link % len(x)], sets)
            # A set waits for the link before, whose results are wanted whole.
            one_set, written = lax.optimization_barrier((one_set, written))
            return stage.run(fixed | one_set | written)

        return lax.fori_loop(0, links, once, written)

    return repeat


def _after_prelude(stage: Stage, fixed: Arrays, one_set: Arrays, shapes: Arrays) -> Arrays:
    """A set with what the stage's prelude makes of it."""
    if stage.prelude is None:
        return one_set
    return one_set | jax.jit(stage.prelude)(_fresh(shapes) | fixed | one_set)


def _fresh(shapes: Arrays) -> Arrays:
    return {name: jnp.full(x.shape, _start(name), x.dtype) for name, x in shapes.items()}


def _start(name: str) -> int:
    """What a written array is filled with at the start."""
    return 0 if name == "errors" else POISON


# ---- the machine's ceilings, measured in the run that uses them ----


def ceilings(torch: Any) -> Ceilings:
    """The best of several sums of a large array, and of products, fp8 and bf16.

    On the GPU that torch sees; without one of a CPU's sums alone.
    """
    size = _READ_BYTES[bool(torch)]
    if not torch:
        total, ones = jax.jit(jnp.sum), jnp.ones(size // 4, jnp.int32)
        sums = on_clock(lambda: total(ones).block_until_ready(), _CEILING_RUNS, 1, "jit")
        return Ceilings(size / sums.spread[0] / 1e6, None)
    words = torch.empty(size // 8, dtype=torch.int64, device="cuda").random_()
    shape, one = (_MATMUL, _MATMUL), torch.ones((), device="cuda")
    wide = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    a, b = (x.to(torch.float8_e4m3fn) for x in wide)
    options = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16}
    fp8 = functools.partial(torch._scaled_mm, a, b.t(), **options)
    sum_us, *product_us = (_best(x, torch) for x in (words.sum, fp8, lambda: wide[0] @ wide[1].t()))
    return Ceilings(size / sum_us / 1e6, *(2 * _MATMUL**3 / us / 1e6 for us in product_us))


def _best(call: Launch, torch: Any) -> float:
    """Microseconds of the shortest call; a GPU that has rested takes a while to its full clocks."""
    call()
    found, end = [], time.monotonic() + _CEILING_SECONDS
    while not found or time.monotonic() < end:
        found += timed(call, _CEILING_RUNS, torch.cuda.synchronize)
    return min(found)
