"""`static=True`: a captured one-token forward can be replayed, through compactions and all."""

from __future__ import annotations

import pytest
import torch
from families import family
from recorder import Recorder
from tiny import build, cache_name, generate, prompt
from torch import Tensor

from kvpage import PagedCompactCache

SMALL = {"budget": 48, "interval": 16, "recent": 8, "trace": True}
FAMILIES = ["llama", "mistral-window", "gemma3", "gpt-oss", "qwen3", "phi3-partial", "gpt-neox"]


def filled(name: str, batch: int, pads: int, length: int = 30, **options):
    """A family's model with the attention over blocks, and a static cache that saw a prompt."""
    model = family(name)
    model.set_attn_implementation("kvpage")
    cache = PagedCompactCache(model, **(SMALL | {"static": True} | options))
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, :pads] = 0
    with torch.no_grad():
        model(prompt(length, batch), attention_mask=mask, **{cache_name(model): cache})
    for layer in cache.layers:
        if hasattr(layer, "rope_check_at"):  # what is checked once the text has doubled
            layer.rope_check_at = 1 << 62  # is not captured
    return model, cache


class Decoder:
    """One-token forwards with inputs in fixed memory, first eager, then as recorded."""

    def __init__(self, model, cache, batch: int, pads: int, length: int = 30) -> None:
        self.model, self.cache = model, cache
        self.token = torch.zeros(batch, 1, dtype=torch.long)
        self.position = torch.full((batch, 1), length - 1)
        self.position[0] -= pads
        self.recorder: Recorder | None = None

    def eager(self, token: Tensor) -> Tensor:
        self.token.copy_(token)
        self.position.add_(1)
        with torch.no_grad():
            named = {cache_name(self.model): self.cache}
            self.logits = self.model(self.token, position_ids=self.position, **named).logits
        return self.logits

    def recorded(self, token: Tensor) -> Tensor:
        if self.recorder is None:
            self.recorder = Recorder()
            self.position.add_(1)
            self.token.copy_(token)
            with self.recorder, torch.no_grad():
                named = {cache_name(self.model): self.cache}
                self.logits = self.model(self.token, position_ids=self.position, **named).logits
            return self.logits
        self.token.copy_(token)
        self.position.add_(1)
        self.cache.advance()
        self.recorder.replay()
        return self.logits


@pytest.mark.parametrize(
    ("name", "pads", "budget", "tokens"),
    [(name, 13, 48, 120) for name in (*FAMILIES, "qwen3-next")]
    + [("llama", 0, 48, 120), ("llama", 13, 256, 300)],
)
def test_replaying_one_recorded_forward_is_decoding(name, pads, budget, tokens):
    """Through compactions, or through two rounds of what statistics wait in."""
    eager, replayed = (Decoder(*filled(name, 2, pads, budget=budget), 2, pads) for _ in range(2))
    ids = prompt(tokens, 2, seed=3)
    for i in range(tokens):
        token = ids[:, i : i + 1]
        expected = eager.eager(token)
        got = replayed.eager(token) if i < 9 else replayed.recorded(token)
        assert torch.equal(got, expected), i
    one, other = eager.cache, replayed.cache
    assert max(ledger.compactions for ledger in other._stack.ledgers) >= 3
    expected = one.report().to_dict() | {"compaction_seconds": 0}
    assert other.report().to_dict() | {"compaction_seconds": 0} == expected
    for a, b in zip(one.trace, other.trace, strict=True):
        assert a.seen_tokens == b.seen_tokens
        assert all(map(torch.equal, a.positions, b.positions))
    other.check()
    for index, layer in enumerate(other.layers):
        if layer in other._stack.ranked:
            a, b = one.statistics(index), other.statistics(index)
            assert torch.equal(a.query_mean, b.query_mean) and torch.equal(a.count, b.count)


def addresses(cache: PagedCompactCache) -> list[int]:
    tensors = []
    for layer in cache.layers:
        tensors += [layer.storage.keys, layer.storage.values]
        if layer.statistics is not None:
            tensors += layer.statistics._cycle
    for places in cache._decoding._places.values():
        tensors += [places.tables, places.lengths, places.cycle]
        tensors += [] if places.visible is None else [places.visible]
    return [tensor.data_ptr() for tensor in tensors]


@pytest.mark.parametrize("pads", [0, 13])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_shapes_and_addresses_stay_between_and_across_compactions(name, pads):
    model, cache = filled(name, 2, pads)
    decoder = Decoder(model, cache, 2, pads)
    for _ in range(3):
        decoder.eager(prompt(1, 2))
    held, shapes, compactions = addresses(cache), None, cache.ledger.compactions
    for _ in range(100):
        before = [ledger.compactions for ledger in cache._stack.ledgers]
        with Recorder(captures=False) as recorder:
            decoder.eager(prompt(1, 2))
        assert addresses(cache) == held
        if before == [ledger.compactions for ledger in cache._stack.ledgers]:
            shapes = shapes or recorder.shapes()
            assert recorder.shapes() == shapes
    assert not cache.report().full_layers or cache.ledger.compactions > compactions + 4


def test_a_long_prompt_is_compacted_before_addresses_stay():
    model, cache = filled("llama", 1, 0, length=200)
    decoder = Decoder(model, cache, 1, 0, length=200)
    for _ in range(2):
        decoder.eager(prompt(1))
    held = addresses(cache)
    for _ in range(60):
        decoder.recorded(prompt(1))
        assert addresses(cache) == held
    cache.check()


def test_static_equals_what_is_not():
    model = build("llama-gqa3-tied", "kvpage")
    for batch in (1, 3):
        one, other = (PagedCompactCache(model, **SMALL, static=static) for static in (True, False))
        got, expected = (generate(model, prompt(30, batch), cache, 150) for cache in (one, other))
        assert torch.equal(got[0], expected[0])
        torch.testing.assert_close(got[1], expected[1], atol=1e-4, rtol=1e-4)
        for a, b in zip(one.trace, other.trace, strict=True):
            assert all(map(torch.equal, a.positions, b.positions))


# What can't be.


def test_static_needs_the_attention_over_blocks():
    model = build("llama-gqa3-tied")
    cache = PagedCompactCache(model, static=True)
    with pytest.raises(ValueError, match=r"static: needs model\.set_attn_implementation\('kvpage'"):
        model(prompt(5), **{cache_name(model): cache})
    assert cache.get_seq_length() == 0
    model.set_attn_implementation("kvpage")
    model(prompt(5), **{cache_name(model): cache})


def test_static_needs_a_budget():
    with pytest.raises(ValueError, match="static: needs a budget"):
        PagedCompactCache(budget=None, static=True)
    with pytest.raises(TypeError, match="static: True or False expected, got 1"):
        PagedCompactCache(static=1)


CHANGES = {
    "reset": lambda cache: cache.reset(),
    "other rows": lambda cache: cache.batch_select_indices(torch.tensor([1])),
    "the same rows": lambda cache: cache.batch_select_indices(torch.tensor([0, 0])),
    "another order": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_graph_of_tensors_that_moved_is_not_replayed(change):
    """Nor later, once a compaction has given every row blocks of its own again."""
    model, cache = filled("llama", 2, 0)
    decoder = Decoder(model, cache, 2, 0)
    for _ in range(3):
        decoder.eager(prompt(1, 2))
    for _ in range(3):
        decoder.recorded(prompt(1, 2))
    change(cache)
    rows = cache.batch_size if cache.batch_size > 0 else 2
    named = {cache_name(model): cache}
    with torch.no_grad():
        for step in range(50):
            if step in (2, 49):
                before = cache.get_seq_length(), cache.ledger.live
                with pytest.raises(RuntimeError, match=r"advance: (a captured|rows with)"):
                    cache.advance()
                assert (cache.get_seq_length(), cache.ledger.live) == before
            model(prompt(30 if step == 0 and change is CHANGES["reset"] else 1, rows), **named)
    again = Decoder(model, cache, rows, 0, cache.get_seq_length())
    for _ in range(5):
        again.recorded(prompt(1, rows))
    cache.check()


def test_a_forward_with_a_mask_can_not_be_captured():
    model, cache = filled("llama", 2, 0)
    for _ in range(2):
        model(prompt(1, 2), **{cache_name(model): cache})
    mask = torch.ones(2, 33, dtype=torch.long)
    with Recorder(), pytest.raises(RuntimeError, match="without an attention_mask"):
        model(prompt(1, 2), attention_mask=mask, **{cache_name(model): cache})
    assert cache.get_seq_length() == 32
    plain = PagedCompactCache(model)
    with Recorder(), pytest.raises(RuntimeError, match="of a cache with static=True"):
        model(prompt(1, 2), **{cache_name(model): plain})


def test_advance_says_when_there_is_nothing_to_replay():
    with pytest.raises(RuntimeError, match="a one-token forward with static=True expected"):
        PagedCompactCache().advance()
    model, cache = filled("llama", 2, 0)
    with pytest.raises(RuntimeError, match="a one-token forward with static=True expected"):
        cache.advance()
    decoder = Decoder(model, cache, 2, 0)
    decoder.eager(prompt(1, 2))
    cache.reorder_cache(torch.tensor([1, 1]))
    before = cache.get_seq_length(), cache.ledger.live
    with pytest.raises(RuntimeError, match="rows with blocks of their own expected"):
        cache.advance()
    assert (cache.get_seq_length(), cache.ledger.live) == before
    twin = cache.fork(1)[0]
    with pytest.raises(RuntimeError, match="rows with blocks of their own expected"):
        twin.advance()


def test_what_is_not_steady_can_not_be_captured():
    """The first forward behind a prompt sets lengths; a compaction moves tokens."""
    model, cache = filled("llama", 1, 0)
    decoder = Decoder(model, cache, 1, 0)
    with Recorder(), pytest.raises(RuntimeError, match="run one more forward first"):
        decoder.eager(prompt(1))


def test_a_compiled_model_is_not_compiled_again_while_it_decodes():
    """Its graph breaks at the hooks; between them every shape is what it was."""
    torch._dynamo.reset()
    model, cache = filled("llama", 2, 13)
    decoder = Decoder(model, cache, 2, 13)
    model.forward = torch.compile(model.forward, backend="eager")
    for _ in range(6):
        decoder.eager(prompt(1, 2))
    compactions = cache.ledger.compactions
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(60):
            decoder.eager(prompt(1, 2))
    assert cache.ledger.compactions >= compactions + 2
