"""Decode scores: a few query tokens of every request against its paged index keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from msa_icp_jax import checks, geometry
from msa_icp_jax.backend import check_precision, takes_mosaic
from msa_icp_jax.checks import AtLeast
from msa_icp_jax.geometry import COLUMN_MULTIPLE, HEAD_DIM, MAX_BLOCKS, NUM_HEADS
from msa_icp_jax.ops.arguments import Shard, check_shard
from msa_icp_jax.ops.decode_score import xla
from msa_icp_jax.ops.select import MSAIcpRows, check_generations, select_by_owner
from msa_icp_jax.typing import Backend, Precision

if TYPE_CHECKING:
    from msa_icp_jax.arrays import Array, Float32, IndexFloat, Int32


def msa_icp_decode_index_score_sharded(
    index_q: IndexFloat[Array, "T 4 128"],
    index_k: IndexFloat[Array, "pages R 128"],
    block_table: Int32[Array, "B width"],
    seq_lens: Int32[Array, " B"],
    score_out: Float32[Array, "rows 4 columns"],
    *,
    rank: int | Int32[Array, ""],
    world_size: int,
    page_size: int,
    decode_query_len: int,
    max_decode_query_len: int,
    enable_pdl: bool = False,
    backend: Backend = "auto",
    precision: Precision = "auto",
    row_offset: int = 0,
) -> Float32[Array, "rows 4 columns"]:
    """Scores every decode token against this rank's share of its request's keys.

    ``score[t, h, c]`` is the maximum of ``q[t, h] . k[row]`` (float32) over the rank's rows of page
    c that token t sees (position <= its own, and below seq_len), -inf where it sees none. Token j
    of a request sits at position ``seq_len - decode_query_len + j``. NaN products are skipped,
    zeros are +0.0. Written are, for each request, the columns of its ``ceil(seq_len / page_size)``
    pages rounded up to a multiple of four, and no other. A table entry outside the cache makes its
    rows invisible; entries past the request's pages are not read.

    Args:
      index_q: float8_e4m3fn or bfloat16 [T, 4, 128], T = B * decode_query_len.
      index_k: [pages, R, 128], the dtype of `index_q`, with R = page_size / world_size, or compound
        pages (`row_offset`).
      block_table: int32 [B, width], physical pages of each request.
      seq_lens: int32 [B], keys of each request; 0 or less: nothing is read or written.
      score_out: float32 [>= T, 4, columns], 0 < columns <= 8192, a multiple of 4; donate it to have
        it written in place. Rows at or past T keep their bits.
      rank: this rank, an int or a traced int32 scalar.
      world_size: W, 2 or 4.
      page_size: 128 or 256.
      decode_query_len: query tokens of every request.
      max_decode_query_len: its limit, 1 to 8.
      enable_pdl: let the kernel's launch overlap its predecessor's end (Mosaic only).
      backend: "auto", "mosaic" or "xla".
      precision: "exact" (float32 sums of exact products), "auto" (exact) or "fast", which allows
        an error of 2^-10 of the absolute product sum. No backend makes use of it in decode.
      row_offset: first row inside a compound page, a multiple of 8.

    Returns:
      float32, the shape of `score_out`.

    Raises:
      TypeError, ValueError: an argument has the wrong dtype, shape or value.
    """
    most = geometry.check_query_len("max_decode_query_len", max_decode_query_len)
    decode_query_len = geometry.check_query_len("decode_query_len", decode_query_len, most)
    shard = check_shard(index_k, rank, world_size, page_size, row_offset)
    _check_inputs(index_q, shard, block_table, seq_lens, decode_query_len)
    checks.flag("enable_pdl", enable_pdl)
    check_precision(precision)
    checks.array(
        "score_out", score_out, jnp.float32, AtLeast(index_q.shape[0]), NUM_HEADS, AtLeast(1)
    )
    columns = checks.integer("score_out.shape[2]", score_out.shape[2], 1, MAX_BLOCKS)
    if columns % COLUMN_MULTIPLE:
        raise ValueError(f"score_out.shape[2] must be a multiple of 4 in [4, 8192], got {columns}")
    return decode_scores(
        index_q, shard, block_table, seq_lens, score_out, enable_pdl=enable_pdl, backend=backend
    )


def msa_icp_decode_score_publish(
    index_q: IndexFloat[Array, "T 4 128"],
    index_k: IndexFloat[Array, "pages R 128"],
    block_table: Int32[Array, "B width"],
    seq_lens: Int32[Array, " B"],
    num_valid_pages: Int32[Array, " T"],
    *,
    rank: int | Int32[Array, ""],
    world_size: int,
    page_size: int,
    decode_query_len: int,
    force_begin_blocks: int,
    force_end_blocks: int,
    generations: Int32[Array, "3 4 C"] | None = None,
    slot: int | Int32[Array, ""] = 0,
    enable_pdl: bool = True,
    backend: Backend = "auto",
    precision: Precision = "auto",
    row_offset: int = 0,
) -> MSAIcpRows:
    """Scores and selects, without a score plane of the caller's.

    It is `msa_icp_decode_index_score_sharded` followed by `msa_icp_topk_select_publish`, on a
    temporary plane of the widest context, -inf at first: 128 KiB a token with pages of 128 tokens,
    64 KiB with pages of 256. A kernel that held lists instead of a plane took 1.17 to 1.36 times as
    long on an H200.

    Args:
      index_q, index_k, block_table, seq_lens, rank, world_size, page_size, decode_query_len,
        enable_pdl, backend, precision, row_offset: as in `msa_icp_decode_index_score_sharded`.
      num_valid_pages: int32 [T], visible blocks of each token, 0 where there is none.
      force_begin_blocks: blocks at the start that always win.
      force_end_blocks: visible blocks at the end that always win; at most 16 with the former.
      generations: int32 [3, 4, C >= T]: the publish counters; tagged rows are returned then.
      slot: slot of this call, taken mod 3; may be a traced int32 scalar.

    Returns:
      MSAIcpRows: rows [W, hpr, T, 33] or tagged [W, hpr, T, 32, 2], and the bumped counters.

    Raises:
      TypeError, ValueError: an argument has the wrong dtype, shape or value.
    """
    decode_query_len = geometry.check_query_len("decode_query_len", decode_query_len)
    shard = check_shard(index_k, rank, world_size, page_size, row_offset)
    _check_inputs(index_q, shard, block_table, seq_lens, decode_query_len)
    checks.flag("enable_pdl", enable_pdl)
    check_precision(precision)
    tokens = index_q.shape[0]
    checks.array("num_valid_pages", num_valid_pages, jnp.int32, tokens)
    candidates = shard.candidates(
        geometry.check_forced(
            "force_begin_blocks", force_begin_blocks, "force_end_blocks", force_end_blocks
        )
    )
    slot = check_generations(generations, slot, tokens)
    plane = (tokens, NUM_HEADS, MAX_BLOCKS // candidates.scale)
    launch: dict[str, Any] = {"enable_pdl": enable_pdl, "backend": backend}
    scores = jnp.full(plane, -jnp.inf, jnp.float32)
    scores = decode_scores(index_q, shard, block_table, seq_lens, scores, **launch)
    return select_by_owner(
        scores, num_valid_pages, candidates, generations, slot, shard.world_size, **launch
    )


def decode_scores(
    index_q: IndexFloat[Array, "T 4 128"],
    shard: Shard,
    block_table: Int32[Array, "B width"],
    seq_lens: Int32[Array, " B"],
    score_out: Float32[Array, "rows 4 columns"],
    *,
    enable_pdl: bool,
    backend: Backend,
) -> Float32[Array, "rows 4 columns"]:
    """`msa_icp_decode_index_score_sharded` of a shard; arguments are taken as checked."""
    on_mosaic = takes_mosaic(backend, index_q, shard.index_k, block_table, seq_lens, score_out)
    if index_q.shape[0] == 0:
        return score_out
    if not on_mosaic:
        return xla.decode_scores(index_q, shard, block_table, seq_lens, score_out)
    from msa_icp_jax.ops._mosaic.launch import current_launch  # on demand: Pallas takes a while
    from msa_icp_jax.ops.decode_score import kernel

    launch = current_launch(enable_pdl)
    return kernel.decode_scores(index_q, shard, block_table, seq_lens, score_out, launch)


def msa_icp_decode_pool_bytes(
    *,
    batch: int,
    decode_query_len: int,
    max_model_len: int,
    page_size: int,
    device: jax.Device | None = None,
) -> int:
    """Bytes of the score plane of a decode without the caller's: 4 heads x columns x 4 a token.

    Args:
      batch: requests, >= 0.
      decode_query_len: query tokens of every request, 1 to 8.
      max_model_len: longest context in tokens, >= 1.
      page_size: 128 or 256.
      device: the device the plane is for.

    Raises:
      TypeError, ValueError: an argument is outside its range.
    """
    batch = checks.integer("batch", batch, 0)
    decode_query_len = geometry.check_query_len("decode_query_len", decode_query_len)
    columns = geometry.msa_icp_decode_score_columns(max_model_len, page_size)
    checks.device("device", device)
    return batch * decode_query_len * NUM_HEADS * columns * 4


def _check_inputs(
    index_q: Any, shard: Shard, block_table: Any, seq_lens: Any, decode_query_len: int
) -> None:
    checks.array("block_table", block_table, jnp.int32, None, AtLeast(1))
    requests = block_table.shape[0]
    checks.array("seq_lens", seq_lens, jnp.int32, requests)
    tokens = requests * decode_query_len
    checks.array("index_q", index_q, shard.index_k.dtype, tokens, NUM_HEADS, HEAD_DIM)
