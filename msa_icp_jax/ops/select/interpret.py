"""The select in plain Pallas, which the interpreter runs: the plain definition, row by row."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from msa_icp_jax import rows as candidate_rows
from msa_icp_jax.geometry import NUM_HEADS
from msa_icp_jax.ops._mosaic.launch import CTA, Target
from msa_icp_jax.ops.select.kernel import Select, share_out
from msa_icp_jax.ops.select.long_rows import WARPS


def with_few_ctas(facts: Select, target: Target) -> Select:
    """The facts of the same select on as many CTAs as are to be simulated, a warpgroup each."""
    ctas = min(facts.ctas, target.sms)
    return dataclasses.replace(facts, team=WARPS, ctas=ctas, direct=False)


def select(
    scores: Any, counts: Any, index_offset: Any, *others: Any, shared: Any, facts: Select
) -> None:
    """The kernel's body; `others` are the tags if there are any, and the rows."""
    del shared
    *tags, rows = others
    ids = jnp.arange(facts.columns, dtype=jnp.int32) * facts.index_scale + index_offset[0]

    @pl.loop(*share_out(lax.axis_index(CTA), facts.rows, facts.ctas))
    def _(row: Any) -> None:
        token, head = lax.div(row, NUM_HEADS), lax.rem(row, NUM_HEADS)
        words = lax.bitcast_convert_type(scores[token, head], jnp.int32)
        keys = candidate_rows.candidate_keys(words, ids, counts[token], facts.begin, facts.end)
        found = candidate_rows.pack(*candidate_rows.take_top16(keys, words, ids)[1:])
        rows[head, token] = candidate_rows.tag(found, tags[0][head, token]) if tags else found
