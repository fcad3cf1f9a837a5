"""How every picture looks: dark ink on white paper of its own, so that any page may surround it.

The colours are told apart by colour-blind eyes: viridis for quantities, Okabe and Ito's palette
(jfly.uni-koeln.de/color, 2002) for kinds.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any, ParamSpec

import matplotlib
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

PAPER, INK, MUTED, RULE, EMPTY = "#ffffff", "#1f2328", "#59636e", "#b7c0ca", "#d3d9df"
BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
KINDS = (BLUE, ORANGE, GREEN, PURPLE, "#E69F00", "#56B4E9", "#000000")
QUANTITY = "viridis"

LOOK = {
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": RULE,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "font.size": 9.5,
    "legend.frameon": False,
}
FONTS = ("font.family", "font.sans-serif", "font.monospace")
"""Settings of the user's that count: which fonts have the characters of their texts."""

P = ParamSpec("P")


class Picture(Figure):
    """A `Figure` that a notebook shows whether or not pyplot was imported there.

    In 256 colours, so that the notebook stays small.
    """

    def _repr_png_(self) -> tuple[bytes, dict[str, int]]:
        drawing, buffer = io.BytesIO(), io.BytesIO()
        self.savefig(drawing, format="png", dpi=100, facecolor=PAPER)
        image = Image.open(drawing).convert("RGB")
        few = image.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        few.save(buffer, format="png", optimize=True)
        width, height = (round(96 * inches) for inches in self.get_size_inches())
        return buffer.getvalue(), {"width": width, "height": height}


def drawn(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Have `draw` draw in the look of this file, whatever matplotlib's settings are."""

    @functools.wraps(draw)
    def in_style(*args: P.args, **kwargs: P.kwargs) -> Figure:
        settings: Any = matplotlib.rcParams
        fonts = {name: settings[name] for name in FONTS}
        with style.context(["default", LOOK | fonts]):
            figure = draw(*args, **kwargs)
            for axes in figure.axes:
                _fix_ticks(axes)
        return figure

    return in_style


def _fix_ticks(axes: Axes) -> None:
    """Ticks are made when they are drawn, by the settings of then."""
    for axis in (axes.xaxis, axes.yaxis):
        size: Any = {} if "labelsize" in axis.get_tick_params() else {"labelsize": 8.5}
        axis.set_tick_params(color=MUTED, labelcolor=INK, width=0.8, **size)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches, laid out as it is drawn: for your own picture."""
    return Picture(figsize=(width, height), layout="constrained")


def rule(axes: Axes, **options: Any) -> None:
    """Faint lines across `axes`."""
    axes.grid(alpha=0.4, linewidth=0.6, **options)
    axes.set_axisbelow(True)


def count_of(count: float) -> str:
    """A number as tick labels have it: 1,024."""
    return f"{count:,.4g}" if count < 10_000 else f"{count:,.0f}"
