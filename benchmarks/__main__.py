"""The command line: `python -m benchmarks`, and its commands; --help names them."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

# Leaves room for torch on the same GPU; must come before JAX starts.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

STAGES = {
    "score": "block scores of the rank's keys",
    "select": "candidate rows: the best 16 blocks of each token and head, from scores",
    "local": "score and select, from inputs to candidate rows",
    "fused-local": "the same without a plane of scores of the caller's (prefill)",
    "merge": "the ids chosen, from all ranks' candidate rows",
    "chain": "local with merge behind it, the other ranks' rows being there (decode)",
}
BACKENDS = (
    *("mosaic", "xla", "torch", "torch_compile", "flashinfer", "flashinfer-no-icp", "vllm"),
)
_STAGE_LINES = "\n".join(f"  {name:12} {what}" for name, what in STAGES.items())
_DESCRIPTION = f"""
Times one rank's share of every work point and compares it with its floor. Without a GPU: small
cases, to see that everything runs.

stages
{_STAGE_LINES}
backends
  mosaic       the package's kernels, on Hopper GPUs
  xla          its portable definition
  torch, torch_compile, flashinfer, flashinfer-no-icp (all keys, the rank's heads), vllm
               what the kernels are compared with, where installed

The floor is what no implementation goes below: bytes over the rate at which the card reads, or
operations over the rate at which it multiplies fp8, the larger, both measured in the same run. That
of local, fused-local and chain leaves out the bytes of the score plane. The target is the most that
a case should take, a multiple of its floor or of another row.
"""
_COMMANDS = """
Rows replace those of the result file that measure the same and leave the others. The exit status is
1 where something failed, 2 where nothing was measured. All mosaic rows take about two minutes on an
H200, XLA and torch.compile minutes more, the small cases a quarter of a minute on a CPU.

commands (python -m benchmarks COMMAND --help)
  sweep                   decode's time over contexts and batches, and its model
  record --out FILE       everything, part by part within one budget: what is committed
  compare BEFORE AFTER    what moved beyond the noise
  merge INTO FROM         replace the rows of INTO that FROM has
  plot FILE               PNG files beside it
  readme                  rewrite the tables of the documents from the committed results

programs of their own (--help)
  python -m benchmarks.host                                    the host's time of a torch decode
  torchrun --nproc-per-node 2 -m benchmarks.exchange --out F   the exchange between GPUs
"""
_MOST_KEYS = 1 << 20  # of a request: candidates are among the first 8,192 blocks


def main(arguments: Sequence[str]) -> int:
    if importlib.util.find_spec("jax") is None:
        return fail("this Python has no jax; `make bench` sets one up: .venv/bin/python")
    from benchmarks.results import Refused

    commands: dict[str, Callable[[Sequence[str]], int]] = {
        "sweep": _sweep,
        "record": _record,
        "compare": _compare,
        "merge": _merge,
        "plot": _plot,
        "readme": _readme,
    }
    try:
        if arguments and arguments[0] in commands:
            return commands[arguments[0]](arguments[1:])
        return _run(arguments)
    except Refused as error:
        return fail(str(error))


def fail(reason: str) -> int:
    print(f"benchmarks: {reason}", file=sys.stderr)
    return 2


def parser(command: str, description: str | None, epilog: str = "") -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks{command}",
        description=(description or "").strip(),
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_run_options(
    found: argparse.ArgumentParser, out: str, budget: float | None = None
) -> argparse.ArgumentParser:
    """Adds --out (required where `out` is empty), --budget-seconds and --commit."""
    ignored = (
        f"; by default benchmarks/results/local/{out}, which git ignores: the committed "
        "results change only where they are named"
    )
    found.add_argument(
        "--out",
        type=Path,
        required=not out,
        metavar="FILE",
        help="result file, made or merged into" + ignored * bool(out),
    )
    found.add_argument(
        "--budget-seconds",
        type=_seconds,
        default=budget,
        metavar="N",
        help="stop before it and keep what there is; "
        + (f"{budget:.0f} by default" if budget else "without end by default"),
    )
    found.add_argument(
        "--commit", metavar="ID", help="what is measured, where there is no git to ask"
    )
    return found


def _run(arguments: Sequence[str]) -> int:
    found = parser("", _DESCRIPTION, _COMMANDS)
    found.add_argument("--quick", action="store_true", help="small cases: does it all run?")
    found.add_argument("--sweep", action="store_true", help="the sweep too, into FILE-sweep")
    found.add_argument(
        "--cases",
        default="*",
        metavar="GLOB",
        help="names of cases, all by default: 'd-*' for decode, 'p-*' for prefill, 'select-*' and "
        "'merge-*' for these alone; the small cases of decode and prefill are 'quick-*'",
    )
    for name, choices in (("stages", tuple(STAGES)), ("backends", BACKENDS)):
        found.add_argument(
            f"--{name}",
            nargs="+",
            default=[],
            choices=choices,
            metavar=name[:-1].upper(),
            help="by default all that there are here; xla on a GPU: local alone",
        )
    parsed = add_run_options(found, "<device>.json").parse_args(arguments)
    from benchmarks import results, run

    machine = run.Machine()
    chosen = (parsed.cases, parsed.stages, parsed.backends)
    wanted = run.items(machine, *chosen, quick=parsed.quick)
    if parsed.sweep:
        wanted += run.sweep(machine, suffix=results.SWEEP_SUFFIX)
    out = parsed.out or machine.default_out
    runner = run.Runner(machine, wanted, out, parsed.budget_seconds, parsed.commit)
    return runner.run(parsed.backends)


def _sweep(arguments: Sequence[str]) -> int:
    found = parser(
        " sweep",
        "Times decode's score and select over contexts, batches and world sizes, every request as\n"
        "long as the others, and fits time = fixed + bytes / rate. Points whose shard is larger\n"
        "than 1 GiB are left out.",
    )
    found.add_argument(
        "--contexts",
        nargs="+",
        type=size,
        metavar="KEYS",
        help="keys of a request, 5000, 4K or 1M say; by default 4K 16K 64K 256K 1M, on a CPU "
        "4K 16K 64K",
    )
    found.add_argument(
        "--batches",
        nargs="+",
        type=_count,
        metavar="B",
        help="requests; by default 1 4 16 64 256, on a CPU 1 4",
    )
    found.add_argument("--world-sizes", nargs="+", type=int, choices=(2, 4), help="2 4 by default")
    parsed = add_run_options(found, "<device>-sweep.json").parse_args(arguments)
    from benchmarks import results, run

    machine = run.Machine()
    wanted = run.sweep(machine, parsed.contexts, parsed.batches, parsed.world_sizes)
    out = parsed.out or results.beside(machine.default_out, results.SWEEP_SUFFIX)
    runner = run.Runner(machine, wanted, out, parsed.budget_seconds, parsed.commit)
    status = runner.run(asked=["mosaic"])
    fits = results.fits(results.load(out).rows.values())
    for fit in fits:
        print(
            f"{fit.group}, {fit.points} points: {fit.fixed_us:.2f} us + bytes / "
            f"{fit.rate_tbps:.4g} TB/s; farthest off, it is {fit.misfit}"
        )
    if not fits:
        print(f"no model fitted: it takes {results.LEAST_POINTS} points or more, of two sizes")
    return status


def _record(arguments: Sequence[str]) -> int:
    from benchmarks import record

    found = parser(" record", record.__doc__)
    found.add_argument(
        "--parts",
        nargs="+",
        default=[],
        choices=record.PARTS,
        metavar="PART",
        help="all by default",
    )
    parsed = add_run_options(found, "", budget=400.0).parse_args(arguments)
    return record.record(parsed.out, parsed.budget_seconds, parsed.commit, parsed.parts)


def _compare(arguments: Sequence[str]) -> int:
    """Prints what moved; 1 when something became slower."""
    from benchmarks import report, results

    found = parser(
        " compare",
        "Shows the figures of two result files whose spreads do not touch and that differ by more\n"
        f"than {results.NOISE:.0%}, as runs and cards do. Figures of another device, or timed\n"
        "otherwise, are not compared. The exit status is 1 where something is slower, 2 where\n"
        "there is nothing to compare.",
    )
    found.add_argument("before", type=Path, metavar="BEFORE", help="result file of the earlier run")
    found.add_argument("after", type=Path, metavar="AFTER", help="result file of the later run")
    parsed = found.parse_args(arguments)
    before, after = results.load(parsed.before), results.load(parsed.after)
    for path, file in ((parsed.before, before), (parsed.after, after)):
        print(f"{path}: {report.origin(file.rows)}")
    by_verdict = results.compare(before, after)
    for verdict in ("slower", "faster"):
        for old, new in by_verdict[verdict]:
            ratio = new["median_us"] / old["median_us"]
            us = f"{old['median_us']:.2f} -> {new['median_us']:.2f} us"
            print(f"{verdict}: {results.label(new)}: {us}, {ratio:.3f}")
    compared = {name: len(by_verdict.pop(name)) for name in ("slower", "faster", "same")}
    print(", ".join(f"{count} {name}" for name, count in compared.items()))
    for reason, pairs in by_verdict.items():
        print(f"not compared: {len(pairs)} figures, {reason}")
    for path, one, other in ((parsed.before, before, after), (parsed.after, after, before)):
        alone = [results.label(row) for key, row in one.rows.items() if key not in other.rows]
        if alone:
            print(f"only in {path}: {len(alone)} figures: {'; '.join(alone[:3])}")
    if not sum(compared.values()):
        return fail("nothing to compare")
    return 1 if compared["slower"] else 0


def _merge(arguments: Sequence[str]) -> int:
    """Merges a run taken elsewhere into a file."""
    found = parser(
        " merge",
        "Changes INTO: rows of FROM replace those that measure the same, or are added. FROM stays\n"
        "as it is.",
    )
    found.add_argument("into", type=Path, metavar="INTO", help="result file, made if not there")
    found.add_argument("source", type=Path, metavar="FROM", help="result file of another run")
    parsed = found.parse_args(arguments)
    from benchmarks import results

    source = results.load(parsed.source)
    results.prepare(parsed.into)
    results.save(parsed.into, source.rows.values(), source.absent)
    print(f"{len(source.rows)} rows of {parsed.source} merged into {parsed.into}")
    return 0


def _plot(arguments: Sequence[str]) -> int:
    found = parser(
        " plot",
        "Writes PNG files beside NAME.json, those that its rows allow:\n\n"
        "  NAME-ratio.png   times of score and select over the floor, with the targets\n"
        "  NAME.png         a sweep, with its floor and its model",
    )
    found.add_argument("file", type=Path, metavar="NAME.json", help="result file, of a sweep too")
    parsed = found.parse_args(arguments)
    if importlib.util.find_spec("matplotlib") is None:
        return fail("this Python has no matplotlib; `make bench` installs it: .venv/bin/python")
    from benchmarks.plot import plot

    for path in plot(parsed.file):
        print(path)
    return 0


def _readme(arguments: Sequence[str]) -> int:
    from benchmarks import report

    places = {str(path.relative_to(report.ROOT)) for path, _ in report.PARTS}
    parser(
        " readme",
        "Writes the parts of the documents that come from benchmarks/results/h200*.json anew.\n"
        f"Documents: {', '.join(sorted(places))}.",
    ).parse_args(arguments)
    changed = report.rewrite()
    print("\n".join(f"rewritten: {path}" for path in changed) or "up to date")
    return 0


# ---- arguments ----


def _seconds(text: str) -> float:
    """More than none."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not more than 0 seconds")
    return value


def size(text: str) -> int:
    """4096, 4K or 1M keys of a request."""
    unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:].upper(), 1)
    digits = text if unit == 1 else text[:-1]
    if not digits.isdecimal() or not 0 < int(digits) * unit <= _MOST_KEYS:
        raise argparse.ArgumentTypeError(f"{text!r} is no size from 1 to 1M, like 5000, 4K or 1M")
    return int(digits) * unit


def _count(text: str) -> int:
    """One or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
