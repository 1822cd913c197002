"""The benchmarks: floors, inputs, checks that can fail, result files, and a quick run."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks import __main__ as command_line
from benchmarks import (
    ahead,
    check,
    documents,
    graph,
    model,
    options,
    peers,
    record,
    report,
    results,
    sweep,
    timing,
)
from benchmarks import run as bench
from benchmarks.__main__ import main
from benchmarks.cases import DECODE, FULL, HOST, MERGE, PREFILL, QUICK, SELECT, Decode, Prefill
from benchmarks.inputs import Inputs, Pool
from benchmarks.inputs import abstract_inputs as abstract_inputs_of
from benchmarks.roofline import Ceilings
from benchmarks.stages import Part, Stage, build, run, written_like
from benchmarks.timing import JitRun, Times
from msa_icp_jax.ops._mosaic import direct

ROOT = Path(__file__).parents[1]
READ_TBPS, FP8_TFLOPS = 4.40, 1377.0  # of the machine that the figures below are from

# Microseconds at these ceilings, and the target of the local stage's time over them.
FLOORS = {
    "d-b1-1m-w4": (7.6, 1.75),
    "d-b8-128k-w4": (7.6, 1.75),
    "d-b32-32k-w2": (15.3, 1.40),
    "d-b32-128k-w4": (30.5, 1.18),
    "d-b64-64k-w2": (61.0, 1.10),
    "d-b128-16k-w4": (15.3, 1.35),
    "d-b32-128k-w4-q4": (30.5, 1.25),
    "d-b64-ragged-w4": (22.0, 1.30),
    "p-8k-w4": (6.2, 3.0),
    "p-8k-w2": (12.5, 2.2),
    "p-32k-w4": (43.7, 1.40),
    "p-32k-w2": (87.3, 1.28),
    "p-128k-w4": (193.4, 1.25),
    "p-128k-w2": (386.8, 1.20),
    "p-t2048-128k-w4": (49.5, 1.30),
    "p-t2048-128k-w2": (99.0, 1.20),
    "p-ragged-w4": (145.1, 1.35),
}


def case_named(name):
    return next(case for case in (*FULL, *QUICK) if case.name == name)


# ---- cases ----


@pytest.mark.parametrize("name", FLOORS)
def test_floors_and_targets_are_the_published_ones(name):
    case = case_named(name)
    floor, target = FLOORS[name]
    assert case.floor("local").us(READ_TBPS, FP8_TFLOPS) == pytest.approx(floor, rel=1.1e-2)
    assert case.target == target


def test_every_sharded_case_has_a_published_floor():
    assert {case.name for case in (*DECODE, *PREFILL)} == set(FLOORS)


def test_select_and_merge_cases():
    targets = {case.name: case.target_us for case in (*SELECT, *MERGE)}
    assert targets["select-t32-k1024"] == 3.8
    assert targets["select-t256-k8192"] == 20.0
    assert targets["select-t8192-k1024"] == 50.0
    assert targets["merge-t32-w4"] == 1.8
    assert case_named("select-t8192-k1024").floor("select").us(READ_TBPS, None) == pytest.approx(
        (8192 * 4 * 1024 * 4 + 8192 * 4 * 33 * 4) / 4.40e6
    )


def test_score_floor_counts_the_plane_it_writes():
    case = case_named("d-b32-128k-w4")
    plane = 32 * 4 * 1024 * 4
    assert case.floor("score").bytes - case.floor("local").bytes == plane
    assert case.floor("local").bytes == 32 * 1024 * 32 * 128 + 32 * 512


def test_an_unknown_ceiling_leaves_the_bytes():
    floor = case_named("p-128k-w4").floor("local")
    assert floor.us(READ_TBPS, None) == pytest.approx(floor.bytes / 4.40e6)


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
    pool = Pool([case], sets * case.stream_bytes)
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


def test_two_sets_at_least():
    case = case_named("d-b64-64k-w2")
    pool = Pool([QUICK[0]], 1)
    assert pool.sets_of(case) == 2


# ---- checks ----


@pytest.fixture(scope="module")
def decoded():
    """A decode case with a chain's results."""
    case = case_named("quick-decode")
    inputs = Pool([case], 0).inputs(case, "xla")
    stage = build(case, "chain", "xla", "exact", arrange=True)
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
    check.check_rows(case, a["scores"], a["counts"], a["rows"])
    check.check_merged(case, a["arranged"], a["counts"], a["output"], a["errors"])


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
        check.check_rows(case, a["scores"], a["counts"], rows)


def test_a_wrong_merge_is_found(decoded):
    case, a = decoded
    received, counts = a["arranged"], a["counts"]
    output = changed(a["output"], (0, 0, 0), -1)
    with pytest.raises(check.Mismatch, match="token 0, head 0"):
        check.check_merged(case, received, counts, output, a["errors"])
    with pytest.raises(check.Mismatch, match="2 faults"):
        check.check_merged(case, received, counts, a["output"], np.array([2]))


def test_select_row_keeps_the_forced_block_and_breaks_ties_downward():
    scores = np.zeros(40, np.float32)
    scores[39] = -5
    row = check.select_row(scores, 40)
    assert row[16:32].tolist() == [*range(15), 39]
    assert check.select_row(scores, 3)[16:].tolist() == [0, 1, 2, *[-1] * 13, 1]


def test_merge_ids_takes_a_repeated_block_once_with_its_best_score():
    rows = np.zeros((2, 33), np.int32)
    rows[0, 16:32] = np.arange(16)
    rows[1, 16:32] = np.arange(10, 26)
    rows[0, :16] = np.linspace(1, 2, 16, dtype=np.float32).view(np.int32)
    rows[1, :16] = np.linspace(3, 4, 16, dtype=np.float32).view(np.int32)
    assert check.merge_ids(rows, 26).tolist() == list(range(10, 26))
    assert check.merge_ids(rows, 12).tolist() == [*range(12), -1, -1, -1, -1]


def test_chosen_ids_are_compared(decoded):
    case, a = decoded
    scores, counts = a["scores"], a["counts"]
    best = np.stack(
        [
            [check.select_row(row, int(n))[16:32] for row in planes]
            for planes, n in zip(scores, counts, strict=True)
        ]
    )
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
    inputs = Pool([case], 0).inputs(case, "xla")
    stage = build(case, "select", "xla", "exact", arrange=True)
    program = JitRun(stage, inputs, written_like(case), 5)
    once = jax.jit(lambda a: run(stage.parts, a)["rows"])
    np.testing.assert_array_equal(program.run()["rows"], once(program.last_set))
    times = program.times(3)
    assert len(times.us) == 3 and times.spread[0] <= times.median <= times.spread[1]


def test_no_link_is_dropped():
    """Results of all links but the last are overwritten; they are computed all the same."""
    calls = []

    def double(x):
        calls.append(0)
        return 2 * np.asarray(x)

    def call(x):
        return (jax.pure_callback(double, jax.ShapeDtypeStruct((3,), np.int32), x),)

    stage = Stage("fake", (Part("fake", call, ("x",), ("y",)),), "x")
    inputs = Inputs({}, [{"x": np.arange(3, dtype=np.int32) + i} for i in range(4)])
    program = JitRun(stage, inputs, {}, 40)
    assert program.links == 48 and not calls  # whole loops of 16
    assert program.run()["y"].tolist() == [6, 8, 10]
    assert len(calls) == program.links


@pytest.mark.parametrize(("name", "stage"), [("quick-decode", "chain"), ("quick-prefill", "local")])
def test_programs_of_kernels_lower(name, stage):
    case = case_named(name)
    made = build(case, stage, "mosaic", "exact", arrange=True)
    structs = abstract_inputs(case)
    shapes = jax.eval_shape(made.run, structs)
    fixed = {name: x for name, x in structs.items() if name not in shapes}
    program = timing._program(made, 2).trace(fixed, [{}, {}], shapes)
    lowered = program.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu_v2" in lowered and "stablehlo.while" in lowered


def test_times():
    times = Times((3.0, 1.0, 2.0), "jit")
    assert (times.median, times.spread) == (2.0, (1.0, 3.0))


# ---- kernels launched without JAX ----


def abstract_inputs(case):
    inputs = Pool([case], 0).inputs(case, "mosaic")
    arrays = inputs.fixed | inputs.sets[0]
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    return written_like(case) | structs


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_kernels_are_all_that_a_stage_launches(case):
    precision = "fast" if isinstance(case, Prefill) else "exact"
    structs = abstract_inputs(case)
    for name in case.stages:
        for part in build(case, name, "mosaic", precision, arrange=False).parts:
            lowered = graph.lower(part.run, *(structs[n] for n in part.reads))
            assert len(lowered.returned) == len(part.writes)
            kernels = [step for step in lowered.steps if isinstance(step, direct.Kernel)]
            assert all(kernel.module for kernel in kernels)
            assert len(kernels) in ((1, 2) if part.name == "fused" else (1,))


def test_a_score_plane_is_written_in_place():
    case = case_named("quick-decode")
    structs = abstract_inputs(case)
    (part,) = build(case, "score", "mosaic", "exact", arrange=False).parts
    lowered = graph.lower(part.run, *(structs[n] for n in part.reads))
    (kernel,) = lowered.steps
    scores = direct.Argument(part.reads.index("scores"))
    assert kernel.buffers[-2:] == (scores, scores)
    assert lowered.returned == (scores,)
    rank = [x.value for x in kernel.buffers if isinstance(x, direct.Constant)]
    assert [x.tolist() for x in rank] == [[1]]


def test_work_outside_the_kernels_is_refused():
    case = case_named("quick-decode")
    structs = abstract_inputs(case)
    (part,) = build(case, "score", "mosaic", "exact", arrange=False).parts

    def shifted(*arrays):
        return part.run(*arrays[:-2], arrays[-2] + 1, arrays[-1])

    with pytest.raises(graph.Unlaunchable, match=r"add .* is no kernel"):
        graph.lower(shifted, *(structs[n] for n in part.reads))


# ---- results ----


def row(case="a", stage="local", backend="mosaic", precision="exact", median=2.0, spread=0.1):
    return {
        "case": case,
        "stage": stage,
        "backend": backend,
        "precision": precision,
        "median_us": median,
        "spread_us": [median - spread, median + spread],
    }


def test_a_new_run_replaces_its_own_rows_and_leaves_the_others(tmp_path):
    path = tmp_path / "new" / "r.json"
    results.save(path, [row("a"), row("b"), row("b", backend="xla")])
    results.save(path, [row("b", median=5.0), row("c")])
    kept = {results.key_of(r): r["median_us"] for r in results.load(path)}
    assert kept == {
        ("a", "local", "mosaic", "exact"): 2.0,
        ("b", "local", "mosaic", "exact"): 5.0,
        ("b", "local", "xla", "exact"): 2.0,
        ("c", "local", "mosaic", "exact"): 2.0,
    }
    assert json.loads(path.read_text())["schema"] == 1
    assert list(tmp_path.rglob("*.part")) == []


def test_a_row_says_where_when_and_of_what_it_is(monkeypatch):
    asked = []
    monkeypatch.setattr(results, "_first_line", lambda *command: asked.append(command) or "said")
    setting = results.Setting("H200", "2.11", Ceilings(4.56789, None))
    key = ("a", "local", "mosaic", "exact")
    made = results.row(key, Times((3.0, 1.0, 2.0004), "graph"), 0.12345, setting, batch=4)
    assert tuple(made) == (*results.FIELDS, "batch") and results.key_of(made) == key
    assert (made["median_us"], made["spread_us"], made["floor_us"]) == (2.0, [1.0, 3.0], 0.1235)
    assert (made["timing"], made["batch"], made["read_tbps"]) == ("graph", 4, 4.5679)
    assert made["commit"] == made["driver"] == "said"
    assert [command[0] for command in asked] == ["nvidia-smi", "git"]
    named = dataclasses.replace(setting, commit="abc")
    assert results.row(key, Times((1.0,), "host"), None, named)["commit"] == "abc"


def test_a_file_of_another_schema_is_refused(tmp_path):
    path = tmp_path / "r.json"
    path.write_text('{"schema": 2, "rows": []}')
    with pytest.raises(ValueError, match="schema 1"):
        results.load(path)


def test_compare_tells_moves_from_noise():
    before = [row("a"), row("b"), row("c"), row("only before")]
    after = [row("a", median=2.15), row("b", median=2.3), row("c", median=1.7), row("only after")]
    moves = {move.key[0]: move for move in results.compare(before, after)}
    assert {name: move.verdict for name, move in moves.items()} == {
        "a": "same",
        "b": "slower",
        "c": "faster",
    }
    assert moves["b"].ratio == pytest.approx(1.15)


def run_cli(*arguments):
    command = [sys.executable, "-m", "benchmarks", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def test_compare_command(tmp_path):
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    results.save(before, [row("a"), row("gone")])
    results.save(after, [row("a", median=3.0)])
    done = run_cli("compare", before, after)
    assert done.returncode == 1, done.stderr
    assert "slower" in done.stdout and "1.500" in done.stdout
    assert "before.json: 1 figures: gone local mosaic exact" in done.stdout
    assert run_cli("compare", after, after).returncode == 0


def test_only_what_is_alike_is_compared(tmp_path, capsys):
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    like = {"device": "H200", "timing": "graph"}
    results.save(before, [row("a") | like, row("b") | like, row("c") | like, row("d") | like])
    others = [row("b", median=9.0) | like | {"timing": "jit"}]
    others += [row(name, median=9.0) | like | {"device": "H100"} for name in "cd"]
    results.save(after, [row("a") | like, *others])
    assert main(["compare", str(before), str(after)]) == 0  # the slower ones do not count
    said = capsys.readouterr().out
    assert "1 figures compared" in said
    assert "not compared: 1 figures, timing graph and jit" in said
    assert "not compared: 2 figures, device H200 and H100" in said


def test_nothing_in_common_is_said_and_counted(tmp_path, capsys):
    before, after, jit = (tmp_path / name for name in ("before.json", "after.json", "jit.json"))
    results.save(before, [row(f"a{i}") | {"timing": "graph"} for i in range(20)])
    results.save(after, [row("b")])
    results.save(jit, [row("a1") | {"timing": "jit"}])
    for other in (after, jit):
        assert main(["compare", str(before), str(other)]) == 2
        said, complaint = capsys.readouterr()
        assert complaint == "benchmarks: nothing to compare\n"
        assert len(said.splitlines()) == 2
    assert main(["compare", str(before), str(after)]) == 2
    assert "before.json: 20 figures: a0 local mosaic exact; " in capsys.readouterr().out


# ---- what is refused ----


@pytest.fixture
def files(tmp_path):
    """Good and bad files by name."""
    written = {
        "text": "hello",
        "schema": '{"schema": 2, "rows": []}',
        "list": "[1]",
        "rows": '{"schema": 1, "rows": [{"case": "a"}]}',
        "norows": '{"schema": 1}',
    }
    found = {name: tmp_path / f"{name}.json" for name in (*written, "missing", "good")}
    for name, text in written.items():
        found[name].write_text(text)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    results.save(found["good"], [row("a", stage="exchange")])
    return found | {"binary": tmp_path / "binary.json", "folder": tmp_path}


BAD = ("text", "schema", "list", "rows", "norows", "missing", "binary", "folder")


def refused(capsys, *arguments):
    """What a command says in the one line with which it refuses."""
    try:
        status = main([str(x) for x in arguments])
    except SystemExit as error:
        status = error.code
    complaint = capsys.readouterr().err
    assert status == 2 and "Traceback" not in complaint
    *usage, line = complaint.splitlines()
    assert line.startswith(("benchmarks: ", "python -m benchmarks")) and (
        not usage or usage[0].startswith("usage: ")
    )
    return line


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_result_file_is_refused(name, files, capsys):
    pytest.importorskip("matplotlib")
    bad, good, new = files[name], files["good"], files["folder"] / "new.json"
    before = good.read_bytes()
    for command in (("compare", bad, good), ("compare", good, bad), ("plot", bad)):
        assert str(bad) in refused(capsys, *command)
    assert str(bad) in refused(capsys, "merge", new, bad)
    assert str(bad) in refused(capsys, "merge", good, bad)
    assert good.read_bytes() == before and not new.exists()
    if name != "missing":
        assert str(bad) in refused(capsys, "merge", bad, good)


@pytest.mark.parametrize("name", [x for x in BAD if x != "missing"])
def test_nothing_is_measured_that_could_not_be_saved(name, files, capsys, monkeypatch):
    monkeypatch.setattr(bench.roofline, "measure", lambda _: pytest.fail("it measures"))
    monkeypatch.setattr(record, "_execute", lambda *_: pytest.fail("it measures"))
    for command in (("--quick",), ("sweep",), ("record",)):
        assert str(files[name]) in refused(capsys, *command, "--out", files[name])
        under = files["text"] / "r.json"
        assert str(files["text"]) in refused(capsys, *command, "--out", under)


@pytest.mark.parametrize("name", ["text", "folder"])
def test_the_host_benchmark_refuses_it_too(name, files, capsys):
    from benchmarks import host

    with pytest.raises(SystemExit) as ended:
        host.main(["--out", str(files[name])])
    complaint = capsys.readouterr().err
    assert ended.value.code == 2 and str(files[name]) in complaint and complaint.count("\n") == 1


def test_the_sweep_file_is_looked_at_first_too(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench.roofline, "measure", lambda _: pytest.fail("it measures"))
    (tmp_path / "r-sweep.json").write_text("hello")
    said = refused(capsys, "--quick", "--sweep", "--out", tmp_path / "r.json")
    assert str(tmp_path / "r-sweep.json") in said


def test_a_file_without_anything_to_plot_is_refused(files, capsys):
    pytest.importorskip("matplotlib")
    said = refused(capsys, "plot", files["good"])
    assert "cases d-* and p-*" in said and "stages exchange" in said
    assert "nothing to plot" in refused(capsys, "plot", documents.PAIR)


@pytest.mark.parametrize(
    "arguments",
    [
        ("sweep", "--batches", "0"),
        ("sweep", "--batches", "-1"),
        ("sweep", "--batches", "many"),
        ("sweep", "--contexts", "0"),
        ("sweep", "--contexts", "0K"),
        ("sweep", "--contexts", "4Q"),
        ("sweep", "--contexts", "K"),
        ("sweep", "--contexts", ""),
        ("sweep", "--contexts", "2M"),
        ("sweep", "--world-sizes", "3"),
        ("--budget-seconds", "0"),
        ("--budget-seconds", "nan"),
        ("--budget-seconds", "soon"),
        ("--backends", "mosiac"),
        ("sweep", "--contexts", "1M", "--batches", "4096"),
        ("--cases", "no-such-*"),
        ("--timing", "graph"),
    ],
)
def test_bad_arguments_are_refused(arguments, tmp_path, capsys):
    if "graph" in arguments and jax.default_backend() == "gpu":
        pytest.skip("there may be graphs")
    assert arguments[-1] in refused(capsys, *arguments, "--out", tmp_path / "r.json") or (
        arguments[-2:] in (("--batches", "4096"), ("--timing", "graph"))
    )
    assert list(tmp_path.iterdir()) == []


def test_a_python_without_jax_is_told_what_to_do(capsys, monkeypatch):
    monkeypatch.setattr(command_line.importlib.util, "find_spec", lambda name: None)
    assert "make bench" in refused(capsys, "--help")


def test_names_of_backends_are_those_there_are():
    baselines = {"torch", "torch_compile", *peers.PEERS}
    assert set(options.BACKENDS) == {"mosaic", "xla"} | baselines
    assert set(command_line._STAGES) == {stage for case in FULL for stage in case.stages}


def test_globs_in_the_help_match_what_they_promise(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    named = {glob: {c.name for c in (*FULL, *QUICK) if fnmatch.fnmatch(c.name, glob)}
             for glob in re.findall(r"'(\S+\*)'", said)}  # fmt: skip
    assert named["d-*"] == {case.name for case in DECODE}
    assert named["p-*"] == {case.name for case in PREFILL}
    assert named["select-*"] >= {case.name for case in SELECT}
    assert named["merge-*"] >= {case.name for case in MERGE}
    assert named["quick-*"] == {"quick-decode", "quick-prefill"} and len(named) == 5


@pytest.mark.parametrize("command", ["", "sweep", "record", "compare", "merge", "plot", "readme"])
def test_every_command_and_argument_is_explained(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert said.index("\n\n") < said.index("options:")
    for stage in command_line._STAGES if not command else ():
        assert re.search(rf"^  {stage} ", said, re.MULTILINE)
    for explained in ("target", "floor", "benchmarks.host", "benchmarks.exchange"):
        assert command or explained in said


def test_figures_go_where_git_ignores_them_unless_told():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout")

    def ignored(path):
        asked = subprocess.run(["git", "check-ignore", "-q", path], cwd=ROOT, timeout=60)
        return asked.returncode == 0

    machine = bench.Machine()
    for name in ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "cpu"):
        machine.device = name
        assert ignored(machine.default_out)
    assert not any(map(ignored, (documents.RESULTS, documents.SWEEP, documents.PAIR)))


def test_a_gpu_without_torch_is_said_loudly(tmp_path):
    machine = bench.Machine()
    machine.gpu, machine.torch, machine.torch_version = True, None, None
    (note,) = bench.Runner(bench.Options(out=tmp_path / "r.json"), machine, [])._notes()
    assert "TORCH IS NOT INSTALLED" in note and "jit" in note and "make bench CUDA=13" in note
    assert all(name in note for name in ("torch_compile", *peers.PEERS))
    machine.torch_version = "2"
    (note,) = bench.Runner(bench.Options(out=tmp_path / "r.json"), machine, [])._notes()
    assert "TORCH SEES NO GPU" in note


@pytest.mark.parametrize(("cuda", "torch"), [("CUDA=13", True), ("CUDA=", False)])
def test_bench_installs_torch_for_a_gpu(cuda, torch):
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    done = subprocess.run(
        ["make", "-n", "bench", cuda], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    extras = re.search(r"setup_env.sh \S+ (\S+)", done.stdout).group(1).split(",")
    assert ("torch" in extras) == torch and "bench" in extras and ("cuda13" in extras) == torch


def test_merge_command(tmp_path):
    into, source = tmp_path / "into.json", tmp_path / "from.json"
    results.save(into, [row("a"), row("b")])
    results.save(source, [row("b", median=4.0)])
    assert main(["merge", str(into), str(source)]) == 0
    assert [r["median_us"] for r in results.load(into)] == [2.0, 4.0]


def test_what_is_absent_is_said_until_it_is_measured(tmp_path):
    path = tmp_path / "r.json"
    results.save(path, [row("a")], {"vllm": "not here", "host": "no GPU"})
    results.save(path, [row("a", backend="torch")], {"vllm": "still not here"})
    assert results.absent(path) == {"vllm": "still not here", "host": "no GPU"}
    results.save(path, [row("torch-op", stage="host", backend="torch")])
    assert results.absent(path) == {"vllm": "still not here"}


# ---- how times grow ----


def swept(size, us, backend="mosaic", world_size=4, **more):
    made = row(f"s{size}-{world_size}", backend=backend, median=us, spread=0.0)
    return made | {"bytes": size, "world_size": world_size} | more


def test_the_model_is_recovered():
    rows = [swept(n, 5 + n / 4e6, world_size=w) for w in (2, 4) for n in (1e4, 1e6, 1e8)]
    assert [fit.group for fit in model.fits(rows)] == ["mosaic W 2", "mosaic W 4", "mosaic"]
    for fit in model.fits(rows):
        assert fit.fixed_us == pytest.approx(5, rel=1e-4)
        assert fit.rate_tbps == pytest.approx(4, rel=1e-4)
        assert abs(fit.worst) < 1e-3 and fit.us(4e6) == pytest.approx(6, rel=1e-3)


def test_misfits_count_relative_to_the_time():
    rows = [swept(n, 5 + n / 4e6) for n in (1e3, 1e4, 1e8, 2e8)] + [swept(5e7, 30.0)]
    (fit,) = model.fits(rows)
    assert fit.points == 5 and fit.worst_case == "s50000000.0-4" and fit.worst < -0.2
    time, size = (np.array([r[n] for r in rows]) for n in ("median_us", "bytes"))

    def cost(fixed, rate):
        return np.square((fixed + size / rate / 1e6) / time - 1).sum()

    least = cost(fit.fixed_us, fit.rate_tbps)
    for fixed, rate in ((1.02, 1), (0.98, 1), (1, 1.02), (1, 0.98)):
        assert least < cost(fixed * fit.fixed_us, rate * fit.rate_tbps)


def test_a_model_needs_three_points_of_two_sizes():
    assert model.fits([swept(1e6, 5.0), swept(2e6, 6.0)]) == []
    assert model.fits([swept(1e6, us) for us in (5.0, 5.1, 5.2)]) == []
    assert model.fits([row(name) for name in "abc"]) == []


def test_sweep_points_are_bounded(capsys):
    machine = types.SimpleNamespace(gpu=True, mosaic=True)
    cases = [item.case for item in sweep.items(machine)]
    assert "6 of 50 points left out: a shard larger than 1 GiB" in capsys.readouterr().out
    assert len({case.name for case in cases}) == len(cases) == 44
    assert max(case.key_bytes for case in cases) == sweep.MOST_KEY_BYTES == 1 << 30
    reach = {(len(case.lens), case.lens[0]) for case in cases}
    assert {(1, 1 << 12), (1, 1 << 20), (256, 1 << 12), (16, 1 << 20)} <= reach
    (least,) = (case for case in cases if case.name == "s-b1-4k-w2")
    assert least.floor("local").bytes == (4096 // 2 + 4) * 128


def test_sweep_command(tmp_path):
    out = tmp_path / "s.json"
    sizes = ("--contexts", "1K", "2K", "--batches", "1", "2")
    done = run_cli("sweep", *sizes, "--commit", "abc", "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = results.load(out)
    assert len(rows) == 8 and all(r["checked"] and r["stage"] == "local" for r in rows)
    assert {(r["context"], r["batch"], r["world_size"]) for r in rows} == {
        (n, b, w) for n in (1024, 2048) for b in (1, 2) for w in (2, 4)
    }
    stored = json.loads(out.read_text())["fits"]
    assert [fit["points"] for fit in stored] == [4, 4, 8]
    for text in ("batch 2", "W 2: us", "by context", "time = fixed + bytes / rate"):
        assert text in done.stdout


def test_a_point_is_no_model(tmp_path, capsys):
    sizes = ["--contexts", "1000", "--batches", "1", "--world-sizes", "2"]
    assert main(["sweep", *sizes, "--out", str(tmp_path / "s.json")]) == 0
    said = capsys.readouterr().out
    assert "no model fitted: it takes 3 points or more" in said
    assert [r["case"] for r in results.load(tmp_path / "s.json")] == ["s-b1-1000-w2"]


def test_no_floor_is_shown_of_a_cpu(capsys):
    point = swept(1e6, 5.0, context=4096, batch=1, floor_us=2.5, device="cpu")
    report.show_curves([point], "title")
    report.show_rows([point], "title")
    said = capsys.readouterr().out
    assert "5.0" in said and "2.5" not in said and "floor" not in said and "(2.00)" not in said
    report.show_curves([point | {"device": "NVIDIA H200"}], "title")
    report.show_rows([point | {"device": "NVIDIA H200"}], "title")
    said = capsys.readouterr().out
    assert "5.0 (2.00)" in said and "x floor" in said


def test_sizes():
    assert [options.size(text) for text in ("512", "4K", "1m")] == [512, 4096, 1 << 20]


# ---- lowering ahead ----


def precision_of(case):
    return "fast" if isinstance(case, Prefill) else "exact"


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_inputs_are_told_without_being_made(case):
    pool = Pool(QUICK, 0)
    inputs = pool.inputs(case, "mosaic")
    made = jax.tree.map(lambda x: (x.shape, x.dtype), inputs.fixed | inputs.sets[0])
    told = abstract_inputs_of(case, pool.key_rows)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), told) == made


def test_kernels_are_lowered_in_other_processes():
    cases = (case_named("quick-decode"), case_named("select-t8-k256"))
    key_rows = Pool(cases, 0).key_rows
    tasks = [(case, precision_of(case), case.stages) for case in cases]
    prepared = ahead.prepare(tasks, key_rows, 132)
    for case in cases:
        structs = written_like(case) | abstract_inputs_of(case, key_rows)
        parts = ahead._distinct(case, "exact", case.stages)
        found = prepared.lowered(case, "exact", parts, structs)
        assert set(found) == {part.name for part in parts}
        for part in parts:
            here = graph.lower(part.run, *(structs[name] for name in part.reads))
            assert found[part.name].scratch == here.scratch
            assert len(found[part.name].steps) == len(here.steps)
            assert len(found[part.name].returned) == len(here.returned)


def test_what_was_lowered_for_other_arguments_is_not_used():
    case = case_named("select-t8-k256")
    prepared = ahead.Ahead(ahead.lower_tasks([(case, "exact", case.stages)], 0, 132))
    parts = ahead._distinct(case, "exact", case.stages)
    structs = written_like(case) | abstract_inputs_of(case, 0)
    assert set(prepared.lowered(case, "exact", parts, structs)) == {"select"}
    wider = structs | {"scores": jax.ShapeDtypeStruct((8, 4, 512), np.float32)}
    assert prepared.lowered(case, "exact", parts, wider) == {}
    assert prepared.lowered(case, "fast", parts, structs) == {}


# ---- baselines and peers ----


def measured(case, baseline, device_case=None):
    from benchmarks.baselines import TorchRun

    run = TorchRun(
        device_case or case, Pool([device_case or case], 0).inputs(case, "xla"), baseline
    )
    run.check()
    times = run.times(3)
    assert times.method == "eager" and len(times.us) == 3 and times.median > 0


@pytest.mark.parametrize("name", ["quick-decode", "quick-prefill"])
def test_torch_baseline(name):
    pytest.importorskip("torch")
    from benchmarks.baselines import TORCH

    measured(case_named(name), TORCH)


def fake_packages(monkeypatch, wrong=False):
    """Packages that do what the peers' functions document, in torch."""
    torch = pytest.importorskip("torch")

    def keys_of(cache, pages, length):
        return (
            cache.view(torch.uint8)[pages]
            .view(torch.float8_e4m3fn)
            .float()
            .reshape(-1, 128)[:length]
        )

    def score_rows(queries, cache, table, lens, per_request, columns):
        scores = torch.full((len(queries), 4, columns), -torch.inf)
        for token, query in enumerate(queries.float()):
            request, j = divmod(token, per_request)
            length = int(lens[request])
            products = query @ keys_of(cache, table[request].clamp(min=0), length).T
            position = length - per_request + j
            products[:, position + 1 :] = -torch.inf
            for column in range(-(-length // 128)):
                scores[token, :, column] = products[:, column * 128 :][:, :128].amax(-1)
        return scores

    def choose(scores, counts, last):
        ids = torch.full((*scores.shape[:2], 16), -1, dtype=torch.int32)
        for token, planes in enumerate(scores):
            for head, plane in enumerate(planes):
                plane = plane[: int(counts[token])].clone()
                if last:
                    plane[-1] = torch.inf
                best = plane.topk(min(16, len(plane)), largest=not wrong).indices
                ids[token, head, : len(best)] = best.sort().values.to(torch.int32)
        return ids

    def msa_proxy_score(
        q, k, cu_seqlens_q, *, page_table, seqused_k, causal, max_seqlen_q, max_k_tiles, output
    ):
        assert causal and k.shape[1:] == (1, 128, 128)
        assert cu_seqlens_q.tolist() == list(range(0, len(q) + 1, max_seqlen_q))
        found = score_rows(q, k[:, 0], page_table, seqused_k, max_seqlen_q, max_k_tiles)
        output.copy_(found.permute(1, 2, 0))

    def msa_topk_select(
        max_score, topk, num_valid_pages, output, force_begin_blocks, force_end_blocks
    ):
        assert (topk, force_begin_blocks, force_end_blocks) == (16, 0, 1)
        output.copy_(choose(max_score.permute(2, 0, 1), num_valid_pages, last=True))

    def minimax_m3_index_decode(
        idx_q, index_kv_cache, block_table, seq_lens, max_seq_len, topk, init_blocks,
        local_blocks, num_kv_heads, decode_query_len, max_decode_query_len, out,
    ):  # fmt: skip
        assert (topk, init_blocks, local_blocks, num_kv_heads) == (16, 0, 1, 4)
        assert decode_query_len == max_decode_query_len
        columns = max_seq_len // 128
        scores = score_rows(idx_q, index_kv_cache, block_table, seq_lens, decode_query_len, columns)
        counts = [
            (int(seq_lens[t // decode_query_len]) - decode_query_len + t % decode_query_len) // 128
            + 1
            for t in range(len(idx_q))
        ]
        out.copy_(choose(scores, counts, last=True).permute(1, 0, 2))

    offered = {
        "flashinfer.msa_ops": (msa_proxy_score, msa_topk_select),
        "vllm.models.minimax_m3.common.ops": (minimax_m3_index_decode,),
    }
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: name)
    for name, functions in offered.items():
        module = types.ModuleType(name)
        for function in functions:
            setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize("name", peers.PEERS)
def test_a_peer_is_called_as_it_documents(name, monkeypatch):
    fake_packages(monkeypatch)
    case = peers.unsharded(Decode("d", (9216, 700, 12288), 4, query_len=2))
    assert case.lens == (2304, 175, 3072) and case.rows_per_page == 128
    measured(case, peers.find(name))


@pytest.mark.parametrize("name", peers.PEERS)
def test_a_peer_that_chooses_wrongly_is_not_timed(name, monkeypatch):
    fake_packages(monkeypatch, wrong=True)
    with pytest.raises(check.Mismatch, match="the best are"):
        measured(Decode("d", (3072,), 1), peers.find(name))


def test_a_peer_that_is_not_there_is_absent(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    if not importlib.util.find_spec("vllm"):
        assert peers.find("vllm") == peers.Absent("vllm", "not installed")
    (tmp_path / "vllm.py").write_text("raise OSError('no driver')")
    importlib.invalidate_caches()
    reason = peers.find("vllm").reason
    assert reason == "cannot import vllm.models.minimax_m3.common.ops: OSError: no driver"


def test_a_peer_with_other_parameters_is_absent(monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: name)
    module = types.ModuleType("flashinfer.msa_ops")
    monkeypatch.setitem(sys.modules, "flashinfer.msa_ops", module)
    assert "msa_proxy_score does not exist" in peers.find("flashinfer").reason
    module.msa_proxy_score = lambda q, k: None
    reason = peers.find("flashinfer").reason
    assert "msa_proxy_score(q, k) has no cu_seqlens_q, page_table" in reason


def test_a_peer_reads_what_a_rank_reads():
    for case in DECODE:
        mine, theirs = case.floor("local").bytes, peers.unsharded(case).floor("local").bytes
        assert theirs == pytest.approx(mine, rel=1e-2)
        assert peers.unsharded(case).tokens == case.tokens


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

        monkeypatch.setattr(record, "_gpus", lambda: gpus)
        monkeypatch.setattr(record, "_execute", execute)
        arguments = ["--out", str(tmp_path / "h200.json"), "--budget-seconds", str(budget)]
        status = main(["record", *arguments, "--commit", "abc"])
        return status, capsys.readouterr().out, calls

    return run


def test_record_runs_every_part_whatever_becomes_of_one(recorded):
    """One fails, one hangs."""
    status, said, calls = recorded(200, outcomes=[1, None])
    assert status == 1
    names = [part.name for part in record.parts() if not part.absent]
    assert len(calls) == len(names) > 2
    assert f"{names[0]}: exit status 1" in said and f"{names[1]}: ended after" in said
    assert all(f"{name}: 1 rows" in said for name in names[2:])
    for command, timeout in calls:
        assert command[-4:-1] == ["--commit", "abc", "--budget-seconds"]
        assert float(command[-1]) + record._GRACE_SECONDS == pytest.approx(timeout, abs=1)
        assert timeout <= 200


def test_what_a_part_started_ends_with_it(tmp_path):
    start = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {!r}])"
    child = "import time; time.sleep(60)"
    report = f"; open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid))"
    for end, status in (("; sys.exit(3)", 3), ("; p.wait()", None)):
        code = start.format(child) + report + end
        assert record._execute([sys.executable, "-c", code], 5) == status
        pid = int((tmp_path / "pid").read_text())
        deadline = time.monotonic() + 10
        while _runs(pid):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def _runs(pid):
    """Whether a process runs; one that ended and that nobody waits for does not."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def test_a_run_takes_the_sweep_along(tmp_path, monkeypatch):
    monkeypatch.setitem(sweep.CONTEXTS, "cpu", (1024,))
    monkeypatch.setitem(sweep.BATCHES, "cpu", (1, 2))
    out = tmp_path / "r.json"
    arguments = ["--quick", "--cases", "merge-*", "--backends", "xla", "--sweep"]
    assert main([*arguments, "--commit", "abc", "--out", str(out)]) == 0
    assert [r["case"] for r in results.load(out)] == ["merge-t8-w4"]
    swept_rows = results.load(tmp_path / "r-sweep.json")
    assert {r["case"] for r in swept_rows} == {f"s-b{b}-1k-w{w}" for b in (1, 2) for w in (2, 4)}


def test_record_says_what_the_machine_cannot(recorded, tmp_path):
    status, said, calls = recorded(200)
    assert status == 0 and not any("benchmarks.exchange" in command for command, _ in calls)
    assert "exchange: absent, it takes two GPUs, there is 1" in said
    assert results.absent(tmp_path / "h200.json")["exchange"] == "it takes two GPUs, there is 1"
    _, _, calls = recorded(200, gpus=2)
    assert any("benchmarks.exchange" in command for command, _ in calls)


def test_record_leaves_out_what_there_is_no_time_for(recorded):
    status, said, calls = recorded(12)
    assert status == 2 and calls == [] and "kernels: left out" in said
    assert "nothing was measured" in said


def test_a_part_without_rows_is_not_done(recorded, tmp_path):
    results.save(tmp_path / "h200.json", [row("from an earlier run")])
    status, said, _ = recorded(200, outcomes=[2, 2, 2, 2])
    assert status == 2 and "1 rows" not in said
    assert "compiled: exit status 2, nothing was measured" in said
    status, said, _ = recorded(200, outcomes=[0, 2])
    assert status == 1 and "kernels: 1 rows" in said


def test_a_part_whose_backends_are_absent_is_absent(recorded, tmp_path):
    missing = dict.fromkeys(record._BASELINES, "torch is not installed")
    results.save(tmp_path / "h200.json", [], missing)
    status, said, calls = recorded(200, outcomes=[0, 0, 2, 0])
    assert len(calls) == 4 and status == 0
    assert "baselines: absent, torch is not installed" in said


# ---- documents ----


@pytest.mark.parametrize(("path", "name"), documents.PARTS)
def test_documents_show_the_committed_results(path, name):
    text = path.read_text()
    assert documents.put(text, name, documents.PARTS[path, name]()) == text, (
        "python -m benchmarks readme brings it up to date"
    )


def test_the_example_of_a_larger_mesh_runs():
    text = (ROOT / "docs" / "scaling.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    printed = re.findall(r"^print\(.*\)  # (.*?)(?:: .*)?$", code, re.MULTILINE)
    assert done.stdout.splitlines() == printed and len(printed) == 3


def test_a_part_is_replaced():
    text = "a\n<!-- measured: x -->\nold\n<!-- end of x -->\nb"
    assert documents.put(text, "x", "new\\1\n") == text.replace("old", "new\\1")
    for broken in ("a", text + text):
        with pytest.raises(ValueError, match="no single part 'x'"):
            documents.put(broken, "x", "new")


def test_cases_in_words():
    described = {case.name: documents.describe(case) for case in (*DECODE, *PREFILL)}
    assert described["d-b1-1m-w4"] == "1 x 1M keys, W 4"
    assert described["d-b32-128k-w4-q4"] == "32 x 128K keys, 4 tokens each, W 4"
    assert described["p-ragged-w4"] == "8 x 1,024 tokens ending at 16K to 256K, W 4"
    assert len(set(described.values())) == len(described)


def test_the_second_time_the_documents_are_up_to_date(monkeypatch, tmp_path, capsys):
    path = tmp_path / "README.md"
    path.write_text("<!-- measured: x -->\nold\n<!-- end of x -->\n")
    monkeypatch.setattr(documents, "ROOT", tmp_path)
    monkeypatch.setattr(documents, "PARTS", {(path, "x"): lambda: "new\n"})
    assert main(["readme"]) == 0 and capsys.readouterr().out == f"rewritten: {path}\n"
    assert main(["readme"]) == 0 and capsys.readouterr().out == "up to date\n"


def figures(monkeypatch, tmp_path, name, rows):
    """Lets the documents show rows with the fields that all have."""
    common = dict.fromkeys(results.FIELDS) | {"device": "NVIDIA H200", "date": "2026-11-29T"}
    common |= {"read_tbps": 4.4, "fp8_tflops": 1400.0, "driver": "1", "jax": "1", "torch": "1"}
    path = tmp_path / f"{name}.json"
    results.save(path, [common | made for made in rows])
    monkeypatch.setattr(documents, name, path)


def test_tables_show_what_there_is_and_how_it_was_taken(monkeypatch, tmp_path):
    graphed = {"floor_us": 10.0, "timing": "graph"}
    jitted = graphed | {"timing": "jit"}
    measured = [
        row("d-b1-1m-w4", median=12.0) | graphed,
        row("d-b8-128k-w4", median=20.0) | jitted,
        row("d-b8-128k-w4", backend="torch", precision="fast", median=99.0) | graphed,
        row("d-b8-128k-w4", backend="xla", median=77.0) | jitted,
        row("p-8k-w4", precision="fast", median=33.0) | graphed,
        row("p-8k-w4", "fused-local", precision="fast", median=29.0) | graphed,
        row("p-8k-w4", precision="exact", median=500.0) | graphed,
        row("p-8k-w2", precision="fast", median=33.0) | graphed,
        row("select-t32-k1024", "select", median=3.9) | graphed,
        row("merge-t32-w4", "merge", median=1.5) | graphed,
    ]
    figures(monkeypatch, tmp_path, "RESULTS", measured)
    figures(monkeypatch, tmp_path, "PAIR", [])
    said = documents.performance()
    assert "| XLA | torch |\n" in said and "| torch.compile |" not in said
    assert "| **20.0** (jit) (19.9 to 20.1) | 2.00 | 77.0 | 99.0 |" in said  # XLA's is stated
    assert "| **12.0** (11.9 to 12.1) | 1.20 | - | - |" in said
    assert documents._MISSING in said and documents._JIT in said
    assert "\nNot measured in these runs: torch.compile, flashinfer and vllm.\n" in said
    assert "| select | 32 tokens, 1,024 blocks each |" in said and "select-t32" not in said
    (targets,) = re.findall(r"Of 6 targets, 3 are met; missed: (.*)\.\n", said)
    assert targets == (
        "8 x 128K keys, W 4 (2.000 x, target 1.75 x); "
        "8,192 tokens ending at 8K, W 2 (3.300 x, target 2.20 x); "
        "select of 32 tokens, 1,024 blocks each (3.90 us, target 3.8 us)"
    )


def test_what_is_not_measured_is_named_with_its_reason(monkeypatch, tmp_path):
    figures(monkeypatch, tmp_path, "PAIR", [row(stage="exchange")])
    figures(monkeypatch, tmp_path, "RESULTS", [row(), row("torch-op", "host", "torch")])
    reasons = {"vllm": "not installed", "exchange": "one GPU", "kernels": "no time"}
    results.save(documents.RESULTS, [], reasons)
    (said,) = documents._absent(documents.Figures(documents.RESULTS))
    assert said == (
        "Not measured in these runs: XLA, torch, torch.compile, flashinfer, vllm (not installed) "
        "and kernels (no time)."
    )


def test_the_table_of_the_host_has_every_case(monkeypatch, tmp_path):
    yardstick = row("torch-op", "host", "torch", median=4.0)
    figures(monkeypatch, tmp_path, "RESULTS", [yardstick, row("decode-direct-graph", "host")])
    said = documents.host()
    assert re.findall(r"^\| (\w+-\S+) \|", said, re.MULTILINE) == list(HOST)
    assert "| **2.00** (1.90 to 2.10) | 0.5 |" in said and said.count("| - | - |") == 3
    assert documents._MISSING in said
    figures(monkeypatch, tmp_path / "none", "RESULTS", [])
    assert documents.host().startswith("\nNo figures yet")


def test_what_the_exchange_costs_follows_from_the_rows(monkeypatch, tmp_path):
    case, device = "d-b32-32k-w2", {"device": "NVIDIA H200 x2", "fp8_tflops": 1000.0}
    added = {"nccl": 10.0, "one-sided-legacy": 5.0, "one-sided-tagged": 2.0}
    pair = [
        row(case, stage, name, median=20.0 + us) | device | {"added_us": us}
        for stage in ("exchange", "chain")
        for name, us in added.items()
    ]
    figures(monkeypatch, tmp_path, "PAIR", pair)
    one = [row(case, stage, median=us) for stage, us in (("local", 20.0), ("chain", 21.0))]
    figures(monkeypatch, tmp_path, "RESULTS", one)
    said = documents.exchange()
    assert "one-sided, flags" in said and "| chain | 10.0 to 10.0 | 5.00 to 5.00 |" in said
    assert "at 1,000 TFLOP/s" in said and "at 1,400, which was not explained" in said
    assert "0.57 ms, 0.28 ms and 0.11 ms a decode step" in documents.layers()
    said = documents.break_even()
    keys = 11e-6 * 4.4e12 / 64 / 1e6
    assert f"| 10.0 + 1.00 us: NCCL, and the merge | B n = {keys:.2f} M keys |" in said
    assert "if both took as long as with two ranks" in said
    figures(monkeypatch, tmp_path / "none", "PAIR", [])
    for part in (documents.exchange, documents.layers, documents.break_even):
        assert part() == "\nNot measured yet.\n\n"


# ---- whole runs ----


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    out = tmp_path_factory.mktemp("quick") / "r.json"
    done = run_cli("--quick", "--backends", "xla", "--commit", "abc", "--out", out)
    return done, out


def test_quick_run(quick):
    done, out = quick
    assert done.returncode == 0, done.stdout + done.stderr
    rows = results.load(out)
    wanted = {(case.name, stage) for case in QUICK for stage in case.stages}
    if jax.default_backend() == "cpu":
        assert {(r["case"], r["stage"]) for r in rows} == wanted
    for r in rows:
        assert set(results.FIELDS) <= set(r)
        assert r["checked"] is True and r["commit"] == "abc" and r["timing"] == "jit"
        assert 0 < r["spread_us"][0] <= r["median_us"] <= r["spread_us"][1]
        assert r["floor_us"] > 0


def test_out_of_time_is_said(tmp_path):
    out = tmp_path / "r.json"
    done = run_cli("--quick", "--budget-seconds", "1", "--out", out)
    assert done.returncode == 2, done.stderr
    assert "nothing was measured" in done.stdout
    assert "left out, out of time: quick-decode score" in done.stdout
    assert results.load(out) == []


def test_only_what_is_absent_was_asked_for(tmp_path, capsys):
    asked = bench.Options(backends=("vllm",), out=tmp_path / "r.json")
    machine = bench.Machine()
    machine.baselines, machine.absent = {}, {"vllm": "not here", "torch": "not here either"}
    assert bench.Runner(asked, machine, bench.items(asked, machine)).run() == 2
    assert results.absent(asked.out) == {"vllm": "not here"}
    assert "absent: vllm (not here)" in capsys.readouterr().out


def test_a_failing_peer_is_absent_with_its_reason(tmp_path, monkeypatch):
    from benchmarks.baselines import Baseline

    def prepare(case):
        raise NotImplementedError("planted")

    asked = bench.Options(backends=("vllm", "xla"), out=tmp_path / "r.json")
    machine = bench.Machine()
    machine.absent = {}
    machine.baselines = {"vllm": Baseline("vllm", prepare, rotates=True, exact=False)}
    case = Decode("d", (700,), 4)
    wanted = [bench.Item(case, "local", name, "exact") for name in asked.backends]
    assert bench.Runner(asked, machine, wanted).run() == 1
    (kept,) = results.load(asked.out)
    assert kept["backend"] == "xla"
    assert results.absent(asked.out) == {"vllm": "fails: NotImplementedError: planted"}


def test_one_failing_case_does_not_stop_the_others(tmp_path, monkeypatch):
    def broken(case, *_):
        raise check.Mismatch("planted")

    monkeypatch.setattr(bench.check, "check_rows", broken)
    asked = bench.Options(quick=True, cases="*-t8-*", backends=("xla",), out=tmp_path / "r.json")
    machine = bench.Machine()
    assert bench.Runner(asked, machine, bench.items(asked, machine)).run() == 1
    (kept,) = results.load(tmp_path / "r.json")
    assert kept["case"] == "merge-t8-w4"


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.plot import plot

    rows = [
        row(name, median=floor * target) | {"floor_us": floor}
        for name, (floor, target) in FLOORS.items()
    ]
    results.save(tmp_path / "r.json", rows)
    for path in plot(tmp_path / "r.json"):
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_plot_of_baselines_and_of_a_sweep(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.plot import plot

    points = [
        row("d-b8-128k-w4", backend=backend, precision=precision, median=us) | {"floor_us": 7.6}
        for backend, precision, us in (("mosaic", "exact", 14.0), ("torch", "fast", 300.0))
    ]
    curves = [
        swept(n * b, 5 + n * b / 4e6, context=n, batch=b, floor_us=n * b / 4.4e6)
        for n in (1 << 12, 1 << 20)
        for b in (1, 16)
    ]
    results.save(tmp_path / "r.json", points + curves)
    names = {path.name for path in plot(tmp_path / "r.json")}
    assert names == {"r-time.png", "r-ratio.png", "r-baselines.png", "r.png"}
    for name in names:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_targets_are_judged():
    target_of = report.target_of
    made = row("d-b32-128k-w4", median=37.0) | {"floor_us": 30.5}
    assert str(target_of(made)) == "1.18 x MISSED"
    assert str(target_of(made | {"median_us": 35.9})) == "1.18 x met"
    assert target_of(made | {"backend": "xla"}) is None
    assert target_of(row("merge-t256-w4", stage="merge")) is None
    alone = row("select-t32-k1024", stage="select", median=3.9) | {"floor_us": 0.1}
    assert str(target_of(alone)) == "3.8 us MISSED"
    prefill = row("p-8k-w4", precision="fast", median=30.0) | {"floor_us": 6.0}
    assert str(target_of(prefill)) == "3.00 x MISSED"
    assert target_of(prefill | {"precision": "exact"}) is None  # it is for the usual precision
