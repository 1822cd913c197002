"""The direct route as far as no GPU is needed: what is lowered, bound, remembered and refused."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import gc
import math
import warnings
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from chains import make_plan, random_decode, random_prefill

torch = pytest.importorskip("torch", reason="torch is not installed (extra torch)")

import torch_inputs  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch_inputs import CPU, decode_step, prefill_window  # noqa: E402

import msa_icp_jax  # noqa: E402
from msa_icp_jax import MSAIcpScorePlan  # noqa: E402
from msa_icp_jax.geometry import MAX_INT32, MAX_TOKENS  # noqa: E402
from msa_icp_jax.ops._mosaic import aot as launching  # noqa: E402
from msa_icp_jax.ops._mosaic import launch  # noqa: E402
from msa_icp_jax.ops.prefill_plan import balance  # noqa: E402
from msa_icp_torch import direct, exchange, kernels, remembered, routes, window  # noqa: E402
from msa_icp_torch.direct import DirectRoute  # noqa: E402
from msa_icp_torch.plan import MSAIcpIndexerPlan  # noqa: E402
from msa_icp_torch.remembered import RememberedCalls  # noqa: E402

SMS = 132
LENGTHS = [300, 0, 4000, 1]
SEGMENTS = [(40, 260, 300), (0, 0, 0), (57, 0, 57)]


class HostStream:
    """Stands for torch's stream on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.contexts = 0

    def device(self) -> Any:
        return torch.inference_mode(False)

    def launch(self, launches: Any) -> None:
        for step in launches:
            assert step.address == (step.kernel and ctypes.addressof(step.arguments))
        launching.launch([step._replace(address=step.arguments) for step in launches], 7)

    def repeat(self, bound: Any) -> None:
        self.launch(bound.launches)

    def make_context_current(self) -> None:
        self.contexts += 1


class Launched:
    """Kernels launched, as (number of addresses, addresses), in place of a GPU."""

    def __init__(self) -> None:
        self.kernels: list[list[int]] = []
        self.compiled: list[bytes] = []

    def compile(self, module: bytes) -> tuple[Any, int]:
        if module not in self.compiled:
            self.compiled.append(module)
        return self.launch, self.compiled.index(module) + 1

    def launch(self, kernel: int, stream: int, addresses: Any) -> None:
        assert stream == 7
        assert isinstance(addresses, ctypes.Array)
        self.kernels.append([kernel, *addresses])


@pytest.fixture
def launched(monkeypatch: Any) -> Launched:
    found = Launched()
    monkeypatch.setattr(launching, "compile_kernel", found.compile)
    monkeypatch.setattr(direct, "Stream", HostStream)
    monkeypatch.setattr(exchange, "check_group", lambda *_: None)
    monkeypatch.setattr(
        exchange, "all_to_all", lambda received, message, group: received.copy_(message)
    )
    return found


def prepare(world_size: int = 2, page_size: int = 128, rank: int = 0, **changes: Any) -> Any:
    """A plan on the direct route whose kernels stay unlaunched."""
    limits = {
        "num_index_heads": 4,
        "init_blocks": 1,
        "local_blocks": 2,
        "max_decode_tokens": 32,
        "max_decode_query_len": 8,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 8,
        "max_model_len": 8192,
        "num_sparse_layers": 4,
    }
    plan = msa_icp_jax.prepare_msa_icp_indexer(
        world_size=world_size,
        page_size=page_size,
        rank=rank,
        backend="mosaic",
        **limits | changes,
    )
    return MSAIcpIndexerPlan(plan, DirectRoute(plan, CPU, None, 1 << 26, SMS), CPU, None)


def set_bases(plan: Any, comm: Any) -> None:
    """Addresses of a group whose other ranks' storage is made up."""
    for bases, own in (
        (comm.recv_bases, comm.recv),
        (comm.tagged_recv_bases, comm.tagged_recv),
    ):
        bases.copy_(torch.arange(1, len(bases) + 1) << 40)
        bases[plan.rank] = own.data_ptr()


@pytest.mark.parametrize("index_dtype", ["float8_e4m3fn", "bfloat16"])
def test_one_sided_decode_is_three_launches(launched, index_dtype):
    plan = prepare(index_dtype=index_dtype)
    case = random_decode(LENGTHS, 2, 128, index_dtype=index_dtype)
    step, comm = decode_step(plan, case), plan.init_comm()
    set_bases(plan, comm)
    for tagged in (False, True):
        for slot in range(3):
            plan.decode(*step, comm=comm, slot=slot, tagged=tagged, decode_query_len=2)
    assert len(launched.compiled) == 5  # score, two selects that publish and two merges
    assert [kernel[0] for kernel in launched.kernels] == [1, 2, 3] * 3 + [1, 4, 5] * 3
    score, select, merge = launched.kernels[3:6]
    inputs = [step.index_q, step.index_k, step.block_table, step.seq_lens]
    assert score[1:5] == [x.data_ptr() for x in inputs]
    assert score[-1] == step.scores.data_ptr() == select[1]
    assert select[2] == step.num_valid_pages.data_ptr()
    assert comm.recv_bases.data_ptr() in select
    assert select[-1] == comm.errors.data_ptr()
    assert launched.kernels[-2][-1] == comm.publish_generations.data_ptr()
    slot = merge[3]
    assert slot in select
    assert merge[1:4] == [comm.recv.data_ptr(), step.num_valid_pages.data_ptr(), slot]
    assert ctypes.c_int32.from_address(slot).value == 1
    assert step.output.data_ptr() in merge


class Checked:
    """A plan's decode in two slots, and how many calls went through all checks."""

    def __init__(self, plan: Any, monkeypatch: Any, **options: Any) -> None:
        self.plan, self.comm, self.count = plan, plan.init_comm(), 0
        self.step = decode_step(plan, random_decode(LENGTHS, 2, 128))
        self.options = {"slot": 0, "tagged": False, "decode_query_len": 2} | options
        stock = plan._check_decode

        def checked(*arguments: Any) -> Any:
            self.count += 1
            return stock(*arguments)

        monkeypatch.setattr(plan, "_check_decode", checked)

    def call(self, **changes: Any) -> None:
        options = {name: changes.pop(name) for name in ("slot", "pool") if name in changes}
        step = self.step._replace(**changes)
        self.plan.decode(*step, comm=self.comm, **self.options | options)

    def pool(self) -> torch.Tensor:
        return torch.empty(self.plan.decode_pool_shape(), dtype=torch.uint8)


INPUTS = ("index_q", "block_table", "seq_lens", "num_valid_pages")


@pytest.mark.parametrize("one_sided", [False, True])
@pytest.mark.parametrize("tagged", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_another_decode_like_it_is_launched_as_if_it_were_the_first(
    launched, monkeypatch, fused, tagged, one_sided
):
    """With every tensor exchanged alone, and all at once: the addresses of a call of its own."""
    mine, fresh = (Checked(prepare(), monkeypatch, tagged=tagged) for _ in range(2))
    fresh.plan._route = mine.plan._route  # the same programs and scratch
    fresh.comm = mine.comm
    if one_sided:
        set_bases(mine.plan, mine.comm)
    names = [*INPUTS, "output"] if fused else [*INPUTS, "scores", "output"]
    pool = torch.zeros(mine.plan.decode_pool_shape(), dtype=torch.uint8) if fused else None
    mine.call(pool=pool)
    length = len(launched.kernels)
    mine.call(slot=3, pool=pool)
    assert launched.kernels[length:] == launched.kernels[:length]
    for changed in (*([name] for name in names), names, [], names[:1]):
        tensors = {name: getattr(mine.step, name).clone() for name in changed}
        launched.kernels.clear()
        mine.call(**tensors, pool=pool)
        assert mine.count == 1
        mine.plan._route._calls, kept = RememberedCalls(9), mine.plan._route._calls
        fresh.step = mine.step
        fresh.call(**tensors, pool=pool)
        mine.plan._route._calls = kept
        assert launched.kernels[:length] == launched.kernels[length:]


def test_a_pool_is_cleared_in_every_call(launched, monkeypatch):
    mine = Checked(prepare(), monkeypatch)
    shape = mine.step.scores[: 2 * len(LENGTHS)].shape
    for count, pool in ((1, mine.pool()), (2, mine.pool())):
        plane = pool[: math.prod(shape) * 4].view(torch.float32).view(shape)
        for _ in range(2):
            pool.fill_(7)
            mine.call(pool=pool)
            assert mine.count == count
            assert torch.equal(plane, torch.full(shape, -torch.inf))
            assert (pool[plane.nbytes :] == 7).all()
            assert all(plane.data_ptr() in kernel for kernel in launched.kernels[-3:-1])


def test_what_may_not_be_exchanged_is_checked(launched, monkeypatch):
    mine = Checked(prepare(), monkeypatch)
    set_bases(mine.plan, mine.comm)
    step = mine.step
    mine.call()
    mine.call(index_k=step.index_k.clone())
    assert mine.count == 2
    mine.call(output=step.output[:-1].clone())  # another shape
    assert mine.count == 3
    mine.call()
    assert mine.count == 3
    mine.comm.recv_bases[1] += 4096  # another peer
    mine.call()
    assert mine.count == 4
    step.index_q.set_(step.index_q.clone())  # the same object elsewhere
    mine.call()
    assert mine.count == 4
    assert launched.kernels[-3][1] == step.index_q.data_ptr()
    step.index_k.set_(step.index_k.clone())
    mine.call()
    assert mine.count == 5
    assert launched.kernels[-3][2] == step.index_k.data_ptr()
    launches = len(launched.kernels)
    odd = torch.zeros(step.seq_lens.numel() + 1, dtype=torch.int32)[1:]
    inside = step.output.view(-1)[: step.seq_lens.numel()]
    in_comm = mine.comm.tagged_recv.view(torch.int32).view(-1)[: step.output.numel()]
    for bad, match in (
        ({"seq_lens": odd}, "seq_lens must start at a multiple of 16 bytes"),
        ({"seq_lens": step.seq_lens.float()}, "seq_lens must be a torch.int32 tensor"),
        ({"seq_lens": inside}, "output is written and must not overlap seq_lens"),
        ({"seq_lens": None}, "seq_lens must be a torch.int32 tensor"),
        ({"seq_lens": step.seq_lens.numpy()}, "seq_lens must be a torch.int32 tensor"),
        ({"index_q": step.index_q.transpose(0, 1).contiguous().transpose(0, 1)}, "contiguous"),
        ({"scores": None}, "scores must be"),
    ):
        with pytest.raises((TypeError, ValueError), match=match):
            mine.call(**bad)
    assert len(launched.kernels) == launches
    assert mine.count == 12
    for bad in ({"output": in_comm.view(step.output.shape)}, {"seq_lens": in_comm[:4]}):
        with pytest.raises(ValueError, match="must not overlap"):  # though of the other form
            mine.call(**bad)
    assert len(launched.kernels) == launches


def test_a_tensor_that_changed_in_place_is_checked(launched, monkeypatch):
    mine = Checked(prepare(), monkeypatch, decode_query_len=2)
    mine.step = step = decode_step(mine.plan, random_decode([300, 0], 2, 128))
    set_bases(mine.plan, mine.comm)
    mine.call()
    step.index_q.transpose_(0, 1)  # of the same shape
    with pytest.raises(ValueError, match=r"^index_q must be contiguous"):
        mine.call()
    step.index_q.transpose_(0, 1)
    step.index_k.as_strided_(step.index_k.shape, (0, 128, 1))
    with pytest.raises(ValueError, match=r"^index_k must have a page pitch"):
        mine.call()
    assert len(launched.kernels) == 3


def test_freed_memory_is_refused_in_a_remembered_call(launched, monkeypatch):
    mine = Checked(prepare(), monkeypatch)
    set_bases(mine.plan, mine.comm)
    for name in ("seq_lens", "scores", "index_k"):
        mine.call()
        kept = getattr(mine.step, name).clone()
        launches = len(launched.kernels)
        getattr(mine.step, name).untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=f"^{name} must lie in its storage, which was freed"):
            mine.call()
        assert len(launched.kernels) == launches
        mine.step = mine.step._replace(**{name: kept})


class WithoutMemory(torch.Tensor):
    """What frameworks build on torch wrap, or trace with."""

    @staticmethod
    def __new__(cls, like: torch.Tensor) -> WithoutMemory:
        return cls._make_wrapper_subclass(cls, like.shape, dtype=like.dtype, device=like.device)

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("name", [*INPUTS, "scores", "output"])
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_tensor_without_memory_is_refused(launched, monkeypatch, name):
    """Its address is 0. In a first call, in a later one, and where it came before."""
    mine = Checked(prepare(), monkeypatch)
    set_bases(mine.plan, mine.comm)
    real = getattr(mine.step, name)
    for _ in range(2):
        for bad in (WithoutMemory(real), FakeTensorMode().from_tensor(real)):
            launches = len(launched.kernels)
            for _ in range(2):
                with pytest.raises(TypeError, match=rf"^{name} must be .* without memory"):
                    mine.call(**{name: bad})
            assert len(launched.kernels) == launches
        mine.call()


@pytest.mark.parametrize("name", ["publish_generations", "errors", "tagged_recv_bases"])
@pytest.mark.parametrize("change", ["set_", "data"])
def test_a_part_of_the_comm_that_moved_is_bound_anew(launched, monkeypatch, name, change):
    mine = Checked(prepare(), monkeypatch, tagged=True)
    set_bases(mine.plan, mine.comm)
    mine.call()
    part = getattr(mine.comm, name)
    other = part.clone()
    if change == "set_":
        part.set_(other)
    else:
        part.data = other
    launched.kernels.clear()
    mine.call()
    assert mine.count == 2
    assert part.data_ptr() == other.data_ptr()
    assert any(other.data_ptr() in kernel for kernel in launched.kernels)


def test_sparse_and_nested_tensors_are_refused_after_a_call(launched, monkeypatch):
    mine = Checked(prepare(), monkeypatch)
    mine.call()
    table = mine.step.block_table
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of their prototype state
        others = (table.to_sparse(), table.to_sparse_csr(), torch.nested.nested_tensor([table[0]]))
    for bad in others:
        with pytest.raises(TypeError, match=r"^block_table must be .* got (layout|a nested)"):
            mine.call(block_table=bad)


# ---- the bases ----


def test_bases_count_in_inference_mode(launched):
    """Storage of the caller's may be an inference tensor; what init_comm makes never is."""
    for give in (False, True):
        launched.kernels.clear()
        with torch.inference_mode():
            plan = prepare()
            words = msa_icp_jax.msa_icp_comm_layout(2, 2, 32).storage_words
            comm = plan.init_comm(torch.zeros(words, dtype=torch.int32) if give else None)
            step = decode_step(plan, random_decode(LENGTHS, 2, 128))
            options = {"comm": comm, "slot": 0, "tagged": False, "decode_query_len": 2}
            plan.decode(*step, **options)
            comm.connect([comm.storage.data_ptr(), 1 << 40])
            plan.decode(*step, **options)
            comm.recv_bases.zero_()
            comm.tagged_recv_bases.zero_()
            plan.decode(*step, **options)
            bases = comm.recv_bases.data_ptr()  # the collective's kernels do without them
            assert [bases in kernel for kernel in launched.kernels] == [i == 4 for i in range(9)]


def test_bases_that_do_not_count_are_refused(launched):
    plan = prepare()
    with torch.inference_mode():
        bases = torch.zeros(2, dtype=torch.int64)
    comm = dataclasses.replace(plan.init_comm(), recv_bases=bases)
    with pytest.raises(ValueError, match=r"^comm.recv_bases must not be an inference tensor"):
        plan.check_comm(comm)


def test_a_peer_inside_this_ranks_own_memory(launched):
    plan = prepare()
    comm = plan.init_comm()
    own = comm.storage.data_ptr()
    comm.connect([own, own + 16])
    with pytest.raises(ValueError, match=r"^comm.recv_bases must be apart by the size"):
        plan.check_comm(comm)
    comm.connect([own, 1 << 40])
    comm.recv_bases[1] = comm.publish_generations.data_ptr()
    with pytest.raises(ValueError, match=r"^comm.recv_bases must not lie in this rank's own"):
        plan.check_comm(comm)


def test_tensors_that_share_an_address_are_not_exchanged(launched, monkeypatch):
    mine = Checked(prepare(), monkeypatch, decode_query_len=1)
    mine.step = decode_step(mine.plan, random_decode(LENGTHS, 1, 128))
    set_bases(mine.plan, mine.comm)
    shared = {"num_valid_pages": mine.step.seq_lens}
    mine.call(**shared)
    mine.call(**shared)
    assert mine.count == 1
    mine.call()
    assert mine.count == 2
    score, select, merge = launched.kernels[-3:]
    assert mine.step.seq_lens.data_ptr() in score
    for kernel in (select, merge):
        assert mine.step.num_valid_pages.data_ptr() in kernel
        assert mine.step.seq_lens.data_ptr() not in kernel


@pytest.mark.parametrize(("world_size", "page_size"), [(2, 128), (4, 256)])
def test_a_decode_with_a_pool_needs_no_scores(launched, world_size, page_size):
    plan = prepare(world_size, page_size)
    step, comm = decode_step(plan, random_decode(LENGTHS, 2, page_size)), plan.init_comm()
    set_bases(plan, comm)
    pool = torch.zeros(plan.decode_pool_shape(), dtype=torch.uint8)
    arguments = {"comm": comm, "slot": 0, "tagged": True, "decode_query_len": 2}
    plan.decode(*step._replace(scores=None), **arguments, pool=pool)
    score, select, merge = launched.kernels
    inputs = [step.index_q, step.index_k, step.block_table, step.seq_lens]
    assert score[1:5] == [x.data_ptr() for x in inputs]
    assert pool.data_ptr() in score
    assert select[1] == pool.data_ptr()
    assert step.output.data_ptr() in merge


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda bases: bases[1:].zero_(), "be all 0 .collective. or all device addresses"),
        (lambda bases: bases[1:].add_(4), "hold multiples of 16"),
        (lambda bases: bases[1:].copy_(bases[:1]), "be distinct"),
        (lambda bases: bases[:1].add_(16), "own address 0x.* at rank 0"),
    ],
)
@pytest.mark.parametrize("tagged", [False, True])
def test_wrong_bases_are_named(launched, change, match, tagged):
    plan = prepare()
    step, comm = decode_step(plan, random_decode(LENGTHS, 2, 128)), plan.init_comm()
    set_bases(plan, comm)
    plan.check_comm(comm)
    name = "tagged_recv_bases" if tagged else "recv_bases"
    change(getattr(comm, name))
    for call in (
        lambda: plan.check_comm(comm),
        lambda: plan.decode(*step, comm=comm, slot=0, tagged=tagged, decode_query_len=2),
    ):
        with pytest.raises(ValueError, match=f"^comm.{name} must .*{match}"):
            call()
    assert not launched.kernels


def test_nothing_is_kept_alive(launched):
    plan = prepare()
    for form in ("one-sided", "collective"):
        step, comm = decode_step(plan, random_decode(LENGTHS, 2, 128)), plan.init_comm()
        if form == "one-sided":
            set_bases(plan, comm)
        plan.decode(*step, comm=comm, slot=0, tagged=True, decode_query_len=2)
        owners = [weakref.ref(x) for x in (*step, comm)]
        assert plan._route._calls._calls
        del step, comm
        gc.collect()
        assert not any(owner() for owner in owners)
        assert not plan._route._calls._calls


@pytest.fixture(scope="module")
def comm() -> Any:
    return torch_inputs.MSAIcpComm.zeros(2, 4, CPU)


@dataclasses.dataclass
class Places:
    """What a call's tensors are bound to: the places of those that were exchanged."""

    exchangeable: bool = True
    found: tuple[int, ...] = ()

    def moved(self, changed: Any) -> Any:
        return Places(True, (*changed,)) if self.exchangeable else None

    def with_queries(self, address: int) -> Any:
        return Places(True, (0,)) if self.exchangeable else None


@pytest.fixture(params=["guarded", "public"])
def look(request, monkeypatch) -> str:
    """With torch's guards, and without them."""
    if request.param == "public":
        monkeypatch.setattr(remembered, "_look_for", remembered._public_look_for)
    else:
        assert remembered._look_for is remembered._guarded_look_for
    return request.param


def raising(*_: Any) -> Any:
    raise TypeError


@pytest.mark.parametrize("guards", [raising, lambda *_: lambda *_: True, lambda *_: raising])
def test_guards_that_do_otherwise_are_not_trusted(monkeypatch, guards):
    assert remembered._find_look() is remembered._guarded_look_for
    monkeypatch.setattr(remembered, "_guarded_look_for", guards)
    assert remembered._find_look() is remembered._public_look_for


def test_remembered_calls_are_bounded(comm, look):
    calls = RememberedCalls(3)
    kept = [torch.zeros(1) for _ in range(10)]
    for tensor in kept:
        calls.remember((kept[0], tensor, None, comm), (2,), Places())
        assert sum(map(len, calls._calls.values())) <= 3
    owners = (kept[0], kept[-1], None, comm)
    assert calls.find(owners, (2,)) is not None
    assert calls.find(owners, (1,)) is None
    assert calls.find((None, kept[-1], kept[0], comm), (2,)) is None
    assert calls.find((7, kept[-1], None, comm), (2,)) is None


@pytest.mark.parametrize("change", ["resize_", "set_", "data", "smaller"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_tensor_that_changed_is_not_found(comm, look, change, place):
    """Index keys never, other tensors not where a launch has more of them than the address."""
    calls = RememberedCalls(3)
    tensor, other = torch.zeros(64), torch.zeros(64)
    owners = (tensor, other, None, comm) if place == 0 else (other, tensor, None, comm)
    calls.remember(owners, (), Places(exchangeable=place == 1))
    assert calls.find(owners, ()) is not None
    if change == "resize_":
        tensor.resize_(1 << 16)
    elif change == "set_":
        tensor.set_(torch.zeros(64))
    elif change == "data":
        tensor.data = torch.zeros(64)
    else:
        tensor.resize_(32)
    assert calls.find(owners, ()) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.float(),
        lambda x: x[:-1].clone(),
        lambda x: x.clone().t(),
        lambda x: x.to_sparse(),
        lambda x: torch.nested.nested_tensor([x, x]),
        lambda x: torch.view_as_complex(torch.zeros(4, 4, 2)).conj().imag,
        lambda x: x.float().requires_grad_(),
        lambda x: x.numpy(),
        lambda x: torch.zeros(17, dtype=torch.int32)[1:].view(4, 4),
        lambda x: None,
    ],
)
@pytest.mark.parametrize("place", [0, 2])
def test_a_tensor_of_another_form_is_not_found(comm, look, change, place):
    calls = RememberedCalls(3)
    made = [torch.zeros(4, 4, dtype=torch.int32) for _ in range(3)]
    calls.remember((*made, None, comm), (), Places())

    def find(other: Any) -> Any:
        return calls.find((*made[:place], other, *made[place + 1 :], None, comm), ())

    other = made[place].clone()
    assert find(other).found == (place,)
    assert find(change(made[place])) is None


def test_calls_are_found_in_every_mode_of_torch(comm, look):
    calls = RememberedCalls(3)
    owners = (*(torch.zeros(4) for _ in range(3)), None, comm)
    for _ in range(2):
        with torch.inference_mode():
            calls.remember(owners, (), Places())
            assert calls.find(owners, ()) is not None
        with torch.no_grad():
            assert calls.find(owners, ()) is not None
        assert calls.find(owners, ()) is not None
    with torch.inference_mode():
        fresh = torch.ones(4)
    assert calls.find((fresh, *owners[1:]), ()).found == (0,)


def test_calls_of_many_forms_are_all_remembered(comm, look):
    """And the last one is found first."""
    calls = RememberedCalls(9)
    keys = torch.zeros(64)
    made = [(torch.zeros(size), keys, None, comm) for size in range(1, 6)]
    for owners in made:
        calls.remember(owners, (), Places(True, owners[0].shape))
    for owners in (*made, *made):
        assert calls.find(owners, ()).found == owners[0].shape
        ((call, *others),) = calls._calls.values()
        assert call.bound.found == owners[0].shape
        assert len(others) == 4


def test_queries_in_a_new_place_are_the_calls_once_they_stay_there(comm, look):
    """Until then they are a call's alone, and the remembered one is as it was."""
    calls = RememberedCalls(3)
    queries, keys = torch.zeros(64), torch.zeros(64)
    calls.remember((queries, keys, None, comm), (), Places())
    ((call,),) = calls._calls.values()
    moving = [torch.zeros(64) for _ in range(2)]
    for _ in range(3):
        for tensor in moving:
            assert calls.find((tensor, keys, None, comm), ()).found == (0,)
    assert [*calls._calls.values()] == [[call]]
    for _ in range(remembered._SETTLED + 1):
        assert calls.find((moving[0], keys, None, comm), ()).found == (0,)
    ((call,),) = calls._calls.values()
    assert call.place[0] == moving[0].data_ptr()


@pytest.mark.parametrize("where", ["output", "comm"])
def test_queries_that_meet_what_is_written_are_not_found(comm, look, where):
    calls = RememberedCalls(3)
    tensors = [torch.zeros(64, dtype=torch.int32) for _ in range(7)]
    calls.remember((*tensors, None, comm), (), Places())
    written = tensors[6] if where == "output" else comm.recv.view(-1)
    assert calls.find((written[:64], *tensors[1:], None, comm), ()) is None
    assert calls.find((tensors[0].clone(), *tensors[1:], None, comm), ()).found == (0,)


@pytest.mark.parametrize("by_object", [False, True])
def test_a_reused_id_is_not_the_old_tensor(comm, look, by_object):
    """Freed tensors' ids and addresses come back: as another place, or another object."""
    calls, ids, reused = RememberedCalls(1 << 20, by_object=by_object), set(), 0
    first, keys = torch.zeros(64), torch.zeros(64)
    calls.remember((first, keys, None, comm), (), Places())
    for i in range(300):
        if i % 2:
            wrong = torch.full((64,), i, dtype=torch.int32)
            assert calls.find((wrong, keys, None, comm), ()) is None
            del wrong
        tensor = torch.full((64,), float(i))
        reused += (id(tensor), tensor.data_ptr()) in ids
        ids.add((id(tensor), tensor.data_ptr()))
        ((call,),) = calls._calls.values()
        same = tensor.data_ptr() == call.place[0] and not by_object
        found = calls.find((tensor, keys, None, comm), ())
        assert found is call.bound if same else found.found == (0,)
        del tensor
    assert reused > 10, "no object came back: the test shows nothing"
    del keys
    gc.collect()
    assert not calls._calls


def test_index_keys_with_a_reused_id_are_not_the_old_ones(comm, look):
    calls, ids, reused = RememberedCalls(1 << 20), set(), 0
    other = torch.zeros(64)
    for i in range(300):
        tensor = torch.full((64,), i)
        reused += (id(tensor), tensor.data_ptr()) in ids
        ids.add((id(tensor), tensor.data_ptr()))
        owners = (other, tensor, None, comm)
        assert calls.find(owners, ()) is None
        calls.remember(owners, (), Places())
        assert calls.find(owners, ()) is not None
        del tensor, owners
    assert reused > 10, "no object came back: the test shows nothing"
    assert not calls._calls


# ---- the collective's torch operations ----


@pytest.mark.parametrize("tagged", [False, True])
@pytest.mark.parametrize("slot", [0, 2])
def test_the_exchange_leaves_the_storage_as_the_jax_package_does(launched, tagged, slot):
    """Rows of a rank that hears itself only, over storage with rows left and counters at -1."""
    plan = prepare()
    step, comm = decode_step(plan, random_decode(LENGTHS, 2, 128)), plan.init_comm()
    comm.recv[slot, 1, 0, 3, 32] = 1  # was never merged
    comm.publish_generations[slot, :, :4] = -1
    comm.publish_generations[slot, :, 4:] = 6
    before = comm.publish_generations.numpy().copy()
    plan.decode(*step, comm=comm, slot=slot, tagged=tagged, decode_query_len=2)
    message = plan._route._buffers[(("scratch", 0, None), (4, 8, 33), torch.int32)]
    message.copy_(torch.arange(message.numel(), dtype=torch.int32).view(message.shape))
    message[..., -1] = 1
    sent = jnp.asarray(message.numpy().copy())
    comm.publish_generations.copy_(torch.from_numpy(before))
    comm.recv.zero_()
    comm.recv[slot, 1, 0, 3, 32] = 1
    plan.decode(*step, comm=comm, slot=slot, tagged=tagged, decode_query_len=2)

    jax_comm = msa_icp_jax.MSAIcpComm.zeros(2, 32)
    if tagged:
        tags, counters = msa_icp_jax.ops.select.bump_generations(jnp.asarray(before), slot, 8)
        rows = msa_icp_jax.rows.tag(sent, tags).reshape(2, 2, 8, 32, 2)
        want = msa_icp_jax.comm.store_tagged(jax_comm.tagged_recv, slot, rows)
        found = comm.tagged_recv.view(torch.int32).view(want.shape)
        np.testing.assert_array_equal(comm.publish_generations.numpy(), np.asarray(counters))
    else:
        recv = jax_comm.recv.at[slot, 1, 0, 3, 32].set(1)
        want = msa_icp_jax.comm.store_legacy(recv, slot, sent.reshape(2, 2, 8, 33))
        found = comm.recv
    np.testing.assert_array_equal(found.numpy(), np.asarray(want))


def test_marks_are_far_apart():
    """Of any two calls up to 8,192 tokens, and from 0: no counter gets from one to the other."""
    marks = [
        msa_icp_jax.comm.mark_of(slot, tokens, tagged)
        for slot in range(3)
        for tokens in range(1, 8193)
        for tagged in (False, True)
    ]
    assert max(map(abs, marks)) < 2**31
    circle = np.sort(np.array([0, *marks], np.int64) % 2**32)
    gaps = np.diff([*circle, circle[0] + 2**32])
    assert gaps.min() > 50_000
    for slot, tokens, tagged in ((0, 1, False), (1, 64, True), (2, 8192, False)):
        traced = jax.jit(msa_icp_jax.comm.mark_of, static_argnums=(1, 2))(slot, tokens, tagged)
        assert traced.dtype == jnp.int32
        assert int(traced) == msa_icp_jax.comm.mark_of(slot, tokens, tagged)


def test_rows_that_were_not_sent_are_no_rows_of_an_earlier_call(launched, monkeypatch):
    """A peer's message that is shorter leaves a part of the buffer as it was."""
    plan = prepare()
    step, comm = decode_step(plan, random_decode(LENGTHS, 2, 128)), plan.init_comm()
    fills = [True]

    def all_to_all(received: Any, message: Any, group: Any) -> None:
        received[0] = message[0]
        if fills[0]:
            received[1] = message[1]

    monkeypatch.setattr(exchange, "all_to_all", all_to_all)

    def flags(slot: int) -> Any:
        for (name, *_), buffer in plan._route._buffers.items():
            if isinstance(name, tuple) and buffer.shape[-1] == 33:
                buffer[..., -1] = 1  # as select leaves them
        comm.recv.zero_()  # as merges leave them
        plan.decode(*step, comm=comm, slot=slot, tagged=False, decode_query_len=2)
        return comm.recv[slot % 3, :, :, :8, -1].clone()

    flags(0)
    for slot in range(6):
        assert (flags(slot) == 1).all()
    fills[0] = False
    for slot in range(6, 12):
        got = flags(slot)
        assert (got[0] == 1).all()
        assert (got[1] != 1).all()


# ---- prefill ----


@pytest.mark.parametrize("tokens", [128, 97])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("precision", "index_dtype"),
    [("fast", "float8_e4m3fn"), ("exact", "float8_e4m3fn"), ("exact", "bfloat16")],
)
def test_prefill_is_bound_to_the_callers_memory(launched, tokens, fused, precision, index_dtype):
    plan = prepare(4, 256, 1, precision=precision, index_dtype=index_dtype)
    case = random_prefill(SEGMENTS, tokens, 256, index_dtype=index_dtype)
    step = prefill_window(plan, case)
    bounds = {"total_q": tokens, "max_query_len": tokens, "max_seq_len": 8192}
    window_plan = plan.prefill_window_plan(*step.lengths, **bounds)
    pool = torch.zeros(plan.prefill_pool_shape(), dtype=torch.uint8) if fused else None
    plan.prefill_local(
        step.query,
        step.index_k,
        step.block_table,
        window_plan,
        step.score_scratch,
        step.num_valid_pages,
        step.carrier,
        pool,
    )
    assert len(launched.kernels) <= 2
    assert step.carrier.data_ptr() in launched.kernels[-1]
    scorer = launched.kernels[0]
    converts = precision == "exact" and index_dtype == "float8_e4m3fn"
    copies = tokens % 64 or converts
    assert (scorer[1] == step.query.data_ptr()) == (not copies)
    if copies:
        scratch = next(
            x
            for (name, *_), x in plan._route._buffers.items()
            if isinstance(name, tuple) and x.data_ptr() == scorer[1]
        )
        assert scratch.dtype == (torch.float16 if converts else step.query.dtype)
        used = step.query.numel()
        flat = scratch.view(-1)[:used].float()
        assert torch.equal(flat.nan_to_num(), step.query.view(-1).float().nan_to_num())
        assert not scratch.view(-1)[used:].float().any()
    if not fused:
        assert scorer[-1] == step.score_scratch.data_ptr()
    plan.prefill_merge(step.received, step.num_valid_pages, step.output)
    assert launched.kernels[-1][1] == step.received.data_ptr()
    assert step.output.data_ptr() in launched.kernels[-1]


def test_a_window_without_segments(launched):
    plan = prepare()
    none = torch.zeros(0, dtype=torch.int32)
    window_plan = plan.prefill_window_plan(
        none, none, none, total_q=4, max_query_len=4, max_seq_len=128
    )
    query = torch.zeros((4, 4, 128), dtype=torch.float8_e4m3fn)
    keys = torch.zeros((2, 64, 128), dtype=torch.float8_e4m3fn)
    table = torch.zeros((0, 4), dtype=torch.int32)
    counts = torch.zeros(4, dtype=torch.int32)
    carrier = torch.full((4, 6, 33), 5, dtype=torch.int32)
    plan.prefill_local(query, keys, table, window_plan, None, counts, carrier)
    assert not launched.kernels
    want = np.asarray(msa_icp_jax.rows.empty_rows(4, 4))
    np.testing.assert_array_equal(carrier[:, :4].numpy(), want)
    assert (carrier[:, 4:] == 5).all()
    scores = torch.full((4, 4, 64), 5.0)
    plan.prefill_local(query, keys, table, window_plan, scores, counts, carrier)
    assert (scores == -torch.inf).all()
    assert len(launched.kernels) == 1  # select


def lengths_of(kind: str, segments: int, rng: np.random.Generator) -> list[np.ndarray]:
    if kind == "long":  # positions and keys on both sides of the last that a plane has
        qo = rng.integers(1, 200, segments)
        offset = rng.integers(MAX_TOKENS - 100_000, MAX_INT32 - 200, segments)
        offset[::2] = rng.integers(MAX_TOKENS - 500, MAX_TOKENS + 500, len(offset[::2]))
        found = [qo, offset + qo, offset]
    elif kind == "hostile":
        found = [rng.integers(-(2**31), 2**31, segments) for _ in range(3)]
    elif kind == "ragged":
        qo = rng.integers(0, 3, segments) * rng.integers(0, 150, segments)
        found = [qo, rng.integers(0, 1 << 20, segments), rng.integers(0, 1 << 20, segments)]
    else:
        qo, offset = rng.integers(0, 200, segments), rng.integers(0, 4000, segments)
        found = [qo, offset + qo, offset]
    return [x.astype(np.int32) for x in found]


WINDOWS = [  # (segments, bounds): few, since each is a program
    (segments, {"total_q": total_q, "max_query_len": query_len, "max_seq_len": seq_len})
    for segments, total_q, query_len, seq_len in (
        (3, 0, 0, 1 << 20),
        (0, 1, 1, 900),
        (1, 63, 63, MAX_INT32),
        (5, 64, 40, MAX_INT32),
        (8, 200, 200, 1 << 20),
        (7, 513, 130, MAX_INT32),
        (8, 700, 700, MAX_INT32),
    )
]


@functools.cache
def window_builder(plan: Any, **bounds: int) -> Any:
    """The window plan of the JAX package, by one program for all lengths."""
    return jax.jit(functools.partial(plan.prefill_window_plan, **bounds))


def same_window_plan(found: window.WindowPlan, want: MSAIcpScorePlan) -> None:
    assert found.num_segments == want.num_segments
    leaves = zip(window.leaves(found).values(), jax.tree.leaves(want), strict=True)
    for mine, theirs in leaves:
        theirs = np.asarray(theirs)
        assert mine.is_contiguous() and str(mine.dtype) == f"torch.{theirs.dtype}"
        if mine.dtype != torch.int32:
            mine, theirs = mine.view(torch.uint8), theirs.view(np.uint8)
        np.testing.assert_array_equal(mine.numpy(), theirs, strict=True)


@pytest.mark.parametrize("kind", ["legal", "ragged", "long", "hostile"])
def test_the_window_plan_is_that_of_the_jax_package_bit_for_bit(kind):
    limits = {"max_num_batched_tokens": 8192, "max_num_seqs": 64, "max_model_len": MAX_INT32}
    plan = prepare(**limits)._jax_plan
    hidden = window.hidden_keys(CPU)
    rng = np.random.default_rng(0)
    for segments, bounds in WINDOWS * 3:
        lengths, total_q = lengths_of(kind, segments, rng), bounds["total_q"]
        want = window_builder(plan, **bounds)(*lengths)
        found = window.build(tuple(map(torch.from_numpy, lengths)), hidden, ctas=SMS, **bounds)
        same_window_plan(found, want)
        shapes = window.shapes(found.num_segments, total_q, SMS)
        assert shapes == {k: (x.dtype, tuple(x.shape)) for k, x in window.leaves(found).items()}
        for count in (None, 50):
            np.testing.assert_array_equal(
                found.num_valid_pages(count).numpy(),
                np.asarray(want.num_valid_pages(count)),
                strict=True,
            )


def test_many_long_segments_do_not_wrap():
    """64 segments of 2^31 - 1 keys: the sum of all costs passes 2^31 unless planes bound it."""
    lengths = [np.full(64, value, np.int32) for value in (128, MAX_INT32, MAX_INT32 - 128)]
    bounds = {"total_q": 8192, "max_query_len": 128, "max_seq_len": MAX_INT32}
    plan = prepare(max_num_batched_tokens=8192, max_num_seqs=64, max_model_len=MAX_INT32)
    want = window_builder(plan._jax_plan, **bounds)(*lengths)
    found = window.build(
        tuple(map(torch.from_numpy, lengths)), window.hidden_keys(CPU), ctas=SMS, **bounds
    )
    same_window_plan(found, want)
    assert found.work.tiles[:128, balance.SCORED].tolist() == [MAX_TOKENS] * 128
    shares = found.work.ranges[:, balance.RANGE_TILES]
    assert shares.min() >= 1 and shares.max() <= 3  # 128 equal tiles on 132 CTAs
    first = found.work.ranges[:, balance.RANGE_TILE]
    assert first[0] == 0 and (first.diff() >= 0).all() and first[-1] == 127


def test_a_window_that_int32_cannot_count_is_refused():
    lengths = tuple(torch.zeros((3, 4), dtype=torch.int32).unbind())
    bounds = {"total_q": 6_000_000, "max_query_len": 64, "max_seq_len": MAX_INT32}
    with pytest.raises(ValueError, match=r"^total_q, max_query_len and max_seq_len must allow"):
        window.build(lengths, window.hidden_keys(CPU), ctas=SMS, **bounds)


def test_window_plans_of_the_other_route_are_refused(launched):
    plan = prepare()
    case = random_prefill(SEGMENTS, 128, 128)
    step = prefill_window(plan, case)
    bounds = {"total_q": 128, "max_query_len": 128, "max_seq_len": 8192}
    theirs = torch_inputs.prepare(2, 128, 0)
    for mine, other in ((plan, theirs), (theirs, plan)):
        with pytest.raises(TypeError, match=r"window_plan must come from this plan's"):
            mine.prefill_local(
                step.query,
                step.index_k,
                step.block_table,
                other.prefill_window_plan(*step.lengths, **bounds),
                step.score_scratch,
                step.num_valid_pages,
                step.carrier,
            )


def test_a_window_plan_that_was_changed_is_refused(launched):
    plan = prepare()
    step = prefill_window(plan, random_prefill(SEGMENTS, 128, 128))
    bounds = {"total_q": 128, "max_query_len": 128, "max_seq_len": 8192}
    window_plan = plan.prefill_window_plan(*step.lengths, **bounds)
    inside = step.carrier.view(-1)[: len(SEGMENTS)]
    for changes, error, match in (
        ({"qo_starts": window_plan.qo_starts.float()}, TypeError, "window_plan.qo_starts must be"),
        ({"kv_lens": window_plan.kv_lens[:1]}, ValueError, "window_plan.kv_lens must be"),
        ({"total_q": 64}, ValueError, "window_plan.work.tiles must be"),
        ({"work": None}, TypeError, "window_plan.work.ranges must be"),
        ({"kv_lens": inside}, ValueError, "carrier_view is written and must not overlap window_pl"),
    ):
        with pytest.raises(error, match=f"^{match}"):
            plan.prefill_local(
                step.query,
                step.index_k,
                step.block_table,
                dataclasses.replace(window_plan, **changes),
                step.score_scratch,
                step.num_valid_pages,
                step.carrier,
            )
    assert not launched.kernels


# ---- capture and warmup ----


@pytest.fixture
def capturing(monkeypatch: Any) -> None:
    monkeypatch.setattr(direct, "is_capturing", lambda device: True)


def test_new_shapes_are_refused_inside_a_capture(launched, monkeypatch):
    plan = prepare()
    step, comm = decode_step(plan, random_decode(LENGTHS, 2, 128)), plan.init_comm()
    set_bases(plan, comm)
    plan.check_comm(comm)
    monkeypatch.setattr(direct, "is_capturing", lambda device: True)
    with pytest.raises(RuntimeError, match=r"before the capture, call warmup\(index_k"):
        plan.decode(*step, comm=comm, slot=0, tagged=False, decode_query_len=2)
    with pytest.raises(RuntimeError, match="warmup cannot be captured"):
        plan.warmup()
    assert not launched.kernels


def test_a_new_comm_is_refused_inside_a_capture(launched, monkeypatch):
    from msa_icp_torch import plan as plan_module

    plan = prepare()
    step, comm = decode_step(plan, random_decode(LENGTHS, 2, 128)), plan.init_comm()
    set_bases(plan, comm)
    monkeypatch.setattr(plan_module, "is_capturing", lambda device: True)
    with pytest.raises(RuntimeError, match=r"check_comm\(comm\) before torch.cuda.graph"):
        plan.decode(*step, comm=comm, slot=0, tagged=False, decode_query_len=2)


@pytest.mark.parametrize(
    ("one_sided", "fused", "index_dtype"),
    [
        (False, None, "float8_e4m3fn"),
        (True, False, "bfloat16"),
        (True, True, "float8_e4m3fn"),
    ],
)
def test_warmup_is_all_that_a_capture_needs(launched, monkeypatch, one_sided, fused, index_dtype):
    plan = prepare(max_num_batched_tokens=64, max_num_seqs=4, index_dtype=index_dtype)
    case = random_decode(LENGTHS, 2, 128, width=16, index_dtype=index_dtype)
    step, comm = decode_step(plan, case), plan.init_comm()
    if one_sided:
        set_bases(plan, comm)
        plan.check_comm(comm)
    plan.warmup(step.index_k, table_width=16, batch_sizes=[4], query_lens=[2], fused=fused)
    pools = [
        torch.zeros(shape, dtype=torch.uint8) if fused else None
        for shape in (plan.decode_pool_shape(), plan.prefill_pool_shape())
    ]
    segments = [(20, 0, 20)] * 3 + [(4, 0, 4)]
    ragged = prefill_window(
        plan, random_prefill(segments, 64, 128, width=16, index_dtype=index_dtype)
    )
    bounds = {"total_q": 64, "max_query_len": 64, "max_seq_len": 8192}
    compiled = len(launched.compiled)
    buffers = len(plan._route._buffers)
    assert not launched.kernels
    monkeypatch.setattr(direct, "is_capturing", lambda device: True)
    for tagged in (False, True):
        for slot in range(3):
            options = {"slot": slot, "tagged": tagged, "decode_query_len": 2, "pool": pools[0]}
            plan.decode(*step, comm=comm, **options)
    window_plan = plan.prefill_window_plan(*ragged.lengths, **bounds)
    plan.prefill_local(
        ragged.query,
        step.index_k,
        ragged.block_table,
        window_plan,
        ragged.score_scratch,
        ragged.num_valid_pages,
        ragged.carrier[:, :64].contiguous(),
        pools[1],
    )
    received = ragged.received[:, :, :64].contiguous()
    plan.prefill_merge(received, ragged.num_valid_pages, ragged.output)
    assert len(launched.compiled) == compiled
    assert len(plan._route._buffers) == buffers
    assert len(launched.kernels) == 6 * 3 + 3


def test_unaligned_tensors_are_refused_by_name(launched):
    plan = prepare()
    step, comm = decode_step(plan, random_decode(LENGTHS, 2, 128)), plan.init_comm()
    for name in ("index_q", "block_table", "seq_lens", "num_valid_pages", "scores", "output"):
        tensor = getattr(step, name)
        memory = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
        with pytest.raises(ValueError, match=f"^{name} must start at a multiple of 16 bytes"):
            plan.decode(
                *step._replace(**{name: memory}),
                comm=comm,
                slot=0,
                tagged=False,
                decode_query_len=2,
            )
    assert not launched.kernels


@pytest.mark.parametrize("index_dtype", ["float8_e4m3fn", "bfloat16"])
def test_compound_pages_are_bound_by_their_base(launched, index_dtype):
    plan = prepare(4, 128, index_dtype=index_dtype)
    case = random_decode(LENGTHS, 2, 128, index_dtype=index_dtype)
    view = torch_inputs.strided_keys(oracle.shard_cache(case.cache.keys, 4)[0], 352, 64)
    step, comm = decode_step(plan, case, view), plan.init_comm()
    plan.decode(*step, comm=comm, slot=0, tagged=False, decode_query_len=2)
    assert launched.kernels[0][2] == view.data_ptr() - 64 * 128 * view.element_size()


# ---- choice of the route ----


@pytest.fixture
def hopper(monkeypatch: Any) -> torch.device:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a Hopper GPU")
    return torch.device("cuda", 0)


def test_auto_is_direct_on_hopper(hopper, monkeypatch):
    monkeypatch.setattr(launching, "unavailable", lambda: None)
    for backend in ("auto", "mosaic"):
        assert routes.choose_route("auto", backend, hopper) == "direct"
        assert routes.choose_route("direct", backend, hopper) == "direct"
        assert routes.choose_route("dlpack", backend, hopper) == "dlpack"
    assert routes.choose_route("auto", "xla", hopper) == "dlpack"
    for route in ("auto", "direct", "dlpack"):
        with pytest.raises(ValueError, match=r'^backend must be "auto" or "xla" on cpu: .*Hopper'):
            routes.choose_route(route, "mosaic", CPU)
    with pytest.raises(ValueError, match='where backend is "xla"'):
        routes.choose_route("direct", "xla", hopper)


def test_hopper_without_the_symbols_falls_back_with_one_warning(hopper, monkeypatch):
    monkeypatch.setattr(launching, "unavailable", lambda: "its symbols moved")
    routes._warn_dlpack.cache_clear()
    with pytest.warns(RuntimeWarning, match="dlpack route runs instead .* its symbols moved"):
        assert routes.choose_route("auto", "auto", hopper) == "dlpack"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert routes.choose_route("auto", "auto", hopper) == "dlpack"
    with pytest.raises(RuntimeError, match="no direct route here: its symbols moved"):
        routes.choose_route("direct", "auto", hopper)


def test_another_backend_is_no_backend(hopper, monkeypatch):
    monkeypatch.setattr(launching, "unavailable", lambda: None)
    with pytest.raises(ValueError, match="backend must be one of"):
        routes.choose_route("auto", "cake", hopper)


def test_another_gpu_takes_dlpack(hopper, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert routes.choose_route("auto", "auto", hopper) == "dlpack"
    with pytest.raises(ValueError, match='"direct" is Hopper\'s'):
        routes.choose_route("direct", "auto", hopper)


def test_another_jaxlib_is_not_trusted(monkeypatch):
    monkeypatch.setattr(launching.jaxlib, "__version__", "0.14.1")
    assert "jaxlib 0.14.1 may have other C symbols" in (launching.unavailable() or "")


def test_without_a_plugin_there_is_no_direct_route(monkeypatch):
    monkeypatch.setattr(launching, "_folder", lambda module: None)
    launching._plugin.cache_clear()
    assert "no CUDA plugin of JAX is installed" in (launching.unavailable() or "")
    launching._plugin.cache_clear()


def lowered_kernels() -> list[Any]:
    """Every kind of a chain's kernels, lowered anew."""
    limits = {"max_model_len": 1024, "max_num_seqs": 2, "max_num_batched_tokens": 64}
    plan = make_plan(2, 128, rank=1, backend="mosaic", **limits)
    lowering = kernels.Lowering(plan, launch.Target(sms=SMS))
    batch = kernels.DecodeShapes(2, 2, (8, 64, 128), 8)
    prefill = kernels.PrefillShapes(40, 2, 40, (8, 64, 128), 8)
    return [
        kernels.decode_scores(lowering, batch, True),
        kernels.select_and_publish_rows(lowering, 4, False, True, 64),
        kernels.merge_rows(lowering, 4, True, True, 64),
        kernels.prefill_local(lowering, prefill, 40, False),
        kernels.prefill_merge(lowering, 40, 40),
    ]


def test_kernels_are_the_same_with_64_bits_on() -> None:
    want = lowered_kernels()
    with jax.enable_x64(True):
        found = lowered_kernels()
    for one, other in zip(found, want, strict=True):
        assert [getattr(step, "module", step) for step in one.steps] == [
            getattr(step, "module", step) for step in other.steps
        ]
        assert (one.scratch, len(one.returned)) == (other.scratch, len(other.returned))
