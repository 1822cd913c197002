"""Takes all figures within one budget: `python -m benchmarks record --out FILE`.

Each part is a process of its own, with its share of what is left of the budget. One that fails,
hangs or runs out of time costs no figure of the others, and each saves its figures as they come.
What a part needs and the machine has not is written into the file as absent.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import results

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
      absent: why it cannot run here, or None.
      suffix: of its file's name.
    """

    name: str
    command: tuple[str, ...]
    share: float
    absent: str | None = None
    suffix: str = ""


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
        Part("host", ("-m", "benchmarks.host"), 0.2, _unless_there("benchmarks.host")),
        Part("exchange", exchange, 0.5, few, suffix=f"-x{ranks}"),
        Part("baselines", (*benchmarks, "--backends", *_BASELINES), 0.7),
        Part("compiled", (*benchmarks, "--backends", *_COMPILED), 1.0),
    ]


def _unless_there(module: str) -> str | None:
    return None if importlib.util.find_spec(module) else f"{module} is not in this checkout"


def _gpus() -> int:
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU") for line in listed.stdout.splitlines())


def main(arguments: Sequence[str]) -> int:
    found = parts()
    names = [part.name for part in found]
    parser = argparse.ArgumentParser(prog="python -m benchmarks record", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="FILE; FILE-sweep goes beside it")
    parser.add_argument("--budget-seconds", type=float, default=400.0, help="for all of it")
    parser.add_argument("--commit", help="what is measured, where there is no git to ask")
    parser.add_argument("--parts", nargs="+", default=names, choices=names)
    parsed = parser.parse_args(arguments)
    end = time.monotonic() + parsed.budget_seconds - _GRACE_SECONDS
    said = {}
    for part in found:
        if part.name not in parsed.parts:
            continue
        if part.absent:
            results.save(parsed.out, [], {part.name: part.absent})
            said[part.name] = f"absent, {part.absent}"
            continue
        out = parsed.out.with_name(f"{parsed.out.stem}{part.suffix}.json")
        command = [*part.command, "--out", str(out)]
        command += ["--commit", parsed.commit] if parsed.commit else []
        said[part.name] = _run(part, command, (end - time.monotonic()) * part.share)
    for name, result in said.items():
        print(f"record: {name}: {result}")
    return 0 if all(x == "done" or x.startswith("absent") for x in said.values()) else 1


def _run(part: Part, command: Sequence[str], seconds: float) -> str:
    """Runs a part; "done" or what became of it."""
    if seconds < _LEAST_SECONDS:
        return f"left out, {max(0, seconds):.0f} s left for it"
    print(f"record: {part.name}, at most {seconds:.0f} s", flush=True)
    budget = ["--budget-seconds", f"{seconds:.0f}"]
    status = _execute([sys.executable, *command, *budget], seconds + _GRACE_SECONDS)
    if status is None:
        return f"ended after {seconds + _GRACE_SECONDS:.0f} s"
    return "done" if status == 0 else f"exit status {status}"


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
