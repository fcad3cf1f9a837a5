"""What the host may do without waiting for a device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def to_device(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Nested lists of numbers as a tensor on `device`, without waiting for it."""
    tensor = torch.tensor(values, dtype=dtype)
    if device.type == "cuda" and torch.cuda.is_available():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def reads_are_free(device: torch.device) -> bool:
    """Whether what is on `device` can be read without waiting for it."""
    return device.type == "cpu"


def capturing() -> bool:
    """Whether what runs now is recorded for a graph, not executed."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
