"""Inputs of whole chains, and the ranks that run them, for every test above a single stage.

Keys are small integers, so that every score is exact in float32 and a chain must give the oracle's
answer bit for bit. Whatever a chain must not use is poisoned: unwritten cache rows are NaN or would
win, unused table slots are garbage, buffers hold a mark that only a write can remove.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import numpy.typing as npt
import oracle
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from msa_icp_jax import MSAIcpComm, MSAIcpIndexerPlan, prepare_msa_icp_indexer
from msa_icp_jax.comm import comm_shapes

Array = npt.NDArray[Any]

AXIS = "icp"
ALL = P()
INDEX_K = P(None, AXIS)
SCORES = P(None, None, AXIS)
CARRIER = P(None, AXIS)
OUTPUT = P(None, AXIS)

OLD_SCORE = 7.5  # what score buffers, outputs and carriers hold before a call
OLD_WORD = -77
SPARE_ROWS = 3  # rows that buffers have beyond the tokens of a call
GARBAGE = np.array([-1, -(2**31), 2**31 - 1, 10**6], np.int32)
POISON = {  # codes of the largest numbers, then of NaN, either sign each
    "float8_e4m3fn": np.array([0x7E, 0xFE, 0x7F, 0xFF], np.uint8),
    "bfloat16": np.array([0x7F80, 0xFF80, 0x7FC0, 0xFF81], np.uint16),
}
GROUPS = [(2, 128), (2, 256), (4, 128), (4, 256)]  # (world size, page size)


# The plan of the chains' tests, but for what each test is about.
LIMITS: dict[str, Any] = {
    "num_index_heads": 4,
    "init_blocks": 1,
    "local_blocks": 2,
    "max_decode_tokens": 32,
    "max_decode_query_len": 8,
    "max_num_batched_tokens": 4096,
    "max_num_seqs": 8,
    "max_model_len": 8192,
    "num_sparse_layers": 4,
    "backend": "xla",
}


def make_plan(world_size: int, page_size: int, **changes: Any) -> MSAIcpIndexerPlan:
    sizes = {"world_size": world_size, "page_size": page_size}
    return prepare_msa_icp_indexer(**LIMITS | sizes | changes)


def make_mesh(world_size: int) -> Mesh:
    devices = jax.devices("cpu")[:world_size]
    return jax.make_mesh((world_size,), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)


# ---- inputs ----


def small_queries(
    rng: np.random.Generator, tokens: int, index_dtype: str = "float8_e4m3fn"
) -> Array:
    """Codes [tokens, 4, 128] of integers of at most 3."""
    return oracle.encode(rng.integers(-3, 4, (tokens, 4, 128)), index_dtype)


def small_keys(rng: np.random.Generator, *shape: int, index_dtype: str = "float8_e4m3fn") -> Array:
    """Codes [*shape, 128] of integers of at most 4; a few keys have a NaN."""
    keys = oracle.encode(rng.integers(-4, 5, (*shape, 128)), index_dtype)
    keys[rng.random(shape) < 0.02, 5] = POISON[index_dtype][3]
    return keys


class Cache(NamedTuple):
    """The whole index-key cache of some requests."""

    keys: Array  # codes [pages, P, 128]
    table: Array  # int32 [B, width]


def paged(requests: list[Array], page_size: int, pages: int, width: int, seed: int = 0) -> Cache:
    """Scatters each request's keys [length, 128] over pages of its own; all else is poison."""
    rng = np.random.default_rng(seed)
    is_wide = any(keys.dtype == np.uint16 for keys in requests)
    poison = POISON["bfloat16" if is_wide else "float8_e4m3fn"]
    # Rows that win against any small integers, and rows of NaN.
    cache = rng.choice(poison[:2], (pages, page_size, 128))
    is_nan = rng.random((pages, page_size)) < 0.25
    cache[is_nan] = rng.choice(poison[2:], (is_nan.sum(), 128))
    table = rng.choice(GARBAGE, (len(requests), width))
    free = rng.permutation(pages)
    for b, keys in enumerate(requests):
        keys = keys[: width * page_size]
        count = -(-len(keys) // page_size)
        mine, free = free[:count], free[count:]
        assert len(mine) == count, "the pool has too few pages"
        table[b, :count] = mine
        flat = cache[mine].reshape(-1, 128)
        flat[: len(keys)] = keys
        cache[mine] = flat.reshape(count, page_size, 128)
    return Cache(cache, table)


class Case:
    """What decode steps and prefill windows share: what must come out of the chain.

    Told apart by identity, so that the oracle works each answer out once.
    """

    query: Array  # codes [T, 4, 128]
    counts: Array  # int32 [T], the visible blocks

    def scores(self, columns: int, shard: oracle.Shard) -> oracle.ScorePlane:
        """A rank's score plane."""
        raise NotImplementedError

    def global_scores(self, blocks: int) -> oracle.ScorePlane:
        """The score plane over blocks of one rank that holds every key."""
        raise NotImplementedError

    def plane(self, plan: MSAIcpIndexerPlan, rank: int) -> oracle.ScorePlane:
        """What a rank's scorer must write."""
        return _plane(self, plan, rank)

    def rows(self, plan: MSAIcpIndexerPlan, rank: int) -> Array:
        """The candidate rows int32 [4, T, 33] that a rank must send."""
        geometry = plan.geometry
        shard = oracle.Shard(rank, geometry.world_size, geometry.page_size)
        return oracle.select(
            self.plane(plan, rank).scores.astype(np.float32),
            self.counts,
            geometry.init_blocks,
            geometry.local_blocks,
            index_scale=shard.index_scale,
            index_offset=shard.index_offset,
        )

    def answer(self, plan: MSAIcpIndexerPlan) -> Array:
        """Every token's ids int32 [T, 4, 16]."""
        return _answer(self, plan)


@functools.lru_cache(maxsize=64)
def _plane(case: Case, plan: MSAIcpIndexerPlan, rank: int) -> oracle.ScorePlane:
    geometry = plan.geometry
    shard = oracle.Shard(rank, geometry.world_size, geometry.page_size)
    return case.scores(geometry.score_columns, shard)


@functools.lru_cache(maxsize=64)
def _answer(case: Case, plan: MSAIcpIndexerPlan) -> Array:
    geometry = plan.geometry
    return oracle.answer(
        case.global_scores(geometry.score_columns * geometry.index_scale).scores,
        case.counts,
        geometry.init_blocks,
        geometry.local_blocks,
        prefill=isinstance(case, Prefill),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Decode(Case):
    """One decode step."""

    query: Array  # codes [B Q, 4, 128]
    cache: Cache
    seq_lens: Array  # int32 [B]
    query_len: int
    counts: Array  # int32 [B Q], the visible blocks

    def scores(self, columns: int, shard: oracle.Shard) -> oracle.ScorePlane:
        keys = oracle.shard_cache(self.cache.keys, shard.world_size)[shard.rank]
        table = self.cache.table
        return oracle.decode_plane(
            self.query, keys, table, self.seq_lens, columns, shard, self.query_len
        )

    def global_scores(self, blocks: int) -> oracle.ScorePlane:
        return oracle.global_decode_plane(
            self.query, *self.cache, self.seq_lens, blocks, self.query_len
        )


def random_decode(
    seq_lens: list[int],
    query_len: int,
    page_size: int,
    *,
    pages: int = 64,
    width: int = 36,
    seed: int = 0,
    index_dtype: str = "float8_e4m3fn",
) -> Decode:
    rng = np.random.default_rng(seed)
    lengths = np.asarray(seq_lens, np.int32)
    held = [min(max(n, 0), width * page_size) for n in seq_lens]
    keys = [small_keys(rng, n, index_dtype=index_dtype) for n in held]
    return Decode(
        small_queries(rng, len(seq_lens) * query_len, index_dtype),
        paged(keys, page_size, pages, width, seed),
        lengths,
        query_len,
        oracle.decode_num_valid_pages(lengths, query_len),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Prefill(Case):
    """One prefill window."""

    query: Array  # codes [T, 4, 128]
    cache: Cache
    qo_lens: Array  # int32 [B]
    kv_lens: Array
    qo_offset: Array
    counts: Array  # int32 [T], the visible blocks

    def scores(self, columns: int, shard: oracle.Shard) -> oracle.ScorePlane:
        keys = oracle.shard_cache(self.cache.keys, shard.world_size)[shard.rank]
        table = self.cache.table
        return oracle.prefill_plane(
            self.query, keys, table, self.qo_lens, self.kv_lens, self.qo_offset, columns, shard
        )

    def global_scores(self, blocks: int) -> oracle.ScorePlane:
        return oracle.global_prefill_plane(
            self.query, *self.cache, self.qo_lens, self.kv_lens, self.qo_offset, blocks
        )


def random_prefill(
    segments: list[tuple[int, int, int]],
    tokens: int,
    page_size: int,
    *,
    pages: int = 64,
    width: int = 36,
    seed: int = 0,
    index_dtype: str = "float8_e4m3fn",
) -> Prefill:
    """Segments (query tokens, position of the first, keys); rows behind them are padding."""
    rng = np.random.default_rng(seed)
    qo, offset, kv = (np.array(column, np.int32) for column in zip(*segments, strict=True))
    held = [min(max(n, 0), width * page_size) for n in kv.tolist()]
    keys = [small_keys(rng, n, index_dtype=index_dtype) for n in held]
    return Prefill(
        small_queries(rng, tokens, index_dtype),
        paged(keys, page_size, pages, width, seed),
        qo,
        kv,
        offset,
        oracle.prefill_num_valid_pages(qo, offset, tokens),
    )


# ---- running ----


class Decoded(NamedTuple):
    output: Array  # int32 [T + SPARE_ROWS, 4, 16]
    scores: Array  # float32 [W, T + SPARE_ROWS, 4, K]
    comm: Any = None  # the storage as it came back


class Prefilled(NamedTuple):
    output: Array  # int32 [T + SPARE_ROWS, 4, 16]
    carrier: Array  # int32 [W, 4, T + SPARE_ROWS, 33]
    scratch: Array  # float32 [W, T + SPARE_ROWS, 4, K]


class Ranks(NamedTuple):
    """All ranks of a plan: on a mesh, or (mesh None) on one device by vmap."""

    plan: MSAIcpIndexerPlan
    mesh: Mesh | None

    def put(self, value: Array, spec: P = ALL) -> jax.Array:
        """The array over the ranks; never a view of numpy's memory, since it may be donated."""
        if self.mesh is not None:
            return jax.device_put(value, NamedSharding(self.mesh, spec), may_alias=False)
        if AXIS in spec:
            parts = np.split(value, self.plan.geometry.world_size, axis=tuple(spec).index(AXIS))
            value = np.stack(parts)
        return jax.device_put(value, may_alias=False)

    def get(self, value: jax.Array, spec: P = ALL) -> Array:
        """The whole array back."""
        whole = np.asarray(value)
        if self.mesh is None and AXIS in spec:
            whole = np.concatenate(list(whole), axis=tuple(spec).index(AXIS))
        return whole

    def put_codes(self, value: Array, spec: P = ALL) -> jax.Array:
        """Codes as a float8 or bfloat16 array."""
        is_wide = value.dtype == np.uint16
        return self.put(
            value.view(ml_dtypes.bfloat16 if is_wide else ml_dtypes.float8_e4m3fn), spec
        )

    def put_comm(self, comm: dict[str, Array]) -> MSAIcpComm:
        """The storage of all ranks from global numpy arrays."""
        specs = self.plan.comm_specs()
        return MSAIcpComm(**{k: self.put(v, getattr(specs, k)) for k, v in comm.items()})

    def get_comm(self, comm: MSAIcpComm) -> dict[str, Array]:
        specs = self.plan.comm_specs()
        names = comm_shapes(self.plan.geometry.world_size, 1)
        return {k: self.get(getattr(comm, k), getattr(specs, k)) for k in names}

    def zero_comm(self) -> dict[str, Array]:
        """Fresh storage of all ranks as global numpy arrays."""
        geometry, specs = self.plan.geometry, self.plan.comm_specs()
        arrays = {}
        for name, shape in comm_shapes(geometry.world_size, geometry.max_decode_tokens).items():
            whole = list(shape)
            whole[tuple(getattr(specs, name)).index(AXIS)] *= geometry.world_size
            arrays[name] = np.zeros(whole, np.int32)
        return arrays

    def decode_arrays(self, case: Decode, spare: int = SPARE_ROWS) -> list[jax.Array]:
        """The arguments of a decode program, marked score plane and output included."""
        geometry = self.plan.geometry
        rows = len(case.query) + spare
        columns = geometry.world_size * geometry.score_columns
        return [
            self.put_codes(case.query),
            self.put_codes(case.cache.keys, INDEX_K),
            self.put(case.cache.table),
            self.put(case.seq_lens),
            self.put(case.counts),
            self.put(np.full((rows, 4, columns), OLD_SCORE, np.float32), SCORES),
            self.put(np.full((rows, 4, 16), OLD_WORD, np.int32), OUTPUT),
        ]

    def decode(
        self, case: Decode, comm: MSAIcpComm | None = None, slot: int = 0, **options: Any
    ) -> Decoded:
        """Runs `plan.decode_program` with buffers that have spare rows."""
        program = self.plan.decode_program(
            self.mesh, decode_query_len=case.query_len, with_comm=comm is not None, **options
        )
        arrays = self.decode_arrays(case)
        if comm is None:
            output, scores = program(*arrays)
        else:
            output, scores, comm = program(*arrays, comm, self.put(np.int32(slot)))
        return Decoded(self.get(output, OUTPUT), self.planes(scores), comm)

    def window_plan(self, case: Prefill) -> Any:
        plan = jax.jit(
            self.plan.prefill_window_plan,
            static_argnames=("total_q", "max_query_len", "max_seq_len"),
        )(
            case.qo_lens,
            case.kv_lens,
            case.qo_offset,
            total_q=len(case.query),
            max_query_len=len(case.query),
            max_seq_len=self.plan.geometry.max_model_len,
        )
        return jax.tree.map(lambda leaf: self.put(np.asarray(leaf)), plan)

    def prefill_arrays(self, case: Prefill, spare: int = SPARE_ROWS) -> list[Any]:
        """The arguments of a prefill program, marked buffers included."""
        geometry = self.plan.geometry
        rows = len(case.query) + spare
        columns = geometry.world_size * geometry.score_columns
        return [
            self.put_codes(case.query),
            self.put_codes(case.cache.keys, INDEX_K),
            self.put(case.cache.table),
            self.window_plan(case),
            self.put(np.full((rows, 4, columns), OLD_SCORE, np.float32), SCORES),
            self.put(case.counts),
            self.put(np.full((4, geometry.world_size * rows, 33), OLD_WORD, np.int32), CARRIER),
            self.put(np.full((rows, 4, 16), OLD_WORD, np.int32), OUTPUT),
        ]

    def prefill(self, case: Prefill, *, fused: bool | None = None) -> Prefilled:
        """Runs `plan.prefill_program` with buffers that have spare rows."""
        program = self.plan.prefill_program(self.mesh, fused=fused)
        output, carrier, scratch = program(*self.prefill_arrays(case))
        carriers = np.split(self.get(carrier, CARRIER), self.plan.geometry.world_size, axis=1)
        return Prefilled(self.get(output, OUTPUT), np.stack(carriers), self.planes(scratch))

    def planes(self, scores: jax.Array) -> Array:
        """Every rank's plane float32 [W, rows, 4, K]."""
        return np.stack(np.split(self.get(scores, SCORES), self.plan.geometry.world_size, axis=2))


# ---- checks ----


def check_decoded(plan: MSAIcpIndexerPlan, case: Decode, found: Decoded, *, fused: bool) -> None:
    """Asserts ids, score planes and untouched rows, bit for bit."""
    check_output(plan, case, found.output)
    _check_planes(plan, case, found.scores, fused=fused)


def check_prefilled(
    plan: MSAIcpIndexerPlan, case: Prefill, found: Prefilled, *, fused: bool
) -> None:
    """Asserts ids, carriers, the scores selected from and untouched rows, bit for bit."""
    check_output(plan, case, found.output)
    _check_scratch(plan, case, found.scratch, fused=fused)
    tokens = len(case.query)
    for rank, carrier in enumerate(found.carrier):
        np.testing.assert_array_equal(carrier[:, :tokens], case.rows(plan, rank))
        assert (carrier[:, tokens:] == OLD_WORD).all()


def check_output(plan: MSAIcpIndexerPlan, case: Case, output: Array) -> None:
    """Asserts every token's answer, its strict form, and that spare rows keep their mark."""
    tokens = len(case.query)
    np.testing.assert_array_equal(output[:tokens], case.answer(plan))
    blocks = plan.geometry.score_columns * plan.geometry.index_scale
    counts = np.minimum(case.counts, blocks)
    oracle.check_ids(output[:tokens], counts, prefill=isinstance(case, Prefill))
    assert (output[tokens:] == OLD_WORD).all()


def _check_planes(plan: MSAIcpIndexerPlan, case: Case, planes: Array, *, fused: bool) -> None:
    before = np.full(planes.shape[1:], OLD_SCORE, np.float32)
    for rank, scores in enumerate(planes):
        want = before if fused else case.plane(plan, rank).over(before)
        np.testing.assert_array_equal(scores.view(np.int32), want.view(np.int32))


def _check_scratch(plan: MSAIcpIndexerPlan, case: Prefill, planes: Array, *, fused: bool) -> None:
    """Prefill scores: those of candidates, by the counts; nothing reads the others."""
    if fused:
        _check_planes(plan, case, planes, fused=True)
        return
    tokens, columns = len(case.query), planes.shape[-1]
    before = np.full(planes.shape[1:], OLD_SCORE, np.float32)
    for rank, scores in enumerate(planes):
        ids = np.arange(columns) * plan.geometry.index_scale + plan.geometry.index_offset(rank)
        chosen = np.broadcast_to((ids < case.counts[:, None])[:, None], scores[:tokens].shape)
        want = case.plane(plan, rank).over(before)
        np.testing.assert_array_equal(
            scores[:tokens][chosen].view(np.int32), want[:tokens][chosen].view(np.int32)
        )
        np.testing.assert_array_equal(scores[tokens:], before[tokens:])
