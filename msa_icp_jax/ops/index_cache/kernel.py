"""Index-key cache write on Hopper: a thread copies 16 bytes of a token's key."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from msa_icp_jax.geometry import HEAD_DIM, cdiv
from msa_icp_jax.ops._mosaic import lanes
from msa_icp_jax.ops._mosaic.lanes import Context, Lane, Memory, Value, Words
from msa_icp_jax.ops._mosaic.launch import (
    CTA,
    Launch,
    scalar_operand,
    writable,
    written,
)
from msa_icp_jax.ops.arguments import Shard

if TYPE_CHECKING:
    from msa_icp_jax.arrays import Array, IndexFloat, Int32

_THREADS = 128  # of a CTA
_THREAD_WORDS = 4  # of a row, that a thread copies


@dataclasses.dataclass(frozen=True)
class WriteParams:
    """The static parameters of one write.

    Attributes:
      tokens: new keys.
      pages: pages of the cache.
      pitch: rows from one page to the next.
      page_size: positions of a page.
      rows: rows of a page that a rank holds.
      row_offset: where they begin inside the page.
      row_words: 32-bit words of a row.
    """

    tokens: int
    pages: int
    pitch: int
    page_size: int
    rows: int
    row_offset: int
    row_words: int

    @property
    def threads(self) -> int:
        """Threads that copy a token."""
        return self.row_words // _THREAD_WORDS

    @property
    def at_once(self) -> int:
        """Tokens that a CTA copies at once."""
        return _THREADS // self.threads


def write_rows(
    shard: Shard,
    new_k: IndexFloat[Array, "N 128"],
    slot_mapping: Int32[Array, " N"],
    launch: Launch,
) -> IndexFloat[Array, "pages R 128"]:
    """Stores the rows of `new_k` that this rank owns; in place where its keys are donated.

    Args:
      shard: the cache.
      new_k: [N, 128] of the cache's dtype, N >= 1.
      slot_mapping: int32 [N], ``page * page_size + row``; slots outside the cache are skipped.
      launch: how to launch.
    """
    params = WriteParams(
        tokens=new_k.shape[0],
        pages=shard.index_k.shape[0],
        pitch=shard.index_k.shape[1],
        page_size=shard.page_size,
        rows=shard.rows,
        row_offset=shard.row_offset,
        row_words=HEAD_DIM * shard.index_k.dtype.itemsize // 4,
    )
    ctas = cdiv(params.tokens, params.at_once)
    body = functools.partial(_kernel, params=params)
    if launch.target.interpret:
        from msa_icp_jax.ops.index_cache import interpret  # on demand: only tests need it

        ctas = min(ctas, launch.target.sms)
        body = functools.partial(interpret.write, params=params, ctas=ctas)
    cache = writable(shard.index_k)
    launch.kernel(body, name="write_index_k", grid=(ctas,))(
        new_k, slot_mapping, scalar_operand(shard.rank), cache
    )
    return written(cache)


def _kernel(
    new_k: jax.Ref, slots: jax.Ref, rank: jax.Ref, cache: jax.Ref, *, params: WriteParams
) -> None:
    """A CTA copies the keys of `at_once` tokens, 16 bytes a thread."""

    @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * 4, plgpu.Layout.WG_SPLAT))
    def copy(_: Context, *arguments: Memory | Value) -> None:
        *refs, first = arguments
        new_k, slots, rank, cache = (Words.of(ref) for ref in refs)
        _copy_token(new_k, slots, rank, cache, lanes.scalar(first), params)

    copy(new_k, slots, rank, cache, lax.axis_index(CTA) * params.at_once)


def _copy_token(
    new_k: Words, slots: Words, rank: Words, cache: Words, first: Lane, params: WriteParams
) -> None:
    """This thread's 16 bytes."""
    threads = params.threads
    token = first + (lanes.thread() >> (threads.bit_length() - 1))
    word = (lanes.thread() & (threads - 1)) * _THREAD_WORDS
    with lanes.when(token < params.tokens):
        slot = (slots + token).load()
        page = slot >> (params.page_size.bit_length() - 1)
        local = (slot & (params.page_size - 1)) - rank.load() * params.rows
        owned = (local >= 0) & (local < params.rows)
        with lanes.when((slot >= 0) & (page < params.pages) & owned):
            row = page.to_i64() * params.pitch + (local + params.row_offset).to_i64()
            key = (new_k + (token.to_i64() * params.row_words + word.to_i64())).load_vector(
                lanes.i32(), _THREAD_WORDS
            )
            (cache + (row * params.row_words + word.to_i64())).store_vector(key)
