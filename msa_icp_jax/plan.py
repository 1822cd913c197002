"""The plan: strings score, select, exchange and merge into the decode and prefill chains.

Its methods are per-rank programs with local shapes, to be called inside the caller's
`jax.shard_map` over the icp axis, or inside `jax.vmap(..., axis_name=...)`, which runs all ranks on
one device. Global shapes and their PartitionSpecs over the axis:

  index_k   index_dtype [pages, P, 128]     P(None, icp)
  scores    float32 [T, 4, W columns]       P(None, None, icp)
  carrier   int32 [4, W T, 33]              P(None, icp)
  received  int32 [W, 4, T, 33]             P(None, icp)
  output    int32 [T, 4, 16]                P(None, icp)

and everything else replicated. `MSAIcpIndexerPlan.decode_program` and `prefill_program` give the
chains already wrapped, jitted and donating.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from msa_icp_jax import checks, one_sided, programs, rows
from msa_icp_jax.ambient import check_unsplit, own_mesh
from msa_icp_jax.backend import check_precision, resolve_backend
from msa_icp_jax.checks import AtLeast, Ranks
from msa_icp_jax.comm import (
    COLLECTIVE,
    ONE_SIDED,
    MSAIcpComm,
    check_comm,
    comm_specs,
    exchange,
    free_comm,
    mark_of,
    mark_rows,
    place_collective_comm,
    place_one_sided_comm,
    resolve_transport,
    store_in_slot,
)
from msa_icp_jax.geometry import (
    HEAD_DIM,
    MAX_INT32,
    MAX_SUM,
    NUM_HEADS,
    NUM_SLOTS,
    TOPK,
    IndexerGeometry,
    check_decode_query_len,
    check_decode_tokens,
    check_prefill_tokens,
    check_window,
)
from msa_icp_jax.ops.arguments import Shard, check_index_k
from msa_icp_jax.ops.decode_score import (
    decode_scores,
    msa_icp_decode_pool_bytes,
)
from msa_icp_jax.ops.merge import merge_in_slot, merge_once
from msa_icp_jax.ops.prefill_plan import MSAIcpScorePlan, msa_icp_index_score_sharded_plan_device
from msa_icp_jax.ops.prefill_score import (
    msa_icp_prefill_pool_bytes,
    score_and_select,
)
from msa_icp_jax.ops.select import (
    by_owner,
    select_by_owner,
)
from msa_icp_jax.programs import (
    DecodeProgram,
    DecodeProgramWithComm,
    PrefillProgram,
    WriteProgram,
)
from msa_icp_jax.typing import (
    Backend,
    IndexDtype,
    Precision,
    ResolvedBackend,
    ResolvedTransport,
    Transport,
)

if TYPE_CHECKING:
    from msa_icp_jax.arrays import Array, Float32, IndexFloat, Int32

# Requests from which a fused decode beats score + select, by measurement; None: never. The fused
# decode is score + select over a plane of its own, since a kernel that kept lists instead took
# longer on an H200: 1.17 times for 1 request of 1M keys (W 4), 1.29 for 8 and 1.17 for 32 of 128K
# keys (W 4), 1.36 for 32 of 32K keys and 1.18 for 64 of 64K keys (W 2).
_FUSED_DECODE_MIN_BATCH: dict[str, int | None] = {"xla": None, "mosaic": None}

_LOGGER = logging.getLogger("msa_icp_jax")


def prepare_msa_icp_indexer(
    *,
    world_size: int,
    rank: int | None = None,
    num_index_heads: int,
    page_size: int,
    init_blocks: int,
    local_blocks: int,
    max_decode_tokens: int,
    max_decode_query_len: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    max_model_len: int,
    num_sparse_layers: int,
    device: jax.Device | None = None,
    backend: Backend = "auto",
    precision: Precision = "auto",
    axis_name: str = "icp",
    row_offset: int = 0,
    transport: Transport = COLLECTIVE,
    index_dtype: IndexDtype = "float8_e4m3fn",
) -> MSAIcpIndexerPlan:
    """Plans the MiniMax-M3 index branch for one indexer context parallel group.

    Args:
      world_size: ranks W of the group, 2 or 4.
      rank: this rank; None takes it from the icp axis (then one executable serves every rank).
      num_index_heads: 4.
      page_size: tokens of a page, 128 or 256.
      init_blocks: blocks at the start of a context that are always chosen, >= 0.
      local_blocks: blocks at a query's end that are always chosen, >= 0; at most 16 together.
      max_decode_tokens: query tokens of one decode step at most (the receive capacity C).
      max_decode_query_len: query tokens of one decode request at most, 1 to 8.
      max_num_batched_tokens: query tokens of one prefill call at most.
      max_num_seqs: requests or segments of one call at most.
      max_model_len: longest context in tokens.
      num_sparse_layers: sparse layers that share the three receive slots, >= 1.
      device: the device that `backend="auto"` looks at; None is JAX's default.
      backend: "auto" (Mosaic kernels on Hopper, else XLA), "mosaic" or "xla".
      precision: "auto" (decode exact, prefill fast), "exact" or "fast". It matters on Mosaic only:
        XLA is always exact. Decode and prefill agree bit for bit only in "exact".
      axis_name: the mesh (or vmap) axis of the group.
      row_offset: first index-key row inside a compound page, a multiple of 8.
      transport: how decode's rows reach the ranks that own their heads. "collective" is
        `lax.all_to_all`. "one-sided" stores them into the owners' memory, which `init_comm(mesh)`
        makes; it needs the Mosaic backend and GPUs that reach each other's memory. "auto" is
        one-sided for the calls that get such a comm, where backend and GPUs allow it, and else
        collective.
      index_dtype: of index keys and queries, "float8_e4m3fn" or "bfloat16".

    Returns:
      A frozen, hashable MSAIcpIndexerPlan.

    Raises:
      TypeError, ValueError: an argument is outside its range.
    """
    geometry = IndexerGeometry(
        world_size=world_size,
        num_index_heads=num_index_heads,
        page_size=page_size,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        max_decode_tokens=max_decode_tokens,
        max_decode_query_len=max_decode_query_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        num_sparse_layers=num_sparse_layers,
        row_offset=row_offset,
        index_dtype=index_dtype,
    )
    if rank is not None:
        rank = checks.integer("rank", rank, 0, geometry.world_size - 1)
    checks.device("device", device)
    check_precision(precision)
    if not isinstance(axis_name, str):
        raise TypeError(f"axis_name must be a str, got {axis_name!r}")
    backend = resolve_backend(backend, device)
    plan = MSAIcpIndexerPlan(
        geometry=geometry,
        rank=rank,
        backend=backend,
        precision=precision,
        axis_name=axis_name,
        transport=resolve_transport(transport, backend),
        comm_optional=transport != ONE_SIDED,
    )
    _LOGGER.info(
        "prepared world_size %d, page_size %d: backend %s, precision %s, transport %s",
        geometry.world_size,
        geometry.page_size,
        plan.backend,
        plan.precision,
        plan.transport,
    )
    return plan


@dataclasses.dataclass(frozen=True)
class MSAIcpIndexerPlan:
    """One group's indexer; build it with `prepare_msa_icp_indexer`.

    Attributes:
      geometry: the validated limits and sizes.
      rank: this rank, or None to take it from the icp axis.
      backend: "mosaic" or "xla", as resolved.
      precision: "auto", "exact" or "fast".
      axis_name: the mesh axis of the group.
      transport: "collective" or "one-sided", as resolved.
      comm_optional: whether decode runs without a comm, by the collective then.
    """

    geometry: IndexerGeometry
    rank: int | None
    backend: ResolvedBackend
    precision: Precision
    axis_name: str
    transport: ResolvedTransport
    comm_optional: bool

    @property
    def fused_decode_min_batch(self) -> int | None:
        """Requests from which decode is faster fused, by measurement; None where it never is."""
        return _FUSED_DECODE_MIN_BATCH[self.backend]

    @property
    def fused_prefill(self) -> bool:
        """Whether prefill is faster without the caller's score scratch: it never is."""
        return False

    def decode(
        self,
        index_q: IndexFloat[Array, "T 4 128"],
        index_k: IndexFloat[Array, "pages R 128"],
        block_table: Int32[Array, "B width"],
        seq_lens: Int32[Array, " B"],
        num_valid_pages: Int32[Array, " T"],
        scores: Float32[Array, "rows 4 columns"] | None = None,
        output: Int32[Array, "out_rows hpr 16"] | None = None,
        *,
        comm: MSAIcpComm | None = None,
        slot: int | Int32[Array, ""] = 0,
        tagged: bool = False,
        decode_query_len: int,
        enable_pdl: bool = True,
        fused: bool | None = None,
    ) -> tuple[
        Int32[Array, "out_rows hpr 16"],
        Float32[Array, "rows 4 columns"] | None,
        MSAIcpComm | None,
    ]:
        """Chooses the 16 key blocks of every decode token for the heads this rank owns.

        Args:
          index_q: index_dtype [T, 4, 128], T = B * decode_query_len, the same on every rank.
          index_k: index_dtype [pages, R, 128], this rank's rows (or compound pages).
          block_table: int32 [B, width].
          seq_lens: int32 [B], keys of each request; 0 for graph padding.
          num_valid_pages: int32 [T], visible *blocks* of each token: position // 128 + 1, 0 for
            padding.
          scores: float32 [>= T, 4, columns], see `decode_score_shape`; None: a fresh one.
          output: int32 [>= T, hpr, 16] to write into; None: a fresh one.
          comm: persistent receive storage; None (the ordinary way) gives the same ids without it.
          slot: running count of sparse-layer calls, taken mod 3: an int in [0, 2^31 - 1] or a
            traced int32 scalar. Keep the count itself mod 3, or wrap it at another multiple of 3
            below 2^31: an int32 that overflows goes from slot 1 to slot 1 again.
          tagged: exchange tagged rows; needs at least two sparse layers.
          decode_query_len: query tokens of every request.
          enable_pdl: let kernel launches overlap their predecessors' ends (Mosaic only).
          fused: leave `scores` alone (it is returned as it came) and score into a temporary plane
            of 4 heads x columns x 4 bytes a token; None: from `fused_decode_min_batch` requests up.

        Returns:
          (output, scores, comm): ids int32 ascending with a -1 tail; the score plane with the
          requests' columns written; the storage after the call (None if None came).

        Raises:
          TypeError, ValueError: an argument has the wrong dtype, shape or value, or the icp axis is
            not bound here, has another size, or is bound while the plan has a fixed rank.
        """
        is_one_sided = self._is_one_sided(comm)
        if not is_one_sided or self.rank is None or self._axis_size() is not None:
            self._require_axis("decode")
        checks.array("num_valid_pages", num_valid_pages, jnp.int32, None)
        tokens, heads = num_valid_pages.shape[0], self.geometry.heads_per_rank
        if output is not None:
            checks.array("output", output, jnp.int32, AtLeast(tokens), heads, TOPK)
        count = self._check_exchange(comm, slot, tagged, enable_pdl)
        # Rows of one call have nothing to be told apart from, and legacy ones are half as long.
        tagged = tagged and comm is not None
        options: dict[str, Any] = {"slot": slot, "tagged": tagged, "enable_pdl": enable_pdl}
        found, scores, comm = self.decode_local(
            index_q,
            index_k,
            block_table,
            seq_lens,
            num_valid_pages,
            scores,
            comm=comm,
            decode_query_len=decode_query_len,
            fused=fused,
            marked=comm is not None,
            **options,
        )
        received = found
        if found is not None:
            received = exchange(found, self.axis_name)
            if comm is not None:
                received = mark_rows(received, count % NUM_SLOTS, -1)
        output, comm = self.decode_merge(received, num_valid_pages, output, comm=comm, **options)
        return output, scores, comm

    def decode_local(
        self,
        index_q: IndexFloat[Array, "T 4 128"],
        index_k: IndexFloat[Array, "pages R 128"],
        block_table: Int32[Array, "B width"],
        seq_lens: Int32[Array, " B"],
        num_valid_pages: Int32[Array, " T"],
        scores: Float32[Array, "rows 4 columns"] | None = None,
        *,
        comm: MSAIcpComm | None = None,
        slot: int | Int32[Array, ""] = 0,
        tagged: bool = False,
        decode_query_len: int,
        enable_pdl: bool = True,
        fused: bool | None = None,
        marked: bool = False,
    ) -> tuple[
        Int32[Array, "W hpr T *row"] | None,
        Float32[Array, "rows 4 columns"] | None,
        MSAIcpComm | None,
    ]:
        """Scores a decode against this rank's keys and keeps every token's local Top16.

        `decode_merge` takes the rows of all ranks as they are without a mark.

        Args:
          index_q, index_k, block_table, seq_lens, num_valid_pages, scores, decode_query_len,
            enable_pdl, fused: as in `decode`.
          comm: persistent receive storage, whose publish counters tag the rows; None: all tags
            are 1.
          slot, tagged: as in `decode`.
          marked: mark the rows with the call, as `msa_icp_jax.comm.mark_rows` does; the receiver
            takes the mark of its own call off, so that rows of another call become faults.

        Returns:
          (rows, scores, comm): candidate rows to send, by owner, int32 [W, hpr, T, 33] or tagged
          [W, hpr, T, 32, 2], or None where the select has stored them at their owners (a comm of
          the one-sided transport); the score plane with the requests' columns written; the storage,
          of tagged rows with the publish counters advanced.

        Raises:
          TypeError, ValueError: an argument has the wrong dtype, shape or value.
        """
        tokens = self._check_decode(
            index_q,
            index_k,
            block_table,
            seq_lens,
            num_valid_pages,
            scores,
            decode_query_len,
        )
        count = self._check_exchange(comm, slot, tagged, enable_pdl)
        fused = self._is_decode_fused(block_table.shape[0], fused)
        plane = scores
        if plane is None or fused:
            shape = (tokens, NUM_HEADS, self.geometry.score_columns)
            plane = jnp.full(shape, -jnp.inf, jnp.float32)
        launch: dict[str, Any] = {"enable_pdl": enable_pdl, "backend": self.backend}
        shard = self._shard(index_k)
        plane = decode_scores(index_q, shard, block_table, seq_lens, plane, **launch)
        if comm is not None and self._is_one_sided(comm):
            found = None
            if tokens:
                options = self._one_sided_options(count, tagged, enable_pdl)
                comm = one_sided.select_and_publish(plane, num_valid_pages, comm, **options)
        else:
            slot, candidates = count % NUM_SLOTS, shard.candidates(self.geometry.forced)
            if not tagged:
                generations = None
            elif comm is None:
                generations = jnp.zeros((NUM_SLOTS, NUM_HEADS, tokens), jnp.int32)
            else:
                generations = comm.publish_generations
            # Tags get their mark before the select, whose rows then go as they are.
            found, generations = select_by_owner(
                *(plane, num_valid_pages, candidates, generations, slot, shard.world_size),
                mark=mark_of(slot, tokens, tagged=True) if marked else None,
                **launch,
            )
            if marked and not tagged:
                found = mark_rows(found, slot, 1)
            if comm is not None and generations is not None:
                comm = dataclasses.replace(comm, publish_generations=generations)
        return found, scores if fused else plane, comm

    def decode_merge(
        self,
        received: Int32[Array, "W hpr C *row"] | None,
        num_valid_pages: Int32[Array, " T"],
        output: Int32[Array, "out_rows hpr 16"] | None = None,
        *,
        comm: MSAIcpComm | None = None,
        slot: int | Int32[Array, ""] = 0,
        tagged: bool = False,
        enable_pdl: bool = True,
    ) -> tuple[Int32[Array, "out_rows hpr 16"], MSAIcpComm | None]:
        """Merges every rank's candidates of the owned heads.

        Args:
          received: int32 [W, hpr, T, 33] or tagged [W, hpr, T, 32, 2], by source rank: what
            `decode_local` gave there. None where it gave None: the merge waits for the rows.
          num_valid_pages: int32 [T], visible blocks of each token.
          output: int32 [>= T, hpr, 16] to write into; None: a fresh one of T rows.
          comm: the storage that `decode_local` returned, through which the rows go; None: they are
            merged as they came.
          slot, tagged, enable_pdl: as in `decode`.

        Returns:
          (output, comm): ids int32 ascending with a -1 tail, and the storage after the call.

        Raises:
          TypeError, ValueError: an argument has the wrong dtype, shape or value.
        """
        geometry = self.geometry
        count = self._check_exchange(comm, slot, tagged, enable_pdl)
        checks.array("num_valid_pages", num_valid_pages, jnp.int32, None)
        tokens, heads = num_valid_pages.shape[0], geometry.heads_per_rank
        most, limit = geometry.max_decode_tokens, "the plan's max_decode_tokens"
        checks.integer("T = num_valid_pages.shape[0]", tokens, 0, most, limit=limit)
        if output is not None:
            checks.array("output", output, jnp.int32, AtLeast(tokens), heads, TOPK)
        if comm is not None and self._is_one_sided(comm):
            if received is not None:
                raise ValueError("received must be None for rows stored at their owners, got rows")
            if not tokens:
                return jnp.zeros((0, heads, TOPK), jnp.int32) if output is None else output, comm
            options = self._one_sided_options(count, tagged, enable_pdl)
            return one_sided.merge_published(num_valid_pages, output, comm, **options)
        row = (rows.TAGGED_WORDS, 2) if tagged else (rows.ROW_WORDS,)
        ranks = Ranks(geometry.world_size)
        checks.array("received", received, jnp.int32, ranks, heads, tokens, *row)
        assert received is not None  # as checked
        merge: dict[str, Any] = {
            "forced": geometry.forced,
            "enable_pdl": enable_pdl,
            "backend": self.backend,
        }
        if comm is None:
            tags = jnp.ones((heads, tokens), jnp.int32) if tagged else None
            return merge_once(received, num_valid_pages, output, tags, **merge), None
        comm = store_in_slot(comm, count % NUM_SLOTS, received, tagged)
        merged = merge_in_slot(
            comm.tagged_recv if tagged else comm.recv,
            num_valid_pages,
            output,
            comm.errors,
            comm.expected_generations if tagged else None,
            slot=count,
            **merge,
        )
        changed: dict[str, Any] = {
            "tagged_recv" if tagged else "recv": merged.recv_slot,
            "errors": merged.errors,
        }
        if tagged:
            changed["expected_generations"] = merged.expected_generations
        return merged.output, dataclasses.replace(comm, **changed)

    def prefill_window_plan(
        self,
        qo_segment_lens: Int32[Array, " B"],
        kv_segment_lens: Int32[Array, " B"],
        qo_offset: Int32[Array, " B"],
        *,
        total_q: int,
        max_query_len: int,
        max_seq_len: int,
    ) -> MSAIcpScorePlan:
        """Builds the plan of one prefill query window, once per step, for every layer.

        Query row i of segment b is the window's row ``sum(qo_segment_lens[:b]) + i`` and sits at
        position ``qo_offset[b] + i`` of its request. Zero-length segments are allowed. Nothing is
        read back to the host; the bounds are static, so they (not the lengths) decide what is
        compiled.

        Args:
          qo_segment_lens: int32 [B], query tokens of each segment in this window.
          kv_segment_lens: int32 [B], keys of each segment.
          qo_offset: int32 [B], position of each segment's first query in this window.
          total_q: query rows of the window at most.
          max_query_len: query tokens of one segment at most.
          max_seq_len: keys of one segment at most.

        Returns:
          An MSAIcpScorePlan, whose arrays a program takes as they are.

        Raises:
          TypeError, ValueError: an argument has the wrong dtype or shape, or a bound is above the
            plan's max_num_seqs, max_num_batched_tokens or max_model_len.
        """
        checks.array("qo_segment_lens", qo_segment_lens, jnp.int32, None)
        checks.array("kv_segment_lens", kv_segment_lens, jnp.int32, qo_segment_lens.shape[0])
        check_unsplit(qo_segment_lens, kv_segment_lens)
        segments = qo_segment_lens.shape[0]
        bounds = check_window(self.geometry, segments, total_q, max_query_len, max_seq_len)
        return msa_icp_index_score_sharded_plan_device(
            qo_segment_lens,
            kv_segment_lens,
            _prefix_sums(qo_segment_lens),
            _prefix_sums(kv_segment_lens),
            qo_offset,
            NUM_HEADS,
            **bounds,
            backend=self.backend,
        )

    def prefill_local(
        self,
        query: IndexFloat[Array, "T 4 128"],
        index_k: IndexFloat[Array, "pages R 128"],
        block_table: Int32[Array, "B width"],
        window_plan: MSAIcpScorePlan,
        score_scratch: Float32[Array, "rows 4 columns"] | None,
        num_valid_pages: Int32[Array, " T"],
        carrier_view: Int32[Array, "4 carrier_rows 33"],
        *,
        fused: bool | None = None,
    ) -> tuple[Int32[Array, "4 carrier_rows 33"], Float32[Array, "rows 4 columns"] | None]:
        """Scores a window against this rank's keys and keeps every query's local Top16.

        Args:
          query: index_dtype [T, 4, 128], the same on every rank.
          index_k: index_dtype [pages, R, 128], this rank's rows (or compound pages).
          block_table: int32 [B, width].
          window_plan: from `prefill_window_plan`, total_q <= T.
          score_scratch: float32 [>= T, 4, columns], see `prefill_score_shape`; may be None when
            fused.
          num_valid_pages: int32 [T], visible *blocks* of each query row, 0 for padding rows
            (`MSAIcpScorePlan.num_valid_pages` computes it).
          carrier_view: int32 [4, >= T, 33] to write into.
          fused: leave `score_scratch` alone (it is returned as it came) and score into a temporary
            plane of 4 heads x columns x 4 bytes a token; None: `fused_prefill`, or where
            `score_scratch` is None.

        Returns:
          (carrier, score_scratch), candidate rows head-major and the scratch as it is now: what
          the selection had to read, not every score.

        Raises:
          TypeError, ValueError: an argument has the wrong dtype, shape or value.
        """
        self._check_prefill(query, index_k, block_table, window_plan, num_valid_pages)
        tokens = query.shape[0]
        checks.array(
            "carrier_view", carrier_view, jnp.int32, NUM_HEADS, AtLeast(tokens), rows.ROW_WORDS
        )
        if fused is None:
            fused = self.fused_prefill or score_scratch is None
        checks.flag("fused", fused)
        if score_scratch is not None:
            self._check_plane("score_scratch", score_scratch, tokens)
        elif not fused:
            raise ValueError(
                "score_scratch must be a float32 array of prefill_score_shape() when fused=False, "
                "got None"
            )
        geometry = self.geometry
        carrier, plane = score_and_select(
            query,
            self._shard(index_k),
            block_table,
            window_plan,
            num_valid_pages,
            carrier_view,
            None if fused else score_scratch,
            geometry.forced,
            columns=geometry.score_columns,
            enable_pdl=True,
            backend=self.backend,
            precision=self.precision,
        )
        return carrier, score_scratch if fused else plane

    def prefill_exchange(
        self, carrier: Int32[Array, "4 carrier_rows 33"]
    ) -> Int32[Array, "W hpr C 33"]:
        """Sends each head's candidate rows to its owner: the one collective of a layer.

        Args:
          carrier: int32 [4, T, 33], from `prefill_local`.

        Returns:
          received int32 [W, hpr, T, 33], by source rank.

        Raises:
          TypeError, ValueError: the carrier has the wrong dtype or shape, or the icp axis is not
            bound here, has another size, or is bound while the plan has a fixed rank.
        """
        self._require_axis("prefill_exchange")
        checks.array("carrier", carrier, jnp.int32, NUM_HEADS, None, rows.ROW_WORDS)
        return exchange(by_owner(carrier, self.geometry.world_size), self.axis_name)

    def prefill_merge(
        self,
        received: Int32[Array, "W hpr C *row"],
        num_valid_pages: Int32[Array, " T"],
        output: Int32[Array, "out_rows hpr 16"],
    ) -> Int32[Array, "out_rows hpr 16"]:
        """Merges every rank's candidates of the owned heads.

        Args:
          received: int32 [W, hpr, >= T, 33], from `prefill_exchange`.
          num_valid_pages: int32 [T], visible blocks of each query row; 0 answers [0, -1, ...].
          output: int32 [>= T, hpr, 16] to write into.

        Returns:
          output, ids ascending with a -1 tail.

        Raises:
          TypeError, ValueError: an argument has the wrong dtype or shape.
        """
        geometry = self.geometry
        checks.array("num_valid_pages", num_valid_pages, jnp.int32, None)
        tokens = num_valid_pages.shape[0]
        checks.array(
            "received",
            received,
            jnp.int32,
            Ranks(geometry.world_size),
            geometry.heads_per_rank,
            AtLeast(tokens),
            rows.ROW_WORDS,
        )
        checks.array("output", output, jnp.int32, AtLeast(tokens), geometry.heads_per_rank, TOPK)
        return merge_once(
            received,
            num_valid_pages,
            output,
            forced=geometry.forced,
            prefill=True,
            backend=self.backend,
        )

    def prefill(
        self,
        query: IndexFloat[Array, "T 4 128"],
        index_k: IndexFloat[Array, "pages R 128"],
        block_table: Int32[Array, "B width"],
        window_plan: MSAIcpScorePlan,
        score_scratch: Float32[Array, "rows 4 columns"] | None,
        num_valid_pages: Int32[Array, " T"],
        carrier_view: Int32[Array, "4 carrier_rows 33"],
        output: Int32[Array, "out_rows hpr 16"],
        *,
        fused: bool | None = None,
    ) -> tuple[
        Int32[Array, "out_rows hpr 16"],
        Int32[Array, "4 carrier_rows 33"],
        Float32[Array, "rows 4 columns"] | None,
    ]:
        """`prefill_local`, `prefill_exchange` and `prefill_merge` in one.

        Args:
          query, index_k, block_table, window_plan, score_scratch, num_valid_pages, carrier_view,
            fused: as in `prefill_local`.
          output: int32 [>= T, hpr, 16] to write into.

        Returns:
          (output, carrier, score_scratch).

        Raises:
          TypeError, ValueError: as the three parts do.
        """
        self._require_axis("prefill")
        checks.array("num_valid_pages", num_valid_pages, jnp.int32, None)
        tokens = num_valid_pages.shape[0]
        checks.array(
            "output", output, jnp.int32, AtLeast(tokens), self.geometry.heads_per_rank, TOPK
        )
        carrier, score_scratch = self.prefill_local(
            query,
            index_k,
            block_table,
            window_plan,
            score_scratch,
            num_valid_pages,
            carrier_view,
            fused=fused,
        )
        received = self.prefill_exchange(carrier)
        return self.prefill_merge(received, num_valid_pages, output), carrier, score_scratch

    def init_comm(self, mesh: Mesh | None = None) -> MSAIcpComm:
        """Receive storage, zeroed; create it once, and anew only to recover.

        With the one-sided transport every rank's rows lie on its GPU outside XLA's memory, which is
        the comm's own until `free_comm` or the end of the process; its arrays have the addresses.
        Storage made anew has others, and no program is traced again for them. Every process of the
        mesh makes it together.

        Args:
          mesh: a mesh with the icp axis: all ranks' storage, placed by `comm_specs`. On a larger
            mesh (data x icp, say) every group has storage of its own, so the copies of these arrays
            along the other axes differ: hand them to `jax.shard_map` as they are. None: one rank's
            arrays, of the collective transport.

        Raises:
          TypeError, ValueError: the mesh has no such axis of the plan's size, or there is none for
            a plan whose transport is "one-sided".
          peer_storage.Unreachable: GPUs of a group do not reach each other's memory, or lie on
            several hosts.
          peer_storage.DriverError: the CUDA driver could not allocate or open the storage.
        """
        programs.check_mesh(self, mesh)
        one_sided, sizes = self.transport == ONE_SIDED, self._comm_sizes()
        if mesh is None:
            if one_sided:
                raise ValueError(
                    'mesh must be a jax.sharding.Mesh for a plan with transport "one-sided", whose '
                    "ranks' GPUs store into each other's memory, got None"
                )
            return MSAIcpComm.zeros(*sizes)
        place = place_one_sided_comm if one_sided else place_collective_comm
        with own_mesh(mesh):
            return place(mesh, self.axis_name, *sizes)

    def free_comm(self, comm: MSAIcpComm) -> None:
        """Releases receive storage from `init_comm(mesh)`, on every process of the mesh together.

        Args:
          comm: as the last call returned it. It waits for that call; the arrays are deleted.

        Raises:
          TypeError, ValueError: it is no comm, or not one of this process.
          RuntimeError: its arrays were donated or freed already.
        """
        free_comm(comm)

    def comm_specs(self) -> MSAIcpComm:
        """PartitionSpecs of a global MSAIcpComm over the icp axis, in an MSAIcpComm."""
        return comm_specs(self.axis_name, one_sided=self.transport == ONE_SIDED)

    def check_comm(self, comm: MSAIcpComm) -> None:
        """Raises, naming the array, unless `comm` is one rank's storage of this plan.

        Rows of the one-sided transport lie elsewhere: `recv` and `tagged_recv` are empty.

        Args:
          comm: what is checked, concrete or traced; only dtypes and shapes are looked at.

        Raises:
          TypeError, ValueError: it is no MSAIcpComm, or an array of it has another dtype or shape.
        """
        check_comm(comm, *self._comm_sizes(), one_sided=self.transport == ONE_SIDED)

    def _comm_sizes(self) -> tuple[int, int]:
        return self.geometry.world_size, self.geometry.max_decode_tokens

    def decode_score_shape(self) -> tuple[int, int, int]:
        """(max_decode_tokens, 4, columns): one rank's decode score plane, float32."""
        return (self.geometry.max_decode_tokens, NUM_HEADS, self.geometry.score_columns)

    def prefill_window_tokens(self) -> int:
        """Query tokens of one prefill window: what keeps its score scratch within 256 MiB."""
        return self.geometry.window_tokens

    def prefill_score_shape(self) -> tuple[int, int, int]:
        """(window_tokens, 4, columns): one rank's prefill score scratch, float32."""
        return (self.geometry.window_tokens, NUM_HEADS, self.geometry.score_columns)

    def decode_pool_shape(self) -> tuple[int]:
        """(bytes,): a fused decode's score plane at the plan's limits, uint8."""
        query_len = self.geometry.max_decode_query_len
        batch = min(self.geometry.max_num_seqs, -(-self.geometry.max_decode_tokens // query_len))
        pool = msa_icp_decode_pool_bytes(
            batch=batch,
            decode_query_len=query_len,
            max_model_len=self.geometry.max_model_len,
            page_size=self.geometry.page_size,
        )
        return (pool,)

    def prefill_pool_shape(self) -> tuple[int]:
        """(bytes,): the least pool that asks for a fused prefill of one window, uint8."""
        pool = msa_icp_prefill_pool_bytes(
            total_q=self.geometry.window_tokens, batch=self.geometry.max_num_seqs
        )
        return (pool,)

    @overload
    def decode_program(
        self,
        mesh: Mesh | None = None,
        *,
        decode_query_len: int,
        tagged: bool = False,
        with_comm: Literal[False] = False,
        fused: bool | None = None,
        enable_pdl: bool = True,
    ) -> DecodeProgram: ...

    @overload
    def decode_program(
        self,
        mesh: Mesh | None = None,
        *,
        decode_query_len: int,
        tagged: bool = False,
        with_comm: Literal[True],
        fused: bool | None = None,
        enable_pdl: bool = True,
    ) -> DecodeProgramWithComm: ...

    @overload
    def decode_program(
        self,
        mesh: Mesh | None = None,
        *,
        decode_query_len: int,
        tagged: bool = False,
        with_comm: bool,
        fused: bool | None = None,
        enable_pdl: bool = True,
    ) -> DecodeProgram | DecodeProgramWithComm: ...

    def decode_program(
        self,
        mesh: Mesh | None = None,
        *,
        decode_query_len: int,
        tagged: bool = False,
        with_comm: bool = False,
        fused: bool | None = None,
        enable_pdl: bool = True,
    ) -> DecodeProgram | DecodeProgramWithComm:
        """`decode` of all ranks, jitted once for the plan, donating scores, output and comm.

        Args:
          mesh: a mesh with the icp axis; the arguments are then global arrays (see the module's
            table), scores included: float32 [T, 4, W columns]. None: all ranks on one device, the
            sharded arguments with a leading axis of W.
          decode_query_len, tagged, fused, enable_pdl: as in `decode`.
          with_comm: take and return the receive storage.

        Returns:
          A jitted ``f(index_q, index_k, block_table, seq_lens, num_valid_pages, scores, output)``
          returning (output, scores). When `with_comm` it takes ``comm, slot`` behind these and
          returns (output, scores, comm): `comm` is all ranks' storage, `slot` may be a Python int
          of any size.

        Raises:
          TypeError, ValueError: an argument is outside its range, or the mesh has no such axis of
            the plan's size. The program itself raises TypeError, by name, for a numpy array of
            another dtype, which JAX alone would narrow.
        """
        programs.check_mesh(self, mesh)
        return programs.decode_program(
            self,
            mesh,
            check_decode_query_len(self.geometry, decode_query_len),
            checks.flag("tagged", tagged),
            checks.flag("with_comm", with_comm),
            None if fused is None else checks.flag("fused", fused),
            checks.flag("enable_pdl", enable_pdl),
        )

    def prefill_program(
        self, mesh: Mesh | None = None, *, fused: bool | None = None
    ) -> PrefillProgram:
        """`prefill` of all ranks, jitted once for the plan, donating scratch, carrier and output.

        Args:
          mesh: as in `decode_program`.
          fused: as in `prefill_local`.

        Returns:
          A jitted ``f(query, index_k, block_table, window_plan, score_scratch, num_valid_pages,
          carrier_view, output)`` returning (output, carrier, score_scratch).

        Raises:
          TypeError, ValueError: as in `decode_program`.
        """
        programs.check_mesh(self, mesh)
        fused = None if fused is None else checks.flag("fused", fused)
        return programs.prefill_program(self, mesh, fused)

    def write_program(self, mesh: Mesh | None = None) -> WriteProgram:
        """`msa_icp_write_index_k` of all ranks, jitted once for the plan, donating index_k.

        Args:
          mesh: as in `decode_program`.

        Returns:
          A jitted ``f(index_k, new_k, slot_mapping)`` returning index_k.

        Raises:
          TypeError, ValueError: as in `decode_program`.
        """
        programs.check_mesh(self, mesh)
        return programs.write_program(self, mesh)

    def warmup(
        self,
        *,
        num_pages: int,
        table_width: int,
        batch_sizes: Sequence[int] | None = None,
        query_lens: Sequence[int] | None = None,
        mesh: Mesh | None = None,
        page_rows: int | None = None,
        with_comm: bool = False,
        tagged: bool = False,
    ) -> None:
        """Compiles and loads the plan's programs for these shapes, so that no first call does.

        The programs are those of `decode_program`, `prefill_program` (one full
        window) and `write_program` (a full window and every decode batch). An executable belongs to
        the jitted function it was compiled for: a step that a caller jits around the plan's methods
        is warmed up by that caller, with ``step.lower(...).compile()``. No array is allocated.
        Without a mesh the programs are compiled for arrays that are not committed to a device: to
        JAX, arguments from ``jax.device_put(x, device)`` are another case, compiled at first call.

        Args:
          num_pages: pages of the index-key cache.
          table_width: columns of the block tables.
          batch_sizes: request counts of decode; None: max_num_seqs, as far as max_decode_tokens
            allows.
          query_lens: decode query lengths; None: 1 and max_decode_query_len.
          mesh: as in `decode_program`.
          page_rows: rows of a page in one rank's index-key cache, which for compound pages is their
            pitch in bytes / 128; None: row_offset + R, nothing behind the index keys.
          with_comm, tagged: as in `decode_program`; the comm is one of the plan's transport.

        Raises:
          TypeError, ValueError: an argument is outside the plan's limits.
        """
        programs.warmup(
            self,
            num_pages,
            table_width,
            batch_sizes,
            query_lens,
            mesh,
            page_rows,
            checks.flag("with_comm", with_comm),
            checks.flag("tagged", tagged),
        )

    def _is_decode_fused(self, requests: int, fused: bool | None) -> bool:
        """Whether a decode is fused: as asked, or None, as the plan chooses."""
        if fused is not None:
            return checks.flag("fused", fused)
        least = self.fused_decode_min_batch
        return least is not None and requests >= least

    def _is_one_sided(self, comm: MSAIcpComm | None) -> bool:
        """Whether a call with this comm stores its rows at their owners itself."""
        if self.transport != ONE_SIDED:
            return False
        if comm is None and not self.comm_optional:
            raise ValueError(
                'comm must be an MSAIcpComm from init_comm(mesh) for a plan with transport "one-'
                'sided", got None'
            )
        return comm is not None

    def _one_sided_options(
        self, slot: int | Int32[Array, ""], tagged: bool, enable_pdl: bool
    ) -> dict[str, Any]:
        return {
            "geometry": self.geometry,
            "rank": self._rank(),
            "slot": slot,  # which the kernels take mod 3, without an operation before them
            "tagged": tagged,
            "enable_pdl": enable_pdl,
        }

    def _shard(self, index_k: IndexFloat[Array, "pages R 128"]) -> Shard:
        """This rank's share of the cache, which is checked."""
        geometry = self.geometry
        layout = geometry.world_size, geometry.page_size, geometry.row_offset
        return Shard(index_k, self._rank(), *layout)

    def _rank(self) -> int | Int32[Array, ""]:
        """The fixed rank, or the position on the icp axis as a traced scalar."""
        if self.rank is not None:
            return self.rank
        self._require_axis("a plan with rank=None")
        return lax.axis_index(self.axis_name)

    def _require_axis(self, caller: str) -> None:
        """Raises unless the icp axis is bound, has the group's size, and gives the rank."""
        size = self._axis_size()
        where = f"{caller} must run where axis_name {self.axis_name!r} is bound with size"
        if size is None:
            raise ValueError(
                f"{where} {self.geometry.world_size} (inside jax.shard_map or jax.vmap), got an "
                "unbound axis"
            )
        if size != self.geometry.world_size:
            raise ValueError(f"{where} {self.geometry.world_size}, got size {size}")
        if self.rank is not None:
            raise ValueError(
                f"{caller} needs rank=None where axis_name {self.axis_name!r} is bound (the rank "
                f"is the position on the axis), got rank {self.rank}"
            )

    def _axis_size(self) -> int | None:
        """The size of the icp axis where it is bound."""
        try:
            return lax.axis_size(self.axis_name)
        except NameError:
            return None

    def _check_decode(
        self,
        index_q: Any,
        index_k: Any,
        block_table: Any,
        seq_lens: Any,
        num_valid_pages: Any,
        scores: Any,
        decode_query_len: int,
    ) -> int:
        """Checks the arrays that decode scores against the plan's limits; returns T."""
        decode_query_len = check_decode_query_len(self.geometry, decode_query_len)
        checks.array("block_table", block_table, jnp.int32, None, AtLeast(1))
        requests = block_table.shape[0]
        tokens = check_decode_tokens(self.geometry, requests, decode_query_len)
        self._check_queries("index_q", index_q, tokens, "requests * decode_query_len")
        self._check_index_k(index_k)
        checks.array("seq_lens", seq_lens, jnp.int32, requests)
        checks.array("num_valid_pages", num_valid_pages, jnp.int32, tokens)
        if scores is not None:
            self._check_plane("scores", scores, tokens)
        return tokens

    def _check_exchange(
        self, comm: Any, slot: Any, tagged: Any, enable_pdl: Any
    ) -> int | Int32[Array, ""]:
        """Checks how decode's rows travel; returns `slot`, the running count."""
        self._is_one_sided(comm)  # refuses a comm that is missing
        count = checks.index("slot", slot, MAX_INT32 + 1)
        checks.flag("tagged", tagged)
        checks.flag("enable_pdl", enable_pdl)
        if tagged and self.geometry.num_sparse_layers < 2:
            raise ValueError(
                "tagged=True needs num_sparse_layers >= 2 (a slot may be reused only two calls "
                f"later), got num_sparse_layers {self.geometry.num_sparse_layers}"
            )
        if comm is not None:
            self.check_comm(comm)
        return count

    def _check_prefill(
        self,
        query: Any,
        index_k: Any,
        block_table: Any,
        window_plan: Any,
        num_valid_pages: Any,
    ) -> None:
        """Checks prefill's arrays against the plan's limits."""
        if not isinstance(window_plan, MSAIcpScorePlan):
            raise TypeError(
                f"window_plan must be an MSAIcpScorePlan, got {type(window_plan).__name__}"
            )
        self._check_queries("query", query, AtLeast(window_plan.total_q), "the window's total_q")
        check_prefill_tokens(self.geometry, query.shape[0])
        self._check_index_k(index_k)
        checks.array("block_table", block_table, jnp.int32, window_plan.num_segments, AtLeast(1))
        checks.array("num_valid_pages", num_valid_pages, jnp.int32, query.shape[0])

    def _check_queries(self, name: str, queries: Any, tokens: int | AtLeast, what: str) -> None:
        dtype = self.geometry.index_dtype
        origin = f"the plan's index_dtype, {what}"
        checks.array(name, queries, dtype, tokens, NUM_HEADS, HEAD_DIM, origin=origin)

    def _check_plane(self, name: str, plane: Any, tokens: int) -> None:
        shape = (AtLeast(tokens), NUM_HEADS, self.geometry.score_columns)
        checks.array(name, plane, jnp.float32, *shape, origin="columns by the plan's max_model_len")

    def _check_index_k(self, index_k: Any) -> None:
        geometry = self.geometry
        check_index_k(
            index_k,
            geometry.world_size,
            geometry.page_size,
            geometry.row_offset,
            dtype=geometry.index_dtype,
        )


def _prefix_sums(lengths: Int32[Array, " B"]) -> Int32[Array, " B+1"]:
    """[B + 1] sums of the lengths before each segment; they saturate where int32 would wrap."""
    terms = jnp.clip(lengths, 0, MAX_SUM)
    sums = lax.associative_scan(lambda a, b: jnp.minimum(a + b, MAX_SUM), terms)
    return jnp.pad(sums, (1, 0))
