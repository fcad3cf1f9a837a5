"""What decode.py measured: verdicts on the project's targets, tables, the page of results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from contenders import (
    BUDGET,
    DYNAMIC,
    FLOOR,
    PAGED,
    QUANTIZED,
    STATIC,
    YOUNG,
    bounded_name,
    over_blocks,
)
from kvpress_decode import KvpressRun
from own_costs import Overhead
from reporting import Target, aligned, markdown
from timing import Measurement

BEGIN, END = "<!-- decode:begin -->", "<!-- decode:end -->"
BOUNDED = bounded_name(BUDGET)
MIB = 2**20


@dataclass
class Run:
    """Everything that one run measured."""

    measurements: list[Measurement] = field(default_factory=list)
    agreement: dict[str, dict[str, float]] = field(default_factory=dict)
    """By dtype and batch, then by cache: share of the greedy text that is DynamicCache's."""
    overhead: Overhead | None = None
    scratch_bytes: int | None = None
    peaks: dict[int, dict[str, int]] = field(default_factory=dict)
    """By seen tokens, then by cache: peak bytes of a process, in float32 at batch 1."""
    kvpress: KvpressRun | None = None
    skipped: list[str] = field(default_factory=list)

    def of(self, dtype: str, batch: int) -> dict[int, Measurement]:
        """By seen tokens."""
        return {m.seen: m for m in self.measurements if (m.dtype, m.batch) == (dtype, batch)}

    @property
    def names(self) -> list[str]:
        """The caches of the tables, in order."""
        measured = dict.fromkeys(name for m in self.measurements for name in m.median_ms)
        measured.pop(YOUNG, None)
        first = [n for n in (FLOOR, DYNAMIC, STATIC, QUANTIZED, PAGED) if n in measured]
        return [*first, *(name for name in measured if name not in first)]


# Verdicts.


def judge(run: Run) -> list[Target]:
    one, sixteen = run.of("float32", 1), run.of("float32", 16)
    growth = {seen: m.growth for seen, m in one.items()}
    targets = [
        Target(f"{BOUNDED}, time at {seen:,} / at {BUDGET:,}", growth.get(seen), 1.05)
        for seen in (8192, 16384, 32768)
    ]
    for seen, limit in ((8192, 2.5), (16384, 4.0), (32768, 8.0)):
        speedup = ratio(one, seen, DYNAMIC, BOUNDED)
        targets.append(Target(f"{DYNAMIC} / {BOUNDED} at {seen:,}", speedup, limit, at_least=True))
    targets.append(Target(f"{PAGED} / {DYNAMIC}, largest", largest(one, 0), 1.05))
    targets.append(Target(f"{PAGED} / {DYNAMIC}, largest from 4,096", largest(one, 4096), 1.0))
    for name in (over_blocks(PAGED), over_blocks(bounded_name(2048))):
        against = ratio(sixteen, 2048, name, STATIC)
        targets.append(Target(f"{name} / {STATIC}, batch 16 at 2,048", against, 1.0))
    overhead = None if run.overhead is None else run.overhead.share
    shares = [m.compaction_share[BOUNDED] for m in one.values() if BOUNDED in m.compaction_share]
    scratch = None if run.scratch_bytes is None else run.scratch_bytes / MIB
    return [
        *targets,
        Target(f"cache overhead, share of a step of {BOUNDED} at {BUDGET:,}", overhead, 0.05),
        Target(
            f"compaction of {BOUNDED}, largest share of a step", max(shares, default=None), 0.02
        ),
        Target("scratch of a compaction in MiB", scratch, 1.0),
    ]


def ratio(at: dict[int, Measurement], seen: int, name: str, other: str) -> float | None:
    return at[seen].ratio(name, other) if seen in at else None


def largest(at: dict[int, Measurement], shortest: int) -> float | None:
    ratios = (m.ratio(PAGED, DYNAMIC) for seen, m in at.items() if seen >= shortest)
    return max((value for value in ratios if value is not None), default=None)


# Tables.


def table(run: Run) -> str:
    """Medians in ms per token, KV MiB held, and the ratios the targets are about."""
    names = run.names
    short = [name.removesuffix("Cache").removeprefix("budget=") for name in names]
    held = [DYNAMIC, STATIC, PAGED, BOUNDED]
    header = ["dtype", "batch", "seen", *short]
    header += [f"MiB {name.removesuffix('Cache').removeprefix('budget=')}" for name in held]
    rows = [[*header, f"{BUDGET}/young", "compacting"]]
    for m in run.measurements:
        rows.append(
            [
                *(m.dtype, f"{m.batch}", f"{m.seen:,}"),
                *(_cell(m.median_ms.get(name), "{:.1f}") for name in names),
                *(_cell(m.kv_bytes.get(name), "{:,.0f}", MIB) for name in held),
                _cell(m.growth, "{:.3f}"),
                _cell(m.compaction_share.get(BOUNDED), "{:.2%}"),
            ]
        )
    legend = (
        "ms per token (median): weights only = empty cache; None and numbers = PagedCompactCache "
        "of that budget,\nwith SDPA or attn_implementation kvpage; young = budget "
        f"{BUDGET} at {BUDGET:,} seen tokens;\nMiB = KV bytes held "
        "at `seen`, by cache"
    )
    return "\n".join([legend, aligned(rows)])


def peak_table(run: Run) -> str:
    """Peak MiB of a process with one cache, in float32 at batch 1; empty when not measured."""
    if not run.peaks:
        return "peak process memory: not measured"
    rows = [["seen", *next(iter(run.peaks.values()))]]
    rows += [
        [f"{seen:,}", *(f"{peak / MIB:,.0f}" for peak in by_cache.values())]
        for seen, by_cache in run.peaks.items()
    ]
    return "\n".join(["peak memory of a process with one cache, MiB", aligned(rows)])


def _cell(value: float | None, form: str, unit: float = 1) -> str:
    return "-" if value is None else form.format(value / unit)


# The page of results.


def results_block(run: Run, figure: Path | None) -> str:
    """The part of docs/results.md between `BEGIN` and `END`, as Markdown.

    figure: a drawing beside it, under `docs/figures`.
    """
    parts = [markdown(list(_result_rows(run)))]
    if figure is not None:
        parts.append(f"![Time per token against seen tokens](figures/{figure.name})")
    if run.peaks:
        parts.append("Peak memory of a process with one cache (float32, batch 1), MiB:")
        parts.append(markdown(list(_peak_rows(run))))
    return "\n\n".join([*parts, in_words(run)])


def _result_rows(run: Run) -> Iterator[list[str]]:
    names = run.names
    yield ["dtype, batch", "seen", *map(_code, names), f"KV MiB: `{DYNAMIC}` / `{BOUNDED}`"]
    for m in run.measurements:
        held = [_cell(m.kv_bytes.get(name), "{:,.0f}", MIB) for name in (DYNAMIC, BOUNDED)]
        times = [_cell(m.median_ms.get(name), "{:.1f}") for name in names]
        yield [f"{m.dtype}, {m.batch}", f"{m.seen:,}", *times, " / ".join(held)]


def _peak_rows(run: Run) -> Iterator[list[str]]:
    yield [
        "seen",
        *(n if n == "weights only" else f"`{n}`" for n in next(iter(run.peaks.values()))),
    ]
    for seen, by_cache in run.peaks.items():
        yield [f"{seen:,}", *(f"{peak / MIB:,.0f}" for peak in by_cache.values())]


def _code(name: str) -> str:
    return name if name == FLOOR else f"`{name}`"


def in_words(run: Run) -> str:
    """What the figures say in words, as far as they were measured."""
    one = run.of("float32", 1)
    words = []
    grown = [(seen, m.growth) for seen, m in one.items() if m.growth is not None]
    if grown:
        seen, growth = grown[-1]
        words.append(f"A step of `{BOUNDED}` at {seen:,} seen tokens takes {growth:.3f} × what it")
        words.append(f"takes at {BUDGET:,}.")
    shares = [s for m in one.values() for s in m.compaction_share.values()]
    if shares:
        least, most = 100 * min(shares), 100 * max(shares)
        words.append(f"Compaction takes {least:.1f} to {most:.1f} % of decode time.")
    if run.overhead is not None:
        words.append(
            f"Of a step at {BUDGET:,}, {100 * run.overhead.share:.1f} % is the cache's own part."
        )
    if run.scratch_bytes is not None:
        words.append(f"A compaction needs {run.scratch_bytes / MIB:.1f} MiB of scratch.")
    agreement = run.agreement.get("float32, batch 1", {}).get(QUANTIZED)
    if agreement is not None:
        words.append(
            f"`{QUANTIZED}` is lossy: {100 * agreement:.0f} % of its text is `{DYNAMIC}`'s."
        )
    for at in run.kvpress.cells if run.kvpress else ():
        ours = ratio(one, at.seen, BOUNDED, DYNAMIC)
        here = "" if ours is None else f", `{BOUNDED}` here {ours:.2f} ×"
        words.append(
            f"kvpress {run.kvpress.kvpress}'s `DecodingPress` to {BUDGET:,} tokens takes "
            f"{at.ratio:.2f} × of `{DYNAMIC}`'s time in its own environment at "
            f"{at.seen:,} seen{here}."
        )
    return _wrapped(" ".join(words))


def _wrapped(text: str, width: int = 100) -> str:
    lines = [""]
    for word in text.split(" "):
        fits = len(lines[-1]) + 1 + len(word) <= width
        lines = [*lines[:-1], f"{lines[-1]} {word}".lstrip()] if fits else [*lines, word]
    return "\n".join(lines)


def parts_around(page: Path) -> tuple[str, str]:
    """What is before `BEGIN` and behind `END`; `ValueError` unless there is one of each."""
    text = page.read_text()
    before, *rest = text.split(BEGIN)
    middle = rest[0].split(END) if len(rest) == 1 else []
    if len(middle) != 2 or END in before:
        raise ValueError(f"{page}: one {BEGIN} and one {END} behind it expected")
    return before, middle[1]


def replace_block(page: Path, block: str) -> None:
    """Put `block` between the two markers of `page`."""
    before, after = parts_around(page)
    page.write_text(f"{before}{BEGIN}\n\n{block}\n\n{END}{after}")
