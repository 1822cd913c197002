"""Top16 select: score columns to candidate rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from msa_icp_jax import checks, geometry
from msa_icp_jax import rows as candidate_rows
from msa_icp_jax.backend import start_at, takes_mosaic
from msa_icp_jax.checks import AtLeast
from msa_icp_jax.geometry import MAX_BLOCKS, MAX_INT32, MAX_SELECT_COLUMNS, NUM_HEADS, NUM_SLOTS
from msa_icp_jax.ops.arguments import Candidates
from msa_icp_jax.ops.select import xla
from msa_icp_jax.typing import Backend

if TYPE_CHECKING:
    from msa_icp_jax.arrays import Array, Float32, Int32


class MSAIcpRows(NamedTuple):
    """Candidate rows to send, by destination rank.

    Attributes:
      rows: int32 [W, hpr, T, 33], or tagged [W, hpr, T, 32, 2] = (word, generation).
      generations: the bumped counters int32 [3, 4, C], or None for legacy rows.
    """

    rows: jax.Array
    generations: jax.Array | None


def msa_icp_topk_select_publish(
    scores: Float32[Array, "rows 4 K"],
    num_valid_pages: Int32[Array, " T"],
    *,
    rank: int | Int32[Array, ""],
    world_size: int,
    heads_per_rank: int,
    force_begin_blocks: int,
    force_end_blocks: int,
    index_scale: int = 1,
    index_offset: int | Int32[Array, ""] = 0,
    generations: Int32[Array, "3 4 C"] | None = None,
    slot: int | Int32[Array, ""] = 0,
    enable_pdl: bool = False,
    backend: Backend = "auto",
) -> MSAIcpRows:
    """Selects every (token, head)'s best 16 local blocks and lays them out by owner rank.

    Forced blocks first, then score descending, then lower id; NaN ranks as -inf, -0.0 equals +0.0,
    raw score bits are stored. Candidates are the columns whose block id lies in
    ``[0, min(num_valid_pages, 8192))``, whatever their score.

    Args:
      scores: float32 [>= T, 4, K], 0 < K <= 8192.
      num_valid_pages: int32 [T], visible blocks of each token (0: padding).
      rank: this rank, an int or a traced int32 scalar (the rows themselves do not depend on it).
      world_size: W, 2 or 4.
      heads_per_rank: hpr = 4 / W.
      force_begin_blocks: blocks at the start that always win.
      force_end_blocks: visible blocks at the end that always win; at most 16 with the former.
      index_scale: blocks from one column to the next, 1 or 2.
      index_offset: block of column 0, 0 or 1; may be a traced int32 scalar.
      generations: int32 [3, 4, C >= T]: the publish counters; tagged rows are returned then.
      slot: slot of this call, taken mod 3; may be a traced int32 scalar.
      enable_pdl: let the kernel's launch overlap its predecessor's end (Mosaic only).
      backend: "auto", "mosaic" or "xla".

    Returns:
      MSAIcpRows; the counters of rows at or past T keep their values.

    Raises:
      TypeError, ValueError: an argument has the wrong dtype, shape or value.
    """
    checks.array("num_valid_pages", num_valid_pages, jnp.int32, None)
    tokens = num_valid_pages.shape[0]
    checks.array("scores", scores, jnp.float32, AtLeast(tokens), NUM_HEADS, AtLeast(1))
    checks.integer("scores.shape[2]", scores.shape[2], 1, MAX_BLOCKS)
    geometry.check_world_size(world_size)
    geometry.check_heads_per_rank(world_size, heads_per_rank)
    checks.index("rank", rank, world_size)
    candidates = _check_candidates(force_begin_blocks, force_end_blocks, index_scale, index_offset)
    checks.flag("enable_pdl", enable_pdl)
    slot = check_generations(generations, slot, tokens)
    return select_by_owner(
        *(scores, num_valid_pages, candidates, generations, slot, world_size),
        enable_pdl=enable_pdl,
        backend=backend,
    )


def msa_icp_topk_select_prefill(
    scores: Float32[Array, "rows 4 K"],
    num_valid_pages: Int32[Array, " T"],
    carrier: Int32[Array, "4 carrier_rows 33"],
    *,
    force_begin_blocks: int = 0,
    force_end_blocks: int = 0,
    index_scale: int = 1,
    index_offset: int | Int32[Array, ""] = 0,
    backend: Backend = "auto",
) -> Int32[Array, "4 carrier_rows 33"]:
    """Selects every (token, head)'s best 16 local blocks into the prefill carrier.

    The order is that of `msa_icp_topk_select_publish`.

    Args:
      scores: float32 [>= T, 4, K], 0 < K < 12288.
      num_valid_pages: int32 [T], visible blocks of each token (0: padding).
      carrier: int32 [4, >= T, 33], head-major candidate rows; donate it to have it reused. Rows at
        or past T keep their bits.
      force_begin_blocks: blocks at the start that always win.
      force_end_blocks: visible blocks at the end that always win; at most 16 with the former.
      index_scale: blocks from one column to the next, 1 or 2.
      index_offset: block of column 0, 0 or 1; may be a traced int32 scalar.
      backend: "auto", "mosaic" or "xla".

    Returns:
      The carrier with rows [0, T) written.

    Raises:
      TypeError, ValueError: an argument has the wrong dtype, shape or value.
    """
    checks.array("num_valid_pages", num_valid_pages, jnp.int32, None)
    tokens = num_valid_pages.shape[0]
    checks.array("scores", scores, jnp.float32, AtLeast(tokens), NUM_HEADS, AtLeast(1))
    checks.integer("scores.shape[2]", scores.shape[2], 1, MAX_SELECT_COLUMNS - 1)
    checks.array(
        "carrier", carrier, jnp.int32, NUM_HEADS, AtLeast(tokens), candidate_rows.ROW_WORDS
    )
    candidates = _check_candidates(force_begin_blocks, force_end_blocks, index_scale, index_offset)
    return select_rows(
        scores, num_valid_pages, carrier, None, candidates, enable_pdl=True, backend=backend
    )


def select_by_owner(
    scores: Float32[Array, "rows 4 K"],
    num_valid_pages: Int32[Array, " T"],
    candidates: Candidates,
    generations: Int32[Array, "3 4 C"] | None,
    slot: int | Int32[Array, ""],
    world_size: int,
    *,
    enable_pdl: bool,
    backend: Backend,
    mark: int | Int32[Array, ""] | None = None,
) -> MSAIcpRows:
    """`msa_icp_topk_select_publish` of these candidates; arguments are taken as checked.

    Args:
      slot: in [0, 3).
      mark: int32 that is added to the tags of the rows, but not to the counters.
      others: as there.
    """
    tags, counters = bump_generations(generations, slot, num_valid_pages.shape[0])
    if tags is not None and mark is not None:
        tags = tags + jnp.asarray(mark, jnp.int32)
    found = select_rows(
        scores, num_valid_pages, None, tags, candidates, enable_pdl=enable_pdl, backend=backend
    )
    return MSAIcpRows(by_owner(found, world_size), counters)


def select_rows(
    scores: Float32[Array, "rows 4 K"],
    num_valid_pages: Int32[Array, " T"],
    carrier: Int32[Array, "4 carrier_rows 33"] | None,
    tags: Int32[Array, "4 T"] | None,
    candidates: Candidates,
    *,
    enable_pdl: bool,
    backend: Backend,
) -> Int32[Array, "4 carrier_rows *row"]:
    """The best 16 candidates of every (token, head), head-major; arguments are taken as checked.

    Args:
      scores: float32 [>= T, 4, K].
      num_valid_pages: int32 [T].
      carrier: int32 [4, >= T, 33] to write into; None: a fresh [4, T, 33].
      tags: int32 [4, T]: return tagged rows [4, T, 32, 2] instead (`carrier` is None then).
      candidates: what the columns are, and what always wins.
      enable_pdl, backend: as for `msa_icp_topk_select_publish`.
    """
    arrays = [scores, num_valid_pages] if carrier is None else [scores, num_valid_pages, carrier]
    on_mosaic = takes_mosaic(backend, *arrays)
    if num_valid_pages.shape[0] == 0:
        return _no_rows(tags) if carrier is None else carrier
    if not on_mosaic:
        return xla.select_rows(scores, num_valid_pages, carrier, tags, candidates)
    from msa_icp_jax.ops._mosaic.launch import current_launch  # on demand: Pallas takes a while
    from msa_icp_jax.ops.select import kernel

    launch = current_launch(enable_pdl)
    return kernel.select_rows(scores, num_valid_pages, carrier, tags, candidates, launch)


def bump_generations(
    generations: Int32[Array, "3 4 C"] | None, slot: int | Int32[Array, ""], tokens: int
) -> tuple[Int32[Array, "4 T"] | None, Int32[Array, "3 4 C"] | None]:
    """The tags of this call's rows [heads, tokens] and the counters with those advanced.

    Args:
      generations: int32 [3, heads, C >= tokens], or None, which gives None twice.
      slot: in [0, 3).
      tokens: T.
    """
    if generations is None:
        return None, None
    start = start_at(slot, 0, 0)
    current = lax.dynamic_slice(generations, start, (1, generations.shape[1], tokens))
    tags = candidate_rows.next_generation(current)
    return tags[0], lax.dynamic_update_slice(generations, tags, start)


def check_generations(generations: Any, slot: int | Int32[Array, ""], tokens: int) -> Any:
    """The slot mod 3; raises unless it and the publish counters (or None) are as they must be."""
    slot = check_slot(slot)
    if generations is not None:
        checks.array("generations", generations, jnp.int32, NUM_SLOTS, NUM_HEADS, AtLeast(tokens))
    return slot


def check_slot(slot: int | Int32[Array, ""]) -> Any:
    """The slot mod 3; raises unless `slot` is a non-negative int or a traced int32 scalar."""
    return checks.index("slot", slot, MAX_INT32 + 1) % NUM_SLOTS


def by_owner(head_rows: Int32[Array, "4 T *row"], world_size: int) -> Int32[Array, "W hpr T *row"]:
    """[4, T, ...] head-major rows as [W, hpr, T, ...]: head h belongs to rank h // hpr."""
    return head_rows.reshape(world_size, NUM_HEADS // world_size, *head_rows.shape[1:])


def _no_rows(tags: Int32[Array, "4 T"] | None) -> Int32[Array, "4 0 *row"]:
    """The rows of no token at all."""
    found = candidate_rows.empty_rows(NUM_HEADS, 0)
    return found if tags is None else candidate_rows.tag(found, tags)


def _check_candidates(begin: Any, end: Any, index_scale: Any, index_offset: Any) -> Candidates:
    forced = geometry.check_forced("force_begin_blocks", begin, "force_end_blocks", end)
    scale = checks.one_of("index_scale", index_scale, (1, 2))
    return Candidates(forced, scale, checks.index("index_offset", index_offset, scale))
