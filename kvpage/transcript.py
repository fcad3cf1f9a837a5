"""Text of token ids that arrive a few at a time, characters of several tokens included."""

from __future__ import annotations

from typing import Any

INCOMPLETE = "\ufffd"
"""What a tokenizer decodes a part of a character to."""


class Transcript:
    """The text of a growing list of token ids.

    What is new is read as the difference between two short decodings that start at the same token,
    as a tokenizer's treatment of spaces depends on the token before; it is held back while it ends
    within a character. (The scheme of text-generation-inference; transformers' `TextStreamer`
    decodes from the last line break on.)
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self.token_ids: list[int] = []
        self._context = self._read = 0
        self._pieces: list[str] = []

    def read(self) -> str:
        """Take in the tokens added since; returns what they add to the text."""
        before = self._decode(self.token_ids[self._context : self._read])
        after = self._decode(self.token_ids[self._context :])
        if len(after) <= len(before) or after.endswith(INCOMPLETE):
            return ""
        self._context, self._read = self._read, len(self.token_ids)
        self._pieces.append(after[len(before) :])
        return self._pieces[-1]

    @property
    def read_so_far(self) -> str:
        """The text read so far, without what ends within a character."""
        return "".join(self._pieces)

    def rest(self) -> str:
        """What `read` held back."""
        before = self._decode(self.token_ids[self._context : self._read])
        return self._decode(self.token_ids[self._context :])[len(before) :]

    def finish(self) -> None:
        """No token is to come: take all of the text as the tokenizer decodes it at once."""
        self._pieces = [self._decode(self.token_ids)]
        self._context = self._read = len(self.token_ids)

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=self._skip))
