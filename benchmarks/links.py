"""What the exchange's benchmark runs between GPUs, how it times it, and the rows it keeps.

exchange.py is its command line, and says what the stages and backends are. This needs torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks import check, results, roofline
from benchmarks.cases import INIT_BLOCKS, LOCAL_BLOCKS, PAGE_SIZE, Decode
from benchmarks.graph import Bound, Lowered, empty, lower
from benchmarks.inputs import Inputs
from benchmarks.timing import Times
from msa_icp_jax import (
    msa_icp_comm_layout,
    msa_icp_decode_index_score_sharded,
    msa_icp_merge_candidates,
    msa_icp_topk_select_publish,
)
from msa_icp_jax.geometry import NUM_HEADS, NUM_SLOTS, TOPK
from msa_icp_jax.ops._mosaic.launch import Target, launch
from msa_icp_jax.ops._mosaic.publish import publish_rows, publish_tagged_rows
from msa_icp_jax.ops.merge.mosaic import merge_arriving_rows
from msa_icp_jax.ops.select.mosaic import select_and_publish_rows, select_and_publish_tagged_rows
from msa_icp_jax.rows import READY, ROW_WORDS, TAGGED_WORDS

LINKS = 96  # of a graph; whole turns of the three slots
RUNS = 11
_SPIN_LIMIT = 1 << 24  # looks, some seconds
_WORD = 4

Launch = Callable[[], None]


class Kernels:
    """A case's functions, lowered once for every rank."""

    def __init__(self, case: Decode, target: Target) -> None:
        self.case, self.target = case, target
        self._lowered: dict[str, Lowered] = {}
        self._scratch: dict[str, list[Any]] = {}

    def bind(self, name: str, *arguments: Any) -> Bound:
        """The function of that name on these buffers."""
        if name not in self._lowered:
            structs = [_struct(x) for x in arguments]
            self._lowered[name] = lower(getattr(self, f"_{name}"), *structs)
            self._scratch[name] = []
        return Bound(self._lowered[name], arguments, self._scratch[name])

    def _score(self, queries: Any, keys: Any, table: Any, lens: Any, scores: Any, rank: Any) -> Any:
        return msa_icp_decode_index_score_sharded(
            queries,
            keys,
            table,
            lens,
            scores,
            rank=rank,
            world_size=self.case.world_size,
            page_size=PAGE_SIZE,
            decode_query_len=self.case.query_len,
            max_decode_query_len=self.case.query_len,
            enable_pdl=True,
            backend="mosaic",
            precision="exact",
        )

    def _select(self, scores: Any, counts: Any, rank: Any) -> Any:
        return msa_icp_topk_select_publish(
            scores,
            counts,
            rank=rank,
            world_size=self.case.world_size,
            heads_per_rank=self.case.heads_per_rank,
            force_begin_blocks=INIT_BLOCKS,
            force_end_blocks=LOCAL_BLOCKS,
            enable_pdl=True,
            backend="mosaic",
        ).rows

    def _merge(self, received: Any, counts: Any, output: Any, errors: Any) -> Any:
        merged = msa_icp_merge_candidates(
            received,
            counts,
            output,
            errors,
            init_blocks=INIT_BLOCKS,
            local_blocks=LOCAL_BLOCKS,
            enable_pdl=True,
            backend="mosaic",
        )
        return merged.recv_slot, merged.output, merged.errors

    def _publish_legacy(self, rows: Any, bases: Any, errors: Any, rank: Any, slot: Any) -> Any:
        return publish_rows(
            rows,
            bases,
            errors,
            rank=rank,
            slot=slot,
            capacity=self.case.tokens,
            spin_limit=_SPIN_LIMIT,
            enable_pdl=True,
            target=self.target,
        )

    def _publish_tagged(self, rows: Any, bases: Any, counters: Any, rank: Any, slot: Any) -> Any:
        return publish_tagged_rows(
            rows, bases, counters, rank=rank, slot=slot, enable_pdl=True, target=self.target
        )

    def _select_legacy(
        self, scores: Any, counts: Any, bases: Any, errors: Any, rank: Any, slot: Any
    ) -> Any:
        return select_and_publish_rows(
            *(scores, counts, bases, errors),
            capacity=self.case.tokens,
            spin_limit=_SPIN_LIMIT,
            **self._sender(rank, slot),
        )

    def _select_tagged(
        self, scores: Any, counts: Any, bases: Any, counters: Any, rank: Any, slot: Any
    ) -> Any:
        return select_and_publish_tagged_rows(
            scores, counts, bases, counters, **self._sender(rank, slot)
        )

    def _sender(self, rank: Any, slot: Any) -> dict[str, Any]:
        """What is the same for both forms of rows."""
        return {
            "rank": rank,
            "slot": slot,
            "index_scale": 1,
            "index_offset": 0,
            "force_begin_blocks": INIT_BLOCKS,
            "force_end_blocks": LOCAL_BLOCKS,
            "enable_pdl": True,
            "target": self.target,
        }

    def _merge_legacy(self, *arrays: Any) -> Any:
        return self._merge_arriving(*arrays, None)

    def _merge_tagged(self, *arrays: Any) -> Any:
        return self._merge_arriving(*arrays)

    def _merge_arriving(
        self, recv: Any, counts: Any, output: Any, errors: Any, slot: Any, expected: Any
    ) -> Any:
        return merge_arriving_rows(
            recv,
            counts,
            output,
            errors,
            expected,
            slot=slot,
            init_blocks=INIT_BLOCKS,
            local_blocks=LOCAL_BLOCKS,
            spin_limit=_SPIN_LIMIT,
            enable_pdl=True,
            target=self.target,
        )

    def _empty(self, word: Any) -> Any:
        """A kernel that does nothing, launched as the others are."""

        def body(word: Any, out: Any) -> None:
            del word, out
            plgpu.griddepcontrol_launch_dependents()
            plgpu.griddepcontrol_wait()

        out = jax.ShapeDtypeStruct((1,), jnp.int32)
        return launch(body, name="empty", target=self.target, grid=(1,), out_type=out)(word)


def _struct(x: Any) -> jax.ShapeDtypeStruct:
    dtype = jnp.dtype(str(x.dtype).removeprefix("torch."))
    return jax.ShapeDtypeStruct(tuple(x.shape), dtype)


class Links:
    """One rank's links of a case: launches with their buffers, and what they write."""

    def __init__(self, case: Decode, inputs: Inputs, rank: int, target: Target) -> None:
        self.case, self._inputs = case, inputs
        self._kernels = Kernels(case, target)
        heads, tokens = case.heads_per_rank, case.tokens
        plane = jax.ShapeDtypeStruct((tokens, NUM_HEADS, case.columns), jnp.float32)
        self._scores = [empty(plane) for _ in inputs.sets]
        self._rank, self._slots = _words(fill=rank), [_words(fill=i) for i in range(NUM_SLOTS)]
        self._counts = torch.from_dlpack(inputs.fixed["counts"])
        self._output, self._errors = _words(tokens, heads, TOPK), _words(1)
        self._storage = _Storage(case)

        for run in self._local(0):
            run()
        sent = self._kernels.bind("select", self._scores[0], self._counts, self._rank).results[0]
        self._rows = sent.view(case.world_size, heads, tokens, ROW_WORDS)  # of every select
        self._received = self._delivered().expand(LINKS, *self._rows.shape).contiguous()

    def link(self, stage: str, backend: str, number: int) -> list[Launch]:
        """The launches of a link."""
        if stage == "exchange":
            return self._exchange(backend, number)
        if not backend.startswith("one-sided"):
            return self._local(number) + self._exchange(backend, number)
        scores = self._scores[number % len(self._inputs.sets)]
        sent = self._one_sided("select", (scores, self._counts), backend, number)
        return [self._score(number), *sent]

    def empty(self) -> Launch:
        """A kernel that does nothing."""
        return self._kernels.bind("empty", _words(1)).launch

    def arm(self) -> None:
        """Makes rows ready that a merge has taken."""
        self._received[..., -1] = READY

    def check(self, backend: str, launches: Sequence[Launch], number: int) -> None:
        """Runs a link and raises unless it merges what the ranks sent (or what was there)."""
        self.arm()
        for run in self._local(number):  # a chain that publishes leaves no rows of its own here
            run()
        self._output.fill_(-7)
        for run in launches:
            run()
        merged = self._received[number].clone() if backend == "none" else self._delivered()
        merged[..., -1] = READY
        check.check_merged(self.case, merged, self._counts, self._output, self._errors)

    def _local(self, number: int) -> list[Launch]:
        scores = self._scores[number % len(self._inputs.sets)]
        select = self._kernels.bind("select", scores, self._counts, self._rank)
        return [self._score(number), select.launch]

    def _score(self, number: int) -> Launch:
        which = number % len(self._inputs.sets)
        arrays = self._inputs.fixed | self._inputs.sets[which]
        read = [arrays[name] for name in ("queries", "keys", "table", "lens")]
        return self._kernels.bind("score", *read, self._scores[which], self._rank).launch

    def _exchange(self, backend: str, number: int) -> list[Launch]:
        if backend.startswith("one-sided"):
            return self._one_sided("publish", (self._rows,), backend, number)
        received = self._received[number]
        send = functools.partial(dist.all_to_all_single, received, self._rows)
        merge = self._kernels.bind("merge", received, *self._results).launch
        return [merge] if backend == "none" else [send, merge]

    def _one_sided(
        self, kernel: str, given: tuple[Any, ...], backend: str, number: int
    ) -> list[Launch]:
        """A kernel that sends rows, made of what is given, and the merge that waits for them."""
        form, slot = backend.removeprefix("one-sided-"), self._slots[number % NUM_SLOTS]
        recv, bases, sent, expected = self._storage.of(form, self._errors)
        send = self._kernels.bind(f"{kernel}_{form}", *given, bases, sent, self._rank, slot)
        merge = self._kernels.bind(f"merge_{form}", recv, *self._results, slot, *expected)
        return [send.launch, merge.launch]

    @property
    def _results(self) -> tuple[Any, ...]:
        """What a merge takes besides received rows."""
        return self._counts, self._output, self._errors

    def _delivered(self) -> Any:
        """What all ranks' last rows are here, through the collective."""
        received = torch.empty_like(self._rows)
        dist.all_to_all_single(received, self._rows)
        return received


class _Storage:
    """A rank's receive storage, in memory that the other ranks' kernels reach."""

    def __init__(self, case: Decode) -> None:
        layout = msa_icp_comm_layout(case.world_size, case.heads_per_rank, case.tokens)
        self._words = symmetric_memory.empty(layout.storage_words, dtype=torch.int32, device="cuda")
        self._addresses = symmetric_memory.rendezvous(self._words, dist.group.WORLD).buffer_ptrs
        self._words.zero_()
        torch.cuda.synchronize()
        dist.barrier()
        self._parts = {
            "legacy": (layout.legacy_offset_bytes, layout.legacy_shape),
            "tagged": (layout.tagged_offset_bytes, (*layout.tagged_shape, 2)),
        }
        self._sent = _words(*layout.generations_shape)
        self._expected = _words(*layout.expected_shape)

    def of(self, form: str, errors: Any) -> tuple[Any, Any, Any, list[Any]]:
        """Received rows, all ranks' addresses, what a publish counts, what a merge expects."""
        offset, shape = self._parts[form]
        start = offset // _WORD
        recv = self._words[start : start + torch.Size(shape).numel()].view(shape)
        bases = torch.tensor([x + offset for x in self._addresses]).cuda()
        bases = bases.view(torch.int32).view(-1, 2)
        if form == "tagged":
            return recv, bases, self._sent, [self._expected]
        return recv, bases, errors, []


def _words(*shape: int, fill: int = 0) -> Any:
    return torch.full(shape, fill, dtype=torch.int32, device="cuda")


# ---- timing ----


def graph_times(links: Sequence[Sequence[Launch]], before: Launch) -> Times:
    """Microseconds of a link in a graph of all links, one figure a replay."""
    before()
    _run(links)  # loads every kernel
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        _run(links)
    return Times(_timed(graph.replay, before, len(links)), "graph")


def eager_times(links: Sequence[Sequence[Launch]], before: Launch) -> Times:
    """Microseconds of a link, launched one by one."""
    return Times(_timed(functools.partial(_run, links), before, len(links)), "eager")


def _run(links: Sequence[Sequence[Launch]]) -> None:
    for launches in links:
        for run in launches:
            run()


def _timed(run: Launch, before: Launch, links: int) -> tuple[float, ...]:
    found = []
    token = torch.zeros(1, device="cuda")
    for number in range(RUNS + 1):
        before()
        torch.cuda.synchronize()
        dist.all_reduce(token)  # all ranks start together
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if number:  # the first one uploads the graph
            found.append(begin.elapsed_time(end) * 1e3 / links)
    return tuple(found)


def slower_rank(times: Times) -> Times:
    """The times of the rank whose median is the largest."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, times)
    return max(every, key=lambda times: times.median)


# ---- rows ----


class Recorder:
    """Measures a case's stages and keeps the rows, which rank 0 saves."""

    def __init__(self, out: Path, commit: str | None, ceilings: roofline.Ceilings) -> None:
        self.out = out
        device = f"{torch.cuda.get_device_name()} x{dist.get_world_size()}"
        self._setting = results.Setting(device, str(torch.__version__), ceilings, commit)

    def measure(self, links: Links, stages: Sequence[str], backends: Sequence[str]) -> None:
        node_us = graph_times([[links.empty()]] * LINKS, _nothing).median
        for stage in stages:
            alone: dict[str, float] = {}
            for backend in backends:
                for row in self._measure(links, stage, backend, node_us):
                    if backend == "none":
                        alone[row["stage"]] = row["median_us"]
                    elif row["stage"] in alone:
                        row["added_us"] = round(row["median_us"] - alone[row["stage"]], 3)
                    self._keep(row)

    def _measure(
        self, links: Links, stage: str, backend: str, node_us: float
    ) -> Iterator[results.Row]:
        case = links.case
        bound = [links.link(stage, backend, i) for i in range(LINKS)]
        before = links.arm if backend == "none" else _nothing
        ceilings = self._setting.ceilings
        floor = case.floor("chain").us(ceilings.read_tbps, ceilings.fp8_tflops)
        if stage == "exchange":
            floor = node_us * len(bound[0])
        words = 2 * TAGGED_WORDS if backend == "one-sided-tagged" else ROW_WORDS
        sent = (case.world_size - 1) * case.heads_per_rank * case.tokens * words * _WORD
        for name, measure in ((stage, graph_times), (f"{stage}-eager", eager_times)):
            times = slower_rank(measure(bound, before))
            links.check(backend, bound[0], 0)
            yield results.row(
                (case.name, name, backend, "exact"),
                times,
                floor,
                self._setting,
                payload_bytes=0 if backend == "none" else sent,
                empty_kernel_us=round(node_us, 3),
            )

    def _keep(self, row: results.Row) -> None:
        if dist.get_rank() == 0:
            label = results.label(results.key_of(row))
            print(f"{label}: {row['median_us']} us, adds {row.get('added_us')}", flush=True)
            results.save(self.out, [row])


def _nothing() -> None:
    pass
