"""Time on a device, and what it is measured against: events, a flushed L2, a copy's bandwidth."""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import transformers

REPEATS, WARM_UP = 50, 10
FLUSH_BYTES = 1 << 30
"""Far more than any L2, and long enough to write and read that the host gets ahead of the device:
the time between two events is then the device's own."""
COPY_BYTES = 1 << 30


class Stopwatch:
    """Times work on one device: by events on a GPU, by the host's clock on the CPU."""

    def __init__(self, device: torch.device, repeats: int = REPEATS, warm_up: int = WARM_UP):
        self.device, self.repeats, self.warm_up = device, repeats, warm_up
        if device.type == "cuda":
            self._flush = torch.empty(FLUSH_BYTES // 4, device=device)
            self._sum = torch.empty((), device=device)

    def median_ms(self, run: Callable[[], object]) -> float:
        """Milliseconds of the device on `run`, median, with nothing of its data in L2."""
        for _ in range(self.warm_up):
            run()
        if self.device.type != "cuda":
            return 1e3 * median(self.host_seconds(run) for _ in range(self.repeats))
        pairs = []
        for _ in range(self.repeats):
            self._flush_l2()
            start = torch.cuda.Event(enable_timing=True)
            stop = torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            stop.record()
            pairs.append((start, stop))
        torch.cuda.synchronize(self.device)
        return median(start.elapsed_time(stop) for start, stop in pairs)

    def host_seconds(self, run: Callable[[], object]) -> float:
        """Seconds until `run` is done, launches and the host's own work included."""
        self.synchronize()
        started = time.perf_counter()
        run()
        self.synchronize()
        return time.perf_counter() - started

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _flush_l2(self) -> None:
        self._flush.fill_(1.0)
        torch.sum(self._flush, dim=0, out=self._sum)  # or what was written goes back while timing


@dataclass(frozen=True)
class Copy:
    """A copy from device to device: the ceiling of whatever moves bytes."""

    bytes_moved: int
    """Read and written."""
    median_ms: float

    @property
    def gbps(self) -> float:
        return self.bytes_moved / self.median_ms / 1e6


def measure_copy(stopwatch: Stopwatch, bytes_moved: int | None = None) -> Copy:
    """Copy half of `bytes_moved`: by default a GiB on a GPU, 16 MiB on the CPU."""
    on_gpu = stopwatch.device.type == "cuda"
    size = (COPY_BYTES if on_gpu else COPY_BYTES >> 6) if bytes_moved is None else bytes_moved // 2
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=stopwatch.device)
    target = torch.empty_like(source)
    return Copy(2 * size, stopwatch.median_ms(lambda: target.copy_(source)))


def device_of(name: str) -> torch.device:
    """The device to measure on; exits with 2 where there is none."""
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        print("no GPU is visible to torch; --device cpu runs the same code in plain torch")
        raise SystemExit(2)
    return torch.device("cuda", torch.cuda.current_device())


def environment(device: torch.device) -> dict[str, Any]:
    """What the figures were measured on and with."""
    found: dict[str, Any] = {
        "device": "cpu, in plain torch: says nothing of a GPU",
        "driver": None,
        "torch": torch.__version__,
        "triton": _version_of_triton(),
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device": properties.name,
            "driver": _driver(),
            "device_bytes": properties.total_memory,
            "l2_bytes": getattr(properties, "L2_cache_size", None),
            "multiprocessors": properties.multi_processor_count,
        }
    return found


def _version_of_triton() -> str | None:
    try:
        import triton
    except ModuleNotFoundError:
        return None
    return str(triton.__version__)


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.split("\n")[0].strip() or None


def peak_bytes(device: torch.device) -> int | None:
    """Most bytes torch's allocator had handed out since `forget_peak`; `None` on the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
