"""A CUDA driver without GPUs: what `peer_storage` calls, on books instead of memory."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable
from typing import Any

import pytest

from msa_icp_jax import peer_storage

INVALID, OUT_OF_MEMORY, ALREADY_ENABLED, UNSUPPORTED = 1, 2, 704, 217
OPENED = 1 << 60  # what other processes' addresses are here


class FakeCuda:
    """A library object; a function returns its CUresult and writes through its references.

    Attributes:
      live: (context, bytes) of every allocation, by address.
      opened: addresses of other processes' memory that is open.
      enabled: pairs (context, peer context) that may access each other's memory.
    """

    def __init__(
        self,
        devices: int = 4,
        reaches: Callable[[int, int], bool] = lambda a, b: True,
        allocations: int = 1000,
        opens: bool = True,
    ) -> None:
        self._devices, self._reaches, self._left, self._opens = devices, reaches, allocations, opens
        self.live: dict[int, tuple[int, int]] = {}
        self.opened: set[int] = set()
        self.enabled: set[tuple[int, int]] = set()
        self._stack: list[int] = []
        self._next = (os.getpid() << 32) + 0x7FF0_0000  # low words get their highest bit set soon

    def cuInit(self, flags: int) -> int:
        return 0

    def cuGetErrorName(self, code: int, text: Any) -> int:
        text._obj.value = f"ERROR_{code}".encode()
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self._devices
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = ordinal
        return 0 if ordinal < self._devices else INVALID

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        context._obj.value = 100 + device.value
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        self._stack.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        context._obj.value = self._stack.pop()
        return 0

    def cuCtxSynchronize(self) -> int:
        return 0

    def cuMemAlloc_v2(self, address: Any, size: Any) -> int:
        if not self._left:
            return OUT_OF_MEMORY
        self._left -= 1
        self.live[self._next] = (self._stack[-1], size.value)
        address._obj.value, self._next = self._next, self._next + size.value
        return 0

    def cuMemsetD8_v2(self, address: Any, value: Any, size: Any) -> int:
        known = self.live.get(address.value) == (self._stack[-1], size.value) and not value.value
        return 0 if known else INVALID

    def cuMemFree_v2(self, address: Any) -> int:
        known = self.live.pop(address.value, None)
        return 0 if known and known[0] == self._stack[-1] else INVALID

    def cuDeviceCanAccessPeer(self, found: Any, device: Any, peer: Any) -> int:
        found._obj.value = self._reaches(device.value, peer.value)
        return 0

    def cuCtxEnablePeerAccess(self, peer: Any, flags: int) -> int:
        pair = (self._stack[-1], peer.value)
        known = pair in self.enabled
        self.enabled.add(pair)
        return ALREADY_ENABLED if known else 0

    def cuIpcGetMemHandle(self, handle: Any, address: Any) -> int:
        if address.value not in self.live:
            return INVALID
        ctypes.memmove(handle._obj.data, struct.pack("qq", os.getpid(), address.value), 16)
        return 0

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: int) -> int:
        process, theirs = struct.unpack("qq", bytes(handle.data)[:16])
        if process == os.getpid():
            return INVALID
        if not self._opens:
            return UNSUPPORTED
        address._obj.value = theirs | OPENED
        self.opened.add(theirs | OPENED)
        return 0

    def cuIpcCloseMemHandle(self, address: Any) -> int:
        known = address.value in self.opened
        self.opened.discard(address.value)
        return 0 if known else INVALID


def install(monkeypatch: pytest.MonkeyPatch, **facts: Any) -> FakeCuda:
    """Makes it this process's driver."""
    library = FakeCuda(**facts)
    driver = peer_storage.Driver(library)
    monkeypatch.setattr(peer_storage, "driver", lambda: driver)
    monkeypatch.setattr(peer_storage, "_allocations", {})
    return library
