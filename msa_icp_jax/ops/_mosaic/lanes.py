"""Values of one CUDA thread with Python operators, for kernel pieces written thread by thread.

Inside `plgpu.inline_mgpu` a function emits the program of one CUDA thread. A `Lane` is one of its
values (a 32- or 64-bit integer, a float32 or a predicate); Python ints and floats beside it become
constants of its type. Integers are signed and comparisons of floats are false on NaN.

Everything called *warp* here has to be reached by all 32 lanes of a warp together, and
*warpgroup* pieces by all its 128 threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, math, scf

# What an `inline_mgpu` function gets: a context, then memory for a ref and a value for an array.
type Context = mgpu.LaunchContext
type Memory = ir.Value
type Value = mgpu.FragmentedArray

type _Operation = Callable[..., ir.Value]

ALL_LANES = 0xFFFFFFFF
_SMEM, _GMEM = 3, 1  # NVPTX address spaces

# Which lines leave the L2 cache first or last, as createpolicy.fractional gives it.
EVICT_FIRST, EVICT_LAST = 0x12F0000000000000, 0x14F0000000000000


class Lane:
    """One value of one thread."""

    def __init__(self, value: ir.Value) -> None:
        self.value = value

    @property
    def type(self) -> ir.Type:
        return self.value.type

    @property
    def _is_float(self) -> bool:
        return isinstance(self.type, ir.FloatType)

    def like(self, other: Lane | float) -> Lane:
        """`other` as a value of this one's type; numbers become constants."""
        return other if isinstance(other, Lane) else constant(other, self.type)

    def _binary(
        self, other: Lane | float, on_ints: _Operation, on_floats: _Operation | None = None
    ) -> Lane:
        op = on_floats if self._is_float else on_ints
        assert op is not None, "there is no such operation on floats"
        return Lane(op(self.value, self.like(other).value))

    def _compare(self, other: Lane | float, on_ints: Any, on_floats: Any) -> Lane:
        right = self.like(other).value
        if self._is_float:
            return Lane(arith.cmpf(on_floats, self.value, right))
        return Lane(arith.cmpi(on_ints, self.value, right))

    def __add__(self, other: Lane | float) -> Lane:
        return self._binary(other, arith.addi, arith.addf)

    __radd__ = __add__

    def __sub__(self, other: Lane | float) -> Lane:
        return self._binary(other, arith.subi, arith.subf)

    def __mul__(self, other: Lane | float) -> Lane:
        return self._binary(other, arith.muli, arith.mulf)

    def __and__(self, other: Lane | int) -> Lane:
        return self._binary(other, arith.andi)

    def __or__(self, other: Lane | int) -> Lane:
        return self._binary(other, arith.ori)

    def __xor__(self, other: Lane | int) -> Lane:
        return self._binary(other, arith.xori)

    def __lshift__(self, other: Lane | int) -> Lane:
        return self._binary(other, arith.shli)

    def __rshift__(self, other: Lane | int) -> Lane:
        """Arithmetic shift: rounds towards minus infinity."""
        return self._binary(other, arith.shrsi)

    def __invert__(self) -> Lane:
        return self ^ -1

    def __lt__(self, other: Lane | float) -> Lane:
        return self._compare(other, arith.CmpIPredicate.slt, arith.CmpFPredicate.OLT)

    def __le__(self, other: Lane | float) -> Lane:
        return self._compare(other, arith.CmpIPredicate.sle, arith.CmpFPredicate.OLE)

    def __gt__(self, other: Lane | float) -> Lane:
        return self._compare(other, arith.CmpIPredicate.sgt, arith.CmpFPredicate.OGT)

    def __ge__(self, other: Lane | float) -> Lane:
        return self._compare(other, arith.CmpIPredicate.sge, arith.CmpFPredicate.OGE)

    def eq(self, other: Lane | float) -> Lane:
        """Whether both are equal."""
        return self._compare(other, arith.CmpIPredicate.eq, arith.CmpFPredicate.OEQ)

    def ne(self, other: Lane | float) -> Lane:
        """Whether they differ; true on NaN."""
        return self._compare(other, arith.CmpIPredicate.ne, arith.CmpFPredicate.UNE)

    def bits(self, of: ir.Type) -> Lane:
        """The same bits as another type of the same width."""
        return Lane(arith.bitcast(of, self.value))

    def to_i64(self) -> Lane:
        """Sign-extended to 64 bits."""
        return Lane(arith.extsi(i64(), self.value))

    def to_i32(self) -> Lane:
        """A predicate as 0 or 1, a 64-bit integer's low half."""
        if ir.IntegerType(self.type).width == 1:
            return Lane(arith.extui(i32(), self.value))
        return Lane(arith.trunci(i32(), self.value))


def i1() -> ir.Type:
    return ir.IntegerType.get_signless(1)


def i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def i64() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def f32() -> ir.Type:
    return ir.F32Type.get()


def constant(number: float, of: ir.Type) -> Lane:
    """A constant; an integer may be given signed or as its unsigned bits."""
    if isinstance(of, ir.FloatType):
        return Lane(arith.constant(of, ir.FloatAttr.get(of, float(number))))
    width = ir.IntegerType(of).width
    number = int(number) & ((1 << width) - 1)
    signed = number - (1 << width) if width > 1 and number >> (width - 1) else number
    return Lane(arith.constant(of, ir.IntegerAttr.get(of, signed)))


def int32(number: int) -> Lane:
    return constant(number, i32())


def scalar(argument: Value) -> Lane:
    """A scalar argument of an `inline_mgpu` function."""
    return Lane(argument.registers.item())


def as_array(elements: Sequence[Lane], layout: Any) -> Value:
    """An array with so many elements a thread, of a Pallas layout WG_STRIDED(.., 1)."""
    vector_type = ir.VectorType.get((1,), elements[0].type)
    registers = np.empty((len(elements),), dtype=object)
    for i, x in enumerate(elements):
        registers[i] = llvm.insertelement(llvm.mlir_undef(vector_type), x.value, int32(0).value)
    signed = None if isinstance(elements[0].type, ir.FloatType) else True
    return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=signed)


def of_array(array: Value) -> list[Lane]:
    """This thread's elements of such an array."""
    return [Lane(llvm.extractelement(x, int32(0).value)) for x in array.registers.flat]


def as_scalar(x: Lane) -> Value:
    """An int32 that all threads have alike, as a scalar result of an `inline_mgpu` function."""
    return mgpu.FragmentedArray.splat(x.value, (), is_signed=True)


def where(condition: Lane, a: Lane | float, b: Lane | float) -> Lane:
    """a where the predicate holds, else b; at least one of them is a Lane."""
    model = a if isinstance(a, Lane) else b
    assert isinstance(model, Lane)
    return Lane(arith.select(condition.value, model.like(a).value, model.like(b).value))


def minimum(a: Lane, b: Lane | float) -> Lane:
    """The smaller one; of a float and NaN the float."""
    return a._binary(b, arith.minsi, arith.minnumf)


def maximum(a: Lane, b: Lane | float) -> Lane:
    """The larger one; of a float and NaN the float."""
    return a._binary(b, arith.maxsi, arith.maxnumf)


def minimum_or_nan(a: Lane, b: Lane) -> Lane:
    """The smaller one of two floats; NaN is the smallest."""
    return Lane(arith.minimumf(a.value, b.value))


def maximum_of_negated(a: Lane, b: Lane) -> Lane:
    """The larger one of the floats a and -b, in one instruction; of a float and NaN the float."""
    text = "{ .reg .f32 x; neg.f32 x, $2; max.f32 $0, $1, x; }"
    return ptx(text, a, b, result=f32(), pure=True)


def clip(x: Lane, low: Lane | int, high: Lane | int) -> Lane:
    return minimum(maximum(x, low), high)


def popcount(x: Lane) -> Lane:
    return Lane(math.ctpop(x.value))


def lowest_bit(x: Lane) -> Lane:
    """Position of the lowest set bit of x, which is not 0."""
    return Lane(math.cttz(x.value))


def low_bits(number: Lane) -> Lane:
    """The `number` lowest bits: none if it is negative, all of them from 32 on."""
    return ptx("bmsk.clamp.b32 $0, 0, $1;", maximum(number, 0), result=i32(), pure=True)


def ptx(
    text: str, *operands: Lane, result: Any = None, collective: bool = False, pure: bool = False
) -> Any:
    """Inline PTX: $0 upwards are the results, then the operands.

    `collective`: the warp runs it together. `pure`: arithmetic only, may be moved or dropped.
    """
    found = mgpu.utils.inline_ptx(
        text,
        *(x.value for x in operands),
        result_types=result,
        has_side_effects=not pure,
        convergent=collective,
    )
    if result is None:
        return None
    return Lane(found) if isinstance(result, ir.Type) else tuple(Lane(x) for x in found)


def is_negative(x: Lane) -> Lane:
    """The sign bit of a float or int32, 0 or 1.

    For floats ``is_negative(a - b)`` is a < b where zeros have one sign (NaN and equal infinities
    give 0). In sums it beats a comparison: additions run at twice the rate, and no predicate.
    """
    return Lane(arith.shrui(x.bits(i32()).value, int32(31).value))


def which_reach(values: Sequence[Lane], threshold: Lane) -> Lane:
    """Bit i: whether float value i is at least `threshold`; at most 32 values. -0.0 equals +0.0."""
    return _which_exceed(values, _next_below(threshold))


def which_pass(values: Sequence[Lane], threshold: Lane) -> Lane:
    """Bit i: whether float value i is above `threshold`, which is not NaN; at most 32 values."""
    return _which_exceed(values, threshold + 0.0)  # no difference of zeros is negative then


def _which_exceed(values: Sequence[Lane], threshold: Lane) -> Lane:
    """Bit i: whether `threshold` less value i is negative."""
    mask = int32(0)
    for value in reversed(values):
        mask = (mask << 1) | is_negative(threshold - value)
    return mask


def _next_below(x: Lane) -> Lane:
    """The largest float below a float that is neither NaN nor -inf."""
    bits = where(x.eq(0.0), constant(0.0, f32()), x).bits(i32())
    down = where(bits > 0, bits - 1, bits + 1)
    return where(bits.eq(0), int32(0x80000001), down).bits(f32())


def fresh(x: Lane) -> Lane:
    """x, as a value of its own to the compiler: what depends on it stays inside its loop."""
    return ptx("mov.b32 $0, $1;", x, result=x.type)


# ---- threads ----


def thread() -> Lane:
    """Number of this thread in its CTA."""
    return Lane(mgpu.utils.thread_idx())


def warp_barrier() -> None:
    mgpu.utils.warp_barrier()


def warpgroup_barrier() -> None:
    """Waits for the other threads of the warpgroup, and for their shared memory writes."""
    mgpu.utils.warpgroup_barrier()


def warpgroup_all(condition: Lane) -> Lane:
    """Whether the predicate holds in all threads of the warpgroup; they wait for one another."""
    barrier = Lane(mgpu.utils.warpgroup_barrier_idx(sync=False))
    text = "bar.red.and.pred $0, $1, 128, $2;"
    return ptx(text, barrier, condition, result=i1(), collective=True)


def warp_ballot(condition: Lane) -> Lane:
    """Bit l: lane l's predicate."""
    text = f"vote.sync.ballot.b32 $0, $1, {ALL_LANES};"
    return ptx(text, condition, result=i32(), collective=True)


def warp_any(condition: Lane) -> Lane:
    """Whether some lane's predicate holds."""
    text = f"vote.sync.any.pred $0, $1, {ALL_LANES};"
    return ptx(text, condition, result=i1(), collective=True)


def warp_min(x: Lane) -> Lane:
    text = f"redux.sync.min.s32 $0, $1, {ALL_LANES};"
    return ptx(text, x, result=i32(), collective=True)


def warp_max(x: Lane) -> Lane:
    text = f"redux.sync.max.s32 $0, $1, {ALL_LANES};"
    return ptx(text, x, result=i32(), collective=True)


def warp_from(x: Lane, lane: Lane | int) -> Lane:
    """Lane `lane`'s x."""
    text = f"shfl.sync.idx.b32 $0, $1, $2, 31, {ALL_LANES};"
    return ptx(text, x, x.like(lane), result=i32(), collective=True)


def warp_last(x: Lane, group: int) -> Lane:
    """x of the last lane of this lane's group of 8, 16 or 32."""
    text = f"shfl.sync.idx.b32 $0, $1, {group - 1}, {_segments(group) | 31}, {ALL_LANES};"
    return ptx(text, x, result=i32(), collective=True)


def warp_below(x: Lane, distance: int, group: int) -> Lane:
    """x of the lane `distance` lower; some x where that lies outside this lane's group."""
    text = f"shfl.sync.up.b32 $0, $1, {distance}, {_segments(group)}, {ALL_LANES};"
    return ptx(text, x, result=i32(), collective=True)


def _segments(group: int) -> int:
    """The part of a shuffle's control word that keeps it inside groups of lanes."""
    return (32 - group) << 8


def warp_xor(x: Lane, distance: int) -> Lane:
    """x of the lane whose number differs by the bits of `distance`."""
    text = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, {ALL_LANES};"
    return ptx(text, x, result=i32(), collective=True)


def warp_prefix_sum(x: Lane, lane: Lane) -> Lane:
    """Sum of x over this lane and the lower ones."""
    return warp_prefix_sums([x], lane)[0]


def warp_prefix_sums(xs: Sequence[Lane], lane: Lane) -> list[Lane]:
    """`warp_prefix_sum` of several values at once."""
    sums = list(xs)
    for distance in (1, 2, 4, 8, 16):
        below = [warp_below(x, distance, 32) for x in sums]
        sums = [where(lane >= distance, x + y, x) for x, y in zip(sums, below, strict=True)]
    return sums


# ---- control flow ----


@contextlib.contextmanager
def when(condition: Lane) -> Iterator[None]:
    """Runs the block where the predicate holds."""
    branch = scf.IfOp(condition.value)
    with ir.InsertionPoint(branch.then_block):
        yield
        scf.yield_([])


def choose(
    condition: Lane,
    types: Sequence[ir.Type],
    then: Callable[[], Sequence[Lane]],
    otherwise: Callable[[], Sequence[Lane]],
) -> tuple[Lane, ...]:
    """The values, of the given types, of the branch that runs."""
    branch = scf.IfOp(condition.value, list(types), has_else=True)
    for block, values in ((branch.then_block, then), (branch.else_block, otherwise)):
        with ir.InsertionPoint(block):
            scf.yield_([x.value for x in values()])
    return tuple(Lane(x) for x in branch.results)


def loop(
    start: Lane,
    stop: Lane,
    step: int,
    carry: Sequence[Lane],
    body: Callable[..., Sequence[Lane]],
) -> tuple[Lane, ...]:
    """`carry = body(i, *carry)` for i in range(start, stop, step)."""
    op = scf.ForOp(start.value, stop.value, int32(step).value, [x.value for x in carry])
    with ir.InsertionPoint(op.body):
        after = body(Lane(op.induction_variable), *(Lane(x) for x in op.inner_iter_args))
        scf.YieldOp([x.value for x in after])
    return tuple(Lane(x) for x in op.results)


def repeat_while(
    carry: Sequence[Lane], condition: Callable[..., Lane], body: Callable[..., Sequence[Lane]]
) -> tuple[Lane, ...]:
    """`while condition(*carry): carry = body(*carry)`."""
    types = [x.type for x in carry]
    op = scf.WhileOp(types, [x.value for x in carry])
    before = op.before.blocks.append(*types)
    with ir.InsertionPoint(before):
        goes_on = condition(*(Lane(x) for x in before.arguments))
        scf.condition(goes_on.value, before.arguments)
    after = op.after.blocks.append(*types)
    with ir.InsertionPoint(after):
        scf.yield_([x.value for x in body(*(Lane(x) for x in after.arguments))])
    return tuple(Lane(x) for x in op.results)


# ---- memory ----


class Words:
    """A place in global or shared memory, addressed in elements of 4 bytes."""

    def __init__(self, pointer: ir.Value) -> None:
        self.pointer = pointer

    @staticmethod
    def of(ref: Memory) -> Words:
        """The first word of a memory reference."""
        pointer = mgpu.utils.memref_ptr(ref)
        if llvm.PointerType(pointer.type).address_space != _SMEM:
            pointer = llvm.addrspacecast(llvm.PointerType.get(_GMEM), pointer)
        return Words(pointer)

    @property
    def shared(self) -> bool:
        return llvm.PointerType(self.pointer.type).address_space == _SMEM

    def __add__(self, words: Lane | int) -> Words:
        """The place `words` further on (in 64 bits for global memory)."""
        if isinstance(words, int):
            words = constant(words, i32() if self.shared else i64())
        elif not self.shared and words.type != i64():
            words = words.to_i64()
        return Words(mgpu.utils.getelementptr(self.pointer, [words.value], i32()))

    def load(self, of: ir.Type | None = None) -> Lane:
        """One element, a 32-bit integer unless said otherwise."""
        of = i32() if of is None else of
        return Lane(llvm.load(of, self.pointer, alignment=_bytes(of)))

    def load_vector(self, of: ir.Type, count: int) -> tuple[Lane, ...]:
        """`count` neighbouring elements in one aligned access."""
        vector = ir.VectorType.get((count,), of)
        found = llvm.load(vector, self.pointer, alignment=_bytes(of) * count)
        return tuple(Lane(llvm.extractelement(found, int32(i).value)) for i in range(count))

    def store(self, value: Lane) -> None:
        llvm.store(value.value, self.pointer, alignment=_bytes(value.type))

    def store_vector(self, values: Sequence[Lane]) -> None:
        """Stores neighbouring elements in one aligned access."""
        of = values[0].type
        vector = llvm.mlir_undef(ir.VectorType.get((len(values),), of))
        for i, value in enumerate(values):
            vector = llvm.insertelement(vector, value.value, int32(i).value)
        llvm.store(vector, self.pointer, alignment=_bytes(of) * len(values))

    def atomic_add(self, value: Lane) -> Lane:
        """Adds and returns what was there."""
        return Lane(
            llvm.atomicrmw(
                llvm.AtomicBinOp.add, self.pointer, value.value, llvm.AtomicOrdering.monotonic
            )
        )


def load_fresh(place: Words) -> Lane:
    """A 32-bit integer from global memory, never from this SM's cache.

    What was read as a hint before the kernel before this one ended may have changed since.
    """
    return ptx("ld.relaxed.gpu.global.b32 $0, [$1];", Lane(place.pointer), result=i32())


def store_where(place: Words, value: Lane, wanted: Lane) -> None:
    """Stores a float32 in global memory where it is wanted."""
    ptx("@$2 st.global.f32 [$0], $1;", Lane(place.pointer), value, wanted)


def copy(
    place: Words, source: Words, words: int, wanted: Lane | None = None, further: int = 0
) -> None:
    """Starts copying 1 or 4 aligned words from global to shared memory (where they are wanted).

    They are `further` words beyond `source`, and come as far beyond `place`. Four words, a chunk of
    what is read once, leave the L2 cache first.
    """
    guard = "" if wanted is None else "@$2 "
    operands = [Lane(place.pointer), Lane(source.pointer), *([] if wanted is None else [wanted])]
    addresses = f"[$0+{4 * further}], [$1+{4 * further}], {4 * words}"
    if words == 1:
        ptx(f"{guard}cp.async.ca.shared.global {addresses};", *operands)
        return
    hinted = f"{guard}cp.async.cg.shared.global.L2::cache_hint {addresses}, policy;"
    ptx(with_policy(EVICT_FIRST, hinted), *operands)


def with_policy(policy: int, text: str) -> str:
    """PTX with a cache policy in the register `policy`."""
    return f"{{ .reg .b64 policy; mov.b64 policy, {policy:#x}; {text} }}"


def await_copies() -> None:
    """Waits for this thread's copies; others see them after a barrier."""
    ptx("cp.async.wait_all;")


def _bytes(of: ir.Type) -> int:
    return mgpu.utils.bitwidth(of) // 8
