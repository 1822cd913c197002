"""The range of JAX releases: stated once, and refused by name outside it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import jax
import pytest
from inputs import TIME_LIMIT

from msa_icp_jax import versions

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "numbers", [(0, 11, 2), (0, 11, 3), (0, 12), (0, 12, 0, 1), (0, 12, 99), jax.__version_info__]
)
def test_releases_within_the_range(numbers: tuple[int, ...]) -> None:
    versions.check_jax("any", numbers)


@pytest.mark.parametrize(
    "numbers", [(0, 4, 35), (0, 9, 2), (0, 10), (0, 11), (0, 11, 1), (0, 13), (0, 13, 0), (1, 0)]
)
def test_releases_outside_the_range_are_refused_by_name(numbers: tuple[int, ...]) -> None:
    version = ".".join(map(str, numbers))
    message = rf"needs jax >= 0\.11\.2, < 0\.13, found {re.escape(version)} in .*pip install"
    with pytest.raises(ImportError, match=message):
        versions.check_jax(version, numbers)


@pytest.mark.parametrize("version", ["0.10.2", "0.13.0"])
def test_another_jax_is_refused_before_anything_else_fails(version: str, tmp_path: Path) -> None:
    """A JAX that has nothing but its version: whatever used more of it would fail differently."""
    numbers = tuple(map(int, version.split(".")))
    (tmp_path / "jax.py").write_text(f"__version__ = {version!r}\n__version_info__ = {numbers}\n")
    answer = subprocess.run(
        [sys.executable, "-c", "import msa_icp_jax"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
        check=False,
    )
    assert answer.returncode != 0
    last = answer.stderr.splitlines()[-1]
    assert last.startswith(
        f"ImportError: msa_icp_jax needs jax >= 0.11.2, < 0.13, found {version} in"
    )


def test_the_range_is_that_of_the_package_s_metadata() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest, before = (".".join(map(str, x)) for x in (versions.OLDEST, versions.BEFORE))
    assert f"jax>={oldest},<{before}" in project["dependencies"]
    makefile = (ROOT / "Makefile").read_text()
    assert f"OLDEST_JAX := {oldest}\n" in makefile


def test_a_deprecation_is_an_error_here() -> None:
    """Every test runs so; what JAX deprecates fails the suite before it is removed."""
    for category in (DeprecationWarning, PendingDeprecationWarning, FutureWarning, UserWarning):
        with pytest.raises(category):
            warnings.warn("deprecated", category, stacklevel=1)


def test_every_kernel_module_imports_without_a_warning() -> None:
    """The kernels' modules too, which a machine without a GPU would otherwise never import."""
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in sorted((ROOT / "msa_icp_jax").rglob("*.py"))
        if path.name != "__main__.py"
    ]
    assert "msa_icp_jax.ops.decode_score.kernel" in modules
    code = f"import importlib\nfor name in {modules}: importlib.import_module(name)"
    answer = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
