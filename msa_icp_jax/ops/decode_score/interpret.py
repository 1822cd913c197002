"""The decode scorer's parts in plain Pallas, which the interpreter runs."""

from __future__ import annotations

from typing import override

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from msa_icp_jax.geometry import HEAD_DIM, NUM_HEADS
from msa_icp_jax.ops._mosaic.launch import CTA, ScratchTypes
from msa_icp_jax.ops.decode_score import config
from msa_icp_jax.ops.decode_score.kernel import Parts
from msa_icp_jax.ops.decode_score.mma import Scorer, Step
from msa_icp_jax.ops.decode_score.page_ring import KEPT_IDS, SEGMENT_PAGES, PageRing
from msa_icp_jax.ops.decode_score.work_balance import STEP_PAGES, Batch, Grid, Work


class InterpretedBatch(Batch):
    """Lengths are read as one array."""

    @override
    def read_lengths(self, lengths: jax.Ref) -> list[jax.Array]:
        return [lengths[...]]

    @override
    def keep_lengths(self, kept: jax.Ref, values: list[jax.Array]) -> None:
        kept[pl.ds(0, self.requests)] = values[0]

    @override
    def find_work(self, values: list[jax.Array], grid: Grid) -> Work:
        (lengths,) = values
        ends = jnp.cumsum(self.steps(lengths))
        start, steps = part_of(ends[-1], lax.axis_index(CTA), grid)
        passed = jnp.sum(ends <= start)
        request = jnp.minimum(passed, self.requests - 1)
        first = start - jnp.where(passed > 0, ends[jnp.maximum(request - 1, 0)], 0)
        return Work(request, lengths[request], first, steps)


def part_of(total: jax.Array, cta: jax.Array, grid: Grid) -> tuple[jax.Array, jax.Array]:
    """(first step, steps) of a CTA's part of all steps; it may be without any."""

    def equal(total: jax.Array, ctas: int, cta: jax.Array) -> tuple[jax.Array, jax.Array]:
        base, rest = total // ctas, total % ctas
        return cta * base + jnp.minimum(cta, rest), base + jnp.where(cta < rest, 1, 0)

    if not grid.late:
        return equal(total, grid.ctas, cta)
    early = total - jnp.where(total >= grid.late_from, total >> config.CONFIG.late_shift, 0)
    start, steps = equal(early, grid.resident, cta)
    late_start, late_steps = equal(total - early, grid.late, cta - grid.resident)
    first_ones = cta < grid.resident
    return jnp.where(first_ones, start, early + late_start), jnp.where(
        first_ones, steps, late_steps
    )


class InterpretedRing(PageRing):
    """Pages come by the interpreter's copies, and none before the wait for the last kernel."""

    @override
    def scratch(self) -> ScratchTypes:
        slots = (self.stages, STEP_PAGES, self.rows, HEAD_DIM)
        return {
            "slots": plgpu.SMEM(slots, self.dtype),
            "arrived": plgpu.Barrier(num_arrivals=STEP_PAGES, num_barriers=self.stages),
            "page_ids": plgpu.SMEM((KEPT_IDS,), jnp.int32),
        }

    @override
    def start(self, arrived: jax.Ref) -> None:
        """Barriers are ready."""

    @override
    def read_ids(self, table: jax.Ref, work: Work) -> jax.Array:
        row = table[jnp.clip(work.request, 0, self.batch.requests - 1)]
        page = work.first * STEP_PAGES + jnp.arange(SEGMENT_PAGES)
        ids = row[jnp.clip(page, 0, self.width - 1)]
        stop = jnp.minimum(self.batch.pages(work.length), self.width)
        exists = (page < stop) & (work.steps > 0)
        return jnp.where(exists & (ids >= 0) & (ids < self.pages), ids, -1)

    @override
    def prefetch(
        self, keys: jax.Ref, query: jax.Ref, ids: jax.Array, work: Work, rows: int, steps: jax.Array
    ) -> None:
        """There is no cache."""

    @override
    def keep_ids(self, page_ids: jax.Ref, ids: jax.Array, count: jax.Array) -> None:
        at = (count * STEP_PAGES + jnp.arange(SEGMENT_PAGES)) % KEPT_IDS
        page_ids[...] = page_ids[...].at[at].set(ids)

    @override
    def read_first(self, table: jax.Ref, work: Work, steps: jax.Array) -> jax.Array:
        """Nothing, for `copy_first` copies nothing."""
        return jnp.int32(0)

    @override
    def copy_first(
        self, keys: jax.Ref, scratch: dict[str, jax.Ref], first: jax.Array, steps: jax.Array
    ) -> jax.Array:
        return jnp.int32(0)

    @override
    def drop_first(self, arrived: jax.Ref, steps: jax.Array) -> None:
        """There is nothing to drop."""

    @override
    def copy(self, keys: jax.Ref, scratch: dict[str, jax.Ref], count: jax.Array) -> None:
        slot = lax.rem(count, self.stages)
        plgpu.commit_smem()  # the reads of the slot's former pages come before these writes
        ids = pages_of_step(scratch["page_ids"], count)
        for warp in range(STEP_PAGES):
            plgpu.copy_gmem_to_smem(
                keys.at[jnp.maximum(ids[warp], 0), pl.ds(self.row_offset, self.rows)],
                scratch["slots"].at[slot, warp],
                scratch["arrived"].at[slot],
            )


def pages_of_step(page_ids: jax.Ref, count: jax.Array) -> jax.Array:
    """The four ids of a step, -1 where no key is visible."""
    return page_ids[pl.ds(lax.rem(count * STEP_PAGES, KEPT_IDS), STEP_PAGES)]


class InterpretedScorer(Scorer):
    """Products of whole steps."""

    @override
    def scratch(self) -> ScratchTypes:
        return {
            "queries": plgpu.SMEM((self.query_rows, HEAD_DIM), jnp.float32),
            "found": plgpu.SMEM((self.query_rows, SEGMENT_PAGES), jnp.float32),
        }

    @override
    def read_queries(self, query: jax.Ref, request: jax.Array) -> list[jax.Array]:
        return [query[pl.ds(request * self.tokens, self.tokens)]]

    @override
    def keep_queries(self, queries: jax.Ref, words: list[jax.Array]) -> None:
        (tokens,) = words
        queries[...] = tokens.reshape(self.query_rows, HEAD_DIM).astype(jnp.float32)

    @override
    def score(self, scratch: dict[str, jax.Ref], step: Step) -> None:
        ring = self.ring
        slot = lax.rem(step.count, ring.stages)
        plgpu.barrier_wait(scratch["arrived"].at[slot])
        keys = scratch["slots"][slot].astype(jnp.float32)
        products = jnp.einsum("nd,prd->npr", scratch["queries"][...], keys)
        page = step.number * STEP_PAGES + jnp.arange(STEP_PAGES)
        at = page[:, None] * ring.batch.page_size + jnp.arange(ring.rows)[None]
        token = jnp.arange(self.query_rows) // NUM_HEADS
        visible = at[None] <= (step.room + token)[:, None, None]
        visible &= (pages_of_step(scratch["page_ids"], step.count) >= 0)[None, :, None]
        best = jnp.where(visible & ~jnp.isnan(products), products, -jnp.inf).max(axis=2)
        scratch["found"][:, pl.ds(step.number * STEP_PAGES, STEP_PAGES)] = best

    @override
    def write_scores(self, found: jax.Ref, scores: jax.Ref, work: Work, steps: jax.Array) -> None:
        @pl.loop(0, steps)
        def _(step: jax.Array) -> None:
            values = found[:, pl.ds(step * STEP_PAGES, STEP_PAGES)]
            values = jnp.where(values == 0, 0.0, values)
            tokens = pl.ds(work.request * self.tokens, self.tokens)
            columns = pl.ds((work.first + step) * STEP_PAGES, STEP_PAGES)
            scores[tokens, :, columns] = values.reshape(self.tokens, NUM_HEADS, STEP_PAGES)

    @override
    def let_next_start(self) -> None:
        """Kernels run one after another."""

    @override
    def wait_for_last(self) -> None:
        """It has ended."""


def _a_whole_sm(scratch: ScratchTypes) -> int:
    """There are no SMs: as many CTAs are simulated as the target claims to have."""
    del scratch
    return 228 << 10


PARTS = Parts(InterpretedBatch, InterpretedRing, InterpretedScorer, _a_whole_sm)
