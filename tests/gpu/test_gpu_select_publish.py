"""A select that sends its rows to their owners, on one GPU: W ranks with a receive storage each."""

from __future__ import annotations

from typing import Any

import hard_rows
import numpy as np
import numpy.typing as npt
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra torch)")

import one_sided  # noqa: E402
import oracle  # noqa: E402
from one_sided import FORMS, Rank  # noqa: E402

Array = npt.NDArray[Any]

SHORT = 200  # looks, for rows that never come


def ranks_of(
    form: str, world_size: int, tokens: int, columns: int, spin_limit: int = one_sided.LONG
) -> list[Rank]:
    return one_sided.ranks_of(form, world_size, tokens, tokens + 3, spin_limit, columns)


class Steps:
    """Random scores of a few steps on the device, and what they must give."""

    def __init__(self, ranks: list[Rank], number: int) -> None:
        rng = np.random.default_rng(number)
        tokens, _, columns = ranks[0].scores.shape
        self.ranks = ranks
        self.counts = [hard_rows.visible_counts(tokens, columns, 1, rng) for _ in range(number)]
        scores = [[hard_rows.score_plane(tokens, columns, rng) for _ in ranks] for _ in self.counts]
        self.messages = [
            [one_sided.selected(plane, counts, len(ranks)) for plane in planes]
            for planes, counts in zip(scores, self.counts, strict=True)
        ]
        self._scores = torch.tensor(np.array(scores)).cuda()
        self._counts = torch.tensor(np.array(self.counts)).cuda()
        self.outputs: dict[tuple[int, int], Any] = {}

    def load(self, rank: Rank, step: int) -> None:
        which = step % len(self.counts)
        rank.scores.copy_(self._scores[which, rank.number])
        rank.counts.copy_(self._counts[which])
        rank.slot.fill_(step)

    def keep(self, rank: Rank, step: int) -> None:
        self.outputs[step, rank.number] = rank.output[: len(rank.counts)].clone()

    def run(self, step: int) -> None:
        """One step, all publishes before any merge."""
        for rank in self.ranks:
            self.load(rank, step)
            rank.publish()
        for rank in self.ranks:
            rank.merge()
            self.keep(rank, step)

    def want(self, step: int, rank: int) -> Array:
        which = step % len(self.counts)
        return one_sided.merged(self.messages[which], rank, self.counts[which])

    def check(self) -> None:
        torch.cuda.synchronize()
        for (step, rank), found in self.outputs.items():
            want = self.want(step, rank)
            np.testing.assert_array_equal(found.cpu().numpy(), want, f"{step} {rank}")


SHAPES = [
    pytest.param(13, 64, id="a-warp-a-row"),
    pytest.param(32, 256, id="256-columns"),
    pytest.param(32, 255, id="odd-columns"),
    pytest.param(132, 1024, id="a-token-an-sm"),
    pytest.param(5, 8192, id="four-warps-a-row"),
    pytest.param(300, 128, id="many-short"),
    pytest.param(300, 1000, id="many"),
    pytest.param(700, 1024, id="more-than-fit-at-once"),
    pytest.param(140, 4096, id="many-long"),
]


@pytest.mark.parametrize(("tokens", "columns"), SHAPES)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_what_lies_in_the_storage(form, world_size, tokens, columns):
    """Every row, word for word, where the contract has it; then it is merged."""
    ranks = ranks_of(form, world_size, tokens, columns)
    steps = Steps(ranks, 3)
    for step in range(3):
        for rank in ranks:
            steps.load(rank, step)
            rank.publish()
    torch.cuda.synchronize()
    for rank in ranks:
        for step in range(3):
            want = np.stack([m[rank.number] for m in steps.messages[step]])
            if form == "tagged":
                want, _ = oracle.tag_rows(want, np.zeros(want.shape[:-1], np.int32))
            found = rank.recv[step, :, :, :tokens].cpu().numpy()
            np.testing.assert_array_equal(found, want)
        assert not rank.recv[:, :, :, tokens:].any()
    for step in range(3):
        for rank in ranks:
            steps.load(rank, step)
            rank.merge()
            steps.keep(rank, step)
    for step in range(3, 6):
        steps.run(step)
    steps.check()
    for rank in ranks:
        rank.ends_clean(tokens)


@pytest.mark.parametrize(("tokens", "columns"), [(13, 128), (5, 8192), (140, 256)])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("form", FORMS)
def test_a_stream_for_each_rank(form, world_size, tokens, columns):
    """All steps are queued at once, so ranks run ahead of each other as the protocol lets them."""
    ranks = ranks_of(form, world_size, tokens, columns)
    steps = Steps(ranks, 3)
    steps.run(0)  # loads every kernel: that may wait for the whole GPU
    torch.cuda.synchronize()
    one_sided.run_ahead(steps, range(1, 60))
    steps.check()
    for rank in ranks:
        rank.ends_clean(tokens)


@pytest.mark.parametrize("form", FORMS)
def test_a_graph_takes_new_slots_and_scores(form):
    ranks = ranks_of(form, 2, 13, 300)
    steps = Steps(ranks, 5)
    steps.run(0)
    torch.cuda.synchronize()
    one_sided.replay(steps, range(1, 20))
    steps.check()
    for rank in ranks:
        rank.ends_clean(13)


def test_generations_wrap_around_and_skip_zero():
    one_sided.wrap_around(Steps(ranks_of("tagged", 4, 300, 64), 3))


@pytest.mark.parametrize(("tokens", "columns"), [(13, 128), (5, 8192), (140, 256), (140, 4096)])
def test_a_row_is_kept_until_it_is_merged(tokens, columns):
    """Legacy: a second publish waits for flag 0; given up, it changes nothing and is counted."""
    ranks = ranks_of("legacy", 2, tokens, columns, SHORT)
    steps = Steps(ranks, 4)
    for rank in ranks:
        steps.load(rank, 0)
        rank.publish()
    ranks[0].scores.fill_(9)
    ranks[0].publish()
    torch.cuda.synchronize()
    assert [rank.errors.item() for rank in ranks] == [4 * tokens, 0]
    for rank in ranks:
        rank.merge()
        steps.keep(rank, 0)
    for step in range(1, 4):
        steps.run(step)
    steps.check()
    assert [rank.errors.item() for rank in ranks] == [4 * tokens, 0]


@pytest.mark.parametrize(("tokens", "columns"), [(13, 128), (300, 128)])
def test_a_flag_that_stays_up_costs_only_its_row(tokens, columns):
    ranks = ranks_of("legacy", 2, tokens, columns, SHORT)
    ranks[1].recv[1, 0, 1, 5, 32] = 7  # neither 0 nor 1
    steps = Steps(ranks, 2)
    for step in range(2):
        steps.run(step)
    want = steps.want(1, 1)
    want[5, 1] = -1
    np.testing.assert_array_equal(steps.outputs.pop((1, 1)).cpu().numpy(), want)
    steps.check()
    assert [rank.errors.item() for rank in ranks] == [1, 1]  # not sent, not received
    assert not ranks[1].recv[1, 0, 1, 5].any()
