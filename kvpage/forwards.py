"""One forward after the other: what the hooks announce, what is due, whether the last one ended.

Everything that can be wrong with a forward is checked here, before anything changes.
"""

from __future__ import annotations

import copy
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


@dataclass
class Forward:
    """The running forward, or the last one: what its layers apply and how many did."""

    step: Step
    due: DueCompaction | None
    mid_due: DueCompaction | None
    """The compaction that is due at a draft, `step.mid`: proposed now, done by `commit`."""
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
        self.drafts: int | None = None
        """Drafts of the forward about to be announced, when the outer model said so."""
        self.records = False
        """Whether `activate_past_recording` was called: some forwards end in drafts."""
        self._pinned: list[tuple[int, int]] = []
        self._mask_is_opaque = False

    def fork(self, ledger: Ledger) -> Forwards:
        """Forwards of their own that continue from here, on a forked `ledger`."""
        twin = copy.copy(self)
        twin.ledger = ledger
        twin.positions = self.positions.fork()
        twin.current = copy.copy(self.current)
        twin._pinned = list(self._pinned)
        return twin

    def announce(
        self, num_new: int, mask: Tensor | None, position_ids: Tensor | None
    ) -> Tensor | None:
        """A forward of `num_new` tokens under the model's attention mask begins.

        Returns the 2-D mask the model is to use: with a column for each seen token, as given, but
        with the pads among the live tokens where they are now.
        """
        if num_new == 0:
            raise ValueError(
                f"input_ids: tokens behind the {self.ledger.seen} seen ones expected, got none; "
                "generate takes the full ids, or the new ids with the attention_mask of the whole "
                "text"
            )
        drafts, self.drafts = self.drafts, None
        if drafts is None and self.records and num_new > 1:
            raise ValueError(
                "cache: which of these tokens are drafts is not known, since kvpage has not met "
                "the outer model; make the cache with it: PagedCompactCache(model)"
            )
        drafts = min(drafts or 0, num_new - 1)
        self._check_not_fed_again(num_new - drafts, position_ids)
        real = None
        if mask is not None and mask.ndim == 4:
            self._check_mask_4d(num_new, drafts, mask)
            self._mask_is_opaque = True
        elif mask is not None:
            columns = self.ledger.seen + num_new
            if mask.ndim != 2 or mask.shape[1] != columns:
                raise ValueError(
                    f"attention_mask: [batch, seen + new tokens = {columns}] expected, got "
                    f"{list(mask.shape)}"
                )
            real = mask[:, -num_new:].bool()
        self.check_due(num_new, drafts)
        self.announced = Announcement(num_new, drafts, real)
        return mask if mask is None or real is None else self._live_mask(mask, num_new, drafts)

    def see_positions(self, position_ids: Tensor) -> None:
        """Take `position_ids` `[1 or B, q]` of the announced forward."""
        if self.announced is not None:
            self.announced.position_ids = position_ids

    def begin(self, batch: int, num_new: int) -> Forward:
        """Decide what this forward does; nothing changes when it raises."""
        if self.ledger.batch_size not in (0, batch):
            raise ValueError(
                f"key_states: batch size {self.ledger.batch_size} expected as cached, got {batch}"
            )
        announced, self.announced = self.announced, None
        if announced is None or announced.num_new != num_new:
            announced = Announcement(num_new)
        drafts = announced.drafts
        self.check_due(num_new, drafts)
        due = self._due(announced, batch)
        was_open, seen = self.ledger.prompt_open, self.ledger.seen
        sure = num_new - drafts
        step = self.ledger.begin(batch, num_new, drafts)
        if due is not None:
            self.positions.compacted(step.kept)
        extends = was_open and (sure > 1 or seen == 0)
        if was_open and not extends:
            self.positions.close_prompt()
        for start, stop in ((0, sure), (sure, num_new)):
            part = None if announced.real is None else announced.real[:, start:stop]
            if start < stop:
                self.positions.append(seen + start, step.kept + start, stop - start, part)
            if extends and drafts and start == 0:
                self.positions.close_prompt()
        self.current = Forward(step, due, self._mid_due(announced, step, batch), announced.real)
        return self.current

    def commit(self) -> Step | None:
        """Take the drafts of the last forward that were not cropped as there to stay."""
        forward = self.current
        if forward is None or forward.step.mid is None:
            return None
        step = self.ledger.commit()
        if step is not None:
            assert self.settings.budget is not None
            self.positions.compacted(step.kept, tail=step.kept - self.settings.budget)
        return step

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

    def check_due(self, num_new: int, drafts: int) -> None:
        """Raise unless the prompt can be pinned as asked, and what is due can be evicted."""
        settings, ledger = self.settings, self.ledger
        if settings.budget is None:
            return
        prompt = ledger.prompt_tokens + num_new - drafts
        if settings.pin_prompt is True and ledger.extends_prompt(num_new - drafts):
            room = settings.budget - settings.recent - self._pinned_tokens()
            if prompt > room:
                raise ValueError(
                    f"pin_prompt: a prompt of at most budget - recent - pinned = {room} tokens "
                    f"expected, got {prompt}; nothing of this forward was cached"
                )
        if self.is_due(num_new, drafts) and self._mask_is_opaque:
            raise ValueError(
                "attention_mask: a 4-D mask does not say which tokens are pads, so none can be "
                "evicted; pass the 2-D mask, or budget=None"
            )

    def is_due(self, num_new: int, drafts: int) -> bool:
        """Whether a forward of `num_new` tokens compacts, before it or at one of its drafts."""
        ledger = self.ledger
        mid = ledger.mid(num_new, drafts)
        return mid is not None or ledger.kept(num_new - drafts) < ledger.live

    def kept(self, num_new: int) -> int:
        """Live tokens that the announced forward, or one of `num_new` tokens, appends to."""
        return self.ledger.kept(num_new - self._drafts_of(num_new))

    def will_compact(self, num_new: int) -> bool:
        """Whether the announced forward, or one of `num_new` tokens, compacts."""
        return self.is_due(num_new, self._drafts_of(num_new))

    def appends_to(self) -> int:
        """Live tokens that the running forward appends to."""
        if self.announced is not None:
            return self.kept(self.announced.num_new)
        assert self.current is not None
        return self.current.step.kept

    def has_mid(self, layer_idx: int) -> bool:
        """Whether the running forward has a compaction due at one of its drafts."""
        if layer_idx > 0:
            return self.current is not None and self.current.step.mid is not None
        if self.announced is None:
            return False
        return self.ledger.mid(self.announced.num_new, self.announced.drafts) is not None

    def pin(self, start: int, stop: int) -> None:
        """Protect token positions `[start, stop)` of every row."""
        for name, value in (("start", start), ("stop", stop)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name}: an integer token position expected, got {value!r}")
        if not 0 <= start < stop:
            raise ValueError(f"start, stop: 0 <= start < stop expected, got {start}, {stop}")
        settings, wanted = self.settings, self._pinned_tokens() + stop - start
        if settings.budget is not None:
            room = settings.room
            if settings.pin_prompt is True:
                front = max(settings.sinks, self.ledger.prompt_tokens)
                room = min(room, settings.budget - settings.recent - front)
            if wanted > room:
                raise ValueError(
                    f"stop: at most {room} pinned tokens fit the budget of {settings.budget} "
                    f"beside what else is protected, got {wanted}"
                )
        self._pinned.append((start, stop))

    def prompt_is_pinned(self) -> bool:
        """Whether the prompt of every row is protected. Reads the device in padded batches."""
        if self.settings.budget is None or self.ledger.seen == 0:
            return False
        prompt = self.positions.prompt_length(self.ledger.prompt_tokens)
        return bool(torch.as_tensor(self._front() >= prompt).all())

    def _drafts_of(self, num_new: int) -> int:
        announced = self.announced
        return 0 if announced is None or announced.num_new != num_new else announced.drafts

    def _due(self, announced: Announcement, batch: int) -> DueCompaction | None:
        ledger = self.ledger
        if ledger.kept(announced.num_new - announced.drafts) == ledger.live:
            return None
        position = announced.position_of(0)
        if position is None:
            position = self.positions.next_position(ledger.seen, batch)
        appended = self.positions.appended(position.device)
        return DueCompaction(appended, position.expand(batch), self._protection())

    def _mid_due(self, announced: Announcement, step: Step, batch: int) -> DueCompaction | None:
        if step.mid is None:
            return None
        position = announced.position_of(step.mid)
        if position is None:
            position = self.positions.next_position(step.seen + step.mid, batch)
        behind = announced.num_new - step.mid
        appended = self.positions.appended(position.device)[:, :-behind]
        return DueCompaction(appended, position.expand(batch), self._protection())

    def _protection(self) -> Protection:
        return Protection(self._front(), self.settings.recent, tuple(self._pinned))

    def _front(self) -> int | Tensor:
        """Tokens protected at the front of each row: the sinks, or the pinned prompt."""
        settings, sinks = self.settings, self.settings.sinks
        auto = settings.pin_prompt == "auto"
        prompt = self.positions.prompt_length(self.ledger.prompt_tokens)
        if settings.pin_prompt is False or (auto and self.ledger.prompt_open):
            return sinks
        longest = torch.iinfo(torch.int64).max
        if auto:
            assert settings.budget is not None
            longest = min(settings.budget // 2, settings.room + sinks - self._pinned_tokens())
        if isinstance(prompt, Tensor):
            return torch.where(prompt <= longest, prompt.clamp_min(sinks), sinks)
        return max(prompt, sinks) if prompt <= longest else sinks

    def _pinned_tokens(self) -> int:
        return sum(stop - start for start, stop in self._pinned)

    def _live_mask(self, mask: Tensor, num_new: int, drafts: int) -> Tensor:
        """`mask` `[B, seen + q]` with the columns transformers will read telling where pads live.

        It reads column `seen - kept + j` for live slot `j`: right as it stands when all pads are on
        the left, as is usual; wrong for pads between or behind real tokens once some were evicted.
        """
        kept = self.ledger.kept(num_new - drafts)
        real = self.positions.real_after(kept)
        if real is None or kept == self.ledger.seen:
            return mask
        mask = mask.clone()
        mask[:, self.ledger.seen - kept : self.ledger.seen] = real.to(mask)
        return mask

    def _check_not_fed_again(self, sure: int, position_ids: Tensor | None) -> None:
        """Raise when assisted decoding feeds the text that the cache has seen once more.

        transformers (up to 5.24) does when it is given a filled cache and the full ids.
        """
        if not self.records or self.ledger.seen == 0 or sure == 1 or position_ids is None:
            return
        if int(position_ids[0, -1]) < self.ledger.seen + sure - 1:
            raise ValueError(
                f"input_ids: {sure} tokens were passed behind {self.ledger.seen} seen ones, at "
                "positions from 0 on: assisted decoding feeds all of input_ids again; pass the new "
                "ids alone, with the attention_mask of the whole text"
            )

    def _check_mask_4d(self, num_new: int, drafts: int, mask: Tensor) -> None:
        columns = self.ledger.kept(num_new - drafts) + num_new
        if mask.shape[-1] != columns:
            raise ValueError(
                f"attention_mask: {columns} columns expected in a 4-D mask (live + new tokens), "
                f"got {list(mask.shape)}"
            )
