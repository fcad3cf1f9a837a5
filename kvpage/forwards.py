"""One forward after the other: what the hooks announce, what is due, whether the last one ended.

Everything that can be wrong with a forward is checked here, before anything changes.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from kvpage.compaction import DueCompaction
from kvpage.ledger import Step
from kvpage.pins import Pins
from kvpage.positions import Announcement, TokenPositions
from kvpage.settings import Settings
from kvpage.stack import LayerStack


@dataclass
class Forward:
    """The running forward, or the last one: what its layers apply and how many did."""

    step: Step
    due: DueCompaction | None
    mid_due: DueCompaction | None
    """The compaction that is due at a draft, `step.mid`: proposed now, done by `commit`."""
    real: Tensor | None
    position_ids: Tensor | None
    """int64 `[1 or B, q]` as the model passed them, if it did."""
    sliding: Step | None = None
    """The step of the sliding-window layers."""
    told: Tensor | None = None
    started: int = 0
    applied: int = 0
    key_shape: torch.Size | None = None
    """Of keys that were checked: those of most layers are alike."""

    def step_of(self, sliding: bool) -> Step:
        """The step of the layers with a window, or of the others."""
        step = self.sliding if sliding else self.step
        assert step is not None
        return step


class Forwards:
    """The forwards of one cache: turns announcements and lengths into steps."""

    def __init__(self, settings: Settings, stack: LayerStack) -> None:
        self.settings, self.stack, self.ledger = settings, stack, stack.ledger
        self.clear()

    def clear(self) -> None:
        self.positions = TokenPositions()
        self.announced: Announcement | None = None
        self.current: Forward | None = None
        self.drafts: int | None = None
        """Drafts of the forward about to be announced, when the outer model said so."""
        self.outer_mask: Tensor | None = None
        """2-D attention mask that a model around the decoder was given for it."""
        self.records = False
        """Whether `activate_past_recording` was called: some forwards end in drafts."""
        self.pins = Pins(self.settings)
        self.mask_is_opaque = False
        """Whether a 4-D mask of the user's own was passed."""

    def fork(self, stack: LayerStack) -> Forwards:
        """Forwards of their own that continue from here, on a forked `stack`."""
        twin = copy.copy(self)
        twin.stack, twin.ledger = stack, stack.ledger
        twin.positions = self.positions.fork()
        twin.current = copy.copy(self.current)
        twin.pins = self.pins.fork()
        return twin

    def announce(
        self,
        num_new: int,
        mask: Tensor | None,
        position_ids: Tensor | None,
        visible: Tensor | None,
        over_blocks: bool = False,
    ) -> Tensor | None:
        """A forward of `num_new` tokens under the model's attention mask begins.

        visible: bool `[B, live + q]`, what the last query may look at, where transformers has made
        the mask 4-D before the decoder was called. over_blocks: attention over blocks asks the
        cache which slots hold pads. Returns the mask the model is to use: as given, but, unless it
        is `over_blocks`, a 2-D one with the pads among the live tokens where they are now.
        """
        if num_new == 0:
            raise ValueError(
                f"input_ids: tokens behind the {self.ledger.seen} seen ones expected, got none; "
                "generate takes the full ids, or the new ids with the attention_mask of the whole "
                "text; reset() is for another text"
            )
        drafts, self.drafts = self.drafts, None
        outer_mask, self.outer_mask = self.outer_mask, None
        if drafts is None and self.records and num_new > 1:
            raise ValueError(
                "cache: which of these tokens are drafts is not known, since kvpage has not met "
                "the outer model; make the cache with it: PagedCompactCache(model)"
            )
        drafts = min(drafts or 0, num_new - 1)
        self._check_not_fed_again(num_new - drafts, position_ids)
        told = mask if mask is None or mask.ndim == 2 else outer_mask
        real = None
        if told is not None:
            real = self._check_mask_2d(num_new, told)
        elif mask is not None:
            self._check_mask_4d(num_new, drafts, mask)
            if visible is None:
                self.mask_is_opaque = True
            else:
                kept = self.ledger.kept(num_new - drafts)
                self._check_same(visible[:, :kept], self.positions.real_after(kept))
                real = visible[:, -num_new:]
        self.check_due(num_new, drafts)
        self.announced = Announcement(num_new, drafts, real)
        if over_blocks and num_new == 1:
            self.announced.told = told
            return mask
        used = None if told is None else self._live_mask(told, num_new, drafts)
        if used is not told and (told is not mask or self.stack.sliding is not None):
            self._check_same(told, used)
            used = told
        return used if told is mask else mask

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
        slides = self.stack.sliding
        sliding = None if slides is None else slides.begin(batch, num_new)
        if due is not None:
            self.positions.compacted(step.kept)
        extends = was_open and (sure > 1 or seen == 0)
        if was_open and not extends:
            self.positions.close_prompt()
        if sliding is not None and sliding.compacts:
            self.positions.slid(sliding.kept)
        for start, stop in ((0, sure), (sure, num_new)):
            if start < stop:
                part = None if announced.real is None else announced.real[:, start:stop]
                in_window = None if sliding is None else sliding.kept + start
                at = seen + start, step.kept + start, stop - start
                self.positions.append(*at, part, in_window)
            if extends and drafts and start == 0:
                self.positions.close_prompt()
        mid_due = self._mid_due(announced, step, batch)
        position_ids = announced.position_ids
        real, told = announced.real, announced.told
        self.current = Forward(step, due, mid_due, real, position_ids, sliding, told)
        return self.current

    def latest_positions(self, num_new: int, last: int) -> Tensor | None:
        """int64 `[1 or B, last]`: positions of the last of the running forward's `num_new` tokens,
        whether or not it has begun; `None` where they are not known."""
        announced = self.announced
        running = announced if announced is not None else self.current
        if running is not None and running.position_ids is not None:
            return running.position_ids[:, -last:]
        if self.positions.pads is not None or (running is not None and running.real is not None):
            return None
        stop = self.ledger.seen + (num_new if announced is not None else 0)
        return torch.arange(stop - last, stop)[None]

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
        forward.key_shape = key_states.shape

    def check_due(self, num_new: int, drafts: int) -> None:
        """Raise unless the prompt can be pinned as asked, and what is due can be evicted."""
        settings, ledger, sure = self.settings, self.ledger, num_new - drafts
        if ledger.budget is None:
            return
        if settings.pin_prompt is True and ledger.extends_prompt(sure):
            self.pins.check_prompt(ledger.prompt_tokens + sure)
        if self.is_due(num_new, drafts) and self.mask_is_opaque:
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
        """Whether that forward compacts."""
        return self.is_due(num_new, self._drafts_of(num_new))

    def appends_to(self) -> int:
        """Live tokens that the running forward appends to."""
        if self.announced is not None:
            return self.kept(self.announced.num_new)
        assert self.current is not None
        return self.current.step.kept

    def has_mid(self) -> bool:
        """Whether the running forward, begun or not, has a compaction due at one of its drafts."""
        if self.announced is not None:
            return self.ledger.mid(self.announced.num_new, self.announced.drafts) is not None
        return self.current is not None and self.current.step.mid is not None

    def pin(self, start: int, stop: int) -> None:
        """Protect token positions `[start, stop)` of every row."""
        self.pins.add(start, stop, self.ledger.prompt_tokens)

    def prompt_is_pinned(self) -> bool:
        """Whether the prompt of every row is protected. Reads the device in padded batches."""
        if self.settings.budget is None or self.ledger.seen == 0:
            return False
        prompt = self._prompt_length()
        return bool(
            torch.as_tensor(self.pins.front(prompt, self.ledger.prompt_open) >= prompt).all()
        )

    def _drafts_of(self, num_new: int) -> int:
        announced = self.announced
        if announced is None:
            return min(self.drafts or 0, num_new - 1)
        return announced.drafts if announced.num_new == num_new else 0

    def _due(self, announced: Announcement, batch: int) -> DueCompaction | None:
        ledger = self.ledger
        if ledger.kept(announced.num_new - announced.drafts) == ledger.live:
            return None
        position = announced.position_of(0)
        if position is None:
            position = self.positions.next_position(ledger.seen, batch)
        appended = self.positions.appended(position.device)
        return self._compaction(appended, position.expand(batch))

    def _mid_due(self, announced: Announcement, step: Step, batch: int) -> DueCompaction | None:
        if step.mid is None:
            return None
        position = announced.position_of(step.mid)
        if position is None:
            position = self.positions.next_position(step.seen + step.mid, batch)
        behind = announced.num_new - step.mid
        appended = self.positions.appended(position.device)[:, :-behind]
        return self._compaction(appended, position.expand(batch))

    def _compaction(self, appended: Tensor, next_position: Tensor) -> DueCompaction:
        protection = self.pins.protection(self._prompt_length(), self.ledger.prompt_open)
        return DueCompaction(appended, next_position, protection, self.positions.pads is not None)

    def _prompt_length(self) -> int | Tensor:
        return self.positions.prompt_length(self.ledger.prompt_tokens)

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
        """Raise when the text that the cache has seen is fed once more, as transformers does."""
        seen, pads = self.ledger.seen, self.positions.pads
        if seen == 0 or sure == 1 or position_ids is None:
            return
        again = sure == seen and (pads is None or not pads.any()) and int(position_ids[0, 0]) == 0
        if again or (self.records and int(position_ids[0, -1]) < seen + sure - 1):
            raise ValueError(
                f"input_ids: {sure} tokens were passed behind {seen} seen ones, at positions from "
                "0 on: generate feeds all of input_ids again with assisted decoding, or when none "
                "is new; pass the new ids alone, with the attention_mask of the whole text, or "
                "cache.crop(-1) to decode from the last one"
            )

    def _check_mask_2d(self, num_new: int, mask: Tensor) -> Tensor:
        """Which of the new tokens are no pads, bool `[B, q]`; `ValueError` for another mask."""
        columns = self.ledger.seen + num_new
        if mask.ndim != 2 or mask.shape[1] != columns:
            raise ValueError(
                f"attention_mask: [batch, seen + new tokens = {columns}] expected, got "
                f"{list(mask.shape)}"
            )
        return mask[:, -num_new:].bool()

    def _check_same(self, told: Tensor | None, used: Tensor | None) -> None:
        """Raise where the mask can't be handed to the model as it would have to be."""
        if told is not None and used is not None and not torch.equal(told, used):
            raise ValueError(
                "attention_mask: pads on the left of each row expected once tokens were evicted "
                "in a model with sliding-window layers, or whose 4-D masks are made outside the "
                "decoder; got pads between or behind real tokens"
            )

    def _check_mask_4d(self, num_new: int, drafts: int, mask: Tensor) -> None:
        columns = self.ledger.kept(num_new - drafts) + num_new
        if mask.shape[-1] != columns:
            raise ValueError(
                f"attention_mask: {columns} columns expected in a 4-D mask (live + new tokens), "
                f"got {list(mask.shape)}"
            )
