"""Reads .npz files that may be damaged or made to harm: nothing in them decides what is allocated.

Only the arrays that are asked for are read, only plain numbers, and only after the header of the
very member that holds an array has been found to state what is wanted.
"""

from __future__ import annotations

import io
import math
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

# What an array's header must state. Given shape and dtype it raises NpzError for anything else.
HeaderCheck = Callable[[tuple[int, ...], np.dtype], None]

_HEAD_BYTES = 8192  # read before the header is known; that of a plain array is far shorter
# What numpy writes. The other compressions have headers of their own, which ask for memory.
_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class NpzError(Exception):
    """The file cannot be used; the message is one line that says why."""


def read_npz(path: Path, checks: Mapping[str, HeaderCheck]) -> dict[str, np.ndarray]:
    """The arrays of the .npz file that `checks` names.

    Raises:
      NpzError: the file cannot be read, an array is missing, or its check refuses its header.
    """
    try:
        # What a damaged header makes the parser warn of, it also refuses or reads right.
        with warnings.catch_warnings(action="ignore"), zipfile.ZipFile(path) as archive:
            return {name: _read_array(archive, name, check) for name, check in checks.items()}
    except NpzError:
        raise
    # This broad, since the zip reader, the decompressor, and numpy's header parser (it tokenizes
    # and evaluates Python) raise whatever a damaged file leads them into: a dozen unrelated types,
    # MemoryError and RecursionError among them. None of them is a fault of this program.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise NpzError(f"{path} cannot be read as an .npz file: {reason[:200]}") from error


def _read_array(archive: zipfile.ZipFile, name: str, check: HeaderCheck) -> np.ndarray:
    if f"{name}.npy" not in archive.namelist():
        have = ", ".join(map(ascii, sorted(archive.namelist()))) or "nothing"
        raise NpzError(f"the file must hold the array {name}, got {have[:200]}")
    with archive.open(f"{name}.npy") as member:
        info = archive.getinfo(f"{name}.npy")
        if info.compress_type not in _COMPRESSIONS:
            raise NpzError(
                f"{name} must be stored or deflated, got compression {info.compress_type}"
            )
        head = io.BytesIO(member.read(_HEAD_BYTES))
        version = np.lib.format.read_magic(head)
        if version not in _HEADERS:
            raise NpzError(f"{name} must be an array of .npy version 1 or 2, got {version[0]}")
        shape, by_column, dtype = _HEADERS[version](head)
        check(shape, dtype)
        size = math.prod(shape) * dtype.itemsize
        data = head.read() + member.read(size)  # to the end, where the zip reader checks its sum
    if len(data) != size:
        raise NpzError(f"{name} must be {size} bytes by its header, got {len(data)}")
    return np.frombuffer(data, dtype).reshape(shape, order="F" if by_column else "C")
