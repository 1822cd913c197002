"""Rounding to float8 on torch tensors: the bytes of the JAX function."""

from __future__ import annotations

import inputs
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra torch)")

import torch_inputs  # noqa: E402, F401 (puts the package on the path)

import msa_icp_jax  # noqa: E402
from msa_icp_torch import msa_icp_quantize_index  # noqa: E402

DTYPES = {
    torch.float16: jnp.float16,
    torch.bfloat16: jnp.bfloat16,
    torch.float32: jnp.float32,
}


def tensor(x: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(x.view(f"u{x.dtype.itemsize}")).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_edge(dtype):
    x = inputs.rounding_edges(DTYPES[dtype])
    found = msa_icp_quantize_index(tensor(x, dtype))
    assert found.dtype == torch.float8_e4m3fn
    codes = found.view(torch.uint8).numpy()
    is_nan = np.isnan(x)
    np.testing.assert_array_equal(codes[~is_nan], oracle.e4m3_round(x[~is_nan]))
    assert ((codes[is_nan] & 0x7F) == 0x7F).all()
    jax_codes = np.asarray(msa_icp_jax.msa_icp_quantize_index(x)).view(np.uint8)
    np.testing.assert_array_equal(codes[~is_nan], jax_codes[~is_nan])


def test_the_argument_is_left_alone():
    x = torch.tensor([[500.0, 1.0], [float("-inf"), 2.0]]).T  # strided
    before = x.clone()
    found = msa_icp_quantize_index(x)
    assert torch.equal(x, before)
    assert found.float().tolist() == [[448.0, -448.0], [1.0, 2.0]]


@pytest.mark.parametrize(
    ("x", "got"),
    [
        (torch.zeros(2, dtype=torch.float64), "torch.float64"),
        (torch.zeros(2, dtype=torch.int32), "torch.int32"),
        (torch.zeros(2, dtype=torch.float8_e4m3fn), "torch.float8_e4m3fn"),
        (np.zeros(2, np.float32), "ndarray"),
    ],
)
def test_anything_else_is_refused(x, got):
    with pytest.raises(TypeError, match=f"float16, bfloat16 or float32 tensor, got {got}"):
        msa_icp_quantize_index(x)
