"""The examples of MiniMax-M3's index branch: their formulas against float64, and their answers."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def torch_example() -> ModuleType:
    pytest.importorskip("torch", reason="torch is not installed (extra torch)")
    import torch_inputs  # noqa: F401 (puts the package on the path)

    return example("torch_index_branch")


def vectors(hidden: Any, weight: Any, norm: Any, positions: Any) -> np.ndarray:
    """[T, heads, 128] in float64: project, norm each head, rotate 32 pairs as complex numbers."""
    x = (np.float64(hidden) @ np.float64(weight)).reshape(len(hidden), -1, 128)
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (1 + np.float64(norm))
    turn = np.exp(1j * positions[:, None, None] / 5e6 ** (np.arange(32) / 32))
    rotated = (x[..., :32] + 1j * x[..., 32:64]) * turn
    return np.concatenate([rotated.real, rotated.imag, x[..., 64:]], axis=-1)


def test_the_vectors_are_the_model_s():
    branch = example("index_branch")
    weights, hidden = branch.made_up_layer(np.random.default_rng(1))
    positions = np.array([0, 1, 77, 4095, 8191])
    with jax.default_matmul_precision("highest"):
        q, k = branch.index_vectors(hidden[:5], weights, positions)
    want_q = vectors(hidden[:5], weights.q, weights.q_norm, positions)
    want_k = vectors(hidden[:5], weights.k, weights.k_norm, positions)[:, 0]
    # float32 angles are off by up to 8191 * 2**-24 rotations of the fastest pair.
    np.testing.assert_allclose(q, want_q, rtol=0, atol=5e-3)
    np.testing.assert_allclose(k, want_k, rtol=0, atol=5e-3)
    np.testing.assert_allclose(q[:3], want_q[:3], rtol=0, atol=1e-4)


def test_the_vectors_on_torch_tensors_are_the_model_s():
    branch = torch_example()
    import torch

    torch.manual_seed(1)
    layer, hidden = branch.made_up_layer(torch.device("cpu"))
    positions = torch.tensor([0, 1, 77, 4095, 8191])
    with torch.no_grad():
        q, k = layer(hidden[:5], positions)
        found = {"q": (q, layer.q, layer.q_norm), "k": (k[:, None], layer.k, layer.k_norm)}
        for got, linear, norm in found.values():
            weight = linear.weight.T.numpy()
            want = vectors(hidden[:5].numpy(), weight, norm.numpy(), positions.numpy())
            np.testing.assert_allclose(got.numpy(), want, rtol=0, atol=5e-3)
            np.testing.assert_allclose(got[:3].numpy(), want[:3], rtol=0, atol=1e-4)


@pytest.mark.parametrize("load", [lambda: example("index_branch"), torch_example])
def test_every_head_finds_the_block_that_the_token_asks_for(load, capsys):
    load().main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    for head, line in enumerate(lines):
        shape = rf"head {head}: block 23 found; (\d+) of 16 as without rounding: \[(.*)\]"
        found = re.fullmatch(shape, line)
        assert found is not None, line
        assert int(found[1]) >= 13
        ids = [int(x) for x in found[2].split(",")]
        assert ids == sorted(set(ids))
        assert len(ids) == 16
        assert ids[-1] == 63  # the query's own block
