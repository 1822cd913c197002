"""Candidate rows and the one total order that select and merge share.

A candidate row is 33 int32 words: 16 raw fp32 score words, the 16 block ids they belong to
(ascending), and the ready flag 1. With fewer than 16 candidates the tail is ``(-inf bits, -1)``.
A *tagged* row is 32 pairs ``(word, generation)``: the first 32 words, each carrying the generation
of the call that wrote it (in memory the little-endian int64 ``generation << 32 | word``).

The order: forced blocks first, then score descending, then lower id; NaN ranks as -inf and -0.0
equals +0.0. It is carried by one int32 key per candidate, so no 64-bit integers are needed: among
equal keys the candidate that stands first wins, and candidates always stand in ascending id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax

from msa_icp_jax.geometry import MAX_BLOCKS, TOPK, cdiv, round_up

if TYPE_CHECKING:
    from msa_icp_jax.arrays import Array, Int32

ROW_WORDS = 2 * TOPK + 1
TAGGED_WORDS = 2 * TOPK
READY = 1
NO_BLOCK = -1

NEG_INF_WORD = -0x800000  # the bits of float32 -inf as int32
NEG_ZERO_WORD = -0x80000000
FORCED_KEY = 0x7FFFFFFF  # above the key of +inf
INVALID_KEY = -0x80000000  # below the key of -inf

_SORTED = 128  # keys of the widest sort


def order_keys(words: Int32[Array, "*rows n"]) -> Int32[Array, "*rows n"]:
    """Maps fp32 bits (int32) to int32 keys that order as the scores do.

    NaN of either sign becomes the key of -inf, -0.0 that of +0.0. For the rest, non-negative floats
    order as their bits do and negative ones in reverse, hence the flip of the low 31 bits.
    """
    is_nan = (words & 0x7FFFFFFF) > 0x7F800000
    words = jnp.where(is_nan, NEG_INF_WORD, words)
    words = jnp.where(words == NEG_ZERO_WORD, 0, words)
    return words ^ ((words >> 31) & 0x7FFFFFFF)


def candidate_keys(
    words: Int32[Array, "*#shape"],
    ids: Int32[Array, "*#shape"],
    num_valid_pages: Int32[Array, "*#shape"],
    begin: int,
    end: int,
) -> Int32[Array, "*#shape"]:
    """Keys of candidates: INVALID_KEY for blocks out of sight, FORCED_KEY in a forced window.

    Args:
      words: int32 score bits.
      ids: int32 block ids, broadcastable against `words`.
      num_valid_pages: int32 visible blocks, broadcastable; negative reads as 0. The forced-end
        window is taken from the raw count, candidates stop at block 8191.
      begin: forced blocks at the start.
      end: forced blocks at the end of the visible ones.
    """
    count = jnp.maximum(num_valid_pages, 0)
    valid = (ids >= 0) & (ids < jnp.minimum(count, MAX_BLOCKS))
    forced = (ids < begin) | (ids >= count - end)
    return jnp.where(valid, jnp.where(forced, FORCED_KEY, order_keys(words)), INVALID_KEY)


def top16(keys: Int32[Array, "*rows n"]) -> Int32[Array, "*rows 16"]:
    """Positions of the 16 largest keys of the last axis; among equal keys the first ones.

    No sort is wider than 128 keys. Longer rows are cut into at most 128 groups: the 16 groups with
    the largest maxima hold all 16 winners, since any key outside them is beaten by 16 group maxima
    that are larger or stand earlier. Of their members the winners are found in the same way.
    """
    size = keys.shape[-1]
    if size <= _SORTED:
        return lax.top_k(_pad_last(keys, max(size, TOPK)), TOPK)[1]
    group = 1 << (cdiv(size, _SORTED) - 1).bit_length()
    groups = _pad_last(keys, round_up(size, group)).reshape(*keys.shape[:-1], -1, group)
    best = jnp.sort(top16(groups.max(-1)), axis=-1)
    members = jnp.take_along_axis(groups, best[..., None], axis=-2)
    inside = top16(members.reshape(*best.shape[:-1], TOPK * group))
    return jnp.take_along_axis(best, inside // group, axis=-1) * group + inside % group


def take_top16(
    keys: Int32[Array, "*rows n"], words: Int32[Array, "*rows n"], ids: Int32[Array, "*rows n"]
) -> tuple[Int32[Array, "*rows 16"], Int32[Array, "*rows 16"], Int32[Array, "*rows 16"]]:
    """The 16 best (keys, words, ids) of the last axis; the tail is (INVALID_KEY, -inf, -1)."""
    fill = TOPK - keys.shape[-1]
    if fill > 0:
        keys, words, ids = (_pad_last(x, TOPK) for x in (keys, words, ids))
    position = top16(keys)
    keys, words, ids = (jnp.take_along_axis(x, position, axis=-1) for x in (keys, words, ids))
    live = keys != INVALID_KEY
    return keys, jnp.where(live, words, NEG_INF_WORD), jnp.where(live, ids, NO_BLOCK)


def ascending(
    ids: Int32[Array, "*rows n"], *along: Int32[Array, "*rows n"]
) -> tuple[Int32[Array, "*rows n"], ...]:
    """Sorts the last axis by id, NO_BLOCK last, and `along` with it."""
    order = jnp.where(ids == NO_BLOCK, FORCED_KEY, ids)
    _, ids, *along_sorted = lax.sort((order, ids, *along), num_keys=1)
    return (ids, *along_sorted)


def pack(words: Int32[Array, "*rows n"], ids: Int32[Array, "*rows n"]) -> Int32[Array, "*rows 33"]:
    """Candidate rows [..., 33] from score words and ids [..., 16] in any order."""
    ids, words = ascending(ids, words)
    ready = jnp.full((*ids.shape[:-1], 1), READY, jnp.int32)
    return jnp.concatenate([words, ids, ready], axis=-1)


def unpack(
    rows: Int32[Array, "*rows words"],
) -> tuple[Int32[Array, "*rows 16"], Int32[Array, "*rows 16"]]:
    """Score words and ids [..., 16] of rows whose last axis holds at least 32 words."""
    return rows[..., :TOPK], rows[..., TOPK : 2 * TOPK]


def tag(
    rows: Int32[Array, "*rows words"], generations: Int32[Array, "*rows"]
) -> Int32[Array, "*rows 32 2"]:
    """Tagged rows [..., 32, 2] of candidate rows [..., 33] and their generations [...]."""
    words = rows[..., :TAGGED_WORDS]
    return jnp.stack([words, jnp.broadcast_to(generations[..., None], words.shape)], axis=-1)


def next_generation(generations: Int32[Array, "*rows"]) -> Int32[Array, "*rows"]:
    """The generation after each of `generations` (int32): wraps around and skips 0."""
    following = generations + 1
    return jnp.where(following == 0, 1, following)


def empty_rows(*shape: int) -> Int32[Array, "*rows 33"]:
    """Candidate rows [*shape, 33] without a candidate."""
    lead = (*shape, TOPK)
    return pack(jnp.full(lead, NEG_INF_WORD, jnp.int32), jnp.full(lead, NO_BLOCK, jnp.int32))


def _pad_last(x: Int32[Array, "*rows n"], size: int) -> Int32[Array, "*rows size"]:
    """Pads the last axis to `size` with INVALID_KEY, which never wins."""
    width = [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])]
    return jnp.pad(x, width, constant_values=INVALID_KEY)
