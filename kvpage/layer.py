"""One layer of the cache: its storage, its statistics, which tokens survived, and how a step acts.

Every layer applies the same `Step` to its own tensors; which tokens survive differs per layer, row
and KV head, how many does not.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvpage.architectures import Rope
from kvpage.centroids import LayerStatistics
from kvpage.compaction import Protection, apply_plan, plan, select
from kvpage.ledger import Ledger, Step
from kvpage.scoring import Scorer
from kvpage.storage import LayerStorage


@dataclass(frozen=True)
class DueCompaction:
    """What every layer's compaction in one forward shares."""

    appended: Tensor
    """int32 `[B or 1, n]`: positions of the tokens appended since the last compaction."""
    next_position: Tensor
    protection: Protection


class PagedLayer(CacheLayerMixin):
    """A layer of a `PagedCompactCache`; lengths live in the ledger that all layers share."""

    is_sliding = False
    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.clear()

    def clear(self) -> None:
        self.storage: LayerStorage | None = None
        self.statistics: LayerStatistics | None = None
        self.survivors: Tensor | None = None
        """int32 `[B, Hkv, kept]`: token positions the last compaction left, in order."""
        self.step_index = 0
        self.compaction_seconds = 0.0

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        return self.storage is not None

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """The live keys `[B, Hkv, live, D]`, or `None` before the first forward."""
        if self.storage is None:
            return None
        return self.storage.read(self.ledger.layout, self.ledger.live)[0]

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """The live values `[B, Hkv, live, Dv]`, or `None` before the first forward."""
        if self.storage is None:
            return None
        return self.storage.read(self.ledger.layout, self.ledger.live)[1]

    @property
    def bytes_statistics(self) -> int:
        return 0 if self.statistics is None else self.statistics.nbytes

    @property
    def batch_size(self) -> int:
        return self.ledger.batch_size or -1

    def check_states(self, keys: Tensor, values: Tensor) -> None:
        """Raise `ValueError` unless `keys` and `values` continue what this layer holds."""
        if self.storage is None:
            return
        for name, new, held in (
            ("key_states", keys, self.storage.keys),
            ("value_states", values, self.storage.values),
        ):
            expected = (held.shape[0], held.shape[3], held.dtype, held.device)
            got = (new.shape[1], new.shape[3], new.dtype, new.device)
            if got != expected:
                raise ValueError(
                    f"{name}: (KV heads, head_dim, dtype, device) {expected} expected as in the "
                    f"tokens already cached, got {got}"
                )

    def apply(
        self, step: Step, due: DueCompaction | None, scorer: Scorer, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compact if due, then append `keys` and `values` `[B, Hkv, q, D]`; return all live."""
        if self.storage is None:
            self.storage = LayerStorage(self.ledger.block_size, keys, values)
        if due is not None:
            started = time.perf_counter()
            self._compact(step, due, scorer)
            self.compaction_seconds += time.perf_counter() - started
        elif step.fresh:
            self.storage.relocate(step.num_blocks, step.relocations or ())
        self.storage.copy_blocks(step.copies)
        everything = self.storage.append(step, keys, values)
        self.step_index = step.index
        return (keys, values) if step.kept == 0 else everything

    def check_statistics(self) -> None:
        """Raise `ValueError` unless queries of this layer were seen."""
        if self.statistics is None:
            raise ValueError(
                "no queries were seen: the scorer needs them; use the cache with a model, or "
                "choose scorer='streaming', 'knorm' or 'random'"
            )

    def collect(
        self, queries: Tensor | None, keys: Tensor | None, real: Tensor | None, rope: Rope
    ) -> None:
        """Add `queries` and `keys` `[B, q, heads * D]`, flat or split, to the statistics."""
        if queries is None or keys is None:
            raise RuntimeError("the queries or keys of this layer did not pass kvpage's hooks")
        if self.statistics is None:
            assert self.storage is not None
            kv_heads, _, _, dim = self.storage.keys.shape
            heads = queries[0, 0].numel() // dim
            self.statistics = LayerStatistics(queries.shape[0], heads, kv_heads, dim, rope)
        self.statistics.add(queries, keys, real)

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

    def _compact(self, step: Step, due: DueCompaction, scorer: Scorer) -> None:
        assert self.storage is not None
        statistics = None
        if scorer.needs_statistics and self.statistics is not None:
            statistics = self.statistics.read()
        positions = self.positions(due.appended)
        keys = self.storage.read(step.source, step.live)[0]
        scores = scorer(keys, statistics, due.next_position)
        kept = select(scores, positions, step.kept, due.protection)
        self.survivors = positions.gather(2, kept)
        apply_plan(plan(kept, step.source, step.layout, self.storage), self.storage, step)

    # What `Cache` asks of its layers; the lengths are the ledger's.

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise NotImplementedError("a PagedLayer is filled through PagedCompactCache.update")

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("a PagedLayer is filled through PagedCompactCache.update")

    def get_seq_length(self) -> int:
        return self.ledger.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        kept = self.ledger.kept(query_length)
        return kept + query_length, self.ledger.seen - kept

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        self.clear()
