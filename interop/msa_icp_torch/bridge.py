"""Tensors between torch and JAX by DLPack: checks, imports without a copy, results in place.

Order on a GPU. One call of `Bridge.fresh` or `Bridge.only`, after all else that a program takes was
made, lets the program wait for everything that torch's current stream was given before it: JAX's
stream waits where it is known, the import's users where it is not. Imports by `Bridge.kept` and
those of a `Shared`, which a program may write, order nothing. `Bridge.order_after` and
`Bridge.deliver` make the current stream wait for the program, so later torch work (which may
overwrite the inputs) comes after it. The host never waits.

On the CPU torch runs everything at once, `Bridge.deliver` waits for the program, and an import may
be kept even of what the program writes: it is copied back.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
import torch

from msa_icp_jax import checks
from msa_icp_jax.ambient import own_mesh
from msa_icp_jax.checks import Entry
from msa_icp_torch.crossing import find_crossing

T = TypeVar("T")

# What JAX asks of an argument's address, in bytes: XLA on a CPU, Mosaic kernels on a GPU.
_ALIGNMENT = {"cpu": 64, "cuda": 256}
_JAX_DTYPES = {
    torch.int32: np.dtype(np.int32),
    torch.float32: np.dtype(np.float32),
    torch.float8_e4m3fn: np.dtype(jax.numpy.float8_e4m3fn),
    torch.bfloat16: np.dtype(jax.numpy.bfloat16),
}


# ---- checks: before anything is written ----


def check_tensor(
    name: str,
    value: Any,
    dtype: torch.dtype,
    device: torch.device,
    *shape: Entry,
    contiguous: bool = True,
    origin: str = "",
) -> None:
    """Raises, naming the argument, unless `value` can cross; a shape entry None allows any size.

    `origin` is where dtype or shape come from, in words.
    """

    def want() -> str:
        spec = f"{dtype} tensor of shape [{checks.sizes(shape)}]"
        return f"{name} must be a {spec}{origin and f' ({origin})'} on {device}"

    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{want()}, got {type(value).__name__}")
    if value.layout != torch.strided or value.is_nested:
        kind = "a nested one" if value.is_nested else f"layout {value.layout}"
        raise TypeError(f"{want()}, got {kind}")
    if value.dtype != dtype:
        raise TypeError(f"{want()}, got {value.dtype}")
    if value.device != device:
        raise TypeError(f"{want()}, got one on {value.device}")
    if value.requires_grad:
        raise TypeError(f"{name} must not require grad; pass {name}.detach()")
    if value.is_conj() or value.is_neg():
        raise TypeError(
            f"{name} must not carry a conjugate or negative bit; resolve it with "
            "resolve_conj() or resolve_neg()"
        )
    if not checks.fits(value.shape, shape):
        misfit = checks.axis_misfit(value.shape, shape)
        raise ValueError(f"{want()}, got shape {list(value.shape)}{misfit}")
    if contiguous and not value.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tuple(value.stride())}")
    end, size = _end_in_storage(value), value.untyped_storage().nbytes()
    if end > size:
        raise ValueError(
            f"{name} must lie in its storage, which was freed or shrunk: it ends at byte {end} of "
            f"{size}"
        )
    if value.numel() and not value.data_ptr():
        raise TypeError(f"{want()}, got a {type(value).__name__} without memory")


def check_apart(written: Mapping[str, torch.Tensor], read: Mapping[str, torch.Tensor]) -> None:
    """Raises where the bytes of a written tensor meet those of another argument."""
    found = find_overlap(spans_of(written, read))
    if found:
        one, other = found
        raise ValueError(f"{one} is written and must not overlap {other} in memory")


class Span(NamedTuple):
    """The addresses [start, end) that a tensor's elements lie in."""

    start: int
    end: int
    name: str
    is_written: bool


def span_of(tensor: torch.Tensor, name: str, *, is_written: bool) -> Span:
    """Where a tensor lies."""
    start = tensor.data_ptr()
    return Span(start, start + _extent(tensor), name, is_written)


def spans_of(written: Mapping[str, torch.Tensor], read: Mapping[str, torch.Tensor]) -> list[Span]:
    """Where tensors lie, by their names."""
    spans = [span_of(tensor, name, is_written=True) for name, tensor in written.items()]
    return spans + [span_of(tensor, name, is_written=False) for name, tensor in read.items()]


def find_overlap(spans: Iterable[Span]) -> tuple[str, str] | None:
    """The names of a written span and of one that it meets; None where there are none."""
    # By ascending start, the spans met so far of either kind that reach farthest.
    written_to = read_to = 0
    last_written = last_read = ""
    for start, end, name, is_written in sorted(spans):
        if start == end:
            continue
        if start < written_to:
            return last_written, name
        if is_written:
            if start < read_to:
                return name, last_read
            written_to, last_written = end, name
        elif end > read_to:
            read_to, last_read = end, name
    return None


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if tensor.is_contiguous():
        return tensor.nbytes
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (last + 1) * tensor.element_size()


def _end_in_storage(tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    return int(tensor.storage_offset()) * tensor.element_size() + _extent(tensor)


# ---- the bridge ----


class _Kept(NamedTuple):
    """An import of an earlier call, valid while its tensor lives and lies where it lay."""

    owner: weakref.ref[torch.Tensor]
    place: tuple[Any, ...]
    value: Any


class Bridge:
    """Moves the tensors of one torch device to the same device of JAX, and results back.

    Attributes:
      device: the torch device, with its index.
      jax_device: the same device in JAX.
      donates: whether JAX programs write into donated imports. On the CPU they do not (XLA gives a
        donated import a new buffer there), so results are copied back.
      alignment: what JAX asks of an address, in bytes.
    """

    def __init__(self, device: torch.device) -> None:
        """Starts JAX's backend.

        Raises:
          TypeError, ValueError: not a torch device, or neither cpu nor cuda.
          RuntimeError: JAX does not have this device, or this torch cannot export float8.
        """
        self.device = with_index(device)
        self.jax_device = _find_jax_device(self.device)
        self.donates = self.device.type != "cpu"
        self.alignment = _ALIGNMENT[self.device.type]
        self._kept: dict[int, _Kept] = {}
        self._crossing = find_crossing(self.device, self.jax_device)
        _require_float8_export()

    def fresh(self, *tensors: torch.Tensor) -> list[jax.Array]:
        """Imports contiguous tensors, behind the current stream's work, for one program.

        A tensor whose address JAX cannot take is copied first.
        """
        there = [x if x.numel() == 0 or self.aligned(x) else x.clone() for x in tensors]
        ordered, found = True, []
        for tensor in there:
            found.append(self._import(tensor, ordered=ordered))
            ordered = ordered and tensor.numel() == 0
        return found

    def only(self, shared: Shared) -> jax.Array:
        """A program's only tensor that orders it, as `fresh` does.

        Where the order does not take an import, the one of an earlier call is used again.
        """
        if shared.lasts and (not self.donates or self._crossing.order()):
            return shared.get()
        assert shared.tensor is not None  # its owner is an argument of this call
        return self.fresh(shared.tensor)[0]

    def unordered(self, tensor: torch.Tensor) -> jax.Array:
        """Imports a tensor, or a copy, for a program that another one's `fresh` orders."""
        if tensor.numel() and not self.aligned(tensor):
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        return self._import(tensor, ordered=False)

    def _import(self, tensor: torch.Tensor, *, ordered: bool) -> jax.Array:
        if tensor.numel() == 0:  # DLPack loses memory on these
            empty = np.zeros(tuple(tensor.shape), _JAX_DTYPES[tensor.dtype])
            return jax.device_put(empty, self.jax_device)
        array = self._crossing.take(tensor, ordered=ordered)
        if array.unsafe_buffer_pointer() != tensor.data_ptr():
            raise RuntimeError(
                f"JAX copied a {tensor.dtype} tensor of shape {list(tensor.shape)} instead of "
                "sharing its memory"
            )
        return array

    def kept(self, tensor: torch.Tensor) -> jax.Array:
        """The import of a tensor that earlier calls brought too; it orders nothing."""
        if tensor.numel() == 0 or not self.aligned(tensor):
            return self.fresh(tensor)[0]
        return self.remember(tensor, lambda: self.fresh(tensor)[0])

    def remember(self, tensor: torch.Tensor, make: Callable[[], T], *more: Any) -> T:
        """What `make` made of `tensor` (and of `more`), kept while the tensor object lives.

        An import holds its storage, so while it is kept no other tensor can get that address; it
        goes with the caller's tensor object, so it never holds memory that the caller gave up.
        """
        key = id(tensor)
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, *more)
        entry = self._kept.get(key)
        if entry is not None and entry.owner() is tensor and entry.place == place:
            return entry.value
        kept = self._kept
        owner = weakref.ref(tensor, lambda _: kept.pop(key, None))
        value = make()
        kept[key] = _Kept(owner, place, value)
        return value

    def check_written(self, name: str, tensor: torch.Tensor) -> None:
        """Raises unless a JAX program can write into `tensor`."""
        if self.donates and not self.aligned(tensor):
            raise ValueError(
                f"{name} must start at a multiple of {self.alignment} bytes, got "
                f"address {tensor.data_ptr():#x}"
            )

    def aligned(self, tensor: torch.Tensor) -> bool:
        """Whether JAX takes the tensor's address."""
        return tensor.data_ptr() % self.alignment == 0

    def deliver(self, results: Mapping[str, tuple[torch.Tensor, jax.Array]]) -> None:
        """Leaves a program's results in the caller's tensors, and the current stream behind it.

        On a GPU they are there already. Only a tensor whose address JAX cannot take, a slot of the
        receive storage, was imported as a copy, which goes back now.

        Args:
          results: by argument name, the caller's tensor and the array that replaces it.

        Raises:
          RuntimeError: on a GPU, a result lies elsewhere than its tensor.
        """
        arrays = [array for _, array in results.values()]
        self.order_after(arrays)
        aside = []
        for name, (tensor, array) in results.items():
            if tensor.numel() == 0 or array.unsafe_buffer_pointer() == tensor.data_ptr():
                continue
            if self.donates and self.aligned(tensor):
                raise RuntimeError(f"JAX did not write {name} in place")
            aside.append((tensor, array))
        self._copy_back(aside)

    def shared(
        self,
        name: str,
        owner: torch.Tensor,
        view: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
        *more: Any,
    ) -> Shared:
        """A tensor, or a view of it (told apart by `more`), that programs of many calls share."""
        return self.remember(owner, lambda: Shared(self, name, owner, view(owner)), name, *more)

    def settle(self, results: Iterable[tuple[Shared, jax.Array]]) -> None:
        """Leaves a program's results in the tensors that they replace: see `deliver`.

        It orders nothing.
        """
        aside = []
        for shared, array in results:
            if not shared.put(array):
                assert shared.tensor is not None
                aside.append((shared.tensor, array))
        self._copy_back(aside)

    def _copy_back(self, aside: list[tuple[torch.Tensor, jax.Array]]) -> None:
        if not aside:
            return
        with torch.inference_mode():  # the caller's tensors may be inference tensors
            for tensor, array in aside:
                tensor.copy_(self._crossing.give(array))

    def export(self, array: jax.Array) -> torch.Tensor:
        """A program's result as a tensor over the same memory, behind the program."""
        if not self.donates:
            jax.block_until_ready(array)
        return self._crossing.give(array)

    def order_after(self, arrays: list[jax.Array]) -> None:
        """Makes the current stream wait for the program that gave `arrays`; on a CPU, the host."""
        if not self.donates:
            jax.block_until_ready(arrays)
            return
        some = next((array for array in arrays if array.size), None)
        if some is not None:
            self._crossing.order_after(some)

    def guard(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which calls run: on one device, whatever mesh is ambient in JAX.

        DLPack exports only from torch's current device.
        """
        if not self.donates or torch._C._cuda_getDevice() == self.device.index:
            return own_mesh(None)
        contexts = contextlib.ExitStack()
        contexts.enter_context(own_mesh(None))
        contexts.enter_context(torch.cuda.device(self.device))
        return contexts


class Shared:
    """A tensor in JAX, as programs of many calls take it: imported once, while its owner lives.

    What a program writes is donated; its result, an array over the same memory, is what the next
    one takes. Where JAX does not take the tensor's address, every program gets a copy.

    Attributes:
      tensor: what is shared, an alias of the owner or a view of it; None once the owner is gone.
      lasts: whether an import of it serves all programs.
    """

    def __init__(
        self, bridge: Bridge, name: str, owner: torch.Tensor, tensor: torch.Tensor
    ) -> None:
        """Imports nothing yet; `tensor` must not keep its owner: an alias, or a view of one."""
        self.tensor: torch.Tensor | None = tensor
        self._bridge = bridge
        self._name = name
        self._address = tensor.data_ptr()
        self.lasts = tensor.numel() > 0 and bridge.aligned(tensor)
        self._arrays: list[jax.Array] = []  # one at most, which a single thread can pop
        me = weakref.ref(self)
        # At the interpreter's end a module's names go before tensors do: nothing is looked up then.
        self._owner = weakref.ref(owner, functools.partial(_clear, me))

    def get(self) -> jax.Array:
        """The array, for a program that reads it; it orders nothing."""
        for array in self._arrays:
            return array
        array = self._import()
        if self.lasts:
            self._arrays[:] = [array]
        return array

    def lend(self) -> jax.Array:
        """The array, for a program that writes it, whose result goes to `Bridge.settle`."""
        if not self._bridge.donates:
            return self.get()
        try:
            return self._arrays.pop()
        except IndexError:
            return self._import()

    def put(self, array: jax.Array) -> bool:
        """Takes a program's result where it lies in the tensor already; whether it does.

        Raises:
          RuntimeError: it should, and does not.
        """
        if not self.lasts:
            return self.tensor is None or self.tensor.numel() == 0
        if array.unsafe_buffer_pointer() == self._address:
            self._arrays[:] = [array]
            return True
        if self._bridge.donates:
            raise RuntimeError(f"JAX did not write {self._name} in place")
        return False

    def clear(self) -> None:
        """Lets go of the memory."""
        self.tensor = None
        self._arrays.clear()

    def _import(self) -> jax.Array:
        assert self.tensor is not None  # its owner is an argument of this call
        return self._bridge.unordered(self.tensor)


def _clear(shared: weakref.ref[Shared], _: object) -> None:
    found = shared()
    if found is not None:
        found.clear()


def is_capturing(device: torch.device) -> bool:
    """Whether torch's current stream is being captured into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def with_index(device: Any) -> torch.device:
    """A cpu or cuda device, or its string, as a device; the latter with its index.

    Raises:
      TypeError, ValueError: it is no torch device and no string of one, or one of another type.
    """
    if isinstance(device, str):
        try:
            device = torch.device(device)
        except RuntimeError:  # torch's is a page of device types
            raise ValueError(f"device must be cpu or cuda, got {device!r}") from None
    if not isinstance(device, torch.device):
        raise TypeError(f"device must be a torch.device or its string, got {type(device).__name__}")
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ValueError(f"device must be cpu or cuda, got {device}")
    return device if device.index is not None else torch.device("cuda", _current_cuda_index())


def check_present(device: torch.device) -> None:
    """Raises for a GPU that this torch does not find."""
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if count == 0:
        raise RuntimeError(
            f"device {device} needs a GPU, and torch {torch.__version__} finds none here "
            '(torch.cuda.device_count() is 0): pass device="cpu", or see to driver and torch build'
        )
    if device.type == "cuda" and not 0 <= device.index < count:
        raise ValueError(f"device must be one of torch's {count} GPUs, from cuda:0, got {device}")


def _current_cuda_index() -> int:
    return torch.cuda.current_device() if torch.cuda.is_available() else 0


def _find_jax_device(device: torch.device) -> jax.Device:
    """JAX's name for a torch device, or an error that says why there is none."""
    rocm = device.type == "cuda" and is_rocm()  # torch calls AMD's GPUs cuda, too
    platform = "rocm" if rocm else device.type
    try:
        devices = jax.local_devices(backend=platform)
    except (RuntimeError, AssertionError) as error:  # the latter where JAX_PLATFORMS has none
        reason = str(error) or f"none of JAX_PLATFORMS={jax.config.jax_platforms} is there"
        raise RuntimeError(
            f"JAX has no {platform} backend for device {device}: {reason}. "
            + (_ROCM_ADVICE if rocm else _cuda_advice())
        ) from error
    for candidate in devices:
        if candidate.local_hardware_id == (device.index or 0):
            return candidate
    raise RuntimeError(f"JAX does not see device {device}, only {devices}")


def is_rocm() -> bool:
    """Whether this torch is one for AMD's GPUs."""
    return torch.version.hip is not None


_ROCM_ADVICE = (
    "Install JAX with its ROCm plugins for this ROCm release (docs.jax.dev says how); this "
    "package has no extra for them."
)


def _cuda_advice() -> str:
    return (
        "On a GPU, install JAX for it (extra cuda12 or cuda13). torch has cuDNN "
        f"{torch.backends.cudnn.version()}, JAX's plugin was built for cuDNN {_jax_cudnn()}; JAX "
        "cannot use an older one."
    )


def _jax_cudnn() -> str:
    """The cuDNN that JAX's CUDA plugin was built for."""
    from jax._src.lib import cuda_versions  # not public; None without the plugin

    return str(cuda_versions.cudnn_build_version()) if cuda_versions else "(no plugin)"


def _require_float8_export() -> None:
    try:
        torch.zeros(1, dtype=torch.float8_e4m3fn, device="cpu").__dlpack__()
    except (BufferError, RuntimeError) as error:
        raise RuntimeError(
            f"torch {torch.__version__} cannot export float8_e4m3fn by DLPack; use a newer torch"
        ) from error
