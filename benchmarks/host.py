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

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np

from benchmarks import __main__, check
from benchmarks.cases import decode
from benchmarks.exchange import Rank
from benchmarks.stages import Pool
from benchmarks.timing import Times, on_clock

_CASE = decode("host", 16, 8192, 2)  # of 16, JAX takes the receive storage where it lies
_GRAPH_DECODES = 12
_ROUNDS, _CALLS = 50, 20


def measure(name: str) -> Times:
    """The times of a case of `cases.HOST`; needs a Hopper GPU that torch sees."""
    import torch

    if name == "torch-op":
        a, b, c = torch.ones(3, 1024, device="cuda")
        return _times(lambda _: torch.add(a, b, out=c), 1)
    with mock.patch.multiple(  # of the dlpack route
        "msa_icp_torch.exchange",
        check_group=lambda *_: None,
        all_to_all=lambda received, message, _: received.copy_(message),
    ):
        ranks = _ranks(name.split("-")[1])
        graph = name == "decode-direct-graph"
        return ranks.graph() if graph else ranks.eager(fresh=name.endswith("fresh"))


class _Ranks:
    """The ranks, each with a stream."""

    def __init__(self, route: str) -> None:
        import torch

        self._torch, self._calls = torch, 0
        self._inputs = Pool([_CASE], 0).inputs(_CASE, "mosaic")
        numbers = range(_CASE.world_size)
        self._ranks = [Rank(_CASE, self._inputs, number, route=route) for number in numbers]
        self._streams = [torch.cuda.Stream() for _ in numbers]
        storages = [rank.comm.storage.data_ptr() for rank in self._ranks]
        for rank in self._ranks:
            rank.warm(storages if route == "direct" else ())

    def eager(self, *, fresh: bool) -> Times:
        """A call of every rank; `fresh` brings a query tensor of its own to every call."""
        own = self._ranks[0].sets[0]["queries"]
        queries = [own] * _CALLS

        def renew() -> None:
            queries[:] = [own.clone() for _ in queries] if fresh else queries

        def call(number: int) -> None:
            self._each(lambda rank: rank.decode(2 * self._calls, queries[number]))  # set 0
            self._calls += 1

        call(0)
        self._check()
        overhead = _times(lambda _: self._each(lambda _: None), len(self._ranks))
        found = _times(call, len(self._ranks), renew)
        return Times(tuple(x - overhead.median for x in found.us), found.method)

    def graph(self) -> Times:
        """A replay of every rank's graph, divided by its decodes."""
        graphs = {rank: self._torch.cuda.CUDAGraph() for rank in self._ranks}
        for (rank, graph), stream in zip(graphs.items(), self._streams, strict=True):
            with self._torch.cuda.graph(graph, stream=stream):
                for layer in range(_GRAPH_DECODES):
                    rank.decode(2 * (self._calls + layer))
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


_ranks = functools.cache(_Ranks)


def _times(call: Callable[[int], Any], each: int, before: Callable[[], Any] = list) -> Times:
    """Host microseconds of `_ROUNDS` rounds of calls that count `each`-fold."""
    import torch

    def all_calls() -> None:
        for number in range(_CALLS):
            call(number)

    def ready() -> None:
        before()
        torch.cuda.synchronize()

    all_calls()
    found = on_clock(all_calls, _ROUNDS, _CALLS * each, "host", ready)
    torch.cuda.synchronize()
    return found


def main(arguments: Sequence[str]) -> int:
    return __main__.main(["--stages", "host", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
