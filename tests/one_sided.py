"""Ranks that exchange rows one-sidedly, on torch's streams: the kernels with a rank's buffers.

`Rank` holds what one rank owns and launches its publish (of rows that are there, or of those that a
select finds) and its merge; the receive storage and the addresses of all ranks' storage come from
the caller (one GPU, or peers' memory).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import hard_rows
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import oracle
import torch

from msa_icp_jax.comm import comm_shapes
from msa_icp_jax.geometry import Forced
from msa_icp_jax.ops._mosaic import aot, publish
from msa_icp_jax.ops._mosaic.launch import Launch, Target
from msa_icp_jax.ops._mosaic.peer_rows import Peers
from msa_icp_jax.ops.arguments import Candidates
from msa_icp_jax.ops.merge import kernel as merge
from msa_icp_jax.ops.select import kernel as select

Array = npt.NDArray[Any]

FORMS = ["legacy", "tagged"]
BEGIN, END = 1, 2
UNTOUCHED = -55
SPARE_ROWS = 2  # of the output, beyond the tokens
LONG = 1 << 24  # looks: some ten seconds
_LAUNCH = Launch(Target(), pdl=True)


def storage_shape(form: str, world_size: int, capacity: int) -> tuple[int, ...]:
    name = "tagged_recv" if form == "tagged" else "recv"
    return comm_shapes(world_size, capacity)[name]


@functools.cache
def lowered_publish(
    form: str, world_size: int, tokens: int, capacity: int, spin_limit: int
) -> aot.Lowered:
    """publish(rows, bases, errors or generations, rank, slot)."""

    def run(rows: Any, bases: Any, counters: Any, rank: Any, slot: Any) -> Any:
        peers = Peers(bases, rank, slot, capacity, form == "tagged", spin_limit)
        return publish.publish_rows(rows, peers, counters, _LAUNCH)

    counters = (3, 4, capacity) if form == "tagged" else (1,)
    shapes = [(world_size, 4 // world_size, tokens, 33), (world_size, 2), counters, (), ()]
    return aot.lower(run, *map(_words, shapes))


@functools.cache
def lowered_select(
    form: str, world_size: int, tokens: int, capacity: int, spin_limit: int, columns: int
) -> aot.Lowered:
    """publish(scores, counts, bases, errors or generations, rank, slot)."""

    def run(scores: Any, counts: Any, bases: Any, counters: Any, rank: Any, slot: Any) -> Any:
        peers = Peers(bases, rank, slot, capacity, form == "tagged", spin_limit)
        candidates = Candidates(Forced(BEGIN, END), 1, 0)
        return select.select_and_publish_rows(scores, counts, peers, counters, candidates, _LAUNCH)

    plane = jax.ShapeDtypeStruct((tokens, 4, columns), jnp.float32)
    counters = (3, 4, capacity) if form == "tagged" else (1,)
    return aot.lower(run, plane, *map(_words, [(tokens,), (world_size, 2), counters, (), ()]))


@functools.cache
def lowered_merge(
    form: str, world_size: int, tokens: int, capacity: int, spin_limit: int
) -> aot.Lowered:
    """merge(recv, counts, output, errors, slot, and for tagged rows the expected generations)."""

    def run(recv: Any, counts: Any, output: Any, errors: Any, slot: Any, *expected: Any) -> Any:
        return merge.merge_arriving_rows(
            recv,
            counts,
            output,
            errors,
            expected[0] if expected else None,
            Forced(BEGIN, END),
            _LAUNCH,
            slot=slot,
            spin_limit=spin_limit,
        )

    heads = 4 // world_size
    shapes = [storage_shape(form, world_size, capacity), (tokens,)]
    shapes += [(tokens + SPARE_ROWS, heads, 16), (1,), ()]
    if form == "tagged":
        shapes.append((3, heads, capacity))
    return aot.lower(run, *map(_words, shapes))


def _words(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


class Rank:
    """One rank's buffers and its two kernels.

    With `columns` the publish is a select of `scores`, otherwise it sends `rows`.
    """

    def __init__(
        self,
        rank: int,
        form: str,
        recv: torch.Tensor,
        addresses: Sequence[int],
        tokens: int,
        spin_limit: int = LONG,
        columns: int | None = None,
    ) -> None:
        _, self.world_size, self.heads, self.capacity = recv.shape[:4]
        self.form, self.number, self.recv, self.device = form, rank, recv, recv.device
        self._programs: list[aot.Compiled] = []
        self.rows = self._full(self.world_size, self.heads, tokens, 33)
        self.counts = self._full(tokens)
        self.output = self._full(tokens + SPARE_ROWS, self.heads, 16, fill=UNTOUCHED)
        self.errors, self.slot, self.rank = self._full(1), self._full(), self._full(fill=rank)
        self.generations = self._full(3, 4, self.capacity)
        self.expected = self._full(3, self.heads, self.capacity)
        bases = torch.tensor(list(addresses), dtype=torch.int64, device=self.device)
        self._bases = bases.view(torch.int32).view(self.world_size, 2)
        shape = (form, self.world_size, tokens, self.capacity, spin_limit)
        counters = self.generations if form == "tagged" else self.errors
        peers = (self._bases, counters, self.rank, self.slot)
        self.scores: torch.Tensor | None = None
        if columns is None:
            self.publish = self._bind(lowered_publish(*shape), self.rows, *peers)
        else:
            self.scores = torch.zeros((tokens, 4, columns), device=self.device)
            self.publish = self._bind(
                lowered_select(*shape, columns), self.scores, self.counts, *peers
            )
        received = [recv, self.counts, self.output, self.errors, self.slot]
        if form == "tagged":
            received.append(self.expected)
        self.merge = self._bind(lowered_merge(*shape), *received)

    def ends_clean(self, tokens: int) -> None:
        """No fault so far; no row waits to be merged; nothing behind the tokens was touched."""
        assert self.errors.item() == 0
        assert (self.output[tokens:] == UNTOUCHED).all()
        assert not self.recv[:, :, :, tokens:].any()
        if self.form == "legacy":
            assert not self.recv[..., 32].any()

    def _full(self, *shape: int, fill: int = 0) -> torch.Tensor:
        return torch.full(shape, fill, dtype=torch.int32, device=self.device)

    def _bind(self, lowered: aot.Lowered, *arguments: torch.Tensor) -> Any:
        assert not lowered.scratch
        torch.cuda.current_stream(self.device).synchronize()  # makes the context current
        program = aot.Compiled(lowered, [], lambda x: torch.tensor(x).to(self.device))
        launches = program.bind(arguments)
        self._programs.append(program)  # launches know its constants by their addresses alone

        def launch() -> None:
            aot.launch(launches, torch.cuda.current_stream(self.device).cuda_stream)

        return launch


def ranks_of(
    form: str,
    world_size: int,
    tokens: int,
    capacity: int,
    spin_limit: int = LONG,
    columns: int | None = None,
) -> list[Rank]:
    """All ranks on torch's current GPU."""
    shape = storage_shape(form, world_size, capacity)
    storage = [torch.zeros(shape, dtype=torch.int32, device="cuda") for _ in range(world_size)]
    addresses = [x.data_ptr() for x in storage]
    return [
        Rank(rank, form, recv, addresses, tokens, spin_limit, columns)
        for rank, recv in enumerate(storage)
    ]


# ---- ways through steps: an object with `ranks`, `load(rank, step)`, `keep(rank, step)` ----


def run_ahead(steps: Any, numbers: range) -> None:
    """A stream for each rank; all is queued at once, with random delays."""
    rng = np.random.default_rng(1)
    streams = [torch.cuda.Stream() for _ in steps.ranks]
    for step in numbers:
        for i in rng.permutation(len(steps.ranks)):
            rank = steps.ranks[i]
            with torch.cuda.stream(streams[i]):
                if rng.random() < 0.4:
                    torch.cuda._sleep(int(rng.integers(200_000)))
                steps.load(rank, step)
                rank.publish()
                if rng.random() < 0.2:
                    torch.cuda._sleep(int(rng.integers(100_000)))
                rank.merge()
                steps.keep(rank, step)


def replay(steps: Any, numbers: range) -> None:
    """A graph of one step, all publishes before any merge, replayed."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for rank in steps.ranks:
            rank.publish()
        for rank in steps.ranks:
            rank.merge()
    for step in numbers:
        for rank in steps.ranks:
            steps.load(rank, step)
        graph.replay()
        for rank in steps.ranks:
            steps.keep(rank, step)


def wrap_around(steps: Any) -> None:
    """Runs and checks nine steps of tagged rows whose generations wrap around and skip 0."""
    for rank in steps.ranks:
        for slot, start in enumerate([2**31 - 2, -3, -1]):
            rank.generations[slot], rank.expected[slot] = start, start
    for step in range(9):
        steps.run(step)
    steps.check()
    for rank in steps.ranks:
        assert rank.errors.item() == 0
        for counters in (rank.generations, rank.expected):
            assert counters[:, 0, 0].tolist() == [-(2**31) + 1, 1, 3]


def random_message(world_size: int, tokens: int, rng: np.random.Generator) -> Array:
    """Rows that one rank sends, int32 [W, hpr, T, 33] by owner."""
    return hard_rows.received_rows(world_size, 4 // world_size, tokens, rng)


def random_counts(tokens: int, rng: np.random.Generator) -> Array:
    return hard_rows.visible_counts(tokens, 400, 1, rng)


def selected(scores: Array, counts: Array, world_size: int) -> Array:
    """The rows that a select finds, int32 [W, hpr, T, 33] by owner."""
    return oracle.rows_by_owner(oracle.select(scores, counts, BEGIN, END), world_size)


def merged(messages: Sequence[Array], owner: int, counts: Array) -> Array:
    """The ids that a rank must choose from every rank's message."""
    return oracle.merge(np.stack([m[owner] for m in messages]), counts, BEGIN, END)
