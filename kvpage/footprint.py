"""What a trace will cost in memory, worked out from a model's shapes: no cache is made.

Of the keys and values of a full cache and of a `PagedCompactCache`, and of what its scorer keeps
of queries. States of recurrent layers have the same fixed size in either and are not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvpage.architectures import AttentionSite, Decoder, describe
from kvpage.centroids import FOLD_TOKENS
from kvpage.compat import Window, native_layers
from kvpage.ledger import Ledger
from kvpage.scorers import resolve_scorer
from kvpage.scoring import Scorer
from kvpage.settings import Settings


@dataclass(frozen=True)
class LayerShape:
    """One attention layer. heads: of queries; bands: of its RoPE; window: `None` for full."""

    heads: int
    kv_heads: int
    head_dim: int
    bands: int
    window: int | None


@dataclass(frozen=True)
class PagedBytes:
    """What a `PagedCompactCache` holds, in bytes; as `Report` has them under `bytes_...`."""

    in_use: int
    reserved: int
    peak: int
    """Most that was reserved on the way: a long prompt is held in full until decoding starts."""
    statistics: int
    """What the scorer keeps of queries and keys."""


@dataclass(frozen=True)
class Footprint:
    """The shapes that decide what a model's caches take. dtype: of keys and values."""

    name: str
    layers: tuple[LayerShape, ...]
    state_layers: int
    dtype: torch.dtype
    weights_bytes: int
    """Of the parameters, tied ones once."""

    @staticmethod
    def of(model: nn.Module) -> Footprint:
        """Of a model, which may be on the meta device.

        Raises `ValueError` for an architecture that kvpage does not support, naming why, and
        `TypeError` for what is no transformers model.
        """
        decoder = describe(model)
        module: Any = decoder.module
        layers = tuple(_shape(site, decoder) for site in decoder.sites)
        kinds = native_layers(decoder.config)
        return Footprint(
            name=type(model).__name__,
            layers=layers,
            state_layers=sum(not isinstance(kind, Window) for kind in kinds),
            dtype=module.dtype,
            weights_bytes=sum(parameter.nbytes for parameter in model.parameters()),
        )

    @staticmethod
    def from_pretrained(name: str, dtype: str = "auto") -> Footprint:
        """Of the model in a folder or on the hub, from its config alone: no weights are loaded, and
        those that are quantised count as if they were not.

        dtype: "auto", as the config says, or "float32", "bfloat16", ... Raises as `of`, and
        `OSError` where there is no such model.
        """
        return Footprint.of(without_weights(AutoConfig.from_pretrained(name), dtype))

    @property
    def full_layers(self) -> int:
        """Layers whose attention looks at all tokens: those that a budget is for."""
        return sum(layer.window is None for layer in self.layers)

    @property
    def windows(self) -> tuple[int, ...]:
        """The window of each sliding layer."""
        return tuple(layer.window for layer in self.layers if layer.window is not None)

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token in the layers of full attention."""
        return sum(self._kv_bytes(layer) for layer in self.layers if layer.window is None)

    def dynamic_bytes(self, tokens: int, rows: int = 1) -> int:
        """Keys and values in transformers' `DynamicCache` of `rows` rows of `tokens` tokens.

        A layer with a window of w tokens holds the last w - 1.
        """
        _check("tokens", tokens, 0)
        _check("rows", rows, 1)
        held = (min(tokens, (layer.window or tokens + 1) - 1) for layer in self.layers)
        sizes = map(self._kv_bytes, self.layers)
        return rows * sum(size * count for size, count in zip(sizes, held, strict=True))

    def paged_bytes(
        self,
        tokens: int,
        *,
        prompt: int = 1,
        rows: int = 1,
        scorer: str = "sampled",
        **options: Any,
    ) -> PagedBytes:
        """What `PagedCompactCache(scorer=scorer, **options)` holds once `rows` rows have seen
        `tokens` tokens each: `prompt` of them in the first forward, then one at a time.

        options: budget, interval, block_size, sinks, recent and static, checked as in the cache.
        Without pads and drafts what it says is what `report()` says of such a run.
        """
        _check("tokens", tokens, 1)
        _check("prompt", prompt, 1)
        _check("rows", rows, 1)
        settings, ranker = _settings(options), resolve_scorer(scorer)
        prompt = min(prompt, tokens)
        in_use = reserved = 0
        growth: list[dict[int, int]] = []
        for window in dict.fromkeys(layer.window for layer in self.layers):
            alike = [layer for layer in self.layers if layer.window == window]
            block = settings.block_size * sum(map(self._kv_bytes, alike))
            budget = settings.budget if window is None else window - 1
            used, blocks = _blocks(budget, settings, tokens, prompt, rows)
            in_use, reserved = in_use + block * used, reserved + block * blocks[max(blocks)]
            growth.append({seen: block * count for seen, count in blocks.items()})
        times = sorted({seen for sizes in growth for seen in sizes})
        peak = max(sum(_latest(sizes, seen) for sizes in growth) for seen in times)
        waiting = _waiting(settings, tokens, prompt)
        statistics = rows * self._statistics(ranker, waiting, tokens - waiting)
        return PagedBytes(in_use, reserved, peak, statistics)

    def longest_dynamic(self, free: int, rows: int = 1) -> int | None:
        """The most tokens per row of which a `DynamicCache` fits into `free` bytes; `None`: any
        number, as every layer slides."""
        if self.bytes_per_token == 0 and self.dynamic_bytes(max(self.windows), rows) <= free:
            return None
        return _longest(lambda tokens: self.dynamic_bytes(tokens, rows) <= free)

    def longest_paged(
        self, free: int, *, prompt: int = 1, rows: int = 1, scorer: str = "sampled", **options: Any
    ) -> int | None:
        """The same of a `PagedCompactCache`, statistics included; `None`: any number.

        With a budget it is any number or fewer than budget + interval. Arguments as in
        `paged_bytes`; for a prompt of more than one token it says 0 where that does not fit.
        """
        settings, ranker = _settings(options), resolve_scorer(scorer)
        statistics = rows * self._statistics(ranker, FOLD_TOKENS, 1 << 62)

        def fits(tokens: int) -> bool:
            size = self.paged_bytes(tokens, prompt=prompt, rows=rows, scorer=scorer, **options)
            return size.peak + statistics <= free

        if settings.budget is not None or not self.full_layers:
            bound = max(settings.budget or 0, *self.windows, 0) + settings.interval
            if fits(max(bound, prompt) + settings.interval):
                return None
        found = _longest(fits)
        return 0 if found < prompt else found

    def _kv_bytes(self, layer: LayerShape) -> int:
        return 2 * layer.kv_heads * layer.head_dim * self.dtype.itemsize

    def _statistics(self, scorer: Scorer, waiting: int, summed: int) -> int:
        """Bytes of statistics per row, `waiting` tokens unsummed and `summed` others."""
        if not scorer.needs_statistics:
            return 0
        sample = min(getattr(scorer, "sample_tokens", 0), summed)
        recent = min(getattr(scorer, "recent_tokens", 0), summed)
        total = 0
        for layer in self.layers:
            if layer.window is None:
                heads, vector = layer.heads + layer.kv_heads, layer.head_dim * self.dtype.itemsize
                total += waiting * heads * vector
                total += (sample + recent) * layer.heads * vector + 8 * sample  # priorities, int64
                total += 8 * (heads * (layer.head_dim + layer.bands) + 1) * (summed > 0)  # float64
        return total


def without_weights(config: Any, dtype: str = "auto") -> PreTrainedModel:
    """The model of `config` for causal language modelling on the meta device; only its RoPE
    frequencies are numbers.

    Raises `ValueError` for a dtype or a config that there is no such model of.
    """
    chosen = getattr(torch, dtype, None) if dtype != "auto" else config.dtype or torch.float32
    if not isinstance(chosen, torch.dtype):
        raise ValueError(f"dtype: auto, float32, bfloat16 or float16 expected, got {dtype!r}")
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=chosen)
    for module in list(model.modules()):
        for name, child in module.named_children():
            buffers = dict(child.named_buffers(recurse=False))
            if any(key.endswith("inv_freq") for key in buffers) and hasattr(child, "config"):
                setattr(module, name, type(child)(child.config))
    return model


def _shape(site: AttentionSite, decoder: Decoder) -> LayerShape:
    attention: Any = site.attention
    config = decoder.config
    heads = config.num_attention_heads
    dim = getattr(attention, "head_dim", None) or getattr(attention, "head_size", None)
    dim = int(dim or config.hidden_size // heads)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    keys = getattr(getattr(attention, "k_proj", None), "out_features", None)
    kv_heads = kv_heads if keys is None else keys // dim
    bands = 0 if site.rope is None else site.rope().bands
    return LayerShape(heads, kv_heads, dim, bands, site.window)


def _settings(options: dict[str, Any]) -> Settings:
    """As `PagedCompactCache` has them by default."""
    defaults = {"budget": 2048, "interval": 128, "block_size": 16, "sinks": 4, "recent": 128}
    return Settings(**(defaults | {"pin_prompt": False, "trace": False} | options))


def _blocks(
    budget: int | None, settings: Settings, tokens: int, prompt: int, rows: int
) -> tuple[int, dict[int, int]]:
    """Blocks used, and blocks there were from so many seen tokens on: of the ledger that caches
    have, led through the forwards that change something."""
    ledger = Ledger(budget, settings.interval, settings.block_size, settings.static)
    limit = None if budget is None else budget + settings.interval
    ledger.begin(rows, prompt)
    blocks = {prompt: ledger.pool.num_blocks}
    seen, left = prompt, tokens - prompt
    while left > 0:
        room = ledger.pool.num_blocks // rows * settings.block_size
        count = min(left, room + 1 - ledger.live)
        if limit is not None and ledger.live >= limit:  # a compaction; from there on lengths repeat
            left, count = (left - 1) % settings.interval + 1, 1
        elif limit is not None:
            count = min(count, limit - ledger.live)
        ledger.begin(rows, count)
        seen, left = seen + count, left - count
        blocks[seen] = ledger.pool.num_blocks
    return ledger.pool.num_used_blocks, blocks


def _latest(sizes: dict[int, int], seen: int) -> int:
    """The size at `seen` tokens, of sizes from so many tokens on."""
    return sizes[max(first for first in sizes if first <= seen)]


def _waiting(settings: Settings, tokens: int, prompt: int) -> int:
    """Tokens of which the vectors are not summed yet: a compaction sums all before its token."""
    first = None if settings.budget is None else settings.budget + settings.interval + 1
    first = None if first is None else max(prompt + 1, first)
    if first is not None and tokens >= first:
        return (tokens - first) % settings.interval % FOLD_TOKENS + 1
    return (min(prompt, FOLD_TOKENS) + tokens - prompt - 1) % FOLD_TOKENS + 1


def _longest(fits: Callable[[int], bool]) -> int:
    """The most tokens that fit, where fewer fit too."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _check(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: an integer expected, got {value!r}")
    if value < least:
        raise ValueError(f"{name}: at least {least} expected, got {value}")
