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
      full_warps: warps of a CTA that fills an SM, where a warp takes two tokens of a narrow plane;
        the compiler then keeps to the 64 registers that a thread can have.
      full_columns: columns up to which such a CTA's shared memory fits.
      ctas_per_sm: CTAs that fit an SM where a warp takes a row of usual width; they walk their
        shares of many tokens.
      usual_columns: the most columns of such a row.
      wide_ctas_per_sm: the same of wider rows, which take 128 registers a thread.
    """

    warp_columns: int = 2048
    quick_columns: int = 2048
    full_warps: int = 32
    full_columns: int = 128
    ctas_per_sm: int = 5
    usual_columns: int = 1024
    wide_ctas_per_sm: int = 4


CONFIG = Config()
