"""Quality against budget or against bytes, a colour per scorer, a line style per model and task."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from kvpage.evaluation.contenders import Contender
from kvpage.evaluation.runner import Row

FULL = Contender(None).scorer_name
STYLES = ("-", ":", "-.", (0, (1, 1, 5, 1)))
UNITS = {"budget": 1, "kv_bytes": 2**20}
MEASURES = {"kl": "KL to the full cache, nats", "accuracy": "accuracy", "score": "score"}


def plot(rows: Sequence[Row], against: str = "budget") -> Any:
    """A matplotlib `Figure` of `rows` of one study, with their 95 % intervals.

    against: "budget" or "kv_bytes". The full cache is a grey line across, or, against bytes, a
    point of its own. Raises `ValueError` for another, or rows without a measure to plot.
    """
    if against not in ("budget", "kv_bytes"):
        raise ValueError(f"against: 'budget' or 'kv_bytes' expected, got {against!r}")
    measure = next((name for name in MEASURES if any(name in row for row in rows)), None)
    if measure is None:
        raise ValueError(f"rows: with one of {', '.join(MEASURES)} expected, got none")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    axes = figure.add_subplot()
    lines: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        lines[_group(row, rows), row["scorer"]].append(row)
    groups = list(dict.fromkeys(group for group, _ in lines))
    scorers = [name for name in dict.fromkeys(row["scorer"] for row in rows) if name != FULL]
    for (group, scorer), line in lines.items():
        style: Any = {"linestyle": STYLES[groups.index(group) % len(STYLES)], "linewidth": 1.2}
        style["color"] = "0.4" if scorer == FULL else f"C{scorers.index(scorer)}"
        cache = "full cache" if scorer == FULL else scorer
        style["label"] = ", ".join(filter(None, [group, cache]))
        if scorer == FULL and against == "budget":
            axes.axhline(line[0][measure], zorder=1, **style)
        else:
            _draw(axes, sorted(line, key=lambda row: row[against]), measure, against, style)
    _dress(axes, rows, measure, against)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize="small")
    return figure


def _group(row: Row, rows: Sequence[Row]) -> str:
    """What tells lines of the same scorer from each other."""
    names = [
        name for name in ("model", "task", "tokens") if len({other.get(name) for other in rows}) > 1
    ]
    return ", ".join(f"{row[name]} tokens" if name == "tokens" else row[name] for name in names)


def _draw(axes: Any, line: Sequence[Row], measure: str, against: str, style: Any) -> None:
    x = [row[against] / UNITS[against] for row in line]
    errors = [
        [0.0 if row.get(bound) is None else abs(row[measure] - row[bound]) for row in line]
        for bound in (f"{measure}_low", f"{measure}_high")
    ]
    y = [row[measure] for row in line]
    axes.errorbar(x, y, yerr=errors, marker="o", markersize=4, capsize=2, **style)


def _dress(axes: Any, rows: Sequence[Row], measure: str, against: str) -> None:
    """Scales, ticks where there are points, names."""
    axes.set_xscale("log", base=2)
    axes.set_xlabel("budget, tokens" if against == "budget" else "KV memory, MiB")
    ticks = sorted({row[against] / UNITS[against] for row in rows if row[against]})
    if len(ticks) <= 8:
        axes.set_xticks(ticks)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.4g}")
    axes.minorticks_off()
    if measure == "kl":
        axes.set_yscale("log")
    axes.set_ylabel(MEASURES[measure])
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
