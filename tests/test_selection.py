"""Choosing survivors for many layers at once changes nothing but the number of operations."""

from collections import Counter

import pytest
import torch
from families import family
from tiny import cache_name, generate, prompt
from torch.utils._python_dispatch import TorchDispatchMode

from kvpage import PagedCompactCache, selection, summaries
from kvpage.kernels import reference

FREE = ("view", "as_strided", "expand", "transpose", "slice", "select", "unsqueeze", "detach")
FREE += ("alias", "split", "unbind", "permute", "empty", "new_empty", "unflatten", "_unsafe_view")


def set_scratch(monkeypatch, elements):
    monkeypatch.setattr(selection, "SCRATCH_ELEMENTS", {"cpu": elements})
    monkeypatch.setattr(summaries, "SCRATCH_ELEMENTS", {"cpu": elements})


def norms(tokens):
    """A user's scorer, of KV heads."""
    return tokens.values.float().square().sum(dim=-1)


def of_query_heads(tokens):
    """A user's scorer, of query heads."""
    groups = tokens.statistics.query_mean.shape[1] // tokens.keys.shape[1]
    return tokens.statistics.query_mean[..., :1] * tokens.keys[..., 0].repeat_interleave(groups, 1)


@pytest.mark.parametrize("name", ["llama", "llama-dynamic", "gpt-oss", "gemma3", "smollm3"])
@pytest.mark.parametrize("scorer", ["centroid", "random", norms, of_query_heads])
def test_layers_together_keep_what_each_keeps_by_itself(monkeypatch, name, scorer):
    """Also in a padded batch, with sliding layers, and where some layers do not rotate."""
    traces, texts = [], []
    ids = prompt(70, batch=2)
    real = torch.ones_like(ids)
    real[0, :23] = 0
    for elements in (1, 1 << 30):
        set_scratch(monkeypatch, elements)
        model = family(name)  # anew: dynamic RoPE remembers the longest text
        cache = PagedCompactCache(
            model, budget=64, interval=16, recent=16, trace=True, scorer=scorer
        )
        texts.append(generate(model, ids * real, cache, 60, attention_mask=real)[0])
        traces.append([layer for traced in cache.trace for layer in traced.positions])
    assert torch.equal(texts[0], texts[1])
    assert len(traces[0]) == len(traces[1]) >= 2
    for alone, together in zip(*traces, strict=True):
        assert torch.equal(alone, together)


class Count(TorchDispatchMode):
    """Operations that a GPU would launch something for."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.removeprefix("aten::")
        if name not in FREE:
            self.found[name] += 1
        return function(*args, **(kwargs or {}))


def operations_of_a_compaction(monkeypatch, layers, scorer):
    """Of the forward that compacts, less those of the one before it; the two kernels of a layer
    that move tokens, and the one that scores, count as one each."""
    counts = Count()

    def as_one(kernel, name):
        def run(*args):
            with torch.utils._python_dispatch._disable_current_modes():
                result = kernel(*args)
            counts.found[name] += 1
            return result

        return run

    for name in ("score_tokens", "attention_mass", "norms", "move_slots"):
        monkeypatch.setattr(reference, name, as_one(getattr(reference, name), name))
    model = family("llama", num_hidden_layers=layers)
    cache = PagedCompactCache(model, budget=64, interval=16, recent=16, scorer=scorer)
    seen, totals = 0, []
    for tokens in (64, *[1] * 33):
        before = cache.report().compactions
        counts.found.clear()
        with torch.no_grad(), counts:
            model(prompt(tokens), **{cache_name(model): cache})
        seen += tokens
        totals.append((cache.report().compactions - before, counts.found.total()))
    compacting = [i for i, (compactions, _) in enumerate(totals) if compactions]
    return totals[compacting[-1]][1] - totals[compacting[-1] - 1][1]


@pytest.mark.parametrize(("scorer", "each"), [("centroid", 6), ("sampled", 30)])
def test_a_layer_more_costs_a_compaction_few_operations_more(monkeypatch, scorer, each):
    """104 per layer, before: on a GPU their launches would cost more than their work."""
    set_scratch(monkeypatch, 1 << 30)
    few, many = (operations_of_a_compaction(monkeypatch, layers, scorer) for layers in (2, 12))
    assert few < 200
    assert many - few <= 10 * each
