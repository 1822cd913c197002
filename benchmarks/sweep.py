"""How decode grows: the local stage over contexts, batches and world sizes, and the fitted model.

All points read their keys from one pool, so that a sweep needs no more memory than its largest
point does; points whose shard is larger than `MOST_KEY_BYTES` are left out, which is said.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks import model, report, results
from benchmarks.cases import Decode
from benchmarks.run import Item, Machine, NothingToRun, Options, Runner

MOST_KEY_BYTES = 1 << 30
WORLD_SIZES = (2, 4)
# On a GPU about a minute, mostly compiling; on a CPU few and small, to see that it runs.
CONTEXTS = {"gpu": tuple(1 << i for i in range(12, 21, 2)), "cpu": (1 << 12, 1 << 14, 1 << 16)}
BATCHES = {"gpu": (1, 4, 16, 64, 256), "cpu": (1, 4)}


def points(
    contexts: Iterable[int], batches: Iterable[int], world_sizes: Iterable[int]
) -> list[Decode]:
    """All points, every request of a batch as long as the others."""
    contexts, batches = tuple(contexts), tuple(batches)
    return [
        Decode(f"s-b{batch}-{report.short(context).lower()}-w{w}", (context,) * batch, w)
        for w in world_sizes
        for batch in batches
        for context in contexts
    ]


def items(
    machine: Machine,
    contexts: Sequence[int] | None = None,
    batches: Sequence[int] | None = None,
    world_sizes: Sequence[int] | None = None,
    suffix: str = "",
) -> list[Item]:
    """The figures of a sweep, by default of the machine's usual one; says what it leaves out.

    Raises:
      NothingToRun: every point is too large.
    """
    kind = "gpu" if machine.gpu else "cpu"
    asked = points(contexts or CONTEXTS[kind], batches or BATCHES[kind], world_sizes or WORLD_SIZES)
    cases = [case for case in asked if case.key_bytes <= MOST_KEY_BYTES]
    large = f"a shard larger than {MOST_KEY_BYTES >> 30} GiB"
    if not cases:
        raise NothingToRun(f"all {len(asked)} points of the sweep have {large}")
    if len(cases) < len(asked):
        print(f"sweep: {len(asked) - len(cases)} of {len(asked)} points left out: {large}")
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
        out=options.out or results.beside(machine.default_out, results.SWEEP_SUFFIX),
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
            unit = "us (x floor)" if report.has_floor(curves[0]) else "us"
            report.show_curves(curves, f"{backend}, W {world_size}: {unit} by context")
    report.show_fits(model.fits(rows))
