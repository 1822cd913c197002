"""Calls that were checked once, found again without their checks.

A decode costs the host its launches and what is looked at before them. Of a call like an earlier
one that is: the tensors' form (dtype, sizes, strides) in one look, every address, and no more.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self

import torch

from msa_icp_torch.bridge import span_of, spans_of

_MOST = 4096  # calls: every layer's cache, in three slots, for many batches
_SETTLED = 3  # calls on end whose queries lie in the same new place, before it is the call's
_ALIGNMENT = 16  # bytes: what the kernels' vector loads and bulk copies ask of a buffer
_INDEX_K, _INPUTS = 1, 5  # the place of the index keys among owners; how many of them are read
_POOL_DTYPE = torch.uint8  # of a pool alone, which the step that clears it holds
_Span = tuple[int, int, bool]  # [start, end) in memory, and whether it is written
_address, _is = torch.Tensor.data_ptr, operator.is_


class Bound(Protocol):
    """What a route made of a call's tensors, of which it keeps only a pool alive."""

    def moved(self, changed: Mapping[int, torch.Tensor]) -> Self | None:
        """The same with these tensors in the old ones' stead; None where that cannot be.

        Args:
          changed: by the place among the call's tensors.
        """

    def with_queries(self, address: int) -> Self | None:
        """The same for one call whose queries lie there; None where that cannot be.

        It is not asked for of calls that are told apart by the tensor objects.
        """


class RememberedCalls:
    """What earlier decodes were bound to, by their index keys, comm, tokens and options.

    A call's owners are its tensors in the order of `MSAIcpIndexerPlan.decode` (None for a plane or
    a pool that is not there) and its comm. A call is forgotten when its index keys or comm go,
    before another object can have that one's id; of its tensors only a pool is kept alive.
    """

    def __init__(
        self, most: int = _MOST, alignment: int = _ALIGNMENT, *, by_object: bool = False
    ) -> None:
        """Remembers `most` calls; a tensor in another's place starts at an `alignment` of bytes.

        Args:
          by_object: another tensor object in the same memory counts as moved.
        """
        self._most = most
        self._alignment = alignment
        self._by_object = by_object
        self._calls: dict[tuple[Any, ...], list[_Remembered]] = {}

    def find(self, owners: tuple[Any, ...], options: tuple[Any, ...]) -> Any | None:
        """What these owners are bound to, where an earlier call had others of the same kind."""
        calls = self._calls.get(_key(owners, options))
        if calls is None:
            return None
        call = calls[0]
        try:
            tensors = call.tensors_of(owners)
            place = _place(tensors, owners[-1].parts)
            if place == call.place and call.alike(*tensors):
                if not self._by_object or call.knows(tensors):
                    return call.bound
            else:
                if not self._by_object and place[1:] == call.place[1:]:
                    bound = call.once(tensors, place[0], self._alignment)
                    if bound is not None:
                        return bound
                if not call.is_alike(tensors, place):
                    return self._find_behind(calls, owners)
        except (TypeError, RuntimeError):  # no tensor, or one without a place
            return self._find_behind(calls, owners)
        return self._rebind(calls, call, tensors, place)

    def _find_behind(self, calls: list[_Remembered], owners: tuple[Any, ...]) -> Any | None:
        """What the owners are bound to where they are like a call behind the first."""
        for i in range(1, len(calls)):
            call = calls[i]
            try:
                tensors = call.tensors_of(owners)
                place = _place(tensors, owners[-1].parts)
                found = call.is_alike(tensors, place)
            except (TypeError, RuntimeError):
                continue
            if found:
                calls[:] = [call, *calls[:i], *calls[i + 1 :]]
                return self._rebind(calls, call, tensors, place)
        return None

    def _rebind(
        self,
        calls: list[_Remembered],
        call: _Remembered,
        tensors: tuple[torch.Tensor, ...],
        place: list[int],
    ) -> Any | None:
        """Puts the call with these tensors first, and returns what they are bound to."""
        rebound = call.rebound(tensors, place, self._alignment, self._by_object)
        if rebound is None:
            return None
        calls[0] = rebound
        return rebound.bound

    def remember(self, owners: tuple[Any, ...], options: tuple[Any, ...], bound: Bound) -> None:
        """Remembers what the checked owners of a call were bound to."""
        if sum(map(len, self._calls.values())) >= self._most:
            self._calls.clear()
        key, calls = _key(owners, options), self._calls

        def forget(_: Any) -> None:
            calls.pop(key, None)

        *others, comm = owners
        tensors_of = operator.itemgetter(*(i for i, x in enumerate(others) if x is not None))
        tensors = tensors_of(owners)
        forms = [*map(_form, tensors)]
        comm_spans = spans_of(comm.written(), comm.read())
        call = _Remembered(
            tensors_of,
            [weakref.ref(owner, forget) for owner in (owners[_INDEX_K], comm)],
            forms,
            _look_for(tensors, forms),
            [(start, end, is_written) for start, end, _, is_written in comm_spans],
            _place(tensors, comm.parts),
            _spans(tensors),
            [*map(weakref.ref, tensors)],
            bound,
        )
        alike = calls.get(key, [])
        calls[key] = [call, *(x for x in alike if x.forms != forms)]


class _Remembered:
    """A call.

    Attributes:
      tensors_of: takes the tensors out of the owners.
      watched: the owners that it goes with.
      forms: of the tensors.
      alike: whether tensors have these forms, in torch's mode at the time.
      comm_spans: the memory of the comm.
      place: of the tensors and the comm.
      spans: the memory of the tensors.
      known: the tensors.
      bound: what they are bound to.
      written: the memory of both that is written.
      newest, times: where the last queries lay that were others, and how often on end.
    """

    __slots__ = (
        "alike",
        "bound",
        "comm_spans",
        "forms",
        "known",
        "newest",
        "place",
        "spans",
        "tensors_of",
        "times",
        "watched",
        "written",
    )

    def __init__(
        self,
        tensors_of: Callable[[tuple[Any, ...]], tuple[torch.Tensor, ...]],
        watched: list[weakref.ref[Any]],
        forms: list[Any],
        alike: Callable[..., bool],
        comm_spans: list[_Span],
        place: list[int],
        spans: list[_Span],
        known: list[weakref.ref[torch.Tensor]],
        bound: Bound,
    ) -> None:
        self.tensors_of = tensors_of
        self.watched = watched
        self.forms = forms
        self.alike = alike
        self.comm_spans = comm_spans
        self.place = place
        self.spans = spans
        self.known = known
        self.bound = bound
        self.written = [(start, end) for start, end, is_written in spans + comm_spans if is_written]
        self.newest = -1
        self.times = 0

    def is_alike(self, tensors: tuple[torch.Tensor, ...], place: list[int]) -> bool:
        """Whether tensors have the forms, in whatever mode.

        Those in other places are asked one by one: a look ends the process at a nested tensor.
        """
        forms = self.forms
        for i, tensor in enumerate(tensors):
            if place[i] != self.place[i] and _form(tensor) != forms[i]:
                return False
        if self.alike(*tensors):
            return True
        if [*map(_form, tensors)] != forms:
            return False
        self.alike = _look_for(tensors, forms)
        return True

    def once(self, tensors: tuple[torch.Tensor, ...], start: int, alignment: int) -> Any | None:
        """What these tensors are bound to, where only the queries are others, for this call alone.

        None where they need more checks, or came a few times on end: then they come again.
        """
        self.newest, times = start, self.times + 1 if start == self.newest else 1
        self.times = times
        if times > _SETTLED or not start or start % alignment or tensors[0].is_nested:
            return None
        if not self.alike(*tensors):
            return None
        old_start, old_end, _ = self.spans[0]
        end = start + old_end - old_start
        for other_start, other_end in self.written:
            if other_start < end and start < other_end:
                return None
        if not _is_inside_storage(tensors[0], end - start):
            return None
        return self.bound.with_queries(start)

    def knows(self, tensors: tuple[torch.Tensor, ...]) -> bool:
        """Whether these are the very tensors."""
        return all(map(_is, tensors, [known() for known in self.known]))

    def rebound(
        self, tensors: tuple[torch.Tensor, ...], place: list[int], alignment: int, by_object: bool
    ) -> _Remembered | None:
        """The call with other tensors of the same forms; None where it needs all its checks."""
        if place[len(tensors) :] != self.place[len(tensors) :]:  # the comm is another
            return None
        known, spans = [*self.known], [*self.spans]
        changed = {}
        for i, tensor in enumerate(tensors):
            start = place[i]
            if start == self.place[i] and (not by_object or tensor is known[i]()):
                continue
            old_start, old_end, is_written = spans[i]
            end = start + old_end - old_start
            if i == _INDEX_K or tensor.dtype is _POOL_DTYPE or not start or start % alignment:
                return None
            if not _is_inside_storage(tensor, end - start):
                return None
            changed[i], known[i] = tensor, weakref.ref(tensor)
            spans[i] = start, end, is_written
        if not all(_is_apart(i, spans, self.comm_spans) for i in changed):
            return None
        bound = self.bound.moved(changed) if changed else self.bound
        if bound is None:
            return None
        watched, comm_spans = self.watched, self.comm_spans
        form = self.tensors_of, watched, self.forms, self.alike, comm_spans
        return _Remembered(*form, place, spans, known, bound)


def _key(owners: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Any, ...]:
    """What tells calls apart whose tensors may be of one form."""
    return id(owners[_INDEX_K]), id(owners[-1]), owners[-2] is None, options


def _place(tensors: tuple[torch.Tensor, ...], parts: tuple[torch.Tensor, ...]) -> list[int]:
    """What changes when a tensor or a part of the comm moves, or the bases are written to."""
    return [*map(_address, tensors + parts), parts[-2]._version, parts[-1]._version]


# ---- memory ----


def _spans(tensors: tuple[torch.Tensor, ...]) -> list[_Span]:
    spans = [span_of(x, "", is_written=i >= _INPUTS) for i, x in enumerate(tensors)]
    return [(start, end, is_written) for start, end, _, is_written in spans]


def _is_inside_storage(tensor: torch.Tensor, size: int) -> bool:
    """Whether a contiguous tensor of this many bytes lies in its storage, which may have shrunk."""
    start = tensor.storage_offset() * tensor.dtype.itemsize
    return not size or bool(start + size <= tensor.untyped_storage().nbytes())


def _is_apart(i: int, spans: list[_Span], comm_spans: list[_Span]) -> bool:
    """Whether the i-th tensor meets no other, or meets it where both are read."""
    start, end, is_written = spans[i]
    for other in (*spans[:i], *spans[i + 1 :], *comm_spans):
        if other[0] < end and start < other[1] and (is_written or other[2]):
            return start == end or other[0] == other[1]
    return True


# ---- forms ----


def _form(tensor: Any) -> tuple[Any, ...]:
    """What kernels and checks want to know of a tensor besides its place; () of anything else."""
    if not isinstance(tensor, torch.Tensor):
        return ()
    return (
        tensor.dtype,
        tensor.device,
        tensor.shape,
        tensor.stride(),
        tensor.layout,
        tensor.is_nested,
        tensor.requires_grad,
        tensor.is_neg(),
    )


def _public_look_for(
    tensors: tuple[torch.Tensor, ...], forms: list[tuple[Any, ...]]
) -> Callable[..., bool]:
    return lambda *others: [*map(_form, others)] == forms


def _guarded_look_for(
    tensors: tuple[torch.Tensor, ...], forms: list[tuple[Any, ...]]
) -> Callable[..., bool]:
    """By the guards of `torch.compile`: one call, where forms take some twenty for each tensor.

    They tell inference mode from other modes, too.
    """
    from torch._C._dynamo.guards import TensorGuards  # not public

    # A list for each tensor, which torch's stub does not say.
    sizes: Any = [list(form[2]) for form in forms]
    strides: Any = [list(form[3]) for form in forms]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def _find_look() -> Callable[..., Callable[..., bool]]:
    """The guarded look where this torch's guards do as they are expected to, else the public."""
    made = torch.zeros(2, 2, device="cpu"), torch.zeros(2, dtype=torch.int32, device="cpu")
    one, other = made
    wrong = (one.t()[:1], other), (one[:1], other), (one, one[0]), (one, None)
    try:
        look = _guarded_look_for(made, [*map(_form, made)])
        right = look(one.clone(), other.clone()) and not any(look(*pair) for pair in wrong)
    except (ImportError, AttributeError, TypeError, RuntimeError, ValueError):
        right = False
    return _guarded_look_for if right else _public_look_for


_look_for = _find_look()
