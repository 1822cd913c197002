"""How decode grows: the local stage over contexts, batches and world sizes, and the fitted model.

All points read their keys from one pool, so that a sweep needs no more memory than its largest
point does; points whose shard is larger than `MOST_KEY_BYTES` are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks import model, report, results
from benchmarks.cases import Decode
from benchmarks.run import Item, Machine, Options, Runner, beside

SUFFIX = "-sweep"  # of the file's name
MOST_KEY_BYTES = 1 << 30
WORLD_SIZES = (2, 4)
# On a GPU about a minute, mostly compiling; on a CPU few and small, to see that it runs.
CONTEXTS = {"gpu": tuple(1 << i for i in range(12, 21, 2)), "cpu": (1 << 12, 1 << 14, 1 << 16)}
BATCHES = {"gpu": (1, 4, 16, 64, 256), "cpu": (1, 4)}


def points(
    contexts: Iterable[int], batches: Iterable[int], world_sizes: Iterable[int]
) -> list[Decode]:
    """The points within the memory allowed, every request of a batch as long as the others."""
    contexts, batches = tuple(contexts), tuple(batches)
    made = [
        Decode(f"s-b{batch}-{_short(context)}-w{w}", (context,) * batch, w)
        for w in world_sizes
        for batch in batches
        for context in contexts
    ]
    return [case for case in made if case.key_bytes <= MOST_KEY_BYTES]


def _short(context: int) -> str:
    return f"{context >> 20}m" if context % (1 << 20) == 0 else f"{context >> 10}k"


def items(
    machine: Machine,
    contexts: Sequence[int] | None = None,
    batches: Sequence[int] | None = None,
    world_sizes: Sequence[int] | None = None,
    suffix: str = "",
) -> list[Item]:
    """The figures of a sweep, by default of the machine's usual one."""
    kind = "gpu" if machine.gpu else "cpu"
    cases = points(contexts or CONTEXTS[kind], batches or BATCHES[kind], world_sizes or WORLD_SIZES)
    cases.sort(key=lambda case: case.key_bytes)
    # A sweep that runs out of time still spans all sizes, only less densely.
    cases = [*cases[::4], *cases[2::4], *cases[1::2]]
    backend = "mosaic" if machine.mosaic else "xla"
    return [Item(case, "local", backend, "exact", _extra(case), suffix) for case in cases]


def _extra(case: Decode) -> dict[str, int]:
    return {
        "context": case.lens[0],
        "batch": len(case.lens),
        "world_size": case.world_size,
        "bytes": case.floor("local").bytes,
    }


def run(options: Options, machine: Machine, wanted: Sequence[Item]) -> int:
    """Measures a sweep and shows the curves and the model."""
    options = dataclasses.replace(
        options,
        backends=tuple({item.backend for item in wanted}),
        out=options.out or beside(machine.default_out, SUFFIX),
    )
    runner = Runner(options, machine, wanted)
    status = runner.run()
    if runner.rows:
        show(runner.out)
    return status


def show(path: Path) -> None:
    """Prints the curves of a sweep's file and the fitted model."""
    rows = [row for row in results.load(path) if "bytes" in row]
    for backend in dict.fromkeys(row["backend"] for row in rows):
        mine = [row for row in rows if row["backend"] == backend]
        for world_size in sorted({row["world_size"] for row in mine}):
            curves = [row for row in mine if row["world_size"] == world_size]
            report.show_curves(curves, f"{backend}, W {world_size}: us (x floor) by context")
    report.show_fits(model.fits(rows))
