"""Tuning of the select; `python tools/tune.py select` times other values."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Config:
    """What was chosen by measurement on an H200, or follows from what a thread can hold.

    Attributes:
      warp_columns: columns of a row that one warp can hold: 64 registers a lane.
      quick_columns: columns up to which one warp is as quick as four, where each token can have an
        SM of its own.
      full_warps: most warps of a CTA that has an SM to itself, where a warp takes two tokens of a
        narrow plane.
      full_columns: columns up to which their shared memory fits.
      narrow_warps: the same of wider planes.
      ctas_per_sm: CTAs that fit an SM where a warp takes a row of usual width; they walk their
        shares of many tokens.
      usual_columns: the most columns of such a row.
      wide_ctas_per_sm: the same of wider rows, which take 128 registers a thread.
    """

    warp_columns: int = 2048
    quick_columns: int = 2048
    full_warps: int = 32
    full_columns: int = 128
    narrow_warps: int = 20
    ctas_per_sm: int = 5
    usual_columns: int = 1024
    wide_ctas_per_sm: int = 4


CONFIG = Config()
