"""Index keys inside wider pages: a strided view as its base buffer and a row offset.

JAX has no strided arrays. Where index keys lie between other cache data, the view's pages are a
pitch apart; what crosses is the buffer of whole pages around the view, and the kernels skip to the
view's rows in it. No byte is copied.
"""

from __future__ import annotations

import torch

from msa_icp_jax.geometry import HEAD_DIM, MIX_UP_ROWS, ROW_STEP


def base_of(index_k: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The contiguous pages of whole rows around `index_k`, and its first row in them.

    Args:
      index_k: float8_e4m3fn or bfloat16 [pages, R, 128], contiguous or a view with a larger page
        stride.

    Raises:
      ValueError: the strides are not those of whole rows at a pitch of a multiple of a row (128
        bytes, bfloat16: 256), or the view cannot be placed at a multiple of 8 rows inside its
        storage.
    """
    if index_k.is_contiguous():
        return index_k, 0
    pages, rows, _ = index_k.shape
    pitch, row_stride, element_stride = index_k.stride()
    if (row_stride, element_stride) != (HEAD_DIM, 1):
        raise ValueError(
            f"index_k must have strides (pitch, {HEAD_DIM}, 1), got {tuple(index_k.stride())}"
        )
    if pitch % HEAD_DIM or pitch < rows * HEAD_DIM:
        row_bytes = HEAD_DIM * index_k.element_size()
        raise ValueError(
            f"index_k must have a page pitch that is a multiple of {row_bytes} bytes and at least "
            f"{rows * row_bytes}, got a pitch of {pitch * index_k.element_size()} bytes"
        )
    pitch_rows = pitch // HEAD_DIM
    row_offset = _row_offset(index_k, pages, rows, pitch_rows)
    base = index_k.detach().as_strided(
        (pages, pitch_rows, HEAD_DIM),
        (pitch, HEAD_DIM, 1),
        index_k.storage_offset() - row_offset * HEAD_DIM,
    )
    return base, row_offset


def _row_offset(index_k: torch.Tensor, pages: int, rows: int, pitch_rows: int) -> int:
    """Rows by which whole pages must begin before the view to lie inside its storage.

    Where pages begin at multiples of the pitch, it is the view's place in them: layers that lie one
    after the other in one storage then share it, and with it one executable. Elsewhere it is the
    smallest that fits.
    """
    element = index_k.element_size()
    start, size = int(index_k.storage_offset()), index_k.untyped_storage().nbytes() // element
    step, pitch = ROW_STEP * HEAD_DIM, pitch_rows * HEAD_DIM
    past_storage = max(0, start + pages * pitch - size)
    for begin in (start % pitch, -(-past_storage // step) * step, step):
        row_offset = begin // HEAD_DIM
        inside = past_storage <= begin <= start and row_offset + rows <= pitch_rows
        if begin % step == 0 and inside and (row_offset or pitch_rows > MIX_UP_ROWS):
            return row_offset
    raise ValueError(
        f"index_k must start at a multiple of {ROW_STEP} rows ({step * element} bytes) inside "
        f"pages of its storage, and not at row 0 of pages of at most {MIX_UP_ROWS} rows, got byte "
        f"{start * element} of {size * element} and pages of {pitch_rows} rows"
    )
