"""How one tensor becomes an array of JAX and one array a tensor of torch, over the same memory.

`Fast` calls the C functions below JAX's public ones, whose Python around them takes several times
as long. They are not public: it is used with releases of jaxlib that it is known to work with, and
`Public` with all others.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

import jax
import jaxlib
import torch

from msa_icp_torch.jax_stream import find_stream

_VERSIONS = ((0, 11), (0, 12))  # of jaxlib, whose C functions take these arguments


class Crossing(Protocol):
    """Takes tensors and gives arrays back; for one device."""

    def take(self, tensor: torch.Tensor, *, ordered: bool) -> jax.Array:
        """Imports a tensor; `ordered`: its users wait for the current stream's work so far.

        What is imported without is ordered by another argument of the same program.
        """

    def order(self) -> bool:
        """Makes programs wait for the current stream's work so far; False: only an import can."""

    def give(self, array: jax.Array) -> torch.Tensor:
        """Exports an array; torch's current stream waits for the program that it comes from."""

    def order_after(self, array: jax.Array) -> None:
        """Makes torch's current stream wait for the program that `array` comes from."""


class Public:
    """The crossing by what JAX and torch document."""

    def take(self, tensor: torch.Tensor, *, ordered: bool) -> jax.Array:
        """See `Crossing`; it always orders."""
        return jax.dlpack.from_dlpack(tensor.detach(), copy=False)

    def order(self) -> bool:
        """See `Crossing`."""
        return False

    def give(self, array: jax.Array) -> torch.Tensor:
        """See `Crossing`."""
        return torch.from_dlpack(array)

    def order_after(self, array: jax.Array) -> None:
        """See `Crossing`."""
        self.give(array)


class Fast:
    """The crossing by C functions of jaxlib."""

    def __init__(self, device: torch.device, jax_device: jax.Device) -> None:
        from jax._src.lib import _jax  # not public

        self._import = _jax.dlpack_managed_tensor_to_buffer
        self._export = _jax.buffer_to_dlpack_managed_tensor
        self._jax_device = jax_device
        self._device = device
        self._kind = int(torch.empty(0, device=device).__dlpack_device__()[0])
        self._streams = _Streams(device, jax_device) if device.type == "cuda" else None
        self._stream = None if self._streams is None else self._streams.of_import

    def order(self) -> bool:
        """See `Crossing`."""
        if self._streams is None:
            return False
        self._streams.order()
        return self._stream is None

    def take(self, tensor: torch.Tensor, *, ordered: bool) -> jax.Array:
        """See `Crossing`."""
        if ordered:
            self.order()
        # An export holds the tensor it was made from. The detached alias dies with the import; the
        # caller's tensor would live, as a Python object, until then.
        capsule = torch.utils.dlpack.to_dlpack(tensor.detach())
        return self._import(capsule, self._jax_device, self._stream, False, self._kind)

    def give(self, array: jax.Array) -> torch.Tensor:
        """See `Crossing`."""
        return torch.utils.dlpack.from_dlpack(self._capsule(array))

    def order_after(self, array: jax.Array) -> None:
        """See `Crossing`."""
        if self._streams is None or self._streams.of_import is not None:
            self._capsule(array)
        else:
            self._streams.order_back()

    def _capsule(self, array: jax.Array) -> Any:
        stream = None if self._streams is None else self._streams.current()
        return self._export(array, stream=stream)


class _Streams(threading.local):
    """torch's current stream, and the one of JAX's that waits for it; one thread's.

    torch takes several microseconds to make the object of a stream, or an event.

    Attributes:
      of_import: a stream of JAX's that the users of an import wait for; None: they run on the one
        that waits.
    """

    def __init__(self, device: torch.device, jax_device: jax.Device) -> None:
        stream = find_stream(jax_device)
        self.of_import: int | None = None
        if stream is None:
            stream = self.of_import = jax_device.get_stream_for_external_ready_events()
        self._device = device
        self._jaxs = torch.cuda.ExternalStream(stream, device)
        self._event = torch.cuda.Event()
        self._known: dict[int, torch.cuda.Stream] = {}

    def current(self) -> int:
        """The current stream as DLPack names it: the default one is 1."""
        return torch._C._cuda_getCurrentRawStream(self._device.index) or 1

    def order(self) -> None:
        """Makes JAX's stream wait for all that the current stream was given."""
        self._event.record(self._torchs())
        self._jaxs.wait_event(self._event)

    def order_back(self) -> None:
        """Makes the current stream wait for all that JAX's was given, which runs the programs."""
        self._event.record(self._jaxs)
        self._torchs().wait_event(self._event)

    def _torchs(self) -> torch.cuda.Stream:
        number = torch._C._cuda_getCurrentRawStream(self._device.index)
        stream = self._known.get(number)
        if stream is None:
            stream = self._known[number] = torch.cuda.current_stream(self._device)
        return stream


def find_crossing(device: torch.device, jax_device: jax.Device) -> Crossing:
    """`Fast` where this release of jaxlib is known, else `Public`."""
    version = tuple(int(x) for x in jaxlib.__version__.split(".")[:2])
    if version in _VERSIONS:
        return Fast(device, jax_device)
    return Public()
