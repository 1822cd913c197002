"""The one-sided transport of a JAX plan on one GPU: all its ranks, or one that hears itself."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import chains
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import peer_comm
import pytest
from chains import GROUPS, Ranks, random_decode
from test_compilations import compile_log

from msa_icp_jax import MSAIcpComm, one_sided

LENGTHS = [300, 0, 4000, 1]
FORMS = pytest.mark.parametrize("tagged", [False, True], ids=["legacy", "tagged"])


def ranks_of(world_size: int, page_size: int, **changes: Any) -> Ranks:
    changes = {"transport": "one-sided", "backend": "auto"} | changes
    return Ranks(chains.make_plan(world_size, page_size, **changes), None)


def ends_clean(comm: MSAIcpComm) -> None:
    assert not np.asarray(comm.errors).any()


@FORMS
@pytest.mark.parametrize(("world_size", "page_size"), GROUPS)
def test_decode(world_size, page_size, tagged):
    ranks = ranks_of(world_size, page_size)
    with peer_comm.all_ranks(ranks.plan) as comm:
        for slot in (0, 1, 2, 3, 4, 5, 2**31 - 2, 2**31 - 1):
            query_len = 1 + slot % 2
            case = random_decode(LENGTHS, query_len, page_size, seed=slot % 8)
            found = ranks.decode(case, comm, slot, tagged=tagged)
            chains.check_decoded(ranks.plan, case, found, fused=False)
            comm = found.comm
        ends_clean(comm)


@FORMS
def test_a_step_longer_than_one_wave_of_ctas(tagged):
    limits = {"max_decode_tokens": 600, "max_num_seqs": 600}
    ranks = ranks_of(4, 128, **limits)
    lengths = np.random.default_rng(0).integers(0, 700, 600).tolist()
    case = random_decode(lengths, 1, 128, pages=4000, width=6)
    with peer_comm.all_ranks(ranks.plan) as comm:
        for slot in range(4):
            found = ranks.decode(case, comm, slot, tagged=tagged)
            chains.check_output(ranks.plan, case, found.output)
            comm = found.comm
        ends_clean(comm)


def test_generations_wrap_around_and_skip_zero():
    ranks = ranks_of(2, 128)
    start = np.array([2**31 - 2, -3, -1], np.int32)[:, None, None]
    with peer_comm.all_ranks(ranks.plan) as comm:
        counters = {
            name: jnp.asarray(np.broadcast_to(start, getattr(comm, name).shape).copy())
            for name in ("publish_generations", "expected_generations")
        }
        comm = dataclasses.replace(comm, **counters)
        for slot in range(9):
            case = random_decode(LENGTHS, 1, 128, seed=slot)
            found = ranks.decode(case, comm, slot, tagged=True)
            chains.check_output(ranks.plan, case, found.output)
            comm = found.comm
        ends_clean(comm)
        for name in counters:
            assert (
                np.asarray(getattr(comm, name))[:, :, 0, 0].tolist() == [[-(2**31) + 1, 1, 3]] * 2
            )


@FORMS
def test_rows_that_never_come_cost_bounded_waits_and_minus_one(monkeypatch, tagged):
    """Rank 1 stores elsewhere: rank 0 gives up its rows, and nothing of rank 1's own is wrong."""
    monkeypatch.setattr(one_sided, "SPIN_LIMIT", 200)
    ranks = ranks_of(2, 128, max_decode_tokens=31)  # a plan that no other test has compiled
    name = "tagged_recv_bases" if tagged else "recv_bases"
    case, tokens = random_decode(LENGTHS, 1, 128), len(LENGTHS)
    want = case.answer(ranks.plan).copy()
    with peer_comm.all_ranks(ranks.plan) as comm, peer_comm.all_ranks(ranks.plan) as elsewhere:
        bases, others = (np.asarray(getattr(x, name)).copy() for x in (comm, elsewhere))
        bases[1, 0] = others[1, 0]
        broken = dataclasses.replace(comm, **{name: jnp.asarray(bases)})
        for slot in range(4):
            found = ranks.decode(case, broken, slot, tagged=tagged)
            broken, ids = found.comm, found.output[:tokens]
            assert (ids[:, :2] == -1).all()
            np.testing.assert_array_equal(ids[:, 2:], want[:, 2:])
            lost = tokens * 2 * (slot + 1)
            stuck = 2 * tokens if not tagged and slot == 3 else 0  # flags that nobody took down
            assert np.asarray(broken.errors)[:, 0].tolist() == [lost, stuck]


@FORMS
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rank_that_hears_itself(world_size, tagged):
    """The benchmark's mapping: a fixed rank, outside any mesh."""
    plan = chains.make_plan(world_size, 128, transport="one-sided", backend="auto", rank=1)
    case = random_decode([300, 900, 4000], 1, 128)
    ranks = Ranks(chains.make_plan(world_size, 128), None)
    query, keys, table, lengths, counts, scores, output = ranks.decode_arrays(case)
    sent = oracle.rows_by_owner(case.rows(ranks.plan, 1), world_size)
    want = oracle.merge(sent, case.counts, 1, 2)
    program = jax.jit(peer_comm.layers(plan, 6, case, tagged=tagged), donate_argnums=(2, 3, 4))
    with peer_comm.loopback(plan) as comm:
        state = (scores[1], output[1], comm)
        for _ in range(3):
            output, scores, comm = program((query, keys[1], table, lengths), counts, *state)
            np.testing.assert_array_equal(np.asarray(output)[: len(case.query)], want)
            state = (scores, output, comm)
        ends_clean(comm)


@FORMS
@pytest.mark.parametrize("graphs", ["", "CUSTOM_CALL,FUSION"], ids=["launched", "captured"])
def test_layers_are_three_kernels_each_and_nothing_else(tagged, graphs):
    """No copy of a buffer and no operation between kernels, in order; and the ids are right."""
    count = 7
    plan = chains.make_plan(2, 128, transport="one-sided", backend="auto", rank=0)
    case = random_decode(LENGTHS, 1, 128)
    ranks = Ranks(chains.make_plan(2, 128), None)
    query, keys, table, lengths, counts, scores, output = ranks.decode_arrays(case)
    options = {"xla_gpu_enable_command_buffer": graphs, "xla_gpu_graph_min_graph_size": 1}
    program = jax.jit(
        peer_comm.layers(plan, count, case, tagged=tagged),
        donate_argnums=(2, 3, 4),
        compiler_options=options,
    )
    inputs = (query, keys[0], table, lengths)
    sent = oracle.rows_by_owner(case.rows(ranks.plan, 0), 2)
    want = oracle.merge(sent, case.counts, 1, 2)
    with peer_comm.loopback(plan) as comm:
        state = (scores[0], output[0], comm)
        compiled = program.lower(inputs, counts, *state).compile()
        text = compiled.as_text()
        form = "_tagged_rows" if tagged else "_rows"
        scorer, sender, merge = peer_comm.KERNELS
        schedule = peer_comm.schedule_of(text)
        first = schedule.index(scorer)
        assert schedule[first : first + 3 * count] == [scorer, sender + form, merge] * count
        # The program hands addresses and empty arrays through, which XLA may copy at its ends.
        others = schedule[:first] + schedule[first + 3 * count :]
        assert all(re.match(r"\S+ = s32\[(2,2|0,[\d,]+)\]\S* copy\(", x) for x in others), others
        assert compiled.memory_analysis().temp_size_in_bytes < 4096
        for _ in range(4):  # a graph is recorded at the second call
            output, scores, comm = compiled(inputs, counts, *state)
            np.testing.assert_array_equal(np.asarray(output)[: len(case.query)], want)
            state = (scores, output, comm)
        ends_clean(comm)


def test_storage_made_anew_and_of_two_plans_is_not_traced_again():
    first, second = ranks_of(2, 128), ranks_of(2, 256)
    program = first.plan.decode_program(None, decode_query_len=1, tagged=True, with_comm=True)
    case = random_decode(LENGTHS, 1, 128)
    other = random_decode(LENGTHS, 1, 256)
    sizes = []
    for _ in range(3):
        with peer_comm.all_ranks(first.plan) as comm, peer_comm.all_ranks(second.plan) as theirs:
            for slot in range(4):
                found = first.decode(case, comm, slot, tagged=True)
                beside = second.decode(other, theirs, slot, tagged=False)
                chains.check_output(first.plan, case, found.output)
                chains.check_output(second.plan, other, beside.output)
                comm, theirs = found.comm, beside.comm
            ends_clean(comm)
            ends_clean(theirs)
        sizes.append(program._cache_size())
    assert len(set(sizes)) == 1


def test_nothing_compiles_after_warmup():
    ranks = ranks_of(2, 128, max_decode_tokens=4, max_num_seqs=4, max_num_batched_tokens=128)
    shapes = {"num_pages": 64, "table_width": 36, "query_lens": [1]}
    ranks.plan.warmup(**shapes, with_comm=True, tagged=True)
    arrays = ranks.decode_arrays(random_decode(LENGTHS, 1, 128), spare=0)
    program = ranks.plan.decode_program(None, decode_query_len=1, with_comm=True, tagged=True)
    with peer_comm.all_ranks(ranks.plan) as comm:
        jax.block_until_ready((arrays, comm))
        with compile_log() as log:
            *_, comm = program(*arrays, comm, 0)
            ends_clean(comm)
    assert log.compiled == []
