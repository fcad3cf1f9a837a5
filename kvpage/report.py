"""What happened in a cache: numbers a user can check, as a table and as a dict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kvpage.layer import PagedLayer
from kvpage.ledger import Ledger
from kvpage.positions import TokenPositions
from kvpage.settings import Settings


@dataclass(frozen=True)
class Report:
    """Numbers of a cache, over all rows; lengths are per row, pads included.

    Blocks and bytes are those of the pool, which copies of a cache share.

    blocks_freed counts the blocks that compaction returned to the pool. The counterfactual evicts
    the same tokens but never moves one: `blocks_freed_without_compaction` are the blocks that would
    have come free under one block table for all layers and heads, as here;
    `blocks_freed_without_compaction_per_head` the mean number had every layer and KV head a block
    table of its own. compaction_seconds is host time (on an accelerator: of the launches).
    """

    model: str
    scorer: str
    budget: int | None
    interval: int
    block_size: int
    batch_size: int
    seen_tokens: int
    live_tokens: int
    blocks_used: int
    blocks_free: int
    blocks_peak: int
    blocks_freed: int
    blocks_freed_without_compaction: int
    blocks_freed_without_compaction_per_head: float
    bytes_reserved: int
    bytes_in_use: int
    bytes_peak: int
    bytes_statistics: int
    compactions: int
    compaction_seconds: float
    budget_bound: bool
    prompt_pinned: bool

    @property
    def evicted_tokens(self) -> int:
        """Tokens per row that have no slot any more."""
        return self.seen_tokens - self.live_tokens

    def to_dict(self) -> dict[str, Any]:
        """Every number under its own name, for JSON."""
        return asdict(self) | {"evicted_tokens": self.evicted_tokens}

    def __str__(self) -> str:
        budget = "none" if self.budget is None else f"{self.budget} tokens"
        bound = "yes" if self.budget_bound else "no, nothing was evicted"
        rows = [
            ("model", self.model),
            ("scorer", self.scorer),
            ("budget", f"{budget}, every {self.interval}"),
            ("budget ever bound", bound),
            ("prompt pinned", "yes" if self.prompt_pinned else "no"),
            ("rows", f"{self.batch_size}"),
            ("seen tokens", f"{self.seen_tokens:,} per row"),
            ("live tokens", f"{self.live_tokens:,} per row"),
            (
                "blocks",
                f"{self.blocks_used:,} used, {self.blocks_free:,} free, "
                f"{self.blocks_peak:,} at the peak ({self.block_size} tokens each)",
            ),
            ("blocks freed", f"{self.blocks_freed:,} by compaction"),
            (
                "  without compaction",
                f"{self.blocks_freed_without_compaction:,} for the same evictions "
                f"({self.blocks_freed_without_compaction_per_head:,.1f} with a table per head)",
            ),
            (
                "KV memory",
                f"{readable(self.bytes_in_use)} in use, {readable(self.bytes_reserved)} reserved,"
                f" {readable(self.bytes_peak)} at the peak",
            ),
            ("statistics", readable(self.bytes_statistics)),
            ("compactions", f"{self.compactions:,} in {self.compaction_seconds:.3f} s"),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def readable(count: int) -> str:
    """`count` bytes in KiB or MiB."""
    return f"{count / 2**10:,.1f} KiB" if count < 2**20 else f"{count / 2**20:,.1f} MiB"


def report_on(
    model: str | None,
    scorer: str,
    settings: Settings,
    ledger: Ledger,
    layers: Sequence[PagedLayer],
    positions: TokenPositions,
    bytes_peak: int,
    prompt_pinned: bool,
) -> Report:
    """The report of a cache, of its parts; the counterfactual is worked out here."""
    live: list[Tensor] = []
    if ledger.seen:
        appended = positions.appended(torch.device("cpu"))
        live = [layer.positions(appended) for layer in layers if layer.storage is not None]
    held, held_per_head = blocks_held_in_place(live, ledger.batch_size, ledger.block_size)
    ever = 0
    if live:  # the latest token of a row is always live
        ever = int((live[0].amax(dim=(1, 2)) // ledger.block_size + 1).sum())
    reserved = sum(layer.bytes_reserved for layer in layers)
    block_bytes = reserved // ledger.pool.num_blocks if ledger.pool.num_blocks else 0
    return Report(
        model=model or "none yet",
        scorer=scorer,
        budget=settings.budget,
        interval=settings.interval,
        block_size=settings.block_size,
        batch_size=ledger.batch_size,
        seen_tokens=ledger.seen,
        live_tokens=ledger.live,
        blocks_used=ledger.pool.num_used_blocks,
        blocks_free=ledger.pool.num_free_blocks,
        blocks_peak=ledger.blocks_peak,
        blocks_freed=ledger.blocks_freed,
        blocks_freed_without_compaction=max(0, ever - held),
        blocks_freed_without_compaction_per_head=max(0.0, ever - held_per_head),
        bytes_reserved=reserved,
        bytes_in_use=block_bytes * ledger.pool.num_used_blocks,
        bytes_peak=bytes_peak,
        bytes_statistics=sum(layer.bytes_statistics for layer in layers),
        compactions=ledger.compactions,
        compaction_seconds=sum(layer.compaction_seconds for layer in layers),
        budget_bound=ledger.compactions > 0,
        prompt_pinned=prompt_pinned,
    )


def blocks_held_in_place(layers: Iterable[Tensor], rows: int, block_size: int) -> tuple[int, float]:
    """Blocks the live tokens would hold had none ever moved, over all rows.

    layers: int32 `[B, Hkv, live]` token positions of each layer, -1 for pads; a token's block is
    its position divided by the block size. Returns `(under one table for all layers and heads,
    mean over layers and heads with a table each)`.
    """
    per_head = []
    union: Tensor | None = None
    for positions in layers:
        blocks = torch.where(positions < 0, -1, positions // block_size).long().cpu() + 1
        size = int(blocks.max()) + 1 if blocks.numel() else 1
        held = torch.zeros(rows, blocks.shape[1], size, dtype=torch.bool)
        held.scatter_(2, blocks, True)
        held = held[..., 1:]
        per_head.append(held.sum(dim=(0, 2)).double().mean().item())
        any_head = held.any(dim=1)
        union = any_head if union is None else _either(union, any_head)
    if union is None:
        return 0, 0.0
    return int(union.sum()), sum(per_head) / len(per_head)


def _either(a: Tensor, b: Tensor) -> Tensor:
    width = max(a.shape[1], b.shape[1])
    a, b = (torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in (a, b))
    return a | b
