"""The local stage as one would write it in torch, and what times it and its peers.

A *baseline* is a backend that works on torch tensors: plain torch, torch.compile, or a package of
others (peers.py). All run in the same CUDA graph as the kernels do, on a CPU one call after the
other.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.cases import LOCAL_BLOCKS, PAGE_SIZE, Case, Decode, Prefill
from benchmarks.check import check_chosen, check_scores, host
from benchmarks.graph import replays
from benchmarks.inputs import Inputs
from benchmarks.timing import Times
from msa_icp_jax.geometry import HEAD_DIM, NUM_HEADS, TOPK

_CHUNK_TOKENS = 512  # of a prefill's products at a time: 268 MB at 64 Ki local keys

Arrays = dict[str, Any]
Call = Callable[[], tuple[Any, Any]]  # returns (scores [T, 4, columns] or None, ids [T, 4, 16])


@dataclasses.dataclass(frozen=True)
class Baseline:
    """A backend on torch tensors.

    Attributes:
      name: the backend's name in results.
      prepare: makes, for a case, what makes the call of an input set from its tensors.
      rotates: whether it reads its inputs at a speed at which the cache matters: then it goes
        through all sets; else two are enough, since what it writes itself flushes the cache.
      exact: whether it chooses the best of its own scores, to the last bit.
    """

    name: str
    prepare: Callable[[Any], Callable[[Arrays], Call]]
    rotates: bool
    exact: bool


class TorchRun:
    """A baseline on a case's input sets."""

    def __init__(self, case: Decode | Prefill, inputs: Inputs, baseline: Baseline) -> None:
        sets = inputs.sets if baseline.rotates else inputs.sets[:2]
        self._case = case
        self._baseline = baseline
        self._first = inputs.fixed | sets[0]
        bind = baseline.prepare(case)
        shared = tensors(inputs.fixed)
        self._calls = [bind(shared | tensors(one_set)) for one_set in sets]
        self._cuda = shared["keys"].is_cuda

    def check(self) -> None:
        """Compares scores with float64 and the chosen ids with the best ones.

        Raises:
          Mismatch: something is off by more than the fast tolerance. Which of equal scores wins
            is not compared: topk does not say.
        """
        scores, ids = self._calls[0]()
        if scores is None:  # it keeps its scores to itself: those of torch, in float32
            scores, _ = _prepare(self._case, precise=True)(tensors(self._first))()
        check_scores(self._case, self._first | {"scores": scores}, "fast")
        check_chosen(self._case, self._first, scores, host(ids), exact=self._baseline.exact)

    def times(self, runs: int) -> Times:
        """Times `runs` runs over the input sets, each of them once or, if they are few, twice."""
        calls = self._calls * (1 if self._baseline.rotates else 2)
        return _replays(calls, runs) if self._cuda else _calls(calls, runs)


def _replays(calls: list[Call], runs: int) -> Times:
    import torch

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for call in calls:
            call()
    return replays(graph, runs, len(calls))


def _calls(calls: list[Call], runs: int) -> Times:
    found = []
    for _ in range(runs):
        start = time.perf_counter()
        for call in calls:
            call()
        found.append((time.perf_counter() - start) * 1e6 / len(calls))
    return Times(tuple(found), "eager")


def tensors(arrays: Arrays) -> Arrays:
    """Torch tensors on the same memory; fp8 becomes a copy."""
    return {name: _torch(x) for name, x in arrays.items() if isinstance(x, jax.Array)}


def _torch(x: jax.Array) -> Any:
    import torch

    if x.dtype.itemsize > 1:
        return torch.from_dlpack(x)
    return torch.from_dlpack(x.view(np.uint8)).view(torch.float8_e4m3fn)


# ---- in torch ----


def _prepare(
    case: Case, *, precise: bool = False, compiled: bool = False
) -> Callable[[Arrays], Call]:
    """Gather, matrix product in fp16 (float32 if `precise`), maximum over a page's rows, topk."""
    import torch

    assert isinstance(case, Decode | Prefill)
    local = _local(case, torch.float32 if precise else torch.float16)
    if compiled:
        torch._dynamo.reset()
        local = torch.compile(local, dynamic=False)

    def bind(arrays: Arrays) -> Call:
        positions = torch.tensor([p for _, p in case.positions], device=arrays["keys"].device)
        table = arrays["table"].clamp(min=0).long()
        return lambda: local(arrays["queries"], arrays["keys"], table, positions)

    return bind


TORCH = Baseline("torch", _prepare, rotates=False, exact=True)
TORCH_COMPILE = Baseline(
    "torch_compile", functools.partial(_prepare, compiled=True), rotates=False, exact=True
)


def _local(case: Decode | Prefill, dtype: Any) -> Callable[..., Any]:
    score = _decode_scores if isinstance(case, Decode) else _prefill_scores

    def local(queries: Any, keys: Any, table: Any, positions: Any) -> tuple[Any, Any]:
        scores = score(case, queries.to(dtype), keys, table, positions)
        return scores, _choose(scores, positions)

    return local


def _decode_scores(case: Any, queries: Any, keys: Any, table: Any, positions: Any) -> Any:
    requests, length, rows = len(case.lens), case.query_len, case.rows_per_page
    pages = table.shape[1]
    gathered = _gather(keys, table, queries.dtype).reshape(requests, pages * rows, HEAD_DIM)
    query = queries.reshape(requests, length * NUM_HEADS, HEAD_DIM)
    products = query @ gathered.transpose(1, 2)
    products = products.reshape(requests * length, NUM_HEADS, pages, rows)
    return _page_maxima(case, products, positions)


def _prefill_scores(case: Any, queries: Any, keys: Any, table: Any, positions: Any) -> Any:
    import torch

    width, rows = table.shape[1], case.rows_per_page
    parts = []
    start = 0
    for segment, length in enumerate(case.query_lens):
        pages = case.request_pages[segment]
        gathered = _gather(keys, table[segment, :pages], queries.dtype).reshape(-1, HEAD_DIM)
        end = start + length
        for first in range(start, end, _CHUNK_TOKENS):
            chunk = slice(first, min(first + _CHUNK_TOKENS, end))
            products = (queries[chunk] @ gathered.T).reshape(-1, NUM_HEADS, pages, rows)
            maxima = _page_maxima(case, products, positions[chunk])
            parts.append(torch.nn.functional.pad(maxima, (0, width - pages), value=-torch.inf))
        start = end
    return torch.cat(parts)


def _gather(keys: Any, pages: Any, dtype: Any) -> Any:
    import torch

    return keys.view(torch.uint8)[pages].view(torch.float8_e4m3fn).to(dtype)


def _page_maxima(case: Any, products: Any, positions: Any) -> Any:
    """Largest visible product of each page, float32 [tokens, 4, pages]."""
    import torch

    pages, rows = products.shape[2:]
    row = torch.arange(rows, device=products.device)
    first = torch.arange(pages, device=products.device)[:, None] * PAGE_SIZE + case.rank * rows
    hidden = (first + row)[None] > positions[:, None, None]
    return products.masked_fill(hidden[:, None], -torch.inf).amax(-1).float()


def _choose(scores: Any, positions: Any) -> Any:
    """Ids of the best blocks, ascending after a head of -1."""
    import torch

    block = torch.arange(scores.shape[-1], device=scores.device)
    last = (positions // PAGE_SIZE)[:, None]
    keyed = scores.masked_fill((block > last)[:, None], -torch.inf)
    forced = (block > last - LOCAL_BLOCKS) & (block <= last)
    keyed = keyed.masked_fill(forced[:, None], torch.inf)
    values, ids = keyed.topk(min(TOPK, len(block)), dim=-1)
    return torch.where(values > -torch.inf, ids, -1).sort(-1).values
