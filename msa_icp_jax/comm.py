"""Receive storage of the candidate rows, and the two transports that fill it.

One rank's storage holds three slots (a running count of sparse-layer calls mod 3) of rows from
every source rank, in a legacy and a tagged form. The layout is the same, bit for bit, for the
collective transport (`lax.all_to_all` over the icp axis) and for a one-sided one that stores rows
into peers' memory: row (t, h) of source rank r lies on rank ``h // hpr`` at flat row
``((slot W + r) hpr + h % hpr) C + t``.

The one-sided transport is a select that publishes its rows (or `ops._mosaic.publish`, for rows that
are there already) and `ops.merge`'s waiting form. In JAX its storage lies outside XLA's memory
(`peer_storage`), and a comm has the addresses. The two forms of rows differ in what they survive.
A flag says that a row is there, not whose call it belongs to: once a wait has run out (`errors`
grew), a legacy row that comes after all is taken for the next one of its slot, so the ranks must
stop and zero their storage together. A late tagged row carries the generation that was given up,
and is never taken for another.

The collective is the default. One-sided layers inside a program have been checked and timed on two
GPUs of one process; `decode_program` on a mesh has only been compiled for two and four GPUs without
them (three kernels a layer, in order, no copy), and once ended the process while it was loaded on
two. Until it, a process a GPU, long runs with delays and a rank that stops have passed there,
"auto" is for callers who try it.

Pallas has remote references of its own (`plgpu.remote_ref` with semaphores, under `jax.shard_map`).
They are not used: on two H200 an exchange by them takes 29 us a call, twice the collective, since
XLA puts a barrier of all devices in front of every such kernel, and without that barrier
(`skip_device_barrier=True`) the form that was tried hung.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from msa_icp_jax import checks, geometry, peer_storage, rows
from msa_icp_jax.backend import start_at, vary_as
from msa_icp_jax.geometry import NUM_HEADS, NUM_SLOTS, round_up
from msa_icp_jax.typing import ResolvedBackend, ResolvedTransport, Transport

if TYPE_CHECKING:
    from msa_icp_jax.arrays import Array, Int32

COLLECTIVE: Final = "collective"
ONE_SIDED: Final = "one-sided"

_WORD_BYTES = 4
_TAGGED_ALIGNMENT = 16  # bytes
# Two calls' marks, and so their marked flags and tags, are no 50,000 words near each other unless
# they agree in slot, tokens and form, up to 8,192 tokens: a slot moves a mark by a third of all
# int32, tokens and form by multiples of a number whose triple is near the golden section of them.
_SLOT_MARK, _SHAPE_MARK = 0x55555555, 0x34BD2893


def resolve_transport(transport: Transport, backend: ResolvedBackend) -> ResolvedTransport:
    """A plan's transport from what is asked for and its resolved backend.

    Raises:
      TypeError, ValueError: it is none of the three, or needs another backend.
    """
    checks.one_of("transport", transport, get_args(Transport))
    if transport == ONE_SIDED and backend != "mosaic":
        raise ValueError(
            f'transport "{ONE_SIDED}" is of kernels that store by address: it needs the backend '
            f'"mosaic", got "{backend}"'
        )
    if transport != "auto":
        return transport
    reach = backend == "mosaic" and peer_storage.gpus_reach_each_other()
    return ONE_SIDED if reach else COLLECTIVE


class MSAIcpCommLayout(dict[str, Any]):
    """Where the parts of one rank's receive allocation lie; by key or as attributes.

    Attributes:
      storage_words: int32 words of the allocation.
      legacy_offset_bytes: byte offset of the legacy rows, 0.
      legacy_shape: (3, W, hpr, C, 33), int32.
      tagged_offset_bytes: byte offset of the tagged rows, 16-byte aligned.
      tagged_shape: (3, W, hpr, C, 32), int64 (as int32 pairs: one more axis of 2).
      generations_shape: (3, W hpr, C), int32, the publish counters.
      expected_shape: (3, hpr, C), int32, the merge's expected counters.
    """

    storage_words: int
    legacy_offset_bytes: int
    legacy_shape: tuple[int, ...]
    tagged_offset_bytes: int
    tagged_shape: tuple[int, ...]
    generations_shape: tuple[int, ...]
    expected_shape: tuple[int, ...]

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"MSAIcpCommLayout has no field {name!r}") from None


def msa_icp_comm_layout(world_size: int, heads_per_rank: int, capacity: int) -> MSAIcpCommLayout:
    """The layout of one rank's receive storage.

    Args:
      world_size: W, 2 or 4.
      heads_per_rank: hpr = 4 / W.
      capacity: C, tokens of one decode step at most, >= 1.

    Raises:
      TypeError, ValueError: an argument is outside its range.
    """
    world_size = geometry.check_world_size(world_size)
    heads_per_rank = geometry.check_heads_per_rank(world_size, heads_per_rank)
    capacity = checks.integer("capacity", capacity, 1)
    slot_rows = NUM_SLOTS * world_size * heads_per_rank * capacity
    legacy_bytes = slot_rows * rows.ROW_WORDS * _WORD_BYTES
    tagged_offset = round_up(legacy_bytes, _TAGGED_ALIGNMENT)
    tagged_bytes = slot_rows * rows.TAGGED_WORDS * 2 * _WORD_BYTES
    received = (NUM_SLOTS, world_size, heads_per_rank, capacity)
    return MSAIcpCommLayout(
        storage_words=(tagged_offset + tagged_bytes) // _WORD_BYTES,
        legacy_offset_bytes=0,
        legacy_shape=(*received, rows.ROW_WORDS),
        tagged_offset_bytes=tagged_offset,
        tagged_shape=(*received, rows.TAGGED_WORDS),
        generations_shape=(NUM_SLOTS, world_size * heads_per_rank, capacity),
        expected_shape=(NUM_SLOTS, heads_per_rank, capacity),
    )


# In place of the rows of a comm whose rows lie elsewhere.
NO_ROWS = np.zeros(0, np.int32)


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class MSAIcpComm:
    """One rank's receive storage and counters; a pytree, all int32. Donate it with every call.

    Zeroed once; nothing resets it but the recovery from a protocol fault, on all ranks together.

    Attributes:
      recv: [3, W, hpr, C, 33] legacy rows; [0] where they lie at `recv_bases`.
      tagged_recv: [3, W, hpr, C, 32, 2] tagged rows as (word, generation) pairs; likewise.
      recv_bases: [W, 2] device addresses (low, high) of every rank's legacy rows; 0: collective.
      tagged_recv_bases: [W, 2] likewise of the tagged rows.
      publish_generations: [3, 4, C] generation of the row last sent, by head.
      expected_generations: [3, hpr, C] generation of the row last merged.
      errors: [1] protocol faults so far.
    """

    recv: Int32[Array, "3 W hpr C 33"]
    tagged_recv: Int32[Array, "3 W hpr C 32 2"]
    recv_bases: Int32[Array, "W 2"]
    tagged_recv_bases: Int32[Array, "W 2"]
    publish_generations: Int32[Array, "3 4 C"]
    expected_generations: Int32[Array, "3 hpr C"]
    errors: Int32[Array, " 1"]

    def __eq__(self, other: object) -> bool:
        """Whether the fields are the same; an array is so to itself alone."""
        return checks.same_fields(self, other)

    @classmethod
    def zeros(cls, world_size: int, capacity: int) -> MSAIcpComm:
        """Fresh storage of one rank, zeroed.

        Args:
          world_size: W, 2 or 4.
          capacity: C, tokens of one decode step at most, >= 1.

        Raises:
          TypeError, ValueError: an argument is outside its range.
        """
        shapes = comm_shapes(world_size, capacity)
        return cls(**{name: jnp.zeros(shape, jnp.int32) for name, shape in shapes.items()})

    @property
    def is_one_sided(self) -> bool:
        """Whether the rows lie outside these arrays, at the addresses in the bases."""
        return isinstance(self.recv, np.ndarray) and self.recv.shape == NO_ROWS.shape

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], bool]:
        """The arrays, without rows that lie elsewhere.

        A program never gets empty arrays: under shard_map the compiler of jaxlib 0.11.2 crashes on
        one that is handed through.
        """
        names = _FIELDS[2:] if self.is_one_sided else _FIELDS
        keys = [jax.tree_util.GetAttrKey(name) for name in names]
        return list(zip(keys, (getattr(self, name) for name in names), strict=True)), (
            self.is_one_sided
        )

    @classmethod
    def tree_unflatten(
        cls, one_sided: bool, children: Sequence[Int32[Array, "*shape"]]
    ) -> MSAIcpComm:
        """A comm of these arrays, or of what stands in their places."""
        elsewhere: Any = (NO_ROWS, NO_ROWS) if one_sided else ()
        return cls(*elsewhere, *children)


_FIELDS = tuple(field.name for field in dataclasses.fields(MSAIcpComm))


def comm_shapes(
    world_size: int, capacity: int, one_sided: bool = False
) -> dict[str, tuple[int, ...]]:
    """The shape of every array of one rank's MSAIcpComm."""
    layout = msa_icp_comm_layout(world_size, NUM_HEADS // world_size, capacity)
    return {
        "recv": NO_ROWS.shape if one_sided else layout.legacy_shape,
        "tagged_recv": NO_ROWS.shape if one_sided else (*layout.tagged_shape, 2),
        "recv_bases": (world_size, 2),
        "tagged_recv_bases": (world_size, 2),
        "publish_generations": layout.generations_shape,
        "expected_generations": layout.expected_shape,
        "errors": (1,),
    }


def comm_specs(axis_name: str, one_sided: bool = False) -> MSAIcpComm:
    """PartitionSpecs of a global MSAIcpComm over the icp axis, in place of its arrays."""
    by_head: Any = P(None, None, axis_name)
    by_row: Any = P(axis_name)
    counters: Any = P(None, axis_name)
    received: Any = NO_ROWS if one_sided else by_head
    return MSAIcpComm(received, received, by_row, by_row, counters, counters, by_row)


def check_comm(comm: Any, world_size: int, capacity: int, one_sided: bool = False) -> None:
    """Raises, naming the array, unless `comm` is one rank's storage for `capacity` tokens.

    Args:
      comm: what is checked.
      world_size: W.
      capacity: C.
      one_sided: whether its rows must lie elsewhere; else they must not.
    """
    if not isinstance(comm, MSAIcpComm):
        raise TypeError(f"comm must be an MSAIcpComm, got {type(comm).__name__}")
    for name, shape in comm_shapes(world_size, capacity, one_sided).items():
        array = getattr(comm, name)
        checks.array(f"comm.{name}", array, jnp.int32, *shape, origin="as init_comm makes it")


# ---- storage of all ranks of a mesh ----


def place_collective_comm(mesh: Mesh, axis_name: str, world_size: int, capacity: int) -> MSAIcpComm:
    """Zeroed storage of all ranks in JAX's memory."""
    specs = comm_specs(axis_name)
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P)
    )
    shapes = _global_shapes(world_size, capacity, one_sided=False)

    def zeros() -> MSAIcpComm:
        return MSAIcpComm(**{name: jnp.zeros(x, jnp.int32) for name, x in shapes.items()})

    return jax.jit(zeros, out_shardings=shardings)()


def place_one_sided_comm(mesh: Mesh, axis_name: str, world_size: int, capacity: int) -> MSAIcpComm:
    """Zeroed storage of all ranks outside XLA's memory, known by its addresses.

    Raises:
      peer_storage.Unreachable: GPUs of a group do not reach each other's memory.
      peer_storage.DriverError: the memory could not be allocated or opened.
    """
    layout = msa_icp_comm_layout(world_size, NUM_HEADS // world_size, capacity)
    size = layout.storage_words * _WORD_BYTES
    addresses = peer_storage.allocate_for_mesh(mesh, axis_name, size)
    specs = comm_specs(axis_name, one_sided=True)
    local_shapes = comm_shapes(world_size, capacity, one_sided=True)

    def put(name: str, shape: tuple[int, ...]) -> Any:
        if not shape[0]:
            return NO_ROWS
        shards = []
        for device, bases in addresses.items():
            value = np.zeros(local_shapes[name], np.int32)
            if name in _OFFSETS:
                value = address_words([x + getattr(layout, _OFFSETS[name]) for x in bases])
            shards.append(jax.device_put(value, device))
        sharding = NamedSharding(mesh, getattr(specs, name))
        return jax.make_array_from_single_device_arrays(shape, sharding, shards)

    shapes = _global_shapes(world_size, capacity, one_sided=True)
    return MSAIcpComm(**{name: put(name, shape) for name, shape in shapes.items()})


_OFFSETS = {"recv_bases": "legacy_offset_bytes", "tagged_recv_bases": "tagged_offset_bytes"}


def address_words(addresses: Sequence[int]) -> np.ndarray:
    """Device addresses as int32 [..., 2] (low, high)."""
    return np.array(addresses, np.int64).view(np.int32).reshape(-1, 2)


def _global_shapes(world_size: int, capacity: int, one_sided: bool) -> dict[str, tuple[int, ...]]:
    """The shape of every array of all ranks' storage, as `comm_specs` shards it."""
    specs = comm_specs("icp")
    return {
        name: tuple(
            size * world_size if axis < len(spec) and spec[axis] else size
            for axis, size in enumerate(shape)
        )
        for name, shape in comm_shapes(world_size, capacity, one_sided).items()
        for spec in [getattr(specs, name)]
    }


def free_comm(comm: Any) -> None:
    """See `MSAIcpIndexerPlan.free_comm`."""
    if not isinstance(comm, MSAIcpComm):
        raise TypeError(f"comm must be an MSAIcpComm, got {type(comm).__name__}")
    jax.block_until_ready(comm)  # no kernel of ours is still at work in it
    if comm.is_one_sided:
        devices: list[jax.Device] = [*comm.recv_bases.sharding.device_set]
        devices.sort(key=lambda device: device.id)
        own = [_own_address(shard) for shard in comm.recv_bases.addressable_shards]
        for address in own:
            peer_storage.close(address)
        peer_storage.wait_for_all(devices)  # nobody has it open any more
        for address in own:
            peer_storage.free(address)
    for array in jax.tree.leaves(comm):
        array.delete()


def _own_address(shard: jax.Shard) -> int:
    """The address of its own storage in a device's part [W, 2] of the bases."""
    rank = (shard.index[0].start or 0) // shard.data.shape[0]
    own: np.ndarray = np.ascontiguousarray(shard.data)[rank]
    return int(own.view(np.int64)[0])


# ---- the collective ----


def exchange(message: Int32[Array, "W hpr T *row"], axis_name: str) -> Int32[Array, "W hpr T *row"]:
    """Sends [W (destination), hpr, ...] over the icp axis; returns [W (source), hpr, ...]."""
    if message.size == 0:
        return message
    return lax.all_to_all(message, axis_name, split_axis=0, concat_axis=0, tiled=True)


def mark_rows(
    sent: Int32[Array, "W hpr T *row"], slot: int | Int32[Array, ""], sign: int
) -> Int32[Array, "W hpr T *row"]:
    """Adds the call's mark to the flag of legacy rows, the generations of tagged ones.

    A rank that is a call ahead or behind sends rows that look right in every other way. Its slot is
    not ours, so they arrive with a flag, or tags, that the merge reports as a fault. So do rows of
    another number of tokens and of the other form, where the transport lets such messages through.

    `sent` is [W, hpr, T, 33] or [W, hpr, T, 32, 2]; `sign` is 1 before the exchange and -1 behind.
    """
    _, _, tokens, *row = sent.shape
    last = jnp.arange(row[-1], dtype=jnp.int32) == row[-1] - 1
    mark = mark_of(slot, tokens, tagged=len(row) == 2)
    marks = jnp.where(last, jnp.int32(sign) * mark, 0)
    return sent + jnp.broadcast_to(marks, sent.shape)


def mark_of(slot: int | Int32[Array, ""], tokens: int, tagged: bool) -> Any:
    """What is added to flags or tags on their way, an int32; as a Python int where `slot` is one.

    Args:
      slot: of the call, a Python int or a traced int32.
      tokens: its T.
      tagged: the form of its rows.
    """
    shape = (2 * tokens + tagged) * _SHAPE_MARK
    if isinstance(slot, int):
        return _wrapped(slot * _SLOT_MARK + shape)
    return jnp.asarray(slot, jnp.int32) * jnp.int32(_SLOT_MARK) + jnp.int32(_wrapped(shape))


def _wrapped(number: int) -> int:
    """A number as an int32."""
    return (number + 2**31) % 2**32 - 2**31


def store_legacy(
    recv: Int32[Array, "3 W hpr C 33"],
    slot: int | Int32[Array, ""],
    received: Int32[Array, "W hpr T *row"],
) -> Int32[Array, "3 W hpr C 33"]:
    """Stores received rows [W, hpr, T, 33] into slot `slot` of recv [3, W, hpr, C, 33].

    A row may be written only where the flag says that the last one was merged (0). Elsewhere it
    goes in with a flag that the merge reports as a fault, since neither row can be trusted.
    """
    flag = rows.ROW_WORDS - 1
    recv = vary_as(recv, received)
    sizes = (1, *received.shape[:-1], 1)
    merged = lax.dynamic_slice(recv, start_at(slot, 0, 0, 0, flag), sizes)[0] == 0
    flags = jnp.where(merged, received[..., flag:], -rows.READY)
    received = jnp.concatenate([received[..., :flag], flags], axis=-1)
    return lax.dynamic_update_slice(recv, received[None], start_at(slot, 0, 0, 0, 0))


def store_tagged(
    tagged_recv: Int32[Array, "3 W hpr C 32 2"],
    slot: int | Int32[Array, ""],
    received: Int32[Array, "W hpr T *row"],
) -> Int32[Array, "3 W hpr C 32 2"]:
    """Stores received tagged rows [W, hpr, T, 32, 2] into slot `slot` of the storage."""
    tagged_recv = vary_as(tagged_recv, received)
    return lax.dynamic_update_slice(tagged_recv, received[None], start_at(slot, 0, 0, 0, 0, 0))


def store_in_slot(
    comm: MSAIcpComm,
    slot: int | Int32[Array, ""],
    received: Int32[Array, "W hpr T *row"],
    tagged: bool,
) -> MSAIcpComm:
    """The storage with the rows of a collective in one slot."""
    if tagged:
        stored = store_tagged(comm.tagged_recv, slot, received)
        return dataclasses.replace(comm, tagged_recv=stored)
    return dataclasses.replace(comm, recv=store_legacy(comm.recv, slot, received))
