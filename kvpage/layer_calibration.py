"""Sums of one layer's queries and keys before RoPE, and how those of a run differ from them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvpage.architectures import AttentionSite
from kvpage.rope import Rope
from kvpage.summaries import SAMPLE_TOKENS, Statistics

FINGERPRINT_VALUES = 64
"""Values of each parameter of attention that go into a model's fingerprint."""


@dataclass(frozen=True)
class LayerCalibration:
    """Sums over tokens of one layer's queries and keys before RoPE: float64, on the CPU.

    query_total: `[H, D]`; query_magnitude_total: `[H, F]`, of the magnitudes of the bands;
    key_total: `[Hkv, D]`; key_magnitude_total: `[Hkv, F]`, both `None` where only queries are
    known; count: scalar, tokens summed; heads: bool `[H]`, those that have statistics.
    """

    query_total: Tensor
    query_magnitude_total: Tensor
    key_total: Tensor | None
    key_magnitude_total: Tensor | None
    count: Tensor
    heads: Tensor
    kv_heads: int
    rope: Rope
    fixed_rope: bool = True
    """Whether the frequencies are the same for every length."""
    sample: Tensor | None = None
    """float32 `[S, H, D]`: queries drawn from all tokens alike; `None` where only means are."""
    priority: Tensor | None = None
    """int64 `[S]`, ascending: of all tokens, the sample is of those with the lowest."""

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are there, by name."""
        named = {
            "query_total": self.query_total,
            "query_magnitude_total": self.query_magnitude_total,
            "key_total": self.key_total,
            "key_magnitude_total": self.key_magnitude_total,
            "count": self.count,
            "heads": self.heads,
            "sample": self.sample,
            "priority": self.priority,
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def sums(self) -> dict[str, Tensor]:
        """Those that add up over tokens."""
        kept = ("heads", "sample", "priority")
        return {name: tensor for name, tensor in self.tensors().items() if name not in kept}

    def having(self, tensors: Mapping[str, Tensor]) -> LayerCalibration:
        """With these tensors, by name, instead of its own."""
        changes: dict[str, Any] = dict(tensors)
        return replace(self, **changes)

    def plus(self, more: Mapping[str, Tensor]) -> LayerCalibration:
        """With the sums `more` added, by name, and the sample drawn from both."""
        sums = {name: total + more[name] for name, total in self.sums().items()}
        return self.having(sums | self.drawn([self.tensors(), more]))

    def drawn(self, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """One sample of the tokens of all `parts`, which have samples each."""
        if self.sample is None:
            return {}
        priority = torch.cat([part["priority"] for part in parts])
        priority, places = priority.topk(min(SAMPLE_TOKENS, len(priority)), largest=False)
        return {
            "sample": torch.cat([part["sample"] for part in parts])[places],
            "priority": priority,
        }

    def traits(self) -> dict[str, Any]:
        """What has to be as in a model, but the frequencies."""
        return {
            "heads": self.query_total.shape[0],
            "kv_heads": self.kv_heads,
            "head_dim": self.query_total.shape[1],
            "rotated dimensions": 2 * self.rope.bands,
            "pairing": "interleaved" if self.rope.interleaved else "half",
            "attention_scaling": float(f"{self.rope.attention_scaling:.6g}"),
        }


def blank_layer(site: AttentionSite, config: Any) -> LayerCalibration:
    """The sums over no token of the layer at `site`."""
    assert site.rope is not None
    rope, heads = site.rope(), config.num_attention_heads
    names, attention = ("head_dim", "head_size"), site.attention
    dims = [dim for name in names if (dim := getattr(attention, name, None)) is not None]
    dim = dims[0] if dims else config.hidden_size // heads
    kv_heads = heads // site.groups
    zeros = partial(torch.zeros, dtype=torch.float64)
    return LayerCalibration(
        query_total=zeros(heads, dim),
        query_magnitude_total=zeros(heads, rope.bands),
        key_total=zeros(kv_heads, dim),
        key_magnitude_total=zeros(kv_heads, rope.bands),
        count=zeros(()),
        heads=torch.ones(heads, dtype=torch.bool),
        kv_heads=kv_heads,
        rope=rope,
        fixed_rope=site.rope.fixed,
        sample=torch.zeros(0, heads, dim),
        priority=torch.zeros(0, dtype=torch.int64),
    )


def fingerprint_of(sites: list[AttentionSite]) -> str:
    """A hash of some values of every parameter of attention, the same in any dtype they fit."""
    digest = hashlib.sha256()
    for site in sites:
        for name, parameter in site.attention.named_parameters():
            if parameter.is_meta or not parameter.is_floating_point():
                continue
            values = parameter.detach().flatten()
            values = values[:: max(1, values.numel() // FINGERPRINT_VALUES)]
            digest.update(f"{site.layer_idx} {name} {list(parameter.shape)}".encode())
            digest.update(str(values.to("cpu", torch.bfloat16).tolist()).encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class Drift:
    """How live queries of a layer differ from calibrated ones, per head; NaN where there are none.

    magnitude_ratio: `[H]`, mean magnitude of the live queries over that of the calibrated ones;
    cosine: `[H]`, of the angle between the two centroids.
    """

    magnitude_ratio: Tensor
    cosine: Tensor

    def warning(self) -> str | None:
        """What to tell a user, if the magnitudes of half the heads differ by more than twice."""
        ratio = float(self.magnitude_ratio.nanmedian())
        if math.isnan(ratio) or 0.5 <= ratio <= 2:
            return None
        return (
            f"statistics: the model's queries are {ratio:.3g} times as large as the calibrated "
            "ones: was the file made without q-norm, or for another model?"
        )


def drift(calibrated: LayerCalibration, live: Statistics) -> Drift:
    """Compare a layer's calibrated queries with those of a run, all its rows together.

    Magnitudes are those of the bands; of the centroids where a layer has no RoPE.
    """
    weights = (live.count / live.count.sum().clamp_min(1)).double().cpu()[:, None, None]
    mean = (live.query_mean.double().cpu() * weights).sum(dim=0)
    magnitude = (live.query_magnitude.double().cpu() * weights).sum(dim=0)
    then, then_magnitude = calibrated.query_total, calibrated.query_magnitude_total
    if calibrated.rope.bands == 0:
        magnitude, then_magnitude = mean.norm(dim=-1)[:, None], then.norm(dim=-1)[:, None]
    ratio = magnitude.sum(dim=-1) / then_magnitude.sum(dim=-1) * calibrated.count
    cosine = torch.nn.functional.cosine_similarity(mean, then, dim=-1)
    known = calibrated.heads & (calibrated.count > 0)
    return Drift(ratio.masked_fill(~known, torch.nan), cosine.masked_fill(~known, torch.nan))
