"""Compiling the plan's programs for shapes that are not there yet."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from msa_icp_jax import IndexerGeometry, MSAIcpIndexerPlan, checks
from msa_icp_jax.geometry import MAX_INT32, cdiv
from msa_icp_jax.shapes import Shapes, decode_shapes
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
        self.plan = plan
        self.scorer_plan = scorer_plan
        self.donates = donates
        self.fused = fused
        self.sharding = SingleDeviceSharding(device)
        width = table_width_of(plan.geometry, table_width)
        self.shapes = Shapes(plan.geometry, self._array, index_k, width)

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
        plan, shapes = self.plan, self.shapes
        window = programs.prefill_window_plan(plan, *shapes.bounds().values())
        window.lower(*shapes.window()).compile()
        window_plan = jax.tree.map(
            lambda leaf: self._array("window_plan", leaf.shape, leaf.dtype),
            jax.eval_shape(window, *shapes.window()),
        )
        of = shapes.prefill(window_plan)
        merge = programs.prefill_merge(plan, self.donates)
        received = shapes.received(plan.geometry.window_tokens)
        merge.lower(received, of["num_valid_pages"], of["output"]).compile()
        if of["index_k"] is None:
            return
        fused = plan.fused_prefill if self.fused is None else self.fused
        local = programs.prefill_local(self.scorer_plan, fused, self.donates)
        local.lower(
            (of["query"], of["index_k"], of["block_table"]),
            window_plan,
            of["num_valid_pages"],
            None if fused else of["score_scratch"],
            of["carrier_view"],
        ).compile()

    def _decode(self, batch: int, query_len: int, tagged: bool) -> None:
        of, slot = self.shapes.decode(batch, query_len), self._array("slot", (), jnp.int32)
        received = self.shapes.received(batch * query_len, tagged=tagged)
        sent, merged = programs.storage_parts(tagged)
        merge = programs.decode_merge(self.plan, tagged, True, self.donates)
        counts = of["num_valid_pages"]
        merge.lower(received, counts, slot, of["output"], self.shapes.comm(*merged)).compile()
        if of["index_k"] is None:
            return
        local = programs.decode_local(self.scorer_plan, query_len, tagged, True, self.donates)
        local.lower(
            (of["index_q"], of["index_k"], of["block_table"], of["seq_lens"]),
            counts,
            slot,
            of["scores"],
            self.shapes.comm(*sent),
            received if self.donates else None,
        ).compile()

    def _array(self, name: str, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding)
