"""Who is compared: a budget and a scorer, and the caches made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from kvpage.cache import PagedCompactCache
from kvpage.footprint import Footprint
from kvpage.layer import PagedLayer
from kvpage.report import Report, bytes_in_block


@dataclass(frozen=True)
class Contender:
    """A cache to be measured. `budget=None` is the full cache.

    options: further arguments of `PagedCompactCache`, `{"interval": 64}`; label: its name in
    tables, by default scorer and budget.
    """

    budget: int | None
    scorer: str | Callable[..., Tensor] = "sampled"
    options: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""

    @classmethod
    def grid(
        cls,
        budgets: Sequence[int | None],
        scorers: Sequence[str | Callable[..., Tensor]] = ("sampled",),
        **options: Any,
    ) -> list[Contender]:
        """Every scorer at every budget, and the full cache, `None` among the budgets, once."""
        bounded = [budget for budget in budgets if budget is not None]
        found = [cls(budget, scorer, options) for budget in bounded for scorer in scorers]
        return [FULL] * (None in budgets) + found

    def check(self, oracle: bool = False) -> None:
        """Raise `ValueError` unless a cache can be made of it.

        oracle: whether the scorer may be `"oracle"`, which only `fidelity` knows.
        """
        scorer = "random" if oracle and self.scorer == "oracle" else self.scorer
        PagedCompactCache(budget=self.budget, scorer=scorer, **self.options).reset()

    @property
    def name(self) -> str:
        """The label, else `"full"`, or `"sampled 512"`."""
        if self.label or self.budget is None:
            return self.label or "full"
        return f"{self.scorer_name} {self.budget}"

    @property
    def scorer_name(self) -> str:
        """The scorer's name; `"-"` for the full cache, which ranks nothing."""
        if self.budget is None:
            return "-"
        return (
            self.scorer
            if isinstance(self.scorer, str)
            else getattr(self.scorer, "__name__", type(self.scorer).__name__)
        )

    @property
    def key(self) -> dict[str, Any]:
        """What results depend on, for a journal; a scorer of one's own goes by its name."""
        return {
            "contender": self.name,
            "budget": self.budget,
            "scorer": self.scorer_name,
            "options": dict(self.options),
            "kv_bytes": "live tokens, per text",  # results of another meaning are none
        }

    def cache(self, model: nn.Module, **options: Any) -> PagedCompactCache:
        """A new, empty cache of it for `model`; `options` are overruled by its own."""
        arguments = {"budget": self.budget, "scorer": self.scorer, **options, **self.options}
        return PagedCompactCache(model, **arguments)

    def costs(self, model: nn.Module, cache: PagedCompactCache, report: Report) -> dict[str, int]:
        """Compactions of `cache`, which has run, and the bytes of one text (a row of the batch).

        kv_bytes: the most that keys and values of live tokens took, in whole blocks; of the full
        cache, what transformers' `DynamicCache` holds. statistics_bytes: what the scorer keeps of
        queries and keys. Not the states of recurrent layers, nor room to grow.
        """
        if self.budget is None:
            kv_bytes, statistics = Footprint.of(model).dynamic_bytes(report.seen_tokens), 0
        else:
            paged = [layer for layer in cache.layers if isinstance(layer, PagedLayer)]
            every = sum(bytes_in_block(layer) * layer.ledger.blocks_peak for layer in paged)
            kv_bytes = every // report.batch_size
            statistics = report.bytes_statistics // report.batch_size
        return {
            "compactions": report.compactions,
            "kv_bytes": kv_bytes,
            "statistics_bytes": statistics,
        }


FULL = Contender(None)
