"""The oracle for eviction: the whole sequence without a cache, under explicit per-head masks."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import pairwise

import torch
from tiny import cache_name
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvpage import TracedCompaction
from kvpage.architectures import describe


def allowed_columns(
    trace: list[TracedCompaction], layer: int, real: Tensor, query_heads: int
) -> Tensor:
    """bool `[B, H, T, T]`: which columns each query may look at, given what compactions left.

    real: bool `[B, T]`, False for pads. A compaction at `seen` leaves its survivors and everything
    from column `seen` on to the queries from column `seen` on; position `p` of a row is its `p`-th
    real column.
    """
    batch, length = real.shape
    causal = torch.ones(length, length, dtype=torch.bool).tril() & real[:, None]
    allowed = causal[:, None].repeat(1, query_heads, 1, 1)
    for event in trace:
        positions = event.positions[layer]
        kv_heads = positions.shape[1]
        live = torch.zeros(batch, kv_heads, length, dtype=torch.bool)
        live[:, :, event.seen_tokens :] = True
        for row in range(batch):
            columns = real[row].nonzero()[:, 0]
            for head in range(kv_heads):
                kept = positions[row, head]
                live[row, head, columns[kept[kept >= 0].long()]] = True
        live = live.repeat_interleave(query_heads // kv_heads, dim=1)
        allowed[:, :, event.seen_tokens :] = (
            causal[:, None, event.seen_tokens :] & live[:, :, None, :]
        )
    return allowed


@contextmanager
def masked(model: PreTrainedModel, trace: list[TracedCompaction], real: Tensor):
    """Within it, every attention module of `model` sees only what `trace` left.

    Yields the slice of columns that the next forward is about, all of them unless it is changed.
    """

    about = {"start": 0, "stop": real.shape[1]}
    sites = describe(model).sites
    full = [site.layer_idx for site in sites if site.window is None]
    windows = {site.layer_idx: site.window for site in sites}

    def hook(module, args, kwargs):
        heads, index = module.config.num_attention_heads, module.layer_idx
        if index in full:
            allowed = allowed_columns(trace, full.index(index), real, heads)
        else:
            allowed = allowed_columns([], 0, real, heads)
            allowed &= torch.ones_like(allowed).triu(1 - windows[index])
        allowed = allowed[:, :, about["start"] : about["stop"], : about["stop"]]
        bias = torch.zeros(allowed.shape, dtype=model.dtype)
        kwargs["attention_mask"] = bias.masked_fill(~allowed, torch.finfo(model.dtype).min)
        return args, kwargs

    handles = [site.attention.register_forward_pre_hook(hook, with_kwargs=True) for site in sites]
    try:
        yield about
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def oracle_logits(
    model: PreTrainedModel,
    ids: Tensor,
    trace: list[TracedCompaction],
    real: Tensor | None = None,
    positions: Tensor | None = None,
    stepwise: int = 0,
) -> Tensor:
    """Logits `[B, T, V]` of `ids` `[B, T]` at `positions` in one forward without a cache.

    stepwise: with `DynamicCache`, so many tokens first and then one by one, where keys depend on
    when they were seen.
    """
    real = torch.ones_like(ids, dtype=torch.bool) if real is None else real
    if positions is None:
        positions = (real.long().cumsum(dim=1) - 1).clamp_min(0)
    if stepwise:
        starts = [0, *range(stepwise, ids.shape[1]), ids.shape[1]]
        logits, cache = [], {cache_name(model): DynamicCache()}
        with masked(model, trace, real) as about:
            for start, stop in pairwise(starts):
                about |= {"start": start, "stop": stop}
                at = positions[:, start:stop]
                logits.append(model(ids[:, start:stop], position_ids=at, **cache).logits)
        return torch.cat(logits, dim=1)
    with masked(model, trace, real):
        mask = real.long()  # what keeps a state looks at no mask of ours
        return model(ids, position_ids=positions, attention_mask=mask, use_cache=False).logits


def check_against_oracle(
    model, trace, fed, logits, real=None, positions=None, atol=1e-4, stepwise=0
):
    """`logits` `[B, n, V]` of the last `n` of the tokens `fed` `[B, T]` equal the oracle's."""
    real = torch.ones_like(fed) if real is None else real
    real = torch.nn.functional.pad(real, (0, fed.shape[1] - real.shape[1]), value=1).bool()
    count = logits.shape[1]
    asked = real[:, -count:]  # what a pad attends to is nobody's business
    expected = oracle_logits(model, fed, trace, real, positions, stepwise)[:, -count:]
    torch.testing.assert_close(logits[asked], expected[asked], atol=atol, rtol=1e-4)
    unmasked = oracle_logits(model, fed, [], real, positions, stepwise)[:, -count:]
    assert (unmasked - expected)[asked].abs().max() > 1e-2  # the evicted tokens mattered
