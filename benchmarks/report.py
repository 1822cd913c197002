"""Results in words: lines of the terminal, and the measured parts of the documents.

Nobody types a figure: `python -m benchmarks readme` writes the parts between
`<!-- measured: NAME -->` and `<!-- end of NAME -->` from the committed results.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import results
from benchmarks.cases import (
    ADVERSARIAL,
    ADVERSARIAL_OVER_NORMAL,
    ALONE,
    BF16,
    DECODE,
    FLOAT8,
    FULL,
    HOST,
    PREFILL,
    Case,
    Decode,
    Sharded,
    at_world_size,
)
from benchmarks.results import Row
from msa_icp_jax.geometry import HEAD_DIM, WORLD_SIZES

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "h200.json"
SWEEP = results.beside(RESULTS, results.SWEEP_SUFFIX)
PAIR = results.beside(RESULTS, "-x2")  # two of them
NONE = "-"
BACKENDS = {  # in the order of the documents' columns
    "mosaic": "the kernels",
    "flashinfer": "FlashInfer",
    "flashinfer-no-icp": "FlashInfer without ICP",
    "vllm": "vLLM",
    "torch_compile": "torch.compile",
    "torch": "torch",
    "xla": "XLA",
}
TRANSPORTS = {
    "none": "kernels alone",
    "nccl": "NCCL",
    "one-sided-legacy": "one-sided, flags",
    "one-sided-tagged": "one-sided, tagged",
}
IN_JAX = {  # of the stage jax-chain
    "none": "score, select",
    "all-to-all": "all_to_all alone",
    "collective": "all_to_all",
    "one-sided-legacy": "one-sided, flags",
    "one-sided-tagged": "one-sided, tagged",
}
_NOT_YET = "\nNot measured yet.\n\n"
_CASES: dict[str, Case] = {case.name: case for case in FULL}

Key = tuple[str, ...]
Rows = dict[Key, Row]


class Target(NamedTuple):
    """What a row should take at most, in microseconds and in words."""

    us: float
    words: str


def target(row: Row, rows: Rows) -> Target | None:
    """The row's target, which `rows` may be needed for; None where it has none."""

    def times(factor: float, unit: str, *key: str) -> Target | None:
        base = rows.get(key)
        return Target(factor * base["median_us"], f"{factor:g} {unit}") if base else None

    name, stage, backend, precision = (row[field] for field in results.KEY)
    case = _CASES.get(name)
    if stage == "host":
        most = HOST.get(name, ("", None))[1]
        return times(most, "torch ops", "torch-op", "host", "torch", "exact") if most else None
    if case is None or (precision != case.precision and backend != "xla"):
        return None
    if not isinstance(case, Sharded):
        us = case.target_us if backend == "mosaic" else None
        return Target(us, f"{us} us") if us else None
    if stage not in ("local", "fused-local"):
        return None
    if backend == "xla":
        other = "torch_compile" if isinstance(case, Decode) else "torch"
        return times(1, BACKENDS[other], name, "local", other, "fast")
    if backend != "mosaic":
        return None
    if case in ADVERSARIAL:
        normal = name.removesuffix(f"-{case.data}")
        return times(ADVERSARIAL_OVER_NORMAL, normal, normal, "local", backend, precision)
    if not case.target or not row["floor_us"]:
        return None
    return Target(case.target * row["floor_us"], f"{case.target:.2f} x")


def ratio(row: Row) -> str:
    """The row's time over its floor; empty without one worth showing: a CPU's bounds nothing."""
    bounded = row.get("floor_us") and row.get("device") != "cpu"
    return f"{row['median_us'] / row['floor_us']:.2f}" if bounded else ""


def line(row: Row, rows: Rows) -> str:
    """A row on a line of the terminal."""
    low, high = row["spread_us"]
    text = f"{results.label(row)}: {row['median_us']:.2f} us ({low:.2f} to {high:.2f})"
    if ratio(row):
        text += f", {ratio(row)} x the floor of {row['floor_us']:.2f}"
    if found := target(row, rows):
        met = "met" if row["median_us"] <= found.us else "MISSED"
        text += f", target {found.words} {met}"
    return text


def origin(rows: Rows) -> str:
    """The device, the versions, the commits and the ceilings of rows."""

    def every(name: str) -> str:
        return ", ".join(dict.fromkeys(str(row[name]) for row in rows.values() if row.get(name)))

    def span(name: str, shape: str) -> str:
        found = sorted(row[name] for row in rows.values() if row.get(name))
        return " to ".join(dict.fromkeys(format(x, shape) for x in (*found[:1], *found[-1:])))

    torch = f", torch {every('torch')}" if every("torch") else ""
    days = sorted({row["date"][:10] for row in rows.values() if row.get("date")})
    commits = dict.fromkeys(row["commit"][:7] for row in rows.values() if row.get("commit"))
    return (
        f"{every('device')}, driver {every('driver')}, jax {every('jax')}{torch}; "
        f"{' to '.join(dict.fromkeys(days[:1] + days[-1:]))}, commit {', '.join(commits)}; "
        f"reads {span('read_tbps', '.2f')} TB/s, fp8 products {span('fp8_tflops', ',.0f')} TFLOP/s "
        "in the same run."
    )


# ---- documents ----


def rewrite() -> list[Path]:
    """Brings all parts up to date; the files that changed."""
    changed = []
    for path in dict.fromkeys(path for path, _ in PARTS):
        old = new = path.read_text()
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


def _paragraphs(*texts: str) -> str:
    return "\n" + "\n\n".join(text for text in texts if text) + "\n\n"


class _Figures:
    """Cells of tables."""

    def __init__(self, path: Path) -> None:
        self.file = results.load(path) if path.exists() else results.File()
        self.rows = self.file.rows

    def us(self, *key: str) -> str:
        """A median, and whether it was taken otherwise than from a CUDA graph."""
        if key not in self.rows:
            return NONE
        row = self.rows[key]
        jit = row.get("timing") == "jit" and row["backend"] != "xla"
        return _us(row["median_us"]) + (" (jit)" if jit else "")

    def spread(self, *key: str) -> str:
        """A median with the smallest and the largest time."""
        if key not in self.rows:
            return NONE
        low, high = self.rows[key]["spread_us"]
        return f"**{self.us(*key)}** ({_us(low)} to {_us(high)})"

    def floor(self, *key: str) -> str:
        return _us(self.rows[key]["floor_us"]) if key in self.rows else NONE

    def ratio(self, *key: str) -> str:
        return ratio(self.rows[key]) if key in self.rows else NONE

    def target(self, *key: str) -> str:
        found = target(self.rows[key], self.rows) if key in self.rows else None
        if found is None:
            return NONE
        return found.words + ("" if self.rows[key]["median_us"] <= found.us else ", missed")

    def others(self, case: Case) -> dict[str, str]:
        """Columns of the backends that the kernels are compared with."""
        precisions = dict.fromkeys(BACKENDS, "fast") | {"xla": "exact"}
        rest = list(BACKENDS.items())[1:]
        return {word: self.us(case.name, "local", name, precisions[name]) for name, word in rest}


def summary() -> str:
    """README: the kernels beside others."""
    figures = _Figures(RESULTS)
    lines = []
    for name in ("d-b1-1m-w4", "d-b32-128k-w4", "d-b128-16k-w4", "p-32k-w4", "p-128k-w4"):
        case = _CASES[name]
        ours = figures.spread(name, "local", "mosaic", case.precision)
        others = {k: us for k, us in figures.others(case).items() if k not in ("torch", "XLA")}
        lines.append({"score and select, us": describe(case), "the kernels": ours} | others)
    return _paragraphs(_table(lines), _origin_of_kernels(figures))


def gain() -> str:
    """README: what a rank's share of the keys saves in a decode, time and memory."""
    figures, case, layers = _Figures(RESULTS), _CASES["d-b32-128k-w4"], 57
    batch, context = len(case.lens), short(case.lens[0])
    gib = layers * sum(case.lens) * HEAD_DIM / 2**30  # float8
    head = f"a layer of {batch} x {context} keys, one of {case.world_size} GPUs"
    lines = [
        {
            head: words,
            "us": figures.us(case.name, stage, backend, precision),
            f"its index keys, {layers} layers": f"{gib / ranks:.1f} GiB",
        }
        for words, ranks, stage, backend, precision in (
            ("FlashInfer, all keys, 1 head", 1, "local", "flashinfer-no-icp", "fast"),
            ("FlashInfer, 1 / 4 of the keys, 4 heads", 4, "local", "flashinfer", "fast"),
            ("here, 1 / 4 of the keys, 4 heads", 4, "local", "mosaic", "exact"),
            ("here, with the merge of all ranks' candidates", 4, "chain", "mosaic", "exact"),
        )
    ]
    return _paragraphs(_table(lines))


def performance() -> str:
    """docs/performance.md: decode, prefill, single stages."""
    figures = _Figures(RESULTS)
    cells = (figures.floor, figures.spread, figures.ratio, figures.target)
    head = ("floor", "score + select", "over floor", "target")
    decode, prefill, alone = [], [], []
    measured = {key[0] for key in figures.rows}
    every = (*DECODE, *PREFILL, *ADVERSARIAL, *BF16)
    for case in (case for case in every if case.name in measured):
        key = (case.name, "local", "mosaic", case.precision)
        row = dict(zip(head, (cell(*key) for cell in cells), strict=True))
        if isinstance(case, Decode):
            row = {"decode (exact)": describe(case)} | row
            row["with merge"] = figures.us(case.name, "chain", *key[2:])
            decode.append(row | figures.others(case))
        else:
            row = {"prefill (fast)": describe(case)} | row
            row["fused"] = figures.us(case.name, "fused-local", *key[2:])
            row["exact"] = figures.us(case.name, "local", "mosaic", "exact")
            prefill.append(row | figures.others(case))
    for key, row in figures.rows.items():
        known = _CASES.get(row["case"])
        if row["stage"] == "host" or known in ALONE:
            by = f" ({BACKENDS[row['backend']]})" if row["backend"] != "mosaic" else ""
            name = describe(known) if known else row["case"].replace("-", " ")
            stage = {"stage alone": row["stage"], "of": name + by}
            alone.append(stage | {"us": figures.spread(*key), "target": figures.target(*key)})
    tables = [_table(lines) for lines in (decode, prefill, alone)]
    return _paragraphs(
        _origin_of_kernels(figures),
        *tables,
        _legend(*tables),
        _absent(figures),
    )


def _origin_of_kernels(figures: _Figures) -> str:
    return origin({k: row for k, row in figures.rows.items() if row["backend"] == "mosaic"})


def _legend(*tables: str) -> str:
    """What the marks in the tables mean, of those that there are."""
    text = "\n".join(tables)
    missing = f"{NONE}: not measured in these runs." * (f"| {NONE} |" in text)
    jit = "(jit): timed in one jitted program, not in a CUDA graph." * (" (jit)" in text)
    return f"{missing} {jit}".strip()


def _absent(figures: _Figures) -> str:
    """Which backends and other parts have no figures, and why where the file says."""
    elsewhere = {row["stage"] for row in _Figures(PAIR).rows.values()}
    reasons = {name: why for name, why in figures.file.absent.items() if name not in elsewhere}
    measured = {row["backend"] for row in figures.rows.values() if row["stage"] != "host"}
    names = [name for name in dict.fromkeys((*BACKENDS, *reasons)) if name not in measured]
    said = [f"{BACKENDS.get(x, x)}" + (f" ({reasons[x]})" if x in reasons else "") for x in names]
    return f"Not measured in these runs: {_listed(said)}." if said else ""


def sweep() -> str:
    """docs/scaling.md: the sweep and the fitted model."""
    rows = _Figures(SWEEP).rows
    if not rows:
        return _NOT_YET
    texts = ["Measured:", origin(rows)]
    for world_size in sorted({row["world_size"] for row in rows.values()}):
        curves = [row for row in rows.values() if row["world_size"] == world_size]
        at = {(row["batch"], row["context"]): row for row in curves}
        batches, contexts = (sorted({key[i] for key in at}) for i in (0, 1))
        lines = [
            {"batch": str(b)} | {short(n): _with_ratio(at.get((b, n))) for n in contexts}
            for b in batches
        ]
        texts += [f"W = {world_size}, microseconds (and times over the floor) by context:"]
        texts += [_table(lines)]
    models = [
        {
            "rows": fit.group,
            "points": str(fit.points),
            "fixed, us": f"{fit.fixed_us:.2f}",
            "rate, TB/s": f"{fit.rate_tbps:.3f}",
            "the model, where it is farthest off": fit.misfit,
        }
        for fit in results.fits(rows.values())
    ]
    picture = f"![times, floors and model](../benchmarks/results/{SWEEP.stem}.png)"
    said = "Dashed is the floor (bytes over the read ceiling of the same run), dotted the model."
    return _paragraphs(*texts, _table(models), picture, said)


def _with_ratio(row: Row | None) -> str:
    return f"{row['median_us']:.1f} ({ratio(row)})" if row else NONE


def exchange() -> str:
    """docs/scaling.md: the chain between GPUs."""
    pair = _Figures(PAIR)
    rows = {k: row for k, row in pair.rows.items() if k[1] == "chain" and k[2] in TRANSPORTS}
    if not rows:
        return _NOT_YET
    lines = []
    for name in dict.fromkeys(key[0] for key in rows):
        line = {"score, select, exchange, merge": _named(name)}
        for transport, words in TRANSPORTS.items():
            key = (name, "chain", transport, "exact")
            added = rows.get(key, {}).get("added_us")
            line[words] = pair.us(*key) + (f" (+ {_us(added)})" if added is not None else "")
        lines.append(line)
    table = _table(lines)
    said = "Medians, and what a transport adds to the kernels alone; the spreads are in "
    return _paragraphs(origin(rows), table, _legend(table), f"{said}`{PAIR.name}`.")


def jax_chain() -> str:
    """docs/scaling.md: a layer inside one jitted program, on two GPUs and on one."""
    found = []
    for path in (PAIR, RESULTS):
        rows = {k: row for k, row in _Figures(path).rows.items() if k[1] == "jax-chain"}
        if not rows:
            continue
        lines = []
        for name, precision in dict.fromkeys((key[0], key[3]) for key in rows):
            keys = {t: (name, "jax-chain", "mosaic", precision, t) for t in IN_JAX}
            host = max(row["host_us"] for k, row in rows.items() if k in keys.values())
            line = {"a layer": _named(name)}
            line |= {
                words: _us(rows[keys[t]]["median_us"]) if keys[t] in rows else NONE
                for t, words in IN_JAX.items()
            }
            lines.append(line | {"the host's part": _us(host)})
        found += [origin(rows), _table(lines)]
    return _paragraphs(*found) if found else _NOT_YET


def host() -> str:
    """docs/torch.md: what a torch decode costs the host."""
    figures = _Figures(RESULTS)
    keys = [(case, "host", backend, "exact") for case, (backend, _) in HOST.items()]
    if keys[0] not in figures.rows:
        return "\nNo figures yet: `python -m benchmarks record` takes them on a Hopper GPU.\n\n"
    op = figures.rows[keys[0]]["median_us"]
    lines = []
    for key in keys:
        row = figures.rows.get(key)
        ops = f"{row['median_us'] / op:.1f}" if row else NONE
        line = {"case": key[0], "microseconds of the host": figures.spread(*key)}
        lines.append(line | {"times a torch op": ops, "target": figures.target(*key)})
    rows = {key: figures.rows[key] for key in keys if key in figures.rows}
    return _paragraphs(origin(rows), _table(lines), _legend(_table(lines)))


# ---- words ----


def _listed(parts: Sequence[str]) -> str:
    return ", ".join(parts[:-1]) + " and " * (len(parts) > 1) + parts[-1]


def _named(name: str) -> str:
    """A case in words; also one that stands at another world size among the work points."""
    found = (at_world_size(case, w) for case in DECODE for w in WORLD_SIZES)
    return next((describe(case) for case in found if case.name == name), name)


def describe(case: Case) -> str:
    """A case in words."""
    if not isinstance(case, Sharded):
        rows = f"rows of {case.world_size} ranks"
        of = f"{case.columns:,} blocks each" if case.stage == "select" else rows
        return f"{case.tokens:,} tokens, {of}"
    ends = dict.fromkeys((min(case.lens), max(case.lens)))
    keys = " to ".join(short(n) if n % 1024 == 0 or len(ends) == 1 else f"{n:,}" for n in ends)
    data = {"normal": "", "ascending": ", ascending scores", "ties": ", all scores alike"}
    end = f"W {case.world_size}{data[case.data]}" + ", bfloat16" * (case.dtype != FLOAT8)
    if isinstance(case, Decode):
        each = f", {case.query_len} tokens each" if case.query_len > 1 else ""
        return f"{len(case.lens)} x {keys} keys{each}, {end}"
    segments = f"{len(case.lens)} x " if len(case.lens) > 1 else ""
    return f"{segments}{case.query_lens[0]:,} tokens ending at {keys}, {end}"


def short(context: int) -> str:
    """4096 as 4K, 1048576 as 1M, 5000 as it is."""
    if context % (1 << 20) == 0:
        return f"{context >> 20}M"
    return f"{context >> 10}K" if context % 1024 == 0 else str(context)


def _table(lines: Iterable[dict[str, str]]) -> str:
    """A table, without the columns in which nothing was measured."""
    lines = list(lines)
    head = [name for name in lines[0] if any(line[name] != NONE for line in lines)] if lines else []
    cells = [head, ["---"] * len(head), *([line[name] for name in head] for line in lines)]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells) if head else ""


def _us(value: float) -> str:
    """Three digits, or all before the point."""
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{digits}f}"


PARTS: dict[tuple[Path, str], Callable[[], str]] = {
    (ROOT / "README.md", "gain"): gain,
    (ROOT / "README.md", "summary"): summary,
    (ROOT / "docs" / "performance.md", "performance"): performance,
    (ROOT / "docs" / "scaling.md", "sweep"): sweep,
    (ROOT / "docs" / "torch.md", "host"): host,
    (ROOT / "docs" / "scaling.md", "exchange"): exchange,
    (ROOT / "docs" / "scaling.md", "jax-chain"): jax_chain,
}
