"""A block map says which token sits in which slot: checked against what the slots store."""

import pytest
import torch
from helpers import Text, small_cache
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpage import BlockMap


def agrees(cache, block_map, layer_idx, head):
    """Every mapped slot stores the value of its token, and every live token has such a slot."""
    stored = cache.layers[layer_idx].storage.values[head, :, :, 0]
    filled = block_map.slots >= 0
    assert torch.equal(stored[filled], block_map.slots[filled].float())
    for row, table in enumerate(cache.ledger.tables):
        tokens = block_map.slots[torch.tensor(table)].flatten()
        live = cache.live_positions(layer_idx)[row, head]
        assert tokens[tokens >= 0].tolist() == live[live >= 0].tolist()


@settings(max_examples=30, deadline=None)
@given(
    forwards=st.lists(st.integers(1, 60), min_size=1, max_size=8),
    batch=st.integers(1, 3),
    layer_idx=st.integers(0, 1),
    head=st.integers(0, 1),
)
def test_a_map_shows_what_the_slots_store(forwards, batch, layer_idx, head):
    text, cache = Text(sum(forwards), batch=batch), small_cache()
    for count in forwards:
        text.feed(cache, count)
    block_map = BlockMap.of(cache, layer_idx, head)
    agrees(cache, block_map, layer_idx, head)
    report = cache.report()
    assert block_map.used_blocks == report.blocks_used
    assert len(block_map.slots) == report.blocks_used + report.blocks_free
    assert block_map.live_slots == batch * report.live_tokens
    assert block_map.utilisation == block_map.live_slots / (16 * report.blocks_used)
    assert cache.full_layers == [0, 1]


def test_blocks_shared_with_a_fork_are_counted_twice_and_copied_ones_once():
    text, cache = Text(80), small_cache()
    text.feed(cache, 40)
    (twin,) = cache.fork(1)
    assert BlockMap.of(cache).ref_counts.tolist()[:3] == [2, 2, 2]
    text.feed(cache, 1)
    counts = BlockMap.of(cache).ref_counts
    assert sorted(counts[counts > 0].tolist()) == [1, 1, 2, 2]
    agrees(cache, BlockMap.of(cache), 0, 0)
    agrees(twin, BlockMap.of(twin), 0, 0)


def test_rows_name_the_first_holder_and_free_blocks_none():
    text, cache = Text(200, batch=2), small_cache()
    for count in (96, 1):  # 6 blocks a row; then 64 + 1 tokens in 5
        text.feed(cache, count)
    block_map = BlockMap.of(cache)
    for row, table in enumerate(cache.ledger.tables):
        assert (block_map.rows[torch.tensor(table)] == row).all()
    free = block_map.ref_counts == 0
    assert free.any() and (block_map.rows[free] == -1).all() and (block_map.slots[free] == -1).all()


def test_a_map_of_slots_counts_blocks_that_hold_a_token():
    slots = torch.tensor([[0, -1], [-1, -1], [2, 3]])
    block_map = BlockMap.of_slots(slots)
    assert block_map.used_blocks == 2
    assert block_map.live_slots == 3
    assert block_map.utilisation == 3 / 4


def test_what_is_not_there_is_named():
    cache = small_cache()
    with pytest.raises(ValueError, match="nothing was cached yet"):
        BlockMap.of(cache)
    Text(20).feed(cache, 20)
    with pytest.raises(ValueError, match=r"kv_head: within \[0, 2\) expected, got 2"):
        BlockMap.of(cache, 0, 2)
    with pytest.raises(ValueError, match=r"layer of full attention \(\[0, 1\]\), got 5"):
        cache.live_positions(5)
