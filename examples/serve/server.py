"""The serving loop: requests join and leave, every step is one compiled program.

The host never waits for the step it has just sent. It reads a step's tokens `LAG` steps later, and
until then the device itself knows which requests are finished. What the host must know early
(pages, slots, how far a prompt is prefilled) it knows without asking.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from msa_icp_jax import MSAIcpIndexerPlan
from serve.indexers import DenseIndexer, IcpIndexer, make_plan
from serve.model import BLOCK, HEADS, INDEX_DIM, Cache, Config, Params, Report, Schedule, State
from serve.model import step as model_step
from serve.pages import PagePool

LAG = 2  # steps between sending one and reading its tokens


@dataclasses.dataclass(eq=False)
class Request:
    """One prompt and its answer."""

    prompt: np.ndarray  # int32
    max_new: int
    answer: list[int] = dataclasses.field(default_factory=list)
    # Set while it lives on the device.
    slot: int = -1
    pages: list[int] = dataclasses.field(default_factory=list)
    prefilled: int = 0
    reused: int = 0  # prompt tokens whose pages were found

    @property
    def prefilling(self) -> bool:
        return self.prefilled < len(self.prompt)

    @property
    def finished(self) -> bool:
        return len(self.answer) >= self.max_new


class Programs:
    """The step and the admission of a request, as jitted functions over global arrays.

    With a plan and a mesh, ranks are the mesh's devices. With a plan alone, all ranks run on one
    device (sharded arrays then carry a leading axis of W). Without a plan there is one rank and the
    dense reference chooses the blocks.
    """

    def __init__(self, config: Config, plan: MSAIcpIndexerPlan | None, mesh: Mesh | None) -> None:
        self.config, self.plan, self.mesh = config, plan, mesh
        indexer = IcpIndexer(config, plan) if plan else DenseIndexer(config)
        axis = plan.axis_name if plan else "icp"
        everywhere, split = P(), P(None, axis)
        self.one_sided = plan is not None and mesh is not None and plan.transport == "one-sided"
        exchange = (plan.comm_specs(), P()) if plan and self.one_sided else ()
        cache = Cache(split, split, split, exchange)
        ins, outs = (everywhere, cache, everywhere, everywhere), (cache, everywhere, everywhere)
        body: Any = functools.partial(model_step, config, indexer)
        if mesh is not None:
            # Mosaic kernels write into refs, which need check_vma=False.
            body = jax.shard_map(body, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)
        elif plan:
            ranks = Cache(0, 0, 0)
            body = jax.vmap(
                body,
                in_axes=(None, ranks, None, None),
                out_axes=(ranks, None, None),
                axis_name=axis,
                axis_size=plan.geometry.world_size,
            )
        # One-sided kernels are launched one by one: see docs/serving.md.
        options = {"xla_gpu_enable_command_buffer": ""} if self.one_sided else None
        self.step = jax.jit(body, donate_argnums=(1, 2), compiler_options=options)
        self.admit = jax.jit(admit, donate_argnums=0)
        self.split = split

    def put(self, tree: Any, spec: P | None = None) -> Any:
        """Moves host arrays to where the programs take them; explicit, so no guard objects."""
        if self.mesh is None:
            return jax.device_put(tree)
        return jax.device_put(tree, NamedSharding(self.mesh, spec or P()))

    def put_cache(self, whole: Cache) -> Cache:
        """Moves a cache of all rows and heads (host arrays) to the ranks that hold its parts."""
        if self.plan and self.mesh is None:
            ranks = self.plan.geometry.world_size
            whole = Cache(*(np.stack(np.split(array, ranks, axis=1)) for array in whole[:3]))
        return self.put(whole, self.split)

    def new_cache(self) -> Cache:
        """An empty cache, with zeroed storage where rows are exchanged one-sidedly."""
        config = self.config
        heads = (config.kv_blocks, HEADS, BLOCK, config.head_dim)
        cache = self.put_cache(
            Cache(
                np.zeros(
                    (config.layers * config.pages, config.page_size, INDEX_DIM), jnp.float8_e4m3fn
                ),
                np.zeros(heads, np.float32),
                np.zeros(heads, np.float32),
            )
        )
        if self.plan is None or not self.one_sided:
            return cache
        return cache._replace(exchange=(self.plan.init_comm(self.mesh), self.put(np.int32(0))))

    def new_state(self) -> State:
        """No request."""
        config = self.config
        return self.put(
            State(
                np.zeros((config.slots, config.max_len), np.int32),
                np.ones(config.slots, np.int32),
                np.zeros(config.slots, np.int32),
                np.zeros((config.slots, config.table_width), np.int32),
            )
        )

    def idle_schedule(self, requests: int, segments: int) -> Schedule:
        """A host schedule in which every row is padding."""
        nothing = np.zeros(segments, np.int32)
        return Schedule(np.full(requests, -1, np.int32), *(nothing.copy() for _ in range(4)))


def admit(
    state: State, slot: jax.Array, tokens: jax.Array, target: jax.Array, table: jax.Array
) -> State:
    """Puts a request into a slot. Its length stays at its target until its prompt is prefilled."""
    return State(
        state.tokens.at[slot].set(tokens),
        state.lengths.at[slot].set(target),
        state.targets.at[slot].set(target),
        state.tables.at[slot].set(table),
    )


class Server:
    """Owns the device's buffers and the host's books of one group of ranks."""

    def __init__(
        self,
        config: Config,
        params: Params,
        world_size: int | None,
        mesh: Mesh | None = None,
        backend: str = "auto",
        transport: str = "collective",
    ) -> None:
        """world_size None is the dense reference on one device."""
        self.config = config
        plan = make_plan(config, world_size, backend, transport) if world_size else None
        self.programs = Programs(config, plan, mesh)
        self.params = self.programs.put(params)
        self.cache = self.programs.new_cache()
        self.state = self.programs.new_state()
        self.compiled: dict[tuple[int, int], Any] = {}
        self.pool = PagePool(config.pages, config.page_size)
        self.free_slots = list(range(config.slots))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.sent: deque[tuple[list[Request], list[Request], Report]] = deque()
        self.drafts_accepted = 0

    @property
    def backend(self) -> str:
        return self.programs.plan.backend if self.programs.plan else "dense reference"

    @property
    def devices(self) -> int:
        return self.programs.mesh.size if self.programs.mesh is not None else 1

    def warm_up(self) -> None:
        """Compiles one program a shape and runs each once on padding; later steps compile none."""
        buckets = self.config.decode_buckets
        for shape in [(bucket, 0) for bucket in buckets] + [(max(buckets), self.config.segments)]:
            schedule = self.programs.put(self.programs.idle_schedule(*shape))
            arguments = (self.params, self.cache, self.state, schedule)
            self.compiled[shape] = self.programs.step.lower(*arguments).compile()
            self.cache, self.state, report = self.compiled[shape](*arguments)
            jax.block_until_ready(report)
        # The last slot is free; a length at its target is a finished request.
        self._admit(self.config.slots - 1, np.zeros(0, np.int32), 0, [])

    def submit(self, request: Request) -> None:
        """Queues a request; ValueError where it could never be served."""
        if request.prompt.dtype != np.int32 or request.prompt.ndim != 1 or not request.prompt.size:
            raise ValueError("the prompt must be int32 [n] with n >= 1")
        if request.max_new < 1:
            raise ValueError(f"max_new must be at least 1, got {request.max_new}")
        length = len(request.prompt) + request.max_new + self.config.query_len
        if length > self.config.max_len:
            raise ValueError(
                f"the request needs {length} positions, max_len is {self.config.max_len}"
            )
        pages = -(-length // self.config.page_size)
        if pages > self.config.pages:
            raise ValueError(f"the request needs {pages} pages, the cache has {self.config.pages}")
        self.waiting.append(request)

    def run_step(self) -> int:
        """Sends a step, then reads the one of LAG steps ago; returns how many tokens that made."""
        self._join()
        self._send()
        return self._collect() if len(self.sent) > LAG else 0

    def drain(self) -> int:
        """Reads what is still on its way."""
        made = 0
        while self.sent:
            made += self._collect()
        return made

    # ---- joining and leaving ----

    def _join(self) -> None:
        while self.waiting and self.free_slots:
            request = self.waiting[0]
            length = len(request.prompt) + request.max_new
            # Drafts past the end are written too before they are refused.
            taken = self.pool.take(request.prompt, length + self.config.query_len)
            if taken is None:
                return
            self.waiting.popleft()
            request.pages, found = taken
            request.reused = request.prefilled = found * self.config.page_size
            request.slot = self.free_slots.pop()
            self._admit(request.slot, request.prompt, length, request.pages)
            self.running.append(request)

    def _admit(self, slot: int, prompt: np.ndarray, target: int, pages: list[int]) -> None:
        config = self.config
        tokens = np.zeros(config.max_len, np.int32)
        tokens[: len(prompt)] = prompt
        table = np.zeros(config.table_width, np.int32)
        table[: len(pages)] = pages
        values = self.programs.put((np.int32(slot), tokens, np.int32(target), table))
        with jax.transfer_guard("disallow"):
            self.state = self.programs.admit(self.state, *values)

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self.free_slots.append(request.slot)
        self.pool.give_back(request.pages)

    # ---- one step ----

    def _send(self) -> None:
        decoding = [request for request in self.running if not request.prefilling]
        segments = self._next_segments()
        shape = self._shape_for(len(decoding), bool(segments))
        schedule = self.programs.idle_schedule(*shape)
        schedule.decode_slots[: len(decoding)] = [request.slot for request in decoding]
        for i, (request, length) in enumerate(segments):
            schedule.segment_slots[i] = request.slot
            schedule.segment_starts[i] = request.prefilled
            schedule.segment_lens[i] = length
            request.prefilled += length
            schedule.segment_ends[i] = not request.prefilling
        on_device = self.programs.put(schedule)
        # Only what was put explicitly crosses; anything else, in either direction, would raise.
        with jax.transfer_guard("disallow"):
            self.cache, self.state, report = self.compiled[shape](
                self.params, self.cache, self.state, on_device
            )
        for array in report:
            array.copy_to_host_async()
        for request, length in segments:
            self._publish_pages(request, request.prefilled - length)
        self.sent.append((decoding, [request for request, _ in segments], report))

    def _shape_for(self, decoding: int, prefill: bool) -> tuple[int, int]:
        """The smallest program that fits; beside a prefill window one bucket is enough."""
        buckets = self.config.decode_buckets
        if prefill:
            return max(buckets), self.config.segments
        return min(bucket for bucket in buckets if bucket >= decoding), 0

    def _next_segments(self) -> list[tuple[Request, int]]:
        """The next prompt pieces of the oldest requests; a short one leaves room to the next."""
        prefilling = [request for request in self.running if request.prefilling]
        oldest = prefilling[: self.config.segments]
        oldest.sort(key=lambda request: len(request.prompt) - request.prefilled)
        room, segments = self.config.chunk, []
        for i, request in enumerate(oldest):
            share = room // (len(oldest) - i)
            length = min(share, len(request.prompt) - request.prefilled)
            segments.append((request, length))
            room -= length
        return segments

    def _publish_pages(self, request: Request, start: int) -> None:
        """Later steps run after this one, so they may already read the pages it fills."""
        size = self.config.page_size
        for number in range(start // size, request.prefilled // size):
            self.pool.publish(request.prompt, number, request.pages[number])

    def _collect(self) -> int:
        decoding, prefilled, report = self.sent.popleft()
        made = 0
        for request, tokens in zip(decoding, np.asarray(report.decoded), strict=False):
            new = self._append(request, tokens)
            self.drafts_accepted += max(new - 1, 0)
            made += new
        for request, token in zip(prefilled, np.asarray(report.first), strict=False):
            made += self._append(request, token[None])
        return made

    def _append(self, request: Request, tokens: np.ndarray) -> int:
        new = tokens[tokens >= 0].tolist()
        request.answer += new
        if new and request.finished:
            self._leave(request)
        return len(new)
