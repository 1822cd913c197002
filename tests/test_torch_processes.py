"""Several processes, both import orders, JAX's memory beside torch's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from inputs import COMPILE_FAST, TIME_LIMIT

torch = pytest.importorskip("torch", reason="torch is not installed (extra torch)")

import torch_inputs  # noqa: E402, F401 (puts the package on the path)

from msa_icp_torch import memory  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
SWITCH = "XLA_PYTHON_CLIENT_PREALLOCATE"


def run(*arguments: Any, status: int = 0, **environment: str) -> str:
    """Runs this Python with the checkout on its path, on the CPU; returns what it prints."""
    path = [str(ROOT), str(ROOT / "interop"), str(ROOT / "tests")]
    inherited = {k: v for k, v in os.environ.items() if k not in (SWITCH, "XLA_FLAGS")}
    # Behind the checkout: whatever this process was given.
    path += [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", *map(str, arguments)],
        env=inherited
        | {"PYTHONPATH": os.pathsep.join(path), "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}
        | {"XLA_FLAGS": COMPILE_FAST}
        | environment,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
    )
    assert done.returncode == status, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_a_group_of_processes():
    """Of two; test_tensor_parallel has groups of four."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    out = run(*torchrun, ROOT / "tests/torch_worker.py", 256)
    for rank in range(2):
        assert f"rank {rank} of 2: agreed" in out


def test_the_torchrun_example():
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    out = run(*torchrun, ROOT / "examples/torch_group.py")
    assert "no protocol faults" in out


def test_the_adapter_for_another_engine():
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    out = run(*torchrun, ROOT / "examples/torch_vllm_indexer.py")
    assert out == "5532 rows of ids, 0 wrong, 0 protocol faults\n"


def test_the_eager_example():
    assert "request 1: blocks [0, " in run(ROOT / "examples/torch_decode.py")


def test_the_graph_example_says_why_it_skips():
    assert "skipped: CUDA graphs" in run(ROOT / "examples/torch_graph.py", CUDA_VISIBLE_DEVICES="")


def test_the_hosts_cost_is_absent_without_a_gpu(tmp_path):
    out = tmp_path / "rows.json"
    said = run("-m", "benchmarks.host", "--out", out, status=2, CUDA_VISIBLE_DEVICES="")
    assert "absent: host (it takes a GPU of compute capability 9.0" in said
    assert json.loads(out.read_text())["rows"] == []


# ---- one process, two libraries ----

ROUND_TRIP = """
import os
t = torch.arange(64, dtype=torch.int32)
a = jax.dlpack.from_dlpack(t)
import msa_icp_torch.bridge as bridge
b = bridge.Bridge(torch.device("cpu"))
assert b.fresh(t)[0].unsafe_buffer_pointer() == t.data_ptr()
assert int(jax.jit(lambda x: x.sum())(b.fresh(t)[0])) == 2016
assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
print("fine")
"""


@pytest.mark.parametrize(
    "imports",
    [
        "import torch, jax, msa_icp_torch",
        "import jax, torch, msa_icp_torch",
        "import msa_icp_torch, torch, jax",
        "import msa_icp_jax, torch, jax, msa_icp_torch",
    ],
)
def test_any_import_order(imports):
    assert run("-c", imports + ROUND_TRIP).strip() == "fine"


def test_import_starts_no_backend():
    """Nor a CUDA context: importing is free, whatever the machine."""
    code = (
        "import msa_icp_torch, torch\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
        "assert not torch.cuda.is_initialized()\n"
        "print('fine')"
    )
    assert run("-c", code).strip() == "fine"


LOWERED = """
import jax.numpy as jnp
from jax._src import xla_bridge
from msa_icp_jax import msa_icp_topk_select_publish
from msa_icp_jax.ops._mosaic import aot

def select(scores, counts):
    return msa_icp_topk_select_publish(
        scores, counts, rank=0, world_size=2, heads_per_rank=2, force_begin_blocks=1,
        force_end_blocks=1, backend="mosaic",
    ).rows

shapes = jax.ShapeDtypeStruct((8, 4, 1024), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.int32)
"""


def test_lowering_for_the_direct_route_starts_no_backend():
    code = (
        "import torch, jax, msa_icp_torch" + LOWERED + "first = aot.lower(select, *shapes)\n"
        "assert not xla_bridge.backends_are_initialized()\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert jax.config.jax_platforms == 'cpu', 'as JAX_PLATFORMS says'\n"
        "assert float(jnp.ones(3).sum()) == 3\n"
        "again = aot.lower(select, *shapes)\n"
        "assert [x.module for x in first.steps] == [x.module for x in again.steps]\n"
        "assert float(jnp.ones(3).sum()) == 3, 'the backend that was up is gone'\n"
        "print('fine')"
    )
    assert run("-c", code).strip() == "fine"


def test_a_cpu_backend_that_is_up_is_no_trouble():
    code = "import jax; jax.devices(); import msa_icp_torch; print('fine')"
    assert run("-c", code).strip() == "fine"


def test_preallocation_is_switched_off_before_a_backend_starts():
    environment: dict[str, str] = {}
    memory.leave_room_for_torch(environment)
    assert environment == {SWITCH: "false"}


@pytest.mark.parametrize(
    "environment",
    [
        {SWITCH: "false"},
        {SWITCH: "False"},
        {SWITCH: "0"},
        {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"},
        {"XLA_PYTHON_CLIENT_ALLOCATOR": "PLATFORM"},
    ],
)
def test_what_takes_no_memory_ahead_is_left_alone(environment, monkeypatch):
    monkeypatch.setattr(memory, "gpu_backend_is_up", lambda: True)
    before = dict(environment)
    memory.leave_room_for_torch(environment)
    assert environment == before


@pytest.mark.parametrize("environment", [{}, {SWITCH: ""}, {SWITCH: "true"}])
def test_a_gpu_backend_that_is_up_gets_a_warning(environment, monkeypatch):
    """The switch is read when the backend starts; setting it later would only look right."""
    monkeypatch.setattr(memory, "gpu_backend_is_up", lambda: True)
    before = dict(environment)
    with pytest.warns(RuntimeWarning, match="JAX has preallocated GPU memory"):
        memory.leave_room_for_torch(environment)
    assert environment == before


def test_a_users_own_wish_gets_a_warning(monkeypatch):
    environment = {SWITCH: "true"}
    monkeypatch.setattr(memory, "gpu_backend_is_up", lambda: False)
    with pytest.warns(RuntimeWarning, match=f"{SWITCH}=true is set"):
        memory.leave_room_for_torch(environment)
    assert environment == {SWITCH: "true"}


@pytest.mark.parametrize(
    ("initialized", "platforms", "up"),
    [(False, ["gpu"], False), (True, ["cpu"], False), (True, ["cpu", "gpu"], True)],
)
def test_gpu_backend_is_up(monkeypatch, initialized, platforms, up):
    class Device:
        def __init__(self, platform: str) -> None:
            self.platform = platform

    monkeypatch.setattr(memory.xla_bridge, "backends_are_initialized", lambda: initialized)
    monkeypatch.setattr(memory.jax, "local_devices", lambda: [Device(p) for p in platforms])
    assert memory.gpu_backend_is_up() is up
