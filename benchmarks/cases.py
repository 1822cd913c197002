"""The work points: one rank's share of a step, what it must move and compute, and its target.

A *floor* is the larger of bytes over the read ceiling and operations over the matmul ceiling, both
measured in the same run. A *target* bounds the local stage's time by a multiple of the floor;
those of select and merge alone are in microseconds (launches set their floor).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any, ClassVar

import numpy as np

from msa_icp_jax.geometry import COLUMN_MULTIPLE, HEAD_DIM, NUM_HEADS, TOPK, cdiv, round_up
from msa_icp_jax.rows import ROW_WORDS

PAGE_SIZE = 128
INIT_BLOCKS, LOCAL_BLOCKS = 0, 1
RANK = 1  # the rank measured; with 128-token pages every rank's work is alike
WORD = 4
FLOAT8, BFLOAT16 = "float8_e4m3fn", "bfloat16"  # of keys and queries


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """The rates that bound a kernel, TB/s and TFLOP/s; None where no unit multiplies so."""

    read_tbps: float
    fp8_tflops: float | None
    bf16_tflops: float | None = None


@dataclasses.dataclass(frozen=True)
class Floor:
    """What a stage cannot do without: bytes, and operations on numbers of a dtype."""

    bytes: int
    flops: int = 0
    dtype: str = FLOAT8

    def us(self, ceilings: Ceilings) -> float:
        """Microseconds at the ceilings; without one for products only bytes count."""
        rate = ceilings.fp8_tflops if self.dtype == FLOAT8 else ceilings.bf16_tflops
        return max(self.bytes / ceilings.read_tbps, self.flops / rate if rate else 0.0) / 1e6


@dataclasses.dataclass(frozen=True)
class Sharded:
    """A step over requests (decode) or segments (prefill): keys of each, and tokens, the last ones.

    The target is for the usual precision. Data are "normal", or of columns that are selected badly:
    "ascending" (each beats all before it) or "ties" (all alike).
    """

    name: str
    lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    world_size: int
    target: float | None = None
    data: str = "normal"
    heads: int = NUM_HEADS
    dtype: str = FLOAT8
    precision: ClassVar[str]
    normal_stages: ClassVar[tuple[str, ...]]

    @property
    def normal(self) -> bool:
        return self.data == "normal" and self.dtype == FLOAT8

    @property
    def stages(self) -> tuple[str, ...]:
        """Those measured: of special data or dtype the whole local work alone."""
        return self.normal_stages if self.normal else ("local",)

    @property
    def rank(self) -> int:
        return min(RANK, self.world_size - 1)

    @property
    def rows_per_page(self) -> int:
        return PAGE_SIZE // self.world_size

    @property
    def request_pages(self) -> list[int]:
        return [cdiv(n, PAGE_SIZE) for n in self.lens]

    @property
    def columns(self) -> int:
        return round_up(max(self.request_pages), COLUMN_MULTIPLE)

    @property
    def tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def key_rows(self) -> int:
        """The rank's rows of every page in use."""
        return sum(self.request_pages) * self.rows_per_page

    @functools.cached_property
    def positions(self) -> list[tuple[int, int]]:
        """(request, position) of every token."""
        requests = enumerate(zip(self.lens, self.query_lens, strict=True))
        return [(b, n - queries + i) for b, (n, queries) in requests for i in range(queries)]

    def visible(self, position: int, keys: int) -> int:
        """The rank's keys that a token sees at a position of a request of so many keys."""
        whole, rest = divmod(min(position + 1, keys), PAGE_SIZE)
        inside = min(max(rest - self.rank * self.rows_per_page, 0), self.rows_per_page)
        return whole * self.rows_per_page + inside

    @functools.cached_property
    def _flops(self) -> int:
        seen = sum(self.visible(position, self.lens[b]) for b, position in self.positions)
        return 2 * HEAD_DIM * self.heads * seen

    def floor(self, stage: str) -> Floor:
        """What a stage cannot do without; the plane between two parts is a choice."""
        queries = self.tokens * self.heads
        read = (self.key_rows + queries) * HEAD_DIM * (1 if self.dtype == FLOAT8 else 2)
        plane, rows = queries * self.columns * WORD, queries * ROW_WORDS * WORD
        match stage:
            case "score":
                return Floor(read + plane, self._flops, self.dtype)
            case "select":
                return Floor(plane + rows)
            case "merge":
                return Floor(rows + queries // self.world_size * TOPK * WORD)
        return Floor(read, self._flops, self.dtype)


class Decode(Sharded):
    """As many new tokens of every request."""

    precision = "exact"
    normal_stages = ("score", "select", "local", "merge", "chain")

    @property
    def query_len(self) -> int:
        return self.query_lens[0]


class Prefill(Sharded):
    """The last tokens of every segment."""

    precision = "fast"
    normal_stages = ("score", "select", "local", "fused-local")


@dataclasses.dataclass(frozen=True)
class Alone:
    """Select or merge on rows of its own: four of each token, of `columns` scores or blocks."""

    stage: str
    tokens: int
    columns: int = 1024
    target_us: float | None = None
    world_size: int = 4
    precision = "exact"

    @property
    def name(self) -> str:
        size = f"k{self.columns}" if self.stage == "select" else f"w{self.world_size}"
        return f"{self.stage}-t{self.tokens}-{size}"

    @property
    def stages(self) -> tuple[str, ...]:
        return (self.stage,)

    def floor(self, stage: str) -> Floor:
        row, scores = NUM_HEADS * ROW_WORDS, NUM_HEADS * self.columns
        ids = NUM_HEADS // self.world_size * TOPK
        return Floor(self.tokens * (row + (scores if stage == "select" else ids)) * WORD)


@dataclasses.dataclass(frozen=True)
class Host:
    """What a torch decode costs the host (host.py); at most `target` times the first one."""

    name: str
    backend: str = "mosaic"
    target: float | None = None
    precision = "exact"
    stages = ("host",)


Case = Decode | Prefill | Alone | Host


def decode(name: str, batch: int, context: int, *more: Any, each: int = 1) -> Decode:
    """Requests alike, `each` tokens of every one; `more` is the world size and the target."""
    return Decode(name, (context,) * batch, (each,) * batch, *more)


def _prefill(name: str, tokens: int, end: int, *more: Any) -> Prefill:
    return Prefill(name, (end,), (tokens,), *more)


# 64 lengths from about 1 K to 256 K, log-uniform, shuffled.
_SHUFFLED = np.random.default_rng(0).permutation(64)
_RAGGED_LENS = tuple(round(1024 * 256 ** ((int(i) + 0.5) / 64)) for i in _SHUFFLED)
DECODE = (
    decode("d-b1-1m-w4", 1, 1 << 20, 4, 1.72),
    decode("d-b8-128k-w4", 8, 1 << 17, 4, 1.66),
    decode("d-b32-32k-w2", 32, 1 << 15, 2, 1.35),
    decode("d-b32-128k-w4", 32, 1 << 17, 4, 1.16),
    decode("d-b64-64k-w2", 64, 1 << 16, 2, 1.10),
    decode("d-b128-16k-w4", 128, 1 << 14, 4, 1.30),
    decode("d-b32-128k-w4-q4", 32, 1 << 17, 4, 1.24, each=4),
    Decode("d-b64-ragged-w4", _RAGGED_LENS, (1,) * 64, 4, 1.29),
)
_RAGGED_ENDS = tuple(round(16384 * 16 ** (i / 7)) for i in range(8))
PREFILL = (
    _prefill("p-8k-w4", 8192, 1 << 13, 4, 3.0),
    _prefill("p-8k-w2", 8192, 1 << 13, 2, 2.2),
    _prefill("p-32k-w4", 8192, 1 << 15, 4, 1.40),
    _prefill("p-32k-w2", 8192, 1 << 15, 2, 1.28),
    _prefill("p-128k-w4", 8192, 1 << 17, 4, 1.25),
    _prefill("p-128k-w2", 8192, 1 << 17, 2, 1.15),
    _prefill("p-t2048-128k-w4", 2048, 1 << 17, 4, 1.30),
    _prefill("p-t2048-128k-w2", 2048, 1 << 17, 2, 1.20),
    Prefill("p-ragged-w4", _RAGGED_ENDS, (1024,) * 8, 4, 1.35),
)


def _like(name: str, suffix: str, **changes: Any) -> Decode | Prefill:
    """The case of that name with changes, under a name that says so."""
    case = next(case for case in (*DECODE, *PREFILL) if case.name == name)
    return dataclasses.replace(case, name=f"{name}-{suffix}", **changes)


BF16 = (
    _like("d-b8-128k-w4", "bf16", dtype=BFLOAT16, target=1.35),
    _like("d-b32-32k-w2", "bf16", dtype=BFLOAT16, target=1.22),
    _like("d-b32-128k-w4", "bf16", dtype=BFLOAT16, target=1.12),
    _like("d-b64-64k-w2", "bf16", dtype=BFLOAT16, target=1.08),
    _like("p-32k-w4", "bf16", dtype=BFLOAT16, target=1.35),
    _like("p-128k-w4", "bf16", dtype=BFLOAT16, target=1.25),
    _like("p-ragged-w4", "bf16", dtype=BFLOAT16, target=1.35),
)
ADVERSARIAL = tuple(_like("p-32k-w4", x, target=None, data=x) for x in ("ascending", "ties"))
ADVERSARIAL_OVER_NORMAL = 2.5  # their time over that of the case of normal data, at most
ALONE = (
    Alone("select", 32, 1024, 3.8),
    Alone("select", 32, 8192, 7.5),
    Alone("select", 256, 1024, 6.0),
    Alone("select", 256, 8192, 20.0),
    Alone("select", 8192, 1024, 50.0),
    Alone("merge", 32, target_us=1.8),
    Alone("merge", 256),
    Alone("merge", 8192),
)
HOST = (
    Host("torch-op", "torch"),
    Host("decode-direct-eager", target=2.5),
    Host("decode-direct-eager-fresh", target=4.0),
    Host("decode-direct-graph"),
    Host("decode-dlpack-eager", target=35.0),
)

FULL: tuple[Case, ...] = (*DECODE, *ALONE, *PREFILL, *BF16, *ADVERSARIAL, *HOST)
QUICK: tuple[Case, ...] = (  # without a GPU
    Decode("quick-decode", (1024, 700, 3000), (2, 2, 2), 4),
    Prefill("quick-prefill", (512, 300), (40, 24), 2),
    Prefill("quick-ascending", (3000,), (64,), 2, data="ascending"),
    Decode("quick-bf16", (700, 300), (1, 1), 4, dtype=BFLOAT16),
    Alone("select", 8, 256),
    Alone("merge", 8),
)


def of_ranks(world_size: int) -> list[Decode]:
    """Every decode case at this many ranks, those that are so by themselves first."""
    own_first = sorted(DECODE, key=lambda case: case.world_size != world_size)
    named = ((re.sub(r"-w\d", f"-w{world_size}", case.name), case) for case in own_first)
    return [dataclasses.replace(case, name=x, world_size=world_size) for x, case in named]
