"""Owner merge: every rank's candidate rows of a head to its global Top16."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from msa_icp_jax import checks, geometry, rows
from msa_icp_jax.backend import start_at, takes_mosaic, vary_as
from msa_icp_jax.checks import AtLeast, Ranks
from msa_icp_jax.geometry import NUM_HEADS, NUM_SLOTS, TOPK, Forced
from msa_icp_jax.ops.merge import xla
from msa_icp_jax.typing import Backend

if TYPE_CHECKING:
    from msa_icp_jax.arrays import Array, Int32


class MSAIcpMerge(NamedTuple):
    """What the merge returns in place of writing it.

    Attributes:
      output: int32 [>= T, hpr, 16], ids ascending, tail -1.
      recv_slot: the slot's rows; a legacy decode merge clears their flags.
      expected_generations: int32 [hpr, C] with this call's advanced, or None for legacy rows.
      errors: int32 [1], grown by one per failed (source, head, token) row.
    """

    output: jax.Array
    recv_slot: jax.Array
    expected_generations: jax.Array | None
    errors: jax.Array


def msa_icp_merge_candidates(
    recv_slot: Int32[Array, "W hpr C *row"],
    num_valid_pages: Int32[Array, " T"],
    output: Int32[Array, "out_rows hpr 16"],
    errors: Int32[Array, " 1"],
    *,
    init_blocks: int,
    local_blocks: int,
    spin_limit: int = 67108864,
    enable_pdl: bool = False,
    expected_generations: Int32[Array, "*slots hpr C"] | None = None,
    prefill: bool = False,
    backend: Backend = "auto",
) -> MSAIcpMerge:
    """Merges all ranks' candidates of the owned heads into the exact global Top16.

    Per (token, head): ids outside ``[0, min(num_valid_pages, 8192))`` are dropped, a repeated id
    keeps its largest score (NaN as -inf), then forced blocks win, then the larger score, then the
    lower id; 16 ids are written ascending with a -1 tail. A token without visible blocks gets
    ``[0, -1, ...]`` in prefill and all -1 in decode. A row whose flag is not 1 (or one of whose 32
    tags is not the expected generation) is a protocol fault: its (token, head) answers all -1 and
    `errors` grows by one; flags and generations advance as usual.

    Args:
      recv_slot: one slot of the receive storage, int32 [W, hpr, C >= T, 33], or tagged
        [W, hpr, C >= T, 32, 2] when `expected_generations` is given. Donate it with the others.
      num_valid_pages: int32 [T], visible blocks of each token; negative reads as 0.
      output: int32 [>= T, hpr, 16]; rows at or past T keep their bits.
      errors: int32 [1].
      init_blocks: blocks at the start that always win.
      local_blocks: visible blocks at the end that always win; at most 16 with the former.
      spin_limit: polls after which a waiting (one-sided) merge gives a row up, >= 1. In the
        collective transport every row is there already and nothing waits.
      enable_pdl: let the kernel's launch overlap its predecessor's end (Mosaic only).
      expected_generations: int32 [hpr, C >= T], the slot's expected counters (tagged rows).
      prefill: rows of a prefill exchange: flags and generations stay as they are.
      backend: "auto", "mosaic" or "xla".

    Raises:
      TypeError, ValueError: an argument has the wrong dtype, shape or value.
    """
    checks.array("num_valid_pages", num_valid_pages, jnp.int32, None)
    tokens = num_valid_pages.shape[0]
    checks.flag("prefill", prefill)
    _check_recv(recv_slot, tokens, tagged=expected_generations is not None)
    heads = recv_slot.shape[1]
    checks.array("output", output, jnp.int32, AtLeast(tokens), heads, TOPK)
    checks.array("errors", errors, jnp.int32, 1)
    forced = geometry.check_forced("init_blocks", init_blocks, "local_blocks", local_blocks)
    checks.integer("spin_limit", spin_limit, 1, geometry.MAX_INT32)
    checks.flag("enable_pdl", enable_pdl)
    tags = None
    if expected_generations is not None:
        if prefill:
            raise ValueError("expected_generations must be None when prefill=True, got an array")
        checks.array(
            "expected_generations", expected_generations, jnp.int32, heads, AtLeast(tokens)
        )
        tags = rows.next_generation(expected_generations[:, :tokens])
        expected_generations = lax.dynamic_update_slice(expected_generations, tags, (0, 0))
    merge_rows = _merge_rows(backend, enable_pdl, recv_slot, num_valid_pages)
    if tokens:
        output, recv_slot, errors = merge_rows(
            recv_slot,
            num_valid_pages,
            output,
            errors,
            tags,
            forced,
            prefill=prefill,
        )
    return MSAIcpMerge(output, recv_slot, expected_generations, errors)


def merge_once(
    received: Int32[Array, "W hpr C *row"],
    num_valid_pages: Int32[Array, " T"],
    output: Int32[Array, "out_rows hpr 16"] | None,
    tags: Int32[Array, "hpr T"] | None = None,
    *,
    forced: Forced,
    prefill: bool = False,
    enable_pdl: bool = False,
    backend: Backend = "auto",
) -> Int32[Array, "out_rows hpr 16"]:
    """`msa_icp_merge_candidates` of rows that are this call's alone.

    Nothing is kept: no flag is cleared, no fault counted, and no buffer made for either. Arguments
    are taken as checked.

    Args:
      received: int32 [W, hpr, >= T, 33], or tagged [W, hpr, >= T, 32, 2] when `tags` are given.
      num_valid_pages: int32 [T].
      output: int32 [>= T, hpr, 16] to write into; None: a fresh one of T rows.
      tags: int32 [hpr, T], what tagged rows must carry.
      forced: blocks that always win.
      others: as for `msa_icp_merge_candidates`.

    Returns:
      output.
    """
    tokens, heads = num_valid_pages.shape[0], received.shape[1]
    if tokens == 0:
        return jnp.zeros((0, heads, TOPK), jnp.int32) if output is None else output
    merge_rows = _merge_rows(backend, enable_pdl, received, num_valid_pages)
    return merge_rows(
        received,
        num_valid_pages,
        output,
        None,
        tags,
        forced,
        prefill=prefill,
    )[0]


def merge_in_slot(
    recv: Int32[Array, "3 W hpr C *row"],
    num_valid_pages: Int32[Array, " T"],
    output: Int32[Array, "out_rows hpr 16"] | None,
    errors: Int32[Array, " 1"],
    expected_generations: Int32[Array, "*slots hpr C"] | None,
    *,
    slot: int | Int32[Array, ""],
    forced: Forced,
    enable_pdl: bool,
    backend: Backend,
    spin_limit: int = 1,
) -> MSAIcpMerge:
    """`msa_icp_merge_candidates` of a slot of whole storage.

    The kernel finds the slot itself, so that no slot is copied out and in. Arguments are taken as
    checked.

    Args:
      recv: int32 [3, W, hpr, C >= T, 33], or tagged [3, W, hpr, C, 32, 2] when
        `expected_generations` are given.
      num_valid_pages: int32 [T].
      output: int32 [>= T, hpr, 16] to write into; None: a fresh one of T rows.
      errors: int32 [1].
      expected_generations: int32 [3, hpr, C].
      slot: running count of calls; the slot is this mod 3.
      forced: blocks that always win.
      spin_limit: looks at a row before it is given up; 1 where all rows are there. XLA takes one.
      others: as for `msa_icp_merge_candidates`.

    Returns:
      An MSAIcpMerge of whole storage and counters.
    """
    tokens, heads = num_valid_pages.shape[0], recv.shape[2]
    if not tokens:
        nothing = jnp.zeros((0, heads, TOPK), jnp.int32) if output is None else output
        return MSAIcpMerge(nothing, recv, expected_generations, errors)
    if takes_mosaic(backend, recv, num_valid_pages):
        from msa_icp_jax.ops._mosaic.launch import current_launch
        from msa_icp_jax.ops.merge import kernel

        output, recv, errors, expected_generations = kernel.merge_arriving_rows(
            *(recv, num_valid_pages, output, errors, expected_generations, forced),
            current_launch(enable_pdl),
            slot=slot,
            spin_limit=spin_limit,
        )
        return MSAIcpMerge(output, recv, expected_generations, errors)
    tags, slot = None, slot % NUM_SLOTS
    if expected_generations is not None:
        expected = lax.dynamic_index_in_dim(expected_generations, slot, keepdims=False)
        tags = rows.next_generation(expected[:, :tokens])
        expected_generations = lax.dynamic_update_slice(
            vary_as(expected_generations, tags), tags[None], start_at(slot, 0, 0)
        )
    of_slot = lax.dynamic_index_in_dim(recv, slot, keepdims=False)
    output, of_slot, grown = xla.merge_rows(
        *(of_slot, num_valid_pages, output, errors, tags, forced), prefill=False
    )
    assert grown is not None
    recv = lax.dynamic_update_index_in_dim(recv, of_slot, slot, 0)
    return MSAIcpMerge(output, recv, expected_generations, grown)


def _merge_rows(
    backend: Backend, enable_pdl: bool, *arrays: Any
) -> Callable[..., tuple[Array, Array, Any]]:
    """The backend's merge."""
    if not takes_mosaic(backend, *arrays):
        return xla.merge_rows
    from msa_icp_jax.ops._mosaic.launch import current_launch  # on demand: Pallas takes a while
    from msa_icp_jax.ops.merge import kernel

    return functools.partial(kernel.merge_rows, launch=current_launch(enable_pdl))


def _check_recv(recv_slot: Any, tokens: int, *, tagged: bool) -> None:
    row = (rows.TAGGED_WORDS, 2) if tagged else (rows.ROW_WORDS,)
    ranks = Ranks(None)
    checks.array("recv_slot", recv_slot, jnp.int32, ranks, None, AtLeast(tokens), *row)
    world_size, heads = recv_slot.shape[:2]
    checks.one_of("recv_slot.shape[0] (the world size)", world_size, geometry.WORLD_SIZES)
    checks.one_of("recv_slot.shape[1] (heads per rank)", heads, (NUM_HEADS // world_size,))
