"""The chain inside one jitted program: `python -m benchmarks.jax_chain --out FILE` on two GPUs.

What a layer more costs, in microseconds: the slope between one call and several calls in a row of a
program of 48 layers, by the host's clock, everything donated. A layer's queries wait for what the
layer before chose, as a model's do, and the first call waits for a nap of the GPU, in which the
host gets ahead as it does in a model's step; `host_us` is its own part of a layer. Transports:
"none" (score and select), "all-to-all" (the bare collective with the rows' bytes), and decode's.

Here two GPUs of one process are the ranks of every case. On one GPU the stage runs under
`python -m benchmarks`: one rank's share, whose own rows arrive as every source's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import check
from benchmarks.__main__ import parser_of, refusing
from benchmarks.cases import INIT_BLOCKS, LOCAL_BLOCKS, RANK, Decode, of_ranks
from benchmarks.results import Refused
from benchmarks.stages import POISON, Arrays, Inputs, plan_options
from benchmarks.timing import Times, on_clock
from msa_icp_jax import MSAIcpComm, one_sided, prepare_msa_icp_indexer
from msa_icp_jax.comm import NO_ROWS, comm_shapes, exchange
from msa_icp_jax.geometry import NUM_HEADS, NUM_SLOTS, TOPK
from msa_icp_jax.rows import ROW_WORDS

peer_comm = importlib.import_module("peer_comm")  # of the tests, as the oracle of `check`

ALONE = ("none", "one-sided-legacy", "one-sided-tagged")
TRANSPORTS = ("none", "all-to-all", "collective", "one-sided-legacy", "one-sided-tagged")
AXIS, BACKEND = "icp", "mosaic"
# Launched one by one, kernels start under their predecessors' ends; in XLA's graphs they do not.
OPTIONS = {"xla_gpu_enable_command_buffer": ""}
_LAYERS, _LOOPS = 6, 8  # of a loop's body: whole turns of the three slots; and how often it runs
_CALLS, _ROUNDS = (1, 4), 7
_NAPS = 2500  # some milliseconds
_READ = ("queries", "keys", "table", "lens", "counts")
_SPIN_LIMIT = 1 << 22  # looks, some seconds


def compile_for(case: Decode, transport: str, mesh: Mesh | None, inputs: Inputs, sets: int) -> Any:
    """The compiled program, from shapes of one rank's inputs with one set."""
    chain = Chain(case, transport, mesh)
    return chain.jitted.lower(*chain.abstract(inputs, sets)).compile()


def measure(
    case: Decode, inputs: Inputs, transport: str, mesh: Mesh | None = None, program: Any = None
) -> Times:
    """Checks the chain of a case over a transport of `TRANSPORTS` and times a layer of it.

    The inputs are one rank's. On a mesh every GPU is a rank; without one `RANK` is alone and has
    the transports `ALONE`. The program is from `compile_for`, or None.
    """
    chain, layers = Chain(case, transport, mesh), _LAYERS * _LOOPS
    with chain.running(inputs, program):
        chain.check()
        pairs = [[chain.us_of(calls) for calls in _CALLS] for _ in range(_ROUNDS)]
        # Until a call returns, while the GPU has nothing else to do.
        host = on_clock(chain.call, _ROUNDS, layers, "host", chain.idle).median
        chain.check()
    more = layers * (_CALLS[1] - _CALLS[0])
    us = tuple((many - few) / more for few, many in pairs)
    return Times(us, "jit", {"host_us": round(host, 3)})


class Chain:
    """A case's layers over a transport, and the arrays that they take."""

    def __init__(self, case: Decode, transport: str, mesh: Mesh | None) -> None:
        one_sided.SPIN_LIMIT = _SPIN_LIMIT
        self.case, self.transport, self.mesh = case, transport, mesh
        self._one_sided = transport.startswith("one-sided")
        self.plan = prepare_msa_icp_indexer(
            rank=None if mesh else RANK,
            backend=BACKEND,
            transport="one-sided" if self._one_sided else "collective",
            **plan_options(case),
        )
        self._devices = list(mesh.devices.flat) if mesh else jax.devices()[:1]
        self._layer_once = jax.jit(self._layer)  # traced once, however often it is called

    # ---- arrays ----

    def abstract(self, inputs: Inputs, sets: int) -> tuple[Any, ...]:
        """The arguments of the program, from shapes of arrays."""
        state, geometry = jax.eval_shape(self._buffers), self.plan.geometry
        if self._one_sided:
            shapes = comm_shapes(geometry.world_size, geometry.max_decode_tokens, one_sided=True)
            words = {k: jax.ShapeDtypeStruct(x, np.int32) for k, x in shapes.items() if x[0]}
            nothing: Any = dict.fromkeys(shapes, NO_ROWS)
            state["comm"] = MSAIcpComm(**(nothing | words))
        return self._placed(Inputs(inputs.fixed, inputs.sets * min(sets, _LAYERS)), state)

    @contextlib.contextmanager
    def running(self, inputs: Inputs, program: Any = None) -> Iterator[None]:
        """The program with arrays, one-sided storage among them."""
        arguments = self._placed(inputs, self._buffers())
        self._fixed, self._sets, self._state = arguments
        with self._storage(self._state):
            self._program = program or self.jitted.lower(*arguments).compile()
            words = [jax.device_put(np.zeros(1, np.int32), x) for x in self._devices]
            self._words = list(map(_nap, words))  # compiles
            yield

    @contextlib.contextmanager
    def _storage(self, state: Arrays) -> Iterator[None]:
        if not self._one_sided:
            yield
        elif self.mesh is None:
            with peer_comm.loopback(self.plan) as state["comm"]:
                yield
                jax.block_until_ready(state)
        else:
            state["comm"] = self.plan.init_comm(self.mesh)
            yield
            self.plan.free_comm(state["comm"])

    def _buffers(self) -> Arrays:
        """What goes from layer to layer, as one rank's arrays."""
        tokens, geometry = self.case.tokens, self.plan.geometry
        by_owner = (geometry.world_size, geometry.heads_per_rank, tokens, ROW_WORDS)
        plane = np.full((tokens, NUM_HEADS, geometry.score_columns), POISON, np.float32)
        state: Arrays = {"scores": plane, "output": _words(tokens, by_owner[1], TOPK)}
        if self.transport == "all-to-all":
            state["rows"] = _words(*by_owner)
        elif self.transport == "none":  # every layer's: else only the last ones would be wanted
            state["every"] = [_words(*by_owner) for _ in range(_LAYERS)]
        return state

    def _placed(self, inputs: Inputs, state: Arrays) -> tuple[Any, ...]:
        """All ranks' arguments, of each of which every rank's part is as given."""

        def replicated(arrays: Arrays) -> Arrays:
            return {name: self._place(P(), arrays[name]) for name in _READ if name in arrays}

        def spread(spec: P, tree: Any) -> Any:
            return jax.tree.map(functools.partial(self._place, spec), tree)

        specs = {name: self._specs[name] for name in state}
        placed = jax.tree.map(spread, specs, state, is_leaf=lambda x: isinstance(x, P))
        return replicated(inputs.fixed), [replicated(x) for x in inputs.sets[:_LAYERS]], placed

    @property
    def _specs(self) -> Arrays:
        specs = dict.fromkeys(jax.eval_shape(self._buffers), P(AXIS))
        return specs | ({"comm": self.plan.comm_specs()} if self._one_sided else {})

    def _place(self, spec: P, local: Any) -> Any:
        """An array or a struct of which every rank has `local` as its part."""
        abstract = isinstance(local, jax.ShapeDtypeStruct)
        if self.mesh is None:
            return local if abstract else jax.device_put(local, may_alias=False)
        size, sharding = self.mesh.size, NamedSharding(self.mesh, spec)
        axes = itertools.zip_longest(local.shape, spec)
        shape = tuple(n * size if axis else n for n, axis in axes)
        if abstract:
            return jax.ShapeDtypeStruct(shape, local.dtype, sharding=sharding)
        parts = [jax.device_put(local, device, may_alias=False) for device in self._devices]
        return jax.make_array_from_single_device_arrays(shape, sharding, parts)

    # ---- the program ----

    @property
    def jitted(self) -> Any:
        """The program of (fixed arrays, sets, state), which it gives back."""

        def run(fixed: Any, sets: Any, state: Arrays) -> Arrays:
            def once(_: Any, state: Arrays) -> Arrays:
                every = list(state.pop("every", ()))
                for number in range(_LAYERS):
                    arrays = fixed | sets[number % len(sets)]
                    # Each layer's queries wait for what the one before left.
                    waiting = lax.optimization_barrier((arrays["queries"], state, every))
                    arrays["queries"], state, every = waiting
                    state, rows = self._layer_once(arrays, state, jnp.int32(number % NUM_SLOTS))
                    every = [rows if i == number else x for i, x in enumerate(every)]
                return state | ({"every": every} if every else {})

            return lax.fori_loop(0, _LOOPS, once, state)

        if self.mesh:
            options: Any = {"in_specs": (P(), P(), self._specs), "out_specs": self._specs}
            run = jax.shard_map(run, mesh=self.mesh, check_vma=False, **options)
        return jax.jit(run, donate_argnums=2, compiler_options=OPTIONS)

    def _layer(self, arrays: Arrays, state: Arrays, slot: Any) -> tuple[Arrays, Any]:
        """The state behind a layer; and rows that no buffer of it holds."""
        plan, read = self.plan, [arrays[name] for name in _READ]
        if self.transport == "all-to-all":
            return state | {"rows": exchange(state["rows"], AXIS)}, None
        options: Arrays = {"decode_query_len": self.case.query_len}
        if self.transport == "none":
            rows, scores, _ = plan.decode_local(*read, state["scores"], **options)
            return state | {"scores": scores}, rows
        if self._one_sided:
            options |= {"slot": slot, "tagged": self.transport == "one-sided-tagged"}
            options["comm"] = state["comm"]
        output, scores, comm = plan.decode(*read, state["scores"], state["output"], **options)
        written = {"scores": scores, "output": output, "comm": comm}
        return state | {name: written[name] for name in state}, None

    # ---- running it ----

    def us_of(self, calls: int) -> float:
        """Microseconds of so many calls in a row, and of the nap before them."""

        def run() -> None:
            self._words = list(map(_nap, self._words))
            for _ in range(calls):
                self.call()
            self.idle()

        return on_clock(run, 1, 1, "jit", self.idle).median

    def idle(self) -> None:
        """Waits for the GPU."""
        jax.block_until_ready((self._state, self._words))

    def call(self) -> None:
        # In place: whoever made the storage frees what the last call returned.
        self._state.update(self._program(self._fixed, self._sets, dict(self._state)))

    def check(self) -> None:
        """Raises `check.Mismatch` unless a call's last layer found what it should."""
        state = self._state
        if self.transport == "all-to-all":
            before = np.asarray(state["rows"])
            self.call()  # every other exchange undoes the one before it; it has an even number
            if not np.array_equal(before, np.asarray(state["rows"])):
                raise check.Mismatch("an all-to-all that is undone leaves other rows")
            return
        self.call()
        tokens = check.sample(self.case.tokens)
        counts = np.asarray(self._fixed["counts"])[tokens]
        planes = [np.ascontiguousarray(x[tokens]) for x in self._parts(state["scores"])]
        if self.transport == "none":
            for plane, rows in zip(planes, self._parts(state["every"][-1]), strict=True):
                found = rows.reshape(NUM_HEADS, -1, ROW_WORDS)[:, tokens]
                check.check_rows(len(tokens), plane, counts, found)
            return
        messages = [_message(x, counts, self.case.world_size) for x in planes]
        errors = state["comm"].errors if "comm" in state else np.zeros(1)
        for owner, output in enumerate(self._parts(state["output"])):
            # Alone, a rank's rows for an owner come back as that source's.
            arrived = np.stack([m[owner] for m in messages]) if self.mesh else messages[0]
            check.check_merged(len(tokens), arrived, counts, output[tokens], errors)

    def _parts(self, array: jax.Array) -> list[np.ndarray]:
        """Every rank's part of an array that differs between them."""
        found = {shard.device: np.asarray(shard.data) for shard in array.addressable_shards}
        return [found[device] for device in self._devices]


@functools.partial(jax.jit, donate_argnums=0)
def _nap(word: jax.Array) -> Any:
    return peer_comm.delayed(word, _NAPS)


def _words(*shape: int) -> np.ndarray:
    """Different words, so that a row in another's place is seen."""
    return np.arange(np.prod(shape), dtype=np.int32).reshape(shape)


def _message(plane: np.ndarray, counts: np.ndarray, world_size: int) -> np.ndarray:
    """The rows that a rank sends for its scores, by owner."""
    rows = check.oracle.select(plane, counts, INIT_BLOCKS, LOCAL_BLOCKS)
    return rows.reshape(world_size, -1, len(counts), ROW_WORDS)


# ---- two GPUs ----


def _main(parsed: Any) -> int:
    from benchmarks.run import Machine, Runner, chain_items  # it measures by this module

    gpus = [x for x in jax.devices() if getattr(x, "compute_capability", "") == "9.0"]
    if len(gpus) < 2:
        raise Refused(f"it takes two Hopper GPUs in one process, JAX sees {len(gpus)}")
    wanted = [item for case in of_ranks(2) for item in chain_items(case, TRANSPORTS)]
    mesh = jax.make_mesh((2,), (AXIS,), axis_types=(AxisType.Auto,), devices=gpus[:2])
    given = (parsed.out, parsed.budget_seconds, parsed.commit, mesh)
    return Runner(Machine(), wanted, *given).run(["mosaic"])


def main(arguments: Sequence[str]) -> int:
    return refusing(_main, parser_of(__doc__).parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
