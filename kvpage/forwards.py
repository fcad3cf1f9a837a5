"""One forward after the other: what the hooks announce, what is due, whether the last one ended.

Everything that can be wrong with a forward is checked here, before anything changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpage.compaction import Protection
from kvpage.layer import DueCompaction
from kvpage.ledger import Ledger, Step
from kvpage.positions import TokenPositions
from kvpage.settings import Settings


@dataclass
class Announcement:
    """What the hooks said of the running forward before its first layer."""

    num_new: int
    real: Tensor | None = None
    """bool `[B, q]`, False for pads; `None` when no mask was given."""
    next_position: Tensor | None = None
    """int64 `[1 or B]`: position of each row's first new token."""


@dataclass
class Forward:
    """The running forward, or the last one: what its layers apply and how many did."""

    step: Step
    due: DueCompaction | None
    real: Tensor | None
    started: int = 0
    applied: int = 0


class Forwards:
    """The forwards of one cache: turns announcements and lengths into steps."""

    def __init__(self, settings: Settings, ledger: Ledger) -> None:
        self.settings, self.ledger = settings, ledger
        self.clear()

    def clear(self) -> None:
        self.positions = TokenPositions()
        self.announced: Announcement | None = None
        self.current: Forward | None = None
        self._pinned: list[tuple[int, int]] = []
        self._mask_is_opaque = False

    def announce(self, num_new: int, mask: Tensor | None) -> None:
        """The hooks saw a forward of `num_new` tokens under the model's attention mask begin."""
        real = None
        if mask is not None and mask.ndim == 4:
            self._check_mask_4d(num_new, mask)
            self._mask_is_opaque = True
        elif mask is not None:
            columns = self.ledger.seen + num_new
            if mask.ndim != 2 or mask.shape[1] != columns:
                raise ValueError(
                    f"attention_mask: [batch, seen + new tokens = {columns}] expected, got "
                    f"{list(mask.shape)}"
                )
            real = mask[:, -num_new:].bool()
        self.check_due(num_new)
        self.announced = Announcement(num_new, real)

    def see_positions(self, position_ids: Tensor) -> None:
        """Take `position_ids` `[1 or B, q]` of the announced forward."""
        announced = self.announced
        if announced is None:
            return
        if announced.real is None:
            announced.next_position = position_ids[:, 0]
            return
        first = announced.real.int().argmax(dim=1, keepdim=True).to(position_ids.device)
        positions = position_ids.expand(first.shape[0], -1)
        announced.next_position = positions.gather(1, first)[:, 0]

    def begin(self, batch: int, num_new: int) -> Forward:
        """Decide what this forward does; nothing changes when it raises."""
        if self.ledger.batch_size not in (0, batch):
            raise ValueError(
                f"key_states: batch size {self.ledger.batch_size} expected as cached, got {batch}"
            )
        self.check_due(num_new)
        announced, self.announced = self.announced, None
        if announced is None or announced.num_new != num_new:
            announced = Announcement(num_new)
        due = self._due(announced, batch)
        was_open, seen = self.ledger.prompt_open, self.ledger.seen
        step = self.ledger.begin(batch, num_new)
        if due is not None:
            self.positions.compacted()
        if was_open and not self.ledger.prompt_open:
            self.positions.close_prompt()
        self.positions.append(seen, num_new, announced.real)
        self.current = Forward(step, due, announced.real)
        return self.current

    def check_complete(self, num_layers: int) -> None:
        """Raise `RuntimeError` when the last forward stopped before its last layer."""
        if self.current is not None and self.current.applied != num_layers:
            raise RuntimeError(
                f"the last forward stopped after {self.current.applied} of {num_layers} layers (an "
                "exception or an interrupt); the cache can't continue from there, reset() it"
            )

    def check_states(self, forward: Forward, key_states: Tensor) -> None:
        """Raise unless `key_states` `[B, Hkv, q, D]` belong to the running `forward`."""
        if forward.started != forward.applied:
            raise RuntimeError(
                f"the last forward stopped within layer {forward.applied}; the cache can't "
                "continue from there, reset() it"
            )
        expected = (self.ledger.batch_size, forward.step.num_new)
        got = (key_states.shape[0], key_states.shape[2])
        if got != expected:
            raise ValueError(
                f"key_states: (batch, new tokens) {expected} expected as in this forward's first "
                f"layer, got {got}"
            )

    def check_due(self, num_new: int) -> None:
        """Raise unless the prompt can be pinned as asked, and what is due can be evicted."""
        settings, ledger = self.settings, self.ledger
        if settings.budget is None:
            return
        prompt = ledger.prompt_tokens + num_new
        if settings.pin_prompt is True and ledger.extends_prompt(num_new):
            room = settings.budget - settings.recent - self._pinned_tokens()
            if prompt > room:
                raise ValueError(
                    f"pin_prompt: a prompt of at most budget - recent - pinned = {room} tokens "
                    f"expected, got {prompt}; nothing of this forward was cached"
                )
        if self.is_due(num_new) and self._mask_is_opaque:
            raise ValueError(
                "attention_mask: a 4-D mask does not say which tokens are pads, so none can be "
                "evicted; pass the 2-D mask, or budget=None"
            )

    def is_due(self, num_new: int) -> bool:
        """Whether a forward of `num_new` tokens compacts."""
        return self.ledger.kept(num_new) < self.ledger.live

    def pin(self, start: int, stop: int) -> None:
        """Protect token positions `[start, stop)` of every row."""
        for name, value in (("start", start), ("stop", stop)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}: an integer token position expected, got {value!r}")
        if not 0 <= start < stop:
            raise ValueError(f"start, stop: 0 <= start < stop expected, got {start}, {stop}")
        wanted = self._pinned_tokens() + stop - start
        if self.settings.budget is not None and wanted > self.settings.room:
            raise ValueError(
                f"stop: at most {self.settings.room} pinned tokens fit the budget of "
                f"{self.settings.budget}, got {wanted}"
            )
        self._pinned.append((start, stop))

    def prompt_is_pinned(self) -> bool:
        """Whether the prompt of every row is protected. Reads the device in padded batches."""
        if self.settings.budget is None or self.ledger.seen == 0:
            return False
        prompt = self.positions.prompt_length(self.ledger.prompt_tokens)
        return bool(torch.as_tensor(self._front() >= prompt).all())

    def _due(self, announced: Announcement, batch: int) -> DueCompaction | None:
        if not self.is_due(announced.num_new):
            return None
        position = announced.next_position
        if position is None:
            position = self.positions.next_position(self.ledger.seen, batch)
        protection = Protection(self._front(), self.settings.recent, tuple(self._pinned))
        appended = self.positions.appended(position.device)
        return DueCompaction(appended, position.expand(batch), protection)

    def _front(self) -> int | Tensor:
        """Tokens protected at the front of each row: the sinks, or the pinned prompt."""
        settings, sinks = self.settings, self.settings.sinks
        prompt = self.positions.prompt_length(self.ledger.prompt_tokens)
        if settings.pin_prompt is False or (
            settings.pin_prompt == "auto" and self.ledger.prompt_open
        ):
            return sinks
        longest = torch.iinfo(torch.int64).max
        if settings.pin_prompt == "auto":
            assert settings.budget is not None
            longest = min(settings.budget // 2, settings.room + sinks - self._pinned_tokens())
        if isinstance(prompt, Tensor):
            return torch.where(prompt <= longest, prompt.clamp_min(sinks), sinks)
        return max(prompt, sinks) if prompt <= longest else sinks

    def _pinned_tokens(self) -> int:
        return sum(stop - start for start, stop in self._pinned)

    def _check_mask_4d(self, num_new: int, mask: Tensor) -> None:
        columns = self.ledger.kept(num_new) + num_new
        if mask.shape[-1] != columns:
            raise ValueError(
                f"attention_mask: {columns} columns expected in a 4-D mask (live + new tokens), "
                f"got {list(mask.shape)}"
            )
