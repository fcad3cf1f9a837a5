"""The layers of one cache, of every kind, and the ledgers they live under."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from kvpage.compat import Window
from kvpage.layer import PagedLayer, SlidingLayer
from kvpage.ledger import Ledger
from kvpage.settings import Settings


class LayerStack:
    """One layer per decoder layer: full attention, sliding window, or a state of transformers' own.

    Layers of full attention share one ledger, which evicts down to the budget; those with a sliding
    window share another, whose budget is the window.
    """

    def __init__(self, settings: Settings, layers: list[Any]) -> None:
        """layers: the list that transformers sees, empty."""
        self.settings, self.all = settings, layers
        self.paged: list[PagedLayer] = []
        self.by_index: dict[int, PagedLayer] = {}
        """The same, by their place among all layers."""
        self.states: list[Any] = []
        self.ledger = self._new_ledger(settings.budget)
        self.sliding: Ledger | None = None

    @property
    def ranked(self) -> list[PagedLayer]:
        """The layers whose tokens compete for the budget."""
        return [layer for layer in self.paged if not layer.is_sliding]

    @property
    def shown(self) -> Ledger:
        """The ledger to describe the cache by: the sliding one where no layer is ranked."""
        return self.ledger if self.sliding is None or self.ranked else self.sliding

    @property
    def ledgers(self) -> list[Ledger]:
        return [self.ledger] if self.sliding is None else [self.ledger, self.sliding]

    @property
    def bytes_reserved(self) -> int:
        return sum(layer.bytes_reserved for layer in self.paged)

    def make(self, native: Iterable[Any]) -> None:
        """Have an empty layer for each of the model's: a `Window` of attention, or a state."""
        native = list(native)
        windows = [layer.tokens for layer in native if isinstance(layer, Window)]
        if None not in windows:
            self.ledger.count_only()
        for layer in native:
            if isinstance(layer, Window):
                self.add(self._new(layer.tokens))
            else:
                self.states.append(layer)
                self.all.append(layer)

    def layer(self, layer_idx: int, limit: int) -> PagedLayer:
        """The layer of attention at `layer_idx`: one there is, or, below `limit`, a new one that
        `add` takes in."""
        if 0 <= layer_idx < len(self.all):
            layer = self.all[layer_idx]
            if not isinstance(layer, PagedLayer):
                raise ValueError(f"layer_idx: an attention layer expected, got {layer_idx}")
            return layer
        if not 0 <= layer_idx < limit:
            raise ValueError(f"layer_idx: within [0, {limit}) expected, got {layer_idx}")
        return PagedLayer(self.ledger)

    def add(self, layer: PagedLayer) -> None:
        """Take in `layer` behind the others."""
        layer.index = len(self.all)
        self.by_index[layer.index] = layer
        self.paged.append(layer)
        self.all.append(layer)

    def clear(self) -> None:
        """Forget all layers and give all memory back."""
        self.release()
        for layers in (self.all, self.paged, self.states):
            layers.clear()
        self.by_index.clear()

    def release(self) -> None:
        """Give back every block this stack holds."""
        for ledger in self.ledgers:
            ledger.clear()

    def fork(self) -> LayerStack:
        """A stack of its own that holds the same blocks."""
        twin = copy.copy(self)
        twin.all, twin.paged, twin.states, twin.by_index = [], [], [], {}
        twin.ledger = self.ledger.fork()
        twin.sliding = None if self.sliding is None else self.sliding.fork()
        for layer in self.all:
            if isinstance(layer, PagedLayer):
                ledger = twin.sliding if layer.is_sliding else twin.ledger
                assert ledger is not None
                twin.add(layer.fork(ledger))
            else:
                twin.states.append(copy.deepcopy(layer))
                twin.all.append(twin.states[-1])
        return twin

    def select_rows(self, chosen: list[int], index: Tensor) -> None:
        """Row `i` becomes a copy of row `chosen[i]`; index: the same as a tensor."""
        for ledger in self.ledgers:
            ledger.select_rows(chosen)
        for layer in self.paged:
            layer.select_rows(index)
        for state in self.states:
            state.reorder_cache(index)

    def croppable(self) -> int:
        """How many of the last tokens can be forgotten."""
        if not all(state.is_croppable and state.record_past for state in self.states):
            return 0
        return min(ledger.live - ledger.floor for ledger in self.ledgers)

    def crop(self, count: int) -> None:
        """Forget the last `count` tokens of every row, at most `croppable()`."""
        for state in self.states:
            if state.record_past:
                state.crop(-count)
        if count == 0:
            return
        for ledger in self.ledgers:
            ledger.crop(count)
        for layer in self.paged:
            if layer.statistics is not None:
                layer.statistics.crop(count)

    def check(self) -> None:
        """Raise `RuntimeError`, with numbers, unless block bookkeeping and tensors agree."""
        for ledger in self.ledgers:
            ledger.check()
        for index, layer in enumerate(self.paged):
            pool = layer.ledger.pool
            held = layer.storage.keys.shape[1] if layer.storage else 0
            if held < pool.num_blocks or (held > pool.num_blocks and pool.users == 1):
                raise RuntimeError(
                    f"layer {index} stores {held} blocks, the pool has {pool.num_blocks}"
                )

    def _new(self, window: int | None) -> PagedLayer:
        if window is None:
            return PagedLayer(self.ledger)
        if self.sliding is None:
            self.sliding = self._new_ledger(window - 1)
        return SlidingLayer(self.sliding, window)

    def _new_ledger(self, budget: int | None) -> Ledger:
        settings = self.settings
        return Ledger(budget, settings.interval, settings.block_size, settings.static)
