"""Argument checks shared by every public function.

Each check raises before any buffer is touched and names the argument, the value it got and the
values it allows: ``TypeError`` for a wrong kind or dtype, ``ValueError`` for a wrong value or
shape. Shapes and dtypes are static under ``jit``, so the checks cost nothing at run time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_FLOAT32_MAX = 3.4028235e38  # rounds to the largest float32
_HOST = (np.ndarray, np.generic)


class AtLeast(NamedTuple):
    """A shape entry that may be larger than `size` (a buffer with spare room)."""

    size: int

    def __str__(self) -> str:
        return f">={self.size}"


class Ranks(NamedTuple):
    """A shape entry of one place for each rank; `size` None allows any number of them."""

    size: int | None

    def __str__(self) -> str:
        return "ranks" if self.size is None else f"{self.size} ranks"


Entry = int | AtLeast | Ranks | None


def integer(
    name: str, value: Any, low: int | None = None, high: int | None = None, *, limit: str = ""
) -> int:
    """Returns `value` as an int in [low, high]; `limit` is what sets `high`, in words."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an int{_range(low, high, limit)}, got {_describe(value)}")
    number = int(value)  # numpy's own integers wrap or overflow in what is computed from them
    if (low is not None and number < low) or (high is not None and number > high):
        raise ValueError(f"{name} must be an int{_range(low, high, limit)}, got {_short(number)}")
    return number


def integers(name: str, values: Any, low: int, high: int, *, limit: str = "") -> list[int]:
    """Returns a sequence of ints, each within the inclusive bounds, as a list of ints."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        bounds = _range(low, high, limit)
        raise TypeError(f"{name} must be a sequence of ints{bounds}, got {values!r}")
    return [
        integer(f"{name}[{i}]", value, low, high, limit=limit) for i, value in enumerate(values)
    ]


def flag(name: str, value: Any) -> bool:
    """Returns `value`, which must be a Python bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {_describe(value)}")
    return value


def finite(name: str, value: Any) -> float:
    """Returns `value` as a Python float that is finite in float32 too."""
    allowed = f"a float in [-{_FLOAT32_MAX}, {_FLOAT32_MAX}]"
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{name} must be {allowed}, got {_describe(value)}")
    number = value if isinstance(value, int) else float(value)
    if not abs(number) <= _FLOAT32_MAX:  # NaN included; an int may be too large for a float
        raise ValueError(f"{name} must be {allowed}, got {_short(value)}")
    return float(number)


def one_of(name: str, value: Any, allowed: Sequence[Any], *, hint: str = "") -> Any:
    """Returns the one of `allowed` that `value` is; `hint` is what to do with another."""
    want = f"{name} must be one of {_join(allowed)}"
    if isinstance(value, bool) or not isinstance(value, type(allowed[0]) | np.integer):
        raise TypeError(f"{want}, got {_describe(value)}{hint}")
    if value not in allowed:
        raise ValueError(f"{want}, got {_short(value)}{hint}")
    return allowed[allowed.index(value)]


def index(name: str, value: Any, size: int) -> Any:
    """Returns an index below `size`: a checked Python int, or a traced int32 scalar as it is."""
    if isinstance(value, jax.Array | np.ndarray) and not isinstance(value, np.generic):
        array(name, value, jnp.int32)
        return value
    return integer(name, value, 0, size - 1)


def array(name: str, value: Any, dtype: Any, *shape: Entry, origin: str = "") -> None:
    """Checks an array's dtype (or one of a tuple of them) and shape.

    A shape entry None allows any size; `origin` is where dtype or shape come from, in words.
    """

    def want() -> str:
        spec = f"{_names(_each(dtype))} array of shape [{sizes(shape)}]"
        return f"{name} must be {_article(spec)} {spec}{origin and f' ({origin})'}"

    if not isinstance(value, jax.Array | np.ndarray):
        raise TypeError(f"{want()}, got {_describe(value)}")
    if not any(value.dtype == allowed for allowed in _each(dtype)):
        raise TypeError(f"{want()}, got dtype {_dtype_name(value.dtype)}")
    if not fits(value.shape, shape):
        misfit = axis_misfit(value.shape, shape)
        raise ValueError(f"{want()}, got shape {list(value.shape)}{misfit}")


def fits(have: Sequence[int], want: Sequence[Entry]) -> bool:
    """Whether a shape is one of those that `want` allows."""
    return len(have) == len(want) and all(map(_entry_fits, have, want))


def _entry_fits(have: int, want: Entry) -> bool:
    if isinstance(want, AtLeast):
        return have >= want.size
    size = want.size if isinstance(want, Ranks) else want
    return size is None or have == size


def sizes(shape: Sequence[Entry]) -> str:
    """A shape's entries in words."""
    return ", ".join("any" if size is None else str(size) for size in shape)


def axis_misfit(have: Sequence[int], want: Sequence[Entry]) -> str:
    """Which axis a shape lacks or has too many, to put behind it; empty for any other misfit."""
    if fits(have[1:], want):
        return ", an axis too many in front (one rank's or one slot's part is due)"
    for axis, entry in enumerate(want):
        if fits(have, [*want[:axis], *want[axis + 1 :]]):
            return f", which lacks axis {axis}{' of ranks' if isinstance(entry, Ranks) else ''}"
    return ""


def array_of(name: str, value: Any, *dtypes: Any) -> None:
    """Checks that `value` is an array of one of `dtypes`, whatever its shape."""
    allowed = f"an array of dtype {_names(dtypes)}"
    if not isinstance(value, jax.Array | np.ndarray):
        raise TypeError(f"{name} must be {allowed}, got {_describe(value)}")
    if not any(value.dtype == dtype for dtype in dtypes):
        raise TypeError(f"{name} must be {allowed}, got dtype {_dtype_name(value.dtype)}")


def host_value(name: str, value: Any, dtype: np.dtype, kind: type | None = None) -> None:
    """Checks what a program is given that is no array of JAX: None, or what has a dtype.

    Numpy arrays and scalars must have this `dtype`, those in a pytree of class `kind` too.
    """
    if kind is not None and not isinstance(value, kind):
        raise TypeError(f"{name} must be an {kind.__name__}, got {_describe(value)}")
    if kind is None and value is not None and not _has_numpy_dtype(value):
        want = f"{_article(dtype.name)} {dtype.name} array"
        raise TypeError(f"{name} must be {want}, got {_describe(value)}")
    if not any(isinstance(x, _HOST) and x.dtype != dtype for x in jax.tree.leaves(value)):
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(value):
        if isinstance(leaf, _HOST) and leaf.dtype != dtype:
            where = f"{name}{jax.tree_util.keystr(path)}"
            got = f"a numpy array of dtype {_dtype_name(leaf.dtype)}"
            raise TypeError(f"{where} must be of dtype {dtype.name}, got {got}")


def device(name: str, value: Any) -> None:
    """Checks that `value` is a JAX device or None."""
    if value is not None and not isinstance(value, jax.Device):
        raise TypeError(f"{name} must be a jax.Device or None, got {_describe(value)}")


def _dtype_name(dtype: Any) -> str:
    """A dtype in words: its name does not say that its bytes are in the other order."""
    if getattr(dtype, "isnative", True):  # the dtypes of JAX alone have no byte order
        return dtype.name
    return f"{dtype.name} in the other byte order ({dtype.str})"


def _has_numpy_dtype(value: Any) -> bool:
    """Whether it is an array to JAX, abstract ones included: no list, number or torch tensor."""
    return isinstance(getattr(value, "dtype", None), np.dtype)


def _range(low: int | None, high: int | None, limit: str = "") -> str:
    if low is None and high is None:
        return ""
    if high is None:
        return f" >= {low}"
    bounds = f" in [{low}, {high}]" if low is not None else f" <= {high}"
    return f"{bounds} ({limit})" if limit else bounds


def _article(text: str) -> str:
    return "an" if text[0] in "aeiou" else "a"


def _each(dtype: Any) -> tuple[Any, ...]:
    return dtype if isinstance(dtype, tuple) else (dtype,)


def _names(dtypes: Sequence[Any]) -> str:
    return " or ".join(jnp.dtype(dtype).name for dtype in dtypes)


def _join(allowed: Sequence[Any]) -> str:
    return ", ".join(repr(item) for item in allowed)


def _describe(value: Any) -> str:
    kind = type(value).__name__
    if isinstance(value, list | tuple | dict) and any(map(_is_traced, jax.tree.leaves(value))):
        return f"a {kind} of traced values"
    return kind if value is None else f"{kind} {_short(value)}"


def _is_traced(value: Any) -> bool:
    return isinstance(value, jax.core.Tracer)


def _short(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 200:  # Python refuses to print long ints
        return f"an int of {value.bit_length()} bits"
    text = str(value) if isinstance(value, int | float | np.number) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def same_fields(one: Any, other: Any) -> bool:
    """Equality of dataclasses that hold arrays: these have no one answer to ==, so identity counts.

    What an array's place may hold otherwise (a PartitionSpec, a shape) is compared by value.
    """
    kind: Any = type(one)
    if kind is not type(other):
        return False
    names = [field.name for field in dataclasses.fields(kind)]
    return all(_same(getattr(one, name), getattr(other, name)) for name in names)


def _same(x: Any, y: Any) -> bool:
    if x is y:
        return True
    if isinstance(x, (jax.Array, np.ndarray)) or isinstance(y, (jax.Array, np.ndarray)):
        return False
    if isinstance(x, tuple) and isinstance(y, tuple):
        return len(x) == len(y) and all(map(_same, x, y))
    return bool(x == y)
