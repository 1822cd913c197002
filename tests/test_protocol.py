"""Ranks that break the exchange's protocol, over the collective transport.

Whatever a rank does, a (token, head) answers right or -1 sixteen times, `errors` counts every row
that could not be trusted, and after the documented recovery (docs/reliability.md) steps are right
again. Each rank is run on its own here, so that the transport between them can lose, repeat, delay
and mix up rows.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import chains
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import oracle
import pytest
from chains import Decode, Ranks, make_mesh, make_plan, random_decode

from msa_icp_jax import MSAIcpComm, msa_icp_merge_candidates, msa_icp_topk_select_publish
from msa_icp_jax.comm import exchange, mark_rows, store_legacy, store_tagged

Array = npt.NDArray[Any]

ROOT = Path(__file__).parents[1]
WORLD, HEADS, TOKENS = 2, 2, 6
FAULTY = 1  # the rank that misbehaves
FORMS = pytest.mark.parametrize("tagged", [False, True], ids=["legacy", "tagged"])


@functools.cache
def ranks() -> Ranks:
    return Ranks(make_plan(WORLD, 128, max_decode_tokens=TOKENS, max_model_len=4096), None)


@functools.cache
def step_case(call: int) -> Decode:
    """Another batch for each call, all of 17 blocks and more: no two answers are alike."""
    lengths = [[2400, 2300, 3000], [2049, 2200, 4000], [2700, 3900, 2500]][call % 3]
    return random_decode(lengths, 2, 128, pages=128, seed=call)


class Group:
    """All ranks' storage, and a transport that carries what it is given."""

    def __init__(self, tagged: bool) -> None:
        self.tagged = tagged
        self.plan = ranks().plan
        self.fresh_storage()

    def fresh_storage(self) -> None:
        """The recovery: every rank takes new storage, and all count calls from 0 again."""
        self.comms = [self.plan.init_comm() for _ in range(WORLD)]
        self.calls = 0

    def publish(self, rank: int, case: Decode, slot: int) -> Array:
        """One rank's rows by owner [W, hpr, T, ...]; its counters advance."""
        scores = case.plane(self.plan, rank).over(
            np.full((TOKENS, 4, self.plan.geometry.score_columns), -np.inf, np.float32)
        )
        generations = self.comms[rank].publish_generations if self.tagged else None
        rows, generations = _publish(scores, case.counts, generations, slot)
        if self.tagged:
            self._replace(rank, publish_generations=generations)
        return np.array(rows)

    def deliver(self, owner: int, source: int, rows: Array, slot: int) -> None:
        """Stores what one source sent to one owner, as the owner's store does for all of them."""
        name = "tagged_recv" if self.tagged else "recv"
        recv = np.array(getattr(self.comms[owner], name))
        mine = slice(source, source + 1)
        recv[:, mine] = _store(recv[:, mine], rows[owner][None], slot, self.tagged)
        self._replace(owner, **{name: jnp.asarray(recv)})

    def merge(self, owner: int, case: Decode, slot: int) -> Array:
        """The owner's ids [T, hpr, 16]; flags, counters and errors advance."""
        comm = self.comms[owner]
        recv = comm.tagged_recv if self.tagged else comm.recv
        expected = comm.expected_generations[slot] if self.tagged else None
        merged = _merge(recv[slot], case.counts, comm.errors, expected)
        updates = {"errors": merged.errors}
        name = "tagged_recv" if self.tagged else "recv"
        updates[name] = recv.at[slot].set(merged.recv_slot)
        if self.tagged:
            counters = comm.expected_generations.at[slot].set(merged.expected_generations)
            updates["expected_generations"] = counters
        self._replace(owner, **updates)
        return np.asarray(merged.output)

    def step(self, *, silent: int | None = None) -> Array:
        """One call of every rank (but a silent one); all owners' ids [T, 4, 16]."""
        case, slot = step_case(self.calls), self.calls % 3
        for source in set(range(WORLD)) - {silent}:
            rows = self.publish(source, case, slot)
            for owner in range(WORLD):
                self.deliver(owner, source, rows, slot)
        return self.finish()

    def finish(self) -> Array:
        """All owners' merges of the present call."""
        case, slot = step_case(self.calls), self.calls % 3
        self.calls += 1
        return np.concatenate([self.merge(r, case, slot) for r in range(WORLD)], axis=1)

    def errors(self) -> list[int]:
        return [int(comm.errors[0]) for comm in self.comms]

    def right(self, call: int) -> Array:
        return step_case(call).answer(self.plan)

    def check_right(self) -> None:
        """Three more calls, one in each slot, all right and without a new error."""
        before = self.errors()
        for _ in range(3):
            np.testing.assert_array_equal(self.step(), self.right(self.calls - 1))
        assert self.errors() == before

    def _replace(self, rank: int, **arrays: Any) -> None:
        fields = {name: getattr(self.comms[rank], name) for name in _FIELDS} | arrays
        self.comms[rank] = MSAIcpComm(**fields)


_FIELDS = tuple(MSAIcpComm.__dataclass_fields__)


@jax.jit
def _publish(scores: Array, counts: Array, generations: Any, slot: Any) -> Any:
    return msa_icp_topk_select_publish(
        scores,
        counts,
        rank=0,
        world_size=WORLD,
        heads_per_rank=HEADS,
        force_begin_blocks=1,
        force_end_blocks=2,
        generations=generations,
        slot=slot,
        backend="xla",
    )


@functools.partial(jax.jit, static_argnames="tagged")
def _store(recv: Any, rows: Any, slot: Any, tagged: bool) -> Any:
    return (store_tagged if tagged else store_legacy)(recv, slot, rows)


@jax.jit
def _merge(recv: Any, counts: Array, errors: Any, expected: Any) -> Any:
    output = jnp.full((TOKENS, HEADS, 16), chains.OLD_WORD, jnp.int32)
    return msa_icp_merge_candidates(
        recv,
        counts,
        output,
        errors,
        init_blocks=1,
        local_blocks=2,
        expected_generations=expected,
        backend="xla",
    )


def never_wrong(output: Array, right: Array) -> Array:
    """Asserts that every (token, head) is right or withheld; returns which are withheld."""
    withheld = (output == -1).all(-1)
    assert (withheld | (output == right).all(-1)).all()
    return withheld


@FORMS
def test_without_a_fault(tagged: bool) -> None:
    group = Group(tagged)
    for _ in range(2):
        group.check_right()
    assert group.errors() == [0, 0]


@FORMS
def test_a_rank_that_skips_a_call(tagged: bool) -> None:
    group = Group(tagged)
    group.check_right()
    assert never_wrong(group.step(silent=FAULTY), group.right(3)).all()
    assert group.errors() == [HEADS * TOKENS] * WORLD
    if tagged:  # its counter of this slot stays one behind, and every use of the slot says so
        for call in range(4, 10):
            withheld = never_wrong(group.step(), group.right(call))
            assert withheld.all() == withheld.any() == (call % 3 == 0)
        assert group.errors() == [3 * HEADS * TOKENS] * WORLD
        group.fresh_storage()
    group.check_right()


@FORMS
def test_a_rank_that_calls_twice(tagged: bool) -> None:
    """Its second rows overwrite the first before anybody has merged them."""
    group = Group(tagged)
    group.check_right()
    case, slot = step_case(3), 0
    for source in (0, FAULTY, FAULTY):
        rows = group.publish(source, case, slot)
        for owner in range(WORLD):
            group.deliver(owner, source, rows, slot)
    assert never_wrong(group.finish(), group.right(3)).all()
    assert group.errors() == [HEADS * TOKENS] * WORLD
    if tagged:
        group.fresh_storage()
    group.check_right()


@FORMS
def test_rows_that_come_after_the_merge_gave_up(tagged: bool) -> None:
    """Late rows are nobody's answer: not this call's, which is over, nor the slot's next one."""
    group = Group(tagged)
    group.check_right()
    case, slot = step_case(3), 0
    late = group.publish(FAULTY, case, slot)
    rows = group.publish(0, case, slot)
    for owner in range(WORLD):
        group.deliver(owner, 0, rows, slot)
    assert never_wrong(group.finish(), group.right(3)).all()
    for owner in range(WORLD):
        group.deliver(owner, FAULTY, late, slot)
    for call in range(4, 7):
        withheld = never_wrong(group.step(), group.right(call))
        # A legacy row lies unmerged where the next one should go; a tagged one is just old.
        assert withheld.any() == (call == 6 and not tagged)
    group.check_right()


@FORMS
def test_rows_that_arrive_in_part(tagged: bool) -> None:
    """Three tokens' rows are still those of the slot's last use, and so are words of the others."""
    group = Group(tagged)
    group.check_right()
    case, slot = step_case(3), 0
    name = "tagged_recv" if tagged else "recv"
    rows = [group.publish(source, case, slot) for source in range(WORLD)]
    for owner in range(WORLD):
        stale = np.asarray(getattr(group.comms[owner], name))[slot, FAULTY]
        rows[FAULTY][owner, :, :3] = stale[:, :3]
        if tagged:  # whole rows are all that a flag can tell
            rows[FAULTY][owner, :, 3, 9:11] = stale[:, 3, 9:11]
        for source in range(WORLD):
            group.deliver(owner, source, rows[source], slot)
    withheld = never_wrong(group.finish(), group.right(3))
    lost = 4 if tagged else 3
    assert withheld[:lost].all() and not withheld[lost:].any()
    assert group.errors() == [HEADS * lost] * WORLD
    group.check_right()


@pytest.mark.parametrize("flag", [0, 2, -1, 1 << 8, -(2**31), 2**31 - 1])
def test_a_wrong_flag(flag: int) -> None:
    group = Group(tagged=False)
    case = step_case(0)
    for source in range(WORLD):
        rows = group.publish(source, case, 0)
        if source == FAULTY:
            rows[0, 1, 4, 32] = flag
        for owner in range(WORLD):
            group.deliver(owner, source, rows, 0)
    withheld = never_wrong(group.finish(), group.right(0))
    assert withheld[4, 1] and withheld.sum() == 1
    assert group.errors() == [1, 0]
    group.check_right()


@pytest.mark.parametrize("generation", [0, 2, -1, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("word", [0, 13, 31])
def test_a_wrong_generation_of_one_word(word: int, generation: int) -> None:
    group = Group(tagged=True)
    case = step_case(0)
    for source in range(WORLD):
        rows = group.publish(source, case, 0)
        if source == FAULTY:
            rows[1, 0, 2, word, 1] = generation
        for owner in range(WORLD):
            group.deliver(owner, source, rows, 0)
    withheld = never_wrong(group.finish(), group.right(0))
    assert withheld[2, HEADS] and withheld.sum() == 1
    assert group.errors() == [0, 1]
    group.check_right()


# ---- a rank that is a call ahead or behind, in one collective ----


@FORMS
@pytest.mark.parametrize("start", [0, 7, -1, 2**31 - 1])
@pytest.mark.parametrize("slots", [(0, 1), (1, 2), (2, 0), (1, 0)])
def test_a_rank_in_another_slot(slots: tuple[int, int], start: int, tagged: bool) -> None:
    """all_to_all pairs whatever call each rank is at; what they exchange has to say so."""
    plan = ranks().plan
    rows = np.stack([step_case(slot).rows(plan, rank) for rank, slot in enumerate(slots)])
    if tagged:
        generations = np.full(rows.shape[:-1], start, np.int32)
        rows, _ = oracle.tag_rows(rows, generations)
    message = rows.reshape(WORLD, WORLD, HEADS, *rows.shape[2:])
    received = np.asarray(_exchange_in_slots(message, np.array(slots, np.int32)))
    for owner in range(WORLD):
        own, other = received[owner, owner], received[owner, 1 - owner]
        np.testing.assert_array_equal(own, message[owner, owner])
        np.testing.assert_array_equal(other[..., 0], message[1 - owner, owner][..., 0])
        if tagged:
            near = np.arange(-1000, 1000) + int(oracle.next_generation(start))
            assert not np.isin(other[..., 1], near.astype(np.int64)).any()
        else:
            assert (other[..., 32] != 1).all()


@jax.jit
def _exchange_in_slots(message: Array, slots: Array) -> Any:
    def one_rank(message: Any, slot: Any) -> Any:
        sent = mark_rows(message, slot, 1)
        return mark_rows(exchange(sent, "icp"), slot, -1)

    return jax.vmap(one_rank, axis_name="icp")(message, slots)


@FORMS
def test_a_whole_step_in_two_slots_answers_nothing(tagged: bool) -> None:
    group, case = ranks(), step_case(0)
    comm = group.put_comm(group.zero_comm())
    arrays = group.decode_arrays(case, spare=0)

    def one_rank(slot: Any, comm: Any, *local: Any) -> Any:
        return group.plan.decode(*local, comm=comm, slot=slot, tagged=tagged, decode_query_len=2)

    axes = (0, 0, None, 0, None, None, None, 0, 0)
    step = jax.jit(jax.vmap(one_rank, in_axes=axes, axis_name="icp", axis_size=WORLD))
    output, _, after = step(np.array([1, 2], np.int32), comm, *arrays)
    assert (np.asarray(output) == -1).all()
    assert np.asarray(after.errors).ravel().tolist() == [HEADS * TOKENS] * WORLD
    same, _, after = step(np.array([0, 0], np.int32), after, *group.decode_arrays(case, spare=0))
    np.testing.assert_array_equal(group.get(same, chains.OUTPUT), case.answer(group.plan))
    assert np.asarray(after.errors).ravel().tolist() == [HEADS * TOKENS] * WORLD


@pytest.mark.parametrize("on_mesh", [False, True], ids=["vmap", "mesh"])
def test_the_documented_recovery_runs_as_it_is_printed(on_mesh: bool) -> None:
    text = (ROOT / "docs/reliability.md").read_text()
    storage, step = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    group = Ranks(ranks().plan, make_mesh(WORLD) if on_mesh else None)
    case = step_case(0)
    *inputs, scores, output = group.decode_arrays(case)
    names: dict[str, Any] = {"jax": jax, "jnp": jnp, "np": np, "inputs": inputs}
    names |= {"plan": group.plan, "mesh": group.mesh, "scores": scores, "output": output}
    names["program"] = group.plan.decode_program(group.mesh, decode_query_len=2, with_comm=True)

    def run() -> Array:
        exec(step, names)  # the lines of the documentation
        return group.get(names["output"], chains.OUTPUT)[: len(case.query)]

    exec(storage, names)
    for calls in (1, 2, 0, 1):
        np.testing.assert_array_equal(run(), case.answer(group.plan))
        assert names["calls"] == calls
    stale = {name: array.copy() for name, array in group.get_comm(names["comm"]).items()}
    stale["recv"][..., -1] = 1  # no row of any slot was merged: every next one is a fault
    names["comm"] = group.put_comm(stale)
    np.testing.assert_array_equal(run(), case.answer(group.plan))
    assert names["calls"] == 1
    assert not group.get_comm(names["comm"])["errors"].any()
