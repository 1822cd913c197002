"""The plan on torch tensors: every method checks its arguments and hands them to the route."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import Any, Never, NoReturn

import torch
import torch.distributed as dist

import msa_icp_jax
from msa_icp_jax import IndexerGeometry, MSAIcpScorePlan, checks
from msa_icp_jax.geometry import MAX_INT32, NUM_SLOTS
from msa_icp_jax.one_sided import SPIN_LIMIT
from msa_icp_jax.typing import Backend, IndexDtype, Precision, ResolvedRoute, Route
from msa_icp_torch import calls, exchange
from msa_icp_torch.arguments import Arguments
from msa_icp_torch.bridge import (
    Bridge,
    check_apart,
    check_present,
    is_capturing,
    with_index,
)
from msa_icp_torch.calls import DecodeCall, PrefillCall
from msa_icp_torch.comm import MSAIcpComm, check_class, check_comm, is_one_sided
from msa_icp_torch.dlpack import DlpackRoute
from msa_icp_torch.routes import choose_route, direct_route

_LOGGER = logging.getLogger("msa_icp_torch")


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
    device: torch.device | str,
    backend: Backend = "auto",
    precision: Precision = "auto",
    route: Route = "auto",
    group: dist.ProcessGroup | None = None,
    spin_limit: int = SPIN_LIMIT,
    index_dtype: IndexDtype = "float8_e4m3fn",
    **unknown: Never,
) -> MSAIcpIndexerPlan:
    """Plans the MiniMax-M3 index branch for one rank of an indexer context parallel group.

    Args:
      world_size, num_index_heads, page_size, init_blocks, local_blocks, max_decode_tokens,
        max_decode_query_len, max_num_batched_tokens, max_num_seqs, max_model_len,
        num_sparse_layers: as in `msa_icp_jax.prepare_msa_icp_indexer`.
      rank: this process's rank in the group.
      device: where all tensors live, cpu or cuda; a torch.device or its string.
      backend: "auto" (Mosaic kernels on Hopper, else XLA), "mosaic" or "xla".
      precision: "auto" (decode exact, prefill fast), "exact" or "fast"; it matters on Mosaic only.
      route: how kernels are launched: "direct" (on torch's current stream, without the JAX runtime;
        Hopper and Mosaic only), "dlpack" (jitted JAX programs) or "auto" (direct where it exists,
        else dlpack; a Hopper GPU that has to do without warns once).
      group: the process group of the exchange; None is the default group.
      spin_limit: looks at a row before a wait of the one-sided transport gives up, >= 1.
      index_dtype: of index keys and queries, "float8_e4m3fn" or "bfloat16".
      unknown: nothing; what `msa_icp_jax` alone takes is refused with what stands for it here.

    Raises:
      TypeError, ValueError: an argument is outside its range.
      RuntimeError: torch or JAX does not have the device, or there is no direct route here.
    """
    _refuse(unknown)
    checks.integer("rank", rank, 0)
    spin_limit = checks.integer("spin_limit", spin_limit, 1, MAX_INT32)
    exchange.check_kind(group)
    device = with_index(device)
    check_present(device)
    bridge = None
    if choose_route(route, backend, device) == "direct":
        backend = "mosaic"
    else:
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
        device=None if bridge is None else bridge.jax_device,
        backend=backend,
        precision=precision,
        index_dtype=index_dtype,
    )
    if bridge is None:
        chosen = direct_route(plan, device, group, spin_limit)
    else:
        chosen = DlpackRoute(plan, bridge, group)
    _LOGGER.info("prepared rank %d on %s: route %s", plan.rank, device, chosen.name)
    return MSAIcpIndexerPlan(plan, chosen, device, group)


# What stands here for the arguments that only JAX's plan takes.
_INSTEAD = {
    "transport": "a comm whose bases are set, by comm.connect(addresses), is one-sided",
    "axis_name": "group is the process group of the exchange",
    "row_offset": "pass decode the index keys inside compound pages as a strided view",
}


def _refuse(unknown: dict[str, Any]) -> None:
    """Raises as Python does for an argument that a function does not have, with what to do."""
    for name in unknown:
        instead = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise TypeError(
            f"prepare_msa_icp_indexer() got an unexpected keyword argument {name!r}{instead}"
        )


class MSAIcpIndexerPlan:
    """One rank's indexer on torch tensors; build it with `prepare_msa_icp_indexer`.

    Methods write into the caller's tensors, on torch's current stream, and return None. Arguments
    that the kernels cannot take raise, by name, before anything is written.

    Attributes:
      geometry: the validated limits and sizes.
      rank: this rank.
      backend: "mosaic" or "xla", as resolved.
      precision: "auto", "exact" or "fast".
      route: "dlpack" or "direct", as resolved.
      device: the device of all tensors.
      group: the process group of the exchange; None is the default group.
    """

    def __init__(
        self,
        jax_plan: msa_icp_jax.MSAIcpIndexerPlan,
        route: calls.Route,
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._jax_plan = jax_plan
        self._route = route
        self._arguments = Arguments(jax_plan.geometry, device)
        self.geometry: IndexerGeometry = jax_plan.geometry
        assert jax_plan.rank is not None
        self.rank: int = jax_plan.rank
        self.backend = jax_plan.backend
        self.precision = jax_plan.precision
        self.route: ResolvedRoute = route.name
        self.device = device
        self.group = group
        self._transports = _Transports()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(route={self.route!r}, device={self.device}, "
            f"group={self.group}, of {self._jax_plan!r})"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an MSAIcpIndexerPlan of msa_icp_torch cannot be pickled or copied: it holds this "
            "process's device, compiled kernels and process group; every process makes its own "
            "with prepare_msa_icp_indexer"
        )

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
          index_q: index_dtype [T, 4, 128], T = B * decode_query_len, the same on every rank.
          index_k: index_dtype [pages, R, 128], this rank's rows; a view into wider pages may have
            a page stride of a larger multiple of 128 bytes.
          block_table: int32 [B, width].
          seq_lens: int32 [B], keys of each request; 0 for graph padding.
          num_valid_pages: int32 [T], visible *blocks* of each token: position // 128 + 1, 0 for
            padding.
          scores: float32 [>= T, 4, columns], see `decode_score_shape`, written; with a pool it
            stays untouched and may be None.
          output: int32 [>= T, hpr, 16], written: ids ascending with a -1 tail.
          comm: receive storage, written; see `init_comm`.
          slot: running count of sparse-layer calls, taken mod 3.
          tagged: exchange tagged rows; needs at least two sparse layers.
          decode_query_len: query tokens of every request.
          enable_pdl: let kernel launches overlap their predecessors' ends (Mosaic only).
          pool: uint8 [>= decode_pool_shape()], from a multiple of 16 bytes on, written: the scores
            go there, into the first 4 heads x columns x 4 bytes a token.

        Raises:
          TypeError, ValueError: an argument has the wrong kind, dtype, device, shape, stride or
            value, overlaps a written one, or selects a transport that the route does not have.
          RuntimeError: inside CUDA graph capture on the dlpack route, or with new shapes or a new
            comm on the direct route; or torch.distributed is not initialised where it is needed.
        """
        if not (  # the usual case in one look: every decode pays for it
            type(slot) is type(decode_query_len) is int
            and slot >= 0
            and type(tagged) is type(enable_pdl) is bool
        ):
            slot = checks.integer("slot", slot, 0)
            decode_query_len = checks.integer("decode_query_len", decode_query_len)
            checks.flag("tagged", tagged)
            checks.flag("enable_pdl", enable_pdl)
        owners = (
            index_q,
            index_k,
            block_table,
            seq_lens,
            num_valid_pages,
            scores,
            output,
            pool,
            comm,
        )
        options = (slot % NUM_SLOTS, tagged, decode_query_len, enable_pdl)
        if self._route.repeat(owners, options):
            return
        call = self._check_decode(*owners, *options)
        if call is not None:
            self._route.decode(call, owners, options)

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
          RuntimeError: inside CUDA graph capture on the dlpack route.
        """
        self._route.begin("prefill_window_plan")
        lengths = (qo_segment_lens, kv_segment_lens, qo_offset)
        bounds = self._arguments.window(*lengths, total_q, max_query_len, max_seq_len)
        return self._route.prefill_window_plan(lengths, bounds)

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
          query: index_dtype [T, 4, 128], the same on every rank.
          index_k: as in `decode`.
          block_table: int32 [B, width].
          window_plan: from `prefill_window_plan`, total_q <= T.
          score_scratch: float32 [>= T, 4, columns], see `prefill_score_shape`, written unless
            fused, where it may be None.
          num_valid_pages: int32 [T], visible *blocks* of each query row, 0 for padding rows.
          carrier_view: int32 [4, >= T, 33], written.
          pool: uint8 [>= prefill_pool_shape()]: leave score_scratch alone. The pool itself stays
            untouched: the routes have a plane of their own, 4 heads x columns x 4 bytes a token.
            None: fused where `fused_prefill`, or without a score_scratch.

        Raises:
          TypeError, ValueError, RuntimeError: as in `decode`.
        """
        self._route.begin("prefill_local")
        tokens = self._arguments.prefill(
            query, index_k, block_table, window_plan, num_valid_pages, carrier_view
        )
        leaves = self._route.check_window_plan(window_plan)
        fused = pool is not None or score_scratch is None or self.fused_prefill
        self._arguments.plane("score_scratch", score_scratch, tokens, fused=fused)
        self._arguments.pool(pool, self.prefill_pool_shape())
        self._check_memory(
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
            }
            | leaves,
        )
        if tokens == 0:
            return
        self._route.prefill_local(
            PrefillCall(
                query,
                index_k,
                block_table,
                window_plan,
                num_valid_pages,
                None if fused or score_scratch is None else score_scratch[:tokens],
                carrier_view,
                fused,
            )
        )

    def prefill_exchange(self, carrier_view: torch.Tensor, received: torch.Tensor) -> None:
        """Sends each head's candidate rows to its owner: the one collective of a layer.

        A caller with its own transport does without. It is torch alone, so it may be captured.

        Args:
          carrier_view: int32 [4, T, 33], from `prefill_local`.
          received: int32 [W, hpr, T, 33], written: the rows of the owned heads by source rank.

        Raises:
          TypeError, ValueError: as in `decode`.
          RuntimeError: torch.distributed is not initialised.
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
        self._route.begin("prefill_merge")
        tokens = self._arguments.merge(received, num_valid_pages, output)
        self._check_memory(
            {"output": output}, {"received": received, "num_valid_pages": num_valid_pages}
        )
        if tokens:
            self._route.prefill_merge(received, num_valid_pages, output[:tokens])

    def init_comm(self, storage: torch.Tensor | None = None) -> MSAIcpComm:
        """This rank's receive storage, zeroed; create it once, and again only to recover.

        Args:
          storage: int32 [>= storage_words of `msa_icp_comm_layout`], memory that peers can address
            (torch's symmetric memory, say) for the one-sided exchange; None: ordinary memory. All
            ranks must have zeroed theirs before one of them decodes.

        Raises:
          TypeError, ValueError: `storage` has another dtype or device, is too small, or does not
            begin at a multiple of 16 bytes.
        """
        limits = self.geometry
        comm = MSAIcpComm.zeros(limits.world_size, limits.max_decode_tokens, self.device, storage)
        self._transports.remember(comm, {False: False, True: False})
        return comm

    def check_comm(self, comm: MSAIcpComm) -> None:
        """Raises, naming the tensor, unless `comm` is this plan's storage.

        Views, shapes, dtypes, strides, devices, alignment and overlaps are checked, and the bases:
        all 0, or every rank's address, which needs the direct route. It reads the bases back to the
        host. `decode` does it when a comm that `init_comm` did not make, or a write through torch
        to the bases, is new to it; so call it (or `decode`) before a capture.

        Args:
          comm: what is checked.

        Raises:
          TypeError, ValueError: it is no storage of this plan, or selects a transport that the
            route does not have.
        """
        check_comm(comm, self.geometry.world_size, self.geometry.max_decode_tokens, self.device)
        self._route.check_memory(comm.written(), comm.read())
        available = self._route.has_one_sided
        one_sided = {
            tagged: is_one_sided(comm, self.rank, tagged, available) for tagged in (False, True)
        }
        self._transports.remember(comm, one_sided)

    def warmup(
        self,
        index_k: torch.Tensor | None = None,
        *,
        table_width: int | None = None,
        batch_sizes: Sequence[int] | None = None,
        query_lens: Sequence[int] | None = None,
        comm: MSAIcpComm | None = None,
        tagged: bool | None = None,
        prefill: bool = True,
        fused: bool | None = None,
    ) -> None:
        """Compiles and loads programs, so that no first call does; call it before serving.

        On the direct route it also allocates all scratch memory, and what it was told of can be
        captured into CUDA graphs afterwards.

        Args:
          index_k: the index-key cache, as in `decode`. Without it only what comes behind the
            exchange is compiled, and a select that stores its rows at their owners: a scorer's
            program depends on its shape.
          table_width: columns of the block tables; None: pages of a context of max_model_len.
          batch_sizes: request counts of decode; None: max_num_seqs, as far as max_decode_tokens
            allows.
          query_lens: decode query lengths; None: 1 and max_decode_query_len.
          comm: compile for the transport that this storage selects alone; None: for every one.
          tagged: compile for this form of decode rows alone; None: for both.
          prefill: compile for a full prefill window too.
          fused: compile the prefill scorer as calls with a pool (True) or with score planes (False)
            take it; None: as the plan chooses without a pool. Call twice for both. In decode both
            take the same programs.

        Raises:
          TypeError, ValueError: an argument is outside the plan's limits.
          RuntimeError: inside CUDA graph capture.
        """
        self._route.begin("warmup")
        if index_k is not None:
            self._arguments.index_k(index_k)
        checks.flag("prefill", prefill)
        if fused is not None:
            checks.flag("fused", fused)
        forms = self._forms(comm, tagged)
        self._route.warmup(index_k, table_width, batch_sizes, query_lens, forms, prefill, fused)

    def decode_score_shape(self) -> tuple[int, int, int]:
        """(max_decode_tokens, 4, columns): the decode score plane, float32."""
        return self._jax_plan.decode_score_shape()

    def decode_pool_shape(self) -> tuple[int]:
        """(bytes,): the pool in which `decode` can score, uint8: a score plane."""
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

    # ---- checks ----

    def _check_decode(
        self,
        index_q: Any,
        index_k: Any,
        block_table: Any,
        seq_lens: Any,
        num_valid_pages: Any,
        scores: Any,
        output: Any,
        pool: Any,
        comm: Any,
        slot: int,
        tagged: bool,
        query_len: int,
        enable_pdl: bool,
    ) -> DecodeCall | None:
        """The checked call of a decode; None where there is no token."""
        self._route.begin("decode")
        arguments = self._arguments
        arguments.tagged(tagged)
        tokens = arguments.decode(
            index_q, index_k, block_table, seq_lens, num_valid_pages, query_len
        )
        fused = pool is not None
        arguments.plane("scores", scores, tokens, fused=fused)
        arguments.output(output, tokens)
        arguments.pool(pool, self.decode_pool_shape())
        plane = arguments.plane_in(pool, tokens) if fused else scores[:tokens]
        one_sided = self._transport(comm, tagged)
        self._check_memory(
            {"scores": None if fused else scores, "output": output, "pool": pool} | comm.written(),
            {
                "index_q": index_q,
                "index_k": index_k,
                "block_table": block_table,
                "seq_lens": seq_lens,
                "num_valid_pages": num_valid_pages,
            }
            | comm.read(),
        )
        if not one_sided:
            exchange.check_group(self.group, self.geometry.world_size, self.rank)
        if tokens == 0:
            return None
        return DecodeCall(
            index_q,
            index_k,
            block_table,
            seq_lens,
            num_valid_pages,
            plane,
            output[:tokens],
            comm,
            slot,
            tagged,
            query_len,
            fused,
            enable_pdl,
            one_sided,
        )

    def _forms(self, comm: Any, tagged: Any) -> dict[bool, tuple[bool, ...]]:
        """The transports (one-sided or not) of each form (tagged or not) to compile for."""
        if tagged is None:
            forms = (False, True) if self.geometry.num_sparse_layers > 1 else (False,)
        else:
            self._arguments.tagged(tagged)
            forms = (tagged,)
        if comm is None:
            return dict.fromkeys(forms, (False, True))
        return {form: (self._transport(comm, form),) for form in forms}

    def _transport(self, comm: Any, tagged: bool) -> bool:
        """Whether a comm asks for the one-sided transport; checks it where it is new."""
        one_sided = self._transports.find(comm)
        if one_sided is None:
            if is_capturing(self.device):
                raise RuntimeError(
                    "comm is new to the plan, or its bases were written since it was checked: call "
                    "check_comm(comm) before torch.cuda.graph"
                )
            self.check_comm(comm)
            one_sided = self._transports.find(comm)
            assert one_sided is not None
        return one_sided[tagged]

    def _check_memory(
        self, written: dict[str, torch.Tensor | None], read: dict[str, torch.Tensor]
    ) -> None:
        """Raises unless the route can take these tensors, and nothing lies in a written one."""
        given = {name: tensor for name, tensor in written.items() if tensor is not None}
        self._route.check_memory(given, read)
        check_apart(given, read)


class _Transports:
    """Which transport a comm asks for, by form of the rows, as long as its bases stay."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[MSAIcpComm, tuple[Any, dict[bool, bool]]]
        self._known = weakref.WeakKeyDictionary()

    def remember(self, comm: MSAIcpComm, one_sided: dict[bool, bool]) -> None:
        self._known[comm] = (comm.place(), one_sided)

    def find(self, comm: Any) -> dict[bool, bool] | None:
        """{tagged: one-sided}, or None where the comm or what it holds is new."""
        check_class(comm)
        if comm not in self._known:
            return None
        place, one_sided = self._known[comm]
        return one_sided if place == comm.place() else None
