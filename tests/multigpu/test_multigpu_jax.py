"""A GPU a rank under shard_map, the exchange over NCCL: whole chains against the oracle."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import chains
import hard_rows
import jax
import numpy as np
import oracle
import pytest
from chains import AXIS, GROUPS, Ranks, random_decode, random_prefill
from inputs import TIME_LIMIT
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from test_multiprocess import free_port

from msa_icp_jax.comm import comm_shapes
from msa_icp_jax.geometry import Forced
from msa_icp_jax.ops._mosaic.launch import current_launch
from msa_icp_jax.ops._mosaic.peer_rows import Peers
from msa_icp_jax.ops._mosaic.publish import publish_rows
from msa_icp_jax.ops.merge.kernel import merge_arriving_rows

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


@pytest.mark.parametrize("form", ["legacy", "tagged"])
def test_one_sided_stores_inside_a_jitted_program(form: str) -> None:
    """In one process the GPUs reach each other's memory, and donated storage stays where it is."""
    tokens, links = 32, 12
    devices = jax.devices()[:2]
    mesh = jax.make_mesh((2,), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)
    by_rank, shapes = P(AXIS), comm_shapes(2, tokens)

    def put(value: Any) -> jax.Array:
        return jax.device_put(value, NamedSharding(mesh, by_rank), may_alias=False)

    def zeros(shape: tuple[int, ...]) -> jax.Array:
        return put(np.zeros((2 * shape[0], *shape[1:]), np.int32))

    def addresses(recv: jax.Array) -> list[int]:
        shards = {s.device: s.data.unsafe_buffer_pointer() for s in recv.addressable_shards}
        return [shards[device] for device in devices]

    def local(rows: Any, bases: Any, counts: Any, slot: Any, state: Any) -> Any:
        launch = current_launch(True)
        rank = lax.axis_index(AXIS)
        recv, sent, expected, output, errors = state
        tagged = form == "tagged"
        for i in range(links):
            peers = Peers(bases, rank, slot + i, tokens, tagged, 1 << 22)
            if tagged:
                sent = publish_rows(rows, peers, sent, launch)
            else:
                errors = publish_rows(rows, peers, errors, launch)
            # The merge reads what the publish wrote, and no value says so.
            recv, sent, errors = lax.optimization_barrier((recv, sent, errors))
            output, recv, errors, following = merge_arriving_rows(
                recv,
                counts,
                output,
                errors,
                expected if tagged else None,
                Forced(1, 2),
                launch,
                slot=slot + i,
                spin_limit=1 << 22,
            )
            expected = expected if following is None else following
            sent, output = lax.optimization_barrier((sent, output))
        return recv, sent, expected, output, errors

    specs = (by_rank, by_rank, P(), P(), by_rank)
    program = jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=by_rank, check_vma=False),
        donate_argnums=4,
    )
    rng = np.random.default_rng(0)
    counts = hard_rows.visible_counts(tokens, 400, 1, rng)
    names = ("tagged_recv" if form == "tagged" else "recv", "publish_generations")
    state = (
        *(zeros(shapes[name]) for name in (*names, "expected_generations")),
        *(zeros((tokens, 2, 16)), zeros((1,))),
    )
    bases = addresses(state[0])
    pairs = put(np.tile(np.array(bases, np.int64).view(np.int32).reshape(2, 2), (2, 1)))
    for call in range(5):
        sent = [hard_rows.received_rows(2, 2, tokens, rng) for _ in devices]
        state = program(put(np.concatenate(sent)), pairs, counts, np.int32(call * links), state)
        want = [oracle.merge(np.stack([m[owner] for m in sent]), counts, 1, 2) for owner in (0, 1)]
        np.testing.assert_array_equal(state[3], np.concatenate(want))
        assert addresses(state[0]) == bases
    assert not np.asarray(state[4]).any()


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
            output, _ = process.communicate(timeout=TIME_LIMIT)
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
    worker = Path(__file__).with_name("jax_process.py")
    with free_port() as port:
        ranks = [python(worker, f"127.0.0.1:{port}", 2, rank) for rank in range(2)]
        check_all(ranks, "of 2: right")
