"""The demonstration: `python -m msa_icp_jax demo`, or the script `msa-icp-demo`.

Real text as index keys, sharded over ranks; 2,048 tokens of prefill and 16 questions as a decode
batch; every selection compared with one rank that holds all keys. In this order: the command line,
what is searched, files of a user's own, the indexer at work, the reference to compare with, what is
said, the picture, progress.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib.resources
import importlib.util
import json
import os
import platform
import shutil
import stat
import statistics
import sys
import textwrap
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import msa_icp_jax
from msa_icp_jax import MSAIcpIndexerPlan, geometry, prepare_msa_icp_indexer
from msa_icp_jax.geometry import HEAD_DIM, NUM_HEADS, cdiv
from msa_icp_jax.rows import ROW_WORDS

MAX_TOKENS = 1 << 20  # of an index file
MAX_QUERIES = 4096
PREFILL_TOKENS = 2048
WINDOW_TOKENS = 512  # of one prefill window
WRITE_TOKENS = 8192  # keys of one write
DECODE_BATCH = 16
BLOCK = 128
TOPK = 16
INIT_BLOCKS = 0
LOCAL_BLOCKS = 1
MOST_DIFFERENCES = 20  # that are named; all are counted
DEFAULT_PICTURE = Path("msa-icp-demo.png")
SAME, DIFFERENT, UNUSABLE = 0, 1, 2  # exit statuses

DESCRIPTION = """\
Chooses, for 16 questions, the 16 blocks (of 128 tokens) to attend to in 32,768 tokens of real text,
with the index keys split over 2 or 4 ranks. First the keys are written into paged caches, then the
last 2,048 tokens are prefilled in windows, then the questions are decoded as one batch. Every
selection is compared with a plain numpy reference that holds all keys.

It runs on whatever JAX finds: without an accelerator every rank gets a virtual CPU device; with
fewer accelerators than ranks, one of them runs all ranks.
"""

EPILOG = """\
exit status: 0 every selection equals the reference's; 1 one differs (it is named, with the reason);
2 an argument or a file cannot be used.

index file: an .npz with uint8 arrays, bytes of float8_e4m3fn: q [n, 4, 128], queries of four heads,
n up to 4,096, and k [m, 128], one key per token, m up to 1,048,576. The queries stand on the last
token; the tokens before it are prefilled with their own keys as queries.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the demonstration's command line."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument(
        "--world-size", type=int, choices=geometry.WORLD_SIZES, default=4, help="ranks (default 4)"
    )
    parser.add_argument(
        "--page-size",
        type=int,
        choices=geometry.PAGE_SIZES,
        default=128,
        help="tokens of a cache page (default 128)",
    )
    parser.add_argument(
        "--index-file", type=Path, metavar="X.npz", help="queries and keys of your own, see below"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="PATH",
        help=f"where to write the picture, a PNG (default {DEFAULT_PICTURE})",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object on stdout, and everything else on stderr",
    )


def command(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line of the script msa-icp-demo; returns the exit status."""
    parser = argparse.ArgumentParser(prog="msa-icp-demo")
    add_arguments(parser)
    return main(parser.parse_args(arguments))


def main(arguments: argparse.Namespace) -> int:
    """Runs the demonstration; returns the exit status."""
    request_cpu_devices(arguments.world_size)
    try:
        picture = _picture_path(arguments.out)
        searched = (
            shipped_context()
            if arguments.index_file is None
            else read_context(arguments.index_file)
        )
    except (NpzError, OSError) as error:
        say(f"msa_icp_jax demo: {error}")
        return UNUSABLE

    indexer = Indexer(len(searched.k), arguments.world_size, arguments.page_size)
    indexer.compile()
    indexer.write(searched.k)
    prefilled = indexer.prefill(searched.prefill_q, searched.prefill_positions)
    chosen = indexer.decode(searched.q)

    differences, num_differences = compare(searched, chosen, prefilled)
    asked = np.full(len(searched.q), len(searched.k) - 1)
    scores = score_blocks(searched.q, searched.k, asked)
    selections = (len(chosen) + len(prefilled)) * geometry.NUM_HEADS
    found = {
        "exact": num_differences == 0,
        "selections": selections,
        "num_differences": num_differences,
        "differences": [vars(difference) for difference in differences],
        **results(searched, indexer, chosen, scores),
    }

    text = describe(found, len(prefilled))
    status = SAME if found["exact"] else DIFFERENT
    if picture is not None:
        try:
            draw(picture, found, scores)
        except OSError as error:  # a full disk must not take the answers with it
            say(f"msa_icp_jax demo: no picture: {error}")
            picture = None
            if arguments.out is not None and status == SAME:
                status = UNUSABLE
        else:
            text += f"\npicture: {picture}"
    if arguments.json:
        found["picture"] = None if picture is None else str(picture)
        say(text)
        print(json.dumps(found, allow_nan=False))
    else:
        print(printable(text, sys.stdout.encoding))
    return status


def compare(
    searched: Context, chosen: np.ndarray, prefilled: np.ndarray
) -> tuple[list[Difference], int]:
    """The first selections that are not the one-rank reference's, and how many are not."""
    asked = np.full(len(searched.q), len(searched.k) - 1)
    work = [
        (phase, start, queries[start:end], positions[start:end], ids[start:end])
        for phase, queries, positions, ids in (
            ("decode", searched.q, asked, chosen),
            ("prefill", searched.prefill_q, searched.prefill_positions, prefilled),
        )
        for start, end in _windows(len(queries))
    ]
    found: list[Difference] = []
    count = 0
    for phase, start, queries, positions, ids in track("compare", work):
        expected = choose_blocks(queries, searched.k, positions)
        some, differing = find_differences(
            phase,
            queries,
            searched.k,
            positions,
            ids,
            expected,
            first_row=start,
            most=MOST_DIFFERENCES - len(found),
        )
        found += some
        count += differing
    return found, count


def _windows(count: int, size: int = 256) -> list[tuple[int, int]]:
    return [(start, min(start + size, count)) for start in range(0, count, size)]


def _picture_path(asked: Path | None) -> Path | None:
    """Where the picture goes; None where it was not asked for and cannot be drawn or written.

    Raises:
      OSError: it was asked for and cannot be drawn or written.
    """
    path = asked or DEFAULT_PICTURE
    # Said now, not after the work.
    if importlib.util.find_spec("matplotlib") is None:
        reason = "needs matplotlib: pip install 'msa-icp-jax[demo]'"
    elif path.is_dir() or not os.access(path.parent, os.W_OK):
        reason = "cannot be written"
    else:
        return path
    if asked is not None:
        raise OSError(f"--out {path} {reason}")
    say(f"no picture: {path} {reason}")
    return None


# ---- what is searched ----


@dataclasses.dataclass(frozen=True)
class Context:
    """One context's index keys, and the queries to ask of it.

    Attributes:
      source: what it is, in words.
      q: uint8 [n, 4, 128], bytes of float8_e4m3fn.
      k: uint8 [m, 128], likewise, one key per token.
      questions: n labels of the queries.
      block_text: the text of each block of 128 tokens, or None.
    """

    source: str
    q: np.ndarray
    k: np.ndarray
    questions: list[str]
    block_text: list[str] | None

    @property
    def prefill_positions(self) -> np.ndarray:
        """Positions of the last tokens, those that the demonstration prefills."""
        return np.arange(max(0, len(self.k) - PREFILL_TOKENS), len(self.k), dtype=np.int32)

    @property
    def prefill_q(self) -> np.ndarray:
        """Their queries, uint8 [t, 4, 128]: for head h the token's key, quarters rotated by h."""
        quarters = self.k[self.prefill_positions].reshape(-1, 4, 32)
        heads = [np.roll(quarters, head, axis=1) for head in range(4)]
        return np.stack(heads, axis=1).reshape(-1, 4, 128)


def shipped_context() -> Context:
    """The licence texts that come with the package; `data/NOTICE.md` says how they were made."""
    path = importlib.resources.files("msa_icp_jax") / "data" / "licence_texts.npz"
    with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        return Context(
            source="licence texts shipped with the package",
            q=arrays["retrieval_q_e4m3"],
            k=np.ascontiguousarray(arrays["retrieval_k_e4m3"]),
            questions=arrays["questions"].tolist(),
            block_text=arrays["block_text"].tolist(),
        )


def read_context(path: Path) -> Context:
    """A user's `q` [n, 4, 128] and `k` [m, 128] from an .npz file.

    Raises:
      NpzError: as `read_npz` does, or an array has the wrong dtype or shape.
    """
    most = {"q": (MAX_QUERIES, 4, HEAD_DIM), "k": (MAX_TOKENS, HEAD_DIM)}
    arrays = read_npz(path, {name: int(np.prod(shape)) for name, shape in most.items()})
    for name, shape in most.items():
        _check_rows(name, arrays[name], shape)
    q, k = arrays["q"], arrays["k"]
    return Context(str(path), q, k, [f"query {i}" for i in range(len(q))], None)


def _check_rows(name: str, array: np.ndarray, most: tuple[int, ...]) -> None:
    """Raises unless the array is uint8 of shape [1 to most[0], *most[1:]]."""
    sizes = ", ".join(["n" if name == "q" else "m", *map(str, most[1:])])
    wanted = f"{name} must be uint8 (bytes of float8_e4m3fn) of shape [{sizes}]"
    if array.dtype != np.uint8:
        raise NpzError(f"{wanted}, got dtype {array.dtype}")
    if array.ndim != len(most) or array.shape[1:] != most[1:]:
        raise NpzError(f"{wanted}, got shape {list(array.shape)}")
    if not 1 <= len(array) <= most[0]:
        raise NpzError(f"{wanted} with 1 to {most[0]} rows, got {len(array)}")


# ---- files of a user's own ----


class NpzError(Exception):
    """The file cannot be used; the message is one line that says why."""


_HEADER_BYTES = 8192  # far more than numpy writes before a plain array
# What numpy writes. The other compressions have headers of their own, which ask for memory.
_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


def read_npz(path: Path, most_bytes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """The arrays of an .npz file, which may be damaged or made to harm, that `most_bytes` names.

    Three checks come before anything is read: a regular file, members of the plain kinds, none of
    them larger than what its array may take at most.

    Raises:
      NpzError: the file cannot be read, an array is missing, or a check fails.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for a writer
            raise NpzError(f"{path} must be a regular file")
        # What a damaged header makes numpy's parser warn of, it also refuses or reads right.
        with warnings.catch_warnings(action="ignore"), path.open("rb") as file:
            with zipfile.ZipFile(file) as archive:
                for name, most in most_bytes.items():
                    _check_member(archive, name, most)
            file.seek(0)
            with np.load(file, allow_pickle=False) as arrays:
                found = {name: arrays[f"{name}.npy"] for name in most_bytes}
    except NpzError:
        raise
    # This broad, since the zip reader, the decompressor, and numpy's header parser (it tokenizes
    # and evaluates Python) raise whatever a damaged file leads them into: a dozen unrelated types,
    # MemoryError and RecursionError among them. None of them is a fault of this program.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise NpzError(f"{path} cannot be read as an .npz file: {reason[:200]}") from error
    for name, array in found.items():
        if not isinstance(array, np.ndarray):  # bytes, of a member that is no .npy file
            raise NpzError(f"{path} cannot be read as an .npz file: {name} is no array")
    return found


def _check_member(archive: zipfile.ZipFile, name: str, most: int) -> None:
    if f"{name}.npy" not in archive.namelist():
        have = ", ".join(map(ascii, sorted(archive.namelist()))) or "nothing"
        raise NpzError(f"the file must hold the array {name}, got {have[:200]}")
    info = archive.getinfo(f"{name}.npy")
    if info.compress_type not in _COMPRESSIONS:
        raise NpzError(f"{name} must be stored or deflated, got compression {info.compress_type}")
    if info.file_size > most + _HEADER_BYTES:
        raise NpzError(f"{name} must be an array of at most {most} bytes, got {info.file_size}")


# ---- the indexer at work ----


_DECODE_REPEATS = 5
_SPARE_PAGES = 3  # never written
_UNWRITTEN = 0xFF  # a NaN: reading a row that was never written would show


def request_cpu_devices(count: int) -> None:
    """Makes JAX's CPU backend, where it is the one, start with `count` devices.

    It has to come before anything starts a backend. A count in the user's own XLA_FLAGS stands.
    """
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        jax.config.update("jax_num_cpu_devices", count)


@dataclasses.dataclass
class Timings:
    """Milliseconds of the stages, and of compiling them beforehand."""

    compile_ms: float = 0.0
    stage_ms: dict[str, float] = dataclasses.field(default_factory=dict)


class Indexer:
    """All ranks of one group, serving requests that share one context's pages."""

    def __init__(self, num_tokens: int, world_size: int, page_size: int) -> None:
        self.plan: MSAIcpIndexerPlan = prepare_msa_icp_indexer(
            world_size=world_size,
            num_index_heads=NUM_HEADS,
            page_size=page_size,
            init_blocks=INIT_BLOCKS,
            local_blocks=LOCAL_BLOCKS,
            max_decode_tokens=DECODE_BATCH,
            max_decode_query_len=1,
            max_num_batched_tokens=WINDOW_TOKENS,
            max_num_seqs=DECODE_BATCH,
            max_model_len=num_tokens,
            num_sparse_layers=1,
            precision="exact",  # prefill must agree with the float64 reference too
        )
        self.num_tokens = num_tokens
        devices = jax.devices()
        self.device_kind = devices[0].device_kind
        # With fewer devices than ranks, all ranks run on one of them.
        self.mesh = (
            Mesh(np.array(devices[:world_size]), (self.plan.axis_name,))
            if len(devices) >= world_size
            else None
        )
        used = cdiv(num_tokens, page_size)
        self.num_pages = used + _SPARE_PAGES
        # Pages lie anywhere in the cache, as after some serving; the shuffle is always the same.
        self.pages = np.random.default_rng(0).permutation(self.num_pages)[:used]
        self.table = self._put(np.tile(self.pages.astype(np.int32), (DECODE_BATCH, 1)))
        rows = self.plan.geometry.rows_per_page
        empty = np.full((self.num_pages, rows, HEAD_DIM), _UNWRITTEN, np.uint8)
        self.index_k = self._shard(empty.view(jnp.float8_e4m3fn), axis=1)
        self.timings = Timings()

    @property
    def num_devices(self) -> int:
        """Devices that the ranks run on."""
        return 1 if self.mesh is None else self.mesh.size

    def compile(self) -> None:
        """Compiles everything that runs below."""
        warmup = functools.partial(
            self.plan.warmup,
            num_pages=self.num_pages,
            table_width=len(self.pages),
            query_lens=[1],
            mesh=self.mesh,
        )
        no_keys = functools.partial(self._write_chunk, np.zeros((0, HEAD_DIM), np.uint8), 0)
        no_window = functools.partial(self._window_plan, 0, 0)
        start = time.perf_counter()
        for step in track("compile", [warmup, no_keys, no_window]):
            step()
        self.timings.compile_ms = 1e3 * (time.perf_counter() - start)

    def write(self, keys: np.ndarray) -> None:
        """Stores the keys (uint8 [m, 128]), each on the rank that owns its row."""
        with self._timed("write"):
            for start in track("write keys", range(0, len(keys), WRITE_TOKENS)):
                self._write_chunk(keys[start : start + WRITE_TOKENS], start)
            self.index_k.block_until_ready()

    def prefill(self, queries: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Chosen blocks [t, 4, 16] of consecutive tokens, window after window."""
        program = self.plan.prefill_program(self.mesh)
        scratch = self._shard(np.zeros(self.plan.prefill_score_shape(), np.float32), axis=2)
        carrier = self._shard(np.zeros((NUM_HEADS, WINDOW_TOKENS, ROW_WORDS), np.int32), axis=1)
        output = self._new_output(WINDOW_TOKENS)
        chosen = []
        with self._timed("prefill"):
            for start in track("prefill", range(0, len(queries), WINDOW_TOKENS)):
                window = queries[start : start + WINDOW_TOKENS]
                window_plan, num_valid_pages = self._window_plan(int(positions[start]), len(window))
                output, carrier, scratch = program(
                    self._put(_padded(window, WINDOW_TOKENS).view(jnp.float8_e4m3fn)),
                    self.index_k,
                    self.table,
                    window_plan,
                    scratch,
                    num_valid_pages,
                    carrier,
                    output,
                )
                chosen.append(self._collect(output)[: len(window)])
        return np.concatenate(chosen)

    def decode(self, queries: np.ndarray) -> np.ndarray:
        """Chosen blocks [n, 4, 16], in steps of 16 requests.

        Each request holds the whole context, and its query stands on the last token.
        """
        program = self.plan.decode_program(self.mesh, decode_query_len=1)
        scores = self._shard(np.full(self.plan.decode_score_shape(), -np.inf, np.float32), axis=2)
        output = self._new_output(DECODE_BATCH)
        visible = (self.num_tokens - 1) // BLOCK + 1
        chosen, step_ms = [], []
        for start in track("decode", range(0, len(queries), DECODE_BATCH)):
            batch = queries[start : start + DECODE_BATCH]
            live = np.arange(DECODE_BATCH) < len(batch)  # the others are padding, of length 0
            inputs = (
                self._put(_padded(batch, DECODE_BATCH).view(jnp.float8_e4m3fn)),
                self.index_k,
                self.table,
                self._put(np.where(live, self.num_tokens, 0).astype(np.int32)),
                self._put(np.where(live, visible, 0).astype(np.int32)),
            )
            for _ in range(_DECODE_REPEATS):
                begin = time.perf_counter()
                output, scores = jax.block_until_ready(program(*inputs, scores, output))
                step_ms.append(1e3 * (time.perf_counter() - begin))
            chosen.append(self._collect(output)[: len(batch)])
        self.timings.stage_ms["decode"] = statistics.median(step_ms)
        return np.concatenate(chosen)

    def _write_chunk(self, keys: np.ndarray, start: int) -> None:
        """Stores keys of the positions from `start`; a slot of -1 stores nothing."""
        page_size = self.plan.geometry.page_size
        position = np.arange(start, start + len(keys))
        slots = np.full(WRITE_TOKENS, -1, np.int32)
        slots[: len(keys)] = self.pages[position // page_size] * page_size + position % page_size
        self.index_k = self.plan.write_program(self.mesh)(
            self.index_k,
            self._put(_padded(keys, WRITE_TOKENS).view(jnp.float8_e4m3fn)),
            self._put(slots),
        )

    def _window_plan(self, first: int, count: int) -> Any:
        """The plan of a window of `count` tokens from position `first`, and their visible blocks.

        The window belongs to the first of the requests; the others have no tokens in it.
        """
        lengths = np.zeros((3, DECODE_BATCH), np.int32)
        lengths[:, 0] = count, first + count, first
        return self._put(self._make_window_plan(*lengths))

    @functools.cached_property
    def _make_window_plan(self) -> Callable[..., Any]:
        @jax.jit
        def make(qo_lens: jax.Array, kv_lens: jax.Array, qo_offset: jax.Array) -> Any:
            window_plan = self.plan.prefill_window_plan(
                qo_lens,
                kv_lens,
                qo_offset,
                total_q=WINDOW_TOKENS,
                max_query_len=WINDOW_TOKENS,
                max_seq_len=self.num_tokens,
            )
            return window_plan, window_plan.num_valid_pages()

        return make

    def _new_output(self, tokens: int) -> jax.Array:
        heads = self.plan.geometry.heads_per_rank
        return self._shard(np.full((tokens, heads, TOPK), -1, np.int32), axis=1)

    def _put(self, value: Any) -> Any:
        """The same value on every rank."""
        return jax.device_put(value, NamedSharding(self.mesh, P()) if self.mesh else None)

    def _shard(self, local: np.ndarray, axis: int) -> jax.Array:
        """An array of which every rank holds a part like `local`, along `axis`."""
        ranks = self.plan.geometry.world_size
        if self.mesh is None:
            return jnp.stack([local] * ranks)
        spec = P(*[None] * axis, self.plan.axis_name)
        return jax.device_put(
            np.concatenate([local] * ranks, axis=axis), NamedSharding(self.mesh, spec)
        )

    def _collect(self, output: jax.Array) -> np.ndarray:
        """Chosen blocks of all heads on the host; each rank has those of the heads it owns."""
        host = np.asarray(output)
        return host if self.mesh is not None else np.concatenate(list(host), axis=1)

    @contextlib.contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.timings.stage_ms[stage] = 1e3 * (time.perf_counter() - start)


def _padded(rows: np.ndarray, count: int) -> np.ndarray:
    """Rows of zeros behind, up to `count`."""
    return np.pad(rows, [(0, count - len(rows))] + [(0, 0)] * (rows.ndim - 1))


# ---- the reference: one rank that holds every key ----
#
# Plain numpy in float64, which shares no code with the indexer, so that agreement means something.
# A sum of 128 float8_e4m3fn products is exact in float64. The indexer adds in float32, so two
# blocks whose scores differ by less than that sum's rounding may change places; `explain` tells
# such a difference from a wrong one.

_ROUNDING = 2.0**-17  # of float32 accumulation, relative to the sum of |q_d k_d|
_KEYS_AT_ONCE = 64 * BLOCK


@dataclasses.dataclass(frozen=True)
class Difference:
    """A selection that is not the reference's."""

    phase: str
    row: int
    head: int
    chosen: list[int]
    expected: list[int]
    why: str

    def __str__(self) -> str:
        return (
            f"{self.phase} row {self.row} head {self.head}: chosen {self.chosen}, "
            f"expected {self.expected} ({self.why})"
        )


def choose_blocks(q: np.ndarray, k: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Chosen blocks int [n, 4, 16], ascending with a -1 tail.

    Args:
      q: uint8 [n, 4, 128], bytes of float8_e4m3fn.
      k: uint8 [m, 128], likewise.
      positions: int [n], the position of each query; it sees the keys up to there.
    """
    scores = score_blocks(q, k, positions)
    block = np.arange(scores.shape[2])
    visible = (positions // BLOCK + 1)[:, None]
    forced = (block < INIT_BLOCKS) | (block >= visible - LOCAL_BLOCKS)
    rank = np.where(forced[:, None], np.inf, scores)
    rank = np.where((block < visible)[:, None], rank, -np.inf)
    # Stable: equal scores keep the lower id in front, and a visible block that scores -inf stays
    # in front of the blocks that lie past the query.
    best = np.argsort(-rank, axis=2, kind="stable")[:, :, :TOPK]
    best = np.pad(best, ((0, 0), (0, 0), (0, TOPK - best.shape[2])), constant_values=len(k))
    past = best >= visible[:, :, None]
    ids = np.sort(np.where(past, len(k), best), axis=2)
    return np.where(ids == len(k), -1, ids)


def score_blocks(q: np.ndarray, k: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Block scores float64 [n, 4, blocks]; -inf where no product is visible and a number."""
    rows = decode_e4m3(q).reshape(-1, q.shape[2])
    limits = np.repeat(positions, q.shape[1])[:, None]
    parts = []
    for start, keys in _key_chunks(k):
        scores = rows @ decode_e4m3(keys).T
        hidden = np.arange(start, start + len(keys)) > limits
        scores[hidden | np.isnan(scores)] = -np.inf
        parts.append(_block_max(scores))
    return np.concatenate(parts, axis=1).reshape(*q.shape[:2], -1)


def find_differences(
    phase: str,
    q: np.ndarray,
    k: np.ndarray,
    positions: np.ndarray,
    chosen: np.ndarray,
    expected: np.ndarray,
    *,
    first_row: int,
    most: int,
) -> tuple[list[Difference], int]:
    """The first (row, head)s whose chosen blocks are not the expected ones, and how many are not.

    At most `most` are returned: explaining one takes a pass over all keys.
    """
    differing = np.argwhere((chosen != expected).any(axis=2))
    found = []
    for row, head in differing[:most]:
        ours, theirs = chosen[row, head].tolist(), expected[row, head].tolist()
        why = explain(q[row : row + 1, head : head + 1], k, positions[row], ours, theirs)
        found.append(Difference(phase, first_row + int(row), int(head), ours, theirs, why))
    return found, len(differing)


def explain(
    q: np.ndarray, k: np.ndarray, position: int, chosen: list[int], expected: list[int]
) -> str:
    """Says whether rounding of float32 sums accounts for one differing selection."""
    extra, missing = sorted({*chosen} - {*expected}), sorted({*expected} - {*chosen})
    visible = position // BLOCK + 1
    if sorted(chosen) == sorted(expected):
        return "wrong: the right ids in the wrong order"
    if any(block < 0 or block >= visible for block in extra) or len(extra) != len(missing):
        return "wrong: not as many different, visible blocks as there must be"
    if any(block < INIT_BLOCKS or block >= visible - LOCAL_BLOCKS for block in missing):
        return "wrong: a first or last block, which every query gets, is missing"
    scores = score_blocks(q, k, np.array([position]))[0, 0]
    sizes = _block_magnitudes(q, k)
    gap = scores[missing].max() - scores[extra].min()
    rounding = _ROUNDING * (sizes[missing].max() + sizes[extra].max())
    if gap <= rounding:
        return (
            f"a near tie: the scores differ by {gap:.3g}, and float32 sums of this size may be "
            f"{rounding:.3g} off"
        )
    return f"wrong: the scores differ by {gap:.3g}, rounding accounts for {rounding:.3g} at most"


def decode_e4m3(data: np.ndarray) -> np.ndarray:
    """The values of float8_e4m3fn bytes, float64."""
    return _E4M3_VALUES[data]


def _e4m3_values() -> np.ndarray:
    """The 256 values by their byte: sign, 4 exponent bits, 3 mantissa bits; no infinity."""
    byte = np.arange(256)
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    return np.where(byte & 127 == 127, np.nan, np.where(byte & 128, -size, size))


_E4M3_VALUES = _e4m3_values()


def _block_magnitudes(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Largest sum of |q_d k_d| over the keys of each block, float64 [blocks], of one query."""
    row = np.abs(decode_e4m3(q).reshape(-1))
    sizes = [np.abs(decode_e4m3(keys)) @ row for _, keys in _key_chunks(k)]
    return _block_max(np.nan_to_num(np.concatenate(sizes))[None])[0]


def _block_max(values: np.ndarray) -> np.ndarray:
    """[rows, keys] to [rows, blocks]; the last block may be short."""
    return np.maximum.reduceat(values, np.arange(0, values.shape[1], BLOCK), axis=1)


def _key_chunks(k: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    for start in range(0, len(k), _KEYS_AT_ONCE):
        yield start, k[start : start + _KEYS_AT_ONCE]


# ---- what is said ----

_EXCERPT_WORDS = 40


def results(
    context: Context,
    indexer: Indexer,
    chosen: np.ndarray,
    scores: np.ndarray,
) -> dict[str, Any]:
    """What the demonstration found and how, fit for JSON; the comparison is added to it.

    Args:
      context: what was searched.
      indexer: what searched it.
      chosen: int [n, 4, 16], blocks chosen by decode.
      scores: float64 [n, 4, blocks], block scores of the reference.
    """
    return {
        "source": context.source,
        "tokens": len(context.k),
        "questions": [
            _question(context, index, chosen[index], scores[index])
            for index in range(len(context.q))
        ],
        "world_size": indexer.plan.geometry.world_size,
        "page_size": indexer.plan.geometry.page_size,
        "backend": indexer.plan.backend,
        "precision": indexer.plan.precision,
        "device": indexer.device_kind,
        "num_devices": indexer.num_devices,
        "compile_ms": round(indexer.timings.compile_ms, 3),
        "stage_ms": {name: round(ms, 3) for name, ms in indexer.timings.stage_ms.items()},
        "versions": {
            "msa_icp_jax": msa_icp_jax.__version__,
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }


def describe(found: dict[str, Any], prefilled: int) -> str:
    """The results as text for people."""
    devices = f"{found['num_devices']} x {found['device']}"
    lines = [
        f"{found['tokens']:,} tokens of context: {found['source']}",
        f"{found['world_size']} ranks on {devices}, pages of {found['page_size']} tokens, backend "
        f"{found['backend']}, jax {found['versions']['jax']}",
        "",
    ]
    for number, question in enumerate(found["questions"], 1):
        lines += [f"{number:2}. {question['question']}", *_indented(_answer(question)), ""]
    windows = -(-prefilled // WINDOW_TOKENS)
    stages = {
        "compile": (found["compile_ms"], "all programs, once"),
        "write": (found["stage_ms"]["write"], f"{found['tokens']:,} keys into sharded pages"),
        "prefill": (
            found["stage_ms"]["prefill"],
            f"{prefilled:,} tokens in windows of up to {WINDOW_TOKENS} ({windows} in all)",
        ),
        "decode": (
            found["stage_ms"]["decode"],
            f"one step of up to {DECODE_BATCH} requests (median of the steps)",
        ),
    }
    lines += [f"{name:8}{ms:10,.1f} ms  {what}" for name, (ms, what) in stages.items()]
    lines += ["", *_verdict(found)]
    return "\n".join(lines)


def _question(
    context: Context, index: int, chosen: np.ndarray, scores: np.ndarray
) -> dict[str, Any]:
    best = int(scores[0].argmax())
    answer: dict[str, Any] = {
        "question": context.questions[index],
        "best_block": best,
        "best_tokens": [best * BLOCK, min((best + 1) * BLOCK, len(context.k))],
        "chosen": [[int(block) for block in head if block >= 0] for head in chosen],
    }
    if context.block_text is not None:
        answer["best_text"] = context.block_text[best]
    return answer


def _answer(question: dict[str, Any]) -> list[str]:
    first, end = question["best_tokens"]
    where = f"best block {question['best_block']}, tokens {first} to {end - 1}"
    if "best_text" in question:
        where += f": {_excerpt(question['best_text'], question['question'])}"
    return [f"chosen blocks: {' '.join(map(str, question['chosen'][0]))}", where]


def _excerpt(text: str, question: str) -> str:
    """The part of the text that shares most with the question, long words counting more."""
    words, wanted = text.split(), set(question.split())

    def shared(start: int) -> int:
        return sum(map(len, wanted.intersection(words[start : start + _EXCERPT_WORDS])))

    start = max(range(max(1, len(words) - _EXCERPT_WORDS + 1)), key=shared)
    end = start + _EXCERPT_WORDS
    before, after = "... " * (start > 0), " ..." * (end < len(words))
    return f"{before}{' '.join(words[start:end])}{after}"


def _indented(paragraphs: list[str]) -> list[str]:
    width = min(100, shutil.get_terminal_size().columns)
    wrap = textwrap.TextWrapper(width, initial_indent="    ", subsequent_indent="      ")
    return [line for paragraph in paragraphs for line in wrap.wrap(paragraph)]


def _verdict(found: dict[str, Any]) -> list[str]:
    count, total = found["num_differences"], found["selections"]
    if not count:
        return [f"exact: all {total:,} selections equal those of one rank that holds every key"]
    lines = [f"NOT EXACT: {count:,} of {total:,} selections differ from those of one rank:"]
    for difference in found["differences"]:
        lines.append(f"  {Difference(**difference)}")
    if count > len(found["differences"]):
        lines.append(f"  and {count - len(found['differences']):,} more")
    return lines


# ---- the picture ----

_MOST_PANELS = 16
_GREY, _BLUE, _RED = "#9aa5b1", "#1f5fa8", "#c8321f"


def draw(path: Path, found: dict[str, Any], scores: np.ndarray) -> None:
    """Writes a PNG of the first 16 questions' head 0.

    Args:
      path: where to.
      found: what `results` gave.
      scores: float64 [n, 4, blocks], block scores of the reference.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    questions = found["questions"][:_MOST_PANELS]
    columns = min(2, len(questions))
    rows = -(-len(questions) // columns)
    figure = Figure(figsize=(7 * columns, 1.55 * rows + 1.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, sharex=True, squeeze=False).ravel()
    for panel, question, score in zip(panels, questions, scores[:, 0], strict=False):
        _draw_question(panel, question, score)
    for panel in panels[len(questions) :]:
        panel.axis("off")
    for panel in panels[max(0, len(questions) - columns) : len(questions)]:
        panel.set_xlabel("block of 128 tokens")
        panel.tick_params(labelbottom=True)
    figure.supylabel("block score, head 0: largest q.k over the block's keys")
    source = printable(found["source"], "ascii")  # a file's name, which the font may lack signs of
    verdict = "equal to" if found["exact"] else "NOT equal to"
    figure.suptitle(
        f"The 16 blocks chosen from {found['tokens']:,} tokens ({source})\n"
        f"{found['world_size']} ranks, pages of {found['page_size']}, backend {found['backend']}: "
        f"{verdict} one rank that holds every key",
        parse_math=False,
    )
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, format="png")


def _draw_question(panel: Any, question: dict[str, Any], scores: np.ndarray) -> None:
    scores = np.where(np.isfinite(scores), scores, np.nan)  # a block of NaN keys has no height
    chosen, best = np.array(question["chosen"][0]), question["best_block"]
    forced = (chosen < INIT_BLOCKS) | (chosen >= len(scores) - LOCAL_BLOCKS)
    panel.plot(scores, color=_GREY, linewidth=0.9, label="score of every block")
    for blocks, face, label in (
        (chosen[~forced], _BLUE, "chosen by score"),
        (chosen[forced], "white", "always chosen: the last"),
    ):
        panel.scatter(blocks, scores[blocks], s=20, c=face, edgecolors=_BLUE, label=label, zorder=2)
    panel.scatter([best], scores[[best]], s=55, marker="D", color=_RED, label="best", zorder=3)
    panel.annotate(
        f"{best}",
        (best, scores[best]),
        xytext=(0, 6),
        textcoords="offset points",
        color=_RED,
        fontweight="bold",
        ha="center",
        va="bottom",
    )
    panel.set_title(question["question"], fontsize=10, loc="left", parse_math=False)
    panel.margins(x=0.03, y=0.1)
    low, high = panel.get_ylim()
    panel.set_ylim(low, high + 0.2 * (high - low))  # room for the best block's number
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(axis="y", alpha=0.25)


# ---- progress, on stderr ----


def track[Item](label: str, items: Sequence[Item]) -> Iterator[Item]:
    """Yields the items, in a terminal behind rich's bar where that is installed; says the time."""
    start = time.monotonic()
    if sys.stderr.isatty() and importlib.util.find_spec("rich"):
        from rich.console import Console
        from rich.progress import track as rich_track

        yield from rich_track(items, label, console=Console(stderr=True), transient=True)
    else:
        yield from items
    say(f"{label}: done in {time.monotonic() - start:.1f} s")


def say(message: str) -> None:
    """One line on stderr."""
    print(printable(message, sys.stderr.encoding), file=sys.stderr, flush=True)


def printable(text: str, encoding: str | None) -> str:
    """The text with escapes for what `encoding` lacks, such as undecodable bytes of file names."""
    encoding = encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
