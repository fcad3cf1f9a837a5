"""Memory of what was evicted: synthetic texts that ask at their end for what came long before.

Four tasks, made of plain words so that any tokenizer will do, the same text for the same seed:
key-value recall, a pass key in filler text (Mohtashami & Jaggi 2023, arXiv 2305.16300), copying a
list of words, and the stack of a depth-first search, told step by step. The text goes through the
cache a few tokens a forward, as if decoded, so that it is under the budget before the question
comes; the answer is teacher-forced. A model that finds every answer token likeliest so would write
the answer when decoding greedily.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kvpage.compat import NEWEST
from kvpage.evaluation.contenders import FULL, Contender
from kvpage.evaluation.intervals import bootstrap_interval, wilson_interval
from kvpage.evaluation.runner import (
    Advance,
    Record,
    Result,
    Row,
    Subject,
    Work,
    costs_of,
    grouped,
)

NOUNS = str.split(
    "apple river stone cloud tiger piano window garden rocket silver bridge candle forest hammer "
    "island jacket kettle lemon mirror needle orange pencil rabbit saddle tunnel violin walnut "
    "yellow zebra anchor basket copper"
)
COLOURS = str.split("red blue green black white brown pink grey gold purple amber ivory")
FILLER = str.split(
    "The grass is green.|The sky is blue.|The sun is yellow.|Here we go.|There and back again.|"
    "The wind is cold today.|People walk along the shore.|A door opens.|The clock is slow.",
    "|",
)


@dataclass(frozen=True)
class Example:
    """A text whose last line asks for `answer`, which follows it word for word."""

    text: str
    answer: str


def key_value_recall(rng: random.Random, items: int) -> Example:
    """`items` names with a code each; asks for the code of one."""
    pairs = [f"{colour} {noun}" for colour, noun in product(COLOURS, NOUNS)]
    names = [f"{name} {n}" if n else name for n in range(items // len(pairs) + 1) for name in pairs]
    chosen = rng.sample(names, items)
    codes = {name: rng.randrange(1000, 10000) for name in chosen}
    asked = rng.choice(chosen)
    lines = [f"The code of the {name} is {code}." for name, code in codes.items()]
    return Example("\n".join([*lines, f"The code of the {asked} is"]), f" {codes[asked]}")


def passkey(rng: random.Random, items: int) -> Example:
    """A pass key at a random place among `items` sentences of filler."""
    code = rng.randrange(10000, 100000)
    sentences = [rng.choice(FILLER) for _ in range(items)]
    needle = f"The pass key is {code}. Remember it. {code} is the pass key."
    sentences.insert(rng.randrange(items + 1), needle)
    question = "What is the pass key? The pass key is"
    return Example(" ".join(sentences) + f"\n{question}", f" {code}")


def list_copying(rng: random.Random, items: int) -> Example:
    """`items` words, drawn with repeats, to be told again in order."""
    words = " ".join(rng.choice(NOUNS) for _ in range(items))
    return Example(f"The list: {words}.\nThe same list again:", f" {words}.")


def state_tracking(rng: random.Random, items: int) -> Example:
    """`items` steps of a depth-first search in a tree at most 4 deep; asks for its stack."""
    lines, stack = ["Start at the root."], ["root"]
    for step in range(items):
        last = step == items - 1
        if len(stack) == 1 or (len(stack) < 5 and (last or rng.random() < 0.55)):
            stack.append(rng.choice([noun for noun in NOUNS if noun not in stack]))
            lines.append(f"Go down to {stack[-1]}.")
        else:
            stack.pop()
            lines.append(f"Go back up to {stack[-1]}.")
    path = " ".join(stack[1:])
    return Example("\n".join([*lines, "The path from the root to here: root"]), f" {path}.")


Generator = Callable[[random.Random, int], Example]
TASKS: dict[str, Generator] = {
    "recall": key_value_recall,
    "passkey": passkey,
    "copying": list_copying,
    "state": state_tracking,
}


def example(task: str, tokens: int, seed: int, count: Callable[[str], int]) -> Example:
    """The text of `task` with the most items whose `count` of tokens is at most `tokens`.

    Raises `ValueError` where not even one item fits.
    """

    def made(items: int) -> Example:
        return TASKS[task](random.Random(f"{task} {seed}"), items)

    if count(made(1).text) > tokens:
        raise ValueError(f"tokens: {count(made(1).text)} or more expected for {task}, got {tokens}")
    fits, fails = 1, 2
    while count(made(fails).text) <= tokens:
        fits, fails = fails, 2 * fails
    while fails - fits > 1:
        middle = (fits + fails) // 2
        fits, fails = (middle, fails) if count(made(middle).text) <= tokens else (fits, middle)
    return made(fits)


def encoded(tokenizer: Any, asked: Example) -> tuple[Tensor, int]:
    """Ids `[T]` of text and answer, and how many of them are the text's.

    Where a tokenizer joins the two, the answer starts with the first token that differs.
    """
    text = tokenizer(asked.text).input_ids
    both = tokenizer(asked.text + asked.answer).input_ids
    shared = 0
    while shared < min(len(text), len(both)) and text[shared] == both[shared]:
        shared += 1
    return torch.tensor(both), shared


@torch.inference_mode()
def answered(
    model: nn.Module, ids: Tensor, text_tokens: int, contender: Contender, step: int = 16
) -> dict[str, Any]:
    """How many of the tokens `ids[text_tokens:]` `contender` finds likeliest after those before.

    The text goes through the cache `step` tokens a forward; nothing of it is pinned.
    """
    cache = contender.cache(model, pin_prompt=False)
    ids = ids.to(next(model.parameters()).device)
    hits = 0
    for start in range(0, len(ids) - 1, step):
        stop = min(start + step, len(ids) - 1)
        wanted = min(stop - start, max(0, stop - text_tokens + 1))  # answer tokens in the forward
        arguments: dict[str, Any] = {NEWEST: cache, "logits_to_keep": max(1, wanted)}
        logits = model(ids[None, start:stop], **arguments).logits[0]
        found = logits[len(logits) - wanted :].argmax(dim=-1)
        hits += int((found == ids[stop + 1 - wanted : stop + 1]).sum())
    found = {"hits": hits, "answer_tokens": len(ids) - text_tokens}
    return found | contender.costs(model, cache, cache.report())


@dataclass(frozen=True)
class MemoryStudy:
    """Recall by task, length and contender, at lengths where the full cache succeeds.

    Score: share of examples answered without an error; in list copying, of the answers' tokens.
    """

    kind: ClassVar[str] = "memory"

    tasks: Sequence[str] = tuple(TASKS)
    lengths: Sequence[int] = (512, 1024)
    samples: int = 10
    step: int = 16
    full_at_least: float = 0.7
    """Score of the full cache below which a length is left out."""

    def works(self, subject: Subject, contenders: Sequence[Contender]) -> Iterator[Work]:
        """One text each, for every contender and the full cache."""
        everyone = [FULL, *(one for one in contenders if one.budget is not None)]
        for task, tokens, seed in product(self.tasks, self.lengths, range(self.samples)):
            key = {"study": self.kind, "task": task, "tokens": tokens, "seed": seed}
            key |= {"step": self.step} | subject.key
            keys = [key | contender.key for contender in everyone]
            yield Work(keys, self._runner(subject, everyone, task, tokens, seed))

    def _runner(
        self, subject: Subject, everyone: Sequence[Contender], task: str, tokens: int, seed: int
    ) -> Callable[[Sequence[int], Advance], list[Result]]:
        def run(missing: Sequence[int], advance: Advance) -> list[Result]:
            tokenizer = subject.tokenizer
            asked = example(task, tokens, seed, lambda text: len(tokenizer(text).input_ids))
            ids, count = encoded(tokenizer, asked)
            model = subject.model
            return [answered(model, ids, count, everyone[i], self.step) for i in missing]

        return run

    def rows(self, records: Sequence[Record]) -> tuple[list[Row], list[str]]:
        """One row per model, contender, task and length, and a note on each length left out."""
        groups, rows, notes = grouped(records), [], []
        scores = [self._score(group) for _, group in groups]
        full = {
            (row["model"], row["task"], row["tokens"]): score
            for (row, _), (score, _) in zip(groups, scores, strict=True)
            if row["budget"] is None
        }
        for (row, group), (score, interval) in zip(groups, scores, strict=True):
            model, task, tokens = place = (row["model"], row["task"], row["tokens"])
            if full[place] < self.full_at_least:
                notes.append(
                    f"left out: {model}, {task} at {tokens} tokens, where the full cache itself "
                    f"scores {full[place]:.2f}"
                )
                continue
            row |= {"samples": len(group), "score": score}
            row["score_low"], row["score_high"] = interval or (None, None)
            row["full_score"] = full[place]
            rows.append(row | costs_of([result for _, result in group]))
        return rows, list(dict.fromkeys(notes))

    def _score(self, group: Sequence[Record]) -> Any:
        """Mean and its interval."""
        blocks = [
            (result["hits"], result["answer_tokens"])
            if key["task"] == "copying"
            else (int(result["hits"] == result["answer_tokens"]), 1)
            for key, result in group
        ]
        hits, count = (sum(column) for column in zip(*blocks, strict=True))
        if group[0][0]["task"] == "copying":
            return hits / count, bootstrap_interval(blocks)
        return hits / count, wilson_interval(hits, count)
