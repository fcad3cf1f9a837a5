"""Where a running generation is shown: in a notebook's output, in a terminal, or nowhere.

IPython and rich are imported when a display is made.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from kvpage import html
from kvpage.report import readable
from kvpage.usage import Usage

TAIL_CHARACTERS = 2_000
"""Of the text in a notebook: each update sends all that is shown."""
METER_CELLS = 60
"""Width of the block meter in a terminal."""


@dataclass(frozen=True)
class View:
    """What there is to show of a running generation."""

    state: str
    tokens: int
    """Decoded so far in this turn, per row."""
    tokens_per_second: float
    rows: int
    usage: Usage
    text: str
    """Of this turn and the first row."""

    @property
    def title(self) -> str:
        """The turn in a few words."""
        rows = "" if self.rows == 1 else f" in each of {self.rows:,} rows"
        return f"{self.state}: {self.tokens:,} tokens{rows}"

    @property
    def speed(self) -> str:
        """Tokens per second, if there is a figure yet."""
        rate = self.tokens_per_second
        return "- tokens/s" if rate != rate else f"{rate:,.1f} tokens/s"

    @property
    def text_note(self) -> str:
        """Which text it is."""
        return "" if self.rows == 1 else f"row 0 of {self.rows:,}"


class Nowhere:
    """Shows nothing."""

    name = "none"

    def start(self) -> None:
        """A turn begins."""

    def show(self, view: View, final: bool) -> None:
        """Show `view` instead of the one before."""

    def close(self) -> None:
        """Leave the screen as it is."""


class Notebook(Nowhere):
    """One IPython display for each turn, updated in place."""

    name = "notebook"

    def __init__(self) -> None:
        try:
            from IPython.display import HTML, display
        except ImportError as error:
            raise ImportError(
                "display='notebook' needs IPython: pip install 'kvpage[notebooks]'"
            ) from error
        self._html, self._display = HTML, display
        self._handle: Any = None

    def start(self) -> None:
        self._handle = None

    def show(self, view: View, final: bool) -> None:
        shown = self._html(html_of(view))
        if self._handle is None:
            self._handle = self._display(shown, display_id=True)
        else:
            self._handle.update(shown)


class Terminal(Nowhere):
    """A live region at the bottom of a terminal; the last state stays, with all of the text."""

    name = "terminal"

    def __init__(self, console: Any = None) -> None:
        try:
            from rich.console import Console
        except ImportError as error:
            raise ImportError("display='terminal' needs rich: pip install 'kvpage[cli]'") from error
        self._console = console or Console(stderr=not sys.stdout.isatty())
        self._live: Any = None

    def show(self, view: View, final: bool) -> None:
        from rich.live import Live

        if not self._console.is_terminal:  # a file or a pipe gets the last state alone
            if final:
                self._console.print(self._renderable(view, None))
            return
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        lines = None if final else max(self._console.height - 6, 1)
        self._live.update(self._renderable(view, lines), refresh=True)
        if final:
            self.close()

    def close(self) -> None:
        """Also gives the cursor back, and what `print` writes."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _renderable(self, view: View, lines: int | None) -> Any:
        from rich.console import Group
        from rich.text import Text

        usage, width = view.usage, self._console.width
        counts = (usage.blocks_used, usage.blocks_free, usage.blocks_freed)
        numbers, each = html.cells(counts, max(min(METER_CELLS, width - 1), 4))
        meter = Text()
        for number, mark, style in zip(numbers, "█▒·", ("cyan", "cyan", "dim"), strict=True):
            meter.append(mark * number, style)
        scale = "" if each == 1 else f", a cell is {each:,} blocks"
        head = Text.assemble((view.title, "bold"), f" · {view.speed} · {lengths(usage)}")
        parts = [head, meter, Text(html.strip_legend(*counts) + scale, "dim")]
        if view.text:
            note = Text(f"{view.text_note}:" if view.text_note else "", "dim")
            text = Text(view.text)
            if lines is not None:
                text = Text(view.text[-lines * width :])
                text = Text("\n").join(text.wrap(self._console, width)[-lines:])
            parts += [note, text]
        return Group(*parts)


def lengths(usage: Usage) -> str:
    """Tokens and bytes of a cache in words."""
    return (
        f"{usage.seen_tokens:,} seen, {usage.live_tokens:,} live, "
        f"{readable(usage.bytes_in_use)} KV in use"
    )


def html_of(view: View) -> str:
    """`view` for a notebook; of a long text the end."""
    usage, text = view.usage, view.text
    if len(text) > TAIL_CHARACTERS:
        text = f"… {text[-TAIL_CHARACTERS:].partition(' ')[2]}"
    parts = [
        html.heading(view.title, view.speed, lengths(usage)),
        html.strip(usage.blocks_used, usage.blocks_free, usage.blocks_freed),
    ]
    if text:
        note = html.line(f"{view.text_note}:") if view.text_note else ""
        parts += [note, html.passage(text)]
    return html.panel(*parts)


def make_display(kind: str, console: Any) -> Nowhere:
    """The display called `kind`; "auto" is the one that fits where this runs.

    Raises `ValueError` for another name, or a console that can't be used, `ImportError` naming the
    extra to install.
    """
    if kind == "auto":
        kind = "terminal" if console is not None else _fitting()
    if console is not None and kind != "terminal":
        raise ValueError(f"console: goes with display='terminal' or 'auto', got display={kind!r}")
    if kind == "terminal":
        return Terminal(console)
    if kind == "notebook":
        return Notebook()
    if kind == "none":
        return Nowhere()
    raise ValueError(f"display: 'auto', 'notebook', 'terminal' or 'none' expected, got {kind!r}")


def _fitting() -> str:
    """In a Jupyter kernel its output, on a terminal with rich installed that, else nothing."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if getattr(shell, "kernel", None) is not None:
        return "notebook"
    on_terminal = sys.stdout.isatty() or sys.stderr.isatty()
    return "terminal" if on_terminal and find_spec("rich") is not None else "none"
