"""The exchange benchmark, as far as it goes without GPUs: cases, checks, what it refuses."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import numpy as np
import oracle
import pytest

from benchmarks import check, exchange, results
from benchmarks.cases import DECODE, QUICK, of_ranks
from benchmarks.stages import Pool
from benchmarks.timing import Times

RESULTS = Path(exchange.__file__).parent / "results" / "h200-x2.json"


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_decode_case_runs_at_the_ranks_there_are(world_size):
    found = of_ranks(world_size)
    assert len({case.name for case in found}) == len(found) == len(DECODE)
    assert all(case.world_size == world_size for case in found)
    assert all(f"-w{world_size}" in case.name for case in found)
    same = [case.name for case in DECODE if case.world_size == world_size]
    assert [case.name for case in found[: len(same)]] == same


def test_rows_of_tagged_words_are_larger():
    case = next(case for case in of_ranks(2) if case.name == "d-b32-32k-w2")
    sent = [exchange.payload(case, backend) for backend in exchange.BACKENDS]
    assert sent == [0, 32 * 2 * 132, 32 * 2 * 132, 32 * 2 * 256]


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("backend", exchange.BACKENDS[1:])
def test_a_transport_is_checked_before_it_is_timed(backend, right, monkeypatch):
    """On a plan that computes with numpy; every rank's rows are this one's."""
    torch = pytest.importorskip("torch", reason="torch is not installed (extra torch)")
    case, calls, addresses = QUICK[0], [], []

    class Plan:
        def init_comm(self, storage):
            assert (storage is None) == (backend == "nccl")
            return types.SimpleNamespace(errors=np.zeros(1, np.int32), connect=addresses.extend)

        def decode_score_shape(self):
            return (case.tokens, 4, case.columns)

        def warmup(self, keys, **shapes):
            assert shapes["tagged"] == (backend != "one-sided-legacy")

        def decode(self, query, keys, table, lens, counts, scores, output, *, slot, **_):
            calls.append(slot)
            scores.normal_()
            rows = oracle.select(scores.numpy(), counts.numpy(), 0, 1)
            received = np.stack([rows[: 4 // case.world_size]] * case.world_size)
            ids = oracle.merge(received, counts.numpy(), 0, 1)
            output.copy_(torch.from_numpy(ids if right else ids - 1))

    monkeypatch.setattr(exchange, "plan_of", lambda *_: Plan())
    monkeypatch.setattr(exchange, "storage_of", lambda _: "memory")
    monkeypatch.setattr(exchange, "addresses_of", lambda storage: [16, 32])
    monkeypatch.setattr(exchange, "delivered", lambda rows: np.stack([rows[0]] * len(rows)))
    monkeypatch.setattr(exchange, "in_graph", lambda links, runs, before: Times((1.0,), "graph"))
    inputs = Pool([case], 0).inputs(case, "mosaic")
    if right:
        assert exchange.over(backend, case, inputs, 0).median == 1.0
    else:
        with pytest.raises(check.Mismatch, match="ids of token 0"):
            exchange.over(backend, case, inputs, 0)
    assert calls == [0, 1, 2]
    assert addresses == ([] if backend == "nccl" else [16, 32])


def test_help_takes_no_torch(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit) as ended:
        exchange.main(["--help"])
    assert ended.value.code == 0 and "torchrun --nproc-per-node 2" in capsys.readouterr().out


def fake_torch(monkeypatch, gpus):
    torch = types.SimpleNamespace(cuda=types.SimpleNamespace(device_count=lambda: gpus))
    monkeypatch.setattr(exchange.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "torch", torch)
    for name in ("LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_too_few_gpus_are_said(monkeypatch, capsys):
    for gpus in (0, 1):
        fake_torch(monkeypatch, gpus)
        assert exchange.main(["--out", "never.json"]) == 2
        said = capsys.readouterr().err
        assert f"two Hopper GPUs of one host, torch sees {gpus}" in said
    monkeypatch.setattr(exchange.importlib.util, "find_spec", lambda name: None)
    assert exchange.main(["--out", "never.json"]) == 2
    said = capsys.readouterr().err
    assert "no torch" in said and "make bench CUDA=13" in said and said.count("\n") == 1


def test_it_is_started_with_torchrun(monkeypatch, capsys, tmp_path):
    fake_torch(monkeypatch, 2)
    out = ["--out", str(tmp_path / "r.json")]
    assert exchange.main(out) == 2 and "torchrun" in capsys.readouterr().err
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert (
        exchange.main(out) == 2
        and "2 or 4 processes of torchrun, there are 3" in capsys.readouterr().err
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert exchange.main(["--out", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err


def test_the_committed_figures_are_whole():
    rows = results.load(RESULTS)
    for case in of_ranks(2):
        for backend in exchange.BACKENDS:
            row = rows[case.name, "chain", backend, "exact"]
            assert row["checked"]
            assert row["payload_bytes"] == exchange.payload(case, backend)
            assert row["timing"] == "graph"


def test_tagged_stores_add_at_most_five_microseconds_to_a_chain():
    rows = results.load(RESULTS)
    added = [
        rows[case.name, "chain", "one-sided-tagged", "exact"]["added_us"] for case in of_ranks(2)
    ]
    assert all(us <= 5 for us in added)
