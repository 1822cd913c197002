"""Times other values of a kernel's tuning beside the committed ones: `python tools/tune.py --help`.

  python tools/tune.py decode_score stages=1,2,3 late_from=5,10 --cases 'd-b32-*'

The values are fields of `msa_icp_jax/ops/KERNEL/config.py`; all their combinations are taken. It
takes a Hopper GPU and torch. Each combination is checked as every figure is, then all are timed in
turn, round by round, so that none has the card cooler. What is printed is the median, over the
rounds, of a combination's time over the committed one's.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import functools
import importlib
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

STAGES = {"decode_score": "score", "prefill_score": "score", "select": "select", "merge": "merge"}
CASES = {"decode_score": "d-*", "prefill_score": "p-*", "select": "select-*", "merge": "merge-*"}


def configs_of(kernel: str) -> dict[str, Any]:
    """Where the kernel looks for its configs: by name, "CONFIG" where it has one."""
    return vars(importlib.import_module(f"msa_icp_jax.ops.{kernel}.config"))


def combinations(committed: Any, values: Sequence[str]) -> dict[str, Any]:
    """The committed config, then one of each combination of ``field=value,...``, by its words."""
    named = {}
    for text in values:
        field, _, listed = text.partition("=")
        if field not in vars(committed) or not listed:
            there = ", ".join(vars(committed))
            raise ValueError(f"{text!r} must be FIELD=VALUE,... with a field among {there}")
        named[field] = ast.literal_eval(f"[{listed}]")
    found = {"committed": committed}
    for chosen in itertools.product(*named.values()):
        changes = dict(zip(named, chosen, strict=True))
        words = " ".join(f"{field}={value}" for field, value in changes.items())
        found[words] = dataclasses.replace(committed, **changes)
    return found


@contextlib.contextmanager
def using(configs: dict[str, Any], name: str, config: Any) -> Iterator[None]:
    """Kernels that are lowered in this context take `config`."""
    committed = configs[name]
    configs[name] = config
    try:
        yield
    finally:
        configs[name] = committed


def main(arguments: Sequence[str]) -> int:
    """Times the combinations that are asked for; 0, or 2 where nothing can be timed."""
    parser = argparse.ArgumentParser(
        prog="python tools/tune.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kernel", choices=STAGES)
    parser.add_argument("values", nargs="+", metavar="FIELD=VALUE,...")
    parser.add_argument("--cases", help="names of cases, by default all of the kernel's")
    parser.add_argument(
        "--config", help="the one to vary of prefill_score's: FAST, SHORT or EXACT, say"
    )
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args(arguments)
    configs = configs_of(given.kernel)
    name = given.config or ("CONFIG" if "CONFIG" in configs else "FAST")
    there = [key for key, x in configs.items() if type(x) is configs.get("Config")]
    if name not in there:
        parser.error(f"--config must be among {', '.join(there)}, got {name!r}")
    try:
        candidates = combinations(configs[name], given.values)
    except (SyntaxError, ValueError) as error:
        parser.error(str(error))
    return _tune(given, functools.partial(using, configs, name), candidates)


def _tune(given: Any, using_config: Callable[..., Any], candidates: dict[str, Any]) -> int:
    from benchmarks import run

    machine = run.Machine()
    if not machine.mosaic:
        print(f"nothing can be timed here: {machine.absent['mosaic']}")
        return 2
    pattern = given.cases or CASES[given.kernel]
    items = run.items(machine, pattern, (STAGES[given.kernel],), ("mosaic",))
    runner = run.Runner(machine, items, Path())
    runner.draw()
    for item in items:
        runs = {}
        for words, config in candidates.items():
            with using_config(config):
                try:
                    runs[words] = runner.checked(item)
                except Exception as error:  # too much shared memory, say
                    print(f"{item.label}: {words} fails: {type(error).__name__}: {error}")
        rounds = [{k: x.times(1).median for k, x in runs.items()} for _ in range(given.rounds)]
        for words in runs:
            ratio = statistics.median(x[words] / x["committed"] for x in rounds)
            us = statistics.median(x[words] for x in rounds)
            print(f"{item.label}: {us:8.2f} us {ratio:6.3f} {words}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
