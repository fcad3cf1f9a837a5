"""Watch a generation as it runs: a streamer that shows and records what the cache holds."""

from __future__ import annotations

import math
import time
import weakref
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from kvpage.cache import PagedCompactCache
from kvpage.displays import View, html_of, make_display
from kvpage.transcript import Transcript
from kvpage.usage import Usage

if TYPE_CHECKING:
    from rich.console import Console

WINDOW = 64
"""Tokens over which the speed is taken."""


@dataclass
class History:
    """What a cache held as each token was decoded: lists of equal length, one entry a token.

    seconds: since the first prompt was given; seen_tokens and live_tokens: per row; the blocks are
    those of all rows, blocks_freed by compaction so far; bytes_in_use: of keys and values. See
    `Usage`. With assisted decoding the drafts about to be refused are counted.
    """

    seconds: list[float] = field(default_factory=list)
    seen_tokens: list[int] = field(default_factory=list)
    live_tokens: list[int] = field(default_factory=list)
    blocks_used: list[int] = field(default_factory=list)
    blocks_freed: list[int] = field(default_factory=list)
    num_blocks: list[int] = field(default_factory=list)
    bytes_in_use: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.seconds)

    def append(self, seconds: float, usage: Usage) -> None:
        """Add an entry for one token."""
        self.seconds.append(seconds)
        for name, value in zip(usage._fields, usage, strict=True):
            getattr(self, name).append(value)


class Watch(BaseStreamer):  # type: ignore[no-untyped-call,misc,unused-ignore]
    """Shows a running generation, and records it: ``model.generate(..., streamer=watch)``.

    Each turn (each `generate`) has one display of its own: speed, block meter, text. `history`,
    `token_ids` and `text` go on over the turns. Of several rows, the ids and the text are the
    first's. The last state is shown at the end; for that to be so after an interrupt too::

        with Watch(cache, tokenizer) as watch:
            model.generate(**inputs, cache=cache, streamer=watch)

    Args:
        cache: the cache that `generate` is given.
        tokenizer: to show the text.
        display: "notebook", "terminal" (both need an extra: `notebooks`, `cli`), "none", or "auto":
            "notebook" in a Jupyter kernel, "terminal" where stdout or stderr is one and rich is
            installed, else "none"; which it became is in the repr.
        every: least seconds between two updates of the display.
        console: a rich console to use as the terminal; by default that of stdout, or of stderr
            where stdout is no terminal.

    Raises `TypeError` / `ValueError` naming the argument, and `ImportError` naming the extra.
    """

    def __init__(
        self,
        cache: PagedCompactCache,
        tokenizer: Any = None,
        *,
        display: str = "auto",
        every: float = 0.25,
        console: Console | None = None,
    ) -> None:
        if not isinstance(cache, PagedCompactCache):
            raise TypeError(f"cache: a PagedCompactCache expected, got {type(cache).__name__}")
        if tokenizer is not None and not hasattr(tokenizer, "decode"):
            raise TypeError(
                f"tokenizer: one with decode() expected, got {type(tokenizer).__name__}"
            )
        if isinstance(every, bool) or not isinstance(every, int | float) or not every >= 0:
            raise ValueError(f"every: seconds, 0 or more, expected, got {every!r}")
        self._cache, self._tokenizer, self._every = cache, tokenizer, every
        self._display = make_display(display, console)
        weakref.finalize(self, self._display.close)  # or a terminal is left without a cursor
        self.history = History()
        self.token_ids: list[int] = []
        """Decoded so far, over all turns, of the first row."""
        self._texts: list[Transcript] = []
        self._state, self._running = "no prompt yet", False
        self._rows, self._single = 1, False
        self._first_entry = self._first_step = 0
        self._usage = cache.usage()
        """As the turn shown left it, whatever became of the cache since."""
        self._since: float | None = None
        self._drawn_at = -math.inf

    @property
    def display(self) -> str:
        """Where it is shown: "notebook", "terminal" or "none"."""
        return self._display.name

    @property
    def text(self) -> str:
        """What was decoded so far, special tokens left out, an empty line between turns.

        Raises `ValueError` without a tokenizer.
        """
        if self._tokenizer is None:
            raise ValueError("tokenizer: one expected in Watch(cache, tokenizer), got None")
        self._read()
        return "\n\n".join(text.read_so_far for text in self._texts)

    @property
    def tokens_per_second(self) -> float:
        """Per row, over the last 64 tokens of this turn; NaN before there are two."""
        seconds = self.history.seconds[self._first_entry :][-WINDOW:]
        passed = seconds[-1] - seconds[0] if seconds else 0.0
        return (len(seconds) - 1) / passed if passed > 0 else math.nan

    # What `generate` calls.

    def put(self, value: Tensor) -> None:
        """Take in the prompt `[B, T]`, then tokens: `[B]`, or `[1, n]` with assisted decoding."""
        if not self._running or (value.ndim == 2 and self._single):
            self._begin(len(value))
            return
        if self._cache.ledger.steps == self._first_step:
            raise ValueError("cache: the one that generate is given expected, got another one")
        self._single = value.ndim == 1
        token_ids = (value[:1] if self._single else value[0]).tolist()
        now = time.perf_counter()
        self._usage = usage = self._cache.usage()
        assert self._since is not None
        for _ in token_ids:
            self.history.append(now - self._since, usage)
        self.token_ids += token_ids
        if self._texts:
            self._texts[-1].token_ids += token_ids
        self._state = "decoding"
        if now - self._drawn_at >= self._every:
            self._draw()

    def end(self) -> None:
        """The turn is over: show its last state."""
        self._finish("done")

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._finish("done" if kind is None else f"stopped by {kind.__name__}")

    def __repr__(self) -> str:
        return (
            f"Watch(display={self.display}: {self._state}, {len(self.token_ids):,} tokens, "
            f"{self.tokens_per_second:.1f} tokens/s)"
        )

    def _repr_html_(self) -> str:
        return html_of(self._view())

    def _begin(self, rows: int) -> None:
        """A prompt of so many rows was given: a new turn."""
        self._finish("stopped")  # the turn before, if it was interrupted
        if self._since is None:
            self._since = time.perf_counter()
        self._rows, self._single, self._usage = rows, False, self._cache.usage()
        self._first_entry, self._first_step = len(self.history), self._cache.ledger.steps
        if self._tokenizer is not None:
            self._texts.append(Transcript(self._tokenizer))
        self._state, self._running = "reading the prompt", True
        self._display.start()
        self._draw()

    def _finish(self, state: str) -> None:
        if not self._running:
            return
        self._state, self._running = state, False
        if self._texts:
            self._texts[-1].finish()
        self._draw(final=True)

    def _read(self) -> None:
        """Take in what came since the last update; a finished turn's text stays as it is."""
        if self._texts and self._running:
            self._texts[-1].read()

    def _draw(self, final: bool = False) -> None:
        self._read()
        self._display.show(self._view(), final)
        self._drawn_at = time.perf_counter()

    def _view(self) -> View:
        return View(
            state=self._state,
            tokens=len(self.history) - self._first_entry,
            tokens_per_second=self.tokens_per_second,
            rows=self._rows,
            usage=self._usage,
            text=self._texts[-1].read_so_far if self._texts else "",
        )
