"""A tiny decoder in the style of MiniMax-M3, and the one serving step.

Every layer has an index branch beside its attention: four index queries and one index key a token.
The indexer turns them into at most 16 blocks of 128 keys for every (token, head), and attention
reads only those. Index head h belongs to KV head h, so a rank that merges index head h also holds
KV head h.

Letters in shapes: T tokens of a step (decode rows, then the rows of a prefill window), B decode
requests, L query tokens of one, S prefill segments, W ranks, hpr = 4 / W heads a rank owns, G query
heads of a KV head, P page size.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BLOCK = 128
HEADS = 4  # index heads, and KV heads
INDEX_DIM = 128
INDEX_RMS = 8.0  # of index queries and keys after their norm

Params = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the model and of the server; the model's real counterpart is far larger."""

    vocab: int = 64
    layers: int = 3
    width: int = 64
    group: int = 2  # G
    head_dim: int = 16
    hidden: int = 128
    init_blocks: int = 0
    local_blocks: int = 1
    page_size: int = 128
    pages: int = 64  # of one layer
    max_len: int = 2816
    slots: int = 6  # requests that live on the device at a time
    query_len: int = 4  # L: the last token and three drafts
    decode_buckets: tuple[int, ...] = (2, 6)
    chunk: int = 128  # rows of a prefill window
    segments: int = 2  # requests that share one

    @property
    def table_width(self) -> int:
        return -(-self.max_len // self.page_size)

    @property
    def kv_blocks(self) -> int:
        """128-row blocks of the KV cache, all layers."""
        return self.layers * self.pages * self.page_size // BLOCK


class Cache(NamedTuple):
    """What a rank holds of every token. Layer l owns pages [l * pages, (l + 1) * pages).

    One flat array for all layers: a scanned layer then offsets its block table and never slices
    (so never copies) its share of the cache.
    """

    index_k: jax.Array  # float8_e4m3fn [layers * pages, P / W, 128]: its rows of every page
    k: jax.Array  # float32 [layers * pages * P / 128, hpr, 128, head_dim]: its heads, every row
    v: jax.Array
    # One-sided receive storage and the running count of sparse-layer calls mod 3, or nothing.
    exchange: Any = ()


class State(NamedTuple):
    """The requests on the device, by slot; the same on every rank."""

    tokens: jax.Array  # int32 [slots, max_len]: prompt, then what was generated
    lengths: jax.Array  # int32 [slots]: tokens known; the last one is not in the cache yet
    targets: jax.Array  # int32 [slots]: length at which the request is finished
    tables: jax.Array  # int32 [slots, table_width]: its pages


class Schedule(NamedTuple):
    """What the host decides for one step. Shapes choose the program, values never do."""

    decode_slots: jax.Array  # int32 [B], -1: padding
    segment_slots: jax.Array  # int32 [S], or [0] in a step without prefill
    segment_starts: jax.Array  # int32 [S], first position to prefill
    segment_lens: jax.Array  # int32 [S], 0: padding
    segment_ends: jax.Array  # int32 [S], 1 where the prompt ends in this step


class Report(NamedTuple):
    """What the host reads some steps later, to stream tokens and to see who is finished.

    Every program returns the same shapes, whatever its own.
    """

    decoded: jax.Array  # int32 [largest bucket, L], -1 after the accepted tokens
    first: jax.Array  # int32 [S], a prompt's first answer token, -1 elsewhere


class Rows(NamedTuple):
    """The T tokens of a step."""

    tokens: jax.Array  # int32 [T]
    slots: jax.Array  # int32 [T]
    positions: jax.Array  # int32 [T], -1: padding


def init_params(config: Config, seed: int = 0) -> Params:
    """Random weights; those of the layers are stacked for `lax.scan`."""
    rng = np.random.default_rng(seed)

    def dense(*shape: int, gain: float = 1.0) -> np.ndarray:
        return (rng.standard_normal(shape) * gain / np.sqrt(shape[-2])).astype(np.float32)

    layers, width, kv = config.layers, config.width, HEADS * config.head_dim
    return {
        "embed": rng.standard_normal((config.vocab, width)).astype(np.float32),
        "unembed": dense(width, config.vocab),
        "rope": rope_table(config.max_len, config.head_dim),
        "index_rope": rope_table(config.max_len, INDEX_DIM),
        "layers": {
            "q": dense(layers, width, kv * config.group, gain=3.0),
            "k": dense(layers, width, kv),
            "v": dense(layers, width, kv),
            "o": dense(layers, kv * config.group, width, gain=0.5),
            "index_q": dense(layers, width, HEADS * INDEX_DIM),
            "index_k": dense(layers, width, INDEX_DIM),
            "up": dense(layers, width, config.hidden),
            "down": dense(layers, config.hidden, width),
        },
    }


def rope_table(positions: int, dim: int) -> np.ndarray:
    """cos and sin float32 [positions, 2, dim / 2]."""
    angle = np.arange(positions)[:, None] / 10000.0 ** (np.arange(0, dim, 2) / dim)
    return np.stack([np.cos(angle), np.sin(angle)], axis=1).astype(np.float32)


# ---- one layer's parts ----


def dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    """float32 throughout, also on GPUs that would rather multiply in tf32."""
    return jnp.dot(x, weight, precision=lax.Precision.HIGHEST)


def rms_norm(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def rope(x: jax.Array, table: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotates x [T, heads, dim]."""
    cos, sin = (table[positions][:, None, i] for i in range(2))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def index_branch(
    h: jax.Array, layer: Params, table: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Index queries [T, 4, 128] and index keys [T, 128], float8_e4m3fn."""

    def project(weight: jax.Array, heads: int) -> jax.Array:
        x = rms_norm(dot(h, weight).reshape(-1, heads, INDEX_DIM))
        return quantize(INDEX_RMS * rope(x, table, positions))

    return project(layer["index_q"], HEADS), project(layer["index_k"], 1)[:, 0]


def quantize(x: jax.Array) -> jax.Array:
    """To float8 by way of integers in [-240, 240].

    Integers make every score (a sum of 128 products) exact in float32 in whatever order it is
    summed, so every implementation of the indexer must agree on it to the bit.
    """
    return jnp.clip(jnp.round(x), -240, 240).astype(jnp.float8_e4m3fn)


def attend(
    q: jax.Array, cache: Cache, blocks: jax.Array, ids: jax.Array, positions: jax.Array
) -> jax.Array:
    """Block-sparse attention [T, hpr, G, head_dim] of q over 16 blocks a (token, head).

    Args:
      q: float32 [T, hpr, G, head_dim].
      cache: this rank's KV.
      blocks: int32 [T, table width * P / 128], the physical block of each block of the request.
      ids: int32 [T, hpr, 16], from the indexer: a valid prefix, then -1.
      positions: int32 [T].
    """
    # -1 is never an address: the tail reads block 0 and is masked.
    physical = jnp.take_along_axis(blocks[:, None], jnp.maximum(ids, 0), axis=2)
    head = jnp.arange(ids.shape[1])[:, None]
    shape = (*ids.shape[:2], -1, q.shape[-1])
    k, v = (x[physical, head].reshape(shape) for x in (cache.k, cache.v))
    key_positions = ids[..., None] * BLOCK + jnp.arange(BLOCK)[None, None, None]
    seen = (ids[..., None] >= 0) & (key_positions <= positions[:, None, None, None])
    scores = jnp.einsum("thgd,thkd->thgk", q, k, precision=lax.Precision.HIGHEST)
    scores = scores * q.shape[-1] ** -0.5
    seen = seen.reshape(*ids.shape[:2], 1, -1)
    # A padding row sees nothing: its weights are 0, not NaN.
    top = jnp.maximum(jnp.where(seen, scores, -jnp.inf).max(-1, keepdims=True), -1e30)
    weight = jnp.where(seen, jnp.exp(scores - top), 0.0)
    total = jnp.einsum("thgk,thkd->thgd", weight, v, precision=lax.Precision.HIGHEST)
    return total / jnp.maximum(weight.sum(-1, keepdims=True), 1e-30)


def mlp(x: jax.Array, layer: Params) -> jax.Array:
    return dot(jax.nn.relu(dot(rms_norm(x), layer["up"])) ** 2, layer["down"])


def project_qkv(
    h: jax.Array, layer: Params, config: Config, table: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q [T, 4 G, head_dim], k and v [T, 4, head_dim]; q and k normed and rotated."""

    def heads(name: str) -> jax.Array:
        return dot(h, layer[name]).reshape(h.shape[0], -1, config.head_dim)

    q, k = (rope(rms_norm(heads(name)), table, positions) for name in ("q", "k"))
    return 4.0 * q, k, heads("v")


# ---- the step ----


def step(
    config: Config,
    indexer: Any,
    params: Params,
    cache: Cache,
    state: State,
    schedule: Schedule,
) -> tuple[Cache, State, Report]:
    """One step of one rank: decode, verify drafts, and prefill a window, in one forward pass.

    `indexer` is one of `serve.indexers`. Nothing here waits for the host, and nothing reaches it
    but through the arrays returned.
    """
    decoding = decode_rows(config, state, schedule.decode_slots)
    prefilling = prefill_rows(config, state, schedule)
    rows = Rows(*(jnp.concatenate(pair) for pair in zip(decoding, prefilling, strict=True)))
    hidden, cache = forward(config, indexer, params, cache, state, schedule, rows)
    logits = dot(rms_norm(hidden), params["unembed"])
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    split = decoding.tokens.shape[0]
    decoded, state = accept(config, state, schedule, decoding, best[:split])
    first, state = first_tokens(state, schedule, best[split:])
    report = Report(fill(decoded, max(config.decode_buckets)), fill(first, config.segments))
    return cache, state, report


def forward(
    config: Config,
    indexer: Any,
    params: Params,
    cache: Cache,
    state: State,
    schedule: Schedule,
    rows: Rows,
) -> tuple[jax.Array, Cache]:
    """Hidden states [T, width], and the cache with the rows' keys and values."""
    live = rows.positions >= 0
    positions = jnp.maximum(rows.positions, 0)
    split = schedule.decode_slots.shape[0] * config.query_len
    decode_tables = state.tables[jnp.maximum(schedule.decode_slots, 0)]
    segment_tables = state.tables[schedule.segment_slots]
    seq_lens = rows.positions[:split].reshape(-1, config.query_len)[:, -1] + 1
    window = indexer.window(schedule)  # once a step, for every layer
    blocks = physical_blocks(state.tables, config)[rows.slots]
    row_block = jnp.take_along_axis(blocks, positions[:, None] // BLOCK, axis=1)[:, 0]
    slot_in_layer = row_block * BLOCK + positions % BLOCK

    def layer_step(carry: Any, xs: Any) -> Any:
        x, cache, scratch = carry
        layer, number = xs
        pages = number * config.pages
        slots = jnp.where(live, slot_in_layer + pages * config.page_size, -1)
        h = rms_norm(x)
        index_q, index_k = index_branch(h, layer, params["index_rope"], positions)
        q, k, v = project_qkv(h, layer, config, params["rope"], positions)
        q = q.reshape(-1, HEADS, config.group, config.head_dim)
        q, k, v = (indexer.own_heads(part) for part in (q, k, v))
        # Keys are written before they are read: a token sees itself and the drafts before it.
        cache = write(cache, indexer.write(cache.index_k, index_k, slots), k, v, slots)
        ids, scratch, exchange = indexer.choose(
            index_q,
            cache.index_k,
            decode_tables + pages,
            seq_lens,
            segment_tables + pages,
            window,
            rows.positions,
            scratch,
            cache.exchange,
        )
        cache = cache._replace(exchange=exchange)
        layer_blocks = blocks + pages * (config.page_size // BLOCK)
        mixed = indexer.all_heads(attend(q, cache, layer_blocks, ids, rows.positions))
        x = x + dot(mixed.reshape(x.shape[0], -1), layer["o"])
        return (x + mlp(x, layer), cache, scratch), None

    carry = (params["embed"][rows.tokens], cache, indexer.scratch(split))
    layers = (params["layers"], jnp.arange(config.layers, dtype=jnp.int32))
    (x, cache, _), _ = lax.scan(layer_step, carry, layers)
    return x, cache


def physical_blocks(tables: jax.Array, config: Config) -> jax.Array:
    """int32 [slots, table width * P / 128]: where each 128-token block of a request lies."""
    per_page = config.page_size // BLOCK
    inside = jnp.arange(per_page, dtype=jnp.int32)
    blocks = tables[..., None] * per_page + inside[None, None]
    return blocks.reshape(tables.shape[0], -1)


def write(cache: Cache, index_k: jax.Array, k: jax.Array, v: jax.Array, slots: jax.Array) -> Cache:
    """Stores this rank's heads of new keys and values; slot -1 is skipped."""
    block = jnp.where(slots >= 0, slots // BLOCK, cache.k.shape[0])  # past the end: dropped
    row = slots % BLOCK
    k, v = (
        old.at[block, :, row].set(new, mode="drop") for old, new in ((cache.k, k), (cache.v, v))
    )
    return cache._replace(index_k=index_k, k=k, v=v)


# ---- what enters a step, and what it appends ----


def decode_rows(config: Config, state: State, decode_slots: jax.Array) -> Rows:
    """[B * L] rows: each request's last token and its drafts."""
    slots = jnp.maximum(decode_slots, 0)
    known, last = state.tokens[slots], state.lengths[slots] - 1
    # The host learns late that a request is finished; until then its rows are padding.
    live = (decode_slots >= 0) & (state.lengths[slots] < state.targets[slots])
    step_positions = last[:, None] + jnp.arange(config.query_len, dtype=jnp.int32)[None]
    tokens = jnp.concatenate([take(known, last[:, None]), draft(config, known, last)], axis=1)
    positions = jnp.where(live[:, None], step_positions, -1)
    return Rows(tokens.ravel(), jnp.repeat(slots, config.query_len), positions.ravel())


def draft(config: Config, known: jax.Array, last: jax.Array) -> jax.Array:
    """Guesses the next L - 1 tokens: what followed the last two tokens when last seen."""
    at = jnp.arange(known.shape[1], dtype=jnp.int32)[None]
    before = jnp.roll(known, 1, axis=1)
    again = (known == take(known, last[:, None])) & (before == take(known, last[:, None] - 1))
    again &= (at > 0) & (at < last[:, None])
    seen = jnp.where(again, at, -1).max(axis=1)
    following = jnp.arange(1, config.query_len, dtype=jnp.int32)[None]
    return take(known, seen[:, None] + following)


def take(known: jax.Array, positions: jax.Array) -> jax.Array:
    return jnp.take_along_axis(known, jnp.clip(positions, 0, known.shape[1] - 1), axis=1)


def prefill_rows(config: Config, state: State, schedule: Schedule) -> Rows:
    """[chunk] rows of the segments, one after the other; none in a step without prefill."""
    if not schedule.segment_slots.shape[0]:
        nothing = jnp.zeros(0, jnp.int32)
        return Rows(nothing, nothing, nothing)
    ends = jnp.cumsum(schedule.segment_lens, dtype=jnp.int32)
    row = jnp.arange(config.chunk, dtype=jnp.int32)
    segment = jnp.searchsorted(ends, row, side="right").astype(jnp.int32)
    live = segment < ends.shape[0]
    segment = jnp.minimum(segment, ends.shape[0] - 1)
    inside = row - (ends - schedule.segment_lens)[segment]
    positions = jnp.where(live, schedule.segment_starts[segment] + inside, -1)
    slots = schedule.segment_slots[segment]
    return Rows(state.tokens[slots, jnp.maximum(positions, 0)], slots, positions)


def accept(
    config: Config, state: State, schedule: Schedule, rows: Rows, best: jax.Array
) -> tuple[jax.Array, State]:
    """Keeps the drafts that greedy decoding would have chosen, and one token after them."""
    drafts = rows.tokens.reshape(-1, config.query_len)[:, 1:]
    best = best.reshape(-1, config.query_len)
    position = rows.positions.reshape(best.shape)[:, 0]
    slots = rows.slots.reshape(best.shape)[:, 0]
    right = jnp.cumprod(drafts == best[:, :-1], axis=1).sum(axis=1, dtype=jnp.int32)
    length = position + 1
    room = state.targets[slots] - length
    count = jnp.where(position >= 0, jnp.minimum(right + 1, room), 0)
    ahead = jnp.arange(config.query_len, dtype=jnp.int32)[None]
    decoded = jnp.where(ahead < count[:, None], best, -1)
    slots = jnp.where(count > 0, slots, state.lengths.shape[0])  # past the end: dropped
    where = length[:, None] + ahead
    where = jnp.where(decoded >= 0, where, state.tokens.shape[1])
    return decoded, state._replace(
        tokens=state.tokens.at[slots[:, None], where].set(decoded, mode="drop"),
        lengths=state.lengths.at[slots].set(length + count, mode="drop"),
    )


def fill(tokens: jax.Array, rows: int) -> jax.Array:
    """Adds rows of -1."""
    shape = (rows - tokens.shape[0], *tokens.shape[1:])
    return jnp.concatenate([tokens, jnp.full(shape, -1, tokens.dtype)])


def first_tokens(state: State, schedule: Schedule, best: jax.Array) -> tuple[jax.Array, State]:
    """Appends the first answer token of every prompt that ends in this window."""
    if not schedule.segment_slots.shape[0]:
        return jnp.zeros(0, jnp.int32), state
    last_row = jnp.cumsum(schedule.segment_lens, dtype=jnp.int32) - 1
    ends = (schedule.segment_ends > 0) & (schedule.segment_lens > 0)
    first = jnp.where(ends, best[jnp.maximum(last_row, 0)], -1)
    slots = jnp.where(ends, schedule.segment_slots, state.lengths.shape[0])
    length = schedule.segment_starts + schedule.segment_lens
    return first, state._replace(
        tokens=state.tokens.at[slots, length].set(first, mode="drop"),
        lengths=state.lengths.at[slots].set(length + 1, mode="drop"),
    )
