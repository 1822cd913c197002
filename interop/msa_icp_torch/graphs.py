"""Launches as one CUDA graph: one call of the driver, where each of them costs the host one.

By the driver's own functions, which are public. No memory of torch's takes part, and captures of
the caller's, on whatever thread, go on undisturbed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from msa_icp_jax.ops._mosaic import aot

MOST = 256  # graphs of a plan at a time: each takes 115 KiB of the GPU, which the driver keeps
_LOGGER = logging.getLogger(__name__)
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


class GraphError(RuntimeError):
    """The driver refused."""


class Graph:
    """An executable graph of launches; it goes with this object, after what still runs of it."""

    def __init__(self, handle: int) -> None:
        """Takes a CUgraphExec."""
        self._handle = handle
        self._launch = _launcher()
        weakref.finalize(self, _destroy, handle).atexit = False

    def launch(self, stream: int) -> None:
        """Puts it on a CUDA stream of its device, whose context is current.

        Raises:
          GraphError: the driver refused.
        """
        code = self._launch(self._handle, stream)
        if code:
            raise GraphError(f"cuGraphLaunch of the CUDA driver failed with code {code}")


class Graphs:
    """Makes graphs for one device."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stream: ctypes.c_void_p | None = None  # of captures
        self._refused = False
        self._made: weakref.WeakSet[Graph] = weakref.WeakSet()

    def make(self, launches: aot.Launches) -> Graph | None:
        """A graph of kernels' launches, in the device's context; None where there is none to have.

        They can be launched one by one then: where there are `MOST` graphs, or the driver refuses,
        which is logged once.
        """
        if self._refused or len(self._made) >= MOST:
            return None
        try:
            with self._lock, _relaxed():
                graph = self._make(launches)
            self._made.add(graph)
            return graph
        except (GraphError, OSError, AttributeError) as error:
            self._refused = True
            _LOGGER.warning("decodes are launched kernel by kernel, not as graphs: %s", error)
            return None

    def _make(self, launches: aot.Launches) -> Graph:
        """Captures the launches on a stream of its own."""
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        if self._stream is None:
            stream = ctypes.c_void_p()
            _call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
            self._stream = stream
        _call("cuStreamBeginCapture_v2", self._stream, _RELAXED)
        try:
            aot.launch(launches, self._stream.value or 0)
        finally:
            _call("cuStreamEndCapture", self._stream, ctypes.byref(graph))
        try:
            flags = ctypes.c_ulonglong(0)
            _call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, flags)
        finally:
            _call("cuGraphDestroy", graph)
        assert executable.value is not None
        return Graph(executable.value)


def _destroy(handle: int) -> None:
    with _relaxed():
        _call("cuGraphExecDestroy", ctypes.c_void_p(handle))


@contextlib.contextmanager
def _relaxed() -> Iterator[None]:
    """What a capture forbids its thread, or all threads, is allowed: it concerns none of them."""
    mode = ctypes.c_int(_RELAXED)
    _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


def _call(name: str, *arguments: Any) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code:
        raise GraphError(f"{name} of the CUDA driver failed with code {code}")


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _launcher() -> Any:
    """int cuGraphLaunch(graph, stream), by addresses."""
    pointer = ctypes.c_void_p
    return ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer)(("cuGraphLaunch", _driver()))
