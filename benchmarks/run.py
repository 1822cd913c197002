"""Runs items: checks, times, prints and saves each; one that fails does not stop the others."""

from __future__ import annotations

import dataclasses
import faulthandler
import fnmatch
import functools
import math
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from benchmarks import check, jax_chain, report, results, roofline
from benchmarks.baselines import TORCH, Baseline, TorchRun
from benchmarks.cases import FLOAT8, FULL, QUICK, Case, Decode, Prefill, Sharded, decode
from benchmarks.inputs import GPU_STREAM_BYTES, Inputs, Pool
from benchmarks.peers import PEERS, find
from benchmarks.results import Refused
from benchmarks.stages import build, written_like
from benchmarks.timing import GraphRun, JitRun, Lowering, Task, Times, compile_program
from msa_icp_jax.backend import resolve_backend

# Stages that time themselves: name, and what checks the case, times it (on its inputs, over that
# transport) and returns the times.
OWN_WAY: dict[str, Callable[[Case, Inputs, str], Times]] = {"jax-chain": jax_chain.measure}

_GRAPH_RUNS, _JIT_RUNS = 15, 7
_GRAPH_US, _JIT_US = 2_000.0, 10_000.0  # that a program should last, at least
_XLA_OVER_FLOOR = 12.0
_RESERVE_SECONDS = {"torch_compile": 15}  # of the budget, for one more item
_RESERVE_OTHERS_SECONDS = 3
_GRACE_SECONDS = 30  # past the budget: a hung item is given up, what was measured is saved
_COMPILING = 8  # of XLA's programs at a time
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
      mosaic: whether the kernels can be measured: a Hopper GPU, and torch for its graphs.
      baselines: the backends on torch tensors that can be measured here.
      absent: those that cannot, and why.
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
        self.baselines: dict[str, Baseline] = {}
        self.absent: dict[str, str] = {}
        if not self.mosaic:
            hopper = "it takes a GPU of compute capability 9.0 (Hopper)"
            self.absent["mosaic"] = (self.gpu and without) or hopper
        for name in (*TORCH, *PEERS):
            found = without or self._find(name)
            there = self.baselines if isinstance(found, Baseline) else self.absent
            there[name] = found  # type: ignore[assignment]

    def _find(self, name: str) -> Baseline | str:
        if not self.gpu and name != "torch":
            return "measured on GPUs only"
        return TORCH.get(name) or find(name)

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
      Refused: no case has such a name.
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
    sharded = [case for case in cases if isinstance(case, Sharded) and len(case.stages) > 1]
    prefill = [case for case in sharded if isinstance(case, Prefill)]
    if machine.mosaic:
        for case in cases:
            yield from (Item(case, stage, "mosaic", case.precision) for stage in case.stages)
        yield from (Item(case, "local", "mosaic", "exact") for case in prefill)
        for case in (case for case in sharded if isinstance(case, Decode)):
            for name in jax_chain.ALONE:
                yield Item(case, "jax-chain", "mosaic", "exact", {"transport": name})
    if not machine.gpu:
        for case in cases:
            yield from (Item(case, stage, "xla", "exact") for stage in case.stages)
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
    contexts: Sequence[int] = (),
    batches: Sequence[int] = (),
    world_sizes: Sequence[int] = (),
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
    asked.sort(key=lambda case: case.key_rows)
    cases = [case for case in asked if case.key_rows <= MOST_KEY_ROWS]
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
        if not self.machine.gpu:
            self._say(
                "NOTE: JAX sees no GPU. On a CPU times tell no more than that everything runs: "
                "small cases, no floor, every stage by its portable definition"
            )
        ceilings = roofline.measure(self.machine.torch)
        fp8 = f"{ceilings.fp8_tflops:.0f} TFLOP/s" if ceilings.fp8_tflops else "none"
        self._say(f"{self.machine.device}: reads {ceilings.read_tbps:.3f} TB/s, fp8 product {fp8}")
        version = self.machine.torch_version
        self._setting = results.Setting(self.machine.device, version, ceilings, self.commit)
        given = dict.fromkeys(map(self._given, self.wanted))
        self.pool = Pool(list(given), GPU_STREAM_BYTES if self.machine.gpu else 0)
        self._prepare_kernels()
        self._prepare_programs()
        chains = [x for x in self.wanted if x.stage == "jax-chain" and x.backend == "mosaic"]
        jax_chain.prepare(((x.case, x.extra["transport"]) for x in chains), self.pool)
        for item in self.wanted:
            self._attempt(item)
        faulthandler.cancel_dump_traceback_later()

    def _prepare_kernels(self) -> None:
        """Lowers and compiles ahead."""
        stages: dict[tuple[Case, str], list[str]] = {}
        for item in self.wanted:
            if item.backend == "mosaic" and item.stage not in OWN_WAY:
                stages.setdefault((item.case, item.precision), []).append(item.stage)
        if len(stages) < _LEAST_TASKS:
            return
        heavy_first = sorted(stages.items(), key=lambda x: not isinstance(x[0][0], Prefill))
        tasks: list[Task] = []
        for (case, precision), names in heavy_first:
            fixed, one_set = self.pool.structs(case, "mosaic")
            tasks.append((case, precision, tuple(names), written_like(case) | fixed | one_set))
        self._lowering.prepare(tasks, jax.devices()[0].core_count)
        self._say("kernels compiled")

    def _prepare_programs(self) -> None:
        """Compiles XLA's programs ahead, several at a time."""
        wanted = [item for item in self.wanted if item.backend == "xla" and self.machine.gpu]
        with ThreadPoolExecutor(_COMPILING) as threads:
            compiled = threads.map(self._compile, wanted)
            self._programs = {x.key: found for x, found in zip(wanted, compiled, strict=True)}

    def _compile(self, item: Item) -> Any:
        """The program, or None where compiling fails: the item then says why."""
        fixed, one_set = self.pool.structs(item.case, "xla")
        count = self.pool.sets_of(item.case)
        sets = {k: jax.ShapeDtypeStruct((count, *x.shape), x.dtype) for k, x in one_set.items()}
        stage = build(item.case, item.stage, "xla", "exact")
        shapes = written_like(item.case)
        try:
            return compile_program(stage, self._links(item), fixed, sets, shapes)
        except Exception:
            return None

    def _links(self, item: Item) -> int:
        floor = item.case.floor(item.stage).us(self._setting.ceilings)
        return math.ceil(_JIT_US / (_XLA_OVER_FLOOR * floor)) if self.machine.gpu else 1

    def _attempt(self, item: Item) -> None:
        reserve = _RESERVE_SECONDS.get(item.backend, _RESERVE_OTHERS_SECONDS)
        if time.monotonic() - self._start > self._budget - reserve:
            print(f"left out, out of time: {item.label}")
            return
        try:
            times = self._measure(item)
            floor = self._given(item).floor(item.stage).us(self._setting.ceilings)
            row = self._setting.row(item.key, times, floor, **item.extra, **times.more)
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
        case, inputs, shapes = item.case, self._inputs_of(item), written_like(item.case)
        if item.stage in OWN_WAY:
            return OWN_WAY[item.stage](case, inputs, item.extra["transport"])
        if item.backend in self.machine.baselines:
            given = self._given(item)
            assert isinstance(given, Decode | Prefill)
            run = TorchRun(given, inputs, self.machine.baselines[item.backend])
            run.check()
            return run.times(_GRAPH_RUNS)
        stage = build(case, item.stage, item.backend, item.precision)
        if item.backend == "mosaic":
            floor = case.floor(item.stage).us(self._setting.ceilings)
            lower = functools.partial(self._lowering.of, case, item.precision)
            graph = GraphRun(stage, inputs, shapes, math.ceil(_GRAPH_US / (floor + 2)), lower)
            check_stage(item, graph.run())
            return graph.times(_GRAPH_RUNS)
        jit = JitRun(stage, inputs, shapes, self._links(item), self._programs.get(item.key))
        check_stage(item, jit.last_set | jit.run())
        return jit.times(_JIT_RUNS)

    def _given(self, item: Item) -> Case:
        """The case that the item's backend gets."""
        baseline = self.machine.baselines.get(item.backend)
        return baseline.given(item.case) if baseline else item.case

    def _inputs_of(self, item: Item) -> Inputs:
        """The inputs of the case that the item gets; the last ones are kept."""
        key = (self._given(item), "mosaic" if item.backend == "mosaic" else "xla")
        if self._inputs is None or self._inputs[0] != key:
            self._inputs = None  # frees the last ones before making new ones
            self._inputs = (key, self.pool.inputs(*key))
        return self._inputs[1]

    def _say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._start:6.1f} s] {text}", flush=True)


def check_stage(item: Item, arrays: dict[str, Any]) -> None:
    """Raises `check.Mismatch` unless the stage computed what it should."""
    tokens, counts = item.case.tokens, arrays["counts"]
    if isinstance(item.case, Sharded) and item.stage != "merge":
        # bfloat16 is multiplied exactly in every precision.
        precision = item.precision if item.case.dtype == FLOAT8 else "exact"
        check.check_scores(item.case, arrays, precision)
    if item.stage in ("select", "local", "fused-local", "chain"):
        check.check_rows(tokens, arrays["scores"], counts, arrays["rows"])
    if item.stage in ("merge", "chain"):
        merged = (arrays["received"], counts, arrays["output"], arrays["errors"])
        check.check_merged(tokens, *merged)
