"""The block map: every slot of every block of a pool, as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch import Tensor

from kvpage.block_map import EMPTY as NO_TOKEN
from kvpage.block_map import BlockMap
from kvpage.cache import PagedCompactCache
from kvpage.plot.style import (
    EMPTY,
    INK,
    KINDS,
    MUTED,
    ORANGE,
    PAPER,
    QUANTITY,
    RULE,
    count_of,
    drawn,
    new_figure,
)

Source = PagedCompactCache | BlockMap
PANEL_WIDTH, PANEL_ASPECT = {1: 8.0, 2: 5.4, 3: 4.6}, 1.7
"""Inches at most, by the number of panels beside each other; width over height of a panel."""
NARROWEST_PANEL, LARGEST_SLOT = 3.6, 0.13
"""Inches: what a caption needs; of a slot where blocks are few."""


class Tiling(NamedTuple):
    """Blocks are tiles of `height` x `width` slots, `across` beside each other, a gap around."""

    height: int
    width: int
    across: int

    @staticmethod
    def of(maps: Sequence[BlockMap]) -> Tiling:
        """Nearly square tiles, and as many across as make a wide panel of the largest map."""
        size = maps[0].slots.shape[1]
        width = next(w for w in range(math.isqrt(size - 1) + 1, size + 1) if size % w == 0)
        height, count = size // width, max(len(each.slots) for each in maps)
        across = math.ceil(math.sqrt(count * (height + 1) / (width + 1) * PANEL_ASPECT))
        return Tiling(height, width, min(across, count))

    def corner(self, block: int) -> tuple[int, int]:
        """Left and upper edge of a block, in slots."""
        down, across = divmod(block, self.across)
        return across * (self.width + 1), down * (self.height + 1)

    def extent(self, blocks: int) -> tuple[int, int]:
        """Width and height of all, in slots."""
        lines = math.ceil(blocks / self.across)
        return self.across * (self.width + 1), lines * (self.height + 1)

    def spread(self, slots: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """`slots` `[num_blocks, block_size]` where they lie in the picture, NaN in the gaps."""
        lines = math.ceil(len(slots) / self.across)
        tiles = np.full((lines * self.across, self.height + 1, self.width + 1), np.nan)
        tiles[: len(slots), :-1, :-1] = slots.reshape(-1, self.height, self.width)
        by_line = tiles.reshape(lines, self.across, self.height + 1, self.width + 1)
        return by_line.swapaxes(1, 2).reshape(lines * (self.height + 1), -1)


class Page(NamedTuple):
    """Where everything lies, in inches; a slot is `slot` wide, a panel `wide` x `high` slots."""

    slot: float
    wide: int
    high: int
    across: int
    down: int
    caption: float
    legend_columns: int
    legend: float

    @staticmethod
    def of(maps: Sequence[BlockMap], tiling: Tiling, titled: bool, labels: int) -> Page:
        across = len(maps) if len(maps) <= 3 else 2
        wide, high = tiling.extent(max(len(each.slots) for each in maps))
        slot = min(LARGEST_SLOT, PANEL_WIDTH[across] / wide)
        page = Page(
            slot, wide, high, across, math.ceil(len(maps) / across), 0.72 if titled else 0.5, 0, 0
        )
        columns = max(2, int(page.width / 2.1))
        return page._replace(
            legend_columns=columns, legend=0.2 + 0.22 * math.ceil(labels / columns)
        )

    @property
    def pitch(self) -> tuple[float, float]:
        """From a panel to the next one, across and down."""
        wide = max(NARROWEST_PANEL, self.wide * self.slot)
        return wide + 0.3, self.high * self.slot + self.caption + 0.15

    @property
    def width(self) -> float:
        return 0.1 + self.across * self.pitch[0] + 0.85

    @property
    def height(self) -> float:
        return self.down * self.pitch[1] + self.legend

    def panel(self, i: int) -> tuple[float, float, float, float]:
        """Left, bottom, width and height of panel `i` in the figure, each within [0, 1]."""
        down, across = divmod(i, self.across)
        left = 0.1 + across * self.pitch[0]
        top = self.height - down * self.pitch[1] - self.caption
        return self._in_figure(left, top, self.wide * self.slot, self.high * self.slot)

    def bar(self) -> tuple[float, float, float, float]:
        """As `panel`, of the colour bar, beside the first line of panels."""
        left = self.width - 0.95 - max(0.0, NARROWEST_PANEL - self.wide * self.slot)
        return self._in_figure(left, self.height - self.caption, 0.12, self.high * self.slot)

    def _in_figure(
        self, left: float, top: float, width: float, height: float
    ) -> tuple[float, float, float, float]:
        bottom = (top - height) / self.height
        return left / self.width, bottom, width / self.width, height / self.height


@drawn
def block_map(
    source: Source | Sequence[Source],
    layer_idx: int | None = None,
    kv_head: int = 0,
    title: str | Sequence[str] | None = None,
) -> Figure:
    """Every slot of a pool's blocks: live by the token's position, empty, or in a free block.

    source: a cache, a `BlockMap`, or a sequence of them, for panels beside each other in the same
    colours; layer_idx, kv_head: of the caches, as for `BlockMap.of`; title: of the panel, or one
    for each. Blocks in the order of their ids. Outlined are blocks that several tables hold,
    hatched those that only forks hold; a bar tells the row where there are 2 to 7. Above a panel:
    blocks used and free, live slots, and their share of the slots in used blocks.

    Raises `ValueError` for an empty cache, a layer or head there is not, no map, a map without a
    block, titles or block sizes that do not fit, or layer_idx or kv_head with a `BlockMap`.
    """
    sources: Sequence[Source] = source if isinstance(source, Sequence) else [source]
    maps = [_map_of(each, layer_idx, kv_head) for each in sources]
    sizes = {each.slots.shape[1] for each in maps}
    if len(sizes) != 1 or any(len(each.slots) == 0 for each in maps):
        raise ValueError(f"source: maps of blocks of one size expected, got sizes {sorted(sizes)}")
    titles = [title] * len(maps) if title is None or isinstance(title, str) else list(title)
    if len(titles) != len(maps) or (isinstance(title, str) and len(maps) > 1):
        raise ValueError(f"title: one for each of {len(maps)} maps expected, got {title!r}")
    tiling = Tiling.of(maps)
    newest = max(1, *(int(each.slots.max()) for each in maps))
    handles = _legend(maps)
    page = Page.of(maps, tiling, any(titles), len(handles))
    figure = new_figure(page.width, page.height)
    figure.set_layout_engine(None)
    for i, (each, name) in enumerate(zip(maps, titles, strict=True)):
        axes = figure.add_axes(page.panel(i))
        mesh = _panel(axes, each, tiling, newest, 72 * page.slot)
        axes.set(xlim=(0, page.wide), ylim=(page.high, 0))
        axes.set_axis_off()
        _caption(axes, each, name)
    bar = figure.colorbar(mesh, cax=figure.add_axes(page.bar()))
    bar.set_label("token position")
    bar.ax.yaxis.set_major_formatter(lambda value, _: count_of(value))
    bar.outline.set_visible(False)
    figure.legend(handles=handles, loc="lower left", ncols=page.legend_columns, borderaxespad=0.3)
    return figure


def _map_of(source: Source, layer_idx: int | None, kv_head: int) -> BlockMap:
    if isinstance(source, PagedCompactCache):
        return BlockMap.of(source, layer_idx, kv_head)
    if not isinstance(source, BlockMap):
        raise TypeError(f"source: a cache or a BlockMap expected, got {type(source).__name__}")
    if layer_idx is not None or kv_head != 0:
        raise ValueError(
            "layer_idx, kv_head: a cache expected; a BlockMap is of one layer and head"
        )
    return source


def _panel(axes: Axes, block_map: BlockMap, tiling: Tiling, newest: int, points: float) -> Any:
    """Draws the map, a slot `points` wide; returns what the colours are of."""
    slots = block_map.slots.cpu().numpy()
    live = np.where(slots == NO_TOKEN, np.nan, slots.astype(float))
    held = ((block_map.ref_counts > 0) & (block_map.rows >= 0)).cpu().numpy()
    empty = np.where((slots == NO_TOKEN) & held[:, None], 0.0, np.nan)
    line: Any = {"edgecolors": PAPER, "linewidth": min(1.0, 0.14 * points) if points > 3 else 0}
    axes.pcolormesh(_masked(tiling, empty), cmap=ListedColormap([EMPTY]), **line)
    mesh = axes.pcolormesh(_masked(tiling, live), cmap=QUANTITY, vmin=0, vmax=newest, **line)
    thin = min(0.8, 0.3 * points)
    _outline(axes, tiling, _free(block_map), edgecolor=RULE, linewidth=thin, label="free")
    _outline(
        axes, tiling, _of_forks(block_map), edgecolor=MUTED, linewidth=thin, hatch="////",
        label="of forks",
    )  # fmt: skip
    _outline(
        axes, tiling, _shared(block_map), edgecolor=ORANGE, linewidth=min(1.8, 0.6 * points),
        label="shared",
    )  # fmt: skip
    for row in _rows(block_map):
        bars = [
            Rectangle((x, y + tiling.height + 0.2), tiling.width, 0.5)
            for x, y in map(tiling.corner, _indices(block_map.rows == row))
        ]
        axes.add_collection(PatchCollection(bars, facecolor=KINDS[row], label=f"row {row}"))
    return mesh


def _masked(tiling: Tiling, slots: np.ndarray[Any, Any]) -> Any:
    return np.ma.masked_invalid(tiling.spread(slots))


def _outline(axes: Axes, tiling: Tiling, blocks: Tensor, **options: Any) -> None:
    """Outlines of the blocks for which bool `[num_blocks]` is true."""
    boxes = [
        Rectangle(tiling.corner(block), tiling.width, tiling.height) for block in _indices(blocks)
    ]
    if boxes:
        axes.add_collection(PatchCollection(boxes, facecolor="none", **options))


def _indices(blocks: Tensor) -> list[int]:
    return blocks.nonzero().flatten().tolist()


def _free(block_map: BlockMap) -> Tensor:
    return block_map.ref_counts == 0


def _of_forks(block_map: BlockMap) -> Tensor:
    return (block_map.ref_counts > 0) & (block_map.rows < 0)


def _shared(block_map: BlockMap) -> Tensor:
    return (block_map.ref_counts > 1) & (block_map.rows >= 0)


def _rows(block_map: BlockMap) -> range:
    """The rows to tell apart: none where there is one, or more than there are colours."""
    count = int(block_map.rows.max()) + 1
    return range(count if 1 < count <= len(KINDS) else 0)


def _caption(axes: Axes, block_map: BlockMap, title: str | None) -> None:
    total, used = len(block_map.slots), block_map.used_blocks
    forks = int(_of_forks(block_map).sum())
    share = block_map.live_slots / max(1, (used - forks) * block_map.slots.shape[1])
    shared = int(_shared(block_map).sum())
    kinds = [f"{shared:,} shared"] * bool(shared) + [f"{forks:,} by forks alone"] * bool(forks)
    beside = f" ({', '.join(kinds)})" if kinds else ""
    lines = [
        f"{used:,} of {total:,} blocks used{beside}, {total - used:,} free",
        f"{block_map.live_slots:,} live slots: {share:.0%} of those in used blocks",
    ]
    looks: list[tuple[str | None, Any]] = [
        (lines[1], {"color": MUTED, "size": 8.5}),
        (lines[0], {"color": INK, "size": 10.5}),
        (title, {"color": INK, "size": 12, "weight": "bold"}),
    ]
    for i, (text, look) in enumerate(looks):
        if text:
            axes.annotate(
                text, (0, 1), (0, 4 + 14 * i), xycoords="axes fraction",
                textcoords="offset points", va="bottom", parse_math=False, **look,
            )  # fmt: skip


def _legend(maps: Sequence[BlockMap]) -> list[Patch]:
    handles = [
        Patch(facecolor=EMPTY, label="empty slot in a used block"),
        Patch(facecolor="none", edgecolor=RULE, label="free block"),
    ]
    if any(_shared(each).any() for each in maps):
        handles.append(Patch(facecolor="none", edgecolor=ORANGE, label="shared block"))
    if any(_of_forks(each).any() for each in maps):
        handles.append(
            Patch(facecolor="none", edgecolor=MUTED, hatch="////", label="held by forks alone")
        )
    rows = max((_rows(each) for each in maps), key=len)
    return [*handles, *(Patch(facecolor=KINDS[row], label=f"row {row}") for row in rows)]
