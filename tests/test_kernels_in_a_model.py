"""The Triton kernels, interpreted, where a model and a cache call them."""

from __future__ import annotations

import pytest
import torch
from families import family
from interpreted import triton_version
from tiny import generate, prompt

from kvpage import PagedCompactCache, decoding, kernels

OPS = ("move_slots", "write_kv", "paged_attention")
RANKS = {"sampled": "attention_mass", "centroid": "score_tokens"}
SMALL = {"budget": 28, "interval": 5, "recent": 8, "trace": True}


def decode(name: str, static: bool, scorer: str, **options):
    """Logits of 12 tokens behind a padded prompt, and what each compaction left."""
    model = family(name)
    model.set_attn_implementation("kvpage")
    cache = PagedCompactCache(model, static=static, scorer=scorer, **SMALL)
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[0, :11] = 0
    logits = generate(model, prompt(30, 2), cache, 12, attention_mask=mask, **options)[1]
    return logits, [event.positions for event in cache.trace], repr(cache)


def decode_with_triton(*args, **options):
    """The same with every op of a GPU, in a process that interprets Triton's kernels."""
    calls = []

    def counted(op):
        launch = triton_version(op)
        return lambda *a, **k: calls.append(op) or launch(*a, **k)

    for op in (*OPS, *RANKS.values()):
        setattr(kernels, op, counted(op))
    decoding.resolve_backend = lambda *_: "triton"
    return *decode(*args, **options), set(calls)


@pytest.mark.parametrize(
    ("name", "static", "scorer", "options"),
    [
        ("llama", False, "sampled", {"num_beams": 2}),
        ("gpt-oss", True, "sampled", {}),
        ("gpt-oss", True, "centroid", {}),
    ],
    ids=str,
)
def test_a_model_decodes_through_the_kernels_as_through_their_references(
    triton, name, static, scorer, options
):
    expected, left, _ = decode(name, static, scorer, **options)
    got, kept, described, ops = triton.call(decode_with_triton, name, static, scorer, **options)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert ops == {*OPS, RANKS[scorer]} and "attention=triton" in described
    assert len(kept) == len(left) >= 2
    for one, other in zip(kept, left, strict=True):
        assert all(map(torch.equal, one, other))
