"""What this machine has: versions, devices, and what attention can run on."""

from __future__ import annotations

import platform
from importlib.util import find_spec
from typing import Any

import psutil
import torch
import transformers
from transformers.utils.import_utils import is_flash_attn_2_available

import kvpage
from kvpage.compat import OLDEST, RELEASE, TESTED

GPU_BACKENDS = ("triton", "flash_attn")


def versions() -> dict[str, Any]:
    """Of what matters; whether kvpage's tests run with this transformers."""
    return {
        "kvpage": kvpage.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "transformers_tested": OLDEST <= RELEASE <= TESTED,
        "python": platform.python_version(),
    }


def memory_of(device: torch.device) -> tuple[int, int]:
    """Bytes free and in all."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return free, total
    if device.type == "mps":
        total = torch.mps.recommended_max_memory()
        return total - torch.mps.driver_allocated_memory(), total
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def devices() -> list[dict[str, Any]]:
    """The CPU and every accelerator, with bytes of memory."""
    found = [("cpu", platform.processor() or platform.machine())]
    found += [
        (f"cuda:{i}", torch.cuda.get_device_name(i)) for i in range(torch.cuda.device_count())
    ]
    if torch.backends.mps.is_available():
        found.append(("mps", "Apple"))
    rows = []
    for device, name in found:
        free, total = memory_of(torch.device(device))
        rows.append({"device": device, "name": name, "bytes_free": free, "bytes_total": total})
    return rows


def attention() -> dict[str, Any]:
    """Implementations that a model can be set to, and what reads blocks under "kvpage"."""
    implementations = ["sdpa", "eager", "kvpage"]
    if is_flash_attn_2_available():
        implementations.append("flash_attention_2")
    gpu = torch.cuda.is_available()
    backends = {"reference": "yes"}
    for package in GPU_BACKENDS:
        missing = [] if find_spec(package) else [f"pip install {package.replace('_', '-')}"]
        missing += [] if gpu else ["needs a GPU"]
        backends[package] = ", ".join(["no", *missing]) if missing else "yes"
    return {"implementations": implementations, "backends": backends}
