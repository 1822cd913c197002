"""One process of test_multiprocess.py: one rank with one CPU device, the others elsewhere.

Usage: python multiprocess_worker.py COORDINATOR WORLD_SIZE RANK [late|dies]
Every process makes the same inputs, hands its own part to JAX, and checks its own heads' answers.
Rank 1 may be late for every decode step by some seconds, or die before the second one.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from typing import Any

import fake_cuda
import jax
import numpy as np
import pytest
from chains import (
    ALL,
    AXIS,
    CARRIER,
    INDEX_K,
    OLD_SCORE,
    OLD_WORD,
    OUTPUT,
    SCORES,
    make_plan,
    random_decode,
    random_prefill,
)
from inputs import TIME_LIMIT
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from msa_icp_jax import MSAIcpComm, MSAIcpIndexerPlan, peer_storage
from msa_icp_jax.comm import comm_shapes, free_comm, place_one_sided_comm

LATE = 3  # seconds
# Of a rank that is to die: long for one that lives on a busy machine, short for one that waits.
HEARTBEAT_LIMIT = 30
DIED = 77  # exit status


def main(coordinator: str, world_size: int, rank: int, fate: str = "") -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator,
        world_size,
        rank,
        initialization_timeout=TIME_LIMIT,
        heartbeat_timeout_seconds=HEARTBEAT_LIMIT if fate == "dies" else TIME_LIMIT,
    )
    assert jax.process_count() == world_size and len(jax.local_devices()) == 1
    process = Process(rank, make_plan(world_size, 256, max_model_len=8192))
    process.decode(fate if rank == 1 else "")
    process.prefill()
    process.write()
    one_sided_storage(process)
    print(f"rank {rank} of {world_size}: right")


def one_sided_storage(process: Process) -> None:
    """Every rank's storage is opened by all others and closed before it is freed; or all refuse."""
    for opens in (True, False):
        library = fake_cuda.FakeCuda(devices=8, opens=opens or process.rank != 1)
        driver = peer_storage.Driver(library)
        peer_storage.driver = functools.partial(lambda x: x, driver)
        make = functools.partial(place_one_sided_comm, process.mesh, AXIS)
        world_size = process.geometry.world_size
        if not opens:
            said = "cannot open" if process.rank == 1 else r"processes \[1\] could not"
            with pytest.raises(peer_storage.Unreachable, match=said):
                make(world_size, 5)
        else:
            comm = make(world_size, 5)
            found = process.own(comm.recv_bases).view(np.int64)[:, 0].tolist()
            assert found[process.rank] in library.live
            others = {address for r, address in enumerate(found) if r != process.rank}
            assert others == library.opened and len(others) == world_size - 1
            free_comm(comm)
        assert not library.live and not library.opened


class Process:
    """This process's rank of the plan, on a mesh over all processes."""

    def __init__(self, rank: int, plan: MSAIcpIndexerPlan) -> None:
        self.rank, self.plan, self.geometry = rank, plan, plan.geometry
        self.mesh: Mesh = jax.make_mesh(
            (self.geometry.world_size,), (AXIS,), axis_types=(AxisType.Auto,)
        )
        assert self.mesh.devices[rank] == jax.local_devices()[0]

    def put(self, local: Any, spec: PartitionSpec = ALL) -> jax.Array:
        """A global array from this process's part of it (all of it where it is replicated)."""
        sharding = NamedSharding(self.mesh, spec)
        return jax.make_array_from_process_local_data(sharding, np.asarray(local))

    def own(self, array: jax.Array) -> np.ndarray:
        (shard,) = array.addressable_shards
        return np.asarray(shard.data)

    def float8(self, codes: np.ndarray, spec: PartitionSpec = ALL) -> jax.Array:
        return self.put(codes.view(jax.numpy.float8_e4m3fn), spec)

    def keys(self, cache: np.ndarray) -> jax.Array:
        """This rank's rows of every page, and no other's."""
        rows = self.geometry.rows_per_page
        mine = cache[:, self.rank * rows : (self.rank + 1) * rows]
        return self.float8(np.ascontiguousarray(mine), INDEX_K)

    def scores(self, tokens: int) -> jax.Array:
        shape = (tokens, 4, self.geometry.score_columns)
        return self.put(np.full(shape, OLD_SCORE, np.float32), SCORES)

    def output(self, tokens: int) -> jax.Array:
        shape = (tokens, self.geometry.heads_per_rank, 16)
        return self.put(np.full(shape, OLD_WORD, np.int32), OUTPUT)

    def check(self, output: jax.Array, answer: np.ndarray) -> None:
        heads = self.geometry.heads_per_rank
        mine = answer[:, self.rank * heads : (self.rank + 1) * heads]
        np.testing.assert_array_equal(self.own(output), mine)

    def decode(self, fate: str) -> None:
        """Three slots of tagged rows, and one step without storage."""
        shapes = comm_shapes(self.geometry.world_size, self.geometry.max_decode_tokens)
        specs = self.plan.comm_specs()
        comm = MSAIcpComm(
            **{k: self.put(np.zeros(v, np.int32), getattr(specs, k)) for k, v in shapes.items()}
        )
        with_comm = self.plan.decode_program(
            self.mesh, decode_query_len=2, with_comm=True, tagged=True
        )
        for slot, lengths in enumerate([[4500, 0, 700], [193, 2049, 5000], [1, 4096, 0]]):
            case = random_decode(lengths, 2, 256, seed=slot)
            tokens = len(case.query)

            def arguments(case: Any = case, tokens: int = tokens) -> list[jax.Array]:
                return [
                    self.float8(case.query),
                    self.keys(case.cache.keys),
                    self.put(case.cache.table),
                    self.put(case.seq_lens),
                    self.put(case.counts),
                    self.scores(tokens),
                    self.output(tokens),
                ]

            answer = case.answer(self.plan)
            if fate == "late":
                time.sleep(LATE)
            if fate == "dies" and slot == 1:
                os._exit(DIED)
            output, _, comm = with_comm(*arguments(), comm, self.put(np.int32(slot)))
            self.check(output, answer)
            print(f"step {slot} right", flush=True)
        output, _ = self.plan.decode_program(self.mesh, decode_query_len=2)(*arguments())
        self.check(output, answer)
        assert self.own(comm.errors).tolist() == [0]

    def prefill(self) -> None:
        segments = [(60, 3000, 3060), (0, 0, 0), (30, 0, 30)]
        case = random_prefill(segments, 96, 256)
        lengths = [self.put(x) for x in (case.qo_lens, case.kv_lens, case.qo_offset)]
        bounds = {"total_q": 96, "max_query_len": 96, "max_seq_len": 8192}
        window_plan = jax.jit(self.plan.prefill_window_plan, static_argnames=tuple(bounds))(
            *lengths, **bounds
        )
        output, _, _ = self.plan.prefill_program(self.mesh)(
            self.float8(case.query),
            self.keys(case.cache.keys),
            self.put(case.cache.table),
            window_plan,
            self.scores(96),
            self.put(case.counts),
            self.put(np.full((4, 96, 33), OLD_WORD, np.int32), CARRIER),
            self.output(96),
        )
        self.check(output, case.answer(self.plan))

    def write(self) -> None:
        """Each process stores the rows it owns, without a word to the others."""
        case = random_decode([700], 1, 256, pages=4)
        new = np.full((256, 128), 0x38, np.uint8)  # page 2 becomes all ones
        slots = self.put(np.arange(512, 768, dtype=np.int32))
        index_k = self.keys(case.cache.keys)
        index_k = self.plan.write_program(self.mesh)(index_k, self.float8(new), slots)
        rows = self.geometry.rows_per_page
        want = case.cache.keys[:, self.rank * rows : (self.rank + 1) * rows].copy()
        want[2] = 0x38
        np.testing.assert_array_equal(self.own(index_k).view(np.uint8), want)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
