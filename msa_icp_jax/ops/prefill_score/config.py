"""How the prefill kernels spend an SM: its shared memory and its registers.

One CTA of 64 query tokens takes a whole SM, so nothing else competes for either. Measured on an
H200 at 8,192 tokens and contexts of 32K and 128K:

* Key slots: 8, 6, 5 and 4 took the same time. There are as many as fit: they bridge the time that
  block-table entries take to arrive.
* Two query slots let the next piece's queries come while the present one is worked on. bfloat16
  has room for one beside five key slots, or for two beside three: the former took 0.93 of the
  latter's time at 32K (4 ranks), 1.00 with 2 ranks, 1.02 in a window of eight segments of 16K to
  256K.
* Registers: the consumers' products alone are 128 a thread. The producer's warps need few.
* `min_quick_steps`: integer maxima, two steps together, take 0.93 of the time at 240 steps a CTA
  (8,192 tokens ending at 128K, 4 ranks), 0.95 at 480 and 180, 0.96 to 0.98 at 110 to 120 and 1.03
  at 54 to 62: every piece begins with steps that are counted, and a second loop is more code to
  fetch. In exact precision it does not fit the registers. bfloat16 takes float maxima: products
  take twice as long, behind which all maxima fit, and inf - inf makes NaN of single products, which
  `maxima.any_nan` does not look for.

docs/performance.md has what else was tried.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

_SM_REGISTERS = 1 << 16
_WARPGROUP_THREADS = 128

CONSUMERS = 2  # warpgroups that multiply, half a tile each


@dataclasses.dataclass(frozen=True)
class Config:
    """One form of the kernel.

    Attributes:
      query_slots: pieces whose queries are held.
      key_slots: key steps held, ready to be multiplied.
      raw_slots: key steps held that wait to be converted to float16; 0: keys are multiplied as they
        are.
      min_quick_steps: steps a CTA, at most, from which integer maxima are taken where they do.
      registers: of a thread of the consumers, of the producer, and of the converter if there is
        one.
    """

    query_slots: int
    key_slots: int
    raw_slots: int
    min_quick_steps: float
    registers: tuple[int, ...]

    @property
    def converts(self) -> bool:
        """Whether queries and keys are multiplied as float16."""
        return self.raw_slots > 0

    @property
    def warpgroups(self) -> int:
        """Consumers, the producer's and the converter's."""
        return CONSUMERS + 1 + self.converts

    def take_registers(self, role: int) -> None:
        """Sets the registers of a warpgroup by the place of its kind in `registers`."""
        given = _SM_REGISTERS // (_WARPGROUP_THREADS * self.warpgroups) // 8 * 8
        wanted = self.registers[role]
        plgpu.set_max_registers(wanted, action="increase" if wanted > given else "decrease")


FAST = Config(query_slots=2, key_slots=8, raw_slots=0, min_quick_steps=96, registers=(232, 40))
EXACT = Config(
    query_slots=1,
    key_slots=3,
    raw_slots=3,
    min_quick_steps=float("inf"),
    registers=(184, 40, 104),
)
BFLOAT16 = Config(
    query_slots=1,
    key_slots=5,
    raw_slots=0,
    min_quick_steps=float("inf"),
    registers=(232, 40),
)
CONFIGS = {"fast": FAST, "exact": EXACT, "bfloat16": BFLOAT16}


def config_of(dtype: Any, precision: str) -> Config:
    """The form for index keys of a type; sums of bfloat16 products are exact in any precision."""
    return CONFIGS["bfloat16" if dtype == jnp.bfloat16 else precision]
