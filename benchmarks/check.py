"""What must hold before a time counts, against plain numpy on a sample of tokens.

Scores: float64, within the tolerance of the arithmetic. Rows: exactly the Top16 of the scores that
the same backend wrote. Merged ids: exactly the Top16 of the rows received.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.cases import INIT_BLOCKS, LOCAL_BLOCKS, PAGE_SIZE, Case, Decode, Prefill
from msa_icp_jax.geometry import HEAD_DIM, NUM_HEADS, TOPK
from msa_icp_jax.rows import READY, ROW_WORDS

EPS = {"exact": 2.0**-17, "fast": 2.0**-10}
_TOKENS, _COLUMNS = 12, 24
_KEY_PAGES = 1024  # from which the length of keys is taken

Arrays = dict[str, Any]


class Mismatch(AssertionError):
    """A stage computed something else than it should."""


def host(x: Any) -> np.ndarray:
    """A copy of a JAX array or a torch tensor."""
    return np.asarray(x) if isinstance(x, jax.Array | np.ndarray) else x.cpu().numpy()


def sample(count: int, most: int) -> np.ndarray:
    """At most `most` of range(count), evenly, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))


def scores_of(x: Any, tokens: np.ndarray) -> np.ndarray:
    """Rows `tokens` of a score plane, fetched alone."""
    index = jnp.asarray(tokens) if isinstance(x, jax.Array) else tokens.tolist()
    return host(x[index])


def check_scores(case: Decode | Prefill, arrays: Arrays, precision: str) -> None:
    """Compares sampled columns of sampled tokens with float64.

    Raises:
      Mismatch: a score is off by more than the tolerance.
    """
    tokens = sample(case.tokens, _TOKENS)
    found = scores_of(arrays["scores"], tokens)
    queries, table = host(arrays["queries"]), host(arrays["table"])
    for token, got in zip(tokens, found, strict=True):
        request, position = case.positions[token]
        if position < 0:
            continue
        columns = sample(position // PAGE_SIZE + 1, _COLUMNS)
        keys = _pages(arrays["keys"], table[request, columns])
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


def check_rows(case: Case, scores: Any, counts: Any, rows: Any) -> None:
    """Compares the rows of sampled tokens with the Top16 of `scores`.

    Raises:
      Mismatch: a row differs in any word.
    """
    tokens = sample(case.tokens, 4 * _TOKENS)
    counts = host(counts)
    head_rows = host(rows).reshape(NUM_HEADS, -1, ROW_WORDS)
    for token, planes in zip(tokens, scores_of(scores, tokens), strict=True):
        for head, row in enumerate(planes):
            want = select_row(row, int(counts[token]))
            if not np.array_equal(want, head_rows[head, token]):
                raise Mismatch(
                    f"row of token {token}, head {head}: ids {head_rows[head, token][TOPK:-1]}, "
                    f"its scores say {want[TOPK:-1]}"
                )


def check_merged(case: Case, received: Any, counts: Any, output: Any, errors: Any) -> None:
    """Compares the ids of sampled tokens with the Top16 of all sources' rows.

    Raises:
      Mismatch: a token's ids differ, or the merge counted a fault.
    """
    received, counts, output = host(received), host(counts), host(output)
    for token in sample(case.tokens, 4 * _TOKENS):
        for head in range(output.shape[1]):
            want = merge_ids(received[:, head, token], int(counts[token]))
            if not np.array_equal(want, output[token, head]):
                raise Mismatch(
                    f"ids of token {token}, head {head}: {output[token, head]}, the rows say {want}"
                )
    if host(errors).any():
        raise Mismatch(f"the merge counted {int(host(errors)[0])} faults")


def check_chosen(case: Case, arrays: Arrays, scores: Any, ids: np.ndarray, *, exact: bool) -> None:
    """Compares ids [T, 4, 16] (any order, -1 for none) with the best of `scores`.

    Which of equal scores wins is not compared. Unless `exact`, nor is which of two wins that
    differ by less than the fast arithmetic may err.

    Raises:
      Mismatch: an id is none, comes twice, or is not among the best.
    """
    counts = host(arrays["counts"])
    slack = 0.0 if exact else EPS["fast"] * _largest_sum(arrays)
    tokens = sample(case.tokens, 16)
    for token, planes in zip(tokens, scores_of(scores, tokens), strict=True):
        count = int(counts[token])
        for head, row in enumerate(planes):
            best = select_row(row, count)[TOPK : 2 * TOPK]
            best = best[best >= 0]
            got = np.sort(ids[token, head])
            got = got[got >= 0]
            legal = len(np.unique(got)) == len(got) == len(best) and (got < count).all()
            forced = best[(best < INIT_BLOCKS) | (best >= count - LOCAL_BLOCKS)]
            if not legal or not np.isin(forced, got).all() or not _alike(row, got, best, slack):
                raise Mismatch(f"ids of token {token}, head {head}: {got}, the best are {best}")


def _alike(row: np.ndarray, got: np.ndarray, best: np.ndarray, slack: float) -> bool:
    """Whether two choices from a row of scores score the same, one by one."""
    a, b = np.sort(row[got]), np.sort(row[best])
    with np.errstate(invalid="ignore"):  # -inf less -inf
        return bool(((a == b) | (np.abs(a - b) <= slack)).all())


def _largest_sum(arrays: Arrays) -> float:
    """At least sum_d |q_d k_d| of any query and key: the product of the largest lengths."""
    queries = host(arrays["queries"]).astype(np.float32)
    keys = np.asarray(arrays["keys"][:_KEY_PAGES]).astype(np.float32)
    return float(_longest(queries) * _longest(keys))


def _longest(rows: np.ndarray) -> float:
    return float(np.sqrt((rows * rows).sum(-1).max()))


def select_row(scores: np.ndarray, count: int) -> np.ndarray:
    """The candidate row of one token's scores."""
    ids = np.arange(min(count, len(scores)))
    chosen = np.sort(ids[_order(scores[ids], ids, count)[:TOPK]])
    row = np.full(ROW_WORDS, -1, np.int32)
    row[:TOPK] = np.float32(-np.inf).view(np.int32)
    row[: len(chosen)] = scores[chosen].view(np.int32)
    row[TOPK : TOPK + len(chosen)] = chosen
    row[-1] = READY
    return row


def merge_ids(rows: np.ndarray, count: int) -> np.ndarray:
    """The global Top16 of every source's row [W, 33] of one token and head."""
    best: dict[int, float] = {}
    for row in rows:
        scores = np.ascontiguousarray(row[:TOPK]).view(np.float32)
        for score, block in zip(scores.tolist(), row[TOPK : 2 * TOPK].tolist(), strict=True):
            if 0 <= block < count:
                best[block] = max(score, best.get(block, -np.inf))
    ids = np.array(sorted(best), int)
    scores = np.array([best[i] for i in ids.tolist()])
    chosen = np.sort(ids[_order(scores, ids, count)[:TOPK]])
    return np.concatenate([chosen, np.full(TOPK - len(chosen), -1)])


def _order(scores: np.ndarray, ids: np.ndarray, count: int) -> np.ndarray:
    """Forced first, then the larger score, then the lower id."""
    forced = (ids < INIT_BLOCKS) | (ids >= count - LOCAL_BLOCKS)
    return np.lexsort((ids, -np.where(np.isnan(scores), -np.inf, scores), ~forced))


def _pages(keys: jax.Array, pages: np.ndarray) -> np.ndarray:
    """Rows float64 [n, R, 128] of some pages, fetched alone."""
    wanted = np.resize(pages, _COLUMNS)  # one shape, so one compile
    fetched = np.asarray(jnp.take(keys, jnp.asarray(wanted), axis=0)).astype(np.float64)
    return fetched[: len(pages)].reshape(len(pages), -1, HEAD_DIM)
