"""The plan: its sizes and limits, where its rank comes from, and what it refuses."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import chains
import inputs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chains import AXIS, INDEX_K, Ranks, make_mesh, make_plan, random_decode, random_prefill
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from msa_icp_jax import (
    MSAIcpIndexerPlan,
    msa_icp_decode_pool_bytes,
    msa_icp_index_score_plan_storage,
    msa_icp_prefill_pool_bytes,
    prepare_msa_icp_indexer,
)

LIMITS: dict[str, Any] = {
    "world_size": 4,
    "num_index_heads": 4,
    "page_size": 256,
    "init_blocks": 0,
    "local_blocks": 1,
    "max_decode_tokens": 64,
    "max_decode_query_len": 4,
    "max_num_batched_tokens": 16384,
    "max_num_seqs": 32,
    "max_model_len": 131072,
    "num_sparse_layers": 57,
}


def prepare(**changes: Any) -> MSAIcpIndexerPlan:
    return prepare_msa_icp_indexer(**LIMITS | changes)


# ---- sizes ----


def test_attributes_and_sizes() -> None:
    plan = prepare(backend="xla")
    assert (plan.rank, plan.backend, plan.precision, plan.axis_name) == (None, "xla", "auto", "icp")
    for name, value in LIMITS.items():
        assert getattr(plan.geometry, name) == value
    assert plan.geometry.rows_per_page == 64 and plan.geometry.heads_per_rank == 1
    assert plan.geometry.compact and plan.geometry.index_scale == 2
    assert [plan.geometry.index_offset(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert plan.decode_score_shape() == (64, 4, 512)
    assert plan.prefill_window_tokens() == 16384
    assert plan.prefill_score_shape() == (16384, 4, 512)
    assert plan.decode_pool_shape() == (math.prod(plan.decode_score_shape()) * 4,)
    assert plan.prefill_pool_shape() == (16384 * 4 * 16 * 8,)
    assert plan.fused_decode_min_batch is None or plan.fused_decode_min_batch >= 1
    assert isinstance(plan.fused_prefill, bool)


@pytest.mark.parametrize(
    ("max_model_len", "page_size", "columns", "window"),
    [
        (1, 128, 4, 16384),
        (513, 128, 8, 16384),
        (131072, 128, 1024, 16384),
        (131072, 256, 512, 16384),
        (1 << 20, 128, 8192, 2048),
        (1 << 20, 256, 4096, 4096),
        (1 << 22, 128, 8192, 2048),  # ids end at 8192
    ],
)
def test_score_columns_and_windows(
    max_model_len: int, page_size: int, columns: int, window: int
) -> None:
    plan = prepare(max_model_len=max_model_len, page_size=page_size)
    assert plan.decode_score_shape() == (64, 4, columns)
    assert plan.prefill_score_shape() == (window, 4, columns)
    assert window * 4 * columns * 4 <= 256 << 20


def test_plans_are_values() -> None:
    plan, same, other = prepare(), prepare(), prepare(local_blocks=2)
    assert plan == same and hash(plan) == hash(same) and plan is not same
    assert plan != other and len({plan, same, other}) == 2
    assert plan != prepare(rank=0) and plan != prepare(precision="exact")
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.rank = 1  # type: ignore[misc]


# ---- limits ----


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("world_size", 1, "2, 4"),
        ("world_size", 3, "2, 4"),
        ("world_size", 8, "2, 4"),
        ("num_index_heads", 8, "4"),
        ("page_size", 64, "128, 256"),
        ("page_size", 512, "128, 256"),
        ("init_blocks", -1, r"\[0, 16\]"),
        ("local_blocks", -1, r"\[0, 16\]"),
        ("init_blocks", 17, r"\[0, 16\]"),
        ("max_decode_query_len", 0, r"\[1, 8\]"),
        ("max_decode_query_len", 9, r"\[1, 8\]"),
        ("max_decode_tokens", 0, r"\[1, 2147483647\]"),
        ("max_num_batched_tokens", 0, r"\[1, 2147483647\]"),
        ("max_num_seqs", -3, r"\[1, 2147483647\]"),
        ("max_model_len", 0, r"\[1, 2147483647\]"),
        ("num_sparse_layers", 0, r"\[1, 2147483647\]"),
        ("rank", 4, r"\[0, 3\]"),
        ("rank", -1, r"\[0, 3\]"),
        ("max_model_len", 2**31, r"\[1, 2147483647\]"),
        ("max_model_len", 10**10, r"\[1, 2147483647\]"),
        ("row_offset", -8, r"\[0, 2147483392\]"),
        ("row_offset", 8 * 10**12, r"\[0, 2147483392\]"),
        ("row_offset", 4, "multiple of 8"),
        ("backend", "cake", "'auto', 'mosaic', 'xla'"),
        ("backend", "cuda", "'auto', 'mosaic', 'xla'"),
        ("precision", "fp8", "'auto', 'exact', 'fast'"),
    ],
)
def test_a_value_outside_its_range_is_named(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s){name} must be.*{message}.*got.*{value}"):
        prepare(**{name: value})


@pytest.mark.parametrize(
    "kind", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]
)
def test_limits_of_numpy_integers_are_python_ints(kind: Any) -> None:
    """Computed with as they are they would wrap: -np.uint32(8192) is 4294959104."""
    length = min(8192, int(np.iinfo(kind).max))
    sizes = {
        "world_size": 2, "page_size": 128, "num_index_heads": 4, "init_blocks": 1,
        "local_blocks": 2, "max_decode_tokens": 100, "max_decode_query_len": 8,
        "max_num_batched_tokens": 120, "max_num_seqs": 100, "max_model_len": length,
        "num_sparse_layers": 3, "row_offset": 8, "rank": 1,
    }  # fmt: skip
    made = prepare(**{n: size if n == "page_size" else kind(size) for n, size in sizes.items()})
    plain = prepare(**sizes)
    assert made == plain
    assert hash(made) == hash(plain)
    values = [getattr(made.geometry, name) for name in sizes if name != "rank"]
    assert {type(value) for value in [*values, made.rank]} == {int}
    for name in ("decode_score_shape", "prefill_score_shape", "decode_pool_shape"):
        assert getattr(made, name)() == getattr(plain, name)()
    window = {"total_q": kind(9), "max_query_len": kind(9), "max_seq_len": kind(100)}
    lengths = np.array([3], np.int32)
    assert made.prefill_window_plan(lengths, lengths, lengths, **window).total_q == 9


def test_pool_sizes_of_numpy_integers_are_those_of_ints() -> None:
    sizes = {"batch": 512, "decode_query_len": 8, "max_model_len": 1000, "page_size": 128}
    shorts = {name: np.int16(size) for name, size in sizes.items()}
    assert msa_icp_decode_pool_bytes(**shorts) == msa_icp_decode_pool_bytes(**sizes)
    many = msa_icp_prefill_pool_bytes(total_q=np.int32(2_000_000), batch=np.int8(1))
    assert many == msa_icp_prefill_pool_bytes(total_q=2_000_000, batch=1)
    storage = msa_icp_index_score_plan_storage(
        num_qo_heads=4, total_q=np.int8(9), batch=np.uint8(9)
    )
    assert storage == msa_icp_index_score_plan_storage(num_qo_heads=4, total_q=9, batch=9)


@pytest.mark.parametrize("fused", [False, True])
def test_a_query_length_of_numpy_s_is_that_of_an_int(fused: bool) -> None:
    """np.int8(8) times 17 requests would be -120."""
    plan = make_plan(2, 128, max_decode_tokens=136, max_num_seqs=17, max_model_len=1024)
    case = random_decode([700] * 17, 8, 128, pages=104, width=8)
    ranks = Ranks(plan, None)

    def decode(*arrays: Any) -> Any:
        return plan.decode(*arrays, decode_query_len=np.int8(8), fused=fused)[0]

    axes = (None, 0, None, None, None, 0, 0)
    run = jax.vmap(decode, in_axes=axes, axis_name=AXIS, axis_size=2)
    output = ranks.get(run(*ranks.decode_arrays(case)), chains.OUTPUT)
    chains.check_output(plan, case, output)


def test_the_longest_legal_context_is_the_longest_int32() -> None:
    assert prepare(max_model_len=2**31 - 1).geometry.score_columns == 8192


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("world_size", 2.0),
        ("world_size", True),
        ("max_model_len", "131072"),
        ("max_num_seqs", None),
        ("rank", jnp.int32(0)),
        ("backend", None),
        ("precision", 16),
        ("axis_name", ("icp",)),
        ("device", "cpu"),
    ],
)
def test_a_value_of_another_kind_is_named(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name} must be"):
        prepare(**{name: value})


def test_forced_blocks_share_sixteen_places() -> None:
    assert prepare(init_blocks=7, local_blocks=9).geometry.local_blocks == 9
    assert prepare(init_blocks=16, local_blocks=0).geometry.init_blocks == 16
    with pytest.raises(ValueError, match="init_blocks \\+ local_blocks must be at most 16"):
        prepare(init_blocks=8, local_blocks=9)


def test_there_is_no_other_top_k() -> None:
    with pytest.raises(TypeError, match="topk"):
        prepare(topk=32)


# ---- backend and precision ----


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what auto means without a GPU")
def test_auto_is_xla_without_a_gpu() -> None:
    """Silently so: only a GPU or TPU without kernels earns a warning (which would be an error)."""
    assert prepare().backend == "xla"
    assert prepare(device=jax.devices("cpu")[1]).backend == "xla"
    assert prepare(backend="mosaic").backend == "mosaic"


class _OtherGpu:
    platform = "gpu"
    compute_capability = "8.0"
    device_kind = "another GPU"


class _Tpu:
    platform = "tpu"
    device_kind = "a TPU"


class _Hopper(_OtherGpu):
    compute_capability = "9.0"


def test_auto_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "local_devices", lambda **_: [_Hopper()])
    assert prepare().backend == "mosaic"
    monkeypatch.setattr(jax, "local_devices", lambda **_: [_OtherGpu()])
    with pytest.warns(UserWarning, match="no Mosaic kernels for another GPU"):
        assert prepare().backend == "xla"
    assert prepare().backend == "xla"  # warned once


def test_auto_on_tpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "local_devices", lambda **_: [_Tpu()])
    with pytest.warns(UserWarning, match="no Mosaic kernels for a TPU"):
        assert prepare().backend == "xla"


def test_what_was_chosen_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    """In the plan's repr, and in one line when it is prepared."""
    with caplog.at_level("INFO", logger="msa_icp_jax"):
        plan = prepare(backend="xla", precision="exact")
    for shown in ("backend='xla'", "precision='exact'", "transport="):
        assert shown in repr(plan)
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert "backend xla, precision exact, transport" in record.getMessage()


def test_precision_means_nothing_to_xla() -> None:
    """Always exact: the same bits whatever is asked for, of products that need all of float32."""
    rng, case = np.random.default_rng(0), random_decode([2400, 300, 0], 2, 128)
    keys = inputs.normal_bytes(rng, case.cache.keys.shape)
    cache = chains.Cache(keys, case.cache.table)
    query = inputs.normal_bytes(rng, case.query.shape)
    case = dataclasses.replace(case, query=query, cache=cache)
    outputs = []
    for precision in ("exact", "fast"):
        ranks = Ranks(make_plan(2, 128, max_model_len=4096, precision=precision), None)
        assert ranks.plan.precision == precision
        outputs.append(ranks.decode(case).scores)
    np.testing.assert_array_equal(*outputs)


# ---- the rank ----


def decode_inputs(world_size: int = 2) -> list[jax.Array]:
    ranks = Ranks(make_plan(world_size, 128), make_mesh(world_size))
    return ranks.decode_arrays(random_decode([300], 1, 128))[:5]


def local_carrier() -> jax.Array:
    return jnp.zeros((4, 3, 33), jnp.int32)


def bound(function: Any, *arguments: Any, size: int = 2, axis: str = AXIS) -> Any:
    """Calls a function of one rank's arrays where `axis` is bound, by vmap."""
    return jax.vmap(lambda _: function(*arguments), axis_name=axis, axis_size=size)(jnp.zeros(size))


def one_rank_decode(plan: MSAIcpIndexerPlan) -> Any:
    query, _, table, lengths, counts = decode_inputs()
    index_k = jnp.zeros((64, 64, 128), jnp.float8_e4m3fn)
    arrays = [np.asarray(x) for x in (table, lengths, counts)]
    return plan.decode(jnp.asarray(np.asarray(query)), index_k, *arrays, decode_query_len=1)[0]


CALLS = {
    "decode": one_rank_decode,
    "prefill_exchange": lambda plan: plan.prefill_exchange(local_carrier()),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_fixed_rank_is_refused_where_the_axis_is_bound(name: str) -> None:
    plan = make_plan(2, 128, rank=1)
    with pytest.raises(ValueError, match=f"{name} needs rank=None .* got rank 1"):
        bound(CALLS[name], plan)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("rank", [None, 1])
def test_the_exchange_needs_the_axis(rank: int | None, name: str) -> None:
    plan = make_plan(2, 128, rank=rank)
    with pytest.raises(ValueError, match=f"{name} must run where axis_name 'icp' is bound"):
        CALLS[name](plan)
    with pytest.raises(ValueError, match="got an unbound axis"):
        bound(CALLS[name], plan, axis="other")


@pytest.mark.parametrize("name", CALLS)
def test_the_axis_has_one_position_for_each_rank(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} .* with size 2, got size 4"):
        bound(CALLS[name], make_plan(2, 128), size=4)


def test_shard_map_over_a_mesh_of_another_size() -> None:
    plan, mesh = make_plan(2, 128), make_mesh(4)
    with pytest.raises(ValueError, match="mesh must have an axis 'icp' of size 2, got axes"):
        plan.decode_program(mesh, decode_query_len=1)
    with pytest.raises(ValueError, match="mesh must have an axis 'icp' of size 2, got axes"):
        plan.prefill_program(
            jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        )
    exchange = jax.shard_map(
        plan.prefill_exchange, mesh=mesh, in_specs=P(None, AXIS), out_specs=P(None, AXIS)
    )
    with pytest.raises(ValueError, match="with size 2, got size 4"):
        exchange(jnp.zeros((4, 12, 33), jnp.int32))


def test_the_axis_may_have_any_name() -> None:
    """The plan's axis, not the name, is what counts."""
    plan = make_plan(2, 128, axis_name="keys")
    assert plan.comm_specs().errors == P("keys")
    with pytest.raises(ValueError, match="'keys' is bound"):
        bound(CALLS["decode"], plan, axis="icp")
    assert bound(CALLS["decode"], plan, axis="keys").shape == (2, 1, 2, 16)


def prefill_inputs(ranks: Ranks) -> tuple[Any, list[Any]]:
    case = random_prefill([(20, 2500, 2520), (9, 0, 9)], 32, 128)
    return case, ranks.prefill_arrays(case)


def test_local_prefill_with_a_fixed_rank_needs_no_axis() -> None:
    """A caller with a transport of its own runs one rank alone."""
    everyone = Ranks(make_plan(2, 128, max_model_len=4096), None)
    case, arrays = prefill_inputs(everyone)
    for rank in range(2):
        plan = make_plan(2, 128, max_model_len=4096, rank=rank)
        query, keys, table, window_plan, scratch, counts, carrier, _ = arrays
        local = jax.jit(plan.prefill_local)
        found, _ = local(
            query, keys[rank], table, window_plan, scratch[rank], counts, carrier[rank]
        )
        want = case.rows(everyone.plan, rank)
        np.testing.assert_array_equal(np.asarray(found)[:, :32], want)
    with pytest.raises(ValueError, match="a plan with rank=None must run where axis_name"):
        everyone.plan.prefill_local(
            query, keys[0], table, window_plan, scratch[0], counts, carrier[0]
        )


@pytest.mark.parametrize(
    ("tagged", "with_comm"),
    [(False, False), (True, False), (True, True)],
    ids=["bare-legacy", "bare-tagged", "comm-tagged"],
)
def test_the_halves_of_decode_with_a_transport_of_the_callers(
    tagged: bool, with_comm: bool
) -> None:
    """A fixed rank needs no axis; rows go from one half to the other as they are."""
    everyone = Ranks(make_plan(2, 128, max_model_len=4096), None)
    plans = [make_plan(2, 128, max_model_len=4096, rank=rank) for rank in range(2)]
    case = random_decode([300, 0, 2400], 2, 128)
    query, keys, *lengths, counts, planes, _ = everyone.decode_arrays(case)
    comms = [plan.init_comm() if with_comm else None for plan in plans]
    local = [
        jax.jit(functools.partial(plan.decode_local, decode_query_len=2, tagged=tagged))
        for plan in plans
    ]
    merge = [jax.jit(functools.partial(plan.decode_merge, tagged=tagged)) for plan in plans]
    for slot in map(jnp.int32, (1, 2, 4)):
        sent, output = [], []
        for rank in range(2):
            found, scores, comms[rank] = local[rank](
                query, keys[rank], *lengths, counts, planes[rank], comm=comms[rank], slot=slot
            )
            plane = case.plane(everyone.plan, rank)
            np.testing.assert_array_equal(scores, plane.over(np.asarray(planes[rank])))
            sent.append(found)
        for rank in range(2):
            received = jnp.stack([found[rank] for found in sent])
            ids, comms[rank] = merge[rank](
                received, counts, jnp.full((6, 2, 16), 9), comm=comms[rank], slot=slot
            )
            output.append(ids)
        chains.check_output(everyone.plan, case, np.concatenate(output, axis=1))
    for comm in comms:
        assert (comm is not None) == with_comm
        if comm is not None:
            assert not comm.errors.any() and comm.publish_generations[1].max() == 2 * tagged


def test_merge_needs_neither_rank_nor_axis() -> None:
    plan = make_plan(4, 128)
    received = jnp.zeros((4, 1, 5, 33), jnp.int32).at[..., 32].set(1)
    output = plan.prefill_merge(received, jnp.zeros(3, jnp.int32), jnp.full((4, 1, 16), 9))
    assert output[:3].tolist() == [[[0] + [-1] * 15]] * 3
    assert (output[3:] == 9).all()


# ---- arguments that a plan refuses ----


@pytest.mark.parametrize(
    ("position", "bad", "error", "message"),
    [
        (0, lambda x: x[:1], ValueError, "index_q"),
        (0, lambda x: x.astype(np.float32), TypeError, "index_q"),
        (1, lambda x: x[:, :48], ValueError, "index_k"),
        (1, lambda x: x[:0], ValueError, "index_k"),
        (1, lambda x: x.view(np.uint8), TypeError, "index_k"),
        (2, lambda x: x[:1], ValueError, "seq_lens|index_q"),
        (2, lambda x: x[:, :0], ValueError, "block_table"),
        (2, lambda x: x.astype(np.int64), TypeError, "block_table"),
        (2, lambda x: np.repeat(x, 5, 0), ValueError, "requests"),
        (3, lambda x: x[:1], ValueError, "seq_lens"),
        (3, lambda x: x.astype(np.int64), TypeError, "seq_lens"),
        (4, lambda x: x[:1], ValueError, "num_valid_pages"),
        (4, lambda x: x > 0, TypeError, "num_valid_pages"),
        (5, lambda x: x[:1], ValueError, "scores"),
        (5, lambda x: x[..., :8], ValueError, "scores"),
        (5, lambda x: x.astype(np.float16), TypeError, "scores"),
        (6, lambda x: x[:1], ValueError, "output"),
        (6, lambda x: x[:, :1], ValueError, "output"),
        (6, lambda x: x.astype(np.float32), TypeError, "output"),
    ],
)
def test_decode_names_a_wrong_array(position: int, bad: Any, error: Any, message: str) -> None:
    case = random_decode([300, 0], 1, 128)
    plan = make_plan(2, 128)
    arrays = [
        case.query.view(jnp.float8_e4m3fn),
        case.cache.keys[:, :64].view(jnp.float8_e4m3fn),
        case.cache.table,
        case.seq_lens,
        case.counts,
        np.zeros((2, 4, 64), np.float32),
        np.zeros((2, 2, 16), np.int32),
    ]
    arrays[position] = bad(arrays[position])
    with pytest.raises(error, match=message):
        bound(lambda: plan.decode(*arrays, decode_query_len=1)[0])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"decode_query_len": 9}, ValueError, r"decode_query_len must be .*\[1, 8\]"),
        ({"decode_query_len": 0}, ValueError, "decode_query_len"),
        ({"decode_query_len": 1.0}, TypeError, "decode_query_len"),
        ({"decode_query_len": 1, "slot": -1}, ValueError, "slot"),
        ({"decode_query_len": 1, "slot": 1.5}, TypeError, "slot"),
        ({"decode_query_len": 1, "tagged": 1}, TypeError, "tagged"),
        ({"decode_query_len": 1, "fused": 1}, TypeError, "fused"),
        ({"decode_query_len": 1, "enable_pdl": None}, TypeError, "enable_pdl"),
    ],
)
def test_decode_names_a_wrong_option(options: Any, error: Any, message: str) -> None:
    case = random_decode([300], 1, 128)
    plan = make_plan(2, 128)
    arrays = [
        case.query.view(jnp.float8_e4m3fn),
        case.cache.keys[:, :64].view(jnp.float8_e4m3fn),
        case.cache.table,
        case.seq_lens,
        case.counts,
    ]
    with pytest.raises(error, match=message):
        bound(lambda: plan.decode(*arrays, **options)[0])


def test_decode_limits_tokens() -> None:
    ranks = Ranks(make_plan(2, 128, max_decode_tokens=5), None)
    with pytest.raises(ValueError, match=r"T = requests \* decode_query_len must be .*\[0, 5\]"):
        ranks.decode(random_decode([300, 1], 3, 128))
    assert ranks.decode(random_decode([300], 3, 128)).output.shape == (3 + chains.SPARE_ROWS, 4, 16)


@pytest.mark.parametrize(
    ("bounds", "name"),
    [
        ({"total_q": 4097}, "total_q"),
        ({"total_q": -1}, "total_q"),
        ({"max_query_len": 4097}, "max_query_len"),
        ({"max_seq_len": 8193}, "max_seq_len"),
    ],
)
def test_window_plan_limits(bounds: dict[str, int], name: str) -> None:
    plan, lengths = make_plan(2, 128), jnp.ones(3, jnp.int32)
    within = {"total_q": 8, "max_query_len": 8, "max_seq_len": 8}
    with pytest.raises(ValueError, match=f"{name} must be"):
        plan.prefill_window_plan(lengths, lengths, lengths, **within | bounds)
    many = jnp.ones(9, jnp.int32)
    with pytest.raises(ValueError, match="qo_segment_lens"):
        plan.prefill_window_plan(many, many, many, **within)
    with pytest.raises(TypeError, match="qo_segment_lens"):
        plan.prefill_window_plan([1, 1], lengths, lengths, **within)


@pytest.mark.parametrize(
    ("position", "bad", "error", "message"),
    [
        (0, lambda x: x[:5], ValueError, "query"),
        (1, lambda x: x[:, :48], ValueError, "index_k"),
        (2, lambda x: x[:1], ValueError, "block_table"),
        (3, lambda x: None, TypeError, "window_plan"),
        (4, lambda x: None, ValueError, "score_scratch"),
        (4, lambda x: x[:5], ValueError, "score_scratch"),
        (5, lambda x: x[:5], ValueError, "num_valid_pages"),
        (5, lambda x: x[0], ValueError, "num_valid_pages"),
        (5, lambda x: np.asarray(x)[0], TypeError, "num_valid_pages"),
        (5, lambda x: None, TypeError, "num_valid_pages"),
        (6, lambda x: x[:, :5], ValueError, "carrier_view"),
        (6, lambda x: x[:3], ValueError, "carrier_view"),
        (7, lambda x: x[:5], ValueError, "output"),
    ],
)
def test_prefill_names_a_wrong_argument(position: int, bad: Any, error: Any, message: str) -> None:
    ranks = Ranks(make_plan(2, 128, max_model_len=4096), None)
    arrays = prefill_inputs(ranks)[1]
    for i in (1, 4, 6, 7):  # one rank's part
        arrays[i] = arrays[i][0]
    arrays[position] = bad(arrays[position])
    with pytest.raises(error, match=f"{message} must (be|have)"):
        bound(lambda: ranks.plan.prefill(*arrays, fused=False)[0])


def test_scratch_may_be_left_out_when_fused() -> None:
    ranks = Ranks(make_plan(2, 128, max_model_len=4096), None)
    case, arrays = prefill_inputs(ranks)
    query, keys, table, window_plan, _, counts, carrier, output = arrays

    def prefill(keys: Any, carrier: Any, output: Any) -> Any:
        shared = (table, window_plan, None, counts)
        return ranks.plan.prefill(query, keys, *shared, carrier, output)[::2]

    ids, scratch = jax.vmap(prefill, axis_name=AXIS)(keys, carrier, output)
    assert scratch is None
    chains.check_output(ranks.plan, case, ranks.get(ids, chains.OUTPUT))


def test_compound_pages() -> None:
    """Index keys behind other cache data: the same answers as from a cache of their own."""
    case = random_decode([2400, 300, 0], 2, 256)
    plain = Ranks(make_plan(4, 256, max_model_len=4096), None)
    behind = Ranks(make_plan(4, 256, max_model_len=4096, row_offset=72), None)
    arrays = behind.decode_arrays(case)
    keys = np.asarray(arrays[1]).view(np.uint8)
    base = np.full((4, len(case.cache.keys), 144, 128), 0x7F, np.uint8)
    base[:, :, 72 : 72 + 64] = keys
    whole = np.concatenate(list(base), axis=1)
    arrays[1] = behind.put_codes(whole, INDEX_K)
    output, scores = behind.plan.decode_program(decode_query_len=2)(*arrays)
    want = plain.decode(case)
    np.testing.assert_array_equal(behind.get(output, chains.OUTPUT), want.output)
    np.testing.assert_array_equal(behind.planes(scores), want.scores)


def test_segment_lengths_that_would_wrap_never_overlap() -> None:
    plan = make_plan(2, 128)
    lens = jnp.array([2**31 - 1, 2**31 - 1, 5], jnp.int32)
    window = plan.prefill_window_plan(
        lens, lens, jnp.zeros(3, jnp.int32), total_q=16, max_query_len=16, max_seq_len=1024
    )
    np.testing.assert_array_equal(window.qo_starts, [0, 16, 16])
    np.testing.assert_array_equal(window.qo_lens, [16, 0, 0])


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"batch_sizes": 3}, TypeError, "batch_sizes must be a sequence"),
        ({"batch_sizes": [99]}, ValueError, r"batch_sizes\[0\] must be an int in \[1, 8\]"),
        ({"query_lens": [0]}, ValueError, r"query_lens\[0\] must be an int in \[1, 8\]"),
        ({"mesh": "x"}, TypeError, "mesh must be a jax.sharding.Mesh"),
        ({"num_pages": 0}, ValueError, r"num_pages must be an int in \[1, 2147483647\]"),
        ({"page_rows": 63}, ValueError, r"page_rows must be an int in \[64, 2147483647\]"),
    ],
)
def test_warmup_names_what_is_wrong(changes: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make_plan(2, 128).warmup(**{"num_pages": 4, "table_width": 4} | changes)
