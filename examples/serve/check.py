"""What the example proves about its servers, and how it is measured."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from serve.model import BLOCK, HEADS, Config, Params, dot, mlp, project_qkv, rms_norm
from serve.server import Request

DENSE_BLOCKS = 16  # up to here every block is chosen, so sparse and dense attention are the same
_PAD = 512  # lengths are padded to multiples of it, so that few shapes compile


@functools.partial(jax.jit, static_argnums=0)
def dense_greedy(config: Config, params: Params, tokens: jax.Array) -> jax.Array:
    """Next tokens int32 [n] after every prefix of `tokens` [n]: plain causal attention.

    No cache, no pages, no indexer; what the served model must equal on short contexts.
    """
    positions = jnp.arange(tokens.shape[0])
    causal = positions[None] <= positions[:, None]

    def layer_step(x: jax.Array, layer: Params) -> Any:
        q, k, v = project_qkv(rms_norm(x), layer, config, params["rope"], positions)
        q = q.reshape(-1, HEADS, config.group, config.head_dim)
        scores = jnp.einsum("qhgd,khd->hgqk", q, k, precision=lax.Precision.HIGHEST)
        weight = jax.nn.softmax(jnp.where(causal, scores * config.head_dim**-0.5, -jnp.inf))
        mixed = jnp.einsum("hgqk,khd->qhgd", weight, v, precision=lax.Precision.HIGHEST)
        x = x + dot(mixed.reshape(x.shape[0], -1), layer["o"])
        return x + mlp(x, layer), None

    x, _ = lax.scan(layer_step, params["embed"][tokens], params["layers"])
    return jnp.argmax(dot(rms_norm(x), params["unembed"]), axis=-1).astype(jnp.int32)


def differs_from_dense(config: Config, params: Params, request: Request) -> int:
    """Answer tokens that are not what the dense model says after the tokens before them."""
    text = np.concatenate([request.prompt, np.array(request.answer, np.int32)])
    padded = np.zeros(-(-len(text) // _PAD) * _PAD, np.int32)
    padded[: len(text)] = text
    said = np.asarray(dense_greedy(config, params, padded))
    return int(np.count_nonzero(said[len(request.prompt) - 1 : len(text) - 1] != request.answer))


def blocks(request: Request) -> int:
    """Blocks of the context that the last answer token was computed from."""
    return -(-(len(request.prompt) + len(request.answer) - 1) // BLOCK)


def same_answers(one: Sequence[Request], other: Sequence[Request]) -> bool:
    return len(one) == len(other) and all(
        np.array_equal(a.prompt, b.prompt) and a.answer == b.answer
        for a, b in zip(one, other, strict=True)
    )


@contextlib.contextmanager
def counting_compilations() -> Iterator[list[str]]:
    """Collects one entry for every program that JAX compiles meanwhile, in any thread."""
    seen: list[str] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if event.endswith("backend_compile_duration"):
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def live_bytes() -> int:
    """Bytes of all arrays that this process holds on its devices."""
    return sum(array.nbytes for array in jax.live_arrays())


def resident_bytes() -> int:
    """The process's memory in use; 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
