"""Queries before and after RoPE, band by band: clusters, and what rotation smears them into."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from kvpage.cache import PagedCompactCache
from kvpage.calibration import CalibratedStatistics
from kvpage.plot.style import (
    BLUE,
    EMPTY,
    INK,
    MUTED,
    ORANGE,
    PAPER,
    QUANTITY,
    drawn,
    new_figure,
    rule,
)
from kvpage.rope import Rope
from kvpage.summaries import Statistics

WRITTEN_CELLS = 400
"""Heads of all layers whose number is written into the heat map."""


@drawn
def centroids(
    source: PagedCompactCache | Statistics,
    layer_idx: int | None = None,
    head: int = 0,
    band: int | None = None,
    row: int = 0,
) -> Figure:
    """A band of a head's sampled queries before RoPE and after, and how tight each band is.

    A point is a query: its band as a complex number (design: `z_f = q[f] + i q[f + F]`), coloured
    by its position. The bar is the mean of them, the centroid. The mean resultant length
    `R_f = |mean z_f| / mean |z_f|`, of the same queries, is 1 where all look the same way; right
    it stands for every band.

    source: a cache whose scorer samples queries, as the default does, or what its `statistics`
    returned; layer_idx: of the cache, default its first layer of full attention; head: a query
    head; band: default, of the bands that turn at least once over the sampled positions (all, if
    none does), that with the largest centroid; row: of the batch.

    Raises `ValueError` for an empty cache, statistics without a sample or RoPE, layer_idx with
    `Statistics`, or a layer, head, band or row there is not.
    """
    statistics, where = _statistics_of(source, layer_idx)
    before, after, positions = sampled_bands(statistics, head, row)
    rope = statistics.rope
    if band is None:
        band = telling_band(before, positions, rope)
    _within("band", band, rope.bands)
    figure = new_figure(11.0, 4.2)
    left, middle, right = figure.subplot_mosaic(
        [["before", "after", "bands"]],
        per_subplot_kw={("before", "after"): {"projection": "polar"}},
        width_ratios=[1, 1, 1.25],
    ).values()
    reach = 1.05 * float(max(np.abs(before[:, band]).max(), np.abs(after[:, band]).max()))
    for axes, name, bands in ((left, "Before RoPE", before), (middle, "After RoPE", after)):
        points = _draw_band(axes, bands[:, band], positions, reach)
        axes.set_title(f"{name}: R = {resultant(bands)[band]:.2f}", loc="center", pad=12)
    bar = figure.colorbar(
        points, ax=[left, middle], location="bottom", aspect=45, fraction=0.05, pad=0.04
    )
    bar.set_label("position of the query")
    bar.outline.set_visible(False)
    _draw_lengths(right, resultant(before), resultant(after), band)
    turn = 2 * math.pi / float(rope.inv_freq[band])
    figure.suptitle(
        f"{where}query head {head}, band {band} (turns once in {turn:,.0f} tokens), "
        f"{len(positions)} sampled queries",
        x=0.01, ha="left", size=11, weight="bold",
    )  # fmt: skip
    return figure


@drawn
def resultant_lengths(source: PagedCompactCache | CalibratedStatistics, row: int = 0) -> Figure:
    """A heat map of every query head's mean resultant length, 1 where its queries look one way.

    Of all bands together, each weighed by its mean magnitude: `sum |mean z_f| / sum mean |z_f|`.
    Grey where nothing is known. source: a cache whose scorer has statistics, or calibrated ones;
    row: of the cache's batch. Raises `ValueError` for an empty cache or one without statistics,
    and for a row there is not.
    """
    lengths, layers = head_lengths(source, row)
    figure = new_figure(
        max(4.2, 0.42 * lengths.shape[1] + 1.8), min(9.0, max(2.4, 0.22 * len(layers) + 1.3))
    )
    axes = figure.add_subplot()
    axes.set_facecolor(EMPTY)
    known = lengths[~np.isnan(lengths)]
    lowest = math.floor(10 * known.min(initial=1.0)) / 10
    image = axes.imshow(
        np.ma.masked_invalid(lengths), cmap=QUANTITY, vmin=lowest, vmax=1, aspect="auto",
        interpolation="nearest",
    )  # fmt: skip
    every = max(1, math.ceil(len(layers) / 16))
    axes.set_yticks(range(0, len(layers), every), [f"{i}" for i in layers[::every]])
    step = max(1, math.ceil(lengths.shape[1] / 16))
    axes.set_xticks(range(0, lengths.shape[1], step))
    axes.set(xlabel="query head", ylabel="layer")
    axes.set_title("Mean resultant length of queries before RoPE")
    axes.tick_params(length=0)
    if lengths.size <= WRITTEN_CELLS:
        for (y, x), length in np.ndenumerate(lengths):
            if not np.isnan(length):
                ink = PAPER if length < (lowest + 1) / 2 else INK
                axes.text(x, y, f"{length:.2f}", ha="center", va="center", size=7.5, color=ink)
    figure.colorbar(image, ax=axes, aspect=25, pad=0.02).outline.set_visible(False)
    return figure


def sampled_bands(statistics: Statistics, head: int, row: int) -> tuple[Any, Any, Any]:
    """complex128 `[S, F]`, bands of the sampled queries before and after RoPE, in text order, and
    their positions int64 `[S]`."""
    sample, rope = statistics.sample, statistics.rope
    if sample is None:
        raise ValueError("source: a scorer that samples queries (scorer='sampled') expected")
    if rope.bands == 0:
        raise ValueError("layer_idx: a layer with RoPE expected")
    _within("row", row, sample.queries.shape[0])
    _within("head", head, sample.queries.shape[2])
    held = sample.held[row]
    positions = sample.positions[row][held].cpu()
    positions, order = positions.sort()
    queries = sample.queries[row][held, head].cpu().double()[order]
    after = rope.rotated(queries[None, None], positions[None])[0, 0]
    return _complex(rope, queries), _complex(rope, after), positions.numpy()


def telling_band(before: Any, positions: Any, rope: Rope) -> int:
    """Of the bands that turn at least once over `positions`, or all, the largest centroid's."""
    length = np.abs(before.mean(axis=0))
    turns = (positions[-1] - positions[0]) * rope.inv_freq.cpu().numpy() / (2 * math.pi)
    return int(np.where(turns >= min(1.0, turns.max()), length, -1).argmax())


def resultant(bands: Any) -> Any:
    """Mean resultant length `[F]` of complex `bands` `[S, F]`."""
    return np.abs(bands.mean(axis=0)) / np.maximum(np.abs(bands).mean(axis=0), 1e-300)


def head_lengths(
    source: PagedCompactCache | CalibratedStatistics, row: int
) -> tuple[Any, list[int]]:
    """float64 `[layers, H]`, NaN where nothing is known, and the indices of the layers."""
    found: dict[int, Tensor] = {}
    if isinstance(source, CalibratedStatistics):
        if row != 0:
            raise ValueError(f"row: 0 expected, calibrated statistics have no rows, got {row}")
        for i, layer in source.layers.items():
            magnitude = layer.query_magnitude_total.sum(dim=-1)
            length = layer.rope.magnitude(layer.query_total).sum(dim=-1) / magnitude
            found[i] = length.masked_fill(~layer.heads, torch.nan)
    elif isinstance(source, PagedCompactCache):
        for i in source.full_layers or [0]:
            statistics, _ = _statistics_of(source, i)
            _within("row", row, statistics.query_mean.shape[0])
            total = statistics.rope.magnitude(statistics.query_mean[row].cpu().double())
            magnitude = statistics.query_magnitude[row].cpu().double()
            found[i] = total.sum(dim=-1) / magnitude.sum(dim=-1)
    else:
        raise TypeError(f"source: a cache or calibrated statistics expected, got {_kind(source)}")
    table = np.full((len(found), max(len(length) for length in found.values())), np.nan)
    for line, length in zip(table, found.values(), strict=True):
        line[: len(length)] = length.numpy()
    return table, list(found)


def _statistics_of(source: Any, layer_idx: int | None) -> tuple[Statistics, str]:
    """The statistics of a layer, and how to name it."""
    if isinstance(source, Statistics):
        if layer_idx is not None:
            raise ValueError("layer_idx: a cache expected; Statistics are of one layer already")
        return source, ""
    if not isinstance(source, PagedCompactCache):
        raise TypeError(f"source: a cache or its statistics expected, got {_kind(source)}")
    layers = source.full_layers
    if source.get_seq_length() == 0:
        raise ValueError("source: a cache with tokens in it expected, nothing was cached yet")
    index = next(iter(layers), 0) if layer_idx is None else layer_idx
    if index not in layers:
        raise ValueError(f"layer_idx: a layer of full attention ({layers}), got {index}")
    return source.statistics(index), f"Layer {index}, "


def _kind(source: object) -> str:
    return type(source).__name__


def _within(name: str, index: int, count: int) -> None:
    if not 0 <= index < count:
        raise ValueError(f"{name}: within [0, {count}) expected, got {index}")


def _complex(rope: Rope, vectors: Tensor) -> Any:
    real, imaginary, _ = rope.parts(vectors)
    return torch.complex(real, imaginary).numpy()


def _draw_band(axes: Any, band: Any, positions: Any, reach: float) -> Any:
    points = axes.scatter(
        np.angle(band), np.abs(band), c=positions, cmap=QUANTITY, s=16, alpha=0.85, linewidths=0
    )
    mean = band.mean()
    bar: Any = {"color": ORANGE, "linewidth": 2.6, "solid_capstyle": "round", "zorder": 3}
    axes.plot([np.angle(mean)] * 2, [0, np.abs(mean)], label="centroid", **bar)
    axes.plot([np.angle(mean)], [np.abs(mean)], "o", color=ORANGE, markersize=6, zorder=4)
    axes.set_ylim(0, reach)
    axes.set_xticks(np.arange(0, 2 * np.pi, np.pi / 2), ["", "", "", ""])
    axes.yaxis.set_major_locator(MaxNLocator(3))
    axes.set_rlabel_position(90)
    axes.tick_params(axis="y", labelsize=7, labelcolor=MUTED)
    axes.grid(color=MUTED, alpha=0.25, linewidth=0.6)
    axes.spines["polar"].set_visible(False)
    return points


def _draw_lengths(axes: Axes, before: Any, after: Any, band: int) -> None:
    x = range(len(before))
    mark: Any = {"linewidth": 1.4, "marker": "o", "markersize": 2.5}
    axes.axvline(band, color=ORANGE, linewidth=1.0, label="the band shown")
    axes.plot(x, before, color=BLUE, label="before RoPE", **mark)
    axes.plot(x, after, color=MUTED, label="after RoPE", **mark)
    axes.set(ylim=(0, 1.02), xlabel="frequency band, from fast to slow")
    axes.set_ylabel("mean resultant length R")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2)
    rule(axes)
