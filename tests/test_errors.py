"""Wrong calls of every public function and plan method.

One table holds, for each function, a call that is right and for each parameter the values that are
wrong. Every wrong call must raise TypeError or ValueError with a message that names the argument,
what is allowed and what came, and must leave the buffers alone.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import msa_icp_jax as api
from msa_icp_jax import MSAIcpIndexerPlan
from msa_icp_jax.comm import comm_shapes

F8, F32, I32 = np.dtype(jnp.float8_e4m3fn), np.dtype(np.float32), np.dtype(np.int32)
WORLD, PAGE, ROWS, COLUMNS = 4, 128, 32, 8
REQUESTS, QUERY_LEN = 2, 2
TOKENS = REQUESTS * QUERY_LEN
INT_MAX = 2**31 - 1


class Wrong(NamedTuple):
    value: Any
    error: type[Exception]
    allowed: str  # a piece of the message: what would have been right
    got: str  # the piece that says what came
    others: dict[str, Any] = {}  # noqa: RUF012  # arguments changed along with it


class Argument(NamedTuple):
    good: Any
    wrong: list[Wrong]

    def also(self, *more: Wrong) -> Argument:
        return Argument(self.good, [*self.wrong, *more])


class Least(NamedTuple):
    """A dimension that may be larger."""

    size: int


class Free(NamedTuple):
    """A dimension of any size; the good call has this one."""

    size: int


def article(dtype: np.dtype) -> str:
    return "an" if dtype == I32 else "a"


def array(dtype: np.dtype, *dims: int | Least | Free) -> Argument:
    shape = [d if isinstance(d, int) else d.size for d in dims]
    other = np.dtype(np.uint8) if dtype == F8 else F32 if dtype == I32 else I32
    allowed = f"must be {article(dtype)} {dtype.name} array of shape ["
    wrong = [
        Wrong([1, 2], TypeError, allowed, "got list [1, 2]"),
        Wrong(np.zeros(shape, other), TypeError, allowed, f"got dtype {other.name}"),
        Wrong(np.zeros([*shape, 1], dtype), ValueError, allowed, f"got shape {[*shape, 1]}"),
    ]
    for axis, dim in enumerate(dims):
        if not isinstance(dim, Free):
            changed = [*shape]
            changed[axis] -= 1
            want = f">={dim.size}" if isinstance(dim, Least) else str(dim)
            value = np.zeros(changed, dtype)
            wrong.append(Wrong(value, ValueError, want, f"got shape {changed}"))
    return Argument(np.zeros(shape, dtype), wrong)


def index_array(*dims: int | Least | Free) -> Argument:
    """float8 here; the function takes bfloat16 too, and says so."""
    good, wrong = array(F8, *dims)
    both = "must be a float8_e4m3fn or bfloat16 array of shape ["
    one = "must be a float8_e4m3fn array of shape ["
    return Argument(good, [w._replace(allowed=both) if w.allowed == one else w for w in wrong])


def optional_array(dtype: np.dtype, *dims: int | Least | Free) -> Argument:
    return array(dtype, *dims)._replace(good=None)


def integer(good: int, low: int, high: int | None = None, limit: str = "") -> Argument:
    allowed = f"must be an int in [{low}, {high}]" if high is not None else f"an int >= {low}"
    allowed += limit and f" (the plan's {limit})"
    wrong = [
        Wrong(True, TypeError, allowed, "got bool True"),
        Wrong(2.5, TypeError, allowed, "got float 2.5"),
        Wrong("3", TypeError, allowed, "got str '3'"),
        Wrong(low - 1, ValueError, allowed, f"got {low - 1}"),
    ]
    if high is not None:
        wrong.append(Wrong(high + 1, ValueError, allowed, f"got {high + 1}"))
    return Argument(good, wrong)


def scalar(good: int, high: int) -> Argument:
    """An int, or a traced int32 scalar."""
    allowed = "must be an int32 array of shape []"
    return integer(good, 0, high).also(
        Wrong(np.zeros((), F32), TypeError, allowed, "got dtype float32"),
        Wrong(np.zeros(1, I32), ValueError, allowed, "got shape [1]"),
    )


def choice(good: Any, *options: Any) -> Argument:
    allowed = "must be one of " + ", ".join(map(repr, options))
    if isinstance(good, str):
        unknown, other, described = "cake", 3, "int 3"
    else:
        unknown, other, described = 3, "2", "str '2'"
    return Argument(
        good,
        [
            Wrong(unknown, ValueError, allowed, f"got {unknown!r}"),
            Wrong(other, TypeError, allowed, f"got {described}"),
            Wrong(True, TypeError, allowed, "got bool True"),
        ],
    )


def flag(good: bool) -> Argument:
    allowed = "must be True or False"
    return Argument(
        good,
        [
            Wrong(1, TypeError, allowed, "got int 1"),
            Wrong("yes", TypeError, allowed, "got str 'yes'"),
        ],
    )


DEVICE = Argument(None, [Wrong("cpu", TypeError, "must be a jax.Device or None", "got str 'cpu'")])
BACKEND = choice("xla", "auto", "mosaic", "xla")
PRECISION = choice("auto", "auto", "exact", "fast")
PDL = flag(False)
SCALE_RANGE = "must be a float in [-3.4028235e+38, 3.4028235e+38]"
SCALE = Argument(
    1.0,
    [
        Wrong(float("nan"), ValueError, SCALE_RANGE, "got nan"),
        Wrong(-float("inf"), ValueError, SCALE_RANGE, "got -inf"),
        Wrong(1e39, ValueError, SCALE_RANGE, "got 1e+39"),
        Wrong(-(10**400), ValueError, SCALE_RANGE, "got an int of 1329 bits"),
        Wrong(10**9999, ValueError, SCALE_RANGE, "got an int of 33216 bits"),
        Wrong("1", TypeError, SCALE_RANGE, "got str '1'"),
        Wrong(True, TypeError, SCALE_RANGE, "got bool True"),
    ],
)


def forced(good: int, other: str) -> Argument:
    """One of two counts of forced blocks; the good value of the other is 1."""
    return integer(good, 0, 16).also(
        Wrong(9, ValueError, "must be at most 16", " = 17", {other: 8}),
        Wrong(16, ValueError, "must be at most 16", " = 17"),
    )


def rows_refused(rows: int, row_offset: int = 0) -> Wrong:
    value = np.zeros((3, rows, 128), F8)
    want = f"rows [{row_offset}, {row_offset + ROWS})" if row_offset else f"= {ROWS} rows a page"
    got = f"got shape [3, {rows}, 128]"
    return Wrong(value, ValueError, want, got, {"row_offset": row_offset} if row_offset else {})


INDEX_K = index_array(Free(3), Free(ROWS), 128).also(
    Wrong(np.zeros((0, ROWS, 128), F8), ValueError, ">=1", f"got shape [0, {ROWS}, 128]"),
    *(rows_refused(rows) for rows in (1, 31, 33, 48, 64, 128)),  # another page or world size
    rows_refused(39, row_offset=8),
)
# Queries come first in prefill, and in a plan everything has the plan's dtype.
OTHER_INDEX_K = Argument(
    INDEX_K.good, [*array(F8, Free(3), Free(ROWS), 128).wrong, *INDEX_K.wrong[3:]]
)
# Inside a plan the offset is the plan's, not an argument.
PLAN_INDEX_K = Argument(INDEX_K.good, [wrong for wrong in OTHER_INDEX_K.wrong if not wrong.others])
ROW_OFFSET = integer(0, 0, 2**31 - 256).also(
    Wrong(4, ValueError, "must be a multiple of 8", "got 4")
)
TABLE = array(I32, Free(REQUESTS), Least(1))
NVP = array(I32, TOKENS)
GENERATIONS = optional_array(I32, 3, 4, Least(TOKENS))
CARRIER = array(I32, 4, Least(TOKENS), 33)


def columns_refused(value: int, allowed: str, tokens: int = TOKENS) -> Wrong:
    got = f"got {value}" if value else f"got shape [{tokens}, 4, 0]"
    return Wrong(np.zeros((tokens, 4, value), F32), ValueError, allowed, got)


def one_rank(*shape: int) -> Wrong:
    """Rows of one rank alone."""
    got = f"got shape {list(shape)}, which lacks axis 0 of ranks"
    return Wrong(np.zeros(shape, I32), ValueError, "ranks, ", got)


SCORES = array(F32, Least(TOKENS), 4, Free(COLUMNS)).also(columns_refused(0, ">=1"))
SCORE_PLAN = Argument(
    api.msa_icp_index_score_sharded_plan([TOKENS, 0], [9, 9], 4, qo_offset=[5, 0], backend="xla"),
    [
        Wrong(None, TypeError, "must be an MSAIcpScorePlan", "got NoneType"),
        Wrong((1, 2), TypeError, "must be an MSAIcpScorePlan", "got tuple"),
    ],
)
SEGMENT_LENS = array(I32, REQUESTS)


def host_lengths(good: list[int], own_size: bool = False) -> Argument:
    wrong = [
        Wrong([1.5, 2.0], TypeError, "must hold ints", "got dtype float64"),
        Wrong([1, -1], ValueError, "[1] must be an int in [0, 2147483647]", "got -1"),
        Wrong([1, 2**31], ValueError, "[1] must be an int in [0, 2147483647]", "got 2147483648"),
        Wrong([1, 2**70], ValueError, "[1] must be an int in [0, 2147483647]", f"got {2**70}"),
        Wrong([1, 10**9999], ValueError, "[1] must be an int in", "got an int of 33216 bits"),
        Wrong([1, [2]], ValueError, "must be a flat sequence of ints", "got a ragged one"),
        Wrong(["1", 2], TypeError, "must hold ints", "got dtype <U21"),
    ]
    if own_size:
        wrong.append(Wrong([[1, 2]], ValueError, "must have one dimension", "got shape [1, 2]"))
    else:
        wrong.append(Wrong([1], ValueError, "must have shape [2]", "got shape [1]"))
    return Argument(good, wrong)


SHARED_DECODE = {
    "index_q": array(F8, TOKENS, 4, 128),
    "index_k": INDEX_K,
    "block_table": TABLE,
    "seq_lens": array(I32, REQUESTS),
    "rank": scalar(1, WORLD - 1),
    "world_size": choice(WORLD, 2, 4),
    "page_size": choice(PAGE, 128, 256),
    "decode_query_len": integer(QUERY_LEN, 1, 8),
    "enable_pdl": PDL,
    "backend": BACKEND,
    "precision": PRECISION,
    "row_offset": ROW_OFFSET,
}
SHARED_PREFILL = {
    "q": index_array(Least(TOKENS), 4, 128),
    "k": OTHER_INDEX_K,
    "block_table": array(I32, REQUESTS, Least(1)),
    "plan": SCORE_PLAN,
    "rank": scalar(1, WORLD - 1),
    "tp": choice(WORLD, 2, 4),
    "compact": flag(False),
    "enable_pdl": PDL,
    "backend": BACKEND,
    "precision": PRECISION,
    "row_offset": ROW_OFFSET,
}
FORCED = {
    "force_begin_blocks": forced(1, "force_end_blocks"),
    "force_end_blocks": forced(1, "force_begin_blocks"),
}
SELECT = {"scores": SCORES, "num_valid_pages": array(I32, Free(TOKENS)), **FORCED}
INDEX_MAP = {
    "index_scale": choice(2, 1, 2),
    "index_offset": scalar(0, 1),
}
GEOMETRY = {
    "world_size": choice(WORLD, 2, 4).also(
        Wrong(8, ValueError, "must be one of 2, 4", "got 8: a group has as many ranks as heads"),
        Wrong(8, ValueError, "two groups of 4 side by side", "docs/scaling.md"),
        Wrong(1, ValueError, "must be one of 2, 4", "got 1: on one device, a plan of 2 runs"),
    ),
    "num_index_heads": choice(4, 4),
    "page_size": choice(PAGE, 128, 256).also(
        Wrong(64, ValueError, "128, 256", "got 64"), Wrong(512, ValueError, "128, 256", "got 512")
    ),
    "init_blocks": forced(1, "local_blocks"),
    "local_blocks": forced(1, "init_blocks"),
    "max_decode_tokens": integer(8, 1, INT_MAX),
    "max_decode_query_len": integer(4, 1, 8),
    "max_num_batched_tokens": integer(16, 1, INT_MAX),
    "max_num_seqs": integer(3, 1, INT_MAX),
    "max_model_len": integer(1024, 1, INT_MAX),
    "num_sparse_layers": integer(3, 1, INT_MAX),
    "row_offset": ROW_OFFSET,
    "index_dtype": choice("float8_e4m3fn", "float8_e4m3fn", "bfloat16").also(
        *(
            Wrong(dtype, TypeError, "'bfloat16', got ", f"{kind}: give the dtype's name, a str")
            for dtype, kind in (
                (jnp.bfloat16, "'jax.numpy.bfloat16'>"),
                (F8, "float8_e4m3fn)"),
                (F8.type, "'ml_dtypes.float8_e4m3fn'>"),
            )
        )
    ),
}

FLOATS = "must be an array of dtype float16 or bfloat16 or float32"

TABLE_OF_CALLS: dict[Callable[..., Any], dict[str, Argument]] = {
    api.prepare_msa_icp_indexer: {
        **GEOMETRY,
        "rank": integer(0, 0, WORLD - 1),
        "device": DEVICE,
        "backend": BACKEND,
        "precision": PRECISION,
        "axis_name": Argument("icp", [Wrong(3, TypeError, "must be a str", "got 3")]),
        "transport": choice("collective", "collective", "one-sided", "auto").also(
            Wrong("one-sided", ValueError, 'the backend "mosaic"', 'got "xla"')
        ),
    },
    api.IndexerGeometry: GEOMETRY,
    api.msa_icp_comm_layout: {
        "world_size": choice(WORLD, 2, 4),
        "heads_per_rank": choice(1, 1),
        "capacity": integer(8, 1),
    },
    api.msa_icp_decode_score_columns: {
        "max_model_len": integer(1024, 1),
        "page_size": choice(PAGE, 128, 256),
    },
    api.msa_icp_decode_pool_bytes: {
        "batch": integer(2, 0),
        "decode_query_len": integer(2, 1, 8),
        "max_model_len": integer(1024, 1),
        "page_size": choice(PAGE, 128, 256),
        "device": DEVICE,
    },
    api.msa_icp_prefill_pool_bytes: {
        "total_q": integer(16, 0),
        "batch": integer(2, 0),
        "device": DEVICE,
        "num_heads": choice(4, 4),
    },
    api.msa_icp_index_score_plan_storage: {
        "num_qo_heads": choice(4, 4),
        "total_q": integer(16, 0, INT_MAX),
        "batch": integer(2, 0, INT_MAX),
        "device": DEVICE,
    },
    api.msa_icp_decode_index_score_sharded: {
        **SHARED_DECODE,
        "score_out": SCORES.also(
            columns_refused(6, "must be a multiple of 4 in [4, 8192]"),
            columns_refused(8196, "must be an int in [1, 8192]"),
        ),
        "max_decode_query_len": integer(8, 1, 8),
    },
    api.msa_icp_decode_score_publish: {
        **SHARED_DECODE,
        **FORCED,
        "num_valid_pages": NVP,
        "generations": GENERATIONS,
        "slot": scalar(0, INT_MAX),
    },
    api.msa_icp_quantize_index: {
        "x": Argument(
            np.zeros((3, 128), F32),
            [
                Wrong([1.0], TypeError, FLOATS, "got list [1.0]"),
                Wrong(np.zeros(3, I32), TypeError, FLOATS, "got dtype int32"),
                Wrong(np.zeros(3, F8), TypeError, FLOATS, "got dtype float8_e4m3fn"),
            ],
        ),
    },
    api.msa_icp_topk_select_publish: {
        **SELECT,
        **INDEX_MAP,
        "scores": SCORES.also(columns_refused(8196, "must be an int in [1, 8192]")),
        "rank": scalar(1, WORLD - 1),
        "world_size": choice(WORLD, 2, 4),
        "heads_per_rank": choice(1, 1),
        "generations": GENERATIONS,
        "slot": scalar(0, INT_MAX),
        "enable_pdl": PDL,
        "backend": BACKEND,
    },
    api.msa_icp_topk_select_prefill: {
        **SELECT,
        **INDEX_MAP,
        "scores": SCORES.also(columns_refused(12288, "must be an int in [1, 12287]")),
        "carrier": CARRIER,
        "backend": BACKEND,
    },
    api.msa_icp_index_score_sharded_plan: {
        "qo_segment_lens": host_lengths([3, 1], own_size=True),
        "kv_segment_lens": host_lengths([9, 9]).also(
            Wrong([9, 5], ValueError, "must be at most kv_segment_lens[1] = 5", "got 5 + 1")
        ),
        "num_qo_heads": choice(4, 4),
        "qo_offset": host_lengths([6, 5]).also(
            Wrong([7, 5], ValueError, "must be at most kv_segment_lens[0] = 9", "got 7 + 3")
        ),
        "device": DEVICE,
        "backend": BACKEND,
    },
    api.msa_icp_index_score_sharded_plan_device: {
        "qo_segment_lens": array(I32, Free(REQUESTS)),
        "kv_segment_lens": SEGMENT_LENS,
        "qo_segment_offsets": array(I32, REQUESTS + 1),
        "kv_segment_offsets": array(I32, REQUESTS + 1),
        "qo_offset": SEGMENT_LENS,
        "num_qo_heads": choice(4, 4),
        "total_q": integer(4, 0, INT_MAX),
        "max_query_len": integer(4, 0, INT_MAX),
        "max_seq_len": integer(9, 0, INT_MAX),
        "backend": BACKEND,
    },
    api.msa_icp_index_score_sharded: {
        **SHARED_PREFILL,
        "max_score": SCORES.also(columns_refused(12288, "must be an int in [1, 12287]")),
        "sm_scale": SCALE,
        "initialize": flag(True),
    },
    api.msa_icp_prefill_score_select: {
        **SHARED_PREFILL,
        **FORCED,
        "num_valid_pages": NVP,
        "carrier": CARRIER,
    },
    api.msa_icp_merge_candidates: {
        "recv_slot": array(I32, Free(WORLD), Free(1), Least(TOKENS), 33).also(
            Wrong(np.zeros((3, 1, 4, 33), I32), ValueError, "must be one of 2, 4", "got 3"),
            Wrong(np.zeros((4, 2, 4, 33), I32), ValueError, "must be one of 1", "got 2"),
            one_rank(1, 4, 33),
            Wrong(
                np.zeros((3, 4, 1, 4, 33), I32),
                ValueError,
                "one slot's part is due",
                "got shape [3, 4, 1, 4, 33]",
            ),
            Wrong(
                np.zeros((4, 1, 4, 33), I32),
                ValueError,
                "shape [ranks, any, >=4, 32, 2]",
                "got shape [4, 1, 4, 33]",
                {"expected_generations": np.zeros((1, 4), I32)},
            ),
        ),
        "num_valid_pages": array(I32, Free(TOKENS)),
        "output": array(I32, Least(TOKENS), 1, 16),
        "errors": array(I32, 1),
        "init_blocks": forced(1, "local_blocks"),
        "local_blocks": forced(1, "init_blocks"),
        "spin_limit": integer(1, 1, INT_MAX),
        "enable_pdl": PDL,
        "expected_generations": Argument(
            None,
            [
                wrong._replace(others={"recv_slot": np.zeros((4, 1, 4, 32, 2), I32)} | wrong.others)
                for wrong in [
                    *array(I32, 1, Least(TOKENS)).wrong,
                    Wrong(
                        np.zeros((1, 4), I32),
                        ValueError,
                        "must be None when prefill=True",
                        "got an array",
                        {"prefill": True},
                    ),
                ]
                if not isinstance(wrong.value, list)
            ],
        ),
        "prefill": flag(False),
        "backend": BACKEND,
    },
    api.msa_icp_write_index_k: {
        "index_k": INDEX_K,
        "new_k": array(F8, Free(5), 128),
        "slot_mapping": array(I32, 5),
        "rank": scalar(1, WORLD - 1),
        "world_size": choice(WORLD, 2, 4),
        "page_size": choice(PAGE, 128, 256),
        "row_offset": ROW_OFFSET,
        "backend": BACKEND,
    },
}

# ---- plan methods, bound to the icp axis ----

PLAN = api.prepare_msa_icp_indexer(
    **{name: argument.good for name, argument in GEOMETRY.items()}, backend="xla"
)
ONE_LAYER = api.prepare_msa_icp_indexer(
    **{name: argument.good for name, argument in GEOMETRY.items()} | {"num_sparse_layers": 1},
    backend="xla",
)


def on_axis(method: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a method on every rank of a vmapped icp axis, with arguments that are all the same."""

    @functools.wraps(method)
    def call(**arguments: Any) -> Any:
        def rank_program(_: jax.Array) -> None:
            method(**arguments)

        jax.vmap(rank_program, axis_name="icp", axis_size=WORLD)(np.arange(WORLD))

    return call


def exchanged(carrier: Any) -> Any:
    """`prefill_exchange` of a carrier that differs between the ranks, as a real one does."""
    rank = jax.lax.axis_index("icp")
    return PLAN.prefill_exchange(
        carrier + rank if getattr(carrier, "dtype", None) == I32 else carrier
    )


def storage(capacity: int, **changes: Any) -> api.MSAIcpComm:
    shapes = comm_shapes(WORLD, capacity)
    return api.MSAIcpComm(
        **{name: np.zeros(shape, I32) for name, shape in shapes.items()} | changes
    )


WRONG_COMMS = [
    Wrong("storage", TypeError, "must be an MSAIcpComm", "got str"),
    Wrong(
        storage(7),
        ValueError,
        "comm.recv must be an int32 array of shape [3, 4, 1, 8, 33]",
        "got shape [3, 4, 1, 7, 33]",
    ),
    Wrong(
        storage(8, errors=np.zeros(1, F32)),
        TypeError,
        "comm.errors must be an int32 array of shape [1]",
        "got dtype float32",
    ),
]
SCRATCH = array(F32, Least(TOKENS), 4, COLUMNS)
OUTPUT = array(I32, Least(TOKENS), 1, 16).also(
    Wrong(
        np.zeros((WORLD, TOKENS, 1, 16), I32),
        ValueError,
        "one rank's",
        f"got shape [{WORLD}, {TOKENS}, 1, 16], an axis too many in front",
    )
)
PREFILL = {
    "query": array(F8, Least(TOKENS), 4, 128).also(
        Wrong(np.zeros((17, 4, 128), F8), ValueError, "16] (the plan's max_num_batc", "got 17")
    ),
    "index_k": PLAN_INDEX_K,
    "block_table": array(I32, REQUESTS, Least(1)),
    "window_plan": SCORE_PLAN,
    "score_scratch": SCRATCH.also(
        Wrong(None, ValueError, "prefill_score_shape()", "got None", {"fused": False})
    ),
    "num_valid_pages": NVP,
    "carrier_view": CARRIER,
    "fused": flag(False),
}
DECODE = {
    "index_q": array(F8, TOKENS, 4, 128),
    "index_k": PLAN_INDEX_K,
    "block_table": TABLE.also(
        Wrong(np.zeros((4, 2), I32), ValueError, "[0, 3] (the plan's max_num_seqs)", "got 4"),
    ),
    "seq_lens": array(I32, REQUESTS),
    "num_valid_pages": NVP,
    "scores": SCRATCH._replace(good=None),
    "output": OUTPUT._replace(good=None),
    "comm": Argument(None, WRONG_COMMS),
    "slot": scalar(0, INT_MAX),
    "tagged": flag(False),
    "decode_query_len": integer(QUERY_LEN, 1, 4, "max_decode_query_len").also(
        Wrong(
            3,
            ValueError,
            "requests * decode_query_len must be an int in [0, 8] (the plan's max_decode_tokens)",
            "got 9",
            {"block_table": np.zeros((3, 2), I32)},
        ),
    ),
    "enable_pdl": PDL,
    "fused": flag(False),
}
METHODS: dict[Callable[..., Any], dict[str, Argument]] = {
    on_axis(PLAN.decode): DECODE,
    on_axis(PLAN.decode_local): {k: v for k, v in DECODE.items() if k != "output"},
    PLAN.decode_merge: {
        "received": array(I32, WORLD, 1, TOKENS, 33).also(
            Wrong(
                np.zeros((WORLD, 1, TOKENS, 33), I32),
                ValueError,
                f"shape [{WORLD} ranks, 1, {TOKENS}, 32, 2]",
                f"got shape [{WORLD}, 1, {TOKENS}, 33]",
                {"tagged": True},
            ),
            one_rank(1, TOKENS, 33),
        ),
        "num_valid_pages": array(I32, Free(TOKENS)).also(
            Wrong(np.zeros(9, I32), ValueError, "[0, 8] (the plan's max_decode_tokens)", "got 9")
        ),
        "output": OUTPUT,
        **{name: DECODE[name] for name in ("comm", "slot", "tagged", "enable_pdl")},
    },
    on_axis(ONE_LAYER.decode): {
        "index_q": Argument(np.zeros((TOKENS, 4, 128), F8), []),
        "index_k": Argument(INDEX_K.good, []),
        "block_table": Argument(TABLE.good, []),
        "seq_lens": Argument(np.zeros(REQUESTS, I32), []),
        "num_valid_pages": Argument(np.zeros(TOKENS, I32), []),
        "decode_query_len": Argument(QUERY_LEN, []),
        "tagged": Argument(
            False, [Wrong(True, ValueError, "num_sparse_layers >= 2", "got num_sparse_layers 1")]
        ),
    },
    PLAN.prefill_window_plan: {
        "qo_segment_lens": array(I32, Free(REQUESTS)).also(
            Wrong(
                np.zeros(4, I32),
                ValueError,
                "must be an int in [0, 3] (the plan's max_num_seqs)",
                "got 4",
                {"kv_segment_lens": np.zeros(4, I32), "qo_offset": np.zeros(4, I32)},
            )
        ),
        "kv_segment_lens": SEGMENT_LENS,
        "qo_offset": SEGMENT_LENS,
        "total_q": integer(4, 0, 16, "max_num_batched_tokens"),
        "max_query_len": integer(4, 0, 16, "max_num_batched_tokens"),
        "max_seq_len": integer(9, 0, 1024, "max_model_len"),
    },
    on_axis(PLAN.prefill_local): PREFILL,
    on_axis(exchanged): {"carrier": array(I32, 4, Free(TOKENS), 33)},
    PLAN.prefill_merge: {
        "received": array(I32, WORLD, 1, Least(TOKENS), 33).also(one_rank(1, TOKENS, 33)),
        "num_valid_pages": array(I32, Free(TOKENS)),
        "output": OUTPUT,
    },
    on_axis(PLAN.prefill): {**PREFILL, "output": OUTPUT},
    PLAN.check_comm: {"comm": Argument(storage(8), WRONG_COMMS)},
    PLAN.warmup: {
        "num_pages": integer(3, 1, INT_MAX),
        "table_width": integer(2, 1, INT_MAX),
        "page_rows": integer(ROWS, ROWS, INT_MAX),
        "batch_sizes": Argument(
            [],
            [
                Wrong([0], ValueError, "in [1, 3] (the plan's max_num_seqs", "got 0"),
                Wrong([4], ValueError, "3] (the plan's max_num_seqs, and max_deco", "got 4"),
            ],
        ),
        "query_lens": Argument(
            [],
            [
                Wrong([0], ValueError, "in [1, 4] (the plan's max_decode_query_len", "got 0"),
                Wrong([5], ValueError, "4] (the plan's max_decode_query_len", "got 5"),
            ],
        ),
        "with_comm": flag(False),
        "tagged": flag(False),
    },
}


def calls() -> Iterator[Any]:
    for function, arguments in (TABLE_OF_CALLS | METHODS).items():
        for name, argument in arguments.items():
            if argument.wrong:
                yield pytest.param(function, name, id=f"{function.__name__}-{name}")


def arguments_of(function: Callable[..., Any]) -> dict[str, Any]:
    table = (TABLE_OF_CALLS | METHODS)[function]
    return {name: argument.good for name, argument in table.items()}


def check_message(error: Exception, name: str, wrong: Wrong) -> None:
    message = str(error)
    assert re.search(rf"(^|\W){re.escape(name)}\b", message), message
    assert wrong.allowed in message, message
    assert wrong.got in message, message


@pytest.mark.parametrize(("function", "name"), list(calls()))
def test_a_wrong_argument_is_refused_by_name_and_nothing_is_touched(function, name):
    good = arguments_of(function)
    for wrong in (TABLE_OF_CALLS | METHODS)[function][name].wrong:
        arguments = good | {name: wrong.value} | wrong.others
        with pytest.raises(wrong.error) as raised:
            function(**arguments)
        assert raised.type is wrong.error
        check_message(raised.value, name, wrong)

        buffers = {key: x for key, x in arguments.items() if isinstance(x, np.ndarray)}
        rest = {key: x for key, x in arguments.items() if key not in buffers}
        if not buffers:
            continue
        donated = {key: jnp.asarray(x) for key, x in buffers.items()}
        program = jax.jit(functools.partial(function, **rest), donate_argnames=tuple(donated))
        with pytest.raises(wrong.error) as raised:
            program(**donated)
        check_message(raised.value, name, wrong)
        for key, buffer in donated.items():
            assert not buffer.is_deleted()
            np.testing.assert_array_equal(np.asarray(buffer), buffers[key])


@pytest.mark.parametrize(
    "function",
    # Warming up compiles; what it warms up is run elsewhere.
    [pytest.param(f, id=f.__name__) for f in TABLE_OF_CALLS | METHODS if f != PLAN.warmup],
)
def test_the_right_call_is_right(function):
    """Or the wrong ones would prove nothing. Traced only: nothing is compiled."""
    jax.eval_shape(lambda: (function(**arguments_of(function)), None)[1])


def test_every_public_function_and_parameter_is_in_the_table():
    public = [getattr(api, name) for name in api.__all__]
    functions = {item for item in public if inspect.isfunction(item)}
    assert functions | {api.IndexerGeometry} == set(TABLE_OF_CALLS)
    for function, arguments in TABLE_OF_CALLS.items():
        assert set(inspect.signature(function).parameters) == set(arguments), function
        assert all(argument.wrong for argument in arguments.values()), function


def test_every_method_that_takes_arguments_is_in_the_table():
    methods = {
        name
        for name, member in inspect.getmembers(MSAIcpIndexerPlan, inspect.isfunction)
        if not name.startswith("_") and len(inspect.signature(member).parameters) > 1
    }
    in_table = {f.__name__.replace("exchanged", "prefill_exchange") for f in METHODS}
    programs = {"decode_program", "prefill_program", "write_program"}  # their mesh is tested below
    storage_of_a_mesh = {"init_comm", "free_comm"}  # see test_one_sided_plan
    assert methods == in_table | programs | storage_of_a_mesh


def test_only_int32_is_an_index():
    """64-bit, unsigned and bool arrays are refused by name, never converted."""
    for function in TABLE_OF_CALLS | METHODS:
        good = arguments_of(function)
        for name, value in good.items():
            if not isinstance(value, np.ndarray) or value.dtype != I32:
                continue
            for dtype in (np.int64, np.uint32, np.bool_):
                with pytest.raises(TypeError, match=rf"\b{name} must be an int32 array") as raised:
                    function(**good | {name: value.astype(dtype)})
                assert f"got dtype {np.dtype(dtype).name}" in str(raised.value)


def test_an_index_in_the_other_byte_order_is_refused_as_that():
    swapped = np.zeros(TOKENS, ">i4")
    with pytest.raises(TypeError, match=r"num_valid_pages must be .* in the other byte order"):
        on_axis(PLAN.decode)(**goods(DECODE) | {"num_valid_pages": swapped})


# ---- the programs ----


def program_calls() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Each program over all ranks on one device, with right host arguments by name."""
    lengths = np.array([TOKENS, 0], I32)
    window_plan = PLAN.prefill_window_plan(
        lengths, lengths, np.zeros(2, I32), total_q=TOKENS, max_query_len=TOKENS, max_seq_len=9
    )

    def every_rank(array: np.ndarray) -> np.ndarray:
        return np.stack([array] * WORLD)

    decode = {
        "index_q": np.zeros((TOKENS, 4, 128), F8),
        "index_k": every_rank(INDEX_K.good),
        "block_table": TABLE.good,
        "seq_lens": np.ones(REQUESTS, I32),
        "num_valid_pages": NVP.good,
        "scores": every_rank(SCRATCH.good),
        "output": every_rank(OUTPUT.good),
    }
    prefill = {
        "query": decode["index_q"],
        "index_k": decode["index_k"],
        "block_table": TABLE.good,
        "window_plan": jax.tree.map(np.asarray, window_plan),
        "score_scratch": decode["scores"],
        "num_valid_pages": NVP.good,
        "carrier_view": every_rank(CARRIER.good),
        "output": decode["output"],
    }
    comm = {"comm": jax.tree.map(every_rank, storage(8)), "slot": np.int32(0)}
    write = {
        "index_k": decode["index_k"],
        "new_k": np.zeros((TOKENS, 128), F8),
        "slot_mapping": np.zeros(TOKENS, I32),
    }
    return {
        "decode": (PLAN.decode_program(decode_query_len=QUERY_LEN), decode),
        "decode with comm": (
            PLAN.decode_program(decode_query_len=QUERY_LEN, with_comm=True),
            decode | comm,
        ),
        "prefill": (PLAN.prefill_program(), prefill),
        "write": (PLAN.write_program(), write),
    }


@pytest.mark.parametrize("name", ["decode", "decode with comm", "prefill", "write"])
def test_a_program_refuses_host_arrays_of_another_dtype_by_name(name):
    """JAX itself would narrow them: page 2**32 + 5 would be page 5."""
    program, good = program_calls()[name]
    program.lower(*good.values())
    for argument, value in good.items():
        leaves, tree = jax.tree.flatten(value)
        for i, leaf in enumerate(leaves):
            other = np.float64 if leaf.dtype == F32 else np.int64
            wide = [*leaves]
            wide[i] = leaf.view(np.uint8) if leaf.dtype == F8 else np.asarray(leaf).astype(other)
            bad = good | {argument: jax.tree.unflatten(tree, wide)}
            want = (
                rf"^{argument}\b.* must be of dtype {leaf.dtype.name}, got a numpy array of dtype "
            )
            for use in (program, program.lower, program.trace, program.eval_shape):
                with pytest.raises(TypeError, match=want + wide[i].dtype.name):
                    use(*bad.values())
    for argument, value in good.items():
        if isinstance(value, np.ndarray) and value.dtype == I32:
            with pytest.raises(TypeError, match=rf"^{argument} .* in the other byte order"):
                program(*(good | {argument: value.astype(">i4")}).values())


@pytest.mark.parametrize("name", ["decode", "decode with comm", "prefill", "write"])
def test_a_program_refuses_what_is_no_array_by_name(name):
    """JAX would take a list apart before the function sees it, or name no argument."""
    program, good = program_calls()[name]
    for argument, value in good.items():
        bad = [[1, 2], (1, 2), 3.5, "x"]
        if isinstance(value, np.ndarray):
            want = f"{argument} must be an? {value.dtype.name} array, got "
        elif argument == "slot":
            want, bad = "slot must be an int >= 0, got ", ["x", 3.5, None, [1]]
        else:
            want, bad = f"{argument} must be an MSAIcp", [*bad, None, np.zeros(3, I32)]
        for wrong in bad:
            with pytest.raises(TypeError, match=f"^{want}"):
                program(*(good | {argument: wrong}).values())


SPLIT = ("index_k", "scores", "score_scratch", "carrier_view", "output", "comm")


@pytest.mark.parametrize("name", ["decode", "decode with comm", "prefill", "write"])
def test_a_program_without_a_mesh_takes_a_leading_axis_of_ranks(name):
    program, good = program_calls()[name]
    device = {key: jax.tree.map(jnp.asarray, value) for key, value in good.items()}
    for argument in [key for key in good if key in SPLIT]:
        first = "comm.recv" if argument == "comm" else argument
        own = jax.tree.map(lambda x: x[0], device[argument])
        shape = re.escape(str(list(jax.tree.leaves(own)[0].shape)))
        want = f"^{first} must have a leading axis of 4 ranks in .* without a mesh, .* got shape "
        with pytest.raises(ValueError, match=want + shape):
            program(*(device | {argument: own}).values())
        # Two ranks' are no better.
        two = jax.tree.map(lambda x: x[:2], device[argument])
        with pytest.raises(ValueError, match=want):
            program(*(device | {argument: two}).values())
    assert not any(x.is_deleted() for x in jax.tree.leaves(device))
    for argument in [key for key in good if key not in (*SPLIT, "window_plan", "slot")]:
        stacked = jnp.stack([device[argument]] * WORLD)
        with pytest.raises(ValueError, match=f"^{argument} must .* an axis too many in front"):
            program(*(device | {argument: stacked}).values())


def test_a_program_over_a_mesh_takes_global_arrays():
    automatic = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((WORLD,), ("icp",), automatic)
    program = PLAN.decode_program(mesh, decode_query_len=QUERY_LEN)
    good = {
        "index_q": np.zeros((TOKENS, 4, 128), F8),
        "index_k": np.zeros((3, PAGE, 128), F8),
        "block_table": TABLE.good,
        "seq_lens": np.ones(REQUESTS, I32),
        "num_valid_pages": NVP.good,
        "scores": np.zeros((TOKENS, 4, WORLD * COLUMNS), F32),
        "output": np.zeros((TOKENS, 4, 16), I32),
    }
    program.lower(*good.values())
    for name, axis in (("index_k", 1), ("scores", 2), ("output", 1)):
        odd = np.moveaxis(np.moveaxis(good[name], axis, 0)[:-1], 0, axis)
        for wrong in (np.zeros(3, good[name].dtype), odd, np.stack([good[name]] * WORLD)):
            want = (
                f"^{name} must be the global array .* of 4 ranks side by side along axis {axis}, "
            )
            got = re.escape(f"got shape {list(wrong.shape)}")
            with pytest.raises(ValueError, match=want + got):
                program(*(good | {name: wrong}).values())
    one_rank_s = np.zeros((3, ROWS, 128), F8)
    with pytest.raises(ValueError, match=r"^index_k must have .* = 32 rows a page") as raised:
        program(*(good | {"index_k": one_rank_s}).values())
    note = "shapes are of one rank's part of the global arrays that were given"
    assert note in raised.value.__notes__


def test_a_program_names_the_buffer_that_it_took_over():
    program, good = program_calls()["write"]
    device = {name: jnp.asarray(value) for name, value in good.items()}
    cache = program(*device.values())
    with pytest.raises(RuntimeError, match=r"^index_k was donated and is deleted: .* last call"):
        program(*device.values())
    program(*(device | {"index_k": cache}).values())


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="says what happens without a GPU")
def test_kernels_are_refused_where_they_do_not_run():
    """They are lowered there all the same."""
    plan = api.prepare_msa_icp_indexer(**goods(GEOMETRY), backend="mosaic")
    _, good = program_calls()["write"]
    mesh = jax.make_mesh((WORLD,), ("icp",), (jax.sharding.AxisType.Auto,))
    device = {name: jnp.asarray(value) for name, value in good.items()}
    want = r'^backend "mosaic" runs on Hopper .* got cpu: .* with backend "auto" or "xla"'
    for use in (
        lambda: plan.write_program()(*good.values()),
        lambda: plan.write_program()(*jax.device_put(device, jax.devices()[1]).values()),
        lambda: plan.write_program(mesh)(*good.values()),
        lambda: plan.warmup(num_pages=3, table_width=2),
        lambda: plan.warmup(num_pages=3, table_width=2, mesh=mesh),
    ):
        with pytest.raises(ValueError, match=want):
            use()
    lowered = plan.write_program().trace(*good.values()).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


def test_a_program_names_its_arguments_where_one_is_missing():
    program, good = program_calls()["write"]
    with pytest.raises(TypeError, match=r"3 arguments \(index_k, new_k, slot_mapping\), got 2"):
        program(*list(good.values())[:2])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"decode_query_len": True}, TypeError),
        ({"decode_query_len": 1.0}, TypeError),
        ({"decode_query_len": 0}, ValueError),
        ({"decode_query_len": 5}, ValueError),
        ({"tagged": 0}, TypeError),
        ({"with_comm": 1}, TypeError),
        ({"fused": 0}, TypeError),
        ({"enable_pdl": 1}, TypeError),
        ({"mesh": []}, TypeError),
        ({"mesh": "icp"}, TypeError),
    ],
)
def test_a_wrong_option_of_a_program_is_refused_and_poisons_nothing(options, error):
    (name,) = options
    for make in (PLAN.decode_program, PLAN.prefill_program, PLAN.write_program):
        if name not in inspect.signature(make).parameters:
            continue
        least = {"decode_query_len": 1} if make == PLAN.decode_program else {}
        with pytest.raises(error, match=f"^{name} must be"):
            make(**least | options)
        right = make(**least)
        assert right is make(**least)
    program, good = program_calls()["decode"]
    output, _ = program(*good.values())
    assert output.shape == good["output"].shape


# ---- the axis and the mesh ----


def goods(arguments: dict[str, Argument]) -> dict[str, Any]:
    return {name: argument.good for name, argument in arguments.items()}


def chains(plan: MSAIcpIndexerPlan) -> dict[str, Callable[[], Any]]:
    prefill = goods(PREFILL)
    return {
        "decode": functools.partial(plan.decode, **goods(DECODE)),
        "prefill_exchange": functools.partial(
            plan.prefill_exchange, carrier=prefill["carrier_view"]
        ),
        "prefill": functools.partial(plan.prefill, **prefill, output=OUTPUT.good),
    }


def rank_zero_plan() -> MSAIcpIndexerPlan:
    return api.prepare_msa_icp_indexer(**goods(GEOMETRY), backend="xla", rank=0)


@pytest.mark.parametrize("chain", ["decode", "prefill_exchange", "prefill"])
def test_a_chain_needs_its_axis_of_its_size_without_a_fixed_rank(chain):
    with pytest.raises(ValueError, match=r"axis_name 'icp' is bound with size 4 .*got an unbound"):
        chains(PLAN)[chain]()
    with pytest.raises(ValueError, match="axis_name 'icp' is bound with size 4, got size 2"):
        jax.vmap(lambda _: chains(PLAN)[chain](), axis_name="icp", axis_size=2)(np.arange(2))
    with pytest.raises(ValueError, match=f"^{chain} needs rank=None .*'icp'.*got rank 0"):
        on_axis(chains(rank_zero_plan())[chain].func)(**chains(rank_zero_plan())[chain].keywords)


def test_a_local_stage_needs_the_axis_or_a_rank():
    with pytest.raises(ValueError, match="rank=None must run where axis_name 'icp' is bound"):
        PLAN.prefill_local(**goods(PREFILL))
    jax.eval_shape(lambda: rank_zero_plan().prefill_local(**goods(PREFILL)))


@pytest.mark.parametrize(
    "program",
    [
        functools.partial(PLAN.decode_program, decode_query_len=1),
        PLAN.prefill_program,
        PLAN.write_program,
    ],
    ids=["decode", "prefill", "write"],
)
def test_a_mesh_without_the_axis(program):
    automatic = (jax.sharding.AxisType.Auto,)
    for axis, size in (("icp", 1), ("other", 1)):
        mesh = jax.make_mesh((size,), (axis,), automatic, devices=jax.devices()[:size])
        with pytest.raises(ValueError, match="mesh must have an axis 'icp' of size 4") as raised:
            program(mesh=mesh)
        assert f"got axes {{'{axis}': {size}}}" in str(raised.value)
