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
from kvpage.device import reads_are_free
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

    def fork(self, forwards: Forwards) -> Decoding:
        """Decoding of its own that continues from here."""
        twin = copy.copy(self)
        twin.forwards, twin._places, twin.backends = forwards, {}, dict(self.backends)
        return twin

    def clear(self) -> None:
        self._places.clear()
        self.over_blocks = False

    def check(self, key: ModelKey | None, num_new: int) -> None:
        """Raise `ValueError` where the settings ask for what this forward can't have."""
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

    def begin(self, key: ModelKey | None, step: Step) -> None:
        """A forward was begun."""
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
        if views and self._backend(layer) == "reference":
            return None
        places = self._places_of(layer, step)
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
            visible = self.real_slots(layer.is_sliding)
            visible = None if visible is None else visible[:, -keys.shape[2] :].to(keys.device)
            if visible is not None and reads_are_free(visible.device) and bool(visible.all()):
                visible = None
        backend = self._backend(layer)
        hand_over(Decode(layer_idx, backend, keys, visible, layer.storage, places, layer.window))

    def expect(self, layers: list[PagedLayer], forward: Forward) -> None:
        """Be where a captured graph continues, for a forward it is about to replay."""
        for layer in layers:
            step = forward.step_of(layer.is_sliding)
            assert layer.storage is not None
            places = self._places_of(layer, step)
            if places.step is not step:
                self._expect(places, layer.is_sliding, step)

    def cycle(self, layer: PagedLayer, step: Step) -> Places:
        """The places of `layer` in the running forward, which say where statistics go."""
        return self._places_of(layer, step)

    def real_slots(self, sliding: bool) -> Tensor | None:
        """bool `[B, live]`: which live slots hold no pad; `None` while no mask was given."""
        positions = self.forwards.positions
        slots = positions.sliding if sliding else positions.live
        return None if slots is None else slots.read()

    def _backend(self, layer: PagedLayer) -> str:
        assert layer.storage is not None
        device = layer.storage.keys.device.type
        if device not in self.backends:
            settings = self.settings
            self.backends[device] = resolve_backend(settings.backend, device, settings.block_size)
        return self.backends[device]

    def _places_of(self, layer: PagedLayer, step: Step) -> Places:
        assert layer.storage is not None
        at = layer.is_sliding, layer.storage.keys.device
        batch = len(step.layout.tables)
        if at not in self._places or self._places[at].lengths.shape[1] != batch:
            self._places[at] = _new_places(at[1], batch, self.settings.block_size)
        return self._places[at]

    def _pads(self, sliding: bool) -> Pads:
        current = self.forwards.current
        return Pads(
            lambda: self.real_slots(sliding), current is not None and current.real is not None
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
