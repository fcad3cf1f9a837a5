"""One layer of the cache: its storage, its statistics, which tokens survived, and how a step acts.

Every layer applies the same `Step` to its own tensors; which tokens survive differs per layer, row
and KV head, how many does not.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvpage.centroids import LayerStatistics, Vectors
from kvpage.compaction import CompactionPlan, apply_plan, plan
from kvpage.ledger import Ledger, Step
from kvpage.places import Places
from kvpage.rope import RopeSource
from kvpage.scoring import Scorer
from kvpage.storage import LayerStorage, without_autograd
from kvpage.summaries import Prior


class PagedLayer(CacheLayerMixin):
    """A layer of a `PagedCompactCache`; lengths live in the ledger that such layers share."""

    is_sliding = False
    window: int | None = None
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.index = 0
        """Place among the model's layers."""
        self.clear()

    def clear(self) -> None:
        self.storage: LayerStorage | None = None
        self.statistics: LayerStatistics | None = None
        self.survivors: Tensor | None = None
        """int32 `[B, Hkv, kept]`: token positions the last compaction left, in order."""
        self.proposed: Tensor | None = None
        """int64 `[B, Hkv, budget]`: slots that stay if the draft that makes it due is accepted."""
        self._accepted: tuple[torch.Size, torch.Size, torch.dtype, torch.dtype, Any] | None = None
        self.step_index = 0
        self.compaction_seconds = 0.0
        self.rope_check_at = 0
        """Tokens at which the keys are compared with what is assumed of the model's RoPE again."""

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        return self.storage is not None

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """The live keys `[B, Hkv, live, D]`, or `None` before the first forward."""
        return None if self.storage is None else self._read()[0]

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """The live values `[B, Hkv, live, Dv]`, or `None` before the first forward."""
        return None if self.storage is None else self._read()[1]

    @property
    def bytes_reserved(self) -> int:
        return 0 if self.storage is None else self.storage.bytes_reserved

    @property
    def bytes_statistics(self) -> int:
        return 0 if self.statistics is None else self.statistics.nbytes

    @property
    def batch_size(self) -> int:
        return self.ledger.batch_size or -1

    def takes(self, keys: Tensor, values: Tensor) -> bool:
        """Whether `keys` and `values` are like those that `check_states` accepted last."""
        last = self._accepted
        return (
            last is not None
            and keys.shape == last[0]
            and values.shape == last[1]
            and keys.dtype is last[2]
            and values.dtype is last[3]
            and keys.device == last[4]
        )

    def check_states(self, keys: Tensor, values: Tensor) -> None:
        """Raise `ValueError` unless `keys` and `values` continue what this layer holds."""
        if self.storage is None:
            return
        self._accepted = None
        held = self.storage.signature
        if (keys.shape[1::2], keys.dtype, keys.device, values.shape[1::2], values.dtype) == held:
            self._accepted = keys.shape, values.shape, keys.dtype, values.dtype, keys.device
            return
        expected, got = held[:3], (keys.shape[1::2], keys.dtype, keys.device)
        name = "key_states"
        if expected == got:
            name, expected = "value_states", (*held[3:], held[2])
            got = (values.shape[1::2], values.dtype, values.device)
        raise ValueError(
            f"{name}: [KV heads, head_dim], dtype and device {expected} expected as in the tokens "
            f"already cached, got {got}"
        )

    def fork(self, ledger: Ledger) -> PagedLayer:
        """A layer of its own over the same storage, for a forked `ledger`."""
        twin = copy.copy(self)
        twin.ledger = ledger
        twin.statistics = None if self.statistics is None else self.statistics.fork()
        return twin

    def apply(
        self,
        step: Step,
        moves: CompactionPlan | None,
        keys: Tensor,
        values: Tensor,
        places: Places | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compact if due, then append `keys` and `values` `[B, Hkv, q, D]`; return what the new
        tokens attend to.

        moves: of the compaction, if it is due; places: where attention will read them in the
        blocks; what is returned stands for them.
        """
        storage = self.storage
        if storage is not None and storage.holds(step.layout) and not torch.is_grad_enabled():
            self.proposed, self.step_index = None, step.index  # makes nothing that outlives this
            if places is not None:
                return self._append(step, keys, values, places)
            first = 0 if self.window is None else self.first_visible(step.kept)
            return storage.append(step, keys, values, first)
        return self._apply(step, moves, keys, values, places)

    @without_autograd
    def _apply(
        self,
        step: Step,
        moves: CompactionPlan | None,
        keys: Tensor,
        values: Tensor,
        places: Places | None,
    ) -> tuple[Tensor, Tensor]:
        if self.storage is None:
            self.storage = LayerStorage(self.ledger.block_size, keys, values)
        self._prepare(step, moves)
        visible = self._append(step, keys, values, places)
        self.step_index = step.index
        return (keys, values) if step.kept == 0 else visible

    @without_autograd
    def advance(self, step: Step, moves: CompactionPlan | None) -> None:
        """Everything of `step` but to append its tokens."""
        self._prepare(step, moves)
        self.step_index = step.index

    def _append(
        self, step: Step, keys: Tensor, values: Tensor, places: Places | None
    ) -> tuple[Tensor, Tensor]:
        assert self.storage is not None
        if places is None:
            return self.storage.append(step, keys, values, self.first_visible(step.kept))
        return self.storage.write(step.layout, keys, values, places.tables, places.start)

    def _prepare(self, step: Step, moves: CompactionPlan | None) -> None:
        """Compact if due, have the blocks that `step` says, and copy those it says."""
        assert self.storage is not None
        self.proposed = None
        if not step.fresh:
            self.storage.ensure(step.num_blocks)
        if moves is not None:
            started = time.perf_counter()
            apply_plan(moves, self.storage, step)
            self.survivors = moves.positions
            self.compaction_seconds += time.perf_counter() - started
        elif step.fresh:
            self.storage.relocate(step.num_blocks, step.relocations or ())
        self.storage.copy_blocks(step.copies)

    def first_visible(self, kept: int) -> int:
        """The first live token that tokens appended to `kept` live ones attend to."""
        return 0

    def check_statistics(self) -> None:
        """Raise `ValueError` unless queries of this layer were seen."""
        if self.statistics is None:
            raise ValueError(
                "no queries were seen: the scorer needs them; use the cache with a model, or "
                "choose scorer='streaming', 'knorm' or 'random'"
            )

    @without_autograd
    def propose(self, step: Step, survivors: Tensor, positions: Tensor, mask: Tensor) -> None:
        """Note what a compaction at draft `step.mid` leaves, and hide the rest from there on.

        survivors: live slots `[B, Hkv, budget]`; positions: theirs; mask: additive `[B, H, q, L]`
        of this layer's attention, written in place.
        """
        assert step.mid is not None
        self.proposed, self._proposed_positions = survivors, positions
        live = step.kept + step.mid
        dead = torch.ones(*survivors.shape[:2], live, dtype=torch.bool, device=survivors.device)
        dead = dead.scatter(2, survivors, False)
        dead = dead.repeat_interleave(mask.shape[1] // dead.shape[1], dim=1)
        lowest = torch.finfo(mask.dtype).min
        mask[:, :, step.mid :, :live].masked_fill_(dead[:, :, None].to(mask.device), lowest)

    @without_autograd
    def commit(self, step: Step) -> None:
        """Carry out what was proposed: `step` has no new tokens, the drafts that stay follow."""
        assert self.storage is not None and self.proposed is not None
        started = time.perf_counter()
        behind = step.kept - self.proposed.shape[2]
        tail = torch.arange(step.live - behind, step.live, device=self.proposed.device)
        survivors = torch.cat((self.proposed, tail.expand(*self.proposed.shape[:2], -1)), dim=-1)
        if not step.fresh:
            self.storage.ensure(step.num_blocks)
        slots = plan(survivors, step.source, step.layout, self.storage)
        apply_plan(CompactionPlan(*slots), self.storage, step)
        self.survivors, self.proposed = self._proposed_positions, None
        self.compaction_seconds += time.perf_counter() - started

    def collector(
        self,
        vectors: Vectors,
        rope: RopeSource,
        scorer: Scorer,
        scale: float = 1.0,
        prior: Prior | None = None,
    ) -> LayerStatistics:
        """The statistics of this layer, for vectors such as these to be added to, with what the
        scorer wants of them and what is known from before."""
        if self.statistics is None:
            assert self.storage is not None
            kv_heads, _, _, dim = self.storage.keys.shape
            batch, heads = vectors.queries.shape[0], vectors.queries[0, 0].numel() // dim
            self.statistics = LayerStatistics(
                batch,
                heads,
                kv_heads,
                dim,
                rope,
                scale=scale,
                sample_tokens=getattr(scorer, "sample_tokens", 0),
                recent_tokens=getattr(scorer, "recent_tokens", 0),
                prior=prior,
            )
        return self.statistics

    def select_rows(self, rows: Tensor) -> None:
        """Row `i` becomes a copy of row `rows[i]`; the blocks are the ledger's business."""
        if self.survivors is not None:
            self.survivors = self.survivors[rows.to(self.survivors.device)]
        if self.statistics is not None:
            self.statistics.select_rows(rows)

    def positions(self, appended: Tensor) -> Tensor:
        """int32 `[B, Hkv, live]`: the token positions in the live slots.

        appended: int32 `[B or 1, n]`, of the tokens appended since the last compaction.
        """
        assert self.storage is not None
        kv_heads = self.storage.keys.shape[0]
        appended = appended.to(self.storage.keys.device)[:, None]
        appended = appended.expand(self.ledger.batch_size, kv_heads, -1)
        if self.survivors is None:
            return appended
        return torch.cat((self.survivors, appended), dim=-1)

    @without_autograd
    def _read(self) -> tuple[Tensor, Tensor]:
        assert self.storage is not None
        live = self.ledger.live
        return self.storage.read(self.ledger.layout, live, self.first_visible(live))

    # What `Cache` asks of its layers; the lengths are the ledger's.

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise NotImplementedError("a PagedLayer is filled through PagedCompactCache.update")

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("a PagedLayer is filled through PagedCompactCache.update")

    def get_seq_length(self) -> int:
        return self.ledger.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        kept = self.ledger.kept(query_length)
        visible = kept - self.first_visible(kept)
        return visible + query_length, self.ledger.seen - visible

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        self.clear()


class SlidingLayer(PagedLayer):
    """A layer whose queries look at the last `window` tokens, their own included.

    What left the window is forgotten in order of age, so nothing is ranked: "compacting" slides the
    last `window - 1` tokens forward, once per interval, and the blocks behind them come free.
    """

    is_sliding = True

    def __init__(self, ledger: Ledger, window: int) -> None:
        super().__init__(ledger)
        self.window: int = window

    def first_visible(self, kept: int) -> int:
        return max(0, kept - self.window + 1)
