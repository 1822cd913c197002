"""Global modes of JAX and torch: what they are, and that a test leaves them as they were."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax


class Mode(NamedTuple):
    get: Callable[[], Any]
    put: Callable[[Any], Any]


def _torch_modes() -> dict[str, Mode]:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda"):  # not imported (wholly)
        return {}
    modes = {
        "dtype": Mode(torch.get_default_dtype, torch.set_default_dtype),
        "gradients": Mode(torch.is_grad_enabled, torch.set_grad_enabled),
        "threads": Mode(torch.get_num_threads, torch.set_num_threads),
        "determinism": Mode(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    }
    if torch.cuda.is_initialized():
        modes["waits"] = Mode(torch.cuda.get_sync_debug_mode, torch.cuda.set_sync_debug_mode)
        modes["GPU"] = Mode(torch.cuda.current_device, torch.cuda.set_device)
    return {f"torch {name}": mode for name, mode in modes.items()}


def _jax_modes() -> dict[str, Mode]:
    def mode(name: str) -> Mode:
        return Mode(lambda: jax.config.values[name], lambda x: jax.config.update(name, x))

    return {name: mode(name) for name in jax.config.values}


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Puts back what the body changes, however it ends; raises where it does not do so itself."""
    before = dict(jax.config.values) | {k: mode.get() for k, mode in _torch_modes().items()}
    try:
        yield
    finally:
        modes = _jax_modes() | _torch_modes()
        now = {name: modes[name].get() for name in before}
        changed = [name for name, value in before.items() if now[name] != value]
        for name in changed:
            modes[name].put(before[name])
    assert not changed, f"left changed: {', '.join(changed)}"
