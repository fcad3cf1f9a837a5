"""Tiny random models of the architectures people run, one or more per family."""

from __future__ import annotations

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassFieldValidationError
from tiny import COMMON, HEADS_3, HEADS_8, perturbed

from kvpage.compat import StateLayer

ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
HALF = {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}
HEADS_16 = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SLIDES = {
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
MIXED = ["linear_attention", "full_attention", "linear_attention"]
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LOCAL_AND_GLOBAL = {
    "sliding_attention": ROPE,
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0},
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}

FAMILIES = {
    "llama": ("LlamaForCausalLM", HEADS_3),
    "llama-dynamic": (
        "LlamaForCausalLM",
        HEADS_3 | {"rope_parameters": DYNAMIC, "max_position_embeddings": 48},
    ),
    "mistral": ("MistralForCausalLM", HEADS_3 | {"sliding_window": None}),
    "mistral-window": ("MistralForCausalLM", HEADS_3 | {"sliding_window": 20}),
    "mixtral": ("MixtralForCausalLM", HEADS_3 | EXPERTS),
    "qwen2": ("Qwen2ForCausalLM", HEADS_3),
    "qwen2-window": (
        "Qwen2ForCausalLM",
        HEADS_3 | {"use_sliding_window": True} | SLIDES,
    ),
    "qwen3": ("Qwen3ForCausalLM", HEADS_8),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        HEADS_8 | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "gemma2": ("Gemma2ForCausalLM", HEADS_16 | SLIDES | {"query_pre_attn_scalar": 16}),
    "gemma3": (
        "Gemma3ForCausalLM",
        HEADS_16 | SLIDES | {"query_pre_attn_scalar": 16, "rope_parameters": LOCAL_AND_GLOBAL},
    ),
    "phi3": ("Phi3ForCausalLM", HEADS_3),
    "phi3-partial": ("Phi3ForCausalLM", HEADS_16 | HALF | {"hidden_size": 64}),
    "phi": ("PhiForCausalLM", HEADS_3 | HALF),
    "olmo2": ("Olmo2ForCausalLM", HEADS_3),
    "olmo3": ("Olmo3ForCausalLM", HEADS_3 | SLIDES),
    "gpt-neox": (
        "GPTNeoXForCausalLM",
        {"num_attention_heads": 3, "rope_parameters": ROPE | {"partial_rotary_factor": 0.25}},
    ),
    "cohere": ("CohereForCausalLM", HEADS_3),
    "cohere-norm": ("CohereForCausalLM", HEADS_3 | {"use_qk_norm": True}),
    "cohere2": ("Cohere2ForCausalLM", HEADS_3 | SLIDES),
    "ernie4_5": ("Ernie4_5ForCausalLM", HEADS_3),
    "helium": ("HeliumForCausalLM", HEADS_16 | {"hidden_size": 64}),
    "apertus": ("ApertusForCausalLM", HEADS_3),
    "glm4": ("Glm4ForCausalLM", HEADS_16 | HALF),
    "glm": ("GlmForCausalLM", HEADS_16 | HALF),
    "granite": ("GraniteForCausalLM", HEADS_3),
    "smollm3": ("SmolLM3ForCausalLM", HEADS_3 | {"no_rope_layers": [1, 0, 1]}),
    "exaone4": ("Exaone4ForCausalLM", HEADS_3 | SLIDES),
    "starcoder2": ("Starcoder2ForCausalLM", HEADS_3 | {"sliding_window": None}),
    "gpt-oss": ("GptOssForCausalLM", HEADS_16 | SLIDES | EXPERTS | {"hidden_size": 64}),
    "qwen3-next": (
        "Qwen3NextForCausalLM",
        HEADS_16
        | {
            "layer_types": MIXED,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "lfm2": ("Lfm2ForCausalLM", HEADS_3 | {"layer_types": ["conv", "full_attention", "conv"]}),
}
MAMBA = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
}
TINY_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
FAMILIES |= {
    "bamba": ("BambaForCausalLM", HEADS_3 | MAMBA | {"attn_layer_indices": [1]}),
    "granite-hybrid": (
        "GraniteMoeHybridForCausalLM",
        HEADS_3
        | MAMBA
        | EXPERTS
        | {"layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 32},
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        {
            "text_config": COMMON | HEADS_3 | {"model_type": "llama"},
            "vision_config": TINY_VISION | {"model_type": "clip_vision_model"},
            "image_token_index": 100,
        },
    ),
    "gemma3-vision": (
        "Gemma3ForConditionalGeneration",
        {
            "text_config": COMMON | FAMILIES["gemma3"][1],
            "vision_config": TINY_VISION | {"model_type": "siglip_vision_model"},
            "image_token_index": 100,
            "boi_token_index": 99,
            "eoi_token_index": 98,
            "mm_tokens_per_image": 4,
        },
    ),
}
EAGER = {"gpt-oss", "gemma2"}
"""Families that transformers runs right in eager alone: attention sinks, soft-capped scores."""


KEEP_STATES = {"qwen3-next", "lfm2", "bamba", "granite-hybrid"}
"""Families with layers that keep a state of fixed size."""


def family(name: str, dtype: torch.dtype = torch.float32, **more: object):
    """The tiny model of a family; skips where the installed transformers has none."""
    class_name, traits = FAMILIES[name]
    model_class = getattr(transformers, class_name, None)
    if model_class is None:
        pytest.skip(f"this transformers has no {class_name}")
    if name in KEEP_STATES and StateLayer is None:
        pytest.skip("this transformers keeps such states in caches of their own")
    attention = "eager" if name in EAGER else "sdpa"
    torch.manual_seed(0)
    common = {} if "text_config" in traits else COMMON
    try:
        config = model_class.config_class(**(common | traits | more), attn_implementation=attention)
    except StrictDataclassFieldValidationError as error:
        pytest.skip(f"this transformers can't make a {class_name}: {error}")
    return perturbed(model_class(config)).to(dtype).eval()


SMALL = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 64}
LONG = [1.0] * 4
MIXED_WINDOWS = ["sliding_attention", "full_attention"] * 2
REFUSED = {
    "encoder-decoder": ("T5ForConditionalGeneration", {"d_model": 32, "num_layers": 2}),
    "MLA": ("DeepseekV3ForCausalLM", SMALL),
    "M-RoPE": (
        "Qwen2VLForConditionalGeneration",
        {
            "text_config": SMALL
            | {"num_attention_heads": 2, "num_key_value_heads": 1}
            | {"rope_parameters": ROPE | {"mrope_section": [2, 3, 3]}},
        },
    ),
    "longrope": (
        "Phi3ForCausalLM",
        COMMON
        | HEADS_3
        | {
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "short_factor": LONG,
                "long_factor": LONG,
            },
        },
    ),
    "chunked attention": ("Llama4ForCausalLM", SMALL | {"intermediate_size_mlp": 32}),
    "shared keys and values": (
        "Gemma3nForCausalLM",
        {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": MIXED_WINDOWS},
    ),
    "attention and state in one layer": ("FalconH1ForCausalLM", SMALL),
    "values of other heads": ("DiffLlamaForCausalLM", SMALL),
    "no decoder": (
        "ModernBertDecoderForCausalLM",
        SMALL | {"num_attention_heads": 2, "pad_token_id": 0},
    ),
    "ALiBi": ("BloomForCausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 2}),
    "absolute positions": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 2}),
}
"""Kinds of models that are refused by name, and one of each."""


def refused_model(name: str):
    """A model of a refused kind, without weights; `None` where transformers has none."""
    class_name, traits = REFUSED[name]
    model_class = getattr(transformers, class_name, None)
    if model_class is None:
        return None
    with torch.device("meta"):
        return model_class(model_class.config_class(**traits))
