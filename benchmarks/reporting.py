"""What the benchmarks share in telling what they found: promises, tables, arguments."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Target:
    """A promise of the project: `value` (`None`: not measured) is to be at most `limit`."""

    claim: str
    value: float | None
    limit: float
    at_least: bool = False

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "SKIP"
        met = self.value >= self.limit if self.at_least else self.value <= self.limit
        return "PASS" if met else "FAIL"

    def __str__(self) -> str:
        wanted = f"at {'least' if self.at_least else 'most'} {self.limit:g} wanted"
        figure = "not measured" if self.value is None else f"{self.value:.3f}"
        return f"{self.verdict}  {self.claim}: {wanted}, {figure}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"verdict": self.verdict}


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """`rows` in columns, flush right but for the first."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """`rows`, the first of them the head, as a Markdown table."""
    head, *body = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body))


def write(out: Path | None, name: str, result: dict[str, Any], title: str, text: str) -> None:
    """Leave `result` as JSON and `text` as Markdown in the folder `out`, if there is one."""
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    (out / f"{name}.md").write_text(f"## {title}\n\n{text}\n")


def at_least(minimum: int) -> Callable[[str], int]:
    """An argparse type: an integer no smaller than `minimum`."""

    def parse(text: str) -> int:
        value = int(text)
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, got {value}")
        return value

    parse.__name__ = "int"  # argparse names the type so in its error for "abc"
    return parse
