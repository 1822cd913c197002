"""One-sided publish on Hopper: a warp a row, stored straight into its owner's memory.

Legacy rows: the flag must be 0 (the owner has merged the last row) before a word is stored, and it
becomes 1 behind the row. The wait for 0 comes before the wait for the preceding kernel, so that the
way to the peer and back is hidden behind that kernel. Therefore the next kernel is let in only
afterwards: when a publish starts, all that came before the last one is over, and with it whatever
was sent to this slot.

Tagged rows wait for nothing: the generation goes up by one, and every word carries it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from msa_icp_jax.geometry import NUM_HEADS
from msa_icp_jax.ops._mosaic import lanes, peer_memory
from msa_icp_jax.ops._mosaic.lanes import Lane, Words, int32, where
from msa_icp_jax.ops._mosaic.launch import CTA, Target, launch, writable, written
from msa_icp_jax.ops._mosaic.work_balance import load_fresh
from msa_icp_jax.rows import READY, ROW_WORDS, TAGGED_WORDS

_WARP, _WARPS = 32, 4
_FREE = 0  # a flag: the owner has merged the row that was here


@dataclasses.dataclass(frozen=True)
class Publish:
    """The static facts of one publish.

    Attributes:
      world_size: W.
      tokens: T.
      capacity: C, rows that the receive storage has for every (slot, source, head).
      spin_limit: looks at a flag before a legacy row is given up.
    """

    world_size: int
    tokens: int
    capacity: int
    spin_limit: int

    @property
    def heads(self) -> int:
        """Heads that a rank owns."""
        return NUM_HEADS // self.world_size

    def place(self, slot: Any, source: Any, head: Any, token: Any) -> Any:
        """Number of the row in its owner's storage; ints, arrays or lanes."""
        of_source = slot * self.world_size + source
        of_head = of_source * self.heads + (head & (self.heads - 1))
        return of_head * self.capacity + token


def publish_rows(
    rows: jax.Array,
    recv_bases: jax.Array,
    errors: jax.Array,
    *,
    rank: int | jax.Array,
    slot: int | jax.Array,
    capacity: int,
    spin_limit: int,
    enable_pdl: bool,
    target: Target,
) -> jax.Array:
    """Stores this rank's candidate rows in every owner's legacy receive storage.

    Args:
      rows: int32 [W, hpr, T, 33] by owner, T >= 1.
      recv_bases: int32 [W, 2], device addresses (low, high) of the owners' storage, an int32
        [3, W, hpr, C, 33] each.
      errors: int32 [1], grown by one per row that was not sent since its flag stayed up.
      rank: this rank, an int or a traced int32 scalar. It and the addresses are the same in every
        call.
      slot: running count of calls, likewise; the slot is this mod 3.
      capacity: C >= T.
      spin_limit: looks at a flag before its row is given up.
      enable_pdl: let the launch overlap the preceding kernel's end.
      target: the machine to build for.

    Returns:
      errors.
    """
    return _publish(rows, recv_bases, errors, False, rank, slot, capacity, spin_limit, enable_pdl,
                    target)  # fmt: skip


def publish_tagged_rows(
    rows: jax.Array,
    tagged_recv_bases: jax.Array,
    generations: jax.Array,
    *,
    rank: int | jax.Array,
    slot: int | jax.Array,
    enable_pdl: bool,
    target: Target,
) -> jax.Array:
    """Stores this rank's candidate rows in every owner's tagged receive storage.

    Args:
      rows: int32 [W, hpr, T, 33] by owner, T >= 1 (without tags).
      tagged_recv_bases: int32 [W, 2], device addresses (low, high) of the owners' storage, an int32
        [3, W, hpr, C, 32, 2] each.
      generations: int32 [3, 4, C], the publish counters.
      rank, slot, enable_pdl, target: as for `publish_rows`.

    Returns:
      generations, those of the rows sent advanced.
    """
    capacity = generations.shape[2]
    return _publish(rows, tagged_recv_bases, generations, True, rank, slot, capacity, 1, enable_pdl,
                    target)  # fmt: skip


def _publish(
    rows: jax.Array,
    bases: jax.Array,
    counters: jax.Array,
    tagged: bool,
    rank: int | jax.Array,
    slot: int | jax.Array,
    capacity: int,
    spin_limit: int,
    enable_pdl: bool,
    target: Target,
) -> jax.Array:
    world_size, _, tokens = rows.shape[:3]
    facts = Publish(world_size, tokens, capacity, spin_limit)
    body = _tagged_kernel if tagged else _legacy_kernel
    advanced = writable(counters)
    rank, slot = (jnp.asarray(x, jnp.int32).reshape(1) for x in (rank, slot))
    launch(
        functools.partial(body, facts=facts, pdl=enable_pdl),
        name="publish_tagged_rows" if tagged else "publish_rows",
        target=target,
        grid=(tokens,),
        scratch_types={"shared": plgpu.SMEM((_WARPS, 2), jnp.int32)},
    )(rows, bases, rank, slot, advanced)
    return written(advanced)


def _legacy_kernel(
    rows: Any,
    bases: Any,
    rank: Any,
    slot: Any,
    errors: Any,
    *,
    shared: Any,
    facts: Publish,
    pdl: bool,
) -> None:
    _in_lanes(_look_ahead, facts, rows, bases, rank, slot, errors, shared)
    _follow(pdl)
    _in_lanes(_send, facts, rows, bases, rank, slot, errors, shared)


def _tagged_kernel(
    rows: Any,
    bases: Any,
    rank: Any,
    slot: Any,
    generations: Any,
    *,
    shared: Any,
    facts: Publish,
    pdl: bool,
) -> None:
    _follow(pdl)
    _in_lanes(_send_tagged, facts, rows, bases, rank, slot, generations, shared)


def _follow(pdl: bool) -> None:
    """Waits for the preceding kernels, and only then lets the next one start."""
    if pdl:
        plgpu.griddepcontrol_wait()
        plgpu.griddepcontrol_launch_dependents()


def _in_lanes(piece: Any, facts: Publish, *refs: Any) -> None:
    """Runs `piece` thread by thread."""

    @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * len(refs), plgpu.Layout.WG_SPLAT))
    def run(_: Any, *arguments: Any) -> None:
        *refs, token = arguments
        rows, bases, rank, slot, counters, shared = (Words.of(ref) for ref in refs)
        # Before the wait for the preceding kernels either may hold anything: both stay in range.
        source = load_fresh(rank) & (facts.world_size - 1)
        row = _Row(facts, bases, source, load_fresh(slot), lanes.scalar(token))
        piece(row, rows, counters, shared)

    run(*refs, lax.axis_index(CTA))


class _Row:
    """The row of a warp: a CTA has a token, a warp a head."""

    def __init__(self, facts: Publish, bases: Words, rank: Lane, slot: Lane, token: Lane) -> None:
        self.token = token
        thread = lanes.thread()
        self.lane = thread & (_WARP - 1)
        self.head = lanes.warp_from(thread >> 5, 0)
        self.slot = peer_memory.slot_from(slot)
        self.number = self.head * facts.tokens + token  # among those to be sent
        self.counter = (self.slot * NUM_HEADS + self.head) * facts.capacity + token
        self.place = facts.place(self.slot, rank, self.head, token).to_i64()
        self.spin_limit = facts.spin_limit
        self._base = bases + (self.head >> (facts.heads.bit_length() - 1)) * 2

    def target(self, words: int) -> Words:
        """The row's first word on its owner, where a row has `words` words."""
        return peer_memory.at_address(self._base) + self.place * words

    def source(self, rows: Words) -> Words:
        """The first word of the row to be sent."""
        return rows + self.number.to_i64() * ROW_WORDS


def _look_ahead(row: _Row, rows: Words, errors: Words, shared: Words) -> None:
    """Waits for the row's flag; leaves in shared memory for which row, and the flag."""
    del rows, errors
    flag = row.target(ROW_WORDS) + (ROW_WORDS - 1)
    with lanes.when(row.lane.eq(0)):
        (last,) = peer_memory.poll(
            lambda: [peer_memory.load_flag(flag)], lambda x: x.eq(_FREE), row.spin_limit
        )
        (shared + row.head * 2).store(row.place.to_i32())
        (shared + row.head * 2 + 1).store(last)
    lanes.warp_barrier()


def _send(row: _Row, rows: Words, errors: Words, shared: Words) -> None:
    # The slot may be a result of the kernels that _look_ahead did not wait for.
    with lanes.when((shared + row.head * 2).load().ne(row.place.to_i32())):
        _look_ahead(row, rows, errors, shared)
    is_free = (shared + row.head * 2 + 1).load().eq(_FREE)
    leads = row.lane.eq(0)
    with lanes.when(leads & (is_free ^ 1)):
        errors.atomic_add(int32(1))
    with lanes.when(is_free):
        target = row.target(ROW_WORDS)
        peer_memory.store_word(target + row.lane, (row.source(rows) + row.lane).load())
        lanes.warp_barrier()
        with lanes.when(leads):
            peer_memory.store_flag(target + (ROW_WORDS - 1), READY)


def _send_tagged(row: _Row, rows: Words, generations: Words, shared: Words) -> None:
    del shared
    counter = generations + row.counter
    following = counter.load() + 1
    tag = where(following.eq(0), 1, following)
    target = row.target(2 * TAGGED_WORDS) + row.lane * 2
    peer_memory.store_tagged(target, (row.source(rows) + row.lane).load(), tag)
    lanes.warp_barrier()  # every lane has read the counter
    with lanes.when(row.lane.eq(0)):
        counter.store(tag)
