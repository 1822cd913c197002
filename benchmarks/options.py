"""Options that several command lines have, what their values may be, and how they are refused."""

from __future__ import annotations

import argparse
from pathlib import Path

BACKENDS = ("mosaic", "xla", "torch", "torch_compile", "flashinfer", "vllm")
MOST_KEYS = 1 << 20  # of a request: candidates are among the first 8,192 blocks


class Refused(ValueError):
    """What was asked for cannot be done; the message is a line for the user."""


def add_budget(parser: argparse.ArgumentParser, default: float | None = None) -> None:
    parser.add_argument(
        "--budget-seconds",
        type=seconds,
        default=default,
        metavar="N",
        help="stop before it and keep what there is; "
        + (f"{default:.0f} by default" if default else "without end by default"),
    )


def add_commit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--commit", metavar="ID", help="what is measured, where there is no git to ask"
    )


def add_out(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help=f"result file, made or merged into; by default benchmarks/results/local/{name}, which "
        "git ignores: the committed results change only where they are named",
    )


def seconds(text: str) -> float:
    """More than none."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not more than 0 seconds")
    return value


def size(text: str) -> int:
    """4096, 4K or 1M keys of a request."""
    unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:].upper(), 1)
    digits = text if unit == 1 else text[:-1]
    if not digits.isdecimal() or not 0 < int(digits) * unit <= MOST_KEYS:
        raise argparse.ArgumentTypeError(f"{text!r} is no size from 1 to 1M, like 5000, 4K or 1M")
    return int(digits) * unit


def count(text: str) -> int:
    """One or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not 1 or more")
    return int(text)
