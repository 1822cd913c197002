"""Indexers of other packages, called through their public functions where they are installed.

A peer does not know shards: it gets a request's share of keys, context / W of them, as a context of
its own, in whole pages of 128. It reads the same bytes as a rank does and writes W times fewer
scores. What a package offers is told by its functions' parameters; one that has not those which
are used here is reported absent rather than called on a guess.

The parameters are those that the packages document: FlashInfer's `msa_proxy_score` and
`msa_topk_select`, vLLM's `minimax_m3_index_decode`.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

from benchmarks.baselines import Arrays, Baseline, Call
from benchmarks.cases import INIT_BLOCKS, LOCAL_BLOCKS, PAGE_SIZE, Decode
from msa_icp_jax.geometry import HEAD_DIM, NUM_HEADS, TOPK, cdiv


@dataclasses.dataclass(frozen=True)
class Absent:
    """A peer that cannot be measured here, and why."""

    name: str
    reason: str


def unsharded(case: Decode) -> Decode:
    """The case that a peer gets: a rank's share of each request's keys, all in one place."""
    lens = tuple(n // case.world_size for n in case.lens)
    return Decode(case.name, lens, 1, query_len=case.query_len)


def find(name: str) -> Baseline | Absent:
    """The peer `name`, one of PEERS."""
    module, functions, prepare = _PEERS[name]
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return Absent(name, "not installed")
    try:
        package = importlib.import_module(module)
    except Exception as error:  # whatever a package of others does when it is loaded
        return Absent(name, f"cannot import {module}: {type(error).__name__}: {error}")
    found = []
    for function, parameters in functions.items():
        reason = _unlike(package, function, parameters)
        if reason:
            return Absent(name, f"{module}.{reason}")
        found.append(getattr(package, function))
    return Baseline(name, lambda case: prepare(case, *found), rotates=True, exact=False)


def _unlike(package: Any, function: str, parameters: tuple[str, ...]) -> str | None:
    """How a function differs from the one expected, or None."""
    if not hasattr(package, function):
        return f"{function} does not exist"
    offered = inspect.signature(getattr(package, function)).parameters
    missing = [name for name in parameters if name not in offered]
    if missing:
        return f"{function}({', '.join(offered)}) has no {', '.join(missing)}"
    return None


Binder = Callable[[Arrays], Call]


def _flashinfer(case: Decode, score: Callable[..., Any], select: Callable[..., Any]) -> Binder:
    def bind(arrays: Arrays) -> Call:
        import torch

        device = arrays["keys"].device
        pages = arrays["keys"].reshape(-1, 1, PAGE_SIZE, HEAD_DIM)
        starts = range(0, case.tokens + 1, case.query_len)
        starts = torch.tensor(starts, dtype=torch.int32, device=device)
        columns = max(case.request_pages)
        scores = torch.empty(NUM_HEADS, columns, case.tokens, device=device)
        ids = torch.empty(case.tokens, NUM_HEADS, TOPK, dtype=torch.int32, device=device)

        def call() -> tuple[Any, Any]:
            score(
                arrays["queries"],
                pages,
                starts,
                page_table=arrays["table"],
                seqused_k=arrays["lens"],
                causal=True,
                max_seqlen_q=case.query_len,
                max_k_tiles=columns,
                output=scores,
            )
            select(
                scores,
                TOPK,
                num_valid_pages=arrays["counts"],
                output=ids,
                force_begin_blocks=INIT_BLOCKS,
                force_end_blocks=LOCAL_BLOCKS,
            )
            return scores.permute(2, 0, 1), ids

        return call

    return bind


def _vllm(case: Decode, decode: Callable[..., Any]) -> Binder:
    def bind(arrays: Arrays) -> Call:
        import torch

        device = arrays["keys"].device
        ids = torch.empty(NUM_HEADS, case.tokens, TOPK, dtype=torch.int32, device=device)
        columns = cdiv(max(case.lens), PAGE_SIZE)

        def call() -> tuple[Any, Any]:
            decode(
                arrays["queries"],
                arrays["keys"],
                arrays["table"],
                arrays["lens"],
                max_seq_len=columns * PAGE_SIZE,
                topk=TOPK,
                init_blocks=INIT_BLOCKS,
                local_blocks=LOCAL_BLOCKS,
                num_kv_heads=NUM_HEADS,
                decode_query_len=case.query_len,
                max_decode_query_len=case.query_len,
                out=ids,
            )
            return None, ids.permute(1, 0, 2)

        return call

    return bind


# Name: the module, its functions with the parameters they are given, what makes a call of them.
_PEERS: dict[str, tuple[str, dict[str, tuple[str, ...]], Callable[..., Binder]]] = {
    "flashinfer": (
        "flashinfer.msa_ops",
        {
            "msa_proxy_score": (
                *("q", "k", "cu_seqlens_q", "page_table", "seqused_k", "causal"),
                *("max_seqlen_q", "max_k_tiles", "output"),
            ),
            "msa_topk_select": (
                *("max_score", "topk", "num_valid_pages", "output"),
                *("force_begin_blocks", "force_end_blocks"),
            ),
        },
        _flashinfer,
    ),
    "vllm": (
        "vllm.models.minimax_m3.common.ops",
        {
            "minimax_m3_index_decode": (
                *("idx_q", "index_kv_cache", "block_table", "seq_lens", "max_seq_len", "topk"),
                *("init_blocks", "local_blocks", "num_kv_heads", "decode_query_len"),
                *("max_decode_query_len", "out"),
            )
        },
        _vllm,
    ),
}
PEERS = tuple(_PEERS)
