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


def integer(name: str, value: Any, low: int | None = None, high: int | None = None) -> int:
    """Returns `value` as an int; `low` and `high` are inclusive bounds."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise TypeError(f"{name} must be an int{_range(low, high)}, got {_describe(value)}")
    number = int(value)  # numpy's own integers wrap or overflow in what is computed from them
    if (low is not None and number < low) or (high is not None and number > high):
        raise ValueError(f"{name} must be an int{_range(low, high)}, got {_short(number)}")
    return number


def integers(name: str, values: Any, low: int, high: int) -> list[int]:
    """Returns a sequence of ints, each within the inclusive bounds, as a list of ints."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise TypeError(f"{name} must be a sequence of ints{_range(low, high)}, got {values!r}")
    return [integer(f"{name}[{i}]", value, low, high) for i, value in enumerate(values)]


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


def one_of(name: str, value: Any, allowed: Sequence[Any]) -> Any:
    """Returns the one of `allowed` that `value` is."""
    if isinstance(value, bool) or not isinstance(value, type(allowed[0]) | np.integer):
        raise TypeError(f"{name} must be one of {_join(allowed)}, got {_describe(value)}")
    if value not in allowed:
        raise ValueError(f"{name} must be one of {_join(allowed)}, got {_short(value)}")
    return allowed[allowed.index(value)]


def index(name: str, value: Any, size: int) -> Any:
    """Returns an index below `size`: a checked Python int, or a traced int32 scalar as it is."""
    if isinstance(value, jax.Array | np.ndarray) and not isinstance(value, np.generic):
        array(name, value, jnp.int32)
        return value
    return integer(name, value, 0, size - 1)


def array(name: str, value: Any, dtype: Any, *shape: int | AtLeast | None) -> None:
    """Checks an array's dtype (or one of a tuple of them) and shape.

    A shape entry None allows any size.
    """
    if not isinstance(value, jax.Array | np.ndarray):
        raise TypeError(f"{name} must be {_spec(dtype, shape)}, got {_describe(value)}")
    if not any(value.dtype == allowed for allowed in _each(dtype)):
        raise TypeError(
            f"{name} must be {_spec(dtype, shape)}, got dtype {_dtype_name(value.dtype)}"
        )
    fits = len(shape) == value.ndim and all(
        want is None or (have >= want.size if isinstance(want, AtLeast) else have == want)
        for have, want in zip(value.shape, shape, strict=False)
    )
    if not fits:
        raise ValueError(f"{name} must be {_spec(dtype, shape)}, got shape {list(value.shape)}")


def array_of(name: str, value: Any, *dtypes: Any) -> None:
    """Checks that `value` is an array of one of `dtypes`, whatever its shape."""
    allowed = f"an array of dtype {_names(dtypes)}"
    if not isinstance(value, jax.Array | np.ndarray):
        raise TypeError(f"{name} must be {allowed}, got {_describe(value)}")
    if not any(value.dtype == dtype for dtype in dtypes):
        raise TypeError(f"{name} must be {allowed}, got dtype {_dtype_name(value.dtype)}")


def host_dtypes(name: str, value: Any, dtype: np.dtype) -> None:
    """Checks the dtype of a numpy array or scalar, or of those in a pytree; passes all else."""
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


def _range(low: int | None, high: int | None) -> str:
    if low is None and high is None:
        return ""
    if high is None:
        return f" >= {low}"
    return f" in [{low}, {high}]" if low is not None else f" <= {high}"


def _spec(dtype: Any, shape: Sequence[int | AtLeast | None]) -> str:
    sizes = ", ".join("any" if size is None else str(size) for size in shape)
    names = _names(_each(dtype))
    return f"{'an' if names[0] in 'aeiou' else 'a'} {names} array of shape [{sizes}]"


def _each(dtype: Any) -> tuple[Any, ...]:
    return dtype if isinstance(dtype, tuple) else (dtype,)


def _names(dtypes: Sequence[Any]) -> str:
    return " or ".join(jnp.dtype(dtype).name for dtype in dtypes)


def _join(allowed: Sequence[Any]) -> str:
    return ", ".join(repr(item) for item in allowed)


def _describe(value: Any) -> str:
    return f"{type(value).__name__} {_short(value)}"


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
