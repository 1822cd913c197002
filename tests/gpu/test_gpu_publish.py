"""The one-sided exchange on one GPU: W ranks with a receive storage each.

All ranks in one process, and a process a rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra torch)")

import one_sided  # noqa: E402
import one_sided_process  # noqa: E402
import oracle  # noqa: E402
from inputs import TIME_LIMIT  # noqa: E402
from one_sided import FORMS, Rank  # noqa: E402

Array = npt.NDArray[Any]

TOKENS, CAPACITY = 13, 16
SHORT = 200  # looks, for rows that never come


def ranks_of(form: str, world_size: int, spin_limit: int = one_sided.LONG) -> list[Rank]:
    return one_sided.ranks_of(form, world_size, TOKENS, CAPACITY, spin_limit)


class Steps:
    """Random inputs of many steps on the device, and what they must give."""

    def __init__(self, ranks: list[Rank], steps: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        world_size = len(ranks)
        self.ranks, self.steps = ranks, steps
        self.counts = [one_sided.random_counts(TOKENS, rng) for _ in range(steps)]
        self.messages = [
            [one_sided.random_message(world_size, TOKENS, rng) for _ in ranks] for _ in range(steps)
        ]
        self._device_counts = torch.tensor(np.stack(self.counts)).cuda()
        self._device_messages = torch.tensor(np.array(self.messages)).cuda()
        heads = 4 // world_size
        self.outputs = torch.zeros(
            (steps, world_size, TOKENS, heads, 16), dtype=torch.int32, device="cuda"
        )

    def load(self, rank: Rank, step: int) -> None:
        """Puts a step's inputs into a rank's buffers, on the current stream."""
        rank.rows.copy_(self._device_messages[step, rank.number])
        rank.counts.copy_(self._device_counts[step])
        rank.slot.fill_(step)

    def keep(self, rank: Rank, step: int) -> None:
        self.outputs[step, rank.number].copy_(rank.output[:TOKENS])

    def want(self, step: int, rank: Rank) -> Array:
        return one_sided.merged(self.messages[step], rank.number, self.counts[step])

    def check(self, steps: range | None = None) -> None:
        torch.cuda.synchronize()
        found = self.outputs.cpu().numpy()
        for step in steps or range(self.steps):
            for rank in self.ranks:
                np.testing.assert_array_equal(
                    found[step, rank.number], self.want(step, rank), f"{step} {rank.number}"
                )

    def run(self, step: int, publishers: list[Rank] | None = None) -> None:
        """One step, all publishes before any merge."""
        for rank in self.ranks:
            self.load(rank, step)
        for rank in self.ranks if publishers is None else publishers:
            rank.publish()
        for rank in self.ranks:
            rank.merge()
            self.keep(rank, step)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_publishes_before_merges(form, world_size):
    steps = Steps(ranks_of(form, world_size), 8)
    for step in range(8):
        steps.run(step)
    steps.check()
    for rank in steps.ranks:
        rank.ends_clean(TOKENS)
        if form == "tagged":
            want = np.zeros((3, CAPACITY), np.int32)
            want[:, :TOKENS] = [[3], [3], [2]]
            assert (rank.generations.cpu().numpy() == want[:, None]).all()
            assert (rank.expected.cpu().numpy() == want[:, None]).all()


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_a_stream_for_each_rank(form, world_size):
    """All steps are queued at once, so ranks run ahead of each other as the protocol lets them."""
    ranks = ranks_of(form, world_size)
    Steps(ranks, 3).run(0)  # loads every kernel: that may wait for the whole GPU
    steps = Steps(ranks, 60)
    torch.cuda.synchronize()
    one_sided.run_ahead(steps, range(3, 60))
    steps.check(range(3, 60))
    for rank in ranks:
        rank.ends_clean(TOKENS)


@pytest.mark.parametrize("form", FORMS)
def test_a_graph_takes_new_slots_and_rows(form):
    ranks = ranks_of(form, 2)
    steps = Steps(ranks, 20)
    steps.run(0)
    torch.cuda.synchronize()
    one_sided.replay(steps, range(1, 20))
    steps.check()
    for rank in ranks:
        rank.ends_clean(TOKENS)


@pytest.mark.parametrize("world_size", [2, 4])
def test_generations_wrap_around_and_skip_zero(world_size):
    one_sided.wrap_around(Steps(ranks_of("tagged", world_size), 9))


@pytest.mark.parametrize("form", FORMS)
def test_a_rank_that_does_not_send(form):
    """Its rows are faults, nothing hangs, and the next step is right."""
    ranks = ranks_of(form, 4, SHORT)
    steps = Steps(ranks, 5)
    for step in range(3):
        steps.run(step)
    steps.run(3, publishers=[r for r in ranks if r.number != 2])
    torch.cuda.synchronize()
    assert [rank.errors.item() for rank in ranks] == [TOKENS] * 4
    assert (steps.outputs[3] == -1).all()
    steps.run(4)
    steps.check(range(3))
    steps.check(range(4, 5))
    assert [rank.errors.item() for rank in ranks] == [TOKENS] * 4
    if form == "legacy":
        assert all((rank.recv[..., 32] == 0).all() for rank in ranks)
    else:
        assert all((rank.expected[0, :, :TOKENS] == 2).all() for rank in ranks)


def test_a_late_tagged_row_is_never_taken_for_the_next_one():
    ranks = ranks_of("tagged", 2, SHORT)
    steps = Steps(ranks, 4)
    steps.run(0, publishers=ranks[:1])
    ranks[1].publish()  # too late: both have given it up
    for step in range(1, 4):
        steps.run(step)
    steps.check(range(1, 4))
    assert [rank.errors.item() for rank in ranks] == [2 * TOKENS] * 2
    assert (steps.outputs[0] == -1).all()


def test_a_row_is_kept_until_it_is_merged():
    """Legacy: a second publish waits for flag 0; given up, it changes nothing and is counted."""
    ranks = ranks_of("legacy", 2, SHORT)
    steps = Steps(ranks, 4)
    for rank in ranks:
        steps.load(rank, 0)
        rank.publish()
    ranks[0].rows.fill_(9)
    ranks[0].publish()
    torch.cuda.synchronize()
    assert [rank.errors.item() for rank in ranks] == [4 * TOKENS, 0]
    for rank in ranks:
        rank.merge()
        steps.keep(rank, 0)
    for step in range(1, 4):
        steps.run(step)
    steps.check()
    assert [rank.errors.item() for rank in ranks] == [4 * TOKENS, 0]


def test_a_flag_that_stays_up_costs_only_its_row():
    ranks = ranks_of("legacy", 2, SHORT)
    ranks[1].recv[1, 0, 1, 5, 32] = 7  # neither 0 nor 1
    steps = Steps(ranks, 2)
    for step in range(2):
        steps.run(step)
    steps.check(range(1))
    want = np.stack([steps.want(1, rank) for rank in ranks])
    want[1, 5, 1] = -1
    np.testing.assert_array_equal(steps.outputs[1].cpu().numpy(), want)
    assert [rank.errors.item() for rank in ranks] == [1, 1]  # not sent, not received
    assert not ranks[1].recv[1, 0, 1, 5].any()


def test_a_second_tagged_row_over_one_not_merged_is_a_fault():
    ranks = ranks_of("tagged", 2, SHORT)
    steps = Steps(ranks, 2)
    for rank in [*ranks, ranks[1]]:
        steps.load(rank, 0)
        rank.publish()
    for rank in ranks:
        rank.merge()
        steps.keep(rank, 0)
    steps.run(1)
    steps.check(range(1, 2))
    assert (steps.outputs[0] == -1).all()
    assert [rank.errors.item() for rank in ranks] == [2 * TOKENS] * 2


@pytest.mark.parametrize("word", [0, 15, 16, 31])
def test_a_word_of_another_generation_is_a_fault(word):
    ranks = ranks_of("tagged", 4, SHORT)
    steps = Steps(ranks, 1)
    for rank in ranks:
        steps.load(rank, 0)
        rank.publish()
    ranks[3].recv[0, 2, 0, 4, word, 1] ^= 1 << 20
    for rank in ranks:
        rank.merge()
        steps.keep(rank, 0)
    want = np.stack([steps.want(0, rank) for rank in ranks])
    want[3, 4, 0] = -1
    np.testing.assert_array_equal(steps.outputs[0].cpu().numpy(), want)
    assert [rank.errors.item() for rank in ranks] == [0, 0, 0, 1]


@pytest.mark.parametrize("form", FORMS)
def test_many_tokens_take_a_warp_each(form):
    """So many (token, head) pairs that a warp merges each, and CTAs outnumber what fits at once."""
    tokens = 3000
    shape = one_sided.storage_shape(form, 2, tokens)
    storage = [torch.zeros(shape, dtype=torch.int32, device="cuda") for _ in range(2)]
    addresses = [x.data_ptr() for x in storage]
    ranks = [Rank(i, form, recv, addresses, tokens) for i, recv in enumerate(storage)]
    rng = np.random.default_rng(0)
    for step in range(4):
        counts = one_sided.random_counts(tokens, rng)
        messages = [one_sided.random_message(2, tokens, rng) for _ in ranks]
        for rank, message in zip(ranks, messages, strict=True):
            rank.rows.copy_(torch.tensor(message))
            rank.counts.copy_(torch.tensor(counts))
            rank.slot.fill_(step)
            rank.publish()
        for rank in ranks:
            rank.merge()
            found = rank.output[:tokens].cpu().numpy()
            np.testing.assert_array_equal(found, one_sided.merged(messages, rank.number, counts))
    for rank in ranks:
        rank.ends_clean(tokens)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_what_lies_in_the_storage(form, world_size):
    """Every row, word for word, where the contract has it."""
    ranks = ranks_of(form, world_size)
    steps = Steps(ranks, 3)
    for step in range(3):
        for rank in ranks:
            steps.load(rank, step)
            rank.publish()
    for rank in ranks:
        for step in range(3):
            want = np.stack([m[rank.number] for m in steps.messages[step]])
            if form == "tagged":
                want, _ = oracle.tag_rows(want, np.zeros(want.shape[:-1], np.int32))
            found = rank.recv[step, :, :, :TOKENS].cpu().numpy()
            np.testing.assert_array_equal(found, want)
        assert not rank.recv[:, :, :, TOKENS:].any()


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_process_for_each_rank(world_size):
    """The processes take turns on the GPU, so a step takes milliseconds; nothing is timed."""
    context = torch.multiprocessing.get_context("spawn")
    mailboxes = [context.Queue() for _ in range(world_size)]
    barrier, said = context.Barrier(world_size), context.Queue()
    processes = [
        context.Process(
            target=one_sided_process.main, args=(rank, world_size, mailboxes, barrier, said)
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        results = dict(said.get(timeout=TIME_LIMIT) for _ in processes)
        assert results == dict.fromkeys(range(world_size), "right")
    finally:
        for process in processes:
            process.join(10)
            process.kill()
