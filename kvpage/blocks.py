"""Block bookkeeping: who holds which block. Plain Python, knows no tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise


class OutOfBlocks(RuntimeError):
    """More blocks were asked for than the pool has free."""

    def __init__(self, needed: int, free: int, total: int) -> None:
        super().__init__(f"{needed} blocks needed, {free} of {total} are free")
        self.needed, self.free, self.total = needed, free, total


class BlockPool:
    """Reference counts and the free list of `num_blocks` blocks, for one cache or its copies.

    A block is free exactly when its reference count is zero. `allocate` prefers the block that
    follows `after`, so that a row that grows alone in its region stays consecutive in memory.
    """

    def __init__(self, num_blocks: int) -> None:
        self.ref_counts = [0] * num_blocks
        self.users = 1
        """How many ledgers hold blocks here: alone, one may lay its blocks out anew."""
        self._free = set(range(num_blocks))

    @property
    def num_blocks(self) -> int:
        return len(self.ref_counts)

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_used_blocks(self) -> int:
        return len(self.ref_counts) - len(self._free)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Take `count` free blocks, each following the one before where that is free.

        Raises `OutOfBlocks`, with nothing taken, when fewer than `count` are free.
        """
        if count > len(self._free):
            raise OutOfBlocks(count, len(self._free), self.num_blocks)
        taken: list[int] = []
        for _ in range(count):
            following = -1 if after is None else after + 1
            block = following if following in self._free else min(self._free)
            self._free.remove(block)
            self.ref_counts[block] = 1
            taken.append(block)
            after = block
        return taken

    def grow(self, count: int) -> None:
        """Add `count` free blocks; the blocks there keep their ids."""
        first = self.num_blocks
        self.ref_counts += [0] * count
        self._free.update(range(first, first + count))

    def retain(self, blocks: Iterable[int]) -> None:
        """Count one more holder of each block."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                raise ValueError(f"block {block} is free and can't be retained")
            self.ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> int:
        """Count one holder less of each block; returns how many came free."""
        freed = 0
        for block in blocks:
            if self.ref_counts[block] == 0:
                raise ValueError(f"block {block} is free already")
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self._free.add(block)
                freed += 1
        return freed

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise `RuntimeError`, with numbers, unless the counts equal what `tables` hold."""
        held: Counter[int] = Counter()
        for table in tables:
            if len(set(table)) != len(table):
                raise RuntimeError(f"a table holds a block twice: {list(table)}")
            held.update(table)
        counted = {block: count for block, count in enumerate(self.ref_counts) if count}
        if dict(held) != counted:
            raise RuntimeError(f"tables hold {dict(held)}, reference counts say {counted}")
        free = {block for block, count in enumerate(self.ref_counts) if count == 0}
        if free != self._free:
            raise RuntimeError(
                f"free list has {sorted(self._free)}, reference counts say {sorted(free)}"
            )


@dataclass(frozen=True)
class Layout:
    """Where the rows lie: their block tables (one per row, in token order)."""

    tables: tuple[tuple[int, ...], ...]

    @cached_property
    def strides(self) -> tuple[int, int] | None:
        """`(first block, blocks between rows)` when every row is one consecutive run and the rows
        start at equal distances, so that the whole batch is a view; else `None`."""
        starts = []
        for table in self.tables:
            if not table or table[-1] - table[0] != len(table) - 1:
                return None
            if any(b != a + 1 for a, b in pairwise(table)):
                return None
            starts.append(table[0])
        step = starts[1] - starts[0] if len(starts) > 1 else 0
        longest = max(len(table) for table in self.tables)
        if len(starts) > 1 and step < longest:
            return None
        if any(b - a != step for a, b in pairwise(starts)):
            return None
        return starts[0], step
