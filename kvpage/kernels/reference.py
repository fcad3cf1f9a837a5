"""The ops in plain torch: their definition."""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor

from kvpage.kernels.moments import Moments

SCRATCH_ELEMENTS = 1 << 16
"""Elements of scratch a chunk may use: with the few float32 buffers live at once, below 1 MiB."""
MASS_ELEMENTS = 1 << 17
"""Elements of the one buffer of `attention_mass`, on a CPU: with the rest below 1 MiB."""
GPU_MASS_ELEMENTS = 1 << 25
"""The same elsewhere, where launches cost more than memory."""
LEAST_ROWS = 16
"""Queries worth reading the keys for: where fewer fit beside all keys, those are chunked as well,
which multiplies twice but by more queries (measured: slower at 8,192 keys, faster at 12,288)."""
MOST_ROWS = 128
"""Queries per chunk then."""


def score_tokens(
    keys: Tensor,
    direction: Tensor,
    norm_weight: Tensor,
    interleaved: bool = False,
    candidates: Tensor | None = None,
) -> tuple[Tensor, Moments | None]:
    """Score every key against the expected coming queries (design: closed form of TriAttention).

    `S = k . u + |k|_band . w` with `|k|_band` the magnitude of each rotated pair of dimensions: `f`
    and `f + F`, or `2 f` and `2 f + 1` when interleaved; dimensions from `2 F` on are not rotated
    and enter only through the dot product.

    keys: `[B, Hkv, L, D]`, any float dtype, any strides; direction `u`: `[B, H, D]`; norm_weight
    `w`: `[B, H, F]`, both float32. Returns float32 `[B, H, L]`; all in float64 if `u` is.
    candidates: bool `[B, Hkv, L]`; with them, what standardising the scores over them needs comes
    second.
    """
    batch, kv_heads, live, dim = keys.shape
    heads, bands = direction.shape[1], norm_weight.shape[2]
    groups = heads // kv_heads
    scores = torch.empty(batch, heads, live, dtype=direction.dtype, device=keys.device)
    chunk = max(1, SCRATCH_ELEMENTS // (kv_heads * dim))
    for row in range(batch):
        u = direction[row].view(kv_heads, groups, dim)
        w = norm_weight[row].view(kv_heads, groups, bands)
        out = scores[row].view(kv_heads, groups, live)
        for start in range(0, live, chunk):
            k = keys[row, :, start : start + chunk].to(u.dtype)  # [Hkv, C, D]
            bands_of_k = k[..., : 2 * bands].unflatten(
                -1, (bands, 2) if interleaved else (2, bands)
            )
            magnitude = torch.hypot(*bands_of_k.unbind(-1 if interleaved else -2))  # [Hkv, C, F]
            part = u @ k.transpose(1, 2)
            part += w @ magnitude.transpose(1, 2)
            out[:, :, start : start + chunk] = part
    return scores, None if candidates is None else moments(scores, candidates)


def moments(scores: Tensor, candidates: Tensor) -> Moments:
    """Of each head's scores `[B, H, L]` over the `candidates` `[B, Hkv, L]` of its KV head."""
    batch, kv_heads, live = candidates.shape
    grouped = scores.view(batch, kv_heads, -1, live)
    counts = candidates[:, :, None]
    count = counts.sum(dim=-1).clamp_min(1)
    mean = torch.where(counts, grouped, 0.0).sum(dim=-1) / count
    squares = torch.where(counts, grouped - mean[..., None], 0.0).square().sum(dim=-1)
    lowest = grouped.masked_fill(~counts, torch.inf).amin(dim=-1)
    highest = grouped.masked_fill(~counts, -torch.inf).amax(dim=-1)
    parts = mean, (squares / count).sqrt(), lowest, highest
    return Moments(*(part.reshape(batch, -1) for part in parts))


def attention_mass(
    keys: Tensor,
    queries: Tensor,
    scale: float,
    visible: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """How much attention sampled queries pay to every key: `sum_s w_s softmax_k(scale q_s . k)`.

    keys: `[B, Hkv, L, D]`, any float dtype, any strides; queries: `[B, S, H, D]`, any float dtype,
    rotated, query heads of a KV head one after the other. Returns float32 `[B, H, L]`; all in
    float64 if `queries` is.
    visible: bool `[B, Hkv, L]`; a key that is not gets no attention. weights `w`: float32 `[B, S]`,
    none negative, scaled here to sum to 1 per row; without them all queries count the same. A
    hidden key and a query of weight 0 are never used, whatever they hold. A row whose weights are
    all 0 gets zeros, and so does a KV head that sees nothing.
    """
    (batch, kv_heads, live, _), (_, count, heads, _) = keys.shape, queries.shape
    groups = heads // kv_heads
    dtype = torch.promote_types(queries.dtype, torch.float32)
    mass = torch.zeros(batch, heads, live, dtype=dtype, device=keys.device)
    weights = torch.ones(batch, count, device=keys.device) if weights is None else weights
    total = weights.sum(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    weights = (weights / total).to(dtype)
    used = (weights != 0)[:, :, None, None]
    diagonal = torch.eye(groups, dtype=dtype, device=keys.device)
    most = MASS_ELEMENTS if keys.device.type == "cpu" else GPU_MASS_ELEMENTS
    width = live if live * LEAST_ROWS <= most else max(1, most // min(count * groups, MOST_ROWS))
    pieces = -(-count // max(1, most // max(1, width * groups)))
    scratch = mass.new_empty(groups * -(-count // pieces) * width)
    for row, kv_head in product(range(batch), range(kv_heads)):
        of_head = slice(kv_head * groups, (kv_head + 1) * groups)
        tiles = keys[row, kv_head].split(width)
        seen = None if visible is None else visible[row, kv_head]
        parts = queries[row, :, of_head], used[row], weights[row, :, None, None] * diagonal
        for q, is_used, w in zip(*(part.chunk(pieces) for part in parts), strict=True):
            q = torch.where(is_used, q, 0).to(dtype).flatten(0, 1)  # [C G, D]
            add_mass(mass[row, of_head], tiles, q, scale, seen, w.flatten(0, 1).T, scratch)
    if visible is not None:
        mass.view(batch, kv_heads, groups, live).masked_fill_(~visible[:, :, None], 0)
    return mass


def add_mass(
    mass: Tensor,
    tiles: tuple[Tensor, ...],
    queries: Tensor,
    scale: float,
    visible: Tensor | None,
    weights: Tensor,
    scratch: Tensor,
) -> None:
    """Add to `mass` `[G, L]` what `queries` `[R, D]`, of `weights` `[G, R]`, pay to the keys of one
    KV head: `tiles` `[T, D]`, with more than one each multiplied twice, first for what it has of
    every query's total."""
    width = len(tiles[0])
    seen = [None] * len(tiles) if visible is None else visible.split(width)
    of_total = None
    if len(tiles) > 1:
        logs = []
        for k, part in zip(tiles, seen, strict=True):  # `logsumexp`, in place
            shares = logits(queries, k, scale, part, scratch)
            peak = shares.amax(dim=1).clamp_min(torch.finfo(shares.dtype).min)
            logs.append(shares.sub_(peak[:, None]).exp_().sum(dim=1).log_().add_(peak))
        of_total = torch.stack(logs).softmax(dim=0)  # [tiles, R]
    for i, (k, part) in enumerate(zip(tiles, mass.split(width, dim=1), strict=True)):
        shares = logits(queries, k, scale, seen[i], scratch)
        shares = torch.softmax(shares, dim=1, out=shares)  # reads a row before it writes it
        w = weights if of_total is None else weights * of_total[i]
        part.addmm_(w, shares)


def logits(
    queries: Tensor, keys: Tensor, scale: float, visible: Tensor | None, scratch: Tensor
) -> Tensor:
    """`scale` times `[R, D]` times `[T, D]`, -inf where a key is not visible, in `scratch`. Keys
    of another dtype are promoted in chunks."""
    out = scratch[: len(queries) * len(keys)].view(len(queries), len(keys))
    chunk = len(keys) if keys.dtype == queries.dtype else SCRATCH_ELEMENTS // keys.shape[1]
    chunk = max(1, chunk)
    for part, k in zip(out.split(chunk, dim=1), keys.split(chunk), strict=True):
        torch.addmm(part, queries, k.to(queries.dtype).mT, beta=0, alpha=scale, out=part)
    if visible is not None:
        out.masked_fill_(~visible, -torch.inf)
    return out


def norms(keys: Tensor) -> Tensor:
    """Euclidean norm of every key: `[B, Hkv, L, D]`, any float dtype, to float32 `[B, Hkv, L]`."""
    batch, kv_heads, live, dim = keys.shape
    norms = torch.empty(batch, kv_heads, live, dtype=torch.float32, device=keys.device)
    chunk = max(1, SCRATCH_ELEMENTS // (batch * kv_heads * dim))
    for start in range(0, live, chunk):
        part = keys[:, :, start : start + chunk].float()
        norms[:, :, start : start + chunk] = torch.linalg.vector_norm(part, dim=-1)
    return norms


def move_slots(blocks: Tensor, source: Tensor, target: Tensor, into: Tensor) -> None:
    """Copy tokens from slots `source` of `blocks` to slots `target` of `into`, in order.

    blocks, into: `[Hkv, num_blocks, block_size, D]`, the same tensor when tokens slide in place.
    source: physical slots `[B, Hkv, n]`; target: `[B, n]`; int64.

    In place it is right because survivors keep their order: the i-th survivor comes from a slot of
    its row at or after the i-th, so once slots before `target[i]` were written nothing that is
    still to be read lies there. Chunks ascend, and each is gathered before it is written, so the
    scratch is one chunk.
    """
    heads, _, size, dim = blocks.shape
    flat = blocks.view(-1, dim)
    flat_into = into.view(heads, -1, dim)
    head_offset = torch.arange(heads, device=blocks.device)[:, None] * (blocks.shape[1] * size)
    chunk = max(1, SCRATCH_ELEMENTS // (heads * dim))
    for row in range(source.shape[0]):
        for start in range(0, source.shape[2], chunk):
            picked = source[row, :, start : start + chunk] + head_offset  # [Hkv, C]
            tokens = flat.index_select(0, picked.reshape(-1)).view(heads, -1, dim)
            flat_into.index_copy_(1, target[row, start : start + chunk], tokens)


def write_kv(
    keys: Tensor,
    values: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    tables: Tensor,
    start: Tensor,
) -> None:
    """Write new tokens to slots `[start[b], start[b] + q)` of row `b`, through the block tables.

    keys: `[Hkv, num_blocks, block_size, D]`, values: the same with `Dv`, both contiguous; new_keys,
    new_values: `[B, Hkv, q, D]` and `Dv`, any strides, same dtypes; tables: block ids in token
    order, int32 `[B, width]`; start: int32 `[B]`. Rows write to blocks of their own.
    """
    size = keys.shape[2]
    token = start[:, None].long() + torch.arange(new_keys.shape[2], device=keys.device)  # [B, q]
    block = tables.gather(1, token // size)
    keys[:, block, token % size] = new_keys.transpose(0, 1)
    values[:, block, token % size] = new_values.transpose(0, 1)


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    stop: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    visible: Tensor | None = None,
) -> Tensor:
    """Attention of one query per row and head to the live slots of its row, through the tables.

    query: `[B, H, D]`, any strides, query heads of a KV head one after the other; keys, values,
    tables: as in `write_kv`; stop: int32 `[B]`, the live slots of a row are `[0, stop)` and the
    query's own token the last of them. Returns `[B, H, Dv]` in the query's dtype.

    window: attends to slots `[stop - window, stop)` only. softcap: logits are
    `softcap tanh(logit / softcap)`. sinks: `[H]`, a logit per head that takes its share of the
    softmax and has no value. visible: bool `[B, L]`, `L >= max(stop)`, any strides; False hides a
    slot. A row that sees nothing gets zeros. What no row sees is never used: neither slots nor
    table entries, whatever they hold.
    """
    size = keys.shape[2]
    slot, stop = torch.arange(tables.shape[1] * size, device=query.device), stop[:, None]
    seen = slot < stop  # [B, L]
    if window is not None:
        seen &= slot >= stop - window
    if visible is not None:
        seen &= torch.nn.functional.pad(visible, (0, len(slot) - visible.shape[1]))
    in_use = seen.unflatten(1, (tables.shape[1], size)).any(2)
    tables = tables.masked_fill(~in_use, 0)
    k, v = (
        blocks[:, tables].flatten(2, 3).transpose(0, 1).masked_fill(~seen[:, None, :, None], 0)
        for blocks in (keys, values)
    )  # [B, Hkv, L, D]
    return attend(query[:, :, None], k, v, seen[:, None, None], scale, softcap, sinks)[:, :, 0]


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention by the formula: `softmax(softcap tanh(scale q . k / softcap) + mask) v`.

    query: `[B, H, q, D]`; keys, values: `[B, Hkv, L, D]` and `Dv`; mask: bool (False hides) or
    additive, broadcastable to `[B, H, q, L]`; sinks: `[H]`, a logit per head that takes its share
    of the softmax and has no value. In float32, or float64 if the query is; returns
    `[B, H, q, Dv]` in the query's dtype, zeros where nothing is seen.
    """
    (batch, heads, count, dim), kv_heads = query.shape, keys.shape[1]
    dtype = torch.promote_types(query.dtype, torch.float32)
    grouped = query.to(dtype).reshape(batch, kv_heads, -1, dim)  # [B, Hkv, G q, D]
    logits = (grouped @ keys.to(dtype).mT * scale).view(batch, heads, count, -1)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if mask is not None and mask.dtype == torch.bool:
        logits = logits.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        logits = logits + mask.to(dtype)
    if sinks is None:  # none, but for a query that sees nothing: its weights are zero, not NaN
        sink = torch.where(logits.amax(dim=3, keepdim=True) == -torch.inf, 0.0, -torch.inf)
    else:
        sink = sinks.to(dtype).view(1, heads, 1, 1).expand(batch, -1, count, -1)
    weights = torch.cat((logits, sink), dim=3).softmax(dim=3)[..., :-1]
    out = weights.view(batch, kv_heads, -1, weights.shape[3]) @ values.to(dtype)
    return out.view(batch, heads, count, -1).to(query.dtype)
