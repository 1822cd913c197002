"""The decode scorer on Hopper: exact products, one read of every key at the speed of memory.

A persistent grid of small CTAs, one warpgroup each and several on an SM. A CTA finds its part of
the batch (`work_balance`) and goes through it in *segments*: up to 32 steps of one request. A step
is four pages, one a warp; each warp keeps its own ring of page copies going (`page_ring`), takes
the maximum of its page's products in registers (`mma`) and puts it beside the others' in shared
memory. At the end of a segment the CTA writes whole lines of the score plane, while copies of the
next segment are already under way.

Fast precision runs these exact kernels too, for memory sets the pace: with all keys in the
second-level cache, 32 requests of 131,072 keys took 0.64 of the time that memory needs for them
with 1 query token and 0.76 with 4. Fp8 products would save less than 3 % there; with 8 query
tokens, where exact products begin to show, about 7 %.

Under programmatic dependent launch a CTA starts while the kernel before it still runs. Until that
has ended it takes nothing but hints (see `page_ring`), and reads everything again afterwards.
Registers are counted: 88 of a thread, at 32 rows a page and up to 2 query tokens, let five CTAs fit
an SM and beside them one of a select of short rows, which may then start with the scorer
(`_select_fits`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from msa_icp_jax.geometry import HEAD_DIM, cdiv, round_up
from msa_icp_jax.ops._mosaic.launch import (
    CTA,
    Launch,
    ScratchTypes,
    Target,
    ctas_per_sm,
    scalar_operand,
    writable,
    written,
)
from msa_icp_jax.ops.arguments import Shard
from msa_icp_jax.ops.decode_score import config
from msa_icp_jax.ops.decode_score.mma import Scorer, Step
from msa_icp_jax.ops.decode_score.page_ring import SEGMENT_STEPS, PageRing
from msa_icp_jax.ops.decode_score.work_balance import (
    STEP_PAGES,
    Batch,
    Grid,
    Work,
)
from msa_icp_jax.ops.select.long_rows import SHARED_WORDS, WARPS

if TYPE_CHECKING:
    from msa_icp_jax.arrays import Array, Float32, IndexFloat, Int32

# Shared memory of a CTA of the select of short rows, with what the system keeps.
_SELECT_BYTES = round_up(4 * WARPS * SHARED_WORDS, 1 << 10) + (1 << 10)
_SCALAR = plgpu.Layout.WG_SPLAT


def decode_scores(
    index_q: IndexFloat[Array, "T 4 128"],
    shard: Shard,
    block_table: Int32[Array, "B width"],
    seq_lens: Int32[Array, " B"],
    score_out: Float32[Array, "rows 4 columns"],
    launch: Launch,
) -> Float32[Array, "rows 4 columns"]:
    """Writes the columns of each request's pages, rounded up to four, into `score_out`.

    Args:
      index_q: the keys' dtype, [T, 4, 128].
      shard: the keys.
      block_table: int32 [B, width]; T is a multiple of B.
      seq_lens: int32 [B].
      score_out: float32 [>= T, 4, columns], written in place where it is donated.
      launch: how to launch.
    """
    target = launch.target
    requests, width = block_table.shape
    tokens = index_q.shape[0]
    pages, pitch, _ = shard.index_k.shape
    dtype = shard.index_k.dtype
    layout = pages, pitch, shard.row_offset, shard.rows, dtype
    stages = config.CONFIG.stages_of(shard.rows * HEAD_DIM * dtype.itemsize)
    sizes = requests, shard.page_size, score_out.shape[2]
    parts = MACHINE
    if target.interpret:
        from msa_icp_jax.ops.decode_score import interpret  # on demand: only tests need it

        parts = interpret.PARTS
    batch = parts.batch(*sizes)
    ring = parts.ring(batch, width, *layout, stages)
    scorer = parts.scorer(ring, tokens // requests, shard.world_size)
    scratch = {**ring.scratch(), **scorer.scratch(), **batch.scratch()}
    used = parts.shared_bytes(scratch)
    grid = _grid(batch, used, target)
    scores = writable(score_out)
    early = _select_fits(batch, grid, used, tokens, target)
    launch.kernel(
        functools.partial(_kernel, scorer=scorer, grid=grid, pdl=launch.pdl, early=early),
        name="decode_scores",
        grid=(grid.ctas,),
        scratch_types=scratch,
    )(
        index_q,
        shard.index_k,
        block_table,
        seq_lens,
        scalar_operand(shard.rank),
        scores,
    )
    return written(scores)


def _grid(batch: Batch, used: int, target: Target) -> Grid:
    """CTAs of `used` bytes that fill the GPU, and as many late ones where much can be to do."""
    most = batch.requests * cdiv(batch.columns, STEP_PAGES)
    resident = min(target.sms * ctas_per_sm(used), most)
    return Grid(resident, resident if most >= config.CONFIG.late_from * resident else 0)


def _shared_bytes(scratch: ScratchTypes) -> int:
    used = (ref.dtype.itemsize * math.prod(ref.shape) for ref in scratch.values())
    return sum(round_up(size, 1 << 10) for size in used)


class Parts(NamedTuple):
    """What the kernel is made of: for the machine, or for the interpreter.

    Attributes:
      batch, ring, scorer: classes with the attributes of these.
      shared_bytes: of a CTA with this scratch memory.
    """

    batch: type[Batch]
    ring: type[PageRing]
    scorer: type[Scorer]
    shared_bytes: Callable[[ScratchTypes], int]


MACHINE = Parts(Batch, PageRing, Scorer, _shared_bytes)


def _select_fits(batch: Batch, grid: Grid, used: int, tokens: int, target: Target) -> bool:
    """Whether the CTAs of a select of this plane, one a token, all fit beside the resident ones.

    The next kernels may then start early: the select takes no CTA's place, and the kernel behind it
    comes in as these CTAs end. Otherwise, or with late CTAs still to come, that holds these up. The
    select of a few tokens is ready in time anyway.
    """
    if grid.late or batch.columns > config.CONFIG.early_columns:
        return False
    if not target.sms // 4 <= tokens <= target.sms:
        return False
    resident = ctas_per_sm(used)
    return ctas_per_sm(used + cdiv(_SELECT_BYTES, resident)) == resident


def _kernel(
    query: jax.Ref,
    keys: jax.Ref,
    table: jax.Ref,
    lengths: jax.Ref,
    rank: jax.Ref,
    scores: jax.Ref,
    *,
    scorer: Scorer,
    grid: Grid,
    pdl: bool,
    early: bool,
    **scratch: jax.Ref,
) -> None:
    """Scores the batch; `early` says to let the next kernel start at once, see `_select_fits`."""
    ring = scorer.ring
    if pdl and early:
        scorer.let_next_start()
    ring.start(scratch["arrived"])
    start = _start_dependent if pdl else _start
    state, this_rank = start(query, keys, table, lengths, rank, scratch, scorer, grid)
    plgpu.commit_smem()  # the lengths, the first page ids and queries are there

    def more(state: _State) -> jax.Array:
        return state.work.steps > 0

    def segment(state: _State) -> _State:
        work, done, copied, request = state
        steps = _segment_steps(work, ring.batch)
        for number in range(ring.stages):

            @pl.when((number >= copied) & (number < steps))
            def _(number: int = number) -> None:
                ring.copy(keys, scratch, done + number)

        following = _after(work, steps, scratch["kept_lengths"], ring.batch)

        @pl.when(work.request != request)
        def _() -> None:
            words = scorer.read_queries(query, work.request)
            scorer.keep_queries(scratch["queries"], words)

        @pl.when(following.steps > 0)
        def _() -> None:
            ring.keep_ids(scratch["page_ids"], ring.read_ids(table, following), done + steps)

        plgpu.commit_smem()  # queries and the following page ids are there

        # With enough steps in this segment the ring runs on into the following one.
        beyond = jnp.where(steps >= ring.stages, _segment_steps(following, ring.batch), 0)
        to_copy = steps + beyond
        room = scorer.room(work.first, work.length, this_rank)

        @pl.loop(0, steps)
        def _(number: jax.Array) -> None:
            ahead = number + ring.stages
            if pdl and not early:
                # When all copies are under way: earlier, the next kernel would be in the way.
                @pl.when(ahead >= to_copy)
                def _() -> None:
                    scorer.let_next_start()

            scorer.score(scratch, Step(number, done + number, room))

            @pl.when(ahead < to_copy)
            def _() -> None:
                ring.copy(keys, scratch, done + ahead)

        plgpu.commit_smem()  # all scores of the segment are there
        scorer.write_scores(scratch["found"], scores, work, steps)
        copied = jnp.minimum(to_copy - steps, ring.stages)
        return _State(following, done + steps, copied, work.request)

    lax.while_loop(more, segment, state)


class _State(NamedTuple):
    """Where a CTA is, between two segments.

    Attributes:
      work: what is left to do; the ids of the segment at its start are kept.
      done: steps done.
      copied: steps of the coming segment whose copies are under way, in this warp.
      request: the request whose queries are kept.
    """

    work: Work
    done: jax.Array
    copied: jax.Array
    request: jax.Array


def _segment_steps(work: Work, batch: Batch) -> jax.Array:
    """Steps of the segment at the start of a CTA's work, 0 where nothing is left."""
    to_end = batch.steps(work.length) - work.first
    return jnp.minimum(jnp.minimum(work.steps, to_end), SEGMENT_STEPS)


def _start(
    query: jax.Ref,
    keys: jax.Ref,
    table: jax.Ref,
    lengths: jax.Ref,
    rank: jax.Ref,
    scratch: dict[str, jax.Ref],
    scorer: Scorer,
    grid: Grid,
) -> tuple[_State, jax.Array]:
    """This CTA's work, its first page ids and queries kept; and the rank."""
    del keys
    ring = scorer.ring
    values = ring.batch.read_lengths(lengths)
    ring.batch.keep_lengths(scratch["kept_lengths"], values)
    work = ring.batch.find_work(values, grid)
    _keep_first(query, table, scratch, work, scorer)
    return _State(work, jnp.int32(0), jnp.int32(0), work.request), rank[0]


def _keep_first(
    query: jax.Ref, table: jax.Ref, scratch: dict[str, jax.Ref], work: Work, scorer: Scorer
) -> None:
    """Reads and keeps the first page ids and queries of a CTA's work."""
    ids, words = scorer.ring.read_ids(table, work), scorer.read_queries(query, work.request)
    scorer.ring.keep_ids(scratch["page_ids"], ids, jnp.int32(0))
    scorer.keep_queries(scratch["queries"], words)


def _start_dependent(
    query: jax.Ref,
    keys: jax.Ref,
    table: jax.Ref,
    lengths: jax.Ref,
    rank: jax.Ref,
    scratch: dict[str, jax.Ref],
    scorer: Scorer,
    grid: Grid,
) -> tuple[_State, jax.Array]:
    """As `_start`, under a kernel that may still be writing the inputs.

    The work found before it has ended is a guess. Afterwards everything is read anew and together:
    what the guess names, and the lengths that tell whether it is right. All these loads go ahead of
    the copies of the first pages, which would hold them up. A warp whose guess was wrong waits for
    its copies and drops them. (The lengths may change while they are guessed from: warps need not
    guess alike.)
    """
    ring = scorer.ring

    def hint() -> Work:
        values = ring.batch.read_lengths(lengths)
        work = ring.batch.find_work(values, grid)
        ids = ring.read_ids(table, work)
        is_long = work.steps >= config.CONFIG.many_steps
        ahead = jnp.where(is_long, config.CONFIG.prefetched_of_many, config.CONFIG.prefetched)
        ring.prefetch(keys, query, ids, work, scorer.query_rows, ahead)
        return work

    def nothing() -> Work:
        return Work(*[jnp.int32(0)] * 4)

    # Late CTAs find the wait over.
    guess = lax.cond(lax.axis_index(CTA) < grid.resident, hint, nothing) if grid.late else hint()
    scorer.wait_for_last()
    copied = jnp.minimum(_segment_steps(guess, ring.batch), ring.stages)
    first = ring.read_first(table, guess, copied)
    values = ring.batch.read_lengths(lengths)
    ids = ring.read_ids(table, guess)
    words = scorer.read_queries(query, guess.request)
    this_rank = rank[0]
    copied = ring.copy_first(keys, scratch, first, copied)
    ring.batch.keep_lengths(scratch["kept_lengths"], values)
    work = ring.batch.find_work(values, grid)
    ring.keep_ids(scratch["page_ids"], ids, jnp.int32(0))
    scorer.keep_queries(scratch["queries"], words)
    changed = functools.reduce(jnp.logical_or, (a != b for a, b in zip(guess, work, strict=True)))
    changed &= (work.steps > 0) | (copied > 0)  # or there is nothing to put right

    def again() -> jax.Array:
        ring.drop_first(scratch["arrived"], copied)
        _keep_first(query, table, scratch, work, scorer)
        return jnp.int32(0)

    copied = lax.cond(changed, again, lambda: copied)
    return _State(work, jnp.int32(0), copied, work.request), this_rank


def _after(work: Work, steps: jax.Array, lengths: jax.Ref, batch: Batch) -> Work:
    """What is left of a CTA's work after `steps` steps of its first request."""
    first, left = work.first + steps, work.steps - steps
    ended = first >= batch.steps(work.length)

    def next_request() -> Work:
        def empty(request: jax.Array) -> jax.Array:
            return (batch.steps(lengths[request]) == 0) & (request < batch.requests - 1)

        request = jnp.minimum(work.request + 1, batch.requests - 1)
        request = lax.while_loop(empty, lambda at: at + 1, request)
        return Work(request, lengths[request], jnp.int32(0), left)

    def same_request() -> Work:
        return Work(work.request, work.length, first, left)

    return lax.cond(ended & (left > 0), next_request, same_request)
