"""Plots of a result file: times over the floor with the targets, and a sweep."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks import report, results
from benchmarks.cases import FULL, Sharded
from benchmarks.results import Refused, Row

_CASES = {case.name: case for case in FULL if isinstance(case, Sharded)}


def plot(path: Path) -> list[Path]:
    """Writes the plots that the file's rows allow, beside it; `Refused` where it allows none."""
    every = list(results.load(path).values())
    rows = [row for row in every if row["stage"] == "local" and row.get("floor_us")]
    plots = {
        f"{path.stem}-ratio.png": (_ratios, [row for row in rows if row["case"] in _CASES]),
        f"{path.stem}.png": (_sweep, [row for row in rows if "bytes" in row]),
    }
    made = []
    for name, (draw, shown) in plots.items():
        if shown:
            figure = draw(shown)
            figure.suptitle(textwrap.fill(report.origin(shown), 110), fontsize=7)
            try:
                figure.savefig(path.with_name(name), dpi=120)
            except OSError as error:
                raise Refused(f"{error.filename} cannot be written: {error.strerror}") from None
            finally:
                plt.close(figure)
            made.append(path.with_name(name))
    if not made:
        there = ", ".join(sorted({row["stage"] for row in every})) or "no row"
        what = "score and select (stage local) of the cases d-* and p-*, and of sweeps"
        raise Refused(f"{path} has nothing to plot: plots show {what}; it has the stages {there}")
    return made


def _ratios(rows: list[Row]) -> Any:
    """Bars of each backend's time over the floor; the kernels' in their usual precision."""
    usual = {name: case.precision for name, case in _CASES.items()}
    rows = [x for x in rows if x["backend"] != "mosaic" or x["precision"] == usual[x["case"]]]
    names = [name for name in _CASES if any(row["case"] == name for row in rows)]
    backends = [x for x in report.BACKENDS if any(row["backend"] == x for row in rows)]
    height = 0.8 / len(backends)
    figure, ax = plt.subplots(figsize=(9, 1.5 + 0.6 * len(names)), layout="constrained")
    for i, backend in enumerate(backends):
        mine = {r["case"]: r["median_us"] / r["floor_us"] for r in rows if r["backend"] == backend}
        at = [names.index(name) + i * height for name in mine]
        bars = ax.barh(at, list(mine.values()), height, label=report.BACKENDS[backend])
        ax.bar_label(bars, fmt="%.2f", padding=3, fontsize=7)
    targets = {at: _CASES[x].target for at, x in enumerate(names) if _CASES[x].target}
    ax.plot(list(targets.values()), list(targets), "k|", markersize=14, label="target, at most")
    ax.axvline(1, color="k", linestyle="--", label="floor")
    ax.set_yticks([at + 0.4 - height / 2 for at in range(len(names))], names)
    ax.set(xscale="log", xlabel="score and select: time over the floor")
    ax.invert_yaxis()
    ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _sweep(rows: list[Row]) -> Any:
    """Time against bytes, a panel a world size and a line a batch, floor and model drawn in."""
    fits = {fit.group: fit for fit in results.fits(rows)}
    sizes = sorted({row["world_size"] for row in rows})
    figure, _ = plt.subplots(1, len(sizes), figsize=(6.5 * len(sizes), 5), layout="constrained")
    for size, ax in zip(sizes, figure.axes, strict=True):
        mine = sorted((x for x in rows if x["world_size"] == size), key=lambda x: x["bytes"])
        for batch in sorted({row["batch"] for row in mine}):
            line = [row for row in mine if row["batch"] == batch]
            ax.plot(*_columns(line, "median_us"), "o-", label=f"{batch}", markersize=3)
        ax.plot(*_columns(mine, "floor_us"), "k--", linewidth=0.8, label="floor")
        if fit := fits.get(f"{mine[0]['backend']} W {size}"):
            model = f"{fit.fixed_us:.3g} us + bytes / {fit.rate_tbps:.3g} TB/s"
            ax.plot(
                [x["bytes"] for x in mine], [fit.us(x["bytes"]) for x in mine], "k:", label=model
            )
        ax.set(title=f"W {size}", xlabel="bytes of keys", ylabel="microseconds")
        ax.set(xscale="log", yscale="log")
        ax.grid(visible=True, which="both", alpha=0.25)
        ax.legend(fontsize=7, title="batch")
    return figure


def _columns(rows: list[Row], name: str) -> tuple[list[int], list[float]]:
    return [row["bytes"] for row in rows], [row[name] for row in rows]
