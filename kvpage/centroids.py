"""Statistics of queries and keys before RoPE: where their clusters lie, per head and band.

A centroid is the mean of a head's pre-RoPE vectors; with the mean magnitude of each band it gives
the mean resultant length `R_f = |E[q_f]| / E|q_f|`, one when the head always looks the same way.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpage.architectures import Rope

FOLD_TOKENS = 128
"""Vectors of at most this many tokens wait, unsummed, so that a decode step costs no arithmetic."""


def band_magnitude(vectors: Tensor, bands: int) -> Tensor:
    """Magnitude `[..., F]` of each rotated pair of `vectors` `[..., D]` in the half layout."""
    return torch.hypot(vectors[..., :bands], vectors[..., bands : 2 * bands])


class RunningMoments:
    """Running mean and mean band magnitude of pre-RoPE vectors, per row and head.

    Sums are float64 (float32 where the device has no float64), counts exclude pads.
    """

    def __init__(self, batch: int, heads: int, dim: int, bands: int, device: torch.device) -> None:
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self.bands = bands
        self.total = torch.zeros(batch, heads, dim, dtype=dtype, device=device)
        self.magnitude_total = torch.zeros(batch, heads, bands, dtype=dtype, device=device)

    def add(self, vectors: Tensor, real: Tensor | None) -> None:
        """Add `vectors` `[B, n, H, D]`; `real` `[B, n]` bool is False for pads."""
        for part, flags in zip(
            vectors.split(FOLD_TOKENS, dim=1),
            [None] * vectors.shape[1] if real is None else real.split(FOLD_TOKENS, dim=1),
            strict=False,
        ):
            part = part.float()
            if flags is not None:
                part = torch.where(flags[:, :, None, None], part, 0.0)
            self.total += part.sum(dim=1)
            self.magnitude_total += band_magnitude(part, self.bands).sum(dim=1)

    def select_rows(self, rows: Tensor) -> None:
        self.total = self.total[rows]
        self.magnitude_total = self.magnitude_total[rows]


@dataclass(frozen=True)
class Statistics:
    """What a scorer knows of a layer, besides the keys. Means are float32.

    query_mean: `[B, H, D]`; query_magnitude: `[B, H, F]` mean of the band magnitudes;
    key_mean: `[B, Hkv, D]`; key_magnitude: `[B, Hkv, F]`; count: `[B]`, tokens behind them.
    """

    query_mean: Tensor
    query_magnitude: Tensor
    key_mean: Tensor
    key_magnitude: Tensor
    count: Tensor
    rope: Rope

    @property
    def query_concentration(self) -> Tensor:
        """Mean resultant length `R_f` `[B, H, F]` in [0, 1] of each query head and band."""
        mean = band_magnitude(self.query_mean, self.rope.bands)
        return mean / self.query_magnitude.clamp_min(torch.finfo(torch.float32).tiny)


class LayerStatistics:
    """Collects the queries and keys of one layer, before RoPE, as the run goes."""

    def __init__(self, batch: int, heads: int, kv_heads: int, dim: int, rope: Rope) -> None:
        self.batch, self.heads, self.kv_heads = batch, heads, kv_heads
        self.dim, self.rope = dim, rope
        self._queries: RunningMoments | None = None
        self._keys: RunningMoments | None = None
        self._count: Tensor | None = None
        self._waiting: list[tuple[Tensor, Tensor, Tensor | None]] = []
        self._waiting_tokens = 0

    def add(self, queries: Tensor, keys: Tensor, real: Tensor | None) -> None:
        """Take `queries` `[B, n, H * D]` and `keys` `[B, n, Hkv * D]` (heads split or flat).

        real: `[B, n]` bool, False for pads; `None` when no token is a pad.
        """
        self._waiting.append((queries.detach(), keys.detach(), real))
        self._waiting_tokens += queries.shape[1]
        if self._waiting_tokens >= FOLD_TOKENS:
            self._fold()

    def read(self) -> Statistics:
        """The statistics of everything added so far; at least one token was."""
        self._fold()
        assert self._queries is not None and self._keys is not None and self._count is not None
        count = self._count.clamp_min(1)[:, None, None]
        return Statistics(
            (self._queries.total / count).float(),
            (self._queries.magnitude_total / count).float(),
            (self._keys.total / count).float(),
            (self._keys.magnitude_total / count).float(),
            self._count,
            self.rope,
        )

    def select_rows(self, rows: Tensor) -> None:
        """Row `i` continues from what row `rows[i]` has collected."""
        self._fold()
        for moments in (self._queries, self._keys):
            if moments is not None:
                moments.select_rows(rows)
        if self._count is not None:
            self._count = self._count[rows]

    @property
    def nbytes(self) -> int:
        tensors = [t for waiting in self._waiting for t in waiting[:2]]
        for moments in (self._queries, self._keys):
            if moments is not None:
                tensors += [moments.total, moments.magnitude_total]
        return sum(t.nbytes for t in tensors)

    def _fold(self) -> None:
        if not self._waiting:
            return
        waiting, self._waiting, self._waiting_tokens = self._waiting, [], 0
        runs: list[list[tuple[Tensor, Tensor, Tensor | None]]] = [[]]
        for entry in waiting:
            if runs[-1] and (runs[-1][-1][2] is None) != (entry[2] is None):
                runs.append([])
            runs[-1].append(entry)
        for run in runs:
            queries, keys, flags = zip(*run, strict=True)
            real = None if flags[0] is None else torch.cat(flags, dim=1)
            self._sum(torch.cat(queries, dim=1), torch.cat(keys, dim=1), real)

    def _sum(self, queries: Tensor, keys: Tensor, real: Tensor | None) -> None:
        batch, tokens = queries.shape[:2]
        device = queries.device
        if self._queries is None or self._keys is None or self._count is None:
            shape = (self.dim, self.rope.bands, device)
            self._queries = RunningMoments(self.batch, self.heads, *shape)
            self._keys = RunningMoments(self.batch, self.kv_heads, *shape)
            self._count = torch.zeros(self.batch, dtype=torch.int64, device=device)
        if real is not None:
            real = real.to(device)
        self._queries.add(queries.view(batch, tokens, self.heads, self.dim), real)
        self._keys.add(keys.view(batch, tokens, self.kv_heads, self.dim), real)
        self._count = self._count + (tokens if real is None else real.sum(dim=1))
