"""Fidelity on text of one's own, as a study that can be resumed and split."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvpage.evaluation.contenders import Contender
from kvpage.evaluation.fidelity import Fidelity, fidelity, pooled
from kvpage.evaluation.runner import (
    Advance,
    Key,
    Record,
    Result,
    Row,
    Subject,
    Work,
    grouped,
    read_lines,
)


@dataclass(frozen=True)
class FidelityStudy:
    """Fidelity on the first `windows` stretches of `tokens` tokens of the text in the file `data`.

    Of a .jsonl, the field `text` of every line, joined by blank lines. Raises `ValueError` for a
    text that is too short for one window, `OSError` where there is no such file.
    """

    kind: ClassVar[str] = "fidelity"

    data: str
    tokens: int = 4096
    windows: int = 1
    prompt: int = 128
    step: int = 16

    @cached_property
    def text(self) -> str:
        """What is in the file."""
        if not self.data.endswith(".jsonl"):
            return Path(self.data).read_text()
        lines = read_lines(Path(self.data))
        if not all(isinstance(line, dict) and "text" in line for line in lines):
            raise ValueError(f"data: a field `text` in every line of {self.data} expected")
        return "\n\n".join(str(line["text"]) for line in lines)

    def ids(self, tokenizer: Any) -> list[Tensor]:
        """The windows, `[T]` int64 each."""
        ids = torch.tensor(tokenizer(self.text).input_ids)
        windows = [part for part in ids.split(self.tokens) if len(part) == self.tokens]
        if not windows:
            raise ValueError(
                f"tokens: at most {len(ids)} expected, as in {self.data}, got {self.tokens}"
            )
        return windows[: self.windows]

    def works(self, subject: Subject, contenders: Sequence[Contender]) -> Iterator[Work]:
        """One window each, all contenders in lock-step."""
        digest = hashlib.sha256(self.text.encode()).hexdigest()
        for number in range(len(self.ids(subject.tokenizer))):
            key: Key = {"study": self.kind, "task": Path(self.data).name, "text": digest}
            key |= {"tokens": self.tokens, "window": number}
            key |= {"prompt": self.prompt, "step": self.step}
            keys = [key | subject.key | contender.key for contender in contenders]
            yield Work(keys, self._runner(subject, contenders, number), size=self.tokens)

    def _runner(
        self, subject: Subject, contenders: Sequence[Contender], number: int
    ) -> Callable[[Sequence[int], Advance], list[Result]]:
        def run(missing: Sequence[int], advance: Advance) -> list[Result]:
            ids = self.ids(subject.tokenizer)[number]
            some = [contenders[i] for i in missing]
            forwards: Any = {"prompt": self.prompt, "step": self.step}
            found = fidelity(subject.model, ids, some, **forwards, progress=advance)
            return [one.to_dict() for one in found]

        return run

    def rows(self, records: Sequence[Record]) -> tuple[list[Row], list[str]]:
        """One row per model and contender, and a note where the text has fewer windows than asked
        for."""
        found = len({key["window"] for key, _ in records})
        name, notes = Path(self.data).name, []
        if found < self.windows:
            notes.append(f"{name}: {found} of {self.windows} windows of {self.tokens:,} tokens")
        return [self._row(row, group) for row, group in grouped(records)], notes

    def _row(self, row: Row, group: Sequence[Record]) -> Row:
        found = pooled([Fidelity(**result) for _, result in group])
        low, high = found.kl_interval or (None, None)
        return row | {
            "positions": found.positions,
            "kl": found.kl,
            "kl_low": low,
            "kl_high": high,
            "delta_perplexity": found.delta_perplexity,
            "top1": found.top1,
            "attention_error": sum(found.attention_error) / len(found.attention_error),
            "attention_error_by_layer": found.attention_error,
            "mass": found.mass_share,
            "mass_to_oracle": found.mass_to_oracle,
            "compactions": found.compactions / len(group),
            "kv_bytes": found.kv_bytes,
            "statistics_bytes": found.statistics_bytes,
        }
