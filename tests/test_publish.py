"""Rows for other ranks: where every word goes, with the threads of the kernels played in numpy."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import hard_rows
import lane_simulator
import numpy as np
import numpy.typing as npt
import oracle
import pytest
from lane_simulator import Lane, Words

from msa_icp_jax.comm import comm_shapes
from msa_icp_jax.geometry import Forced
from msa_icp_jax.ops._mosaic import peer_memory, peer_rows, publish
from msa_icp_jax.ops._mosaic.launch import Launch, Target
from msa_icp_jax.ops._mosaic.peer_rows import Owners, PeerRows
from msa_icp_jax.ops.arguments import Candidates
from msa_icp_jax.ops.select import kernel as select
from msa_icp_jax.ops.select import long_rows

Array = npt.NDArray[Any]

TOKENS, CAPACITY = 5, 7
RANK = 1
MEMORY = 0x7F31_FFFF_F000  # where the peers' memory begins; it crosses a multiple of 4 GiB


class Memory(Words):
    """Words that can be added to atomically."""

    def __add__(self, words: Any) -> Memory:
        at = super().__add__(words)
        return Memory(at.memory, at.at)

    def atomic_add(self, value: Lane) -> None:
        live = lane_simulator._masks[-1]
        np.add.at(self.memory, self.at[live], value.value[live])


class Peers:
    """All ranks' receive storage behind device addresses, and the stand-ins that reach it."""

    def __init__(self, world_size: int, form: str) -> None:
        shape = comm_shapes(world_size, CAPACITY)["tagged_recv" if form == "tagged" else "recv"]
        self.form, self.storage = form, np.zeros((world_size, *shape), np.int32)
        addresses = MEMORY + 4 * np.prod(shape) * np.arange(world_size)
        self.bases = addresses.astype(np.int64).view(np.int32).copy()

    def at_address(self, place: Words) -> Memory:
        low, high = (place.load().value.astype(np.int64), (place + 1).load().value.astype(np.int64))
        words, rest = np.divmod((high << 32 | low & 0xFFFFFFFF) - MEMORY, 4)
        assert not rest.any()
        return Memory(self.storage.reshape(-1), words)


@pytest.fixture
def peers_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(world_size: int, form: str) -> Peers:
        peers = Peers(world_size, form)
        for module in (peer_rows, publish, select):
            lane_simulator.simulate(monkeypatch, module)
            monkeypatch.setattr(
                module.lanes, "thread", lambda: Lane(np.arange(128, dtype=np.int32)), raising=False
            )
            monkeypatch.setattr(module.lanes, "warp_from", from_lane, raising=False)
            monkeypatch.setattr(module.lanes, "warp_barrier", contextlib.nullcontext, raising=False)
            monkeypatch.setattr(module.lanes, "when", lane_simulator._when, raising=False)
            monkeypatch.setattr(module.lanes, "fresh", lambda x: x, raising=False)
        memory = SimpleNamespace(
            at_address=peers.at_address,
            slot_from=lambda count: Lane(count.value % 3),
            load_flag=lambda place: place.load(),
            store_flag=lambda place, flag: place.store(Lane(np.int32(flag))),
            store_word=lambda place, word: place.store(word),
            store_tagged=store_tagged,
            poll=lambda look, ready, limit: look(),
        )
        monkeypatch.setattr(peer_rows, "peer_memory", memory)
        return peers

    return make


def from_lane(x: Lane, lane: Any) -> Lane:
    lane = np.broadcast_to(getattr(lane, "value", lane), (128,)).reshape(4, 32)
    return Lane(np.take_along_axis(x.value.reshape(4, 32), lane, axis=1).ravel())


def store_tagged(place: Words, word: Lane, tag: Lane) -> None:
    place.store(word)
    (place + 1).store(tag)


class Sender:
    """One rank's operands of the kernels that send rows."""

    def __init__(self, peers: Peers, counters: Array, slot: int) -> None:
        world_size, self.form = len(peers.storage), peers.form
        self.owners = Owners(world_size, CAPACITY, peers.form == "tagged", spin_limit=1)
        self._operands = [peers.bases, np.int32([RANK]), np.int32([slot]), counters.reshape(-1)]
        self.slot = self._operands[2]

    @property
    def operands(self) -> list[Memory]:
        return [Memory(x) for x in self._operands]

    def publish(self, rows: Array, looked_at: int | None = None) -> None:
        """Runs the publish kernel's pieces, the first of them perhaps with another slot."""
        slot = self.slot[0]
        for token in range(TOKENS):
            shared = np.zeros(8, np.int32)
            pieces = [publish._send] if self.owners.tagged else [publish._look_ahead, publish._send]
            for piece in pieces:
                is_first = piece is not pieces[-1]
                self.slot[0] = slot if looked_at is None or not is_first else looked_at
                memory = (Words(rows.reshape(-1)), self.operands, Words(shared))
                piece(self.owners, TOKENS, *memory, Lane(np.int32(token)))


def message(world_size: int) -> Array:
    rng = np.random.default_rng(world_size)
    return hard_rows.received_rows(world_size, 4 // world_size, TOKENS, rng)


@pytest.mark.parametrize("slot", [0, 1, 5, 2**31 - 1])
@pytest.mark.parametrize("world_size", [2, 4])
def test_flagged_rows(peers_of, world_size, slot):
    peers, rows, errors = peers_of(world_size, "legacy"), message(world_size), np.zeros(1, np.int32)
    Sender(peers, errors, slot).publish(rows)
    want = np.zeros_like(peers.storage)
    want[:, slot % 3, RANK, :, :TOKENS] = rows
    np.testing.assert_array_equal(peers.storage, want)
    assert errors[0] == 0


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_row_whose_flag_is_up_is_not_written(peers_of, world_size):
    peers, rows, errors = peers_of(world_size, "legacy"), message(world_size), np.zeros(1, np.int32)
    before = peers.storage
    before[0, 2, RANK, 0, 3] = 8  # the words of a row not merged yet, its flag among them
    before[1, 2, RANK, -1, 0, 32] = -1
    before[1, 2, 0, 0, 0, 32] = before[1, 1, RANK, 0, 0, 32] = 1  # another source's, another slot's
    want = before.copy()
    want[:, 2, RANK, :, :TOKENS] = rows
    want[0, 2, RANK, 0, 3] = 8
    want[1, 2, RANK, -1, 0] = before[1, 2, RANK, -1, 0]
    Sender(peers, errors, 2).publish(rows)
    np.testing.assert_array_equal(peers.storage, want)
    assert errors[0] == 2


@pytest.mark.parametrize("stale", [0, 1])
def test_a_slot_that_was_not_final_yet_is_looked_at_again(peers_of, stale):
    """The flag is looked at before the preceding kernel ends, which may have set the slot."""
    peers, rows, errors = peers_of(2, "legacy"), message(2), np.zeros(1, np.int32)
    peers.storage[:, stale, ..., 32] = 1  # of the slot looked at first
    peers.storage[0, 2, RANK, 0, 0, 32] = 1  # of the slot that counts
    Sender(peers, errors, 2).publish(rows, looked_at=stale)
    sent = peers.storage[:, 2, RANK, :, :TOKENS]
    assert errors[0] == 1
    assert not sent[0, 0, 0, :32].any()
    np.testing.assert_array_equal(sent[0, 0, 1:], rows[0, 0, 1:])
    np.testing.assert_array_equal(sent[0, 1], rows[0, 1])
    np.testing.assert_array_equal(sent[1], rows[1])
    assert not peers.storage[:, stale, ..., :32].any()


@pytest.mark.parametrize("slot", [0, 4, 2])
@pytest.mark.parametrize("world_size", [2, 4])
def test_tagged_rows(peers_of, world_size, slot):
    peers, rows = peers_of(world_size, "tagged"), message(world_size)
    rng = np.random.default_rng(0)
    counters = rng.integers(-(2**31), 2**31, (3, 4, CAPACITY)).astype(np.int32)
    counters[:, 0, :3] = [-1, 2**31 - 1, 0]
    before = counters.copy()
    Sender(peers, counters, slot).publish(rows)

    after = before.copy()
    after[slot % 3, :, :TOKENS] = oracle.next_generation(before[slot % 3, :, :TOKENS])
    np.testing.assert_array_equal(counters, after)
    by_owner = oracle.rows_by_owner(before[slot % 3, :, :TOKENS], world_size)
    want = np.zeros_like(peers.storage)
    want[:, slot % 3, RANK, :, :TOKENS], _ = oracle.tag_rows(rows, by_owner)
    np.testing.assert_array_equal(peers.storage, want)


@pytest.mark.parametrize("world_size", [2, 4])
def test_place_is_the_flat_row_of_the_storage(world_size):
    heads = 4 // world_size
    owners = Owners(world_size, CAPACITY, tagged=True, spin_limit=1)
    rows = np.arange(3 * 4 * CAPACITY).reshape(3, world_size, heads, CAPACITY)
    counters = np.arange(3 * 4 * CAPACITY).reshape(3, 4, CAPACITY)
    for slot, source, head, token in np.ndindex(3, world_size, 4, CAPACITY):
        part = slot * world_size + source
        assert owners.place(part, head, token) == rows[slot, source, head % heads, token]
        assert owners.counter(part, head, token) == counters[slot, head, token]


@pytest.mark.parametrize("count", [2, 4])
def test_a_rank_finds_its_own_storage_among_all(monkeypatch, count):
    lane_simulator.simulate(monkeypatch, peer_memory)
    monkeypatch.setattr(peer_memory, "_memory", lambda *words: [int(x.value[0]) for x in words])
    addresses = np.arange(100, 100 + 2 * count, dtype=np.int32)
    for rank in range(count):
        found = peer_memory.at_address_of(Words(addresses), Lane(np.int32(rank)), count)
        assert found == [100 + 2 * rank, 101 + 2 * rank]


# ---- rows straight from a select ----


class Found:
    """A select whose rows are found already: the oracle's message."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, world_size: int) -> None:
        self.rows = message(world_size)
        self._by_head = self.rows.reshape(4, TOKENS, 33)
        self.place: tuple[Lane, Lane] | None = None
        stock = select.Thread._select_row
        monkeypatch.setattr(select.Thread, "_bounds", lambda *_: None)
        monkeypatch.setattr(select.Thread, "_in_loop", lambda thread: thread)

        def select_row(thread: Any, token: Lane, head: Lane, *others: Any) -> None:
            words = self._by_head[head.value, token.value, thread.lane.value]
            selector = SimpleNamespace(
                leads=(thread.warp & (thread.params.warps_per_row - 1)).eq(0)
            )
            selector.select = lambda *_: (thread.shared + thread.lane).store(Lane(words))
            thread._selector = lambda: selector
            monkeypatch.setattr(select, "Row", lambda **_: None)
            stock(thread, token, head, SimpleNamespace())

        monkeypatch.setattr(select.Thread, "_select_row", select_row)

    def run(self, sender: Sender, warps_per_row: int, looked_at: int | None = None) -> None:
        """Every CTA selects its one row, without a guess."""
        params = select.SelectParams(
            TOKENS, 64, 1, 0, 1, False, warps_per_row, TOKENS * warps_per_row, True
        )
        slot = sender.slot[0]
        for cta in range(params.ctas):
            shared = np.full(4 * long_rows.SHARED_WORDS, 77, np.int32)
            number = Lane(np.int32(cta))
            lane, warp, mine = select._position(Words(shared), params)
            seen = mine + long_rows.SPARE_AT
            if not sender.owners.tagged:
                sender.slot[0] = slot if looked_at is None else looked_at
                peers = PeerRows(sender.owners, sender.operands, seen)
                peers.prepare()
                with lane_simulator._when((warp & (warps_per_row - 1)).eq(0)):
                    peers.look_ahead(*select._row_of(number, warp, params), lane)
                sender.slot[0] = slot
            rows = PeerRows(sender.owners, sender.operands, seen)
            zeros = Words(np.zeros(TOKENS * 4 * 64, np.int32))
            thread = select.Thread(params, zeros, zeros, Lane(np.int32(0)), rows, Words(shared))
            thread.select_row_of(number, [])
            assert (shared[long_rows.SHARED_WORDS * 4 // warps_per_row :] == 77).all()


@pytest.mark.parametrize("warps_per_row", [1, 4])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("looked_at", [None, 2])
def test_a_select_sends_its_flagged_rows(
    peers_of, monkeypatch, world_size, warps_per_row, looked_at
):
    """With a look ahead at the right slot, and at another one."""
    peers, errors = peers_of(world_size, "legacy"), np.zeros(1, np.int32)
    found = Found(monkeypatch, world_size)
    peers.storage[0, 1, RANK, 0, 3] = 8  # not merged yet, of the slot that counts
    peers.storage[:, 2, ..., 32] = 1  # of another one
    want = peers.storage.copy()
    want[:, 1, RANK, :, :TOKENS] = found.rows
    want[0, 1, RANK, 0, 3] = 8
    found.run(Sender(peers, errors, 4), warps_per_row, looked_at)
    np.testing.assert_array_equal(peers.storage, want)
    assert errors[0] == 1


@pytest.mark.parametrize("warps_per_row", [1, 4])
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_select_sends_its_tagged_rows(peers_of, monkeypatch, world_size, warps_per_row):
    peers, found = peers_of(world_size, "tagged"), Found(monkeypatch, world_size)
    counters = np.arange(-40, 3 * 4 * CAPACITY - 40, dtype=np.int32).reshape(3, 4, CAPACITY)
    want_counters = counters.copy()
    bumped = oracle.next_generation(counters[2, :, :TOKENS])
    want_counters[2, :, :TOKENS] = bumped
    want = np.zeros_like(peers.storage)
    by_owner = oracle.rows_by_owner(counters[2, :, :TOKENS].copy(), world_size)
    want[:, 2, RANK, :, :TOKENS], _ = oracle.tag_rows(found.rows, by_owner)
    found.run(Sender(peers, counters, 5), warps_per_row)
    np.testing.assert_array_equal(peers.storage, want)
    np.testing.assert_array_equal(counters, want_counters)


@pytest.mark.parametrize("tokens", [1, 132, 5000])
@pytest.mark.parametrize("columns", [15, 64, 256, 2048, 2049, 8192])
def test_every_row_that_is_sent_has_warps_of_its_own(tokens, columns):
    warps_per_row, ctas, direct = select._grid(tokens, columns, Target(sms=132), single=True)
    assert direct and ctas * 4 // warps_per_row == tokens * 4


def test_the_interpreter_is_refused():
    scores, counts = np.zeros((2, 4, 64), np.float32), np.zeros(2, np.int32)
    with pytest.raises(AssertionError, match="no device addresses"):
        select.select_and_publish_rows(
            scores,
            counts,
            peer_rows.Peers(np.zeros((2, 2), np.int32), 0, 0, 2, True, 1),
            np.zeros((3, 4, 2), np.int32),
            Candidates(Forced(0, 1), 1, 0),
            Launch(Target(sms=2, interpret=True)),
        )
