"""Result files: rows of figures, merged by what they measure.

A file is `{"schema": 1, "rows": [...]}`. A row's key is (case, stage, backend, precision): a new
run replaces the rows that it measured again and leaves the others. Beside the rows, "absent" says
of a backend or stage without rows why it was not measured, and "fits" how the times of a sweep grow
(model.py).
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from benchmarks import model
from benchmarks.options import Refused

if TYPE_CHECKING:
    from benchmarks.roofline import Ceilings
    from benchmarks.timing import Times

SCHEMA = 1
SWEEP_SUFFIX = "-sweep"  # of the name of a sweep's file
KEY = ("case", "stage", "backend", "precision")
LIKE = ("device", "timing")  # what two rows must have in common besides for their times to compare
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
    "timing",
)
_NEEDED = (*KEY, "median_us", "spread_us")  # of any row, by what reads the file

Row = dict[str, Any]


class Unusable(Refused):
    """A file that is no result file, or that cannot be one."""


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


def row(
    key: Iterable[str], times: Times, floor_us: float | None, setting: Setting, **more: Any
) -> Row:
    """The row of a figure, `FIELDS` and `more`; of what was checked, for the rest has no row."""
    ceilings = setting.ceilings
    return {
        **dict(zip(KEY, key, strict=True)),
        "median_us": round(times.median, 3),
        "floor_us": None if floor_us is None else round(floor_us, 4),
        "spread_us": [round(x, 3) for x in times.spread],
        "checked": True,
        "device": setting.device,
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "jax": jax.__version__,
        "torch": setting.torch,
        "commit": setting.commit
        or _first_line("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "read_tbps": round(ceilings.read_tbps, 4),
        "fp8_tflops": ceilings.fp8_tflops and round(ceilings.fp8_tflops, 1),
        "timing": times.method,
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
    return tuple(row[name] for name in KEY)


def label(key: Iterable[str]) -> str:
    return " ".join(key)


def beside(path: Path, suffix: str) -> Path:
    """`path` with a suffix to its name."""
    return path.with_name(f"{path.stem}{suffix}{path.suffix}")


def load(path: Path) -> list[Row]:
    """The rows of a file.

    Raises:
      Unusable: the file is no result file of this schema.
    """
    return _content(path)["rows"]


def absent(path: Path) -> dict[str, str]:
    """What the file says is absent, and why."""
    return _content(path).get("absent", {})


def _content(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise Unusable(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:  # no text, or no JSON
        raise Unusable(f"{path} is no result file: it is not JSON ({error})") from None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise Unusable(f"{path} is no result file of schema {SCHEMA}")
    rows = found.get("rows")
    if not isinstance(rows, list) or not all(map(_is_row, rows)):
        needed = ", ".join(_NEEDED)
        raise Unusable(f"{path} is no result file: it has no list of rows, each with {needed}")
    return found


def _is_row(row: Any) -> bool:
    return isinstance(row, dict) and all(name in row for name in _NEEDED)


def prepare(path: Path) -> None:
    """Makes the folder of a result file that is to be written, before anything is measured.

    Raises:
      Unusable: it cannot be written, or something else stands there.
    """
    if path.is_dir():
        raise Unusable(f"{path} is a folder, not a result file")
    if path.exists():
        _content(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unusable(f"{path.parent} cannot be made a folder: {error.strerror}") from None
    if not os.access(path.parent, os.W_OK):
        raise Unusable(f"{path.parent} cannot be written to")


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
    """Every comparable figure that both runs have; it moved when the spreads do not touch."""
    return [
        Move(key_of(new), old["median_us"], new["median_us"], _verdict(old, new))
        for old, new in _in_both(before, after)
        if not _unlike(old, new)
    ]


def incomparable(before: Iterable[Row], after: Iterable[Row]) -> Counter[str]:
    """Why figures that both runs have are not comparable, and how many there are of each kind."""
    found = (_unlike(old, new) for old, new in _in_both(before, after))
    return Counter(reason for reason in found if reason)


def only_in(rows: Iterable[Row], others: Iterable[Row]) -> list[tuple[str, ...]]:
    """Keys of the rows that the others have not."""
    there = {key_of(row) for row in others}
    return [key for row in rows if (key := key_of(row)) not in there]


def _in_both(before: Iterable[Row], after: Iterable[Row]) -> list[tuple[Row, Row]]:
    earlier = {key_of(row): row for row in before}
    return [(earlier[key_of(row)], row) for row in after if key_of(row) in earlier]


def _unlike(before: Row, after: Row) -> str:
    """In what two rows differ that should be alike; empty if in nothing."""
    return ", ".join(
        f"{name} {before.get(name)} and {after.get(name)}"
        for name in LIKE
        if before.get(name) != after.get(name)
    )


def _verdict(before: Row, after: Row) -> str:
    (low, high), (new_low, new_high) = before["spread_us"], after["spread_us"]
    if new_low > high:
        return "slower"
    return "faster" if new_high < low else "same"
