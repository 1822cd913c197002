"""Steps of several layers by the one-sided transport on two GPUs, checked on the device.

In one process with both GPUs, or as one process of two, a GPU each:
  python one_sided_steps.py both|COORDINATOR RANK steps|stop PAGE_SIZE GRAPHS STEPS
It goes through both forms of rows. GRAPHS is what XLA's command buffers take ("" for none). `steps`
runs many with random delays of one rank; `stop` leaves rank 1 out of a step, which only two
processes can do, and recovers.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import peer_comm
from chains import ALL, AXIS, INDEX_K, OUTPUT, SCORES, make_plan, random_decode
from inputs import TIME_LIMIT
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from msa_icp_jax import one_sided, peer_storage

LAYERS, CASES = 6, 8
LENGTHS = [300, 0, 4000, 1, 2050, 777, 128, 4096]


class Steps:
    """A plan on both GPUs and a program of a step: LAYERS layers, their ids compared at once."""

    def __init__(self, page_size: int, tagged: bool, graphs: str) -> None:
        self.plan = make_plan(2, page_size, backend="auto", transport="one-sided")
        self.mesh = jax.make_mesh(
            (2,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:2]
        )
        self.tagged = tagged
        self.cases = [random_decode(LENGTHS, 1, page_size, pages=100, seed=i) for i in range(CASES)]
        self.comm = self.plan.init_comm(self.mesh)
        tokens, columns = len(LENGTHS), 2 * self.plan.geometry.score_columns
        self.scores = self.put(np.zeros((tokens, 4, columns), np.float32), SCORES)
        self.output = self.put(np.zeros((tokens, 4, 16), np.int32), OUTPUT)
        self.wrong = self.put(np.zeros(2, np.int32), P(AXIS))
        self.inputs = self._inputs()
        self.run = self._program({"xla_gpu_enable_command_buffer": graphs})

    def put(self, value: np.ndarray, spec: P = ALL) -> jax.Array:
        """A global array, of which each process gives its GPUs' parts."""
        sharding = NamedSharding(self.mesh, spec)
        return jax.make_array_from_callback(value.shape, sharding, lambda part: value[part])

    def _inputs(self) -> tuple[jax.Array, ...]:
        """All cases' arrays, one behind the other, and their answers."""
        float8 = jnp.float8_e4m3fn

        def stacked(name: str) -> np.ndarray:
            return np.stack([getattr(case, name) for case in self.cases])

        keys = np.stack([case.cache.keys for case in self.cases]).view(float8)
        table = np.stack([case.cache.table for case in self.cases])
        answers = np.stack([case.answer(self.plan) for case in self.cases])
        return (
            self.put(stacked("query").view(float8)),
            self.put(keys, P(None, *INDEX_K)),
            self.put(table),
            self.put(stacked("seq_lens")),
            self.put(stacked("counts")),
            self.put(answers, P(None, *OUTPUT)),
        )

    def _program(self, options: dict[str, Any]) -> Any:
        plan = self.plan

        def step(inputs: Any, first: Any, naps: Any, state: Any) -> Any:
            scores, output, wrong, comm = state
            rank = lax.axis_index(AXIS)
            for layer in range(LAYERS):
                which = lax.rem(first + layer, CASES)
                query, keys, table, lengths, counts, want = (x[which] for x in inputs)
                query, output = lax.optimization_barrier((query, output))
                output = peer_comm.delayed(output, naps[rank, layer])
                output, scores, comm = plan.decode(
                    *(query, keys, table, lengths, counts, scores, output),
                    comm=comm,
                    slot=layer,
                    tagged=self.tagged,
                    decode_query_len=1,
                )
                wrong = wrong + jnp.sum(output != want, dtype=jnp.int32)
            return scores, output, wrong, comm

        whole = (ALL, P(None, *INDEX_K), ALL, ALL, ALL, P(None, *OUTPUT))
        state = (SCORES, OUTPUT, P(AXIS), plan.comm_specs())
        mapped = jax.shard_map(
            step,
            mesh=self.mesh,
            in_specs=(whole, ALL, ALL, state),
            out_specs=state,
            check_vma=False,
        )
        return jax.jit(mapped, donate_argnums=3, compiler_options=options)

    def compile(self) -> None:
        """Compiles, and returns when every process has."""
        state = (self.scores, self.output, self.wrong, self.comm)
        self.run.lower(self.inputs, np.int32(0), NO_NAPS, state).compile()
        peer_storage.wait_for_all(list(self.mesh.devices.flat))

    def step(self, first: int, naps: np.ndarray) -> None:
        """Queues a step from case `first` on; rank r naps naps[r, layer] times before a layer."""
        state = (self.scores, self.output, self.wrong, self.comm)
        self.scores, self.output, self.wrong, self.comm = self.run(
            self.inputs, np.int32(first), naps, state
        )

    def counts(self) -> tuple[int, int]:
        """Wrong ids and protocol faults so far on this process's GPUs."""
        found = [
            sum(int(np.asarray(shard.data).sum()) for shard in array.addressable_shards)
            for array in (self.wrong, self.comm.errors)
        ]
        return found[0], found[1]

    def renew(self) -> None:
        """Storage made anew, as after a protocol fault."""
        self.plan.free_comm(self.comm)
        self.comm = self.plan.init_comm(self.mesh)
        self.wrong = self.put(np.zeros(2, np.int32), P(AXIS))


NO_NAPS = np.zeros((2, LAYERS), np.int32)


def many_steps(steps: Steps, count: int) -> None:
    """Random delays of one rank or the other, up to some hundred microseconds."""
    rng = np.random.default_rng(0)
    delays = []
    for _ in range(64):
        naps = rng.integers(0, 200, (2, LAYERS)) * (rng.random((2, LAYERS)) < 0.1)
        naps[rng.integers(2)] = 0
        delays.append(jnp.asarray(naps.astype(np.int32)))
    for _ in range(3):  # compiles; records graphs, if there are any
        steps.step(0, NO_NAPS)
        jax.block_until_ready(steps.output)
    assert steps.counts() == (0, 0), steps.counts()
    start = time.perf_counter()
    for number in range(count):
        steps.step(number % CASES, np.asarray(delays[number % len(delays)]))
        if number % 200 == 199:
            jax.block_until_ready(steps.output)
    wrong, errors = steps.counts()
    seconds = time.perf_counter() - start
    print(f"{count} steps of {LAYERS} layers: {seconds / count * 1e6:.0f} us a step")
    assert (wrong, errors) == (0, 0), (wrong, errors)


def a_rank_that_stops(steps: Steps, rank: int) -> None:
    """Rank 1 leaves a step out: rank 0 answers -1 and counts; made anew, all is right again."""
    one_sided.SPIN_LIMIT = 1 << 19
    steps.compile()
    steps.step(0, NO_NAPS)
    assert steps.counts() == (0, 0), steps.counts()
    start = time.perf_counter()
    if rank == 0:
        steps.step(1, NO_NAPS)
        _, errors = steps.counts()
        assert errors >= LAYERS * 2 * len(LENGTHS), errors
        (shard,) = steps.output.addressable_shards
        assert (np.asarray(shard.data) == -1).all()
        print(f"given up after {time.perf_counter() - start:.2f} s, {errors} faults")
    steps.renew()
    for first in range(4):
        steps.step(first, NO_NAPS)
    assert steps.counts() == (0, 0), steps.counts()


def main(where: str, rank: int, what: str, page_size: int, graphs: str, count: int) -> None:
    if where != "both":
        jax.distributed.initialize(
            where, 2, rank, local_device_ids=[rank], initialization_timeout=TIME_LIMIT
        )
    for tagged in (True, False):
        steps = Steps(page_size, tagged, graphs)
        if what == "steps":
            many_steps(steps, count)
        else:
            a_rank_that_stops(steps, rank)
        steps.plan.free_comm(steps.comm)
        print("tagged" if tagged else "legacy", "rows: right", flush=True)
    print(f"rank {rank}: right")


if __name__ == "__main__":
    where, rank, what, page_size, graphs, count = sys.argv[1:]
    main(where, int(rank), what, int(page_size), graphs, int(count))
