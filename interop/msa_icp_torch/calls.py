"""Calls whose arguments are checked, as the plan hands them to its route."""

from __future__ import annotations

import dataclasses

import torch

from msa_icp_jax import MSAIcpScorePlan
from msa_icp_torch.comm import MSAIcpComm


@dataclasses.dataclass(frozen=True, eq=False)
class DecodeCall:
    """A decode of T > 0 tokens.

    Attributes:
      scores: float32 [T, 4, columns] to write into, or None when fused.
      output: int32 [T, hpr, 16] to write into.
      slot: in [0, 3).
      one_sided: whether rows go by device addresses, without a collective.
      index_q, index_k, block_table, seq_lens, num_valid_pages, comm, tagged, query_len, fused,
        enable_pdl: as in `MSAIcpIndexerPlan.decode`.
    """

    index_q: torch.Tensor
    index_k: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    num_valid_pages: torch.Tensor
    scores: torch.Tensor | None
    output: torch.Tensor
    comm: MSAIcpComm
    slot: int
    tagged: bool
    query_len: int
    fused: bool
    enable_pdl: bool
    one_sided: bool

    @property
    def tokens(self) -> int:
        """T."""
        return self.output.shape[0]


@dataclasses.dataclass(frozen=True, eq=False)
class PrefillCall:
    """The part before the exchange of a prefill of T > 0 tokens.

    Attributes:
      plane: float32 [T, 4, columns] to write into, or None when fused.
      carrier: int32 [4, >= T, 33] to write into.
      query, index_k, block_table, window_plan, num_valid_pages: as in
        `MSAIcpIndexerPlan.prefill_local`.
      fused: score and select in one pass.
    """

    query: torch.Tensor
    index_k: torch.Tensor
    block_table: torch.Tensor
    window_plan: MSAIcpScorePlan
    num_valid_pages: torch.Tensor
    plane: torch.Tensor | None
    carrier: torch.Tensor
    fused: bool

    @property
    def tokens(self) -> int:
        """T."""
        return self.query.shape[0]
