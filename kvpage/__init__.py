"""kvpage: a KV cache for transformers that runs a trace of any length in a fixed memory."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpage.attachments import attach, detach
    from kvpage.attention import register
    from kvpage.block_map import BlockMap
    from kvpage.cache import PagedCompactCache
    from kvpage.calibrating import calibrate
    from kvpage.calibration import CalibratedStatistics
    from kvpage.compaction import TracedCompaction
    from kvpage.footprint import Footprint
    from kvpage.report import Report
    from kvpage.scoring import LiveTokens, Scorer
    from kvpage.summaries import Statistics
    from kvpage.survivors import Survivors
    from kvpage.usage import Usage
    from kvpage.watch import History, Watch

__all__ = [
    "BlockMap",
    "CalibratedStatistics",
    "Footprint",
    "History",
    "LiveTokens",
    "PagedCompactCache",
    "Report",
    "Scorer",
    "Statistics",
    "Survivors",
    "TracedCompaction",
    "Usage",
    "Watch",
    "attach",
    "calibrate",
    "detach",
    "register",
]
__version__ = "0.1.0"

_HOMES = {
    "attachments": ("attach", "detach"),
    "attention": ("register",),
    "block_map": ("BlockMap",),
    "cache": ("PagedCompactCache",),
    "calibrating": ("calibrate",),
    "calibration": ("CalibratedStatistics",),
    "compaction": ("TracedCompaction",),
    "footprint": ("Footprint",),
    "report": ("Report",),
    "scoring": ("LiveTokens", "Scorer"),
    "summaries": ("Statistics",),
    "survivors": ("Survivors",),
    "usage": ("Usage",),
    "watch": ("History", "Watch"),
}


def __getattr__(name: str) -> Any:
    """A public name, imported when it is first used: `kvpage --help` does without torch."""
    if name in ("evaluation", "plot"):  # these need extras
        return importlib.import_module(f"kvpage.{name}")
    for module, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(f"kvpage.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'kvpage' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
