"""Once the budget binds, each query attends to exactly the tokens that live."""

import pytest
import torch
from oracle import check_against_oracle, oracle_logits
from tiny import MODELS, build, cache_name, generate, prompt

from kvpage import PagedCompactCache

SMALL = {"budget": 64, "interval": 24, "recent": 16, "trace": True}


def check(model, cache, ids, logits, real=None):
    check_against_oracle(model, cache.trace, ids[:, :-1], logits, real)


@pytest.mark.parametrize("attention", ["sdpa", "eager", "kvpage"])
@pytest.mark.parametrize("name", MODELS)
def test_evicting_is_attention_over_what_lives(name, attention):
    model = build(name, attention)
    cache = PagedCompactCache(**SMALL)
    ids, logits = generate(model, prompt(40), cache, 150)
    assert len(cache.trace) >= 3
    check(model, cache, ids, logits)
    cache.check()


@pytest.mark.parametrize("scorer", ["centroid", "streaming", "knorm", "random"])
def test_every_scorer_evicts_exactly(scorer):
    model = build("llama-gqa3-tied")
    cache = PagedCompactCache(**SMALL, scorer=scorer)
    ids, logits = generate(model, prompt(40), cache, 150)
    check(model, cache, ids, logits)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 87, 88, 89, 191, 192, 193])
def test_prompts_around_every_boundary_evict_exactly(length):
    model = build("llama-gqa3-tied")
    cache = PagedCompactCache(**SMALL)
    ids, logits = generate(model, prompt(length), cache, 120)
    check(model, cache, ids, logits)


@pytest.mark.parametrize("attention", ["sdpa", "eager", "kvpage"])
def test_rows_of_a_padded_batch_evict_exactly(attention):
    model = build("llama-gqa3-tied", attention)
    ids = prompt(50, batch=3)
    real = torch.ones_like(ids, dtype=torch.bool)
    real[0, :45], real[1, :3] = False, False
    cache = PagedCompactCache(**SMALL)
    ids, logits = generate(model, ids * real, cache, 150, attention_mask=real.long())
    check(model, cache, ids, logits, real)
    for event in cache.trace:
        for positions in event.positions:
            pads = (positions < 0).sum(dim=-1)
            evicted = event.seen_tokens - positions.shape[-1]
            expected = (50 - real.sum(dim=1) - evicted).clamp_min(0)
            assert torch.equal(pads, expected[:, None].expand_as(pads).to(pads.dtype))


def test_forwards_of_several_tokens_evict_exactly():
    model = build("qwen2")
    cache = PagedCompactCache(**SMALL)
    ids = prompt(300)
    logits = []
    with torch.no_grad():
        for part in ids.split([40, 1, 60, 1, 1, 17, 100, 1, 79], dim=1):
            logits.append(model(part, **{cache_name(model): cache}).logits)
    check(model, cache, torch.cat((ids, ids[:, :1]), 1), torch.cat(logits, dim=1))


@pytest.mark.parametrize(("budget", "recent", "sinks"), [(36, 16, 4), (37, 16, 4), (64, 0, 0)])
def test_the_smallest_budgets_evict_exactly(budget, recent, sinks):
    model = build("llama-gqa8-bias")
    cache = PagedCompactCache(budget=budget, recent=recent, sinks=sinks, interval=7, trace=True)
    ids, logits = generate(model, prompt(20), cache, 100)
    check(model, cache, ids, logits)


@pytest.mark.parametrize("block_size", [1, 7, 64])
def test_every_block_size_evicts_exactly(block_size):
    model = build("llama-gqa3-tied")
    cache = PagedCompactCache(**SMALL | {"budget": 90}, block_size=block_size)
    ids, logits = generate(model, prompt(40), cache, 120)
    check(model, cache, ids, logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_evicts_like_its_own_oracle(dtype):
    model = build("llama-gqa3-tied", dtype=dtype)
    cache = PagedCompactCache(**SMALL)
    ids, logits = generate(model, prompt(40), cache, 120)
    expected = oracle_logits(model, ids[:, :-1], cache.trace)[:, -120:].float()
    exact = oracle_logits(model.float(), ids[:, :-1], cache.trace)[:, -120:]
    ours, theirs = (logits - exact).abs().mean(), (expected - exact).abs().mean()
    assert ours < 2 * theirs


def test_live_tokens_and_blocks_stay_within_their_bounds():
    model = build("llama-gqa3-tied")
    cache = PagedCompactCache(**SMALL)
    with torch.no_grad():
        model(prompt(200), **{cache_name(model): cache})
        for token in prompt(150, seed=1).split(1, dim=1):
            model(token, **{cache_name(model): cache})
            assert cache.ledger.live <= 64 + 24
            assert all(len(table) <= 6 for table in cache.ledger.tables)  # ceil(88 / 16)
            assert cache.get_seq_length() == cache.ledger.seen
            cache.check()


def test_a_rows_evictions_do_not_depend_on_its_neighbours():
    model = build("llama-gqa3-tied")
    ids = prompt(60, batch=4)
    together = PagedCompactCache(**SMALL)
    generate(model, ids, together, 1)
    tail = prompt(100, batch=4, seed=3)
    alone = PagedCompactCache(**SMALL)
    generate(model, ids[2:3], alone, 1)
    with torch.no_grad():
        for column in range(100):
            model(tail[:, column : column + 1], **{cache_name(model): together})
            model(tail[2:3, column : column + 1], **{cache_name(model): alone})
    assert len(alone.trace) == len(together.trace) >= 3
    for one, many in zip(alone.trace, together.trace, strict=True):
        for a, b in zip(one.positions, many.positions, strict=True):
            assert torch.equal(a[0], b[2])
