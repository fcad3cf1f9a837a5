"""Sliding-window layers against the last tokens of a list, whatever is fed and cropped."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpage import PagedCompactCache
from kvpage.compat import Window

WINDOW, INTERVAL, BLOCK = 20, 8, 4


def sliding_cache(window=WINDOW, kinds=(None, WINDOW), **overrides):
    """A cache with the given windows per layer, without a model."""
    options = {"budget": None, "interval": INTERVAL, "block_size": BLOCK}
    cache = PagedCompactCache(**(options | overrides))
    cache._stack.make([Window(window if kind else None) for kind in kinds])
    return cache


class Rows:
    """Feeds a cache tokens that carry their number, and knows what each layer must return."""

    def __init__(self, cache, batch=1, heads=2, dim=4):
        self.cache, self.shape, self.dim = cache, (batch, heads), dim
        self.rows = [[] for _ in range(batch)]
        self.count = 0

    def feed(self, new):
        windows = [getattr(layer, "window", None) for layer in self.cache.layers]
        for row in self.rows:
            row += range(self.count, self.count + new)
            self.count += new
        fresh = torch.tensor([row[-new:] for row in self.rows]).float()
        states = fresh[:, None, :, None].expand(*self.shape[:2], new, self.dim).contiguous()
        sizes = [self.cache.get_mask_sizes(new, index) for index in range(len(windows))]
        for index, window in enumerate(windows):
            keys, values = self.cache.update(states, -states, index)
            length = len(self.rows[0])
            visible = length if window is None else min(length, window - 1 + new)
            expected = torch.tensor([row[-visible:] for row in self.rows]).float()
            assert torch.equal(keys, expected[:, None, :, None].expand_as(keys)), (index, visible)
            assert torch.equal(values, -keys)
            assert sizes[index] == (visible, length - visible)
        self.cache.check()

    def crop(self, count):
        self.cache.crop(-count)
        for row in self.rows:
            del row[len(row) - count :]

    def select(self, rows):
        self.cache.batch_select_indices(torch.tensor(rows))
        self.rows = [list(self.rows[row]) for row in rows]
        self.shape = (len(rows), self.shape[1])


@pytest.mark.parametrize("kinds", [(None, WINDOW), (WINDOW, WINDOW), (WINDOW, None)])
@pytest.mark.parametrize("prompt", [1, WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW])
@pytest.mark.parametrize("chunk", [1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 50])
def test_a_window_holds_exactly_the_last_tokens_at_every_boundary(kinds, prompt, chunk):
    rows = Rows(sliding_cache(kinds=kinds))
    rows.feed(prompt)
    for _ in range(60 // chunk + 2):
        rows.feed(chunk)


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 16, 17])
def test_a_window_of_any_size_is_exact(window):
    rows = Rows(sliding_cache(window=window))
    for new in (1, 3, *[1] * 40, 7):
        rows.feed(new)


@pytest.mark.parametrize("drafts", [1, 3, INTERVAL, WINDOW, 2 * WINDOW])
def test_every_draft_can_be_rolled_back_past_the_windows_edge(drafts):
    """Also those that push older tokens out of the window: they are back afterwards."""
    rows = Rows(sliding_cache())
    rows.feed(WINDOW)
    for accepted in range(30):
        rows.feed(1 + drafts)
        rows.crop(max(0, drafts - accepted % (drafts + 1)))
        rows.feed(1)


def test_what_has_left_the_window_for_good_can_not_be_rolled_back_to():
    rows = Rows(sliding_cache())
    rows.feed(3 * WINDOW)
    for _ in range(INTERVAL + 1):
        rows.feed(1)
    most = rows.cache.ledger.live - 1
    with pytest.raises(ValueError, match="at most"):
        rows.cache.crop(-most)
    rows.feed(1)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("feed"), st.integers(1, 50)),
            st.tuples(st.just("crop"), st.integers(0, 50)),
            st.tuples(st.just("select"), st.lists(st.integers(0, 1), min_size=2, max_size=2)),
            st.tuples(st.just("fork"), st.just(0)),
        ),
        max_size=30,
    ),
    st.integers(1, 25),
)
@settings(max_examples=150, deadline=None)
def test_any_run_of_feeds_crops_selections_and_forks_is_exact(actions, window):
    rows, last = Rows(sliding_cache(window=window), batch=2), 0
    others = []
    for action, argument in actions:
        if action == "feed":
            rows.feed(argument)
            last = argument
        elif action == "crop":
            rows.crop(min(argument, last))
            last -= min(argument, last)
        elif action == "select":
            rows.select(argument)
        else:
            others.append(rows.cache)
            (rows.cache,) = rows.cache.fork(1)
    for other in others:
        other.reset()
    rows.feed(1)


def test_blocks_that_leave_the_window_go_back_and_memory_is_flat():
    cache = sliding_cache(kinds=(WINDOW, WINDOW))
    rows = Rows(cache)
    rows.feed(10 * WINDOW)
    reserved = []
    for _ in range(600):
        rows.feed(1)
        reserved.append(cache.report().bytes_reserved)
    report = cache.report()
    bound = -(-(WINDOW - 1 + INTERVAL) // BLOCK)
    assert report.sliding_blocks_used <= bound
    assert report.sliding_blocks_freed > 10 * WINDOW // BLOCK - bound
    assert max(reserved[1:]) <= 2 * bound * BLOCK * 2 * 4 * 2 * 4  # two layers, K and V, float32
    assert reserved[-1] == reserved[300]
    assert (report.full_layers, report.blocks_used, report.seen_tokens) == (0, 0, 800)
    assert len(cache.ledger.tables[0]) == 1  # what only counts tokens does not grow
