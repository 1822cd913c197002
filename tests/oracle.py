"""The reference every test compares with: the indexer's contract in plain numpy.

It is written from the contract alone and shares no code with the package. Keys and queries are raw
codes of e4m3fn (uint8) or bfloat16 (uint16), scores are float64: a sum of 128 products of two e4m3
values is exact in float64, one of bfloat16 values as good as exact.
Read it top to bottom: codes, caches and shards, scores, selection, rows, merge, whole answers,
checks.

Letters in shapes: W ranks, r one rank, P positions of a page, R = P / W rows of a page on one rank,
hpr = 4 / W heads that a rank owns, T query tokens, B requests or segments, Q query tokens of a
decode request, K columns of a score plane, C token capacity of receive storage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

HEADS = 4
HEAD_DIM = 128
BLOCK = 128  # consecutive positions of one request that share an id
TOP = 16  # ids a query token and head ends up with
MAX_BLOCKS = 8192  # ids from here on are never candidates
ROW_WORDS = 33  # 16 score words, 16 ids, the ready flag
READY = 1
EXACT_EPS = 2.0**-17  # e4m3 upcast, float32 accumulation
FAST_EPS = 2.0**-10  # fp8 tensor cores that keep about 14 bits

# What one step of the scorers holds in memory; any value gives the same scores.
_TOKENS_PER_STEP = 64
_KEYS_PER_STEP = 8192


# ---- float8_e4m3fn, bfloat16 ----


def _e4m3_value(byte: int) -> float:
    """One sign bit, four exponent bits (bias 7), three fraction bits; no infinities."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, fraction = byte >> 3 & 0xF, byte & 0x7
    if exponent == 0xF and fraction == 0x7:
        return float("nan")
    if exponent == 0:
        return sign * fraction * 2.0**-9
    return sign * (1 + fraction / 8) * 2.0 ** (exponent - 7)


NAN = {np.dtype(np.uint8): 0x7F, np.dtype(np.uint16): 0x7FC0}  # by the type of the codes
E4M3_VALUES = np.array([_e4m3_value(byte) for byte in range(256)], np.float64)


def as_codes(x: npt.ArrayLike) -> Array:
    """The codes of float8 (uint8) or bfloat16 (uint16) elements, without a copy."""
    x = np.asarray(x)
    if x.dtype.itemsize not in (1, 2):
        raise TypeError(f"expected float8 or bfloat16 elements, got {x.dtype}")
    return x.view(np.uint8 if x.dtype.itemsize == 1 else np.uint16)


def decode(x: npt.ArrayLike) -> Array:
    """float64 values of e4m3fn or bfloat16 codes."""
    codes = as_codes(x)
    if codes.dtype == np.uint8:
        return E4M3_VALUES[codes]
    with np.errstate(invalid="ignore"):  # a NaN may be a signalling one
        return (codes.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def encode(values: npt.ArrayLike, index_dtype: str) -> Array:
    """Codes of values that the dtype holds exactly; any other value raises."""
    if index_dtype == "float8_e4m3fn":
        return e4m3_encode(values)
    bits = np.asarray(values, np.float32).view(np.uint32)
    if (bits & 0xFFFF).any() or not np.array_equal(bits.view(np.float32), values, equal_nan=True):
        raise ValueError("a value has no exact bfloat16 form")
    return (bits >> 16).astype(np.uint16)


def e4m3_encode(values: npt.ArrayLike) -> Array:
    """Bytes of values that e4m3fn holds exactly (-0.0 is 0x80); any other value raises."""
    values = np.asarray(values, np.float64)
    positive = E4M3_VALUES[:0x7F]  # ascending
    code = np.minimum(np.searchsorted(positive, np.abs(values)), 0x7E).astype(np.uint8)
    if not np.array_equal(positive[code], np.abs(values)):
        raise ValueError("a value has no exact e4m3fn form")
    return code | np.where(np.signbit(values), 0x80, 0).astype(np.uint8)


def e4m3_round(values: npt.ArrayLike) -> Array:
    """Bytes of the nearest e4m3fn values: ties to the even byte, 448 at most, NaN is 0x7F."""
    values = np.asarray(values, np.float64)
    positive = E4M3_VALUES[:0x7F]  # ascending
    size = np.minimum(np.abs(values), positive[-1])
    above = np.minimum(np.searchsorted(positive, size), 0x7E)
    below = np.maximum(above - 1, 0)
    down, up = size - positive[below], positive[above] - size
    code = np.where((down < up) | ((down == up) & (below % 2 == 0)), below, above)
    code = np.where(np.isnan(values), 0x7F, code | np.where(np.signbit(values), 0x80, 0))
    return code.astype(np.uint8)


# ---- caches, pages, shards ----


class Shard(NamedTuple):
    """One rank's part of every page: row j of page p holds position p P + rank R + j."""

    rank: int
    world_size: int
    page_size: int
    row_offset: int = 0  # first row of the part inside a compound page

    @property
    def rows(self) -> int:
        return self.page_size // self.world_size

    @property
    def index_scale(self) -> int:
        """Column c of this rank's plane is page c and has block id scale * c + offset."""
        return self.page_size // BLOCK

    @property
    def index_offset(self) -> int:
        return 2 * self.rank // self.world_size if self.page_size == 2 * BLOCK else 0


WHOLE = Shard(rank=0, world_size=1, page_size=BLOCK)  # one rank that holds every key


def shard_cache(cache: Array, world_size: int) -> Array:
    """Whole cache [pages, P, 128] -> every rank's index_k [W, pages, R, 128]."""
    pages, page_size, dim = cache.shape
    parts = cache.reshape(pages, world_size, page_size // world_size, dim)
    return np.ascontiguousarray(parts.swapaxes(0, 1))


def compound_cache(index_k: Array, pitch_rows: int, row_offset: int) -> Array:
    """Lays [pages, R, 128] into pages of pitch_rows rows; the rest is NaN."""
    pages, rows, dim = index_k.shape
    if row_offset + rows > pitch_rows:
        raise ValueError("the rows do not fit into the pitch")
    codes = as_codes(index_k)
    base = np.full((pages, pitch_rows, dim), NAN[codes.dtype], codes.dtype)
    base[:, row_offset : row_offset + rows] = codes
    return base.view(index_k.dtype)


def page_keys(index_k: Array, pages: Array, shard: Shard) -> tuple[Array, Array]:
    """This rank's keys of the given physical pages -> (keys [n, R, 128], in_range [n]).

    A page id outside the cache reads nothing; its keys come back as zeros and not in range.
    """
    index_k = as_codes(index_k)
    rows = slice(shard.row_offset, shard.row_offset + shard.rows)
    in_range = (pages >= 0) & (pages < len(index_k))
    keys = np.zeros((len(pages), shard.rows, HEAD_DIM))
    keys[in_range] = decode(index_k[pages[in_range], rows])
    return keys, in_range


def request_keys(shards: Sequence[Array], table_row: npt.ArrayLike, length: int) -> Array:
    """Keys [length, 128] of one request in the order of positions, from all ranks' index_k.

    A position on a page id outside the cache, or past the table's width, is NaN: visible to no one.
    """
    world_size, page_size = len(shards), len(shards) * shards[0].shape[1]
    count = -(-length // page_size)
    pages = np.asarray(table_row, np.int64)[:count]
    keys = np.full((count, world_size, page_size // world_size, HEAD_DIM), np.nan)
    for rank, index_k in enumerate(shards):
        part, in_range = page_keys(index_k, pages, Shard(rank, world_size, page_size))
        keys[: len(pages), rank][in_range] = part[in_range]
    return keys.reshape(-1, HEAD_DIM)[:length]


def write_index_k(index_k: Array, new_k: Array, slot_mapping: npt.ArrayLike, shard: Shard) -> Array:
    """A copy of one rank's index_k with new_k [N, 128] stored.

    Token i has flat slot page * P + row; only the rank that owns the row stores it. Slot -1 and
    every other slot outside the cache is skipped.
    """
    index_k = index_k.copy()
    for key, slot in zip(new_k, np.asarray(slot_mapping).tolist(), strict=True):
        page, row = divmod(slot, shard.page_size)
        owner, local_row = divmod(row, shard.rows)
        if 0 <= page < len(index_k) and owner == shard.rank:
            index_k[page, shard.row_offset + local_row] = key
    return index_k


# ---- who sees what ----


def _lengths(lengths: npt.ArrayLike) -> list[int]:
    """Negative lengths read as 0. Python ints: no position overflows."""
    return [max(int(n), 0) for n in np.asarray(lengths)]


def _decode_requests(seq_lens: npt.ArrayLike, query_len: int) -> Iterator[tuple[int, slice, Array]]:
    """Per request: its length, its rows of the plane, the positions of its tokens."""
    for b, length in enumerate(_lengths(seq_lens)):
        rows = slice(b * query_len, (b + 1) * query_len)
        yield length, rows, length - query_len + np.arange(query_len)


def _prefill_segments(
    qo_segment_lens: npt.ArrayLike, qo_offset: npt.ArrayLike, total_q: int
) -> Iterator[tuple[slice, Array]]:
    """Per segment: its rows of the plane (cut at total_q) and the positions of its queries."""
    end = 0
    for count, offset in zip(_lengths(qo_segment_lens), np.asarray(qo_offset), strict=True):
        start, end = end, min(end + count, total_q)
        yield slice(start, end), int(offset) + np.arange(end - start)


def _visible_blocks(positions: Array) -> Array:
    """position // 128 + 1; a negative position sees nothing."""
    return np.maximum(positions // BLOCK + 1, 0).astype(np.int32)


def decode_num_valid_pages(seq_lens: npt.ArrayLike, decode_query_len: int) -> Array:
    """Visible blocks of every decode token, int32 [B Q]."""
    requests = list(_decode_requests(seq_lens, decode_query_len))
    counts = np.zeros(len(requests) * decode_query_len, np.int32)
    for _, rows, positions in requests:
        counts[rows] = _visible_blocks(positions)
    return counts


def prefill_num_valid_pages(
    qo_segment_lens: npt.ArrayLike, qo_offset: npt.ArrayLike, total_q: int
) -> Array:
    """Visible blocks of every prefill token, int32 [T]; 0 for the padding after the segments."""
    counts = np.zeros(total_q, np.int32)
    for rows, positions in _prefill_segments(qo_segment_lens, qo_offset, total_q):
        counts[rows] = _visible_blocks(positions)
    return counts


# ---- scores ----


class ScorePlane(NamedTuple):
    """What a scorer must leave in rows [0, T) of its score buffer."""

    scores: Array  # float64 [T, 4, K], -inf where no local row is visible
    mass: Array  # float64 [T, 4, K], sum_d |q_d k_d| of the winning row, 0 where there is none
    written: Array  # bool [T, K]: every other column keeps its old bits

    def over(self, before: Array) -> Array:
        """The float32 score buffer after the call: written columns, all other bits as before."""
        after = np.array(before, np.float32)
        mine = after[: len(self.scores)]
        np.copyto(mine, self.scores.astype(np.float32), where=self.written[:, None])
        return after


def _empty_plane(tokens: int, columns: int, written: bool) -> ScorePlane:
    shape = (tokens, HEADS, columns)
    flags = np.full((tokens, columns), written)
    return ScorePlane(np.full(shape, -np.inf), np.zeros(shape), flags)


def _score(
    plane: ScorePlane,
    rows: slice,
    positions: Array,
    index_q: Array,
    index_k: Array,
    table_row: Array,
    length: int,
    shard: Shard,
) -> None:
    """Fills the plane's rows of one request (or segment), a few tokens and pages at a time."""
    columns = plane.scores.shape[2]
    # Table entries past the request's pages are never read: they may hold anything.
    pages = table_row[: min(-(-length // shard.page_size), columns)].astype(np.int64)
    pages_per_step = max(_KEYS_PER_STEP // shard.rows, 1)
    for t in range(0, len(positions), _TOKENS_PER_STEP):
        at = positions[t : t + _TOKENS_PER_STEP]
        tokens = slice(rows.start + t, rows.start + t + len(at))
        query = decode(index_q[tokens])
        reach = min(len(pages), max(int(at[-1]) // shard.page_size + 1, 0))
        for first in range(0, reach, pages_per_step):
            cols = slice(first, min(first + pages_per_step, reach))
            keys, in_range = page_keys(index_k, pages[cols], shard)
            page = np.arange(cols.start, cols.stop)[:, None]
            key_at = page * shard.page_size + shard.rank * shard.rows + np.arange(shard.rows)
            visible = (key_at <= at[:, None, None]) & (key_at < length) & in_range[:, None]
            best, mass = _best_rows(query, keys, visible)
            plane.scores[tokens, :, cols] = best
            plane.mass[tokens, :, cols] = mass


def _best_rows(query: Array, keys: Array, visible: Array) -> tuple[Array, Array]:
    """query [n, 4, 128], keys [p, R, 128], visible [n, p, R] -> (score, mass), each [n, 4, p]."""
    n, heads, dim = query.shape
    p, rows, _ = keys.shape
    with np.errstate(invalid="ignore"):  # a key may be NaN
        products = query.reshape(-1, dim) @ keys.reshape(-1, dim).T
    products = products.reshape(n, heads, p, rows)
    # Hidden rows and NaN products leave before the maximum: neither wins nor poisons its block.
    products = np.where(visible[:, None] & ~np.isnan(products), products, -np.inf)
    winner = products.argmax(-1)
    best = np.take_along_axis(products, winner[..., None], -1)[..., 0]
    winning_keys = np.abs(keys[np.arange(p), winner])
    with np.errstate(invalid="ignore"):
        mass = np.einsum("nhd,nhpd->nhp", np.abs(query), winning_keys)
    best = np.where(best == 0, 0.0, best)  # a zero is +0.0
    return best, np.where(np.isneginf(best), 0.0, mass)


def decode_plane(
    index_q: npt.ArrayLike,
    index_k: npt.ArrayLike,
    block_table: npt.ArrayLike,
    seq_lens: npt.ArrayLike,
    columns: int,
    shard: Shard,
    decode_query_len: int,
) -> ScorePlane:
    """One rank's decode scores.

    index_q [B Q, 4, 128], index_k [pages, R (or a compound page's rows), 128], block_table
    [B, width]. Token j of a request sits at seq_len - Q + j. Written: the columns of
    ceil(seq_len / P) pages rounded up to a multiple of four.
    """
    query, cache, table = as_codes(index_q), as_codes(index_k), np.asarray(block_table)
    requests = list(_decode_requests(seq_lens, decode_query_len))
    plane = _empty_plane(len(requests) * decode_query_len, columns, written=False)
    for b, (length, rows, positions) in enumerate(requests):
        pages = -(-length // shard.page_size)
        plane.written[rows, : min(-(-pages // 4) * 4, columns)] = True
        _score(plane, rows, positions, query, cache, table[b], length, shard)
    return plane


def prefill_plane(
    index_q: npt.ArrayLike,
    index_k: npt.ArrayLike,
    block_table: npt.ArrayLike,
    qo_segment_lens: npt.ArrayLike,
    kv_segment_lens: npt.ArrayLike,
    qo_offset: npt.ArrayLike,
    columns: int,
    shard: Shard,
    *,
    sm_scale: float = 1.0,
    initialize: bool = True,
) -> ScorePlane:
    """One rank's prefill scores of a window of segments laid end to end.

    index_q [T, 4, 128], the rest as for decode. Query i of a segment sits at qo_offset + i and sees
    keys up to its own position and below the segment's kv length. Written: with initialize all K
    columns of all T rows; without, the pages that the token's causal prefix reaches, so nothing of
    a padding row.
    """
    query, cache, table = as_codes(index_q), as_codes(index_k), np.asarray(block_table)
    plane = _empty_plane(len(query), columns, written=initialize)
    segments = _prefill_segments(qo_segment_lens, qo_offset, len(query))
    for b, ((rows, positions), length) in enumerate(
        zip(segments, _lengths(kv_segment_lens), strict=True)
    ):
        prefix = np.clip(positions + 1, 0, length)
        pages = -(-prefix // shard.page_size)
        plane.written[rows] |= np.arange(columns) < pages[:, None]
        _score(plane, rows, positions, query, cache, table[b], length, shard)
    return _scaled(plane, float(np.float32(sm_scale)))


def _scaled(plane: ScorePlane, sm_scale: float) -> ScorePlane:
    """The scale follows the maximum; a column that sees nothing stays -inf under any scale."""
    seen = ~np.isneginf(plane.scores)
    scores = np.where(seen, np.where(seen, plane.scores, 0.0) * sm_scale, -np.inf)
    scores = np.where(scores == 0, 0.0, scores)
    return plane._replace(scores=scores, mass=plane.mass * abs(sm_scale))


# ---- selection ----


def choose(
    scores: Array,
    ids: Array,
    num_valid_pages: npt.ArrayLike,
    force_begin: int,
    force_end: int,
    top: int = TOP,
) -> Array:
    """Where the best candidates of each row stand: int64 [..., top], ascending by id, then N.

    scores and ids [..., N], num_valid_pages [...]. A candidate is valid by its id alone, never by
    its score. Order: forced first, then score descending, then lower id. NaN ranks as -inf, -0.0
    equals +0.0 (they compare equal), and a NaN's sign means nothing.
    """
    count = scores.shape[-1]
    scores, ids = np.broadcast_arrays(scores, ids)
    visible = np.maximum(np.asarray(num_valid_pages, np.int64), 0)[..., None]
    valid = (ids >= 0) & (ids < np.minimum(visible, MAX_BLOCKS))
    # The last window counts from the raw number, even where that lies past the last candidate.
    forced = (ids < force_begin) | (ids >= visible - force_end)
    ranked = np.where(np.isnan(scores), -np.inf, scores)
    order = np.lexsort((ids, -ranked, ~forced, ~valid), axis=-1)[..., :top]

    is_valid = np.take_along_axis(valid, order, -1)
    id_or_last = np.where(is_valid, np.take_along_axis(ids, order, -1), MAX_BLOCKS)
    ascending = np.argsort(id_or_last, axis=-1, kind="stable")
    chosen = np.take_along_axis(np.where(is_valid, order, count), ascending, -1)
    padding = np.full((*chosen.shape[:-1], top - chosen.shape[-1]), count)
    return np.concatenate([chosen, padding], -1)


def top_ids(
    scores: Array,
    num_valid_pages: npt.ArrayLike,
    force_begin: int,
    force_end: int,
    *,
    index_scale: int = 1,
    index_offset: int = 0,
    top: int = TOP,
) -> Array:
    """Chosen block ids int32 [T, 4, top] of a plane [T, 4, K] (any float type), then -1."""
    columns = scores.shape[-1]
    ids = np.arange(columns, dtype=np.int64) * index_scale + index_offset
    per_head = np.broadcast_to(np.asarray(num_valid_pages)[:, None], scores.shape[:-1])
    chosen = choose(scores, ids, per_head, force_begin, force_end, top)
    return np.append(ids, -1)[chosen].astype(np.int32)


# ---- candidate rows ----


def select(
    scores: Array,
    num_valid_pages: npt.ArrayLike,
    force_begin: int,
    force_end: int,
    *,
    index_scale: int = 1,
    index_offset: int = 0,
) -> Array:
    """float32 plane [T, 4, K] -> candidate rows int32 [4, T, 33].

    A row is 16 raw score words in the order of the ids, 16 ids ascending, the ready flag. Fewer
    than 16 candidates leave a tail of (-inf, -1).
    """
    if scores.dtype != np.float32:
        raise TypeError(f"rows hold float32 bits, got {scores.dtype}")
    ids = top_ids(
        scores,
        num_valid_pages,
        force_begin,
        force_end,
        index_scale=index_scale,
        index_offset=index_offset,
    )
    minus_inf = np.float32(-np.inf).view(np.int32)
    bits = np.ascontiguousarray(scores).view(np.int32)
    bits = np.concatenate([bits, np.full((*bits.shape[:-1], 1), minus_inf)], -1)
    column = np.where(ids < 0, scores.shape[-1], (ids - index_offset) // index_scale)
    words = np.take_along_axis(bits, column, -1)
    flag = np.full((*ids.shape[:-1], 1), READY)
    rows = np.concatenate([words, ids, flag], -1).astype(np.int32)
    return np.ascontiguousarray(rows.swapaxes(0, 1))


def rows_by_owner(rows: Array, world_size: int) -> Array:
    """[4, T, n...] -> [W, hpr, T, n...]: head h goes to rank h // hpr."""
    return rows.reshape(world_size, HEADS // world_size, *rows.shape[1:])


def exchange(rows_of_rank: Sequence[Array]) -> list[Array]:
    """Every rank's rows [4, T, 33] -> what every rank receives, [W sources, hpr, T, 33]."""
    sent = [rows_by_owner(rows, len(rows_of_rank)) for rows in rows_of_rank]
    return [np.stack([rows[owner] for rows in sent]) for owner in range(len(sent))]


def next_generation(generation: npt.ArrayLike) -> Array:
    """int32 counters plus one, wrapping past 0x7fffffff to the negative numbers, skipping 0."""
    bumped = np.asarray(generation, np.int64) + 1
    bumped = np.where(bumped == 0, 1, bumped)
    return np.where(bumped == 2**31, -(2**31), bumped).astype(np.int32)


def tag_rows(rows: Array, generations: Array) -> tuple[Array, Array]:
    """Rows [..., 33] and counters [...] -> tagged rows [..., 32, 2] and the bumped counters.

    Each of the 32 words becomes the int32 pair (word, generation), which in little-endian memory
    is the int64 generation << 32 | word.
    """
    bumped = next_generation(generations)
    words = rows[..., : 2 * TOP]
    tags = np.broadcast_to(bumped[..., None], words.shape)
    return np.stack([words, tags], -1), bumped


# ---- merge ----


class Merge(NamedTuple):
    """What the owner of some heads holds after a merge with a protocol."""

    output: Array  # int32 [T, hpr, 16]
    received: Array  # the slot after the merge
    expected: Array | None  # the slot's expected generations after the merge, tagged only
    errors: int  # (source, head, token) rows whose flag or tags were not the expected ones


def merge(
    received: Array,
    num_valid_pages: npt.ArrayLike,
    init_blocks: int,
    local_blocks: int,
    *,
    prefill: bool = False,
) -> Array:
    """All sources' rows of the owned heads [W, hpr, C, 32 or 33] -> ids int32 [T, hpr, 16].

    Ids outside [0, min(num_valid_pages, 8192)) fall away, a duplicate keeps its largest score, and
    only then the best 16 are taken. A padding row is all -1; in prefill it is [0, -1, ...].
    """
    visible = np.asarray(num_valid_pages)
    tokens = len(visible)
    words = np.ascontiguousarray(received[:, :, :tokens, : 2 * TOP].transpose(2, 1, 0, 3))
    every_source = (tokens, words.shape[1], words.shape[2] * TOP)
    scores = words[..., :TOP].copy().view(np.float32).reshape(every_source)
    scores = np.where(np.isnan(scores), -np.inf, scores)
    ids = words[..., TOP:].reshape(every_source)

    # Largest score first inside each id; every later copy of the id loses it.
    order = np.lexsort((-scores, ids), axis=-1)
    scores, ids = (np.take_along_axis(x, order, -1) for x in (scores, ids))
    again = ids[..., 1:] == ids[..., :-1]
    ids[..., 1:] = np.where(again, -1, ids[..., 1:])

    per_head = np.broadcast_to(visible[:, None], ids.shape[:-1])
    chosen = choose(scores, ids, per_head, init_blocks, local_blocks)
    nothing = np.full((*ids.shape[:-1], 1), -1)
    output = np.take_along_axis(np.concatenate([ids, nothing], -1), chosen, -1).astype(np.int32)
    if prefill:
        output[visible <= 0, :, 0] = 0
    return output


def merge_legacy(
    received: Array, num_valid_pages: npt.ArrayLike, init_blocks: int, local_blocks: int
) -> Merge:
    """Decode merge of flagged rows [W, hpr, C, 33]: checks the T rows' flags, clears them to 0."""
    output = merge(received, num_valid_pages, init_blocks, local_blocks)
    tokens = len(output)
    failed = received[:, :, :tokens, -1] != READY
    cleared = received.copy()
    cleared[:, :, :tokens, -1] = 0
    return Merge(_withhold(output, failed), cleared, None, int(failed.sum()))


def merge_tagged(
    received: Array,
    expected: Array,
    num_valid_pages: npt.ArrayLike,
    init_blocks: int,
    local_blocks: int,
) -> Merge:
    """Decode merge of tagged rows [W, hpr, C, 32, 2]; expected [hpr, C] as before the call.

    The T rows' expected generations are bumped, and all 32 tags of a row must equal theirs.
    """
    output = merge(received[..., 0], num_valid_pages, init_blocks, local_blocks)
    tokens = len(output)
    bumped = expected.copy()
    bumped[:, :tokens] = next_generation(expected[:, :tokens])
    tags = received[:, :, :tokens, :, 1]
    failed = (tags != bumped[:, :tokens, None]).any(-1)
    return Merge(_withhold(output, failed), received, bumped, int(failed.sum()))


def _withhold(output: Array, failed: Array) -> Array:
    """One failed source [W, hpr, T] makes its (token, head) all -1: never a wrong id."""
    return np.where(failed.any(0).T[..., None], np.int32(-1), output)


# ---- the whole answer, as one rank that holds every key would give it ----


def _as_blocks(cache: npt.ArrayLike, block_table: npt.ArrayLike) -> tuple[Array, Array]:
    """Whole cache [pages, P, 128] and its table as pages of one block each."""
    cache, table = as_codes(cache), np.asarray(block_table, np.int64)
    per_page = cache.shape[1] // BLOCK
    blocks = table[..., None] * per_page + np.arange(per_page)  # bad ids stay outside the cache
    return cache.reshape(-1, BLOCK, HEAD_DIM), blocks.reshape(len(table), -1)


def global_decode_plane(
    index_q: npt.ArrayLike,
    cache: npt.ArrayLike,
    block_table: npt.ArrayLike,
    seq_lens: npt.ArrayLike,
    blocks: int,
    decode_query_len: int,
) -> ScorePlane:
    """Decode scores of blocks 0 .. blocks - 1 from the whole cache [pages, P, 128]."""
    cache, table = _as_blocks(cache, block_table)
    return decode_plane(index_q, cache, table, seq_lens, blocks, WHOLE, decode_query_len)


def global_prefill_plane(
    index_q: npt.ArrayLike,
    cache: npt.ArrayLike,
    block_table: npt.ArrayLike,
    qo_segment_lens: npt.ArrayLike,
    kv_segment_lens: npt.ArrayLike,
    qo_offset: npt.ArrayLike,
    blocks: int,
) -> ScorePlane:
    """Prefill scores of blocks 0 .. blocks - 1 from the whole cache [pages, P, 128]."""
    cache, table = _as_blocks(cache, block_table)
    return prefill_plane(
        index_q, cache, table, qo_segment_lens, kv_segment_lens, qo_offset, blocks, WHOLE
    )


def join_planes(planes: Sequence[Array], page_size: int) -> Array:
    """All ranks' score planes [T, 4, K] -> one plane over blocks [T, 4, K P / 128].

    Ranks that hold parts of the same block meet in its maximum, NaN as -inf.
    """
    world_size, per_page = len(planes), page_size // BLOCK
    tokens, heads, columns = planes[0].shape
    joined = np.full((tokens, heads, columns * per_page), -np.inf, planes[0].dtype)
    for rank, plane in enumerate(planes):
        shard = Shard(rank, world_size, page_size)
        blocks = joined[..., shard.index_offset :: shard.index_scale]
        np.maximum(blocks, np.where(np.isnan(plane), -np.inf, plane), out=blocks)
    return joined


def answer(
    scores: Array,
    num_valid_pages: npt.ArrayLike,
    init_blocks: int,
    local_blocks: int,
    *,
    prefill: bool = False,
) -> Array:
    """Final ids int32 [T, 4, 16] of a plane over blocks, float64 or a kernel's joined float32."""
    output = top_ids(scores, num_valid_pages, init_blocks, local_blocks)
    if prefill:
        output[np.asarray(num_valid_pages) <= 0, :, 0] = 0
    return output


# ---- checks ----


def check_scores(actual: Array, before: Array, plane: ScorePlane, eps: float) -> None:
    """Asserts that a float32 score buffer is the plane over `before`, to eps * sum |q k|."""
    assert actual.dtype == np.float32 and actual.shape == before.shape
    tokens = len(plane.scores)
    written = np.zeros(actual.shape, bool)
    written[:tokens] = plane.written[:, None]
    kept = actual.view(np.int32) == before.view(np.int32)
    assert kept[~written].all(), _first(~written & ~kept, "touched")

    mine, written = actual[:tokens], written[:tokens]
    assert not (written & np.isnan(mine)).any(), _first(written & np.isnan(mine), "NaN")
    minus_zero = written & (mine == 0) & np.signbit(mine)
    assert not minus_zero.any(), _first(minus_zero, "-0.0")
    for name, is_infinite in (("-inf", np.isneginf), ("+inf", np.isposinf)):
        wrong = written & (is_infinite(mine) != is_infinite(plane.scores))
        assert not wrong.any(), _first(wrong, f"{name} in the wrong place or missing")
    finite = written & np.isfinite(plane.scores)
    distance = np.abs(np.where(finite, mine, 0.0) - np.where(finite, plane.scores, 0.0))
    far = distance > eps * np.where(finite, plane.mass, 0.0)
    assert not far.any(), _first(far, "too far")


def _first(bad: Array, what: str) -> str:
    where = tuple(int(i) for i in np.argwhere(bad)[0]) if bad.any() else ()
    return f"{what}: {int(bad.sum())} elements, the first at {where}"


def check_ids(output: Array, num_valid_pages: npt.ArrayLike, *, prefill: bool = False) -> None:
    """Asserts the form of final ids [T, heads, 16], strictly.

    A row is min(16, blocks) valid ids strictly ascending, then exactly -1. Where a plane holds
    fewer blocks than num_valid_pages, pass the smaller number.
    """
    assert output.dtype == np.int32 and output.ndim == 3 and output.shape[2] == TOP
    for token, visible in enumerate(np.asarray(num_valid_pages).tolist()):
        limit = min(max(visible, 0), MAX_BLOCKS)
        for head, row in enumerate(output[token].tolist()):
            where = f"token {token} head {head}: {row}"
            if limit == 0:
                assert row == [0 if prefill else -1] + [-1] * (TOP - 1), where
                continue
            ids = row[: min(TOP, limit)]
            assert all(0 <= i < limit for i in ids), where
            assert all(a < b for a, b in pairwise(ids)), where
            assert row[len(ids) :] == [-1] * (TOP - len(ids)), where


def differing_blocks(a: Array, b: Array) -> Array:
    """How many ids of each row of `a` are missing from the same row of `b`, int64 [T, heads]."""
    found = (a[..., :, None] == b[..., None, :]).any(-1)
    return np.sum(~found & (a >= 0), axis=-1, dtype=np.int64)
