"""Scorers: keys + statistics -> a score per live token; the higher, the longer it stays.

`sampled`, the default, pays out the attention of queries that stand for those to come. `centroid`
is TriAttention's (arXiv 2604.04921), with the mean over the offsets of the coming queries taken in
closed form. With `w_f = q_f exp(i w_f t) D_f`, `D_f = mean over offsets d of exp(i w_f d)`, `q` the
mean pre-RoPE query, `a` the mean magnitude, `k` a cached (rotated) key and `t` the next position:

    S = Re sum_f w_f conj(k_f)  +  sum_f (a_f - |q_f|) |k_f|

both times the model's attention scaling, plus `q . k` of the dimensions that are not rotated: one
dot product with an expected coming query, and one weighted sum of band magnitudes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kvpage import kernels
from kvpage.kernels import Moments
from kvpage.positions import PAD
from kvpage.rope import Rope
from kvpage.summaries import SAMPLE_TOKENS, Sample, Statistics

AHEAD = 64
"""How far ahead of the next token they are taken to come: half the usual interval."""

OFFSETS = tuple(2**i for i in range(13))
"""Distances of the coming queries, in tokens: 1, 2, 4, ... 4096."""


@dataclass(frozen=True)
class LiveTokens:
    """The live tokens of one layer, `[B, Hkv, L]` in token order, as a scorer sees them.

    The tensors may be the cache's own: read only.
    """

    layer_idx: int
    """Place among the model's layers of attention."""
    keys: Tensor
    """`[B, Hkv, L, D]`, as cached: rotated."""
    values: Tensor
    """`[B, Hkv, L, Dv]`."""
    positions: Tensor
    """int32 `[B, Hkv, L]`: token positions, -1 for pads."""
    candidates: Tensor
    """bool `[B, Hkv, L]`: which may be evicted; their scores alone count."""
    next_position: Tensor
    """int64 `[B]`: the position of each row's next token."""
    statistics: Statistics | None
    """`None` where the scorer's `needs_statistics` is False."""
    padded: bool = False
    """Whether any row ever had pads."""

    @property
    def visible(self) -> Tensor | None:
        """bool `[B, Hkv, L]`, False for pads; `None`: there are none."""
        return self.positions != PAD if self.padded else None


@runtime_checkable
class Scorer(Protocol):
    """Scores the live tokens of one layer.

    Returns `[B, Hkv, L]`, or `[B, H, L]`: one score per query head, which are then standardised
    over the candidates and merged by their maximum within each KV head.
    """

    needs_statistics: bool
    """Whether it uses `tokens.statistics`. A scorer may have `sample_tokens` and `recent_tokens`
    too: how many of the run's queries it wants in `statistics.sample` and `.recent`."""

    def __call__(self, tokens: LiveTokens) -> Tensor: ...


@runtime_checkable
class GroupScorer(Scorer, Protocol):
    """A scorer that takes several layers in one go; those are alike in shape, device and RoPE."""

    def together(self, layers: Sequence[LiveTokens]) -> tuple[Tensor, Moments | None]:
        """Scores `[layers * B, Hkv or H, L]`, and those of query heads with their moments."""
        ...


def score_layers(scorer: Scorer, layers: Sequence[LiveTokens]) -> tuple[Tensor, Moments | None]:
    """The scores `[layers * B, Hkv or H, L]` of layers that are alike."""
    if isinstance(scorer, GroupScorer):
        return scorer.together(layers)
    return torch.cat([scorer(tokens) for tokens in layers]), None


def rotation(rope: Rope, positions: Tensor, offsets: tuple[int, ...] = OFFSETS) -> Tensor:
    """`mean over offsets of exp(i w_f (t + offset))`, complex128 `[B, F]`, for `t` `[B]` int64.

    On the device of `positions` (which must have float64).
    """
    inv_freq, mean = rope.mean_rotation(offsets, positions.device)
    phase = positions.double()[:, None] * inv_freq
    return torch.polar(torch.ones_like(phase), phase) * mean


def expected_query(
    mean: Tensor, rope: Rope, positions: Tensor, offsets: tuple[int, ...] = OFFSETS
) -> Tensor:
    """The centroid `mean` `[B, ..., D]`, rotated to the coming positions and averaged over them.

    Scaled as the model scales what it rotates.
    """
    if positions.device.type == "mps":  # no float64 there
        positions = positions.cpu()
    factor = rotation(rope, positions, offsets) * rope.attention_scaling
    factor = factor.view(factor.shape[0], *[1] * (mean.ndim - 2), -1)
    return rope.turned(mean, factor.real.to(mean), factor.imag.to(mean))


class Centroid:
    """Where the coming queries will look, from the centroid of the queries so far."""

    needs_statistics = True

    def __call__(self, tokens: LiveTokens) -> Tensor:
        return self.together([tokens])[0]

    def together(self, layers: Sequence[LiveTokens]) -> tuple[Tensor, Moments | None]:
        known = [tokens.statistics for tokens in layers if tokens.statistics is not None]
        rope = known[0].rope
        mean = torch.cat([statistics.query_mean for statistics in known])
        magnitude = torch.cat([statistics.query_magnitude for statistics in known])
        position = layers[0].next_position.repeat(len(layers))
        direction = expected_query(mean, rope, position).tensor_split(len(layers))
        spread = (magnitude - rope.magnitude(mean)).clamp_min(0) * rope.attention_scaling
        scored = [
            kernels.score_tokens(tokens.keys, u, w, rope.interleaved, tokens.candidates)
            for tokens, u, w in zip(
                layers, direction, spread.tensor_split(len(layers)), strict=True
            )
        ]
        moments = [part for _, part in scored if part is not None]
        return torch.cat([scores for scores, _ in scored]), Moments(
            *(torch.cat(parts) for parts in zip(*moments, strict=True))
        )


class Sampled:
    """How much attention the coming queries will pay to each key, estimated with queries of the
    run.

    `S_k = |v_k| age_k^-1/2 mean over query heads h and sampled queries j of
    softmax_k(scale q_jh . k)`, the queries rotated to half an interval ahead: what a token adds to
    the output, if queries like those so far come again, and it is needed the less the older it is.
    The sample covers the whole run evenly: over text, queries from all of it tell better than the
    latest what will be looked at later. The exponent was fitted on WikiText-2.
    """

    needs_statistics = True
    sample_tokens = SAMPLE_TOKENS

    def __call__(self, tokens: LiveTokens) -> Tensor:
        statistics = tokens.statistics
        assert statistics is not None and statistics.sample is not None
        queries, weights = drawn(statistics, statistics.sample)
        ahead = rotated(queries, statistics.rope, tokens.next_position + AHEAD)
        mass = kernels.attention_mass(tokens.keys, ahead, statistics.scale, tokens.visible, weights)
        mass = mass.view(*tokens.keys.shape[:2], -1, mass.shape[-1]).mean(dim=2)
        age = (tokens.next_position[:, None, None] - tokens.positions).clamp_min(1)
        return mass * kernels.norms(tokens.values) * age.rsqrt()


def drawn(statistics: Statistics, sample: Sample) -> tuple[Tensor, Tensor]:
    """Sampled queries `[B, S, H, D]`, of the run and calibrated, and their weights `[B, S]`."""
    queries, weights = sample.queries, sample.held.float()
    if statistics.prior_sample is None:
        return queries, weights
    known, share = statistics.prior_sample
    batch, count = queries.shape[0], known.shape[0]
    weights = weights / weights.sum(dim=1, keepdim=True).clamp_min(1) * (1 - share[:, None])
    weights = torch.cat((weights, (share / count)[:, None].expand(batch, count)), dim=1)
    return torch.cat((queries.float(), known.expand(batch, -1, -1, -1)), dim=1), weights


def rotated(queries: Tensor, rope: Rope, positions: Tensor) -> Tensor:
    """`queries` `[B, S, H, D]` as the model would rotate them at `positions` `[B]` or `[B, S]`.

    In float32, angles in float64; scaled as the model scales what it rotates.
    """
    if positions.ndim == 1:
        positions = positions[:, None]
    source = positions.cpu() if positions.device.type == "mps" else positions  # no float64 there
    inv_freq, _ = rope.mean_rotation(OFFSETS, source.device)
    angle = source.double()[:, :, None, None] * inv_freq  # [B, S or 1, 1, F]
    cos = (angle.cos() * rope.attention_scaling).to(queries.device, torch.float32)
    sin = (angle.sin() * rope.attention_scaling).to(queries.device, torch.float32)
    return rope.turned(queries.float(), cos, sin)
