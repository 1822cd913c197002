"""The Top16 select kernel's logic (plain Pallas, in the interpreter) against the oracle."""

from __future__ import annotations

import functools
from typing import Any

import hard_rows
import jax
import jax.numpy as jnp
import lane_simulator
import numpy as np
import numpy.typing as npt
import oracle
import pytest
import race_free
from lane_simulator import Lane

from msa_icp_jax.geometry import Forced
from msa_icp_jax.ops._mosaic.launch import Target
from msa_icp_jax.ops.arguments import Candidates
from msa_icp_jax.ops.select import eight_rows, long_rows, networks
from msa_icp_jax.ops.select import kernel as select_kernel

Array = npt.NDArray[Any]

_UNTOUCHED = 77


def select(
    scores: Array,
    counts: Array,
    rows: Array | None = None,
    tags: Array | None = None,
    *,
    scale: int = 1,
    offset: int = 0,
    begin: int = 0,
    end: int = 1,
    ctas: int = 4,
) -> Array:
    """Runs the kernel; the offset is traced, since ranks differ in nothing else."""
    kernel = functools.partial(
        select_kernel.select_rows,
        launch=race_free.interpreter(ctas),
    )

    def call(offset: jax.Array, scores: jax.Array, counts: jax.Array, *others: jax.Array) -> Any:
        given = iter(others)
        return kernel(
            scores,
            counts,
            None if rows is None else next(given),
            None if tags is None else next(given),
            Candidates(Forced(begin, end), scale, offset),
        )

    others = [x for x in (rows, tags) if x is not None]
    return race_free.run(call, jnp.int32(offset), scores, counts, *others)


CASES = [
    # tokens, columns, scale, offset, begin, end, ctas
    pytest.param(20, 200, 1, 0, 0, 1, 16, id="decode"),
    pytest.param(20, 203, 2, 1, 2, 3, 5, id="compact-odd-columns"),
    pytest.param(20, 96, 2, 0, 16, 0, 4, id="all-forced-at-the-start"),
    pytest.param(20, 96, 1, 0, 0, 16, 3, id="all-forced-at-the-end"),
    pytest.param(12, 40, 1, 0, 9, 7, 4, id="forced-windows-overlap"),
    pytest.param(12, 1, 1, 0, 1, 1, 4, id="one-column"),
    pytest.param(12, 15, 2, 1, 0, 2, 1, id="fewer-columns-than-winners"),
    pytest.param(20, 1500, 1, 0, 1, 1, 8, id="long"),
    pytest.param(5, 8192, 1, 0, 0, 1, 7, id="full"),
    pytest.param(5, 8192, 2, 1, 1, 1, 7, id="compact-past-the-last-candidate"),
    pytest.param(5, 12287, 1, 0, 0, 2, 7, id="prefill-widest"),
]


@pytest.mark.parametrize(("tokens", "columns", "scale", "offset", "begin", "end", "ctas"), CASES)
def test_rows_are_the_contract(tokens, columns, scale, offset, begin, end, ctas):
    rng = np.random.default_rng(columns)
    scores = hard_rows.score_plane(tokens + 1, columns, rng)
    counts = hard_rows.visible_counts(tokens, columns, scale, rng)
    actual = select(scores, counts, scale=scale, offset=offset, begin=begin, end=end, ctas=ctas)
    want = oracle.select(
        scores[:tokens], counts, begin, end, index_scale=scale, index_offset=offset
    )
    np.testing.assert_array_equal(actual, want)


def test_ties_take_the_lowest_ids_among_8182_equal_scores():
    scores = np.zeros((1, 4, 8192), np.float32)
    winners = np.arange(10) * 811 + 400
    scores[..., winners] = 1 + np.arange(10)
    ids = select(scores, np.array([8192], np.int32), end=0)[:, 0, 16:32]
    want = sorted({*winners.tolist(), *range(6)})
    np.testing.assert_array_equal(ids, np.tile(want, (4, 1)))


def test_every_score_in_one_narrow_range():
    scores = (1 + np.arange(8192, dtype=np.float32) * np.float32(2**-23))[None, None]
    scores = np.repeat(scores, 4, axis=1)
    rows = select(scores, np.array([8192], np.int32), end=0)
    np.testing.assert_array_equal(rows[:, 0, 16:32], np.tile(np.arange(8176, 8192), (4, 1)))


def test_carrier_rows_past_the_tokens_keep_their_bits():
    rng = np.random.default_rng(0)
    scores = hard_rows.score_plane(6, 70, rng)
    counts = hard_rows.visible_counts(6, 70, 1, rng)
    carrier = np.full((4, 9, 33), _UNTOUCHED, np.int32)
    actual = select(scores, counts, carrier, begin=1)
    np.testing.assert_array_equal(actual[:, :6], oracle.select(scores, counts, 1, 1))
    assert (actual[:, 6:] == _UNTOUCHED).all()


def test_tagged_rows_carry_the_given_generation():
    rng = np.random.default_rng(0)
    scores = hard_rows.score_plane(7, 50, rng)
    counts = hard_rows.visible_counts(7, 50, 2, rng)
    tags = rng.integers(-(2**31), 2**31, (4, 7)).astype(np.int32)
    actual = select(scores, counts, tags=tags, scale=2)
    words = oracle.select(scores, counts, 0, 1, index_scale=2)[..., :32]
    np.testing.assert_array_equal(actual[..., 0], words)
    np.testing.assert_array_equal(actual[..., 1], np.broadcast_to(tags[..., None], words.shape))


def test_raw_bits_are_stored():
    words = np.array([0x80000000, 0, 0xFFC00001, 0x7FC00000, 0xFF800000], np.uint32)
    scores = np.tile(words.view(np.float32), (1, 4, 1))
    rows = select(scores, np.array([5], np.int32), end=0)
    np.testing.assert_array_equal(rows[:, 0, :5].view(np.uint32), np.tile(words, (4, 1)))


def test_shares_cover_all_rows_once():
    for count, ctas in ((1, 1), (7, 3), (8, 8), (1000, 132)):
        parts = [select_kernel.share_out(cta, count, ctas) for cta in range(ctas)]
        covered = [i for start, stop in parts for i in range(start, stop)]
        assert covered == list(range(count))


@pytest.mark.parametrize(
    ("columns", "narrow", "short"),
    [(64, True, False), (256, True, False), (255, True, False), (260, False, True)],
)
def test_narrow_planes_go_four_lanes_a_row(columns, narrow, short):
    warps_per_row, ctas, direct = select_kernel._grid(4096, columns, Target(sms=132))
    params = select_kernel.SelectParams(4096, columns, 1, 0, 1, False, warps_per_row, ctas, direct)
    assert (params.narrow, params.takes_short) == (narrow, short)


@pytest.mark.parametrize(
    ("tokens", "columns", "warps", "ctas"),
    [
        (8192, 64, 32, 132),
        (9000, 128, 20, 132),  # two turns
        (700, 64, 4, 132),
        (2048, 256, 8, 132),
        (8192, 256, 16, 132),  # two turns
    ],
)
def test_ctas_of_a_narrow_plane_fill_the_gpu(tokens, columns, warps, ctas):
    grid = select_kernel._grid(tokens, columns, Target(sms=132))
    params = select_kernel.SelectParams(tokens, columns, 1, 0, 1, False, *grid)
    assert (params.warps, params.ctas) == (warps, ctas)
    assert 4 * params.warps * params.warp_words <= 227 << 10


NARROW_CASES = [
    # columns, scale, offset, begin, end, tagged
    (4, 1, 0, 0, 1, False),
    (16, 1, 0, 0, 0, False),
    (64, 1, 0, 0, 1, False),
    (64, 2, 1, 1, 2, True),
    (68, 1, 0, 0, 1, False),
    (96, 1, -40, 3, 5, False),  # nonsense: candidates begin inside
    (128, 1, 0, 0, 0, True),
    (100, 2, 1, 2, 3, False),
    (256, 1, 0, 0, 1, False),
    (256, 1, 0, 16, 0, False),
    (256, 2, 0, 0, 16, False),
    (256, 1, -50, 1, 1, False),
    (200, 1, -(2**31) + 300, 1, 1, False),
    (200, 2, 2**31 - 1, 1, 1, True),
    (203, 1, 0, 1, 2, False),  # rows are not 16-byte aligned
    (33, 2, 1, 0, 1, False),
    (1, 1, 0, 0, 1, False),
]


@pytest.mark.parametrize(("start", "stop"), [(0, 40), (5, 38), (17, 20)])
@pytest.mark.parametrize(("columns", "scale", "offset", "begin", "end", "tagged"), NARROW_CASES)
def test_narrow_rows(monkeypatch, columns, scale, offset, begin, end, tagged, start, stop):
    """The program of a CTA of the narrow rows' way: what it stores, and that nothing else is."""
    rng = np.random.default_rng(columns + scale + start)
    tokens = 40
    scores = hard_rows.score_plane(tokens, columns, rng)
    scores[::2] = rng.normal(size=scores[::2].shape)  # every second token has random rows alone
    counts = hard_rows.visible_counts(tokens, columns, scale, rng).astype(np.int32)
    # Of five equal ones a single one wins, and all that reach the threshold are in the lower half.
    counts[1], scores[1, :, :5], scores[1, :, 5:20] = 8192, 9, 10
    words = 32 if tagged else 33
    out = np.full((4, tokens + 2, *((32, 2) if tagged else (33,))), _UNTOUCHED, np.int32)
    tags = rng.integers(-(2**31), 2**31, (4, tokens)).astype(np.int32)
    params = select_kernel.SelectParams(tokens, columns, scale, begin, end, tagged, 1, 10, False)
    left_open = select_narrow(monkeypatch, params, scores, counts, offset, out, tags, start, stop)

    want = oracle.select(scores, counts, begin, end, index_scale=scale, index_offset=offset)
    found = out[..., 0] if tagged else out
    for head, token in left_open:  # what is there means nothing
        found[head, token] = want[head, token, :words]
    np.testing.assert_array_equal(found[:, start:stop], want[:, start:stop, :words])
    assert len(left_open) <= (stop - start) // 4
    assert offset < 0 or all(token % 2 for _, token in left_open)
    assert (np.delete(out, slice(start, stop), axis=1) == _UNTOUCHED).all()
    if tagged:
        carried = np.broadcast_to(tags[:, start:stop, None], found[:, start:stop].shape)
        np.testing.assert_array_equal(out[:, start:stop, :, 1], carried)


@pytest.mark.parametrize(
    ("name", "open_rows"), [("equal", 0), ("few above equal", 0), ("NaN", 0), ("crowded", 4)]
)
def test_narrow_rows_that_are_left_open(monkeypatch, name, open_rows):
    """Ties at the cutoff are settled at once; best scores that crowd in few classes are not."""
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(3, 4, 256)).astype(np.float32)
    special = np.zeros(256, np.float32)
    special[:15] = {"few above equal": np.arange(1, 16), "NaN": np.nan}.get(name, 0)
    if name == "crowded":
        special[::8] = np.arange(32)
        special[1::8] = np.arange(32)
    scores[1] = special
    counts = np.full(3, 256, np.int32)
    out = np.full((4, 3, 33), _UNTOUCHED, np.int32)
    params = select_kernel.SelectParams(3, 256, 1, 0, 1, False, 1, 1, False)
    left_open = select_narrow(monkeypatch, params, scores, counts, 0, out, counts, 0, 3)
    assert left_open == {(head, 1) for head in range(open_rows)}
    want = oracle.select(scores, counts, 0, 1)
    closed = [0, 2] if open_rows else [0, 1, 2]
    np.testing.assert_array_equal(out[:, closed], want[:, closed])


def select_narrow(
    monkeypatch: pytest.MonkeyPatch,
    params: select_kernel.SelectParams,
    scores: Array,
    counts: Array,
    offset: int,
    out: Array,
    tags: Array,
    start: int,
    stop: int,
) -> set[tuple[int, int]]:
    """Selects tokens [start, stop) into `out`; returns the rows (head, token) left open."""
    for module in (eight_rows, networks, long_rows, select_kernel):
        lane_simulator.simulate(monkeypatch, module)
    left_open = set()

    def note(_: Any, token: Lane, head: Lane, bounds: Any) -> None:
        there = lane_simulator.running()
        left_open.update(zip(head.value[there].tolist(), token.value[there].tolist(), strict=True))

    monkeypatch.setattr(select_kernel.Thread, "_in_loop", lambda self: self)
    monkeypatch.setattr(select_kernel.Thread, "_select_row", note)
    words = lane_simulator.Words
    shared = np.full(select_kernel.WARPS * params.warp_words, _UNTOUCHED, np.int32)
    memory_tags = [words(tags.reshape(-1))] if params.tagged else []
    rows = select_kernel.LocalRows(words(out.reshape(-1)), out.shape[1], params.tokens, memory_tags)
    plane = words(scores.reshape(-1))
    where = Lane(np.int32(offset))
    thread = select_kernel.Thread(params, plane, words(counts), where, rows, words(shared))
    thread._select_narrow(Lane(np.int32(start)), Lane(np.int32(stop)))
    return left_open
