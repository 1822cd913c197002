"""Exact scores of a step: e4m3 or bfloat16 products summed in float32 on the tensor cores.

``mma.sync`` multiplies 16 keys x 8 query rows x 16 dimensions with float32 sums: every product is
exact, only the sums round. bfloat16 is taken as it is; e4m3 fits in float16, so keys and queries
are widened.

A warp scores one page. Its keys lie in two halves (see `page_ring`); row g of a fragment, g = lane
// 4, comes from half g % 2, so tile m of a page takes rows ``8 m + g // 2`` and, 8 fragment rows
on, ``8 m + 4 + g // 2`` of each half. The sum over the 128 dimensions may be taken in any order as
long as keys and queries agree: lane t of the four that share a row reads bytes 16 t .. 16 t + 15 of
every 64 bytes of it, and of these an eighth, a word of e4m3 or two of bfloat16, feeds each of eight
steps in turn. Query fragments are made once a segment and lie in shared memory in the order in
which lanes read them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import llvm

from msa_icp_jax.geometry import NUM_HEADS
from msa_icp_jax.ops._mosaic import lanes
from msa_icp_jax.ops._mosaic.lanes import Context, Lane, Memory, Value, Words, int32, maximum, where
from msa_icp_jax.ops._mosaic.launch import ScratchTypes
from msa_icp_jax.ops.decode_score.page_ring import (
    HALF_SHIFT,
    SEGMENT_PAGES,
    PageRing,
    barrier_of_warp,
    page_of_warp,
    slot_of_warp,
    stage_of,
    wait_for_turn,
    warp_number,
)
from msa_icp_jax.ops.decode_score.work_balance import (
    PER_THREAD,
    STEP_PAGES,
    WARP,
    Work,
    divide,
)

_SCALAR = plgpu.Layout.WG_SPLAT
_LOWEST = float("-inf")
_TILE = 8  # query rows of a product
_THREADS = STEP_PAGES * WARP
_QUERY_WORDS = 8 * 2 * WARP  # of one tile's fragments: 8 steps, two words a lane
_PIECE = 16  # bytes: what a thread reads at once
_PIECE_WORDS = _PIECE // 4
_SECTOR = 4 * _PIECE  # bytes of a row that its four lanes read at once
_MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.{0}.{0}.f32"
    " {{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, {{$8, $9}}, {{$10, $11, $12, $13}};"
)


class Step(NamedTuple):
    """One step, as scalars: traced ones, or lanes in inline code.

    Attributes:
      number: its number in the segment; its scores go to these four columns of `found`.
      count: its number in the CTA.
      room: position of the request's first query token, counted from this rank's first row of
        the segment's first page.
    """

    number: Any
    count: Any
    room: Any


@dataclasses.dataclass(frozen=True)
class Scorer:
    """Static parameters of the products.

    Attributes:
      ring: where keys come from.
      tokens: query tokens of a request.
      world_size: ranks that share a page.
    """

    ring: PageRing
    tokens: int
    world_size: int

    @property
    def query_rows(self) -> int:
        """Query tokens x heads of a request."""
        return self.tokens * NUM_HEADS

    @property
    def row_pieces(self) -> int:
        """Pieces of 16 bytes of a row: 8, or 16 of bfloat16."""
        return self.ring.row_bytes // _PIECE

    @property
    def piece_steps(self) -> int:
        """Steps that a lane's piece feeds: 4, or 2 of bfloat16."""
        return 8 * 4 // self.row_pieces

    @property
    def pair_words(self) -> int:
        """Words of a piece that feed two steps: 2, or 4 of bfloat16."""
        return 2 * _PIECE_WORDS // self.piece_steps

    @property
    def tiles(self) -> int:
        """Products side by side for the query rows: a power of two; spare rows repeat the last."""
        return 1 << (-(-self.query_rows // _TILE) - 1).bit_length()

    def scratch(self) -> ScratchTypes:
        """Shared memory: `queries`, and `found`, the segment's scores [query row, column]."""
        return {
            "queries": plgpu.SMEM((self.tiles * _QUERY_WORDS,), jnp.int32),
            "found": plgpu.SMEM((self.query_rows, SEGMENT_PAGES), jnp.float32),
        }

    def read_queries(self, query: jax.Ref, request: jax.Array) -> list[jax.Array]:
        """Starts to read a request's query rows, for `keep_queries`."""
        return _read_queries(query, request, self)

    def keep_queries(self, queries: jax.Ref, words: list[jax.Array]) -> None:
        """Puts what `read_queries` returned into `queries`; a barrier has to follow."""
        _keep_queries(queries, words, self)

    def room(self, first: jax.Array, length: jax.Array, rank: jax.Array) -> jax.Array:
        """See `Step`: of a segment that begins at step `first` of a request of `length` tokens."""
        start = first * (STEP_PAGES * self.ring.batch.page_size) + rank * self.ring.rows
        return length - self.tokens - start

    def score(self, scratch: dict[str, jax.Ref], step: Step) -> None:
        """Waits for a step's pages and puts their scores into columns ``4 step.number ..``."""
        _score(scratch, step, self)

    def write_scores(self, found: jax.Ref, scores: jax.Ref, work: Work, steps: jax.Array) -> None:
        """Writes a segment's scores: ``4 steps`` columns from column ``4 work.first`` on."""
        _write_scores(found, scores, work.request, work.first * STEP_PAGES, steps, self)

    def let_next_start(self) -> None:
        """The next kernel may start under this one."""
        plgpu.griddepcontrol_launch_dependents()

    def wait_for_last(self) -> None:
        """Waits for the end of the kernel under which this one has started."""
        plgpu.griddepcontrol_wait()


def _pieces(scorer: Scorer) -> int:
    """Pieces of 16 bytes that a thread reads of a request's query rows."""
    return max(1, scorer.tiles * _TILE * scorer.row_pieces // _THREADS)


def _read_queries(query: jax.Ref, request: jax.Array, scorer: Scorer) -> list[jax.Array]:
    result = plgpu.ShapeDtypeStruct((_THREADS,), np.dtype(np.int32), PER_THREAD)
    pieces, rows = _pieces(scorer), scorer.query_rows

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR), return_type=(result,) * (4 * pieces))
    def read(_: Context, query: Memory, request: Value) -> tuple[Value, ...]:
        words: list[Lane] = []
        for i in range(pieces):
            at = lanes.thread() + i * _THREADS
            row, piece = _piece_of_row(at, scorer)
            row = lanes.scalar(request) * rows + lanes.minimum(row, rows - 1)
            place = Words.of(query) + (row * (scorer.ring.row_bytes // 4) + piece * _PIECE_WORDS)
            text = "ld.relaxed.gpu.global.v4.b32 {$0, $1, $2, $3}, [$4];"
            words += lanes.ptx(text, Lane(place.pointer), result=(lanes.i32(),) * 4)
        return tuple(lanes.as_array([word], PER_THREAD) for word in words)

    return list(read(query, request))


def _keep_queries(queries: jax.Ref, words: list[jax.Array], scorer: Scorer) -> None:
    """Piece p of a row: `piece_steps` steps of lane p % 4, from ``piece_steps (p // 4)`` on."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[PER_THREAD] * len(words)))
    def keep(_: Context, queries: Memory, *words: Value) -> None:
        for i in range(_pieces(scorer)):
            parts = [x for word in words[4 * i : 4 * i + 4] for x in lanes.of_array(word)]
            row, piece = _piece_of_row(lanes.thread() + i * _THREADS, scorer)
            lane = (row & 7) * 4 + (piece & 3)
            at = (row >> 3) * _QUERY_WORDS + (piece >> 2) * (scorer.piece_steps * 2 * WARP)
            place = Words.of(queries) + (at + lane * 4)
            with lanes.when(row < scorer.tiles * _TILE):
                for pair in range(scorer.piece_steps // 2):
                    used = parts[pair * scorer.pair_words : (pair + 1) * scorer.pair_words]
                    low, high = _fragments(used, scorer)
                    (place + pair * 4 * WARP).store_vector([*low, *high])

    keep(queries, *words)


def _score(scratch: dict[str, jax.Ref], step: Step, scorer: Scorer) -> None:
    ring = scorer.ring
    names = ("slots", "arrived", "page_ids", "queries", "found")

    @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * len(names), *[_SCALAR] * len(step)))
    def score(_: Context, *arguments: Memory | Value) -> None:
        slots, arrived, page_ids, queries, found = arguments[: len(names)]
        # Fresh, or the compiler keeps a register for everything that grows with the step.
        step = Step(*(lanes.fresh(lanes.scalar(x)) for x in arguments[len(names) :]))
        lane = lanes.thread() & (WARP - 1)
        stage = stage_of(step.count, ring)
        turn = divide(step.count, int32(ring.stages))
        wait_for_turn(barrier_of_warp(arrived, ring, stage), turn)

        column = step.number * STEP_PAGES + warp_number()
        room = step.room - column * ring.batch.page_size  # the first token sees rows 0 .. room
        slot = slot_of_warp(slots, ring, stage)

        def page_maxima() -> Sequence[Lane]:
            return _page_maxima(slot, Words.of(queries), lane, room, scorer)

        def nothing() -> Sequence[Lane]:
            return [lanes.constant(_LOWEST, lanes.f32())] * (2 * scorer.tiles)

        there = page_of_warp(page_ids, step.count) >= 0
        types = [lanes.f32()] * (2 * scorer.tiles)
        values = lanes.choose(there, types, page_maxima, nothing)
        _store_row_maxima(values, Words.of(found) + column, lane, scorer)

    score(*(scratch[name] for name in names), *step)


def _write_scores(
    found: jax.Ref,
    scores: jax.Ref,
    request: jax.Array,
    column: jax.Array,
    steps: jax.Array,
    scorer: Scorer,
) -> None:
    """A warp a head; a lane four columns, which makes 128 of the 32."""
    columns = scorer.ring.batch.columns

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), _SCALAR, _SCALAR, _SCALAR))
    def write(
        _: Context, found: Memory, scores: Memory, request: Value, column: Value, steps: Value
    ) -> None:
        head, lane = lanes.thread() >> 5, lanes.thread() & (WARP - 1)
        row = lanes.scalar(request) * scorer.query_rows + head
        at = lane * STEP_PAGES
        source = Words.of(found) + (head * SEGMENT_PAGES + at)
        goal = Words.of(scores) + row.to_i64() * columns + (lanes.scalar(column) + at)
        with lanes.when(lane < lanes.scalar(steps)):
            for token in range(scorer.tokens):
                values = (source + token * NUM_HEADS * SEGMENT_PAGES).load_vector(lanes.f32(), 4)
                flushed = [where(x.eq(0.0), 0.0, x) for x in values]
                (goal + token * NUM_HEADS * columns).store_vector(flushed)

    write(found, scores, request, column, steps)


# ---- parts of the inline code: each emits the program of one CUDA thread ----


def _piece_of_row(at: Lane, scorer: Scorer) -> tuple[Lane, Lane]:
    """Query row and piece in it of a request's piece number `at`."""
    pieces = scorer.row_pieces
    return at >> (pieces.bit_length() - 1), at & (pieces - 1)


def _fragments(words: Sequence[Lane], scorer: Scorer) -> list[tuple[Lane, Lane]]:
    """A piece as what each of its steps multiplies: two pairs of 16-bit numbers."""
    if scorer.row_pieces == 8:
        return [_widen(word) for word in words]
    return list(zip(words[::2], words[1::2], strict=True))


def _widen(word: Lane) -> tuple[Lane, Lane]:
    """Four e4m3 numbers as two pairs of float16."""
    return lanes.ptx(
        "{ .reg .b16 low, high; mov.b32 {low, high}, $2;"
        " cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
        word,
        result=(lanes.i32(), lanes.i32()),
        pure=True,
    )


def _load16(address: Lane) -> tuple[Lane, ...]:
    """16 bytes of shared memory; in this place, which keeps few of them in registers."""
    return lanes.ptx(
        "ld.volatile.shared.v4.b32 {$0, $1, $2, $3}, [$4];", address, result=(lanes.i32(),) * 4
    )


def _page_maxima(
    slot: Lane, queries: Words, lane: Lane, room: Lane, scorer: Scorer
) -> Sequence[Lane]:
    """Maxima over this lane's rows of a page: of query rows 8 i + 2 t and the next, per tile i."""
    half = scorer.ring.rows // 2
    odd, row = (lane >> 2) & 1, lane >> 3
    row_bytes = scorer.ring.row_bytes
    keys = slot + odd * (half * row_bytes + HALF_SHIFT) + row * row_bytes + (lane & 3) * _PIECE
    fragments = Lane(llvm.ptrtoint(lanes.i32(), queries.pointer)) + lane * 16
    first_row = odd * half + row
    tail = room < scorer.ring.rows - 1
    best = [lanes.constant(_LOWEST, lanes.f32())] * (2 * scorer.tiles)
    for pair in range(0, scorer.ring.rows // 16, 2):
        sums = _products(keys + pair * 8 * row_bytes, fragments, scorer)

        def masked(sums: Sequence[Lane] = sums, pair: int = pair) -> Sequence[Lane]:
            at = first_row + pair * 8
            return [_mask(x, i, at, room, lane, scorer) for i, x in enumerate(sums)]

        def whole(sums: Sequence[Lane] = sums) -> Sequence[Lane]:
            return sums

        for i, value in enumerate(lanes.choose(tail, [lanes.f32()] * len(sums), masked, whole)):
            tile, part = i // 4 % scorer.tiles, i % 2
            best[2 * tile + part] = maximum(best[2 * tile + part], value)
    return best


def _mask(value: Lane, index: int, row: Lane, room: Lane, lane: Lane, scorer: Scorer) -> Lane:
    """-inf where the query row's token does not see the key row; see `_products` for the index."""
    product, tile, part = index // 4 // scorer.tiles, index // 4 % scorer.tiles, index % 4
    row += product * 8 + part // 2 * 4
    token = ((lane & 3) * 2 + tile * _TILE + part % 2) >> 2
    return where(row <= room + token, value, _LOWEST)


def _products(keys: Lane, fragments: Lane, scorer: Scorer) -> list[Lane]:
    """Two key tiles against all query tiles: sums [key tile, query tile, 4 of this lane]."""
    tiles = scorer.tiles
    zero = lanes.constant(0.0, lanes.f32())
    sums = [[[zero] * 4 for _ in range(tiles)] for _ in range(2)]
    row_bytes, piece_steps = scorer.ring.row_bytes, scorer.piece_steps
    at_once = 2 if scorer.tiles > 1 else 1  # sectors of a row: few products need few registers
    for step in range(8):
        if step % (piece_steps * at_once) == 0:
            sectors = [
                [
                    _key_words(keys + sector * _SECTOR + m * 8 * row_bytes, row_bytes)
                    for m in range(2)
                ]
                for sector in range(step // piece_steps, step // piece_steps + at_once)
            ]
        words = sectors[step // piece_steps % at_once]
        if step % 2 == 0:
            at = fragments + step // 2 * 512
            query = [_load16(at + n * _QUERY_WORDS * 4) for n in range(tiles)]
        for m in range(2):
            low, high = (_step_fragment(row, step, scorer) for row in words[m])
            a = (low[0], high[0], low[1], high[1])
            for n in range(tiles):
                b = query[n][2 * (step % 2) : 2 * (step % 2) + 2]
                sums[m][n] = _multiply_add(a, b, sums[m][n], scorer)
    return [x for by_query in sums for quad in by_query for x in quad]


def _key_words(address: Lane, row_bytes: int) -> tuple[tuple[Lane, ...], tuple[Lane, ...]]:
    """16 bytes of this lane's row in a tile, and of the row 8 fragment rows on."""
    return _load16(address), _load16(address + 4 * row_bytes)


def _step_fragment(words: Sequence[Lane], step: int, scorer: Scorer) -> tuple[Lane, Lane]:
    """What a step multiplies of a piece of keys."""
    each = scorer.pair_words // 2
    first = step % scorer.piece_steps * each
    (fragment,) = _fragments(words[first : first + each], scorer)
    return fragment


def _multiply_add(
    a: Sequence[Lane], b: Sequence[Lane], c: Sequence[Lane], scorer: Scorer
) -> list[Lane]:
    text = _MMA.format("f16" if scorer.row_pieces == 8 else "bf16")
    found = lanes.ptx(text, *a, *b, *c, result=(lanes.f32(),) * 4, collective=True, pure=True)
    return list(found)


def _store_row_maxima(values: Sequence[Lane], place: Words, lane: Lane, scorer: Scorer) -> None:
    """Takes the maxima over the eight lanes with the same query rows and stores them.

    Each exchange halves the values a lane still holds, until it holds one: value j belongs to
    query row ``2 t + 8 (j // 2) + j % 2``.
    """
    row, idle = (lane & 3) * 2, int32(0)
    values = list(values)
    for distance in (16, 8, 4):
        upper = (lane & distance).ne(0)
        kept = len(values) // 2
        if kept:
            pairs = list(zip(values[:kept], values[kept:], strict=True))
            sent = [where(upper, a, b) for a, b in pairs]
            values = [where(upper, b, a) for a, b in pairs]
            row += where(upper, int32(8 * (kept // 2) if kept > 1 else 1), 0)
        else:
            sent, idle = values, idle | (lane & distance)
        values = [maximum(x, _exchange(y, distance)) for x, y in zip(values, sent, strict=True)]
    with lanes.when(idle.eq(0) & (row < scorer.query_rows)):
        (place + row * SEGMENT_PAGES).store(values[0])


def _exchange(x: Lane, distance: int) -> Lane:
    return lanes.warp_xor(x.bits(lanes.i32()), distance).bits(lanes.f32())
