"""The dlpack route: tensors go to jitted JAX programs by DLPack, on any device of JAX."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch
import torch.distributed as dist

import msa_icp_jax
from msa_icp_jax import MSAIcpScorePlan, rows
from msa_icp_jax.geometry import NUM_SLOTS
from msa_icp_jax.typing import ResolvedRoute
from msa_icp_torch import exchange, pages, programs
from msa_icp_torch.bridge import Bridge, is_capturing
from msa_icp_torch.calls import DecodeCall, PrefillCall, clear_scores
from msa_icp_torch.remembered import RememberedCalls
from msa_icp_torch.warmup import Warmup
from msa_icp_torch.window import WindowPlan

# They begin at multiples of 16 bytes, which JAX may not take as they are: `Bridge.deliver`.
_STORAGE = ("comm.recv", "comm.tagged_recv")


class DlpackRoute:
    """Runs checked calls as JAX programs with the exchange between them."""

    name: ResolvedRoute = "dlpack"
    has_one_sided = False

    def __init__(
        self,
        plan: msa_icp_jax.MSAIcpIndexerPlan,
        bridge: Bridge,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._plan = plan
        self._bridge = bridge
        self._group = group
        self._slots = tuple(
            jax.device_put(np.int32(slot), bridge.jax_device) for slot in range(NUM_SLOTS)
        )
        self._warned_of_copy = False
        self._calls = RememberedCalls(alignment=bridge.alignment)

    # ---- checks ----

    def begin(self, method: str) -> None:
        """Raises inside CUDA graph capture."""
        if is_capturing(self._bridge.device):
            raise RuntimeError(
                f"{method} cannot be captured in a CUDA graph: the dlpack route launches on JAX's "
                "own streams. Call it outside torch.cuda.graph, between the graphs of what comes "
                'before and after it, or take route="direct"'
            )

    def check_memory(
        self, written: Mapping[str, torch.Tensor], read: Mapping[str, torch.Tensor]
    ) -> None:
        """Raises unless JAX can write `written` in place, or it is the receive storage."""
        for name, tensor in written.items():
            if name not in _STORAGE:
                self._bridge.check_written(name, tensor)

    def check_window_plan(self, window_plan: MSAIcpScorePlan) -> dict[str, torch.Tensor]:
        """Raises for a window plan of the direct route; there are no tensors in JAX's."""
        if isinstance(window_plan, WindowPlan):
            raise TypeError(
                "window_plan must come from this plan's prefill_window_plan, got one of a plan on "
                "the direct route"
            )
        return {}

    # ---- calls ----

    def repeat(self, owners: tuple[Any, ...], options: tuple[Any, ...]) -> bool:
        """Does a decode whose tensors, or others like them, an earlier one brought."""
        if self._calls.find(owners, options) is None:
            return False
        self.begin("decode")
        self._run(self._call_again(owners, options))
        return True

    def decode(self, call: DecodeCall, owners: tuple[Any, ...], options: tuple[Any, ...]) -> None:
        """Does a decode, and remembers that its tensors are checked."""
        if not call.fused:  # a pool would be kept alive
            self._calls.remember(owners, options, [], by_address=True)
        self._run(call)

    def _call_again(self, owners: tuple[Any, ...], options: tuple[Any, ...]) -> DecodeCall:
        """The call of checked owners without a pool."""
        index_q, index_k, block_table, seq_lens, num_valid_pages, scores, output, _, comm = owners
        slot, tagged, query_len, enable_pdl = options
        tokens = index_q.shape[0]
        return DecodeCall(
            index_q,
            index_k,
            block_table,
            seq_lens,
            num_valid_pages,
            self._view(scores, lambda x: x[:tokens], tokens),
            self._view(output, lambda x: x[:tokens], tokens),
            comm,
            slot,
            tagged,
            query_len,
            fused=False,
            enable_pdl=enable_pdl,
            one_sided=False,
        )

    def _view(
        self, tensor: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor], *more: Any
    ) -> torch.Tensor:
        """A view that is kept as long as the tensor lives, which it does not keep alive itself."""
        return self._bridge.remember(tensor, lambda: make(tensor.detach()), *more)

    def _run(self, call: DecodeCall) -> None:
        """Scores and selects in one program, exchanges, stores and merges in another."""
        with self._bridge.guard():
            keys, plan = self._import_index_k(call.index_k)
            counts = self._bridge.kept(call.num_valid_pages)
            message = self._decode_local(call, plan, keys, counts)
            # Zeros: no row of an earlier call where a peer sends less.
            received = torch.zeros_like(message)
            exchange.all_to_all(received, message, self._group)
            self._decode_merge(call, received, counts)

    def prefill_window_plan(
        self, lengths: tuple[torch.Tensor, ...], bounds: dict[str, int]
    ) -> MSAIcpScorePlan:
        """The window plan, its leaves JAX arrays."""
        with self._bridge.guard():
            build = programs.prefill_window_plan(self._plan, *bounds.values())
            window_plan = build(*self._bridge.fresh(*lengths))
            self._bridge.order_after(jax.tree.leaves(window_plan))
        return window_plan

    def prefill_local(self, call: PrefillCall) -> None:
        """Scores and selects a window in one program."""
        with self._bridge.guard():
            keep = self._bridge.kept
            keys, plan = self._import_index_k(call.index_k)
            local = programs.prefill_local(plan, call.fused, self._bridge.donates)
            planes = () if call.plane is None else (call.plane,)
            query, carrier, *plane = self._bridge.fresh(call.query, call.carrier, *planes)
            carrier, new_plane = local(
                (query, keys, keep(call.block_table)),
                call.window_plan,
                keep(call.num_valid_pages),
                plane[0] if plane else None,
                carrier,
            )
            results = {"carrier_view": (call.carrier, carrier)}
            if call.plane is not None:
                results["score_scratch"] = (call.plane, new_plane)
            self._bridge.deliver(results)

    def prefill_merge(
        self, received: torch.Tensor, num_valid_pages: torch.Tensor, output: torch.Tensor
    ) -> None:
        """Merges in one program."""
        with self._bridge.guard():
            merge = programs.prefill_merge(self._plan, self._bridge.donates)
            rows_, ids = self._bridge.fresh(received, output)
            merged = merge(rows_, self._bridge.kept(num_valid_pages), ids)
            self._bridge.deliver({"output": (output, merged)})

    def warmup(
        self,
        index_k: torch.Tensor | None,
        table_width: int | None,
        batch_sizes: Sequence[int] | None,
        query_lens: Sequence[int] | None,
        forms: Mapping[bool, Sequence[bool]],
        prefill: bool,
        fused: bool | None,
    ) -> None:
        """See `MSAIcpIndexerPlan.warmup`."""
        shape, scorer_plan = None, self._plan
        if index_k is not None:
            base, row_offset = pages.base_of(index_k)
            shape, scorer_plan = tuple(base.shape), at_row_offset(scorer_plan, row_offset)
        with self._bridge.guard():
            programs_of = Warmup(
                self._plan,
                scorer_plan,
                self._bridge.jax_device,
                self._bridge.donates,
                shape,
                table_width,
                fused,
            )
            programs_of.decode(batch_sizes, query_lens, tuple(forms))
            if prefill:
                programs_of.prefill()

    # ---- decode, on both sides of the exchange ----

    def _decode_local(
        self,
        call: DecodeCall,
        plan: msa_icp_jax.MSAIcpIndexerPlan,
        keys: jax.Array,
        counts: jax.Array,
    ) -> torch.Tensor:
        """Scores and selects; returns the rows to send, [W, hpr, T, 33] or [W, hpr, T, 32, 2]."""
        keep = self._bridge.kept
        if call.fused:
            clear_scores(call.scores)
        parts = self._parts(call, programs.storage_parts(call.tagged)[0])
        program = programs.decode_local(
            plan, call.query_len, call.tagged, call.enable_pdl, self._bridge.donates
        )
        query, scores, *storage = self._bridge.written(call.index_q, call.scores, *parts.values())
        message, new_scores, new_parts = program(
            (query, keys, keep(call.block_table), keep(call.seq_lens)),
            counts,
            self._slots[call.slot],
            scores,
            dict(zip(parts, storage, strict=True)),
        )
        self._bridge.deliver({"scores": (call.scores, new_scores)} | _results(parts, new_parts))
        return self._bridge.export(message)

    def _decode_merge(self, call: DecodeCall, received: torch.Tensor, counts: jax.Array) -> None:
        """Stores what came into the slot and merges it."""
        parts = self._parts(call, programs.storage_parts(call.tagged)[1])
        merge = programs.decode_merge(
            self._plan, call.tagged, call.enable_pdl, self._bridge.donates
        )
        sent, output, *storage = self._bridge.written(received, call.output, *parts.values())
        new_output, new_parts = merge(
            sent,
            counts,
            self._slots[call.slot],
            output,
            dict(zip(parts, storage, strict=True)),
        )
        self._bridge.deliver({"output": (call.output, new_output)} | _results(parts, new_parts))

    def _parts(self, call: DecodeCall, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """Parts of the receive storage as JAX has them."""
        return {name: self._part(name, getattr(call.comm, name)) for name in names}

    def _part(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """A part as JAX has it."""
        if name == "errors":
            return self._view(part, lambda x: x[:1])
        if name == "tagged_recv":  # each int64 as (word, generation): JAX has no 64-bit integers
            pairs = (rows.TAGGED_WORDS, 2)
            return self._view(part, lambda x: x.view(torch.int32).unflatten(-1, pairs))
        return part

    def _import_index_k(
        self, index_k: torch.Tensor
    ) -> tuple[jax.Array, msa_icp_jax.MSAIcpIndexerPlan]:
        """The cache in JAX, and the plan that knows where the keys lie in its pages."""
        base, row_offset = pages.base_of(index_k)
        if self._bridge.aligned(base):
            keys = self._bridge.remember(index_k, lambda: self._bridge.fresh(base)[0], row_offset)
            return keys, at_row_offset(self._plan, row_offset)
        if not self._warned_of_copy:
            self._warned_of_copy = True
            warnings.warn(
                f"index_k is copied in every call: JAX on {self._bridge.device} does not take its "
                f"address {base.data_ptr():#x}",
                RuntimeWarning,
                stacklevel=4,
            )
        return self._bridge.fresh(index_k.contiguous())[0], self._plan


def _results(
    parts: dict[str, torch.Tensor], new: dict[str, jax.Array]
) -> dict[str, tuple[torch.Tensor, jax.Array]]:
    """Parts of the receive storage and what replaces them, for `Bridge.deliver`."""
    return {f"comm.{name}": (part, new[name]) for name, part in parts.items()}


@functools.cache
def at_row_offset(
    plan: msa_icp_jax.MSAIcpIndexerPlan, row_offset: int
) -> msa_icp_jax.MSAIcpIndexerPlan:
    """The plan for index keys that start at this row of their pages."""
    geometry = dataclasses.replace(plan.geometry, row_offset=row_offset)
    return dataclasses.replace(plan, geometry=geometry)
