"""What happened token by token: live tokens, blocks used, blocks freed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvpage.plot.style import KINDS, MUTED, RULE, count_of, drawn, new_figure, rule


class History(Protocol):
    """One entry per decoded token in each list, as in `kvpage.History`."""

    seen_tokens: list[int]
    live_tokens: list[int]
    blocks_used: list[int]
    blocks_freed: list[int]
    num_blocks: list[int]


@drawn
def live_tokens(
    history: History | Sequence[History],
    labels: Sequence[str] | None = None,
    budget: int | None = None,
) -> Figure:
    """Live tokens per row over decoded tokens, beside the seen ones, which a full cache holds.

    history: `kvpage.History`, or several; labels: a name for each of several; budget: a line to
    draw at that many tokens. Raises `ValueError` for a history without a token, or labels that do
    not fit.
    """
    histories, names = _named(history, labels)
    figure = new_figure(7.6, 4.0)
    axes = figure.add_subplot()
    drawn_seen: list[list[int]] = []
    for i, (each, name) in enumerate(zip(histories, names, strict=True)):
        seen = list(each.seen_tokens)
        if seen not in drawn_seen:
            style: Any = {"color": MUTED, "linestyle": (0, (4, 2)), "linewidth": 1.0}
            style["zorder"] = 3  # on top of live tokens that are all there are
            label = "seen tokens: a full cache" if not drawn_seen else "_again"
            axes.plot(_decoded(each), seen, label=label, **style)
            drawn_seen.append(seen)
        label = _label("live tokens", name)
        axes.plot(_decoded(each), each.live_tokens, color=_colour(i), linewidth=1.6, label=label)
    if budget is not None:
        axes.axhline(budget, color=RULE, linewidth=1.0, zorder=1, label=f"budget: {budget:,}")
    axes.set_ylabel("tokens per row")
    _dress(axes, histories)
    axes.set_xlabel("decoded tokens")
    figure.legend(loc="outside upper left", ncols=3)
    return figure


@drawn
def blocks_freed(
    history: History | Sequence[History], labels: Sequence[str] | None = None
) -> Figure:
    """Blocks in use and in the pool, and below them the blocks that compaction has given back.

    history, labels: as for `live_tokens`, and so is what raises.
    """
    histories, names = _named(history, labels)
    figure = new_figure(7.6, 5.0)
    upper, lower = figure.subplots(2, 1, sharex=True)
    for i, (each, name) in enumerate(zip(histories, names, strict=True)):
        x, colour = _decoded(each), _colour(i)
        pool: Any = {"color": colour, "linewidth": 1.0, "linestyle": (0, (1, 1.5))}
        upper.step(
            x, each.num_blocks, where="post", label=_label("blocks of the pool", name), **pool
        )
        used: Any = {"color": colour, "linewidth": 1.6}
        upper.step(x, each.blocks_used, where="post", label=_label("blocks used", name), **used)
        lower.step(x, each.blocks_freed, where="post", **used)
    upper.set_ylabel("blocks")
    lower.set_ylabel("blocks freed so far")
    lower.set_xlabel("decoded tokens")
    for axes in (upper, lower):
        _dress(axes, histories)
    if not any(any(each.blocks_freed) for each in histories):
        lower.set(ylim=(0, 1), yticks=(0, 1))
    figure.legend(loc="outside upper left", ncols=2)
    return figure


def _named(
    history: History | Sequence[History], labels: Sequence[str] | None
) -> tuple[list[History], list[str | None]]:
    several = isinstance(history, Sequence)
    histories: list[History] = list(history) if isinstance(history, Sequence) else [history]
    if not histories or any(len(each.seen_tokens) == 0 for each in histories):
        raise ValueError("history: one with a decoded token expected, got an empty one")
    if labels is None and several and len(histories) > 1:
        raise ValueError(
            f"labels: a name for each of {len(histories)} histories expected, got none"
        )
    if isinstance(labels, str) or (labels is not None and len(labels) != len(histories)):
        raise ValueError(f"labels: {len(histories)} names expected, got {labels!r}")
    return histories, [None] * len(histories) if labels is None else list(labels)


def _label(what: str, name: str | None) -> str:
    return what if name is None else f"{what}, {name}"


def _colour(i: int) -> str:
    return KINDS[i % len(KINDS)]


def _decoded(history: History) -> range:
    return range(1, len(history.seen_tokens) + 1)


def _dress(axes: Axes, histories: Sequence[History]) -> None:
    axes.set_xlim(1, max(2, *(len(each.seen_tokens) for each in histories)))
    axes.set_ylim(bottom=0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: count_of(value))
    rule(axes)
