"""kvpage bench: what a token takes on this machine, with and without a budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpage.cli.options import (
    Adapter,
    Attention,
    Device,
    Dtype,
    Interval,
    Json,
    Model,
    Recent,
    Scorer,
    Sinks,
    beyond,
    budget_of,
    errors,
    integers,
    load,
    make_folder,
    naming,
    positions_of,
    say,
    subject_of,
)


def bench_command(
    model: Model,
    budgets: Annotated[
        str, typer.Option(help="Live tokens to keep, with commas; `none` never evicts.")
    ] = "512,1024",
    tokens: Annotated[int, typer.Option(min=1, help="Longest text to time at, in tokens.")] = 4096,
    points: Annotated[
        str | None,
        typer.Option(
            help="Lengths to time at, with commas, instead of --tokens.",
            show_default="an eighth, a quarter, half and all of --tokens",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Tokens timed, of each cache and length.")] = 16,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows decoded at once.")] = 1,
    adapter: Adapter = None,
    scorer: Scorer = "sampled",
    interval: Interval = 128,
    sinks: Sinks = 4,
    recent: Recent = 128,
    attention: Attention = None,
    dtype: Dtype = "auto",
    device: Device = None,
    out: Annotated[
        Path, typer.Option(help="Folder for the table: bench.md, bench.csv, bench.json.")
    ] = Path("kvpage-bench"),
    as_json: Json = False,
) -> None:
    """What a token takes on this machine: DynamicCache against budgets, in ms and in bytes.

    At each length all caches are filled and then decode in turn, a token each, so that a slow
    moment hits all alike; medians are shown. What a compaction takes more is spread over the
    tokens between two.

    \b
    Examples:
      kvpage bench --model my-model --budgets 512,1024 --tokens 4096
      kvpage bench --model my-model --points 1000,16000 --steps 8 --json

    Ctrl-C keeps the lengths that are done. Exit codes: 0 done, 1 out of memory, 2 bad input,
    130 interrupted.
    """
    with errors("bench", f"interrupted; the lengths that were done are in {out}"):
        from tqdm import tqdm

        from kvpage.evaluation.contenders import Contender
        from kvpage.evaluation.runner import Row
        from kvpage.evaluation.speed import speed
        from kvpage.evaluation.tables import save

        eighths = sorted({max(1, tokens // part) for part in (8, 4, 2, 1)})
        lengths = integers("--points", points) if points is not None else eighths
        if min(lengths) < 1:
            raise ValueError(f"--points: positive numbers of tokens expected, got {points}")
        options: dict[str, Any] = {"interval": interval, "sinks": sinks, "recent": recent}
        contenders = []
        for text in budgets.split(","):
            budget = budget_of(text, "--budgets")
            label = "budget=none" if budget is None else f"budget={budget}"
            contenders.append(Contender(budget, scorer, options, label))
            contenders[-1].check()
        subject = subject_of(model, adapter, None, dtype, device, reads_text=False)
        make_folder("--out", out)
        loaded = load(subject, attention)
        note = beyond(max(lengths), positions_of(loaded.config))
        if note is not None:
            say("bench", note)
        rows: list[Row] = []
        with tqdm(total=len(lengths) * (len(contenders) + 1) * (steps + 1), unit="step") as bar:
            found = speed(
                loaded, contenders, lengths, steps=steps, rows=batch_size, progress=bar.update
            )
            for length, some in zip(lengths, found, strict=True):
                bar.set_description(f"{length:,} tokens done")
                rows += some
                with naming("--out", out):
                    save(rows, [], out, "bench")
        if as_json:
            typer.echo(json.dumps({"rows": rows}))
        else:
            _print(rows, out)


def _print(rows: list[dict[str, object]], out: Path) -> None:
    from rich.console import Console

    from kvpage.evaluation.tables import terminal

    console = Console(highlight=False)
    console = console if console.is_terminal else Console(width=160, highlight=False)
    console.print(terminal(rows))
    console.print(f"tables in {out}/bench.md, .csv, .json")
