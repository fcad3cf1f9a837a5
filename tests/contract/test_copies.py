"""Copies share blocks, diverge on write, and give back what only they held."""

import copy
import gc
import time

import pytest
import torch
from oracle import check_against_oracle
from tiny import build, cache_name, generate, prompt
from transformers import DynamicCache

from kvpage import PagedCompactCache

SMALL = {"budget": 64, "interval": 24, "recent": 16}


@pytest.fixture(autouse=True, params=["sdpa", "kvpage"])
def attention(request, monkeypatch):
    """What attends in every model built here."""
    monkeypatch.setattr("tiny.DEFAULT_ATTENTION", request.param)
    return request.param


@torch.no_grad()
def feed(model, ids, cache, one_by_one=False):
    """Logits of `ids` fed at once, or token by token."""
    parts = ids.split(1, dim=1) if one_by_one else [ids]
    return torch.cat([model(part, **{cache_name(model): cache}).logits for part in parts], dim=1)


@pytest.mark.parametrize("make", ["deepcopy", "fork"])
@pytest.mark.parametrize("budget", [None, 2048])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 50])
def test_copies_continue_like_copies_of_dynamic_cache(make, budget, length):
    model = build("llama-gqa3-tied")
    ours, theirs = PagedCompactCache(budget=budget), DynamicCache()
    for cache in (ours, theirs):
        feed(model, prompt(length, batch=2), cache)
    copies = ours.fork(3) if make == "fork" else [copy.deepcopy(ours) for _ in range(3)]
    pairs = [(cache, copy.deepcopy(theirs)) for cache in (ours, *copies)]
    for turn in range(40):
        for i, (cache, reference) in enumerate(pairs):
            token = prompt(1, batch=2, seed=100 * i + turn)
            expected = feed(model, token, reference)
            torch.testing.assert_close(feed(model, token, cache), expected, atol=1e-5, rtol=1e-5)
    check_family([ours, *copies])


def check_family(caches):
    """The pool the caches share counts exactly what their tables hold."""
    for cache in caches:
        cache.check()
    pool = caches[0].ledger.pool
    assert all(cache.ledger.pool is pool for cache in caches)
    pool.check([table for cache in caches for table in cache.ledger.tables])


@pytest.mark.parametrize("batch", [1, 3])
def test_copies_evict_each_on_its_own_and_exactly(batch):
    model = build("qwen3")
    cache = PagedCompactCache(**SMALL, trace=True)
    ids = prompt(100, batch=batch)
    feed(model, ids[:, :40], cache)
    feed(model, ids[:, 40:], cache, one_by_one=True)
    assert cache.report().compactions > 0
    family = [cache, *cache.fork(2)]
    fed, logits = [ids] * 3, [[] for _ in family]
    for turn in range(120):
        for i, member in enumerate(family):
            token = prompt(1, batch=batch, seed=1000 * i + turn)
            fed[i] = torch.cat((fed[i], token), dim=1)
            logits[i].append(feed(model, token, member))
        if turn % 10 == 0:
            check_family(family)
    for i, member in enumerate(family):
        check_against_oracle(model, member.trace, fed[i], torch.cat(logits[i], dim=1))


def test_the_original_is_as_if_it_had_no_copies():
    model = build("llama-gqa3-tied")
    alone, forked = PagedCompactCache(**SMALL), PagedCompactCache(**SMALL)
    ids = prompt(250)
    expected = [feed(model, ids[:, :80], alone), feed(model, ids[:, 80:], alone, one_by_one=True)]
    got = [feed(model, ids[:, :80], forked)]
    copies = forked.fork(2)
    for member in copies:
        feed(model, prompt(100, seed=5), member, one_by_one=True)
    got.append(feed(model, ids[:, 80:], forked, one_by_one=True))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("end", ["dropped", "reset"])
def test_an_ended_copy_gives_back_what_only_it_held(end):
    model = build("llama-gqa3-tied")
    cache = PagedCompactCache(**SMALL)
    feed(model, prompt(60), cache)
    pool, used = cache.ledger.pool, cache.ledger.pool.num_used_blocks
    (twin,) = cache.fork(1)
    assert pool.num_used_blocks == used
    feed(model, prompt(20, seed=1), twin, one_by_one=True)
    assert pool.num_used_blocks == used + 2  # 60 % 16 tokens copied, and one block more
    if end == "dropped":
        del twin
        gc.collect()
    else:
        twin.reset()
        assert twin.ledger.pool is not pool and twin.report().bytes_reserved == 0
    assert pool.num_used_blocks == used
    pool.check(cache.ledger.tables)


def test_a_copy_outlives_the_original():
    model = build("llama-gqa3-tied")
    cache = PagedCompactCache(**SMALL)
    feed(model, prompt(60), cache)
    (twin,) = cache.fork(1)
    reference = copy.deepcopy(cache)
    del cache
    gc.collect()
    a = feed(model, prompt(80, seed=1), twin, one_by_one=True)
    b = feed(model, prompt(80, seed=1), reference, one_by_one=True)
    torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    del reference
    gc.collect()
    feed(model, prompt(80, seed=2), twin, one_by_one=True)
    twin.check()
    assert twin.report().bytes_reserved == twin.ledger.bound * 3 * 2 * 2 * 16 * 8 * 4


def test_a_fork_of_a_long_cache_is_quick_and_copies_one_block_a_row():
    model = build("llama-gqa3-tied")
    cache = PagedCompactCache(model, budget=None)
    feed(model, prompt(4090), cache)
    pool, used = cache.ledger.pool, cache.ledger.pool.num_used_blocks
    times = []
    for _ in range(5):
        started = time.perf_counter()
        family = cache.fork(8)
        times.append(time.perf_counter() - started)
    print(f"fork into 8: {sorted(times)[2] * 1e3:.2f} ms")
    assert pool.num_used_blocks == used
    for member in family:
        feed(model, prompt(1), member)
    assert pool.num_used_blocks == used + 8
    assert all(len(member.ledger.tables[0]) == used for member in family)


@pytest.mark.parametrize("budget", [None, 64])
def test_batch_operations_equal_recomputation_row_by_row(budget):
    """`batch_repeat_interleave`, `batch_select_indices` (int and bool), `reorder_cache`."""
    model = build("llama-gqa3-tied")
    cache = PagedCompactCache(model, **SMALL | {"budget": budget}, trace=True)
    fed = prompt(50, batch=3)
    logits = feed(model, fed, cache)
    generator = torch.Generator().manual_seed(0)

    def select(rows):
        nonlocal fed, logits
        fed, logits = fed[rows], logits[rows]

    for turn in range(150):
        batch = fed.shape[0]
        if turn % 40 == 5:
            cache.batch_repeat_interleave(2)
            select(torch.arange(batch).repeat_interleave(2))
        elif turn % 40 == 20:
            keep = torch.rand(batch, generator=generator) < 0.6
            keep[0] = True
            cache.batch_select_indices(keep if turn % 80 == 20 else keep.nonzero()[:, 0])
            select(keep)
        elif turn % 3 == 0:
            rows = torch.randint(batch, (batch,), generator=generator)
            cache.reorder_cache(rows)
            select(rows)
        token = prompt(1, batch=fed.shape[0], seed=turn)
        fed, new = torch.cat((fed, token), dim=1), feed(model, token, cache)
        logits = torch.cat((logits, new), dim=1)
        cache.check()
    if budget is None:
        reference = feed(model, fed, DynamicCache())
        torch.testing.assert_close(logits, reference, atol=1e-4, rtol=1e-4)
    else:
        check_against_oracle(model, cache.trace, fed, logits)


def test_statistics_follow_their_rows():
    model = build("llama-gqa3-tied")
    cache = PagedCompactCache(model, **SMALL)
    feed(model, prompt(30, batch=3), cache)
    before = cache.statistics(1)
    cache.reorder_cache(torch.tensor([2, 2, 0]))
    after = cache.statistics(1)
    for name in ("query_mean", "query_magnitude", "key_mean", "key_magnitude", "count"):
        assert torch.equal(getattr(after, name), getattr(before, name)[[2, 2, 0]])


@pytest.mark.parametrize(
    ("method", "argument", "error", "name"),
    [
        ("reorder_cache", torch.tensor([0, 3]), ValueError, "beam_idx"),
        ("reorder_cache", torch.tensor([0]), ValueError, "beam_idx"),
        ("reorder_cache", [0, 1], TypeError, "beam_idx"),
        ("batch_select_indices", torch.tensor([-3]), ValueError, "indices"),
        ("batch_select_indices", torch.tensor([], dtype=torch.long), ValueError, "indices"),
        ("batch_repeat_interleave", 0, ValueError, "repeats"),
        ("batch_repeat_interleave", 1.5, ValueError, "repeats"),
        ("fork", 0, ValueError, "n:"),
        ("crop", -51, ValueError, "tokens_to_remove"),
        ("crop", 1.5, TypeError, "tokens_to_remove"),
    ],
)
def test_bad_arguments_are_named_and_change_nothing(method, argument, error, name):
    model = build("llama-gqa3-tied")
    cache = PagedCompactCache(model, **SMALL)
    feed(model, prompt(50, batch=2), cache)
    before = [layer.keys.clone() for layer in cache.layers]
    with pytest.raises(error, match=name):
        getattr(cache, method)(argument)
    assert all(torch.equal(a, layer.keys) for a, layer in zip(before, cache.layers, strict=True))
    cache.check()


def test_operations_on_an_empty_cache_do_nothing():
    model = build("llama-gqa3-tied")
    cache = PagedCompactCache(model, **SMALL)
    cache.reorder_cache(torch.tensor([0]))
    cache.batch_repeat_interleave(3)
    cache.crop(0)
    twin = copy.deepcopy(cache)
    for member in (cache, twin):
        feed(model, prompt(20), member)
        member.check()


def test_a_copy_made_before_the_first_forward_meets_its_own_model():
    cache = PagedCompactCache(**SMALL)
    twin = copy.deepcopy(cache)
    for name, member in (("qwen3", twin), ("llama-gqa3-tied", cache)):
        model = build(name)
        generate(model, prompt(20), member, 100)
        assert member.report().compactions > 0
