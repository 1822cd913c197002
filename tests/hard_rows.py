"""Score rows and received candidate rows on which a wrong rule of order shows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

NEG_NAN = np.uint32(0xFFC00001).view(np.float32)


def score_rows(columns: int, rng: np.random.Generator) -> dict[str, Array]:
    """Named float32 rows [columns]."""
    normal = rng.normal(size=columns).astype(np.float32)
    at = np.arange(columns)

    def sprinkled(values: list[float], share: float = 0.3) -> Array:
        chosen = rng.choice(np.array(values, np.float32), columns)
        return np.where(rng.random(columns) < share, chosen, normal).astype(np.float32)

    winners = np.zeros(columns, np.float32)
    winners[rng.choice(columns, min(columns, 10), replace=False)] = np.arange(
        1, min(columns, 10) + 1
    )
    few = np.full(columns, -np.inf, np.float32)
    few[rng.choice(columns, min(columns, 5), replace=False)] = 1.0
    zeros = rng.choice(np.array([-0.0, 0.0], np.float32), columns)
    peak = np.float32(1.0) + at.astype(np.float32) * np.float32(2**-23)
    return {
        "normal": normal,
        "ties but ten": winners,
        "all -inf": np.full(columns, -np.inf, np.float32),
        "mostly -inf": few,
        "all NaN": np.full(columns, np.nan, np.float32),
        "NaN of both signs": sprinkled([np.nan, NEG_NAN]),
        "mostly NaN": sprinkled([np.nan, NEG_NAN, -np.inf], share=0.97),
        "both zeros": zeros,
        "zeros among negatives": np.where(normal > 1, zeros, -np.abs(normal)).astype(np.float32),
        "+inf": sprinkled([np.inf, -np.inf], share=0.1),
        "all +inf": np.full(columns, np.inf, np.float32),
        "quantised": np.round(normal * 2).astype(np.float32) / 2,
        "ascending": at.astype(np.float32),
        "descending": -at.astype(np.float32),
        "one narrow range": peak,
        "sawtooth": (at % 128).astype(np.float32),
        "a cluster": np.where((at >= columns // 3) & (at < columns // 3 + 90), 50 + normal, normal),
        "tiny": (normal * np.float32(1e-42)).astype(np.float32),
    }


def score_plane(tokens: int, columns: int, rng: np.random.Generator) -> Array:
    """A plane float32 [tokens, 4, columns] of such rows, each kind as often as the next."""
    rows = list(score_rows(columns, rng).values())
    picked = np.stack([rows[i % len(rows)] for i in range(tokens * 4)])
    return picked.reshape(tokens, 4, columns).astype(np.float32)


def visible_counts(tokens: int, columns: int, scale: int, rng: np.random.Generator) -> Array:
    """Counts int32 [tokens]: none, few, partial, all, more than there are, nonsense."""
    blocks = columns * scale
    special = [blocks, 0, 1, 5, 16, 17, 40, 65, 70, blocks - 1, blocks + 3, 9000, -7, 2**31 - 1]
    counts = rng.integers(0, blocks + 1, tokens)
    some = min(tokens // 2, len(special))
    counts[:some] = (
        special[:some] if tokens >= 2 * len(special) else rng.permutation(special)[:some]
    )
    return counts.astype(np.int32)


def received_rows(sources: int, heads: int, capacity: int, rng: np.random.Generator) -> Array:
    """Rows int32 [W, hpr, C, 33] with every kind of score, repeated and impossible ids."""
    shape = (sources, heads, capacity, 16)
    scores = rng.normal(size=shape).astype(np.float32)
    special = np.array([np.nan, NEG_NAN, np.inf, -np.inf, 0.0, -0.0, 1.0, 1.0], np.float32)
    kind = rng.integers(0, 4, shape[:3])[..., None]
    scores = np.where(kind == 1, rng.choice(special, shape), scores)
    scores = np.where(kind == 2, np.float32(0.5), scores)
    rows = np.ones((*shape[:3], 33), np.int32)
    rows[..., :16] = scores.astype(np.float32).view(np.int32)
    spread = rng.choice(np.array([20, 60, 400, 9000]), shape[:3])[..., None]
    ids = (rng.random(shape) * spread).astype(np.int32)
    odd = rng.random(shape) < 0.1
    rows[..., 16:32] = np.where(odd, rng.choice([-1, -2, 8192, 2**31 - 1, -(2**31)], shape), ids)
    return rows
