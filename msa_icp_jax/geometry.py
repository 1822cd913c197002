"""The static facts of one indexer configuration, every size derived from them, every limit.

Terms. A *block* is 128 consecutive key positions of one request. A *page* is `page_size`
consecutive positions, stored at the same physical page on every rank; rank r of W holds rows
``[r R, (r + 1) R)`` of each page, ``R = page_size / W``. A *column* of a score plane is one page of
the request: with 128-token pages column c is block c; with 256-token pages a rank's rows of a page
lie in one block, ``2 c + (2 r) // W`` (the *compact* layout).
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, get_args

from msa_icp_jax import checks
from msa_icp_jax.typing import IndexDtype

NUM_HEADS = 4
HEAD_DIM = 128
BLOCK_SIZE = 128
TOPK = 16
MAX_BLOCKS = 8192  # ids at or past it are never candidates: 1 Mi tokens of context
NUM_SLOTS = 3
WORLD_SIZES = (2, 4)
PAGE_SIZES = (128, 256)
INDEX_DTYPES = get_args(IndexDtype)  # of index keys and queries, both alike
MAX_QUERY_ROWS = 32  # query tokens x heads of one decode request
MAX_SELECT_COLUMNS = 12288  # exclusive bound of a prefill score plane's columns
COLUMN_MULTIPLE = 4  # decode writes and sizes score columns in groups of four
WINDOW_SCORE_BYTES = 256 << 20  # bound of the prefill score scratch, see `window_tokens`
MAX_INT32 = 2**31 - 1  # bound of every limit: positions, tokens and rows are int32 on the device
MAX_SUM = 2**30 - 1  # where prefix sums of lengths saturate: two such terms still fit an int32
MAX_TOKENS = MAX_SELECT_COLUMNS * max(PAGE_SIZES)  # prefill never scores a position past it
ROW_STEP = 8  # rows: index keys in a compound page begin at a multiple of 1 KiB (bfloat16: 2 KiB)
MAX_ROW_OFFSET = 2**31 - 256  # the rows of a page behind it still have int32 numbers
MIX_UP_ROWS = max(PAGE_SIZES) // min(WORLD_SIZES)  # most that a rank can hold of a plain page


def cdiv(a: Any, b: int) -> Any:
    """Ceiling division of ints or integer arrays (in this form int32 never overflows)."""
    return -(-a // b)


def round_up(a: Any, b: int) -> Any:
    """The smallest multiple of b that is at least a."""
    return cdiv(a, b) * b


def check_world_size(world_size: int) -> int:
    """Raises unless `world_size` is 2 or 4."""
    hint = ""
    if isinstance(world_size, int) and world_size > max(WORLD_SIZES):
        hint = (
            ": a group has as many ranks as heads at most; tensor parallelism of 8 is two groups "
            "of 4 side by side, a pair of ranks to each head (docs/scaling.md)"
        )
    elif world_size == 1:
        hint = ": on one device, a plan of 2 runs its ranks there in a program without a mesh"
    return checks.one_of("world_size", world_size, WORLD_SIZES, hint=hint)


def check_page_size(page_size: int) -> int:
    """Raises unless `page_size` is 128 or 256."""
    return checks.one_of("page_size", page_size, PAGE_SIZES)


def check_index_dtype(index_dtype: IndexDtype) -> IndexDtype:
    """Raises unless `index_dtype` is "float8_e4m3fn" or "bfloat16"."""
    hint = "" if isinstance(index_dtype, str) else ": give the dtype's name, a str"
    return checks.one_of("index_dtype", index_dtype, INDEX_DTYPES, hint=hint)


def check_num_heads(name: str, value: int) -> int:
    """Raises unless `value`, the argument called `name`, is 4."""
    return checks.one_of(name, value, (NUM_HEADS,))


def check_heads_per_rank(world_size: int, heads_per_rank: int) -> int:
    """Raises unless the ranks' heads add up to the 4 index heads."""
    return checks.one_of("heads_per_rank", heads_per_rank, (NUM_HEADS // world_size,))


def check_query_len(
    name: str, value: int, high: int = MAX_QUERY_ROWS // NUM_HEADS, *, limit: str = ""
) -> int:
    """Raises unless a decode query length lies in [1, high]; `limit` is what sets `high`."""
    return checks.integer(name, value, 1, high, limit=limit)


class Forced(NamedTuple):
    """Blocks of a query that always win.

    Attributes:
      begin: so many at the start of the context.
      end: so many visible ones at the end.
    """

    begin: int
    end: int


def check_forced(begin_name: str, begin: int, end_name: str, end: int) -> Forced:
    """Raises unless both forced block counts are >= 0 and at most 16 together."""
    begin = checks.integer(begin_name, begin, 0, TOPK)
    end = checks.integer(end_name, end, 0, TOPK)
    if begin + end > TOPK:
        raise ValueError(
            f"{begin_name} + {end_name} must be at most {TOPK}, got {begin} + {end} = {begin + end}"
        )
    return Forced(begin, end)


def rows_per_page(world_size: int, page_size: int) -> int:
    """R, the rows of every page that one rank holds."""
    return page_size // world_size


def column_scale(page_size: int) -> int:
    """index_scale: blocks from one column to the next."""
    return page_size // BLOCK_SIZE


def column_offset(rank: Any, world_size: int, page_size: int) -> Any:
    """index_offset: the block of column 0 (rank may be a traced int32 scalar)."""
    return (column_scale(page_size) - 1) * ((2 * rank) // world_size)


def msa_icp_decode_score_columns(max_model_len: int, page_size: int) -> int:
    """Columns of a decode score plane: ``min(8192, 4 ceil(max_model_len / (4 page_size)))``.

    Args:
      max_model_len: longest context, in tokens, >= 1.
      page_size: 128 or 256.

    Raises:
      ValueError, TypeError: an argument is outside its range.
    """
    max_model_len = checks.integer("max_model_len", max_model_len, 1)
    page_size = check_page_size(page_size)
    return min(MAX_BLOCKS, round_up(cdiv(max_model_len, page_size), COLUMN_MULTIPLE))


@dataclasses.dataclass(frozen=True)
class IndexerGeometry:
    """The validated static facts of one indexer; hashable, so it can be a static jit argument.

    Attributes:
      world_size: ranks of the indexer context parallel group, 2 or 4.
      num_index_heads: 4.
      page_size: tokens of a page, 128 or 256.
      init_blocks, local_blocks: forced begin and end blocks of a query, at most 16 together.
      max_decode_tokens: query tokens of one decode step.
      max_decode_query_len: query tokens of one decode request, 1 to 8.
      max_num_batched_tokens: query tokens of one prefill step.
      max_num_seqs: requests or segments of one step.
      max_model_len: longest context in tokens.
      num_sparse_layers: sparse layers that share the receive storage's three slots.
      row_offset: first index-key row inside a wider (compound) page, a multiple of 8.
      index_dtype: of index keys and queries, "float8_e4m3fn" or "bfloat16".

    Raises:
      ValueError, TypeError: an attribute is outside its range.
    """

    world_size: int
    num_index_heads: int
    page_size: int
    init_blocks: int
    local_blocks: int
    max_decode_tokens: int
    max_decode_query_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    num_sparse_layers: int
    row_offset: int = 0
    index_dtype: IndexDtype = "float8_e4m3fn"

    def __post_init__(self) -> None:
        """Checks every attribute once, here, and keeps each as a Python int."""
        init, local = check_forced(
            "init_blocks", self.init_blocks, "local_blocks", self.local_blocks
        )
        checked: dict[str, Any] = {
            "world_size": check_world_size(self.world_size),
            "num_index_heads": check_num_heads("num_index_heads", self.num_index_heads),
            "page_size": check_page_size(self.page_size),
            "init_blocks": init,
            "local_blocks": local,
            "max_decode_query_len": check_query_len(
                "max_decode_query_len", self.max_decode_query_len
            ),
            "row_offset": check_row_offset(self.row_offset),
            "index_dtype": check_index_dtype(self.index_dtype),
        }
        for name in (
            "max_decode_tokens",
            "max_num_batched_tokens",
            "max_num_seqs",
            "max_model_len",
            "num_sparse_layers",
        ):
            checked[name] = checks.integer(name, getattr(self, name), 1, MAX_INT32)
        for name, value in checked.items():
            object.__setattr__(self, name, value)  # the dataclass is frozen

    @property
    def heads_per_rank(self) -> int:
        """Heads that one rank owns (merges)."""
        return NUM_HEADS // self.world_size

    @property
    def rows_per_page(self) -> int:
        """Rows of every page that one rank holds."""
        return rows_per_page(self.world_size, self.page_size)

    @property
    def compact(self) -> bool:
        """Whether columns are pages of two blocks."""
        return self.page_size != BLOCK_SIZE

    @property
    def forced(self) -> Forced:
        """The blocks that always win."""
        return Forced(self.init_blocks, self.local_blocks)

    @property
    def index_scale(self) -> int:
        """Blocks from one column to the next."""
        return column_scale(self.page_size)

    def index_offset(self, rank: Any) -> Any:
        """The block of a rank's column 0.

        Args:
          rank: the rank, in [0, W), an int or a traced int32 scalar; it is not checked.
        """
        return column_offset(rank, self.world_size, self.page_size)

    @property
    def score_columns(self) -> int:
        """Columns of a score plane, decode and prefill alike."""
        return msa_icp_decode_score_columns(self.max_model_len, self.page_size)

    @property
    def window_tokens(self) -> int:
        """Query tokens of one prefill window: what keeps its score scratch within 256 MiB."""
        row_bytes = NUM_HEADS * self.score_columns * 4
        return min(self.max_num_batched_tokens, WINDOW_SCORE_BYTES // row_bytes)


def check_decode_query_len(limits: IndexerGeometry, decode_query_len: int) -> int:
    """Raises unless a plan's decode takes so many query tokens of a request."""
    limit = "the plan's max_decode_query_len"
    most = limits.max_decode_query_len
    return check_query_len("decode_query_len", decode_query_len, most, limit=limit)


def check_decode_tokens(limits: IndexerGeometry, requests: int, query_len: int) -> int:
    """The query tokens of a decode; raises where a plan takes fewer of them, or of requests."""
    name, most = "block_table.shape[0] (requests)", limits.max_num_seqs
    checks.integer(name, requests, 0, most, limit="the plan's max_num_seqs")
    name, most = "T = requests * decode_query_len", limits.max_decode_tokens
    limit = "the plan's max_decode_tokens"
    return checks.integer(name, requests * query_len, 0, most, limit=limit)


def check_window(
    limits: IndexerGeometry, segments: int, total_q: int, max_query_len: int, max_seq_len: int
) -> dict[str, int]:
    """The bounds of a prefill query window by name; raises where they pass those of a plan."""
    name, limit = "qo_segment_lens.shape[0] (segments)", "the plan's max_num_seqs"
    checks.integer(name, segments, 0, limits.max_num_seqs, limit=limit)
    bounds = {}
    for name, value, limit in (
        ("total_q", total_q, "max_num_batched_tokens"),
        ("max_query_len", max_query_len, "max_num_batched_tokens"),
        ("max_seq_len", max_seq_len, "max_model_len"),
    ):
        most = getattr(limits, limit)
        bounds[name] = checks.integer(name, value, 0, most, limit=f"the plan's {limit}")
    return bounds


def check_prefill_tokens(limits: IndexerGeometry, tokens: int) -> int:
    """Raises unless a plan's prefill takes so many query rows at a time."""
    limit = "the plan's max_num_batched_tokens"
    return checks.integer("query.shape[0]", tokens, 0, limits.max_num_batched_tokens, limit=limit)


def check_row_offset(row_offset: int) -> int:
    """Raises unless `row_offset` is a multiple of 8 rows whose pages have int32 rows."""
    row_offset = checks.integer("row_offset", row_offset, 0, MAX_ROW_OFFSET)
    if row_offset % ROW_STEP:
        raise ValueError(f"row_offset must be a multiple of {ROW_STEP} (rows), got {row_offset}")
    return row_offset
