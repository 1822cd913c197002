"""One rank of processes that share a GPU and reach each other's memory by CUDA IPC."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from chains import make_plan, random_decode
from torch_inputs import OLD_WORD, decode_step, prepare

CALLS = 7
CASE = ([300, 0, 4000, 1], 2)  # lengths, query length


def run(rank: int, world_size: int, page_size: int, queues: list[Any], barrier: Any) -> None:
    """Decodes through all slots in both forms; raises where an answer is not the oracle's."""
    device = torch.device("cuda", 0)
    options = {"backend": "auto", "precision": "exact", "route": "direct"}
    plan = prepare(world_size, page_size, rank, device=device, spin_limit=1 << 24, **options)
    case = random_decode(*CASE, page_size)
    step, comm = decode_step(plan, case), plan.init_comm()
    requests, width = step.block_table.shape
    plan.warmup(
        step.index_k, table_width=width, batch_sizes=[requests], query_lens=[2], prefill=False
    )
    for peer in range(world_size):
        if peer != rank:
            queues[peer].put((rank, comm.storage))
    storages = dict([(rank, comm.storage)] + [queues[rank].get() for _ in range(world_size - 1)])
    comm.connect([storages[peer].data_ptr() for peer in range(world_size)])
    plan.check_comm(comm)
    torch.cuda.synchronize()
    barrier.wait()

    heads = slice(rank * plan.geometry.heads_per_rank, (rank + 1) * plan.geometry.heads_per_rank)
    want = case.answer(make_plan(world_size, page_size))[:, heads]
    for slot in range(CALLS):
        for tagged in (False, True):
            step.output.fill_(OLD_WORD)
            plan.decode(*step, comm=comm, slot=slot, tagged=tagged, decode_query_len=2)
            found = step.output.cpu().numpy()
            np.testing.assert_array_equal(found[: len(want)], want)
            assert (found[len(want) :] == OLD_WORD).all()
    assert comm.errors.item() == 0
    assert comm.expected_generations[:, 0, 0].tolist() == [3, 2, 2]
    barrier.wait()  # nobody may free memory that a peer still writes
