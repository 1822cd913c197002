"""The command line: `python -m benchmarks`, and its commands; --help names them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import record, results

_COMMANDS = """
commands (python -m benchmarks COMMAND --help):
  sweep                   decode's time over contexts and batches, and its model
  record --out FILE       everything, part by part within one budget: what is committed
  compare BEFORE AFTER    what moved beyond the spread
  merge INTO FROM         replace the rows that FROM has
  plot FILE               PNG files beside it
  readme                  rewrite the tables of the documents from the committed results
"""
_STAGES = ("score", "select", "local", "fused-local", "merge", "chain")


def main(arguments: Sequence[str]) -> int:
    commands = {
        "sweep": _sweep,
        "record": record.main,
        "compare": _compare,
        "merge": _merge,
        "plot": _plot,
        "readme": _readme,
    }
    if arguments and arguments[0] in commands:
        return commands[arguments[0]](arguments[1:])
    return _run(arguments)


def _run(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Times the work points and saves them. Without a GPU: the small ones.",
        epilog=_COMMANDS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="small cases: does it all run?")
    parser.add_argument("--sweep", action="store_true", help="the sweep too, into FILE-sweep")
    parser.add_argument("--cases", default="*", metavar="GLOB", help="case names, d-*w4 say")
    parser.add_argument("--stages", nargs="+", default=[], choices=_STAGES)
    parser.add_argument("--backends", nargs="+", default=[], metavar="NAME")
    parser.add_argument(
        "--timing",
        default="auto",
        choices=("auto", "graph", "jit"),
        help="kernels in a CUDA graph (auto where torch sees a GPU), or one jitted program",
    )
    _add_run_options(parser)
    parsed = parser.parse_args(arguments)

    _share_memory()
    from benchmarks import sweep
    from benchmarks.run import Machine, Options, Runner, beside, items

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
    machine = Machine()
    wanted = items(options, machine)
    if parsed.sweep:
        wanted += sweep.items(machine, suffix=sweep.SUFFIX)
    runner = Runner(options, machine, wanted)
    status = runner.run()
    runner.show()
    if parsed.sweep and (path := beside(runner.out, sweep.SUFFIX)).exists():
        sweep.show(path)
    return status


def _sweep(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks sweep")
    parser.add_argument("--contexts", nargs="+", type=_size, help="4K 1M, say; 4K to 1M by default")
    parser.add_argument("--batches", nargs="+", type=int, help="1 to 256 by default")
    parser.add_argument("--world-sizes", nargs="+", type=int, choices=(2, 4))
    _add_run_options(parser)
    parsed = parser.parse_args(arguments)

    _share_memory()
    from benchmarks import sweep
    from benchmarks.run import Machine, Options

    options = Options(out=parsed.out, budget_seconds=parsed.budget_seconds, commit=parsed.commit)
    machine = Machine()
    wanted = sweep.items(machine, parsed.contexts, parsed.batches, parsed.world_sizes)
    return sweep.run(options, machine, wanted)


def _size(text: str) -> int:
    unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:].upper(), 1)
    return int(text if unit == 1 else text[:-1]) * unit


def _add_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="result file, results/<device>.json by default")
    parser.add_argument("--budget-seconds", type=float, help="stop before it, keep what there is")
    parser.add_argument("--commit", help="what is measured, where there is no git to ask")


def _share_memory() -> None:
    """Leaves room for torch on the same GPU; must come before JAX starts."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


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
    results.save(parsed.into, results.load(parsed.source), results.absent(parsed.source))
    return 0


def _plot(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks plot")
    parser.add_argument("file", type=Path)
    parsed = parser.parse_args(arguments)
    from benchmarks.plot import plot

    for path in plot(parsed.file):
        print(path)
    return 0


def _readme(arguments: Sequence[str]) -> int:
    argparse.ArgumentParser(prog="python -m benchmarks readme").parse_args(arguments)
    from benchmarks import documents

    for path in documents.rewrite():
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
