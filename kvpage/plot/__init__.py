"""Pictures of a cache: each function returns a matplotlib `Figure`, which a notebook shows.

Needs matplotlib, which the extra `plot` brings; pyplot and its settings are left alone.
"""

try:
    import matplotlib  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"kvpage.plot needs matplotlib ({error}): pip install 'kvpage[plot]'"
    ) from error

from kvpage.plot.budgets import budget_curves
from kvpage.plot.distances import DistanceCurves, attention_over_distance, logits_by_distance
from kvpage.plot.geometry import centroids, resultant_lengths
from kvpage.plot.histories import blocks_freed, live_tokens
from kvpage.plot.maps import block_map
from kvpage.plot.style import new_figure
from kvpage.plot.survival import survivors

__all__ = [
    "DistanceCurves",
    "attention_over_distance",
    "block_map",
    "blocks_freed",
    "budget_curves",
    "centroids",
    "live_tokens",
    "logits_by_distance",
    "new_figure",
    "resultant_lengths",
    "survivors",
]
