"""One-sided publish on Hopper: a warp copies a row straight into its owner's memory.

It is for rows that lie in memory already; a select sends its rows itself
(`ops.select.kernel.select_and_publish_rows`). `peer_rows` has the protocol. It is a matter of
device addresses, so there is no plain definition; where the addresses are not known,
`comm.exchange` carries the same rows to the same places.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from msa_icp_jax.ops._mosaic import lanes
from msa_icp_jax.ops._mosaic.lanes import Context, Lane, Memory, Value, Words
from msa_icp_jax.ops._mosaic.launch import (
    CTA,
    Launch,
    writable,
    written,
)
from msa_icp_jax.ops._mosaic.peer_rows import SEEN_WORDS, Owners, PeerRows, Peers
from msa_icp_jax.rows import ROW_WORDS

if TYPE_CHECKING:
    from msa_icp_jax.arrays import Array, Int32

_WARP, _WARPS = 32, 4


def publish_rows(
    rows: Int32[Array, "W hpr T 33"],
    peers: Peers,
    counters: Int32[Array, "*counters"],
    launch: Launch,
) -> Int32[Array, "*counters"]:
    """Stores this rank's candidate rows in every owner's receive storage.

    Args:
      rows: int32 [W, hpr, T, 33] by owner, T >= 1, without tags.
      peers: where they go.
      counters: of legacy rows the errors, int32 [1], grown by one per row that was not sent since
        its flag stayed up; of tagged rows the publish counters, int32 [3, 4, C].
      launch: how to launch.

    Returns:
      counters, advanced.
    """
    tokens = rows.shape[2]
    advanced = writable(counters)
    launch.kernel(
        functools.partial(_kernel, owners=peers.owners, tokens=tokens, pdl=launch.pdl),
        name="publish_tagged_rows" if peers.tagged else "publish_rows",
        grid=(tokens,),
        scratch_types={"shared": plgpu.SMEM((_WARPS, SEEN_WORDS), jnp.int32)},
    )(rows, *peers.operands(), advanced)
    return written(advanced)


def _kernel(
    rows: jax.Ref,
    bases: jax.Ref,
    rank: jax.Ref,
    slot: jax.Ref,
    counters: jax.Ref,
    *,
    shared: jax.Ref,
    owners: Owners,
    tokens: int,
    pdl: bool,
) -> None:
    def in_lanes(piece: Any) -> None:
        """Runs `piece` thread by thread; a CTA has a token, a warp a head."""
        refs = [rows, bases, rank, slot, counters, shared]

        @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * len(refs), plgpu.Layout.WG_SPLAT))
        def run(_: Context, *arguments: Memory | Value) -> None:
            *refs, token = arguments
            rows, *peers, shared = (Words.of(ref) for ref in refs)
            piece(owners, tokens, rows, peers, shared, lanes.scalar(token))

        run(*refs, lax.axis_index(CTA))

    if not owners.tagged:
        in_lanes(_look_ahead)
    if pdl:
        # In this order, see `peer_rows`.
        plgpu.griddepcontrol_wait()
        plgpu.griddepcontrol_launch_dependents()
    in_lanes(_send)


def _look_ahead(
    owners: Owners, tokens: int, rows: Words, peers: list[Words], shared: Words, token: Lane
) -> None:
    del tokens, rows
    lane, head = _position()
    owned = PeerRows(owners, peers, shared + head * SEEN_WORDS)
    owned.prepare()
    owned.look_ahead(token, head, lane)


def _send(
    owners: Owners, tokens: int, rows: Words, peers: list[Words], shared: Words, token: Lane
) -> None:
    lane, head = _position()
    word = (rows + (head * tokens + token).to_i64() * ROW_WORDS + lane).load()
    owned = PeerRows(owners, peers, shared + head * SEEN_WORDS)
    owned.prepare()
    owned.store_row(token, head, lane, word)


def _position() -> tuple[Lane, Lane]:
    """This lane of its warp, and the warp's head."""
    thread = lanes.thread()
    return thread & (_WARP - 1), lanes.warp_from(thread >> 5, 0)
