"""What each stage runs: parts, each a public function of the package and the arrays it touches.

One definition serves both ways of timing (timing.py): traced one after the other into a jitted
program, or lowered one by one and launched without JAX. A new stage of such parts is a line in
`build` and its name in the `stages` of a case class; one that times itself is a line in
`run.OWN_WAY`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

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
from msa_icp_jax import (
    msa_icp_decode_index_score_sharded,
    msa_icp_index_score_sharded,
    msa_icp_merge_candidates,
    msa_icp_prefill_score_select,
    msa_icp_topk_select_prefill,
    msa_icp_topk_select_publish,
)
from msa_icp_jax.geometry import NUM_HEADS, TOPK
from msa_icp_jax.ops.prefill_score import score_and_select
from msa_icp_jax.rows import ROW_WORDS

POISON = -7  # what buffers hold before a stage writes them; no id and no likely score


@dataclasses.dataclass(frozen=True)
class Part:
    """One call: `run(*arrays named in reads)` returns the array, or arrays, named in `writes`."""

    name: str
    run: Callable[..., Any]
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Stage:
    """Parts in order.

    Attributes:
      parts: what runs.
      hinge: a small int32 array that the first part reads: the jitted program makes each link's
        depend on the link before.
      prelude: parts that run once for each input set, before anything is timed.
    """

    parts: tuple[Part, ...]
    hinge: str
    prelude: tuple[Part, ...] = ()

    def run(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """The arrays written, from `arrays`."""
        arrays = run(self.parts, arrays)
        return {name: arrays[name] for part in self.parts for name in part.writes}


def run(parts: tuple[Part, ...], arrays: dict[str, Any]) -> dict[str, Any]:
    """`arrays` with those that the parts write."""
    arrays = dict(arrays)
    for part in parts:
        results = part.run(*(arrays[name] for name in part.reads))
        results = results if len(part.writes) > 1 else (results,)
        arrays.update(zip(part.writes, results, strict=True))
    return arrays


def build(case: Case, stage: str, backend: str, precision: str) -> Stage:
    """The stage of a case; what a merge receives is there, nothing is exchanged."""
    if isinstance(case, Prefill):
        made = _prefill_parts(case, backend, precision)
        score, select = made["score"], made["select"]
        return {
            "score": Stage((score,), "table"),
            "select": Stage((select,), "counts", prelude=(score,)),
            # What `prefill_local` of a plan launches.
            "local": Stage((made["local"],), "table"),
            # The scores are there to check the rows against.
            "fused-local": Stage((made["fused"],), "table", prelude=(score,)),
        }[stage]
    select, merge = _select(case, backend), _merge(backend)
    if isinstance(case, Alone):
        return Stage((select if stage == "select" else merge,), "counts")
    score = _decode_score(case, backend, precision)
    return {
        "score": Stage((score,), "lens"),
        "select": Stage((select,), "counts", prelude=(score,)),
        "local": Stage((score, select), "lens"),
        "merge": Stage((merge,), "counts"),
        "chain": Stage((score, select, merge), "lens"),
    }[stage]


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


def initial(name: str) -> int:
    """What a written array is filled with at the start."""
    return 0 if name == "errors" else POISON


# ---- the public functions with a case's static arguments ----

_FORCED = {"force_begin_blocks": INIT_BLOCKS, "force_end_blocks": LOCAL_BLOCKS}


def _decode_score(case: Decode, backend: str, precision: str) -> Part:
    score = functools.partial(
        msa_icp_decode_index_score_sharded,
        rank=RANK,
        world_size=case.world_size,
        page_size=PAGE_SIZE,
        decode_query_len=case.query_len,
        max_decode_query_len=case.query_len,
        enable_pdl=True,
        backend=backend,
        precision=precision,
    )
    return Part("score", score, ("queries", "keys", "table", "lens", "scores"), ("scores",))


def _select(case: Case, backend: str) -> Part:
    def select(scores: Any, counts: Any) -> Any:
        return msa_icp_topk_select_publish(
            scores,
            counts,
            rank=RANK,
            world_size=case.world_size,
            heads_per_rank=NUM_HEADS // case.world_size,
            **_FORCED,
            enable_pdl=True,
            backend=backend,
        ).rows

    return Part("select", select, ("scores", "counts"), ("rows",))


def _merge(backend: str) -> Part:
    def merge(received: Any, counts: Any, output: Any, errors: Any) -> tuple[Any, ...]:
        merged = msa_icp_merge_candidates(
            *(received, counts, output, errors),
            init_blocks=INIT_BLOCKS,
            local_blocks=LOCAL_BLOCKS,
            enable_pdl=True,
            backend=backend,
        )
        return merged.output, merged.errors

    return Part("merge", merge, ("received", "counts", "output", "errors"), ("output", "errors"))


def _prefill_parts(case: Prefill, backend: str, precision: str) -> dict[str, Part]:
    window: dict[str, Any] = {
        "rank": RANK,
        "tp": case.world_size,
        "enable_pdl": True,
        "backend": backend,
        "precision": precision,
    }

    def score(*arrays: Any) -> Any:
        return msa_icp_index_score_sharded(*arrays[:-1], max_score=arrays[-1], **window)

    def local(*arrays: Any) -> Any:
        *inputs, scores, rows = arrays
        return score_and_select(*inputs, rows, scores, columns=case.columns, **window, **_FORCED)

    select = functools.partial(msa_icp_topk_select_prefill, **_FORCED, backend=backend)
    fused = functools.partial(msa_icp_prefill_score_select, **window, **_FORCED)
    read = ("queries", "keys", "table", "plan")
    parts = (
        Part("score", score, (*read, "scores"), ("scores",)),
        Part("local", local, (*read, "counts", "scores", "rows"), ("rows", "scores")),
        Part("select", select, ("scores", "counts", "rows"), ("rows",)),
        Part("fused", fused, (*read, "counts", "rows"), ("rows",)),
    )
    return {part.name: part for part in parts}
