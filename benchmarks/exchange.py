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

import argparse
import fnmatch
import functools
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import check, results, roofline
from benchmarks.__main__ import add_run_options, fail, parser
from benchmarks.baselines import tensors
from benchmarks.cases import DECODE, INIT_BLOCKS, LOCAL_BLOCKS, PAGE_SIZE, Decode, at_world_size
from benchmarks.inputs import GPU_STREAM_BYTES, Inputs, Pool
from benchmarks.report import line
from benchmarks.stages import build, written_like
from benchmarks.timing import GraphRun, Lowering, Times, in_graph
from msa_icp_jax import msa_icp_comm_layout
from msa_icp_jax.geometry import NUM_HEADS
from msa_icp_jax.rows import ROW_WORDS, TAGGED_WORDS

# A bare checkout has the package beside this one; an installed one comes first.
sys.path.append(str(Path(__file__).parents[1] / "interop"))

BACKENDS = ("none", "nccl", "one-sided-legacy", "one-sided-tagged")
LINKS = 96  # of a graph; whole turns of the three slots
RUNS = 11
_SPIN_LIMIT = 1 << 24  # looks, some seconds


def cases(world_size: int, pattern: str) -> list[Decode]:
    """The decode cases at this many ranks: those that are, then the others, under another name."""
    own_first = sorted(DECODE, key=lambda case: case.world_size != world_size)
    found = [at_world_size(case, world_size) for case in own_first]
    return [case for case in found if fnmatch.fnmatch(case.name, pattern)]


def main(arguments: Sequence[str]) -> int:
    found = parser(".exchange", __doc__)
    found.add_argument(
        "--cases", default="*", metavar="GLOB", help="names of cases, all by default: '*b32-32k*'"
    )
    found.add_argument(
        "--backends", nargs="+", default=BACKENDS, choices=BACKENDS, metavar="BACKEND"
    )
    parsed = add_run_options(found, "", budget=600.0).parse_args(arguments)
    if reason := _unable() or _nothing_to_run(parsed):
        return fail(reason)
    _measure(parsed)
    return 0


def _unable() -> str | None:
    """Why this process cannot take part, or None."""
    if importlib.util.find_spec("torch") is None:
        return "this Python has no torch; `make bench CUDA=13` sets one up, .venv/bin/python"
    import torch

    if torch.cuda.device_count() < 2:
        return f"it takes two Hopper GPUs of one host, torch sees {torch.cuda.device_count()}"
    if "LOCAL_RANK" not in os.environ:
        return "it takes a process a GPU: torchrun --nproc-per-node 2 -m benchmarks.exchange ..."
    return None


def _nothing_to_run(parsed: argparse.Namespace) -> str | None:
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size not in (2, 4):
        return f"it takes 2 or 4 processes, there are {world_size}"
    if not cases(world_size, parsed.cases):
        there = ", ".join(case.name for case in cases(world_size, "*"))
        return f"no case has a name like {parsed.cases!r}; there are {there}"
    try:
        results.prepare(parsed.out)
    except results.Refused as error:
        return str(error)
    return None


def _measure(parsed: argparse.Namespace) -> None:
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
            take = _without if backend == "none" else functools.partial(over, backend)
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, take(case, inputs))
            times = max(every, key=lambda times: times.median)
            alone = times.median if backend == "none" else alone
            more = {} if backend == "none" or alone is None else {"added_us": times.median - alone}
            key = (case.name, "chain", backend, "exact")
            floor = case.floor("chain").us(ceilings)
            row = setting.row(key, times, floor, payload_bytes=payload(case, backend), **more)
            if rank == 0:
                print(line(row, {}), flush=True)
                results.save(parsed.out, [row])
    dist.destroy_process_group()


def payload(case: Decode, backend: str) -> int:
    """Bytes that a rank sends."""
    words = 2 * TAGGED_WORDS if backend == "one-sided-tagged" else ROW_WORDS
    rows = (case.world_size - 1) * case.heads_per_rank * case.tokens
    return 0 if backend == "none" else rows * words * 4


def _without(case: Decode, inputs: Inputs) -> Times:
    """The chain's kernels without an exchange."""
    stage = build(case, "chain", "mosaic", "exact", arrange=False)
    lower = functools.partial(Lowering().of, case, "exact")
    run = GraphRun(stage, inputs, written_like(case), LINKS, lower)
    a = run.run()
    check.check_merged(case.tokens, a["received"], a["counts"], a["output"], a["errors"])
    return run.times(RUNS)


def over(backend: str, case: Decode, inputs: Inputs) -> Times:
    """The plan's decode, checked, over a transport."""
    import torch
    import torch.distributed as dist

    plan = plan_of(case)
    storage = storage_of(case) if backend.startswith("one-sided") else None
    comm = plan.init_comm(storage)
    if storage is not None:
        comm.connect(addresses_of(storage))
    tagged = backend != "one-sided-legacy"
    fixed = tensors(inputs.fixed)
    sets = [fixed | tensors(one_set) for one_set in inputs.sets]
    columns = plan.decode_score_shape()[2]
    for arrays in sets:
        arrays["scores"] = torch.empty(case.tokens, NUM_HEADS, columns, device="cuda")
    shape = (case.tokens, case.heads_per_rank, 16)
    output = torch.full(shape, -7, dtype=torch.int32, device="cuda")
    width, each = sets[0]["table"].shape[1], [case.query_len]
    shapes = {"table_width": width, "batch_sizes": [len(case.lens)], "query_lens": each}
    plan.warmup(sets[0]["keys"], **shapes, comm=comm, tagged=tagged, prefill=False)

    def link(number: int) -> None:
        arrays = sets[number % len(sets)]
        names = ("queries", "keys", "table", "lens", "counts", "scores")
        plan.decode(
            *(arrays[name] for name in names),
            output,
            comm=comm,
            slot=number,
            tagged=tagged,
            decode_query_len=case.query_len,
        )

    for number in range(3):
        link(number)
    torch.cuda.synchronize()
    last = sets[2 % len(sets)]
    counts, errors = check.host(last["counts"]), check.host(comm.errors)
    check.check_merged(case.tokens, _sent(case, last), counts, output, errors)
    token = torch.zeros(1, device="cuda")

    def start_together() -> None:
        torch.cuda.synchronize()
        dist.all_reduce(token)

    links: list[list[Callable[[], Any]]] = [[functools.partial(link, i)] for i in range(LINKS)]
    found = in_graph(links, RUNS, start_together)
    if check.host(comm.errors).any():
        raise check.Mismatch(f"{case.name}: faults over {backend}")
    return found


def plan_of(case: Decode) -> Any:
    import torch
    import torch.distributed as dist

    import msa_icp_torch

    return msa_icp_torch.prepare_msa_icp_indexer(
        world_size=case.world_size,
        rank=dist.get_rank(),
        num_index_heads=NUM_HEADS,
        page_size=PAGE_SIZE,
        init_blocks=INIT_BLOCKS,
        local_blocks=LOCAL_BLOCKS,
        max_decode_tokens=case.tokens,
        max_decode_query_len=case.query_len,
        max_num_batched_tokens=case.tokens,
        max_num_seqs=len(case.lens),
        max_model_len=max(case.lens),
        num_sparse_layers=3,
        device=torch.device("cuda", torch.cuda.current_device()),
        route="direct",
        spin_limit=_SPIN_LIMIT,
    )


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


def _sent(case: Decode, arrays: dict[str, Any]) -> np.ndarray:
    """What all ranks must have sent here, by their score planes [W, hpr, T, 33]."""
    planes, counts = (check.host(arrays[name]) for name in ("scores", "counts"))
    planes = np.ascontiguousarray(planes[..., : case.columns])
    rows = check.oracle.select(planes, counts, INIT_BLOCKS, LOCAL_BLOCKS)
    return delivered(rows.reshape(case.world_size, case.heads_per_rank, case.tokens, ROW_WORDS))


def delivered(rows: np.ndarray) -> np.ndarray:
    """Every rank's rows for this one, through the collective."""
    import torch
    import torch.distributed as dist

    sent = torch.from_numpy(rows).cuda()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    return check.host(received)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
