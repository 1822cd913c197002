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


def test_the_plan_over_nccl() -> None:
    check_group("group")


def test_ten_thousand_one_sided_steps() -> None:
    check_group("one-sided")
