"""Abstract arguments of a plan's methods: what programs are compiled for before any call."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from msa_icp_jax import checks, rows
from msa_icp_jax.comm import comm_shapes
from msa_icp_jax.geometry import HEAD_DIM, NUM_HEADS, TOPK, IndexerGeometry
from msa_icp_jax.ops.prefill_plan import MSAIcpScorePlan

# Makes an argument from its name, its shape on one rank and its dtype.
Make = Callable[[str, tuple[int, ...], Any], Any]


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Arguments by name, in the order of the methods that take them.

    Attributes:
      geometry: the plan's.
      make: makes each.
      index_k: the index-key cache's shape on one rank, or None: there is none.
      table_width: columns of the block tables.
    """

    geometry: IndexerGeometry
    make: Make
    index_k: tuple[int, ...] | None
    table_width: int

    def decode(self, requests: int, query_len: int) -> dict[str, Any]:
        """Of `decode`."""
        tokens = requests * query_len
        return {
            "index_q": self._queries("index_q", tokens),
            "index_k": self._cache(),
            "block_table": self.int32("block_table", requests, self.table_width),
            "seq_lens": self.int32("seq_lens", requests),
            "num_valid_pages": self.int32("num_valid_pages", tokens),
            "scores": self.plane("scores", tokens),
            "output": self.output(tokens),
        }

    def window(self) -> tuple[Any, Any, Any]:
        """The lengths of `prefill_window_plan`, of as many segments as there may be."""
        segments = self.geometry.max_num_seqs
        names = ("qo_segment_lens", "kv_segment_lens", "qo_offset")
        first, second, third = (self.int32(name, segments) for name in names)
        return first, second, third

    def bounds(self) -> dict[str, Any]:
        """The bounds of `prefill_window_plan`: one full window."""
        tokens = self.geometry.window_tokens
        longest = self.geometry.max_model_len
        return {"total_q": tokens, "max_query_len": tokens, "max_seq_len": longest}

    def prefill(self, window_plan: MSAIcpScorePlan, tokens: int | None = None) -> dict[str, Any]:
        """Of `prefill`, for a window of this plan (with abstract leaves); None: a full window."""
        tokens = self.geometry.window_tokens if tokens is None else tokens
        return {
            "query": self._queries("query", tokens),
            "index_k": self._cache(),
            "block_table": self.int32("block_table", window_plan.num_segments, self.table_width),
            "window_plan": window_plan,
            "score_scratch": self.plane("score_scratch", tokens),
            "num_valid_pages": self.int32("num_valid_pages", tokens),
            "carrier_view": self.int32("carrier_view", NUM_HEADS, tokens, rows.ROW_WORDS),
            "output": self.output(tokens),
        }

    def received(self, tokens: int, *, tagged: bool = False) -> Any:
        """Rows of the owned heads by source rank."""
        row = (rows.TAGGED_WORDS, 2) if tagged else (rows.ROW_WORDS,)
        owned = self.geometry.world_size, self.geometry.heads_per_rank
        return self.int32("received", *owned, tokens, *row)

    def comm(self, *names: str) -> dict[str, Any]:
        """Arrays of the receive storage."""
        shapes = comm_shapes(self.geometry.world_size, self.geometry.max_decode_tokens)
        return {name: self.int32(name, *shapes[name]) for name in names}

    def write(self, tokens: int) -> dict[str, Any]:
        """Of `msa_icp_write_index_k`."""
        return {
            "index_k": self._cache(),
            "new_k": self.make("new_k", (tokens, HEAD_DIM), self.geometry.index_dtype),
            "slot_mapping": self.int32("slot_mapping", tokens),
        }

    def _queries(self, name: str, tokens: int) -> Any:
        return self.make(name, (tokens, NUM_HEADS, HEAD_DIM), self.geometry.index_dtype)

    def _cache(self) -> Any:
        if self.index_k is None:
            return None
        return self.make("index_k", self.index_k, self.geometry.index_dtype)

    def plane(self, name: str, tokens: int) -> Any:
        """A score plane."""
        return self.make(name, (tokens, NUM_HEADS, self.geometry.score_columns), jnp.float32)

    def output(self, tokens: int) -> Any:
        """The ids of the owned heads."""
        return self.int32("output", tokens, self.geometry.heads_per_rank, TOPK)

    def int32(self, name: str, *shape: int) -> Any:
        """Another argument, of ints."""
        return self.make(name, shape, jnp.int32)


def decode_shapes(
    limits: IndexerGeometry, batch_sizes: Sequence[int] | None, query_lens: Sequence[int] | None
) -> list[tuple[int, int]]:
    """(requests, query length) of the decode calls that a warmup compiles for."""
    most, longest = min(limits.max_num_seqs, limits.max_decode_tokens), limits.max_decode_query_len
    batches, lengths = [most], sorted({1, longest})
    if batch_sizes is not None:
        limit = "the plan's max_num_seqs, and max_decode_tokens"
        batches = checks.integers("batch_sizes", batch_sizes, 1, most, limit=limit)
    if query_lens is not None:
        limit = "the plan's max_decode_query_len"
        lengths = checks.integers("query_lens", query_lens, 1, longest, limit=limit)
    return [
        (min(batch, max(1, limits.max_decode_tokens // length)), length)
        for batch, length in itertools.product(batches, lengths)
    ]
