"""The exchange between GPUs: `torchrun --nproc-per-node 2 -m benchmarks.exchange --out FILE`.

One process a GPU. Every decode case runs at as many ranks as there are GPUs, and each figure is the
slower rank's. The stage is "chain": score, select, exchange and merge, by `decode` of the torch
plan on its direct route, as links of one CUDA graph. Backends: "nccl" (`all_to_all_single`),
"one-sided-legacy" and "one-sided-tagged" (the select stores its rows at their owners, and the merge
waits: for rows with a flag, or for rows whose words carry the generation), and "none": the same
kernels, with the received rows being there. `added_us` is what a transport adds to "none".

Rows merge into FILE where it exists. A case takes about 3 seconds on two H200.
"""

from __future__ import annotations

import fnmatch
import functools
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks import check, results, roofline
from benchmarks.__main__ import add_run_options, fail, parser
from benchmarks.cases import DECODE, Decode, at_world_size
from benchmarks.inputs import GPU_STREAM_BYTES, Inputs, Pool
from benchmarks.ranks import Rank
from benchmarks.report import line
from benchmarks.stages import build, written_like
from benchmarks.timing import GraphRun, Lowering, Times, in_graph
from msa_icp_jax import msa_icp_comm_layout
from msa_icp_jax.rows import ROW_WORDS, TAGGED_WORDS

BACKENDS = ("none", "nccl", "one-sided-legacy", "one-sided-tagged")
LINKS = 96  # of a graph; whole turns of the three slots
RUNS = 11


def cases(world_size: int, pattern: str) -> list[Decode]:
    """The decode cases at this many ranks: those that are, then the others, under another name."""
    own_first = sorted(DECODE, key=lambda case: case.world_size != world_size)
    found = [at_world_size(case, world_size) for case in own_first]
    return [case for case in found if fnmatch.fnmatch(case.name, pattern)]


def main(arguments: Sequence[str]) -> int:
    found = parser("torchrun --nproc-per-node 2 -m benchmarks.exchange", __doc__)
    found.add_argument(
        "--cases", default="*", metavar="GLOB", help="names of cases, all by default: '*b32-32k*'"
    )
    found.add_argument(
        "--backends", nargs="+", default=BACKENDS, choices=BACKENDS, metavar="BACKEND"
    )
    parsed = add_run_options(found, "", budget=600.0).parse_args(arguments)
    try:
        if reason := _unable(parsed.cases):
            return fail(reason)
        results.prepare(parsed.out)
    except results.Refused as error:
        return fail(str(error))
    _measure(parsed)
    return 0


def _unable(pattern: str) -> str | None:
    """Why this process cannot take part, or None."""
    if importlib.util.find_spec("torch") is None:
        return "this Python has no torch; `make bench CUDA=13` sets one up, .venv/bin/python"
    import torch

    if torch.cuda.device_count() < 2:
        return f"it takes two Hopper GPUs of one host, torch sees {torch.cuda.device_count()}"
    if "LOCAL_RANK" not in os.environ:
        return "it takes a process a GPU: torchrun --nproc-per-node 2 -m benchmarks.exchange ..."
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size not in (2, 4):
        return f"it takes 2 or 4 processes, there are {world_size}"
    if not cases(world_size, pattern):
        there = ", ".join(case.name for case in cases(world_size, "*"))
        return f"no case has a name like {pattern!r}; there are {there}"
    return None


def _measure(parsed: Any) -> None:
    import torch
    import torch.distributed as dist

    start = time.monotonic()
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    jax.config.update("jax_default_device", jax.devices()[rank])
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    found = cases(dist.get_world_size(), parsed.cases)
    device = f"{torch.cuda.get_device_name()} x{dist.get_world_size()}"
    ceilings = roofline.measure(torch)
    setting = results.Setting(device, str(torch.__version__), ceilings, parsed.commit)
    pool = Pool(found, GPU_STREAM_BYTES)
    for case in found:
        spent: list[Any] = [time.monotonic() - start]
        dist.broadcast_object_list(spent)  # all ranks decide alike
        if spent[0] > parsed.budget_seconds:
            print(f"left out, out of time: {case.name}")
            continue
        inputs, alone = pool.inputs(case, "mosaic"), None
        for backend in parsed.backends:
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, over(backend, case, inputs, rank))
            times = max(every, key=lambda times: times.median)
            alone = times.median if backend == "none" else alone
            more = {"payload_bytes": payload(case, backend)}
            if backend != "none" and alone is not None:
                more["added_us"] = round(times.median - alone, 3)
            key = (case.name, "chain", backend, "exact")
            row = setting.row(key, times, case.floor("chain").us(ceilings), **more)
            if rank == 0:
                print(line(row, {}), flush=True)
                results.save(parsed.out, [row])
    dist.destroy_process_group()


def payload(case: Decode, backend: str) -> int:
    """Bytes that a rank sends."""
    words = 2 * TAGGED_WORDS if backend == "one-sided-tagged" else ROW_WORDS
    rows = (case.world_size - 1) * case.heads_per_rank * case.tokens
    return 0 if backend == "none" else rows * words * 4


def over(backend: str, case: Decode, inputs: Inputs, number: int) -> Times:
    """A rank's chain over a transport, checked."""
    if backend == "none":
        stage = build(case, "chain", "mosaic", "exact")
        lower = functools.partial(Lowering().of, case, "exact")
        run = GraphRun(stage, inputs, written_like(case), LINKS, lower)
        a = run.run()
        check.check_merged(case.tokens, a["received"], a["counts"], a["output"], a["errors"])
        return run.times(RUNS)
    storage = storage_of(case) if backend.startswith("one-sided") else None
    tagged = backend != "one-sided-legacy"
    rank = Rank(case, inputs, number, tagged=tagged, storage=storage)
    rank.warm([] if storage is None else addresses_of(storage))
    for link in range(3):
        rank.decode(link)
    rank.check(delivered(rank.sent(2)))
    links = [[functools.partial(rank.decode, link)] for link in range(LINKS)]
    found = in_graph(links, RUNS, start_together)
    if check.host(rank.comm.errors).any():
        raise check.Mismatch(f"{case.name}: faults over {backend}")
    return found


def storage_of(case: Decode) -> Any:
    """Receive storage in memory that the other ranks' kernels reach."""
    import torch
    import torch.distributed._symmetric_memory as symmetric_memory

    layout = msa_icp_comm_layout(case.world_size, case.heads_per_rank, case.tokens)
    return symmetric_memory.empty(layout.storage_words, dtype=torch.int32, device="cuda")


def addresses_of(storage: Any) -> list[int]:
    """Every rank's storage as this rank addresses it, once all have zeroed theirs."""
    import torch
    import torch.distributed as dist
    import torch.distributed._symmetric_memory as symmetric_memory

    found = symmetric_memory.rendezvous(storage, dist.group.WORLD).buffer_ptrs
    torch.cuda.synchronize()
    dist.barrier()
    return list(found)


def delivered(rows: np.ndarray) -> np.ndarray:
    """Every rank's rows for this one, through the collective."""
    import torch
    import torch.distributed as dist

    sent = torch.from_numpy(rows).cuda()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    return check.host(received)


def start_together() -> None:
    import torch
    import torch.distributed as dist

    torch.cuda.synchronize()
    dist.all_reduce(torch.zeros(1, device="cuda"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
