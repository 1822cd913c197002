"""The select in plain Pallas, which the interpreter runs: the plain definition, row by row."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from msa_icp_jax import rows as candidate_rows
from msa_icp_jax.geometry import NUM_HEADS
from msa_icp_jax.ops._mosaic.launch import CTA, Target
from msa_icp_jax.ops.select.kernel import SelectParams, share_out
from msa_icp_jax.ops.select.long_rows import WARPS


def with_few_ctas(params: SelectParams, target: Target) -> SelectParams:
    """The params of the same select on as many CTAs as are to be simulated, a warpgroup each."""
    ctas = min(params.ctas, target.sms)
    return dataclasses.replace(params, warps_per_row=WARPS, ctas=ctas, direct=False)


def select(
    scores: jax.Ref,
    counts: jax.Ref,
    index_offset: jax.Ref,
    *others: jax.Ref,
    shared: jax.Ref,
    params: SelectParams,
) -> None:
    """The kernel's body; `others` are the tags if there are any, and the rows."""
    del shared
    *tags, rows = others
    ids = jnp.arange(params.columns, dtype=jnp.int32) * params.index_scale + index_offset[0]

    @pl.loop(*share_out(lax.axis_index(CTA), params.rows, params.ctas))
    def _(row: jax.Array) -> None:
        token, head = lax.div(row, NUM_HEADS), lax.rem(row, NUM_HEADS)
        words = lax.bitcast_convert_type(scores[token, head], jnp.int32)
        keys = candidate_rows.candidate_keys(words, ids, counts[token], params.begin, params.end)
        found = candidate_rows.pack(*candidate_rows.take_top16(keys, words, ids)[1:])
        rows[head, token] = candidate_rows.tag(found, tags[0][head, token]) if tags else found
