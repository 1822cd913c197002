"""Runs items: checks, times, prints and saves each; one that fails does not stop the others."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import fnmatch
import importlib
import itertools
import math
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from benchmarks import baselines, check, host, jax_chain, report, results, timing
from benchmarks.cases import BFLOAT16, FULL, QUICK, Case, Decode, Host, Prefill, Sharded, decode
from benchmarks.results import Refused
from benchmarks.stages import GPU_STREAM_BYTES, Inputs, Pool, Stage, build, written_like
from benchmarks.timing import GraphRun, JitRun, Times
from msa_icp_jax.backend import resolve_backend

_GRAPH_RUNS, _JIT_RUNS = 15, 7
_GRAPH_US, _JIT_US = 2_000.0, 10_000.0  # that a program should last, at least
_XLA_OVER_FLOOR = 12.0
_RESERVE_SECONDS = {"torch_compile": 15}  # of the budget, for one more item; 3 for others
_GRACE_SECONDS = 30  # past the budget: a hung item is given up, what was measured is saved
_COMPILING = 12  # of XLA's programs at a time
_LEAST_KERNELS = 8  # to lower ahead; fewer are done sooner as the run comes to them

# The sweep, by whether there is a GPU: about a minute, mostly compiling; on a CPU few and small.
CONTEXTS = {True: tuple(1 << i for i in range(12, 21, 2)), False: (1 << 12, 1 << 14, 1 << 16)}
BATCHES = {True: (1, 4, 16, 64, 256), False: (1, 4)}
MOST_KEY_ROWS = 1 << 23  # of a point's shard, 1 GiB


@dataclasses.dataclass(frozen=True)
class Item:
    """One figure to take: what it measures, and more fields of the row."""

    case: Any
    stage: str
    backend: str
    precision: str
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def what(self) -> tuple[str, str, str]:
        return self.stage, self.backend, self.precision

    @property
    def built(self) -> tuple[Stage, dict[str, Any]]:
        """The stage, and shapes of what it writes."""
        return build(self.case, *self.what), written_like(self.case)

    @property
    def label(self) -> str:
        return " ".join((self.case.name, *self.what, self.extra.get("transport", ""))).rstrip()


class Machine:
    """Where this runs: the device, torch where it sees it, what can be measured, why others can't.

    `mosaic` takes a Hopper GPU.
    """

    def __init__(self) -> None:
        device, torch = jax.devices()[0], _torch()
        self.device, self.gpu = device.device_kind, device.platform == "gpu"
        self.torch_version = str(torch.__version__) if torch else None
        self.torch = torch if self.gpu and torch and torch.cuda.is_available() else None
        if self.gpu and not self.torch:
            reason = "torch sees no GPU" if torch else "torch is not installed"
            raise Refused(f"figures of a GPU take torch, and {reason}: `make bench CUDA=13`")
        self.mosaic = self.gpu and resolve_backend("auto") == "mosaic"
        found = {x: baselines.find(x, self.gpu) if torch else NO_TORCH for x in baselines.NAMES}
        self.baselines = {name: x for name, x in found.items() if not isinstance(x, str)}
        self.absent = {name: why for name, why in found.items() if isinstance(why, str)}
        if not self.mosaic:
            hopper = "it takes a GPU of compute capability 9.0 (Hopper)"
            self.absent |= {"mosaic": hopper, "host": hopper}

    @property
    def default_out(self) -> Path:
        """A file that git ignores: the committed ones are written where they are named alone."""
        name = self.device.lower().removeprefix("nvidia ").replace(" ", "-")
        return Path(__file__).parent / "results" / "local" / f"{name}.json"


NO_TORCH = "torch is not installed: `make bench CUDA=13` installs it"


def _torch() -> Any:
    """The torch module, or None where it is not installed."""
    with contextlib.suppress(ImportError):
        return importlib.import_module("torch")
    return None


# ---- what to measure ----


def items(
    machine: Machine, pattern: str = "*", stages: Sequence[str] = (), backends: Sequence[str] = ()
) -> list[Item]:
    """What is asked for, the most wanted first: time may run out."""
    chosen = named(FULL if machine.gpu else QUICK, pattern)
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
    decodes = [case for case in sharded if isinstance(case, Decode)]
    wide = [case for case in cases if isinstance(case, Sharded) and case.dtype == BFLOAT16]
    wide_decodes = [case for case in wide if isinstance(case, Decode)]
    if machine.mosaic:
        for case in cases:
            backend = case.backend if isinstance(case, Host) else "mosaic"
            yield from (Item(case, stage, backend, case.precision) for stage in case.stages)
        for case in sharded:
            if isinstance(case, Prefill):
                yield Item(case, "local", "mosaic", "exact")
        yield from (item for case in decodes for item in chain_items(case, jax_chain.ALONE))
    if not machine.gpu:
        yield from (Item(case, stage, "xla", "exact") for case in cases for stage in case.stages)
    taken = {  # FlashInfer's Hopper prefill takes no bfloat16, and is the same without ICP
        "flashinfer": [*sharded, *wide_decodes],
        "flashinfer-no-icp": [*decodes, *wide_decodes],
        "vllm": [*sharded, *wide],
        "torch": sharded,
    }
    for name in (name for name in taken if name in machine.baselines):
        yield from (Item(case, "local", name, "fast") for case in taken[name])
    for case in sharded:  # these compile for long: if time runs out, the first cases have both
        if machine.gpu:
            yield Item(case, "local", "xla", "exact")
        if "torch_compile" in machine.baselines and isinstance(case, Decode):
            yield Item(case, "local", "torch_compile", "fast")


def chain_items(case: Case, transports: Sequence[str]) -> Iterator[Item]:
    for name in transports:
        yield Item(case, "jax-chain", "mosaic", case.precision, {"transport": name})


def sweep(machine: Machine) -> list[Item]:
    """Decode's local stage at every point, requests alike; says what it leaves out."""
    points = itertools.product((2, 4), BATCHES[machine.gpu], CONTEXTS[machine.gpu])
    asked = [
        decode(f"s-b{batch}-{report.short(context).lower()}-w{w}", batch, context, w)
        for w, batch, context in points
    ]
    asked.sort(key=lambda case: case.key_rows)
    cases = [case for case in asked if case.key_rows <= MOST_KEY_ROWS]
    if left_out := len(asked) - len(cases):
        print(f"sweep: left out {left_out} of {len(asked)} points: a shard larger than 1 GiB")
    # A sweep that runs out of time still spans all sizes, only less densely.
    cases = [*cases[::4], *cases[2::4], *cases[1::2]]
    what = ("local", "mosaic" if machine.mosaic else "xla", "exact")

    def sizes(case: Decode) -> dict[str, int]:
        sizes = {"context": case.lens[0], "batch": len(case.lens), "world_size": case.world_size}
        return sizes | {"bytes": case.floor("local").bytes}

    return [Item(case, *what, sizes(case)) for case in cases]


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
        self.ready: dict[str, Any] = {}  # compiled programs and kernels, by label
        self._failed: list[str] = []
        self._inputs: tuple[Any, Inputs] | None = None

    def run(self, asked: Sequence[str] = ()) -> int:
        """Runs everything; 0, 1 when an item failed, 2 when nothing was measured.

        The absence of the backends `asked` for is worth a word, of all where none is named.
        """
        results.prepare(self.out)
        if self.wanted:
            self._run()
        results.save(self.out, [])
        print(f"{len(self.rows)} rows, each checked before it was timed, saved in {self.out}")
        for name, why in self.machine.absent.items():
            if not asked or name in asked:
                print(f"absent: {name} ({why})")
        print(*self._failed, sep="\n", end="\n" if self._failed else "")
        return 1 if self._failed else 0 if self.rows else 2

    def _run(self) -> None:
        if self._end < math.inf:
            faulthandler.dump_traceback_later(self._end + _GRACE_SECONDS, exit=True)
        if not self.machine.gpu:
            self._say("NOTE: JAX sees no GPU. On a CPU times only tell that everything runs")
        self.draw()
        if self.machine.gpu:
            self._prepare()
        for item in self.wanted:
            self._attempt(item)
        faulthandler.cancel_dump_traceback_later()

    def draw(self) -> None:
        """Measures the ceilings, and makes the rows of which inputs are taken."""
        device = self.machine.device + (f" x{self.mesh.size}" if self.mesh else "")
        self.ceilings = timing.ceilings(self.machine.torch)
        fp8 = self.ceilings.fp8_tflops or 0
        self._say(f"{device}: reads {self.ceilings.read_tbps:.3f} TB/s, fp8 {fp8:.0f} TFLOP/s")
        version = self.machine.torch_version
        self._setting = results.Setting(device, version, self.ceilings, self.commit)
        given = dict.fromkeys(map(self._given, self.wanted))
        self.pool = Pool(list(given), GPU_STREAM_BYTES if self.machine.gpu else 0)

    def _prepare(self) -> None:
        """Compiles ahead; what fails says why when the run comes to it."""
        heavy_first = sorted(self.wanted, key=lambda item: not isinstance(item.case, Prefill))
        own = [x for x in heavy_first if x.backend == "mosaic" and x.stage not in OWN_WAY]
        if len(own) >= _LEAST_KERNELS:
            tasks = [(x.case, x.stage, x.precision, self._structs(x)) for x in own]
            found = timing.compile_kernels(tasks, jax.devices()[0].core_count)
            self.ready = dict(zip((item.label for item in own), found, strict=True))

        def compiled(item: Item) -> Any:
            try:
                return self._compile(item)
            except Exception as error:
                print(f"not compiled ahead: {item.label}, {type(error).__name__}")

        jitted = [x for x in self.wanted if x.backend == "xla" or x.stage == "jax-chain"]
        with ThreadPoolExecutor(_COMPILING) as threads:
            labels = (item.label for item in jitted)
            self.ready |= zip(labels, threads.map(compiled, jitted), strict=True)
        self._say("compiled")

    def _compile(self, item: Item) -> Any:
        structs, sets = self.pool.structs(item.case, item.backend), self.pool.sets_of(item.case)
        if item.stage == "jax-chain":
            return jax_chain.compile_for(
                item.case, item.extra["transport"], self.mesh, structs, sets
            )
        stage, shapes = item.built
        return timing.compile_for(stage, self._links(item), structs, sets, shapes)

    def _structs(self, item: Item) -> dict[str, Any]:
        fixed, (one_set,) = self.pool.structs(item.case, "mosaic")
        return written_like(item.case) | fixed | one_set

    def _links(self, item: Item) -> int:
        """So many that a program lasts long enough."""
        floor = item.case.floor(item.stage).us(self.ceilings)
        if item.backend == "mosaic":
            return math.ceil(_GRAPH_US / (floor + 2))
        return math.ceil(_JIT_US / (_XLA_OVER_FLOOR * floor)) if self.machine.gpu else 1

    def _attempt(self, item: Item) -> None:
        reserve = _RESERVE_SECONDS.get(item.backend, 3)
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
            self._failed.append(f"FAILED {item.label}: {type(error).__name__}: {error}")
            self._say(f"{item.label}: FAILED")
            traceback.print_exc(limit=-6)

    def _measure(self, item: Item) -> Times:
        """Checks and times."""
        if item.stage in OWN_WAY:
            return OWN_WAY[item.stage](item, self)
        if item.backend in self.machine.baselines:
            baseline, inputs = self.machine.baselines[item.backend], self.inputs_of(item)
            return baselines.measure(self._given(item), inputs, baseline, _GRAPH_RUNS)
        found = self.checked(item)
        return found.times(_GRAPH_RUNS if item.backend == "mosaic" else _JIT_RUNS)

    def checked(self, item: Item) -> GraphRun | JitRun:
        """The item's stage, run once and checked."""
        stage, shapes, inputs = *item.built, self.inputs_of(item)
        links, ready = self._links(item), self.ready.get(item.label)
        if item.backend == "mosaic":
            kernels = ready or timing.kernels_of(stage, self._structs(item))
            graph = GraphRun(kernels, inputs, shapes, links)
            check.check_stage(item.case, item.stage, item.precision, graph.run())
            return graph
        jit = JitRun(stage, inputs, shapes, links, ready)
        check.check_stage(item.case, item.stage, item.precision, jit.last_set | jit.run())
        return jit

    def _given(self, item: Item) -> Any:
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


# Stages that check and time themselves.
OWN_WAY: dict[str, Any] = {
    "host": lambda item, _: host.measure(item.case.name),
    "jax-chain": lambda item, runner: jax_chain.measure(
        item.case,
        runner.inputs_of(item),
        item.extra["transport"],
        runner.mesh,
        runner.ready.get(item.label),
    ),
}
