"""The plan's Mosaic kernels, lowered for the shapes of a call; the direct route launches them.

Each function returns the kernels of one link of a chain, made once for the plan, the GPU and the
shapes; its docstring lists the arguments in the order in which they are bound.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.typing import DTypeLike

from msa_icp_jax import (
    IndexerGeometry,
    MSAIcpIndexerPlan,
    MSAIcpScorePlan,
    one_sided,
    rows,
)
from msa_icp_jax.geometry import NUM_HEADS
from msa_icp_jax.ops import decode_score, select
from msa_icp_jax.ops._mosaic import aot
from msa_icp_jax.ops._mosaic.aot import Lowered
from msa_icp_jax.ops._mosaic.launch import Target, building_for
from msa_icp_jax.ops.arguments import Candidates, Shard
from msa_icp_jax.ops.merge import merge_in_slot
from msa_icp_jax.ops.prefill_plan.balance import prefill_work
from msa_icp_jax.shapes import Shapes
from msa_icp_torch.programs import comm_of


@dataclasses.dataclass(frozen=True, eq=False)
class Lowering:
    """What every kernel of a plan is built for; made by `lowering_of`, and told apart by identity.

    Attributes:
      plan: the plan, with a fixed rank and the Mosaic backend.
      target: the GPU.
    """

    plan: MSAIcpIndexerPlan
    target: Target

    @property
    def geometry(self) -> IndexerGeometry:
        """The plan's limits and sizes."""
        return self.plan.geometry

    @property
    def rank(self) -> int:
        """The plan's rank."""
        assert self.plan.rank is not None
        return self.plan.rank

    def shapes(self, pages: tuple[int, ...] | None = None, table_width: int = 0) -> Shapes:
        """Arguments, index keys in buffers of whole pages of this shape."""
        return Shapes(self.geometry, _array, pages, table_width)

    def lower(self, function: Callable[..., Any], *arguments: Any) -> Lowered:
        """Lowers for the plan's GPU."""
        with building_for(self.target):
            return aot.lower(function, *arguments)


@functools.cache
def lowering_of(plan: MSAIcpIndexerPlan, target: Target) -> Lowering:
    """The same lowering for plans that are equal."""
    return Lowering(plan, target)


# ---- decode ----


@dataclasses.dataclass(frozen=True)
class DecodeShapes:
    """Shapes of a decode call's inputs.

    Attributes:
      requests: B.
      query_len: query tokens of a request.
      pages: the shape of the buffer of whole pages around the index keys.
      table_width: columns of the block table.
    """

    requests: int
    query_len: int
    pages: tuple[int, ...]
    table_width: int

    def arrays(self, lowering: Lowering) -> dict[str, Any]:
        """The call's arguments by name."""
        shapes = lowering.shapes(self.pages, self.table_width)
        return shapes.decode(self.requests, self.query_len)


@functools.cache
def decode_scores(lowering: Lowering, shapes: DecodeShapes, pdl: bool) -> Lowered:
    """``(index_q, index_k, block_table, seq_lens, scores)``; scores are written."""
    geometry = lowering.geometry
    layout = geometry.world_size, geometry.page_size, geometry.row_offset

    def run(query: Any, keys: Any, *others: Any) -> Any:
        shard = Shard(keys, lowering.rank, *layout)
        return decode_score.decode_scores(query, shard, *others, enable_pdl=pdl, backend="mosaic")

    names = ("index_q", "index_k", "block_table", "seq_lens", "scores")
    return lowering.lower(run, *(shapes.arrays(lowering)[name] for name in names))


@functools.cache
def decode_local(lowering: Lowering, shapes: DecodeShapes, pdl: bool) -> Lowered:
    """``(index_q, index_k, block_table, seq_lens, num_valid_pages, scores)`` to rows.

    Scores are written.
    """

    def run(*arrays: Any) -> Any:
        options: dict[str, Any] = {"decode_query_len": shapes.query_len, "enable_pdl": pdl}
        return lowering.plan.decode_local(*arrays, fused=False, **options)[0]

    arrays = shapes.arrays(lowering)
    del arrays["output"]
    return lowering.lower(run, *arrays.values())


@functools.cache
def select_and_publish_rows(
    lowering: Lowering, tokens: int, tagged: bool, pdl: bool, spin_limit: int
) -> Lowered:
    """``(scores, num_valid_pages, recv_bases, slot, counters)``, to the peers' memory.

    The counters, which are the errors of legacy and the publish generations of tagged rows, are
    written.
    """
    geometry = lowering.geometry

    names = ("recv_bases", "errors")
    if tagged:
        names = ("tagged_recv_bases", "publish_generations")

    def run(scores: Any, counts: Any, bases: Any, slot: Any, counters: Any) -> Any:
        comm = one_sided.select_and_publish(
            scores,
            counts,
            comm_of(lowering.plan, dict(zip(names, (bases, counters), strict=True))),
            geometry=geometry,
            rank=lowering.rank,
            slot=slot,
            tagged=tagged,
            enable_pdl=pdl,
            spin_limit=spin_limit,
        )
        return getattr(comm, names[1])

    shapes = lowering.shapes()
    scored = (shapes.plane("scores", tokens), shapes.int32("num_valid_pages", tokens))
    bases, counters = shapes.comm(*names).values()
    return lowering.lower(run, *scored, bases, shapes.int32("slot", 1), counters)


@functools.cache
def merge_rows(
    lowering: Lowering, tokens: int, tagged: bool, pdl: bool, spin_limit: int
) -> Lowered:
    """``(recv, num_valid_pages, slot, output, errors[, expected_generations])``.

    All but the counts and the slot are written. A row is looked at up to `spin_limit` times.
    """
    geometry = lowering.geometry

    def run(recv: Any, counts: Any, slot: Any, output: Any, errors: Any, *expected: Any) -> Any:
        return merge_in_slot(
            *(recv, counts, output, errors, expected[0] if expected else None),
            slot=slot,
            forced=geometry.forced,
            enable_pdl=pdl,
            backend="mosaic",
            spin_limit=spin_limit,
        )

    shapes = lowering.shapes()
    counts, slot = shapes.int32("num_valid_pages", tokens), shapes.int32("slot", 1)
    names = ("tagged_recv", "errors", "expected_generations") if tagged else ("recv", "errors")
    recv, *counters = shapes.comm(*names).values()
    return lowering.lower(run, recv, counts, slot, shapes.output(tokens), *counters)


# ---- prefill ----


@dataclasses.dataclass(frozen=True)
class PrefillShapes:
    """Shapes of a prefill call's inputs.

    Attributes:
      tokens: T.
      segments: B, at least 1.
      total_q: query rows of the window plan.
      pages, table_width: as of `DecodeShapes`.
    """

    tokens: int
    segments: int
    total_q: int
    pages: tuple[int, ...]
    table_width: int

    def arrays(self, lowering: Lowering) -> dict[str, Any]:
        """The call's arguments by name; the bounds of the window plan decide nothing here."""
        shapes = lowering.shapes(self.pages, self.table_width)
        lengths = shapes.int32("lengths", self.segments)
        plan = MSAIcpScorePlan(lengths, lengths, lengths, lengths, self.total_q, 0, 0)
        with aot.on_cpu():
            work = jax.eval_shape(functools.partial(prefill_work, ctas=lowering.target.sms), plan)
        return shapes.prefill(dataclasses.replace(plan, work=work), self.tokens)


@functools.cache
def prefill_local(
    lowering: Lowering, shapes: PrefillShapes, carrier_tokens: int, fused: bool
) -> Lowered:
    """``(query, index_k, block_table, *window plan, num_valid_pages, carrier[, score_scratch])``.

    The carrier and the scratch, which is left out when fused, are written.
    """

    def run(
        query: Any, index_k: Any, table: Any, plan: Any, counts: Any, carrier: Any, *plane: Any
    ) -> Any:
        scratch = plane[0] if plane else None
        return lowering.plan.prefill_local(
            query, index_k, table, plan, scratch, counts, carrier, fused=fused
        )

    arrays = shapes.arrays(lowering)
    names = ("query", "index_k", "block_table", "window_plan", "num_valid_pages")
    carrier = _carrier(lowering.shapes(), carrier_tokens)
    plane = [] if fused else [arrays["score_scratch"]]
    return lowering.lower(run, *(arrays[name] for name in names), carrier, *plane)


@functools.cache
def prefill_select(lowering: Lowering, tokens: int, carrier_tokens: int) -> Lowered:
    """``(score_scratch, num_valid_pages, carrier)``, of a window that has no segment."""
    geometry = lowering.geometry
    offset = geometry.index_offset(lowering.rank)
    candidates = Candidates(geometry.forced, geometry.index_scale, offset)

    def run(scores: Any, counts: Any, carrier: Any) -> Any:
        return select.select_rows(
            scores, counts, carrier, None, candidates, enable_pdl=True, backend="mosaic"
        )

    shapes = lowering.shapes()
    scored = (shapes.plane("scores", tokens), shapes.int32("num_valid_pages", tokens))
    return lowering.lower(run, *scored, _carrier(shapes, carrier_tokens))


@functools.cache
def prefill_merge(lowering: Lowering, tokens: int, received_tokens: int) -> Lowered:
    """``(received, num_valid_pages, output)``; output is written."""
    shapes = lowering.shapes()
    counts, output = shapes.int32("num_valid_pages", tokens), shapes.output(tokens)
    return lowering.lower(
        lowering.plan.prefill_merge, shapes.received(received_tokens), counts, output
    )


def _carrier(shapes: Shapes, tokens: int) -> jax.ShapeDtypeStruct:
    carrier: jax.ShapeDtypeStruct = shapes.int32("carrier", NUM_HEADS, tokens, rows.ROW_WORDS)
    return carrier


def _array(_: str, shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
