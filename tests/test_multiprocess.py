"""Real jax.distributed runs: one process for each rank, the exchange between processes (gloo)."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from inputs import COMPILE_FAST, TIME_LIMIT
from multiprocess_worker import DIED

WORKER = Path(__file__).with_name("multiprocess_worker.py")


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    """A port that nobody else is given while the context lasts; a gRPC server may listen on it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("", 0))
        yield holder.getsockname()[1]


def run_ranks(
    world_size: int, tmp_path: Path, *fate: str, patience: float = 2
) -> list[tuple[int, str]]:
    """(exit code, output) of every rank's process; whatever is left at the limit is ended.

    After one failed, the others get `patience` seconds to say what they saw and end.
    """
    with free_port() as port:
        return run_processes(f"127.0.0.1:{port}", world_size, tmp_path, *fate, patience=patience)


def run_processes(
    coordinator: str, world_size: int, tmp_path: Path, *fate: str, patience: float
) -> list[tuple[int, str]]:
    """`run_ranks`, who meet at the address `coordinator`."""
    # One device a process: this run's four virtual ones are not inherited.
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": COMPILE_FAST,
        "PYTHONPATH": os.pathsep.join([str(WORKER.parents[1]), str(WORKER.parent)]),
    }
    logs = [tmp_path / f"rank{rank}.log" for rank in range(world_size)]
    processes = []
    for rank, log in enumerate(logs):
        command = [sys.executable, "-Werror", str(WORKER), coordinator, str(world_size), str(rank)]
        command += fate
        with log.open("w") as output:
            processes.append(
                subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
            )
    deadline = time.monotonic() + TIME_LIMIT
    try:
        # One rank that fails would leave the others waiting for it, so it ends the run.
        failed = False
        while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
            if not failed and any(p.poll() not in (None, 0) for p in processes):
                failed = True
                deadline = min(deadline, time.monotonic() + patience)
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(p.returncode, log.read_text()) for p, log in zip(processes, logs, strict=True)]


def test_processes_agree_with_the_oracle(tmp_path: Path) -> None:
    """Also where one of them comes seconds late to every decode step."""
    world_size = 4
    results = run_ranks(world_size, tmp_path, "late")
    report = "\n".join(
        f"---- rank {rank}: exit code {code}\n{text[-4000:]}"
        for rank, (code, text) in enumerate(results)
    )
    assert [code for code, _ in results] == [0] * world_size, report
    for rank, (_, text) in enumerate(results):
        assert f"rank {rank} of {world_size}: right" in text, report


def test_a_rank_that_dies_ends_the_others(tmp_path: Path) -> None:
    """They neither wait for ever nor answer: the step that the dead rank missed raises."""
    results = run_ranks(2, tmp_path, "dies", patience=TIME_LIMIT)
    (survivor, said), (dead, _) = results
    assert dead == DIED, results
    assert "step 0 right" in said, said
    assert "step 1 right" not in said, said
    assert survivor > 0 or survivor == -signal.SIGABRT, said  # by itself, not ended from here
