"""Launches that come again, as CUDA graphs: when, of what, and what the driver is asked for."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra torch)")

from msa_icp_jax.ops._mosaic import aot  # noqa: E402
from msa_icp_torch import direct, graphs  # noqa: E402

STREAM, CAPTURES = 7, 8


class Driver:
    """Stands for the CUDA driver: what it was asked for, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.refused = ""
        self.graphs = 100
        self.mode = 0

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name == "cuThreadExchangeStreamCaptureMode":
                mode = arguments[0]._obj
                self.mode, mode.value = mode.value, self.mode
            elif name == self.refused:
                return 801
            else:
                assert self.mode == 2, "what other captures forbid"
            if name == "cuStreamCreate":
                arguments[0]._obj.value = CAPTURES
            if name == "cuGraphInstantiateWithFlags":
                self.graphs += 1
                arguments[0]._obj.value = self.graphs
            return 0

        return call


class Card:
    """Stands for a GPU: what was put on streams, in order."""

    def __init__(self, monkeypatch: Any) -> None:
        self.capturing = False
        self.seen: list[Any] = []
        self.driver = Driver()
        values = {
            "_cuda_getDevice": lambda: 0,
            "_cuda_getCurrentRawStream": lambda _: STREAM,
            "_cuda_isCurrentStreamCapturing": lambda: self.capturing,
        }
        for name, value in values.items():
            monkeypatch.setattr(torch._C, name, value, raising=False)
        monkeypatch.setattr(graphs, "_driver", lambda: self.driver)
        monkeypatch.setattr(graphs, "_launcher", lambda: self.launch_graph)
        self.stream = direct.Stream(torch.device("cuda", 0))
        self.stream._threads.ready = True

    def launch_graph(self, graph: int, stream: int) -> int:
        self.seen.append(("graph", graph, stream))
        return 0

    def launch_kernel(self, kernel: int, stream: int, address: int) -> None:
        first = ctypes.cast(address, ctypes.POINTER(ctypes.c_void_p))[0]
        self.seen.append((kernel, first, stream))

    def bound(self) -> direct.BoundLaunches:
        """Two kernels; the first takes the queries, at 1000."""
        array = ctypes.c_void_p * 1
        launches = [aot.bound_kernel(self.launch_kernel, i, array(1000 * i)) for i in (1, 2)]
        return direct.BoundLaunches(launches, [[(0, 0)]])

    def repeat(self, bound: direct.BoundLaunches) -> list[Any]:
        self.seen.clear()
        self.stream.repeat(bound)
        return [*self.seen]


@pytest.fixture
def card(monkeypatch: Any) -> Card:
    return Card(monkeypatch)


ONE_BY_ONE = [(1, 1000, STREAM), (2, 2000, STREAM)]
CAPTURED = [(1, 1000, CAPTURES), (2, 2000, CAPTURES)]


def test_launches_that_come_again_become_a_graph(card):
    bound = card.bound()
    for _ in range(direct._GRAPH_FROM):
        assert card.repeat(bound) == ONE_BY_ONE
    assert card.repeat(bound) == [*CAPTURED, ("graph", 101, STREAM)]
    assert card.repeat(bound) == [("graph", 101, STREAM)]
    assert card.driver.calls.count("cuGraphInstantiateWithFlags") == 1
    assert card.driver.mode == 0


def test_behind_queries_that_move_the_rest_is_a_graph(card):
    """Those behind the launch that takes the queries, and one alone is no graph."""
    bound = card.bound()
    third = aot.bound_kernel(card.launch_kernel, 3, (ctypes.c_void_p * 1)(3000))
    bound = direct.BoundLaunches([*bound.launches, third], bound.places)
    for i in range(direct._GRAPH_FROM):
        once = bound.with_queries(5000 + i)
        assert card.repeat(once) == [(1, 5000 + i, STREAM), (2, 2000, STREAM), (3, 3000, STREAM)]
    found = card.repeat(bound.with_queries(9000))
    captured = [(2, 2000, CAPTURES), (3, 3000, CAPTURES)]
    assert found == [*captured, (1, 9000, STREAM), ("graph", 101, STREAM)]
    assert bound.launches[0].arguments[0] == 1000


def test_one_launch_is_no_graph(card):
    bound = card.bound()
    for i in range(10):
        found = card.repeat(bound.with_queries(5000 + i))
        assert found == [(1, 5000 + i, STREAM), (2, 2000, STREAM)]
    assert not card.driver.calls


def test_launches_that_are_no_kernels_stay_what_they_are(card):
    ran = []
    bound = card.bound()
    bound = direct.BoundLaunches([*bound.launches, aot.BoundStep(lambda: ran.append(1))], None)
    for _ in range(10):
        assert card.repeat(bound) == ONE_BY_ONE
    assert len(ran) == 10
    assert not card.driver.calls


def test_a_capture_gets_the_kernels(card):
    bound = card.bound()
    card.capturing = True
    for _ in range(10):
        assert card.repeat(bound) == ONE_BY_ONE
    assert not card.driver.calls
    card.capturing = False
    for _ in range(direct._GRAPH_FROM + 1):
        card.repeat(bound)
    card.capturing = True
    assert card.repeat(bound) == ONE_BY_ONE


@pytest.mark.parametrize(
    "name",
    [
        "cuStreamCreate",
        "cuStreamBeginCapture_v2",
        "cuStreamEndCapture",
        "cuGraphInstantiateWithFlags",
    ],
)
def test_where_the_driver_refuses_launches_stay_what_they_are(card, name, caplog):
    card.driver.refused = name
    bounds = [card.bound(), card.bound()]
    for _ in range(10):
        for bound in bounds:
            assert card.repeat(bound)[-2:] == ONE_BY_ONE
    assert card.driver.calls.count(name) == 1
    assert len(caplog.records) == 1
    assert f"{name} of the CUDA driver failed with code 801" in caplog.text
    assert card.driver.mode == 0


def test_a_launch_that_fails_raises(card, monkeypatch):
    bound = card.bound()
    monkeypatch.setattr(card, "launch_graph", lambda *_: 700)
    for _ in range(direct._GRAPH_FROM):
        card.repeat(bound)
    with pytest.raises(graphs.GraphError, match=r"cuGraphLaunch .* failed with code 700"):
        card.repeat(bound)


def test_a_graph_goes_with_its_launches(card):
    bound = card.bound()
    for _ in range(direct._GRAPH_FROM + 1):
        card.repeat(bound)
    assert "cuGraphExecDestroy" not in card.driver.calls
    del bound
    gc.collect()
    assert card.driver.calls.count("cuGraphExecDestroy") == 1
    assert card.driver.mode == 0


def test_there_are_only_so_many_graphs_at_a_time(card, monkeypatch):
    """Each takes memory of the GPU's; calls beyond are launched one by one, until others go."""
    monkeypatch.setattr(graphs, "MOST", 3)
    bounds = [card.bound() for _ in range(5)]
    for _ in range(direct._GRAPH_FROM + 2):
        found = [card.repeat(bound) for bound in bounds]
    assert found[:3] == [[("graph", 101 + i, STREAM)] for i in range(3)]
    assert found[3:] == [ONE_BY_ONE] * 2
    del bounds[0]
    gc.collect()
    bound = card.bound()
    for _ in range(direct._GRAPH_FROM + 2):
        found = card.repeat(bound)
    assert found == [("graph", 104, STREAM)]
