"""How the prefill kernels spend an SM: its shared memory and its registers.

One CTA of 64 query tokens takes a whole SM, so nothing else competes for either. Measured on an
H200 at 8,192 tokens and contexts of 32K and 128K:

* Key slots bridge the time that block-table entries take to arrive; alone the scorer took the same
  time with 8, 6, 5 and 4. With up to 5 (fp8) a select behind it has more of the SM as its cache:
  score and select took 0.93 of the time with 6 for eight segments of 16K to 256K, 0.98 at 128K and
  for 2,048 tokens at 128K (4 ranks). With 3 it took 0.97 there, and the same with 4 ranks at 32K,
  but up to 1.01 with 2 ranks, which have 5.
* Two query slots let the next piece's queries come while the present one is worked on. bfloat16
  has room for one beside five key slots, or for two beside three: the former took 0.93 of the
  latter's time at 32K (4 ranks), 1.00 with 2 ranks, 1.02 in a window of eight segments of 16K to
  256K.
* Four consumers of 64 query rows hide what they do behind each other's products better than two of
  128. Beside a converter they lack registers; bfloat16 took 1.01 to 1.03 of the time with four.
* Integer maxima and staged columns took 0.93 to 0.99 of the time from 53 steps a CTA on (32K, 4
  ranks) and 1.07 to 1.08 at 8 and 16 (8K, 4 and 2 ranks): a window is *short* below 30. With float
  maxima and columns stored step by step score and select took 0.93 and 0.99 there.
* Registers: a consumer's products are 64 a thread for each 64 rows. The producer's warps need few.
* bfloat16 takes float maxima: products take twice as long, behind which all maxima fit, and
  inf - inf makes NaN of single products, which `maxima.integer_maxima` does not look for. Nor is
  there room to stage a plane's lines, beside the converter's either.

docs/performance.md has what else was tried.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

_SM_REGISTERS = 1 << 16
_WARPGROUP_THREADS = 128


@dataclasses.dataclass(frozen=True)
class Config:
    """One form of the kernel.

    Attributes:
      consumers: warpgroups that multiply, an equal part of a tile each.
      query_slots: pieces whose queries are held.
      key_slots: key steps held, ready to be multiplied.
      raw_slots: key steps held that wait to be converted to float16; 0: keys are multiplied as they
        are.
      staged_columns: columns of the plane that are gathered before they are stored, 0: none.
      integer_maxima: whether integer maxima are taken where they do.
      registers: of a thread of the consumers, of the producer, and of the converter if there is
        one.
    """

    consumers: int
    query_slots: int
    key_slots: int
    raw_slots: int
    staged_columns: int
    integer_maxima: bool
    registers: tuple[int, ...]

    @property
    def converts(self) -> bool:
        """Whether queries and keys are multiplied as float16."""
        return self.raw_slots > 0

    @property
    def warpgroups(self) -> int:
        """Consumers, the producer's and the converter's."""
        return self.consumers + 1 + self.converts

    def take_registers(self, role: int) -> None:
        """Sets the registers of a warpgroup by the place of its kind in `registers`."""
        given = _SM_REGISTERS // (_WARPGROUP_THREADS * self.warpgroups) // 8 * 8
        wanted = self.registers[role]
        plgpu.set_max_registers(wanted, action="increase" if wanted > given else "decrease")


FAST = Config(
    consumers=4,
    query_slots=2,
    key_slots=5,
    raw_slots=0,
    staged_columns=32,
    integer_maxima=True,
    registers=(112, 32),
)
FOUR_PAGES = dataclasses.replace(FAST, key_slots=3)
SHORT = dataclasses.replace(FAST, staged_columns=0, integer_maxima=False)
EXACT = Config(
    consumers=2,
    query_slots=1,
    key_slots=3,
    raw_slots=3,
    staged_columns=0,
    integer_maxima=False,
    registers=(184, 40, 104),
)
BFLOAT16 = Config(
    consumers=2,
    query_slots=1,
    key_slots=5,
    raw_slots=0,
    staged_columns=0,
    integer_maxima=False,
    registers=(232, 40),
)
LONG_STEPS = 30  # of a CTA, at most, from which a window is not short


def config_of(dtype: Any, precision: str, steps: float, pages: int) -> Config:
    """The form for index keys of a type; sums of bfloat16 products are exact in any precision.

    Args:
      dtype: of queries and keys.
      precision: "fast" or "exact".
      steps: of a CTA, at most.
      pages: of a step.
    """
    if dtype == jnp.bfloat16:
        return BFLOAT16
    if precision == "exact":
        return EXACT
    if steps < LONG_STEPS:
        return SHORT
    return FOUR_PAGES if pages == 4 else FAST
