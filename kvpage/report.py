"""What happened in a cache: numbers a user can check, as a table and as a dict."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kvpage import html
from kvpage.blocks import BlockPool
from kvpage.layer import PagedLayer
from kvpage.positions import TokenPositions
from kvpage.settings import Settings
from kvpage.stack import LayerStack


@dataclass(frozen=True)
class Report:
    """Numbers of a cache, over all rows; lengths are per row, pads included.

    Blocks are those of the pool of the full-attention layers, which copies of a cache share;
    `sliding_blocks_...` those of the sliding-window layers; bytes are those of all layers.

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
    """Most that were used at once."""
    blocks_freed: int
    blocks_freed_without_compaction: int
    blocks_freed_without_compaction_per_head: float
    bytes_reserved: int
    bytes_in_use: int
    bytes_peak: int
    """Most that were reserved at once."""
    bytes_statistics: int
    compactions: int
    compaction_seconds: float
    budget_bound: bool
    prompt_pinned: bool
    full_layers: int
    sliding_layers: int
    sliding_blocks_used: int
    sliding_blocks_freed: int
    state_layers: int
    bytes_states: int
    drift: float | None
    """With `stats`: one minus the cosine between a head's calibrated query centroid and the run's;
    the median over heads and layers."""
    drift_magnitude: float | None
    """With `stats`: mean magnitude of the run's queries over that of the calibrated; the median."""

    @property
    def evicted_tokens(self) -> int:
        """Tokens per row that have no slot any more."""
        return self.seen_tokens - self.live_tokens

    def to_dict(self) -> dict[str, Any]:
        """Every number under its own name, for JSON."""
        return asdict(self) | {"evicted_tokens": self.evicted_tokens}

    def rows(self) -> list[tuple[str, str]]:
        """The report in words: names, two spaces in front of what belongs to the one above, and
        values."""
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
                f"{self.blocks_freed_without_compaction:,} for the same evictions, "
                f"{self.blocks_freed_without_compaction_per_head:,.1f} were there a block table "
                "for each layer and KV head",
            ),
            (
                "KV memory",
                f"{readable(self.bytes_in_use)} in use, {readable(self.bytes_reserved)} reserved"
                f" (at most {readable(self.bytes_peak)} so far)",
            ),
            ("statistics", readable(self.bytes_statistics)),
            ("compactions", f"{self.compactions:,} in {self.compaction_seconds:.3f} s"),
        ]
        if self.drift is not None:
            words = f"cosine 1 - {self.drift:.3f}, magnitude x {self.drift_magnitude:.3f}"
            rows.append(("drift from stats", words))
        if self.sliding_layers:
            rows.append(
                (
                    "sliding layers",
                    f"{self.sliding_layers}: {self.sliding_blocks_used:,} blocks used, "
                    f"{self.sliding_blocks_freed:,} freed",
                )
            )
        if self.state_layers:
            rows.append(
                ("state layers", f"{self.state_layers}: {readable(self.bytes_states)}"),
            )
        return rows

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def _repr_html_(self) -> str:
        blocks = html.strip(self.blocks_used, self.blocks_free, self.blocks_freed)
        return html.panel(blocks, html.table(self.rows()))


def readable(count: int) -> str:
    """`count` bytes in KiB or MiB."""
    return f"{count / 2**10:,.1f} KiB" if count < 2**20 else f"{count / 2**20:,.1f} MiB"


def report_on(
    model: str | None,
    scorer: str,
    settings: Settings,
    stack: LayerStack,
    positions: TokenPositions,
    bytes_peak: int,
    prompt_pinned: bool,
    drift: tuple[float, float] | None,
) -> Report:
    """The report of a cache, of its parts; the counterfactual is worked out here."""
    ledger, sliding, layers, states = stack.ledger, stack.sliding, stack.paged, stack.states
    full = stack.ranked
    live: list[Tensor] = []
    if ledger.seen:
        appended = positions.appended(torch.device("cpu"))
        live = [layer.positions(appended) for layer in full if layer.storage is not None]
    held, held_per_head = blocks_held_in_place(live, ledger.batch_size, ledger.block_size)
    ever = 0
    if live:  # the latest token of a row is always live
        ever = int((live[0].amax(dim=(1, 2)) // ledger.block_size + 1).sum())
    counts_only = stack.shown is not ledger  # no layer stores anything under `ledger`
    pool = BlockPool(0) if counts_only else ledger.pool
    bytes_states = sum(map(bytes_of_state, states))
    return Report(
        model=model or "none yet",
        scorer=scorer,
        budget=settings.budget,
        interval=settings.interval,
        block_size=settings.block_size,
        batch_size=ledger.batch_size,
        seen_tokens=ledger.seen,
        live_tokens=stack.shown.live,
        blocks_used=pool.num_used_blocks,
        blocks_free=pool.num_free_blocks,
        blocks_peak=0 if counts_only else ledger.blocks_peak,
        blocks_freed=ledger.blocks_freed,
        blocks_freed_without_compaction=max(0, ever - held),
        blocks_freed_without_compaction_per_head=max(0.0, ever - held_per_head),
        bytes_reserved=sum(layer.bytes_reserved for layer in layers) + bytes_states,
        bytes_in_use=sum(map(_bytes_in_use, layers)) + bytes_states,
        bytes_peak=bytes_peak + bytes_states,
        bytes_statistics=sum(layer.bytes_statistics for layer in layers),
        compactions=ledger.compactions,
        compaction_seconds=sum(layer.compaction_seconds for layer in layers),
        budget_bound=ledger.compactions > 0,
        prompt_pinned=prompt_pinned,
        full_layers=len(full),
        sliding_layers=len(layers) - len(full),
        sliding_blocks_used=0 if sliding is None else sliding.pool.num_used_blocks,
        sliding_blocks_freed=0 if sliding is None else sliding.blocks_freed,
        state_layers=len(states),
        bytes_states=bytes_states,
        drift=None if drift is None else drift[0],
        drift_magnitude=None if drift is None else drift[1],
    )


def _bytes_in_use(layer: PagedLayer) -> int:
    return bytes_in_block(layer) * layer.ledger.pool.num_used_blocks


def bytes_in_block(layer: PagedLayer) -> int:
    """Bytes of the keys and values that one block holds in `layer`; 0 before there is one."""
    held = 0 if layer.storage is None else layer.storage.keys.shape[1]
    return layer.bytes_reserved // held if held else 0


def bytes_of_state(state: Any) -> int:
    """Bytes of the tensors of one of transformers' own state layers."""
    tensors = (*state.conv_states.values(), *state.recurrent_states.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


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
