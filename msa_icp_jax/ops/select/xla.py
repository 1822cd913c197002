"""Top16 select, the plain definition."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from msa_icp_jax import rows as candidate_rows
from msa_icp_jax.backend import vary_as
from msa_icp_jax.ops.arguments import Candidates

if TYPE_CHECKING:
    from msa_icp_jax.arrays import Array, Float32, Int32

_TOKENS_AT_ONCE = 512  # bounds the order keys held in memory


# Jitted for eager callers, whose loop would otherwise compile anew in each call.
@jax.jit
def select_rows(
    scores: Float32[Array, "rows 4 K"],
    num_valid_pages: Int32[Array, " T"],
    rows: Int32[Array, "4 carrier_rows 33"] | None,
    generations: Int32[Array, "4 T"] | None,
    candidates: Candidates,
) -> Int32[Array, "4 carrier_rows *row"]:
    """The best 16 candidates of every (token, head) as rows, head-major.

    Args:
      scores: float32 [>= T, 4, K].
      num_valid_pages: int32 [T].
      rows: int32 [4, >= T, 33] to write into, or None for a fresh [4, T, 33].
      generations: int32 [4, T]: return tagged rows [4, T, 32, 2] instead (`rows` is None then).
      candidates: what the columns are, and what always wins.
    """
    tokens, columns = num_valid_pages.shape[0], scores.shape[2]
    ids = jnp.arange(columns, dtype=jnp.int32) * candidates.scale + candidates.offset

    def one_token(score_and_count: tuple[jax.Array, jax.Array]) -> jax.Array:
        token_scores, count = score_and_count
        words = lax.bitcast_convert_type(token_scores, jnp.int32)
        keys = candidate_rows.candidate_keys(words, ids, count, *candidates.forced)
        _, words, best = candidate_rows.take_top16(keys, words, jnp.broadcast_to(ids, words.shape))
        return candidate_rows.pack(words, best)

    token_rows = lax.map(
        one_token, (scores[:tokens], num_valid_pages), batch_size=min(tokens, _TOKENS_AT_ONCE)
    ).swapaxes(0, 1)
    if generations is not None:
        return candidate_rows.tag(token_rows, generations)
    if rows is None:
        return token_rows
    return lax.dynamic_update_slice(vary_as(rows, token_rows), token_rows, (0, 0, 0))
