"""Estimates from samples: confidence intervals and pass@k."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

Interval = tuple[float, float]


def bootstrap_interval(
    blocks: Sequence[tuple[float, int]], resamples: int = 2000, seed: int = 0
) -> Interval | None:
    """95 % interval of the mean over all positions, from `(sum, count)` of each block of them.

    Blocks, rather than positions, are drawn with replacement, as neighbours are not independent
    (block bootstrap; Künsch 1989). `None` with fewer than two blocks.
    """
    if len(blocks) < 2:
        return None
    sums, counts = torch.tensor(blocks, dtype=torch.float64).T
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(blocks), (resamples, len(blocks)), generator=generator)
    means = sums[drawn].sum(dim=1) / counts[drawn].sum(dim=1)
    low, high = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high


def wilson_interval(successes: float, count: int) -> Interval | None:
    """95 % interval of a share of `count` independent trials (Wilson 1927); `None` without any."""
    if count == 0:
        return None
    z, share = 1.959963984540054, successes / count
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    spread = z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    spread /= 1 + z**2 / count
    low = 0.0 if successes == 0 else middle - spread
    return low, 1.0 if successes == count else middle + spread


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Chance that one of `k` of the samples drawn without replacement is correct.

    `1 - C(n - c, k) / C(n, k)`, the unbiased estimator of Chen et al. 2021 (arXiv 2107.03374).
    Raises `ValueError` unless `0 <= correct <= samples` and `1 <= k <= samples`.
    """
    if not (0 <= correct <= samples and 1 <= k <= samples):
        raise ValueError(
            f"pass_at_k: 0 <= correct <= samples and 1 <= k <= samples expected, got {samples=}, "
            f"{correct=}, {k=}"
        )
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)
