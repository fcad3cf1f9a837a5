"""Calibrated statistics at work in one cache: what its layers know before the run, and how the run
differs from it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from os import PathLike

import torch
from torch import Tensor, nn

from kvpage.calibration import CalibratedStatistics
from kvpage.layer import PagedLayer
from kvpage.layer_calibration import Drift, LayerCalibration, drift
from kvpage.summaries import Prior

PRIOR_TOKENS = 512
"""Tokens of a run that calibrated statistics count as, where the run's own count too."""


class Priors:
    """The statistics a cache was given."""

    def __init__(self, statistics: CalibratedStatistics, online: bool) -> None:
        """online: whether the run's own queries and keys are blended in."""
        self.statistics, self.online = statistics, online
        self.checked = self._compared = False

    def check(self, model: nn.Module) -> None:
        """Raise `ValueError` unless they are of `model`."""
        self.statistics.check(model)
        self.checked = True

    def of(self, layer_idx: int, device: torch.device, sample_tokens: int) -> Prior | None:
        """What is known of a layer; `ValueError` where a sample is wanted and there is none."""
        known = self.statistics.layer(layer_idx)
        if known is None:
            return None
        if sample_tokens and known.sample is None:
            raise ValueError(
                "stats: sampled queries expected for this scorer, got means alone (as in a file of "
                "TriAttention's); use scorer='centroid', or kvpage.calibrate"
            )
        return _prior(known, self.online, device)

    def drifts(self, layers: Sequence[PagedLayer]) -> list[Drift]:
        """How the run's queries differ, layer by layer, where something is known and was seen."""
        found = []
        for layer in layers:
            known = self.statistics.layer(layer.index)
            if known is not None and layer.statistics is not None:
                found.append(drift(known, layer.statistics.read_own()))
        return found

    def warn(self, layers: Sequence[PagedLayer]) -> None:
        """Warn once where they can't be of this model. Reads the device."""
        if self._compared:
            return
        self._compared = True
        texts = [text for found in self.drifts(layers) if (text := found.warning()) is not None]
        if 2 * len(texts) > len(layers):
            warnings.warn(texts[0], stacklevel=2)


def priors_of(stats: object, online: object) -> Priors | None:
    """From the arguments of a cache: a path, statistics, or `None`."""
    if not isinstance(online, bool):
        raise TypeError(f"online: True or False expected, got {online!r}")
    if stats is None:
        if not online:
            raise ValueError("online: True expected without stats, which leave nothing else to use")
        return None
    if isinstance(stats, str | PathLike):
        stats = CalibratedStatistics.load(stats)
    if not isinstance(stats, CalibratedStatistics):
        raise TypeError(
            f"stats: a path, CalibratedStatistics or None expected, got {type(stats).__name__}"
        )
    return Priors(stats, online)


def summary(drifts: Sequence[Drift]) -> tuple[float, float] | None:
    """Medians over heads and layers: one minus the cosine, and the magnitude ratio."""
    if not drifts:
        return None
    cosine = torch.cat([found.cosine for found in drifts]).nanmedian()
    ratio = torch.cat([found.magnitude_ratio for found in drifts]).nanmedian()
    return 1 - float(cosine), float(ratio)


def _prior(known: LayerCalibration, online: bool, device: torch.device) -> Prior:
    dtype = torch.float32 if device.type == "mps" else torch.float64

    def on_device(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype)

    heads = on_device(known.heads)
    kv_heads = heads.new_full((known.kv_heads,), float(known.key_total is not None))
    weight = min(PRIOR_TOKENS, float(known.count)) if online else 1.0
    keys, sizes = known.key_total, known.key_magnitude_total
    dim, bands = known.query_total.shape[1], known.rope.bands
    blank = heads.new_zeros(known.kv_heads, dim), heads.new_zeros(known.kv_heads, bands)
    return Prior(
        on_device(known.query_total / known.count),
        on_device(known.query_magnitude_total / known.count),
        blank[0] if keys is None else on_device(keys / known.count),
        blank[1] if sizes is None else on_device(sizes / known.count),
        weight * heads,
        weight * kv_heads,
        torch.ones_like(heads) if online else 1 - heads,
        torch.ones_like(kv_heads) if online else 1 - kv_heads,
        None if known.sample is None else known.sample.to(device),
    )
