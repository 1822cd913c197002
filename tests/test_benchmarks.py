"""The benchmarks: floors, inputs, checks that can fail, result files, and a quick run."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import importlib
import itertools
import json
import re
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import numpy as np
import oracle
import pytest
from inputs import TIME_LIMIT

from benchmarks import __main__ as command_line
from benchmarks import baselines, check, record, report, results, timing
from benchmarks import run as bench
from benchmarks.__main__ import main
from benchmarks.baselines import PEERS, Baseline
from benchmarks.cases import (
    ADVERSARIAL,
    ALONE,
    BF16,
    DECODE,
    FULL,
    HOST,
    PREFILL,
    QUICK,
    Ceilings,
    Decode,
    Prefill,
    Sharded,
)
from benchmarks.stages import Inputs, Pool, Stage, build, written_like
from benchmarks.timing import JitRun, Times
from msa_icp_jax.ops._mosaic import aot

ROOT = Path(__file__).parents[1]
CARD = Ceilings(4.40, 1377.0)  # of the machine that the figures below are from

# Microseconds at these ceilings, and the target of the local stage's time over them.
FLOORS = {
    "d-b1-1m-w4": (7.6, 1.72),
    "d-b8-128k-w4": (7.6, 1.66),
    "d-b32-32k-w2": (15.3, 1.35),
    "d-b32-128k-w4": (30.5, 1.16),
    "d-b64-64k-w2": (61.0, 1.10),
    "d-b128-16k-w4": (15.3, 1.30),
    "d-b32-128k-w4-q4": (30.5, 1.24),
    "d-b64-ragged-w4": (22.0, 1.29),
    "p-8k-w4": (6.2, 3.0),
    "p-8k-w2": (12.5, 2.2),
    "p-32k-w4": (43.7, 1.40),
    "p-32k-w2": (87.3, 1.28),
    "p-128k-w4": (193.4, 1.25),
    "p-128k-w2": (386.8, 1.15),
    "p-t2048-128k-w4": (49.5, 1.30),
    "p-t2048-128k-w2": (99.0, 1.20),
    "p-ragged-w4": (145.1, 1.35),
}


def case_named(name):
    return next(case for case in (*FULL, *QUICK) if case.name == name)


@functools.cache
def quick_pool():
    """Rows for two sets of any quick case."""
    return Pool(QUICK, 0)


# ---- cases ----


@pytest.mark.parametrize("name", FLOORS)
def test_floors_and_targets_are_the_published_ones(name):
    case = case_named(name)
    floor, target = FLOORS[name]
    assert case.floor("local").us(CARD) == pytest.approx(floor, rel=1.1e-2)
    assert case.target == target


def test_every_sharded_case_has_a_published_floor():
    assert {case.name for case in (*DECODE, *PREFILL)} == set(FLOORS)
    for case in ADVERSARIAL:  # as much work as the case of normal data
        assert case.floor("local") == case_named("p-32k-w4").floor("local")


def test_select_and_merge_cases():
    targets = {case.name: case.target_us for case in ALONE}
    assert targets["select-t32-k1024"] == 3.8
    assert targets["select-t256-k8192"] == 20.0
    assert targets["select-t8192-k1024"] == 50.0
    assert targets["merge-t32-w4"] == 1.8
    only_reads = Ceilings(4.40, None)
    assert case_named("select-t8192-k1024").floor("select").us(only_reads) == pytest.approx(
        (8192 * 4 * 1024 * 4 + 8192 * 4 * 33 * 4) / 4.40e6
    )


def test_score_floor_counts_the_plane_it_writes():
    case = case_named("d-b32-128k-w4")
    plane = 32 * 4 * 1024 * 4
    assert case.floor("score").bytes - case.floor("local").bytes == plane
    assert case.floor("local").bytes == 32 * 1024 * 32 * 128 + 32 * 512


@pytest.mark.parametrize("name", ["d-b64-ragged-w4", "quick-decode", "quick-prefill"])
def test_visible_keys_are_counted(name):
    case = case_named(name)
    rows = case.rows_per_page
    for request, position in case.positions[:: max(1, len(case.positions) // 20)]:
        keys = np.arange(min(position + 1, case.lens[request]))
        assert case.visible(position, case.lens[request]) == np.sum(keys % 128 // rows == 1)


# ---- inputs ----


def test_sets_share_no_page_and_stream_through_the_cache():
    case = case_named("quick-decode")
    sets = 5
    pool = Pool([case], sets * case.floor("local").bytes)
    inputs = pool.inputs(case, "xla")
    assert len(inputs.sets) == sets
    used = np.concatenate([np.asarray(x["table"]).ravel() for x in inputs.sets])
    used = used[used >= 0]
    assert len(np.unique(used)) == len(used) == sets * sum(case.request_pages)
    keys = np.asarray(inputs.fixed["keys"])
    assert used.max() < len(keys)
    values = keys.astype(np.float32)
    assert abs(values.mean()) < 0.01 and values.std() == pytest.approx(1, abs=0.02)
    assert not np.array_equal(inputs.sets[0]["queries"], inputs.sets[1]["queries"])


@pytest.mark.parametrize("data", ["ascending", "ties"])
def test_adversarial_scores_are_as_hard_as_they_say(data):
    case = dataclasses.replace(case_named("quick-ascending"), data=data)
    inputs = quick_pool().inputs(case, "xla")
    for one_set in inputs.sets:
        keys = np.asarray(inputs.fixed["keys"])[one_set["table"]].astype(np.float64)
        scores = np.einsum("thd,bprd->thpr", np.asarray(one_set["queries"], np.float64), keys)
        steps = np.diff(scores.max(-1), axis=-1)
        assert (steps > 0).all() if data == "ascending" else not steps.any()
        assert not np.diff(scores, axis=-1).any()  # all rows of a page alike


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_inputs_are_told_without_being_made(case):
    inputs = quick_pool().inputs(case, "mosaic")
    told = quick_pool().structs(case, "mosaic")
    assert len(told.sets) == 1
    told, made = told.fixed | told.sets[0], jax.eval_shape(lambda: inputs.fixed | inputs.sets[0])
    assert told.keys() == made.keys()
    assert all(repr(told[name]) == repr(made[name]) for name in told)


def test_two_sets_at_least():
    case = case_named("d-b64-64k-w2")
    pool = Pool([QUICK[0]], 1)
    assert pool.sets_of(case) == 2


# ---- checks ----


@pytest.fixture(scope="module")
def decoded():
    """A decode case with a chain's results."""
    case = case_named("quick-decode")
    inputs = quick_pool().inputs(case, "xla")
    stage = build(case, "chain", "xla", "exact")
    chain = JitRun(stage, inputs, written_like(case), 1)
    arrays = chain.last_set | chain.run()
    host = {name: np.array(x) for name, x in arrays.items() if name != "keys"}
    return case, host | {"keys": arrays["keys"]}


def changed(x, index, value):
    x = x.copy()
    x[index] = value
    return x


def test_checks_pass_on_right_results(decoded):
    case, a = decoded
    check.check_scores(case, a, "exact")
    check.check_rows(case.tokens, a["scores"], a["counts"], a["rows"])
    check.check_merged(case.tokens, a["received"], a["counts"], a["output"], a["errors"])


def test_a_wrong_score_is_found(decoded):
    case, a = decoded
    off = a["scores"].copy()
    off[0] += 1e-2
    with pytest.raises(check.Mismatch, match="token 0"):
        check.check_scores(case, a | {"scores": off}, "exact")
    with pytest.raises(check.Mismatch):
        check.check_scores(case, a | {"scores": np.full_like(off, np.nan)}, "fast")


def test_a_wrong_row_is_found(decoded):
    case, a = decoded
    rows = changed(a["rows"], (0, 0, 0, 3), 1234)
    with pytest.raises(check.Mismatch, match="token 0, head 0"):
        check.check_rows(case.tokens, a["scores"], a["counts"], rows)


def test_a_wrong_merge_is_found(decoded):
    case, a = decoded
    received, counts = a["received"], a["counts"]
    output = changed(a["output"], (0, 0, 0), -1)
    with pytest.raises(check.Mismatch, match="token 0, head 0"):
        check.check_merged(case.tokens, received, counts, output, a["errors"])
    with pytest.raises(check.Mismatch, match="2 faults"):
        check.check_merged(case.tokens, received, counts, a["output"], np.array([2]))


def test_chosen_ids_are_compared(decoded):
    case, a = decoded
    scores, counts = a["scores"], a["counts"]
    best = oracle.top_ids(scores, counts, 0, 1)
    compare = functools.partial(check.check_chosen, case, a, scores)
    compare(best[..., ::-1], exact=True)  # in any order
    for exact in (True, False):
        with pytest.raises(check.Mismatch, match="token 0, head 0"):
            compare(changed(best, (0, 0, 0), best[0, 0, 1]), exact=exact)  # twice
        with pytest.raises(check.Mismatch, match="token 0, head 0"):
            compare(changed(best, (0, 0, 0), -1), exact=exact)
        with pytest.raises(check.Mismatch, match="token 0, head 0"):
            compare(changed(best, (0, 0, 0), int(counts[0])), exact=exact)
    # The last token sees 24 blocks: swap the worst chosen for the best left out.
    token, head = case.tokens - 1, 0
    row, chosen = scores[token, head], best[token, head]
    out = np.setdiff1d(np.arange(counts[token]), chosen)
    best_out, worst = out[row[out].argmax()], chosen[row[chosen].argsort()][0]
    swapped = changed(best, (token, head), np.where(chosen == worst, best_out, chosen))
    with pytest.raises(check.Mismatch, match=f"token {token}"):
        compare(swapped, exact=True)
    near = changed(scores, (token, head, best_out), row[worst] - 1e-3)
    check.check_chosen(case, a, near, swapped, exact=False)
    without_forced = changed(best, (token, head, 15), best_out)
    with pytest.raises(check.Mismatch, match=f"token {token}"):
        check.check_chosen(case, a, np.zeros_like(scores), without_forced, exact=False)


# ---- timing ----


def test_a_program_leaves_what_its_last_link_writes():
    case = case_named("select-t8-k256")
    inputs = quick_pool().inputs(case, "xla")
    stage = build(case, "select", "xla", "exact")
    program = JitRun(stage, inputs, written_like(case), 5)
    once = jax.jit(lambda arrays: stage.run(arrays)["rows"])
    np.testing.assert_array_equal(program.run()["rows"], once(program.last_set))
    times = program.times(3)
    assert len(times.us) == 3 and times.spread[0] <= times.median <= times.spread[1]


def test_programs_are_compiled_ahead_without_their_arrays():
    case = case_named("quick-decode")
    machine = types.SimpleNamespace(gpu=True, baselines={})
    item = bench.Item(case, "local", "xla", "exact")
    runner = bench.Runner(machine, [item, bench.Item(case, "local", "mosaic", "exact")], Path("no"))
    runner.pool, runner.ceilings = quick_pool(), Ceilings(1e-3, None)
    runner._prepare()
    assert list(runner.ready) == [item.label] and runner._links(item) > 2
    stage = build(case, "local", "xla", "exact")
    arguments = (stage, runner.inputs_of(item), written_like(case), runner._links(item))
    compiled = runner.ready[item.label]
    assert compiled is not None
    found, wanted = (JitRun(*arguments, ready).run() for ready in (compiled, None))
    np.testing.assert_array_equal(found["rows"], wanted["rows"])


def test_no_link_is_dropped():
    """Results of all links but the last are overwritten; they are computed all the same."""
    calls = []

    def double(x):
        calls.append(0)
        return 2 * np.asarray(x)

    def call(x):
        return jax.pure_callback(double, jax.ShapeDtypeStruct((3,), np.int32), x)

    stage = Stage(lambda arrays: {"y": call(arrays["lens"])})
    inputs = Inputs({}, [{"lens": np.arange(3, dtype=np.int32) + i} for i in range(4)])
    program = JitRun(stage, inputs, {}, 40)
    assert program.links == 40 and not calls
    assert program.run()["y"].tolist() == [6, 8, 10]
    assert len(calls) == program.links


@pytest.mark.parametrize(("name", "stage"), [("quick-decode", "chain"), ("quick-prefill", "local")])
def test_programs_of_kernels_lower(name, stage):
    case = case_named(name)
    made = build(case, stage, "mosaic", "exact")
    structs = structs_of(case)
    shapes = jax.eval_shape(made.run, structs)
    fixed = {name: x for name, x in structs.items() if name not in shapes}
    program = timing.program(made, 2).trace(fixed, {}, shapes)
    lowered = program.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu_v2" in lowered and "stablehlo.while" in lowered


def test_times():
    times = Times((3.0, 1.0, 2.0), "jit")
    assert (times.median, times.spread) == (2.0, (1.0, 3.0))


# ---- kernels launched without JAX ----


def structs_of(case):
    fixed, (one_set,) = quick_pool().structs(case, "mosaic")
    return written_like(case) | fixed | one_set


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_kernels_are_all_that_a_stage_launches(case):
    precision = "fast" if isinstance(case, Prefill) else "exact"
    structs = structs_of(case)
    for name in case.stages:
        stage = build(case, name, "mosaic", precision)
        (names, lowered), *prelude = timing.kernels_of(stage, structs)
        assert set(names) <= set(written_like(case)) and len(lowered.returned) == len(names)
        kernels = [step for step in lowered.steps if isinstance(step, aot.Kernel)]
        assert all(kernel.module for kernel in kernels)
        assert len(kernels) == {"local": 2, "fused-local": 2, "chain": 3}.get(name, 1)
        scored = isinstance(case, Sharded) and name in ("select", "fused-local")
        assert [names for names, _ in prelude] == [["scores"]] * scored


def test_a_score_plane_is_written_in_place():
    case = case_named("quick-decode")
    structs = structs_of(case)
    ((_, lowered),) = timing.kernels_of(build(case, "score", "mosaic", "exact"), structs)
    (kernel,) = lowered.steps
    scores = aot.Argument(sorted(structs).index("scores"))
    assert kernel.buffers[-2:] == (scores, scores)
    assert lowered.returned == (scores,)
    rank = [x.value for x in kernel.buffers if isinstance(x, aot.Constant)]
    assert [x.tolist() for x in rank] == [[1]]


def test_work_outside_the_kernels_is_refused():
    case = case_named("quick-decode")
    stage = build(case, "score", "mosaic", "exact")
    shifted = Stage(lambda arrays: stage.run(arrays | {"lens": arrays["lens"] + 1}))
    with pytest.raises(aot.Unlaunchable, match=r"add .* is no kernel"):
        timing.kernels_of(shifted, structs_of(case))


def test_kernels_are_lowered_in_other_processes(monkeypatch):
    compiled = []
    monkeypatch.setattr(timing, "_compile", compiled.append)
    case, other = case_named("quick-decode"), case_named("select-t8-k256")
    tasks = [(case, stage, "exact", structs_of(case)) for stage in ("select", "chain")]
    tasks += [(other, "select", "exact", {}), (other, "select", "exact", structs_of(other))]
    found = timing.compile_kernels(tasks, 132)
    assert found.pop(2) is None  # what fails is left to the run
    assert sorted(map(id, compiled)) == sorted(map(id, found))
    written = [[names for names, _ in kernels] for kernels in found]
    chain = ["scores", "rows", "output", "errors"]
    assert written == [[["rows"], ["scores"]], [chain], [["rows"]]]


# ---- results ----

FIELDS = (
    *("case", "stage", "backend", "precision", "median_us", "floor_us", "spread_us", "checked"),
    *("device", "driver", "jax", "torch", "commit", "date", "read_tbps", "fp8_tflops", "timing"),
)


def row(case="a", stage="local", backend="mosaic", precision="exact", median=2.0, spread=0.1):
    return {
        "case": case,
        "stage": stage,
        "backend": backend,
        "precision": precision,
        "median_us": median,
        "spread_us": [median - spread, median + spread],
    }


def by_key(*rows):
    return {results.key_of(row): row for row in rows}


def test_a_new_run_replaces_its_own_rows_and_leaves_the_others(tmp_path):
    path = tmp_path / "new" / "r.json"
    chained = [row("b", "jax-chain") | {"transport": name} for name in ("none", "collective")]
    results.save(path, [row("a"), row("b"), row("b", backend="xla"), *chained])
    again = row("b", "jax-chain", median=7.0) | {"transport": "collective"}
    results.save(path, [row("b", median=5.0), row("c"), again])
    kept = {key: r["median_us"] for key, r in results.load(path).items()}
    assert kept == {
        ("a", "local", "mosaic", "exact"): 2.0,
        ("b", "local", "mosaic", "exact"): 5.0,
        ("b", "local", "xla", "exact"): 2.0,
        ("b", "jax-chain", "mosaic", "exact", "none"): 2.0,
        ("b", "jax-chain", "mosaic", "exact", "collective"): 7.0,
        ("c", "local", "mosaic", "exact"): 2.0,
    }
    assert json.loads(path.read_text())["schema"] == 1
    assert list(tmp_path.rglob("*.part")) == []


def test_a_row_says_where_when_and_of_what_it_is(monkeypatch):
    asked = []
    monkeypatch.setattr(results, "_first_line", lambda *command: asked.append(command) or "said")
    setting = results.Setting("H200", "2.11", Ceilings(4.56789, None))
    key = ("a", "local", "mosaic", "exact")
    made = setting.row(key, Times((3.0, 1.0, 2.0004), "graph", {"host_us": 1.0}), 0.12345, batch=4)
    assert tuple(made) == (*FIELDS, "batch", "host_us") and results.key_of(made) == key
    assert (made["median_us"], made["spread_us"], made["floor_us"]) == (2.0, [1.0, 3.0], 0.1235)
    assert (made["timing"], made["batch"], made["read_tbps"]) == ("graph", 4, 4.5679)
    assert made["commit"] == made["driver"] == "said"
    assert {command[0] for command in asked} == {"nvidia-smi", "git"}
    named = dataclasses.replace(setting, commit="abc")
    assert named.row(key, Times((1.0,), "host"), None)["commit"] == "abc"


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*.json")))
def test_the_committed_results_are_well_formed_and_kept_as_they_are(path, tmp_path):
    found, copy = results.load(path), tmp_path / "copy.json"
    results.save(copy, found.values())
    assert results.load(copy) == found and found
    assert json.loads(copy.read_text())["rows"] == json.loads(path.read_text())["rows"]


def run_cli(*arguments):
    command = [sys.executable, "-m", "benchmarks", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIME_LIMIT)


def test_compare_tells_moves_from_noise(tmp_path, capsys):
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    run_of = {"device": "H200", "timing": "graph"}
    then = run_of | {"commit": "abcdef123", "read_tbps": 4.4, "fp8_tflops": 1300.0}
    now = run_of | {"commit": "fedcba321", "read_tbps": 4.6, "fp8_tflops": 1490.0}
    results.save(before, [row(name) | then for name in ("spread", "few", "slow", "fast", "gone")])
    medians = {"spread": 2.15, "few": 2.05, "slow": 2.3, "fast": 1.7, "new": 1.0}
    moved = [row(name, median=us, spread=0.01) | now for name, us in medians.items()]
    moved[0]["spread_us"] = [1.9, 2.3]
    results.save(after, moved)
    assert main(["compare", str(before), str(after)]) == 1
    said = capsys.readouterr().out
    assert "slower: slow local mosaic exact: 2.00 -> 2.30 us, 1.150" in said
    assert "faster: fast local mosaic exact: 2.00 -> 1.70 us, 0.850" in said
    assert "1 slower, 1 faster, 2 same" in said
    assert f"only in {before}: 1 figures: gone local mosaic exact" in said
    assert f"only in {after}: 1 figures: new local mosaic exact" in said
    assert "commit abcdef1; reads 4.40 TB/s, fp8 products 1,300 TFLOP/s" in said
    assert "commit fedcba3; reads 4.60 TB/s, fp8 products 1,490 TFLOP/s" in said
    # Beyond the spreads of two runs, but within what runs differ by anyhow.
    results.save(before, [row("a", median=100.0, spread=0.1)])
    results.save(after, [row("a", median=101.0, spread=0.1)])
    only_noise = [tmp_path / name for name in ("x.json", "y.json")]
    results.save(only_noise[0], [row("a", median=100.0, spread=0.1)])
    results.save(only_noise[1], [row("a", median=102.0, spread=0.1)])
    assert main(["compare", *map(str, only_noise)]) == 0
    assert "0 slower, 0 faster, 1 same" in capsys.readouterr().out


def test_only_what_is_alike_is_compared(tmp_path, capsys):
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    like = {"device": "H200", "timing": "graph"}
    results.save(before, [row(name) | like for name in "abcd"])
    others = [row("b", median=9.0) | like | {"timing": "jit"}]
    others += [row(name, median=9.0) | like | {"device": "H100"} for name in "cd"]
    results.save(after, [row("a") | like, *others])
    assert main(["compare", str(before), str(after)]) == 0  # the slower ones do not count
    said = capsys.readouterr().out
    assert "0 slower, 0 faster, 1 same" in said
    assert "not compared: b local mosaic exact: timing graph and jit" in said
    for name in "cd":
        assert f"not compared: {name} local mosaic exact: device H200 and H100" in said
    results.save(tmp_path / "jit.json", [row("a") | {"timing": "jit"}])
    for other in ("jit.json", "nothing.json"):
        results.save(tmp_path / other, [])
        assert main(["compare", str(before), str(tmp_path / other)]) == 2
        assert capsys.readouterr().err == "benchmarks: nothing to compare\n"


def test_merge_command(tmp_path):
    into, source = tmp_path / "into.json", tmp_path / "from.json"
    results.save(into, [row("a"), row("b")])
    results.save(source, [row("b", median=4.0)])
    assert main(["merge", str(into), str(source)]) == 0
    assert [r["median_us"] for r in results.load(into).values()] == [2.0, 4.0]


# ---- what is refused ----


def ill(**changes):
    """A result file with one row that is changed; a field of None is missing."""
    made = row("d-b1-1m-w4") | {"floor_us": 1.0} | changes
    made = {name: x for name, x in made.items() if x is not None}
    return json.dumps({"schema": 1, "rows": [made]})


ILL_FORMED = {
    "text": "hello",
    "schema": '{"schema": 2, "rows": []}',
    "list": "[1]",
    "norows": '{"schema": 1}',
    "rows": '{"schema": 1, "rows": [{"case": "a"}]}',
    "norow": '{"schema": 1, "rows": [1]}',
    "deep": '{"schema": 1, "rows": ' + "[" * 100_000,
    "deeprow": '{"schema": 1, "rows": [{"case": ' + '{"a":' * 50 + "1" + "}" * 52 + "]}",
    "words": ill(median_us="12"),
    "negative": ill(median_us=-1.0, spread_us=[-2.0, 1.0]),
    "zero": ill(median_us=0, spread_us=[0, 1]),
    "nan": ill(median_us=float("nan")),
    "huge": ill(median_us=10**400, spread_us=[1, 10**401]),
    "true": ill(median_us=True),
    "missing figure": ill(median_us=None),
    "missing spread": ill(spread_us=None),
    "one spread": ill(spread_us=[1.0]),
    "outside": ill(spread_us=[3.0, 4.0]),
    "floor in words": ill(floor_us="7"),
    "negative floor": ill(floor_us=-7.0),
    "ceiling": ill(read_tbps="fast"),
    "number for a name": ill(case=7),
    "date": ill(date=20260101),
    "nested": ill(extra=[[1]]),
    "half a sweep": ill(bytes=10),
    "sweep in words": ill(bytes=1, batch="1", context=4, world_size=2),
    "twice": json.dumps({"schema": 1, "rows": [row(), row()]}),
}


@pytest.fixture
def files(tmp_path):
    """Good and bad files by name."""
    for name, text in ILL_FORMED.items():
        (tmp_path / f"{name}.json").write_text(text)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    results.save(tmp_path / "good.json", [row("a", stage="exchange")])
    names = (*ILL_FORMED, "binary", "missing", "good")
    return {name: tmp_path / f"{name}.json" for name in names} | {"folder": tmp_path}


def refused(capsys, *arguments):
    """What a command says in the one line with which it refuses."""
    try:
        status = main([str(x) for x in arguments])
    except SystemExit as error:
        status = error.code
    complaint = capsys.readouterr().err
    assert status == 2 and "Traceback" not in complaint
    *usage, line = complaint.splitlines()
    assert line.startswith(("benchmarks: ", "python -m benchmarks"))
    assert not usage or usage[0].startswith("usage: ")
    return line


@pytest.mark.parametrize("name", [*ILL_FORMED, "binary", "missing", "folder"])
def test_what_is_no_result_file_is_refused(name, files, capsys):
    pytest.importorskip("matplotlib")
    bad, good, new = files[name], files["good"], files["folder"] / "new.json"
    before = sorted((x, x.read_bytes()) for x in files["folder"].iterdir())
    for command in (("compare", bad, good), ("compare", good, bad), ("plot", bad)):
        assert str(bad) in refused(capsys, *command)
    assert str(bad) in refused(capsys, "merge", new, bad)
    assert str(bad) in refused(capsys, "merge", good, bad)
    if name != "missing":
        assert str(bad) in refused(capsys, "merge", bad, good)
    assert sorted((x, x.read_bytes()) for x in files["folder"].iterdir()) == before


def test_an_ill_formed_row_is_not_written(tmp_path):
    path = tmp_path / "r.json"
    results.save(path, [row("a")])
    for bad in (row("b") | {"median_us": "1"}, row("b") | {"spread_us": [3, 4]}):
        with pytest.raises(results.Refused, match="ill-formed"):
            results.save(path, [row("c"), bad])
    assert list(results.load(path)) == [results.key_of(row("a"))]


def unwritable(files):
    """Places where no result file can be made."""
    return (files["text"] / "r.json", Path("/dev/null"), Path("/proc/r.json"),
            files["folder"] / f"{'x' * 255}.json")  # fmt: skip


def test_nothing_is_measured_that_could_not_be_saved(files, capsys, monkeypatch):
    from benchmarks import host

    monkeypatch.setattr(timing, "ceilings", lambda _: pytest.fail("it measures"))
    monkeypatch.setattr(record, "execute", lambda *_: pytest.fail("it measures"))
    places = (*unwritable(files), files["words"], files["deep"], files["folder"])
    before = sorted(files["folder"].iterdir())
    for path in places:
        for command in ((), ("sweep",), ("record",)):
            assert str(path)[:200] in refused(capsys, *command, "--out", path)
        assert host.main(["--out", str(path)]) == 2
        complaint = capsys.readouterr().err
        assert str(path)[:200] in complaint and complaint.count("\n") == 1
    (files["folder"] / "r-sweep.json").write_text("hello")
    said = refused(capsys, "record", "--out", files["folder"] / "r.json")
    assert str(files["folder"] / "r-sweep.json") in said
    after = [*before, files["folder"] / "r-sweep.json"]
    assert sorted(files["folder"].iterdir()) == sorted(after)


def test_a_plot_that_cannot_be_written_is_refused(files, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    said = refused(capsys, "plot", files["good"])
    assert "cases d-* and p-*" in said and "stages exchange" in said
    name = files["folder"] / f"{'x' * 248}.json"  # its plot's name is too long
    name.write_text(ill())
    assert "cannot be written" in refused(capsys, "plot", name)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--budget-seconds", "0"),
        ("--budget-seconds", "nan"),
        ("--budget-seconds", "soon"),
        ("--backends", "mosiac"),
        ("--stages", "scroe"),
        ("--cases", "no-such-*"),
    ],
)
def test_bad_arguments_are_refused(arguments, tmp_path, capsys):
    said = refused(capsys, *arguments, "--out", tmp_path / "r.json")
    assert arguments[-1] in said
    assert list(tmp_path.iterdir()) == []


def test_a_python_without_jax_is_told_what_to_do(capsys, monkeypatch):
    monkeypatch.setattr(command_line.importlib.util, "find_spec", lambda name: None)
    assert "make bench" in refused(capsys, "--help")


def test_names_of_the_command_line_are_those_there_are():
    assert set(command_line.BACKENDS) == {"mosaic", "xla", *baselines.NAMES}
    assert set(command_line.BACKENDS) == set(report.BACKENDS)
    stages = {stage for case in FULL for stage in case.stages} | set(bench.OWN_WAY)
    assert {*command_line.STAGES, "host"} == stages  # which has a program of its own


def test_globs_in_the_help_match_what_they_promise(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    named = {glob: {c.name for c in (*FULL, *QUICK) if fnmatch.fnmatch(c.name, glob)}
             for glob in re.findall(r"'(\S+\*)'", said)}  # fmt: skip
    of = {letter: {x.name for x in BF16 if x.name.startswith(letter)} for letter in "dp"}
    assert named["d-*"] == {case.name for case in DECODE} | of["d"]
    assert named["p-*"] == {case.name for case in (*PREFILL, *ADVERSARIAL)} | of["p"]
    for stage in ("select", "merge"):
        assert named[f"{stage}-*"] >= {case.name for case in ALONE if case.stage == stage}
    assert named["quick-*"] == {"quick-decode", "quick-prefill", "quick-ascending", "quick-bf16"}


@pytest.mark.parametrize("command", ["", "sweep", "record", "compare", "merge", "plot", "readme"])
def test_every_command_and_argument_is_explained(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert said.index("\n\n") < said.index("options:")
    for stage in command_line.STAGES if not command else ():
        assert re.search(rf"^  {stage} ", said, re.MULTILINE)
    for explained in ("target", "floor", "benchmarks.host", "benchmarks.exchange"):
        assert command or explained in said


def test_figures_go_where_git_ignores_them_unless_told():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout")

    def ignored(path):
        asked = subprocess.run(["git", "check-ignore", "-q", path], cwd=ROOT, timeout=TIME_LIMIT)
        return asked.returncode == 0

    machine = bench.Machine()
    for name in ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "cpu"):
        machine.device = name
        assert ignored(machine.default_out)
    assert not any(map(ignored, (report.RESULTS, report.SWEEP, report.PAIR)))


def test_a_gpu_without_torch_is_told_what_it_lacks(monkeypatch, capsys):
    device = types.SimpleNamespace(device_kind="NVIDIA H200", platform="gpu")
    monkeypatch.setattr(bench.jax, "devices", lambda: [device])
    no_gpu = types.SimpleNamespace(is_available=lambda: False)
    for torch, reason in (
        (None, "torch is not installed"),
        (types.SimpleNamespace(__version__="2", cuda=no_gpu), "torch sees no GPU"),
    ):
        monkeypatch.setattr(bench, "_torch", lambda torch=torch: torch)
        said = refused(capsys, "--out", "never.json")
        assert reason in said and "`make bench CUDA=13`" in said


@pytest.mark.parametrize(("cuda", "torch"), [("CUDA=13", True), ("CUDA=", False)])
def test_bench_installs_torch_for_a_gpu(cuda, torch):
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    done = subprocess.run(
        ["make", "-n", "bench", cuda], cwd=ROOT, capture_output=True, text=True, timeout=TIME_LIMIT
    )
    extras = re.search(r"setup_env.sh \S+ (\S+)", done.stdout).group(1).split(",")
    assert ("torch" in extras) == torch and "bench" in extras and ("cuda13" in extras) == torch


# ---- how times grow ----


def swept(size, us, backend="mosaic", world_size=4, **more):
    made = row(f"s{size}-{world_size}", backend=backend, median=us, spread=0.0)
    sizes = {"bytes": int(size), "world_size": world_size, "context": 4096, "batch": 1}
    return made | sizes | more


def test_the_model_is_recovered():
    rows = [swept(n, 5 + n / 4e6, world_size=w) for w in (2, 4) for n in (1e4, 1e6, 1e8)]
    assert [fit.group for fit in results.fits(rows)] == ["mosaic W 2", "mosaic W 4"]
    for fit in results.fits(rows):
        assert fit.fixed_us == pytest.approx(5, rel=1e-4)
        assert fit.rate_tbps == pytest.approx(4, rel=1e-4)
        assert fit.misfit.startswith("0 % ") and fit.us(4e6) == pytest.approx(6, rel=1e-3)


def test_misfits_count_relative_to_the_time():
    rows = [swept(n, 5 + n / 4e6) for n in (1e3, 1e4, 1e8, 2e8)] + [swept(5e7, 30.0)]
    (fit,) = results.fits(rows)
    assert fit.points == 5
    assert re.fullmatch(r"[23]\d % below what was measured at s50000000.0-4", fit.misfit)
    time, size = (np.array([r[n] for r in rows]) for n in ("median_us", "bytes"))

    def cost(fixed, rate):
        return np.square((fixed + size / rate / 1e6) / time - 1).sum()

    least = cost(fit.fixed_us, fit.rate_tbps)
    for fixed, rate in ((1.02, 1), (0.98, 1), (1, 1.02), (1, 0.98)):
        assert least < cost(fixed * fit.fixed_us, rate * fit.rate_tbps)


def test_a_model_needs_three_points_of_two_sizes():
    assert results.fits([swept(1e6, 5.0), swept(2e6, 6.0)]) == []
    assert results.fits([swept(1e6, us) for us in (5.0, 5.1, 5.2)]) == []
    assert results.fits([row(name) for name in "abc"]) == []


def test_sweep_points_are_bounded(capsys):
    machine = types.SimpleNamespace(gpu=True, mosaic=True)
    cases = [item.case for item in bench.sweep(machine)]
    assert "left out 6 of 50 points: a shard larger than 1 GiB" in capsys.readouterr().out
    assert len({case.name for case in cases}) == len(cases) == 44
    assert max(case.key_rows for case in cases) * 128 == 1 << 30
    reach = {(len(case.lens), case.lens[0]) for case in cases}
    assert {(1, 1 << 12), (1, 1 << 20), (256, 1 << 12), (16, 1 << 20)} <= reach
    (least,) = (case for case in cases if case.name == "s-b1-4k-w2")
    assert least.floor("local").bytes == (4096 // 2 + 4) * 128


def sweep_of(monkeypatch, contexts, batches):
    monkeypatch.setattr(bench, "CONTEXTS", {False: contexts})
    monkeypatch.setattr(bench, "BATCHES", {False: batches})


def test_sweep_command(tmp_path, capsys, monkeypatch):
    sweep_of(monkeypatch, (1024, 2048, 4096), (1,))
    out = tmp_path / "s.json"
    assert main(["sweep", "--commit", "abc", "--out", str(out)]) == 0
    rows = results.load(out).values()
    assert len(rows) == 6 and all(r["checked"] and r["stage"] == "local" for r in rows)
    assert {(r["context"], r["batch"], r["world_size"]) for r in rows} == {
        (n, 1, w) for n in (1024, 2048, 4096) for w in (2, 4)
    }
    said = capsys.readouterr().out
    assert re.findall(r"^\| xla W (\d) \| 3 \| \S+ \| \S+ \| .* % ", said, re.M) == ["2", "4"]


def test_a_point_is_no_model(tmp_path, capsys, monkeypatch):
    sweep_of(monkeypatch, (1000,), (1,))
    assert main(["sweep", "--out", str(tmp_path / "s.json")]) == 0
    assert "no model: it takes 3 points or more" in capsys.readouterr().out
    rows = results.load(tmp_path / "s.json")
    assert {key[0] for key in rows} == {"s-b1-1000-w2", "s-b1-1000-w4"}


def test_no_floor_is_shown_of_a_cpu():
    point = row("a", median=5.0) | {"floor_us": 2.5, "device": "cpu"}
    assert "floor" not in report.line(point, {})
    assert "2.00 x the floor of 2.50" in report.line(point | {"device": "NVIDIA H200"}, {})


# ---- baselines and peers ----


def measured(case, baseline):
    given = baseline.given(case)
    times = baselines.measure(given, Pool([given], 0).inputs(given, "xla"), baseline, 3)
    assert times.method == "eager" and len(times.us) == 3 and times.median > 0


@pytest.mark.parametrize("name", ["quick-decode", "quick-prefill"])
def test_torch_baseline(name):
    pytest.importorskip("torch")
    measured(case_named(name), baselines.find("torch", gpu=False))


def fake_packages(monkeypatch, wrong=False):
    """Packages that do what the peers' functions document, in torch."""
    torch = pytest.importorskip("torch")

    def keys_of(cache, pages, length):
        keys = cache.view(torch.uint8)[pages].view(torch.float8_e4m3fn).float()
        return keys.reshape(-1, 128)[:length]

    def score_rows(queries, cache, table, lens, starts, columns):
        scores = torch.full((*queries.shape[:2], columns), -torch.inf)
        for request, (start, end) in enumerate(itertools.pairwise(starts)):
            length = int(lens[request])
            keys = keys_of(cache, table[request].clamp(min=0), length)
            for token in range(start, end):
                products = queries[token].float() @ keys.T
                products[:, length - end + token + 1 :] = -torch.inf
                for column in range(-(-length // 128)):
                    scores[token, :, column] = products[:, column * 128 :][:, :128].amax(-1)
        return scores

    def counts_of(lens, starts):
        return [
            (int(n) - end + token) // 128 + 1
            for n, start, end in zip(lens, starts[:-1], starts[1:], strict=True)
            for token in range(start, end)
        ]

    def choose(scores, counts):
        ids = torch.full((*scores.shape[:2], 16), -1, dtype=torch.int32)
        for token, planes in enumerate(scores):
            for head, plane in enumerate(planes):
                plane = plane[: int(counts[token])].clone()
                plane[-1] = torch.inf
                best = plane.topk(min(16, len(plane)), largest=not wrong).indices
                ids[token, head, : len(best)] = best.sort().values.to(torch.int32)
        return ids

    def msa_proxy_score(
        q, k, cu_seqlens_q, *, page_table, seqused_k, causal, max_seqlen_q, max_k_tiles, output
    ):
        starts = cu_seqlens_q.tolist()
        assert causal and k.shape[1:] == (1, 128, 128)
        assert starts[-1] == len(q) and max(np.diff(starts)) == max_seqlen_q
        found = score_rows(q, k[:, 0], page_table, seqused_k, starts, max_k_tiles)
        output.copy_(found.permute(1, 2, 0))

    def msa_topk_select(
        max_score, topk, num_valid_pages, output, force_begin_blocks, force_end_blocks
    ):
        assert (topk, force_begin_blocks, force_end_blocks) == (16, 0, 1)
        output.copy_(choose(max_score.permute(2, 0, 1), num_valid_pages))

    def minimax_m3_index_decode(
        idx_q, index_kv_cache, block_table, seq_lens, max_seq_len, topk, init_blocks,
        local_blocks, num_kv_heads, decode_query_len, max_decode_query_len, out,
    ):  # fmt: skip
        assert (topk, init_blocks, local_blocks, num_kv_heads) == (16, 0, 1, idx_q.shape[1])
        assert decode_query_len == max_decode_query_len
        starts = range(0, len(idx_q) + 1, decode_query_len)
        inputs = (idx_q, index_kv_cache, block_table, seq_lens, starts)
        scores = score_rows(*inputs, max_seq_len // 128)
        out.copy_(choose(scores, counts_of(seq_lens, starts)).permute(1, 0, 2))

    def minimax_m3_index_score(
        idx_q, index_kv_cache, block_table, cu_seqlens_q, seq_lens, prefix_lens, max_query_len,
        max_seq_len, num_kv_heads,
    ):  # fmt: skip
        starts = cu_seqlens_q.tolist()
        assert num_kv_heads == idx_q.shape[1] and max(np.diff(starts)) == max_query_len
        assert (prefix_lens + cu_seqlens_q.diff() == seq_lens).all()
        inputs = (idx_q, index_kv_cache, block_table, seq_lens, starts)
        return score_rows(*inputs, max_seq_len // 128).permute(1, 0, 2)

    def minimax_m3_index_topk(
        score, cu_seqlens_q, prefix_lens, max_query_len, topk, init_blocks, local_blocks, out
    ):
        assert (topk, init_blocks, local_blocks) == (16, 0, 1)
        counts = counts_of(prefix_lens + cu_seqlens_q.diff(), cu_seqlens_q.tolist())
        out.copy_(choose(score.permute(1, 0, 2), counts).permute(1, 0, 2))

    offered = {
        "flashinfer.msa_ops": (msa_proxy_score, msa_topk_select),
        "vllm.models.minimax_m3.common.ops": (
            minimax_m3_index_decode,
            minimax_m3_index_score,
            minimax_m3_index_topk,
        ),
    }
    monkeypatch.setattr(baselines.importlib.util, "find_spec", lambda name: name)
    for name, functions in offered.items():
        module = types.ModuleType(name)
        for function in functions:
            setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, name, module)


SMALL = (
    Decode("d", (9216, 700, 12288), (2, 2, 2), 4),
    Prefill("p", (700, 3000), (40, 24), 2),
)


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
@pytest.mark.parametrize("name", PEERS)
def test_a_peer_is_called_as_it_documents(name, case, monkeypatch):
    fake_packages(monkeypatch)
    measured(case, baselines.find(name, gpu=True))
    fake_packages(monkeypatch, wrong=True)
    with pytest.raises(check.Mismatch, match="the best are"):
        measured(case, baselines.find(name, gpu=True))


def test_a_peer_that_is_not_there_is_absent(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    (tmp_path / "vllm.py").write_text("raise OSError('no driver')")
    importlib.invalidate_caches()
    reason = "cannot import vllm.models.minimax_m3.common.ops: OSError: no driver"
    assert baselines.find("vllm", gpu=True) == reason
    monkeypatch.setattr(baselines.importlib.util, "find_spec", lambda name: None)
    assert baselines.find("vllm", gpu=True) == "not installed"


def test_a_peer_does_the_work_of_a_rank():
    for case in DECODE:
        mine, theirs = (x.floor("local").bytes for x in (case, baselines.share(case)))
        assert theirs == pytest.approx(mine, rel=1e-2)
        more = baselines.whole(case).floor("local").bytes
        assert more == pytest.approx(case.world_size * mine, rel=1e-2)
        assert baselines.whole(case).heads * case.world_size == 4
    for case in PREFILL:
        theirs = baselines.share(case).floor("local").flops
        assert theirs == pytest.approx(case.floor("local").flops, rel=1e-2)
        assert baselines.share(case).tokens == case.tokens


def test_peers_are_measured_at_every_case_of_decode_and_prefill():
    there = dict.fromkeys(baselines.NAMES)
    machine = types.SimpleNamespace(gpu=True, mosaic=True, baselines=there)
    items = bench.items(machine)
    assert len({item.label for item in items}) == len(items)
    every = {case.name for case in (*DECODE, *PREFILL)}
    locals_ = [x for x in items if x.stage == "local"]
    of = {name: {x.case.name for x in locals_ if x.backend == name} for name in there}
    decodes = {case.name for case in DECODE}
    wide = {case.name for case in BF16 if case.name.startswith("d-")}
    assert of["torch"] == every and of["torch_compile"] == decodes
    assert of["flashinfer"] == every | wide
    assert of["vllm"] == every | {case.name for case in BF16}
    assert of["flashinfer-no-icp"] == decodes | wide
    own = [x.case.name for x in items if (x.stage, x.backend) == ("local", "mosaic")]
    assert set(own) == every | {case.name for case in (*ADVERSARIAL, *BF16)}


# ---- everything at once ----


@pytest.fixture
def recorded(monkeypatch, tmp_path, capsys):
    """Runs record on processes that do not run; (exit status, what it printed, the calls)."""

    def run(budget, gpus=1, outcomes=()):
        left, calls = list(outcomes), []

        def execute(command, seconds):
            calls.append((command[1:], seconds))
            status = left.pop(0) if left else 0
            if status == 0:
                out = Path(command[command.index("--out") + 1])
                results.save(out, [row(f"case {len(calls)}")])
            return status

        monkeypatch.setattr(record, "count_gpus", lambda: gpus)
        monkeypatch.setattr(record, "execute", execute)
        arguments = ["--out", str(tmp_path / "h200.json"), "--budget-seconds", str(budget)]
        status = main(["record", *arguments, "--commit", "abc"])
        return status, capsys.readouterr().out, calls

    return run


def test_record_runs_every_part_whatever_becomes_of_one(recorded, tmp_path):
    """One fails, one hangs."""
    results.save(tmp_path / "h200.json", [row("from an earlier run")])
    status, said, calls = recorded(300, outcomes=[1, None])
    names = [name for name in record.PARTS if name != "exchange"]
    assert status == 1 and len(calls) == len(names)
    assert f"{names[0]}: 0 rows, exit status 1" in said
    assert f"{names[1]}: 0 rows, ended, out of time" in said
    assert all(f"{name}: 1 rows, exit status 0" in said for name in names[2:])
    for command, timeout in calls:
        assert command[-2:] == ["--commit", "abc"] and timeout <= 300
        seconds = float(command[command.index("--budget-seconds") + 1])
        assert seconds + record._GRACE_SECONDS == pytest.approx(timeout, abs=1)
    assert (tmp_path / "h200-sweep.json").exists()
    asked = {name for command, _ in calls for name in command if name in command_line.BACKENDS}
    assert asked == set(command_line.BACKENDS)


def test_record_measures_the_exchange_where_there_are_ranks(recorded, tmp_path):
    for gpus, there in ((1, False), (2, True), (3, False), (4, True)):
        _, _, calls = recorded(300, gpus=gpus)
        assert any("benchmarks.exchange" in command for command, _ in calls) == there
        assert (tmp_path / f"h200-x{gpus}.json").exists() == there


def test_record_leaves_out_what_there_is_no_time_for(recorded):
    status, said, calls = recorded(12)
    assert status == 2 and calls == [] and "kernels: left out" in said
    assert "nothing was measured" in said


def test_what_a_part_started_ends_with_it(tmp_path):
    start = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {!r}])"
    child = "import time; time.sleep(3600)"
    report = f"; open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid))"
    for end, status, limit in (("; sys.exit(3)", 3, TIME_LIMIT), ("; p.wait()", None, 20)):
        code = start.format(child) + report + end
        assert record.execute([sys.executable, "-c", code], limit) == status
        pid = int((tmp_path / "pid").read_text())
        deadline = time.monotonic() + TIME_LIMIT
        while _runs(pid):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def _runs(pid):
    """Whether a process runs; one that ended and that nobody waits for does not."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


# ---- documents ----


@pytest.mark.parametrize(("path", "name"), report.PARTS)
def test_documents_show_the_committed_results(path, name):
    text = path.read_text()
    assert report.put(text, name, report.PARTS[path, name]()) == text, (
        "python -m benchmarks readme brings it up to date"
    )


def test_a_part_is_replaced():
    text = "a\n<!-- measured: x -->\nold\n<!-- end of x -->\nb"
    assert report.put(text, "x", "new\\1\n") == text.replace("old", "new\\1")
    for broken in ("a", text + text):
        with pytest.raises(ValueError, match="no single part 'x'"):
            report.put(broken, "x", "new")


def test_cases_in_words():
    described = {case.name: report.describe(case) for case in (*DECODE, *PREFILL)}
    assert described["d-b1-1m-w4"] == "1 x 1M keys, W 4"
    assert described["d-b32-128k-w4-q4"] == "32 x 128K keys, 4 tokens each, W 4"
    assert described["p-ragged-w4"] == "8 x 1,024 tokens ending at 16K to 256K, W 4"
    assert len(set(described.values())) == len(described)


def test_the_second_time_the_documents_are_up_to_date(monkeypatch, tmp_path, capsys):
    path = tmp_path / "README.md"
    path.write_text("<!-- measured: x -->\nold\n<!-- end of x -->\n")
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "PARTS", {(path, "x"): lambda: "new\n"})
    assert main(["readme"]) == 0 and capsys.readouterr().out == f"rewritten: {path}\n"
    assert main(["readme"]) == 0 and capsys.readouterr().out == "up to date\n"


def figures(monkeypatch, tmp_path, name, rows):
    """Lets the report show rows with the fields that all have."""
    common = dict.fromkeys(FIELDS) | {"device": "NVIDIA H200", "date": "2026-11-29T"}
    common |= {"read_tbps": 4.4, "fp8_tflops": 1400.0, "driver": "1", "jax": "1", "torch": "1"}
    path = tmp_path / f"{name}.json"
    results.save(path, [common | made for made in rows])
    monkeypatch.setattr(report, name, path)


def test_tables_show_what_there_is(monkeypatch, tmp_path):
    p8k = functools.partial(row, "p-8k-w4", precision="fast")
    measured = [
        row("d-b1-1m-w4", median=12.0),
        row("d-b8-128k-w4", median=20.0),
        row("d-b8-128k-w4", backend="torch", precision="fast", median=99.0),
        row("d-b8-128k-w4", backend="xla", median=77.0),
        row("d-b1-1m-w4", backend="flashinfer-no-icp", precision="fast", median=44.0),
        p8k(median=33.0),
        p8k(stage="fused-local", median=29.0),
        row("p-8k-w4", precision="exact", median=500.0),
        row("select-t32-k1024", "select", median=3.9),
    ]
    figures(monkeypatch, tmp_path, "RESULTS", [x | {"floor_us": 10.0} for x in measured])
    said = report.performance()
    assert "| with merge |" not in said and "| torch.compile |" not in said
    assert "| target | FlashInfer without ICP | torch | XLA |\n" in said
    assert "| **20.0** (19.9 to 20.1) | 2.00 | 1.66 x, missed | - | 99.0 | 77.0 |" in said
    assert "| **12.0** (11.9 to 12.1) | 1.20 | 1.72 x | 44.0 | - | - |" in said
    assert "| **33.0** (32.9 to 33.1) | 3.30 | 3.00 x, missed | 29.0 | 500 |" in said
    assert "| select | 32 tokens, 1,024 blocks each | **3.90** (3.80 to 4.00) | 3.8 us, m" in said
    assert "| 8,192 tokens ending at 32K, W 4 |" in report.summary()


def test_the_table_of_the_host_has_every_case(monkeypatch, tmp_path):
    yardstick = row("torch-op", "host", "torch", median=4.0)
    figures(monkeypatch, tmp_path, "RESULTS", [yardstick, row("decode-direct-graph", "host")])
    said = report.host()
    assert re.findall(r"^\| (\w+-\S+) \|", said, re.MULTILINE) == [case.name for case in HOST]
    assert "| **2.00** (1.90 to 2.10) | 0.5 |" in said and said.count("| - | - |") == 3
    figures(monkeypatch, tmp_path / "none", "RESULTS", [])
    assert report.host() == "\nNot measured yet.\n\n"


def test_the_table_of_the_exchange_says_what_a_transport_adds(monkeypatch, tmp_path):
    case = "d-b32-32k-w2"
    figures(monkeypatch, tmp_path, "PAIR", [
        row(case, "chain", "none", median=20.0),
        row(case, "chain", "nccl", median=30.0) | {"added_us": 10.0},
    ])  # fmt: skip
    said = report.exchange()
    assert "| kernels alone | NCCL |\n" in said
    assert "| 32 x 32K keys, W 2 | 20.0 | 30.0 (+ 10.0) |" in said
    figures(monkeypatch, tmp_path / "none", "PAIR", [])
    assert report.exchange() == "\nNot measured yet.\n\n"


def test_the_table_of_the_jitted_chain_has_what_was_measured(monkeypatch, tmp_path):
    def chain(case, transport, median):
        more = {"transport": transport, "host_us": 7.5}
        return row(case, "jax-chain", median=median) | more

    alone = [
        chain("d-b8-128k-w4", name, us) for name, us in (("none", 12.5), ("one-sided-tagged", 14.0))
    ]
    figures(monkeypatch, tmp_path, "RESULTS", [row("d-b8-128k-w4"), *alone])
    figures(monkeypatch, tmp_path, "PAIR", [chain("d-b32-32k-w2", "collective", 45.0)])
    said = report.jax_chain()
    assert "| a layer | all_to_all | the host's part |" in said
    assert "| 32 x 32K keys, W 2 | 45.0 | 7.50 |" in said
    assert "| 8 x 128K keys, W 4 | 12.5 | 14.0 | 7.50 |" in said
    figures(monkeypatch, tmp_path / "none", "RESULTS", [])
    figures(monkeypatch, tmp_path / "none", "PAIR", [])
    assert report.jax_chain() == "\nNot measured yet.\n\n"


def test_targets_are_judged():
    def target_of(made, *others):
        found = report.target(made, by_key(made, *others))
        return found and f"{found[1]}: {'met' if made['median_us'] <= found[0] else 'MISSED'}"

    made = row("d-b32-128k-w4", median=37.0) | {"floor_us": 30.5}
    assert target_of(made) == "1.16 x: MISSED"
    assert target_of(made | {"median_us": 35.3}) == "1.16 x: met"
    assert target_of(made | {"stage": "chain"}) is None
    assert target_of(row("merge-t256-w4", stage="merge")) is None
    assert target_of(row("select-t32-k1024", stage="select", median=3.9)) == "3.8 us: MISSED"
    prefill = row("p-8k-w4", precision="fast", median=30.0) | {"floor_us": 6.0}
    assert target_of(prefill) == "3.00 x: MISSED"
    assert target_of(prefill | {"precision": "exact"}) is None  # it is for the usual precision
    portable = row("d-b32-128k-w4", backend="xla", median=9.0)
    other = row("d-b32-128k-w4", backend="torch_compile", precision="fast", median=8.0)
    assert target_of(portable) is None
    assert target_of(portable, other) == "1 torch.compile: MISSED"
    hard = row("p-32k-w4-ties", precision="fast", median=5.0)
    assert target_of(hard, row("p-32k-w4", precision="fast")) == "2.5 p-32k-w4: met"
    called = row("decode-dlpack-eager", "host", median=60.0)
    assert target_of(called, row("torch-op", "host", "torch")) == "35 torch ops: met"


# ---- whole runs ----


def test_quick_run(tmp_path):
    """Prefill and bfloat16 decode by the command line; other tests run the rest in this process."""
    out, names = tmp_path / "r.json", "quick-[pb]*"
    chosen = ("--cases", names, "--backends", "xla")
    done = run_cli(*chosen, "--commit", "abc", "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = results.load(out).values()
    cases = [case for case in QUICK if fnmatch.fnmatch(case.name, names)]
    assert [case.name for case in cases] == ["quick-prefill", "quick-bf16"]
    wanted = {(case.name, stage) for case in cases for stage in case.stages}
    if jax.default_backend() == "cpu":
        assert {(r["case"], r["stage"]) for r in rows} == wanted
    for r in rows:
        assert set(FIELDS) <= set(r)
        assert r["checked"] is True and r["commit"] == "abc" and r["timing"] == "jit"
        assert 0 < r["spread_us"][0] <= r["median_us"] <= r["spread_us"][1]
        assert r["floor_us"] > 0


def test_out_of_time_is_said(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench.faulthandler, "dump_traceback_later", lambda *_, **__: None)
    out = tmp_path / "r.json"
    assert main(["--budget-seconds", "0.1", "--out", str(out)]) == 2
    said = capsys.readouterr().out
    assert "0 rows" in said
    assert "left out, out of time: quick-decode score" in said
    assert results.load(out) == {}


def test_only_what_is_absent_was_asked_for(tmp_path, capsys):
    machine = bench.Machine()
    machine.baselines, machine.absent = {}, {"vllm": "not here", "torch": "not here either"}
    wanted = bench.items(machine, backends=["vllm"])
    assert bench.Runner(machine, wanted, tmp_path / "r.json").run(["vllm"]) == 2
    said = capsys.readouterr().out
    assert "absent: vllm (not here)" in said and "torch" not in said


def test_a_failing_peer_is_said_with_its_reason(tmp_path, monkeypatch, capsys):
    def bind(case, arrays):
        raise NotImplementedError("planted")

    monkeypatch.setattr(baselines, "tensors", lambda arrays: arrays)  # without torch, too
    machine = bench.Machine()
    machine.absent, machine.baselines = {}, {"vllm": Baseline(bind)}
    case = Decode("d", (700,), (1,), 4)
    wanted = [bench.Item(case, "local", name, "exact") for name in ("vllm", "xla")]
    out = tmp_path / "r.json"
    assert bench.Runner(machine, wanted, out).run() == 1
    (kept,) = results.load(out)
    assert kept[2] == "xla"
    assert "FAILED d local vllm exact: NotImplementedError: planted\n" in capsys.readouterr().out


def test_one_failing_case_does_not_stop_the_others(tmp_path, monkeypatch):
    def broken(*_):
        raise check.Mismatch("planted")

    monkeypatch.setattr(check, "check_rows", broken)
    machine, out = bench.Machine(), tmp_path / "r.json"
    wanted = bench.items(machine, "*-t8-*", backends=["xla"])
    assert bench.Runner(machine, wanted, out).run() == 1
    assert [key[0] for key in results.load(out)] == ["merge-t8-w4"]


def test_a_stage_that_times_itself_is_a_line(tmp_path, monkeypatch):
    def timed(item, runner):
        assert isinstance(item.case, Sharded) and runner.inputs_of(item).sets
        return Times((1.0, 2.0, 3.0), item.extra["transport"])

    monkeypatch.setitem(bench.OWN_WAY, "jax-chain", timed)
    machine, out = bench.Machine(), tmp_path / "r.json"
    wanted = [
        bench.Item(QUICK[0], "jax-chain", "xla", "exact", {"transport": name})
        for name in ("none", "collective")
    ]
    assert bench.Runner(machine, wanted, out).run() == 0
    assert [(*key[1:], r["timing"]) for key, r in results.load(out).items()] == [
        ("jax-chain", "xla", "exact", name, name) for name in ("none", "collective")
    ]


def test_plots_show_ratios_and_a_sweep(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.plot import plot

    points = [
        row(case.name, backend=backend, precision=precision, median=us) | {"floor_us": 7.6}
        for case in (*DECODE, *PREFILL)
        for backend, precision, us in (
            ("mosaic", case.precision, 14.0),
            ("torch", "fast", 300.0),
        )
    ]
    curves = [
        swept(n * b, 5 + n * b / 4e6, context=n, batch=b, floor_us=n * b / 4.4e6)
        for n in (1 << 12, 1 << 20)
        for b in (1, 16)
    ]
    results.save(tmp_path / "r.json", points + curves)
    assert {path.name for path in plot(tmp_path / "r.json")} == {"r-ratio.png", "r.png"}
    for path in tmp_path.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
