"""Result files: rows of figures, merged by what they measure.

A file is `{"schema": 1, "rows": [...]}`. A row's key is case, stage, backend, precision and, where
it has one, transport: a new run replaces the rows that it measured again and leaves the others.
Beside the rows, "absent" says of a backend or stage without rows why it was not measured, and
"fits" how the times of a sweep grow.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import math
import os
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.cases import Ceilings
from benchmarks.timing import Times

SCHEMA = 1
SWEEP_SUFFIX = "-sweep"  # of the name of a sweep's file
KEY = ("case", "stage", "backend", "precision")
FIELDS = (
    *KEY,
    *("median_us", "floor_us", "spread_us", "checked", "device", "driver", "jax", "torch"),
    *("commit", "date", "read_tbps", "fp8_tflops", "timing"),
)
LIKE = ("device", "timing")  # what two rows must have in common besides for their times to compare
NOISE = 0.03  # by which cards and runs differ beyond the spread of one
LEAST_POINTS = 3  # of a fit: two lie on any such line
_TEXTS = ("device", "driver", "jax", "torch", "commit", "date", "timing", "transport")
_UNITS = ("_us", "_tbps", "_tflops", "_bytes")  # how the names of figures end
_SIZES = ("bytes", "context", "batch", "world_size")  # a sweep's rows have all four
_LARGEST = 1e15  # no figure is larger

Row = dict[str, Any]


class Refused(ValueError):
    """What was asked for cannot be done; the message is a line for the user."""


# ---- rows ----


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all rows of a run have in common.

    Attributes:
      device: what it runs on.
      torch: torch's version, None where it is not installed.
      ceilings: the device's, measured in the same run.
      commit: what is measured, or None to ask git.
    """

    device: str
    torch: str | None
    ceilings: Ceilings
    commit: str | None = None

    def row(self, key: Iterable[str], times: Times, floor_us: float | None, **more: Any) -> Row:
        """The row of a figure, `FIELDS` and `more`; of what was checked, the rest has no row."""
        query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        head = ("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD")
        fp8, bf16 = self.ceilings.fp8_tflops, self.ceilings.bf16_tflops
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
            "read_tbps": round(self.ceilings.read_tbps, 4),
            "fp8_tflops": fp8 and round(fp8, 1),
            "timing": times.method,
            **({"bf16_tflops": round(bf16, 1)} if bf16 else {}),
            **more,
        }


@functools.cache
def _first_line(*command: str) -> str | None:
    """The first line that a command prints, or None where it cannot; run once."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().partition("\n")[0] or None


def key_of(row: Row) -> tuple[str, ...]:
    """The row's key: four names, or five."""
    transport = row.get("transport")
    return (*(row[name] for name in KEY), *([transport] if transport else []))


def label(row: Row) -> str:
    return " ".join(key_of(row))


def _fault(row: Any) -> str | None:
    """What is wrong with a row, or None."""
    if not isinstance(row, dict):
        return f"it is {type(row).__name__}, not an object"
    nested = [name for name, x in row.items() if isinstance(x, dict | list) and name != "spread_us"]
    if nested:
        return f"{nested[0]} is nested"
    for name in KEY:
        if not isinstance(row.get(name), str) or not row[name]:
            return f"{name} is {row.get(name)!r}, not a name"
    spread = row.get("spread_us")
    if not isinstance(spread, list) or len(spread) != 2:
        return f"spread_us is {spread!r}, not [smallest, largest]"
    figures = {name: x for name, x in row.items() if name.endswith(_UNITS) and x is not None}
    figures |= {"median_us": row.get("median_us"), "spread_us": spread[0], "its end": spread[1]}
    figures |= {name: row.get(name) for name in _SIZES if "bytes" in row}
    for name, x in figures.items():
        least = -_LARGEST if name == "added_us" else 0  # it may be less than the noise
        if not isinstance(x, int | float) or isinstance(x, bool) or not least <= x < _LARGEST:
            return f"{name} is {x!r}, no figure"
        if name in _SIZES and not isinstance(x, int):
            return f"{name} is {x!r}, no whole number"
    if not row["median_us"] > 0 or not spread[0] <= row["median_us"] <= spread[1]:
        return f"median_us {row['median_us']} is 0 or outside spread_us {spread}"
    for name in _TEXTS:
        if not isinstance(row.get(name), str | None):
            return f"{name} is {row[name]!r}, not a text"
    return None


# ---- files ----


@dataclasses.dataclass
class File:
    """What a result file holds: rows by key, and why backends or stages have none."""

    rows: dict[tuple[str, ...], Row] = dataclasses.field(default_factory=dict)
    absent: dict[str, str] = dataclasses.field(default_factory=dict)


def beside(path: Path, suffix: str) -> Path:
    """`path` with a suffix to its name."""
    return path.with_name(f"{path.stem}{suffix}{path.suffix}")


def load(path: Path) -> File:
    """A file's content.

    Raises:
      Refused: the file is no result file of this schema.
    """
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # no text, no JSON, or nested without end
        raise Refused(f"{path} is no result file: {error}"[:300]) from None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise Refused(f"{path} is no result file of schema {SCHEMA}")
    rows, absent = found.get("rows"), found.get("absent", {})
    if not isinstance(rows, list) or not isinstance(absent, dict):
        raise Refused(f"{path} is no result file: it has no list of rows")
    if not all(isinstance(reason, str) for reason in absent.values()):
        raise Refused(f"{path} is no result file: absent has a reason that is no text")
    return File(_by_key(rows, path), absent)


def _by_key(rows: Iterable[Any], where: object) -> dict[tuple[str, ...], Row]:
    found: dict[tuple[str, ...], Row] = {}
    for number, row in enumerate(rows):
        fault = _fault(row)
        if fault is None and key_of(row) in found:
            fault = f"{label(row)} comes twice"
        if fault:
            raise Refused(f"{where}: row {number} is ill-formed: {fault}"[:300])
        found[key_of(row)] = row
    return found


def prepare(path: Path) -> None:
    """Sees to it that a result file can be written, before anything is measured.

    Raises:
      Refused: it cannot, or something else stands there.
    """
    try:
        if path.exists() and not path.is_file():
            raise Refused(f"{path} is a folder or a device, not a result file")
        if path.exists():
            load(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        _part(path).touch()
        _part(path).unlink()
    except OSError as error:
        raise Refused(f"{path} cannot be written: {error.strerror}") from None


def save(path: Path, new: Iterable[Row], absent: dict[str, str] | None = None) -> None:
    """Merges rows, and what is `absent`, into a file, whole or not at all.

    Raises:
      Refused: the file or a row is ill-formed; nothing is written.
    """
    there = load(path) if path.exists() else File()
    rows = list((there.rows | _by_key(new, "new rows")).values())
    measured = {row[field] for row in rows for field in ("backend", "stage")}
    said = {k: v for k, v in (there.absent | (absent or {})).items() if k not in measured}
    head = f'"schema": {SCHEMA}, "absent": {json.dumps(said)}'
    if found := [dataclasses.asdict(fit) for fit in fits(rows)]:
        head += f', "fits": {json.dumps(found)}'
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    _part(path).write_text(f'{{{head}, "rows": [\n{lines}\n]}}\n')
    os.replace(_part(path), path)


def _part(path: Path) -> Path:
    return path.with_name(path.name + ".part")


# ---- two files ----


def compare(before: File, after: File) -> dict[str, list[tuple[Row, Row]]]:
    """Figures that both files have, by what became of them.

    "slower" and "faster" are those whose spreads do not touch and whose medians differ by more
    than `NOISE`; "same" are the others. What is not timed alike stands under the difference.
    """
    found: dict[str, list[tuple[Row, Row]]] = {"slower": [], "faster": [], "same": []}
    for key in (key for key in before.rows if key in after.rows):
        old, new = before.rows[key], after.rows[key]
        unlike = [f"{x} {old.get(x)} and {new.get(x)}" for x in LIKE if old.get(x) != new.get(x)]
        found.setdefault(", ".join(unlike) or _moved(old, new), []).append((old, new))
    return found


def _moved(old: Row, new: Row) -> str:
    (low, high), (new_low, new_high) = old["spread_us"], new["spread_us"]
    ratio = new["median_us"] / old["median_us"]
    if new_low > high and ratio > 1 + NOISE:
        return "slower"
    return "faster" if new_high < low and ratio < 1 - NOISE else "same"


# ---- how a sweep's times grow ----


@dataclasses.dataclass(frozen=True)
class Fit:
    """The model `time = fixed + bytes / rate` of one group of rows.

    Attributes:
      group: which rows: "mosaic W 4", "mosaic" for both world sizes.
      points: how many there are.
      fixed_us: what a step costs however little it reads, in microseconds.
      rate_tbps: at which it reads, in TB/s.
      worst: the largest relative misfit, of either sign: (model - measured) / measured.
      worst_case: the row that has it.
    """

    group: str
    points: int
    fixed_us: float
    rate_tbps: float
    worst: float
    worst_case: str

    def __str__(self) -> str:
        model = f"{self.fixed_us:.2f} us + bytes / {self.rate_tbps:.4g} TB/s"
        return f"{self.group}, {self.points} points: {model}; farthest off, it is {self.misfit}"

    def us(self, size: float) -> float:
        """The model's time for `size` bytes."""
        return self.fixed_us + size / self.rate_tbps / 1e6

    @property
    def misfit(self) -> str:
        """The largest misfit in words."""
        side = "below" if self.worst < 0 else "above"
        return f"{abs(100 * self.worst):.0f} % {side} what was measured at {self.worst_case}"


def fits(rows: Iterable[Row]) -> list[Fit]:
    """A fit of each backend's rows of a sweep, by world size and of all of them."""
    swept = [row for row in rows if "bytes" in row]
    found = []
    for backend in dict.fromkeys(row["backend"] for row in swept):
        mine = [row for row in swept if row["backend"] == backend]
        sizes = sorted({row["world_size"] for row in mine})
        groups = {f"{backend} W {w}": [r for r in mine if r["world_size"] == w] for w in sizes}
        if len(sizes) > 1:
            groups[backend] = mine
        found += [_fit(name, group) for name, group in groups.items() if _enough(group)]
    return found


def _enough(rows: Sequence[Row]) -> bool:
    return len(rows) >= LEAST_POINTS and len({row["bytes"] for row in rows}) > 1


def _fit(group: str, rows: Sequence[Row]) -> Fit:
    """Least squares of the misfits relative to the measured times: small points count as well."""
    size = np.array([row["bytes"] for row in rows], float)
    time = np.array([row["median_us"] for row in rows])
    per_byte, fixed = np.polyfit(size, time, 1, w=1 / time)
    misfit = (fixed + per_byte * size) / time - 1
    at = int(np.abs(misfit).argmax())
    rate = 1e-6 / per_byte if per_byte else math.inf
    numbers = (round(float(fixed), 3), round(float(rate), 6), round(float(misfit[at]), 4))
    return Fit(group, len(rows), *numbers, rows[at]["case"])
