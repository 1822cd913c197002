"""Calls whose arguments are checked, as the plan hands them to its route, and what a route is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from msa_icp_jax import MSAIcpScorePlan
from msa_icp_jax.typing import ResolvedRoute
from msa_icp_torch.comm import MSAIcpComm


@dataclasses.dataclass(frozen=True, eq=False)
class DecodeCall:
    """A decode of T > 0 tokens.

    Attributes:
      scores: float32 [T, 4, columns] to write into.
      output: int32 [T, hpr, 16] to write into.
      slot: in [0, 3).
      fused: `scores` lie in the caller's pool, and become -inf first.
      one_sided: whether rows go by device addresses, without a collective.
      index_q, index_k, block_table, seq_lens, num_valid_pages, comm, tagged, query_len, enable_pdl:
        as in `MSAIcpIndexerPlan.decode`.
    """

    index_q: torch.Tensor
    index_k: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    num_valid_pages: torch.Tensor
    scores: torch.Tensor
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


def clear_scores(plane: torch.Tensor) -> None:
    """Makes a plane -inf."""
    with torch.inference_mode():  # the caller's tensors may be inference tensors
        plane.fill_(-torch.inf)


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


class Route(Protocol):
    """How calls get done, once `MSAIcpIndexerPlan` has checked all that is no route's business.

    Attributes:
      name: "dlpack" or "direct".
      has_one_sided: whether rows can go by device addresses.
    """

    name: ResolvedRoute
    has_one_sided: bool

    # ---- checks: before anything is written ----

    def begin(self, method: str) -> None:
        """Raises where the method cannot be called now."""

    def check_memory(
        self, written: Mapping[str, torch.Tensor], read: Mapping[str, torch.Tensor]
    ) -> None:
        """Raises, by name, for a tensor that the route cannot take where it lies."""

    def check_window_plan(self, window_plan: MSAIcpScorePlan) -> dict[str, torch.Tensor]:
        """Raises for a window plan of another route; returns its tensors by name."""

    # ---- calls ----

    def repeat(self, owners: tuple[Any, ...], options: tuple[Any, ...]) -> bool:
        """Does a decode that an earlier one was like, unchecked; False where none was."""

    def decode(self, call: DecodeCall, owners: tuple[Any, ...], options: tuple[Any, ...]) -> None:
        """Does a decode; `owners` and `options` are what `repeat` knows it by."""

    def prefill_window_plan(
        self, lengths: tuple[torch.Tensor, ...], bounds: dict[str, int]
    ) -> MSAIcpScorePlan:
        """The window plan of the lengths."""

    def prefill_local(self, call: PrefillCall) -> None:
        """Does the part of a prefill before the exchange."""

    def prefill_merge(
        self, received: torch.Tensor, num_valid_pages: torch.Tensor, output: torch.Tensor
    ) -> None:
        """Does the part of a prefill behind the exchange."""

    def warmup(
        self,
        index_k: torch.Tensor | None,
        table_width: int | None,
        batch_sizes: Sequence[int] | None,
        query_lens: Sequence[int] | None,
        forms: Mapping[bool, Sequence[bool]],
        prefill: bool,
        fused: bool | None,
    ) -> None:
        """Compiles; `forms` says which transports are wanted of rows tagged or not."""
