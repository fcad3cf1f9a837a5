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

    def candidates(self, positions: Tensor) -> Tensor:
        """bool, which live tokens, at `positions` `[..., B, Hkv, L]`, may be evicted and are no
        pads."""
        front = self.front
        if isinstance(front, Tensor):
            front = front.to(positions.device)[:, None, None]
        live = positions.shape[-1]
        slots = torch.arange(live, device=positions.device)
        protected = (positions < front) | (slots >= live - self.recent)
        for start, stop in self.spans:
            protected |= (positions >= start) & (positions < stop)
        return ~(protected | (positions == PAD))


@dataclass(frozen=True)
class DueCompaction:
    """What every layer's compaction in one forward shares."""

    appended: Tensor
    """int32 `[B or 1, n]`: positions of the tokens appended since the last compaction."""
    next_position: Tensor
    protection: Protection
    padded: bool = False
    """Whether any row ever had pads."""


@dataclass(frozen=True)
class CompactionPlan:
    """Where the tokens of a layer that survive go.

    source: their physical slots, int64 `[B, Hkv, kept]`, in token order; target: physical slots
    `[B, kept]` they move to; positions: int32 `[B, Hkv, kept]`, where they are known.
    """

    source: Tensor
    target: Tensor
    positions: Tensor | None = None


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
    candidates: Tensor,
    kept: int,
    moments: Moments | None = None,
) -> Tensor:
    """The live slots `[B, Hkv, kept]` int64 that survive, in token order.

    scores: `[B, Hkv, L]`, or `[B, H, L]` to be standardised over the candidates per query head and
    merged by their maximum within a KV head; positions: int32 `[B, Hkv, L]`; candidates: bool, of
    the same shape; moments: of the scores of query heads over them, where the scorer has them.
    What is no candidate stays, pads go first, ties go to the earlier token, NaN counts as the
    lowest score.
    """
    batch, kv_heads, live = positions.shape
    if scores.shape[1] != kv_heads:
        if moments is None:
            moments = reference.moments(scores, candidates)
        scores = standardised(scores, moments).view(batch, kv_heads, -1, live).amax(dim=2)
    scores = scores.nan_to_num(nan=torch.finfo(scores.dtype).min)  # infinities become finite
    scores = torch.where(candidates, scores, torch.inf)
    scores = scores.masked_fill(positions == PAD, -torch.inf)
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
) -> tuple[Tensor, Tensor]:
    """Physical slots, before and after, of `survivors` `[..., B, Hkv, kept]` of rows moving from
    `source` to `target`; those after are `[B, kept]`."""
    size, device = storage.block_size, survivors.device
    rows = torch.arange(survivors.shape[-3], device=device)[:, None, None]
    blocks = storage.tables_of(source)[rows, survivors // size]
    slot = torch.arange(survivors.shape[-1], device=device)
    target_blocks = storage.tables_of(target)[:, slot // size]
    return blocks * size + survivors % size, target_blocks * size + slot % size


def apply_plan(moves: CompactionPlan, storage: LayerStorage, step: Step) -> None:
    """Slide the survivors forward in place, or into a new storage where the step asks for one."""
    moved = []
    for old in (storage.keys, storage.values):
        new = old.new_empty(old.shape[0], step.num_blocks, *old.shape[2:]) if step.fresh else old
        kernels.move_slots(old, moves.source, moves.target, new)
        moved.append(new)
    if step.fresh:
        storage.replace(*moved)
