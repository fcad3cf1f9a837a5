"""Where attention looks: its mass per key, the share of it that was kept, and an oracle's.

The mass of a key is the attention probability it gets, summed over queries and over the query heads
of a KV head. It is collected in bins of consecutive forwards; a new bin starts wherever a cache
compacted, so that within a bin what lives is the survivors and all that came after them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvpage.architectures import AttentionSite, decoder_of
from kvpage.compaction import TracedCompaction
from kvpage.scoring import LiveTokens


@contextmanager
def eager_attention(model: nn.Module) -> Iterator[None]:
    """Within it, `model` computes attention in plain torch, which yields the probabilities."""
    decoder = decoder_of(model)
    before = decoder.config._attn_implementation
    try:
        decoder.set_attn_implementation("eager")
        yield
    finally:
        decoder.set_attn_implementation(before)


class AttentionMass:
    """Mass per layer, bin, KV head and key of a text of `tokens` tokens, in one row."""

    def __init__(self, layers: int, tokens: int) -> None:
        self.tokens = tokens
        self.starts: list[int] = []
        self._bins: list[list[Tensor]] = [[] for _ in range(layers)]

    def add(self, start: int, mass: Sequence[Tensor], new_bin: bool) -> None:
        """Add a forward of the tokens from `start` on: per layer `[Hkv, K]`."""
        if new_bin or not self.starts:
            self.starts.append(start)
            for bins, layer in zip(self._bins, mass, strict=True):
                bins.append(layer.new_zeros(layer.shape[0], self.tokens))
        for bins, layer in zip(self._bins, mass, strict=True):
            bins[-1][:, : layer.shape[1]] += layer

    def layer(self, index: int) -> Tensor:
        """float32 `[bins, Hkv, T]` on the CPU."""
        return torch.stack(self._bins[index])


class Oracle:
    """A scorer that knows the attention to come: what a key will get from all later queries of the
    text. No cache can rank by it; it says how much there is to win."""

    needs_statistics = False
    __name__ = "oracle"

    def __init__(self, mass: AttentionMass, sites: Sequence[AttentionSite]) -> None:
        """mass: of `sites`, in bins that are shorter than an interval."""
        self._starts = torch.tensor([*mass.starts, mass.tokens])
        self._future = {}
        for index, site in enumerate(sites):
            future = to_come(mass.layer(index))
            self._future[site.layer_idx] = torch.cat((future, torch.zeros_like(future[:1])))

    def __call__(self, tokens: LiveTokens) -> Tensor:
        """Of one row, without pads."""
        bins = torch.searchsorted(self._starts, tokens.next_position.cpu())
        future = self._future[tokens.layer_idx][bins[0]].to(tokens.keys.device)
        return future.gather(1, tokens.positions[0].long())[None]


@dataclass(frozen=True)
class MassKept:
    """Shares of the attention mass of one layer since the first compaction."""

    kept: float
    oracle: float


def to_come(mass: Tensor) -> Tensor:
    """The mass `[bins, ...]` from each bin to the end."""
    return mass.flip(0).cumsum(0).flip(0)


def mass_by_key(weights: Tensor, site: AttentionSite) -> Tensor:
    """float32 `[Hkv, K]` on the CPU of the probabilities `[1, H, q, K]` at `site`."""
    return weights[0].float().sum(dim=1).unflatten(0, (-1, site.groups)).sum(dim=1).cpu()


def mass_kept(
    mass: Tensor, starts: Sequence[int], trace: Sequence[TracedCompaction], layer: int, cache: Any
) -> MassKept:
    """What `cache`, and an oracle at the same lengths, kept of `mass` `[bins, Hkv, T]`.

    At each compaction the oracle keeps, of what it still has, the keys that get the greatest mass
    from then to the end; sinks and recent tokens are protected as the cache's own.
    """
    kept = oracle = total = 0.0
    future = to_come(mass.double())
    chosen = torch.ones_like(mass[0], dtype=torch.bool)
    stops = [event.seen_tokens for event in trace[1:]] + [mass.shape[-1]]
    for event, stop in zip(trace, stops, strict=True):
        seen, survivors = event.seen_tokens, event.positions[layer][0].long()  # [Hkv, kept]
        lives = torch.zeros_like(chosen).scatter_(1, survivors, True)
        score = future[starts.index(seen)].masked_fill(~chosen, -torch.inf)
        score[:, : cache.settings.sinks] = torch.inf
        score[:, max(0, seen - cache.settings.recent) : seen] = torch.inf
        score[:, seen:] = -torch.inf
        best = score.topk(survivors.shape[1], dim=1).indices
        chosen = torch.zeros_like(chosen).scatter_(1, best, True)
        lives[:, seen:] = chosen[:, seen:] = True
        for start, got in zip(starts, mass.double(), strict=True):
            if seen <= start < stop:
                kept += got[lives].sum().item()
                oracle += got[chosen].sum().item()
                total += got.sum().item()
    return MassKept(kept / total, oracle / total)
