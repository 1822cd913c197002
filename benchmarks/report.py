"""Results in the terminal: a table with rich where it is installed, plain text elsewhere."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from benchmarks.cases import FULL, Case
from benchmarks.model import LEAST_POINTS, Fit
from benchmarks.results import Move, Row, label

_HEAD = ("case", "stage", "backend", "precision", "us", "spread", "floor us", "x floor", "target")
_TEXT_COLUMNS = 4
_KEYS_SHOWN = 3


class Target(NamedTuple):
    """What a row should take at most: a multiple of its floor, or microseconds."""

    bound: str
    met: bool

    def __str__(self) -> str:
        return f"{self.bound} {'met' if self.met else 'MISSED'}"


def target_of(row: Row) -> Target | None:
    """The row's target; None where it has none."""
    case: Case | None = next((c for c in FULL if c.name == row["case"]), None)
    if case is None or row["backend"] != "mosaic" or row["precision"] != case.precision:
        return None
    if case.target is not None and row["stage"] in ("local", "fused-local") and row["floor_us"]:
        met = row["median_us"] <= case.target * row["floor_us"]
        return Target(f"{case.target:.2f} x", met)
    target_us = getattr(case, "target_us", None)
    if target_us is None:
        return None
    return Target(f"{target_us} us", row["median_us"] <= target_us)


def has_floor(row: Row) -> bool:
    """Whether the row has a floor worth showing: a CPU's read rate bounds nothing."""
    return bool(row.get("floor_us")) and row.get("device") != "cpu"


def cells(row: Row) -> tuple[str, ...]:
    low, high = row["spread_us"]
    floor = row["floor_us"] if has_floor(row) else None
    return (
        row["case"],
        row["stage"],
        row["backend"],
        row["precision"],
        f"{row['median_us']:.2f}",
        f"{low:.2f}-{high:.2f}",
        f"{floor:.2f}" if floor else "",
        f"{row['median_us'] / floor:.2f}" if floor else "",
        str(target_of(row) or ""),
    )


def show_rows(rows: Iterable[Row], title: str) -> None:
    _show(title, *with_values(_HEAD, [cells(row) for row in rows]))


def with_values(
    head: Sequence[str], lines: Sequence[Sequence[str]], nothing: str = ""
) -> tuple[Sequence[str], list[Sequence[str]]]:
    """The table without the columns in which no line has a value."""
    kept = [i for i in range(len(head)) if any(line[i] != nothing for line in lines)]
    return [head[i] for i in kept], [[line[i] for i in kept] for line in lines]


def show_moves(moves: Iterable[Move]) -> None:
    lines = [
        (
            *move.key,
            f"{move.before_us:.2f}",
            f"{move.after_us:.2f}",
            f"{move.ratio:.3f}",
            move.verdict,
        )
        for move in moves
    ]
    if not lines:
        print("nothing moved beyond the spread")
        return
    head = (*_HEAD[:_TEXT_COLUMNS], "before us", "after us", "ratio", "")
    _show("Moved beyond the spread", head, lines)


def show_curves(rows: Sequence[Row], title: str) -> None:
    """A line a batch, a column a context: microseconds and their ratio to the floor."""
    contexts = sorted({row["context"] for row in rows})
    at = {(row["batch"], row["context"]): row for row in rows}
    lines = []
    for batch in sorted({row["batch"] for row in rows}):
        found = [at.get((batch, context)) for context in contexts]
        lines.append((f"batch {batch}", *map(curve_cell, found)))
    _show(title, ("", *map(short, contexts)), lines, text_columns=1)


def curve_cell(row: Row | None) -> str:
    """Microseconds, and how many times the floor they are."""
    if row is None:
        return ""
    ratio = f" ({row['median_us'] / row['floor_us']:.2f})" if has_floor(row) else ""
    return f"{row['median_us']:.1f}{ratio}"


def short(context: int) -> str:
    """4096 as 4K, 1048576 as 1M, 5000 as it is."""
    if context % (1 << 20) == 0:
        return f"{context >> 20}M"
    return f"{context >> 10}K" if context % 1024 == 0 else str(context)


def show_fits(fits: Sequence[Fit]) -> None:
    if not fits:
        print(f"no model fitted: it takes {LEAST_POINTS} points or more, of two sizes at least")
        return
    lines = [
        (
            fit.group,
            f"{fit.points}",
            f"{fit.fixed_us:.2f}",
            f"{fit.rate_tbps:.4g}",
            fit.misfit,
        )
        for fit in fits
    ]
    head = (
        "time = fixed + bytes / rate",
        "points",
        "fixed us",
        "rate TB/s",
        "the model, where it is farthest off",
    )
    _show("Fitted by least squares of the relative misfits", head, lines, text_columns=1)


def show_keys(title: str, keys: Sequence[Sequence[str]]) -> None:
    """How many keys there are, and the first of them."""
    if keys:
        first = "; ".join(map(label, keys[:_KEYS_SHOWN]))
        more = "; ..." if len(keys) > _KEYS_SHOWN else ""
        print(f"{title}: {len(keys)} figures: {first}{more}")


def _show(
    title: str,
    head: Sequence[str],
    lines: Sequence[Sequence[str]],
    text_columns: int = _TEXT_COLUMNS,
) -> None:
    """A table, whose first columns are aligned to the left."""
    if importlib.util.find_spec("rich") is None:
        _show_plain(title, head, lines, text_columns)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for i, name in enumerate(head):
        table.add_column(name, justify="left" if i < text_columns else "right", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    console = Console()
    # Not a terminal: as wide as it takes, rather than cut to 80 columns.
    Console(width=None if console.is_terminal else 160).print(table)


def _show_plain(
    title: str, head: Sequence[str], lines: Sequence[Sequence[str]], text_columns: int
) -> None:
    widths = [max(len(x) for x in column) for column in zip(head, *lines, strict=True)]
    print(title)
    for line in (head, *lines):
        justified = (
            text.ljust(width) if i < text_columns else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join(justified).rstrip())
