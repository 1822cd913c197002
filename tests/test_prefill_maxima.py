"""The prefill kernel's machine pieces, run in numpy: maxima in registers and their exchanges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from lane_simulator import THREADS, Lane, Words, simulate

from msa_icp_jax.ops.prefill_score import maxima, plane
from msa_icp_jax.ops.prefill_score.maxima import StepPages
from msa_icp_jax.ops.prefill_score.plane import Plane

_ROWS = _KEYS = 128
_NAN = np.float32(np.nan)


@pytest.fixture(autouse=True)
def pieces(monkeypatch):
    """Arrays are lists of lanes; a vector store is several."""

    def store_row(target: Words, values: list[Lane], columns: int) -> None:
        del columns
        for g, value in enumerate(values):
            (target + g).store(value)

    for module in (maxima, plane):
        simulate(monkeypatch, module)
        monkeypatch.setattr(module, "of_array", lambda x: x)
    monkeypatch.setattr(plane, "_store_row", store_row)


def products(rng: np.random.Generator) -> np.ndarray:
    """[rows, keys] with pages and rows of negative values, a few NaN keys, both zeros."""
    found = rng.normal(size=(_ROWS, _KEYS)).astype(np.float32)
    found[:, 32:64] = -np.abs(found[:, 32:64])
    found[7] = -np.abs(found[7])
    found[9, :40] = -0.0
    return found


def registers(values: np.ndarray) -> tuple[Any, Any]:
    """The two halves as WGMMA leaves them, each a list of one lane value an element."""
    thread = np.arange(THREADS)
    lane, warp = thread % 32, thread // 32
    halves = []
    for m in range(2):
        found = []
        for n in range(_KEYS // 8):
            for i in range(2):
                for e in range(2):
                    row = 64 * m + 16 * warp + 8 * i + lane // 4
                    found.append(Lane(values[row, 8 * n + 2 * (lane % 4) + e]))
        halves.append(found)
    return halves[0], halves[1]


def lane_maxima(values: np.ndarray, pages: StepPages, take: Any) -> tuple[Any, Any]:
    upper, lower = (
        [take(pairs) for _, _, pairs in maxima._by_page(half, pages)] for half in registers(values)
    )
    return upper, lower


def page_maxima(values: np.ndarray, pages: StepPages) -> np.ndarray:
    by_page = values.reshape(_ROWS, pages.count, pages.rows)
    return np.where(np.isnan(by_page), -np.inf, by_page).max(axis=2)


def integers(pairs: Any) -> Lane:
    return maxima._integer_maximum(pairs)


def floats(pairs: Any) -> Lane:
    return maxima._float_maximum(pairs, None)


PAGES = [StepPages(32, 128), StepPages(64, 128), StepPages(128, 256)]


@pytest.mark.parametrize("pages", PAGES, ids=lambda x: f"{x.count}-pages")
def test_a_lane_ends_with_all_page_maxima_of_its_row(pages):
    values = products(np.random.default_rng(0))
    values[3, 5], values[4] = _NAN, _NAN
    place = maxima.Place()
    found = maxima.row_maxima(place, *lane_maxima(values, pages, floats))
    want = page_maxima(values, pages)[place.row().value]
    got = np.stack([np.fmax(x.value, -np.inf) for x in found], axis=1)
    np.testing.assert_array_equal(got, want)
    assert sorted(place.row().value) == list(range(_ROWS))


@pytest.mark.parametrize("pages", PAGES, ids=lambda x: f"{x.count}-pages")
def test_integer_maxima_are_right_unless_they_are_negative(pages):
    values = products(np.random.default_rng(1))
    place = maxima.Place()
    found = maxima.row_maxima(place, *lane_maxima(values, pages, integers))
    got, want = np.stack([x.value for x in found], axis=1), page_maxima(values, pages)
    want = want[place.row().value]
    wrong = got != want
    assert (got[wrong] < 0).all() and (want[wrong] <= 0).all()
    # A zero may be missed, but only among values that are not positive; it is no positive score.
    assert wrong.any() and (got[want > 0] == want[want > 0]).all()


@pytest.mark.parametrize("pages", PAGES, ids=lambda x: f"{x.count}-pages")
@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7F800001])
def test_a_nan_key_shows_in_one_row_of_every_warp(pages, bits):
    for key in (0, 31, 77, 127):
        values = products(np.random.default_rng(2))
        upper, _ = lane_maxima(values, pages, integers)
        assert not maxima.is_nan(upper[: pages.count]).value.any()
        values[:, key] = np.uint32(bits).view(np.float32)
        upper, _ = lane_maxima(values, pages, integers)
        seen = maxima.is_nan(upper[: pages.count]).value.reshape(4, 32)
        assert seen.any(axis=1).all()


@pytest.mark.parametrize("pages", PAGES, ids=lambda x: f"{x.count}-pages")
@pytest.mark.parametrize(
    ("begin", "end", "first_column"), [(0, 128, 0), (12, 100, 0), (0, 128, 99)]
)
def test_two_steps_fill_whole_rows_of_the_plane(pages, begin, end, first_column):
    """Both windows' halves of the rows, in the plane's place, and nothing else."""
    rng = np.random.default_rng(3)
    steps = [products(rng), products(rng)]
    count, columns, first, column = pages.count, 24, 128, 8
    facts = Plane(pages, columns, 1.0, "candidates", (0, 1))
    scores = np.full((3 * _ROWS, columns), 7.5, np.float32)
    place = maxima.Place()
    half, second = (maxima.halve(place, *lane_maxima(x, pages, floats)) for x in steps)
    scalars = [Lane(np.int32(x)) for x in (first, begin, end, column, first_column)]
    pair = plane._Pair(place, scores.reshape(-1), scalars, facts)
    for i in range(2):
        part = slice(i * count, (i + 1) * count)
        pair.store(i, half[part], second[part])
    want = np.full_like(scores, 7.5)
    if first_column <= column:
        both = np.concatenate([page_maxima(x, pages) for x in steps], axis=1)
        both = np.where(both == 0, 0.0, both)
        want[first + begin : first + end, column : column + 2 * count] = both[begin:end]
    np.testing.assert_array_equal(scores.view(np.int32), want.view(np.int32))
