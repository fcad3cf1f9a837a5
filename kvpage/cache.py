"""PagedCompactCache: a transformers cache of any trace length in a fixed amount of KV memory."""

from __future__ import annotations

import operator
from collections.abc import Callable
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvpage.calibration import CalibratedStatistics
from kvpage.compat import tokens_to_remove as number_to_remove
from kvpage.compat import warn_if_untested
from kvpage.core import PagedCore
from kvpage.layer import SlidingLayer
from kvpage.priors import priors_of, summary
from kvpage.report import Report, report_on
from kvpage.scorers import resolve_scorer
from kvpage.settings import PinPrompt, Settings
from kvpage.summaries import Statistics
from kvpage.usage import Usage


class PagedCompactCache(PagedCore, Cache):
    """KV cache in blocks that evicts by geometry and compacts, so that whole blocks come free.

    ``model.generate(**inputs, past_key_values=PagedCompactCache())`` needs nothing else: the cache
    hooks the first model it is used with, and leaves it when it dies. Also as ``cache=`` and in
    ``model(...)``. Greedy output equals `DynamicCache`'s while the budget does not bind; then each
    query attends to exactly the live tokens.

    Args:
        model: hook this model now, rather than the first that is called with the cache.
        budget: live tokens per row and KV head that compaction leaves in layers of full attention;
            `None` never evicts. Layers with a sliding window keep their window, layers with a
            recurrent state their state.
        interval: tokens appended between two compactions; a row holds at most
            `budget + interval` tokens once its prompt was compacted.
        block_size: tokens per block, the unit of allocation.
        sinks: first tokens of each row that are never evicted.
        recent: latest tokens that are never evicted.
        pin_prompt: never evict the prompt (what was seen before the first one-token forward):
            `"auto"` does so when it takes at most half the budget and leaves a block of
            candidates beside the recent tokens; `True` raises when it does not fit.
        scorer: `"sampled"`, `"centroid"`, `"streaming"`, `"knorm"`, `"random"`, `"keydiff"`,
            `"expected_attention"`, `"redundancy"`, `"window"` (see their classes), or a callable
            of `LiveTokens` that returns scores `[B, Hkv or H, L]`.
        stats: statistics of the model that `kvpage.calibrate` made, or the file they are in; `None`
            takes the run's own alone.
        online: with `stats`, whether the run's own queries count too: more, the more there are.
        trace: keep, in `cache.trace`, which token positions each compaction left.
        backend: what reads the blocks in a model with attn_implementation "kvpage": `"triton"`,
            `"reference"` (plain torch), `"flash_attn"`, or `"auto"`: Triton on a GPU.
        static: one-token forwards touch tensors that were there before only, so that a captured
            graph can replay them: see `advance`. Needs attn_implementation "kvpage".

    Raises `TypeError` / `ValueError` naming the argument, what was expected and what was got;
    `ValueError` for a model that is not supported.
    """

    layers: list[Any]

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
        scorer: str | Callable[..., Tensor] = "sampled",
        stats: str | PathLike[str] | CalibratedStatistics | None = None,
        online: bool = True,
        trace: bool = False,
        backend: str = "auto",
        static: bool = False,
    ) -> None:
        settings = Settings(
            budget, interval, block_size, sinks, recent, pin_prompt, trace, backend, static
        )
        resolved, priors = resolve_scorer(scorer), priors_of(stats, online)
        if priors is not None and not resolved.needs_statistics:
            raise ValueError(f"stats: a scorer that uses them expected, got scorer={scorer!r}")
        if priors is not None and model is not None:
            priors.check(model)
        warn_if_untested()
        Cache.__init__(self, layers=[])
        self.scorer_name = scorer if isinstance(scorer, str) else _name_of(scorer)
        self._set_up(settings, resolved, model, priors)

    # What transformers calls, beside `PagedCore.update`.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Seen tokens per row, evicted ones included: the next token's position follows them."""
        return self.ledger.seen

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """`(live + q, seen - live)` as they will be after a compaction due in this forward."""
        layer = self.layers[layer_idx] if layer_idx < len(self.layers) else None
        if isinstance(layer, SlidingLayer):
            return layer.get_mask_sizes(query_length)
        kept = self._forwards.kept(query_length)
        return kept + query_length, self.ledger.seen - kept

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
        self._stack.clear()
        self._forwards.clear()
        self._decoding.clear()
        self._start()

    def activate_past_recording(self) -> None:
        """Forwards may end in drafts from now on: what `crop` leaves of them is there to stay."""
        self._forwards.records = True
        for state in self._stack.states:
            state.activate_past_recording()

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether `activate_past_recording` was called."""
        return self._forwards.records

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Forget the last `-tokens_to_remove` tokens of every row and commit those before them.

        Before transformers 5.15 a positive number is the length to keep. Raises `ValueError` when
        some of them were compacted since, and nothing changes.
        """
        try:
            argument = operator.index(tokens_to_remove)
        except TypeError:
            raise TypeError(
                f"tokens_to_remove: an integer expected, got {tokens_to_remove!r}"
            ) from None
        self._check_complete()
        count = number_to_remove(argument, self.ledger.seen)
        self._crop(count)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row `i` continues from row `beam_idx[i]`; blocks are shared until they are written."""
        self._select_rows("beam_idx", beam_idx, same_number=True)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`, int64 or a bool mask."""
        self._select_rows("indices", indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times, one after the other; blocks are shared until written."""
        if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
            raise ValueError(f"repeats: a positive integer expected, got {repeats!r}")
        rows = torch.arange(self.ledger.batch_size).repeat_interleave(repeats)
        self._select_rows("repeats", rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCompactCache:
        (twin,) = self.fork(1)
        memo[id(self)] = twin
        return twin

    # What users call.

    def fork(self, n: int) -> list[PagedCompactCache]:
        """`n` caches that continue from here, each on its own.

        They share this cache's blocks, by reference count; a block is copied when one of them
        writes to it. What only one holds comes free when it dies or is reset. Caches that share
        blocks belong to one thread.
        """
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f"n: a positive integer expected, got {n!r}")
        self._check_complete()
        self._commit()
        return [self._fork() for _ in range(n)]

    def advance(self) -> None:
        """Account for a one-token forward that a captured graph is about to replay.

        The graph writes and attends; this counts the token, and compacts when that is due. Capture
        a one-token forward, without a mask, that follows another; capturing counts as a forward, so
        the first replay needs no `advance`. Raises `RuntimeError` where what was captured can't go
        on: nothing was, or the cache was reset, its rows changed or its blocks shared since.
        """
        forward = self._forwards.current
        if not self.settings.static or forward is None or not self._decoding.over_blocks:
            raise RuntimeError("advance: a one-token forward with static=True expected before it")
        if not all(ledger.stays for ledger in self._stack.ledgers):
            raise RuntimeError(
                "advance: rows with blocks of their own expected; after a fork, beams or a new "
                "order of rows, run the model until a compaction, and capture again"
            )
        self._advance()

    def pin(self, start: int, stop: int) -> None:
        """Never evict the tokens at positions `[start, stop)` of every row that are still live.

        Raises `ValueError` when the pinned, recent and sink tokens would leave no room in the
        budget for a block of others.
        """
        self._forwards.pin(start, stop)

    def statistics(self, layer_idx: int) -> Statistics:
        """Queries and keys before RoPE seen so far at `layer_idx`, per row and head.

        Raises `IndexError` for a layer there is not, `ValueError` when nothing was collected: the
        layer has seen nothing, is none of full attention, or the scorer needs no statistics.
        """
        layer = self.layers[layer_idx]
        if layer not in self._stack.ranked:
            raise ValueError(f"layer_idx: a layer of full attention expected, got {layer_idx}")
        layer.check_statistics()
        assert layer.statistics is not None
        return layer.statistics.read()

    @property
    def full_layers(self) -> list[int]:
        """Indices of the layers of full attention, which the budget is for; none while empty."""
        return [layer.index for layer in self._stack.ranked]

    def live_positions(self, layer_idx: int) -> Tensor:
        """int64 `[B, Hkv, live]`: positions of the tokens that live at `layer_idx`, pads -1.

        Raises `ValueError` for an empty cache or a layer that is none of full attention.
        """
        layer = self._stack.by_index.get(layer_idx)
        if self.ledger.seen == 0:
            raise ValueError("cache: one with tokens in it expected, nothing was cached yet")
        if layer is None or layer.is_sliding or layer.storage is None:
            known = self.full_layers
            raise ValueError(f"layer_idx: a layer of full attention ({known}), got {layer_idx}")
        self._check_complete()
        device = layer.storage.keys.device
        return layer.positions(self._forwards.positions.appended(device)).long()

    def usage(self) -> Usage:
        """The numbers of `report()` that change with every token, at little cost."""
        return self._gauge.read()

    def report(self) -> Report:
        """What happened so far; nothing is counted for it while decoding."""
        return report_on(
            self._meeting.name,
            self.scorer_name,
            self.settings,
            self._stack,
            self._forwards.positions,
            self._bytes_peak,
            self._forwards.prompt_is_pinned(),
            None if self.priors is None else summary(self.priors.drifts(self._stack.ranked)),
        )

    def __repr__(self) -> str:
        ledger = self._stack.shown
        backends = "".join(f"attention={name}, " for name in self._decoding.backends.values())
        return (
            f"PagedCompactCache({self._meeting.name or 'no model yet'}, "
            f"scorer={self.scorer_name}, {backends}budget={self.settings.budget}, "
            f"interval={self.settings.interval}, block_size={self.settings.block_size}: "
            f"{ledger.seen} seen, {ledger.live} live, {ledger.pool.num_used_blocks} of "
            f"{ledger.pool.num_blocks} blocks used, {ledger.compactions} compactions)"
        )

    def _repr_html_(self) -> str:
        model = self._meeting.name or "no model yet"
        names = model, f"scorer={self.scorer_name}", f"budget={self.settings.budget}"
        return self.usage().html(type(self).__name__, *names)

    def check(self) -> None:
        """Raise `RuntimeError`, with numbers, unless block bookkeeping and tensors agree."""
        self._check_complete()
        self._stack.check()


def _name_of(scorer: Callable[..., Tensor]) -> str:
    return getattr(scorer, "__name__", type(scorer).__name__)
