"""The one-sided exchange between processes that share a GPU, through CUDA IPC."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra torch)")

import torch_ipc_worker  # noqa: E402
from inputs import TIME_LIMIT  # noqa: E402

if not torch.cuda.is_available():
    pytest.skip("torch sees no GPU", allow_module_level=True)


@pytest.mark.parametrize(("world_size", "page_size"), [(2, 128), (4, 256)])
def test_ranks_in_processes_of_their_own(world_size, page_size):
    """Without MPS the processes take turns on the GPU: a wait lasts until the peer's turn."""
    context = torch.multiprocessing.get_context("spawn")
    queues = [context.Queue() for _ in range(world_size)]
    barrier = context.Barrier(world_size, timeout=TIME_LIMIT)
    torch.multiprocessing.spawn(  # raises what a rank raises, and ends the others
        torch_ipc_worker.run, (world_size, page_size, queues, barrier), nprocs=world_size
    )
