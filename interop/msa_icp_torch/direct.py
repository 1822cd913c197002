"""The direct route: Mosaic kernels on torch's current stream, without the JAX runtime.

JAX only lowers the kernels. A launch is a call into JAX's CUDA plugin with device addresses, so it
may be captured into a CUDA graph; it allocates nothing and waits for nothing. A kernel is compiled
for the shapes of its arguments, by `warmup` or at its first call.

A decode is prepared once for its index keys, its comm and all shapes. Later it is launched as it
was prepared, with the addresses of the tensors that are others now: only these are checked.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import msa_icp_jax
from msa_icp_jax import MSAIcpScorePlan, rows
from msa_icp_jax.comm import mark_of
from msa_icp_jax.geometry import NUM_HEADS, NUM_SLOTS, TOPK
from msa_icp_jax.ops._mosaic import aot
from msa_icp_jax.ops._mosaic.aot import BoundStep, Compiled, Copy, Launches, Lowered
from msa_icp_jax.ops._mosaic.launch import Target
from msa_icp_jax.shapes import decode_shapes
from msa_icp_jax.typing import ResolvedRoute
from msa_icp_torch import exchange, kernels, pages, window
from msa_icp_torch.bridge import (
    check_tensor,
    is_capturing,
)
from msa_icp_torch.calls import DecodeCall, PrefillCall, clear_scores
from msa_icp_torch.comm import check_aligned
from msa_icp_torch.dlpack import at_row_offset
from msa_icp_torch.graphs import Graph, Graphs
from msa_icp_torch.remembered import RememberedCalls
from msa_icp_torch.warmup import table_width_of

_GRAPH_FROM = 2  # repeats of the same launches: from then on, one graph is launched
_ALIGNMENT = 16  # bytes: what the kernels' vector loads and bulk copies ask of a buffer


class DirectRoute:
    """Launches checked calls.

    All scratch memory belongs to the route: graphs captured from its launches need it alive, and
    launches of one plan must follow one another (on one stream, or streams that wait).
    """

    name: ResolvedRoute = "direct"
    has_one_sided = True

    def __init__(
        self,
        plan: msa_icp_jax.MSAIcpIndexerPlan,
        device: torch.device,
        group: dist.ProcessGroup | None,
        spin_limit: int,
        sms: int,
    ) -> None:
        self._plan = plan
        self._device = device
        self._group = group
        self._spin_limit = spin_limit
        self._target = Target(sms=sms)
        self._stream = Stream(device)
        self._lowerings: dict[int, kernels.Lowering] = {}
        self._programs: dict[tuple[Any, ...], Compiled] = {}
        self._buffers: dict[tuple[Any, ...], torch.Tensor] = {}
        self._calls = RememberedCalls()
        slots = torch.arange(NUM_SLOTS, dtype=torch.int32).repeat_interleave(_ALIGNMENT // 4)
        self._slots = slots.to(device).view(NUM_SLOTS, -1)
        self._hidden = window.hidden_keys(device)

    # ---- checks ----

    def begin(self, method: str) -> None:
        """Nothing to refuse: calls may be captured."""

    def check_memory(
        self, written: Mapping[str, torch.Tensor], read: Mapping[str, torch.Tensor]
    ) -> None:
        """Raises for a tensor that does not start where kernels can take it."""
        for name, tensor in (*written.items(), *read.items()):
            check_aligned(name, tensor)

    def check_window_plan(self, window_plan: MSAIcpScorePlan) -> dict[str, torch.Tensor]:
        """Raises for a window plan of the JAX package or of another GPU; its leaves by name."""
        if not isinstance(window_plan, window.WindowPlan):
            raise TypeError(
                "window_plan must come from this plan's prefill_window_plan, got one whose leaves "
                "are no torch tensors"
            )
        where = window_plan.qo_starts.device
        if where != self._device:
            raise TypeError(f"window_plan must be one on {self._device}, got one on {where}")
        leaves = window.leaves(window_plan)
        shapes = window.shapes(window_plan.num_segments, window_plan.total_q, self._target.sms)
        for name, (dtype, shape) in shapes.items():
            check_tensor(f"window_plan.{name}", leaves.get(name), dtype, self._device, *shape)
        return {f"window_plan.{name}": leaf for name, leaf in leaves.items()}

    # ---- decode ----

    def repeat(self, owners: tuple[Any, ...], options: tuple[Any, ...]) -> bool:
        """Launches a decode that an earlier one was like, if there was one."""
        bound = self._calls.find(owners, options)
        if bound is None:
            return False
        self._stream.repeat(bound)
        return True

    def decode(self, call: DecodeCall, owners: tuple[Any, ...], options: tuple[Any, ...]) -> None:
        """Prepares the launches of a decode, remembers them and runs them."""
        with self._stream.device():
            if call.one_sided:
                before, behind = self._one_sided(call), self._merge(call, self._spin_limit)
            else:
                before, message = self._rows(call)
                behind = self._collective(call, message)
            launches = [*before, *behind]
        kernels_before = before[call.fused :]  # a fused decode clears its plane first
        by_address = all(step.kernel is not None for step in kernels_before)
        bound = BoundLaunches.of(launches, owners, by_address=by_address)
        self._calls.remember(owners, options, bound)
        self._stream.launch(launches)

    def _rows(self, call: DecodeCall) -> tuple[Launches, torch.Tensor]:
        """Score and select; the launches, and the rows [W, hpr, T, 33] that they leave."""
        local, launches = self._scorer(kernels.decode_local, call, call.num_valid_pages)
        return launches, self._result(local)

    def _scorer(
        self, lower: Callable[..., Lowered], call: DecodeCall, *counts: torch.Tensor
    ) -> tuple[Compiled, Launches]:
        """What scores a call, and its launches."""
        base, row_offset = pages.base_of(call.index_k)
        requests, width = call.block_table.shape
        shapes = kernels.DecodeShapes(requests, call.query_len, tuple(base.shape), width)
        scorer = self._program(lower, self._lowering(row_offset), shapes, call.enable_pdl)
        inputs = (call.index_q, base, call.block_table, call.seq_lens)
        launches = scorer.bind((*inputs, *counts, call.scores))
        if call.fused:
            launches.insert(0, BoundStep(functools.partial(clear_scores, call.scores)))
        return scorer, launches

    def _one_sided(self, call: DecodeCall) -> Launches:
        """Score and select, the rows stored at their owners by the select."""
        comm, slot = call.comm, self._slots[call.slot]
        peers = (
            (comm.tagged_recv_bases, slot, comm.publish_generations)
            if call.tagged
            else (comm.recv_bases, slot, comm.errors)
        )
        _, scores = self._scorer(kernels.decode_scores, call)
        select = self._publishing_select(call.tokens, call.tagged, call.enable_pdl)
        return [*scores, *select.bind((call.scores, call.num_valid_pages, *peers))]

    def _publishing_select(self, tokens: int, tagged: bool, pdl: bool) -> Compiled:
        form = (tokens, tagged, pdl, self._spin_limit)
        return self._program(kernels.select_and_publish_rows, self._lowering(), *form)

    def _merge(self, call: DecodeCall, spin_limit: int) -> Launches:
        """Merges the rows of the slot, each of which is looked at up to `spin_limit` times."""
        comm = call.comm
        merge = self._program(
            kernels.merge_rows,
            self._lowering(),
            call.tokens,
            call.tagged,
            call.enable_pdl,
            spin_limit,
        )
        step = (call.num_valid_pages, self._slots[call.slot], call.output, comm.errors)
        if call.tagged:
            return merge.bind((comm.tagged_recv, *step, comm.expected_generations))
        return merge.bind((comm.recv, *step))

    def _collective(self, call: DecodeCall, message: torch.Tensor) -> Launches:
        """Sends the rows over the group, stores what came into the slot, and merges it.

        Everything is there then: a row that fails at its first look is a fault.
        """
        make = self._tagged_exchange if call.tagged else self._legacy_exchange
        return [BoundStep(make(call, message)), *self._merge(call, spin_limit=1)]

    def _legacy_exchange(self, call: DecodeCall, message: torch.Tensor) -> Callable[[], None]:
        """As `mark_rows` and `store_legacy` of `msa_icp_jax.comm`, around the exchange.

        A row over one that was not merged becomes a fault, and so does one of another call. What
        the buffer keeps of this call has no mark, so a later one that does not fill it finds
        faults there.
        """
        place = call.comm.recv[call.slot][:, :, : call.tokens]
        received = self._buffer("received", *message.shape)
        flags = place[..., -1]
        stale = self._buffer("stale", *flags.shape, dtype=torch.bool)
        sent_flags, received_flags = message[..., -1], received[..., -1]
        mark = mark_of(call.slot, call.tokens, tagged=False)

        def run() -> None:
            sent_flags.add_(mark)
            exchange.all_to_all(received, message, self._group)
            received_flags.sub_(mark)
            with torch.inference_mode():  # the caller's tensors may be inference tensors
                torch.ne(flags, 0, out=stale)
                place.copy_(received)
                flags.masked_fill_(stale, -rows.READY)

        return run

    def _tagged_exchange(self, call: DecodeCall, message: torch.Tensor) -> Callable[[], None]:
        """Advances the counters of the rows to be sent, and sends their words with these tags."""
        counters = call.comm.publish_generations[call.slot, :, : call.tokens]
        wraps = self._buffer("wraps", *counters.shape, dtype=torch.bool)
        shape = (*message.shape[:-1], rows.TAGGED_WORDS, 2)
        sent, received = self._buffer("sent", *shape), self._buffer("received", *shape)
        words, tags = sent.unbind(-1)
        mark = mark_of(call.slot, call.tokens, tagged=True)
        generations = counters.view(*shape[:2], call.tokens, 1)
        place = call.comm.tagged_recv[call.slot][:, :, : call.tokens]
        arrived, arrived_tags = received.view(torch.int64).squeeze(-1), received[..., 1]

        def run() -> None:
            with torch.inference_mode():
                torch.eq(counters, -1, out=wraps)
                counters.add_(1).add_(wraps)  # 0 is skipped
                words.copy_(message[..., : rows.TAGGED_WORDS])
                torch.add(generations.expand_as(tags), mark, out=tags)
            exchange.all_to_all(received, sent, self._group)
            arrived_tags.sub_(mark)
            with torch.inference_mode():
                place.copy_(arrived)

        return run

    # ---- prefill ----

    def prefill_window_plan(
        self, lengths: tuple[torch.Tensor, ...], bounds: dict[str, int]
    ) -> MSAIcpScorePlan:
        """The window plan, its leaves torch tensors."""
        with self._stream.device(), torch.inference_mode():
            return window.build(lengths, self._hidden, ctas=self._target.sms, **bounds)

    def prefill_local(self, call: PrefillCall) -> None:
        """Launches score and select of a window."""
        with self._stream.device():
            self._stream.launch(self._prefill_launches(call))

    def _prefill_launches(self, call: PrefillCall) -> Launches:
        carrier_tokens = call.carrier.shape[1]
        if call.window_plan.num_segments == 0:
            clear = BoundStep(functools.partial(_clear, call))
            if call.fused:
                return [clear]
            form = (self._lowering(), call.tokens, carrier_tokens)
            select = self._program(kernels.prefill_select, *form)
            return [clear, *select.bind((call.plane, call.num_valid_pages, call.carrier))]
        base, row_offset = pages.base_of(call.index_k)
        shapes = kernels.PrefillShapes(
            call.tokens,
            call.window_plan.num_segments,
            call.window_plan.total_q,
            tuple(base.shape),
            call.block_table.shape[1],
        )
        local = self._program(
            kernels.prefill_local, self._lowering(row_offset), shapes, carrier_tokens, call.fused
        )
        inputs = (call.query, base, call.block_table, *window.leaves(call.window_plan).values())
        plane = () if call.plane is None else (call.plane,)
        return local.bind((*inputs, call.num_valid_pages, call.carrier, *plane))

    def prefill_merge(
        self, received: torch.Tensor, num_valid_pages: torch.Tensor, output: torch.Tensor
    ) -> None:
        """Launches the merge of a window."""
        tokens = num_valid_pages.shape[0]
        with self._stream.device():
            merge = self._program(
                kernels.prefill_merge, self._lowering(), tokens, received.shape[2]
            )
            self._stream.launch(merge.bind((received, num_valid_pages, output)))

    # ---- warmup ----

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
        if is_capturing(self._device):
            raise RuntimeError(
                "warmup cannot be captured in a CUDA graph: call it before torch.cuda.graph"
            )
        geometry = self._plan.geometry
        width = table_width_of(geometry, table_width)
        with self._stream.device(), aot.on_cpu():
            for requests, length in decode_shapes(geometry, batch_sizes, query_lens):
                self._warm_exchange(requests * length, forms)
                if index_k is not None:
                    self._warm_local(requests, length, index_k, width, forms)
            if prefill:
                self._warm_prefill(index_k, width, fused)

    def _warm_exchange(self, tokens: int, forms: Mapping[bool, Sequence[bool]]) -> None:
        """What comes behind the exchange in a decode, and sends the rows of a one-sided one."""
        lowering = self._lowering()
        for tagged, transports in forms.items():
            for one_sided in transports:
                spin_limit = self._spin_limit if one_sided else 1
                self._program(kernels.merge_rows, lowering, tokens, tagged, True, spin_limit)
                if one_sided:
                    self._publishing_select(tokens, tagged, True)
        self._warm_buffers(tokens)

    def _warm_local(
        self,
        requests: int,
        query_len: int,
        index_k: torch.Tensor,
        width: int,
        forms: Mapping[bool, Sequence[bool]],
    ) -> None:
        base, row_offset = pages.base_of(index_k)
        shapes = kernels.DecodeShapes(requests, query_len, tuple(base.shape), width)
        transports = {one_sided for wanted in forms.values() for one_sided in wanted}
        for one_sided in sorted(transports):
            lower = kernels.decode_scores if one_sided else kernels.decode_local
            self._program(lower, self._lowering(row_offset), shapes, True)

    def _warm_buffers(self, tokens: int) -> None:
        """Allocates what the exchanges take."""
        geometry = self._plan.geometry
        owned = (geometry.world_size, geometry.heads_per_rank, tokens)
        self._buffer("received", *owned, rows.ROW_WORDS)
        self._buffer("stale", *owned, dtype=torch.bool)
        for name in ("sent", "received"):
            self._buffer(name, *owned, rows.TAGGED_WORDS, 2)
        self._buffer("wraps", NUM_HEADS, tokens, dtype=torch.bool)

    def _warm_prefill(self, index_k: torch.Tensor | None, width: int, fused: bool | None) -> None:
        geometry, lowering = self._plan.geometry, self._lowering()
        tokens = geometry.window_tokens
        self._program(kernels.prefill_merge, lowering, tokens, tokens)
        if index_k is None:
            return
        base, row_offset = pages.base_of(index_k)
        shapes = kernels.PrefillShapes(
            tokens, geometry.max_num_seqs, tokens, tuple(base.shape), width
        )
        fused = self._plan.fused_prefill if fused is None else fused
        self._program(kernels.prefill_local, self._lowering(row_offset), shapes, tokens, fused)

    # ---- programs and their memory ----

    def _lowering(self, row_offset: int = 0) -> kernels.Lowering:
        if row_offset not in self._lowerings:
            plan = at_row_offset(self._plan, row_offset)
            self._lowerings[row_offset] = kernels.lowering_of(plan, self._target)
        return self._lowerings[row_offset]

    def _program(self, lower: Callable[..., Lowered], *shapes: Any) -> Compiled:
        """The kernels of these shapes, compiled here at first, unless the stream is captured."""
        key = (lower.__name__, *shapes)
        if key not in self._programs:
            self._refuse_capture()
            lowered = lower(*shapes)
            self._stream.make_context_current()
            self._programs[key] = Compiled(lowered, self._scratch(key, lowered), self._upload)
        return self._programs[key]

    def _refuse_capture(self) -> None:
        if is_capturing(self._device):
            raise RuntimeError(
                "this call has shapes that are new to the plan, and nothing can be compiled or "
                "allocated inside torch.cuda.graph: before the capture, call warmup(index_k, ...) "
                "with these shapes, or the method once"
            )

    def _result(self, program: Compiled) -> torch.Tensor:
        """The rows that a program leaves in scratch memory, as they are sent."""
        found = program.buffer(program.returned[0], ())
        owned = (self._plan.geometry.world_size, self._plan.geometry.heads_per_rank)
        return found.view(*owned, *found.shape[1:])

    def _scratch(self, key: tuple[Any, ...], lowered: Lowered) -> list[torch.Tensor]:
        """Memory of a program's own; what is zero behind a copy is shared with no other."""
        copied = {step.scratch.index for step in lowered.steps if isinstance(step, Copy)}
        return [
            self._buffer(
                ("scratch", i, key if i in copied else None),
                *struct.shape,
                dtype=getattr(torch, struct.dtype.name),
            )
            for i, struct in enumerate(lowered.scratch)
        ]

    def _buffer(self, name: Any, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """A buffer of the route's own, zero at first."""
        key = (name, shape, dtype)
        if key not in self._buffers:
            self._buffers[key] = self._zeros(*shape, dtype=dtype)
        return self._buffers[key]

    def _zeros(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        self._refuse_capture()
        with torch.inference_mode(False):  # it is written outside inference mode too
            return torch.zeros(shape, dtype=dtype, device=self._device)

    def _upload(self, value: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.array(value)).to(self._device)


class BoundLaunches:
    """The launches of a decode.

    Attributes:
      launches: what is launched.
      places: of each of the call's tensors, the arguments that it is, by launch; None: others
        cannot take its tensors' places.
      once: how many of them are for one call alone: up to the last that takes its queries.
      tail: the others, which come again.
      rest: those behind the queries, where calls have come with others; else None.
    """

    __slots__ = ("launches", "once", "places", "rest", "tail")

    def __init__(
        self,
        launches: Launches,
        places: list[list[tuple[int, int]]] | None,
        once: int = 0,
        tail: Tail | None = None,
    ) -> None:
        self.launches = launches
        self.places = places
        self.once = once
        self.tail = Tail(launches) if tail is None else tail
        self.rest: Tail | None = None

    @classmethod
    def of(cls, launches: Launches, owners: tuple[Any, ...], *, by_address: bool) -> BoundLaunches:
        """The launches of a call.

        Args:
          owners: the call's tensors, None where there is none, and its comm.
          by_address: whether the launches have the tensors as addresses alone.
        """
        *tensors, comm = owners
        found: dict[int, list[tuple[int, int]]] = {}
        addresses = [x.data_ptr() for x in tensors if x is not None]
        for address in (*addresses, *(x.data_ptr() for x in comm.parts)):
            if address in found:  # whose an argument is cannot be told
                return cls(launches, None)
            found[address] = []
        for step, launch in enumerate(launches):
            for place, address in enumerate(launch.arguments or ()):
                found.get(address, []).append((step, place))
        return cls(launches, [found[x] for x in addresses] if by_address else None)

    def moved(self, changed: Mapping[int, torch.Tensor]) -> BoundLaunches | None:
        """The launches with other tensors, by their place among the call's."""
        if self.places is None:
            return None
        launches = [*self.launches]
        for i, tensor in changed.items():
            for step, place in self.places[i]:
                launches[step] = launches[step].at(place, tensor.data_ptr())
        found = BoundLaunches(launches, self.places)
        if changed.keys() == {0}:
            found.rest = self.rest
        return found

    def with_queries(self, address: int) -> BoundLaunches | None:
        """The launches with queries elsewhere, for one call."""
        if self.places is None:
            return None
        launches, once = [*self.launches], 0
        for step, place in self.places[0]:
            launches[step] = launches[step].at(place, address)
            once = step + 1
        if self.rest is None:
            self.rest = Tail(launches[once:])
        return BoundLaunches(launches, self.places, once, self.rest)


class Tail:
    """The last launches of a decode, which become a graph when they have come often enough.

    Attributes:
      launches: what is launched.
      graph: the same as a graph; None: not yet.
      wanted: how often they come until then; -1: never.
    """

    __slots__ = ("graph", "launches", "wanted")

    def __init__(self, launches: Launches) -> None:
        able = len(launches) > 1 and all(step.kernel is not None for step in launches)
        self.launches = launches
        self.graph: Graph | None = None
        self.wanted = _GRAPH_FROM if able else -1


class Stream:
    """torch's current stream of one device, and launches on it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._threads = _Threads()
        self._graphs = Graphs()

    def device(self) -> Any:
        """The context in which torch works on this device."""
        return torch.cuda.device(self._device)

    def launch(self, launches: Launches) -> None:
        """Puts launches on the current stream."""
        if not self._is_ready():
            with self._made_ready():
                self.launch(launches)
            return
        aot.launch(launches, self._current())

    def repeat(self, bound: BoundLaunches) -> None:
        """Puts a decode's launches on the current stream, those that come again as a graph."""
        if not self._is_ready():
            with self._made_ready():
                self.repeat(bound)
            return
        stream, tail = self._current(), bound.tail
        graph = tail.graph or self._graph(tail)
        # A graph inside a capture would be a node that hides its kernels' early launches.
        if graph is None or torch._C._cuda_isCurrentStreamCapturing():
            aot.launch(bound.launches, stream)
            return
        aot.launch(bound.launches[: bound.once], stream)
        graph.launch(stream)

    def _graph(self, tail: Tail) -> Graph | None:
        """The graph of launches that have come often enough; None: they have not, or cannot."""
        if tail.wanted < 0 or torch._C._cuda_isCurrentStreamCapturing():
            return None
        tail.wanted -= 1
        if tail.wanted < 0:
            tail.graph = self._graphs.make(tail.launches)
        return tail.graph

    def _current(self) -> int:
        return int(torch._C._cuda_getCurrentRawStream(self._device.index))

    def _is_ready(self) -> bool:
        """Whether this thread is on the device, with a context."""
        return torch._C._cuda_getDevice() == self._device.index and self._threads.ready

    @contextlib.contextmanager
    def _made_ready(self) -> Iterator[None]:
        with torch.cuda.device(self._device):
            if not self._threads.ready:
                self.make_context_current()
            yield

    def make_context_current(self) -> None:
        """Gives this thread a CUDA context, which torch does only when it needs one."""
        torch.cuda.mem_get_info(self._device)
        self._threads.ready = True


class _Threads(threading.local):
    ready = False


def _clear(call: PrefillCall) -> None:
    """A window without segments: no score, or rows without a candidate."""
    with torch.inference_mode():
        if call.plane is not None:
            clear_scores(call.plane)
            return
        carrier = call.carrier[:, : call.tokens]
        carrier[..., :TOPK] = rows.NEG_INF_WORD
        carrier[..., TOPK:-1] = rows.NO_BLOCK
        carrier[..., -1] = rows.READY
