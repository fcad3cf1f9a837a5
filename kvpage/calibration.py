"""Calibrated statistics: queries and keys before RoPE over a data set, in files to share.

They are sums, so that parts of a data set, or processes, add up to what one run gives. The file is
safetensors: tensors `layers.N.query_total` and so on; its metadata says what model they are of.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, hf_hub_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from kvpage.architectures import describe
from kvpage.layer_calibration import LayerCalibration, blank_layer, fingerprint_of
from kvpage.rope import Rope

FORMAT, FORMAT_VERSION = "kvpage-statistics", 1
FILENAME = "kvpage-statistics.safetensors"
"""The file in a repository of the hub."""

REQUIRED = {"query_total", "query_magnitude_total", "count", "heads"}
DTYPES = {"heads": torch.bool, "sample": torch.float32, "priority": torch.int64}
"""Of the tensors that are not float64."""

FREQUENCY_TOLERANCE = 2**-7
"""Relative; frequencies rounded to bfloat16 are off by half of that."""


@dataclass(frozen=True, repr=False)
class CalibratedStatistics:
    """Statistics of a model's queries and keys over a data set, per layer of full attention.

    layers: by layer index; architecture: `config.model_type`; num_layers: of all kinds; model,
    dataset: names, for people; fingerprint: of the weights of attention, or empty.
    """

    layers: Mapping[int, LayerCalibration]
    architecture: str
    num_layers: int
    model: str = ""
    dataset: str = ""
    fingerprint: str = ""

    def __repr__(self) -> str:
        return (
            f"CalibratedStatistics({self.architecture}, {len(self.layers)} layers, {self.tokens:,} "
            f"tokens, model={self.model!r}, dataset={self.dataset!r})"
        )

    @property
    def tokens(self) -> int:
        """Tokens behind the statistics, pads not counted."""
        return max(int(layer.count) for layer in self.layers.values())

    def layer(self, layer_idx: int) -> LayerCalibration | None:
        """The sums of a layer; `None` where there are none."""
        layer = self.layers.get(layer_idx)
        return None if layer is None or layer.count <= 0 or not layer.heads.any() else layer

    def check(self, model: nn.Module) -> None:
        """Raise `ValueError` naming every difference unless these can be statistics of `model`.

        Other weights (a fine-tuned model) are a `UserWarning`.
        """
        blank = blank_statistics(model)
        found = list(_differences(self, blank, "in the statistics", "in the model"))
        if found:
            raise ValueError(f"statistics: not of this {type(model).__name__}: " + "; ".join(found))
        if self.fingerprint and self.fingerprint != blank.fingerprint:
            warnings.warn(
                f"statistics: made with other weights ({self.model or 'unnamed'}) than this "
                f"{type(model).__name__}'s; of a fine-tuned or quantised model they may still do",
                stacklevel=2,
            )

    def save(self, path: str | Path) -> None:
        """Write a safetensors file, in one rename."""
        self.write(path, {})

    def write(self, path: str | Path, more: Mapping[str, str]) -> None:
        """As `save`, with `more` in the file's metadata."""
        tensors = {
            f"layers.{i}.{name}": tensor.contiguous().clone()
            for i, layer in self.layers.items()
            for name, tensor in layer.tensors().items()
        }
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as scratch:
            content = save(tensors, metadata=self._metadata() | dict(more))
            (Path(scratch) / path.name).write_bytes(content)  # with the permissions of other files
            os.replace(Path(scratch) / path.name, path)

    @classmethod
    def load(
        cls, path: str | PathLike[str], model: nn.Module | None = None
    ) -> CalibratedStatistics:
        """Read a file that `save` wrote, and `check` it against `model`.

        Raises `ValueError` when it is none, is damaged, or is of another model. No code in it runs.
        """
        statistics, _ = read_file(path)
        if model is not None:
            statistics.check(model)
        return statistics

    def push_to_hub(self, repo_id: str, *, filename: str = FILENAME, **options: Any) -> str:
        """Upload the file to the model repository `repo_id`, made if it is not there.

        options: of `huggingface_hub.HfApi.create_repo`, such as `private`. Returns its address.
        """
        api = HfApi()
        api.create_repo(repo_id, exist_ok=True, **options)
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / FILENAME
            self.save(path)
            message = f"Query and key statistics over {self.tokens} tokens"
            return api.upload_file(
                path_or_fileobj=path,
                path_in_repo=filename,
                repo_id=repo_id,
                commit_message=message,
            )

    @classmethod
    def from_hub(
        cls,
        repo_id: str,
        model: nn.Module | None = None,
        *,
        filename: str = FILENAME,
        revision: str | None = None,
    ) -> CalibratedStatistics:
        """Download what `push_to_hub` uploaded, and `load` it."""
        return cls.load(hf_hub_download(repo_id, filename, revision=revision), model)

    def _metadata(self) -> dict[str, str]:
        ropes: list[dict[str, Any]] = []
        layers = []
        for i, layer in self.layers.items():
            rope = {
                "inv_freq": layer.rope.inv_freq.tolist(),
                "attention_scaling": layer.rope.attention_scaling,
                "pairing": layer.traits()["pairing"],
                "fixed": layer.fixed_rope,
            }
            if rope not in ropes:
                ropes.append(rope)
            traits = {name: layer.traits()[name] for name in ("heads", "kv_heads", "head_dim")}
            layers.append({"layer": i, **traits, "rope": ropes.index(rope)})
        return {
            "format": FORMAT,
            "format_version": str(FORMAT_VERSION),
            "architecture": self.architecture,
            "num_layers": str(self.num_layers),
            "tokens": str(self.tokens),
            "model": self.model,
            "dataset": self.dataset,
            "fingerprint": self.fingerprint,
            "layers": json.dumps(layers),
            "ropes": json.dumps(ropes),
        }


def merge(one: CalibratedStatistics, other: CalibratedStatistics) -> CalibratedStatistics:
    """The statistics of both, as if their data had been one.

    Raises `ValueError` unless they are of one model, its weights included, and of the same heads.
    """
    found = list(_differences(one, other, "in the first", "in the second"))
    if one.fingerprint != other.fingerprint:
        found.append("other weights")
    for i, layer in one.layers.items():
        twin = other.layers.get(i, layer)
        if layer.tensors().keys() != twin.tensors().keys() or not torch.equal(
            layer.heads, twin.heads
        ):
            found.append(f"statistics of other heads in layer {i}")
    if found:
        raise ValueError("statistics: can't be merged: " + "; ".join(found))
    names = dict.fromkeys(name for name in (one.dataset, other.dataset) if name)
    layers = {i: layer.plus(other.layers[i].tensors()) for i, layer in one.layers.items()}
    return replace(one, layers=layers, dataset=", ".join(names))


def blank_statistics(model: nn.Module, dataset: str = "") -> CalibratedStatistics:
    """Statistics of `model` over no token. `ValueError`: not supported, or no full attention."""
    decoder = describe(model)
    sites = [site for site in decoder.sites if site.window is None]
    if not sites:
        raise ValueError(f"model: {type(model).__name__} has no layer of full attention to rank")
    return CalibratedStatistics(
        layers={site.layer_idx: blank_layer(site, decoder.config) for site in sites},
        architecture=decoder.config.model_type,
        num_layers=decoder.config.num_hidden_layers,
        model=_name(model, decoder.config),
        dataset=dataset,
        fingerprint=fingerprint_of(sites),
    )


def _name(model: nn.Module, config: Any) -> str:
    """The hub id of a model, or its folder's name: where it lies on a disk is nobody's business."""
    name = str(getattr(config, "_name_or_path", "") or type(model).__name__)
    return Path(name).resolve().name if Path(name).exists() else name


def _differences(
    one: CalibratedStatistics, other: CalibratedStatistics, here: str, there: str
) -> Iterator[str]:
    """What is not the same in the structure of two models, each with the layers it is in."""
    for name in ("architecture", "num_layers"):
        a, b = getattr(one, name), getattr(other, name)
        if a != b:
            yield f"{name}: {a!r} {here}, {b!r} {there}"
    if one.layers.keys() != other.layers.keys():
        a, b = sorted(one.layers), sorted(other.layers)
        yield f"layers of full attention: {a} {here}, {b} {there}"
    found: dict[str, list[int]] = {}
    for i in sorted(one.layers.keys() & other.layers.keys()):
        first, second = one.layers[i], other.layers[i]
        a, b = first.traits(), second.traits()
        texts = [f"{name}: {a[name]} {here}, {b[name]} {there}" for name in a if a[name] != b[name]]
        if first.rope.bands == second.rope.bands and first.fixed_rope and second.fixed_rope:
            x, y = first.rope.inv_freq, second.rope.inv_freq
            for band in ((x - y).abs() > FREQUENCY_TOLERANCE * y.abs()).nonzero()[:1, 0].tolist():
                values = f"{float(x[band]):.6g} {here}, {float(y[band]):.6g} {there}"
                texts.append(f"inv_freq[{band}] of RoPE: {values}")
        for text in texts:
            found.setdefault(text, []).append(i)
    for text, layers in found.items():
        yield f"{text} (layers {layers})"


def read_file(path: str | PathLike[str]) -> tuple[CalibratedStatistics, dict[str, str]]:
    """The statistics in a file of ours and its metadata; `ValueError` when it is none."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"statistics: no file {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"statistics: a safetensors file expected, {path} is none ({error}); "
            "kvpage.triattention reads TriAttention's .pt files"
        ) from None
    version = metadata.get("format_version", "")
    if metadata.get("format") != FORMAT or version != str(FORMAT_VERSION):
        raise ValueError(
            f"statistics: format {FORMAT!r} version {FORMAT_VERSION} expected, {path} has "
            f"{metadata.get('format')!r} version {version or None}"
        )
    try:
        statistics = _parsed(metadata, tensors)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"statistics: {path} is damaged: {error!r}") from None
    return statistics, metadata


def _parsed(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> CalibratedStatistics:
    ropes, layers = json.loads(metadata["ropes"]), {}
    for entry in json.loads(metadata["layers"]):
        i, kv_heads, values = entry["layer"], entry["kv_heads"], ropes[entry["rope"]]
        rope = Rope(
            torch.tensor(values["inv_freq"], dtype=torch.float64),
            values["attention_scaling"],
            values["pairing"] == "interleaved",
        )
        shapes = {
            "query_total": (entry["heads"], entry["head_dim"]),
            "query_magnitude_total": (entry["heads"], rope.bands),
            "key_total": (kv_heads, entry["head_dim"]),
            "key_magnitude_total": (kv_heads, rope.bands),
            "count": (),
            "heads": (entry["heads"],),
        }
        sampled = len(tensors.get(f"layers.{i}.priority", ()))
        shapes |= {"sample": (sampled, entry["heads"], entry["head_dim"]), "priority": (sampled,)}
        found = {name: tensors.get(f"layers.{i}.{name}") for name in shapes}
        layer = LayerCalibration(**found, kv_heads=kv_heads, rope=rope, fixed_rope=values["fixed"])  # type: ignore[arg-type]
        if not layer.tensors().keys() >= REQUIRED:
            raise KeyError(f"layers.{i}")
        for name, tensor in layer.tensors().items():
            dtype = DTYPES.get(name, torch.float64)
            if tensor.shape != shapes[name] or tensor.dtype != dtype or not tensor.isfinite().all():
                raise ValueError(f"layers.{i}.{name}: finite {dtype} {shapes[name]} expected")
        layers[i] = layer
    if not layers:
        raise ValueError("no layer")
    names = {name: metadata[name] for name in ("architecture", "model", "dataset", "fingerprint")}
    return CalibratedStatistics(layers, num_layers=int(metadata["num_layers"]), **names)
