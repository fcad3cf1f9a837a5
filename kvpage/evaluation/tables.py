"""One table, four ways: for a terminal, Markdown, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvpage.evaluation.runner import Row
from kvpage.report import readable

ABOUT = ("model", "task", "tokens", "positions", "samples", "problems", "seeds")
"""Columns that say what was measured, rather than what was found."""

PER_TEXT = {"kv_bytes": "KV per text, MiB", "statistics_bytes": "stats per text, MiB"}
"""Headings of a study, which has budgets."""
IN_ALL = {"kv_bytes": "KV memory", "statistics_bytes": "statistics"}

HYPHENS = {"attention": "atten-tion", "compactions": "com-pac-tions"}
HYPHENS |= {"perplexity": "perplex-ity", "positions": "posi-tions"}
"""Where a terminal may break a heading, so that a table is no wider than its numbers."""


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """The table as text, its head first.

    A column's 95 % interval, from `name_low` to `name_high`, stands beside it in brackets, and a
    `delta_name` behind the full cache's `full_name`; lists are left to JSON.
    """
    names = _names(rows)
    bases = [name.replace("delta_", "full_") for name in names if name.startswith("delta_")]
    shown = [name for name in names if not name.endswith(("_low", "_high")) and name not in bases]
    said = PER_TEXT if "budget" in names else IN_ALL
    head = [said.get(name, name.removeprefix("delta_").replace("_", " ")) for name in shown]
    return [head, *([_cell(name, row) for name in shown] for row in rows)]


def _names(rows: Sequence[Row]) -> list[str]:
    """All fields but lists, in their order."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [name for name in names if not any(isinstance(row.get(name), list) for row in rows)]


def _cell(name: str, row: Row) -> str:
    if name.startswith("delta_"):
        full = name.replace("delta_", "full_")
        return f"{_text(full, row.get(full))} {row[name]:+.2g}"
    text = _text(name, row.get(name), "budget" in row)
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    return text if low is None or high is None else f"{text} [{low:.2g}, {high:.2g}]"


def _text(name: str, value: Any, per_text: bool = True) -> str:
    if value is None:
        return "full" if name == "budget" else "-"
    if name.endswith("_bytes"):
        return _text("MiB", value / 2**20) if per_text else readable(value)
    return (
        f"{value:.3g}"
        if isinstance(value, float) and abs(value) < 1000
        else (f"{value:,.0f}" if isinstance(value, float) else str(value))
    )


def markdown(rows: Sequence[Row]) -> str:
    """As a Markdown table."""
    head, *body = cells(rows)
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def comma_separated(rows: Sequence[Row]) -> str:
    """As CSV, numbers in full; lists are left to JSON."""
    file = io.StringIO()
    writer = csv.DictWriter(file, _names(rows), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def terminal(rows: Sequence[Row]) -> Any:
    """As a rich `Table`; what is the same in every row stands above it."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    head, *body = cells(rows)
    same = [
        i for i, name in enumerate(head) if name in ABOUT and len({line[i] for line in body}) == 1
    ]
    title = ", ".join(f"{head[i]}: {body[0][i]}" for i in same)
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0)
    shown = [i for i in range(len(head)) if i not in same]
    for i in shown:
        left = head[i] in ("model", "task", "scorer")
        justify: Any = "left" if left else "right"
        name, width = head[i], None
        if "budget" in head and name != "model":  # a study's many columns: no wider than they need
            name = " ".join(HYPHENS.get(word, word) for word in name.split()).replace("-", "-\n")
            width = max(map(len, [*name.split(), *(line[i] for line in body)]))
        table.add_column(name, justify=justify, overflow="fold", width=width)
    for line in body:
        table.add_row(*(line[i] for i in shown))
    return table


def save(rows: Sequence[Row], notes: Sequence[str], folder: Path, name: str) -> None:
    """Write `name`.md, .csv and .json into `folder`; notes go below the Markdown and into JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    below = "".join(f"\n{note}\n" for note in notes)
    (folder / f"{name}.md").write_text((markdown(rows) + "\n" if rows else "") + below)
    (folder / f"{name}.csv").write_text(comma_separated(rows))
    text = json.dumps({"rows": list(rows), "notes": list(notes)}, indent=1)
    (folder / f"{name}.json").write_text(text + "\n")
