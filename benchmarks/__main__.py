"""The command line: `python -m benchmarks`, and its commands; --help names them."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
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
Times one rank's share of every work point and compares it with its floor. Without a GPU: small
cases, to see that everything runs.

stages
{_STAGES}
backends
{_BACKENDS}

The floor is what no implementation goes below: bytes over the rate at which the card reads, or
operations over the rate at which it multiplies fp8, the larger, both measured in the same run. That
of local, fused-local and chain leaves out the bytes of the score plane. The target is the most that
a case should take, a multiple of its floor or of another row.

Rows replace those of the result file that measure the same and leave the others. The exit status is
1 where something failed, 2 where nothing was measured. All mosaic rows take about two minutes on an
H200, XLA and torch.compile minutes more, the small cases a quarter of a minute on a CPU.
"""
_PROGRAMS = """programs of their own (--help)
  python -m benchmarks.host                                    the host's time of a torch decode
  torchrun --nproc-per-node 2 -m benchmarks.exchange --out F   the exchange between GPUs
  python -m benchmarks.jax_chain --out F                       the same inside a jitted program
"""
_SWEEP = """
Times decode's score and select over contexts, batches and world sizes, every request as long as the
others, and fits time = fixed + bytes / rate. Points whose shard is larger than 1 GiB are left out.
"""
_COMPARE = """
Shows the figures of two result files whose spreads do not touch and that differ by more than runs
and cards do. Figures of another device, or timed otherwise, are not compared. The exit status is 1
where something is slower, 2 where there is nothing to compare.
"""
_PLOT = """
Writes PNG files beside NAME.json, those that its rows allow:

  NAME-ratio.png   times of score and select over the floor, with the targets
  NAME.png         a sweep, with its floor and its model
"""
_MERGE = (
    "Rows of FROM replace those of INTO that measure the same, or are added. FROM stays as it is."
)
_README = "Writes the parts of the documents that come from benchmarks/results/h200*.json anew."
_MOST_KEYS = 1 << 20  # of a request: candidates are among the first 8,192 blocks


def main(arguments: Sequence[str]) -> int:
    if importlib.util.find_spec("jax") is None:
        return fail("this Python has no jax; `make bench` sets one up: .venv/bin/python")
    from benchmarks.results import Refused

    parsed = _parser().parse_args(arguments)
    try:
        return parsed.command(parsed)
    except Refused as error:
        return fail(str(error))


def fail(reason: str) -> int:
    print(f"benchmarks: {reason}", file=sys.stderr)
    return 2


def parser(program: str, description: str | None) -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=program, description=description, formatter_class=raw)


def add_run_options(
    found: argparse.ArgumentParser, out: str, budget: float | None = None
) -> argparse.ArgumentParser:
    """Adds --out (required where `out` is empty), --budget-seconds and --commit."""
    default = f"; by default benchmarks/results/local/{out}, which git ignores: the committed "
    default += "results change only where they are named"
    found.add_argument(
        "--out",
        type=Path,
        required=not out,
        metavar="FILE",
        help="result file, made or merged into" + default * bool(out),
    )
    found.add_argument(
        "--budget-seconds",
        type=_seconds,
        default=budget,
        metavar="N",
        help=f"stop before it and keep what there is; {budget or 'without end'} by default",
    )
    found.add_argument(
        "--commit", metavar="ID", help="what is measured, where there is no git to ask"
    )
    return found


def _parser() -> argparse.ArgumentParser:
    top = parser("python -m benchmarks", _RUN)
    top.epilog = _PROGRAMS
    top.set_defaults(command=_run)
    top.add_argument("--quick", action="store_true", help="small cases: does it all run?")
    top.add_argument("--sweep", action="store_true", help="the sweep too, into FILE-sweep")
    top.add_argument(
        "--cases",
        default="*",
        metavar="GLOB",
        help="names of cases, all by default: 'd-*' for decode, 'p-*' for prefill, 'select-*' and "
        "'merge-*' for these alone; the small cases of decode and prefill are 'quick-*'",
    )
    for name, choices in (("stage", STAGES), ("backend", BACKENDS)):
        options = {"nargs": "+", "default": [], "choices": choices, "metavar": name.upper()}
        top.add_argument(f"--{name}s", **options, help="by default all that there are here")
    add_run_options(top, "<device>.json")

    commands = top.add_subparsers(metavar="COMMAND", title="commands (COMMAND --help)")

    def add(name: str, command: object, words: str, text: str | None) -> argparse.ArgumentParser:
        raw = argparse.RawDescriptionHelpFormatter
        found = commands.add_parser(name, help=words, description=text, formatter_class=raw)
        found.set_defaults(command=command)
        return found

    found = add("sweep", _sweep, "decode's time over contexts and batches, and its model", _SWEEP)
    plural = {"nargs": "+", "default": []}
    sizes = "keys of a request, 5000, 4K or 1M say; by default 4K 16K 64K (on a GPU 256K 1M too)"
    found.add_argument("--contexts", type=size, metavar="KEYS", help=sizes, **plural)
    batches = "requests; by default 1 4 (on a GPU 16 64 256 too)"
    found.add_argument("--batches", type=_count, metavar="B", help=batches, **plural)
    found.add_argument("--world-sizes", type=int, choices=(2, 4), help="default: both", **plural)
    add_run_options(found, "<device>-sweep.json")

    from benchmarks import record

    words = "everything, part by part within one budget: what is committed"
    found = add("record", _record, words, record.__doc__)
    found.add_argument(
        "--parts", choices=record.PARTS, metavar="PART", help="default: all", **plural
    )
    add_run_options(found, "", budget=400.0)

    found = add("compare", _compare, "what moved beyond the noise", _COMPARE)
    for name, which in (("before", "earlier"), ("after", "later")):
        words = f"result file of the {which} run"
        found.add_argument(name, type=Path, metavar=name.upper(), help=words)
    found = add("merge", _merge, "replace the rows of INTO that FROM has", _MERGE)
    found.add_argument("into", type=Path, metavar="INTO", help="result file, made if not there")
    found.add_argument("source", type=Path, metavar="FROM", help="result file of another run")
    found = add("plot", _plot, "PNG files beside a result file", _PLOT)
    found.add_argument("file", type=Path, metavar="NAME.json", help="result file, of a sweep too")
    add("readme", _readme, "rewrite the tables of the documents from committed results", _README)
    return top


def _run(given: argparse.Namespace) -> int:
    from benchmarks import results, run

    machine = run.Machine()
    wanted = run.items(machine, given.cases, given.stages, given.backends, quick=given.quick)
    if given.sweep:
        wanted += run.sweep(machine, suffix=results.SWEEP_SUFFIX)
    out = given.out or machine.default_out
    return run.Runner(machine, wanted, out, given.budget_seconds, given.commit).run(given.backends)


def _sweep(given: argparse.Namespace) -> int:
    from benchmarks import results, run

    machine = run.Machine()
    wanted = run.sweep(machine, given.contexts, given.batches, given.world_sizes)
    out = given.out or results.beside(machine.default_out, results.SWEEP_SUFFIX)
    runner = run.Runner(machine, wanted, out, given.budget_seconds, given.commit)
    status = runner.run(asked=["mosaic"])
    fits = results.fits(results.load(out).rows.values())
    print("\n".join(map(str, fits)) or f"no model: it takes {results.LEAST_POINTS} points or more")
    return status


def _record(given: argparse.Namespace) -> int:
    from benchmarks import record

    return record.record(given.out, given.budget_seconds, given.commit, given.parts)


def _compare(given: argparse.Namespace) -> int:
    """Prints what moved; 1 when something became slower."""
    from benchmarks import report, results

    before, after = results.load(given.before), results.load(given.after)
    for path, one, other in ((given.before, before, after), (given.after, after, before)):
        print(f"{path}: {report.origin(one.rows)}")
        alone = [results.label(row) for key, row in one.rows.items() if key not in other.rows]
        if alone:
            print(f"only in {path}: {len(alone)} figures: {'; '.join(alone[:3])}")
    found = results.compare(before, after)
    for verdict in ("slower", "faster"):
        for old, new in found[verdict]:
            us = f"{old['median_us']:.2f} -> {new['median_us']:.2f} us"
            ratio = new["median_us"] / old["median_us"]
            print(f"{verdict}: {results.label(new)}: {us}, {ratio:.3f}")
    for reason, pairs in found.items():
        if reason not in ("slower", "faster", "same"):
            print(f"not compared: {len(pairs)} figures, {reason}")
    counts = {verdict: len(found[verdict]) for verdict in ("slower", "faster", "same")}
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    if not any(counts.values()):
        return fail("nothing to compare")
    return 1 if counts["slower"] else 0


def _merge(given: argparse.Namespace) -> int:
    from benchmarks import results

    source = results.load(given.source)
    results.prepare(given.into)
    results.save(given.into, source.rows.values(), source.absent)
    print(f"{len(source.rows)} rows of {given.source} merged into {given.into}")
    return 0


def _plot(given: argparse.Namespace) -> int:
    if importlib.util.find_spec("matplotlib") is None:
        return fail("this Python has no matplotlib; `make bench` installs it: .venv/bin/python")
    from benchmarks.plot import plot

    for path in plot(given.file):
        print(path)
    return 0


def _readme(_: argparse.Namespace) -> int:
    from benchmarks import report

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
