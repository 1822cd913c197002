"""What a decode costs the host, from torch: `python -m benchmarks.host`.

Two ranks share this GPU, a stream each, with the one-sided exchange between them; calls are issued
in turn and counted one by one. Rounds are short enough for the queue of launches never to fill, so
what is timed is the host's work alone. The kernels' answers are checked.

  torch-op                    `torch.add(a, b, out=c)`, the yardstick
  decode-direct-eager         a decode on the direct route, on the tensors of earlier calls
  decode-direct-eager-fresh   the same with query tensors that the plan has not seen
  decode-direct-graph         one decode of a captured graph of several
  decode-dlpack-eager         a decode on the dlpack route, a copy in the collective's place
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np

from benchmarks import check, results, roofline
from benchmarks.__main__ import add_run_options, fail, parser
from benchmarks.cases import HOST, decode
from benchmarks.inputs import Pool
from benchmarks.ranks import Rank
from benchmarks.report import line
from benchmarks.run import Machine
from benchmarks.timing import Times

_CASE = decode("host", (8192,) * 8, 2)
_GRAPH_DECODES = 12
_ROUNDS, _CALLS = 50, 20


def measure() -> Iterator[tuple[str, Times]]:
    """The times of every case of `cases.HOST`; needs a Hopper GPU that torch sees."""
    import torch

    a, b, c = torch.ones(3, 1024, device="cuda")
    yield "torch-op", _times(lambda _: torch.add(a, b, out=c), 1)
    ranks = _Ranks("direct")
    yield "decode-direct-eager", ranks.eager()
    yield "decode-direct-eager-fresh", ranks.eager(fresh=True)
    yield "decode-direct-graph", ranks.graph()
    with mock.patch.multiple(
        "msa_icp_torch.exchange",
        check_group=lambda *_: None,
        all_to_all=lambda received, message, _: received.copy_(message),
    ):
        yield "decode-dlpack-eager", _Ranks("dlpack").eager()


class _Ranks:
    """The ranks, each with a stream."""

    def __init__(self, route: str) -> None:
        import torch

        self._torch = torch
        self._inputs = Pool([_CASE], 0).inputs(_CASE, "mosaic")
        self._ranks = [
            Rank(_CASE, self._inputs, rank, route=route) for rank in range(_CASE.world_size)
        ]
        self._streams = [torch.cuda.Stream() for _ in self._ranks]
        self._calls = 0
        storages = [rank.comm.storage.data_ptr() for rank in self._ranks]
        for rank in self._ranks:
            rank.warm(storages if route == "direct" else ())

    def eager(self, *, fresh: bool = False) -> Times:
        """A call of every rank; `fresh` brings a query tensor of its own to every call."""
        own = self._ranks[0].sets[0]["queries"]
        queries = [own] * _CALLS

        def renew() -> None:
            queries[:] = [own.clone() for _ in queries]

        def call(number: int) -> None:
            self._each(lambda rank: rank.decode(2 * self._calls, queries[number]))  # set 0
            self._calls += 1

        call(0)
        self._check()
        overhead = _times(lambda _: self._each(lambda _: None), len(self._ranks))
        found = _times(call, len(self._ranks), renew if fresh else lambda: None)
        return Times(tuple(x - overhead.median for x in found.us), found.method)

    def graph(self) -> Times:
        """A replay of every rank's graph, divided by its decodes."""
        graphs = {rank: self._torch.cuda.CUDAGraph() for rank in self._ranks}
        for (rank, graph), stream in zip(graphs.items(), self._streams, strict=True):
            with self._torch.cuda.graph(graph, stream=stream):
                for layer in range(_GRAPH_DECODES):
                    rank.decode(2 * (self._calls + layer))
        for rank in self._ranks:
            rank.output.zero_()
        self._each(lambda rank: graphs[rank].replay())
        self._check()
        each = len(graphs) * _GRAPH_DECODES
        return _times(lambda _: self._each(lambda rank: graphs[rank].replay()), each)

    def _each(self, run: Callable[[Rank], Any]) -> None:
        for rank, stream in zip(self._ranks, self._streams, strict=True):
            with self._torch.cuda.stream(stream):
                run(rank)

    def _check(self) -> None:
        """Raises unless both ranks' scores are right, and ids where they exchange rows."""
        self._torch.cuda.synchronize()
        for rank in self._ranks:
            arrays = self._inputs.fixed | self._inputs.sets[0]
            check.check_scores(_CASE, arrays | {"scores": rank.sets[0]["scores"]}, "exact")
        if self._ranks[0].plan.route == "direct":  # a copy is no exchange
            sent = np.stack([rank.sent(0) for rank in self._ranks], axis=1)
            for rank, received in zip(self._ranks, sent, strict=True):
                rank.check(received)


def _times(
    call: Callable[[int], Any], each: int, before: Callable[[], Any] = lambda: None
) -> Times:
    """Host microseconds of `_ROUNDS` rounds of calls that count `each`-fold."""
    import torch

    for number in range(_CALLS):
        call(number)
    found = []
    for _ in range(_ROUNDS):
        before()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for number in range(_CALLS):
            call(number)
        found.append((time.perf_counter() - start) * 1e6 / (_CALLS * each))
    torch.cuda.synchronize()
    return Times(tuple(found), "host")


def main(arguments: Sequence[str]) -> int:
    found = parser("python -m benchmarks.host", __doc__)
    parsed = add_run_options(found, "<device>.json", budget=120.0).parse_args(arguments)
    end = time.monotonic() + parsed.budget_seconds
    if importlib.util.find_spec("torch"):
        import msa_icp_torch  # noqa: F401  (before JAX takes the GPU's memory)
    machine = Machine()
    out = parsed.out or machine.default_out
    try:
        results.prepare(out)
    except results.Refused as error:
        return fail(str(error))
    if not machine.mosaic:
        reason = "it takes a Hopper GPU that JAX and torch see"
        print(f"absent: {reason}")
        results.save(out, [], {"host": reason})
        return 0
    ceilings = roofline.measure(machine.torch)
    setting = results.Setting(machine.device, machine.torch_version, ceilings, parsed.commit)
    rows: dict[tuple[str, ...], results.Row] = {}
    for case, times in measure():
        row = setting.row((case, "host", HOST[case][0], "exact"), times, None)
        rows[results.key_of(row)] = row
        print(line(row, rows), flush=True)
        results.save(out, [row])
        if time.monotonic() > end:
            break
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
