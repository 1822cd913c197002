"""The portable decode scorers against the float64 reference."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from inputs import COMPOUND, COMPOUND_WIDE, INT_MAX, INT_MIN, W2, W2_WIDE, W4, W4_WIDE, Layout
from oracle import Shard

from msa_icp_jax import msa_icp_decode_index_score_sharded, msa_icp_decode_score_publish
from msa_icp_jax.ops.select import MSAIcpRows

REQUESTS, PAGES, WIDTH, COLUMNS = 8, 48, 22, 40
INF = float("inf")


CASES = [
    (W2, 1),
    (W2, 8),
    (W4, 2),
    (COMPOUND, 4),
    (W2_WIDE, 3),
    (W2_WIDE, 5),
    (W4_WIDE, 6),
    (COMPOUND_WIDE, 7),
]
# Rows are planes selected: these cover both page sizes and numbers of ranks, and a compound page.
ROW_CASES = [(W4, 2), (COMPOUND, 4), (W2_WIDE, 3), (W4_WIDE, 6)]


def by_case(cases):
    ids = [f"{'-'.join(map(str, layout))}-q{query_len}" for layout, query_len in cases]
    return pytest.mark.parametrize(("layout", "query_len"), cases, ids=ids)


# Empty and negative lengths, shorter than the query tokens, page edges, past the table, past int32.
LENGTHS = [
    [0, 1, 127, 128, 129, 2047, WIDTH * 128, -5],
    [5000, INT_MAX, INT_MIN, 3, 300, 1793, 2049, COLUMNS * 256],
]


@functools.cache
def scorer(layout: Layout, query_len: int) -> Any:
    """score(index_q, index_k, table, lens, score_out, rank); one executable for every rank."""

    def score(q, k, table, lens, score_out, rank):
        return msa_icp_decode_index_score_sharded(
            q,
            k,
            table,
            lens,
            score_out,
            rank=rank,
            world_size=layout.world_size,
            page_size=layout.page_size,
            decode_query_len=query_len,
            max_decode_query_len=8,
            row_offset=layout.row_offset,
            backend="xla",
        )

    return jax.jit(score, donate_argnums=4)


@functools.cache
def publisher(layout: Layout, query_len: int, begin: int = 1, end: int = 2) -> Any:
    """publish(index_q, index_k, table, lens, nvp, generations, slot, rank) -> MSAIcpRows."""

    def publish(q, k, table, lens, nvp, generations, slot, rank) -> MSAIcpRows:
        return msa_icp_decode_score_publish(
            q,
            k,
            table,
            lens,
            nvp,
            rank=rank,
            world_size=layout.world_size,
            page_size=layout.page_size,
            decode_query_len=query_len,
            force_begin_blocks=begin,
            force_end_blocks=end,
            generations=generations,
            slot=slot,
            row_offset=layout.row_offset,
            backend="xla",
        )

    return jax.jit(publish)


class Inputs(NamedTuple):
    queries: np.ndarray
    keys: np.ndarray
    table: np.ndarray
    lens: np.ndarray

    def arrays(self) -> tuple[jax.Array, ...]:
        return (
            inputs.index_array(self.queries),
            inputs.index_array(self.keys),
            jnp.asarray(self.table),
            jnp.asarray(self.lens),
        )


def integer_inputs(layout: Layout, query_len: int, lens: Sequence[int], seed: int = 0) -> Inputs:
    rng = np.random.default_rng(seed)
    return Inputs(
        inputs.integer_queries(rng, len(lens) * query_len),
        inputs.integer_keys(rng, PAGES, layout.page_rows),
        inputs.block_table(rng, lens, layout.page_size, WIDTH, PAGES, bad_share=0.1),
        np.array(lens, np.int32),
    )


def reference(case: Inputs, shard: Shard, query_len: int, columns: int = COLUMNS):
    return oracle.decode_plane(
        case.queries, case.keys, case.table, case.lens, columns, shard, query_len
    )


def expected_rows(case: Inputs, nvp: Any, shard: Shard, query_len: int, columns: int, force: Any):
    """What the fused scorer sends: the exact plane, selected."""
    plane = reference(case, shard, query_len, columns).scores.astype(np.float32)
    found = oracle.select(
        plane, nvp, *force, index_scale=shard.index_scale, index_offset=shard.index_offset
    )
    return oracle.rows_by_owner(found, shard.world_size)


# ---- the plane ----


@by_case(CASES)
def test_integer_scores_are_bit_exact_and_nothing_else_is_touched(layout, query_len):
    score = scorer(layout, query_len)
    rng = np.random.default_rng(1)
    for seed, lens in enumerate(LENGTHS):
        case = integer_inputs(layout, query_len, lens, seed)
        before = inputs.any_bits(rng, (REQUESTS * query_len + 3, 4, COLUMNS))
        for rank in range(layout.world_size):
            after = np.asarray(score(*case.arrays(), before, jnp.int32(rank)))
            plane = reference(case, layout.shard(rank), query_len)
            oracle.check_scores(after, before, plane, eps=0)


def test_one_executable_serves_every_rank_and_slot_and_repeats_compile_nothing():
    """Query lengths taken in turns, as with speculative decoding."""

    def score(layout: Layout, query_len: int, rank: int) -> None:
        arrays = integer_inputs(layout, query_len, LENGTHS[0]).arrays()
        before = np.zeros((REQUESTS * query_len + 3, 4, COLUMNS), np.float32)
        scorer(layout, query_len)(*arrays, before, jnp.int32(rank))

    def publish(rank: int) -> None:
        arrays, tokens = integer_inputs(W4, 2, LENGTHS[0]).arrays(), REQUESTS * 2
        counts, generations = np.ones(tokens, np.int32), np.zeros((3, 4, tokens + 2), np.int32)
        publisher(W4, 2)(*arrays, counts, generations, jnp.int32(rank + 1), jnp.int32(rank))

    def call(rank: int) -> None:
        score(W4, 2, rank)
        score(COMPOUND, 4, rank)
        publish(rank)

    call(rank=0)
    with inputs.nothing_compiles():
        for rank in (1, 3, 2):
            call(rank)


def test_a_static_rank_gives_the_bits_of_a_traced_one():
    case = integer_inputs(W4, 2, LENGTHS[0])
    before = np.zeros((REQUESTS * 2, 4, COLUMNS), np.float32)
    traced = scorer(W4, 2)(*case.arrays(), before, jnp.int32(3))
    static = jax.jit(functools.partial(scorer(W4, 2).__wrapped__, rank=3))(*case.arrays(), before)
    np.testing.assert_array_equal(np.asarray(traced), np.asarray(static))


def score_one(
    layout: Layout, keys: np.ndarray, table: Sequence[Sequence[int]], lens: Any, rank: int = 0
):
    """A rank's scores [B + 3, COLUMNS] of all-ones queries over 7s; missing requests are empty."""
    rows = np.full((REQUESTS, WIDTH), -1, np.int32)
    for row, entries in zip(rows, table, strict=False):
        row[: len(entries)] = entries
    padded = np.zeros(REQUESTS, np.int32)
    padded[: len(lens)] = lens
    case = Inputs(oracle.e4m3_encode(np.ones((REQUESTS, 4, 128))), keys, rows, padded)
    before = np.full((REQUESTS + 3, 4, COLUMNS), 7, np.float32)
    scores = np.asarray(scorer(layout, 1)(*case.arrays(), before, jnp.int32(rank)))
    np.testing.assert_array_equal(scores, scores[:, :1].repeat(4, axis=1))
    return scores[:, 0]


def one_hot_cache() -> np.ndarray:
    """A cache for W2, P 128 whose rows sum to 0, but the first of page p to p % 16."""
    keys = np.zeros((PAGES, 64, 128))
    keys[:, 0, 0] = np.arange(PAGES) % 16
    return oracle.e4m3_encode(keys)


def test_graph_padding_touches_nothing():
    scores = score_one(W2, one_hot_cache(), [[5], [5], [5, 6, 7, 8, 9, 10]], [0, 0, 700])
    assert scores[2, :8].tolist() == [5, 6, 7, 8, 9, 10, -INF, -INF]
    assert (scores[2, 8:] == 7).all()
    assert (scores[[0, 1, 3, 4, 5, 6, 7, 8, 9, 10]] == 7).all()


def test_table_entries_past_the_length_are_never_read():
    for garbage in (-1, 6, PAGES, INT_MAX, INT_MIN):
        scores = score_one(W2, one_hot_cache(), [[3, garbage, garbage]], [100])
        assert scores[0, :5].tolist() == [3, -INF, -INF, -INF, 7]


def test_a_used_entry_outside_the_cache_hides_its_rows():
    for bad in (-1, -PAGES, PAGES, INT_MAX, INT_MIN):
        scores = score_one(W2, one_hot_cache(), [[3, bad, 4]], [384])
        assert scores[0, :5].tolist() == [3, -INF, 4, -INF, 7]


def test_a_length_past_the_table_stops_at_its_width():
    scores = score_one(W2, one_hot_cache(), [range(WIDTH)], [5000])
    assert scores[0, :WIDTH].tolist() == [p % 16 for p in range(WIDTH)]
    assert (scores[0, WIDTH:] == -INF).all()  # 5000 tokens are 40 columns


def test_a_table_far_narrower_than_the_plane():
    rng = np.random.default_rng(0)
    lens = np.full(REQUESTS, INT_MAX, np.int32)
    keys = inputs.integer_keys(rng, 32, 32)
    table = rng.permutation(32)[None].repeat(REQUESTS, 0).astype(np.int32)
    case = Inputs(inputs.integer_queries(rng, REQUESTS), keys, table, lens)
    before = np.zeros((REQUESTS, 4, 1024), np.float32)
    after = np.asarray(scorer(W4, 1)(*case.arrays(), before, jnp.int32(1)))
    plane = reference(case, W4.shard(1), 1, columns=1024)
    oracle.check_scores(after, before, plane, eps=0)
    assert (after[..., 32:] == -INF).all()


def test_unwritten_rows_of_the_last_page_may_hold_anything():
    """Length 193: the second page ends at row 64, the first of rank 1's half."""
    keys = one_hot_cache()
    for garbage in (0x7F, 0xFF, 0x7E):
        keys[4, 1:] = garbage
        for _ in range(2):
            scores = score_one(W2, keys, [[3, 4]], [193], rank=1)
            assert scores[0, :5].tolist() == [3, 4, -INF, -INF, 7]
    keys[4, 0] = 0x7E  # the last visible row does win
    assert score_one(W2, keys, [[3, 4]], [193], rank=1)[0, 1] == 448 * 128


def test_a_nan_product_never_wins_and_never_poisons():
    keys = one_hot_cache()
    keys[3, 7] = 0x7F
    keys[4, :] = 0xFF
    scores = score_one(W2, keys, [[3, 4]], [256])
    assert scores[0, :3].tolist() == [3, -INF, -INF]


def test_a_zero_is_positive():
    keys = np.full((PAGES, 64, 128), 0x80, np.uint8)  # -0.0
    scores = score_one(W2, keys, [[3]], [64])
    assert scores[0, 0] == 0
    assert not np.signbit(scores[0, 0])


def test_more_query_tokens_than_keys():
    """Length 2, four query tokens: two sit at negative positions and see nothing."""
    case = integer_inputs(COMPOUND, 4, [2] * REQUESTS)
    case.table[:, 0] = 5
    case.keys[5] = 0x38  # 1.0
    before = np.full((REQUESTS * 4 + 3, 4, COLUMNS), 7, np.float32)
    after = np.asarray(scorer(COMPOUND, 4)(*case.arrays(), before, jnp.int32(0)))
    first = after[: REQUESTS * 4].reshape(REQUESTS, 4, 4, COLUMNS)
    assert (first[:, :2, :, :4] == -INF).all()
    assert (first[:, 2:, :, 0] > -INF).all()
    assert oracle.decode_num_valid_pages([2], 4).tolist() == [0, 0, 1, 1]


def test_no_requests():
    q, k = (
        inputs.index_array(np.zeros((0, 4, 128), np.uint8)),
        inputs.index_array(np.zeros((3, 64, 128), np.uint8)),
    )
    table, lens = jnp.zeros((0, 4), jnp.int32), jnp.zeros(0, jnp.int32)
    before = inputs.any_bits(np.random.default_rng(0), (5, 4, 8))
    after = np.asarray(scorer(W2, 1)(q, k, table, lens, before, jnp.int32(0)))
    np.testing.assert_array_equal(after.view(np.int32), before.view(np.int32))
    for generations, row in ((None, (33,)), (jnp.zeros((3, 4, 6), jnp.int32), (32, 2))):
        sent = publisher(W2, 1)(q, k, table, lens, lens, generations, 0, jnp.int32(0))
        assert sent.rows.shape == (2, 2, 0, *row)
        if generations is not None:
            assert not np.asarray(sent.generations).any()


def million_key_inputs(page_size: int) -> Inputs:
    """A request of 1 Mi keys beside two small ones; pages repeat, so scores tie.

    Pages 0 to 7 come once each, near the end, and hold the best keys of the long one's head 0.
    """
    rng = np.random.default_rng(4)
    lens, pages, once = [300, 1 << 20, 0], 192, 8
    layout, columns = Layout(4, page_size), (1 << 20) // page_size
    queries = inputs.integer_queries(rng, len(lens))
    keys = inputs.integer_keys(rng, pages, layout.page_rows)
    keys[:once] = oracle.e4m3_encode(4 * np.sign(oracle.decode(queries[1, 0])))
    others = inputs.block_table(rng, lens, page_size, columns, pages - once, bad_share=0.01)
    table = np.where((others >= 0) & (others < pages - once), others + once, -1).astype(np.int32)
    table[1, columns - 120 : columns - 120 + once] = np.arange(once)
    return Inputs(queries, keys, table, np.array(lens, np.int32))


def test_a_million_keys():
    """The columns are no multiple of those of one step: the last step scores some again."""
    layout, rank = W4, 3
    case, shard = million_key_inputs(layout.page_size), layout.shard(rank)
    columns = (1 << 20) // layout.page_size
    before = inputs.any_bits(np.random.default_rng(0), (3, 4, columns))
    after = np.asarray(scorer(layout, 1)(*case.arrays(), before, jnp.int32(rank)))
    plane = reference(case, shard, 1, columns)
    oracle.check_scores(after, before, plane, eps=0)

    nvp = oracle.decode_num_valid_pages(case.lens, 1)
    assert nvp.tolist() == [3, 8192, 0]
    sent = publisher(layout, 1)(*case.arrays(), nvp, None, 0, jnp.int32(rank))
    want = expected_rows(case, nvp, shard, 1, columns, (1, 2))
    np.testing.assert_array_equal(np.asarray(sent.rows), want)
    assert (want[0, 0, 1, 24:32] > 7800).all()  # the best keys do win


@pytest.mark.parametrize("element", [np.uint8, np.uint16], ids=["float8", "bfloat16"])
def test_a_page_past_two_to_the_31_bytes(element):
    """Page 47,663 of 45,056 bytes lies past 2^31; most of the cache stays untouched."""
    pages, pitch = 47_680, 352 // np.dtype(element).itemsize
    size = pages * pitch * 128
    memory = np.zeros(size + 64, element)
    first = -memory.ctypes.data % 64 // memory.itemsize
    cache = memory[first:][:size].reshape(pages, pitch, 128)
    far, index_dtype = [47_663, 47_679], {1: "float8_e4m3fn", 2: "bfloat16"}[memory.itemsize]
    keys = inputs.integer_keys(np.random.default_rng(0), 3, 32, index_dtype)[:2]
    cache[far, 16:48] = keys
    layout = Layout(4, 128, row_offset=16, pitch=pitch)
    case = Inputs(
        inputs.integer_queries(np.random.default_rng(0), 1, index_dtype),
        cache,
        np.array([[far[0], 1, far[1], 2]], np.int32),
        np.array([512], np.int32),
    )
    before = np.zeros((1, 4, 4), np.float32)
    shared = jax.device_put(cache.view(index_dtype), may_alias=True)
    arrays = (inputs.index_array(case.queries), shared, case.table, case.lens)
    after = np.asarray(scorer(layout, 1)(*arrays, before, jnp.int32(2)))
    oracle.check_scores(after, before, reference(case, layout.shard(2), 1, columns=4), eps=0)
    assert after[0, 0, 0] > 0


# ---- precision ----


def test_two_scales_stay_within_the_exact_bound():
    rng = np.random.default_rng(2)
    case = Inputs(
        inputs.two_scale_bytes(rng, (REQUESTS * 2, 4, 128)),
        inputs.two_scale_bytes(rng, (PAGES, 32, 128)),
        inputs.block_table(rng, [2500] * REQUESTS, 128, WIDTH, PAGES),
        np.full(REQUESTS, 2500, np.int32),
    )
    before = np.zeros((REQUESTS * 2, 4, COLUMNS), np.float32)
    for rank in range(4):
        after = np.asarray(scorer(W4, 2)(*case.arrays(), before, jnp.int32(rank)))
        plane = reference(case, W4.shard(rank), 2)
        oracle.check_scores(after, before, plane, oracle.EXACT_EPS)


def test_blocks_that_differ_in_the_seventeenth_place_are_told_apart():
    """Block b scores 65536 + place(b) / 2: a 14-bit product or accumulator sees one value."""
    blocks = 20
    place = np.random.default_rng(3).permutation(blocks)
    query, keys = np.full((REQUESTS, 4, 128), 0.5), np.zeros((PAGES, 64, 128))
    query[..., 0], keys[..., 0] = 256.0, 256.0
    for block in range(blocks):
        keys[block, 0, 1 : 1 + place[block]] = 1.0
    case = Inputs(
        oracle.e4m3_encode(query),
        oracle.e4m3_encode(keys),
        np.arange(WIDTH, dtype=np.int32)[None].repeat(REQUESTS, 0),
        np.full(REQUESTS, blocks * 128, np.int32),
    )
    nvp = np.full(REQUESTS, blocks, np.int32)
    sent = publisher(W2, 1, 0, 0)(*case.arrays(), nvp, None, 0, jnp.int32(0))
    ids = np.asarray(sent.rows)[..., 16:32].reshape(-1, 16)
    want = np.flatnonzero(place >= blocks - 16)
    np.testing.assert_array_equal(ids, want[None].repeat(len(ids), 0))


def test_real_activations():
    real = inputs.real_activations()
    blocks = len(real.keys)
    queries = real.queries[::16][:REQUESTS]
    table = np.random.default_rng(5).permutation(blocks).astype(np.int32)
    length = blocks * 128 - 61
    keys = real.keys[np.argsort(table)]  # physical page table[b] holds block b
    table = table[None].repeat(REQUESTS, 0)
    lens = np.full(REQUESTS, length, np.int32)
    before = np.zeros((REQUESTS, 4, blocks), np.float32)
    planes = []
    for rank, part in enumerate(oracle.shard_cache(keys, 4)):
        case = Inputs(queries, part, table, lens)
        after = np.asarray(scorer(W4, 1)(*case.arrays(), before, jnp.int32(rank)))
        plane = reference(case, W4.shard(rank), 1, blocks)
        oracle.check_scores(after, before, plane, oracle.EXACT_EPS)
        planes.append(after)
    nvp = oracle.decode_num_valid_pages(lens, 1)
    got = oracle.answer(oracle.join_planes(planes, 128), nvp, 0, 1)
    whole = oracle.global_decode_plane(queries, keys, table, lens, blocks, 1)
    np.testing.assert_array_equal(got, oracle.answer(whole.scores, nvp, 0, 1))
    assert len(np.unique(got.reshape(-1, 16), axis=0)) > 8  # the queries do choose


# ---- the fused scorer ----


@by_case(ROW_CASES)
def test_fused_rows_are_the_selected_plane(layout, query_len):
    publish = publisher(layout, query_len)
    case = integer_inputs(layout, query_len, LENGTHS[0])
    nvp = oracle.decode_num_valid_pages(case.lens, query_len)
    nvp[-1] = -3  # the counts are the caller's: they need not follow the lengths
    nvp[:1] = COLUMNS * layout.page_size // 128
    for rank in range(layout.world_size):
        shard = layout.shard(rank)
        sent = publish(*case.arrays(), nvp, None, jnp.int32(0), jnp.int32(rank))
        want = expected_rows(case, nvp, shard, query_len, COLUMNS, (1, 2))
        np.testing.assert_array_equal(np.asarray(sent.rows), want)
        assert sent.generations is None


def test_counts_past_the_last_block_stop_there():
    """More visible blocks than there are ids: the forced window lies past the last candidate."""
    case = integer_inputs(W4, 2, [*LENGTHS[1][:2], *LENGTHS[0][:6]])
    nvp = oracle.decode_num_valid_pages(case.lens, 2)
    assert nvp[2] > 8192
    nvp[:2] = 8193
    sent = publisher(W4, 2)(*case.arrays(), nvp, None, jnp.int32(0), jnp.int32(1))
    want = expected_rows(case, nvp, W4.shard(1), 2, 8192, (1, 2))
    np.testing.assert_array_equal(np.asarray(sent.rows), want)
    assert (want[..., 16:32] < 8192).all()
    assert 8191 in want[0, 0, 0, 16:32]


def test_fused_and_unfused_agree_bit_for_bit_on_rounded_sums():
    rng = np.random.default_rng(6)
    lens = LENGTHS[0]
    case = Inputs(
        inputs.two_scale_bytes(rng, (REQUESTS * 2, 4, 128)),
        inputs.two_scale_bytes(rng, (PAGES, 32, 128)),
        inputs.block_table(rng, lens, 128, WIDTH, PAGES),
        np.array(lens, np.int32),
    )
    nvp = oracle.decode_num_valid_pages(lens, 2)
    plane = np.full((REQUESTS * 2 + 3, 4, COLUMNS), -np.inf, np.float32)
    plane = np.asarray(scorer(W4, 2)(*case.arrays(), plane, jnp.int32(1)))[: REQUESTS * 2]
    sent = publisher(W4, 2)(*case.arrays(), nvp, None, jnp.int32(0), jnp.int32(1))
    want = oracle.rows_by_owner(oracle.select(plane, nvp, 1, 2), 4)
    np.testing.assert_array_equal(np.asarray(sent.rows), want)


def test_fused_rows_carry_the_bumped_generations():
    case = integer_inputs(W4, 2, LENGTHS[0])
    nvp = oracle.decode_num_valid_pages(case.lens, 2)
    tokens, capacity = len(nvp), len(nvp) + 2
    rng = np.random.default_rng(0)
    generations = rng.choice([0, 5, -1, INT_MAX, INT_MIN], (3, 4, capacity)).astype(np.int32)
    publish = publisher(W4, 2)
    plain = publish(*case.arrays(), nvp, None, jnp.int32(0), jnp.int32(2))
    head_rows = np.asarray(plain.rows).reshape(4, tokens, 33)
    counters = jnp.asarray(generations.copy())
    for call in (0, 1, 5, 2):
        sent = publish(*case.arrays(), nvp, counters, jnp.int32(call), jnp.int32(2))
        counters = sent.generations
        want, bumped = oracle.tag_rows(head_rows, generations[call % 3, :, :tokens])
        generations[call % 3, :, :tokens] = bumped
        np.testing.assert_array_equal(sent.rows, oracle.rows_by_owner(want, 4))
        np.testing.assert_array_equal(counters, generations)


# ---- any metadata ----


@hypothesis.settings(max_examples=25, deadline=None, derandomize=True, database=None)
@hypothesis.given(data=st.data())
def test_any_lengths_and_tables(data):
    length = st.one_of(st.integers(-2, 3000), st.integers(INT_MIN, INT_MAX))
    lens = data.draw(st.lists(length, min_size=REQUESTS, max_size=REQUESTS))
    entry = st.one_of(st.integers(0, PAGES - 1), st.integers(INT_MIN, INT_MAX))
    row = st.lists(entry, min_size=WIDTH, max_size=WIDTH)
    table = data.draw(st.lists(row, min_size=2, max_size=2))
    layout, query_len = data.draw(st.sampled_from([(W4, 2), (W2_WIDE, 3), (COMPOUND, 4)]))
    rank = data.draw(st.integers(0, layout.world_size - 1))

    case = integer_inputs(layout, query_len, lens)
    case.table[:2] = table
    before = inputs.any_bits(np.random.default_rng(0), (REQUESTS * query_len + 3, 4, COLUMNS))
    after = np.asarray(scorer(layout, query_len)(*case.arrays(), before, jnp.int32(rank)))
    oracle.check_scores(after, before, reference(case, layout.shard(rank), query_len), eps=0)

    nvp = np.minimum(oracle.decode_num_valid_pages(lens, query_len), COLUMNS)
    sent = publisher(layout, query_len)(*case.arrays(), nvp, None, jnp.int32(0), jnp.int32(rank))
    want = expected_rows(case, nvp, layout.shard(rank), query_len, COLUMNS, (1, 2))
    np.testing.assert_array_equal(np.asarray(sent.rows), want)
