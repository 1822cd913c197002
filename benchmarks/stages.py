"""What is run: the inputs of a case, and the parts of its stages.

All cases share one pool of device-made random normal key rows. Each of a case's *sets* has queries
and a block table of its own; the tables are disjoint parts of one permutation of the pool's pages,
so a pass over all sets reads every row once. There are at least two sets, and as many as it takes
to stream through the L2 cache several times over: nothing is served from it twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import msa_icp_jax as msa
from benchmarks.cases import (
    INIT_BLOCKS,
    LOCAL_BLOCKS,
    PAGE_SIZE,
    RANK,
    Alone,
    Case,
    Decode,
    Prefill,
    Sharded,
)
from msa_icp_jax.geometry import BLOCK_SIZE, HEAD_DIM, NUM_HEADS, TOPK, Forced, cdiv
from msa_icp_jax.ops.arguments import Shard
from msa_icp_jax.ops.prefill_score import score_and_select
from msa_icp_jax.rows import READY, ROW_WORDS

GPU_STREAM_BYTES = 256 << 20  # between two uses of a set; an H200 has 60 MB of L2
_MAX_SETS = 512
_CHUNK_ROWS = 1 << 13  # rows drawn at a time
_MERGE_SETS = 8  # received rows are small and fresh: they come from the L2 cache in use, too

Arrays = dict[str, Any]
POISON = -7  # what buffers hold before a stage writes them; no id and no likely score


class Inputs(NamedTuple):
    """What the stages of a case read: arrays that every set shares, and those of each set."""

    fixed: Arrays
    sets: list[Arrays]


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
        """So many that a pass brings `stream_bytes` through the cache, two at least."""
        each = case.floor("score" if isinstance(case, Prefill) else case.stages[-1]).bytes
        return min(_MAX_SETS, max(2, cdiv(self.stream_bytes, each)))

    def inputs(self, case: Case, backend: str) -> Inputs:
        """The case's inputs, with the window plan of that backend."""
        return jax.block_until_ready(self._inputs(case, backend, self.sets_of(case)))

    def structs(self, case: Case, backend: str) -> Inputs:
        """Shapes of the inputs with one set, without making any."""
        return jax.eval_shape(lambda: self._inputs(case, backend, 1))

    def _inputs(self, case: Case, backend: str, sets: int) -> Inputs:
        if isinstance(case, Sharded):
            return self._sharded(case, backend, sets)
        counts = np.full(case.tokens, case.columns, np.int32)
        fixed = {"counts": jnp.asarray(counts)}
        if case.stage == "merge":
            received = (_received(case, counts, i) for i in range(min(sets, _MERGE_SETS)))
            return Inputs(fixed, [{"received": x} for x in received])
        shape = (case.tokens, NUM_HEADS, case.columns)
        draw = jax.jit(lambda i: 16 * jax.random.normal(jax.random.key(i), shape))
        return Inputs(fixed, [{"scores": draw(i)} for i in range(sets)])

    def _sharded(self, case: Sharded, backend: str, sets: int) -> Inputs:
        positions = np.array([position for _, position in case.positions])
        counts = np.maximum(positions // BLOCK_SIZE + 1, 0).astype(np.int32)
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
            before = [n - q for n, q in zip(case.lens, case.query_lens, strict=True)]
            fixed["plan"] = msa.msa_icp_index_score_sharded_plan(
                *(case.query_lens, case.lens, NUM_HEADS), qo_offset=before, backend=backend
            )
        pairs = zip(queries, tables, strict=True)
        return Inputs(fixed, [{"queries": q, "table": jnp.asarray(table)} for q, table in pairs])


def plan_options(case: Sharded) -> Arrays:
    """What both packages' `prepare_msa_icp_indexer` are told of a case."""
    tokens = dict.fromkeys(("max_decode_tokens", "max_num_batched_tokens"), case.tokens)
    return tokens | {
        "world_size": case.world_size,
        "num_index_heads": NUM_HEADS,
        "page_size": PAGE_SIZE,
        "init_blocks": INIT_BLOCKS,
        "local_blocks": LOCAL_BLOCKS,
        "max_decode_query_len": case.query_len if isinstance(case, Decode) else 1,
        "max_num_seqs": len(case.lens),
        "max_model_len": max(case.lens),
        "num_sparse_layers": 3,
    }


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _normal_rows(seed: int, rows: int, dtype: str) -> jax.Array:
    """Random normal rows [>= rows, 128]."""

    def chunk(key: jax.Array) -> jax.Array:
        return jax.random.normal(key, (_CHUNK_ROWS, HEAD_DIM)).astype(dtype)

    keys = jax.random.split(jax.random.key(seed), cdiv(rows, _CHUNK_ROWS))
    return lax.map(chunk, keys).reshape(-1, HEAD_DIM)


def _adversarial(keys: jax.Array, pages: np.ndarray, data: str) -> jax.Array:
    """The keys with those of the tables' pages such that selection is hard.

    Of "ties" every row is the same. Of "ascending" the elements of block g sum to g + 1, in halves
    (exact in float8 up to 1,024 blocks): queries of ones score each block above all before it.
    """
    blocks = np.broadcast_to(np.arange(pages.shape[-1]), pages.shape)[pages >= 0]
    whole, rest = np.divmod(2 * (blocks + 1)[:, None], HEAD_DIM)
    rows = (whole + (np.arange(HEAD_DIM) < rest)) / 2
    if data == "ties":
        rows = np.ones_like(rows)
    codes = np.repeat(rows[:, None].astype(keys.dtype).view(np.uint8), keys.shape[1], axis=1)
    return keys.view(np.uint8).at[pages[pages >= 0]].set(codes).view(keys.dtype)


def _tables(case: Sharded, sets: int, pool_pages: int) -> np.ndarray:
    """Block tables int32 [sets, B, width], disjoint between requests and sets."""
    pages = iter(np.split(_permutation(pool_pages), np.cumsum(case.request_pages * sets)))
    tables = np.full((sets, len(case.lens), max(case.request_pages)), -1, np.int32)
    for table in tables:
        for row, count in zip(table, case.request_pages, strict=True):
            row[:count] = next(pages)
    return tables


_permutation = functools.cache(lambda pages: np.random.default_rng(0).permutation(pages))


def _received(case: Decode | Alone, counts: np.ndarray, seed: int) -> jax.Array:
    """Rows of every source rank, int32 [W, hpr, T, 33]: distinct random visible blocks each."""
    rng = np.random.default_rng(seed)
    shape = (case.world_size, NUM_HEADS // case.world_size, case.tokens, TOPK)
    blocks = counts[None, None, :, None]
    # Sorted draws that may repeat, spread apart by one each: distinct and ascending.
    ids = np.sort(rng.integers(0, np.maximum(blocks - TOPK, 0) + 1, shape)) + np.arange(TOPK)
    visible = ids < blocks
    scores = np.where(visible, rng.normal(size=shape), -np.inf).astype(np.float32)
    ready = np.full((*shape[:-1], 1), READY, np.int32)
    words = [scores.view(np.int32), np.where(visible, ids, -1).astype(np.int32), ready]
    return jnp.asarray(np.concatenate(words, axis=-1))


# ---- stages ----


class Stage(NamedTuple):
    """What is timed, from arrays by name to those that it writes; what runs once a set before it.

    It calls public functions of the package: traced into a jitted program, or lowered to kernels
    that are launched without JAX (timing.py).
    """

    run: Callable[[Arrays], Arrays]
    prelude: Callable[[Arrays], Arrays] | None = None


def build(case: Case, stage: str, backend: str, precision: str) -> Stage:
    """The stage of a case; what a merge receives is there, nothing is exchanged."""
    made = (_of_prefill if isinstance(case, Prefill) else _of_decode)(case, backend, precision)
    needs_scores = isinstance(case, Sharded) and stage in ("select", "fused-local")
    return Stage(made[stage], made["score"] if needs_scores else None)


def written_like(case: Case) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of the arrays that stages write."""
    struct, tokens, heads = jax.ShapeDtypeStruct, case.tokens, NUM_HEADS // case.world_size
    scores = {"scores": struct((tokens, NUM_HEADS, case.columns), jnp.float32)}
    if isinstance(case, Prefill):
        return scores | {"rows": struct((NUM_HEADS, tokens, ROW_WORDS), jnp.int32)}
    words = {
        "rows": (case.world_size, heads, tokens, ROW_WORDS),
        "output": (tokens, heads, TOPK),
        "errors": (1,),
    }
    written = {name: struct(shape, jnp.int32) for name, shape in words.items()}
    return (scores if isinstance(case, Sharded) else {}) | written


def _in_order(*stages: Callable[[Arrays], Arrays]) -> Callable[[Arrays], Arrays]:
    def run(arrays: Arrays) -> Arrays:
        written: Arrays = {}
        for stage in stages:
            written |= stage(arrays | written)
        return written

    return run


_FORCED = {"force_begin_blocks": INIT_BLOCKS, "force_end_blocks": LOCAL_BLOCKS}


def _of_decode(case: Any, backend: str, precision: str) -> dict[str, Any]:
    common: Arrays = {"enable_pdl": True, "backend": backend}
    shard = common | {"rank": RANK, "world_size": case.world_size}

    def score(a: Arrays) -> Arrays:
        length = dict.fromkeys(("decode_query_len", "max_decode_query_len"), case.query_len)
        options = {"page_size": PAGE_SIZE, "precision": precision, **length, **shard}
        read = (a["queries"], a["keys"], a["table"], a["lens"], a["scores"])
        return {"scores": msa.msa_icp_decode_index_score_sharded(*read, **options)}

    def select(a: Arrays) -> Arrays:
        options = {"heads_per_rank": NUM_HEADS // case.world_size, **_FORCED, **shard}
        published = msa.msa_icp_topk_select_publish(a["scores"], a["counts"], **options)
        return {"rows": published.rows}

    def merge(a: Arrays) -> Arrays:
        forced = {"init_blocks": INIT_BLOCKS, "local_blocks": LOCAL_BLOCKS}
        given = (a["received"], a["counts"], a["output"], a["errors"])
        merged = msa.msa_icp_merge_candidates(*given, **forced, **common)
        return {"output": merged.output, "errors": merged.errors}

    local, chain = _in_order(score, select), _in_order(score, select, merge)
    return {"score": score, "select": select, "local": local, "merge": merge, "chain": chain}


def _of_prefill(case: Any, backend: str, precision: str) -> dict[str, Any]:
    launched: Arrays = {"enable_pdl": True, "backend": backend, "precision": precision}
    window: Arrays = {"rank": RANK, "tp": case.world_size, **launched}

    def read(a: Arrays) -> tuple[Any, ...]:
        return a["queries"], a["keys"], a["table"], a["plan"]

    def score(a: Arrays) -> Arrays:
        scored = msa.msa_icp_index_score_sharded(*read(a), max_score=a["scores"], **window)
        return {"scores": scored}

    def select(a: Arrays) -> Arrays:
        given = (a["scores"], a["counts"], a["rows"])
        return {"rows": msa.msa_icp_topk_select_prefill(*given, **_FORCED, backend=backend)}

    def local(a: Arrays) -> Arrays:
        shard = Shard(a["keys"], RANK, case.world_size, PAGE_SIZE)
        given = (a["queries"], shard, a["table"], a["plan"], a["counts"], a["rows"], a["scores"])
        forced = Forced(INIT_BLOCKS, LOCAL_BLOCKS)
        rows, scores = score_and_select(*given, forced, columns=case.columns, **launched)
        return {"rows": rows, "scores": scores}

    def fused(a: Arrays) -> Arrays:
        given = (*read(a), a["counts"], a["rows"])
        return {"rows": msa.msa_icp_prefill_score_select(*given, **window, **_FORCED)}

    return {"score": score, "select": select, "local": local, "fused-local": fused}
