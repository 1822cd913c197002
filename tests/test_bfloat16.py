"""Index keys and queries in bfloat16: every stage and chain, and what float8 does not have.

Their sums are float32 of exact products in decode and prefill alike, and infinities are values.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import chains
import inputs
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import test_decode_score as decode_scores
import test_prefill_score as prefill_scores
from chains import Ranks, make_mesh, make_plan, random_decode, random_prefill
from inputs import COMPOUND, COMPOUND_WIDE, W2, W4, W4_WIDE

import msa_icp_jax as api

BF16 = "bfloat16"
INF, NAN = float("inf"), float("nan")


def normal_codes(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Codes of normal numbers with all eight bits of a bfloat16."""
    return rng.standard_normal(shape, np.float32).astype(jnp.bfloat16).view(np.uint16)


# ---- stages ----


def decode_inputs(layout: Any, query_len: int, lens: Any) -> decode_scores.Inputs:
    rng = np.random.default_rng(0)
    pages, width = decode_scores.PAGES, decode_scores.WIDTH
    keys = normal_codes(rng, pages, layout.page_rows, 128)
    keys[rng.random(keys.shape[:2]) < 0.05, 5] = 0xFFC0  # NaN
    table = inputs.block_table(rng, lens, layout.page_size, width, pages, bad_share=0.1)
    queries = normal_codes(rng, len(lens) * query_len, 4, 128)
    return decode_scores.Inputs(queries, keys, table, np.array(lens, np.int32))


@pytest.mark.parametrize(
    ("layout", "query_len"), [(W2, 1), (COMPOUND, 4), (W4_WIDE, 6), (COMPOUND_WIDE, 2)]
)
@pytest.mark.parametrize("lens", decode_scores.LENGTHS)
def test_decode_scores_are_float32_sums_of_exact_products(layout, query_len, lens):
    case = decode_inputs(layout, query_len, lens)
    tokens, columns = len(case.queries), decode_scores.COLUMNS
    before = inputs.any_bits(np.random.default_rng(1), (tokens + 3, 4, columns))
    for rank in range(layout.world_size):
        score = decode_scores.scorer(layout, query_len)
        after = np.asarray(score(*case.arrays(), before, jnp.int32(rank)))
        plane = decode_scores.reference(case, layout.shard(rank), query_len)
        oracle.check_scores(after, before, plane, oracle.EXACT_EPS)


@pytest.mark.parametrize(("layout", "columns"), [(W4, 23), (COMPOUND_WIDE, 12)])
@pytest.mark.parametrize("window", prefill_scores.WINDOWS)
def test_prefill_scores_are_float32_sums_of_exact_products(layout, columns, window):
    rng = np.random.default_rng(0)
    tokens, pages, width = prefill_scores.TOKENS, prefill_scores.PAGES, prefill_scores.WIDTH
    keys = normal_codes(rng, pages, layout.page_rows, 128)
    keys[rng.random(keys.shape[:2]) < 0.05, 5] = 0x7F81  # NaN
    table = inputs.block_table(rng, window.kv_lens, layout.page_size, width, pages)
    case = prefill_scores.Inputs(normal_codes(rng, tokens, 4, 128), keys, table, window)
    before = inputs.any_bits(rng, (tokens + 3, 4, columns))
    score = prefill_scores.scorer(layout, 1.0, True)
    for rank in range(layout.world_size):
        after = np.asarray(score(*case.arrays(), before, jnp.int32(rank)))
        plane = case.reference(layout.shard(rank), columns)
        oracle.check_scores(after, before, plane, oracle.EXACT_EPS)


def test_blocks_that_differ_in_the_last_bit_of_a_bfloat16_are_told_apart():
    """float8 would round them to one value."""
    keys = np.zeros((4, 64, 128), np.float32)
    keys[:, 0, 0] = [1.0, 1.0078125, 1.015625, 1.0]
    query = np.zeros((1, 4, 128), np.float32)
    query[..., 0] = 1.0
    scores = score_pages(query, keys)
    np.testing.assert_array_equal(scores, [1.0, 1.0078125, 1.015625, 1.0])


def score_pages(query: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Rank 0's scores [4] of head 0 over one request of four pages of 128, [4, 64, 128]."""
    scores = api.msa_icp_decode_index_score_sharded(
        jnp.asarray(query, jnp.bfloat16),
        jnp.asarray(keys, jnp.bfloat16),
        jnp.arange(4, dtype=jnp.int32)[None],
        jnp.array([512], jnp.int32),
        jnp.zeros((1, 4, 4), jnp.float32),
        rank=0,
        world_size=2,
        page_size=128,
        decode_query_len=1,
        max_decode_query_len=1,
    )
    return np.asarray(scores[0, 0])


def test_infinities_are_values():
    keys = np.zeros((4, 64, 128), np.float32)
    keys[0, 3, 0] = INF  # wins its block
    keys[1, :, 0] = -INF  # nothing else in it
    keys[2, 3, :2] = INF, -INF  # inf - inf: skipped, the other rows are 0
    keys[3, :, 2] = INF  # times 0: all skipped
    query = np.zeros((1, 4, 128), np.float32)
    query[..., :2] = 1.0
    np.testing.assert_array_equal(score_pages(query, keys), [INF, -INF, 0.0, -INF])


# ---- chains ----


@pytest.mark.parametrize(
    ("world_size", "page_size", "on_mesh", "how"),
    [
        (2, 128, True, "legacy"),
        (2, 256, False, "fused"),
        (4, 128, True, "fused"),
        (4, 256, False, "tagged"),
    ],
)
def test_decode(world_size, page_size, on_mesh, how):
    """The exchange moves float32 scores: what it is of is the chains' own tests' affair."""
    plan = make_plan(world_size, page_size, index_dtype=BF16)
    ranks = Ranks(plan, make_mesh(world_size) if on_mesh else None)
    case = random_decode([300, 0, 4000, 1], 2, page_size, index_dtype=BF16)
    fused = how == "fused"
    comm = None if fused else ranks.put_comm(ranks.zero_comm())
    found = ranks.decode(case, comm, slot=4, tagged=how == "tagged", fused=fused)
    chains.check_decoded(plan, case, found, fused=fused)


@pytest.mark.parametrize(
    ("world_size", "page_size", "fused"),
    [(2, 128, True), (2, 256, False), (4, 128, False), (4, 256, True)],
)
def test_prefill(world_size, page_size, fused):
    ranks = Ranks(make_plan(world_size, page_size, index_dtype=BF16), None)
    segments = [(40, 2600, 2640), (0, 0, 0), (57, 0, 57)]
    case = random_prefill(segments, 128, page_size, index_dtype=BF16)
    chains.check_prefilled(ranks.plan, case, ranks.prefill(case, fused=fused), fused=fused)


def test_decode_and_prefill_agree_bit_for_bit():
    """Also where speed is asked for: there is no faster, coarser product for them."""
    rng = np.random.default_rng(0)
    keys = normal_codes(rng, 40 * 128, 128)
    queries = normal_codes(rng, 8, 4, 128)
    length = len(keys)
    cache = chains.paged([keys], 128, 64, 40)
    counts = oracle.decode_num_valid_pages([length], 8)
    step = chains.Decode(queries, cache, np.array([length], np.int32), 8, counts)
    lens = (np.array([n], np.int32) for n in (8, length, length - 8))
    window = chains.Prefill(queries, cache, *lens, counts)
    plan = make_plan(2, 128, index_dtype=BF16, precision="fast")
    ranks = Ranks(plan, None)
    decoded, prefilled = ranks.decode(step), ranks.prefill(window)
    np.testing.assert_array_equal(decoded.output[:8], prefilled.output[:8])
    visible = np.arange(decoded.scores.shape[-1]) < 40
    np.testing.assert_array_equal(
        decoded.scores[:, :8, :, visible], prefilled.scratch[:, :8, :, visible]
    )


def test_an_infinite_score_ranks_first_behind_the_forced():
    """40 blocks of integers, block 33 of +inf, block 20 of -inf, blocks 8 and 9 of inf - inf."""
    case = random_decode([5120], 1, 128, pages=48, width=40, index_dtype=BF16)
    ones = oracle.encode(np.ones((1, 4, 128)), BF16)
    keys = case.cache.keys.copy()
    page = case.cache.table[0]
    keys[page[33], 7, 3] = 0x7F80
    keys[page[20], :, 3] = 0xFF80
    keys[page[8:10], :, 3], keys[page[8:10], :, 4] = 0x7F80, 0xFF80
    case = dataclasses.replace(case, query=ones, cache=chains.Cache(keys, page[None]))
    plan = make_plan(4, 128, index_dtype=BF16, init_blocks=0, local_blocks=1)
    found = Ranks(plan, None).decode(case)
    chains.check_decoded(plan, case, found, fused=False)
    chosen = found.output[0, 0].tolist()
    assert {33, 39} <= set(chosen)
    assert not {8, 9, 20} & set(chosen)


def test_warmup_compiles_what_calls_use():
    plan = make_plan(2, 128, index_dtype=BF16, max_num_batched_tokens=160, max_num_seqs=3)
    ranks = Ranks(plan, None)
    plan.warmup(num_pages=64, table_width=36, batch_sizes=[3], query_lens=[2])
    case = random_decode([2400, 300, 0], 2, 128, index_dtype=BF16)
    arrays = ranks.decode_arrays(case, spare=0)
    new_k = ranks.put_codes(chains.small_keys(np.random.default_rng(0), 6, index_dtype=BF16))
    slots = ranks.put(np.arange(6, dtype=np.int32))
    with inputs.nothing_compiles():
        plan.decode_program(None, decode_query_len=2)(*arrays)
        plan.write_program(None)(arrays[1], new_k, slots)


def test_keys_never_meet_a_product_as_bfloat16_with_bfloat16_sums():
    """Sums are float32, whatever the operands are."""
    ranks = Ranks(make_plan(2, 128, index_dtype=BF16), None)
    decode = random_decode([300, 40], 4, 128, index_dtype=BF16)
    prefill = random_prefill([(40, 260, 300)], 64, 128, index_dtype=BF16)
    lowered = [
        ranks.plan.decode_program(decode_query_len=4).lower(*ranks.decode_arrays(decode)),
        ranks.plan.prefill_program().lower(*ranks.prefill_arrays(prefill)),
    ]
    for text in (x.as_text() for x in lowered):
        products = [x for x in text.splitlines() if "stablehlo.dot_general" in x]
        assert products
        for line in products:
            assert line.rsplit("->", 1)[1].strip().endswith("xf32>"), line


# ---- kernels ----


class _Hopper:
    platform, compute_capability, device_kind = "gpu", "9.0", "a Hopper GPU"


def test_auto_on_hopper_takes_the_kernels(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda **_: [_Hopper()])
    assert make_plan(2, 128, index_dtype=BF16, backend="auto").backend == "mosaic"


def test_no_kernel_stage_is_left_to_xla():
    """Decode's and prefill's kernels take the keys as they are: no product, no conversion of it."""
    plan = make_plan(2, 128, index_dtype=BF16, backend="mosaic")
    decode = random_decode([300, 40], 4, 128, index_dtype=BF16)
    prefill = random_prefill([(40, 260, 300)], 64, 128, index_dtype=BF16)
    ranks = Ranks(plan, None)
    for program, arrays in (
        (plan.decode_program(decode_query_len=4), ranks.decode_arrays(decode)),
        (plan.prefill_program(), ranks.prefill_arrays(prefill)),
    ):
        text = program.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("mosaic_gpu_v2") == 3, "score, select, merge"
        assert "stablehlo.dot_general" not in text
        assert not any("stablehlo.convert" in x and "bf16" in x for x in text.splitlines())


# ---- what is refused ----


def test_a_mixture_is_refused_by_name():
    plan = make_plan(2, 128, index_dtype=BF16)
    ranks = Ranks(plan, None)
    arrays = ranks.decode_arrays(random_decode([300], 1, 128, index_dtype=BF16))
    float8 = ranks.decode_arrays(random_decode([300], 1, 128))
    program = plan.decode_program(decode_query_len=1)
    with pytest.raises(TypeError, match=r"index_q must be a bfloat16 array .* got dtype float8"):
        program(float8[0], *arrays[1:])
    with pytest.raises(TypeError, match=r"index_k must be a bfloat16 array .* got dtype float8"):
        program(arrays[0], float8[1], *arrays[2:])
    other = make_plan(2, 128).decode_program(decode_query_len=1)
    with pytest.raises(TypeError, match=r"index_q must be a float8_e4m3fn array .* got dtype bfl"):
        other(*arrays)

    keys, queries = jnp.zeros((3, 64, 128), jnp.bfloat16), jnp.zeros((1, 4, 128), jnp.bfloat16)
    narrow = jnp.zeros((3, 64, 128), jnp.float8_e4m3fn)
    where = {"rank": 0, "world_size": 2, "page_size": 128}
    slots = jnp.zeros(4, jnp.int32)
    with pytest.raises(TypeError, match=r"new_k must be a bfloat16 array .* got dtype float8"):
        api.msa_icp_write_index_k(keys, jnp.zeros((4, 128), jnp.float8_e4m3fn), slots, **where)
    one = jnp.ones(1, jnp.int32)
    step = (jnp.zeros((1, 3), jnp.int32), one)
    lens = {"decode_query_len": 1, "max_decode_query_len": 1}
    with pytest.raises(TypeError, match=r"index_q must be a float8_e4m3fn array .* got dtype bfl"):
        api.msa_icp_decode_index_score_sharded(
            queries, narrow, *step, jnp.zeros((1, 4, 4)), **where, **lens
        )
    window = api.msa_icp_index_score_sharded_plan([1], [9], 4, qo_offset=[5], backend="xla")
    with pytest.raises(TypeError, match=r"\bk must be a bfloat16 array .* got dtype float8"):
        api.msa_icp_index_score_sharded(
            queries, narrow, step[0], window, rank=0, max_score=jnp.zeros((1, 4, 4))
        )


@pytest.mark.parametrize(
    ("value", "error"), [("float16", ValueError), ("fp8", ValueError), (jnp.bfloat16, TypeError)]
)
def test_other_dtypes_are_refused_by_name(value, error):
    with pytest.raises(error, match="index_dtype must be one of 'float8_e4m3fn', 'bfloat16', got"):
        make_plan(2, 128, index_dtype=value)
