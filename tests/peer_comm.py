"""One-sided storage where one GPU plays every rank, and programs of several layers over it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from chains import AXIS, Decode

from msa_icp_jax import MSAIcpComm, MSAIcpIndexerPlan, msa_icp_comm_layout, peer_storage
from msa_icp_jax.comm import NO_ROWS, address_words, comm_shapes
from msa_icp_jax.rows import ROW_WORDS, TAGGED_WORDS

Array = npt.NDArray[Any]

KERNELS = ("decode_scores", "select_and_publish", "merge_arriving_rows")  # of a layer, in order


@contextlib.contextmanager
def storage_on_one_gpu(plan: MSAIcpIndexerPlan, ranks: int) -> Iterator[tuple[list[int], int]]:
    """The addresses of so many ranks' zeroed storage on the first GPU; where tagged rows begin."""
    geometry = plan.geometry
    layout = msa_icp_comm_layout(
        geometry.world_size, geometry.heads_per_rank, geometry.max_decode_tokens
    )
    addresses = peer_storage.allocate([jax.devices()[0]] * ranks, 4 * layout.storage_words)
    try:
        yield addresses, layout.tagged_offset_bytes
    finally:
        for address in addresses:
            peer_storage.free(address)


def comm_at(plan: MSAIcpIndexerPlan, recv: Array, tagged_recv: Array) -> MSAIcpComm:
    """Zeroed counters behind bases int32 [..., W, 2]; what leads them leads all arrays."""
    geometry, lead = plan.geometry, recv.shape[:-2]
    shapes = comm_shapes(geometry.world_size, geometry.max_decode_tokens, one_sided=True)
    arrays: dict[str, Any] = {
        name: jnp.zeros((*lead, *shape), jnp.int32) if shape[0] else NO_ROWS
        for name, shape in shapes.items()
    }
    bases = {"recv_bases": jnp.asarray(recv), "tagged_recv_bases": jnp.asarray(tagged_recv)}
    return MSAIcpComm(**arrays | bases)


@contextlib.contextmanager
def all_ranks(plan: MSAIcpIndexerPlan) -> Iterator[MSAIcpComm]:
    """The comm of all ranks on one GPU, as a program without a mesh takes it."""
    world_size = plan.geometry.world_size
    with storage_on_one_gpu(plan, world_size) as (addresses, tagged):
        legacy = address_words(addresses)
        shifted = address_words([x + tagged for x in addresses])
        yield comm_at(plan, *(np.stack([x] * world_size) for x in (legacy, shifted)))


@contextlib.contextmanager
def loopback(plan: MSAIcpIndexerPlan) -> Iterator[MSAIcpComm]:
    """The comm of a plan's fixed rank, whose rows for an owner arrive as that source's.

    Owner o's storage is said to begin o - rank sources further on in the rank's own.
    """
    geometry, rank = plan.geometry, plan.rank
    assert rank is not None
    source_rows = geometry.heads_per_rank * geometry.max_decode_tokens
    with storage_on_one_gpu(plan, 1) as ((own,), tagged):

        def bases(start: int, row_words: int) -> Array:
            return address_words(
                [
                    start + (o - rank) * source_rows * row_words * 4
                    for o in range(geometry.world_size)
                ]
            )

        yield comm_at(plan, bases(own, ROW_WORDS), bases(own + tagged, 2 * TAGGED_WORDS))


def layers(
    plan: MSAIcpIndexerPlan, count: int, case: Decode | Any, *, tagged: bool, **options: Any
) -> Any:
    """One rank's program of several layers: f(inputs, counts, scores, output, comm).

    A layer's queries depend on the ids that the layer before chose, as a model's do.
    """

    def run(
        inputs: Sequence[Any], counts: Any, scores: Any, output: Any, comm: MSAIcpComm
    ) -> tuple[Any, Any, MSAIcpComm]:
        query, *others = inputs
        for layer in range(count):
            query, output = jax.lax.optimization_barrier((query, output))
            output, scores, comm = plan.decode(
                query,
                *others,
                counts,
                scores,
                output,
                comm=comm,
                slot=layer,
                tagged=tagged,
                decode_query_len=case.query_len,
                **options,
            )
        return output, scores, comm

    return run


def schedule_of(compiled_text: str) -> list[str]:
    """What a compiled program runs, in order: kernels by their names, other operations' lines.

    What costs nothing at run time is left out.
    """
    assert "is_scheduled=true" in compiled_text
    main = compiled_text[compiled_text.index("ENTRY") :]
    found = []
    for line in main.splitlines():
        operation = re.search(r"= (?:\(.*?\)|\S+) ([a-z][\w-]*)\(", line)
        if operation is None or operation[1] in _FREE:
            continue
        kernel = re.search(r'op_name="[^"]*?(\w+)/mpmd_map', line)
        is_kernel = operation[1] == "custom-call" and kernel is not None
        found.append(kernel[1] if is_kernel and kernel else line.strip()[:200])
    return found


_FREE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "opt-barrier"}


def delayed(value: jax.Array, naps: Any) -> jax.Array:
    """`value`, so many naps of about a microsecond later; an int or a traced int32 scalar."""
    from jax.experimental.pallas import mosaic_gpu as plgpu  # on demand: it takes a while

    from msa_icp_jax.ops._mosaic import lanes, launch

    def body(count: Any, out: Any) -> None:
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
        def nap(_: Any, count: Any, out: Any) -> None:
            del out

            def once(_: Any) -> list[Any]:
                lanes.ptx("nanosleep.u32 1000;")
                return []

            lanes.loop(lanes.int32(0), lanes.Words.of(count).load(), 1, [], once)

        nap(count, out)

    ref = launch.writable(value)
    run = launch.current_launch(pdl=False).kernel(body, name="nap", grid=(1,))
    run(launch.scalar_operand(naps), ref)
    return launch.written(ref)


def on_one_gpu(plan: MSAIcpIndexerPlan, function: Any, **jit: Any) -> Any:
    """`layers` of all ranks on one GPU, jitted, donating scores, output and comm."""
    mapped = jax.vmap(
        function,
        in_axes=((None, 0, None, None), None, 0, 0, 0),
        axis_name=AXIS,
        axis_size=plan.geometry.world_size,
    )
    return jax.jit(mapped, donate_argnums=(2, 3, 4), **jit)
