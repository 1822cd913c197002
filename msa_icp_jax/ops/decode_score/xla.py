"""Decode scores, the plain definition: a loop over columns, bounded by today's longest context."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from msa_icp_jax.backend import start_at, vary_as
from msa_icp_jax.geometry import COLUMN_MULTIPLE, NUM_HEADS, cdiv, round_up
from msa_icp_jax.ops import _portable
from msa_icp_jax.ops._portable import Tuning
from msa_icp_jax.ops.arguments import Shard

if TYPE_CHECKING:
    from msa_icp_jax.arrays import Array, Float32, IndexFloat, Int32

_TILES = 8  # tiles of one request in a step, if all are equally long


# Jitted for eager callers, whose loops would otherwise compile anew in each call.
@jax.jit
@_portable.tuned
def decode_scores(
    index_q: IndexFloat[Array, "T 4 128"],
    shard: Shard,
    block_table: Int32[Array, "B width"],
    seq_lens: Int32[Array, " B"],
    score_out: Float32[Array, "rows 4 columns"],
    *,
    tuning: Tuning,
) -> Float32[Array, "rows 4 columns"]:
    """Writes the columns of each request's pages, rounded up to four; see the public function."""
    decode_query_len = index_q.shape[0] // block_table.shape[0]
    batch = _Requests.of(index_q, block_table, seq_lens, decode_query_len)
    requests, columns = block_table.shape[0], score_out.shape[2]
    queries = decode_query_len * NUM_HEADS
    step = _portable.columns_per_step(shard, requests, queries, columns, tuning)
    score_out = vary_as(score_out, index_q, shard.index_k, block_table, seq_lens, shard.rank)
    if step == columns:
        cols = jnp.broadcast_to(jnp.arange(columns, dtype=jnp.int32), (requests, columns))
        old = score_out[: index_q.shape[0]]
        return lax.dynamic_update_slice(
            score_out, batch.written(old, cols, shard, tuning), start_at(0, 0, 0)
        )

    # A step scores tiles: a few columns of one request each. Only those are visited that have to be
    # written, so that one long request among many costs what its own columns do.
    width = min(columns, max(COLUMN_MULTIPLE, step // _TILES // COLUMN_MULTIPLE * COLUMN_MULTIPLE))
    at_once = requests * max(1, step // width)
    used = jnp.minimum(cdiv(batch.lengths, shard.page_size), columns)
    ends = jnp.cumsum(cdiv(round_up(used, COLUMN_MULTIPLE), width), dtype=jnp.int32)

    def body(i: jax.Array, plane: jax.Array) -> jax.Array:
        # The last step may write tiles again.
        tile = jnp.minimum(i * at_once + jnp.arange(at_once, dtype=jnp.int32), ends[-1] - 1)
        request = jnp.searchsorted(ends, tile, side="right", method="compare_all")
        request = request.astype(jnp.int32)
        before = jnp.where(request > 0, ends[request - 1], 0)
        first = jnp.minimum((tile - before) * width, columns - width)
        start = jnp.stack([request * decode_query_len, jnp.zeros_like(first), first], axis=-1)
        old = lax.gather(
            plane,
            start,
            lax.GatherDimensionNumbers(
                offset_dims=(1, 2, 3), collapsed_slice_dims=(), start_index_map=(0, 1, 2)
            ),
            slice_sizes=(decode_query_len, NUM_HEADS, width),
            mode=lax.GatherScatterMode.CLIP,
        )
        cols = first[:, None] + jnp.arange(width, dtype=jnp.int32)[None]
        new = batch.picked(request).written(old.reshape(-1, NUM_HEADS, width), cols, shard, tuning)
        return lax.scatter(
            plane,
            start,
            new.reshape(old.shape),
            lax.ScatterDimensionNumbers(
                update_window_dims=(1, 2, 3),
                inserted_window_dims=(),
                scatter_dims_to_operand_dims=(0, 1, 2),
            ),
            mode=lax.GatherScatterMode.CLIP,
        )

    return lax.fori_loop(0, cdiv(ends[-1], at_once), body, score_out)


class _Requests(NamedTuple):
    """Decode requests, or parts of some.

    Attributes:
      query: float8_e4m3fn [requests, query tokens, 4, 128].
      table: int32 [requests, width].
      lengths: int32 [requests], none negative.
    """

    query: IndexFloat[Array, "requests tokens 4 128"]
    table: Int32[Array, "requests width"]
    lengths: Int32[Array, " requests"]

    @staticmethod
    def of(
        index_q: IndexFloat[Array, "T 4 128"],
        block_table: Int32[Array, "B width"],
        seq_lens: Int32[Array, " B"],
        decode_query_len: int,
    ) -> _Requests:
        """A batch of whole requests."""
        query = index_q.reshape(-1, decode_query_len, *index_q.shape[1:])
        return _Requests(query, block_table, jnp.maximum(seq_lens, 0))

    def picked(self, request: Int32[Array, " n"]) -> _Requests:
        """The requests with these numbers, int32 [n]."""
        bits = lax.bitcast_convert_type(self.query, jnp.uint8)  # XLA on CPU cannot move float8
        query = lax.bitcast_convert_type(bits[request], self.query.dtype)
        return _Requests(query, self.table[request], self.lengths[request])

    def written(
        self,
        old: Float32[Array, "T 4 columns"],
        columns: Int32[Array, "requests columns"],
        shard: Shard,
        tuning: Tuning,
    ) -> Float32[Array, "T 4 columns"]:
        """`old` [T, 4, columns] with scores where they belong; columns int32 [requests, columns].

        They belong in the columns of a request's pages, rounded up to four.
        """
        length = self.query.shape[1]
        token = jnp.arange(length, dtype=jnp.int32) - length
        positions = self.lengths[:, None] + token[None]
        scores = _portable.column_scores(
            self.query, shard, self.table, columns, positions, self.lengths, tuning
        )
        end = round_up(cdiv(self.lengths, shard.page_size), COLUMN_MULTIPLE)
        own = (columns < end[:, None])[:, None, None]
        return jnp.where(own, scores, old.reshape(scores.shape)).reshape(old.shape)
