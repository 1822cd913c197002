"""Index-key cache write, the plain definition."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from msa_icp_jax.backend import vary_as
from msa_icp_jax.geometry import rows_per_page


def write_rows(
    index_k: jax.Array,
    new_k: jax.Array,
    slot_mapping: jax.Array,
    *,
    rank: Any,
    world_size: int,
    page_size: int,
    row_offset: int,
) -> jax.Array:
    """Stores the rows of `new_k` that this rank owns; see the public function."""
    rows = rows_per_page(world_size, page_size)
    page, row = slot_mapping // page_size, slot_mapping % page_size
    owned = (slot_mapping >= 0) & (page < index_k.shape[0]) & (row // rows == rank)
    page = jnp.where(owned, page, index_k.shape[0])  # past the end: dropped by the scatter
    varying = (new_k, slot_mapping, rank)
    return lax.platform_dependent(
        vary_as(index_k, *varying),
        vary_as(new_k, index_k, *varying),
        vary_as(page, index_k, *varying),
        vary_as(row_offset + row % rows, index_k, *varying),
        cpu=_rewrite,
        default=_scatter,
    )


def _scatter(index_k: jax.Array, new_k: jax.Array, page: jax.Array, row: jax.Array) -> jax.Array:
    return index_k.at[page, row].set(new_k, mode="drop")


def _rewrite(index_k: jax.Array, new_k: jax.Array, page: jax.Array, row: jax.Array) -> jax.Array:
    """The scatter as one pass over the cache, in place.

    XLA on CPU moves no float8 or bfloat16 data: around a scatter it converts the whole cache, or
    copies it to view it as bytes. A choice between each old code and a new one needs no copy, only
    a map of 4 bytes a row.
    """
    token = jnp.arange(new_k.shape[0], dtype=jnp.int32)
    token_of = jnp.full_like(index_k, -1, jnp.int32, shape=index_k.shape[:2])
    token_of = token_of.at[page, row].set(token, mode="drop")
    codes = jnp.uint8 if index_k.dtype.itemsize == 1 else jnp.uint16
    new = lax.bitcast_convert_type(new_k, codes)[jnp.maximum(token_of, 0)]
    old = lax.bitcast_convert_type(index_k, codes)
    chosen = jnp.where((token_of >= 0)[..., None], new, old)
    return lax.bitcast_convert_type(chosen, index_k.dtype)
