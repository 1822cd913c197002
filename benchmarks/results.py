"""Result files: rows of figures, merged by what they measure.

A file is `{"schema": 1, "rows": [...]}`. A row's key is case, stage, backend, precision and, where
it has one, transport: a new run replaces the rows that it measured again and leaves the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.cases import Ceilings
from benchmarks.timing import Times

SCHEMA = 1
KEY = ("case", "stage", "backend", "precision")
_TEXTS = ("device", "driver", "jax", "torch", "commit", "date", "timing", "transport")
_UNITS = ("_us", "_tbps", "_tflops", "_bytes")  # how the names of figures end
_SIZES = ("bytes", "context", "batch", "world_size")  # a sweep's rows have all four
_LARGEST = 1e15  # no figure is larger

Row = dict[str, Any]
Rows = dict[tuple[str, ...], Row]


class Refused(ValueError):
    """What was asked for cannot be done; the message is a line for the user."""


# ---- rows ----


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all rows of a run have in common; without a commit git is asked."""

    device: str
    torch: str | None
    ceilings: Ceilings
    commit: str | None = None

    def row(self, key: Iterable[str], times: Times, floor_us: float | None, **more: Any) -> Row:
        """The row of a figure; of what was checked, the rest has no row."""
        query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        head = ("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD")
        rates = dataclasses.asdict(self.ceilings)
        bf16 = rates.pop("bf16_tflops")
        return {
            **dict(zip(KEY, key, strict=True)),
            "median_us": round(times.median, 3),
            "floor_us": None if floor_us is None else round(floor_us, 4),
            "spread_us": [round(x, 3) for x in times.spread],
            "checked": True,
            "device": self.device,
            "driver": _first_line(*query),
            "jax": jax.__version__,
            "torch": self.torch,
            "commit": self.commit or _first_line(*head),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            **{name: rate and round(rate, 4) for name, rate in rates.items()},
            "timing": times.method,
            **({"bf16_tflops": round(bf16, 4)} if bf16 else {}),
            **more,
            **times.more,
        }


@functools.cache
def _first_line(*command: str) -> str | None:
    """The first line that a command prints, or None where it cannot; run once."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=20)
        return said.strip().partition("\n")[0] or None
    return None


def key_of(row: Row) -> tuple[str, ...]:
    """The row's key: four names, or five."""
    names = (*KEY, "transport") if row.get("transport") else KEY
    return tuple(row[name] for name in names)


def label(row: Row) -> str:
    return " ".join(key_of(row))


def _fault(row: Any) -> str | None:
    """What is wrong with a row, or None."""
    if not isinstance(row, dict):
        return f"it is {type(row).__name__}, not an object"
    needed = (*KEY, "median_us", "spread_us", *(_SIZES if "bytes" in row else ()))
    for name, x in (dict.fromkeys(needed) | row).items():
        if (x is not None or name in needed) and not _fits_its_name(name, x):
            return f"{name} is {type(x).__name__ if isinstance(x, list | dict) else repr(x)}"
    median, (low, high) = row["median_us"], row["spread_us"]
    inside = median > 0 and low <= median <= high
    return None if inside else f"median_us {median} is 0 or outside spread_us {low, high}"


def _fits_its_name(name: str, x: Any) -> bool:
    if name in (*KEY, *_TEXTS):
        return isinstance(x, str) and (x != "" or name not in KEY)
    if name == "spread_us":
        return isinstance(x, list) and len(x) == 2 and all(_fits_its_name("_us", y) for y in x)
    if name in _SIZES:
        return type(x) is int and 0 <= x < _LARGEST
    if name.endswith(_UNITS):  # what is added may be less than the noise
        return type(x) in (int, float) and (name == "added_us" or x >= 0) and abs(x) < _LARGEST
    return not isinstance(x, list | dict)


# ---- files ----


def beside(path: Path, suffix: str) -> Path:
    """`path` with a suffix to its name."""
    return path.with_name(f"{path.stem}{suffix}{path.suffix}")


def load(path: Path) -> Rows:
    """A file's rows; `Refused` if it is no result file of this schema."""
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # no text, no JSON, or nested without end
        raise Refused(f"{path} is no result file: {error}"[:300]) from None
    found = found if isinstance(found, dict) else {}
    if found.get("schema") != SCHEMA or not isinstance(found.get("rows"), list):
        raise Refused(f"{path} is no result file of schema {SCHEMA} with a list of rows")
    return _by_key(found["rows"], path)


def load_or_empty(path: Path) -> Rows:
    return load(path) if path.exists() else {}


def _by_key(rows: Iterable[Any], where: object) -> Rows:
    found: Rows = {}
    for number, row in enumerate(rows):
        fault = _fault(row)
        if fault is None and key_of(row) in found:
            fault = f"{label(row)} comes twice"
        if fault:
            raise Refused(f"{where}: row {number} is ill-formed: {fault}"[:300])
        found[key_of(row)] = row
    return found


def prepare(path: Path) -> None:
    """Sees to it that a result file can be written; `Refused` if not, before anything is done."""
    try:
        if path.exists() and not path.is_file():
            raise Refused(f"{path} is a folder or a device, not a result file")
        load_or_empty(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        _part(path).touch()
        _part(path).unlink()
    except OSError as error:
        raise Refused(f"{path} cannot be written: {error.strerror}") from None


def save(path: Path, new: Iterable[Row]) -> None:
    """Merges rows into a file, whole or not at all.

    Raises:
      Refused: the file or a row is ill-formed; nothing is written.
    """
    rows = (load_or_empty(path) | _by_key(new, "new rows")).values()
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    _part(path).write_text(f'{{"schema": {SCHEMA}, "rows": [\n{lines}\n]}}\n')
    os.replace(_part(path), path)


def _part(path: Path) -> Path:
    return path.with_name(path.name + ".part")


# ---- how a sweep's times grow ----


class Fit(NamedTuple):
    """`time = fixed + bytes / rate` of a group of rows, and its largest relative misfit."""

    group: str
    points: int
    fixed_us: float
    rate_tbps: float
    misfit: str

    def us(self, size: float) -> float:
        """The model's time for `size` bytes."""
        return self.fixed_us + size / self.rate_tbps / 1e6


def fits(rows: Iterable[Row]) -> list[Fit]:
    """A fit of each backend's rows of a sweep by world size: three points or more."""
    groups: dict[str, list[Row]] = {}
    for row in sorted((row for row in rows if "bytes" in row), key=lambda row: row["world_size"]):
        groups.setdefault(f"{row['backend']} W {row['world_size']}", []).append(row)
    enough = (x for x in groups.items() if len(x[1]) > 2 and len({r["bytes"] for r in x[1]}) > 1)
    return [_fit(*group) for group in enough]


def _fit(group: str, rows: list[Row]) -> Fit:
    """Least squares of the misfits relative to the measured times: small points count as well."""
    size, time = (np.array([row[name] for row in rows], float) for name in ("bytes", "median_us"))
    per_byte, fixed = np.polyfit(size, time, 1, w=1 / time)
    off = (fixed + per_byte * size) / time - 1  # the model less what was measured, of that
    at = int(np.abs(off).argmax())
    side = "below" if off[at] < 0 else "above"
    misfit = f"{abs(100 * off[at]):.0f} % {side} what was measured at {rows[at]['case']}"
    return Fit(group, len(rows), float(fixed), float(np.divide(1e-6, per_byte)), misfit)
