"""Takes all figures within one budget: `python -m benchmarks record --out FILE`.

Each part is a process of its own, with what is left of the budget at most. One that fails, hangs or
runs out of time costs no figure of the others, and each saves its figures as they come.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PARTS = ("kernels", "sweep", "baselines")
_LEAST_SECONDS = 30  # worth starting a part with
_GRACE_SECONDS = 40  # past its budget, after which a part is ended: more than it gives itself


def _parts(out: Path) -> dict[str, tuple[list[str], float]]:
    """By name: a part's arguments, and the share of what is left that it may take."""
    sweep = out.with_name(f"{out.stem}-sweep.json")
    return {
        "kernels": (["--backends", "mosaic", "--out", str(out)], 0.5),
        "sweep": (["sweep", "--out", str(sweep)], 0.4),
        "baselines": (
            [
                *("--backends", "xla", "torch", "torch_compile", "flashinfer", "vllm"),
                *("--out", str(out)),
            ],
            1.0,
        ),
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks record", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="FILE; FILE-sweep goes beside it")
    parser.add_argument("--budget-seconds", type=float, default=400.0, help="for all of it")
    parser.add_argument("--commit", help="what is measured, where there is no git to ask")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parsed = parser.parse_args(arguments)
    end = time.monotonic() + parsed.budget_seconds
    commit = ["--commit", parsed.commit] if parsed.commit else []
    results = {}
    for name, (command, share) in _parts(parsed.out).items():
        if name in parsed.parts:
            left = end - time.monotonic() - _GRACE_SECONDS
            results[name] = _run_part(name, [*command, *commit], left * share)
    for name, result in results.items():
        print(f"record: {name}: {result}")
    return 0 if set(results.values()) == {"done"} else 1


def _run_part(name: str, command: Sequence[str], seconds: float) -> str:
    """Runs a part; "done" or what became of it."""
    if seconds < _LEAST_SECONDS:
        return f"left out, {max(0, seconds):.0f} s left"
    print(f"record: {name}, at most {seconds:.0f} s", flush=True)
    budget = ["--budget-seconds", f"{seconds:.0f}"]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks", *command, *budget],
            timeout=seconds + _GRACE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"ended after {seconds + _GRACE_SECONDS:.0f} s"
    return "done" if done.returncode == 0 else f"exit status {done.returncode}"
