"""Candidate rows between ranks, over a torch.distributed process group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def check_kind(group: Any) -> None:
    """Raises unless `group` is a process group or None."""
    if group is None or (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        return
    raise TypeError(
        f"group must be a torch.distributed.ProcessGroup or None, got {type(group).__name__}"
    )


def check_group(group: dist.ProcessGroup | None, world_size: int, rank: int) -> None:
    """Raises unless `group` (None: the default one) has the plan's size and rank."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "the exchange needs torch.distributed: call torch.distributed.init_process_group first"
        )
    size, position = dist.get_world_size(group), dist.get_rank(group)
    if size != world_size or position != rank:
        raise ValueError(
            f"group must have world_size {world_size} and this process as rank {rank}, got size "
            f"{size} and rank {position}"
        )


def all_to_all(
    received: torch.Tensor, message: torch.Tensor, group: dist.ProcessGroup | None
) -> None:
    """Sends message[w] to rank w and writes what rank w sent into received[w].

    On a GPU both sides are ordered on the current stream. Every rank of the group must call with
    the same shape.
    """
    dist.all_to_all_single(received, message, group=group)
