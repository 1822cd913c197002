"""Runs items: checks, times, prints and saves each; one that fails does not stop the others."""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import check, report, results, roofline
from benchmarks.ahead import LEAST_TASKS, Ahead, prepare
from benchmarks.baselines import TORCH, TORCH_COMPILE, Baseline, TorchRun
from benchmarks.cases import FULL, QUICK, Case, Decode, Merge, Prefill, Select
from benchmarks.graph import GraphRun, Lowered, Unlaunchable
from benchmarks.inputs import GPU_STREAM_BYTES, Inputs, Pool
from benchmarks.options import Refused
from benchmarks.peers import PEERS, Absent, find, unsharded
from benchmarks.stages import build, written_like
from benchmarks.timing import JitRun, Times
from msa_icp_jax.backend import resolve_backend

_RUNS = {"graph": 15, "jit": 7, "baseline": 15}
# Microseconds that a program should last, and a guess of a stage's time over its floor.
_PROGRAM_US = {"graph": 2_000.0, "jit": 10_000.0}
_OVER_FLOOR = {"mosaic": 1.2, "xla": 12.0}
_LAUNCH_US = 2.0
# Links of a jitted program's loop: as many as XLA launches as one graph; few of XLA's own, each of
# which is a loop of many operations and takes long to compile.
_LOOP_LINKS = {"mosaic": 16, "xla": 1}
# Of the budget: what one more item may take.
_RESERVE_SECONDS = {"mosaic": 3, "torch": 3, "xla": 12, "torch_compile": 20}
_RESERVE_OTHERS_SECONDS = 3
_GRACE_SECONDS = 5  # past the budget: a hung item is given up, what was measured is saved


@dataclasses.dataclass(frozen=True)
class Options:
    """What to run.

    Attributes:
      quick: the small cases.
      cases: pattern of case names.
      stages, backends: names to keep; empty: all.
      timing: "auto" (a CUDA graph where there can be one), "graph" or "jit".
      out: the result file, or None for one of this device that git ignores.
      budget_seconds: time for everything, or None.
      commit: what is measured, or None to ask git.
      start: from when the budget counts.
    """

    quick: bool = False
    cases: str = "*"
    stages: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()
    timing: str = "auto"
    out: Path | None = None
    budget_seconds: float | None = None
    commit: str | None = None
    start: float = dataclasses.field(default_factory=time.monotonic)


@dataclasses.dataclass(frozen=True)
class Item:
    """One figure to take.

    Attributes:
      case, stage, backend, precision: what it measures.
      extra: more fields of the row.
      beside: what is appended to the name of the file that it is saved in.
    """

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
        return results.label(self.key)


class NothingToRun(Refused):
    """Nothing of what was asked for can be measured."""


def items(options: Options, machine: Machine) -> list[Item]:
    """What `options` ask for, the most wanted first: time may run out.

    Raises:
      NothingToRun: no case has such a name.
    """
    cases = QUICK if options.quick or not machine.gpu else FULL
    chosen = [case for case in cases if fnmatch.fnmatch(case.name, options.cases)]
    if not chosen:
        there = ", ".join(case.name for case in cases)
        raise NothingToRun(f"no case here has a name like {options.cases!r}; there are {there}")
    return [
        item
        for item in _all_items(chosen, machine)
        if (not options.stages or item.stage in options.stages)
        and (not options.backends or item.backend in options.backends)
    ]


def _all_items(cases: list[Case], machine: Machine) -> Iterator[Item]:
    decode = [c for c in cases if isinstance(c, Decode)]
    alone = [c for c in cases if isinstance(c, Select | Merge)]
    prefill = [c for c in cases if isinstance(c, Prefill)]
    if machine.mosaic:
        for case in (*decode, *alone):
            yield from (Item(case, stage, "mosaic", "exact") for stage in case.stages)
        for case in prefill:
            yield from (Item(case, stage, "mosaic", "fast") for stage in case.stages)
        yield from (Item(case, "local", "mosaic", "exact") for case in prefill)
    if not machine.gpu:
        for case in cases:
            yield from (Item(case, stage, "xla", "exact") for stage in case.stages)
    there = machine.baselines
    if TORCH.name in there:
        yield from (Item(case, "local", TORCH.name, "fast") for case in (*decode, *prefill))
    for name in (name for name in PEERS if name in there):
        yield from (Item(case, "local", name, "fast") for case in decode)
    for case in decode:  # both compile for long: if time runs out, the first cases have both
        if machine.gpu:
            yield Item(case, "local", "xla", "exact")
        if TORCH_COMPILE.name in there:
            yield Item(case, "local", TORCH_COMPILE.name, "fast")
    if machine.gpu:
        yield from (Item(case, "local", "xla", "exact") for case in prefill)


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
        self._look_for_baselines()

    @property
    def without_torch(self) -> str | None:
        """Why torch cannot be used here, or None."""
        if self.torch_version is None:
            return "torch is not installed"
        return "torch sees no GPU" if self.gpu and self.torch is None else None

    def _look_for_baselines(self) -> None:
        if self.without_torch:
            there = (TORCH.name, TORCH_COMPILE.name, *PEERS)
            self.absent |= dict.fromkeys(there, self.without_torch)
            return
        self.baselines[TORCH.name] = TORCH
        if not self.gpu:
            reason = "measured on GPUs only"
            self.absent |= dict.fromkeys((TORCH_COMPILE.name, *PEERS), reason)
            return
        self.baselines[TORCH_COMPILE.name] = TORCH_COMPILE
        for name in PEERS:
            match find(name):
                case Absent(name, reason):
                    self.absent[name] = reason
                case peer:
                    self.baselines[name] = peer

    @property
    def default_out(self) -> Path:
        """A file that git ignores: the committed ones are written where they are named alone."""
        name = self.device.lower().removeprefix("nvidia ").replace(" ", "-")
        return Path(__file__).parent / "results" / "local" / f"{name}.json"


class Runner:
    """One run over items."""

    def __init__(self, options: Options, machine: Machine, wanted: Sequence[Item]) -> None:
        self.options = options
        self.machine = machine
        self.wanted = wanted
        self.out = options.out or machine.default_out
        self.rows: list[results.Row] = []
        self.failed: list[str] = []
        self.left_out: list[str] = []
        self._inputs: tuple[tuple[str, str], Inputs] | None = None
        self._lowered: tuple[tuple[str, str], dict[str, Lowered]] | None = None
        self._ahead = Ahead({})

    def run(self) -> int:
        """Runs everything; 0, 1 when an item failed, 2 when nothing was measured.

        Raises:
          NothingToRun: a CUDA graph was asked for where there can be none.
          Unusable: what is measured could not be saved.
        """
        wanted = self.wanted
        for path in {self.out, *(results.beside(self.out, item.beside) for item in wanted)}:
            results.prepare(path)
        if self.options.timing == "graph" and not self._graphs():
            raise NothingToRun("a CUDA graph takes a Hopper GPU that torch sees too")
        if not wanted:
            if self.options.backends:
                results.save(self.out, [], self._absent())
            print(
                "no case has a stage that was asked for on a backend that was asked for and is here"
            )
            self._summary()
            return 2
        self._guard()
        for line in self._notes():
            self._say(f"NOTE: {line}")
        self.ceilings = roofline.measure(self.machine.torch)
        self._say(f"{self.machine.device}: {self._ceilings_text()}")
        cases = list({item.case.name: item.case for item in wanted}.values())
        cases += [unsharded(case) for case in cases if isinstance(case, Decode)]
        self.pool = Pool(cases, GPU_STREAM_BYTES if self.machine.gpu else 0)
        self._prepare_kernels()
        for number, item in enumerate(wanted, 1):
            if self._spent(item):
                self.left_out.append(item.label)
            else:
                self._attempt(item, f"{number}/{len(wanted)}")
        results.save(self.out, [], self._absent())
        self._summary()
        if self.failed:
            return 1
        return 0 if self.rows else 2

    def _notes(self) -> Iterator[str]:
        """What a reader of the figures must know first."""
        if not self.machine.gpu:
            yield (
                "JAX sees no GPU. On a CPU times tell no more than that everything runs, so small "
                "cases are taken and no floor is shown; every stage is its portable definition "
                "(fused-local: a loop far slower than score and select)"
            )
        elif self.machine.without_torch:
            yield (
                f"{self.machine.without_torch.upper()}: kernels are timed by jit (one program of "
                "many repeats, 1 to 2 us longer each), not in a CUDA graph, and "
                f"{', '.join((TORCH.name, TORCH_COMPILE.name, *PEERS))} are not measured; "
                "`make bench CUDA=13` installs torch too"
            )

    def _prepare_kernels(self) -> None:
        """Lowers and compiles ahead what will be launched from a graph."""
        stages: dict[tuple[str, str], tuple[Case, list[str]]] = {}
        for item in self.wanted:
            if item.backend == "mosaic":
                key = item.case.name, item.precision
                stages.setdefault(key, (item.case, []))[1].append(item.stage)
        if not self._graphs() or len(stages) < LEAST_TASKS:
            return
        tasks = [
            (case, precision, tuple(names)) for (_, precision), (case, names) in stages.items()
        ]
        try:
            self._ahead = prepare(tasks, self.pool.key_rows, jax.devices()[0].core_count)
        except Exception as error:
            self._say(f"nothing compiled ahead, since {type(error).__name__}: {error}")
        else:
            self._say("kernels compiled")

    def _graphs(self) -> bool:
        """Whether kernels are launched from a CUDA graph."""
        return self.options.timing != "jit" and self.machine.mosaic and bool(self.machine.torch)

    def _attempt(self, item: Item, count: str) -> None:
        try:
            row = self._measure(item)
        except Exception as error:
            self.failed.append(f"{item.label}: {type(error).__name__}: {error}")
            self._say(f"{count} {item.label}: FAILED")
            traceback.print_exc(limit=-6)
            if item.backend in PEERS:
                reason = f"fails: {type(error).__name__}: {error}"
                self.machine.absent.setdefault(item.backend, reason)
            return
        self.rows.append(row)
        results.save(results.beside(self.out, item.beside), [row])
        text = report.cells(row)
        ratio = f" = {text[7]} x floor" if text[7] else ""
        self._say(f"{count} {item.label}: {text[4]} us{ratio} ({row['timing']}) {text[8]}")

    def _measure(self, item: Item) -> results.Row:
        if item.backend in self.machine.baselines:
            return self._measure_baseline(item, self.machine.baselines[item.backend])
        inputs = self._inputs_of(item)
        run, arrays = self._prepare(item, inputs)
        _check(item, arrays)
        return self._row(item, run.times(_RUNS["graph" if isinstance(run, GraphRun) else "jit"]))

    def _measure_baseline(self, item: Item, baseline: Baseline) -> results.Row:
        case = item.case
        assert isinstance(case, Decode | Prefill)
        if baseline.name in PEERS:
            assert isinstance(case, Decode)
            case = unsharded(case)
        run = TorchRun(case, self._inputs_of(item, case), baseline)
        run.check()
        return self._row(item, run.times(_RUNS["baseline"]))

    def _prepare(self, item: Item, inputs: Inputs) -> tuple[GraphRun | JitRun, dict[str, Any]]:
        """The stage, run once: what times it, and all its arrays."""
        shapes = written_like(item.case)
        if item.backend == "mosaic" and self._graphs():
            stage = build(item.case, item.stage, item.backend, item.precision, arrange=False)
            try:
                lowered = self._lowered_of(item)
                structs = shapes | jax.tree.map(
                    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs.fixed | inputs.sets[0]
                )
                parts = (*stage.prelude, *stage.parts)
                lowered |= self._ahead.lowered(item.case, item.precision, parts, structs)
                run = GraphRun(stage, inputs, shapes, self._links(item, "graph"), lowered)
                return run, run.run()
            except Unlaunchable as error:
                if self.options.timing == "graph":
                    raise
                self._say(f"{item.label}: jit instead of a graph, since {error}")
        stage = build(item.case, item.stage, item.backend, item.precision, arrange=True)
        loop = _LOOP_LINKS[item.backend]
        jit_run = JitRun(stage, inputs, shapes, self._links(item, "jit"), loop)
        return jit_run, jit_run.last_set | jit_run.run()

    def _links(self, item: Item, method: str) -> int:
        """Links for a program that lasts long enough; on a CPU, each set once."""
        if not self.machine.gpu:
            return 1
        floor = item.case.floor(item.stage).us(self.ceilings.read_tbps, self.ceilings.fp8_tflops)
        guess = floor * _OVER_FLOOR[item.backend] + _LAUNCH_US
        return max(1, round(_PROGRAM_US[method] / guess))

    def _inputs_of(self, item: Item, case: Case | None = None) -> Inputs:
        """The inputs of the item's case, or of the `case` instead; the last ones are kept."""
        case = case or item.case
        backend = "mosaic" if item.backend == "mosaic" else "xla"
        key = (case.name, "peer" if item.backend in PEERS else backend)
        if self._inputs is None or self._inputs[0] != key:
            self._inputs = None  # frees the last ones before making new ones
            self._inputs = (key, self.pool.inputs(case, backend))
        return self._inputs[1]

    def _lowered_of(self, item: Item) -> dict[str, Lowered]:
        """Where the stages of a case keep what they lower, until another case comes."""
        key = (item.case.name, item.precision)
        if self._lowered is None or self._lowered[0] != key:
            self._lowered = (key, {})
        return self._lowered[1]

    def _row(self, item: Item, times: Times) -> results.Row:
        floor = item.case.floor(item.stage).us(self.ceilings.read_tbps, self.ceilings.fp8_tflops)
        machine = self.machine
        setting = results.Setting(
            machine.device, machine.torch_version, self.ceilings, self.options.commit
        )
        return results.row(item.key, times, floor, setting, **item.extra)

    def _absent(self) -> dict[str, str]:
        """What was asked for and cannot be measured here."""
        asked = self.options.backends
        return {k: v for k, v in self.machine.absent.items() if not asked or k in asked}

    def _summary(self) -> None:
        what = (
            f"{len(self.rows)} rows, each checked before it was timed, saved in"
            if self.rows
            else "nothing was measured for"
        )
        print(f"{what} {self.out}")
        for name, reason in self._absent().items():
            print(f"absent: {name} ({reason})")
        for label in self.left_out:
            print(f"left out, out of time: {label}")
        for line in self.failed:
            print(f"FAILED {line}")

    def show(self) -> None:
        """Prints a table of the rows."""
        if self.rows:
            report.show_rows(self.rows, f"{self.machine.device}: {self._ceilings_text()}")
        if any(report.target_of(row) for row in self.rows):
            print("target: set for each case before the work began, the most that it should take")

    def _ceilings_text(self) -> str:
        fp8 = self.ceilings.fp8_tflops
        matmul = f"fp8 product {fp8:.0f} TFLOP/s" if fp8 else "no fp8 unit"
        return f"reads {self.ceilings.read_tbps:.3f} TB/s, {matmul}"

    def _elapsed(self) -> float:
        return time.monotonic() - self.options.start

    def _say(self, text: str) -> None:
        print(f"[{self._elapsed():6.1f} s] {text}", flush=True)

    def _spent(self, item: Item) -> bool:
        """Whether too little is left of the budget for an item."""
        budget = self.options.budget_seconds
        reserve = _RESERVE_SECONDS.get(item.backend, _RESERVE_OTHERS_SECONDS)
        return budget is not None and self._elapsed() > budget - reserve

    def _guard(self) -> None:
        """Ends a run that hangs; its rows are saved as they come."""
        if self.options.budget_seconds is None:
            return

        def give_up() -> None:
            self._say(f"an item hangs; giving up, {len(self.rows)} rows in {self.out}")
            os._exit(3)

        left = self.options.budget_seconds + _GRACE_SECONDS - self._elapsed()
        timer = threading.Timer(left, give_up)
        timer.daemon = True
        timer.start()


def _check(item: Item, arrays: dict[str, Any]) -> None:
    """Raises `check.Mismatch` unless the stage computed what it should."""
    case = item.case
    if isinstance(case, Decode | Prefill) and item.stage != "merge":
        check.check_scores(case, arrays, item.precision)
    if item.stage in ("select", "local", "fused-local", "chain"):
        check.check_rows(case, arrays["scores"], arrays["counts"], arrays["rows"])
    if item.stage in ("merge", "chain"):
        received = arrays.get("arranged", arrays["received"])
        check.check_merged(case, received, arrays["counts"], arrays["output"], arrays["errors"])


def _torch() -> Any:
    """The torch module, or None where it is not installed."""
    try:
        import torch
    except ImportError:
        return None
    return torch
