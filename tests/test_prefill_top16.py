"""The prefill Top16's thread programs, simulated: notes, logs, and the rows made of them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import oracle
import pytest
from lane_simulator import THREADS, Lane, Words, simulate

from msa_icp_jax.ops._mosaic import prefill_pieces, prefill_top16
from msa_icp_jax.ops._mosaic.prefill_pieces import StepPages

_ROW = SimpleNamespace(thread=Lane(np.arange(THREADS, dtype=np.int32)))
_PLACES = prefill_top16.LOG_SHAPE[0]
_NONE = Lane(np.int32(0))


@pytest.fixture(autouse=True)
def _simulated(monkeypatch):
    simulate(monkeypatch, prefill_top16)
    monkeypatch.setattr(prefill_top16, "_lower", lambda a, b: Lane(np.minimum(a.value, b.value)))

    def store_pair(place: Words, score: Lane, column: Lane) -> None:
        place.store(score)
        (place + 1).store(column)

    monkeypatch.setattr(prefill_top16, "_store_pair", store_pair)


def scores(kind: str, columns: int) -> np.ndarray:
    """float32 [columns, 128]."""
    rng = np.random.default_rng(columns)
    shape = (columns, THREADS)
    x = {
        "normal": rng.standard_normal(shape),
        "ties": rng.integers(0, 4, shape),
        # A single best one, then pairs: the 16th and the 17th are equal, the 15th is better.
        "pairs": rng.permuted((np.arange(columns) + 1)[:, None] // 2 + np.zeros(shape), axis=0),
        "equal": np.zeros(shape),
        "rising": np.arange(columns)[:, None] + np.zeros(shape),
        "hidden": np.where(rng.random(shape) < 0.9, -1e30, rng.integers(-2, 2, shape)),
        "zeros": np.where(rng.random(shape) < 0.5, -0.0, 0.0),
    }[kind]
    return x.astype(np.float32)


def walk(values: np.ndarray, first: int, log: Words) -> prefill_top16._Running:
    """What `push` does with columns `first` onwards, four a step."""
    notes = np.full(prefill_top16._NOTES * THREADS, 7, np.int32)
    nothing = [Lane(np.float32(-np.inf))] * 16
    running = prefill_top16._Running(Words(notes), log, _ROW, nothing, _NONE, _NONE)
    for step in range(0, len(values), 4):
        for g, score in enumerate(values[step : step + 4]):
            column = Lane(np.full(THREADS, first + step + g, np.int32))
            running.append(Lane(score), column, Lane(score) > running.bar)
        assert (running.count.value <= _PLACES).all()
        assert (running.noted.value <= prefill_top16._NOTES).all()
        running.make_room(4)
    running.rank_notes()
    return running


def best_of(values: np.ndarray) -> np.ndarray:
    """Columns [16, 128] of the best 16 scores, ascending."""
    return np.sort(np.argsort(-values, axis=0, kind="stable")[:16], axis=0)


@pytest.mark.parametrize("columns", [8, 16, 20, 160])
@pytest.mark.parametrize("kind", ["normal", "ties", "pairs", "equal", "rising", "hidden", "zeros"])
def test_a_log_holds_the_best_16_in_the_order_of_columns(kind, columns):
    values = scores(kind, columns)
    memory = np.full(_PLACES * 2 * THREADS, 7, np.int32)
    running = walk(values, 100, Words(memory))
    expected = -np.sort(-values, axis=0)[:16]
    np.testing.assert_array_equal(
        [x.value for x in running.scores[: len(expected)]], expected, strict=True
    )
    logged = memory.reshape(_PLACES, THREADS, 2)[..., 1]
    for row, count in enumerate(running.count.value):
        entries = logged[:count, row].tolist()
        assert entries == sorted(entries)
        assert set(best_of(values)[:, row] + 100) <= set(entries)

    if columns >= 16:
        running.count = Lane(running._cut()[0].value)
        assert (running.count.value == 16).all()
        np.testing.assert_array_equal(logged[:16], best_of(values) + 100)


@pytest.mark.parametrize("kind", ["normal", "ties", "pairs", "equal", "hidden"])
@pytest.mark.parametrize(("offset", "begin", "end"), [(0, 0, 1), (1, 2, 3), (0, 8, 8)])
def test_joined_parts_make_the_rows_of_the_contract(kind, offset, begin, end):
    facts = prefill_top16.Selection(StepPages(64, 256), 32, 4096, 2, begin, end, interpret=False)
    rng = np.random.default_rng(begin)
    visible = rng.integers(0, 2 * 96 + 20, THREADS).astype(np.int32)
    visible[:8] = 1, 2, 3, 15, 16, 17, 40, 230
    values, seen = scores(kind, 96), 96
    bounds = prefill_top16._bounds(Lane(visible), Lane(np.int32(offset)), facts)

    # Three parts; a column outside a row's open ones does not enter its log.
    at = np.arange(seen)[:, None]
    is_open = (at >= bounds.front.value) & (at < bounds.back.value)
    open_values = np.where(is_open, values, -np.inf).astype(np.float32)
    logs = np.zeros(3 * 2 * _PLACES * 2 * THREADS, np.int32)
    counts = np.zeros(3 * 2 * THREADS, np.int32)
    ranked = np.zeros(3 * 2 * 16 * THREADS, np.int32)
    half = Lane(np.int32(1))
    lists = prefill_top16._Lists(Words(logs), Words(counts), Words(ranked), half, _ROW)
    for part, (first, last) in enumerate([(0, 40), (40, 44), (44, 96)]):
        slot = Lane(np.int32(part))
        lists.leave(slot, walk(open_values[first:last], first, lists.log(slot)))
    forced = np.zeros((16, facts.padded_rows), np.float32)
    for row in range(THREADS):
        front, back, stop = (int(x.value[row]) for x in bounds)
        chosen = [*range(front), *range(back, stop)]
        inside = [c for c in chosen if c < seen]
        forced[chosen.index(inside[0]) if inside else 0 :][: len(inside), row] = values[inside, row]

    stage = np.zeros(THREADS * 33, np.int32)
    row = prefill_top16._Row(
        Words(stage) + _ROW.thread * 33,
        bounds,
        Lane(np.full(THREADS, seen, np.int32)),
        Lane(np.full(THREADS, offset, np.int32)),
        facts,
    )
    parts = Lane(np.int32(3))
    row.store_chosen(lists.best(_NONE, parts), lists, _NONE, parts)
    row.store_forced(Words(forced.reshape(-1)) + _ROW.thread)
    row.store_tail()

    plane = np.full((THREADS, 128), -np.inf, np.float32)  # columns behind `seen` are -inf
    plane[:, :seen] = np.where(values > -1e30, values + 0.0, -np.inf).T
    expected = oracle.select(
        np.repeat(plane[:, None], 4, axis=1),
        visible,
        begin,
        end,
        index_scale=2,
        index_offset=offset,
    )[0]
    np.testing.assert_array_equal(stage.reshape(THREADS, 33), expected)


# ---- where threads' data lies ----

_THREAD = np.arange(THREADS, dtype=np.int32)
_QUAD = _THREAD % 4
_ROW_OF = 16 * (_THREAD // 32) + _THREAD % 32 // 4 + 64 * (_QUAD // 2) + 8 * (_QUAD % 2)
_PLACE = SimpleNamespace(thread=Lane(_THREAD), quad=Lane(_QUAD), row=lambda: Lane(_ROW_OF))


@pytest.mark.parametrize("rows_per_page", [32, 64, 128])
def test_a_thread_finds_the_maxima_of_its_row(monkeypatch, rows_per_page):
    simulate(monkeypatch, prefill_pieces)
    pages = StepPages(rows_per_page, 128)
    rng = np.random.default_rng(0)
    # Of (m, i) = (0, 0), (0, 1), (1, 0), (1, 1), what each thread left.
    left = rng.standard_normal((4, THREADS, pages.count)).astype(np.float32)
    found = prefill_pieces.shared_maxima(_PLACE, left.reshape(-1).view(np.int32), pages)
    expected = left.reshape(4, THREADS // 4, 4, -1).max(axis=2)[_QUAD, _THREAD // 4]
    np.testing.assert_array_equal(np.stack([x.value for x in found], axis=1), expected)


def test_rows_go_to_the_places_of_their_tokens_and_heads(monkeypatch):
    monkeypatch.setattr(prefill_top16, "_quotient", lambda x, by: Lane(x.value // by))
    facts = prefill_top16.Selection(StepPages(64, 256), 96, 4096, 2, 0, 0, interpret=False)
    stage = np.zeros(4 * 32 * 33, np.int32)
    capacity, first = 70, 33
    carrier = np.full((4, capacity, 33), -7, np.int32)
    memory = carrier.reshape(-1)
    writer = prefill_top16._Rows(Words(stage), Words(memory), capacity, _PLACE, _NONE, facts)
    row = writer.row(prefill_top16.Bounds(_NONE, _NONE, _NONE), _NONE)
    for word in range(33):
        (row.target + word).store(Lane(_ROW_OF * 100 + word))
    live = np.isin(_ROW_OF // 4, [0, 3, 5, 6, 18, 31])
    writer.copy(Lane(np.int32(first)), Lane(live))
    expected = np.full_like(carrier, -7)
    for token in (0, 3, 5, 6, 18, 31):
        for head in range(4):
            expected[head, first + token] = (4 * token + head) * 100 + np.arange(33)
    np.testing.assert_array_equal(carrier, expected)
