"""The decode local stage as one would write it in torch, timed in the same CUDA graph."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.cases import LOCAL_BLOCKS, PAGE_SIZE, RANK, Decode
from benchmarks.check import Mismatch, check_scores, host, sample, scores_of, select_row
from benchmarks.graph import replays
from benchmarks.inputs import Inputs
from benchmarks.timing import Times
from msa_icp_jax.geometry import HEAD_DIM, NUM_HEADS, TOPK

BASELINES = ("torch", "torch_compile")
PEERS = ("flashinfer", "vllm")
_SETS, _LINKS = 2, 4


def absent_peers() -> list[str]:
    """Peers that are not installed here."""
    return [name for name in PEERS if importlib.util.find_spec(name) is None]


class TorchRun:
    """Gather, matrix product in fp16, maximum over a page's rows, topk."""

    def __init__(self, case: Decode, inputs: Inputs, backend: str) -> None:
        import torch

        local = _local(case)
        if backend == "torch_compile":
            torch._dynamo.reset()
            local = torch.compile(local, dynamic=False)
        self._case = case
        self._sets = [inputs.fixed | one_set for one_set in inputs.sets[:_SETS]]
        self._calls = [_bind(local, case, arrays) for arrays in self._sets]

    def check(self) -> None:
        """Compares scores with float64 and the scores of the chosen ids with the best ones.

        Raises:
          Mismatch: something is off by more than the fast tolerance. Which of equal scores wins
            is not compared: topk does not say.
        """
        scores, ids = self._calls[0]()
        check_scores(self._case, self._sets[0] | {"scores": scores}, "fast")
        counts, ids = host(self._sets[0]["counts"]), host(ids)
        tokens = sample(self._case.tokens, 16)
        for token, planes in zip(tokens, scores_of(scores, tokens), strict=True):
            for head, row in enumerate(planes):
                want = select_row(row, int(counts[token]))[TOPK : 2 * TOPK]
                got = ids[token, head]
                if not np.array_equal(np.sort(row[want[want >= 0]]), np.sort(row[got[got >= 0]])):
                    raise Mismatch(f"ids of token {token}, head {head}: {got}, best are {want}")

    def times(self, runs: int) -> Times:
        """Times replays of a graph over two input sets."""
        import torch

        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for call in self._calls:
                call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for i in range(_LINKS):
                self._calls[i % len(self._calls)]()
        return replays(graph, runs, _LINKS)


def _bind(local: Callable[..., Any], case: Decode, arrays: dict[str, Any]) -> Callable[[], Any]:
    import torch

    queries, keys, table = (_torch(arrays[n]) for n in ("queries", "keys", "table"))
    positions = torch.tensor([p for _, p in case.positions], device="cuda")
    table = table.clamp(min=0).long()
    return lambda: local(queries, keys, table, positions)


def _torch(x: jax.Array) -> Any:
    """A torch tensor on the same memory; fp8 travels as bytes."""
    import torch

    if x.dtype.itemsize > 1:
        return torch.from_dlpack(x)
    return torch.from_dlpack(x.view(np.uint8))


def _local(case: Decode) -> Callable[..., Any]:
    import torch

    requests, length, rows = len(case.lens), case.query_len, case.rows_per_page

    def local(queries: Any, keys: Any, table: Any, positions: Any) -> tuple[Any, Any]:
        pages = table.shape[1]
        gathered = keys[table].view(torch.float8_e4m3fn).half()
        gathered = gathered.reshape(requests, pages * rows, HEAD_DIM)
        query = queries.view(torch.float8_e4m3fn).half()
        query = query.reshape(requests, length * NUM_HEADS, HEAD_DIM)
        products = torch.matmul(query, gathered.transpose(1, 2))
        products = products.reshape(requests * length, NUM_HEADS, pages, rows)
        row = torch.arange(rows, device="cuda")
        at = torch.arange(pages, device="cuda")[:, None] * PAGE_SIZE + RANK * rows + row
        hidden = at[None] > positions[:, None, None]
        scores = products.masked_fill(hidden[:, None], -torch.inf).amax(-1).float()
        block = torch.arange(pages, device="cuda")
        last = (positions // PAGE_SIZE)[:, None]
        keyed = scores.masked_fill((block > last)[:, None], -torch.inf)
        forced = (block > last - LOCAL_BLOCKS) & (block <= last)
        keyed = keyed.masked_fill(forced[:, None], torch.inf)
        kept = min(TOPK, pages)
        values, ids = keyed.topk(kept, dim=-1)
        ids = torch.where(values > -torch.inf, ids, -1)
        return scores, ids.sort(-1).values

    return local
