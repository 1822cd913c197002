"""Takes all figures within one budget.

Each part is a process of its own, with its share of what is left of the budget. One that fails,
hangs or runs out of time costs no figure of the others, and each saves its figures as they come:
the exchange into FILE-x2 or FILE-x4, the sweep into FILE-sweep.

Rows replace those of FILE that measure the same and leave the others. The exit status is 1 where a
part failed or had no time, 2 where nothing was measured.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import results

_LEAST_SECONDS = 8  # worth starting a part with
_GRACE_SECONDS = 15  # past its budget, after which a part is ended: its start takes some
_RUN = "-m benchmarks --backends"
_KERNELS = f"{_RUN} mosaic --stages score select local fused-local merge chain"
# The most wanted first: its command, and how much of what is left of the budget it may take.
PARTS = {
    "kernels": (_KERNELS, 0.4),
    "flashinfer": (f"{_RUN} flashinfer flashinfer-no-icp", 0.4),
    "jax-chain": (f"{_RUN} mosaic --stages jax-chain", 0.35),
    "host": ("-m benchmarks.host", 0.35),
    "exchange": ("-m torch.distributed.run --nproc-per-node gpu -m benchmarks.exchange", 0.5),
    "baselines": (f"{_RUN} torch xla torch_compile", 0.85),
    "vllm": (f"{_RUN} vllm", 0.6),
    "sweep": ("-m benchmarks sweep", 1.0),
}


def record(out: Path, budget: float, commit: str | None, wanted: Sequence[str] = ()) -> int:
    """Runs the wanted parts, or all; the exit status."""
    end, gpus = time.monotonic() + budget - _GRACE_SECONDS, count_gpus()
    suffixes = {"sweep": "-sweep", "exchange": f"-x{gpus}"}
    names = [x for x in PARTS if x in (wanted or PARTS) and (x != "exchange" or gpus in (2, 4))]
    files = {name: results.beside(out, suffixes.get(name, "")) for name in names}
    for path in files.values():
        results.prepare(path)
    measured, bad = 0, False
    for name, path in files.items():
        command, part_of_rest = PARTS[name]
        seconds = (end - time.monotonic()) * part_of_rest
        if seconds < _LEAST_SECONDS:
            print(f"record: {name}: left out, {max(0, seconds):.0f} s left for it")
            bad = True
            continue
        print(f"record: {name}, at most {seconds:.0f} s", flush=True)
        options = ["--out", str(path), "--budget-seconds", f"{seconds:.0f}"]
        options += ["--commit", commit] if commit else []
        before = results.load_or_empty(path)
        call = [sys.executable, *command.split(), *options]
        status = execute(call, seconds + _GRACE_SECONDS)
        rows = sum(before.get(key) != row for key, row in results.load_or_empty(path).items())
        ended = "ended, out of time" if status is None else f"exit status {status}"
        print(f"record: {name}: {rows} rows, {ended}", flush=True)
        measured += rows
        bad |= status != 0
    if not measured:
        print("record: nothing was measured")
        return 2
    return 1 if bad else 0


def count_gpus() -> int:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(["nvidia-smi", "-L"], text=True, timeout=20).count("GPU ")
    return 0


def execute(command: Sequence[str], seconds: float) -> int | None:
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
