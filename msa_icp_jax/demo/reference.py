"""The answer of one rank that holds every key, in plain numpy and float64.

It shares no code with the indexer, so that agreement means something. A sum of 128 float8_e4m3fn
products is exact in float64. The indexer adds in float32, so two blocks whose scores differ by
less than that sum's rounding may change places; `explain` tells such a difference from a wrong one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

BLOCK = 128
TOPK = 16
INIT_BLOCKS = 0
LOCAL_BLOCKS = 1
ROUNDING = 2.0**-17  # of float32 accumulation, relative to the sum of |q_d k_d|
_KEYS_AT_ONCE = 64 * BLOCK


@dataclasses.dataclass(frozen=True)
class Difference:
    """A selection that is not the reference's."""

    phase: str
    row: int
    head: int
    chosen: list[int]
    expected: list[int]
    why: str

    def __str__(self) -> str:
        return (
            f"{self.phase} row {self.row} head {self.head}: chosen {self.chosen}, "
            f"expected {self.expected} ({self.why})"
        )


def choose_blocks(q: np.ndarray, k: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Chosen blocks int [n, 4, 16], ascending with a -1 tail.

    Args:
      q: uint8 [n, 4, 128], bytes of float8_e4m3fn.
      k: uint8 [m, 128], likewise.
      positions: int [n], the position of each query; it sees the keys up to there.
    """
    scores = score_blocks(q, k, positions)
    block = np.arange(scores.shape[2])
    visible = (positions // BLOCK + 1)[:, None]
    forced = (block < INIT_BLOCKS) | (block >= visible - LOCAL_BLOCKS)
    rank = np.where(forced[:, None], np.inf, scores)
    rank = np.where((block < visible)[:, None], rank, -np.inf)
    # Stable: equal scores keep the lower id in front, and a visible block that scores -inf stays
    # in front of the blocks that lie past the query.
    best = np.argsort(-rank, axis=2, kind="stable")[:, :, :TOPK]
    best = np.pad(best, ((0, 0), (0, 0), (0, TOPK - best.shape[2])), constant_values=len(k))
    past = best >= visible[:, :, None]
    ids = np.sort(np.where(past, len(k), best), axis=2)
    return np.where(ids == len(k), -1, ids)


def score_blocks(q: np.ndarray, k: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Block scores float64 [n, 4, blocks]; -inf where no product is visible and a number."""
    rows = decode_e4m3(q).reshape(-1, q.shape[2])
    limits = np.repeat(positions, q.shape[1])[:, None]
    parts = []
    for start, keys in _key_chunks(k):
        scores = rows @ decode_e4m3(keys).T
        hidden = np.arange(start, start + len(keys)) > limits
        scores[hidden | np.isnan(scores)] = -np.inf
        parts.append(_block_max(scores))
    return np.concatenate(parts, axis=1).reshape(*q.shape[:2], -1)


def find_differences(
    phase: str,
    q: np.ndarray,
    k: np.ndarray,
    positions: np.ndarray,
    chosen: np.ndarray,
    expected: np.ndarray,
    *,
    first_row: int,
    most: int,
) -> tuple[list[Difference], int]:
    """The first (row, head)s whose chosen blocks are not the expected ones, and how many are not.

    At most `most` are returned: explaining one takes a pass over all keys.
    """
    differing = np.argwhere((chosen != expected).any(axis=2))
    found = []
    for row, head in differing[:most]:
        ours, theirs = chosen[row, head].tolist(), expected[row, head].tolist()
        why = explain(q[row : row + 1, head : head + 1], k, positions[row], ours, theirs)
        found.append(Difference(phase, first_row + int(row), int(head), ours, theirs, why))
    return found, len(differing)


def explain(
    q: np.ndarray, k: np.ndarray, position: int, chosen: list[int], expected: list[int]
) -> str:
    """Says whether rounding of float32 sums accounts for one differing selection."""
    extra, missing = sorted({*chosen} - {*expected}), sorted({*expected} - {*chosen})
    visible = position // BLOCK + 1
    if sorted(chosen) == sorted(expected):
        return "wrong: the right ids in the wrong order"
    if any(block < 0 or block >= visible for block in extra) or len(extra) != len(missing):
        return "wrong: not as many different, visible blocks as there must be"
    if any(block < INIT_BLOCKS or block >= visible - LOCAL_BLOCKS for block in missing):
        return "wrong: a first or last block, which every query gets, is missing"
    scores = score_blocks(q, k, np.array([position]))[0, 0]
    sizes = _block_magnitudes(q, k)
    gap = scores[missing].max() - scores[extra].min()
    rounding = ROUNDING * (sizes[missing].max() + sizes[extra].max())
    if gap <= rounding:
        return (
            f"a near tie: the scores differ by {gap:.3g}, and float32 sums of this size may be "
            f"{rounding:.3g} off"
        )
    return f"wrong: the scores differ by {gap:.3g}, rounding accounts for {rounding:.3g} at most"


def decode_e4m3(data: np.ndarray) -> np.ndarray:
    """The values of float8_e4m3fn bytes, float64."""
    return _E4M3_VALUES[data]


def _e4m3_values() -> np.ndarray:
    """The 256 values by their byte: sign, 4 exponent bits, 3 mantissa bits; no infinity."""
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    return np.where(byte & 127 == 127, np.nan, np.where(byte & 128, -size, size))


_E4M3_VALUES = _e4m3_values()


def _block_magnitudes(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Largest sum of |q_d k_d| over the keys of each block, float64 [blocks], of one query."""
    row = np.abs(decode_e4m3(q).reshape(-1))
    sizes = [np.abs(decode_e4m3(keys)) @ row for _, keys in _key_chunks(k)]
    return _block_max(np.nan_to_num(np.concatenate(sizes))[None])[0]


def _block_max(values: np.ndarray) -> np.ndarray:
    """[rows, keys] to [rows, blocks]; the last block may be short."""
    return np.maximum.reduceat(values, np.arange(0, values.shape[1], BLOCK), axis=1)


def _key_chunks(k: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    for start in range(0, len(k), _KEYS_AT_ONCE):
        yield start, k[start : start + _KEYS_AT_ONCE]
