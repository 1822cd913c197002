"""Decode scores, the plain definition: a loop over columns, bounded by today's longest context."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from msa_icp_jax.backend import start_at, vary_as
from msa_icp_jax.geometry import COLUMN_MULTIPLE, NUM_HEADS, cdiv, round_up
from msa_icp_jax.ops import _portable
from msa_icp_jax.ops._portable import Shard, Tuning

# Jitted for eager callers, whose loops would otherwise compile anew in each call.
_SIZES = ("world_size", "page_size", "decode_query_len", "row_offset")


@functools.partial(jax.jit, static_argnames=_SIZES)
@_portable.tuned
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
    tuning: Tuning,
) -> jax.Array:
    """Writes the columns of each request's pages, rounded up to four; see the public function."""
    shard = Shard(index_k, rank, world_size, page_size, row_offset)
    tokens, columns = index_q.shape[0], score_out.shape[2]
    score_step = _ScoreStep(index_q, shard, block_table, seq_lens, decode_query_len, tuning)
    used = jnp.minimum(cdiv(score_step.lengths, page_size), columns)
    written = jnp.repeat(round_up(used, COLUMN_MULTIPLE), decode_query_len)
    queries = decode_query_len * NUM_HEADS
    step = _portable.columns_per_step(shard, block_table.shape[0], queries, columns, tuning)

    def body(i: jax.Array, plane: jax.Array) -> jax.Array:
        first = jnp.minimum(i * step, columns - step)  # the last step may score columns again
        cols = first + jnp.arange(step, dtype=jnp.int32)
        old = lax.dynamic_slice(plane, start_at(0, 0, first), (tokens, NUM_HEADS, step))
        new = jnp.where((cols[None] < written[:, None])[:, None], score_step(cols), old)
        return lax.dynamic_update_slice(plane, new, start_at(0, 0, first))

    score_out = vary_as(score_out, index_q, index_k, block_table, seq_lens, rank)
    return _portable.for_each_step(written.max(), step, columns, body, score_out)


class _ScoreStep:
    """Scores float32 [T, 4, columns] of some columns of every request."""

    def __init__(
        self,
        index_q: jax.Array,
        shard: Shard,
        block_table: jax.Array,
        seq_lens: jax.Array,
        decode_query_len: int,
        tuning: Tuning,
    ) -> None:
        self.query = index_q.reshape(-1, decode_query_len, *index_q.shape[1:])
        self.shard = shard
        self.block_table = block_table
        self.lengths = jnp.maximum(seq_lens, 0)
        token = jnp.arange(decode_query_len, dtype=jnp.int32) - decode_query_len
        self.positions = self.lengths[:, None] + token[None]
        self.tuning = tuning

    def __call__(self, columns: jax.Array) -> jax.Array:
        pages = _portable.pages_of(
            self.block_table,
            self.lengths,
            columns,
            self.shard.index_k.shape[0],
            self.shard.page_size,
        )
        scores = _portable.column_scores(
            self.query, self.shard, pages, columns, self.positions, self.lengths, self.tuning
        )
        return scores.reshape(-1, NUM_HEADS, columns.shape[0])
