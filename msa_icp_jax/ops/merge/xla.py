"""Owner merge, the plain definition."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax

from msa_icp_jax import rows
from msa_icp_jax.backend import vary_as
from msa_icp_jax.geometry import TOPK, Forced

if TYPE_CHECKING:
    from msa_icp_jax.arrays import Array, Int32


def merge_rows(
    recv: Int32[Array, "W hpr C *row"],
    num_valid_pages: Int32[Array, " T"],
    output: Int32[Array, "out_rows hpr 16"] | None,
    errors: Int32[Array, " 1"] | None,
    generations: Int32[Array, "hpr T"] | None,
    forced: Forced,
    *,
    prefill: bool,
) -> tuple[
    Int32[Array, "out_rows hpr 16"], Int32[Array, "W hpr C *row"], Int32[Array, " 1"] | None
]:
    """Merges every source rank's candidates of the owned heads.

    Args:
      recv: int32 [W, hpr, >= T, 33], or tagged [W, hpr, >= T, 32, 2].
      num_valid_pages: int32 [T].
      output: int32 [>= T, hpr, 16] to write into; None: a fresh one of T rows.
      errors: int32 [1], grown by one per failed (source, head, token) row; None: not counted.
      generations: int32 [hpr, T], the tags that tagged rows must carry; None for legacy rows.
      forced: blocks that always win.
      prefill: a row without visible blocks answers [0, -1, ...]; flags stay.

    Returns:
      (output, recv with its flags cleared unless tagged or prefill, errors).
    """
    tokens = num_valid_pages.shape[0]
    received = recv[:, :, :tokens]
    if generations is None:
        arrived = received[..., rows.ROW_WORDS - 1] == rows.READY
    else:
        arrived = (received[..., 1] == generations[None, ..., None]).all(-1)
        received = received[..., 0]
    words, ids = (_by_token(x) for x in rows.unpack(received))
    best = _best_ids(words, ids, num_valid_pages[:, None, None], *forced)
    if prefill:
        only_block_zero = jnp.where(jnp.arange(TOPK) == 0, 0, rows.NO_BLOCK)
        best = jnp.where(num_valid_pages[:, None, None] <= 0, only_block_zero, best)
    best = jnp.where(arrived.all(0).T[..., None], best, rows.NO_BLOCK)

    varying = (recv, num_valid_pages)
    if output is None:
        output = best
    else:
        output = lax.dynamic_update_slice(vary_as(output, best), best, (0, 0, 0))
    if errors is not None:
        errors = vary_as(errors, *varying) + jnp.sum(~arrived, dtype=jnp.int32)
    if generations is None and not prefill:
        cleared = jnp.zeros((*received.shape[:-1], 1), jnp.int32)
        recv = lax.dynamic_update_slice(recv, cleared, (0, 0, 0, rows.ROW_WORDS - 1))
    return output, recv, errors


def _by_token(x: Int32[Array, "W hpr T 16"]) -> Int32[Array, "T hpr W*16"]:
    """[W, hpr, T, 16] as [T, hpr, W * 16]: all candidates of a (token, head) in one row."""
    world_size, heads, tokens, _ = x.shape
    return x.transpose(2, 1, 0, 3).reshape(tokens, heads, world_size * TOPK)


def _best_ids(
    words: Int32[Array, "T hpr n"],
    ids: Int32[Array, "T hpr n"],
    num_valid_pages: Int32[Array, "T 1 1"],
    begin: int,
    end: int,
) -> Int32[Array, "T hpr 16"]:
    """The 16 best distinct ids, ascending, of candidates [..., n]."""
    # Side by side, best score first: a block that several ranks hold counts once.
    ids, _, words = lax.sort((ids, ~rows.order_keys(words), words), num_keys=2)
    keys = rows.candidate_keys(words, ids, num_valid_pages, begin, end)
    repeated = ids[..., 1:] == ids[..., :-1]
    repeated = jnp.pad(repeated, [(0, 0)] * (ids.ndim - 1) + [(1, 0)])
    # Duplicates go before the cut, or two winners would share a place.
    _, _, best = rows.take_top16(jnp.where(repeated, rows.INVALID_KEY, keys), words, ids)
    return rows.ascending(best)[0]
