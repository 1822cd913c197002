"""Device time of a stage from one jitted program that repeats it.

A program runs the stage *links* times over all input sets in turn, writing into donated buffers.
Each link's smallest input depends on the result of the link before, so that no two links overlap
and none can be dropped; that costs one tiny operation a link (1 to 2 microseconds on a GPU), which
graph.py does without. The program is long enough for its dispatch not to count.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.inputs import Inputs
from benchmarks.stages import Stage, initial, run

_MAX_SETS_PER_LINK = 4  # of the least that a loop's body has: each set adds to compile time


@dataclasses.dataclass(frozen=True)
class Times:
    """Microseconds of one link, one figure a program run."""

    us: tuple[float, ...]
    method: str

    @property
    def median(self) -> float:
        return statistics.median(self.us)

    @property
    def spread(self) -> tuple[float, float]:
        return min(self.us), max(self.us)


class JitRun:
    """A stage's program with its buffers."""

    def __init__(
        self,
        stage: Stage,
        inputs: Inputs,
        shapes: dict[str, Any],
        links: int,
        loop_links: int = 16,
    ) -> None:
        """Compiles.

        Args:
          stage, inputs: what runs, and on what.
          shapes: of the arrays that stages write.
          links: how many to run, rounded up to whole loops over the sets.
          loop_links: links of the loop's body at least; it has one for each set, four times
            that at most.
        """
        sets = inputs.sets[: _MAX_SETS_PER_LINK * loop_links]
        sets = [_after_prelude(stage, inputs.fixed, x, shapes) for x in sets]
        loop = sets * max(1, -(-min(links, loop_links) // len(sets)))
        self.links = len(loop) * -(-links // len(loop))
        self.last_set = inputs.fixed | sets[-1]
        self._inputs = (inputs.fixed, loop)
        self._written = _buffers(stage, inputs.fixed | sets[0], shapes)
        self._program = (
            _program(stage, self.links // len(loop)).lower(*self._inputs, self._written).compile()
        )

    def run(self) -> dict[str, Any]:
        """Runs once; the arrays written, as the last link (of the last set) left them."""
        self._written = jax.block_until_ready(self._program(*self._inputs, self._written))
        return self._written

    def times(self, runs: int) -> Times:
        """Times `runs` runs."""
        found = []
        for _ in range(runs):
            start = time.perf_counter()
            self.run()
            found.append((time.perf_counter() - start) * 1e6 / self.links)
        return Times(tuple(found), "jit")


def _program(stage: Stage, loops: int) -> Any:
    # A jitted link is traced and lowered once, however often it is called.
    link = jax.jit(stage.run)

    @functools.partial(jax.jit, donate_argnums=2)
    def program(fixed: Any, loop: list[Any], written: Any) -> Any:
        def once(_: Any, written: Any) -> Any:
            for one_set in loop:
                arrays = fixed | one_set | written
                arrays[stage.hinge] = arrays[stage.hinge] + _zero(written)
                # The barrier: every link's results are wanted whole, not just the word in _zero.
                written = lax.optimization_barrier(link(arrays))
            return written

        return once(0, written) if loops == 1 else lax.fori_loop(0, loops, once, written)

    return program


def _zero(written: dict[str, jax.Array]) -> jax.Array:
    """0, but only the written arrays' values say so: the bits of one word are never these."""
    words = [lax.bitcast_convert_type(x.ravel()[0], jnp.int32) for x in written.values()]
    return sum(((word == 0x7FABCDEF).astype(jnp.int32) for word in words), jnp.int32(0))


def _buffers(stage: Stage, arrays: dict[str, Any], shapes: dict[str, Any]) -> dict[str, jax.Array]:
    results = jax.eval_shape(stage.run, arrays | shapes)
    return {k: jnp.full(v.shape, initial(k), v.dtype) for k, v in results.items()}


def _after_prelude(
    stage: Stage, fixed: dict[str, Any], one_set: dict[str, Any], shapes: dict[str, Any]
) -> dict[str, Any]:
    """A set with what the stage's prelude makes of it."""
    if not stage.prelude:
        return one_set
    names = {name for part in stage.prelude for name in part.writes}
    arrays = (
        fixed | one_set | {n: jnp.full(shapes[n].shape, initial(n), jnp.float32) for n in names}
    )
    after = jax.jit(functools.partial(run, stage.prelude))(arrays)
    return one_set | {name: after[name] for name in names}
