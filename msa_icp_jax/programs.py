"""The plan's chains as jitted programs over all ranks, made once for each plan and mesh.

A program wraps a plan method in `jax.shard_map` over the icp axis of a mesh, or, without a mesh, in
`jax.vmap`, which runs all ranks on one device (the sharded arguments then carry a leading axis of
W). It donates every buffer that comes back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from msa_icp_jax import checks
from msa_icp_jax.ambient import check_one_device, own_mesh
from msa_icp_jax.backend import check_kernels_run, default_device
from msa_icp_jax.comm import NO_ROWS, ONE_SIDED, MSAIcpComm, comm_shapes
from msa_icp_jax.geometry import (
    HEAD_DIM,
    MAX_INT32,
    NUM_SLOTS,
    IndexerGeometry,
)
from msa_icp_jax.one_sided import COMPILER_OPTIONS
from msa_icp_jax.ops.index_cache import msa_icp_write_index_k
from msa_icp_jax.ops.prefill_plan import MSAIcpScorePlan
from msa_icp_jax.shapes import Shapes, decode_shapes
from msa_icp_jax.typing import ResolvedBackend, ResolvedTransport

# What a program takes: arrays of JAX, or of the host in exactly the right dtype.
Array = jax.Array | np.ndarray
Scratch = TypeVar("Scratch", jax.Array, None)


class Plan(Protocol):
    """What programs ask of the plan that they belong to."""

    def __hash__(self) -> int:
        """Plans that are equal share their programs."""

    @property
    def geometry(self) -> IndexerGeometry:
        """Limits and sizes."""

    @property
    def backend(self) -> ResolvedBackend:
        """Of all stages, as resolved."""

    @property
    def transport(self) -> ResolvedTransport:
        """Of decode, as resolved."""

    @property
    def axis_name(self) -> str:
        """The mesh axis of the group."""

    @property
    def comm_specs(self) -> Callable[[], MSAIcpComm]:
        """PartitionSpecs of all ranks' storage."""

    @property
    def decode(self) -> Callable[..., Any]:
        """One rank's decode."""

    @property
    def prefill(self) -> Callable[..., Any]:
        """One rank's prefill."""

    @property
    def prefill_window_plan(self) -> Callable[..., Any]:
        """The plan of a query window."""


class _Specs:
    """PartitionSpecs of the chains' arrays over a plan's axis, by name; `ALL` is replicated."""

    ALL = P()

    def __init__(self, plan: Plan) -> None:
        axis, self.comm = plan.axis_name, plan.comm_specs()
        self.index_k = P(None, axis)
        self.scores = self.score_scratch = P(None, None, axis)
        self.carrier_view = P(None, axis)
        self.output = P(None, axis)

    def of(self, name: str) -> Any:
        """The spec, or specs, of the argument called `name`."""
        return getattr(self, name, self.ALL)


class Jitted(Protocol):
    """What every program has of a jitted function's methods; arguments may be abstract there."""

    def trace(self, *arguments: Any) -> Any:
        """`jax.jit`'s own."""

    def lower(self, *arguments: Any) -> Any:
        """`jax.jit`'s own."""

    def eval_shape(self, *arguments: Any) -> Any:
        """`jax.jit`'s own."""


class DecodeProgram(Jitted, Protocol):
    """What `MSAIcpIndexerPlan.decode_program` makes without storage."""

    def __call__(
        self,
        index_q: Array,
        index_k: Array,
        block_table: Array,
        seq_lens: Array,
        num_valid_pages: Array,
        scores: Array,
        output: Array,
        /,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns (output, scores), whose buffers it takes over.

        Shapes are those of `MSAIcpIndexerPlan.decode`, of all ranks.

        Raises:
          TypeError, ValueError: an argument has the wrong dtype, shape or value.
        """


class DecodeProgramWithComm(Jitted, Protocol):
    """What `MSAIcpIndexerPlan.decode_program(..., with_comm=True)` makes."""

    def __call__(
        self,
        index_q: Array,
        index_k: Array,
        block_table: Array,
        seq_lens: Array,
        num_valid_pages: Array,
        scores: Array,
        output: Array,
        comm: MSAIcpComm,
        slot: int | Array,
        /,
    ) -> tuple[jax.Array, jax.Array, MSAIcpComm]:
        """Returns (output, scores, comm), whose buffers it takes over.

        Shapes are those of `MSAIcpIndexerPlan.decode`, of all ranks; a `slot` of the host's may
        have any size.

        Raises:
          TypeError, ValueError: an argument has the wrong dtype, shape or value.
        """


class PrefillProgram(Jitted, Protocol):
    """What `MSAIcpIndexerPlan.prefill_program` makes."""

    def __call__(
        self,
        query: Array,
        index_k: Array,
        block_table: Array,
        window_plan: MSAIcpScorePlan,
        score_scratch: Scratch,
        num_valid_pages: Array,
        carrier_view: Array,
        output: Array,
        /,
    ) -> tuple[jax.Array, jax.Array, Scratch]:
        """Returns (output, carrier, score_scratch), whose buffers it takes over.

        Shapes are those of `MSAIcpIndexerPlan.prefill`, of all ranks; without a `score_scratch` the
        window is scored in memory of its own.

        Raises:
          TypeError, ValueError: an argument has the wrong dtype, shape or value.
        """


class WriteProgram(Jitted, Protocol):
    """What `MSAIcpIndexerPlan.write_program` makes."""

    def __call__(self, index_k: Array, new_k: Array, slot_mapping: Array, /) -> jax.Array:
        """Returns index_k, whose buffer it takes over.

        Shapes are those of `msa_icp_write_index_k`, of all ranks.

        Raises:
          TypeError, ValueError: an argument has the wrong dtype, shape or value.
        """


# The arguments that are no array but hold some.
_CLASSES: dict[str, type] = {"comm": MSAIcpComm, "window_plan": MSAIcpScorePlan}


class Program:
    """A chain of all ranks as a jitted function that refuses host arrays of another dtype.

    JAX narrows a 64-bit numpy array before the function sees it, without a word: page 2**32 + 5
    would be page 5. So numpy arrays are looked at here, on every call; arrays of JAX keep their
    dtype and are checked while the function is traced. A `slot` from the host is taken mod 3 here,
    so that the running count of calls may have any size. The mesh that `jax.set_mesh` made ambient
    is none of a program's: it runs on its own, or on one device.
    """

    def __init__(
        self, jitted: Any, dtypes: dict[str, Any], mesh: Mesh | None, backend: ResolvedBackend
    ) -> None:
        """Wraps a jitted function of the arguments that `dtypes` names, in order."""
        self._jitted = jitted
        self._dtypes = {name: np.dtype(dtype) for name, dtype in dtypes.items()}
        self._mesh = mesh
        self._is_device_known = backend == "xla"

    def __call__(self, *arguments: Any) -> Any:
        """Runs the program, compiling it on the first call of its shapes."""
        arguments = self._checked(arguments)
        if not self._is_device_known:
            check_device(self._mesh, arguments)
            self._is_device_known = True
        if "slot" in self._dtypes and not isinstance(arguments[-1], jax.Array):
            arguments = (*arguments[:-1], self._on_device(arguments))
        try:
            with own_mesh(self._mesh):
                return self._jitted(*arguments)
        except RuntimeError as error:
            if "deleted" in str(error):
                self._refuse_deleted(arguments, error)
            raise

    def trace(self, *arguments: Any) -> Any:
        """`jax.jit`'s own; arguments may be abstract, as in `lower` and `eval_shape`."""
        with own_mesh(self._mesh):
            return self._jitted.trace(*self._checked(arguments))

    def lower(self, *arguments: Any) -> Any:
        """`jax.jit`'s own."""
        with own_mesh(self._mesh):
            return self._jitted.lower(*self._checked(arguments))

    def eval_shape(self, *arguments: Any) -> Any:
        """`jax.jit`'s own."""
        with own_mesh(self._mesh):
            return self._jitted.eval_shape(*self._checked(arguments))

    def _cache_size(self) -> int:
        return self._jitted._cache_size()

    def _checked(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(arguments) != len(self._dtypes):
            names = ", ".join(self._dtypes)
            raise TypeError(
                f"the program takes {len(self._dtypes)} arguments ({names}), got {len(arguments)}"
            )
        last = arguments[-1]
        if "slot" in self._dtypes and (isinstance(last, np.generic) or not hasattr(last, "shape")):
            slot = checks.integer("slot", last, 0) % NUM_SLOTS
            arguments = (*arguments[:-1], np.int32(slot))
        for (name, dtype), value in zip(self._dtypes.items(), arguments, strict=True):
            if not isinstance(value, jax.Array):
                checks.host_value(name, value, dtype, _CLASSES.get(name))
        return arguments

    def _refuse_deleted(self, arguments: tuple[Any, ...], error: RuntimeError) -> None:
        """Names the argument that an earlier call took over."""
        for name, value in zip(self._dtypes, arguments, strict=True):
            if any(array.is_deleted() for array in _placed(value)):
                raise RuntimeError(
                    f"{name} was donated and is deleted: a program takes over what it returns, so "
                    "give it what the last call returned"
                ) from error

    def _on_device(self, arguments: tuple[Any, ...]) -> Any:
        """The last argument, a slot of the host's, as an array beside the others.

        Passed as it is it would be an implicit transfer, which a program may forbid.
        """
        slot, beside = arguments[-1], arguments[0]
        if isinstance(beside, jax.core.Tracer):
            return slot
        if self._mesh is not None:
            return _everywhere(int(slot), self._mesh)
        committed = isinstance(beside, jax.Array) and beside.committed
        return jax.device_put(slot, beside.sharding if committed else None)


# What is cached comes checked: to a cache 1.0 and True are the same key as 1.


@functools.cache
def decode_program(
    plan: Plan,
    mesh: Mesh | None,
    decode_query_len: int,
    tagged: bool,
    with_comm: bool,
    fused: bool | None,
    enable_pdl: bool,
) -> Program:
    """See `MSAIcpIndexerPlan.decode_program`."""
    inputs: dict[str, Any] = {
        "index_q": plan.geometry.index_dtype,
        "index_k": plan.geometry.index_dtype,
        "block_table": jnp.int32,
        "seq_lens": jnp.int32,
        "num_valid_pages": jnp.int32,
        "scores": jnp.float32,
        "output": jnp.int32,
    }
    options: dict[str, Any] = {
        "decode_query_len": decode_query_len,
        "tagged": tagged,
        "fused": fused,
        "enable_pdl": enable_pdl,
    }

    def decode(*arrays: Any) -> Any:
        return plan.decode(*arrays, **options)[:2]

    def decode_with_comm(*arrays: Any) -> Any:
        *local, comm, slot = arrays
        return plan.decode(*local, comm=comm, slot=slot, **options)

    if not with_comm:
        return _program(plan, mesh, decode, inputs, ("output", "scores"))
    inputs |= {"comm": jnp.int32, "slot": jnp.int32}
    compiler_options = COMPILER_OPTIONS if plan.transport == ONE_SIDED else None
    written = ("output", "scores", "comm")
    return _program(plan, mesh, decode_with_comm, inputs, written, compiler_options)


@functools.cache
def prefill_program(plan: Plan, mesh: Mesh | None, fused: bool | None) -> Program:
    """See `MSAIcpIndexerPlan.prefill_program`."""
    inputs: dict[str, Any] = {
        "query": plan.geometry.index_dtype,
        "index_k": plan.geometry.index_dtype,
        "block_table": jnp.int32,
        "window_plan": jnp.int32,
        "score_scratch": jnp.float32,
        "num_valid_pages": jnp.int32,
        "carrier_view": jnp.int32,
        "output": jnp.int32,
    }

    def prefill(*arrays: Any) -> Any:
        return plan.prefill(*arrays, fused=fused)

    return _program(plan, mesh, prefill, inputs, ("output", "carrier_view", "score_scratch"))


@functools.cache
def write_program(plan: Plan, mesh: Mesh | None) -> Program:
    """See `MSAIcpIndexerPlan.write_program`."""
    inputs: dict[str, Any] = {
        "index_k": plan.geometry.index_dtype,
        "new_k": plan.geometry.index_dtype,
        "slot_mapping": jnp.int32,
    }

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

    return _program(plan, mesh, write, inputs, "index_k")


def _program(
    plan: Plan,
    mesh: Mesh | None,
    method: Callable[..., Any],
    inputs: dict[str, Any],
    written: str | tuple[str, ...],
    compiler_options: dict[str, Any] | None = None,
) -> Program:
    """Jits a rank's method for all ranks.

    `inputs` are its arguments' dtypes by name; `written` are those that it returns, which are
    donated.
    """
    specs = _Specs(plan)
    in_specs = tuple(map(specs.of, inputs))
    mapped: Callable[..., Any]
    if mesh is None:
        # A leading axis of W where the icp axis shards, none where it replicates.
        axes = jax.tree.map(
            lambda spec: 0 if plan.axis_name in spec else None,
            in_specs,
            is_leaf=lambda spec: isinstance(spec, P),
        )
        every_rank = jax.vmap(
            method, in_axes=axes, axis_name=plan.axis_name, axis_size=plan.geometry.world_size
        )

        def mapped(*arguments: Any) -> Any:
            check_one_device(dict(zip(inputs, arguments, strict=True)))
            for name, spec, value in zip(inputs, in_specs, arguments, strict=True):
                _check_every_rank(plan, name, spec, value)
            return every_rank(*arguments)

    else:
        every_rank = jax.shard_map(
            _saying_whose_shapes(method),
            mesh=mesh,
            in_specs=in_specs,
            out_specs=jax.tree.map(specs.of, written),
            check_vma=plan.backend != "mosaic",
        )

        @functools.wraps(method)
        def mapped(*arguments: Any) -> Any:
            for name, spec, value in zip(inputs, in_specs, arguments, strict=True):
                _check_global(plan, name, spec, value)
            return every_rank(*arguments)

    donated = [list(inputs).index(name) for name in jax.tree.leaves(written)]
    jitted = jax.jit(mapped, donate_argnums=donated, compiler_options=compiler_options)
    return Program(jitted, inputs, mesh, plan.backend)


def check_device(mesh: Mesh | None, arguments: Sequence[Any] = ()) -> None:
    """Raises unless kernels run on the mesh, or where the arguments are; tracers may be anywhere.

    Raises:
      ValueError: it is no Hopper GPU.
    """
    from msa_icp_jax.ops._mosaic.launch import current_target  # on demand: Pallas takes a while

    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arguments)):
        return
    if current_target().interpret:
        return
    if mesh is not None:
        # Of other processes' devices less is known.
        check_kernels_run([*mesh.local_devices, *mesh.devices.flat][0])
        return
    committed = [array for array in _placed(arguments) if array.committed]
    check_kernels_run(next(iter(committed[0].devices())) if committed else default_device())


def _placed(tree: Any) -> list[jax.Array]:
    """The arrays of JAX in a pytree that lie on devices: no traced ones."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
    return [array for array in arrays if not isinstance(array, jax.core.Tracer)]


class _Split(NamedTuple):
    """An array of a program's of which every rank has a part.

    Attributes:
      name: as the caller knows it.
      array: of all ranks.
      ndim: axes of a rank's part.
      axis: the one along which a mesh splits the array.
    """

    name: str
    array: Array
    ndim: int
    axis: int


def _split_arrays(plan: Plan, name: str, spec: Any, value: Any) -> Iterator[_Split]:
    """Those of one argument; the arrays of a comm are some."""
    arrays = {name: (spec, value, 3)}  # pages, planes, carriers and ids alike
    if isinstance(spec, MSAIcpComm):
        limits = plan.geometry
        shapes = comm_shapes(limits.world_size, limits.max_decode_tokens, spec.is_one_sided)
        arrays = {
            f"{name}.{field}": (getattr(spec, field), getattr(value, field), len(shape))
            for field, shape in shapes.items()
        }
    for array_name, (part, array, ndim) in arrays.items():
        if array is not None and part is not NO_ROWS and plan.axis_name in part:
            yield _Split(array_name, array, ndim, part.index(plan.axis_name))


def _check_every_rank(plan: Plan, name: str, spec: Any, value: Any) -> None:
    """Raises unless each rank has an array of its own: behind each other, without a mesh."""
    world_size = plan.geometry.world_size
    for array_name, array, ndim, _ in _split_arrays(plan, name, spec, value):
        if array.ndim != ndim + 1 or array.shape[0] != world_size:
            raise ValueError(
                f"{array_name} must have a leading axis of {world_size} ranks in a program without "
                f"a mesh, {ndim + 1} axes in all, got shape {list(array.shape)}"
            )


def _check_global(plan: Plan, name: str, spec: Any, value: Any) -> None:
    """Raises unless the mesh can split an argument among the group's ranks."""
    world_size = plan.geometry.world_size
    for array_name, array, ndim, axis in _split_arrays(plan, name, spec, value):
        if array.ndim != ndim or array.shape[axis] % world_size:
            raise ValueError(
                f"{array_name} must be the global array in a program over a mesh: {ndim} axes, "
                f"without one of ranks, and the parts of {world_size} ranks side by side along "
                f"axis {axis}, got shape {list(array.shape)}"
            )


def _saying_whose_shapes(method: Callable[..., Any]) -> Callable[..., Any]:
    """A rank's method whose refusals note that it got parts of the caller's arrays."""

    @functools.wraps(method)
    def of_one_rank(*arrays: Any) -> Any:
        try:
            return method(*arrays)
        except (TypeError, ValueError) as error:
            error.add_note("shapes are of one rank's part of the global arrays that were given")
            raise

    return of_one_rank


@functools.lru_cache(maxsize=64)
def _everywhere(value: int, mesh: Mesh) -> jax.Array:
    """An int32 array on a whole mesh, of which every process puts its own part."""
    here = [jax.device_put(np.int32(value), device) for device in mesh.local_devices]
    return jax.make_array_from_single_device_arrays((), NamedSharding(mesh, P()), here)


def check_mesh(plan: Plan, mesh: Mesh | None) -> None:
    """Raises unless `mesh` is None or has the plan's icp axis with one position per rank."""
    if mesh is None:
        return
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh or None, got {mesh!r}")
    size = dict(mesh.shape).get(plan.axis_name)
    if size != plan.geometry.world_size:
        raise ValueError(
            f"mesh must have an axis {plan.axis_name!r} of size {plan.geometry.world_size}, got "
            f"axes {dict(mesh.shape)}"
        )


def warmup(
    plan: Plan,
    num_pages: int,
    table_width: int,
    batch_sizes: Sequence[int] | None,
    query_lens: Sequence[int] | None,
    mesh: Mesh | None,
    page_rows: int | None,
    with_comm: bool,
    tagged: bool,
) -> None:
    """See `MSAIcpIndexerPlan.warmup`."""
    limits = plan.geometry
    num_pages = checks.integer("num_pages", num_pages, 1, MAX_INT32)
    table_width = checks.integer("table_width", table_width, 1, MAX_INT32)
    least_rows = limits.row_offset + limits.rows_per_page
    if page_rows is None:
        page_rows = least_rows
    page_rows = checks.integer("page_rows", page_rows, least_rows, MAX_INT32)
    decodes = decode_shapes(limits, batch_sizes, query_lens)
    with_comm, tagged = checks.flag("with_comm", with_comm), checks.flag("tagged", tagged)
    check_mesh(plan, mesh)
    if plan.backend == "mosaic":
        check_device(mesh)
    make = functools.partial(_abstract, plan, mesh)
    shapes = Shapes(limits, make, (num_pages, page_rows, HEAD_DIM), table_width)
    tokens_written = {limits.window_tokens}
    for batch, query_len in decodes:
        tokens_written.add(batch * query_len)
        program = decode_program(plan, mesh, query_len, tagged, with_comm, None, True)
        slot = _of_all_ranks(plan, mesh, P(), (), jnp.int32)
        storage = (_abstract_comm(plan, mesh), slot) if with_comm else ()
        program.lower(*shapes.decode(batch, query_len).values(), *storage).compile()
    build = functools.partial(plan.prefill_window_plan, **shapes.bounds())
    with own_mesh(mesh):
        window_plan = jax.eval_shape(build, *shapes.window())
    window_plan = jax.tree.map(
        lambda leaf: make("window_plan", leaf.shape, leaf.dtype), window_plan
    )
    prefill_program(plan, mesh, None).lower(*shapes.prefill(window_plan).values()).compile()
    for tokens in sorted(tokens_written):
        write_program(plan, mesh).lower(*shapes.write(tokens).values()).compile()


def _abstract_comm(plan: Plan, mesh: Mesh | None) -> MSAIcpComm:
    """All ranks' storage of the plan's transport."""
    limits, specs = plan.geometry, plan.comm_specs()
    shapes = comm_shapes(limits.world_size, limits.max_decode_tokens, specs.is_one_sided)
    arrays: dict[str, Any] = {
        name: NO_ROWS
        if getattr(specs, name) is NO_ROWS
        else _of_all_ranks(plan, mesh, getattr(specs, name), shape, jnp.int32)
        for name, shape in shapes.items()
    }
    return MSAIcpComm(**arrays)


def _abstract(
    plan: Plan, mesh: Mesh | None, name: str, local_shape: tuple[int, ...], dtype: Any
) -> jax.ShapeDtypeStruct:
    """An argument of all ranks, from its name and its shape on one rank."""
    spec = _Specs(plan).of(name)
    return _of_all_ranks(plan, mesh, spec, local_shape, dtype)


def _of_all_ranks(
    plan: Plan, mesh: Mesh | None, spec: P, local_shape: tuple[int, ...], dtype: Any
) -> jax.ShapeDtypeStruct:
    """An argument of all ranks, from its spec and its shape on one rank."""
    world_size, axis = plan.geometry.world_size, plan.axis_name
    if mesh is None:
        lead = (world_size,) if axis in spec else ()
        return jax.ShapeDtypeStruct((*lead, *local_shape), dtype)
    shape = list(local_shape)
    for dim, name_of_axis in enumerate(spec):
        if name_of_axis == axis:
            shape[dim] *= world_size
    return jax.ShapeDtypeStruct(tuple(shape), dtype, sharding=NamedSharding(mesh, spec))
