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
    swept = [row for row in rows if "bytes" in row]
    points = [row for row in rows if row["case"] in _CASES]
    if not swept and not points:
        there = ", ".join(sorted({row["stage"] for row in every})) or "no row"
        raise Refused(
            f"{path} has nothing to plot: plots show score and select (stage local) of the cases "
            f"d-* and p-*, and of sweeps; it has the stages {there}"
        )
    figures = {path.with_name(f"{path.stem}-ratio.png"): _ratios(points)} if points else {}
    figures |= {path.with_name(f"{path.stem}.png"): _sweep(swept)} if swept else {}
    try:
        for made, figure in figures.items():
            of = points if "-ratio" in made.stem else swept
            figure.suptitle(textwrap.fill(report.origin(of), 110), fontsize=7)
            figure.savefig(made, dpi=120)
    except OSError as error:
        raise Refused(f"{error.filename} cannot be written: {error.strerror}") from None
    finally:
        plt.close("all")
    return list(figures)


def _ratios(rows: list[Row]) -> Any:
    """Bars of each backend's time over the floor; the kernels' in their usual precision."""
    usual = {name: case.precision for name, case in _CASES.items()}
    rows = [x for x in rows if x["backend"] != "mosaic" or x["precision"] == usual[x["case"]]]
    names = [name for name in _CASES if any(row["case"] == name for row in rows)]
    backends = [x for x in report.BACKENDS if any(row["backend"] == x for row in rows)]
    height = 0.8 / len(backends)
    figure, ax = plt.subplots(figsize=(9, 1.5 + 0.6 * len(names)), constrained_layout=True)
    for i, backend in enumerate(backends):
        mine = {r["case"]: r["median_us"] / r["floor_us"] for r in rows if r["backend"] == backend}
        at = [names.index(name) + i * height for name in mine]
        bars = ax.barh(at, list(mine.values()), height, label=report.BACKENDS[backend])
        ax.bar_label(bars, [f"{x:.2f}" for x in mine.values()], padding=3, fontsize=7)
    targets = {at: _CASES[x].target for at, x in enumerate(names) if _CASES[x].target}
    ax.plot(list(targets.values()), list(targets), "k|", markersize=14, label="target, at most")
    ax.axvline(1, color="k", linestyle="--", label="floor")
    ax.set_yticks([at + 0.4 - height / 2 for at in range(len(names))], names)
    ax.set(xscale="log", xlabel="score and select: time over the floor")
    ax.invert_yaxis()
    ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _sweep(rows: list[Row]) -> Any:
    """Time against context and against batch, a column a world size, floor and model drawn in."""
    fits = results.fits(rows)
    sizes = sorted({row["world_size"] for row in rows})
    shape = {"figsize": (6.5 * len(sizes), 9), "squeeze": False, "constrained_layout": True}
    figure, axes = plt.subplots(2, len(sizes), **shape)
    for (upper, lower), size in zip(axes.T, sizes, strict=True):
        mine = [row for row in rows if row["world_size"] == size]
        fit = next((x for x in fits if x.group == f"{mine[0]['backend']} W {size}"), None)
        for ax, x, by in ((upper, "context", "batch"), (lower, "batch", "context")):
            _panel(ax, mine, x, by, fit)
            ax.set(title=f"W {size}", xlabel=x, ylabel="microseconds", yscale="log")
            ax.grid(visible=True, which="both", alpha=0.25)
            ax.legend(fontsize=7, title=by)
    return figure


def _panel(ax: Any, rows: list[Row], x: str, by: str, fit: results.Fit | None) -> None:
    words = {"context": report.short, "batch": str}
    for i, value in enumerate(sorted({row[by] for row in rows})):
        line = sorted((r for r in rows if r[by] == value), key=lambda r: r[x])
        at, color = [r[x] for r in line], f"C{i % 10}"
        measured, floor = ([r[name] for r in line] for name in ("median_us", "floor_us"))
        ax.plot(at, measured, "o-", color=color, label=words[by](value), markersize=3)
        ax.plot(at, floor, "--", color=color, linewidth=0.8)
        if fit:
            ax.plot(at, [fit.us(r["bytes"]) for r in line], ":", color=color, linewidth=1.2)
    ax.plot([], [], "k--", linewidth=0.8, label="floor")
    if fit:
        ax.plot([], [], "k:", label=f"{fit.fixed_us:.3g} us + bytes / {fit.rate_tbps:.3g} TB/s")
    ticks = sorted({row[x] for row in rows})
    ax.set_xscale("log", base=2)
    ax.set_xticks(ticks, [words[x](n) for n in ticks])
