"""The one-sided transport of decode: a select that stores rows at their owners, a waiting merge.

Between the two lies no operation of XLA's, and none that XLA knows of: what orders them is a buffer
that both write in place, `errors` with legacy rows and the publish counters with tagged ones. One
call's buffer is the next one's, so all calls of a comm form one chain. No pass of XLA's can merge
two of them, drop one, or change their order, as long as the caller hands on the comm that each
call returns, and uses each once.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from msa_icp_jax.comm import MSAIcpComm
from msa_icp_jax.geometry import IndexerGeometry
from msa_icp_jax.ops.arguments import Candidates

if TYPE_CHECKING:
    from msa_icp_jax.arrays import Array, Float32, Int32
    from msa_icp_jax.ops._mosaic.peer_rows import Peers

# Of programs that decode one-sidedly: their kernels are launched one by one, not as a graph of
# XLA's. Only then does a kernel start under its predecessor's end (on an H200 a layer of 32 x 32K
# keys, W 2, takes 19.9 us; in a graph 24.8), and no graph has to be made while a merge waits for
# another GPU of this process, which may in turn wait for the driver.
COMPILER_OPTIONS = {"xla_gpu_enable_command_buffer": ""}
# Looks at a row or a flag of a peer before it is given up: some tens of seconds.
SPIN_LIMIT = 1 << 26


def select_and_publish(
    scores: Float32[Array, "rows 4 columns"],
    num_valid_pages: Int32[Array, " T"],
    comm: MSAIcpComm,
    *,
    geometry: IndexerGeometry,
    rank: int | Int32[Array, ""],
    slot: int | Int32[Array, ""],
    tagged: bool,
    enable_pdl: bool,
    spin_limit: int = SPIN_LIMIT,
) -> MSAIcpComm:
    """Selects the candidates of every (token, head) and stores their rows at the owners.

    Args:
      scores: float32 [>= T, 4, columns], this rank's plane.
      num_valid_pages: int32 [T], T >= 1.
      comm: one rank's, with the addresses of all.
      geometry: the plan's.
      rank: this rank.
      slot: running count of calls.
      tagged: whether rows are tagged.
      enable_pdl: let the launch overlap the scorer's end.
      spin_limit: looks at a peer's flag before it is given up.

    Returns:
      comm, with a flag that stayed up counted in `errors`, or the publish counters advanced.
    """
    from msa_icp_jax.ops._mosaic.launch import current_launch  # on demand: Pallas takes a while
    from msa_icp_jax.ops.select import kernel

    candidates = Candidates(geometry.forced, geometry.index_scale, geometry.index_offset(rank))
    counters = comm.publish_generations if tagged else comm.errors
    advanced = kernel.select_and_publish_rows(
        scores,
        num_valid_pages,
        _peers(comm, geometry, rank, slot, tagged, spin_limit),
        counters,
        candidates,
        current_launch(enable_pdl),
    )
    if tagged:
        return dataclasses.replace(comm, publish_generations=advanced)
    return dataclasses.replace(comm, errors=advanced)


def merge_published(
    num_valid_pages: Int32[Array, " T"],
    output: Int32[Array, "out_rows hpr 16"] | None,
    comm: MSAIcpComm,
    *,
    geometry: IndexerGeometry,
    rank: int | Int32[Array, ""],
    slot: int | Int32[Array, ""],
    tagged: bool,
    enable_pdl: bool,
) -> tuple[Int32[Array, "out_rows hpr 16"], MSAIcpComm]:
    """Waits for every rank's rows of the owned heads and merges them.

    Args:
      num_valid_pages: int32 [T], T >= 1.
      output: int32 [>= T, hpr, 16] to write into; None: a fresh one of T rows.
      comm: as `select_and_publish` returned it.
      geometry, rank, slot, tagged, enable_pdl: as there.

    Returns:
      (output, comm with its expected counters advanced and rows that did not come in `errors`).
    """
    from msa_icp_jax.ops._mosaic.launch import current_launch
    from msa_icp_jax.ops.merge import kernel

    counters = kernel.Generations(comm.publish_generations, comm.expected_generations)
    output, errors, advanced = kernel.merge_rows_at_address(
        _peers(comm, geometry, rank, slot, tagged, SPIN_LIMIT),
        num_valid_pages,
        output,
        comm.errors,
        counters if tagged else None,
        geometry.forced,
        current_launch(enable_pdl),
    )
    published, expected = advanced or counters
    return output, dataclasses.replace(
        comm, errors=errors, publish_generations=published, expected_generations=expected
    )


def _peers(
    comm: MSAIcpComm,
    geometry: IndexerGeometry,
    rank: int | Int32[Array, ""],
    slot: int | Int32[Array, ""],
    tagged: bool,
    spin_limit: int,
) -> Peers:
    from msa_icp_jax.ops._mosaic.peer_rows import Peers

    bases = comm.tagged_recv_bases if tagged else comm.recv_bases
    return Peers(bases, rank, slot, geometry.max_decode_tokens, tagged, spin_limit)
