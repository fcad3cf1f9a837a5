"""Statistics of queries and keys before RoPE: where their clusters lie, per head and band.

A centroid is the mean of a head's pre-RoPE vectors; with the mean magnitude of each band it gives
the mean resultant length `R_f = |E[q_f]| / E|q_f|`, one when the head always looks the same way.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from kvpage.rope import Rope, RopeSource

FOLD_TOKENS = 128
"""Vectors of about this many tokens wait, unsummed, so that a decode step costs no arithmetic."""

SCRATCH_ELEMENTS = {"cpu": 1 << 15}
"""Elements that are summed at a time, so that folding needs little beside the vectors; elsewhere
2**23 (32 MiB), as each time is a dozen launches."""


def tokens_at_a_time(vectors: Tensor) -> int:
    """Of `vectors` `[B, n, ...]`, how many tokens to sum at a time."""
    elements = SCRATCH_ELEMENTS.get(vectors.device.type, 1 << 23)
    return max(1, elements // vectors[:, :1].numel())


@dataclass(frozen=True)
class RunningMoments:
    """Sums of pre-RoPE vectors and of their band magnitudes, per row and head.

    total: `[B, H, D]`; magnitude_total: `[B, H, F]`; float64 (float32 where the device has none);
    pads are not counted. A value: what adds to it makes a new one, so copies of a cache share it.
    """

    total: Tensor
    magnitude_total: Tensor

    @staticmethod
    def zero(batch: int, heads: int, dim: int, bands: int, device: torch.device) -> RunningMoments:
        dtype = torch.float32 if device.type == "mps" else torch.float64
        return RunningMoments(
            torch.zeros(batch, heads, dim, dtype=dtype, device=device),
            torch.zeros(batch, heads, bands, dtype=dtype, device=device),
        )

    def plus(self, vectors: Tensor, real: Tensor | None, rope: Rope) -> RunningMoments:
        """With `vectors` `[B, n, H, D]` added; `real` `[B, n]` bool is False for pads."""
        total, magnitude_total = self.total, self.magnitude_total
        dtype = total.dtype
        chunk = tokens_at_a_time(vectors)
        for start in range(0, vectors.shape[1], chunk):
            part = vectors[:, start : start + chunk].float()
            if real is not None:
                part = torch.where(real[:, start : start + chunk, None, None], part, 0.0)
            total = total + part.sum(dim=1, dtype=dtype)
            magnitude_total = magnitude_total + rope.magnitude(part).sum(dim=1, dtype=dtype)
        return RunningMoments(total, magnitude_total)

    def select_rows(self, rows: Tensor) -> RunningMoments:
        return RunningMoments(self.total[rows], self.magnitude_total[rows])


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
        mean = self.rope.magnitude(self.query_mean)
        return mean / self.query_magnitude.clamp_min(torch.finfo(torch.float32).tiny)


class Vectors(NamedTuple):
    """Pre-RoPE queries and keys of one forward, not summed yet: `[B, n, ...]`, head_dim last."""

    queries: Tensor
    keys: Tensor
    real: Tensor | None
    """bool `[B, n]`, False for pads; `None` when no token is a pad."""

    @property
    def tokens(self) -> int:
        return self.queries.shape[1]

    def part(self, start: int, stop: int) -> Vectors:
        """Tokens `[start, stop)`."""
        real = None if self.real is None else self.real[:, start:stop]
        return Vectors(self.queries[:, start:stop], self.keys[:, start:stop], real)


class LayerStatistics:
    """Collects the queries and keys of one layer, before RoPE, as the run goes.

    The latest tokens wait unsummed: a decode step costs no arithmetic, and `crop` can undo drafts.
    """

    def __init__(self, batch: int, heads: int, kv_heads: int, dim: int, rope: RopeSource) -> None:
        self.heads, self.kv_heads, self.dim, self.rope = heads, kv_heads, dim, rope
        self.batch = batch
        self._queries: RunningMoments | None = None
        self._keys: RunningMoments | None = None
        self._count: Tensor | None = None
        self._waiting: list[Vectors] = []
        self._waiting_tokens = 0
        self._cycle: tuple[Tensor, Tensor] | None = None
        """Queries and keys `[B, FOLD_TOKENS, ...]` of the latest one-token forwards, where these
        must not make tensors of their own."""
        self._held, self._held_until = 0, 0

    def put(self, vectors: Vectors, index: Tensor, at: int) -> None:
        """Take the vectors of a one-token forward without a tensor that outlives it: they go to
        place `index` int64 `[1]`, on the host `at`, of a cycle of `FOLD_TOKENS`."""
        self.hold(at)
        if self._cycle is None:
            queries, keys = (
                part.new_empty(self.batch, FOLD_TOKENS, *part.shape[2:]) for part in vectors[:2]
            )
            self._cycle = queries, keys
        for buffer, token in zip(self._cycle, vectors[:2], strict=True):
            buffer.index_copy_(1, index, token)

    def hold(self, at: int) -> None:
        """Count the vectors that are put to place `at` of the cycle."""
        if self._held == FOLD_TOKENS:
            self._fold()
        self._held, self._held_until = self._held + 1, at + 1

    @property
    def cycle_buffers(self) -> tuple[Tensor, ...]:
        """What `put` writes to, once it has."""
        return self._cycle or ()

    def _empty_cycle(self) -> None:
        """Have what the cycle holds wait with the others."""
        if self._held == 0 or self._cycle is None:
            return
        places = torch.arange(self._held_until - self._held, self._held_until) % FOLD_TOKENS
        queries, keys = (buffer[:, places.to(buffer.device)] for buffer in self._cycle)
        self._waiting.append(Vectors(queries, keys, None))
        self._waiting_tokens += self._held
        self._held = 0

    def add(self, vectors: Vectors) -> None:
        """Take the vectors of a forward; those of the forwards before are there to stay."""
        if self._held:
            self._empty_cycle()
        if self._waiting_tokens >= FOLD_TOKENS:
            self._fold()
        tokens = vectors.tokens
        if tokens > FOLD_TOKENS:
            self._fold()
            self._sum([vectors.part(0, tokens - FOLD_TOKENS)])
            # A slice would keep a whole prompt's vectors in memory for its last tokens.
            vectors = _copied(vectors.part(tokens - FOLD_TOKENS, tokens))
            tokens = FOLD_TOKENS
        self._waiting.append(vectors)
        self._waiting_tokens += tokens

    def crop(self, count: int) -> None:
        """Forget the last `count` tokens, as far as they wait: at least the last 128."""
        self._empty_cycle()
        while count > 0 and self._waiting:
            last = self._waiting.pop()
            undone = min(count, last.tokens)
            if undone < last.tokens:
                self._waiting.append(last.part(0, last.tokens - undone))
            self._waiting_tokens -= undone
            count -= undone

    def read(self, more: Vectors | None = None) -> Statistics:
        """The statistics of everything added so far, and of `more`, which is not added."""
        self._fold()
        if more is not None:
            twin = self.fork()
            twin._sum([more])
            return twin.read()
        assert self._queries is not None and self._keys is not None and self._count is not None
        count = self._count.clamp_min(1)[:, None, None]
        return Statistics(
            (self._queries.total / count).float(),
            (self._queries.magnitude_total / count).float(),
            (self._keys.total / count).float(),
            (self._keys.magnitude_total / count).float(),
            self._count,
            self.rope(),
        )

    def fork(self) -> LayerStatistics:
        """Statistics of their own that continue from here."""
        self._empty_cycle()
        twin = copy.copy(self)
        twin._waiting, twin._cycle = list(self._waiting), None
        return twin

    def select_rows(self, rows: Tensor) -> None:
        """Row `i` continues from what row `rows[i]` has collected."""
        self._fold()
        self.batch, self._cycle = rows.shape[0], None
        if self._queries is None or self._keys is None or self._count is None:
            return
        rows = rows.to(self._count.device)
        self._queries, self._keys = self._queries.select_rows(rows), self._keys.select_rows(rows)
        self._count = self._count[rows]

    @property
    def nbytes(self) -> int:
        tensors = [t for vectors in self._waiting for t in (vectors.queries, vectors.keys)]
        tensors += self.cycle_buffers
        for moments in (self._queries, self._keys):
            if moments is not None:
                tensors += [moments.total, moments.magnitude_total]
        return sum(t.nbytes for t in tensors)

    def _fold(self) -> None:
        """Sum what waits, forwards with and without pads apart."""
        self._empty_cycle()
        waiting, self._waiting, self._waiting_tokens = self._waiting, [], 0
        for _, alike in groupby(waiting, key=lambda vectors: vectors.real is None):
            run = list(alike)
            some = tokens_at_a_time(run[0].queries)
            for start in range(0, len(run), some):
                self._sum(run[start : start + some])

    def _sum(self, run: list[Vectors]) -> None:
        queries = _joined([vectors.queries for vectors in run])
        keys = _joined([vectors.keys for vectors in run])
        flags = [vectors.real for vectors in run if vectors.real is not None]
        real = _joined(flags).to(queries.device) if flags else None
        rope = self.rope()
        batch, tokens, device = queries.shape[0], queries.shape[1], queries.device
        if self._queries is None or self._keys is None or self._count is None:
            shape = (self.dim, rope.bands, device)
            self._queries = RunningMoments.zero(self.batch, self.heads, *shape)
            self._keys = RunningMoments.zero(self.batch, self.kv_heads, *shape)
            self._count = torch.zeros(self.batch, dtype=torch.int64, device=device)
        self._queries = self._queries.plus(
            queries.view(batch, tokens, self.heads, self.dim), real, rope
        )
        self._keys = self._keys.plus(keys.view(batch, tokens, self.kv_heads, self.dim), real, rope)
        self._count = self._count + (tokens if real is None else real.sum(dim=1))


def _joined(parts: list[Tensor]) -> Tensor:
    """Concatenated along tokens; a prompt, one large part, is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _copied(vectors: Vectors) -> Vectors:
    return Vectors(vectors.queries.clone(), vectors.keys.clone(), vectors.real)
