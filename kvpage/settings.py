"""The settings of a cache, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

PinPrompt = bool | Literal["auto"]
BACKENDS = ("auto", "triton", "reference", "flash_attn")


@dataclass(frozen=True)
class Settings:
    """What the user chose, in tokens. `ValueError` / `TypeError` name the argument that is off."""

    budget: int | None
    interval: int
    block_size: int
    sinks: int
    recent: int
    pin_prompt: PinPrompt
    trace: bool
    backend: str = "auto"
    static: bool = False

    def __post_init__(self) -> None:
        _check_integer("interval", self.interval, 1)
        _check_integer("block_size", self.block_size, 1)
        _check_integer("sinks", self.sinks, 0)
        _check_integer("recent", self.recent, 0)
        if not isinstance(self.trace, bool):
            raise TypeError(f"trace: True or False expected, got {self.trace!r}")
        if self.backend not in BACKENDS:
            raise ValueError(
                f"backend: one of {', '.join(map(repr, BACKENDS))} expected, got {self.backend!r}"
            )
        if not isinstance(self.static, bool):
            raise TypeError(f"static: True or False expected, got {self.static!r}")
        if self.static and self.budget is None:
            raise ValueError("static: needs a budget, which bounds what is allocated, got None")
        if not isinstance(self.pin_prompt, bool) and self.pin_prompt != "auto":
            raise ValueError(f"pin_prompt: True, False or 'auto' expected, got {self.pin_prompt!r}")
        if self.budget is not None:
            _check_integer("budget", self.budget)
            least = self.sinks + self.recent + self.block_size
            if self.budget < least:
                raise ValueError(
                    f"budget: at least sinks + recent + block_size = {self.sinks} + {self.recent} "
                    f"+ {self.block_size} = {least} tokens expected, got {self.budget}; a smaller "
                    "one goes with a smaller recent"
                )

    @property
    def room(self) -> int:
        """Tokens that may be pinned beside sinks and recent, with a block of candidates left."""
        if self.budget is None:
            raise AssertionError("without a budget nothing is evicted")
        return self.budget - self.sinks - self.recent - self.block_size


def _check_integer(name: str, value: Any, least: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: an integer number of tokens expected, got {value!r}")
    if least is not None and value < least:
        raise ValueError(f"{name}: at least {least} expected, got {value}")
