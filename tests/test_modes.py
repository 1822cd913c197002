"""JAX's own modes, which a program sets for all its libraries: none is needed, none a failure.

Rank promotion "raise" and dtype promotion "strict" are on in every test of this suite: conftest.
"""

from __future__ import annotations

import re
from typing import Any

import chains
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chains import Ranks, random_decode, random_prefill
from jax.experimental import checkify

from msa_icp_jax import msa_icp_index_score_sharded_plan
from msa_icp_jax.ops.index_cache import xla


def decode_case() -> chains.Decode:
    return random_decode([300, 900, 3], 2, 256, pages=8, width=4)


def prefill_case() -> chains.Prefill:
    return random_prefill([(3, 0, 3), (5, 900, 905)], 10, 256, pages=8, width=4)


def ranks_of(backend: str = "xla") -> Ranks:
    limits = {"max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    return Ranks(chains.make_plan(2, 256, backend=backend, **limits), None)


def test_promotions_are_forbidden_in_this_suite() -> None:
    assert jax.config.jax_numpy_rank_promotion == "raise"
    assert jax.config.jax_numpy_dtype_promotion == "strict"


# ---- 64 bits ----


def test_decode_with_64_bits_on() -> None:
    ranks, case = ranks_of(), decode_case()
    with jax.enable_x64(True):
        found = ranks.decode(case, ranks.put_comm(ranks.zero_comm()), 4, tagged=True)
    chains.check_decoded(ranks.plan, case, found, fused=False)


def test_prefill_with_64_bits_on() -> None:
    ranks, case = ranks_of(), prefill_case()
    with jax.enable_x64(True):
        found = ranks.prefill(case, fused=False)
    chains.check_prefilled(ranks.plan, case, found, fused=False)


def kernels_of(program: Any, arrays: Any) -> list[str]:
    """The kernels of a program lowered for CUDA."""
    lowered = program.trace(*arrays).lower(lowering_platforms=("cuda",))
    return re.findall(r"custom_call @mosaic_gpu_v2.*?module = \"(.*?)\"", lowered.as_text())


def test_kernels_are_the_same_with_64_bits_on() -> None:
    ranks = ranks_of("mosaic")
    decode = ranks.plan.decode_program(decode_query_len=2)
    prefill = ranks.plan.prefill_program()
    steps = ranks.decode_arrays(decode_case()), ranks.prefill_arrays(prefill_case())
    want = kernels_of(decode, steps[0]), kernels_of(prefill, steps[1])
    assert [len(kernels) for kernels in want] == [3, 3]
    with jax.enable_x64(True):
        assert (kernels_of(decode, steps[0]), kernels_of(prefill, steps[1])) == want


# ---- the default device ----


class _Hopper:
    platform = "gpu"
    compute_capability = "9.0"
    device_kind = "a Hopper GPU"


@pytest.mark.parametrize("chosen", ["cpu", jax.devices("cpu")[1]], ids=["platform", "device"])
def test_auto_follows_the_default_device(chosen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = {None: [_Hopper()], "cpu": jax.devices("cpu")}
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: devices[backend])
    assert chains.make_plan(2, 128, backend="auto").backend == "mosaic"
    with jax.default_device(chosen):
        assert chains.make_plan(2, 128, backend="auto").backend == "xla"


def test_a_host_plan_lies_on_the_default_device() -> None:
    first, second = jax.devices("cpu")[:2]
    lengths: list[Any] = [[3, 0], [5, 0], 4]
    with jax.default_device(second):
        plan = msa_icp_index_score_sharded_plan(*lengths, qo_offset=[2, 0])
        asked = msa_icp_index_score_sharded_plan(*lengths, qo_offset=[2, 0], device=first)
    assert plan.qo_lens.devices() == {second} and not plan.qo_lens.committed
    assert asked.qo_lens.devices() == {first}
    np.testing.assert_array_equal(plan.qo_lens, asked.qo_lens)


# ---- checks and guards ----


def test_no_index_is_out_of_range() -> None:
    """Not even one that a gather would clip or a scatter drop: `checkify` finds nothing."""
    ranks, decode, window = ranks_of(), decode_case(), prefill_case()
    plan = ranks.plan

    def step(decode_arrays: Any, comm: Any, prefill_arrays: Any, new_k: Any, slots: Any) -> Any:
        found = plan.decode(*decode_arrays, comm=comm, slot=2, tagged=True, decode_query_len=2)
        index_k = prefill_arrays[1]
        for write in (xla._rewrite, xla._scatter):
            owned = (slots >= 0) & (slots < 8)
            index_k = write(index_k, new_k, jnp.where(owned, slots, 0), slots & 63, owned)
        return found[0], plan.prefill(*prefill_arrays, fused=False)[0], index_k

    every = (None, 0, None, None, None, 0, 0)
    axes = (every, 0, (None, 0, None, None, 0, None, 0, 0), None, None)
    mapped = jax.vmap(step, in_axes=axes, axis_name=chains.AXIS, axis_size=2)
    checked = jax.jit(checkify.checkify(mapped, errors=checkify.index_checks))
    new_k = jnp.zeros((5, 128), jnp.float8_e4m3fn)
    slots = jnp.array([-1, 3, 2**31 - 1, 8, -(2**31)], jnp.int32)
    error, (output, chosen, _) = checked(
        tuple(ranks.decode_arrays(decode)),
        ranks.put_comm(ranks.zero_comm()),
        tuple(ranks.prefill_arrays(window)),
        new_k,
        slots,
    )
    assert error.get() is None
    chains.check_output(plan, decode, ranks.get(output, chains.OUTPUT))
    chains.check_output(plan, window, ranks.get(chosen, chains.OUTPUT))


@pytest.mark.parametrize("on_mesh", [False, True], ids=["one device", "mesh"])
def test_a_slot_of_python_s_is_no_implicit_transfer(on_mesh: bool) -> None:
    ranks = Ranks(ranks_of().plan, chains.make_mesh(2) if on_mesh else None)
    case = decode_case()
    program = ranks.plan.decode_program(ranks.mesh, decode_query_len=2, with_comm=True)
    arrays, comm = ranks.decode_arrays(case), ranks.put_comm(ranks.zero_comm())
    with jax.transfer_guard("disallow"):
        output, _, comm = program(*arrays, comm, 10**12)
        with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
            program(np.asarray(arrays[0]), *arrays[1:], comm, 0)
    chains.check_output(ranks.plan, case, ranks.get(output, chains.OUTPUT))


def test_layers_in_a_scan() -> None:
    """All modes at once: the slot is a scan's counter, in the caller's jit and shard_map."""
    ranks, case = Ranks(ranks_of().plan, chains.make_mesh(2)), decode_case()

    def steps(*arrays: Any) -> Any:
        def layer(comm: Any, slot: Any) -> Any:
            ids, _, comm = ranks.plan.decode(*arrays, comm=comm, slot=slot, decode_query_len=2)
            return comm, ids

        return jax.lax.scan(layer, ranks.plan.init_comm(), jnp.arange(4, dtype=jnp.int32))[1]

    specs = (chains.ALL, chains.INDEX_K, *[chains.ALL] * 3)
    mapped = jax.shard_map(
        steps,
        mesh=ranks.mesh,
        in_specs=specs,
        out_specs=jax.P(None, None, chains.AXIS),
        check_vma=False,
    )
    with jax.enable_x64(True):
        found = np.asarray(jax.jit(mapped)(*ranks.decode_arrays(case)[:5]))
    for output in found:
        chains.check_output(ranks.plan, case, output)
