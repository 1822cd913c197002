"""The stage jax-chain: on CPU devices its programs run and are checked, for GPUs they lower."""

from __future__ import annotations

import dataclasses

import fake_cuda
import jax
import numpy as np
import peer_comm
import pytest
from chains import make_mesh

from benchmarks import jax_chain, results, run
from benchmarks.cases import DECODE, QUICK, Decode, of_ranks
from benchmarks.check import Mismatch
from benchmarks.stages import Inputs, Pool

FOUR = next(case for case in QUICK if isinstance(case, Decode))
TWO = dataclasses.replace(FOUR, world_size=2)


def inputs_of(case: Decode, backend: str) -> Inputs:
    return Pool([case], 0).inputs(case, backend)


@pytest.fixture
def portable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The portable backend, without kernels, a layer or two."""
    monkeypatch.setattr(jax_chain, "BACKEND", "xla")
    monkeypatch.setattr(peer_comm, "delayed", lambda value, naps: value)
    for name, value in {"_LAYERS": 2, "_LOOPS": 1, "_ROUNDS": 2}.items():
        monkeypatch.setattr(jax_chain, name, value)


@pytest.mark.parametrize("transport", ["none", "all-to-all", "collective"])
def test_every_rank_is_checked_and_timed(portable, transport):
    mesh, structs = make_mesh(2), Pool([TWO], 0).structs(TWO, "xla")
    for ready in (None, jax_chain.compile_for(TWO, transport, mesh, structs, 2)):
        times = jax_chain.measure(TWO, inputs_of(TWO, "xla"), transport, mesh, ready)
        assert len(times.us) == 2 and times.more["host_us"] > 0


def test_wrong_ids_are_not_timed(portable, monkeypatch):
    monkeypatch.setattr(jax_chain, "_message", lambda *_: np.zeros((2, 2, 6, 33), np.int32))
    with pytest.raises(Mismatch):
        jax_chain.measure(TWO, inputs_of(TWO, "xla"), "collective", make_mesh(2))


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("transport", jax_chain.TRANSPORTS)
def test_the_kernels_lower(monkeypatch, transport, alone):
    if alone and transport not in jax_chain.ALONE:
        pytest.skip("a collective takes more ranks than one")
    fake_cuda.install(monkeypatch)
    case = FOUR if alone else TWO
    mesh = None if alone else make_mesh(2)
    chain = jax_chain.Chain(case, transport, mesh)
    arguments = chain.abstract(Pool([case], 0).structs(case, "mosaic"), 2)
    text = chain.jitted.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    kernels = {"none": 2, "all-to-all": 0, "collective": 3}.get(transport, 3)
    assert text.count("@mosaic_gpu_v2") == kernels  # a layer, that all are calls of
    assert ("all_to_all" in text) == (transport in ("all-to-all", "collective"))


def test_the_nap_before_a_program_lowers(monkeypatch):
    fake_cuda.install(monkeypatch)
    word = jax.ShapeDtypeStruct((1,), np.int32)
    nap = jax.jit(lambda word: peer_comm.delayed(word, 3))  # of its own: others may be patched
    text = nap.trace(word).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 1


def test_a_run_compiles_its_programs_ahead(portable, monkeypatch, tmp_path, capsys):
    """As it does on GPUs: on two devices of a mesh every transport that needs no kernel."""
    mesh, attempt = make_mesh(2), run.Runner._attempt
    wanted = list(run.chain_items(TWO, ("none", "all-to-all", "collective")))

    def prepared(runner, item):
        if not runner.ready:
            runner._prepare()
        attempt(runner, item)

    monkeypatch.setattr(run.Runner, "_attempt", prepared)
    monkeypatch.setattr(jax_chain.Chain, "us_of", lambda self, calls: 1e3 * calls)  # no noise
    runner = run.Runner(run.Machine(), wanted, tmp_path / "r.json", commit="abc", mesh=mesh)
    assert runner.run() == 0, capsys.readouterr().out
    assert len(runner.ready) == 3 and None not in runner.ready.values()
    rows = results.load(tmp_path / "r.json")
    assert [key[4] for key in rows] == ["none", "all-to-all", "collective"]
    assert all(row["device"] == "cpu x2" and row["host_us"] > 0 for row in rows.values())


def test_the_cases_of_two_gpus():
    found = of_ranks(2)
    assert [case.world_size for case in found] == [2] * len(DECODE)


def test_without_two_gpus_it_says_so(capsys, tmp_path):
    assert jax_chain.main(["--out", str(tmp_path / "r.json")]) == 2
    assert "two Hopper GPUs in one process, JAX sees 0" in capsys.readouterr().err
    assert jax.device_count() == 4
