"""Helpers shared by the tests: states to feed a cache, poisoned memory, snapshots."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvpage import PagedCompactCache

SMALL: dict[str, Any] = {
    "budget": 64,
    "interval": 32,
    "block_size": 16,
    "sinks": 4,
    "recent": 16,
    "pin_prompt": False,
    "scorer": "knorm",
}


def small_cache(**overrides: Any) -> PagedCompactCache:
    """A cache whose budget binds after 96 tokens and whose scorer needs no model."""
    return PagedCompactCache(**(SMALL | overrides))


def random_states(
    tokens: int, *, batch: int = 1, heads: int = 2, dim: int = 8, value_dim: int | None = None
) -> tuple[Tensor, Tensor]:
    """Random keys and values `[B, Hkv, q, D]`, from torch's global generator."""
    keys = torch.randn(batch, heads, tokens, dim)
    return keys, torch.randn(batch, heads, tokens, value_dim or dim)


class Text:
    """Keys and values of whole rows, so that any token can be recognised in a cache.

    keys: random, `[L, B, Hkv, T, D]`; values: the same shape, all equal to the token position.
    """

    def __init__(
        self, tokens: int, *, layers: int = 2, batch: int = 1, heads: int = 2, dim: int = 8
    ) -> None:
        generator = torch.Generator().manual_seed(tokens + batch)
        self.keys = torch.randn(layers, batch, heads, tokens, dim, generator=generator)
        position = torch.arange(tokens, dtype=torch.float32)[:, None]
        self.values = position.expand(layers, batch, heads, tokens, dim)

    @property
    def num_layers(self) -> int:
        return self.keys.shape[0]

    def feed(self, cache: PagedCompactCache, count: int, first_layer: int = 0) -> list[Tensor]:
        """One forward of the next `count` tokens; returns the values each layer attends to."""
        start = cache.get_seq_length() - (count if first_layer else 0)
        stop = start + count
        return [
            cache.update(self.keys[i, :, :, start:stop], self.values[i, :, :, start:stop], i)[1]
            for i in range(first_layer, self.num_layers)
        ]

    def check_contents(self, cache: PagedCompactCache) -> None:
        """Every live key must be the one of the token its value names, in token order."""
        for i, layer in enumerate(cache.layers):
            position = layer.values[..., 0].long()
            assert (position.diff(dim=-1) > 0).all()
            index = position[..., None].expand_as(layer.keys)
            assert torch.equal(layer.keys, self.keys[i].gather(2, index))
            assert torch.equal(layer.values, self.values[i].gather(2, index))


def live_positions(cache: PagedCompactCache, layer: int) -> Tensor:
    """Token positions `[B, Hkv, live]` in a layer fed by `Text`."""
    return cache.layers[layer].values[..., 0].long()


def poison_fresh_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `new_empty` and `empty` return NaN, so that a read of what nobody wrote shows."""
    new_empty, empty = torch.Tensor.new_empty, torch.empty

    def poisoned(make: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

        return call

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(new_empty))
    monkeypatch.setattr(torch, "empty", poisoned(empty))


def snapshot(cache: PagedCompactCache) -> dict[str, Any]:
    """Everything a user can see of a cache, to compare before and after."""
    ledger = cache.ledger
    return {
        "seen": cache.get_seq_length(),
        "mask sizes": [cache.get_mask_sizes(q) for q in (1, 7, 64)],
        "batch": cache.batch_size,
        "tables": [list(table) for table in ledger.tables],
        "counts": list(ledger.pool.ref_counts),
        "report": cache.report().to_dict() | {"compaction_seconds": None},
        "repr": repr(cache),
        "layers": [
            (layer.keys.clone(), layer.values.clone(), layer.storage.bytes_reserved)
            if layer.is_initialized
            else None
            for layer in cache.layers
        ],
        "survivors": [layer.survivors for layer in cache.layers],
        "trace": [(traced.seen_tokens, list(traced.positions)) for traced in cache.trace or ()],
    }


def assert_same(got: Any, expected: Any, path: str = "snapshot") -> None:
    """Compare nested snapshots, tensors exactly."""
    if isinstance(expected, Tensor):
        assert isinstance(got, Tensor) and torch.equal(got, expected), path
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys(), path
        for key in expected:
            assert_same(got[key], expected[key], f"{path}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected), path
        for i, (g, e) in enumerate(zip(got, expected, strict=True)):
            assert_same(g, e, f"{path}[{i}]")
    else:
        assert got == expected, path
