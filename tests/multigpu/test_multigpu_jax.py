"""A GPU a rank under shard_map, the exchange over NCCL: whole chains against the oracle."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import chains
import jax
import pytest
from chains import AXIS, GROUPS, Ranks, random_decode, random_prefill
from jax.sharding import AxisType
from test_multiprocess import free_port

LENGTHS = [300, 0, 4000, 1]
SEGMENTS = [(100, 300, 400), (0, 0, 0), (57, 0, 57), (40, 1000, 1100), (130, 3000, 3130)]


def ranks_of(world_size: int, page_size: int) -> Ranks:
    if world_size > len(jax.devices()):
        pytest.skip(f"needs {world_size} GPUs, this machine has {len(jax.devices())}")
    mesh = jax.make_mesh(
        (world_size,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:world_size]
    )
    plan = chains.make_plan(world_size, page_size, backend="auto")
    assert plan.backend == "mosaic"
    return Ranks(plan, mesh)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("world_size", "page_size"), GROUPS)
def test_decode(world_size: int, page_size: int, fused: bool) -> None:
    ranks = ranks_of(world_size, page_size)
    for query_len, lengths in ((1, LENGTHS), (8, [5, 900])):
        case = random_decode(lengths, query_len, page_size)
        found = ranks.decode(case, fused=fused)
        chains.check_decoded(ranks.plan, case, found, fused=fused)


@pytest.mark.parametrize("tagged", [False, True])
@pytest.mark.parametrize(("world_size", "page_size"), GROUPS)
def test_decode_through_the_storage(world_size: int, page_size: int, tagged: bool) -> None:
    ranks = ranks_of(world_size, page_size)
    comm = ranks.put_comm(ranks.zero_comm())
    for slot in range(7):
        case = random_decode(LENGTHS, 2, page_size, seed=slot)
        found = ranks.decode(case, comm, slot, tagged=tagged)
        chains.check_decoded(ranks.plan, case, found, fused=False)
        comm = found.comm
    assert (ranks.get_comm(comm)["errors"] == 0).all()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("world_size", "page_size"), GROUPS)
def test_prefill(world_size: int, page_size: int, fused: bool) -> None:
    ranks = ranks_of(world_size, page_size)
    case = random_prefill(SEGMENTS, 384, page_size)
    chains.check_prefilled(ranks.plan, case, ranks.prefill(case, fused=fused), fused=fused)


def python(*arguments: Any, **environment: str) -> subprocess.Popen[str]:
    paths = [Path(__file__).parent, Path(__file__).parents[1], Path(__file__).parents[2]]
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join([*map(str, paths), *sys.path]),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def check_all(processes: list[subprocess.Popen[str]], says: str) -> None:
    """Each ends well and says so; none outlives the test."""
    try:
        for process in processes:
            output, _ = process.communicate(timeout=150)
            assert process.returncode == 0, output[-4000:]
            assert says in output
    finally:
        for process in processes:
            process.kill()


_CHAINS = """
import chains
from test_multigpu_jax import LENGTHS, SEGMENTS, ranks_of
for page_size in (128, 256):
    ranks = ranks_of(2, page_size)
    comm = ranks.put_comm(ranks.zero_comm())
    for slot in range(4):  # a graph is recorded at the second call of a program
        case = chains.random_decode(LENGTHS, 2, page_size, seed=slot)
        found = ranks.decode(case, comm, slot, tagged=True)
        chains.check_decoded(ranks.plan, case, found, fused=False)
        comm = found.comm
        case = chains.random_prefill(SEGMENTS, 384, page_size, seed=slot)
        chains.check_prefilled(ranks.plan, case, ranks.prefill(case), fused=False)
    assert (ranks.get_comm(comm)["errors"] == 0).all()
print("all right")
"""


@pytest.mark.parametrize(
    "flag", ["--xla_gpu_enable_command_buffer=", "--xla_gpu_graph_min_graph_size=1"]
)
def test_with_and_without_command_buffers(flag: str) -> None:
    check_all([python("-c", _CHAINS, XLA_FLAGS=flag)], "all right")


def test_a_process_for_each_gpu() -> None:
    worker, coordinator = Path(__file__).with_name("jax_process.py"), f"127.0.0.1:{free_port()}"
    check_all([python(worker, coordinator, 2, rank) for rank in range(2)], "of 2: right")
