"""PagedCompactCache: a transformers cache of any trace length in a fixed amount of KV memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvpage.centroids import Statistics
from kvpage.compat import query_length as length_of
from kvpage.forwards import Forward, Forwards
from kvpage.hooks import Attachment, Call, HookedCache, ModelKey, Watcher, join, take_call
from kvpage.layer import PagedLayer
from kvpage.ledger import Ledger
from kvpage.report import Report, blocks_held_in_place
from kvpage.scoring import resolve_scorer
from kvpage.settings import PinPrompt, Settings


@dataclass
class TracedCompaction:
    """Which tokens one compaction left: kept when a cache is made with `trace=True`."""

    seen_tokens: int
    """Tokens each row had seen when it ran."""
    positions: list[Tensor] = field(default_factory=list)
    """Per layer, int32 `[B, Hkv, kept]` on the CPU: token positions that live on, pads -1."""


class PagedCompactCache(HookedCache, Cache):
    """KV cache in blocks that evicts by geometry and compacts, so that whole blocks come free.

    ``model.generate(**inputs, past_key_values=PagedCompactCache())`` needs nothing else: the cache
    hooks the first model it is used with, and leaves it when it dies. Also as ``cache=`` and in
    ``model(...)``. Greedy output equals `DynamicCache`'s while the budget does not bind; then each
    query attends to exactly the live tokens.

    Args:
        model: hook this model now, rather than the first that is called with the cache.
        budget: live tokens per row and KV head that a compaction leaves; `None` never evicts.
        interval: tokens appended between two compactions; a row holds at most
            `budget + interval` tokens once its prompt was compacted.
        block_size: tokens per block, the unit of allocation.
        sinks: first tokens of each row that are never evicted.
        recent: latest tokens that are never evicted.
        pin_prompt: never evict the prompt (what was seen before the first one-token forward):
            `"auto"` does so when it takes at most half the budget and leaves a block of
            candidates beside the recent tokens; `True` raises when it does not fit.
        scorer: `"centroid"`, `"streaming"`, `"knorm"`, `"random"`, or a callable
            `(keys [B, Hkv, L, D], statistics, next_position [B]) -> scores [B, Hkv or H, L]`.
        trace: keep, in `cache.trace`, which token positions each compaction left.

    Raises `TypeError` / `ValueError` naming the argument, what was expected and what was got;
    `ValueError` for a model that is not supported.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        budget: int | None = 2048,
        interval: int = 128,
        block_size: int = 16,
        sinks: int = 4,
        recent: int = 128,
        pin_prompt: PinPrompt = "auto",
        scorer: str | Callable[..., Tensor] = "centroid",
        trace: bool = False,
    ) -> None:
        self.settings = Settings(budget, interval, block_size, sinks, recent, pin_prompt, trace)
        self.scorer = resolve_scorer(scorer)
        self.scorer_name = scorer if isinstance(scorer, str) else _name_of(scorer)
        super().__init__(layers=[])
        self.layers: list[PagedLayer]  # type: ignore[assignment]
        self.ledger = Ledger(budget, interval, block_size)
        self._forwards = Forwards(self.settings, self.ledger)
        self._rope_checked = False
        self._attachment: Attachment | None = None
        self._watcher: Watcher | None = None
        if model is None:
            self._watcher = Watcher(self)
        else:
            self._attachment = join(model, self)
        self._clear()

    def _clear(self) -> None:
        self.trace: list[TracedCompaction] | None = [] if self.settings.trace else None
        self._bytes_peak = 0

    # What transformers calls.

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append `key_states` and `value_states` `[B, Hkv, q, D]`; return all live ones.

        The first layer of a forward decides what the forward does; every layer compacts, if that
        is due, before it appends. Raises `ValueError`, with nothing changed, when the states do
        not continue what is cached, `RuntimeError` when an earlier forward stopped half-way.
        """
        call = take_call(self, layer_idx)
        self._check_caller(call)
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
        if call is not None and self.scorer.needs_statistics:
            layer.collect(call.queries, call.keys, forward.real, self._key.rope)
        if forward.due is not None and self.trace is not None and layer.survivors is not None:
            self.trace[-1].positions.append(layer.survivors.cpu())
        if forward.step.fresh:
            self._bytes_peak = max(self._bytes_peak, self._bytes_reserved())
        forward.applied += 1
        return everything

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Seen tokens per row, evicted ones included: the next token's position follows them."""
        return self.ledger.seen

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int = 0) -> tuple[int, int]:
        """`(live + q, seen - live)` as they will be after a compaction due in this forward."""
        new = length_of(query_length)
        kept = self.ledger.kept(new)
        return kept + new, self.ledger.seen - kept

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no maximum length."""
        return -1

    get_max_cache_shape = get_max_length

    @property
    def batch_size(self) -> int:
        """Rows in the cache; -1 while it is empty."""
        return self.ledger.batch_size or -1

    def reset(self) -> None:
        """Forget every token and give all memory back; the cache stays with its model.

        Always recovers, also from a forward that stopped half-way.
        """
        self.layers.clear()
        self.ledger.clear()
        self._forwards.clear()
        self._clear()

    def crop(self, tokens_to_remove: int) -> NoReturn:
        """Not supported: raises `NotImplementedError` (assisted decoding needs it)."""
        raise NotImplementedError("PagedCompactCache: crop (assisted decoding) is not supported")

    def reorder_cache(self, beam_idx: Tensor) -> NoReturn:
        """Not supported: raises `NotImplementedError` (beam search needs it)."""
        raise NotImplementedError("PagedCompactCache: reordering (beam search) is not supported")

    def batch_repeat_interleave(self, repeats: int) -> NoReturn:
        """Not supported: raises `NotImplementedError`."""
        raise NotImplementedError("PagedCompactCache: batch_repeat_interleave is not supported")

    def batch_select_indices(self, indices: Tensor) -> NoReturn:
        """Not supported: raises `NotImplementedError`."""
        raise NotImplementedError("PagedCompactCache: batch_select_indices is not supported")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise NotImplementedError("PagedCompactCache: copying is not supported")

    # What users call.

    def pin(self, start: int, stop: int) -> None:
        """Never evict the tokens at positions `[start, stop)` of every row that are still live.

        Raises `ValueError` when the pinned, recent and sink tokens would leave no room in the
        budget for a block of others.
        """
        self._forwards.pin(start, stop)

    def statistics(self, layer_idx: int) -> Statistics:
        """Queries and keys before RoPE seen so far at `layer_idx`, per row and head.

        Raises `IndexError` for a layer that has seen nothing, `ValueError` when the scorer needs
        no statistics, so that none are collected.
        """
        layer = self.layers[layer_idx]
        layer.check_statistics()
        assert layer.statistics is not None
        return layer.statistics.read()

    def report(self) -> Report:
        """What happened so far; the counterfactual is worked out here, not while decoding."""
        ledger, settings = self.ledger, self.settings
        live_positions = self._live_positions()
        held = blocks_held_in_place(live_positions, ledger.batch_size, ledger.block_size)
        ever = self._blocks_ever(live_positions)
        reserved = self._bytes_reserved()
        block_bytes = reserved // ledger.pool.num_blocks if ledger.pool.num_blocks else 0
        return Report(
            model="none yet" if self._attachment is None else self._key.name,
            scorer=self.scorer_name,
            budget=settings.budget,
            interval=settings.interval,
            block_size=settings.block_size,
            batch_size=ledger.batch_size,
            seen_tokens=ledger.seen,
            live_tokens=ledger.live,
            blocks_used=ledger.pool.num_used_blocks,
            blocks_free=ledger.pool.num_free_blocks,
            blocks_peak=ledger.blocks_peak,
            blocks_freed=ledger.blocks_freed,
            blocks_freed_without_compaction=max(0, ever - held[0]),
            blocks_freed_without_compaction_per_head=max(0.0, ever - held[1]),
            bytes_reserved=reserved,
            bytes_in_use=block_bytes * ledger.pool.num_used_blocks,
            bytes_peak=self._bytes_peak,
            bytes_statistics=sum(layer.bytes_statistics for layer in self.layers),
            compactions=ledger.compactions,
            compaction_seconds=sum(layer.compaction_seconds for layer in self.layers),
            budget_bound=ledger.compactions > 0,
            prompt_pinned=self._forwards.prompt_is_pinned(),
        )

    def __repr__(self) -> str:
        ledger = self.ledger
        model = "no model yet" if self._attachment is None else self._key.name
        return (
            f"PagedCompactCache({model}, scorer={self.scorer_name}, budget={self.settings.budget}, "
            f"interval={self.settings.interval}, block_size={self.settings.block_size}: "
            f"{ledger.seen} seen, {ledger.live} live, {ledger.pool.num_used_blocks} of "
            f"{ledger.pool.num_blocks} blocks used, {ledger.compactions} compactions)"
        )

    def check(self) -> None:
        """Raise `RuntimeError`, with numbers, unless block bookkeeping and tensors agree."""
        self._check_complete()
        self.ledger.check()
        for index, layer in enumerate(self.layers):
            held = layer.storage.keys.shape[1] if layer.storage else 0
            total = self.ledger.pool.num_blocks
            if held != total:
                raise RuntimeError(f"layer {index} stores {held} blocks, the pool has {total}")

    # What the hooks call.

    def meet(self, key: ModelKey) -> None:
        if self._attachment is None:
            if self.layers and len(self.layers) != key.num_layers:
                raise ValueError(
                    f"cache: filled with {len(self.layers)} layers, {key.name} has {key.num_layers}"
                )
            assert self._watcher is not None
            self._attachment = self._watcher.stop(key)
            self._watcher = None
        elif self._attachment.key is not key:
            raise ValueError(
                f"cache: belongs to the {self._key.name} it was first used with, offered to "
                f"another {key.name}; a cache serves one model, make a new one"
            )

    def announce(self, num_new: int, mask: Tensor | None) -> None:
        self._check_complete()
        self._check_statistics(num_new)
        self._forwards.announce(num_new, mask)

    def is_announced(self) -> bool:
        return self._forwards.announced is not None

    def see_positions(self, cos: Tensor, sin: Tensor, position_ids: Tensor | None) -> None:
        if position_ids is None:
            return
        if not self._rope_checked and (self.ledger.seen > 0 or position_ids.shape[1] > 1):
            self._key.rope.check(cos, sin, position_ids)
            self._rope_checked = True
        self._forwards.see_positions(position_ids)

    # One forward.

    @property
    def _key(self) -> ModelKey:
        assert self._attachment is not None
        return self._attachment.key

    def _layer(self, layer_idx: int) -> PagedLayer:
        if layer_idx < len(self.layers):
            return self.layers[layer_idx]
        limit = len(self.layers) + 1 if self.ledger.steps <= 1 else len(self.layers)
        if self._attachment is not None:
            limit = min(limit, self._key.num_layers)
        if layer_idx >= limit:
            raise ValueError(f"layer_idx: below {limit} expected, got {layer_idx}")
        return PagedLayer(self.ledger)

    def _begin(self, batch: int, num_new: int) -> Forward:
        if self._watcher is not None and self._watcher.refusal is not None:
            raise self._watcher.refusal
        self._check_complete()
        self._check_statistics(num_new)
        forward = self._forwards.begin(batch, num_new)
        if forward.due is not None and self.trace is not None:
            self.trace.append(TracedCompaction(forward.step.seen))
        return forward

    def _check_caller(self, call: Call | None) -> None:
        """Raise unless the update comes from the cache's own model, through its hooks."""
        if self._attachment is None or call is not None:
            return
        if not self._attachment.handles:
            raise RuntimeError(f"kvpage was detached from this {self._key.name}; attach it again")
        raise ValueError(
            f"cache: belongs to the {self._key.name} it was first used with; this update came from "
            "elsewhere. A cache serves one model: make a new one"
        )

    def _check_complete(self) -> None:
        layers = len(self.layers) if self._attachment is None else self._key.num_layers
        self._forwards.check_complete(layers)

    def _check_statistics(self, num_new: int) -> None:
        if self.scorer.needs_statistics and self._forwards.is_due(num_new):
            for layer in self.layers:
                layer.check_statistics()

    def _bytes_reserved(self) -> int:
        return sum(layer.storage.bytes_reserved for layer in self.layers if layer.storage)

    def _live_positions(self) -> list[Tensor]:
        if self.ledger.seen == 0:
            return []
        appended = self._forwards.positions.appended(torch.device("cpu"))
        return [layer.positions(appended) for layer in self.layers]

    def _blocks_ever(self, live_positions: list[Tensor]) -> int:
        """Blocks that the tokens of all rows, pads excluded, would have filled in place."""
        if not live_positions:
            return 0
        last = live_positions[0].amax(dim=(1, 2))  # the latest token of a row is always live
        return int((last // self.ledger.block_size + 1).sum())


def _check_states(key_states: Tensor, value_states: Tensor) -> None:
    for name, states in (("key_states", key_states), ("value_states", value_states)):
        if not isinstance(states, Tensor) or states.ndim != 4:
            got = list(states.shape) if isinstance(states, Tensor) else type(states).__name__
            raise ValueError(f"{name}: a tensor [B, Hkv, q, D] expected, got {got}")
    if key_states.shape[:3] != value_states.shape[:3]:
        raise ValueError(
            f"value_states: [B, Hkv, q] = {list(key_states.shape[:3])} expected as in key_states, "
            f"got {list(value_states.shape[:3])}"
        )
    if key_states.shape[2] == 0:
        raise ValueError("key_states: at least one new token expected, got none")


def _name_of(scorer: Callable[..., Tensor]) -> str:
    return getattr(scorer, "__name__", type(scorer).__name__)
