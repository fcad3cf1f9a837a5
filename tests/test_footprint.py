"""What footprint works out is what real caches hold."""

import pytest
import torch
from families import FAMILIES, KEEP_STATES, REFUSED, family, refused_model
from huggingface_hub.errors import StrictDataclassFieldValidationError
from tiny import build, cache_name, prompt
from transformers import DynamicCache

from kvpage import PagedCompactCache
from kvpage.footprint import Footprint, PagedBytes, without_weights

pytestmark = pytest.mark.core
OPTIONS = {"budget": 40, "interval": 24, "block_size": 8, "sinks": 2, "recent": 8}
LENGTHS = (1, 2, 15, 64, 65, 88, 89, 130, 131, 150)
FEW = {"budget": 20, "interval": 8, "block_size": 8, "sinks": 2, "recent": 8}


def measured(cache):
    report = cache.report()
    states = report.bytes_states
    return PagedBytes(
        report.bytes_in_use - states,
        report.bytes_reserved - states,
        report.bytes_peak - states,
        report.bytes_statistics,
    )


@torch.no_grad()
def run(model, cache, first, tokens, rows=1):
    """Yield the tokens seen after every forward: `first` in one, then one at a time."""
    ids = prompt(tokens, rows)
    for start, stop in [(0, first), *((i, i + 1) for i in range(first, tokens))]:
        model(ids[:, start:stop], **{cache_name(model): cache})
        yield stop


def assert_agrees(model, first, rows=1, **options):
    footprint = Footprint.of(model)
    cache = PagedCompactCache(model, **options)
    full = DynamicCache(config=model.config.get_text_config(decoder=True))
    last = max(LENGTHS[-1], first + 40)
    passes = zip(
        run(model, cache, first, last, rows), run(model, full, first, last, rows), strict=True
    )
    for seen, _ in passes:
        if seen in LENGTHS or seen in (first, last):
            found = footprint.paged_bytes(seen, prompt=first, rows=rows, **options)
            assert found == measured(cache), seen
            held = [layer for layer in full.layers if getattr(layer, "keys", None) is not None]
            expected = sum(layer.keys.nbytes + layer.values.nbytes for layer in held)
            assert footprint.dynamic_bytes(seen, rows) == expected, seen


@pytest.mark.parametrize("first", [1, 20, 65, 150])
def test_a_trace_takes_what_report_says_whatever_its_prompt(first):
    assert_agrees(build("llama-gqa3-tied"), first, **OPTIONS)


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": 3},
        {"scorer": "centroid"},
        {"scorer": "streaming"},
        {"scorer": "window"},
        {"budget": None},
        {"interval": 200, "budget": 20, "sinks": 0, "recent": 4},
        {"interval": 5, "block_size": 32, "recent": 4},
    ],
    ids=str,
)
def test_it_does_under_every_setting(changes):
    assert_agrees(build("qwen3"), 10, **(OPTIONS | changes))


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss"])
def test_it_does_where_full_and_sliding_layers_peak_at_different_times(name):
    """The full ones at a prompt over the budget, before they shrink; the sliding ones later, as
    the window, 20 tokens, is longer."""
    options = {"budget": 4, "interval": 4, "block_size": 2, "sinks": 0, "recent": 2}
    assert_agrees(family(name), 9, **options)


@pytest.mark.parametrize("name", FAMILIES)
def test_it_does_in_every_family_from_the_config_alone(name):
    model = family(name)
    footprint = Footprint.of(model)
    cache = PagedCompactCache(model, **FEW)
    full = DynamicCache(config=model.config.get_text_config(decoder=True))
    list(zip(run(model, cache, 30, 42), run(model, full, 30, 42), strict=True))
    assert footprint.paged_bytes(42, prompt=30, **FEW) == measured(cache)
    held = [layer for layer in full.layers if getattr(layer, "keys", None) is not None]
    expected = sum(layer.keys.nbytes + layer.values.nbytes for layer in held)
    assert footprint.dynamic_bytes(42) == expected
    assert (footprint.state_layers > 0) == (name in KEEP_STATES)
    assert footprint.weights_bytes == sum(p.nbytes for p in model.parameters())
    if "vision" not in name and name != "llava":
        bare = without_weights(model.config, "float32")
        assert bare.device.type == "meta" and Footprint.of(bare) == footprint


def test_half_precision_halves_it():
    whole = Footprint.of(build("qwen3"))
    half = Footprint.of(build("qwen3", dtype=torch.bfloat16))
    assert 2 * half.dynamic_bytes(77) == whole.dynamic_bytes(77)
    assert 2 * half.weights_bytes == whole.weights_bytes


def test_the_longest_trace_is_the_longest_that_fits():
    footprint = Footprint.of(build("llama-gqa3-tied"))
    free = footprint.dynamic_bytes(500)
    assert footprint.longest_dynamic(free) == 500
    assert footprint.longest_dynamic(free - 1) == 499
    assert footprint.longest_dynamic(free, rows=2) == 250
    assert footprint.longest_paged(free, scorer="streaming", **OPTIONS) is None
    few = footprint.paged_bytes(20, scorer="streaming", **OPTIONS).peak
    found = footprint.longest_paged(few, scorer="streaming", **OPTIONS)
    sizes = [
        footprint.paged_bytes(n, scorer="streaming", **OPTIONS).peak for n in (found, found + 1)
    ]
    assert sizes[0] <= few < sizes[1]
    plenty, forever = footprint.dynamic_bytes(9000), OPTIONS | {"budget": None}
    assert 0 < footprint.longest_paged(plenty, **forever) < 9000
    assert footprint.longest_paged(free, prompt=2000, scorer="streaming", **OPTIONS) == 0


def test_where_all_layers_slide_any_length_fits():
    footprint = Footprint.of(family("mistral-window"))
    assert footprint.bytes_per_token == 0
    assert footprint.longest_dynamic(footprint.dynamic_bytes(20)) is None
    assert footprint.longest_dynamic(footprint.dynamic_bytes(19) - 1) == 18
    assert footprint.longest_paged(1 << 30) is None


def test_a_million_tokens_are_quickly_worked_out():
    footprint = Footprint.of(build("qwen3"))
    unbounded = footprint.paged_bytes(1_000_000, budget=None)
    assert unbounded.in_use == footprint.dynamic_bytes(1_000_000)
    settled = footprint.paged_bytes(1_000_000, budget=512)
    assert settled.reserved == footprint.paged_bytes(513 + 127, budget=512).reserved


@pytest.mark.parametrize("name", REFUSED)
def test_what_kvpage_refuses_is_refused_by_name(name):
    try:
        model = refused_model(name)
    except StrictDataclassFieldValidationError as error:
        pytest.skip(f"this transformers can't make one: {error}")
    if model is None:
        pytest.skip("not in this transformers")
    with pytest.raises(ValueError, match=r"^model: "):
        Footprint.of(model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 0}, "tokens: at least 1"),
        ({"prompt": 0}, "prompt: at least 1"),
        ({"rows": 0}, "rows: at least 1"),
        ({"budget": 5}, "budget: at least"),
        ({"scorer": "best"}, "scorer: one of"),
    ],
)
def test_bad_input_is_named(changes, message):
    arguments = {"tokens": 10} | changes
    with pytest.raises(ValueError, match=message):
        Footprint.of(build("qwen3")).paged_bytes(arguments.pop("tokens"), **arguments)
