"""The prefill Top16's thread programs, simulated: logs, cuts, joins and the rows made of them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import oracle
import pytest
from lane_simulator import THREADS, Lane, Words, simulate

from msa_icp_jax.ops._mosaic import prefill_top16
from msa_icp_jax.ops._mosaic.prefill_pieces import StepPages

_ROW = SimpleNamespace(thread=Lane(np.arange(THREADS, dtype=np.int32)))
_PLACES, _WORDS = prefill_top16.LOG_SHAPE


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


def walk(values: np.ndarray, first: int, memory: np.ndarray) -> prefill_top16._Log:
    """What `push` does with columns `first` onwards, four a step."""
    log = prefill_top16._Log.empty(memory, _ROW)
    for step in range(0, len(values), 4):
        for g, score in enumerate(values[step : step + 4]):
            column = Lane(np.full(THREADS, first + step + g, np.int32))
            log.append(Lane(score), column, Lane(score) > log.bar)
        assert (log.count.value <= _PLACES).all()
        if (log.count.value - log.kept.value > prefill_top16._NEW - 4).any():
            *kept, first_places, count = log.cut()
            log = prefill_top16._Log(memory, _ROW, kept, first_places, count)
    *kept, first_places, count = log.cut()
    return prefill_top16._Log(memory, _ROW, kept, first_places, count)


def listed(memory: np.ndarray, count: np.ndarray) -> list[list[int]]:
    columns = memory.reshape(_PLACES, THREADS, 2)[..., 1]
    return [columns[:n, row].tolist() for row, n in enumerate(count)]


@pytest.mark.parametrize("columns", [8, 16, 20, 160])
@pytest.mark.parametrize("kind", ["normal", "ties", "pairs", "equal", "rising", "hidden", "zeros"])
def test_a_log_keeps_the_best_16_in_the_order_of_columns(kind, columns):
    values = scores(kind, columns)
    memory = np.full(_PLACES * _WORDS, 7, np.int32)
    log = walk(values, 100, memory)
    best = np.sort(np.argsort(-values, axis=0, kind="stable")[:16], axis=0)
    assert listed(memory, log.kept.value) == (best.T + 100).tolist()
    expected = -np.sort(-values, axis=0)[:16]
    np.testing.assert_array_equal([x.value for x in log.scores[: len(expected)]], expected)


@pytest.mark.parametrize("kind", ["normal", "ties", "pairs", "equal", "hidden"])
@pytest.mark.parametrize(("offset", "begin", "end"), [(0, 0, 1), (1, 2, 3), (0, 8, 8)])
def test_joined_parts_make_the_rows_of_the_contract(kind, offset, begin, end):
    facts = prefill_top16.Selection(StepPages(64, 256), 32, 2, begin, end, interpret=False)
    rng = np.random.default_rng(begin)
    visible = rng.integers(0, 2 * 96 + 20, THREADS).astype(np.int32)
    visible[:8] = 1, 2, 3, 15, 16, 17, 40, 230
    values, seen = scores(kind, 96), 96
    bounds = prefill_top16._bounds(Lane(visible), Lane(np.int32(offset)), facts)

    # Three parts; a column outside a row's open ones does not enter its log.
    at = np.arange(seen)[:, None]
    is_open = (at >= bounds.front.value) & (at < bounds.back.value)
    open_values = np.where(is_open, values, -np.inf).astype(np.float32)
    lists = np.zeros((6, 16, THREADS, 2), np.int32)
    for part, (first, last) in enumerate([(0, 40), (40, 44), (44, 96)]):
        memory = np.zeros(_PLACES * _WORDS, np.int32)
        log = walk(open_values[first:last], first, memory)
        entries = memory.reshape(_PLACES, THREADS, 2)[:16].copy()
        entries[np.arange(16)[:, None] >= log.kept.value, 1] = -1
        lists[2 * part] = entries
    forced = np.zeros((16, facts.padded_rows), np.float32)
    for row in range(THREADS):
        front, back, stop = (int(x.value[row]) for x in bounds)
        chosen = [*range(front), *range(back, stop)]
        inside = [c for c in chosen if c < seen]
        forced[chosen.index(inside[0]) if inside else 0 :][: len(inside), row] = values[inside, row]

    memory = np.zeros(_PLACES * _WORDS, np.int32)
    parts = Lane(np.full(THREADS, 3, np.int32))
    source = Words(lists.reshape(-1)) + _ROW.thread * 2
    log = prefill_top16._join(prefill_top16._Log.empty(memory, _ROW), source, parts)
    stage = np.zeros(THREADS * 33, np.int32)
    row = prefill_top16._Row(
        Words(stage) + _ROW.thread * 33,
        bounds,
        Lane(np.full(THREADS, seen, np.int32)),
        Lane(np.full(THREADS, offset, np.int32)),
        facts,
    )
    row.store_chosen(log)
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
