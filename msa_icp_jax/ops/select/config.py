"""Tuning of the select."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Config:
    """What was chosen by measurement on an H200, or follows from what a thread can hold.

    Attributes:
      warp_columns: columns of a row that one warp can hold: 64 registers a lane.
      quick_columns: columns up to which one warp is as quick as four, where each token can have an
        SM of its own.
      ctas_per_sm: CTAs that fit an SM where a warp takes a row; they walk their shares of many
        tokens.
    """

    warp_columns: int = 2048
    quick_columns: int = 2048
    ctas_per_sm: int = 5


CONFIG = Config()
