"""Candidate rows stored straight into the memory of the ranks that own their heads, a warp a row.

Legacy rows: the flag must be 0 (the owner has merged the last row) before a word is stored, and it
becomes 1 behind the row. The wait for 0 comes before the wait for the preceding kernel, so that the
way to the peer and back is hidden behind that kernel. Therefore a kernel that stores rows lets the
next one in only after its own wait: when it starts, all that came before the last such kernel is
over, and with it whatever was sent to this slot.

Tagged rows wait for nothing: the generation goes up by one, and every word carries it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from msa_icp_jax.geometry import NUM_HEADS
from msa_icp_jax.ops._mosaic import lanes, peer_memory
from msa_icp_jax.ops._mosaic.lanes import Lane, Words, int32, where
from msa_icp_jax.ops._mosaic.launch import scalar_operand
from msa_icp_jax.rows import READY, ROW_WORDS, TAGGED_WORDS

if TYPE_CHECKING:
    from msa_icp_jax.arrays import Array, Int32

SEEN_WORDS = 2  # of shared memory, for each warp
_FREE = 0  # a flag: the owner has merged the row that was here


@dataclasses.dataclass(frozen=True)
class Owners:
    """The static parameters of rows that go to their owners.

    Attributes:
      world_size: W.
      capacity: C, rows that the receive storage has for every (slot, source, head).
      tagged: whether rows are tagged.
      spin_limit: looks at a flag before a legacy row is given up.
    """

    world_size: int
    capacity: int
    tagged: bool
    spin_limit: int

    @property
    def heads(self) -> int:
        """Heads that a rank owns."""
        return NUM_HEADS // self.world_size

    @property
    def row_words(self) -> int:
        """Words of a row in the storage."""
        return 2 * TAGGED_WORDS if self.tagged else ROW_WORDS

    def place(self, part: Any, head: Any, token: Any) -> Any:
        """Number of the row in its owner's storage; ints, arrays or lanes.

        The part of the storage is slot W + rank.
        """
        of_head = part * self.heads + (head & (self.heads - 1))
        return of_head * self.capacity + token

    def counter(self, part: Any, head: Any, token: Any) -> Any:
        """Number of the row's publish counter."""
        slot = part >> (self.world_size.bit_length() - 1)
        return (slot * NUM_HEADS + head) * self.capacity + token


@dataclasses.dataclass(frozen=True)
class Peers:
    """The receive storage of all ranks, as a kernel of one of them gets it.

    The addresses and the rank are the same in every call.

    Attributes:
      bases: int32 [W, 2], device addresses (low, high) of the ranks' storage, each an int32
        [3, W, hpr, C, 33], or tagged [3, W, hpr, C, 32, 2].
      rank: this rank, an int or a traced int32 scalar.
      slot: running count of calls, likewise; the slot is this mod 3.
      capacity: C.
      tagged: whether rows are tagged.
      spin_limit: looks at a peer's flag or row before it is given up, >= 1.
    """

    bases: Int32[Array, "W 2"]
    rank: int | Int32[Array, ""]
    slot: int | Int32[Array, ""]
    capacity: int
    tagged: bool
    spin_limit: int

    @property
    def owners(self) -> Owners:
        """What of it is static."""
        return Owners(self.bases.shape[0], self.capacity, self.tagged, self.spin_limit)

    def operands(self) -> list[jax.Array]:
        """What of it is not."""
        return [self.bases, scalar_operand(self.rank), scalar_operand(self.slot)]


class PeerRows:
    """Where one thread stores rows that go to their owners."""

    _part: Lane

    def __init__(self, owners: Owners, operands: Sequence[Words], seen: Words) -> None:
        """`prepare` has to follow.

        Args:
          owners: the static parameters.
          operands: addresses (low, high) of every owner's storage; the rank; the running count of
            calls; errors [1] for legacy rows, publish generations [3, 4, C] for tagged ones.
          seen: shared memory of this warp, `SEEN_WORDS`, for what `look_ahead` sees.
        """
        self.owners, self._seen = owners, seen
        self._bases, self._rank, self._slot, self._counters = operands

    def prepare(self) -> None:
        """Reads where the rows go.

        Before the wait for the preceding kernels the rank and the running count of calls may hold
        anything: both are kept in range.
        """
        source = lanes.load_fresh(self._rank) & (self.owners.world_size - 1)
        slot = peer_memory.slot_from(lanes.load_fresh(self._slot))
        # As one value: else the compiler holds the two.
        self._part = lanes.fresh(slot * self.owners.world_size + source)

    def look_ahead(self, token: Lane, head: Lane, lane: Lane) -> None:
        """Waits for the flag of a legacy row; leaves in `seen` for which row, and the flag."""
        flag = self._target(token, head) + (ROW_WORDS - 1)
        with lanes.when(lane.eq(0)):
            (last,) = peer_memory.poll(
                lambda: [peer_memory.load_flag(flag)],
                lambda x: x.eq(_FREE),
                self.owners.spin_limit,
            )
            self._seen.store(self._place(token, head))
            (self._seen + 1).store(last)
        lanes.warp_barrier()

    def store_row(self, token: Lane, head: Lane, lane: Lane, word: Lane) -> None:
        """Stores a row, of which each lane has a word; legacy rows need a look ahead before."""
        store = self._store_tagged if self.owners.tagged else self._store_flagged
        store(token, head, lane, word)

    def _store_flagged(self, token: Lane, head: Lane, lane: Lane, word: Lane) -> None:
        # The slot may be a result of the kernels that look_ahead did not wait for.
        is_another = self._seen.load().ne(self._place(token, head))
        lanes.warp_barrier()  # every lane has looked before one looks ahead anew
        with lanes.when(is_another):
            self.look_ahead(token, head, lane)
        is_free = (self._seen + 1).load().eq(_FREE)
        leads = lane.eq(0)
        with lanes.when(leads & (is_free ^ 1)):
            self._counters.atomic_add(int32(1))
        with lanes.when(is_free):
            target = self._target(token, head)
            peer_memory.store_word(target + lane, word)
            lanes.warp_barrier()
            with lanes.when(leads):
                peer_memory.store_flag(target + (ROW_WORDS - 1), READY)

    def _store_tagged(self, token: Lane, head: Lane, lane: Lane, word: Lane) -> None:
        counter = self._counters + self.owners.counter(self._part, head, token)
        following = counter.load() + 1
        tag = where(following.eq(0), 1, following)
        peer_memory.store_tagged(self._target(token, head) + lane * 2, word, tag)
        lanes.warp_barrier()  # every lane has read the counter
        with lanes.when(lane.eq(0)):
            counter.store(tag)

    def _place(self, token: Lane, head: Lane) -> Lane:
        return self.owners.place(self._part, head, token)

    def _target(self, token: Lane, head: Lane) -> Words:
        """The first word of a row at its owner."""
        base = self._bases + (head >> (self.owners.heads.bit_length() - 1)) * 2
        place = self._place(token, head).to_i64()
        return peer_memory.at_address(base) + place * self.owners.row_words
