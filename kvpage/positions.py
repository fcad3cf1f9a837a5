"""Which token sits where: token positions of rows, with pads, as tensors.

A token position is the index of a token in its row's text, pads not counted; a pad has -1. Only
what a compaction needs is kept: the positions of the tokens appended since the last one, as a
range while no row was ever padded.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

PAD = -1


@dataclass
class Announcement:
    """What the hooks said of the running forward before its first layer."""

    num_new: int
    drafts: int = 0
    """How many of the new tokens, the last ones, are speculative."""
    real: Tensor | None = None
    """bool `[B, q]`, False for pads; `None` when no mask was given."""
    position_ids: Tensor | None = None
    """int64 `[1 or B, q]`."""
    told: Tensor | None = None
    """The 2-D mask `[B, seen + 1]` of a one-token forward that attends over blocks."""

    def position_of(self, index: int) -> Tensor | None:
        """int64 `[1 or B]`: the position of new token `index`, or of the row's first behind it
        that is no pad."""
        if self.position_ids is None:
            return None
        if self.real is None:
            return self.position_ids[:, index]
        first = self.real[:, index:].int().argmax(dim=1, keepdim=True) + index
        first = first.to(self.position_ids.device)
        return self.position_ids.expand(first.shape[0], -1).gather(1, first)[:, 0]


class LiveSlots:
    """Which live slots hold no pad: bool `[B, live]`, of which the last are real and not written.

    So a token that comes without a mask costs nothing, and no memory either.
    """

    def __init__(self, real: Tensor) -> None:
        self._real, self._behind = real, 0

    def read(self) -> Tensor:
        """bool `[B, live]`."""
        if self._behind:
            behind = self._real.new_ones(self._real.shape[0], self._behind)
            self._real, self._behind = torch.cat((self._real, behind), dim=1), 0
        return self._real

    def append(self, count: int, real: Tensor | None) -> None:
        """Account for `count` more slots, `real` `[B, count]`; `None`: no pads."""
        if real is None:
            self._behind += count
        else:
            self._real = torch.cat((self.read(), real), dim=1)

    def select_rows(self, rows: Tensor) -> LiveSlots:
        return LiveSlots(self.read()[rows])


class _Run(NamedTuple):
    """Tokens at consecutive columns, none a pad, in rows that had seen `pads` pads before."""

    columns: range
    pads: Tensor | None

    def positions(self, device: torch.device) -> Tensor:
        """int32 `[B or 1, n]`, on `device` unless there are pads."""
        start, stop = self.columns.start, self.columns.stop
        if self.pads is None:
            return torch.arange(start, stop, dtype=torch.int32, device=device)[None]
        columns = torch.arange(start, stop, device=self.pads.device)
        return (columns - self.pads[:, None]).to(torch.int32)


class TokenPositions:
    """Positions of the tokens appended since the last compaction, the same for every layer.

    Pads go before anything real and, among themselves, the later first; so while a row has pads
    all its real tokens live, and which live slots hold pads is the same in every layer and head.
    """

    def __init__(self) -> None:
        self.pads: Tensor | None = None
        """int64 `[B]`: pads each row has seen; `None` while no mask was given."""
        self.prompt_pads: Tensor | None = None
        self.live: LiveSlots | None = None
        """Of the layers of full attention; `None` while no mask was given."""
        self.sliding: LiveSlots | None = None
        """Of the sliding-window layers, if there are any."""
        self._appended: list[_Run | Tensor] = []

    def append(
        self, seen: int, live: int, count: int, real: Tensor | None, sliding: int | None = None
    ) -> None:
        """Account for `count` tokens behind `seen`, of which `live` live (`sliding` of them in the
        layers with a window, if there are any).

        real: bool `[B, count]`, False for pads.
        """
        if self.pads is None and real is not None:
            rows = real.new_zeros(real.shape[0])
            self.pads = rows.long()
            self.live = LiveSlots(rows.new_ones(real.shape[0], live))
            if sliding is not None:
                self.sliding = LiveSlots(rows.new_ones(real.shape[0], sliding))
        for slots in (self.live, self.sliding):
            if slots is not None:
                slots.append(count, None if real is None else self._on_device(real))
        if real is None or self.pads is None:
            self._append_run(range(seen, seen + count))
            return
        real = self._on_device(real)
        ordinal = real.cumsum(dim=1) - 1 + (seen - self.pads)[:, None]
        self._appended.append(torch.where(real, ordinal, PAD).to(torch.int32))
        self.pads = self.pads + (~real).sum(dim=1)

    def crop(self, count: int) -> None:
        """Forget the last `count` tokens, all appended since the last compaction."""
        if self.live is not None and self.pads is not None:
            real = self.live.read()
            kept = real.shape[1] - count
            self.pads = self.pads - (~real[:, kept:]).sum(dim=1)
            self.live = LiveSlots(real[:, :kept])
        if self.sliding is not None:
            self.sliding = LiveSlots(self.sliding.read()[:, :-count])
        while count > 0:
            last = self._appended.pop()
            length = len(last.columns) if isinstance(last, _Run) else last.shape[1]
            if length > count:
                kept = length - count
                self._appended.append(
                    last._replace(columns=last.columns[:kept])
                    if isinstance(last, _Run)
                    else last[:, :kept]
                )
            count -= length

    def close_prompt(self) -> None:
        """What was appended so far is the prompt."""
        self.prompt_pads = self.pads

    def appended(self, device: torch.device) -> Tensor:
        """int32 `[B or 1, n]`: positions of the tokens appended since the last compaction."""
        parts = [torch.empty(1, 0, dtype=torch.int32, device=device)]
        for part in self._appended:
            parts.append((part.positions(device) if isinstance(part, _Run) else part).to(device))
        rows = max(part.shape[0] for part in parts)
        return torch.cat([part.expand(rows, -1) for part in parts], dim=1)

    def compacted(self, kept: int, tail: int = 0) -> None:
        """A compaction left `kept` live tokens, the last `tail` of them appended behind it."""
        real = self.real_after(kept)
        self.live = None if real is None else LiveSlots(real)
        if tail == 0:
            self._appended = []
            return
        last = self._appended[-1]
        if isinstance(last, _Run) and len(last.columns) >= tail:
            self._appended = [last._replace(columns=last.columns[-tail:])]
        else:
            device = last.device if isinstance(last, Tensor) else torch.device("cpu")
            self._appended = [self.appended(device)[:, -tail:]]

    def slid(self, kept: int) -> None:
        """The layers with a window have `kept` live tokens left, the last ones."""
        if self.sliding is not None:
            real = self.sliding.read()
            self.sliding = LiveSlots(real[:, real.shape[1] - kept :])

    def real_after(self, kept: int) -> Tensor | None:
        """bool `[B, kept]`: which live slots hold no pad once a compaction has left `kept`."""
        if self.live is None:
            return None
        real = self.live.read()
        if kept == real.shape[1]:
            return real
        evicted = real.shape[1] - kept
        from_the_end = (~real).flip(1).cumsum(dim=1).flip(1)
        goes = ~real & (from_the_end <= evicted)
        stays = goes.to(torch.uint8).sort(dim=1, stable=True).indices[:, :kept]
        enough_pads = goes.sum(dim=1, keepdim=True) == evicted
        return torch.where(enough_pads, real.gather(1, stays), True)

    def next_position(self, seen: int, batch: int) -> Tensor:
        """int64 `[B]`: the position of each row's next token, when columns `[0, seen)` are seen."""
        if self.pads is None:
            return torch.full((batch,), seen, dtype=torch.int64)
        return seen - self.pads

    def prompt_length(self, prompt_tokens: int) -> int | Tensor:
        """Prompt tokens of the rows, pads not counted: one number, or int64 `[B]` with pads."""
        return prompt_tokens if self.prompt_pads is None else prompt_tokens - self.prompt_pads

    def fork(self) -> TokenPositions:
        """Positions of their own that continue from here."""
        twin = copy.copy(self)
        twin.live, twin.sliding = copy.copy(self.live), copy.copy(self.sliding)
        twin._appended = list(self._appended)
        return twin

    def select_rows(self, rows: Tensor) -> None:
        """Row `i` becomes a copy of row `rows[i]`."""
        if self.pads is None:
            return
        batch, rows = self.pads.shape[0], rows.to(self.pads.device)
        self._appended = [self._rows_of(part, batch, rows) for part in self._appended]
        self.pads = self.pads[rows]
        self.live = None if self.live is None else self.live.select_rows(rows)
        self.sliding = None if self.sliding is None else self.sliding.select_rows(rows)
        if self.prompt_pads is not None:
            self.prompt_pads = self.prompt_pads[rows]

    def _rows_of(self, part: _Run | Tensor, batch: int, rows: Tensor) -> _Run | Tensor:
        if isinstance(part, _Run):
            return part if part.pads is None else part._replace(pads=part.pads[rows])
        return part.expand(batch, -1)[rows.to(part.device)]

    def _on_device(self, real: Tensor) -> Tensor:
        assert self.pads is not None
        return real.to(self.pads.device)

    def _append_run(self, new: range) -> None:
        last = self._appended[-1] if self._appended else None
        if isinstance(last, _Run) and last.columns.stop == new.start and last.pads is self.pads:
            self._appended[-1] = _Run(range(last.columns.start, new.stop), self.pads)
        else:
            self._appended.append(_Run(new, self.pads))
