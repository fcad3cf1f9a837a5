"""The cache driven by `update` alone: bounds, order, protection, ranking, memory, reset."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from helpers import SMALL, Text, assert_same, live_positions, small_cache, snapshot
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from kvpage import LiveTokens, PagedCompactCache
from kvpage.compaction import Protection, select
from kvpage.positions import PAD

BUDGET, INTERVAL, BLOCK = SMALL["budget"], SMALL["interval"], SMALL["block_size"]
SINKS, RECENT = SMALL["sinks"], SMALL["recent"]
BOUND = BUDGET + INTERVAL


def first_dimension(tokens: LiveTokens) -> Tensor:
    """A user's scorer."""
    return tokens.keys[..., 0]


first_dimension.needs_statistics = False  # type: ignore[attr-defined]

SCORERS = ["streaming", "knorm", "random", first_dimension]
every_scorer = pytest.mark.parametrize("scorer", SCORERS, ids=lambda s: getattr(s, "__name__", s))


def decode(cache: PagedCompactCache, text: Text, tokens: int) -> None:
    for _ in range(tokens):
        text.feed(cache, 1)


# Memory.


def test_twenty_thousand_steps_run_in_flat_blocks_and_bytes() -> None:
    steps, prompt = 20_000, 100
    text, cache = Text(prompt + steps), small_cache()
    text.feed(cache, prompt)
    pool_of, memory = {}, set()
    for step in range(1, steps + 1):
        text.feed(cache, 1)
        ledger = cache.ledger
        assert ledger.live <= BOUND
        if ledger.seen <= 2 * BOUND:
            continue
        memory.add(
            tuple((x.storage.bytes_reserved, x.storage.keys.data_ptr()) for x in cache.layers)
        )
        pool = (ledger.pool.num_used_blocks, ledger.pool.num_free_blocks)
        assert pool_of.setdefault(ledger.live, pool) == pool
        if step % 997 == 0:
            cache.check()
            text.check_contents(cache)
            assert cache.report().bytes_reserved == sum(size for size, _ in next(iter(memory)))
    assert len(memory) == 1, "a storage was replaced or changed its size"
    assert len(pool_of) == INTERVAL, "live tokens run through one interval over and over"
    assert {used + free for used, free in pool_of.values()} == {BOUND // BLOCK}
    report = cache.report()
    bytes_per_block = 2 * 2 * 2 * BLOCK * 8 * 4  # layers, K and V, heads, slots, head_dim, float32
    assert report.bytes_reserved == bytes_per_block * BOUND // BLOCK
    assert report.bytes_in_use == bytes_per_block * report.blocks_used
    assert report.seen_tokens == prompt + steps
    assert report.compactions == 1 + (steps - 1) // INTERVAL
    assert report.budget_bound


@pytest.mark.parametrize("scorer", ["knorm", "streaming"])
@pytest.mark.parametrize("batch", [1, 3])
def test_storage_shrinks_to_the_bound_after_a_long_prompt(scorer: str, batch: int) -> None:
    text, cache = Text(20 * BUDGET + 1, batch=batch), small_cache(scorer=scorer)
    text.feed(cache, 20 * BUDGET)
    long = cache.report()
    assert long.live_tokens == 20 * BUDGET and not long.budget_bound
    old = [weakref.ref(layer.storage.keys) for layer in cache.layers]
    text.feed(cache, 1)
    report = cache.report()
    per_block = long.bytes_reserved // (long.blocks_used + long.blocks_free)
    assert report.bytes_reserved == per_block * batch * BOUND // BLOCK
    assert report.bytes_peak >= long.bytes_reserved
    assert report.blocks_peak == batch * 20 * BUDGET // BLOCK
    assert report.blocks_freed == batch * (20 - 1) * BUDGET // BLOCK
    assert all(ref() is None for ref in old), "the storage of the long prompt is still held"
    cache.check()
    text.check_contents(cache)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scorer", ["knorm", "streaming", "random"])
def test_compaction_at_the_default_budget_needs_less_than_a_mebibyte_of_scratch(
    scorer: str, dtype: torch.dtype
) -> None:
    """Found: `knorm` made a float32 copy of all bfloat16 keys (8.6 MiB here)."""
    cache = PagedCompactCache(scorer=scorer)
    states = torch.randn(1, 8, 2048 + 128 + 1, 128).to(dtype)
    for part in states[:, :, :-1].split(128, dim=2):
        cache.update(part, part, 0)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        cache.update(states[:, :, -1:], states[:, :, -1:], 0)
    assert cache.report().compactions == 1
    events = [e for e in measured.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    assert 0 < max(accumulate(changes)) < 2**20


def test_report_counts_the_blocks_that_came_free() -> None:
    text, cache, freed = Text(2000, batch=2), small_cache(), 0
    for count in [30, 50, 1, 1, 200, 1, 7, *[1] * 100, 40, 40, 3, *[1] * 50]:
        live = cache.ledger.live
        text.feed(cache, count)
        kept = cache.ledger.live - count
        freed += 2 * (math.ceil(live / BLOCK) - math.ceil(kept / BLOCK))
    report = cache.report()
    assert report.blocks_freed == freed > 0
    assert report.evicted_tokens == report.seen_tokens - report.live_tokens > 0
    assert report.blocks_used == 2 * math.ceil(report.live_tokens / BLOCK)
    assert report.blocks_used + report.blocks_free == cache.ledger.pool.num_blocks


@every_scorer
@pytest.mark.parametrize("prompt", [BLOCK, 3 * BUDGET])
def test_report_knows_what_evicting_without_compaction_would_have_freed(
    scorer: str | Callable[..., Tensor], prompt: int
) -> None:
    text, cache = Text(prompt + 400, batch=3), small_cache(scorer=scorer)
    text.feed(cache, prompt)
    decode(cache, text, 400)
    ever, any_head, per_head = 3 * math.ceil((prompt + 400) / BLOCK), 0, []
    for row in range(3):
        heads = [
            {position // BLOCK for position in live_positions(cache, layer)[row, head].tolist()}
            for layer in range(2)
            for head in range(2)
        ]
        any_head += len(set.union(*heads))
        per_head.append(sum(map(len, heads)) / len(heads))
    report = cache.report()
    assert report.blocks_freed_without_compaction == ever - any_head
    assert report.blocks_freed_without_compaction_per_head == pytest.approx(ever - sum(per_head))


def test_report_before_the_budget_binds_says_so() -> None:
    text, cache = Text(BOUND + 1), small_cache()
    text.feed(cache, BLOCK)
    decode(cache, text, BOUND - BLOCK)
    report = cache.report()
    assert not report.budget_bound and report.compactions == report.blocks_freed == 0
    assert "no, nothing was evicted" in str(report)
    text.feed(cache, 1)
    report = cache.report()
    assert report.budget_bound and report.compactions == 1
    assert report.to_dict()["evicted_tokens"] == BOUND - BUDGET


# What lives.


@every_scorer
@pytest.mark.parametrize("prompt", [1, 2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 95, 96, 97, 192])
def test_sinks_and_recent_tokens_live_and_bounds_hold(
    scorer: str | Callable[..., Tensor], prompt: int
) -> None:
    text, cache = Text(prompt + 2 * BOUND), small_cache(scorer=scorer, trace=True)
    text.feed(cache, prompt)
    for _ in range(2 * BOUND):
        text.feed(cache, 1)
        assert cache.ledger.live <= BOUND
        assert len(cache.ledger.tables[0]) <= BOUND // BLOCK
    assert cache.trace is not None and len(cache.trace) >= 4
    for traced in cache.trace:
        assert len(traced.positions) == 2
        for positions in traced.positions:
            assert positions.shape == (1, 2, BUDGET)
            assert (positions.diff(dim=-1) > 0).all(), "token order was lost"
            latest = torch.arange(traced.seen_tokens - RECENT, traced.seen_tokens)
            assert torch.equal(positions[..., :SINKS], torch.arange(SINKS).expand(1, 2, -1))
            assert torch.equal(positions[..., -RECENT:], latest.expand(1, 2, -1))
    cache.check()
    text.check_contents(cache)


@pytest.mark.parametrize("prompt", [5, 65, 200])
def test_trace_and_survivors_say_what_is_in_the_storage(prompt: int) -> None:
    text, cache = Text(prompt + 300, batch=2), small_cache(trace=True)
    text.feed(cache, prompt)
    for _ in range(300):
        text.feed(cache, 1)
        for i, layer in enumerate(cache.layers):
            if layer.survivors is None:
                continue
            assert cache.trace is not None
            assert torch.equal(layer.survivors, cache.trace[-1].positions[i])
            appended = torch.arange(cache.trace[-1].seen_tokens, cache.get_seq_length())
            expected = torch.cat((layer.survivors, appended.expand(2, 2, -1)), dim=-1)
            assert torch.equal(live_positions(cache, i), expected)
    assert cache.ledger.compactions >= 3


@pytest.mark.parametrize("budget", [SINKS + RECENT + BLOCK, SINKS + RECENT + BLOCK + 1])
@pytest.mark.parametrize("prompt", [1, 35, 36, 37, 100])
def test_smallest_budget_keeps_sinks_and_recent(budget: int, prompt: int) -> None:
    text, cache = Text(prompt + 50), small_cache(budget=budget, interval=1)
    text.feed(cache, prompt)
    for _ in range(50):
        text.feed(cache, 1)
        live = live_positions(cache, 0)
        seen = cache.get_seq_length()
        kept = min(seen, SINKS)
        assert torch.equal(live[..., :kept], torch.arange(kept).expand(1, 2, -1))
        latest = torch.arange(max(0, seen - RECENT), seen)
        assert torch.equal(live[..., -len(latest) :], latest.expand(1, 2, -1))


@pytest.mark.parametrize("protected", [{"sinks": 0}, {"recent": 0}, {"sinks": 0, "recent": 0}])
def test_nothing_is_protected_when_nothing_is_to_be(protected: dict[str, int]) -> None:
    text = Text(300)
    text.keys[:, :, :, :4] *= 100  # the lowest scores under knorm
    text.keys[:, :, :, 90:] *= 100
    cache = small_cache(trace=True, **protected)
    text.feed(cache, 96)
    text.feed(cache, 1)
    assert cache.trace is not None
    for positions in cache.trace[0].positions:
        assert ((positions < 4).any() == (protected.get("sinks", SINKS) > 0)).all()
        assert ((positions >= 90).any() == (protected.get("recent", RECENT) > 0)).all()


def test_pinned_spans_live_on() -> None:
    text, cache = Text(600), small_cache(scorer="streaming", trace=True)
    text.feed(cache, 50)
    cache.pin(20, 29)
    decode(cache, text, 100)
    late = cache.get_seq_length() - 3
    cache.pin(late, late + 5)
    decode(cache, text, 400)
    assert cache.trace is not None and len(cache.trace) > 10
    for traced in cache.trace:
        for positions in traced.positions:
            for head in positions[0].tolist():
                assert set(range(20, 29)) <= set(head)
                if traced.seen_tokens >= late + 5:
                    assert set(range(late, late + 5)) <= set(head)
                assert len(head) == BUDGET


@pytest.mark.parametrize("pin_prompt", [True, False, "auto"])
@pytest.mark.parametrize("prompt", [1, 3, 5, 31, 32, 33, 47, 48])
def test_prompt_is_pinned_as_asked(pin_prompt: bool | str, prompt: int) -> None:
    text = Text(prompt + 300)
    cache = small_cache(scorer="streaming", pin_prompt=pin_prompt, trace=True)
    text.feed(cache, prompt)
    decode(cache, text, 300)
    pinned = pin_prompt is True or (pin_prompt == "auto" and prompt <= BUDGET // 2)
    assert cache.report().prompt_pinned == (pinned or prompt <= SINKS)
    front = max(prompt, SINKS) if pinned else SINKS
    assert cache.trace is not None
    for traced in cache.trace:
        latest = range(traced.seen_tokens - (BUDGET - front), traced.seen_tokens)
        for positions in traced.positions:
            assert positions[0, 0].tolist() == [*range(front), *latest]


def test_prompt_in_chunks_is_one_prompt() -> None:
    text, cache = Text(400), small_cache(scorer="streaming", pin_prompt="auto", trace=True)
    for chunk in (10, 2, 15):
        text.feed(cache, chunk)
    decode(cache, text, 100)
    text.feed(cache, 20)  # another turn is not prompt
    decode(cache, text, 100)
    assert cache.report().prompt_pinned
    assert cache.trace is not None
    for traced in cache.trace:
        head = traced.positions[0][0, 0].tolist()
        assert head[:27] == [*range(27)] and head[27] > 30


def test_pin_beside_a_pinned_prompt_never_costs_recent_tokens() -> None:
    """Found: pins were checked against the budget without the prompt that `True` has pinned."""
    text, cache = Text(400), small_cache(pin_prompt=True, trace=True)
    text.feed(cache, BUDGET - RECENT)
    with pytest.raises(ValueError, match="stop"):
        cache.pin(BUDGET - RECENT, BUDGET - RECENT + 20)
    decode(cache, text, 100)
    assert cache.trace
    for traced in cache.trace:
        latest = torch.arange(traced.seen_tokens - RECENT, traced.seen_tokens)
        assert torch.equal(traced.positions[0][0, 0, -RECENT:], latest)


# Ranking.


def naive_select(
    scores: list[float], positions: list[int], kept: int, protected: list[bool]
) -> list[int]:
    """Sort slots by (protected, not a pad, score, earlier) and keep the first `kept`, in order."""

    def rank(slot: int) -> tuple[int, float, int]:
        score = -math.inf if math.isnan(scores[slot]) else scores[slot]
        pad, safe = positions[slot] == PAD, protected[slot]
        return (2 if pad else 0 if safe else 1), (0.0 if safe or pad else -score), slot

    return sorted(sorted(range(len(scores)), key=rank)[:kept])


def naive_protected(positions: list[int], protection: Protection) -> list[bool]:
    live = len(positions)
    return [
        position != PAD
        and (
            position < protection.front
            or slot >= live - protection.recent
            or any(start <= position < stop for start, stop in protection.spans)
        )
        for slot, position in enumerate(positions)
    ]


@st.composite
def positions_with_pads(draw: st.DrawFn, live: int) -> list[int]:
    pads = draw(st.integers(0, live - 1))
    gaps = draw(st.lists(st.integers(1, 3), min_size=live - pads, max_size=live - pads))
    position, found = draw(st.integers(-1, 3)), [PAD] * pads
    for gap in gaps:
        position += gap
        found.append(position)
    return found


SCORE = st.sampled_from([-2.0, -1.0, 0.0, 0.5, 3.0, 1e30, math.nan, math.inf, -math.inf])


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_selection_equals_sorting_by_hand(data: st.DataObject) -> None:
    batch, heads, live = (data.draw(st.integers(1, n)) for n in (2, 2, 24))
    scores = [
        [data.draw(st.lists(SCORE, min_size=live, max_size=live)) for _ in range(heads)]
        for _ in range(batch)
    ]
    positions = [[data.draw(positions_with_pads(live)) for _ in range(heads)] for _ in range(batch)]
    span = sorted(data.draw(st.tuples(st.integers(0, 30), st.integers(0, 30))))
    spans = ((span[0], span[1]),) if data.draw(st.booleans()) else ()
    protection = Protection(
        data.draw(st.integers(0, 6)), data.draw(st.integers(0, min(5, live))), spans
    )
    kept = data.draw(st.integers(1, live))
    at = torch.tensor(positions, dtype=torch.int32)
    got = select(torch.tensor(scores), at, protection.candidates(at), kept)
    assert got.tolist() == [
        [
            naive_select(s, p, kept, naive_protected(p, protection))
            for s, p in zip(*row, strict=True)
        ]
        for row in zip(scores, positions, strict=True)
    ]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("groups", [2, 3])
def test_query_heads_are_standardised_over_candidates_and_merged_by_their_maximum(
    seed: int, groups: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    live, kept, kv_heads, front, recent = 40, 22, 2, 5, 6
    scale = torch.tensor([1.0, 100.0, 0.01])[:groups].repeat(kv_heads)[None, :, None]
    scores = torch.randn(2, kv_heads * groups, live, generator=generator) * scale + 10 * scale
    scores[..., :front] += 1e4  # a sink's score must not move the others'
    positions = torch.arange(live, dtype=torch.int32).expand(2, kv_heads, -1)
    may_go = Protection(front, recent).candidates(positions)
    got = select(scores, positions, may_go, kept)
    candidates = range(front, live - recent)
    for row in range(2):
        for head in range(kv_heads):
            merged = torch.full((live,), -torch.inf, dtype=torch.float64)
            for query_head in range(head * groups, (head + 1) * groups):
                own = scores[row, query_head].double()
                among = own[list(candidates)]
                z = (own - among.mean()) / among.std(correction=0)
                merged = torch.maximum(merged, z)
            protected = [slot not in candidates for slot in range(live)]
            expected = naive_select(merged.tolist(), [*range(live)], kept, protected)
            assert got[row, head].tolist() == expected


@pytest.mark.parametrize("constant", [0.0, 0.1, 0.3, 3.3, 1e4 + 0.1])
def test_query_head_without_a_preference_hides_no_other(constant: float) -> None:
    """Found: rounding made a constant head's z-scores 1 or -1 instead of 0."""
    for live in (20, 129, 333, 1000):
        scores = torch.full((1, 2, live), constant)
        scores[0, 1] = torch.arange(live)
        positions = torch.arange(live, dtype=torch.int32)[None, None]
        got = select(scores, positions, torch.ones_like(positions).bool(), live // 4)
        assert got[0, 0].tolist() == [*range(live - live // 4, live)]


@pytest.mark.parametrize(
    ("pin_prompt", "prompt"),
    [(False, 1), (False, 40), (False, 150), (True, 1), (True, 48), ("auto", 20), ("auto", 150)],
)
@pytest.mark.parametrize("batch", [1, 2])
def test_knorm_keeps_what_a_naive_run_keeps(
    pin_prompt: bool | str, prompt: int, batch: int
) -> None:
    text = Text(prompt + 400, batch=batch)
    generator = torch.Generator().manual_seed(prompt)
    norms = torch.randint(1, 6, text.keys.shape[:-1], generator=generator)  # ties everywhere
    text.keys = torch.zeros_like(text.keys)
    text.keys[..., 3] = norms.float()
    cache = small_cache(pin_prompt=pin_prompt, trace=True)
    naive = {
        (layer, row, head): [] for layer in range(2) for row in range(batch) for head in range(2)
    }
    pinned = pin_prompt is True or (pin_prompt == "auto" and prompt <= BUDGET // 2)
    protection = Protection(max(prompt, SINKS) if pinned else SINKS, RECENT)
    for count in [prompt, *[1] * 60, 17, *[1] * 120, 50, *[1] * 100]:
        seen = cache.get_seq_length()
        text.feed(cache, count)
        for (layer, row, head), slots in naive.items():
            if len(slots) + count > BOUND:
                scores = [-float(norms[layer, row, head, position]) for position in slots]
                protected = naive_protected(slots, protection)
                slots[:] = [slots[j] for j in naive_select(scores, slots, BUDGET, protected)]
            slots += range(seen, seen + count)
            if count > 1 or seen % 16 == 0:
                assert live_positions(cache, layer)[row, head].tolist() == slots
    assert cache.trace is not None and len(cache.trace) >= 8
    text.check_contents(cache)


def test_streaming_keeps_the_sinks_and_the_latest() -> None:
    text, cache = Text(500), small_cache(scorer="streaming", trace=True)
    text.feed(cache, 100)
    decode(cache, text, 400)
    assert cache.trace is not None
    for traced in cache.trace:
        latest = range(traced.seen_tokens - (BUDGET - SINKS), traced.seen_tokens)
        for positions in traced.positions:
            assert positions[0].tolist() == [[*range(SINKS), *latest]] * 2


def test_custom_scorer_sees_live_keys_and_next_position() -> None:
    text, calls = Text(300, batch=2), []

    class Recorder:
        needs_statistics = False

        def __call__(self, tokens: LiveTokens) -> Tensor:
            assert tokens.statistics is None
            live = torch.arange(97).expand(2, 2, -1)
            assert torch.equal(tokens.positions.long(), live)
            assert torch.equal(tokens.candidates, (live >= SINKS) & (live < 97 - RECENT))
            assert torch.equal(tokens.values[..., 0].long(), live)
            next_position = tokens.next_position.tolist()
            calls.append((tokens.layer_idx, tokens.keys.clone(), next_position))
            return tokens.keys[..., 0]

    cache = small_cache(scorer=Recorder())
    assert "Recorder" in repr(cache) and cache.report().scorer == "Recorder"
    text.feed(cache, 97)
    before = [layer.keys.clone() for layer in cache.layers]
    text.feed(cache, 1)
    assert [next_position for _, _, next_position in calls] == [[97, 97]] * 2
    for layer, keys, _ in calls:
        assert torch.equal(keys, before[layer])
    for i, layer in enumerate(cache.layers):
        scores = before[i][0, 0, :, 0].tolist()
        protected = naive_protected([*range(97)], Protection(SINKS, RECENT))
        expected = naive_select(scores, [*range(97)], BUDGET, protected)
        assert layer.survivors[0, 0].tolist() == expected


@pytest.mark.parametrize("scorer", ["random", "knorm", "streaming"])
def test_runs_repeat_exactly(scorer: str) -> None:
    runs = []
    for _ in range(2):
        text, cache = Text(400), small_cache(scorer=scorer, trace=True)
        text.feed(cache, 100)
        decode(cache, text, 300)
        runs.append(snapshot(cache))
    assert_same(*runs)


def test_random_scorer_spreads_over_tokens_heads_and_compactions() -> None:
    text, cache = Text(4000), small_cache(scorer="random", trace=True, sinks=0, recent=0)
    text.feed(cache, 97)
    for _ in range(3900 // INTERVAL):
        text.feed(cache, INTERVAL)
    assert cache.trace is not None
    survived = torch.zeros(2, BOUND)
    for traced, next_traced in zip(cache.trace[:-1], cache.trace[1:], strict=True):
        appended = torch.arange(traced.seen_tokens, next_traced.seen_tokens)
        for head in range(2):
            before = torch.cat((traced.positions[0][0, head], appended))
            kept = torch.isin(before, next_traced.positions[0][0, head])
            survived[head, : len(before)] += kept
    share = survived / (len(cache.trace) - 1)  # 121 draws of 2 in 3: standard deviation 0.043
    assert (share - BUDGET / BOUND).abs().max() < 0.2
    assert not torch.equal(survived[0], survived[1])


# Rows, pads, lengths.


@pytest.mark.parametrize("scorer", ["knorm", "streaming", "random"])
def test_row_evicts_in_a_batch_what_it_evicts_alone(scorer: str) -> None:
    text, together = Text(400, batch=3), small_cache(scorer=scorer, trace=True)
    text.feed(together, 120)
    decode(together, text, 200)
    for row in range(3):
        own, alone = Text(400, batch=3), small_cache(scorer=scorer, trace=True)
        own.keys, own.values = text.keys[:, row, None], text.values[:, row, None]
        own.feed(alone, 120)
        decode(alone, own, 200)
        for mine, theirs in zip(alone.trace or (), together.trace or (), strict=True):
            for a, b in zip(mine.positions, theirs.positions, strict=True):
                assert torch.equal(a[0], b[row])
        for a, b in zip(alone.layers, together.layers, strict=True):
            assert torch.equal(a.keys[0], b.keys[row])


def test_pads_go_first_and_rows_stay_equally_long() -> None:
    pads, prompt = [0, 7, 39], 90
    mask = torch.ones(3, prompt + 300, dtype=torch.long)
    for row, count in enumerate(pads):
        mask[row, :count] = 0
    text, cache = Text(prompt + 300, batch=3), small_cache(trace=True)
    cache.announce(prompt, mask[:, :prompt], None)
    text.feed(cache, prompt)
    for _ in range(200):
        cache.announce(1, mask[:, : cache.get_seq_length() + 1], None)
        text.feed(cache, 1)
    assert cache.trace is not None and len(cache.trace) >= 5
    for i, traced in enumerate(cache.trace):
        gone = traced.seen_tokens - BUDGET
        for positions in traced.positions:
            assert positions.shape == (3, 2, BUDGET)
            left = (positions == PAD).sum(dim=-1)
            expected = torch.tensor([max(0, count - gone) for count in pads])
            assert torch.equal(left, expected[:, None].expand(3, 2)), f"compaction {i}"
            for row, count in enumerate(pads):
                own = positions[row, 0][positions[row, 0] != PAD].tolist()
                assert own == sorted(own)
                latest = range(traced.seen_tokens - count - RECENT, traced.seen_tokens - count)
                assert own[-RECENT:] == [*latest]
                if count <= gone:
                    assert own[:SINKS] == [*range(SINKS)]


@pytest.mark.parametrize("pads", [(0, 20), (70, 90), (110, 120)], ids=["left", "right", "later"])
def test_pads_live_exactly_where_the_mask_has_them(pads: tuple[int, int]) -> None:
    """Found: pads behind real tokens were evicted first, and the mask then hid real tokens.

    transformers reads column `seen - live + j` of the 2-D mask for live slot `j`.
    """
    text, cache = Text(400, batch=2), small_cache()
    mask = torch.ones(2, 400, dtype=torch.long)
    mask[1, slice(*pads)] = 0
    text.values = torch.where(mask[:, None, :, None] == 0, -1.0, text.values)
    for count in [90, *[1] * 20, 30, *[1] * 200]:
        stop = cache.get_seq_length() + count
        live, offset = cache.get_mask_sizes(count)
        used = cache.announce(count, mask[:, :stop], None)
        text.feed(cache, count)
        for layer in cache.layers:
            is_pad = layer.values[1, :, :, 0] == -1
            assert torch.equal(is_pad, (used[1, offset : offset + live] == 0).expand(2, -1))


@pytest.mark.parametrize("budget", [BUDGET, None])
def test_mask_sizes_foretell_the_coming_forward(budget: int | None) -> None:
    text, cache = Text(2000), small_cache(budget=budget)
    for count in [10, 1, 1, 200, 1, *[1] * 100, 32, 33, 5, *[1] * 70, 96, 97, 1]:
        seen = cache.get_seq_length()
        sizes = [cache.get_mask_sizes(count, layer) for layer in range(2)]
        returned = text.feed(cache, count)
        assert [(v.shape[2], seen + count - v.shape[2]) for v in returned] == sizes
        assert cache.get_seq_length() == seen + count
        assert torch.equal(returned[0][0, 0, -count:, 0], torch.arange(seen, seen + count).float())


def test_without_budget_everything_lives() -> None:
    text, cache = Text(1100, batch=2), small_cache(budget=None)
    text.feed(cache, 100)
    decode(cache, text, 1000)
    for i, layer in enumerate(cache.layers):
        assert torch.equal(layer.keys, text.keys[i, :, :, :1100])
    report = cache.report()
    assert not report.budget_bound and report.evicted_tokens == 0
    assert report.blocks_freed_without_compaction == 0
    cache.check()


MODES = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "grad": torch.enable_grad,
}


@pytest.mark.parametrize("prefill", MODES)
@pytest.mark.parametrize("then", MODES)
def test_forwards_may_change_between_gradient_modes(prefill: str, then: str) -> None:
    """Found: a prompt under `inference_mode`, then `generate` (`no_grad`), could not be appended.

    In mode "grad" the states require gradients, as those of a model called as it stands do.
    """
    text, cache = Text(400), small_cache()
    keys, values = text.keys, text.values
    for mode, counts in ((prefill, [50, 1, 1]), (then, [1] * 60), (prefill, [1, 80, 1])):
        with MODES[mode]():
            weight = torch.ones((), requires_grad=mode == "grad")
            text.keys, text.values = keys * weight, values * weight
            for count in counts:
                text.feed(cache, count)
    text.keys, text.values = keys, values
    text.check_contents(cache)
    cache.check()
    cache.reset()


# Reset.


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_reset_gives_everything_back_and_leaves_no_trace_of_the_first_run(batch: int) -> None:
    first, second = Text(700, batch=2), Text(500, batch=batch)
    used, new = small_cache(trace=True), small_cache(trace=True)
    first.feed(used, 300)
    used.pin(10, 20)
    decode(used, first, 300)
    held = [weakref.ref(layer.storage.keys) for layer in used.layers]
    used.reset()
    assert all(ref() is None for ref in held), "memory is still held after reset()"
    assert_same(snapshot(used), snapshot(new))
    assert used.report().bytes_reserved == used.report().blocks_used == 0
    for cache in (used, new):
        second.feed(cache, 60)
        decode(cache, second, 300)
        cache.check()
    assert_same(snapshot(used), snapshot(new))


def test_layers_are_found_by_what_transformers_asks() -> None:
    text, cache = Text(200), small_cache()
    assert (cache.get_seq_length(), cache.get_max_length(), len(cache)) == (0, -1, 0)
    assert cache.batch_size == -1
    text.feed(cache, 97)
    text.feed(cache, 1)
    assert (cache.get_seq_length(), cache.get_seq_length(1), len(cache)) == (98, 98, 2)
    assert cache.batch_size == 1 and not cache.is_compileable
    assert cache.is_sliding == [False, False]
