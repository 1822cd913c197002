"""The command line: `python -m benchmarks`, and its commands; --help names them."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# Leaves room for torch on the same GPU; must come before JAX starts.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

STAGES = ("score", "select", "local", "fused-local", "merge", "chain", "jax-chain", "host")
BACKENDS = ("mosaic", "xla", "torch", "torch_compile", "flashinfer", "flashinfer-no-icp", "vllm")
_RUN = """
Times one rank's share of every work point and compares it with its floor: bytes over the rate at
which the card reads, or operations over the rate at which it multiplies fp8, the larger, both
measured in the same run. The target is the most that a case should take, a multiple of its floor or
of another row. Without a GPU: small cases, to see that everything runs.

stages
  score         block scores of the rank's keys
  select        candidate rows: the best 16 blocks of each token and head, from scores
  local         score and select, from inputs to candidate rows
  fused-local   the same without a plane of scores of the caller's (prefill)
  merge         the ids chosen, from all ranks' candidate rows
  chain         local with merge behind it, the other ranks' rows being there (decode)
  jax-chain     a layer of one jitted program of many, by transport (decode, Hopper)
  host          what a torch decode costs the host (Hopper); `python -m benchmarks.host`: it alone
backends
  mosaic        the package's kernels, on Hopper GPUs; xla: its portable definition
  torch         torch as one would write it; torch_compile: the same, compiled
  flashinfer    on a rank's share of the keys; flashinfer-no-icp: on all keys, for its heads
  vllm          its Triton kernels

Rows replace those of the result file that measure the same and leave the others. The exit status is
1 where something failed, 2 where nothing was measured. All mosaic rows take about two minutes on an
H200, XLA and torch.compile minutes more, the small cases a quarter of a minute on a CPU.
"""
_PROGRAMS = """programs of their own (--help)
  torchrun --nproc-per-node 2 -m benchmarks.exchange --out F   the exchange between GPUs
  python -m benchmarks.jax_chain --out F                       the same inside a jitted program
  python tools/tune.py KERNEL FIELD=VALUE,...                  other values of a kernel's tuning
"""
_CASES = """names of cases, all by default: 'd-*' for decode, 'p-*' for prefill, 'select-*' and
'merge-*' for these alone; the small cases of decode and prefill are 'quick-*'"""


def main(arguments: Sequence[str]) -> int:
    if importlib.util.find_spec("jax") is None:
        return fail("this Python has no jax; `make bench` sets one up: .venv/bin/python")
    parsed = _parser().parse_args(arguments)
    return refusing(parsed.command, parsed)


def fail(reason: str) -> int:
    print(f"benchmarks: {reason}", file=sys.stderr)
    return 2


def refusing(command: Callable[[Any], int], parsed: argparse.Namespace) -> int:
    """The exit status of a command; 2, and a line, where it cannot be done."""
    from benchmarks.results import Refused

    try:
        return command(parsed)
    except Refused as error:
        return fail(str(error))


def parser_of(text: str | None, *, out: str = "", budget: float = 600.0) -> argparse.ArgumentParser:
    """The parser of a program of its own, from its docstring, which has its command in `` ` ``."""
    program = (text or "``").split("`")[1].partition(" --out")[0]
    return _with_run_options(argparse.ArgumentParser(program, **_described(text)), out, budget)


def _described(text: str | None) -> Any:
    raw = argparse.RawDescriptionHelpFormatter
    return {"description": (text or "").replace("\n    ", "\n"), "formatter_class": raw}


def _with_run_options(
    parser: argparse.ArgumentParser, out: str, budget: float | None = None
) -> argparse.ArgumentParser:
    """Adds --out (required where `out` is empty), --budget-seconds and --commit."""
    default = f"; by default benchmarks/results/local/{out}, which git ignores" if out else ""
    words = f"result file, made or merged into{default}"
    parser.add_argument("--out", type=Path, required=not out, metavar="FILE", help=words)
    words = f"stop before it and keep what there is; {budget or 'without end'} by default"
    parser.add_argument("--budget-seconds", type=_seconds, default=budget, metavar="N", help=words)
    words = "what is measured, where there is no git to ask"
    parser.add_argument("--commit", metavar="ID", help=words)
    return parser


def _seconds(text: str) -> float:
    if not 0 < float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not more than 0 seconds")
    return float(text)


def _parser() -> argparse.ArgumentParser:
    from benchmarks import record

    top = argparse.ArgumentParser("python -m benchmarks", epilog=_PROGRAMS, **_described(_RUN))
    top.set_defaults(command=_run)
    top.add_argument("--cases", default="*", metavar="GLOB", help=_CASES)
    plural: dict[str, Any] = {"nargs": "+", "default": []}
    for name, choices in (("stage", STAGES), ("backend", BACKENDS)):
        words = {"metavar": name.upper(), "help": "by default all that there are here"}
        top.add_argument(f"--{name}s", choices=choices, **plural, **words)
    _with_run_options(top, "<device>.json")
    commands = top.add_subparsers(metavar="COMMAND", title="commands (COMMAND --help)")

    def add(command: Any, words: str, text: str | None = None) -> argparse.ArgumentParser:
        found = commands.add_parser(
            command.__name__.strip("_"), help=words, **_described(text or command.__doc__)
        )
        found.set_defaults(command=command)
        return found

    found = add(_sweep, "decode's time over contexts and batches, and its model")
    _with_run_options(found, "<device>-sweep.json")
    found = add(_record, "everything, part by part: what is committed", record.__doc__)
    words = {"metavar": "PART", "help": "default: all"}
    found.add_argument("--parts", choices=record.PARTS, **plural, **words)
    _with_run_options(found, "", budget=400.0)
    for command, files, what in (
        (_compare, ("before", "after"), "what moved beyond the noise"),
        (_merge, ("into", "source"), "replace the rows of INTO that SOURCE has"),
        (_plot, ("file",), "PNG files beside a result file"),
        (_readme, (), "rewrite the tables of the documents from committed results"),
    ):
        found = add(command, what)
        for name in files:
            found.add_argument(name, type=Path, metavar=name.upper(), help="a result file")
    return top


def _run(given: Any) -> int:
    from benchmarks import run

    machine = run.Machine()
    wanted = run.items(machine, given.cases, given.stages, given.backends)
    out = given.out or machine.default_out
    return run.Runner(machine, wanted, out, given.budget_seconds, given.commit).run(given.backends)


def _sweep(given: Any) -> int:
    """Times decode's score and select over contexts, batches and world sizes.

    Every request is as long as the others. Fits time = fixed + bytes / rate. Points whose shard is
    larger than 1 GiB are left out.
    """
    from benchmarks import report, results, run

    machine = run.Machine()
    out = given.out or results.beside(machine.default_out, "-sweep")
    runner = run.Runner(machine, run.sweep(machine), out, given.budget_seconds, given.commit)
    status = runner.run(["mosaic"])
    print(report.models(results.load(out).values()))
    return status


def _record(given: Any) -> int:
    from benchmarks import record

    return record.record(given.out, given.budget_seconds, given.commit, given.parts)


def _compare(given: Any) -> int:
    """Shows the figures of two result files that differ by more than runs and cards do.

    Their spreads do not touch. Figures of another device, or timed otherwise, are not compared. The
    exit status is 1 where something is slower, 2 where there is nothing to compare.
    """
    from benchmarks import report

    return report.compare(given.before, given.after)


def _merge(given: Any) -> int:
    """Rows of SOURCE replace those of INTO that measure the same, or are added.

    INTO is made if it is not there, SOURCE stays as it is.
    """
    from benchmarks import results

    rows = results.load(given.source)
    results.prepare(given.into)
    results.save(given.into, rows.values())
    print(f"{len(rows)} rows of {given.source} merged into {given.into}")
    return 0


def _plot(given: Any) -> int:
    """Writes PNG files beside FILE, NAME.json, those that its rows allow.

    NAME-ratio.png   times of score and select over the floor, with the targets
    NAME.png         a sweep, with its floor and its model
    """
    if importlib.util.find_spec("matplotlib") is None:
        return fail("this Python has no matplotlib; `make bench` installs it: .venv/bin/python")
    from benchmarks.plot import plot

    print("\n".join(map(str, plot(given.file))))
    return 0


def _readme(_: Any) -> int:
    """Writes the parts of the documents that come from benchmarks/results/h200*.json anew."""
    from benchmarks import report

    changed = report.rewrite()
    print("\n".join(f"rewritten: {path}" for path in changed) or "up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
