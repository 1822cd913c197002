"""One process of test_multigpu_torch.py: one rank on one GPU.

Usage, under torchrun: torch_process.py group|one-sided
It ends with an error where a result differs from the oracle's.
"""

from __future__ import annotations

import datetime
import itertools
import os
import sys
import time
from typing import Any

import hard_rows
import numpy as np
import one_sided
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
import torch_inputs
from chains import OLD_WORD, make_plan, random_decode, random_prefill
from inputs import TIME_LIMIT
from one_sided import Rank

TOKENS, CAPACITY = 29, 32
STEPS, INPUTS = 10_000, 64
COLUMNS = 256  # of the scores, where a select publishes


def main(what: str) -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", device_id=device, timeout=datetime.timedelta(seconds=TIME_LIMIT)
    )
    if what == "group":
        for page_size in (128, 256):
            through_group(device, page_size)
    else:
        ways = itertools.product(one_sided.FORMS, ("eager", "graph"), (None, COLUMNS))
        for form, launch, columns in ways:
            through_peers(device, form, launch, columns)
    dist.barrier()
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: right")
    dist.destroy_process_group()


# ---- the plan, over the process group ----


def through_group(device: torch.device, page_size: int) -> None:
    rank = dist.get_rank()
    plan = torch_inputs.prepare(2, page_size, rank, device=device, backend="auto")
    comm = plan.init_comm()
    for slot in range(7):
        case = random_decode([300, 0, 4000, 1], 2, page_size, seed=slot)
        for tagged in (False, True):
            step = torch_inputs.decode_step(plan, case)
            plan.decode(*step, comm=comm, slot=slot, tagged=tagged, decode_query_len=2)
            check(case, plan, step.output)
    assert comm.errors.item() == 0
    case = random_prefill([(40, 260, 300), (0, 0, 0), (57, 0, 57)], 128, page_size)
    window = torch_inputs.prefill_window(plan, case)
    torch_inputs.prefill_local(plan, case, window)
    plan.prefill_exchange(window.carrier, window.received)
    plan.prefill_merge(window.received, window.num_valid_pages, window.output)
    check(case, plan, window.output)


def check(case: Any, plan: Any, output: torch.Tensor) -> None:
    """The rows of this rank's heads, and the mark on spare rows."""
    geometry = plan.geometry
    answer = case.answer(make_plan(geometry.world_size, geometry.page_size))
    heads = slice(plan.rank * geometry.heads_per_rank, (plan.rank + 1) * geometry.heads_per_rank)
    tokens = len(case.query)
    np.testing.assert_array_equal(output[:tokens].cpu().numpy(), answer[:, heads])
    assert (output[tokens:] == OLD_WORD).all()


# ---- the one-sided kernels, through symmetric memory ----


def through_peers(device: torch.device, form: str, launch: str, columns: int | None) -> None:
    """Steps by a publish of rows, or with `columns` by a select that publishes."""
    rank = peer(device, form, columns)
    inputs = Inputs(rank)
    step = torch.zeros(1, dtype=torch.int64, device=device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)

    def one_step() -> None:
        inputs.load(step)
        rank.publish()
        rank.merge()
        wrong.add_(inputs.differences(step))

    run = one_step
    one_step()  # loads every kernel, and is step 0
    torch.cuda.synchronize()
    dist.barrier()
    if launch == "graph":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            one_step()
        run = graph.replay
    order = np.random.default_rng(0).integers(INPUTS, size=STEPS)  # the same on every rank
    random = np.random.default_rng(1 + rank.number)
    start = time.perf_counter()
    for number in range(1, STEPS):
        step.fill_(int(order[number]))
        rank.slot.fill_(number)
        if random.random() < 0.2:
            torch.cuda._sleep(int(random.integers(1, 100_000)))
        if random.random() < 0.002:
            time.sleep(random.random() * 0.005)
        run()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    dist.barrier()
    assert wrong.item() == 0, f"{wrong.item()} wrong ids"
    rank.ends_clean(TOKENS)
    kernel = "publish" if columns is None else "select and publish"
    print(f"{form}, {launch}, {kernel}: {STEPS} steps of {seconds / STEPS * 1e6:.0f} us")
    if form == "tagged":
        sent = [len(range(slot, STEPS, 3)) for slot in range(3)]
        assert rank.generations[:, 0, 0].tolist() == rank.expected[:, 0, 0].tolist() == sent


def peer(device: torch.device, form: str, columns: int | None) -> Rank:
    """This process's rank, its storage in memory that the others' kernels reach."""
    shape = one_sided.storage_shape(form, dist.get_world_size(), CAPACITY)
    storage = symmetric_memory.empty(*shape, dtype=torch.int32, device=device)
    handle = symmetric_memory.rendezvous(storage, dist.group.WORLD)
    storage.zero_()
    torch.cuda.synchronize()
    dist.barrier()
    number, addresses = dist.get_rank(), handle.buffer_ptrs
    return Rank(number, form, storage, addresses, TOKENS, columns=columns)


class Inputs:
    """Some steps' inputs and answers on the device."""

    def __init__(self, rank: Rank) -> None:
        random = np.random.default_rng(0)  # every rank makes every rank's inputs
        counts = [one_sided.random_counts(TOKENS, random) for _ in range(INPUTS)]
        if rank.scores is None:
            sent = messages = [
                [one_sided.random_message(rank.world_size, TOKENS, random) for _ in range(2)]
                for _ in range(INPUTS)
            ]
        else:
            sent = [
                [hard_rows.score_plane(TOKENS, COLUMNS, random) for _ in range(2)]
                for _ in range(INPUTS)
            ]
            messages = [
                [one_sided.selected(plane, c, rank.world_size) for plane in planes]
                for planes, c in zip(sent, counts, strict=True)
            ]
        answers = [
            one_sided.merged(m, rank.number, c) for m, c in zip(messages, counts, strict=True)
        ]
        self._rank = rank
        self._counts = torch.tensor(np.stack(counts)).to(rank.device)
        mine = np.stack([x[rank.number] for x in sent])
        self._sent = torch.tensor(mine).to(rank.device)
        self._answers = torch.tensor(np.stack(answers)).to(rank.device)

    def load(self, step: torch.Tensor) -> None:
        given = self._rank.rows if self._rank.scores is None else self._rank.scores
        torch.index_select(self._sent, 0, step, out=given[None])
        torch.index_select(self._counts, 0, step, out=self._rank.counts[None])

    def differences(self, step: torch.Tensor) -> torch.Tensor:
        want = self._answers.index_select(0, step)[0]
        return (self._rank.output[:TOKENS] != want).sum()


if __name__ == "__main__":
    main(sys.argv[1])
