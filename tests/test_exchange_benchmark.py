"""The exchange benchmark, as far as it goes without GPUs: its cases, and that its kernels lower."""

from __future__ import annotations

import functools
import json
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks import exchange, results
from benchmarks.cases import DECODE
from benchmarks.graph import lower
from benchmarks.roofline import Ceilings
from benchmarks.timing import Times
from msa_icp_jax.comm import comm_shapes
from msa_icp_jax.ops._mosaic.launch import Target

RESULTS = Path(exchange.__file__).parent / "results" / "h200-x2.json"


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_decode_case_runs_at_the_ranks_there_are(world_size):
    found = exchange.cases(world_size, "*")
    assert len({case.name for case in found}) == len(found) == len(DECODE)
    assert all(case.world_size == world_size for case in found)
    assert all(f"-w{world_size}" in case.name for case in found)
    same = [case.name for case in DECODE if case.world_size == world_size]
    assert [case.name for case in found[: len(same)]] == same
    assert [case.name for case in exchange.cases(2, "*b64-64k*")] == ["d-b64-64k-w2"]


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_link_is_made_of_kernels_alone(world_size):
    pytest.importorskip("torch", reason="torch is not installed (extra torch)")
    from benchmarks.links import Kernels

    (case,) = exchange.cases(world_size, "d-b32-32k-*")
    kernels = Kernels(case, Target())
    tokens, heads = case.tokens, case.heads_per_rank
    shapes = {name: words(*shape) for name, shape in comm_shapes(world_size, tokens).items()}
    plane = jax.ShapeDtypeStruct((tokens, 4, case.columns), jnp.float32)
    counts, ids, one = words(tokens), words(tokens, heads, 16), words()
    rows, errors = words(world_size, heads, tokens, 33), words(1)
    keys = jax.ShapeDtypeStruct((500, case.rows_per_page, 128), jnp.float8_e4m3fn)
    queries = jax.ShapeDtypeStruct((tokens, 4, 128), jnp.float8_e4m3fn)
    arguments = {
        "score": (queries, keys, words(tokens, 256), counts, plane, one),
        "select": (plane, counts, one),
        "merge": (rows, counts, ids, errors),
        "publish_legacy": (rows, shapes["recv_bases"], errors, one, one),
        "publish_tagged": (
            *(rows, shapes["tagged_recv_bases"], shapes["publish_generations"]),
            *(one, one),
        ),
        "select_legacy": (plane, counts, shapes["recv_bases"], errors, one, one),
        "select_tagged": (
            *(plane, counts, shapes["tagged_recv_bases"], shapes["publish_generations"]),
            *(one, one),
        ),
        "merge_legacy": (shapes["recv"], counts, ids, errors, one),
        "merge_tagged": (
            *(shapes["tagged_recv"], counts, ids, errors, one),
            shapes["expected_generations"],
        ),
        "empty": (words(1),),
    }
    for name, structs in arguments.items():
        lowered = lower(getattr(kernels, f"_{name}"), *structs)
        assert len(lowered.steps) == 1, name  # one kernel, no fill, no copy


def test_rows_say_what_a_transport_adds_and_how_it_was_timed(monkeypatch, tmp_path):
    pytest.importorskip("torch", reason="torch is not installed (extra torch)")
    from benchmarks import links

    (case,) = exchange.cases(2, "d-b32-32k-w2")
    us = {"none": 3.0, "one-sided-tagged": 5.0}
    group = {"get_world_size": lambda: 2, "get_rank": lambda: 0}
    monkeypatch.setattr(links, "dist", types.SimpleNamespace(**group))
    monkeypatch.setattr(links.torch.cuda, "get_device_name", lambda: "H200")
    monkeypatch.setattr(links, "slower_rank", lambda times: times)
    for method in ("graph", "eager"):
        taken = functools.partial(fake_times, us, method)
        monkeypatch.setattr(links, f"{method}_times", taken)
    one_rank = types.SimpleNamespace(
        case=case,
        link=lambda stage, backend, number: [backend],
        empty=lambda: "empty",
        arm=None,
        check=lambda *arguments: None,
    )
    out = tmp_path / "r.json"
    recorder = links.Recorder(out, "abc", Ceilings(4.5, 1400.0))
    recorder.measure(one_rank, ["exchange"], list(us))
    rows = {(row["stage"], row["backend"]): row for row in results.load(out)}
    assert len(rows) == 4 and all(set(results.FIELDS) <= set(row) for row in rows.values())
    tagged = rows["exchange", "one-sided-tagged"]
    assert (tagged["added_us"], tagged["timing"], tagged["floor_us"]) == (2.0, "graph", 0.7)
    assert tagged["payload_bytes"] == case.tokens * 2 * 256 and tagged["device"] == "H200 x2"
    eager = rows["exchange-eager", "one-sided-tagged"]
    assert (eager["added_us"], eager["timing"], eager["commit"]) == (2.0, "eager", "abc")


def fake_times(us, method, links, before):
    del before
    return Times((us.get(links[0][0], 0.7),), method)


def test_help_takes_no_torch(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit) as ended:
        exchange.main(["--help"])
    assert ended.value.code == 0 and "torchrun --nproc-per-node 2" in capsys.readouterr().out


@pytest.mark.parametrize("missing", ["jax", "torch"])
def test_a_python_without_what_it_takes_is_told_so(missing, monkeypatch, capsys):
    monkeypatch.setattr(exchange.importlib.util, "find_spec", lambda name: name != missing or None)
    assert exchange.main(["--out", "never.json"]) == 2
    said = capsys.readouterr().err
    assert f"no {missing}" in said and "make bench CUDA=13" in said and said.count("\n") == 1


def fake_torch(monkeypatch, gpus):
    torch = types.SimpleNamespace(cuda=types.SimpleNamespace(device_count=lambda: gpus))
    monkeypatch.setattr(exchange.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "torch", torch)
    for name in ("LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("gpus", [0, 1])
def test_too_few_gpus_are_said(gpus, monkeypatch, capsys):
    fake_torch(monkeypatch, gpus)
    assert exchange.main(["--out", "never.json"]) == 2
    assert f"two Hopper GPUs of one host, torch sees {gpus}" in capsys.readouterr().err


def test_it_is_started_with_torchrun_on_cases_that_there_are(monkeypatch, capsys, tmp_path):
    fake_torch(monkeypatch, 2)
    out = ["--out", str(tmp_path / "r.json")]
    assert exchange.main(out) == 2 and "torchrun" in capsys.readouterr().err
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert exchange.main(out) == 2 and "2 or 4 processes" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert exchange.main([*out, "--cases", "zzz"]) == 2
    assert "d-b32-32k-w2" in capsys.readouterr().err
    assert exchange.main(["--out", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err


def words(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def test_the_committed_figures_are_whole():
    rows = results.load(RESULTS)
    keys = {results.key_of(row) for row in rows}
    stages = ("exchange", "exchange-eager", "chain", "chain-eager")
    for case in exchange.cases(2, "*"):
        for stage in stages:
            for backend in exchange.BACKENDS:
                assert (case.name, stage, backend, "exact") in keys
    assert len(keys) == len(rows) == len(DECODE) * len(stages) * len(exchange.BACKENDS)
    for row in rows:
        assert row["checked"] and set(results.FIELDS) <= set(row)
        assert row["spread_us"][0] <= row["median_us"] <= row["spread_us"][1]
        assert (row["payload_bytes"] == 0) == (row["backend"] == "none")
        assert row["timing"] == ("eager" if row["stage"].endswith("-eager") else "graph")
    assert json.loads(RESULTS.read_text())["schema"] == results.SCHEMA


def test_tagged_stores_add_at_most_five_microseconds_to_a_chain():
    asked = [
        row
        for row in results.load(RESULTS)
        if row["stage"] == "chain" and row["backend"] == "one-sided-tagged"
    ]
    assert len(asked) == len(DECODE)
    assert all(row["added_us"] <= 5 for row in asked)
