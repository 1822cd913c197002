"""The prefill window plan: segment metadata on the device, built once per window and step.

Everything a scorer needs to know about a window's segments travels as array leaves; what fixes
shapes (upper bounds) is static. So one executable serves every window of the same bounds, and
nothing is read back to the host.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from msa_icp_jax import checks, geometry
from msa_icp_jax.ambient import check_unsplit
from msa_icp_jax.backend import resolve_backend
from msa_icp_jax.geometry import BLOCK_SIZE, MAX_INT32, MAX_TOKENS, cdiv
from msa_icp_jax.ops.prefill_plan.namespace import AnyArray, Namespace
from msa_icp_jax.typing import Backend

if TYPE_CHECKING:
    from msa_icp_jax.arrays import Array, Int32
    from msa_icp_jax.ops.prefill_plan.balance import PrefillWork


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MSAIcpScorePlan:
    """The segments of one prefill query window; a pytree.

    Segment b holds the query rows ``[qo_starts[b], qo_starts[b] + qo_lens[b])``; its query i sits
    at position ``qo_offset[b] + i`` and sees keys up to its own position and below ``kv_lens[b]``.

    Attributes:
      qo_starts: int32 [B], first query row, in [0, total_q].
      qo_lens: int32 [B], query rows, cut so that none passes total_q.
      kv_lens: int32 [B], keys of the segment, >= 0.
      qo_offset: int32 [B], position of the segment's first query.
      total_q: query rows of the window at most (static).
      max_query_len: query rows of a segment at most (static).
      max_seq_len: keys of a segment at most (static).
      work: the Hopper kernels' work list (`balance.PrefillWork`), None for the XLA backend.
    """

    qo_starts: Int32[Array, " B"]
    qo_lens: Int32[Array, " B"]
    kv_lens: Int32[Array, " B"]
    qo_offset: Int32[Array, " B"]
    total_q: int = dataclasses.field(metadata={"static": True})
    max_query_len: int = dataclasses.field(metadata={"static": True})
    max_seq_len: int = dataclasses.field(metadata={"static": True})
    work: PrefillWork | None = None

    def __eq__(self, other: object) -> bool:
        """Whether the fields are the same; an array is so to itself alone."""
        return checks.same_fields(self, other)

    @property
    def num_segments(self) -> int:
        """B, zero-length segments included."""
        return self.qo_starts.shape[0]

    def num_valid_pages(self, num_tokens: int | None = None) -> Int32[Array, " tokens"]:
        """Visible blocks int32 [num_tokens] of every query row, 0 for padding rows.

        It is ``position // 128 + 1`` of each row.

        Args:
          num_tokens: rows of the answer, those behind the segments' being padding; None: total_q.

        Raises:
          TypeError, ValueError: `num_tokens` is no int >= 0.
        """
        if num_tokens is not None:
            num_tokens = checks.integer("num_tokens", num_tokens, 0, MAX_INT32)
        return visible_blocks(self, num_tokens, jnp)


def msa_icp_index_score_sharded_plan(
    qo_segment_lens: Sequence[int] | np.ndarray,
    kv_segment_lens: Sequence[int] | np.ndarray,
    num_qo_heads: int,
    *,
    qo_offset: Sequence[int] | np.ndarray,
    device: jax.Device | None = None,
    backend: Backend = "auto",
) -> MSAIcpScorePlan:
    """Builds a window plan from lengths known on the host (eager, not under jit).

    Args:
      qo_segment_lens: query tokens of each segment, ints >= 0.
      kv_segment_lens: keys of each segment, ints >= qo_offset + qo_segment_lens.
      num_qo_heads: 4.
      qo_offset: position of each segment's first query, ints >= 0.
      device: where the plan's arrays live; None is JAX's default.
      backend: "auto", "mosaic" or "xla", that of the scorer.

    Raises:
      TypeError, ValueError: a length is no int, out of range, or a segment's queries reach past
        its keys.
    """
    geometry.check_num_heads("num_qo_heads", num_qo_heads)
    qo_lens = _host_lengths("qo_segment_lens", qo_segment_lens)
    kv_lens = _host_lengths("kv_segment_lens", kv_segment_lens, len(qo_lens))
    offsets = _host_lengths("qo_offset", qo_offset, len(qo_lens))
    checks.device("device", device)
    segments = zip(qo_lens.tolist(), kv_lens.tolist(), offsets.tolist(), strict=True)
    for b, (qo_len, kv_len, offset) in enumerate(segments):
        if qo_len and offset + qo_len > kv_len:
            raise ValueError(
                f"qo_offset[{b}] + qo_segment_lens[{b}] must be at most kv_segment_lens[{b}] = "
                f"{kv_len}, got {offset} + {qo_len}"
            )
    ends = np.cumsum(qo_lens, dtype=np.int64)
    checks.integer("sum(qo_segment_lens)", int(ends[-1]) if ends.size else 0, 0, MAX_INT32)
    starts = np.concatenate([[0], ends]).astype(np.int32)
    # default_device(None) would not leave a configured default as it is.
    with jax.default_device(device) if device is not None else contextlib.nullcontext():
        plan = MSAIcpScorePlan(
            jnp.asarray(starts[:-1]),
            jnp.asarray(qo_lens),
            jnp.asarray(kv_lens),
            jnp.asarray(offsets),
            total_q=int(starts[-1]),
            max_query_len=int(qo_lens.max(initial=0)),
            max_seq_len=int(kv_lens.max(initial=0)),
        )
        return _with_work(plan, resolve_backend(backend, device))


def msa_icp_index_score_sharded_plan_device(
    qo_segment_lens: Int32[Array, " B"],
    kv_segment_lens: Int32[Array, " B"],
    qo_segment_offsets: Int32[Array, " B+1"],
    kv_segment_offsets: Int32[Array, " B+1"],
    qo_offset: Int32[Array, " B"],
    num_qo_heads: int,
    *,
    total_q: int,
    max_query_len: int,
    max_seq_len: int,
    backend: Backend = "auto",
) -> MSAIcpScorePlan:
    """Builds a window plan from lengths on the device; no host read, fit for jit.

    Device values cannot be checked here; whatever they hold, the plan stays within the bounds:
    negative lengths read as 0, longer ones are cut, rows past total_q are dropped.

    Args:
      qo_segment_lens: int32 [B], query tokens of each segment.
      kv_segment_lens: int32 [B], keys of each segment.
      qo_segment_offsets: int32 [B + 1], prefix sums of qo_segment_lens: first query row of each.
      kv_segment_offsets: int32 [B + 1], prefix sums of kv_segment_lens (keys are paged, so only
        the shape matters here).
      qo_offset: int32 [B], position of each segment's first query.
      num_qo_heads: 4.
      total_q: query rows of the window at most, >= 0.
      max_query_len: query rows of one segment at most, >= 0.
      max_seq_len: keys of one segment at most, >= 0.
      backend: "auto", "mosaic" or "xla", that of the scorer.

    Raises:
      TypeError, ValueError: an argument has the wrong dtype, shape or value.
    """
    checks.array("qo_segment_lens", qo_segment_lens, jnp.int32, None)
    segments = qo_segment_lens.shape[0]
    checks.array("kv_segment_lens", kv_segment_lens, jnp.int32, segments)
    checks.array("qo_segment_offsets", qo_segment_offsets, jnp.int32, segments + 1)
    checks.array("kv_segment_offsets", kv_segment_offsets, jnp.int32, segments + 1)
    checks.array("qo_offset", qo_offset, jnp.int32, segments)
    check_unsplit(qo_segment_lens, kv_segment_lens, qo_segment_offsets, qo_offset)
    geometry.check_num_heads("num_qo_heads", num_qo_heads)
    total_q = checks.integer("total_q", total_q, 0, MAX_INT32)
    max_query_len = checks.integer("max_query_len", max_query_len, 0, MAX_INT32)
    max_seq_len = checks.integer("max_seq_len", max_seq_len, 0, MAX_INT32)
    bounds: dict[str, Any] = {
        "total_q": total_q,
        "max_query_len": max_query_len,
        "max_seq_len": max_seq_len,
    }
    lengths = (qo_segment_lens, kv_segment_lens, qo_offset)
    plan = MSAIcpScorePlan(*within(qo_segment_offsets[:-1], *lengths, **bounds, xp=jnp), **bounds)
    return _with_work(plan, resolve_backend(backend))


def within(
    starts: Int32[AnyArray, " B"],
    qo_lens: Int32[AnyArray, " B"],
    kv_lens: Int32[AnyArray, " B"],
    qo_offset: Int32[AnyArray, " B"],
    *,
    total_q: int,
    max_query_len: int,
    max_seq_len: int,
    xp: Namespace,
) -> tuple[
    Int32[AnyArray, " B"], Int32[AnyArray, " B"], Int32[AnyArray, " B"], Int32[AnyArray, " B"]
]:
    """A plan's four leaves, arrays of xp, from int32 [B] ones that may hold anything."""
    starts = xp.clip(starts, 0, total_q)
    return (
        starts,
        xp.minimum(xp.clip(qo_lens, 0, max_query_len), total_q - starts),
        xp.clip(kv_lens, 0, max_seq_len),
        xp.clip(qo_offset, None, MAX_TOKENS),
    )


def visible_blocks(
    plan: MSAIcpScorePlan, num_tokens: int | None, xp: Namespace
) -> Int32[AnyArray, " tokens"]:
    """`MSAIcpScorePlan.num_valid_pages` of a plan whose leaves are arrays of xp."""
    row = xp.arange(plan.total_q if num_tokens is None else num_tokens, dtype=xp.int32)
    if plan.num_segments == 0:
        return xp.zeros_like(row)
    inside = row[:, None] - plan.qo_starts[None, :]
    live = (inside >= 0) & (inside < plan.qo_lens[None, :])
    position = xp.amax(xp.where(live, inside + plan.qo_offset[None, :], -1), 1)
    return xp.where(position >= 0, position // BLOCK_SIZE + 1, 0)


def msa_icp_index_score_plan_storage(
    *, num_qo_heads: int, total_q: int, batch: int, device: jax.Device | None = None
) -> dict[str, int]:
    """Sizes of a window plan's arrays, for the backend that "auto" takes on `device`.

    Args:
      num_qo_heads: 4.
      total_q: query rows of the window, >= 0.
      batch: segments, >= 0.
      device: the device the plan is for; None is JAX's default.

    Returns:
      work_range_numel: elements of the work list's ranges, one a CTA (0 where there is no list).
      work_info_numel: elements of the work list's tiles (0 where there is no list).
      workspace_bytes: bytes of the whole plan.

    Raises:
      TypeError, ValueError: an argument is outside its range.
    """
    geometry.check_num_heads("num_qo_heads", num_qo_heads)
    total_q = checks.integer("total_q", total_q, 0, MAX_INT32)
    batch = checks.integer("batch", batch, 0, MAX_INT32)
    checks.device("device", device)
    backend = resolve_backend("auto", device)

    def build(lens: Int32[Array, " B"]) -> MSAIcpScorePlan:
        plan = MSAIcpScorePlan(lens, lens, lens, lens, total_q, 0, 0)
        return _with_work(plan, backend)

    plan = jax.eval_shape(build, jax.ShapeDtypeStruct((batch,), jnp.int32))
    return {
        "work_range_numel": plan.work.ranges.size if plan.work is not None else 0,
        "work_info_numel": plan.work.tiles.size if plan.work is not None else 0,
        "workspace_bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(plan)),
    }


def _with_work(plan: MSAIcpScorePlan, backend: Backend) -> MSAIcpScorePlan:
    """Adds what the backend's scorer reads beside the segments."""
    if backend == "xla" or plan.num_segments == 0:
        return plan
    from msa_icp_jax.ops._mosaic import launch  # on demand: importing Pallas takes a while
    from msa_icp_jax.ops.prefill_plan.balance import prefill_work

    return dataclasses.replace(plan, work=prefill_work(plan, launch.current_target().sms))


def _host_lengths(name: str, values: Any, size: int | None = None) -> np.ndarray:
    if isinstance(values, jax.core.Tracer):
        raise TypeError(
            f"{name} must be known on the host, got a traced array; under jit take "
            "msa_icp_index_score_sharded_plan_device"
        )
    try:
        lengths = np.asarray(values)
    except ValueError:
        raise ValueError(f"{name} must be a flat sequence of ints, got a ragged one") from None
    if lengths.ndim != 1 or (size is not None and lengths.size != size):
        want = "one dimension" if size is None else f"shape [{size}]"
        raise ValueError(f"{name} must have {want}, got shape {list(lengths.shape)}")
    too_long = lengths.dtype == object and all(isinstance(x, int) for x in lengths)
    if lengths.size and not (np.issubdtype(lengths.dtype, np.integer) or too_long):
        raise TypeError(f"{name} must hold ints, got dtype {lengths.dtype}")
    for b, value in enumerate(lengths.tolist()):
        checks.integer(f"{name}[{b}]", value, 0, MAX_INT32)
    return lengths.astype(np.int32)


def prefill_tiles(plan: MSAIcpScorePlan, tokens: int) -> Int32[Array, " B"]:
    """Running count int32 [B] of the query tiles of `tokens` rows that the segments need."""
    return jnp.cumsum(cdiv(plan.qo_lens, tokens), dtype=jnp.int32)
