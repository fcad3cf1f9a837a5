"""Each Triton kernel, interpreted on the CPU, against its reference; and who goes where."""

from __future__ import annotations

import random
import sys
from contextlib import contextmanager
from importlib import import_module
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import triton_version
from test_storage import PLANS
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from kvpage import kernels
from kvpage.blocks import Layout
from kvpage.kernels import reference
from kvpage.storage import LayerStorage

LIVE = [1, 15, 16, 17, 300]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROTATED = {  # bands of head_dim D, interleaved
    "half": (lambda dim: dim // 2, False),
    "interleaved": (lambda dim: dim // 2, True),
    "partial": (lambda dim: dim // 4, False),
    "partial, interleaved": (lambda dim: dim // 5, True),
    "none": (lambda dim: 0, False),
}
every_layout = pytest.mark.parametrize("rotated", ROTATED.values(), ids=ROTATED)


def queries(groups: int, dim: int, bands: int, batch: int = 2, kv_heads: int = 2):
    heads = groups * kv_heads
    return torch.randn(batch, heads, dim), torch.randn(batch, heads, bands).abs()


def check_scores(triton, keys: Tensor, u: Tensor, w: Tensor, interleaved: bool) -> None:
    """Within twice the error of the float32 reference, or one unit in the last place; so are the
    moments over most tokens, no token, or one."""
    exact, _ = reference.score_tokens(keys, u.double(), w.double(), interleaved)
    plain, _ = reference.score_tokens(keys, u, w, interleaved)
    candidates = torch.rand(keys.shape[:3]) < 0.8
    candidates[0, 0], candidates[1, 0, 1:] = False, False
    got, moments = triton("score_tokens", keys, u, w, interleaved, candidates)
    assert got.dtype == torch.float32 and got.shape == exact.shape
    assert torch.equal(triton("score_tokens", keys, u, w, interleaved)[0], got)
    assert_as_close(got, plain, exact)
    expected = reference.moments(got.double(), candidates)
    for name, value, double in zip(moments._fields, moments, expected, strict=True):
        scale = exact.abs().max() if name in ("mean", "deviation") else 0.0
        assert value.shape == u.shape[:2]
        torch.testing.assert_close(value.double(), double, rtol=1e-5, atol=float(1e-6 * scale))


def assert_as_close(got: Tensor, plain: Tensor, exact: Tensor) -> None:
    error, allowed = (got - exact).abs().max(), (plain - exact).abs().max()
    assert error <= max(2 * allowed, torch.finfo(torch.float32).eps * exact.abs().max())


@every_layout
@pytest.mark.parametrize("groups", [1, 3, 8])
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_scores_equal_the_reference(triton, rotated, groups, dim):
    torch.manual_seed(0)
    bands, interleaved = rotated[0](dim), rotated[1]
    keys = torch.randn(2, 2, 17, dim).bfloat16()
    check_scores(triton, keys, *queries(groups, dim, bands), interleaved)


@every_layout
@pytest.mark.parametrize("live", LIVE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_equal_the_reference_at_odd_lengths(triton, rotated, live, dtype):
    torch.manual_seed(live)
    bands, interleaved = rotated[0](80), rotated[1]
    keys = torch.randn(2, 2, live, 80).to(dtype)
    check_scores(triton, keys, *queries(2, 80, bands), interleaved)


@pytest.mark.parametrize(("dim", "bands", "groups"), [(96, 48, 4), (256, 128, 16), (24, 5, 1)])
def test_scores_equal_the_reference_for_other_heads(triton, dim, bands, groups):
    torch.manual_seed(0)
    keys = torch.randn(2, 2, 40, dim).half()
    check_scores(triton, keys, *queries(groups, dim, bands), False)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "keys",
    [
        torch.randn(2, 33, 2, 64).transpose(1, 2),
        torch.randn(2, 2, 64, 33).mT,
        torch.randn(1, 2, 33, 64).expand(2, -1, -1, -1),
        torch.randn(4, 3, 99, 70)[1:3, 1:, ::3, 5:-1],
    ],
    ids=["heads inside", "tokens inside", "one row twice", "sliced"],
)
def test_scores_of_keys_that_lie_in_any_way(triton, keys, interleaved):
    check_scores(triton, keys, *queries(2, 64, 32), interleaved)


@pytest.mark.parametrize("tables", [((1, 2, 3), (6, 7, 8)), ((4, 0, 7), (2, 8, 5))], ids=str)
@pytest.mark.parametrize("live", [1, 31, 33, 48])
def test_free_slots_never_show_in_scores(triton, tables, live):
    """Read where they lie, or gathered; whatever is not live is NaN."""
    empty = torch.empty(1, 2, 0, 64)
    storage, layout = LayerStorage(16, empty, empty), Layout(tables)
    storage.replace(*torch.full((2, 2, 10, 16, 64), torch.nan))
    for table in tables:
        slots = [table[token // 16] * 16 + token % 16 for token in range(live)]
        storage.keys.view(2, -1, 64)[:, slots] = torch.randn(2, live, 64)
    keys, _ = storage.read(layout, live)
    assert keys.isfinite().all()
    check_scores(triton, keys, *queries(3, 64, 32), False)


def test_no_live_token_has_no_score(triton):
    scores, moments = triton("score_tokens", torch.empty(2, 2, 0, 64), *queries(1, 64, 32))
    assert scores.shape == (2, 2, 0) and moments is None


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_moments_are_of_small_differences_between_large_scores(triton, offset):
    """Sums of squares would lose them: scores around 10,000 that differ by one."""
    torch.manual_seed(0)
    keys = torch.randn(1, 1, 2000, 64)
    keys[..., 0] += offset
    u, w = torch.zeros(1, 2, 64), torch.zeros(1, 2, 32)
    u[..., 0] = 1.0
    candidates = torch.rand(1, 1, 2000) < 0.5
    _, moments = triton("score_tokens", keys, u, w, False, candidates)
    exact = keys[0, 0, :, 0].double()[candidates[0, 0]]
    torch.testing.assert_close(
        moments.mean.double(), exact.mean().expand(1, 2), rtol=1e-6, atol=1e-5
    )
    deviation = exact.std(correction=0).expand(1, 2)
    torch.testing.assert_close(moments.deviation.double(), deviation, rtol=1e-4, atol=0)


def bytes_to_move(op: str, *args: Tensor) -> int:
    return import_module(f"kvpage.kernels.triton_{op}").bytes_to_move(*args)


def flops(keys: Tensor, queries: Tensor) -> int:
    return import_module("kvpage.kernels.triton_attention_mass").flops(keys, queries)


def test_bytes_to_move_count_every_tensor_once_and_moved_tokens_twice(triton):
    keys, (u, w) = torch.empty(2, 2, 9, 64, dtype=torch.float16), queries(3, 64, 32)
    expected = sum(t.nbytes for t in (keys, u, w, reference.score_tokens(keys, u, w)[0]))
    assert triton.call(bytes_to_move, "score_tokens", keys, u, w) == expected
    sampled = torch.empty(2, 5, 6, 64, dtype=torch.float16)
    expected = 2 * (keys.nbytes + sampled.nbytes) + 2 * 6 * 9 * 4
    assert triton.call(bytes_to_move, "attention_mass", keys, sampled) == expected
    each = sampled.numel() * keys.shape[2]  # a multiplication and an addition, in both kernels
    assert triton.call(flops, keys, sampled) == 2 * (each + each)
    blocks, source = torch.empty(2, 5, 4, 64), torch.zeros(3, 2, 7, dtype=torch.int64)
    expected = 2 * 3 * 2 * 7 * 64 * 4 + 8 * 3 * 7 * (2 + 1)
    assert triton.call(bytes_to_move, "move_slots", blocks, source, source[:, 0]) == expected


# Attention mass.


def mass_inputs(
    batch: int = 2,
    kv_heads: int = 2,
    groups: int = 3,
    live: int = 70,
    dim: int = 64,
    places: int = 20,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    torch.manual_seed(live + places)
    keys = torch.randn(batch, kv_heads, live, dim).to(dtype)
    return keys, 2 * torch.randn(batch, places, kv_heads * groups, dim).to(dtype)


def hide(keys: Tensor, queries: Tensor) -> dict[str, Tensor]:
    """Pads and other hidden keys, unequal weights, some 0; what those hide becomes NaN."""
    visible = torch.rand(keys.shape[:3]) < 0.7
    visible[..., -1] = True
    visible[0, :, : keys.shape[2] // 2] = False
    weights = torch.rand(queries.shape[:2])
    weights[0, ::3] = 0.0
    keys[~visible], queries[weights == 0] = torch.nan, torch.nan
    return {"visible": visible, "weights": weights}


def naive_mass(keys, queries, scale, visible=None, weights=None) -> Tensor:
    """One query after the other, over visible keys only, in float64."""
    (batch, kv_heads, live, _), (_, places, heads, _) = keys.shape, queries.shape
    mass = torch.zeros(batch, heads, live, dtype=torch.float64)
    weights = torch.ones(batch, places) if weights is None else weights
    for row in range(batch):
        used = weights[row].nonzero()[:, 0].tolist()
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            seen = torch.arange(live) if visible is None else visible[row, kv_head].nonzero()[:, 0]
            for s in used:
                logits = keys[row, kv_head, seen].double() @ queries[row, s, head].double() * scale
                share = weights[row, s].double() / weights[row].double().sum()
                mass[row, head, seen] += share * logits.softmax(dim=0)
    return mass


def check_mass_of_reference(keys: Tensor, queries: Tensor, **given: Tensor) -> Tensor:
    exact = naive_mass(keys, queries, 0.1, **given)
    got = reference.attention_mass(keys, queries, 0.1, **given)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-7)
    double = reference.attention_mass(keys, queries.double(), 0.1, **given)
    assert double.dtype == torch.float64
    # weights are scaled in float32
    torch.testing.assert_close(double, exact, rtol=1e-6, atol=1e-14)
    return got


every_chunk = pytest.mark.parametrize("elements", [1, 150, 800, 5000, None])


@every_chunk
@pytest.mark.parametrize("groups", [1, 3, 8])
@pytest.mark.parametrize("hidden", [False, True])
def test_mass_is_that_of_a_softmax_however_it_is_chunked(monkeypatch, groups, elements, hidden):
    """5000: queries in chunks; 800: keys too; 1: one query and key at a time."""
    if elements is not None:
        monkeypatch.setattr(reference, "MASS_ELEMENTS", elements)
        monkeypatch.setattr(reference, "SCRATCH_ELEMENTS", elements)
    live, places = (7, 5) if elements == 1 else (70, 20)
    keys, queries = mass_inputs(groups=groups, live=live, places=places)
    check_mass_of_reference(keys, queries, **(hide(keys, queries) if hidden else {}))


@pytest.mark.parametrize("elements", [150, None])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("live", [1, 2, 15, 300])
def test_mass_of_keys_and_queries_of_any_dtype(monkeypatch, live, dtype, elements):
    if elements is not None:
        monkeypatch.setattr(reference, "MASS_ELEMENTS", elements)
        monkeypatch.setattr(reference, "SCRATCH_ELEMENTS", elements)
    keys, queries = mass_inputs(live=live, dim=80, places=3, dtype=dtype)
    check_mass_of_reference(keys, queries)
    check_mass_of_reference(keys, queries.float(), **hide(keys, queries))


MASS_KEYS = pytest.mark.parametrize(
    "keys",
    [
        torch.randn(2, 33, 2, 64).transpose(1, 2),
        torch.randn(2, 2, 64, 33).mT,
        torch.randn(1, 2, 33, 64).expand(2, -1, -1, -1),
        torch.randn(4, 3, 99, 70)[1:3, 1:, ::3, 5:-1],
        torch.randn(2, 2, 10, 16, 64)[:, :, 3:7].flatten(2, 3)[:, :, :33],
    ],
    ids=["heads inside", "tokens inside", "one row twice", "sliced", "blocks"],
)


@MASS_KEYS
def test_mass_of_keys_that_lie_in_any_way(monkeypatch, keys):
    _, queries = mass_inputs()
    check_mass_of_reference(keys, queries)
    monkeypatch.setattr(reference, "MASS_ELEMENTS", 300)
    check_mass_of_reference(keys, queries.transpose(0, 1).contiguous().transpose(0, 1))


def test_mass_of_each_head_sums_to_one_unless_nothing_is_seen_or_weighted():
    keys, queries = mass_inputs(batch=3)
    visible, weights = torch.ones(3, 2, 70, dtype=torch.bool), torch.rand(3, 20)
    visible[0, 1], weights[1] = False, 0.0
    mass = reference.attention_mass(keys, 50 * queries, 1.0, visible, weights)
    expected = torch.ones(3, 6)
    expected[0, 3:], expected[1] = 0.0, 0.0
    torch.testing.assert_close(mass.sum(dim=2), expected)
    assert not mass[0, 3:].any() and not mass[1].any()
    scaled = reference.attention_mass(keys, 50 * queries, 1.0, visible, 4 * weights)
    assert torch.equal(scaled, mass)
    assert reference.attention_mass(keys[:, :, :0], queries, 1.0).shape == (3, 6, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("live", [384, 2176, 20000])
def test_mass_needs_less_than_a_mebibyte_of_scratch(live, dtype):
    keys, queries = mass_inputs(1, 8, 4, live, 128, 64, dtype)
    given = {"visible": torch.arange(live).expand(1, 8, -1) > 99, "weights": torch.ones(1, 64)}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        result = reference.attention_mass(keys, queries, 0.1, **given)
    events = [e for e in measured.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    assert 0 < max(accumulate(changes)) - result.nbytes < 2**20


def check_mass(triton, keys: Tensor, queries: Tensor, splits: int | None = None, **given) -> None:
    """Within twice the error of the float32 reference, or what one unit in the last place of the
    largest logit makes of the largest mass."""
    exact = reference.attention_mass(keys, queries.double(), 0.1, **given)
    plain = reference.attention_mass(keys, queries, 0.1, **given)
    got = triton("attention_mass", keys, queries, 0.1, *given.values(), splits=splits)
    assert got.dtype == torch.float32 and got.shape == exact.shape
    k, q = keys.double().nan_to_num(), queries.double().nan_to_num().transpose(1, 2)
    largest = 0.1 * (q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT).abs().max()
    error, allowed = (got - exact).abs().max(), (plain - exact).abs().max()
    unit = torch.finfo(torch.float32).eps * largest.clamp_min(1)
    assert error <= max(2 * allowed, unit * exact.max())


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("groups", [1, 3, 8])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_mass_equals_the_reference(triton, dim, groups, hidden):
    keys, queries = mass_inputs(groups=groups, dim=dim, dtype=torch.bfloat16)
    check_mass(triton, keys, queries, **(hide(keys, queries) if hidden else {}))


@pytest.mark.parametrize("splits", [None, 4])
@pytest.mark.parametrize("live", LIVE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mass_equals_the_reference_at_odd_lengths(triton, live, dtype, splits):
    keys, queries = mass_inputs(live=live, dim=24, places=live % 7 + 15, dtype=dtype)
    check_mass(triton, keys, queries, splits, **hide(keys, queries))


@MASS_KEYS
def test_triton_mass_of_keys_that_lie_in_any_way(triton, keys):
    check_mass(triton, keys, mass_inputs()[1])


def test_triton_rounds_queries_to_the_dtype_of_the_keys(triton):
    keys, queries = mass_inputs(dtype=torch.bfloat16)[0], mass_inputs()[1]
    got = triton("attention_mass", keys, queries, 0.1)
    assert torch.equal(got, triton("attention_mass", keys, queries.bfloat16(), 0.1))


def test_triton_mass_is_zero_where_nothing_is_seen_or_weighted(triton):
    keys, queries = mass_inputs(batch=3)
    visible, weights = torch.ones(3, 2, 70, dtype=torch.bool), torch.rand(3, 20)
    visible[0, 1], visible[2, :, 30:], weights[1] = False, False, 0.0
    mass = triton("attention_mass", keys, queries, 0.1, visible, weights, splits=2)
    assert not mass[0, 3:].any() and not mass[1].any() and not mass[2, :, 30:].any()
    sums = torch.stack((mass[0, :3], mass[2, :3])).sum(dim=2)
    torch.testing.assert_close(sums, torch.ones(2, 3))
    assert triton("attention_mass", keys[:, :, :0], queries, 1.0).shape == (3, 6, 0)


# Moving tokens.


def moves(tables, size: int, survivors: Tensor) -> tuple[Tensor, Tensor]:
    """Where live slots `survivors` `[B, Hkv, kept]` come from and go to under `tables`."""
    slots = torch.tensor([[b * size + i for b in table for i in range(size)] for table in tables])
    source = slots[:, None].expand(-1, survivors.shape[1], -1).gather(2, survivors)
    return source, slots[:, : survivors.shape[2]]


def check_moves(triton, blocks: Tensor, source: Tensor, target: Tensor, into=None) -> None:
    """Bit for bit as the reference, and nothing else changes."""
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[blocks.itemsize]
    *_, got = triton("move_slots", blocks, source, target, blocks if into is None else into)
    old = blocks.view(integer).clone()
    new = old if into is None else into.view(integer).clone()
    reference.move_slots(old, source, target, new)
    assert torch.equal(got.view(integer), new)


SCATTERED = tuple(tuple(random.Random(7).sample(range(90), 90)[i::2]) for i in range(2))


@pytest.mark.parametrize("how", PLANS)
@pytest.mark.parametrize("tables", [(tuple(range(45)), tuple(range(45, 90))), SCATTERED])
@pytest.mark.parametrize("in_place", [True, False])
def test_moves_equal_the_reference(triton, how, tables, in_place):
    """720 tokens: more than two chunks."""
    rng = random.Random(0)
    survivors = torch.tensor([[PLANS[how](720, rng) for _ in range(2)] for _ in range(2)])
    blocks = torch.randn(2, 90, 16, 24)
    into = None if in_place else torch.full((2, 95, 16, 24), torch.nan)
    check_moves(triton, blocks, *moves(tables, 16, survivors), into)


@pytest.mark.parametrize("dim", [1, 5, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64, torch.float8_e4m3fn], ids=str)
def test_moves_copy_bits_of_any_dtype(triton, dim, dtype):
    survivors = torch.tensor([[sorted(random.Random(0).sample(range(40), 17))] * 3])
    bits = torch.randint(0, 256, (3, 10, 4, dim * dtype.itemsize), dtype=torch.uint8)
    check_moves(triton, bits.view(dtype), *moves([range(10)], 4, survivors))


@pytest.mark.parametrize("kept", [0, 1, 15, 16, 17, 255, 256, 257, 300])
def test_moves_of_any_number_of_tokens(triton, kept):
    survivors = torch.arange(300 - kept, 300).expand(1, 2, -1)
    check_moves(triton, torch.randn(2, 75, 4, 8), *moves([range(75)], 4, survivors))


def test_rows_that_share_blocks_read_them_and_write_their_own(triton):
    """As the ledger plans it: the shared blocks 0 and 1 are left, 5 to 8 were free."""
    before, after = ((0, 1, 2), (0, 1, 3)), ((5, 6, 2), (7, 8, 3))
    survivors = torch.tensor([[[1, 3, 4, 6, 7, 8, 9, 10, 11]] * 2, [[*range(3, 12)]] * 2])
    source, _ = moves(before, 4, survivors)
    _, target = moves(after, 4, survivors)
    check_moves(triton, torch.randn(2, 10, 4, 8), source, target)


@st.composite
def plans(draw):
    """Tables of rows that own their blocks, and ascending survivors of each row and head."""
    batch, heads, size = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 5))
    count = draw(st.integers(1, 80 // size))
    order = draw(st.permutations(range(batch * count + draw(st.integers(0, 3)))))
    tables = [order[row * count : (row + 1) * count] for row in range(batch)]
    kept = draw(st.integers(1, count * size))
    chosen = st.sets(st.integers(0, count * size - 1), min_size=kept, max_size=kept).map(sorted)
    survivors = [[draw(chosen) for _ in range(heads)] for _ in range(batch)]
    return size, len(order), tables, torch.tensor(survivors)


@settings(max_examples=60, deadline=None)
@given(plan=plans())
def test_any_plan_of_a_compaction_moves_as_the_reference_does(triton, plan):
    size, num_blocks, tables, survivors = plan
    check_moves(
        triton,
        torch.randn(survivors.shape[1], num_blocks, size, 3),
        *moves(tables, size, survivors),
    )


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_threads_may_run_in_any_order_that_the_barrier_allows(data):
    """A model of one program: thread `i` holds token `i` of each chunk; loads of a chunk come
    before the barrier, stores after it, and threads meet at each barrier."""
    live, chunk = data.draw(st.integers(1, 14)), data.draw(st.integers(1, 5))
    survivors = sorted(data.draw(st.sets(st.integers(0, live - 1), min_size=1)))
    memory, expected = list(range(live)), [*survivors, *range(len(survivors), live)]
    starts, held = range(0, len(survivors), chunk), {}
    done = [0] * chunk  # of each thread: load, store, load, store ...
    while open_threads := [i for i in range(chunk) if done[i] < 2 * len(starts)]:
        reached = min(step // 2 + step % 2 for step in done)  # chunks whose loads are all done
        able = [i for i in open_threads if done[i] % 2 == 0 or done[i] // 2 < reached]
        thread = data.draw(st.sampled_from(able))
        token, stores = starts[done[thread] // 2] + thread, done[thread] % 2
        if token < len(survivors) and stores:
            memory[token] = held[thread]
        elif token < len(survivors):
            held[thread] = memory[survivors[token]]
        done[thread] += 1
    assert memory == expected


FAR = 4 * 2**31 + 2**18  # bytes: 4 heads of 2**30 elements and more


def far_slots(path: str) -> bool:
    """Read, move and read again the last tokens of the heads, in a file with holes."""
    blocks = torch.from_file(path, shared=True, size=FAR, dtype=torch.int8)
    blocks = blocks.view(torch.float16).view(4, -1, 16, 64)
    slots = blocks.shape[1] * 16
    tokens = blocks.view(4, slots, 64)[:, slots - 40 :]
    tokens.copy_(torch.randn(4, 40, 64))
    sparse = blocks.view(-1).as_strided((1, 1, 40, 64), (0, 0, 2**26, 1))
    sparse[0, 0, -1] = 1
    for keys in (tokens[None, :, 1::2], sparse):
        u, w = queries(2, 64, 32, batch=1, kv_heads=keys.shape[1])
        got, _ = triton_version("score_tokens")(keys, u, w)
        torch.testing.assert_close(got, reference.score_tokens(keys, u, w)[0], atol=1e-4, rtol=0)
        sampled = u[:, None].to(keys.dtype)
        got = triton_version("attention_mass")(keys, sampled, 0.1)
        torch.testing.assert_close(got, reference.attention_mass(keys, sampled, 0.1))
    expected = tokens[:, 1::2].clone()
    source = torch.arange(slots - 39, slots, 2).expand(1, 4, -1)
    triton_version("move_slots")(blocks, source, torch.arange(slots - 40, slots - 20)[None], blocks)
    return torch.equal(tokens[:, :20], expected)


def test_addresses_beyond_32_bits(triton, tmp_path):
    path = tmp_path / "blocks"
    with path.open("wb") as file:
        file.truncate(FAR)
    assert triton.call(far_slots, str(path))
    path.unlink()


# Which version runs.


OPS = ("score_tokens", "attention_mass", "move_slots", "write_kv", "paged_attention")


def run_every_op(dtype: torch.dtype = torch.float32) -> None:
    with FakeTensorMode(), torch.device("cuda"):
        keys, (u, w) = torch.empty(2, 2, 9, 64), queries(2, 64, 32)
        new, row, ends = torch.empty(2, 2, 1, 64), torch.empty(2, 1), torch.empty(2)
        kernels.score_tokens(keys, u.to(dtype), w.to(dtype))
        kernels.attention_mass(keys, u.unsqueeze(1).to(dtype), 1.0)
        kernels.move_slots(keys, keys, keys, keys)
        kernels.write_kv(keys, keys, new, new, row, ends)
        kernels.paged_attention(u.to(dtype), keys, keys, row, ends, 1.0, window=3)


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """Which versions were called: neither runs."""
    calls: list[str] = []
    for op in OPS:
        stub = SimpleNamespace(**{op: lambda *_, op=op, **__: calls.append(f"triton {op}")})
        monkeypatch.setitem(sys.modules, f"kvpage.kernels.triton_{op}", stub)
        monkeypatch.setattr(reference, op, lambda *_, op=op, **__: calls.append(f"plain {op}"))
    return calls


def test_tensors_on_a_gpu_go_to_triton_unless_they_ask_for_float64(calls):
    run_every_op()
    assert calls == [f"triton {op}" for op in OPS]
    calls.clear()
    run_every_op(torch.float64)
    assert calls == [
        "plain score_tokens", "plain attention_mass", "triton move_slots", "triton write_kv",
        "plain paged_attention",
    ]  # fmt: skip


def test_a_kernel_is_launched_on_the_device_of_its_tensors(calls, monkeypatch):
    @contextmanager
    def current(device):
        calls.append(str(device))
        yield
        calls.append("back")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", current)
    run_every_op()
    assert calls == [call for op in OPS for call in ("cuda:0", f"triton {op}", "back")]


@pytest.mark.parametrize("op", OPS)
def test_a_gpu_without_triton_is_an_error(monkeypatch, op):
    monkeypatch.setitem(sys.modules, "triton", None)
    for other in OPS:
        stub = SimpleNamespace(**{other: lambda *_, **__: None})
        monkeypatch.setitem(sys.modules, f"kvpage.kernels.triton_{other}", stub)
    monkeypatch.delitem(sys.modules, f"kvpage.kernels.triton_{op}")
    with pytest.raises(RuntimeError, match="pip install triton"):
        run_every_op()
