"""The prefill kernel's machine pieces, run in numpy: maxima in registers, lines of the plane."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from lane_simulator import THREADS, Lane, Words, simulate

from msa_icp_jax.ops.prefill_score import maxima, plane
from msa_icp_jax.ops.prefill_score.maxima import Causal, StepPages
from msa_icp_jax.ops.prefill_score.plane import Plane, Rows

_ROWS, _KEYS = 64, 128
_NAN = np.float32(np.nan)
_UNTOUCHED = 7.5


@pytest.fixture(autouse=True)
def pieces(monkeypatch):
    """Pieces run at once; arrays are lists of lanes, a vector store is several."""

    def inline_mgpu(**_: Any) -> Any:
        return lambda run: lambda *arguments: run(None, *arguments)

    def store_row(target: Words, values: list[Lane], plane: Plane) -> None:
        del plane
        for g, value in enumerate(values):
            (target + g).store(value)

    for module in (maxima, plane):
        simulate(monkeypatch, module)
        module.lanes.scalar = lambda x: Lane(np.int32(x))
        monkeypatch.setattr(module.plgpu, "inline_mgpu", inline_mgpu)
        monkeypatch.setattr(module, "of_array", lambda x: x)
        monkeypatch.setattr(module, "as_array", lambda x, layout: x)
    monkeypatch.setattr(plane, "_store_row", store_row)


def products(rng: np.random.Generator) -> np.ndarray:
    """[rows, keys] with a page and a row of negative values and a row with zeros."""
    found = rng.normal(size=(_ROWS, _KEYS)).astype(np.float32)
    found[:, 32:64] = -np.abs(found[:, 32:64])
    found[7] = -np.abs(found[7])
    found[9, :40] = -0.0
    return found


def registers(values: np.ndarray) -> list[Lane]:
    """Products as WGMMA leaves them, one lane value an element."""
    thread = np.arange(THREADS)
    lane, warp = thread % 32, thread // 32
    return [
        Lane(values[16 * warp + 8 * i + lane // 4, 8 * n + 2 * (lane % 4) + e])
        for n in range(_KEYS // 8)
        for i in range(2)
        for e in range(2)
    ]


def page_maxima(values: np.ndarray, pages: StepPages) -> np.ndarray:
    by_page = values.reshape(_ROWS, pages.count, pages.rows)
    best = np.where(np.isnan(by_page), -np.inf, by_page).max(axis=2)
    return np.where(best == 0, np.float32(0), best)


def of_all_rows(best: list[Lane], pages: StepPages) -> np.ndarray:
    """[rows, pages] from what the lanes end with."""
    place = maxima.Place()
    found = np.full((_ROWS, pages.count), _NAN, np.float32)
    stores, row = place.stores(pages).value, place.row().value
    for g, x in enumerate(best):
        found[row[stores], (place.first_page(pages).value + g)[stores]] = x.value[stores]
    assert not np.isnan(found).any()
    return found


PAGES = [StepPages(32, 128), StepPages(64, 128), StepPages(128, 256)]
by_pages = pytest.mark.parametrize("pages", PAGES, ids=lambda x: f"{x.count}-pages")


@by_pages
def test_a_row_has_the_maxima_of_all_pages(pages):
    values = products(np.random.default_rng(0))
    values[3, 5], values[4] = _NAN, _NAN
    found = maxima.lane_maxima(registers(values), None, pages)
    best = of_all_rows(maxima.row_maxima(found, pages, 1.0), pages)
    np.testing.assert_array_equal(best.view(np.int32), page_maxima(values, pages).view(np.int32))


@by_pages
def test_keys_that_a_row_does_not_see_are_left_out(pages):
    values = products(np.random.default_rng(1))
    causal = Causal(500, 700, 430)
    found = maxima.lane_maxima(registers(values), causal, pages)
    page, key = np.divmod(np.arange(_KEYS), pages.rows)
    seen = (
        causal.first_key + page * pages.size + key
        <= causal.position + np.arange(_ROWS)[:, None] // 4
    )
    hidden = np.where(seen, values, -np.inf).astype(np.float32)
    best = of_all_rows(maxima.row_maxima(found, pages, 1.0), pages)
    np.testing.assert_array_equal(best, page_maxima(hidden, pages))


@by_pages
def test_integer_maxima_are_right_unless_they_are_negative(pages):
    values = products(np.random.default_rng(2))
    found = maxima.integer_maxima(registers(values), pages)
    got, want = of_all_rows(maxima.row_maxima(found, pages, 1.0), pages), page_maxima(values, pages)
    wrong = got != want
    assert (got[wrong] < 0).all() and (want[wrong] <= 0).all()
    # A zero may be missed, but only among values that are not positive; it is no positive score.
    assert wrong.any() and (got[want > 0] == want[want > 0]).all()


@by_pages
@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7F800001])
def test_integer_maxima_skip_a_nan_key(pages, bits):
    for key in (0, 31, 77, 127):
        values = products(np.random.default_rng(3))
        values[:, key] = np.uint32(bits).view(np.float32)
        found = maxima.integer_maxima(registers(values), pages)
        best = of_all_rows(maxima.row_maxima(found, pages, 1.0), pages)
        np.testing.assert_array_equal(best, page_maxima(values, pages))


@by_pages
@pytest.mark.parametrize(("begin", "end"), [(0, 64), (12, 52)])
@pytest.mark.parametrize(("first", "last"), [(0, 8), (3, 8), (2, 5)])
def test_staged_steps_fill_their_columns_of_the_plane(pages, begin, end, first, last):
    """And nothing else, like steps that are stored one by one."""
    rng = np.random.default_rng(4)
    columns, column, row = 48, 8, 128
    kept = Plane(pages, columns, 1.0, "candidates", staged=8 * pages.count)
    rows, staged = (
        Rows(row, begin, end),
        np.zeros(_ROWS * plane.stage_pitch(kept.staged), np.float32),
    )
    scores = np.full((3 * _ROWS + row, columns), _UNTOUCHED, np.float32)
    apart, want = scores.copy(), scores.copy()
    for step in range(first, last):
        values = products(rng)
        best = maxima.row_maxima(maxima.lane_maxima(registers(values), None, pages), pages, 1.0)
        at = column + step * pages.count
        plane.stage_maxima(best, staged, step * pages.count, kept)
        plane.store_maxima(best, apart.reshape(-1), rows, at, None, kept)
        want[row + begin : row + end, at : at + pages.count] = page_maxima(values, pages)[begin:end]
    bounds = first * pages.count, last * pages.count
    plane.write_stage(staged, scores.reshape(-1), rows, column, *bounds, kept)
    np.testing.assert_array_equal(scores.view(np.int32), want.view(np.int32))
    np.testing.assert_array_equal(apart.view(np.int32), want.view(np.int32))
