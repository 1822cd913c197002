"""Progress on stderr: a bar in a terminal where rich is installed, plain lines otherwise."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterator, Sequence

_SECONDS_BETWEEN_LINES = 5.0


def track[Item](label: str, items: Sequence[Item]) -> Iterator[Item]:
    """Yields the items, showing how many are done."""
    if sys.stderr.isatty() and importlib.util.find_spec("rich"):
        yield from _bar(label, items)
    else:
        yield from _lines(label, items)


def say(message: str) -> None:
    """One line on stderr."""
    print(printable(message, sys.stderr.encoding), file=sys.stderr, flush=True)


def printable(text: str, encoding: str | None) -> str:
    """The text with escapes for what `encoding` lacks, such as undecodable bytes of file names."""
    encoding = encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _bar[Item](label: str, items: Sequence[Item]) -> Iterator[Item]:
    from rich.console import Console
    from rich.progress import track as rich_track

    yield from rich_track(items, label, console=Console(stderr=True))


def _lines[Item](label: str, items: Sequence[Item]) -> Iterator[Item]:
    start = said = time.monotonic()
    for done, item in enumerate(items):
        if time.monotonic() - said > _SECONDS_BETWEEN_LINES:
            say(f"{label}: {done} of {len(items)} done")
            said = time.monotonic()
        yield item
    say(f"{label}: done in {time.monotonic() - start:.1f} s")
