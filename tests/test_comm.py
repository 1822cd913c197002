"""Receive storage: its layout, slots, generations and faults, and the contract's worked example."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import oracle
import pytest
from chains import Decode, Ranks, check_output, make_mesh, make_plan, random_decode
from jax.sharding import PartitionSpec as P

from msa_icp_jax import (
    MSAIcpComm,
    msa_icp_comm_layout,
    msa_icp_index_score_sharded_plan,
    msa_icp_merge_candidates,
    msa_icp_topk_select_publish,
)
from msa_icp_jax.comm import check_comm

Array = npt.NDArray[Any]
Storage = dict[str, Array]  # all ranks' storage as global arrays

CAPACITY = 11
TOKENS = 6


# ---- layout ----


@pytest.mark.parametrize(
    ("world_size", "capacity", "legacy", "generations", "expected"),
    [
        (2, 1, (3, 2, 2, 1, 33), (3, 4, 1), (3, 2, 1)),
        (4, 1, (3, 4, 1, 1, 33), (3, 4, 1), (3, 1, 1)),
        (2, 7, (3, 2, 2, 7, 33), (3, 4, 7), (3, 2, 7)),
        (4, 256, (3, 4, 1, 256, 33), (3, 4, 256), (3, 1, 256)),
    ],
)
def test_layout_numbers(
    world_size: int,
    capacity: int,
    legacy: tuple[int, ...],
    generations: tuple[int, ...],
    expected: tuple[int, ...],
) -> None:
    layout = msa_icp_comm_layout(world_size, 4 // world_size, capacity)
    assert (
        layout
        == {
            "storage_words": 1164 * capacity,  # 12 rows of 33 and of 2 * 32 words a token
            "legacy_offset_bytes": 0,
            "legacy_shape": legacy,
            "tagged_offset_bytes": 1584 * capacity,
            "tagged_shape": (*legacy[:-1], 32),
            "generations_shape": generations,
            "expected_shape": expected,
        }
    )
    assert layout.tagged_offset_bytes % 16 == 0
    assert layout.storage_words == layout["storage_words"]
    with pytest.raises(AttributeError, match="nothing_here"):
        _ = layout.nothing_here


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((3, 2, 1), "world_size"),
        ((8, 1, 1), "world_size"),
        ((2, 1, 1), "heads_per_rank"),
        ((4, 2, 1), "heads_per_rank"),
        ((2, 2, 0), "capacity"),
    ],
)
def test_layout_limits(arguments: tuple[int, int, int], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        msa_icp_comm_layout(*arguments)


@pytest.mark.parametrize("capacity", [np.int16(512), np.uint8(32), np.int32(2_000_000)])
def test_layout_of_numpy_integers_is_that_of_ints(capacity: Any) -> None:
    assert msa_icp_comm_layout(np.int8(2), np.int8(2), capacity) == msa_icp_comm_layout(
        2, 2, int(capacity)
    )


@pytest.mark.parametrize("world_size", [2, 4])
def test_init_comm_is_zero_and_splits_as_its_specs_say(world_size: int) -> None:
    ranks = ranks_of(world_size)
    specs = ranks.plan.comm_specs()
    assert specs == MSAIcpComm(
        *[P(None, None, "icp")] * 2, *[P("icp")] * 2, *[P(None, "icp")] * 2, P("icp")
    )
    start = jax.shard_map(
        ranks.plan.init_comm, mesh=make_mesh(world_size), in_specs=(), out_specs=specs
    )
    comm = jax.jit(start)()
    ranks.plan.check_comm(ranks.plan.init_comm())
    for name, zeros in ranks.zero_comm().items():
        array = getattr(comm, name)
        assert array.dtype == jnp.int32 and array.shape == zeros.shape and not array.any()


# ---- a model of the storage, step by step ----


@functools.cache
def ranks_of(world_size: int) -> Ranks:
    plan = make_plan(world_size, 128, max_decode_tokens=CAPACITY, max_model_len=4096)
    return Ranks(plan, None)


@functools.cache
def step_case(seed: int) -> Decode:
    lengths = [[2400, 300, 0], [2049, 2, 4000], [130, 3000, 2500]][seed]
    return random_decode(lengths, 2, 128, seed=seed)


def storage_after(ranks: Ranks, before: Storage, case: Decode, slot: int, tagged: bool) -> Storage:
    """The storage after a step without faults, from the oracle's rows, bit for bit."""
    after = {name: array.copy() for name, array in before.items()}
    world_size = ranks.plan.geometry.world_size
    sent = [case.rows(ranks.plan, rank) for rank in range(world_size)]
    # Every rank counts its own sends: [3, W, 4, C] behind the global array's axis of W 4.
    published = after["publish_generations"].reshape(3, world_size, 4, CAPACITY)
    expected = after["expected_generations"]
    if tagged:
        generations = published[slot, :, :, :TOKENS]
        tags = [oracle.tag_rows(rows, g) for rows, g in zip(sent, generations, strict=True)]
        sent = [rows for rows, _ in tags]
        published[slot, :, :, :TOKENS] = [bumped for _, bumped in tags]
        expected[slot, :, :TOKENS] = oracle.next_generation(expected[slot, :, :TOKENS])
    heads = 4 // world_size
    received = after["tagged_recv" if tagged else "recv"]
    for owner, rows in enumerate(oracle.exchange(sent)):
        received[slot, :, owner * heads : (owner + 1) * heads, :TOKENS] = rows
    if not tagged:
        received[slot, ..., :TOKENS, 32] = 0  # merged
    return after


def check_step(
    ranks: Ranks, before: Storage, case: Decode, slot: int, tagged: bool, call: int | None = None
) -> Storage:
    """Runs one step on `before`; asserts its ids and the whole storage; returns the storage."""
    running_count = slot if call is None else call
    found = ranks.decode(case, ranks.put_comm(before), running_count, tagged=tagged)
    check_output(ranks.plan, case, found.output)
    after = ranks.get_comm(found.comm)
    for name, want in storage_after(ranks, before, case, slot, tagged).items():
        np.testing.assert_array_equal(after[name], want, err_msg=name)
    return after


@pytest.mark.parametrize("count", [0, 1, 5, 2**31 - 1, 2**31, 3**40, np.int64(2**40), np.uint8(7)])
def test_a_program_takes_a_running_count_of_any_size_from_the_host(count: Any) -> None:
    ranks = Ranks(make_plan(2, 128, max_model_len=1024, max_decode_tokens=5), None)
    program = ranks.plan.decode_program(decode_query_len=2, with_comm=True)
    case = random_decode([700], 2, 128, pages=16, width=8)
    comm = ranks.put_comm(ranks.zero_comm())
    output, _, comm = program(*ranks.decode_arrays(case), comm, count)
    check_output(ranks.plan, case, ranks.get(output, P(None, "icp")))
    used = ranks.get_comm(comm)["recv"].any(axis=(1, 2, 3, 4))
    assert np.flatnonzero(used).tolist() == [int(count) % 3]
    assert program._cache_size() == 1  # whatever kind of int it is
    with pytest.raises(ValueError, match=r"^slot must be an int >= 0, got -1"):
        program(*ranks.decode_arrays(case), comm, -1)


@pytest.mark.parametrize("tagged", [False, True], ids=["legacy", "tagged"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_slots_rows_and_counters(world_size: int, tagged: bool) -> None:
    """Seven calls: every array of the storage, unused rows and the other form included."""
    ranks = ranks_of(world_size)
    storage = ranks.zero_comm()
    for call in range(7):
        storage = check_step(ranks, storage, step_case(call % 3), call % 3, tagged, call)
    counts = storage["expected_generations"][:, 0, 0].tolist()
    assert counts == ([3, 2, 2] if tagged else [0, 0, 0])
    assert not storage["recv"][..., 32].any()
    assert not storage["recv"][..., TOKENS:, :].any()


@pytest.mark.parametrize("world_size", [2, 4])
def test_row_addresses(world_size: int) -> None:
    """Row (t, h) of rank r lies on rank h // hpr at ((slot W + r) hpr + h % hpr) C + t."""
    ranks, case, slot = ranks_of(world_size), step_case(0), 1
    found = ranks.decode(case, ranks.put_comm(ranks.zero_comm()), slot, tagged=False)
    heads = 4 // world_size
    for owner in range(world_size):
        flat = np.asarray(found.comm.recv)[owner].reshape(-1, 33)
        for source in range(world_size):
            rows = case.rows(ranks.plan, source)
            for head in range(owner * heads, (owner + 1) * heads):
                start = ((slot * world_size + source) * heads + head % heads) * CAPACITY
                arrived = flat[start : start + TOKENS, :32]
                np.testing.assert_array_equal(arrived, rows[head, :, :32])


@pytest.mark.parametrize(
    ("start", "following"),
    [
        (2**31 - 2, [2**31 - 1, -(2**31), -(2**31) + 1]),
        (2**31 - 1, [-(2**31), -(2**31) + 1, -(2**31) + 2]),
        (-2, [-1, 1, 2]),
        (-1, [1, 2, 3]),
        (0, [1, 2, 3]),
    ],
)
def test_generations_wrap_and_skip_zero(start: int, following: list[int]) -> None:
    ranks = ranks_of(4)
    storage = ranks.zero_comm()
    storage["publish_generations"][:] = start
    storage["expected_generations"][:] = start
    for step, generation in enumerate(following):
        storage = check_step(ranks, storage, step_case(step), 2, tagged=True)
        assert (storage["publish_generations"][2, :, :TOKENS] == generation).all()
        assert (storage["expected_generations"][2, :, :TOKENS] == generation).all()
        assert (storage["tagged_recv"][2, :, :, :TOKENS, :, 1] == generation).all()
        assert (storage["publish_generations"][:, :, TOKENS:] == start).all()
        assert (storage["publish_generations"][:2] == start).all()


# ---- faults ----


def check_fault(
    ranks: Ranks, storage: Storage, case: Decode, tagged: bool, errors: Array, lost: Array
) -> Storage:
    """Asserts a faulty step: `errors` [W] as counted, the answers `lost` [T, 4] all -1."""
    found = ranks.decode(case, ranks.put_comm(storage), 1, tagged=tagged)
    want = np.where(lost[..., None], -1, case.answer(ranks.plan))
    np.testing.assert_array_equal(found.output[:TOKENS], want)
    after = ranks.get_comm(found.comm)
    np.testing.assert_array_equal(after["errors"], errors)
    return after


@pytest.mark.parametrize("world_size", [2, 4])
def test_publish_onto_unmerged_rows(world_size: int) -> None:
    """Flags that are not 0 before a publish: neither the old nor the new row is trusted."""
    ranks, case = ranks_of(world_size), step_case(1)
    storage = check_step(ranks, ranks.zero_comm(), step_case(0), 1, tagged=False)
    flags = storage["recv"][1, ..., 32]  # [W sources, 4 heads, C]
    flags[0, 3, 2] = 1  # one source of token 2, head 3
    flags[:, 0, 4] = 1  # every source of token 4, head 0
    flags[1, 0, 5] = -1
    flags[0, 1, TOKENS] = 1  # a row that this step doesn't write
    lost = np.zeros((TOKENS, 4), bool)
    lost[[2, 4, 5], [3, 0, 0]] = True
    errors = np.zeros(world_size, np.int32)
    errors[0] = world_size + 1
    errors[-1] += 1
    after = check_fault(ranks, storage, case, False, errors, lost)
    assert not after["recv"][1, ..., :TOKENS, 32].any()
    assert after["recv"][1, 0, 1, TOKENS, 32] == 1
    again = check_step(ranks, after, step_case(2), 1, tagged=False)
    np.testing.assert_array_equal(again["errors"], errors)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("start", [0, -1, 2**31 - 1])
def test_wrong_generation_from_one_rank(start: int, world_size: int) -> None:
    ranks, case = ranks_of(world_size), step_case(0)
    storage = ranks.zero_comm()
    storage["publish_generations"][:] = start
    storage["expected_generations"][:] = start
    ahead = {name: array.copy() for name, array in storage.items()}
    source = world_size - 1
    # The counters of rank `source` run ahead for token 3 of head 1 and all tokens of head 2.
    mine = ahead["publish_generations"].reshape(3, world_size, 4, CAPACITY)[1, source]
    mine[1, 3] = oracle.next_generation(start)
    mine[2] = oracle.next_generation(start)
    lost = np.zeros((TOKENS, 4), bool)
    lost[3, 1] = lost[:, 2] = True
    errors = np.zeros(world_size, np.int32)
    heads = 4 // world_size
    errors[1 // heads] += 1
    errors[2 // heads] += TOKENS
    after = check_fault(ranks, ahead, case, True, errors, lost)
    # Counters advance as usual, so the rank stays ahead and is found out again...
    twice = check_fault(ranks, after, step_case(1), True, 2 * errors, lost)
    # ... until it counts right.
    bumped = oracle.next_generation(oracle.next_generation(start))
    assert (twice["expected_generations"][1, :, :TOKENS] == bumped).all()
    twice["publish_generations"][1, :, :TOKENS] = bumped
    right = check_step(ranks, twice, step_case(2), 1, tagged=True)
    np.testing.assert_array_equal(right["errors"], 2 * errors)


def received_rows(case: Decode, world_size: int) -> Array:
    """What rank 0 receives, int32 [W, hpr, C, 33]; rows past T are zero."""
    plan = ranks_of(world_size).plan
    rows = oracle.exchange([case.rows(plan, rank) for rank in range(world_size)])[0]
    received = np.zeros((*rows.shape[:2], CAPACITY, 33), np.int32)
    received[:, :, :TOKENS] = rows
    return received


@functools.partial(jax.jit, static_argnames="tagged")
def merge(received: Array, counts: Array, output: Array, expected: Array, *, tagged: bool) -> Any:
    return msa_icp_merge_candidates(
        received,
        counts,
        output,
        jnp.full(1, 40, jnp.int32),
        init_blocks=1,
        local_blocks=2,
        expected_generations=expected if tagged else None,
        backend="xla",
    )


@pytest.mark.parametrize("flag", [0, 2, -1, 1 << 8, -(2**31)])
def test_merge_of_a_row_without_its_flag(flag: int) -> None:
    case, received = step_case(0), received_rows(step_case(0), 2)
    received[1, 0, 2, 32] = flag
    received[0, 1, 3, 32] = flag
    received[1, 1, 3, 32] = flag
    want = oracle.merge_legacy(received, case.counts, 1, 2)
    assert want.errors == 3
    output = np.full((CAPACITY, 2, 16), -77, np.int32)
    found = merge(received, case.counts, output, np.zeros((2, CAPACITY), np.int32), tagged=False)
    np.testing.assert_array_equal(found.output[:TOKENS], want.output)
    np.testing.assert_array_equal(found.output[TOKENS:], output[TOKENS:])
    np.testing.assert_array_equal(found.recv_slot, want.received)
    assert found.errors.tolist() == [43]
    assert (np.asarray(found.output)[2, 0] == -1).all()
    assert (np.asarray(found.output)[3, 1] == -1).all()


@pytest.mark.parametrize("word", [0, 15, 16, 31])
@pytest.mark.parametrize("start", [0, -1, 2**31 - 1])
def test_merge_of_a_row_with_one_torn_word(start: int, word: int) -> None:
    case, rows = step_case(0), received_rows(step_case(0), 2)
    expected = np.full((2, CAPACITY), start, np.int32)
    received, _ = oracle.tag_rows(rows, np.broadcast_to(expected, rows.shape[:-1]))
    received[0, 1, 2, word, 1] = start  # still the generation before
    want = oracle.merge_tagged(received, expected, case.counts, 1, 2)
    assert want.errors == 1
    output = np.full((CAPACITY, 2, 16), -77, np.int32)
    found = merge(received, case.counts, output, expected, tagged=True)
    np.testing.assert_array_equal(found.output[:TOKENS], want.output)
    np.testing.assert_array_equal(found.recv_slot, received)
    np.testing.assert_array_equal(found.expected_generations, want.expected)
    assert found.errors.tolist() == [41]


# ---- refused storage ----

NAMES = [field.name for field in dataclasses.fields(MSAIcpComm)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world_size", [2, 4])
def test_check_comm_names_the_wrong_array(world_size: int, name: str) -> None:
    good = MSAIcpComm.zeros(world_size, CAPACITY)
    check_comm(good, world_size, CAPACITY)
    array = getattr(good, name)
    ranks_of(world_size).plan.check_comm(good)
    for bad, error in (
        (jnp.zeros((*array.shape, 1), jnp.int32), ValueError),
        (jnp.zeros((array.shape[0] + 1, *array.shape[1:]), jnp.int32), ValueError),
        (array.astype(jnp.float32), TypeError),
        (array.astype(jnp.uint32), TypeError),
        (None, TypeError),
    ):
        broken = dataclasses.replace(good, **{name: bad})
        with pytest.raises(error, match=rf"comm\.{name} must be"):
            ranks_of(world_size).plan.check_comm(broken)


def test_check_comm_refuses_other_sizes_and_types() -> None:
    with pytest.raises(ValueError, match=r"comm\.recv must be"):
        check_comm(MSAIcpComm.zeros(2, CAPACITY), 2, CAPACITY + 1)
    with pytest.raises(ValueError, match=r"comm\.recv must be"):
        check_comm(MSAIcpComm.zeros(2, CAPACITY), 4, CAPACITY)
    with pytest.raises(TypeError, match="comm must be an MSAIcpComm, got dict"):
        check_comm({}, 2, CAPACITY)


def test_decode_checks_its_comm_before_anything_runs() -> None:
    ranks, case = ranks_of(2), step_case(0)
    storage = ranks.zero_comm()
    storage["expected_generations"] = storage["expected_generations"][:, :, 1:]
    with pytest.raises(ValueError, match=r"comm\.expected_generations must be"):
        ranks.decode(case, ranks.put_comm(storage))


def test_tagged_rows_need_two_layers() -> None:
    lone = Ranks(make_plan(2, 128, num_sparse_layers=1), None)
    with pytest.raises(ValueError, match="num_sparse_layers >= 2"):
        lone.decode(step_case(0), tagged=True)


# ---- the worked example ----


def test_worked_example() -> None:
    """Two ranks, two places for five blocks, the last one local; moved behind 14 forced blocks.

    Rank 0 scores 4 9 1 7 .5, rank 1 scores 8 2 6 7 -inf: blocks [1, 4] win.
    """
    forced, inf = 14, np.inf
    scores = np.zeros((2, 1, 4, forced + 5), np.float32)
    scores[0, ..., forced:] = [4, 9, 1, 7, 0.5]
    scores[1, ..., forced:] = [8, 2, 6, 7, -inf]
    counts = jnp.full(1, forced + 5, jnp.int32)
    sent = [
        msa_icp_topk_select_publish(
            jnp.asarray(plane),
            counts,
            rank=rank,
            world_size=2,
            heads_per_rank=2,
            force_begin_blocks=forced,
            force_end_blocks=1,
            backend="xla",
        ).rows
        for rank, plane in enumerate(scores)
    ]
    for rows, words, ids in zip(sent, ([9, 0.5], [8, -inf]), ([15, 18], [14, 18]), strict=True):
        assert rows.shape == (2, 2, 1, 33)
        row = np.asarray(rows)[0, 0, 0]
        assert row[:16].view(np.float32).tolist() == [0.0] * forced + words
        assert row[16:].tolist() == [*range(forced), *ids, 1]
    for owner in range(2):
        merged = msa_icp_merge_candidates(
            jnp.stack([rows[owner] for rows in sent]),
            counts,
            jnp.zeros((1, 2, 16), jnp.int32),
            jnp.zeros(1, jnp.int32),
            init_blocks=forced,
            local_blocks=1,
            backend="xla",
        )
        assert merged.output.tolist() == [[[*range(forced), 15, 18]] * 2]
        assert merged.errors.tolist() == [0]


def test_storage_and_window_plans_are_equal_to_themselves_alone() -> None:
    """Arrays have no one answer to ==; asking never raises."""
    lens = np.array([3], np.int32)
    window = functools.partial(msa_icp_index_score_sharded_plan, lens, lens, 4, qo_offset=[0])
    for make in (functools.partial(MSAIcpComm.zeros, 2, 3), window):
        one, other = make(), make()
        assert one == dataclasses.replace(one) and one != other and one != "another kind"
