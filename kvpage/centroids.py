"""Statistics of queries and keys before RoPE: where their clusters lie, per head and band.

A centroid is the mean of a head's pre-RoPE vectors; with the mean magnitude of each band it gives
the mean resultant length `R_f = |E[q_f]| / E|q_f|`, one when the head always looks the same way.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
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
2**25 (128 MiB), as each time is a dozen launches."""


def tokens_at_a_time(vectors: Tensor) -> int:
    """Of `vectors` `[B, n, ...]`, how many tokens to sum at a time."""
    elements = SCRATCH_ELEMENTS.get(vectors.device.type, 1 << 25)
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
    def of(vectors: Tensor, real: Tensor | None, rope: Rope) -> RunningMoments:
        """Of `vectors` `[B, n, ..., H, D]`: sums `[B, ..., H, D]`; `real` `[B, n]` bool is False
        for pads."""
        dtype = torch.float32 if vectors.device.type == "mps" else torch.float64
        sums, chunk = [], tokens_at_a_time(vectors)
        for start in range(0, vectors.shape[1], chunk):
            part = vectors[:, start : start + chunk].float()
            if real is not None:
                flags = real[:, start : start + chunk]
                part = torch.where(flags[(..., *[None] * (part.ndim - 2))], part, 0.0)
            magnitude = rope.magnitude(part).sum(dim=1, dtype=dtype)
            sums.append(RunningMoments(part.sum(dim=1, dtype=dtype), magnitude))
        return functools.reduce(RunningMoments.plus, sums)

    def plus(self, other: RunningMoments) -> RunningMoments:
        return RunningMoments(
            self.total + other.total, self.magnitude_total + other.magnitude_total
        )


class Sums(NamedTuple):
    """What a layer has summed up: of its queries, its keys, and how many there were.

    totals: `[B, H, D]` or `[B, Hkv, D]`; magnitudes: `[B, H, F]` or `[B, Hkv, F]`; tokens: their
    number, int64 `[B]`. A value, as its parts are.
    """

    query_total: Tensor
    query_magnitude: Tensor
    key_total: Tensor
    key_magnitude: Tensor
    tokens: Tensor

    @staticmethod
    def stacked(layers: Sequence[Sums]) -> Sums:
        """Of several layers, `[layers, B, ...]`."""
        return Sums(*(torch.stack(parts) for parts in zip(*layers, strict=True)))

    def select(self, rows: int | Tensor) -> Sums:
        """Of the rows `rows`, or of one layer of several."""
        return Sums(*(part[rows] for part in self))

    def plus(self, other: Sums) -> Sums:
        return Sums(*(mine + more for mine, more in zip(self, other, strict=True)))

    def statistics(self, rope: Rope) -> Statistics:
        """The means."""
        count = self.tokens.clamp_min(1)[..., None, None]
        query_mean, query_magnitude, key_mean, key_magnitude = (
            (part / count).float() for part in self[:4]
        )
        return Statistics(query_mean, query_magnitude, key_mean, key_magnitude, self.tokens, rope)


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

    def select(self, layer: int) -> Statistics:
        """Of one layer, where the tensors are of several: `[layers, B, ...]`."""
        return Statistics(
            self.query_mean[layer],
            self.query_magnitude[layer],
            self.key_mean[layer],
            self.key_magnitude[layer],
            self.count[layer],
            self.rope,
        )

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
        self._sums: Sums | None = None
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
            fold([self])
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
            fold([self])
        tokens = vectors.tokens
        if tokens > FOLD_TOKENS:
            fold([self])
            _sum([self], [[vectors.part(0, tokens - FOLD_TOKENS)]])
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
        collector = self if more is None else self.fork()
        if more is not None:
            collector._waiting.append(more)
        return read_together([collector])[0]

    def fork(self) -> LayerStatistics:
        """Statistics of their own that continue from here."""
        self._empty_cycle()
        twin = copy.copy(self)
        twin._waiting, twin._cycle = list(self._waiting), None
        return twin

    def select_rows(self, rows: Tensor) -> None:
        """Row `i` continues from what row `rows[i]` has collected."""
        fold([self])
        self.batch, self._cycle = rows.shape[0], None
        if self._sums is not None:
            self._sums = self._sums.select(rows.to(self._sums.tokens.device))

    @property
    def nbytes(self) -> int:
        tensors = [t for vectors in self._waiting for t in (vectors.queries, vectors.keys)]
        tensors += self.cycle_buffers
        tensors += self._sums or ()
        return sum(t.nbytes for t in tensors)


def fold(collectors: Sequence[LayerStatistics]) -> None:
    """Sum what waits in layers that are alike: together where they saw the same forwards."""
    for collector in collectors:
        collector._empty_cycle()
    waiting = [collector._waiting for collector in collectors]
    lengths = [[vectors.tokens for vectors in forwards] for forwards in waiting]
    if any(other != lengths[0] for other in lengths):
        for collector in collectors:
            fold([collector])
        return
    for collector in collectors:
        collector._waiting, collector._waiting_tokens = [], 0
    alike = groupby(range(len(lengths[0])), key=lambda i: waiting[0][i].real is None)
    for _, group in alike:
        run = list(group)
        some = max(1, tokens_at_a_time(waiting[0][run[0]].queries) // len(collectors))
        for start in range(0, len(run), some):
            part = run[start : start + some]
            _sum(collectors, [[forwards[i] for i in part] for forwards in waiting])


def read_together(collectors: Sequence[LayerStatistics]) -> list[Statistics]:
    """The statistics of layers that are alike, of everything added so far."""
    fold(collectors)
    sums = [collector._sums for collector in collectors if collector._sums is not None]
    together = Sums.stacked(sums).statistics(collectors[0].rope())
    return [together.select(i) for i in range(len(collectors))]


def _sum(collectors: Sequence[LayerStatistics], runs: list[list[Vectors]]) -> None:
    """Add to each of `collectors` its own of `runs`, which are of the same forwards."""
    first, rope, layers = collectors[0], collectors[0].rope(), len(collectors)
    flags = [vectors.real for vectors in runs[0] if vectors.real is not None]
    queries = _joined([vectors.queries for run in runs for vectors in run])
    keys = _joined([vectors.keys for run in runs for vectors in run])
    real = _joined(flags).to(queries.device) if flags else None
    batch, tokens = queries.shape[0], queries.shape[1] // layers
    parts: list[Tensor] = []
    for vectors, heads in ((queries, first.heads), (keys, first.kv_heads)):
        apart = vectors.view(batch, layers, tokens, heads, first.dim).transpose(1, 2)
        moments = RunningMoments.of(apart, real, rope)
        parts += moments.total.transpose(0, 1), moments.magnitude_total.transpose(0, 1)
    counts = [tokens] * batch if real is None else real.sum(dim=1)
    parts.append(torch.as_tensor(counts, device=queries.device).expand(layers, batch))
    new = Sums(*parts)
    known = [collector._sums for collector in collectors if collector._sums is not None]
    if known:
        new = Sums.stacked(known).plus(new)
    for i, collector in enumerate(collectors):
        collector._sums = new.select(i)


def _joined(parts: list[Tensor]) -> Tensor:
    """Concatenated along tokens; a prompt, one large part, is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _copied(vectors: Vectors) -> Vectors:
    return Vectors(vectors.queries.clone(), vectors.keys.clone(), vectors.real)
