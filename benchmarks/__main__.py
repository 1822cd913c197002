"""The command line: `python -m benchmarks`, and its commands compare, merge and plot."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import results

_STAGES = ("score", "select", "local", "fused-local", "merge", "chain")


def main(arguments: Sequence[str]) -> int:
    commands = {"compare": _compare, "merge": _merge, "plot": _plot}
    if arguments and arguments[0] in commands:
        return commands[arguments[0]](arguments[1:])
    return _run(arguments)


def _run(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Times the work points and saves them. Without a GPU: the small ones.",
        epilog="Also: compare BEFORE.json AFTER.json (what moved beyond the spread); merge "
        "INTO.json FROM.json (replace the rows that FROM has); plot FILE.json (PNG files beside "
        "it).",
    )
    parser.add_argument("--quick", action="store_true", help="small cases: does it all run?")
    parser.add_argument("--cases", default="*", metavar="GLOB", help="case names, d-*w4 say")
    parser.add_argument("--stages", nargs="+", default=[], choices=_STAGES)
    parser.add_argument("--backends", nargs="+", default=[], metavar="NAME")
    parser.add_argument(
        "--timing",
        default="auto",
        choices=("auto", "graph", "jit"),
        help="kernels in a CUDA graph (auto where torch sees a GPU), or one jitted program",
    )
    parser.add_argument("--out", type=Path, help="result file, results/<device>.json by default")
    parser.add_argument("--budget-seconds", type=float, help="stop before it, keep what there is")
    parser.add_argument("--commit", help="what is measured, where there is no git to ask")
    parsed = parser.parse_args(arguments)

    # Torch needs memory on the same GPU; must be set before JAX starts.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from benchmarks.run import Machine, Options, Runner

    options = Options(
        quick=parsed.quick,
        cases=parsed.cases,
        stages=tuple(parsed.stages),
        backends=tuple(parsed.backends),
        timing=parsed.timing,
        out=parsed.out,
        budget_seconds=parsed.budget_seconds,
        commit=parsed.commit,
    )
    return Runner(options, Machine()).run()


def _compare(arguments: Sequence[str]) -> int:
    """Prints what moved; 1 when something became slower."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks compare")
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parsed = parser.parse_args(arguments)
    from benchmarks import report

    before, after = results.load(parsed.before), results.load(parsed.after)
    moves = results.compare(before, after)
    report.show_moves([move for move in moves if move.verdict != "same"])
    print(f"{len(moves)} figures in both")
    common = {move.key for move in moves}
    for path, rows in ((parsed.before, before), (parsed.after, after)):
        only = [key for row in rows if (key := results.key_of(row)) not in common]
        report.show_keys(f"only in {path.name}", only)
    return 1 if any(move.verdict == "slower" for move in moves) else 0


def _merge(arguments: Sequence[str]) -> int:
    """Merges a run taken elsewhere into a file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks merge")
    parser.add_argument("into", type=Path)
    parser.add_argument("source", type=Path)
    parsed = parser.parse_args(arguments)
    results.save(parsed.into, results.load(parsed.source))
    return 0


def _plot(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks plot")
    parser.add_argument("file", type=Path)
    parsed = parser.parse_args(arguments)
    from benchmarks.plot import plot

    for path in plot(parsed.file):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
