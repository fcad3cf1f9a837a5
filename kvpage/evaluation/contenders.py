"""Who is compared: a budget and a scorer, and the caches made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from kvpage.cache import PagedCompactCache


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
        }

    def cache(self, model: nn.Module, **options: Any) -> PagedCompactCache:
        """A new, empty cache of it for `model`; `options` are overruled by its own."""
        arguments = {"budget": self.budget, "scorer": self.scorer, **options, **self.options}
        return PagedCompactCache(model, **arguments)


FULL = Contender(None)
