"""The ledger without tensors: lengths, bounds, and whether its steps keep every row's contents.

`SlotModel` is a storage of token names: it applies a `Step` as a layer applies it to tensors, and
what it holds is compared with a plain list per row.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpage.blocks import Layout
from kvpage.ledger import Ledger, Step

Token = tuple[int, int]
"""(row the token was first given to, a number of its own)."""


class SlotModel:
    """One token name per slot; `None` where nothing was written since the storage was made."""

    def __init__(self, block_size: int) -> None:
        self.size = block_size
        self.slots: list[Token | None] = []

    def apply(self, step: Step, survivors: list[list[int]] | None, new: list[list[Token]]) -> None:
        """Compact or relocate, copy blocks, append: what a layer does with a step."""
        if not step.fresh:
            self.slots += [None] * (step.num_blocks * self.size - len(self.slots))
        if step.compacts:
            assert survivors is not None
            self._compact(step, survivors)
        elif step.fresh:
            self._relocate(step)
        assert len(self.slots) == step.num_blocks * self.size
        for source, target in step.copies:
            self._block_into(self.slots, source, self.slots, target)
        for row, table in enumerate(step.layout.tables):
            for i, token in enumerate(new[row]):
                self.slots[self._slot(table, step.kept + i)] = token

    def row(self, table: tuple[int, ...] | list[int], live: int) -> list[Token | None]:
        return [self.slots[self._slot(table, i)] for i in range(live)]

    def _compact(self, step: Step, survivors: list[list[int]]) -> None:
        """Move one token after the other: the strictest order, with no scratch at all."""
        old = self.slots
        self.slots = [None] * (step.num_blocks * self.size) if step.fresh else old
        for source, target, kept in zip(
            step.source.tables, step.layout.tables, survivors, strict=True
        ):
            for i, j in enumerate(kept):
                self.slots[self._slot(target, i)] = old[self._slot(source, j)]

    def _relocate(self, step: Step) -> None:
        assert step.relocations is not None
        old, self.slots = self.slots, [None] * (step.num_blocks * self.size)
        for source, target in step.relocations:
            self._block_into(old, source, self.slots, target)

    def _block_into(
        self, old: list[Token | None], source: int, new: list[Token | None], target: int
    ) -> None:
        for offset in range(self.size):
            new[target * self.size + offset] = old[source * self.size + offset]

    def _slot(self, table: tuple[int, ...] | list[int], index: int) -> int:
        return table[index // self.size] * self.size + index % self.size


def choose_survivors(how: str, rng: random.Random, live: int, kept: int) -> list[int]:
    """`kept` of `[0, live)`, ascending."""
    if how == "first":
        return list(range(kept))
    if how == "last":
        return list(range(live - kept, live))
    if how == "ends":
        return [*range(kept // 2), *range(live - (kept - kept // 2), live)]
    return sorted(rng.sample(range(live), kept))


@dataclass
class Run:
    """A ledger, the slot model driven by its steps, and a plain list per row."""

    budget: int | None
    interval: int
    block_size: int
    batch: int = 1
    rows: list[list[Token]] = field(default_factory=list)
    last: Step | None = None
    freed: int = 0
    peak: int = 0
    compactions: int = 0
    prompt: int = 0
    prompt_open: bool = True
    rows_changed: bool = False
    """Whether rows were selected since the storage was last laid out for a compaction."""

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.budget, self.interval, self.block_size)
        self.slots = SlotModel(self.block_size)
        self.rows = [[] for _ in range(self.batch)]
        self.names = iter(range(10**9))
        self.seen = 0

    def forward(self, num_new: int, how: str = "random", rng: random.Random | None = None) -> Step:
        live = len(self.rows[0])
        used = len({block for table in self.ledger.tables for block in table})
        step = self.ledger.begin(self.batch, num_new)
        survivors = None
        if step.compacts:
            rng = rng or random.Random(step.index)
            survivors = [choose_survivors(how, rng, live, step.kept) for _ in self.rows]
            self.rows = [[row[j] for j in s] for row, s in zip(self.rows, survivors, strict=True)]
            kept_blocks = math.ceil(step.kept / self.block_size) * self.batch
            self.freed += max(0, used - kept_blocks)
            self.compactions += 1
            self.rows_changed = False
        new = [[(r, next(self.names)) for _ in range(num_new)] for r in range(self.batch)]
        self.slots.apply(step, survivors, new)
        self.rows = [row + added for row, added in zip(self.rows, new, strict=True)]
        self._check_step(step, live, num_new)
        self._count(num_new)
        self.last = step
        return step

    def select_rows(self, rows: list[int]) -> None:
        self.ledger.select_rows(rows)
        self.rows = [list(self.rows[row]) for row in rows]
        self.batch = len(rows)
        self.rows_changed = True

    def check(self) -> None:
        """The ledger agrees with itself, with the lists, and with its bounds."""
        ledger = self.ledger
        ledger.check()
        assert ledger.seen == self.seen
        assert ledger.live == len(self.rows[0])
        assert (ledger.blocks_freed, ledger.compactions) == (self.freed, self.compactions)
        assert ledger.prompt_tokens == self.prompt
        assert ledger.blocks_peak == self.peak
        assert tuple(map(tuple, ledger.tables)) == ledger.layout.tables
        if self.last is None:
            assert not ledger.tables
            return
        for table, row in zip(ledger.tables, self.rows, strict=True):
            assert self.slots.row(table, ledger.live) == row
        if self.budget is None:
            return
        num_new = self.last.num_new
        assert ledger.live <= self.budget + max(self.interval, num_new)
        if num_new <= self.interval and not self.rows_changed:
            bound = math.ceil((self.budget + self.interval) / self.block_size)
            assert all(len(table) <= bound for table in ledger.tables)
            assert ledger.pool.num_blocks <= bound * self.batch

    def _check_step(self, step: Step, live: int, num_new: int) -> None:
        """A step says what it does: due exactly when the forward would pass budget + interval."""
        kept = live
        if self.budget is not None and live + num_new > self.budget + self.interval:
            kept = min(live, self.budget)
        assert (step.num_new, step.seen, step.live, step.kept) == (num_new, self.seen, live, kept)
        assert step.compacts == (kept < live)
        assert step.num_blocks == self.ledger.pool.num_blocks
        assert step.fresh or step.relocations is None
        assert not (step.compacts and step.relocations)

    def _count(self, num_new: int) -> None:
        self.prompt_open = self.prompt_open and (num_new > 1 or self.seen == 0)
        self.prompt += num_new if self.prompt_open else 0
        self.seen += num_new
        held = {block for table in self.ledger.tables for block in table}
        self.peak = max(self.peak, len(held))


HOW = st.sampled_from(["first", "last", "ends", "random"])


class LedgerAgainstLists(RuleBasedStateMachine):
    @initialize(
        budget=st.none() | st.integers(1, 24),
        interval=st.integers(1, 10),
        block_size=st.integers(1, 6),
        batch=st.integers(1, 4),
    )
    def make(self, budget: int | None, interval: int, block_size: int, batch: int) -> None:
        self.run_state = Run(budget, interval, block_size, batch)

    @rule(num_new=st.integers(1, 40), how=HOW, rng=st.integers(0, 9))
    def forward(self, num_new: int, how: str, rng: int) -> None:
        self.run_state.forward(num_new, how, random.Random(rng))

    @rule(tokens=st.integers(1, 30), how=HOW, rng=st.integers(0, 9))
    def decode(self, tokens: int, how: str, rng: int) -> None:
        for _ in range(tokens):
            self.run_state.forward(1, how, random.Random(rng))
            self.run_state.check()

    @precondition(lambda self: self.run_state.seen > 0)
    @rule(data=st.data())
    def select_rows(self, data: st.DataObject) -> None:
        row = st.integers(0, self.run_state.batch - 1)
        self.run_state.select_rows(data.draw(st.lists(row, min_size=1, max_size=4)))

    @rule(batch=st.integers(1, 4))
    def clear(self, batch: int) -> None:
        old = self.run_state
        old.ledger.clear()
        self.run_state = Run(old.budget, old.interval, old.block_size, batch)
        self.run_state.ledger = old.ledger

    @invariant()
    def agrees(self) -> None:
        self.run_state.check()


TestLedgerAgainstLists = LedgerAgainstLists.TestCase
TestLedgerAgainstLists.settings = settings(max_examples=150, stateful_step_count=20, deadline=None)


def first_compaction(run: Run, limit: int = 10_000) -> int:
    """One-token forwards up to and with the first that compacts."""
    for count in range(1, limit):
        if run.forward(1).compacts:
            return count
        run.check()
    raise AssertionError("no compaction")


BUDGET, INTERVAL, BLOCK = 48, 24, 8
AROUND = (-1, 0, 1)


@pytest.mark.parametrize("delta", AROUND)
@pytest.mark.parametrize(
    "length",
    [2, BLOCK, 5 * BLOCK, BUDGET, BUDGET + BLOCK, BUDGET + INTERVAL, 3 * BUDGET],
    ids=["shortest", "block", "5 blocks", "budget", "budget+block", "bound", "3 budgets"],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_compactions_come_exactly_when_due(length: int, delta: int, batch: int) -> None:
    prompt = length + delta
    run = Run(BUDGET, INTERVAL, BLOCK, batch)
    run.forward(prompt)
    run.check()
    assert first_compaction(run) == max(1, BUDGET + INTERVAL - prompt + 1)
    for _ in range(3):
        run.check()
        assert run.ledger.live == BUDGET + 1
        assert first_compaction(run) == INTERVAL
    assert run.ledger.pool.num_blocks == batch * (BUDGET + INTERVAL) // BLOCK


@pytest.mark.parametrize("delta", AROUND)
@pytest.mark.parametrize("budget", [BUDGET - 1, BUDGET, BUDGET + 1])
@pytest.mark.parametrize("interval", [1, BLOCK - 1, BLOCK, BLOCK + 1])
def test_bounds_hold_at_every_block_boundary(budget: int, interval: int, delta: int) -> None:
    run = Run(budget, interval, BLOCK)
    run.forward(budget + interval + delta)
    bound = math.ceil((budget + interval) / BLOCK)
    for _ in range(4 * (interval + BLOCK)):
        run.forward(1)
        run.check()
        assert run.ledger.live <= budget + interval
        assert run.ledger.pool.num_blocks <= bound
    assert run.compactions >= 4


@pytest.mark.parametrize("delta", AROUND)
def test_chunk_that_passes_the_bound_is_attended_in_full(delta: int) -> None:
    run = Run(BUDGET, INTERVAL, BLOCK)
    run.forward(BUDGET // 2)
    chunk = BUDGET + INTERVAL - BUDGET // 2 + delta
    step = run.forward(chunk)
    assert not step.compacts, "fewer tokens than the budget are live: nothing to evict"
    assert run.ledger.live == BUDGET + INTERVAL + delta
    assert run.forward(1).compacts == (delta >= 0)
    run.check()


@pytest.mark.parametrize("chunk", [1, INTERVAL - 1, INTERVAL, INTERVAL + 1, 3 * BUDGET])
def test_chunked_prompt_never_holds_more_than_budget_and_chunk(chunk: int) -> None:
    run = Run(BUDGET, INTERVAL, BLOCK, batch=2)
    for _ in range(12):
        run.forward(chunk)
        run.check()
        assert run.ledger.live <= BUDGET + max(chunk, INTERVAL)


def test_storage_falls_back_to_the_bound_after_a_long_prompt() -> None:
    run = Run(BUDGET, INTERVAL, BLOCK, batch=2)
    run.forward(10 * BUDGET)
    assert run.ledger.pool.num_blocks >= 2 * 10 * BUDGET // BLOCK
    step = run.forward(1)
    assert step.fresh and step.compacts
    assert run.ledger.pool.num_blocks == 2 * (BUDGET + INTERVAL) // BLOCK
    run.check()


def test_steady_state_compacts_in_place() -> None:
    run = Run(BUDGET, INTERVAL, BLOCK, batch=3)
    run.forward(3 * BUDGET)
    run.forward(1)
    for _ in range(5 * INTERVAL):
        step = run.forward(1)
        assert not step.fresh and not step.copies and step.layout.strides is not None
    assert run.compactions == 6


def test_layout_object_changes_only_when_tables_do() -> None:
    """A layer keeps its views as long as it sees the same `Layout`: most steps must not make one,
    and one that keeps the object must keep the tables."""
    run = Run(BUDGET, INTERVAL, BLOCK)
    previous = run.forward(1)
    made = 0
    for _ in range(10 * INTERVAL):
        step = run.forward(1)
        if step.layout is previous.layout:
            assert not step.fresh and step.layout.tables == previous.layout.tables
        made += step.layout is not previous.layout
        previous = step
    assert made <= 10 * INTERVAL // BLOCK + run.compactions + 2


@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("batch", [1, 3])
def test_without_budget_nothing_is_evicted_and_growth_is_geometric(
    block_size: int, batch: int
) -> None:
    ledger = Ledger(None, 1, block_size)
    grown, copied, tokens = 0, 0, 20_000 if block_size > 1 else 5_000
    for _ in range(tokens):
        step = ledger.begin(batch, 1)
        assert step.kept == step.live and not step.copies
        grown += step.fresh
        copied += len(step.relocations or ())
        assert ledger.pool.num_blocks <= batch * (1.25 * math.ceil(ledger.live / block_size) + 4)
    blocks = tokens // block_size
    assert ledger.live == tokens and ledger.compactions == 0
    assert grown <= math.log(blocks, 1.25) + 1
    assert copied <= 5 * blocks * batch, "appending must cost O(1) amortised"
    assert ledger.layout.strides is not None
    ledger.check()


@pytest.mark.parametrize("rows", [[0, 0], [1, 1, 0], [0, 1], [1], [1, 0], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("live", [1, BLOCK - 1, BLOCK, BLOCK + 1, BUDGET + INTERVAL])
def test_selected_rows_share_blocks_and_diverge_on_write(rows: list[int], live: int) -> None:
    run = Run(BUDGET, INTERVAL, BLOCK, batch=2)
    run.forward(live)
    run.select_rows(rows)
    run.check()
    used = run.ledger.pool.num_used_blocks
    assert used == len(set(rows)) * math.ceil(live / BLOCK), "selecting rows must not copy blocks"
    for _ in range(2 * INTERVAL):
        run.forward(1)
        run.check()


def test_copy_on_write_copies_only_the_block_that_is_written() -> None:
    run = Run(None, 1, BLOCK)
    run.forward(3 * BLOCK + 1)
    run.select_rows([0, 0, 0])
    step = run.forward(1)
    assert len(step.copies) == 2, "the last holder of a block needs no copy"
    assert len(run.forward(1).copies) == 0
    run.check()


def extra_block(ledger: Ledger) -> None:
    ledger.tables[1] += ledger.pool.allocate(1)


def missing_block(ledger: Ledger) -> None:
    ledger.pool.release([ledger.tables[0].pop()])


def leaked_block(ledger: Ledger) -> None:
    ledger.pool.allocate(1)


def more_live_than_seen(ledger: Ledger) -> None:
    ledger.seen = 8


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (extra_block, "row 1 holds 3 blocks, 9 live tokens need 2"),
        (missing_block, "row 0 holds 1 blocks, 9 live tokens need 2"),
        (leaked_block, "reference counts say"),
        (more_live_than_seen, r"live_tokens 9 is not within \[floor = 0, seen = 8\]"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_check_raises_with_the_numbers(corrupt: object, message: str) -> None:
    ledger = Ledger(BUDGET, INTERVAL, BLOCK)
    ledger.begin(2, 9)
    ledger.check()
    assert callable(corrupt)
    corrupt(ledger)
    with pytest.raises(RuntimeError, match=message):
        ledger.check()


def test_clear_forgets_everything() -> None:
    ledger = Ledger(BUDGET, INTERVAL, BLOCK)
    fresh = vars(Ledger(BUDGET, INTERVAL, BLOCK)).keys()
    ledger.begin(2, 3 * BUDGET)
    ledger.begin(2, 1)
    ledger.clear()
    assert vars(ledger).keys() == fresh
    assert (ledger.seen, ledger.live, ledger.batch_size, ledger.pool.num_blocks) == (0, 0, 0, 0)
    assert (ledger.steps, ledger.compactions, ledger.blocks_freed) == (0, 0, 0)
    assert ledger.prompt_open and ledger.prompt_tokens == 0
    assert ledger.layout == Layout(())
    ledger.check()
