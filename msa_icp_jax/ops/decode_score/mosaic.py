"""The decode scorer on Hopper: exact products, one read of every key at the speed of memory.

A persistent grid of small CTAs, one warpgroup each and several on an SM. A CTA finds its part of
the batch (`work_balance`) and goes through it in *segments*: up to 32 steps of one request. A step
is four pages, one a warp; each warp keeps its own ring of page copies going (`page_ring`), takes
the maximum of its page's products in registers (`mma`) and puts it beside the others' in shared
memory. At the end of a segment the CTA writes whole lines of the score plane, while copies of the
next segment are already under way.

Under programmatic dependent launch a CTA starts while the kernel before it still runs. Until that
has ended it takes nothing but hints (see `page_ring`), and reads everything again afterwards.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from msa_icp_jax.geometry import (
    MAX_BLOCKS,
    NUM_HEADS,
    cdiv,
    column_offset,
    column_scale,
    round_up,
    rows_per_page,
)
from msa_icp_jax.ops._mosaic import lanes
from msa_icp_jax.ops._mosaic.lanes import Words, when, where
from msa_icp_jax.ops._mosaic.launch import CTA, Target, ctas_per_sm, launch, writable, written
from msa_icp_jax.ops._mosaic.mma import Scorer, Step
from msa_icp_jax.ops._mosaic.page_ring import SEGMENT_PAGES, SEGMENT_STEPS, PageRing
from msa_icp_jax.ops._mosaic.work_balance import STEP_PAGES, WARP, Batch, Grid, Share, find_share
from msa_icp_jax.ops.select.mosaic import select_rows

_STAGES = {32: 2, 64: 2, 128: 1}  # slots of a warp, by key rows of a page
_LATE_FROM = 6  # steps a CTA: from here on late CTAs gain more than they cost
_SCALAR = plgpu.Layout.WG_SPLAT


def decode_scores(
    index_q: jax.Array,
    index_k: jax.Array,
    block_table: jax.Array,
    seq_lens: jax.Array,
    score_out: jax.Array,
    *,
    rank: Any,
    world_size: int,
    page_size: int,
    decode_query_len: int,
    row_offset: int,
    precision: str,
    enable_pdl: bool,
    target: Target,
) -> jax.Array:
    """Writes the columns of each request's pages, rounded up to four, into `score_out`.

    Args:
      index_q: float8_e4m3fn [T, 4, 128].
      index_k: float8_e4m3fn [pages, rows, 128]; this rank's rows of a page start at `row_offset`.
      block_table: int32 [B, width].
      seq_lens: int32 [B], T = B decode_query_len.
      score_out: float32 [>= T, 4, columns], written in place where it is donated.
      rank: int or traced int32 scalar.
      world_size: W.
      page_size: P.
      decode_query_len: query tokens of a request.
      row_offset: see `index_k`.
      precision: "exact" or "fast". Both run the exact kernel: memory sets the pace, and the
        shorter sums of fp8 products would save nothing.
      enable_pdl: start under the kernel before this one.
      target: the machine to build for.
    """
    del precision
    requests, width = block_table.shape
    pages, pitch, _ = index_k.shape
    rows, columns = rows_per_page(world_size, page_size), score_out.shape[2]
    batch = Batch(requests, page_size, columns)
    ring = PageRing(batch, width, pages, pitch, row_offset, rows, _STAGES[rows], target.interpret)
    scorer = Scorer(ring, decode_query_len, world_size)
    scratch = {**ring.scratch(), **scorer.scratch()}
    grid = _grid(scorer, target)
    scores = writable(score_out)
    launch(
        functools.partial(_kernel, scorer=scorer, grid=grid, pdl=enable_pdl),
        name="decode_scores",
        target=target,
        grid=(grid.ctas,),
        scratch_types=scratch,
    )(
        index_q,
        index_k,
        block_table,
        seq_lens,
        jnp.asarray(rank, jnp.int32).reshape(1),
        scores,
    )
    return written(scores)


def decode_rows(
    index_q: jax.Array,
    index_k: jax.Array,
    block_table: jax.Array,
    seq_lens: jax.Array,
    num_valid_pages: jax.Array,
    generations: jax.Array | None,
    *,
    rank: Any,
    world_size: int,
    page_size: int,
    decode_query_len: int,
    row_offset: int,
    force_begin_blocks: int,
    force_end_blocks: int,
    precision: str,
    enable_pdl: bool,
    target: Target,
) -> jax.Array:
    """Candidate rows [4, T, 33], or tagged ones, without a score plane of the caller's.

    The scorer and the select run one after the other on a temporary plane of all columns a
    candidate can have, 128 KiB a token with 128-token pages and half of that with 256.
    """
    columns = MAX_BLOCKS // column_scale(page_size)
    empty = jnp.full((index_q.shape[0], NUM_HEADS, columns), -jnp.inf, jnp.float32)
    scores = decode_scores(
        index_q,
        index_k,
        block_table,
        seq_lens,
        empty,
        rank=rank,
        world_size=world_size,
        page_size=page_size,
        decode_query_len=decode_query_len,
        row_offset=row_offset,
        precision=precision,
        enable_pdl=enable_pdl,
        target=target,
    )
    return select_rows(
        scores,
        num_valid_pages,
        None,
        generations,
        index_scale=column_scale(page_size),
        index_offset=column_offset(rank, world_size, page_size),
        force_begin_blocks=force_begin_blocks,
        force_end_blocks=force_end_blocks,
        enable_pdl=enable_pdl,
        target=target,
    )


def _grid(scorer: Scorer, target: Target) -> Grid:
    """CTAs that fill the GPU, and as many late ones where much can be to do."""
    batch = scorer.ring.batch
    most = batch.requests * cdiv(batch.columns, STEP_PAGES)
    resident = min(target.sms * _resident(scorer), most)
    return Grid(resident, resident if most >= _LATE_FROM * resident else 0)


def _resident(scorer: Scorer) -> int:
    """CTAs an SM holds; in interpret mode, which has no SMs, one."""
    if scorer.ring.interpret:
        return 1
    scratch = {**scorer.ring.scratch(), **scorer.scratch()}
    used = (ref.dtype.itemsize * math.prod(ref.shape) for ref in scratch.values())
    return ctas_per_sm(sum(round_up(size, 1024) for size in used))


def _kernel(
    query: Any,
    keys: Any,
    table: Any,
    lengths: Any,
    rank: Any,
    scores: Any,
    *,
    scorer: Scorer,
    grid: Grid,
    pdl: bool,
    **scratch: Any,
) -> None:
    ring = scorer.ring
    ring.start(scratch["arrived"])
    start = _start_dependent if pdl else _start
    share = start(query, keys, table, lengths, scratch["page_ids"], scorer, grid)
    plgpu.commit_smem()  # the first page ids are there
    this_rank = rank[0]

    def more(state: _State) -> Any:
        return state.share.steps > 0

    def segment(state: _State) -> _State:
        share, done, copied = state
        steps = _segment_steps(share, ring.batch)
        for number in range(ring.stages):

            @pl.when((number >= copied) & (number < steps))
            def _(number: int = number) -> None:
                ring.copy(keys, scratch, done + number)

        following = _after(share, steps, lengths, ring.batch)
        following_ids = ring.read_ids(table, following)
        scorer.load_queries(query, scratch["queries"], share.request)
        ring.keep_ids(scratch["page_ids"], following_ids, done + steps)
        plgpu.commit_smem()  # queries and the following page ids are there

        # With enough steps in this segment the ring runs on into the following one.
        beyond = jnp.where(steps >= ring.stages, _segment_steps(following, ring.batch), 0)
        to_copy = steps + beyond
        room = scorer.room(share.first, share.length, this_rank)

        @pl.loop(0, steps)
        def _(number: Any) -> None:
            scorer.score(scratch, Step(number, done + number, room))
            ahead = number + ring.stages

            @pl.when(ahead < to_copy)
            def _() -> None:
                ring.copy(keys, scratch, done + ahead)

            if pdl and not ring.interpret:

                @pl.when(ahead >= to_copy)
                def _() -> None:
                    plgpu.griddepcontrol_launch_dependents()

        plgpu.commit_smem()  # all scores of the segment are there
        _write_scores(scratch["found"], scores, share, steps, scorer)
        return _State(following, done + steps, jnp.minimum(to_copy - steps, ring.stages))

    lax.while_loop(more, segment, _State(share, jnp.int32(0), jnp.int32(0)))


class _State(NamedTuple):
    """Where a CTA is, between two segments.

    Attributes:
      share: what is left to do; the ids of the segment at its start are kept.
      done: steps done.
      copied: steps of that segment whose copies are under way.
    """

    share: Share
    done: Any
    copied: Any


def _segment_steps(share: Share, batch: Batch) -> Any:
    """Steps of the segment at a share's start, 0 where nothing is left."""
    to_end = batch.steps(share.length) - share.first
    return jnp.minimum(jnp.minimum(share.steps, to_end), SEGMENT_STEPS)


def _start(
    query: Any, keys: Any, table: Any, lengths: Any, page_ids: Any, scorer: Scorer, grid: Grid
) -> Share:
    """This CTA's share; the ids of its first pages are in `page_ids`."""
    del query, keys
    ring = scorer.ring
    share = find_share(lengths, ring.batch, grid, ring.interpret)
    ring.keep_ids(page_ids, ring.read_ids(table, share), jnp.int32(0))
    return share


def _start_dependent(
    query: Any, keys: Any, table: Any, lengths: Any, page_ids: Any, scorer: Scorer, grid: Grid
) -> Share:
    """As `_start`, under a kernel that may still be writing the inputs.

    The share found before it has ended is a guess. Afterwards the ids are read by that guess while
    the lengths are, and once more if the guess was wrong.
    """
    ring = scorer.ring

    def find() -> Share:
        return find_share(lengths, ring.batch, grid, ring.interpret)

    def nothing() -> Share:
        return Share(*[jnp.int32(0)] * 4)

    # Late CTAs find the wait over.
    guess = lax.cond(lax.axis_index(CTA) < grid.resident, find, nothing) if grid.late else find()
    ring.prefetch(keys, query, ring.read_ids(table, guess), guess, scorer.query_rows)
    if not ring.interpret:
        plgpu.griddepcontrol_wait()
    ids = ring.read_ids(table, guess)
    share = find()
    ring.keep_ids(page_ids, ids, jnp.int32(0))
    changed = functools.reduce(jnp.logical_or, (a != b for a, b in zip(guess, share, strict=True)))

    @pl.when(changed)
    def _() -> None:
        ring.keep_ids(page_ids, ring.read_ids(table, share), jnp.int32(0))

    return share


def _after(share: Share, steps: Any, lengths: Any, batch: Batch) -> Share:
    """What is left of a share after `steps` steps of its first request."""
    first, left = share.first + steps, share.steps - steps
    ended = first >= batch.steps(share.length)

    def next_request() -> Share:
        def empty(request: Any) -> Any:
            return (batch.steps(lengths[request]) == 0) & (request < batch.requests - 1)

        request = jnp.minimum(share.request + 1, batch.requests - 1)
        request = lax.while_loop(empty, lambda at: at + 1, request)
        return Share(request, lengths[request], jnp.int32(0), left)

    def same_request() -> Share:
        return Share(share.request, share.length, first, left)

    return lax.cond(ended & (left > 0), next_request, same_request)


def _write_scores(found: Any, scores: Any, share: Share, steps: Any, scorer: Scorer) -> None:
    """Writes a segment's scores: ``4 steps`` columns from column ``4 share.first`` on."""
    write = _write_scores_stock if scorer.ring.interpret else _write_scores_inline
    write(found, scores, share.request, share.first * STEP_PAGES, steps, scorer)


def _write_scores_stock(
    found: Any, scores: Any, request: Any, column: Any, steps: Any, scorer: Scorer
) -> None:
    @pl.loop(0, steps)
    def _(step: Any) -> None:
        values = found[:, pl.ds(step * STEP_PAGES, STEP_PAGES)]
        values = jnp.where(values == 0, 0.0, values)
        tokens = pl.ds(request * scorer.tokens, scorer.tokens)
        columns = pl.ds(column + step * STEP_PAGES, STEP_PAGES)
        scores[tokens, :, columns] = values.reshape(scorer.tokens, NUM_HEADS, STEP_PAGES)


def _write_scores_inline(
    found: Any, scores: Any, request: Any, column: Any, steps: Any, scorer: Scorer
) -> None:
    """A warp a head; a lane four columns, which makes 128 of the 32."""
    columns = scorer.ring.batch.columns

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), _SCALAR, _SCALAR, _SCALAR))
    def write(_: Any, found: Any, scores: Any, request: Any, column: Any, steps: Any) -> None:
        head, lane = lanes.thread() >> 5, lanes.thread() & (WARP - 1)
        row = lanes.scalar(request) * scorer.query_rows + head
        at = lane * STEP_PAGES
        source = Words.of(found) + (head * SEGMENT_PAGES + at)
        goal = Words.of(scores) + (row * columns + lanes.scalar(column) + at)
        with when(lane < lanes.scalar(steps)):
            for token in range(scorer.tokens):
                values = (source + token * NUM_HEADS * SEGMENT_PAGES).load_vector(lanes.f32(), 4)
                flushed = [where(x.eq(0.0), 0.0, x) for x in values]
                (goal + token * NUM_HEADS * columns).store_vector(flushed)

    write(found, scores, request, column, steps)
