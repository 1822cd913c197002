"""The Top16 select kernel's logic (stock ops, in the interpreter) against the oracle."""

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

from msa_icp_jax.ops._mosaic import long_rows, networks, paired_rows
from msa_icp_jax.ops.select import mosaic

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
        mosaic.select_rows,
        index_scale=scale,
        force_begin_blocks=begin,
        force_end_blocks=end,
        enable_pdl=True,
        target=race_free.interpreter(ctas),
    )

    def call(offset: jax.Array, scores: jax.Array, counts: jax.Array, *others: jax.Array) -> Any:
        given = iter(others)
        return kernel(
            scores,
            counts,
            None if rows is None else next(given),
            None if tags is None else next(given),
            index_offset=offset,
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
        parts = [mosaic.share_out(cta, count, ctas) for cta in range(ctas)]
        covered = [i for start, stop in parts for i in range(start, stop)]
        assert covered == list(range(count))


@pytest.mark.parametrize(
    ("columns", "paired", "short"),
    [(64, True, False), (256, True, False), (255, False, False), (260, False, True)],
)
def test_narrow_planes_go_two_lanes_a_row(columns, paired, short):
    team, ctas, direct = mosaic._grid(4096, columns, mosaic.Target(sms=132))
    facts = mosaic.Select(4096, columns, 1, 0, 1, False, team, ctas, direct)
    assert (facts.paired, facts.takes_short) == (paired, short)


PAIRED_CASES = [
    # columns, scale, offset, begin, end
    (4, 1, 0, 0, 1),
    (16, 1, 0, 0, 0),
    (64, 1, 0, 0, 1),
    (128, 1, 0, 0, 0),
    (100, 2, 1, 2, 3),
    (256, 1, 0, 16, 0),
    (256, 2, 0, 0, 16),
]


@pytest.mark.parametrize(("columns", "scale", "offset", "begin", "end"), PAIRED_CASES)
def test_sixteen_rows_of_a_warp(monkeypatch, columns, scale, offset, begin, end):
    """What the machine pieces say is good is right, and random rows are good."""
    for module in (paired_rows, networks, long_rows):
        lane_simulator.simulate(monkeypatch, module)
    shared = np.full(mosaic.WARPS * paired_rows.WARP_WORDS, _UNTOUCHED, np.int32)
    monkeypatch.setattr(paired_rows, "_address", lambda place: Lane(np.int32(4) * place.at))
    monkeypatch.setattr(paired_rows, "_load_four", _load_four)
    monkeypatch.setattr(paired_rows, "_put_if", functools.partial(_put_if, shared))

    rng = np.random.default_rng(columns + scale)
    tokens = mosaic.WARPS * paired_rows.ROWS // 4
    scores = hard_rows.score_plane(tokens, columns, rng)
    scores[::2] = rng.normal(size=scores[::2].shape)  # every second token has random rows alone
    counts = hard_rows.visible_counts(tokens, columns, scale, rng)
    # Of five equal ones a single one wins, and all that reach the bar are in the lower half.
    counts[1], scores[1, :, :5], scores[1, :, 5:20] = 8192, 9, 10
    thread = np.arange(lane_simulator.THREADS, dtype=np.int32)
    lane, warp = Lane(thread % 32), thread // 32
    bounds = long_rows.find_bounds(
        Lane(counts[thread // 8].astype(np.int32)),
        Lane(np.int32(offset)),
        scale=scale,
        columns=columns,
        begin=begin,
        end=end,
    )
    rows = paired_rows.Rows(
        scores=lane_simulator.Words(scores.reshape(-1), warp * paired_rows.ROWS * columns),
        columns=columns,
        front=bounds.front,
        back=bounds.back,
        stop=bounds.stop,
        ids=(scale, Lane(np.int32(offset))),
        lane=lane,
        shared=lane_simulator.Words(shared, warp * paired_rows.WARP_WORDS),
    )
    good, lower = (x.value.reshape(-1, 2) for x in rows.find_top16())
    assert (good[:, 0] == good[:, 1]).all() and (lower[:, 0] == lower[:, 1]).all()
    good = good[:, 0].reshape(tokens, 4)
    want = oracle.select(scores, counts, begin, end, index_scale=scale, index_offset=offset)
    for r in range(paired_rows.ROWS):
        first = Lane(np.repeat(lower[r :: paired_rows.ROWS, 0], 32).astype(np.int32))
        found = (rows.shared + paired_rows.place_of(Lane(np.int32(r)), lane, first)).load()
        for w, words in enumerate(found.value.reshape(-1, 32)):
            token = w * 4 + r // 4
            if good[token, r % 4]:
                np.testing.assert_array_equal(words, want[r % 4, token, :32])
    assert good[::2].all()
    assert not good.all() or columns <= 16


@pytest.mark.parametrize(("start", "stop"), [(0, 37), (5, 38), (17, 20)])
def test_a_cta_selects_each_row_of_its_tokens_once(monkeypatch, start, stop):
    """Rows that a warp cannot select with others are passed on, all others are stored."""
    columns, scale, offset, begin, end = 64, 2, 1, 1, 2
    for module in (paired_rows, networks, long_rows, mosaic):
        lane_simulator.simulate(monkeypatch, module)
    shared = np.zeros(mosaic.WARPS * paired_rows.WARP_WORDS, np.int32)
    monkeypatch.setattr(paired_rows, "_address", lambda place: Lane(np.int32(4) * place.at))
    monkeypatch.setattr(paired_rows, "_load_four", _load_four)
    monkeypatch.setattr(paired_rows, "_put_if", functools.partial(_put_if, shared))

    passed_on = []

    def select_row(_: Any, token: Lane, head: Lane, bounds: Any) -> None:
        for w in range(0, lane_simulator.THREADS, 32):
            if lane_simulator._masks[-1][w]:
                passed_on.append((token.value[w], head.value[w], bounds.stop.value[w]))

    monkeypatch.setattr(mosaic.Thread, "_select_row", select_row)
    monkeypatch.setattr(mosaic.Thread, "_in_loop", lambda self: self)
    rng = np.random.default_rng(start)
    scores = hard_rows.score_plane(40, columns, rng)
    counts = hard_rows.visible_counts(40, columns, scale, rng).astype(np.int32)
    out = np.full((4, 42, 33), _UNTOUCHED, np.int32)
    facts = mosaic.Select(40, columns, scale, begin, end, False, 1, 4, False)
    thread = mosaic.Thread(
        facts,
        lane_simulator.Words(scores.reshape(-1)),
        lane_simulator.Words(counts),
        Lane(np.int32(offset)),
        mosaic.LocalRows(lane_simulator.Words(out.reshape(-1)), out.shape[1], 40, []),
        lane_simulator.Words(shared),
    )
    thread._select_paired(Lane(np.int32(start)), Lane(np.int32(stop)))

    want = oracle.select(scores, counts, begin, end, index_scale=scale, index_offset=offset)
    left = {(token, head) for token, head, _ in passed_on}
    assert len(left) == len(passed_on)
    assert left or stop - start < 16
    columns_below = np.clip((np.clip(counts, 0, 8192) - offset + 1) // 2, 0, columns)
    for token, _, stop_column in passed_on:
        assert start <= token < stop and stop_column == columns_below[token]
    stored = 0
    for token, head in np.ndindex(42, 4):
        if start <= token < stop and (token, head) not in left:
            np.testing.assert_array_equal(out[head, token], want[head, token])
            stored += 1
        else:
            assert (out[head, token] == _UNTOUCHED).all()
    assert stored > len(left)


def _load_four(place: lane_simulator.Words, inside: Lane) -> list[Lane]:
    with lane_simulator._when(inside):
        return [(place + i).load(np.float32) for i in range(4)]


def _put_if(
    shared: Array,
    value: Lane,
    bar: Lane,
    place: Lane,
    end: Lane,
    found: tuple[Lane, Lane],
    step: Lane,
) -> Lane:
    wins = (value >= bar) & place.ne(end)
    for i, word in enumerate(found):
        with lane_simulator._when(wins):
            lane_simulator.Words(shared, place.value // 4 + 16 * i).store(word)
    return lane_simulator._where(wins, place + step, place)
