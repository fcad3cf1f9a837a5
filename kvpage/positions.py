"""Which token sits where: token positions of rows, with pads, as tensors.

A token position is the index of a token in its row's text, pads not counted; a pad has -1. Only
what a compaction needs is kept: the positions of the tokens appended since the last one, as a
range while no row was ever padded.
"""

from __future__ import annotations

import torch
from torch import Tensor

PAD = -1


class TokenPositions:
    """Positions of the tokens appended since the last compaction, the same for every layer."""

    def __init__(self) -> None:
        self.pads: Tensor | None = None
        """int64 `[B]`: pads each row has seen; `None` while no mask was given."""
        self.prompt_pads: Tensor | None = None
        self._appended: list[range | Tensor] = []

    def append(self, seen: int, count: int, real: Tensor | None) -> None:
        """Account for `count` tokens behind `seen`; `real` `[B, count]` bool is False for pads."""
        if real is None and self.pads is None:
            self._append_range(range(seen, seen + count))
            return
        if self.pads is None:
            assert real is not None
            self.pads = torch.zeros(real.shape[0], dtype=torch.int64, device=real.device)
        if real is None:
            real = torch.ones(self.pads.shape[0], count, dtype=torch.bool, device=self.pads.device)
        real = real.to(self.pads.device)
        ordinal = real.cumsum(dim=1) - 1 + (seen - self.pads)[:, None]
        self._appended.append(torch.where(real, ordinal, PAD).to(torch.int32))
        self.pads = self.pads + (~real).sum(dim=1)

    def close_prompt(self) -> None:
        """What was appended so far is the prompt."""
        self.prompt_pads = self.pads

    def appended(self, device: torch.device) -> Tensor:
        """int32 `[B or 1, n]`: positions of the tokens appended since the last compaction."""
        parts = []
        for part in self._appended:
            if isinstance(part, range):
                part = torch.arange(part.start, part.stop, dtype=torch.int32)[None]
                part = part if self.pads is None else part.expand(self.pads.shape[0], -1)
            parts.append(part.to(device))
        return torch.cat(parts, dim=1)

    def compacted(self) -> None:
        """A compaction took the appended tokens into account."""
        self._appended = []

    def next_position(self, seen: int, batch: int) -> Tensor:
        """int64 `[B]`: the position of each row's next token, when columns `[0, seen)` are seen."""
        if self.pads is None:
            return torch.full((batch,), seen, dtype=torch.int64)
        return seen - self.pads

    def prompt_length(self, prompt_tokens: int) -> int | Tensor:
        """Prompt tokens of the rows, pads not counted: one number, or int64 `[B]` with pads."""
        return prompt_tokens if self.prompt_pads is None else prompt_tokens - self.prompt_pads

    def select_rows(self, rows: Tensor) -> None:
        """Row `i` becomes a copy of row `rows[i]`."""
        if self.pads is None:
            return
        rows = rows.to(self.pads.device)
        batch = self.pads.shape[0]
        self._appended = [
            part if isinstance(part, range) else part.expand(batch, -1)[rows]
            for part in self._appended
        ]
        self.pads = self.pads[rows]
        if self.prompt_pads is not None:
            self.prompt_pads = self.prompt_pads[rows]

    def _append_range(self, new: range) -> None:
        last = self._appended[-1] if self._appended else None
        if isinstance(last, range) and last.stop == new.start:
            self._appended[-1] = range(last.start, new.stop)
        else:
            self._appended.append(new)
