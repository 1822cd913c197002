"""How JAX's stream is found: XLA's side of it as its headers say, and XLA itself."""

from __future__ import annotations

import ctypes
import threading
import types
from pathlib import Path
from typing import Any

import jax
import jaxlib
import pytest

pytest.importorskip("torch", reason="torch is not installed (extra torch)")

from msa_icp_torch import jax_stream

STREAM, ERROR = 0x7000, 0x9000


def call(frame: Any) -> Any:
    return jax_stream._function(ctypes.pointer(frame))


@pytest.fixture
def frame() -> Any:
    """What XLA calls the function with."""
    frame = jax_stream._CallFrame()
    frame.ctx = 77
    api = jax_stream._Api()
    api.api_version.major_version, api.api_version.minor_version = 3, 14
    frame.api = ctypes.pointer(api)
    return frame


def test_the_function_keeps_the_stream_that_xla_gives(frame, monkeypatch):
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(jax_stream, "_seen", seen)

    def stream_get(arguments: Any) -> None:
        assert arguments.contents.ctx == 77
        arguments.contents.stream = STREAM

    frame.api.contents.stream_get = jax_stream._StreamGet(stream_get)
    assert call(frame) is None
    assert seen == [(threading.get_ident(), STREAM)]


def test_the_function_hands_on_an_error(frame):
    frame.api.contents.stream_get = jax_stream._StreamGet(lambda _: ERROR)
    assert call(frame) == ERROR


def test_the_function_gives_its_metadata(frame):
    """The version is that of the caller's structures, which it knows from them alone."""
    metadata = jax_stream._Metadata()
    extension = jax_stream._MetadataExtension()
    extension.extension_base.type = 1
    extension.metadata = ctypes.pointer(metadata)
    frame.extension_start = ctypes.pointer(extension.extension_base)
    assert call(frame) is None
    version = metadata.api_version
    assert (version.major_version, version.minor_version) == (3, 14)


def test_xla_calls_the_function():
    """A program on a CPU has no stream, as XLA says through its own structures."""
    jax_stream._register("cpu")
    with pytest.raises(jax.errors.JaxRuntimeError, match="GPU context"):
        jax_stream._run(jax.devices("cpu")[0])


def test_a_cpu_has_no_stream():
    assert jax_stream.find_stream(jax.devices("cpu")[0]) is None


def test_an_amd_gpu_has_none_that_is_known(monkeypatch):
    """The function is registered for CUDA alone: a program of ROCm would not find it."""
    version = tuple(int(x) for x in jaxlib.__version__.split(".")[:2])
    monkeypatch.setattr(jax_stream, "_VERSIONS", (version,))
    monkeypatch.setattr(jax_stream, "_run", lambda _: pytest.fail("a program ran"))
    client = types.SimpleNamespace(platform_version="PJRT C API\nrocm 70000")
    device: Any = types.SimpleNamespace(platform="gpu", client=client)
    assert jax_stream.find_stream.__wrapped__(device) is None


def test_the_headers_have_these_members():
    """In this order, behind which others may come."""
    header = Path(jaxlib.__file__).parent / "include/xla/ffi/api/c_api.h"
    text = header.read_text()
    api = text[text.index("struct XLA_FFI_Api {") :]
    names = ("Error_Create", "Error_GetDetails", "Error_Destroy", "Handler_Register", "Stream_Get")
    fields = [f"_XLA_FFI_API_STRUCT_FIELD(XLA_FFI_{name});" for name in names]
    members = ("api_version;", "internal_api;", *fields)
    places = [api.index(member) for member in members]
    assert places == sorted(places)
    between = api[places[1] : places[-1]].split(";")[1:-1]
    assert len(between) == len(fields) - 1
