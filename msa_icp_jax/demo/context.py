"""What the demonstration searches: the texts shipped with the package, or a user's own arrays."""

from __future__ import annotations

import dataclasses
import importlib.resources
import zipfile
import zlib
from pathlib import Path
from typing import IO

import numpy as np

MAX_TOKENS = 1 << 20
MAX_QUERIES = 4096
PREFILL_TOKENS = 2048


class IndexFileError(Exception):
    """The user's file cannot be used; the message says why."""


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
      IndexFileError: the file cannot be read, or an array is missing or has the wrong dtype, shape
        or size; the headers are checked before anything of the size they state is allocated.
    """
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            _check_header(archive, "q", (MAX_QUERIES, 4, 128))
            _check_header(archive, "k", (MAX_TOKENS, 128))
            file.seek(0)
            with np.load(file, allow_pickle=False) as arrays:
                q, k = arrays["q"], arrays["k"]
    except (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise IndexFileError(f"{path} cannot be read as an .npz file: {error}") from error
    return Context(str(path), q, k, [f"query {i}" for i in range(len(q))], None)


def _check_header(archive: zipfile.ZipFile, name: str, most: tuple[int, ...]) -> None:
    """Raises unless the array is uint8 of shape [1 to most[0], *most[1:]]."""
    if f"{name}.npy" not in archive.namelist():
        have = ", ".join(sorted(archive.namelist())) or "nothing"
        raise IndexFileError(f"the file must hold the arrays q and k, got {have}")
    with archive.open(f"{name}.npy") as member:
        shape, dtype = _read_header(member)
    sizes = ", ".join(["n" if name == "q" else "m", *map(str, most[1:])])
    wanted = f"{name} must be uint8 (bytes of float8_e4m3fn) of shape [{sizes}]"
    if dtype != np.uint8:
        raise IndexFileError(f"{wanted}, got dtype {dtype}")
    if len(shape) != len(most) or shape[1:] != most[1:]:
        raise IndexFileError(f"{wanted}, got shape {list(shape)}")
    if not 1 <= shape[0] <= most[0]:
        raise IndexFileError(f"{wanted} with 1 to {most[0]} rows, got {shape[0]}")


def _read_header(member: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
    """Shape and dtype that an .npy file states."""
    version = np.lib.format.read_magic(member)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(member)
    else:  # raises for what is no version 2.0 header
        shape, _, dtype = np.lib.format.read_array_header_2_0(member)
    return shape, dtype
