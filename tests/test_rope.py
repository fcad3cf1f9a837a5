"""What the table says of a model's RoPE is checked at its first forward, for every family."""

import pytest
import torch
from families import FAMILIES, family
from tiny import cache_name, prompt

from kvpage import PagedCompactCache
from kvpage.architectures import describe
from kvpage.rope import Rope, RopeSource

INV_FREQ = 10_000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)


def wrong_base(rope):
    return Rope(rope.inv_freq * 1.05, rope.attention_scaling, rope.interleaved)


def wrong_pairing(rope):
    return Rope(rope.inv_freq, rope.attention_scaling, not rope.interleaved)


def wrong_scaling(rope):
    return Rope(rope.inv_freq, rope.attention_scaling * 1.1, rope.interleaved)


def wrong_partial_factor(rope):
    return Rope(rope.inv_freq[: rope.bands // 2], rope.attention_scaling, rope.interleaved)


def rotation_where_there_is_none(rope):
    return rope if rope.bands else Rope(INV_FREQ[:4])


WRONG = [wrong_base, wrong_pairing, wrong_scaling, wrong_partial_factor]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_check_takes_the_right_rotation_and_no_other(dtype, interleaved):
    rope, positions = Rope(INV_FREQ, 1.2, interleaved), torch.arange(40, 48)[None]
    before = torch.randn(1, 2, 8, 20).to(dtype)
    after = rope.rotated(before, positions).to(dtype)
    rope.check(before, after, positions)
    for wrong in WRONG:
        with pytest.raises(ValueError, match="rotary embedding"):
            wrong(rope).check(before, after, positions)
    with pytest.raises(ValueError, match="captured ahead of RoPE"):
        rope.check(before[..., :18], after, positions)
    with pytest.raises(ValueError, match="at least 16 rotated dimensions"):
        rope.check(before[..., :12], after[..., :12], positions)


@pytest.mark.parametrize("wrong", [*WRONG, rotation_where_there_is_none])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_wrong_entry_of_the_table_is_caught(name, wrong, monkeypatch):
    model = family(name)
    ropes = [site.rope() for site in describe(model).sites if site.rope is not None]
    if not any((rope.bands > 0) == (wrong in WRONG) for rope in ropes):
        pytest.skip("of the layers that are ranked none has a RoPE, or all have one")
    cache = PagedCompactCache(model)
    right = RopeSource.__call__
    monkeypatch.setattr(RopeSource, "__call__", lambda source: wrong(right(source)))
    with pytest.raises(ValueError, match="model's keys differ from ours"):
        model(prompt(20), **{cache_name(model): cache})


def test_a_first_token_at_position_zero_tells_nothing_and_the_second_does(monkeypatch):
    model = family("llama")
    cache = PagedCompactCache(model)
    right = RopeSource.__call__
    monkeypatch.setattr(RopeSource, "__call__", lambda source: wrong_base(right(source)))
    model(prompt(1), **{cache_name(model): cache})
    with pytest.raises(ValueError, match="rotary embedding"):
        model(prompt(1), **{cache_name(model): cache})
