"""What only a GPU can show: kernels as compiled, threads that run at once, a host that never waits.

`benchmarks/gpu.sh` runs these. Without a GPU every one is skipped. Most of the time goes into
compiling, so that traits of the kernels are not all combined: the interpreter does that.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from test_storage import PLANS
from tiny import build, cache_name, generate, prompt
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import kvpage
from kvpage import PagedCompactCache, kernels
from kvpage.kernels import reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]

INTEGER = {2: torch.int16, 4: torch.int32}
BLOCK = 16
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
scattered_or_not = pytest.mark.parametrize("scattered", [False, True])


@pytest.fixture(autouse=True)
def same_every_time():
    torch.manual_seed(0)


def check_close(got: Tensor, plain: Tensor, exact: Tensor) -> None:
    """`got`, from the GPU, within a few times the error of the reference (in `plain`, same dtype)
    or a few units in the last place of the largest: its exp2 and sqrt are approximations."""
    assert got.is_cuda and got.dtype == plain.dtype and got.shape == exact.shape
    got = got.cpu()
    assert got.isfinite().all()
    error, allowed = (float((x.double() - exact).abs().max()) for x in (got, plain))
    few = 4 if got.dtype == torch.float32 else 2
    assert error <= few * max(allowed, torch.finfo(got.dtype).eps * float(exact.abs().max()))


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(INTEGER[tensor.element_size()])


def tables_of(batch: int, width: int, num_blocks: int, scattered: bool) -> Tensor:
    """int32 `[batch, width]`, no block twice."""
    order = torch.randperm(num_blocks) if scattered else torch.arange(num_blocks)
    return order[: batch * width].view(batch, width).int()


def poisoned(shape: tuple[int, ...], tables: Tensor, stops: list[int], dtype) -> Tensor:
    """Blocks `[Hkv, num_blocks, block_size, D]` that are NaN but for the live slots of each row."""
    blocks = torch.full(shape, torch.nan)
    for table, stop in zip(tables.long(), stops, strict=True):
        token = torch.arange(stop)
        at = (slice(None), table[token // shape[2]], token % shape[2])
        blocks[at] = torch.randn(shape[0], stop, shape[3])
    return blocks.to(dtype)


# The ops.


SCORED = [  # dtype, head_dim, bands, query heads per KV head, interleaved, live tokens
    (BF16, 128, 64, 4, False, 1),
    (BF16, 128, 64, 4, False, 16),
    (BF16, 128, 64, 4, False, 17),
    (BF16, 128, 64, 4, False, 2175),
    (FP16, 128, 64, 4, False, 301),
    (FP32, 128, 64, 4, False, 301),
    (BF16, 128, 64, 8, True, 301),
    (BF16, 64, 32, 3, False, 301),
    (BF16, 80, 20, 1, False, 301),
    (BF16, 256, 128, 16, False, 301),
    (FP32, 24, 5, 1, True, 301),
    (BF16, 96, 0, 2, False, 301),
]


@pytest.mark.parametrize(("dtype", "dim", "bands", "groups", "interleaved", "live"), SCORED)
def test_scores_equal_the_reference(dtype, dim, bands, groups, interleaved, live):
    keys = torch.randn(2, 2, live, dim).to(dtype)
    u, w = torch.randn(2, 2 * groups, dim), torch.rand(2, 2 * groups, bands)
    got = kernels.score_tokens(keys.cuda(), u.cuda(), w.cuda(), interleaved)[0]
    plain = reference.score_tokens(keys, u, w, interleaved)[0]
    check_close(got, plain, reference.score_tokens(keys, u.double(), w.double(), interleaved)[0])


SAMPLED = [  # dtype, head_dim, query heads per KV head, sampled queries, live tokens
    (BF16, 128, 4, 64, 1),
    (BF16, 128, 4, 64, 2175),
    (BF16, 128, 8, 17, 301),
    (FP16, 64, 3, 128, 301),
    (FP32, 64, 3, 64, 301),
    (BF16, 80, 1, 16, 301),
    (BF16, 96, 2, 33, 301),
    (BF16, 256, 4, 64, 301),
    (FP32, 256, 4, 64, 301),
]


@pytest.mark.parametrize(("dtype", "dim", "groups", "places", "live"), SAMPLED)
def test_mass_equals_the_reference(dtype, dim, groups, places, live):
    """Hidden keys and unweighted queries are NaN."""
    keys = torch.randn(2, 2, live, dim).to(dtype)
    queries = torch.randn(2, places, 2 * groups, dim).to(dtype)
    visible, weights = torch.rand(2, 2, live) < 0.8, torch.rand(2, places)
    visible[..., -1], weights[:, 1::4] = True, 0.0
    keys[~visible], queries[weights == 0] = torch.nan, torch.nan
    rest = dim**-0.5, visible, weights
    k, q, *given = (x.cuda() for x in (keys, queries, visible, weights))
    got = kernels.attention_mass(k, q, dim**-0.5, *given)
    plain = reference.attention_mass(keys, queries, *rest)
    check_close(got, plain, reference.attention_mass(keys, queries.double(), *rest))


ATTENDED = [  # dtype, head_dim of keys and of values, query heads per KV head
    (BF16, 128, 128, 4),
    (FP16, 128, 128, 4),
    (FP32, 128, 128, 4),
    (BF16, 128, 128, 8),
    (BF16, 64, 64, 3),
    (BF16, 80, 80, 1),
    (BF16, 256, 256, 16),
    (BF16, 96, 64, 4),
]


@scattered_or_not
@pytest.mark.parametrize(("dtype", "dim", "value_dim", "groups"), ATTENDED)
@pytest.mark.parametrize("stops", [[17, 1, 300], [2176, 2049]], ids=str)
def test_attention_equals_the_reference(scattered, dtype, dim, value_dim, groups, stops):
    check_attention(dtype, scattered, groups, dim, value_dim, stops)


@pytest.mark.parametrize(
    ("dtype", "option"),
    [(BF16, option) for option in ("window", "softcap", "sinks", "visible", "all")]
    + [(FP16, "all"), (FP32, "all")],
)
def test_attention_with_options_equals_the_reference(dtype, option):
    stops, heads = [17, 300, 1100], 8
    visible = torch.ones(3, max(stops), dtype=torch.bool)
    visible[1, :77], visible[2, 1050:1060] = False, False
    options = {
        "window": 100,
        "softcap": 5.0,
        "sinks": torch.randn(heads).to(dtype),
        "visible": visible,
    }
    used = options if option == "all" else {option: options[option]}
    check_attention(dtype, True, 4, 128, 128, stops, **used)


@pytest.mark.parametrize("stop", [1, 15, 16, 17, 127, 128, 129])
def test_attention_to_any_number_of_tokens(stop):
    check_attention(BF16, True, 4, 128, 128, [stop])


def check_attention(dtype, scattered, groups, dim, value_dim, stops, **options) -> None:
    kv_heads, batch = 2, len(stops)
    width = -(-max(stops) // BLOCK)
    num_blocks = batch * width + 3
    tables = tables_of(batch, width, num_blocks, scattered)
    keys, values = (
        poisoned((kv_heads, num_blocks, BLOCK, d), tables, stops, dtype) for d in (dim, value_dim)
    )
    query, stop = torch.randn(batch, kv_heads * groups, dim).to(dtype), torch.tensor(stops).int()
    on_gpu = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in options.items()}
    args, scale = (query, keys, values, tables, stop), dim**-0.5
    got = kernels.paged_attention(*(x.cuda() for x in args), scale, **on_gpu)
    plain = reference.paged_attention(*args, scale, **options)
    exact = reference.paged_attention(
        query.double(), keys.double(), values.double(), tables, stop, scale, **options
    )
    check_close(got, plain, exact)


def test_attention_is_the_same_every_time():
    """Splits are combined in one order: no atomics, no race."""
    stops, tables = [5000, 4999], tables_of(2, 313, 626, True).cuda()
    keys, values = torch.randn(2, 8, 626, BLOCK, 128, device="cuda", dtype=torch.bfloat16)
    query = torch.randn(2, 32, 128, device="cuda", dtype=torch.bfloat16)
    stop = torch.tensor(stops, device="cuda").int()
    first = kernels.paged_attention(query, keys, values, tables, stop, 0.1)
    for _ in range(50):
        again = kernels.paged_attention(query, keys, values, tables, stop, 0.1)
        assert torch.equal(again, first)


@scattered_or_not
@pytest.mark.parametrize("count", [1, 5, 16, 33])
@pytest.mark.parametrize(
    ("dtype", "dim", "value_dim"),
    [(BF16, 128, 128), (FP16, 80, 80), (FP32, 64, 64), (BF16, 96, 64)],
)
def test_writing_equals_the_reference_and_changes_nothing_else(
    dtype, scattered, count, dim, value_dim
):
    starts = [0, 15, 30]
    tables = tables_of(3, 4, 15, scattered)
    blocks = [poisoned((2, 15, BLOCK, d), tables, starts, dtype) for d in (dim, value_dim)]
    new = [torch.randn(3, count, 2, d).to(dtype).transpose(1, 2) for d in (dim, value_dim)]
    start = torch.tensor(starts).int()
    got = [tensor.cuda() for tensor in blocks]
    kernels.write_kv(*got, *(x.cuda() for x in new), tables.cuda(), start.cuda())
    reference.write_kv(*blocks, *new, tables, start)
    for found, expected in zip(got, blocks, strict=True):
        assert torch.equal(bits(found.cpu()), bits(expected))


def moves(tables: Tensor, size: int, survivors: Tensor) -> tuple[Tensor, Tensor]:
    """Where live slots `survivors` `[B, Hkv, kept]` come from and go to under `tables`."""
    slots = (tables.long()[:, :, None] * size + torch.arange(size)).flatten(1)
    source = slots[:, None].expand(-1, survivors.shape[1], -1).gather(2, survivors)
    return source, slots[:, : survivors.shape[2]]


@scattered_or_not
@pytest.mark.parametrize("how", PLANS)
@pytest.mark.parametrize(
    ("dtype", "dim", "in_place"),
    [(BF16, 128, True), (BF16, 128, False), (FP16, 5, True), (FP32, 80, True)],
)
def test_moves_equal_the_reference(scattered, how, dtype, dim, in_place):
    tables, rng = tables_of(2, 45, 93, scattered), random.Random(0)
    survivors = torch.tensor([[PLANS[how](720, rng) for _ in range(2)] for _ in range(2)])
    source, target = moves(tables, BLOCK, survivors)
    blocks = poisoned((2, 93, BLOCK, dim), tables, [720, 720], dtype)
    into = blocks if in_place else torch.full_like(blocks, torch.nan)
    got = blocks.cuda()
    got_into = got if in_place else into.cuda()
    kernels.move_slots(got, source.cuda(), target.cuda(), got_into)
    reference.move_slots(blocks, source, target, into)
    assert torch.equal(bits(got_into.cpu()), bits(into))


# Moving in place, again and again: what a race would show in.

LIVE = 4096
ADVERSARIAL: dict[str, Callable[[], Tensor]] = {
    "all slide by 1": lambda: torch.arange(1, LIVE),
    "all slide by 255": lambda: torch.arange(255, LIVE),
    "all slide by 256": lambda: torch.arange(256, LIVE),
    "all slide by 257": lambda: torch.arange(257, LIVE),
    "half stays, half slides by 1": lambda: torch.cat(
        (torch.arange(LIVE // 2), torch.arange(LIVE // 2 + 1, LIVE))
    ),
    "every other": lambda: torch.arange(1, LIVE, 2),
    "one in sixteen goes": lambda: torch.arange(LIVE)[torch.arange(LIVE) % 16 != 7],
    "random": lambda: torch.randperm(LIVE)[: LIVE - 128].sort().values,
}


@pytest.mark.parametrize("plan", ADVERSARIAL.values(), ids=ADVERSARIAL)
def test_moving_in_place_never_reads_what_it_wrote(plan):
    """200 times, with other work on the device half of the time so that programs start unevenly."""
    batch, kv_heads, dim = 4, 8, 128
    width = LIVE // BLOCK
    num_blocks = batch * width
    tables = tables_of(batch, width, num_blocks, scattered=True)
    source, target = moves(tables, BLOCK, plan().expand(batch, kv_heads, -1))
    source, target = source.cuda(), target.cuda()
    pristine = torch.randn(kv_heads, num_blocks, BLOCK, dim, device="cuda", dtype=torch.bfloat16)
    expected = pristine.clone()
    flat, flat_expected = pristine.view(kv_heads, -1, dim), expected.view(kv_heads, -1, dim)
    for row in range(batch):
        for head in range(kv_heads):
            flat_expected[head, target[row]] = flat[head, source[row, head]]
    other, noise = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    torch.cuda.synchronize()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for repeat in range(200):
        got = pristine.clone()
        if repeat % 2:
            with torch.cuda.stream(other):
                noise @ noise
        kernels.move_slots(got, source, target, got)
        wrong += (got != expected).sum()
    assert int(wrong) == 0


# The cache.


def on_gpu(name: str, attention: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return with_attention(build(name, dtype=dtype).cuda(), attention)


def with_attention(model: PreTrainedModel, attention: str) -> PreTrainedModel:
    kvpage.attach(model)
    model.set_attn_implementation(attention)
    return model


@pytest.mark.parametrize("attention", ["sdpa", "kvpage"])
@pytest.mark.parametrize("name", ["qwen3", "llama-gqa3-tied"])
def test_bounded_decoding_is_what_it_is_on_the_cpu(name, attention):
    """Tokens, logits, and which token positions each of several compactions left."""
    results = []
    for model in (with_attention(build(name), attention), on_gpu(name, attention)):
        cache = PagedCompactCache(model, budget=64, interval=24, recent=16, trace=True)
        ids = prompt(40, batch=2).to(model.device)
        tokens, logits = generate(model, ids, cache, 160)
        cache.check()
        assert cache.report().compactions >= 4
        results.append((tokens.cpu(), logits.cpu(), cache.trace))
    (tokens, logits, trace), (got_tokens, got_logits, got_trace) = results
    assert torch.equal(got_tokens, tokens)
    torch.testing.assert_close(got_logits, logits, atol=1e-3, rtol=1e-3)
    for one, other in zip(got_trace, trace, strict=True):
        for kept, expected in zip(one.positions, other.positions, strict=True):
            assert torch.equal(kept, expected)


@pytest.mark.parametrize("attention", ["sdpa", "kvpage"])
def test_unbounded_decoding_writes_what_dynamic_cache_does(attention):
    model, ids = on_gpu("qwen3", "sdpa"), prompt(100, batch=3).cuda()
    expected, _ = generate(model, ids, DynamicCache(config=model.config), 100)
    cache = PagedCompactCache(with_attention(model, attention), budget=None)
    got, _ = generate(model, ids, cache, 100)
    assert torch.equal(got, expected)


@torch.inference_mode()
def step(model: PreTrainedModel, cache: object, token: Tensor, count: int) -> Tensor:
    """`count` greedy forwards of one token `[B, 1]`, all on the device."""
    for _ in range(count):
        out = model(token, **{cache_name(model): cache}, logits_to_keep=1)
        token = out.logits[:, -1:].argmax(dim=-1)
    return token


def test_the_host_never_waits_in_64_steady_steps():
    """Any read of the device, and any copy that waits, raises; block borders are crossed. The next
    compaction, and the next check of RoPE (when the text has doubled), are further away."""
    model, ids = on_gpu("qwen3", "sdpa", torch.bfloat16), prompt(390, batch=2).cuda()
    caches = {"sdpa": DynamicCache(config=model.config)}
    caches["kvpage"] = PagedCompactCache(model, budget=256, interval=128, recent=32)
    for attention, cache in caches.items():
        model.set_attn_implementation(attention)
        with torch.inference_mode():
            model(ids, **{cache_name(model): cache}, logits_to_keep=1)
        token = step(model, cache, ids[:, -1:], 8)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(model, cache, token, 64)
        except RuntimeError as error:
            if attention == "sdpa":
                pytest.skip(f"transformers itself waits, with DynamicCache: {error}")
            raise
        finally:
            torch.cuda.set_sync_debug_mode("default")
    report = caches["kvpage"].report()
    assert report.compactions == 1 and report.live_tokens == 256 + 8 + 64


def test_a_captured_graph_decodes_as_the_model_does():
    """Through compactions, with pads in the prompt; both feed themselves the same tokens."""
    model, batch = on_gpu("qwen3", "kvpage", FP32), 2
    caches = [PagedCompactCache(model, budget=64, interval=24, recent=16, static=True)]
    caches.append(PagedCompactCache(model, budget=64, interval=24, recent=16, static=True))
    mask = torch.ones(batch, 30, dtype=torch.long, device="cuda")
    mask[0, :9] = 0
    token = torch.zeros(batch, 1, dtype=torch.long, device="cuda")
    position = torch.zeros_like(token)
    fed = prompt(200, batch).cuda()

    def forward(cache: PagedCompactCache) -> Tensor:
        with torch.inference_mode():
            named = {cache_name(model): cache}
            return model(token, position_ids=position, **named).logits

    def set_inputs(step: int) -> None:
        token.copy_(fed[:, step : step + 1])
        position.copy_(mask.sum(dim=1, keepdim=True) + step)

    for cache in caches:
        with torch.inference_mode():
            model(prompt(30, batch).cuda(), attention_mask=mask, **{cache_name(model): cache})
    expected, got, graph = [], [], torch.cuda.CUDAGraph()
    for step in range(200):
        set_inputs(step)
        expected.append(forward(caches[0]).clone())
        if step < 3:
            got.append(forward(caches[1]).clone())
            continue
        if step == 3:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                logits = forward(caches[1])
        else:
            caches[1].advance()
        graph.replay()
        got.append(logits.clone())
    torch.testing.assert_close(torch.cat(got), torch.cat(expected), atol=1e-3, rtol=1e-3)
    reports = [cache.report() for cache in caches]
    assert reports[0].compactions == reports[1].compactions >= 5
    assert reports[1].seen_tokens == 230
