"""Values that sum up queries and keys before RoPE: moments, a sample of the queries, and priors.

A centroid is the mean of a head's pre-RoPE vectors; with the mean magnitude of each band it gives
the mean resultant length `R_f = |E[q_f]| / E|q_f|`, one when the head always looks the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvpage.rope import Rope

SCRATCH_ELEMENTS = {"cpu": 1 << 15}
"""Elements that are summed at a time, so that folding needs little beside the vectors; elsewhere
2**25 (128 MiB), as each time is a dozen launches."""


def tokens_at_a_time(vectors: Tensor) -> int:
    """Of `vectors` `[B, n, ...]`, how many tokens to sum at a time."""
    elements = SCRATCH_ELEMENTS.get(vectors.device.type, 1 << 25)
    return max(1, elements // vectors[:, :1].numel())


@dataclass(frozen=True)
class RunningMoments:
    """Sums of pre-RoPE vectors and of their band magnitudes, per row and head.

    total: `[B, H, D]`; magnitude_total: `[B, H, F]`; float64 (float32 where the device has none);
    pads are not counted. A value: what adds to it makes a new one, so copies of a cache share it.
    """

    total: Tensor
    magnitude_total: Tensor

    @staticmethod
    def of(vectors: Tensor, real: Tensor | None, rope: Rope) -> RunningMoments:
        """Of `vectors` `[B, n, ..., H, D]`: sums `[B, ..., H, D]`; `real` `[B, n]` bool is False
        for pads."""
        dtype = torch.float32 if vectors.device.type == "mps" else torch.float64
        sums, chunk = [], tokens_at_a_time(vectors)
        for start in range(0, vectors.shape[1], chunk):
            part = vectors[:, start : start + chunk].float()
            if real is not None:
                flags = real[:, start : start + chunk]
                part = torch.where(flags[(..., *[None] * (part.ndim - 2))], part, 0.0)
            magnitude = rope.magnitude(part).sum(dim=1, dtype=dtype)
            sums.append(RunningMoments(part.sum(dim=1, dtype=dtype), magnitude))
        return functools.reduce(RunningMoments.plus, sums)

    def plus(self, other: RunningMoments) -> RunningMoments:
        return RunningMoments(
            self.total + other.total, self.magnitude_total + other.magnitude_total
        )


class Sums(NamedTuple):
    """What a layer has summed up: of its queries, its keys, and how many there were.

    totals: `[B, H, D]` or `[B, Hkv, D]`; magnitudes: `[B, H, F]` or `[B, Hkv, F]`; tokens: their
    number, int64 `[B]`. A value, as its parts are.
    """

    query_total: Tensor
    query_magnitude: Tensor
    key_total: Tensor
    key_magnitude: Tensor
    tokens: Tensor

    @staticmethod
    def stacked(layers: Sequence[Sums]) -> Sums:
        """Of several layers, `[layers, B, ...]`."""
        return Sums(*(torch.stack(parts) for parts in zip(*layers, strict=True)))

    def select(self, rows: int | Tensor) -> Sums:
        """Of the rows `rows`, or of one layer of several."""
        return Sums(*(part[rows] for part in self))

    def plus(self, other: Sums) -> Sums:
        return Sums(*(mine + more for mine, more in zip(self, other, strict=True)))

    def means(self) -> tuple[Tensor, ...]:
        """float32, of query, query magnitude, key, key magnitude."""
        count = self.tokens.clamp_min(1)[..., None, None]
        return tuple((part / count).float() for part in self[:4])

    def blended(self, prior: Prior) -> tuple[Tensor, ...]:
        """As `means`, of one layer, with what was known before."""
        query = prior.weight, prior.own
        key = prior.key_weight, prior.key_own
        wanted = (
            (self.query_total, prior.query_mean, query),
            (self.query_magnitude, prior.query_magnitude, query),
            (self.key_total, prior.key_mean, key),
            (self.key_magnitude, prior.key_magnitude, key),
        )
        blend = Prior.blended
        return tuple(
            blend(total, self.tokens, mean, *weights).float() for total, mean, weights in wanted
        )


class Recent(NamedTuple):
    """The latest queries of a run, pre-RoPE `[B, n, H, D]` in the model's dtype, in order; real:
    bool `[B, n]`, False for pads, or `None`."""

    queries: Tensor
    real: Tensor | None

    def last(self, count: int) -> Recent:
        """The last `count` of them, or all."""
        start = max(0, self.queries.shape[1] - count)
        return Recent(self.queries[:, start:], None if self.real is None else self.real[:, start:])

    def plus(self, later: Recent) -> Recent:
        """With `later` ones behind them."""
        real = None
        if self.real is not None or later.real is not None:
            parts = [
                each.queries.new_ones(each.queries.shape[:2], dtype=torch.bool)
                if each.real is None
                else each.real
                for each in (self, later)
            ]
            real = torch.cat(parts, dim=1)
        return Recent(torch.cat((self.queries, later.queries), dim=1), real)

    def select(self, rows: Tensor) -> Recent:
        """Of the rows `rows`."""
        return Recent(self.queries[rows], None if self.real is None else self.real[rows])


@dataclass(frozen=True)
class Statistics:
    """What a scorer knows of a layer, besides the keys. Means are float32.

    query_mean: `[B, H, D]`; query_magnitude: `[B, H, F]` mean of the band magnitudes;
    key_mean: `[B, Hkv, D]`; key_magnitude: `[B, Hkv, F]`; count: `[B]`, tokens behind them.
    """

    query_mean: Tensor
    query_magnitude: Tensor
    key_mean: Tensor
    key_magnitude: Tensor
    count: Tensor
    rope: Rope
    scale: float = 1.0
    """Of the model's attention: its logits are `scale * q . k`."""
    sample: Sample | None = None
    """Of the run's queries, where the scorer's `sample_tokens` asks for one."""
    recent: Recent | None = None
    """The latest queries, where the scorer's `recent_tokens` asks for them."""
    prior_sample: tuple[Tensor, Tensor] | None = None
    """Calibrated queries `[S, H, D]`, and their share `[B]` among all."""

    @property
    def query_concentration(self) -> Tensor:
        """Mean resultant length `R_f` `[B, H, F]` in [0, 1] of each query head and band."""
        mean = self.rope.magnitude(self.query_mean)
        return mean / self.query_magnitude.clamp_min(torch.finfo(torch.float32).tiny)


SAMPLE_TOKENS = 128
"""Queries that stand for all those of a run, or of a data set."""

NOT_SAMPLED = 1 << 32
"""Priority of what is no token of the row."""


class Sample(NamedTuple):
    """A sample of a row's queries that covers all of its text evenly, whatever its length.

    Of all tokens those whose positions, bits reversed, are lowest: every second one of 2 S tokens,
    every fourth of 4 S. So it depends on the row's own tokens alone, and not on how they came.

    queries: pre-RoPE, `[B, S, H, D]`, in the model's dtype; priority: int64 `[B, S]`, ascending;
    `NOT_SAMPLED` for places that hold none.
    """

    queries: Tensor
    priority: Tensor

    @property
    def held(self) -> Tensor:
        """bool `[B, S]`: which places hold a query."""
        return self.priority < NOT_SAMPLED

    @property
    def positions(self) -> Tensor:
        """int64 `[B, S]`: the tokens' positions in the row, pads not counted, where `held`."""
        return _bits_reversed(self.priority)

    def select(self, rows: Tensor) -> Sample:
        return Sample(self.queries[rows], self.priority[rows])

    @staticmethod
    def priorities(start: Tensor, tokens: int, real: Tensor | None) -> Tensor:
        """int64 `[B, tokens]` of tokens that come behind `start` `[B]` others; `real`: no pads."""
        if real is None:
            position = start[:, None] + torch.arange(tokens, device=start.device)
        else:
            position = start[:, None] + real.cumsum(dim=1) - 1
        position = _bits_reversed(position)
        return position if real is None else position.masked_fill(~real, NOT_SAMPLED)


def _bits_reversed(numbers: Tensor) -> Tensor:
    """int64 `numbers` below 2**32 with the order of their 32 bits turned round."""
    for shift, mask in enumerate((0x55555555, 0x33333333, 0x0F0F0F0F, 0x00FF00FF, 0xFFFF)):
        bits = 1 << shift
        numbers = ((numbers >> bits) & mask) | ((numbers & mask) << bits)
    return numbers


@dataclass(frozen=True)
class Prior:
    """What is known of a layer's queries and keys before a run: float64 on the layer's device.

    query_mean: `[H, D]`; query_magnitude: `[H, F]`; key_mean: `[Hkv, D]`; key_magnitude:
    `[Hkv, F]`; weight: `[H]` and key_weight: `[Hkv]`, how many tokens of a run they count as, zero
    for heads of which nothing is known; own: `[H]` and key_own: `[Hkv]`, one where the run's own
    count too, and zero where not; sample: `[S, H, D]` queries, if there are.
    """

    query_mean: Tensor
    query_magnitude: Tensor
    key_mean: Tensor
    key_magnitude: Tensor
    weight: Tensor
    key_weight: Tensor
    own: Tensor
    key_own: Tensor
    sample: Tensor | None = None

    def sample_for(self, count: Tensor) -> tuple[Tensor, Tensor] | None:
        """The sample and its share `[B]` beside that of `count` `[B]` tokens of a run."""
        if self.sample is None:
            return None
        weight, own = self.weight.amax(), self.own.amin()
        return self.sample, (weight / (count * own + weight)).float()

    @staticmethod
    def blended(total: Tensor, count: Tensor, mean: Tensor, weight: Tensor, own: Tensor) -> Tensor:
        """The mean of `total` `[..., B, H, X]` over `count` `[..., B]` tokens and of `mean`
        `[H, X]`."""
        many = count[..., None] * own + weight
        return (total * own[:, None] + mean * weight[:, None]) / many.clamp_min(1)[..., None]
