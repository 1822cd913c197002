"""Plots of a result file: time of the local stage against its floor, and ratios with the asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.cases import DECODE, FULL, PREFILL, Decode, Prefill
from benchmarks.results import Row, load

_STAGES = ("local", "fused-local")


def plot(path: Path) -> list[Path]:
    """Writes `<name>-time.png` and `<name>-ratio.png` beside the file.

    Raises:
      ImportError: matplotlib is not installed.
      ValueError: the file has no row of a local stage.
    """
    import matplotlib

    matplotlib.use("Agg")
    rows = [row for row in load(path) if row["stage"] in _STAGES and row["floor_us"]]
    rows = [row for row in rows if any(row["case"] == c.name for c in (*DECODE, *PREFILL))]
    if not rows:
        raise ValueError(f"{path} has no row of a local stage")
    return [
        _times(rows, path.with_name(f"{path.stem}-time.png")),
        _ratios(rows, path.with_name(f"{path.stem}-ratio.png")),
    ]


def _series(row: Row) -> str:
    return f"{row['backend']} {row['stage']} ({row['precision']})"


def _work(row: Row) -> float:
    """What the case must move (decode, MB) or compute (prefill, GFLOP)."""
    case = next(c for c in FULL if c.name == row["case"])
    assert isinstance(case, Decode | Prefill)
    return case.key_bytes / 1e6 if isinstance(case, Decode) else case.key_flops / 1e9


def _times(rows: list[Row], path: Path) -> Path:
    import matplotlib.pyplot as plt

    kinds = (("Decode", "keys read, MB", DECODE), ("Prefill", "work, GFLOP", PREFILL))
    figure, axes = plt.subplots(1, 2, figsize=(12, 5), constrained_layout=True)
    for ax, (title, unit, cases) in zip(axes, kinds, strict=True):
        names = {case.name for case in cases}
        _time_panel(ax, [row for row in rows if row["case"] in names])
        ax.set(title=f"{title}: score and select", xlabel=unit, ylabel="microseconds")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _time_panel(ax: Any, rows: list[Row]) -> None:
    if not rows:
        return
    for name in dict.fromkeys(map(_series, rows)):
        points = sorted((_work(r), r["median_us"]) for r in rows if _series(r) == name)
        ax.plot(*zip(*points, strict=True), "o-", label=name, markersize=4)
    floor = sorted((_work(r), r["floor_us"]) for r in rows)
    ax.plot(*zip(*floor, strict=True), "k--", label="floor")
    ax.set(xscale="log", yscale="log")
    ax.grid(visible=True, which="both", alpha=0.25)
    ax.legend(fontsize=8)


def _ratios(rows: list[Row], path: Path) -> Path:
    import matplotlib.pyplot as plt

    rows = [row for row in rows if row["backend"] == "mosaic"] or rows
    best: dict[str, Row] = {}
    for row in rows:
        if row["case"] not in best or row["median_us"] < best[row["case"]]["median_us"]:
            best[row["case"]] = row
    cases = [c for c in (*DECODE, *PREFILL) if c.name in best]
    figure, ax = plt.subplots(figsize=(8, 1 + 0.35 * len(cases)), constrained_layout=True)
    ratios = [best[c.name]["median_us"] / best[c.name]["floor_us"] for c in cases]
    bars = ax.barh(range(len(cases)), ratios, color="tab:blue")
    labels = [
        f"{ratio:.2f} ({_series(best[c.name])})" for ratio, c in zip(ratios, cases, strict=True)
    ]
    ax.bar_label(bars, labels, padding=4, fontsize=7)
    ax.plot([c.ask for c in cases], range(len(cases)), "k|", markersize=14, label="asked at most")
    ax.axvline(1, color="k", linestyle="--", label="floor")
    ax.set_yticks(range(len(cases)), [c.name for c in cases])
    ax.set(xlabel="time over floor", xlim=(0, 1.5 * max(ratios)))
    ax.invert_yaxis()
    ax.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
