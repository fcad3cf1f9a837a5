"""`paged_attention` in Triton: one decode step, straight off the blocks.

Grid: one program per row, KV head, up to 16 of its query heads, and split of the row's live slots.
It walks its split in tiles of tokens, finds each token's slot through the table (a tile may lie in
several blocks, or be part of one), and reads keys and values once for all of its query heads, with
an online softmax in float32. A row's range is cut evenly on the device, so the grid depends on
shapes only; with more than one split a second kernel combines the parts.

Both products are `tl.dot`, with the query heads padded to 16 in all cases: on tensor cores a tile
is multiplied in fewer cycles than its bytes take to arrive, while products by hand need a reduction
across threads for each head and token, which is too slow from about 4 query heads per KV head on
(instructions counted, not measured). Weights stay float32: those of 16-bit values enter as two
16-bit parts, since one part would round the result as much again as its own dtype does.

Slots out of the row's range or hidden are never read, nor are their table entries; a tile's other
slots count as zero, with weight zero. Addresses are int64.

A quantised cache with a scale per block would load it beside `block`, `[TILE]`, and multiply
`logits` by that of the keys, and `weights` by that of the values after their sum was taken.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS = 16
"""Query heads per program: the least that tensor cores multiply."""
TILE_BYTES = 32768
"""Keys and values of a tile: two tiles fit the 99 KiB of sm_89, one arrives while one is used."""
MOST_TILE = 64
LEAST_SPLIT = 128
"""Tokens that are worth a program, a row of scratch and their share of the second kernel."""
MOST_SPLITS = 128
PROGRAMS = 2
"""Programs per multiprocessor to aim for, then rounded down: all run at once, and cut evenly."""
MULTIPROCESSORS = 132
"""Taken for granted where no GPU says otherwise."""
LOG2E = 1.4426950408889634
"""Logits are in units of ln 2 in here: `exp2` takes them as they are."""
NEVER = tl.constexpr(-1e30)
"""A peak below any logit, finite so that differences are numbers."""


@triton.jit(
    do_not_specialize=["table_stride", "seen_row_stride", "splits"]
)  # they grow: compile once
def paged_attention_kernel(
    query, keys, values, tables, stop, sinks, visible, out, stats,
    q_row_stride, q_head_stride, q_dim_stride, table_stride, seen_row_stride, seen_slot_stride,
    kv_heads, slots, splits, window, scale, cap,
    GROUPS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, HEADS: tl.constexpr, PADDED: tl.constexpr, VALUE_PADDED: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    """Attend from the query heads of one KV head to one split: the result, or its part with the
    peak and the total of its weights."""
    parts: tl.constexpr = (GROUPS + HEADS - 1) // HEADS
    split = tl.program_id(0) % splits
    part = tl.program_id(0) // splits % parts
    row_head = (tl.program_id(0) // splits // parts).to(tl.int64)
    row = row_head // kv_heads
    kv_head = row_head % kv_heads
    group = part * HEADS + tl.arange(0, HEADS)
    is_head = group < GROUPS
    head = kv_head * GROUPS + group  # [HEADS]
    dim = tl.arange(0, PADDED)
    value_dim = tl.arange(0, VALUE_PADDED)
    has_dim = dim < DIM
    has_value = value_dim < VALUE_DIM
    q = tl.load(
        query + row * q_row_stride + head[:, None] * q_head_stride
        + dim[None, :].to(tl.int64) * q_dim_stride,
        is_head[:, None] & has_dim[None, :],
        other=0.0,
    )  # [HEADS, PADDED]  # fmt: skip
    tables += row * table_stride
    keys += kv_head * slots * DIM + dim
    values += kv_head * slots * VALUE_DIM + value_dim

    last = tl.load(stop + row)
    first = tl.maximum(last - window, 0)
    span = tl.cdiv(tl.cdiv(last - first, splits), TILE) * TILE
    begin = first + split * span
    end = tl.minimum(begin + span, last)
    peak = tl.full([HEADS], NEVER, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, VALUE_PADDED], tl.float32)
    if sinks is not None and split == 0:
        sink = tl.load(sinks + head, is_head, other=0.0).to(tl.float32) * 1.4426950408889634
        peak = tl.maximum(peak, sink)
        total = tl.exp2(sink - peak)
    for start in range(begin, end, TILE):
        token = start + tl.arange(0, TILE)
        seen = token < end
        if visible is not None:
            place = row * seen_row_stride + token.to(tl.int64) * seen_slot_stride
            seen = seen & (tl.load(visible + place, seen, other=0) != 0)
        block = tl.load(tables + token // BLOCK, seen, other=0).to(tl.int64)
        slot = block * BLOCK + token % BLOCK  # [TILE]
        k = tl.load(
            keys[:, None] + slot[None, :] * DIM, has_dim[:, None] & seen[None, :], other=0.0
        )  # [PADDED, TILE]
        logits = tl.dot(q, k, input_precision="ieee") * scale
        if CAPPED:
            logits = cap * tanh(logits)
        logits = tl.where(seen[None, :], logits, float("-inf"))  # [HEADS, TILE]
        new_peak = tl.maximum(peak, tl.max(logits, axis=1))
        weights = tl.exp2(logits - new_peak[:, None])
        rescale = tl.exp2(peak - new_peak)
        peak = new_peak
        total = total * rescale + tl.sum(weights, axis=1)
        v = tl.load(
            values[None, :] + slot[:, None] * VALUE_DIM,
            seen[:, None] & has_value[None, :],
            other=0.0,
        )  # [TILE, VALUE_PADDED]
        rounded = weights.to(v.dtype)
        acc = tl.dot(rounded, v, acc * rescale[:, None], input_precision="ieee")
        if v.dtype != tl.float32:
            acc = tl.dot((weights - rounded.to(tl.float32)).to(v.dtype), v, acc)

    place = ((row * kv_heads * GROUPS) + head) * splits + split
    if stats is None:
        acc = acc / tl.where(total == 0, 1, total)[:, None]
    else:
        tl.store(stats + 2 * place, peak, is_head)
        tl.store(stats + 2 * place + 1, total, is_head)
    tl.store(
        out + place[:, None] * VALUE_DIM + value_dim[None, :],
        acc.to(out.dtype.element_ty),
        is_head[:, None] & has_value[None, :],
    )


@triton.jit
def tanh(x):
    """To a few units in the last place: by its series where 1 - e would lose them."""
    square = x * x
    series = -1382 / 155925 * square + 62 / 2835
    series = series * square - 17 / 315
    series = series * square + 2 / 15
    series = series * square - 1 / 3
    series = x + x * square * series
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)
    far = (1 - e) / (1 + e)
    return tl.where(tl.abs(x) < 0.4, series, tl.where(x < 0, -far, far))


@triton.jit
def combine_kernel(
    part, stats, out,
    VALUE_DIM: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Add up the parts of one row and query head, for some columns of its values."""
    pieces: tl.constexpr = (VALUE_DIM + COLUMNS - 1) // COLUMNS
    row_head = (tl.program_id(0) // pieces).to(tl.int64)
    column = tl.program_id(0) % pieces * COLUMNS + tl.arange(0, COLUMNS)
    there = column < VALUE_DIM
    place = row_head * SPLITS + tl.arange(0, SPLITS)
    peak = tl.load(stats + 2 * place)
    total = tl.load(stats + 2 * place + 1)
    acc = tl.load(part + place[:, None] * VALUE_DIM + column[None, :], there[None, :], other=0.0)
    rescale = tl.exp2(peak - tl.max(peak, axis=0))  # [SPLITS]
    total = tl.sum(total * rescale, axis=0)
    result = tl.sum(acc * rescale[:, None], axis=0) / tl.where(total == 0, 1, total)
    tl.store(out + row_head * VALUE_DIM + column, result.to(out.dtype.element_ty), there)


def launch_shape(
    groups: int, dim: int, value_dim: int, block_size: int, element_size: int, capped: bool,
    hip: bool = False,
) -> dict[str, int]:  # fmt: skip
    """The kernel's compile-time parameters and launch options.

    The same for sm_80, sm_89 and sm_90: there, with five stages Triton keeps two tiles, because the
    table's entries have to arrive before their keys can be asked for. `hip` (gfx942) keeps one in
    its 64 KiB, the next one in registers.
    """
    padded = max(16, triton.next_power_of_2(dim))
    value_padded = max(16, triton.next_power_of_2(value_dim))
    tile = TILE_BYTES // ((padded + value_padded) * element_size)
    return {
        "GROUPS": groups,
        "DIM": dim,
        "VALUE_DIM": value_dim,
        "BLOCK": block_size,
        "TILE": min(MOST_TILE, max(16, 1 << tile.bit_length() - 1)),
        "HEADS": HEADS,
        "PADDED": padded,
        "VALUE_PADDED": value_padded,
        "CAPPED": int(capped),
        "num_warps": 4 if element_size < 4 else 8,  # float32 has no tensor cores to help
        "num_stages": 2 if hip else 5,
        "enable_fp_fusion": True,
    }


def combine_shape(value_dim: int, splits: int) -> dict[str, int]:
    """The same for the second kernel: 32 values per thread at most."""
    return {
        "VALUE_DIM": value_dim,
        "COLUMNS": min(triton.next_power_of_2(value_dim), max(32, 2048 // splits)),
        "SPLITS": splits,
        "num_warps": 4,
        "num_stages": 1,
    }


def count_splits(programs: int, slots: int, multiprocessors: int) -> int:
    """Splits for `programs` rows and heads of up to `slots` live slots: a power of two, so that few
    versions of the second kernel are compiled while a cache grows."""
    wanted = min(PROGRAMS * multiprocessors // programs, slots // LEAST_SPLIT, MOST_SPLITS)
    return 1 << max(1, wanted).bit_length() - 1


def bytes_to_move(query: Tensor, keys: Tensor, values: Tensor, tables: Tensor, slots: int) -> int:
    """Keys and values of `slots` attended slots (of all rows) read once, queries read and results
    written once, tables and stops read once."""
    batch, heads, _ = query.shape
    kv_heads, dims = keys.shape[0], keys.shape[3] + values.shape[3]
    element = keys.element_size()
    read = slots * kv_heads * dims * element + query.nbytes + tables.nbytes + 4 * batch
    return read + batch * heads * values.shape[3] * element


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
    splits: int | None = None,
) -> Tensor:
    """As `reference.paged_attention`; `splits`, a power of two, overrides what is chosen."""
    batch, heads, dim = query.shape
    kv_heads, num_blocks, size, value_dim = values.shape
    assert keys.is_contiguous() and values.is_contiguous()
    assert keys.shape == (kv_heads, num_blocks, size, dim) and heads % kv_heads == 0
    assert query.dtype == keys.dtype == values.dtype and query.element_size() in (2, 4)
    assert tables.dtype == stop.dtype == torch.int32
    assert tables.shape[0] == batch and tables.stride(1) == 1
    assert stop.shape == (batch,) and stop.is_contiguous()
    assert sinks is None or (sinks.shape == (heads,) and sinks.is_contiguous())
    assert visible is None or (visible.dtype == torch.bool and visible.shape[0] == batch)
    out = torch.empty(batch, heads, value_dim, dtype=query.dtype, device=query.device)
    if out.numel() == 0:
        return out
    hip = torch.version.hip is not None
    element = keys.element_size()
    shape = launch_shape(heads // kv_heads, dim, value_dim, size, element, softcap is not None, hip)
    reach = tables.shape[1] * size if window is None else min(window, tables.shape[1] * size)
    programs = batch * kv_heads * triton.cdiv(heads // kv_heads, HEADS)
    splits = splits or count_splits(programs, reach, multiprocessors(query.device))
    part, stats = out, None
    if splits > 1:
        scratch: dict[str, Any] = {"dtype": torch.float32, "device": query.device}
        part = torch.empty(batch * heads, splits, value_dim, **scratch)
        stats = torch.empty(batch * heads, splits, 2, **scratch)
    scale, cap = (scale * LOG2E, 0.0) if softcap is None else (scale / softcap, softcap * LOG2E)
    paged_attention_kernel[(programs * splits,)](
        query, keys, values, tables, stop, sinks,
        visible if visible is None else visible.view(torch.uint8), part, stats,
        *query.stride(), tables.stride(0), *((0, 0) if visible is None else visible.stride()),
        kv_heads, num_blocks * size, splits, 2**31 - 1 if window is None else window, scale, cap,
        **shape,
    )  # fmt: skip
    if stats is not None:
        shape = combine_shape(value_dim, splits)
        combine_kernel[(batch * heads * triton.cdiv(value_dim, shape["COLUMNS"]),)](
            part, stats, out, **shape
        )
    return out


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU, asked once."""
    if device.type != "cuda":
        return MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
