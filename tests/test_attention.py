"""`attn_implementation="kvpage"`: what it accepts, what it hands to whom, and what it refuses."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from families import family
from tiny import RELEASE, build, cache_name, generate, prompt
from transformers import AttentionInterface, DynamicCache, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask, sliding_window_causal_mask_function

import kvpage
from kvpage import PagedCompactCache, attention, decoding
from kvpage.kernels import reference

pytestmark = pytest.mark.core
SMALL = {"budget": 48, "interval": 16, "recent": 8}


def forward(model, ids, cache, **kwargs):
    with torch.no_grad():
        return model(ids, **{cache_name(model): cache}, **kwargs).logits


# Which backend.


def test_registering_twice_changes_nothing_and_a_cache_registers():
    kvpage.register()
    kvpage.register()
    model = build("llama-gqa3-tied")
    PagedCompactCache(model)
    model.set_attn_implementation("kvpage")
    assert model.config._attn_implementation == "kvpage"


@pytest.mark.parametrize("requested", ["auto", "reference"])
def test_on_a_cpu_the_reference_reads_the_blocks(requested):
    model = build("llama-gqa3-tied", "kvpage")
    cache = PagedCompactCache(model, backend=requested)
    assert "attention=" not in repr(cache)
    forward(model, prompt(5), cache)
    assert "attention=reference" in repr(cache)


def test_a_backend_that_is_not_there_is_an_error_not_another_one(monkeypatch):
    for requested in ("triton", "flash_attn"):
        with pytest.raises(ValueError, match=f"backend: 'auto' or 'reference'.*{requested!r}"):
            attention.resolve_backend(requested, "cpu", 256)
    assert attention.resolve_backend("reference", "cuda", 16) == "reference"
    monkeypatch.setattr(attention, "find_spec", lambda name: None)
    attention.resolve_backend.cache_clear()
    assert attention.resolve_backend("auto", "cuda", 16) == "reference"
    for requested in ("triton", "flash_attn"):
        with pytest.raises(ImportError, match=f"{requested}' needs the package"):
            attention.resolve_backend(requested, "cuda", 256)
    monkeypatch.setattr(attention, "find_spec", lambda name: name)
    attention.resolve_backend.cache_clear()
    assert attention.resolve_backend("auto", "cuda", 16) == "triton"
    assert attention.resolve_backend("flash_attn", "cuda", 512) == "flash_attn"
    with pytest.raises(ValueError, match="multiple of 256 tokens, got block_size = 16"):
        attention.resolve_backend("flash_attn", "cuda", 16)
    attention.resolve_backend.cache_clear()


def test_a_backend_without_the_attention_it_is_for_is_an_error():
    with pytest.raises(ValueError, match=r"backend: one of 'auto', .* expected, got 'cudnn'"):
        PagedCompactCache(backend="cudnn")
    model = build("llama-gqa3-tied")
    cache = PagedCompactCache(backend="reference")
    with pytest.raises(ValueError, match=r"backend: needs model.set_attn_implementation\('kvpage"):
        forward(model, prompt(5), cache)
    assert cache.get_seq_length() == 0


def test_a_backend_that_can_not_be_had_is_refused_before_anything_is_cached():
    model = build("llama-gqa3-tied", "kvpage")
    for cache in (PagedCompactCache(model, backend="triton"), PagedCompactCache(backend="triton")):
        for _ in range(2):
            with pytest.raises(ValueError, match="'auto' or 'reference' expected on 'cpu'"):
                forward(model, prompt(5), cache)
            assert cache.get_seq_length() == 0 and cache.ledger.steps == 0
        cache.check()


def paged_stand_in(calls):
    """What flash-attn documents of `flash_attn_with_kvcache` with a block table, in torch."""

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, *, cache_seqlens, block_table, softmax_scale, causal, window_size,
        softcap,
    ):  # fmt: skip
        assert q.shape[1] == 1 and causal and k_cache.stride(-1) == 1 == v_cache.stride(-1)
        assert block_table.dtype == cache_seqlens.dtype == torch.int32
        calls.append(window_size)
        rows = []
        for row, length in enumerate(cache_seqlens.tolist()):
            first = 0 if window_size[0] < 0 else max(0, length - 1 - window_size[0])
            table = block_table[row].long()
            keys, values = (x[table].flatten(0, 1)[first:length] for x in (k_cache, v_cache))
            keys, values = (x.transpose(0, 1)[None] for x in (keys, values))  # [1, Hkv, L, D]
            query = q[row : row + 1].transpose(1, 2)
            cap = softcap or None
            out = reference.attend(query, keys, values, None, softmax_scale, cap)
            rows.append(out.transpose(1, 2))
        return torch.cat(rows)

    return flash_attn_with_kvcache


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "mistral-window"])
def test_flash_attn_is_asked_as_it_documents(name, monkeypatch):
    calls = []
    stand_in = SimpleNamespace(flash_attn_with_kvcache=paged_stand_in(calls))
    monkeypatch.setitem(sys.modules, "flash_attn", stand_in)
    monkeypatch.setattr(decoding, "resolve_backend", lambda *_: "flash_attn")
    flash, own = (PagedCompactCache(**SMALL, trace=True) for _ in range(2))
    model = family(name)
    model.set_attn_implementation("kvpage")
    given = {"attention_mask": torch.ones(1, 30, dtype=torch.long)} if name == "llama" else {}
    got = generate(model, prompt(30), flash, 80, **given)[1]
    monkeypatch.undo()
    expected = generate(model, prompt(30), own, 80, **given)[1]
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert calls and "attention=flash_attn" in repr(flash)


def test_flash_attn_refuses_pads_and_sinks(monkeypatch):
    stand_in = SimpleNamespace(flash_attn_with_kvcache=paged_stand_in([]))
    monkeypatch.setitem(sys.modules, "flash_attn", stand_in)
    monkeypatch.setattr(decoding, "resolve_backend", lambda *_: "flash_attn")
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[0, :5] = 0
    for name, given, what in (("llama", mask, "pads"), ("gpt-oss", None, "attention sinks")):
        model = family(name)
        model.set_attn_implementation("kvpage")
        with pytest.raises(ValueError, match=f"'flash_attn' has no {what} over blocks"):
            generate(model, prompt(30, 2), PagedCompactCache(**SMALL), 3, attention_mask=given)


# Who else attends in such a model.


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "gpt-oss", "qwen3-next"])
@pytest.mark.parametrize("pads", [0, 9])
def test_other_caches_and_none_give_what_they_gave(name, pads):
    own, over_blocks = family(name), family(name)
    over_blocks.set_attn_implementation("kvpage")
    ids, mask = prompt(24, 2), torch.ones(2, 24, dtype=torch.long)
    mask[0, :pads] = 0
    real = mask.bool()
    with torch.no_grad():
        expected = own(ids, attention_mask=mask, use_cache=False).logits
        got = over_blocks(ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(got[real], expected[real], atol=1e-4, rtol=1e-4)
    caches = [lambda config: DynamicCache(config=config)]
    if name == "llama":
        caches += [lambda config: DynamicCache(), lambda config: StaticCache(config, 100)]
    for make in caches:
        expected = generate(own, ids, make(own.config), 30, attention_mask=mask)
        got = generate(over_blocks, ids, make(over_blocks.config), 30, attention_mask=mask)
        assert torch.equal(got[0], expected[0])
        torch.testing.assert_close(got[1], expected[1], atol=1e-4, rtol=1e-4)


def test_gradients_flow_as_with_sdpa():
    grads = []
    for attn in ("sdpa", "kvpage"):
        model = build("llama-gqa3-tied", attn).train()
        model(prompt(12, 2), labels=prompt(12, 2), use_cache=False).loss.backward()
        grads.append(model.model.layers[0].self_attn.q_proj.weight.grad)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("q", [1, 3])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("seen", [0, 4, 20])
@pytest.mark.parametrize("pads", [None, 0, 3])
def test_the_mask_is_sdpas(q, window, seen, pads):
    """The columns a query sees, over a cache that has kept the last 5 tokens or all."""
    padding = None
    if pads is not None:
        padding = torch.ones(2, seen + q, dtype=torch.bool)
        padding[0, :pads] = False
    for live in {min(seen, 5), seen}:
        sizes = {"q_length": q, "kv_length": live + q, "q_offset": seen, "kv_offset": seen - live}
        options = {"batch_size": 2, "attention_mask": padding, "allow_is_causal_skip": True} | sizes
        if window is not None:
            function = sliding_window_causal_mask_function(window)
            options |= {"mask_function": function, "local_size": window}
        expected = sdpa_mask(**(options | {"allow_is_causal_skip": False}))
        got = attention.mask(**options)
        if got is None:
            got = torch.ones(q, live + q, dtype=torch.bool).tril(live)
        assert torch.equal(got.expand_as(expected), expected)


# What goes wrong in between.


def test_a_mask_of_the_users_own_is_what_a_token_sees():
    model, own = build("llama-gqa3-tied", "kvpage"), build("llama-gqa3-tied")
    visible = torch.ones(1, 1, 1, 11, dtype=torch.bool)
    visible[..., 3:6] = False
    logits = []
    for each, cache in ((model, PagedCompactCache()), (own, DynamicCache())):
        forward(each, prompt(10), cache, attention_mask=torch.ones(1, 1, 10, 10).tril().bool())
        logits.append(forward(each, prompt(1), cache, attention_mask=visible))
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)
    static = PagedCompactCache(static=True)
    forward(model, prompt(10), static, attention_mask=torch.ones(1, 1, 10, 10).tril().bool())
    with pytest.raises(ValueError, match="attention_mask: a 2-D mask or none expected"):
        forward(model, prompt(1), static, attention_mask=visible)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("later", ["the same", "none", "hides more", "shows pads", "first given"])
def test_a_token_sees_what_its_mask_says_whatever_earlier_ones_said(name, later):
    """As with SDPA and with DynamicCache, also where masks contradict each other."""
    own, over_blocks = family(name), family(name)
    over_blocks.set_attn_implementation("kvpage")
    first, second = torch.ones(2, 12, dtype=torch.long), torch.ones(2, 13, dtype=torch.long)
    if later != "hides more":
        first[0, :5] = second[0, :5] = 0
    if later == "hides more":
        second[1, 4:8] = 0
    if later == "shows pads":
        second[:] = 1
    given = None if later == "first given" else first
    then = None if later == "none" else second
    results = []
    for model, cache in (
        (own, DynamicCache(config=own.config)),
        (own, PagedCompactCache(own)),
        (over_blocks, PagedCompactCache(over_blocks)),
    ):
        forward(model, prompt(12, 2), cache, attention_mask=given)
        at = torch.full((2, 1), 12)
        results.append(forward(model, prompt(1, 2), cache, attention_mask=then, position_ids=at))
    for got in results[1:]:
        torch.testing.assert_close(got, results[0], atol=1e-5, rtol=1e-5)


def test_a_static_cache_hides_pads_when_no_mask_is_repeated():
    model, logits = build("llama-gqa3-tied", "kvpage"), []
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[0, :7] = 0
    for static in (False, True):
        cache = PagedCompactCache(static=static)
        forward(model, prompt(12, 2), cache, attention_mask=mask)
        longer = torch.nn.functional.pad(mask, (0, 1), value=1)
        at = longer.sum(dim=1, keepdim=True) - 1
        given = {} if static else {"attention_mask": longer}
        logits.append(forward(model, prompt(1, 2), cache, position_ids=at, **given))
    torch.testing.assert_close(*logits, atol=1e-5, rtol=1e-5)


@pytest.fixture
def replaced():
    """Let another function stand under our name, and put ours back."""
    yield lambda function: AttentionInterface.register("kvpage", function)
    kvpage.register()


def test_an_attention_that_ignores_us_is_found_out(replaced):
    """It would attend to the placeholders of the tokens in the blocks."""
    model = build("llama-gqa3-tied", "kvpage")
    cache = PagedCompactCache(model, static=True)
    forward(model, prompt(5), cache)
    replaced(sdpa_attention_forward)
    with pytest.raises(RuntimeError, match="layer 0 did not go through attn_implementation"):
        forward(model, prompt(1), cache)
    cache.reset()
    kvpage.register()
    forward(model, prompt(5), cache)
    forward(model, prompt(1), cache)


@pytest.mark.parametrize("static", [False, True])
def test_keys_changed_on_their_way_are_found_out(replaced, static):
    def changed(module, query, key, value, *args, **kwargs):
        return attention.attention(module, query, key.clone(), value, *args, **kwargs)

    model = build("llama-gqa3-tied", "kvpage")
    cache = PagedCompactCache(model, static=static)
    forward(model, prompt(5), cache)
    replaced(changed)
    with pytest.raises(RuntimeError, match="layer 0 changed the keys on their way"):
        forward(model, prompt(1), cache)


def test_a_forward_that_raises_before_its_attention_leaves_nothing_behind(monkeypatch):
    model = build("llama-gqa3-tied", "kvpage")
    cache = PagedCompactCache(model, static=True)
    forward(model, prompt(5), cache)
    update = PagedCompactCache.update

    def interrupted(*args, **kwargs):
        update(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(PagedCompactCache, "update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        forward(model, prompt(1), cache)
    monkeypatch.undo()
    expected = forward(build("llama-gqa3-tied"), prompt(6), DynamicCache())
    got = forward(build("llama-gqa3-tied", "kvpage"), prompt(6), DynamicCache())
    torch.testing.assert_close(got, expected)
    other = PagedCompactCache(model, static=True)
    forward(model, prompt(5), other)
    monkeypatch.setattr(PagedCompactCache, "update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        forward(model, prompt(1), other)
    monkeypatch.undo()
    plain = PagedCompactCache(model, static=True)
    forward(model, prompt(5), plain)
    for each in (cache, other):
        with pytest.raises(RuntimeError, match="reset"):
            forward(model, prompt(1), each)
        each.reset()
        torch.testing.assert_close(forward(model, prompt(6), each), expected)
    forward(model, prompt(1), plain)


def test_the_last_layer_is_found_out_too(replaced):
    def ignored_by_the_last(module, *args, **kwargs):
        ours = module.layer_idx < module.config.num_hidden_layers - 1
        return (attention.attention if ours else sdpa_attention_forward)(module, *args, **kwargs)

    model = build("llama-gqa3-tied", "kvpage")
    cache = PagedCompactCache(model, static=True)
    forward(model, prompt(5), cache)
    replaced(ignored_by_the_last)
    with pytest.raises(RuntimeError, match="did not go through attn_implementation"):
        forward(model, prompt(1), cache)


@pytest.mark.skipif(RELEASE < (5, 15), reason="older releases crop by length")
def test_switching_the_attention_of_a_model_goes_on_with_its_caches():
    model, plain = build("llama-gqa3-tied"), build("llama-gqa3-tied")
    cache, other = (PagedCompactCache(each, **SMALL) for each in (model, plain))
    tokens = prompt(120)
    for start in range(0, 120, 10):
        model.set_attn_implementation("kvpage" if start % 20 else "sdpa")
        for token in tokens[:, start : start + 10].split(1, dim=1):
            got, expected = forward(model, token, cache), forward(plain, token, other)
            torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert cache.report().compactions > 3
