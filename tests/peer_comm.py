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
from msa_icp_jax.comm import address_words, comm_shapes
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
    arrays = {name: jnp.zeros((*lead, *shape), jnp.int32) for name, shape in shapes.items()}
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


def kernels_of(compiled_text: str) -> list[str]:
    """Names of a compiled program's kernels, in the order of its schedule."""
    main = compiled_text[compiled_text.index("ENTRY") :]
    assert "is_scheduled=true" in compiled_text
    calls = [line for line in main.splitlines() if " custom-call(" in line]
    found = [re.search(r'op_name="[^"]*?(\w+)/mpmd_map', line) for line in calls]
    return [match[1] if match else "unknown" for match in found]


def other_operations_of(compiled_text: str) -> set[str]:
    """What a compiled program runs besides kernels; what costs nothing at run time is left out."""
    main = compiled_text[compiled_text.index("ENTRY") :]
    found = set(re.findall(r"= (?:\([^=]*?\)|\S+) ([\w-]+)\(", main))
    free = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "opt-barrier"}
    return found - free - {"custom-call"}


def on_mesh(plan: MSAIcpIndexerPlan, mesh: Any, function: Any, **jit: Any) -> Any:
    """`layers` of all ranks of a mesh, jitted, donating scores, output and comm."""
    from chains import ALL, INDEX_K, OUTPUT, SCORES

    inputs = (ALL, INDEX_K, ALL, ALL)
    specs = plan.comm_specs()
    mapped = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(inputs, ALL, SCORES, OUTPUT, specs),
        out_specs=(OUTPUT, SCORES, specs),
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=(2, 3, 4), **jit)


def on_one_gpu(plan: MSAIcpIndexerPlan, function: Any, **jit: Any) -> Any:
    """`layers` of all ranks on one GPU, jitted, donating scores, output and comm."""
    mapped = jax.vmap(
        function,
        in_axes=((None, 0, None, None), None, 0, 0, 0),
        axis_name=AXIS,
        axis_size=plan.geometry.world_size,
    )
    return jax.jit(mapped, donate_argnums=(2, 3, 4), **jit)
