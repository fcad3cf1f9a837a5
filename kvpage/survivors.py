"""Which tokens of a text still live, and in how much of the model: a text to look at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from kvpage import html
from kvpage.cache import PagedCompactCache
from kvpage.transcript import Transcript


@dataclass(frozen=True)
class Survivors:
    """A text and, of each of its tokens, the share of (layer, KV head) pairs in which it lives.

    pieces: the text of each token, together the whole text (a character of several tokens is the
    last one's); shares: in [0, 1], over the layers of full attention, `None` for a token that was
    decoded but not cached yet; pairs: how many (layer, KV head) there are. Notebooks show the text
    with evicted tokens faint, `print` counts, and leaves out what lives nowhere.
    """

    pieces: tuple[str, ...]
    shares: tuple[float | None, ...]
    pairs: int

    @classmethod
    def of(
        cls,
        cache: PagedCompactCache,
        token_ids: Sequence[int] | Tensor,
        tokenizer: Any,
        row: int = 0,
    ) -> Survivors:
        """The survivors in `row` of `cache`, whose text is `token_ids`.

        token_ids: `[T]` all tokens of the row, prompt included, pads before it left out; the one
        decoded last, which is not cached yet, may be among them. Raises `ValueError` for a cache
        without tokens in layers of full attention, a row there is not, or too few or many tokens.
        """
        ids = torch.as_tensor(token_ids)
        if ids.ndim != 1 or ids.is_floating_point():
            raise ValueError(f"token_ids: ids [T] of one row expected, got {list(ids.shape)}")
        if not 0 <= row < cache.ledger.batch_size:
            raise ValueError(f"row: within [0, {cache.ledger.batch_size}) expected, got {row}")
        live = [cache.live_positions(layer_idx)[row].cpu() for layer_idx in cache.full_layers]
        if not live:
            raise ValueError("cache: one with layers of full attention expected, it has none")
        cached = 1 + max(int(positions.max()) for positions in live)  # the latest always lives
        if len(ids) not in (cached, cached + 1):
            raise ValueError(
                f"token_ids: the {cached} cached tokens of row {row} expected, pads left out, and "
                f"perhaps the one decoded last, got {len(ids)}"
            )
        pairs = sum(len(positions) for positions in live)
        counts = sum(torch.bincount(p[p >= 0].flatten(), minlength=cached) for p in live)
        shares: list[float | None] = [count / pairs for count in torch.as_tensor(counts).tolist()]
        shares += [None] * (len(ids) - cached)
        return cls(_pieces(ids.tolist(), tokenizer), tuple(shares), pairs)

    @property
    def summary(self) -> str:
        """The tokens counted: everywhere, in part, nowhere."""
        cached = [share for share in self.shares if share is not None]
        everywhere, nowhere = cached.count(1), cached.count(0)
        return (
            f"{len(cached):,} tokens cached: {everywhere:,} live in all {self.pairs:,} pairs of a "
            f"full-attention layer and a KV head, {len(cached) - everywhere - nowhere:,} in some, "
            f"{nowhere:,} in none"
        )

    def __str__(self) -> str:
        runs = groupby(zip(self.pieces, self.shares, strict=True), key=lambda pair: pair[1] == 0)
        shown = (
            " […] " if gone else "".join(piece for piece, _ in run) for gone, run in runs
        )  # fmt: skip
        return f"{self.summary}:\n\n" + "".join(shown)

    def _repr_html_(self) -> str:
        return html.panel(
            html.line(self.summary, "the fewer, the fainter"), html.greyed(self.pieces, self.shares)
        )


def _pieces(token_ids: list[int], tokenizer: Any) -> tuple[str, ...]:
    """What each token adds to the text, special tokens spelt out."""
    text, pieces = Transcript(tokenizer, skip_special_tokens=False), []
    for token_id in token_ids:
        text.token_ids.append(token_id)
        pieces.append(text.read())
    if pieces:
        pieces[-1] += text.rest()
    return tuple(pieces)
