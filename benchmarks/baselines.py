"""The local stage as one would write it in torch, and what times it and its peers.

A *baseline* is a backend that works on torch tensors: plain torch, torch.compile, or a package of
others (peers.py). All run in the same CUDA graph as the kernels do, on a CPU one call after the
other.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.cases import LOCAL_BLOCKS, PAGE_SIZE, Decode, Prefill
from benchmarks.check import check_chosen, check_scores, host
from benchmarks.inputs import Inputs
from benchmarks.timing import Times, in_graph, on_clock
from msa_icp_jax.geometry import HEAD_DIM, TOPK

_CHUNK_TOKENS = 512  # of a prefill's products at a time: 268 MB at 64 Ki local keys

Arrays = dict[str, Any]
Call = Callable[[], tuple[Any, Any]]  # returns (scores [T, H, columns] or None, ids [T, H, 16])
Binder = Callable[[Arrays], Call]  # makes the call of an input set from its tensors


@dataclasses.dataclass(frozen=True)
class Baseline:
    """A backend on torch tensors.

    Attributes:
      prepare: makes a case's binder.
      given: the case that it gets in place of a rank's.
      rotates: whether it reads its inputs at a speed at which the cache matters: then it goes
        through all sets; else two are enough, since what it writes itself flushes the cache.
      exact: whether it chooses the best of its own scores, to the last bit.
    """

    prepare: Callable[[Any], Binder]
    given: Callable[[Any], Decode | Prefill] = lambda case: case
    rotates: bool = False
    exact: bool = True


class TorchRun:
    """A baseline on the input sets of the case given to it."""

    def __init__(self, case: Decode | Prefill, inputs: Inputs, baseline: Baseline) -> None:
        sets = inputs.sets if baseline.rotates else inputs.sets[:2]
        self._case, self._exact = case, baseline.exact
        self._first = inputs.fixed | sets[0]
        bind = baseline.prepare(case)
        shared = tensors(inputs.fixed)
        calls = [bind(shared | tensors(one_set)) for one_set in sets]
        self._calls = calls * (1 if baseline.rotates else 2)

    def check(self) -> None:
        """Compares scores with float64 and the chosen ids with the best ones.

        Raises:
          Mismatch: something is off by more than the fast tolerance. Which of equal scores wins
            is not compared: topk does not say.
        """
        scores, ids = self._calls[0]()
        if scores is None:  # it keeps its scores to itself: those of torch, in float32
            scores, _ = in_torch(self._case, precise=True)(tensors(self._first))()
        check_scores(self._case, self._first | {"scores": scores}, "fast")
        check_chosen(self._case, self._first, scores, host(ids), exact=self._exact)

    def times(self, runs: int) -> Times:
        """Times `runs` runs over the input sets."""
        if jax.default_backend() == "gpu":
            return in_graph([[call] for call in self._calls], runs)
        every = functools.partial(lambda calls: [call() for call in calls], self._calls)
        return on_clock(every, runs, len(self._calls), "eager")


def tensors(arrays: Arrays) -> Arrays:
    """Torch tensors on the same memory; fp8 becomes a copy."""
    return {name: _torch(x) for name, x in arrays.items() if isinstance(x, jax.Array)}


def _torch(x: jax.Array) -> Any:
    import torch

    if x.dtype.itemsize > 1:
        return torch.from_dlpack(x)
    return torch.from_dlpack(x.view(np.uint8)).view(torch.float8_e4m3fn)


# ---- in torch ----


def in_torch(case: Decode | Prefill, *, precise: bool = False, compiled: bool = False) -> Binder:
    """Gather, matrix product in fp16 (float32 if `precise`), maximum over a page's rows, topk."""
    import torch

    dtype = torch.float32 if precise else torch.float16
    score = _decode_scores if isinstance(case, Decode) else _prefill_scores

    def local(queries: Any, keys: Any, table: Any, positions: Any) -> tuple[Any, Any]:
        scores = score(case, queries.to(dtype), keys, table, positions)
        return scores, _choose(scores, positions)

    if compiled:
        torch._dynamo.reset()
        local = torch.compile(local, dynamic=False)

    def bind(arrays: Arrays) -> Call:
        positions = torch.tensor([p for _, p in case.positions], device=arrays["keys"].device)
        table = arrays["table"].clamp(min=0).long()
        return lambda: local(arrays["queries"], arrays["keys"], table, positions)

    return bind


TORCH = {
    "torch_compile": Baseline(functools.partial(in_torch, compiled=True)),
    "torch": Baseline(in_torch),
}


def _decode_scores(case: Any, queries: Any, keys: Any, table: Any, positions: Any) -> Any:
    requests, length, rows = len(case.lens), case.query_len, case.rows_per_page
    pages = table.shape[1]
    gathered = _gather(keys, table, queries.dtype).reshape(requests, pages * rows, HEAD_DIM)
    products = queries.reshape(requests, -1, HEAD_DIM) @ gathered.transpose(1, 2)
    products = products.reshape(requests * length, case.heads, pages, rows)
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
            products = (queries[chunk] @ gathered.T).reshape(-1, case.heads, pages, rows)
            maxima = _page_maxima(case, products, positions[chunk])
            parts.append(torch.nn.functional.pad(maxima, (0, width - pages), value=-torch.inf))
        start = end
    return torch.cat(parts)


def _gather(keys: Any, pages: Any, dtype: Any) -> Any:
    import torch

    return keys.view(torch.uint8)[pages].view(torch.float8_e4m3fn).to(dtype)


def _page_maxima(case: Any, products: Any, positions: Any) -> Any:
    """Largest visible product of each page, float32 [tokens, heads, pages]."""
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
