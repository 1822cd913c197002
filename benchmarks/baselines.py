"""What the kernels are compared with: the local stage in torch, and indexers of other packages.

A *baseline* is a backend that works on torch tensors. All run in the same CUDA graph as the kernels
do, on a CPU one call after the other. *Peers* are other packages, called through their public
functions where they are installed.

A peer does not know shards. In decode it gets a rank's share of each request's keys, context / W,
as a context of its own: it reads the same bytes and writes W times fewer scores. *Without ICP* it
gets all keys for the 4 / W heads that a rank owns. In prefill the two take as many operations, and
only the second can be asked for: a causal share is none of the last tokens' contexts.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.cases import INIT_BLOCKS, LOCAL_BLOCKS, PAGE_SIZE, Decode, Prefill
from benchmarks.check import check_chosen, check_scores, host
from benchmarks.stages import Arrays, Inputs
from benchmarks.timing import Times, in_graph, on_clock
from msa_icp_jax.geometry import HEAD_DIM, NUM_HEADS, TOPK

_CHUNK_TOKENS = 512  # of a prefill's products at a time: 268 MB at 64 Ki local keys

Call = Callable[[], tuple[Any, Any]]  # returns (scores [T, H, columns] or None, ids [T, H, 16])


@dataclasses.dataclass(frozen=True)
class Baseline:
    """A backend on torch tensors: what binds a call to (case, tensors), and the case it is given.

    A `peer` reads at a speed at which the cache matters, so it goes through all sets; to others two
    are enough: what they write flushes it. Those choose the best of their own scores to the last
    bit, a peer of near ties either.
    """

    bind: Callable[[Any, Arrays], Call]
    given: Callable[[Any], Any] = lambda case: case
    peer: bool = False


def find(name: str, gpu: bool) -> Baseline | str:
    """The baseline of `NAMES`, or why it cannot be measured here."""
    if not gpu and name != "torch":
        return "measured on GPUs only"
    if name not in PEERS:
        return Baseline(functools.partial(in_torch, compiled=name == "torch_compile"))
    module, bind, given = PEERS[name]
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return "not installed"
    try:
        package = importlib.import_module(module)
    except Exception as error:  # whatever a package of others does when it is loaded
        return f"cannot import {module}: {type(error).__name__}: {error}"
    return Baseline(functools.partial(bind, package), given, peer=True)


def measure(case: Any, inputs: Inputs, baseline: Baseline, runs: int) -> Times:
    """Checks scores against float64 and ids against the best ones, and times the calls."""
    sets, fixed = inputs.sets if baseline.peer else inputs.sets[:2], tensors(inputs.fixed)
    calls = [baseline.bind(case, fixed | tensors(one_set)) for one_set in sets]
    first, (scores, ids) = inputs.fixed | sets[0], calls[0]()
    if scores is None:  # it keeps its scores to itself: those of torch, in float32
        scores, _ = in_torch(case, tensors(first), precise=True)()
    check_scores(case, first | {"scores": scores}, "fast")
    check_chosen(case, first, scores, host(ids), exact=not baseline.peer)
    if jax.default_backend() == "gpu":
        return in_graph(calls * (1 if baseline.peer else 2), runs)
    return on_clock(lambda: [call() for call in calls], runs, len(calls), "eager")


def tensors(arrays: Arrays) -> Arrays:
    """Torch tensors on the same memory; fp8 becomes a copy."""
    import torch

    def tensor(x: jax.Array) -> Any:
        if x.dtype.itemsize > 1:
            return torch.from_dlpack(x)
        return torch.from_dlpack(x.view(np.uint8)).view(torch.float8_e4m3fn)

    return {name: tensor(x) for name, x in arrays.items() if isinstance(x, jax.Array)}


# ---- in torch ----


def in_torch(case: Any, arrays: Arrays, *, precise: bool = False, compiled: bool = False) -> Call:
    """Gather, matrix product in fp16 (float32 if `precise`), maximum over a page's rows, topk."""
    import torch

    run = _compiled(case) if compiled else _local(case, torch.float32 if precise else torch.float16)
    positions = torch.tensor([p for _, p in case.positions], device=arrays["keys"].device)
    table = arrays["table"].clamp(min=0).long()
    return lambda: run(arrays["queries"], arrays["keys"], table, positions)


def _local(case: Any, dtype: Any) -> Callable[..., Any]:
    def local(queries: Any, keys: Any, table: Any, positions: Any) -> tuple[Any, Any]:
        score = _decode_scores if isinstance(case, Decode) else _prefill_scores
        scores = score(case, queries.to(dtype), keys, table, positions)
        return scores, _choose(scores, positions)

    return local


@functools.lru_cache(maxsize=1)
def _compiled(case: Any) -> Callable[..., Any]:
    import torch

    torch._dynamo.reset()
    return torch.compile(_local(case, torch.float16), dynamic=False)


def _decode_scores(case: Any, queries: Any, keys: Any, table: Any, positions: Any) -> Any:
    requests, pages = table.shape
    gathered = _gather(keys, table, queries.dtype).reshape(requests, -1, HEAD_DIM)
    products = queries.reshape(requests, -1, HEAD_DIM) @ gathered.transpose(1, 2)
    return _page_maxima(case, products.reshape(-1, case.heads, pages, keys.shape[1]), positions)


def _prefill_scores(case: Any, queries: Any, keys: Any, table: Any, positions: Any) -> Any:
    import torch

    width, parts = table.shape[1], []
    segments = zip(queries.split(case.query_lens), positions.split(case.query_lens), strict=True)
    for segment, (mine, at) in enumerate(segments):
        pages = case.request_pages[segment]
        gathered = _gather(keys, table[segment, :pages], queries.dtype).reshape(-1, HEAD_DIM)
        for some, where in zip(mine.split(_CHUNK_TOKENS), at.split(_CHUNK_TOKENS), strict=True):
            products = (some @ gathered.T).reshape(-1, case.heads, pages, keys.shape[1])
            maxima = _page_maxima(case, products, where)
            parts.append(torch.nn.functional.pad(maxima, (0, width - pages), value=-torch.inf))
    return torch.cat(parts)


def _gather(keys: Any, pages: Any, dtype: Any) -> Any:
    import torch

    if keys.dtype != torch.float8_e4m3fn:
        return keys[pages].to(dtype)
    return keys.view(torch.uint8)[pages].view(keys.dtype).to(dtype)  # torch indexes no float8


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


# ---- by other packages ----


def share(case: Decode | Prefill) -> Decode | Prefill:
    """A rank's share of each request's keys, all in one place; in prefill as `whole`."""
    if isinstance(case, Prefill):
        return whole(case)
    lens = tuple(n // case.world_size for n in case.lens)
    return dataclasses.replace(case, lens=lens, world_size=1)


def whole(case: Decode | Prefill) -> Decode | Prefill:
    """All keys, for the heads that a rank owns."""
    return dataclasses.replace(case, world_size=1, heads=NUM_HEADS // case.world_size)


def _lengths(case: Any, arrays: Arrays) -> tuple[Any, Any, Any]:
    """Of tokens, where each request's begin and the last end; of keys; of keys before."""
    import torch

    before = np.subtract(case.lens, case.query_lens)
    words = (np.cumsum([0, *case.query_lens]), np.array(case.lens), before)
    starts, lens, before = (torch.as_tensor(x, dtype=torch.int32) for x in words)
    device = arrays["keys"].device
    return starts.to(device), lens.to(device), before.to(device)


def _flashinfer(package: Any, case: Any, arrays: Arrays) -> Call:
    import torch

    keys, columns = arrays["keys"], max(case.request_pages)
    pages = keys.reshape(-1, 1, PAGE_SIZE, HEAD_DIM)
    starts, lens, _ = _lengths(case, arrays)
    scores = torch.empty(case.heads, columns, case.tokens, device=keys.device)
    ids = torch.empty(case.tokens, case.heads, TOPK, dtype=torch.int32, device=keys.device)
    sizes = {"max_seqlen_q": max(case.query_lens), "max_k_tiles": columns, "causal": True}
    given = {"page_table": arrays["table"], "seqused_k": lens, "output": scores}
    forced = {"force_begin_blocks": INIT_BLOCKS, "force_end_blocks": LOCAL_BLOCKS}
    chosen = {"num_valid_pages": arrays["counts"], "output": ids, **forced}

    def call() -> tuple[Any, Any]:
        package.msa_proxy_score(arrays["queries"], pages, starts, **given, **sizes)
        package.msa_topk_select(scores, TOPK, **chosen)
        return scores.permute(2, 0, 1), ids

    return call


def _vllm(package: Any, case: Any, arrays: Arrays) -> Call:
    import torch

    keys, most = arrays["keys"], max(case.query_lens)
    starts, lens, before = _lengths(case, arrays)
    ids = torch.empty(case.heads, case.tokens, TOPK, dtype=torch.int32, device=keys.device)
    inputs = (arrays["queries"], keys, arrays["table"])
    forced = {"init_blocks": INIT_BLOCKS, "local_blocks": LOCAL_BLOCKS, "topk": TOPK, "out": ids}
    sizes = {"max_seq_len": max(case.request_pages) * PAGE_SIZE, "num_kv_heads": case.heads}

    def decoded() -> tuple[Any, Any]:
        each = {"decode_query_len": most, "max_decode_query_len": most}
        package.minimax_m3_index_decode(*inputs, lens, **sizes, **forced, **each)
        return None, ids.permute(1, 0, 2)

    def prefilled() -> tuple[Any, Any]:
        given, each = (starts, lens, before), {"max_query_len": most}
        plane = package.minimax_m3_index_score(*inputs, *given, **each, **sizes)
        package.minimax_m3_index_topk(plane, starts, before, **each, **forced)
        return None, ids.permute(1, 0, 2)

    return decoded if isinstance(case, Decode) else prefilled


# Name: the module, what binds a call of its functions, the case it gets.
PEERS: dict[str, tuple[str, Callable[..., Call], Callable[..., Any]]] = {
    "flashinfer": ("flashinfer.msa_ops", _flashinfer, share),
    "flashinfer-no-icp": ("flashinfer.msa_ops", _flashinfer, whole),
    "vllm": ("vllm.models.minimax_m3.common.ops", _vllm, share),
}
NAMES = ("torch", "torch_compile", *PEERS)
