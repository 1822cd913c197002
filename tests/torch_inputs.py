"""Chains on torch tensors: their inputs, and all ranks of a group in one process."""

from __future__ import annotations

import pathlib
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import oracle
import torch
import torch.distributed as dist
from chains import LIMITS, OLD_SCORE, OLD_WORD, SPARE_ROWS, Decode, Prefill
from inputs import TIME_LIMIT

# A bare checkout has the package beside the tests; an installed one comes first.
sys.path.append(str(pathlib.Path(__file__).parent.parent / "interop"))

import msa_icp_torch
from msa_icp_torch import MSAIcpComm, MSAIcpIndexerPlan

Array = npt.NDArray[Any]

CPU = torch.device("cpu")


def prepare(world_size: int, page_size: int, rank: int, **changes: Any) -> MSAIcpIndexerPlan:
    """A torch plan with the limits of `chains.make_plan`."""
    own = {"world_size": world_size, "page_size": page_size, "rank": rank, "device": CPU}
    return msa_icp_torch.prepare_msa_icp_indexer(**LIMITS | own | changes)


def tensor(array: Array, device: torch.device = CPU) -> torch.Tensor:
    """A tensor of its own memory."""
    return torch.tensor(np.ascontiguousarray(array)).to(device)


def index_tensor(codes: Array, device: torch.device = CPU) -> torch.Tensor:
    """A float8_e4m3fn tensor of these codes, or a bfloat16 one where they are 16 bits wide."""
    dtype = torch.float8_e4m3fn if codes.dtype == np.uint8 else torch.bfloat16
    return tensor(codes, device).view(dtype)


def strided_keys(
    index_k: Array, pitch: int, row_offset: int, device: torch.device = CPU
) -> torch.Tensor:
    """The index keys as a view into pages of `pitch` rows, whose other rows are NaN."""
    base = index_tensor(oracle.compound_cache(index_k, pitch, row_offset), device)
    return base[:, row_offset : row_offset + index_k.shape[1]]


class Step(NamedTuple):
    """One rank's tensors of a decode step, marked buffers with spare rows included."""

    index_q: torch.Tensor
    index_k: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    num_valid_pages: torch.Tensor
    scores: torch.Tensor
    output: torch.Tensor


def decode_step(plan: MSAIcpIndexerPlan, case: Decode, index_k: torch.Tensor | None = None) -> Step:
    geometry, device = plan.geometry, plan.device
    rows = len(case.query) + SPARE_ROWS
    if index_k is None:
        keys = oracle.shard_cache(case.cache.keys, geometry.world_size)[plan.rank]
        index_k = index_tensor(keys, device)
    return Step(
        index_tensor(case.query, device),
        index_k,
        tensor(case.cache.table, device),
        tensor(case.seq_lens, device),
        tensor(case.counts, device),
        torch.full((rows, 4, geometry.score_columns), OLD_SCORE, device=device),
        torch.full((rows, geometry.heads_per_rank, 16), OLD_WORD, dtype=torch.int32, device=device),
    )


class Window(NamedTuple):
    """One rank's tensors of a prefill window, marked buffers with spare rows included."""

    query: torch.Tensor
    index_k: torch.Tensor
    block_table: torch.Tensor
    lengths: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    num_valid_pages: torch.Tensor
    score_scratch: torch.Tensor
    carrier: torch.Tensor
    received: torch.Tensor
    output: torch.Tensor


def prefill_window(plan: MSAIcpIndexerPlan, case: Prefill) -> Window:
    geometry, device = plan.geometry, plan.device
    rows, heads = len(case.query) + SPARE_ROWS, geometry.heads_per_rank
    keys = oracle.shard_cache(case.cache.keys, geometry.world_size)[plan.rank]

    def words(*shape: int) -> torch.Tensor:
        return torch.full(shape, OLD_WORD, dtype=torch.int32, device=device)

    return Window(
        index_tensor(case.query, device),
        index_tensor(keys, device),
        tensor(case.cache.table, device),
        tuple(tensor(x, device) for x in (case.qo_lens, case.kv_lens, case.qo_offset)),
        tensor(case.counts, device),
        torch.full((rows, 4, geometry.score_columns), OLD_SCORE, device=device),
        words(4, rows, 33),
        words(geometry.world_size, heads, rows, 33),
        words(rows, heads, 16),
    )


def prefill_local(
    plan: MSAIcpIndexerPlan, case: Prefill, window: Window, pool: torch.Tensor | None = None
) -> None:
    """The part of a prefill before the exchange, window plan included."""
    bounds = {
        "total_q": len(case.query),
        "max_query_len": len(case.query),
        "max_seq_len": plan.geometry.max_model_len,
    }
    window_plan = plan.prefill_window_plan(*window.lengths, **bounds)
    plan.prefill_local(
        window.query,
        window.index_k,
        window.block_table,
        window_plan,
        window.score_scratch,
        window.num_valid_pages,
        window.carrier,
        pool,
    )


class Mailbox:
    """What the ranks of one process send each other, in place of a process group."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=TIME_LIMIT)
        self.messages: dict[int, torch.Tensor] = {}

    def exchange(self, rank: int, received: torch.Tensor, message: torch.Tensor) -> None:
        self.messages[rank] = message
        self.barrier.wait()
        for source in range(len(received)):
            received[source].copy_(self.messages[source][rank])
        self.barrier.wait()


class LocalGroup(dist.ProcessGroup):
    def __init__(self, position: int, mailbox: Mailbox) -> None:
        super().__init__(position, mailbox.barrier.parties)
        self.position = position
        self.mailbox = mailbox


def use_local_groups(monkeypatch: Any) -> None:
    """Makes the package's exchange go through LocalGroups instead of torch.distributed."""
    from msa_icp_torch import exchange

    monkeypatch.setattr(exchange, "check_group", lambda group, world_size, rank: None)
    monkeypatch.setattr(
        exchange,
        "all_to_all",
        lambda received, message, group: group.mailbox.exchange(group.position, received, message),
    )


class Group:
    """All ranks' plans and receive storage; each call runs every rank, on a thread of its own."""

    def __init__(self, world_size: int, page_size: int, **changes: Any) -> None:
        mailbox = Mailbox(world_size)
        self.plans = [
            prepare(world_size, page_size, rank, group=LocalGroup(rank, mailbox), **changes)
            for rank in range(world_size)
        ]
        self.comms: list[MSAIcpComm] = [plan.init_comm() for plan in self.plans]

    def each(self, call: Callable[[int, MSAIcpIndexerPlan], Any]) -> list[Any]:
        with ThreadPoolExecutor(len(self.plans)) as pool:
            return list(pool.map(call, range(len(self.plans)), self.plans))

    def decode(
        self,
        steps: list[Step],
        query_len: int,
        pools: Sequence[torch.Tensor | None] | None = None,
        **options: Any,
    ) -> None:
        """Every rank's decode; `pools` has one a rank."""
        options = {"slot": 0, "tagged": False, "decode_query_len": query_len} | options
        pools = pools or [None] * len(steps)
        self.each(
            lambda rank, plan: plan.decode(
                *steps[rank], comm=self.comms[rank], pool=pools[rank], **options
            )
        )

    def decode_pools(self, value: int = 0) -> list[torch.Tensor]:
        """A decode pool of every rank's own."""
        return [
            torch.full(plan.decode_pool_shape(), value, dtype=torch.uint8, device=plan.device)
            for plan in self.plans
        ]


def outputs(tensors: list[torch.Tensor]) -> Array:
    """All ranks' outputs as one, heads joined."""
    return np.concatenate([x.cpu().numpy() for x in tensors], axis=1)


def planes(tensors: list[torch.Tensor]) -> Array:
    """All ranks' score planes [W, rows, 4, K]."""
    return np.stack([x.cpu().numpy() for x in tensors])
