"""The oracle against values worked out by hand, so that it is not its own judge."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import oracle
import pytest
from oracle import Shard

Array = npt.NDArray[Any]

INF, NAN = float("inf"), float("nan")
NEG_NAN = float(np.uint32(0xFFC00000).view(np.float32))
MINUS_INF_WORD = -8388608  # 0xff800000
PREFIX = list(range(16))


# ---- e4m3 ----


def test_e4m3_literals() -> None:
    known = {
        0x00: 0.0,
        0x01: 0.001953125,
        0x07: 0.013671875,
        0x08: 0.015625,
        0x30: 0.5,
        0x38: 1.0,
        0x39: 1.125,
        0x3C: 1.5,
        0x40: 2.0,
        0x44: 3.0,
        0x48: 4.0,
        0x7E: 448.0,
        0xB8: -1.0,
        0xFE: -448.0,
    }
    codes = np.array(list(known), np.uint8)
    assert oracle.decode(codes).tolist() == list(known.values())
    assert oracle.e4m3_encode(list(known.values())).tolist() == list(known)
    assert np.isnan(oracle.decode(np.array([0x7F, 0xFF], np.uint8))).all()
    assert np.signbit(oracle.decode(np.uint8(0x80)))
    assert oracle.e4m3_encode(-0.0) == 0x80


def test_e4m3_table_is_the_dtype() -> None:
    every = np.arange(256, dtype=np.uint8)
    want = every.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    np.testing.assert_array_equal(oracle.decode(every), want)
    np.testing.assert_array_equal(oracle.decode(every.view(ml_dtypes.float8_e4m3fn)), want)


@pytest.mark.parametrize("value", [0.3, 449.0, 17.5, NAN, INF])
def test_e4m3_encode_refuses_what_it_cannot_hold(value: float) -> None:
    with pytest.raises(ValueError, match="exact"):
        oracle.e4m3_encode([value])


# ---- caches and shards ----


def numbered_cache(pages: int, page_size: int) -> Array:
    """Byte 0 of a key is its row, byte 1 its page."""
    cache = np.zeros((pages, page_size, 128), np.uint8)
    cache[:, :, 0] = np.arange(page_size)
    cache[:, :, 1] = np.arange(pages)[:, None]
    return cache


@pytest.mark.parametrize(
    ("world_size", "page_size", "rank", "local", "row"),
    [
        (2, 128, 0, 5, 5),
        (2, 128, 1, 3, 67),
        (4, 128, 3, 31, 127),
        (2, 256, 1, 0, 128),
        (4, 256, 1, 7, 71),
        (4, 256, 2, 63, 191),
    ],
)
def test_shard_row_is_page_row(
    world_size: int, page_size: int, rank: int, local: int, row: int
) -> None:
    shards = oracle.shard_cache(numbered_cache(3, page_size), world_size)
    assert shards.shape == (world_size, 3, page_size // world_size, 128)
    assert shards[rank, 2, local, :2].tolist() == [row, 2]


def test_index_scale_and_offset() -> None:
    assert [(s.index_scale, s.index_offset) for s in (Shard(1, 2, 128), Shard(3, 4, 128))] == [
        (1, 0),
        (1, 0),
    ]
    assert [Shard(r, 2, 256).index_offset for r in range(2)] == [0, 1]
    assert [Shard(r, 4, 256).index_offset for r in range(4)] == [0, 0, 1, 1]
    assert Shard(0, 4, 256).index_scale == 2


def test_compound_cache_and_page_keys() -> None:
    shard = Shard(1, 2, 128, row_offset=8)
    index_k = oracle.shard_cache(numbered_cache(4, 128), 2)[1]
    base = oracle.compound_cache(index_k, 80, 8)
    assert base.shape == (4, 80, 128)
    assert (base[:, :8] == 0x7F).all() and (base[:, 72:] == 0x7F).all()
    keys, in_range = oracle.page_keys(base, np.array([3, -1, 4, 2**31 - 1]), shard)
    assert in_range.tolist() == [True, False, False, False]
    np.testing.assert_array_equal(keys[0], oracle.decode(index_k[3]))
    assert not keys[1:].any()
    with pytest.raises(ValueError, match="pitch"):
        oracle.compound_cache(index_k, 71, 8)


def test_request_keys_follow_positions() -> None:
    cache = numbered_cache(4, 128)
    shards = oracle.shard_cache(cache, 4)
    keys = oracle.request_keys(list(shards), [2, -1, 0, 9], 300)
    assert keys.shape == (300, 128)
    np.testing.assert_array_equal(keys[:128], oracle.decode(cache[2]))
    assert np.isnan(keys[128:256]).all()
    np.testing.assert_array_equal(keys[256:], oracle.decode(cache[0, :44]))
    assert np.isnan(oracle.request_keys(list(shards), [2], 200)[128:]).all()


def test_write_index_k_stores_own_rows_only() -> None:
    index_k = np.zeros((3, 64, 128), np.uint8)
    new_k = np.full((6, 128), 1, np.uint8) * np.arange(1, 7, dtype=np.uint8)[:, None]
    # page 1 row 63; page 1 row 64; page 2 row 127; skipped; past the cache; far below
    slots = [128 + 63, 128 + 64, 256 + 127, -1, 3 * 128, -(2**31)]
    low = oracle.write_index_k(index_k, new_k, slots, Shard(0, 2, 128))
    high = oracle.write_index_k(index_k, new_k, slots, Shard(1, 2, 128))
    assert [tuple(i) for i in np.argwhere(low[..., 0])] == [(1, 63)]
    assert [tuple(i) for i in np.argwhere(high[..., 0])] == [(1, 0), (2, 63)]
    assert (low[1, 63] == 1).all() and (high[1, 0] == 2).all() and (high[2, 63] == 3).all()
    assert not index_k.any()
    wide = np.zeros((3, 80, 128), np.uint8)
    wide = oracle.write_index_k(wide, new_k, slots, Shard(1, 2, 128, row_offset=8))
    assert [tuple(i) for i in np.argwhere(wide[..., 0])] == [(1, 8), (2, 71)]


# ---- visible blocks ----


def test_decode_num_valid_pages() -> None:
    counts = oracle.decode_num_valid_pages([0, 2, 300, -5, 257], 4)
    assert counts.dtype == np.int32
    assert counts.reshape(5, 4).tolist() == [
        [0, 0, 0, 0],
        [0, 0, 1, 1],
        [3, 3, 3, 3],
        [0, 0, 0, 0],
        [2, 2, 2, 3],
    ]
    assert oracle.decode_num_valid_pages([128, 129], 1).tolist() == [1, 2]
    assert oracle.decode_num_valid_pages([], 3).shape == (0,)


def test_prefill_num_valid_pages() -> None:
    assert oracle.prefill_num_valid_pages([3, 0, 2], [126, 5, 512], 7).tolist() == [
        *(1, 1, 2, 5, 5),
        *(0, 0),
    ]
    assert oracle.prefill_num_valid_pages([3, 0, 2], [126, 5, 512], 4).tolist() == [1, 1, 2, 5]
    assert oracle.prefill_num_valid_pages([2, -3, 1], [-1, 0, 400], 4).tolist() == [
        *(0, 1, 4),
        0,
    ]


# ---- scores by hand ----


def vector(*head: float) -> Array:
    return oracle.e4m3_encode([*head, *[0.0] * (128 - len(head))])


def query(*heads: tuple[float, ...]) -> Array:
    padded = [*heads, *[(0.0,)] * (4 - len(heads))]
    return np.stack([vector(*h) for h in padded])


def nan_cache(pages: int) -> Array:
    """Nothing written yet: every byte is NaN."""
    return np.full((pages, 128, 128), 0x7F, np.uint8)


def test_decode_scores_by_hand() -> None:
    # Length 130 on table [2, 0, garbage]; two ranks of 64 rows. Positions 0..127 on page 2,
    # 128 and 129 on page 0; the rest of page 0 is unwritten.
    cache = nan_cache(3)
    cache[2] = vector(-1, 2)
    cache[2, 10] = vector(4, 1)
    cache[2, 11] = 0xFF  # NaN on a visible row is skipped
    cache[2, 70] = vector(-4, 0.5)
    cache[0, 0] = vector(1, 1)
    cache[0, 1] = vector(3, 0)
    index_q = query((2, -3), (-2, 0), (0.5,))[None]
    table = [[2, 0, 2**31 - 1, -7]]
    shards = oracle.shard_cache(cache, 2)

    low = oracle.decode_plane(index_q, shards[0], table, [130], 8, Shard(0, 2, 128), 1)
    assert low.written.tolist() == [[True] * 4 + [False] * 4]
    assert low.scores[0, :, :3].tolist() == [
        [5, 6, -INF],
        [2, -2, -INF],
        [2, 1.5, -INF],
        [0, 0, -INF],
    ]
    assert low.mass[0, :3, :2].tolist() == [[11, 6], [2, 2], [2, 1.5]]
    assert np.isneginf(low.scores[..., 2:]).all() and not low.mass[..., 2:].any()

    high = oracle.decode_plane(index_q, shards[1], table, [130], 8, Shard(1, 2, 128), 1)
    assert high.scores[0, :, 0].tolist() == [-8, 8, -0.5, 0]
    assert np.isneginf(high.scores[..., 1:]).all()  # positions 192.. of column 1 are not visible

    joined = oracle.join_planes([low.scores, high.scores], 128)
    assert joined[0, :, :2].tolist() == [[5, 6], [8, -2], [2, 1.5], [0, 0]]
    whole = oracle.global_decode_plane(index_q, cache, table, [130], 8, 1)
    np.testing.assert_array_equal(whole.scores, joined)


def test_join_planes() -> None:
    planes = [np.full((1, 4, 2), float(rank), np.float32) for rank in range(4)]
    planes[3][..., 0], planes[1][..., 1] = NAN, -INF
    assert oracle.join_planes(planes[:2], 128)[0, 0].tolist() == [1, 0]
    assert oracle.join_planes(planes, 128)[0, 0].tolist() == [2, 3]
    assert oracle.join_planes(planes[:2], 256)[0, 0].tolist() == [0, 1, 0, -INF]
    assert oracle.join_planes(planes, 256)[0, 0].tolist() == [1, 2, 0, 3]


def test_decode_tokens_are_causal() -> None:
    cache = np.broadcast_to(vector(-1), (2, 128, 128)).copy()
    cache[0, 126:], cache[1, :2] = vector(1), vector(2)
    index_q = np.repeat(query((1,))[None], 8, 0)
    plane = oracle.decode_plane(index_q, cache, [[0, 1], [0, 1]], [129, 2], 4, oracle.WHOLE, 4)
    assert plane.scores[:, 0].tolist() == [
        [-1, -INF, -INF, -INF],  # position 125
        [1, -INF, -INF, -INF],
        [1, -INF, -INF, -INF],
        [1, 2, -INF, -INF],
        [-INF] * 4,  # position -2
        [-INF] * 4,
        [-1, -INF, -INF, -INF],
        [-1, -INF, -INF, -INF],
    ]
    assert plane.written.all()


def test_hidden_rows_may_hold_anything() -> None:
    cache = np.broadcast_to(vector(1), (2, 128, 128)).copy()
    cache[1, 65:] = 0x7F  # seq_len 193: rows 65..127 of the last page
    plane = oracle.decode_plane(query((3,))[None], cache, [[0, 1]], [193], 4, oracle.WHOLE, 1)
    assert plane.scores[0, 0].tolist() == [3, 3, -INF, -INF]


def test_zero_scores_are_positive() -> None:
    index_q = query((-0.0,), (-1.0,), (0.0,), (3.0,))[None]
    cache = np.broadcast_to(oracle.e4m3_encode(np.zeros(128)), (1, 128, 128)).copy()
    cache |= 0x80  # -0.0 everywhere
    plane = oracle.decode_plane(index_q, cache, [[0]], [128], 4, oracle.WHOLE, 1)
    zeros = plane.scores[..., 0]
    assert (zeros == 0).all() and not np.signbit(zeros).any()


def test_nan_query_sees_nothing() -> None:
    index_q = query((1,), (1,))[None]
    index_q[0, 0, 5] = 0x7F
    cache = np.broadcast_to(vector(1), (1, 128, 128))
    plane = oracle.decode_plane(index_q, cache, [[0]], [1], 4, oracle.WHOLE, 1)
    assert plane.scores[0, :, 0].tolist() == [-INF, 1, 0, 0]
    assert not plane.mass[0, 0].any()


def test_short_lengths_narrow_tables_bad_pages() -> None:
    cache = np.broadcast_to(vector(1), (2, 128, 128))
    index_q = np.repeat(query((1,))[None], 5, 0)
    table = [[1, 0], [0, 1], [-1, 1], [2, 0], [0, 2**31 - 1]]
    lengths = [0, 2**31 - 1, 200, 256, 129]
    plane = oracle.decode_plane(index_q, cache, table, lengths, 12, oracle.WHOLE, 1)
    assert plane.written.sum(1).tolist() == [0, 12, 4, 4, 4]
    assert plane.scores[:, 0, :3].tolist() == [
        [-INF, -INF, -INF],
        [1, 1, -INF],  # the table ends here
        [-INF, 1, -INF],
        [-INF, 1, -INF],
        [1, -INF, -INF],
    ]
    assert np.isneginf(plane.scores[..., 3:]).all()


def test_plane_over_keeps_other_bits() -> None:
    cache = np.broadcast_to(vector(1), (1, 128, 128))
    plane = oracle.decode_plane(query((1,))[None], cache, [[0]], [1], 8, oracle.WHOLE, 1)
    before = np.full((2, 4, 8), NEG_NAN, np.float32)
    after = plane.over(before)
    assert after[0, 0, :4].tolist() == [1, -INF, -INF, -INF]
    assert after[0, 1, :4].tolist() == [0, -INF, -INF, -INF]
    assert (after.view(np.uint32)[0, :, 4:] == 0xFFC00000).all()
    assert (after.view(np.uint32)[1] == 0xFFC00000).all()
    oracle.check_scores(after, before, plane, 0.0)


def test_compound_and_plain_planes_agree() -> None:
    cache = np.random.default_rng(0).integers(0, 127, (3, 128, 128)).astype(np.uint8)
    index_k = oracle.shard_cache(cache, 4)[2]
    wide = oracle.compound_cache(index_k, 48, 8)
    index_q = query((1, 2, 3), (4,))[None]
    args = ([[2, 0, 1]], [384], 4)
    plain = oracle.decode_plane(index_q, index_k, *args, Shard(2, 4, 128), 1)
    offset = oracle.decode_plane(index_q, wide, *args, Shard(2, 4, 128, row_offset=8), 1)
    np.testing.assert_array_equal(plain.scores, offset.scores)


def prefill_case(initialize: bool, sm_scale: float = 1.0) -> oracle.ScorePlane:
    """Segments of 2, 0 and 1 queries at 127, 0 and 300, one row of padding; K = 4."""
    cache = np.broadcast_to(vector(2), (4, 128, 128)).copy()
    cache[1, 0] = vector(4)  # position 128 of segment 0
    index_q = np.repeat(query((3,), (-1,))[None], 4, 0)
    return oracle.prefill_plane(
        index_q,
        cache,
        [[0, 1], [-1, -1], [2, 7]],
        [2, 0, 1],
        [129, 0, 301],
        [127, 0, 300],
        4,
        oracle.WHOLE,
        sm_scale=sm_scale,
        initialize=initialize,
    )


def test_prefill_scores_by_hand() -> None:
    plane = prefill_case(initialize=True)
    assert plane.written.all()
    assert plane.scores[:, 0].tolist() == [
        [6, -INF, -INF, -INF],  # position 127
        [6, 12, -INF, -INF],  # position 128
        [6, -INF, -INF, -INF],  # page 7 does not exist; the table ends before column 2
        [-INF] * 4,  # padding
    ]
    assert plane.scores[:, 1].tolist()[1] == [-2, -4, -INF, -INF]
    bare = prefill_case(initialize=False)
    assert bare.written.tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [True, True, True, False],
        [False] * 4,
    ]
    np.testing.assert_array_equal(bare.scores, plane.scores)


def test_prefill_scale_comes_after_the_maximum() -> None:
    plane = prefill_case(initialize=True, sm_scale=-0.5)
    assert plane.scores[1, 0].tolist() == [-3, -6, -INF, -INF]
    assert plane.mass[1, 0].tolist() == [3, 6, 0, 0]
    zeros = plane.scores[:2, 2, 0]
    assert (zeros == 0).all() and not np.signbit(zeros).any()
    assert prefill_case(initialize=True, sm_scale=0.0).scores[1, 0].tolist() == [0, 0, -INF, -INF]


def test_prefill_stops_at_kv_len_and_own_position() -> None:
    cache = np.broadcast_to(vector(1), (2, 128, 128)).copy()
    cache[0, 5] = vector(2)
    index_q = np.repeat(query((1,))[None], 3, 0)
    args = ([[0, 1]], [3], [5], [4])
    plane = oracle.prefill_plane(index_q, cache, *args, 4, oracle.WHOLE)
    assert plane.scores[:, 0, 0].tolist() == [1, 1, 1]  # position 5 is past kv_len 5
    plane = oracle.prefill_plane(index_q, cache, [[0, 1]], [3], [300], [4], 4, oracle.WHOLE)
    assert plane.scores[:, 0, 0].tolist() == [1, 2, 2]  # positions 4, 5, 6
    assert np.isneginf(plane.scores[..., 1:]).all()


def test_prefill_cuts_segments_at_total_q() -> None:
    cache = np.broadcast_to(vector(1), (1, 128, 128))
    index_q = np.repeat(query((1,))[None], 2, 0)
    plane = oracle.prefill_plane(
        index_q, cache, [[0], [0]], [1, 9], [9, 9], [0, 0], 4, oracle.WHOLE
    )
    assert plane.scores[:, 0, 0].tolist() == [1, 1]


def test_empty_inputs() -> None:
    cache, none = np.zeros((1, 128, 128), np.uint8), np.zeros((0, 4, 128), np.uint8)
    table = np.zeros((0, 3), np.int32)
    assert oracle.decode_plane(none, cache, table, [], 4, oracle.WHOLE, 1).scores.size == 0
    empty = oracle.prefill_plane(none, cache, [[0]], [0], [0], [0], 4, oracle.WHOLE)
    assert empty.scores.shape == (0, 4, 4)
    rows = oracle.select(np.zeros((0, 4, 4), np.float32), np.zeros(0, np.int32), 0, 1)
    assert rows.shape == (4, 0, 33)
    assert oracle.merge(np.stack([rows[:2]] * 2), np.zeros(0, np.int32), 0, 1).shape == (0, 2, 16)


# ---- selection ----


def top(scores: list[float] | Array, visible: int, begin: int = 0, end: int = 0) -> list[int]:
    """Ids of one row, before the -1 tail; all four heads must agree."""
    row = np.asarray(scores, np.float32)
    plane = np.broadcast_to(row, (1, 4, len(row)))
    ids = oracle.top_ids(plane, np.array([visible], np.int32), begin, end)[0]
    assert (ids == ids[0]).all()
    found = [i for i in ids[0].tolist() if i >= 0]
    assert ids[0].tolist() == found + [-1] * (16 - len(found))
    return found


def test_worked_example_of_two_ranks() -> None:
    """Top-2 of 5 blocks with one local block."""
    shares = np.array([[4, 9, 1, 7, 0.5], [8, 2, 6, 7, -INF]], np.float32)
    ids, visible = np.arange(5), np.array([5, 5])
    chosen = oracle.choose(shares, ids, visible, 0, 1, top=2)
    assert chosen.tolist() == [[1, 4], [0, 4]]
    assert np.take_along_axis(shares, chosen, -1).tolist() == [[9, 0.5], [8, -INF]]
    both = np.array([9, 0.5, 8, -INF], np.float32)
    sent = np.array([1, 4, 0, -1])  # block 4 came twice, its largest score stays
    merged = oracle.choose(both, sent, 5, 0, 1, top=2)
    assert sent[merged].tolist() == [1, 4]
    whole = shares.max(0)
    assert whole.tolist() == [8, 9, 6, 7, 0.5]
    assert oracle.choose(whole, ids, 5, 0, 1, top=2).tolist() == [1, 4]


def test_nan_and_minus_inf_are_one_score() -> None:
    # 14 finite scores leave two places for four equal ones: the lower ids.
    low = [NAN, NEG_NAN, -INF, NAN]
    assert top([1.0] * 14 + low, 18) == [*range(14), 14, 15]
    assert top([-INF, NEG_NAN, NAN, -INF] + [-1e38] * 14, 18) == [0, 1, *range(4, 18)]
    assert top([NAN] + [0.0] * 16, 17) == list(range(1, 17))
    assert top([NEG_NAN] + [0.0] * 16, 17) == list(range(1, 17))


def test_zeros_are_one_score() -> None:
    assert top([-0.0, 0.0] * 10, 20) == PREFIX
    assert top([-0.0] * 3 + [0.0] * 17, 20) == PREFIX


def test_plus_inf_wins_over_finite_and_loses_to_forced() -> None:
    scores = [3e38] * 20
    scores[19] = INF
    assert top(scores, 20) == [*range(15), 19]
    scores = [INF] * 20
    scores[0] = scores[18] = -INF
    scores[19] = NAN
    assert top(scores, 20, begin=1, end=2) == [0, *range(1, 14), 18, 19]


def test_ten_winners_and_ties_at_full_width() -> None:
    scores = np.zeros(8192)
    winners = [100 + 700 * i for i in range(10)]
    scores[winners] = np.arange(1, 11)
    assert top(scores, 8192) == [0, 1, 2, 3, 4, 5, *winners]


def test_close_scores_at_full_width() -> None:
    scores = 1.0 + np.arange(8192) * 2.0**-23
    assert top(scores, 8192) == list(range(8176, 8192))
    assert top(scores[::-1], 8192) == PREFIX


def test_forced_windows() -> None:
    scores = np.arange(40.0)
    assert top(scores, 40, begin=3) == [0, 1, 2, *range(27, 40)]
    assert top(scores[::-1], 40, end=2) == [*range(14), 38, 39]
    assert top(scores[::-1], 30, begin=4, end=12) == [0, 1, 2, 3, *range(18, 30)]
    assert top(scores, 3, begin=4, end=12) == [0, 1, 2]
    assert top(scores, 20, begin=12, end=4) == [*range(12), *range(16, 20)]


def test_forced_end_counts_from_the_raw_number() -> None:
    scores = -np.arange(8300.0)
    assert top(scores, 9000, end=4) == PREFIX
    assert top(scores, 8194, end=4) == [*range(14), 8190, 8191]
    assert top(scores, 8192, end=4) == [*range(12), *range(8188, 8192)]


def test_short_rows_take_everything() -> None:
    assert top([-INF, NAN, 3, INF, 1], 4) == [0, 1, 2, 3]
    assert top([1.0] * 16, 16) == PREFIX
    assert top([5.0] * 4, 0, begin=1, end=1) == []
    assert top([5.0] * 4, -3, begin=1, end=1) == []
    assert top([5.0] * 4, 100) == [0, 1, 2, 3]


def test_ids_are_scaled() -> None:
    plane = np.broadcast_to(np.arange(6.0, dtype=np.float32), (1, 4, 6))
    ids = oracle.top_ids(plane, [8], 0, 0, index_scale=2, index_offset=1)[0, 0]
    assert ids.tolist() == [1, 3, 5, 7] + [-1] * 12


# ---- rows ----


def words(*values: float) -> list[int]:
    return [int(word) for word in np.array(values, np.float32).view(np.int32)]


def test_row_layout_and_raw_bits() -> None:
    scores = np.zeros((2, 4, 4), np.float32)
    scores[0, 2] = [-0.0, 7.5, -INF, 9.0]
    scores.view(np.uint32)[0, 2, 2] = 0xFFC12345
    rows = oracle.select(scores, np.array([3, 0], np.int32), 0, 0)
    assert rows.dtype == np.int32 and rows.shape == (4, 2, 33)
    assert rows[2, 0, :4].tolist() == [-(2**31), 0x40F00000, 0xFFC12345 - 2**32, MINUS_INF_WORD]
    assert rows[2, 0, 3:16].tolist() == [MINUS_INF_WORD] * 13
    assert rows[2, 0, 16:].tolist() == [0, 1, 2] + [-1] * 13 + [1]
    assert rows[2, 1].tolist() == [MINUS_INF_WORD] * 16 + [-1] * 16 + [1]


def test_row_scores_follow_ascending_ids() -> None:
    scores = np.broadcast_to(np.arange(20.0, 0, -1, dtype=np.float32), (1, 4, 20)).copy()
    scores[0, 0, 1] = -5
    rows = oracle.select(scores, np.array([40]), 1, 1, index_scale=2, index_offset=1)
    assert rows[0, 0, 16:32].tolist() == [1, *range(5, 33, 2), 39]
    assert rows[0, 0, :16].tolist() == words(20, *range(18, 4, -1), 1)


def test_heads_go_to_their_owner() -> None:
    rows = np.arange(4 * 2 * 33).reshape(4, 2, 33)
    sources = [rows, rows + 1000, rows + 2000, rows + 3000]
    received = oracle.exchange(sources)
    assert received[2].shape == (4, 1, 2, 33)
    assert received[2][3, 0, 1, 0] == 3000 + 2 * 66 + 33
    two = oracle.exchange(sources[:2])
    assert two[1].shape == (2, 2, 2, 33)
    assert two[1][0, 1, 1, 5] == 3 * 66 + 33 + 5


def test_generations() -> None:
    before = np.array([0, 1, 2**31 - 1, -(2**31), -2, -1], np.int32)
    assert oracle.next_generation(before).tolist() == [1, 2, -(2**31), -(2**31) + 1, -1, 1]


def test_tagged_words() -> None:
    rows = np.arange(-3, 30, dtype=np.int32).reshape(1, 33)
    tagged, bumped = oracle.tag_rows(rows, np.array([6], np.int32))
    assert tagged.shape == (1, 32, 2) and tagged.dtype == np.int32 and bumped.tolist() == [7]
    assert tagged[0, 0].tolist() == [-3, 7] and tagged[0, 31].tolist() == [28, 7]
    as_int64 = np.ascontiguousarray(tagged).view("<i8")[0, :, 0]
    assert as_int64[0] == (7 << 32) | 0xFFFFFFFD
    assert as_int64[3] == 7 << 32


# ---- merge ----


def row(ids: list[int], scores: list[float]) -> list[int]:
    pad = 16 - len(ids)
    return words(*scores, *[-INF] * pad) + ids + [-1] * pad + [1]


def received(*sources: list[int]) -> Array:
    """One head, one token of each source."""
    return np.array(sources, np.int32)[:, None, None]


def merged(*sources: list[int], visible: int, init: int = 0, local: int = 0) -> list[int]:
    out = oracle.merge(received(*sources), np.array([visible], np.int32), init, local)
    assert out.shape == (1, 1, 16) and out.dtype == np.int32
    return [int(i) for i in out[0, 0]]


def test_merge_takes_the_best_and_keeps_the_largest_of_a_pair() -> None:
    left = row(list(range(16)), [float(i) for i in range(16)])
    right = row([0, 20, 21, 22], [99.0, 50.0, 5.0, 0.0])
    # 0 has 99, 20 has 50, then 15..2; block 21 with 5 ties with block 5 and block 22 is too low.
    assert merged(left, right, visible=23) == [0, *range(3, 16), 20, 21]
    assert merged(right, left, visible=23) == [0, *range(3, 16), 20, 21]


def test_merge_of_equal_ids_has_no_hole() -> None:
    left = row(list(range(16)), [1.0] * 16)
    right = row([*range(8), *range(30, 38)], [1.0] * 8 + [2.0] * 8)
    assert merged(left, right, visible=40) == [*range(8), *range(30, 38)]


def test_merge_drops_bad_ids() -> None:
    left = row([0, 3, 5, 2**31 - 1], [1.0, 2.0, 9.0, 9.0])
    right = row([-5, 4], [INF, NAN])
    assert merged(left, right, visible=5) == [0, 3, 4] + [-1] * 13
    far = row([8191, 8192], [1.0, 2.0])
    assert merged(far, far, visible=9000) == [8191] + [-1] * 15


def test_merge_orders_nan_inf_and_zeros() -> None:
    left = row(list(range(16)), [-0.0] + [0.0] * 15)
    assert merged(left, row([16], [0.0]), visible=17) == PREFIX
    assert merged(left, row([0], [NAN]), visible=16) == PREFIX
    assert merged(left, row([16], [NAN]), visible=17) == PREFIX
    assert merged(left, row([16], [NEG_NAN]), visible=17) == PREFIX
    assert merged(left, row([16], [INF]), visible=17) == [*range(15), 16]
    low = row(list(range(16)), [-1.0] * 16)
    # A NaN copy of block 9 must not hide its finite one.
    assert merged(low, row([9, 16], [NAN, -2.0]), visible=17) == PREFIX


def test_merge_forces_again() -> None:
    left = row(list(range(16)), [100.0] * 16)
    right = row([16, 17], [-INF, NAN])
    assert merged(left, right, visible=18, local=2) == [*range(14), 16, 17]
    assert (
        merged(row([0], [-INF]), row(list(range(1, 17)), [INF] * 16), visible=17, init=1) == PREFIX
    )


def test_merge_padding_rows() -> None:
    empty = received(row([], []), row([], []))
    for visible in (0, -4):
        count = np.array([visible], np.int32)
        assert oracle.merge(empty, count, 0, 1)[0, 0].tolist() == [-1] * 16
        prefill = oracle.merge(empty, count, 0, 1, prefill=True)
        assert prefill[0, 0].tolist() == [0] + [-1] * 15
    assert oracle.merge(empty, np.array([3]), 0, 1, prefill=True)[0, 0].tolist() == [-1] * 16


def four_rows() -> Array:
    """Two sources, two heads, capacity 3; two tokens in use. Head h, token t holds id 2 h + t."""
    rows = np.zeros((2, 2, 3, 33), np.int32)
    for h, t in itertools.product(range(2), range(2)):
        rows[:, h, t] = row([2 * h + t], [1.0])
    return rows


def test_legacy_faults_blank_their_row_and_count() -> None:
    rows = four_rows()
    visible = np.array([9, 9])
    good = oracle.merge_legacy(rows, visible, 0, 1)
    assert good.errors == 0 and good.output[..., 0].tolist() == [[0, 2], [1, 3]]
    assert not good.received[:, :, :2, 32].any()
    rows[0, 1, 0, 32], rows[1, 1, 0, 32], rows[1, 0, 1, 32] = 0, 2, -1
    rows[:, :, 2, 32] = 5  # past the tokens: not looked at
    bad = oracle.merge_legacy(rows, visible, 0, 1)
    assert bad.errors == 3
    assert bad.output[..., 0].tolist() == [[0, -1], [-1, 3]]
    assert (bad.output[0, 1] == -1).all() and (bad.output[1, 0] == -1).all()
    assert not bad.received[:, :, :2, 32].any() and (bad.received[:, :, 2, 32] == 5).all()
    np.testing.assert_array_equal(bad.received[..., :32], rows[..., :32])


def test_tagged_faults_need_all_words() -> None:
    counters = np.array([[4, -1, 8], [2**31 - 1, 6, 8]], np.int32)
    sent, after = oracle.tag_rows(four_rows(), np.broadcast_to(counters, (2, 2, 3)))
    assert after[0].tolist() == [[5, 1, 9], [-(2**31), 7, 9]]
    visible = np.array([9, 9])
    good = oracle.merge_tagged(sent, counters, visible, 0, 1)
    assert good.errors == 0 and good.output[..., 0].tolist() == [[0, 2], [1, 3]]
    assert good.expected is not None
    assert good.expected.tolist() == [[5, 1, 8], [-(2**31), 7, 8]]

    torn = sent.copy()
    torn[1, 0, 0, 31, 1] -= 1  # one stale word of one source
    torn[0, 1, 1, :, 1] += 1  # a later generation is a fault as well
    bad = oracle.merge_tagged(torn, counters, visible, 0, 1)
    assert bad.errors == 2
    assert bad.output[..., 0].tolist() == [[-1, 2], [1, -1]]
    np.testing.assert_array_equal(bad.expected, good.expected)


# ---- whole answers ----


def test_answer_by_hand() -> None:
    """20 blocks; block g scores (g * 7) mod 20 on head 0 and its negative on head 1."""
    values = [(g * 7) % 20 for g in range(20)]
    small = [v if v <= 16 else v / 2 + 8.25 for v in values]  # 17, 18, 19 -> 16.75, 17.25, 17.75
    cache = np.zeros((20, 128, 128), np.uint8)
    for g, value in enumerate(small):
        whole, part = divmod(value, 1)
        cache[19 - g] = vector(min(whole, 16), max(whole - 16, 0), part)
    index_q = query((1, 1, 1), (-1, -1, -1))[None]
    table, length = [list(range(19, -1, -1))], [20 * 128]
    plane = oracle.global_decode_plane(index_q, cache, table, length, 20, 1)
    assert plane.scores[0, 0].tolist() == small
    ids = oracle.answer(plane.scores, oracle.decode_num_valid_pages(length, 1), 0, 1)
    # Head 0 leaves out 0, 1, 2, 3 = blocks 0, 3, 6, 9; head 1 leaves out 16..19 = blocks 8, 11,
    # 14, 17. Heads 2 and 3 are all zero: lowest ids and the local block.
    assert ids[0, 0].tolist() == [g for g in range(20) if g not in (0, 3, 6, 9)]
    assert ids[0, 1].tolist() == [g for g in range(20) if g not in (8, 11, 14, 17)]
    assert ids[0, 2].tolist() == ids[0, 3].tolist() == [*range(15), 19]
    oracle.check_ids(ids, [20])


def small_integers(rng: np.random.Generator, shape: tuple[int, ...], limit: int) -> Array:
    return oracle.e4m3_encode(rng.integers(-limit, limit + 1, shape))


def rank_answers(
    planes: list[oracle.ScorePlane], visible: Array, page_size: int, *, prefill: bool
) -> Array:
    """Select on every rank, exchange, merge: ids [T, 4, 16]."""
    world_size = len(planes)
    rows = []
    for rank, plane in enumerate(planes):
        shard = Shard(rank, world_size, page_size)
        scores = plane.scores.astype(np.float32)
        scale, offset = shard.index_scale, shard.index_offset
        rows.append(oracle.select(scores, visible, 1, 2, index_scale=scale, index_offset=offset))
    owned = [oracle.merge(r, visible, 1, 2, prefill=prefill) for r in oracle.exchange(rows)]
    return np.concatenate(owned, 1)


SHAPES = list(itertools.product((2, 4), (128, 256)))


@pytest.mark.parametrize(("world_size", "page_size"), SHAPES)
def test_decode_ranks_give_the_whole_answer(world_size: int, page_size: int) -> None:
    rng = np.random.default_rng(world_size + page_size)
    pages, width, columns = 40, 20, 24
    lengths = [0, 3, 700, 16 * 128, 18 * page_size - 5, 20 * page_size, 20 * page_size + 999]
    cache = small_integers(rng, (pages, page_size, 128), 4)
    table = np.stack([rng.permutation(pages)[:width] for _ in lengths]).astype(np.int32)
    table[4, 7] = -1
    index_q = small_integers(rng, (len(lengths) * 2, 4, 128), 3)
    planes = [
        oracle.decode_plane(
            index_q, index_k, table, lengths, columns, Shard(rank, world_size, page_size), 2
        )
        for rank, index_k in enumerate(oracle.shard_cache(cache, world_size))
    ]
    blocks = columns * page_size // 128
    visible = oracle.decode_num_valid_pages(lengths, 2)
    whole = oracle.global_decode_plane(index_q, cache, table, lengths, blocks, 2)
    joined = oracle.join_planes([p.scores for p in planes], page_size)
    np.testing.assert_array_equal(joined, whole.scores)
    ids = oracle.answer(whole.scores, visible, 1, 2)
    oracle.check_ids(ids, np.minimum(visible, blocks))
    np.testing.assert_array_equal(rank_answers(planes, visible, page_size, prefill=False), ids)
    assert len({tuple(i) for i in ids[-3].tolist()}) > 1  # the heads do choose


@pytest.mark.parametrize(("world_size", "page_size"), SHAPES)
def test_prefill_ranks_give_the_whole_answer(world_size: int, page_size: int) -> None:
    rng = np.random.default_rng(world_size * page_size)
    pages, columns = 48, 24
    queries, offsets = [70, 0, 5, 9], [17 * 128 - 3, 0, 0, 21 * page_size]
    lengths = [17 * 128 + 67, 0, 5, 21 * page_size + 9]
    cache = small_integers(rng, (pages, page_size, 128), 4)
    table = np.stack([rng.permutation(pages)[:columns] for _ in queries]).astype(np.int32)
    index_q = small_integers(rng, (sum(queries) + 3, 4, 128), 3)
    segments = (queries, lengths, offsets)
    planes = [
        oracle.prefill_plane(
            index_q, index_k, table, *segments, columns, Shard(rank, world_size, page_size)
        )
        for rank, index_k in enumerate(oracle.shard_cache(cache, world_size))
    ]
    blocks = columns * page_size // 128
    visible = oracle.prefill_num_valid_pages(queries, offsets, len(index_q))
    whole = oracle.global_prefill_plane(index_q, cache, table, *segments, blocks)
    joined = oracle.join_planes([p.scores for p in planes], page_size)
    np.testing.assert_array_equal(joined, whole.scores)
    ids = oracle.answer(whole.scores, visible, 1, 2, prefill=True)
    oracle.check_ids(ids, visible, prefill=True)
    assert ids[-1, 0].tolist() == [0] + [-1] * 15
    np.testing.assert_array_equal(rank_answers(planes, visible, page_size, prefill=True), ids)


def test_prefill_and_decode_agree() -> None:
    """The last query of a prompt is the decode token at the same position."""
    rng = np.random.default_rng(5)
    cache = rng.integers(0, 256, (4, 128, 128)).astype(np.uint8)  # NaN keys among them
    index_q = rng.integers(0, 127, (1, 4, 128)).astype(np.uint8)
    decode = oracle.global_decode_plane(index_q, cache, [[3, 1, 0, 2]], [400], 4, 1)
    prefill = oracle.global_prefill_plane(index_q, cache, [[3, 1, 0, 2]], [1], [400], [399], 4)
    np.testing.assert_array_equal(decode.scores, prefill.scores)


def test_step_sizes_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(9)
    cache = rng.integers(0, 127, (6, 128, 128)).astype(np.uint8)
    index_q = rng.integers(0, 256, (70, 4, 128)).astype(np.uint8)
    args = (index_q, cache, [[5, 4, 3, 2, 1, 0]], [70], [700], [600], 6)
    once = oracle.global_prefill_plane(*args)
    monkeypatch.setattr(oracle, "_TOKENS_PER_STEP", 7)
    monkeypatch.setattr(oracle, "_KEYS_PER_STEP", 130)
    again = oracle.global_prefill_plane(*args)
    np.testing.assert_array_equal(once.scores, again.scores)
    np.testing.assert_array_equal(once.mass, again.mass)


# ---- the checkers refuse ----


def good_ids() -> Array:
    return np.array([[[*range(16)]], [[0, 1, 2] + [-1] * 13], [[-1] * 16]], np.int32)


def test_check_ids_accepts() -> None:
    oracle.check_ids(good_ids(), [40, 3, 0])
    oracle.check_ids(np.array([[[0] + [-1] * 15]], np.int32), [0], prefill=True)
    oracle.check_ids(np.array([[[*range(8176, 8192)]]], np.int32), [9000])


@pytest.mark.parametrize(
    ("token", "place", "value"),
    [
        (0, 3, 2),  # twice
        (0, 3, 5),  # not ascending
        (0, 3, -1),  # hole
        (0, 15, -1),  # short
        (0, 15, 40),  # not visible
        (1, 2, 3),
        (1, 3, -2),  # another negative in the tail
        (1, 15, -(2**31)),
        (1, 15, 0),
        (2, 0, 0),
        (2, 7, -3),
    ],
)
def test_check_ids_refuses(token: int, place: int, value: int) -> None:
    ids = good_ids()
    ids[token, 0, place] = value
    with pytest.raises(AssertionError):
        oracle.check_ids(ids, [40, 3, 0])


def test_check_ids_refuses_prefill_padding_in_decode() -> None:
    padding = np.array([[[0] + [-1] * 15]], np.int32)
    with pytest.raises(AssertionError):
        oracle.check_ids(padding, [0])
    with pytest.raises(AssertionError):
        oracle.check_ids(np.full((1, 1, 16), -1, np.int32), [0], prefill=True)


@pytest.mark.parametrize(
    ("column", "value"),
    [(0, 6.1), (0, NAN), (0, -INF), (0, INF), (1, 0.0), (2, -INF), (3, -0.0), (4, 0.0)],
)
def test_check_scores_refuses(column: int, value: float) -> None:
    # Columns: score 6 with mass 6, nothing visible, untouched 1.0, zero, untouched -0.0.
    scores = np.broadcast_to(np.array([6, -INF, 5, 0, 0.0]), (1, 4, 5))
    mass = np.broadcast_to(np.array([6.0, 0, 5, 0, 0]), (1, 4, 5))
    plane = oracle.ScorePlane(scores, mass, np.array([[True, True, False, True, False]]))
    before = np.broadcast_to(np.array([7, 7, 1, 7, -0.0], np.float32), (1, 4, 5))
    actual = plane.over(before)
    actual[0, 1, 0] += np.float32(6 * 2.0**-18)
    oracle.check_scores(actual, before, plane, oracle.EXACT_EPS)
    actual[0, 2, column] = value
    with pytest.raises(AssertionError):
        oracle.check_scores(actual, before, plane, oracle.EXACT_EPS)


def test_differing_blocks() -> None:
    a, b = good_ids(), good_ids()
    b[0, 0, 15] = 30
    b[1, 0, 1:4] = [2, 5, 6]
    assert oracle.differing_blocks(a, b).tolist() == [[1], [1], [0]]
    assert oracle.differing_blocks(b, a).tolist() == [[1], [2], [0]]
