"""Every family: as DynamicCache under budget, as the oracle says over it, in the main modes."""

import pytest
import torch
from families import FAMILIES, family
from oracle import check_against_oracle
from test_modes import call, left_padded, name_of
from tiny import RELEASE, prompt
from transformers import DynamicCache
from watched import Watched, all_logits

from kvpage import PagedCompactCache

SMALL = {"budget": 40, "interval": 16, "recent": 8, "trace": True}


def long_trace(model, cache):
    return call(model, prompt(30), cache, 70)


def padded_beams(model, cache):
    ids, mask = left_padded()
    return call(model, ids, cache, 45, attention_mask=mask, num_beams=2)


def two_turns(model, cache):
    first = call(model, prompt(30), cache, 30)
    return call(model, torch.cat((first, prompt(40, seed=1)), dim=1), cache, 20)


def chunked_prompt(model, cache):
    return call(model, prompt(150), cache, 20, prefill_chunk_size=32)


def assisted(model, cache):
    return call(model, prompt(6).repeat(1, 5), cache, 60, prompt_lookup_num_tokens=5)


def single_token_prompt(model, cache):
    torch.manual_seed(0)
    return call(model, prompt(1), cache, 80, do_sample=True, temperature=2.0)


CORE = [long_trace, padded_beams, assisted]
MODES = [*CORE, two_turns, chunked_prompt, single_token_prompt]


def skip_what_can_not_be(model, mode):
    if mode is assisted and (model._is_stateful or model.config.model_type == "qwen3_next"):
        pytest.skip("transformers does no assisted decoding with recurrent states")


def with_attention(model, attention):
    """`model` with the attention over blocks, or its own (SDPA or eager)."""
    if attention != "own":
        model.set_attn_implementation("kvpage")
    return model


def runs(**attentions):
    """Every mode with the model's own attention, and of each of `attentions` some."""
    core = [pytest.param(mode, "own", marks=pytest.mark.core) for mode in CORE]
    other = [(mode, "own") for mode in MODES[len(CORE) :]]
    return [*core, *other, *((mode, name) for name, some in attentions.items() for mode in some)]


@pytest.mark.parametrize(("mode", "attention"), runs(kvpage=[long_trace]), ids=name_of)
@pytest.mark.parametrize("name", FAMILIES)
def test_never_evicting_is_what_dynamic_cache_does(name, mode, attention):
    model = with_attention(family(name), attention)
    skip_what_can_not_be(model, mode)
    windows = mode is not assisted or RELEASE >= (5, 15)  # older sliding layers can't be cropped
    theirs = DynamicCache(config=model.config) if windows else DynamicCache()
    expected = mode(family(name), theirs)  # a model of its own: dynamic RoPE is state of the model
    cache = PagedCompactCache(model, budget=None)
    assert torch.equal(mode(model, cache), expected)
    cache.check()


@pytest.mark.parametrize(("mode", "attention"), runs(kvpage=CORE, static=[long_trace]), ids=name_of)
@pytest.mark.parametrize("name", FAMILIES)
def test_over_budget_each_query_sees_exactly_what_lives(name, mode, attention):
    model, stepwise = with_attention(family(name), attention), 0
    skip_what_can_not_be(model, mode)
    if name == "llama-dynamic":  # a key depends on the length at which it was cached
        stepwise = {long_trace: 30, single_token_prompt: 1}.get(mode)
        if stepwise is None:
            pytest.skip("the oracle repeats the forwards of the plain modes only")
    cache = Watched(model, **SMALL, static=attention == "static")
    handles = [cache.follow(model), all_logits(model)]
    mode(model, cache)
    for handle in handles:
        handle.remove()
    cache.check()
    report = cache.report()
    assert report.budget_bound == (report.full_layers > 0)
    ids, positions, logits = cache.notes
    if report.full_layers:
        twin = family(name)  # dynamic RoPE is state of the model
        check_against_oracle(twin, cache.trace, ids, logits, cache.mask, positions, 2e-4, stepwise)
