"""How one tensor becomes an array of JAX and one array a tensor of torch, over the same memory.

`Fast` calls the C functions below JAX's public ones, whose Python around them takes several times
as long. They are not public: it is used with releases of jaxlib that it is known to work with, and
`Public` with all others.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax
import jaxlib
import torch

_VERSIONS = ((0, 11), (0, 12))  # of jaxlib, whose C functions take these arguments
_NO_EVENT = -1  # to torch: the stream that takes the tensor need not wait


class Crossing(Protocol):
    """Takes tensors and gives arrays back; for one device."""

    def take(self, tensor: torch.Tensor, *, ordered: bool) -> jax.Array:
        """Imports a tensor; `ordered`: its users wait for the current stream's work so far.

        What is imported without is ordered by another argument of the same program.
        """

    def give(self, array: jax.Array) -> torch.Tensor:
        """Exports an array; torch's current stream waits for the program that it comes from."""

    def order_after(self, array: jax.Array) -> None:
        """Makes torch's current stream wait for the program that `array` comes from."""


class Public:
    """The crossing by what JAX and torch document."""

    def take(self, tensor: torch.Tensor, *, ordered: bool) -> jax.Array:
        """See `Crossing`; it always orders."""
        return jax.dlpack.from_dlpack(tensor.detach(), copy=False)

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
        # JAX's stream that waits for what is imported.
        on_gpu = device.type == "cuda"
        self._stream = jax_device.get_stream_for_external_ready_events() if on_gpu else None

    def take(self, tensor: torch.Tensor, *, ordered: bool) -> jax.Array:
        """See `Crossing`."""
        # An export holds the tensor it was made from. The detached alias dies with the import; the
        # caller's tensor would live, as a Python object, until then.
        waits = self._stream if ordered or self._stream is None else _NO_EVENT
        capsule = tensor.detach().__dlpack__(stream=waits)
        return self._import(capsule, self._jax_device, self._stream, False, self._kind)

    def give(self, array: jax.Array) -> torch.Tensor:
        """See `Crossing`."""
        return torch.utils.dlpack.from_dlpack(self._capsule(array))

    def order_after(self, array: jax.Array) -> None:
        """See `Crossing`."""
        self._capsule(array)

    def _capsule(self, array: jax.Array) -> Any:
        stream = None
        if self._stream is not None:
            stream = torch.cuda.current_stream(self._device).cuda_stream or 1  # 1: the default one
        return self._export(array.addressable_data(0), stream=stream)


def find_crossing(device: torch.device, jax_device: jax.Device) -> Crossing:
    """`Fast` where this release of jaxlib is known, else `Public`."""
    version = tuple(int(x) for x in jaxlib.__version__.split(".")[:2])
    if version in _VERSIONS:
        return Fast(device, jax_device)
    return Public()
