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
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks import results, roofline
from benchmarks.__main__ import add_run_options, fail, parser
from benchmarks.cases import HOST
from benchmarks.report import line
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
    """The ranks' plans and tensors."""

    def __init__(self, route: str) -> None:
        import torch

        import msa_icp_torch

        self._torch, device = torch, torch.device("cuda", torch.cuda.current_device())
        sizes = {"world_size": RANKS, "num_index_heads": 4, "page_size": PAGE_SIZE}
        sizes |= {"init_blocks": INIT_BLOCKS, "local_blocks": LOCAL_BLOCKS}
        sizes |= {"max_decode_tokens": MAX_TOKENS, "max_decode_query_len": 1}
        sizes |= {"max_num_batched_tokens": REQUESTS, "max_num_seqs": REQUESTS}
        sizes |= {"max_model_len": CONTEXT, "num_sparse_layers": 3}
        prepare = msa_icp_torch.prepare_msa_icp_indexer
        self._plans = [
            prepare(**sizes, rank=rank, device=device, backend="mosaic", route=route)
            for rank in range(RANKS)
        ]
        self._comms = [plan.init_comm() for plan in self._plans]
        self._streams = [torch.cuda.Stream() for _ in self._plans]
        self._calls = 0
        rng = np.random.default_rng(0)

        def small(*shape: int) -> Any:
            """Integers whose products and sums are exact: every way gives the same scores."""
            values = torch.from_numpy(rng.integers(-3, 4, shape).astype(np.float32))
            return values.to(device, torch.float8_e4m3fn)

        self._keys, self._query = small(PAGES, PAGE_SIZE, 128), small(REQUESTS, 4, 128)
        table = rng.permutation(PAGES).astype(np.int32).reshape(REQUESTS, -1)
        self._table = torch.from_numpy(table).to(device)
        lens = torch.full((REQUESTS,), CONTEXT, dtype=torch.int32, device=device)
        counts = torch.full_like(lens, CONTEXT // 128)
        self._steps = []
        for plan in self._plans:
            keys = self._keys[:, self._rows(plan.rank)].contiguous()
            scores = torch.empty((REQUESTS, *plan.decode_score_shape()[1:]), device=device)
            shape = (REQUESTS, 4 // RANKS, TOPK)
            output = torch.zeros(shape, dtype=torch.int32, device=device)
            self._steps.append([self._query, keys, self._table, lens, counts, scores, output])
        addresses = torch.tensor([comm.tagged_recv.data_ptr() for comm in self._comms])
        for plan, step, comm in zip(self._plans, self._steps, self._comms, strict=True):
            if route == "direct":  # the one-sided exchange
                comm.tagged_recv_bases.copy_(addresses)
                plan.check_comm(comm)
            shapes = {"table_width": self._table.shape[1], "batch_sizes": [REQUESTS]}
            plan.warmup(step[1], **shapes, comm=comm, tagged=True, prefill=False)

    def _rows(self, rank: int) -> slice:
        rows = PAGE_SIZE // RANKS
        return slice(rank * rows, (rank + 1) * rows)

    def eager(self, *, fresh: bool = False) -> Times:
        """A call of every rank; `fresh` brings a query tensor of its own to every call."""
        queries = [self._query] * _CALLS

        def renew() -> None:
            queries[:] = [self._query.clone() for _ in queries]

        def call(number: int) -> None:
            self._each(lambda rank: self._decode(rank, self._calls, queries[number]))
            self._calls += 1

        call(0)
        self._torch.cuda.synchronize()
        for rank, step in enumerate(self._steps):
            want = self._scores(self._rows(rank))
            if not self._torch.equal(step[-2][..., : want.shape[-1]], want):
                raise RuntimeError(f"rank {rank} scored otherwise")
        if self._plans[0].route == "direct":  # without an exchange there is no answer
            self._check()
        overhead = _times(lambda _: self._each(lambda _: None), RANKS)
        found = _times(call, RANKS, renew if fresh else lambda: None)
        return Times(tuple(x - overhead.median for x in found.us), found.method)

    def graph(self) -> Times:
        """A replay of every rank's graph, divided by its decodes."""
        graphs = [self._torch.cuda.CUDAGraph() for _ in self._plans]
        for rank, (graph, stream) in enumerate(zip(graphs, self._streams, strict=True)):
            with self._torch.cuda.graph(graph, stream=stream):
                for layer in range(GRAPH_DECODES):
                    self._decode(rank, self._calls + layer, self._query)
        for step in self._steps:
            step[-1].zero_()
        self._torch.cuda.synchronize()
        self._each(lambda rank: graphs[rank].replay())
        self._torch.cuda.synchronize()
        self._check()
        return _times(
            lambda _: self._each(lambda rank: graphs[rank].replay()), RANKS * GRAPH_DECODES
        )

    def _each(self, run: Callable[[int], Any]) -> None:
        for rank, stream in enumerate(self._streams):
            with self._torch.cuda.stream(stream):
                run(rank)

    def _decode(self, rank: int, slot: int, query: Any) -> None:
        step, comm = self._steps[rank], self._comms[rank]
        self._plans[rank].decode(
            query, *step[1:], comm=comm, slot=slot, tagged=True, decode_query_len=1
        )

    def _scores(self, rows: slice) -> Any:
        """The largest product of every block's rows [B, 4, blocks]."""
        pages = self._keys[:, rows].float()[self._table.long()]
        return self._torch.einsum("bhd,bprd->bhpr", self._query.float(), pages).amax(-1)

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
    found = parser(".host", __doc__)
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
    if machine.torch is None or not machine.mosaic:
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
