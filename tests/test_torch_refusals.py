"""What cannot cross raises, by the argument's name, before anything is written."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from chains import random_decode, random_prefill

torch = pytest.importorskip("torch", reason="torch is not installed (extra torch)")

import torch_inputs  # noqa: E402
from torch_inputs import decode_step, prefill_window  # noqa: E402

import msa_icp_jax  # noqa: E402
import msa_icp_torch  # noqa: E402
from msa_icp_torch import bridge  # noqa: E402

WRITTEN = ("scores", "output", "score_scratch", "carrier_view", "received")


@pytest.fixture(scope="module")
def plan() -> Any:
    return torch_inputs.prepare(2, 128, 0)


@pytest.fixture(autouse=True)
def no_exchange(monkeypatch: Any) -> None:
    """A call that gets as far as the exchange was not refused."""
    from msa_icp_torch import exchange

    def reached(*_: Any) -> None:
        raise AssertionError("the call was not refused")

    monkeypatch.setattr(exchange, "check_group", lambda *_: None)
    monkeypatch.setattr(exchange, "all_to_all", reached)


def decode_arguments(plan: Any) -> dict[str, Any]:
    step = decode_step(plan, random_decode([300, 17], 2, 128))
    more = {"comm": plan.init_comm(), "slot": 0, "tagged": False, "decode_query_len": 2}
    return step._asdict() | more


def prefill_arguments(plan: Any) -> dict[str, Any]:
    window = prefill_window(plan, random_prefill([(20, 0, 20), (3, 0, 3)], 32, 128))
    window_plan = plan.prefill_window_plan(
        *window.lengths, total_q=32, max_query_len=32, max_seq_len=128
    )
    return {
        "query": window.query,
        "index_k": window.index_k,
        "block_table": window.block_table,
        "window_plan": window_plan,
        "score_scratch": window.score_scratch,
        "num_valid_pages": window.num_valid_pages,
        "carrier_view": window.carrier,
    }


def merge_arguments(plan: Any) -> dict[str, Any]:
    window = prefill_window(plan, random_prefill([(20, 0, 20), (3, 0, 3)], 32, 128))
    return {
        "received": window.received,
        "num_valid_pages": window.num_valid_pages,
        "output": window.output,
    }


def exchange_arguments(plan: Any) -> dict[str, Any]:
    window = prefill_window(plan, random_prefill([(20, 0, 20), (3, 0, 3)], 32, 128))
    return {"carrier_view": window.carrier, "received": window.received}


def window_arguments(plan: Any) -> dict[str, Any]:
    window = prefill_window(plan, random_prefill([(20, 0, 20), (3, 0, 3)], 32, 128))
    names = ("qo_segment_lens", "kv_segment_lens", "qo_offset")
    bounds = {"total_q": 32, "max_query_len": 32, "max_seq_len": 128}
    return dict(zip(names, window.lengths, strict=True)) | bounds


METHODS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "decode": decode_arguments,
    "prefill_window_plan": window_arguments,
    "prefill_local": prefill_arguments,
    "prefill_exchange": exchange_arguments,
    "prefill_merge": merge_arguments,
}


def refused(plan: Any, method: str, arguments: dict[str, Any], error: Any, match: str) -> None:
    written = [k for k in WRITTEN if k in arguments and is_readable(arguments[k])]
    before = {k: arguments[k].clone() for k in written}
    with pytest.raises(error, match=match):
        getattr(plan, method)(**arguments)
    for name, old in before.items():
        assert torch.equal(arguments[name], old), name
    if "comm" in arguments and isinstance(arguments["comm"], torch_inputs.MSAIcpComm):
        comm = arguments["comm"]
        for field in ("recv", "tagged_recv", "publish_generations", "expected_generations"):
            assert not getattr(comm, field).any(), field
        assert not comm.errors.any()


def is_readable(value: Any) -> bool:
    return torch.is_tensor(value) and value.layout == torch.strided and value.device.type == "cpu"


def as_strided_twice(t: torch.Tensor) -> torch.Tensor:
    """The same values and shape, with rows twice as far apart."""
    wide = torch.zeros((*t.shape[:-1], 2 * t.shape[-1]), dtype=t.dtype)
    wide[..., : t.shape[-1]] = t
    return wide[..., : t.shape[-1]]


def every_tensor(*dtypes: Any) -> Any:
    """Parametrizes over the methods' tensor arguments of some dtypes."""
    plan = torch_inputs.prepare(2, 128, 0)
    found = [
        (method, name)
        for method, arguments in METHODS.items()
        for name, value in arguments(plan).items()
        if torch.is_tensor(value) and value.dtype in dtypes
    ]
    return pytest.mark.parametrize(("method", "name"), found)


WORDS, FLOATS, FLOAT8 = torch.int32, torch.float32, torch.float8_e4m3fn


@every_tensor(WORDS, FLOATS, FLOAT8)
def test_wrong_dtype(plan, method, name):
    arguments = METHODS[method](plan)
    dtypes = (torch.int64, torch.bool, torch.float16)
    for dtype in dtypes:
        bad = torch.zeros(arguments[name].shape, dtype=dtype)
        match = rf"^{name} must be a torch\.\w+ tensor .* got {dtype}"
        refused(plan, method, arguments | {name: bad}, TypeError, match)


@every_tensor(WORDS, FLOATS, FLOAT8)
def test_not_a_tensor(plan, method, name):
    arguments = METHODS[method](plan)
    for bad in ([1, 2], arguments[name].view(torch.uint8).numpy(), 3):
        refused(plan, method, arguments | {name: bad}, TypeError, f"^{name} must be")


@every_tensor(WORDS, FLOATS, FLOAT8)
def test_another_device(plan, method, name):
    arguments = METHODS[method](plan)
    bad = arguments[name].to("meta")
    refused(plan, method, arguments | {name: bad}, TypeError, rf"^{name} must .* on cpu")


@every_tensor(WORDS, FLOATS, FLOAT8)
def test_wrong_number_of_dimensions(plan, method, name):
    arguments = METHODS[method](plan)
    bad = arguments[name][None]
    refused(plan, method, arguments | {name: bad}, ValueError, f"^{name} must be")


@every_tensor(WORDS, FLOATS, FLOAT8)
def test_strides(plan, method, name):
    arguments = METHODS[method](plan)
    tensor = arguments[name]
    bad = as_strided_twice(tensor) if tensor.ndim > 1 else every_other(tensor)
    assert bad.shape == tensor.shape
    match = f"^{name} must .* strides"
    refused(plan, method, arguments | {name: bad}, ValueError, match)


@every_tensor(FLOATS, FLOAT8)
def test_requires_grad(plan, method, name):
    arguments = METHODS[method](plan)
    bad = arguments[name].clone().requires_grad_()
    match = f"^{name} must not require grad"
    refused(plan, method, arguments | {name: bad}, TypeError, match)


@every_tensor(WORDS, FLOATS)
def test_sparse(plan, method, name):
    arguments = METHODS[method](plan)
    bad = arguments[name].to_sparse()
    refused(plan, method, arguments | {name: bad}, TypeError, f"^{name} must .* layout")


def every_other(t: torch.Tensor) -> torch.Tensor:
    return t.repeat_interleave(2)[::2]


def test_a_negative_bit(plan):
    arguments = decode_arguments(plan)
    shape = arguments["scores"].shape
    bad = torch.zeros(shape, dtype=torch.complex64).conj().imag
    assert bad.is_neg()
    match = "^scores must not carry a conjugate or negative bit"
    refused(plan, "decode", arguments | {"scores": bad}, TypeError, match)


@every_tensor(WORDS, FLOATS, FLOAT8)
def test_memory_that_was_freed_or_shrunk(plan, method, name):
    for size in (0, 16):
        arguments = METHODS[method](plan)
        arguments[name].untyped_storage().resize_(min(size, arguments[name].nbytes - 1))
        with pytest.raises(ValueError, match=f"^{name} must lie in its storage"):
            getattr(plan, method)(**arguments)


# ---- overlaps ----


def test_scores_and_output_in_one_allocation(plan):
    arguments = decode_arguments(plan)
    scores = arguments["scores"]
    last = scores.view(-1)[-arguments["output"].numel() :]
    bad = last.view(torch.int32).view(arguments["output"].shape)
    refused(plan, "decode", arguments | {"output": bad}, ValueError, "output .* overlap scores|sco")


@pytest.mark.parametrize("other", ["num_valid_pages", "seq_lens", "block_table"])
def test_output_over_an_input(plan, other):
    arguments = decode_arguments(plan)
    memory = torch.zeros(10_000, dtype=torch.int32)
    output, tensor = arguments["output"], arguments[other]
    bad = {
        "output": memory[: output.numel()].view(output.shape),
        other: memory[: tensor.numel()].view(tensor.shape),
    }
    match = f"^output is written and must not overlap {other}"
    refused(plan, "decode", arguments | bad, ValueError, match)


def test_output_inside_the_comm(plan):
    arguments = decode_arguments(plan)
    comm, output = arguments["comm"], arguments["output"]
    for part in (comm.recv, comm.tagged_recv):  # whichever form of rows the call has
        bad = part.view(torch.int32).view(-1)[: output.numel()].view(output.shape)
        for tagged in (False, True):
            changes = {"output": bad, "tagged": tagged}
            refused(plan, "decode", arguments | changes, ValueError, "overlap")


def test_output_over_the_bases(plan):
    arguments = decode_arguments(plan)
    output = arguments["output"]
    memory = torch.zeros(output.numel(), dtype=torch.int32)
    comm = dataclasses.replace(arguments["comm"], recv_bases=memory[:4].view(torch.int64))
    bad = {"comm": comm, "output": memory.view(output.shape)}
    match = "^output is written and must not overlap comm.recv_bases"
    refused(plan, "decode", arguments | bad, ValueError, match)


def test_the_parts_of_the_comm(plan):
    arguments = decode_arguments(plan) | {"tagged": True}
    comm = arguments["comm"]
    half = comm.publish_generations.view(-1)[: comm.expected_generations.numel()]
    bad = dataclasses.replace(comm, expected_generations=half.view(comm.expected_generations.shape))
    match = r"comm.\w+_generations .* overlap comm.\w+_generations"
    refused(plan, "decode", arguments | {"comm": bad}, ValueError, match)


def test_scores_over_the_index_keys(plan):
    arguments = decode_arguments(plan)
    scores, keys = arguments["scores"], arguments["index_k"]
    memory = torch.zeros(scores.numel() * 4 + keys.numel(), dtype=torch.uint8)
    bad = {
        "scores": memory[: scores.numel() * 4].view(torch.float32).view(scores.shape),
        "index_k": memory[1024 : 1024 + keys.numel()].view(keys.dtype).view(keys.shape),
    }
    match = "^scores is written and must not overlap index_k"
    refused(plan, "decode", arguments | bad, ValueError, match)


def test_pool_over_the_output(plan):
    arguments = decode_arguments(plan)
    pool = torch.zeros(max(plan.decode_pool_shape()[0], 1 << 16), dtype=torch.uint8)
    output = arguments["output"]
    bad = pool[: output.numel() * 4].view(torch.int32).view(output.shape)
    refused(plan, "decode", arguments | {"output": bad, "pool": pool}, ValueError, "overlap")


def test_a_pool_where_no_plane_can_lie(plan):
    size = plan.decode_pool_shape()[0]
    pool = torch.zeros(size + 32, dtype=torch.uint8)
    for start in (1, 4, 8):
        bad = {"pool": pool[start : start + size]}
        match = "^pool must start at a multiple of 16 bytes"
        refused(plan, "decode", decode_arguments(plan) | bad, ValueError, match)


def test_received_over_the_carrier(plan):
    arguments = exchange_arguments(plan)
    bad = arguments["carrier_view"].view(arguments["received"].shape)
    match = "^received is written and must not overlap carrier_view"
    refused(plan, "prefill_exchange", arguments | {"received": bad}, ValueError, match)


def test_inputs_may_share_memory(plan, monkeypatch):
    from msa_icp_torch import exchange

    monkeypatch.setattr(exchange, "all_to_all", lambda received, *_: received.zero_())
    arguments = decode_arguments(plan)
    lengths = torch.tensor([300, 17, 300, 17], dtype=torch.int32)
    plan.decode(**arguments | {"seq_lens": lengths[:2], "num_valid_pages": lengths})


# ---- index keys ----


@pytest.mark.parametrize(
    ("pitch", "first", "match"),
    [
        (64 * 128 + 16, 0, "page pitch that is a multiple of 128 bytes"),
        (64 * 128 + 64, 0, "page pitch that is a multiple of 128 bytes"),
        (48 * 128, 0, "page pitch that is a multiple of 128 bytes and at least 8192"),
        (192 * 128, 4 * 128, "multiple of 8 rows"),
        (192 * 128, 1040, "multiple of 8 rows"),
        (96 * 128, 0, "not at row 0 of pages of at most 128 rows"),
    ],
)
def test_page_pitch(plan, pitch, first, match):
    arguments = decode_arguments(plan)
    memory = torch.zeros(max(8 * pitch, 7 * pitch + 8192), dtype=torch.uint8).view(
        torch.float8_e4m3fn
    )
    bad = memory.as_strided((8, 64, 128), (pitch, 128, 1), first)
    refused(plan, "decode", arguments | {"index_k": bad}, ValueError, f"^index_k must .*{match}")


@pytest.mark.parametrize("shape", [(8, 128, 128), (8, 32, 128), (8, 48, 128), (0, 64, 128)])
def test_rows_of_another_layout(plan, shape):
    arguments = decode_arguments(plan)
    bad = torch.zeros(shape, dtype=torch.float8_e4m3fn)
    refused(plan, "decode", arguments | {"index_k": bad}, ValueError, "^index_k must be")


def test_transposed_rows(plan):
    arguments = decode_arguments(plan)
    bad = torch.zeros((8, 128, 64), dtype=torch.uint8).view(torch.float8_e4m3fn).mT
    match = "^index_k must have strides"
    refused(plan, "decode", arguments | {"index_k": bad}, ValueError, match)


# ---- the plan's limits and modes ----


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"slot": -1}, ValueError, "^slot must"),
        ({"slot": True}, TypeError, "^slot must"),
        ({"tagged": 1}, TypeError, "^tagged must"),
        ({"enable_pdl": 0}, TypeError, "^enable_pdl must"),
        ({"decode_query_len": 9}, ValueError, "^decode_query_len must"),
        ({"decode_query_len": 1}, ValueError, "^index_q must"),
        ({"scores": None}, TypeError, "^scores must"),
        ({"output": None}, TypeError, "^output must"),
        ({"comm": None}, TypeError, "^comm must be an MSAIcpComm of msa_icp_torch, got builtins"),
        (
            {"comm": msa_icp_jax.MSAIcpComm.zeros(2, 32)},
            TypeError,
            "^comm must be an MSAIcpComm of msa_icp_torch, got msa_icp_jax",
        ),
        ({"pool": torch.zeros(1, dtype=torch.uint8)}, ValueError, "^pool must"),
    ],
)
def test_decode_arguments(plan, changes, error, match):
    refused(plan, "decode", decode_arguments(plan) | changes, error, match)


def test_rows_without_the_axis_of_ranks(plan):
    for method in ("prefill_exchange", "prefill_merge"):
        arguments = METHODS[method](plan)
        own = {"received": arguments["received"][0].clone()}
        match = r"^received must .* shape \[2 ranks, .* which lacks axis 0 of ranks"
        refused(plan, method, arguments | own, ValueError, match)


def test_every_rank_s_keys(plan):
    arguments = decode_arguments(plan)
    both = torch.stack([arguments["index_k"].view(torch.uint8)] * 2).view(torch.float8_e4m3fn)
    match = r"^index_k must .* \(page_size / world_size = 64 rows .* an axis too many in front"
    refused(plan, "decode", arguments | {"index_k": both}, ValueError, match)


def test_more_than_the_plan_allows(plan):
    case = random_decode([1] * 9, 1, 128)
    more = {"comm": plan.init_comm(), "slot": 0, "tagged": False, "decode_query_len": 1}
    arguments = decode_step(plan, case)._asdict() | more
    match = r"^block_table.shape\[0\] .* \(the plan's max_num_seqs\), got 9"
    refused(plan, "decode", arguments, ValueError, match)
    for name, value, limit in (
        ("decode_query_len", 9, "max_decode_query_len"),
        ("decode_query_len", 8, "max_decode_tokens"),
    ):
        few = decode_arguments(plan) | {"block_table": arguments["block_table"][:8]}
        match = rf"{name} must .* \(the plan's {limit}\), got"
        refused(plan, "decode", few | {name: value}, ValueError, match)
    lengths = torch.ones(9, dtype=torch.int32)
    names = ("qo_segment_lens", "kv_segment_lens", "qo_offset")
    bounds = {"total_q": 9, "max_query_len": 1, "max_seq_len": 1}
    many = dict.fromkeys(names, lengths) | bounds
    refused(plan, "prefill_window_plan", many, ValueError, r"^qo_segment_lens.shape\[0\]")
    for name, limit, option in (
        ("total_q", 4096, "max_num_batched_tokens"),
        ("max_query_len", 4096, "max_num_batched_tokens"),
        ("max_seq_len", 8192, "max_model_len"),
    ):
        arguments = window_arguments(plan) | {name: limit + 1}
        match = rf"^{name} must .* \(the plan's {option}\), got"
        refused(plan, "prefill_window_plan", arguments, ValueError, match)


def test_tagged_rows_need_two_layers():
    plan = torch_inputs.prepare(2, 128, 0, num_sparse_layers=1)
    arguments = decode_arguments(plan) | {"tagged": True}
    refused(plan, "decode", arguments, ValueError, "num_sparse_layers >= 2")


@pytest.mark.parametrize("name", ["recv_bases", "tagged_recv_bases"])
def test_one_sided_bases(plan, name):
    """Seen in a fresh comm, and when they are set after calls that were fine."""
    arguments = decode_arguments(plan)
    plan.check_comm(arguments["comm"])
    getattr(arguments["comm"], name)[1] = 1 << 40
    match = f"^comm.{name} must be all 0: .* one-sided"
    refused(plan, "decode", arguments, ValueError, match)
    with pytest.raises(ValueError, match=match):
        plan.check_comm(arguments["comm"])


@pytest.mark.parametrize(
    "name",
    [
        "recv",
        "tagged_recv",
        "recv_bases",
        "tagged_recv_bases",
        "publish_generations",
        "expected_generations",
        "errors",
    ],
)
def test_comm_tensors(plan, name):
    comm = plan.init_comm()
    good = getattr(comm, name)
    empty = torch.zeros(0, dtype=good.dtype)
    for bad, error in ((good.float(), TypeError), (empty, ValueError), (None, TypeError)):
        broken = dataclasses.replace(comm, **{name: bad})
        arguments = decode_arguments(plan) | {"comm": broken}
        with pytest.raises(error, match=f"^comm.{name} must be"):
            plan.decode(**arguments)


COMM_FIELDS = (
    "recv",
    "tagged_recv",
    "recv_bases",
    "tagged_recv_bases",
    "publish_generations",
    "expected_generations",
)


@pytest.mark.parametrize("name", COMM_FIELDS)
def test_comm_strides(plan, name):
    comm = plan.init_comm()
    tensor = getattr(comm, name)
    bad = as_strided_twice(tensor) if tensor.ndim > 1 else every_other(tensor)
    broken = dataclasses.replace(comm, **{name: bad}, storage=None)
    with pytest.raises(ValueError, match=f"^comm.{name} must be contiguous, got strides"):
        plan.check_comm(broken)


@pytest.mark.parametrize("name", [*COMM_FIELDS, "errors"])
def test_comm_on_another_device(plan, name):
    comm = plan.init_comm()
    broken = dataclasses.replace(comm, **{name: getattr(comm, name).to("meta")})
    with pytest.raises(TypeError, match=f"^comm.{name} must be .* got one on meta"):
        plan.check_comm(broken)


@pytest.mark.parametrize("name", ["recv", "tagged_recv"])
def test_comm_alignment(plan, name):
    comm = plan.init_comm()
    tensor = getattr(comm, name)
    memory = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
    broken = dataclasses.replace(comm, **{name: memory}, storage=None)
    match = f"^comm.{name} must start at a multiple of 16 bytes"
    with pytest.raises(ValueError, match=match):
        plan.check_comm(broken)


@pytest.mark.parametrize("name", COMM_FIELDS[:2])
def test_comm_views_of_another_place(plan, name):
    """Swapped, from another storage, or a storage that is too short."""
    comm, other = plan.init_comm(), plan.init_comm()
    broken = dataclasses.replace(comm, **{name: getattr(other, name)})
    match = f"^comm.{name} must be the view of comm.storage at byte"
    with pytest.raises(ValueError, match=match):
        plan.check_comm(broken)
    short = dataclasses.replace(comm, storage=comm.storage[:-1])
    with pytest.raises(ValueError, match=r"^comm.storage must be"):
        plan.check_comm(short)


@pytest.mark.parametrize("name", ["errors", "expected_generations", "recv_bases"])
def test_comm_parts_that_overlap(plan, name):
    comm = plan.init_comm()
    tensor = getattr(comm, name)
    inside = comm.storage[: tensor.numel() * tensor.element_size() // 4]
    bad = inside.view(tensor.dtype).view(tensor.shape)
    with pytest.raises(ValueError, match=r"^comm.\w+ is written and must not overlap comm.\w+"):
        plan.check_comm(dataclasses.replace(comm, **{name: bad}))


def test_receive_storage_of_the_callers(plan):
    words = msa_icp_torch.msa_icp_comm_layout(2, 2, 32).storage_words
    memory = torch.full((words + 4,), 9, dtype=torch.int32)
    comm = plan.init_comm(memory)
    plan.check_comm(comm)
    assert comm.recv.data_ptr() == memory.data_ptr()
    assert not memory.any()
    for bad, error in ((memory[:-5], ValueError), (memory.float(), TypeError), (7, TypeError)):
        with pytest.raises(error, match=r"^storage must be"):
            plan.init_comm(bad)
    comm.connect([1 << 40, 2 << 40])
    assert comm.recv_bases.tolist() == [1 << 40, 2 << 40]
    offset = comm.tagged_recv.data_ptr() - memory.data_ptr()
    assert comm.tagged_recv_bases.tolist() == [(1 << 40) + offset, (2 << 40) + offset]
    with pytest.raises(ValueError, match=r"^connect needs a comm whose rows are views"):
        dataclasses.replace(comm, storage=None).connect([1, 2])
    for words in (1, 2):
        with pytest.raises(ValueError, match=r"^storage must start at a multiple of 16 bytes"):
            plan.init_comm(torch.zeros(memory.numel(), dtype=torch.int32)[words:])


@pytest.mark.parametrize(
    ("addresses", "error", "match"),
    [
        ([1 << 40], ValueError, "addresses must be 2, one of each rank, got 1"),
        ([1 << 40, 2 << 40, 3 << 40], ValueError, "addresses must be 2, .* got 3"),
        ([1 << 40, 0], ValueError, r"addresses\[1\] must be an int in \[16, "),
        ([1 << 40, 1 << 64], ValueError, r"addresses\[1\] must be an int in \[16, "),
        ([1 << 40, 2.0], TypeError, r"addresses\[1\] must be an int"),
        ([1 << 40, 40], ValueError, "addresses must be multiples of 16"),
        (5, TypeError, "addresses must be a sequence of ints"),
    ],
)
def test_connect(plan, addresses, error, match):
    comm = plan.init_comm()
    with pytest.raises(error, match=f"^{match}"):
        comm.connect(addresses)
    assert not comm.recv_bases.any()
    assert not comm.tagged_recv_bases.any()


@pytest.mark.parametrize("name", ["recv_bases", "errors", "publish_generations"])
def test_every_part_of_a_comm_is_aligned(plan, name):
    comm = plan.init_comm()
    tensor = getattr(comm, name)
    odd = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
    with pytest.raises(ValueError, match=f"^comm.{name} must start at a multiple of 16 bytes"):
        plan.check_comm(dataclasses.replace(comm, **{name: odd}))


def test_a_comm_is_not_copied(plan):
    for copy_of in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"^an MSAIcpComm cannot be pickled or copied"):
            copy_of(plan.init_comm())


def test_a_plan_is_not_copied(plan):
    for copy_of in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"^an MSAIcpIndexerPlan .* cannot be pickled or copi"):
            copy_of(plan)


def test_a_device_may_be_its_string():
    assert torch_inputs.prepare(2, 128, 0, device="cpu").device == torch.device("cpu")


def test_another_default_device():
    with torch.device("meta"):
        plan = torch_inputs.prepare(2, 128, 0)
        comm = plan.init_comm()
        comm.connect([1 << 40, 2 << 40])
    assert comm.recv_bases.tolist() == [1 << 40, 2 << 40]


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"batch_sizes": 5}, TypeError, "batch_sizes must be a sequence of ints"),
        ({"batch_sizes": torch.tensor([1])}, TypeError, "batch_sizes must be a sequence of ints"),
        ({"batch_sizes": [9]}, ValueError, r"batch_sizes\[0\] must be an int in \[1, 8\]"),
        ({"query_lens": 3}, TypeError, "query_lens must be a sequence of ints"),
        ({"query_lens": [1, 9]}, ValueError, r"query_lens\[1\] must be an int in \[1, 8\]"),
        ({"table_width": 1 << 40}, ValueError, "table_width must be an int"),
        ({"comm": msa_icp_jax.MSAIcpComm.zeros(2, 32)}, TypeError, "comm must be an MSAIcpComm of"),
    ],
)
def test_warmup_arguments(plan, changes, error, match):
    with pytest.raises(error, match=f"^{match}"):
        plan.warmup(**{"prefill": False, "batch_sizes": []} | changes)


@pytest.mark.parametrize(
    "method", ["decode", "prefill_window_plan", "prefill_local", "prefill_merge"]
)
def test_inside_graph_capture(plan, method, monkeypatch):
    arguments = METHODS[method](plan)
    from msa_icp_torch import dlpack

    monkeypatch.setattr(dlpack, "is_capturing", lambda device: True)
    match = f"^{method} cannot be captured in a CUDA graph: .* outside torch.cuda.graph"
    refused(plan, method, arguments, RuntimeError, match)
    with pytest.raises(RuntimeError, match="warmup cannot be captured"):
        plan.warmup()


# ---- the constructor ----


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"route": "direct"}, ValueError, 'where backend is "xla"'),
        (
            {"backend": "mosaic"},
            ValueError,
            '^backend must be "auto" or "xla" on cpu: the kernels are for Hopper .* got "mosaic"',
        ),
        (
            {"transport": "one-sided"},
            TypeError,
            r"unexpected keyword argument 'transport': .* comm.connect\(addresses\), is one-sided",
        ),
        ({"axis_name": "icp"}, TypeError, "keyword argument 'axis_name': group is the process gr"),
        ({"row_offset": 8}, TypeError, "keyword argument 'row_offset': .* as a strided view"),
        ({"hidden_size": 8}, TypeError, "unexpected keyword argument 'hidden_size'$"),
        (
            {"index_dtype": torch.bfloat16},
            TypeError,
            "^index_dtype must be one of .* got dtype torch.bfloat16: give the dtype's name",
        ),
        ({"world_size": 8}, ValueError, "must be one of 2, 4, got 8: .* two groups of 4"),
        ({"route": "direct", "backend": "auto"}, ValueError, "must .* on cpu: .* is Hopper's"),
        ({"route": "cake"}, ValueError, "route must be one of 'auto', 'dlpack', 'direct'"),
        ({"backend": "cake"}, ValueError, "backend must be one of 'auto', 'mosaic', 'xla'"),
        ({"precision": "tf32"}, ValueError, "precision must be"),
        ({"rank": None}, TypeError, "rank must be an int"),
        ({"rank": 2}, ValueError, "rank must be"),
        ({"world_size": 3}, ValueError, "world_size must be"),
        ({"page_size": 64}, ValueError, "page_size must be one of 128, 256"),
        (
            {"group": 7},
            TypeError,
            "group must be a torch.distributed.ProcessGroup or None, got int",
        ),
        ({"device": 0}, TypeError, "device must be a torch.device or its string, got int"),
        ({"device": "meta"}, ValueError, "device must be cpu or cuda, got meta"),
        ({"device": "gpu:0"}, ValueError, "device must be cpu or cuda, got 'gpu:0'"),
        ({"device": torch.device("meta")}, ValueError, "device must be cpu or cuda"),
    ],
)
def test_prepare(changes, error, match):
    arguments = {"world_size": 2, "page_size": 128, "rank": 0} | changes
    with pytest.raises(error, match=match):
        torch_inputs.prepare(**arguments)


def test_routes():
    for route in ("auto", "dlpack"):
        assert torch_inputs.prepare(2, 128, 0, route=route).route == "dlpack"


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda", 0)])
def test_no_gpu(device):
    match = r"^device cuda:\d needs a GPU, and torch .* finds none here .*: pass device=\"cpu\""
    with pytest.raises(RuntimeError, match=match):
        torch_inputs.prepare(2, 128, 0, device=device)


def test_a_gpu_past_the_last(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match=r"^device must be one of torch's 2 GPUs, .* got cuda:2"):
        torch_inputs.prepare(2, 128, 0, device="cuda:2")


@pytest.fixture
def four_gpus(monkeypatch):
    """As far as torch says."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


@pytest.mark.usefixtures("four_gpus")
def test_a_gpu_that_jax_does_not_have(monkeypatch):
    """Never a silent CPU: the message names both libraries' cuDNN."""

    def no_gpu(backend: str) -> Any:
        raise RuntimeError(f"Unknown backend {backend}")

    monkeypatch.setattr(bridge.jax, "local_devices", no_gpu)
    with pytest.raises(RuntimeError, match=r"no cuda backend .* cuDNN .* JAX's plugin .* cuDNN"):
        torch_inputs.prepare(2, 128, 0, device=torch.device("cuda", 0))


@pytest.mark.usefixtures("four_gpus")
def test_an_amd_gpu_gets_amds_advice(monkeypatch):
    """torch calls it cuda, and its capability may read as Hopper's."""

    def no_gpu(backend: str) -> Any:
        raise RuntimeError(f"Unknown backend {backend}")

    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "AMD Instinct MI250X")
    monkeypatch.setattr(bridge.jax, "local_devices", no_gpu)
    with pytest.raises(RuntimeError, match=r"no rocm backend for device cuda:0.*ROCm") as refused:
        torch_inputs.prepare(2, 128, 0, device=torch.device("cuda", 0))
    assert "cuda1" not in str(refused.value) and "cuDNN" not in str(refused.value)
    with pytest.raises(ValueError, match=r"on AMD Instinct MI250X: \"direct\" is Hopper's"):
        torch_inputs.prepare(2, 128, 0, device="cuda:0", backend="auto", route="direct")


def test_platforms_that_leave_the_device_out(monkeypatch):
    """JAX says it by an assertion."""

    def none(backend: str) -> Any:
        raise AssertionError

    monkeypatch.setattr(bridge.jax, "local_devices", none)
    with pytest.raises(RuntimeError, match=r"JAX has no cpu backend for device cpu: .*JAX_PLATF"):
        torch_inputs.prepare(2, 128, 0)


@pytest.mark.usefixtures("four_gpus")
def test_a_device_that_jax_does_not_see(monkeypatch):
    monkeypatch.setattr(bridge.jax, "local_devices", lambda backend: [])
    with pytest.raises(RuntimeError, match="JAX does not see device cuda:3"):
        torch_inputs.prepare(2, 128, 0, device=torch.device("cuda", 3))


def test_without_a_process_group(plan, monkeypatch):
    monkeypatch.undo()
    arguments = decode_arguments(plan)
    match = "the exchange needs torch.distributed"
    refused(plan, "decode", arguments, RuntimeError, match)
    refused(plan, "prefill_exchange", exchange_arguments(plan), RuntimeError, match)
