"""Result files: rows of figures, merged by what they measure.

A file is `{"schema": 1, "rows": [...]}`. A row's key is (case, stage, backend, precision): a new
run replaces the rows that it measured again and leaves the others. Beside the rows, "absent" says
of a backend or stage without rows why it was not measured, and "fits" how the times of a sweep grow
(model.py).
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import model

SCHEMA = 1
KEY = ("case", "stage", "backend", "precision")
FIELDS = (
    *KEY,
    "median_us",
    "floor_us",
    "spread_us",
    "checked",
    "device",
    "driver",
    "jax",
    "torch",
    "commit",
    "date",
    "read_tbps",
    "fp8_tflops",
)

Row = dict[str, Any]


def key_of(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in KEY)


def label(key: Iterable[str]) -> str:
    return " ".join(key)


def load(path: Path) -> list[Row]:
    """The rows of a file.

    Raises:
      ValueError: the file is no result file of this schema.
    """
    return _content(path)["rows"]


def absent(path: Path) -> dict[str, str]:
    """What the file says is absent, and why."""
    return _content(path).get("absent", {})


def _content(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise ValueError(f"{path} is no result file of schema {SCHEMA}")
    return found


def merged(old: Iterable[Row], new: Iterable[Row]) -> list[Row]:
    """`old` with the rows that `new` has again replaced in place, the rest of `new` behind."""
    fresh = {key_of(row): row for row in new}
    kept = [fresh.pop(key_of(row), row) for row in old]
    return [*kept, *fresh.values()]


def save(path: Path, new: Iterable[Row], missing: dict[str, str] | None = None) -> None:
    """Merges rows, and what is `missing`, into a file, whole or not at all."""
    old = _content(path) if path.exists() else {"rows": []}
    rows = merged(old["rows"], new)
    there = {row[field] for row in rows for field in ("backend", "stage")}
    said = old.get("absent", {}) | (missing or {})
    said = {name: reason for name, reason in said.items() if name not in there}
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    head = f'"schema": {SCHEMA}, "absent": {json.dumps(said)}'
    if fits := [dataclasses.asdict(fit) for fit in model.fits(rows)]:
        head += f', "fits": {json.dumps(fits)}'
    part = path.with_name(path.name + ".part")
    part.write_text(f'{{{head}, "rows": [\n{lines}\n]}}\n')
    os.replace(part, path)


@dataclasses.dataclass(frozen=True)
class Move:
    """A figure that two runs have in common."""

    key: tuple[str, ...]
    before_us: float
    after_us: float
    verdict: str  # "slower" or "faster" beyond both spreads, else "same"

    @property
    def ratio(self) -> float:
        return self.after_us / self.before_us


def compare(before: Iterable[Row], after: Iterable[Row]) -> list[Move]:
    """Every figure that both runs have; it moved when the two spreads do not touch."""
    earlier = {key_of(row): row for row in before}
    return [
        Move(key, earlier[key]["median_us"], row["median_us"], _verdict(earlier[key], row))
        for row in after
        if (key := key_of(row)) in earlier
    ]


def _verdict(before: Row, after: Row) -> str:
    (low, high), (new_low, new_high) = before["spread_us"], after["spread_us"]
    if new_low > high:
        return "slower"
    return "faster" if new_high < low else "same"
