"""The demonstration: `python -m msa_icp_jax demo`.

Real text as index keys, sharded over ranks; 2,048 tokens of prefill and 16 questions as a decode
batch; every selection compared with one rank that holds all keys. Reading order: `context` (the
data), `npz` (files of a user's own), `serve` (the indexer at work), `reference` (the answer to
compare with), `report`, `picture`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path

import numpy as np

from msa_icp_jax import geometry
from msa_icp_jax.demo import context, npz, picture, progress, reference, report, serve

MOST_DIFFERENCES = 20  # that are named; all are counted
DEFAULT_PICTURE = Path("msa-icp-demo.png")
SAME, DIFFERENT, UNUSABLE = 0, 1, 2  # exit statuses

DESCRIPTION = """\
Chooses, for 16 questions, the 16 blocks (of 128 tokens) to attend to in 32,768 tokens of real text,
with the index keys split over 2 or 4 ranks. First the keys are written into paged caches, then the
last 2,048 tokens are prefilled in windows, then the questions are decoded as one batch. Every
selection is compared with a plain numpy reference that holds all keys.

It runs on whatever JAX finds: without an accelerator every rank gets a virtual CPU device; with
fewer accelerators than ranks, one of them runs all ranks.
"""

EPILOG = """\
exit status: 0 every selection equals the reference's; 1 one differs (it is named, with the reason);
2 an argument or a file cannot be used.

index file: an .npz with uint8 arrays, bytes of float8_e4m3fn: q [n, 4, 128], queries of four heads,
n up to 4,096, and k [m, 128], one key per token, m up to 1,048,576. The queries stand on the last
token; the tokens before it are prefilled with their own keys as queries.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the demonstration's command line."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument(
        "--world-size", type=int, choices=geometry.WORLD_SIZES, default=4, help="ranks (default 4)"
    )
    parser.add_argument(
        "--page-size",
        type=int,
        choices=geometry.PAGE_SIZES,
        default=128,
        help="tokens of a cache page (default 128)",
    )
    parser.add_argument(
        "--index-file", type=Path, metavar="X.npz", help="queries and keys of your own, see below"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="PATH",
        help=f"where to write the picture, a PNG (default {DEFAULT_PICTURE})",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object on stdout, and everything else on stderr",
    )


def main(arguments: argparse.Namespace) -> int:
    """Runs the demonstration; returns the exit status."""
    serve.request_cpu_devices(arguments.world_size)
    try:
        picture_path = _picture_path(arguments.out)
        searched = (
            context.shipped_context()
            if arguments.index_file is None
            else context.read_context(arguments.index_file)
        )
    except (npz.NpzError, OSError) as error:
        progress.say(f"msa_icp_jax demo: {error}")
        return UNUSABLE

    indexer = serve.Indexer(len(searched.k), arguments.world_size, arguments.page_size)
    indexer.compile()
    indexer.write(searched.k)
    prefilled = indexer.prefill(searched.prefill_q, searched.prefill_positions)
    chosen = indexer.decode(searched.q)

    differences, num_differences = compare(searched, chosen, prefilled)
    asked = np.full(len(searched.q), len(searched.k) - 1)
    scores = reference.score_blocks(searched.q, searched.k, asked)
    selections = (len(chosen) + len(prefilled)) * geometry.NUM_HEADS
    found = {
        "exact": num_differences == 0,
        "selections": selections,
        "num_differences": num_differences,
        "differences": [vars(difference) for difference in differences],
        **report.results(searched, indexer, chosen, scores),
    }

    text = report.describe(found, len(prefilled))
    status = SAME if found["exact"] else DIFFERENT
    if picture_path is not None:
        try:
            picture.draw(picture_path, found, scores)
        except OSError as error:  # a full disk must not take the answers with it
            progress.say(f"msa_icp_jax demo: no picture: {error}")
            picture_path, status = None, UNUSABLE if status == SAME else status
        else:
            text += f"\npicture: {picture_path}"
    if arguments.json:
        found["picture"] = None if picture_path is None else str(picture_path)
        progress.say(text)
        print(json.dumps(found, allow_nan=False))
    else:
        print(progress.printable(text, sys.stdout.encoding))
    return status


def compare(
    searched: context.Context, chosen: np.ndarray, prefilled: np.ndarray
) -> tuple[list[reference.Difference], int]:
    """The first selections that are not the one-rank reference's, and how many are not."""
    asked = np.full(len(searched.q), len(searched.k) - 1)
    work = [
        (phase, start, queries[start:end], positions[start:end], ids[start:end])
        for phase, queries, positions, ids in (
            ("decode", searched.q, asked, chosen),
            ("prefill", searched.prefill_q, searched.prefill_positions, prefilled),
        )
        for start, end in _windows(len(queries))
    ]
    found: list[reference.Difference] = []
    count = 0
    for phase, start, queries, positions, ids in progress.track("compare", work):
        expected = reference.choose_blocks(queries, searched.k, positions)
        some, differing = reference.find_differences(
            phase,
            queries,
            searched.k,
            positions,
            ids,
            expected,
            first_row=start,
            most=MOST_DIFFERENCES - len(found),
        )
        found += some
        count += differing
    return found, count


def _windows(count: int, size: int = 256) -> list[tuple[int, int]]:
    return [(start, min(start + size, count)) for start in range(0, count, size)]


def _picture_path(asked: Path | None) -> Path | None:
    """Where the picture goes; None where it was not asked for and cannot be drawn.

    Raises:
      OSError: it was asked for and cannot be drawn or written.
    """
    path = asked or DEFAULT_PICTURE
    if importlib.util.find_spec("matplotlib") is None:
        if asked is not None:
            raise OSError("--out needs matplotlib: pip install 'msa-icp-jax[demo]'")
        progress.say("no picture: matplotlib is not installed (pip install 'msa-icp-jax[demo]')")
        return None
    # Said now, not after the work.
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise OSError(f"--out {path} cannot be written")
    return path
