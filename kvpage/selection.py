"""Which tokens survive a compaction, chosen for many layers at once.

Choosing takes about a hundred small operations, however many layers they are about; on a GPU their
launches would cost more than their work. So layers that are alike are taken together, as many as
scratch memory allows: on a CPU, where it costs nothing, a few at a time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from kvpage.blocks import Layout
from kvpage.centroids import Vectors, read_together
from kvpage.compaction import CompactionPlan, DueCompaction, plan, select
from kvpage.layer import PagedLayer
from kvpage.ledger import Step
from kvpage.scoring import LiveTokens, Scorer, score_layers
from kvpage.storage import without_autograd
from kvpage.summaries import Statistics

SCRATCH_ELEMENTS = {"cpu": 1 << 15}
"""Scores that are chosen from at a time; elsewhere 2**24 (64 MiB in float32)."""


class Selection:
    """The compactions of one forward: worked out as its layers come to them."""

    def __init__(self, due: DueCompaction | None, scorer: Scorer, layers: Sequence[PagedLayer]):
        """due: of the layers of full attention; layers: all that store tokens."""
        self.due, self.scorer, self.layers = due, scorer, layers
        self._plans: dict[PagedLayer, CompactionPlan] = {}

    def plan_of(self, layer: PagedLayer, step: Step) -> CompactionPlan | None:
        """Where the survivors of `layer` go, if `step` compacts it."""
        if not step.compacts:
            return None
        started = time.perf_counter()
        if layer not in self._plans:
            self._plan(self._alike(layer, step), step)
        layer.compaction_seconds += time.perf_counter() - started
        return self._plans.pop(layer)

    def _alike(self, layer: PagedLayer, step: Step) -> list[PagedLayer]:
        """`layer` and as many of those to come that can be taken together with it."""
        assert layer.storage is not None
        if layer.is_sliding:
            room = len(self.layers)
        else:
            heads = layer.storage.keys.shape[0]
            if layer.statistics is not None:
                heads = max(heads, layer.statistics.heads)
            scores = layer.ledger.batch_size * heads * step.live
            room = SCRATCH_ELEMENTS.get(layer.storage.keys.device.type, 1 << 24) // scores
        found = [layer]
        for other in self.layers:
            if len(found) >= room:
                break
            waits = other.step_index != step.index and other not in self._plans
            if waits and other is not layer and _are_alike(layer, other):
                found.append(other)
        return found

    @without_autograd
    def _plan(self, layers: list[PagedLayer], step: Step) -> None:
        first = layers[0].storage
        assert first is not None
        positions: list[Tensor] | None = None
        if layers[0].is_sliding:  # the last tokens, in each row and head of all layers
            tail = torch.arange(step.live - step.kept, step.live, device=first.keys.device)
            survivors = tail.expand(1, len(step.source.tables), first.keys.shape[0], -1)
        else:
            assert self.due is not None
            survivors, kept = choose(layers, step.source, self.due, self.scorer, step.kept)
            positions = list(kept)
        source, target = plan(survivors, step.source, step.layout, first)
        for i, slots in enumerate(source.expand(len(layers), -1, -1, -1)):
            stays = None if positions is None else positions[i]
            self._plans[layers[i]] = CompactionPlan(slots, target, stays)


@without_autograd
def choose(
    layers: Sequence[PagedLayer],
    layout: Layout,
    due: DueCompaction,
    scorer: Scorer,
    kept: int,
    vectors: Vectors | None = None,
) -> tuple[Tensor, Tensor]:
    """Of the tokens of `due`, in `layers` that are alike, the `kept` that survive.

    vectors: of this forward, not added to the statistics yet. Returns their live slots
    `[layers, B, Hkv, kept]` int64, ascending, and their positions, int32.
    """
    positions = torch.stack([layer.positions(due.appended) for layer in layers])
    candidates = due.protection.candidates(positions)
    next_position = due.next_position.to(positions.device)
    statistics = _statistics(layers, vectors) if scorer.needs_statistics else [None] * len(layers)
    live = []
    for layer, at, may_go, known in zip(layers, positions, candidates, statistics, strict=True):
        assert layer.storage is not None
        keys, values = layer.storage.read(layout, at.shape[-1])
        tokens = LiveTokens(layer.index, keys, values, at, may_go, next_position, known, due.padded)
        live.append(tokens)
    scores, moments = score_layers(scorer, live)
    flat = positions.flatten(0, 1)
    survivors = select(scores, flat, candidates.flatten(0, 1), kept, moments)
    shape = *positions.shape[:-1], kept
    return survivors.view(shape), flat.gather(2, survivors).view(shape)


def propose(
    layer: PagedLayer,
    step: Step,
    due: DueCompaction,
    scorer: Scorer,
    vectors: Vectors | None,
    mask: Tensor,
) -> None:
    """Choose what a compaction at draft `step.mid` leaves of `layer`, and hide the rest from there
    on in `mask`, additive `[B, H, q, L]`; vectors: of this forward."""
    budget = layer.ledger.budget
    assert budget is not None and step.mid is not None
    if vectors is not None:
        vectors = vectors.part(0, step.mid)
    survivors, positions = choose([layer], step.layout, due, scorer, budget, vectors)
    layer.propose(step, survivors[0], positions[0], mask)


def _statistics(
    layers: Sequence[PagedLayer], vectors: Vectors | None
) -> Sequence[Statistics | None]:
    collectors = [layer.statistics for layer in layers if layer.statistics is not None]
    if len(collectors) < len(layers):
        return [None] * len(layers)
    if vectors is not None:
        return [collectors[0].read(vectors)]
    return read_together(collectors)


def _are_alike(one: PagedLayer, other: PagedLayer) -> bool:
    """Whether two layers can be taken together."""
    if one.ledger is not other.ledger or one.window != other.window or other.storage is None:
        return False
    assert one.storage is not None
    if one.storage.signature != other.storage.signature:
        return False
    known, others = one.statistics, other.statistics
    if known is None or others is None:
        return known is others
    return known.heads == others.heads and known.rope.kind == others.rope.kind
