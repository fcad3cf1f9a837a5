"""What the next forward does to the blocks, decided on the host from lengths alone.

The ledger holds the lengths and the block tables of all rows, and turns "q tokens arrive" into a
`Step`: a plain value that every layer applies to its own storage. No tensors, no device reads.

For a row with `live` tokens, when `live + q > budget + interval`::

    [0, live)                         before
    [0, kept)              kept = min(live, budget), survivors in token order
    [kept, kept + q)                  the new tokens
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpage.blocks import BlockPool, Layout


@dataclass(frozen=True)
class Step:
    """One forward, as every layer applies it: compact, then move or copy blocks, then append."""

    index: int
    num_new: int
    seen: int
    """Tokens each row had seen before this forward."""
    live: int
    """Live tokens per row before this forward."""
    kept: int
    """Live tokens per row once the compaction of this forward is done; `live` when none is due."""
    source: Layout
    """Block tables before the compaction."""
    layout: Layout
    """Block tables the new tokens are appended under."""
    num_blocks: int
    """Blocks the storage has from here on."""
    relocations: tuple[tuple[int, int], ...] | None = None
    """`(old, new)` block ids when a new storage replaces the old one without a compaction."""
    fresh: bool = False
    """Whether a new storage replaces the old one."""
    copies: tuple[tuple[int, int], ...] = ()
    """Copy-on-write: `(shared, own)` blocks to copy before the new tokens are written."""

    @property
    def compacts(self) -> bool:
        return self.kept < self.live


class Ledger:
    """Lengths and block tables of all rows; every row has the same number of live tokens.

    `budget=None` never evicts. Storage grows geometrically up to the bound that the budget gives,
    ceil((budget + interval) / block_size) blocks per row, and falls back to it after a long prompt.
    """

    def __init__(self, budget: int | None, interval: int, block_size: int) -> None:
        self.budget, self.interval, self.block_size = budget, interval, block_size
        self.clear()

    def clear(self) -> None:
        """Forget every row and what happened to them."""
        self.blocks_freed = 0
        self.blocks_peak = 0
        self.compactions = 0
        self.steps = 0
        self.pool = BlockPool(0)
        self.tables: list[list[int]] = []
        self.layout = Layout(())
        self.seen = 0
        self.live = 0
        self.prompt_tokens = 0
        self.prompt_open = True

    @property
    def batch_size(self) -> int:
        return len(self.tables)

    @property
    def bound(self) -> int | None:
        """Blocks per row that decoding under the budget needs."""
        if self.budget is None:
            return None
        return -(-(self.budget + self.interval) // self.block_size)

    def kept(self, num_new: int) -> int:
        """Live tokens per row that a forward of `num_new` tokens appends to."""
        if self.budget is None or self.live + num_new <= self.budget + self.interval:
            return self.live
        return min(self.live, self.budget)

    def extends_prompt(self, num_new: int) -> bool:
        """Whether a forward of `num_new` tokens is prompt still: all before a one-token forward."""
        return self.prompt_open and (num_new > 1 or self.seen == 0)

    def begin(self, batch_size: int, num_new: int) -> Step:
        """Account for a forward of `num_new` tokens per row and return what the layers do."""
        live, kept, source = self.live, self.kept(num_new), self.layout
        if not self.tables:
            self.tables = [[] for _ in range(batch_size)]
        needed = -(-(kept + num_new) // self.block_size)
        capacity = self._capacity(needed, compacts=kept < live)
        fresh = self.pool.num_blocks != capacity * batch_size
        relocations: tuple[tuple[int, int], ...] | None = None
        if kept < live:
            fresh = fresh or source.strides is None or self._is_shared()
            self._compact(kept, capacity if fresh else None)
        elif fresh:
            relocations = self._relocate(capacity)
        tables_before = sum(map(len, self.tables)) if not (fresh or kept < live) else -1
        copies = self._append(kept, needed)
        if copies or tables_before != batch_size * needed:
            self.layout = Layout(tuple(map(tuple, self.tables)))
        self.steps += 1
        step = Step(
            index=self.steps,
            num_new=num_new,
            seen=self.seen,
            live=live,
            kept=kept,
            source=source,
            layout=self.layout,
            num_blocks=self.pool.num_blocks,
            relocations=relocations,
            fresh=fresh,
            copies=copies,
        )
        self._advance(kept, num_new)
        return step

    def select_rows(self, rows: list[int]) -> None:
        """Row `i` becomes a copy of row `rows[i]`: blocks are shared, not copied."""
        tables = [list(self.tables[row]) for row in rows]
        for table in tables:
            self.pool.retain(table)
        for table in self.tables:
            self.pool.release(table)
        self.tables = tables
        self.layout = Layout(tuple(map(tuple, tables)))

    def check(self) -> None:
        """Raise `RuntimeError` unless tables, reference counts and lengths agree."""
        self.pool.check(self.tables)
        blocks = -(-self.live // self.block_size)
        for row, table in enumerate(self.tables):
            if len(table) != blocks:
                raise RuntimeError(
                    f"row {row} holds {len(table)} blocks, {self.live} live tokens need {blocks}"
                )
        if not 0 <= self.live <= self.seen:
            raise RuntimeError(f"live_tokens {self.live} is not within [0, seen = {self.seen}]")

    def _is_shared(self) -> bool:
        return any(self.pool.ref_counts[block] > 1 for table in self.tables for block in table)

    def _capacity(self, needed: int, *, compacts: bool) -> int:
        """Blocks per row the storage should have for rows of `needed` blocks."""
        current = self.pool.num_blocks // self.batch_size
        roomy = needed + max(needed // 4, 4)
        if self.bound is not None:
            roomy = max(needed, min(roomy, self.bound))
            if compacts and current > self.bound:
                return max(needed, self.bound)
        return current if needed <= current <= max(2 * roomy, self.bound or 0) else roomy

    def _compact(self, kept: int, fresh_capacity: int | None) -> None:
        """Cut every table to `kept` tokens; with a capacity, lay all rows out anew."""
        blocks = -(-kept // self.block_size)
        used_before = self.pool.num_used_blocks
        if fresh_capacity is None:
            for table in self.tables:
                self.pool.release(table[blocks:])
                del table[blocks:]
        else:
            self._lay_out([blocks] * self.batch_size, fresh_capacity)
        self.blocks_freed += max(0, used_before - self.pool.num_used_blocks)
        self.compactions += 1

    def _lay_out(self, lengths: list[int], capacity: int) -> None:
        """A new pool; row `r` takes the first blocks of `[r * capacity, (r + 1) * capacity)`."""
        self.pool = BlockPool(capacity * self.batch_size)
        self.tables = [
            self.pool.allocate(length, after=row * capacity - 1)
            for row, length in enumerate(lengths)
        ]

    def _relocate(self, capacity: int) -> tuple[tuple[int, int], ...]:
        """Move every block to a new pool, each to its first holder's region; sharing survives."""
        old, self.pool = self.tables, BlockPool(capacity * self.batch_size)
        new_ids: dict[int, int] = {}
        self.tables = []
        for row, table in enumerate(old):
            moved = []
            for i, block in enumerate(table):
                if block in new_ids:
                    self.pool.retain([new_ids[block]])
                else:
                    new_ids[block] = self.pool.allocate(1, after=row * capacity + i - 1)[0]
                moved.append(new_ids[block])
            self.tables.append(moved)
        return tuple(new_ids.items())

    def _append(self, kept: int, needed: int) -> tuple[tuple[int, int], ...]:
        """Extend every table to `needed` blocks; a shared block about to be written is replaced."""
        copies = []
        first_written, partial = divmod(kept, self.block_size)
        for table in self.tables:
            if partial and self.pool.ref_counts[table[first_written]] > 1:
                shared = table[first_written]
                own = self.pool.allocate(1)[0]
                self.pool.release([shared])
                table[first_written] = own
                copies.append((shared, own))
            if len(table) < needed:
                table += self.pool.allocate(needed - len(table), table[-1] if table else None)
        return tuple(copies)

    def _advance(self, kept: int, num_new: int) -> None:
        if self.extends_prompt(num_new):
            self.prompt_tokens += num_new
        else:
            self.prompt_open = False
        self.seen += num_new
        self.live = kept + num_new
        self.blocks_peak = max(self.blocks_peak, self.pool.num_used_blocks)
