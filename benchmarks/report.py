"""Results in the terminal: a table with rich where it is installed, plain text elsewhere."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence

from benchmarks.cases import FULL, Case
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


def show_keys(title: str, keys: Iterable[Sequence[str]]) -> None:
    for key in keys:
        print(f"{title}: {label(key)}")


def _show(title: str, head: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    if importlib.util.find_spec("rich") is None:
        _show_plain(title, head, lines)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for i, name in enumerate(head):
        table.add_column(name, justify="left" if i < _TEXT_COLUMNS else "right", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    console = Console()
    # Not a terminal: as wide as it takes, rather than cut to 80 columns.
    Console(width=None if console.is_terminal else 160).print(table)


def _show_plain(title: str, head: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    widths = [max(len(x) for x in column) for column in zip(head, *lines, strict=True)]
    print(title)
    for line in (head, *lines):
        justified = (
            text.ljust(width) if i < _TEXT_COLUMNS else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join(justified).rstrip())
