"""End to end on a real pretrained model."""

import torch
from oracle import check_against_oracle, oracle_logits
from tiny import cache_name, generate
from transformers import DynamicCache
from watched import Watched, all_logits

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
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


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
    assert len(set(words)) > 30  # still text, not a loop over a word or two


def test_six_turns_of_chat_attend_to_exactly_what_lives(smollm2):
    model, tokenizer = smollm2
    cache = PagedCompactCache(budget=512, interval=64, recent=64, trace=True)
    chat, logits, lengths, history = [], [], [], None
    for turn in range(6):
        chat.append({"role": "user", "content": f"{QUESTION} Part {turn + 1}: tell me more."})
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, return_tensors="pt").input_ids
        if history is not None:
            ids = torch.cat((history, ids[:, -70:]), dim=1)  # full ids, old ones as they were
        lengths.append((cache.get_seq_length(), ids.shape[1]))
        history, new = generate(model, ids, cache, 64)
        logits.append((ids.shape[1] - 1, new))
    assert cache.get_seq_length() == history.shape[1] - 1
    for seen, length in lengths[1:]:
        assert 0 < length - seen <= 71  # turn two and on feed the new tokens alone
    assert cache.report().compactions >= 3
    expected = oracle_logits(model, history[:, :-1], cache.trace)
    for start, new in logits:
        torch.testing.assert_close(
            new, expected[:, start : start + new.shape[1]], atol=1e-3, rtol=1e-4
        )


def test_a_left_padded_batch_under_and_over_budget(smollm2):
    model, tokenizer = smollm2
    tokenizer.padding_side = "left"
    questions = [QUESTION, "Why?", "Name three rivers.", "What is the capital of France? " * 6]
    inputs = tokenizer(questions, return_tensors="pt", padding=True)
    ids, mask = inputs.input_ids, inputs.attention_mask
    expected, _ = generate(model, ids, DynamicCache(), 48, attention_mask=mask)
    got, _ = generate(model, ids, PagedCompactCache(), 48, attention_mask=mask)
    assert torch.equal(got, expected)
    for row in range(4):
        alone, _ = generate(
            model, ids[row : row + 1, mask[row].argmax() :], PagedCompactCache(), 48
        )
        assert torch.equal(alone[0, -48:], got[row, -48:])
    cache = PagedCompactCache(budget=64, interval=32, recent=32, trace=True)
    fed, logits = generate(model, ids, cache, 120, attention_mask=mask)
    assert len(cache.trace) >= 2
    check_against_oracle(model, cache.trace, fed[:, :-1], logits, mask, atol=1e-3)


def test_beams_under_budget_are_dynamic_caches(smollm2):
    model, tokenizer = smollm2
    ids = encode(tokenizer, QUESTION)
    options = {"max_new_tokens": 40, "num_beams": 3, "do_sample": False}
    expected = model.generate(ids, **options, **{cache_name(model): DynamicCache()})
    got = model.generate(ids, **options, **{cache_name(model): PagedCompactCache()})
    assert torch.equal(got, expected)


def test_beams_over_budget_attend_to_exactly_what_lives(smollm2):
    model, tokenizer = smollm2
    cache = Watched(model, budget=64, interval=16, recent=16, trace=True)
    hooks = [all_logits(model), cache.follow(model)]
    options = {"max_new_tokens": 60, "min_new_tokens": 60, "num_beams": 3, "do_sample": False}
    model.generate(encode(tokenizer, QUESTION), **options, **{cache_name(model): cache})
    for hook in hooks:
        hook.remove()
    assert cache.report().compactions >= 2
    fed, positions, logits = cache.notes
    check_against_oracle(model, cache.trace, fed, logits, cache.mask, positions, atol=1e-3)


def test_prompt_lookup_over_budget_equals_plain_decoding(smollm2):
    model, tokenizer = smollm2
    ids = encode(tokenizer, "Repeat this twice, word by word: " + QUESTION * 3)
    caches = [PagedCompactCache(model, budget=128, interval=32, recent=32) for _ in range(2)]
    plain, _ = generate(model, ids, caches[0], 150)
    assisted, _ = generate(model, ids, caches[1], 150, prompt_lookup_num_tokens=6)
    assert torch.equal(plain, assisted)
    reports = [cache.report() for cache in caches]
    assert reports[0].compactions == reports[1].compactions >= 3
    assert reports[0].live_tokens == reports[1].live_tokens
