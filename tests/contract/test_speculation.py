"""Assisted decoding gives what plain decoding gives at the same budget; crop undoes exactly."""

import pytest
import torch
from oracle import check_against_oracle
from tiny import NEEDS_5_24, RELEASE, build, cache_name, generate, prompt
from transformers import DynamicCache

from kvpage import PagedCompactCache

SMALL = {"budget": 64, "interval": 24, "recent": 16, "trace": True}
REMOVES = RELEASE >= (5, 15)


def crop(cache, count):
    """Remove `count` tokens the way the installed transformers does."""
    cache.crop(-count if REMOVES or count else cache.get_seq_length())


@pytest.mark.parametrize("length", [10, 40, 87, 88, 89, 90, 200])
@pytest.mark.parametrize("drafts", [1, 5, 10])
@pytest.mark.parametrize("name", ["llama-gqa3-tied", "qwen3"])
def test_prompt_lookup_equals_plain_decoding_over_many_compactions(name, drafts, length):
    model = build(name)
    ids = prompt(7).repeat(1, length // 7 + 1)[:, :length]
    plain, assisted = PagedCompactCache(model, **SMALL), PagedCompactCache(model, **SMALL)
    expected_ids, expected = generate(model, ids, plain, 150)
    got_ids, got = generate(model, ids, assisted, 150, prompt_lookup_num_tokens=drafts)
    assert torch.equal(got_ids, expected_ids)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    same_evictions(assisted, plain)
    assert assisted.report().compactions == plain.report().compactions >= 3
    assisted.check()


def same_evictions(a, b):
    assert [event.seen_tokens for event in a.trace] == [event.seen_tokens for event in b.trace]
    for x, y in zip(a.trace, b.trace, strict=True):
        for kept, expected in zip(x.positions, y.positions, strict=True):
            assert torch.equal(kept, expected)


@pytest.mark.parametrize("attention", ["sdpa", "eager", "kvpage"])
@pytest.mark.parametrize("scorer", ["centroid", "streaming", "random"])
def test_a_draft_model_equals_plain_decoding_with_every_scorer(attention, scorer):
    """But `knorm`: the first layer's keys of one token have one norm but for rounding, wherever
    they stand, so which of them stays is decided by rounding, and that differs with the shapes."""
    model, draft = build("llama-gqa3-tied", attention), build("llama-gqa3-tied", attention)
    with torch.no_grad():  # agrees now and then
        for parameter in draft.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    plain = PagedCompactCache(model, **SMALL, scorer=scorer)
    assisted = PagedCompactCache(model, **SMALL, scorer=scorer)
    expected, _ = generate(model, prompt(30), plain, 150)
    got, _ = generate(model, prompt(30), assisted, 150, assistant_model=draft)
    assert torch.equal(got, expected)
    same_evictions(assisted, plain)


@NEEDS_5_24
@pytest.mark.parametrize("pin_prompt", [False, "auto", True])
def test_turns_of_assisted_and_plain_decoding_mix(pin_prompt):
    model = build("llama-gqa3-tied")
    caches = [PagedCompactCache(model, **SMALL, pin_prompt=pin_prompt) for _ in range(2)]
    new, seen = prompt(6).repeat(1, 4), 0
    for turn in range(4):
        mask = torch.ones(1, seen + new.shape[1], dtype=torch.long)
        outputs = []
        for cache, assisted in zip(caches, (False, turn != 2), strict=True):
            options = {"prompt_lookup_num_tokens": 6} if assisted else {}
            outputs.append(generate(model, new, cache, 40, attention_mask=mask, **options)[0])
        assert torch.equal(*outputs)
        seen = caches[0].get_seq_length()
        assert caches[1].get_seq_length() == seen
        new = torch.cat((outputs[0][:, -1:], prompt(6, seed=turn).repeat(1, 3)), dim=1)
    same_evictions(*caches)


@NEEDS_5_24
def test_full_ids_that_assisted_decoding_would_feed_twice_are_refused():
    model = build("llama-gqa3-tied")
    cache = PagedCompactCache(model, **SMALL)
    first, _ = generate(model, prompt(30), cache, 10)
    second = torch.cat((first, prompt(9, seed=1)), dim=1)
    with pytest.raises(ValueError, match=r"input_ids: .* pass the new ids alone"):
        generate(model, second, cache, 10, prompt_lookup_num_tokens=4)
    assert cache.get_seq_length() == 39
    generate(model, second, cache, 10)


def test_rejected_drafts_never_enter_the_statistics():
    model = build("llama-gqa3-tied")
    clean, cropped = PagedCompactCache(model, **SMALL), PagedCompactCache(model, **SMALL)
    name, ids = cache_name(model), prompt(80)
    with torch.no_grad():
        for cache in (clean, cropped):
            model(ids[:, :20], **{name: cache})
        for start in range(20, 80, 2):
            model(ids[:, start : start + 2], **{name: clean})
            wrong = torch.cat((ids[:, start : start + 2], prompt(5, seed=start)), dim=1)
            model(wrong, **{name: cropped}, logits_to_keep=7)
            crop(cropped, 5)
    for index in range(3):
        a, b = clean.statistics(index), cropped.statistics(index)
        assert torch.equal(a.count, b.count)
        torch.testing.assert_close(a.query_mean, b.query_mean, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(a.key_magnitude, b.key_magnitude, atol=1e-6, rtol=1e-5)


def test_crop_undoes_what_dynamic_crop_undoes():
    model = build("llama-gqa3-tied")
    ours, theirs = PagedCompactCache(model, budget=None), DynamicCache()
    generator = torch.Generator().manual_seed(0)
    name = cache_name(model)
    for turn in range(60):
        count = int(torch.randint(1, 20, (), generator=generator))
        ids = prompt(count, batch=2, seed=turn)
        with torch.no_grad():
            got = model(ids, **{name: ours}).logits
            expected = model(ids, **{name: theirs}).logits
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        if turn % 3:
            back = int(torch.randint(0, ours.get_seq_length() // 2 + 1, (), generator=generator))
            crop(ours, back)
            crop(theirs, back)
        assert ours.get_seq_length() == theirs.get_seq_length()
        ours.check()


def test_crop_in_a_padded_batch_forgets_its_pads():
    model = build("llama-gqa3-tied")
    ids, mask = prompt(30, batch=2), torch.ones(2, 30, dtype=torch.long)
    mask[0, :7] = 0
    cache, name = PagedCompactCache(model, **SMALL), cache_name(model)
    fed, logits = ids[:, :20], []
    with torch.no_grad():
        model(ids[:, :20], attention_mask=mask[:, :20], **{name: cache})
        wrong = torch.nn.functional.pad(mask[:, :20], (0, 9), value=0)
        model(prompt(9, batch=2, seed=1), attention_mask=wrong, **{name: cache})
        crop(cache, 9)
        for step in range(120):
            token = prompt(1, batch=2, seed=step)
            fed = torch.cat((fed, token), dim=1)
            real = torch.nn.functional.pad(mask[:, :20], (0, step + 1), value=1)
            logits.append(model(token, attention_mask=real, **{name: cache}).logits)
    columns = torch.arange(fed.shape[1]).expand_as(fed)  # a bare forward numbers pads too
    check_against_oracle(model, cache.trace, fed, torch.cat(logits, 1), mask[:, :20], columns)


def test_crop_beyond_what_was_compacted_raises_and_changes_nothing():
    model = build("llama-gqa3-tied")
    cache = PagedCompactCache(model, **SMALL)
    generate(model, prompt(30), cache, 70)  # feeds 99: compacted at 88, 11 since
    with pytest.raises(ValueError, match="tokens_to_remove: at most 11"):
        crop(cache, 12)
    assert cache.get_seq_length() == 99
    crop(cache, 11)
    assert cache.get_seq_length() == 88
    cache.check()
    with torch.no_grad():
        model(prompt(1), **{cache_name(model): cache})
    assert cache.ledger.live == 65


@pytest.mark.skipif(not REMOVES, reason="crop takes the length to keep before transformers 5.15")
def test_crop_refuses_a_positive_number_as_transformers_does():
    cache = PagedCompactCache(build("llama-gqa3-tied"), **SMALL)
    with pytest.raises(ValueError, match="tokens_to_remove: zero or a negative number"):
        cache.crop(3)


def test_drafts_longer_than_the_interval_are_refused_before_anything_changes():
    model = build("llama-gqa3-tied")
    cache, name = PagedCompactCache(model, **SMALL), cache_name(model)
    with torch.no_grad():
        model(prompt(80), **{name: cache})
        with pytest.raises(ValueError, match="drafts: at most interval"):
            model(prompt(60), **{name: cache}, logits_to_keep=60)
        assert cache.get_seq_length() == 80
        model(prompt(5), **{name: cache}, logits_to_keep=5)


@pytest.mark.skipif(not REMOVES, reason="no activate_past_recording before transformers 5.15")
def test_assisted_decoding_without_the_outer_model_says_what_to_do():
    model = build("llama-gqa3-tied")
    with pytest.raises(ValueError, match=r"PagedCompactCache\(model\)"):
        generate(model, prompt(30), PagedCompactCache(**SMALL), 5, prompt_lookup_num_tokens=3)


@pytest.mark.skipif(not REMOVES, reason="crop takes the length to keep before transformers 5.15")
def test_crop_takes_what_transformers_passes_an_integer_or_a_tensor():
    model = build("llama-gqa3-tied")
    cache = PagedCompactCache(model, **SMALL)
    with torch.no_grad():
        model(prompt(30), **{cache_name(model): cache})
    for argument in (-3, torch.tensor(-3), torch.tensor(0), 0):
        cache.crop(argument)
    assert cache.get_seq_length() == 24


def test_new_ids_without_the_mask_of_the_whole_text_are_refused():
    """generate takes them for the full ids and finds nothing new among them."""
    model = build("llama-gqa3-tied")
    cache = PagedCompactCache(model, **SMALL)
    first, _ = generate(model, prompt(30), cache, 10)
    new = torch.cat((first[:, -1:], prompt(9, seed=1)), dim=1)
    with pytest.raises(ValueError, match=r"input_ids|attention_mask"):
        generate(model, new, cache, 10)
    assert cache.get_seq_length() == 39
