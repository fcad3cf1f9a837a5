"""Where each architecture keeps its pre-RoPE query and key, and its RoPE.

One table, `QUERY_KEY_MODULES`: adding an architecture of the common pattern is one line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

QUERY_KEY_MODULES: dict[str, tuple[str, str]] = {
    "llama": ("q_proj", "k_proj"),
    "mistral": ("q_proj", "k_proj"),
    "qwen2": ("q_proj", "k_proj"),
    "qwen3": ("q_norm", "k_norm"),
}
"""`config.model_type` -> the submodules of an attention module whose outputs are the query and the
key before RoPE, heads split or flat, head_dim last."""

FIXED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""RoPE types whose frequencies do not change with the length."""

SUPPORTED = (
    f"supported are the dense decoders {', '.join(QUERY_KEY_MODULES)} with full attention in every "
    f"layer and RoPE of type {', '.join(FIXED_ROPE_TYPES)}"
)


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding in the half layout: dimension `f` is paired with `f + F`.

    inv_freq: float64 `[F]` on the CPU, radians per token, the model's own.
    """

    inv_freq: Tensor
    attention_scaling: float

    @property
    def bands(self) -> int:
        return self.inv_freq.shape[0]

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin `[..., 2 F]` in float64 at `positions` `[...]`, as the model should pass."""
        angle = positions.cpu().double()[..., None] * self.inv_freq
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos() * self.attention_scaling, angle.sin() * self.attention_scaling

    def check(self, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
        """Raise `ValueError` unless `cos`, `sin` `[B, q, 2 F]` of the model equal ours."""
        expected = self.cos_sin(positions)
        for name, theirs, ours in (("cos", cos, expected[0]), ("sin", sin, expected[1])):
            if theirs.shape[-1] != ours.shape[-1]:
                raise ValueError(
                    f"rotary embedding: {ours.shape[-1]} rotated dimensions expected, the model "
                    f"passes {name} with {theirs.shape[-1]}"
                )
            # float32 angles are off by about 1e-7 of themselves; then the dtype's own rounding.
            tolerance = 2e-3 + 2e-7 * positions.max().item() + 2 * torch.finfo(theirs.dtype).eps
            error = (theirs.cpu().double() - ours).abs().max().item()
            if not error <= tolerance:
                raise ValueError(
                    f"rotary embedding: the model's {name} differs from ours by {error:.3g} "
                    f"(at most {tolerance:.3g} expected); this model can't be ranked rightly"
                )


@dataclass(frozen=True)
class AttentionSite:
    """One attention module and the submodules that yield its query and key before RoPE."""

    layer_idx: int
    attention: nn.Module
    query: nn.Module
    key: nn.Module


@dataclass(frozen=True)
class Decoder:
    """What kvpage needs to know of a model."""

    module: nn.Module
    sites: tuple[AttentionSite, ...]
    rope: Rope

    @property
    def num_layers(self) -> int:
        return len(self.sites)


def decoder_of(model: nn.Module) -> Any:
    """The module that owns the decoder layers: what receives the 2-D attention mask."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model: a transformers PreTrainedModel expected, got {type(model).__name__}"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"model: a decoder-only model expected, got the encoder-decoder "
            f"{type(model).__name__}; {SUPPORTED}"
        )
    return model.get_decoder()


def describe(model: nn.Module) -> Decoder:
    """Find the attention modules and the RoPE of `model`; `ValueError` names what is unsupported.

    The frequencies are the model's own `inv_freq`, read now.
    """
    decoder = decoder_of(model)
    config = decoder.config
    if config.model_type not in QUERY_KEY_MODULES:
        raise ValueError(f"model: architecture {config.model_type!r} is not supported; {SUPPORTED}")
    _check_full_attention(config)
    query, key = QUERY_KEY_MODULES[config.model_type]
    sites = tuple(
        AttentionSite(layer.layer_idx, layer, getattr(layer, query), getattr(layer, key))
        for layer in (block.self_attn for block in decoder.layers)
    )
    return Decoder(decoder, sites, _rope_of(decoder))


def _check_full_attention(config: Any) -> None:
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None) if not kinds else None
    if kinds - {"full_attention"} or window is not None:
        got = f"layer_types {sorted(kinds)}" if kinds else f"sliding_window {window}"
        raise ValueError(f"model: full attention in every layer expected, got {got}; {SUPPORTED}")


def _rope_of(decoder: Any) -> Rope:
    kind = (getattr(decoder.config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind not in FIXED_ROPE_TYPES:
        raise ValueError(f"model: RoPE of type {kind!r} is not supported; {SUPPORTED}")
    embedding = decoder.rotary_emb
    return Rope(embedding.inv_freq.detach().cpu().double(), float(embedding.attention_scaling))
