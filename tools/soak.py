"""Many decode steps of changing batches through one receive storage, every step checked.

    make soak                                  # 5,000 steps on the CPU
    CUDA=13 make soak ARGS="--steps 100000"    # on a GPU

All ranks run on one device. The batches differ in requests, query length, lengths and tables. On
the device every step's ids are compared with the oracle's; every `--check-every` steps a batch that
was not seen before is made, and its ids, the storage's counters and the memory are checked on the
host. The exit status is 1 at the first difference, protocol fault or growth.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import resource
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT), str(ROOT / "tests")]

import chains  # noqa: E402
import oracle  # noqa: E402
from chains import OUTPUT, Decode, Ranks, random_decode  # noqa: E402

SHAPES = [(1, 1), (3, 1), (5, 2), (4, 8), (8, 4)]  # (requests, query length)
BATCHES_PER_SHAPE = 4
MIB = 1 << 20
MOST_GROWTH = 64 * MIB  # of the process after the first check; its allocators need to settle


class State(NamedTuple):
    """What one step hands to the next, all of it donated."""

    scores: jax.Array
    output: jax.Array
    comm: Any
    calls: jax.Array  # int32: the running count that chooses the slot
    wrong: jax.Array  # int32: steps whose ids were not the oracle's


class Soak:
    """The steps of one plan."""

    def __init__(self, ranks: Ranks, seed: int, tagged: bool) -> None:
        self.ranks, self.tagged = ranks, tagged
        self.rng = np.random.default_rng(seed)
        self.seeds = itertools.count(seed)
        self.calls = 0
        self.batches = [self.batch(*s) for s in SHAPES for _ in range(BATCHES_PER_SHAPE)]
        scores, output = ranks.decode_arrays(self.fresh(*SHAPES[-1]), spare=0)[5:]
        zero = [ranks.put(np.zeros((), np.int32)) for _ in range(2)]
        self.state = State(scores, output, ranks.put_comm(ranks.zero_comm()), *zero)

    def fresh(self, requests: int, query_len: int) -> Decode:
        """A batch that was not seen before; some of its requests are padding."""
        longest = self.ranks.plan.geometry.max_model_len
        lengths = self.rng.integers(1, longest + 1, requests)
        lengths[self.rng.random(requests) < 0.2] = 0
        size = self.ranks.plan.geometry.page_size
        pages, width = requests * -(-longest // size), -(-longest // size)
        seed = next(self.seeds)
        return random_decode(lengths.tolist(), query_len, size, pages=pages, width=width, seed=seed)

    def batch(self, requests: int, query_len: int) -> tuple[Decode, list[jax.Array], jax.Array]:
        """(case, its arrays on the device, the ids that must come out)."""
        case = self.fresh(requests, query_len)
        return case, self.ranks.decode_arrays(case)[:5], self.ranks.put(self.answer(case), OUTPUT)

    def answer(self, case: Decode) -> np.ndarray:
        """The oracle's ids [T, 4, 16]; `Case.answer` would keep every case that it was asked."""
        geometry = self.ranks.plan.geometry
        scores = case.global_scores(geometry.score_columns * geometry.index_scale).scores
        return oracle.answer(scores, case.counts, geometry.init_blocks, geometry.local_blocks)

    def step(self, batch: tuple[Decode, list[jax.Array], jax.Array]) -> None:
        """Sends one step; nothing waits for it."""
        case, arrays, want = batch
        run = _program(self.ranks.plan, case.query_len, self.tagged)
        self.state = run(self.state, arrays, want)
        self.calls += 1

    def compile(self) -> None:
        """Every program that a step may need, all at a time."""
        one_of_each = self.batches[::BATCHES_PER_SHAPE]
        with ThreadPoolExecutor() as pool:
            list(pool.map(self._compile, one_of_each))

    def _compile(self, batch: tuple[Decode, list[jax.Array], jax.Array]) -> None:
        case, arrays, want = batch
        run = _program(self.ranks.plan, case.query_len, self.tagged)
        run.lower(self.state, arrays, want).compile()

    def check(self) -> None:
        """A batch not seen before; then everything that is known about the state."""
        batch = self.batch(*SHAPES[self.rng.integers(len(SHAPES))])
        self.step(batch)
        tokens = len(batch[0].query)
        output = self.ranks.get(self.state.output, OUTPUT)[:tokens]
        np.testing.assert_array_equal(output, self.answer(batch[0]))
        assert int(self.state.wrong) == 0, f"{int(self.state.wrong)} steps gave wrong ids"
        assert int(self.state.calls) == self.calls
        comm = self.ranks.get_comm(self.state.comm)
        assert not comm["errors"].any(), f"protocol faults: {comm['errors']}"
        if self.tagged:  # row 0 is written by every call, so it counts the calls of its slot
            uses = [(self.calls + 2 - slot) // 3 for slot in range(3)]
            for name in ("publish_generations", "expected_generations"):
                assert (comm[name][:, :, 0] == np.array(uses)[:, None]).all(), name
        else:
            assert not comm["recv"][..., 32].any(), "a flag was left"


@functools.cache
def _program(plan: Any, query_len: int, tagged: bool) -> Any:
    decode = plan.decode_program(None, decode_query_len=query_len, tagged=tagged, with_comm=True)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: State, arrays: list[jax.Array], want: jax.Array) -> State:
        output, scores, comm = decode(*arrays, state.scores, state.output, state.comm, state.calls)
        wrong = (output[:, : want.shape[1]] != want).any().astype(jnp.int32)
        return State(scores, output, comm, state.calls + 1, state.wrong + wrong)

    return step


def device_bytes() -> int:
    """What the device's allocator has given out, or what JAX's live arrays hold (CPU)."""
    stats = jax.devices()[0].memory_stats()
    return stats["bytes_in_use"] if stats else sum(x.nbytes for x in jax.live_arrays())


def process_bytes() -> int:
    """The process's size at most so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(arguments: list[str] | None = None) -> int:
    """Runs the steps that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--check-every", type=int, default=1000)
    parser.add_argument("--world-size", type=int, default=4, choices=(2, 4))
    parser.add_argument("--page-size", type=int, default=128, choices=(128, 256))
    parser.add_argument("--legacy", action="store_true", help="flagged rows, not tagged ones")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    plan = chains.make_plan(
        options.world_size, options.page_size, backend="auto", max_model_len=4096
    )
    soak = Soak(Ranks(plan, None), options.seed, not options.legacy)
    print(f"soak: {options.steps} steps, {jax.devices()[0].device_kind}, backend {plan.backend}")
    soak.compile()
    for batch in soak.batches:
        soak.step(batch)
    soak.check()
    first_device, first_process = device_bytes(), None
    start = time.monotonic()
    for done in range(1, options.steps + 1):
        soak.step(soak.batches[soak.rng.integers(len(soak.batches))])
        if done % options.check_every and done != options.steps:
            continue
        soak.check()
        device = device_bytes() - first_device
        assert device < MIB, f"the device's memory grew by {device} bytes in {done} steps"
        if first_process is None:
            first_process = process_bytes()
        process = process_bytes() - first_process
        assert process < MOST_GROWTH, f"the process grew by {process} bytes in {done} steps"
        rate = done / (time.monotonic() - start)
        print(
            f"soak: {done} steps right, {rate:.0f} a second, "
            f"device memory {device:+d} bytes, process {process / MIB:+.1f} MiB",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    sys.exit(main())
