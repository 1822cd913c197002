"""Runs items: checks, times, prints and saves each; one that fails does not stop the others."""

from __future__ import annotations

import dataclasses
import faulthandler
import fnmatch
import functools
import math
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import check, report, results, roofline
from benchmarks.baselines import TORCH, Baseline, TorchRun
from benchmarks.cases import FULL, QUICK, Case, Decode, Prefill, Sharded, decode
from benchmarks.inputs import GPU_STREAM_BYTES, Inputs, Pool
from benchmarks.peers import PEERS, find
from benchmarks.results import Refused
from benchmarks.stages import build, written_like
from benchmarks.timing import GraphRun, JitRun, Lowering, Task, Times
from msa_icp_jax.backend import resolve_backend

# Stages that time themselves: name, and what checks the case, times it (on its inputs, over that
# transport) and returns the times.
OWN_WAY: dict[str, Callable[[Case, Inputs, str], Times]] = {}

_RUNS = {"graph": 15, "jit": 7}
# Microseconds that a program should last, and a guess of a stage's time over its floor.
_PROGRAM_US = {"graph": 2_000.0, "jit": 10_000.0}
_OVER_FLOOR = {"mosaic": 1.2, "xla": 12.0}
_LAUNCH_US = 2.0
# Links of a jitted program's loop: as many as XLA launches as one graph; few of XLA's own, each of
# which is a loop of many operations and takes long to compile.
_LOOP_LINKS = {"mosaic": 16, "xla": 1}
_RESERVE_SECONDS = {"xla": 12, "torch_compile": 20}  # of the budget, for one more item
_RESERVE_OTHERS_SECONDS = 3
_GRACE_SECONDS = 30  # past the budget: a hung item is given up, what was measured is saved
_LEAST_TASKS = 4  # to lower ahead; fewer are done sooner as the run comes to them

# The sweep: on a GPU about a minute, mostly compiling; on a CPU few and small.
CONTEXTS = {"gpu": tuple(1 << i for i in range(12, 21, 2)), "cpu": (1 << 12, 1 << 14, 1 << 16)}
BATCHES = {"gpu": (1, 4, 16, 64, 256), "cpu": (1, 4)}
MOST_KEY_ROWS = 1 << 23  # of a point's shard, 1 GiB


@dataclasses.dataclass(frozen=True)
class Item:
    """One figure to take: what it measures, more fields of the row, a suffix of its file."""

    case: Case
    stage: str
    backend: str
    precision: str
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    beside: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        return self.case.name, self.stage, self.backend, self.precision

    @property
    def label(self) -> str:
        return " ".join((*self.key, self.extra.get("transport", ""))).rstrip()


class Machine:
    """Where this runs, and what is installed there.

    Attributes:
      torch: the torch module where it sees this GPU, else None.
      baselines: the backends on torch tensors that can be measured here.
      absent: those that cannot, and why.
    """

    def __init__(self) -> None:
        device = jax.devices()[0]
        self.gpu = device.platform == "gpu"
        self.mosaic = self.gpu and resolve_backend("auto") == "mosaic"
        self.device = device.device_kind
        torch = _torch()
        self.torch_version = str(torch.__version__) if torch else None
        self.torch = torch if self.gpu and torch and torch.cuda.is_available() else None
        self.baselines: dict[str, Baseline] = {}
        self.absent: dict[str, str] = {}
        if not self.mosaic:
            self.absent["mosaic"] = "it takes a GPU of compute capability 9.0 (Hopper)"
        for name in (*TORCH, *PEERS):
            found = self.without_torch or self._find(name)
            if isinstance(found, Baseline):
                self.baselines[name] = found
            else:
                self.absent[name] = found

    def _find(self, name: str) -> Baseline | str:
        if not self.gpu and name != "torch":
            return "measured on GPUs only"
        return TORCH.get(name) or find(name)

    @property
    def without_torch(self) -> str | None:
        """Why torch cannot be used here, or None."""
        if self.torch_version is None:
            return "torch is not installed"
        return "torch sees no GPU" if self.gpu and self.torch is None else None

    @property
    def default_out(self) -> Path:
        """A file that git ignores: the committed ones are written where they are named alone."""
        name = self.device.lower().removeprefix("nvidia ").replace(" ", "-")
        return Path(__file__).parent / "results" / "local" / f"{name}.json"


def _torch() -> Any:
    """The torch module, or None where it is not installed."""
    try:
        import torch
    except ImportError:
        return None
    return torch


# ---- what to measure ----


def items(
    machine: Machine,
    pattern: str = "*",
    stages: Sequence[str] = (),
    backends: Sequence[str] = (),
    *,
    quick: bool = False,
) -> list[Item]:
    """What is asked for, the most wanted first: time may run out.

    Raises:
      Refused: no case has such a name, or none has such a stage on such a backend.
    """
    cases = QUICK if quick or not machine.gpu else FULL
    chosen = [case for case in cases if fnmatch.fnmatch(case.name, pattern)]
    if not chosen:
        there = ", ".join(case.name for case in cases)
        raise Refused(f"no case here has a name like {pattern!r}; there are {there}")
    return [
        item
        for item in _all_items(chosen, machine)
        if (not stages or item.stage in stages) and (not backends or item.backend in backends)
    ]


def _all_items(cases: list[Case], machine: Machine) -> Iterator[Item]:
    sharded = [case for case in cases if isinstance(case, Sharded) and case.data == "normal"]
    prefill = [case for case in cases if isinstance(case, Prefill) and case.data == "normal"]
    own = "mosaic" if machine.mosaic else "xla"
    if machine.mosaic or not machine.gpu:
        for case in cases:
            precision = case.precision if machine.mosaic else "exact"
            yield from (Item(case, stage, own, precision) for stage in case.stages)
    if machine.mosaic:
        yield from (Item(case, "local", own, "exact") for case in prefill)
    for name in (*PEERS, "torch"):
        if name in machine.baselines:
            alike = prefill if name == "flashinfer-no-icp" else []  # as flashinfer
            yield from (Item(case, "local", name, "fast") for case in sharded if case not in alike)
    for case in sharded:  # these compile for long: if time runs out, the first cases have both
        if machine.gpu:
            yield Item(case, "local", "xla", "exact")
        if "torch_compile" in machine.baselines and isinstance(case, Decode):
            yield Item(case, "local", "torch_compile", "fast")


def sweep(
    machine: Machine,
    contexts: Iterable[int] | None = None,
    batches: Iterable[int] | None = None,
    world_sizes: Iterable[int] | None = None,
    suffix: str = "",
) -> list[Item]:
    """Decode's local stage at every point, requests alike; says what it leaves out.

    Raises:
      Refused: every point is too large.
    """
    kind = "gpu" if machine.gpu else "cpu"
    asked = [
        decode(f"s-b{batch}-{report.short(context).lower()}-w{w}", (context,) * batch, w)
        for w in world_sizes or (2, 4)
        for batch in batches or BATCHES[kind]
        for context in contexts or CONTEXTS[kind]
    ]
    cases = sorted(
        (case for case in asked if case.key_rows <= MOST_KEY_ROWS), key=lambda case: case.key_rows
    )
    left_out = f"{len(asked) - len(cases)} of {len(asked)} points: a shard larger than 1 GiB"
    if not cases:
        raise Refused(f"the sweep leaves out {left_out}")
    if len(cases) < len(asked):
        print(f"sweep: left out {left_out}")
    # A sweep that runs out of time still spans all sizes, only less densely.
    cases = [*cases[::4], *cases[2::4], *cases[1::2]]
    backend = "mosaic" if machine.mosaic else "xla"
    return [Item(case, "local", backend, "exact", _point(case), suffix) for case in cases]


def _point(case: Decode) -> dict[str, int]:
    size = {"context": case.lens[0], "batch": len(case.lens), "world_size": case.world_size}
    return size | {"bytes": case.floor("local").bytes}


# ---- measuring ----


class Runner:
    """One run over items."""

    def __init__(
        self,
        machine: Machine,
        wanted: Sequence[Item],
        out: Path,
        budget_seconds: float | None = None,
        commit: str | None = None,
    ) -> None:
        """Rows go into `out`; `commit` is what is measured, None asks git."""
        self.machine, self.wanted, self.out, self.commit = machine, wanted, out, commit
        self._start, self._budget = time.monotonic(), budget_seconds or math.inf
        self.rows: dict[tuple[str, ...], results.Row] = {}
        self._failed: list[str] = []
        self._inputs: tuple[Any, Inputs] | None = None
        self._lowering = Lowering()
        self._graphs = machine.mosaic and bool(machine.torch)

    def run(self, asked: Sequence[str] = ()) -> int:
        """Runs everything; 0, 1 when an item failed, 2 when nothing was measured.

        Args:
          asked: the backends whose absence is worth a word; empty: all.

        Raises:
          Refused: what is measured could not be saved.
        """
        for path in {self.out, *(results.beside(self.out, item.beside) for item in self.wanted)}:
            results.prepare(path)
        if self.wanted:
            self._run()
        absent = {k: v for k, v in self.machine.absent.items() if not asked or k in asked}
        results.save(self.out, [], absent)
        print(f"{len(self.rows)} rows, each checked before it was timed, saved in {self.out}")
        for text in (*(f"absent: {name} ({why})" for name, why in absent.items()), *self._failed):
            print(text)
        return 1 if self._failed else 0 if self.rows else 2

    def _run(self) -> None:
        if self._budget < math.inf:
            faulthandler.dump_traceback_later(self._budget + _GRACE_SECONDS, exit=True)
        self._note()
        self.ceilings = roofline.measure(self.machine.torch)
        fp8 = self.ceilings.fp8_tflops
        product = f"fp8 product {fp8:.0f} TFLOP/s" if fp8 else "no fp8 unit"
        self._say(f"{self.machine.device}: reads {self.ceilings.read_tbps:.3f} TB/s, {product}")
        given = dict.fromkeys(map(self._given, self.wanted))
        self.pool = Pool(list(given), GPU_STREAM_BYTES if self.machine.gpu else 0)
        self._prepare_kernels()
        for item in self.wanted:
            self._attempt(item)
        faulthandler.cancel_dump_traceback_later()

    def _note(self) -> None:
        """Says what a reader of the figures must know first."""
        if not self.machine.gpu:
            self._say(
                "NOTE: JAX sees no GPU. On a CPU times tell no more than that everything runs, so "
                "small cases are taken and no floor is shown; every stage is its portable "
                "definition (fused-local: a loop far slower than score and select)"
            )
        elif self.machine.without_torch:
            self._say(
                f"NOTE: {self.machine.without_torch.upper()}: kernels are timed by jit (one program"
                " of many repeats, 1 to 2 us longer each), not in a CUDA graph, and "
                f"{', '.join((*TORCH, *PEERS))} are not measured; `make bench CUDA=13` installs "
                "torch too"
            )

    def _prepare_kernels(self) -> None:
        """Lowers and compiles ahead what will be launched from a graph."""
        stages: dict[tuple[str, str], tuple[Case, list[str]]] = {}
        for item in self.wanted:
            if item.backend == "mosaic" and item.stage not in OWN_WAY:
                key = item.case.name, item.precision
                stages.setdefault(key, (item.case, []))[1].append(item.stage)
        if not self._graphs or len(stages) < _LEAST_TASKS:
            return
        heavy_first = sorted(stages.items(), key=lambda x: not isinstance(x[1][0], Prefill))
        tasks: list[Task] = [
            (case, key[1], tuple(names), written_like(case) | self.pool.structs(case, "mosaic"))
            for key, (case, names) in heavy_first
        ]
        self._lowering.prepare(tasks, jax.devices()[0].core_count)
        self._say("kernels compiled")

    def _attempt(self, item: Item) -> None:
        reserve = _RESERVE_SECONDS.get(item.backend, _RESERVE_OTHERS_SECONDS)
        if self._elapsed() > self._budget - reserve:
            print(f"left out, out of time: {item.label}")
            return
        try:
            times = self._measure(item)
            floor = self._given(item).floor(item.stage).us(self.ceilings)
            machine = self.machine
            setting = results.Setting(
                machine.device, machine.torch_version, self.ceilings, self.commit
            )
            row = setting.row(item.key, times, floor, **item.extra)
            results.save(results.beside(self.out, item.beside), [row])
            self.rows[results.key_of(row)] = row
            self._say(report.line(row, self.rows))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            self._failed.append(f"FAILED {item.label}: {reason}")
            self._say(f"{item.label}: FAILED")
            traceback.print_exc(limit=-6)
            if item.backend in PEERS:
                self.machine.absent.setdefault(item.backend, f"fails: {reason}")

    def _measure(self, item: Item) -> Times:
        """Checks and times."""
        inputs = self._inputs_of(item)
        if item.stage in OWN_WAY:
            return OWN_WAY[item.stage](item.case, inputs, item.extra["transport"])
        if item.backend in self.machine.baselines:
            given = self._given(item)
            assert isinstance(given, Decode | Prefill)
            torch_run = TorchRun(given, inputs, self.machine.baselines[item.backend])
            torch_run.check()
            return torch_run.times(_RUNS["graph"])
        run, arrays = self._prepare(item, inputs)
        _check(item, arrays)
        return run.times(_RUNS["graph" if isinstance(run, GraphRun) else "jit"])

    def _given(self, item: Item) -> Case:
        """The case that the item's backend gets."""
        baseline = self.machine.baselines.get(item.backend)
        return baseline.given(item.case) if baseline else item.case

    def _prepare(self, item: Item, inputs: Inputs) -> tuple[GraphRun | JitRun, dict[str, Any]]:
        """The stage, run once: what times it, and all its arrays."""
        case, shapes = item.case, written_like(item.case)
        if item.backend == "mosaic" and self._graphs:
            stage = build(case, item.stage, item.backend, item.precision, arrange=False)

            lower = functools.partial(self._lowering.of, case, item.precision)
            run = GraphRun(stage, inputs, shapes, self._links(item, "graph"), lower)
            return run, run.run()
        stage = build(case, item.stage, item.backend, item.precision, arrange=True)
        links, loop = self._links(item, "jit"), _LOOP_LINKS[item.backend]
        jit_run = JitRun(stage, inputs, shapes, links, loop)
        return jit_run, jit_run.last_set | jit_run.run()

    def _links(self, item: Item, method: str) -> int:
        """Links for a program that lasts long enough; on a CPU, each set once."""
        if not self.machine.gpu:
            return 1
        floor = item.case.floor(item.stage).us(self.ceilings)
        guess = floor * _OVER_FLOOR[item.backend] + _LAUNCH_US
        return max(1, round(_PROGRAM_US[method] / guess))

    def _inputs_of(self, item: Item) -> Inputs:
        """The inputs of the case that the item gets; the last ones are kept."""
        backend = "mosaic" if item.backend == "mosaic" else "xla"
        key = (self._given(item), backend)
        if self._inputs is None or self._inputs[0] != key:
            self._inputs = None  # frees the last ones before making new ones
            self._inputs = (key, self.pool.inputs(*key))
        return self._inputs[1]

    def _elapsed(self) -> float:
        return time.monotonic() - self._start

    def _say(self, text: str) -> None:
        print(f"[{self._elapsed():6.1f} s] {text}", flush=True)


def _check(item: Item, arrays: dict[str, Any]) -> None:
    """Raises `check.Mismatch` unless the stage computed what it should."""
    case = item.case
    if isinstance(case, Decode | Prefill) and item.stage != "merge":
        check.check_scores(case, arrays, item.precision)
    if item.stage in ("select", "local", "fused-local", "chain"):
        check.check_rows(case.tokens, arrays["scores"], arrays["counts"], arrays["rows"])
    if item.stage in ("merge", "chain"):
        received = arrays.get("arranged", arrays["received"])
        check.check_merged(
            case.tokens, received, arrays["counts"], arrays["output"], arrays["errors"]
        )
