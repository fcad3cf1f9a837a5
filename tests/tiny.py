"""Tiny random models, one per family and trait, and helpers to run them."""

from __future__ import annotations

import inspect

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvpage import register

register()
VOCABULARY = 101
RELEASE = Version(transformers.__version__).release
NEEDS_5_24 = pytest.mark.skipif(
    RELEASE < (5, 24), reason="transformers can't do assisted decoding on a filled cache here"
)
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "max_position_embeddings": 8192,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None if RELEASE >= (5, 15) else VOCABULARY - 1,  # older lookup needs one
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}

HEADS_1 = {"num_attention_heads": 3, "num_key_value_heads": 3}
HEADS_3 = {"num_attention_heads": 6, "num_key_value_heads": 2}
HEADS_8 = {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 16}

MODELS = {
    "llama-mha-untied": (LlamaForCausalLM, LlamaConfig, HEADS_1 | {"tie_word_embeddings": False}),
    "llama-gqa3-tied": (LlamaForCausalLM, LlamaConfig, HEADS_3 | {"tie_word_embeddings": True}),
    "llama-gqa8-bias": (LlamaForCausalLM, LlamaConfig, HEADS_8 | {"attention_bias": True}),
    "llama-linear": (LlamaForCausalLM, LlamaConfig, HEADS_3 | {"rope_parameters": LINEAR}),
    "llama-llama3": (LlamaForCausalLM, LlamaConfig, HEADS_3 | {"rope_parameters": LLAMA3}),
    "llama-yarn": (LlamaForCausalLM, LlamaConfig, HEADS_3 | {"rope_parameters": YARN}),
    "mistral": (MistralForCausalLM, MistralConfig, HEADS_3 | {"sliding_window": None}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, HEADS_3),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, HEADS_8),
}


DEFAULT_ATTENTION = "sdpa"


def build(
    name: str, attention: str | None = None, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """The tiny model `name`, with random weights that are the same at every call."""
    attention = attention or DEFAULT_ATTENTION
    model_class, config_class, traits = MODELS[name]
    torch.manual_seed(0)
    model = model_class(config_class(**(COMMON | traits), attn_implementation=attention))
    return perturbed(model).to(dtype).eval()


def perturbed(model: PreTrainedModel) -> PreTrainedModel:
    """`model` with biases and norms, which start at constants, made to matter."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def prompt(length: int, batch: int = 1, seed: int = 0) -> Tensor:
    """Random token ids `[batch, length]`, none of them the pad token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (batch, length), generator=generator)


def generate(model: PreTrainedModel, ids: Tensor, cache: object, tokens: int, **kwargs: object):
    """Greedy decoding of exactly `tokens` tokens: `(ids [B, T], logits [B, tokens, V])`."""
    out = model.generate(
        ids,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **{cache_name(model): cache},
        **kwargs,
    )
    return out.sequences, torch.stack(out.logits, dim=1)


def cache_name(model: PreTrainedModel) -> str:
    """The name of the cache argument in the installed transformers."""
    parameters = inspect.signature(model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"
