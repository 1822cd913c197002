"""Same inputs, same bits: over repeats, neighbours, batch sizes, processes and ranks' timing.

The data rounds in float32 (unlike the small integers elsewhere), so that another order of addition
would show.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import chains
import inputs
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from chains import Cache, Decode, Prefill, Ranks, make_mesh, make_plan

Array = npt.NDArray[Any]

GROUP = pytest.mark.parametrize(("world_size", "page_size"), [(2, 256), (4, 128)])
QUERY_LEN = 2


@functools.cache
def ranks_of(world_size: int, page_size: int) -> Ranks:
    return Ranks(make_plan(world_size, page_size, max_model_len=4096), None)


def rounded(case: Any) -> Any:
    """The case with normal keys and queries in place of integers."""
    rng = np.random.default_rng(11)

    def normal(shape: tuple[int, ...]) -> Array:
        return rng.standard_normal(shape).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)

    cache = Cache(normal(case.cache.keys.shape), case.cache.table)
    return dataclasses.replace(case, query=normal(case.query.shape), cache=cache)


def decode_case(page_size: int) -> Decode:
    return rounded(chains.random_decode([2500, 2300, 2200, 700], QUERY_LEN, page_size))


def requests(case: Decode, picked: list[int]) -> tuple[Decode, Array]:
    """A step of some of the case's requests, in this order, and their tokens' rows in the case."""
    tokens = (np.array(picked)[:, None] * QUERY_LEN + np.arange(QUERY_LEN)).ravel()
    part = Decode(
        case.query[tokens],
        Cache(case.cache.keys, case.cache.table[picked]),
        case.seq_lens[picked],
        QUERY_LEN,
        case.counts[tokens],
    )
    return part, tokens


# ---- repeats ----


def test_forty_equal_scores_give_the_lowest_ids_on_every_rank_every_time() -> None:
    case = chains.random_decode([40 * 128], 1, 128)
    equal = dataclasses.replace(case, query=np.zeros_like(case.query))
    ranks = Ranks(make_plan(4, 128, init_blocks=0, local_blocks=0), None)
    for _ in range(20):
        output = ranks.decode(equal).output[0]
        assert (output == np.arange(16)).all()


@GROUP
def test_repeats_give_the_same_bits(world_size: int, page_size: int) -> None:
    ranks, case = ranks_of(world_size, page_size), decode_case(page_size)
    first = ranks.decode(case)
    for _ in range(10):
        again = ranks.decode(case)
        np.testing.assert_array_equal(again.output, first.output)
        np.testing.assert_array_equal(again.scores, first.scores)


# ---- neighbours ----


@pytest.mark.parametrize(
    ("world_size", "page_size", "batches"),
    [(2, 256, [[3, 2, 1]]), (4, 128, [[0], [3], [0, 1], [1] * 8])],
    ids=["2-256", "4-128"],
)
def test_a_request_does_not_depend_on_its_batch(
    world_size: int, page_size: int, batches: list[list[int]]
) -> None:
    """Alone, among fewer, in another order, eight times: another batch size is another program."""
    ranks, case = ranks_of(world_size, page_size), decode_case(page_size)
    whole = ranks.decode(case)
    for picked in batches:
        part, tokens = requests(case, picked)
        found = ranks.decode(part)
        np.testing.assert_array_equal(found.output[: len(tokens)], whole.output[tokens])
        np.testing.assert_array_equal(found.scores[:, : len(tokens)], whole.scores[:, tokens])


def test_a_segment_does_not_depend_on_its_window() -> None:
    ranks = ranks_of(4, 128)
    segments = [(40, 2500, 2540), (40, 3000, 3040), (40, 0, 40)]
    case = rounded(chains.random_prefill(segments, 120, 128, pages=80))
    whole = ranks.prefill(case, fused=False)
    starts = np.cumsum([0, *case.qo_lens])
    for b, (first, last) in enumerate(itertools.pairwise(starts)):
        rows, one = slice(first, last), slice(b, b + 1)
        alone = Prefill(
            case.query[rows],
            Cache(case.cache.keys, case.cache.table[one]),
            case.qo_lens[one],
            case.kv_lens[one],
            case.qo_offset[one],
            case.counts[rows],
        )
        found = ranks.prefill(alone, fused=False)
        tokens = last - first
        np.testing.assert_array_equal(found.output[:tokens], whole.output[rows])
        np.testing.assert_array_equal(found.carrier[:, :, :tokens], whole.carrier[:, :, rows])


# ---- processes, threads and devices ----


def digest(on_mesh: bool) -> str:
    """Of everything that one step and one window leave."""
    mesh = make_mesh(4) if on_mesh else None
    ranks = Ranks(ranks_of(4, 128).plan, mesh)
    decoded = ranks.decode(decode_case(128), fused=False)
    window = chains.random_prefill([(60, 2500, 2560), (20, 0, 20)], 80, 128, pages=80)
    prefilled = ranks.prefill(rounded(window), fused=False)
    parts = [decoded.output, decoded.scores, *prefilled]
    return hashlib.sha256(b"".join(np.ascontiguousarray(x).tobytes() for x in parts)).hexdigest()


def test_processes_threads_and_devices_do_not_matter() -> None:
    """Four devices or one, with one thread or many, in a process with another hash seed."""
    here = digest(on_mesh=True)
    tests = Path(__file__).parent
    flags = "--xla_force_host_platform_device_count=4 --xla_cpu_multi_thread_eigen=false"
    there = subprocess.run(
        [sys.executable, "-c", "import test_determinism as t; print(t.digest(False))"],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)]),
            "PYTHONHASHSEED": "7",
            "XLA_FLAGS": flags,
        },
        capture_output=True,
        text=True,
        timeout=inputs.TIME_LIMIT,
        check=False,
    )
    assert there.returncode == 0, there.stderr
    assert here == there.stdout.strip()
