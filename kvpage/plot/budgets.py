"""Quality against budget or against bytes, a colour per scorer, a line style per model and task."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from kvpage.plot.style import KINDS, MUTED, PAPER, count_of, drawn, new_figure, rule

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

    against: "budget" or "kv_bytes". The full cache is a grey line across, above the others, or,
    against bytes, a ring. Other lines stand a little beside each other, in order, around their
    budget; their points are hollow where nothing was evicted (compactions of 0). What all rows
    share, model and data, is the title. Raises `ValueError` for another `against`, or rows without
    a measure to plot.
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
        if full:  # seen also where others coincide with it
            style |= {"zorder": 4, "linestyle": "--" if dashes == "-" else dashes}
        if full and against == "budget":
            axes.axhline(line[0][measure], **style)
        else:
            if full:
                style |= {"markersize": 10, "markerfacecolor": "none"}
            line = sorted(line, key=lambda row: row[against])
            order = 0.0 if full else bounded.index((group, scorer)) - (len(bounded) - 1) / 2
            style["marker"] = marker
            _draw(axes, line, measure, UNITS[against] / 2 ** (order * BESIDE), against, style)
    _dress(axes, rows, measure, against)
    if any(map(_unbound, rows)):
        label = "hollow: nothing was evicted"
        axes.plot([], [], "o", color=MUTED, markerfacecolor=PAPER, markersize=4.5, label=label)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def _group(row: Row, rows: Sequence[Row]) -> str:
    """What tells lines of the same scorer from each other."""
    names = [
        name for name in ("model", "task", "tokens") if len({other.get(name) for other in rows}) > 1
    ]
    return ", ".join(f"{row[name]} tokens" if name == "tokens" else row[name] for name in names)


def _title(rows: Sequence[Row]) -> str:
    """What all rows share, and how much was measured."""
    counts = ("tokens", "positions", "samples", "problems")
    said = []
    for name in ("model", "task", *counts):
        values = {row.get(name) for row in rows}
        if len(values) == 1 and values != {None}:
            (value,) = values
            said.append(f"{value:,} {name}" if name in counts else str(value))
    return ", ".join(said)


def _unbound(row: Row) -> bool:
    """Whether its budget never bound."""
    return row["budget"] is not None and row.get("compactions") == 0


def _draw(
    axes: Axes, line: Sequence[Row], measure: str, unit: float, against: str, style: Any
) -> None:
    x = [row[against] / unit for row in line]
    errors = [
        [0.0 if row.get(bound) is None else abs(row[measure] - row[bound]) for row in line]
        for bound in (f"{measure}_low", f"{measure}_high")
    ]
    y = [row[measure] for row in line]
    axes.errorbar(x, y, yerr=errors, capsize=2.5, **{"markersize": 4.5} | style)
    hollow = [i for i, row in enumerate(line) if _unbound(row)]
    places = ([x[i] for i in hollow], [y[i] for i in hollow])
    own = {"color": style["color"], "marker": style["marker"], "markersize": 4.5, "zorder": 3}
    if hollow:
        axes.plot(*places, linestyle="none", markerfacecolor=PAPER, **own)


def _dress(axes: Axes, rows: Sequence[Row], measure: str, against: str) -> None:
    """Scales, ticks where there are points, names."""
    axes.set_xscale("log", base=2)
    name = "budget, tokens" if against == "budget" else "KV memory of a text, MiB"
    notes = ["95 % intervals"] * any(row.get(f"{measure}_low") is not None for row in rows)
    if len({row.get("positions") for row in rows}) > 1:
        notes.append("each row behind its own first compaction")
    axes.set_title(_title(rows), fontsize=9.5)
    axes.set_xlabel("\n".join([f"{name} (log scale)", "; ".join(notes)]).strip())
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
    axes.set_ylabel(MEASURES[measure] + " (log scale)" * (measure == "kl"))
    rule(axes)
