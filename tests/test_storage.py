"""Storage in blocks against a plain dense tensor that is concatenated and gathered."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from helpers import poison_fresh_memory
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvpage.blocks import Layout
from kvpage.compaction import CompactionPlan, apply_plan, plan
from kvpage.kernels import move_slots
from kvpage.ledger import Ledger, Step
from kvpage.storage import LayerStorage

HEADS, DIM, VALUE_DIM, BLOCK = 3, 8, 5, 4
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

LAYOUTS = {
    "one row": ((0, 1, 2, 3, 4, 5),),
    "one row, later": ((3, 4, 5, 6, 7, 8),),
    "strided": ((0, 1, 2, 3, 4, 5), (6, 7, 8, 9, 10, 11)),
    "strided, apart": ((1, 2, 3, 4, 5, 6), (9, 10, 11, 12, 13, 14)),
    "unequal distances": ((0, 1, 2, 3, 4, 5), (6, 7, 8, 9, 10, 11), (13, 14, 15, 16, 17, 18)),
    "descending": ((6, 7, 8, 9, 10, 11), (0, 1, 2, 3, 4, 5)),
    "scattered": ((0, 7, 3, 9, 2, 11), (1, 8, 4, 10, 5, 6)),
}
NUM_BLOCKS = 20
TOKENS = 6 * BLOCK
CHUNKS = [(1,) * TOKENS, (TOKENS,), (BLOCK,) * 6, (BLOCK - 1, BLOCK + 1, 2 * BLOCK, 8), (7, 1, 16)]

every_layout = pytest.mark.parametrize("tables", LAYOUTS.values(), ids=LAYOUTS)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever nobody wrote is NaN, and NaN never equals what was appended."""
    poison_fresh_memory(monkeypatch)


def states(batch: int, tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    keys = torch.randn(batch, HEADS, tokens, DIM).to(dtype)
    return keys, torch.randn(batch, HEADS, tokens, VALUE_DIM).to(dtype)


def new_storage(keys: Tensor, values: Tensor, num_blocks: int = NUM_BLOCKS) -> LayerStorage:
    storage = LayerStorage(BLOCK, keys, values)
    storage.relocate(num_blocks, ())
    return storage


def append_step(layout: Layout, kept: int, num_new: int) -> Step:
    return Step(1, num_new, kept, kept, kept, layout, layout, NUM_BLOCKS)


def fill(layout: Layout, chunks: tuple[int, ...] = (TOKENS,)) -> tuple[LayerStorage, Tensor]:
    """A storage with random keys in `layout`, and the same keys, dense."""
    keys, values = states(len(layout.tables), sum(chunks))
    storage = new_storage(keys, values)
    start = 0
    for count in chunks:
        part = slice(start, start + count)
        storage.append(append_step(layout, start, count), keys[:, :, part], values[:, :, part])
        start += count
    return storage, keys


def lies_in(tensor: Tensor, owner: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == owner.untyped_storage().data_ptr()


@every_layout
@pytest.mark.parametrize("chunks", CHUNKS, ids=lambda c: f"{len(c)} forwards")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_append_returns_what_concatenation_would(
    tables: tuple[tuple[int, ...], ...], chunks: tuple[int, ...], dtype: torch.dtype
) -> None:
    keys, values = states(len(tables), TOKENS, dtype)
    storage = new_storage(keys, values)
    start = 0
    for count in chunks:
        stop = start + count
        layout = Layout(tuple(table[: -(-stop // BLOCK)] for table in tables))
        got = storage.append(
            append_step(layout, start, count), keys[:, :, start:stop], values[:, :, start:stop]
        )
        for found, expected in zip(got, (keys, values), strict=True):
            assert found.dtype == dtype
            assert torch.equal(found, expected[:, :, :stop])
            assert torch.equal(storage.read(layout, stop)[0], keys[:, :, :stop])
        start = stop


@every_layout
def test_reads_copy_nothing_exactly_where_rows_are_strided(
    tables: tuple[tuple[int, ...], ...],
) -> None:
    layout = Layout(tables)
    storage, _ = fill(layout)
    for live in (1, BLOCK, TOKENS):
        keys, values = storage.read(layout, live)
        assert lies_in(keys, storage.keys) == (layout.strides is not None)
        assert lies_in(values, storage.values) == (layout.strides is not None)


def test_every_slot_of_a_view_lies_within_the_storage() -> None:
    layout = Layout(((14, 15), (16, 17), (18, 19)))
    storage, _ = fill(layout, (2 * BLOCK,))
    keys, _ = storage.read(layout, 2 * BLOCK)
    last = keys[-1, -1, -1]
    end = storage.keys.data_ptr() + storage.keys.nbytes
    assert last.data_ptr() + DIM * last.element_size() == end


def test_nothing_outside_the_written_slots_changes() -> None:
    layout = Layout(LAYOUTS["scattered"])
    storage, _ = fill(layout, (BLOCK,))
    before = storage.keys.clone()
    new = states(2, 2)
    storage.append(append_step(layout, BLOCK, 2), *new)
    changed = (storage.keys != before) & ~(storage.keys.isnan() & before.isnan())
    slots = changed.any(dim=-1).any(dim=0)
    assert slots.nonzero().tolist() == [[7, 0], [7, 1], [8, 0], [8, 1]]


def test_shared_blocks_are_read_by_both_rows_and_written_by_none() -> None:
    shared, own = Layout(((0, 1),)), Layout(((0, 1, 2), (0, 1, 3)))
    storage, prompt = fill(shared, (2 * BLOCK,))
    keys, values = states(2, 3)
    live_keys, _ = storage.append(append_step(own, 2 * BLOCK, 3), keys, values)
    assert torch.equal(live_keys, torch.cat((prompt.expand(2, -1, -1, -1), keys), dim=2))
    assert torch.equal(storage.read(shared, 2 * BLOCK)[0], prompt)


@every_layout
@pytest.mark.parametrize("num_blocks", [6, 30])
def test_relocated_blocks_keep_their_contents(
    tables: tuple[tuple[int, ...], ...], num_blocks: int
) -> None:
    num_blocks = max(num_blocks, sum(map(len, tables)))
    storage, keys = fill(Layout(tables))
    held = [block for table in tables for block in table]
    targets = random.Random(0).sample(range(num_blocks), len(held))
    pairs = dict(zip(held, targets, strict=True))
    storage.relocate(num_blocks, pairs.items())
    assert storage.keys.shape == (HEADS, num_blocks, BLOCK, DIM)
    assert storage.values.shape == (HEADS, num_blocks, BLOCK, VALUE_DIM)
    moved = Layout(tuple(tuple(pairs[block] for block in table) for table in tables))
    assert torch.equal(storage.read(moved, TOKENS)[0], keys)


def test_relocation_of_a_layout_in_use_drops_its_views() -> None:
    layout = Layout(((0, 1),))
    storage, keys = fill(layout, (2 * BLOCK,))
    old, _ = storage.read(layout, 2 * BLOCK)
    storage.relocate(2, [(0, 0), (1, 1)])
    old.fill_(torch.nan)
    assert torch.equal(storage.read(layout, 2 * BLOCK)[0], keys)


def test_copied_blocks_equal_their_source_and_leave_it() -> None:
    layout = Layout(((0, 1, 2),))
    storage, keys = fill(layout, (3 * BLOCK,))
    values = storage.read(layout, 3 * BLOCK)[1].clone()
    storage.copy_blocks([(2, 9), (0, 5)])
    for tables in ((0, 1, 2), (5, 1, 9)):
        got = storage.read(Layout((tables,)), 3 * BLOCK)
        assert torch.equal(got[0], keys) and torch.equal(got[1], values)


def test_bytes_reserved_count_keys_and_values() -> None:
    storage = new_storage(*states(1, 1, torch.bfloat16), num_blocks=7)
    assert storage.bytes_reserved == 2 * HEADS * 7 * BLOCK * (DIM + VALUE_DIM)


# Moving the survivors.

PLANS: dict[str, Callable[[int, random.Random], list[int]]] = {
    "identity": lambda live, rng: list(range(live)),
    "first": lambda live, rng: list(range(live // 2)),
    "last": lambda live, rng: list(range(live // 2, live)),
    "all but the first": lambda live, rng: list(range(1, live)),
    "all but one in the middle": lambda live, rng: [*range(7), *range(8, live)],
    "every other": lambda live, rng: list(range(1, live, 2)),
    "ends": lambda live, rng: [*range(4), *range(live - 6, live)],
    "only the last": lambda live, rng: [live - 1],
    "random": lambda live, rng: sorted(rng.sample(range(live), live // 3)),
}


def survivors_of(how: str, batch: int, live: int) -> Tensor:
    """Live slots `[B, Hkv, kept]`; random plans differ per row and head."""
    rng = random.Random(live)
    return torch.tensor([[PLANS[how](live, rng) for _ in range(HEADS)] for _ in range(batch)])


@pytest.mark.parametrize("how", PLANS)
@pytest.mark.parametrize("scratch_tokens", [1, 2, 5, 16, 10_000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tables", [LAYOUTS["strided, apart"], LAYOUTS["scattered"]], ids=str)
def test_sliding_in_place_equals_copying_away(
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    scratch_tokens: int,
    dtype: torch.dtype,
    tables: tuple[tuple[int, ...], ...],
) -> None:
    monkeypatch.setattr("kvpage.kernels.reference.SCRATCH_ELEMENTS", scratch_tokens * HEADS * DIM)
    blocks = torch.randn(HEADS, NUM_BLOCKS, BLOCK, DIM).to(dtype)
    survivors = survivors_of(how, len(tables), TOKENS)
    kept = survivors.shape[2]
    slots = torch.tensor(
        [[table[t // BLOCK] * BLOCK + t % BLOCK for t in range(TOKENS)] for table in tables]
    )
    source = slots[:, None].expand(-1, HEADS, -1).gather(2, survivors)
    expected = blocks.clone().view(HEADS, -1, DIM)
    for row in range(len(tables)):
        for head in range(HEADS):
            expected[head, slots[row, :kept]] = blocks.view(HEADS, -1, DIM)[head, source[row, head]]
    move_slots(blocks, source, slots[:, :kept].contiguous(), blocks)
    assert torch.equal(blocks.view(HEADS, -1, DIM), expected)


def test_moving_into_a_new_storage_leaves_the_old_one() -> None:
    old, new = torch.randn(HEADS, 4, BLOCK, DIM), torch.full((HEADS, 2, BLOCK, DIM), torch.nan)
    before, source = old.clone(), torch.tensor([[[1, 5, 9], [0, 2, 15], [3, 4, 5]]])
    move_slots(old, source, torch.tensor([[4, 5, 6]]), new)
    assert torch.equal(old, before)
    expected = old.view(HEADS, -1, DIM).gather(1, source[0, :, :, None].expand(-1, -1, DIM))
    assert torch.equal(new.view(HEADS, -1, DIM)[:, 4:7], expected)
    assert new.view(HEADS, -1, DIM)[:, [0, 1, 2, 3, 7]].isnan().all()


def test_survivors_never_move_backwards_past_another() -> None:
    layout = Layout(LAYOUTS["strided, apart"])
    storage, _ = fill(layout)
    source, target = plan(survivors_of("random", 2, TOKENS), layout, layout, storage)
    assert (target[:, None] <= source).all()
    assert (target.diff(dim=-1) == 1).all()
    assert (source.diff(dim=-1) > 0).all()


class Allocations(TorchDispatchMode):
    """The largest storage an operation made."""

    largest_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.largest_bytes = max(self.largest_bytes, tensor.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sliding_in_place_needs_less_than_a_mebibyte_of_scratch(dtype: torch.dtype) -> None:
    blocks = torch.randn(8, 272, 16, 128).to(dtype)  # 17 MiB in float32
    source = torch.arange(2, 4098).expand(1, 8, -1)
    with Allocations() as allocations:
        move_slots(blocks, source, torch.arange(4096)[None], blocks)
    assert 0 < allocations.largest_bytes < 2**20


# Ledger, plan and storage together.


@pytest.mark.parametrize("seed", range(16))
def test_random_runs_equal_a_dense_cache(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Forwards, compactions in place and into new storages, row selections: like dense tensors."""
    rng, block_size = random.Random(seed), random.Random(seed).choice([1, 3, 4, 16])
    monkeypatch.setattr("kvpage.kernels.reference.SCRATCH_ELEMENTS", rng.choice([1, 100, 10_000]))
    ledger = Ledger(rng.choice([None, 12, 40]), rng.choice([1, 5, 16]), block_size)
    batch, dtype = rng.randint(1, 4), rng.choice(DTYPES)
    dense = list(states(batch, 0, dtype))
    storage = LayerStorage(block_size, *dense)
    for _ in range(50):
        num_new = rng.choice([1, 1, 1, 2, 7, 50])
        step, new = ledger.begin(batch, num_new), states(batch, num_new, dtype)
        if not step.fresh:
            storage.ensure(step.num_blocks)
        if step.compacts:
            kept = [
                [sorted(rng.sample(range(step.live), step.kept)) for _ in range(HEADS)]
                for _ in range(batch)
            ]
            survivors = torch.tensor(kept)
            moves = CompactionPlan(*plan(survivors, step.source, step.layout, storage))
            apply_plan(moves, storage, step)
            dense = [
                t.gather(2, survivors[..., None].expand(*survivors.shape, t.shape[3]))
                for t in dense
            ]
        elif step.fresh:
            storage.relocate(step.num_blocks, step.relocations or ())
        storage.copy_blocks(step.copies)
        got = storage.append(step, *new)
        dense = [torch.cat(parts, dim=2) for parts in zip(dense, new, strict=True)]
        assert torch.equal(got[0], dense[0]) and torch.equal(got[1], dense[1])
        if rng.random() < 0.1:
            rows = [rng.randrange(batch) for _ in range(rng.randint(1, 4))]
            ledger.select_rows(rows)
            batch, dense = len(rows), [t[rows] for t in dense]
            again = storage.read(ledger.layout, ledger.live)
            assert torch.equal(again[0], dense[0]) and torch.equal(again[1], dense[1])
