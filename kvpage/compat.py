"""What differs between transformers versions. Supported: >=5.4,<6."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

CACHE_ARGUMENTS = ("cache", "past_key_values")
"""Names of the cache argument: `past_key_values` up to 5.23, `cache` since 5.24."""


def cache_argument(arguments: Mapping[str, Any]) -> Any:
    """The cache among the keyword arguments of a module's call, under either name; else `None`."""
    for name in CACHE_ARGUMENTS:
        cache = arguments.get(name)
        if cache is not None:
            return cache
    return None


def query_length(query: int | torch.Tensor) -> int:
    """`get_mask_sizes` takes the number of new tokens; before 5.4 it took their positions."""
    return query if isinstance(query, int) else int(query.shape[0])
