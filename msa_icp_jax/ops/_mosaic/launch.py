"""How every kernel of this package is launched."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

if TYPE_CHECKING:
    from msa_icp_jax.arrays import Array, Int32

_SM_SHARED_BYTES = 228 << 10
_CTA_SHARED_BYTES = 1 << 10  # kept by the system

# A full Hopper SXM part (H100, H200), assumed when a program is built where no GPU can be asked.
HOPPER_SMS = 132

# Mosaic refuses buffers of a coarser alignment than XLA promises for a slice that it hands to a
# kernel in place.
_ALIGNMENT_BYTES = 256

# Scratch memory and barriers of a kernel by name; Pallas has no public name for their types.
type ScratchTypes = dict[str, Any]

CTA = "cta"
WARPGROUP = "warpgroup"


@dataclasses.dataclass(frozen=True)
class Target:
    """What a kernel is built for.

    Attributes:
      sms: streaming multiprocessors of the GPU; persistent grids are multiples of it.
      interpret: run on the CPU with race detection. Inline machine pieces are then replaced by
        twins in plain Pallas, and grids stay small (`sms` is the number of CTAs to simulate).
    """

    sms: int = HOPPER_SMS
    interpret: bool = False


def current_target() -> Target:
    """What `building_for` says, or the first GPU of this process.

    Where the process has none it is a full Hopper part: the program is exported, say.
    """
    chosen = _chosen_target.get()
    if chosen is not None:
        return chosen
    try:
        gpus = jax.devices("gpu")
    except RuntimeError:
        return Target()
    return Target(sms=gpus[0].core_count)


_chosen_target: contextvars.ContextVar[Target | None]
_chosen_target = contextvars.ContextVar("_chosen_target", default=None)


@contextlib.contextmanager
def building_for(target: Target) -> Iterator[None]:
    """Kernels traced in this context are built for `target`; JAX is not asked for a GPU."""
    token = _chosen_target.set(target)
    try:
        yield
    finally:
        _chosen_target.reset(token)


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a kernel is built and launched.

    Attributes:
      target: the machine to build for.
      pdl: let it start before the kernel in front of it ends (programmatic dependent launch).
      precision: of products, "exact" (float32 sums) or "fast" (fp8, about 14 bits of the sum). Only
        the prefill scorer has both.
    """

    target: Target
    pdl: bool = False
    precision: str = "exact"

    def kernel(
        self,
        body: Callable[..., None],
        *,
        name: str,
        grid: tuple[int, ...],
        warpgroups: int = 1,
        out_type: Any = (),
        scratch_types: Any = (),
    ) -> Callable[..., Any]:
        """Returns a function of arrays and refs that runs `body`.

        `body(*inputs, *outputs, **scratch)` runs in every warpgroup of every CTA:
        `lax.axis_index(CTA)` and `lax.axis_index(WARPGROUP)` say in which. Refs among the inputs,
        made by `writable`, are written in place. The body states every barrier itself.
        """
        kernel = plgpu.kernel(
            body,
            out_type=out_type,
            scratch_types=scratch_types,
            compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
            grid=grid,
            grid_names=(CTA,),
            num_threads=warpgroups,
            thread_name=WARPGROUP,
            kernel_name=name,
            interpret=self._interpreter(),
        )

        def call(*operands: Any) -> Any:
            with jax.enable_x64(False):  # with it on, the body's Python ints would be 64 bits wide
                return jax.tree.map(_whole, kernel(*map(_whole, operands)))

        return call

    def _interpreter(self) -> Any:
        return plgpu.InterpretGPUParams(detect_races=True) if self.target.interpret else None


def current_launch(pdl: bool, precision: str = "exact") -> Launch:
    """A launch on `current_target`."""
    return Launch(current_target(), pdl, precision)


def ctas_per_sm(shared_bytes: int) -> int:
    """CTAs that an SM holds at a time by their shared memory (their registers must allow it).

    A persistent grid has to be exactly that large: with room for one more, CTAs of two launches
    pile up on some SMs while others stay empty.
    """
    return max(1, _SM_SHARED_BYTES // (shared_bytes + _CTA_SHARED_BYTES))


def scalar_operand(x: Any) -> Int32[Array, " 1"]:
    """An int or a traced int32 scalar as an operand, int32 [1]: one kernel for all its values."""
    return jnp.asarray(x, jnp.int32).reshape(1)


def writable(buffer: jax.Array) -> jax.Ref:
    """A ref that a kernel writes in place: into `buffer` itself where the caller donates it."""
    return jax.new_ref(_whole(buffer))


def written(ref: jax.Ref) -> jax.Array:
    """The buffer of a ref from `writable`, after the kernels that write it."""
    return _whole(jax.freeze(ref))


def _whole(x: Any) -> Any:
    """Keeps XLA from passing a slice of a larger buffer to a kernel without copying it.

    XLA does so where the slice starts at a multiple of 128 bytes, and Mosaic then refuses the
    kernel at run time. Whole rows of a multiple of 256 bytes (queries, the cache) always start
    right, and stay where they are.
    """
    if not isinstance(x, jax.Array) or x.ndim == 0 or x.shape[0] == 0:
        return x
    row_bytes = x.nbytes // x.shape[0]
    return x if row_bytes % _ALIGNMENT_BYTES == 0 else lax.optimization_barrier(x)
