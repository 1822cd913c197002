"""Inputs of the work points: device-made random normal data behind shuffled pages.

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

from benchmarks.cases import Alone, Case, Decode, Sharded, visible_blocks
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
    """What the stages of a case read: arrays that every set shares, and those of each set."""

    fixed: Arrays
    sets: list[Arrays]

    @property
    def structs(self) -> Arrays:
        """Shapes of a set's arrays."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.fixed | self.sets[0]
        )


class Pool:
    """Key and query rows large enough for each of `cases`."""

    def __init__(self, cases: Sequence[Case], stream_bytes: int) -> None:
        self.stream_bytes = stream_bytes
        sharded = [c for c in cases if isinstance(c, Sharded)]
        self._rows: dict[str, tuple[jax.Array, jax.Array]] = {}  # keys, queries
        for dtype in dict.fromkeys(case.dtype for case in sharded):
            alike = [(case, self.sets_of(case)) for case in sharded if case.dtype == dtype]
            keys = max(case.key_rows * sets for case, sets in alike)
            queries = max(case.tokens * case.heads * sets for case, sets in alike)
            self._rows[dtype] = _normal_rows(0, keys, dtype), _normal_rows(1, queries, dtype)

    def sets_of(self, case: Case) -> int:
        return min(MAX_SETS, max(2, cdiv(self.stream_bytes, case.stream_bytes)))

    def inputs(self, case: Case, backend: str) -> Inputs:
        """The case's inputs, with the window plan of that backend."""
        found = self._inputs(case, backend, self.sets_of(case))
        return jax.block_until_ready((found.fixed, found.sets)) and found

    def structs(self, case: Case, backend: str) -> tuple[Arrays, Arrays]:
        """Shapes of what all sets share, and of a set's arrays, without making any."""

        def arrays() -> tuple[Arrays, Arrays]:
            found = self._inputs(case, backend, 1)
            return found.fixed, found.sets[0]

        return jax.eval_shape(arrays)

    def _inputs(self, case: Case, backend: str, sets: int) -> Inputs:
        if isinstance(case, Sharded):
            return self._sharded(case, backend, sets)
        counts = np.full(case.tokens, case.columns, np.int32)
        if case.stage == "merge":
            drawn = [_received(case, counts, i) for i in range(min(sets, _MERGE_SETS))]
            return Inputs({"counts": jnp.asarray(counts)}, [{"received": x} for x in drawn])
        shape = (case.tokens, NUM_HEADS, case.columns)
        draw = jax.jit(lambda key: 16 * jax.random.normal(key, shape))
        drawn = [draw(jax.random.key(i)) for i in range(sets)]
        return Inputs({"counts": jnp.asarray(counts)}, [{"scores": x} for x in drawn])

    def _sharded(self, case: Sharded, backend: str, sets: int) -> Inputs:
        counts = np.array([visible_blocks(position) for _, position in case.positions], np.int32)
        keys, queries = self._rows[case.dtype]
        keys = keys.reshape(-1, case.rows_per_page, HEAD_DIM)
        tables = _tables(case, sets, len(keys))
        queries = queries[: sets * case.tokens * case.heads]
        queries = queries.reshape(sets, case.tokens, case.heads, HEAD_DIM)
        if case.data != "normal":
            keys = _adversarial(keys, tables, case.data)
        if case.data == "ascending":
            queries = jnp.ones_like(queries)
        fixed: Arrays = {"keys": keys, "counts": jnp.asarray(counts)}
        if isinstance(case, Decode):
            fixed["lens"] = jnp.asarray(case.lens, jnp.int32)
            fixed["received"] = _received(case, counts, 0)
        elif case.heads == NUM_HEADS:  # none of a peer's
            fixed["plan"] = msa_icp_index_score_sharded_plan(
                case.query_lens,
                case.lens,
                NUM_HEADS,
                qo_offset=[n - q for n, q in zip(case.lens, case.query_lens, strict=True)],
                backend=backend,
            )
        pairs = zip(queries, tables, strict=True)
        return Inputs(fixed, [{"queries": q, "table": jnp.asarray(table)} for q, table in pairs])


def _normal_rows(seed: int, rows: int, dtype: str) -> jax.Array:
    """Random normal rows [>= rows, 128]."""
    chunks = round_up(rows, _CHUNK_ROWS) // _CHUNK_ROWS
    return _draw(jax.random.key(seed), chunks, dtype)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _draw(key: jax.Array, chunks: int, dtype: str) -> jax.Array:
    def chunk(key: jax.Array) -> jax.Array:
        return jax.random.normal(key, (_CHUNK_ROWS, HEAD_DIM)).astype(dtype)

    return lax.map(chunk, jax.random.split(key, chunks)).reshape(-1, HEAD_DIM)


def _adversarial(keys: jax.Array, tables: list[np.ndarray], data: str) -> jax.Array:
    """The keys with those of the tables' pages such that selection is hard.

    Of "ties" every row is the same. Of "ascending" the elements of block g sum to g + 1, in halves
    (exact in float8 up to 1,024 blocks): queries of ones score each block above all before it.
    """
    pages = np.stack(tables)
    blocks = np.broadcast_to(np.arange(pages.shape[-1]), pages.shape)[pages >= 0]
    whole, rest = np.divmod(2 * (blocks + 1)[:, None], HEAD_DIM)
    rows = (whole + (np.arange(HEAD_DIM) < rest)) / 2
    if data == "ties":
        rows = np.ones_like(rows)
    codes = np.repeat(rows[:, None].astype(keys.dtype).view(np.uint8), keys.shape[1], axis=1)
    return keys.view(np.uint8).at[pages[pages >= 0]].set(codes).view(keys.dtype)


def _tables(case: Sharded, sets: int, pool_pages: int) -> list[np.ndarray]:
    """Block tables int32 [B, width], disjoint between requests and sets."""
    pages = iter(np.split(_permutation(pool_pages), np.cumsum(case.request_pages * sets)))
    tables = []
    for _ in range(sets):
        table = np.full((len(case.lens), max(case.request_pages)), -1, np.int32)
        for row, count in zip(table, case.request_pages, strict=True):
            row[:count] = next(pages)
        tables.append(table)
    return tables


@functools.cache
def _permutation(pages: int) -> np.ndarray:
    return np.random.default_rng(0).permutation(pages).astype(np.int32)


def _received(case: Decode | Alone, counts: np.ndarray, seed: int) -> jax.Array:
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
    found = np.concatenate(words, axis=-1)
    assert found.shape[-1] == ROW_WORDS
    return jnp.asarray(found)
