"""Tuning of the decode scorer; `python tools/tune.py decode_score` times other values."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Config:
    """What was chosen by measurement, old and new kernels in turn, on an H200.

    Attributes:
      stages: slots of a warp's ring of pages, at most. More of them leave room for fewer CTAs on an
        SM: with two, five CTAs fit at pages of 4 KiB and three at 8 KiB.
      stage_bytes: what the slots of a warp may take together: a page of 16 KiB has one slot.
      late_from: steps of a CTA from which on late CTAs gain more than they cost.
      late_shift: the late CTAs take the part 2^-late_shift of all steps. Half as many late CTAs, or
        smaller parts, gained nothing.
      prefetched: steps of a CTA whose pages it asks the second-level cache for while the kernel
        before it ends; none, or more, gained nothing.
      prefetched_of_many: as many of a CTA with `many_steps` or more. They get in the way of that
        kernel, which pays only where a CTA has many.
      many_steps: see `prefetched_of_many`.
      early_columns: up to so many columns the select takes 56 registers of a thread, and its CTA
        may fit beside the scorer's: the select is then let in at the scorer's start.
    """

    stages: int = 2
    stage_bytes: int = 16 << 10
    late_from: int = 10
    late_shift: int = 3
    prefetched: int = 1
    prefetched_of_many: int = 2
    many_steps: int = 12
    early_columns: int = 256

    def stages_of(self, page_bytes: int) -> int:
        """Slots of a warp for pages of so many bytes on this rank."""
        return max(1, min(self.stages, self.stage_bytes // page_bytes))


CONFIG = Config()
