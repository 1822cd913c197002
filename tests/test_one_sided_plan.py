"""The one-sided transport of a plan, as far as no GPU is needed: choice, refusals, what lowers."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import fake_cuda
import jax
import jax.numpy as jnp
import numpy as np
import peer_comm
import pytest
from chains import Ranks, make_mesh, make_plan, random_decode
from jax.sharding import NamedSharding

from msa_icp_jax import MSAIcpComm, peer_storage
from msa_icp_jax.comm import NO_ROWS, comm_shapes
from msa_icp_jax.ops._mosaic import aot

CAPACITY = 32  # of the chains' plan


def plan_of(world_size: int = 2, **changes: Any) -> Any:
    return make_plan(world_size, 128, **{"backend": "mosaic", "transport": "one-sided"} | changes)


def struct(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def comm_of(world_size: int, *lead: int) -> MSAIcpComm:
    shapes = comm_shapes(world_size, CAPACITY, one_sided=True)
    arrays = {k: struct(*lead, *shape) if shape[0] else NO_ROWS for k, shape in shapes.items()}
    return MSAIcpComm(**arrays)


# ---- choice ----


@pytest.mark.parametrize(
    ("asked", "backend", "gpus", "chosen"),
    [
        ("collective", "mosaic", 2, "collective"),
        ("one-sided", "mosaic", 1, "one-sided"),
        ("auto", "mosaic", 2, "one-sided"),
        ("auto", "mosaic", 1, "collective"),
        ("auto", "xla", 2, "collective"),
    ],
)
def test_the_plan_says_which(monkeypatch, asked, backend, gpus, chosen):
    fake_cuda.install(monkeypatch, devices=gpus)
    assert plan_of(backend=backend, transport=asked).transport == chosen


def test_the_default_is_the_collective():
    assert make_plan(2, 128, backend="mosaic").transport == "collective"


def test_unknown_transports_and_backends_are_refused():
    with pytest.raises(ValueError, match=r"transport must be one of .*, got 'nccl'"):
        plan_of(transport="nccl")
    with pytest.raises(ValueError, match=r'needs the backend "mosaic", got "xla"'):
        plan_of(backend="xla")


# ---- storage ----


def test_storage_of_a_mesh(monkeypatch):
    library = fake_cuda.install(monkeypatch)
    plan, mesh = plan_of(), make_mesh(2)
    comm = plan.init_comm(mesh)
    assert comm.recv.shape == comm.tagged_recv.shape == (0,)
    assert np.asarray(comm.recv_bases).any(axis=1).all()
    specs = plan.comm_specs()
    for array, spec in zip(jax.tree.leaves(comm), jax.tree.leaves(specs), strict=True):
        assert array.sharding == NamedSharding(mesh, spec)
    assert len(library.live) == 2
    plan.free_comm(comm)
    assert not library.live


def test_storage_of_a_mesh_for_the_collective():
    plan, mesh = make_plan(2, 128), make_mesh(2)
    comm = plan.init_comm(mesh)
    want = Ranks(plan, mesh).zero_comm()
    for name, array in want.items():
        np.testing.assert_array_equal(getattr(comm, name), array)
        assert getattr(comm, name).sharding.spec == getattr(plan.comm_specs(), name)
    case = random_decode([300, 0, 700], 1, 128)
    ranks = Ranks(plan, mesh)
    found = ranks.decode(case, comm, 0, tagged=True)
    np.testing.assert_array_equal(found.output[:3], case.answer(plan))
    plan.free_comm(found.comm)
    assert found.comm.recv.is_deleted()


def test_one_sided_storage_needs_a_mesh():
    with pytest.raises(
        ValueError, match=r"mesh must be a jax.sharding.Mesh .*one-sided.* got None"
    ):
        plan_of().init_comm()


@pytest.mark.parametrize("transport", ["one-sided", "auto"])
def test_gpus_that_do_not_reach_each_other_are_refused(monkeypatch, transport):
    fake_cuda.install(monkeypatch)
    plan = plan_of(transport=transport)
    fake_cuda.install(monkeypatch, reaches=lambda a, b: False)
    with pytest.raises(peer_storage.Unreachable, match=r"cannot access .*collective"):
        plan.init_comm(make_mesh(2))


def test_a_comm_of_the_other_transport_is_refused():
    collective, one_sided = make_plan(2, 128), plan_of()
    theirs = MSAIcpComm.zeros(2, CAPACITY)
    ours = dataclasses.replace(theirs, recv=NO_ROWS, tagged_recv=NO_ROWS)
    one_sided.check_comm(ours)
    collective.check_comm(theirs)
    with pytest.raises(ValueError, match=r"comm.recv must be .* \[0\]"):
        one_sided.check_comm(theirs)
    with pytest.raises(ValueError, match=r"comm.recv must be .* \[3, 2, 2, 32, 33\]"):
        collective.check_comm(ours)
    broken = dataclasses.replace(ours, tagged_recv=theirs.tagged_recv)
    with pytest.raises(ValueError, match=r"comm.tagged_recv must be .* \[0\]"):
        one_sided.check_comm(broken)


def test_rows_that_lie_elsewhere_are_no_arrays_of_a_program():
    """Nor of its specs, which must have the same places."""
    comm, plan = comm_of(2), plan_of()
    assert len(jax.tree.leaves(comm)) == len(jax.tree.leaves(plan.comm_specs())) == 5
    assert jax.tree.structure(comm) == jax.tree.structure(plan.comm_specs())
    again = jax.tree.map(lambda x: x, comm)
    assert again.is_one_sided and again == comm
    assert len(jax.tree.leaves(MSAIcpComm.zeros(2, 1))) == 7


def test_a_comm_goes_through_a_program_of_all_ranks(monkeypatch):
    """Through a loop and a barrier, and back donated: empty arrays would not everywhere."""
    library = fake_cuda.install(monkeypatch)
    plan, mesh = plan_of(), make_mesh(2)
    specs = plan.comm_specs()

    def layers(comm: MSAIcpComm) -> MSAIcpComm:
        def one(comm: MSAIcpComm, _: None) -> tuple[MSAIcpComm, None]:
            return jax.lax.optimization_barrier(comm), None

        return jax.lax.scan(one, comm, None, length=3)[0]

    mapped = jax.shard_map(layers, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=False)
    program, comm = jax.jit(mapped, donate_argnums=0), plan.init_comm(mesh)
    for _ in range(2):
        comm = program(comm)
    assert comm.is_one_sided and not np.asarray(comm.errors).any()
    plan.free_comm(comm)
    assert not library.live


def test_freeing_what_is_no_comm():
    with pytest.raises(TypeError, match="comm must be an MSAIcpComm, got NoneType"):
        plan_of().free_comm(None)


# ---- decode ----


def decode_arguments(plan: Any, *lead: int) -> tuple[Any, ...]:
    """Abstract (inputs, counts, scores, output) of four requests; `lead` where ranks differ."""
    geometry, tokens, float8 = plan.geometry, 4, jnp.float8_e4m3fn
    inputs = (
        struct(tokens, 4, 128, dtype=float8),
        struct(*lead, 64, geometry.rows_per_page, 128, dtype=float8),
        struct(tokens, 36),
        struct(tokens),
    )
    scores = struct(*lead, tokens, 4, geometry.score_columns, dtype=jnp.float32)
    return inputs, struct(tokens), scores, struct(*lead, tokens, geometry.heads_per_rank, 16)


CASE = random_decode([1, 2, 3, 4], 1, 128)  # its query length is all that is taken of it


@pytest.mark.parametrize(("world_size", "tagged"), [(2, True), (4, False)])
def test_a_layer_is_three_kernels_that_hang_on_each_other(world_size, tagged):
    """No copy and no operation between; and one buffer that every sender and merge writes.

    It goes from each to the next, so that no two of them can be merged, dropped or reordered.
    """
    plan, count = plan_of(world_size, rank=1), 4
    arguments = (*decode_arguments(plan), comm_of(world_size))
    lowered = aot.lower(peer_comm.layers(plan, count, CASE, tagged=tagged), *arguments)
    assert not lowered.scratch
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(arguments)]
    thread = aot.Argument(names.index(f"[4].{'publish_generations' if tagged else 'errors'}"))
    kernels = [step for step in lowered.steps if isinstance(step, aot.Kernel)]
    assert len(kernels) == len(lowered.steps) == 3 * count
    # A buffer written in place is an operand and a result.
    assert [kernel.buffers.count(thread) for kernel in kernels] == [0, 2, 2] * count


def test_without_a_comm_it_is_refused():
    plan = plan_of(rank=0)
    with pytest.raises(ValueError, match=r"comm must be an MSAIcpComm from init_comm\(mesh\)"):
        jax.eval_shape(
            lambda inputs, counts, scores, output: plan.decode(
                *inputs, counts, scores, output, decode_query_len=1
            ),
            *decode_arguments(plan),
        )


def test_a_plan_that_may_choose_decodes_without_a_comm(monkeypatch):
    fake_cuda.install(monkeypatch)
    plan = plan_of(transport="auto")
    assert plan.transport == "one-sided"
    program = plan.decode_program(None, decode_query_len=1)
    inputs, *others = decode_arguments(plan, 2)
    lowered = program.trace(*inputs, *others).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@mosaic_gpu_v2") == 3


@pytest.mark.parametrize("rank", [None, 0])
def test_the_rank_says_where_it_runs(rank):
    """A fixed rank outside the icp axis, else inside it."""
    plan = plan_of(rank=rank)
    layer = peer_comm.layers(plan, 1, CASE, tagged=False)
    alone = jax.jit(layer)
    mapped = peer_comm.on_one_gpu(plan, layer)
    right, wrong = (alone, mapped) if rank == 0 else (mapped, alone)
    arguments = {
        alone: (*decode_arguments(plan), comm_of(2)),
        mapped: (*decode_arguments(plan, 2), comm_of(2, 2)),
    }
    right.trace(*arguments[right]).lower(lowering_platforms=("cuda",))
    with pytest.raises(ValueError, match="icp"):
        wrong.trace(*arguments[wrong])


def test_an_exported_program_takes_its_addresses_as_data():
    """Nothing of this process's storage is in it, so it is right wherever it is loaded."""
    pytest.importorskip("flatbuffers", reason="jax.export needs flatbuffers")
    plan = plan_of()
    program = plan.decode_program(None, decode_query_len=1, with_comm=True, tagged=True)
    inputs, *others = decode_arguments(plan, 2)
    arguments = (*inputs, *others, comm_of(2, 2), struct())
    check = [jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    exported = jax.export.export(program._jitted, platforms=["cuda"], disabled_checks=check)(
        *arguments
    )
    leaves = jax.tree.leaves(comm_of(2, 2))
    assert [x.shape for x in exported.in_avals[-6:-1]] == [x.shape for x in leaves]


# ---- the collective ----


@pytest.mark.parametrize("tagged", [False, True])
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_collective_without_storage_is_three_kernels_and_the_exchange(world_size, tagged):
    """Nothing is made, zeroed, marked or copied; what is left is the rank as an operand."""
    plan = make_plan(world_size, 128, backend="mosaic")
    mesh = make_mesh(world_size)
    program = plan.decode_program(mesh, decode_query_len=1, tagged=tagged)
    geometry, tokens = plan.geometry, 4
    inputs, counts, *_ = decode_arguments(plan)
    keys = struct(64, geometry.page_size, 128, dtype=jnp.float8_e4m3fn)
    scores = struct(tokens, 4, world_size * geometry.score_columns, dtype=jnp.float32)
    arguments = (inputs[0], keys, *inputs[2:], counts, scores, struct(tokens, 4, 16))
    text = program.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu_v2") == 3
    assert text.count('"stablehlo.all_to_all"') == 1
    results = re.findall(r"= stablehlo\.(\w+) .*tensor<([\dx]*)[iuf]\d+>$", text, re.M)
    of_arrays = {name for name, shape in results if shape not in ("", "1x")}
    assert of_arrays <= {"custom_call", "optimization_barrier", "reshape"}
