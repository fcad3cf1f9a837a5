"""Speed of decoding: `DynamicCache` beside bounded caches, in turn, so that slow moments hit all.

At each length all caches are filled anew, then make one-token greedy forwards, one after the other
in every turn. Where all layers are of full attention they are filled with random keys, values and
queries, which changes no timing and runs no model; else with random tokens that the model reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from kvpage.architectures import Decoder, describe
from kvpage.cache import PagedCompactCache
from kvpage.centroids import Vectors
from kvpage.compat import NEWEST
from kvpage.evaluation.contenders import Contender
from kvpage.evaluation.runner import Row
from kvpage.footprint import Footprint

WARMUP_STEPS = 2
CHUNK_TOKENS = 2048
"""Of a fill, at a time; where the budget allows it."""


def speed(
    model: nn.Module,
    contenders: Sequence[Contender],
    lengths: Sequence[int],
    *,
    steps: int = 16,
    rows: int = 1,
    progress: Callable[[int], object] = lambda steps: None,
) -> Iterator[list[Row]]:
    """Time decoding at each of `lengths` seen tokens; yields the rows of a length as it is done.

    steps: timed forwards of each cache; rows: of the batch; progress: is called with 1 for each of
    the `steps + 1` of every contender and the `DynamicCache` at every length.

    A row has `seen_tokens`, `cache`, `ms_per_token` (median of the forwards without a
    compaction, and the share of what one with a compaction takes more, over an interval; such a one
    is among the timed, once the cache compacts), `ms_compaction` (what it takes more; `None` where
    there was none), `speedup` (time of the `DynamicCache` over that of this, median over turns),
    `live_tokens`, `kv_bytes` (reserved) and `statistics_bytes`.
    Raises `ValueError` for lengths and steps that are not positive, and models kvpage refuses.
    """
    if not lengths or min(lengths) < 1:
        raise ValueError(f"lengths: positive numbers of tokens expected, got {list(lengths)}")
    if steps < 1 or rows < 1:
        raise ValueError(f"steps, rows: at least 1 expected, got {steps}, {rows}")
    filler = _Filler(model, rows)
    for length in lengths:
        runs = [_Run(None, length, steps), *(_Run(each, length, steps) for each in contenders)]
        yield measured(model, runs, filler, steps, progress)


@torch.inference_mode()
def measured(
    model: nn.Module,
    runs: Sequence[_Run],
    filler: _Filler,
    steps: int,
    progress: Callable[[int], object],
) -> list[Row]:
    """Fill and step all of `runs`, and say how long it took."""
    for run in runs:
        run.cache = filler.filled(run)
        for _ in range(WARMUP_STEPS):
            run.step(model, filler.rows)
        progress(1)
    for run in runs:
        run.seconds.clear()
        run.compacted.clear()
    for _ in range(steps):
        for run in runs:
            run.step(model, filler.rows)
            progress(1)
    return [run.row(runs[0]) for run in runs]


@dataclass
class _Run:
    """A cache at a length; contender: `None` is the `DynamicCache`."""

    contender: Contender | None
    length: int
    steps: int
    cache: Any = None
    token: Tensor | None = None
    seconds: list[float] = field(default_factory=list)
    compacted: list[bool] = field(default_factory=list)

    @property
    def name(self) -> str:
        return "DynamicCache" if self.contender is None else self.contender.name

    @property
    def budget(self) -> int | None:
        return None if self.contender is None else self.contender.budget

    def new(self, model: nn.Module | None, config: Any) -> Any:
        """An empty cache; without a model it can be filled by anyone."""
        if self.contender is None:
            return DynamicCache(config=config)
        arguments = {"scorer": self.contender.scorer, **self.contender.options}
        return PagedCompactCache(model, budget=self.budget, pin_prompt=False, **arguments)

    def chunks(self) -> list[int]:
        """Forwards that fill the cache so that it compacts in the middle of what is timed, if it is
        full by then."""
        if self.budget is None or self.contender is None:
            return _even(self.length, CHUNK_TOKENS)
        interval = PagedCompactCache(budget=None, **self.contender.options).settings.interval
        if self.length < self.budget + 2 * interval:
            return [self.length]
        until_due = min(WARMUP_STEPS + self.steps // 2, interval - 1)
        last = interval - until_due - 1
        before = self.length - 1 - last
        least = max(CHUNK_TOKENS, self.budget + interval)
        return [*_even(before, least), 1, *([last] if last else [])]

    def step(self, model: nn.Module, rows: int) -> None:
        """One greedy token."""
        device = next(model.parameters()).device
        if self.token is None:
            self.token = torch.ones(rows, 1, dtype=torch.long, device=device)
        before = self._compactions()
        _wait_for(device)
        start = perf_counter()
        logits = model(self.token, use_cache=True, **{NEWEST: self.cache}).logits
        self.token = logits[:, -1].argmax(-1, keepdim=True)
        _wait_for(device)
        self.seconds.append(perf_counter() - start)
        self.compacted.append(self._compactions() > before)

    def row(self, full: _Run) -> Row:
        plain = [s for s, also in zip(self.seconds, self.compacted, strict=True) if not also]
        some = [s for s, also in zip(self.seconds, self.compacted, strict=True) if also]
        typical = median(plain or some)
        more = median(some) - typical if some and plain else None
        report = None if self.contender is None else self.cache.report()
        share = 0.0 if more is None or report is None else more / report.interval
        ratio = median(a / b for a, b in zip(full.seconds, self.seconds, strict=True))
        held = _held(self.cache) if report is None else report.bytes_reserved
        return {
            "seen_tokens": self.length,
            "cache": self.name,
            "ms_per_token": 1e3 * (typical + share),
            "ms_compaction": None if more is None else 1e3 * more,
            "speedup": ratio,
            "live_tokens": self.cache.get_seq_length() if report is None else report.live_tokens,
            "kv_bytes": held,
            "statistics_bytes": 0 if report is None else report.bytes_statistics,
        }

    def _compactions(self) -> int:
        return 0 if self.contender is None else int(self.cache.ledger.compactions)


class _Filler:
    """Fills caches of one model."""

    def __init__(self, model: nn.Module, rows: int) -> None:
        self.model, self.rows = model, rows
        self.decoder: Decoder = describe(model)
        self.shape = Footprint.of(model)
        self.alike = not (self.shape.windows or self.shape.state_layers)
        self.device = next(model.parameters()).device

    def filled(self, run: _Run) -> Any:
        """A new cache with `run.length` tokens in each row."""
        cache = run.new(None if self.alike else self.model, self.decoder.config)
        for count in run.chunks():
            if self.alike:
                self._random(cache, count)
            else:
                high = self.decoder.config.vocab_size
                ids = torch.randint(high, (self.rows, count), device=self.device)
                self.decoder.module(input_ids=ids, use_cache=True, **{NEWEST: cache})
        return cache

    def _random(self, cache: Any, count: int) -> None:
        for index, (site, layer) in enumerate(
            zip(self.decoder.sites, self.shape.layers, strict=True)
        ):
            keys, values, queries = (
                torch.randn(
                    (self.rows, heads, count, layer.head_dim),
                    dtype=self.shape.dtype,
                    device=self.device,
                )
                for heads in (layer.kv_heads, layer.kv_heads, layer.heads)
            )
            cache.update(keys, values, index)
            if isinstance(cache, PagedCompactCache) and cache.scorer.needs_statistics:
                queries, keys = (part.transpose(1, 2).flatten(2) for part in (queries, keys))
                vectors = Vectors(queries, keys, None)
                assert site.rope is not None
                collector = cache.layers[index].collector(
                    vectors, site.rope, cache.scorer, site.scale
                )
                collector.add(vectors)


def _even(total: int, least: int) -> list[int]:
    """`total` in parts of at least `least`, or one."""
    count = max(1, total // least)
    size, more = divmod(total, count)
    return [size + (i < more) for i in range(count)]


def _held(cache: Any) -> int:
    """Bytes of keys and values in a `DynamicCache`."""
    tensors = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _wait_for(device: torch.device) -> None:
    if device.type in ("cuda", "xpu", "mps"):
        getattr(torch, device.type).synchronize()
