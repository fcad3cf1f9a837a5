"""What calibration is compared with: statistics worked out from modules hooked by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

MODULES = {
    "llama": ("q_proj", "k_proj"),
    "qwen3": ("q_norm", "k_norm"),
    "gemma3": ("q_norm", "k_norm"),
    "cohere-norm": ("q_norm", "k_norm"),
    "glm": ("q_proj", "k_proj"),
    "phi": ("q_proj", "k_proj"),
    "smollm3": ("q_proj", "k_proj"),
}
"""Of each family, what yields the query and the key before RoPE."""

INTERLEAVED = {"cohere-norm", "glm"}
HEADS_FIRST = {"gemma3"}


def rows(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random token ids, none of them the pad token."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, 90, (length,), generator=generator).tolist() for length in lengths]


def captured(
    model: PreTrainedModel, layer: int, module: str, ids: list[list[int]], heads_first: bool
) -> Tensor:
    """What `module` of a layer's attention yields over `ids`, each row alone: `[N, H, D]`."""
    seen: list[Tensor] = []
    attention = model.get_decoder().layers[layer].self_attn
    hook = getattr(attention, module).register_forward_hook(
        lambda module, args, output: seen.append(output.detach())
    )
    try:
        with torch.no_grad():
            for row in ids:
                model(torch.tensor([row]), use_cache=False)
    finally:
        hook.remove()
    dim = attention.head_dim
    rows_of = [output[0].transpose(0, 1) if heads_first else output[0] for output in seen]
    return torch.cat([row.reshape(row.shape[0], -1, dim) for row in rows_of])


def direct_totals(
    model: PreTrainedModel, family: str, layer: int, bands: int, ids: list[list[int]]
) -> dict[str, Tensor]:
    """The sums of a layer over `ids`, in float64."""
    totals: dict[str, Any] = {"count": torch.tensor(float(sum(map(len, ids))))}
    for name, module in zip(("query", "key"), MODULES[family], strict=True):
        vectors = captured(model, layer, module, ids, family in HEADS_FIRST).double()
        if family in INTERLEAVED:
            pairs = vectors[..., : 2 * bands].unflatten(-1, (bands, 2))
        else:
            pairs = vectors[..., : 2 * bands].unflatten(-1, (2, bands)).transpose(-1, -2)
        totals[f"{name}_total"] = vectors.sum(dim=0)
        totals[f"{name}_magnitude_total"] = pairs.square().sum(dim=-1).sqrt().sum(dim=0)
    return {name: total.double() for name, total in totals.items()}


def assert_same_sums(one: Any, other: Any, tolerance: float) -> None:
    """Sums of all layers equal, to `tolerance` of the largest."""
    assert one.layers.keys() == other.layers.keys()
    for i, layer in one.layers.items():
        assert_close(layer.sums(), other.layers[i].sums(), tolerance)


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == expected.keys()
    for name, total in expected.items():
        assert got[name].shape == total.shape, name
        if total.numel():
            error = (got[name] - total).abs().max()
            assert error <= tolerance * total.abs().max(), (name, float(error))
