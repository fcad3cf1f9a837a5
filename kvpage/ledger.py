"""What the next forward does to the blocks, decided on the host from lengths alone.

The ledger holds the lengths and the block tables of all rows, and turns "q tokens arrive" into a
`Step`: a plain value that every layer applies to its own storage. No tensors, no device reads.

For a row with `live` tokens, when `live + q > budget + interval`::

    [0, live)                         before
    [0, kept)              kept = min(live, budget), survivors in token order
    [kept, kept + q)                  the new tokens

Of the `q` tokens the last `drafts` may be speculative: they count as if they came one by one, each
in a forward of its own, so what is due is due where plain decoding would have it. When that is at
new token `mid`, between the first draft and the last, the tokens from `mid` on attend to what a
compaction of `[0, kept + mid)` leaves, and `commit` carries it out if token `mid` is accepted.
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
    """Whether a new storage, with blocks laid out anew, replaces the old one."""
    copies: tuple[tuple[int, int], ...] = ()
    """Copy-on-write: `(shared, own)` blocks to copy before the new tokens are written."""
    mid: int | None = None
    """Index of the new token at which plain decoding would compact, if that is a draft."""

    @property
    def compacts(self) -> bool:
        return self.kept < self.live


class Ledger:
    """Lengths and block tables of all rows; every row has the same number of live tokens.

    `budget=None` never evicts. Storage grows geometrically up to the bound that the budget gives,
    ceil((budget + interval) / block_size) blocks per row, and falls back to it after a long prompt.
    While blocks are shared, by rows or by copies of the cache, it grows by what is needed and no
    block changes its id.
    """

    def __init__(
        self, budget: int | None, interval: int, block_size: int, static: bool = False
    ) -> None:
        """static: have the storage that the budget needs from the first token on."""
        self.budget, self.interval, self.block_size = budget, interval, block_size
        self.static = static
        self.pool = BlockPool(0)
        self.tables: list[list[int]] = []
        self.clear()

    def count_only(self) -> None:
        """Never evict and hand out one block per row: no layer stores anything under this ledger,
        which counts tokens alone."""
        self.budget, self.block_size = None, 1 << 62

    def clear(self) -> None:
        """Forget every row and what happened to them; blocks that only they held come free."""
        for table in self.tables:
            self.pool.release(table)
        self.pool.users -= 1
        self.pool = BlockPool(0)
        self.tables = []
        self.layout = Layout(())
        self._changed = False
        self.sharing = False
        """Whether rows may share blocks with each other."""
        self.seen = 0
        self.live = 0
        self.floor = 0
        """Live tokens the last compaction left: they can't be cropped."""
        self.prompt_tokens = 0
        self.prompt_open = True
        self.last: Step | None = None
        self.blocks_freed = 0
        self.blocks_peak = 0
        self.compactions = 0
        self.steps = 0

    def fork(self) -> Ledger:
        """A ledger of its own that holds the same blocks."""
        twin = Ledger(self.budget, self.interval, self.block_size)
        twin.__dict__.update(self.__dict__)
        twin.tables = [list(table) for table in self.tables]
        for table in twin.tables:
            self.pool.retain(table)
        self.pool.users += 1
        return twin

    @property
    def batch_size(self) -> int:
        return len(self.tables)

    @property
    def bound(self) -> int | None:
        """Blocks per row that decoding under the budget needs."""
        return None if self.budget is None else self._blocks(self.budget + self.interval)

    def kept(self, num_new: int) -> int:
        """Live tokens per row that a forward of `num_new` tokens, none a draft, appends to."""
        if self.budget is None or self.live + num_new <= self.budget + self.interval:
            return self.live
        return min(self.live, self.budget)

    def mid(self, num_new: int, drafts: int) -> int | None:
        """The draft, of the last `drafts` of `num_new` new tokens, that makes a compaction due.

        Raises `ValueError` when a second one would be due before the drafts end.
        """
        if self.budget is None or drafts == 0:
            return None
        sure = num_new - drafts
        mid = max(sure, self.budget + self.interval - self.kept(sure))
        if mid >= num_new:
            return None
        if num_new - mid > self.interval:
            raise ValueError(
                f"drafts: at most interval = {self.interval} tokens beyond a compaction expected, "
                f"got {num_new - mid}; use a larger interval or fewer draft tokens"
            )
        return mid

    def extends_prompt(self, num_new: int) -> bool:
        """Whether a forward of `num_new` tokens is prompt still: all before a one-token forward."""
        return self.prompt_open and (num_new > 1 or self.seen == 0)

    def begin(self, batch_size: int, num_new: int, drafts: int = 0) -> Step:
        """Account for a forward of `num_new` tokens per row and return what the layers do."""
        if not self.tables:
            self.tables = [[] for _ in range(batch_size)]
        mid = self.mid(num_new, drafts)
        if self.extends_prompt(num_new - drafts):
            self.prompt_tokens += num_new - drafts
            self.prompt_open = drafts == 0
        else:
            self.prompt_open = False
        return self._step(self.kept(num_new - drafts), num_new, mid)

    def crop(self, count: int) -> None:
        """Forget the last `count` tokens of every row; at most those since the last compaction."""
        self.seen -= count
        self.live -= count
        self.prompt_tokens = min(self.prompt_tokens, self.seen)
        blocks = self._blocks(self.live)
        for table in self.tables:
            self.pool.release(table[blocks:])
            del table[blocks:]
        self.layout = Layout(tuple(map(tuple, self.tables)))

    def commit(self) -> Step | None:
        """What the layers do once it is known which drafts of the last forward stay, if anything.

        Those not cropped stay. The compaction that plain decoding would have done on the way is
        returned as a step without new tokens.
        """
        last, self.last = self.last, None
        if last is None or last.mid is None or self.live - last.kept <= last.mid:
            return None
        assert self.budget is not None
        step = self._step(self.budget + self.live - last.kept - last.mid, 0, None)
        self.floor = self.budget
        return step

    @property
    def stays(self) -> bool:
        """Whether compactions are in place: every row has a region of its own."""
        alone = self.pool.users == 1 and not self.sharing
        return alone and self.static and self.layout.strides is not None

    def select_rows(self, rows: list[int]) -> None:
        """Row `i` becomes a copy of row `rows[i]`: blocks are shared, not copied."""
        tables = [list(self.tables[row]) for row in rows]
        for table in tables:
            self.pool.retain(table)
        for table in self.tables:
            self.pool.release(table)
        self.tables = tables
        self.sharing = self.sharing or len(set(rows)) < len(rows)
        self.layout = Layout(tuple(map(tuple, tables)))

    def check(self) -> None:
        """Raise `RuntimeError` unless tables, reference counts and lengths agree."""
        if self.pool.users == 1:
            self.pool.check(self.tables)
        blocks = self._blocks(self.live)
        for row, table in enumerate(self.tables):
            if len(table) != blocks:
                raise RuntimeError(
                    f"row {row} holds {len(table)} blocks, {self.live} live tokens need {blocks}"
                )
        if not 0 <= self.floor <= self.live <= self.seen:
            raise RuntimeError(
                f"live_tokens {self.live} is not within [floor = {self.floor}, seen = {self.seen}]"
            )

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _step(self, kept: int, num_new: int, mid: int | None) -> Step:
        live, source = self.live, self.layout
        needed = self._blocks(kept + num_new)
        capacity = self._capacity(needed, compacts=kept < live)
        alone = self.pool.users == 1
        fresh = alone and self.pool.num_blocks != capacity * self.batch_size
        relocations: tuple[tuple[int, int], ...] | None = None
        if kept < live:
            fresh = alone and (fresh or self.sharing or source.strides is None)
            self._compact(kept, capacity if fresh else None)
        else:
            fresh = fresh and not self.sharing
            relocations = self._relocate(capacity) if fresh else None
        copies = self._append(kept, needed)
        if self._changed:
            self.layout, self._changed = Layout(tuple(map(tuple, self.tables))), False
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
            mid=mid,
        )
        self.seen += num_new
        self.live = kept + num_new
        self.floor = kept if kept < live else self.floor
        self.blocks_peak = max(self.blocks_peak, self.pool.num_used_blocks)
        self.last = step if num_new else None
        return step

    def _capacity(self, needed: int, *, compacts: bool) -> int:
        """Blocks per row the storage should have for rows of `needed` blocks."""
        if self.static and self.bound is not None and needed <= self.bound:
            return self.bound
        current = self.pool.num_blocks // self.batch_size
        roomy = needed + max(needed // 4, 4)
        if self.bound is not None:
            roomy = max(needed, min(roomy, self.bound))
            if compacts and current > self.bound:
                return max(needed, self.bound)
        return current if needed <= current <= max(2 * roomy, self.bound or 0) else roomy

    def _compact(self, kept: int, fresh_capacity: int | None) -> None:
        """Cut every table to `kept` tokens; with a capacity, lay all rows out anew.

        A block that others hold too is left to them: its survivors go to a block of their own.
        """
        blocks = self._blocks(kept)
        used_before = self.pool.num_used_blocks
        if fresh_capacity is not None:
            self._lay_out(blocks, fresh_capacity)
        else:
            counts = self.pool.ref_counts
            shared = [[b for b in table[:blocks] if counts[b] > 1] for table in self.tables]
            own = [self._take(len(left)) for left in shared]  # all before any comes free
            for table, left, taken in zip(self.tables, shared, own, strict=True):
                new = dict(zip(left, taken, strict=True))
                self.pool.release(left + table[blocks:])
                table[:] = [new.get(block, block) for block in table[:blocks]]
        self.sharing = False
        self._changed = True
        self.blocks_freed += max(0, used_before - self.pool.num_used_blocks)
        self.compactions += 1

    def _lay_out(self, blocks: int, capacity: int) -> None:
        """A new pool; row `r` takes the first blocks of `[r * capacity, (r + 1) * capacity)`."""
        self.pool = BlockPool(capacity * self.batch_size)
        self.tables = [
            self.pool.allocate(blocks, after=row * capacity - 1) for row in range(self.batch_size)
        ]

    def _relocate(self, capacity: int) -> tuple[tuple[int, int], ...]:
        """Move every row to its own region of a new pool: `(old, new)` block ids."""
        old = self.tables
        self._lay_out(len(old[0]), capacity)
        self._changed = True
        return tuple(
            pair
            for before, after in zip(old, self.tables, strict=True)
            for pair in zip(before, after, strict=True)
        )

    def _append(self, kept: int, needed: int) -> tuple[tuple[int, int], ...]:
        """Extend every table to `needed` blocks; a shared block about to be written is replaced."""
        copies = []
        first_written, partial = divmod(kept, self.block_size)
        region = self.pool.num_blocks // self.batch_size
        for row, table in enumerate(self.tables):
            if partial and self.pool.ref_counts[table[first_written]] > 1:
                shared = table[first_written]
                (own,) = self._take(1)
                self.pool.release([shared])
                table[first_written] = own
                copies.append((shared, own))
                self._changed = True
            if len(table) < needed:
                before = table[-1] if table else row * region - 1
                table += self._take(needed - len(table), before)
                self._changed = True
        return tuple(copies)

    def _take(self, count: int, after: int | None = None) -> list[int]:
        """Allocate, growing the pool where blocks that are shared kept it from being laid out."""
        missing = count - self.pool.num_free_blocks
        if missing > 0:
            self.pool.grow(missing + self.batch_size * 4)
        return self.pool.allocate(count, after)
