"""Where generated text goes as it comes, and how Ctrl-C stops it."""

from __future__ import annotations

import os
import signal
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from transformers import StoppingCriteria, TextStreamer
from transformers.generation.streamers import BaseStreamer

from kvpage.watch import Watch


def on_screen() -> bool:
    """Whether stdout is a terminal."""
    return sys.stdout.isatty()


def typed() -> bool:
    """Whether stdin is a terminal."""
    return sys.stdin.isatty()


@contextmanager
def streams(cache: Any, tokenizer: Any, to_screen: bool, to_pipe: bool) -> Iterator[BaseStreamer]:
    """The streamer of one `generate`: a live view with the text on the screen; else the text on
    stdout if `to_pipe`, and the view without it on stderr where that is a terminal. There is no
    view beside text that goes to a process, which may write it to the same screen."""
    if to_screen:
        with Watch(cache, tokenizer, display="terminal", console=Console()) as watch:
            yield watch
        return
    shown = sys.stderr.isatty() and (not to_pipe or _to_file())
    console = Console(stderr=True) if shown else None
    with Watch(cache, display="terminal" if shown else "none", console=console) as watch:
        text = [TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)]
        yield _Several([watch, *(text if to_pipe else [])])


def _to_file() -> bool:
    """Whether stdout goes to a file."""
    try:
        return stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode)
    except OSError:  # it has no descriptor
        return False


class _Several(BaseStreamer):  # type: ignore[no-untyped-call,misc,unused-ignore]
    """Streamers that all get the same."""

    def __init__(self, streamers: Sequence[Any]) -> None:
        self._streamers = streamers

    def put(self, value: Tensor) -> None:
        for streamer in self._streamers:
            streamer.put(value)

    def end(self) -> None:
        for streamer in self._streamers:
            streamer.end()


class Interruptible(StoppingCriteria):
    """Within it the first Ctrl-C stops `generate` behind the token it is at, with the cache whole;
    the second is `KeyboardInterrupt`. Is one of its `stopping_criteria`."""

    def __init__(self) -> None:
        self.interrupted = False

    def __enter__(self) -> Interruptible:
        self._before = signal.signal(signal.SIGINT, self._notice)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """bool `[B]`: whether rows are done."""
        done = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        return done | self.interrupted

    def _notice(self, number: int, frame: Any) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.interrupted = True
