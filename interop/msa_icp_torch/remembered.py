"""Calls that were checked once, found again without their checks."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from msa_icp_torch.bridge import Span, check_tensor, find_overlap, span_of, spans_of

if TYPE_CHECKING:  # importing Pallas takes a while, and the dlpack route launches nothing itself
    from msa_icp_jax.ops._mosaic.aot import Launches

_MOST = 4096  # calls: every layer's cache, in three slots, for many batches
_ALIGNMENT = 16  # bytes: what the kernels' vector loads and bulk copies ask of a buffer


class RememberedCalls:
    """Launches of earlier decodes, by their index keys, comm, shapes and options.

    The dlpack route remembers calls with no launches: that they were checked is all it wants.
    A call's owners are its tensors in the order of `MSAIcpIndexerPlan.decode` (None for a plane or
    a pool that is not there) and its comm. A call is forgotten when its index keys or comm go,
    before another object can have that one's id; of its tensors only a pool is kept alive.
    """

    def __init__(self, most: int = _MOST, alignment: int = _ALIGNMENT) -> None:
        """Remembers `most` calls; a tensor in another's place starts at an `alignment` of bytes."""
        self._most = most
        self._alignment = alignment
        self._calls: dict[tuple[Any, ...], _Remembered] = {}

    def find(self, owners: tuple[Any, ...], options: tuple[Any, ...]) -> Launches | None:
        """Launches for these owners, where an earlier call had others of the same kind."""
        key = _key(owners, options)
        call = self._calls.get(key)
        if call is None or owners[-1].place() != call.place:
            return None
        tensors = call.tensors_of(owners)
        try:
            contiguous, addresses = [*map(_is_contiguous, tensors)], [*map(_address, tensors)]
        except RuntimeError:  # a sparse tensor has neither
            return None
        if contiguous != call.contiguous:
            return None
        if addresses != call.addresses or not all(map(_is, tensors, [x() for x in call.known])):
            call = call.rebound(tensors, addresses, self._alignment)
            if call is None:
                return None
            self._calls[key] = call
        return call.launches

    def remember(
        self,
        owners: tuple[Any, ...],
        options: tuple[Any, ...],
        launches: Launches,
        by_address: bool,
    ) -> None:
        """Remembers the launches of a call whose owners are checked.

        Args:
          owners, options: as `find` gets them.
          launches: what the call launches.
          by_address: whether they have the tensors as addresses alone, which can be exchanged.
        """
        if len(self._calls) >= self._most:
            self._calls.clear()
        key, calls = _key(owners, options), self._calls

        def forget(_: Any) -> None:
            calls.pop(key, None)

        *others, comm = owners
        tensors_of = operator.itemgetter(*(i for i, x in enumerate(others) if x is not None))
        tensors = tensors_of(owners)
        addresses = [*map(_address, tensors)]
        fixed = [*map(_address, comm.parts)]
        distinct = len({*addresses, *fixed}) == len(addresses) + len(fixed)
        calls[key] = _Remembered(
            tensors_of,
            comm.place(),
            [weakref.ref(owner, forget) for owner in (owners[_INDEX_K], comm)],
            [x.dtype for x in tensors],
            [*map(_is_contiguous, tensors)],
            _places(addresses, launches) if by_address and distinct else None,
            spans_of(comm.written(), comm.read()),
            addresses,
            [*map(_span, range(len(tensors)), tensors)],
            [*map(weakref.ref, tensors)],
            launches,
        )


class _Remembered(NamedTuple):
    """A call; the last four fields change with its tensors.

    Attributes:
      tensors_of: takes the tensors out of the owners.
      place: of the comm.
      watched: the owners that it goes with.
      dtypes: of the tensors.
      contiguous: which of the tensors are.
      places: of each tensor's address, as (launch, argument); None: they cannot be exchanged.
      comm_spans: the memory of the comm.
      addresses: of the tensors.
      spans: the memory of the tensors.
      known: the tensors, which are checked.
      launches: what is launched.
    """

    tensors_of: Callable[[tuple[Any, ...]], tuple[torch.Tensor, ...]]
    place: Any
    watched: list[weakref.ref[Any]]
    dtypes: list[torch.dtype]
    contiguous: list[bool]
    places: list[list[tuple[int, int]]] | None
    comm_spans: list[Span]
    addresses: list[int]
    spans: list[Span]
    known: list[weakref.ref[torch.Tensor]]
    launches: Launches

    def rebound(
        self, tensors: tuple[torch.Tensor, ...], addresses: list[int], alignment: int
    ) -> _Remembered | None:
        """The call with other tensors of the same shapes; None where it needs all its checks.

        The comm is the one of the call. What stayed is not looked at again.
        """
        if self.places is None:
            return None
        device = tensors[_INDEX_K].device
        known, spans = [*self.known], [*self.spans]
        for i, tensor in enumerate(tensors):
            if tensor is known[i]() and addresses[i] == self.addresses[i]:
                continue
            if i == _INDEX_K or self.dtypes[i] == _POOL_DTYPE or addresses[i] % alignment:
                return None
            try:
                check_tensor("", tensor, self.dtypes[i], device, *tensor.shape)
            except (TypeError, ValueError):  # with all its checks the call says what is wrong
                return None
            known[i], spans[i] = weakref.ref(tensor), _span(i, tensor)
        if find_overlap([*self.comm_spans, *spans]):
            return None
        launches = [*self.launches]
        for places, address, old in zip(self.places, addresses, self.addresses, strict=True):
            for step, place in places if address != old else ():
                launcher, kernel, arguments = launches[step]
                arguments = type(arguments).from_buffer_copy(arguments)
                arguments[place] = address
                launches[step] = launcher, kernel, arguments
        return self._replace(addresses=addresses, spans=spans, known=known, launches=launches)


_INDEX_K, _INPUTS = 1, 5  # the place of the index keys among owners; how many of them are read
_POOL_DTYPE = torch.uint8  # of a pool alone, which the step that clears it holds
_address, _size, _is = torch.Tensor.data_ptr, torch.Tensor.size, operator.is_
_is_contiguous = torch.Tensor.is_contiguous


def _span(i: int, tensor: torch.Tensor) -> Span:
    """The memory of the i-th tensor of a call."""
    return span_of(tensor, "", is_written=i >= _INPUTS)


def _key(owners: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Any, ...]:
    """What tells calls apart; empty where an owner is no tensor, or one without a size."""
    *tensors, comm = owners
    try:
        sizes = [None if x is None else _size(x) for x in tensors]
    except (TypeError, RuntimeError):
        return ()
    return (id(owners[_INDEX_K]), id(comm), *sizes, *options)


def _places(addresses: list[int], launches: Launches) -> list[list[tuple[int, int]]]:
    """Where each address stands among the launches' arguments, as (launch, argument)."""
    places: dict[int, list[tuple[int, int]]] = {address: [] for address in addresses}
    for step, (_, kernel, arguments) in enumerate(launches):
        for place, address in enumerate(arguments if kernel is not None else ()):
            places.get(address, []).append((step, place))
    return [places[address] for address in addresses]
