"""Makers of test inputs as raw e4m3fn bytes, hostile where the contract allows it."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import oracle
from oracle import Shard

from msa_icp_jax.ops import arguments

Array = npt.NDArray[Any]

INT_MAX, INT_MIN = 2**31 - 1, -(2**31)

TIME_LIMIT = 900  # seconds: it ends what hangs, and nothing that is slow on a busy machine

# XLA_FLAGS of processes that are about what lies between them: each compiles what this process's
# tests compile as users do.
COMPILE_FAST = "--xla_backend_optimization_level=0"

_COMPILED = "/jax/core/compile/backend_compile_duration"
_REAL = pathlib.Path(__file__).parent / "data/real_activations.npz"
_REAL_BF16 = _REAL.with_name("real_activations_bf16.npz")


class Layout(NamedTuple):
    """How the ranks hold their rows: W, P, and the compound page around them (pitch 0: none)."""

    world_size: int
    page_size: int
    row_offset: int = 0
    pitch: int = 0

    def shard(self, rank: int) -> Shard:
        return Shard(rank, self.world_size, self.page_size, self.row_offset)

    @property
    def page_rows(self) -> int:
        return self.pitch or self.page_size // self.world_size


W2, W4, W2_WIDE, W4_WIDE = Layout(2, 128), Layout(4, 128), Layout(2, 256), Layout(4, 256)
COMPOUND = Layout(4, 128, row_offset=8, pitch=48)
COMPOUND_WIDE = Layout(4, 256, row_offset=0, pitch=352)


def with_keys(shard: Shard, index_k: jax.Array, rank: Any = None) -> arguments.Shard:
    """The shard as the package has it, with its keys and perhaps a traced rank."""
    rank = shard.rank if rank is None else rank
    return arguments.Shard(index_k, rank, shard.world_size, shard.page_size, shard.row_offset)


def index_array(codes: Array) -> jax.Array:
    """A float8_e4m3fn array of these codes, or a bfloat16 one where they are 16 bits wide."""
    return jnp.asarray(codes.view(jnp.float8_e4m3fn if codes.dtype == np.uint8 else jnp.bfloat16))


def rounding_edges(dtype: Any) -> Array:
    """Every value of e4m3fn, what lies half way between two, and the neighbours in `dtype` of all.

    Then the largest of `dtype`, the smallest, the infinities and NaN.
    """
    exact = oracle.E4M3_VALUES[~np.isnan(oracle.E4M3_VALUES)]
    ordered = np.unique(exact)
    ends = np.array([464.0, -464.0, 480.0, -480.0])  # where a format without saturation ends
    edges = np.concatenate([exact, (ordered[1:] + ordered[:-1]) / 2, ends]).astype(dtype)
    largest, smallest = jnp.finfo(dtype).max, jnp.finfo(dtype).smallest_subnormal
    special = np.array([largest, -largest, smallest, -smallest, np.inf, -np.inf, np.nan], dtype)
    around = [np.nextafter(edges, np.array(to, dtype)) for to in (np.inf, -np.inf)]
    return np.concatenate([edges, *around, special, -special[-1:]])


def integer_queries(
    rng: np.random.Generator, tokens: int, index_dtype: str = "float8_e4m3fn"
) -> Array:
    """[tokens, 4, 128] integers of at most 3; one head is all -0.0, so that its scores are zero."""
    queries = oracle.encode(rng.integers(-3, 4, (tokens, 4, 128)), index_dtype)
    queries[:1, 1] = 1 << (8 * queries.itemsize - 1)
    return queries


def integer_keys(
    rng: np.random.Generator, pages: int, rows: int, index_dtype: str = "float8_e4m3fn"
) -> Array:
    """[pages, rows, 128] integers of at most 4, some rows and the whole last page NaN."""
    keys = oracle.encode(rng.integers(-4, 5, (pages, rows, 128)), index_dtype)
    nan = oracle.NAN[keys.dtype]
    keys[rng.random((pages, rows)) < 0.05, 5] = nan | 1 << (8 * keys.itemsize - 1)
    keys[rng.random((pages, rows)) < 0.05, 77] = nan
    keys[-1] = nan
    return keys


def normal_bytes(rng: np.random.Generator, shape: Sequence[int], scale: float = 1.0) -> Array:
    """Normal values, rounded to e4m3fn."""
    values = (rng.normal(size=shape) * scale).astype(np.float32)
    return values.astype(jnp.float8_e4m3fn).view(np.uint8)


def normal_bfloat16(rng: np.random.Generator, shape: Sequence[int]) -> Array:
    """Normal values, rounded to bfloat16: uint16 codes."""
    return rng.normal(size=shape).astype(np.float32).astype(jnp.bfloat16).view(np.uint16)


def two_scale_bytes(rng: np.random.Generator, shape: Sequence[int]) -> Array:
    """Vectors of one large and 127 tiny entries: products that few-bit accumulators lose."""
    values = rng.choice([-1, 1], shape) * rng.choice([0.125, 0.25, 1.0], shape)
    values[..., 17] = rng.choice([-256.0, 256.0], shape[:-1])
    return oracle.e4m3_encode(values)


def block_table(
    rng: np.random.Generator,
    lengths: Sequence[int],
    page_size: int,
    width: int,
    pages: int,
    bad_share: float = 0.0,
) -> Array:
    """A permuted table [B, width] whose entries past each request's pages are garbage.

    `bad_share` of the used entries lie outside the cache. Pages repeat when there are too few.
    """
    requests = len(lengths)
    order = [rng.permutation(pages) for _ in range(-(-requests * width // pages))]
    table = np.concatenate(order)[: requests * width].reshape(requests, width).astype(np.int32)
    bad = rng.random(table.shape) < bad_share
    table[bad] = rng.choice(np.array([-1, -7, pages, pages + 1, INT_MAX, INT_MIN]), bad.sum())
    for row, length in zip(table, lengths, strict=True):
        unused = row[max(-(-length // page_size), 0) :]
        # Ids inside the cache as well: a scorer that reads them finds real keys there.
        unused[:] = rng.choice(np.array([0, 1, -1, pages, INT_MAX, INT_MIN]), unused.shape)
    return table


def any_bits(rng: np.random.Generator, shape: Sequence[int]) -> Array:
    """float32 of random bits, NaN included: what a buffer may hold before a call."""
    return rng.integers(INT_MIN, INT_MAX, shape, endpoint=True).astype(np.int32).view(np.float32)


class Activations(NamedTuple):
    """Attention queries and keys of a trained model, scaled to RMS 4 (see data/README.md)."""

    queries: Array  # uint8 [124, 4, 128]
    keys: Array  # uint8 [80, 128, 128]: one block after the other


def real_activations() -> Activations:
    with np.load(_REAL) as data:
        return Activations(data["index_q"], data["index_k"])


def real_activations_bf16() -> Activations:
    """The first of the same queries and keys as bfloat16, [32, 4, 128] and [37, 128, 128]."""
    with np.load(_REAL_BF16) as data:
        return Activations(*(data[name].view(jnp.bfloat16) for name in ("index_q", "index_k")))


@contextlib.contextmanager
def nothing_compiles() -> Iterator[None]:
    """Fails when something is compiled inside: the executables before it serve these calls too."""
    compiled = []

    def listen(event: str, _: float, **details: Any) -> None:
        if event == _COMPILED:
            compiled.append(details)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled
