"""The command line: serve one stream of requests on 2 ranks, 4 ranks and the dense reference.

Then all answers are compared, those of short contexts also with a plain dense-attention model.
Where there are too few devices (a single GPU), all ranks run on one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from serve import aot, check
from serve.model import Config, Params, init_params
from serve.server import LAG, Request, Server
from serve.workload import Workload

MAX_RANKS = 4
UNUSABLE = 2  # exit status: nothing was compared
SERVERS = {"2 ranks": 2, "4 ranks": 4, "reference": None}


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    config = Config(page_size=options.page_size)
    params = init_params(config)
    mesh_of = no_mesh if options.one_device else device_mesh
    if options.load or options.export:
        try:
            if options.load:
                result = aot.load(options.load, device_mesh)
            else:
                result = aot.save(config, params, mesh_of(aot.WORLD_SIZE), options.export)
        except (aot.Unloadable, aot.Unsavable) as error:
            print(f"serve.py: {error}", file=sys.stderr)
            return UNUSABLE
    else:
        runs = {
            name: serve(
                make_server(config, params, world_size, mesh_of, options.transport),
                Workload(config, options.seed),
                options.steps,
                progress=None if options.quiet else name,
            )
            for name, world_size in SERVERS.items()
        }
        if not any(request.answer for run in runs.values() for request in run.requests):
            print(f"serve.py: {options.steps} steps made no token yet: take more", file=sys.stderr)
            return UNUSABLE
        result = verdict(config, params, runs)
    print(json.dumps(result, indent=1) if options.json else as_text(result))
    return 0 if result.get("identical", True) else 1


def make_server(
    config: Config,
    params: Params,
    world_size: int | None,
    mesh_of: Callable[[int], Mesh | None],
    transport: str,
) -> Server:
    """A server on its devices; only ranks with devices of their own can exchange one-sidedly."""
    mesh = mesh_of(world_size) if world_size else None
    transport = transport if mesh is not None else "collective"
    return Server(config, params, world_size, mesh, transport=transport)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--steps", type=step_count, default=200, help="steps of each server (200)")
    add("--seed", type=seed, default=1, help="of the request stream (1)")
    add("--page-size", type=int, default=128, choices=(128, 256), help="tokens of a page (128)")
    add("--one-device", action="store_true", help="run all ranks on one device")
    add(
        "--transport",
        default="collective",
        choices=("collective", "one-sided", "auto"),
        help="of decode, where every rank has a GPU (collective)",
    )
    add("--json", action="store_true", help="print the result as JSON")
    add("--quiet", action="store_true", help="no progress line")
    ahead_of_time = parser.add_mutually_exclusive_group()
    ahead_of_time.add_argument(
        "--export",
        type=Path,
        metavar="DIR",
        help="save the decode step for CPU and CUDA, and stop; needs flatbuffers",
    )
    ahead_of_time.add_argument(
        "--load",
        type=Path,
        metavar="DIR",
        help="run the decode step saved there as it was exported, and stop; needs flatbuffers",
    )
    return parser.parse_args(arguments)


def step_count(text: str) -> int:
    """More than are on their way at a time, so that there is something to read and measure."""
    if int(text) <= LAG + 1:
        raise argparse.ArgumentTypeError(f"must be more than {LAG + 1}, got {text}")
    return int(text)


def seed(text: str) -> int:
    """numpy's generators take any int that is not negative."""
    if int(text) < 0:
        raise argparse.ArgumentTypeError(f"must be at least 0, got {text}")
    return int(text)


def device_mesh(world_size: int) -> Mesh | None:
    """A mesh of that many devices, or None where there are fewer."""
    devices = jax.devices()
    if len(devices) < world_size:
        return None
    return Mesh(np.array(devices[:world_size]), ("icp",))


def no_mesh(world_size: int) -> None:
    """All ranks on one device, whatever there is."""


class Run(NamedTuple):
    """What one server made of the stream."""

    requests: list[Request]
    facts: dict[str, Any]


def serve(server: Server, workload: Workload, steps: int, progress: str | None = None) -> Run:
    """Warms up, runs the loop, and measures it from then on."""
    server.warm_up()
    requests: list[Request] = []
    tokens, began, resident = 0, time.perf_counter(), 0
    memory: list[int] = []
    with check.counting_compilations() as compiled:
        for step in range(steps):
            for request in workload.arriving(step):
                requests.append(request)
                server.submit(request)
            tokens += server.run_step()
            if step > LAG:  # from then on as many reports are on their way as ever
                memory.append(check.live_bytes())
            if step == steps // 4:
                resident = check.resident_bytes()
            if progress:
                show(progress, server, f"{step + 1}/{steps}", tokens, time.perf_counter() - began)
        tokens += server.drain()
        seconds = time.perf_counter() - began
    if progress:
        print(file=sys.stderr)
    return Run(
        requests,
        {
            "backend": server.backend,
            "devices": server.devices,
            "tokens_per_s": round(tokens / seconds, 1),
            "drafts_accepted": server.drafts_accepted,
            "recompilations": len(compiled),
            "device_bytes": max(memory),
            "device_growth_bytes": max(memory) - min(memory),
            "resident_growth_bytes": check.resident_bytes() - resident,
        },
    )


def verdict(config: Config, params: Params, runs: dict[str, Run]) -> dict[str, Any]:
    """Compares the answers; this is what --json prints."""
    answered, *others = ([r for r in run.requests if r.answer] for run in runs.values())
    same = all(check.same_answers(answered, other) for other in others)
    short = [r for r in answered if check.blocks(r) <= check.DENSE_BLOCKS]
    long = [r for r in answered if check.blocks(r) > check.DENSE_BLOCKS]
    wrong, sparse = (
        sum(check.differs_from_dense(config, params, request) for request in requests)
        for requests in (short, long)
    )
    facts = {name: run.facts for name, run in runs.items()}
    return {
        "identical": bool(answered) and same and wrong == 0,
        "recompilations": sum(fact["recompilations"] for fact in facts.values()),
        "memory_flat": all(fact["device_growth_bytes"] == 0 for fact in facts.values()),
        "requests": len(answered),
        "tokens": sum(len(request.answer) for request in answered),
        "tokens_equal_to_dense_attention": sum(len(r.answer) for r in short) - wrong,
        "tokens_past_16_blocks": sum(len(request.answer) for request in long),
        "of_these_dense_attention_would_change": sparse,
        "most_blocks": max((check.blocks(request) for request in answered), default=0),
        "prompt_tokens_reused": sum(request.reused for request in answered),
        "servers": facts,
    }


def show(name: str, server: Server, step: str, tokens: int, seconds: float) -> None:
    """The live line on stderr."""
    prefilling = sum(request.prefilling for request in server.running)
    print(
        f"\r{name}: step {step}  {len(server.running) - prefilling} decoding  "
        f"{prefilling} prefilling  {len(server.waiting)} waiting  {tokens} tokens  "
        f"{tokens / seconds:.0f} tokens/s ",
        end="",
        file=sys.stderr,
        flush=True,
    )


def as_text(result: dict[str, Any]) -> str:
    return "\n".join(f"{key}: {value}" for key, value in result.items())
