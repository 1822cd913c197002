"""Runs items: checks, times, prints and saves each; one that fails does not stop the others."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import fnmatch
import functools
import importlib
import itertools
import math
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from benchmarks import baselines, check, host, jax_chain, report, results, timing
from benchmarks.cases import BFLOAT16, FULL, QUICK, Case, Decode, Host, Prefill, Sharded, decode
from benchmarks.results import Refused
from benchmarks.stages import GPU_STREAM_BYTES, Inputs, Pool, build, written_like
from benchmarks.timing import GraphRun, JitRun, Times
from msa_icp_jax.backend import resolve_backend

# Stages that check and time themselves.
OWN_WAY: dict[str, Callable[[Item, Runner], Times]] = {
    "host": lambda item, _: host.measure(item.case.name),
    "jax-chain": lambda item, run: jax_chain.measure(
        *(
            item.case,
            run.inputs_of(item),
            item.extra["transport"],
            run.mesh,
            run.programs.get(item.label),
        )
    ),
}

_GRAPH_RUNS, _JIT_RUNS = 15, 7
_GRAPH_US, _JIT_US = 2_000.0, 10_000.0  # that a program should last, at least
_XLA_OVER_FLOOR = 12.0
_RESERVE_SECONDS = {"torch_compile": 15}  # of the budget, for one more item
_RESERVE_OTHERS_SECONDS = 3
_GRACE_SECONDS = 30  # past the budget: a hung item is given up, what was measured is saved
_COMPILING = 12  # of XLA's programs at a time
_LEAST_TASKS = 4  # to lower ahead; fewer are done sooner as the run comes to them

# The sweep: on a GPU about a minute, mostly compiling; on a CPU few and small.
CONTEXTS = {"gpu": tuple(1 << i for i in range(12, 21, 2)), "cpu": (1 << 12, 1 << 14, 1 << 16)}
BATCHES = {"gpu": (1, 4, 16, 64, 256), "cpu": (1, 4)}
MOST_KEY_ROWS = 1 << 23  # of a point's shard, 1 GiB


@dataclasses.dataclass(frozen=True)
class Item:
    """One figure to take: what it measures, and more fields of the row."""

    case: Case | Host
    stage: str
    backend: str
    precision: str
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def what(self) -> tuple[str, str, str]:
        return self.stage, self.backend, self.precision

    @property
    def label(self) -> str:
        return " ".join((self.case.name, *self.what, self.extra.get("transport", ""))).rstrip()


class Machine:
    """Where this runs: the device, torch where it sees it, what can be measured, why others can't.

    `mosaic` takes a Hopper GPU, and torch for its graphs.
    """

    def __init__(self) -> None:
        device = jax.devices()[0]
        self.device, self.gpu = device.device_kind, device.platform == "gpu"
        torch = _torch()
        self.torch_version = str(torch.__version__) if torch else None
        self.torch = torch if self.gpu and torch and torch.cuda.is_available() else None
        without = "torch sees no GPU" if torch and self.gpu and not self.torch else None
        without = without if torch else "torch is not installed: `make bench CUDA=13` installs it"
        self.mosaic = bool(self.torch) and resolve_backend("auto") == "mosaic"
        hopper = "it takes a GPU of compute capability 9.0 (Hopper)"
        there = {name: without or baselines.find(name, self.gpu) for name in baselines.NAMES}
        self.absent = {} if self.mosaic else {"mosaic": (self.gpu and without) or hopper}
        self.absent |= {name: why for name, why in there.items() if isinstance(why, str)}
        self.baselines = {k: x for k, x in there.items() if k not in self.absent}

    @property
    def default_out(self) -> Path:
        """A file that git ignores: the committed ones are written where they are named alone."""
        name = self.device.lower().removeprefix("nvidia ").replace(" ", "-")
        return Path(__file__).parent / "results" / "local" / f"{name}.json"


def _torch() -> Any:
    """The torch module, or None where it is not installed."""
    with contextlib.suppress(ImportError):
        return importlib.import_module("torch")
    return None


# ---- what to measure ----


def items(
    machine: Machine,
    pattern: str = "*",
    stages: Sequence[str] = (),
    backends: Sequence[str] = (),
    *,
    quick: bool = False,
) -> list[Item]:
    """What is asked for, the most wanted first: time may run out."""
    chosen = named(QUICK if quick or not machine.gpu else FULL, pattern)
    return [
        item
        for item in _all_items(chosen, machine)
        if (not stages or item.stage in stages) and (not backends or item.backend in backends)
    ]


def named(cases: Sequence[Any], pattern: str) -> list[Any]:
    """The cases with a name like the pattern; `Refused` where there are none."""
    found = [case for case in cases if fnmatch.fnmatch(case.name, pattern)]
    if not found:
        there = ", ".join(case.name for case in cases)
        raise Refused(f"no case here has a name like {pattern!r}; there are {there}")
    return found


def _all_items(cases: list[Case], machine: Machine) -> Iterator[Item]:
    sharded = [case for case in cases if isinstance(case, Sharded) and case.normal]
    prefill = [case for case in sharded if isinstance(case, Prefill)]
    decodes = [case for case in sharded if isinstance(case, Decode)]
    wide = [case for case in cases if isinstance(case, Sharded) and case.dtype == BFLOAT16]
    if machine.mosaic:
        for case in cases:
            yield from (Item(case, stage, "mosaic", case.precision) for stage in case.stages)
        yield from (Item(case, "local", "mosaic", "exact") for case in prefill)
        yield from (item for case in decodes for item in chain_items(case, jax_chain.ALONE))
    if not machine.gpu:
        for case in cases:
            yield from (Item(case, stage, "xla", "exact") for stage in case.stages)
    for name in (*baselines.PEERS, "torch"):
        if name in machine.baselines:  # in prefill FlashInfer is the same with and without ICP
            given = decodes if name == "flashinfer-no-icp" else sharded
            if name in baselines.PEERS:  # FlashInfer's Hopper prefill takes no bfloat16
                taken = [x for x in wide if name == "vllm" or isinstance(x, Decode)]
                given = [*given, *taken]
            yield from (Item(case, "local", name, "fast") for case in given)
    for case in sharded:  # these compile for long: if time runs out, the first cases have both
        if machine.gpu:
            yield Item(case, "local", "xla", "exact")
        if "torch_compile" in machine.baselines and isinstance(case, Decode):
            yield Item(case, "local", "torch_compile", "fast")


def chain_items(case: Case, transports: Sequence[str]) -> Iterator[Item]:
    for name in transports:
        yield Item(case, "jax-chain", "mosaic", case.precision, {"transport": name})


def sweep(
    machine: Machine,
    contexts: Sequence[int] = (),
    batches: Sequence[int] = (),
    world_sizes: Sequence[int] = (),
) -> list[Item]:
    """Decode's local stage at every point, requests alike; says what it leaves out."""
    kind = "gpu" if machine.gpu else "cpu"
    points = (world_sizes or (2, 4), batches or BATCHES[kind], contexts or CONTEXTS[kind])
    asked = [
        decode(f"s-b{batch}-{report.short(context).lower()}-w{w}", (context,) * batch, w)
        for w, batch, context in itertools.product(*points)
    ]
    asked.sort(key=lambda case: case.key_rows)
    cases = [case for case in asked if case.key_rows <= MOST_KEY_ROWS]
    left_out = f"{len(asked) - len(cases)} of {len(asked)} points: a shard larger than 1 GiB"
    if not cases:
        raise Refused(f"the sweep leaves out {left_out}")
    if len(cases) < len(asked):
        print(f"sweep: left out {left_out}")
    # A sweep that runs out of time still spans all sizes, only less densely.
    cases = [*cases[::4], *cases[2::4], *cases[1::2]]
    what = ("local", "mosaic" if machine.mosaic else "xla", "exact")
    names = ("context", "batch", "world_size", "bytes")
    sizes = ((x.lens[0], len(x.lens), x.world_size, x.floor("local").bytes) for x in cases)
    return [
        Item(x, *what, dict(zip(names, y, strict=True))) for x, y in zip(cases, sizes, strict=True)
    ]


# ---- measuring ----


@dataclasses.dataclass
class Runner:
    """One run over items; their rows go into `out`.

    `commit` is what is measured, None asks git; on a mesh every GPU of it is a rank.
    """

    machine: Machine
    wanted: Sequence[Item]
    out: Path
    budget: float | None = None
    commit: str | None = None
    mesh: Any = None

    def __post_init__(self) -> None:
        self._start, self._end = time.monotonic(), self.budget or math.inf
        self.rows: results.Rows = {}
        self.programs: dict[str, Any] = {}  # compiled, by label
        self._failed: list[str] = []
        self._inputs: tuple[Any, Inputs] | None = None
        self._kernels: timing.Kept = {}

    def run(self, asked: Sequence[str] = ()) -> int:
        """Runs everything; 0, 1 when an item failed, 2 when nothing was measured.

        The absence of the backends `asked` for is worth a word, of all where none is named.
        """
        results.prepare(self.out)
        if self.wanted:
            self._run()
        absent = {k: v for k, v in self.machine.absent.items() if not asked or k in asked}
        results.save(self.out, [], absent)
        print(f"{len(self.rows)} rows, each checked before it was timed, saved in {self.out}")
        for text in (*(f"absent: {name} ({why})" for name, why in absent.items()), *self._failed):
            print(text)
        return 1 if self._failed else 0 if self.rows else 2

    def _run(self) -> None:
        if self._end < math.inf:
            faulthandler.dump_traceback_later(self._end + _GRACE_SECONDS, exit=True)
        if not self.machine.gpu:
            self._say(
                "NOTE: JAX sees no GPU. On a CPU times tell no more than that everything runs"
            )
        device = self.machine.device + (f" x{self.mesh.size}" if self.mesh else "")
        self.ceilings = timing.ceilings(self.machine.torch)
        fp8 = self.ceilings.fp8_tflops or 0
        self._say(f"{device}: reads {self.ceilings.read_tbps:.3f} TB/s, fp8 {fp8:.0f} TFLOP/s")
        version = self.machine.torch_version
        self._setting = results.Setting(device, version, self.ceilings, self.commit)
        given = dict.fromkeys(map(self._given, self.wanted))
        self.pool = Pool(list(given), GPU_STREAM_BYTES if self.machine.gpu else 0)
        self._prepare_kernels()
        self._prepare_programs()
        for item in self.wanted:
            self._attempt(item)
        faulthandler.cancel_dump_traceback_later()

    def _prepare_kernels(self) -> None:
        """Lowers and compiles ahead."""
        stages: dict[tuple[Case, str], list[str]] = {}
        for item in self.wanted:
            if item.backend == "mosaic" and item.stage not in OWN_WAY:
                stages.setdefault((item.case, item.precision), []).append(item.stage)
        heavy_first = sorted(stages.items(), key=lambda x: not isinstance(x[0][0], Prefill))
        tasks: list[timing.Task] = []
        for (case, precision), names in heavy_first:
            fixed, one_set = self.pool.structs(case, "mosaic")
            tasks.append((case, precision, tuple(names), written_like(case) | fixed | one_set))
        if len(tasks) >= _LEAST_TASKS:
            self._kernels = timing.compile_kernels(tasks, jax.devices()[0].core_count)
            self._say("kernels compiled")

    def _prepare_programs(self) -> None:
        """Compiles programs ahead; one that fails says why when the run comes to it."""

        def compiled(item: Item) -> Any:
            try:
                return self._compile(item)
            except Exception as error:
                print(f"not compiled ahead: {item.label}, {type(error).__name__}")
                return None

        jitted = [x for x in self.wanted if x.backend == "xla" or x.stage == "jax-chain"]
        with ThreadPoolExecutor(_COMPILING) as threads:
            wanted = {item.label: item for item in jitted if self.machine.gpu}
            self.programs = dict(zip(wanted, threads.map(compiled, wanted.values()), strict=True))

    def _compile(self, item: Item) -> Any:
        given = (*self.pool.structs(item.case, item.backend), self.pool.sets_of(item.case))
        if item.stage == "jax-chain":
            return jax_chain.compile_for(item.case, item.extra["transport"], self.mesh, *given)
        stage, shapes = build(item.case, *item.what), written_like(item.case)
        return timing.compile_for(stage, self._links(item), *given, shapes)

    def _links(self, item: Item) -> int:
        floor = item.case.floor(item.stage).us(self.ceilings)
        return math.ceil(_JIT_US / (_XLA_OVER_FLOOR * floor)) if self.machine.gpu else 1

    def _attempt(self, item: Item) -> None:
        reserve = _RESERVE_SECONDS.get(item.backend, _RESERVE_OTHERS_SECONDS)
        if time.monotonic() - self._start > self._end - reserve:
            print(f"left out, out of time: {item.label}")
            return
        try:
            times, given = self._measure(item), self._given(item)
            floor = None if isinstance(given, Host) else given.floor(item.stage).us(self.ceilings)
            row = self._setting.row((item.case.name, *item.what), times, floor, **item.extra)
            results.save(self.out, [row])
            self.rows[results.key_of(row)] = row
            self._say(report.line(row, self.rows))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self._failed.append(f"FAILED {item.label}: {reason}")
            self._say(f"{item.label}: FAILED")
            traceback.print_exc(limit=-6)
            if item.backend in baselines.PEERS:
                self.machine.absent.setdefault(item.backend, f"fails: {reason}")

    def _measure(self, item: Item) -> Times:
        """Checks and times."""
        if item.stage in OWN_WAY:
            return OWN_WAY[item.stage](item, self)
        inputs, shapes = self.inputs_of(item), written_like(item.case)
        if item.backend in self.machine.baselines:
            baseline = self.machine.baselines[item.backend]
            return baselines.measure(self._given(item), inputs, baseline, _GRAPH_RUNS)
        stage = build(item.case, *item.what)
        checked = functools.partial(check.check_stage, item.case, item.stage, item.precision)
        if item.backend == "mosaic":
            floor = item.case.floor(item.stage).us(self.ceilings)
            lower = functools.partial(timing.lowered, self._kernels, item.case, item.precision)
            graph = GraphRun(stage, inputs, shapes, math.ceil(_GRAPH_US / (floor + 2)), lower)
            checked(graph.run())
            return graph.times(_GRAPH_RUNS)
        jit = JitRun(stage, inputs, shapes, self._links(item), self.programs.get(item.label))
        checked(jit.last_set | jit.run())
        return jit.times(_JIT_RUNS)

    def _given(self, item: Item) -> Case | Host:
        """The case that the item's backend gets."""
        baseline = self.machine.baselines.get(item.backend)
        return baseline.given(item.case) if baseline else item.case

    def inputs_of(self, item: Item) -> Inputs:
        """The inputs of the case that the item gets; the last ones are kept."""
        key = (self._given(item), "mosaic" if item.backend == "mosaic" else "xla")
        if self._inputs is None or self._inputs[0] != key:
            self._inputs = None  # frees the last ones before making new ones
            self._inputs = (key, self.pool.inputs(*key))
        return self._inputs[1]

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._start:6.1f} s] {text}", flush=True)
