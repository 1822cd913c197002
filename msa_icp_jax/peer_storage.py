"""Receive storage outside XLA's memory, at addresses that other GPUs' kernels reach.

The one-sided transport stores rows into peers' memory and looks at its own until they are there.
XLA may move, alias or re-map memory of its own between and during calls, so this memory is not
XLA's: the CUDA driver allocates it, in the context that XLA uses, and programs get its addresses as
data. GPUs of one process know each other's addresses; those of other processes on the same host are
opened by their IPC handles.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import platform
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from msa_icp_jax.geometry import round_up

# The driver hands out blocks of this size, and an IPC handle opens whole blocks: so that no other
# allocation of this process lies in one, sizes are multiples of it.
_BLOCK_BYTES = 2 << 20
_HANDLE_BYTES = 64
_ALREADY_ENABLED = 704  # CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED
_OPEN_LAZILY = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is


class Unreachable(RuntimeError):
    """GPUs of a group cannot store into each other's memory."""


class DriverError(RuntimeError):
    """A call of the CUDA driver failed; `code` is its CUresult."""

    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call} failed with CUDA error {code} ({text})")
        self.code = code


class Driver:
    """The few calls of the CUDA driver (libcuda) that this module makes."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._contexts: dict[int, int] = {}
        self._call("cuInit", 0)

    def context(self, ordinal: int) -> int:
        """The primary context of a GPU, which is the one that XLA uses."""
        if ordinal not in self._contexts:
            context = ctypes.c_void_p()
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device(ordinal))
            assert context.value
            self._contexts[ordinal] = context.value
        return self._contexts[ordinal]

    @contextlib.contextmanager
    def current(self, context: int) -> Iterator[None]:
        """Makes a context this thread's current one for a while."""
        self._call("cuCtxPushCurrent_v2", ctypes.c_void_p(context))
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def allocate(self, size: int) -> int:
        """Zeroed memory of the current context."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(size))
        self._call("cuCtxSynchronize")
        return address.value

    def free(self, address: int) -> None:
        """Frees what `allocate` gave."""
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def reaches(self, ordinal: int, peer: int) -> bool:
        """Whether a GPU can access another one's memory."""
        found = ctypes.c_int()
        devices = self._device(ordinal), self._device(peer)
        self._call("cuDeviceCanAccessPeer", ctypes.byref(found), *devices)
        return bool(found.value)

    def enable(self, peer: int) -> None:
        """Lets the current context access another context's memory."""
        try:
            self._call("cuCtxEnablePeerAccess", ctypes.c_void_p(peer), 0)
        except DriverError as error:
            if error.code != _ALREADY_ENABLED:
                raise

    def export(self, address: int) -> bytes:
        """A handle by which other processes open an allocation."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle.data)

    def open(self, handle: bytes) -> int:
        """The address of another process's allocation in the current context."""
        address = ctypes.c_uint64()
        opened = _Handle((ctypes.c_ubyte * _HANDLE_BYTES)(*handle))
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), opened, _OPEN_LAZILY)
        return address.value

    def close(self, address: int) -> None:
        """Closes what `open` gave."""
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def devices(self) -> int:
        """GPUs that this process sees."""
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def _device(self, ordinal: int) -> ctypes.c_int:
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ordinal)
        return device

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise DriverError(name, code, (text.value or b"unknown").decode())


class _Handle(ctypes.Structure):
    _fields_ = [("data", ctypes.c_ubyte * _HANDLE_BYTES)]


@functools.cache
def driver() -> Driver:
    """This process's CUDA driver.

    Raises:
      Unreachable: there is none.
    """
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except OSError as error:
        raise Unreachable(f"the one-sided transport needs the CUDA driver: {error}") from None


@dataclasses.dataclass(frozen=True)
class _Allocation:
    """One rank's storage in this process, and the peers' storage that was opened for it."""

    context: int
    address: int
    opened: tuple[int, ...] = ()


_allocations: dict[int, _Allocation] = {}  # by address


def allocate(devices: Sequence[jax.Device], size: int) -> list[int]:
    """Zeroed storage of `size` bytes on each of this process's GPUs, which reach each other.

    Args:
      devices: a group's, by rank; one that comes twice gets as many storages.
      size: bytes.

    Returns:
      Their addresses, for `free`.

    Raises:
      Unreachable: two of the GPUs do not reach each other, or there is no CUDA driver.
      DriverError: the memory could not be allocated.
    """
    contexts = [driver().context(device.local_hardware_id) for device in devices]
    _connect(devices, contexts)
    addresses: list[int] = []
    try:
        for context in contexts:
            addresses.append(_allocate(context, size))
    except DriverError:
        for address in addresses:
            free(address)
        raise
    return addresses


def allocate_for_mesh(mesh: Mesh, axis_name: str, size: int) -> dict[jax.Device, list[int]]:
    """Zeroed storage of `size` bytes on every device of a mesh, each group's ranks connected.

    A group is what shares its place on all axes but `axis_name`. Every process of the mesh has to
    call this; where one of them fails, all raise.

    Returns:
      For each of this process's devices the addresses of its group's storage, by rank, as that
      device reaches them.

    Raises:
      Unreachable: GPUs of a group do not reach each other, or there is no CUDA driver.
      DriverError: the memory could not be allocated or opened.
    """
    axis = mesh.axis_names.index(axis_name)
    groups = np.moveaxis(mesh.devices, axis, -1).reshape(-1, mesh.shape[axis_name])
    devices = list(mesh.devices.flat)
    mine = _local(devices)
    made: dict[jax.Device, int] = {}
    handles: dict[jax.Device, bytes] = {}

    def make() -> None:
        for group in groups:
            local = [device for device in group if device in mine]
            made.update(zip(local, allocate(local, size), strict=True))
        if len(mine) < len(devices):
            handles.update({device: _handle(address) for device, address in made.items()})

    error = _failure_of(make)
    if len(mine) == len(devices):
        if error:
            _free_all(made.values())
            raise error
        return {d: [made[peer] for peer in group] for group in groups for d in group}
    messages = _gather(devices, {d: _message(error, handles.get(d)) for d in mine})
    reached: dict[jax.Device, list[int]] = {}

    def open_peers() -> None:
        _check_all(messages)
        for group in groups:
            for device in group:
                if device in made:
                    reached[device] = _open_group(device, group, made, messages)

    error = error or _failure_of(open_peers)
    messages = _gather(devices, {d: _message(error) for d in mine})
    error = error or _failure_of(lambda: _check_all(messages))
    if error:
        _free_all(made.values())
        raise error
    return reached


def free(address: int) -> None:
    """Frees storage of this process; what was opened for it is closed first.

    Raises:
      ValueError: there is none at this address (it was freed already, say).
    """
    close(address)
    allocation = _allocations.pop(address)
    with driver().current(allocation.context):
        driver().free(address)


def close(address: int) -> None:
    """Closes what was opened of other processes for the storage at an address.

    Raises:
      ValueError: as for `free`.
    """
    if address not in _allocations:
        raise ValueError(f"this process has no receive storage at address {address:#x}")
    allocation = _allocations[address]
    with driver().current(allocation.context):
        for peer in allocation.opened:
            driver().close(peer)
    _allocations[address] = dataclasses.replace(allocation, opened=())


def wait_for_all(devices: Sequence[jax.Device]) -> None:
    """Returns when the processes of all these devices have called it, with the same devices."""
    mine = _local(devices)
    if len(mine) < len(devices):
        _gather(devices, {device: _message(None) for device in mine})


def gpus_reach_each_other() -> bool:
    """Whether this process sees several GPUs, and each of them can access every other's memory."""
    try:
        count = driver().devices()
        pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
        return bool(pairs) and all(driver().reaches(*pair) for pair in pairs)
    except (Unreachable, DriverError):
        return False


def _local(devices: Sequence[jax.Device]) -> list[jax.Device]:
    """Those that are this process's."""
    return [device for device in devices if device.process_index == jax.process_index()]


def _allocate(context: int, size: int) -> int:
    with driver().current(context):
        address = driver().allocate(round_up(max(size, 1), _BLOCK_BYTES))
    _allocations[address] = _Allocation(context, address)
    return address


def _connect(devices: Sequence[jax.Device], contexts: Sequence[int]) -> None:
    """Lets each of this process's GPUs access the others' memory."""
    for device, context in zip(devices, contexts, strict=True):
        for peer, peer_context in zip(devices, contexts, strict=True):
            if context == peer_context:
                continue
            if not driver().reaches(device.local_hardware_id, peer.local_hardware_id):
                raise Unreachable(
                    f"the one-sided transport stores into peers' memory, and {device} cannot "
                    f'access that of {peer}: use transport="collective"'
                )
            with driver().current(context):
                driver().enable(peer_context)


def _free_all(addresses: Any) -> None:
    for address in addresses:
        free(address)


# ---- several processes ----

_HOST_BYTES = 16
_MESSAGE = np.dtype(
    [
        ("failed", np.int32),
        ("process", np.int32),
        ("host", np.uint8, _HOST_BYTES),
        ("handle", np.uint8, _HANDLE_BYTES),
    ]
)


def _failure_of(step: Callable[[], None]) -> Exception | None:
    """Runs a step whose failure the other processes must hear of before it is raised."""
    try:
        step()
    except (Unreachable, DriverError) as error:
        return error
    return None


def _handle(address: int) -> bytes:
    """The handle of storage of this process."""
    with driver().current(_allocations[address].context):
        return driver().export(address)


def _message(error: Exception | None, handle: bytes | None = None) -> np.ndarray:
    """What a device's process says about it, as words."""
    message = np.zeros((), _MESSAGE)
    message["failed"], message["process"] = error is not None, jax.process_index()
    message["host"] = np.frombuffer(_host(), np.uint8)
    if handle:
        message["handle"] = np.frombuffer(handle, np.uint8)
    return np.frombuffer(message.tobytes(), np.int32)


def _host() -> bytes:
    """What processes of one running system have in common."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = boot.read_text() if boot.exists() else platform.node()
    return hashlib.blake2b(name.encode(), digest_size=_HOST_BYTES).digest()


def _gather(
    devices: Sequence[jax.Device], messages: dict[jax.Device, np.ndarray]
) -> dict[jax.Device, Any]:
    """Every device's message; each process gives those of its own devices."""
    flat = Mesh(np.array(devices), ("device",), axis_types=(AxisType.Auto,))
    words = len(next(iter(messages.values())))
    rows = [jax.device_put(messages[d][None], d) for d in devices if d in messages]
    sent = jax.make_array_from_single_device_arrays(
        (len(devices), words), NamedSharding(flat, P("device")), rows
    )
    everywhere = jax.jit(lambda x: x, out_shardings=NamedSharding(flat, P()))(sent)
    found = np.ascontiguousarray(everywhere.addressable_data(0)).view(_MESSAGE)[:, 0]
    return dict(zip(devices, found, strict=True))


def _check_all(messages: dict[jax.Device, Any]) -> None:
    failed = sorted({int(m["process"]) for m in messages.values() if m["failed"]})
    if failed:
        raise Unreachable(
            f"processes {failed} could not make or open receive storage: see what they raised"
        )


def _open_group(
    device: jax.Device,
    group: np.ndarray,
    made: dict[jax.Device, int],
    messages: dict[jax.Device, Any],
) -> list[int]:
    """Addresses of a group's storage as one device of this process reaches them."""
    own = made[device]
    found = []
    for peer in group:
        if peer in made:
            found.append(made[peer])
            continue
        if not np.array_equal(messages[peer]["host"], messages[device]["host"]):
            raise Unreachable(
                f"the one-sided transport needs a group on one host, and {peer} is on another one "
                f'than {device}: use transport="collective"'
            )
        try:
            with driver().current(_allocations[own].context):
                address = driver().open(messages[peer]["handle"].tobytes())
        except DriverError as error:
            raise Unreachable(
                f"the one-sided transport stores into peers' memory, and {device} cannot open that "
                f'of {peer}: {error}; use transport="collective"'
            ) from None
        allocation = _allocations[own]
        _allocations[own] = dataclasses.replace(allocation, opened=(*allocation.opened, address))
        found.append(address)
    return found
