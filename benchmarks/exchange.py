"""The exchange between GPUs: `torchrun --nproc-per-node 2 -m benchmarks.exchange --out FILE`.

One process a GPU. Every decode case runs at as many ranks as there are GPUs, and each figure is the
slower rank's. The stage is "chain": score, select, exchange and merge, by `decode` of the torch
plan on its direct route, as links of one CUDA graph. Backends: "nccl" (`all_to_all_single`),
"one-sided-legacy" and "one-sided-tagged" (the select stores its rows at their owners), and "none":
the same kernels, with the received rows being there; `added_us` is what others add to it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import check, results, timing
from benchmarks.__main__ import parser_of, refusing
from benchmarks.baselines import tensors
from benchmarks.cases import INIT_BLOCKS, LOCAL_BLOCKS, Decode, of_ranks
from benchmarks.report import line
from benchmarks.results import Refused
from benchmarks.stages import (
    GPU_STREAM_BYTES,
    POISON,
    Inputs,
    Pool,
    build,
    plan_options,
    written_like,
)
from benchmarks.timing import GraphRun, Times, in_graph
from msa_icp_jax import msa_icp_comm_layout
from msa_icp_jax.geometry import NUM_HEADS, TOPK
from msa_icp_jax.rows import ROW_WORDS, TAGGED_WORDS

# A bare checkout has the package beside this one; an installed one comes first.
sys.path.append(str(Path(__file__).parents[1] / "interop"))

BACKENDS = ("none", "nccl", "one-sided-legacy", "one-sided-tagged")
_LINKS, _RUNS = 96, 11  # of a graph: whole turns of the three slots
_SPIN_LIMIT = 1 << 24  # looks, some seconds
_READ = ("queries", "keys", "table", "lens", "counts", "scores")


class Rank:
    """A rank of the torch plan that decodes a case; all ranks read the same inputs."""

    def __init__(
        self,
        case: Decode,
        inputs: Inputs,
        rank: int,
        *,
        route: str = "direct",
        tagged: bool = True,
        storage: Any = None,
    ) -> None:
        import torch

        self.case, self._tagged = case, tagged
        self.plan = plan_of(case, rank, route)
        self.comm = self.plan.init_comm(storage)
        fixed = tensors(inputs.fixed)
        self.sets = [fixed | tensors(one_set) for one_set in inputs.sets]
        device, columns = fixed["keys"].device, self.plan.decode_score_shape()[2]
        for arrays in self.sets:
            arrays["scores"] = torch.empty(case.tokens, NUM_HEADS, columns, device=device)
        # Made once: what a decode costs the host is measured through this class.
        self._read = [[arrays[name] for name in _READ] for arrays in self.sets]
        shape = (case.tokens, NUM_HEADS // case.world_size, TOPK)
        self.output = torch.full(shape, POISON, dtype=torch.int32, device=device)

    def warm(self, addresses: Sequence[int] = ()) -> None:
        """Compiles decode; with the addresses of all ranks' storage it is one-sided."""
        if addresses:
            self.comm.connect(addresses)
        self.plan.warmup(
            self.sets[0]["keys"],
            table_width=self.sets[0]["table"].shape[1],
            batch_sizes=[len(self.case.lens)],
            query_lens=[self.case.query_len],
            comm=self.comm,
            tagged=self._tagged,
            prefill=False,
        )

    def decode(self, number: int, queries: Any = None) -> None:
        """A decode on the set of that number, in its slot, of these queries or its own."""
        own, *rest = self._read[number % len(self._read)]
        self.plan.decode(
            *(own if queries is None else queries, *rest, self.output),
            comm=self.comm,
            slot=number,
            tagged=self._tagged,
            decode_query_len=self.case.query_len,
        )

    def sent(self, number: int) -> np.ndarray:
        """The rows that a decode sent to every rank, by its score plane [W, hpr, T, 33]."""
        arrays, case = self.sets[number % len(self.sets)], self.case
        planes = np.ascontiguousarray(check.host(arrays["scores"])[..., : case.columns])
        rows = check.oracle.select(planes, check.host(arrays["counts"]), INIT_BLOCKS, LOCAL_BLOCKS)
        return rows.reshape(case.world_size, -1, case.tokens, ROW_WORDS)

    def check(self, received: np.ndarray) -> None:
        """Raises `check.Mismatch` unless these rows were merged, and no faults were counted."""
        counts = self.sets[0]["counts"]
        check.check_merged(self.case.tokens, received, counts, self.output, self.comm.errors)


def plan_of(case: Decode, rank: int, route: str) -> Any:
    import torch

    import msa_icp_torch

    return msa_icp_torch.prepare_msa_icp_indexer(
        rank=rank,
        device=torch.device("cuda", torch.cuda.current_device()),
        backend="mosaic",
        route=route,
        spin_limit=_SPIN_LIMIT,
        **plan_options(case),
    )


def payload(case: Decode, backend: str) -> int:
    """Bytes that a rank sends."""
    words = 2 * TAGGED_WORDS if backend == "one-sided-tagged" else ROW_WORDS
    rows = (case.world_size - 1) * NUM_HEADS // case.world_size * case.tokens
    return 0 if backend == "none" else rows * words * 4


def over(backend: str, case: Decode, inputs: Inputs, number: int) -> Times:
    """A rank's chain over a transport, checked."""
    if backend == "none":
        stage = build(case, "chain", "mosaic", "exact")
        shapes, structs = written_like(case), jax.eval_shape(lambda: inputs)
        given = shapes | structs.fixed | structs.sets[0]
        kernels = timing.kernels_of(stage, given)
        run = GraphRun(kernels, inputs, shapes, _LINKS)
        check.check_stage(case, "chain", "exact", run.run())
        return run.times(_RUNS)
    storage = storage_of(case) if backend.startswith("one-sided") else None
    tagged = backend != "one-sided-legacy"
    rank = Rank(case, inputs, number, tagged=tagged, storage=storage)
    rank.warm([] if storage is None else addresses_of(storage))
    for link in range(3):
        rank.decode(link)
    rank.check(delivered(rank.sent(2)))
    links = [functools.partial(rank.decode, link) for link in range(_LINKS)]
    found = in_graph(links, _RUNS, start_together)
    if check.host(rank.comm.errors).any():
        raise check.Mismatch(f"{case.name}: faults over {backend}")
    return found


def storage_of(case: Decode) -> Any:
    """Receive storage in memory that the other ranks' kernels reach."""
    import torch
    import torch.distributed._symmetric_memory as symmetric_memory

    layout = msa_icp_comm_layout(case.world_size, NUM_HEADS // case.world_size, case.tokens)
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


# ---- the program ----


def _ranks() -> tuple[int, int]:
    """This process's rank, and how many there are; `Refused` where it can't take part."""
    if importlib.util.find_spec("torch") is None:
        raise Refused("this Python has no torch; `make bench CUDA=13` sets up one that has")
    gpus = importlib.import_module("torch").cuda.device_count()
    if gpus < 2:
        raise Refused(f"it takes two Hopper GPUs of one host, torch sees {gpus}")
    ranks = os.environ.get("WORLD_SIZE", "") if "LOCAL_RANK" in os.environ else "no"
    if ranks not in ("2", "4"):
        raise Refused(f"it takes 2 or 4 processes of torchrun, there are {ranks}")
    return int(os.environ["LOCAL_RANK"]), int(ranks)


def _main(parsed: Any) -> int:
    rank, world_size = _ranks()
    results.prepare(parsed.out)
    import torch
    import torch.distributed as dist

    start = time.monotonic()
    torch.cuda.set_device(rank)
    jax.config.update("jax_default_device", jax.devices()[rank])
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    device, ceilings = f"{torch.cuda.get_device_name()} x{world_size}", timing.ceilings(torch)
    setting = results.Setting(device, str(torch.__version__), ceilings, parsed.commit)
    cases = of_ranks(world_size)
    pool = Pool(cases, GPU_STREAM_BYTES)
    for case in cases:
        spent: list[Any] = [time.monotonic() - start]
        dist.broadcast_object_list(spent)  # all ranks decide alike
        if spent[0] > parsed.budget_seconds:
            print(f"left out, out of time: {case.name}")
            continue
        inputs, alone = pool.inputs(case, "mosaic"), 0.0
        for backend in BACKENDS:
            every: list[Any] = [None] * world_size
            dist.all_gather_object(every, over(backend, case, inputs, rank))
            times = max(every, key=lambda times: times.median)
            alone = alone or times.median  # of "none", the first
            more = {"payload_bytes": payload(case, backend)}
            if backend != "none":
                more["added_us"] = round(times.median - alone, 3)
            key = (case.name, "chain", backend, "exact")
            row = setting.row(key, times, case.floor("chain").us(ceilings), **more)
            if rank == 0:
                print(line(row, {}), flush=True)
                results.save(parsed.out, [row])
    dist.destroy_process_group()
    return 0


def main(arguments: Sequence[str]) -> int:
    return refusing(_main, parser_of(__doc__).parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
