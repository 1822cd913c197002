"""The decode kernel's logic (plain Pallas, in the interpreter, with race detection)."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import inputs
import jax
import jax.numpy as jnp
import lane_simulator
import numpy as np
import oracle
import pytest
import race_free
from lane_simulator import Lane

from msa_icp_jax.ops._mosaic.launch import Target, ctas_per_sm
from msa_icp_jax.ops.decode_score import interpret, mma, work_balance
from msa_icp_jax.ops.decode_score import kernel as decode_kernel
from msa_icp_jax.ops.decode_score.work_balance import Batch, Grid
from msa_icp_jax.ops.select.long_rows import SHARED_WORDS, WARPS

_UNTOUCHED = 7.5
_EXACT = 2**-17
_PAGES = 40


@dataclasses.dataclass(frozen=True)
class Case:
    """A decode batch, small enough for the interpreter."""

    lengths: tuple[int, ...]
    world_size: int
    page_size: int
    query_len: int
    rank: int
    columns: int
    width: int
    ctas: int
    pitch: int | None = None  # rows of a compound page
    row_offset: int = 0
    index_dtype: str = "float8_e4m3fn"

    @property
    def shard(self) -> oracle.Shard:
        return oracle.Shard(self.rank, self.world_size, self.page_size, self.row_offset)

    def keys(self, rng: np.random.Generator) -> np.ndarray:
        keys = inputs.integer_keys(rng, _PAGES, self.shard.rows, self.index_dtype)
        return keys if self.pitch is None else self.compound(keys)

    def compound(self, keys: np.ndarray) -> np.ndarray:
        return oracle.compound_cache(keys, self.pitch, self.row_offset)

    def arrays(self, seed: int = 0) -> tuple[np.ndarray, ...]:
        """Queries, keys, table and score buffer; pages repeat, a fifth of the ids are bad."""
        rng = np.random.default_rng(seed)
        tokens = len(self.lengths) * self.query_len
        queries = inputs.integer_queries(rng, tokens, self.index_dtype)
        table = inputs.block_table(
            rng, self.lengths, self.page_size, self.width, _PAGES, bad_share=0.2
        )
        before = np.full((tokens + 3, 4, self.columns), _UNTOUCHED, np.float32)
        return queries, self.keys(rng), table, before

    def plane(self, queries: np.ndarray, keys: np.ndarray, table: np.ndarray) -> oracle.ScorePlane:
        return oracle.decode_plane(
            queries, keys, table, self.lengths, self.columns, self.shard, self.query_len
        )

    def run(
        self, queries: np.ndarray, keys: np.ndarray, table: np.ndarray, before: np.ndarray
    ) -> np.ndarray:
        kernel = functools.partial(
            decode_kernel.decode_scores,
            launch=race_free.interpreter(self.ctas),
        )

        def call(rank: jax.Array, queries: jax.Array, keys: jax.Array, *others: Any) -> jax.Array:
            return kernel(queries, inputs.with_keys(self.shard, keys, rank), *others)

        lengths = jnp.asarray(self.lengths, jnp.int32)
        arrays = (
            inputs.index_array(queries),
            inputs.index_array(keys),
            jnp.asarray(table),
            lengths,
        )
        return race_free.run(call, jnp.int32(self.rank), *arrays, jnp.asarray(before))


RAGGED = Case((700, 0, 130, 2000, -7, 1), 4, 128, 1, rank=1, columns=24, width=20, ctas=3)

CASES = {
    "ragged, empty and negative lengths": RAGGED,
    "one CTA for all requests": dataclasses.replace(RAGGED, ctas=1),
    "more CTAs than steps": dataclasses.replace(RAGGED, ctas=16),
    "no request has a key": Case((0, -5), 4, 128, 2, rank=0, columns=8, width=4, ctas=2),
    "late CTAs": Case((5000, 7000), 2, 128, 1, rank=0, columns=72, width=60, ctas=2),
    "several segments": Case((17000, 300), 4, 128, 1, rank=3, columns=136, width=133, ctas=1),
    "query tokens before position 0": Case((2, 5, 700), 4, 128, 8, 2, 8, 6, ctas=2),
    "table narrower than the pages": Case((1500, 1500), 4, 128, 4, 0, 12, 7, ctas=2),
    "columns fewer than the pages": Case((1500, 1500), 2, 128, 3, 1, 8, 12, ctas=2),
    "compound pages": Case((700, 130), 2, 256, 2, 1, 4, 3, ctas=2, pitch=144, row_offset=8),
    "half blocks": Case((700, 1027), 4, 256, 5, rank=3, columns=8, width=5, ctas=2),
}
CASES |= {
    f"bfloat16, {name}": dataclasses.replace(CASES[name], index_dtype="bfloat16")
    for name in ("query tokens before position 0", "compound pages")
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_integers_are_bit_exact(case):
    queries, keys, table, before = case.arrays()
    actual = case.run(queries, keys, table, before)
    oracle.check_scores(actual, before, case.plane(queries, keys, table), eps=0.0)


@pytest.mark.parametrize("make", [inputs.two_scale_bytes, inputs.normal_bfloat16])
def test_sums_are_float32(make):
    rng = np.random.default_rng(3)
    _, _, table, before = RAGGED.arrays()
    queries = make(rng, (len(RAGGED.lengths), 4, 128))
    keys = make(rng, (_PAGES, 32, 128))
    actual = RAGGED.run(queries, keys, table, before)
    oracle.check_scores(actual, before, RAGGED.plane(queries, keys, table), _EXACT)


def test_unwritten_rows_do_not_matter():
    """Bytes past the end of a request, and pages of nobody, may be anything."""
    case = Case((300, 129), 4, 128, 2, rank=0, columns=4, width=3, ctas=2)
    queries, keys, _, before = case.arrays()
    table = np.array([[4, 9, 11], [7, 2, -1]], np.int32)
    plane = case.plane(queries, keys, table)
    keys = keys.copy()
    keys[11, 300 - 256 :] = 0x7F
    keys[2, 1:] = 0xFF
    keys[[0, 1, 3, 5]] = 0x7E
    oracle.check_scores(case.run(queries, keys, table, before), before, plane, eps=0.0)


@pytest.mark.parametrize("late", [0, 5])
@pytest.mark.parametrize("total", [0, 1, 7, 8, 9, 69, 70, 524288])
def test_parts_cover_everything_once(total, late):
    grid = Grid(resident=7, late=late)
    assert grid.late_from == 70
    parts = [_part(total, cta, grid) for cta in range(grid.ctas)]
    at = 0
    for start, steps in parts:
        assert steps >= 0
        if steps:
            assert start == at
            at += steps
    assert at == total
    sizes = [steps for _, steps in parts[: grid.resident]]
    assert max(sizes) - min(sizes) <= 1


def _part(total: int, cta: int, grid: Grid) -> tuple[int, int]:
    start, steps = interpret.part_of(jnp.int32(total), jnp.int32(cta), grid)
    return int(start), int(steps)


@pytest.mark.parametrize("page_size", [128, 256])
def test_pages_of_any_length(page_size):
    batch = Batch(requests=1, page_size=page_size, columns=8192)
    lengths = np.array([-(2**31), -1, 0, 1, page_size, page_size + 1, 2**31 - 1], np.int32)
    want = np.clip(-(-lengths.astype(np.int64) // page_size), 0, 8192)
    np.testing.assert_array_equal(batch.pages(jnp.asarray(lengths)), want)


def test_grid_fills_the_gpu():
    """Exactly the CTAs that fit: one more and some SMs would get two, others none."""
    assert _grid(requests=64, columns=1024) == Grid(660, 660)
    assert _grid(requests=1, columns=4096) == Grid(660, 0)
    assert _grid(requests=2, columns=8) == Grid(4, 0)
    assert ctas_per_sm(300_000) == 1


def test_select_starts_with_the_scorer_only_where_it_fits():
    assert _select_fits(requests=128, columns=128)
    assert _select_fits(requests=32, columns=128, tokens=4)
    assert not _select_fits(requests=128, columns=264)  # rows that take more registers
    assert not _select_fits(requests=32, columns=128)  # few tokens
    assert not _select_fits(requests=133, columns=128)  # more than one on an SM
    assert not _select_fits(requests=132, columns=256)  # late CTAs
    assert not _select_fits(requests=128, columns=128, rows=64)  # no shared memory left
    assert not _select_fits(requests=64, columns=128, tokens=2)  # likewise


def _select_fits(requests: int, columns: int, rows: int = 32, tokens: int = 1) -> bool:
    batch, scratch = _sizes(requests, columns, rows, tokens)
    grid, target = _grid(requests, columns, rows, tokens), Target(sms=132)
    used = decode_kernel._shared_bytes(scratch)
    found = decode_kernel._select_fits(batch, grid, used, requests * tokens, target)
    kept = 1 << 10  # by the system, of each CTA
    taken = ctas_per_sm(used) * (used + kept)
    assert not found or taken + 4 * WARPS * SHARED_WORDS + kept <= 228 << 10
    return found


def _grid(requests: int, columns: int, rows: int = 32, tokens: int = 1) -> Grid:
    batch, scratch = _sizes(requests, columns, rows, tokens)
    return decode_kernel._grid(batch, decode_kernel._shared_bytes(scratch), Target(sms=132))


def _sizes(requests: int, columns: int, rows: int, tokens: int) -> tuple[Batch, dict[str, Any]]:
    batch = Batch(requests, page_size=128, columns=columns)
    ring = mma.PageRing(batch, 1024, 1000, rows, 0, rows, np.dtype(jnp.float8_e4m3fn), stages=2)
    scratch = mma.Scorer(ring, tokens, world_size=4).scratch()
    return batch, {**ring.scratch(), **scratch, **batch.scratch()}


def test_work_begins_in_a_request_of_the_batch(monkeypatch):
    """The machine finds the work that the plain way finds; a CTA without any stays in the batch."""
    lanes = SimpleNamespace(
        minimum=lane_simulator._minimum,
        maximum=lane_simulator._maximum,
        popcount=lambda x: Lane(np.bitwise_count(x.value.view(np.uint32)).astype(np.int32)),
        warp_ballot=lane_simulator.ballot,
        warp_from=_from_lane,
        warp_prefix_sums=lambda xs, _: [Lane(np.tile(np.cumsum(x.value[:32]), 4)) for x in xs],
    )
    monkeypatch.setattr(work_balance, "lanes", lanes)
    monkeypatch.setattr(work_balance, "where", lane_simulator._where)
    monkeypatch.setattr(work_balance, "int32", lambda x: Lane(np.int32(x)))
    monkeypatch.setattr(work_balance, "divide", lambda a, b: a._with(b, np.floor_divide))
    rng = np.random.default_rng(3)
    lane = Lane(np.tile(np.arange(32, dtype=np.int32), 4))
    for requests in (1, 33, 100):
        batch = Batch(requests, 128, 64)
        interpreted = interpret.InterpretedBatch(requests, 128, 64)
        for grid in (Grid(7, 0), Grid(3, 3)):
            lengths = rng.integers(-500, 9000, requests).astype(np.int32)
            lengths[rng.random(requests) < 0.4] = 0
            padded = np.zeros(-(-requests // 32) * 32, np.int32)
            padded[:requests] = lengths
            values = [Lane(np.tile(x, 4)) for x in padded.reshape(-1, 32)]
            for cta in range(grid.ctas):
                found = work_balance.work_in_lanes(values, Lane(np.int32(cta)), lane, batch, grid)
                request, length, first, steps = (int(x.value[0]) for x in found)
                monkeypatch.setattr(interpret.lax, "axis_index", lambda _, cta=cta: cta)
                want = interpreted.find_work([jnp.asarray(lengths)], grid)
                assert 0 <= request < requests and length == lengths[request]
                assert steps == int(want.steps)
                if steps:
                    assert (request, first) == (int(want.request), int(want.first))


def test_scores_far_in_a_plane_are_addressed_in_64_bits(monkeypatch):
    stored = []

    class Place(lane_simulator.Words):
        load_vector = lambda self, of, count: (Lane(np.float32(0)),) * count  # noqa: E731
        store_vector = lambda self, values: stored.append(self.at)  # noqa: E731

    lane_simulator.simulate(monkeypatch, mma)
    monkeypatch.setattr(mma, "Words", SimpleNamespace(of=lambda _: Place(np.empty(0))))
    mma.lanes.thread = lambda: Lane(np.arange(128, dtype=np.int32))
    mma.lanes.scalar = lambda x: Lane(np.int32(x))
    inline = lambda **_: lambda piece: functools.partial(piece, None)  # noqa: E731
    monkeypatch.setattr(mma.plgpu, "inline_mgpu", inline)
    scorer = SimpleNamespace(
        ring=SimpleNamespace(batch=Batch(70_000, 128, 8192)), query_rows=8, tokens=2
    )
    mma._write_scores(None, None, 69_999, 128, 32, scorer)
    warp, lane = np.divmod(np.arange(128), 32)
    for token, at in enumerate(stored):
        row = 69_999 * 8 + token * 4 + warp
        np.testing.assert_array_equal(at, row * 8192 + 128 + 4 * lane)
    assert len(stored) == 2


def _from_lane(x: Lane, lane: Lane | int) -> Lane:
    at = lane.value[:32] if isinstance(lane, Lane) else np.full(32, lane)
    return Lane(np.tile(x.value[:32][at], 4))
