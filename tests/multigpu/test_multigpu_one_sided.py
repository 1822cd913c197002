"""The one-sided transport of a JAX plan on two GPUs: one process with both, or a process a GPU."""

from __future__ import annotations

from pathlib import Path

import chains
import jax
import numpy as np
import pytest
from chains import AXIS, GROUPS, Ranks, random_decode
from jax.sharding import AxisType, Mesh
from test_multigpu_jax import check_all, python, ranks_of
from test_multiprocess import free_port

WORKER = Path(__file__).with_name("one_sided_steps.py")
LENGTHS = [300, 0, 4000, 1]
GRAPHS = {"launched": "", "captured": "CUSTOM_CALL,FUSION"}
FORMS = pytest.mark.parametrize("form", ["legacy", "tagged"])
STEPS = 10_000


@FORMS
@pytest.mark.parametrize(("world_size", "page_size"), GROUPS)
def test_decode(world_size: int, page_size: int, form: str) -> None:
    collective = ranks_of(world_size, page_size)
    plan = chains.make_plan(world_size, page_size, backend="auto", transport="one-sided")
    ranks = Ranks(plan, collective.mesh)
    comm = plan.init_comm(ranks.mesh)
    for slot in range(7):
        case = random_decode(LENGTHS, 1 + slot % 2, page_size, seed=slot)
        found = ranks.decode(case, comm, slot, tagged=form == "tagged")
        chains.check_decoded(plan, case, found, fused=False)
        comm = found.comm
    assert not np.asarray(comm.errors).any()
    plan.free_comm(comm)


def test_storage_made_anew_is_not_traced_again() -> None:
    mesh, sizes = ranks_of(2, 128).mesh, []
    plan = chains.make_plan(2, 128, backend="auto", transport="one-sided")
    ranks, case = Ranks(plan, mesh), random_decode(LENGTHS, 1, 128)
    program = plan.decode_program(mesh, decode_query_len=1, tagged=True, with_comm=True)
    for _ in range(3):
        comm = plan.init_comm(mesh)
        for slot in range(3):
            found = ranks.decode(case, comm, slot, tagged=True)
            chains.check_output(plan, case, found.output)
            comm = found.comm
        plan.free_comm(comm)
        sizes.append(program._cache_size())
    assert len(set(sizes)) == 1


def test_auto_is_one_sided_between_gpus_that_reach_each_other() -> None:
    plan = chains.make_plan(2, 128, backend="auto", transport="auto")
    assert plan.transport == "one-sided"
    ranks, case = Ranks(plan, ranks_of(2, 128).mesh), random_decode(LENGTHS, 1, 128)
    comm = plan.init_comm(ranks.mesh)
    assert comm.is_one_sided
    chains.check_output(plan, case, ranks.decode(case).output)  # without a comm: the collective
    found = ranks.decode(case, comm, 0)
    chains.check_output(plan, case, found.output)
    plan.free_comm(found.comm)


def test_a_group_of_two_beside_another_axis() -> None:
    """A mesh of one by two: the group is a row of it."""
    ranks_of(2, 128)
    devices = np.array(jax.devices()[:2]).reshape(1, 2)
    mesh = Mesh(devices, ("data", AXIS), axis_types=(AxisType.Auto,) * 2)
    plan = chains.make_plan(2, 128, backend="auto", transport="one-sided")
    ranks, case = Ranks(plan, mesh), random_decode(LENGTHS, 2, 128)
    found = ranks.decode(case, plan.init_comm(mesh), 0)
    chains.check_output(plan, case, found.output)
    plan.free_comm(found.comm)


def test_the_serving_example() -> None:
    serve = Path(__file__).parents[2] / "examples" / "serve.py"
    run = python(serve, "--transport", "one-sided", "--steps", "60", "--json", "--quiet")
    check_all([run], '"identical": true')


def test_ten_thousand_steps_in_one_process() -> None:
    check_all([python(WORKER, "both", 0, "steps", 128, GRAPHS["launched"], STEPS)], "rank 0: right")


@pytest.mark.parametrize(
    ("what", "page_size", "graphs", "count"),
    [
        pytest.param("steps", 256, "launched", STEPS, id="ten-thousand-steps"),
        pytest.param("steps", 128, "captured", 1000, id="in-command-buffers"),
        pytest.param("stop", 128, "launched", 0, id="a-rank-that-stops-and-recovers"),
    ],
)
def test_a_process_for_each_gpu(what: str, page_size: int, graphs: str, count: int) -> None:
    options = (what, page_size, GRAPHS[graphs], count)
    with free_port() as port:
        ranks = [python(WORKER, f"127.0.0.1:{port}", rank, *options) for rank in range(2)]
        check_all(ranks, ": right")
