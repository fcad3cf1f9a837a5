"""kvpage: a KV cache for transformers that runs a trace of any length in a fixed memory."""

from kvpage.attachments import attach, detach
from kvpage.attention import register
from kvpage.block_map import BlockMap
from kvpage.cache import PagedCompactCache
from kvpage.calibrating import calibrate
from kvpage.calibration import CalibratedStatistics
from kvpage.compaction import TracedCompaction
from kvpage.report import Report
from kvpage.scoring import LiveTokens, Scorer
from kvpage.summaries import Statistics
from kvpage.survivors import Survivors
from kvpage.usage import Usage
from kvpage.watch import History, Watch

__all__ = [
    "BlockMap",
    "CalibratedStatistics",
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
