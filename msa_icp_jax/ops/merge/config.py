"""Tuning of the merge; `python tools/tune.py merge` times other values."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Config:
    """What was chosen by measurement on an H200.

    Attributes:
      warp_rows_per_sm: (token, head) pairs an SM from which on a warp takes each; below it a
        warpgroup does, which has its answer sooner.
    """

    warp_rows_per_sm: int = 4


CONFIG = Config()
