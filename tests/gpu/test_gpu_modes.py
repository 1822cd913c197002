"""JAX's own modes on a GPU: the kernels run with 64 bits on, from JAX and from torch."""

from __future__ import annotations

from collections.abc import Iterator

import chains
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chains import Decoded, Ranks, random_decode, random_prefill

from msa_icp_jax import msa_icp_write_index_k

LENGTHS = [300, 0, 4000, 1]


@pytest.fixture
def _x64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.mark.usefixtures("_x64")
def test_decode_with_64_bits_on():
    ranks = Ranks(chains.make_plan(2, 128, backend="auto"), None)
    assert ranks.plan.backend == "mosaic"
    case = random_decode(LENGTHS, 2, 128)
    found = ranks.decode(case, ranks.put_comm(ranks.zero_comm()), 4, tagged=True)
    chains.check_decoded(ranks.plan, case, found, fused=False)


@pytest.mark.usefixtures("_x64")
def test_prefill_with_64_bits_on():
    ranks = Ranks(chains.make_plan(4, 256, backend="auto"), None)
    case = random_prefill([(100, 300, 400), (0, 0, 0), (57, 0, 57)], 192, 256)
    chains.check_prefilled(ranks.plan, case, ranks.prefill(case, fused=False), fused=False)


@pytest.mark.usefixtures("_x64")
def test_torch_s_direct_route_with_64_bits_on(monkeypatch):
    torch = pytest.importorskip("torch", reason="torch is not installed (extra torch)")
    import torch_inputs

    torch_inputs.use_local_groups(monkeypatch)
    device = torch.device("cuda", 0)
    options = {"device": device, "backend": "auto", "precision": "exact", "route": "direct"}
    group = torch_inputs.Group(2, 128, **options)
    case = random_decode(LENGTHS, 2, 128)
    steps = [torch_inputs.decode_step(plan, case) for plan in group.plans]
    group.decode(steps, 2, slot=1)
    torch.cuda.synchronize()
    found = Decoded(
        torch_inputs.outputs([s.output for s in steps]),
        torch_inputs.planes([s.scores for s in steps]),
    )
    chains.check_decoded(chains.make_plan(2, 128), case, found, fused=False)


def test_the_portable_write_copies_no_cache():
    """It drops no token by an index out of range, and reads a row before it writes any."""

    def write(cache: jax.Array, new_k: jax.Array, slots: jax.Array) -> jax.Array:
        layout = {"rank": 1, "world_size": 2, "page_size": 128, "backend": "xla"}
        return msa_icp_write_index_k(cache, new_k, slots, **layout)

    cache = jnp.zeros((4096, 64, 128), jnp.float8_e4m3fn)
    new_k, slots = (
        jnp.ones((4, 128), jnp.float8_e4m3fn),
        np.array([-1, 3, 2**31 - 1, 227], np.int32),
    )
    program = jax.jit(write, donate_argnums=0).lower(cache, new_k, slots).compile()
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == cache.nbytes
    assert memory.temp_size_in_bytes < 1 << 20
    written = np.asarray(program(cache, new_k, slots)).astype(np.float32).any(-1)
    assert np.argwhere(written).tolist() == [[1, 35]]
