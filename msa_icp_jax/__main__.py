"""The command line: `python -m msa_icp_jax`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import jax

import msa_icp_jax
from msa_icp_jax import demo


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line (sys.argv's by default); returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m msa_icp_jax",
        description="MiniMax-M3 ICP indexer for JAX: chooses the key blocks to attend to.",
    )
    version = f"msa-icp-jax {msa_icp_jax.__version__} (jax {jax.__version__})"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(title="commands", dest="command")
    demo.add_arguments(commands.add_parser("demo", help="show the indexer at work on real text"))
    parsed = parser.parse_args(arguments)
    if parsed.command is None:
        parser.print_help()
        return 0
    return demo.main(parsed)


if __name__ == "__main__":
    sys.exit(main())
