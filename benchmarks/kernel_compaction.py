"""A whole compaction, driven through a real `PagedCompactCache` that no model has met."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from gpu_timing import Stopwatch
from kernel_cases import Heads, paged_case
from synthetic import Geometry, coarse_chunks, collect, fill

from kvpage import PagedCompactCache, kernels
from kvpage.centroids import read_together
from kvpage.compaction import CompactionPlan, apply_plan, plan
from kvpage.ledger import Step
from kvpage.rope import Rope, RopeSource
from kvpage.selection import choose

ROPE_BASE = 1e6


@dataclass(frozen=True)
class CompactionShape:
    """Down to `budget` from `budget + interval` tokens, in every layer and row."""

    layers: int = 36
    batch: int = 8
    budget: int = 2048
    interval: int = 128
    recent: int = 128
    scorer: str = "sampled"


@dataclass(frozen=True)
class CompactionTime:
    """Milliseconds, medians; `parts` by events, in one layer, times the layers."""

    whole_ms: float
    """A step of one token that compacts, minus one that does not: the host's clock."""
    compacting_step_ms: float
    plain_step_ms: float
    attention_step_ms: float
    """`write_kv` and `paged_attention` of a decode step, all layers, by events."""
    parts_ms: dict[str, float]
    compactions: int


def geometry(shape: CompactionShape, heads: Heads, device: torch.device) -> Geometry:
    bands = heads.dim // 2
    rope = Rope(ROPE_BASE ** -(torch.arange(bands, dtype=torch.float64) / bands))
    source = RopeSource(lambda module: rope, torch.nn.Module(), fixed=True)
    return Geometry(
        shape.layers, heads.heads, heads.kv_heads, heads.dim, source,
        shape.batch, heads.dtype, device,
    )  # fmt: skip


def measure_compaction(
    stopwatch: Stopwatch, shape: CompactionShape, heads: Heads, repeats: int = 5
) -> CompactionTime:
    """Decode through `repeats` intervals, after one that warms up."""
    tokens = geometry(shape, heads, stopwatch.device)
    cache = PagedCompactCache(
        budget=shape.budget, interval=shape.interval, recent=shape.recent, pin_prompt=False,
        scorer=shape.scorer,
    )  # fmt: skip
    seen = shape.budget + 3 * shape.interval
    fill(cache, tokens, coarse_chunks(seen, shape.budget, shape.interval, seen), observed=1)
    assert cache.ledger.live == shape.budget + shape.interval
    before = cache.report().compactions
    compacting, plain = [], []
    for _ in range(1 + repeats):
        compacting.append(_step_seconds(stopwatch, cache, tokens))
        plain += [_step_seconds(stopwatch, cache, tokens) for _ in range(shape.interval - 1)]
    compacting_ms = 1e3 * median(compacting[1:])
    plain_ms = 1e3 * median(plain[shape.interval - 1 :])
    compactions = cache.report().compactions - before
    assert compactions == 1 + repeats and cache.ledger.live == shape.budget + shape.interval
    return CompactionTime(
        compacting_ms - plain_ms,
        compacting_ms,
        plain_ms,
        _attention_step_ms(stopwatch, shape, heads),
        _parts_ms(stopwatch, cache, shape),
        compactions,
    )


def _step_seconds(stopwatch: Stopwatch, cache: PagedCompactCache, tokens: Geometry) -> float:
    """Seconds of one token through all layers; its queries are collected, as by hooks, after."""
    keys, values = (tokens.random_tokens(tokens.kv_heads, 1) for _ in range(2))

    def step() -> None:
        for layer in range(tokens.layers):
            cache.update(keys, values, layer)

    seconds = stopwatch.host_seconds(step)
    queries = tokens.random_tokens(tokens.heads, 1)
    for layer in range(tokens.layers):
        collect(cache, layer, tokens, queries, keys)
    return seconds


def _attention_step_ms(stopwatch: Stopwatch, shape: CompactionShape, heads: Heads) -> float:
    live = shape.budget + shape.interval // 2
    case = paged_case(heads, (live,) * shape.batch, False, stopwatch.device)
    new = (2, shape.batch, heads.kv_heads, 1, heads.dim)
    new_keys, new_values = torch.randn(new, dtype=heads.dtype, device=stopwatch.device)
    start = case.stop - 1

    def step() -> None:
        kernels.write_kv(case.keys, case.values, new_keys, new_values, case.tables, start)
        case.attend()

    return shape.layers * stopwatch.median_ms(step)


def _parts_ms(
    stopwatch: Stopwatch, cache: PagedCompactCache, shape: CompactionShape
) -> dict[str, float]:
    """What the layers do when they compact, part by part, as many layers at once as fit.

    Nothing that is timed changes what the next call finds: statistics are read from copies, and
    the survivors moved are the same every time.
    """
    layers, ledger, forwards = cache._stack.ranked, cache.ledger, cache._forwards
    layout, live, storage = ledger.layout, ledger.live, layers[0].storage
    next_position = forwards.positions.next_position(ledger.seen, shape.batch)
    appended = forwards.positions.appended(stopwatch.device)
    due = forwards._compaction(appended, next_position)
    step = Step(0, 1, ledger.seen, live, shape.budget, layout, layout, ledger.pool.num_blocks)
    groups, some = [], len(cache._selection._alike(layers[0], step))
    for start in range(0, len(layers), some):
        groups.append(layers[start : start + some])

    def pick() -> list[torch.Tensor]:
        return [choose(group, layout, due, cache.scorer, shape.budget)[0] for group in groups]

    def place(survivors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return plan(survivors, layout, layout, storage)

    survivors = pick()
    moves = [
        CompactionPlan(slots, target)
        for source, target in map(place, survivors)
        for slots in source
    ]
    parts: dict[str, Callable[[], object]] = {
        "sum statistics": lambda: [
            read_together([layer.statistics.fork() for layer in group]) for group in groups
        ],
        "score and select": pick,
        "plan": lambda: [place(kept) for kept in survivors],
        "move": lambda: [
            apply_plan(move, layer.storage, step) for move, layer in zip(moves, layers, strict=True)
        ],
    }
    return {name: stopwatch.median_ms(run) for name, run in parts.items()}
