"""Quality against budget or against bytes, a colour per scorer, a line style per model and task."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from kvpage.plot.style import KINDS, MUTED, count_of, drawn, new_figure, rule

Row = Mapping[str, Any]
STYLES = (("-", "o"), (":", "s"), ("-.", "^"), ((0, (1, 1, 5, 1)), "D"))
"""Line and marker."""
UNITS = {"budget": 1, "kv_bytes": 2**20}
BESIDE = 0.05
"""Octaves between two lines, so that intervals at the same budget can be read."""
MEASURES = {"kl": "KL to the full cache, nats", "accuracy": "accuracy", "score": "score"}


@drawn
def budget_curves(rows: Sequence[Row], against: str = "budget") -> Figure:
    """Quality of the `rows` of one study of `kvpage.evaluation`, with their 95 % intervals.

    against: "budget" or "kv_bytes". The full cache is a grey line across, or, against bytes, a
    point of its own. Other lines stand a little beside each other, in order, around their budget.
    Raises `ValueError` for another, or rows without a measure to plot.
    """
    if against not in UNITS:
        raise ValueError(f"against: 'budget' or 'kv_bytes' expected, got {against!r}")
    measure = next((name for name in MEASURES if any(name in row for row in rows)), None)
    if measure is None:
        raise ValueError(f"rows: with one of {', '.join(MEASURES)} expected, got none")
    figure = new_figure(6.4, 4.4)
    axes = figure.add_subplot()
    lines: dict[tuple[str, str | None], list[Row]] = defaultdict(list)
    for row in rows:
        scorer = None if row["budget"] is None else row["scorer"]
        lines[_group(row, rows), scorer].append(row)
    groups = list(dict.fromkeys(group for group, _ in lines))
    scorers = [name for name in dict.fromkeys(name for _, name in lines) if name is not None]
    bounded = [place for place in lines if place[1] is not None]
    for (group, scorer), line in lines.items():
        dashes, marker = STYLES[groups.index(group) % len(STYLES)]
        style: Any = {"linestyle": dashes, "linewidth": 1.4}
        full = scorer is None
        style["color"] = MUTED if scorer is None else KINDS[scorers.index(scorer) % len(KINDS)]
        style["label"] = ", ".join(filter(None, [group, scorer or "full cache"]))
        if full and against == "budget":
            axes.axhline(line[0][measure], zorder=1, **style)
        else:
            line = sorted(line, key=lambda row: row[against])
            order = 0.0 if full else bounded.index((group, scorer)) - (len(bounded) - 1) / 2
            style["marker"] = marker
            _draw(axes, line, measure, UNITS[against] / 2 ** (order * BESIDE), against, style)
    _dress(axes, rows, measure, against)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def _group(row: Row, rows: Sequence[Row]) -> str:
    """What tells lines of the same scorer from each other."""
    names = [
        name for name in ("model", "task", "tokens") if len({other.get(name) for other in rows}) > 1
    ]
    return ", ".join(f"{row[name]} tokens" if name == "tokens" else row[name] for name in names)


def _draw(
    axes: Axes, line: Sequence[Row], measure: str, unit: float, against: str, style: Any
) -> None:
    x = [row[against] / unit for row in line]
    errors = [
        [0.0 if row.get(bound) is None else abs(row[measure] - row[bound]) for row in line]
        for bound in (f"{measure}_low", f"{measure}_high")
    ]
    y = [row[measure] for row in line]
    axes.errorbar(x, y, yerr=errors, markersize=4.5, capsize=2.5, **style)


def _dress(axes: Axes, rows: Sequence[Row], measure: str, against: str) -> None:
    """Scales, ticks where there are points, names."""
    axes.set_xscale("log", base=2)
    axes.set_xlabel("budget, tokens" if against == "budget" else "KV memory, MiB")
    ticks = sorted({row[against] / UNITS[against] for row in rows if row[against]})
    if len(ticks) <= 8:
        axes.set_xticks(ticks)
    tick = count_of if against == "budget" else "{:,.3g}".format
    axes.xaxis.set_major_formatter(lambda value, _: tick(value))
    axes.minorticks_off()
    if measure == "kl":
        axes.set_yscale("log", subs=[])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylabel(MEASURES[measure])
    rule(axes)
