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
import jax.numpy as jnp

from msa_icp_jax import (
    IndexerGeometry,
    MSAIcpIndexerPlan,
    MSAIcpScorePlan,
    one_sided,
    rows,
)
from msa_icp_jax.geometry import HEAD_DIM, NUM_HEADS, NUM_SLOTS, TOPK
from msa_icp_jax.ops import decode_score, select
from msa_icp_jax.ops._mosaic import aot
from msa_icp_jax.ops._mosaic.aot import Lowered
from msa_icp_jax.ops._mosaic.launch import Target, building_for
from msa_icp_jax.ops.arguments import Candidates, Shard
from msa_icp_jax.ops.merge import merge_in_slot
from msa_icp_jax.ops.prefill_plan.balance import prefill_work
from msa_icp_torch.programs import comm_of


@dataclasses.dataclass(frozen=True, eq=False)
class Facts:
    """What every kernel of a plan is built for; made by `facts_of`, and told apart by identity.

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

    def received(self, tokens: int) -> jax.ShapeDtypeStruct:
        """Rows by source or by owner."""
        heads = self.geometry.heads_per_rank
        return _array(self.geometry.world_size, heads, tokens, rows.ROW_WORDS)

    def storage(self, tagged: bool) -> jax.ShapeDtypeStruct:
        """All slots of a rank's receive storage."""
        geometry = self.geometry
        row = (rows.TAGGED_WORDS, 2) if tagged else (rows.ROW_WORDS,)
        held = (geometry.world_size, geometry.heads_per_rank, geometry.max_decode_tokens)
        return _array(NUM_SLOTS, *held, *row)

    def plane(self, tokens: int) -> jax.ShapeDtypeStruct:
        """A score plane."""
        return _array(tokens, NUM_HEADS, self.geometry.score_columns, dtype=jnp.float32)

    def queries_and_keys(
        self, tokens: int, pages: tuple[int, ...]
    ) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """Index queries, and index keys in buffers of whole pages of this shape."""
        dtype = jnp.dtype(self.geometry.index_dtype)
        return _array(tokens, NUM_HEADS, HEAD_DIM, dtype=dtype), _array(*pages, dtype=dtype)

    def output(self, tokens: int) -> jax.ShapeDtypeStruct:
        """The ids of the owned heads."""
        return _array(tokens, self.geometry.heads_per_rank, TOPK)

    def lower(self, function: Callable[..., Any], *arguments: Any) -> Lowered:
        """Lowers for the plan's GPU."""
        with building_for(self.target):
            return aot.lower(function, *arguments)


@functools.cache
def facts_of(plan: MSAIcpIndexerPlan, target: Target) -> Facts:
    """The same facts for plans that are equal."""
    return Facts(plan, target)


# ---- decode ----


@dataclasses.dataclass(frozen=True)
class Batch:
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

    @property
    def tokens(self) -> int:
        """T."""
        return self.requests * self.query_len

    def arrays(self, facts: Facts) -> tuple[jax.ShapeDtypeStruct, ...]:
        """index_q, index_k, block_table, seq_lens."""
        return (
            *facts.queries_and_keys(self.tokens, self.pages),
            _array(self.requests, self.table_width),
            _array(self.requests),
        )


@functools.cache
def decode_scores(facts: Facts, batch: Batch, pdl: bool) -> Lowered:
    """``(index_q, index_k, block_table, seq_lens, scores)``; scores are written."""
    geometry = facts.geometry
    layout = geometry.world_size, geometry.page_size, geometry.row_offset

    def run(query: Any, keys: Any, *others: Any) -> Any:
        shard = Shard(keys, facts.rank, *layout)
        return decode_score.decode_scores(query, shard, *others, enable_pdl=pdl, backend="mosaic")

    return facts.lower(run, *batch.arrays(facts), facts.plane(batch.tokens))


@functools.cache
def decode_local(facts: Facts, batch: Batch, pdl: bool) -> Lowered:
    """``(index_q, index_k, block_table, seq_lens, num_valid_pages, scores)`` to rows.

    Scores are written.
    """

    def run(*arrays: Any) -> Any:
        options: dict[str, Any] = {"decode_query_len": batch.query_len, "enable_pdl": pdl}
        return facts.plan.decode_local(*arrays, fused=False, **options)[0]

    arrays = batch.arrays(facts)
    return facts.lower(run, *arrays, _array(batch.tokens), facts.plane(batch.tokens))


@functools.cache
def select_and_publish_rows(
    facts: Facts, tokens: int, tagged: bool, pdl: bool, spin_limit: int
) -> Lowered:
    """``(scores, num_valid_pages, recv_bases, slot, counters)``, to the peers' memory.

    The counters, which are the errors of legacy and the publish generations of tagged rows, are
    written.
    """
    geometry = facts.geometry

    names = ("recv_bases", "errors")
    if tagged:
        names = ("tagged_recv_bases", "publish_generations")

    def run(scores: Any, counts: Any, bases: Any, slot: Any, counters: Any) -> Any:
        comm = one_sided.select_and_publish(
            scores,
            counts,
            comm_of(facts.plan, dict(zip(names, (bases, counters), strict=True))),
            geometry=geometry,
            rank=facts.rank,
            slot=slot,
            tagged=tagged,
            enable_pdl=pdl,
            spin_limit=spin_limit,
        )
        return getattr(comm, names[1])

    scored = (facts.plane(tokens), _array(tokens))
    generations = _array(NUM_SLOTS, NUM_HEADS, geometry.max_decode_tokens)
    counters = generations if tagged else _array(1)
    return facts.lower(run, *scored, _array(geometry.world_size, 2), _array(1), counters)


@functools.cache
def merge_rows(facts: Facts, tokens: int, tagged: bool, pdl: bool, spin_limit: int) -> Lowered:
    """``(recv, num_valid_pages, slot, output, errors[, expected_generations])``.

    All but the counts and the slot are written. A row is looked at up to `spin_limit` times.
    """
    geometry = facts.geometry

    def run(recv: Any, counts: Any, slot: Any, output: Any, errors: Any, *expected: Any) -> Any:
        return merge_in_slot(
            *(recv, counts, output, errors, expected[0] if expected else None),
            slot=slot,
            forced=geometry.forced,
            enable_pdl=pdl,
            backend="mosaic",
            spin_limit=spin_limit,
        )

    counters = (NUM_SLOTS, geometry.heads_per_rank, geometry.max_decode_tokens)
    expected = [_array(*counters)] if tagged else []
    arrays = (facts.storage(tagged), _array(tokens), _array(1), facts.output(tokens), _array(1))
    return facts.lower(run, *arrays, *expected)


# ---- prefill ----


@dataclasses.dataclass(frozen=True)
class Window:
    """Shapes of a prefill call's inputs.

    Attributes:
      tokens: T.
      segments: B, at least 1.
      total_q: query rows of the window plan.
      pages, table_width: as of a `Batch`.
    """

    tokens: int
    segments: int
    total_q: int
    pages: tuple[int, ...]
    table_width: int

    def arrays(self, facts: Facts) -> tuple[Any, ...]:
        """query, index_k, block_table, and the window plan; its bounds decide nothing here."""
        lengths: Any = _array(self.segments)
        plan = MSAIcpScorePlan(lengths, lengths, lengths, lengths, self.total_q, 0, 0)
        with aot.on_cpu():
            work = jax.eval_shape(functools.partial(prefill_work, ctas=facts.target.sms), plan)
        return (
            *facts.queries_and_keys(self.tokens, self.pages),
            _array(self.segments, self.table_width),
            dataclasses.replace(plan, work=work),
        )


@functools.cache
def prefill_local(facts: Facts, window: Window, carrier_tokens: int, fused: bool) -> Lowered:
    """``(query, index_k, block_table, *window plan, num_valid_pages, carrier[, score_scratch])``.

    The carrier and the scratch, which is left out when fused, are written.
    """

    def run(
        query: Any, index_k: Any, table: Any, plan: Any, counts: Any, carrier: Any, *plane: Any
    ) -> Any:
        scratch = plane[0] if plane else None
        return facts.plan.prefill_local(
            query, index_k, table, plan, scratch, counts, carrier, fused=fused
        )

    plane = [] if fused else [facts.plane(window.tokens)]
    carrier = _array(NUM_HEADS, carrier_tokens, rows.ROW_WORDS)
    arrays = window.arrays(facts)
    return facts.lower(run, *arrays, _array(window.tokens), carrier, *plane)


@functools.cache
def prefill_select(facts: Facts, tokens: int, carrier_tokens: int) -> Lowered:
    """``(score_scratch, num_valid_pages, carrier)``, of a window that has no segment."""
    geometry = facts.geometry
    offset = geometry.index_offset(facts.rank)
    candidates = Candidates(geometry.forced, geometry.index_scale, offset)

    def run(scores: Any, counts: Any, carrier: Any) -> Any:
        return select.select_rows(
            scores, counts, carrier, None, candidates, enable_pdl=True, backend="mosaic"
        )

    carrier = _array(NUM_HEADS, carrier_tokens, rows.ROW_WORDS)
    return facts.lower(run, facts.plane(tokens), _array(tokens), carrier)


@functools.cache
def prefill_merge(facts: Facts, tokens: int, received_tokens: int) -> Lowered:
    """``(received, num_valid_pages, output)``; output is written."""
    arrays = (facts.received(received_tokens), _array(tokens), facts.output(tokens))
    return facts.lower(facts.plan.prefill_merge, *arrays)


def _array(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)
