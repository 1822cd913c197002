"""Indexers of other packages, called through their public functions where they are installed.

A peer does not know shards. In decode it gets a rank's share of each request's keys, context / W,
as a context of its own, in whole pages of 128: it reads the same bytes and writes W times fewer
scores. *Without ICP* it gets all keys for the 4 / W heads that a rank owns: what a rank does that
shards heads instead of keys. In prefill the two take as many operations, and only the second can
be asked for: a causal share is none of the last tokens' contexts.

What a package offers is told by its functions' parameters; one that has not those which are used
here is reported absent rather than called on a guess.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

from benchmarks.baselines import Arrays, Baseline, Binder, Call
from benchmarks.cases import INIT_BLOCKS, LOCAL_BLOCKS, PAGE_SIZE, Decode, Prefill
from msa_icp_jax.geometry import HEAD_DIM, NUM_HEADS, TOPK, cdiv


def share(case: Decode | Prefill) -> Decode | Prefill:
    """A rank's share of each request's keys, all in one place; in prefill as `whole`."""
    if isinstance(case, Prefill):
        return whole(case)
    lens = tuple(n // case.world_size for n in case.lens)
    return dataclasses.replace(case, lens=lens, world_size=1)


def whole(case: Decode | Prefill) -> Decode | Prefill:
    """All keys, for the heads that a rank owns."""
    return dataclasses.replace(case, world_size=1, heads=NUM_HEADS // case.world_size)


def find(name: str) -> Baseline | str:
    """The peer `name`, one of PEERS, or why it cannot be measured here."""
    module, functions, prepare, given = _PEERS[name]
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return "not installed"
    try:
        package = importlib.import_module(module)
    except Exception as error:  # whatever a package of others does when it is loaded
        return f"cannot import {module}: {type(error).__name__}: {error}"
    for function, wanted in functions.items():
        if not hasattr(package, function):
            return f"{module}.{function} does not exist"
        offered = inspect.signature(getattr(package, function)).parameters
        if missing := [x for x in wanted.split() if x not in offered]:
            return f"{module}.{function}({', '.join(offered)}) has no {', '.join(missing)}"
    found = [getattr(package, function) for function in functions]
    return Baseline(functools.partial(prepare, *found), given, rotates=True, exact=False)


def _words(values: Any, like: Any) -> Any:
    import torch

    return torch.tensor(values, dtype=torch.int32, device=like.device)


def _starts(case: Decode | Prefill) -> list[int]:
    """Where each request's tokens begin, and the last ones end."""
    return [sum(case.query_lens[:i]) for i in range(len(case.query_lens) + 1)]


def _flashinfer(score: Callable[..., Any], select: Callable[..., Any], case: Any) -> Binder:
    def bind(arrays: Arrays) -> Call:
        import torch

        keys = arrays["keys"]
        pages = keys.reshape(-1, 1, PAGE_SIZE, HEAD_DIM)
        starts, lens = _words(_starts(case), keys), _words(case.lens, keys)
        columns = max(case.request_pages)
        scores = torch.empty(case.heads, columns, case.tokens, device=keys.device)
        ids = torch.empty(case.tokens, case.heads, TOPK, dtype=torch.int32, device=keys.device)

        def call() -> tuple[Any, Any]:
            score(
                *(arrays["queries"], pages, starts),
                page_table=arrays["table"],
                seqused_k=lens,
                causal=True,
                max_seqlen_q=max(case.query_lens),
                max_k_tiles=columns,
                output=scores,
            )
            select(
                *(scores, TOPK),
                num_valid_pages=arrays["counts"],
                output=ids,
                force_begin_blocks=INIT_BLOCKS,
                force_end_blocks=LOCAL_BLOCKS,
            )
            return scores.permute(2, 0, 1), ids

        return call

    return bind


def _vllm(
    decode: Callable[..., Any], score: Callable[..., Any], topk: Callable[..., Any], case: Any
) -> Binder:
    def bind(arrays: Arrays) -> Call:
        import torch

        keys = arrays["keys"]
        starts, lens = _words(_starts(case), keys), _words(case.lens, keys)
        before = _words([n - q for n, q in zip(case.lens, case.query_lens, strict=True)], keys)
        ids = torch.empty(case.heads, case.tokens, TOPK, dtype=torch.int32, device=keys.device)
        inputs = (arrays["queries"], keys, arrays["table"])
        most, columns = max(case.query_lens), cdiv(max(case.lens), PAGE_SIZE)
        forced = {"init_blocks": INIT_BLOCKS, "local_blocks": LOCAL_BLOCKS}

        def decoded() -> tuple[Any, Any]:
            decode(
                *(*inputs, lens),
                max_seq_len=columns * PAGE_SIZE,
                topk=TOPK,
                **forced,
                num_kv_heads=case.heads,
                decode_query_len=most,
                max_decode_query_len=most,
                out=ids,
            )
            return None, ids.permute(1, 0, 2)

        def prefilled() -> tuple[Any, Any]:
            plane = score(
                *(*inputs, starts, lens, before),
                max_query_len=most,
                max_seq_len=columns * PAGE_SIZE,
                num_kv_heads=case.heads,
            )
            topk(plane, starts, before, max_query_len=most, topk=TOPK, **forced, out=ids)
            return None, ids.permute(1, 0, 2)

        return decoded if isinstance(case, Decode) else prefilled

    return bind


_FLASHINFER = {
    "msa_proxy_score": "q k cu_seqlens_q page_table seqused_k causal max_seqlen_q max_k_tiles "
    "output",
    "msa_topk_select": "max_score topk num_valid_pages output force_begin_blocks force_end_blocks",
}
_VLLM = {
    "minimax_m3_index_decode": "idx_q index_kv_cache block_table seq_lens max_seq_len topk "
    "init_blocks local_blocks num_kv_heads decode_query_len max_decode_query_len out",
    "minimax_m3_index_score": "idx_q index_kv_cache block_table cu_seqlens_q seq_lens prefix_lens "
    "max_query_len max_seq_len num_kv_heads",
    "minimax_m3_index_topk": "score cu_seqlens_q prefix_lens max_query_len topk init_blocks "
    "local_blocks out",
}
# Name: the module, its functions with their parameters, what makes a binder, the case it gets.
_PEERS: dict[str, tuple[str, dict[str, str], Callable[..., Binder], Callable[..., Any]]] = {
    "flashinfer": ("flashinfer.msa_ops", _FLASHINFER, _flashinfer, share),
    "flashinfer-no-icp": ("flashinfer.msa_ops", _FLASHINFER, _flashinfer, whole),
    "vllm": ("vllm.models.minimax_m3.common.ops", _VLLM, _vllm, share),
}
PEERS = tuple(_PEERS)
