"""Inputs of the work points: device-made random normal e4m3 data behind shuffled pages.

All cases share one pool of key rows. Each of a case's *sets* has queries and a block table of its
own; the tables are disjoint parts of one permutation of the pool's pages, so a pass over all sets
reads every row once. There are at least two sets, and as many as it takes to stream through the L2
cache several times over: nothing is served from it twice.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.cases import Case, Decode, Merge, Prefill, Select, visible_blocks
from msa_icp_jax import msa_icp_index_score_sharded_plan
from msa_icp_jax.geometry import HEAD_DIM, NUM_HEADS, TOPK, cdiv, round_up
from msa_icp_jax.rows import READY, ROW_WORDS

GPU_STREAM_BYTES = 256 << 20  # between two uses of a set; an H200 has 60 MB of L2
MAX_SETS = 512
_CHUNK_ROWS = 1 << 13  # rows drawn at a time
_MERGE_SETS = 8  # received rows are small and fresh: they come from the L2 cache in use, too

Arrays = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What the stages of a case read.

    Attributes:
      fixed: arrays that every set shares.
      sets: the arrays of each set.
    """

    fixed: Arrays
    sets: list[Arrays]


class Pool:
    """Key and query rows large enough for each of `cases`."""

    def __init__(self, cases: Sequence[Case], stream_bytes: int) -> None:
        self.stream_bytes = stream_bytes
        sharded = [c for c in cases if isinstance(c, Decode | Prefill)]
        keys = max((c.key_bytes // HEAD_DIM * self.sets_of(c) for c in sharded), default=1)
        queries = max((c.tokens * NUM_HEADS * self.sets_of(c) for c in sharded), default=1)
        self._keys = _normal_rows(0, keys)
        self.key_rows = len(self._keys)
        self._queries = _normal_rows(1, queries)
        self._paged: dict[int, jax.Array] = {}

    def sets_of(self, case: Case) -> int:
        return min(MAX_SETS, max(2, cdiv(self.stream_bytes, case.stream_bytes)))

    def inputs(self, case: Case, backend: str) -> Inputs:
        match case:
            case Decode() | Prefill():
                found = self._sharded(case, backend)
            case Select():
                found = _select(case, self.sets_of(case))
            case Merge():
                counts = np.full(case.tokens, case.blocks, np.int32)
                received = [_received(case, counts, i) for i in range(_MERGE_SETS)]
                sets = [{"received": jnp.asarray(x)} for x in received]
                found = Inputs({"counts": jnp.asarray(counts)}, sets)
        jax.block_until_ready((found.fixed, found.sets))
        return found

    def _sharded(self, case: Decode | Prefill, backend: str) -> Inputs:
        counts = np.array([visible_blocks(position) for _, position in case.positions], np.int32)
        fixed: Arrays = {
            "keys": self._pages(case.rows_per_page),
            "counts": jnp.asarray(counts),
        }
        if isinstance(case, Decode):
            fixed["lens"] = jnp.asarray(case.lens, jnp.int32)
            fixed["received"] = jnp.asarray(_received(case, counts, 0))
        else:
            fixed["plan"] = _plan(case, backend)
        tables = _tables(case, self.sets_of(case), fixed["keys"].shape[0])
        rows = case.tokens * NUM_HEADS
        sets = [
            {
                "queries": _cut(self._queries, np.int32(i * rows), rows=rows),
                "table": jnp.asarray(table),
            }
            for i, table in enumerate(tables)
        ]
        return Inputs(fixed, sets)

    def _pages(self, rows_per_page: int) -> jax.Array:
        if rows_per_page not in self._paged:
            shape = (-1, rows_per_page, HEAD_DIM)
            self._paged[rows_per_page] = jax.jit(lambda x: x.reshape(shape))(self._keys)
        return self._paged[rows_per_page]


def abstract_inputs(case: Case, key_rows: int) -> Arrays:
    """Shapes of a set's arrays for the kernels, from a pool with that many rows of keys."""

    def words(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    def rows(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*shape, HEAD_DIM), jnp.float8_e4m3fn)

    found: Arrays = {"counts": words(case.tokens)}
    if isinstance(case, Decode | Merge):
        by_source = (case.world_size, case.heads_per_rank, case.tokens, ROW_WORDS)
        found["received"] = words(*by_source)
    if isinstance(case, Decode | Prefill):
        found["keys"] = rows(key_rows // case.rows_per_page, case.rows_per_page)
        found["queries"] = rows(case.tokens, NUM_HEADS)
        found["table"] = words(len(case.lens), max(case.request_pages))
    if isinstance(case, Decode):
        found["lens"] = words(len(case.lens))
    if isinstance(case, Prefill):
        plan = _plan(case, "mosaic")
        found["plan"] = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), plan)
    if isinstance(case, Select):
        shape = (case.tokens, NUM_HEADS, case.columns)
        found["scores"] = jax.ShapeDtypeStruct(shape, jnp.float32)
    return found


def _plan(case: Prefill, backend: str) -> Any:
    return msa_icp_index_score_sharded_plan(
        case.query_lens,
        case.lens,
        NUM_HEADS,
        qo_offset=[n - q for n, q in zip(case.lens, case.query_lens, strict=True)],
        backend=backend,
    )


def _normal_rows(seed: int, rows: int) -> jax.Array:
    """Random normal e4m3 rows [>= rows, 128]."""
    chunks = round_up(rows, _CHUNK_ROWS) // _CHUNK_ROWS
    return _draw(jax.random.key(seed), chunks)


@functools.partial(jax.jit, static_argnums=1)
def _draw(key: jax.Array, chunks: int) -> jax.Array:
    def chunk(key: jax.Array) -> jax.Array:
        return jax.random.normal(key, (_CHUNK_ROWS, HEAD_DIM)).astype(jnp.float8_e4m3fn)

    return lax.map(chunk, jax.random.split(key, chunks)).reshape(-1, HEAD_DIM)


@functools.partial(jax.jit, static_argnames="rows")
def _cut(pool: jax.Array, start: Any, *, rows: int) -> jax.Array:
    """Queries [rows / 4, 4, 128] from row `start`."""
    cut = lax.dynamic_slice(pool, (start, 0), (rows, HEAD_DIM))
    return cut.reshape(-1, NUM_HEADS, HEAD_DIM)


def _tables(case: Decode | Prefill, sets: int, pool_pages: int) -> list[np.ndarray]:
    """Block tables int32 [B, width], disjoint between requests and sets."""
    pages = np.random.default_rng(0).permutation(pool_pages).astype(np.int32)
    used, tables = 0, []
    for _ in range(sets):
        table = np.full((len(case.lens), max(case.request_pages)), -1, np.int32)
        for b, count in enumerate(case.request_pages):
            table[b, :count] = pages[used : used + count]
            used += count
        tables.append(table)
    return tables


def _select(case: Select, sets: int) -> Inputs:
    shape = (case.tokens, NUM_HEADS, case.columns)
    draw = jax.jit(lambda key: 16 * jax.random.normal(key, shape))
    scores = [{"scores": draw(jax.random.key(i))} for i in range(sets)]
    return Inputs({"counts": jnp.full(case.tokens, case.columns, jnp.int32)}, scores)


def _received(case: Decode | Merge, counts: np.ndarray, seed: int) -> np.ndarray:
    """Rows of every source rank, int32 [W, hpr, T, 33]: distinct random visible blocks each."""
    rng = np.random.default_rng(seed)
    shape = (case.world_size, case.heads_per_rank, case.tokens, TOPK)
    blocks = counts[None, None, :, None]
    # Sorted draws that may repeat, spread apart by one each: distinct and ascending.
    ids = np.sort(rng.integers(0, np.maximum(blocks - TOPK, 0) + 1, shape)) + np.arange(TOPK)
    visible = ids < blocks
    scores = np.where(visible, rng.normal(size=shape), -np.inf).astype(np.float32)
    ready = np.full((*shape[:-1], 1), READY, np.int32)
    words = [scores.view(np.int32), np.where(visible, ids, -1).astype(np.int32), ready]
    return np.concatenate(words, axis=-1)
