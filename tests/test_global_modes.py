"""No test leaves a global mode of JAX or torch changed for those behind it."""

from __future__ import annotations

import global_modes
import jax
import pytest


def test_a_mode_left_changed_is_put_back_and_named():
    before = jax.config.jax_enable_x64
    with pytest.raises(AssertionError, match="left changed: jax_enable_x64"), global_modes.kept():
        jax.config.update("jax_enable_x64", not before)
    assert jax.config.jax_enable_x64 == before


def test_modes_of_torch_count_too():
    torch = pytest.importorskip("torch", reason="torch is not installed (extra torch)")
    with pytest.raises(AssertionError, match="left changed: torch gradients"), global_modes.kept():
        torch.set_grad_enabled(False)
    assert torch.is_grad_enabled()


def test_a_body_that_raises_says_what_it_raised():
    before = jax.config.jax_debug_nans

    def fail() -> None:
        jax.config.update("jax_debug_nans", not before)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), global_modes.kept():
        fail()
    assert jax.config.jax_debug_nans == before


def test_a_mode_in_force_for_a_while_is_no_change():
    with global_modes.kept(), jax.enable_x64(True), jax.debug_nans(True):
        assert jax.numpy.arange(2).dtype == "int64"
