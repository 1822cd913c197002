"""The plan's chains as jitted programs over all ranks, made once for each plan and mesh.

A program wraps a plan method in `jax.shard_map` over the icp axis of a mesh, or, without a mesh, in
`jax.vmap`, which runs all ranks on one device (the sharded arguments then carry a leading axis of
W). It donates every buffer that comes back.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from msa_icp_jax import checks, rows
from msa_icp_jax.comm import comm_specs
from msa_icp_jax.geometry import HEAD_DIM, NUM_HEADS, TOPK
from msa_icp_jax.ops.index_cache import msa_icp_write_index_k

if TYPE_CHECKING:
    from msa_icp_jax.plan import MSAIcpIndexerPlan


class _Specs:
    """PartitionSpecs of the chains' arrays over one icp axis; `ALL` is replicated."""

    ALL = P()

    def __init__(self, axis: str) -> None:
        self.index_k = P(None, axis)
        self.scores = P(None, None, axis)
        self.carrier = P(None, axis)
        self.output = P(None, axis)
        self.comm = comm_specs(axis)


@functools.cache
def decode_program(
    plan: MSAIcpIndexerPlan,
    mesh: Mesh | None,
    decode_query_len: int,
    tagged: bool,
    with_comm: bool,
    fused: bool | None,
    enable_pdl: bool,
) -> Any:
    """See `MSAIcpIndexerPlan.decode_program`."""
    specs = _Specs(plan.axis_name)
    options: dict[str, Any] = {
        "decode_query_len": decode_query_len,
        "tagged": tagged,
        "fused": fused,
        "enable_pdl": enable_pdl,
    }
    arrays = (specs.ALL, specs.index_k, specs.ALL, specs.ALL, specs.ALL, specs.scores, specs.output)
    outputs = (specs.output, specs.scores)

    def decode(*args: Any) -> Any:
        return plan.decode(*args, **options)[:2]

    def decode_with_comm(*args: Any) -> Any:
        *local, comm, slot = args
        return plan.decode(*local, comm=comm, slot=slot, **options)

    if not with_comm:
        return _program(plan, mesh, decode, arrays, outputs, donate=(5, 6))
    inputs = (*arrays, specs.comm, specs.ALL)
    return _program(plan, mesh, decode_with_comm, inputs, (*outputs, specs.comm), donate=(5, 6, 7))


@functools.cache
def prefill_program(plan: MSAIcpIndexerPlan, mesh: Mesh | None, fused: bool | None) -> Any:
    """See `MSAIcpIndexerPlan.prefill_program`."""
    specs = _Specs(plan.axis_name)

    def prefill(*arrays: Any) -> Any:
        return plan.prefill(*arrays, fused=fused)

    return _program(
        plan,
        mesh,
        prefill,
        (
            specs.ALL,
            specs.index_k,
            specs.ALL,
            specs.ALL,
            specs.scores,
            specs.ALL,
            specs.carrier,
            specs.output,
        ),
        (specs.output, specs.carrier, specs.scores),
        donate=(4, 6, 7),
    )


@functools.cache
def write_program(plan: MSAIcpIndexerPlan, mesh: Mesh | None) -> Any:
    """See `MSAIcpIndexerPlan.write_program`."""
    specs = _Specs(plan.axis_name)

    def write(index_k: jax.Array, new_k: jax.Array, slot_mapping: jax.Array) -> jax.Array:
        return msa_icp_write_index_k(
            index_k,
            new_k,
            slot_mapping,
            rank=jax.lax.axis_index(plan.axis_name),
            world_size=plan.geometry.world_size,
            page_size=plan.geometry.page_size,
            row_offset=plan.geometry.row_offset,
            backend=plan.backend,
        )

    inputs = (specs.index_k, specs.ALL, specs.ALL)
    return _program(plan, mesh, write, inputs, specs.index_k, donate=(0,))


def _program(
    plan: MSAIcpIndexerPlan,
    mesh: Mesh | None,
    method: Callable[..., Any],
    inputs: tuple[Any, ...],
    outputs: Any,
    donate: tuple[int, ...],
) -> Any:
    if mesh is None:
        # A leading axis of W where the icp axis shards, none where it replicates.
        axes = jax.tree.map(
            lambda spec: 0 if plan.axis_name in spec else None,
            inputs,
            is_leaf=lambda spec: isinstance(spec, P),
        )
        mapped = jax.vmap(
            method, in_axes=axes, axis_name=plan.axis_name, axis_size=plan.geometry.world_size
        )
    else:
        check_mesh(plan, mesh)
        mapped = jax.shard_map(
            method,
            mesh=mesh,
            in_specs=inputs,
            out_specs=outputs,
            check_vma=plan.backend != "mosaic",
        )
    return jax.jit(mapped, donate_argnums=donate)


def check_mesh(plan: MSAIcpIndexerPlan, mesh: Mesh) -> None:
    """Raises unless `mesh` has the plan's icp axis with one position per rank."""
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh or None, got {mesh!r}")
    size = dict(mesh.shape).get(plan.axis_name)
    if size != plan.geometry.world_size:
        raise ValueError(
            f"mesh must have an axis {plan.axis_name!r} of size {plan.geometry.world_size}, got "
            f"axes {dict(mesh.shape)}"
        )


def warmup(
    plan: MSAIcpIndexerPlan,
    num_pages: int,
    table_width: int,
    batch_sizes: Sequence[int] | None,
    query_lens: Sequence[int] | None,
    mesh: Mesh | None,
) -> None:
    """See `MSAIcpIndexerPlan.warmup`."""
    limits = plan.geometry
    checks.integer("num_pages", num_pages, 1)
    checks.integer("table_width", table_width, 1)
    most = min(limits.max_num_seqs, limits.max_decode_tokens)
    if batch_sizes is None:
        batch_sizes = (most,)
    if query_lens is None:
        query_lens = sorted({1, limits.max_decode_query_len})
    checks.integers("query_lens", query_lens, 1, limits.max_decode_query_len)
    checks.integers("batch_sizes", batch_sizes, 1, most)
    if mesh is not None:
        check_mesh(plan, mesh)
    shapes = _Shapes(plan, mesh, num_pages, table_width)
    tokens_written = {limits.window_tokens}
    for batch, query_len in itertools.product(batch_sizes, query_lens):
        batch = min(batch, max(1, limits.max_decode_tokens // query_len))
        tokens_written.add(batch * query_len)
        program = plan.decode_program(mesh, decode_query_len=query_len)
        program.lower(*shapes.decode(batch, query_len)).compile()
    plan.prefill_program(mesh).lower(*shapes.prefill()).compile()
    for tokens in sorted(tokens_written):
        plan.write_program(mesh).lower(*shapes.write(tokens)).compile()


class _Shapes:
    """Abstract arguments of the programs at given sizes."""

    def __init__(
        self, plan: MSAIcpIndexerPlan, mesh: Mesh | None, num_pages: int, table_width: int
    ) -> None:
        self.plan = plan
        self.mesh = mesh
        self.specs = _Specs(plan.axis_name)
        self.table_width = table_width
        geo = plan.geometry
        local_rows = geo.rows_per_page + geo.row_offset
        self.index_k = self._array(
            (num_pages, local_rows, HEAD_DIM), jnp.float8_e4m3fn, self.specs.index_k
        )

    def decode(self, batch: int, query_len: int) -> tuple[Any, ...]:
        geo, tokens = self.plan.geometry, batch * query_len
        return (
            self._array((tokens, NUM_HEADS, HEAD_DIM), jnp.float8_e4m3fn),
            self.index_k,
            self._array((batch, self.table_width)),
            self._array((batch,)),
            self._array((tokens,)),
            self._array((tokens, NUM_HEADS, geo.score_columns), jnp.float32, self.specs.scores),
            self._array((tokens, geo.heads_per_rank, TOPK), jnp.int32, self.specs.output),
        )

    def prefill(self) -> tuple[Any, ...]:
        geo = self.plan.geometry
        tokens, segments = geo.window_tokens, geo.max_num_seqs
        lengths = self._array((segments,))
        window_plan = jax.eval_shape(
            functools.partial(
                self.plan.prefill_window_plan,
                total_q=tokens,
                max_query_len=tokens,
                max_seq_len=geo.max_model_len,
            ),
            lengths,
            lengths,
            lengths,
        )
        return (
            self._array((tokens, NUM_HEADS, HEAD_DIM), jnp.float8_e4m3fn),
            self.index_k,
            self._array((segments, self.table_width)),
            jax.tree.map(lambda leaf: self._array(leaf.shape, leaf.dtype), window_plan),
            self._array((tokens, NUM_HEADS, geo.score_columns), jnp.float32, self.specs.scores),
            self._array((tokens,)),
            self._array((NUM_HEADS, tokens, rows.ROW_WORDS), jnp.int32, self.specs.carrier),
            self._array((tokens, geo.heads_per_rank, TOPK), jnp.int32, self.specs.output),
        )

    def write(self, tokens: int) -> tuple[Any, ...]:
        new_k = self._array((tokens, HEAD_DIM), jnp.float8_e4m3fn)
        return (self.index_k, new_k, self._array((tokens,)))

    def _array(
        self, local_shape: tuple[int, ...], dtype: Any = jnp.int32, spec: P = _Specs.ALL
    ) -> jax.ShapeDtypeStruct:
        """One argument, from its shape on one rank."""
        world_size, axis = self.plan.geometry.world_size, self.plan.axis_name
        if self.mesh is None:
            lead = (world_size,) if axis in spec else ()
            return jax.ShapeDtypeStruct((*lead, *local_shape), dtype)
        shape = list(local_shape)
        for dim, name in enumerate(spec):
            if name == axis:
                shape[dim] *= world_size
        sharding = NamedSharding(self.mesh, spec)
        return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)
