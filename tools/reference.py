"""Builds the API reference, a page a module, from the docstrings: `make docs`."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import warnings
from pathlib import Path

import pdoc

ROOT = Path(__file__).resolve().parents[1]
MODULES = ("msa_icp_jax", "msa_icp_jax.typing", "msa_icp_torch")


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "build" / "reference", help="the folder to write into"
    )
    out = parser.parse_args().out
    modules = list(MODULES)
    if importlib.util.find_spec("torch") is None:
        modules.remove("msa_icp_torch")
        print("msa_icp_torch is left out: torch is not installed (extra torch)", file=sys.stderr)
    warnings.simplefilter("error")  # pdoc warns of what it cannot document, and goes on
    pdoc.render.configure(
        docformat="google",
        show_source=False,
        template_directory=ROOT / "docs" / "reference",
    )
    pdoc.pdoc(*modules, output_directory=out)
    print(f"the reference of {', '.join(modules)} is in {out / 'index.html'}")


if __name__ == "__main__":
    main()
