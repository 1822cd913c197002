"""How a sweep's times grow: `time = fixed + bytes / rate`, fitted to its rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

LEAST_POINTS = 3  # two lie on any such line


@dataclasses.dataclass(frozen=True)
class Fit:
    """The model of one group of rows.

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

    def us(self, size: float) -> float:
        """The model's time for `size` bytes."""
        return self.fixed_us + size / self.rate_tbps / 1e6

    @property
    def misfit(self) -> str:
        """The largest misfit in words."""
        side = "below" if self.worst < 0 else "above"
        return f"{abs(100 * self.worst):.0f} % {side} what was measured at {self.worst_case}"


def fits(rows: Sequence[dict[str, Any]]) -> list[Fit]:
    """A fit of each backend's rows of a sweep, by world size and of all of them."""
    rows = [row for row in rows if "bytes" in row]
    found = []
    for backend in dict.fromkeys(row["backend"] for row in rows):
        mine = [row for row in rows if row["backend"] == backend]
        sizes = sorted({row["world_size"] for row in mine})
        groups = {f"{backend} W {w}": [r for r in mine if r["world_size"] == w] for w in sizes}
        if len(sizes) > 1:
            groups[backend] = mine
        found += [_fit(name, group) for name, group in groups.items() if _enough(group)]
    return found


def _enough(rows: Sequence[dict[str, Any]]) -> bool:
    return len(rows) >= LEAST_POINTS and len({row["bytes"] for row in rows}) > 1


def _fit(group: str, rows: Sequence[dict[str, Any]]) -> Fit:
    """Least squares of the misfits relative to the measured times: small points count as well."""
    size = np.array([row["bytes"] for row in rows], float)
    time = np.array([row["median_us"] for row in rows])
    unknowns = np.stack([1 / time, size / 1e6 / time], axis=1)
    (fixed, per_megabyte), *_ = np.linalg.lstsq(unknowns, np.ones(len(rows)), rcond=None)
    misfit = unknowns @ [fixed, per_megabyte] - 1
    at = int(np.abs(misfit).argmax())
    return Fit(
        group,
        len(rows),
        round(float(fixed), 3),
        round(float(1 / per_megabyte), 6),
        round(float(misfit[at]), 4),
        rows[at]["case"],
    )
