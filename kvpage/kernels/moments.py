"""What a z-score of each head's scores needs."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Moments(NamedTuple):
    """Over the candidates of each query head, `[B, H]`; without any: 0, 0, inf and -inf."""

    mean: Tensor
    deviation: Tensor
    """Root of the mean squared deviation."""
    lowest: Tensor
    highest: Tensor
