"""Caches filled with random tokens, without running a model: for timing, never for quality."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from kvpage import PagedCompactCache
from kvpage.architectures import describe
from kvpage.centroids import Vectors
from kvpage.rope import RopeSource


@dataclass(frozen=True)
class Geometry:
    """What a cache sees of a model."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeSource
    batch: int = 1
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"

    @property
    def bytes_per_token(self) -> int:
        """Of keys and values, over all layers and rows."""
        return 2 * self.layers * self.batch * self.kv_heads * self.head_dim * self.dtype.itemsize

    def random_tokens(
        self, heads: int, count: int, source: torch.Generator | None = None
    ) -> Tensor:
        """Standard normal `[batch, heads, count, head_dim]`."""
        shape = (self.batch, heads, count, self.head_dim)
        return torch.randn(shape, dtype=self.dtype, device=self.device, generator=source)


def geometry_of(model: PreTrainedModel, batch: int = 1) -> Geometry:
    """The geometry of a model whose layers are alike, all of full attention."""
    sites, config = describe(model).sites, model.config
    rope, heads = sites[0].rope, config.num_attention_heads
    assert rope is not None
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads, dtype, device = config.num_key_value_heads, model.dtype, model.device
    return Geometry(len(sites), heads, kv_heads, head_dim, rope, batch, dtype, device)


def fill(
    cache: Cache,
    geometry: Geometry,
    chunks: Iterable[int],
    observed: int | None = None,
    seed: int = 0,
) -> None:
    """Pass random tokens through `cache.update` in `chunks`, one after the other.

    `cache` has not met a model: until then anyone may fill it. One with a budget also gets the
    queries that it ranks by, as from a model's hooks; of the last `observed` tokens of each chunk
    only, where that is given. Of the same `chunks` and `seed` every cache gets the same keys and
    values; a layer's are those of the first, shifted by tokens.
    """
    ranks = isinstance(cache, PagedCompactCache) and cache.settings.budget is not None
    source = torch.Generator(geometry.device).manual_seed(seed)
    for count in chunks:
        keys, values = (geometry.random_tokens(geometry.kv_heads, count, source) for _ in range(2))
        last = count if observed is None else min(count, observed)
        queries = geometry.random_tokens(geometry.heads, last) if ranks else None
        for index in range(geometry.layers):
            shifted = keys.roll(index, dims=2)
            cache.update(shifted, values.roll(index, dims=2), index)
            if queries is not None:
                collect(cache, index, geometry, queries, shifted[:, :, -last:])


def collect(cache: Cache, index: int, geometry: Geometry, queries: Tensor, keys: Tensor) -> None:
    """Give a layer's statistics `queries` and `keys` `[B, heads, n, D]`, as hooks would."""
    queries, keys = (x.transpose(1, 2).flatten(2) for x in (queries, keys))  # [B, n, heads * D]
    vectors = Vectors(queries, keys, None)
    cache.layers[index].collector(vectors, geometry.rope, cache.scorer).add(vectors)


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


def coarse_chunks(seen: int, budget: int, interval: int, chunk: int) -> Iterator[int]:
    """Chunk lengths, `seen` in total, after which the next token causes a compaction in place.

    As `steady_chunks`, but quicker to a large `seen`: chunks of up to `chunk` tokens, then one
    token, which compacts and shrinks the storage to its bound, then all but one of an interval.
    Shorter ones than `budget + 2 * interval` are one chunk.
    """
    if seen < budget + 2 * interval:
        yield seen
        return
    before = seen - interval
    count = max(1, -(-before // max(chunk, 2 * interval)))
    size, more = divmod(before, count)
    yield from (size + (i < more) for i in range(count))
    yield 1
    yield interval - 1


def cache_argument(model: PreTrainedModel) -> str:
    """transformers renamed `past_key_values` to `cache`."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def kv_bytes(cache: Cache) -> int:
    """Bytes of keys and values that `cache` holds, reserved ones included."""
    if isinstance(cache, PagedCompactCache):
        return cache.report().bytes_reserved
    fields = ("keys", "values", "_quantized_keys", "_quantized_values")
    return sum(stored_bytes(getattr(layer, f, None)) for layer in cache.layers for f in fields)


def stored_bytes(stored: object) -> int:
    """Bytes of a tensor, of one made of others, or of what a quantiser keeps for one."""
    if isinstance(stored, dict):
        return sum(map(stored_bytes, stored.values()))
    if isinstance(stored, (tuple, list)):
        return sum(map(stored_bytes, stored))
    if not isinstance(stored, Tensor):
        return 0
    if hasattr(stored, "__tensor_flatten__"):
        names, _ = stored.__tensor_flatten__()
        return sum(stored_bytes(getattr(stored, name)) for name in names)
    return stored.nbytes
