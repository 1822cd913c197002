"""The API reference: every public name is in it, and says what a caller has to know."""

from __future__ import annotations

import ast
from pathlib import Path

import docstrings
import jax
import pytest

import msa_icp_jax

PUBLIC = dict(docstrings.public_names(msa_icp_jax))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    said = docstrings.build_reference(folder)
    left_out = not (folder / "msa_icp_torch.html").exists()
    assert left_out == ("msa_icp_torch is left out: torch is not installed" in said)
    return folder


def test_the_reference_has_every_public_name(reference: Path) -> None:
    assert set(PUBLIC) - docstrings.named_on(reference / "msa_icp_jax.html") == set()
    assert len(PUBLIC) > 60
    aliases = {node.targets[0].id for node in alias_nodes()}
    assert docstrings.named_on(reference / "msa_icp_jax/typing.html") == aliases


@pytest.mark.parametrize("name", PUBLIC)
def test_a_docstring_tells_shapes_and_what_is_raised(name: str) -> None:
    assert docstrings.missing(name, PUBLIC[name]) == []


def alias_nodes() -> list[ast.Assign]:
    tree = ast.parse(Path(msa_icp_jax.typing.__file__).read_text())
    return [node for node in tree.body if isinstance(node, ast.Assign)]


def test_every_type_is_described() -> None:
    """A string behind an assignment is what the reference takes for its docstring."""
    body = ast.parse(Path(msa_icp_jax.typing.__file__).read_text()).body
    aliases = [i for i, node in enumerate(body) if isinstance(node, ast.Assign)]
    assert len(aliases) > 5
    assert all(isinstance(body[i + 1], ast.Expr) for i in aliases)


def test_what_a_docstring_lacks_is_found() -> None:
    def bad(x: jax.Array, y: jax.Array, z: int) -> None:
        """Does it.

        Args:
          x: float32 [T].
          y: the other one.
        """

    bad.__annotations__ = {"x": "jax.Array", "y": "jax.Array", "z": "int"}
    assert docstrings.missing("bad", bad) == [
        "bad: no Raises",
        "bad: no shape of y",
        "bad: nothing of z",
    ]
    bad.__doc__ = None
    assert docstrings.missing("bad", bad) == ["bad: no docstring"]
