"""Tensor operations over blocks, each with one signature.

`reference` defines them in plain torch. Tensors on a CUDA or HIP device go to Triton, which is
imported then and not before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

import kvpage.kernels.reference as reference
from kvpage.kernels.moments import Moments
from kvpage.kernels.reference import norms

__all__ = ["Moments", "attention_mass", "move_slots", "norms", "paged_attention"]
__all__ += ["score_tokens", "write_kv"]


def score_tokens(
    keys: Tensor,
    direction: Tensor,
    norm_weight: Tensor,
    interleaved: bool = False,
    candidates: Tensor | None = None,
) -> tuple[Tensor, Moments | None]:
    """Score every key against the expected coming queries: see `reference.score_tokens`."""
    if keys.device.type != "cuda" or direction.dtype != torch.float32:
        return reference.score_tokens(keys, direction, norm_weight, interleaved, candidates)
    with _triton_on(keys.device):
        from kvpage.kernels.triton_score_tokens import score_tokens as launch

        return launch(keys, direction, norm_weight, interleaved, candidates)


def attention_mass(
    keys: Tensor,
    queries: Tensor,
    scale: float,
    visible: Tensor | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """How much attention queries pay to every key: see `reference.attention_mass`."""
    if keys.device.type != "cuda" or queries.dtype == torch.float64:
        return reference.attention_mass(keys, queries, scale, visible, weights)
    with _triton_on(keys.device):
        from kvpage.kernels.triton_attention_mass import attention_mass as launch

        return launch(keys, queries, scale, visible, weights)


def move_slots(blocks: Tensor, source: Tensor, target: Tensor, into: Tensor) -> None:
    """Copy tokens from slots to slots, in order: see `reference.move_slots`."""
    if blocks.device.type != "cuda":
        return reference.move_slots(blocks, source, target, into)
    with _triton_on(blocks.device):
        from kvpage.kernels.triton_move_slots import move_slots as launch

        return launch(blocks, source, target, into)


def write_kv(
    keys: Tensor,
    values: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    tables: Tensor,
    start: Tensor,
) -> None:
    """Write new tokens to their slots: see `reference.write_kv`."""
    if keys.device.type != "cuda":
        return reference.write_kv(keys, values, new_keys, new_values, tables, start)
    with _triton_on(keys.device):
        from kvpage.kernels.triton_write_kv import write_kv as launch

        return launch(keys, values, new_keys, new_values, tables, start)


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    stop: Tensor,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    visible: Tensor | None = None,
) -> Tensor:
    """Attend to the live slots of each row: see `reference.paged_attention`."""
    options: dict[str, Any] = {
        "window": window,
        "softcap": softcap,
        "sinks": sinks,
        "visible": visible,
    }
    if keys.device.type != "cuda" or query.dtype == torch.float64:
        return reference.paged_attention(query, keys, values, tables, stop, scale, **options)
    with _triton_on(keys.device):
        from kvpage.kernels.triton_paged_attention import paged_attention as launch

        return launch(query, keys, values, tables, stop, scale, **options)


@contextmanager
def _triton_on(device: torch.device) -> Iterator[None]:
    """Triton launches on the current device, which need not be that of the tensors."""
    several = torch.cuda.device_count() > 1
    try:
        with torch.cuda.device(device) if several else nullcontext():
            yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "triton":
            raise
        raise RuntimeError("tensors on a GPU need Triton: pip install triton") from error
