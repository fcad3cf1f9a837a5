"""What every scorer computes, against its formula written out in float64, one head at a time."""

import math

import pytest
import torch
from families import FAMILIES, family
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import generate, prompt
from torch import nn

from kvpage import PagedCompactCache
from kvpage.centroids import LayerStatistics, Vectors
from kvpage.rope import Rope, RopeSource
from kvpage.scorers import SCORERS, resolve_scorer
from kvpage.scoring import AHEAD, LiveTokens
from kvpage.summaries import Prior, Recent, Sample, Statistics

HEADS, KV_HEADS, DIM, LIVE, NEXT, SCALE = 4, 2, 12, 40, 90, 0.3
ROPES = {
    "half": Rope(10_000.0 ** (-torch.arange(6, dtype=torch.float64) / 6)),
    "interleaved": Rope(10_000.0 ** (-torch.arange(6, dtype=torch.float64) / 6), 1.3, True),
    "partial": Rope(10_000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)),
    "none": Rope(torch.empty(0, dtype=torch.float64)),
}


def reversed_bits(position):
    return int(f"{position:032b}"[::-1], 2)


# The sample.


def collector(batch, **options):
    module = nn.Module()
    source = RopeSource(lambda module: ROPES["half"], module, fixed=True)
    return LayerStatistics(batch, HEADS, KV_HEADS, DIM, source, **options)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_sample_is_the_tokens_of_lowest_reversed_position_however_they_came(data):
    """And of a row's own tokens alone: pads before it change nothing."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    size = data.draw(st.integers(1, 40))
    total, pads = data.draw(st.integers(1, 700)), data.draw(st.integers(0, 50))
    queries = torch.randn(2, total, HEADS * DIM, generator=generator)
    keys = torch.randn(2, total, KV_HEADS * DIM, generator=generator)
    pads = min(pads, total - 1)
    real = torch.ones(2, total, dtype=torch.bool)
    real[1, :pads] = False
    collected, start = collector(2, sample_tokens=size), 0
    while start < total:
        stop = min(total, start + data.draw(st.sampled_from([1, 3, 17, 128, 300])))
        flags = real[:, start:stop] if pads else None
        collected.add(Vectors(queries[:, start:stop], keys[:, start:stop], flags))
        if data.draw(st.booleans()):
            collected.read()
        start = stop
    if data.draw(st.booleans()) and total > 1:  # a draft that is rejected was never there
        collected.add(Vectors(torch.full_like(queries[:, :2], math.nan), keys[:, :2], None))
        collected.crop(2)
    sample = collected.read().sample
    for row, first in ((0, 0), (1, pads)):
        positions = sorted(range(total - first), key=reversed_bits)[:size]
        expected = queries[row, first:][positions].view(-1, HEADS, DIM)
        assert sample.held[row].sum() == len(positions)
        assert torch.equal(sample.queries[row, : len(positions)], expected)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_the_latest_queries_are_handed_out_in_order_whenever_they_were_summed(data):
    """Found: what was summed was forgotten, so a window had 8 of 64 queries, or none."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    wanted, total = data.draw(st.integers(1, 150)), data.draw(st.integers(1, 600))
    queries = torch.randn(2, total, HEADS * DIM, generator=generator)
    keys = torch.randn(2, total, KV_HEADS * DIM, generator=generator)
    real = torch.ones(2, total, dtype=torch.bool)
    real[1, : data.draw(st.integers(0, total - 1))] = False
    collected, start = collector(2, recent_tokens=wanted), 0
    while start < total:
        stop = min(total, start + data.draw(st.sampled_from([1, 5, 100, 128, 300])))
        flags = None if bool(real[:, start:stop].all()) else real[:, start:stop]
        collected.add(Vectors(queries[:, start:stop], keys[:, start:stop], flags))
        start = stop
        happens = data.draw(st.sampled_from(["read", "fork", "rows", "draft", "nothing"]))
        if happens == "read":
            collected.read()
        elif happens == "fork":
            collected = collected.fork()
        elif happens == "rows":
            swapped = torch.tensor([1, 0])
            collected.select_rows(swapped)
            queries, keys, real = queries[swapped], keys[swapped], real[swapped]
        elif happens == "draft":
            collected.add(Vectors(torch.full_like(queries[:, :1], math.nan), keys[:, :1], None))
            collected.crop(1)
    recent = collected.read().recent
    assert torch.equal(recent.queries.flatten(2), queries[:, -wanted:])
    flags = torch.ones(2, recent.queries.shape[1]).bool() if recent.real is None else recent.real
    assert torch.equal(flags, real[:, -wanted:])


@pytest.mark.parametrize("name", SCORERS)
def test_every_scorer_goes_through_beams_that_share_and_change_rows(name):
    cache = PagedCompactCache(budget=48, interval=7, recent=16, scorer=name)
    model = family("llama")
    generate(model, prompt(70, batch=2), cache, 30, num_beams=2)
    assert cache.report().compactions > 3


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("scorer", ["sampled", "window"])
def test_what_is_kept_of_a_short_text_is_all_of_its_queries_in_every_family(name, scorer):
    """Then their mean is the mean of all, which is summed on another way."""
    model, cache = family(name), PagedCompactCache(budget=200, scorer=scorer)
    generate(model, prompt(30, batch=2), cache, 20)
    for layer_idx in cache.full_layers:
        statistics = cache.statistics(layer_idx)
        kept = statistics.sample if scorer == "sampled" else statistics.recent
        assert kept.queries.shape[1] == 49
        mean = kept.queries.double().mean(dim=1)
        torch.testing.assert_close(mean, statistics.query_mean.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_window_and_redundancy_compact_in_every_family(name):
    model = family(name)
    for scorer in ("window", "redundancy"):
        cache = PagedCompactCache(budget=48, interval=16, recent=16, scorer=scorer)
        generate(model, prompt(30, batch=2), cache, 70)
        assert cache.report().compactions > 1 or not cache.full_layers
        cache.check()


@pytest.mark.parametrize("online", [True, False])
def test_calibrated_means_count_as_the_tokens_they_are_said_to_be(online):
    queries, keys = torch.randn(2, 30, HEADS * DIM), torch.randn(2, 30, KV_HEADS * DIM)
    weight = torch.tensor([100.0, 0, 100, 100]).double()  # nothing is known of head 1
    own = torch.ones(HEADS) if online else (weight == 0).float()
    mean, magnitude = torch.randn(HEADS, DIM).double(), torch.rand(HEADS, 6).double()
    nothing = torch.zeros(KV_HEADS, DIM).double(), torch.zeros(KV_HEADS, 6).double()
    unknown = torch.zeros(KV_HEADS), torch.ones(KV_HEADS)
    prior = Prior(mean, magnitude, *nothing, weight, unknown[0], own, unknown[1])
    known = collector(2, prior=prior)
    known.add(Vectors(queries, keys, None))
    found, alone = known.read(), known.read_own()
    run = queries.view(2, 30, HEADS, DIM).double().mean(dim=1)
    torch.testing.assert_close(alone.query_mean.double(), run, atol=1e-6, rtol=1e-6)
    expected = (30 * run + 100 * mean) / 130 if online else mean.expand(2, -1, -1).clone()
    expected[:, 1] = run[:, 1]
    torch.testing.assert_close(found.query_mean.double(), expected, atol=1e-6, rtol=1e-6)
    assert torch.equal(found.key_mean, alone.key_mean)


# The scorers.


def rotate(vectors, positions, rope):
    """`[n, D]` at `positions` `[n]`, float64."""
    angle = torch.as_tensor(positions).double()[:, None] * rope.inv_freq
    re, im, rest = rope.parts(vectors.double())
    cos, sin = angle.cos() * rope.attention_scaling, angle.sin() * rope.attention_scaling
    return rope.joined(re * cos - im * sin, re * sin + im * cos, rest)


def case(rope, padded=False):
    """Two rows, the second with pads or fewer queries."""
    torch.manual_seed(3)
    positions = torch.stack(
        [torch.randperm(NEXT - 4)[:LIVE].sort().values for _ in range(2 * KV_HEADS)]
    )
    positions = positions.view(2, KV_HEADS, LIVE).int()
    if padded:
        positions[1, :, :7] = -1
    keys = torch.randn(2, KV_HEADS, LIVE, DIM)
    values = torch.randn(2, KV_HEADS, LIVE, 5)
    queries = torch.randn(2, 30, HEADS, DIM) + torch.randn(HEADS, DIM)
    priority = torch.arange(30).repeat(2, 1)
    if padded:
        priority[1, 22:] = 1 << 32
        queries[1, 22:] = math.nan
    sample = Sample(queries, priority)
    counts = sample.held.sum(dim=1)
    mean = torch.stack([queries[row, : counts[row]].mean(dim=0) for row in range(2)])
    real = None
    if padded:
        real = torch.ones(2, 16, dtype=torch.bool)
        real[1, :3] = False
    recent = Recent(torch.randn(2, 16, HEADS, DIM), real)
    blank = torch.zeros(2, KV_HEADS, DIM)
    statistics = Statistics(
        mean, rope.magnitude(mean), blank, blank, counts, rope, SCALE, sample, recent
    )
    next_position = torch.tensor([NEXT, NEXT - 4])
    may_go = positions >= 3
    return LiveTokens(0, keys, values, positions, may_go, next_position, statistics, padded)


def naive_softmax(logits, visible):
    exponentials = [math.exp(x) if seen else 0.0 for x, seen in zip(logits, visible, strict=True)]
    return torch.tensor(exponentials, dtype=torch.float64) / sum(exponentials)


def seen_by(tokens, row, head, position=10**9):
    at = tokens.positions[row, head].tolist()
    return [0 <= p <= position for p in at]


def naive_sampled(tokens, row, kv_head):
    statistics, total = tokens.statistics, torch.zeros(LIVE).double()
    count = int(statistics.sample.held[row].sum())
    for head in (2 * kv_head, 2 * kv_head + 1):
        for j in range(count):
            query = statistics.sample.queries[row, j, head][None]
            ahead = int(tokens.next_position[row]) + AHEAD
            query = rotate(query, [ahead], statistics.rope)[0]
            logits = SCALE * (tokens.keys[row, kv_head].double() @ query)
            total += naive_softmax(logits.tolist(), seen_by(tokens, row, kv_head)) / count / 2
    age = int(tokens.next_position[row]) - tokens.positions[row, kv_head].double()
    return total * tokens.values[row, kv_head].double().norm(dim=-1) / age.sqrt()


def naive_expected_attention(tokens, row, kv_head):
    statistics, total = tokens.statistics, torch.zeros(LIVE).double()
    rope, count = statistics.rope, int(statistics.sample.held[row].sum())
    ahead = [int(tokens.next_position[row]) + offset for offset in range(1, 513)]
    basis = torch.eye(DIM).double()
    turns = torch.stack([rotate(basis, [p] * DIM, rope) for p in ahead]).mean(dim=0)
    keys = tokens.keys[row, kv_head].double()
    for head in (2 * kv_head, 2 * kv_head + 1):
        queries = statistics.sample.queries[row, :count, head].double()
        mean, apart = queries.mean(dim=0), queries - queries.mean(dim=0)
        covariance = turns.T @ (apart.T @ apart / count) @ turns
        logits = SCALE * keys @ (mean @ turns)
        logits += SCALE**2 / 2 * torch.stack([k @ covariance @ k for k in keys])
        total += naive_softmax(logits.tolist(), seen_by(tokens, row, kv_head)) / 2
    return total * tokens.values[row, kv_head].double().norm(dim=-1)


def naive_recent(tokens, row, kv_head):
    queries, real = tokens.statistics.recent
    real = torch.ones(2, 16, dtype=torch.bool) if real is None else real
    total, count = torch.zeros(LIVE).double(), int(real[row].sum())
    position = int(tokens.next_position[row]) - count
    for j in range(16):
        if not real[row, j]:
            continue
        for head in (2 * kv_head, 2 * kv_head + 1):
            query = rotate(queries[row, j, head][None], [position], tokens.statistics.rope)[0]
            logits = SCALE * (tokens.keys[row, kv_head].double() @ query)
            seen = seen_by(tokens, row, kv_head, position)
            if any(seen):
                total += naive_softmax(logits.tolist(), seen) / count / 2
        position += 1
    return total


def smoothed(values, width, how):
    half, out = width // 2, []
    for i in range(len(values)):
        out.append(how([values[j] for j in range(i - half, i + half + 1) if 0 <= j < len(values)]))
    return torch.stack(out)


def naive_window(tokens, row, kv_head):
    attention = naive_recent(tokens, row, kv_head)
    return smoothed(attention, 5, lambda near: sum(near) / 5)


def unit_keys(tokens, row, kv_head):
    keys = tokens.keys[row, kv_head].double()
    seen = torch.tensor(seen_by(tokens, row, kv_head))[:, None]
    return torch.where(seen, keys / keys.norm(dim=-1, keepdim=True), 0.0)


def naive_redundancy(tokens, row, kv_head):
    keys = unit_keys(tokens, row, kv_head)
    similarity = keys @ keys.T
    similarity -= torch.diag(similarity.diagonal())
    mean = similarity.sum(dim=1) / LIVE
    redundant = naive_softmax(mean.tolist(), seen_by(tokens, row, kv_head))
    attention = smoothed(naive_recent(tokens, row, kv_head), 7, max)
    return 0.1 * attention - 0.9 * redundant


def naive_keydiff(tokens, row, kv_head):
    keys = unit_keys(tokens, row, kv_head)
    anchor = keys.sum(dim=0)
    return -(keys @ (anchor / anchor.norm()))


NAIVE = {
    "sampled": naive_sampled,
    "expected_attention": naive_expected_attention,
    "window": naive_window,
    "redundancy": naive_redundancy,
    "keydiff": naive_keydiff,
}


@pytest.mark.parametrize("padded", [False, True], ids=["", "padded"])
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("name", NAIVE)
def test_scores_equal_the_formula(name, rope, padded):
    tokens = case(ROPES[rope], padded)
    scores = resolve_scorer(name)(tokens)
    assert scores.shape == (2, KV_HEADS, LIVE) and scores.dtype == torch.float32
    for row in range(2):
        for kv_head in range(KV_HEADS):
            expected = NAIVE[name](tokens, row, kv_head)
            seen = torch.tensor(seen_by(tokens, row, kv_head))
            got = scores[row, kv_head].double()[seen]
            torch.testing.assert_close(got, expected[seen], atol=2e-6, rtol=2e-5)


def test_a_calibrated_sample_counts_as_many_tokens():
    """All of one weight: as if the run had had those queries, in that share."""
    tokens = case(ROPES["half"])
    known, share = torch.randn(10, HEADS, DIM), torch.tensor([0.25, 1.0])
    both = torch.cat((tokens.statistics.sample.queries, known.expand(2, -1, -1, -1)), dim=1)
    vars(tokens.statistics)["prior_sample"] = (known, share)
    got = resolve_scorer("sampled")(tokens)
    parts = []
    for queries in (both[:, :30], both[:, 30:]):
        sample = Sample(queries, torch.zeros(queries.shape[:2], dtype=torch.int64))
        vars(tokens.statistics).update(sample=sample, prior_sample=None)
        parts.append(resolve_scorer("sampled")(tokens))
    expected = (1 - share[:, None, None]) * parts[0] + share[:, None, None] * parts[1]
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)


def test_every_scorer_by_name_has_a_test_of_its_formula():
    elsewhere = {"centroid", "streaming", "knorm", "random"}  # test_ranking, test_cache_level
    assert set(SCORERS) == set(NAIVE) | elsewhere
