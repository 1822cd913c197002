"""Lowers and compiles the kernels of a run before it times any, on all cores.

Lowering is Python's work, so it is done in processes of their own, which see no GPU; compiling is
done in threads. A run does without what fails here: it then lowers and compiles as it comes to it.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from benchmarks.cases import Case, Prefill
from benchmarks.graph import Lowered, Unlaunchable, lower
from benchmarks.inputs import abstract_inputs
from benchmarks.stages import Part, build, written_like
from msa_icp_jax.ops._mosaic import direct
from msa_icp_jax.ops._mosaic.launch import Target, building_for

LEAST_TASKS = 4  # fewer are done sooner as the run comes to them
_SECONDS = 40  # for a process; a machine with many cores needs a quarter of it
_ROOT = Path(__file__).parents[1]

Task = tuple[Case, str, tuple[str, ...]]  # case, precision, stages
Signature = tuple[Any, ...]
Parts = dict[str, tuple[Signature, Lowered]]


class Ahead:
    """What has been lowered, by case, precision and part."""

    def __init__(self, parts: dict[tuple[str, str], Parts]) -> None:
        self._parts = parts

    def lowered(
        self, case: Case, precision: str, parts: Iterable[Part], structs: dict[str, Any]
    ) -> dict[str, Lowered]:
        """Those of the parts that were lowered for arguments just like `structs`."""
        known = self._parts.get((case.name, precision), {})
        found = {}
        for part in parts:
            signature, lowered = known.get(part.name, (None, None))
            if lowered is not None and signature == _signature(part, structs):
                found[part.name] = lowered
        return found


def prepare(tasks: Sequence[Task], key_rows: int, sms: int) -> Ahead:
    """Lowers all stages of the tasks, and compiles their kernels for the current GPU.

    Args:
      tasks: what will be timed.
      key_rows: rows of the pool of keys.
      sms: streaming multiprocessors of the GPU.
    """
    workers = max(1, min((os.cpu_count() or 1) - 2, len(tasks)))
    heavy_first = sorted(tasks, key=lambda task: isinstance(task[0], Prefill), reverse=True)
    shares = [heavy_first[i::workers] for i in range(workers)]
    found: dict[tuple[str, str], Parts] = {}
    with ThreadPoolExecutor(workers) as threads:
        for parts in threads.map(lambda share: _one_share(share, key_rows, sms), shares):
            found.update(parts)
    return Ahead(found)


def _one_share(tasks: Sequence[Task], key_rows: int, sms: int) -> dict[tuple[str, str], Parts]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.ahead"],
        input=pickle.dumps((tasks, key_rows, sms)),
        stdout=subprocess.PIPE,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        cwd=_ROOT,
        timeout=_SECONDS,
        check=True,
    )
    found = pickle.loads(done.stdout)
    _compile(lowered for parts in found.values() for _, lowered in parts.values())
    return found


def _compile(programs: Iterable[Lowered]) -> None:
    """Compiles what is not yet compiled; `direct.compile_kernel` then finds it.

    That function compiles one kernel at a time.
    """
    if direct.unavailable() is not None:
        return
    import torch

    torch.cuda.current_stream().synchronize()  # makes the context current in this thread
    library = direct._plugin()
    for program in programs:
        for step in program.steps:
            if isinstance(step, direct.Kernel) and step.module not in direct._compiled:
                handle = library.MosaicGpuCompile(step.module, len(step.module))
                if handle:
                    kernel = direct._LAUNCHER(handle[1]), handle[0]
                    direct._compiled.setdefault(step.module, kernel)


def _signature(part: Part, structs: dict[str, Any]) -> Signature:
    leaves, tree = jax.tree.flatten([structs[name] for name in part.reads])
    return str(tree), tuple((tuple(x.shape), str(x.dtype)) for x in leaves)


# ---- in a process without a GPU ----


def lower_tasks(tasks: Sequence[Task], key_rows: int, sms: int) -> dict[tuple[str, str], Parts]:
    """Lowers every part of the tasks' stages; one that is not of kernels alone is left out."""
    found: dict[tuple[str, str], Parts] = {}
    with building_for(Target(sms)):
        for case, precision, stages in tasks:
            structs = written_like(case) | abstract_inputs(case, key_rows)
            parts = found.setdefault((case.name, precision), {})
            for part in _distinct(case, precision, stages):
                arguments = [structs[name] for name in part.reads]
                try:
                    lowered = lower(part.run, *arguments)
                except Unlaunchable:
                    continue
                parts[part.name] = _signature(part, structs), lowered
    return found


def _distinct(case: Case, precision: str, stages: Iterable[str]) -> list[Part]:
    made = [build(case, stage, "mosaic", precision, arrange=False) for stage in stages]
    parts = [part for stage in made for part in (*stage.prelude, *stage.parts)]
    return list({part.name: part for part in parts}.values())


def _main() -> None:
    out = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever prints must not end in the answer
    answer = pickle.dumps(lower_tasks(*pickle.load(sys.stdin.buffer)))
    with os.fdopen(out, "wb") as file:
        file.write(answer)


if __name__ == "__main__":
    _main()
