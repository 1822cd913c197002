"""Meshes of the caller's: Auto and Explicit axes, in context or passed, wholly or partly manual."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import chains
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from chains import AXIS, Ranks, make_plan, random_decode, random_prefill
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from msa_icp_jax import MSAIcpIndexerPlan, msa_icp_write_index_k

LIMITS = {"max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 64}
FLOAT8 = ml_dtypes.float8_e4m3fn
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
KINDS = pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])


@functools.cache
def decode_case() -> chains.Decode:
    return random_decode([700, 0, 300, 5], 1, 128, pages=12, width=8)


@functools.cache
def prefill_case() -> chains.Prefill:
    return random_prefill([(10, 300, 310), (0, 0, 0), (20, 0, 20)], 40, 128, pages=12, width=8)


@functools.cache
def plan_of(backend: str = "xla", **changes: Any) -> MSAIcpIndexerPlan:
    return make_plan(2, 128, backend=backend, **LIMITS | changes)


def mesh_of(kind: AxisType, **axes: int) -> Mesh:
    size = int(np.prod(list(axes.values())))
    return jax.make_mesh(
        tuple(axes.values()), tuple(axes), (kind,) * len(axes), devices=jax.devices("cpu")[:size]
    )


def ambient(mesh: Mesh | None) -> Any:
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


# ---- inside the caller's shard_map, beside a data axis ----


def chain(plan: MSAIcpIndexerPlan, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One decode and one prefill of a rank."""
    ids, _, _ = plan.decode(*arrays[:5], decode_query_len=1)
    query, index_k, table, *lengths = arrays[5:]
    tokens = query.shape[0]
    bounds = {"total_q": tokens, "max_query_len": tokens, "max_seq_len": 1024}
    window_plan = plan.prefill_window_plan(*lengths, **bounds)
    scratch = jnp.zeros((tokens, *plan.prefill_score_shape()[1:]), jnp.float32)
    counts = window_plan.num_valid_pages()
    carrier, output = jnp.zeros((4, tokens, 33), jnp.int32), jnp.zeros((tokens, 2, 16), jnp.int32)
    inputs = (query, index_k, table, window_plan, scratch, counts, carrier, output)
    return ids, plan.prefill(*inputs)[0]


def chain_over(
    plan: MSAIcpIndexerPlan, mesh: Mesh, *, only_icp: bool, split: bool, in_context: bool
) -> tuple[Any, list[jax.Array]]:
    """`chain` as a jitted function, and its arguments; decode's batch split over data or not."""
    decode, prefill = decode_case(), prefill_case()
    arrays = [
        decode.query.view(FLOAT8),
        decode.cache.keys.view(FLOAT8),
        *(decode.cache.table, decode.seq_lens, decode.counts),
        prefill.query.view(FLOAT8),
        prefill.cache.keys.view(FLOAT8),
        *(prefill.cache.table, prefill.qo_lens, prefill.kv_lens, prefill.qo_offset),
    ]
    batch = "data" if split else None
    specs = [P(batch), P(None, AXIS), *[P(batch)] * 3, P(), P(None, AXIS), *[P()] * 4]
    inside = [P(*(axis for axis in s if axis != "data")) for s in specs] if only_icp else specs
    options: dict[str, Any] = {"check_vma": False}
    if only_icp:
        options["axis_names"] = {AXIS}
    if not in_context:
        options["mesh"] = mesh
    output = P(None if only_icp else batch, AXIS)
    mapped = jax.shard_map(
        functools.partial(chain, plan),
        in_specs=tuple(inside),
        out_specs=(output, P(None, AXIS)),
        **options,
    )
    placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)]
    return jax.jit(mapped), placed


MESHES = [
    # kind, only icp, split, in context
    (AUTO, False, True, True),
    (EXPLICIT, True, False, True),
    (AUTO, True, True, False),
    (EXPLICIT, False, True, False),
    (AUTO, True, False, True),
]


@pytest.mark.parametrize(("kind", "only_icp", "split", "in_context"), MESHES[:3])
def test_chains_on_larger_meshes(
    kind: AxisType, only_icp: bool, split: bool, in_context: bool
) -> None:
    plan, mesh = plan_of(), mesh_of(kind, data=2, icp=2)
    with ambient(mesh if in_context else None):
        program, arrays = chain_over(
            plan, mesh, only_icp=only_icp, split=split, in_context=in_context
        )
        ids, chosen = program(*arrays)
    chains.check_output(plan, decode_case(), np.asarray(ids))
    chains.check_output(plan, prefill_case(), np.asarray(chosen))


@pytest.mark.parametrize(("kind", "only_icp", "split", "in_context"), MESHES)
def test_kernels_lower_on_larger_meshes(
    kind: AxisType, only_icp: bool, split: bool, in_context: bool
) -> None:
    mesh = mesh_of(kind, data=2, icp=2)
    with ambient(mesh if in_context else None):
        program, arrays = chain_over(
            plan_of("mosaic"), mesh, only_icp=only_icp, split=split, in_context=in_context
        )
        text = program.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu_v2") == 6


@pytest.mark.parametrize("backend", ["xla", "mosaic"])
def test_a_batch_split_over_an_explicit_axis_is_refused(backend: str) -> None:
    """JAX has no rule for it: kernels cannot be split, and most of what XLA computes could not."""
    mesh = mesh_of(EXPLICIT, data=2, icp=2)
    program, arrays = chain_over(
        plan_of(backend), mesh, only_icp=True, split=True, in_context=False
    )
    with pytest.raises(ValueError, match=r"^arrays must not be split over Explicit mesh axes"):
        program.trace(*arrays)


def test_lengths_split_over_an_explicit_axis_are_refused() -> None:
    mesh = mesh_of(EXPLICIT, data=4)
    lengths = jax.device_put(np.zeros(4, np.int32), NamedSharding(mesh, P("data")))
    bounds = {"total_q": 8, "max_query_len": 8, "max_seq_len": 8}
    with pytest.raises(ValueError, match=r"^arrays must not be split over Explicit mesh axes"):
        plan_of().prefill_window_plan(lengths, lengths, lengths, **bounds)


# ---- programs under a mesh that is not theirs ----


@KINDS
def test_no_mesh_is_one_device_whatever_is_ambient(kind: AxisType) -> None:
    plan, case = plan_of(num_sparse_layers=3), decode_case()
    ranks = Ranks(plan, None)
    want = ranks.decode(case)
    for mesh in (mesh_of(kind, icp=2), mesh_of(kind, x=4)):
        with jax.set_mesh(mesh):
            plan.warmup(num_pages=12, table_width=8, batch_sizes=[4], query_lens=[1])
            found = ranks.decode(case)
        chains.check_decoded(plan, case, found, fused=False)
    assert plan.decode_program(decode_query_len=1)._cache_size() == 1
    np.testing.assert_array_equal(found.output, want.output)


def test_a_mesh_is_the_program_s_whatever_is_ambient() -> None:
    plan, case, mesh = plan_of(num_sparse_layers=3), decode_case(), mesh_of(EXPLICIT, icp=2)
    ranks = Ranks(plan, mesh)
    for other in (mesh, mesh_of(EXPLICIT, x=4)):
        with jax.set_mesh(other):
            plan.warmup(num_pages=12, table_width=8, batch_sizes=[4], query_lens=[1], mesh=mesh)
            found = ranks.decode(case, plan.init_comm(mesh), slot=2)
        chains.check_decoded(plan, case, found, fused=False)


def test_arrays_of_an_explicit_mesh_are_refused_by_name() -> None:
    arrays = Ranks(plan_of(), None).decode_arrays(decode_case())
    program = plan_of().decode_program(decode_query_len=1)
    with jax.set_mesh(mesh_of(EXPLICIT, icp=2)):
        arrays[5] = jnp.zeros(arrays[5].shape, jnp.float32)
        for run in (program, jax.jit(lambda *x: program(*x))):
            with pytest.raises(ValueError, match=r"^scores must lie on one device where mesh=None"):
                run(*arrays)


def test_a_program_in_a_jitted_function() -> None:
    """Under an ambient mesh: on that mesh, or on one device; another mesh is refused by name."""
    plan, case, mesh = plan_of(), decode_case(), mesh_of(AUTO, icp=2)
    program = plan.decode_program(decode_query_len=1)
    with jax.set_mesh(mesh_of(EXPLICIT, x=4)):
        output = jax.jit(lambda *x: program(*x)[0])(*Ranks(plan, None).decode_arrays(case))
        over = plan.decode_program(mesh, decode_query_len=1)
        with pytest.raises(ValueError, match=r"^mesh must be the ambient one"):
            jax.jit(lambda *x: over(*x)).trace(*Ranks(plan, mesh).decode_arrays(case))
    chains.check_output(plan, case, np.concatenate(list(np.asarray(output)), axis=1))
    with jax.set_mesh(mesh):
        output = jax.jit(lambda *x: over(*x)[0])(*Ranks(plan, mesh).decode_arrays(case))
    chains.check_output(plan, case, np.asarray(output))


# ---- eager helpers ----


def test_eager_helpers_under_an_ambient_mesh() -> None:
    case = prefill_case()
    keys = np.zeros((12, 64, 128), FLOAT8)
    slots = np.array([-1, 3, 2**31 - 1, 12 * 128, 11 * 128 + 63], np.int32)
    bounds = {"total_q": 40, "max_query_len": 40, "max_seq_len": 1024}

    def helped() -> list[np.ndarray]:
        lengths = (jnp.asarray(x) for x in (case.qo_lens, case.kv_lens, case.qo_offset))
        window_plan = plan_of("mosaic").prefill_window_plan(*lengths, **bounds)
        written = msa_icp_write_index_k(
            jnp.asarray(keys),
            jnp.ones((5, 128), jnp.float8_e4m3fn),
            jnp.asarray(slots),
            rank=0,
            world_size=2,
            page_size=128,
        )
        leaves = [*jax.tree.leaves(window_plan), window_plan.num_valid_pages(40), written]
        return [np.asarray(leaf).view(np.uint8) for leaf in leaves]

    want = helped()
    with jax.set_mesh(mesh_of(EXPLICIT, icp=2)):
        found = helped()
    for one, other in zip(found, want, strict=True):
        np.testing.assert_array_equal(one, other)
    assert np.argwhere(want[-1].any(-1)).tolist() == [[0, 3], [11, 63]]
