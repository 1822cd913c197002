"""What the docstring of a public name has to tell, and what of it is missing."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_origin

ROOT = Path(__file__).resolve().parent.parent

# Takes whatever JAX's tree functions hand it, and an index that may be traced.
UNCHECKED = {"MSAIcpComm.tree_unflatten", "IndexerGeometry.index_offset"}


def public_names(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Every name of `__all__`, and what its classes have, as a reference calls them."""
    for name in module.__all__:
        member = getattr(module, name)
        yield name, member
        if not inspect.isclass(member):
            continue
        for attribute, value in vars(member).items():
            value = getattr(value, "__func__", value)
            shown = inspect.isfunction(value) or isinstance(value, property)
            if shown and (not attribute.startswith("_") or attribute == "__call__"):
                yield f"{name}.{attribute}", value


def missing(name: str, member: Any) -> list[str]:
    """What a reader of the docstring would look for in vain."""
    if get_origin(member) is Literal:  # described in msa_icp_jax.typing
        return []
    text = inspect.getdoc(member) or ""
    if not text:
        return [f"{name}: no docstring"]
    if dataclasses.is_dataclass(member):
        fields = [field.name for field in dataclasses.fields(member)]
        return [f"{name}: no attribute {x}" for x in fields if not described(text, x)]
    if not inspect.isfunction(member) or name in UNCHECKED:
        return []
    parameters = [
        parameter
        for parameter in inspect.signature(member).parameters.values()
        if parameter.name not in ("self", "cls")
    ]
    if not parameters or name.endswith(".__call__"):  # of a program, which refers to its method
        return []
    lacks = []
    if "Raises:" not in text:
        lacks.append(f"{name}: no Raises")
    for parameter in parameters:
        words = described(text, parameter.name)
        if not words:
            lacks.append(f"{name}: nothing of {parameter.name}")
        elif re.search(r"\bArray\b|Tensor\b", str(parameter.annotation)) and not re.search(
            r"\[.*\]|\bas in\b|\bscalar\b|\bany shape\b", words
        ):
            lacks.append(f"{name}: no shape of {parameter.name}")
    return lacks


def described(text: str, parameter: str) -> str:
    """What an Args or Attributes entry says of a parameter; a group may share one."""
    for entry in re.finditer(r"^  (\S[^:]*?(?:\n    [^:]*?)?):[ \n](.*(?:\n    .*)*)", text, re.M):
        if parameter in re.findall(r"\w+", entry[1]):
            return entry[2]
    return ""


def build_reference(folder: Path) -> str:
    """Builds the pages of `make docs` into a folder; returns what was said."""
    script = ROOT / "tools" / "reference.py"
    answer = subprocess.run(
        [sys.executable, script, "--out", folder],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "interop")])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout + answer.stderr


def named_on(page: Path) -> set[str]:
    """What a page of the reference has an entry for."""
    return set(re.findall(r'<(?:section|div) id="([\w.]+)"', page.read_text()))
