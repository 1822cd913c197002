"""A process a GPU under torchrun: the exchange over NCCL, and one-sidedly through peers' memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_multigpu_jax import check_all, python

pytest.importorskip("torch", reason="torch is not installed (extra torch)")

WORKER = Path(__file__).with_name("torch_process.py")


def check_group(*arguments: Any) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    check_all([python(*torchrun, WORKER, *arguments)], "rank 1 of 2: right")


@pytest.mark.parametrize("page_size", [128, 256])
def test_the_plan_over_nccl(page_size: int) -> None:
    check_group("group", page_size)


@pytest.mark.parametrize("launch", ["eager", "graph"])
@pytest.mark.parametrize("form", ["legacy", "tagged"])
def test_ten_thousand_one_sided_steps(form: str, launch: str) -> None:
    check_group("one-sided", form, launch)
