"""Compaction: score -> select -> plan -> apply.

The policy returns data and the mechanism applies it: `select` names the surviving slots, `plan`
says which physical slot each moves to, `apply_plan` moves them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

import kvpage.kernels.reference as reference
from kvpage import kernels
from kvpage.blocks import Layout
from kvpage.kernels import Moments
from kvpage.ledger import Step
from kvpage.positions import PAD
from kvpage.storage import LayerStorage


@dataclass(frozen=True)
class Protection:
    """Tokens that are never candidates for eviction, by token position and by slot.

    `[0, front)` sinks or the pinned prompt, `[start, stop)` of every pinned span, and the last
    `recent` live slots of `[0, live)`.
    """

    front: int | Tensor
    """One number, or int64 `[B]`."""
    recent: int
    spans: tuple[tuple[int, int], ...] = ()

    def mask(self, positions: Tensor) -> Tensor:
        """bool `[B, Hkv, L]`: which live tokens, at `positions` `[B, Hkv, L]`, are protected."""
        front = self.front
        if isinstance(front, Tensor):
            front = front.to(positions.device)[:, None, None]
        live = positions.shape[-1]
        slots = torch.arange(live, device=positions.device)
        protected = (positions < front) | (slots >= live - self.recent)
        for start, stop in self.spans:
            protected |= (positions >= start) & (positions < stop)
        return protected & (positions != PAD)

    def candidates(self, positions: Tensor) -> Tensor:
        """bool `[B, Hkv, L]`: which live tokens may be evicted and are no pads."""
        return ~self.mask(positions) & (positions != PAD)


@dataclass(frozen=True)
class CompactionPlan:
    """Which tokens of a layer survive and where they go.

    survivors: live slots `[B, Hkv, kept]` int64, ascending; source: their physical slots, same
    shape; target: physical slots `[B, kept]` they move to.
    """

    survivors: Tensor
    source: Tensor
    target: Tensor


@dataclass
class TracedCompaction:
    """Which tokens one compaction left: kept when a cache is made with `trace=True`."""

    seen_tokens: int
    """Tokens each row had seen when it ran."""
    positions: list[Tensor] = field(default_factory=list)
    """Per layer of full attention, int32 `[B, Hkv, kept]` on the CPU: token positions that live on,
    pads -1."""

    def select_rows(self, rows: Tensor) -> TracedCompaction:
        """What it left of the rows `rows`."""
        return TracedCompaction(self.seen_tokens, [kept[rows] for kept in self.positions])


def select(
    scores: Tensor,
    positions: Tensor,
    kept: int,
    protection: Protection,
    moments: Moments | None = None,
) -> Tensor:
    """The live slots `[B, Hkv, kept]` int64 that survive, in token order.

    scores: `[B, Hkv, L]`, or `[B, H, L]` to be standardised over the candidates per query head and
    merged by their maximum within a KV head; positions: int32 `[B, Hkv, L]`; moments: of the scores
    of query heads over the candidates, where the scorer has them. Protected tokens stay, pads go
    first, ties go to the earlier token, NaN counts as the lowest score.
    """
    batch, kv_heads, live = positions.shape
    protected = protection.mask(positions)
    pad = positions == PAD
    if scores.shape[1] != kv_heads:
        if moments is None:
            moments = reference.moments(scores, ~(protected | pad))
        scores = standardised(scores, moments).view(batch, kv_heads, -1, live).amax(dim=2)
    scores = scores.nan_to_num(nan=-torch.inf)
    lowest = torch.finfo(scores.dtype).min
    scores = scores.clamp_min(lowest).masked_fill(protected, torch.inf)
    scores = scores.masked_fill(pad, -torch.inf)
    order = scores.sort(dim=-1, descending=True, stable=True).indices
    return order[..., :kept].sort(dim=-1).values


def standardised(scores: Tensor, moments: Moments) -> Tensor:
    """z-scores `[B, H, L]`; zero for a head without a preference, whose deviation is nothing but
    rounding."""
    mean, deviation, lowest, highest = (moment[..., None] for moment in moments)
    z = (scores - mean) / deviation.clamp_min(torch.finfo(scores.dtype).tiny)
    return torch.where(highest > lowest, z, 0.0)


def plan(
    survivors: Tensor, source: Layout, target: Layout, storage: LayerStorage
) -> CompactionPlan:
    """Physical slots of `survivors` `[B, Hkv, kept]` of rows moving from `source` to `target`."""
    size = storage.block_size
    batch, _, kept = survivors.shape
    tables = storage.tables_of(source)
    blocks = tables.gather(1, (survivors // size).view(batch, -1)).view_as(survivors)
    slot = torch.arange(kept, device=survivors.device)
    target_blocks = storage.tables_of(target)[:, slot // size]
    return CompactionPlan(
        survivors, blocks * size + survivors % size, target_blocks * size + slot % size
    )


def apply_plan(moves: CompactionPlan, storage: LayerStorage, step: Step) -> None:
    """Slide the survivors forward in place, or into a new storage where the step asks for one."""
    moved = []
    for old in (storage.keys, storage.values):
        new = old.new_empty(old.shape[0], step.num_blocks, *old.shape[2:]) if step.fresh else old
        kernels.move_slots(old, moves.source, moves.target, new)
        moved.append(new)
    if step.fresh:
        storage.replace(*moved)
