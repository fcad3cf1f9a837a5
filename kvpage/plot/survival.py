"""Which tokens survive, in every layer and KV head, with the text they are of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from kvpage.cache import PagedCompactCache
from kvpage.plot.style import BLUE, INK, MUTED, PAPER, drawn, new_figure, rule

NAMED_COLUMNS = 80
"""Tokens whose text fits below their columns."""
SPAN = 12
"""Tokens of a span of text."""
SPANS, SPAN_CHARACTERS = 6, 62
KEPT, EVICTED = BLUE, "#eef1f4"
CELLS = 1000
"""Across the heat map: as many as there are pixels for."""

Array = np.ndarray[Any, Any]


@drawn
def survivors(
    cache: PagedCompactCache,
    tokens: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    row: int = 0,
    title: str | None = None,
) -> Figure:
    """A heat map of the token positions that live, one line per layer and KV head.

    Of more than 1,000 tokens neighbours share a cell, which shows the mean. Below it the share of
    the heads drawn that keep each token, and the text: at the columns for up to 80 tokens, else as
    the spans of 12 tokens that most heads keep and that most evict, those that every head keeps in
    full left out.

    tokens: text of each token of the row, in order, without pads; those after the last one seen
    are left out; layers: of full attention, default all; row: of the batch. Raises `ValueError`
    for an empty cache, a layer or row there is not, or fewer tokens than were seen.
    """
    if isinstance(tokens, str):
        raise TypeError("tokens: a sequence of strings expected, one a token, got one string")
    chosen = cache.full_layers or [0] if layers is None else list(layers)
    if not chosen:
        raise ValueError("layers: at least one expected, got none")
    kept, heads = survival(cache, chosen, row)
    columns = kept.shape[1]
    if tokens is not None and len(tokens) < columns:
        raise ValueError(f"tokens: {columns} expected, as the row has seen, got {len(tokens)}")
    named = tokens is not None and columns <= NAMED_COLUMNS
    heights = [min(5.0, max(1.2, 0.16 * len(kept))), 0.8]
    heights += [1.5] if tokens is not None and not named else []
    figure = new_figure(max(6.0, 0.13 * columns) if named else 10.5, sum(heights) + 1.2)
    grid = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False).ravel()
    _draw_map(grid[0], kept, chosen, heads)
    text = f"{int(kept[0].sum()):,} of {columns:,} tokens live in each of {len(kept)} KV heads"
    text += f" of {len(chosen)} layers" + (f", row {row}" if cache.batch_size > 1 else "")
    grid[0].set_title(title or text, parse_math=False)
    grid[0].sharex(grid[1])
    grid[0].tick_params(labelbottom=False)
    share = kept.mean(axis=0)
    _draw_share(grid[1], share)
    if tokens is not None and named:
        words = [printable(token) for token in tokens[:columns]]
        grid[1].set_xticks(range(columns), words, parse_math=False)
        grid[1].tick_params(axis="x", labelrotation=90, labelsize=7.5)
        grid[1].set_xlabel("")
    elif tokens is not None:
        _draw_spans(grid[2], share, tokens)
    return figure


def survival(cache: PagedCompactCache, layers: Sequence[int], row: int) -> tuple[Array, list[int]]:
    """bool `[heads of all layers, seen]`, which positions each head keeps, and heads per layer."""
    found: list[Array] = []
    for layer_idx in layers:
        live = cache.live_positions(layer_idx).cpu()
        if not 0 <= row < len(live):
            raise ValueError(f"row: within [0, {len(live)}) expected, got {row}")
        found.append(live[row].numpy())
    columns = max(int(positions.max()) for positions in found) + 1
    kept = []
    for positions in found:
        flags = np.zeros((len(positions), columns + 1), dtype=bool)
        np.put_along_axis(flags, np.where(positions < 0, columns, positions), True, axis=1)
        kept.append(flags[:, :columns])
    return np.concatenate(kept), [len(positions) for positions in found]


def _draw_map(axes: Axes, kept: Array, layers: Sequence[int], heads: Sequence[int]) -> None:
    together = math.ceil(kept.shape[1] / CELLS)
    edges = np.arange(0, kept.shape[1], together)
    shares = np.add.reduceat(kept.astype(float), edges, axis=1)
    shares /= np.diff([*edges, kept.shape[1]])
    axes.imshow(
        shares, cmap=LinearSegmentedColormap.from_list("kept", [EVICTED, KEPT]), vmin=0, vmax=1,
        aspect="auto", interpolation="nearest",
        extent=(-0.5, len(edges) * together - 0.5, len(kept) - 0.5, -0.5),
    )  # fmt: skip
    starts = np.cumsum([0, *heads])
    many = len(layers) > 12
    for start in starts[1:-1]:
        axes.axhline(start - 0.5, color=PAPER, linewidth=0.4 if many else 1.2)
    every = max(1, round(len(layers) / 12))
    middles = (starts[:-1] + starts[1:] - 1) / 2
    axes.set_yticks(middles[::every], [f"{layer}" for layer in list(layers)[::every]])
    axes.set_ylabel("layer")
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _draw_share(axes: Axes, share: Array) -> None:
    edges = np.arange(len(share) + 1) - 0.5
    axes.stairs(share, edges, fill=True, color=KEPT)
    axes.set(xlim=(-0.5, len(share) - 0.5), ylim=(0, 1), xlabel="token position")
    axes.set_ylabel("share of\nheads")
    axes.set_yticks([0, 0.5, 1], ["0", "", "1"])
    rule(axes, axis="y")


def spans(share: Array) -> tuple[list[tuple[int, int, float]], list[tuple[int, int, float]]]:
    """The spans `(start, stop, mean share)` kept by most heads, and those kept by fewest."""
    starts = range(0, len(share), SPAN)
    every = [(at, min(at + SPAN, len(share)), float(share[at : at + SPAN].mean())) for at in starts]
    some = sorted((span for span in every if span[2] < 1), key=lambda span: -span[2])
    count = min(SPANS, len(some) // 2)
    return some[:count], some[::-1][:count]


def _draw_spans(axes: Axes, share: Array, tokens: Sequence[str]) -> None:
    axes.set_axis_off()
    most, fewest = spans(share)
    for x, head, found in (
        (0.0, "Kept by most heads", most),
        (0.5, "Kept by fewest heads", fewest),
    ):
        look: Any = {"transform": axes.transAxes, "va": "top", "parse_math": False}
        axes.text(x, 1, head, weight="bold", color=INK, size=9, **look)
        for i, (start, stop, mean) in enumerate(found):
            y = 1 - (i + 1.2) / (SPANS + 1)
            axes.text(x, y, f"{start}–{stop - 1}", size=8, color=MUTED, **look)
            axes.text(x + 0.075, y, f"{mean:.0%}", size=8, color=MUTED, **look)
            text = printable("".join(tokens[start:stop])).strip()
            short = text if len(text) <= SPAN_CHARACTERS else text[: SPAN_CHARACTERS - 1] + "…"
            axes.text(x + 0.12, y, short, size=8, color=INK, **look)


def printable(text: str) -> str:
    """`text` on one line: breaks and tabs as signs, other controls as a dot."""
    signs = {"\n": "↵", "\t": "→"}
    return "".join(signs.get(c, c if c.isprintable() else "·") for c in text)
