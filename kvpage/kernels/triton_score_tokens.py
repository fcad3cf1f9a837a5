"""`score_tokens` in Triton, straight off the blocks: every key is read once.

Grid: one program per tile of tokens, row and KV head. It holds the tile in registers and scores it
for all query heads of the KV head. `re` and `im` are the two parts of the bands, `rest` the
dimensions that are not rotated; a head_dim or a number of bands that is no power of two is masked.

With `candidates` a program also leaves, per head, their number, mean score, sum of squared
deviations from it, lowest and highest score: what a z-score needs, without another pass. Tiles are
merged as Chan, Golub and LeVeque (1979) do, which subtracts no large sums of squares.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvpage.kernels.moments import Moments

TILE_ELEMENTS = 8192
"""Elements of a tile: with 4 warps 64 per thread, which leaves room for the magnitudes."""


@triton.jit
def score_tokens_kernel(
    keys, direction, norm_weight, candidates, scores, parts,
    row_stride, head_stride, token_stride, dim_stride,
    kv_heads, live,
    GROUPS: tl.constexpr, DIM: tl.constexpr, BANDS: tl.constexpr, INTERLEAVED: tl.constexpr,
    TILE: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Score the tokens of one tile for the query heads of one KV head."""
    tiles = tl.cdiv(live, TILE)
    row_head = (tl.program_id(0) // tiles).to(tl.int64)
    token = (tl.program_id(0) % tiles).to(tl.int64) * TILE + tl.arange(0, TILE)
    there = token < live
    keys += row_head // kv_heads * row_stride + row_head % kv_heads * head_stride
    direction += row_head * GROUPS * DIM
    norm_weight += row_head * GROUPS * BANDS
    scores += row_head * GROUPS * live + token
    tile = tl.program_id(0) % tiles
    if candidates is not None:
        counts = tl.load(candidates + row_head * live + token, there, other=0) != 0  # [TILE]
        count = tl.sum(counts.to(tl.float32), axis=0)
    key = keys + token[:, None] * token_stride  # [TILE, 1]

    band = tl.arange(0, PAIRS)
    if INTERLEAVED:  # the pairs cover the dimensions that are not rotated too
        first = 2 * band
        second = first + 1
        has_first = first < DIM
        has_second = second < DIM
        dim = tl.arange(0, 2 * PAIRS)
        whole = tl.load(
            key + dim[None, :].to(tl.int64) * dim_stride,
            there[:, None] & (dim < DIM)[None, :],
            other=0.0,
        )
        re, im = tl.split(tl.reshape(whole, [TILE, PAIRS, 2]))
    else:
        first = band
        second = band + BANDS
        has_first = band < BANDS
        has_second = has_first
        is_band = there[:, None] & has_first[None, :]
        re = tl.load(key + first[None, :].to(tl.int64) * dim_stride, is_band, other=0.0)
        im = tl.load(key + second[None, :].to(tl.int64) * dim_stride, is_band, other=0.0)
    re = re.to(tl.float32)  # [TILE, PAIRS]
    im = im.to(tl.float32)
    magnitude = tl.sqrt(re * re + im * im)
    if REST > 0:
        other = 2 * BANDS + tl.arange(0, REST)
        has_other = other < DIM
        rest = tl.load(
            key + other[None, :].to(tl.int64) * dim_stride,
            there[:, None] & has_other[None, :],
            other=0.0,
        ).to(tl.float32)  # [TILE, REST]

    for group in tl.static_range(GROUPS):
        u = direction + group * DIM
        u_re = tl.load(u + first, has_first, other=0.0)  # [PAIRS]
        u_im = tl.load(u + second, has_second, other=0.0)
        w = tl.load(norm_weight + group * BANDS + band, band < BANDS, other=0.0)
        score = tl.sum(re * u_re[None, :] + im * u_im[None, :] + magnitude * w[None, :], axis=1)
        if REST > 0:
            score += tl.sum(rest * tl.load(u + other, has_other, other=0.0)[None, :], axis=1)
        tl.store(scores + group * live, score, there)
        if candidates is not None:
            mean = tl.sum(tl.where(counts, score, 0.0), axis=0) / tl.maximum(count, 1.0)
            off = tl.where(counts, score - mean, 0.0)
            part = parts + ((row_head * GROUPS + group) * tiles + tile) * 5
            tl.store(part, count)
            tl.store(part + 1, mean)
            tl.store(part + 2, tl.sum(off * off, axis=0))
            tl.store(part + 3, tl.min(tl.where(counts, score, float("inf")), axis=0))
            tl.store(part + 4, tl.max(tl.where(counts, score, float("-inf")), axis=0))


def launch_shape(groups: int, dim: int, bands: int, interleaved: bool) -> dict[str, int]:
    """The kernel's compile-time parameters and launch options for `groups` query heads per KV
    head, head_dim `dim` and `bands` rotated pairs."""
    interleaved = interleaved and bands > 0
    rest = 0 if interleaved else dim - 2 * bands
    pairs = triton.next_power_of_2((dim + 1) // 2 if interleaved else max(1, bands))
    rest = triton.next_power_of_2(rest) if rest else 0
    width = (2 * pairs if bands else 0) + rest
    return {
        "GROUPS": groups,
        "DIM": dim,
        "BANDS": bands,
        "INTERLEAVED": int(interleaved),
        "TILE": max(16, TILE_ELEMENTS // triton.next_power_of_2(width)),
        "PAIRS": pairs,
        "REST": rest,
        "num_warps": 4,
        "num_stages": 1,
        "enable_fp_fusion": True,
    }


def bytes_to_move(keys: Tensor, direction: Tensor, norm_weight: Tensor) -> int:
    """Keys, directions and weights read once, one float32 score per query head and key written.

    (Candidates, a byte per KV head and key, and five numbers per tile are not counted.)
    """
    batch, _, live, _ = keys.shape
    read = keys.numel() * keys.element_size() + direction.nbytes + norm_weight.nbytes
    return read + 4 * batch * direction.shape[1] * live


def score_tokens(
    keys: Tensor,
    direction: Tensor,
    norm_weight: Tensor,
    interleaved: bool = False,
    candidates: Tensor | None = None,
) -> tuple[Tensor, Moments | None]:
    """As `reference.score_tokens`, for float32 `direction` and `norm_weight`."""
    batch, kv_heads, live, dim = keys.shape
    heads, bands = direction.shape[1], norm_weight.shape[2]
    assert direction.shape == (batch, heads, dim) and norm_weight.shape == (batch, heads, bands)
    assert direction.dtype == norm_weight.dtype == torch.float32
    assert heads % kv_heads == 0 and 2 * bands <= dim
    scores = torch.empty(batch, heads, live, dtype=torch.float32, device=keys.device)
    shape = launch_shape(heads // kv_heads, dim, bands, interleaved)
    tiles = triton.cdiv(live, shape["TILE"])
    parts = None
    if candidates is not None:
        assert candidates.shape == (batch, kv_heads, live) and candidates.dtype == torch.bool
        candidates = candidates.contiguous().view(torch.uint8)
        parts = torch.empty(batch, heads, tiles, 5, dtype=torch.float32, device=keys.device)
    if scores.numel() > 0:
        score_tokens_kernel[(batch * kv_heads * tiles,)](
            keys, direction.contiguous(), norm_weight.contiguous(), candidates, scores, parts,
            *keys.stride(), kv_heads, live, **shape,
        )  # fmt: skip
    return scores, None if parts is None else merged(parts)


def merged(parts: Tensor) -> Moments:
    """The moments `[B, H]` of all tiles, from those of each: `parts` `[B, H, tiles, 5]`."""
    count, mean, squares, lowest, highest = parts.unbind(dim=3)
    total = count.sum(dim=2).clamp_min(1)
    centre = (count * mean).sum(dim=2) / total
    squares = (squares + count * (mean - centre[:, :, None]).square()).sum(dim=2)
    return Moments(centre, (squares / total).sqrt(), lowest.amin(dim=2), highest.amax(dim=2))
