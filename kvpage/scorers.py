"""Which scorers there are: by name, or a user's own."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kvpage.peers import (
    ExpectedAttention,
    KeyDifference,
    KeyNorm,
    Random,
    Redundancy,
    Streaming,
    Window,
)
from kvpage.scoring import Centroid, LiveTokens, Sampled, Scorer


class Custom:
    """A user's function of `LiveTokens`, with its result checked."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function
        self.needs_statistics = bool(getattr(function, "needs_statistics", True))
        self.sample_tokens = int(getattr(function, "sample_tokens", 0))
        self.recent_tokens = int(getattr(function, "recent_tokens", 0))

    def __call__(self, tokens: LiveTokens) -> Tensor:
        scores, statistics = self.function(tokens), tokens.statistics
        batch, kv_heads, live, _ = tokens.keys.shape
        if not isinstance(scores, Tensor) or not scores.is_floating_point():
            raise TypeError(f"scorer: a float tensor expected, got {_describe(scores)}")
        heads = kv_heads if statistics is None else statistics.query_mean.shape[1]
        if scores.shape not in ((batch, kv_heads, live), (batch, heads, live)):
            raise ValueError(
                f"scorer: scores [{batch}, {kv_heads} or {heads}, {live}] expected, got "
                f"{list(scores.shape)}"
            )
        if bool(scores.isnan().any()):
            raise ValueError("scorer: scores without NaN expected, got NaN")
        return scores.float()


def _describe(value: object) -> str:
    return f"{value.dtype}" if isinstance(value, Tensor) else type(value).__name__


SCORERS: dict[str, Callable[[], Scorer]] = {
    "sampled": Sampled,
    "centroid": Centroid,
    "streaming": Streaming,
    "knorm": KeyNorm,
    "random": Random,
    "keydiff": KeyDifference,
    "expected_attention": ExpectedAttention,
    "redundancy": Redundancy,
    "window": Window,
}


def resolve_scorer(scorer: str | Callable[..., Tensor]) -> Scorer:
    """The scorer of that name, or the user's own callable, checked on use."""
    if isinstance(scorer, str):
        if scorer not in SCORERS:
            raise ValueError(
                f"scorer: one of {', '.join(map(repr, SCORERS))} or a callable expected, "
                f"got {scorer!r}"
            )
        return SCORERS[scorer]()
    if not callable(scorer) or isinstance(scorer, type):
        raise TypeError(f"scorer: a name or a callable expected, got {scorer!r}")
    return Custom(scorer)
