"""Architectures the table does not name: right by themselves, or refused; never silently wrong."""

import warnings

import pytest
import torch
from oracle import check_against_oracle
from tiny import COMMON, HEADS_3, build, cache_name, generate, prompt
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from kvpage import PagedCompactCache, compat

pytestmark = pytest.mark.core


class UnknownConfig(LlamaConfig):
    model_type = "unknown-to-all"


class Unknown(LlamaForCausalLM):
    config_class = UnknownConfig


def unknown(**traits):
    torch.manual_seed(0)
    return Unknown(UnknownConfig(**(COMMON | HEADS_3 | traits))).eval()


def over_budget(model, ids=None):
    """Decode over budget and compare every logit with the oracle's."""
    cache = PagedCompactCache(model, budget=64, interval=24, recent=16, trace=True)
    sequences, logits = generate(model, prompt(30) if ids is None else ids, cache, 100)
    check_against_oracle(model, cache.trace, sequences[:, :-1], logits)
    cache.check()
    return cache


def test_an_unknown_architecture_of_the_common_pattern_works_by_itself():
    over_budget(unknown())


class NormAfterRope(nn.Module):
    """What some models do and the common pattern does not: change the key after its rotation."""

    def forward(self, states):
        return states / states.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("change", ["norm after rope", "interleaved", "scaled", "shifted"])
def test_one_that_only_looks_like_it_is_refused_at_the_first_forward(change, monkeypatch):
    right = modeling_llama.apply_rotary_pos_emb
    norm = NormAfterRope()

    def wrong(q, k, cos, sin, *args, **kwargs):
        if change == "interleaved":
            q, k = (x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) for x in (q, k))
        q, k = right(q, k, cos, sin, *args, **kwargs)
        if change == "norm after rope":
            q, k = norm(q), norm(k)
        if change == "scaled":
            q, k = 1.1 * q, 1.1 * k
        if change == "shifted":
            q, k = q + 0.1, k + 0.1
        return q, k

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", wrong)
    model = unknown()
    cache = PagedCompactCache(model)
    with pytest.raises(ValueError, match="use transformers' DynamicCache"):
        model(prompt(20), **{cache_name(model): cache})
    assert cache.get_seq_length() == 0


def test_one_without_the_projections_is_refused_by_name():
    model = unknown()
    for block in model.model.layers:
        block.self_attn.other = block.self_attn.q_proj
        del block.self_attn.q_proj
    with pytest.raises(ValueError, match=r"'unknown-to-all' does not follow.*q_proj.*layer 0"):
        PagedCompactCache(model)


@pytest.mark.parametrize("missing", ["rope_parameters", "layer_types", "num_key_value_heads"])
def test_a_config_with_missing_fields_works_or_is_refused_by_name(missing):
    model = unknown()
    model.config.__dict__.pop(missing, None)
    try:
        cache = PagedCompactCache(model)
    except ValueError as error:
        assert str(error).startswith("model:")
    else:
        model(prompt(20), **{cache_name(model): cache})


def test_layers_with_different_numbers_of_heads_are_ranked_each_on_its_own():
    """As in architectures found by search: one layer has 2 KV heads, the next 3, or 1."""
    model = build("llama-gqa3-tied")
    for index, kv_heads in enumerate((2, 3, 1)):
        attention, dim = model.model.layers[index].self_attn, 8
        torch.manual_seed(index)
        attention.k_proj = nn.Linear(48, kv_heads * dim, bias=False)
        attention.v_proj = nn.Linear(48, kv_heads * dim, bias=False)
        attention.num_key_value_groups = 6 // kv_heads
    cache = over_budget(model)
    assert [layer.keys.shape[1] for layer in cache.layers] == [2, 3, 1]


def test_a_newer_transformers_than_tested_warns_once_and_works(monkeypatch):
    monkeypatch.setattr(compat, "RELEASE", (5, 99))
    monkeypatch.setattr(compat.transformers, "__version__", "5.99.0")
    compat.warn_if_untested.cache_clear()
    with pytest.warns(UserWarning, match="tested with transformers up to 5.24, this is 5.99.0"):
        PagedCompactCache()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PagedCompactCache()
    compat.warn_if_untested.cache_clear()
