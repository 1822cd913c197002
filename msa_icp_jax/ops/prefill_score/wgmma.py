"""Products of 64 query rows and 128 keys, multiplied while the warpgroup does something else.

A product array is one-dimensional and lies in registers as a WGMMA accumulator does: lane l of warp
w has rows ``16 w + 8 i + l // 4`` (i is 0 or 1) and columns ``8 n + 2 (l % 4) + {0, 1}``, four
elements of every 8 columns: two of row i = 0, then two of row i = 1.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxlib.mlir.dialects import llvm

from msa_icp_jax.geometry import HEAD_DIM
from msa_icp_jax.ops._mosaic import lanes
from msa_icp_jax.ops._mosaic.lanes import Context, Lane, Memory, Value, as_array, of_array

KEYS = 128  # keys of a step
ROWS = 64  # query rows that are multiplied at once: 16 tokens x 4 heads
SCALAR = plgpu.Layout.WG_SPLAT
INT = plgpu.ShapeDtypeStruct((), np.dtype(np.int32), SCALAR)
_THREADS = 128
_FRAGMENT = ROWS * KEYS // _THREADS  # products of a thread
_ATOM = 128  # bytes of a row that lie together
_KINDS = {  # 32 bytes of each row at a time; the flags: no negation, no transposition
    np.dtype(jnp.float8_e4m3fn): ("k32.f32.e4m3.e4m3", "1, 1"),
    np.dtype(jnp.float16): ("k16.f32.f16.f16", "1, 1, 0, 0"),
    np.dtype(jnp.bfloat16): ("k16.f32.bf16.bf16", "1, 1, 0, 0"),
}


def layout_of(elements: int) -> Any:
    """How an array with so many elements a thread lies in registers."""
    return plgpu.Layout.WG_STRIDED((elements * _THREADS,), 1)


def type_of(elements: int) -> Any:
    """An array with so many float32 elements a thread."""
    return plgpu.ShapeDtypeStruct((elements * _THREADS,), np.dtype(np.float32), layout_of(elements))


PRODUCTS = layout_of(_FRAGMENT)
_PRODUCTS_TYPE = type_of(_FRAGMENT)


def rows_layout(dtype: DTypeLike) -> tuple[Any, Any]:
    """The transforms of [.., rows, 128] matrices in shared memory that can be multiplied."""
    tiling: Any = plgpu.TilingTransform
    swizzle: Any = plgpu.SwizzleTransform
    return tiling((8, _ATOM // jnp.dtype(dtype).itemsize)), swizzle(_ATOM)


def start_products(queries: jax.Ref, keys: jax.Ref) -> jax.Array:
    """Starts multiplying; the result may be read after `settle_products`.

    Not `plgpu.wgmma`: that one adds to registers that must be set to zero first, and the compiler
    lets no instruction touch registers of that kind while other products are in flight.

    Args:
      queries: ref, float8_e4m3fn, float16 or bfloat16 [64, 128], shared memory.
      keys: ref, [128, 128] of the same type, shared memory.
    """
    row_bytes = HEAD_DIM * queries.dtype.itemsize
    kind, flags = _KINDS[np.dtype(queries.dtype)]
    tiled = plgpu.RefType(rows_layout(queries.dtype))

    @plgpu.inline_mgpu(arg_types=(tiled, tiled), return_type=_PRODUCTS_TYPE)
    def start(_: Context, queries: Memory, keys: Memory) -> Any:
        anything = [Lane(llvm.mlir_undef(lanes.f32()))] * _FRAGMENT
        out = ", ".join(f"${i}" for i in range(_FRAGMENT))
        a, b = f"${2 * _FRAGMENT}", f"${2 * _FRAGMENT + 1}"
        text = ["{ .reg .pred adds; .reg .b64 a, b;", "wgmma.fence.sync.aligned;"]
        for at in range(0, row_bytes, 32):
            # Of 8 rows, 128 bytes each lie together.
            offset = at // _ATOM * 8 * _ATOM + at % _ATOM
            text += [
                f"setp.ne.b32 adds, {min(at, 1)}, 0;",
                f"add.s64 a, {a}, {offset >> 4};",
                f"add.s64 b, {b}, {offset >> 4};",
                f"wgmma.mma_async.sync.aligned.m64n128{kind} {{{out}}}, a, b, adds, {flags};",
            ]
        text += ["wgmma.commit_group.sync.aligned; }"]
        operands = [_matrix(x, row_bytes) for x in (queries, keys)]
        return as_array(_in_place("\n".join(text), anything, operands), PRODUCTS)

    return start(queries, keys)


def settle_products(
    products: jax.Array, in_flight: int, after: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Waits until only the last `in_flight` multiplications may be going on.

    Args:
      products: of the multiplication that is over then.
      in_flight: see above.
      after: None, or maxima to be computed before the wait: left alone, the compiler waits first.

    Returns:
      The products and `after`.
    """
    kept = [] if after is None else [after]
    sizes = [x.shape[0] // _THREADS for x in kept]
    layouts, types = [layout_of(n) for n in sizes], [type_of(n) for n in sizes]

    @plgpu.inline_mgpu(arg_types=(PRODUCTS, *layouts), return_type=(_PRODUCTS_TYPE, *types))
    def settle(_: Context, *arrays: Value) -> Any:
        registers = [x for array in arrays for x in of_array(array)]
        text = f"wgmma.wait_group.sync.aligned {in_flight};"
        found = _in_place(text, registers, [])
        return (
            as_array(found[:_FRAGMENT], PRODUCTS),
            *(as_array(found[_FRAGMENT:], layout) for layout in layouts),
        )

    products, *kept = settle(products, *kept)
    return products, kept[0] if kept else None


def _matrix(tile: Memory, row_bytes: int) -> Lane:
    """The descriptor of a K-major tile in shared memory with the 128-byte swizzle."""
    address = Lane(llvm.ptrtoint(lanes.i64(), mgpu.utils.memref_ptr(tile)))
    eight_rows = 8 * row_bytes >> 4
    return ((address & 0x3FFFF) >> 4) | ((1 << 62) | (eight_rows << 32))


def _in_place(text: str, registers: list[Lane], operands: list[Lane]) -> list[Lane]:
    """Inline PTX that changes float registers $0, .. in place; the operands follow their inputs."""
    count = len(registers)
    constraints = ["=f"] * count + [str(i) for i in range(count)] + ["l"] * len(operands)
    result = llvm.inline_asm(
        llvm.StructType.get_literal([lanes.f32()] * count),
        [x.value for x in (*registers, *operands)],
        text,
        ",".join(constraints),
        asm_dialect=0,
        has_side_effects=True,
    )
    return [Lane(llvm.extractvalue(lanes.f32(), result, [i])) for i in range(count)]
