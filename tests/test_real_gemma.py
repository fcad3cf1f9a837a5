"""End to end on a real model with sliding windows: Gemma 3 270M."""

import pytest
import torch
from oracle import check_against_oracle
from tiny import generate
from transformers import DynamicCache

from kvpage import PagedCompactCache

STORY = (
    "The harbour master kept three ledgers. The first held the ships that came in, the second the "
    "ships that went out, and the third, which no one was shown, the ships that did neither. "
)


def story(tokenizer, tokens):
    """Token ids `[1, tokens]` of a text that is never twice the same."""
    text = " ".join(f"Day {day}. {STORY}" for day in range(1, 40))
    return tokenizer(text, return_tensors="pt").input_ids[:, :tokens]


@pytest.mark.parametrize("length", [495, 512, 700])
def test_gemma_3_under_budget_decodes_as_with_dynamic_cache_at_its_windows_edge(gemma3, length):
    model, tokenizer = gemma3
    ids = story(tokenizer, length)
    expected_ids, expected = generate(model, ids, DynamicCache(config=model.config), 24)
    cache = PagedCompactCache()
    got_ids, got = generate(model, ids, cache, 24)
    assert torch.equal(got_ids, expected_ids)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
    cache.check()


def test_gemma_3_over_budget_and_window_attends_to_exactly_what_lives_over_two_turns(gemma3):
    model, tokenizer = gemma3
    cache = PagedCompactCache(budget=128, interval=32, recent=32, trace=True)
    first_ids, first = generate(model, story(tokenizer, 500), cache, 100)
    more = torch.cat((first_ids, story(tokenizer, 60)), dim=1)
    ids, second = generate(model, more, cache, 60)
    assert cache.get_seq_length() == 500 + 100 + 60 + 60 - 1
    trace = cache.trace
    check_against_oracle(model, trace, ids[:, :-1], second, atol=1e-3)
    check_against_oracle(
        model, [e for e in trace if e.seen_tokens < 599], first_ids[:, :-1], first, atol=1e-3
    )
    report = cache.report()
    assert (report.full_layers, report.sliding_layers) == (3, 15)
    assert report.live_tokens <= 128 + 32
    assert report.blocks_freed >= 400 // 16
    assert report.sliding_blocks_freed >= (720 - 512 - 32) // 16
