"""While the budget does not bind, every logit is DynamicCache's."""

import pytest
import torch
from tiny import MODELS, build, cache_name, generate, prompt
from transformers import DynamicCache

from kvpage import PagedCompactCache

PROMPTS = (1, 15, 16, 17, 300)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("attention", ["sdpa", "eager", "kvpage"])
def test_never_evicting_equals_dynamic_cache(name, attention):
    model = build(name, attention)
    for length in PROMPTS:
        ids = prompt(length)
        expected_ids, expected = generate(model, ids, DynamicCache(), 40)
        for budget in (None, 2048, 400):
            cache = PagedCompactCache(budget=budget)
            got_ids, got = generate(model, ids, cache, 40)
            assert torch.equal(got_ids, expected_ids)
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
            assert cache.report().compactions == 0
            cache.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama-gqa3-tied", "qwen3"])
def test_never_evicting_equals_dynamic_cache_in_low_precision(name, dtype):
    model = build(name, dtype=dtype)
    ids = prompt(17)
    _, expected = generate(model, ids, DynamicCache(), 40)
    _, got = generate(model, ids, PagedCompactCache(), 40)
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, atol=0, rtol=0)


@pytest.mark.parametrize("attention", ["sdpa", "eager", "kvpage"])
def test_rows_of_a_padded_batch_equal_dynamic_cache(attention):
    model = build("llama-gqa3-tied", attention)
    ids = prompt(33, batch=3)
    mask = torch.ones_like(ids)
    mask[0, :20], mask[1, :1] = 0, 0
    ids = ids * mask
    expected_ids, expected = generate(model, ids, DynamicCache(), 30, attention_mask=mask)
    got_ids, got = generate(model, ids, PagedCompactCache(), 30, attention_mask=mask)
    assert torch.equal(got_ids, expected_ids)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_forwards_of_several_tokens_equal_dynamic_cache():
    model = build("qwen3")
    ids = prompt(90)
    paged, dynamic = PagedCompactCache(), DynamicCache()
    with torch.no_grad():
        for part in ids.split([20, 1, 16, 30, 1, 22], dim=1):
            got = model(part, **{cache_name(model): paged}).logits
            expected = model(part, **{cache_name(model): dynamic}).logits
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    for layer, reference in zip(paged.layers, dynamic.layers, strict=True):
        torch.testing.assert_close(layer.keys, reference.keys, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(layer.values, reference.values, atol=1e-5, rtol=1e-5)
