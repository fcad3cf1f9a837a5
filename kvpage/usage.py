"""What a cache holds now: the numbers of a report that change with every token, at little cost."""

from __future__ import annotations

from typing import NamedTuple

from kvpage import html
from kvpage.report import bytes_in_block, bytes_of_state, readable
from kvpage.stack import LayerStack


class Usage(NamedTuple):
    """What a cache holds, all rows together but for the lengths, which are per row.

    The blocks are those of the layers of full attention, or, where there are none, of those with a
    sliding window; the bytes those of all layers.
    """

    seen_tokens: int
    live_tokens: int
    blocks_used: int
    blocks_freed: int
    """By compaction, so far."""
    num_blocks: int
    """Blocks there are, used or free."""
    bytes_in_use: int

    @property
    def blocks_free(self) -> int:
        """Blocks that no row holds."""
        return self.num_blocks - self.blocks_used

    def html(self, title: str, *notes: str) -> str:
        """A strip of blocks and the numbers, under `title` and `notes`."""
        return html.panel(
            html.heading(title, *notes),
            html.strip(self.blocks_used, self.blocks_free, self.blocks_freed),
            html.line(
                f"{self.seen_tokens:,} tokens seen",
                f"{self.live_tokens:,} live",
                f"{readable(self.bytes_in_use)} KV in use",
            ),
        )


class Gauge:
    """Reads the `Usage` of a cache. The bytes of a block are summed over the layers once, so that a
    decode step costs no such loop; nothing is asked of the device."""

    def __init__(self, stack: LayerStack) -> None:
        self._stack = stack
        self._summed_layers = 0
        self._block_bytes: list[int] = []
        """Of each ledger: bytes that one of its blocks takes in all its layers."""

    def read(self) -> Usage:
        """What the cache holds now; also right after a forward that stopped half-way."""
        stack, shown = self._stack, self._stack.shown
        if self._summed_layers != len(stack.paged) or not self._block_bytes:
            self._sum()
        pools = [ledger.pool for ledger in stack.ledgers]
        held = zip(self._block_bytes, pools, strict=True)
        return Usage(
            seen_tokens=stack.ledger.seen,
            live_tokens=shown.live,
            blocks_used=shown.pool.num_used_blocks,
            blocks_freed=shown.blocks_freed,
            num_blocks=shown.pool.num_blocks,
            bytes_in_use=sum(size * pool.num_used_blocks for size, pool in held)
            + sum(map(bytes_of_state, stack.states)),
        )

    def _sum(self) -> None:
        layers = self._stack.paged
        sizes = [bytes_in_block(layer) for layer in layers]
        self._block_bytes = [
            sum(size for layer, size in zip(layers, sizes, strict=True) if layer.ledger is ledger)
            for ledger in self._stack.ledgers
        ]
        self._summed_layers = len(layers) if all(sizes) else -1  # again where one has none yet
