"""Right and wrong calls for `test_types.py`: mypy must refuse the marked lines, with these codes.

Nothing here is run.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh

import msa_icp_torch
from msa_icp_jax import (
    Backend,
    DecodeProgram,
    MSAIcpComm,
    MSAIcpScorePlan,
    Precision,
    Transport,
    msa_icp_topk_select_publish,
    prepare_msa_icp_indexer,
)

LIMITS: dict[str, Any] = {}
backend: Backend = "mosaic"
precision: Precision = "exact"
transport: Transport = "one-sided"
route: msa_icp_torch.Route = "direct"


def words(mesh: Mesh) -> None:
    plan = prepare_msa_icp_indexer(
        backend=backend,
        precision=precision,
        transport=transport,
        index_dtype="bfloat16",
        **LIMITS,
    )
    plan.decode_program(mesh, decode_query_len=1)
    prepare_msa_icp_indexer(backend="cake", **LIMITS)  # wrong: arg-type
    prepare_msa_icp_indexer(precision="fastest", **LIMITS)  # wrong: arg-type
    prepare_msa_icp_indexer(transport="nccl", **LIMITS)  # wrong: arg-type
    prepare_msa_icp_indexer(index_dtype="float16", **LIMITS)  # wrong: arg-type
    prepare_msa_icp_indexer(batch=32, world_size="2", **LIMITS)  # wrong: arg-type call-arg
    prepare_msa_icp_indexer(8)  # wrong: call-arg
    plan.decode_program(mesh)  # wrong: call-overload
    plan.write_program("icp")  # wrong: arg-type


def words_on_torch(device: str) -> None:
    plan = msa_icp_torch.prepare_msa_icp_indexer(rank=0, device=device, route=route, **LIMITS)
    plan.warmup(prefill=False)
    limits: dict[str, Any] = {"rank": 0, "device": device}
    msa_icp_torch.prepare_msa_icp_indexer(route="cuda", **limits)  # wrong: arg-type
    msa_icp_torch.prepare_msa_icp_indexer(backend="triton", **limits)  # wrong: arg-type
    msa_icp_torch.prepare_msa_icp_indexer(transport="auto", **limits)  # wrong: arg-type


def decode(mesh: Mesh, x: jax.Array, comm: MSAIcpComm) -> None:
    plan = prepare_msa_icp_indexer(**LIMITS)
    program: DecodeProgram = plan.decode_program(mesh, decode_query_len=1)
    output, scores = program(x, x, x, x, x, x, x)
    program.lower(x, x, x, x, x, scores, jax.ShapeDtypeStruct(output.shape, output.dtype))
    program(x, x, x, x, x, x)  # wrong: call-arg
    program(x, x, x, x, x, x, comm)  # wrong: arg-type
    program(x, x, x, x, x, x, output=x)  # wrong: call-arg
    output, scores, comm = program(x, x, x, x, x, x, x)  # wrong: misc
    program(x, x, x, x, x, x, x, comm, 0)  # wrong: call-arg

    with_comm = plan.decode_program(mesh, decode_query_len=1, tagged=True, with_comm=True)
    output, scores, comm = with_comm(x, x, x, x, x, x, x, comm, 0)
    with_comm(x, x, x, x, x, x, x)  # wrong: call-arg
    with_comm(x, x, x, x, x, x, x, 0, comm)  # wrong: arg-type
    with_comm(x, x, x, x, x, x, x, None, 0)  # wrong: arg-type


def prefill(x: jax.Array, window_plan: MSAIcpScorePlan) -> None:
    program = prepare_msa_icp_indexer(**LIMITS).prefill_program()
    output, carrier, scratch = program(x, x, x, window_plan, x, x, x, x)
    output, carrier, nothing = program(x, x, x, window_plan, None, x, carrier, output)
    scratch.block_until_ready()
    nothing.block_until_ready()  # wrong: attr-defined
    program(x, x, x, x, x, x, x, x)  # wrong: arg-type
    program(x, x, x, window_plan, x, x, x)  # wrong: call-arg


def write(x: jax.Array) -> None:
    index_k = prepare_msa_icp_indexer(**LIMITS).write_program()(x, x, x)
    index_k.block_until_ready()
    prepare_msa_icp_indexer(**LIMITS).write_program()(x, x)  # wrong: call-arg
    (_one,) = prepare_msa_icp_indexer(**LIMITS).write_program()(x, x, x, x)  # wrong: call-arg


def select(x: jax.Array) -> None:
    sizes: dict[str, Any] = {}
    sent, counters = msa_icp_topk_select_publish(x, x, rank=0, **sizes)
    sent.block_until_ready()
    counters.block_until_ready()  # wrong: union-attr
    msa_icp_topk_select_publish(x, x, rank=0, backend="cuda", **sizes)  # wrong: arg-type
