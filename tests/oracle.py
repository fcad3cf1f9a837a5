"""The oracle for eviction: the whole sequence without a cache, under explicit per-head masks."""

from __future__ import annotations

from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpage import TracedCompaction


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
    """Within it, every attention module of `model` sees only what `trace` left."""

    def hook(module, args, kwargs):
        heads = module.config.num_attention_heads
        allowed = allowed_columns(trace, module.layer_idx, real, heads)
        bias = torch.zeros(allowed.shape, dtype=model.dtype)
        kwargs["attention_mask"] = bias.masked_fill(~allowed, torch.finfo(model.dtype).min)
        return args, kwargs

    handles = [
        block.self_attn.register_forward_pre_hook(hook, with_kwargs=True)
        for block in model.get_decoder().layers
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def oracle_logits(
    model: PreTrainedModel,
    ids: Tensor,
    trace: list[TracedCompaction],
    real: Tensor | None = None,
) -> Tensor:
    """Logits `[B, T, V]` of `ids` `[B, T]` in one forward without a cache."""
    real = torch.ones_like(ids, dtype=torch.bool) if real is None else real
    positions = (real.long().cumsum(dim=1) - 1).clamp_min(0)
    with masked(model, trace, real):
        return model(ids, position_ids=positions, use_cache=False).logits
