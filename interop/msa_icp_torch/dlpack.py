"""The dlpack route: tensors go to jitted JAX programs by DLPack, on any device of JAX."""

from __future__ import annotations

import dataclasses
import functools
import warnings
import weakref
from collections.abc import Mapping, Sequence
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
from msa_icp_torch.bridge import Bridge, Shared, is_capturing
from msa_icp_torch.calls import DecodeCall, PrefillCall, clear_scores
from msa_icp_torch.comm import MSAIcpComm
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
        # By object: an import goes with the object that it was made for.
        self._calls = RememberedCalls(alignment=bridge.alignment, by_object=True)
        self._rows: weakref.WeakKeyDictionary[MSAIcpComm, dict[tuple[int, ...], _Exchanged]] = (
            weakref.WeakKeyDictionary()
        )

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
        bound = self._calls.find(owners, options)
        if bound is None:
            return False
        self.begin("decode")
        self._run(bound)
        return True

    def decode(self, call: DecodeCall, owners: tuple[Any, ...], options: tuple[Any, ...]) -> None:
        """Does a decode, and remembers its tensors in JAX."""
        base, row_offset = pages.base_of(call.index_k)
        lasts = self._bridge.aligned(base)
        if not lasts:
            self._warn_of_copy(base)
        plan = at_row_offset(self._plan, row_offset if lasts else 0)
        form = call.tagged, call.enable_pdl, self._bridge.donates
        first, second = programs.storage_parts(call.tagged)
        bound = _BoundDecode(
            self._bridge,
            self._shared(call, owners, base if lasts else call.index_k, row_offset),
            self._parts(call.comm, first),
            self._parts(call.comm, second),
            programs.decode_local(plan, call.query_len, *form),
            programs.decode_merge(self._plan, *form),
            self._slots[call.slot],
            call.tokens,
            self._exchanged(call),
        )
        if call.fused:  # a pool would be kept alive
            clear_scores(call.scores)
        elif lasts:
            self._calls.remember(owners, options, bound)
        self._run(bound)

    def _shared(
        self, call: DecodeCall, owners: tuple[Any, ...], keys: torch.Tensor, row_offset: int
    ) -> list[Shared]:
        """The call's tensors, with the keys as programs take them."""
        shared = self._bridge.shared
        return [
            shared("index_q", call.index_q),
            shared("index_k", call.index_k, lambda _: keys.detach(), row_offset),
            shared("block_table", call.block_table),
            shared("seq_lens", call.seq_lens),
            shared("num_valid_pages", call.num_valid_pages),
            _rows_of(self._bridge, "scores", call.scores if call.fused else owners[5], call.tokens),
            _rows_of(self._bridge, "output", owners[6], call.tokens),
        ]

    def _parts(self, comm: MSAIcpComm, names: tuple[str, ...]) -> dict[str, Shared]:
        """Parts of the receive storage as JAX has them."""
        return {name: self._part(name, getattr(comm, name)) for name in names}

    def _part(self, name: str, part: torch.Tensor) -> Shared:
        """A part as JAX has it."""
        if name == "errors":
            return _rows_of(self._bridge, "comm.errors", part, 1)
        if name == "tagged_recv":  # each int64 as (word, generation): JAX has no 64-bit integers
            pairs = (rows.TAGGED_WORDS, 2)
            view = lambda x: x.detach().view(torch.int32).unflatten(-1, pairs)  # noqa: E731
            return self._bridge.shared("comm.tagged_recv", part, view)
        return self._bridge.shared(f"comm.{name}", part)

    def _exchanged(self, call: DecodeCall) -> _Exchanged:
        """The call's rows on their way: calls on one comm follow one another."""
        geometry = self._plan.geometry
        row = (rows.TAGGED_WORDS, 2) if call.tagged else (rows.ROW_WORDS,)
        shape = (geometry.world_size, geometry.heads_per_rank, call.tokens, *row)
        of_comm = self._rows.setdefault(call.comm, {})
        if shape not in of_comm:
            of_comm[shape] = _Exchanged(self._bridge, shape, tagged=call.tagged)
        return of_comm[shape]

    def _run(self, bound: _BoundDecode) -> None:
        """Scores and selects in one program, exchanges, stores and merges in another."""
        with self._bridge.guard():
            sent = bound.score_and_select()
            exchange.all_to_all(bound.exchanged.place(), sent, self._group)
            bound.store_and_merge()

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

    def _import_index_k(
        self, index_k: torch.Tensor
    ) -> tuple[jax.Array, msa_icp_jax.MSAIcpIndexerPlan]:
        """The cache in JAX, and the plan that knows where the keys lie in its pages."""
        base, row_offset = pages.base_of(index_k)
        if self._bridge.aligned(base):
            keys = self._bridge.remember(index_k, lambda: self._bridge.fresh(base)[0], row_offset)
            return keys, at_row_offset(self._plan, row_offset)
        self._warn_of_copy(base)
        return self._bridge.fresh(index_k.contiguous())[0], self._plan

    def _warn_of_copy(self, base: torch.Tensor) -> None:
        if not self._warned_of_copy:
            self._warned_of_copy = True
            warnings.warn(
                f"index_k is copied in every call: JAX on {self._bridge.device} does not take its "
                f"address {base.data_ptr():#x}",
                RuntimeWarning,
                stacklevel=5,
            )


_SCORES, _OUTPUT = 5, 6  # places among a decode's tensors
_INPUTS = {0: "index_q", 2: "block_table", 3: "seq_lens", 4: "num_valid_pages"}


@dataclasses.dataclass(frozen=True, slots=True)
class _BoundDecode:
    """A decode's tensors in JAX, its programs, and what lies between them.

    Attributes:
      shared: index_q, index_k, block_table, seq_lens, num_valid_pages, scores, output.
      first, second: the parts of the receive storage that its programs write.
      local, merge: the programs.
      slot: an int32 in JAX.
      tokens: T.
      exchanged: the rows on their way.
    """

    bridge: Bridge
    shared: list[Shared]
    first: dict[str, Shared]
    second: dict[str, Shared]
    local: Any
    merge: Any
    slot: jax.Array
    tokens: int
    exchanged: _Exchanged

    def moved(self, changed: Mapping[int, torch.Tensor]) -> _BoundDecode:
        """See `Bound`."""
        shared = [*self.shared]
        for i, tensor in changed.items():
            if i in _INPUTS:
                shared[i] = self.bridge.shared(_INPUTS[i], tensor)
            elif i in (_SCORES, _OUTPUT):
                name = "scores" if i == _SCORES else "output"
                shared[i] = _rows_of(self.bridge, name, tensor, self.tokens)
        return dataclasses.replace(self, shared=shared)

    def with_queries(self, address: int) -> None:
        """See `Bound`: an import goes with the tensor's object."""

    def score_and_select(self) -> torch.Tensor:
        """Runs the first program; returns the rows to send, behind it."""
        queries, keys, table, lengths, counts, scores, _ = self.shared
        inputs = keys.get(), table.get(), lengths.get()
        parts = {name: part.lend() for name, part in self.first.items()}
        others = counts.get(), self.slot, scores.lend(), parts, self.exchanged.lend()
        index_q = self.bridge.only(queries)
        message, new_scores, new_parts = self.local((index_q, *inputs), *others)
        sent = self.exchanged.sent_by(message)
        self.bridge.settle([(scores, new_scores), *_results(self.first, new_parts)])
        return sent

    def store_and_merge(self) -> None:
        """Runs the second program, and leaves the current stream behind it."""
        _, _, _, _, counts, _, output = self.shared
        parts = {name: part.lend() for name, part in self.second.items()}
        others = counts.get(), self.slot, output.lend(), parts
        new_output, new_parts = self.merge(self.exchanged.arrived(), *others)
        self.bridge.order_after([new_output])
        self.bridge.settle([(output, new_output), *_results(self.second, new_parts)])


class _Exchanged:
    """The rows that a decode sends and receives, in memory that is kept for the next call."""

    def __init__(self, bridge: Bridge, shape: tuple[int, ...], *, tagged: bool) -> None:
        """Rows int32 of this shape, tagged or legacy, on the bridge's device."""
        self._bridge = bridge
        self._tagged = tagged
        with torch.inference_mode(False):  # they are written outside inference mode too
            self._received = torch.zeros(shape, dtype=torch.int32, device=bridge.device)
            self._sent = torch.zeros_like(self._received) if bridge.donates else None
        self._shared = None if self._sent is None else bridge.shared("sent", self._sent)
        self._shared_received = bridge.shared("received", self._received)

    def place(self) -> torch.Tensor:
        """Where the others' rows arrive.

        Where a peer sends less, no row of an earlier call may be taken for one of this call: tags
        tell them apart, flags do not.
        """
        return self._received if self._tagged else self._received.zero_()

    def arrived(self) -> jax.Array:
        """The rows there, behind the exchange."""
        return self._bridge.only(self._shared_received)

    def lend(self) -> jax.Array | None:
        """Where a program writes the rows to send; None: not into the caller's memory."""
        return None if self._shared is None else self._shared.lend()

    def sent_by(self, rows_: jax.Array) -> torch.Tensor:
        """The rows that a program wrote, behind it."""
        if self._sent is None or self._shared is None:
            return self._bridge.export(rows_)
        self._bridge.order_after([rows_])
        self._bridge.settle([(self._shared, rows_)])
        return self._sent


def _results(parts: dict[str, Shared], new: dict[str, jax.Array]) -> list[tuple[Shared, jax.Array]]:
    """Parts of the receive storage and what replaces them."""
    return [(part, new[name]) for name, part in parts.items()]


def _rows_of(bridge: Bridge, name: str, owner: torch.Tensor, count: int) -> Shared:
    """The first rows of a tensor."""
    return bridge.shared(name, owner, lambda x: x.detach()[:count], count)


@functools.cache
def at_row_offset(
    plan: msa_icp_jax.MSAIcpIndexerPlan, row_offset: int
) -> msa_icp_jax.MSAIcpIndexerPlan:
    """The plan for index keys that start at this row of their pages."""
    geometry = dataclasses.replace(plan.geometry, row_offset=row_offset)
    return dataclasses.replace(plan, geometry=geometry)
