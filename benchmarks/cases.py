"""The work points: one rank's share of a step, what it must move and compute, and its target.

A *floor* is the larger of bytes over the read ceiling and operations over the fp8 matmul ceiling,
both measured in the same run. A *target*, set before the work began, bounds the time of the local
stage by a multiple of the floor; those of select and merge alone are in microseconds (launches set
their floor).
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import re

import numpy as np

from msa_icp_jax.geometry import (
    BLOCK_SIZE,
    COLUMN_MULTIPLE,
    HEAD_DIM,
    NUM_HEADS,
    TOPK,
    cdiv,
    round_up,
)
from msa_icp_jax.rows import ROW_WORDS

PAGE_SIZE = 128
INIT_BLOCKS, LOCAL_BLOCKS = 0, 1
RANK = 1  # the rank measured; with 128-token pages every rank's work is alike (0 of one rank)
_QUERY_BYTES = NUM_HEADS * HEAD_DIM
_WORD = 4


@dataclasses.dataclass(frozen=True)
class Floor:
    """What a stage cannot do without."""

    bytes: int
    flops: int = 0

    def us(self, read_tbps: float, fp8_tflops: float | None) -> float:
        """Microseconds at the given ceilings; without an fp8 ceiling only bytes count."""
        moving = self.bytes / read_tbps / 1e6
        computing = self.flops / fp8_tflops / 1e6 if fp8_tflops else 0.0
        return max(moving, computing)


@dataclasses.dataclass(frozen=True)
class _Sharded(abc.ABC):
    """What decode and prefill cases have in common.

    Attributes:
      name: the case's name in results.
      lens: keys of each request or segment.
      world_size: ranks that share the keys.
      target: the local stage's time over the floor, at most; None where there is none.
    """

    name: str
    lens: tuple[int, ...]
    world_size: int
    target: float | None = None

    @property
    def rank(self) -> int:
        return min(RANK, self.world_size - 1)

    @property
    def rows_per_page(self) -> int:
        return PAGE_SIZE // self.world_size

    @property
    def heads_per_rank(self) -> int:
        return NUM_HEADS // self.world_size

    @property
    def request_pages(self) -> list[int]:
        return [cdiv(n, PAGE_SIZE) for n in self.lens]

    @property
    def columns(self) -> int:
        return round_up(max(self.request_pages), COLUMN_MULTIPLE)

    @property
    @abc.abstractmethod
    def tokens(self) -> int:
        """Query tokens."""

    @property
    @abc.abstractmethod
    def positions(self) -> list[tuple[int, int]]:
        """(request or segment, position) of every token."""

    @property
    def key_bytes(self) -> int:
        """Bytes of the rank's rows of every page in use."""
        return sum(self.request_pages) * self.rows_per_page * HEAD_DIM

    def visible(self, position: int, keys: int) -> int:
        """Keys of this rank that a token at `position` of a request of `keys` keys sees."""
        whole, rest = divmod(min(position + 1, keys), PAGE_SIZE)
        inside = min(max(rest - self.rank * self.rows_per_page, 0), self.rows_per_page)
        return whole * self.rows_per_page + inside

    @functools.cached_property
    def key_flops(self) -> int:
        """Operations on the keys that the tokens see."""
        seen = sum(self.visible(position, self.lens[b]) for b, position in self.positions)
        return 2 * HEAD_DIM * NUM_HEADS * seen

    def floor(self, stage: str) -> Floor:
        """What a stage cannot do without."""
        scores = self.tokens * NUM_HEADS * self.columns * _WORD
        inputs = self.key_bytes + self.tokens * _QUERY_BYTES
        rows = self.tokens * NUM_HEADS * ROW_WORDS * _WORD
        match stage:
            case "score":
                return Floor(inputs + scores, self.key_flops)
            case "local" | "fused-local" | "chain":  # the plane is an implementation's choice
                return Floor(inputs, self.key_flops)
            case "select":
                return Floor(scores + rows)
            case "merge":
                return Floor(rows + self.tokens * self.heads_per_rank * TOPK * _WORD)
        raise ValueError(f"no stage {stage!r}")


@dataclasses.dataclass(frozen=True)
class Decode(_Sharded):
    """`query_len` new tokens of every request."""

    query_len: int = 1
    precision = "exact"  # the usual one, which the target is for
    stages = ("score", "select", "local", "merge", "chain")

    @property
    def tokens(self) -> int:
        return len(self.lens) * self.query_len

    @property
    def positions(self) -> list[tuple[int, int]]:
        """(request, position) of every token."""
        return [
            (b, n - self.query_len + j)
            for b, n in enumerate(self.lens)
            for j in range(self.query_len)
        ]

    @property
    def stream_bytes(self) -> int:
        """Bytes that one pass over one input set brings through the L2 cache."""
        return self.key_bytes + self.tokens * _QUERY_BYTES


@dataclasses.dataclass(frozen=True)
class Prefill(_Sharded):
    """The last `query_lens[b]` tokens of every segment of `lens[b]` keys."""

    query_lens: tuple[int, ...] = ()
    precision = "fast"
    stages = ("score", "select", "local", "fused-local")

    @property
    def tokens(self) -> int:
        return sum(self.query_lens)

    @functools.cached_property
    def positions(self) -> list[tuple[int, int]]:
        """(segment, position) of every token."""
        return [
            (b, n - queries + i)
            for b, (n, queries) in enumerate(zip(self.lens, self.query_lens, strict=True))
            for i in range(queries)
        ]

    @property
    def stream_bytes(self) -> int:
        scores = self.tokens * NUM_HEADS * self.columns * _WORD
        return self.key_bytes + self.tokens * _QUERY_BYTES + scores


@dataclasses.dataclass(frozen=True)
class Select:
    """Top16 of `columns` scores for 4 rows of each of `tokens` tokens."""

    tokens: int
    columns: int
    target_us: float | None = None
    world_size: int = 4
    precision = "exact"
    stages = ("select",)
    target = None

    @property
    def name(self) -> str:
        return f"select-t{self.tokens}-k{self.columns}"

    @property
    def stream_bytes(self) -> int:
        return self.tokens * NUM_HEADS * self.columns * _WORD

    def floor(self, stage: str) -> Floor:
        return Floor(self.stream_bytes + self.tokens * NUM_HEADS * ROW_WORDS * _WORD)


@dataclasses.dataclass(frozen=True)
class Merge:
    """Global Top16 of `world_size` ranks' rows of the heads that one of them owns."""

    tokens: int
    world_size: int = 4
    target_us: float | None = None
    blocks: int = 1024
    precision = "exact"
    stages = ("merge",)
    target = None

    @property
    def name(self) -> str:
        return f"merge-t{self.tokens}-w{self.world_size}"

    @property
    def heads_per_rank(self) -> int:
        return NUM_HEADS // self.world_size

    @property
    def stream_bytes(self) -> int:
        return self.tokens * NUM_HEADS * ROW_WORDS * _WORD

    def floor(self, stage: str) -> Floor:
        return Floor(self.stream_bytes + self.tokens * self.heads_per_rank * TOPK * _WORD)


Case = Decode | Prefill | Select | Merge


def ragged_decode_lens() -> tuple[int, ...]:
    """64 lengths from about 1 K to 256 K, log-uniform, shuffled."""
    lens = [round(1024 * 256 ** ((i + 0.5) / 64)) for i in range(64)]
    return tuple(lens[i] for i in np.random.default_rng(0).permutation(64))


def at_world_size(case: Decode, world_size: int) -> Decode:
    """The case at this many ranks, with a name that says so."""
    name = re.sub(r"-w\d", f"-w{world_size}", case.name)
    return dataclasses.replace(case, name=name, world_size=world_size)


def _uniform_prefill(name: str, tokens: int, end: int, world_size: int, target: float) -> Prefill:
    return Prefill(name, (end,), world_size, target, query_lens=(tokens,))


DECODE = (
    Decode("d-b1-1m-w4", (1 << 20,), 4, 1.75),
    Decode("d-b8-128k-w4", (1 << 17,) * 8, 4, 1.75),
    Decode("d-b32-32k-w2", (1 << 15,) * 32, 2, 1.40),
    Decode("d-b32-128k-w4", (1 << 17,) * 32, 4, 1.18),
    Decode("d-b64-64k-w2", (1 << 16,) * 64, 2, 1.10),
    Decode("d-b128-16k-w4", (1 << 14,) * 128, 4, 1.35),
    Decode("d-b32-128k-w4-q4", (1 << 17,) * 32, 4, 1.25, query_len=4),
    Decode("d-b64-ragged-w4", ragged_decode_lens(), 4, 1.30),
)
EXCHANGED = next(case for case in DECODE if case.name == "d-b32-32k-w2")  # the texts' example
PREFILL = (
    _uniform_prefill("p-8k-w4", 8192, 1 << 13, 4, 3.0),
    _uniform_prefill("p-8k-w2", 8192, 1 << 13, 2, 2.2),
    _uniform_prefill("p-32k-w4", 8192, 1 << 15, 4, 1.40),
    _uniform_prefill("p-32k-w2", 8192, 1 << 15, 2, 1.28),
    _uniform_prefill("p-128k-w4", 8192, 1 << 17, 4, 1.25),
    _uniform_prefill("p-128k-w2", 8192, 1 << 17, 2, 1.20),
    _uniform_prefill("p-t2048-128k-w4", 2048, 1 << 17, 4, 1.30),
    _uniform_prefill("p-t2048-128k-w2", 2048, 1 << 17, 2, 1.20),
    Prefill(
        "p-ragged-w4",
        tuple(round(16384 * 16 ** (i / 7)) for i in range(8)),
        4,
        1.35,
        query_lens=(1024,) * 8,
    ),
)
SELECT = (
    Select(32, 1024, 3.8),
    Select(32, 8192, 7.5),
    Select(256, 1024, 6.0),
    Select(256, 8192, 20.0),
    Select(8192, 1024, 50.0),
)
MERGE = (Merge(32, target_us=1.8), Merge(256), Merge(8192))

# What a torch decode costs the host (host.py), and on which backend: first the yardstick.
HOST = {
    "torch-op": "torch",
    "decode-direct-eager": "mosaic",
    "decode-direct-eager-fresh": "mosaic",
    "decode-direct-graph": "mosaic",
    "decode-dlpack-eager": "mosaic",
}

FULL: tuple[Case, ...] = (*DECODE, *SELECT, *MERGE, *PREFILL)
QUICK: tuple[Case, ...] = (
    Decode("quick-decode", (1024, 700, 3000), 4, query_len=2),
    Prefill("quick-prefill", (512, 300), 2, query_lens=(40, 24)),
    Select(8, 256),
    Merge(8),
)


def visible_blocks(position: int) -> int:
    """`num_valid_pages` of a token."""
    return max(0, position // BLOCK_SIZE + 1)
