"""What each stage runs: parts, each a public function of the package and the arrays it touches.

A stage is a sequence of parts over named arrays. One definition serves both ways of timing: traced
one after the other into a jitted program (timing.py), or lowered one by one and launched without
JAX (graph.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.cases import (
    INIT_BLOCKS,
    LOCAL_BLOCKS,
    PAGE_SIZE,
    RANK,
    Case,
    Decode,
    Merge,
    Prefill,
    Select,
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
from msa_icp_jax.ops.prefill_score import score_candidates
from msa_icp_jax.rows import ROW_WORDS

POISON = -7  # what buffers hold before a stage writes them; no id and no likely score


@dataclasses.dataclass(frozen=True)
class Part:
    """One call: `run(*arrays named in reads)` returns the arrays named in `writes`."""

    name: str
    run: Callable[..., tuple[Any, ...]]
    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Stage:
    """Parts in order.

    Attributes:
      name: the stage's name in results.
      parts: what runs.
      hinge: a small int32 array that the first part reads: the jitted program makes each link's
        depend on the link before.
      prelude: parts that run once for each input set, before anything is timed.
    """

    name: str
    parts: tuple[Part, ...]
    hinge: str
    prelude: tuple[Part, ...] = ()

    @property
    def writes(self) -> tuple[str, ...]:
        """Names of all arrays written."""
        return tuple(dict.fromkeys(name for part in self.parts for name in part.writes))

    def run(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """The arrays written, from `arrays`."""
        arrays = run(self.parts, arrays)
        return {name: arrays[name] for name in self.writes}


def run(parts: tuple[Part, ...], arrays: dict[str, Any]) -> dict[str, Any]:
    """`arrays` with those that the parts write."""
    arrays = dict(arrays)
    for part in parts:
        results = part.run(*(arrays[name] for name in part.reads))
        arrays.update(zip(part.writes, results, strict=True))
    return arrays


def build(case: Case, stage: str, backend: str, precision: str, *, arrange: bool) -> Stage:
    """The stage of a case.

    Args:
      case: the work point.
      stage: one of `case.stages`.
      backend: "mosaic" or "xla".
      precision: "exact" or "fast".
      arrange: whether a chain puts its own rows among those received, as the exchange would. Where
        the launches are ordered anyhow, the received rows are simply there.
    """
    parts = _Parts(case, backend, precision)
    match case:
        case Decode():
            return _decode(parts, stage, arrange)
        case Prefill():
            score, select = parts.prefill_score(), parts.prefill_select()
            return {
                "score": Stage(stage, (score,), "table"),
                "select": Stage(stage, (select,), "counts", prelude=(score,)),
                # What `prefill_local` of a plan launches: unlike the public scorer, it leaves
                # columns alone that the selection does not read.
                "local": Stage(stage, (parts.prefill_candidates(), select), "table"),
                # The scores are there to check the rows against.
                "fused-local": Stage(stage, (parts.prefill_fused(),), "table", prelude=(score,)),
            }[stage]
        case Select() | Merge():
            part = parts.select() if isinstance(case, Select) else parts.merge("received")
            return Stage(stage, (part,), "counts")


def _decode(parts: _Parts, stage: str, arrange: bool) -> Stage:
    score, select = parts.decode_score(), parts.select()
    exchange = (parts.arrange(),) if arrange else ()
    chain = (score, select, *exchange, parts.merge("arranged" if arrange else "received"))
    return {
        "score": Stage(stage, (score,), "lens"),
        "select": Stage(stage, (select,), "counts", prelude=(score,)),
        "local": Stage(stage, (score, select), "lens"),
        "merge": Stage(stage, (parts.merge("received"),), "counts"),
        "chain": Stage(stage, chain, "lens"),
    }[stage]


def written_like(case: Case) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of the arrays that stages write."""
    shapes: dict[str, jax.ShapeDtypeStruct] = {}
    tokens = case.tokens
    if isinstance(case, Decode | Prefill):
        shapes["scores"] = jax.ShapeDtypeStruct((tokens, NUM_HEADS, case.columns), jnp.float32)
    if isinstance(case, Prefill):
        shapes["rows"] = jax.ShapeDtypeStruct((NUM_HEADS, tokens, ROW_WORDS), jnp.int32)
    else:
        heads = NUM_HEADS // case.world_size
        by_owner = (case.world_size, heads, tokens, ROW_WORDS)
        shapes["rows"] = jax.ShapeDtypeStruct(by_owner, jnp.int32)
        shapes["output"] = jax.ShapeDtypeStruct((tokens, heads, TOPK), jnp.int32)
        shapes["errors"] = jax.ShapeDtypeStruct((1,), jnp.int32)
    return shapes


def initial(name: str) -> int:
    """What a written array is filled with at the start."""
    return 0 if name == "errors" else POISON


class _Parts:
    """The public functions with a case's static arguments."""

    def __init__(self, case: Case, backend: str, precision: str) -> None:
        self.case = case
        self.backend = backend
        self.precision = precision

    def decode_score(self) -> Part:
        def run(queries: Any, keys: Any, table: Any, lens: Any, scores: Any) -> tuple[Any, ...]:
            return (
                msa_icp_decode_index_score_sharded(
                    queries,
                    keys,
                    table,
                    lens,
                    scores,
                    **self._shard(),
                    max_decode_query_len=self.case.query_len,
                    enable_pdl=True,
                ),
            )

        return Part("score", run, ("queries", "keys", "table", "lens", "scores"), ("scores",))

    def select(self) -> Part:
        def run(scores: Any, counts: Any) -> tuple[Any, ...]:
            message = msa_icp_topk_select_publish(
                scores,
                counts,
                rank=RANK,
                world_size=self.case.world_size,
                heads_per_rank=NUM_HEADS // self.case.world_size,
                force_begin_blocks=INIT_BLOCKS,
                force_end_blocks=LOCAL_BLOCKS,
                enable_pdl=True,
                backend=self.backend,
            )
            return (message.rows,)

        return Part("select", run, ("scores", "counts"), ("rows",))

    def arrange(self) -> Part:
        def run(received: Any, rows: Any) -> tuple[Any, ...]:
            return (received.at[RANK].set(rows[RANK]),)

        return Part("arrange", run, ("received", "rows"), ("arranged",))

    def merge(self, received: str) -> Part:
        def run(received: Any, counts: Any, output: Any, errors: Any) -> tuple[Any, ...]:
            merged = msa_icp_merge_candidates(
                received,
                counts,
                output,
                errors,
                init_blocks=INIT_BLOCKS,
                local_blocks=LOCAL_BLOCKS,
                enable_pdl=True,
                backend=self.backend,
            )
            return merged.output, merged.errors

        return Part("merge", run, (received, "counts", "output", "errors"), ("output", "errors"))

    def prefill_score(self) -> Part:
        def run(queries: Any, keys: Any, table: Any, plan: Any, scores: Any) -> tuple[Any, ...]:
            return (
                msa_icp_index_score_sharded(
                    queries, keys, table, plan, max_score=scores, **self._window()
                ),
            )

        return Part("score", run, ("queries", "keys", "table", "plan", "scores"), ("scores",))

    def prefill_candidates(self) -> Part:
        def run(*arrays: Any) -> tuple[Any, ...]:
            *inputs, scores = arrays
            return (score_candidates(*inputs, max_score=scores, **self._window()),)

        reads = ("queries", "keys", "table", "plan", "counts", "scores")
        return Part("candidates", run, reads, ("scores",))

    def prefill_select(self) -> Part:
        def run(scores: Any, counts: Any, rows: Any) -> tuple[Any, ...]:
            return (
                msa_icp_topk_select_prefill(
                    scores,
                    counts,
                    rows,
                    force_begin_blocks=INIT_BLOCKS,
                    force_end_blocks=LOCAL_BLOCKS,
                    backend=self.backend,
                ),
            )

        return Part("select", run, ("scores", "counts", "rows"), ("rows",))

    def prefill_fused(self) -> Part:
        def run(*arrays: Any) -> tuple[Any, ...]:
            return (
                msa_icp_prefill_score_select(
                    *arrays,
                    **self._window(),
                    force_begin_blocks=INIT_BLOCKS,
                    force_end_blocks=LOCAL_BLOCKS,
                ),
            )

        reads = ("queries", "keys", "table", "plan", "counts", "rows")
        return Part("fused", run, reads, ("rows",))

    def _shard(self) -> dict[str, Any]:
        return {
            "rank": RANK,
            "world_size": self.case.world_size,
            "page_size": PAGE_SIZE,
            "decode_query_len": self.case.query_len,
            "backend": self.backend,
            "precision": self.precision,
        }

    def _window(self) -> dict[str, Any]:
        return {
            "rank": RANK,
            "tp": self.case.world_size,
            "enable_pdl": True,
            "backend": self.backend,
            "precision": self.precision,
        }
