"""Lines of docs/serving.md that a server copies."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from chains import make_plan

GUIDE = (Path(__file__).parent.parent / "docs" / "serving.md").read_text()
WORLD_SIZE, PAGE_SIZE, PAGES, REQUESTS = 2, 128, 8, 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    """As another library's module: a class that jax.export does not know."""

    weight: jax.Array

    def __call__(self, hidden: jax.Array) -> jax.Array:
        vectors = (hidden @ self.weight).reshape(len(hidden), 4, 128)
        return jnp.clip(vectors, -448, 448).astype(jnp.float8_e4m3fn)


def test_a_step_of_another_library_s_model_is_exported_by_its_leaves():
    (snippet,) = re.findall(r"```python\n(leaves, tree = .*?)```", GUIDE, re.DOTALL)
    rng = np.random.default_rng(0)
    plan = make_plan(WORLD_SIZE, PAGE_SIZE, backend="xla")

    def decode(*arrays: jax.Array, comm: Any) -> Any:
        def one_rank(index_k: jax.Array, comm: Any) -> Any:
            return plan.decode(arrays[0], index_k, *arrays[2:], comm=comm, decode_query_len=1)

        return jax.vmap(one_rank, axis_name="icp")(arrays[1], comm)

    comm = jax.tree.map(lambda x: jnp.stack([x] * WORLD_SIZE), plan.init_comm())
    keys = rng.integers(-3, 4, (WORLD_SIZE, PAGES, PAGE_SIZE // WORLD_SIZE, 128))
    seq_lens = jnp.array([300, 129], jnp.int32)
    names: dict[str, Any] = {
        "jax": jax,
        "decode": decode,
        "model": Model(jnp.asarray(rng.integers(-1, 2, (16, 512)), jnp.float32)),
        "comm": comm,
        "hidden": jnp.asarray(rng.integers(-1, 2, (REQUESTS, 16)), jnp.float32),
        "index_k": jnp.asarray(keys, jnp.float8_e4m3fn),
        "block_table": jnp.arange(PAGES, dtype=jnp.int32).reshape(REQUESTS, -1),
        "seq_lens": seq_lens,
        "num_valid_pages": (seq_lens - 1) // 128 + 1,
    }
    exec(snippet, names)
    loaded = jax.export.deserialize(bytearray(names["data"]))
    found = jax.jit(loaded.call)(*names["arguments"])
    wanted = names["step"](*names["arguments"])
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)
    assert found[0][0, 0, 0, :3].tolist() == [0, 1, 2]

    def whole(model: Model, hidden: jax.Array) -> jax.Array:
        return model(hidden)

    exported = jax.export.export(jax.jit(whole))(names["model"], names["hidden"])
    with pytest.raises(ValueError, match="register_pytree_node_serialization"):
        exported.serialize()


def test_the_sizes_that_the_guide_states_are_the_plan_s():
    for max_model_len, window in ((131_072, 16_384), (1 << 20, 2_048)):
        for page_size in (128, 256):
            limits = {"max_model_len": max_model_len, "max_num_batched_tokens": 1 << 20}
            plan = make_plan(WORLD_SIZE, page_size, backend="xla", **limits)
            assert plan.prefill_window_tokens() == window * page_size // 128
        assert f"{window:,} for {'128K' if window > 9999 else '1M'}" in GUIDE
    plan = make_plan(WORLD_SIZE, PAGE_SIZE, backend="xla", max_decode_tokens=1)
    comm = plan.init_comm()
    assert comm.recv.nbytes + comm.tagged_recv.nbytes == 4_656
    assert "4,656 bytes a token" in GUIDE
    assert comm.publish_generations.nbytes == 48
    assert comm.expected_generations.nbytes == 48 // WORLD_SIZE
