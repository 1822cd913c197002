"""The chain inside one jitted program: `python -m benchmarks.jax_chain --out FILE` on two GPUs.

The stage "jax-chain" is what a layer more costs, in microseconds: the slope between one call and
several calls in a row of a program of 48 layers, by the host's clock, everything donated. A layer's
queries wait for what the layer before chose, as a model's do, and the first call waits for a nap of
the GPU, in which the host gets ahead as it does in a model's step; `host_us` is its own part of a
layer. Transports: "none" (`plan.decode_local`: score and select), "all-to-all" (the bare collective
with the rows' bytes), "collective", "one-sided-legacy" and "one-sided-tagged" (`plan.decode`).
Prefill has the first three.

Here two GPUs of one process are the ranks of every case. On one GPU the stage runs under
`python -m benchmarks`: one rank's share, whose own rows arrive as every source's, so without a
collective.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import check, results, roofline
from benchmarks.__main__ import add_run_options, fail, parser
from benchmarks.cases import (
    DECODE,
    INIT_BLOCKS,
    LOCAL_BLOCKS,
    PAGE_SIZE,
    PREFILL,
    RANK,
    Decode,
    Prefill,
    at_world_size,
)
from benchmarks.inputs import GPU_STREAM_BYTES, Inputs, Pool
from benchmarks.report import line
from benchmarks.stages import POISON
from benchmarks.timing import Times
from msa_icp_jax import MSAIcpComm, MSAIcpIndexerPlan, one_sided, prepare_msa_icp_indexer
from msa_icp_jax.comm import NO_ROWS, comm_shapes, exchange
from msa_icp_jax.geometry import NUM_HEADS, NUM_SLOTS, TOPK
from msa_icp_jax.rows import ROW_WORDS

peer_comm = importlib.import_module("peer_comm")  # of the tests, as the oracle of `check`

ALONE = ("none", "one-sided-legacy", "one-sided-tagged")
TRANSPORTS = {
    Decode: ("none", "all-to-all", "collective", "one-sided-legacy", "one-sided-tagged"),
    Prefill: ("none", "all-to-all", "collective"),
}
AXIS, BACKEND = "icp", "mosaic"
# Launched one by one, kernels start under their predecessors' ends; in XLA's graphs they do not.
OPTIONS = {"xla_gpu_enable_command_buffer": ""}
_LAYERS, _LOOPS = 6, 8  # of a loop's body: whole turns of the three slots; and how often it runs
_CALLS, _ROUNDS = (1, 4), 7
_NAPS = 2500  # some milliseconds
_THREADS = 12
_FIXED, _OF_SET = ("keys", "counts", "lens", "plan"), ("queries", "table")
_SPIN_LIMIT = 1 << 22  # looks, some seconds

State = dict[str, Any]
Arguments = tuple[dict[str, Any], list[dict[str, Any]], State]
_compiled: dict[tuple[str, str], Future[Any]] = {}


def prepare(wanted: Iterable[tuple[Any, str]], pool: Pool, mesh: Mesh | None = None) -> None:
    """Compiles the programs of (case, transport) in threads, before anything is timed."""

    def compiled(case: Any, transport: str) -> Any:
        chain, sets = _Chain(case, transport, mesh), min(pool.sets_of(case), _LAYERS)
        return chain.compiled(chain.abstract(*pool.structs(case, BACKEND), sets))

    with ThreadPoolExecutor(_THREADS) as threads:
        for case, transport in wanted:
            _compiled[case.name, transport] = threads.submit(compiled, case, transport)


def measure(case: Any, inputs: Inputs, transport: str, mesh: Mesh | None = None) -> Times:
    """Checks the chain of a case over a transport and times a layer of it.

    Args:
      case: a Decode or a Prefill.
      inputs: of one rank; without a mesh that is `RANK`.
      transport: one of `TRANSPORTS`; without a mesh one of `ALONE`.
      mesh: all ranks' GPUs, or None for one rank alone.
    """
    with _Chain(case, transport, mesh).running(inputs) as run:
        run.check()
        layers, found = _LAYERS * _LOOPS, []
        for _ in range(_ROUNDS):
            few, many = (run.us_of(calls) for calls in _CALLS)
            found.append((many - few) / ((_CALLS[1] - _CALLS[0]) * layers))
        host = run.host_us() / layers
        run.check()
    return Times(tuple(found), "jit", {"host_us": round(host, 3)})


class _Chain:
    """A case's layers over a transport, and the arrays that they take."""

    def __init__(self, case: Any, transport: str, mesh: Mesh | None) -> None:
        one_sided.SPIN_LIMIT = _SPIN_LIMIT
        self.case, self.transport, self.mesh = case, transport, mesh
        self.plan = _plan(case, transport, None if mesh else RANK)
        self._layer_once = jax.jit(self._layer)  # traced once, however often it is called

    # ---- arrays ----

    def abstract(self, fixed: dict[str, Any], one_set: dict[str, Any], sets: int) -> Arguments:
        """The arguments of the program, from shapes of arrays."""
        state = self._buffers()
        if self.transport.startswith("one-sided"):
            geometry = self.plan.geometry
            shapes = comm_shapes(geometry.world_size, geometry.max_decode_tokens, one_sided=True)
            comm: Any = {
                name: jax.ShapeDtypeStruct(shape, np.int32) if shape[0] else NO_ROWS
                for name, shape in shapes.items()
            }
            state["comm"] = MSAIcpComm(**comm)
        return self._placed(_only(fixed, _FIXED), [_only(one_set, _OF_SET)] * sets, state)

    @contextlib.contextmanager
    def running(self, inputs: Inputs) -> Iterator[_Run]:
        """The program with arrays, one-sided storage among them."""
        sets = [_only(one_set, _OF_SET) for one_set in inputs.sets[:_LAYERS]]
        arguments = self._placed(_only(inputs.fixed, _FIXED), sets, self._buffers())
        with self._storage(arguments[2]):
            ready = _compiled.pop((self.case.name, self.transport), None)
            yield _Run(self, ready.result() if ready else self.compiled(arguments), arguments)

    @contextlib.contextmanager
    def _storage(self, state: State) -> Iterator[None]:
        if not self.transport.startswith("one-sided"):
            yield
        elif self.mesh is None:
            with peer_comm.loopback(self.plan) as state["comm"]:
                yield
                jax.block_until_ready(state)
        else:
            state["comm"] = self.plan.init_comm(self.mesh)
            yield
            self.plan.free_comm(state["comm"])

    def _buffers(self) -> State:
        """What goes from layer to layer, as one rank's arrays."""
        case, geometry = self.case, self.plan.geometry
        by_owner = (geometry.world_size, geometry.heads_per_rank, case.tokens, ROW_WORDS)
        plane = np.full((case.tokens, NUM_HEADS, geometry.score_columns), POISON, np.float32)
        state: State = {"scores": plane, "output": _words(case.tokens, by_owner[1], TOPK)}
        if isinstance(case, Prefill):
            state["rows"] = _words(NUM_HEADS, case.tokens, ROW_WORDS)
        elif self.transport == "all-to-all":
            state["rows"] = _words(*by_owner)
        elif self.transport == "none":  # every layer's: else only the last ones would be wanted
            state["every"] = [_words(*by_owner) for _ in range(_LAYERS)]
        return state

    def _placed(self, fixed: dict[str, Any], sets: Any, state: State) -> Arguments:
        """All ranks' arguments, of each of which every rank's part is as given."""
        of_fixed, of_state = self._specs(fixed, state)

        def place(specs: Any, tree: Any) -> Any:
            return jax.tree.map(
                lambda spec, part: jax.tree.map(lambda x: self._place(x, spec), part),
                specs,
                tree,
                is_leaf=lambda x: isinstance(x, P),
            )

        return place(of_fixed, fixed), [place(P(), one) for one in sets], place(of_state, state)

    def _specs(self, fixed: Iterable[str], state: Iterable[str]) -> tuple[Any, Any]:
        """On a mesh; those of sets are replicated."""
        rows = P(None, AXIS)
        known: dict[str, Any] = dict.fromkeys(("keys", "output", "rows", "every"), rows)
        known |= {"scores": P(None, None, AXIS), "comm": self.plan.comm_specs()}
        return tuple({name: known.get(name, P()) for name in names} for names in (fixed, state))

    def _place(self, local: Any, spec: P) -> Any:
        """An array or a struct of which every rank has `local` as its part."""
        mesh, abstract = self.mesh, isinstance(local, jax.ShapeDtypeStruct)
        if mesh is None:
            return local if abstract else jax.device_put(local, may_alias=False)
        wide = [axis is not None for axis in (*spec, *[None] * local.ndim)]
        shape = tuple(n * mesh.size if w else n for n, w in zip(local.shape, wide, strict=False))
        sharding = NamedSharding(mesh, spec)
        if abstract:
            return jax.ShapeDtypeStruct(shape, local.dtype, sharding=sharding)
        parts = [jax.device_put(local, device, may_alias=False) for device in mesh.devices.flat]
        return jax.make_array_from_single_device_arrays(shape, sharding, parts)

    # ---- the program ----

    def compiled(self, arguments: Arguments) -> Any:
        return self.jitted(arguments).lower(*arguments).compile()

    def jitted(self, arguments: Arguments) -> Any:
        """The program of (fixed arrays, sets, state), which it gives back."""

        def run(fixed: Any, sets: Any, state: State) -> State:
            def once(_: Any, state: State) -> State:
                every = list(state.pop("every", ()))
                for number in range(_LAYERS):
                    arrays = fixed | sets[number % len(sets)]
                    # Each layer's queries wait for what the one before left.
                    waiting = lax.optimization_barrier((arrays["queries"], state, every))
                    arrays["queries"], state, every = waiting
                    arrays["slot"] = jnp.int32(number % NUM_SLOTS)
                    state, rows = self._layer_once(arrays, state)
                    every = [rows if i == number else x for i, x in enumerate(every)]
                return state | ({"every": every} if every else {})

            return lax.fori_loop(0, _LOOPS, once, state)

        mapped: Callable[..., Any] = run
        if self.mesh:
            of_fixed, of_state = self._specs(arguments[0], arguments[2])
            mapped = jax.shard_map(
                run,
                mesh=self.mesh,
                in_specs=(of_fixed, P(), of_state),
                out_specs=of_state,
                check_vma=False,
            )
        return jax.jit(mapped, donate_argnums=2, compiler_options=OPTIONS)

    def _layer(self, arrays: dict[str, Any], state: State) -> tuple[State, Any]:
        """The state behind a layer; and rows that no buffer of it holds."""
        if isinstance(self.case, Prefill):
            return self._prefill(arrays, state), None
        if self.transport == "all-to-all":
            return state | {"rows": exchange(state["rows"], AXIS)}, None
        read = [arrays[name] for name in ("queries", "keys", "table", "lens", "counts")]
        options: dict[str, Any] = {"decode_query_len": self.case.query_len}
        if self.transport == "none":
            rows, scores, _ = self.plan.decode_local(*read, state["scores"], **options)
            return state | {"scores": scores}, rows
        if "comm" in state:
            options |= {"slot": arrays["slot"], "tagged": self.transport == "one-sided-tagged"}
            options["comm"] = state["comm"]
        output, scores, comm = self.plan.decode(*read, state["scores"], state["output"], **options)
        state = state | {"scores": scores, "output": output}
        return state | ({} if comm is None else {"comm": comm}), None

    def _prefill(self, arrays: dict[str, Any], state: State) -> State:
        if self.transport == "all-to-all":
            received = self.plan.prefill_exchange(state["rows"])
            return state | {"rows": received.reshape(state["rows"].shape)}
        read = [arrays[name] for name in ("queries", "keys", "table", "plan")]
        written = (state["scores"], arrays["counts"], state["rows"])
        if self.transport == "none":
            rows, scores = self.plan.prefill_local(*read, *written)
            return state | {"scores": scores, "rows": rows}
        output, rows, scores = self.plan.prefill(*read, *written, state["output"])
        return {"output": output, "scores": scores, "rows": rows}


class _Run:
    """A compiled chain with its arrays."""

    def __init__(self, chain: _Chain, program: Any, arguments: Arguments) -> None:
        self._chain, self._program = chain, program
        self._fixed, self._sets, self._state = arguments
        mesh = chain.mesh
        self._devices = list(mesh.devices.flat) if mesh else jax.devices()[:1]
        self._words = [jax.device_put(np.zeros(1, np.int32), x) for x in self._devices]
        self._nap = jax.jit(functools.partial(peer_comm.delayed, naps=_NAPS), donate_argnums=0)
        self._words = [self._nap(x) for x in self._words]  # compiles

    def us_of(self, calls: int) -> float:
        """Microseconds of so many calls in a row, and of the nap before them."""
        jax.block_until_ready((self._state, self._words))
        start = time.perf_counter()
        self._words = [self._nap(x) for x in self._words]
        for _ in range(calls):
            self._call()
        jax.block_until_ready(self._state)
        return (time.perf_counter() - start) * 1e6

    def host_us(self) -> float:
        """Microseconds until a call returns, while the GPU has nothing else to do."""
        found = []
        for _ in range(_ROUNDS):
            jax.block_until_ready(self._state)
            start = time.perf_counter()
            self._call()
            found.append((time.perf_counter() - start) * 1e6)
        return statistics.median(found)

    def _call(self) -> None:
        # In place: whoever made the storage frees what the last call returned.
        self._state.update(self._program(self._fixed, self._sets, dict(self._state)))

    def check(self) -> None:
        """Raises `check.Mismatch` unless a call's last layer found what it should."""
        chain, state = self._chain, self._state
        if chain.transport == "all-to-all":
            # Every other exchange undoes the one before it, and a program has an even number.
            before = np.asarray(state["rows"])
            self._call()
            if not np.array_equal(before, np.asarray(state["rows"])):
                raise check.Mismatch("an all-to-all that is undone leaves other rows")
            return
        self._call()
        tokens = check.sample(chain.case.tokens, 48)
        counts = np.asarray(self._fixed["counts"])[tokens]
        planes = [np.ascontiguousarray(x[tokens]) for x in self._parts("scores")]
        messages = [_message(x, counts, chain.plan) for x in planes]
        if chain.transport == "none":
            last = self._parts("rows") if "rows" in state else self._parts_of(state["every"][-1])
            for plane, rows in zip(planes, last, strict=True):
                found = rows.reshape(NUM_HEADS, -1, ROW_WORDS)[:, tokens]
                check.check_rows(len(tokens), plane, counts, found)
            return
        errors = state["comm"].errors if "comm" in state else np.zeros(1)
        for owner, output in enumerate(self._parts("output")):
            # Alone, a rank's rows for an owner come back as that source's.
            alone = chain.mesh is None
            received = messages[0] if alone else np.stack([m[owner] for m in messages])
            check.check_merged(len(tokens), received, counts, output[tokens], errors)

    def _parts(self, name: str) -> list[np.ndarray]:
        return self._parts_of(self._state[name])

    def _parts_of(self, array: jax.Array) -> list[np.ndarray]:
        """Every rank's part of an array that differs between them."""
        found = {shard.device: np.asarray(shard.data) for shard in array.addressable_shards}
        return [found[device] for device in self._devices]


def _only(arrays: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: arrays[name] for name in names if name in arrays}


def _words(*shape: int) -> np.ndarray:
    """Different words, so that a row in another's place is seen."""
    return np.arange(np.prod(shape), dtype=np.int32).reshape(shape)


def _message(plane: np.ndarray, counts: np.ndarray, plan: MSAIcpIndexerPlan) -> np.ndarray:
    """The rows that a rank sends for its scores, by owner."""
    geometry = plan.geometry
    rows = check.oracle.select(plane, counts, INIT_BLOCKS, LOCAL_BLOCKS)
    return rows.reshape(geometry.world_size, geometry.heads_per_rank, len(counts), ROW_WORDS)


def _plan(case: Any, transport: str, rank: int | None) -> MSAIcpIndexerPlan:
    one_sided_ = transport.startswith("one-sided")
    return prepare_msa_icp_indexer(
        world_size=case.world_size,
        rank=rank,
        num_index_heads=NUM_HEADS,
        page_size=PAGE_SIZE,
        init_blocks=INIT_BLOCKS,
        local_blocks=LOCAL_BLOCKS,
        max_decode_tokens=case.tokens,
        max_decode_query_len=case.query_len if isinstance(case, Decode) else 1,
        max_num_batched_tokens=case.tokens,
        max_num_seqs=len(case.lens),
        max_model_len=max(case.lens),
        num_sparse_layers=3,
        backend=BACKEND,
        transport="one-sided" if one_sided_ else "collective",
    )


# ---- two GPUs ----


def cases(world_size: int, pattern: str) -> list[Any]:
    """Every decode case at this many ranks, and two of prefill's."""
    prefill = [case for case in PREFILL if case.name in ("p-8k-w2", "p-32k-w2")]
    # The cases that are of so many ranks first: time may run out.
    own_first = sorted(DECODE, key=lambda case: case.world_size != world_size)
    found = [*(at_world_size(case, world_size) for case in own_first), *prefill]
    return [case for case in found if fnmatch.fnmatch(case.name, pattern)]


def main(arguments: Sequence[str]) -> int:
    found = parser(".jax_chain", __doc__)
    found.add_argument(
        "--cases", default="*", metavar="GLOB", help="names of cases, all by default: '*b32-32k*'"
    )
    parsed = add_run_options(found, "", budget=600.0).parse_args(arguments)
    gpus = [x for x in jax.devices() if getattr(x, "compute_capability", "") == "9.0"]
    if len(gpus) < 2:
        return fail(f"it takes two Hopper GPUs in one process, JAX sees {len(gpus)}")
    wanted = cases(2, parsed.cases)
    if not wanted:
        there = ", ".join(case.name for case in cases(2, "*"))
        return fail(f"no case has a name like {parsed.cases!r}; there are {there}")
    try:
        results.prepare(parsed.out)
    except results.Refused as error:
        return fail(str(error))
    mesh = jax.make_mesh((2,), (AXIS,), axis_types=(AxisType.Auto,), devices=gpus[:2])
    return _measure_all(wanted, mesh, parsed)


def _measure_all(wanted: list[Any], mesh: Mesh, parsed: Any) -> int:
    start, failed = time.monotonic(), 0
    device = mesh.devices.flat[0].device_kind
    ceilings = roofline.measure(None)
    setting = results.Setting(f"{device} x{mesh.size}", None, ceilings, parsed.commit)
    pool = Pool(wanted, GPU_STREAM_BYTES)
    for case in wanted:
        transports = TRANSPORTS[type(case)]
        if time.monotonic() - start > parsed.budget_seconds:
            print(f"left out, out of time: {case.name}")
            continue
        prepare(((case, transport) for transport in transports), pool, mesh)
        inputs = pool.inputs(case, "mosaic")
        for transport in transports:
            try:
                times = measure(case, inputs, transport, mesh)
            except Exception as error:
                print(f"FAILED {case.name} {transport}: {type(error).__name__}: {error}"[:500])
                failed = 1
                continue
            key = (case.name, "jax-chain", "mosaic", case.precision)
            # JAX's own read ceiling is too low for a floor.
            row = setting.row(key, times, None, transport=transport, **times.more)
            print(line(row, {}), flush=True)
            results.save(parsed.out, [row])
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
