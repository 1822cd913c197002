"""The recipes for tensor parallelism of 8, each in processes of its own: eight devices or ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from inputs import COMPILE_FAST, TIME_LIMIT

ROOT = Path(__file__).parent.parent


def run(*arguments: str | Path) -> list[str]:
    """The lines that this Python prints, on the CPU, without the device count of this process."""
    path = [str(ROOT), str(ROOT / "interop"), os.environ.get("PYTHONPATH", "")]
    variables = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    variables |= {"PYTHONPATH": os.pathsep.join(path), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=variables
        | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "XLA_FLAGS": COMPILE_FAST},
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout.splitlines()


def test_a_mesh_of_two_groups_of_four() -> None:
    assert run("-W", "error", ROOT / "examples/tensor_parallel.py") == [
        "each device holds 393,216 of 1,572,864 bytes of index keys",
        "ids and attention of 8 devices equal one rank's",
    ]


def test_process_groups_of_four_in_eight() -> None:
    pytest.importorskip("torch", reason="torch is not installed (extra torch)")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=8")
    lines = run(*torchrun, ROOT / "examples/torch_tensor_parallel.py")
    assert "ids of 8 ranks equal one rank's" in lines


def test_the_mesh_of_the_scaling_guide(tmp_path: Path) -> None:
    text = (ROOT / "docs/scaling.md").read_text()
    (snippet,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "snippet.py").write_text(snippet)
    said = re.findall(r"^print\(.*\)  # ([^:\n]+)", snippet, re.MULTILINE)
    assert said[:2] == ["(6, 4, 16)", "True"]
    # The third is a PartitionSpec, which JAX releases print differently.
    assert run("-W", "error", tmp_path / "snippet.py")[:2] == said[:2]
