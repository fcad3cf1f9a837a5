"""The longest trace and the largest batch that fit in a memory, for each cache.

Computed from measured peaks, which are linear in tokens and in rows: two lengths give the bytes per
token, two batches the bytes per row. Then verified: the cache is filled, torch's allocator is held
to the limit, and tokens are decoded. (The limit does not hold for filling, nor for what CUDA itself
takes beside the allocator. Where storage grows in steps, as with `budget=None`, a line through two
peaks is off by up to a step, which verifying shows. On the CPU, which counts no peaks, the bytes of
keys and values stand in for them.)
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from gpu_lab import Contender, Lab

LIMITS_GIB = (24, 80)
TRIES = (1.0, 0.97, 0.93)
"""Shares of what was computed that are tried, because the allocator reserves more than it hands
out."""
FLAT_BYTES = 64
"""Growth per token below which a peak is the same at any length; one token of one layer takes 2 KiB
or more in a large model."""
NOT_TRIED = "not tried: no time left"


@dataclass(frozen=True)
class Limit:
    """What fits in `gib` GiB. `longest_trace`: at batch 1; `None` where the peak does not grow with
    the tokens seen. `largest_batch`: at `seen_tokens`. `verified_...`: the most that was decoded
    under the limit, or why that was not tried or failed."""

    contender: str
    gib: int
    seen_tokens: int
    bytes_per_token: float
    bytes_per_row: float
    bytes_beside: float
    """Peak at batch 1 less the bytes of the tokens: weights, activations."""
    longest_trace: int | None
    largest_batch: int
    verified_trace: int | str = NOT_TRIED
    verified_batch: int | str = NOT_TRIED
    note: str = ""


def measure_limits(lab: Lab, contenders: Sequence[Contender], deadline: float) -> Iterator[Limit]:
    """First what is computed, of all; then, as far as time goes, the same with what is verified."""
    computed: list[tuple[Contender, Limit]] = []
    for contender in contenders:
        if time.monotonic() < deadline:
            found = compute(lab, contender)
            computed += [(contender, limit) for limit in found]
            yield from found
    for contender, limit in computed:
        yield verify(lab, contender, limit, deadline)


def compute(lab: Lab, contender: Contender) -> list[Limit]:
    short, long = lab.shape.traces
    try:
        at_short, at_long = (lab.peak(contender, seen, 1) for seen in (short, long))
        two_rows = lab.peak(contender, long, 2)
    except torch.cuda.OutOfMemoryError:
        note = f"2 rows of {long:,} tokens do not fit on this device"
        return [Limit(contender.name, gib, long, 0, 0, 0, 0, 0, note=note) for gib in LIMITS_GIB]
    per_token, per_row = (at_long - at_short) / (long - short), two_rows - at_long
    beside = at_long - per_token * long
    limits = []
    for gib in LIMITS_GIB:
        room = gib * 2**30
        trace = max(0, int((room - beside) / per_token)) if per_token > FLAT_BYTES else None
        batch = max(0, 1 + int((room - at_long) // per_row)) if per_row > 0 else 0
        if room < at_long:
            batch = 0
        limits.append(Limit(contender.name, gib, long, per_token, per_row, beside, trace, batch))
    return limits


def verify(lab: Lab, contender: Contender, limit: Limit, deadline: float) -> Limit:
    """`limit` with what was decoded under it."""
    if lab.device.type != "cuda":
        return replace(
            limit, verified_trace="not tried: no GPU", verified_batch="not tried: no GPU"
        )
    total = torch.cuda.get_device_properties(lab.device).total_memory
    room = limit.gib * 2**30
    if limit.note or total < room:
        why = limit.note or f"not tried: this device has {total / 2**30:.0f} GiB"
        return replace(limit, verified_trace=why, verified_batch=why)

    def most(computed: int, trace: bool) -> int | str:
        """The largest of `TRIES` of `computed` tokens, or rows, that decodes."""
        for share in TRIES:
            count = int(share * computed)
            if count == 0:
                return "nothing fits"
            if time.monotonic() > deadline:
                return NOT_TRIED
            seen, batch = (count, 1) if trace else (limit.seen_tokens, count)
            try:
                lab.peak(contender, seen, batch, limit=room)
                return count
            except torch.cuda.OutOfMemoryError:
                continue
        return f"{TRIES[-1]:.0%} of what was computed does not fit"

    if limit.longest_trace is None:
        trace: int | str = f"flat from {lab.shape.traces[0]:,} to {lab.shape.traces[1]:,} tokens"
    else:
        trace = most(limit.longest_trace, trace=True)
    return replace(limit, verified_trace=trace, verified_batch=most(limit.largest_batch, False))


def limit_rows(limits: Iterable[Limit]) -> list[list[str]]:
    """For a table, head first."""
    rows = [["memory", "cache", "KiB per token", "MiB per row", "longest trace, computed",
             "verified", "largest batch, computed", "verified"]]  # fmt: skip
    for limit in sorted(limits, key=lambda limit: limit.gib):
        name = f"{limit.contender}: {limit.note}" if limit.note else limit.contender
        figures = ["-"] * 4
        if not limit.note:
            trace = "any" if limit.longest_trace is None else f"{limit.longest_trace:,}"
            figures = [
                f"{limit.bytes_per_token / 2**10:,.2f}",
                f"{limit.bytes_per_row / 2**20:,.1f} at {limit.seen_tokens:,} seen",
                trace,
                f"{limit.largest_batch:,}",
            ]
        rows.append(
            [f"{limit.gib} GiB", name, *figures[:3], _shown(limit.verified_trace), figures[3],
             _shown(limit.verified_batch)]
        )  # fmt: skip
    return rows


def _shown(value: int | str) -> str:
    return value if isinstance(value, str) else f"{value:,}"
