"""Block bookkeeping against a naive model that keeps lists."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpage.blocks import BlockPool, Layout, OutOfBlocks


class PoolAgainstLists(RuleBasedStateMachine):
    """The model is the list of tables: a block is free when no table holds it."""

    @initialize(num_blocks=st.integers(0, 12))
    def make(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.tables: list[list[int]] = []

    def free(self) -> list[int]:
        held = {block for table in self.tables for block in table}
        return [block for block in range(self.pool.num_blocks) if block not in held]

    @rule(count=st.integers(0, 6), after=st.none() | st.integers(-1, 12))
    def allocate(self, count: int, after: int | None) -> None:
        free = self.free()
        if count > len(free):
            before = list(self.pool.ref_counts)
            with pytest.raises(OutOfBlocks) as caught:
                self.pool.allocate(count, after)
            error = caught.value
            assert (error.needed, error.free, error.total) == (count, len(free), len(before))
            assert self.pool.ref_counts == before
            return
        taken = self.pool.allocate(count, after)
        assert len(taken) == count
        for block in taken:
            assert after is None or block == after + 1 or after + 1 not in free
            free.remove(block)
            after = block
        self.tables.append(taken)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        self.pool.retain(table)
        self.tables.append(list(table))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        kept = data.draw(st.integers(0, len(table)))
        free_before = len(self.free())
        freed = self.pool.release(table[kept:])
        del table[kept:]
        assert freed == len(self.free()) - free_before

    @precondition(lambda self: self.free())
    @rule(data=st.data())
    def touch_free_block(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.free()))
        with pytest.raises(ValueError, match=f"block {block} is free"):
            self.pool.retain([block])
        with pytest.raises(ValueError, match=f"block {block} is free"):
            self.pool.release([block])

    @invariant()
    def agrees(self) -> None:
        held = Counter(block for table in self.tables for block in table)
        assert self.pool.ref_counts == [held[block] for block in range(self.pool.num_blocks)]
        assert self.pool.num_free_blocks == len(self.free())
        assert self.pool.num_used_blocks == len(held)
        self.pool.check(self.tables)


TestPoolAgainstLists = PoolAgainstLists.TestCase
TestPoolAgainstLists.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def test_row_that_grows_alone_stays_consecutive() -> None:
    pool = BlockPool(8)
    table = pool.allocate(2)
    for _ in range(3):
        table += pool.allocate(2, after=table[-1])
    assert table == list(range(8))


def test_out_of_blocks_names_needed_free_and_total() -> None:
    pool = BlockPool(5)
    pool.allocate(3)
    with pytest.raises(OutOfBlocks, match="4 blocks needed, 2 of 5 are free"):
        pool.allocate(4)
    assert sorted(pool.allocate(2)) == [3, 4]


@pytest.fixture
def shared_pool() -> tuple[BlockPool, list[list[int]]]:
    """Blocks 0 and 1 are held by two tables, 2 by one, 3 and 4 are free."""
    pool = BlockPool(5)
    tables = [pool.allocate(2), pool.allocate(1, after=1)]
    pool.retain(tables[0])
    tables[1] = tables[0] + tables[1]
    pool.check(tables)
    return pool, tables


def leak(pool: BlockPool, tables: list[list[int]]) -> None:
    pool.allocate(1)


def release_but_keep(pool: BlockPool, tables: list[list[int]]) -> None:
    pool.release([2])


def forget_table(pool: BlockPool, tables: list[list[int]]) -> None:
    del tables[0]


def hold_twice(pool: BlockPool, tables: list[list[int]]) -> None:
    tables[1].append(2)
    pool.ref_counts[2] += 1


def hold_unknown_block(pool: BlockPool, tables: list[list[int]]) -> None:
    tables[0].append(99)


def hold_free_block(pool: BlockPool, tables: list[list[int]]) -> None:
    tables[0].append(3)


def count_too_high(pool: BlockPool, tables: list[list[int]]) -> None:
    pool.ref_counts[0] = 3


def count_too_low(pool: BlockPool, tables: list[list[int]]) -> None:
    pool.ref_counts[1] = 1


def free_list_misses_block(pool: BlockPool, tables: list[list[int]]) -> None:
    pool._free.remove(4)


def free_list_has_used_block(pool: BlockPool, tables: list[list[int]]) -> None:
    pool._free.add(2)


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (leak, "tables hold {0: 2, 1: 2, 2: 1}, reference counts say {0: 2, 1: 2, 2: 1, 3: 1}"),
        (release_but_keep, "tables hold {0: 2, 1: 2, 2: 1}, reference counts say {0: 2, 1: 2}"),
        (forget_table, "tables hold {0: 1, 1: 1, 2: 1}, reference counts say {0: 2, 1: 2, 2: 1}"),
        (hold_twice, "a table holds a block twice: [0, 1, 2, 2]"),
        (hold_unknown_block, "99: 1"),
        (hold_free_block, "3: 1"),
        (count_too_high, "reference counts say {0: 3, 1: 2, 2: 1}"),
        (count_too_low, "reference counts say {0: 2, 1: 1, 2: 1}"),
        (free_list_misses_block, "free list has [3], reference counts say [3, 4]"),
        (free_list_has_used_block, "free list has [2, 3, 4], reference counts say [3, 4]"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_check_raises_with_the_numbers_of_every_disagreement(
    shared_pool: tuple[BlockPool, list[list[int]]], corrupt: object, message: str
) -> None:
    pool, tables = shared_pool
    assert callable(corrupt)
    corrupt(pool, tables)
    with pytest.raises(RuntimeError) as caught:
        pool.check(tables)
    assert message in str(caught.value)


def test_double_free_raises(shared_pool: tuple[BlockPool, list[list[int]]]) -> None:
    pool, _ = shared_pool
    assert pool.release([2]) == 1
    with pytest.raises(ValueError, match="block 2 is free already"):
        pool.release([2])
    assert pool.num_free_blocks == 3


def naive_strides(tables: list[list[int]]) -> tuple[int, int] | None:
    """Try every stride: the tables must be exactly what it says, and no block held twice."""
    if not all(tables):
        return None
    first, blocks = tables[0][0], len(tables[0])
    everything = [block for table in tables for block in table]
    if len(set(everything)) != len(everything):
        return None
    for step in [0] if len(tables) == 1 else range(1, 40):
        rows = [first + row * step for row in range(len(tables))]
        if tables == [list(range(start, start + blocks)) for start in rows]:
            return first, step
    return None


@st.composite
def nearly_strided_tables(draw: st.DrawFn) -> list[list[int]]:
    """Equally spaced consecutive rows, at times overlapping, at times disturbed."""
    rows, blocks = draw(st.integers(1, 4)), draw(st.integers(0, 4))
    first, step = draw(st.integers(0, 5)), draw(st.integers(0, 6))
    tables = [list(range(first + r * step, first + r * step + blocks)) for r in range(rows)]
    if draw(st.booleans()):
        tables = draw(st.permutations(tables))
    if blocks and draw(st.booleans()):
        row, column = draw(st.integers(0, rows - 1)), draw(st.integers(0, blocks - 1))
        tables[row][column] = draw(st.integers(0, 30))
    return tables


@given(nearly_strided_tables())
@settings(max_examples=300, deadline=None)
def test_strides_exist_exactly_for_equally_spaced_consecutive_rows(
    tables: list[list[int]],
) -> None:
    assert Layout(tuple(map(tuple, tables))).strides == naive_strides(tables)


@pytest.mark.parametrize(
    ("tables", "strides"),
    [
        ([[3, 4, 5]], (3, 0)),
        ([[0, 1], [2, 3], [4, 5]], (0, 2)),
        ([[1, 2], [5, 6], [9, 10]], (1, 4)),
        ([[0, 1], [1, 2]], None),
        ([[0, 1], [0, 1]], None),
        ([[2, 3], [0, 1]], None),
        ([[0, 1], [4, 5], [9, 10]], None),
        ([[0, 2, 1, 3]], None),
        ([[0, 2]], None),
        ([[1, 0]], None),
        ([[]], None),
        ([[0], []], None),
    ],
    ids=str,
)
def test_strides_of_known_layouts(tables: list[list[int]], strides: tuple[int, int] | None) -> None:
    assert Layout(tuple(map(tuple, tables))).strides == strides
