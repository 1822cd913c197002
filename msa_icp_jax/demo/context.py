"""What the demonstration searches: the texts shipped with the package, or a user's own arrays."""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
from pathlib import Path

import numpy as np

from msa_icp_jax.demo.npz import NpzError, read_npz

MAX_TOKENS = 1 << 20
MAX_QUERIES = 4096
PREFILL_TOKENS = 2048


@dataclasses.dataclass(frozen=True)
class Context:
    """One context's index keys, and the queries to ask of it.

    Attributes:
      source: what it is, in words.
      q: uint8 [n, 4, 128], bytes of float8_e4m3fn.
      k: uint8 [m, 128], likewise, one key per token.
      questions: n labels of the queries.
      block_text: the text of each block of 128 tokens, or None.
    """

    source: str
    q: np.ndarray
    k: np.ndarray
    questions: list[str]
    block_text: list[str] | None

    @property
    def prefill_positions(self) -> np.ndarray:
        """Positions of the last tokens, those that the demonstration prefills."""
        return np.arange(max(0, len(self.k) - PREFILL_TOKENS), len(self.k), dtype=np.int32)

    @property
    def prefill_q(self) -> np.ndarray:
        """Their queries, uint8 [t, 4, 128]: for head h the token's key, quarters rotated by h."""
        quarters = self.k[self.prefill_positions].reshape(-1, 4, 32)
        heads = [np.roll(quarters, head, axis=1) for head in range(4)]
        return np.stack(heads, axis=1).reshape(-1, 4, 128)


def shipped_context() -> Context:
    """The licence texts that come with the package; `data/NOTICE.md` says how they were made."""
    path = importlib.resources.files("msa_icp_jax") / "data" / "licence_texts.npz"
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        return Context(
            source="licence texts shipped with the package",
            q=arrays["retrieval_q_e4m3"],
            k=arrays["retrieval_k_e4m3"],
            questions=arrays["questions"].tolist(),
            block_text=arrays["block_text"].tolist(),
        )


def read_context(path: Path) -> Context:
    """A user's `q` [n, 4, 128] and `k` [m, 128] from an .npz file.

    Raises:
      NpzError: the file cannot be read, or an array is missing or has the wrong dtype, shape or
        size; the headers are checked before anything of the size they state is allocated.
    """
    arrays = read_npz(
        path,
        {
            "q": functools.partial(_check_header, "q", (MAX_QUERIES, 4, 128)),
            "k": functools.partial(_check_header, "k", (MAX_TOKENS, 128)),
        },
    )
    q, k = arrays["q"], arrays["k"]
    return Context(str(path), q, k, [f"query {i}" for i in range(len(q))], None)


def _check_header(
    name: str, most: tuple[int, ...], shape: tuple[int, ...], dtype: np.dtype
) -> None:
    """Raises unless the array is uint8 of shape [1 to most[0], *most[1:]]."""
    sizes = ", ".join(["n" if name == "q" else "m", *map(str, most[1:])])
    wanted = f"{name} must be uint8 (bytes of float8_e4m3fn) of shape [{sizes}]"
    if dtype != np.uint8:
        raise NpzError(f"{wanted}, got dtype {dtype}")
    if len(shape) != len(most) or shape[1:] != most[1:]:
        raise NpzError(f"{wanted}, got shape {list(shape)}")
    if not 1 <= shape[0] <= most[0]:
        raise NpzError(f"{wanted} with 1 to {most[0]} rows, got {shape[0]}")
