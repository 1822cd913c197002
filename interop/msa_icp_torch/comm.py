"""Receive storage of the candidate rows, as torch tensors over one allocation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from msa_icp_jax.checks import AtLeast
from msa_icp_jax.comm import MSAIcpCommLayout, msa_icp_comm_layout
from msa_icp_jax.geometry import NUM_HEADS
from msa_icp_torch.bridge import check_apart, check_tensor


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

    def place(self) -> tuple[Any, ...]:
        """What changes when the rows move, or the bases are written through torch."""
        bases, tagged_bases = self.recv_bases, self.tagged_recv_bases
        rows = self.recv.data_ptr(), self.tagged_recv.data_ptr()
        if bases.is_inference() or tagged_bases.is_inference():  # they do not count writes
            return rows
        return *rows, bases._version, tagged_bases._version

    def written(self) -> dict[str, torch.Tensor]:
        """What decodes write, by name."""
        names = ("recv", "tagged_recv", "publish_generations", "expected_generations", "errors")
        return {name: getattr(self, name) for name in names}

    def connect(self, addresses: Sequence[int]) -> None:
        """Selects the one-sided exchange: sets the bases.

        Args:
          addresses: the device address, in this process, of every rank's `storage`, by rank.

        Raises:
          ValueError: the rows are no views of a storage.
        """
        if self.storage is None:
            raise ValueError("connect needs a comm whose rows are views of its storage, got none")
        for rows, bases in (
            (self.recv, self.recv_bases),
            (self.tagged_recv, self.tagged_recv_bases),
        ):
            offset = rows.data_ptr() - self.storage.data_ptr()
            bases.copy_(torch.tensor([address + offset for address in addresses]))

    @classmethod
    def zeros(
        cls,
        world_size: int,
        capacity: int,
        device: torch.device,
        storage: torch.Tensor | None = None,
    ) -> MSAIcpComm:
        """Fresh storage of one rank for `capacity` tokens, in `storage` where that is given."""
        layout = msa_icp_comm_layout(world_size, NUM_HEADS // world_size, capacity)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        if storage is None:
            storage = zeros(layout.storage_words)
        else:
            check_tensor("storage", storage, torch.int32, device, AtLeast(layout.storage_words))
            storage.zero_()
        used = storage[: layout.storage_words]
        legacy, tagged = used.tensor_split((layout.tagged_offset_bytes // 4,))
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


_ALIGNMENT = 16  # bytes, of the rows: a tagged word is stored and loaded at once


def check_comm(comm: Any, world_size: int, capacity: int, device: torch.device) -> None:
    """Raises, naming the tensor, unless `comm` is one rank's storage for `capacity` tokens."""
    if not isinstance(comm, MSAIcpComm):
        raise TypeError(f"comm must be an MSAIcpComm, got {type(comm).__name__}")
    layout = msa_icp_comm_layout(world_size, NUM_HEADS // world_size, capacity)
    words: dict[str, tuple[int | AtLeast, ...]] = {
        "recv": layout.legacy_shape,
        "publish_generations": layout.generations_shape,
        "expected_generations": layout.expected_shape,
        "errors": (AtLeast(1),),
    }
    pairs: dict[str, tuple[int | AtLeast, ...]] = {
        "tagged_recv": layout.tagged_shape,
        "recv_bases": (world_size,),
        "tagged_recv_bases": (world_size,),
    }
    tensors = {f"comm.{name}": getattr(comm, name) for name in (*words, *pairs)}
    for dtype, shapes in ((torch.int32, words), (torch.int64, pairs)):
        for name, shape in shapes.items():
            check_tensor(f"comm.{name}", tensors[f"comm.{name}"], dtype, device, *shape)
    for name in ("comm.recv", "comm.tagged_recv"):
        if tensors[name].data_ptr() % _ALIGNMENT:
            raise ValueError(
                f"{name} must start at a multiple of {_ALIGNMENT} bytes, got address "
                f"{tensors[name].data_ptr():#x}"
            )
    check_apart(tensors, {})
    if comm.storage is not None:
        _check_storage(comm, layout, device)


def _check_storage(comm: MSAIcpComm, layout: MSAIcpCommLayout, device: torch.device) -> None:
    """Raises unless the rows lie in the allocation as the layout says."""
    storage = comm.storage
    check_tensor("comm.storage", storage, torch.int32, device, AtLeast(layout.storage_words))
    assert storage is not None
    for name, offset in (
        ("recv", layout.legacy_offset_bytes),
        ("tagged_recv", layout.tagged_offset_bytes),
    ):
        place = getattr(comm, name).data_ptr() - storage.data_ptr()
        if place != offset:
            raise ValueError(
                f"comm.{name} must be the view of comm.storage at byte {offset}, got one at byte "
                f"{place}"
            )


def is_one_sided(comm: MSAIcpComm, rank: int, tagged: bool, available: bool) -> bool:
    """Whether bases select the one-sided transport for legacy or tagged rows; reads them back.

    Args:
      comm: one rank's checked storage.
      rank: that rank.
      tagged: which rows.
      available: whether the route has the one-sided transport.

    Raises:
      ValueError: the bases select what is not available, some are 0 and some are not, or they are
        no distinct aligned addresses with this rank's own storage among them.
    """
    name = "tagged_recv" if tagged else "recv"
    bases = getattr(comm, f"{name}_bases").tolist()
    if not any(bases):
        return False
    if not available:
        raise ValueError(
            f"comm.{name}_bases must be all 0: other values select the one-sided transport, which "
            "the dlpack route does not have"
        )
    own = getattr(comm, name).data_ptr()
    wrong = (
        "be all 0 (collective) or all device addresses"
        if not all(bases)
        else f"hold multiples of {_ALIGNMENT}"
        if any(base % _ALIGNMENT for base in bases)
        else "be distinct"
        if len(set(bases)) < len(bases)
        else f"hold comm.{name}'s own address {own:#x} at rank {rank}"
        if bases[rank] != own
        else None
    )
    if wrong:
        raise ValueError(f"comm.{name}_bases must {wrong}, got {[hex(base) for base in bases]}")
    return True
