"""The portable prefill scorers against the float64 reference."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import chains
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

from msa_icp_jax import (
    MSAIcpScorePlan,
    msa_icp_decode_index_score_sharded,
    msa_icp_index_score_sharded,
    msa_icp_index_score_sharded_plan_device,
    msa_icp_prefill_score_select,
)

TOKENS, PAGES, WIDTH = 300, 48, 22
MAX_SEQ_LEN = 24 * 128  # of a window; only a few tests are about more keys


class Window(NamedTuple):
    """Segments as their query tokens, the position of the first query, and keys."""

    qo_lens: list[int]
    qo_offset: list[int]
    kv_lens: list[int]

    def arrays(self) -> tuple[np.ndarray, ...]:
        return tuple(np.array(lens, np.int32) for lens in self)


WINDOWS = [
    # A whole prompt of two tiles, no queries, a prefix hit, a chunk of a longer context, one late
    # query; then padding rows.
    Window([150, 0, 3, 70, 1], [0, 5, 600, 100, 2700], [150, 50, 603, 2000, 2701]),
    # Whatever a device may hold: negative lengths and positions, keys that end before the queries
    # or past the table, more rows than there are.
    Window([-4, 160, 100, 0, INT_MAX], [-3, -20, 2660, INT_MIN, 9], [10, 40, 6000, -1, INT_MAX]),
]

SCORE_CASES = [
    # layout, columns, sm_scale, initialize
    (W2, 24, 1.0, True),
    (W4, 23, -0.5, False),
    (COMPOUND, 24, 0.25, False),
    (W2_WIDE, 12, 0.0, True),
    (W4_WIDE, 11, 1.0, False),
    (COMPOUND_WIDE, 3, -2.0, True),
]


def make_plan(window: Sequence[Any], total_q: int, max_seq_len: int = 1 << 20) -> MSAIcpScorePlan:
    qo_lens, qo_offset, kv_lens = window
    # Cut before they are summed up: the sum must not pass int32.
    starts, key_starts = (
        jnp.pad(jnp.cumsum(jnp.clip(lens, 0, 1 << 20)), (1, 0)) for lens in (qo_lens, kv_lens)
    )
    return msa_icp_index_score_sharded_plan_device(
        qo_lens,
        kv_lens,
        starts,
        key_starts,
        qo_offset,
        4,
        total_q=total_q,
        max_query_len=total_q,
        max_seq_len=max_seq_len,
        backend="xla",
    )


@functools.cache
def scorer(layout: Layout, sm_scale: float, initialize: bool, total_q: int = TOKENS) -> Any:
    """score(q, k, table, window, max_score, rank); one executable for every rank and window."""

    def score(q, k, table, window, max_score, rank):
        return msa_icp_index_score_sharded(
            q,
            k,
            table,
            make_plan(window, total_q),
            rank=rank,
            max_score=max_score,
            sm_scale=sm_scale,
            initialize=initialize,
            tp=layout.world_size,
            compact=layout.page_size == 256,
            row_offset=layout.row_offset,
            backend="xla",
        )

    return jax.jit(score, donate_argnums=4)


@functools.cache
def selector(
    layout: Layout,
    begin: int = 1,
    end: int = 2,
    total_q: int = TOKENS,
    max_seq_len: int = MAX_SEQ_LEN,
) -> Any:
    """select(q, k, table, window, nvp, carrier, rank) -> carrier."""

    def select(q, k, table, window, nvp, carrier, rank):
        return msa_icp_prefill_score_select(
            q,
            k,
            table,
            make_plan(window, total_q, max_seq_len),
            nvp,
            carrier,
            rank=rank,
            tp=layout.world_size,
            compact=layout.page_size == 256,
            force_begin_blocks=begin,
            force_end_blocks=end,
            row_offset=layout.row_offset,
            backend="xla",
        )

    return jax.jit(select, donate_argnums=5)


class Inputs(NamedTuple):
    queries: np.ndarray
    keys: np.ndarray
    table: np.ndarray
    window: Window

    def arrays(self) -> tuple[Any, ...]:
        queries, keys = inputs.index_array(self.queries), inputs.index_array(self.keys)
        return queries, keys, jnp.asarray(self.table), self.window.arrays()

    def reference(self, shard: Shard, columns: int, **options: Any) -> oracle.ScorePlane:
        qo_lens, qo_offset, kv_lens = self.window
        return oracle.prefill_plane(
            self.queries,
            self.keys,
            self.table,
            qo_lens,
            kv_lens,
            qo_offset,
            columns,
            shard,
            **options,
        )

    def counts(self) -> np.ndarray:
        return oracle.prefill_num_valid_pages(
            self.window.qo_lens, self.window.qo_offset, len(self.queries)
        )


def integer_inputs(layout: Layout, window: Window, tokens: int = TOKENS, seed: int = 0) -> Inputs:
    rng = np.random.default_rng(seed)
    page_size = layout.page_size
    return Inputs(
        inputs.integer_queries(rng, tokens),
        inputs.integer_keys(rng, PAGES, layout.page_rows),
        inputs.block_table(rng, window.kv_lens, page_size, WIDTH, PAGES, bad_share=0.1),
        window,
    )


def two_scale_inputs(layout: Layout, window: Window) -> Inputs:
    rng = np.random.default_rng(7)
    return Inputs(
        inputs.two_scale_bytes(rng, (TOKENS, 4, 128)),
        inputs.two_scale_bytes(rng, (PAGES, layout.page_rows, 128)),
        inputs.block_table(rng, window.kv_lens, layout.page_size, WIDTH, PAGES),
        window,
    )


def score(case: Inputs, layout: Layout, rank: int, columns: int, options: Any = (1.0, True)):
    before = np.zeros((len(case.queries), 4, columns), np.float32)
    program = scorer(layout, *options, len(case.queries))
    return np.asarray(program(*case.arrays(), before, jnp.int32(rank)))


# ---- the plane ----


@pytest.mark.parametrize(
    ("layout", "columns", "sm_scale", "initialize"),
    SCORE_CASES,
    ids=["-".join(map(str, (*c[0], *c[1:]))) for c in SCORE_CASES],
)
def test_integer_scores_are_bit_exact_and_nothing_else_is_touched(
    layout, columns, sm_scale, initialize
):
    program = scorer(layout, sm_scale, initialize)
    rng = np.random.default_rng(1)
    for seed, window in enumerate(WINDOWS):
        case = integer_inputs(layout, window, seed=seed)
        before = inputs.any_bits(rng, (TOKENS + 3, 4, columns))
        for rank in range(layout.world_size):
            after = np.asarray(program(*case.arrays(), before, jnp.int32(rank)))
            shard = layout.shard(rank)
            options = {"sm_scale": sm_scale, "initialize": initialize}
            oracle.check_scores(after, before, case.reference(shard, columns, **options), eps=0)


@pytest.mark.parametrize("sm_scale", [0.1, -0.08838834764831845, 1e30])
def test_a_scale_that_rounds(sm_scale):
    """The scale follows the maximum: a negative one does not turn it into a minimum."""
    case = integer_inputs(W4, WINDOWS[0])
    before = np.zeros((TOKENS, 4, 24), np.float32)
    after = score(case, W4, 1, 24, (sm_scale, True))
    plane = case.reference(W4.shard(1), 24, sm_scale=sm_scale)
    oracle.check_scores(after, before, plane, oracle.EXACT_EPS)


def test_query_rows_past_the_windows_bound_are_padding():
    case = integer_inputs(W4, WINDOWS[0])
    before = inputs.any_bits(np.random.default_rng(0), (TOKENS + 3, 4, 24))
    program = scorer(W4, 1.0, True, total_q=230)
    after = np.asarray(program(*case.arrays(), before, jnp.int32(1)))
    oracle.check_scores(after, before, case.reference(W4.shard(1), 24), eps=0)
    assert (after[224:TOKENS] == -np.inf).all()


def test_one_executable_serves_every_rank_and_window():
    def call(window: Window, rank: int) -> None:
        arrays = integer_inputs(W4, window).arrays()
        plane, carrier = np.zeros((TOKENS, 4, 24), np.float32), np.zeros((4, TOKENS, 33), np.int32)
        scorer(W4, 1.0, True)(*arrays, plane, jnp.int32(rank))
        counts = np.ones(TOKENS, np.int32)
        selector(W4)(*arrays, counts, carrier, jnp.int32(rank))

    call(WINDOWS[0], rank=0)
    with inputs.nothing_compiles():
        call(WINDOWS[1], rank=3)
        call(WINDOWS[0], rank=1)


def test_a_static_rank_gives_the_bits_of_a_traced_one():
    case = integer_inputs(W4, WINDOWS[0])
    before = np.zeros((TOKENS, 4, 24), np.float32)
    static = jax.jit(functools.partial(scorer(W4, 1.0, True).__wrapped__, rank=3))
    np.testing.assert_array_equal(static(*case.arrays(), before), score(case, W4, 3, 24))


@pytest.mark.parametrize("segments", [0, 5])
def test_no_queries(segments):
    """No segment, or segments of no query: rows are padding."""
    window = Window([0] * segments, [3] * segments, [700] * segments)
    rng = np.random.default_rng(0)
    queries = inputs.index_array(inputs.integer_queries(rng, TOKENS))
    keys = inputs.index_array(inputs.integer_keys(rng, PAGES, 32))
    arrays = (queries, keys, jnp.zeros((segments, WIDTH), jnp.int32), window.arrays())
    before = inputs.any_bits(rng, (TOKENS + 3, 4, 24))
    kept = np.asarray(scorer(W4, 1.0, False)(*arrays, before, jnp.int32(0)))
    np.testing.assert_array_equal(kept.view(np.int32), before.view(np.int32))
    cleared = np.asarray(scorer(W4, 1.0, True)(*arrays, before, jnp.int32(0)))
    assert (cleared[:TOKENS] == -np.inf).all()
    np.testing.assert_array_equal(cleared[TOKENS:].view(np.int32), before[TOKENS:].view(np.int32))
    carrier = np.full((4, TOKENS + 2, 33), 9, np.int32)
    counts = np.zeros(TOKENS, np.int32)
    rows = np.asarray(selector(W4)(*arrays, counts, carrier, jnp.int32(0)))
    assert (rows[:, :TOKENS] == [-8388608] * 16 + [-1] * 16 + [1]).all()
    assert (rows[:, TOKENS:] == 9).all()


def test_no_rows():
    arrays = (
        inputs.index_array(np.zeros((0, 4, 128), np.uint8)),
        inputs.index_array(np.zeros((2, 32, 128), np.uint8)),
        jnp.zeros((5, 3), jnp.int32),
        Window([0] * 5, [0] * 5, [0] * 5).arrays(),
    )
    before = inputs.any_bits(np.random.default_rng(0), (2, 4, 8))
    after = np.asarray(scorer(W4, 1.0, True, 0)(*arrays, before, jnp.int32(0)))
    np.testing.assert_array_equal(after.view(np.int32), before.view(np.int32))
    carrier = np.full((4, 2, 33), 9, np.int32)
    none = np.zeros(0, np.int32)
    kept = selector(W4, 1, 2, 0)(*arrays, none, carrier, jnp.int32(0))
    np.testing.assert_array_equal(kept, carrier)


def test_chunks_score_as_the_whole_prompt_does():
    """Keys past a query's own position are invisible, though a longer context is in the cache."""
    rng = np.random.default_rng(3)
    prompt = integer_inputs(W4, Window([TOKENS], [0], [TOKENS]))
    table = rng.permutation(PAGES - 1)[None, :WIDTH].astype(np.int32)
    prompt = prompt._replace(table=table)
    whole = score(prompt, W4, 2, 24)
    for first in (0, 100, 200):
        window = Window([100], [first], [TOKENS])
        padded = np.zeros_like(prompt.queries)
        padded[:100] = prompt.queries[first : first + 100]
        chunk = score(prompt._replace(queries=padded, window=window), W4, 2, 24)
        np.testing.assert_array_equal(chunk[:100], whole[first : first + 100])
    assert (whole[:, :, 0] > -np.inf).sum() > 800  # and there is something to see


def long_inputs(length: int, tokens: int) -> Inputs:
    """The last tokens of one long segment; pages repeat, so scores tie."""
    rng, pages = np.random.default_rng(4), 192
    return Inputs(
        inputs.integer_queries(rng, tokens),
        inputs.integer_keys(rng, pages, 32),
        inputs.block_table(rng, [length], 128, length // 128, pages, bad_share=0.01),
        Window([tokens], [length - tokens], [length]),
    )


def test_a_million_keys():
    case = long_inputs(1 << 20, tokens=12)
    plane = case.reference(W4.shard(1), 8192)
    after = score(case, W4, 1, 8192)
    oracle.check_scores(after, np.zeros_like(after), plane, eps=0)
    carrier = np.zeros((4, 12, 33), np.int32)
    rows = selector(W4, 1, 2, 12, 1 << 20)(*case.arrays(), case.counts(), carrier, jnp.int32(1))
    want = oracle.select(plane.scores.astype(np.float32), case.counts(), 1, 2)
    np.testing.assert_array_equal(rows, want)


def test_columns_that_are_no_multiple_of_one_step():
    """1024 columns are scored at a time: the last step scores some again."""
    case = long_inputs(1100 * 128, tokens=4)
    after = score(case, W4, 1, 1100)
    oracle.check_scores(after, np.zeros_like(after), case.reference(W4.shard(1), 1100), eps=0)


# ---- precision ----


def test_two_scales_stay_within_the_exact_bound():
    case = two_scale_inputs(W4, WINDOWS[0])
    before = np.zeros((TOKENS, 4, 24), np.float32)
    for rank in range(4):
        after = score(case, W4, rank, 24)
        plane = case.reference(W4.shard(rank), 24)
        oracle.check_scores(after, before, plane, oracle.EXACT_EPS)


def test_decode_and_prefill_agree_bit_for_bit():
    """XLA is always exact: a token scores the same in both, rounded sums included."""
    window = Window([4, 0, 4, 0, 0], [1000, 0, 2500, 0, 0], [1004, 9, 2504, 0, 0])
    case = two_scale_inputs(W4, window)
    prefill = score(case, W4, 3, 24)[:8]
    decode = jax.jit(
        functools.partial(
            msa_icp_decode_index_score_sharded,
            rank=3,
            world_size=4,
            page_size=128,
            decode_query_len=4,
            max_decode_query_len=4,
            backend="xla",
        )
    )
    lens = jnp.array([1004, 2504], jnp.int32)
    before = np.full((8, 4, 24), -np.inf, np.float32)
    table = jnp.asarray(case.table[[0, 2]])
    after = decode(
        inputs.index_array(case.queries[:8]), inputs.index_array(case.keys), table, lens, before
    )
    np.testing.assert_array_equal(after, prefill)


def test_real_activations():
    real = inputs.real_activations()
    tokens, blocks = len(real.queries), len(real.keys)
    length = blocks * 128 - 61
    table = np.random.default_rng(5).permutation(blocks).astype(np.int32)
    cache = real.keys[np.argsort(table)]  # physical page table[b] holds block b
    window = Window([tokens], [length - tokens], [length])
    whole = oracle.global_prefill_plane(
        real.queries, cache, table[None], window.qo_lens, window.kv_lens, window.qo_offset, blocks
    )
    planes = []
    for rank, keys in enumerate(oracle.shard_cache(cache, 4)):
        case = Inputs(real.queries, keys, table[None], window)
        after = score(case, W4, rank, blocks)
        plane = case.reference(W4.shard(rank), blocks)
        oracle.check_scores(after, np.zeros_like(after), plane, oracle.EXACT_EPS)
        planes.append(after)
    nvp = case.counts()
    got = oracle.answer(oracle.join_planes(planes, 128), nvp, 0, 1, prefill=True)
    np.testing.assert_array_equal(got, oracle.answer(whole.scores, nvp, 0, 1, prefill=True))
    assert len(np.unique(got.reshape(-1, 16), axis=0)) > 100  # the queries do choose


# ---- the fused scorer ----


@pytest.mark.parametrize(
    ("layout", "begin", "end"),
    [(W2, 1, 2), (W4, 1, 2), (COMPOUND, 0, 1), (W2_WIDE, 8, 8), (W4_WIDE, 16, 0), (W4, 0, 0)],
)
def test_fused_rows_are_the_selected_plane(layout, begin, end):
    columns = 24 * 128 // layout.page_size
    for seed, window in enumerate(WINDOWS):
        case = integer_inputs(layout, window, seed=seed)
        # The counts are the caller's: they need not follow the lengths.
        nvp = np.minimum(case.counts(), 24)
        nvp[5:8] = 24, -3, 0
        carrier = np.random.default_rng(0).integers(0, 99, (4, TOKENS + 2, 33)).astype(np.int32)
        for rank in range(layout.world_size):
            shard = layout.shard(rank)
            plane = case.reference(shard, columns).scores.astype(np.float32)
            scale, offset = shard.index_scale, shard.index_offset
            want = oracle.select(plane, nvp, begin, end, index_scale=scale, index_offset=offset)
            program = selector(layout, begin, end)
            rows = np.asarray(program(*case.arrays(), nvp, carrier, jnp.int32(rank)))
            np.testing.assert_array_equal(rows[:, :TOKENS], want)
            np.testing.assert_array_equal(rows[:, TOKENS:], carrier[:, TOKENS:])


def test_fused_and_unfused_agree_bit_for_bit_on_rounded_sums():
    case = two_scale_inputs(W4, WINDOWS[0])
    plane = score(case, W4, 1, 24)
    carrier = np.zeros((4, TOKENS, 33), np.int32)
    rows = selector(W4)(*case.arrays(), case.counts(), carrier, jnp.int32(1))
    np.testing.assert_array_equal(rows, oracle.select(plane, case.counts(), 1, 2))


@pytest.mark.parametrize("page_size", [128, 256])
def test_fused_and_unfused_agree_past_the_limits_of_a_plan(page_size):
    """Device lengths and counts above what the plan was made for: both see its columns alone."""
    plan = chains.make_plan(4, page_size, rank=1, max_model_len=1024)
    tokens, rng = 32, np.random.default_rng(0)
    window = plan.prefill_window_plan(
        jnp.array([20, 12], jnp.int32),
        jnp.array([3000, INT_MAX], jnp.int32),
        jnp.array([2900, 888], jnp.int32),
        total_q=tokens,
        max_query_len=tokens,
        max_seq_len=1024,
    )
    keys = inputs.index_array(inputs.integer_keys(rng, 40, page_size // 4))
    query = inputs.index_array(inputs.integer_queries(rng, tokens))
    table = jnp.asarray(rng.integers(0, 40, (2, 24)), jnp.int32)
    counts = jnp.asarray(rng.integers(0, 60, tokens), jnp.int32).at[3].set(INT_MAX)
    scratch = jnp.full((tokens, *plan.prefill_score_shape()[1:]), 1e9, jnp.float32)
    carrier = jnp.zeros((4, tokens, 33), jnp.int32)
    apart, together = (
        plan.prefill_local(query, keys, table, window, scratch, counts, carrier, fused=fused)[0]
        for fused in (False, True)
    )
    np.testing.assert_array_equal(apart, together)
    assert (np.asarray(apart)[..., 16:32].max(axis=-1) < 8).all()


@pytest.mark.parametrize(
    ("max_seq_len", "compact", "columns"),
    [
        (0, False, 4),
        (1500, False, 12),
        (1500, True, 8),
        (1 << 20, False, 8192),
        (1 << 20, True, 4096),
    ],
)
def test_the_plane_of_a_fused_prefill_is_as_wide_as_its_window(max_seq_len, compact, columns):
    lengths, starts = jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)

    def rows(qo_lens, kv_lens, starts, query, keys, table, counts, carrier):
        window = msa_icp_index_score_sharded_plan_device(
            *(qo_lens, kv_lens, starts, starts, qo_lens, 4),
            **{"total_q": 12, "max_query_len": 12, "max_seq_len": max_seq_len},
            backend="mosaic",
        )
        return msa_icp_prefill_score_select(
            *(query, keys, table, window, counts, carrier),
            **{"rank": 1, "tp": 4, "compact": compact, "backend": "mosaic"},
        )

    keys = jax.ShapeDtypeStruct((9, 64 if compact else 32, 128), jnp.float8_e4m3fn)
    query = jax.ShapeDtypeStruct((12, 4, 128), jnp.float8_e4m3fn)
    words = (jax.ShapeDtypeStruct(x, jnp.int32) for x in ((1, 3), (12,), (4, 12, 33)))
    traced = jax.make_jaxpr(rows)(lengths, lengths, starts, query, keys, *words)
    planes = set(re.findall(r"f32\[12,4,(\d+)\]", str(traced)))
    assert planes == {str(columns)}


# ---- any metadata ----


@hypothesis.settings(max_examples=25, deadline=None, derandomize=True, database=None)
@hypothesis.given(data=st.data())
def test_any_segments_and_tables(data):
    tokens, segments = 64, 5
    length = st.one_of(st.integers(-1, 40), st.integers(INT_MIN, INT_MAX))
    offset = st.one_of(st.integers(-50, 2750), st.integers(INT_MIN, 1 << 20))
    keys = st.one_of(st.integers(-1, 2900), st.integers(INT_MIN, INT_MAX))
    many = {"min_size": segments, "max_size": segments}
    window = Window(*(data.draw(st.lists(kind, **many)) for kind in (length, offset, keys)))
    layout, options = data.draw(
        st.sampled_from([(W2_WIDE, (-0.5, True)), (COMPOUND, (1.0, False))])
    )
    rank = data.draw(st.integers(0, layout.world_size - 1))
    case = integer_inputs(layout, window, tokens)
    entry = st.one_of(st.integers(0, PAGES - 1), st.integers(INT_MIN, INT_MAX))
    case.table[1] = data.draw(st.lists(entry, min_size=WIDTH, max_size=WIDTH))

    columns = 24 * 128 // layout.page_size
    before = inputs.any_bits(np.random.default_rng(0), (tokens + 3, 4, columns))
    shard, arrays = layout.shard(rank), case.arrays()
    after = scorer(layout, *options, tokens)(*arrays, before, jnp.int32(rank))
    plane = case.reference(shard, columns, sm_scale=options[0], initialize=options[1])
    oracle.check_scores(np.asarray(after), before, plane, eps=0)

    nvp = np.minimum(case.counts(), 24)
    carrier = np.zeros((4, tokens, 33), np.int32)
    rows = selector(layout, 1, 2, tokens)(*arrays, nvp, carrier, jnp.int32(rank))
    raw = case.reference(shard, columns).scores.astype(np.float32)
    want = oracle.select(
        raw, nvp, 1, 2, index_scale=shard.index_scale, index_offset=shard.index_offset
    )
    np.testing.assert_array_equal(rows, want)
