"""The dlpack route on a GPU: order with work in flight, results in place, no capture."""

from __future__ import annotations

import gc
import time
from typing import Any

import jax
import numpy as np
import pytest
from chains import check_output, make_plan, random_decode, random_prefill

torch = pytest.importorskip("torch", reason="torch is not installed (extra torch)")

import torch_inputs  # noqa: E402
from torch_inputs import decode_step, prefill_local, prefill_window  # noqa: E402

from msa_icp_torch import crossing, exchange  # noqa: E402
from msa_icp_torch.jax_stream import find_stream  # noqa: E402

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)

TOKENS = 97
SEGMENTS = [(40, 260, 300), (0, 0, 0), (57, 0, 57)]


def prepare(rank: int = 0, **changes: Any) -> Any:
    device = torch.device("cuda", 0)
    options = {"backend": "auto", "precision": "exact", "route": "dlpack"}
    return torch_inputs.prepare(2, 128, rank, device=device, **options | changes)


@pytest.fixture
def self_exchange(monkeypatch: Any) -> None:
    """A rank that hears only itself, twice; enough to see order and memory."""
    monkeypatch.setattr(exchange, "check_group", lambda *_: None)
    monkeypatch.setattr(
        exchange, "all_to_all", lambda received, message, group: received.copy_(message)
    )


def busy(cycles: int = 20_000_000) -> None:
    """Keeps the current stream busy for some milliseconds."""
    torch.cuda._sleep(cycles)


def allocated() -> int:
    """Bytes that torch has given out, once JAX has let go of what its programs took."""
    torch.cuda.synchronize()
    gc.collect()
    time.sleep(0.5)
    return torch.cuda.memory_allocated()


def rows(case: Any, rank: int) -> Any:
    return case.rows(make_plan(2, 128), rank)


@pytest.mark.parametrize(("side", "repeats"), [(False, 50), (True, 1000)])
def test_prefill_waits_for_work_in_flight(side, repeats):
    """Inputs written late on the current stream, by kept and fresh imports alike."""
    plan = prepare()
    case = random_prefill(SEGMENTS, TOKENS, 128)
    window = prefill_window(plan, case)
    prefill_local(plan, case, window)  # compiles, and keeps the imports
    want = rows(case, 0)
    late = [window.query, window.index_k, window.block_table, window.num_valid_pages]
    values = [tensor.clone() for tensor in late]
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    torch.cuda.synchronize()
    cycles = 20_000_000 * 50 // repeats + 3_000_000  # longer than a call takes the host
    for _ in range(repeats):
        with torch.cuda.stream(stream):
            for tensor in late:
                tensor.view(torch.uint8).zero_()
            window.carrier.zero_()
            busy(cycles)
            for tensor, value in zip(late, values, strict=True):
                tensor.copy_(value)
            prefill_local(plan, case, window)
            # Behind the call on the same stream: must not reach it.
            found = window.carrier.clone()
            for tensor in late:
                tensor.view(torch.uint8).zero_()
        stream.synchronize()
        np.testing.assert_array_equal(found[:, :TOKENS].cpu().numpy(), want)


def test_prefill_of_both_ranks_agrees_with_the_oracle():
    case = random_prefill(SEGMENTS, TOKENS, 128)
    plans = [prepare(rank) for rank in range(2)]
    windows = [prefill_window(plan, case) for plan in plans]
    for plan, window in zip(plans, windows, strict=True):
        pointer = window.carrier.data_ptr()
        prefill_local(plan, case, window)
        assert window.carrier.data_ptr() == pointer
    for plan, window in zip(plans, windows, strict=True):
        owned = slice(2 * plan.rank, 2 * plan.rank + 2)
        received = torch.stack([w.carrier[owned] for w in windows])
        plan.prefill_merge(received, window.num_valid_pages, window.output)
    output = torch_inputs.outputs([w.output for w in windows])
    check_output(make_plan(2, 128), case, output)


@pytest.mark.parametrize("tagged", [False, True])
def test_decode_writes_in_place_without_growing(self_exchange, tagged):
    """`deliver` raises where a result lies elsewhere than the caller's tensor."""
    plan = prepare()
    case = random_decode([300, 0, 4000, 1], 2, 128)
    step, comm = decode_step(plan, case), plan.init_comm()

    def call(slot: int) -> None:
        plan.decode(*step, comm=comm, slot=slot, tagged=tagged, decode_query_len=2)

    for slot in range(3):
        call(slot)
    used = allocated()
    for slot in range(3, 300):
        call(slot)
    assert comm.errors.item() == 0
    assert allocated() == used
    assert not comm.recv[..., 32].any()
    want = case.plane(make_plan(2, 128), 0).over(
        np.full(step.scores.shape, torch_inputs.OLD_SCORE, np.float32)
    )
    np.testing.assert_array_equal(step.scores.cpu().numpy(), want)


def test_jax_runs_its_programs_on_one_stream():
    device = jax.devices()[0]
    stream = find_stream(device)
    assert stream is None or stream > 0
    find_stream.cache_clear()
    assert find_stream(device) == stream
    version = tuple(int(x) for x in jax.__version__.split(".")[:2])
    assert (stream is not None) == (version == (0, 11))


@pytest.mark.parametrize("tagged", [False, True])
@pytest.mark.parametrize("side", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_repeated_decodes_wait_for_work_in_flight(self_exchange, monkeypatch, known, side, tagged):
    """What is written late to inputs, and to buffers that the last program left in JAX."""
    if not known:
        monkeypatch.setattr(crossing, "find_stream", lambda _: None)
    plan = prepare()
    step, comm = decode_step(plan, random_decode([300, 0, 4000, 1], 2, 128)), plan.init_comm()

    def call(slot: int) -> None:
        plan.decode(*step, comm=comm, slot=slot, tagged=tagged, decode_query_len=2)

    for slot in range(3):
        call(slot)
    want = step.output[:8].clone()
    late = [tensor.view(torch.uint8) for tensor in (step.index_q, *step[2:5])]
    values = [tensor.clone() for tensor in late]
    stream = torch.cuda.Stream() if side else torch.cuda.current_stream()
    torch.cuda.synchronize()
    for slot in range(3, 100):
        with torch.cuda.stream(stream):
            for tensor in (*late, step.output):
                tensor.zero_()
            busy(3_000_000)
            for tensor, value in zip(late, values, strict=True):
                tensor.copy_(value)
            comm.errors.fill_(slot)
            call(slot)
            found, errors = step.output[:8].clone(), comm.errors.clone()
            for tensor in late:  # behind the call: must not reach it
                tensor.zero_()
        stream.synchronize()
        assert torch.equal(found, want)
        assert errors.item() == slot


def test_buffers_of_a_decode_may_be_dropped(self_exchange):
    """Their memory is another tensor's then, and no later program writes it."""
    plan = prepare()
    step, comm = decode_step(plan, random_decode([300, 7], 1, 128)), plan.init_comm()
    used = None
    for slot in range(200):
        step = step._replace(scores=step.scores.clone(), output=step.output.clone())
        for again in range(2):
            plan.decode(*step, comm=comm, slot=2 * slot + again, tagged=False, decode_query_len=1)
        if slot == 20:
            used = allocated()
    assert allocated() == used
    assert comm.errors.item() == 0
    output = step.output.clone()
    step = step._replace(scores=step.scores.clone(), output=step.output.clone())
    others = [torch.full_like(x, 7) for x in (step.scores, step.output) for _ in range(4)]
    plan.decode(*step, comm=comm, slot=401, tagged=False, decode_query_len=1)
    torch.cuda.synchronize()
    assert torch.equal(step.output, output)
    assert all((x == 7).all() for x in others)


@pytest.mark.parametrize("capacity", [5, 16])
@pytest.mark.parametrize("tagged", [False, True])
def test_receive_storage_of_any_capacity(self_exchange, capacity, tagged):
    """Slots that begin at no multiple of 256 bytes go there and back as copies."""
    plan, wide = prepare(max_decode_tokens=capacity), prepare()
    case = random_decode([300, 7], 2, 128)
    found = []
    for mine in (plan, wide):
        step, comm = decode_step(mine, case), mine.init_comm()
        for slot in range(4):
            mine.decode(*step, comm=comm, slot=slot, tagged=tagged, decode_query_len=2)
        torch.cuda.synchronize()
        assert comm.errors.item() == 0
        rows = comm.tagged_recv if tagged else comm.recv
        assert rows[:, :, :, :4].any()
        found.append((step.output, rows[:, :, :, :4]))
    for narrow, want in zip(*found, strict=True):
        assert torch.equal(narrow, want)


def test_ten_thousand_calls_leak_nothing(self_exchange):
    """Neither GPU memory nor the imports of tensors that are gone."""
    plan = prepare()
    step, comm = decode_step(plan, random_decode([300, 7], 1, 128)), plan.init_comm()

    def call(slot: int) -> None:
        mine = step._replace(seq_lens=step.seq_lens.clone())
        plan.decode(*mine, comm=comm, slot=slot, tagged=False, decode_query_len=1)

    for slot in range(300):
        call(slot)
    used = allocated()
    for slot in range(10_000):
        call(slot)
    assert allocated() <= used
    assert len(plan._route._bridge._kept) < 15
    assert comm.errors.item() == 0


def test_inputs_may_be_dropped_after_the_call():
    plan = prepare()
    case = random_prefill(SEGMENTS, TOKENS, 128)
    window = prefill_window(plan, case)
    for _ in range(50):
        inputs = prefill_window(plan, case)
        busy()
        prefill_local(plan, case, inputs._replace(carrier=window.carrier))
        del inputs
        # The freed memory, overwritten on the same stream.
        _ = [torch.full((1 << 20,), 0x7F, dtype=torch.uint8, device="cuda") for _ in range(8)]
        found = window.carrier[:, :TOKENS].cpu().numpy()
        np.testing.assert_array_equal(found, rows(case, 0))


def test_a_cpu_tensor_beside_gpu_ones_is_refused(self_exchange):
    plan = prepare()
    step, comm = decode_step(plan, random_decode([300], 1, 128)), plan.init_comm()
    for name in step._fields:
        mixed = step._replace(**{name: getattr(step, name).cpu()})
        with pytest.raises(TypeError, match=f"^{name} must be .* on cuda:0"):
            plan.decode(*mixed, comm=comm, slot=0, tagged=False, decode_query_len=1)


def test_an_unaligned_output_is_refused(self_exchange):
    plan = prepare()
    step, comm = decode_step(plan, random_decode([300], 1, 128)), plan.init_comm()
    memory = torch.zeros(step.output.numel() + 1, dtype=torch.int32, device="cuda")
    output = memory[1:].view(step.output.shape)
    with pytest.raises(ValueError, match="output must start at a multiple of 256 bytes"):
        plan.decode(
            *step._replace(output=output), comm=comm, slot=0, tagged=False, decode_query_len=1
        )


@pytest.mark.parametrize("skip", [16, 64, 128])
def test_inputs_may_start_anywhere(self_exchange, skip):
    """Views into larger buffers, as a server slices them out of one allocation."""
    plan = prepare()
    case = random_decode([300, 0, 2000], 1, 128)
    steps = [decode_step(plan, case) for _ in range(2)]

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        memory = torch.zeros(tensor.nbytes + skip, dtype=torch.uint8, device="cuda")
        there = memory[skip:].view(tensor.dtype).view(tensor.shape)
        return there.copy_(tensor)

    names = ("index_q", "block_table", "seq_lens", "num_valid_pages")
    steps[1] = steps[1]._replace(**{name: moved(getattr(steps[1], name)) for name in names})
    for step in steps:
        plan.decode(*step, comm=plan.init_comm(), slot=0, tagged=False, decode_query_len=1)
    assert torch.equal(steps[0].output, steps[1].output)
    assert torch.equal(steps[0].scores.view(torch.int32), steps[1].scores.view(torch.int32))


def test_capture_is_refused(self_exchange):
    plan = prepare()
    step, comm = decode_step(plan, random_decode([300], 1, 128)), plan.init_comm()
    plan.decode(*step, comm=comm, slot=0, tagged=False, decode_query_len=1)
    before = step.output.clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="decode cannot be captured in a CUDA graph"):
            plan.decode(*step, comm=comm, slot=1, tagged=False, decode_query_len=1)
        before.add_(0)  # a graph must not be empty
    torch.cuda.synchronize()
    assert torch.equal(step.output, before)
