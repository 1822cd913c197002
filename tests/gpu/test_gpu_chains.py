"""Whole chains on the GPU: all ranks on one device by vmap, the kernels against the oracle."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from typing import Any

import chains
import hostile
import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from chains import GROUPS, Ranks, random_decode, random_prefill

from msa_icp_jax import msa_icp_decode_index_score_sharded, msa_icp_topk_select_publish


def ranks_of(world_size: int, page_size: int, **changes: Any) -> Ranks:
    plan = chains.make_plan(world_size, page_size, backend="auto", **changes)
    assert plan.backend == "mosaic"
    return Ranks(plan, None)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("world_size", "page_size"), GROUPS)
def test_decode(world_size, page_size, fused):
    ranks = ranks_of(world_size, page_size)
    for query_len, lengths in ((1, [300, 0, 4000, 1]), (2, [4096, 700, 2, 129]), (8, [5, 900])):
        case = random_decode(lengths, query_len, page_size)
        found = ranks.decode(case, fused=fused)
        chains.check_decoded(ranks.plan, case, found, fused=fused)


@pytest.mark.parametrize("tagged", [False, True])
@pytest.mark.parametrize("world_size", [2, 4])
def test_decode_through_the_storage(world_size, tagged):
    ranks = ranks_of(world_size, 128)
    case = random_decode([300, 0, 4000, 1], 2, 128)
    comm = ranks.put_comm(ranks.zero_comm())
    for slot in range(7):
        found = ranks.decode(case, comm, slot, tagged=tagged)
        chains.check_decoded(ranks.plan, case, found, fused=False)
        comm = found.comm
    storage = ranks.get_comm(comm)
    assert (storage["errors"] == 0).all()
    if tagged:
        assert storage["publish_generations"].max() == storage["expected_generations"].max() == 3
    else:
        assert (storage["recv"][..., 32] == 0).all()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("world_size", "page_size"), GROUPS)
def test_prefill(world_size, page_size, fused):
    ranks = ranks_of(world_size, page_size)
    segments = [(100, 300, 400), (0, 0, 0), (57, 0, 57), (40, 1000, 1100), (130, 3000, 3130)]
    case = random_prefill(segments, 384, page_size)
    chains.check_prefilled(ranks.plan, case, ranks.prefill(case, fused=fused), fused=fused)


def test_real_activations_choose_as_one_rank_does():
    real = inputs.real_activations()
    pages = len(real.keys)
    queries = real.queries[:16]
    lengths = np.full(16, pages * 128, np.int32)
    table = np.tile(np.arange(pages, dtype=np.int32), (16, 1))
    counts = oracle.decode_num_valid_pages(lengths, 1)
    case = chains.Decode(queries, chains.Cache(real.keys, table), lengths, 1, counts)
    for world_size in (2, 4):
        plan = chains.make_plan(world_size, 128, max_model_len=pages * 128, backend="auto",
                                max_num_seqs=16)  # fmt: skip
        found = Ranks(plan, None).decode(case)
        np.testing.assert_array_equal(found.output[:16], case.answer(plan))


def test_donated_buffers_are_written_in_place():
    ranks = ranks_of(4, 128)
    case = random_decode([300, 0, 4000, 1], 2, 128)
    program = ranks.plan.decode_program(None, decode_query_len=2)
    arrays = ranks.decode_arrays(case)
    compiled = program.lower(*arrays).compile()
    donated = arrays[5].nbytes + arrays[6].nbytes
    assert compiled.memory_analysis().alias_size_in_bytes == donated
    scores, output = (array.unsafe_buffer_pointer() for array in arrays[5:7])
    new_output, new_scores = program(*arrays)
    assert new_scores.unsafe_buffer_pointer() == scores
    assert new_output.unsafe_buffer_pointer() == output


@hostile.INDEX_DTYPE
def test_long_contexts_give_the_same_bits_a_hundred_times(index_dtype):
    """12 requests of 150,000 tokens: only there does a ring show that it reuses slots early."""
    requests, tokens, world_size, rank = 12, 150_000, 4, 2
    pages = requests * -(-tokens // 128)
    columns = 1176
    keys = jax.random.randint(jax.random.key(0), (pages, 32, 128), -4, 5).astype(index_dtype)
    query = jax.random.randint(jax.random.key(1), (requests, 4, 128), -3, 4)
    table = jax.random.permutation(jax.random.key(2), pages).reshape(requests, -1)
    lengths = jnp.full(requests, tokens, jnp.int32)

    def scores(backend: str) -> Any:
        def run(query: jax.Array, plane: jax.Array) -> jax.Array:
            return msa_icp_decode_index_score_sharded(
                query.astype(index_dtype),
                keys,
                table.astype(jnp.int32),
                lengths,
                plane,
                rank=rank,
                world_size=world_size,
                page_size=128,
                decode_query_len=1,
                max_decode_query_len=1,
                enable_pdl=True,
                backend=backend,
            )

        return jax.jit(run, donate_argnums=1)

    def fresh() -> jax.Array:
        return jnp.full((requests, 4, columns), -jnp.inf, jnp.float32)

    kernel, definition = scores("mosaic"), scores("xla")
    want = [definition(sign * query, fresh()) for sign in (1, -1)]
    for repeat in range(100):
        found = kernel((1, -1)[repeat % 2] * query, fresh())
        assert bool((found == want[repeat % 2]).all()), f"repeat {repeat} differs"


def test_cache_beyond_two_gib():
    """The only live pages lie at the end of a cache whose byte offsets pass 2**31."""
    pages = 2**31 // (32 * 128) + 1000
    live = np.arange(pages - 20, pages, dtype=np.int32)
    keys = jnp.zeros((pages, 32, 128), jnp.float8_e4m3fn)
    rng = np.random.default_rng(0)
    ours = chains.small_keys(rng, 20, 32)
    keys = keys.at[live[0] :].set(jnp.asarray(ours.view(jnp.float8_e4m3fn)))
    query = chains.small_queries(rng, 1)
    shard = oracle.Shard(1, 4, 128)
    plane = oracle.decode_plane(
        query, ours, np.arange(20, dtype=np.int32)[None], np.array([2560], np.int32), 20, shard, 1
    )
    before = np.full((1, 4, 20), 7.5, np.float32)
    scores = jax.jit(
        lambda q, k, table, length, out: msa_icp_decode_index_score_sharded(
            q,
            k,
            table,
            length,
            out,
            rank=1,
            world_size=4,
            page_size=128,
            decode_query_len=1,
            max_decode_query_len=1,
        )
    )(
        jnp.asarray(query.view(jnp.float8_e4m3fn)),
        keys,
        live[None],
        np.array([2560], np.int32),
        before,
    )
    np.testing.assert_array_equal(np.asarray(scores), plane.over(before))


def test_pdl_never_reads_ahead_of_its_producer():
    """Counts and lengths written by the kernel just before the launch."""
    case = random_decode([300, 0, 4000, 1], 1, 128)
    ranks = ranks_of(4, 128)
    index_q, index_k, table, lengths, counts, _, _ = ranks.decode_arrays(case)
    zero = jnp.zeros_like(lengths)

    def step(lengths: jax.Array, counts: jax.Array) -> jax.Array:
        plane = jnp.full((4, 4, 64), -jnp.inf, jnp.float32)
        plane = msa_icp_decode_index_score_sharded(
            index_q,
            index_k[1],
            table,
            lengths,
            plane,
            rank=1,
            world_size=4,
            page_size=128,
            decode_query_len=1,
            max_decode_query_len=1,
            enable_pdl=True,
        )
        return msa_icp_topk_select_publish(
            plane,
            counts,
            rank=1,
            world_size=4,
            heads_per_rank=1,
            force_begin_blocks=1,
            force_end_blocks=2,
            enable_pdl=True,
        ).rows

    @jax.jit
    def many(lengths: jax.Array, counts: jax.Array) -> jax.Array:
        def body(i: jax.Array, wrong: jax.Array) -> jax.Array:
            live = (i % 2).astype(jnp.int32)
            rows = step(lengths * live + zero, counts * live)
            return wrong + (rows != jnp.where(live == 1, full, none)).sum()

        full, none = step(lengths, counts), step(zero, zero)
        return jax.lax.fori_loop(0, 200, body, jnp.int32(0))

    assert int(many(lengths, counts)) == 0


_DIGEST = """
import chains, hashlib, jax, numpy as np
from chains import Ranks, random_decode
ranks = Ranks(chains.make_plan(4, 128, backend="auto"), None)
case = random_decode([300, 0, 4000, 1], 2, 128)
program = ranks.plan.decode_program(None, decode_query_len=2)
for _ in range(4):
    output, scores = program(*ranks.decode_arrays(case))
print(hashlib.sha256(np.asarray(output).tobytes() + np.asarray(scores).tobytes()).hexdigest())
"""


def test_command_buffers_do_not_change_a_bit():
    digests = set()
    for flag in ("--xla_gpu_enable_command_buffer=", "--xla_gpu_graph_min_graph_size=1"):
        result = subprocess.run(
            [sys.executable, "-c", _DIGEST],
            cwd=os.path.dirname(os.path.dirname(__file__)),
            env={
                **os.environ,
                "XLA_FLAGS": flag,
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            capture_output=True,
            text=True,
            timeout=inputs.TIME_LIMIT,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        digests.add(result.stdout.strip())
    assert len(digests) == 1
    assert len(digests.pop()) == hashlib.sha256().digest_size * 2
