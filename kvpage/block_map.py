"""Which token sits in which slot of which block: a value to draw, print and count."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpage.cache import PagedCompactCache

EMPTY = -1


@dataclass(frozen=True)
class BlockMap:
    """The slots of a pool, as one layer and KV head of it sees them.

    slots: int64 `[num_blocks, block_size]`, the token position in each slot, -1 where no live token
    is (pads, tokens evicted in place, slots never written); rows: int64 `[num_blocks]`, the first
    row whose block table holds the block, -1 where none does; ref_counts: int64 `[num_blocks]`, how
    many tables hold it, those of forks included; 0 is a free block.
    """

    slots: Tensor
    rows: Tensor
    ref_counts: Tensor

    @classmethod
    def of(
        cls, cache: PagedCompactCache, layer_idx: int | None = None, kv_head: int = 0
    ) -> BlockMap:
        """The map of `cache` at `layer_idx` (default: its first layer of full attention).

        Raises `ValueError` for an empty cache and for a layer or head there is not.
        """
        if layer_idx is None:
            layer_idx = next(iter(cache.full_layers), 0)
        live = cache.live_positions(layer_idx).cpu()
        if not 0 <= kv_head < live.shape[1]:
            raise ValueError(f"kv_head: within [0, {live.shape[1]}) expected, got {kv_head}")
        pool, block_size = cache.ledger.pool, cache.ledger.block_size
        slots = torch.full((pool.num_blocks, block_size), EMPTY)
        rows = torch.full((pool.num_blocks,), EMPTY)
        for row in reversed(range(len(cache.ledger.tables))):
            table = torch.tensor(cache.ledger.tables[row])
            filled = torch.full((len(table) * block_size,), EMPTY)
            filled[: live.shape[2]] = live[row, kv_head]
            slots[table] = filled.view(-1, block_size)
            rows[table] = row
        return cls(slots, rows, torch.tensor(pool.ref_counts))

    @classmethod
    def of_slots(cls, slots: Tensor) -> BlockMap:
        """The map of one row whose blocks are given by `slots`; a block without a token is free."""
        used = (slots != EMPTY).any(dim=1)
        return cls(slots.long(), torch.where(used, 0, EMPTY), used.long())

    @property
    def used_blocks(self) -> int:
        """Blocks that some row or fork holds."""
        return int((self.ref_counts > 0).sum())

    @property
    def live_slots(self) -> int:
        """Slots that hold a token."""
        return int((self.slots != EMPTY).sum())

    @property
    def utilisation(self) -> float:
        """Share of the slots of used blocks that hold a token; 1 minus internal fragmentation."""
        size = self.slots.shape[1]
        return self.live_slots / (self.used_blocks * size) if self.used_blocks else 1.0
