"""Owner merge on Hopper: one launch, a warpgroup a (token, head), or a warp where there are many.

A *warp* holds all W x 16 candidates and takes 16 rounds: the largest order key, the lowest id that
has it, and out with every candidate of that id, so that a block which several ranks hold counts
once and with its best score. That is the least work.

A *warpgroup* is quicker from start to end, since nothing in it goes round by round. Its entries are
unsigned 64-bit integers whose order is the order wanted; 0 is no candidate.

1. Sorted by id, the largest score of an id first: an entry's place is the number of entries before
   it, counted against all of them, two or four threads an entry.
2. An entry behind another of its id is a duplicate and drops out. The others are ranked by the
   contract's order, again by counting; ranks below 16 win.

Either way a winner's place in the output is the number of winners with a lower id.

Rows come in one of two ways. `merge_rows` takes one slot's rows that a collective has delivered:
nothing waits, and a flag (or one of a row's tags) that is not the expected one is a protocol fault.
`merge_arriving_rows` takes the whole receive storage, into which other GPUs are storing: it looks
at a row again and again until it is there, and calls it a fault after `spin_limit` looks.
`merge_rows_at_address` is the same for storage that XLA does not know: it gets its address.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from msa_icp_jax.geometry import MAX_BLOCKS, NUM_HEADS, TOPK, Forced, cdiv
from msa_icp_jax.ops._mosaic import lanes, peer_memory
from msa_icp_jax.ops._mosaic.lanes import Context, Lane, Memory, Value, Words, i64, int32, where
from msa_icp_jax.ops._mosaic.launch import (
    CTA,
    Launch,
    Target,
    scalar_operand,
    writable,
    written,
)
from msa_icp_jax.ops._mosaic.peer_rows import Peers
from msa_icp_jax.ops._mosaic.top16 import count_better, flip_sign, order_key_of_word
from msa_icp_jax.ops.merge import config
from msa_icp_jax.rows import FORCED_KEY, INVALID_KEY, NO_BLOCK, READY, ROW_WORDS, TAGGED_WORDS

if TYPE_CHECKING:
    from msa_icp_jax.arrays import Array, Int32

_WARP, _WARPS = 32, 4
_NO_ID = 0x7FFFFFFF
_INDEX_BITS = 6  # of an entry's number, in the low bits of an entry: at most 64 entries

# Shared memory of the warps of a row, in words; the tables are read 16 bytes at a time.
_TABLE_WORDS = 2 * (1 << _INDEX_BITS)
_ARRIVED_AT = 0  # the received entries
_SORTED_AT = _ARRIVED_AT + _TABLE_WORDS
_PICKED_AT = _SORTED_AT + _TABLE_WORDS  # ids of the winners
_FAILED_AT = _PICKED_AT + TOPK  # ballots of the threads whose row did not arrive
_SHARED_WORDS = _FAILED_AT + _WARPS


@dataclasses.dataclass(frozen=True)
class MergeParams:
    """The static parameters of one merge.

    Attributes:
      sources: W.
      heads: heads that this rank owns.
      tokens: T.
      begin, end: forced blocks at the start, and visible ones at the end.
      tagged, prefill: as in the contract.
      warps_per_row: warps that share a (token, head), 1 or 4.
      spin_limit: looks at a row that is still to arrive; 0: all rows are there, one slot's alone.
      capacity: rows that the receive storage has for every (slot, source, head).
      by_address: whether the storage is given by its address.
      lasts: whether the rows lie in storage that outlives the call: then flags go back to 0 and
        faults are counted.
    """

    sources: int
    heads: int
    tokens: int
    begin: int
    end: int
    tagged: bool
    prefill: bool
    warps_per_row: int
    spin_limit: int
    capacity: int
    by_address: bool = False
    lasts: bool = True

    @property
    def waits(self) -> bool:
        """Whether rows may still have to arrive."""
        return self.spin_limit > 0

    @property
    def row_words(self) -> int:
        """Words of a received row."""
        return 2 * TAGGED_WORDS if self.tagged else ROW_WORDS

    @property
    def rows(self) -> int:
        """(token, head) pairs."""
        return self.tokens * self.heads

    @property
    def rows_at_once(self) -> int:
        """(token, head) pairs that a warpgroup works on side by side."""
        return _WARPS // self.warps_per_row

    @property
    def entries(self) -> int:
        """Candidates of a (token, head)."""
        return self.sources * TOPK

    @property
    def clears(self) -> bool:
        """Whether flags are set back to 0."""
        return self.lasts and not (self.tagged or self.prefill)


def merge_rows(
    recv: Int32[Array, "W hpr C *row"],
    num_valid_pages: Int32[Array, " T"],
    output: Int32[Array, "out_rows hpr 16"] | None,
    errors: Int32[Array, " 1"] | None,
    generations: Int32[Array, "hpr T"] | None,
    forced: Forced,
    launch: Launch,
    *,
    prefill: bool,
) -> tuple[
    Int32[Array, "out_rows hpr 16"], Int32[Array, "W hpr C *row"], Int32[Array, " 1"] | None
]:
    """Merges every source rank's candidates of the owned heads.

    Args:
      recv: int32 [W, hpr, >= T, 33], or tagged [W, hpr, >= T, 32, 2].
      num_valid_pages: int32 [T], T >= 1.
      output: int32 [>= T, hpr, 16] to write into; None: a fresh one of T rows.
      errors: int32 [1], grown by one per failed (source, head, token) row; None: the rows are this
        call's alone, so that nothing is counted, and flags stay.
      generations: int32 [hpr, T], the tags that tagged rows must carry; None for legacy rows.
      forced: blocks that always win.
      launch: how to launch.
      prefill: a row without visible blocks answers [0, -1, ...]; flags stay.

    Returns:
      (output, recv with its flags cleared unless tagged, prefill or without errors, errors).
    """
    params = MergeParams(
        sources=recv.shape[0],
        heads=recv.shape[1],
        tokens=num_valid_pages.shape[0],
        begin=forced.begin,
        end=forced.end,
        tagged=generations is not None,
        prefill=prefill,
        warps_per_row=_warps_per_row(num_valid_pages.shape[0] * recv.shape[1], launch.target),
        spin_limit=0,
        capacity=recv.shape[2],
        lasts=errors is not None,
    )
    tags = [] if generations is None else [generations]
    return _merge(params, recv, num_valid_pages, tags, output, errors, launch)


def merge_arriving_rows(
    recv: Int32[Array, "3 W hpr C *row"],
    num_valid_pages: Int32[Array, " T"],
    output: Int32[Array, "out_rows hpr 16"] | None,
    errors: Int32[Array, " 1"],
    expected_generations: Int32[Array, "3 hpr C"] | None,
    forced: Forced,
    launch: Launch,
    *,
    slot: int | Int32[Array, ""],
    spin_limit: int,
) -> tuple[
    Int32[Array, "out_rows hpr 16"],
    Int32[Array, "3 W hpr C *row"],
    Int32[Array, " 1"],
    Int32[Array, "3 hpr C"] | None,
]:
    """Merges a decode step's rows while the source ranks are still storing them.

    Args:
      recv: int32 [3, W, hpr, C >= T, 33], or tagged [3, W, hpr, C, 32, 2]: the receive storage.
      num_valid_pages: int32 [T], T >= 1.
      output: int32 [>= T, hpr, 16] to write into; None: a fresh one of T rows.
      errors: int32 [1], grown by one per failed (source, head, token) row.
      expected_generations: int32 [3, hpr, C], the merge's counters; None for legacy rows.
      forced, launch: as for `merge_rows`.
      slot: running count of calls, an int or a traced int32 scalar; the slot is this mod 3.
      spin_limit: looks at a row before it is given up, >= 1.

    Returns:
      (output, recv with the flags of legacy rows cleared, errors, expected_generations with those
      of the rows merged advanced).
    """
    params = MergeParams(
        sources=recv.shape[1],
        heads=recv.shape[2],
        tokens=num_valid_pages.shape[0],
        begin=forced.begin,
        end=forced.end,
        tagged=expected_generations is not None,
        prefill=False,
        warps_per_row=_warps_per_row(num_valid_pages.shape[0] * recv.shape[2], launch.target),
        spin_limit=spin_limit,
        capacity=recv.shape[3],
    )
    counters = [] if expected_generations is None else [writable(expected_generations)]
    others = [scalar_operand(slot), *counters]
    output, recv, grown = _merge(params, recv, num_valid_pages, others, output, errors, launch)
    assert grown is not None  # as they came
    advanced = written(counters[0]) if counters else None
    return output, recv, grown, advanced


class Generations(NamedTuple):
    """The counters of tagged rows.

    Attributes:
      published: int32 [3, 4, C], of the rows last sent.
      expected: int32 [3, hpr, C], of the rows last merged.
    """

    published: Int32[Array, "3 4 C"]
    expected: Int32[Array, "3 hpr C"]


def merge_rows_at_address(
    peers: Peers,
    num_valid_pages: Int32[Array, " T"],
    output: Int32[Array, "out_rows hpr 16"] | None,
    errors: Int32[Array, " 1"],
    generations: Generations | None,
    forced: Forced,
    launch: Launch,
) -> tuple[Int32[Array, "out_rows hpr 16"], Int32[Array, " 1"], Generations | None]:
    """`merge_arriving_rows` of storage that lies outside XLA's memory.

    XLA sees neither the rows nor that other ranks' kernels write them. What keeps this kernel
    behind the one that sends this rank's rows, and in front of the next one of that kind, is a
    buffer that all of them write in place: `errors` of legacy rows, the publish counters of tagged
    ones, which this kernel leaves as they are.

    Args:
      peers: the ranks' storage; this rank's is merged.
      num_valid_pages, output, errors, forced, launch: as for `merge_arriving_rows`.
      generations: the counters of tagged rows, those published as the sending kernel left them;
        None for legacy rows.

    Returns:
      (output, errors, generations with the expected ones of the rows merged advanced).
    """
    assert not launch.target.interpret, "the interpreter has no device addresses"
    world_size, tokens = peers.bases.shape[0], num_valid_pages.shape[0]
    heads = NUM_HEADS // world_size
    params = MergeParams(
        sources=world_size,
        heads=heads,
        tokens=tokens,
        begin=forced.begin,
        end=forced.end,
        tagged=peers.tagged,
        prefill=False,
        warps_per_row=_warps_per_row(tokens * heads, launch.target),
        spin_limit=peers.spin_limit,
        capacity=peers.capacity,
        by_address=True,
    )
    counters = [] if generations is None else [writable(x) for x in generations]
    bases, *whose = peers.operands()
    others = [*whose, *counters]
    output, _, grown = _merge(params, bases, num_valid_pages, others, output, errors, launch)
    assert grown is not None  # as they came
    return output, grown, Generations(*map(written, counters)) if counters else None


def _warps_per_row(rows: int, target: Target) -> int:
    """Warps that share a (token, head)."""
    return 1 if rows >= target.sms * config.CONFIG.warp_rows_per_sm else _WARPS


def _merge(
    params: MergeParams,
    recv: Int32[Array, "*storage"],
    num_valid_pages: Int32[Array, " T"],
    others: Sequence[Any],
    output: Int32[Array, "out_rows hpr 16"] | None,
    errors: Int32[Array, " 1"] | None,
    launch: Launch,
) -> tuple[Int32[Array, "out_rows hpr 16"], Int32[Array, "*storage"], Int32[Array, " 1"] | None]:
    """Launches.

    `others` are the tags of tagged rows, or the slot and the counters of arriving ones; the rank
    comes first where `recv` are addresses.
    """
    ctas = cdiv(params.rows, params.rows_at_once)
    body = functools.partial(_kernel, params=params, pdl=launch.pdl)
    count = errors
    if launch.target.interpret:
        from msa_icp_jax.ops.merge import interpret  # on demand: only tests need it

        ctas = min(ctas, launch.target.sms)
        body = functools.partial(interpret.merge, params=params, ctas=ctas)
        count = None if errors is None else interpret.no_faults(params)
    received = [writable(recv)] if params.clears and not params.by_address else []
    faults = [] if count is None else [writable(count)]
    fresh = jax.ShapeDtypeStruct((params.tokens, params.heads, TOPK), jnp.int32)
    into = [] if output is None else [writable(output)]
    found = launch.kernel(
        body,
        name="merge_arriving_rows" if params.waits else "merge_rows",
        grid=(ctas,),
        out_type=() if into else fresh,
        scratch_types={"shared": plgpu.SMEM((_WARPS, _SHARED_WORDS), jnp.int32)},
    )(received[0] if received else recv, num_valid_pages, *others, *faults, *into)
    if errors is not None:
        count = written(faults[0])
        errors = errors + count.sum(dtype=jnp.int32) if launch.target.interpret else count
    return (
        written(into[0]) if into else found,
        written(received[0]) if received else recv,
        errors,
    )


def _kernel(
    recv: jax.Ref,
    counts: jax.Ref,
    *others: jax.Ref,
    shared: jax.Ref,
    params: MergeParams,
    pdl: bool,
) -> None:
    *given, output = others
    if pdl:
        plgpu.griddepcontrol_launch_dependents()
        plgpu.griddepcontrol_wait()
    faults = given.pop() if params.lasts else None
    _merge_inline(recv, counts, given, output, faults, shared, lax.axis_index(CTA), params)


def _merge_inline(
    recv: jax.Ref,
    counts: jax.Ref,
    others: list[jax.Ref],
    output: jax.Ref,
    faults: jax.Ref | None,
    shared: jax.Ref,
    turn: jax.Array,
    params: MergeParams,
) -> None:
    refs = [recv, counts, output, shared, *others, *([faults] if params.lasts else [])]

    @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * len(refs), plgpu.Layout.WG_SPLAT))
    def merge(_: Context, *arguments: Memory | Value) -> None:
        *refs, turn = arguments
        recv, counts, output, shared, *tags = (Words.of(ref) for ref in refs)
        faults = tags.pop() if params.lasts else None
        if params.by_address:
            recv = peer_memory.at_address_of(recv, tags.pop(0).load(), params.sources)
        if params.waits:
            slot = peer_memory.slot_from(tags.pop(0).load()).to_i64()
            slot = slot * (params.heads * params.capacity)
            recv = recv + slot * (params.sources * params.row_words)
            tags = [counters + slot for counters in tags[-1:]]
        _Thread(params).merge(recv, counts, tags, output, faults, shared, lanes.scalar(turn))

    merge(*refs, turn)


@dataclasses.dataclass
class _Candidate:
    """One received candidate, and the thread's share of the work on it."""

    index: Lane  # 16 source + place in the row
    word: Lane
    block: Lane
    failed: Lane  # whether its row did not arrive (tagged: its own two words)


class _Thread:
    """The program of one thread.

    In a warpgroup the `parts` threads of an entry lie side by side and compare it with every
    parts-th pair of entries; in a warp a lane holds one or two candidates.
    """

    def __init__(self, params: MergeParams) -> None:
        self.params = params
        threads = _WARP * params.warps_per_row
        self.parts = max(1, threads // params.entries)
        self.held = max(1, params.entries // threads)
        thread = lanes.thread() & (_WARP * _WARPS - 1)
        self.lane = thread & (_WARP - 1)
        self.warp = lanes.warp_from(thread >> 5, 0)
        self.number = thread & (threads - 1)  # among those of the row
        self.part = self.number & (self.parts - 1)

    def merge(
        self,
        recv: Words,
        counts: Words,
        tags: list[Words],
        output: Words,
        faults: Words | None,
        shared: Words,
        turn: Lane,
    ) -> None:
        params = self.params
        row = turn * params.rows_at_once
        if params.warps_per_row == 1:
            row = row + self.warp
            shared = shared + self.warp * _SHARED_WORDS
        with lanes.when(row < params.rows):
            shift = params.heads.bit_length() - 1
            token, head = row >> shift, row & (params.heads - 1)
            count = (counts + token).load()
            counter = tags[0] + self._counter(head, token) if tags else None
            tag = self._tag(counter) if counter else None
            received = [self._receive(i, recv, head, token, tag) for i in range(self.held)]
            self._share_failures(received, shared)
            with lanes.when(self.number < TOPK):
                (shared + (_PICKED_AT + self.number)).store(int32(_NO_ID))
            if params.warps_per_row > 1:
                by_id = self._share_by_id(received[0], count, shared)
            self._barrier()

            failed = self._failed(shared)
            if faults:
                self._report(failed, faults)
            if params.waits and counter and tag:
                with lanes.when(self.number.eq(0)):
                    counter.store(tag)
            if params.warps_per_row > 1:
                block, wins = self._pick_by_counting(received[0].index, by_id, count, shared)
            else:
                block, wins = self._pick_in_rounds(received, count, shared)
            self._barrier()
            any_failed = functools.reduce(Lane.__or__, failed)
            self._store(block, wins, count, any_failed, output + row.to_i64() * TOPK, shared)
            if params.clears:
                self._clear_flags(recv, head, token)
            self._barrier()  # before the next row uses the shared memory

    def _barrier(self) -> None:
        lanes.warpgroup_barrier() if self.params.warps_per_row > 1 else lanes.warp_barrier()

    def _entry_index(self, which: int) -> Lane:
        """Number of the entry that this thread works on, or of one that it holds."""
        shift = self.parts.bit_length() - 1
        return (self.number >> shift) + which * _WARP

    def _row(self, recv: Words, source: Lane, head: Lane, token: Lane) -> Words:
        """The first word of a received row."""
        of_head = source * self.params.heads + head
        row = of_head.to_i64() * self.params.capacity + token.to_i64()
        return recv + row * self.params.row_words

    def _counter(self, head: Lane, token: Lane) -> Lane:
        """Where a row's tag lies, or the counter that it follows."""
        return head * (self.params.capacity if self.params.waits else self.params.tokens) + token

    def _tag(self, counter: Words) -> Lane:
        """The tag that a row must carry."""
        if not self.params.waits:
            return counter.load()
        following = counter.load() + 1
        return where(following.eq(0), 1, following)

    def _receive(
        self, which: int, recv: Words, head: Lane, token: Lane, tag: Lane | None
    ) -> _Candidate:
        """Loads a candidate as soon as its row is there, or else says that it is not."""
        index = self._entry_index(which)
        row, place = self._row(recv, index >> 4, head, token), index & (TOPK - 1)
        if tag is None:
            flag = self._load_flag(row + 2 * TOPK)
            return _Candidate(
                index, (row + place).load(), (row + (place + TOPK)).load(), flag.ne(READY)
            )
        word, word_tag, block, block_tag = self._load_tagged(row + place * 2, TAGGED_WORDS, tag)
        return _Candidate(index, word, block, word_tag.ne(tag) | block_tag.ne(tag))

    def _load_flag(self, place: Words) -> Lane:
        if not self.params.waits:
            return place.load()
        (flag,) = peer_memory.poll(
            lambda: [peer_memory.load_flag(place)], lambda x: x.eq(READY), self.params.spin_limit
        )
        return flag

    def _load_tagged(self, place: Words, apart: int, tag: Lane) -> tuple[Lane, ...]:
        """(word, tag) at a place and at another `apart` words further on."""
        places = place, place + apart
        if not self.params.waits:
            return tuple(x for at in places for x in at.load_vector(lanes.i32(), 2))
        return peer_memory.poll(
            lambda: [x for at in places for x in peer_memory.load_tagged(at)],
            lambda _word, word_tag, _block, block_tag: word_tag.eq(tag) & block_tag.eq(tag),
            self.params.spin_limit,
        )

    def _share_failures(self, received: list[_Candidate], shared: Words) -> None:
        for i, x in enumerate(received):
            ballot = lanes.warp_ballot(x.failed)
            with lanes.when(self.lane.eq(0)):
                slot = self.warp & (self.params.warps_per_row - 1)
                (shared + (_FAILED_AT + slot + i)).store(ballot)

    def _failed(self, shared: Words) -> list[Lane]:
        """Whether each source's row failed."""
        params = self.params
        threads = TOPK * self.parts  # of a source, numbered as in the ballots
        ballots = range(params.warps_per_row * self.held)
        words = [(shared + (_FAILED_AT + i)).load() for i in ballots]
        found = []
        for source in range(params.sources):
            first, stop = source * threads, (source + 1) * threads
            if threads < _WARP:
                half = words[first // _WARP] & (0xFFFF << (first % _WARP))
            else:
                half = functools.reduce(Lane.__or__, words[first // _WARP : stop // _WARP])
            found.append(half.ne(0))
        return found

    def _report(self, failed: list[Lane], faults: Words) -> None:
        number = functools.reduce(Lane.__add__, (x.to_i32() for x in failed))
        with lanes.when(self.number.eq(0) & (number > 0)):
            faults.atomic_add(number)

    def _clear_flags(self, recv: Words, head: Lane, token: Lane) -> None:
        with lanes.when(self.number < self.params.sources):
            flag = self._row(recv, self.number, head, token) + 2 * TOPK
            if self.params.waits:
                # Nothing is handed over but the place: the row's words have been loaded, since what
                # they say went through shared memory and a barrier. So it takes no release, which
                # would hold up the kernel's end.
                peer_memory.store_word(flag, int32(0))
            else:
                flag.store(int32(0))

    def _valid(self, x: _Candidate, count: Lane) -> Lane:
        return (x.block >= 0) & (x.block < lanes.minimum(count, MAX_BLOCKS))

    def _forced(self, block: Lane, count: Lane) -> Lane:
        return (block < self.params.begin) | (block >= count - self.params.end)

    def _pick_in_rounds(
        self, received: list[_Candidate], count: Lane, shared: Words
    ) -> tuple[Lane, Lane]:
        """A warp's way; returns (block, whether there is one), one winner a lane."""
        keys = []
        for x in received:
            key = where(self._forced(x.block, count), FORCED_KEY, order_key_of_word(x.word))
            keys.append(where(self._valid(x, count), key, INVALID_KEY))
        blocks = [x.block for x in received]

        def one_round(i: Lane, winner: Lane, *keys: Lane) -> list[Lane]:
            best = lanes.warp_max(functools.reduce(lanes.maximum, keys))
            having = [where(k.eq(best), b, _NO_ID) for k, b in zip(keys, blocks, strict=True)]
            block = lanes.warp_min(functools.reduce(lanes.minimum, having))
            left = [where(b.eq(block), INVALID_KEY, k) for k, b in zip(keys, blocks, strict=True)]
            found = where(best.eq(INVALID_KEY), _NO_ID, block)
            return [where(self.lane.eq(i), found, winner), *left]

        rounds = lanes.loop(int32(0), int32(TOPK), 1, [int32(_NO_ID), *keys], one_round)
        with lanes.when(self.lane < TOPK):
            (shared + (_PICKED_AT + self.lane)).store(rounds[0])
        return rounds[0], rounds[0].ne(_NO_ID)

    def _share_by_id(self, x: _Candidate, count: Lane, shared: Words) -> Lane:
        """Writes the entry that comes first with the lower id, then the larger score."""
        key = flip_sign(order_key_of_word(x.word))
        entry = _entry(int32(MAX_BLOCKS - 1) - x.block, key, x.index)
        entry = where(self._valid(x, count), entry, 0)
        (shared + (_ARRIVED_AT + x.index * 2)).store(entry)
        (shared + (_SORTED_AT + x.index * 2)).store(lanes.constant(0, i64()))
        return entry

    def _pick_by_counting(
        self, index: Lane, by_id: Lane, count: Lane, shared: Words
    ) -> tuple[Lane, Lane]:
        """A warpgroup's way; returns (block, whether it wins) of this thread's sorted entry."""
        arrived, sorted_ = shared + _ARRIVED_AT, shared + _SORTED_AT
        place = self._before(arrived, by_id)
        with lanes.when(by_id.ne(0) & self.part.eq(0)):
            (sorted_ + place * 2).store(by_id)
        self._barrier()

        mine = (sorted_ + index * 2).load(i64())
        before = (sorted_ + lanes.maximum(index - 1, 0) * 2).load(i64())
        block = int32(MAX_BLOCKS - 1) - _high(mine)
        lives = mine.ne(0) & (index.eq(0) | _high(mine).ne(_high(before)))
        key = (mine >> _INDEX_BITS).to_i32()
        entry = where(lives, _entry(self._forced(block, count).to_i32(), key, index), 0)
        (arrived + index * 2).store(entry)
        self._barrier()
        rank = self._before(arrived, entry)
        wins = entry.ne(0) & (rank < TOPK) & self.part.eq(0)
        with lanes.when(wins):
            (shared + (_PICKED_AT + rank)).store(block)
        return block, wins

    def _before(self, table: Words, mine: Lane) -> Lane:
        """How many entries of a table come before `mine`."""
        (found,) = count_better(table, self.params.entries, [mine], self.part, self.parts)
        distance = 1
        while distance < self.parts:
            found = found + lanes.warp_xor(found, distance)
            distance *= 2
        return found

    def _store(
        self,
        block: Lane,
        wins: Lane,
        count: Lane,
        any_failed: Lane,
        output: Words,
        shared: Words,
    ) -> None:
        """Stores the winners ascending and -1 behind them; all -1 where a source failed."""
        picked = shared + _PICKED_AT
        with lanes.when(self.number < TOPK):
            none_here = (picked + self.number).load().eq(_NO_ID)
            tail = int32(NO_BLOCK)
            if self.params.prefill:
                padding = (count <= 0) & self.number.eq(0) & (any_failed ^ 1)
                tail = where(padding, 0, tail)
            with lanes.when(none_here | any_failed):
                (output + self.number).store(tail)
        with lanes.when(wins & (any_failed ^ 1)):
            lower = int32(0)
            for i in range(0, TOPK, 4):
                for other in (picked + i).load_vector(lanes.i32(), 4):
                    lower = lower + lanes.is_negative(other - block)  # both are >= 0
            (output + lower).store(block)


def _entry(high: Lane, key: Lane, index: Lane) -> Lane:
    """An entry: `high` (< 2**25), then the unsigned 32-bit key, then the lower index."""
    low = (int32((1 << _INDEX_BITS) - 1) - index).to_i64()
    middle = (key.to_i64() & 0xFFFFFFFF) << _INDEX_BITS
    return (high.to_i64() << (32 + _INDEX_BITS)) | middle | low


def _high(entry: Lane) -> Lane:
    return (entry >> (32 + _INDEX_BITS)).to_i32()
