"""What a cache does forward by forward, between the hooks, the ledger and the layers."""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from kvpage.attachments import model_of
from kvpage.centroids import LayerStatistics, Vectors
from kvpage.compaction import TracedCompaction
from kvpage.compat import INSTEAD, not_compiled
from kvpage.contract import ROPE_CHECK_TOKENS, HookedCache, ModelKey
from kvpage.decoding import Decoding
from kvpage.device import capturing
from kvpage.forwards import Forward, Forwards
from kvpage.hooks import Call, current_call
from kvpage.layer import PagedLayer
from kvpage.ledger import Ledger
from kvpage.meeting import Meeting
from kvpage.priors import Priors
from kvpage.scoring import Scorer
from kvpage.selection import Selection, propose
from kvpage.settings import Settings
from kvpage.stack import LayerStack
from kvpage.storage import check_states
from kvpage.usage import Gauge

C = TypeVar("C", bound="PagedCore")


class PagedCore(HookedCache):
    """The working parts of a `PagedCompactCache`, which adds what transformers and users call."""

    layers: list[Any]
    """Of every decoder layer: a `PagedLayer`, or a state of transformers' own."""

    def _set_up(
        self, settings: Settings, scorer: Scorer, model: nn.Module | None, priors: Priors | None
    ) -> None:
        self.settings, self.scorer, self.priors = settings, scorer, priors
        self._stack = LayerStack(settings, self.layers)
        self._forwards = Forwards(settings, self._stack)
        self._decoding = Decoding(settings, self._forwards)
        self._meeting = Meeting(self, model)
        self._free_when_dead()
        self._start()

    def _start(self) -> None:
        self._make_layers()
        self._selection = Selection(None, self.scorer, self._stack.paged)
        self.trace: list[TracedCompaction] | None = [] if self.settings.trace else None
        self._bytes_peak, self._gauge = 0, Gauge(self._stack)

    def _make_layers(self) -> None:
        key = self._meeting.key
        if key is not None and not self.layers:
            self._stack.make(key.native_layers())

    def _free_when_dead(self) -> None:
        weakref.finalize(self, self._stack.release).atexit = False

    @property
    def ledger(self) -> Ledger:
        """Lengths and block tables of the layers of full attention."""
        return self._stack.ledger

    # What the hooks call.

    def meet(self, key: ModelKey) -> None:
        self._meeting.meet(key, len(self.layers))
        if self.priors is not None and not self.priors.checked:
            self.priors.check(model_of(key))
        self._make_layers()

    def check_trainable(self) -> None:
        if self.ledger.seen > 0:
            raise RuntimeError(
                f"cache: gradients do not reach the {self.ledger.seen} tokens it holds; train "
                "without it, use torch.no_grad(), or put the model in eval mode"
            )

    def expect(self, drafts: int | None, mask: Tensor | None) -> None:
        if drafts is not None:
            self._forwards.drafts = drafts
        self._forwards.outer_mask = mask

    def announce(
        self,
        num_new: int,
        mask: Tensor | None,
        position_ids: Tensor | None,
        visible: Tensor | None = None,
    ) -> Tensor | None:
        self._check_complete()
        self._commit()
        key = self._meeting.key
        self._decoding.check(key, num_new, masked=mask is not None)
        over_blocks = key is not None and key.attends_over_blocks
        used = self._forwards.announce(num_new, mask, position_ids, visible, over_blocks)
        self._check_statistics(num_new)
        return used

    def is_announced(self) -> bool:
        return self._forwards.announced is not None

    def see_positions(self, position_ids: Tensor) -> None:
        self._forwards.see_positions(position_ids)

    def has_mid(self) -> bool:
        return self._forwards.has_mid()

    def needs_private_mask(self, layer_idx: int) -> bool:
        return self._forwards.has_mid() and not self.layers[layer_idx].is_sliding

    def private_mask(self, layer_idx: int, mask: Tensor | None, hidden: Tensor) -> Tensor:
        key, storage = self._meeting.key, self.layers[layer_idx].storage
        assert key is not None
        if storage is None:
            heads = key.config.num_attention_heads
        else:  # also right where a rank has but some of the heads
            heads = storage.keys.shape[0] * key.groups[layer_idx]
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

    @not_compiled
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append `key_states` and `value_states` `[B, Hkv, q, D]`; return all live ones.

        The first layer of a forward decides what the forward does; every layer compacts, if that
        is due, before it appends. Under attn_implementation "kvpage" what a one-token forward gets
        may stand for the live ones. Raises `ValueError`, with nothing changed, when the states do
        not continue what is cached, `RuntimeError` when an earlier forward stopped half-way.
        """
        call = current_call(self, layer_idx)
        if call is None:
            self._meeting.check_caller()
        layer = self._stack.by_index.get(layer_idx)
        if layer is None:
            layer = self._layer(layer_idx)
        if not layer.takes(key_states, value_states):
            check_states(key_states, value_states)
            layer.check_states(key_states, value_states)
        if call is not None and self.scorer.needs_statistics and not layer.is_sliding:
            self._check_call(layer, layer_idx, call, key_states)
        forward = self._forwards.current
        step = None if forward is None else forward.step_of(layer.is_sliding)
        if forward is None or step is None or layer.step_index == step.index:
            self._decoding.resolve(self._meeting.key, key_states.device)
            forward = self._begin(key_states.shape[0], key_states.shape[2])
            step = forward.step_of(layer.is_sliding)
        if key_states.shape != forward.key_shape or forward.started != forward.applied:
            self._forwards.check_states(forward, key_states)
        if layer_idx == len(self.layers):
            self._stack.add(layer)
        forward.started += 1
        decoding = self._decoding
        places = decoding.places_for(layer, step) if decoding.over_blocks else None
        moves = self._selection.plan_of(layer, step) if step.compacts else None
        visible = layer.apply(step, moves, key_states, value_states, places)
        if decoding.over_blocks:
            decoding.hand_over(layer, layer_idx, places, visible[0])
        if not layer.is_sliding and (call is not None or forward.due is not None):
            self._observe(layer, layer_idx, forward, call)
        if call is not None:
            call.queries = call.keys = call.mask = None
        if step.fresh:
            self._bytes_peak = max(self._bytes_peak, self._stack.bytes_reserved)
        forward.applied += 1
        return visible

    def _layer(self, layer_idx: int) -> PagedLayer:
        limit = len(self.layers)
        if self._meeting.key is None and self.ledger.steps <= 1:
            limit += 1
        return self._stack.layer(layer_idx, limit)

    def _begin(self, batch: int, num_new: int) -> Forward:
        self._check_complete()
        self._check_statistics(num_new)
        forward = self._forwards.begin(batch, num_new)
        self._decoding.begin(self._meeting.key, forward.step, self._stack.paged)
        self._selection = Selection(forward.due, self.scorer, self._stack.paged)
        if forward.due is not None and self.priors:
            self.priors.warn(self._stack.ranked)
        if forward.due is not None and self.trace is not None:
            self.trace.append(TracedCompaction(forward.step.seen))
        return forward

    def _check_call(
        self, layer: PagedLayer, layer_idx: int, call: Call, key_states: Tensor
    ) -> None:
        """Raise unless the hooks saw queries and keys, and the keys turn to what is to be cached.

        The latter at the first forward whose positions tell, and whenever the text has doubled.
        """
        key = self._meeting.key
        assert key is not None
        if call.queries is None or call.keys is None:
            raise RuntimeError(
                f"queries or keys of layer {layer_idx} of {key.name} did not pass kvpage's hooks: "
                f"a module was replaced since (make a new cache), or is never called ({INSTEAD})"
            )
        new = key_states.shape[2]
        if self.ledger.seen + new < layer.rope_check_at or capturing():
            return
        last = min(new, ROPE_CHECK_TOKENS)
        positions = self._forwards.latest_positions(new, last)
        if positions is None or int(positions.max()) <= 0:
            return
        key.check_keys(layer_idx, call.keys, key_states, positions)
        layer.rope_check_at = 2 * (self.ledger.seen + new)

    def _observe(
        self, layer: PagedLayer, layer_idx: int, forward: Forward, call: Call | None
    ) -> None:
        """Note what a layer's compaction left; hide what drafts must not see; collect statistics
        of the queries and keys that the hooks captured."""
        if forward.due is not None:
            self._note(layer)
        vectors, statistics = None, layer.statistics
        if call is not None and self.scorer.needs_statistics:
            assert call.queries is not None and call.keys is not None
            vectors = Vectors(_leaf(call.queries), _leaf(call.keys), forward.real)
            if statistics is None:
                statistics = self._collector(layer, layer_idx, vectors)
        if forward.mid_due is not None:
            assert call is not None and call.mask is not None
            propose(layer, forward.step, forward.mid_due, self.scorer, vectors, call.mask)
        if statistics is not None and vectors is not None:
            if self.settings.static and self._decoding.over_blocks and vectors.real is None:
                places = self._decoding.places_of(layer, forward.step)
                statistics.put(vectors, places.cycle, places.cycle_at)
            else:
                statistics.add(vectors)

    def _collector(self, layer: PagedLayer, layer_idx: int, vectors: Vectors) -> LayerStatistics:
        key, prior, device = self._meeting.key, None, vectors.queries.device
        assert key is not None
        if self.priors is not None:
            prior = self.priors.of(layer_idx, device, getattr(self.scorer, "sample_tokens", 0))
        rope, scale = key.rope(layer_idx), key.scales[layer_idx]
        return layer.collector(vectors, rope, self.scorer, scale, prior)

    def _advance(self) -> None:
        self._check_complete()
        self._decoding.check_captured(self._stack.paged)
        self.announce(1, None, None)
        forward = self._begin(self.ledger.batch_size, 1)
        for layer in self._stack.paged:
            forward.started += 1
            step = forward.step_of(layer.is_sliding)
            layer.advance(step, self._selection.plan_of(layer, step))
            if forward.due is not None and not layer.is_sliding:
                self._note(layer)
            forward.applied += 1
        self._decoding.expect(self._stack.paged, forward)
        for layer in self._stack.ranked:
            if layer.statistics is not None:
                layer.statistics.hold(self._decoding.places_of(layer, forward.step).cycle_at)

    def _commit(self) -> None:
        """Carry out the compaction that became due at a draft which is there to stay."""
        forward = self._forwards.current
        step = self._forwards.commit()
        if step is None or forward is None:
            return
        if self.trace is not None:
            self.trace.append(TracedCompaction(forward.step.seen + (forward.step.mid or 0)))
        ranked = self._stack.ranked
        forward.applied -= len(ranked)
        for layer in ranked:
            layer.commit(step)
            self._note(layer)
            forward.applied += 1
        forward.started = forward.applied

    def _note(self, layer: PagedLayer) -> None:
        if self.trace is not None and layer.survivors is not None:
            self.trace[-1].positions.append(layer.survivors.cpu())

    def _check_complete(self) -> None:
        key = self._meeting.key
        expected = len(self.layers) if key is None else key.num_attention_layers
        self._forwards.check_complete(expected)

    def _check_statistics(self, num_new: int) -> None:
        if self.scorer.needs_statistics and self._forwards.will_compact(num_new):
            for layer in self._stack.ranked:
                if layer.is_initialized:
                    layer.check_statistics()

    # Rows and copies.

    def _crop(self, count: int) -> None:
        most = self._stack.croppable()
        if count > most:
            raise ValueError(
                f"tokens_to_remove: at most {most} can be removed, those appended since the last "
                f"compaction (none where states can't be rolled back), got {count}"
            )
        if count:
            self._forwards.positions.crop(count)
        self._stack.crop(count)
        self._commit()

    def _fork(self: C) -> C:
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._stack = self._stack.fork()
        twin._free_when_dead()
        twin._gauge = Gauge(twin._stack)
        twin.layers = twin._stack.all
        twin._forwards = self._forwards.fork(twin._stack)
        twin._decoding = self._decoding.fork(twin._forwards)
        twin._meeting = self._meeting.fork(twin)
        twin._selection = Selection(None, self.scorer, twin._stack.paged)
        twin.trace = None if self.trace is None else list(self.trace)
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
        self._stack.select_rows(chosen, index)
        self._forwards.positions.select_rows(index)
        if self.trace is not None:
            self.trace = [event.select_rows(index) for event in self.trace]


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.requires_grad else tensor
