"""Fidelity of kvpage's scorers; compare.py runs this file, in its own environment."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
from peer_runs import Settings, load_model, measure_all, parse, plan
from synthetic import cache_argument
from torch import Tensor
from transformers import Cache, DynamicCache

import kvpage
from kvpage.scorers import SCORERS


def main() -> None:
    args = parse(__doc__.splitlines()[0])
    side = f"kvpage {kvpage.__version__}"
    planned = plan(args, side, args.contenders or list(SCORERS), {})
    if not planned:
        return
    model = load_model(args.model)

    def forward_with(cache: Cache) -> Callable[[Tensor, int], tuple[Tensor, float]]:
        def forward(ids: Tensor, start: int) -> tuple[Tensor, float]:
            logits = model(ids, **{cache_argument(model): cache}).logits[0]
            paged = isinstance(cache, kvpage.PagedCompactCache)
            return logits, float(cache.ledger.live if paged else cache.get_seq_length())

        return forward

    def traced(settings: Settings, measure: Callable[..., dict[str, Any]]) -> dict[str, Any]:
        cache = kvpage.PagedCompactCache(
            model,
            budget=settings.budget,
            interval=settings.interval,
            scorer=settings.contender,
            pin_prompt=False,  # as the presses, which know no prompt
        )
        return measure(forward_with(cache))

    measure_all(planned, args, forward_with(DynamicCache(config=model.config)), traced)


if __name__ == "__main__":
    main()
