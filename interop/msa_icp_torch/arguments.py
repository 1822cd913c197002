"""Checks of the plan's tensors against its limits, all of them before anything is written."""

from __future__ import annotations

import math
from typing import Any

import torch

from msa_icp_jax import IndexerGeometry, MSAIcpScorePlan, checks, rows
from msa_icp_jax.checks import AtLeast, Entry, Ranks
from msa_icp_jax.geometry import (
    HEAD_DIM,
    NUM_HEADS,
    TOPK,
    check_decode_query_len,
    check_decode_tokens,
    check_prefill_tokens,
    check_window,
)
from msa_icp_torch import pages
from msa_icp_torch.bridge import check_tensor

INDEX_DTYPES = {"float8_e4m3fn": torch.float8_e4m3fn, "bfloat16": torch.bfloat16}
_POOL_ALIGNMENT = 16  # bytes: of what a kernel stores together


class Arguments:
    """The shapes that one plan's methods take, on one device."""

    def __init__(self, geometry: IndexerGeometry, device: torch.device) -> None:
        self.geometry = geometry
        self.device = device
        self.index_dtype = INDEX_DTYPES[geometry.index_dtype]

    def tensor(
        self, name: str, value: Any, dtype: torch.dtype, *shape: Entry, origin: str = ""
    ) -> None:
        """Raises unless `value` is such a tensor on the plan's device."""
        check_tensor(name, value, dtype, self.device, *shape, origin=origin)

    def queries(self, name: str, value: Any, tokens: int | AtLeast, what: str) -> None:
        """Raises unless `value` holds so many tokens' index queries, `what` being their number."""
        origin = f"the plan's index_dtype, {what}"
        self.tensor(name, value, self.index_dtype, tokens, NUM_HEADS, HEAD_DIM, origin=origin)

    def decode(
        self,
        index_q: Any,
        index_k: Any,
        block_table: Any,
        seq_lens: Any,
        num_valid_pages: Any,
        query_len: int,
    ) -> int:
        """Checks decode's inputs; returns T."""
        query_len = check_decode_query_len(self.geometry, query_len)
        self.tensor("block_table", block_table, torch.int32, None, AtLeast(1))
        requests = block_table.shape[0]
        tokens = check_decode_tokens(self.geometry, requests, query_len)
        self.queries("index_q", index_q, tokens, "requests * decode_query_len")
        self.index_k(index_k)
        self.tensor("seq_lens", seq_lens, torch.int32, requests)
        self.tensor("num_valid_pages", num_valid_pages, torch.int32, tokens)
        return tokens

    def tagged(self, tagged: Any) -> None:
        """Raises unless the plan can exchange rows in this form."""
        checks.flag("tagged", tagged)
        layers = self.geometry.num_sparse_layers
        if tagged and layers < 2:
            raise ValueError(
                "tagged=True needs num_sparse_layers >= 2 (a slot may be reused only two calls "
                f"later), got num_sparse_layers {layers}"
            )

    def window(
        self,
        qo_segment_lens: Any,
        kv_segment_lens: Any,
        qo_offset: Any,
        total_q: int,
        max_query_len: int,
        max_seq_len: int,
    ) -> dict[str, int]:
        """Checks the lengths and bounds of a query window; returns the bounds."""
        self.tensor("qo_segment_lens", qo_segment_lens, torch.int32, None)
        segments = qo_segment_lens.shape[0]
        bounds = check_window(self.geometry, segments, total_q, max_query_len, max_seq_len)
        self.tensor("kv_segment_lens", kv_segment_lens, torch.int32, segments)
        self.tensor("qo_offset", qo_offset, torch.int32, segments)
        return bounds

    def prefill(
        self,
        query: Any,
        index_k: Any,
        block_table: Any,
        window_plan: Any,
        num_valid_pages: Any,
        carrier_view: Any,
    ) -> int:
        """Checks prefill_local's inputs and carrier; returns T."""
        if not isinstance(window_plan, MSAIcpScorePlan):
            raise TypeError(
                f"window_plan must be an MSAIcpScorePlan, got {type(window_plan).__name__}"
            )
        self.queries("query", query, AtLeast(window_plan.total_q), "the window's total_q")
        tokens = check_prefill_tokens(self.geometry, query.shape[0])
        self.index_k(index_k)
        segments = window_plan.num_segments
        self.tensor("block_table", block_table, torch.int32, segments, AtLeast(1))
        self.tensor("num_valid_pages", num_valid_pages, torch.int32, tokens)
        size = (NUM_HEADS, AtLeast(tokens), rows.ROW_WORDS)
        self.tensor("carrier_view", carrier_view, torch.int32, *size)
        return tokens

    def merge(self, received: Any, num_valid_pages: Any, output: Any) -> int:
        """Checks prefill_merge's tensors; returns T."""
        self.tensor("num_valid_pages", num_valid_pages, torch.int32, None)
        tokens = num_valid_pages.shape[0]
        self.tensor("received", received, torch.int32, *self._received(AtLeast(tokens)))
        self.output(output, tokens)
        return tokens

    def exchange(self, carrier_view: Any, received: Any) -> tuple[int, ...]:
        """Checks a prefill exchange's tensors; returns the shape of `received`."""
        self.tensor("carrier_view", carrier_view, torch.int32, NUM_HEADS, None, rows.ROW_WORDS)
        shape = self._received(carrier_view.shape[1])
        self.tensor("received", received, torch.int32, *shape)
        return tuple(received.shape)

    def index_k(self, index_k: Any) -> None:
        """Raises unless JAX can address this rank's index keys."""
        limits = self.geometry
        check_tensor(
            *("index_k", index_k, self.index_dtype, self.device),
            *(AtLeast(1), limits.rows_per_page, HEAD_DIM),
            contiguous=False,
            origin=f"page_size / world_size = {limits.rows_per_page} rows of every page",
        )
        pages.base_of(index_k)

    def output(self, output: Any, tokens: int) -> None:
        """Raises unless `output` can take `tokens` rows of ids."""
        heads = self.geometry.heads_per_rank
        self.tensor("output", output, torch.int32, AtLeast(tokens), heads, TOPK)

    def plane(self, name: str, plane: Any, tokens: int, *, fused: bool) -> None:
        """Raises unless `plane` can take `tokens` rows of scores; None is fine when fused."""
        if plane is None and fused:
            return
        columns = self.geometry.score_columns
        origin = "columns by the plan's max_model_len"
        shape = (AtLeast(tokens), NUM_HEADS, columns)
        self.tensor(name, plane, torch.float32, *shape, origin=origin)

    def pool(self, pool: Any, shape: tuple[int]) -> None:
        """Raises unless `pool` is None or at least as large as the plan says."""
        if pool is not None:
            limits = "for max_decode_tokens or a prefill window, and max_model_len"
            self.tensor("pool", pool, torch.uint8, AtLeast(*shape), origin=limits)

    def plane_in(self, pool: torch.Tensor, tokens: int) -> torch.Tensor:
        """The score plane of `tokens` tokens at a pool's start."""
        places = {"address": pool.data_ptr(), "storage offset": pool.storage_offset()}
        for what, place in places.items():
            if place % _POOL_ALIGNMENT:
                raise ValueError(
                    f"pool must start at a multiple of {_POOL_ALIGNMENT} bytes, got {what} {place}"
                )
        shape = (tokens, NUM_HEADS, self.geometry.score_columns)
        return pool[: math.prod(shape) * torch.float32.itemsize].view(torch.float32).view(shape)

    def _received(self, tokens: Any) -> tuple[Any, ...]:
        owned = (Ranks(self.geometry.world_size), self.geometry.heads_per_rank)
        return (*owned, tokens, rows.ROW_WORDS)
