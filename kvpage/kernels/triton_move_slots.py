"""`move_slots` in Triton: tokens slide forward in place, and no read can meet a write too early.

Grid: one program per row, KV head and part of head_dim. It walks the tokens in chunks, ascending;
a chunk is gathered into registers, and written once every thread of the program holds its share.

Why nothing races when `into` is `blocks`. Survivor `i` of a row moves to the row's slot `i` and
comes from the row's slot `s_i`, with `s_i >= i` and ascending in `i`, so that survivors
`[start, stop)` are read from slots at or after `start` and written to slots `[start, stop)`:

- A slot written by one chunk is never read by a later one, which reads from slot `stop` on: loads
  may run ahead of earlier stores as far as they like.
- A slot written by one chunk may be a source of the same chunk, or of one before it. All of these
  are in registers: the barrier lies between the loads of a chunk and its stores, in every thread.
  (`bar.sync` on NVIDIA; on AMD workgroup fences around `s_barrier`, enough by LLVM's memory model.)
- No other program touches those bytes. Those of the same row have another head or other columns.
  Another row reads only blocks of its own table, and a block that two tables hold is written by
  neither: compaction sends its survivors to a block that was free (`Ledger._compact`), so that
  slot `i` of a row is either where it was or in a block nobody reads.

Indices and addresses are int64. Values are moved as integers of their size: bits, whatever the
dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PART_BYTES = 64
"""Two sectors of memory: the narrowest part whose reads and writes waste none, so the most
programs."""
CHUNK = 256
"""Tokens per chunk: 16 KiB in the registers of a program, so that few round trips to memory follow
each other."""
AS_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit
def move_slots_kernel(
    blocks, into, source, target,
    heads, slots, into_slots, moved,
    DIM: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """Move the tokens of one row, head and part of head_dim."""
    parts: tl.constexpr = (DIM + PART - 1) // PART
    column = tl.program_id(0) % parts * PART + tl.arange(0, PART)
    row_head = (tl.program_id(0) // parts).to(tl.int64)
    row = row_head // heads
    head = row_head % heads
    source += row_head * moved
    target += row * moved
    blocks += head * slots * DIM + column
    into += head * into_slots * DIM + column
    for start in range(0, moved, CHUNK):
        token = start + tl.arange(0, CHUNK)
        moves = token < moved
        old = tl.load(source + token, moves, other=0)  # [CHUNK]
        new = tl.load(target + token, moves, other=0)
        if IN_PLACE:
            moves = moves & (old != new)
        mask = moves[:, None] & (column < DIM)[None, :]
        values = tl.load(blocks[None, :] + old[:, None] * DIM, mask)  # [CHUNK, PART]
        tl.debug_barrier()  # Triton by itself orders no accesses of different threads to blocks
        tl.store(into[None, :] + new[:, None] * DIM, values, mask)


def launch_shape(dim: int, element_size: int, in_place: bool) -> dict[str, int]:
    """The kernel's compile-time parameters and launch options."""
    return {
        "DIM": dim,
        "PART": min(PART_BYTES // element_size, triton.next_power_of_2(dim)),
        "CHUNK": CHUNK,
        "IN_PLACE": int(in_place),
        "num_warps": 4,
        "num_stages": 1,
    }


def bytes_to_move(blocks: Tensor, source: Tensor, target: Tensor) -> int:
    """Every token read and written, every index read; tokens in their place already need less."""
    return 2 * source.numel() * blocks.shape[3] * blocks.element_size() + (
        source.nbytes + target.nbytes
    )


def move_slots(blocks: Tensor, source: Tensor, target: Tensor, into: Tensor) -> None:
    """As `reference.move_slots`."""
    batch, heads, moved = source.shape
    _, num_blocks, size, dim = blocks.shape
    assert blocks.is_contiguous() and into.is_contiguous()
    assert blocks.shape[0] == into.shape[0] == heads and into.shape[3] == dim
    assert target.shape == (batch, moved) and source.dtype == target.dtype == torch.int64
    assert into.dtype == blocks.dtype
    if source.numel() == 0 or dim == 0:
        return
    shape = launch_shape(dim, blocks.element_size(), into.data_ptr() == blocks.data_ptr())
    integer = AS_INTEGER[blocks.element_size()]
    move_slots_kernel[(batch * heads * triton.cdiv(dim, shape["PART"]),)](
        blocks.view(integer), into.view(integer), source.contiguous(), target.contiguous(),
        heads, num_blocks * size, into.shape[1] * into.shape[2], moved, **shape,
    )  # fmt: skip
