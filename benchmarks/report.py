"""Results in the terminal: a table with rich where it is installed, plain text elsewhere."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence

from benchmarks.cases import FULL, Case
from benchmarks.model import Fit
from benchmarks.results import Move, Row, label

_HEAD = ("case", "stage", "backend", "precision", "us", "spread", "floor us", "x floor", "ask")
_TEXT_COLUMNS = 4


def ask_of(row: Row) -> str:
    """What is asked of a row, and whether it keeps it; empty where nothing is."""
    case: Case | None = next((c for c in FULL if c.name == row["case"]), None)
    if case is None or row["backend"] != "mosaic":
        return ""
    if case.ask is not None and row["stage"] in ("local", "fused-local") and row["floor_us"]:
        met = row["median_us"] <= case.ask * row["floor_us"]
        return f"{case.ask:.2f} x {'met' if met else 'MISSED'}"
    ask_us = getattr(case, "ask_us", None)
    if ask_us is not None:
        return f"{ask_us} us {'met' if row['median_us'] <= ask_us else 'MISSED'}"
    return ""


def cells(row: Row) -> tuple[str, ...]:
    low, high = row["spread_us"]
    floor = row["floor_us"]
    return (
        row["case"],
        row["stage"],
        row["backend"],
        row["precision"],
        f"{row['median_us']:.2f}",
        f"{low:.2f}-{high:.2f}",
        "" if floor is None else f"{floor:.2f}",
        "" if not floor else f"{row['median_us'] / floor:.2f}",
        ask_of(row),
    )


def show_rows(rows: Iterable[Row], title: str) -> None:
    _show(title, _HEAD, [cells(row) for row in rows])


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
    head = (*_HEAD[:_TEXT_COLUMNS], "before us", "after us", "ratio", "")
    _show("Moved beyond the spread" if lines else "Nothing moved beyond the spread", head, lines)


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
    return f"{row['median_us']:.1f} ({row['median_us'] / row['floor_us']:.2f})" if row else ""


def short(context: int) -> str:
    """4096 as 4K, 1048576 as 1M."""
    return f"{context >> 20}M" if context % (1 << 20) == 0 else f"{context / 1024:g}K"


def show_fits(fits: Iterable[Fit]) -> None:
    lines = [
        (
            fit.group,
            f"{fit.points}",
            f"{fit.fixed_us:.2f}",
            f"{fit.rate_tbps:.4g}",
            f"{100 * fit.worst:+.1f} % at {fit.worst_case}",
        )
        for fit in fits
    ]
    head = ("time = fixed + bytes / rate", "points", "fixed us", "rate TB/s", "worst misfit")
    _show("Fitted by least squares of the relative misfits", head, lines, text_columns=1)


def show_keys(title: str, keys: Iterable[Sequence[str]]) -> None:
    for key in keys:
        print(f"{title}: {label(key)}")


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
