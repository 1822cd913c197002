"""The total order, the candidate row and the tagged row, against literal values."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import lane_simulator
import numpy as np
import pytest
from inputs import INT_MAX, INT_MIN
from lane_simulator import Lane

from msa_icp_jax import rows
from msa_icp_jax.ops._mosaic import top16

# fp32 bits, what they are, and the key: written out, since a second encoder could share a mistake.
KEYS = [
    (0x7F800000, "+inf", 2139095040),
    (0x7F7FFFFF, "largest", 2139095039),
    (0x3F800001, "1 + ulp", 1065353217),
    (0x3F800000, "1", 1065353216),
    (0x00800000, "smallest normal", 8388608),
    (0x00000001, "smallest", 1),
    (0x00000000, "+0", 0),
    (0x80000000, "-0", 0),
    (0x80000001, "-smallest", -2),
    (0xBF800000, "-1", -1065353217),
    (0xBF800001, "-1 - ulp", -1065353218),
    (0xFF7FFFFF, "-largest", -2139095040),
    (0xFF800000, "-inf", -2139095041),
    (0x7FC00000, "NaN", -2139095041),
    (0xFFC00000, "-NaN", -2139095041),
    (0x7F800001, "signalling NaN", -2139095041),
    (0xFF800001, "-signalling NaN", -2139095041),
    (0x7FFFFFFF, "all bits NaN", -2139095041),
    (0xFFFFFFFF, "-all bits NaN", -2139095041),
]
WORDS = np.array([word for word, _, _ in KEYS], np.uint32).view(np.int32)
MINUS_INF = -8388608  # 0xff800000
FORCED, INVALID = 2147483647, -2147483648

top_of = jax.jit(rows.take_top16)


@pytest.mark.parametrize(("word", "key"), [pytest.param(w, k, id=name) for w, name, k in KEYS])
def test_order_keys(word, key):
    assert int(rows.order_keys(jnp.array(word, jnp.uint32).view(jnp.int32))) == key


def test_order_key_of_the_kernels(monkeypatch):
    """The kernels' own function, computed in numpy on every word and the words beside it."""
    lane_simulator.simulate(monkeypatch, top16)
    for words, literal in ((WORDS, [key for *_, key in KEYS]), (every_kind_of_word(), None)):
        padded = np.resize(words, lane_simulator.THREADS * (-(-len(words) // 128)))
        found = np.concatenate(
            [top16.order_key_of_word(Lane(part)).value for part in padded.reshape(-1, 128)]
        )
        want = np.asarray(rows.order_keys(jnp.asarray(words))) if literal is None else literal
        np.testing.assert_array_equal(found[: len(words)], want)


def every_kind_of_word():
    """Words around each of WORDS and a thousand others."""
    near = WORDS[:, None].astype(np.int64) + np.arange(-2, 3)
    some = np.random.default_rng(0).integers(INT_MIN, INT_MAX, 1000)
    return np.concatenate([near.ravel(), some]).astype(np.uint64).astype(np.uint32).view(np.int32)


def test_keys_order_as_the_floats_do_and_leave_room_at_both_ends():
    keys = np.asarray(rows.order_keys(jnp.asarray(WORDS))).tolist()
    finite_and_infinite = keys[: keys.index(-2139095041) + 1]
    assert finite_and_infinite == sorted(finite_and_infinite, reverse=True)
    assert min(keys) > INVALID and max(keys) < FORCED
    assert (rows.FORCED_KEY, rows.INVALID_KEY) == (FORCED, INVALID)


@pytest.mark.parametrize(
    ("count", "begin", "end", "forced", "valid"),
    [
        (20, 0, 0, [], range(20)),
        (20, 2, 3, [0, 1, 17, 18, 19], range(20)),
        (3, 2, 2, [0, 1, 2], range(3)),
        (3, 8, 8, [0, 1, 2], range(3)),
        (0, 1, 1, [], []),
        (-4, 1, 1, [], []),
        (INT_MIN, 16, 0, [], []),
        (INT_MAX, 1, 2, [0], range(24)),
    ],
)
def test_candidates_are_valid_and_forced_by_id_alone(count, begin, end, forced, valid):
    ids = jnp.arange(-3, 24, dtype=jnp.int32)
    words = jnp.full(ids.shape, 0x3F800000, jnp.int32)
    keys = np.asarray(rows.candidate_keys(words, ids, jnp.int32(count), begin, end))
    want = [FORCED if i in forced else 1065353216 if i in valid else INVALID for i in ids.tolist()]
    assert keys.tolist() == want


def test_the_last_ids_and_the_raw_count():
    ids = jnp.array([8189, 8190, 8191, 8192, 8193, INT_MAX], jnp.int32)
    words = jnp.zeros(6, jnp.int32)

    def keys(count: int) -> list[int]:
        return np.asarray(rows.candidate_keys(words, ids, jnp.int32(count), 0, 2)).tolist()

    assert keys(8192) == [0, FORCED, FORCED, INVALID, INVALID, INVALID]
    assert keys(8193) == [0, 0, FORCED, INVALID, INVALID, INVALID]
    assert keys(8194) == [0, 0, 0, INVALID, INVALID, INVALID]


@pytest.mark.parametrize(
    "size", [1, 15, 16, 17, 127, 128, 129, 1023, 1024, 1040, 2048, 2049, 8192, 12287]
)
def test_top16_breaks_ties_by_position_at_every_size(size):
    rng = np.random.default_rng(size)
    ids = np.arange(size, dtype=np.int32) * 2 + 1
    few = rng.integers(0, 3, size)
    for values in (few, few * 0, rng.permutation(size), np.where(few, INVALID, 7)):
        keys = values.astype(np.int32)
        best = np.lexsort((ids, -keys.astype(np.int64)))[:16]
        best = best[keys[best] != INVALID]
        got_keys, words, got_ids = (np.asarray(x) for x in top_of(keys, keys, ids))
        tail = [-1] * (16 - len(best))
        assert got_ids.tolist() == [*ids[best].tolist(), *tail]
        assert words.tolist() == [*keys[best].tolist(), *(MINUS_INF for _ in tail)]
        assert got_keys.tolist() == [*keys[best].tolist(), *(INVALID for _ in tail)]


def test_no_sort_is_wide():
    """A row of 12287 scores in whole would be 14 times the work, and shared memory to match."""
    keys = jax.ShapeDtypeStruct((3, 12287), jnp.int32)
    text = top_of.trace(keys, keys, keys).lower().as_text()
    found = re.findall(r"chlo\.top_k.*? : tensor<3x(\d+)xi32>", text)
    assert found
    assert max(map(int, found)) <= 128


@pytest.mark.parametrize("size", [1023, 1024])
def test_one_negative_nan_corrupts_nothing(size):
    words = np.arange(size, dtype=np.float32).view(np.int32).copy()
    words[5] = np.int32(-0x400000)  # 0xffc00000
    ids = np.arange(size, dtype=np.int32)
    _, best_words, best = top_of(rows.order_keys(jnp.asarray(words)), words, ids)
    assert np.asarray(best).tolist() == list(range(size - 1, size - 17, -1))
    assert np.asarray(best_words).view(np.float32).tolist() == np.asarray(best).tolist()


def test_pack_and_unpack_keep_every_bit():
    for word in WORDS:
        words = np.roll(np.resize(WORDS, 16), 3)
        words[7] = word
        ids = np.random.default_rng(0).permutation(16).astype(np.int32) * 100
        packed = rows.pack(jnp.asarray(words), jnp.asarray(ids))
        assert packed.shape == (33,)
        assert packed.dtype == jnp.int32
        assert int(packed[32]) == 1
        got_words, got_ids = (np.asarray(x) for x in rows.unpack(packed))
        order = np.argsort(ids)
        assert got_ids.tolist() == ids[order].tolist()
        assert got_words.tolist() == words[order].tolist()


def test_packed_rows_end_with_the_empty_candidates():
    words = jnp.array([5, MINUS_INF, 6] + [MINUS_INF] * 13, jnp.int32)
    ids = jnp.array([9, -1, 0] + [-1] * 13, jnp.int32)
    packed = np.asarray(rows.pack(words, ids)).tolist()
    assert packed == [6, 5] + [MINUS_INF] * 14 + [0, 9] + [-1] * 14 + [1]
    empty = np.asarray(rows.empty_rows(2, 3))
    assert empty.shape == (2, 3, 33)
    assert (empty == [MINUS_INF] * 16 + [-1] * 16 + [1]).all()


def test_generations_wrap_and_skip_zero():
    known = {
        0: 1,
        1: 2,
        INT_MAX - 1: INT_MAX,
        INT_MAX: INT_MIN,
        INT_MIN: INT_MIN + 1,
        -2: -1,
        -1: 1,
    }
    after = rows.next_generation(jnp.array(list(known), jnp.int32))
    assert np.asarray(after).tolist() == list(known.values())


def test_a_tagged_word_is_a_little_endian_int64():
    packed = np.arange(33, dtype=np.int32) - 3
    tagged = np.asarray(rows.tag(jnp.asarray(packed)[None], jnp.array([0x12345678], jnp.int32)))
    assert tagged.shape == (1, 32, 2)
    whole = np.ascontiguousarray(tagged).view("<i8")[0, :, 0]
    assert int(whole[0]) == 0x12345678_FFFFFFFD  # word -3
    assert int(whole[31]) == 0x12345678_0000001C  # word 28; the ready flag has no tagged word
    negative = np.asarray(rows.tag(jnp.asarray(packed), jnp.int32(-2)))
    assert int(np.ascontiguousarray(negative).view("<i8")[4, 0]) == (-2 << 32) | 1
