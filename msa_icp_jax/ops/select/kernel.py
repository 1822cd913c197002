"""Top16 select on Hopper: one launch.

The tokens and the width of the plane say how the rows are shared out (`_grid`). Tokens are *few*
where each can have an SM of its own.

1. Few tokens of up to 2,048 columns: a CTA a token, a warp a row.
2. Few tokens of longer rows, and any number of tokens whose rows are too long for a warp: a CTA a
   row, which its four warps share.
3. Many tokens of up to 2,048 columns: the CTAs that fit the GPU walk their shares of the tokens, a
   warp a row; four tokens in turn whose rows are all short go a token a warp (`short_rows`), if
   rows are 16-byte aligned.
4. Many tokens of a narrow plane, up to 256 columns: a CTA an SM, whose warps walk its share of the
   tokens and take the eight rows of two at once (`eight_rows`). They are as many as an SM holds, or
   as have work; the compiler then keeps to the registers that they can have.

Otherwise a CTA is a warpgroup. A single row, and one that ways 3 and 4 leave open (scores that tie
for the last place, say), is selected by its warp, or by the four that share it, in the way for rows
of any length and scores (`long_rows`).

With few tokens the way is *direct*: which row is whose is known at once, so its warps read the
row's bounds while the kernel before this one still runs, and afterwards load scores by that guess
while they read the bounds anew and load again if these were others.

The rows go into memory of this GPU, or straight to the ranks that own their heads (`peer_rows`).
Then every row's warps look ahead for it alone: the way is 1 or 2, however many tokens there are.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from msa_icp_jax.geometry import NUM_HEADS, TOPK, cdiv, round_up
from msa_icp_jax.ops._mosaic import lanes
from msa_icp_jax.ops._mosaic.lanes import (
    Context,
    Lane,
    Memory,
    Value,
    Words,
    f32,
    i32,
    int32,
    where,
)
from msa_icp_jax.ops._mosaic.launch import (
    CTA,
    Launch,
    Target,
    scalar_operand,
    writable,
    written,
)
from msa_icp_jax.ops._mosaic.peer_rows import Owners, PeerRows, Peers
from msa_icp_jax.ops.arguments import Candidates
from msa_icp_jax.ops.select import config, eight_rows, long_rows, short_rows
from msa_icp_jax.ops.select.long_rows import (
    COLUMNS_AT,
    SHARED_WORDS,
    SPARE_AT,
    WARPS,
    WORDS_AT,
    Bounds,
    Row,
    find_bounds,
)
from msa_icp_jax.rows import READY, ROW_WORDS, TAGGED_WORDS

if TYPE_CHECKING:
    from msa_icp_jax.arrays import Array, Float32, Int32

_WARP = 32


@dataclasses.dataclass(frozen=True)
class SelectParams:
    """The static parameters of one select.

    Attributes:
      tokens: rows are those of [0, tokens) x 4 heads.
      columns: columns of the score plane.
      index_scale: blocks from one column to the next.
      begin, end: forced blocks at the start, and visible ones at the end.
      tagged: whether rows that stay here are tagged.
      warps_per_row: warps that share a row, 1 or 4.
      ctas: CTAs among which the rows are shared out.
      direct: whether no warp has a second row: (token, head) is known at the start.
    """

    tokens: int
    columns: int
    index_scale: int
    begin: int
    end: int
    tagged: bool
    warps_per_row: int
    ctas: int
    direct: bool

    @property
    def rows(self) -> int:
        """(token, head) pairs."""
        return self.tokens * NUM_HEADS

    @property
    def narrow(self) -> bool:
        """Whether a warp takes two tokens at a time."""
        return self.columns <= eight_rows.CAPACITY and self.warps_per_row == 1 and not self.direct

    @property
    def takes_short(self) -> bool:
        """Whether four short rows are selected at once."""
        return self.warps_per_row == 1 and long_rows.vector_of(self.columns) > 1 and not self.narrow

    @property
    def warps(self) -> int:
        """Warps of a CTA: four, or enough that they take a narrow plane in equal turns."""
        if not self.narrow:
            return WARPS
        most = (
            config.CONFIG.full_warps
            if self.columns <= config.CONFIG.full_columns
            else config.CONFIG.narrow_warps
        )
        turns = cdiv(cdiv(self.tokens, self.ctas), eight_rows.TOKENS)
        return round_up(cdiv(turns, cdiv(turns, most)), WARPS)

    @property
    def warp_words(self) -> int:
        """Words of shared memory of a warp."""
        return (
            max(eight_rows.warp_words(self.columns), SHARED_WORDS) if self.narrow else SHARED_WORDS
        )


def select_rows(
    scores: Float32[Array, "rows 4 K"],
    num_valid_pages: Int32[Array, " T"],
    rows: Int32[Array, "4 carrier_rows 33"] | None,
    generations: Int32[Array, "4 T"] | None,
    candidates: Candidates,
    launch: Launch,
) -> Int32[Array, "4 carrier_rows *row"]:
    """The best 16 candidates of every (token, head) as rows, head-major.

    Args:
      scores: float32 [>= T, 4, K].
      num_valid_pages: int32 [T], T >= 1.
      rows: int32 [4, >= T, 33] to write into, or None for a fresh [4, T, 33].
      generations: int32 [4, T]: return tagged rows [4, T, 32, 2] instead (`rows` is None then).
      candidates: what the columns are, and what always wins.
      launch: how to launch.
    """
    tokens, columns = num_valid_pages.shape[0], scores.shape[2]
    warps_per_row, ctas, direct = _grid(tokens, columns, launch.target)
    params = SelectParams(
        tokens=tokens,
        columns=columns,
        index_scale=candidates.scale,
        begin=candidates.forced.begin,
        end=candidates.forced.end,
        tagged=generations is not None,
        warps_per_row=warps_per_row,
        ctas=ctas,
        direct=direct,
    )
    operands = [scores, num_valid_pages, scalar_operand(candidates.offset)]
    if generations is not None:
        operands.append(generations)
    run = functools.partial(_launch, "select_rows", params, None, launch)
    if rows is None:
        shape = (TAGGED_WORDS, 2) if params.tagged else (ROW_WORDS,)
        fresh = jax.ShapeDtypeStruct((NUM_HEADS, params.tokens, *shape), jnp.int32)
        return run(out_type=fresh)(*operands)
    buffer = writable(rows)
    run()(*operands, buffer)
    return written(buffer)


def select_and_publish_rows(
    scores: Float32[Array, "rows 4 K"],
    num_valid_pages: Int32[Array, " T"],
    peers: Peers,
    counters: Int32[Array, "*counters"],
    candidates: Candidates,
    launch: Launch,
) -> Int32[Array, "*counters"]:
    """`select_rows` whose rows go straight into every owner's receive storage.

    Args:
      scores, num_valid_pages, candidates, launch: as for `select_rows`.
      peers: where the rows go.
      counters: of legacy rows the errors, int32 [1], grown by one per row that was not sent since
        its flag stayed up; of tagged rows the publish counters, int32 [3, 4, C].
    """
    tokens, columns = num_valid_pages.shape[0], scores.shape[2]
    warps_per_row, ctas, direct = _grid(tokens, columns, launch.target, single=True)
    order = candidates.scale, *candidates.forced
    params = SelectParams(tokens, columns, *order, False, warps_per_row, ctas, direct)
    name = "select_and_publish_tagged_rows" if peers.tagged else "select_and_publish_rows"
    advanced = writable(counters)
    operands = scores, num_valid_pages, scalar_operand(candidates.offset), *peers.operands()
    _launch(name, params, peers.owners, launch)(*operands, advanced)
    return written(advanced)


def _launch(
    name: str,
    params: SelectParams,
    owners: Owners | None,
    launch: Launch,
    out_type: jax.ShapeDtypeStruct | tuple[()] = (),
) -> Callable[..., Any]:
    body: Any = functools.partial(_kernel, owners=owners, pdl=launch.pdl)
    if launch.target.interpret:
        from msa_icp_jax.ops.select import interpret  # on demand: only tests need it

        assert owners is None, "the interpreter has no device addresses"
        body, params = interpret.select, interpret.with_few_ctas(params, launch.target)
    return launch.kernel(
        functools.partial(body, params=params),
        name=name,
        grid=(params.ctas,),
        out_type=out_type,
        warpgroups=params.warps // WARPS,
        scratch_types={"shared": plgpu.SMEM((params.warps, params.warp_words), jnp.int32)},
    )


def _grid(tokens: int, columns: int, target: Target, single: bool = False) -> tuple[int, int, bool]:
    """Warps that share a row, CTAs, and whether no warp has a second row (`single`: none may)."""
    few = single or tokens <= target.sms
    if few and columns <= config.CONFIG.quick_columns:
        warps_per_row, ctas = 1, tokens
    elif few or columns > config.CONFIG.warp_columns:
        warps_per_row, ctas = WARPS, tokens * NUM_HEADS
    elif columns > eight_rows.CAPACITY:
        warps_per_row, ctas = 1, min(tokens, target.sms * _ctas_per_sm(columns))
    else:
        warps_per_row, ctas = 1, target.sms
    return warps_per_row, ctas, few


def _ctas_per_sm(columns: int) -> int:
    """CTAs that an SM holds at a time where a warp takes a row."""
    return (
        config.CONFIG.ctas_per_sm
        if columns <= config.CONFIG.usual_columns
        else config.CONFIG.wide_ctas_per_sm
    )


def _kernel(
    scores: jax.Ref,
    counts: jax.Ref,
    index_offset: jax.Ref,
    *others: jax.Ref,
    shared: jax.Ref,
    params: SelectParams,
    owners: Owners | None,
    pdl: bool,
) -> None:
    """Selects; `others` are tags if there are any and the rows, or the operands of `PeerRows`.

    The next kernel is let in at once, but behind rows for other ranks only after the wait: see
    `peer_rows`.
    """
    cta = lax.axis_index(CTA)
    guess: tuple[jax.Array, ...] = ()
    if pdl and not owners:
        plgpu.griddepcontrol_launch_dependents()
    if pdl and params.direct:
        guess = _read_bounds_early(counts, index_offset, params)
    if owners and not owners.tagged:
        _look_ahead(others, shared, cta, params, owners)
    if pdl:
        plgpu.griddepcontrol_wait()
    if pdl and owners:
        plgpu.griddepcontrol_launch_dependents()
    refs = [scores, counts, index_offset, shared, *others]
    _select_inline(refs, [cta, *guess], params, owners)


def share_out(cta: Any, count: int, ctas: int) -> tuple[Any, Any]:
    """The part [start, stop) of `count` pieces of work that a CTA does; sizes differ by one."""
    each, rest = divmod(count, ctas)
    if isinstance(cta, Lane):
        start = cta * each + lanes.minimum(cta, rest)
        return start, start + each + (cta < rest).to_i32()
    start = cta * each + jnp.minimum(cta, rest)
    return start, start + each + jnp.where(cta < rest, 1, 0)


# ---- machine pieces ----


def _read_bounds_early(
    counts: jax.Ref, index_offset: jax.Ref, params: SelectParams
) -> tuple[jax.Array, jax.Array]:
    """The row's visible blocks and the offset, as they are before the preceding kernel has ended.

    They may be wrong; nothing but the guess of which scores to load may follow from them.
    """
    scalar = plgpu.ShapeDtypeStruct((), np.dtype(np.int32), plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT),
        return_type=(scalar, scalar),
    )
    def read(_: Context, counts: Memory, index_offset: Memory, cta: Value) -> Any:
        token = lanes.scalar(cta) >> (2 if params.warps_per_row > 1 else 0)
        found = lanes.load_fresh(Words.of(counts) + token), lanes.load_fresh(Words.of(index_offset))
        return tuple(lanes.as_scalar(x) for x in found)

    return read(counts, index_offset, lax.axis_index(CTA))


def _look_ahead(
    peers: Sequence[jax.Ref], shared: jax.Ref, cta: jax.Array, params: SelectParams, owners: Owners
) -> None:
    """Waits for the flag of the warp's row."""
    refs = [*peers, shared]

    @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * len(refs), plgpu.Layout.WG_SPLAT))
    def look(_: Context, *arguments: Memory | Value) -> None:
        *refs, cta = arguments
        *peers, shared = (Words.of(ref) for ref in refs)
        lane, warp, shared = _position(shared, params)
        token, head = _row_of(lanes.scalar(cta), warp, params)
        rows = PeerRows(owners, peers, shared + SPARE_AT)
        rows.prepare()
        with lanes.when((warp & (params.warps_per_row - 1)).eq(0)):
            rows.look_ahead(token, head, lane)

    look(*refs, cta)


def _select_inline(
    refs: list[jax.Ref],
    scalars: list[jax.Array],
    params: SelectParams,
    owners: Owners | None,
) -> None:
    """`refs` are scores, counts, index offset, shared memory and the kernel's other operands."""

    @plgpu.inline_mgpu(
        arg_types=(
            *[plgpu.RefType()] * len(refs),
            *[plgpu.Layout.WG_SPLAT] * len(scalars),
        )
    )
    def select(_: Context, *arguments: Any) -> None:
        words = (Words.of(ref) for ref in arguments[: len(refs)])
        scores, counts, index_offset, shared, *others = words
        cta, *guess = (lanes.scalar(x) for x in arguments[len(refs) :])
        offset = lanes.load_fresh(index_offset)
        rows: LocalRows | PeerRows
        if owners:
            shared_of_row = _position(shared, params)[2]
            rows = PeerRows(owners, others, shared_of_row + SPARE_AT)
        else:
            *tags, first = others
            capacity = ir.MemRefType(arguments[len(refs) - 1].type).shape[1]
            rows = LocalRows(first, capacity, params.tokens, tags)
        thread = Thread(params, scores, counts, offset, rows, shared)
        if params.direct:
            thread.select_row_of(cta, guess)
        else:
            thread.select(cta)

    select(*refs, *scalars)


def _position(shared: Words, params: SelectParams) -> tuple[Lane, Lane, Words]:
    """This lane of its warp, the warp of the warpgroup, and the shared memory of its row."""
    thread = lanes.thread()
    # Read from lane 0, which tells the compiler that it is the same in the whole warp.
    warp = lanes.warp_from(thread >> 5, 0)
    lane = thread & (_WARP - 1)
    return lane, warp, shared + warp * params.warp_words if params.warps_per_row == 1 else shared


def _row_of(cta: Lane, warp: Lane, params: SelectParams) -> tuple[Lane, Lane]:
    """(token, head) of the one row that a warp has."""
    row = cta if params.warps_per_row > 1 else cta * NUM_HEADS + warp
    return row >> 2, row & 3


@dataclasses.dataclass
class LocalRows:
    """Where one thread stores rows that stay in memory of this GPU.

    Attributes:
      rows: the first word of all, [4, capacity] rows.
      capacity: rows of a head that there is memory for.
      tokens: T.
      tags: none, or the tags [4, T].
    """

    rows: Words
    capacity: int
    tokens: int
    tags: list[Words]

    def prepare(self) -> None:
        """Nothing has to be read."""

    def store_row(self, token: Lane, head: Lane, lane: Lane, word: Lane) -> None:
        """Stores a row's 32 words together, one a lane, and the flag unless rows are tagged."""
        self.store_words(token, head, [(lane, word)])
        with lanes.when(lane.eq(0)):
            self.store_flag(token, head)

    def store_words(self, token: Lane, head: Lane, words: Sequence[tuple[Lane, Lane]]) -> None:
        """Stores (place, word) of a row, with their tag where rows are tagged."""
        target = self.first_word(token, head)
        if self.tags:
            tag = (self.tags[0] + (head * self.tokens + token)).load()
        for place, word in words:
            if self.tags:
                (target + place * 2).store_vector([word, tag])
            else:
                (target + place).store(word)

    def store_flag(self, token: Lane, head: Lane) -> None:
        """Stores the flag of a row unless rows are tagged."""
        if not self.tags:
            (self.first_word(token, head) + 2 * TOPK).store(int32(READY))

    def first_word(self, token: Lane, head: Lane) -> Words:
        """The first word of a row."""
        row = head.to_i64() * self.capacity + token.to_i64()
        return self.rows + row * (2 * TAGGED_WORDS if self.tags else ROW_WORDS)


class Thread:
    """The program of one thread of the warpgroup; `rows` is where the rows found go."""

    def __init__(
        self,
        params: SelectParams,
        scores: Words,
        counts: Words,
        offset: Lane,
        rows: LocalRows | PeerRows,
        shared: Words,
    ) -> None:
        self.params, self.scores, self.counts, self.offset = params, scores, counts, offset
        self.rows = rows
        self.lane, self.warp, self.shared = _position(shared, params)

    def select(self, cta: Lane) -> None:
        """Selects the share of a CTA."""
        if self.params.warps_per_row == 1:
            select = self._select_narrow if self.params.narrow else self._select_tokens
            select(*share_out(cta, self.params.tokens, self.params.ctas))
            return

        def one_row(row: Lane) -> list[Lane]:
            token = row >> 2
            self._select_row(token, row & 3, self._bounds((self.counts + token).load()))
            lanes.warpgroup_barrier()  # the next row uses the same shared memory
            return []

        lanes.loop(*share_out(cta, self.params.rows, self.params.ctas), 1, [], one_row)

    def select_row_of(self, cta: Lane, guess: list[Lane]) -> None:
        """Selects the one row of this warp.

        Its scores are loaded by the guess of its bounds, while the bounds themselves are.
        """
        token, head = _row_of(cta, self.warp, self.params)
        count = lanes.load_fresh(self.counts + token)
        scores = self.scores + (token * NUM_HEADS + head).to_i64() * self.params.columns
        selector = self._selector()
        if not guess:
            self.rows.prepare()
            self._select_row(token, head, self._bounds(count))
            return
        expected = self._bounds(*guess)
        loaded = selector.load(Row(**vars(expected), scores=scores))
        self.rows.prepare()  # behind the loads: it waits for what it reads
        bounds = self._bounds(count)
        right = expected.front.eq(bounds.front) & expected.back.eq(bounds.back)

        def again() -> list[Lane]:
            return selector.load(Row(**vars(bounds), scores=scores))

        values = lanes.choose(right, [f32()] * len(loaded), lambda: loaded, again)
        self._select_row(token, head, bounds, list(values))

    def _in_loop(self) -> Thread:
        """This thread, to use in a loop's body.

        The compiler would otherwise compute everything that follows from the lane's number and the
        shared memory's address ahead of the loop, and hold it in some sixty registers.
        """
        inside = copy.copy(self)
        inside.lane = lanes.fresh(self.lane)
        inside.shared = Words(lanes.fresh(Lane(self.shared.pointer)).value)
        return inside

    def _select_narrow(self, start: Lane, stop: Lane) -> None:
        """Rows of tokens [start, stop), a warp two tokens at a time."""

        def two_tokens(base: Lane) -> list[Lane]:
            self._in_loop()._select_eight(base, stop)
            return []

        first = start + self.warp * eight_rows.TOKENS
        lanes.loop(first, stop, eight_rows.TOKENS * self.params.warps, [], two_tokens)

    def _select_eight(self, base: Lane, stop: Lane) -> None:
        """Selects the rows of two tokens, from `base` on but below `stop`, in this warp."""
        token = base + (self.lane >> 4)
        live = token < stop
        (count,) = lanes.choose(
            live, [i32()], lambda: [(self.counts + token).load()], lambda: [int32(0)]
        )
        bounds = {name: where(live, x, 0) for name, x in vars(self._bounds(count)).items()}
        tokens = lanes.minimum(stop - base, eight_rows.TOKENS)
        left_open = eight_rows.Rows(
            **bounds,
            begin=self.params.begin,
            end=self.params.end,
            scores=self.scores + base.to_i64() * (NUM_HEADS * self.params.columns),
            columns=self.params.columns,
            ids=(self.params.index_scale, self.offset),
            lane=self.lane,
            shared=self.shared,
        ).find_top16()
        self._store_eight(base, tokens)
        lanes.warp_barrier()  # before the shared memory is used again, and rows are stored anew

        def one_row(left_open: Lane) -> list[Lane]:
            lane = lanes.lowest_bit(left_open)
            row = lane >> 2
            bounds = self._bounds(lanes.warp_from(count, lane))
            self._in_loop()._select_row(base + (row >> 2), row & 3, bounds)
            return [left_open & ~(int32(15) << lane)]

        lanes.repeat_while([left_open], lambda left_open: left_open.ne(0), one_row)

    def _store_eight(self, base: Lane, tokens: Lane) -> None:
        """Stores the rows that the narrow rows' way has left in shared memory."""
        head_words = eight_rows.TOKENS * ROW_WORDS
        for head in range(NUM_HEADS):
            found = self.shared + (eight_rows.FOUND_AT + head * head_words)
            if self.params.tagged:

                def one_token(i: Lane, found: Words = found, head: int = head) -> list[Lane]:
                    word = (found + (i * ROW_WORDS + self.lane)).load()
                    self._store_row(base + i, int32(head), word)
                    return []

                lanes.loop(int32(0), tokens, 1, [], one_token)
                continue
            target = self._local_rows.first_word(base, int32(head))
            for start in range(0, head_words, _WARP):
                word = self.lane + start
                with lanes.when(word < tokens * ROW_WORDS):
                    (target + word).store((found + word).load())

    def _select_tokens(self, start: Lane, stop: Lane) -> None:
        """Rows of tokens [start, stop): a warp a head, or a warp a token where all are short."""

        def up_to_32(first: Lane) -> list[Lane]:
            (count,) = lanes.choose(
                first + self.lane < stop,
                [i32()],
                lambda: [(self.counts + (first + self.lane)).load()],
                lambda: [int32(0)],
            )
            long_ones = lanes.warp_ballot((first + self.lane < stop) & self._is_long(count))
            last = lanes.minimum(first + _WARP, stop)

            def step(token: Lane) -> list[Lane]:
                together = ((long_ones >> (token - first)) & ((1 << WARPS) - 1)).eq(0)
                mine = where(together, token + self.warp, token)
                bounds = self._bounds(lanes.warp_from(count, mine - first))
                head, stop_head = where(together, 0, self.warp), where(together, 4, self.warp + 1)
                if self.params.takes_short:
                    done = self._in_loop()._select_short(mine, bounds, together & (mine < last))
                    stop_head = where(done | (mine >= last), 0, stop_head)

                def one_head(head: Lane) -> list[Lane]:
                    self._in_loop()._select_row(mine, head, bounds)
                    return []

                lanes.loop(head, stop_head, 1, [], one_head)
                return [token + where(together, int32(WARPS), int32(1))]

            lanes.repeat_while([first], lambda token: token < last, step)
            return [first + _WARP]

        lanes.repeat_while([start], lambda first: first < stop, up_to_32)

    def _is_long(self, count: Lane) -> Lane:
        """Whether a token's rows cannot be selected four at once."""
        if not self.params.takes_short:
            return lanes.constant(1, lanes.i1())
        bounds = self._bounds(count)
        stop = where(bounds.first.eq(0), bounds.stop, 0)
        return (stop < TOPK) | (stop > short_rows.capacity(short_rows.SIZES[-1]))

    def _select_short(self, token: Lane, bounds: Bounds, wanted: Lane) -> Lane:
        """Selects the four heads of a token in this warp if that is wanted and works out."""
        found = self.shared + COLUMNS_AT
        row = token.to_i64() * NUM_HEADS + (self.lane >> 3).to_i64()
        scores = self.scores + row * self.params.columns

        def from_size(size: int) -> list[Lane]:
            forced = (bounds.front, bounds.back)
            return [short_rows.find_top16(scores, forced, bounds.stop, size, self.lane, found)]

        def smallest_of(sizes: tuple[int, ...]) -> list[Lane]:
            if len(sizes) == 1:
                return from_size(sizes[0])
            fits = bounds.stop <= short_rows.capacity(sizes[0])
            small, large = lambda: from_size(sizes[0]), lambda: smallest_of(sizes[1:])
            return list(lanes.choose(fits, [lanes.i1()], small, large))

        no = lanes.constant(0, lanes.i1())
        (done,) = lanes.choose(
            wanted, [lanes.i1()], lambda: smallest_of(short_rows.SIZES), lambda: [no]
        )
        with lanes.when(done):
            for half in range(2):
                self._store_found(token, self.lane + half * _WARP, found)
            with lanes.when(self.lane < NUM_HEADS):
                self._local_rows.store_flag(token, self.lane)
            lanes.warp_barrier()  # before the shared memory is used again
        return done

    def _store_found(self, token: Lane, index: Lane, found: Words) -> None:
        """Stores one word and one id of a token's rows: place index % 16 of head index // 16."""
        head, place = index >> 4, index & (TOPK - 1)
        column = (found + index).load()
        row = token.to_i64() * NUM_HEADS + head.to_i64()
        word = (self.scores + (row * self.params.columns + column.to_i64())).load()
        block = column * self.params.index_scale + self.offset
        self._local_rows.store_words(token, head, [(place, word), (place + TOPK, block)])

    @property
    def _local_rows(self) -> LocalRows:
        assert isinstance(self.rows, LocalRows)  # others are stored one by one
        return self.rows

    def _bounds(self, count: Lane, offset: Lane | None = None) -> Bounds:
        """Where the candidates and the forced blocks among them lie."""
        params = self.params
        return find_bounds(
            count,
            self.offset if offset is None else offset,
            scale=params.index_scale,
            columns=params.columns,
            begin=params.begin,
            end=params.end,
        )

    def _selector(self) -> long_rows.RowSelector:
        params, ids = self.params, (self.params.index_scale, self.offset)
        return long_rows.RowSelector(
            params.columns, params.warps_per_row, ids, self.lane, self.warp, self.shared
        )

    def _select_row(
        self, token: Lane, head: Lane, bounds: Bounds, loaded: list[Lane] | None = None
    ) -> None:
        """Selects one row (perhaps loaded already): the way for rows of any length and scores."""
        place = (token.to_i64() * NUM_HEADS + head.to_i64()) * self.params.columns
        selector = self._selector()
        selector.select(Row(**vars(bounds), scores=self.scores + place), loaded)
        with lanes.when(selector.leads):
            self._store(token, head)
        lanes.warp_barrier()  # before the shared memory is used again

    def _store(self, token: Lane, head: Lane) -> None:
        """Stores the row that the long rows' way has left in shared memory."""
        self._store_row(token, head, (self.shared + (self.lane + WORDS_AT)).load())

    def _store_row(self, token: Lane, head: Lane, word: Lane) -> None:
        """Stores a row, of which each lane has a word."""
        self.rows.store_row(token, head, self.lane, word)
