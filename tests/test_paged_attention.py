"""Attention through block tables and the writing of new tokens: the definitions against plain
formulas, the kernels, interpreted, against the definitions."""

from __future__ import annotations

import random
from contextlib import ExitStack
from importlib import import_module
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import triton_version
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from kvpage.kernels import reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAN = float("nan")
AS_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Rows(NamedTuple):
    """Blocks whose live slots are random and whose other slots are NaN, and scattered tables."""

    keys: Tensor
    values: Tensor
    tables: Tensor
    stop: Tensor


def scattered(stops, size: int = 16, spare: int = 2, seed: int = 0) -> tuple[Tensor, int]:
    """Tables of rows with `stops` live slots, whose unused entries name no block; and the number
    of blocks."""
    rng, width = random.Random(seed), -(-max(stops) // size) + spare
    counts = [-(-stop // size) for stop in stops]
    blocks = rng.sample(range(sum(counts) + 3), sum(counts))
    rows = [[blocks.pop() for _ in range(count)] for count in counts]
    garbage = [-1, 2**31 - 1, -(2**31)]
    tables = [row + [rng.choice(garbage) for _ in range(width - len(row))] for row in rows]
    return torch.tensor(tables, dtype=torch.int32), sum(counts) + 3


def filled(stops, dtype=torch.float32, kv_heads=2, dim=64, value_dim=None, size=16, **how) -> Rows:
    tables, num_blocks = scattered(stops, size, **how)
    keys = torch.full((kv_heads, num_blocks, size, dim), NAN, dtype=dtype)
    values = torch.full((kv_heads, num_blocks, size, value_dim or dim), NAN, dtype=dtype)
    for row, stop in enumerate(stops):
        slot = torch.arange(stop)
        block = tables[row].long()[slot // size]
        for blocks in (keys, values):
            new = torch.randn(kv_heads, stop, blocks.shape[3]).to(dtype)
            blocks[:, block, slot % size] = new
    return Rows(keys, values, tables, torch.tensor(stops, dtype=torch.int32))


def queries(rows: Rows, groups: int = 2) -> Tensor:
    kv_heads, _, _, dim = rows.keys.shape
    return torch.randn(len(rows.stop), kv_heads * groups, dim).to(rows.keys.dtype)


def check(triton, query: Tensor, rows: Rows, splits=(None, 4), **options) -> Tensor:
    """With each number of splits within twice the error of the reference, both against float64; or
    within four float32 units in the last place of the values, which another order of sums costs."""
    scale = query.shape[2] ** -0.5
    exact = reference.paged_attention(query.double(), *rows, scale, **options)
    plain = reference.paged_attention(query, *rows, scale, **options)
    assert exact.isfinite().all()
    allowed = 2 * (plain - exact).abs().max()
    least = 4 * torch.finfo(torch.float32).eps * rows.values.double().nan_to_num().abs().max()
    for count in splits:
        got = triton("paged_attention", query, *rows, scale, splits=count, **options)
        assert got.dtype == query.dtype and got.shape == exact.shape
        assert (got - exact).abs().max() <= torch.maximum(allowed, least)
    return got


# The definition.


def dense(blocks: Tensor, rows: Rows, row: int) -> Tensor:
    """Live tokens `[Hkv, stop, D]` of a row, block by block."""
    count = int(rows.stop[row])
    size = blocks.shape[2]
    parts = [blocks[:, block] for block in rows.tables[row, : -(-count // size)].tolist()]
    return torch.cat(parts, dim=1)[:, :count] if parts else blocks[:, 0, :0]


@pytest.mark.parametrize("window", [None, 1, 20, 500])
@pytest.mark.parametrize("hidden", [None, "holes"])
def test_the_definition_is_sdpa_over_what_is_seen(window, hidden):
    torch.manual_seed(0)
    rows = filled([70, 1, 33], torch.float64, dim=32, value_dim=24)
    query, visible = queries(rows, 3), None
    if hidden:
        visible = torch.rand(3, 75) < 0.5
        visible[range(3), rows.stop.long() - 1] = True
    got = reference.paged_attention(query, *rows, 0.3, window=window, visible=visible)
    for row, stop in enumerate(rows.stop.tolist()):
        mask = torch.ones(stop, dtype=torch.bool) if visible is None else visible[row, :stop]
        if window is not None:
            mask = mask & (torch.arange(stop) >= stop - window)
        k, v = (dense(blocks, rows, row)[None] for blocks in (rows.keys, rows.values))
        q = query[row, :, None][None]
        expected = scaled_dot_product_attention(q, k, v, mask[None], scale=0.3, enable_gqa=True)
        torch.testing.assert_close(got[row], expected[0, :, 0], atol=1e-12, rtol=0)


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_the_definition_with_softcap_and_sinks_is_the_formula(softcap, with_sinks):
    torch.manual_seed(0)
    rows = filled([19, 4], torch.float64, dim=8)
    query, sinks = queries(rows), torch.randn(4) if with_sinks else None
    got = reference.paged_attention(query, *rows, 0.5, softcap=softcap, sinks=sinks)
    for row in range(2):
        for head in range(4):
            k, v = (dense(blocks, rows, row)[head // 2] for blocks in (rows.keys, rows.values))
            logits = 0.5 * (k * query[row, head]).sum(1)
            if softcap is not None:
                logits = softcap * (logits / softcap).tanh()
            weights = logits.exp()
            total = weights.sum() + (sinks[head].double().exp() if with_sinks else 0)
            torch.testing.assert_close(got[row, head], (weights[:, None] * v).sum(0) / total)


def test_the_definition_writes_token_by_token():
    keys, values = torch.zeros(2, 6, 4, 3), torch.zeros(2, 6, 4, 5)
    new_keys, new_values = torch.randn(2, 2, 6, 3), torch.randn(2, 2, 6, 5)
    tables = torch.tensor([[5, 0, 3], [2, 4, -1]], dtype=torch.int32)
    start = torch.tensor([3, 0], dtype=torch.int32)
    reference.write_kv(keys, values, new_keys, new_values, tables, start)
    for blocks, new in ((keys, new_keys), (values, new_values)):
        assert (blocks != 0).sum() == new.numel()
        for row in range(2):
            for i in range(6):
                block = tables[row, (start[row] + i) // 4]
                assert torch.equal(blocks[:, block, (start[row] + i) % 4], new[row, :, i])


# The kernel of attention.


@pytest.mark.parametrize("live", [1, 15, 16, 17, 1000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_equals_the_reference_at_any_length(triton, live, dtype):
    torch.manual_seed(live)
    rows = filled([live, max(1, live // 3)], dtype)
    check(triton, queries(rows), rows)


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize(("dim", "size"), [(64, 16), (80, 32), (96, 64), (128, 128), (256, 16)])
def test_attention_equals_the_reference_for_all_heads(triton, groups, dim, size):
    torch.manual_seed(groups)
    rows = filled([150, 33], DTYPES[groups % 3], dim=dim, size=size)
    check(triton, queries(rows, groups), rows, splits=(1, 2))


@pytest.mark.parametrize("size", [1, 5, 16, 32, 64, 128, 256])
def test_attention_equals_the_reference_for_any_block_size(triton, size):
    torch.manual_seed(size)
    rows = filled([300, 129], torch.bfloat16, kv_heads=1, size=size)
    check(triton, queries(rows), rows, splits=(1, 2), window=200)


@pytest.mark.parametrize(
    ("dim", "value_dim", "kv_heads", "groups"),
    [(64, 128, 2, 2), (192, 128, 1, 4), (40, 8, 3, 1), (8, 12, 1, 40), (512, 512, 1, 2)],
)
def test_attention_equals_the_reference_for_other_heads(triton, dim, value_dim, kv_heads, groups):
    torch.manual_seed(dim)
    rows = filled([90, 12], torch.bfloat16, kv_heads, dim, value_dim)
    check(triton, queries(rows, groups), rows, splits=(1, 2))


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("window", [None, 120])
@pytest.mark.parametrize("softcap", [None, 2.5])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("hidden", [False, True])
def test_options_alone_and_together(triton, dtype, window, softcap, with_sinks, hidden):
    torch.manual_seed(1)
    rows = filled([200, 70], dtype, kv_heads=1, dim=128)
    options = {"window": window, "softcap": softcap}
    if with_sinks:
        options["sinks"] = torch.randn(4).to(dtype)
    if hidden:
        options["visible"] = torch.rand(2, 200) < 0.6
    check(triton, queries(rows, 4), rows, **options)


@pytest.mark.parametrize("window", [1, 15, 16, 17, 64, 2**31 - 1])
def test_windows_of_any_width(triton, window):
    torch.manual_seed(2)
    rows = filled([300, 17, 1])
    check(triton, queries(rows), rows, window=window)


@pytest.mark.parametrize("scale", [1e-4, 0.3, 1e3])
def test_softcaps_far_from_and_close_to_their_limit(triton, scale):
    torch.manual_seed(3)
    rows = filled([100, 60])
    check(triton, queries(rows) * scale, rows, softcap=20.0)


@pytest.mark.parametrize(("cap", "least", "most"), [(1e4, 1e-4, 1e-3), (8.0, 1e-2, 3.0)])
def test_the_tanh_of_softcaps_is_exact_to_a_few_units(triton, cap, least, most):
    """One token against a sink as large, so that an error of its logit shows in the weight."""
    x = torch.logspace(*torch.tensor([least, most]).log10().tolist(), 200)
    sinks = cap * x.tanh()
    table, stop = torch.tensor([[[0]], [[1]]], dtype=torch.int32)
    rows = Rows(*torch.ones(2, 1, 1, 1, 1), table, stop[0])
    query, options = (x * cap).view(1, 200, 1), {"softcap": cap, "sinks": sinks}
    got = triton("paged_attention", query, *rows, 1.0, **options)
    exact = reference.paged_attention(query.double(), *rows, 1.0, **options)
    assert (got - exact).abs().max() < 3e-7


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_weights_lose_nothing_to_the_dtype_of_the_values(triton, dtype):
    torch.manual_seed(0)
    rows = filled([500, 40], dtype)
    rows.values.copy_(rows.values.nan_to_num().clamp(-1, 1).sign())  # weights add up and cancel
    query = queries(rows, 4)
    exact = reference.paged_attention(query.double(), *rows, 0.125)
    plain = reference.paged_attention(query, *rows, 0.125)
    got = triton("paged_attention", query, *rows, 0.125)
    assert (got - exact).square().sum() <= 1.02 * (plain - exact).square().sum()


@pytest.mark.parametrize("sink", [-torch.inf, -200.0, 0.0, 200.0])
def test_sinks_that_take_nothing_or_all(triton, sink):
    torch.manual_seed(4)
    rows = filled([100, 60], torch.bfloat16)
    got = check(triton, queries(rows), rows, sinks=torch.full((4,), sink))
    assert (got == 0).all() == (sink == 200)


def without(rows: Rows, visible: Tensor) -> Rows:
    """With NaN in the hidden slots, and no block named where all of a block is hidden."""
    size = rows.keys.shape[2]
    for row, stop in enumerate(rows.stop.tolist()):
        slot = (~visible[row, :stop]).nonzero()[:, 0]
        block = rows.tables[row].long()[slot // size]
        for blocks in (rows.keys, rows.values):
            blocks[:, block, slot % size] = NAN
        for index in range(-(-stop // size)):
            if not visible[row, index * size : min(stop, (index + 1) * size)].any():
                rows.tables[row, index] = -1
    return rows


SEEN = {
    "pads on the left": lambda slots, stop: slots >= stop // 2,
    "pads in a whole tile": lambda slots, stop: slots >= stop - 3,
    "holes": lambda slots, stop: torch.rand(len(slots)) < 0.5,
    "one": lambda slots, stop: slots == stop // 3,
    "all": lambda slots, stop: slots >= 0,
    "no block": lambda slots, stop: slots // 16 % 2 == 0,
}


@pytest.mark.parametrize("seen", SEEN.values(), ids=SEEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_hidden_slots_are_never_used(triton, seen, dtype):
    torch.manual_seed(5)
    stops = [200, 40]
    visible = torch.stack([seen(torch.arange(200), stop) for stop in stops])
    rows = without(filled(stops, dtype), visible)
    check(triton, queries(rows), rows, visible=visible)


@pytest.mark.parametrize(
    "lay",
    [
        lambda seen: torch.cat([seen, torch.ones(2, 50, dtype=torch.bool)], 1),
        lambda seen: torch.cat([torch.rand(2, 7) < 0.5, seen], 1)[:, 7:],
        lambda seen: seen.T.contiguous().T,
        lambda seen: seen[:1].expand(2, -1),
    ],
    ids=["wider", "offset", "rows inside", "one row twice"],
)
def test_masks_that_lie_in_any_way(triton, lay):
    torch.manual_seed(6)
    rows = filled([100, 30])
    check(triton, queries(rows), rows, visible=lay(torch.rand(2, 100) < 0.5))


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("splits", [1, 4])
def test_a_row_that_sees_nothing_gets_zeros(triton, with_sinks, splits):
    torch.manual_seed(7)
    visible = torch.ones(3, 100, dtype=torch.bool)
    visible[1] = False
    rows = without(filled([100, 50, 0], torch.bfloat16), visible)
    sinks = torch.randn(4) if with_sinks else None
    got = check(triton, queries(rows), rows, (splits,), visible=visible, sinks=sinks)
    assert (got[0] != 0).all() and (got[1:] == 0).all()


def test_what_is_seen_and_not_finite_shows(triton):
    rows = filled([20, 20])
    rows.values[0, rows.tables[1, 0], 3] = NAN
    query = queries(rows)
    got = triton("paged_attention", query, *rows, 0.1)
    assert got[0].isfinite().all() and got[1, 2:].isfinite().all() and got[1, :2].isnan().all()
    assert torch.equal(got.isnan(), reference.paged_attention(query, *rows, 0.1).isnan())


def test_rows_may_share_blocks(triton):
    torch.manual_seed(8)
    rows = filled([90, 90, 90])
    rows.tables[1, :3] = rows.tables[0, :3]
    rows.tables[2] = rows.tables[0]
    rows.stop[2] = 50
    got = check(triton, queries(rows)[:1].expand(3, -1, -1), rows, window=70)
    assert not torch.equal(got[0], got[2])


@pytest.mark.parametrize(
    "lay",
    [
        lambda query: query[:, :, None].transpose(1, 2).contiguous()[:, 0],
        lambda query: query.mT.contiguous().mT,
        lambda query: torch.stack([query, query], 1)[:, 1],
        lambda query: query[:1].expand(2, -1, -1),
    ],
    ids=["a step of many", "dimensions outside", "sliced", "one row twice"],
)
def test_queries_and_tables_that_lie_in_any_way(triton, lay):
    torch.manual_seed(9)
    rows = filled([100, 30], torch.bfloat16)
    wide = torch.cat([rows.tables, rows.tables], 1)
    rows = rows._replace(tables=wide[:, : rows.tables.shape[1]])
    check(triton, lay(queries(rows)), rows)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_rows_options_and_splits(triton, data):
    torch.manual_seed(data.draw(st.integers(0, 99)))
    stops = data.draw(st.lists(st.integers(0, 90), min_size=1, max_size=3))
    rows = filled(
        stops,
        data.draw(st.sampled_from(DTYPES)),
        kv_heads=data.draw(st.integers(1, 2)),
        dim=data.draw(st.integers(1, 20)),
        value_dim=data.draw(st.integers(1, 20)),
        size=data.draw(st.integers(1, 20)),
        spare=data.draw(st.integers(1, 3)),
    )
    visible = torch.rand(len(stops), max(1, *stops, 1)) < data.draw(st.sampled_from([0.1, 0.9, 1]))
    query = queries(rows, data.draw(st.integers(1, 18)))
    check(
        triton,
        query,
        without(rows, visible),
        splits=(data.draw(st.sampled_from([1, 2, 8])),),
        window=data.draw(st.none() | st.integers(1, 100)),
        softcap=data.draw(st.none() | st.floats(0.5, 50)),
        sinks=torch.randn(query.shape[1]) if data.draw(st.booleans()) else None,
        visible=visible,
    )


# The kernel that writes.


def check_write(triton, rows: Rows, new_keys: Tensor, new_values: Tensor) -> None:
    """Bit for bit as the reference, and nothing else changes."""
    keys, values, tables, start = rows
    integer = AS_INTEGER[keys.itemsize]
    got = triton("write_kv", keys, values, new_keys, new_values, tables, start)
    bits = [t.view(integer).clone() for t in (keys, values)]
    reference.write_kv(*bits, new_keys.view(integer), new_values.view(integer), tables, start)
    for written, expected in zip(got, bits, strict=False):
        assert torch.equal(written.view(integer), expected)


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Any bits."""
    bits = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8)
    return bits.view(dtype)


def room(starts, new: int, dim: int, value_dim: int, size: int, dtype=torch.float32) -> Rows:
    """Blocks of noise with tables for `new` more tokens in each row."""
    tables, num_blocks = scattered([start + new for start in starts], size)
    keys, values = (noise(2, num_blocks, size, d, dtype=dtype) for d in (dim, value_dim))
    return Rows(keys, values, tables, torch.tensor(starts, dtype=torch.int32))


@pytest.mark.parametrize("size", [4, 16, 128])
@pytest.mark.parametrize("new", [1, 2, 15, 16, 17, 50])
@pytest.mark.parametrize("starts", [(0, 0), (3, 15), (16, 127), (131, 0)], ids=str)
def test_writes_equal_the_reference(triton, size, new, starts):
    """Within a block, across borders, over many blocks; rows start in different places."""
    torch.manual_seed(new)
    rows = room(starts, new, 8, 6, size)
    check_write(triton, rows, noise(2, 2, new, 8), noise(2, 2, new, 6))


@pytest.mark.parametrize(("dim", "value_dim"), [(1, 5), (64, 64), (80, 80), (192, 128), (256, 256)])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64, torch.float8_e4m3fn], ids=str)
def test_writes_copy_bits_of_any_dtype(triton, dim, value_dim, dtype):
    torch.manual_seed(dim)
    rows = room((5, 30), 3, dim, value_dim, 16, dtype)
    check_write(
        triton, rows, noise(2, 2, 3, dim, dtype=dtype), noise(2, 2, 3, value_dim, dtype=dtype)
    )


@pytest.mark.parametrize(
    "lay",
    [
        lambda new: new.transpose(1, 2).contiguous().transpose(1, 2),
        lambda new: new.mT.contiguous().mT,
        lambda new: torch.stack([new, new], 3)[:, :, :, 1],
        lambda new: new[:1].expand(2, -1, -1, -1),
    ],
    ids=["heads inside", "tokens inside", "sliced", "one row twice"],
)
@pytest.mark.parametrize("new", [1, 20])
def test_new_tokens_may_lie_in_any_way(triton, lay, new):
    torch.manual_seed(0)
    check_write(triton, room((9, 1), new, 8, 6, 16), lay(noise(2, 2, new, 8)), noise(2, 2, new, 6))


def test_no_new_token_writes_nothing(triton):
    check_write(triton, room((9, 1), 0, 8, 6, 16), noise(2, 2, 0, 8), noise(2, 2, 0, 6))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_plan_of_a_forward_writes_as_the_reference_does(triton, data):
    starts = data.draw(st.lists(st.integers(0, 60), min_size=1, max_size=4))
    new, size = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 33))
    shape = len(starts), 2, new
    check_write(triton, room(starts, new, 3, 4, size), noise(*shape, 3), noise(*shape, 4))


# What both have in common.


def read_nothing(shape: tuple[int, ...]) -> list[int]:
    """The grids of both ops on tensors that hold no data: whoever reads one raises."""
    attend, write = (
        import_module(f"kvpage.kernels.triton_{op}") for op in ("paged_attention", "write_kv")
    )
    grids: list[int] = []
    with ExitStack() as stack:
        for module, name in (
            (attend, "paged_attention_kernel"), (attend, "combine_kernel"),
            (write, "write_kv_kernel"),
        ):  # fmt: skip
            kernel = mock.MagicMock()
            kernel.__getitem__.side_effect = lambda grid: lambda *_, **__: grids.append(grid[0])
            stack.enter_context(mock.patch.object(module, name, kernel))
        stack.enter_context(FakeTensorMode())
        batch, kv_heads, groups, width = shape
        blocks = torch.empty(kv_heads, 1000, 16, 64)
        tables, ends = (torch.empty(batch, *w, dtype=torch.int32) for w in ([width], []))
        query, new = torch.empty(batch, kv_heads * groups, 64), torch.empty(batch, kv_heads, 1, 64)
        visible = torch.empty(batch, 16 * width, dtype=torch.bool)
        write.write_kv(blocks, blocks, new, new, tables, ends)
        attend.paged_attention(query, blocks, blocks, tables, ends, 1.0, visible=visible)
    return grids


@pytest.mark.parametrize(
    ("shape", "splits"),
    [((1, 8, 4, 4), 1), ((1, 8, 4, 32), 4), ((1, 8, 4, 1000), 32), ((200, 2, 1, 1000), 1)],
    ids=str,
)
def test_grids_depend_on_shapes_alone_and_the_host_reads_nothing(triton, shape, splits):
    batch, kv_heads, groups, _ = shape
    programs = batch * kv_heads
    expected = [programs, programs * splits] + [programs * groups] * (splits > 1)
    assert triton.call(read_nothing, shape) == expected


def split_counts(cases: list[tuple[int, int, int]]) -> list[int]:
    attend = import_module("kvpage.kernels.triton_paged_attention")
    return [attend.count_splits(*case) for case in cases]


def test_splits_are_a_power_of_two_that_fills_the_gpu_once_with_no_sliver(triton):
    cases = [
        (programs, slots, count)
        for programs in (1, 2, 7, 8, 96, 264, 300, 10_000)
        for slots in (0, 1, 16, 255, 256, 2176, 1 << 20)
        for count in (20, 108, 132, 304)
    ]
    for (programs, slots, count), splits in zip(
        cases, triton.call(split_counts, cases), strict=True
    ):
        assert splits & (splits - 1) == 0 and 1 <= splits <= 128
        assert splits == 1 or (programs * splits <= 2 * count and slots // splits >= 128)


def bytes_to_move(op: str, *args) -> int:
    return import_module(f"kvpage.kernels.triton_{op}").bytes_to_move(*args)


def test_bytes_to_move_count_what_is_attended_and_what_is_new(triton):
    rows = filled([90, 12], torch.bfloat16, value_dim=32)
    query, live = queries(rows, 3), 102
    expected = live * 2 * (64 + 32) * 2 + query.nbytes + 2 * 6 * 32 * 2
    expected += rows.tables.nbytes + rows.stop.nbytes
    args = query, rows.keys, rows.values, rows.tables, live
    assert triton.call(bytes_to_move, "paged_attention", *args) == expected
    new_keys, new_values = torch.empty(2, 2, 7, 64), torch.empty(2, 2, 7, 32)
    expected = 2 * (new_keys.nbytes + new_values.nbytes) + 2 * 7 * 4 + 2 * 4
    args = new_keys, new_values, rows.stop
    assert triton.call(bytes_to_move, "write_kv", *args) == expected


FAR = 4 * 2**31 + 2**18  # bytes: 4 heads of 2**30 elements and more


def far_blocks(path: str) -> None:
    """Write and read the last blocks of the heads, in a file with holes."""
    blocks = torch.from_file(path, shared=True, size=FAR, dtype=torch.int8)
    blocks = blocks.view(torch.float16).view(4, -1, 16, 64)
    count = blocks.shape[1]
    tables = torch.tensor([[count - 1, 0, count - 2]], dtype=torch.int32)
    new = torch.randn(2, 1, 4, 40, 64).half()
    start, stop = torch.tensor([[0], [40]], dtype=torch.int32)
    triton_version("write_kv")(blocks, blocks, new[0], new[0], tables, start)
    tokens = blocks[:, tables[0].long()].flatten(1, 2)[:, :40]
    assert torch.equal(tokens, new[0, 0])
    for shape, strides in (((1, 1, 40, 64), (0, 0, 2**26, 1)), ((3, 1, 9, 64), (2**30, 0, 64, 1))):
        sparse = blocks.view(-1).as_strided(shape, strides)
        sparse[-1, 0, -1] = 1.5
        ends = torch.zeros(shape[0], dtype=torch.int32)
        rows = torch.tensor([[7, 8, 9], [10, 11, 12], [13, 14, 15]], dtype=torch.int32)[: shape[0]]
        triton_version("write_kv")(blocks[:1], blocks[:1], sparse, sparse, rows, ends)
        last = shape[2] - 1
        assert (blocks[0, rows[-1, last // 16], last % 16] == 1.5).all()
    query = torch.randn(1, 8, 64).half()
    got = triton_version("paged_attention")(query, blocks, blocks, tables, stop, 0.1)
    expected = reference.paged_attention(query, blocks, blocks, tables, stop, 0.1)
    torch.testing.assert_close(got, expected)


def test_addresses_beyond_32_bits(triton, tmp_path):
    path = tmp_path / "blocks"
    with path.open("wb") as file:
        file.truncate(FAR)
    triton.call(far_blocks, str(path))
    path.unlink()
