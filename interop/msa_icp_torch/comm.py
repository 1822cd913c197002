"""Receive storage of the candidate rows, as torch tensors over one allocation."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from msa_icp_jax import checks
from msa_icp_jax.checks import AtLeast
from msa_icp_jax.comm import MSAIcpCommLayout, msa_icp_comm_layout
from msa_icp_jax.geometry import NUM_HEADS
from msa_icp_torch.bridge import check_apart, check_tensor

_ALIGNMENT = 16  # bytes, of all parts: a tagged word is stored and loaded at once
_MOST_ADDRESS = 2**63 - 1
_WRITTEN = ("recv", "tagged_recv", "publish_generations", "expected_generations", "errors")
_BASES = ("recv_bases", "tagged_recv_bases")
_address = torch.Tensor.data_ptr


@dataclasses.dataclass(frozen=True, eq=False)
class MSAIcpComm:
    """One rank's receive storage and counters, written in place by every decode.

    Zeroed once; again only to recover from a protocol fault, on all ranks together. Build it with
    the plan's `init_comm`.

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

    @functools.cached_property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """All tensors but the storage: what kernels get the addresses of."""
        return tuple(getattr(self, name) for name in (*_WRITTEN, *_BASES))

    def place(self) -> tuple[Any, ...]:
        """What changes when a part moves, or the bases are written through torch."""
        bases, tagged_bases = self.recv_bases._version, self.tagged_recv_bases._version
        return bases, tagged_bases, *map(_address, self.parts)

    def written(self) -> dict[str, torch.Tensor]:
        """What decodes write, by name."""
        return {f"comm.{name}": getattr(self, name) for name in _WRITTEN}

    def read(self) -> dict[str, torch.Tensor]:
        """What decodes read only, by name."""
        return {f"comm.{name}": getattr(self, name) for name in _BASES}

    def connect(self, addresses: Sequence[int]) -> None:
        """Selects the one-sided exchange: sets the bases.

        Args:
          addresses: the device address, in this process, of every rank's `storage`, by rank.

        Raises:
          TypeError, ValueError: the addresses are no sequence of as many positive multiples of 16
            as there are ranks, or the rows are no views of a storage.
        """
        if self.storage is None:
            raise ValueError("connect needs a comm whose rows are views of its storage, got none")
        start = self.storage.data_ptr()
        most = _MOST_ADDRESS - self.storage.nbytes
        found = checks.integers("addresses", addresses, _ALIGNMENT, most)
        if len(found) != len(self.recv_bases):
            raise ValueError(
                f"addresses must be {len(self.recv_bases)}, one of each rank, got {len(found)}"
            )
        if any(address % _ALIGNMENT for address in found):
            raise ValueError(
                f"addresses must be multiples of {_ALIGNMENT}, got {[*map(hex, found)]}"
            )
        for rows, bases in (
            (self.recv, self.recv_bases),
            (self.tagged_recv, self.tagged_recv_bases),
        ):
            offset = rows.data_ptr() - start
            words = [address + offset for address in found]
            bases.copy_(torch.tensor(words, dtype=torch.int64, device="cpu"))

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an MSAIcpComm cannot be pickled or copied: its rows are views of memory that peers "
            "write; every process makes its own with init_comm"
        )

    @classmethod
    def zeros(
        cls,
        world_size: int,
        capacity: int,
        device: torch.device,
        storage: torch.Tensor | None = None,
    ) -> MSAIcpComm:
        """Fresh storage of one rank, zeroed.

        Args:
          world_size: W, 2 or 4.
          capacity: C, tokens of one decode step at most, >= 1.
          device: of the tensors.
          storage: int32 [>= storage_words of `msa_icp_comm_layout`], the memory of the rows, from a
            multiple of 16 bytes on; None: memory of its own.

        Raises:
          TypeError, ValueError: an argument is outside its range, or `storage` is no such tensor.
        """
        # Outside inference mode: tensors made inside do not count what is written to them.
        with torch.inference_mode(False):
            return cls._zeros(world_size, capacity, device, storage)

    @classmethod
    def _zeros(
        cls, world_size: int, capacity: int, device: torch.device, storage: torch.Tensor | None
    ) -> MSAIcpComm:
        layout = msa_icp_comm_layout(world_size, NUM_HEADS // world_size, capacity)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        if storage is None:
            storage = zeros(layout.storage_words)
        else:
            check_tensor("storage", storage, torch.int32, device, AtLeast(layout.storage_words))
            check_aligned("storage", storage)
            with torch.inference_mode():  # it may be an inference tensor
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


def check_aligned(name: str, tensor: torch.Tensor) -> None:
    """Raises unless a tensor starts where kernels can take it."""
    if tensor.data_ptr() % _ALIGNMENT:
        raise ValueError(
            f"{name} must start at a multiple of {_ALIGNMENT} bytes, got address "
            f"{tensor.data_ptr():#x}"
        )


def check_class(comm: Any) -> None:
    """Raises unless `comm` is an MSAIcpComm of this package."""
    if not isinstance(comm, MSAIcpComm):
        kind = f"{type(comm).__module__}.{type(comm).__qualname__}"
        raise TypeError(f"comm must be an MSAIcpComm of msa_icp_torch, got {kind}")


def check_comm(comm: Any, world_size: int, capacity: int, device: torch.device) -> None:
    """Raises, naming the tensor, unless `comm` is one rank's storage for `capacity` tokens."""
    check_class(comm)
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
    for name, tensor in tensors.items():
        check_aligned(name, tensor)
    for name, bases in comm.read().items():
        if bases.is_inference():
            raise ValueError(
                f"{name} must not be an inference tensor, which does not count what is written to "
                "it: make it under torch.inference_mode(False)"
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
    rows = getattr(comm, name)
    own = rows.data_ptr()
    peers = [base for source, base in enumerate(bases) if source != rank]
    wrong = (
        "be all 0 (collective) or all device addresses"
        if not all(bases)
        else f"hold multiples of {_ALIGNMENT}"
        if any(base % _ALIGNMENT for base in bases)
        else "be distinct"
        if len(set(bases)) < len(bases)
        else f"hold comm.{name}'s own address {own:#x} at rank {rank}"
        if bases[rank] != own
        else "be apart by the size of the rows"
        if any(b - a < rows.nbytes for a, b in itertools.pairwise(sorted(bases)))
        else "not lie in this rank's own storage at another rank"
        if any(_meet(comm, base, rows.nbytes) for base in peers)
        else None
    )
    if wrong:
        raise ValueError(f"comm.{name}_bases must {wrong}, got {[hex(base) for base in bases]}")
    return True


def _meet(comm: MSAIcpComm, start: int, size: int) -> bool:
    """Whether a part of a comm, or its storage, has bytes in [start, start + size)."""
    own = comm.parts if comm.storage is None else (*comm.parts, comm.storage)
    return any(
        part.data_ptr() < start + size and start < part.data_ptr() + part.nbytes for part in own
    )
