"""One rank of a group of processes: decodes and prefills through a real process group.

Run it under torchrun, with the page size as its argument. It exits with an error where a result
differs from the oracle's.
"""

from __future__ import annotations

import datetime
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from chains import OLD_WORD, make_plan, random_decode, random_prefill
from inputs import TIME_LIMIT
from torch_inputs import decode_step, prefill_local, prefill_window, prepare


def check(case, plan, output) -> None:
    """The rows of this rank's heads, and the mark on spare rows."""
    geometry = plan.geometry
    jax_plan = make_plan(geometry.world_size, geometry.page_size)
    heads = slice(plan.rank * geometry.heads_per_rank, (plan.rank + 1) * geometry.heads_per_rank)
    tokens = len(case.query)
    np.testing.assert_array_equal(output[:tokens].numpy(), case.answer(jax_plan)[:, heads])
    assert (output[tokens:] == OLD_WORD).all()


def decode(plan, comm, case, slot, tagged) -> torch.Tensor:
    step = decode_step(plan, case)
    plan.decode(*step, comm=comm, slot=slot, tagged=tagged, decode_query_len=case.query_len)
    return step.output


def main(page_size: int) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIME_LIMIT))
    world_size, rank = dist.get_world_size(), dist.get_rank()
    plan = prepare(world_size, page_size, rank)
    comm = plan.init_comm()
    case, nothing = (random_decode(n, 2, page_size) for n in ([300, 0, 4000, 1], []))
    for slot in range(7):  # both forms share the slots and the count, as layers would
        check(case, plan, decode(plan, comm, case, slot, tagged=False))
        check(case, plan, decode(plan, comm, case, slot, tagged=True))
        assert (decode(plan, comm, nothing, slot, tagged=True) == OLD_WORD).all()
    assert comm.errors.item() == 0
    assert comm.expected_generations[:, 0, 0].tolist() == [3, 2, 2]

    ragged = random_prefill([(40, 260, 300), (0, 0, 0), (57, 0, 57)], 128, page_size)
    window = prefill_window(plan, ragged)
    prefill_local(plan, ragged, window)
    plan.prefill_exchange(window.carrier, window.received)
    plan.prefill_merge(window.received, window.num_valid_pages, window.output)
    check(ragged, plan, window.output)

    group = dist.new_group(list(range(world_size)))
    other = prepare(world_size, page_size, rank, group=group)
    check(case, other, decode(other, other.init_comm(), case, 0, tagged=True))

    wrong = prepare(world_size, page_size, (rank + 1) % world_size)
    step = decode_step(wrong, case)
    with pytest.raises(ValueError, match="this process as rank"):
        wrong.decode(*step, comm=comm, slot=0, tagged=False, decode_query_len=2)
    dist.barrier()
    dist.destroy_process_group()
    print(f"rank {rank} of {world_size}: agreed")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]))
