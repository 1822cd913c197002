"""Compiling the plan's programs for shapes that are not there yet."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from msa_icp_jax import IndexerGeometry, MSAIcpIndexerPlan, checks, rows
from msa_icp_jax.geometry import HEAD_DIM, MAX_INT32, NUM_HEADS, NUM_SLOTS, TOPK, cdiv
from msa_icp_jax.programs import decode_shapes
from msa_icp_torch import programs


def table_width_of(limits: IndexerGeometry, table_width: int | None) -> int:
    """Columns of the block tables to compile for."""
    if table_width is None:
        table_width = cdiv(limits.max_model_len, limits.page_size)
    return checks.integer("table_width", table_width, 1, MAX_INT32 // limits.max_num_seqs)


class Warmup:
    """Compiles programs from shapes alone; nothing is allocated.

    Args:
      plan: the plan whose programs are compiled.
      scorer_plan: the same for the place of the index keys in their pages, for the scorers.
      device: the device that they run on.
      donates: whether they write in place.
      index_k: shape of the index-key buffer, or None to leave the scorers out.
      table_width: columns of the block tables; None: pages of a context of max_model_len.
      fused: prefill scores and selects in one pass; None: as the plan chooses.
    """

    def __init__(
        self,
        plan: MSAIcpIndexerPlan,
        scorer_plan: MSAIcpIndexerPlan,
        device: jax.Device,
        donates: bool,
        index_k: tuple[int, ...] | None,
        table_width: int | None,
        fused: bool | None,
    ) -> None:
        geometry = plan.geometry
        self.plan = plan
        self.scorer_plan = scorer_plan
        self.donates = donates
        self.fused = fused
        self.sharding = SingleDeviceSharding(device)
        self.table_width = table_width_of(geometry, table_width)
        self.index_k = None if index_k is None else self._array(*index_k, dtype=jnp.float8_e4m3fn)

    def decode(
        self,
        batch_sizes: Sequence[int] | None,
        query_lens: Sequence[int] | None,
        forms: Sequence[bool],
    ) -> None:
        """Compiles decode for these batches; `forms` says whether of legacy or tagged rows."""
        shapes = decode_shapes(self.plan.geometry, batch_sizes, query_lens)
        for (batch, length), tagged in itertools.product(shapes, forms):
            self._decode(batch, length, tagged)

    def prefill(self) -> None:
        """Compiles prefill for one full window."""
        plan, limits = self.plan, self.plan.geometry
        tokens = limits.window_tokens
        counts = self._array(tokens)
        received = (limits.world_size, limits.heads_per_rank, tokens, rows.ROW_WORDS)
        output = self._array(tokens, limits.heads_per_rank, TOPK)
        merge = programs.prefill_merge(plan, self.donates)
        merge.lower(self._array(*received), counts, output).compile()
        bounds = (tokens, tokens, limits.max_model_len)
        window = programs.prefill_window_plan(plan, *bounds)
        lengths = self._array(limits.max_num_seqs)
        window.lower(lengths, lengths, lengths).compile()
        if self.index_k is None:
            return
        window_plan = jax.tree.map(
            lambda leaf: self._array(*leaf.shape, dtype=leaf.dtype),
            jax.eval_shape(window, lengths, lengths, lengths),
        )
        fused = plan.fused_prefill if self.fused is None else self.fused
        inputs = (
            self._array(tokens, NUM_HEADS, HEAD_DIM, dtype=jnp.float8_e4m3fn),
            self.index_k,
            self._array(limits.max_num_seqs, self.table_width),
        )
        local = programs.prefill_local(self.scorer_plan, fused, self.donates)
        carrier = self._array(NUM_HEADS, tokens, rows.ROW_WORDS)
        local.lower(inputs, window_plan, counts, self._plane(tokens, fused), carrier).compile()

    def _decode(self, batch: int, query_len: int, tagged: bool) -> None:
        plan, limits, tokens = self.plan, self.plan.geometry, batch * query_len
        heads, capacity = limits.heads_per_rank, limits.max_decode_tokens
        row = (rows.TAGGED_WORDS, 2) if tagged else (rows.ROW_WORDS,)
        counts, slot = self._array(tokens), self._array()
        storage = self._array(NUM_SLOTS, limits.world_size, heads, capacity, *row)
        parts = {"tagged_recv" if tagged else "recv": storage, "errors": self._array(1)}
        sent = {}
        if tagged:
            parts["expected_generations"] = self._array(NUM_SLOTS, heads, capacity)
            sent["publish_generations"] = self._array(NUM_SLOTS, NUM_HEADS, capacity)
        merge = programs.decode_merge(plan, tagged, True, self.donates)
        received = self._array(limits.world_size, heads, tokens, *row)
        output = self._array(tokens, heads, TOPK)
        merge.lower(received, counts, slot, output, parts).compile()
        if self.index_k is None:
            return
        inputs = (
            self._array(tokens, NUM_HEADS, HEAD_DIM, dtype=jnp.float8_e4m3fn),
            self.index_k,
            self._array(batch, self.table_width),
            self._array(batch),
        )
        local = programs.decode_local(self.scorer_plan, query_len, tagged, True, self.donates)
        plane = self._plane(tokens, fused=False)
        local.lower(inputs, counts, slot, plane, sent).compile()

    def _plane(self, tokens: int, fused: bool) -> jax.ShapeDtypeStruct | None:
        if fused:
            return None
        return self._array(tokens, NUM_HEADS, self.plan.geometry.score_columns, dtype=jnp.float32)

    def _array(self, *shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding)
