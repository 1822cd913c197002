"""Arguments that travel together: checked and built once in a public function, then handed on."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax

from msa_icp_jax import checks, geometry
from msa_icp_jax.checks import AtLeast
from msa_icp_jax.geometry import Forced

if TYPE_CHECKING:
    from msa_icp_jax.arrays import Array, IndexFloat, Int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shard:
    """One rank's share of the paged index-key cache.

    Attributes:
      index_k: float8_e4m3fn or bfloat16 [pages, rows, 128]; this rank's rows of a page start at
        `row_offset`.
      rank: int or traced int32 scalar.
      world_size: 2 or 4.
      page_size: 128 or 256.
      row_offset: first row of the index keys inside a compound page.
    """

    index_k: IndexFloat[Array, "pages R 128"]
    rank: int | Int32[Array, ""]
    world_size: int = dataclasses.field(metadata={"static": True})
    page_size: int = dataclasses.field(metadata={"static": True})
    row_offset: int = dataclasses.field(default=0, metadata={"static": True})

    @property
    def rows(self) -> int:
        """Rows of a page on this rank."""
        return geometry.rows_per_page(self.world_size, self.page_size)

    def candidates(self, forced: Forced) -> Candidates:
        """The candidates among a score plane's columns."""
        scale = geometry.column_scale(self.page_size)
        offset = geometry.column_offset(self.rank, self.world_size, self.page_size)
        return Candidates(forced, scale, offset)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Candidates:
    """What blocks the columns of a score plane are, and which of them always win.

    Attributes:
      forced: those that always win.
      scale: blocks from one column to the next, 1 or 2.
      offset: block of column 0, an int or a traced int32 scalar.
    """

    forced: Forced = dataclasses.field(metadata={"static": True})
    scale: int = dataclasses.field(metadata={"static": True})
    offset: int | Int32[Array, ""]


def check_shard(
    index_k: Any,
    rank: Any,
    world_size: Any,
    page_size: Any,
    row_offset: Any,
    name: str = "index_k",
    dtype: Any = geometry.INDEX_DTYPES,
) -> Shard:
    """The shard of these arguments; raises unless each is of the kind and value that it needs.

    Args:
      index_k, rank, world_size, page_size, row_offset: as in `Shard`.
      name: what the caller calls `index_k`.
      dtype: what `index_k` may hold.
    """
    check_index_k(index_k, world_size, page_size, row_offset, name, dtype)
    rank = checks.index("rank", rank, world_size)
    return Shard(index_k, rank, int(world_size), int(page_size), int(row_offset))


def check_index_k(
    index_k: Any,
    world_size: int,
    page_size: int,
    row_offset: int,
    name: str = "index_k",
    dtype: Any = geometry.INDEX_DTYPES,
) -> None:
    """Raises unless `index_k` is a rank's cache: exactly R rows, or a compound page around them.

    At row_offset 0, rows that are not R but at most 128 (R of another page or world size) are a
    mix-up and refused; other cache data in front of or behind index keys takes more than that.
    """
    geometry.check_world_size(world_size)
    geometry.check_page_size(page_size)
    geometry.check_row_offset(row_offset)
    checks.array(name, index_k, dtype, AtLeast(1), None, geometry.HEAD_DIM)
    rows = geometry.rows_per_page(world_size, page_size)
    have = index_k.shape[1]
    mixed_up = row_offset == 0 and rows != have <= geometry.MIX_UP_ROWS
    if row_offset + rows > have or mixed_up:
        raise ValueError(
            f"{name} must have page_size / world_size = {rows} rows a page (page_size 128 or 256, "
            f"world_size 2 or 4), or compound pages of more than {geometry.MIX_UP_ROWS} rows that "
            f"hold rows [{row_offset}, {row_offset + rows}), got shape {list(index_k.shape)}"
        )
