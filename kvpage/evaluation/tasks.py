"""Tasks with a question and an answer each: accuracy, pass@k, and the length of the trace beside.

Length matters: under a small budget models tend to think longer (arXiv 2512.12008).
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any, ClassVar

import torch

from kvpage.compat import NEWEST
from kvpage.evaluation.answers import is_right, method, reference
from kvpage.evaluation.contenders import Contender
from kvpage.evaluation.intervals import bootstrap_interval, pass_at_k, wilson_interval
from kvpage.evaluation.runner import (
    Advance,
    Key,
    Record,
    Result,
    Row,
    Subject,
    Work,
    costs_of,
    grouped,
    read_lines,
)

QUESTIONS = ("question", "problem", "prompt")
ANSWERS = ("answer", "expected_answer", "solution")
BARE_TEMPLATE = "{question}"
REASONING_TEMPLATE = (
    "{question}\n\nReason step by step, and put your final answer within \\boxed{}."
)
PLAIN_TEMPLATE = "Question: {question}\nAnswer:"
"""For models without a chat template."""


@dataclass(frozen=True)
class Problem:
    """A question and what counts as its answer."""

    question: str
    answer: str
    template: str = BARE_TEMPLATE
    """What a chat model is asked, unless a study says otherwise; has `{question}`."""


def load_problems(data: str, split: str = "test", limit: int | None = None) -> list[Problem]:
    """The problems of a local .jsonl, or of a data set on the hub, `name` or `name:config`.

    A line has a question under one of `QUESTIONS` and an answer under one of `ANSWERS`; of an
    answer with `####`, as in GSM8K, what follows counts. Chat models are asked the questions of a
    file as they are, those of the hub with `REASONING_TEMPLATE`. Raises `ValueError` naming the
    line that has none, or a file that is empty.
    """
    path = Path(data)
    template = BARE_TEMPLATE
    if path.suffix == ".jsonl" or path.exists():
        lines: Any = read_lines(path)
    else:
        template = REASONING_TEMPLATE
        from datasets import load_dataset

        name, _, config = data.partition(":")
        lines = load_dataset(name, config or None, split=split)
    some = islice(lines, limit)
    problems = [
        _problem(line, f"{data}, line {i}", template) for i, line in enumerate(some, start=1)
    ]
    if not problems:
        raise ValueError(f"data: problems expected in {data}, got none")
    return problems


def _problem(line: Mapping[str, Any], place: str, template: str) -> Problem:
    found = []
    for names in (QUESTIONS, ANSWERS):
        name = next((name for name in names if isinstance(line, dict) and name in line), None)
        if name is None:
            fields = ", ".join(line) if isinstance(line, dict) else type(line).__name__
            raise ValueError(f"data: {place}: one of {', '.join(names)} expected, got {fields}")
        found.append(str(line[name]))
    return Problem(found[0], reference(found[1]), template)


@dataclass(frozen=True)
class TaskStudy:
    """Accuracy on `problems`, by contender.

    name: of the data, for tables; seeds: one answer per problem is drawn with each, or the greedy
    answer is taken when temperature is 0; template: has `{question}`, by default the problem's own
    for tokenizers with a chat template, which is applied to it, and `PLAIN_TEMPLATE` for others;
    ks: of pass@k.

    Raises `ValueError` for several seeds without a temperature, and a k of more than the seeds.
    """

    kind: ClassVar[str] = "tasks"

    name: str
    problems: Sequence[Problem]
    max_new_tokens: int = 512
    batch_size: int = 8
    seeds: Sequence[int] = (0,)
    temperature: float = 0.0
    top_p: float = 1.0
    template: str | None = None
    ks: Sequence[int] = (1,)

    def __post_init__(self) -> None:
        if self.temperature == 0 and len(self.seeds) > 1:
            raise ValueError("seeds: one expected with temperature 0, whose answers are all equal")
        if not all(1 <= k <= len(self.seeds) for k in self.ks):
            raise ValueError(f"ks: 1 to the number of seeds expected, got {list(self.ks)}")
        if self.template is not None and "{question}" not in self.template:
            raise ValueError("template: {question} in it expected")

    def works(self, subject: Subject, contenders: Sequence[Contender]) -> Iterator[Work]:
        """One batch each: what lives in a padded batch depends on its rows, so that batches are
        made once, whoever runs them."""
        if any(method(problem.answer) == "math-verify" for problem in self.problems):
            import math_verify  # noqa: F401, fails here rather than behind the first answers
        size = self.batch_size
        batches = [self.problems[i : i + size] for i in range(0, len(self.problems), size)]
        chat = subject.tokenizer.chat_template is not None
        for contender, seed, number in product(contenders, self.seeds, range(len(batches))):
            batch = batches[number]
            asked = [self.template_of(problem, chat) for problem in batch]
            texts = [[p.question, p.answer, text] for p, text in zip(batch, asked, strict=True)]
            key: Key = {"study": self.kind, "task": self.name, "batch": number, "seed": seed}
            key["problems"] = hashlib.sha256(json.dumps(texts).encode()).hexdigest()
            for name in ("max_new_tokens", "temperature", "top_p"):
                key[name] = getattr(self, name)
            key |= {"asked": list(dict.fromkeys(asked)), "chat": chat}
            run = self._runner(subject, contender, seed + 10_007 * number, batch)
            yield Work([key | subject.key | contender.key], run)

    def _runner(
        self, subject: Subject, contender: Contender, seed: int, batch: Sequence[Problem]
    ) -> Callable[[Sequence[int], Advance], list[Result]]:
        def run(missing: Sequence[int], advance: Advance) -> list[Result]:
            asked = [self.asked(subject.tokenizer, problem) for problem in batch]
            answers = self._generate(subject, contender, seed, asked)
            for problem, answer in zip(batch, answers["problems"], strict=True):
                answer["right"] = is_right(problem.answer, answer["text"])
                answer["method"] = method(problem.answer)
                answer |= {"question": problem.question, "expected": problem.answer}
            return [answers]

        return run

    def template_of(self, problem: Problem, chat: bool) -> str:
        """What `problem` is asked in; chat: whether the tokenizer has a chat template."""
        return self.template or (problem.template if chat else PLAIN_TEMPLATE)

    def asked(self, tokenizer: Any, problem: Problem) -> str:
        """The text the model gets."""
        chat = tokenizer.chat_template is not None
        text = self.template_of(problem, chat).replace("{question}", problem.question)
        if not chat:
            return text
        turns = [{"role": "user", "content": text}]
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))

    @torch.inference_mode()
    def _generate(
        self, subject: Subject, contender: Contender, seed: int, asked: Sequence[str]
    ) -> dict[str, Any]:
        tokenizer, model = subject.tokenizer, subject.model
        special = tokenizer.chat_template is None  # a chat template writes them itself
        rows = [tokenizer(text, add_special_tokens=special).input_ids for text in asked]
        width = max(map(len, rows))
        pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        pad = 0 if pad is None else pad
        device = next(model.parameters()).device
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows], device=device)
        real = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        sampling: dict[str, Any] = {"do_sample": False}
        if self.temperature > 0:
            sampling = {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p}
            sampling["top_k"] = 0
        torch.manual_seed(seed)
        cache = contender.cache(model)
        generate: Any = model.generate
        out = generate(
            input_ids=ids,
            attention_mask=real.to(device),
            max_new_tokens=self.max_new_tokens,
            pad_token_id=pad,
            **{NEWEST: cache},
            **sampling,
        )
        ends = _end_tokens(model, tokenizer)
        problems = []
        for row in out[:, width:].tolist():
            length = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
            text = tokenizer.decode(row[:length], skip_special_tokens=True)
            cut = length == self.max_new_tokens and row[length - 1] not in ends
            problems.append({"text": text, "tokens": length, "cut": cut})
        return {"problems": problems} | contender.costs(model, cache, cache.report())

    def rows(self, records: Sequence[Record]) -> tuple[list[Row], list[str]]:
        """One row per model and contender, and notes on what was asked and how answers were
        compared."""
        rows = [self._row(row, group) for row, group in grouped(records)]
        ways = [method(problem.answer) for problem in self.problems]
        counts = ", ".join(f"{ways.count(way)} by {way}" for way in sorted(set(ways)))
        asked = {(text, key["chat"]): None for key, _ in records for text in key["asked"]}
        notes = [
            f"asked: {text!r}{' in the chat template' * chat}; --template changes it"
            for text, chat in asked
        ]
        return rows, [*notes, f"{self.name}: {len(ways)} answers compared, {counts}"]

    def _row(self, row: Row, group: Sequence[Record]) -> Row:
        answers: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
        for key, result in group:  # a problem by batch and place in it, an answer per seed
            for i, answer in enumerate(result["problems"]):
                answers[key["batch"], i].append(answer)
        every = [answer for drawn in answers.values() for answer in drawn]
        right = [(sum(a["right"] for a in drawn), len(drawn)) for drawn in answers.values()]
        hits = sum(count for count, _ in right)
        one = len(self.seeds) == 1
        interval = wilson_interval(hits, len(every)) if one else bootstrap_interval(right)
        row |= {"problems": len(right), "seeds": len(self.seeds), "accuracy": hits / len(every)}
        row["accuracy_low"], row["accuracy_high"] = interval or (None, None)
        for k in self.ks:
            if k > 1:  # pass@1 is the accuracy
                row[f"pass@{k}"] = sum(pass_at_k(n, c, k) for c, n in right) / len(right)
        row["mean_tokens"] = sum(answer["tokens"] for answer in every) / len(every)
        row["cut_off"] = sum(answer["cut"] for answer in every) / len(every)
        return row | costs_of([result for _, result in group])


def _end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """Token ids at which `generate` stops."""
    ends = model.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None else ends
    return {end for end in (ends if isinstance(ends, list) else [ends]) if end is not None}
