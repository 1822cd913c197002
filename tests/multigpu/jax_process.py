"""One process of test_multigpu_jax.py: one rank on one GPU, the exchange over NCCL.

Usage: python jax_process.py COORDINATOR WORLD_SIZE RANK
"""

from __future__ import annotations

import sys

import jax
from chains import make_plan
from inputs import TIME_LIMIT
from multiprocess_worker import Process


def main(coordinator: str, world_size: int, rank: int) -> None:
    jax.distributed.initialize(
        coordinator,
        world_size,
        rank,
        local_device_ids=[rank],
        initialization_timeout=TIME_LIMIT,
    )
    assert jax.process_count() == world_size and len(jax.local_devices()) == 1
    plan = make_plan(world_size, 256, max_model_len=8192, backend="auto")
    assert plan.backend == "mosaic"
    process = Process(rank, plan)
    process.decode("")
    process.prefill()
    process.write()
    print(f"rank {rank} of {world_size}: right")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
