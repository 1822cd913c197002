"""Who chooses the blocks: msa_icp_jax over W ranks, or a dense reference on one device.

Both answer the same questions of `serve.model.forward`, so a model is served by either unchanged.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from msa_icp_jax import MSAIcpIndexerPlan, msa_icp_write_index_k, prepare_msa_icp_indexer
from serve.model import BLOCK, HEADS, Config, Schedule

TOPK = 16


def make_plan(
    config: Config, world_size: int, backend: str = "auto", transport: str = "collective"
) -> MSAIcpIndexerPlan:
    """The plan of this server's limits; exact, so that every rank count chooses the same blocks."""
    return prepare_msa_icp_indexer(
        world_size=world_size,
        num_index_heads=HEADS,
        page_size=config.page_size,
        init_blocks=config.init_blocks,
        local_blocks=config.local_blocks,
        max_decode_tokens=max(config.decode_buckets) * config.query_len,
        max_decode_query_len=config.query_len,
        max_num_batched_tokens=config.chunk,
        max_num_seqs=max(*config.decode_buckets, config.segments),
        max_model_len=config.max_len,
        num_sparse_layers=config.layers,
        backend=backend,
        precision="exact",
        transport=transport,
    )


class Scratch(NamedTuple):
    """Buffers that one layer's indexer call hands to the next layer's; never leave the step."""

    decode_scores: jax.Array
    prefill_scores: jax.Array
    carrier: jax.Array


class IcpIndexer:
    """The indexer over the ranks of an icp axis; runs where that axis is bound."""

    def __init__(self, config: Config, plan: MSAIcpIndexerPlan) -> None:
        self.config = config
        self.plan = plan

    def window(self, schedule: Schedule) -> Any:
        """The plan of the step's prefill window; None where it has none."""
        if not schedule.segment_slots.shape[0]:
            return None
        return self.plan.prefill_window_plan(
            schedule.segment_lens,
            schedule.segment_starts + schedule.segment_lens,
            schedule.segment_starts,
            total_q=self.config.chunk,
            max_query_len=self.config.chunk,
            max_seq_len=self.config.max_len,
        )

    def scratch(self, decode_tokens: int) -> Scratch:
        columns = self.plan.geometry.score_columns
        return Scratch(
            jnp.full((decode_tokens, HEADS, columns), -jnp.inf, jnp.float32),
            jnp.full((self.config.chunk, HEADS, columns), -jnp.inf, jnp.float32),
            jnp.zeros((HEADS, self.config.chunk, 33), jnp.int32),
        )

    def write(self, index_k: jax.Array, new_k: jax.Array, slots: jax.Array) -> jax.Array:
        """Stores the rows of new index keys that this rank owns."""
        return msa_icp_write_index_k(
            index_k,
            new_k,
            slots,
            rank=lax.axis_index(self.plan.axis_name),
            world_size=self.plan.geometry.world_size,
            page_size=self.config.page_size,
            backend=self.plan.backend,
        )

    def choose(
        self,
        index_q: jax.Array,
        index_k: jax.Array,
        decode_tables: jax.Array,
        seq_lens: jax.Array,
        segment_tables: jax.Array,
        window: Any,
        positions: jax.Array,
        scratch: Scratch,
        exchange: Any,
    ) -> tuple[jax.Array, Scratch, Any]:
        """Block ids int32 [T, hpr, 16] of the heads this rank owns, decode rows first."""
        comm, calls = exchange or (None, 0)
        split = seq_lens.shape[0] * self.config.query_len
        visible = jnp.where(positions >= 0, positions // BLOCK + 1, 0)
        ids, scores, comm = self.plan.decode(
            index_q[:split],
            index_k,
            decode_tables,
            seq_lens,
            visible[:split],
            scratch.decode_scores,
            comm=comm,
            slot=calls,
            tagged=self.config.layers > 1,
            decode_query_len=self.config.query_len,
        )
        scratch = scratch._replace(decode_scores=scores)
        if exchange:
            exchange = comm, (calls + 1) % 3
        if window is None:
            return ids, scratch, exchange
        owned = self.plan.geometry.heads_per_rank
        prefill_ids, carrier, scores = self.plan.prefill(
            index_q[split:],
            index_k,
            segment_tables,
            window,
            scratch.prefill_scores,
            visible[split:],
            scratch.carrier,
            jnp.full((self.config.chunk, owned, TOPK), -1, jnp.int32),
        )
        scratch = scratch._replace(prefill_scores=scores, carrier=carrier)
        return jnp.concatenate([ids, prefill_ids]), scratch, exchange

    def own_heads(self, x: jax.Array) -> jax.Array:
        """This rank's heads of [T, 4, ...]. A large model shards its projections instead."""
        owned = self.plan.geometry.heads_per_rank
        return lax.dynamic_slice_in_dim(x, lax.axis_index(self.plan.axis_name) * owned, owned, 1)

    def all_heads(self, x: jax.Array) -> jax.Array:
        """Every rank's heads [T, 4, ...] of this rank's [T, hpr, ...]."""
        return lax.all_gather(x, self.plan.axis_name, axis=1, tiled=True)


class DenseIndexer:
    """The reference: one device scores every key and sorts every block; no package code."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def window(self, schedule: Schedule) -> Any:
        return schedule.segment_lens if schedule.segment_slots.shape[0] else None

    def scratch(self, decode_tokens: int) -> tuple[()]:
        return ()

    def write(self, index_k: jax.Array, new_k: jax.Array, slots: jax.Array) -> jax.Array:
        page = jnp.where(slots >= 0, slots // self.config.page_size, index_k.shape[0])
        stored = lax.bitcast_convert_type(index_k, jnp.uint8)
        new = lax.bitcast_convert_type(new_k, jnp.uint8)
        stored = stored.at[page, slots % self.config.page_size].set(new, mode="drop")
        return lax.bitcast_convert_type(stored, index_k.dtype)

    def choose(
        self,
        index_q: jax.Array,
        index_k: jax.Array,
        decode_tables: jax.Array,
        seq_lens: jax.Array,
        segment_tables: jax.Array,
        window: Any,
        positions: jax.Array,
        scratch: tuple[()],
        exchange: tuple[()],
    ) -> tuple[jax.Array, tuple[()], tuple[()]]:
        requests, query_len = seq_lens.shape[0], self.config.query_len
        split = requests * query_len
        by_request = index_q[:split].reshape(requests, query_len, *index_q.shape[1:])
        scores = jax.vmap(dense_scores)(by_request, self._keys(index_k, decode_tables))
        scores = scores.reshape(split, HEADS, -1)
        if window is not None:
            scores = jnp.concatenate(
                [
                    scores,
                    self._window_scores(
                        index_q[split:], self._keys(index_k, segment_tables), window
                    ),
                ]
            )
        return top_blocks(scores, positions, self.config), scratch, exchange

    def _window_scores(self, index_q: jax.Array, keys: jax.Array, lens: jax.Array) -> jax.Array:
        """Scores of the window's rows, each against the keys of its own segment."""
        ends = jnp.cumsum(lens)
        row = jnp.arange(index_q.shape[0])[:, None, None]
        scores = dense_scores(index_q, keys[0])
        for segment in range(1, keys.shape[0]):
            scores = jnp.where(
                row < ends[segment - 1], scores, dense_scores(index_q, keys[segment])
            )
        return scores

    def _keys(self, index_k: jax.Array, tables: jax.Array) -> jax.Array:
        """[requests, table width * P, 128], in the order of positions."""
        keys = lax.bitcast_convert_type(index_k, jnp.uint8)[tables]
        return lax.bitcast_convert_type(keys, index_k.dtype).reshape(tables.shape[0], -1, 128)

    def own_heads(self, x: jax.Array) -> jax.Array:
        return x

    def all_heads(self, x: jax.Array) -> jax.Array:
        return x


def dense_scores(index_q: jax.Array, keys: jax.Array) -> jax.Array:
    """float32 [T, 4, keys] of index_q [T, 4, 128] and keys [keys, 128]."""
    return jnp.einsum(
        "thd,kd->thk",
        index_q.astype(jnp.float32),
        keys.astype(jnp.float32),
        precision=lax.Precision.HIGHEST,
    )


def top_blocks(scores: jax.Array, positions: jax.Array, config: Config) -> jax.Array:
    """Ids int32 [T, 4, 16], ascending with a -1 tail, of scores [T, 4, keys]."""
    key = jnp.arange(scores.shape[-1], dtype=jnp.int32)[None, None]
    seen = key <= positions[:, None, None]
    by_block = jnp.where(seen, scores, -jnp.inf).reshape(*scores.shape[:2], -1, BLOCK).max(-1)
    block = jnp.arange(by_block.shape[-1], dtype=jnp.int32)[None, None]
    count = jnp.where(positions >= 0, positions // BLOCK + 1, 0)[:, None, None]
    forced = (block < config.init_blocks) | (block >= count - config.local_blocks)
    order = jnp.where(block < count, jnp.where(forced, jnp.inf, by_block), -jnp.inf)
    best, ids = lax.top_k(order, TOPK)  # among equals the lower id
    ids = jnp.sort(jnp.where(best > -jnp.inf, ids, block.size), axis=-1)
    return jnp.where(ids < block.size, ids, -1)
