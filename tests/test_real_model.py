"""End to end on a real pretrained model."""

import torch
from oracle import oracle_logits
from tiny import generate
from transformers import DynamicCache

from kvpage import PagedCompactCache

QUESTION = "Explain, step by step, how a bill becomes a law in the United States."


def encode(tokenizer, text):
    chat = [{"role": "user", "content": text}]
    encoded = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    return encoded["input_ids"]


def test_under_budget_the_real_model_decodes_as_with_dynamic_cache(smollm2):
    model, tokenizer = smollm2
    ids = encode(tokenizer, QUESTION)
    expected_ids, expected = generate(model, ids, DynamicCache(), 256)
    got_ids, got = generate(model, ids, PagedCompactCache(), 256)
    assert torch.equal(got_ids, expected_ids)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-5)  # logits of magnitude 30


def test_over_budget_the_real_model_attends_to_exactly_what_lives(smollm2):
    model, tokenizer = smollm2
    cache = PagedCompactCache(budget=192, interval=64, recent=64, trace=True)
    ids, logits = generate(model, encode(tokenizer, QUESTION), cache, 420)
    assert len(cache.trace) >= 3
    expected = oracle_logits(model, ids[:, :-1], cache.trace)[:, -420:]
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-4)  # logits of magnitude 30
    report = cache.report()
    assert report.live_tokens <= 192 + 64
    assert report.blocks_freed >= 3 * 64 // 16
    assert report.blocks_freed_without_compaction <= report.blocks_freed // 4
    words = tokenizer.decode(ids[0, -200:]).split()
    assert len(set(words)) > 40  # still text, not a loop over a word or two
