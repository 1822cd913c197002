"""Top16 of four short rows of a wide plane at once: eight lanes a row, in registers.

The eight lanes of a row sort what they hold by a network and merge with each other until each has
the row's 16 largest values, so that the 16th, the *threshold*, is known. The columns that reach it
are the answer if there are exactly 16 of them, however it came about; otherwise (scores that tie at
the threshold, too few real scores, NaN in the network) the caller has to take another way.
"""

from __future__ import annotations

import functools

from msa_icp_jax.geometry import TOPK
from msa_icp_jax.ops._mosaic import lanes
from msa_icp_jax.ops._mosaic.lanes import Lane, Words, f32, i32, int32, where
from msa_icp_jax.ops.select.networks import best_half, descending, descending_of_bitonic

ROWS = 4  # of a warp
SIZES = (8, 16)  # columns a lane can hold
_LANES = 8  # of a row
_VECTOR = 4  # neighbouring columns of a load
_CHUNK = _LANES * _VECTOR  # columns of a row that one load of its lanes covers
_INF = float("inf")


def capacity(size: int) -> int:
    """Columns of a row when its lanes hold `size` each."""
    return size * _LANES


def find_top16(
    scores: Words, forced: tuple[Lane, Lane], stop: Lane, size: int, lane: Lane, found: Words
) -> Lane:
    """Writes the columns of the best 16 of each row to `found` [4, 16], ascending.

    Args:
      scores: this lane's row (of lane // 8); its length a multiple of 4, 16-byte aligned.
      forced: (front, back): columns below front and from back on win; front <= 32.
      stop: columns [0, stop) are candidates, 16 <= stop <= capacity(size). The same for all rows.
      size: columns a lane holds, one of `SIZES`.
      lane: this lane of the warp.
      found: shared memory.

    Returns:
      Whether the answer is good for all four rows, in every lane the same.
    """
    of_row = lane & (_LANES - 1)
    first = of_row * _VECTOR
    threshold = _sixteenth_largest(_load(scores, forced, stop, size, first))
    # Loaded again (from the cache): kept, the scores would take too many registers.
    mask = lanes.which_reach(_load(scores, forced, stop, size, first), threshold)
    number = lanes.popcount(mask)
    for distance in (1, 2, 4):
        number = number + lanes.warp_xor(number, distance)
    good = lanes.warp_ballot(number.eq(TOPK) & (threshold > -_INF)).eq(lanes.ALL_LANES)
    with lanes.when(good):
        _write_columns(mask, of_row, found + (lane >> 3) * TOPK, first)
        lanes.warp_barrier()
    return good


def _load(
    scores: Words, forced: tuple[Lane, Lane], stop: Lane, size: int, first: Lane
) -> list[Lane]:
    """This lane's scores in the order (chunk, column): forced ones +inf, past the end -inf."""
    front, back = forced
    place = scores + first
    text = (
        "mov.b32 $0, 0xff800000; mov.b32 $1, 0xff800000; mov.b32 $2, 0xff800000; "
        "mov.b32 $3, 0xff800000; @$5 ld.global.v4.f32 {$0, $1, $2, $3}, [$4];"
    )
    chunks = []
    for chunk in range(size // _VECTOR):
        pointer = Lane((place + chunk * _CHUNK).pointer)
        inside = first + chunk * _CHUNK < stop
        chunks.append(lanes.ptx(text, pointer, inside, result=[f32()] * _VECTOR))

    values: list[Lane] = []
    for chunk, loaded in enumerate(chunks):
        # Looked at only in chunks that reach a forced block or the end.
        plain = back >= (chunk + 1) * _CHUNK
        if chunk == 0:
            plain = plain & front.eq(0)

        def as_loaded(loaded: tuple[Lane, ...] = loaded) -> list[Lane]:
            return list(loaded)

        def masked(chunk: int = chunk, loaded: tuple[Lane, ...] = loaded) -> list[Lane]:
            result = []
            for j, value in enumerate(loaded):
                column = first + (chunk * _CHUNK + j)
                value = where(column < back, value, where(column < stop, _inf(), -_INF))
                result.append(where(column < front, _INF, value) if chunk == 0 else value)
            return result

        values += lanes.choose(plain, [f32()] * _VECTOR, as_loaded, masked)
    return values


def _inf() -> Lane:
    return lanes.constant(_INF, f32())


def _sixteenth_largest(values: list[Lane]) -> Lane:
    """The 16th largest of what the eight lanes of a row hold; each gets it."""
    runs = [descending(values[i : i + TOPK]) for i in range(0, len(values), TOPK)]
    best = functools.reduce(lambda a, b: descending_of_bitonic(best_half(a, b)), runs)
    distances = [1, 2, 4]
    if len(best) < TOPK:
        best = descending_of_bitonic(best + _from_lane(best, distances.pop(0))[::-1])
    while len(distances) > 1:
        best = descending_of_bitonic(best_half(best, _from_lane(best, distances.pop(0))))
    return functools.reduce(lanes.minimum, best_half(best, _from_lane(best, distances[0])))


def _from_lane(values: list[Lane], distance: int) -> list[Lane]:
    return [lanes.warp_xor(x.bits(i32()), distance).bits(f32()) for x in values]


def _write_columns(mask: Lane, of_row: Lane, found: Words, first: Lane) -> None:
    """Writes the columns of this lane's mask bits where they belong among the row's 16.

    Bit 4 c + j is column 32 c + 4 (lane of the row) + j, so the order is by chunk c, then by lane.
    Winners are counted per chunk in the bytes of two words: even chunks in one, odd in the other.
    """
    pairs = mask - ((mask >> 1) & 0x55555555)
    nibbles = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    own = [nibbles & 0x0F0F0F0F, (nibbles >> 4) & 0x0F0F0F0F]
    before, total = [], []
    for counts in own:
        upto = counts
        for distance in (1, 2, 4):
            below = lanes.warp_below(upto, distance, _LANES)
            upto = where(of_row >= distance, upto + below, upto)
        before.append(upto - counts)
        total.append(lanes.warp_last(upto, _LANES))
    lower_chunks = (total[0] + total[1]) * 0x01010100  # byte k: the sum of the bytes below it
    starts = [lower_chunks + before[0], lower_chunks + total[0] + before[1]]

    def write_one(mask_left: Lane) -> list[Lane]:
        bit = lanes.lowest_bit(mask_left)
        chunk = bit >> 2
        start = where((chunk & 1).eq(0), starts[0], starts[1])
        start = (start >> ((chunk >> 1) << 3)) & 0xFF
        lower = mask & ((int32(1) << bit) - 1) & (int32(-1) << (chunk << 2))
        place = start + lanes.popcount(lower)
        (found + place).store(first + chunk * _CHUNK + (bit & 3))
        return [mask_left & (mask_left - 1)]

    lanes.repeat_while([mask], lambda left: left.ne(0), write_one)
