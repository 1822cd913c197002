"""The plan on torch tensors: each method checks, imports, runs JAX programs and writes in place."""

from __future__ import annotations

import dataclasses
import functools
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch
import torch.distributed as dist

import msa_icp_jax
from msa_icp_jax import IndexerGeometry, MSAIcpScorePlan, checks, rows
from msa_icp_jax.geometry import NUM_SLOTS
from msa_icp_torch import exchange, pages, programs
from msa_icp_torch.arguments import Arguments
from msa_icp_torch.bridge import Bridge, check_apart, is_capturing
from msa_icp_torch.comm import MSAIcpComm, check_comm
from msa_icp_torch.warmup import Warmup

_ROUTES = ("auto", "dlpack", "direct")


def prepare_msa_icp_indexer(
    *,
    world_size: int,
    rank: int,
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
    device: torch.device,
    backend: str = "auto",
    precision: str = "auto",
    route: str = "auto",
    group: dist.ProcessGroup | None = None,
) -> MSAIcpIndexerPlan:
    """Plans the MiniMax-M3 index branch for one rank of an indexer context parallel group.

    Args:
      world_size, num_index_heads, page_size, init_blocks, local_blocks, max_decode_tokens,
        max_decode_query_len, max_num_batched_tokens, max_num_seqs, max_model_len,
        num_sparse_layers: as in `msa_icp_jax.prepare_msa_icp_indexer`.
      rank: this process's rank in the group.
      device: where all tensors live, cpu or cuda.
      backend: "auto" (Mosaic kernels on Hopper, else XLA), "mosaic" or "xla".
      precision: "auto" (decode exact, prefill fast), "exact" or "fast"; it matters on Mosaic only.
      route: how tensors reach the kernels: "dlpack" (jitted JAX programs), which "auto" takes.
      group: the process group of the exchange; None is the default group.

    Raises:
      TypeError, ValueError: an argument is outside its range.
      RuntimeError: JAX does not have the device.
    """
    checks.one_of("route", route, _ROUTES)
    if route == "direct":
        raise ValueError('route must be "auto" or "dlpack": this build has only the dlpack route')
    checks.integer("rank", rank, 0)
    bridge = Bridge(device)
    plan = msa_icp_jax.prepare_msa_icp_indexer(
        world_size=world_size,
        rank=rank,
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
        device=bridge.jax_device,
        backend=backend,
        precision=precision,
    )
    return MSAIcpIndexerPlan(plan, bridge, group)


class MSAIcpIndexerPlan:
    """One rank's indexer on torch tensors; build it with `prepare_msa_icp_indexer`.

    Methods write into the caller's tensors, on torch's current stream, and return None. Arguments
    that cannot cross to JAX raise, by name, before anything is written.

    Attributes:
      geometry: the validated limits and sizes.
      rank: this rank.
      backend: "mosaic" or "xla", as resolved.
      precision: "auto", "exact" or "fast".
      route: "dlpack".
      device: the device of all tensors.
      group: the process group of the exchange; None is the default group.
    """

    def __init__(
        self,
        jax_plan: msa_icp_jax.MSAIcpIndexerPlan,
        bridge: Bridge,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._jax_plan = jax_plan
        self._bridge = bridge
        self._arguments = Arguments(jax_plan.geometry, bridge.device)
        self.geometry: IndexerGeometry = jax_plan.geometry
        assert jax_plan.rank is not None
        self.rank: int = jax_plan.rank
        self.backend = jax_plan.backend
        self.precision = jax_plan.precision
        self.route = "dlpack"
        self.device = bridge.device
        self.group = group
        self._slots = tuple(
            jax.device_put(np.int32(slot), bridge.jax_device) for slot in range(NUM_SLOTS)
        )
        self._warned_of_copy = False
        self._checked_comm: tuple[weakref.ref[MSAIcpComm] | None, tuple[int | None, ...]]
        self._checked_comm = (None, ())

    @property
    def fused_decode_min_batch(self) -> int | None:
        """Requests from which decode is faster fused, by measurement; None where it never is."""
        return self._jax_plan.fused_decode_min_batch

    @property
    def fused_prefill(self) -> bool:
        """Whether prefill is faster fused, by measurement."""
        return self._jax_plan.fused_prefill

    def decode(
        self,
        index_q: torch.Tensor,
        index_k: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        num_valid_pages: torch.Tensor,
        scores: torch.Tensor | None,
        output: torch.Tensor,
        *,
        comm: MSAIcpComm,
        slot: int,
        tagged: bool,
        decode_query_len: int,
        enable_pdl: bool = True,
        pool: torch.Tensor | None = None,
    ) -> None:
        """Chooses the 16 key blocks of every decode token for the heads this rank owns.

        Every rank of the group must call with the same number of tokens and the same `tagged`.

        Args:
          index_q: float8_e4m3fn [T, 4, 128], T = B * decode_query_len, the same on every rank.
          index_k: float8_e4m3fn [pages, R, 128], this rank's rows; a view into wider pages may have
            a page stride of a larger multiple of 128 bytes.
          block_table: int32 [B, width].
          seq_lens: int32 [B], keys of each request; 0 for graph padding.
          num_valid_pages: int32 [T], visible *blocks* of each token: position // 128 + 1, 0 for
            padding.
          scores: float32 [>= T, 4, columns], see `decode_score_shape`, written unless fused, where
            it may be None.
          output: int32 [>= T, hpr, 16], written: ids ascending with a -1 tail.
          comm: receive storage, written; see `init_comm`.
          slot: running count of sparse-layer calls, taken mod 3.
          tagged: exchange tagged rows; needs at least two sparse layers.
          decode_query_len: query tokens of every request.
          enable_pdl: let kernel launches overlap their predecessors' ends (Mosaic only).
          pool: uint8 [>= decode_pool_shape()]: score and select in one pass. The memory itself
            stays untouched (XLA has its own). None: fused from `fused_decode_min_batch` requests
            up.

        Raises:
          TypeError, ValueError: an argument has the wrong kind, dtype, device, shape, stride or
            value, overlaps a written one, or selects the one-sided transport.
          RuntimeError: inside CUDA graph capture, or torch.distributed is not initialised.
        """
        self._refuse_capture("decode")
        slot = checks.integer("slot", slot, 0) % NUM_SLOTS
        checks.flag("enable_pdl", enable_pdl)
        arguments = self._arguments
        arguments.tagged(tagged)
        tokens, requests = arguments.decode(
            index_q, index_k, block_table, seq_lens, num_valid_pages, decode_query_len
        )
        least = self.fused_decode_min_batch
        fused = pool is not None or (least is not None and requests >= least)
        arguments.plane("scores", scores, tokens, fused=fused)
        arguments.output(output, tokens)
        arguments.pool(pool, self.decode_pool_shape())
        self._check_comm_once(comm)
        self._check_written(
            {"scores": None if fused else scores, "output": output, "pool": pool}
            | _written(comm, tagged),
            {
                "index_q": index_q,
                "index_k": index_k,
                "block_table": block_table,
                "seq_lens": seq_lens,
                "num_valid_pages": num_valid_pages,
            },
        )
        exchange.check_group(self.group, self.geometry.world_size, self.rank)
        if tokens == 0:
            return

        with self._bridge.guard():
            keep = self._bridge.kept
            keys, plan = self._import_index_k(index_k)
            counts = keep(num_valid_pages)
            message = self._decode_message(
                programs.decode_rows(
                    plan, decode_query_len, fused, enable_pdl, self._bridge.donates
                ),
                (self._bridge.fresh(index_q), keys, keep(block_table), keep(seq_lens)),
                counts,
                None if fused or scores is None else scores[:tokens],
                comm.publish_generations if tagged else None,
                slot,
            )
            received = torch.empty_like(message)
            exchange.all_to_all(received, message, self.group)
            self._decode_merge(received, counts, output[:tokens], comm, tagged, slot, enable_pdl)

    def prefill_window_plan(
        self,
        qo_segment_lens: torch.Tensor,
        kv_segment_lens: torch.Tensor,
        qo_offset: torch.Tensor,
        *,
        total_q: int,
        max_query_len: int,
        max_seq_len: int,
    ) -> MSAIcpScorePlan:
        """Builds the plan of one prefill query window, once per step, for every layer.

        Query row i of segment b is the window's row ``sum(qo_segment_lens[:b]) + i`` and sits at
        position ``qo_offset[b] + i`` of its request. Zero-length segments are allowed. Nothing is
        read back to the host; the bounds decide what is compiled.

        Args:
          qo_segment_lens: int32 [B], query tokens of each segment in this window.
          kv_segment_lens: int32 [B], keys of each segment.
          qo_offset: int32 [B], position of each segment's first query in this window.
          total_q: query rows of the window at most.
          max_query_len: query tokens of one segment at most.
          max_seq_len: keys of one segment at most.

        Returns:
          The window plan, to be handed to `prefill_local`. It does not share the lengths' memory.

        Raises:
          TypeError, ValueError: as in `decode`, or a bound is above the plan's limits.
          RuntimeError: inside CUDA graph capture.
        """
        self._refuse_capture("prefill_window_plan")
        lengths = (qo_segment_lens, kv_segment_lens, qo_offset)
        bounds = (total_q, max_query_len, max_seq_len)
        self._arguments.window(*lengths, *bounds)
        with self._bridge.guard():
            build = programs.prefill_window_plan(self._jax_plan, *bounds)
            window_plan = build(*map(self._bridge.fresh, lengths))
            self._bridge.order_after(jax.tree.leaves(window_plan))
        return window_plan

    def prefill_local(
        self,
        query: torch.Tensor,
        index_k: torch.Tensor,
        block_table: torch.Tensor,
        window_plan: MSAIcpScorePlan,
        score_scratch: torch.Tensor | None,
        num_valid_pages: torch.Tensor,
        carrier_view: torch.Tensor,
        pool: torch.Tensor | None = None,
    ) -> None:
        """Scores a window against this rank's keys and keeps every query's local Top16.

        Args:
          query: float8_e4m3fn [T, 4, 128], the same on every rank.
          index_k: as in `decode`.
          block_table: int32 [B, width].
          window_plan: from `prefill_window_plan`, total_q <= T.
          score_scratch: float32 [>= T, 4, columns], see `prefill_score_shape`, written unless
            fused, where it may be None.
          num_valid_pages: int32 [T], visible *blocks* of each query row, 0 for padding rows.
          carrier_view: int32 [4, >= T, 33], written.
          pool: uint8 [>= prefill_pool_shape()]: score and select in one pass. The memory itself
            stays untouched (XLA has its own). None: fused where `fused_prefill`, or without a
            score_scratch.

        Raises:
          TypeError, ValueError, RuntimeError: as in `decode`.
        """
        self._refuse_capture("prefill_local")
        tokens = self._arguments.prefill(
            query, index_k, block_table, window_plan, num_valid_pages, carrier_view
        )
        fused = pool is not None or score_scratch is None or self.fused_prefill
        self._arguments.plane("score_scratch", score_scratch, tokens, fused=fused)
        self._arguments.pool(pool, self.prefill_pool_shape())
        self._check_written(
            {
                "score_scratch": None if fused else score_scratch,
                "carrier_view": carrier_view,
                "pool": pool,
            },
            {
                "query": query,
                "index_k": index_k,
                "block_table": block_table,
                "num_valid_pages": num_valid_pages,
            },
        )
        if tokens == 0:
            return

        with self._bridge.guard():
            keep, fresh = self._bridge.kept, self._bridge.fresh
            keys, plan = self._import_index_k(index_k)
            plane = None if fused or score_scratch is None else score_scratch[:tokens]
            local = programs.prefill_local(plan, fused, self._bridge.donates)
            carrier, new_plane = local(
                (fresh(query), keys, keep(block_table)),
                window_plan,
                keep(num_valid_pages),
                None if plane is None else fresh(plane),
                fresh(carrier_view),
            )
            results = {"carrier_view": (carrier_view, carrier)}
            if plane is not None:
                results["score_scratch"] = (plane, new_plane)
            self._bridge.deliver(results)

    def prefill_exchange(self, carrier_view: torch.Tensor, received: torch.Tensor) -> None:
        """Sends each head's candidate rows to its owner: the one collective of a layer.

        A caller with its own transport does without. It is torch alone, so it may be captured.

        Args:
          carrier_view: int32 [4, T, 33], from `prefill_local`.
          received: int32 [W, hpr, T, 33], written: the rows of the owned heads by source rank.

        Raises:
          TypeError, ValueError, RuntimeError: as in `decode`.
        """
        shape = self._arguments.exchange(carrier_view, received)
        check_apart({"received": received}, {"carrier_view": carrier_view})
        exchange.check_group(self.group, self.geometry.world_size, self.rank)
        if received.numel():
            exchange.all_to_all(received, carrier_view.view(shape), self.group)

    def prefill_merge(
        self, received: torch.Tensor, num_valid_pages: torch.Tensor, output: torch.Tensor
    ) -> None:
        """Merges every rank's candidates of the owned heads.

        Args:
          received: int32 [W, hpr, >= T, 33], from `prefill_exchange`.
          num_valid_pages: int32 [T], visible blocks of each query row; 0 answers [0, -1, ...].
          output: int32 [>= T, hpr, 16], written: ids ascending with a -1 tail.

        Raises:
          TypeError, ValueError, RuntimeError: as in `decode`.
        """
        self._refuse_capture("prefill_merge")
        tokens = self._arguments.merge(received, num_valid_pages, output)
        self._check_written(
            {"output": output}, {"received": received, "num_valid_pages": num_valid_pages}
        )
        if tokens == 0:
            return
        with self._bridge.guard():
            merge = programs.prefill_merge(self._jax_plan, self._bridge.donates)
            target = output[:tokens]
            merged = merge(
                self._bridge.fresh(received),
                self._bridge.kept(num_valid_pages),
                self._bridge.fresh(target),
            )
            self._bridge.deliver({"output": (target, merged)})

    def init_comm(self) -> MSAIcpComm:
        """This rank's receive storage, zeroed; create it once and never reset it."""
        return MSAIcpComm.zeros(
            self.geometry.world_size, self.geometry.max_decode_tokens, self.device
        )

    def check_comm(self, comm: MSAIcpComm) -> None:
        """Raises, naming the tensor, unless `comm` is this plan's storage with zero bases.

        It reads the bases back to the host. `decode` does it when a comm, or a write through torch
        to its bases, is new to it.
        """
        check_comm(comm, self.geometry.world_size, self.geometry.max_decode_tokens, self.device)
        for name in ("recv_bases", "tagged_recv_bases"):
            if getattr(comm, name).count_nonzero().item():
                raise ValueError(
                    f"comm.{name} must be all 0: other values select the one-sided transport, "
                    "which the dlpack route does not have"
                )

    def warmup(
        self,
        index_k: torch.Tensor | None = None,
        *,
        table_width: int | None = None,
        batch_sizes: Sequence[int] | None = None,
        query_lens: Sequence[int] | None = None,
    ) -> None:
        """Compiles and loads programs, so that no first call does; call it before serving.

        Args:
          index_k: the index-key cache. Without it only the merges are compiled: the scorers'
            programs depend on its shape.
          table_width: columns of the block tables; None: pages of a context of max_model_len.
          batch_sizes: request counts of decode; None: max_num_seqs, as far as max_decode_tokens
            allows.
          query_lens: decode query lengths; None: 1 and max_decode_query_len.

        Raises:
          TypeError, ValueError: an argument is outside the plan's limits.
          RuntimeError: inside CUDA graph capture.
        """
        self._refuse_capture("warmup")
        shape, scorer_plan = None, self._jax_plan
        if index_k is not None:
            self._arguments.index_k(index_k)
            base, row_offset = pages.base_of(index_k)
            shape, scorer_plan = tuple(base.shape), _at_row_offset(scorer_plan, row_offset)
        with self._bridge.guard():
            programs_of = Warmup(
                self._jax_plan,
                scorer_plan,
                self._bridge.jax_device,
                self._bridge.donates,
                shape,
                table_width,
            )
            programs_of.decode(batch_sizes, query_lens)
            programs_of.prefill()

    def decode_score_shape(self) -> tuple[int, int, int]:
        """(max_decode_tokens, 4, columns): the decode score plane, float32."""
        return self._jax_plan.decode_score_shape()

    def decode_pool_shape(self) -> tuple[int]:
        """(bytes,): the pool that asks `decode` to fuse, uint8."""
        return self._jax_plan.decode_pool_shape()

    def prefill_window_tokens(self) -> int:
        """Query tokens of one prefill window: what keeps its score scratch within 256 MiB."""
        return self._jax_plan.prefill_window_tokens()

    def prefill_score_shape(self) -> tuple[int, int, int]:
        """(window_tokens, 4, columns): the prefill score scratch, float32."""
        return self._jax_plan.prefill_score_shape()

    def prefill_pool_shape(self) -> tuple[int]:
        """(bytes,): the pool that asks `prefill_local` to fuse, uint8."""
        return self._jax_plan.prefill_pool_shape()

    # ---- decode, on both sides of the exchange ----

    def _decode_message(
        self,
        program: Any,
        inputs: tuple[jax.Array, ...],
        counts: jax.Array,
        scores: torch.Tensor | None,
        generations: torch.Tensor | None,
        slot: int,
    ) -> torch.Tensor:
        """Scores and selects; returns the rows to send, [W, hpr, T, 33] or [W, hpr, T, 32, 2]."""
        fresh = self._bridge.fresh
        message, new_scores, new_generations = program(
            inputs,
            counts,
            self._slots[slot],
            None if scores is None else fresh(scores),
            None if generations is None else fresh(generations),
        )
        results = {}
        if scores is not None:
            results["scores"] = (scores, new_scores)
        if generations is not None:
            results["comm.publish_generations"] = (generations, new_generations)
        self._bridge.deliver(results)
        return self._bridge.export(message)

    def _decode_merge(
        self,
        received: torch.Tensor,
        counts: jax.Array,
        output: torch.Tensor,
        comm: MSAIcpComm,
        tagged: bool,
        slot: int,
        enable_pdl: bool,
    ) -> None:
        """Stores what came into the slot and merges it."""
        fresh = self._bridge.fresh
        name = "tagged_recv" if tagged else "recv"
        recv_slot = getattr(comm, name)[slot]
        if tagged:  # each int64 as the pair (word, generation): this JAX has no 64-bit integers
            recv_slot = recv_slot.view(torch.int32).unflatten(-1, (rows.TAGGED_WORDS, 2))
        errors = comm.errors[:1]
        expected = comm.expected_generations if tagged else None
        merge = programs.decode_merge(self._jax_plan, enable_pdl, self._bridge.donates)
        new_slot, new_output, new_errors, new_expected = merge(
            fresh(received),
            counts,
            self._slots[slot],
            fresh(recv_slot),
            fresh(output),
            fresh(errors),
            None if expected is None else fresh(expected),
        )
        results = {
            f"comm.{name}": (recv_slot, new_slot),
            "output": (output, new_output),
            "comm.errors": (errors, new_errors),
        }
        if expected is not None:
            results["comm.expected_generations"] = (expected, new_expected)
        self._bridge.deliver(results)

    def _import_index_k(
        self, index_k: torch.Tensor
    ) -> tuple[jax.Array, msa_icp_jax.MSAIcpIndexerPlan]:
        """The cache in JAX, and the plan that knows where the keys lie in its pages."""
        base, row_offset = pages.base_of(index_k)
        if self._bridge.aligned(base):
            keys = self._bridge.remember(index_k, lambda: self._bridge.fresh(base))
            return keys, _at_row_offset(self._jax_plan, row_offset)
        if not self._warned_of_copy:
            self._warned_of_copy = True
            warnings.warn(
                f"index_k is copied in every call: JAX on {self.device} does not take its address "
                f"{base.data_ptr():#x}",
                RuntimeWarning,
                stacklevel=3,
            )
        return self._bridge.fresh(index_k.contiguous()), self._jax_plan

    # ---- checks ----

    def _refuse_capture(self, method: str) -> None:
        if is_capturing(self.device):
            raise RuntimeError(
                f"{method} cannot be captured in a CUDA graph: the dlpack route launches on JAX's "
                "own streams. Call it outside torch.cuda.graph, between the graphs of what comes "
                "before and after it"
            )

    def _check_comm_once(self, comm: Any) -> None:
        """`check_comm`, unless the same comm with untouched bases was checked before."""
        known, versions = self._checked_comm
        seen = None if known is None else known()
        if seen is not None and seen is comm and versions == _base_versions(seen):
            return
        self.check_comm(comm)
        self._checked_comm = (weakref.ref(comm), _base_versions(comm))

    def _check_written(
        self, written: dict[str, torch.Tensor | None], read: dict[str, torch.Tensor]
    ) -> None:
        """Raises unless JAX can write these tensors, and nothing else lies in their memory."""
        given = {name: tensor for name, tensor in written.items() if tensor is not None}
        for name, tensor in given.items():
            self._bridge.check_written(name, tensor)
        check_apart(given, read)


def _written(comm: MSAIcpComm, tagged: bool) -> dict[str, torch.Tensor | None]:
    """The tensors of the storage that a decode writes."""
    names = ["errors", "recv"]
    if tagged:
        names = ["errors", "tagged_recv", "publish_generations", "expected_generations"]
    return {f"comm.{name}": getattr(comm, name) for name in names}


def _base_versions(comm: MSAIcpComm) -> tuple[int | None, ...]:
    """Counts of torch's writes to the bases; inference tensors do not have them."""
    bases = (comm.recv_bases, comm.tagged_recv_bases)
    return tuple(None if base.is_inference() else base._version for base in bases)


@functools.cache
def _at_row_offset(
    plan: msa_icp_jax.MSAIcpIndexerPlan, row_offset: int
) -> msa_icp_jax.MSAIcpIndexerPlan:
    """The plan for index keys that start at this row of their pages."""
    geometry = dataclasses.replace(plan.geometry, row_offset=row_offset)
    return dataclasses.replace(plan, geometry=geometry)
