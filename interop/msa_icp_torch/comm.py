"""Receive storage of the candidate rows, as torch tensors over one allocation."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from msa_icp_jax.checks import AtLeast
from msa_icp_jax.comm import msa_icp_comm_layout
from msa_icp_jax.geometry import NUM_HEADS
from msa_icp_torch.bridge import check_tensor


@dataclasses.dataclass(frozen=True, eq=False)
class MSAIcpComm:
    """One rank's receive storage and counters, written in place by every decode.

    Zeroed once and never reset. Build it with the plan's `init_comm`.

    Attributes:
      recv: int32 [3, W, hpr, C, 33] legacy rows, a view of `storage`.
      tagged_recv: int64 [3, W, hpr, C, 32] tagged rows ``generation << 32 | word``, likewise.
      recv_bases: int64 [W] device addresses of every rank's legacy rows; 0: collective exchange.
      tagged_recv_bases: int64 [W] likewise of the tagged rows.
      publish_generations: int32 [3, 4, C] generation of the row last sent, by head.
      expected_generations: int32 [3, hpr, C] generation of the row last merged.
      errors: int32 [>= 1], protocol faults so far in the first element.
      storage: int32 [storage_words], the allocation that `msa_icp_comm_layout` describes; None
        where the rows are the caller's own.
    """

    recv: torch.Tensor
    tagged_recv: torch.Tensor
    recv_bases: torch.Tensor
    tagged_recv_bases: torch.Tensor
    publish_generations: torch.Tensor
    expected_generations: torch.Tensor
    errors: torch.Tensor
    storage: torch.Tensor | None = None

    @classmethod
    def zeros(cls, world_size: int, capacity: int, device: torch.device) -> MSAIcpComm:
        """Fresh storage of one rank for `capacity` tokens."""
        layout = msa_icp_comm_layout(world_size, NUM_HEADS // world_size, capacity)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        storage = zeros(layout.storage_words)
        legacy, tagged = storage.tensor_split((layout.tagged_offset_bytes // 4,))
        legacy_words = torch.Size(layout.legacy_shape).numel()
        return cls(
            recv=legacy[:legacy_words].view(layout.legacy_shape),
            tagged_recv=tagged.view(torch.int64).view(layout.tagged_shape),
            recv_bases=zeros(world_size, dtype=torch.int64),
            tagged_recv_bases=zeros(world_size, dtype=torch.int64),
            publish_generations=zeros(*layout.generations_shape),
            expected_generations=zeros(*layout.expected_shape),
            errors=zeros(1),
            storage=storage,
        )


def check_comm(comm: Any, world_size: int, capacity: int, device: torch.device) -> None:
    """Raises, naming the tensor, unless `comm` is one rank's storage for `capacity` tokens."""
    if not isinstance(comm, MSAIcpComm):
        raise TypeError(f"comm must be an MSAIcpComm, got {type(comm).__name__}")
    layout = msa_icp_comm_layout(world_size, NUM_HEADS // world_size, capacity)
    shapes: dict[str, tuple[int | AtLeast, ...]] = {
        "recv": layout.legacy_shape,
        "publish_generations": layout.generations_shape,
        "expected_generations": layout.expected_shape,
        "errors": (AtLeast(1),),
    }
    wide_shapes: dict[str, tuple[int | AtLeast, ...]] = {
        "tagged_recv": layout.tagged_shape,
        "recv_bases": (world_size,),
        "tagged_recv_bases": (world_size,),
    }
    for name, shape in shapes.items():
        check_tensor(f"comm.{name}", getattr(comm, name), torch.int32, device, *shape)
    for name, shape in wide_shapes.items():
        check_tensor(f"comm.{name}", getattr(comm, name), torch.int64, device, *shape)
