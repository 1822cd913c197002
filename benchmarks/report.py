"""Results in words: lines of the terminal, and the measured parts of the documents.

Nobody types a figure: `python -m benchmarks readme` writes the parts between
`<!-- measured: NAME -->` and `<!-- end of NAME -->` from the committed results.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import cases, results
from benchmarks.cases import ALONE, DECODE, FULL, HOST, PREFILL, Case, Decode, Sharded
from benchmarks.results import Row, Rows
from msa_icp_jax.geometry import HEAD_DIM

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "h200.json"
SWEEP, PAIR = (results.beside(RESULTS, suffix) for suffix in ("-sweep", "-x2"))  # x2: two of them
NOISE = 0.03  # by which cards and runs differ beyond the spread of one
NONE = "-"
OTHERS = {  # in the order of the documents' columns
    "flashinfer": "FlashInfer",
    "flashinfer-no-icp": "FlashInfer without ICP",
    "vllm": "vLLM",
    "torch_compile": "torch.compile",
    "torch": "torch",
    "xla": "XLA",
}
BACKENDS = {"mosaic": "the kernels"} | OTHERS
_ONE_SIDED = {"one-sided-legacy": "one-sided, flags", "one-sided-tagged": "one-sided, tagged"}
TRANSPORTS = {"none": "kernels alone", "nccl": "NCCL"} | _ONE_SIDED
IN_JAX = {"none": "score, select", "all-to-all": "all_to_all alone", "collective": "all_to_all"}
IN_JAX |= _ONE_SIDED | {"host": "the host's part"}
_SUMMARY = ("d-b1-1m-w4", "d-b32-128k-w4", "d-b128-16k-w4", "p-32k-w4", "p-128k-w4")
_NOT_YET = "\nNot measured yet.\n\n"
_CASES: dict[str, Any] = {case.name: case for case in (*FULL, *HOST)}


def target(row: Row, rows: Rows) -> tuple[float, str] | None:
    """The most that a row should take, in us and in words; `rows` may be needed for it."""

    def times(factor: float, unit: str, *key: str) -> tuple[float, str] | None:
        return (factor * rows[key]["median_us"], f"{factor:g} {unit}") if key in rows else None

    name, stage, backend, precision = (row[field] for field in results.KEY)
    case = _CASES.get(name)
    if isinstance(case, Sharded) and (stage, backend) == ("local", "xla"):
        other = "torch_compile" if isinstance(case, Decode) else "torch"
        return times(1, OTHERS[other], name, "local", other, "fast")
    if case is None or (backend, precision) != ("mosaic", case.precision):
        return None
    if stage == "host":
        most = case.target
        return times(most, "torch ops", "torch-op", "host", "torch", "exact") if most else None
    if isinstance(case, cases.Alone):
        return (case.target_us, f"{case.target_us} us") if case.target_us else None
    if stage not in ("local", "fused-local"):
        return None
    if case.data != "normal":
        normal = name.removesuffix(f"-{case.data}")
        return times(cases.ADVERSARIAL_OVER_NORMAL, normal, normal, "local", backend, precision)
    bounded = case.target and row["floor_us"]
    return (case.target * row["floor_us"], f"{case.target:.2f} x") if bounded else None


def ratio(row: Row) -> str:
    """The row's time over its floor; empty without one worth showing: a CPU's bounds nothing."""
    bounded = row.get("floor_us") and row.get("device") != "cpu"
    return f"{row['median_us'] / row['floor_us']:.2f}" if bounded else ""


def line(row: Row, rows: Rows) -> str:
    """A row on a line of the terminal."""
    low, high = row["spread_us"]
    text = f"{results.label(row)}: {row['median_us']:.2f} us ({low:.2f} to {high:.2f})"
    text += f", {ratio(row)} x the floor of {row['floor_us']:.2f}" if ratio(row) else ""
    if found := target(row, rows):
        met = "met" if row["median_us"] <= found[0] else "MISSED"
        text += f", target {found[1]} {met}"
    return text


def origin(rows: Iterable[Row]) -> str:
    """The device, the versions, the commits and the ceilings of rows."""
    rows = list(rows)

    def every(name: str, length: int | None = None) -> str:
        return ", ".join(dict.fromkeys(str(x[name])[:length] for x in rows if x.get(name)))

    def span(name: str, show: Callable[[Any], str]) -> str:
        found = sorted(row[name] for row in rows if row.get(name))
        return " to ".join(dict.fromkeys(map(show, (*found[:1], *found[-1:]))))

    torch = f", torch {every('torch')}" if every("torch") else ""
    return (
        f"{every('device')}, driver {every('driver')}, jax {every('jax')}{torch}; "
        f"{span('date', lambda x: x[:10])}, commit {every('commit', 7)}; "
        f"reads {span('read_tbps', '{:.2f}'.format)} TB/s, "
        f"fp8 products {span('fp8_tflops', '{:,.0f}'.format)} TFLOP/s in the same run."
    )


def compare(*paths: Path) -> int:
    """Says what moved between two files; the exit status of the command.

    "slower" and "faster" are those whose spreads do not touch and whose medians differ by more
    than `NOISE`; "same" are the others.
    """
    before, after = map(results.load, paths)
    for path, one, other in zip(paths, (before, after), (after, before), strict=True):
        print(f"{path}: {origin(one.values())}")
        if alone := [results.label(row) for key, row in one.items() if key not in other]:
            print(f"only in {path}: {len(alone)} figures: {'; '.join(alone[:3])}")
    counts = dict.fromkeys(("slower", "faster", "same"), 0)
    for old, new in ((row, after[key]) for key, row in before.items() if key in after):
        if differ := [x for x in ("device", "timing") if old.get(x) != new.get(x)]:
            words = ", ".join(f"{x} {old.get(x)} and {new.get(x)}" for x in differ)
            print(f"not compared: {results.label(new)}: {words}")
            continue
        change = new["median_us"] / old["median_us"]
        slower = new["spread_us"][0] > old["spread_us"][1] and change > 1 + NOISE
        faster = new["spread_us"][1] < old["spread_us"][0] and change < 1 - NOISE
        verdict = "slower" if slower else "faster" if faster else "same"
        counts[verdict] += 1
        if verdict != "same":
            us = f"{old['median_us']:.2f} -> {new['median_us']:.2f} us"
            print(f"{verdict}: {results.label(new)}: {us}, {change:.3f}")
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    if not any(counts.values()):
        raise results.Refused("nothing to compare")
    return 1 if counts["slower"] else 0


def models(rows: Iterable[Row]) -> str:
    """The fits of a sweep, as a table."""
    lines = [
        {
            "rows": fit.group,
            "points": str(fit.points),
            "fixed, us": f"{fit.fixed_us:.2f}",
            "rate, TB/s": f"{fit.rate_tbps:.3f}",
            "the model, where it is farthest off": fit.misfit,
        }
        for fit in results.fits(rows)
    ]
    return _table(lines) or "no model: it takes 3 points or more"


# ---- documents ----


def rewrite() -> list[Path]:
    """Brings all parts up to date; the files that changed."""
    before = {path: path.read_text() for path, _ in PARTS}
    for (path, name), make in PARTS.items():
        path.write_text(put(path.read_text(), name, make()))
    return [path for path, text in before.items() if text != path.read_text()]


def put(text: str, name: str, part: str) -> str:
    """`text` with the part of that name replaced; ValueError unless it has it once."""
    begin, end = f"<!-- measured: {name} -->\n", f"<!-- end of {name} -->"
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"no single part {name!r} between {begin.strip()} and {end}")
    return pattern.sub(lambda _: f"{begin}{part}{end}", text)


class _Figures:
    """Rows of a file as cells of tables."""

    def __init__(self, path: Path) -> None:
        self.rows = results.load_or_empty(path)

    def us(self, *key: str) -> str:
        return _us(self.rows[key]["median_us"]) if key in self.rows else NONE

    def spread(self, *key: str) -> str:
        """A median with the smallest and the largest time."""
        low, high = self.rows[key]["spread_us"] if key in self.rows else (0, 0)
        return f"**{self.us(*key)}** ({_us(low)} to {_us(high)})" if key in self.rows else NONE

    def target(self, *key: str) -> str:
        found = target(self.rows[key], self.rows) if key in self.rows else None
        missed = ", missed" if found and self.rows[key]["median_us"] > found[0] else ""
        return found[1] + missed if found else NONE

    def others(self, case: Case, *without: str) -> dict[str, str]:
        """Columns of the backends that the kernels are compared with."""
        precision = dict.fromkeys(OTHERS, "fast") | {"xla": "exact"}
        names = (name for name in OTHERS if name not in without)
        return {OTHERS[x]: self.us(case.name, "local", x, precision[x]) for x in names}

    def local(self, case: Case) -> dict[str, str]:
        """Columns of the kernels' time of a case beside its floor and target, and of others."""
        key = (case.name, "local", "mosaic", case.precision)
        row = self.rows.get(key, {})
        return {
            "floor": _us(row["floor_us"]) if row else NONE,
            "score + select": self.spread(*key),
            "over floor": ratio(row) or NONE,
            "target": self.target(*key),
            "with merge": self.us(case.name, "chain", "mosaic", "exact"),
            "fused": self.us(case.name, "fused-local", "mosaic", "fast"),
            "exact": NONE if case.precision == "exact" else self.us(*key[:3], "exact"),
            **self.others(case),
        }

    def origin(self, stage: str) -> str:
        return origin(row for row in self.rows.values() if row["stage"] == stage)


def summary() -> str:
    """README: the kernels beside others."""
    figures, lines = _Figures(RESULTS), []
    for case in map(_CASES.__getitem__, _SUMMARY):
        ours = figures.spread(case.name, "local", "mosaic", case.precision)
        first = {"score and select, us": describe(case), "the kernels": ours}
        lines.append(first | figures.others(case, "torch", "xla"))
    return _paragraphs(_table(lines), figures.origin("local"))


def gain() -> str:
    """README: what a rank's share of the keys saves in a decode, time and memory."""
    figures, case, layers = _Figures(RESULTS), _CASES["d-b32-128k-w4"], 57
    gib = layers * sum(case.lens) * HEAD_DIM / 2**30  # float8
    batch = f"{len(case.lens)} x {short(case.lens[0])} keys"
    head, memory = f"a layer of {batch}, one of {case.world_size} GPUs", f"{layers} layers"
    lines = [
        {
            head: words,
            "us": figures.us(case.name, *key),
            f"its index keys, {memory}": f"{gib / ranks:.1f} GiB",
        }
        for words, ranks, *key in (
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
    measured = {key[0] for key in figures.rows}
    every = (*DECODE, *PREFILL, *cases.ADVERSARIAL, *cases.BF16)
    tables = [
        [{head: describe(x)} | figures.local(x) for x in every if of(x) and x.name in measured]
        for head, of in (
            ("decode (exact)", lambda case: isinstance(case, Decode)),
            ("prefill (fast)", lambda case: not isinstance(case, Decode)),
        )
    ]
    alone = []
    for case in (case for case in ALONE if case.name in measured):
        key = (case.name, case.stage, "mosaic", "exact")
        line = {"stage alone": case.stage, "of": describe(case), "us": figures.spread(*key)}
        alone.append(line | {"target": figures.target(*key)})
    return _paragraphs(figures.origin("local"), *map(_table, (*tables, alone)))


def sweep() -> str:
    """docs/scaling.md: the sweep and the fitted model."""
    rows = sorted(_Figures(SWEEP).rows.values(), key=lambda x: (x["world_size"], x["batch"]))
    if not rows:
        return _NOT_YET
    contexts = {n: short(n) for n in sorted({row["context"] for row in rows})}
    texts = ["Measured:", origin(rows)]
    for world_size in dict.fromkeys(row["world_size"] for row in rows):
        texts += [f"W = {world_size}, microseconds (and times over the floor) by context:"]
        mine = [row for row in rows if row["world_size"] == world_size]
        shown = [
            (f"{x['batch']}", x["context"], f"{x['median_us']:.1f} ({ratio(x)})") for x in mine
        ]
        texts += [_pivot("batch", contexts, shown)]
    picture = f"![times, floors and model](../benchmarks/results/{SWEEP.stem}.png)"
    said = "Dashed is the floor (bytes over the read ceiling of the same run), dotted the model."
    return _paragraphs(*texts, models(rows), picture, said)


def exchange() -> str:
    """docs/scaling.md: the chain between GPUs."""
    rows = [x for x in _Figures(PAIR).rows.values() if x["stage"] == "chain"]
    added = [f" (+ {_us(x['added_us'])})" if x.get("added_us") is not None else "" for x in rows]
    shown = [
        (_named(x["case"]), x["backend"], _us(x["median_us"]) + more)
        for x, more in zip(rows, added, strict=True)
    ]
    table = _pivot("score, select, exchange, merge", TRANSPORTS, shown)
    said = "Medians, and what a transport adds to the kernels alone; the spreads are in "
    return _paragraphs(origin(rows), table, f"{said}`{PAIR.name}`.") if rows else _NOT_YET


def jax_chain() -> str:
    """docs/scaling.md: a layer inside one jitted program, on two GPUs and on one."""
    found: list[str] = []
    for path in (PAIR, RESULTS):
        rows = [row for row in _Figures(path).rows.values() if row["stage"] == "jax-chain"]
        shown = [(_named(x["case"]), x["transport"], _us(x["median_us"])) for x in rows]
        by_host = sorted(rows, key=lambda x: x["host_us"])  # the largest of a line is shown
        shown += [(_named(x["case"]), "host", _us(x["host_us"])) for x in by_host]
        found += [origin(rows), _pivot("a layer", IN_JAX, shown)] if rows else []
    return _paragraphs(*found) if found else _NOT_YET


def host() -> str:
    """docs/torch.md: what a torch decode costs the host."""
    figures, lines = _Figures(RESULTS), []
    yardstick = figures.rows.get(("torch-op", "host", "torch", "exact"))
    if not yardstick:
        return _NOT_YET
    for case in HOST:
        key = (case.name, "host", case.backend, "exact")
        us = figures.rows[key]["median_us"] if key in figures.rows else None
        line = {"case": case.name, "microseconds of the host": figures.spread(*key)}
        line["times a torch op"] = f"{us / yardstick['median_us']:.1f}" if us else NONE
        lines.append(line | {"target": figures.target(*key)})
    return _paragraphs(figures.origin("host"), _table(lines))


# ---- words ----


def _named(name: str) -> str:
    """A case in words; also one that stands at another world size among the work points."""
    found = (*cases.of_ranks(2), *cases.of_ranks(4), *FULL)
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
    end = f"W {case.world_size}{data[case.data]}" + ", bfloat16" * (case.dtype != cases.FLOAT8)
    if isinstance(case, Decode):
        each = f", {case.query_len} tokens each" if case.query_len > 1 else ""
        return f"{len(case.lens)} x {keys} keys{each}, {end}"
    segments = f"{len(case.lens)} x " if len(case.lens) > 1 else ""
    return f"{segments}{case.query_lens[0]:,} tokens ending at {keys}, {end}"


def short(context: int) -> str:
    """4096 as 4K, 1048576 as 1M, 5000 as it is."""
    unit, letter = (1 << 20, "M") if context % (1 << 20) == 0 else (1 << 10, "K")
    return str(context) if context % unit else f"{context // unit}{letter}"


def _us(value: float) -> str:
    """Three digits, or all before the point."""
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{digits}f}"


def _paragraphs(*texts: str) -> str:
    return "\n" + "\n\n".join(text for text in texts if text) + "\n\n"


def _table(lines: Sequence[dict[str, str]]) -> str:
    """A table, without the columns in which nothing was measured."""
    head = [name for name in lines[0] if any(line[name] != NONE for line in lines)] if lines else []
    cells = [head, ["---"] * len(head), *([line[name] for name in head] for line in lines)]
    return "\n".join("| " + " | ".join(row) + " |" for row in cells) if head else ""


def _pivot(head: str, columns: dict[Any, str], cells: Iterable[tuple[Any, Any, str]]) -> str:
    """A table of cells (line, column, text), with the columns in words."""
    lines: dict[Any, dict[str, str]] = {}
    for name, column, text in cells:
        line = lines.setdefault(name, {head: str(name)} | dict.fromkeys(columns.values(), NONE))
        line[columns[column]] = text
    return _table(list(lines.values()))


PARTS: dict[tuple[Path, str], Callable[[], str]] = {
    (ROOT / "README.md", "gain"): gain,
    (ROOT / "README.md", "summary"): summary,
    (ROOT / "docs" / "performance.md", "performance"): performance,
    (ROOT / "docs" / "scaling.md", "sweep"): sweep,
    (ROOT / "docs" / "torch.md", "host"): host,
    (ROOT / "docs" / "scaling.md", "exchange"): exchange,
    (ROOT / "docs" / "scaling.md", "jax-chain"): jax_chain,
}
