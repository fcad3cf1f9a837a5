"""Scorers after what others rank by at decode time, to be compared with; the names are the papers'.

None needs the attention that the model computed: `Window` and `Redundancy` work out that of the
latest queries anew, which the hooks have captured.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d, normalize

from kvpage import kernels
from kvpage.scoring import LiveTokens, expected_query, rotated
from kvpage.summaries import SAMPLE_TOKENS

CHUNK_ELEMENTS = 1 << 17
"""Elements of a matrix that is worked out part by part."""


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
        return -kernels.norms(tokens.keys)


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


class KeyDifference:
    """Keys unlike the others stay (KeyDiff, arXiv 2504.15364): minus the cosine between a key and
    the mean of all normalised keys."""

    needs_statistics = False

    def __call__(self, tokens: LiveTokens) -> Tensor:
        keys = normalize(_without_pads(tokens.keys.float(), tokens.visible), dim=-1)
        anchor = normalize(keys.sum(dim=2, keepdim=True), dim=-1)
        return -(keys * anchor).sum(dim=-1)


class ExpectedAttention:
    """The attention that Gaussian queries would pay on average, times the norm of the value
    (Expected Attention, arXiv 2510.00636).

    `S = |v| softmax(scale k . m + scale^2 k' C k / 2)` per query head, averaged over those of a KV
    head; mean `m` and covariance `C` are of queries from the whole run, rotated on average over
    the next 512 positions.
    """

    needs_statistics = True
    sample_tokens = SAMPLE_TOKENS
    offsets = tuple(range(1, 513))

    def __call__(self, tokens: LiveTokens) -> Tensor:
        statistics = tokens.statistics
        assert statistics is not None and statistics.sample is not None
        queries, held = statistics.sample.queries.float(), statistics.sample.held
        apart = queries - statistics.query_mean[:, None]
        apart = torch.where(held[:, :, None, None], apart, 0.0)
        count = held.sum(dim=1).clamp_min(1)[:, None, None, None]
        covariance = torch.einsum("bshd,bshe->bhde", apart, apart) / count
        rotation = statistics.rope, tokens.next_position, self.offsets
        mean = expected_query(statistics.query_mean, *rotation)
        for _ in range(2):  # rows, then columns
            covariance = expected_query(covariance, *rotation).transpose(-1, -2)
        batch, kv_heads, _, dim = tokens.keys.shape
        keys, scale = tokens.keys.float()[:, :, None], statistics.scale
        mean = mean.view(batch, kv_heads, -1, dim, 1)
        covariance = covariance.reshape(batch, kv_heads, -1, dim, dim)
        logits = scale * (keys @ mean)[..., 0]
        logits += scale**2 / 2 * ((keys @ covariance) * keys).sum(dim=-1)
        if tokens.visible is not None:
            logits = logits.masked_fill(~tokens.visible[:, :, None], -torch.inf)
        return logits.softmax(dim=-1).nan_to_num(0).mean(dim=2) * kernels.norms(tokens.values)


class Window:
    """The attention of the latest queries, smoothed over neighbours (SnapKV, arXiv 2404.14469):
    the reference that needs true attention, here worked out for the last 64 queries."""

    needs_statistics = True
    recent_tokens = 64

    def __call__(self, tokens: LiveTokens) -> Tensor:
        attention = recent_attention(tokens)
        return avg_pool1d(attention.flatten(0, 1)[:, None], 5, 1, 2).view_as(attention)


class Redundancy:
    """Attention of the latest queries, less what other keys hold too (R-KV, arXiv 2505.24133).

    `0.1 I - 0.9 R`: `I` the max-pooled attention of the last 8 queries, `R` the softmax over all
    tokens of a key's mean cosine with the others, their rule that spares the latest of similar
    tokens apart.
    """

    needs_statistics = True
    recent_tokens = 8
    importance = 0.1

    def __call__(self, tokens: LiveTokens) -> Tensor:
        attention = recent_attention(tokens)
        live = attention.shape[2]
        attention = max_pool1d(attention.flatten(0, 1)[:, None], 7, 1, 3).view_as(attention)
        keys = normalize(_without_pads(tokens.keys.float(), tokens.visible), dim=-1)
        # The mean of cosines is the cosine with the sum, its own of 1 apart.
        similar = ((keys @ keys.sum(dim=2)[..., None])[..., 0] - 1) / live
        if tokens.visible is not None:
            similar = similar.masked_fill(~tokens.visible, -torch.inf)
        redundant = similar.softmax(dim=-1).nan_to_num(0)
        return self.importance * attention - (1 - self.importance) * redundant


def recent_attention(tokens: LiveTokens) -> Tensor:
    """Mean attention `[B, Hkv, L]` of the latest queries, at their own positions, to every key that
    was there for them."""
    statistics = tokens.statistics
    assert statistics is not None and statistics.recent is not None
    queries, real = statistics.recent
    batch, count, heads, _ = queries.shape
    if real is None:
        real = torch.ones(batch, count, dtype=torch.bool, device=queries.device)
    behind = real.flip(1).cumsum(dim=1).flip(1)
    at = tokens.next_position[:, None] - behind  # [B, n]
    kv_heads, live = tokens.keys.shape[1:3]
    queries = rotated(queries, statistics.rope, at).unflatten(2, (kv_heads, -1))
    attention = torch.zeros(batch, kv_heads, live, device=tokens.keys.device)
    visible = tokens.visible
    some = max(1, CHUNK_ELEMENTS // (batch * heads * live))
    for start in range(0, count, some):
        part = slice(start, start + some)
        logits = torch.einsum("bnhgd,bhld->bhgnl", queries[:, part], tokens.keys.float())
        hidden = tokens.positions[:, :, None] > at[:, None, part, None]
        if visible is not None:
            hidden = hidden | ~visible[:, :, None]
        logits = (logits * statistics.scale).masked_fill(hidden[:, :, None], -torch.inf)
        weights = real[:, None, None, part, None]
        attention += (logits.softmax(dim=-1).nan_to_num(0) * weights).sum(dim=3).mean(dim=2)
    return attention / real.sum(dim=1).clamp_min(1)[:, None, None]


def _without_pads(keys: Tensor, visible: Tensor | None) -> Tensor:
    """`keys` `[B, Hkv, L, D]` with zeros where a pad is."""
    return keys if visible is None else torch.where(visible[..., None], keys, 0.0)
