"""The indexer inside tensor parallelism of 8: a mesh of two ICP groups of four.

    python examples/tensor_parallel.py

runs on eight GPUs, or on eight virtual CPU devices. The model has 4 KV heads, so at TP 8 two
devices share one, each with half of its query heads. Over the mesh ("tensor" 2, "icp" 4) device
(t, i) holds KV head i and half t of its query heads: query heads are split over ("icp", "tensor"),
KV heads and index keys over "icp". The indexer gives device (t, i) the blocks of index head i,
which are the ones that its attention reads; no block id travels.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from msa_icp_jax import msa_icp_quantize_index, prepare_msa_icp_indexer

PAGE_SIZE, PAGES, REQUESTS = 128, 48, 2  # pages of a request
CONTEXT = PAGES * PAGE_SIZE
KV_HEADS, GROUP, HEAD_DIM = 4, 16, 8  # in the model 128 dimensions


def attend(
    q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array, seq_lens: jax.Array
) -> jax.Array:
    """Attention [B, heads, dim] of query heads that share one KV head, over its chosen blocks.

    Args:
      q: float32 [B, heads, dim].
      k, v: float32 [B, CONTEXT, dim], out of their pages already, to keep this short.
      ids: int32 [B, 16], a valid prefix, then -1.
      seq_lens: int32 [B].
    """
    position = jnp.arange(CONTEXT)[None]
    chosen = (ids[:, :, None] == (position // 128)[None]).any(1)  # -1 is no block
    seen = chosen & (position < seq_lens[:, None])
    scores = jnp.einsum("bhd,bkd->bhk", q, k, precision="highest") * HEAD_DIM**-0.5
    weight = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhk,bkd->bhd", weight, v, precision="highest")


def best_blocks(index_q: np.ndarray, keys: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
    """Ids [B, 4, 16] of one rank that holds every key, [B, CONTEXT, 128]."""
    products = np.einsum("bhd,bkd->bhk", np.float64(index_q), np.float64(keys))
    position = np.arange(CONTEXT)
    products = np.where(position < seq_lens[:, None, None], products, -np.inf)
    scores = products.reshape(REQUESTS, KV_HEADS, -1, 128).max(-1)
    scores[np.arange(REQUESTS), :, (seq_lens - 1) // 128] = np.inf  # the query's own block
    return np.sort(np.argsort(-scores, axis=-1, kind="stable")[..., :16], axis=-1)


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)  # without GPUs: virtual ones, before first use
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("tensor", "icp"))
    plan = prepare_msa_icp_indexer(
        world_size=4,
        num_index_heads=KV_HEADS,
        page_size=PAGE_SIZE,
        init_blocks=0,
        local_blocks=1,
        max_decode_tokens=REQUESTS,
        max_decode_query_len=1,
        max_num_batched_tokens=REQUESTS * CONTEXT,
        max_num_seqs=REQUESTS,
        max_model_len=CONTEXT,
        num_sparse_layers=57,
        axis_name="icp",
    )

    def layer(
        index_q: jax.Array,
        index_k: jax.Array,
        block_table: jax.Array,
        seq_lens: jax.Array,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """One device's part: [B, 1, 16] ids of its index head, and its query heads' attention."""
        num_valid_pages = (seq_lens + 127) // 128  # visible blocks, despite the name
        ids, _scores, _comm = plan.decode(
            index_q, index_k, block_table, seq_lens, num_valid_pages, decode_query_len=1
        )
        return ids, attend(q, k[:, 0], v[:, 0], ids[:, 0], seq_lens)

    everywhere, by_icp, query_heads = P(), P(None, "icp"), P(None, ("icp", "tensor"))
    specs = (everywhere, by_icp, everywhere, everywhere, query_heads, by_icp, by_icp)
    step = jax.jit(
        jax.shard_map(
            layer,
            mesh=mesh,
            in_specs=specs,
            out_specs=(by_icp, query_heads),
            check_vma=False,  # the Mosaic kernels need it; the XLA backend takes either
        )
    )

    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((REQUESTS, CONTEXT + KV_HEADS, 128), np.float32)
    index_keys = np.asarray(msa_icp_quantize_index(vectors[:, :CONTEXT]))
    index_q = np.asarray(msa_icp_quantize_index(vectors[:, CONTEXT:]))
    q = rng.standard_normal((REQUESTS, KV_HEADS * GROUP, HEAD_DIM), np.float32)
    k, v = rng.standard_normal((2, REQUESTS, KV_HEADS, CONTEXT, HEAD_DIM), np.float32)
    seq_lens = np.array([CONTEXT, CONTEXT - 1000], np.int32)
    block_table = rng.permutation(REQUESTS * PAGES).reshape(REQUESTS, PAGES).astype(np.int32)
    pages = np.zeros((REQUESTS * PAGES, PAGE_SIZE, 128), index_keys.dtype)
    pages[block_table] = index_keys.reshape(REQUESTS, PAGES, PAGE_SIZE, 128)

    arrays = (index_q, pages, block_table, seq_lens, q, k, v)
    placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(arrays, specs, strict=True)]
    ids, attention = step(*placed)

    want = best_blocks(index_q, index_keys, seq_lens)
    wrong = int((np.asarray(ids) != want).any(-1).sum())
    for h in range(KV_HEADS):
        heads = slice(h * GROUP, (h + 1) * GROUP)
        alone = attend(q[:, heads], k[:, h], v[:, h], want[:, h], seq_lens)
        wrong += int((np.abs(attention[:, heads] - alone) > 1e-4).any())
    bytes_here = placed[1].addressable_shards[0].data.nbytes
    print(f"each device holds {bytes_here:,} of {pages.nbytes:,} bytes of index keys")
    if wrong:
        sys.exit(f"{wrong} rows or heads differ from one rank's")
    print(f"ids and attention of {mesh.size} devices equal one rank's")


if __name__ == "__main__":
    main()
