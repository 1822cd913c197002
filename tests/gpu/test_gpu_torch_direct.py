"""The direct route on a GPU: the dlpack route's results and the oracle's, eager and captured."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chains import (
    GROUPS,
    Decoded,
    Prefilled,
    check_decoded,
    check_output,
    check_prefilled,
    make_plan,
    random_decode,
    random_prefill,
)

torch = pytest.importorskip("torch", reason="torch is not installed (extra torch)")

import torch_inputs  # noqa: E402
from inputs import TIME_LIMIT  # noqa: E402
from torch_inputs import Group, Step, decode_step, prefill_window  # noqa: E402

from msa_icp_torch import exchange  # noqa: E402

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[2]
GPU = torch.device("cuda", 0)
LENGTHS = [300, 0, 4000, 1]
SEGMENTS = [(40, 260, 300), (0, 0, 0), (57, 0, 57)]
SPIN_LIMIT = 1 << 24  # some ten seconds
DTYPES = pytest.mark.parametrize("index_dtype", ["float8_e4m3fn", "bfloat16"])


def make_group(world_size: int, page_size: int, route: str = "direct", **changes: Any) -> Group:
    options = {"device": GPU, "backend": "auto", "precision": "exact", "route": route}
    group = Group(world_size, page_size, **options | {"spin_limit": SPIN_LIMIT} | changes)
    assert all(plan.route == route for plan in group.plans)
    return group


def connect(group: Group) -> None:
    """One-sided transport between the ranks of one process."""
    for name in ("recv", "tagged_recv"):
        addresses = [getattr(comm, name).data_ptr() for comm in group.comms]
        for comm in group.comms:
            getattr(comm, f"{name}_bases").copy_(torch.tensor(addresses))
    for plan, comm in zip(group.plans, group.comms, strict=True):
        plan.check_comm(comm)


class OneSided:
    """All ranks of a group on this GPU, a stream a rank."""

    def __init__(self, group: Group) -> None:
        connect(group)
        self.group = group
        self.streams = [torch.cuda.Stream() for _ in group.plans]
        self._warm: set[Any] = set()

    def warm(self, steps: list[Step], query_len: int) -> None:
        """Compiles for every rank before one waits for another: loading code may wait too."""
        requests, width = steps[0].block_table.shape
        shape = (requests, query_len)
        if shape in self._warm:
            return
        self._warm.add(shape)
        for plan, step, comm in zip(self.group.plans, steps, self.group.comms, strict=True):
            plan.warmup(
                step.index_k,
                table_width=width,
                batch_sizes=[requests],
                query_lens=[query_len],
                comm=comm,
                prefill=False,
            )

    def each(self, call: Callable[[int], None]) -> None:
        """Runs a call of every rank at once; the current stream waits for them."""
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream())
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                call(rank)
        for stream in self.streams:
            torch.cuda.current_stream().wait_stream(stream)

    def decode(self, steps: list[Step], query_len: int, pools: Any = None, **options: Any) -> None:
        self.warm(steps, query_len)

        def call(rank: int) -> None:
            self.group.plans[rank].decode(
                *steps[rank],
                comm=self.group.comms[rank],
                decode_query_len=query_len,
                pool=None if pools is None else pools[rank],
                **{"slot": 0, "tagged": False} | options,
            )

        self.each(call)


def result(steps: list[Step]) -> Decoded:
    torch.cuda.synchronize()
    return Decoded(
        torch_inputs.outputs([s.output for s in steps]),
        torch_inputs.planes([s.scores for s in steps]),
    )


def faults(group: Group) -> list[int]:
    return [comm.errors.item() for comm in group.comms]


@pytest.fixture
def local_groups(monkeypatch: Any) -> None:
    torch_inputs.use_local_groups(monkeypatch)


@pytest.fixture
def self_exchange(monkeypatch: Any) -> None:
    """A rank that hears only itself."""
    monkeypatch.setattr(exchange, "check_group", lambda *_: None)
    monkeypatch.setattr(
        exchange, "all_to_all", lambda received, message, group: received.copy_(message)
    )


# ---- decode ----


@pytest.mark.parametrize(("world_size", "page_size"), GROUPS)
@DTYPES
def test_one_sided_decode_through_all_slots(world_size, page_size, index_dtype):
    """Legacy and tagged, each with a count of its own, as layers share the slots."""
    group = make_group(world_size, page_size, index_dtype=index_dtype)
    ranks, plan = OneSided(group), make_plan(world_size, page_size, index_dtype=index_dtype)
    case = random_decode(LENGTHS, 2, page_size, index_dtype=index_dtype)
    for slot in range(7):
        for tagged in (False, True):
            steps = [decode_step(plan, case) for plan in group.plans]
            ranks.decode(steps, 2, slot=slot, tagged=tagged)
            check_decoded(plan, case, result(steps), fused=False)
    assert faults(group) == [0] * world_size
    assert not any(comm.recv[..., 32].any() for comm in group.comms)
    for comm in group.comms:
        assert comm.publish_generations[:, 0, 0].tolist() == [3, 2, 2]
        assert comm.expected_generations[:, 0, 0].tolist() == [3, 2, 2]
        assert not comm.publish_generations[:, :, len(case.query) :].any()


def test_one_sided_generations_wrap_around():
    group = make_group(2, 128)
    ranks, case = OneSided(group), random_decode(LENGTHS, 2, 128)
    for comm in group.comms:
        comm.publish_generations.fill_(-2)
        comm.expected_generations.fill_(-2)
    for call in range(3):
        steps = [decode_step(plan, case) for plan in group.plans]
        ranks.decode(steps, 2, slot=3 * call, tagged=True)
        check_decoded(make_plan(2, 128), case, result(steps), fused=False)
        assert group.comms[0].publish_generations[0, 0, 0].item() == [-1, 1, 2][call]
    assert faults(group) == [0, 0]


def test_one_sided_decode_with_a_pool():
    group = make_group(4, 256)
    ranks, case = OneSided(group), random_decode([700, 2], 4, 256)
    steps = [decode_step(plan, case) for plan in group.plans]
    ranks.decode(steps, 4, group.decode_pools(7), tagged=True)
    check_decoded(make_plan(4, 256), case, result(steps), fused=True)


@pytest.mark.parametrize("tagged", [False, True])
def test_a_peer_that_never_comes_is_given_up(tagged):
    """Counted, answered by -1, and only in the rows that wait for it."""
    group = make_group(2, 128, spin_limit=1 << 10)
    connect(group)
    case = random_decode([300, 17], 1, 128)
    step = decode_step(group.plans[0], case)
    group.plans[0].decode(*step, comm=group.comms[0], slot=0, tagged=tagged, decode_query_len=1)
    torch.cuda.synchronize()
    assert faults(group) == [4, 0]  # one source, two owned heads, two tokens
    assert (step.output[:2] == -1).all()
    assert (step.output[2:] == torch_inputs.OLD_WORD).all()


@pytest.mark.parametrize("tagged", [False, True])
@DTYPES
def test_the_collective_decode_is_the_dlpack_route_bit_for_bit(local_groups, tagged, index_dtype):
    """Output, scores and the whole receive storage, faults included."""
    page_size = 256 if tagged else 128
    case = random_decode(LENGTHS, 2, page_size, index_dtype=index_dtype)
    found = {}
    for route in ("direct", "dlpack"):
        group = make_group(2, page_size, route, index_dtype=index_dtype)
        comm = group.comms[1]
        comm.recv[1, 0, 1, 3, 32] = 1  # a row that was not merged
        for name in ("publish_generations", "expected_generations"):
            getattr(comm, name).fill_(-1)
            getattr(group.comms[0], name).fill_(-1)
        comm.expected_generations[1, 1, 2] += 5
        for slot in range(4):
            steps = [decode_step(plan, case) for plan in group.plans]
            group.decode(steps, 2, slot=slot, tagged=tagged)
        torch.cuda.synchronize()
        assert faults(group) == [0, 2 if tagged else 1]
        names = ("recv", "tagged_recv", "publish_generations", "expected_generations", "errors")
        tensors = [getattr(c, name) for c in group.comms for name in names]
        found[route] = [x.cpu() for s in steps for x in s[5:]] + [x.cpu() for x in tensors]
    for mine, theirs in zip(found["direct"], found["dlpack"], strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("tagged", [False, True])
@DTYPES
def test_captured_decodes_replay_with_new_data(tagged, index_dtype):
    """Three layers in a graph of each rank: nothing but the tensors' values changes."""
    group = make_group(2, 128, index_dtype=index_dtype)
    ranks, plan = OneSided(group), make_plan(2, 128, index_dtype=index_dtype)
    case = random_decode(LENGTHS, 2, 128, index_dtype=index_dtype)
    steps = [decode_step(plan, case) for plan in group.plans]
    layers = 3
    outputs = [[torch.empty_like(step.output) for _ in range(layers)] for step in steps]
    ranks.warm(steps, 2)
    graphs = [torch.cuda.CUDAGraph() for _ in group.plans]
    for rank, (graph, stream) in enumerate(zip(graphs, ranks.streams, strict=True)):
        with torch.cuda.graph(graph, stream=stream):
            for layer in range(layers):
                group.plans[rank].decode(
                    *steps[rank]._replace(output=outputs[rank][layer]),
                    comm=group.comms[rank],
                    slot=layer,
                    tagged=tagged,
                    decode_query_len=2,
                )
    for seed in range(5):
        lengths = [(n * (seed + 1)) % 4500 for n in LENGTHS]
        new = random_decode(lengths, 2, 128, seed=seed, index_dtype=index_dtype)
        for rank_plan, step in zip(group.plans, steps, strict=True):
            for old, fresh in zip(step[:5], decode_step(rank_plan, new)[:5], strict=True):
                old.view(torch.uint8).copy_(fresh.view(torch.uint8))
        ranks.each(lambda rank: graphs[rank].replay())
        torch.cuda.synchronize()
        want = new.answer(plan)
        for layer in range(layers):
            mine = torch_inputs.outputs([out[layer] for out in outputs])
            np.testing.assert_array_equal(mine[:8], want)
    assert faults(group) == [0, 0]


def test_a_captured_collective_decode(self_exchange):
    """With whatever transport torch can capture, here a copy."""
    group = make_group(2, 128)
    plan, comm = group.plans[0], group.comms[0]
    step = decode_step(plan, random_decode(LENGTHS, 2, 128))
    answers = []
    for captured in (False, True):
        step.output.fill_(torch_inputs.OLD_WORD)
        graph = torch.cuda.CUDAGraph()

        def call(slot: int) -> None:
            plan.decode(*step, comm=comm, slot=slot, tagged=True, decode_query_len=2)

        if captured:
            with torch.cuda.graph(graph):
                call(1)
            graph.replay()
        else:
            call(0)
        torch.cuda.synchronize()
        answers.append(step.output.clone())
    assert torch.equal(*answers)
    assert comm.errors.item() == 0
    assert comm.publish_generations[:, 0, 0].tolist() == [1, 1, 0]


def test_an_unwarmed_shape_inside_a_capture_says_what_to_do():
    group = make_group(2, 128)
    connect(group)
    step = decode_step(group.plans[0], random_decode(LENGTHS, 2, 128))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match=r"before the capture, call warmup\(index_k"):
            group.plans[0].decode(
                *step, comm=group.comms[0], slot=0, tagged=False, decode_query_len=2
            )
        step.output.add_(0)  # a graph must not be empty
    torch.cuda.synchronize()
    assert (step.output == torch_inputs.OLD_WORD).all()


@contextlib.contextmanager
def waits_are_errors() -> Iterator[None]:
    """In it, what torch knows to wait for the GPU raises."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        try:
            torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("fresh", [False, True])
def test_calls_neither_wait_nor_allocate(fresh):
    """On known tensors and new ones: the stream stays busy, and the counts of allocations stay."""
    group = make_group(2, 128)
    ranks = OneSided(group)
    case = random_decode(LENGTHS, 2, 128)
    steps = [decode_step(plan, case) for plan in group.plans]
    queries = [
        [step.index_q.clone() if fresh else step.index_q for _ in range(20)] for step in steps
    ]
    for tagged in (False, True):
        for slot in range(3):
            ranks.decode(steps, 2, slot=slot, tagged=tagged)
    for cycles in (1 << 30, 1 << 33):  # half a second; four, where the host is slow
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        for stream in ranks.streams:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(cycles)
        with waits_are_errors():
            for call in range(20):
                mine = [s._replace(index_q=q[call]) for s, q in zip(steps, queries, strict=True)]
                ranks.decode(mine, 2, slot=call, tagged=bool(call % 2))
        if busy := not ranks.streams[0].query():
            break
    assert busy, "a call waited for the stream's work, or took the host longer than that"
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    check_output(make_plan(2, 128), case, result(steps).output)
    assert faults(group) == [0, 0]


def test_a_slow_producer_and_what_follows_are_kept_in_order(self_exchange):
    """A thousand calls on a side stream, behind a late write and ahead of the next one."""
    group = make_group(2, 128)
    plan, comm = group.plans[0], group.comms[0]
    step = decode_step(plan, random_decode(LENGTHS, 2, 128))
    plan.decode(*step, comm=comm, slot=0, tagged=True, decode_query_len=2)
    want, late = step.output.clone(), [step.index_q, step.index_k, step.num_valid_pages]
    values = [x.clone() for x in late]
    wrong = torch.zeros((), dtype=torch.int64, device=GPU)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for call in range(1, 1001):
            for tensor in late:
                tensor.view(torch.uint8).zero_()
            step.output.zero_()
            torch.cuda._sleep(100_000)
            for tensor, value in zip(late, values, strict=True):
                tensor.copy_(value)
            plan.decode(*step, comm=comm, slot=call, tagged=True, decode_query_len=2)
            wrong += (step.output[:8] != want[:8]).sum()
    stream.synchronize()
    assert wrong.item() == 0
    assert comm.errors.item() == 0


@pytest.mark.parametrize("fresh", [False, True])
def test_ten_thousand_decodes_leak_nothing(self_exchange, fresh):
    group = make_group(2, 128)
    plan, comm = group.plans[0], group.comms[0]
    step = decode_step(plan, random_decode(LENGTHS, 2, 128))

    def call(slot: int) -> None:
        mine = step._replace(index_q=step.index_q.clone()) if fresh else step
        plan.decode(*mine, comm=comm, slot=slot, tagged=False, decode_query_len=2)

    for slot in range(1000):
        call(slot)
    torch.cuda.synchronize()
    gc.collect()
    used, resident = torch.cuda.memory_allocated(), resident_bytes()
    for slot in range(10_000):
        call(slot)
    torch.cuda.synchronize()
    gc.collect()
    assert torch.cuda.memory_allocated() == used
    assert resident_bytes() - resident < 4 << 20
    assert len(plan._route._calls._calls) <= 6
    assert comm.errors.item() == 0


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


# ---- one-sided decodes that come again ----


class Repeating:
    """A group's decode on the same tensors, again and again."""

    def __init__(self, **options: Any) -> None:
        self.group = make_group(2, 128)
        self.ranks, self.plan = OneSided(self.group), make_plan(2, 128)
        self.case = random_decode(LENGTHS, 2, 128)
        self.steps = [decode_step(plan, self.case) for plan in self.group.plans]
        self.options = {"tagged": True} | options

    def call(self) -> None:
        self.ranks.decode(self.steps, 2, **self.options)

    def call_of(self, rank: int) -> None:
        """A rank's call on the current stream."""
        options = {"comm": self.group.comms[rank], "decode_query_len": 2, "slot": 0}
        self.group.plans[rank].decode(*self.steps[rank], **options | self.options)

    def write(self, seed: int) -> None:
        """Another case in the same tensors."""
        lengths = [(n * (seed + 1)) % 4500 for n in LENGTHS]
        self.case = random_decode(lengths, 2, 128, seed=seed)
        for plan, step in zip(self.group.plans, self.steps, strict=True):
            for old, new in zip(step[:5], decode_step(plan, self.case)[:5], strict=True):
                old.view(torch.uint8).copy_(new.view(torch.uint8))
            step.output.fill_(torch_inputs.OLD_WORD)

    def check(self) -> None:
        check_output(self.plan, self.case, result(self.steps).output)
        assert faults(self.group) == [0, 0]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("tagged", [False, True])
def test_repeats_answer_for_new_data_in_the_same_tensors(tagged, fused):
    repeating = Repeating(tagged=tagged)
    if fused:
        repeating.options["pools"] = repeating.group.decode_pools(7)
    for seed in range(6):
        repeating.write(seed)
        repeating.call()
        repeating.check()
    assert len(graphs_of(repeating)) == (0 if fused else 2)


def graphs_of(repeating: Repeating) -> list[Any]:
    """Those that the repeated decodes became."""
    calls = [plan._route._calls._calls.values() for plan in repeating.group.plans]
    bound = [call.bound for found in calls for calls_of_key in found for call in calls_of_key]
    tails = [tail for x in bound for tail in (x.tail, x.rest)]
    return [tail.graph for tail in tails if tail is not None and tail.graph is not None]


@pytest.mark.parametrize("fresh", [False, True])
def test_repeats_become_graphs_while_another_thread_captures(fresh):
    """What is made for them on the way is no business of the capture."""
    repeating = Repeating()
    repeating.call()
    torch.cuda.synchronize()
    start, done = threading.Event(), threading.Event()
    counter, graph = torch.zeros(1, device=GPU), torch.cuda.CUDAGraph()

    def capture() -> None:
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            counter.add_(1)
            start.set()
            done.wait(60)
            counter.add_(1)

    queries = [[step.index_q.clone() for step in repeating.steps] for _ in range(8)]
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as threads:
        captured = threads.submit(capture)
        start.wait(60)
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for mine in queries:
                    if fresh:
                        steps = zip(repeating.steps, mine, strict=True)
                        repeating.steps = [step._replace(index_q=q) for step, q in steps]
                    repeating.call()
        finally:
            done.set()
        captured.result()
    repeating.check()
    assert len(graphs_of(repeating)) == 2
    graph.replay()
    torch.cuda.synchronize()
    assert counter.item() == 2


def test_repeats_on_streams_that_wait_for_one_another():
    repeating = Repeating()
    for seed in range(8):
        repeating.ranks.streams = [torch.cuda.Stream() for _ in range(2)]
        repeating.write(seed)
        repeating.call()
    repeating.check()


def test_repeats_with_a_thread_for_each_rank():
    """Legacy rows, whose flags make a rank that is ahead wait."""
    repeating = Repeating(tagged=False)
    repeating.call()
    torch.cuda.synchronize()

    def work(rank: int) -> None:
        with torch.cuda.stream(repeating.ranks.streams[rank]):
            for _ in range(200):
                repeating.call_of(rank)

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(work, range(2)))
    repeating.check()
    assert not any(comm.recv[..., 32].any() for comm in repeating.group.comms)


def test_a_capture_of_a_decode_that_was_repeated():
    """The call is found, and its kernels go into the capture; it repeats outside as before."""
    repeating = Repeating()
    for _ in range(3):
        repeating.call()
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    for rank, (graph, stream) in enumerate(zip(graphs, repeating.ranks.streams, strict=True)):
        with torch.cuda.graph(graph, stream=stream):
            repeating.call_of(rank)
    for seed in range(1, 4):
        repeating.write(seed)
        repeating.ranks.each(lambda rank: graphs[rank].replay())
        repeating.check()
        repeating.write(seed + 10)
        repeating.call()
        repeating.check()


@pytest.mark.parametrize("change", ["moved", "died"])
def test_repeats_of_tensors_that_changed(change):
    """A new address is prepared anew, whatever of the old call still runs."""
    repeating = Repeating()
    for seed in range(4):
        for _ in range(2):
            repeating.call()
        if change == "moved":
            for step in repeating.steps:
                step.index_q.set_(step.index_q.clone())
        else:
            repeating.steps = [
                step._replace(index_q=step.index_q.clone(), output=step.output.clone())
                for step in repeating.steps
            ]
        repeating.write(seed)
        repeating.call()
        repeating.check()


def test_a_repeated_decode_may_be_forgotten_inside_a_capture():
    repeating = Repeating()
    for _ in range(2):
        repeating.call()
    torch.cuda.synchronize()
    counter = torch.zeros(1, device=GPU)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counter.add_(1)
        repeating.steps.clear()
        gc.collect()
        counter.add_(1)
    assert not any(plan._route._calls._calls for plan in repeating.group.plans)
    graph.replay()
    torch.cuda.synchronize()
    assert counter.item() == 2


@pytest.mark.parametrize("dropped", [False, True])
def test_ten_thousand_repeats_leak_nothing(dropped):
    """Of one call, and of calls that are prepared, repeated as graphs and forgotten."""
    repeating = Repeating()

    def work(count: int) -> None:
        for call in range(count):
            if dropped and call % 9 == 0:  # they settle, and become a graph
                repeating.steps = [
                    step._replace(index_q=step.index_q.clone()) for step in repeating.steps
                ]
            repeating.call()
        torch.cuda.synchronize()
        gc.collect()

    work(500)
    used, resident = torch.cuda.memory_allocated(), resident_bytes()
    work(5000)
    assert torch.cuda.memory_allocated() == used
    assert resident_bytes() - resident < 4 << 20
    assert all(len(plan._route._calls._calls) <= 2 for plan in repeating.group.plans)
    repeating.check()


# ---- prefill ----


@pytest.mark.parametrize(
    ("world_size", "page_size", "tokens"),
    [(2, 128, 128), (2, 256, 97), (4, 128, 97), (4, 256, 128)],
)
@DTYPES
def test_prefill(world_size, page_size, tokens, index_dtype):
    """Scored and fused; a whole number of tiles, and not."""
    group = make_group(world_size, page_size, index_dtype=index_dtype)
    plan = make_plan(world_size, page_size, index_dtype=index_dtype)
    case = random_prefill(SEGMENTS, tokens, page_size, index_dtype=index_dtype)
    pool_shape = group.plans[0].prefill_pool_shape()
    for fused in (False, True):
        windows = [prefill_window(rank_plan, case) for rank_plan in group.plans]
        pool = torch.zeros(pool_shape, dtype=torch.uint8, device=GPU) if fused else None
        for rank_plan, window in zip(group.plans, windows, strict=True):
            torch_inputs.prefill_local(rank_plan, case, window, pool)
        for rank_plan, window in zip(group.plans, windows, strict=True):
            heads = rank_plan.geometry.heads_per_rank
            owned = slice(rank_plan.rank * heads, (rank_plan.rank + 1) * heads)
            window.received.copy_(torch.stack([w.carrier[owned] for w in windows]))
            rank_plan.prefill_merge(window.received, window.num_valid_pages, window.output)
        torch.cuda.synchronize()
        found = Prefilled(
            torch_inputs.outputs([w.output for w in windows]),
            np.stack([w.carrier.cpu().numpy() for w in windows]),
            torch_inputs.planes([w.score_scratch for w in windows]),
        )
        check_prefilled(plan, case, found, fused=fused)


def test_prefill_is_the_dlpack_route_bit_for_bit_in_fast_precision():
    case = random_prefill(SEGMENTS, 128, 128)
    found = []
    for route in ("direct", "dlpack"):
        (plan, *_) = make_group(2, 128, route, precision="fast").plans
        window = prefill_window(plan, case)
        torch_inputs.prefill_local(plan, case, window)
        torch.cuda.synchronize()
        found.append((window.carrier, window.score_scratch))
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine.view(torch.int32), theirs.view(torch.int32))


@DTYPES
def test_a_captured_prefill_replays_with_new_data(index_dtype):
    """The window plan is built inside the graph, from lengths that change."""
    group = make_group(2, 128, index_dtype=index_dtype)
    plan = make_plan(2, 128, index_dtype=index_dtype)
    rank_plan = group.plans[1]
    cases = [
        random_prefill(segments, 128, 128, seed=seed, index_dtype=index_dtype)
        for seed, segments in enumerate(
            [SEGMENTS, [(100, 0, 100), (5, 900, 905), (23, 40, 63)], [(0, 0, 0)] * 3]
        )
    ]
    window = prefill_window(rank_plan, cases[0])
    torch_inputs.prefill_local(rank_plan, cases[0], window)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch_inputs.prefill_local(rank_plan, cases[0], window)
    for case in cases:
        new = prefill_window(rank_plan, case)
        olds = (*window[:3], *window.lengths, window.num_valid_pages)
        news = (*new[:3], *new.lengths, new.num_valid_pages)
        for old, fresh in zip(olds, news, strict=True):
            old.view(torch.uint8).copy_(fresh.view(torch.uint8))
        graph.replay()
        torch.cuda.synchronize()
        np.testing.assert_array_equal(window.carrier[:, :128].cpu().numpy(), case.rows(plan, 1))


# ---- two libraries on one GPU ----

PEACE = """
import numpy as np
from jax._src import xla_bridge
import torch_inputs
from chains import check_output, make_plan, random_decode
from torch_inputs import Group, decode_step, outputs

from msa_icp_torch import exchange
exchange.check_group = lambda *_: None
exchange.all_to_all = lambda received, message, group: received.copy_(message)

def decode(route):
    plan = torch_inputs.prepare(
        2, 128, 0, device=torch.device("cuda", 0), backend="auto", precision="exact", route=route
    )
    step, comm = decode_step(plan, random_decode([300, 0, 4000, 1], 2, 128)), plan.init_comm()
    plan.decode(*step, comm=comm, slot=0, tagged=True, decode_query_len=2)
    torch.cuda.synchronize()
    assert comm.errors.item() == 0
    return step.output

first = decode("direct")
assert not xla_bridge.backends_are_initialized(), "lowering left a backend behind"
assert jax.devices()[0].platform == "gpu", "JAX is not what it was"
assert torch.equal(decode("dlpack"), first)
assert torch.equal(decode("direct"), first), "lowered where a backend is up"
assert jax.devices()[0].memory_stats()["pool_bytes"] < 1 << 30, "taken ahead"
print("fine")
"""


@pytest.mark.parametrize("imports", ["import torch, jax\n", "import jax, torch\n"])
def test_the_gpu_is_left_to_torch(imports):
    """No client of JAX's for direct launches, and no memory taken ahead for either route."""
    folders = [ROOT, ROOT / "interop", ROOT / "tests", *os.environ.get("PYTHONPATH", "").split(":")]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("XLA_")}
    done = subprocess.run(
        [sys.executable, "-c", imports + PEACE],
        env=environment | {"PYTHONPATH": os.pathsep.join(map(str, folders))},
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
    )
    assert done.stdout.strip() == "fine", done.stderr[-3000:]
