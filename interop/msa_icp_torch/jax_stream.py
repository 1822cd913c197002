"""The CUDA stream that JAX runs a device's programs on.

JAX does not say it, but XLA tells it to every function that a program calls through its foreign
function interface. `find_stream` runs a program that calls one; the structures are those of XLA's
`ffi/api/c_api.h`, which jaxlib has among its headers.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

import jax
import jaxlib
import numpy as np

from msa_icp_jax.ambient import own_mesh

_VERSIONS = ((0, 11),)  # of jaxlib, known to run all programs of a device on one stream
_TARGET = "msa_icp_torch_stream"
_METADATA = 1  # the type of the extension that asks for a function's metadata


class _Extension(ctypes.Structure):
    """XLA_FFI_InternalExtension."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
    )


class _ApiVersion(ctypes.Structure):
    """XLA_FFI_Api_Version."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("major_version", ctypes.c_int),
        ("minor_version", ctypes.c_int),
    )


class _Metadata(ctypes.Structure):
    """XLA_FFI_Metadata."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("api_version", _ApiVersion),
        ("traits", ctypes.c_uint32),
        ("state_type_id", ctypes.c_int64),
    )


class _MetadataExtension(ctypes.Structure):
    """XLA_FFI_Metadata_Extension."""

    _fields_ = (
        ("extension_base", _Extension),
        ("metadata", ctypes.POINTER(_Metadata)),
    )


class _StreamGetArgs(ctypes.Structure):
    """XLA_FFI_Stream_Get_Args."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
    )


# XLA_FFI_Error* XLA_FFI_Stream_Get(XLA_FFI_Stream_Get_Args*)
_StreamGet = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_StreamGetArgs))


class _Api(ctypes.Structure):
    """XLA_FFI_Api, up to what is used of it."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("api_version", _ApiVersion),
        ("internal_api", ctypes.c_void_p),
        ("error_create", ctypes.c_void_p),
        ("error_get_details", ctypes.c_void_p),
        ("error_destroy", ctypes.c_void_p),
        ("handler_register", ctypes.c_void_p),
        ("stream_get", _StreamGet),
    )


class _CallFrame(ctypes.Structure):
    """XLA_FFI_CallFrame, up to what is used of it."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.POINTER(_Extension)),
        ("api", ctypes.POINTER(_Api)),
        ("ctx", ctypes.c_void_p),
    )


_lock = threading.Lock()
_seen: list[tuple[int, int | None]] = []  # by the function, in a run: its thread, the stream


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_CallFrame))
def _function(frame: Any) -> int | None:
    """Keeps the stream that it is called for; returns XLA's error, if there is one."""
    call = frame.contents
    extension, api = call.extension_start, call.api.contents
    if extension and extension.contents.type == _METADATA:
        pointer = ctypes.cast(extension, ctypes.POINTER(_MetadataExtension))
        version = pointer.contents.metadata.contents.api_version
        version.major_version = api.api_version.major_version
        version.minor_version = api.api_version.minor_version
        return None
    arguments = _StreamGetArgs(ctypes.sizeof(_StreamGetArgs), None, call.ctx, None)
    error: int | None = api.stream_get(ctypes.byref(arguments))
    _seen.append((threading.get_ident(), arguments.stream))
    return error


@functools.cache
def _register(platform: str) -> None:
    """Makes XLA know the function, under its name."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = (
        ctypes.py_object,
        (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
    )
    capsule = new(ctypes.cast(_function, ctypes.c_void_p), None, None)
    jax.ffi.register_ffi_target(_TARGET, capsule, platform=platform)


@functools.cache
def find_stream(device: jax.Device) -> int | None:
    """The stream's handle; None where it is not known, or not known to be the only one.

    Where it is, a program is on the stream when its call returns: it gets there on the thread of
    the call.
    """
    version = tuple(int(x) for x in jaxlib.__version__.split(".")[:2])
    # The platform of an AMD GPU is "gpu", too.
    if "cuda" not in device.client.platform_version or version not in _VERSIONS:
        return None
    _register("CUDA")
    with _lock:
        _seen.clear()
        _run(device)
        found = {*_seen}
    thread, stream = found.pop() if len(found) == 1 else (0, None)
    return stream if thread == threading.get_ident() else None


def _run(device: jax.Device) -> None:
    """Runs a program that calls the function."""
    result = jax.ShapeDtypeStruct((1,), np.int32)
    program = jax.jit(jax.ffi.ffi_call(_TARGET, result, has_side_effect=True))
    with own_mesh(None):
        jax.block_until_ready(program(jax.device_put(np.zeros(1, np.int32), device)))
