"""Writes the measured parts of the documents from the committed results: nobody types a figure.

A part stands between `<!-- measured: NAME -->` and `<!-- end of NAME -->`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks import model, report, results
from benchmarks.cases import (
    DECODE,
    EXCHANGED,
    HOST,
    MERGE,
    PREFILL,
    SELECT,
    Decode,
    Merge,
    Prefill,
    Select,
    at_world_size,
)
from benchmarks.options import BACKENDS
from benchmarks.results import Row
from msa_icp_jax.geometry import HEAD_DIM, WORLD_SIZES

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "h200.json"
SWEEP = results.beside(RESULTS, results.SWEEP_SUFFIX)
PAIR = results.beside(RESULTS, "-x2")  # two of them
_NONE = "-"
_MISSING = f"{_NONE}: not measured in these runs."
_JIT = "(jit): timed in one jitted program, not in a CUDA graph."
_NAMES = {"xla": "XLA", "torch": "torch", "torch_compile": "torch.compile"}
_TRANSPORTS = {
    "none": "merge alone",
    "nccl": "NCCL, merge",
    "one-sided-legacy": "one-sided, flags",
    "one-sided-tagged": "one-sided, tagged",
}


class Figures:
    """The rows of a result file by what they measure."""

    def __init__(self, path: Path) -> None:
        self.rows = results.load(path) if path.exists() else []
        self.absent = results.absent(path) if path.exists() else {}
        self._by_key = {results.key_of(row): row for row in self.rows}

    def row(self, *key: str) -> Row | None:
        return self._by_key.get(key)

    def us(self, *key: str) -> str:
        """A median."""
        row = self.row(*key)
        return _us(row["median_us"]) + _otherwise_timed(row) if row else _NONE

    def with_spread(self, *key: str) -> str:
        """A median with the smallest and the largest time."""
        row = self.row(*key)
        if row is None:
            return _NONE
        low, high = row["spread_us"]
        median = f"**{_us(row['median_us'])}**{_otherwise_timed(row)}"
        return f"{median} ({_us(low)} to {_us(high)})"

    def floor(self, *key: str) -> str:
        row = self.row(*key)
        return _us(row["floor_us"]) if row else _NONE

    def over_floor(self, *key: str) -> str:
        row = self.row(*key)
        return f"{row['median_us'] / row['floor_us']:.2f}" if row else _NONE


def _otherwise_timed(row: Row) -> str:
    """A mark on a figure of a kernel or of torch that is not from a CUDA graph."""
    return " (jit)" if row.get("timing") == "jit" and row["backend"] != "xla" else ""


def rewrite() -> list[Path]:
    """Brings all parts up to date; the files that changed."""
    changed = []
    for path in dict.fromkeys(path for path, _ in PARTS):
        old = path.read_text()
        new = old
        for (place, name), make in PARTS.items():
            if place == path:
                new = put(new, name, make())
        if new != old:
            path.write_text(new)
            changed.append(path)
    return changed


def put(text: str, name: str, part: str) -> str:
    """`text` with the part of that name replaced.

    Raises:
      ValueError: it does not have it once.
    """
    begin, end = f"<!-- measured: {name} -->\n", f"<!-- end of {name} -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"no single part {name!r} between {begin.strip()} and {end}")
    return pattern.sub(lambda _: f"{begin}{part}{end}", text)


# ---- parts ----


def performance() -> str:
    """README: decode, prefill, single stages."""
    figures = Figures(RESULTS)
    tables = [_decode_table(figures), _prefill_table(figures), _stage_table(figures)]
    paragraphs = [
        _where([row for row in figures.rows if row["backend"] == "mosaic"]),
        *tables,
        *_legend(tables),
        _missed(figures),
        *_fit_sentences(model.fits(Figures(SWEEP).rows)),
        *_exchange_sentences(Figures(PAIR)),
        *_peer_sentences(figures),
        *_absent(figures),
    ]
    return "\n" + "\n\n".join(paragraphs) + "\n\n"


def scaling() -> str:
    """docs/scaling.md: the sweep and the fitted model."""
    rows = Figures(SWEEP).rows
    if not rows:
        return "\nNot measured yet.\n\n"
    paragraphs = ["Measured:", _where(rows)]
    for world_size in sorted({row["world_size"] for row in rows}):
        curves = [row for row in rows if row["world_size"] == world_size]
        paragraphs.append(f"W = {world_size}, microseconds (and times over the floor) by context:")
        paragraphs.append(_curves(curves))
    paragraphs.append(_fits_table(model.fits(rows)))
    paragraphs.append(
        f"![times, floors and model](../benchmarks/results/{SWEEP.stem}.png)\n\n"
        "Dashed is the floor (bytes over the read ceiling of the same run), dotted the model."
    )
    return "\n" + "\n\n".join(paragraphs) + "\n\n"


def exchange() -> str:
    """docs/scaling.md: the exchange between GPUs."""
    pair = Figures(PAIR)
    rows = [row for row in pair.rows if row["backend"] in _TRANSPORTS]
    if not rows:
        return "\nNot measured yet.\n\n"
    lines = []
    for stage in ("exchange", "chain"):
        for case in dict.fromkeys(row["case"] for row in rows if row["stage"] == stage):
            keys = [(case, stage, backend, "exact") for backend in _TRANSPORTS]
            lines.append((stage, _named(case), *(pair.us(*key) for key in keys)))
    table = _table(("stage", "case", *_TRANSPORTS.values()), lines)
    added = _table(
        ("added to merge alone, over all cases", *list(_TRANSPORTS.values())[1:]),
        [(stage, *_added_ranges(rows, stage)) for stage in ("exchange", "chain")],
    )
    spreads = (
        f"Medians; the smallest and the largest times are in `benchmarks/results/{PAIR.name}`."
    )
    legend = _legend([table])
    parts = (_where(rows), table, *legend, spreads, added, *_products_differ(rows))
    return "\n" + "\n\n".join(parts) + "\n\n"


def _added_ranges(rows: Iterable[Row], stage: str) -> Iterator[str]:
    """For each transport, the smallest and the largest time that it adds to a stage."""
    for backend in list(_TRANSPORTS)[1:]:
        added = [
            row["added_us"]
            for row in rows
            if (row["stage"], row["backend"]) == (stage, backend) and "added_us" in row
        ]
        yield f"{_us(min(added))} to {_us(max(added))}" if added else _NONE


def _products_differ(pair: Sequence[Row]) -> list[str]:
    """A sentence where the cards of the pair multiply at another rate than the single one."""
    two, one = (
        max((row["fp8_tflops"] for row in rows if row["fp8_tflops"]), default=None)
        for rows in (pair, Figures(RESULTS).rows)
    )
    if not one or not two or abs(two / one - 1) < 0.1:
        return []
    return [
        f"These cards multiply fp8 at {two:,.0f} TFLOP/s where that of the README does at "
        f"{one:,.0f}, which was not explained. It does not matter here: decode's floors come from "
        "bytes."
    ]


def host() -> str:
    """docs/torch.md: what a torch decode costs the host."""
    figures = Figures(RESULTS)
    keys = [(case, "host", backend, "exact") for case, backend in HOST.items()]
    yardstick, *_ = found = [figures.row(*key) for key in keys]
    if yardstick is None:
        return "\nNo figures yet: `python -m benchmarks record` takes them on a Hopper GPU.\n\n"
    lines = [
        (
            key[0],
            figures.with_spread(*key),
            f"{row['median_us'] / yardstick['median_us']:.1f}" if row else _NONE,
        )
        for key, row in zip(keys, found, strict=True)
    ]
    table = _table(("case", "microseconds of the host", "times a torch op"), lines)
    parts = (_where([row for row in found if row]), table, *_legend([table]))
    return "\n" + "\n\n".join(parts) + "\n\n"


# ---- what the exchange's time means; see docs/scaling.md ----

_SPARSE_LAYERS = 57
_READ_TBPS = 4.4  # of an H200, rounded
_COSTS = {
    "nccl": "NCCL",
    "one-sided-legacy": "one-sided, rows with flags",
    "one-sided-tagged": "one-sided, tagged rows",
}


def layers() -> str:
    """docs/scaling.md: what the exchanges of a step's layers add up to."""
    costs = [f"{_us(us)} us ({name})" for name, us in _added_in_chain()]
    sums = [f"{us * _SPARSE_LAYERS / 1e3:.2f} ms" for _, us in _added_in_chain()]
    if not costs:
        return "\nNot measured yet.\n\n"
    return (
        f"\n*A step, on two ranks.* A model with {_SPARSE_LAYERS} sparse layers pays "
        f"{_SPARSE_LAYERS} exchanges one after the other. In the chains above, "
        f"{_keys_of(EXCHANGED)}, an exchange adds {_listed(costs)}: {_listed(sums)} a decode "
        "step.\n\n"
    )


def break_even() -> str:
    """docs/scaling.md: keys from which sharding saves more time than its exchange costs."""
    merge = _merge_in_chain()
    if merge is None or not _added_in_chain():
        return "\nNot measured yet.\n\n"
    lines = []
    for name, added in _added_in_chain():
        cost = f"{_us(added)} + {_us(merge)} us: {name}, and the merge"
        lines.append((cost, *(_even(added + merge, world_size) for world_size in (2, 4))))
    head = ("exchange and merge", "W = 2", "W = 4, if both took as long as with two ranks")
    return (
        f"\nAt a read rate of {_READ_TBPS} TB/s, with what exchange and merge add to the chain of "
        f"{_keys_of(EXCHANGED)}, the two are equal at so many keys "
        f"of a batch:\n\n{_table(head, lines)}\n\n"
    )


def _added_in_chain() -> list[tuple[str, float]]:
    """What each transport adds to the chain, in microseconds."""
    pair = Figures(PAIR)
    rows = [(name, pair.row(EXCHANGED.name, "chain", key, "exact")) for key, name in _COSTS.items()]
    return [(name, row["added_us"]) for name, row in rows if row and "added_us" in row]


def _merge_in_chain() -> float | None:
    """What a merge adds to score and select, in microseconds; on one card."""
    figures = Figures(RESULTS)
    local, chain = (
        figures.row(EXCHANGED.name, stage, "mosaic", "exact") for stage in ("local", "chain")
    )
    return chain["median_us"] - local["median_us"] if local and chain else None


def _even(us: float, world_size: int) -> str:
    """Keys of a batch whose reading takes so long on the other ranks."""
    keys = us * 1e-6 * _READ_TBPS * 1e12 / (HEAD_DIM * (1 - 1 / world_size))
    return f"B n = {keys / 1e6:.2f} M keys"


def _keys_of(case: Decode) -> str:
    return describe(case).rpartition(",")[0]


def _listed(parts: Sequence[str]) -> str:
    return ", ".join(parts[:-1]) + " and " * (len(parts) > 1) + parts[-1]


# ---- tables and sentences ----


def _named(name: str) -> str:
    """A case in words; also one that stands at another world size among the work points."""
    found = (at_world_size(case, w) for case in DECODE for w in WORLD_SIZES)
    return next((describe(case) for case in found if case.name == name), name)


def _where(rows: Sequence[Row]) -> str:
    """The device, the versions and the ceilings of the rows."""
    device, driver, jax, torch = (_all(rows, n) for n in ("device", "driver", "jax", "torch"))
    days = sorted({row["date"][:10] for row in rows})
    reads = sorted({row["read_tbps"] for row in rows if row["read_tbps"]})
    products = sorted({row["fp8_tflops"] for row in rows if row["fp8_tflops"]})
    commits = ", ".join(dict.fromkeys(row["commit"][:7] for row in rows if row["commit"]))
    return (
        f"{device}, driver {driver}, jax {jax}, torch {torch}; {_span(days)}, commit {commits}; "
        f"reads {_span([f'{x:.2f}' for x in reads])} TB/s, fp8 products "
        f"{_span([f'{x:,.0f}' for x in products])} TFLOP/s in the same run."
    )


def _all(rows: Iterable[Row], name: str) -> str:
    return ", ".join(dict.fromkeys(row[name] for row in rows if row[name]))


def _span(ordered: Sequence[str]) -> str:
    ends = list(dict.fromkeys([ordered[0], ordered[-1]]))
    return " to ".join(ends)


def _decode_table(figures: Figures) -> str:
    lines = []
    for case in DECODE:
        key = (case.name, "local", "mosaic", "exact")
        lines.append(
            (
                describe(case),
                figures.floor(*key),
                figures.with_spread(*key),
                figures.over_floor(*key),
                figures.us(case.name, "chain", "mosaic", "exact"),
                figures.us(case.name, "local", "xla", "exact"),
                figures.us(case.name, "local", "torch", "fast"),
                figures.us(case.name, "local", "torch_compile", "fast"),
                *(figures.us(case.name, "local", name, "fast") for name in _peers(figures)),
            )
        )
    head = ("decode (exact)", "floor", "score + select", "over floor", "with merge")
    return _table((*head, *_NAMES.values(), *_peers(figures)), lines)


def _peers(figures: Figures) -> list[str]:
    """Packages of others that the file has rows of."""
    rows = (row for row in figures.rows if row["stage"] == "local")
    backends = dict.fromkeys(row["backend"] for row in rows)
    return [name for name in backends if name not in {"mosaic", *_NAMES}]


def _prefill_table(figures: Figures) -> str:
    lines = []
    for case in PREFILL:
        key = (case.name, "local", "mosaic", "fast")
        lines.append(
            (
                describe(case),
                figures.floor(*key),
                figures.with_spread(*key),
                figures.over_floor(*key),
                figures.us(case.name, "fused-local", "mosaic", "fast"),
                figures.us(case.name, "local", "mosaic", "exact"),
                figures.us(case.name, "local", "xla", "exact"),
                figures.us(case.name, "local", "torch", "fast"),
            )
        )
    head = ("prefill (fast)", "floor", "score + select", "over floor", "fused", "exact")
    return _table((*head, "XLA", "torch"), lines)


def _stage_table(figures: Figures) -> str:
    alone: dict[str, Select | Merge] = {case.name: case for case in (*SELECT, *MERGE)}
    lines = []
    for row in figures.rows:
        if row["case"] in alone or row["stage"] == "host":
            case = alone.get(row["case"])
            name = _alone(case) if case else row["case"].replace("-", " ")
            if row["backend"] != "mosaic":
                name += f" ({_NAMES.get(row['backend'], row['backend'])})"
            lines.append((row["stage"], name, figures.with_spread(*results.key_of(row))))
    return _table(("stage alone", "of", "us"), lines)


def _alone(case: Select | Merge) -> str:
    if isinstance(case, Select):
        return f"{case.tokens:,} tokens, {case.columns:,} blocks each"
    return f"{case.tokens:,} tokens, rows of {case.world_size} ranks"


def _legend(tables: Iterable[str]) -> list[str]:
    """What the marks in the tables mean, of those that there are."""
    text = "\n".join(tables)
    marks = ((f"| {_NONE} |", _MISSING), (" (jit)", _JIT))
    found = [meaning for mark, meaning in marks if mark in text]
    return [" ".join(found)] if found else []


def _missed(figures: Figures) -> str:
    """Which targets are missed: of the faster way where there are two."""
    best: dict[str, Row] = {}
    for row in figures.rows:
        if report.target_of(row) and (
            row["case"] not in best or row["median_us"] < best[row["case"]]["median_us"]
        ):
            best[row["case"]] = row
    words: dict[str, str] = {case.name: describe(case) for case in (*DECODE, *PREFILL)}
    words |= {case.name: f"{case.stages[0]} of {_alone(case)}" for case in (*SELECT, *MERGE)}
    missed = [
        f"{words[name]} ({_measured(row)}, target {target.bound})"
        for name, row in best.items()
        if (target := report.target_of(row)) and not target.met
    ]
    said = f"Of {len(best)} targets, {len(best) - len(missed)} are met"
    return f"{said}; missed: {'; '.join(missed)}." if missed else f"{said}."


def _measured(row: Row) -> str:
    """What is held against the row's target."""
    if row["stage"] not in ("local", "fused-local"):
        return f"{_us(row['median_us'])} us"
    fused = " fused" if row["stage"] == "fused-local" else ""
    return f"{row['median_us'] / row['floor_us']:.3f} x{fused}"


def _peer_sentences(figures: Figures) -> list[str]:
    names = ", ".join(_peers(figures))
    if not names:
        return []
    return [
        f"What a peer ({names}) computes is not quite the same: it knows no shards, so it gets a "
        "rank's share of each request's keys as a context of its own. It reads the same bytes, "
        "writes W times fewer scores, and makes no candidate rows."
    ]


def _exchange_sentences(pair: Figures) -> list[str]:
    case = EXCHANGED
    alone, nccl, stores = (
        pair.us(case.name, "exchange", name, "exact")
        for name in ("none", "nccl", "one-sided-tagged")
    )
    if _NONE in (alone, nccl, stores):
        return []
    return [
        f"Between two GPUs of another host, {describe(case)}: from candidate rows to ids {nccl} us "
        f"through torch's NCCL collective, {stores} us through one-sided stores of tagged rows "
        f"(`msa_icp_torch` on its direct route), of which the merge alone is {alone} us "
        "([docs/scaling.md](docs/scaling.md))."
    ]


def _absent(figures: Figures) -> list[str]:
    """Which backends and other parts have no figures, and why where the file says."""
    elsewhere = {row["stage"] for row in Figures(PAIR).rows}
    reasons = {name: why for name, why in figures.absent.items() if name not in elsewhere}
    measured = {row["backend"] for row in figures.rows if row["stage"] != "host"}
    names = dict.fromkeys(name for name in (*BACKENDS, *reasons) if name not in measured)
    if not names:
        return []
    said = [
        _NAMES.get(name, name) + (f" ({reasons[name]})" if name in reasons else "")
        for name in names
    ]
    return [f"Not measured in these runs: {_listed(said)}."]


def _fit_sentences(fits: Sequence[model.Fit]) -> list[str]:
    return [
        f"Over the sweep of contexts and batches, {fit.points} points, decode's score and select "
        f"take {fit.fixed_us:.1f} us + bytes read / {fit.rate_tbps:.2f} TB/s; where that is "
        f"farthest off, it is {fit.misfit} ([docs/scaling.md](docs/scaling.md))."
        for fit in fits
        if fit.group == "mosaic"
    ]


def _curves(rows: Sequence[Row]) -> str:
    contexts = sorted({row["context"] for row in rows})
    at = {(row["batch"], row["context"]): row for row in rows}
    lines = [
        (str(batch), *(report.curve_cell(at.get((batch, n))) or _NONE for n in contexts))
        for batch in sorted({row["batch"] for row in rows})
    ]
    return _table(("batch", *map(report.short, contexts)), lines)


def _fits_table(fits: Sequence[model.Fit]) -> str:
    lines = [
        (
            fit.group,
            str(fit.points),
            f"{fit.fixed_us:.2f}",
            f"{fit.rate_tbps:.3f}",
            fit.misfit,
        )
        for fit in fits
    ]
    return _table(
        ("rows", "points", "fixed, us", "rate, TB/s", "the model, where it is farthest off"), lines
    )


def describe(case: Decode | Prefill) -> str:
    """A case in words."""
    lens = sorted(set(case.lens))
    shown = " to ".join(report.short(n) if n % 1024 == 0 else f"{n:,}" for n in (lens[0], lens[-1]))
    keys = shown if len(lens) > 1 else report.short(lens[0])
    if isinstance(case, Decode):
        each = f", {case.query_len} tokens each" if case.query_len > 1 else ""
        return f"{len(case.lens)} x {keys} keys{each}, W {case.world_size}"
    segments = f"{len(case.lens)} x " if len(case.lens) > 1 else ""
    return f"{segments}{case.query_lens[0]:,} tokens ending at {keys}, W {case.world_size}"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table, without the columns in which nothing was measured."""
    head, lines = report.with_values(head, lines, _NONE)
    rule = ["---"] * len(head)
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *lines))


def _us(value: float) -> str:
    """Three digits, or all before the point."""
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{digits}f}"


PARTS: dict[tuple[Path, str], Callable[[], str]] = {
    (ROOT / "README.md", "performance"): performance,
    (ROOT / "docs" / "scaling.md", "sweep"): scaling,
    (ROOT / "docs" / "torch.md", "host"): host,
    (ROOT / "docs" / "scaling.md", "exchange"): exchange,
    (ROOT / "docs" / "scaling.md", "layers"): layers,
    (ROOT / "docs" / "scaling.md", "break-even"): break_even,
}
