"""Faults of this kind of software that no other test file is about.

docs/reliability.md lists every kind, how it is prevented and which test shows it; the last tests
here hold that table to what exists.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chains
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import oracle
import pytest
from chains import Cache, Decode, Ranks, make_mesh, make_plan, random_decode, random_prefill
from hostile import INDEX_DTYPE

Array = npt.NDArray[Any]

ROOT = Path(__file__).parent.parent
PACKAGES = [ROOT / "msa_icp_jax", ROOT / "interop/msa_icp_torch"]


@functools.cache
def ranks_of(world_size: int = 2, **changes: Any) -> Ranks:
    return Ranks(make_plan(world_size, 128, **{"max_model_len": 4096} | changes), None)


def sources() -> list[Path]:
    return [path for package in PACKAGES for path in sorted(package.rglob("*.py"))]


# ---- what the consumer gets ----


@INDEX_DTYPE
def test_a_short_context_is_a_valid_prefix_then_minus_one(index_dtype: str) -> None:
    """Keys 0 to 299 are three blocks; what follows them is no address."""
    case = random_decode([300], 1, 128, index_dtype=index_dtype)
    output = ranks_of(index_dtype=index_dtype).decode(case).output[0]
    assert (output == [0, 1, 2, *[-1] * 13]).all()


@INDEX_DTYPE
def test_minus_one_as_a_page_is_no_page(index_dtype: str) -> None:
    """In JAX an index of -1 is the last element, and one past the end is clamped."""
    ranks = ranks_of(index_dtype=index_dtype)
    case = random_decode([100], 1, 128, pages=8, index_dtype=index_dtype)
    table = np.array([[case.cache.table[0, 0], -1, -1]], np.int32)
    narrow = dataclasses.replace(case, cache=Cache(case.cache.keys, table))
    found = ranks.decode(narrow)
    chains.check_decoded(ranks.plan, narrow, found, fused=False)
    assert (found.output[0] == [0, *[-1] * 15]).all()
    for bad in (-1, 8, 2**31 - 1):  # the only page the request has
        lost = dataclasses.replace(case, cache=Cache(case.cache.keys, np.full_like(table, bad)))
        found = ranks.decode(lost)
        chains.check_decoded(ranks.plan, lost, found, fused=False)


@INDEX_DTYPE
def test_index_keys_left_behind_change_the_choice(index_dtype: str) -> None:
    """Whoever moves pages must move their index keys: past 16 blocks it shows."""
    ranks = ranks_of(index_dtype=index_dtype)
    case = random_decode([24 * 128], 1, 128, pages=64, index_dtype=index_dtype)
    right = ranks.decode(case).output[0]
    moved = (case.cache.table + 7) % 64  # the table follows the pages, the keys did not
    wrong = dataclasses.replace(case, cache=Cache(case.cache.keys, moved.astype(np.int32)))
    assert (ranks.decode(wrong).output[0] != right).any()
    short = random_decode([16 * 128], 1, 128, pages=64, index_dtype=index_dtype)
    hidden = dataclasses.replace(
        short, cache=Cache(short.cache.keys, ((short.cache.table + 7) % 64).astype(np.int32))
    )
    assert (ranks.decode(hidden).output[0] == np.arange(16)).all()


@INDEX_DTYPE
def test_a_whole_batch_of_padding_shares_a_live_page(index_dtype: str) -> None:
    """Graph padding points at page 0, which is somebody's; its tokens' queries are NaN."""
    ranks = ranks_of(index_dtype=index_dtype)
    case = random_decode([2500, 0, 0, 0], 2, 128, index_dtype=index_dtype)
    table = case.cache.table.copy()
    live = table[0, 0]
    table[1:] = live
    query = case.query.copy()
    query[2:] = chains.POISON[index_dtype][2]
    padded = dataclasses.replace(case, query=query, cache=Cache(case.cache.keys, table))
    found = ranks.decode(padded)
    chains.check_decoded(ranks.plan, padded, found, fused=False)
    alone = Decode(
        query[:2], Cache(case.cache.keys, table[:1]), case.seq_lens[:1], 2, case.counts[:2]
    )
    found_alone = ranks.decode(alone)
    np.testing.assert_array_equal(found.output[:2], found_alone.output[:2])


# ---- what the programs hold ----


def decode_text(backend: str, mesh: Any = None, platform: str = "cpu") -> str:
    """The lowered decode program."""
    ranks = Ranks(ranks_of(backend=backend).plan, mesh)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if mesh else None),
        ranks.decode_arrays(random_decode([300, 0], 1, 128)),
    )
    program = ranks.plan.decode_program(mesh, decode_query_len=1)
    return program.trace(*shapes).lower(lowering_platforms=(platform,)).as_text()


def prefill_text(backend: str, platform: str = "cpu") -> str:
    ranks = ranks_of(backend=backend)
    arrays = ranks.prefill_arrays(random_prefill([(20, 300, 320)], 24, 128))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    program = ranks.plan.prefill_program(None)
    return program.trace(*shapes).lower(lowering_platforms=(platform,)).as_text()


def test_the_exchange_is_one_dense_all_to_all() -> None:
    """Ragged collectives have limits of their own; rows have one size, so none is needed."""
    text = decode_text("xla", make_mesh(2))
    assert text.count('"stablehlo.all_to_all"') == 1
    assert "ragged" not in text
    for name in ("all_gather", "all_reduce", "collective_permute", "reduce_scatter"):
        assert name not in text


@pytest.mark.parametrize("text_of", [decode_text, prefill_text], ids=["decode", "prefill"])
def test_every_product_of_the_plain_definition_asks_for_full_precision(text_of: Any) -> None:
    """A GPU would take tf32 or fewer bits by itself."""
    products = re.findall(r"stablehlo\.dot_general.*", text_of("xla"))
    assert products
    assert all("HIGHEST, HIGHEST" in product for product in products)


@pytest.mark.parametrize("text_of", [decode_text, prefill_text], ids=["decode", "prefill"])
def test_the_kernels_call_no_other_library(text_of: Any) -> None:
    """No cuDNN, no cuBLAS: what of theirs another package has loaded does not matter."""
    text = text_of("mosaic", platform="cuda")
    called = set(re.findall(r"custom_call @(\w+)", text))
    assert called
    assert all("mosaic" in name for name in called)
    assert "dot_general" not in text and "convolution" not in text


def inner_functions(tree: ast.AST, public: bool = True) -> Iterator[ast.FunctionDef]:
    """Private and nested functions, kernels' bodies among them; methods share a signature."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            if not (public and not node.name.startswith("_")):
                yield node
            yield from inner_functions(node, public=False)
        elif not isinstance(node, ast.ClassDef):
            yield from inner_functions(node, public)


def test_no_kernel_takes_what_it_does_not_use() -> None:
    """An operand that nothing reads may never be filled."""
    seen = 0
    for path in sorted((ROOT / "msa_icp_jax/ops").rglob("*.py")):
        for function in inner_functions(ast.parse(path.read_text())):
            names = {n.id for x in function.body for n in ast.walk(x) if isinstance(n, ast.Name)}
            every = ast.walk(function.args)
            takes = {a.arg for a in every if isinstance(a, ast.arg) and a.arg[0] != "_"}
            assert takes <= names, f"{path.name}: {function.name} ignores {takes - names}"
            seen += 1
    assert seen > 50


def test_kernels_are_launched_in_one_place_and_never_through_triton() -> None:
    """What JAX renames between releases stands in one file."""
    for path in sources():
        text = path.read_text()
        assert "triton" not in text.lower(), path
        if path.name != "launch.py":
            for name in ("plgpu.kernel", "CompilerParams", "pallas_call", "InterpretGPUParams"):
                assert name not in text, (path, name)


def test_arrays_cross_by_the_object_protocol_or_with_a_stream() -> None:
    """A raw capsule has no stream to wait for; the one place that makes some names the stream."""
    crossing = "crossing.py"
    for path in sources():
        text = path.read_text()
        if path.name == crossing:
            assert "__dlpack__(" not in text
            assert text.count("dlpack.to_dlpack(") == text.count("self._import(capsule, ") == 1
            assert text.count("self._import(") == text.count("self._jax_device, self._stream,") == 1
            assert text.count("self._export(") == text.count(", stream=stream)") == 1
            continue
        for name in ("to_dlpack", "utils.dlpack"):
            assert name not in text, (path, name)
        # The only other capsule holds a function, not an array.
        assert text.count("PyCapsule") == (path.name == "jax_stream.py"), path


# ---- numpy arrays that a caller may pass ----


def test_strange_strides_of_numpy_arrays_are_read_right() -> None:
    """Reversed, sliced and transposed tables: never a wrong answer, never an abort."""
    ranks, case = ranks_of(), random_decode([2500, 300], 1, 128)
    want = case.answer(ranks.plan)
    table = case.cache.table
    wide = np.zeros((2, 2 * table.shape[1]), np.int32)
    wide[:, ::2] = table
    views = [
        np.ascontiguousarray(table[:, ::-1])[:, ::-1],
        np.ascontiguousarray(table[::-1])[::-1],
        np.ascontiguousarray(table.T).T,
        wide[:, ::2],
    ]
    program = ranks.plan.decode_program(decode_query_len=1)
    for view in views:
        assert not view.flags.c_contiguous
        arrays = ranks.decode_arrays(case, spare=0)
        arrays[2] = view
        output, _ = program(*arrays)
        np.testing.assert_array_equal(ranks.get(output, chains.OUTPUT), want)


@pytest.mark.parametrize("dtype", [np.int64, np.bool_, np.uint8, np.float32])
def test_lengths_of_another_type_are_refused_by_name(dtype: Any) -> None:
    """From the host, where JAX would narrow 64 bits without x64, and from a device."""
    arrays = ranks_of().decode_arrays(random_decode([300], 1, 128))
    program = ranks_of().plan.decode_program(decode_query_len=1)
    arrays[3] = np.ones(1, dtype)
    with pytest.raises(TypeError, match="seq_lens must be of dtype int32"):
        program(*arrays)
    with jax.enable_x64(True):
        arrays[3] = jnp.ones(1, dtype)
        with pytest.raises(TypeError, match="seq_lens must be an int32 array"):
            program(*arrays)


@INDEX_DTYPE
def test_unwritten_rows_of_the_second_page_change_nothing(index_dtype: str) -> None:
    """Length 193 of pages of 128: rows 65 to 127 of the second page are NaN, twice the same."""
    ranks = ranks_of(index_dtype=index_dtype)
    case = random_decode([193], 1, 128, index_dtype=index_dtype)
    keys = case.cache.keys.copy()
    keys[case.cache.table[0, 1], 65:] = chains.POISON[index_dtype][3]
    case = dataclasses.replace(case, cache=Cache(keys, case.cache.table))
    first, again = ranks.decode(case, fused=False), ranks.decode(case, fused=False)
    chains.check_decoded(ranks.plan, case, first, fused=False)
    np.testing.assert_array_equal(first.scores.view(np.int32), again.scores.view(np.int32))
    assert oracle.decode_num_valid_pages([193], 1).tolist() == [2]


# ---- the table of docs/reliability.md ----

# Numbers of the kinds of faults, in the table's first column.
KINDS = list(
    map(
        str,
        [
            *(1, 2, 4, 5, 6, 8, 9, 11, 12, 13, 15, 17, 18, 20, 21, 22, 24, 25, 27, 28, 29, 31, 32),
            *(33, 35, 36, 39, 40, 41, 42, 43, 44, 46, 47, 49, 50, 51, 54, 55, 56, 57, 58, 59, 60),
            *(61, 62, 64, 65, 66, 68, 69, 70, 71, 72, 73, 75, 77, 78, 79, 81, 82, 83, 85, 86, 87),
            *(88, 89, 90, 91, 92, 93, 94, 95, 97, 98, 99, 100, 101, 102, 103),
            *(104, 105, 106, 107, 109, 110, 112, 113),
        ],
    )
)


@functools.cache
def table_rows() -> list[list[str]]:
    text = (ROOT / "docs/reliability.md").read_text()
    rows = [line for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


@functools.cache
def names_of(module: str) -> set[str]:
    """What a test module defines."""
    (path,) = (ROOT / "tests").rglob(f"{module}.py")
    return {n.name for n in ast.walk(ast.parse(path.read_text())) if hasattr(n, "name")}


def test_the_table_has_every_kind_once() -> None:
    assert [row[0] for row in table_rows()] == KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_has_a_way_of_prevention_and_a_test_or_a_reason(kind: str) -> None:
    (row,) = [row for row in table_rows() if row[0] == kind]
    _, fault, prevented, shown = row
    assert fault and prevented
    tests = re.findall(r"`(\w+)::(\w+)`", shown)
    assert tests or shown.startswith("no test: "), shown
    for module, name in tests:
        assert name in names_of(module), f"{module} has no {name}"
