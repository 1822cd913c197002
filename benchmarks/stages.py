"""What is run: the inputs of a case, and the parts of its stages.

All cases share one pool of device-made random normal key rows. Each of a case's *sets* has queries
and a block table of its own; the tables are disjoint parts of one permutation of the pool's pages,
so a pass over all sets reads every row once. There are at least two sets, and as many as it takes
to stream through the L2 cache several times over: nothing is served from it twice.

A stage is a chain of parts, each a public function of the package and the arrays it touches: traced
one after the other into a jitted program, or lowered one by one and launched without JAX
(timing.py). A new stage is a line of `_PARTS_OF` and a name in the stages of a case's class.
"""

from __future__ import annotations

import dataclasses
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

# Parts of a stage that is not one part of that name; what prefill's local launches is one.
_PARTS_OF = {"local": ("score", "select"), "chain": ("score", "select", "merge")}
_NEED_SCORES = ("select", "fused-local")  # to read, or to be checked against


class Inputs(NamedTuple):
    """What the stages of a case read: arrays that every set shares, and those of each set."""

    fixed: Arrays
    sets: list[Arrays]

    @property
    def structs(self) -> Arrays:
        """Shapes of a set's arrays."""
        return jax.eval_shape(lambda: self.fixed | self.sets[0])


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

    def structs(self, case: Case, backend: str) -> tuple[Arrays, Arrays]:
        """Shapes of what all sets share, and of a set's arrays, without making any."""
        fixed, (one_set,) = jax.eval_shape(lambda: tuple(self._inputs(case, backend, 1)))
        return fixed, one_set

    def _inputs(self, case: Case, backend: str, sets: int) -> Inputs:
        if isinstance(case, Sharded):
            return self._sharded(case, backend, sets)
        counts = np.full(case.tokens, case.columns, np.int32)
        draw = functools.partial(_received, case, counts)
        if case.stage == "select":
            shape = (case.tokens, NUM_HEADS, case.columns)
            draw = jax.jit(lambda i: 16 * jax.random.normal(jax.random.key(i), shape))
        sets = sets if case.stage == "select" else min(sets, _MERGE_SETS)
        read = {"select": "scores", "merge": "received"}[case.stage]
        return Inputs({"counts": jnp.asarray(counts)}, [{read: draw(i)} for i in range(sets)])

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


@dataclasses.dataclass(frozen=True)
class Part:
    """One call: `run(*arrays named in reads)` returns the array, or arrays, named in `writes`."""

    name: str
    run: Callable[..., Any]
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Stage:
    """Parts in order, and a prelude of those that run once for each input set, untimed."""

    parts: tuple[Part, ...]
    prelude: tuple[Part, ...] = ()

    def run(self, arrays: Arrays) -> Arrays:
        """The arrays written."""
        arrays = run(self.parts, arrays)
        return {name: arrays[name] for part in self.parts for name in part.writes}


def run(parts: tuple[Part, ...], arrays: Arrays) -> Arrays:
    """`arrays` with those that the parts write."""
    arrays = dict(arrays)
    for part in parts:
        results = part.run(*(arrays[name] for name in part.reads))
        results = results if len(part.writes) > 1 else (results,)
        arrays.update(zip(part.writes, results, strict=True))
    return arrays


def build(case: Case, stage: str, backend: str, precision: str) -> Stage:
    """The stage of a case; what a merge receives is there, nothing is exchanged."""
    made = _prefill_parts if isinstance(case, Prefill) else _decode_parts
    parts = {part.name: part for part in made(case, backend, precision)}
    names = (stage,) if stage in parts else _PARTS_OF[stage]
    prelude = (parts["score"],) if isinstance(case, Sharded) and stage in _NEED_SCORES else ()
    return Stage(tuple(parts[name] for name in names), prelude)


def written_like(case: Case) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of the arrays that stages write."""
    shapes: dict[str, jax.ShapeDtypeStruct] = {}
    tokens, words = case.tokens, functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    if isinstance(case, Sharded):
        shapes["scores"] = jax.ShapeDtypeStruct((tokens, NUM_HEADS, case.columns), jnp.float32)
    if isinstance(case, Prefill):
        return shapes | {"rows": words((NUM_HEADS, tokens, ROW_WORDS))}
    heads = NUM_HEADS // case.world_size
    return shapes | {
        "rows": words((case.world_size, heads, tokens, ROW_WORDS)),
        "output": words((tokens, heads, TOPK)),
        "errors": words((1,)),
    }


# ---- the public functions with a case's static arguments ----


def _decode_parts(case: Any, backend: str, precision: str) -> tuple[Part, ...]:
    common: Arrays = {"enable_pdl": True, "backend": backend}
    shard = common | {"rank": RANK, "world_size": case.world_size}
    forced = {"init_blocks": INIT_BLOCKS, "local_blocks": LOCAL_BLOCKS}
    owned = {"heads_per_rank": NUM_HEADS // case.world_size}

    def score(*arrays: Any) -> Any:
        length = dict.fromkeys(("decode_query_len", "max_decode_query_len"), case.query_len)
        options = {"page_size": PAGE_SIZE, "precision": precision, **length, **shard}
        return msa.msa_icp_decode_index_score_sharded(*arrays, **options)

    def select(*arrays: Any) -> Any:
        return msa.msa_icp_topk_select_publish(*arrays, **owned, **_FORCED, **shard).rows

    def merge(*arrays: Any) -> tuple[Any, ...]:
        merged = msa.msa_icp_merge_candidates(*arrays, **forced, **common)
        return merged.output, merged.errors

    return (
        Part("score", score, ("queries", "keys", "table", "lens", "scores"), ("scores",)),
        Part("select", select, ("scores", "counts"), ("rows",)),
        Part("merge", merge, ("received", "counts", "output", "errors"), ("output", "errors")),
    )


_FORCED = {"force_begin_blocks": INIT_BLOCKS, "force_end_blocks": LOCAL_BLOCKS}


def _prefill_parts(case: Any, backend: str, precision: str) -> tuple[Part, ...]:
    launched: Arrays = {"enable_pdl": True, "backend": backend, "precision": precision}
    window: Arrays = {"rank": RANK, "tp": case.world_size, **launched}

    def score(*arrays: Any) -> Any:
        return msa.msa_icp_index_score_sharded(*arrays[:-1], max_score=arrays[-1], **window)

    def local(*arrays: Any) -> Any:
        queries, keys, table, plan, counts, scores, rows = arrays
        shard = Shard(keys, RANK, case.world_size, PAGE_SIZE)
        return score_and_select(
            *(queries, shard, table, plan, counts, rows, scores),
            Forced(INIT_BLOCKS, LOCAL_BLOCKS),
            columns=case.columns,
            **launched,
        )

    select = functools.partial(msa.msa_icp_topk_select_prefill, **_FORCED, backend=backend)
    fused = functools.partial(msa.msa_icp_prefill_score_select, **window, **_FORCED)
    read = ("queries", "keys", "table", "plan")
    return (
        Part("score", score, (*read, "scores"), ("scores",)),
        Part("select", select, ("scores", "counts", "rows"), ("rows",)),
        Part("local", local, (*read, "counts", "scores", "rows"), ("rows", "scores")),
        Part("fused-local", fused, (*read, "counts", "rows"), ("rows",)),
    )
