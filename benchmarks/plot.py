"""Plots of a result file: times against floors, ratios with targets, baselines, and a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import model, report
from benchmarks.cases import DECODE, FULL, PREFILL, Decode, Prefill
from benchmarks.results import Row, Unusable, load

_STAGES = ("local", "fused-local")


def plot(path: Path) -> list[Path]:
    """Writes the plots that the file's rows allow, `<name>-<plot>.png` beside it.

    Raises:
      ImportError: matplotlib is not installed.
      Unusable: the file has no row that a plot shows.
    """
    import matplotlib

    matplotlib.use("Agg")
    every = load(path)
    rows = [row for row in every if row["stage"] in _STAGES and row.get("floor_us")]
    swept = [row for row in rows if "bytes" in row]
    points = [row for row in rows if any(row["case"] == c.name for c in (*DECODE, *PREFILL))]
    if not swept and not points:
        there = ", ".join(sorted({row["stage"] for row in every})) or "no row"
        raise Unusable(
            f"{path} has nothing to plot: plots show score and select (stages local, fused-local) "
            f"of the cases d-* and p-*, and of sweeps; it has the stages {there}"
        )
    made = []
    if points:
        made.append(_times(points, path.with_name(f"{path.stem}-time.png")))
        made.append(_ratios(points, path.with_name(f"{path.stem}-ratio.png")))
    if compared := _compared(points):
        made.append(_baselines(compared, path.with_name(f"{path.stem}-baselines.png")))
    if swept:
        made.append(_sweep(swept, path.with_name(f"{path.stem}.png")))
    return made


def _compared(rows: list[Row]) -> dict[str, dict[str, float]]:
    """By baseline and case: its time over that of the kernels, in their usual precision."""
    usual = {case.name: case.precision for case in (*DECODE, *PREFILL)}
    ours: dict[str, float] = {}
    for row in rows:
        made = row["backend"], row["stage"], row["precision"]
        if made == ("mosaic", "local", usual[row["case"]]):
            ours[row["case"]] = row["median_us"]
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if row["backend"] != "mosaic" and row["stage"] == "local" and row["case"] in ours:
            ratio = row["median_us"] / ours[row["case"]]
            found.setdefault(row["backend"], {})[row["case"]] = ratio
    return found


def _baselines(ratios: dict[str, dict[str, float]], path: Path) -> Path:
    import matplotlib.pyplot as plt

    measured = {case for by_case in ratios.values() for case in by_case}
    cases = [c.name for c in (*DECODE, *PREFILL) if c.name in measured]
    height = 0.8 / len(ratios)
    figure, ax = plt.subplots(figsize=(8, 1 + 0.5 * len(cases)), constrained_layout=True)
    for i, (backend, by_case) in enumerate(ratios.items()):
        there = [(at, by_case[name]) for at, name in enumerate(cases) if name in by_case]
        bars = ax.barh(
            [at + i * height for at, _ in there], [r for _, r in there], height, label=backend
        )
        ax.bar_label(bars, [f"{ratio:.1f}" for _, ratio in there], padding=3, fontsize=7)
    ax.axvline(1, color="k", linestyle="--", label="the kernels")
    ax.set_yticks([at + 0.4 - height / 2 for at in range(len(cases))], cases)
    largest = max(ratio for by_case in ratios.values() for ratio in by_case.values())
    ax.set(xscale="log", xlabel="score and select: time over that of the kernels")
    ax.set_xlim(right=2 * largest)  # room for the numbers
    ax.invert_yaxis()
    ax.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _sweep(rows: list[Row], path: Path) -> Path:
    """Time against context and against batch, a column a world size, floor and model drawn in."""
    import matplotlib.pyplot as plt

    sizes = sorted({row["world_size"] for row in rows})
    fitted = {fit.group: fit for fit in model.fits(rows)}
    figure, axes = plt.subplots(
        2, len(sizes), figsize=(6.5 * len(sizes), 9), squeeze=False, constrained_layout=True
    )
    for column, world_size in enumerate(sizes):
        mine = [row for row in rows if row["world_size"] == world_size]
        fit = fitted.get(f"{mine[0]['backend']} W {world_size}")
        for line, (x, by) in enumerate((("context", "batch"), ("batch", "context"))):
            ax = axes[line][column]
            _sweep_panel(ax, mine, x, by, fit)
            ax.set(title=f"W {world_size}", xlabel=x, ylabel="microseconds")
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


def _sweep_panel(ax: Any, rows: list[Row], x: str, by: str, fit: model.Fit | None) -> None:
    for i, value in enumerate(sorted({row[by] for row in rows})):
        line = sorted((r for r in rows if r[by] == value), key=lambda r: r[x])
        at, color = [r[x] for r in line], f"C{i % 10}"
        name = report.short(value) if by == "context" else str(value)
        ax.plot(at, [r["median_us"] for r in line], "o-", color=color, label=name, markersize=3)
        ax.plot(at, [r["floor_us"] for r in line], "--", color=color, linewidth=0.8)
        if fit:
            ax.plot(at, [fit.us(r["bytes"]) for r in line], ":", color=color, linewidth=1.2)
    ax.plot([], [], "k--", linewidth=0.8, label="floor")
    if fit:
        ax.plot([], [], "k:", label=f"{fit.fixed_us:.3g} us + bytes / {fit.rate_tbps:.3g} TB/s")
    ax.set_xscale("log", base=2)
    ticks = sorted({row[x] for row in rows})
    ax.set_xticks(ticks, [report.short(n) if x == "context" else str(n) for n in ticks])
    ax.set_yscale("log")
    ax.grid(visible=True, which="both", alpha=0.25)
    ax.legend(fontsize=7, title=by)


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
        ax.plot(*zip(*points, strict=True), "o", label=name, markersize=4)
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
    ax.barh(range(len(cases)), ratios, color="tab:blue")
    labels = [
        f"{ratio:.2f} ({_series(best[c.name])})" for ratio, c in zip(ratios, cases, strict=True)
    ]
    for at, (ratio, case, label) in enumerate(zip(ratios, cases, labels, strict=True)):
        ax.text(max(ratio, case.target) + 0.05, at, label, va="center", fontsize=7)
    ax.plot(
        [c.target for c in cases], range(len(cases)), "k|", markersize=14, label="target, at most"
    )
    ax.axvline(1, color="k", linestyle="--", label="floor")
    ax.set_yticks(range(len(cases)), [c.name for c in cases])
    ax.set(xlabel="time over floor", xlim=(0, 1.5 * max(ratios)))
    ax.invert_yaxis()
    ax.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
