"""Adapters, quantised linears and precision: what yields queries and keys may be of any kind."""

from __future__ import annotations

import pytest
import torch
from oracle import check_against_oracle, oracle_logits
from tiny import build, generate, prompt
from torch import nn
from transformers import DynamicCache

import kvpage
from kvpage import PagedCompactCache
from kvpage.scoring import rotation

SMALL = {"budget": 64, "interval": 24, "recent": 16, "trace": True}
NAME = "llama-gqa3-tied"


def count_hooks(model):
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


# Adapters.


def with_adapters(model, *targets):
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=list(targets)))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.2)
    return model.eval()


QKV = ("q_proj", "k_proj", "v_proj")


@pytest.mark.parametrize("given", [False, True])
def test_a_lora_model_decodes_exactly(given):
    model = with_adapters(build(NAME), *QKV)
    cache = PagedCompactCache(model if given else None)
    expected = generate(model, prompt(30), DynamicCache(), 80)
    assert not torch.equal(expected[0], generate(build(NAME), prompt(30), DynamicCache(), 80)[0])
    assert all(map(torch.equal, generate(model, prompt(30), cache, 80), expected))
    cache = PagedCompactCache(model if given else None, **SMALL)
    ids, logits = generate(model, prompt(30), cache, 100)
    check_against_oracle(model.get_base_model(), cache.trace, ids[:, :-1], logits)


@pytest.mark.parametrize("targets", [QKV, ("q_proj",)], ids=len)
def test_adapters_that_come_and_go_on_an_attached_model_are_seen(targets):
    """Found: an attached model kept its hooks on the modules that PEFT had wrapped, so statistics
    were of queries without the adapter; once it was merged, nothing was seen at all."""
    plain = build(NAME)
    kvpage.attach(plain)
    generate(plain, prompt(30), PagedCompactCache(), 2)
    for change in (lambda model: with_adapters(model, *targets), lambda m: m.merge_and_unload()):
        model = change(plain)
        caches = [PagedCompactCache(**SMALL)]
        generate(model, prompt(30), caches[0], 100)
        kvpage.detach(model)
        assert count_hooks(model) == 0
        caches.append(PagedCompactCache(**SMALL))
        generate(model, prompt(30), caches[1], 100)
        kvpage.attach(model)
        one, two = (cache.statistics(1).query_mean for cache in caches)
        assert torch.equal(one, two)
        plain = model


# Quantised linears.


def int8_weights(model):
    torchao = pytest.importorskip("torchao")
    torchao.quantization.quantize_(model, torchao.quantization.Int8WeightOnlyConfig())
    return model


def int8_all(model):
    quantize = torch.ao.quantization.quantize_dynamic
    return quantize(model, {nn.Linear}, dtype=torch.qint8)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("quantised", [int8_weights, int8_all])
def test_a_quantised_model_decodes_exactly(quantised):
    model = quantised(build(NAME))
    expected = generate(model, prompt(30), DynamicCache(), 80)
    assert all(map(torch.equal, generate(model, prompt(30), PagedCompactCache(), 80), expected))
    cache = PagedCompactCache(**SMALL)
    ids, logits = generate(model, prompt(30), cache, 100)
    cache.check()
    assert cache.report().compactions > 0 and cache.statistics(2).count.tolist() == [129]
    if quantised is int8_weights:  # the other scales activations by whatever is in one forward
        check_against_oracle(model, cache.trace, ids[:, :-1], logits)


# Precision.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_statistics_are_kept_in_more_than_the_models_precision(dtype):
    model, seen = build(NAME, dtype=dtype), []
    handle = model.model.layers[1].self_attn.q_proj.register_forward_hook(
        lambda module, args, output: seen.append(output.double())
    )
    cache = PagedCompactCache(**SMALL)
    generate(model, prompt(30), cache, 400)
    handle.remove()
    statistics, collected = cache.statistics(1), cache.layers[1].statistics
    assert cache.layers[1].keys.dtype == dtype
    assert {total.dtype for total in collected._sums[:4]} == {torch.float64}
    means = [value for name, value in vars(statistics).items() if name.startswith(("que", "key"))]
    assert len(means) == 4 and all(mean.dtype == torch.float32 for mean in means)
    queries = torch.cat(seen, dim=1).view(1, -1, 6, 8)
    expected = queries.mean(dim=1)
    torch.testing.assert_close(statistics.query_mean.double(), expected, atol=1e-6, rtol=1e-6)
    far = rotation(statistics.rope, torch.tensor([1_000_000]), (1,))
    angle = 1_000_001 * statistics.rope.inv_freq
    torch.testing.assert_close(
        far[0], torch.polar(torch.ones_like(angle), angle), atol=1e-9, rtol=0
    )
    assert far.dtype == torch.complex128


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_over_budget_logits_are_off_by_no_more_than_the_dtype_rounds(dtype):
    model, cache = build(NAME, dtype=dtype), PagedCompactCache(**SMALL)
    ids, logits = generate(model, prompt(30), cache, 120)
    rounded = oracle_logits(model, ids[:, :-1], cache.trace)[:, -120:]
    model = model.double()
    exact = oracle_logits(model, ids[:, :-1], cache.trace)[:, -120:]
    blind = oracle_logits(model, ids[:, :-1], [])[:, -120:]
    noise = (rounded - exact).abs().max()
    assert (logits - exact).abs().max() <= 2 * noise < 0.2 * (blind - exact).abs().max()


def test_a_model_that_was_cast_is_read_anew():
    """Found: RoPE frequencies were those of the model's first cache; a cast rounds them, so the
    next cache refused the model's own keys."""
    model = build(NAME)
    generate(model, prompt(1000), PagedCompactCache(), 2)
    cache = PagedCompactCache()
    generate(model.to(torch.bfloat16), prompt(1000), cache, 2)
    assert torch.equal(cache.statistics(0).rope.inv_freq, model.model.rotary_emb.inv_freq.double())
