"""The one-sided publish kernels: where every word goes, with the threads played in numpy."""

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
from msa_icp_jax.ops.publish import mosaic

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
        self.storage = np.zeros((world_size, *shape), np.int32)
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
        monkeypatch.setattr(mosaic, "where", lane_simulator._where)
        monkeypatch.setattr(mosaic, "int32", lambda x: Lane(np.int32(x)))
        lanes = SimpleNamespace(
            thread=lambda: Lane(np.arange(128, dtype=np.int32)),
            warp_from=lambda x, lane: Lane(np.repeat(x.value.reshape(4, 32)[:, lane], 32)),
            warp_barrier=contextlib.nullcontext,
            when=lane_simulator._when,
        )
        monkeypatch.setattr(mosaic, "lanes", lanes)
        memory = SimpleNamespace(
            at_address=peers.at_address,
            slot_from=lambda count: Lane(count.value % 3),
            load_flag=lambda place: place.load(),
            store_flag=lambda place, flag: place.store(Lane(np.int32(flag))),
            store_word=lambda place, word: place.store(word),
            store_tagged=store_tagged,
            poll=lambda look, ready, limit: look(),
        )
        monkeypatch.setattr(mosaic, "peer_memory", memory)
        return peers

    return make


def store_tagged(place: Words, word: Lane, tag: Lane) -> None:
    place.store(word)
    (place + 1).store(tag)


def publish(
    peers: Peers,
    rows: Array,
    counters: Array,
    slot: int,
    *pieces: Any,
    looked_at: int | None = None,
) -> None:
    """Runs the pieces for every token, the first of several perhaps with another slot."""
    world_size = len(peers.storage)
    facts = mosaic.Publish(world_size, TOKENS, CAPACITY, spin_limit=1)
    for token in range(TOKENS):
        shared = np.zeros(8, np.int32)
        for piece in pieces:
            early = looked_at if piece is not pieces[-1] and looked_at is not None else slot
            position = (Lane(np.int32(x)) for x in (RANK, early, token))
            row = mosaic._Row(facts, Words(peers.bases), *position)
            piece(row, Words(rows.reshape(-1)), Memory(counters.reshape(-1)), Words(shared))


def message(world_size: int) -> Array:
    rng = np.random.default_rng(world_size)
    return hard_rows.received_rows(world_size, 4 // world_size, TOKENS, rng)


@pytest.mark.parametrize("slot", [0, 1, 5, 2**31 - 1])
@pytest.mark.parametrize("world_size", [2, 4])
def test_flagged_rows(peers_of, world_size, slot):
    peers, rows, errors = peers_of(world_size, "legacy"), message(world_size), np.zeros(1, np.int32)
    publish(peers, rows, errors, slot, mosaic._look_ahead, mosaic._send)
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
    publish(peers, rows, errors, 2, mosaic._look_ahead, mosaic._send)
    np.testing.assert_array_equal(peers.storage, want)
    assert errors[0] == 2


@pytest.mark.parametrize("stale", [0, 1])
def test_a_slot_that_was_not_final_yet_is_looked_at_again(peers_of, stale):
    """The flag is looked at before the preceding kernel ends, which may have set the slot."""
    peers, rows, errors = peers_of(2, "legacy"), message(2), np.zeros(1, np.int32)
    peers.storage[:, stale, ..., 32] = 1  # of the slot looked at first
    peers.storage[0, 2, RANK, 0, 0, 32] = 1  # of the slot that counts
    publish(peers, rows, errors, 2, mosaic._look_ahead, mosaic._send, looked_at=stale)
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
    publish(peers, rows, counters, slot, mosaic._send_tagged)

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
    facts = mosaic.Publish(world_size, TOKENS, CAPACITY, spin_limit=1)
    numbers = np.arange(3 * 4 * CAPACITY).reshape(3, world_size, heads, CAPACITY)
    for slot, source, head, token in np.ndindex(3, world_size, 4, CAPACITY):
        want = numbers[slot, source, head % heads, token]
        assert facts.place(slot, source, head, token) == want
