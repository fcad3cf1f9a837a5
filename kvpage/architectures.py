"""Where each architecture keeps its query and key before RoPE, its RoPE, and its layer kinds.

One table, `ARCHITECTURES`: adding an architecture is a line, or nothing where it follows the common
pattern. What the table says is checked at the first forward: the captured key, rotated as it says,
must be the key that arrives in the cache (`Rope.check`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvpage.compat import INSTEAD, Window, native_layers
from kvpage.rope import Rope, RopeSource

Split = Callable[[Tensor, nn.Module], tuple[Tensor, Tensor]]


def _stacked(output: Tensor, attention: nn.Module) -> tuple[Tensor, Tensor]:
    """Query and key of a fused projection `[B, q, (H + 2 Hkv) D]`: all queries, keys, values."""
    config: Any = attention.config
    dim = attention.head_dim
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    keys = kv_heads * dim
    queries = output.shape[-1] - 2 * keys
    return output[..., :queries], output[..., queries : queries + keys]


def _per_head(output: Tensor, attention: nn.Module) -> tuple[Tensor, Tensor]:
    """Query and key of a fused projection `[B, q, H 3 D]`: query, key and value head by head."""
    heads = output.unflatten(-1, (-1, 3, attention.head_size))
    return heads[..., 0, :], heads[..., 1, :]


@dataclass(frozen=True)
class Architecture:
    """How the attention modules of an architecture yield query and key before RoPE.

    The first of `query` and of `key` that a module has is the submodule whose output is the query
    and the key, head_dim last; with `split` the first of `query` yields both.
    """

    attention: str = "self_attn"
    query: tuple[str, ...] = ("q_norm", "q_layernorm", "q_proj")
    key: tuple[str, ...] = ("k_norm", "k_layernorm", "k_proj")
    split: Split | None = None
    heads_first: bool = False
    """Whether those outputs are `[B, H, q, D]` rather than `[B, q, H, D]` or `[B, q, H D]`."""
    interleaved: bool = False
    rotates: Callable[[Any], bool] = lambda attention: True
    """Whether an attention module uses RoPE at all."""


COMMON = Architecture()
"""The pattern of Llama, Mistral, Qwen, Gemma, OLMo 2, Granite, StarCoder 2 and many others."""

ARCHITECTURES: dict[str, Architecture] = {
    "apertus": Architecture(heads_first=True),
    "cohere": Architecture(interleaved=True),
    "cohere2": Architecture(interleaved=True, rotates=lambda a: a.sliding_window is not None),
    "ernie4_5": Architecture(interleaved=True),
    "exaone4": Architecture(
        heads_first=True, rotates=lambda a: a.sliding_window is None or a.is_sliding
    ),
    "gemma3_text": Architecture(heads_first=True),
    "glm": Architecture(interleaved=True),
    "glm4": Architecture(interleaved=True),
    "gpt_neox": Architecture("attention", query=("query_key_value",), split=_per_head),
    "granitemoehybrid": Architecture(
        rotates=lambda a: a.config.position_embedding_type == "rope",
    ),
    "helium": Architecture(interleaved=True),
    "phi3": Architecture(query=("qkv_proj",), split=_stacked),
    "smollm3": Architecture(rotates=lambda a: bool(a.use_rope)),
}
"""`config.model_type` -> what is not as in `COMMON`."""

MIXES_HEADS = {"diffllama", "doge"}
"""`config.model_type` of those whose attention reads values across KV heads, or builds its own mask
from them: which tokens live may not differ by head there."""

FIXED_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")
"""RoPE types whose frequencies do not change with the length."""


@dataclass(frozen=True)
class AttentionSite:
    """One attention module, what yields its query and key before RoPE, and its RoPE.

    Of a sliding-window layer only the module: what leaves its window needs no ranking.
    """

    layer_idx: int
    attention: nn.Module
    window: int | None = None
    query: nn.Module | None = None
    key: nn.Module | None = None
    split: Split | None = None
    heads_first: bool = False
    rope: RopeSource | None = None
    groups: int = 1
    """Query heads per KV head."""
    scale: float = 1.0
    """Of the attention's logits."""

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """Those that are hooked."""
        return tuple(m for m in (self.attention, self.query, self.key) if m is not None)


@dataclass(frozen=True)
class Decoder:
    """What kvpage needs to know of a model."""

    module: nn.Module
    config: Any
    sites: tuple[AttentionSite, ...]
    """Of the attention layers; the others keep states of fixed size instead of keys and values."""


def decoder_of(model: nn.Module) -> Any:
    """The module that owns the decoder layers: what receives the 2-D attention mask."""
    model = getattr(model, "get_base_model", lambda: model)()  # PEFT
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model: a transformers PreTrainedModel expected, got {type(model).__name__}"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"model: a decoder-only model expected, got the encoder-decoder "
            f"{type(model).__name__}; {INSTEAD}"
        )
    decoder = model.get_decoder()
    if not isinstance(decoder, PreTrainedModel):
        raise ValueError(f"model: {type(model).__name__} names no decoder of its own; {INSTEAD}")
    return decoder


def describe(model: nn.Module) -> Decoder:
    """Find the attention modules and the RoPE of `model`; `ValueError` names what is unsupported.

    Fixed frequencies are read now, the model's own `inv_freq`.
    """
    decoder = decoder_of(model)
    config = decoder.config
    _check_config(config)
    architecture = ARCHITECTURES.get(config.model_type, COMMON)
    native = native_layers(config)
    blocks = getattr(decoder, "layers", None)
    if not isinstance(blocks, nn.ModuleList) or len(blocks) != len(native):
        raise _unknown(config, "no list `layers` of as many decoder layers as its config says")
    sites = [
        _site(index, block, architecture, decoder, layer.tokens)
        for index, (block, layer) in enumerate(zip(blocks, native, strict=True))
        if isinstance(layer, Window)
    ]
    windows = {site.window for site in sites if site.window is not None}
    if not sites or len(windows) > 1:
        raise _unknown(config, f"windows {sorted(windows)}" if sites else "no attention layer")
    return Decoder(decoder, config, tuple(sites))


def _site(
    index: int, block: nn.Module, architecture: Architecture, decoder: Any, window: int | None
) -> AttentionSite:
    config = decoder.config
    attention = getattr(block, architecture.attention, None)
    if attention is None:
        raise _unknown(config, f"no `{architecture.attention}` in layer {index}")
    if window is not None:
        return AttentionSite(index, attention, window)
    query, key = _first(attention, architecture.query), _first(attention, architecture.key)
    if query is None or (key is None and architecture.split is None):
        raise _unknown(config, f"none of {architecture.query + architecture.key} in layer {index}")
    heads = config.num_attention_heads
    groups = getattr(attention, "num_key_value_groups", None)
    if groups is None:
        groups = heads // (getattr(config, "num_key_value_heads", None) or heads)
    rope = _rope_source(decoder, index, architecture, architecture.rotates(attention))
    key = None if architecture.split is not None else key
    split, heads_first = architecture.split, architecture.heads_first
    return AttentionSite(
        index,
        attention,
        None,
        query,
        key,
        split,
        heads_first,
        rope,
        groups,
        _scale(attention, config),
    )


def _scale(attention: Any, config: Any) -> float:
    scale = getattr(attention, "scaling", None)
    if isinstance(scale, float | int):
        return float(scale)
    dims = getattr(attention, "head_dim", None) or getattr(attention, "head_size", None)
    return float(dims or config.hidden_size // config.num_attention_heads) ** -0.5


def _first(module: nn.Module, names: tuple[str, ...]) -> nn.Module | None:
    return next((m for name in names if (m := getattr(module, name, None)) is not None), None)


def _unknown(config: Any, found: str) -> ValueError:
    return ValueError(
        f"model: architecture {config.model_type!r} does not follow the pattern of the supported "
        f"ones: {found}; {INSTEAD}"
    )


def _check_config(config: Any) -> None:
    """Raise `ValueError` for what can be seen in the config to be unsupported."""
    refused = None
    if config.model_type in MIXES_HEADS:
        refused = "attention that reads values of other KV heads"
    elif _field(config, "kv_lora_rank"):
        refused = "multi-head latent attention (MLA)"
    elif _field(config, "alibi"):
        refused = "ALiBi, whose biases go by the place in the cache"
    elif _field(config, "num_kv_shared_layers"):
        refused = "layers that share their keys and values"
    elif any("mrope_section" in rope for rope in _rope_parameters(config)):
        refused = "multimodal RoPE (M-RoPE)"
    elif any(rope.get("rope_type") == "longrope" for rope in _rope_parameters(config)):
        refused = "RoPE of type 'longrope', which makes transformers drop the cache at the switch"
    if refused is not None:
        raise ValueError(f"model: {config.model_type!r} has {refused}; {INSTEAD}")


def _field(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except RuntimeError as error:  # transformers has configs whose fields differ by layer
        raise ValueError(f"model: {config.model_type!r}: {error}; {INSTEAD}") from None


def _rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    """The RoPE parameters of `config`: one dictionary, or one per layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    yield from nested or [parameters]


def _rope_source(decoder: Any, index: int, architecture: Architecture, rotates: bool) -> RopeSource:
    config = decoder.config
    if not rotates:
        empty = Rope(torch.empty(0, dtype=torch.float64))
        return RopeSource(lambda module: empty, decoder, fixed=True)
    embedding = _first(decoder, ("rotary_emb", "pos_emb"))
    kinds = getattr(config, "layer_types", None)
    kind = kinds[index] if kinds is not None else "full_attention"
    prefix = "" if hasattr(embedding, "inv_freq") else f"{kind}_"
    if embedding is None or not hasattr(embedding, f"{prefix}inv_freq"):
        raise _unknown(config, "no `rotary_emb` with `inv_freq`")
    types = {rope.get("rope_type", "default") for rope in _rope_parameters(config)}
    read = functools.partial(_read, prefix=prefix, interleaved=architecture.interleaved)
    return RopeSource(read, embedding, fixed=types <= set(FIXED_ROPE_TYPES))


def _read(embedding: Any, prefix: str, interleaved: bool) -> Rope:
    inv_freq = getattr(embedding, f"{prefix}inv_freq").detach().cpu().double()
    scaling = float(getattr(embedding, f"{prefix}attention_scaling", 1.0))
    return Rope(inv_freq, scaling, interleaved)
