"""Decode and prefill on torch tensors against the oracle, all ranks in one process."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import oracle
import pytest
from chains import (
    GROUPS,
    OLD_SCORE,
    OLD_WORD,
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
from torch_inputs import (  # noqa: E402
    Group,
    decode_step,
    outputs,
    planes,
    prefill_local,
    prefill_window,
)

LENGTHS = [300, 0, 4000, 1]
SEGMENTS = [(40, 260, 300), (0, 0, 0), (57, 0, 57), (20, 3000, 3020)]


@pytest.fixture(autouse=True)
def local_groups(monkeypatch: Any) -> None:
    torch_inputs.use_local_groups(monkeypatch)


def name_of(group: tuple[int, int]) -> str:
    return f"w{group[0]}-p{group[1]}"


@pytest.fixture(scope="module", params=GROUPS, ids=name_of)
def group(request: Any) -> Group:
    return Group(*request.param)


def in_groups(*groups: tuple[int, int]) -> Any:
    """In some groups alone: every rank of a group compiles a program of its own."""
    return pytest.mark.parametrize("group", groups, ids=name_of, indirect=True)


def in_groups_if(name: str, *groups: tuple[int, int]) -> Any:
    """Without the option in every group, with it in some."""
    cases = [(group, False) for group in GROUPS] + [(group, True) for group in groups]
    ids = [f"{name_of(group)}-{given}" for group, given in cases]
    return pytest.mark.parametrize(("group", name), cases, ids=ids, indirect=["group"])


def jax_plan(group: Group) -> Any:
    geometry = group.plans[0].geometry
    return make_plan(geometry.world_size, geometry.page_size)


def run_decode(group: Group, case: Any, **options: Any) -> Decoded:
    steps = [decode_step(plan, case) for plan in group.plans]
    group.decode(steps, case.query_len, **options)
    return Decoded(outputs([s.output for s in steps]), planes([s.scores for s in steps]))


# ---- decode ----


@in_groups_if("tagged", (2, 128), (4, 256))
def test_decode_through_all_slots(group, tagged):
    case = random_decode(LENGTHS, 2, group.plans[0].geometry.page_size)
    before = [comm.publish_generations.clone() for comm in group.comms]
    for slot in range(7):
        found = run_decode(group, case, slot=slot, tagged=tagged)
        check_decoded(jax_plan(group), case, found, fused=False)
    for comm, old in zip(group.comms, before, strict=True):
        assert comm.errors.item() == 0
        assert not comm.recv[..., 32].any(), "every flag must be cleared"
        grown = (comm.publish_generations - old)[:, :, :8]
        assert torch.equal(grown[:, 0, 0], torch.tensor([3, 2, 2]) * tagged)
        assert (grown == grown[:, :1, :1]).all()
        assert not comm.publish_generations[:, :, 8:].any()


def test_numpy_integers_are_integers():
    """np.int8(8) times 17 requests would be -120."""
    group = Group(2, 128, max_decode_tokens=136, max_num_seqs=17)
    case = random_decode([700] * 17, 8, 128, pages=104)
    steps = [decode_step(plan, case) for plan in group.plans]
    group.decode(steps, np.int8(8), slot=np.int32(5))
    found = Decoded(outputs([s.output for s in steps]), planes([s.scores for s in steps]))
    check_output(jax_plan(group), case, found.output)


@in_groups((2, 128), (4, 256))
def test_decode_stores_what_the_contract_says(group):
    """The rows of every source, in the tagged storage, as int64 and at their flat place."""
    geometry = group.plans[0].geometry
    world_size, heads = geometry.world_size, geometry.heads_per_rank
    case = random_decode(LENGTHS, 2, geometry.page_size)
    run_decode(group, case, slot=1, tagged=True)
    for owner, comm in enumerate(group.comms):
        flat = comm.tagged_recv.view(-1, 32)
        capacity = comm.tagged_recv.shape[3]
        generation = comm.expected_generations[1, 0, 0].item()
        for source in range(world_size):
            rows = case.rows(jax_plan(group), source)
            for head in range(owner * heads, (owner + 1) * heads):
                first = ((1 * world_size + source) * heads + head % heads) * capacity
                stored = flat[first : first + len(case.query)].numpy()
                np.testing.assert_array_equal(stored.astype(np.int32), rows[head, :, :32])
                assert (stored >> 32 == generation).all()


def test_decode_with_a_pool_scores_there(group):
    """As on a plane of -inf, whatever is in the pool and however many blocks a count names."""
    case = random_decode(LENGTHS, 2, group.plans[0].geometry.page_size)
    case = dataclasses.replace(case, counts=case.counts + 20)
    plain, pooled = ([decode_step(plan, case) for plan in group.plans] for _ in range(2))
    for step in plain:
        step.scores.fill_(-torch.inf)
    pools = group.decode_pools(7)
    group.decode(plain, 2)
    group.decode(pooled, 2, pools, slot=1)
    for want, step, pool in zip(plain, pooled, pools, strict=True):
        assert torch.equal(step.output, want.output)
        assert (step.scores == OLD_SCORE).all()
        scores = want.scores[:8]
        assert torch.equal(pool[: scores.nbytes].view(torch.float32), scores.flatten())
        assert (pool[scores.nbytes :] == 7).all()


def test_decode_with_a_pool_needs_no_scores(group):
    case = random_decode(LENGTHS, 2, group.plans[0].geometry.page_size)
    steps = [decode_step(plan, case)._replace(scores=None) for plan in group.plans]
    group.decode(steps, 2, group.decode_pools())
    check_output(jax_plan(group), case, outputs([s.output for s in steps]))


def test_decode_of_nothing(group):
    case = random_decode([], 1, group.plans[0].geometry.page_size)
    found = run_decode(group, case)
    assert (found.output == OLD_WORD).all()


@pytest.mark.parametrize("tagged", [False, True])
def test_a_fault_is_counted_and_answers_nothing(tagged):
    """A row that was not merged, or a tag that skipped one: never a wrong id."""
    group = Group(2, 128)
    case = random_decode(LENGTHS, 2, 128)
    comm = group.comms[1]
    if tagged:
        comm.expected_generations[0, 1, 3] += 1
    else:
        comm.recv[0, 0, 1, 3, 32] = 1
    steps = [decode_step(plan, case) for plan in group.plans]
    group.decode(steps, 2, tagged=tagged)
    assert group.comms[0].errors.item() == 0
    assert comm.errors.item() == (2 if tagged else 1)
    want = case.answer(jax_plan(group))
    want[3, 3] = -1  # rank 1 owns heads 2 and 3
    np.testing.assert_array_equal(outputs([s.output for s in steps])[:8], want)


@pytest.mark.parametrize(
    ("world_size", "page_size", "pitch", "row_offset"),
    [(4, 256, 352, 0), (2, 128, 352, 16), (2, 128, 160, 96)],  # test_torch_bfloat16: (4, 128)
)
def test_decode_from_compound_pages(world_size, page_size, pitch, row_offset):
    group = Group(world_size, page_size)
    case = random_decode(LENGTHS, 2, page_size)
    shards = oracle.shard_cache(case.cache.keys, world_size)
    steps = []
    for plan in group.plans:
        view = torch_inputs.strided_keys(shards[plan.rank], pitch, row_offset)
        assert not view.is_contiguous()
        steps.append(decode_step(plan, case, view))
    for _ in range(2):
        group.decode(steps, 2)
        found = Decoded(outputs([s.output for s in steps]), planes([s.scores for s in steps]))
        check_decoded(jax_plan(group), case, found, fused=False)


@pytest.mark.parametrize("layout", ["layers in a page", "layer after layer", "behind a header"])
def test_the_base_buffer_lies_around_the_view_and_inside_its_storage(layout):
    from msa_icp_torch import pages

    bases = {
        "layers in a page": torch.zeros((6, 4 * 48, 128), dtype=torch.uint8)[None],
        "layer after layer": torch.zeros((3, 6, 192, 128), dtype=torch.uint8),
        "behind a header": torch.zeros((6 * 192 + 24) * 128, dtype=torch.uint8)[24 * 128 :].view(
            1, 6, 192, 128
        ),
    }[layout].view(torch.float8_e4m3fn)
    storage = bases.untyped_storage()
    found = []
    for base in bases:
        for first in range(8, 192, 48):
            view = base[:, first : first + 32]
            buffer, row_offset = pages.base_of(view)
            assert buffer.is_contiguous()
            assert buffer.shape == base.shape
            assert buffer.data_ptr() + row_offset * 128 == view.data_ptr()
            end = buffer.data_ptr() + buffer.numel()
            assert storage.data_ptr() <= buffer.data_ptr()
            assert end <= storage.data_ptr() + storage.nbytes()
            found.append(row_offset)
    # Each offset is a program of its own: layers in storages of their own must share one.
    assert found[:4] * len(bases) == found


# ---- prefill ----


@in_groups_if("fused", (2, 256), (4, 128))
def test_prefill(group, fused):
    case = random_prefill(SEGMENTS, 128, group.plans[0].geometry.page_size)
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
    check_prefilled(jax_plan(group), case, found, fused=fused)


@in_groups((2, 256), (4, 128))
def test_prefill_without_scratch_is_fused(group):
    case = random_prefill(SEGMENTS, 128, group.plans[0].geometry.page_size)
    plan = group.plans[1]
    window = prefill_window(plan, case)._replace(score_scratch=None)
    prefill_local(plan, case, window)
    np.testing.assert_array_equal(window.carrier[:, :128].numpy(), case.rows(jax_plan(group), 1))


def test_a_window_plan_does_not_follow_its_lengths(group):
    """The caller may reuse the lengths' tensors at once."""
    plan = group.plans[0]
    case = random_prefill(SEGMENTS, 128, plan.geometry.page_size)
    window = prefill_window(plan, case)
    window_plan = plan.prefill_window_plan(
        *window.lengths, total_q=128, max_query_len=128, max_seq_len=8192
    )
    for lengths in window.lengths:
        lengths.fill_(-5)
    plan.prefill_local(
        window.query,
        window.index_k,
        window.block_table,
        window_plan,
        window.score_scratch,
        window.num_valid_pages,
        window.carrier,
    )
    np.testing.assert_array_equal(window.carrier[:, :128].numpy(), case.rows(jax_plan(group), 0))


def test_prefill_of_nothing(group):
    plan, geometry = group.plans[0], group.plans[0].geometry
    none = torch.zeros(0, dtype=torch.int32)
    window_plan = plan.prefill_window_plan(
        none, none, none, total_q=0, max_query_len=0, max_seq_len=0
    )
    query = torch.zeros((0, 4, 128), dtype=torch.float8_e4m3fn)
    index_k = torch.zeros((2, geometry.rows_per_page, 128), dtype=torch.float8_e4m3fn)
    table = torch.zeros((0, 4), dtype=torch.int32)
    carrier = torch.full((4, 3, 33), OLD_WORD, dtype=torch.int32)
    plan.prefill_local(query, index_k, table, window_plan, None, none, carrier)
    assert (carrier == OLD_WORD).all()
    received = torch.zeros((geometry.world_size, geometry.heads_per_rank, 0, 33), dtype=torch.int32)
    output = torch.full((2, geometry.heads_per_rank, 16), OLD_WORD, dtype=torch.int32)
    plan.prefill_merge(received, none, output)
    assert (output == OLD_WORD).all()


def test_a_window_of_padding_alone(group):
    """Query rows but no segment: rows without a candidate."""
    plan, geometry = group.plans[0], group.plans[0].geometry
    none = torch.zeros(0, dtype=torch.int32)
    window_plan = plan.prefill_window_plan(
        none, none, none, total_q=4, max_query_len=4, max_seq_len=128
    )
    query = torch.zeros((4, 4, 128), dtype=torch.float8_e4m3fn)
    index_k = torch.zeros((2, geometry.rows_per_page, 128), dtype=torch.float8_e4m3fn)
    carrier = torch.full((4, 4, 33), OLD_WORD, dtype=torch.int32)
    counts = torch.zeros(4, dtype=torch.int32)
    table = torch.zeros((0, 4), dtype=torch.int32)
    plan.prefill_local(query, index_k, table, window_plan, None, counts, carrier)
    assert (carrier[..., 16:32] == -1).all()
    assert (carrier[..., 32] == 1).all()


@pytest.mark.parametrize("tagged", [False, True])
def test_a_rank_that_is_a_call_ahead_is_a_fault(tagged):
    """Its rows look right in every way but for their slot: never an answer made of them."""
    group = Group(2, 128)
    case = random_decode(LENGTHS, 2, 128)
    steps = [decode_step(plan, case) for plan in group.plans]
    group.each(
        lambda rank, plan: plan.decode(
            *steps[rank],
            comm=group.comms[rank],
            slot=rank,
            tagged=tagged,
            decode_query_len=2,
        )
    )
    assert [comm.errors.item() for comm in group.comms] == [16, 16]  # 2 heads, 8 tokens
    assert (outputs([s.output for s in steps])[:8] == -1).all()


@pytest.mark.parametrize("tagged", [False, True])
@pytest.mark.parametrize("what", ["tokens", "form"])
def test_a_rank_with_another_message_is_a_fault(monkeypatch, what, tagged):
    """Fewer tokens, or the other form of rows, over a transport that fills what it can."""
    from msa_icp_torch import exchange

    plan = torch_inputs.prepare(2, 128, 0)
    case = random_decode(LENGTHS, 2, 128)
    other = random_decode(LENGTHS[:2], 2, 128) if what == "tokens" else case
    kept: list[Any] = []
    sent: list[Any] = []

    def all_to_all(received: Any, message: Any, group: Any) -> None:
        received[0] = message[0]
        part = received[1].view(-1)
        peer = (sent[0] if sent else message)[1].reshape(-1)[: len(part)]
        part[: len(peer)] = peer
        kept.append(message.clone())

    monkeypatch.setattr(exchange, "all_to_all", all_to_all)

    def decode(case: Any, comm: Any, slot: int, tagged: bool) -> Any:
        step = decode_step(plan, case)
        options = {"slot": slot, "tagged": tagged, "decode_query_len": 2}
        plan.decode(*step, comm=comm, **options)
        return step.output[: len(case.query)]

    decode(other, plan.init_comm(), 0, tagged != (what == "form"))
    peers_message, comm = kept[0], plan.init_comm()
    for slot in range(3):
        decode(case, comm, slot, tagged)
    assert comm.errors.item() == 0
    sent.append(peers_message)
    output = decode(case, comm, 0, tagged)
    assert comm.errors.item() == 16  # 2 heads, 8 tokens
    assert (output == -1).all()


@in_groups((2, 128), (2, 256))
def test_index_keys_that_change_their_place_in_the_pages(group):
    """The same address and strides, in a storage whose pages begin 32 rows later."""
    case = random_decode(LENGTHS, 2, group.plans[0].geometry.page_size)
    shards = oracle.shard_cache(case.cache.keys, len(group.plans))
    steps, moved = [], []
    for plan in group.plans:
        compound = oracle.compound_cache(shards[plan.rank], 256, 64)
        memory = torch.full((len(compound) + 1, 256, 128), 0x7F, dtype=torch.uint8)
        memory[:-1] = torch.from_numpy(compound)
        later = torch.from_numpy(memory.view(-1)[32 * 128 :].numpy()).view(torch.float8_e4m3fn)
        view = memory.view(torch.float8_e4m3fn)[:-1, 64 : 64 + plan.geometry.rows_per_page]
        steps.append(decode_step(plan, case, view))
        moved.append(later.as_strided(view.shape, view.stride(), 32 * 128))
    group.decode(steps, 2)
    want = outputs([step.output for step in steps])
    for step, elsewhere in zip(steps, moved, strict=True):
        assert step.index_k.data_ptr() == elsewhere.data_ptr()
        step.index_k.set_(elsewhere)
        step.output.fill_(OLD_WORD)
    group.decode(steps, 2, slot=1)
    np.testing.assert_array_equal(outputs([step.output for step in steps]), want)


# ---- JAX's own modes ----


def test_modes_of_jax_do_not_reach_a_plan():
    """Neither 64 bits, nor an ambient mesh with whose Explicit axes JAX types new arrays."""
    group = Group(2, 128, max_num_batched_tokens=128, max_num_seqs=len(SEGMENTS))
    case = random_prefill(SEGMENTS, 128, 128)
    windows = [prefill_window(plan, case) for plan in group.plans]
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh), jax.enable_x64(True):
        group.plans[0].warmup(index_k=windows[0].index_k, batch_sizes=[1], query_lens=[1])
        for plan, window in zip(group.plans, windows, strict=True):
            prefill_local(plan, case, window)
        for rank, (plan, window) in enumerate(zip(group.plans, windows, strict=True)):
            owned = slice(2 * rank, 2 * rank + 2)
            window.received.copy_(torch.stack([w.carrier[owned] for w in windows]))
            plan.prefill_merge(window.received, window.num_valid_pages, window.output)
    found = Prefilled(
        outputs([w.output for w in windows]),
        np.stack([w.carrier.numpy() for w in windows]),
        planes([w.score_scratch for w in windows]),
    )
    check_prefilled(jax_plan(group), case, found, fused=False)
