"""Runs a study unit by unit: resumed where it stopped, split over processes.

Every result is written to a journal, one line of JSON under the key that says all that it depends
on, before the next one starts. What a journal in the folder already has is not run again.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

Key = dict[str, Any]
"""What a result depends on, all of it JSON."""
Result = dict[str, Any]
Record = tuple[Key, Result]
Row = dict[str, Any]
"""A row of a table: numbers and names under their column's name."""

Advance = Callable[[int], object]


@dataclass
class Subject:
    """A model to be measured: loaded when first needed, so not at all where all is done.

    path: folder or hub id; adapter: of a PEFT adapter upon it (LoRA and others); dtype: as of
    transformers, "auto", "float32"; device: "cpu", "cuda", "auto" for a device map.
    """

    path: str
    adapter: str | None = None
    tokenizer_path: str | None = None
    dtype: str = "auto"
    device: str | None = None

    @cached_property
    def key(self) -> Key:
        """Paths, and of local folders what tells whether their weights were replaced."""
        places = [place for place in (self.path, self.adapter) if place is not None]
        files = [file for place in places for file in sorted(Path(place).glob("*.safetensors"))]
        stats = [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]
        return {
            "model": self.path,
            "adapter": self.adapter,
            "tokenizer": self.tokenizer_path,
            "dtype": self.dtype,
            "weights": stats,
        }

    @cached_property
    def tokenizer(self) -> Any:
        """Of `tokenizer_path`, else the adapter's folder where it has one, else the model's."""
        adapter = self.adapter
        if adapter is not None and not (Path(adapter) / "tokenizer_config.json").exists():
            adapter = None
        return AutoTokenizer.from_pretrained(self.tokenizer_path or adapter or self.path)

    @cached_property
    def model(self) -> nn.Module:
        """In evaluation mode, adapter included; `ValueError` for an adapter of another model."""
        device = self.device or default_device()
        options = {"device_map": "auto"} if device == "auto" else {}
        model: Any = AutoModelForCausalLM.from_pretrained(self.path, dtype=self.dtype, **options)
        if self.adapter is not None:
            model = self._with_adapter(model, self.adapter)
        return (model if device == "auto" else model.to(device)).eval()

    def _with_adapter(self, model: Any, adapter: str) -> Any:
        from peft import PeftConfig, PeftModel

        try:
            with warnings.catch_warnings():  # of how peft asks transformers for it
                warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
                return PeftModel.from_pretrained(model, adapter)
        except (RuntimeError, ValueError) as error:
            if not any(sign in str(error) for sign in ("size mismatch", "Target modules")):
                raise
            made_for = PeftConfig.from_pretrained(adapter).base_model_name_or_path
            raise ValueError(
                f"adapter: {adapter} does not fit {self.path} (made for {made_for})"
            ) from error

    def release(self) -> None:
        """Let go of the weights."""
        self.__dict__.pop("model", None)


@dataclass(frozen=True)
class Work:
    """Results best made together: `run(missing, advance)` makes those of `keys[i]`, i in missing.

    It may call `advance(n)` on its way, for n of `size` steps.
    """

    keys: Sequence[Key]
    run: Callable[[Sequence[int], Advance], list[Result]]
    size: int = 1


@dataclass
class Journal:
    """The results in a folder: each process appends to a file of its own and reads all."""

    folder: Path
    rank: int = 0
    results: dict[str, Result] = field(default_factory=dict)

    def read(self) -> None:
        """Take in what the folder has; a line cut short by a crash is none."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(self.folder.glob("results-*.jsonl")):
            for line in path.read_text().splitlines():
                try:
                    entry = json.loads(line)
                except json.JSONDecodeError:
                    continue
                self.results[canonical(entry["key"])] = entry["result"]

    def write(self, key: Key, result: Result) -> None:
        """Add a result; it is on disk when this returns."""
        path = self.folder / f"results-{self.rank}.jsonl"
        cut_short = path.exists() and not path.read_bytes().endswith(b"\n")
        with path.open("a") as file:
            file.write("\n" * cut_short + json.dumps({"key": key, "result": result}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.results[canonical(key)] = json.loads(json.dumps(result))

    def has(self, key: Key) -> bool:
        """Whether there is a result for it."""
        return canonical(key) in self.results


def grouped(records: Sequence[Record]) -> list[tuple[Row, list[Record]]]:
    """Records of one model, contender, task and length each, with the columns that say which.

    Models go by the last parts of their paths, or by whole paths where these are alike.
    """
    groups: dict[str, tuple[Row, list[Record]]] = {}
    paths = {_paths(key): " + ".join(Path(path).name for path in _paths(key)) for key, _ in records}
    for key, result in records:
        name = paths[_paths(key)]
        name = " + ".join(_paths(key)) if list(paths.values()).count(name) > 1 else name
        about = ("task", "tokens", "budget", "scorer")
        row = {"model": name} | {column: key[column] for column in about if column in key}
        place = canonical(row | {"contender": key["contender"], "options": key["options"]})
        groups.setdefault(place, (row, []))[1].append((key, result))
    return list(groups.values())


def costs_of(results: Sequence[Result]) -> Row:
    """Columns of what `Contender.costs` said: mean compactions, and the most bytes of a text."""
    row: Row = {"compactions": sum(each["compactions"] for each in results) / len(results)}
    return row | {
        name: max(each[name] for each in results) for name in ("kv_bytes", "statistics_bytes")
    }


def _paths(key: Key) -> tuple[str, ...]:
    return tuple(path for path in (key["model"], key["adapter"]) if path is not None)


def read_lines(path: Path) -> list[Any]:
    """What the lines of a .jsonl say; `ValueError` names the line that is no JSON."""
    found = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            found += [json.loads(line)] if line.strip() else []
        except json.JSONDecodeError as error:
            raise ValueError(f"data: {path}, line {number}: JSON expected: {error}") from None
    return found


def canonical(key: Key) -> str:
    """The same text for equal keys."""
    return json.dumps(key, sort_keys=True)


def run(
    works: Sequence[Work], folder: Path, progress: Callable[[int, int], object] = lambda a, b: None
) -> list[Record]:
    """All results of `works`, in their order: from the journals in `folder`, else run now.

    Under `accelerate launch` each process runs its share and all return everything. progress: is
    called with steps done and steps to do, of this process.
    """
    processes = Processes()
    journal = Journal(folder, processes.rank)
    journal.read()
    processes.wait()
    pending = [work for work in works if not all(map(journal.has, work.keys))]
    own = pending[processes.rank :: processes.count]
    total, before = sum(work.size for work in own), 0
    for work in own:
        done = before

        def advance(steps: int) -> None:
            nonlocal done
            done += steps
            progress(done, total)

        progress(before, total)
        missing = [i for i, key in enumerate(work.keys) if not journal.has(key)]
        for i, result in zip(missing, work.run(missing, advance), strict=True):
            journal.write(work.keys[i], result)
        before += work.size
    progress(total, total)
    processes.wait()
    journal.read()
    return [(key, journal.results[canonical(key)]) for work in works for key in work.keys]


class Processes:
    """This process among those that `accelerate launch` or torchrun started; else the only one."""

    def __init__(self) -> None:
        self.state: Any = None
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            from accelerate import PartialState

            cpu = not torch.accelerator.is_available()
            self.state = PartialState(cpu=cpu, timeout=timedelta(weeks=4))
        self.rank = 0 if self.state is None else self.state.process_index
        self.count = 1 if self.state is None else self.state.num_processes

    def wait(self) -> None:
        """Until all are here."""
        if self.state is not None:
            self.state.wait_for_everyone()


def default_device() -> str:
    """This process's accelerator, else the CPU."""
    state = Processes().state
    if state is not None:
        return str(state.device)
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if found is None else found.type
