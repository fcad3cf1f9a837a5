"""Draws idea.svg, the README's figure: what eviction leaves behind, and what compaction gives back.

python docs/figures/make_idea.py
"""

import random
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

NUM_BLOCKS, BLOCK_SIZE, BUDGET = 12, 16, 64
NUM_SLOTS = NUM_BLOCKS * BLOCK_SIZE
SINKS, RECENT, SEED = 4, 16, 3

WIDTH, HEIGHT = 860, 382
CELLS_ACROSS, CELL, CELL_GAP, PADDING, BLOCK_GAP = 4, 9.5, 1.5, 3.5, 5.0
GRID = CELLS_ACROSS * (CELL + CELL_GAP) - CELL_GAP
BLOCK = GRID + 2 * PADDING
CAPTION_LEFT, BLOCKS_LEFT = 22.0, 189.0
FULL_TOP, EVICTED_TOP, COMPACTED_TOP, LEGEND_TOP = 36.0, 122.0, 248.0, 350.0
LEGEND_BAR = 96.0

PALETTE = ((47, 129, 247), (130, 92, 240), (226, 76, 150), (240, 146, 40))
"""RGB from the first token to the last; of middling lightness, for light and dark pages."""

STYLE = """
  text { font: 12px system-ui, -apple-system, "Segoe UI", "Liberation Sans", sans-serif; }
  text, .count { fill: #59636e; }
  .name { font-size: 15px; font-weight: 600; fill: #1f2328; }
  .result { font-weight: 600; fill: #1f2328; }
  .count { font-size: 10px; }
  .middle { text-anchor: middle; }
  .card { fill: #ffffff; stroke: #d1d9e0; }
  .block { fill: #eff2f5; stroke: #b7c0ca; }
  .free { fill: none; stroke: #b7c0ca; stroke-dasharray: 3 3; }
  .going { opacity: .2; }
  .ribbon { opacity: .3; }
  .bracket { fill: none; stroke: #818b98; }
  @media (prefers-color-scheme: dark) {
    text, .count { fill: #9198a1; }
    .name, .result { fill: #f0f6fc; }
    .card { fill: #0d1117; stroke: #3d444d; }
    .block { fill: #1c2128; stroke: #4a525c; }
    .free { stroke: #4a525c; }
    .going { opacity: .27; }
  }
"""

Slots = list[int | None]
"""The token position in each slot of the twelve blocks; `None` where there is no live token."""


def draw() -> str:
    survivors = choose_survivors()
    full: Slots = list(range(NUM_SLOTS))
    evicted: Slots = [position if position in survivors else None for position in full]
    compacted: Slots = [*survivors, *[None] * (NUM_SLOTS - len(survivors))]
    to_keep = f"{len(survivors)} to keep, {NUM_SLOTS - len(survivors)} to evict"
    body = [
        *caption(FULL_TOP, "Full", full, to_keep),
        *row(FULL_TOP, full, survivors, count_y=FULL_TOP - 6),
        *caption(EVICTED_TOP, "Evict only", evicted, freed(evicted), "result"),
        *row(EVICTED_TOP, evicted, survivors, count_y=EVICTED_TOP - 6),
        *ribbons(survivors),
        *slide_caption(),
        *caption(COMPACTED_TOP, "Compact", compacted, freed(compacted), "result"),
        *row(COMPACTED_TOP, compacted, survivors, count_y=COMPACTED_TOP + BLOCK + 14),
        *pool_bracket(len(live_per_block(compacted)) - num_freed(compacted)),
        *legend(),
    ]
    summary = f"evicting alone: {freed(evicted)}; evicting and compacting: {freed(compacted)}"
    return "\n".join([*head(summary), *body, "</svg>", ""])


def choose_survivors() -> list[int]:
    """Positions that stay, in token order: sinks, the recent, and a random choice in between."""
    candidates = range(SINKS, NUM_SLOTS - RECENT)
    chosen = random.Random(SEED).sample(candidates, BUDGET - SINKS - RECENT)
    return sorted([*range(SINKS), *chosen, *range(NUM_SLOTS - RECENT, NUM_SLOTS)])


def live_per_block(slots: Slots) -> list[int]:
    starts = range(0, NUM_SLOTS, BLOCK_SIZE)
    return [sum(slot is not None for slot in slots[at : at + BLOCK_SIZE]) for at in starts]


def num_freed(slots: Slots) -> int:
    return live_per_block(slots).count(0)


def freed(slots: Slots) -> str:
    return f"{num_freed(slots)} of {NUM_BLOCKS} blocks freed"


def head(summary: str) -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img" aria-labelledby="title summary">'
    )
    yield '<title id="title">Eviction leaves holes; compaction gives blocks back</title>'
    yield f'<desc id="summary">Of the blocks of a full KV cache, {summary}.</desc>'
    yield f"<style>{STYLE}</style>"
    yield (f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>')


def caption(top: float, name: str, slots: Slots, last: str, last_class: str = "") -> Iterator[str]:
    live = live_per_block(slots)
    held = f"{sum(live)} tokens in {NUM_BLOCKS - num_freed(slots)} blocks"
    yield text(CAPTION_LEFT, top + 13, name, "name")
    yield text(CAPTION_LEFT, top + 31, held)
    yield text(CAPTION_LEFT, top + 48, last, last_class)


def row(top: float, slots: Slots, survivors: list[int], count_y: float) -> Iterator[str]:
    for block, live in enumerate(live_per_block(slots)):
        left = block_left(block)
        style = "block" if live else "free"
        yield f'<rect class="{style}" {box(left, top, BLOCK)} rx="4"/>'
        if live:
            yield text(left + BLOCK / 2, count_y, str(live), "count middle")
    for slot, position in enumerate(slots):
        if position is not None:
            yield cell(top, slot, position, "" if position in survivors else ' class="going"')


def cell(top: float, slot: int, position: int, attribute: str) -> str:
    block, offset = divmod(slot, BLOCK_SIZE)
    down, across = divmod(offset, CELLS_ACROSS)
    left = block_left(block) + PADDING + across * (CELL + CELL_GAP)
    y = top + PADDING + down * (CELL + CELL_GAP)
    return f'<rect{attribute} {box(left, y, CELL)} rx="2" fill="{colour(position)}"/>'


def ribbons(survivors: list[int]) -> Iterator[str]:
    """From each block to where its survivors go; as wide as they are many, at either end."""
    live = live_per_block([p if p in survivors else None for p in range(NUM_SLOTS)])
    slot_width = GRID / BLOCK_SIZE
    upper, lower = EVICTED_TOP + BLOCK + 2, COMPACTED_TOP - 2
    middle = (upper + lower) / 2
    moves = [(p // BLOCK_SIZE, slot // BLOCK_SIZE, slot) for slot, p in enumerate(survivors)]
    used = [0] * NUM_BLOCKS
    for (source, target), group in groupby(moves, key=lambda move: move[:2]):
        slots = [slot for _, _, slot in group]
        width = len(slots) * slot_width
        centred = (BLOCK - live[source] * slot_width) / 2
        x = block_left(source) + centred + used[source] * slot_width
        to = block_left(target) + PADDING + slots[0] % BLOCK_SIZE * slot_width
        used[source] += len(slots)
        path = (
            f"M{x:.2f} {upper}C{x:.2f} {middle} {to:.2f} {middle} {to:.2f} {lower}"
            f"h{width:.2f}C{to + width:.2f} {middle} {x + width:.2f} {middle} "
            f"{x + width:.2f} {upper}z"
        )
        fill = colour(survivors[slots[len(slots) // 2]])
        yield f'<path class="ribbon" d="{path}" fill="{fill}"/>'


def slide_caption() -> Iterator[str]:
    y = (EVICTED_TOP + BLOCK + COMPACTED_TOP) / 2
    yield text(CAPTION_LEFT, y - 4, "survivors slide forward,")
    yield text(CAPTION_LEFT, y + 12, "in token order")


def pool_bracket(first_free: int) -> Iterator[str]:
    left, right = block_left(first_free), block_left(NUM_BLOCKS - 1) + BLOCK
    y = COMPACTED_TOP + BLOCK + 6
    yield f'<path class="bracket" d="M{left} {y}v6H{right}v-6"/>'
    label = "back in the pool, for any sequence to use"
    yield text((left + right) / 2, y + 22, label, "middle")


def legend() -> Iterator[str]:
    y, baseline, step = LEGEND_TOP, LEGEND_TOP + CELL, LEGEND_BAR / NUM_BLOCKS
    for block in range(NUM_BLOCKS):
        fill = colour(block * (NUM_SLOTS - 1) // (NUM_BLOCKS - 1))
        at = BLOCKS_LEFT + block * step
        yield f'<rect x="{at}" y="{y}" width="{step}" height="{CELL}" fill="{fill}"/>'
    yield text(BLOCKS_LEFT + LEGEND_BAR + 8, baseline, "first to last token")
    x = BLOCKS_LEFT + 246
    yield f'<rect class="going" {box(x, y, CELL)} rx="2" fill="{colour(NUM_SLOTS // 2)}"/>'
    yield text(x + CELL + 7, baseline, "to be evicted")
    x = BLOCKS_LEFT + 376
    yield f'<rect class="free" {box(x, y, CELL)} rx="2"/>'
    yield text(x + CELL + 7, baseline, "free")
    x = BLOCKS_LEFT + 458
    yield text(x, baseline, str(BLOCK_SIZE), "count")
    yield text(x + 19, baseline, "live tokens in the block")


def block_left(block: int) -> float:
    return BLOCKS_LEFT + block * (BLOCK + BLOCK_GAP)


def box(x: float, y: float, side: float) -> str:
    return f'x="{x}" y="{y}" width="{side}" height="{side}"'


def text(x: float, y: float, content: str, style: str = "") -> str:
    attribute = f' class="{style}"' if style else ""
    return f'<text{attribute} x="{x}" y="{y}">{content}</text>'


def colour(position: int) -> str:
    """The palette at a token's position, interpolated."""
    stop, fraction = divmod(position / (NUM_SLOTS - 1) * (len(PALETTE) - 1), 1)
    low = PALETTE[int(stop)]
    high = PALETTE[min(int(stop) + 1, len(PALETTE) - 1)]
    mixed = (round(a + (b - a) * fraction) for a, b in zip(low, high, strict=True))
    return "#{:02x}{:02x}{:02x}".format(*mixed)


if __name__ == "__main__":
    Path(__file__).with_name("idea.svg").write_text(draw(), encoding="utf-8")
