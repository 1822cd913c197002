"""Prefill scores: ragged segments of query tokens against their paged index keys."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from msa_icp_jax import checks, geometry, rows
from msa_icp_jax.backend import check_precision, takes_mosaic
from msa_icp_jax.checks import AtLeast
from msa_icp_jax.geometry import (
    BLOCK_SIZE,
    HEAD_DIM,
    MAX_SELECT_COLUMNS,
    NUM_HEADS,
    PAGE_SIZES,
    Forced,
)
from msa_icp_jax.ops.arguments import Shard, check_shard
from msa_icp_jax.ops.prefill_plan import MSAIcpScorePlan
from msa_icp_jax.ops.prefill_score import xla
from msa_icp_jax.ops.select import select_rows
from msa_icp_jax.typing import Backend, Precision

if TYPE_CHECKING:
    from msa_icp_jax.arrays import Array, Float32, IndexFloat, Int32


def msa_icp_index_score_sharded(
    q: IndexFloat[Array, "T 4 128"],
    k: IndexFloat[Array, "pages R 128"],
    block_table: Int32[Array, "B width"],
    plan: MSAIcpScorePlan,
    *,
    rank: int | Int32[Array, ""],
    max_score: Float32[Array, "rows 4 K"],
    sm_scale: float = 1.0,
    initialize: bool = True,
    tp: int = 2,
    compact: bool = False,
    enable_pdl: bool = False,
    backend: Backend = "auto",
    precision: Precision = "auto",
    row_offset: int = 0,
) -> Float32[Array, "rows 4 K"]:
    """Scores every query token of a window against this rank's share of its segment's keys.

    ``score[t, h, c]`` is the maximum of ``q[t, h] . k[row]`` (float32) over the rank's rows of page
    c that token t sees (position <= its own, and below the segment's key length), times `sm_scale`;
    -inf where it sees none. NaN products are skipped, zeros are +0.0. A table entry outside the
    cache makes its rows invisible; entries past the segment's pages are not read.

    Args:
      q: float8_e4m3fn or bfloat16 [T >= plan.total_q, 4, 128].
      k: [pages, R, 128], the dtype of `q`, with R = page_size / tp, or compound pages
        (`row_offset`).
      block_table: int32 [B, width], physical pages of each segment.
      plan: the window plan.
      rank: this rank, an int or a traced int32 scalar.
      max_score: float32 [>= T, 4, K], 0 < K < 12288; donate it to have it written in place. Rows at
        or past T keep their bits.
      sm_scale: finite factor of the scores.
      initialize: write -inf into columns past a token's causal prefix and into padding rows (query
        rows of no segment); otherwise both keep their bits.
      tp: world size W, 2 or 4.
      compact: 256-token pages (column c is page c, two blocks) instead of 128-token ones.
      enable_pdl: let the kernel's launch overlap its predecessor's end (Mosaic only).
      backend: "auto", "mosaic" or "xla".
      precision: "exact" (float32 sums of exact products), "fast" (fp8 tensor cores, 2^-10 of the
        absolute product sum) or "auto" (fast). XLA is always exact, and so is bfloat16.
      row_offset: first row inside a compound page, a multiple of 8.

    Returns:
      float32, the shape of `max_score`.

    Raises:
      TypeError, ValueError: an argument has the wrong dtype, shape or value.
    """
    shard = _check_inputs(q, k, block_table, plan, rank, tp, compact, row_offset)
    checks.flag("enable_pdl", enable_pdl)
    check_precision(precision)
    plan = jax.tree.map(jnp.asarray, plan)  # a loop cannot index numpy leaves
    tokens = q.shape[0]
    _check_plane("max_score", max_score, tokens)
    sm_scale = checks.finite("sm_scale", sm_scale)
    checks.flag("initialize", initialize)
    stage = _stage(backend, precision, enable_pdl, plan, q, k, block_table, max_score)
    if tokens == 0:
        return max_score
    if plan.num_segments == 0:
        return _clear(max_score, tokens) if initialize else max_score
    return stage.prefill_scores(
        q, shard, block_table, plan, max_score, sm_scale=sm_scale, initialize=initialize
    )


def msa_icp_prefill_score_select(
    q: IndexFloat[Array, "T 4 128"],
    k: IndexFloat[Array, "pages R 128"],
    block_table: Int32[Array, "B width"],
    plan: MSAIcpScorePlan,
    num_valid_pages: Int32[Array, " T"],
    carrier: Int32[Array, "4 carrier_rows 33"],
    *,
    rank: int | Int32[Array, ""],
    tp: int = 2,
    compact: bool = False,
    force_begin_blocks: int = 0,
    force_end_blocks: int = 0,
    enable_pdl: bool = False,
    backend: Backend = "auto",
    precision: Precision = "auto",
    row_offset: int = 0,
) -> Int32[Array, "4 carrier_rows 33"]:
    """Scores and selects, without a score plane of the caller's.

    The rows are those of `msa_icp_index_score_sharded` followed by `msa_icp_topk_select_prefill`,
    bit for bit, with a score plane as wide as the window plan's `max_seq_len` needs. The Mosaic
    kernels do it on such a plane of their own: 4 heads x columns x 4 bytes a token, 128 KiB at most
    with pages of 128 tokens, 64 KiB with pages of 256. A kernel that kept lists instead of a plane
    took 1.10 to 1.69 times as long on an H200.

    Args:
      q, k, block_table, plan, rank, tp, compact, enable_pdl, backend, precision, row_offset: as in
        `msa_icp_index_score_sharded`.
      num_valid_pages: int32 [T], visible blocks of each query row, 0 for padding rows.
      carrier: int32 [4, >= T, 33], head-major candidate rows; donate it to have it reused. Rows at
        or past T keep their bits.
      force_begin_blocks: blocks at the start that always win.
      force_end_blocks: visible blocks at the end that always win; at most 16 with the former.

    Returns:
      The carrier with rows [0, T) written.

    Raises:
      TypeError, ValueError: an argument has the wrong dtype, shape or value.
    """
    shard = _check_inputs(q, k, block_table, plan, rank, tp, compact, row_offset)
    checks.flag("enable_pdl", enable_pdl)
    check_precision(precision)
    tokens = q.shape[0]
    checks.array("num_valid_pages", num_valid_pages, jnp.int32, tokens)
    checks.array("carrier", carrier, jnp.int32, NUM_HEADS, AtLeast(tokens), rows.ROW_WORDS)
    forced = geometry.check_forced(
        "force_begin_blocks", force_begin_blocks, "force_end_blocks", force_end_blocks
    )
    return score_and_select(
        *(q, shard, block_table, plan, num_valid_pages, carrier, None, forced),
        columns=geometry.msa_icp_decode_score_columns(max(plan.max_seq_len, 1), shard.page_size),
        enable_pdl=enable_pdl,
        backend=backend,
        precision=precision,
    )[0]


def score_and_select(
    q: IndexFloat[Array, "T 4 128"],
    shard: Shard,
    block_table: Int32[Array, "B width"],
    plan: MSAIcpScorePlan,
    num_valid_pages: Int32[Array, " T"],
    carrier: Int32[Array, "4 carrier_rows 33"],
    max_score: Float32[Array, "rows 4 K"] | None,
    forced: Forced,
    *,
    columns: int,
    enable_pdl: bool,
    backend: Backend,
    precision: Precision,
) -> tuple[Int32[Array, "4 carrier_rows 33"], Float32[Array, "rows 4 K"] | None]:
    """`msa_icp_prefill_score_select` on a plane that the selection alone reads.

    Scores that are not candidates, or that the selection cannot choose, need not be in the plane.
    Arguments are taken as checked.

    Args:
      shard: the keys.
      max_score: float32 [>= T, 4, columns] to be written; None: a temporary plane, or in XLA none.
      forced: blocks that always win.
      columns: the candidates are among the first of so many columns.
      others: as for `msa_icp_prefill_score_select`.

    Returns:
      (carrier, max_score)
    """
    plan = jax.tree.map(jnp.asarray, plan)  # a loop cannot index numpy leaves
    tokens = q.shape[0]
    stage = _stage(backend, precision, enable_pdl, plan, q, shard.index_k, block_table, carrier)
    if tokens == 0:
        return carrier, max_score
    if plan.num_segments == 0:
        empty = rows.empty_rows(NUM_HEADS, tokens)
        cleared = None if max_score is None else _clear(max_score, tokens)
        return lax.dynamic_update_slice(carrier, empty, (0, 0, 0)), cleared
    columns = min(columns, geometry.MAX_BLOCKS // geometry.column_scale(shard.page_size))
    if stage.prefill_rows is not None and max_score is None:
        carrier = stage.prefill_rows(
            q, shard, block_table, plan, num_valid_pages, carrier, forced, columns=columns
        )
        return carrier, None
    if max_score is None:
        plane: Any = jax.ShapeDtypeStruct((tokens, NUM_HEADS, columns), jnp.float32)
    else:
        plane = max_score
    scores = stage.candidate_scores(q, shard, block_table, plan, plane, num_valid_pages, forced)
    candidates = shard.candidates(forced)
    carrier = select_rows(
        scores, num_valid_pages, carrier, None, candidates, enable_pdl=True, backend=backend
    )
    return carrier, None if max_score is None else scores


def msa_icp_prefill_pool_bytes(
    *, total_q: int, batch: int, device: jax.Device | None = None, num_heads: int = NUM_HEADS
) -> int:
    """Bytes of one Top16 list for every query token and head, which a fused prefill needs at least.

    A list is a (score, id) pair of int32 words for each of 16 candidates. The Mosaic kernels use a
    temporary plane of their own instead, of 4 heads x columns x 4 bytes a token.

    Args:
      total_q: query tokens of the window, >= 0.
      batch: segments, >= 0.
      device: the device the lists are for.
      num_heads: 4.

    Raises:
      TypeError, ValueError: an argument is outside its range.
    """
    total_q = checks.integer("total_q", total_q, 0)
    checks.integer("batch", batch, 0)
    checks.device("device", device)
    num_heads = geometry.check_num_heads("num_heads", num_heads)
    return total_q * num_heads * geometry.TOPK * 8


def page_size(compact: bool) -> int:
    """256 for compact columns, else 128."""
    return PAGE_SIZES[1] if compact else BLOCK_SIZE


class _Stage(NamedTuple):
    """A backend's scorers.

    Attributes:
      prefill_scores: all scores.
      candidate_scores: those of a plane that only a selection reads.
      prefill_rows: candidate rows without a plane, None where there is no such way.
    """

    prefill_scores: Callable[..., Array]
    candidate_scores: Callable[..., Array]
    prefill_rows: Callable[..., Array] | None


def _stage(
    backend: Backend, precision: Precision, enable_pdl: bool, plan: MSAIcpScorePlan, *arrays: Any
) -> _Stage:
    if not takes_mosaic(backend, *arrays):
        return _Stage(xla.prefill_scores, _all_scores, xla.prefill_rows)
    if plan.work is None and plan.num_segments:
        raise ValueError(
            'plan must be built for backend "mosaic" (or "auto" on the same device), got one for '
            '"xla"'
        )
    from msa_icp_jax.ops._mosaic.launch import current_launch  # on demand: Pallas takes a while
    from msa_icp_jax.ops.prefill_score import kernel

    launch = current_launch(enable_pdl, "fast" if precision == "auto" else precision)
    return _Stage(
        functools.partial(kernel.prefill_scores, launch=launch),
        functools.partial(kernel.candidate_scores, launch=launch),
        None,
    )


def _all_scores(
    q: IndexFloat[Array, "T 4 128"],
    shard: Shard,
    block_table: Int32[Array, "B width"],
    plan: MSAIcpScorePlan,
    max_score: Float32[Array, "rows 4 K"],
    num_valid_pages: Int32[Array, " T"],
    forced: Forced,
) -> Float32[Array, "rows 4 K"]:
    """XLA's scores for a selection: all of them."""
    del num_valid_pages, forced
    found: Array = xla.prefill_scores(
        q, shard, block_table, plan, max_score, sm_scale=1.0, initialize=True
    )
    return found


def _check_plane(name: str, plane: Any, tokens: int) -> None:
    checks.array(name, plane, jnp.float32, AtLeast(tokens), NUM_HEADS, AtLeast(1))
    checks.integer(f"{name}.shape[2]", plane.shape[2], 1, MAX_SELECT_COLUMNS - 1)


def _check_inputs(
    q: Any,
    k: Any,
    block_table: Any,
    plan: Any,
    rank: Any,
    tp: Any,
    compact: Any,
    row_offset: Any,
) -> Shard:
    if not isinstance(plan, MSAIcpScorePlan):
        raise TypeError(f"plan must be an MSAIcpScorePlan, got {type(plan).__name__}")
    checks.array("q", q, geometry.INDEX_DTYPES, AtLeast(plan.total_q), NUM_HEADS, HEAD_DIM)
    checks.one_of("tp", tp, geometry.WORLD_SIZES)
    checks.flag("compact", compact)
    shard = check_shard(k, rank, tp, page_size(compact), row_offset, name="k", dtype=q.dtype)
    checks.array("block_table", block_table, jnp.int32, plan.num_segments, AtLeast(1))
    return shard


def _clear(max_score: Float32[Array, "rows 4 K"], tokens: int) -> Float32[Array, "rows 4 K"]:
    """-inf in the rows of a window that has no segment."""
    clear = jnp.full((tokens, *max_score.shape[1:]), -jnp.inf, jnp.float32)
    return lax.dynamic_update_slice(max_score, clear, (0, 0, 0))
