"""TriAttention's files of query statistics (github.com/WeianMao/triattention), read and written.

A `.pt` file: `{"metadata": {...}, "stats": {"layer00_head00": {"q_mean_real", "q_mean_imag",
"q_abs_mean": float32 [F]}}}`, means over the tokens of each query head's bands before RoPE, with
`F = head_dim / 2`; heads may be missing. It does not have keys, nor the number of tokens.
"""

from __future__ import annotations

import os
import pickle
import re
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvpage.calibration import CalibratedStatistics, blank_statistics
from kvpage.layer_calibration import LayerCalibration

MEANS = ("q_mean_real", "q_mean_imag", "q_abs_mean")


def load_triattention(
    path: str | Path, model: nn.Module, *, tokens: int = 8192
) -> CalibratedStatistics:
    """Statistics of `model` out of a file of TriAttention's; no code in the file runs.

    tokens: how many the means count for, as the file does not say. Layers with a sliding window,
    and those without RoPE, are left out. Raises `ValueError` naming what is no such file or not
    of this model.
    """
    if not isinstance(tokens, int) or tokens < 1:
        raise ValueError(f"tokens: a positive number expected, got {tokens!r}")
    metadata, stats = _payload(path)
    blank = blank_statistics(model)
    by_layer: dict[int, dict[int, Any]] = {}
    for key, entry in stats.items():
        match = re.fullmatch(r"layer(\d{2,})_head(\d{2,})", str(key))
        if match is None:
            raise ValueError(f"{path}: keys such as 'layer00_head00' expected, got {key!r}")
        by_layer.setdefault(int(match[1]), {})[int(match[2])] = entry
    beyond = sorted(i for i in by_layer if i >= blank.num_layers)
    if beyond:
        raise ValueError(f"{path}: has layers {beyond}, the model {blank.num_layers} layers")
    layers = {}
    for i, layer in blank.layers.items():
        found = by_layer.get(i, {}) if layer.rope.bands else {}
        try:
            layers[i] = _layer(layer, found, metadata, tokens)
        except ValueError as error:
            raise ValueError(f"{path}: layer {i}: {error}") from None
    if not any(layer.heads.any() for layer in layers.values()):
        raise ValueError(f"{path}: has no head of layers {sorted(layers)}, those of full attention")
    return replace(blank, layers=layers, dataset=Path(path).name, fingerprint="")


def _payload(path: str | Path) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    if not Path(path).is_file():
        raise FileNotFoundError(f"statistics: no file {path}")
    try:
        with open(path, "rb") as file:  # by its name torch would take it for another format
            payload = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, LookupError, ValueError, TypeError):
        raise ValueError(
            f"{path}: a file of tensors expected, as torch.save writes them; nothing in it was run"
        ) from None
    parts = [payload.get(name) if isinstance(payload, dict) else None for name in _PARTS]
    if not all(isinstance(part, dict) for part in parts):
        raise ValueError(f"{path}: dictionaries {_PARTS} expected, as TriAttention writes them")
    return parts[0], parts[1]  # type: ignore[return-value]


_PARTS = ("metadata", "stats")


def _layer(
    layer: LayerCalibration, found: Mapping[int, Any], metadata: Mapping[str, Any], tokens: int
) -> LayerCalibration:
    """`layer` with the means in `found`, by head; those it lacks are marked as missing."""
    heads, dim = layer.query_total.shape
    mask = torch.zeros(heads, dtype=torch.bool)
    totals = torch.zeros(3, heads, layer.rope.bands, dtype=torch.float64)
    style, own = metadata.get("rope_style", "half"), layer.traits()["pairing"]
    if found and style != own:
        raise ValueError(f"rope_style: {own!r} expected, got {style!r}")
    if found and 2 * layer.rope.bands != dim:
        raise ValueError(f"RoPE on all {dim} dimensions expected, the model has it on a part")
    for head, entry in found.items():
        if head >= heads:
            raise ValueError(f"heads below {heads} expected, got head {head}")
        for total, name in zip(totals, MEANS, strict=True):
            mean: Any = entry.get(name) if isinstance(entry, dict) else None
            size = (layer.rope.bands,)
            if not isinstance(mean, Tensor) or mean.shape != size or not mean.isfinite().all():
                got = list(mean.shape) if isinstance(mean, Tensor) else type(mean).__name__
                raise ValueError(f"{name} of head {head}: finite {list(size)} expected, got {got}")
            total[head] = mean.double() * tokens
        mask[head] = True
    real, imaginary, magnitude = totals
    return replace(
        layer,
        query_total=layer.rope.joined(real, imaginary, real[:, :0]),
        query_magnitude_total=magnitude,
        key_total=None,
        key_magnitude_total=None,
        sample=None,
        priority=None,
        count=torch.tensor(float(tokens) if found else 0.0, dtype=torch.float64),
        heads=mask,
    )


def save_triattention(statistics: CalibratedStatistics, path: str | Path, **metadata: Any) -> None:
    """Write the query statistics as TriAttention's files have them, in one rename.

    Layers without RoPE, whose queries have no bands, are left out. metadata: fields to add or
    replace, such as `attn_implementation`, which TriAttention wants to be as at run time. Raises
    `ValueError` where RoPE is on a part of the dimensions, or differs by layer in its pairing.
    """
    layers = {i: layer for i in statistics.layers if (layer := statistics.layer(i)) is not None}
    layers = {i: layer for i, layer in layers.items() if layer.rope.bands}
    partial = [i for i, x in layers.items() if 2 * x.rope.bands != x.query_total.shape[1]]
    if partial or not layers:
        raise ValueError(
            f"statistics: layers with RoPE on all dimensions expected, {partial or 'none'} "
            f"{'have it on a part' if partial else 'is there'}"
        )
    stats = {}
    for i, layer in layers.items():
        real, imaginary, _ = layer.rope.parts(layer.query_total)
        for head in layer.heads.nonzero()[:, 0].tolist():
            totals = (real[head], imaginary[head], layer.query_magnitude_total[head])
            stats[f"layer{i:02d}_head{head:02d}"] = {
                name: (total / layer.count).float()
                for name, total in zip(MEANS, totals, strict=True)
            }
    path = Path(path)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as scratch:
        payload = {"metadata": _metadata(statistics, layers) | metadata, "stats": stats}
        torch.save(payload, Path(scratch) / path.name)
        os.replace(Path(scratch) / path.name, path)


def _metadata(
    statistics: CalibratedStatistics, layers: Mapping[int, LayerCalibration]
) -> dict[str, Any]:
    first = next(iter(layers.values()))
    traits = [layer.traits() for layer in layers.values()]
    if len({(each["pairing"], each["head_dim"]) for each in traits}) > 1:
        raise ValueError("statistics: one pairing and head_dim in all layers expected")
    return {
        "num_traces": 1,
        "head_dim": traits[0]["head_dim"],
        "num_key_value_heads": first.kv_heads,
        "dtype": "float32",
        "use_chat_template": False,
        "system_prompt": "",
        "prompt_template": "",
        "kv_budget": 0,
        "attn_implementation": "sdpa",
        "rope_style": traits[0]["pairing"],
        "inv_freq": first.rope.inv_freq.tolist(),
        "model_path": statistics.model,
        "sampled_heads": [
            [i, head] for i, x in layers.items() for head in x.heads.nonzero()[:, 0].tolist()
        ],
    }
