"""The index-key write in plain Pallas, which the interpreter runs: token by token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from msa_icp_jax.geometry import cdiv
from msa_icp_jax.ops._mosaic.launch import CTA
from msa_icp_jax.ops.index_cache.kernel import WriteParams


def write(
    new_k: jax.Ref, slots: jax.Ref, rank: jax.Ref, cache: jax.Ref, *, params: WriteParams, ctas: int
) -> None:
    """The kernel's body on `ctas` CTAs, which take equal parts of the tokens."""
    share = cdiv(params.tokens, ctas)
    first = lax.axis_index(CTA) * share

    @pl.loop(first, jnp.minimum(first + share, params.tokens))
    def _(token: jax.Array) -> None:
        slot = slots[token]
        page, row = lax.div(slot, params.page_size), lax.rem(slot, params.page_size)
        local = row - rank[0] * params.rows

        @pl.when((slot >= 0) & (page < params.pages) & (local >= 0) & (local < params.rows))
        def _() -> None:
            cache[page, params.row_offset + local] = new_k[token]
