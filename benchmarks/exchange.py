"""The exchange between GPUs: `torchrun --nproc-per-node 2 -m benchmarks.exchange --out FILE`.

One process a GPU. Every decode case runs at as many ranks as there are GPUs, and each figure is the
slower rank's. Stages:

  exchange   from candidate rows to ids: the transport, and the owner's merge
  chain      score, select and exchange

Backends: "nccl" (`all_to_all_single`, then the merge), "one-sided-legacy" and "one-sided-tagged"
(publish into the peers' memory, in a chain by the select itself, and the merge that waits: for rows
with a flag, or for rows whose words carry the generation), and "none": the merge alone, of rows
that are there already.
`added_us` is what a transport adds to "none". Stages run as links of one CUDA graph; "-eager"
behind a stage's name: launched one by one, as long as the host takes.

Rows merge into FILE where it exists. A case takes about 3 seconds on two H200.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import options

STAGES = ("exchange", "chain")
BACKENDS = ("none", "nccl", "one-sided-legacy", "one-sided-tagged")


def cases(world_size: int, pattern: str) -> list[Any]:
    """The decode cases at this many ranks: those that are, then the others, under another name."""
    from benchmarks.cases import DECODE, at_world_size

    own_first = sorted(DECODE, key=lambda case: case.world_size != world_size)
    found = [at_world_size(case, world_size) for case in own_first]
    return [case for case in found if fnmatch.fnmatch(case.name, pattern)]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node 2 -m benchmarks.exchange",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="result file")
    parser.add_argument(
        "--cases", default="*", metavar="GLOB", help="names of cases, all by default: '*b32-32k*'"
    )
    parser.add_argument("--stages", nargs="+", default=STAGES, choices=STAGES, metavar="STAGE")
    parser.add_argument(
        "--backends", nargs="+", default=BACKENDS, choices=BACKENDS, metavar="BACKEND"
    )
    options.add_budget(parser, default=600.0)
    options.add_commit(parser)
    parsed = parser.parse_args(arguments)
    if reason := _unable() or _nothing_to_run(parsed):
        print(f"benchmarks.exchange: {reason}", file=sys.stderr)
        return 2
    _measure(parsed)
    return 0


def _unable() -> str | None:
    """Why this process cannot take part, or None."""
    for module in ("jax", "torch"):
        if importlib.util.find_spec(module) is None:
            return (
                f"this Python has no {module}; `make bench CUDA=13` sets one up, .venv/bin/python"
            )
    import torch

    if torch.cuda.device_count() < 2:
        return f"it takes two Hopper GPUs of one host, torch sees {torch.cuda.device_count()}"
    if "LOCAL_RANK" not in os.environ:
        return "it takes a process a GPU: torchrun --nproc-per-node 2 -m benchmarks.exchange ..."
    return None


def _nothing_to_run(parsed: argparse.Namespace) -> str | None:
    from benchmarks import results

    world_size = int(os.environ["WORLD_SIZE"])
    if world_size not in (2, 4):
        return f"it takes 2 or 4 processes, there are {world_size}"
    if not cases(world_size, parsed.cases):
        there = ", ".join(case.name for case in cases(world_size, "*"))
        return f"no case has a name like {parsed.cases!r}; there are {there}"
    try:
        results.prepare(parsed.out)
    except results.Unusable as error:
        return str(error)
    return None


def _measure(parsed: argparse.Namespace) -> None:
    # Every process sees all GPUs: none may take their memory, and torch needs some.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax
    import torch
    import torch.distributed as dist

    from benchmarks import roofline
    from benchmarks.inputs import GPU_STREAM_BYTES, Pool
    from benchmarks.links import Links, Recorder
    from msa_icp_jax.ops._mosaic.launch import current_target

    start = time.monotonic()
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    jax.config.update("jax_default_device", jax.devices()[rank])
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    found = cases(dist.get_world_size(), parsed.cases)
    recorder = Recorder(parsed.out, parsed.commit, roofline.measure(torch))
    pool = Pool(found, GPU_STREAM_BYTES)
    for case in found:
        spent: list[Any] = [time.monotonic() - start]
        dist.broadcast_object_list(spent)  # all ranks decide alike
        if spent[0] > parsed.budget_seconds:
            print(f"left out, out of time: {case.name}")
            continue
        links = Links(case, pool.inputs(case, "mosaic"), rank, current_target())
        recorder.measure(links, parsed.stages, parsed.backends)
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
