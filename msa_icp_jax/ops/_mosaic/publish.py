"""One-sided publish on Hopper: a warp copies a row straight into its owner's memory.

It is for rows that lie in memory already; a select sends its rows itself
(`ops.select.kernel.select_and_publish_rows`). `peer_rows` has the protocol. It is a matter of
device addresses, so there is no plain definition; where the addresses are not known,
`comm.exchange` carries the same rows to the same places.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from msa_icp_jax.ops._mosaic import lanes
from msa_icp_jax.ops._mosaic.lanes import Lane, Words
from msa_icp_jax.ops._mosaic.launch import (
    CTA,
    Target,
    launch,
    scalar_operand,
    writable,
    written,
)
from msa_icp_jax.ops._mosaic.peer_rows import SEEN_WORDS, Owners, PeerRows
from msa_icp_jax.rows import ROW_WORDS

_WARP, _WARPS = 32, 4


def publish_rows(
    rows: jax.Array,
    recv_bases: jax.Array,
    errors: jax.Array,
    *,
    rank: int | jax.Array,
    slot: int | jax.Array,
    capacity: int,
    spin_limit: int,
    enable_pdl: bool,
    target: Target,
) -> jax.Array:
    """Stores this rank's candidate rows in every owner's legacy receive storage.

    Args:
      rows: int32 [W, hpr, T, 33] by owner, T >= 1.
      recv_bases: int32 [W, 2], device addresses (low, high) of the owners' storage, an int32
        [3, W, hpr, C, 33] each.
      errors: int32 [1], grown by one per row that was not sent since its flag stayed up.
      rank: this rank, an int or a traced int32 scalar. It and the addresses are the same in every
        call.
      slot: running count of calls, likewise; the slot is this mod 3.
      capacity: C >= T.
      spin_limit: looks at a flag before its row is given up.
      enable_pdl: let the launch overlap the preceding kernel's end.
      target: the machine to build for.

    Returns:
      errors.
    """
    owners = Owners(recv_bases.shape[0], capacity, False, spin_limit)
    return _publish(rows, recv_bases, errors, owners, rank, slot, enable_pdl, target)


def publish_tagged_rows(
    rows: jax.Array,
    tagged_recv_bases: jax.Array,
    generations: jax.Array,
    *,
    rank: int | jax.Array,
    slot: int | jax.Array,
    enable_pdl: bool,
    target: Target,
) -> jax.Array:
    """Stores this rank's candidate rows in every owner's tagged receive storage.

    Args:
      rows: int32 [W, hpr, T, 33] by owner, T >= 1 (without tags).
      tagged_recv_bases: int32 [W, 2], device addresses (low, high) of the owners' storage, an int32
        [3, W, hpr, C, 32, 2] each.
      generations: int32 [3, 4, C], the publish counters.
      rank, slot, enable_pdl, target: as for `publish_rows`.

    Returns:
      generations, those of the rows sent advanced.
    """
    owners = Owners(tagged_recv_bases.shape[0], generations.shape[2], True)
    return _publish(rows, tagged_recv_bases, generations, owners, rank, slot, enable_pdl, target)


def _publish(
    rows: jax.Array,
    bases: jax.Array,
    counters: jax.Array,
    owners: Owners,
    rank: int | jax.Array,
    slot: int | jax.Array,
    enable_pdl: bool,
    target: Target,
) -> jax.Array:
    tokens = rows.shape[2]
    advanced = writable(counters)
    launch(
        functools.partial(_kernel, owners=owners, tokens=tokens, pdl=enable_pdl),
        name="publish_tagged_rows" if owners.tagged else "publish_rows",
        target=target,
        grid=(tokens,),
        scratch_types={"shared": plgpu.SMEM((_WARPS, SEEN_WORDS), jnp.int32)},
    )(rows, bases, scalar_operand(rank), scalar_operand(slot), advanced)
    return written(advanced)


def _kernel(
    rows: Any,
    bases: Any,
    rank: Any,
    slot: Any,
    counters: Any,
    *,
    shared: Any,
    owners: Owners,
    tokens: int,
    pdl: bool,
) -> None:
    def in_lanes(piece: Any) -> None:
        """Runs `piece` thread by thread; a CTA has a token, a warp a head."""
        refs = [rows, bases, rank, slot, counters, shared]

        @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * len(refs), plgpu.Layout.WG_SPLAT))
        def run(_: Any, *arguments: Any) -> None:
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
