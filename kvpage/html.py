"""HTML that notebooks show, as plain strings; knows neither tensors nor caches.

Right on light and on dark pages without asking which: text takes the page's colour (JupyterLab's
and VS Code's variables where there are any), lines and grounds are half transparent, and the one
accent has contrast on both. A `prefers-color-scheme` rule would be wrong wherever the notebook's
theme is not the system's. Styles are inline: they can't leak, and outlive a notebook's sanitiser.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby

TEXT = "var(--jp-ui-font-color1,var(--vscode-editor-foreground,inherit))"
FONT = "var(--jp-ui-font-family,var(--vscode-font-family,system-ui,sans-serif))"
MONO = "var(--jp-code-font-family,var(--vscode-editor-font-family,ui-monospace,monospace))"
ACCENT = "#2a9d8f"
LINE = "rgba(128,128,128,.35)"
GROUND = "rgba(128,128,128,.12)"
CELLS = 96
"""Most cells in a strip of blocks."""
LEVELS = 8
"""Shades between a token that lives nowhere and one that lives everywhere."""
FAINTEST = 0.36
"""Opacity of a token that lives nowhere."""

USED = f"background:{ACCENT}"
FREE = f"box-shadow:inset 0 0 0 1px {ACCENT}"
FREED = "background:rgba(128,128,128,.4)"


def panel(*parts: str) -> str:
    """`parts` of HTML one below the other, in the colours of the page."""
    return f'<div style="color:{TEXT};font:13px/1.5 {FONT};max-width:60em">{"".join(parts)}</div>'


def heading(title: str, *notes: str) -> str:
    """A line with `title` in bold and `notes` behind it."""
    rest = "".join(f' <span style="opacity:.75">· {escape(note)}</span>' for note in notes)
    return f"<div><b>{escape(title)}</b>{rest}</div>"


def line(*facts: str) -> str:
    """Short facts in one line."""
    return f"<div>{escape(' · '.join(facts))}</div>"


def table(rows: Iterable[tuple[str, str]]) -> str:
    """Names and their values; spaces in front of a name indent it."""
    cell = "text-align:left;vertical-align:top;background:none;border:0;padding:1px"
    body = "".join(
        f'<tr style="background:none;border-top:1px solid {LINE}">'
        f'<td style="{cell} 1.5em 1px {indent(name)}em;opacity:.75;white-space:nowrap">'
        f"{escape(name.strip())}</td>"
        f'<td style="{cell} 0;font-variant-numeric:tabular-nums">{escape(value)}</td></tr>'
        for name, value in rows
    )
    style = f"border-collapse:collapse;border:0;margin:4px 0;color:{TEXT}"
    return f'<table style="{style}"><tbody>{body}</tbody></table>'


def indent(name: str) -> float:
    """Width in em of the spaces in front of `name`."""
    return (len(name) - len(name.lstrip())) / 2


def cells(counts: Sequence[int], most: int) -> tuple[list[int], int]:
    """How many cells show each of `counts`, one at least for each that is not 0, and how many
    things a cell stands for. All together at most `most`, which is more than there are counts."""
    total = sum(counts)
    each = 1 if total <= most else -(-total // (most - len(counts)))
    return [-(-count // each) for count in counts], each


def strip_legend(used: int, free: int, freed: int) -> str:
    """The numbers of a strip in words."""
    return f"{used:,} blocks used, {free:,} free, {freed:,} freed by compaction so far"


def strip(used: int, free: int, freed: int) -> str:
    """A row of cells: blocks in use, free blocks of the pool, and those that compaction freed."""
    numbers, each = cells((used, free, freed), CELLS)
    marks = "".join(
        f'<i style="display:inline-block;width:7px;height:12px;margin:0 1px 0 0;{style}"></i>'
        * number
        for number, style in zip(numbers, (USED, FREE, FREED), strict=True)
    )
    swatches = "".join(
        f'<span style="white-space:nowrap;margin-right:1em">'
        f'<i style="display:inline-block;width:7px;height:10px;margin-right:.4em;{style}"></i>'
        f"{count:,} {name}</span>"
        for count, name, style in (
            (used, "blocks used", USED),
            (free, "free", FREE),
            (freed, "freed by compaction so far", FREED),
        )
    )
    scale = "" if each == 1 else f'<span style="opacity:.75">a cell is {each:,} blocks</span>'
    label = escape(strip_legend(used, free, freed))
    return (
        f'<div role="img" aria-label="{label}" style="line-height:13px;margin:4px 0 2px">{marks}'
        f'</div><div style="font-size:12px">{swatches}{scale}</div>'
    )


def passage(text: str) -> str:
    """Text as it stands, line breaks included, scrolled to its end."""
    return _passage(f"<div>{escape(text)}</div>", "display:flex;flex-direction:column-reverse;")


def greyed(tokens: Sequence[str], shares: Sequence[float | None]) -> str:
    """Text whose tokens are the fainter, the fewer layers and heads they live in.

    tokens: the pieces of the text; shares: of each, in [0, 1], or `None` for one that was not
    cached yet. Neighbours of one of 9 shades are one element, whose title has their positions and
    mean share. Raises `ValueError` when the two differ in length.
    """
    if len(tokens) != len(shares):
        raise ValueError(f"shares: one for each of {len(tokens)} tokens, got {len(shares)}")
    runs = groupby(range(len(tokens)), key=lambda i: _level(shares[i]))
    return _passage("".join(_run(level, list(run), tokens, shares) for level, run in runs))


def _level(share: float | None) -> int | None:
    """The shade of `share`: 0 and `LEVELS` for exactly nowhere and everywhere alone."""
    if share is None or share in (0, 1):
        return None if share is None else round(share) * LEVELS
    return min(max(round(share * LEVELS), 1), LEVELS - 1)


def _run(
    level: int | None, run: list[int], tokens: Sequence[str], shares: Sequence[float | None]
) -> str:
    text = escape("".join(tokens[i] for i in run))
    if not text:
        return ""
    where = f"{run[0]}" if len(run) == 1 else f"{run[0]}–{run[-1]}"
    if level is None:
        return f'<span title="{where}: not cached yet">{text}</span>'
    share = sum(shares[i] or 0.0 for i in run) / len(run)
    title = f'title="{where}: {share:.0%}"'
    if level == LEVELS:
        return f"<span {title}>{text}</span>"
    opacity = FAINTEST + (1 - FAINTEST) * level / LEVELS
    return f'<span {title} style="opacity:{opacity:.2f}">{text}</span>'


def _passage(inner: str, style: str = "") -> str:
    style += (
        f"font:12.5px/1.6 {MONO};white-space:pre-wrap;overflow-wrap:anywhere;max-height:25em;"
        f"overflow:auto;margin:6px 0;padding:6px 10px;background:{GROUND};border-radius:4px;"
        "scrollbar-width:thin;scrollbar-color:rgba(128,128,128,.6) transparent"
    )
    return f'<div style="{style}">{inner}</div>'
