"""Others' attention of one query per row over the same keys and values, where it is installed.

Each gets the layout it likes best and is checked before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from kernel_cases import PagedCase
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

FLASH_PAGE = 256
"""Tokens per page: the least that flash-attn 2 takes."""
WORKSPACE_BYTES = 128 << 20
TOLERANCE = 2e-2
"""Relative error of a result in bfloat16 that counts as right."""


@dataclass(frozen=True)
class Peer:
    """Somebody else's attention: how to call it, or why it can't be."""

    name: str
    run: Callable[[], Tensor] | None
    note: str = ""


def peers(case: PagedCase) -> list[Peer]:
    """Those that can be called, checked; the others with the reason in `note`."""
    return [
        _checked(name, prepare, case)
        for name, prepare in (
            ("SDPA, contiguous K/V", _sdpa),
            ("flash-attn, paged", _flash_attn),
            ("FlashInfer, paged", _flashinfer),
        )
    ]


def _checked(
    name: str, prepare: Callable[[PagedCase], Callable[[], Tensor]], case: PagedCase
) -> Peer:
    try:
        run = prepare(case)
        exact = case.exact()
        error = float((run().double() - exact).norm() / exact.norm())
    except ImportError as error_:
        return Peer(name, None, f"not installed ({error_.name})" if error_.name else str(error_))
    except Exception as error_:  # whatever it is, it is theirs and ends no run of ours
        reason = str(error_).strip().split("\n")[0][:120]
        return Peer(name, None, f"failed: {type(error_).__name__}: {reason}")
    if not error <= TOLERANCE:
        return Peer(name, None, f"wrong: relative error {error:.2g}")
    return Peer(name, run)


def _sdpa(case: PagedCase) -> Callable[[], Tensor]:
    keys, values = case.dense_rows()
    query, scale = case.query[:, :, None], case.scale  # [B, H, 1, D]
    return lambda: scaled_dot_product_attention(
        query, keys, values, scale=scale, enable_gqa=True
    ).squeeze(2)


def _flash_attn(case: PagedCase) -> Callable[[], Tensor]:
    from flash_attn import flash_attn_with_kvcache

    if case.query.device.type != "cuda":
        raise ImportError("needs a GPU")
    batch, live = len(case.stops), case.stops[0]
    width = -(-live // FLASH_PAGE)
    order = torch.randperm(batch * width, device=case.query.device)
    table = order.view(batch, width).to(torch.int32)
    pages = [_repaged(tensor, order, width) for tensor in case.dense_rows()]
    query, scale, stop = case.query[:, None], case.scale, case.stop  # [B, 1, H, D]
    return lambda: flash_attn_with_kvcache(
        query, *pages, cache_seqlens=stop, block_table=table, softmax_scale=scale, causal=True
    ).squeeze(1)


def _repaged(rows: Tensor, order: Tensor, width: int) -> Tensor:
    """`rows` `[B, Hkv, T, D]` as pages `[B * width, FLASH_PAGE, Hkv, D]` in `order`."""
    batch, kv_heads, live, dim = rows.shape
    padded = torch.nn.functional.pad(rows, (0, 0, 0, width * FLASH_PAGE - live))
    pages = padded.transpose(1, 2).reshape(batch * width, FLASH_PAGE, kv_heads, dim)
    out = torch.empty_like(pages)
    out[order] = pages
    return out


def _flashinfer(case: PagedCase) -> Callable[[], Tensor]:
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    device = case.query.device
    if device.type != "cuda":
        raise ImportError("needs a GPU")
    batch, heads, dim = case.query.shape
    kv_heads, _, size, _ = case.keys.shape
    width = case.tables.shape[1]
    first = torch.arange(0, (batch + 1) * width, width, dtype=torch.int32, device=device)
    rest = (case.stop - 1) % size + 1
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    wrapper.plan(
        first,
        case.tables.reshape(-1).contiguous(),
        rest,
        heads,
        kv_heads,
        dim,
        size,
        q_data_type=case.query.dtype,
        kv_data_type=case.keys.dtype,
        sm_scale=case.scale,
    )
    pages = tuple(blocks.transpose(0, 1).contiguous() for blocks in (case.keys, case.values))
    query = case.query
    return lambda: wrapper.run(query, pages)
