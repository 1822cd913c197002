"""Device time of a stage: replays of a CUDA graph, or one jitted program that repeats it.

*graph*: a function's kernels are taken apart (`aot.lower`) and bound to torch's buffers; launches
then go on torch's current stream, where torch captures and times them. The plain way to a kernel's
own time: no dispatch, no operation between links, and launches may overlap as they ask to
(programmatic dependent launch). Baselines' figures are taken in this way too.

*jit*: a program runs the stage *links* times over all input sets in turn, writing into donated
buffers. Each link waits for the results of the link before, so that no two links overlap and none
can be dropped; that and taking the set cost a few microseconds a link on a GPU.
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
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.cases import BFLOAT16, FLOAT8, Case, Ceilings
from benchmarks.stages import POISON, Arrays, Inputs, Part, Stage, build, run
from msa_icp_jax.ops._mosaic import aot
from msa_icp_jax.ops._mosaic.aot import Lowered, lower
from msa_icp_jax.ops._mosaic.launch import Target, building_for
from msa_icp_jax.rows import READY

_MAX_LINKS = 512  # of a graph
_READ_BYTES = {"gpu": 2 << 30, "cpu": 64 << 20}  # for the ceilings
_MATMUL, _CEILING_RUNS = 8192, 7

Launch = Callable[[], Any]
Kept = dict[tuple[str, ...], Lowered]


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


def in_graph(links: Sequence[Sequence[Launch]], runs: int, before: Launch = list) -> Times:
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
    """A stage's links, each on the next input set, ready to be captured."""

    def __init__(
        self,
        stage: Stage,
        inputs: Inputs,
        shapes: Arrays,
        links: int,
        lower: Callable[..., Lowered],
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
            self._received = _on_device(np.stack([rows[i % len(rows)] for i in range(links)]))
        sets = range(len(self._sets))
        self._prelude = [launch for i in sets for launch in self._bind(stage.prelude, i)[0]]
        bound = [self._bind(stage.parts, i) for i in range(links)]
        self._links, self._first = [launches for launches, _ in bound], bound[0][1]

    def run(self) -> Arrays:
        """Runs the prelude and the first link; all arrays of the first link."""
        import torch

        self._arm()
        for launch in (*self._prelude, *self._links[0]):
            launch()
        torch.cuda.synchronize()
        return self._first

    def times(self, runs: int) -> Times:
        return in_graph(self._links, runs, self._arm)

    def _bind(self, parts: Sequence[Part], link: int) -> tuple[list[Launch], Arrays]:
        """Launches of a link, and its arrays: a set has buffers of its own to write into."""
        own = self._sets[link % len(self._sets)]
        arrays = dict(own)
        if self._received is not None:
            arrays["received"] = self._received[link]
        launches = []
        for part in parts:
            for name in part.reads:
                if name not in arrays:
                    arrays[name] = own[name] = _empty(self._shapes[name], _start(name))
            flat = jax.tree.leaves([arrays[name] for name in part.reads])
            found = self._lower(part, self._structs)
            launch, results = _bound(found, flat, self._scratch[part.name])
            launches.append(launch)
            arrays.update(zip(part.writes, results, strict=True))
        return launches, arrays

    def _arm(self) -> None:
        if self._received is not None:
            self._received[..., -1] = READY


def _bound(found: Lowered, buffers: Sequence[Any], scratch: list[Any]) -> tuple[Launch, Any]:
    """What launches a lowered function on torch's current stream, and its results' buffers.

    `scratch`: the function's own buffers, made when it comes empty; launches in a row may share it.
    """
    import torch

    torch.cuda.current_stream().query()  # makes the context current in this thread
    if not scratch:
        scratch += [_empty(struct, 0) for struct in found.scratch]
    tensors = [x if torch.is_tensor(x) else torch.from_dlpack(x) for x in buffers]
    program = aot.Compiled(found, scratch, _on_device)
    launches = program.bind(tensors)

    def launch(_alive: Any = (program, tensors)) -> None:
        aot.launch(launches, torch.cuda.current_stream().cuda_stream)

    return launch, [program.buffer(source, tensors) for source in found.returned]


def _on_device(value: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(np.array(value)).cuda()


def _empty(like: jax.ShapeDtypeStruct, fill: int) -> Any:
    import torch

    return torch.full(like.shape, fill, dtype=getattr(torch, like.dtype.name), device="cuda")


def lowered(kept: Kept, case: Case, precision: str, part: Part, structs: Arrays) -> Lowered:
    """A part lowered for arguments of these shapes, kept from then on."""
    key = (case.name, precision, part.name, repr([structs[name] for name in part.reads]))
    if key not in kept:
        kept[key] = lower(part.run, *(structs[name] for name in part.reads))
    return kept[key]


Task = tuple[Case, str, tuple[str, ...], Arrays]  # precision, stages, shapes of their arrays


def compile_kernels(tasks: Sequence[Task], sms: int) -> Kept:
    """Lowers and compiles what will be timed on all cores, for a GPU of `sms` multiprocessors.

    Lowering is Python's work, so it is done in processes, which see no GPU; compiling in threads.
    A task that fails is left to the run, which says what is wrong when it comes to it.
    """

    def compiled(task: Task) -> Kept:
        try:
            found = pool.submit(_lower_task, task, sms).result()
            compile_all(found.values())
        except Exception as error:
            print(f"not compiled ahead: {task[0].name}, {type(error).__name__}")
            return {}
        return found

    count, spawn = max(1, (os.cpu_count() or 1) - 2), multiprocessing.get_context("spawn")
    with (
        ThreadPoolExecutor(count) as threads,
        ProcessPoolExecutor(count, spawn, _see_no_gpu) as pool,
    ):
        return dict(collections.ChainMap(*threads.map(compiled, tasks)))


def _see_no_gpu() -> None:
    jax.config.update("jax_platforms", "cpu")


def _lower_task(task: Task, sms: int) -> Kept:
    case, precision, stages, structs = task
    kept: Kept = {}
    with building_for(Target(sms)):
        for stage in (build(case, stage, "mosaic", precision) for stage in stages):
            for part in (*stage.prelude, *stage.parts):
                lowered(kept, case, precision, part, structs)
    return kept


def compile_all(programs: Iterable[Lowered]) -> None:
    """Compiles kernels; `aot.compile_kernel`, which does one at a time, then finds them."""
    import torch

    torch.cuda.current_stream().synchronize()  # makes the context current in this thread
    library = aot._plugin()
    steps = [step for found in programs for step in found.steps]
    for module in {step.module for step in steps if isinstance(step, aot.Kernel)}:
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
        results = jax.eval_shape(stage.run, inputs.fixed | sets[0] | shapes)
        self._written = _fresh(results)
        self._program = (
            compiled or program(stage, links).lower(*self._inputs, self._written).compile()
        )

    def run(self) -> Arrays:
        """Runs once; the arrays written, as the last link (of the last set) left them."""
        self._written = jax.block_until_ready(self._program(*self._inputs, self._written))
        return self._written

    def times(self, runs: int) -> Times:
        return on_clock(self.run, runs, self.links, "jit")


def compile_for(
    stage: Stage, links: int, fixed: Arrays, one_set: Arrays, sets: int, shapes: Arrays
) -> Any:
    """The compiled program for arrays of these shapes."""
    stacked = {k: jax.ShapeDtypeStruct((sets, *x.shape), x.dtype) for k, x in one_set.items()}
    written = jax.eval_shape(stage.run, fixed | one_set | shapes)
    return program(stage, links).lower(fixed, stacked, written).compile()


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
    names = {name for part in stage.prelude for name in part.writes}
    arrays = fixed | one_set | _fresh({name: shapes[name] for name in names})
    after = jax.jit(functools.partial(run, stage.prelude))(arrays) if names else {}
    return one_set | {name: after[name] for name in names}


def _fresh(shapes: Arrays) -> Arrays:
    return {name: jnp.full(x.shape, _start(name), x.dtype) for name, x in shapes.items()}


def _start(name: str) -> int:
    """What a written array is filled with at the start."""
    return 0 if name == "errors" else POISON


# ---- the machine's ceilings, measured in the run that uses them ----


def ceilings(torch: Any) -> Ceilings:
    """The best of several sums of a large array, and of products, fp8 and bf16, on a GPU.

    On the one that torch sees; without torch by JAX.
    """
    size = _READ_BYTES[jax.default_backend()]
    calls = _in_torch(torch, size) if torch else _in_jax(size)
    sum_us, *product_us = (_best(call, torch) for call in calls)
    rates = [2 * _MATMUL**3 / us / 1e6 for us in product_us]
    return Ceilings(size / sum_us / 1e6, *(rates or [None]))


def _best(call: Launch, torch: Any) -> float:
    call()
    if torch:
        return min(timed(call, _CEILING_RUNS, torch.cuda.synchronize))
    return on_clock(lambda: jax.block_until_ready(call()), _CEILING_RUNS, 1, "jit").spread[0]


def _in_torch(torch: Any, size: int) -> list[Launch]:
    words = torch.empty(size // 8, dtype=torch.int64, device="cuda").random_()
    shape = (_MATMUL, _MATMUL)
    wide = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    a, b = (x.to(torch.float8_e4m3fn) for x in wide)
    one = torch.ones((), device="cuda")
    options = {"scale_a": one, "scale_b": one, "out_dtype": torch.bfloat16}
    product = functools.partial(torch._scaled_mm, a, b.t(), **options)
    return [words.sum, product, lambda: wide[0] @ wide[1].t()]


def _in_jax(size: int) -> list[Launch]:
    words, total = jnp.ones(size // 4, jnp.int32), jax.jit(jnp.sum)
    calls = [lambda: total(words)]
    dims = (((1,), (1,)), ((), ()))
    dot = jax.jit(lambda a, b: lax.dot_general(a, b, dims, preferred_element_type=jnp.bfloat16))
    for dtype in (FLOAT8, BFLOAT16) if jax.default_backend() == "gpu" else ():
        keys = (jax.random.key(i) for i in range(2))
        pair = [jax.random.normal(key, (_MATMUL,) * 2).astype(dtype) for key in keys]
        calls.append(functools.partial(dot, *pair))
    return calls
