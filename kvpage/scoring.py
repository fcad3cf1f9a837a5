"""Scorers: keys + statistics -> a score per live token; the higher, the longer it stays.

The default, `centroid`, is TriAttention's (arXiv 2604.04921), with the mean over the offsets of
the coming queries taken in closed form. With `w_f = q_f exp(i w_f t) D_f`,
`D_f = mean over offsets d of exp(i w_f d)`, `q` the mean pre-RoPE query, `a` the mean magnitude,
`k` a cached (rotated) key and `t` the next position:

    S = Re sum_f w_f conj(k_f)  +  sum_f (a_f - |q_f|) |k_f|

both times the model's attention scaling, plus `q . k` of the dimensions that are not rotated: one
dot product with an expected coming query, and one weighted sum of band magnitudes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kvpage import kernels
from kvpage.centroids import Statistics
from kvpage.kernels import Moments
from kvpage.rope import Rope

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


@runtime_checkable
class Scorer(Protocol):
    """Scores the live tokens of one layer.

    Returns `[B, Hkv, L]`, or `[B, H, L]`: one score per query head, which are then standardised
    over the candidates and merged by their maximum within each KV head.
    """

    needs_statistics: bool

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
    """The centroid `mean` `[B, H, D]`, rotated to the coming positions and averaged over them.

    Scaled as the model scales what it rotates.
    """
    if positions.device.type == "mps":  # no float64 there
        positions = positions.cpu()
    factor = rotation(rope, positions, offsets)[:, None] * rope.attention_scaling
    cos, sin = factor.real.to(mean), factor.imag.to(mean)  # [B, 1, F]
    re, im, rest = rope.parts(mean)
    return rope.joined(re * cos - im * sin, re * sin + im * cos, rest)


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


class Streaming:
    """Sinks and the latest tokens only: every candidate scores by its age (StreamingLLM)."""

    needs_statistics = False

    def __call__(self, tokens: LiveTokens) -> Tensor:
        batch, kv_heads, live, _ = tokens.keys.shape
        age = torch.arange(live, dtype=torch.float32, device=tokens.keys.device)
        return age.expand(batch, kv_heads, live)


class KeyNorm:
    """Keys of small norm stay: they tend to draw much attention (arXiv 2406.11430)."""

    needs_statistics = False

    def __call__(self, tokens: LiveTokens) -> Tensor:
        return -kernels.key_norms(tokens.keys)


class Random:
    """Pseudo-random scores: a hash of next position, head and slot, so no state and no seed."""

    needs_statistics = False

    def __call__(self, tokens: LiveTokens) -> Tensor:
        _, kv_heads, live, _ = tokens.keys.shape
        device = tokens.keys.device
        head = torch.arange(kv_heads, device=device)[None, :, None]
        slot = torch.arange(live, device=device)
        x = (tokens.next_position[:, None, None] * 1_000_003 + head) * 1_000_033 + slot
        for _ in range(3):  # xorshift-multiply mixing, kept to 31 bits
            x = ((x ^ (x >> 16)) * 0x45D9F3B) & 0x7FFFFFFF
        return x.double().div(2**31).float()


class Custom:
    """A user's function of `LiveTokens`, with its result checked."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function
        self.needs_statistics = bool(getattr(function, "needs_statistics", True))

    def __call__(self, tokens: LiveTokens) -> Tensor:
        scores, statistics = self.function(tokens), tokens.statistics
        batch, kv_heads, live, _ = tokens.keys.shape
        if not isinstance(scores, Tensor) or not scores.is_floating_point():
            raise TypeError(f"scorer: a float tensor expected, got {_describe(scores)}")
        heads = kv_heads if statistics is None else statistics.query_mean.shape[1]
        if scores.shape not in ((batch, kv_heads, live), (batch, heads, live)):
            raise ValueError(
                f"scorer: scores [{batch}, {kv_heads} or {heads}, {live}] expected, got "
                f"{list(scores.shape)}"
            )
        if bool(scores.isnan().any()):
            raise ValueError("scorer: scores without NaN expected, got NaN")
        return scores.float()


def _describe(value: object) -> str:
    return f"{value.dtype}" if isinstance(value, Tensor) else type(value).__name__


SCORERS: dict[str, type[Centroid | Streaming | KeyNorm | Random]] = {
    "centroid": Centroid,
    "streaming": Streaming,
    "knorm": KeyNorm,
    "random": Random,
}


def resolve_scorer(scorer: str | Callable[..., Tensor]) -> Scorer:
    """The scorer of that name, or the user's own callable, checked on use."""
    if isinstance(scorer, str):
        if scorer not in SCORERS:
            raise ValueError(
                f"scorer: one of {', '.join(map(repr, SCORERS))} or a callable expected, "
                f"got {scorer!r}"
            )
        return SCORERS[scorer]()
    if not callable(scorer) or isinstance(scorer, type):
        raise TypeError(f"scorer: a name or a callable expected, got {scorer!r}")
    return Custom(scorer)
