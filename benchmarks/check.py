"""What must hold before a time counts, against plain numpy on a sample of tokens.

Scores: float64, within the tolerance of the arithmetic. Rows: exactly the Top16 of the scores that
the same backend wrote. Merged ids: exactly the Top16 of the rows received. Every check raises
`Mismatch` where they differ.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cases import FLOAT8, INIT_BLOCKS, LOCAL_BLOCKS, PAGE_SIZE, Case, Sharded
from benchmarks.stages import Arrays
from msa_icp_jax.geometry import HEAD_DIM, NUM_HEADS
from msa_icp_jax.rows import ROW_WORDS

sys.path.append(str(Path(__file__).parents[1] / "tests"))
oracle = importlib.import_module("oracle")  # numpy's view of the contract, which the tests use too

EPS = {"exact": 2.0**-17, "fast": 2.0**-10}
_FORCED = (INIT_BLOCKS, LOCAL_BLOCKS)
_TOKENS, _COLUMNS = 12, 24
_KEY_PAGES = 1024  # from which the length of keys is taken


class Mismatch(AssertionError):
    """A stage computed something else than it should."""


def host(x: Any) -> np.ndarray:
    """A copy of a JAX array or a torch tensor."""
    return np.asarray(x) if isinstance(x, jax.Array | np.ndarray) else x.cpu().numpy()


def sample(count: int, most: int = 4 * _TOKENS) -> np.ndarray:
    """At most `most` of range(count), evenly, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))


def _some(x: Any, tokens: np.ndarray) -> np.ndarray:
    """Rows `tokens` of a score plane, fetched alone."""
    found = host(x[jnp.asarray(tokens) if isinstance(x, jax.Array) else tokens.tolist()])
    return np.ascontiguousarray(found)


def check_stage(case: Case, stage: str, precision: str, arrays: Arrays) -> None:
    """Checks all that a stage computed."""
    counts = arrays["counts"]
    if isinstance(case, Sharded) and stage != "merge":
        # bfloat16 is multiplied exactly in every precision.
        check_scores(case, arrays, precision if case.dtype == FLOAT8 else "exact")
    if stage in ("select", "local", "fused-local", "chain"):
        check_rows(case.tokens, arrays["scores"], counts, arrays["rows"])
    if stage in ("merge", "chain"):
        merged = (arrays["received"], counts, arrays["output"], arrays["errors"])
        check_merged(case.tokens, *merged)


def check_scores(case: Sharded, arrays: Arrays, precision: str) -> None:
    """Compares sampled columns of sampled tokens with float64."""
    tokens = sample(case.tokens, _TOKENS)
    queries, table = host(arrays["queries"]), host(arrays["table"])
    for token, got in zip(tokens, _some(arrays["scores"], tokens), strict=True):
        request, position = case.positions[token]
        if position < 0:
            continue
        columns = sample(position // PAGE_SIZE + 1, _COLUMNS)
        pages = np.resize(table[request, columns], _COLUMNS)  # one shape, so one compile
        keys = np.asarray(jnp.take(arrays["keys"], jnp.asarray(pages), axis=0)).astype(np.float64)
        keys = keys[: len(columns)].reshape(len(columns), -1, HEAD_DIM)
        products = keys[None] * queries[token].astype(np.float64)[:, None, None]
        at = columns[:, None] * PAGE_SIZE + case.rank * keys.shape[1] + np.arange(keys.shape[1])
        visible = (at <= position) & (at < case.lens[request])
        want = np.where(visible, products.sum(-1), -np.inf).max(-1)
        slack = EPS[precision] * np.where(visible, np.abs(products).sum(-1), 0).max(-1)
        with np.errstate(invalid="ignore"):  # -inf less -inf
            wrong = ~((got[:, columns] == want) | (np.abs(got[:, columns] - want) <= slack))
        if wrong.any():
            head, column = (int(x[0]) for x in wrong.nonzero())
            raise Mismatch(
                f"score of token {token}, head {head}, column {columns[column]}: "
                f"{got[head, columns[column]]}, float64 says {want[head, column]}"
            )


def check_rows(tokens: int, scores: Any, counts: Any, rows: Any) -> None:
    """Compares the rows of sampled tokens with the Top16 of `scores`, in every word."""
    some = sample(tokens)
    got = host(rows).reshape(NUM_HEADS, -1, ROW_WORDS)[:, some]
    want = oracle.select(_some(scores, some), host(counts)[some], *_FORCED)
    _same("row", some, got.swapaxes(0, 1), want.swapaxes(0, 1))


def check_merged(tokens: int, received: Any, counts: Any, output: Any, errors: Any) -> None:
    """Compares the ids of sampled tokens with the Top16 of all sources' rows; no fault counts."""
    some = sample(tokens)
    want = oracle.merge(host(received)[:, :, some], host(counts)[some], *_FORCED)
    _same("ids", some, host(output)[some], want)
    if host(errors).any():
        raise Mismatch(f"the merge counted {int(host(errors)[0])} faults")


def _same(what: str, tokens: np.ndarray, got: np.ndarray, want: np.ndarray) -> None:
    wrong = (got != want).any(-1)
    if wrong.any():
        at, head = (int(x[0]) for x in wrong.nonzero())
        raise Mismatch(
            f"{what} of token {tokens[at]}, head {head}: {got[at, head]}, not {want[at, head]}"
        )


def check_chosen(
    case: Sharded, arrays: Arrays, scores: Any, ids: np.ndarray, *, exact: bool
) -> None:
    """Compares ids [T, H, 16] (any order, -1 for none) with the best of `scores`.

    Which of equal scores wins is not compared. Unless `exact`, nor is which of two wins that
    differ by less than the fast arithmetic may err.
    """
    some = sample(case.tokens, 16)
    counts, planes = host(arrays["counts"])[some], _some(scores, some)
    rows = (host(arrays["queries"]), np.asarray(arrays["keys"][:_KEY_PAGES]))
    # At least sum_d |q_d k_d| of any query and key: the product of the largest lengths.
    largest = np.prod([np.linalg.norm(x.astype(np.float32), axis=-1).max() for x in rows])
    slack = 0.0 if exact else EPS["fast"] * largest
    every = oracle.top_ids(planes, counts, *_FORCED)
    for at, head in np.ndindex(every.shape[:2]):
        row, best, got = planes[at, head], every[at, head], ids[some[at], head]
        best, got = best[best >= 0], got[got >= 0]
        legal = len(np.unique(got)) == len(got) == len(best) and (got < counts[at]).all()
        forced = best[(best < INIT_BLOCKS) | (best >= counts[at] - LOCAL_BLOCKS)]
        if not legal or not np.isin(forced, got).all() or not _alike(row, got, best, slack):
            raise Mismatch(f"ids of token {some[at]}, head {head}: {got}, the best are {best}")


def _alike(row: np.ndarray, got: np.ndarray, best: np.ndarray, slack: float) -> bool:
    """Whether two choices from a row of scores score the same, one by one."""
    a, b = np.sort(row[got]), np.sort(row[best])
    with np.errstate(invalid="ignore"):  # -inf less -inf
        return bool(((a == b) | (np.abs(a - b) <= slack)).all())
