"""Decode and prefill end to end on the portable path, against one oracle that sees every key."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import chains
import inputs
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
import oracle
import pytest
from chains import (
    ALL,
    AXIS,
    CARRIER,
    INDEX_K,
    OUTPUT,
    SCORES,
    Cache,
    Decode,
    Prefill,
    Ranks,
    check_decoded,
    check_output,
    check_prefilled,
    make_mesh,
    make_plan,
    paged,
    random_decode,
    random_prefill,
    small_keys,
    small_queries,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

Array = npt.NDArray[Any]

MINUS_INF_WORD = -8388608  # 0xff800000

# Forced blocks differ by group, so that every rule meets every layout.
FORCED = {(2, 128): (1, 2), (2, 256): (0, 0), (4, 128): (0, 1), (4, 256): (2, 3)}


TWO_GROUPS = [(2, 128), (4, 256)]  # whole blocks on every rank; half blocks in compact columns


@functools.cache
def ranks_of(
    world_size: int, page_size: int, *, on_mesh: bool = True, max_model_len: int = 8192
) -> Ranks:
    init, local = FORCED[world_size, page_size]
    plan = make_plan(
        world_size,
        page_size,
        init_blocks=init,
        local_blocks=local,
        max_model_len=max_model_len,
    )
    return Ranks(plan, make_mesh(world_size) if on_mesh else None)


@functools.cache
def decode_steps(page_size: int) -> list[Decode]:
    """Steps of one shape: four requests of two tokens, tables of 36 pages."""
    lengths = [
        [4500, 0, 700, 193],  # ragged, with a padding request
        [2305, 2176, 1, 2],  # a length below the query length: its first token sees nothing
        [0, 0, 0, 0],
        [5000, 129, 128, 2049],  # at 128 tokens a page the first request outgrows its table
    ]
    return [random_decode(n, 2, page_size, seed=i) for i, n in enumerate(lengths)]


@functools.cache
def prefill_windows(page_size: int) -> list[Prefill]:
    """Windows of one shape: five segments in 160 rows, tables of 36 pages."""
    segments = [
        # Fresh, empty, prefix hits, and 9 rows of padding.
        [(100, 0, 100), (0, 0, 0), (30, 2500, 2530), (0, 3, 3), (21, 800, 821)],
        # One segment over several query tiles; keys end before the queries do.
        [(160, 2900, 3000), (0, 0, 0), (0, 0, 0), (0, 0, 0), (0, 0, 0)],
        [(0, 0, 0), (0, 0, 0), (0, 0, 0), (0, 0, 0), (0, 0, 0)],
        # More queries than rows: the rest is cut.
        [(1, 4607, 4608), (1, 0, 1), (3, 512, 515), (128, 0, 128), (99, 100, 199)],
    ]
    return [random_prefill(s, 160, page_size, pages=80, seed=i) for i, s in enumerate(segments)]


# ---- every group and form ----


@pytest.mark.parametrize(
    ("world_size", "page_size", "how"),
    [
        (2, 128, "bare-legacy"),
        (2, 128, "comm-tagged"),
        (2, 256, "comm-legacy"),
        (2, 256, "fused"),  # the same chain over a plane of its own
        (4, 128, "bare-tagged"),
        (4, 128, "comm-legacy"),
        (4, 128, "fused"),
        (4, 256, "bare-legacy"),
        (4, 256, "comm-tagged"),
    ],
)
def test_decode(world_size: int, page_size: int, how: str) -> None:
    """Every group, every protocol; each protocol with storage on 2 ranks and on 4."""
    ranks = ranks_of(world_size, page_size)
    fused, with_comm, tagged = how == "fused", how.startswith("comm"), how.endswith("tagged")
    comm = ranks.put_comm(ranks.zero_comm()) if with_comm else None
    for slot, case in enumerate(decode_steps(page_size)):  # slots 0, 1, 2 and 3 mod 3
        found = ranks.decode(case, comm, slot, fused=fused, tagged=tagged)
        check_decoded(ranks.plan, case, found, fused=fused)
        comm = found.comm
    if comm is not None:
        assert not np.asarray(comm.errors).any()


@pytest.mark.parametrize(
    ("world_size", "page_size", "fused"),
    [(2, 128, False), (2, 256, True), (4, 128, True), (4, 256, False)],
)
def test_prefill(world_size: int, page_size: int, fused: bool) -> None:
    ranks = ranks_of(world_size, page_size)
    for case in prefill_windows(page_size):
        found = ranks.prefill(case, fused=fused)
        check_prefilled(ranks.plan, case, found, fused=fused)


@pytest.mark.parametrize(("world_size", "page_size", "fused"), [(2, 256, True), (4, 128, False)])
def test_all_ranks_on_one_device_by_vmap(world_size: int, page_size: int, fused: bool) -> None:
    ranks = ranks_of(world_size, page_size, on_mesh=False)
    comm = ranks.put_comm(ranks.zero_comm())
    for slot, case in enumerate(decode_steps(page_size)):
        found = ranks.decode(case, comm, slot, fused=fused, tagged=world_size == 4)
        check_decoded(ranks.plan, case, found, fused=fused)
        comm = found.comm
    assert not np.asarray(comm.errors).any()
    if fused:
        for window in prefill_windows(page_size):
            check_prefilled(ranks.plan, window, ranks.prefill(window, fused=True), fused=True)


# ---- a caller's own shard_map ----


@pytest.mark.parametrize(("fused", "check_vma"), [(False, False), (True, True)])
def test_callers_shard_map_with_and_without_vma(fused: bool, check_vma: bool) -> None:
    """Buffers left to the plan, storage by init_comm, decode and prefill in one program."""
    ranks = ranks_of(4, 256)
    plan, mesh = ranks.plan, ranks.mesh
    decode_case, window = decode_steps(256)[0], prefill_windows(256)[0]

    def step(decode_arrays: Any, prefill_arrays: Any) -> Any:
        ids, scores, comm = plan.decode(
            *decode_arrays, comm=plan.init_comm(), slot=2, decode_query_len=2, fused=fused
        )
        assert (scores is None) == fused
        chosen, _, _ = plan.prefill(*prefill_arrays, fused=fused)
        return ids, chosen, comm.errors

    program = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(
                (ALL, INDEX_K, ALL, ALL, ALL),
                (ALL, INDEX_K, ALL, ALL, SCORES, ALL, CARRIER, OUTPUT),
            ),
            out_specs=(OUTPUT, OUTPUT, P(AXIS)),
            check_vma=check_vma,
        )
    )
    ids, chosen, errors = program(
        tuple(ranks.decode_arrays(decode_case)[:5]), tuple(ranks.prefill_arrays(window))
    )
    check_output(plan, decode_case, np.asarray(ids))
    check_output(plan, window, np.asarray(chosen))
    assert not np.asarray(errors).any()


def test_inside_a_larger_mesh() -> None:
    """Two data-parallel groups of two ranks, each with its own cache and requests."""
    plan = ranks_of(2, 128).plan
    mesh = jax.make_mesh(
        (2, 2), ("data", AXIS), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu")[:4]
    )
    steps, windows = decode_steps(128)[:2], prefill_windows(128)[:2]

    def put(parts: list[Array], spec: P) -> jax.Array:
        return jax.device_put(np.concatenate(parts), NamedSharding(mesh, spec))

    def group(decode_arrays: Any, prefill_arrays: Any) -> Any:
        ids, _, _ = plan.decode(*decode_arrays, decode_query_len=2)
        query, index_k, table, qo, kv, offset, counts = prefill_arrays
        tokens = query.shape[0]
        window_plan = plan.prefill_window_plan(
            qo, kv, offset, total_q=tokens, max_query_len=tokens, max_seq_len=8192
        )
        carrier = jnp.zeros((4, tokens, 33), jnp.int32)
        output = jnp.zeros((tokens, 2, 16), jnp.int32)
        arrays = (query, index_k, table, window_plan, None, counts, carrier, output)
        chosen, _, _ = plan.prefill(*arrays, fused=True)
        return ids, chosen

    each, keys = P("data"), P("data", AXIS)
    float8 = ml_dtypes.float8_e4m3fn
    decode_arrays = (
        put([c.query.view(float8) for c in steps], each),
        put([c.cache.keys.view(float8) for c in steps], keys),
        put([c.cache.table for c in steps], each),
        put([c.seq_lens for c in steps], each),
        put([c.counts for c in steps], each),
    )
    prefill_arrays = (
        put([c.query.view(float8) for c in windows], each),
        put([c.cache.keys.view(float8) for c in windows], keys),
        *(
            put([field(c) for c in windows], each)
            for field in (
                lambda c: c.cache.table,
                lambda c: c.qo_lens,
                lambda c: c.kv_lens,
                lambda c: c.qo_offset,
                lambda c: c.counts,
            )
        ),
    )
    specs = ((each, keys, each, each, each), (each, keys, *[each] * 5))
    program = jax.jit(
        jax.shard_map(group, mesh=mesh, in_specs=specs, out_specs=(keys, keys), check_vma=True)
    )
    ids, chosen = (np.split(np.asarray(x), 2) for x in program(decode_arrays, prefill_arrays))
    for case, found in zip(steps, ids, strict=True):
        check_output(plan, case, found)
    for window, found in zip(windows, chosen, strict=True):
        check_output(plan, window, found)


# ---- query lengths, prefixes, chunks ----


@pytest.mark.parametrize(("query_len", "fused"), [(1, False), (3, False), (4, True), (7, False)])
def test_query_lengths(query_len: int, fused: bool) -> None:
    """Others are of two tokens, or of the eight that are the most."""
    ranks = ranks_of(4, 256, on_mesh=False)
    for seed, lengths in enumerate([[2500, 3, 0], [130, 2049, 4], [8, 7, 4096]]):
        case = random_decode(lengths, query_len, 256, seed=seed)
        found = ranks.decode(case, fused=fused)
        check_decoded(ranks.plan, case, found, fused=fused)


WINDOW = 640  # query rows of a chunk


def short_ranks() -> Ranks:
    """Few score columns, since whole requests are prefilled; half blocks in compact columns."""
    return ranks_of(4, 256, on_mesh=False, max_model_len=2304)


@functools.cache
def long_requests() -> tuple[Cache, list[Array], list[int]]:
    """Two requests of 18 and 4 blocks: their cache, every token's query, their lengths."""
    rng = np.random.default_rng(7)
    lengths = [2180, 400]
    cache = paged([small_keys(rng, n) for n in lengths], 256, 32, 20)
    return cache, [small_queries(rng, n) for n in lengths], lengths


def window_of(
    cache: Cache, queries: list[Array], begins: list[int], ends: list[int], tokens: int
) -> Prefill:
    """The queries [begin, end) of every request, padded to `tokens` rows."""
    mine = [q[begin:end] for q, begin, end in zip(queries, begins, ends, strict=True)]
    rows = np.concatenate(mine)
    query = np.full((tokens, 4, 128), 0x7F, np.uint8)  # padding rows are NaN
    query[: len(rows)] = rows
    qo = np.array([len(q) for q in mine], np.int32)
    offset = np.array(begins, np.int32)
    kv = np.array(ends, np.int32)
    counts = oracle.prefill_num_valid_pages(qo, offset, tokens)
    return Prefill(query, cache, qo, kv, offset, counts)


def by_request(output: Array, case: Prefill) -> list[Array]:
    return np.split(output, np.cumsum(case.qo_lens))[: len(case.qo_lens)]


@functools.cache
def full_prefill() -> list[Array]:
    """Every token's ids, from one prefill of both requests at once."""
    ranks = short_ranks()
    cache, queries, lengths = long_requests()
    case = window_of(cache, queries, [0, 0], lengths, sum(lengths))
    output = ranks.prefill(case, fused=False).output
    check_output(ranks.plan, case, output)
    return by_request(output, case)


def test_chunked_prefill_equals_one_full_prefill() -> None:
    ranks = short_ranks()
    cache, queries, lengths = long_requests()
    rng = np.random.default_rng(3)
    done, parts = [0, 0], [[], []]
    while done != lengths:
        # Chunks of any length, one of them possibly empty, none aligned to blocks or pages.
        ends = np.minimum(np.add(done, rng.integers(0, 300, 2)), lengths).tolist()
        case = window_of(cache, queries, done, ends, WINDOW)
        output = ranks.prefill(case, fused=False).output
        for part, ids in zip(parts, by_request(output, case), strict=True):
            part.append(ids)
        done = ends
    for part, want in zip(parts, full_prefill(), strict=True):
        assert len(part) > 3
        np.testing.assert_array_equal(np.concatenate(part), want)


def test_prefix_hit_equals_the_same_rows_of_a_full_prefill() -> None:
    ranks = short_ranks()
    cache, queries, _ = long_requests()
    case = window_of(cache, queries, [2101, 300], [2180, 303], WINDOW)
    output = ranks.prefill(case, fused=True).output
    full = full_prefill()
    tail, short = by_request(output, case)
    np.testing.assert_array_equal(tail, full[0][2101:2180])
    np.testing.assert_array_equal(short, full[1][300:303])


def test_decode_of_the_last_tokens_equals_prefill() -> None:
    ranks, query_len = short_ranks(), 3
    cache, queries, lengths = long_requests()
    case = Decode(
        np.concatenate([q[-query_len:] for q in queries]),
        cache,
        np.array(lengths, np.int32),
        query_len,
        oracle.decode_num_valid_pages(lengths, query_len),
    )
    output = ranks.decode(case).output[: 2 * query_len]
    want = [ids[-query_len:] for ids in full_prefill()]
    np.testing.assert_array_equal(output, np.concatenate(want))


# ---- real and adversarial scores ----


@pytest.mark.parametrize(("world_size", "page_size"), TWO_GROUPS)
def test_real_activations(world_size: int, page_size: int) -> None:
    """Outliers and a sink block: scores within float32 error, ids exact by those scores."""
    real = inputs.real_activations()
    keys = real.keys[:64].reshape(-1, 128)
    ranks = ranks_of(world_size, page_size, on_mesh=False)
    counts = oracle.decode_num_valid_pages([len(keys)], 8)
    cache = paged([keys], page_size, 64, 64)
    case = Decode(real.queries[:8], cache, np.array([len(keys)], np.int32), 8, counts)
    found = ranks.decode(case, fused=False)
    before = np.full(found.scores.shape[1:], chains.OLD_SCORE, np.float32)
    for rank, scores in enumerate(found.scores):
        want = case.plane(ranks.plan, rank)
        oracle.check_scores(scores, before, want, oracle.EXACT_EPS)
    joined = oracle.join_planes([plane[:8] for plane in found.scores], page_size)
    want = oracle.answer(joined, counts, *FORCED[world_size, page_size])
    np.testing.assert_array_equal(found.output[:8], want)
    assert len({tuple(row) for row in want.reshape(-1, 16).tolist()}) > 8  # queries matter

    offset = len(keys) - 8
    window = Prefill(
        case.query, cache, *(np.array([n], np.int32) for n in (8, len(keys), offset)), counts
    )
    np.testing.assert_array_equal(ranks.prefill(window, fused=True).output, found.output)


def tied_keys(kind: str, blocks: int) -> Array:
    """Keys whose scores under a query of ones tie in most blocks."""
    values = np.zeros((blocks, 128, 128))
    if kind == "all equal":
        values[...] = 1
    elif kind == "winners at the end":
        values[-9:, 77] = 2
    elif kind == "winner in another rank's rows of each block":
        values[np.arange(blocks), np.arange(blocks) * 37 % 128] = 3
    elif kind == "negative, zero in one row":
        values[...] = -1
        values[::2, 5] = 0
    elif kind == "every zero negative":
        return oracle.e4m3_encode(-values).reshape(-1, 128)
    elif kind == "NaN but one block":
        values[20] = 1
        keys = oracle.e4m3_encode(values)
        keys[np.arange(blocks) != 20] = 0xFF
        return keys.reshape(-1, 128)
    return oracle.e4m3_encode(values).reshape(-1, 128)


@pytest.mark.parametrize(
    "kind",
    [
        "all equal",
        "winners at the end",
        "winner in another rank's rows of each block",
        "negative, zero in one row",
        "every zero negative",
        "NaN but one block",
    ],
)
def test_ties(kind: str) -> None:
    """40 blocks that mostly tie: the lower id wins, on every rank alike and on every repeat."""
    for world_size, page_size in TWO_GROUPS:
        ranks = ranks_of(world_size, page_size, on_mesh=False)
        keys = tied_keys(kind, 40)
        length = len(keys) - 3
        case = Decode(
            oracle.e4m3_encode(np.ones((1, 4, 128))),
            paged([keys[:length]], page_size, 64, 40),
            np.array([length], np.int32),
            1,
            oracle.decode_num_valid_pages([length], 1),
        )
        first = ranks.decode(case)
        check_decoded(ranks.plan, case, first, fused=False)
        for _ in range(5):
            np.testing.assert_array_equal(ranks.decode(case).output, first.output)


@functools.cache
def million_ranks() -> Ranks:
    plan = make_plan(2, 128, init_blocks=0, local_blocks=2, max_model_len=(1 << 20) + 4096)
    return Ranks(plan, None)


@functools.cache
def million_case(length: int) -> Decode:
    """One request of 8192 and more blocks: page 0 is all zeros, pages 1 to 10 hold winners."""
    rng = np.random.default_rng(1)
    values = np.zeros((11, 128, 128))
    for page in range(1, 11):
        values[page, rng.integers(128)] = 1 + (page % 4)
    table = np.zeros((1, 8224), np.int32)
    table[0, rng.choice(8192, 10, replace=False)] = np.arange(1, 11)
    return Decode(
        oracle.e4m3_encode(np.ones((1, 4, 128))),
        Cache(oracle.e4m3_encode(values), table),
        np.array([length], np.int32),
        1,
        oracle.decode_num_valid_pages([length], 1),
    )


@pytest.mark.parametrize("length", [1 << 20, (1 << 20) + 130])
def test_decode_at_8192_blocks(length: int) -> None:
    """Thousands of ties behind ten winners; past 8192 blocks candidates stop at 8191."""
    ranks, case = million_ranks(), million_case(length)
    found = ranks.decode(case)
    check_decoded(ranks.plan, case, found, fused=False)
    ids = found.output[0, 0].tolist()
    winners = np.flatnonzero(case.cache.table[0]).tolist()
    # 8191 and 8190 are local blocks of the shorter context; of the longer, 8192 and 8193 would be.
    local = [8190, 8191] if length == 1 << 20 else []
    ties = [i for i in range(16) if i not in winners][: 16 - len(winners) - len(local)]
    assert ids == sorted({*winners, *local, *ties})


def test_prefill_at_8192_blocks() -> None:
    ranks, decode_case = million_ranks(), million_case(1 << 20)
    offset = (1 << 20) - 1
    case = Prefill(
        decode_case.query,
        decode_case.cache,
        *(np.array([n], np.int32) for n in (1, offset + 1, offset)),
        counts=decode_case.counts,
    )
    found = ranks.prefill(case, fused=False)
    check_prefilled(ranks.plan, case, found, fused=False)
    np.testing.assert_array_equal(found.output, ranks.decode(decode_case).output)


def test_one_block() -> None:
    for world_size, page_size in TWO_GROUPS:
        ranks = ranks_of(world_size, page_size, on_mesh=False)
        case = random_decode([1, 127, 128], 1, page_size)
        found = ranks.decode(case)
        check_decoded(ranks.plan, case, found, fused=False)
        assert (found.output[:3] == [0] + [-1] * 15).all()


# ---- nothing at all ----


@pytest.mark.parametrize("on_mesh", [False, True], ids=["vmap", "mesh"])
@pytest.mark.parametrize("tagged", [False, True], ids=["legacy", "tagged"])
def test_decode_without_requests(tagged: bool, on_mesh: bool) -> None:
    ranks = ranks_of(2, 128, on_mesh=on_mesh)
    case = random_decode([], 2, 128)
    found = ranks.decode(case, tagged=tagged)
    assert (found.output == chains.OLD_WORD).all() and (found.scores == chains.OLD_SCORE).all()
    comm = ranks.zero_comm()
    found = ranks.decode(case, ranks.put_comm(comm), tagged=tagged)
    for name, array in ranks.get_comm(found.comm).items():
        np.testing.assert_array_equal(array, comm[name])


@pytest.mark.parametrize(
    ("fused", "on_mesh"), [(False, True), (True, False)], ids=["unfused-mesh", "fused-vmap"]
)
def test_prefill_without_queries_or_segments(fused: bool, on_mesh: bool) -> None:
    ranks = ranks_of(4, 128, on_mesh=on_mesh)
    nothing = random_prefill([(0, 0, 0)], 0, 128)
    found = ranks.prefill(nothing, fused=fused)
    assert (found.output == chains.OLD_WORD).all() and (found.carrier == chains.OLD_WORD).all()
    assert (found.scratch == chains.OLD_SCORE).all()

    empty = np.zeros(0, np.int32)
    only_padding = dataclasses.replace(
        nothing,
        query=small_queries(np.random.default_rng(0), 6),
        cache=Cache(nothing.cache.keys, np.zeros((0, 36), np.int32)),
        qo_lens=empty,
        kv_lens=empty,
        qo_offset=empty,
        counts=np.zeros(6, np.int32),
    )
    found = ranks.prefill(only_padding, fused=fused)
    assert (found.output[:6] == [0] + [-1] * 15).all()
    assert (found.carrier[:, :, :6] == [MINUS_INF_WORD] * 16 + [-1] * 16 + [1]).all()
    assert (found.scratch[:, :6] == (chains.OLD_SCORE if fused else -np.inf)).all()
    assert (found.output[6:] == chains.OLD_WORD).all()
    assert (found.carrier[:, :, 6:] == chains.OLD_WORD).all()
    assert (found.scratch[:, 6:] == chains.OLD_SCORE).all()


# ---- values that only the device knows ----


@pytest.mark.parametrize(("world_size", "page_size"), TWO_GROUPS)
def test_bad_pages_lengths_and_counts_are_harmless(world_size: int, page_size: int) -> None:
    """A page outside the cache hides its rows; no length or count reaches out of an array."""
    ranks = ranks_of(world_size, page_size)
    plain = decode_steps(page_size)[0]
    table = plain.cache.table.copy()
    table[0, [0, 3, 9]] = [-1, 2**31 - 1, len(plain.cache.keys)]
    table[2, 0] = -(2**31)
    bad_pages = dataclasses.replace(plain, cache=Cache(plain.cache.keys, table))
    check_decoded(ranks.plan, bad_pages, ranks.decode(bad_pages), fused=False)

    lengths = np.array([2**31 - 1, -5, -(2**31), 9000], np.int32)
    bad_lengths = dataclasses.replace(plain, seq_lens=lengths)
    check_decoded(ranks.plan, bad_lengths, ranks.decode(bad_lengths), fused=False)

    # Counts are the caller's own: they may differ from what the lengths say, as far as columns
    # were written, be zero or negative.
    counts = np.array([1, 5, 0, -3, 6, -(2**31), 2, 4], np.int32)
    own_counts = dataclasses.replace(plain, counts=counts)
    check_decoded(ranks.plan, own_counts, ranks.decode(own_counts), fused=False)


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_bad_prefill_values_are_harmless(fused: bool) -> None:
    ranks = ranks_of(4 if fused else 2, 128)
    plain = prefill_windows(128)[0]
    table = plain.cache.table.copy()
    table[2, :5] = [-1, 2**31 - 1, 80, -(2**31), 10**6]
    bad_pages = dataclasses.replace(plain, cache=Cache(plain.cache.keys, table))
    check_prefilled(ranks.plan, bad_pages, ranks.prefill(bad_pages, fused=fused), fused=fused)

    # Negative lengths read as 0; a query before position 0 sees nothing.
    qo, offset, kv = [-7, 100, 20, -(2**31), 5], [0, -40, 2**31 - 1, 5, 0], [9, 60, 50, 9, -1]
    bad_lengths = dataclasses.replace(
        plain,
        qo_lens=np.array(qo, np.int32),
        qo_offset=np.array(offset, np.int32),
        kv_lens=np.array(kv, np.int32),
        counts=np.r_[
            np.zeros(40, np.int32), np.ones(60, np.int32), np.full(20, 64), np.ones(5), [0] * 35
        ].astype(np.int32),
    )
    check_prefilled(ranks.plan, bad_lengths, ranks.prefill(bad_lengths, fused=fused), fused=fused)


# ---- repeats and neighbours ----


def gaussian_decode(lengths: list[int], page_size: int) -> Decode:
    """Keys and queries that round in float32, unlike the small integers elsewhere."""
    rng = np.random.default_rng(11)
    case = random_decode(lengths, 2, page_size)
    normal = rng.standard_normal(case.query.shape).astype(ml_dtypes.float8_e4m3fn)
    keys = rng.standard_normal(case.cache.keys.shape).astype(ml_dtypes.float8_e4m3fn)
    cache = Cache(keys.view(np.uint8), case.cache.table)
    return dataclasses.replace(case, query=normal.view(np.uint8), cache=cache)


@pytest.mark.parametrize(("world_size", "page_size"), TWO_GROUPS)
def test_repeats_and_batch_neighbours_change_nothing(world_size: int, page_size: int) -> None:
    ranks = ranks_of(world_size, page_size)
    case = gaussian_decode([2500, 2300, 2200, 700], page_size)
    first = ranks.decode(case)
    again = ranks.decode(case)
    np.testing.assert_array_equal(again.output, first.output)
    np.testing.assert_array_equal(again.scores, first.scores)

    order = np.array([2, 0, 3, 1])
    tokens = (order[:, None] * 2 + np.arange(2)).reshape(-1)
    moved = Decode(
        case.query[tokens],
        Cache(case.cache.keys, case.cache.table[order]),
        case.seq_lens[order],
        2,
        case.counts[tokens],
    )
    found = ranks.decode(moved)
    np.testing.assert_array_equal(found.output[:8], first.output[tokens])
    np.testing.assert_array_equal(found.scores[:, :8], first.scores[:, tokens])

    # Request 0 among padding that shares its first page.
    lengths = np.array([2500, 0, 0, 0], np.int32)
    table = np.repeat(case.cache.table[:1], 4, axis=0)
    alone = Decode(
        np.where(np.arange(8)[:, None, None] < 2, case.query, 0x7F).astype(np.uint8),
        Cache(case.cache.keys, table),
        lengths,
        2,
        oracle.decode_num_valid_pages(lengths, 2),
    )
    found = ranks.decode(alone)
    np.testing.assert_array_equal(found.output[:2], first.output[:2])
    np.testing.assert_array_equal(found.scores[:, :2], first.scores[:, :2])
    assert (found.output[2:8] == -1).all()


def test_prefill_repeats_and_segment_order_change_nothing() -> None:
    ranks = ranks_of(4, 256)
    rng = np.random.default_rng(2)
    segments = [(60, 2500, 2560), (40, 3000, 3040), (30, 2200, 2230), (20, 0, 20), (10, 90, 100)]
    case = random_prefill(segments, 160, 256, pages=80)
    normal = rng.standard_normal(case.query.shape).astype(ml_dtypes.float8_e4m3fn)
    case = dataclasses.replace(case, query=normal.view(np.uint8))
    first = ranks.prefill(case, fused=False).output
    np.testing.assert_array_equal(ranks.prefill(case, fused=False).output, first)

    order = np.array([3, 1, 4, 0, 2])
    starts = np.cumsum([0, *case.qo_lens[:-1]])
    rows = np.concatenate([np.arange(case.qo_lens[b]) + starts[b] for b in order])
    moved = Prefill(
        case.query[rows],
        Cache(case.cache.keys, case.cache.table[order]),
        case.qo_lens[order],
        case.kv_lens[order],
        case.qo_offset[order],
        case.counts[rows],
    )
    np.testing.assert_array_equal(ranks.prefill(moved, fused=False).output[:160], first[rows])
