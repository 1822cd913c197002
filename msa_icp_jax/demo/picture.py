"""The picture: every question's block scores over the context, the chosen blocks marked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from msa_icp_jax.demo.progress import printable
from msa_icp_jax.demo.reference import INIT_BLOCKS, LOCAL_BLOCKS

_MOST_PANELS = 16
_GREY, _BLUE, _RED = "#9aa5b1", "#1f5fa8", "#c8321f"


def draw(path: Path, found: dict[str, Any], scores: np.ndarray) -> None:
    """Writes a PNG of the first 16 questions' head 0.

    Args:
      path: where to.
      found: what `report.results` gave.
      scores: float64 [n, 4, blocks], block scores of the reference.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    questions = found["questions"][:_MOST_PANELS]
    columns = min(2, len(questions))
    rows = -(-len(questions) // columns)
    figure = Figure(figsize=(7 * columns, 1.55 * rows + 1.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, sharex=True, squeeze=False).ravel()
    for panel, question, score in zip(panels, questions, scores[:, 0], strict=False):
        _draw_question(panel, question, score)
    for panel in panels[len(questions) :]:
        panel.axis("off")
    for panel in panels[max(0, len(questions) - columns) : len(questions)]:
        panel.set_xlabel("block of 128 tokens")
        panel.tick_params(labelbottom=True)
    figure.supylabel("block score, head 0: largest q.k over the block's keys")
    source = printable(found["source"], "ascii")  # a file's name, which the font may lack signs of
    verdict = "equal to" if found["exact"] else "NOT equal to"
    figure.suptitle(
        f"The 16 blocks chosen from {found['tokens']:,} tokens ({source})\n"
        f"{found['world_size']} ranks, pages of {found['page_size']}, backend {found['backend']}: "
        f"{verdict} one rank that holds every key",
        parse_math=False,
    )
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, format="png")


def _draw_question(panel: Any, question: dict[str, Any], scores: np.ndarray) -> None:
    scores = np.where(np.isfinite(scores), scores, np.nan)  # a block of NaN keys has no height
    chosen, best = np.array(question["chosen"][0]), question["best_block"]
    forced = (chosen < INIT_BLOCKS) | (chosen >= len(scores) - LOCAL_BLOCKS)
    panel.plot(scores, color=_GREY, linewidth=0.9, label="score of every block")
    for blocks, face, label in (
        (chosen[~forced], _BLUE, "chosen by score"),
        (chosen[forced], "white", "always chosen: the last"),
    ):
        panel.scatter(blocks, scores[blocks], s=20, c=face, edgecolors=_BLUE, label=label, zorder=2)
    panel.scatter([best], scores[[best]], s=55, marker="D", color=_RED, label="best", zorder=3)
    panel.annotate(
        f"{best}",
        (best, scores[best]),
        xytext=(0, 6),
        textcoords="offset points",
        color=_RED,
        fontweight="bold",
        ha="center",
        va="bottom",
    )
    panel.set_title(question["question"], fontsize=10, loc="left", parse_math=False)
    panel.margins(x=0.03, y=0.1)
    low, high = panel.get_ylim()
    panel.set_ylim(low, high + 0.2 * (high - low))  # room for the best block's number
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis="y", alpha=0.25)
