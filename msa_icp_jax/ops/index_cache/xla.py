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
    # Scattered as bytes: XLA on CPU would convert the whole float8 cache around a float8 scatter.
    stored = lax.bitcast_convert_type(vary_as(index_k, new_k, slot_mapping, rank), jnp.uint8)
    stored = stored.at[page, row_offset + row % rows].set(
        lax.bitcast_convert_type(new_k, jnp.uint8), mode="drop"
    )
    return lax.bitcast_convert_type(stored, index_k.dtype)
