"""Statistics of a model's queries and keys over a data set: batched, resumable, in any process.

The sequences are numbered, batches of them dealt out to the processes of `torch.distributed`, and
each process adds what it has seen: the sums are those of one process, to float64 rounding.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from tqdm import tqdm

from kvpage.architectures import Decoder, describe
from kvpage.calibration import CalibratedStatistics, blank_statistics, read_file
from kvpage.compat import NEWEST
from kvpage.recording import Recorder


def sequences(
    tokenizer: Any, data: Iterable[Any], max_tokens: int, seq_len: int, text_field: str
) -> Iterator[list[int]]:
    """Token ids of `data`, in pieces of at most `seq_len` tokens, `max_tokens` in all.

    data: texts, token ids, or dictionaries with `input_ids` or a text in `text_field`.
    """
    left = max_tokens
    for index, sample in enumerate(data):
        if isinstance(sample, Mapping):
            field = "input_ids" if "input_ids" in sample else text_field
            if field not in sample:
                raise ValueError(
                    f"text_field: one of {list(sample)} expected, the fields of sample {index}, "
                    f"got {text_field!r}"
                )
            sample = sample[field]
        if isinstance(sample, str):
            if tokenizer is None:
                raise TypeError(f"tokenizer: one expected, as sample {index} is a text, got None")
            sample = tokenizer(sample)["input_ids"]
        ids = sample.tolist() if hasattr(sample, "tolist") else sample
        if not isinstance(ids, list | tuple) or any(not isinstance(token, int) for token in ids):
            raise TypeError(f"data: a text or token ids expected, sample {index} is {sample!r:.60}")
        for start in range(0, len(ids), seq_len):
            piece = list(ids[start : start + min(seq_len, left)])
            left -= len(piece)
            yield piece
            if left <= 0:
                return


def batches(rows: Iterable[list[int]], batch_size: int) -> Iterator[list[list[int]]]:
    """`rows`, `batch_size` at a time; fewer the last time."""
    batch: list[list[int]] = []
    for row in rows:
        batch.append(row)
        if len(batch) == batch_size:
            yield batch
            batch = []
    if batch:
        yield batch


def calibrate(
    model: nn.Module,
    tokenizer: Any,
    data: Iterable[Any],
    *,
    max_tokens: int = 2**17,
    seq_len: int = 2048,
    batch_size: int = 4,
    text_field: str = "text",
    dataset: str = "",
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 16,
    progress: bool = True,
) -> CalibratedStatistics:
    """Statistics of the queries and keys of `model`, before RoPE and after its norms, over `data`.

    Args:
        model: on any device, in eval mode.
        tokenizer: turns texts into ids as the model is used to; `None` when `data` are ids.
        data: a `datasets` data set or any iterable of texts, of dictionaries with a text in
            `text_field` (or `input_ids`), or of sequences of token ids.
        max_tokens: where to stop, in tokens, pads not counted.
        seq_len: longer texts are cut into pieces of this many tokens.
        batch_size: sequences per forward, padded on the right; pads are not counted.
        dataset: the name to keep in the statistics.
        checkpoint: file with what was done so far, written every `checkpoint_every` batches and
            when interrupted; a call with the same arguments and data goes on from there. It is not
            deleted. Each of several processes has its own, with its rank appended.
        progress: show a bar, where there is a terminal.

    Under `accelerate launch` or `torchrun`, once the process group is there, the batches are split
    over the processes, each with the whole model, and all return the statistics of all.

    Raises `ValueError` / `TypeError` for bad arguments, samples of another kind, no token at all,
    a model that is not supported or not as it seems, and a checkpoint of something else.
    """
    _check_arguments(model, data, (max_tokens, seq_len, batch_size, checkpoint_every))
    grouped = distributed.is_available() and distributed.is_initialized()
    rank, processes = (distributed.get_rank(), distributed.get_world_size()) if grouped else (0, 1)
    statistics = blank_statistics(model, dataset)
    dtype = str(describe(model).module.dtype)
    settings = [max_tokens, seq_len, batch_size, rank, processes, dataset, dtype]
    saved, done = _Checkpoint(checkpoint, settings, statistics), 0
    recorder, decoder = Recorder(model, statistics.layers), describe(model)
    rows = sequences(tokenizer, data, max_tokens, seq_len, text_field)
    bar = tqdm(total=max_tokens, unit="tok", disable=None if progress and rank == 0 else True)
    try:
        for index, batch in enumerate(batches(rows, batch_size)):
            bar.update(sum(map(len, batch)))
            if index % processes != rank or saved.skips(batch):
                continue
            saved.add(batch, _forward(decoder, recorder, batch, index * batch_size))
            done += 1
            if done % checkpoint_every == 0:
                saved.write()
    finally:
        bar.close()
        saved.write()
    saved.check_reached()
    statistics = saved.statistics if processes == 1 else _over_processes(saved.statistics)
    if statistics.tokens == 0:
        raise ValueError("data: at least one token expected, got none")
    return statistics


def _check_arguments(model: nn.Module, data: Any, counts: tuple[int, ...]) -> None:
    names = ("max_tokens", "seq_len", "batch_size", "checkpoint_every")
    for name, count in zip(names, counts, strict=True):
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"{name}: a positive number expected, got {count!r}")
    if isinstance(data, str | Mapping):
        kind = type(data).__name__
        raise TypeError(f"data: an iterable of samples (one split of a data set), got a {kind}")
    if model.training:
        raise ValueError("model: eval mode expected, got training mode; call model.eval()")
    if (getattr(model, "tp_size", None) or 1) > 1:
        raise ValueError("model: a whole one in each process expected, got a tensor-parallel one")


def _forward(
    decoder: Decoder, recorder: Recorder, batch: list[list[int]], first_row: int
) -> dict[int, dict[str, Tensor]]:
    """The sums of a forward of these rows, and a sample of their queries."""
    width = max(map(len, batch))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in batch])
    real = torch.arange(width) < torch.tensor([len(row) for row in batch])[:, None]
    device: Any = decoder.module.device
    device = "cpu" if device.type == "meta" else device
    recorder.begin(real, first_row)
    with torch.no_grad():
        arguments = {"input_ids": ids.to(device), "attention_mask": real.long().to(device)}
        decoder.module(**arguments, **{NEWEST: recorder}, use_cache=True)
    return recorder.read()


class _Checkpoint:
    """What a process has done so far, and the file that keeps it."""

    def __init__(
        self, path: str | Path | None, settings: list[Any], blank: CalibratedStatistics
    ) -> None:
        rank, processes = settings[3:5]
        self.path = None if path is None else Path(path)
        if self.path is not None and processes > 1:
            self.path = self.path.with_name(f"{self.path.name}.{rank}-of-{processes}")
        self.statistics, self.settings = blank, json.dumps(settings)
        self._batches, self._digest = 0, hashlib.sha256()
        self._before, self._expected, self._written = 0, "", 0
        if self.path is not None and self.path.exists():
            self._resume(self.path, blank)

    def _resume(self, path: Path, blank: CalibratedStatistics) -> None:
        saved, metadata = read_file(path)
        same = saved.fingerprint == blank.fingerprint and saved.layers.keys() == blank.layers.keys()
        if metadata.get("settings") != self.settings or not same:
            raise ValueError(
                f"checkpoint: {path} is of another model or run, with (max_tokens, seq_len, "
                f"batch_size, rank, processes, dataset, dtype) {metadata.get('settings')}, this is "
                f"{self.settings}; delete it, or name another file"
            )
        self.statistics = saved
        self._before = self._written = int(metadata["batches"])
        self._expected = metadata["digest"]

    def skips(self, batch: list[list[int]]) -> bool:
        """Whether `batch`, the next of this process, was done before; the data must be the same."""
        if self._batches >= self._before:
            return False
        self._count(batch)
        if self._batches == self._before and self._digest.hexdigest() != self._expected:
            raise ValueError("checkpoint: made from other data than these; delete it")
        return True

    def add(self, batch: list[list[int]], sums: dict[int, dict[str, Tensor]]) -> None:
        """Add the sums of `batch`, by layer."""
        layers = {i: layer.plus(sums[i]) for i, layer in self.statistics.layers.items()}
        self.statistics = replace(self.statistics, layers=layers)
        self._count(batch)

    def _count(self, batch: list[list[int]]) -> None:
        self._batches += 1
        self._digest.update(json.dumps(batch).encode())

    def check_reached(self) -> None:
        if self._batches < self._before:
            raise ValueError("checkpoint: made from more data than these; delete it")

    def write(self) -> None:
        """Write what is new."""
        if self.path is None or self._batches <= self._written:
            return
        more = {
            "settings": self.settings,
            "batches": str(self._batches),
            "digest": self._digest.hexdigest(),
        }
        self.statistics.write(self.path, more)
        self._written = self._batches


def _over_processes(statistics: CalibratedStatistics) -> CalibratedStatistics:
    """The sums of all processes, in each."""
    sums = [tensor for layer in statistics.layers.values() for tensor in layer.sums().values()]
    flat = torch.cat([tensor.flatten() for tensor in sums])
    if distributed.get_backend() != "gloo":
        flat = flat.to(torch.accelerator.current_accelerator() or "cpu")
    distributed.all_reduce(flat)
    parts = iter(flat.cpu().split([tensor.numel() for tensor in sums]))
    mine = {i: layer.tensors() for i, layer in statistics.layers.items()}
    every: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(every, mine)
    layers = {}
    for i, layer in statistics.layers.items():
        total = {name: next(parts).view(t.shape) for name, t in layer.sums().items()}
        layers[i] = layer.having(total | layer.drawn([tensors[i] for tensors in every]))
    return replace(statistics, layers=layers)
