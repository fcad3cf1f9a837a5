"""One-token forwards of a model with attn_implementation "kvpage": who reads the blocks, and where.

The reference on rows that lie in order needs no tables: it is handed their views. Everything else
reads through the tables of its `Places`; with `static=True` always, so that shapes and addresses
stay as they are.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from kvpage.attention import Decode, hand_over, resolve_backend
from kvpage.contract import ModelKey
from kvpage.device import capturing, reads_are_free
from kvpage.forwards import Forward, Forwards
from kvpage.layer import PagedLayer
from kvpage.ledger import Step
from kvpage.places import Pads, Places
from kvpage.settings import Settings
from kvpage.storage import without_autograd


class Decoding:
    """How one cache hands its one-token forwards to the attention over blocks."""

    def __init__(self, settings: Settings, forwards: Forwards) -> None:
        self.settings, self.forwards = settings, forwards
        self.backends: dict[str, str] = {}
        """By type of device, what attention over blocks ran on."""
        self._places: dict[tuple[bool, torch.device], Places] = {}
        self.over_blocks = False
        """Whether the running forward is such a one."""
        self._captured: list[int] | None = None
        """Where everything was that a graph was captured with."""

    def fork(self, forwards: Forwards) -> Decoding:
        """Decoding of its own that continues from here."""
        twin = copy.copy(self)
        twin.forwards, twin._places, twin.backends = forwards, {}, dict(self.backends)
        twin._captured = None
        return twin

    def clear(self) -> None:
        self._places.clear()
        self.over_blocks, self._captured = False, None

    def check(self, key: ModelKey | None, num_new: int, masked: bool) -> None:
        """Raise `ValueError` where the settings ask for what this forward can't have, and
        `RuntimeError` for a forward that can't be captured."""
        if capturing() and (num_new > 1 or masked or not self.settings.static):
            raise RuntimeError(
                "cache: of a cache with static=True one-token forwards without an attention_mask "
                "can be captured (pads of the prompt stay hidden)"
            )
        asked = "static" if self.settings.static else "backend"
        if not self.settings.static and self.settings.backend == "auto":
            return
        if key is not None and not key.attends_over_blocks:
            raise ValueError(
                f"{asked}: needs model.set_attn_implementation('kvpage'), this {key.name} has "
                f"{key.config._attn_implementation!r}"
            )
        if self.settings.static and num_new == 1 and self.forwards.mask_is_opaque:
            raise ValueError(
                "attention_mask: a 2-D mask or none expected with static=True, got a 4-D one"
            )

    def resolve(self, key: ModelKey | None, device: torch.device) -> None:
        """Raise where the backend that was asked for can't be had on `device`."""
        if key is not None and key.attends_over_blocks:
            self._backend(device)

    def begin(self, key: ModelKey | None, step: Step, layers: list[PagedLayer]) -> None:
        """A forward was begun."""
        if capturing():
            self._captured = self._addresses(layers)
        self.over_blocks = (
            key is not None
            and key.attends_over_blocks
            and step.num_new == 1
            and step.kept > 0
            and not self.forwards.mask_is_opaque
        )

    def places_for(self, layer: PagedLayer, step: Step) -> Places | None:
        """Where `layer` writes and attends in the running forward; `None`: through views."""
        storage = layer.storage
        if storage is None:
            return None
        views = not self.settings.static and step.layout.strides is not None
        if views and self._backend(storage.keys.device) == "reference":
            return None
        places = self.places_of(layer, step)
        if places.step is not step:
            self._take(places, layer.is_sliding, step)
        return places

    def hand_over(
        self,
        layer: PagedLayer,
        layer_idx: int,
        places: Places | None,
        keys: Tensor,
    ) -> None:
        """Tell the attention that follows what to read; keys: what `update` returns."""
        visible = None
        if places is None:
            visible = self.visible_slots(layer.is_sliding)
            visible = None if visible is None else visible[:, -keys.shape[2] :].to(keys.device)
            if visible is not None and reads_are_free(visible.device) and bool(visible.all()):
                visible = None
        backend = self._backend(keys.device)
        hand_over(Decode(layer_idx, backend, keys, visible, layer.storage, places, layer.window))

    def expect(self, layers: list[PagedLayer], forward: Forward) -> None:
        """Be where a captured graph continues, for a forward it is about to replay."""
        for layer in layers:
            step = forward.step_of(layer.is_sliding)
            assert layer.storage is not None
            places = self.places_of(layer, step)
            if places.step is not step:
                self._expect(places, layer.is_sliding, step)

    def check_captured(self, layers: list[PagedLayer]) -> None:
        """Raise `RuntimeError` unless a graph was captured, of this cache as it is."""
        if self._captured is None or self._captured != self._addresses(layers):
            raise RuntimeError(
                "advance: a captured one-token forward expected, of the cache as it is; none was, "
                "or its tensors have moved since (reset, other rows, forks): capture again"
            )

    def _addresses(self, layers: list[PagedLayer]) -> list[int]:
        tensors: list[Tensor | None] = []
        for layer in layers:
            storage, statistics = layer.storage, layer.statistics
            tensors += (None, None) if storage is None else (storage.keys, storage.values)
            tensors += () if statistics is None else statistics.cycle_buffers
        for places in self._places.values():
            tensors += (places.tables, places.lengths, places.cycle, places.visible)
        rows = self.forwards.ledger.batch_size
        return [rows, *(0 if tensor is None else tensor.data_ptr() for tensor in tensors)]

    def visible_slots(self, sliding: bool) -> Tensor | None:
        """bool `[B, live]`: which live slots the new token sees; `None`: all.

        As with SDPA: as the mask says where it tells of them, else those that hold no pad, and all
        where the forward has no mask. With `static=True` what was a pad stays hidden then.
        """
        forward = self.forwards.current
        assert forward is not None
        step = forward.step_of(sliding)
        if forward.told is not None and (sliding or step.kept == step.seen):
            return forward.told[:, -step.kept - 1 :].bool()
        if forward.real is None and not self.settings.static:
            return None
        positions = self.forwards.positions
        slots = positions.sliding if sliding else positions.live
        return None if slots is None else slots.read()

    def _backend(self, device: torch.device) -> str:
        if device.type not in self.backends:
            settings = self.settings
            backend = resolve_backend(settings.backend, device.type, settings.block_size)
            self.backends[device.type] = backend
        return self.backends[device.type]

    def places_of(self, layer: PagedLayer, step: Step) -> Places:
        """Where the rows of `layer` lie: one for all layers under its ledger, on its device."""
        assert layer.storage is not None
        at = layer.is_sliding, layer.storage.keys.device
        batch = len(step.layout.tables)
        if at not in self._places or self._places[at].lengths.shape[1] != batch:
            self._places[at] = _new_places(at[1], batch, self.settings.block_size)
        return self._places[at]

    def _pads(self, sliding: bool) -> Pads:
        current = self.forwards.current
        return Pads(
            lambda: self.visible_slots(sliding), current is not None and current.real is not None
        )

    @without_autograd
    def _take(self, places: Places, sliding: bool, step: Step) -> None:
        places.take(step, self._pads(sliding), self.settings.static)

    @without_autograd
    def _expect(self, places: Places, sliding: bool, step: Step) -> None:
        places.expect(step, self._pads(sliding))


@without_autograd
def _new_places(device: torch.device, batch_size: int, block_size: int) -> Places:
    return Places(device, batch_size, block_size)
