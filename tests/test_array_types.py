"""The array types in signatures hold for what is passed and returned."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from beartype import beartype
from chains import make_plan
from jaxtyping import TypeCheckError, jaxtyped

import msa_icp_jax
from msa_icp_jax import MSAIcpComm, arrays

# What keeps arrays in lists or refs alone, or is nobody's to call.
_LEFT_OUT = {"msa_icp_jax.__main__", "msa_icp_jax.demo", "msa_icp_jax.arrays"}
TOKENS = 6


def struct(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    return struct(jnp.int32, *shape)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Has every function with array types check its calls; their names."""
    modules = [importlib.import_module(name) for name in _modules()]
    found = []
    for module in modules:
        for name in arrays.__all__:
            if name not in vars(module):
                monkeypatch.setattr(module, name, getattr(arrays, name), raising=False)
        for place, name, function in _typed(module):
            check = jaxtyped(typechecker=beartype)(function)
            found.append(f"{module.__name__}.{function.__qualname__}")
            if inspect.isclass(place):
                monkeypatch.setattr(place, name, check)
            for other in modules:  # it may have been imported there by its name
                if vars(other).get(name) is function:
                    monkeypatch.setattr(other, name, check)
    return found


def _modules() -> list[str]:
    package = pkgutil.walk_packages(msa_icp_jax.__path__, "msa_icp_jax.")
    return ["msa_icp_jax", *(info.name for info in package if info.name not in _LEFT_OUT)]


def _typed(module: ModuleType) -> list[tuple[Any, str, Any]]:
    """(module or class, name, function) of the module's own functions that have array types."""
    classes = [x for x in vars(module).values() if inspect.isclass(x)]
    places = [module, *(x for x in classes if x.__module__ == module.__name__)]
    return [
        (place, name, function)
        for place in places
        for name, function in [*vars(place).items()]
        if inspect.isfunction(function)
        and not name.startswith("__")  # dataclasses hold structs, too
        and function.__module__ == module.__name__
        and any("[Array, " in str(x) for x in function.__annotations__.values())
    ]


@pytest.mark.parametrize("backend", ["xla", "mosaic"])
@pytest.mark.parametrize("index_dtype", ["float8_e4m3fn", "bfloat16"])
def test_the_chains_keep_to_the_types_of_their_signatures(checked, backend, index_dtype):
    assert len(checked) > 60
    plan = make_plan(2, 128, rank=1, backend=backend, index_dtype=index_dtype)
    columns = plan.geometry.score_columns
    query, keys = struct(index_dtype, TOKENS, 4, 128), struct(index_dtype, 16, 64, 128)
    table, counts = ints(3, 8), ints(TOKENS)
    plane = struct(jnp.float32, TOKENS + 2, 4, columns)
    output, carrier = ints(TOKENS + 3, 2, 16), ints(4, TOKENS + 1, 33)
    comm = MSAIcpComm.zeros(2, plan.geometry.max_decode_tokens)

    def decode(tagged: bool, comm: Any, fused: bool, *inputs: Any) -> Any:
        options: dict[str, Any] = {"slot": 1, "tagged": tagged}
        found, scores, comm = plan.decode_local(
            *inputs, comm=comm, decode_query_len=2, fused=fused, **options
        )
        return *plan.decode_merge(found, inputs[4], None, comm=comm, **options), scores

    inputs = (query, keys, table, ints(3), counts, plane)
    for tagged in (False, True):
        for storage in (None, comm):
            jax.eval_shape(lambda *x, t=tagged, c=storage: decode(t, c, False, *x), *inputs)
    jax.eval_shape(lambda *x: decode(False, None, True, *x), *inputs)

    def prefill(fused: bool, query: Any, keys: Any, table: Any, plane: Any, *lens: Any) -> Any:
        bounds = {"total_q": TOKENS, "max_query_len": 4, "max_seq_len": 512}
        window = plan.prefill_window_plan(*lens, **bounds)
        counts = window.num_valid_pages(TOKENS)
        rows = jnp.zeros(carrier.shape, jnp.int32)
        found, _ = plan.prefill_local(query, keys, table, window, plane, counts, rows, fused=fused)
        received = found.reshape(2, 2, *found.shape[1:])
        return plan.prefill_merge(received, counts, jnp.zeros(output.shape, jnp.int32))

    for fused in (False, True):
        jax.eval_shape(
            lambda *x, f=fused: prefill(f, *x), query, keys, table, plane, *[ints(3)] * 3
        )


@pytest.mark.parametrize("backend", ["xla", "mosaic"])
def test_the_parts_keep_to_the_types_of_their_signatures(checked, backend):
    query, keys = (struct(jnp.float8_e4m3fn, *shape, 128) for shape in ((TOKENS, 4), (16, 64)))
    shard = {"rank": jnp.int32(1), "world_size": 2, "page_size": 128, "backend": backend}
    forced = {"force_begin_blocks": 1, "force_end_blocks": 2}
    plane = struct(jnp.float32, TOKENS, 4, 64)

    def publish(generations: Any, *arrays: Any) -> Any:
        return msa_icp_jax.msa_icp_decode_score_publish(
            *arrays, decode_query_len=2, generations=generations, slot=4, **shard, **forced
        )

    def score(*arrays: Any) -> Any:
        return msa_icp_jax.msa_icp_decode_index_score_sharded(
            *arrays, decode_query_len=2, max_decode_query_len=2, **shard
        )

    def write(*arrays: Any) -> Any:
        return msa_icp_jax.msa_icp_write_index_k(*arrays, **shard)

    def merge(recv: Any, expected: Any, *arrays: Any) -> Any:
        return msa_icp_jax.msa_icp_merge_candidates(
            *(recv, *arrays),
            init_blocks=1,
            local_blocks=2,
            expected_generations=expected,
            backend=backend,
        )

    decoded = (query, keys, ints(3, 8), ints(3))
    jax.eval_shape(score, *decoded, plane)
    for generations in (None, ints(3, 4, 8)):
        jax.eval_shape(publish, generations, *decoded, ints(TOKENS))
    jax.eval_shape(write, keys, struct(jnp.float8_e4m3fn, 5, 128), ints(5))
    others = (ints(TOKENS), ints(TOKENS, 2, 16), ints(1))
    jax.eval_shape(merge, ints(2, 2, 8, 33), None, *others)
    jax.eval_shape(merge, ints(2, 2, 8, 32, 2), ints(2, 8), *others)
    jax.eval_shape(msa_icp_jax.msa_icp_quantize_index, struct(jnp.bfloat16, 3, 5))


def test_a_wrong_shape_is_found(checked):
    words, ids = jnp.zeros((2, 16), jnp.int32), jnp.zeros((3, 16), jnp.int32)
    with pytest.raises(TypeCheckError):
        sys.modules["msa_icp_jax.rows"].pack(words, ids)
