"""The report says what happened, and the counterfactual is what scattered eviction would free."""

import json

import pytest
import torch
from tiny import build, generate, prompt

from kvpage import PagedCompactCache


def naive_blocks_held(positions_per_layer, block_size):
    """Blocks held had no token moved: `(one table, mean with a table per layer and head)`."""
    rows = positions_per_layer[0].shape[0]
    union = sum(
        len({p // block_size for layer in positions_per_layer for p in layer[row].flatten().tolist()
             if p >= 0})
        for row in range(rows)
    )  # fmt: skip
    heads = [
        sum(len({p // block_size for p in layer[row, head].tolist() if p >= 0})
            for row in range(rows))
        for layer in positions_per_layer
        for head in range(layer.shape[1])
    ]  # fmt: skip
    return union, sum(heads) / len(heads)


@pytest.mark.parametrize("padded", [False, True])
def test_numbers_are_what_happened(padded):
    model = build("llama-gqa3-tied")
    cache = PagedCompactCache(budget=64, interval=24, recent=16, trace=True)
    ids = prompt(40, batch=2)
    real = torch.ones_like(ids)
    real[0, :19] = 1 - int(padded)
    generate(model, ids * real, cache, 151, attention_mask=real)  # feeds 190
    report = cache.report()
    compactions = [88, 112, 136, 160, 184]
    assert [event.seen_tokens for event in cache.trace] == compactions
    assert report.seen_tokens == 190
    assert report.live_tokens == 64 + 190 - 184
    assert report.evicted_tokens == 120
    assert report.compactions == 5
    assert report.budget_bound
    assert report.batch_size == 2
    assert report.blocks_used == 2 * 5  # ceil(70 / 16)
    assert report.blocks_free == 2 * 6 - 10  # ceil(88 / 16) per row
    assert report.blocks_peak == 12
    assert report.blocks_freed == 2 * 5 * 2  # 88 tokens in 6 blocks down to 64 in 4, each time
    block_bytes = 3 * 2 * 2 * 16 * 8 * 4  # layers, K and V, KV heads, block_size, head_dim, float32
    assert report.bytes_reserved == 12 * block_bytes
    assert report.bytes_in_use == 10 * block_bytes
    assert report.bytes_peak >= report.bytes_reserved
    assert 0 < report.compaction_seconds < 60
    live = [
        torch.cat((kept, appended.expand(2, 2, -1)), dim=-1)
        for kept in cache.trace[-1].positions
        for appended in [torch.arange(184, 190) - torch.tensor([19 * int(padded), 0]).view(2, 1, 1)]
    ]
    tokens = [190 - 19 * int(padded), 190]
    ever = sum(-(-n // 16) for n in tokens)
    union, per_head = naive_blocks_held(live, 16)
    assert report.blocks_freed_without_compaction == ever - union
    assert report.blocks_freed_without_compaction_per_head == pytest.approx(ever - per_head)


def test_a_budget_that_never_bound_is_reported_as_such():
    model = build("llama-gqa3-tied")
    cache = PagedCompactCache()
    generate(model, prompt(20), cache, 30)
    report = cache.report()
    assert not report.budget_bound
    assert (report.compactions, report.blocks_freed, report.evicted_tokens) == (0, 0, 0)
    assert report.blocks_freed_without_compaction == 0
    assert "no, nothing was evicted" in str(report)


def test_a_cache_not_used_yet_can_be_reported():
    report = PagedCompactCache(budget=None).report()
    assert report.seen_tokens == report.blocks_used == report.bytes_reserved == 0
    assert report.model == "none yet"
    str(report)


def test_report_goes_to_json_and_reads_well():
    model = build("llama-gqa3-tied")
    cache = PagedCompactCache(model, budget=64, interval=24, recent=16)
    generate(model, prompt(20), cache, 150)
    report = cache.report()
    assert json.loads(json.dumps(report.to_dict()))["evicted_tokens"] == report.evicted_tokens
    text = str(report)
    for number in (report.seen_tokens, report.live_tokens, report.blocks_freed):
        assert f"{number:,}" in text
    assert "budget=64" in repr(cache) and f"{report.live_tokens} live" in repr(cache)


def test_the_prompt_is_pinned_when_it_fits_and_the_report_says_so():
    model = build("llama-gqa3-tied")
    for length, pinned in ((1, True), (31, True), (32, True), (33, False)):
        cache = PagedCompactCache(budget=64, interval=24, recent=16, trace=True)
        generate(model, prompt(length), cache, 150)
        assert cache.report().prompt_pinned is pinned
        for positions in cache.trace[-1].positions:
            survived = (positions < length).sum(dim=-1) == length
            assert bool(survived.all()) is pinned
