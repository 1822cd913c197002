"""Top16 select on Hopper: one launch, a warp or a warpgroup a row."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from msa_icp_jax.geometry import NUM_HEADS, cdiv
from msa_icp_jax.ops._mosaic import top16
from msa_icp_jax.ops._mosaic.launch import CTA, Target, launch
from msa_icp_jax.rows import ROW_WORDS, TAGGED_WORDS

_WARP_COLUMNS = 2048  # what one warp can hold of a row: 64 registers a lane
_WARP_ROWS_PER_SM = 16  # below it an SM has too few warps, and four share a row


def select_rows(
    scores: jax.Array,
    num_valid_pages: jax.Array,
    rows: jax.Array | None,
    generations: jax.Array | None,
    *,
    index_scale: int,
    index_offset: Any,
    force_begin_blocks: int,
    force_end_blocks: int,
    enable_pdl: bool,
    target: Target,
) -> jax.Array:
    """The best 16 candidates of every (token, head) as rows, head-major.

    Args:
      scores: float32 [>= T, 4, K].
      num_valid_pages: int32 [T], T >= 1.
      rows: int32 [4, >= T, 33] to write into, or None for a fresh [4, T, 33].
      generations: int32 [4, T]: return tagged rows [4, T, 32, 2] instead (`rows` is None then).
      index_scale: blocks from one column to the next, 1 or 2.
      index_offset: block of column 0, an int or a traced scalar.
      force_begin_blocks: blocks at the start that always win.
      force_end_blocks: visible blocks at the end that always win.
      enable_pdl: let the launch overlap the preceding kernel's end.
      target: the machine to build for.
    """
    tokens, columns = num_valid_pages.shape[0], scores.shape[2]
    facts = top16.Select(
        tokens=tokens,
        columns=columns,
        index_scale=index_scale,
        begin=force_begin_blocks,
        end=force_end_blocks,
        tagged=generations is not None,
        team=_team(tokens * NUM_HEADS, columns, target),
    )
    operands = [scores, num_valid_pages, jnp.asarray(index_offset, jnp.int32).reshape(1)]
    if generations is not None:
        operands.append(generations)
    turns = cdiv(facts.rows, facts.rows_at_once)
    ctas = min(turns, target.sms) if target.interpret else turns
    run = functools.partial(
        launch,
        functools.partial(_kernel, facts=facts, ctas=ctas, pdl=enable_pdl, target=target),
        name="select_rows",
        target=target,
        grid=(ctas,),
        scratch_types={"shared": plgpu.SMEM((top16.WARPS, top16.TEAM_WORDS), jnp.int32)},
    )
    if rows is None:
        shape = (TAGGED_WORDS, 2) if facts.tagged else (ROW_WORDS,)
        fresh = jax.ShapeDtypeStruct((NUM_HEADS, tokens, *shape), jnp.int32)
        return run(out_type=fresh)(*operands)
    written = jax.new_ref(rows)
    run()(*operands, written)
    return jax.freeze(written)


def _team(rows: int, columns: int, target: Target) -> int:
    """Warps that share a row."""
    many = rows >= target.sms * _WARP_ROWS_PER_SM
    return 1 if many and columns <= _WARP_COLUMNS else top16.WARPS


def _kernel(
    scores: Any,
    counts: Any,
    index_offset: Any,
    *others: Any,
    shared: Any,
    facts: top16.Select,
    ctas: int,
    pdl: bool,
    target: Target,
) -> None:
    *tags, rows = others
    if pdl and not target.interpret:
        plgpu.griddepcontrol_launch_dependents()
        plgpu.griddepcontrol_wait()

    def select(turn: Any) -> None:
        top16.select_rows(
            scores,
            counts,
            index_offset,
            tags[0] if tags else None,
            rows,
            shared,
            turn,
            facts,
            target.interpret,
        )

    if ctas * facts.rows_at_once >= facts.rows:
        select(lax.axis_index(CTA))
        return

    @pl.loop(0, cdiv(facts.rows, ctas * facts.rows_at_once))
    def _(i: Any) -> None:
        select(i * ctas + lax.axis_index(CTA))
