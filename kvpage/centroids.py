"""Collects statistics of queries and keys before RoPE, layer by layer, as a run goes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from kvpage.rope import RopeSource
from kvpage.summaries import (
    Prior,
    Recent,
    RunningMoments,
    Sample,
    Statistics,
    Sums,
    tokens_at_a_time,
)

FOLD_TOKENS = 128
"""Vectors of about this many tokens wait, unsummed, so that a decode step costs no arithmetic."""


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

    def __init__(
        self,
        batch: int,
        heads: int,
        kv_heads: int,
        dim: int,
        rope: RopeSource,
        *,
        scale: float = 1.0,
        sample_tokens: int = 0,
        recent_tokens: int = 0,
        prior: Prior | None = None,
    ) -> None:
        """scale: of the attention's logits; sample_tokens, recent_tokens: how many queries to have
        a sample of, and to hand out the latest of, beside their sums."""
        self.heads, self.kv_heads, self.dim, self.rope = heads, kv_heads, dim, rope
        self.batch, self.scale, self.prior = batch, scale, prior
        self.sample_tokens, self.recent_tokens = sample_tokens, recent_tokens
        self._sums: Sums | None = None
        self._sample: Sample | None = None
        self._recent: Recent | None = None
        """The last of what was summed, `recent_tokens` at most."""
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
            self._waiting.append(vectors.part(0, tokens - FOLD_TOKENS))
            fold([self])  # apart, so that a prompt is not copied
            # A slice would keep a whole prompt's vectors in memory for its last tokens.
            vectors = _copied(vectors.part(tokens - FOLD_TOKENS, tokens))
            tokens = FOLD_TOKENS
        self._waiting.append(vectors)
        self._waiting_tokens += tokens

    def _keep_recent(self) -> None:
        """Have the last queries, as many as are wanted, of those that wait and those before."""
        if self.recent_tokens == 0 or not self._waiting:
            return
        parts: list[Vectors] = []
        missing = self.recent_tokens
        for vectors in reversed(self._waiting):
            some = min(missing, vectors.tokens)
            parts.insert(0, vectors.part(vectors.tokens - some, vectors.tokens))
            missing -= some
            if missing == 0:
                break
        queries = torch.cat([part.queries for part in parts], dim=1)
        real = None
        if any(part.real is not None for part in parts):
            real = torch.cat([_real(part, queries.device) for part in parts], dim=1)
        new = Recent(queries.view(*queries.shape[:2], self.heads, self.dim), real)
        self._recent = new if self._recent is None else self._recent.last(missing).plus(new)

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

    def read_own(self) -> Statistics:
        """The statistics of the run alone, whatever was known before."""
        twin = self.fork()
        twin.prior = None
        return twin.read()

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
        if self._recent is not None:
            self._recent = self._recent.select(rows.to(self._recent.queries.device))
        if self._sample is not None:
            self._sample = self._sample.select(rows.to(self._sample.priority.device))

    @property
    def nbytes(self) -> int:
        tensors = [t for vectors in self._waiting for t in (vectors.queries, vectors.keys)]
        tensors += self.cycle_buffers
        tensors += self._sums or ()
        tensors += self._sample or ()
        tensors += [] if self._recent is None else [self._recent.queries]
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
    _sample(collectors, waiting)
    for collector in collectors:
        collector._keep_recent()
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
    rope, scale = collectors[0].rope(), collectors[0].scale
    sums = [collector._sums for collector in collectors if collector._sums is not None]
    if any(collector.prior is not None for collector in collectors):
        means = [
            known.means() if collector.prior is None else known.blended(collector.prior)
            for collector, known in zip(collectors, sums, strict=True)
        ]
    else:
        means = [*zip(*(mean.unbind() for mean in Sums.stacked(sums).means()), strict=True)]
    found = []
    for collector, known, parts in zip(collectors, sums, means, strict=True):
        query_mean, query_magnitude, key_mean, key_magnitude = parts
        prior = collector.prior
        statistics = Statistics(
            query_mean,
            query_magnitude,
            key_mean,
            key_magnitude,
            known.tokens,
            rope,
            scale,
            collector._sample,
            collector._recent,
            None if prior is None else prior.sample_for(known.tokens),
        )
        found.append(statistics)
    return found


def _real(vectors: Vectors, device: torch.device) -> Tensor:
    if vectors.real is not None:
        return vectors.real.to(device)
    return torch.ones(vectors.queries.shape[:2], dtype=torch.bool, device=device)


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


def _sample(collectors: Sequence[LayerStatistics], runs: list[list[Vectors]]) -> None:
    """Have the samples of `collectors` cover `runs` too, which are about to be summed."""
    first, layers = collectors[0], len(collectors)
    if first.sample_tokens == 0 or not runs[0]:
        return
    queries = _joined([vectors.queries for run in runs for vectors in run])
    batch, device = queries.shape[0], queries.device
    queries = queries.view(batch, layers, -1, first.heads, first.dim).transpose(1, 2)
    real = None
    if any(vectors.real is not None for vectors in runs[0]):
        real = torch.cat([_real(vectors, device) for vectors in runs[0]], dim=1)
    rows = torch.arange(batch, device=device)[:, None]
    start = rows.new_zeros(batch) if first._sums is None else first._sums.tokens
    size, tokens = first.sample_tokens, queries.shape[1]
    priority, places = Sample.priorities(start, tokens, real).topk(min(size, tokens), largest=False)
    queries = queries[rows, places]  # [B, S, layers, H, D]
    known = [collector._sample for collector in collectors if collector._sample is not None]
    if known:
        queries = torch.cat((torch.stack([sample.queries for sample in known], 2), queries), 1)
        priority = torch.cat((known[0].priority, priority), dim=1)
        priority, places = priority.topk(min(size, priority.shape[1]), largest=False)
        queries = queries[rows, places]
    for i, collector in enumerate(collectors):
        collector._sample = Sample(queries[:, :, i], priority)


def _joined(parts: list[Tensor]) -> Tensor:
    """Concatenated along tokens; a prompt, one large part, is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _copied(vectors: Vectors) -> Vectors:
    return Vectors(vectors.queries.clone(), vectors.keys.clone(), vectors.real)
