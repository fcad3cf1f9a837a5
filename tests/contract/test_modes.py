"""Every way `generate` is used: under budget as with DynamicCache, over budget by the oracle."""

import pytest
import torch
from oracle import check_against_oracle
from tiny import NEEDS_5_24, build, cache_name, generate, prompt
from transformers import DynamicCache
from watched import Watched, all_logits

from kvpage import PagedCompactCache

MODELS = ("llama-gqa3-tied", "mistral", "qwen3")
SMALL = {"budget": 64, "interval": 24, "recent": 16, "trace": True}


def call(model, ids, cache, tokens=40, **kwargs):
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    return model.generate(ids, **(options | kwargs | {cache_name(model): cache}))


def greedy(model, cache):
    return call(model, prompt(30), cache)


def sampling(model, cache):
    torch.manual_seed(0)
    return call(model, prompt(30), cache, do_sample=True, temperature=1.5)


def several_sequences(model, cache):
    torch.manual_seed(0)
    return call(model, prompt(30), cache, do_sample=True, num_return_sequences=3)


def beams(model, cache):
    return call(model, prompt(30, batch=2), cache, num_beams=4)


def beams_of_a_padded_batch(model, cache):
    ids, mask = left_padded()
    return call(model, ids, cache, num_beams=3, num_return_sequences=2, attention_mask=mask)


def beam_sampling(model, cache):
    torch.manual_seed(0)
    return call(model, prompt(30), cache, num_beams=3, do_sample=True)


def left_padded():
    ids, mask = prompt(30, batch=4), torch.ones(4, 30, dtype=torch.long)
    for row, pads in enumerate((0, 29, 7, 16)):
        mask[row, :pads] = 0
    return ids * mask, mask


def padded_batch(model, cache):
    ids, mask = left_padded()
    return call(model, ids, cache, attention_mask=mask)


def right_padded_batch(model, cache):
    ids, mask = left_padded()
    return call(model, ids.flip(1), cache, attention_mask=mask.flip(1))


def rows_that_finish_early(model, cache):
    probe = call(model, prompt(30, batch=4), DynamicCache())
    return call(model, prompt(30, batch=4), cache, min_new_tokens=1, eos_token_id=int(probe[1, 40]))


def chunked_prompt(model, cache):
    return call(model, prompt(70), cache, prefill_chunk_size=16)


def embeddings(model, cache):
    embeds = model.get_input_embeddings()(prompt(30)).detach()
    options = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False}
    return model.generate(inputs_embeds=embeds, **options, **{cache_name(model): cache})


def prompt_lookup(model, cache):
    return call(model, prompt(6).repeat(1, 5), cache, prompt_lookup_num_tokens=5)


def draft_model(model, cache):
    draft = build("llama-llama3")
    return call(model, prompt(30), cache, assistant_model=draft)


def repetition_penalty(model, cache):
    return call(model, prompt(30), cache, repetition_penalty=1.3, no_repeat_ngram_size=3)


def full_ids_in_turn_two(model, cache):
    first = call(model, prompt(30), cache, 10)
    return call(model, torch.cat((first, prompt(9, seed=1)), dim=1), cache, 20)


def full_ids_and_mask_in_turn_two(model, cache):
    ids, mask = left_padded()
    first = call(model, ids, cache, 10, attention_mask=mask)
    mask = torch.nn.functional.pad(mask, (0, 19), value=1)
    second = torch.cat((first, prompt(9, batch=4, seed=1)), dim=1)
    return call(model, second, cache, 20, attention_mask=mask)


def new_ids_in_turn_two(model, cache):
    first = call(model, prompt(30), cache, 10)
    new = torch.cat((first[:, -1:], prompt(9, seed=1)), dim=1)
    mask = torch.ones(1, 39 + 10, dtype=torch.long)
    return call(model, new, cache, 20, attention_mask=mask)


def the_returned_cache_in_turn_two(model, cache):
    first = call(model, prompt(30), cache, 10, return_dict_in_generate=True)
    name = cache_name(model)
    returned = first[name] if name in first else first["past_key_values"]
    second = torch.cat((first.sequences, prompt(9, seed=1)), dim=1)
    return call(model, second, returned, 20)


def assisted_turn_after_a_plain_one(model, cache):
    first = call(model, prompt(6).repeat(1, 5), cache, 10)
    new = torch.cat((first[:, -1:], prompt(6).repeat(1, 3)), dim=1)
    mask = torch.ones(1, 39 + 19, dtype=torch.long)
    return call(model, new, cache, 20, attention_mask=mask, prompt_lookup_num_tokens=4)


RUNS = [(name, attention) for name in MODELS for attention in ("sdpa", "kvpage")]
RUNS.append((MODELS[0], "eager"))


def name_of(mode):
    return getattr(mode, "__name__", None)


MODES = [
    greedy, sampling, several_sequences, beams, beams_of_a_padded_batch, beam_sampling,
    padded_batch, right_padded_batch, rows_that_finish_early, chunked_prompt, embeddings,
    prompt_lookup, draft_model, repetition_penalty, full_ids_in_turn_two,
    full_ids_and_mask_in_turn_two, new_ids_in_turn_two, the_returned_cache_in_turn_two,
    pytest.param(assisted_turn_after_a_plain_one, marks=NEEDS_5_24),
]  # fmt: skip


@pytest.mark.parametrize("mode", MODES, ids=name_of)
@pytest.mark.parametrize(("name", "attention"), RUNS)
def test_under_budget_every_mode_gives_what_dynamic_cache_gives(name, attention, mode):
    model = build(name, attention)
    expected = mode(model, DynamicCache())
    for budget in (None, 2048):
        cache = PagedCompactCache(model, budget=budget)
        assert torch.equal(mode(model, cache), expected)
        cache.check()


@pytest.mark.parametrize(
    "mode",
    [mode for mode in MODES if mode is not embeddings],
    ids=name_of,
)
@pytest.mark.parametrize(("name", "attention"), RUNS)
def test_over_budget_every_mode_attends_to_exactly_what_lives(name, attention, mode):
    """Every logit of every row, whatever was reordered, cropped or padded, is the oracle's."""
    model = build(name, attention)
    cache = Watched(model, budget=40, interval=8, recent=8, trace=True)
    all_logits(model)
    handle = cache.follow(model)
    mode(model, cache)
    handle.remove()
    assert cache.report().budget_bound
    cache.check()
    fed, positions, logits = cache.notes
    check_against_oracle(model, cache.trace, fed, logits, cache.mask, positions)


def test_over_budget_embeddings_give_what_ids_give():
    model = build("llama-gqa3-tied")
    by_ids = call(model, prompt(30), PagedCompactCache(**SMALL), 120)
    embeds = model.get_input_embeddings()(prompt(30)).detach()
    options = {"max_new_tokens": 120, "min_new_tokens": 120, "do_sample": False}
    cache = PagedCompactCache(**SMALL)
    by_embeds = model.generate(inputs_embeds=embeds, **options, **{cache_name(model): cache})
    assert torch.equal(by_ids[:, 30:], by_embeds)


@pytest.mark.parametrize("chunk", [8, 24, 50])
def test_between_the_chunks_of_a_prompt_the_cache_compacts(chunk):
    model = build("llama-gqa3-tied")
    cache = PagedCompactCache(**SMALL)
    lives = []
    model.register_forward_hook(lambda *_: lives.append(cache.ledger.live))
    generate(model, prompt(400), cache, 30, prefill_chunk_size=chunk)
    assert max(lives) <= 64 + max(chunk, 24)
    assert cache.get_seq_length() == 429


@pytest.mark.parametrize("attention", ["sdpa", "eager", "kvpage"])
def test_sixteen_rows_of_very_different_lengths_give_what_each_gives_alone(attention):
    model = build("llama-gqa3-tied", attention)
    ids, mask = prompt(120, batch=16), torch.ones(16, 120, dtype=torch.long)
    for row in range(16):
        mask[row, : 119 - 8 * row if row < 15 else 0] = 0  # 1, 9, 17, ... tokens, and all 120
    together = call(model, ids * mask, PagedCompactCache(), attention_mask=mask)
    for row in range(16):
        own = ids[row : row + 1, int(mask[row].argmax()) :]
        alone = call(model, own, PagedCompactCache())
        assert torch.equal(alone[0, -40:], together[row, -40:])
    cache = Watched(model, budget=40, interval=8, recent=8, trace=True)
    all_logits(model)
    handle = cache.follow(model)
    call(model, ids * mask, cache, attention_mask=mask)
    handle.remove()
    fed, positions, logits = cache.notes
    check_against_oracle(model, cache.trace, fed, logits, cache.mask, positions)
    cache.check()


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("budget", [64, None])
def test_a_text_that_was_seen_to_its_end_is_not_fed_again(with_mask, budget):
    """As after an interrupt between two tokens; after `crop(-1)` decoding goes on."""
    model, ids = build("llama-gqa3-tied"), prompt(30)
    options = {"attention_mask": torch.ones_like(ids)} if with_mask else {}
    expected = call(model, ids, DynamicCache(config=model.config), 20)
    cache = PagedCompactCache(**(SMALL | {"budget": budget}))
    model(ids, **{cache_name(model): cache})
    with pytest.raises((ValueError, IndexError)):  # older transformers stumble by themselves
        call(model, ids, cache, 20, **options)
    if cache.get_seq_length() == 30:
        cache.crop(-1)
        assert torch.equal(call(model, ids, cache, 20, **options), expected)
