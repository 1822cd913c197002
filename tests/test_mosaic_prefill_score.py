"""The Hopper prefill kernels, run by the interpreter with race detection, and their work list.

Small-integer data: every product sum is exact, so scores and rows are compared bit for bit.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import race_free
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from msa_icp_jax.geometry import MAX_INT32, MAX_TOKENS, Forced
from msa_icp_jax.ops._mosaic.launch import Launch
from msa_icp_jax.ops.arguments import Shard
from msa_icp_jax.ops.prefill_plan import MSAIcpScorePlan, balance
from msa_icp_jax.ops.prefill_plan import msa_icp_index_score_sharded_plan as host_plan
from msa_icp_jax.ops.prefill_plan import msa_icp_index_score_sharded_plan_device as device_plan
from msa_icp_jax.ops.prefill_score import config, kernel
from msa_icp_jax.ops.select.kernel import select_rows

_PAGES = 40
_UNTOUCHED = 7.5
_FLOAT8, _BF16 = "float8_e4m3fn", "bfloat16"


# inf - inf, in the interpreter's products.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")


@functools.cache
def work_list(ctas: int) -> Any:
    """balance.prefill_work of a plan; one executable for all windows of the same bounds."""
    return jax.jit(functools.partial(balance.prefill_work, ctas=ctas))


class Window(NamedTuple):
    """Segments as (query tokens, position of the first, keys); the plan takes any of them."""

    qo_lens: list[int]
    qo_offset: list[int]
    kv_lens: list[int]
    tail: int = 0  # query rows of no segment

    @property
    def tokens(self) -> int:
        return sum(self.qo_lens) + self.tail

    def plan(self, ctas: int | None = None) -> MSAIcpScorePlan:
        qo, kv = (np.asarray(x, np.int32) for x in (self.qo_lens, self.kv_lens))
        starts, key_starts = (
            np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in (qo, kv)
        )
        plan = device_plan(
            *(jnp.asarray(x) for x in (qo, kv, starts, key_starts)),
            jnp.asarray(self.qo_offset, jnp.int32),
            4,
            total_q=self.tokens,
            max_query_len=self.tokens,
            max_seq_len=1 << 20,
        )
        return plan if ctas is None else replace(plan, work=work_list(ctas)(plan))

    def counts(self) -> np.ndarray:
        return oracle.prefill_num_valid_pages(self.qo_lens, self.qo_offset, self.tokens)


class Inputs(NamedTuple):
    query: np.ndarray
    keys: np.ndarray  # [pages, pitch, 128]
    table: np.ndarray


# A prefix hit, no tokens, a whole prompt whose tiles the next segment shares, a lone late token.
WINDOW = Window([3, 0, 70, 1], [600, 0, 0, 899], [700, 50, 70, 900], tail=2)


def make_inputs(
    window: Window, shard: oracle.Shard, pitch: int, index_dtype: str = _FLOAT8
) -> Inputs:
    """Hostile where the contract allows it: NaN keys, bad page ids, garbage past the segments.

    bfloat16 has infinities, too: products with zeros, and sums of both, are NaN for some queries.
    """
    rng = np.random.default_rng(0)
    query = oracle.encode(rng.integers(-3, 4, (window.tokens, 4, 128)), index_dtype)
    keys = oracle.encode(rng.integers(-4, 5, (_PAGES, pitch, 128)), index_dtype)
    nan = oracle.NAN[keys.dtype]
    keys[rng.random((_PAGES, pitch)) < 0.1, 5] = nan | 1 << (8 * keys.itemsize - 1)
    keys[3] = nan  # a page of nothing but NaN
    if index_dtype == _BF16:
        for element, infinity in ((6, 0x7F80), (7, 0xFF80), (8, 0x7F80)):
            keys[rng.random((_PAGES, pitch)) < 0.01, element] = infinity
    width = max(-(-max(window.kv_lens) // shard.page_size) - 1, 1)  # too narrow by one page
    table = rng.permutation(_PAGES)[:width] + np.zeros((len(window.kv_lens), 1), np.int64)
    table[:, 1::5] = rng.choice([-1, _PAGES, 2**31 - 1, -(2**31)], table[:, 1::5].shape)
    for row, length in zip(table, window.kv_lens, strict=True):
        row[-(-length // shard.page_size) :] = 2**31 - 1
    return Inputs(query, keys, table.astype(np.int32))


def arrays_of(given: Inputs, shard: oracle.Shard) -> tuple[Any, ...]:
    keys = inputs.with_keys(shard, inputs.index_array(given.keys))
    return inputs.index_array(given.query), keys, given.table


def reference(window: Window, given: Inputs, columns: int, shard: oracle.Shard, **options: Any):
    """The oracle reads every page below the keys' end: widen the table with pages of nobody."""
    missing = columns - given.table.shape[1]
    table = np.pad(given.table, ((0, 0), (0, max(missing, 0))), constant_values=-1)
    return oracle.prefill_plane(
        given.query,
        given.keys,
        table,
        window.qo_lens,
        window.kv_lens,
        window.qo_offset,
        columns,
        shard,
        **options,
    )


def run(kernel: Any, query: Any, shard: Shard, *arrays: Any, **options: Any) -> np.ndarray:
    """Runs a kernel in the interpreter, the rank traced; any race fails."""
    call = jax.jit(functools.partial(kernel, **options))
    try:
        out = np.asarray(call(query, shard, *arrays))
        assert not gpu_callbacks.get_races().races_found
        return out
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()


# The window has six units of work, two of them of the first and two of the last of its four tiles:
# six CTAs cut both, two take two tiles each.
SCORE_CASES = [
    # shard, pitch, columns, sm_scale, initialize, ctas, form ("long" is fast, too), index_dtype
    pytest.param(oracle.Shard(1, 4, 128), 32, 8, 1.0, True, 6, "fast", _FLOAT8, id="w4-p128"),
    pytest.param(
        oracle.Shard(2, 4, 128, 8), 48, 9, -0.5, False, 6, "long", _FLOAT8, id="w4-p128-compound"
    ),
    pytest.param(
        oracle.Shard(1, 2, 128), 64, 4, 1.0, True, 6, "exact", _FLOAT8, id="w2-p128-narrow-exact"
    ),
    pytest.param(oracle.Shard(0, 2, 256), 128, 6, 0.25, False, 6, "long", _FLOAT8, id="w2-p256"),
    pytest.param(oracle.Shard(1, 4, 128), 32, 8, 1.0, True, 6, "fast", _BF16, id="w4-p128-bf16"),
    pytest.param(
        oracle.Shard(1, 2, 256, 8), 144, 6, -0.5, False, 2, "exact", _BF16, id="w2-p256-bf16"
    ),
]


@pytest.mark.parametrize(
    ("shard", "pitch", "columns", "sm_scale", "initialize", "ctas", "form", "index_dtype"),
    SCORE_CASES,
)
def test_scores_are_the_contract(
    monkeypatch, shard, pitch, columns, sm_scale, initialize, ctas, form, index_dtype
):
    monkeypatch.setattr(config, "LONG_STEPS", 0 if form == "long" else float("inf"))
    given = make_inputs(WINDOW, shard, pitch, index_dtype)
    before = np.full((WINDOW.tokens + 3, 4, columns), _UNTOUCHED, np.float32)
    actual = run(
        kernel.prefill_scores,
        *arrays_of(given, shard),
        WINDOW.plan(ctas),
        before,
        sm_scale=sm_scale,
        initialize=initialize,
        launch=race_free.interpreter(ctas, False, "exact" if form == "exact" else "fast"),
    )
    plane = reference(WINDOW, given, columns, shard, sm_scale=sm_scale, initialize=initialize)
    oracle.check_scores(actual, before, plane, eps=0.0)


def test_candidates_past_the_causal_prefix_are_hidden():
    """A selection by these counts meets no old value, whatever they claim."""
    shard = oracle.Shard(3, 4, 256)
    given, columns = make_inputs(WINDOW, shard, shard.rows), 6
    counts = WINDOW.counts() + np.random.default_rng(0).integers(0, 9, WINDOW.tokens)
    counts[:3] = -5, 8192, 2**31 - 1
    before = np.full((WINDOW.tokens, 4, columns), _UNTOUCHED, np.float32)
    actual = run(
        kernel.candidate_scores,
        *arrays_of(given, shard),
        WINDOW.plan(6),
        before,
        jnp.asarray(counts, jnp.int32),
        forced=Forced(0, 1),
        launch=race_free.interpreter(6, False, "fast"),
    )
    plane = reference(WINDOW, given, columns, shard)
    ids = np.arange(columns) * shard.index_scale + shard.index_offset
    candidates = np.broadcast_to((ids < counts[:, None])[:, None], actual.shape)
    scores = plane.scores.astype(np.float32)
    np.testing.assert_array_equal(actual[candidates], scores[candidates])


ROW_CASES = [
    # shard, pitch, forced begin and end, ctas, precision, index_dtype
    pytest.param(oracle.Shard(1, 2, 128, 16), 80, 2, 3, 2, "fast", _FLOAT8, id="w2-p128-compound"),
    pytest.param(oracle.Shard(3, 4, 256), 64, 1, 2, 9, "fast", _FLOAT8, id="w4-p256"),
    pytest.param(oracle.Shard(2, 4, 128), 32, 1, 2, 5, "fast", _BF16, id="w4-p128-bf16"),
]
# More than 16 blocks, cut over several CTAs; a segment that sees fewer than its positions' blocks.
LONG_WINDOW = Window([6, 20, 2], [3000, 300, 0], [3006, 200, 2], tail=3)
_COLUMNS = 40


def rows_of(q: Any, shard: Shard, *arrays: Any, forced: Forced, launch: Launch) -> Any:
    """Candidate rows from a plane that is made for them, and the plane."""
    *others, counts, carrier = arrays
    plane = jax.ShapeDtypeStruct((counts.shape[0], 4, _COLUMNS), jnp.float32)
    scores = kernel.candidate_scores(q, shard, *others, plane, counts, forced, launch)
    return select_rows(scores, counts, carrier, None, shard.candidates(forced), launch), scores


def run_rows(window, given, shard, forced, ctas, precision, counts):
    """(rows, scores) of the kernel, checked against the selection of the oracle's scores."""
    before = np.full((4, window.tokens + 2, 33), 77, np.int32)
    call = functools.partial(
        rows_of,
        forced=Forced(*forced),
        launch=race_free.interpreter(ctas, False, precision),
    )
    arrays = (*arrays_of(given, shard), window.plan(ctas), counts, before)
    rows, scores = race_free.run(call, *arrays)
    plane = reference(window, given, _COLUMNS, shard)
    expected = oracle.select(
        plane.scores.astype(np.float32),
        counts,
        *forced,
        index_scale=shard.index_scale,
        index_offset=shard.index_offset,
    )
    np.testing.assert_array_equal(rows[:, : window.tokens], expected)
    assert (rows[:, window.tokens :] == 77).all()
    return scores, plane


@pytest.mark.parametrize(
    ("shard", "pitch", "begin", "end", "ctas", "precision", "index_dtype"), ROW_CASES
)
def test_rows_are_the_selection_of_the_scores(
    shard, pitch, begin, end, ctas, precision, index_dtype
):
    given = make_inputs(LONG_WINDOW, shard, pitch, index_dtype)
    given.query[LONG_WINDOW.tokens // 2] = 0  # all scores tie
    counts = LONG_WINDOW.counts()
    run_rows(LONG_WINDOW, given, shard, (begin, end), ctas, precision, counts)


QUICK_CASES = [
    # shard, forced begin and end, first column of those of which every third is negative
    pytest.param(oracle.Shard(1, 2, 128), 2, 3, 20, id="w2-p128"),
    pytest.param(oracle.Shard(1, 4, 128), 0, 1, 0, id="w4-p128-soon"),
]
QUICK_WINDOW = Window([5, 4], [5000, 0], [5005, 4], tail=1)  # more pages than are staged


@pytest.mark.parametrize(("shard", "begin", "end", "first"), QUICK_CASES)
def test_negative_scores_that_cannot_win_are_no_matter(monkeypatch, shard, begin, end, first):
    """Integer maxima: other negative scores, but the same rows."""
    monkeypatch.setattr(config, "LONG_STEPS", 0)
    window, rng = QUICK_WINDOW, np.random.default_rng(3)
    given = make_inputs(window, shard, shard.rows)
    table = np.resize(rng.permutation(_PAGES), given.table.shape[1])
    given.table[:] = np.where(rng.random(given.table.shape) < 0.03, -1, table)
    query = rng.integers(1, 4, (window.tokens, 4, 128))
    keys = rng.integers(-1, 5, (_PAGES, shard.rows, 128))
    below = np.unique(table[first:_PAGES:3])
    keys[below] = rng.integers(-4, 0, keys[below].shape)
    given.query[:], given.keys[:] = oracle.e4m3_encode(query), oracle.e4m3_encode(keys)
    given.keys[5, 3] = 0xFF
    counts = window.counts()
    counts[3] = 39  # fewer than are seen
    scores, plane = run_rows(window, given, shard, (begin, end), 1, "fast", counts)
    ids = np.arange(_COLUMNS) * shard.index_scale + shard.index_offset
    candidates = np.broadcast_to((ids < counts[:, None])[:, None], scores.shape)
    differ = candidates & (scores != plane.scores)
    assert differ.any()
    assert (scores[differ] < 0).all() and (plane.scores[differ] < 0).all()


# ---- the work list ----


def random_windows(count: int, segments: int, tokens: int) -> list[Window]:
    rng = np.random.default_rng(0)
    windows = []
    for _ in range(count):
        qo = rng.multinomial(rng.integers(0, tokens + 1), rng.dirichlet([0.5] * segments))
        offset = rng.integers(-60, 4000, segments)
        kv = np.maximum(offset + qo - (rng.random(segments) < 0.3) * 200, 0)
        windows.append(Window(qo.tolist(), offset.tolist(), kv.tolist(), tokens - int(qo.sum())))
    return windows


def parts_of(work: balance.PrefillWork) -> dict[tuple[int, int], int]:
    """(tile, unit) -> CTA; every part visited as the kernel visits it."""
    ranges, tiles = np.asarray(work.ranges), np.asarray(work.tiles)
    found: dict[tuple[int, int], int] = {}
    for cta, row in enumerate(ranges):
        first, count = row[balance.RANGE_TILE], row[balance.RANGE_TILES]
        if count:
            np.testing.assert_array_equal(row[balance.RANGE_FIELDS :], tiles[first])
        for i in range(count):
            units = -(-tiles[first + i, balance.SCORED] // balance.UNIT_POSITIONS)
            begin = row[balance.RANGE_BEGIN] if i == 0 else 0
            end = row[balance.RANGE_END] if i == count - 1 else units
            for unit in range(begin, end):
                assert (first + i, unit) not in found
                found[int(first + i), unit] = cta
    return found


@pytest.mark.parametrize("ctas", [1, 7, 132])
def test_every_unit_of_a_window_belongs_to_one_cta(ctas):
    segments, tokens = 6, 300
    build = work_list(ctas)
    before = build._cache_size()
    for window in random_windows(25, segments, tokens):
        work = build(window.plan())
        tiles, tile_of = np.asarray(work.tiles), np.asarray(work.tile_of)
        starts = np.concatenate([[0], np.cumsum(window.qo_lens)])
        need = np.zeros(len(tiles), int)
        for row in range(tokens):
            if row >= starts[-1]:
                assert tile_of[row] == -1
                continue
            tile = tiles[tile_of[row]]
            b = tile[balance.SEGMENT]
            assert starts[b] <= row < starts[b + 1]
            assert tile[balance.TILE] == row // balance.TILE_TOKENS
            assert tile[balance.FIRST_ROW] <= row % balance.TILE_TOKENS < tile[balance.END_ROW]
            position = window.qo_offset[b] + row - starts[b]
            assert tile[balance.POSITION] + row % balance.TILE_TOKENS == position
            seen = min(max(position + 1, 0), window.kv_lens[b])
            need[tile_of[row]] = max(need[tile_of[row]], seen)
        np.testing.assert_array_equal(tiles[:, balance.SCORED], need)

        parts = parts_of(work)
        units = -(-need // balance.UNIT_POSITIONS)
        assert set(parts) == {(i, u) for i, n in enumerate(units) for u in range(n)}
    assert build._cache_size() - before == 1  # one compile for all windows of the same bounds


def test_a_ragged_window_is_shared_evenly():
    ends = [round(16384 * 16 ** (i / 7)) for i in range(8)]
    window = Window([1024] * 8, [end - 1024 for end in ends], ends)
    parts = parts_of(work_list(132)(window.plan()))
    load = np.bincount(list(parts.values()), minlength=132)
    assert load.max() <= 1.03 * load.mean()


def test_overlapping_segments_name_no_tile_past_the_list():
    """Prefix sums are device data: these segments need far more tiles than a window can have."""
    segments, tokens = 11, 704
    starts = jnp.zeros(segments + 1, jnp.int32).at[-2].set(640)
    lens = jnp.full(segments, 640, jnp.int32).at[-1].set(64)
    plan = device_plan(
        lens, lens, starts, starts, 0 * lens, 4, total_q=tokens, max_query_len=640, max_seq_len=640
    )
    work = work_list(7)(plan)
    tile_of = np.asarray(work.tile_of)
    assert tile_of[0] == 0 and tile_of.min() == -1 and tile_of.max() < work.tiles.shape[0]


def test_positions_past_every_plane_cost_nothing():
    """Their number would pass 2^31: sums of costs, and of a step and a position."""
    window = Window([8192], [2**31 - 1 - 8192], [2**31 - 1])
    plan = host_plan(window.qo_lens, window.kv_lens, 4, qo_offset=window.qo_offset)
    work = work_list(132)(plan)
    scored = np.asarray(work.tiles)[:128, balance.SCORED]
    assert (scored == MAX_TOKENS).all()
    units = MAX_TOKENS // balance.UNIT_POSITIONS
    assert set(parts_of(work)) == {(i, u) for i in range(128) for u in range(units)}


@pytest.mark.parametrize(
    "bounds",
    [
        {"total_q": 5_600_000, "max_query_len": 64, "max_seq_len": MAX_TOKENS},  # sums of costs
        {"total_q": MAX_INT32, "max_query_len": MAX_INT32, "max_seq_len": 512},  # positions
    ],
)
def test_bounds_under_which_a_sum_could_wrap_are_refused(bounds):
    lens, starts = jnp.zeros(1, jnp.int32), jnp.zeros(2, jnp.int32)
    plan = device_plan(lens, lens, starts, starts, lens, 4, **bounds, backend="xla")
    with pytest.raises(ValueError, match=f"got {bounds['total_q']}, {bounds['max_query_len']} and"):
        balance.prefill_work(plan, 7)


def test_the_work_list_takes_no_promotion_and_no_64_bit_number():
    window = Window([70, 0, 3], [0, 5, 900], [70, 5, 903], 9)
    want = work_list(7)(window.plan())
    strict = jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict")
    with strict[0], strict[1], jax.enable_x64(True):
        found = work_list(7)(window.plan())
    for mine, theirs in zip(found, want, strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(*(np.asarray(x).view(np.uint8) for x in (mine, theirs)))
