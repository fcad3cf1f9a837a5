"""What is never evicted: sinks, recent tokens, the prompt, and the spans a user pins."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from kvpage.compaction import Protection
from kvpage.settings import Settings


class Pins:
    """The pinned spans of one cache and what they leave room for."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._spans: list[tuple[int, int]] = []

    def fork(self) -> Pins:
        """Pins of their own that continue from here."""
        twin = copy.copy(self)
        twin._spans = list(self._spans)
        return twin

    @property
    def tokens(self) -> int:
        return sum(stop - start for start, stop in self._spans)

    def add(self, start: int, stop: int, prompt_tokens: int) -> None:
        """Protect token positions `[start, stop)` of every row, beside a prompt so long."""
        for name, value in (("start", start), ("stop", stop)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}: an integer token position expected, got {value!r}")
        if not 0 <= start < stop:
            raise ValueError(f"start, stop: 0 <= start < stop expected, got {start}, {stop}")
        settings, wanted = self.settings, self.tokens + stop - start
        if settings.budget is not None:
            room = settings.room
            if settings.pin_prompt is True:
                front = max(settings.sinks, prompt_tokens)
                room = min(room, settings.budget - settings.recent - front)
            if wanted > room:
                raise ValueError(
                    f"stop: at most {room} pinned tokens fit the budget of {settings.budget} "
                    f"beside what else is protected, got {wanted}"
                )
        self._spans.append((start, stop))

    def check_prompt(self, prompt_tokens: int) -> None:
        """Raise `ValueError` when a prompt that must be pinned leaves no room in the budget."""
        assert self.settings.budget is not None
        room = self.settings.budget - self.settings.recent - self.tokens
        if prompt_tokens > room:
            raise ValueError(
                f"pin_prompt: a prompt of at most budget - recent - pinned = {room} tokens "
                f"expected, got {prompt_tokens}; nothing of this forward was cached"
            )

    def protection(self, prompt: int | Tensor, prompt_open: bool) -> Protection:
        """What is protected when the prompt has `prompt` tokens, pads not counted, per row."""
        front = self.front(prompt, prompt_open)
        return Protection(front, self.settings.recent, tuple(self._spans))

    def front(self, prompt: int | Tensor, prompt_open: bool) -> int | Tensor:
        """Tokens protected at the front of each row: the sinks, or the pinned prompt."""
        settings, sinks = self.settings, self.settings.sinks
        auto = settings.pin_prompt == "auto"
        if settings.pin_prompt is False or (auto and prompt_open):
            return sinks
        longest = torch.iinfo(torch.int64).max
        if auto:
            assert settings.budget is not None
            longest = min(settings.budget // 2, settings.room + sinks - self.tokens)
        if isinstance(prompt, Tensor):
            return torch.where(prompt <= longest, prompt.clamp_min(sinks), sinks)
        return max(prompt, sinks) if prompt <= longest else sinks
