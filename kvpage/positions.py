"""Which token sits where: token positions of rows, with pads, as tensors.

A token position is the index of a token in its row's text, pads not counted; a pad has -1. Only
what a compaction needs is kept: the positions of the tokens appended since the last one, as a
range while no row was ever padded.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

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


class TokenPositions:
    """Positions of the tokens appended since the last compaction, the same for every layer.

    Pads go before anything real and, among themselves, the later first; so while a row has pads
    all its real tokens live, and which live slots hold pads is the same in every layer and head.
    """

    def __init__(self) -> None:
        self.pads: Tensor | None = None
        """int64 `[B]`: pads each row has seen; `None` while no mask was given."""
        self.prompt_pads: Tensor | None = None
        self.live_real: Tensor | None = None
        """bool `[B, live]`: which live slots hold no pad; `None` while no mask was given."""
        self._appended: list[range | Tensor] = []

    def append(self, seen: int, live: int, count: int, real: Tensor | None) -> None:
        """Account for `count` tokens behind `seen`, of which `live` live.

        real: bool `[B, count]`, False for pads.
        """
        if self.pads is None and real is None:
            self._append_range(range(seen, seen + count))
            return
        if self.pads is None or self.live_real is None:
            assert real is not None
            self.pads = torch.zeros(real.shape[0], dtype=torch.int64, device=real.device)
            self.live_real = torch.ones(real.shape[0], live, dtype=torch.bool, device=real.device)
        if real is None:
            real = torch.ones(self.pads.shape[0], count, dtype=torch.bool, device=self.pads.device)
        real = real.to(self.pads.device)
        ordinal = real.cumsum(dim=1) - 1 + (seen - self.pads)[:, None]
        self._appended.append(torch.where(real, ordinal, PAD).to(torch.int32))
        self.pads = self.pads + (~real).sum(dim=1)
        self.live_real = torch.cat((self.live_real, real), dim=1)

    def crop(self, count: int) -> None:
        """Forget the last `count` tokens, all appended since the last compaction."""
        if self.live_real is not None and self.pads is not None:
            kept = self.live_real.shape[1] - count
            self.pads = self.pads - (~self.live_real[:, kept:]).sum(dim=1)
            self.live_real = self.live_real[:, :kept]
        while count > 0:
            last = self._appended.pop()
            length = len(last) if isinstance(last, range) else last.shape[1]
            if length > count:
                kept = length - count
                self._appended.append(last[:kept] if isinstance(last, range) else last[:, :kept])
            count -= length

    def close_prompt(self) -> None:
        """What was appended so far is the prompt."""
        self.prompt_pads = self.pads

    def appended(self, device: torch.device) -> Tensor:
        """int32 `[B or 1, n]`: positions of the tokens appended since the last compaction."""
        parts = [torch.empty(1, 0, dtype=torch.int32)]
        for part in self._appended:
            if isinstance(part, range):
                part = torch.arange(part.start, part.stop, dtype=torch.int32)[None]
            parts.append(part.to(device))
        rows = max(part.shape[0] for part in parts)
        return torch.cat([part.to(device).expand(rows, -1) for part in parts], dim=1)

    def compacted(self, kept: int, tail: int = 0) -> None:
        """A compaction left `kept` live tokens, the last `tail` of them appended behind it."""
        self.live_real = self.real_after(kept)
        if tail == 0:
            self._appended = []
            return
        if all(isinstance(part, range) for part in self._appended):
            stop = self._appended[-1].stop  # type: ignore[union-attr]
            self._appended = [range(stop - tail, stop)]
        else:
            assert self.pads is not None
            self._appended = [self.appended(self.pads.device)[:, -tail:]]

    def real_after(self, kept: int) -> Tensor | None:
        """bool `[B, kept]`: `live_real` once a compaction has left `kept` live tokens."""
        real = self.live_real
        if real is None or kept == real.shape[1]:
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
        twin._appended = list(self._appended)
        return twin

    def select_rows(self, rows: Tensor) -> None:
        """Row `i` becomes a copy of row `rows[i]`."""
        if self.pads is None or self.live_real is None:
            return
        batch, rows = self.pads.shape[0], rows.to(self.pads.device)
        self._appended = [
            part if isinstance(part, range) else part.expand(batch, -1)[rows.to(part.device)]
            for part in self._appended
        ]
        self.pads, self.live_real = self.pads[rows], self.live_real[rows]
        if self.prompt_pads is not None:
            self.prompt_pads = self.prompt_pads[rows]

    def _append_range(self, new: range) -> None:
        last = self._appended[-1] if self._appended else None
        if isinstance(last, range) and last.stop == new.start:
            self._appended[-1] = range(last.start, new.stop)
        else:
            self._appended.append(new)
