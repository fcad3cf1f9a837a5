"""What a bounded cache itself costs: its part of a step's time, and a compaction's memory."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from contenders import BUDGET, INTERVAL, Contender, Models, bounded_name
from synthetic import Geometry, collect, fill, steady_chunks
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import Cache

from kvpage import PagedCompactCache

WARMUP_STEPS = 2


class PreparedViews(Cache):
    """No cache: `update` hands out views that were made ahead of the forward, and keeps nothing."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.views: list[tuple[Tensor, Tensor]] = []
        self.seen = 0

    def prepare(self, cache: PagedCompactCache) -> None:
        """Repeat the forward that `cache` has just been through."""
        self.views = [(layer.keys, layer.values) for layer in cache.layers]
        self.seen = cache.get_seq_length() - 1

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **_: object
    ) -> tuple[Tensor, Tensor]:
        return self.views[layer_idx]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        length = self.views[layer_idx][0].shape[-2]
        return length, self.seen + query_length - length


@dataclass(frozen=True)
class Overhead:
    """Medians over pairs of steps of `budget=1024` and of the same step without a cache."""

    step_ms: float
    without_cache_ms: float
    share: float
    """Of a step with the cache: the median of the pairs' differences over it."""
    pairs: int


def overhead(models: Models, geometry: Geometry, pairs: int) -> Overhead:
    """What is neither the model's layers nor the attention, at `BUDGET` seen tokens.

    Each step of the cache is followed by the same step of the model without hooks, attending to the
    very keys and values of the cache through views made beforehand. The difference is the hooks,
    the bookkeeping, the statistics, writing the new token and making the views; not compaction,
    which falls on no step of a median and has a figure of its own.
    """
    ours, stub = Contender(bounded_name(BUDGET), BUDGET, BUDGET), PreparedViews()
    without = Contender("without a cache", BUDGET, cache=stub)
    ours.refill(models, geometry, pairs)
    timed: list[tuple[float, float]] = []
    for _ in range(WARMUP_STEPS + pairs):
        seconds, logits = ours.step(models, geometry.batch)
        assert isinstance(ours.cache, PagedCompactCache)
        stub.prepare(ours.cache)
        bare_seconds, bare_logits = without.step(models, geometry.batch)
        if not torch.equal(logits, bare_logits):
            raise AssertionError("the step without a cache is not the same step")
        timed.append((seconds, bare_seconds))
    timed = timed[WARMUP_STEPS:]
    return Overhead(
        step_ms=1e3 * median(step for step, _ in timed),
        without_cache_ms=1e3 * median(bare for _, bare in timed),
        share=median((step - bare) / step for step, bare in timed),
        pairs=len(timed),
    )


def compaction_scratch_bytes(geometry: Geometry) -> int:
    """Most bytes held beyond a layer's storage within an interval of decoding that compacts.

    One layer of the model's shape, stepped without the model, so that no activation is counted:
    the summing of statistics, ranking, selecting and moving, as the CPU allocator reports them.
    """
    cache = PagedCompactCache(budget=BUDGET, interval=INTERVAL)
    layer = replace(geometry, layers=1)
    fill(cache, layer, steady_chunks(2 * (BUDGET + INTERVAL), BUDGET, INTERVAL))
    source = torch.Generator().manual_seed(1)
    tokens = [
        [
            layer.random_tokens(heads, 1, source)
            for heads in (layer.kv_heads, layer.kv_heads, layer.heads)
        ]
        for _ in range(INTERVAL)
    ]
    compactions = cache.report().compactions
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for keys, values, queries in tokens:
            cache.update(keys, values, 0)
            collect(cache, 0, layer, queries, keys)
    assert cache.report().compactions == compactions + 1
    return peak_bytes(profiler)


def peak_bytes(profiler: profile) -> int:
    """Maximum of allocated minus freed bytes; what was there before the profile does not count."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    memory = [event for event in events if event.get("name") == "[memory]"]
    held = peak = 0
    for event in sorted(memory, key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak
