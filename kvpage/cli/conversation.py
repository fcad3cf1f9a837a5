"""A conversation in one cache: what each turn adds to the token ids that came before."""

from __future__ import annotations

from typing import Any

REPLY = "KVPAGEREPLY"
"""Stands for an answer, to find what a template puts behind it."""


class Conversation:
    """The token ids of a conversation, turn by turn, by the tokenizer's chat template.

    They only ever grow, as a cache that is kept from turn to turn needs it: an answer stays as the
    model wrote it, rather than as the template would write it anew.
    """

    def __init__(self, tokenizer: Any, system: str | None = None) -> None:
        """Raises `ValueError` for a tokenizer without a chat template."""
        if tokenizer.chat_template is None:
            raise ValueError(
                "--chat, --system: a tokenizer with a chat template expected, got none"
            )
        self._tokenizer, self._system = tokenizer, system
        self.ids: list[int] = []

    def ask(self, text: str) -> list[int]:
        """All ids up to where the model answers `text`."""
        if not self.ids:
            first = [] if self._system is None else [{"role": "system", "content": self._system}]
            self.ids = self._ids(self._written([*first, {"role": "user", "content": text}]))
            return self.ids
        turns = [("user", "?"), ("assistant", REPLY), ("user", text)]
        written = self._written([{"role": role, "content": what} for role, what in turns])
        more = self._ids(written.split(REPLY, 1)[1])
        if more[:1] == self.ids[-1:]:  # the answer ended as the template ends it
            more = more[1:]
        self.ids = self.ids + more
        return self.ids

    def answered(self, ids: list[int]) -> None:
        """The model answered with the tokens `ids`."""
        self.ids = self.ids + ids

    def _written(self, messages: list[dict[str, str]]) -> str:
        render = self._tokenizer.apply_chat_template
        return str(render(messages, tokenize=False, add_generation_prompt=True))

    def _ids(self, text: str) -> list[int]:
        """The template writes special tokens itself."""
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)
