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

STAGES = {
    "score": "block scores of the rank's keys",
    "select": "candidate rows: the best 16 blocks of each token and head, from scores",
    "local": "score and select, from inputs to candidate rows",
    "fused-local": "the same without a plane of scores of the caller's (prefill)",
    "merge": "the ids chosen, from all ranks' candidate rows",
    "chain": "local with merge behind it, the other ranks' rows being there (decode)",
    "jax-chain": "a layer of one jitted program of many, by transport (decode, Hopper)",
}
BACKENDS = {
    "mosaic": "the package's kernels, on Hopper GPUs",
    "xla": "its portable definition",
    "torch": "what the kernels are compared with, where installed:",
    "torch_compile": "  torch as one would write it, and compiled",
    "flashinfer": "  on a rank's share of the keys",
    "flashinfer-no-icp": "  on all keys, for the heads that a rank owns",
    "vllm": "  its Triton kernels",
}
_STAGES, _BACKENDS = (
    "\n".join(f"  {name:18} {what}" for name, what in words.items()) for words in (STAGES, BACKENDS)
)
_RUN = f"""
Times one rank's share of every work point and compares it with its floor: bytes over the rate at
which the card reads, or operations over the rate at which it multiplies fp8, the larger, both
measured in the same run. The target is the most that a case should take, a multiple of its floor or
of another row. Without a GPU: small cases, to see that everything runs.

stages
{_STAGES}
backends
{_BACKENDS}

Rows replace those of the result file that measure the same and leave the others. The exit status is
1 where something failed, 2 where nothing was measured. All mosaic rows take about two minutes on an
H200, XLA and torch.compile minutes more, the small cases a quarter of a minute on a CPU.
"""
_PROGRAMS = """programs of their own (--help)
  python -m benchmarks.host                                    the host's time of a torch decode
  torchrun --nproc-per-node 2 -m benchmarks.exchange --out F   the exchange between GPUs
  python -m benchmarks.jax_chain --out F                       the same inside a jitted program
  python tools/tune.py KERNEL FIELD=VALUE,...                  other values of a kernel's tuning
"""
_CASES = """names of cases, all by default: 'd-*' for decode, 'p-*' for prefill, 'select-*' and
'merge-*' for these alone; the small cases of decode and prefill are 'quick-*'"""
_MOST_KEYS = 1 << 20  # of a request: candidates are among the first 8,192 blocks


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


def options_of(
    text: str | None, *, out: str = "", budget: float = 600.0, cases: bool = False
) -> argparse.ArgumentParser:
    """The options of a program of its own, from its docstring, which has its command in `` ` ``."""
    raw = argparse.RawDescriptionHelpFormatter
    program = (text or "``").split("`")[1].partition(" --out")[0]
    found = argparse.ArgumentParser(prog=program, description=text, formatter_class=raw)
    if cases:
        words = "names of cases, all by default: '*b32-32k*'"
        found.add_argument("--cases", default="*", metavar="GLOB", help=words)
    return _add_run_options(found, out, budget)


def _add_run_options(
    found: argparse.ArgumentParser, out: str, budget: float | None = None
) -> argparse.ArgumentParser:
    """Adds --out (required where `out` is empty), --budget-seconds and --commit."""
    default = f"; by default benchmarks/results/local/{out}, which git ignores: the committed "
    default += "results change only where they are named"
    words = "result file, made or merged into" + default * bool(out)
    found.add_argument("--out", type=Path, required=not out, metavar="FILE", help=words)
    words = f"stop before it and keep what there is; {budget or 'without end'} by default"
    found.add_argument("--budget-seconds", type=_seconds, default=budget, metavar="N", help=words)
    words = "what is measured, where there is no git to ask"
    found.add_argument("--commit", metavar="ID", help=words)
    return found


def _parser() -> argparse.ArgumentParser:
    from benchmarks import record

    raw = argparse.RawDescriptionHelpFormatter
    top = argparse.ArgumentParser(
        "python -m benchmarks", description=_RUN, epilog=_PROGRAMS, formatter_class=raw
    )
    top.set_defaults(command=_run)
    top.add_argument("--quick", action="store_true", help="small cases: does it all run?")
    top.add_argument("--cases", default="*", metavar="GLOB", help=_CASES)
    plural: dict[str, Any] = {"nargs": "+", "default": []}
    for name, choices in (("stage", STAGES), ("backend", BACKENDS)):
        words = {"metavar": name.upper(), "help": "by default all that there are here"}
        top.add_argument(f"--{name}s", choices=choices, **plural, **words)
    _add_run_options(top, "<device>.json")
    commands = top.add_subparsers(metavar="COMMAND", title="commands (COMMAND --help)")

    def add(command: Any, words: str, text: str | None = None) -> argparse.ArgumentParser:
        name = command.__name__.strip("_")
        text = text or command.__doc__.replace("\n    ", "\n")
        found = commands.add_parser(name, help=words, description=text, formatter_class=raw)
        found.set_defaults(command=command)
        return found

    found = add(_sweep, "decode's time over contexts and batches, and its model")
    words = "keys of a request, 5000, 4K or 1M say; by default 4K 16K 64K (on a GPU 256K 1M too)"
    found.add_argument("--contexts", type=size, metavar="KEYS", help=words, **plural)
    words = "requests; by default 1 4 (on a GPU 16 64 256 too)"
    found.add_argument("--batches", type=_count, metavar="B", help=words, **plural)
    found.add_argument("--world-sizes", type=int, choices=(2, 4), help="default: both", **plural)
    _add_run_options(found, "<device>-sweep.json")
    words = "everything, part by part within one budget: what is committed"
    found = add(_record, words, record.__doc__)
    words = {"metavar": "PART", "help": "default: all"}
    found.add_argument("--parts", choices=record.PARTS, **plural, **words)
    _add_run_options(found, "", budget=400.0)
    for command, files, words in (
        (_compare, ("before", "after"), "what moved beyond the noise"),
        (_merge, ("into", "from"), "replace the rows of INTO that FROM has"),
        (_plot, ("file",), "PNG files beside a result file"),
        (_readme, (), "rewrite the tables of the documents from committed results"),
    ):
        found = add(command, words)
        for name in files:
            found.add_argument(name, type=Path, metavar=name.upper(), help="a result file")
    return top


def _run(given: Any) -> int:
    from benchmarks import run

    machine = run.Machine()
    wanted = run.items(machine, given.cases, given.stages, given.backends, quick=given.quick)
    out = given.out or machine.default_out
    return run.Runner(machine, wanted, out, given.budget_seconds, given.commit).run(given.backends)


def _sweep(given: Any) -> int:
    """Times decode's score and select over contexts, batches and world sizes.

    Every request is as long as the others. Fits time = fixed + bytes / rate. Points whose shard is
    larger than 1 GiB are left out.
    """
    from benchmarks import results, run

    machine = run.Machine()
    wanted = run.sweep(machine, given.contexts, given.batches, given.world_sizes)
    out = given.out or results.beside(machine.default_out, "-sweep")
    runner = run.Runner(machine, wanted, out, given.budget_seconds, given.commit)
    status, fits = runner.run(["mosaic"]), results.fits(results.load(out).rows.values())
    print("\n".join(map(str, fits)) or "no model: it takes 3 points or more")
    return status


def _record(given: Any) -> int:
    from benchmarks import record

    return record.record(given.out, given.budget_seconds, given.commit, given.parts)


def _compare(given: Any) -> int:
    """Shows the figures of two result files that differ by more than runs and cards do.

    Their spreads do not touch. Figures of another device, or timed otherwise, are not compared. The
    exit status is 1 where something is slower, 2 where there is nothing to compare.
    """
    from benchmarks import report, results

    before, after = results.load(given.before), results.load(given.after)
    for path, one, other in ((given.before, before, after), (given.after, after, before)):
        print(f"{path}: {report.origin(one.rows.values())}")
        alone = [results.label(row) for key, row in one.rows.items() if key not in other.rows]
        if alone:
            print(f"only in {path}: {len(alone)} figures: {'; '.join(alone[:3])}")
    moved, unlike = results.compare(before, after)
    for verdict in ("slower", "faster"):
        for old, new in moved[verdict]:
            us = f"{old['median_us']:.2f} -> {new['median_us']:.2f} us"
            ratio = new["median_us"] / old["median_us"]
            print(f"{verdict}: {results.label(new)}: {us}, {ratio:.3f}")
    for reason, pairs in unlike.items():
        print(f"not compared: {len(pairs)} figures, {reason}")
    print(", ".join(f"{len(pairs)} {verdict}" for verdict, pairs in moved.items()))
    if not any(moved.values()):
        return fail("nothing to compare")
    return 1 if moved["slower"] else 0


def _merge(given: Any) -> int:
    """Rows of FROM replace those of INTO that measure the same, or are added.

    INTO is made if it is not there, FROM stays as it is.
    """
    from benchmarks import results

    into, source = given.into, vars(given)["from"]
    found = results.load(source)
    results.prepare(into)
    results.save(into, found.rows.values(), found.absent)
    print(f"{len(found.rows)} rows of {source} merged into {into}")
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


# ---- arguments ----


def _seconds(text: str) -> float:
    if not 0 < float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not more than 0 seconds")
    return float(text)


def size(text: str) -> int:
    """4096, 4K or 1M keys of a request."""
    unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:].upper(), 1)
    digits = text if unit == 1 else text[:-1]
    if not digits.isdecimal() or not 0 < int(digits) * unit <= _MOST_KEYS:
        raise argparse.ArgumentTypeError(f"{text!r} is no size from 1 to 1M, like 5000, 4K or 1M")
    return int(digits) * unit


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
