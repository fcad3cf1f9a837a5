"""The block map: every slot of every block of a pool, as a picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PatchCollection
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
    drawn,
    new_figure,
)

Source = PagedCompactCache | BlockMap
PANEL_WIDTH, PANEL_ASPECT = {1: 8.0, 2: 5.6}, 1.7
"""Inches, by the number of panels beside each other; width over height of a panel at most."""


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
    across = len(maps) if len(maps) <= 3 else 2
    down = math.ceil(len(maps) / across)
    panel = PANEL_WIDTH.get(across, 4.6)
    wide, high = tiling.extent(max(len(each.slots) for each in maps))
    height = max(1.0, panel * high / wide)
    figure = new_figure(across * panel + 0.9, down * (height + 0.75) + 0.5)
    grid = figure.subplots(down, across, squeeze=False).ravel()
    newest = max(1, *(int(each.slots.max()) for each in maps))
    for axes, each, name in zip(grid, maps, titles, strict=False):
        mesh = _panel(axes, each, tiling, newest, 72 * panel / wide)
        _caption(axes, each, name)
    for axes in grid[len(maps) :]:
        axes.set_axis_off()
    bar = figure.colorbar(mesh, ax=list(grid), aspect=25, fraction=0.05, pad=0.02)
    bar.set_label("token position")
    bar.outline.set_visible(False)
    handles = _legend(maps)
    figure.legend(handles=handles, loc="outside lower left", ncols=min(len(handles), 6))
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
    line: Any = {"edgecolors": PAPER, "linewidth": min(1.0, 0.14 * points), "antialiased": True}
    axes.pcolormesh(_masked(tiling, empty), cmap=_one_colour(EMPTY), **line)
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
    wide, high = tiling.extent(len(slots))
    axes.set(xlim=(-0.3, wide - 0.7), ylim=(high - 0.2, -0.3), aspect="equal", anchor="NW")
    axes.set_axis_off()
    return mesh


def _masked(tiling: Tiling, slots: np.ndarray[Any, Any]) -> Any:
    return np.ma.masked_invalid(tiling.spread(slots))


def _one_colour(colour: str) -> Any:
    from matplotlib.colors import ListedColormap

    return ListedColormap([colour])


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
    beside = f" ({forks:,} by forks alone)" if forks else ""
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
    if shared := sum(int(_shared(each).sum()) for each in maps):
        handles.append(
            Patch(facecolor="none", edgecolor=ORANGE, label=f"shared block ({shared:,})")
        )
    if any(_of_forks(each).any() for each in maps):
        handles.append(
            Patch(facecolor="none", edgecolor=MUTED, hatch="////", label="held by forks alone")
        )
    rows = max((_rows(each) for each in maps), key=len)
    return [*handles, *(Patch(facecolor=KINDS[row], label=f"row {row}") for row in rows)]
