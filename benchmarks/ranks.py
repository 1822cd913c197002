"""Ranks of the torch plan that decode a case, for host.py and exchange.py."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import check
from benchmarks.baselines import tensors
from benchmarks.cases import INIT_BLOCKS, LOCAL_BLOCKS, PAGE_SIZE, Decode
from benchmarks.inputs import Inputs
from benchmarks.stages import POISON
from msa_icp_jax.geometry import NUM_HEADS, TOPK
from msa_icp_jax.rows import ROW_WORDS

# A bare checkout has the package beside this one; an installed one comes first.
sys.path.append(str(Path(__file__).parents[1] / "interop"))
_SPIN_LIMIT = 1 << 24  # looks, some seconds
_READ = ("queries", "keys", "table", "lens", "counts", "scores")


class Rank:
    """A rank's plan, receive storage and tensors; all ranks read the same inputs."""

    def __init__(
        self,
        case: Decode,
        inputs: Inputs,
        rank: int,
        *,
        route: str = "direct",
        tagged: bool = True,
        storage: Any = None,
    ) -> None:
        import torch

        self.case, self._tagged = case, tagged
        self.plan = plan_of(case, rank, route)
        self.comm = self.plan.init_comm(storage)
        fixed = tensors(inputs.fixed)
        self.sets = [fixed | tensors(one_set) for one_set in inputs.sets]
        device, columns = fixed["keys"].device, self.plan.decode_score_shape()[2]
        for arrays in self.sets:
            arrays["scores"] = torch.empty(case.tokens, NUM_HEADS, columns, device=device)
        shape = (case.tokens, case.heads_per_rank, TOPK)
        self.output = torch.full(shape, POISON, dtype=torch.int32, device=device)

    def warm(self, addresses: Sequence[int] = ()) -> None:
        """Compiles decode; with the addresses of all ranks' storage it is one-sided."""
        if addresses:
            self.comm.connect(addresses)
        arrays = self.sets[0]
        self.plan.warmup(
            arrays["keys"],
            table_width=arrays["table"].shape[1],
            batch_sizes=[len(self.case.lens)],
            query_lens=[self.case.query_len],
            comm=self.comm,
            tagged=self._tagged,
            prefill=False,
        )

    def decode(self, number: int, queries: Any = None) -> None:
        """A decode on the set of that number, in its slot, of these queries or its own."""
        arrays = self.sets[number % len(self.sets)]
        own, *rest = (arrays[name] for name in _READ)
        self.plan.decode(
            own if queries is None else queries,
            *rest,
            self.output,
            comm=self.comm,
            slot=number,
            tagged=self._tagged,
            decode_query_len=self.case.query_len,
        )

    def sent(self, number: int) -> np.ndarray:
        """The rows that a decode sent to every rank, by its score plane [W, hpr, T, 33]."""
        arrays, case = self.sets[number % len(self.sets)], self.case
        planes = np.ascontiguousarray(check.host(arrays["scores"])[..., : case.columns])
        rows = check.oracle.select(planes, check.host(arrays["counts"]), INIT_BLOCKS, LOCAL_BLOCKS)
        return rows.reshape(case.world_size, case.heads_per_rank, case.tokens, ROW_WORDS)

    def check(self, received: np.ndarray) -> None:
        """Raises `check.Mismatch` unless these rows were merged, and no faults were counted."""
        counts = self.sets[0]["counts"]
        check.check_merged(self.case.tokens, received, counts, self.output, self.comm.errors)


def plan_of(case: Decode, rank: int, route: str) -> Any:
    import torch

    import msa_icp_torch

    return msa_icp_torch.prepare_msa_icp_indexer(
        world_size=case.world_size,
        rank=rank,
        num_index_heads=NUM_HEADS,
        page_size=PAGE_SIZE,
        init_blocks=INIT_BLOCKS,
        local_blocks=LOCAL_BLOCKS,
        max_decode_tokens=case.tokens,
        max_decode_query_len=case.query_len,
        max_num_batched_tokens=case.tokens,
        max_num_seqs=len(case.lens),
        max_model_len=max(case.lens),
        num_sparse_layers=3,
        device=torch.device("cuda", torch.cuda.current_device()),
        backend="mosaic",
        route=route,
        spin_limit=_SPIN_LIMIT,
    )
