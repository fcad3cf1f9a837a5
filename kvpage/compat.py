"""What differs between transformers versions. Supported: >=5.4,<6."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import transformers

F = TypeVar("F", bound=Callable[..., Any])

RELEASE = tuple(int(part) for part in transformers.__version__.split(".")[:2])

CACHE_ARGUMENTS = ("cache", "past_key_values")
"""Names of the cache argument: `past_key_values` up to 5.23, `cache` since 5.24."""


def cache_argument(arguments: Mapping[str, Any]) -> Any:
    """The cache among the keyword arguments of a module's call, under either name; else `None`."""
    for name in CACHE_ARGUMENTS:
        cache = arguments.get(name)
        if cache is not None:
            return cache
    return None


def tokens_to_remove(argument: int, seen: int) -> int:
    """How many tokens `crop(argument)` removes from `seen`.

    Since 5.15 the argument is the number to remove, negative; before, it was the length to keep,
    or the number to remove when negative. Raises `ValueError` for a positive one since 5.15.
    """
    if argument < 0:
        return -argument
    if RELEASE < (5, 15):
        return max(0, seen - argument)
    if argument > 0:
        raise ValueError(f"tokens_to_remove: zero or a negative number expected, got {argument}")
    return 0


def not_compiled(function: F) -> F:
    """Keep `torch.compile` out of `function`: a compiled model breaks its graph there."""
    return torch.compiler.disable(function)
