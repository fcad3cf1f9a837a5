"""The Triton kernels on a GPU: right first, then how close to what the memory can do.

python benchmarks/gpu_kernels.py --out gpu-results
python benchmarks/gpu_kernels.py --shape tiny --device cpu

Checks the five ops against their references and float64 and exits with 1 if one is wrong. Then
times each with CUDA events and a flushed L2, medians of 50, and gives the bytes it can't do without
per second, beside a copy from device to device measured in the same run; attention also beside
SDPA over contiguous keys and values, flash-attn and FlashInfer, where installed and right. Then a
whole compaction through a real `PagedCompactCache`: its time, its parts, and its share of the
decode steps between two of them.

Prints tables, a line per target of the project, and everything as one line of JSON; a missed
target is a figure, not an error. `--out` writes kernels.json and kernels.md too. `--device cpu`
runs the same code in plain torch at tiny shapes: no target is judged by it. (The file can't be
named kernels.py: transformers would take it for the package of that name.)
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from gpu_timing import (
    Copy,
    Stopwatch,
    device_of,
    environment,
    forget_peak,
    measure_copy,
    peak_bytes,
)
from kernel_cases import Heads, Work, bytes_of, paged_case, works, wrong_kernels
from kernel_compaction import CompactionShape, CompactionTime, measure_compaction
from kernel_peers import peers
from reporting import Target, aligned, at_least, markdown, write


@dataclass(frozen=True)
class Shape:
    """Which cases are timed. rows: `(batch, live tokens per row)`; judged: tokens in total."""

    rows: tuple[tuple[int, int], ...]
    judged: int
    heads: Heads
    compaction: CompactionShape
    compactions: int
    repeats: int


SHAPES = {
    "full": Shape(
        (
            (1, 65536), (8, 8192), (32, 2048),
            (1, 4096), (1, 16384), (8, 4096), (8, 16384), (32, 4096), (32, 16384),
        ),
        65536, Heads(), CompactionShape(), 5, 50,
    ),
    "tiny": Shape(
        ((1, 256), (4, 64), (2, 100)),
        256,
        Heads(8, 2, 64, 16, torch.bfloat16),
        CompactionShape(layers=2, batch=2, budget=64, interval=16, recent=16),
        2,
        5,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Timing:
    """One line of the table. `gbps` and `of_copy` (a share) are `None` where bytes are unknown."""

    op: str
    detail: str
    batch: int
    live_tokens: int
    median_ms: float | None
    gbps: float | None = None
    of_copy: float | None = None
    note: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    device, shape = device_of(args.device), SHAPES[args.shape]
    torch.manual_seed(0)
    with torch.inference_mode():
        wrong = wrong_kernels(device, shape.heads)
        if wrong:
            print(*(f"FAIL  not as the reference: {what}" for what in wrong), sep="\n")
            print(json.dumps({"benchmark": "kernels", "wrong": wrong}))
            return 1
        print(
            "the five ops are right: against their references and float64, with NaN in free slots"
        )
        stopwatch = Stopwatch(device, shape.repeats)
        copy = measure_copy(stopwatch)
        forget_peak(device)
        timings = time_ops(stopwatch, shape, copy)
        asked = replace(shape.compaction, scorer=args.scorer)
        compaction = measure_compaction(stopwatch, asked, shape.heads, shape.compactions)
        report = Report(args, environment(device), copy, timings, compaction, shape)
        report.write()  # before the peers, some of which compile for minutes
        timings += time_peers(stopwatch, shape, copy)
        report.peak_bytes = peak_bytes(device)
    print(report.text())
    report.write()
    print(json.dumps(report.to_dict()))
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Time the kernels against what the memory can do, and against their peers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--scorer", default="sampled", help="what the compaction ranks by, as sampled or centroid")
    add("--device", choices=["cuda", "cpu"], default="cuda")
    add("--shape", choices=list(SHAPES), default="full")
    add("--out", type=Path, help="folder for kernels.json and kernels.md")
    add("--step-us", type=at_least(1), help="a whole decode step, in microseconds, to judge by")
    return parser


# Timing.


def time_ops(stopwatch: Stopwatch, shape: Shape, copy: Copy) -> list[Timing]:
    timings = []
    for batch, live in shape.rows:
        for work in works(shape.heads, batch, live, stopwatch.device):
            timings.append(_timing(stopwatch, work, batch, live, copy))
    for bytes_moved in {_attention_bytes(stopwatch, shape)} - {None}:
        same = measure_copy(stopwatch, bytes_moved)
        share = same.gbps / copy.gbps
        detail = f"{bytes_moved / 2**20:,.0f} MiB moved, as attention at {shape.judged:,}"
        timings.append(Timing("copy", detail, 1, shape.judged, same.median_ms, same.gbps, share))
    return timings


def _attention_bytes(stopwatch: Stopwatch, shape: Shape) -> int | None:
    case = paged_case(shape.heads, (shape.judged,), False, stopwatch.device)
    return bytes_of(
        "paged_attention", case.query, case.keys, case.values, case.tables, shape.judged
    )


def time_peers(stopwatch: Stopwatch, shape: Shape, copy: Copy) -> list[Timing]:
    """Others' attention where `judged` tokens live in total."""
    timings = []
    for batch, live in shape.rows:
        if batch * live != shape.judged:
            continue
        case = paged_case(shape.heads, (live,) * batch, True, stopwatch.device)
        args = (case.query, case.keys, case.values, case.tables, batch * live)
        moved = bytes_of("paged_attention", *args)
        for peer in peers(case):
            if peer.run is None:
                timings.append(Timing(peer.name, "", batch, live, None, note=peer.note))
                continue
            work = Work(peer.name, "", peer.run, moved)
            timings.append(_timing(stopwatch, work, batch, live, copy))
    return timings


def _timing(stopwatch: Stopwatch, work: Work, batch: int, live: int, copy: Copy) -> Timing:
    ms = stopwatch.median_ms(work.run)
    gbps = None if work.bytes_moved is None else work.bytes_moved / ms / 1e6
    share = None if gbps is None else gbps / copy.gbps
    return Timing(work.op, work.detail, batch, live, ms, gbps, share)


# Verdicts and printing.


@dataclass
class Report:
    """Everything that was measured, in the forms it is told in."""

    args: argparse.Namespace
    environment: dict[str, Any]
    copy: Copy
    timings: list[Timing]
    compaction: CompactionTime
    shape: Shape
    peak_bytes: int | None = None

    def targets(self) -> list[Target]:
        """On the CPU nothing is judged."""
        on_gpu, shape = self.args.device == "cuda", self.shape
        whole = self.compaction.whole_ms if on_gpu else None
        share = self.share() if on_gpu else None
        steps = "decode steps" if self.args.step_us else "write_kv and paged_attention steps"
        where = f"{shape.judged:,} live tokens in total"
        return [
            Target(
                f"paged_attention at {where}, least share of the copy",
                self._least("paged_attention") if on_gpu else None, 0.85, at_least=True,
            ),
            Target(
                f"score_tokens at {where}, least share of the copy",
                self._least("score_tokens") if on_gpu else None, 0.80, at_least=True,
            ),
            Target(f"compaction of {shape.compaction.layers} layers in ms", whole, 2.0),
            Target(
                f"compaction, share of the {shape.compaction.interval} {steps} it serves",
                share, 0.01,
            ),
        ]  # fmt: skip

    def share(self) -> float:
        step_us = self.args.step_us
        step_ms = step_us / 1e3 if step_us else self.compaction.attention_step_ms
        return self.compaction.whole_ms / (self.shape.compaction.interval * step_ms)

    def _least(self, op: str) -> float | None:
        shares = [
            timing.of_copy
            for timing in self.timings
            if timing.op == op and timing.batch * timing.live_tokens == self.shape.judged
        ]
        known = [share for share in shares if share is not None]
        return min(known) if known and len(known) == len(shares) else None

    def rows(self) -> list[list[str]]:
        rows = [["op", "case", "batch", "live per row", "us", "GB/s", "of copy"]]
        for t in self.timings:
            figures = ["-", "-", "-"]
            if t.median_ms is not None:
                figures[0] = f"{1e3 * t.median_ms:,.1f}"
            if t.gbps is not None and t.of_copy is not None:
                figures[1:] = [f"{t.gbps:,.0f}", f"{t.of_copy:.0%}"]
            detail = t.note or t.detail
            rows.append([t.op, detail, f"{t.batch}", f"{t.live_tokens:,}", *figures])
        return rows

    def compaction_lines(self) -> list[str]:
        c, s = self.compaction, self.shape.compaction
        parts = ", ".join(f"{name} {ms:.3f}" for name, ms in c.parts_ms.items())
        return [
            f"compaction {s.budget + s.interval:,} -> {s.budget:,} tokens, {s.layers} layers, "
            f"batch {s.batch}: {c.whole_ms:.3f} ms (a step that compacts {c.compacting_step_ms:.3f}"
            f", one that does not {c.plain_step_ms:.3f}; cache only, host clock)",
            f"its parts, one layer by events times {s.layers}, in ms: {parts}",
            f"write_kv and paged_attention of one decode step there: {c.attention_step_ms:.3f} ms",
        ]

    def text(self, table: Callable[[Sequence[Sequence[str]]], str] = aligned) -> str:
        seen = self.environment
        head = (
            f"{seen['device']}; torch {seen['torch']}, triton {seen['triton']}; copy of "
            f"{self.copy.bytes_moved / 2**20:,.0f} MiB read and written: {self.copy.gbps:,.0f} GB/s"
        )
        lines = [head, table(self.rows()), *self.compaction_lines(), *map(str, self.targets())]
        return ("\n\n" if table is markdown else "\n").join(lines)

    def to_dict(self) -> dict[str, Any]:
        return {
            "benchmark": "kernels",
            "shape": self.args.shape,
            "environment": self.environment,
            "copy": asdict(self.copy) | {"gbps": self.copy.gbps},
            "timings": [asdict(timing) for timing in self.timings],
            "compaction": asdict(self.compaction) | asdict(self.shape.compaction),
            "compaction_share": self.share(),
            "step_us": self.args.step_us,
            "peak_bytes": self.peak_bytes,
            "targets": [target.to_dict() for target in self.targets()],
        }

    def write(self) -> None:
        write(self.args.out, "kernels", self.to_dict(), "Kernels", self.text(markdown))


if __name__ == "__main__":
    sys.exit(main())
