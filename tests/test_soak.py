"""The soak program itself: that it passes, and that it sees what it is there to see."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

PROGRAM = Path(__file__).parents[1] / "tools/soak.py"
SHORT = ["--steps", "30", "--check-every", "10"]


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    spec = importlib.util.spec_from_file_location("soak", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak"] = module
    spec.loader.exec_module(module)
    module.SHAPES = [(3, 1), (8, 4)]  # every shape compiles a program
    return module


@pytest.mark.parametrize("more", [[], ["--legacy", "--world-size", "2", "--page-size", "256"]])
def test_a_short_soak_passes(soak: ModuleType, more: list[str], capsys: Any) -> None:
    assert soak.main([*SHORT, *more]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[-1].startswith("soak: 30 steps right")
    assert "device memory +0 bytes" in lines[-1]


def test_one_wrong_id_is_seen(soak: ModuleType, monkeypatch: Any) -> None:
    right, asked = soak.Soak.answer, []

    def wrong_once(self: Any, case: Any) -> Any:
        ids = right(self, case)
        asked.append(case)
        if len(asked) == 3:
            ids[-1, -1, 0] += 1
        return ids

    monkeypatch.setattr(soak.Soak, "answer", wrong_once)
    with pytest.raises(AssertionError, match="steps gave wrong ids"):
        soak.main(SHORT)


def test_a_protocol_fault_is_seen(soak: ModuleType, monkeypatch: Any) -> None:
    step = soak.Soak.step

    def faulty(self: Any, batch: Any) -> None:
        if self.calls == 22:
            comm = self.ranks.get_comm(self.state.comm)
            comm["publish_generations"][1, 0, 0] += 7
            self.state = self.state._replace(comm=self.ranks.put_comm(comm))
        step(self, batch)

    monkeypatch.setattr(soak.Soak, "step", faulty)
    with pytest.raises(AssertionError, match=r"wrong ids|Arrays are not equal"):
        soak.main(SHORT)


def test_growth_of_device_memory_is_seen(soak: ModuleType, monkeypatch: Any) -> None:
    step, kept = soak.Soak.step, []

    def leaking(self: Any, batch: Any) -> None:
        step(self, batch)
        kept.append(self.ranks.put(np.zeros(1 << 16, np.int32)))

    monkeypatch.setattr(soak.Soak, "step", leaking)
    with pytest.raises(AssertionError, match="the device's memory grew"):
        soak.main(SHORT)
