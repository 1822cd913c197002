"""The command line: `python -m benchmarks`, and its commands; --help names them."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import options

_DESCRIPTION = """
Times one rank's share of every work point and compares it with its floor. Without a GPU: small
cases, to see that everything runs.

stages
  score        block scores of the rank's keys
  select       candidate rows: the best 16 blocks of each token and head, from scores
  local        score and select, from inputs to candidate rows
  fused-local  the same in one pass, without a plane of scores (prefill)
  merge        the ids chosen, from all ranks' candidate rows
  chain        local with merge behind it, the other ranks' rows being there (decode)
backends
  mosaic       the package's kernels, on Hopper GPUs
  xla          its portable definition
  torch, torch_compile, flashinfer, vllm   what the kernels are compared with, where installed

The floor is what no implementation goes below: bytes over the rate at which the card reads, or
operations over the rate at which it multiplies fp8, the larger, both measured in the same run. That
of local, fused-local and chain leaves out the bytes of the score plane. The target is the most that
a case should take, a multiple of its floor set before the work began.
"""
_COMMANDS = """
Rows replace those of the result file that measure the same and leave the others. The exit status is
1 where something failed, 2 where nothing was measured. All mosaic rows take about two minutes on an
H200, XLA and torch.compile minutes more, the small cases a quarter of a minute on a CPU.

commands (python -m benchmarks COMMAND --help)
  sweep                   decode's time over contexts and batches, and its model
  record --out FILE       everything, part by part within one budget: what is committed
  compare BEFORE AFTER    what moved beyond the spread
  merge INTO FROM         replace the rows of INTO that FROM has
  plot FILE               PNG files beside it
  readme                  rewrite the tables of the documents from the committed results

programs of their own (--help)
  python -m benchmarks.host                                    the host's time of a torch decode
  torchrun --nproc-per-node 2 -m benchmarks.exchange --out F   the exchange between GPUs
"""
_STAGES = ("score", "select", "local", "fused-local", "merge", "chain")


def main(arguments: Sequence[str]) -> int:
    if importlib.util.find_spec("jax") is None:
        return _fail("this Python has no jax; `make bench` sets one up: .venv/bin/python")
    from benchmarks import record

    commands = {
        "sweep": _sweep,
        "record": record.main,
        "compare": _compare,
        "merge": _merge,
        "plot": _plot,
        "readme": _readme,
    }
    try:
        if arguments and arguments[0] in commands:
            return commands[arguments[0]](arguments[1:])
        return _run(arguments)
    except options.Refused as error:
        return _fail(str(error))


def _fail(reason: str) -> int:
    print(f"benchmarks: {reason}", file=sys.stderr)
    return 2


def _parser(command: str, description: str, epilog: str = "") -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks {command}".rstrip(),
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _run(arguments: Sequence[str]) -> int:
    parser = _parser("", _DESCRIPTION.strip(), _COMMANDS)
    parser.add_argument("--quick", action="store_true", help="small cases: does it all run?")
    parser.add_argument("--sweep", action="store_true", help="the sweep too, into FILE-sweep")
    parser.add_argument(
        "--cases",
        default="*",
        metavar="GLOB",
        help="names of cases, all by default: 'd-*' for decode, 'p-*' for prefill, 'select-*' and "
        "'merge-*' for these alone; the small cases of decode and prefill are 'quick-*'",
    )
    parser.add_argument(
        "--stages", nargs="+", default=[], choices=_STAGES, metavar="STAGE", help="all by default"
    )
    parser.add_argument(
        "--backends",
        nargs="+",
        default=[],
        choices=options.BACKENDS,
        metavar="BACKEND",
        help="by default those that run here; xla on a GPU: score and select alone",
    )
    parser.add_argument(
        "--timing",
        default="auto",
        choices=("auto", "graph", "jit"),
        help="how kernels are timed: in a CUDA graph, which takes torch, or in one jitted program "
        "of many repeats; auto is the graph where there can be one",
    )
    options.add_out(parser, "<device>.json")
    options.add_budget(parser)
    options.add_commit(parser)
    parsed = parser.parse_args(arguments)

    _share_memory()
    from benchmarks import results, sweep
    from benchmarks.run import Machine, Options, Runner, items

    wanted_options = Options(
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
    wanted = items(wanted_options, machine)
    if parsed.sweep:
        wanted += sweep.items(machine, suffix=results.SWEEP_SUFFIX)
    runner = Runner(wanted_options, machine, wanted)
    status = runner.run()
    runner.show()
    if parsed.sweep and (path := results.beside(runner.out, results.SWEEP_SUFFIX)).exists():
        sweep.show(path)
    return status


def _sweep(arguments: Sequence[str]) -> int:
    parser = _parser(
        "sweep",
        "Times decode's score and select over contexts, batches and world sizes, every request as\n"
        "long as the others, and fits time = fixed + bytes / rate. Points whose shard is larger\n"
        "than 1 GiB are left out.",
    )
    parser.add_argument(
        "--contexts",
        nargs="+",
        type=options.size,
        metavar="KEYS",
        help="keys of a request, 5000, 4K or 1M say; by default 4K 16K 64K 256K 1M, on a CPU "
        "4K 16K 64K",
    )
    parser.add_argument(
        "--batches",
        nargs="+",
        type=options.count,
        metavar="B",
        help="requests; by default 1 4 16 64 256, on a CPU 1 4",
    )
    parser.add_argument("--world-sizes", nargs="+", type=int, choices=(2, 4), help="2 4 by default")
    options.add_out(parser, "<device>-sweep.json")
    options.add_budget(parser)
    options.add_commit(parser)
    parsed = parser.parse_args(arguments)

    _share_memory()
    from benchmarks import sweep
    from benchmarks.run import Machine, Options

    asked = Options(out=parsed.out, budget_seconds=parsed.budget_seconds, commit=parsed.commit)
    machine = Machine()
    wanted = sweep.items(machine, parsed.contexts, parsed.batches, parsed.world_sizes)
    return sweep.run(asked, machine, wanted)


def _share_memory() -> None:
    """Leaves room for torch on the same GPU; must come before JAX starts."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def _compare(arguments: Sequence[str]) -> int:
    """Prints what moved; 1 when something became slower."""
    parser = _parser(
        "compare",
        "Shows the figures of two result files whose spreads do not touch. Figures of another\n"
        "device, or timed in another way, are not compared. The exit status is 1 where something\n"
        "is slower, 2 where there is nothing to compare.",
    )
    parser.add_argument(
        "before", type=Path, metavar="BEFORE", help="result file of the earlier run"
    )
    parser.add_argument("after", type=Path, metavar="AFTER", help="result file of the later run")
    parsed = parser.parse_args(arguments)
    from benchmarks import report, results

    before, after = results.load(parsed.before), results.load(parsed.after)
    moves = results.compare(before, after)
    if moves:
        report.show_moves([move for move in moves if move.verdict != "same"])
        print(f"{len(moves)} figures compared")
    for reason, count in results.incomparable(before, after).items():
        print(f"not compared: {count} figures, {reason}")
    report.show_keys(f"only in {parsed.before}", results.only_in(before, after))
    report.show_keys(f"only in {parsed.after}", results.only_in(after, before))
    if not moves:
        return _fail("nothing to compare")
    return 1 if any(move.verdict == "slower" for move in moves) else 0


def _merge(arguments: Sequence[str]) -> int:
    """Merges a run taken elsewhere into a file."""
    parser = _parser(
        "merge",
        "Changes INTO: rows of FROM replace those that measure the same, or are added. FROM stays\n"
        "as it is.",
    )
    parser.add_argument("into", type=Path, metavar="INTO", help="result file, made if not there")
    parser.add_argument("source", type=Path, metavar="FROM", help="result file of another run")
    parsed = parser.parse_args(arguments)
    from benchmarks import results

    rows = results.load(parsed.source)
    results.prepare(parsed.into)
    results.save(parsed.into, rows, results.absent(parsed.source))
    print(f"{len(rows)} rows of {parsed.source} merged into {parsed.into}")
    return 0


def _plot(arguments: Sequence[str]) -> int:
    parser = _parser(
        "plot",
        "Writes PNG files beside NAME.json, those that its rows allow:\n\n"
        "  NAME-time.png        times of score and select against the work, with the floor\n"
        "  NAME-ratio.png       times over the floor, with the targets\n"
        "  NAME-baselines.png   times of others over those of the kernels\n"
        "  NAME.png             a sweep, with its floor and its model",
    )
    parser.add_argument("file", type=Path, metavar="NAME.json", help="result file, of a sweep too")
    parsed = parser.parse_args(arguments)
    if importlib.util.find_spec("matplotlib") is None:
        return _fail("this Python has no matplotlib; `make bench` installs it: .venv/bin/python")
    from benchmarks.plot import plot

    for path in plot(parsed.file):
        print(path)
    return 0


def _readme(arguments: Sequence[str]) -> int:
    from benchmarks import documents

    places = {str(path.relative_to(documents.ROOT)) for path, _ in documents.PARTS}
    parser = _parser(
        "readme",
        "Writes the parts of the documents that come from benchmarks/results/h200*.json anew.\n"
        f"Documents: {', '.join(sorted(places))}.",
    )
    parser.parse_args(arguments)
    changed = documents.rewrite()
    for path in changed:
        print(f"rewritten: {path}")
    if not changed:
        print("up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
