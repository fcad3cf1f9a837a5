"""Where the rows of one ledger lie, on one device, as the kernels read it.

Block tables and lengths are tensors that one-token forwards update in place, so that a captured
graph finds them where they were. Nothing here reads the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpage.blocks import Layout
from kvpage.centroids import FOLD_TOKENS
from kvpage.device import capturing, to_device
from kvpage.ledger import Step


@dataclass(frozen=True)
class Pads:
    """Which live slots hold none, of the layers of one ledger."""

    real: Callable[[], Tensor | None]
    """Gives bool `[B, live]` with the new token's, False for pads, or `None`: no mask was given."""
    told: bool
    """Whether the running forward has a mask."""


class Places:
    """Tables, lengths and pads of every row for the one-token forwards of some layers."""

    def __init__(self, device: torch.device, batch_size: int, block_size: int) -> None:
        self.device, self.block_size = device, block_size
        self.lengths = torch.zeros(2, batch_size, dtype=torch.int32, device=device)
        """int32 `[2, B]`: the slot of each row's new token, and the slot behind it."""
        self.tables = torch.empty(batch_size, 0, dtype=torch.int32, device=device)
        """int32 `[B, width]`: block ids in token order; those behind the live tokens may be any."""
        self.visible: Tensor | None = None
        """bool `[B, >= live]`: which slots hold no pad; `None` while no mask was given."""
        self.cycle = torch.zeros(1, dtype=torch.int64, device=device)
        """int64 `[1]`: where in a buffer of `FOLD_TOKENS` tokens this forward's statistics go."""
        self.cycle_at = 0
        """The same on the host."""
        self._asked: Step | None = None
        self._padded = False
        self.step: Step | None = None
        """The last forward that was taken in."""
        self._stop = -1
        self._lie: object = None

    @property
    def start(self) -> Tensor:
        """int32 `[B]`: the slot of each row's new token."""
        return self.lengths[0]

    @property
    def stop(self) -> Tensor:
        """int32 `[B]`: the slot behind it."""
        return self.lengths[1]

    def has_pads(self) -> bool:
        """Whether any live slot holds a pad; reads the device, once per forward."""
        if self._asked is not self.step:
            self._asked = self.step
            self._padded = self.visible is not None and not bool(self.visible.all())
        return self._padded

    def take(self, step: Step, pads: Pads, static: bool) -> None:
        """Be where one-token `step` has its rows; static: tensors keep their addresses."""
        lie, steady = self._compare(step)
        if not steady and capturing():
            raise RuntimeError(
                "cache: a graph can be captured from the second of two one-token forwards on that "
                "neither compact nor follow anything else; run one more forward first"
            )
        if self._stop == step.kept:
            self.lengths.add_(1)
        else:
            self._set_lengths(step.kept)
        if static:
            self.cycle.add_(1).remainder_(FOLD_TOKENS)
        self._settle(step, lie, pads, static, steady)

    def expect(self, step: Step, pads: Pads) -> None:
        """Be where `take` will find all it needs when a graph replays it."""
        lie, steady = self._compare(step)
        if not steady:
            self._set_lengths(step.kept - 1)
        self._settle(step, lie, pads, True, steady)

    def _settle(self, step: Step, lie: object, pads: Pads, static: bool, steady: bool) -> None:
        self.step, self._stop = step, step.kept + 1
        self.cycle_at = (self.cycle_at + 1) % FOLD_TOKENS
        if lie != self._lie:
            self._lie = lie
            self._set_tables(step.layout, step.num_blocks // len(step.layout.tables))
        if not static:
            real = pads.real()
            self.visible = None if real is None else real.to(self.device, non_blocking=True)
        elif pads.told or not steady:
            self._show(pads.real())

    def _set_lengths(self, start: int) -> None:
        self.lengths[0].fill_(start)
        self.lengths[1].fill_(start + 1)

    def _compare(self, step: Step) -> tuple[object, bool]:
        """How the rows of `step` lie, and whether it is one token on from the last, lying alike."""
        lie: object = step.layout
        if step.layout.strides is not None:
            lie = step.layout.strides, step.num_blocks // len(step.layout.tables)
        return lie, self._stop == step.kept and self._lie == lie

    def _set_tables(self, layout: Layout, width: int) -> None:
        """Rows of consecutive blocks: all of the row's region, so that it stays while rows grow."""
        batch = len(layout.tables)
        if layout.strides is not None:
            first, between = layout.strides
            rows = torch.arange(batch, dtype=torch.int32, device=self.device) * between + first
            blocks = torch.arange(width, dtype=torch.int32, device=self.device)
            tables = rows[:, None] + blocks
        else:
            longest = max(max(map(len, layout.tables)), self.tables.shape[1])
            padded = [[*table, *[0] * (longest - len(table))] for table in layout.tables]
            tables = to_device(padded, torch.int32, self.device)
        if tables.shape == self.tables.shape:
            self.tables.copy_(tables)
        else:
            self.tables = tables

    def _show(self, real: Tensor | None) -> None:
        """All slots of a row, those behind the live ones visible already."""
        if real is None:
            self.visible = None
            return
        slots = self.tables.shape[1] * self.block_size
        if self.visible is None or self.visible.shape != (real.shape[0], slots):
            self.visible = real.new_empty(real.shape[0], slots, device=self.device)
        self.visible[:, : real.shape[1]].copy_(real, non_blocking=True)
        self.visible[:, real.shape[1] :].fill_(True)
