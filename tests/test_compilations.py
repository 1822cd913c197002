"""What compiles, and what must not: counted in JAX's own compile log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from chains import (
    CARRIER,
    INDEX_K,
    OUTPUT,
    SCORES,
    Prefill,
    Ranks,
    make_mesh,
    make_plan,
    random_decode,
    random_prefill,
)

from msa_icp_jax import (
    msa_icp_decode_index_score_sharded,
    msa_icp_decode_score_publish,
    msa_icp_index_score_sharded,
    msa_icp_index_score_sharded_plan,
    msa_icp_merge_candidates,
    msa_icp_prefill_score_select,
    msa_icp_topk_select_prefill,
    msa_icp_topk_select_publish,
    msa_icp_write_index_k,
)


class _Log(logging.Handler):
    """Names of the functions that were compiled or traced."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled: list[str] = []
        self.traced: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message.startswith("Compiling "):
            self.compiled.append(message.split()[1])
        elif message.startswith("Finished tracing "):
            self.traced.append(message.split(" for pjit")[0])


@contextmanager
def compile_log() -> Iterator[_Log]:
    log, logger = _Log(), logging.getLogger("jax")
    others, propagate = logger.handlers[:], logger.propagate
    logger.handlers, logger.propagate = [log], False
    try:
        with jax.log_compiles():
            yield log
    finally:
        logger.handlers, logger.propagate = others, propagate


def ranks_of(on_mesh: bool, **changes: Any) -> Ranks:
    """A group with limits of its own, so that no other test has compiled its programs."""
    limits = {"max_model_len": 4608, "max_decode_tokens": 24} | changes
    return Ranks(make_plan(2, 128, **limits), make_mesh(2) if on_mesh else None)


def test_the_log_sees_a_compilation() -> None:
    def freshly_made(x: jax.Array) -> jax.Array:
        return x * 3 + 1

    x = jnp.arange(3)
    with compile_log() as log:
        jax.jit(freshly_made)(x)
    assert [name for name in log.compiled if "freshly_made" in name]
    assert [name for name in log.traced if "freshly_made" in name]
    with compile_log() as log:
        jax.jit(freshly_made)(x)
    assert log.compiled == log.traced == []


@pytest.mark.parametrize(
    ("tagged", "on_mesh"), [(False, True), (True, False)], ids=["legacy-mesh", "tagged-vmap"]
)
def test_decode_values_compile_nothing(tagged: bool, on_mesh: bool) -> None:
    """Lengths, tables, counts, slots and the storage are data."""
    ranks = ranks_of(on_mesh)
    lengths = [[2400, 300, 0], [0, 0, 0], [1, 4600, 129]]
    cases = [random_decode(n, 2, 128, seed=i) for i, n in enumerate(lengths)]
    comm = ranks.decode(cases[0], ranks.put_comm(ranks.zero_comm()), tagged=tagged).comm
    arguments = [(ranks.decode_arrays(c), ranks.put(np.int32(i))) for i, c in enumerate(cases)]
    program = ranks.plan.decode_program(
        ranks.mesh, decode_query_len=2, with_comm=True, tagged=tagged
    )
    with compile_log() as log:
        for arrays, slot in arguments:
            _, _, comm = program(*arrays, comm, slot)
        jax.block_until_ready(comm)
    assert log.compiled == log.traced == []
    assert program._cache_size() == 1


def test_prefill_values_compile_nothing() -> None:
    """Neither the windows nor their plans, whatever the segments' lengths."""
    ranks = ranks_of(True)
    windows = [
        random_prefill(segments, 160, 128, pages=80, seed=i)
        for i, segments in enumerate(
            [
                [(100, 0, 100), (0, 0, 0), (30, 2500, 2530)],
                [(0, 0, 0), (0, 0, 0), (0, 0, 0)],
                [(1, 4600, 4601), (159, 7, 300), (0, 5, 5)],
            ]
        )
    ]
    ranks.prefill(windows[0])
    program = ranks.plan.prefill_program(ranks.mesh)
    bounds = ("total_q", "max_query_len", "max_seq_len")
    plan_window = jax.jit(ranks.plan.prefill_window_plan, static_argnames=bounds)
    window_plan(plan_window, windows[0])
    arguments = [ranks.prefill_arrays(window) for window in windows]
    with compile_log() as log:
        for window, arrays in zip(windows, arguments, strict=True):
            window_plan(plan_window, window)
            program(*arrays)
    assert log.compiled == log.traced == []
    assert program._cache_size() == plan_window._cache_size() == 1


def window_plan(plan_window: Any, window: Prefill) -> Any:
    lengths = (window.qo_lens, window.kv_lens, window.qo_offset)
    return plan_window(*lengths, total_q=160, max_query_len=160, max_seq_len=4608)


def test_ranks_and_offsets_of_the_parts_compile_nothing() -> None:
    """One executable serves every rank, slot and column offset."""
    plane, counts = jnp.zeros((2, 4, 32)), jnp.full(2, 40, jnp.int32)
    keys = jnp.zeros((5, 64, 128), jnp.float8_e4m3fn)
    query = jnp.zeros((2, 4, 128), jnp.float8_e4m3fn)
    table, lengths = jnp.zeros((2, 3), jnp.int32), jnp.full(2, 700, jnp.int32)

    @jax.jit
    def parts(rank: jax.Array, slot: jax.Array) -> Any:
        generations = jnp.zeros((3, 4, 6), jnp.int32)
        shard: dict[str, Any] = {"rank": rank, "world_size": 4, "page_size": 256}
        scores = msa_icp_decode_index_score_sharded(
            query,
            keys,
            table,
            lengths,
            plane,
            decode_query_len=1,
            max_decode_query_len=1,
            backend="xla",
            **shard,
        )
        rows = msa_icp_topk_select_publish(
            scores,
            counts,
            rank=rank,
            world_size=4,
            heads_per_rank=1,
            force_begin_blocks=0,
            force_end_blocks=1,
            index_scale=2,
            index_offset=2 * rank // 4,
            generations=generations,
            slot=slot,
            backend="xla",
        )
        written = msa_icp_write_index_k(keys, query[:, 0], counts, backend="xla", **shard)
        return rows, written

    values = [jnp.int32(i) for i in range(5)]
    parts(values[0], values[0])
    with compile_log() as log:
        for rank in range(4):
            parts(values[rank], values[rank + 1])
    assert log.compiled == log.traced == []


def test_eager_calls_compile_once() -> None:
    """Outside jit too: a loop of JAX's compiles anew for each new closure, so none is left bare."""
    shard: dict[str, Any] = {"rank": 1, "world_size": 2, "page_size": 128, "backend": "xla"}
    query = jnp.zeros((2, 4, 128), jnp.float8_e4m3fn)
    arrays = (query, jnp.zeros((5, 64, 128), jnp.float8_e4m3fn), jnp.zeros((2, 3), jnp.int32))
    lengths, counts, plane = jnp.full(2, 300), jnp.full(2, 3), jnp.zeros((2, 4, 4))
    forced = {"force_begin_blocks": 1, "force_end_blocks": 1}
    window = msa_icp_index_score_sharded_plan([1, 1], [9, 9], 4, qo_offset=[8, 8], backend="xla")
    carrier = jnp.zeros((4, 2, 33), jnp.int32)

    def parts() -> None:
        decode = {**shard, "decode_query_len": 1}
        msa_icp_decode_index_score_sharded(
            *arrays, lengths, plane, max_decode_query_len=1, **decode
        )
        message = msa_icp_decode_score_publish(*arrays, lengths, counts, **decode, **forced).rows
        ranks = {"rank": 1, "world_size": 2, "heads_per_rank": 2}
        msa_icp_topk_select_publish(plane, counts, backend="xla", **ranks, **forced)
        window_rank = {"rank": 1, "backend": "xla"}
        msa_icp_index_score_sharded(*arrays, window, max_score=plane, **window_rank)
        msa_icp_prefill_score_select(*arrays, window, counts, carrier, **window_rank, **forced)
        msa_icp_topk_select_prefill(plane, counts, carrier, backend="xla", **forced)
        output, errors = jnp.zeros((2, 2, 16), jnp.int32), jnp.zeros(1, jnp.int32)
        msa_icp_merge_candidates(
            message, counts, output, errors, init_blocks=1, local_blocks=1, backend="xla"
        )
        msa_icp_write_index_k(arrays[1], query[:, 0], counts, **shard)

    parts()
    with inputs.nothing_compiles():
        parts()


def test_equal_plans_share_their_traces() -> None:
    """Two plans with equal limits are one: in the plan's programs, and in a caller's own jit."""
    first, second = ranks_of(False), ranks_of(False)
    assert first.plan is not second.plan and first.plan == second.plan
    case = random_decode([2400, 300, 0], 3, 128)
    programs = [r.plan.decode_program(decode_query_len=3) for r in (first, second)]
    assert programs[0] is programs[1]
    programs[0](*first.decode_arrays(case))

    traces = []

    def by_vmap(plan: Any, *arrays: Any) -> Any:
        traces.append(plan)

        def one_rank(*local: Any) -> Any:
            return plan.decode(*local, decode_query_len=3)[0]

        axes = (None, 0, None, None, None)
        return jax.vmap(one_rank, in_axes=axes, axis_name="icp", axis_size=2)(*arrays)

    program = jax.jit(by_vmap, static_argnums=0)
    arrays = first.decode_arrays(case)[:5]
    program(first.plan, *arrays)
    with compile_log() as log:
        program(second.plan, *arrays)
        programs[1](*second.decode_arrays(case))
    assert log.compiled == log.traced == []
    assert len(traces) == 1
    other = ranks_of(False, local_blocks=3)
    program(other.plan, *arrays)
    assert len(traces) == 2


def test_one_compile_for_each_batch_and_query_length() -> None:
    """Query lengths 1 and 3 twice over compile 2 programs; a second batch 2 more."""
    ranks = ranks_of(False, max_decode_tokens=20)
    arguments = {
        (batch, query_len): [
            ranks.decode_arrays(random_decode([2400, 300, 0, 7][:batch], query_len, 128))
            for _ in range(2)
        ]
        for batch in (3, 4)
        for query_len in (1, 3)
    }

    def run(batch: int, query_len: int) -> None:
        program = ranks.plan.decode_program(decode_query_len=query_len)
        program(*arguments[batch, query_len].pop())

    with compile_log() as log:
        for query_len in (1, 3, 1, 3):
            run(3, query_len)
    assert len(log.compiled) == 2, log.compiled
    with compile_log() as log:
        for query_len in (1, 3, 1, 3):
            run(4, query_len)
    assert len(log.compiled) == 2, log.compiled
    for query_len in (1, 3):
        assert ranks.plan.decode_program(decode_query_len=query_len)._cache_size() == 2


@pytest.mark.parametrize(
    ("on_mesh", "batch_sizes", "query_lens"),
    [(False, [3], [1, 2]), (True, [2, 3], [2])],
    ids=["vmap", "mesh"],
)
def test_nothing_compiles_after_warmup(
    on_mesh: bool, batch_sizes: list[int], query_lens: list[int]
) -> None:
    ranks = ranks_of(on_mesh, max_num_batched_tokens=160, max_num_seqs=3, max_decode_query_len=2)
    plan = ranks.plan
    sizes = {"batch_sizes": batch_sizes, "query_lens": query_lens}
    plan.warmup(num_pages=64, table_width=36, mesh=ranks.mesh, **sizes)
    decodes = [
        (query_len, ranks.decode_arrays(random_decode([2400] * batch, query_len, 128), spare=0))
        for batch in batch_sizes
        for query_len in query_lens
    ]
    window = random_prefill([(100, 0, 100), (0, 0, 0), (30, 2500, 2530)], 160, 128)
    assert plan.prefill_window_tokens() == 160
    prefill = ranks.prefill_arrays(window, spare=0)
    writes = [
        (
            ranks.put_codes(window.cache.keys, INDEX_K),
            ranks.put_codes(np.zeros((tokens, 128), np.uint8)),
            ranks.put(np.arange(tokens, dtype=np.int32)),
        )
        # Every decode step's tokens and a full window's.
        for tokens in {160, *(batch * length for batch in batch_sizes for length in query_lens)}
    ]
    with compile_log() as log:
        for query_len, arrays in decodes:
            output, scores = plan.decode_program(ranks.mesh, decode_query_len=query_len)(*arrays)
        output, carrier, scratch = plan.prefill_program(ranks.mesh)(*prefill)
        for arrays in writes:
            index_k = plan.write_program(ranks.mesh)(*arrays)
        jax.block_until_ready((output, scores, carrier, scratch, index_k))
    assert log.compiled == []
    if on_mesh:
        for array, spec in ((output, OUTPUT), (scores, SCORES), (carrier, CARRIER)):
            assert array.sharding.spec == spec


def test_nothing_compiles_after_a_warmup_with_storage() -> None:
    ranks = ranks_of(True, max_decode_tokens=3, max_num_seqs=3, max_num_batched_tokens=16)
    plan = ranks.plan
    plan.warmup(num_pages=64, table_width=36, query_lens=[1], mesh=ranks.mesh, with_comm=True,
                tagged=True)  # fmt: skip
    arrays = ranks.decode_arrays(random_decode([2400] * 3, 1, 128), spare=0)
    comm = ranks.put_comm(ranks.zero_comm())
    program = plan.decode_program(ranks.mesh, decode_query_len=1, with_comm=True, tagged=True)
    jax.block_until_ready((arrays, comm))
    with compile_log() as log:
        output, scores, comm = program(*arrays, comm, 0)
        jax.block_until_ready(program(*arrays[:5], scores, output, comm, 4))
    assert log.compiled == []


@pytest.mark.parametrize(
    ("on_mesh", "row_offset", "page_rows"), [(True, 8, 80), (False, 0, 352)], ids=["mesh", "vmap"]
)
def test_nothing_compiles_after_a_warmup_for_compound_pages(
    on_mesh: bool, row_offset: int, page_rows: int
) -> None:
    ranks = ranks_of(on_mesh, row_offset=row_offset, max_decode_tokens=2, max_num_batched_tokens=16)
    shape = {"num_pages": 64, "table_width": 36, "batch_sizes": [2], "query_lens": [1]}
    ranks.plan.warmup(**shape, mesh=ranks.mesh, page_rows=page_rows)
    case = random_decode([2400, 300], 1, 128)
    arrays = ranks.decode_arrays(case, spare=0)
    shards = oracle.shard_cache(case.cache.keys, 2)
    pages = [oracle.compound_cache(shard, page_rows, row_offset) for shard in shards]
    arrays[1] = ranks.put_codes(np.concatenate(pages, axis=1), INDEX_K)
    with compile_log() as log:
        program = ranks.plan.decode_program(ranks.mesh, decode_query_len=1)
        output, _ = jax.block_until_ready(program(*arrays))
    assert log.compiled == []
    assert np.array_equal(ranks.get(output, OUTPUT), case.answer(ranks.plan))


def test_warmup_checks_its_sizes() -> None:
    plan = ranks_of(False).plan
    for options, name in (
        ({"num_pages": 0, "table_width": 1}, "num_pages"),
        ({"num_pages": 1, "table_width": 0}, "table_width"),
        ({"num_pages": 1, "table_width": 1, "batch_sizes": [0]}, "batch_sizes"),
        ({"num_pages": 1, "table_width": 1, "batch_sizes": [9]}, "batch_sizes"),
        ({"num_pages": 1, "table_width": 1, "query_lens": [9]}, "query_lens"),
        ({"num_pages": 1, "table_width": 1, "page_rows": 63}, "page_rows"),
        ({"num_pages": 1, "table_width": 1, "mesh": make_mesh(4)}, "mesh"),
    ):
        with pytest.raises(ValueError, match=name):
            plan.warmup(**options)
