"""Fidelity on text of one's own, as a study that can be resumed and split."""

from __future__ import annotations

import hashlib
import math
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

WINDOW_TOKENS = 4096
POSITIONS = (
    "positions differ: a row is over the text behind its own first compaction, which a larger "
    "budget has later; compare scorers within a budget, and between budgets mind the place"
)


@dataclass(frozen=True)
class FidelityStudy:
    """Fidelity on the first `windows` stretches of `tokens` tokens of the text in the file `data`.

    Of a .jsonl, the field `text` of every line, joined by blank lines. tokens: by default
    `WINDOW_TOKENS`, or all of a shorter text. Raises `ValueError` for a file without text or too
    short for one window, `OSError` where there is no such file.
    """

    kind: ClassVar[str] = "fidelity"

    data: str
    tokens: int | None = None
    windows: int = 1
    prompt: int = 128
    step: int = 16

    @cached_property
    def text(self) -> str:
        """What is in the file."""
        if not self.data.endswith(".jsonl"):
            text = Path(self.data).read_text()
        else:
            lines = read_lines(Path(self.data))
            if not all(isinstance(line, dict) and "text" in line for line in lines):
                raise ValueError(f"data: a field `text` in every line of {self.data} expected")
            text = "\n\n".join(str(line["text"]) for line in lines)
        if not text.strip():
            raise ValueError(f"data: text expected, but {self.data} is empty")
        return text

    def ids(self, tokenizer: Any) -> list[Tensor]:
        """The windows, `[T]` int64 each."""
        ids = torch.tensor(tokenizer(self.text).input_ids)
        tokens = self.tokens or min(WINDOW_TOKENS, len(ids))
        windows = [part for part in ids.split(tokens) if len(part) == tokens]
        if not windows:
            raise ValueError(
                f"tokens: at most {len(ids)} expected, as in {self.data}, got {self.tokens}"
            )
        return windows[: self.windows]

    def works(self, subject: Subject, contenders: Sequence[Contender]) -> Iterator[Work]:
        """One window each, all contenders in lock-step."""
        digest = hashlib.sha256(self.text.encode()).hexdigest()
        for number, ids in enumerate(self.ids(subject.tokenizer)):
            key: Key = {"study": self.kind, "task": Path(self.data).name, "text": digest}
            key |= {"tokens": len(ids), "window": number}
            key |= {"prompt": self.prompt, "step": self.step}
            keys = [key | subject.key | contender.key for contender in contenders]
            yield Work(keys, self._runner(subject, contenders, number), size=len(ids))

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
        """One row per model and contender, and notes where the text has less than asked for, and
        where rows are over different positions."""
        found = len({key["window"] for key, _ in records})
        name, notes = Path(self.data).name, []
        lengths = sorted({key["tokens"] for key, _ in records})
        counts = " or ".join(f"{tokens:,}" for tokens in lengths)
        if self.tokens is None and lengths[0] < WINDOW_TOKENS:
            notes.append(
                f"{name}: all of its {counts} tokens, fewer than the usual {WINDOW_TOKENS:,}; "
                "--tokens changes it"
            )
        if found < self.windows:
            notes.append(f"{name}: {found} of {self.windows} windows of {counts} tokens")
        rows = [self._row(row, group) for row, group in grouped(records)]
        texts = {(row["model"], row["tokens"]) for row in rows}
        if len({(row["model"], row["tokens"], row["positions"]) for row in rows}) > len(texts):
            notes.append(POSITIONS)
        return rows, notes

    def _row(self, row: Row, group: Sequence[Record]) -> Row:
        found = pooled([Fidelity(**result) for _, result in group])
        low, high = found.kl_interval or (None, None)
        return row | {
            "positions": found.positions,
            "kl": found.kl,
            "kl_low": low,
            "kl_high": high,
            "full_perplexity": math.exp(found.nll_full),
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
