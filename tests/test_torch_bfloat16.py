"""Index keys and queries in bfloat16 on torch tensors: the oracle's answers, and refusals."""

from __future__ import annotations

from typing import Any

import inputs
import numpy as np
import oracle
import pytest
from chains import (
    Decoded,
    Prefilled,
    check_decoded,
    check_prefilled,
    make_plan,
    random_decode,
    random_prefill,
)

torch = pytest.importorskip("torch", reason="torch is not installed (extra torch)")

import torch_inputs  # noqa: E402
from torch_inputs import (  # noqa: E402
    Group,
    decode_step,
    outputs,
    planes,
    prefill_local,
    prefill_window,
    prepare,
)

from msa_icp_torch import pages  # noqa: E402

BF16 = "bfloat16"
LENGTHS = [300, 0, 4000, 1]
SEGMENTS = [(40, 2600, 2640), (0, 0, 0), (57, 0, 57)]


@pytest.fixture(autouse=True)
def local_groups(monkeypatch: Any) -> None:
    torch_inputs.use_local_groups(monkeypatch)


@pytest.mark.parametrize(
    ("world_size", "page_size", "pitch", "row_offset", "tagged"),
    # Rows have no index dtype: each layout in one form of them.
    [(2, 256, 0, 0, True), (4, 128, 48, 8, False), (2, 128, 160, 96, True)],
)
def test_decode(world_size, page_size, pitch, row_offset, tagged):
    group = Group(world_size, page_size, index_dtype=BF16)
    case = random_decode(LENGTHS, 2, page_size, index_dtype=BF16)
    shards = oracle.shard_cache(case.cache.keys, world_size)
    views = [None] * world_size
    if pitch:
        views = [torch_inputs.strided_keys(x, pitch, row_offset) for x in shards]
    steps = [decode_step(p, case, view) for p, view in zip(group.plans, views, strict=True)]
    plan = make_plan(world_size, page_size, index_dtype=BF16)
    for slot in range(2):
        group.decode(steps, 2, slot=slot, tagged=tagged)
        found = Decoded(outputs([s.output for s in steps]), planes([s.scores for s in steps]))
        check_decoded(plan, case, found, fused=False)


@pytest.mark.parametrize("fused", [False, True])
def test_prefill(fused):
    group = Group(2, 128, index_dtype=BF16)
    case = random_prefill(SEGMENTS, 128, 128, index_dtype=BF16)
    windows = [prefill_window(plan, case) for plan in group.plans]
    pool = torch.zeros(group.plans[0].prefill_pool_shape(), dtype=torch.uint8) if fused else None

    def run(rank: int, plan: Any) -> None:
        window = windows[rank]
        prefill_local(plan, case, window, pool)
        plan.prefill_exchange(window.carrier, window.received)
        plan.prefill_merge(window.received, window.num_valid_pages, window.output)

    group.each(run)
    found = Prefilled(
        outputs([w.output for w in windows]),
        np.stack([w.carrier.numpy() for w in windows]),
        planes([w.score_scratch for w in windows]),
    )
    plan = make_plan(2, 128, index_dtype=BF16)
    check_prefilled(plan, case, found, fused=fused)


def test_a_mixture_is_refused_by_name():
    plan = prepare(2, 128, 0, index_dtype=BF16)
    comm = plan.init_comm()
    wide = decode_step(plan, random_decode([300], 1, 128, index_dtype=BF16))
    narrow = decode_step(plan, random_decode([300], 1, 128))
    options = {"comm": comm, "slot": 0, "tagged": False, "decode_query_len": 1}
    for name in ("index_q", "index_k"):
        mixed = wide._replace(**{name: getattr(narrow, name)})
        with pytest.raises(TypeError, match=rf"{name} must be a torch\.bfloat16 tensor .*float8"):
            plan.decode(*mixed, **options)
    other = prepare(2, 128, 0)
    with pytest.raises(TypeError, match=r"index_q must be a torch\.float8_e4m3fn tensor .*bfloat"):
        other.decode(*wide, **options)


def test_the_base_buffer_counts_in_bytes_of_bfloat16():
    base = torch.zeros((3, 6, 192, 128), dtype=torch.bfloat16)
    for layer in base:
        view = layer[:, 48:80]
        buffer, row_offset = pages.base_of(view)
        assert buffer.shape == layer.shape
        assert buffer.data_ptr() + row_offset * 256 == view.data_ptr()
        end = buffer.data_ptr() + buffer.numel() * 2
        assert end <= base.untyped_storage().data_ptr() + base.untyped_storage().nbytes()
    view = torch.zeros(6 * 4160, dtype=torch.bfloat16).as_strided((6, 32, 128), (4160, 128, 1))
    with pytest.raises(ValueError, match=r"multiple of 256 bytes and at least 8192, got .* 8320"):
        pages.base_of(view)


def test_other_dtypes_are_refused_by_name():
    with pytest.raises(ValueError, match="index_dtype must be one of 'float8_e4m3fn', 'bfloat16'"):
        prepare(2, 128, 0, index_dtype="float16")


def test_warmup_compiles_what_decode_uses():
    group = Group(2, 128, index_dtype=BF16)
    case = random_decode(LENGTHS, 2, 128, index_dtype=BF16)
    steps = [decode_step(plan, case) for plan in group.plans]
    for plan, step in zip(group.plans, steps, strict=True):
        width = step.block_table.shape[1]
        plan.warmup(step.index_k, table_width=width, batch_sizes=[4], query_lens=[2])
    with inputs.nothing_compiles():
        group.decode([step._replace(scores=step.scores[:8].clone()) for step in steps], 2)
