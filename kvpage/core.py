"""What a cache does forward by forward, between the hooks, the ledger and the layers."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from kvpage.centroids import Vectors
from kvpage.forwards import Forward, Forwards
from kvpage.hooks import Call, HookedCache, ModelKey, take_call
from kvpage.layer import PagedLayer
from kvpage.ledger import Ledger
from kvpage.meeting import Meeting
from kvpage.scoring import Scorer
from kvpage.settings import Settings


@dataclass
class TracedCompaction:
    """Which tokens one compaction left: kept when a cache is made with `trace=True`."""

    seen_tokens: int
    """Tokens each row had seen when it ran."""
    positions: list[Tensor] = field(default_factory=list)
    """Per layer, int32 `[B, Hkv, kept]` on the CPU: token positions that live on, pads -1."""

    def select_rows(self, rows: Tensor) -> TracedCompaction:
        """What it left of the rows `rows`."""
        return TracedCompaction(self.seen_tokens, [kept[rows] for kept in self.positions])


C = TypeVar("C", bound="PagedCore")


class PagedCore(HookedCache):
    """The working parts of a `PagedCompactCache`, which adds what transformers and users call."""

    layers: list[PagedLayer]

    def _set_up(self, settings: Settings, scorer: Scorer, model: nn.Module | None) -> None:
        self.settings, self.scorer = settings, scorer
        self.ledger = Ledger(settings.budget, settings.interval, settings.block_size)
        self._forwards = Forwards(settings, self.ledger)
        self._meeting = Meeting(self, model)
        self._clear()
        self._free_when_dead()

    def _clear(self) -> None:
        self.trace: list[TracedCompaction] | None = [] if self.settings.trace else None
        self._bytes_peak = 0

    def _free_when_dead(self) -> None:
        weakref.finalize(self, self.ledger.clear).atexit = False

    # What the hooks call.

    def meet(self, key: ModelKey) -> None:
        self._meeting.meet(key, len(self.layers))

    def check_trainable(self) -> None:
        if self.ledger.seen > 0:
            raise RuntimeError(
                f"cache: gradients do not reach the {self.ledger.seen} tokens it holds; train "
                "without it, use torch.no_grad(), or put the model in eval mode"
            )

    def expect_drafts(self, drafts: int) -> None:
        self._forwards.drafts = drafts

    def announce(
        self, num_new: int, mask: Tensor | None, position_ids: Tensor | None
    ) -> Tensor | None:
        self._check_complete()
        self._commit()
        used = self._forwards.announce(num_new, mask, position_ids)
        self._check_statistics(num_new)
        return used

    def is_announced(self) -> bool:
        return self._forwards.announced is not None

    def see_positions(self, cos: Tensor, sin: Tensor, position_ids: Tensor | None) -> None:
        if position_ids is not None:
            self._meeting.check_rope(cos, sin, position_ids)
            self._forwards.see_positions(position_ids)

    def needs_private_mask(self, layer_idx: int) -> bool:
        return self._forwards.has_mid(layer_idx)

    def private_mask(self, mask: Tensor | None, heads: int, hidden: Tensor) -> Tensor:
        batch, new = hidden.shape[:2]
        length = self._forwards.appends_to() + new
        if mask is None:
            slots = torch.arange(length, device=hidden.device)
            mask = slots <= (slots[-new:, None])
        if mask.dtype == torch.bool:
            lowest = torch.finfo(hidden.dtype).min
            mask = torch.zeros_like(mask, dtype=hidden.dtype).masked_fill(~mask, lowest)
        return mask.expand(batch, heads, new, length).clone()

    # One forward.

    def _update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int
    ) -> tuple[Tensor, Tensor]:
        call = take_call(self, layer_idx)
        self._meeting.check_caller(call)
        layer = self._layer(layer_idx)
        _check_states(key_states, value_states)
        layer.check_states(key_states, value_states)
        forward = self._forwards.current
        if forward is None or layer.step_index == forward.step.index:
            forward = self._begin(key_states.shape[0], key_states.shape[2])
        self._forwards.check_states(forward, key_states)
        if layer_idx == len(self.layers):
            self.layers.append(layer)
        forward.started += 1
        everything = layer.apply(forward.step, forward.due, self.scorer, key_states, value_states)
        self._observe(layer, forward, call)
        if forward.due is not None:
            self._note(layer)
        if forward.step.fresh:
            self._bytes_peak = max(self._bytes_peak, self._bytes_reserved())
        forward.applied += 1
        return everything

    def _layer(self, layer_idx: int) -> PagedLayer:
        if 0 <= layer_idx < len(self.layers):
            return self.layers[layer_idx]
        limit = len(self.layers) + 1 if self.ledger.steps <= 1 else len(self.layers)
        if self._meeting.key is not None:
            limit = min(limit, self._meeting.key.num_layers)
        if not 0 <= layer_idx < limit:
            raise ValueError(f"layer_idx: within [0, {limit}) expected, got {layer_idx}")
        return PagedLayer(self.ledger)

    def _begin(self, batch: int, num_new: int) -> Forward:
        self._check_complete()
        self._check_statistics(num_new)
        forward = self._forwards.begin(batch, num_new)
        if forward.due is not None and self.trace is not None:
            self.trace.append(TracedCompaction(forward.step.seen))
        return forward

    def _observe(self, layer: PagedLayer, forward: Forward, call: Call | None) -> None:
        """Take what the hooks captured of an attention call; hide what its drafts must not see."""
        statistics, vectors = None, None
        if call is not None and self.scorer.needs_statistics:
            if call.queries is None or call.keys is None:
                raise RuntimeError("queries or keys of this layer did not pass kvpage's hooks")
            assert self._meeting.key is not None
            vectors = Vectors(_leaf(call.queries), _leaf(call.keys), forward.real)
            statistics = layer.collector(vectors, self._meeting.key.rope)
        if forward.mid_due is not None:
            assert call is not None and call.mask is not None
            layer.propose(forward.step, forward.mid_due, self.scorer, vectors, call.mask)
        if statistics is not None and vectors is not None:
            statistics.add(vectors)

    def _commit(self) -> None:
        """Carry out the compaction that became due at a draft which is there to stay."""
        forward = self._forwards.current
        step = self._forwards.commit()
        if step is None or forward is None:
            return
        if self.trace is not None:
            self.trace.append(TracedCompaction(forward.step.seen + (forward.step.mid or 0)))
        forward.applied = 0
        for layer in self.layers:
            layer.commit(step)
            self._note(layer)
            forward.applied += 1
        forward.started = forward.applied

    def _note(self, layer: PagedLayer) -> None:
        if self.trace is not None and layer.survivors is not None:
            self.trace[-1].positions.append(layer.survivors.cpu())

    def _check_complete(self) -> None:
        key = self._meeting.key
        self._forwards.check_complete(len(self.layers) if key is None else key.num_layers)

    def _check_statistics(self, num_new: int) -> None:
        if self.scorer.needs_statistics and self._forwards.will_compact(num_new):
            for layer in self.layers:
                layer.check_statistics()

    def _bytes_reserved(self) -> int:
        return sum(layer.bytes_reserved for layer in self.layers)

    # Rows and copies.

    def _crop(self, count: int) -> None:
        most = self.ledger.live - self.ledger.floor
        if count > most:
            raise ValueError(
                f"tokens_to_remove: at most {most} can be removed, those appended since the last "
                f"compaction, got {count}"
            )
        if count:
            self._forwards.positions.crop(count)
            self.ledger.crop(count)
            for layer in self.layers:
                if layer.statistics is not None:
                    layer.statistics.crop(count)
        self._commit()

    def _fork(self: C) -> C:
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.ledger = self.ledger.fork()
        twin.layers = [layer.fork(twin.ledger) for layer in self.layers]
        twin._forwards = self._forwards.fork(twin.ledger)
        twin._meeting = self._meeting.fork(twin)
        twin.trace = None if self.trace is None else list(self.trace)
        twin._free_when_dead()
        return twin

    def _select_rows(self, name: str, rows: Tensor, same_number: bool = False) -> None:
        batch = self.ledger.batch_size
        if batch == 0:
            return
        self._check_complete()
        if not isinstance(rows, Tensor) or rows.ndim != 1:
            raise TypeError(f"{name}: a one-dimensional tensor of rows expected, got {rows!r}")
        if rows.dtype == torch.bool:
            rows = rows.nonzero()[:, 0]
        chosen = rows.tolist()
        chosen = [row + batch if -batch <= row < 0 else row for row in chosen]
        wrong = [row for row in chosen if not 0 <= row < batch]
        if wrong or not chosen or (same_number and len(chosen) != batch):
            many = f"{batch}" if same_number else "some"
            raise ValueError(f"{name}: {many} rows below {batch} expected, got {rows.tolist()}")
        if chosen == list(range(batch)):
            return
        self._commit()
        index = torch.tensor(chosen)
        self.ledger.select_rows(chosen)
        self._forwards.positions.select_rows(index)
        for layer in self.layers:
            layer.select_rows(index)
        if self.trace is not None:
            self.trace = [event.select_rows(index) for event in self.trace]


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


def _check_states(key_states: Tensor, value_states: Tensor) -> None:
    if isinstance(key_states, Tensor) and isinstance(value_states, Tensor):
        shape, other = key_states.shape, value_states.shape
        if len(shape) == 4 == len(other) and shape[:3] == other[:3] and 0 not in (*shape, other[3]):
            return
    for name, states in (("key_states", key_states), ("value_states", value_states)):
        if not isinstance(states, Tensor) or states.ndim != 4:
            got = list(states.shape) if isinstance(states, Tensor) else type(states).__name__
            raise ValueError(f"{name}: a tensor [B, Hkv, q, D] expected, got {got}")
    if key_states.shape[:3] != value_states.shape[:3]:
        raise ValueError(
            f"value_states: [B, Hkv, q] = {list(key_states.shape[:3])} expected as in key_states, "
            f"got {list(value_states.shape[:3])}"
        )
    raise ValueError(
        f"key_states: at least one row and one new token expected, got {list(key_states.shape)}"
    )
