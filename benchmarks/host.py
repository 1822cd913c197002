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

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks import options, results, roofline
from benchmarks.cases import HOST
from benchmarks.run import Machine
from benchmarks.timing import Times

# A bare checkout has the package beside this one; an installed one comes first.
sys.path.append(str(Path(__file__).parents[1] / "interop"))

RANKS, PAGE_SIZE = 2, 128
REQUESTS, CONTEXT, PAGES = 8, 8192, 512
MAX_TOKENS = 64  # of a decode step: what the receive storage has room for
INIT_BLOCKS, LOCAL_BLOCKS, TOPK = 1, 1, 16
GRAPH_DECODES = 12
_ROUNDS, _CALLS = 50, 20


def measure() -> Iterator[tuple[str, Times]]:
    """The times of every case of `cases.HOST`; needs a Hopper GPU that torch sees."""
    import torch

    yield "torch-op", _torch_op(torch)
    ranks = _Ranks(torch, "direct")
    yield "decode-direct-eager", ranks.eager(fresh=False)
    yield "decode-direct-eager-fresh", ranks.eager(fresh=True)
    yield "decode-direct-graph", ranks.graph()
    with mock.patch.multiple(
        "msa_icp_torch.exchange",
        check_group=lambda *_: None,
        all_to_all=lambda received, message, _: received.copy_(message),
    ):
        yield "decode-dlpack-eager", _Ranks(torch, "dlpack").eager(fresh=False)


def _torch_op(torch: Any) -> Times:
    a, b, c = torch.ones(3, 1024, device="cuda")
    return _times(lambda _: torch.add(a, b, out=c), torch.cuda.synchronize, 1)


class _Ranks:
    """The ranks' plans and tensors."""

    def __init__(self, torch: Any, route: str) -> None:
        import msa_icp_torch

        self._torch = torch
        device = torch.device("cuda", torch.cuda.current_device())
        self._device = device
        self._plans = [
            msa_icp_torch.prepare_msa_icp_indexer(
                world_size=RANKS,
                rank=rank,
                num_index_heads=4,
                page_size=PAGE_SIZE,
                init_blocks=INIT_BLOCKS,
                local_blocks=LOCAL_BLOCKS,
                max_decode_tokens=MAX_TOKENS,
                max_decode_query_len=1,
                max_num_batched_tokens=REQUESTS,
                max_num_seqs=REQUESTS,
                max_model_len=CONTEXT,
                num_sparse_layers=3,
                device=device,
                backend="mosaic",
                route=route,
            )
            for rank in range(RANKS)
        ]
        self._comms = [plan.init_comm() for plan in self._plans]
        self._streams = [torch.cuda.Stream() for _ in self._plans]
        self._calls = 0
        rng = np.random.default_rng(0)
        self._keys = self._small(rng, PAGES, PAGE_SIZE, 128)
        self._query = self._small(rng, REQUESTS, 4, 128)
        table = rng.permutation(PAGES).astype(np.int32).reshape(REQUESTS, -1)
        self._table = torch.from_numpy(table).to(device)
        self._lens = torch.full((REQUESTS,), CONTEXT, dtype=torch.int32, device=device)
        self._counts = torch.full_like(self._lens, CONTEXT // 128)
        self._steps = [self._step(plan) for plan in self._plans]
        if route == "direct":
            self._connect()
        for plan, step, comm in zip(self._plans, self._steps, self._comms, strict=True):
            plan.warmup(
                step[1],
                table_width=self._table.shape[1],
                batch_sizes=[REQUESTS],
                comm=comm,
                tagged=True,
                prefill=False,
            )

    def _small(self, rng: np.random.Generator, *shape: int) -> Any:
        """Integers whose products and sums are exact, so that every way gives the same scores."""
        values = self._torch.from_numpy(rng.integers(-3, 4, shape).astype(np.float32))
        return values.to(self._device, self._torch.float8_e4m3fn)

    def _step(self, plan: Any) -> list[Any]:
        rows = PAGE_SIZE // RANKS
        keys = self._keys[:, plan.rank * rows : (plan.rank + 1) * rows].contiguous()
        shape = (REQUESTS, *plan.decode_score_shape()[1:])
        scores = self._torch.empty(shape, device=self._device)
        output = self._torch.zeros(
            (REQUESTS, 4 // RANKS, TOPK), dtype=self._torch.int32, device=self._device
        )
        return [self._query, keys, self._table, self._lens, self._counts, scores, output]

    def _connect(self) -> None:
        """Gives every rank the addresses of all ranks' storage: the one-sided exchange."""
        addresses = [comm.tagged_recv.data_ptr() for comm in self._comms]
        for plan, comm in zip(self._plans, self._comms, strict=True):
            comm.tagged_recv_bases.copy_(self._torch.tensor(addresses))
            plan.check_comm(comm)

    def eager(self, *, fresh: bool) -> Times:
        """A call of every rank; `fresh` brings a query tensor of its own to every call."""
        queries = [self._query] * _CALLS

        def renew() -> None:
            queries[:] = [self._query.clone() for _ in queries]

        def call(number: int) -> None:
            for rank, stream in enumerate(self._streams):
                with self._torch.cuda.stream(stream):
                    self._decode(rank, self._calls, queries[number])
            self._calls += 1

        call(0)
        self._torch.cuda.synchronize()
        self._check_scores()
        if self._plans[0].route == "direct":  # without an exchange there is no answer
            self._check()
        overhead = _times(self._switch_streams, self._torch.cuda.synchronize, RANKS)
        found = _times(call, self._torch.cuda.synchronize, RANKS, renew if fresh else _nothing)
        return Times(tuple(x - overhead.median for x in found.us), found.method)

    def graph(self) -> Times:
        """A replay of every rank's graph, divided by its decodes."""
        graphs = [self._torch.cuda.CUDAGraph() for _ in self._plans]
        for rank, (graph, stream) in enumerate(zip(graphs, self._streams, strict=True)):
            with self._torch.cuda.graph(graph, stream=stream):
                for layer in range(GRAPH_DECODES):
                    self._decode(rank, self._calls + layer, self._query)

        def replay(_: int) -> None:
            for graph, stream in zip(graphs, self._streams, strict=True):
                with self._torch.cuda.stream(stream):
                    graph.replay()

        for step in self._steps:
            step[-1].zero_()
        self._torch.cuda.synchronize()
        replay(0)
        self._torch.cuda.synchronize()
        self._check()
        return _times(replay, self._torch.cuda.synchronize, RANKS * GRAPH_DECODES)

    def _switch_streams(self, _: int) -> None:
        for stream in self._streams:
            with self._torch.cuda.stream(stream):
                pass

    def _decode(self, rank: int, slot: int, query: Any) -> None:
        self._plans[rank].decode(
            query,
            *self._steps[rank][1:],
            comm=self._comms[rank],
            slot=slot,
            tagged=True,
            decode_query_len=1,
        )

    def _scores(self, rows: slice) -> Any:
        """The largest product of every block's rows [B, 4, blocks]."""
        pages = self._keys[:, rows].float()[self._table.long()]
        return self._torch.einsum("bhd,bprd->bhpr", self._query.float(), pages).amax(-1)

    def _check_scores(self) -> None:
        """Raises unless both ranks' score planes are right."""
        rows = PAGE_SIZE // RANKS
        for rank, step in enumerate(self._steps):
            want = self._scores(slice(rank * rows, (rank + 1) * rows))
            if not self._torch.equal(step[-2][..., : want.shape[-1]], want):
                raise RuntimeError(f"rank {rank} scored otherwise")

    def _check(self) -> None:
        """Raises unless both ranks chose what one rank with all keys chooses."""
        torch, scores = self._torch, self._scores(slice(None))
        scores[..., :INIT_BLOCKS] = torch.inf
        scores[..., -LOCAL_BLOCKS:] = torch.inf
        best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :TOPK]
        want = best.sort(dim=-1).values.to(torch.int32)
        found = torch.cat([step[-1] for step in self._steps], dim=1)
        faults = [comm.errors.item() for comm in self._comms]
        if any(faults) or not torch.equal(found, want):
            raise RuntimeError(f"the ranks chose other blocks, or counted faults: {faults}")


def _nothing() -> None:
    """What most cases do before a round."""


def _times(
    call: Callable[[int], Any],
    synchronize: Callable[[], Any],
    each: int,
    before: Callable[[], None] = _nothing,
) -> Times:
    """Host microseconds of `_ROUNDS` rounds of calls that count `each`-fold."""
    for number in range(_CALLS):
        call(number)
    found = []
    for _ in range(_ROUNDS):
        before()
        synchronize()
        start = time.perf_counter()
        for number in range(_CALLS):
            call(number)
        found.append((time.perf_counter() - start) * 1e6 / (_CALLS * each))
    synchronize()
    return Times(tuple(found), "host")


def host_rows(machine: Machine, commit: str | None, seconds: float) -> Iterator[results.Row]:
    """Rows of the stage "host", as they are measured; stops when the time is up."""
    end = time.monotonic() + seconds
    ceilings = roofline.measure(machine.torch)
    setting = results.Setting(machine.device, machine.torch_version, ceilings, commit)
    for case, times in measure():
        yield results.row((case, "host", HOST[case], "exact"), times, None, setting)
        if time.monotonic() > end:
            return


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="result file, made or merged into; by default figures are only printed",
    )
    options.add_commit(parser)
    options.add_budget(parser, default=120.0)
    parsed = parser.parse_args(arguments)
    if parsed.out:
        try:
            results.prepare(parsed.out)
        except options.Refused as error:
            parser.exit(2, f"benchmarks.host: {error}\n")
    if importlib.util.find_spec("torch"):
        import msa_icp_torch  # noqa: F401  (before JAX takes the GPU's memory)
    machine = Machine()
    if machine.torch is None or not machine.mosaic:
        reason = "it takes a Hopper GPU that JAX and torch see"
        print(f"absent: {reason}")
        if parsed.out:
            results.save(parsed.out, [], {"host": reason})
        return 0
    for row in host_rows(machine, parsed.commit, parsed.budget_seconds):
        low, high = row["spread_us"]
        print(f"{row['case']}: {row['median_us']} us ({low} to {high})", flush=True)
        if parsed.out:
            results.save(parsed.out, [row])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
