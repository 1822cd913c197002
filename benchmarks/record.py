"""Takes all figures within one budget: `python -m benchmarks record --out FILE`.

Each part is a process of its own, with its share of what is left of the budget. One that fails,
hangs or runs out of time costs no figure of the others, and each saves its figures as they come.
What a part needs and the machine has not is written into the file as absent.

  kernels    every case and stage of the Mosaic kernels, and the sweep (into FILE-sweep)
  host       what a torch decode costs the host (benchmarks.host)
  exchange   between two or four GPUs (benchmarks.exchange, into FILE-x2 or FILE-x4)
  baselines  score and select in torch, and packages of others that are installed
  compiled   the same in XLA and torch.compile, which compile for long

Rows replace those of FILE that measure the same and leave the others. The exit status is 1 where a
part failed or had no time, 2 where nothing was measured.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import options, results

_LEAST_SECONDS = 8  # worth starting a part with
_GRACE_SECONDS = 10  # past its budget, after which a part is ended: more than it gives itself
_BASELINES = ("torch", "flashinfer", "vllm")
_COMPILED = ("xla", "torch_compile")  # these compile for long


@dataclasses.dataclass(frozen=True)
class Part:
    """One process.

    Attributes:
      name: what it measures.
      command: arguments of the interpreter, without where to save.
      share: how much of what is left of the budget it may take.
      may_lack: what the file says is absent where this part measures nothing.
      absent: why it cannot run here, or None.
      suffix: of its file's name.
    """

    name: str
    command: tuple[str, ...]
    share: float
    absent: str | None = None
    suffix: str = ""
    may_lack: tuple[str, ...] = ()

    def files(self, out: Path) -> tuple[Path, Path]:
        """Where it saves its rows, and those of a sweep."""
        rows = results.beside(out, self.suffix)
        return rows, results.beside(rows, results.SWEEP_SUFFIX)


def parts() -> list[Part]:
    """All parts, the most wanted first."""
    benchmarks = ("-m", "benchmarks")
    gpus = _gpus()
    none = None if gpus else "it takes a GPU"
    few = None if gpus > 1 else f"it takes two GPUs, there is {gpus or 'none'}"
    ranks = "4" if gpus >= 4 else "2"
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", ranks)
    exchange = (*torchrun, "-m", "benchmarks.exchange")
    return [
        Part("kernels", (*benchmarks, "--backends", "mosaic", "--sweep"), 0.75, none),
        Part("host", ("-m", "benchmarks.host"), 0.2, may_lack=("host",)),
        Part("exchange", exchange, 0.5, few, suffix=f"-x{ranks}"),
        *(
            Part(name, (*benchmarks, "--backends", *backends), share, may_lack=backends)
            for name, backends, share in (
                ("baselines", _BASELINES, 0.7),
                ("compiled", _COMPILED, 1.0),
            )
        ),
    ]


def _gpus() -> int:
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU") for line in listed.stdout.splitlines())


def main(arguments: Sequence[str]) -> int:
    found = parts()
    names = [part.name for part in found]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks record",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="result file, made or merged into"
    )
    options.add_budget(parser, default=400.0)
    options.add_commit(parser)
    parser.add_argument("--parts", nargs="+", default=names, choices=names, metavar="PART")
    parsed = parser.parse_args(arguments)
    end = time.monotonic() + parsed.budget_seconds - _GRACE_SECONDS
    wanted = [part for part in found if part.name in parsed.parts]
    for path in (path for part in wanted for path in part.files(parsed.out)):
        results.prepare(path)
    outcomes = []
    for part in wanted:
        if part.absent:
            results.save(parsed.out, [], {part.name: part.absent})
            outcomes.append(Outcome(f"absent, {part.absent}"))
        else:
            outcomes.append(_run(part, parsed.out, parsed.commit, end))
    for part, outcome in zip(wanted, outcomes, strict=True):
        print(f"record: {part.name}: {outcome.text}")
    if not any(outcome.rows for outcome in outcomes):
        print("record: nothing was measured")
        return 2
    return 1 if any(outcome.bad for outcome in outcomes) else 0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a part: in words, the rows that it measured, whether something is amiss."""

    text: str
    rows: int = 0
    bad: bool = False


def _run(part: Part, out: Path, commit: str | None, end: float) -> Outcome:
    seconds = (end - time.monotonic()) * part.share
    if seconds < _LEAST_SECONDS:
        return Outcome(f"left out, {max(0, seconds):.0f} s left for it", bad=True)
    print(f"record: {part.name}, at most {seconds:.0f} s", flush=True)
    command = [sys.executable, *part.command, "--out", str(part.files(out)[0])]
    command += ["--commit", commit] if commit else []
    before = _rows(part, out)
    status = _execute([*command, "--budget-seconds", f"{seconds:.0f}"], seconds + _GRACE_SECONDS)
    rows = sum(row not in before for row in _rows(part, out))
    if status == 0 and rows:
        return Outcome(f"{rows} rows", rows)
    if status is None:
        return Outcome(f"ended after {seconds + _GRACE_SECONDS:.0f} s, {rows} rows", rows, bad=True)
    missing = results.absent(out) if out.exists() else {}
    if not rows and part.may_lack and set(part.may_lack) <= set(missing):
        reasons = dict.fromkeys(missing[name] for name in part.may_lack)
        return Outcome(f"absent, {'; '.join(reasons)}")
    why = "nothing was measured" if not rows else f"{rows} rows"
    return Outcome(f"exit status {status}, {why}", rows, bad=True)


def _rows(part: Part, out: Path) -> list[results.Row]:
    """All rows of the part's files."""
    return [row for path in part.files(out) if path.exists() for row in results.load(path)]


def _execute(command: Sequence[str], seconds: float) -> int | None:
    """Runs a command; its exit status, or None if it had to be ended with all it started."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):  # usually nothing is left of it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
