"""Whether an answer is right: exact match, by math-verify where the answer is mathematics."""

from __future__ import annotations

import re

_WORDS = re.compile(r"[^\d\\$^=+*/(){}<>_|]*[^\W\d_]{2}[^\d\\$^=+*/(){}<>_|]*")
_SAID = re.compile(r"(?:answer|result)\s*(?:is\s*:?|:)\s*(.+)", re.IGNORECASE)


def reference(answer: str) -> str:
    """What counts of an answer in a data set: what follows GSM8K's `####`, else all of it."""
    return answer.rsplit("####", 1)[-1].strip()


def method(answer: str) -> str:
    """How `answer` is compared: "string" for plain words, else "math-verify"."""
    return "string" if _WORDS.fullmatch(answer.strip()) else "math-verify"


def is_right(answer: str, text: str) -> bool:
    r"""Whether `text`, which a model wrote, ends in `answer`.

    math-verify finds the last mathematical expression, `\boxed{}` first, and compares what it
    means. Plain words are compared letter by letter but for case, spaces and a closing full stop:
    the last `\boxed{}`, else what follows the last "answer is" or "answer:", else the last line.
    """
    if method(answer) == "string":
        return _plain(_said_last(text)) == _plain(answer)
    from math_verify import parse, verify

    return bool(verify(parse(f"\\boxed{{{answer.strip().strip('$')}}}"), parse(text)))


def _said_last(text: str) -> str:
    boxed = re.findall(r"\\boxed\{(?:\\text\{)?([^{}]*)\}", text)
    if boxed:
        return str(boxed[-1])
    said = _SAID.findall(text)
    lines = [line for line in text.splitlines() if line.strip()]
    return str(said[-1]) if said else "".join(lines[-1:])


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).strip(" .\"'*")
