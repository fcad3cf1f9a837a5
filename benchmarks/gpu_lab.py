"""A model of random weights, and caches of it being filled and stepped, one at a time."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from gpu_timing import forget_peak, peak_bytes
from synthetic import cache_argument, coarse_chunks, fill, geometry_of
from transformers import (
    AutoModelForCausalLM,
    Cache,
    DynamicCache,
    PreTrainedModel,
    Qwen3Config,
    StaticCache,
)
from transformers.utils import is_flash_attn_2_available

import kvpage
from kvpage import PagedCompactCache

ROOM = 64
"""Tokens a `StaticCache` has room for behind those seen: more than are decoded."""
MANY_ROWS = 16
"""With more, a bounded cache is filled in chunks a quarter as long: it holds one meanwhile."""


@dataclass(frozen=True)
class Shape:
    """A model and what to measure of it. cells: `(seen tokens, batch)`, the telling ones first."""

    config: dict[str, Any]
    cells: tuple[tuple[int, int], ...]
    budgets: tuple[int, int]
    interval: int
    chunk: int
    """Tokens that caches are filled with at a time."""
    steps: int
    rounds: int
    traces: tuple[int, int]
    """Seen tokens between which memory per token is measured; batches fill up to the larger."""


QWEN3_8B = {
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "max_position_embeddings": 1 << 20,
    "tie_word_embeddings": False,
}
TINY = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 101,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
SHAPES = {
    "qwen3-8b": Shape(
        QWEN3_8B,
        (
            (4096, 1), (65536, 1), (16384, 8), (65536, 8), (4096, 64), (16384, 64),
            (16384, 1), (4096, 8), (65536, 64),
        ),
        (2048, 4096), 128, 4096, 12, 2, (8192, 32768),
    ),
    "tiny": Shape(
        TINY, ((256, 1), (1024, 1), (256, 4)), (128, 192), 16, 64, 4, 2, (512, 1024)
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Contender:
    """A cache and the attention it is used with. budget: of ours; `None` never evicts."""

    name: str
    kind: str
    attention: str
    budget: int | None = None


def contenders(shape: Shape, attention: str) -> list[Contender]:
    """attention: `attn_implementation` with our cache."""
    found = [Contender("DynamicCache", "dynamic", "sdpa")]
    if is_flash_attn_2_available() and torch.cuda.is_available():
        found.append(Contender("DynamicCache, flash-attn 2", "dynamic", "flash_attention_2"))
    found.append(Contender("StaticCache", "static", "sdpa"))
    for budget in (None, *shape.budgets):
        found.append(Contender(f"budget={budget}", "paged", attention, budget))
    return found


def build_model(shape: Shape, device: torch.device) -> PreTrainedModel:
    """The model with random weights in bfloat16, made on `device`; nothing is downloaded."""
    config = Qwen3Config(**shape.config, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    return model.eval()


@dataclass(frozen=True)
class StepTime:
    """A forward of one token per row."""

    ms: float
    compacted: bool


class Lab:
    """Fills and steps caches of one model; gives the memory back in between."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.model = build_model(shape, device)

    @contextmanager
    def attending(self, contender: Contender) -> Iterator[None]:
        """The model as `contender` wants it; our hooks are on it for our caches only."""
        if contender.kind == "paged":
            kvpage.attach(self.model)
        try:
            self.model.set_attn_implementation(contender.attention)
            yield
        finally:
            self.model.set_attn_implementation("sdpa")
            if contender.kind == "paged":
                kvpage.detach(self.model)

    def filled(self, contender: Contender, seen: int, batch: int) -> Cache:
        """A cache that has seen `seen` random tokens, in chunks. A bounded one is in its steady
        state: its storage at the bound, and the next token makes it compact."""
        self.free()
        shape, cache = self.shape, self.new_cache(contender, seen)
        if contender.budget is None:
            chunks = iter([shape.chunk] * (seen // shape.chunk) + [seen % shape.chunk])
        else:
            chunk = shape.chunk if batch <= MANY_ROWS else shape.chunk // 4
            chunks = coarse_chunks(seen, contender.budget, shape.interval, chunk)
        fill(cache, geometry_of(self.model, batch), filter(None, chunks), observed=1)
        self.free()
        forget_peak(self.device)
        return cache

    def new_cache(self, contender: Contender, seen: int) -> Cache:
        """One that has not met the model, so that it can be filled without."""
        if contender.kind == "dynamic":
            return DynamicCache(config=self.model.config)
        if contender.kind == "static":
            return StaticCache(config=self.model.config, max_cache_len=seen + ROOM)
        interval = self.shape.interval
        return PagedCompactCache(
            budget=contender.budget, interval=interval, recent=min(128, interval)
        )

    def step(self, cache: Cache, batch: int, tokens: int = 1) -> StepTime:
        """A forward of `tokens` tokens per row, timed until the device is done."""
        vocabulary, before = self.model.config.vocab_size, compactions(cache)
        ids = torch.randint(vocabulary, (batch, tokens), device=self.device)
        self.synchronize()
        started = time.perf_counter()
        self.model(ids, **{cache_argument(self.model): cache}, logits_to_keep=1)
        self.synchronize()
        return StepTime(1e3 * (time.perf_counter() - started), compactions(cache) > before)

    def peak(self, contender: Contender, seen: int, batch: int, limit: int | None = None) -> int:
        """Most bytes held while decoding 3 tokens behind `seen`, under a limit on what torch's
        allocator may reserve (not while the cache is filled). Raises where they do not fit.

        On the CPU, which has no such count, the bytes of keys and values.
        """
        with self.attending(contender):
            cache = self.filled(contender, seen, batch)
            with self.limited(limit):
                for _ in range(3):
                    self.step(cache, batch)
            return peak_bytes(self.device) or cache_bytes(cache)

    @contextmanager
    def limited(self, limit: int | None) -> Iterator[None]:
        if limit is None:
            yield
            return
        total = torch.cuda.get_device_properties(self.device).total_memory
        torch.cuda.set_per_process_memory_fraction(limit / total, self.device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def free(self) -> None:
        """Give back what no tensor holds, also what the traceback of an exception held."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def compactions(cache: Cache) -> int:
    return cache.ledger.compactions if isinstance(cache, PagedCompactCache) else 0


def cache_bytes(cache: Cache) -> int:
    """Bytes of keys and values, reserved ones included."""
    if isinstance(cache, PagedCompactCache):
        return sum(layer.bytes_reserved for layer in cache.layers)
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
