"""One process of several that share a GPU: a rank whose storage the others reach by CUDA IPC."""

from __future__ import annotations

import traceback
from typing import Any

import numpy as np
import one_sided
import torch
from inputs import TIME_LIMIT
from one_sided import Rank

TOKENS, CAPACITY, STEPS = 13, 16, 20


def main(rank: int, world_size: int, mailboxes: list[Any], barrier: Any, said: Any) -> None:
    """Runs both forms and says what came of it."""
    try:
        for form in one_sided.FORMS:
            _run(rank, world_size, form, mailboxes, barrier)
        said.put((rank, "right"))
    except BaseException:
        said.put((rank, traceback.format_exc()))
        barrier.abort()  # the others need not wait


def _run(rank: int, world_size: int, form: str, mailboxes: list[Any], barrier: Any) -> None:
    shape = one_sided.storage_shape(form, world_size, CAPACITY)
    storage = torch.zeros(shape, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    for peer, mailbox in enumerate(mailboxes):
        if peer != rank:
            mailbox.put((rank, storage))
    every = dict(mailboxes[rank].get(timeout=TIME_LIMIT) for _ in range(world_size - 1))
    every[rank] = storage
    addresses = [every[peer].data_ptr() for peer in range(world_size)]
    this = Rank(rank, form, storage, addresses, TOKENS)
    random = np.random.default_rng(0)  # every rank makes every rank's inputs
    barrier.wait(TIME_LIMIT)
    for step in range(STEPS):
        counts = one_sided.random_counts(TOKENS, random)
        messages = [one_sided.random_message(world_size, TOKENS, random) for _ in range(world_size)]
        this.rows.copy_(torch.tensor(messages[rank]))
        this.counts.copy_(torch.tensor(counts))
        this.slot.fill_(step)
        this.publish()
        this.merge()
        found = this.output[:TOKENS].cpu().numpy()
        np.testing.assert_array_equal(found, one_sided.merged(messages, rank, counts))
    barrier.wait(TIME_LIMIT)  # nobody stores any more, nor frees what others still look at
    this.ends_clean(TOKENS)
    del every
    barrier.wait(TIME_LIMIT)
