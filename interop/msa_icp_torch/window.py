"""The prefill window plan in torch tensors: the JAX package's arithmetic, on a stream of torch's.

See `msa_icp_jax.ops.prefill_plan.balance` for what the tables mean.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from msa_icp_jax import MSAIcpScorePlan
from msa_icp_jax.geometry import HEAD_DIM, MAX_SUM
from msa_icp_jax.ops import prefill_plan
from msa_icp_jax.ops.prefill_plan import balance
from msa_icp_jax.ops.prefill_plan.balance import PrefillWork

_LENGTHS = ("qo_starts", "qo_lens", "kv_lens", "qo_offset")


@dataclasses.dataclass(frozen=True, eq=False)
class WindowPlan(MSAIcpScorePlan):
    """A window plan whose leaves are torch tensors, for the direct route."""

    def num_valid_pages(self, num_tokens: int | None = None) -> Any:
        """Visible blocks int32 [num_tokens] of every query row, 0 for padding rows."""
        leaves: Any = self
        return prefill_plan.visible_blocks(self, num_tokens, _Torch(leaves.qo_starts.device))


class _Torch:
    """torch as a `prefill_plan.namespace.Namespace`, its tensors on one device."""

    int32 = torch.int32
    amax = torch.amax
    clip = torch.clip
    concatenate = torch.concatenate
    cumsum = torch.cumsum
    maximum = torch.maximum
    minimum = torch.minimum
    stack = torch.stack
    where = torch.where
    zeros_like = torch.zeros_like

    def __init__(self, device: torch.device) -> None:
        self.arange = functools.partial(torch.arange, device=device)


def hidden_keys(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """NaN keys, float8_e4m3fn and bfloat16 [128, 128], loaded in place of unreadable pages."""
    shape = (HEAD_DIM, HEAD_DIM)
    codes = torch.full(shape, 0x7F, dtype=torch.uint8, device=device)
    wide = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=device)
    return codes.view(torch.float8_e4m3fn), wide


def build(
    lengths: tuple[torch.Tensor, ...],
    hidden: tuple[torch.Tensor, torch.Tensor],
    *,
    ctas: int,
    **bounds: Any,
) -> WindowPlan:
    """`MSAIcpIndexerPlan.prefill_window_plan` of the Mosaic backend, for a grid of `ctas`.

    `lengths` are qo_segment_lens, kv_segment_lens and qo_offset; `hidden` is from `hidden_keys`;
    `bounds` are total_q, max_query_len and max_seq_len.
    """
    qo_segment_lens = lengths[0]
    sums = qo_segment_lens.clamp(0, MAX_SUM).cumsum(0, dtype=torch.int64).clamp(max=MAX_SUM)
    starts = torch.cat([sums.new_zeros(1), sums])[:-1].to(torch.int32)
    xp = _Torch(qo_segment_lens.device)
    plan = WindowPlan(*prefill_plan.within(starts, *lengths, **bounds, xp=xp), **bounds)
    if plan.num_segments == 0:
        return plan
    ranges, tiles, tile_of = balance.work_tables(plan, ctas, xp)
    keys: Any = hidden
    return dataclasses.replace(plan, work=PrefillWork(ranges, tiles, tile_of, *keys))


def leaves(plan: Any) -> dict[str, torch.Tensor]:
    """The tensors of a window plan by name, in the order that kernels take them."""
    lengths = {name: getattr(plan, name) for name in _LENGTHS}
    if plan.work is None:
        return lengths
    return lengths | {f"work.{name}": leaf for name, leaf in plan.work._asdict().items()}


@functools.cache
def shapes(
    segments: int, total_q: int, ctas: int
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """What `leaves` must be like: the dtype and shape of each, by name."""
    nowhere = torch.device("meta")
    lengths = torch.zeros((3, segments), dtype=torch.int32, device=nowhere).unbind()
    bounds = {"total_q": total_q, "max_query_len": 0, "max_seq_len": 0}
    plan = build(lengths, hidden_keys(nowhere), ctas=ctas, **bounds)
    return {name: (leaf.dtype, tuple(leaf.shape)) for name, leaf in leaves(plan).items()}
