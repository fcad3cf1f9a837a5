"""`write_kv` in Triton: new keys and values go to their slots in one launch.

Grid: one program per row, KV head and tile of new tokens. It finds the slots through the row's
table and copies the tokens' keys and values. No two programs write the same slot, and none
reads a block. Indices and addresses are int64. Values are moved as integers of their size: bits,
whatever the dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 16
"""Tokens per tile of a prompt: 4 KiB at head_dim 128. A decode step has one."""
AS_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit(do_not_specialize=["table_stride", "new_tokens"])  # they vary: compile once
def write_kv_kernel(
    keys, values, new_keys, new_values, tables, start,
    k_row_stride, k_head_stride, k_token_stride, k_dim_stride,
    v_row_stride, v_head_stride, v_token_stride, v_dim_stride,
    table_stride, kv_heads, slots, new_tokens,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Write one tile of new tokens of one row and KV head."""
    tiles = tl.cdiv(new_tokens, TILE)
    row_head = (tl.program_id(0) // tiles).to(tl.int64)
    row = row_head // kv_heads
    head = row_head % kv_heads
    new = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    there = new < new_tokens
    token = tl.load(start + row) + new
    block = tl.load(tables + row * table_stride + token // BLOCK, there, other=0).to(tl.int64)
    slot = head * slots + block * BLOCK + token % BLOCK  # [TILE]
    new = new.to(tl.int64)
    dim = tl.arange(0, PADDED).to(tl.int64)
    new_keys += row * k_row_stride + head * k_head_stride
    new_values += row * v_row_stride + head * v_head_stride
    is_key = there[:, None] & (dim < DIM)[None, :]
    is_value = there[:, None] & (dim < VALUE_DIM)[None, :]
    k = tl.load(new_keys + new[:, None] * k_token_stride + dim[None, :] * k_dim_stride, is_key)
    v = tl.load(new_values + new[:, None] * v_token_stride + dim[None, :] * v_dim_stride, is_value)
    tl.store(keys + slot[:, None] * DIM + dim[None, :], k, is_key)  # [TILE, PADDED]
    tl.store(values + slot[:, None] * VALUE_DIM + dim[None, :], v, is_value)


def launch_shape(new_tokens: int, dim: int, value_dim: int, block_size: int) -> dict[str, int]:
    """The kernel's compile-time parameters and launch options, the same for every target."""
    return {
        "DIM": dim,
        "VALUE_DIM": value_dim,
        "BLOCK": block_size,
        "TILE": 1 if new_tokens == 1 else TILE,
        "PADDED": triton.next_power_of_2(max(dim, value_dim)),
        "num_warps": 1 if new_tokens == 1 else 4,
        "num_stages": 1,
    }


def bytes_to_move(new_keys: Tensor, new_values: Tensor, start: Tensor) -> int:
    """Every new token read and written, one table entry per token and row at most."""
    tokens = start.numel() * new_keys.shape[2]
    return 2 * (new_keys.numel() + new_values.numel()) * new_keys.element_size() + (
        4 * tokens + start.nbytes
    )


def write_kv(
    keys: Tensor,
    values: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    tables: Tensor,
    start: Tensor,
) -> None:
    """As `reference.write_kv`."""
    heads, num_blocks, size, dim = keys.shape
    batch, _, new_tokens, _ = new_keys.shape
    value_dim = values.shape[3]
    assert keys.is_contiguous() and values.is_contiguous()
    assert values.shape[:3] == keys.shape[:3]
    assert new_keys.shape == (batch, heads, new_tokens, dim)
    assert new_values.shape == (batch, heads, new_tokens, value_dim)
    assert keys.dtype == values.dtype == new_keys.dtype == new_values.dtype
    assert tables.dtype == start.dtype == torch.int32
    assert tables.shape[0] == batch and tables.stride(1) == 1
    assert start.shape == (batch,) and start.is_contiguous()
    if new_keys.numel() == 0:
        return
    shape = launch_shape(new_tokens, dim, value_dim, size)
    integer = AS_INTEGER[keys.element_size()]
    write_kv_kernel[(batch * heads * triton.cdiv(new_tokens, shape["TILE"]),)](
        keys.view(integer), values.view(integer), new_keys.view(integer), new_values.view(integer),
        tables, start, *new_keys.stride(), *new_values.stride(),
        tables.stride(0), heads, num_blocks * size, new_tokens, **shape,
    )  # fmt: skip
