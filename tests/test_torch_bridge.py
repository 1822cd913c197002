"""Imports and their lifetime: nothing copied, nothing leaked, nothing mistaken for another."""

from __future__ import annotations

import ctypes
import gc
import resource
import sys
import warnings
import weakref
from typing import Any, NamedTuple

import jax
import numpy as np
import oracle
import pytest
from chains import OLD_WORD, check_output, make_plan, random_decode, random_prefill
from inputs import nothing_compiles

torch = pytest.importorskip("torch", reason="torch is not installed (extra torch)")

import torch_inputs  # noqa: E402
from torch_inputs import CPU, Group, decode_step, outputs, prefill_window  # noqa: E402

from msa_icp_torch import crossing, exchange, pages  # noqa: E402
from msa_icp_torch.bridge import Bridge, check_apart  # noqa: E402


@pytest.fixture(params=["fast", "public"])
def bridge(request, monkeypatch):
    """By jaxlib's C functions, and by the public ones, as with a release that is not known."""
    if request.param == "public":
        monkeypatch.setattr(crossing, "_VERSIONS", ())
    bridge = Bridge(CPU)
    assert type(bridge._crossing).__name__.lower() == request.param
    return bridge


def page(seed: int) -> torch.Tensor:
    return torch.full((1024,), seed, dtype=torch.int32)


# ---- one import ----


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.float8_e4m3fn, torch.bfloat16])
def test_an_import_shares_the_bytes(bridge, dtype):
    tensor = torch.randint(0, 100, (4, 4, 256), dtype=torch.uint8).view(dtype)
    array = bridge.fresh(tensor)[0]
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    assert array.shape == tuple(tensor.shape)
    assert array.dtype.name == str(dtype).removeprefix("torch.")
    assert np.asarray(array).tobytes() == tensor.view(torch.uint8).numpy().tobytes()
    back = bridge.export(array)
    assert back.data_ptr() == tensor.data_ptr()
    assert back.dtype == dtype


def test_every_float8_code_arrives_unconverted(bridge):
    codes = torch.arange(256, dtype=torch.uint8)
    array = bridge.fresh(codes.view(torch.float8_e4m3fn))[0]
    np.testing.assert_array_equal(np.asarray(array).view(np.uint8), codes.numpy())


@pytest.mark.parametrize("shape", [(1, 4, 1, 128), (1, 1), (3, 1, 2)])
def test_sizes_of_one_keep_their_layout(bridge, shape):
    """Strides of size-1 dimensions mean nothing, whatever they are."""
    values = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).view(shape)
    odd = [7 if size == 1 else s for size, s in zip(shape, values.stride(), strict=True)]
    tensor = values.as_strided(shape, odd)
    array = bridge.fresh(tensor)[0]
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    np.testing.assert_array_equal(np.asarray(array), values.numpy())
    assert torch.equal(bridge.export(array), values)


@pytest.mark.parametrize("skip", [1, 4, 8])
def test_an_unaligned_tensor_is_copied(bridge, skip):
    tensor = torch.arange(100, dtype=torch.int32)[skip:]
    array = bridge.fresh(tensor)[0]
    assert array.unsafe_buffer_pointer() != tensor.data_ptr()
    np.testing.assert_array_equal(np.asarray(array), tensor.numpy())
    tensor.zero_()
    assert np.asarray(bridge.kept(tensor)).max() == 0, "a copy must not be kept"


def test_an_input_outlives_its_tensor(bridge):
    tensor = page(3)
    array = bridge.fresh(tensor)[0]
    del tensor
    others = [page(9) for _ in range(50)]
    assert (np.asarray(array) == 3).all()
    assert len(others) == 50


@pytest.mark.parametrize("capacity", [1, 5, 8, 16])
def test_receive_storage_is_written_wherever_its_slots_begin(bridge, capacity):
    """As on a GPU, where results lie in place: a slot begins where the layout says."""
    comm = torch_inputs.MSAIcpComm.zeros(2, capacity, CPU)
    bridge.donates = True
    slots = [*comm.recv, *comm.tagged_recv.view(torch.int32).unflatten(-1, (32, 2))]
    aside = [slot for slot in slots if slot.data_ptr() % 64]
    assert bool(aside) == (capacity % 4 != 0)
    for slot in slots:
        value = torch.randint(1 << 20, slot.shape, dtype=torch.int32)
        imported = bridge.fresh(slot)[0]
        given_back = bridge.fresh(value)[0] if any(slot is x for x in aside) else imported
        bridge.deliver({"comm.recv": (slot, given_back)})
        assert torch.equal(slot, value if any(slot is x for x in aside) else slot * 0)
    aligned = page(1)
    with pytest.raises(RuntimeError, match="JAX did not write output in place"):
        bridge.deliver({"output": (aligned, bridge.fresh(page(2))[0])})


def test_only_the_receive_storage_may_begin_anywhere():
    plan = torch_inputs.prepare(2, 128, 0, max_decode_tokens=5)
    plan._route._bridge.donates = True
    odd = torch.zeros(20, dtype=torch.int32)[1:]
    for name in ("comm.recv", "comm.tagged_recv"):
        plan._route.check_memory({name: odd}, {})
    for name in ("output", "scores", "comm.errors", "comm.publish_generations"):
        with pytest.raises(ValueError, match=f"^{name} must start at a multiple of 64 bytes"):
            plan._route.check_memory({name: odd}, {})


# ---- kept imports ----


def test_a_kept_import_is_reused_and_sees_new_values(bridge):
    tensor = page(1)
    array = bridge.kept(tensor)
    assert bridge.kept(tensor) is array
    tensor.fill_(5)
    assert (np.asarray(jax.jit(lambda x: x + 0)(bridge.kept(tensor))) == 5).all()


def test_a_kept_import_goes_with_the_callers_tensor(bridge):
    """It holds the storage, but never longer than the caller's own tensor lives."""
    tensor = page(1)
    storage = weakref.ref(tensor.untyped_storage())
    array = weakref.ref(bridge.kept(tensor))
    gone = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert gone() is None
    assert array() is None
    assert storage() is None
    assert not bridge._kept


def test_a_reused_address_is_never_mistaken(bridge):
    """Freed tensors' addresses come back; each new tensor must be read as what it is."""
    addresses, reused = set(), 0
    for i in range(400):
        tensor = page(i)
        reused += tensor.data_ptr() in addresses
        addresses.add(tensor.data_ptr())
        found = bridge.kept(tensor)
        assert found.unsafe_buffer_pointer() == tensor.data_ptr()
        assert int(found[-1]) == i
        del tensor, found
    assert reused > 100, "the allocator did not reuse addresses: the test shows nothing"
    assert not bridge._kept


def test_another_shape_or_dtype_at_the_same_address(bridge):
    memory = page(0)
    views = [memory, memory.view(32, 32), memory[:512], memory.view(torch.float32)]
    arrays = [bridge.kept(view) for view in views]
    assert [array.shape for array in arrays] == [tuple(view.shape) for view in views]
    assert [array.dtype.name for array in arrays] == ["int32", "int32", "int32", "float32"]
    assert len({array.unsafe_buffer_pointer() for array in arrays}) == 1
    assert all(bridge.kept(v) is a for v, a in zip(views, arrays, strict=True))


@pytest.mark.parametrize("change", ["data", "set_", "resize_"])
def test_a_tensor_that_moves_is_imported_again(bridge, change):
    tensor = page(1)
    old = bridge.kept(tensor)
    if change == "data":
        tensor.data = page(2)
    elif change == "set_":
        tensor.set_(page(2))
    else:
        tensor.resize_(1 << 20).fill_(2)
    new = bridge.kept(tensor)
    assert new is not old
    assert new.unsafe_buffer_pointer() == tensor.data_ptr()
    assert new.shape == tuple(tensor.shape)
    assert (np.asarray(new) == 2).all()


# ---- what programs write ----


@pytest.fixture
def donating(bridge):
    """As on a GPU, where a program's result lies in the import that it was given."""
    bridge.donates = True
    return bridge


def test_a_result_is_the_next_import(donating):
    tensor = page(1)
    shared = donating.shared("output", tensor)
    assert donating.shared("output", tensor) is shared
    first = shared.lend()
    assert first.unsafe_buffer_pointer() == tensor.data_ptr()
    result = donating.fresh(tensor)[0]
    donating.settle([(shared, result)])
    assert shared.get() is result
    assert shared.lend() is result
    assert shared.lend() is not result, "a program has it"


def test_a_call_that_failed_leaves_nothing_lent(donating):
    """The next one imports the tensor again."""
    tensor = page(1)
    shared = donating.shared("output", tensor)
    shared.lend().delete()
    assert (np.asarray(shared.get()) == 1).all()


def test_a_result_elsewhere_is_no_result(donating):
    shared = donating.shared("output", page_of := page(1))
    with pytest.raises(RuntimeError, match=r"^JAX did not write output in place"):
        donating.settle([(shared, donating.fresh(page(2))[0])])
    assert (page_of == 1).all()


def test_without_donation_results_are_copied_back(bridge):
    tensor = page(1)
    shared = bridge.shared("output", tensor)
    with torch.inference_mode():
        inference = page(1)
    other = bridge.shared("output", inference)
    bridge.settle([(shared, shared.lend() + 2), (other, other.lend() + 3)])
    assert (tensor == 3).all()
    assert (inference == 4).all()
    assert shared.get() is shared.lend()


@pytest.mark.parametrize("donates", [False, True])
def test_what_lies_where_jax_does_not_take_it_is_copied_both_ways(bridge, donates):
    bridge.donates = donates
    memory = torch.zeros(65, dtype=torch.int32)
    tensor = memory[1:]
    shared = bridge.shared("comm.recv", tensor)
    array = shared.lend()
    tensor.fill_(5)
    assert (np.asarray(array) == 0).all()
    assert (np.asarray(shared.get()) == 5).all()
    bridge.settle([(shared, array + 7)])
    assert (tensor == 7).all()


def test_a_view_is_shared_as_long_as_its_owner_lives(donating):
    """A result keeps the memory until then, and no longer."""
    owner = page(1)
    storage = weakref.ref(owner.untyped_storage())
    shared = donating.shared("scores", owner, lambda x: x.detach()[:64], 64)
    assert shared.get().shape == (64,)
    assert donating.shared("scores", owner, lambda x: x.detach()[:64], 64) is shared
    other = donating.shared("scores", owner, lambda x: x.detach()[:32], 32)
    assert other.get().shape == (32,)
    assert shared.get().shape == (64,), "a call that has it goes on with it"
    del owner
    gc.collect()
    assert storage() is None
    assert shared.tensor is None
    assert not donating._kept


def test_a_shared_tensor_that_moved_is_another(donating):
    tensor = page(1)
    old = donating.shared("output", tensor)
    tensor.set_(page(2))
    new = donating.shared("output", tensor)
    assert new is not old
    assert (np.asarray(new.get()) == 2).all()


def test_touching_spans_do_not_overlap():
    memory = torch.zeros(8, dtype=torch.int32)
    check_apart({"a": memory[:4], "b": memory[4:4]}, {"c": memory[4:], "d": memory[2:2]})
    with pytest.raises(ValueError, match="a is written and must not overlap c"):
        check_apart({"a": memory[:5]}, {"c": memory[4:]})


# ---- whole calls ----


@pytest.fixture
def local_groups(monkeypatch: Any) -> None:
    torch_inputs.use_local_groups(monkeypatch)


def test_index_keys_off_the_grid_are_copied_with_one_warning(local_groups):
    group = Group(2, 128)
    case = random_decode([300, 17], 2, 128)
    shards = oracle.shard_cache(case.cache.keys, 2)
    steps = []
    for plan in group.plans:
        memory = torch.zeros(shards[plan.rank].size + 80, dtype=torch.uint8)
        start = -memory.data_ptr() % 64 + 16
        view = memory[start : start + shards[plan.rank].size].view(shards[plan.rank].shape)
        view.copy_(torch_inputs.tensor(shards[plan.rank]))
        steps.append(decode_step(plan, case, view.view(torch.float8_e4m3fn)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            group.decode(steps, 2)
            check_output(make_plan(2, 128), case, outputs([s.output for s in steps]))
    messages = [str(w.message) for w in caught if w.category is RuntimeWarning]
    assert len(messages) == len(group.plans), "once a plan, not once a call"
    assert all("index_k is copied in every call" in message for message in messages)


def test_index_keys_are_imported_once(local_groups, monkeypatch):
    group = Group(2, 128)
    case = random_decode([300, 17], 2, 128)
    steps = [decode_step(plan, case) for plan in group.plans]
    group.decode(steps, 2)
    addresses = {step.index_k.data_ptr() for step in steps}
    imported = []
    stock = crossing.Fast.take

    def spy(self: crossing.Fast, tensor: torch.Tensor, **options: Any) -> jax.Array:
        imported.append(tensor.data_ptr())
        return stock(self, tensor, **options)

    monkeypatch.setattr(crossing.Fast, "take", spy)
    steps = [step._replace(index_q=step.index_q.clone()) for step in steps]
    group.decode(steps, 2)
    assert {step.index_q.data_ptr() for step in steps} <= set(imported)
    assert not addresses & set(imported)


def test_inference_mode(local_groups):
    """Serving code allocates and calls inside it; storage made before it stays usable."""
    group = Group(2, 128)
    case = random_decode([300, 17], 2, 128)
    with torch.inference_mode():
        steps = [decode_step(plan, case) for plan in group.plans]
        inner = [plan.init_comm() for plan in group.plans]
    group.decode(steps, 2)
    group.comms = inner
    for _ in range(2):
        group.decode(steps, 2, tagged=True)
    check_output(make_plan(2, 128), case, outputs([s.output for s in steps]))


def test_repeats_compile_nothing(local_groups):
    """Not for other values, other tensors, another slot, or a second plan of equal limits."""
    group = Group(2, 128)
    case = random_decode([300, 17], 2, 128)
    steps = [decode_step(plan, case) for plan in group.plans]
    group.decode(steps, 2)
    other = random_decode([4000, 1], 2, 128, seed=1)
    twin = Group(2, 128)
    steps = [decode_step(plan, other) for plan in twin.plans]
    with nothing_compiles():
        for slot in range(3):
            twin.decode(steps, 2, slot=slot)


@pytest.mark.usefixtures("own_rows")
@pytest.mark.parametrize(("compound", "fused"), [(False, None), (True, None), (False, True)])
def test_warmup_compiles_what_calls_need(compound, fused):
    """On one rank; each has its own programs, and none differ but in that number."""
    # Limits of its own, so that no other test has compiled these programs.
    own = 512 * compound + 1024 * bool(fused)
    limits = {"max_model_len": 2048 + own, "max_num_batched_tokens": 48}
    plan = torch_inputs.prepare(2, 128, 1, max_decode_tokens=5, max_num_seqs=2, **limits)
    case = random_decode([300, 17], 2, 128, width=16)
    window = prefill_window(plan, random_prefill([(20, 0, 20), (9, 100, 109)], 48, 128, width=16))
    shard = oracle.shard_cache(case.cache.keys, 2)[1]
    keys = torch_inputs.strided_keys(shard, 192, 64) if compound else None
    step = decode_step(plan, case, keys)
    sizes = {"table_width": 16, "batch_sizes": [2], "query_lens": [2]}
    plan.warmup(step.index_k, **sizes, fused=fused)
    decode_pool, prefill_pool = (
        torch.zeros(shape, dtype=torch.uint8) if fused else None
        for shape in (plan.decode_pool_shape(), plan.prefill_pool_shape())
    )
    step = step._replace(scores=step.scores[:4], output=step.output[:4])
    bounds = {"total_q": 48, "max_query_len": 48, "max_seq_len": limits["max_model_len"]}
    options = {"comm": plan.init_comm(), "decode_query_len": 2, "pool": decode_pool}

    with nothing_compiles():
        for slot, tagged in enumerate((False, True)):
            plan.decode(*step, slot=slot, tagged=tagged, **options)
        window_plan = plan.prefill_window_plan(*window.lengths, **bounds)
        plan.prefill_local(
            window.query,
            step.index_k,
            window.block_table,
            window_plan,
            window.score_scratch,
            window.num_valid_pages,
            window.carrier[:, :48].contiguous(),
            prefill_pool,
        )
        received = window.received[:, :, :48].contiguous()
        plan.prefill_merge(received, window.num_valid_pages, window.output)


def test_warmup_without_the_cache_compiles_the_merges(monkeypatch):
    torch_inputs.use_local_groups(monkeypatch)
    plan = torch_inputs.prepare(2, 128, 0, max_num_batched_tokens=24, max_num_seqs=3)
    plan.warmup()
    window = prefill_window(plan, random_prefill([(20, 0, 20)], 24, 128))
    received = window.received[:, :, :24].contiguous()
    with nothing_compiles():
        plan.prefill_merge(received, window.num_valid_pages, window.output)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"table_width": 0}, "table_width must"),
        ({"batch_sizes": [9]}, r"batch_sizes\[0\] must"),
        ({"query_lens": [9]}, r"query_lens\[0\] must"),
        ({"index_k": torch.zeros((4, 48, 128), dtype=torch.float8_e4m3fn)}, "index_k must"),
        ({"fused": 1}, "fused must"),
    ],
)
def test_warmup_checks_its_arguments(options, match):
    with pytest.raises((TypeError, ValueError), match=match):
        torch_inputs.prepare(2, 128, 0).warmup(**options)


# ---- memory ----


class Held(NamedTuple):
    """What the process holds: Python's objects, bytes of the main thread's heap, resident ones."""

    objects: int
    heap: int
    resident: int


MALLINFO = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class MallInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in MALLINFO.split())


def held() -> Held:
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = MallInfo
    heap = libc.mallinfo2()
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * resource.getpagesize()
    return Held(sys.getallocatedblocks(), heap.uordblks + heap.hblkhd, resident)


def assert_nothing_leaks(call: Any, calls: int = 1000) -> None:
    """No object in ten calls, no 64 bytes of heap a call, and 1,500 of what other threads hold.

    What leaks does so in every one of three runs; caches and the allocator's steps come in few.
    """
    for _ in range(calls // 3):
        call()
    grown = []
    for _ in range(3):
        before = held()
        for _ in range(calls):
            call()
        grown.append([new - old for new, old in zip(held(), before, strict=True)])
    least = Held(*map(min, zip(*grown, strict=True)))
    assert least.objects < calls / 10, grown
    assert least.heap < 64 * calls, grown
    assert least.resident < 1500 * calls, grown


@pytest.mark.parametrize("size", [16, 600])
def test_what_leaks_is_seen(size):
    lost = []
    with pytest.raises(AssertionError):
        assert_nothing_leaks(lambda: lost.append(bytes(size)))


@pytest.fixture
def own_rows(monkeypatch):
    """A rank gets its own rows from every rank."""
    monkeypatch.setattr(exchange, "check_group", lambda *_: None)
    monkeypatch.setattr(
        exchange, "all_to_all", lambda received, message, group: received.copy_(message)
    )


@pytest.mark.usefixtures("own_rows")
def test_decodes_leak_nothing():
    """Fresh inputs in every call, as serving has them; every second one is tagged."""
    plan = torch_inputs.prepare(2, 128, 0, max_decode_tokens=1, max_num_seqs=1, max_model_len=512)
    step = decode_step(plan, random_decode([300], 1, 128, pages=4, width=4))
    comm, calls = plan.init_comm(), iter(range(10**6))

    def call() -> None:
        count = next(calls)
        fresh = [tensor.clone() for tensor in (step.index_q, *step[2:5])]
        plan.decode(
            fresh[0],
            step.index_k,
            *fresh[1:],
            step.scores,
            step.output,
            comm=comm,
            slot=count,
            tagged=count % 2 == 1,
            decode_query_len=1,
        )

    for _ in range(12):
        call()
    kept = len(plan._route._bridge._kept)
    assert_nothing_leaks(call)
    assert len(plan._route._bridge._kept) == kept
    assert len(plan._route._calls._calls) == 6, "one of each slot and form"
    gone = weakref.ref(comm)
    comm = step = None
    gc.collect()
    assert gone() is None
    assert not plan._route._bridge._kept
    assert not plan._route._calls._calls


@pytest.mark.parametrize("tagged", [False, True])
def test_a_release_of_jaxlib_that_is_not_known_takes_the_public_way(
    local_groups, monkeypatch, tagged
):
    monkeypatch.setattr(crossing, "_VERSIONS", ((0, 10),))
    monkeypatch.setattr(crossing, "Fast", None)
    group = Group(2, 128)
    case = random_decode([300, 17], 2, 128)
    steps = [decode_step(plan, case) for plan in group.plans]
    for _ in range(2):
        group.decode(steps, 2, tagged=tagged)
    check_output(make_plan(2, 128), case, outputs([s.output for s in steps]))


def test_remembered_calls_are_checked_where_they_changed(local_groups):
    """Another tensor of the same shape is looked at; what is wrong is said as at first."""
    group = Group(2, 128)
    case = random_decode([300, 17], 2, 128)
    steps = [decode_step(plan, case) for plan in group.plans]
    group.decode(steps, 2)
    plan, step, comm = group.plans[0], steps[0], group.comms[0]
    options = {"comm": comm, "slot": 0, "tagged": False, "decode_query_len": 2}

    def decode(**changes: torch.Tensor) -> None:
        plan.decode(*step._replace(**changes), **options)

    assert plan._route._calls.find((*step, None, comm), (0, False, 2, True)) is not None
    with pytest.raises(TypeError, match=r"^seq_lens must be a torch.int32 tensor"):
        decode(seq_lens=step.seq_lens.float())
    with pytest.raises(ValueError, match="is written and must not overlap"):
        decode(
            block_table=step.output.view(-1)[: step.block_table.numel()].view_as(step.block_table)
        )
    with pytest.raises(TypeError, match=r"^index_q must not require grad"):
        decode(index_q=step.index_q.float().requires_grad_().to(torch.float8_e4m3fn))


def test_empty_calls_leak_nothing(monkeypatch):
    monkeypatch.setattr(exchange, "check_group", lambda *_: None)
    plan = torch_inputs.prepare(2, 128, 0)
    step = decode_step(plan, random_decode([], 1, 128))
    comm = plan.init_comm()
    none = torch.zeros(0, dtype=torch.int32)

    def call() -> None:
        plan.decode(*step, comm=comm, slot=0, tagged=False, decode_query_len=1)
        plan.prefill_merge(torch.zeros((2, 2, 0, 33), dtype=torch.int32), none, step.output)

    assert_nothing_leaks(call)
    assert (step.output == OLD_WORD).all()


def test_empty_imports_leak_nothing(bridge):
    assert_nothing_leaks(lambda: bridge.fresh(torch.zeros((0, 4), dtype=torch.int32)))


def test_a_base_buffer_is_kept_with_its_view(bridge):
    """The view's owner decides, not the buffer made around it."""
    view = torch_inputs.strided_keys(np.zeros((4, 32, 128), np.uint8), 48, 8)
    base, row_offset = pages.base_of(view)
    assert (row_offset, tuple(base.shape)) == (8, (4, 48, 128))
    array = bridge.remember(view, lambda base=base: bridge.fresh(base)[0])
    del base
    assert bridge.remember(view, lambda: pytest.fail("imported again")) is array
    del view, array
    gc.collect()
    assert not bridge._kept


def test_the_route_is_seen(caplog):
    with caplog.at_level("INFO", logger="msa_icp_torch"):
        plan = torch_inputs.prepare(2, 128, 1)
    for shown in ("route='dlpack'", "device=cpu", "backend='xla'", "rank=1"):
        assert shown in repr(plan)
    (record,) = caplog.records
    assert record.getMessage() == "prepared rank 1 on cpu: route dlpack"
