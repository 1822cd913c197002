"""Index-key cache write, the plain definition."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax import lax

from msa_icp_jax.backend import vary_as
from msa_icp_jax.ops.arguments import Shard

if TYPE_CHECKING:
    from msa_icp_jax.arrays import Array, Bool, IndexFloat, Int32


def write_rows(
    shard: Shard, new_k: IndexFloat[Array, "N 128"], slot_mapping: Int32[Array, " N"]
) -> IndexFloat[Array, "pages R 128"]:
    """Stores the rows of `new_k` that this rank owns; see the public function."""
    index_k, rows = shard.index_k, shard.rows
    page, row = slot_mapping // shard.page_size, slot_mapping % shard.page_size
    owned = (slot_mapping >= 0) & (page < index_k.shape[0]) & (row // rows == shard.rank)
    varying = (new_k, slot_mapping, shard.rank)
    return lax.platform_dependent(
        vary_as(index_k, *varying),
        vary_as(new_k, index_k, *varying),
        vary_as(jnp.where(owned, page, 0), index_k, *varying),
        vary_as(shard.row_offset + row % rows, index_k, *varying),
        vary_as(owned, index_k, *varying),
        cpu=_rewrite,
        default=_scatter,
    )


def _scatter(
    index_k: IndexFloat[Array, "pages R 128"],
    new_k: IndexFloat[Array, "N 128"],
    page: Int32[Array, " N"],
    row: Int32[Array, " N"],
    owned: Bool[Array, " N"],
) -> IndexFloat[Array, "pages R 128"]:
    """A token that is not stored writes what another one does; if none is, the row that is there.

    So every index is in range, and no row is written that would not be.
    """
    some = jnp.argmax(owned)  # the first that is stored
    there = index_k[page[some], row[some]]
    value = jnp.where(owned[some], new_k[some], there)
    page, row = jnp.where(owned, page, page[some]), jnp.where(owned, row, row[some])
    return index_k.at[page, row].set(jnp.where(owned[:, None], new_k, value[None]))


def _rewrite(
    index_k: IndexFloat[Array, "pages R 128"],
    new_k: IndexFloat[Array, "N 128"],
    page: Int32[Array, " N"],
    row: Int32[Array, " N"],
    owned: Bool[Array, " N"],
) -> IndexFloat[Array, "pages R 128"]:
    """The scatter as one pass over the cache, in place.

    XLA on CPU moves no float8 or bfloat16 data: around a scatter it converts the whole cache, or
    copies it to view it as bytes. A choice between each old code and a new one needs no copy, only
    a map of 4 bytes a row, with a page behind the last one for tokens that are not stored.
    """
    pages, rows, _ = index_k.shape
    token = jnp.arange(new_k.shape[0], dtype=jnp.int32)
    token_of = vary_as(jnp.full((pages + 1, rows), -1, jnp.int32), index_k)
    token_of = token_of.at[jnp.where(owned, page, pages), row].set(token)[:pages]
    codes = jnp.uint8 if index_k.dtype.itemsize == 1 else jnp.uint16
    new = lax.bitcast_convert_type(new_k, codes)[jnp.maximum(token_of, 0)]
    old = lax.bitcast_convert_type(index_k, codes)
    chosen = jnp.where((token_of >= 0)[..., None], new, old)
    return lax.bitcast_convert_type(chosen, index_k.dtype)
