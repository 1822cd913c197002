"""Writing index keys into a rank's share of the paged cache."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from msa_icp_jax import checks
from msa_icp_jax.backend import takes_mosaic
from msa_icp_jax.geometry import HEAD_DIM
from msa_icp_jax.ops.arguments import check_shard
from msa_icp_jax.ops.index_cache import xla
from msa_icp_jax.typing import Backend

if TYPE_CHECKING:
    from msa_icp_jax.arrays import Array, IndexFloat, Int32


def msa_icp_write_index_k(
    index_k: IndexFloat[Array, "pages R 128"],
    new_k: IndexFloat[Array, "N 128"],
    slot_mapping: Int32[Array, " N"],
    *,
    rank: int | Int32[Array, ""],
    world_size: int,
    page_size: int,
    row_offset: int = 0,
    backend: Backend = "auto",
) -> IndexFloat[Array, "pages R 128"]:
    """Stores new index keys at their slots, each on the rank that owns its row.

    Token i goes to flat slot ``page * page_size + row``; rank r of W owns rows ``[r R, (r + 1) R)``
    of every page, ``R = page_size / W``, and keeps row ``row - r R`` of page ``page``. Slot -1 and
    every other slot outside the cache is skipped. Two tokens with the same slot: one of them stays.

    Args:
      index_k: float8_e4m3fn or bfloat16 [pages, R, 128], or compound pages of more rows whose R
        rows start at `row_offset`. Donate it to have it written in place.
      new_k: [N, 128], the dtype of `index_k`.
      slot_mapping: int32 [N].
      rank: this rank, an int or a traced int32 scalar.
      world_size: W, 2 or 4.
      page_size: 128 or 256.
      row_offset: first row inside a compound page, a multiple of 8.
      backend: "auto", "mosaic" or "xla".

    Returns:
      The cache, of the same dtype and shape.

    Raises:
      TypeError, ValueError: an argument has the wrong dtype, shape or value.
    """
    shard = check_shard(index_k, rank, world_size, page_size, row_offset)
    checks.array("new_k", new_k, index_k.dtype, None, HEAD_DIM)
    checks.array("slot_mapping", slot_mapping, jnp.int32, new_k.shape[0])
    write_rows = _write_rows(backend, index_k, new_k, slot_mapping)
    if new_k.shape[0] == 0:
        return index_k
    return write_rows(shard, new_k, slot_mapping)


def _write_rows(backend: Backend, *arrays: Any) -> Callable[..., jax.Array]:
    """The backend's cache write."""
    if not takes_mosaic(backend, *arrays):
        return xla.write_rows
    from msa_icp_jax.ops._mosaic.launch import current_launch  # on demand: Pallas takes a while
    from msa_icp_jax.ops.index_cache import kernel

    return functools.partial(kernel.write_rows, launch=current_launch(pdl=False))
