"""What the demonstration says: one dictionary of results, and that as text."""

from __future__ import annotations

import platform
import shutil
import textwrap
from typing import Any

import jax
import jaxlib
import numpy as np

import msa_icp_jax
from msa_icp_jax.demo.context import Context
from msa_icp_jax.demo.reference import BLOCK, Difference
from msa_icp_jax.demo.serve import DECODE_BATCH, WINDOW_TOKENS, Indexer

_EXCERPT_WORDS = 40


def results(
    context: Context,
    indexer: Indexer,
    chosen: np.ndarray,
    scores: np.ndarray,
) -> dict[str, Any]:
    """What the demonstration found and how, fit for JSON; the comparison is added to it.

    Args:
      context: what was searched.
      indexer: what searched it.
      chosen: int [n, 4, 16], blocks chosen by decode.
      scores: float64 [n, 4, blocks], block scores of the reference.
    """
    return {
        "source": context.source,
        "tokens": len(context.k),
        "questions": [
            _question(context, index, chosen[index], scores[index])
            for index in range(len(context.q))
        ],
        "world_size": indexer.plan.geometry.world_size,
        "page_size": indexer.plan.geometry.page_size,
        "backend": indexer.plan.backend,
        "precision": indexer.plan.precision,
        "device": indexer.device_kind,
        "num_devices": indexer.num_devices,
        "compile_ms": round(indexer.timings.compile_ms, 3),
        "stage_ms": {name: round(ms, 3) for name, ms in indexer.timings.stage_ms.items()},
        "versions": {
            "msa_icp_jax": msa_icp_jax.__version__,
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }


def describe(found: dict[str, Any], prefilled: int) -> str:
    """The results as text for people."""
    devices = f"{found['num_devices']} x {found['device']}"
    lines = [
        f"{found['tokens']:,} tokens of context: {found['source']}",
        f"{found['world_size']} ranks on {devices}, pages of {found['page_size']} tokens, backend "
        f"{found['backend']}, jax {found['versions']['jax']}",
        "",
    ]
    for number, question in enumerate(found["questions"], 1):
        lines += [f"{number:2}. {question['question']}", *_indented(_answer(question)), ""]
    windows = -(-prefilled // WINDOW_TOKENS)
    stages = {
        "compile": (found["compile_ms"], "all programs, once"),
        "write": (found["stage_ms"]["write"], f"{found['tokens']:,} keys into sharded pages"),
        "prefill": (
            found["stage_ms"]["prefill"],
            f"{prefilled:,} tokens in windows of up to {WINDOW_TOKENS} ({windows} in all)",
        ),
        "decode": (
            found["stage_ms"]["decode"],
            f"one step of up to {DECODE_BATCH} requests (median of the steps)",
        ),
    }
    lines += [f"{name:8}{ms:10,.1f} ms  {what}" for name, (ms, what) in stages.items()]
    lines += ["", *_verdict(found)]
    return "\n".join(lines)


def _question(
    context: Context, index: int, chosen: np.ndarray, scores: np.ndarray
) -> dict[str, Any]:
    best = int(scores[0].argmax())
    answer: dict[str, Any] = {
        "question": context.questions[index],
        "best_block": best,
        "best_tokens": [best * BLOCK, min((best + 1) * BLOCK, len(context.k))],
        "chosen": [[int(block) for block in head if block >= 0] for head in chosen],
    }
    if context.block_text is not None:
        answer["best_text"] = context.block_text[best]
    return answer


def _answer(question: dict[str, Any]) -> list[str]:
    first, end = question["best_tokens"]
    where = f"best block {question['best_block']}, tokens {first} to {end - 1}"
    if "best_text" in question:
        where += f": {_excerpt(question['best_text'], question['question'])}"
    return [f"chosen blocks: {' '.join(map(str, question['chosen'][0]))}", where]


def _excerpt(text: str, question: str) -> str:
    """The part of the text that shares most with the question, long words counting more."""
    words, wanted = text.split(), set(question.split())

    def shared(start: int) -> int:
        return sum(map(len, wanted.intersection(words[start : start + _EXCERPT_WORDS])))

    start = max(range(max(1, len(words) - _EXCERPT_WORDS + 1)), key=shared)
    end = start + _EXCERPT_WORDS
    before, after = "... " * (start > 0), " ..." * (end < len(words))
    return f"{before}{' '.join(words[start:end])}{after}"


def _indented(paragraphs: list[str]) -> list[str]:
    width = min(100, shutil.get_terminal_size().columns)
    wrap = textwrap.TextWrapper(width, initial_indent="    ", subsequent_indent="      ")
    return [line for paragraph in paragraphs for line in wrap.wrap(paragraph)]


def _verdict(found: dict[str, Any]) -> list[str]:
    count, total = found["num_differences"], found["selections"]
    if not count:
        return [f"exact: all {total:,} selections equal those of one rank that holds every key"]
    lines = [f"NOT EXACT: {count:,} of {total:,} selections differ from those of one rank:"]
    for difference in found["differences"]:
        lines.append(f"  {Difference(**difference)}")
    if count > len(found["differences"]):
        lines.append(f"  and {count - len(found['differences']):,} more")
    return lines
