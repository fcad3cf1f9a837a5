"""Decoding on a GPU at the size of Qwen3-8B, random weights: time and memory of each cache.

python benchmarks/gpu_decode.py --out gpu-results
python benchmarks/gpu_decode.py --shape tiny --device cpu --out results

Builds the model on the device (nothing is downloaded), fills each cache with random keys and values
through `update`, and times one-token forwards: `DynamicCache` and `StaticCache` with SDPA
(`DynamicCache` with flash-attn 2 too, where installed) and `PagedCompactCache` with its own
attention, for each number of seen tokens and each batch. Nothing is compiled: `StaticCache` is made
for `torch.compile`, which is not measured here. In each round the caches take turns, and one is
held at a time. Steps that compact are told apart.

Then the longest trace and the largest batch that fit in 24 and in 80 GiB (`gpu_limits.py`). Prints
a table, a line per target and one line of JSON; writes decode.json and decode.md to `--out` as it
goes. What does not fit is reported as such; what `--seconds` leave no time for, too.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_lab import SHAPES, Contender, Lab, Shape, cache_bytes, contenders
from gpu_limits import Limit, limit_rows, measure_limits
from gpu_timing import device_of, environment, peak_bytes
from reporting import Target, aligned, at_least, markdown, write

WARM_UP_STEPS = 2
CELLS_SHARE = 0.65
"""Of the time, for the cells; the rest is for the limits."""


@dataclass
class Cell:
    """One contender at one number of seen tokens and one batch, or why there is no figure."""

    contender: str
    seen_tokens: int
    batch: int
    step_ms: list[float] = field(default_factory=list)
    compacting_ms: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    cache_bytes: int | None = None
    note: str = ""

    @property
    def ms(self) -> float | None:
        return median(self.step_ms) if self.step_ms else None

    def mean_ms(self, interval: int) -> float | None:
        """Of an interval: the median step, and once the median step that compacts."""
        if self.ms is None or not self.compacting_ms:
            return self.ms
        return ((interval - 1) * self.ms + median(self.compacting_ms)) / interval

    def compaction_share(self, interval: int) -> float | None:
        """Of decode time, what the steps that compact take longer than others."""
        mean = self.mean_ms(interval)
        if self.ms is None or mean is None or not self.compacting_ms:
            return None
        return (median(self.compacting_ms) - self.ms) / (interval * mean)

    def to_dict(self, interval: int) -> dict[str, Any]:
        mean = self.mean_ms(interval)
        return asdict(self) | {
            "median_ms": self.ms,
            "mean_ms": mean,
            "tokens_per_second": None if mean is None else 1e3 * self.batch / mean,
            "compaction_share": self.compaction_share(interval),
        }


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    started = time.monotonic()
    device, shape = device_of(args.device), SHAPES[args.shape]
    torch.manual_seed(0)
    with torch.inference_mode():
        lab = Lab(shape, device)
        run = Run(args, environment(device), shape, contenders(shape, args.attention))
        for seen, batch in shape.cells:
            in_time = time.monotonic() - started < CELLS_SHARE * args.seconds
            for cell in (measure if in_time else skipped)(lab, run.contenders, seen, batch):
                run.cells.append(cell)
            run.write()
            what = "measured" if in_time else "no time left"
            print(f"{seen:,} seen, batch {batch}: {what}", file=sys.stderr, flush=True)
        for limit in measure_limits(lab, run.contenders, started + args.seconds):
            run.limits[limit.contender, limit.gib] = limit
            run.write()
    print(run.text())
    print(json.dumps(run.to_dict()))
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Time and memory of decoding with each cache, at the size of Qwen3-8B.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--shape", choices=list(SHAPES), default="qwen3-8b")
    add("--attention", default="kvpage", help="attn_implementation with PagedCompactCache")
    add("--seconds", type=at_least(1), default=220, help="start nothing new after these")
    add("--out", type=Path, help="folder for decode.json and decode.md")
    return parser


# Measuring.


def measure(lab: Lab, turns: Sequence[Contender], seen: int, batch: int) -> list[Cell]:
    cells = [Cell(contender.name, seen, batch) for contender in turns]
    for index in range(lab.shape.rounds):
        for contender, cell in zip(turns, cells, strict=True):
            if not cell.note:
                run_round(lab, contender, cell, warm=index > 0)
    return cells


def skipped(lab: Lab, turns: Sequence[Contender], seen: int, batch: int) -> list[Cell]:
    return [Cell(contender.name, seen, batch, note="no time left") for contender in turns]


def run_round(lab: Lab, contender: Contender, cell: Cell, warm: bool) -> None:
    """Fill a cache, step it, and note times and memory, or that it does not fit.

    warm: the first step counts if it compacts; else it may have compiled kernels.
    """
    phase, shape, batch = "filling", lab.shape, cell.batch
    try:
        with lab.attending(contender):
            cache = lab.filled(contender, cell.seen_tokens, batch)
            phase = "decoding"
            steps = [lab.step(cache, batch) for _ in range(1 + WARM_UP_STEPS + shape.steps)]
            cell.peak_bytes = max(cell.peak_bytes or 0, peak_bytes(lab.device) or 0) or None
            cell.cache_bytes = cache_bytes(cache)
            cell.step_ms += [s.ms for s in steps[1 + WARM_UP_STEPS :] if not s.compacted]
            if steps[0].compacted:
                lab.step(cache, batch, shape.interval - len(steps))  # one token short of the next
                again = lab.step(cache, batch)
                assert again.compacted
                cell.compacting_ms += [s.ms for s in (steps[0], again) if warm or s is again]
    except torch.cuda.OutOfMemoryError:
        cell.note = f"does not fit ({phase})"
        cell.step_ms.clear()
        cell.compacting_ms.clear()
        cell.peak_bytes = None


# Verdicts and printing.


@dataclass
class Run:
    """Everything that was measured, in the forms it is told in."""

    args: argparse.Namespace
    environment: dict[str, Any]
    shape: Shape
    contenders: list[Contender]
    cells: list[Cell] = field(default_factory=list)
    limits: dict[tuple[str, int], Limit] = field(default_factory=dict)

    def targets(self) -> list[Target]:
        """On the CPU nothing is judged."""
        shares = [cell.compaction_share(self.shape.interval) for cell in self.cells]
        known = [share for share in shares if share is not None]
        judged = known and self.args.device == "cuda"
        return [
            Target("compaction, largest share of decode time", max(known) if judged else None, 0.01)
        ]

    def rows(self) -> list[list[str]]:
        rows = [["seen", "batch", "cache", "ms per step", "with compaction", "tokens/s",
                 "peak GiB", "KV GiB", "compacting"]]  # fmt: skip
        for cell in self.cells:
            mean, share = (
                cell.mean_ms(self.shape.interval), cell.compaction_share(self.shape.interval)
            )  # fmt: skip
            figures = ["-"] * 6
            if cell.ms is not None and mean is not None:
                figures[:3] = [f"{cell.ms:.2f}", f"{mean:.2f}", f"{1e3 * cell.batch / mean:,.0f}"]
            for place, count in ((3, cell.peak_bytes), (4, cell.cache_bytes)):
                if count is not None and not cell.note:
                    figures[place] = f"{count / 2**30:,.3f}"
            if share is not None:
                figures[5] = f"{share:.2%}"
            name = f"{cell.contender}: {cell.note}" if cell.note else cell.contender
            rows.append([f"{cell.seen_tokens:,}", f"{cell.batch}", name, *figures])
        return rows

    def text(self, table: Callable[[Sequence[Sequence[str]]], str] = aligned) -> str:
        seen = self.environment
        head = (
            f"{seen['device']}; torch {seen['torch']}, transformers {seen['transformers']}; model: "
            f"{self.args.shape}, random weights, bfloat16, not compiled; PagedCompactCache with "
            f"attn_implementation={self.args.attention!r}; a step is one forward of one token per "
            "row, median; peak: torch's allocator while decoding, weights included"
        )
        if self.args.device == "cpu":
            head += "; no peaks on the CPU: limits are of keys and values alone"
        limits = limit_rows(self.limits.values())
        lines = [head, table(self.rows())]
        if len(limits) > 1:
            lines.append(table(limits))
        return ("\n\n" if table is markdown else "\n").join([*lines, *map(str, self.targets())])

    def to_dict(self) -> dict[str, Any]:
        return {
            "benchmark": "gpu_decode",
            "shape": self.args.shape,
            "attention": self.args.attention,
            "environment": self.environment,
            "model": self.shape.config,
            "interval": self.shape.interval,
            "cells": [cell.to_dict(self.shape.interval) for cell in self.cells],
            "limits": [asdict(limit) for limit in self.limits.values()],
            "targets": [target.to_dict() for target in self.targets()],
        }

    def write(self) -> None:
        write(self.args.out, "decode", self.to_dict(), "Decoding", self.text(markdown))


if __name__ == "__main__":
    sys.exit(main())
