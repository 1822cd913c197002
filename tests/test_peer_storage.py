"""Receive storage outside XLA's memory: whose it is, who reaches it, what is refused."""

from __future__ import annotations

from typing import Any

import fake_cuda
import jax
import numpy as np
import pytest
from chains import AXIS, make_mesh
from jax.sharding import AxisType, Mesh

from msa_icp_jax import peer_storage
from msa_icp_jax.comm import free_comm, msa_icp_comm_layout, place_one_sided_comm

BLOCK = 2 << 20


def bases_of(array: jax.Array) -> dict[jax.Device, list[int]]:
    """Every device's addresses of its group's storage, by rank."""
    words = {s.device: np.ascontiguousarray(s.data) for s in array.addressable_shards}
    return {device: x.view(np.int64)[:, 0].tolist() for device, x in words.items()}


@pytest.mark.parametrize("world_size", [2, 4])
def test_every_rank_has_storage_on_its_gpu_and_knows_all(monkeypatch, world_size):
    library = fake_cuda.install(monkeypatch)
    mesh, heads = make_mesh(world_size), 4 // world_size
    comm = place_one_sided_comm(mesh, AXIS, world_size, 5)
    layout = msa_icp_comm_layout(world_size, heads, 5)
    contexts = {address: context for address, (context, _) in library.live.items()}
    for device, addresses in bases_of(comm.recv_bases).items():
        assert [contexts[x] for x in addresses] == [100 + i for i in range(world_size)]
        tagged = bases_of(comm.tagged_recv_bases)[device]
        assert tagged == [x + layout.tagged_offset_bytes for x in addresses]
    assert {size for _, size in library.live.values()} == {BLOCK}
    assert all(not np.asarray(x).any() for x in (comm.publish_generations, comm.errors))
    assert comm.recv.shape == (0,)
    pairs = {(100 + a, 100 + b) for a in range(world_size) for b in range(world_size) if a != b}
    assert library.enabled == pairs
    free_comm(comm)
    assert not library.live
    with pytest.raises(RuntimeError, match="deleted"):
        free_comm(comm)


def test_a_group_for_each_row_of_a_larger_mesh(monkeypatch):
    library = fake_cuda.install(monkeypatch, reaches=lambda a, b: a % 2 == b % 2)
    devices = np.array(jax.devices("cpu")[:4]).reshape(2, 2)
    auto = (AxisType.Auto,) * 2
    comm = place_one_sided_comm(Mesh(devices, (AXIS, "data"), axis_types=auto), AXIS, 2, 5)
    found = bases_of(comm.recv_bases)
    for group in devices.T:
        assert found[group[0]] == found[group[1]]
        contexts = [library.live[address][0] for address in found[group[0]]]
        assert contexts == [100 + device.local_hardware_id for device in group]
    assert len({x for addresses in found.values() for x in addresses}) == 4
    free_comm(comm)
    assert not library.live


def test_storage_of_several_plans_lives_side_by_side(monkeypatch):
    library = fake_cuda.install(monkeypatch)
    first, second = (place_one_sided_comm(make_mesh(2), AXIS, 2, n) for n in (5, 7000))
    assert len(library.live) == 4 and max(size for _, size in library.live.values()) > BLOCK
    free_comm(first)
    left = {x for addresses in bases_of(second.recv_bases).values() for x in addresses}
    assert set(library.live) == left
    free_comm(second)


def test_gpus_that_do_not_reach_each_other_are_refused(monkeypatch):
    library = fake_cuda.install(monkeypatch, reaches=lambda a, b: b != 1)
    with pytest.raises(peer_storage.Unreachable, match=r"cpu:0 cannot access .* cpu:1.*collective"):
        place_one_sided_comm(make_mesh(2), AXIS, 2, 5)
    assert not library.live


def test_what_was_allocated_is_freed_when_the_rest_fails(monkeypatch):
    library = fake_cuda.install(monkeypatch, allocations=3)
    with pytest.raises(peer_storage.DriverError, match=r"cuMemAlloc.*error 2 \(ERROR_2\)"):
        place_one_sided_comm(make_mesh(4), AXIS, 4, 5)
    assert not library.live


def test_without_a_driver(monkeypatch):
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(peer_storage.ctypes, "CDLL", missing)
    peer_storage.driver.cache_clear()
    with pytest.raises(peer_storage.Unreachable, match=r"needs the CUDA driver: libcuda"):
        place_one_sided_comm(make_mesh(2), AXIS, 2, 5)
    assert not peer_storage.gpus_reach_each_other()


@pytest.mark.parametrize(
    ("facts", "want"),
    [
        ({}, True),
        ({"devices": 1}, False),
        ({"devices": 2, "reaches": lambda a, b: (a, b) != (1, 0)}, False),
    ],
)
def test_whether_the_gpus_reach_each_other(monkeypatch, facts, want):
    fake_cuda.install(monkeypatch, **facts)
    assert peer_storage.gpus_reach_each_other() is want


def test_memory_is_freed_once(monkeypatch):
    fake_cuda.install(monkeypatch)
    (address,) = peer_storage.allocate(jax.devices("cpu")[:1], 100)
    peer_storage.free(address)
    with pytest.raises(ValueError, match=f"no receive storage at address {address:#x}"):
        peer_storage.free(address)


def test_one_gpu_may_hold_several_ranks(monkeypatch):
    library = fake_cuda.install(monkeypatch)
    addresses = peer_storage.allocate([jax.devices("cpu")[2]] * 4, 100)
    assert {library.live[x][0] for x in addresses} == {102} and len(library.live) == 4
    assert not library.enabled
