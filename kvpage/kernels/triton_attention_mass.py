"""`attention_mass` in Triton, straight off the blocks: logits are made twice, stored never.

First kernel, one program per row, KV head, tile of its sampled queries (`GROUPS * places` of them,
one query head after the other) and split of the keys: the logarithm of each query's total over its
split, by an online softmax. Second kernel, one program per row, KV head and tile of keys: it holds
the tile, walks all queries of the KV head, and sums what they pay to each key.

All query heads of a KV head share the keys, so that the first kernel reads a key once per tile of
queries, and those reads hit L2; the second reads it once. Both products are `tl.dot` in the keys'
dtype with float32 sums; hidden keys and queries of weight 0 are never read. Addresses are int64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpage.kernels.triton_paged_attention import LOG2E, NEVER, count_splits, multiprocessors

TILE_BYTES = 16384
"""Keys of a tile, and queries of one: the queries and the tiles on their way fit 64 KiB."""
MOST_TILE = 64
MOST_FLOAT32_TILE = 32
"""Without tensor cores both factors lie in registers: 64 spill."""
MOST_SPLITS = 16
"""The second kernel merges the parts of every query for each tile of keys."""


@triton.jit
def total_kernel(
    keys, queries, visible, weights, totals,
    row_stride, head_stride, token_stride, dim_stride,
    kv_heads, live, places, splits, scale,
    GROUPS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """The base-2 logarithm of what each query of one tile gives to the keys of one split."""
    split = tl.program_id(0) % splits
    parts = tl.cdiv(GROUPS * places, ROWS)
    query = tl.program_id(0) // splits % parts * ROWS + tl.arange(0, ROWS)
    row_head = (tl.program_id(0) // splits // parts).to(tl.int64)
    row = row_head // kv_heads
    kv_head = row_head % kv_heads
    dim = tl.arange(0, PADDED)
    has_dim = dim < DIM
    is_query = query < GROUPS * places
    place = row * places + query % places  # [ROWS]
    used = tl.load(weights + place, is_query, other=0.0) != 0
    head = kv_head * GROUPS + query // places
    q = tl.load(
        queries + ((place * kv_heads * GROUPS + head) * DIM)[:, None] + dim[None, :],
        used[:, None] & has_dim[None, :],
        other=0.0,
    )  # [ROWS, PADDED]
    keys += row * row_stride + kv_head * head_stride
    span = tl.cdiv(tl.cdiv(live, splits), TILE) * TILE
    begin = split * span
    end = tl.minimum(begin + span, live)
    peak = tl.full([ROWS], NEVER, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(begin, end, TILE):
        token = (start + tl.arange(0, TILE)).to(tl.int64)
        seen = token < end
        if visible is not None:
            seen = seen & (tl.load(visible + row_head * live + token, seen, other=0) != 0)
        k = tl.load(
            keys + token[None, :] * token_stride + dim[:, None].to(tl.int64) * dim_stride,
            has_dim[:, None] & seen[None, :],
            other=0.0,
        )  # [PADDED, TILE]
        logits = tl.dot(q, k, input_precision="ieee") * scale
        logits = tl.where(seen[None, :], logits, float("-inf"))  # [ROWS, TILE]
        new_peak = tl.maximum(peak, tl.max(logits, axis=1))
        given = tl.sum(tl.exp2(logits - new_peak[:, None]), axis=1)
        total = total * tl.exp2(peak - new_peak) + given
        peak = new_peak
    total = tl.where(total == 0, NEVER, peak + tl.log2(tl.maximum(total, 1e-30)))
    tl.store(totals + (row_head * GROUPS * places + query) * splits + split, total, is_query)


@triton.jit
def mass_kernel(
    keys, queries, visible, weights, totals, mass,
    row_stride, head_stride, token_stride, dim_stride,
    kv_heads, live, places, scale,
    GROUPS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """What the queries of one KV head pay to one tile of its keys, per query head."""
    tiles = tl.cdiv(live, TILE)
    row_head = (tl.program_id(0) // tiles).to(tl.int64)
    row = row_head // kv_heads
    kv_head = row_head % kv_heads
    token = (tl.program_id(0) % tiles).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = token < live
    seen = there
    if visible is not None:
        seen = there & (tl.load(visible + row_head * live + token, there, other=0) != 0)
    dim = tl.arange(0, PADDED)
    has_dim = dim < DIM
    keys += row * row_stride + kv_head * head_stride
    k = tl.load(
        keys + token[:, None] * token_stride + dim[None, :].to(tl.int64) * dim_stride,
        seen[:, None] & has_dim[None, :],
        other=0.0,
    )  # [TILE, PADDED]
    split = tl.arange(0, SPLITS)
    for group in range(GROUPS):
        head = kv_head * GROUPS + group
        acc = tl.zeros([TILE], tl.float32)
        for start in range(0, places, ROWS):
            place = start + tl.arange(0, ROWS)
            w = tl.load(weights + row * places + place, place < places, other=0.0)
            used = w != 0
            q = tl.load(
                queries + (((row * places + place) * kv_heads * GROUPS + head) * DIM)[None, :]
                + dim[:, None],
                has_dim[:, None] & used[None, :],
                other=0.0,
            )  # [PADDED, ROWS]  # fmt: skip
            query = row_head * GROUPS * places + group * places + place
            part = tl.load(
                totals + query[:, None] * SPLITS + split[None, :], used[:, None], other=0.0
            )  # [ROWS, SPLITS]
            peak = tl.max(part, axis=1)
            total = peak + tl.log2(tl.sum(tl.exp2(part - peak[:, None]), axis=1))
            logits = tl.dot(k, q, input_precision="ieee") * scale - total[None, :]
            paid = tl.exp2(tl.where(seen[:, None] & used[None, :], logits, float("-inf")))
            acc += tl.sum(paid * w[None, :], axis=1)
        tl.store(mass + (row * kv_heads * GROUPS + head) * live + token, acc, there)


def launch_shape(groups: int, dim: int, places: int, element_size: int) -> dict[str, int]:
    """The compile-time parameters and launch options of both kernels, the same for sm_80, sm_89,
    sm_90 and gfx942."""
    padded = max(16, triton.next_power_of_2(dim))
    most = MOST_TILE if element_size < 4 else MOST_FLOAT32_TILE
    tile = min(most, max(16, TILE_BYTES // (padded * element_size)))
    return {
        "GROUPS": groups,
        "DIM": dim,
        "PADDED": padded,
        "ROWS": min(tile, max(16, triton.next_power_of_2(places))),
        "TILE": tile,
        "num_warps": 4,
        "num_stages": 3 if element_size < 4 else 2,
        "enable_fp_fusion": True,
    }


def bytes_to_move(keys: Tensor, queries: Tensor) -> int:
    """Keys and queries (in the keys' dtype) read once per kernel, one float32 per query head and
    key written. (Totals, weights and a byte per key for `visible` are not counted.)"""
    batch, _, live, _ = keys.shape
    read = (keys.numel() + queries.numel()) * keys.element_size()
    return 2 * read + 4 * batch * queries.shape[2] * live


def flops(keys: Tensor, queries: Tensor) -> int:
    """Of the two products; besides, each logit takes two exponentials."""
    return 2 * 2 * queries.numel() * keys.shape[2]


def attention_mass(
    keys: Tensor,
    queries: Tensor,
    scale: float,
    visible: Tensor | None = None,
    weights: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """As `reference.attention_mass`, with queries rounded to the keys' dtype; float32. `splits`, a
    power of two, overrides what is chosen."""
    (batch, kv_heads, live, dim), (_, places, heads, _) = keys.shape, queries.shape
    assert queries.shape == (batch, places, heads, dim) and heads % kv_heads == 0
    assert keys.element_size() in (2, 4)
    if visible is not None:
        assert visible.shape == (batch, kv_heads, live) and visible.dtype == torch.bool
        visible = visible.contiguous().view(torch.uint8)
    if weights is None:
        weights = torch.ones(batch, places, device=keys.device)
    assert weights.shape == (batch, places) and weights.dtype == torch.float32
    total = weights.sum(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    weights = (weights / total).contiguous()
    mass = torch.empty(batch, heads, live, dtype=torch.float32, device=keys.device)
    if mass.numel() == 0:
        return mass
    groups = heads // kv_heads
    shape = launch_shape(groups, dim, places, keys.element_size())
    programs = batch * kv_heads * triton.cdiv(groups * places, shape["ROWS"])
    chosen = count_splits(programs, live, multiprocessors(keys.device))
    splits = splits or min(chosen, MOST_SPLITS)
    totals = torch.empty(batch, heads, places, splits, dtype=torch.float32, device=keys.device)
    tensors = keys, queries.to(keys.dtype).contiguous(), visible, weights, totals
    sizes = *keys.stride(), kv_heads, live, places
    total_kernel[(programs * splits,)](*tensors, *sizes, splits, scale * LOG2E, **shape)
    tiles = batch * kv_heads * triton.cdiv(live, shape["TILE"])
    mass_kernel[(tiles,)](*tensors, mass, *sizes, scale * LOG2E, SPLITS=splits, **shape)
    return mass
