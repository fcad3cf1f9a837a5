"""Caches filled with random tokens, without running a model: for timing, never for quality."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from kvpage import PagedCompactCache
from kvpage.architectures import Rope, describe
from kvpage.centroids import Vectors


@dataclass(frozen=True)
class Geometry:
    """What a cache sees of a model."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope

    def random_tokens(self, heads: int, count: int) -> Tensor:
        """Standard normal `[1, heads, count, head_dim]`."""
        return torch.randn(1, heads, count, self.head_dim)


def geometry_of(model: PreTrainedModel) -> Geometry:
    decoder, config = describe(model), model.config
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Geometry(decoder.num_layers, heads, config.num_key_value_heads, head_dim, decoder.rope)


def fill(cache: Cache, geometry: Geometry, chunks: Iterable[int]) -> None:
    """Pass random tokens through `cache.update` in `chunks`, one after the other.

    `cache` has not met a model: until then anyone may fill it. One with a budget also gets the
    queries that it ranks by, as from a model's hooks.
    """
    ranks = isinstance(cache, PagedCompactCache) and cache.settings.budget is not None
    for count in chunks:
        for index in range(geometry.layers):
            keys = geometry.random_tokens(geometry.kv_heads, count)
            cache.update(keys, geometry.random_tokens(geometry.kv_heads, count), index)
            if ranks:
                collect(cache, index, geometry, geometry.random_tokens(geometry.heads, count), keys)


def collect(cache: Cache, index: int, geometry: Geometry, queries: Tensor, keys: Tensor) -> None:
    """Give a layer's statistics `queries` and `keys` `[1, heads, n, D]`, as hooks would."""
    queries, keys = (x.transpose(1, 2).flatten(2) for x in (queries, keys))  # [1, n, heads * D]
    vectors = Vectors(queries, keys, None)
    cache.layers[index].collector(vectors, geometry.rope).add(vectors)


def steady_chunks(seen: int, budget: int, interval: int) -> Iterator[int]:
    """Chunk lengths, `seen` in total, of which the last, one token, has caused a compaction.

    Up to `budget + interval` tokens nothing compacts and one chunk does. Beyond: a first chunk
    near that bound, then `interval` tokens at a time, each compacting and filling up again.
    """
    if seen <= budget + interval:
        yield seen
        return
    first = budget + 1 + (seen - budget - 2) % interval
    yield first
    yield from [interval] * ((seen - 1 - first) // interval)
    yield 1


def kv_bytes(cache: Cache) -> int:
    """Bytes of keys and values that `cache` holds, reserved ones included."""
    if isinstance(cache, PagedCompactCache):
        return cache.report().bytes_reserved
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
