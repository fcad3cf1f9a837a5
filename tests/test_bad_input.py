"""Bad input: an error that names the argument, what was expected and what was got, in time.

"In time" is checked by snapshots before and after, and by a control cache that was never offered
the bad input and must stay equal to the end.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from families import REFUSED, refused_model
from helpers import SMALL, Text, assert_same, small_cache, snapshot
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import kvpage
from kvpage import LiveTokens, PagedCompactCache
from kvpage.peers import KeyNorm
from kvpage.storage import LayerStorage

BUDGET, BOUND = SMALL["budget"], SMALL["budget"] + SMALL["interval"]
LEAST = SMALL["sinks"] + SMALL["recent"] + SMALL["block_size"]


def global_hooks() -> list[Any]:
    return list(torch_module._global_forward_pre_hooks.values())


@pytest.fixture(autouse=True, scope="module")
def cheap_garbage_collection() -> Iterator[None]:
    """What exists before the first test need not be searched again and again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def no_global_hook_stays() -> Iterator[None]:
    before = global_hooks()
    yield
    if global_hooks() != before:
        gc.collect()
    left = [hook for hook in global_hooks() if hook not in before]
    assert not left, "a process-wide hook outlived its cache"


# The constructor.

INTEGERS = ["budget", "interval", "block_size", "sinks", "recent"]
NOT_INTEGERS = [True, 64.0, "64", math.nan, [64], torch.tensor(64)]


def refuses(error: type[Exception], *fragments: str, **arguments: Any) -> None:
    """Making a cache raises `error` with all fragments, and leaves no hook behind."""
    hooks = global_hooks()
    with pytest.raises(error) as caught:
        PagedCompactCache(**arguments)
    assert type(caught.value) is error
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert global_hooks() == hooks


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", NOT_INTEGERS, ids=repr)
def test_lengths_must_be_integers(name: str, value: object) -> None:
    refuses(TypeError, f"{name}: an integer", "expected", f"got {value!r}", **{name: value})


@pytest.mark.parametrize("name", [name for name in INTEGERS if name != "budget"])
def test_only_the_budget_may_be_none(name: str) -> None:
    refuses(TypeError, f"{name}: an integer", "got None", **{name: None})


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [
        ("interval", 0, 1),
        ("interval", -128, 1),
        ("block_size", 0, 1),
        ("block_size", -16, 1),
        ("sinks", -1, 0),
        ("recent", -1, 0),
    ],
)
def test_lengths_have_a_least_value(name: str, value: int, least: int) -> None:
    refuses(ValueError, f"{name}: at least {least} expected, got {value}", **{name: value})


@pytest.mark.parametrize("delta", [-1, -LEAST + 1, -LEAST, -LEAST - 1])
def test_budget_must_hold_sinks_recent_and_a_block(delta: int) -> None:
    arguments = SMALL | {"budget": LEAST + delta}
    refuses(ValueError, "budget:", f"= {LEAST} tokens expected, got {LEAST + delta}", **arguments)


@pytest.mark.parametrize("arguments", [{"sinks": 2000}, {"recent": 2048}, {"block_size": 2048}])
def test_budget_must_hold_what_else_was_asked_for(arguments: dict[str, int]) -> None:
    refuses(ValueError, "budget:", "sinks + recent + block_size", "got 2048", **arguments)


@pytest.mark.parametrize("arguments", [{"budget": LEAST}, {"budget": None, "recent": 10**6}])
def test_least_budget_and_no_budget_are_accepted(arguments: dict[str, Any]) -> None:
    PagedCompactCache(**(SMALL | arguments))


@pytest.mark.parametrize("value", ["yes", 1, 0, None, "Auto", "", 1.0], ids=repr)
def test_pin_prompt_is_a_flag_or_auto(value: object) -> None:
    refuses(ValueError, "pin_prompt: True, False or 'auto' expected", repr(value), pin_prompt=value)


@pytest.mark.parametrize("value", [1, 0, None, "yes"], ids=repr)
def test_trace_is_a_flag(value: object) -> None:
    refuses(TypeError, "trace: True or False expected", f"got {value!r}", trace=value)


@pytest.mark.parametrize("value", ["snapkv", "", "Centroid", "knorm "], ids=repr)
def test_unknown_scorer_names_the_known_ones(value: str) -> None:
    known = ["'centroid'", "'streaming'", "'knorm'", "'random'"]
    refuses(ValueError, "scorer: one of", *known, f"got {value!r}", scorer=value)


@pytest.mark.parametrize("value", [None, 3, KeyNorm, ["knorm"]], ids=repr)
def test_scorer_is_a_name_or_a_function_not_a_class(value: object) -> None:
    refuses(TypeError, "scorer: a name or a callable expected", f"got {value!r}", scorer=value)


@pytest.mark.parametrize("name", ["bugdet", "max_cache_len", "window"])
def test_unknown_keyword_is_named(name: str) -> None:
    refuses(TypeError, repr(name), "unexpected keyword", **{name: 1})


def test_lengths_are_keywords_only() -> None:
    with pytest.raises(TypeError, match="positional"):
        PagedCompactCache(None, 2048)  # type: ignore[misc]


# Models.


def tiny_llama(**overrides: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(**(config | overrides))).eval()


def tiny_gpt2() -> GPT2LMHeadModel:
    config = GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    return GPT2LMHeadModel(config).eval()


def num_hooks(model: nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


REASONS = {
    "encoder-decoder": "the encoder-decoder T5ForConditionalGeneration",
    "MLA": "'deepseek_v3' has multi-head latent attention",
    "M-RoPE": "has multimodal RoPE",
    "longrope": "'phi3' has RoPE of type 'longrope'",
    "chunked attention": "has layers ['chunked_attention']",
    "shared keys and values": "has layers that share their keys and values",
    "attention and state in one layer": "'falcon_h1' has",
    "values of other heads": "'diffllama' has attention that reads values of other KV heads",
    "no decoder": "ModernBertDecoderForCausalLM names no decoder of its own",
    "ALiBi": "architecture 'bloom' does not follow the pattern",
    "absolute positions": "architecture 'gpt2' does not follow the pattern",
}
every_refusal = pytest.mark.parametrize("name", REFUSED)


def refused(name: str) -> nn.Module:
    model = refused_model(name)
    if model is None:
        pytest.skip(f"this transformers has no {REFUSED[name][0]}")
    return model


@every_refusal
def test_unsupported_model_is_refused_by_name_with_what_to_do_instead(name: str) -> None:
    model = refused(name)
    refuses(ValueError, "model:", REASONS[name], "use transformers' DynamicCache", model=model)
    with pytest.raises(ValueError, match="not supported, use transformers"):
        kvpage.attach(model)
    assert num_hooks(model) == 0


def longrope_phi3() -> nn.Module:
    class_name, traits = REFUSED["longrope"]
    model_class = getattr(transformers, class_name)
    return model_class(model_class.config_class(**traits))


@pytest.mark.parametrize("make", [tiny_gpt2, longrope_phi3])
@pytest.mark.parametrize("call", ["forward", "generate"])
def test_unsupported_model_is_refused_at_the_first_forward(
    make: Callable[[], nn.Module], call: str
) -> None:
    model, cache = make(), PagedCompactCache()
    arguments = {"past_key_values": cache}
    with pytest.raises(ValueError, match=r"model: .*not supported, use transformers"):
        if call == "forward":
            model(torch.ones(1, 3, dtype=torch.long), **arguments)
        else:
            model.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=2, **arguments)
    assert num_hooks(model) == 0
    assert cache.get_seq_length() == 0 and not cache.layers


def test_cache_refused_by_one_model_works_with_another() -> None:
    cache, ids = PagedCompactCache(), torch.ones(1, 3, dtype=torch.long)
    with pytest.raises(ValueError, match="gpt2"):
        tiny_gpt2()(ids, past_key_values=cache)
    tiny_llama()(ids, past_key_values=cache)
    assert cache.get_seq_length() == 3


@pytest.mark.parametrize(
    "value", [3, "gpt2", nn.Linear(2, 2), LlamaForCausalLM, {}, False], ids=lambda v: str(v)[:12]
)
def test_what_is_no_model_is_refused(value: object) -> None:
    got = f"got {type(value).__name__}"
    refuses(TypeError, "model: a transformers PreTrainedModel expected", got, model=value)


@pytest.mark.parametrize("width", [1, 5, 7, 20])
@pytest.mark.parametrize("decoded", [0, 3])
def test_mask_of_the_wrong_width_is_refused(width: int, decoded: int) -> None:
    model = tiny_llama()
    cache = PagedCompactCache(model)
    with torch.no_grad():
        for _ in range(decoded):
            model(torch.ones(2, 2, dtype=torch.long), past_key_values=cache)
        before = snapshot(cache)
        columns = 2 * decoded + 6
        mask = torch.ones(2, width, dtype=torch.long)
        with pytest.raises(ValueError) as caught:
            model(torch.ones(2, 6).long(), attention_mask=mask, past_key_values=cache)
        assert f"= {columns}] expected" in str(caught.value)
        assert f"attention_mask: [batch, seen + new tokens = {columns}]" in str(caught.value)
        assert f"got [2, {width}]" in str(caught.value)
        assert_same(snapshot(cache), before)
        mask = torch.ones(2, columns, dtype=torch.long)
        model(torch.ones(2, 6).long(), attention_mask=mask, past_key_values=cache)
    assert cache.get_seq_length() == columns


# States that do not continue what is cached.


BAD_STATES: dict[str, tuple[Callable[[Tensor, Tensor], tuple[Any, Any]], str]] = {
    "key dtype": (lambda k, v: (k.half(), v), "key_states"),
    "value dtype": (lambda k, v: (k, v.bfloat16()), "value_states"),
    "integer keys": (lambda k, v: (k.long(), v), "key_states"),
    "fewer heads": (lambda k, v: (k[:, :1], v[:, :1]), "key_states"),
    "more heads": (lambda k, v: (k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)), "key_states"),
    "key head_dim": (lambda k, v: (k[..., :4], v), "key_states"),
    "value head_dim": (lambda k, v: (k, v[..., :4]), "value_states"),
    "one row": (lambda k, v: (k[:1], v[:1]), "key_states"),
    "more rows": (lambda k, v: (k.repeat(2, 1, 1, 1), v.repeat(2, 1, 1, 1)), "key_states"),
    "no rows": (lambda k, v: (k[:0], v[:0]), "key_states"),
    "values of other rows": (lambda k, v: (k, v[:1]), "value_states"),
    "values of other heads": (lambda k, v: (k, v[:, :1]), "value_states"),
    "more values than keys": (lambda k, v: (k, v.repeat(1, 1, 2, 1)), "value_states"),
    "3-D keys": (lambda k, v: (k[0], v), "key_states"),
    "3-D values": (lambda k, v: (k, v[0]), "value_states"),
    "5-D": (lambda k, v: (k[None], v[None]), "key_states"),
    "no tokens": (lambda k, v: (k[:, :, :0], v[:, :, :0]), "key_states"),
    "no keys": (lambda k, v: (None, v), "key_states"),
    "a list": (lambda k, v: (k, v.tolist()), "value_states"),
    "meta device": (lambda k, v: (k.to("meta"), v), "key_states"),
}
every_bad_state = pytest.mark.parametrize(
    ("spoil", "name"), BAD_STATES.values(), ids=BAD_STATES.keys()
)


def offer(cache: PagedCompactCache, text: Text, spoil: Callable[..., Any], layer: int) -> None:
    start = cache.get_seq_length() - (1 if layer else 0)
    token = slice(start, start + 1)
    cache.update(*spoil(text.keys[layer, :, :, token], text.values[layer, :, :, token]), layer)


@every_bad_state
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("seen", [20, BOUND], ids=["nothing due", "compaction due"])
def test_bad_states_change_nothing(
    spoil: Callable[..., Any], name: str, layer: int, seen: int
) -> None:
    text = Text(BOUND + 40, batch=2)
    cache, control = small_cache(trace=True), small_cache(trace=True)
    for each in (cache, control):
        text.feed(each, seen)
        if layer:
            token = slice(seen, seen + 1)
            each.update(text.keys[0, :, :, token], text.values[0, :, :, token], 0)
    before = snapshot(cache)
    with pytest.raises(ValueError, match=rf"^{name}: .*expected.*got"):
        offer(cache, text, spoil, layer)
    assert_same(snapshot(cache), before)
    for each in (cache, control):
        text.feed(each, 1, first_layer=layer)
        for _ in range(33):
            text.feed(each, 1)
        each.check()
    assert_same(snapshot(cache), snapshot(control))


@pytest.mark.parametrize(
    "name",
    [
        "3-D keys",
        "3-D values",
        "5-D",
        "no rows",
        "no tokens",
        "values of other rows",
        "values of other heads",
        "more values than keys",
        "no keys",
        "a list",
    ],
)
def test_bad_first_states_change_nothing(name: str) -> None:
    text, cache = Text(200, batch=2), small_cache(trace=True)
    spoil, argument = BAD_STATES[name]
    with pytest.raises(ValueError, match=rf"^{argument}: .*expected.*got"):
        offer(cache, text, spoil, 0)
    assert_same(snapshot(cache), snapshot(small_cache(trace=True)))
    text.feed(cache, 100)
    text.feed(cache, 1)
    text.check_contents(cache)


@pytest.mark.parametrize("count", [2, 5, 100])
def test_layers_of_a_forward_must_agree_on_new_tokens(count: int) -> None:
    text, cache = Text(300), small_cache()
    text.feed(cache, BOUND)
    cache.update(text.keys[0, :, :, BOUND:][:, :, :1], text.values[0, :, :, BOUND:][:, :, :1], 0)
    before = snapshot(cache)
    states = text.keys[1, :, :, BOUND : BOUND + count], text.values[1, :, :, BOUND : BOUND + count]
    with pytest.raises(ValueError, match=rf"key_states: .*\(1, 1\) expected.*got \(1, {count}\)"):
        cache.update(*states, 1)
    assert_same(snapshot(cache), before)
    text.feed(cache, 1, first_layer=1)
    cache.check()
    text.check_contents(cache)


@pytest.mark.parametrize("layer_idx", [-1, -2, 2, 3, 100])
@pytest.mark.parametrize("seen", [20, BOUND], ids=["nothing due", "compaction due"])
def test_layer_idx_out_of_range_changes_nothing(layer_idx: int, seen: int) -> None:
    text, cache = Text(200), small_cache(trace=True)
    text.feed(cache, seen)
    text.feed(cache, 1)
    before = snapshot(cache)
    with pytest.raises(ValueError, match=rf"layer_idx: .*expected, got {layer_idx}"):
        cache.update(text.keys[0, :, :, :1], text.values[0, :, :, :1], layer_idx)
    assert_same(snapshot(cache), before)
    text.feed(cache, 1)
    text.check_contents(cache)


@pytest.mark.parametrize("layer_idx", [-1, 1, 5])
def test_layers_are_filled_in_order(layer_idx: int) -> None:
    text, cache = Text(20), small_cache()
    with pytest.raises(ValueError, match=rf"layer_idx: .*expected, got {layer_idx}"):
        cache.update(text.keys[0], text.values[0], layer_idx)
    assert_same(snapshot(cache), snapshot(small_cache()))
    text.feed(cache, 20)


def test_update_from_elsewhere_than_the_model_is_refused() -> None:
    model = tiny_llama()
    cache, states = PagedCompactCache(model, scorer="knorm"), torch.zeros(1, 2, 3, 8)
    model(torch.ones(1, 3, dtype=torch.long), past_key_values=cache)
    before = snapshot(cache)
    with pytest.raises(ValueError, match=r"cache: belongs to the LlamaModel"):
        cache.update(states, states, 0)
    assert_same(snapshot(cache), before)


def test_forward_that_skipped_layers_is_noticed_until_reset() -> None:
    text, cache = Text(300), small_cache()
    text.feed(cache, BOUND)
    token = slice(BOUND, BOUND + 1)
    states = text.keys[0, :, :, token], text.values[0, :, :, token]
    cache.update(*states, 0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="stopped after 1 of 2 layers"):
            cache.update(*states, 0)
        with pytest.raises(RuntimeError, match="stopped after 1 of 2 layers"):
            cache.check()
    cache.reset()
    text.feed(cache, BOUND)
    text.feed(cache, 1)
    cache.check()
    text.check_contents(cache)


@pytest.mark.parametrize("failing_layer", [0, 1])
@pytest.mark.parametrize(
    ("seen", "method"),
    [
        (0, "__init__"),
        (0, "relocate"),
        (0, "append"),
        (BUDGET, "append"),
        (3 * BUDGET, "replace"),
        (3 * BUDGET, "append"),
    ],
)
def test_out_of_memory_is_noticed_and_reset_recovers(
    monkeypatch: pytest.MonkeyPatch, seen: int, method: str, failing_layer: int
) -> None:
    text, cache = Text(400), small_cache()
    if seen:
        text.feed(cache, seen)
    work, calls = getattr(LayerStorage, method), []

    def fail(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) > failing_layer:
            raise MemoryError
        return work(*args, **kwargs)

    monkeypatch.setattr(LayerStorage, method, fail)
    with pytest.raises(MemoryError):
        text.feed(cache, 1 if seen else BUDGET)
    monkeypatch.undo()
    states = text.keys[0, :, :, :1], text.values[0, :, :, :1]
    for call in (cache.check, lambda: cache.update(*states, 0)):
        with pytest.raises(RuntimeError, match="reset"):
            call()
    assert str(cache.report().seen_tokens) in repr(cache)
    cache.reset()
    text.feed(cache, BOUND)
    text.feed(cache, 1)
    cache.check()
    text.check_contents(cache)


# Scorers.


def without_statistics(function: Callable[..., Any]) -> Callable[..., Any]:
    function.needs_statistics = False  # type: ignore[attr-defined]
    return function


@pytest.mark.parametrize(
    ("result", "error", "got"),
    [
        (lambda keys: keys, ValueError, "[1, 2, 96, 8]"),
        (lambda keys: keys[..., 1:, 0], ValueError, "[1, 2, 95]"),
        (lambda keys: keys[:, :1, :, 0], ValueError, "[1, 1, 96]"),
        (lambda keys: keys[0, :, :, 0], ValueError, "[2, 96]"),
        (lambda keys: keys[:, [0, 0, 1, 1], :, 0], ValueError, "[1, 4, 96]"),
        (lambda keys: keys[..., 0].long(), TypeError, "torch.int64"),
        (lambda keys: keys[..., 0] > 0, TypeError, "torch.bool"),
        (lambda keys: keys[..., 0].tolist(), TypeError, "list"),
        (lambda keys: None, TypeError, "NoneType"),
        (lambda keys: keys[..., 0].numpy(), TypeError, "ndarray"),
        (lambda keys: keys[..., 0] * math.nan, ValueError, "NaN"),
    ],
    ids=[
        "4-D",
        "short",
        "one head",
        "no batch",
        "4 heads",
        "int",
        "bool",
        "list",
        "None",
        "numpy",
        "NaN",
    ],
)
def test_scorer_that_returns_something_else_is_named_and_reset_recovers(
    result: Callable[[Tensor], Any], error: type[Exception], got: str
) -> None:
    text = Text(200)
    good = [False]

    def scorer(tokens: LiveTokens) -> Any:
        return tokens.keys[..., 0] if good[0] else result(tokens.keys)

    cache = small_cache(scorer=without_statistics(scorer))
    text.feed(cache, BOUND)
    with pytest.raises(error, match=r"^scorer: .*expected, got") as caught:
        text.feed(cache, 1)
    assert str(caught.value).endswith(got)
    for layer in (0, 1):
        with pytest.raises(RuntimeError, match="reset"):
            cache.update(text.keys[0, :, :, :1], text.values[0, :, :, :1], layer)
    with pytest.raises(RuntimeError, match="reset"):
        cache.check()
    cache.reset()
    good[0] = True
    text.feed(cache, BOUND)
    text.feed(cache, 1)
    cache.check()
    text.check_contents(cache)


@pytest.mark.parametrize("scorer", ["centroid", lambda tokens: tokens.keys[..., 0]])
def test_scorer_without_queries_raises_before_anything_is_evicted(scorer: Any) -> None:
    text, cache = Text(200), small_cache(scorer=scorer)
    text.feed(cache, BOUND)
    before = snapshot(cache)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"scorer.*'streaming', 'knorm' or 'random'"):
            text.feed(cache, 1)
        assert_same(snapshot(cache), before)
        cache.check()


# Pins.


@pytest.mark.parametrize(
    ("start", "stop", "error", "message"),
    [
        (5, 5, ValueError, "0 <= start < stop expected, got 5, 5"),
        (6, 5, ValueError, "0 <= start < stop expected, got 6, 5"),
        (-1, 3, ValueError, "0 <= start < stop expected, got -1, 3"),
        (1.0, 2, TypeError, "start: an integer token position expected, got 1.0"),
        (0, 2.0, TypeError, "stop: an integer token position expected, got 2.0"),
        (True, 2, TypeError, "start: an integer token position expected, got True"),
        (0, None, TypeError, "stop: an integer token position expected, got None"),
        ("0", 2, TypeError, "start: an integer token position expected, got '0'"),
        (10, 10 + BUDGET - LEAST + 1, ValueError, f"at most {BUDGET - LEAST} pinned tokens"),
        (0, 10**9, ValueError, f"at most {BUDGET - LEAST} pinned tokens"),
    ],
    ids=str,
)
def test_bad_pin_is_named_and_pins_nothing(
    start: Any, stop: Any, error: type[Exception], message: str
) -> None:
    text = Text(300)
    cache, control = small_cache(trace=True), small_cache(trace=True)
    text.feed(cache, 50)
    text.feed(control, 50)
    with pytest.raises(error) as caught:
        cache.pin(start, stop)
    assert message in str(caught.value) and "got" in str(caught.value)
    for each in (cache, control):
        each.pin(20, 20 + BUDGET - LEAST)  # all there is room for
        text.feed(each, 50)
        for _ in range(100):
            text.feed(each, 1)
    assert_same(snapshot(cache), snapshot(control))


def test_pins_add_up_against_the_budget() -> None:
    cache = small_cache()
    cache.pin(0, 20)
    with pytest.raises(ValueError, match=f"at most {BUDGET - LEAST} pinned tokens.*got 29"):
        cache.pin(30, 39)
    cache.pin(30, 38)


@pytest.mark.parametrize("delta", [0, 1, 200])
@pytest.mark.parametrize("first", [0, 20])
def test_prompt_that_cannot_be_pinned_is_refused_before_it_is_cached(
    delta: int, first: int
) -> None:
    room = BUDGET - SMALL["recent"]
    text, cache = Text(600), small_cache(pin_prompt=True)
    if first:
        text.feed(cache, first)
    before = snapshot(cache)
    if delta == 0:
        text.feed(cache, room - first)
        assert cache.report().prompt_pinned
        return
    with pytest.raises(ValueError) as caught:
        text.feed(cache, room - first + delta)
    assert "pin_prompt" in str(caught.value)
    assert f"{room} tokens expected, got {room + delta}" in str(caught.value)
    assert_same(snapshot(cache), before)
    text.feed(cache, room - first)
    cache.check()


def test_model_refuses_a_prompt_that_cannot_be_pinned() -> None:
    model = tiny_llama()
    cache = small_cache(model=model, pin_prompt=True, scorer="centroid")
    ids = torch.ones(1, BUDGET, dtype=torch.long)
    with pytest.raises(ValueError, match=f"pin_prompt: .*expected, got {BUDGET}"):
        model(ids, past_key_values=cache)
    assert cache.get_seq_length() == 0 and not cache.layers[0].is_initialized
    model(ids[:, :40], past_key_values=cache)
    assert cache.get_seq_length() == 40


def test_layers_are_not_filled_behind_the_back_of_their_cache() -> None:
    text, cache = Text(20), small_cache()
    text.feed(cache, 10)
    before = snapshot(cache)
    layer = cache.layers[0]
    for call in (layer.update, layer.lazy_initialization):
        with pytest.raises(NotImplementedError, match=r"PagedCompactCache\.update"):
            call(text.keys[0], text.values[0])
    assert_same(snapshot(cache), before)
