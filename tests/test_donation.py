"""Donated buffers are written in place: aliased in the executable, at the same address after.

A donation that XLA can't use is a warning, and warnings are errors here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from chains import (
    CARRIER,
    INDEX_K,
    OLD_SCORE,
    OLD_WORD,
    OUTPUT,
    SCORES,
    SPARE_ROWS,
    Decode,
    Decoded,
    Prefilled,
    Ranks,
    check_decoded,
    check_prefilled,
    make_mesh,
    make_plan,
    random_decode,
    random_prefill,
    small_keys,
)
from jax.sharding import PartitionSpec as P

from msa_icp_jax import MSAIcpComm

KINDS = pytest.mark.parametrize(
    ("on_mesh", "index_dtype"),
    [(False, "float8_e4m3fn"), (True, "float8_e4m3fn"), (False, "bfloat16")],
    ids=["vmap", "mesh", "bfloat16"],
)
FORMS = pytest.mark.parametrize(
    ("fused", "on_mesh", "index_dtype"),
    [
        (False, True, "float8_e4m3fn"),
        (True, True, "float8_e4m3fn"),
        (True, False, "float8_e4m3fn"),
        (False, False, "bfloat16"),
    ],
    ids=["unfused-mesh", "fused-mesh", "fused-vmap", "unfused-bfloat16"],
)


def ranks_of(on_mesh: bool, index_dtype: str = "float8_e4m3fn") -> Ranks:
    limits = {"max_decode_tokens": 8, "max_model_len": 4096}
    plan = make_plan(2, 128, index_dtype=index_dtype, **limits)
    return Ranks(plan, make_mesh(2) if on_mesh else None)


def filled(ranks: Ranks, shape: Sequence[int], value: Any, dtype: Any, spec: P) -> jax.Array:
    """A buffer made on the device, so that XLA owns its memory."""
    like = ranks.put(np.zeros(shape, np.dtype(dtype)), spec)
    return jnp.full(like.shape, value, dtype, device=like.sharding)


def addresses(tree: Any) -> list[list[int]]:
    """Where every device's part of every array lies."""
    return [
        [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]
        for array in jax.tree.leaves(tree)
    ]


def bytes_per_device(tree: Any) -> int:
    return sum(array.addressable_shards[0].data.nbytes for array in jax.tree.leaves(tree))


def run_donating(
    program: Any, arguments: list[Any], donated: dict[int, int], one_result: bool = False
) -> Any:
    """Runs the program; asserts that argument i becomes result donated[i], in place."""
    compiled = program.lower(*arguments).compile()
    buffers = [arguments[i] for i in donated]
    assert compiled.memory_analysis().alias_size_in_bytes == bytes_per_device(buffers)
    assert "input_output_alias={" in compiled.as_text()
    before = {i: addresses(arguments[i]) for i in donated}
    results = program(*arguments)
    results = (results,) if one_result else results
    for argument, result in donated.items():
        assert addresses(results[result]) == before[argument], f"argument {argument} moved"
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(arguments[argument]))
    return results


def decode_arguments(ranks: Ranks, case: Decode) -> list[jax.Array]:
    """The arguments of a decode program; scores and output, which it donates, stand last."""
    rows, columns = len(case.query) + SPARE_ROWS, 2 * ranks.plan.geometry.score_columns
    return [
        *ranks.decode_arrays(case)[:5],
        filled(ranks, (rows, 4, columns), OLD_SCORE, jnp.float32, SCORES),
        filled(ranks, (rows, 4, 16), OLD_WORD, jnp.int32, OUTPUT),
    ]


def check_decoded_in_place(
    ranks: Ranks, case: Decode, output: jax.Array, scores: jax.Array, fused: bool
) -> None:
    """Asserts the answers, and that every element which is not written keeps its bits."""
    found = Decoded(ranks.get(output, OUTPUT), ranks.planes(scores))
    check_decoded(ranks.plan, case, found, fused=fused)


@FORMS
def test_decode(fused: bool, on_mesh: bool, index_dtype: str) -> None:
    ranks = ranks_of(on_mesh, index_dtype)
    case = random_decode([2400, 300, 0], 2, 128, index_dtype=index_dtype)
    program = ranks.plan.decode_program(ranks.mesh, decode_query_len=2, fused=fused)
    output, scores = run_donating(program, decode_arguments(ranks, case), {5: 1, 6: 0})
    check_decoded_in_place(ranks, case, output, scores, fused)


@pytest.mark.parametrize(
    ("tagged", "fused", "on_mesh"),
    [(False, False, False), (False, True, True), (True, False, True), (True, True, False)],
    ids=["legacy-unfused-vmap", "legacy-fused-mesh", "tagged-unfused-mesh", "tagged-fused-vmap"],
)
def test_decode_with_storage(tagged: bool, fused: bool, on_mesh: bool) -> None:
    """Every array of the storage as well, also those of the form that isn't in use."""
    ranks, case = ranks_of(on_mesh), random_decode([2400, 300, 0], 2, 128)
    specs, zeros = ranks.plan.comm_specs(), ranks.zero_comm()
    storage = MSAIcpComm(
        **{k: filled(ranks, v.shape, 0, jnp.int32, getattr(specs, k)) for k, v in zeros.items()}
    )
    program = ranks.plan.decode_program(
        ranks.mesh, decode_query_len=2, tagged=tagged, with_comm=True, fused=fused
    )
    arguments = [*decode_arguments(ranks, case), storage, ranks.put(np.int32(1))]
    output, scores, storage = run_donating(program, arguments, {5: 1, 6: 0, 7: 2})
    check_decoded_in_place(ranks, case, output, scores, fused)

    written = {"recv"}
    if tagged:
        written = {"tagged_recv", "publish_generations", "expected_generations"}
    for name, array in ranks.get_comm(storage).items():
        if name not in written:
            assert not array.any(), name
            continue
        tokens = array[..., : len(case.query)] if name.endswith("s") else array[:, :, :, :6]
        assert tokens[1].any() and not tokens[[0, 2]].any(), name
        assert np.count_nonzero(array) == np.count_nonzero(tokens), name  # spare rows are clean


@FORMS
def test_prefill(fused: bool, on_mesh: bool, index_dtype: str) -> None:
    ranks = ranks_of(on_mesh, index_dtype)
    segments = [(100, 0, 100), (0, 0, 0), (30, 2500, 2530)]
    case = random_prefill(segments, 140, 128, index_dtype=index_dtype)
    rows, columns = len(case.query) + SPARE_ROWS, 2 * ranks.plan.geometry.score_columns
    arguments = ranks.prefill_arrays(case)
    arguments[4] = filled(ranks, (rows, 4, columns), OLD_SCORE, jnp.float32, SCORES)
    arguments[6] = filled(ranks, (4, 2 * rows, 33), OLD_WORD, jnp.int32, CARRIER)
    arguments[7] = filled(ranks, (rows, 4, 16), OLD_WORD, jnp.int32, OUTPUT)
    program = ranks.plan.prefill_program(ranks.mesh, fused=fused)
    output, carrier, scratch = run_donating(program, arguments, {4: 2, 6: 1, 7: 0})
    carriers = np.stack(np.split(ranks.get(carrier, CARRIER), 2, axis=1))
    found = Prefilled(ranks.get(output, OUTPUT), carriers, ranks.planes(scratch))
    check_prefilled(ranks.plan, case, found, fused=fused)


@KINDS
def test_write_index_k(on_mesh: bool, index_dtype: str) -> None:
    ranks, pages = ranks_of(on_mesh, index_dtype), 6
    slots = np.array([130, 5, -1, 6 * 128, 2**31 - 1, 767, 64, 63], np.int32)
    new = small_keys(np.random.default_rng(0), len(slots), index_dtype=index_dtype)
    index_k = filled(ranks, (pages, 128, 128), 1.0, jnp.dtype(index_dtype), INDEX_K)
    arguments = [index_k, ranks.put_codes(new), ranks.put(slots)]
    (index_k,) = run_donating(
        ranks.plan.write_program(ranks.mesh), arguments, {0: 0}, one_result=True
    )
    want = oracle.encode(np.ones((pages * 128, 128)), index_dtype)
    stored = (slots >= 0) & (slots < pages * 128)
    want[slots[stored]] = new[stored]
    found = oracle.as_codes(ranks.get(index_k, INDEX_K))
    np.testing.assert_array_equal(found.reshape(-1, 128), want)
