"""What shipped code may reach: no network, no pickle, no code from data, no device work on import.

Read from the source, so that code which no test runs counts too, and watched in a process whose
sockets do not work.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import inputs
import numpy as np
import pytest

from msa_icp_jax.demo import MAX_QUERIES, NpzError, read_context

ROOT = Path(__file__).parent.parent
SHIPPED = sorted(
    path for top in ("msa_icp_jax", "interop/msa_icp_torch") for path in (ROOT / top).rglob("*.py")
)

NETWORK = {"socket", "ssl", "http", "urllib", "ftplib", "smtplib", "xmlrpc", "requests", "httpx"}
CODE_FROM_DATA = {"pickle", "cPickle", "shelve", "marshal", "dill", "cloudpickle", "joblib"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
SHELL = {"system", "popen"}


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.split(".")[0]


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """(plain or last name of what is called, the call)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name):
                yield function.id, node
            elif isinstance(function, ast.Attribute):
                yield f".{function.attr}", node


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_module_uses_neither_network_nor_pickle_nor_code_from_data(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not set(imports(tree)) & (NETWORK | CODE_FROM_DATA | {"subprocess"})
    for name, call in calls(tree):
        assert name not in BUILTINS, ast.unparse(call)
        assert name.removeprefix(".") not in SHELL, ast.unparse(call)
        if name == ".load" and "np" in ast.unparse(call.func):
            options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            assert options.get("allow_pickle") == "False", ast.unparse(call)


def test_the_rules_would_find_what_they_forbid() -> None:
    bad = ast.parse("import os, urllib.request\nfrom pickle import loads\nos.system('x')\neval(1)")
    assert {"urllib", "pickle"} <= set(imports(bad))
    assert {".system", "eval"} <= {name for name, _ in calls(bad)}


OFFLINE = """
import socket

def refuse(*_, **__):
    raise AssertionError("the network was used")

socket.socket.connect = socket.socket.connect_ex = socket.socket.sendto = refuse
socket.getaddrinfo = socket.create_connection = refuse
"""

RUN = """
import jax, jax.numpy as jnp
from msa_icp_jax import prepare_msa_icp_indexer
plan = prepare_msa_icp_indexer(world_size=2, num_index_heads=4, page_size=128, init_blocks=1,
    local_blocks=1, max_decode_tokens=1, max_decode_query_len=1, max_num_batched_tokens=8,
    max_num_seqs=1, max_model_len=512, num_sparse_layers=1)
program = plan.decode_program(decode_query_len=1)
fp8 = jnp.float8_e4m3fn
output, _ = program(jnp.zeros((1, 4, 128), fp8), jnp.zeros((2, 4, 64, 128), fp8),
    jnp.zeros((1, 4), jnp.int32), jnp.full(1, 300), jnp.full(1, 3),
    jnp.zeros((2, 1, 4, 4)), jnp.zeros((2, 1, 2, 16), jnp.int32))
print(output[0, 0, 0, :4].tolist())
"""


def run(code: str) -> str:
    answer = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=inputs.TIME_LIMIT,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.strip()


def test_a_step_runs_without_a_network() -> None:
    assert run(OFFLINE + RUN) == "[0, 1, 2, -1]"


def test_importing_neither_starts_a_backend_nor_makes_arrays() -> None:
    code = (
        "import msa_icp_jax, jax\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
        "print('fine')"
    )
    assert run(code) == "fine"


# ---- data files ----


def write_npz(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return path


def npy(shape: tuple[int, ...], dtype: str = "|u1", data: bytes = b"") -> bytes:
    """An .npy file whose header may promise more than it holds."""
    header = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}, }}"
    header = header.ljust(118 - 1) + "\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + data


def test_an_object_array_is_never_unpickled(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "x.npz", q=npy((1, 4, 128), "|O", b"cos\nsystem\n."), k=b"")
    with pytest.raises(NpzError, match="Object arrays cannot be loaded"):
        read_context(path)


@pytest.mark.parametrize("rows", [1 << 22, 1 << 40, 1 << 62, MAX_QUERIES + 1])
def test_a_size_that_a_header_states_takes_no_memory(rows: int, tmp_path: Path) -> None:
    """Up to gigabytes of addresses it may take, whose memory nothing touches."""
    path = write_npz(tmp_path / "x.npz", q=npy((rows, 4, 128)), k=npy((1, 128), data=b"\0" * 128))
    before = resident_bytes()
    with pytest.raises(NpzError, match=r"x\.npz cannot be read as an \.npz file"):
        read_context(path)
    assert resident_bytes() - before < 64 << 20


def test_a_member_larger_than_its_array_is_never_read(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "x.npz", q=b"\0" * (3 << 20), k=npy((1, 128), data=b"\0" * 128))
    with pytest.raises(NpzError, match="q must be an array of at most 2097152 bytes, got 3145728"):
        read_context(path)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_a_header_that_promises_more_than_there_is(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "x.npz", q=npy((4, 4, 128), data=b"\0" * 100), k=npy((9, 128)))
    with pytest.raises(NpzError, match="expected 2048 bytes got 100"):
        read_context(path)


def test_the_shipped_arrays_are_plain_and_small() -> None:
    for path in (ROOT / "msa_icp_jax").rglob("*.npz"):
        assert path.stat().st_size <= 1_000_000
        with np.load(path, allow_pickle=False) as arrays:
            for name in arrays.files:
                assert arrays[name].dtype.kind in "uiU", name
