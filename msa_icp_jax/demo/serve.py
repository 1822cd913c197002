"""The indexer at work: keys into sharded pages, a prefill in windows, then decode steps."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from msa_icp_jax import MSAIcpIndexerPlan, prepare_msa_icp_indexer
from msa_icp_jax.demo.progress import track
from msa_icp_jax.demo.reference import BLOCK, INIT_BLOCKS, LOCAL_BLOCKS
from msa_icp_jax.geometry import HEAD_DIM, NUM_HEADS, TOPK, cdiv
from msa_icp_jax.rows import ROW_WORDS

WINDOW_TOKENS = 512
WRITE_TOKENS = 8192  # keys of one write
DECODE_BATCH = 16
_DECODE_REPEATS = 5
_SPARE_PAGES = 3  # never written
_UNWRITTEN = 0xFF  # a NaN: reading a row that was never written would show


def request_cpu_devices(count: int) -> None:
    """Makes JAX's CPU backend, where it is the one, start with `count` devices.

    It has to come before anything starts a backend. A count in the user's own XLA_FLAGS stands.
    """
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", count)


@dataclasses.dataclass
class Timings:
    """Milliseconds of the stages, and of compiling them beforehand."""

    compile_ms: float = 0.0
    stage_ms: dict[str, float] = dataclasses.field(default_factory=dict)


class Indexer:
    """All ranks of one group, serving requests that share one context's pages."""

    def __init__(self, num_tokens: int, world_size: int, page_size: int) -> None:
        self.plan: MSAIcpIndexerPlan = prepare_msa_icp_indexer(
            world_size=world_size,
            num_index_heads=NUM_HEADS,
            page_size=page_size,
            init_blocks=INIT_BLOCKS,
            local_blocks=LOCAL_BLOCKS,
            max_decode_tokens=DECODE_BATCH,
            max_decode_query_len=1,
            max_num_batched_tokens=WINDOW_TOKENS,
            max_num_seqs=DECODE_BATCH,
            max_model_len=num_tokens,
            num_sparse_layers=1,
            precision="exact",  # prefill must agree with the float64 reference too
        )
        self.num_tokens = num_tokens
        devices = jax.devices()
        self.device_kind = devices[0].device_kind
        # With fewer devices than ranks, all ranks run on one of them.
        self.mesh = (
            Mesh(np.array(devices[:world_size]), (self.plan.axis_name,))
            if len(devices) >= world_size
            else None
        )
        used = cdiv(num_tokens, page_size)
        self.num_pages = used + _SPARE_PAGES
        # Pages lie anywhere in the cache, as after some serving; the shuffle is always the same.
        self.pages = np.random.default_rng(0).permutation(self.num_pages)[:used]
        self.table = self._put(np.tile(self.pages.astype(np.int32), (DECODE_BATCH, 1)))
        rows = self.plan.geometry.rows_per_page
        empty = np.full((self.num_pages, rows, HEAD_DIM), _UNWRITTEN, np.uint8)
        self.index_k = self._shard(empty.view(jnp.float8_e4m3fn), axis=1)
        self.timings = Timings()

    @property
    def num_devices(self) -> int:
        """Devices that the ranks run on."""
        return 1 if self.mesh is None else self.mesh.size

    def compile(self) -> None:
        """Compiles everything that runs below."""
        warmup = functools.partial(
            self.plan.warmup,
            num_pages=self.num_pages,
            table_width=len(self.pages),
            query_lens=[1],
            mesh=self.mesh,
        )
        no_keys = functools.partial(self._write_chunk, np.zeros((0, HEAD_DIM), np.uint8), 0)
        no_window = functools.partial(self._window_plan, 0, 0)
        start = time.perf_counter()
        for step in track("compile", [warmup, no_keys, no_window]):
            step()
        self.timings.compile_ms = 1e3 * (time.perf_counter() - start)

    def write(self, keys: np.ndarray) -> None:
        """Stores the keys (uint8 [m, 128]), each on the rank that owns its row."""
        with self._timed("write"):
            for start in track("write keys", range(0, len(keys), WRITE_TOKENS)):
                self._write_chunk(keys[start : start + WRITE_TOKENS], start)
            self.index_k.block_until_ready()

    def prefill(self, queries: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Chosen blocks [t, 4, 16] of consecutive tokens, window after window."""
        program = self.plan.prefill_program(self.mesh)
        scratch = self._shard(np.zeros(self.plan.prefill_score_shape(), np.float32), axis=2)
        carrier = self._shard(np.zeros((NUM_HEADS, WINDOW_TOKENS, ROW_WORDS), np.int32), axis=1)
        output = self._new_output(WINDOW_TOKENS)
        chosen = []
        with self._timed("prefill"):
            for start in track("prefill", range(0, len(queries), WINDOW_TOKENS)):
                window = queries[start : start + WINDOW_TOKENS]
                window_plan, num_valid_pages = self._window_plan(int(positions[start]), len(window))
                output, carrier, scratch = program(
                    self._put(_padded(window, WINDOW_TOKENS).view(jnp.float8_e4m3fn)),
                    self.index_k,
                    self.table,
                    window_plan,
                    scratch,
                    num_valid_pages,
                    carrier,
                    output,
                )
                chosen.append(self._collect(output)[: len(window)])
        return np.concatenate(chosen)

    def decode(self, queries: np.ndarray) -> np.ndarray:
        """Chosen blocks [n, 4, 16], in steps of 16 requests.

        Each request holds the whole context, and its query stands on the last token.
        """
        program = self.plan.decode_program(self.mesh, decode_query_len=1)
        scores = self._shard(np.full(self.plan.decode_score_shape(), -np.inf, np.float32), axis=2)
        output = self._new_output(DECODE_BATCH)
        visible = (self.num_tokens - 1) // BLOCK + 1
        chosen, step_ms = [], []
        for start in track("decode", range(0, len(queries), DECODE_BATCH)):
            batch = queries[start : start + DECODE_BATCH]
            live = np.arange(DECODE_BATCH) < len(batch)  # the others are padding, of length 0
            inputs = (
                self._put(_padded(batch, DECODE_BATCH).view(jnp.float8_e4m3fn)),
                self.index_k,
                self.table,
                self._put(np.where(live, self.num_tokens, 0).astype(np.int32)),
                self._put(np.where(live, visible, 0).astype(np.int32)),
            )
            for _ in range(_DECODE_REPEATS):
                begin = time.perf_counter()
                output, scores = jax.block_until_ready(program(*inputs, scores, output))
                step_ms.append(1e3 * (time.perf_counter() - begin))
            chosen.append(self._collect(output)[: len(batch)])
        self.timings.stage_ms["decode"] = statistics.median(step_ms)
        return np.concatenate(chosen)

    def _write_chunk(self, keys: np.ndarray, start: int) -> None:
        """Stores keys of the positions from `start`; a slot of -1 stores nothing."""
        page_size = self.plan.geometry.page_size
        position = np.arange(start, start + len(keys))
        slots = np.full(WRITE_TOKENS, -1, np.int32)
        slots[: len(keys)] = self.pages[position // page_size] * page_size + position % page_size
        self.index_k = self.plan.write_program(self.mesh)(
            self.index_k,
            self._put(_padded(keys, WRITE_TOKENS).view(jnp.float8_e4m3fn)),
            self._put(slots),
        )

    def _window_plan(self, first: int, count: int) -> Any:
        """The plan of a window of `count` tokens from position `first`, and their visible blocks.

        The window belongs to the first of the requests; the others have no tokens in it.
        """
        lengths = np.zeros((3, DECODE_BATCH), np.int32)
        lengths[:, 0] = count, first + count, first
        return self._put(self._make_window_plan(*lengths))

    @functools.cached_property
    def _make_window_plan(self) -> Callable[..., Any]:
        @jax.jit
        def make(qo_lens: jax.Array, kv_lens: jax.Array, qo_offset: jax.Array) -> Any:
            window_plan = self.plan.prefill_window_plan(
                qo_lens,
                kv_lens,
                qo_offset,
                total_q=WINDOW_TOKENS,
                max_query_len=WINDOW_TOKENS,
                max_seq_len=self.num_tokens,
            )
            return window_plan, window_plan.num_valid_pages()

        return make

    def _new_output(self, tokens: int) -> jax.Array:
        heads = self.plan.geometry.heads_per_rank
        return self._shard(np.full((tokens, heads, TOPK), -1, np.int32), axis=1)

    def _put(self, value: Any) -> Any:
        """The same value on every rank."""
        return jax.device_put(value, NamedSharding(self.mesh, P()) if self.mesh else None)

    def _shard(self, local: np.ndarray, axis: int) -> jax.Array:
        """An array of which every rank holds a part like `local`, along `axis`."""
        ranks = self.plan.geometry.world_size
        if self.mesh is None:
            return jnp.stack([local] * ranks)
        spec = P(*[None] * axis, self.plan.axis_name)
        return jax.device_put(
            np.concatenate([local] * ranks, axis=axis), NamedSharding(self.mesh, spec)
        )

    def _collect(self, output: jax.Array) -> np.ndarray:
        """Chosen blocks of all heads on the host; each rank has those of the heads it owns."""
        host = np.asarray(output)
        return host if self.mesh is not None else np.concatenate(list(host), axis=1)

    @contextlib.contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.timings.stage_ms[stage] = 1e3 * (time.perf_counter() - start)


def _padded(rows: np.ndarray, count: int) -> np.ndarray:
    """Rows of zeros behind, up to `count`."""
    return np.pad(rows, [(0, count - len(rows))] + [(0, 0)] * (rows.ndim - 1))
