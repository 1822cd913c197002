"""MiniMax-M3's index branch, from hidden states to chosen blocks.

    python examples/index_branch.py

Every sparse layer projects a token's hidden state to four index queries and one index key of 128
dimensions, norms each head (RMSNorm as in Gemma: times 1 + weight), and rotates the first 64
dimensions of each by the token's position. A block's score is the largest q.k over its keys,
without any scale; no block at the start is forced, and one at the end, the query's own.

The projections here are random and small, but alike for queries and keys, so that a token finds the
block whose text is like its own; the rest is as in the model.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from msa_icp_jax import msa_icp_quantize_index, prepare_msa_icp_indexer

HIDDEN = 256  # the model's is 6,144
HEADS, DIM, ROTARY_DIM = 4, 128, 64
THETA, EPS = 5_000_000.0, 1e-6
WORLD_SIZE, PAGE_SIZE, BLOCKS = 2, 128, 64
CONTEXT = BLOCKS * 128
ASKS_FOR = 23  # the block that the last token's text is like


class Weights(NamedTuple):
    """A layer's index branch; float32, in the model bfloat16."""

    q: jax.Array  # [HIDDEN, 4 * 128]
    k: jax.Array  # [HIDDEN, 128]
    q_norm: jax.Array  # [128], shared by the four heads
    k_norm: jax.Array  # [128]


def rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Gemma's, of x [T, heads, 128]: the weight is stored as what is added to 1."""
    x = x.astype(jnp.float32)
    unit = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPS)
    return unit * (1.0 + weight)[None, None]


def rope(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotates dimensions i and 32 + i of x [T, heads, 128] together, i < 32; 64 to 127 stay."""
    half = ROTARY_DIM // 2
    frequency = THETA ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[:, None].astype(jnp.float32) * frequency[None]
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    a, b, rest = x[..., :half], x[..., half:ROTARY_DIM], x[..., ROTARY_DIM:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def index_vectors(
    hidden: jax.Array, weights: Weights, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Index queries float32 [T, 4, 128] and index keys [T, 128] of hidden states [T, HIDDEN]."""
    q = rms_norm((hidden @ weights.q).reshape(-1, HEADS, DIM), weights.q_norm)
    k = rms_norm((hidden @ weights.k)[:, None], weights.k_norm)
    return rope(q, positions), rope(k, positions)[:, 0]


def made_up_layer(rng: np.random.Generator) -> tuple[Weights, jax.Array]:
    """Weights, and hidden states [CONTEXT, HIDDEN]: blocks have topics, tokens noise."""
    shared = rng.standard_normal((HIDDEN, DIM)) / HIDDEN**0.5
    heads = [shared + 0.3 * rng.standard_normal(shared.shape) / HIDDEN**0.5 for _ in range(HEADS)]
    norms = 0.2 * rng.standard_normal((2, DIM))
    topics = np.repeat(rng.standard_normal((BLOCKS, HIDDEN)), 128, axis=0)
    topics[-1] = topics[ASKS_FOR * 128]
    hidden = topics + rng.standard_normal(topics.shape)
    weights = Weights(*(jnp.float32(x) for x in (np.hstack(heads), shared, *norms)))
    return weights, jnp.float32(hidden)


def best_blocks(q: jax.Array, k: jax.Array) -> list[set[int]]:
    """What the model chooses for one token [4, 128] at the end of k, without rounding or ranks."""
    scores = jnp.einsum("hd,nd->hn", q, k, precision="highest").reshape(HEADS, BLOCKS, 128).max(-1)
    scores = scores.at[:, -1].set(jnp.inf)  # the query's own block
    return [set(ids.tolist()) for ids in lax.top_k(scores, 16)[1]]


def main() -> None:
    plan = prepare_msa_icp_indexer(
        world_size=WORLD_SIZE,
        num_index_heads=HEADS,
        page_size=PAGE_SIZE,
        init_blocks=0,
        local_blocks=1,
        max_decode_tokens=1,
        max_decode_query_len=1,
        max_num_batched_tokens=CONTEXT,
        max_num_seqs=1,
        max_model_len=CONTEXT,
        num_sparse_layers=57,
    )
    rng = np.random.default_rng(0)
    weights, hidden = made_up_layer(rng)
    positions = jnp.arange(CONTEXT)
    q, k = jax.jit(index_vectors)(hidden, weights, positions)
    index_q, new_k = msa_icp_quantize_index(q[-1:]), msa_icp_quantize_index(k)

    # Without a mesh all ranks run on one device, and what is split gets a leading axis of ranks.
    pages = CONTEXT // PAGE_SIZE
    block_table = jnp.int32(rng.permutation(pages))
    slots = block_table[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    cache = jnp.zeros((WORLD_SIZE, pages, PAGE_SIZE // WORLD_SIZE, DIM), jnp.float8_e4m3fn)
    cache = plan.write_program()(cache, new_k, slots)
    plane = (WORLD_SIZE, *plan.decode_score_shape())
    heads_per_rank = HEADS // WORLD_SIZE
    output, _scores = plan.decode_program(decode_query_len=1)(
        index_q,
        cache,
        block_table[None],
        jnp.array([CONTEXT], jnp.int32),
        jnp.array([BLOCKS], jnp.int32),  # visible blocks: position // 128 + 1
        jnp.zeros(plane, jnp.float32),
        jnp.zeros((WORLD_SIZE, 1, heads_per_rank, 16), jnp.int32),
    )
    chosen = output[:, 0].reshape(HEADS, 16).tolist()  # rank r has heads 2 r and 2 r + 1
    for head, (ids, unrounded) in enumerate(zip(chosen, best_blocks(q[-1], k), strict=True)):
        found = "found" if ASKS_FOR in ids else "missed"
        print(
            f"head {head}: block {ASKS_FOR} {found}; "
            f"{len(unrounded & set(ids))} of 16 as without rounding: {ids}"
        )


if __name__ == "__main__":
    main()
