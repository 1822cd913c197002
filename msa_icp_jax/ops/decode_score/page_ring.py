"""The way of key pages from a paged cache into shared memory: a ring of slots for every warp.

A step is four pages, one a warp. Each warp has its own ring of `stages` slots and its own barriers,
so warps never wait for each other: a warp copies its page of a later step as soon as it is done
with a slot.

A page arrives by two bulk copies, its first half of rows at the slot's start and its second half
64 bytes further on than it would lie anyway. Fragments of a matrix product take rows of both halves
in turn; rows are 128 bytes long, or 256, so without the shift the 16-byte reads of two rows would
meet in the same memory banks. Plain addresses, formed in 64 bits from checked page ids, need no
tensor map: any page pitch in whole rows and any cache size will do.

Before an earlier kernel has ended (programmatic dependent launch) nothing may be read for its
value. `prefetch` reads the table all the same, as a hint: it asks the second-level cache for the
pages that will probably be wanted first. Once it has ended, `copy_first` copies them without
waiting for anything but their ids.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith, llvm

from msa_icp_jax.geometry import HEAD_DIM
from msa_icp_jax.ops._mosaic import lanes
from msa_icp_jax.ops._mosaic.lanes import Context, Lane, Memory, Value, Words, int32, when, where
from msa_icp_jax.ops._mosaic.launch import ScratchTypes
from msa_icp_jax.ops.decode_score.work_balance import (
    PER_THREAD,
    STEP_PAGES,
    WARP,
    Batch,
    Work,
)

SEGMENT_STEPS = 32  # steps whose page ids are held at a time
SEGMENT_PAGES = SEGMENT_STEPS * STEP_PAGES
KEPT_IDS = 2 * SEGMENT_PAGES  # of this segment and the next, in a circle
HALF_SHIFT = 64  # bytes between the end of a slot's first half and the start of its second
_SCALAR = plgpu.Layout.WG_SPLAT
_KEEP_SHORTLY = 0x12F0000000000000  # cache policy: evict first, a key is read once


@dataclasses.dataclass(frozen=True)
class PageRing:
    """The rings of a CTA.

    Attributes:
      batch: the decode batch.
      width: page ids in a row of the block table.
      pages: pages of the cache.
      pitch: rows from one page to the next.
      row_offset: first key row inside a page.
      rows: key rows of a page, a multiple of 32.
      dtype: of the keys, float8_e4m3fn or bfloat16.
      stages: slots of a warp.
    """

    batch: Batch
    width: int
    pages: int
    pitch: int
    row_offset: int
    rows: int
    dtype: np.dtype[Any]
    stages: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a key row."""
        return HEAD_DIM * self.dtype.itemsize

    @property
    def half_bytes(self) -> int:
        """Bytes of half a page."""
        return self.rows // 2 * self.row_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes from one slot to the next: all halves of a kind start at the same bank."""
        return 2 * (self.half_bytes + HALF_SHIFT)

    def scratch(self) -> ScratchTypes:
        """Shared memory: `slots`, `arrived` (barriers) and `page_ids`, the ids of 64 steps."""
        return {
            "slots": plgpu.SMEM((STEP_PAGES * self.stages * self.slot_bytes,), jnp.uint8),
            "arrived": plgpu.SMEM((STEP_PAGES * self.stages * 2,), jnp.int32),
            "page_ids": plgpu.SMEM((KEPT_IDS,), jnp.int32),
        }

    def start(self, arrived: jax.Ref) -> None:
        """Makes the barriers ready; once, before anything else."""
        _start(arrived, self)

    def read_ids(self, table: jax.Ref, work: Work) -> jax.Array:
        """Ids of the next pages of the work's first request, -1 where no key is visible.

        int32 [128], entry j for page ``4 work.first + j``. Nothing is read past the request's
        pages or the table's row; an id outside the cache counts as invisible.
        """
        return _read_ids(table, work, self)

    def prefetch(
        self, keys: jax.Ref, query: jax.Ref, ids: jax.Array, work: Work, rows: int, steps: jax.Array
    ) -> None:
        """Asks the second-level cache for the pages of `steps` steps and the `rows` query rows."""
        _prefetch(keys, query, ids, work, rows, steps, self)

    def keep_ids(self, page_ids: jax.Ref, ids: jax.Array, count: jax.Array) -> None:
        """Keeps what `read_ids` returned for the CTA's steps from number `count` on.

        A barrier has to follow. Steps are numbered from 0; ids are overwritten 64 steps later.
        """
        _keep_ids(page_ids, ids, count)

    def read_first(self, table: jax.Ref, work: Work, steps: jax.Array) -> jax.Array:
        """Starts to read the ids of the first `steps` steps for `copy_first`."""
        return _read_first(table, work, steps, self)

    def copy_first(
        self, keys: jax.Ref, scratch: dict[str, jax.Ref], first: jax.Array, steps: jax.Array
    ) -> jax.Array:
        """Starts the copies of steps 0 upwards by what `read_first` returned.

        Returns how many steps are under way.
        """
        _copy_first(keys, scratch, first, steps, self)
        return steps

    def drop_first(self, arrived: jax.Ref, steps: jax.Array) -> None:
        """Waits for the `steps` steps that `copy_first` started in this warp; all is as before."""
        _drop_first(arrived, steps, self)

    def copy(self, keys: jax.Ref, scratch: dict[str, jax.Ref], count: jax.Array) -> None:
        """Starts the copies of step `count`; the pages of step ``count - stages`` are done with."""
        _copy(keys, scratch, count, self)


def _start(arrived: jax.Ref, ring: PageRing) -> None:
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def start(_: Context, arrived: Memory) -> None:
        with when((lanes.thread() & (WARP - 1)).eq(0)):
            _make_barriers(arrived, ring)

    start(arrived)


def _make_barriers(arrived: Memory, ring: PageRing) -> None:
    """One thread's code: makes its warp's barriers."""
    for stage in range(ring.stages):
        lanes.ptx("mbarrier.init.shared.b64 [$0], 1;", barrier_of_warp(arrived, ring, stage))
    lanes.ptx("fence.mbarrier_init.release.cluster;")


def _read_ids(table: jax.Ref, work: Work, ring: PageRing) -> jax.Array:
    result = plgpu.ShapeDtypeStruct((SEGMENT_PAGES,), np.dtype(np.int32), PER_THREAD)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[_SCALAR] * 4), return_type=result)
    def read(_: Context, table: Memory, *work: Value) -> Value:
        request, length, first, steps = (lanes.scalar(x) for x in work)
        page = first * STEP_PAGES + lanes.thread()
        page_id = page_id_at(table, request, length, page, steps > 0, ring)
        return lanes.as_array([page_id], PER_THREAD)

    return read(table, *work)


def _prefetch(
    keys: jax.Ref,
    query: jax.Ref,
    ids: jax.Array,
    work: Work,
    rows: int,
    ahead: jax.Array,
    ring: PageRing,
) -> None:
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), PER_THREAD, *[_SCALAR] * 3))
    def prefetch(_: Context, keys: Memory, query: Memory, ids: Value, *scalars: Value) -> None:
        request, steps, ahead = (lanes.scalar(x) for x in scalars)
        (page_id,), thread = lanes.of_array(ids), lanes.thread()
        with when((thread < ahead * STEP_PAGES) & (page_id >= 0)):
            lanes.ptx(
                "cp.async.bulk.prefetch.L2.global.L2::cache_hint [$0], $1, $2;",
                page_address(keys, page_id, ring),
                int32(2 * ring.half_bytes),
                lanes.constant(_KEEP_SHORTLY, lanes.i64()),
            )
        with when((thread < rows) & (steps > 0)):
            row = Words.of(query) + (request * rows + thread) * (ring.row_bytes // 4)
            lanes.ptx("prefetch.global.L2 [$0];", Lane(row.pointer))

    prefetch(keys, query, ids, work.request, work.steps, ahead)


def _keep_ids(page_ids: jax.Ref, ids: jax.Array, count: jax.Array) -> None:
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), PER_THREAD, _SCALAR))
    def keep(_: Context, page_ids: Memory, ids: Value, count: Value) -> None:
        at = lanes.scalar(count) * STEP_PAGES + lanes.thread()
        (Words.of(page_ids) + (at & (KEPT_IDS - 1))).store(*lanes.of_array(ids))

    keep(page_ids, ids, count)


def _copy(keys: jax.Ref, scratch: dict[str, jax.Ref], count: jax.Array, ring: PageRing) -> None:
    @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * 4, _SCALAR))
    def copy(
        _: Context, keys: Memory, slots: Memory, arrived: Memory, page_ids: Memory, count: Value
    ) -> None:
        number = lanes.scalar(count)
        # The reads of the slot's former page come before the writes of the copy engine.
        lanes.ptx("fence.proxy.async.shared::cta;")
        lanes.warp_barrier()
        with when((lanes.thread() & (WARP - 1)).eq(0)):
            _copy_page(
                keys, slots, arrived, page_of_warp(page_ids, number), stage_of(number, ring), ring
            )

    names = ("slots", "arrived", "page_ids")
    copy(keys, *(scratch[name] for name in names), count)


def _read_first(table: jax.Ref, work: Work, steps: jax.Array, ring: PageRing) -> jax.Array:
    """Lane j of a warp has the id of the warp's page in step j."""
    result = plgpu.ShapeDtypeStruct((SEGMENT_PAGES,), np.dtype(np.int32), PER_THREAD)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[_SCALAR] * 4), return_type=result)
    def read(_: Context, table: Memory, *scalars: Value) -> Value:
        request, length, first, steps = (lanes.scalar(x) for x in scalars)
        step = lanes.thread() & (WARP - 1)
        page = (first + step) * STEP_PAGES + warp_number()
        page_id = page_id_at(table, request, length, page, step < steps, ring)
        return lanes.as_array([page_id], PER_THREAD)

    return read(table, *work[:3], steps)


def _copy_first(
    keys: jax.Ref, scratch: dict[str, jax.Ref], first: jax.Array, steps: jax.Array, ring: PageRing
) -> None:
    @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * 3, PER_THREAD, _SCALAR))
    def copy(
        _: Context, keys: Memory, slots: Memory, arrived: Memory, first: Value, steps: Value
    ) -> None:
        step = lanes.thread() & (WARP - 1)
        lanes.warp_barrier()  # the barriers are ready
        with when(step < lanes.scalar(steps)):
            (page_id,) = lanes.of_array(first)
            _copy_page(keys, slots, arrived, page_id, step, ring)

    copy(keys, scratch["slots"], scratch["arrived"], first, steps)


def _drop_first(arrived: jax.Ref, steps: jax.Array, ring: PageRing) -> None:
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SCALAR))
    def drop(_: Context, arrived: Memory, steps: Value) -> None:
        for stage in range(ring.stages):
            with when(lanes.scalar(steps) > stage):
                wait_for_turn(barrier_of_warp(arrived, ring, stage), int32(0))
        lanes.warp_barrier()
        with when((lanes.thread() & (WARP - 1)).eq(0)):
            for stage in range(ring.stages):
                lanes.ptx("mbarrier.inval.shared.b64 [$0];", barrier_of_warp(arrived, ring, stage))
            _make_barriers(arrived, ring)
        lanes.warp_barrier()

    drop(arrived, steps)


# ---- parts of inline code: each emits the program of one CUDA thread ----


def page_id_at(
    table: Memory, request: Lane, length: Lane, page: Lane, wanted: Lane, ring: PageRing
) -> Lane:
    """Id of a request's page by the table, -1 where no key is visible or it is not wanted."""
    exists = wanted & (page < lanes.minimum(ring.batch.pages_in_lane(length), ring.width))
    at = request.to_i64() * ring.width + page.to_i64()
    known = lanes.load_fresh(Words.of(table) + where(exists, at, 0))
    return where(exists & (known >= 0) & (known < ring.pages), known, -1)


def wait_for_turn(barrier: Lane, turn: Lane) -> None:
    """Waits for the end of a barrier's turn number `turn`."""
    lanes.ptx(
        "{ .reg .pred done; again:"
        " mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1; @!done bra again; }",
        barrier,
        turn & 1,
        collective=True,
    )


def warp_number() -> Lane:
    """This thread's warp in its warpgroup."""
    return lanes.thread() >> 5


def page_of_warp(page_ids: Memory, count: Lane) -> Lane:
    """Id of this warp's page in a step, -1 where no key is visible."""
    first = count * STEP_PAGES & (KEPT_IDS - 1)
    return (Words.of(page_ids) + (first + warp_number())).load()


def stage_of(count: Lane, ring: PageRing) -> Lane:
    """The slot of a warp's ring that its step number `count` goes through."""
    return Lane(arith.remui(count.value, int32(ring.stages).value))


def barrier_of_warp(arrived: Memory, ring: PageRing, stage: Lane | int) -> Lane:
    """Shared memory address of a stage's barrier."""
    place = Words.of(arrived) + (warp_number() * ring.stages + stage) * 2
    return Lane(place.pointer)


def slot_of_warp(slots: Memory, ring: PageRing, stage: Lane) -> Lane:
    """Shared memory address of a stage's slot, as a 32-bit integer."""
    base = Lane(llvm.ptrtoint(lanes.i32(), Words.of(slots).pointer))
    return base + (warp_number() * ring.stages + stage) * ring.slot_bytes


def page_address(keys: Memory, page_id: Lane, ring: PageRing) -> Lane:
    """Global memory address of a page's first key row, as a 64-bit integer."""
    base = Lane(llvm.ptrtoint(lanes.i64(), Words.of(keys).pointer))
    return base + (page_id.to_i64() * ring.pitch + ring.row_offset) * ring.row_bytes


def _copy_page(
    keys: Memory, slots: Memory, arrived: Memory, page_id: Lane, stage: Lane, ring: PageRing
) -> None:
    """Starts the copy of a page into a stage of this warp; of none where the id is -1."""
    barrier, there = barrier_of_warp(arrived, ring, stage), page_id >= 0
    size = where(there, int32(2 * ring.half_bytes), 0)
    lanes.ptx("mbarrier.arrive.expect_tx.shared.b64 _, [$0], $1;", barrier, size)
    with when(there):
        source, target = page_address(keys, page_id, ring), slot_of_warp(slots, ring, stage)
        _bulk_copy(target, source, ring.half_bytes, barrier)
        _bulk_copy(
            target + (ring.half_bytes + HALF_SHIFT),
            source + ring.half_bytes,
            ring.half_bytes,
            barrier,
        )


def _bulk_copy(target: Lane, source: Lane, size: int, barrier: Lane) -> None:
    lanes.ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [$0], [$1], $2, [$3], $4;",
        target,
        source,
        int32(size),
        barrier,
        lanes.constant(_KEEP_SHORTLY, lanes.i64()),
    )
