"""Meeting the model: no set-up, no trace left, no mix-up."""

import copy
import gc
import subprocess
import sys
import weakref

import pytest
import torch
from tiny import VOCABULARY, build, cache_name, generate, prompt
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.modules import module as torch_module
from transformers import DynamicCache, PreTrainedTokenizerFast, pipeline

import kvpage
from kvpage import PagedCompactCache

pytestmark = pytest.mark.core
SMALL = {"budget": 64, "interval": 24, "recent": 16}


def hooks_of(model):
    """Every hook on the model or process-wide, kvpage's or not."""
    own = [
        hook
        for part in model.modules()
        for hooks in (part._forward_pre_hooks, part._forward_hooks)
        for hook in hooks.values()
    ]
    return own + list(torch_module._global_forward_pre_hooks.values())


@pytest.fixture
def model():
    gc.collect()
    model = build("llama-gqa3-tied")
    assert hooks_of(model) == []
    yield model
    gc.collect()
    assert hooks_of(model) == []


def test_importing_does_nothing():
    script = (
        "import sys, torch, transformers\n"
        "from transformers import AttentionInterface, DynamicCache, PreTrainedModel\n"
        "from torch.nn.modules import module\n"
        "before = sorted(AttentionInterface().keys()), torch.get_num_threads()\n"
        "theirs = set(sys.modules)\n"  # torch for CUDA brings Triton itself
        "import kvpage\n"
        "assert before == (sorted(AttentionInterface().keys()), torch.get_num_threads())\n"
        "assert not module._global_forward_pre_hooks and not module._global_forward_hooks\n"
        "assert not {'triton', 'datasets'} & (set(sys.modules) - theirs), 'imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("given", [False, True])
def test_generate_needs_no_set_up(model, given):
    cache = PagedCompactCache(model if given else None, **SMALL)
    generate(model, prompt(20), cache, 100)
    assert cache.report().compactions > 0
    assert cache.report().model == "LlamaModel"


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_both_names_of_the_argument_work_in_a_forward(model, name):
    if name == "cache" and cache_name(model) != "cache":
        pytest.skip("the installed transformers has no `cache` argument")
    cache = PagedCompactCache(**SMALL)
    with torch.no_grad():
        model(prompt(20), **{name: cache})
    assert cache.get_seq_length() == 20
    assert cache.statistics(0).count.tolist() == [20]


@pytest.mark.parametrize("attention", ["sdpa", "eager", "kvpage"])
def test_a_bare_decoder_with_padding_needs_no_set_up(attention):
    model = build("llama-gqa3-tied", attention)
    decoder = model.get_decoder()
    ids, mask = prompt(20, batch=2), torch.ones(2, 20, dtype=torch.long)
    mask[0, :7] = 0
    cache = PagedCompactCache(**SMALL)
    with torch.no_grad():
        decoder(ids, attention_mask=mask, **{cache_name(model): cache})
    assert cache.statistics(0).count.tolist() == [13, 20]


def test_a_pipeline_needs_no_set_up(model):
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", unk_token="w1")
    pipe = pipeline("text-generation", model=model, tokenizer=fast)
    text = " ".join(f"w{i}" for i in range(5, 25))
    options = {"max_new_tokens": 100, "min_new_tokens": 100, "do_sample": False}
    cache = PagedCompactCache(**SMALL)
    got = pipe(text, **options, **{cache_name(model): cache})
    assert cache.report().compactions > 0
    roomy = PagedCompactCache()
    got = pipe(text, **options, **{cache_name(model): roomy})
    assert got == pipe(text, **options, **{cache_name(model): DynamicCache()})
    assert roomy.get_seq_length() == len(fast(text).input_ids) + 99


def test_two_caches_interleaved_on_one_model_do_not_mix(model):
    tokens = prompt(200, batch=2)
    alone, together = [], []
    for row in range(2):
        cache = PagedCompactCache(**SMALL)
        for token in tokens[row].view(-1, 1, 1):
            alone.append(step(model, token, cache))
    caches = [PagedCompactCache(**SMALL) for _ in range(2)]
    for column in range(200):
        for row in range(2):
            together.append(step(model, tokens[row, column].view(1, 1), caches[row]))
    assert torch.equal(torch.stack(alone[:200]), torch.stack(together[0::2]))
    assert torch.equal(torch.stack(alone[200:]), torch.stack(together[1::2]))
    other = DynamicCache()
    step(model, tokens[:1, :1], other)  # a foreign cache is left alone
    assert caches[0].get_seq_length() == 200


@torch.no_grad()
def step(model, token, cache):
    return model(token, **{cache_name(model): cache}).logits[0, -1]


def test_a_cache_offered_to_a_second_model_raises_and_is_unharmed(model):
    other = build("llama-gqa3-tied")
    cache = PagedCompactCache(**SMALL)
    step(model, prompt(20), cache)
    before = [layer.keys.clone() for layer in cache.layers]
    with pytest.raises(ValueError, match="cache: belongs to the LlamaModel"):
        kvpage.attach(other)
        step(other, prompt(20), cache)
    kvpage.detach(other)
    assert cache.get_seq_length() == 20
    assert all(torch.equal(a, layer.keys) for a, layer in zip(before, cache.layers, strict=True))
    step(model, prompt(1), cache)


def test_a_cache_offered_to_a_second_unattached_model_raises(model):
    other = build("qwen2")
    cache = PagedCompactCache(**SMALL)
    step(model, prompt(20), cache)
    with pytest.raises(ValueError, match="cache: belongs to the LlamaModel"):
        step(other, prompt(20), cache)
    assert cache.get_seq_length() == 20
    step(model, prompt(1), cache)


@pytest.mark.parametrize("where", ["attention", "mlp", "first", "last"])
def test_a_forward_that_raises_half_way_is_noticed_by_the_next_call(model, where):
    decoder = model.get_decoder()
    broken = {
        "attention": decoder.layers[1].self_attn.o_proj,
        "mlp": decoder.layers[1].mlp,
        "first": decoder.layers[0].mlp,
        "last": decoder.layers[2].self_attn.v_proj,
    }[where]
    cache = PagedCompactCache(**SMALL)
    step(model, prompt(20), cache)

    def fail(*_):
        raise KeyboardInterrupt

    handle = broken.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        step(model, prompt(1), cache)
    handle.remove()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="of 3 layers"):
            step(model, prompt(1), cache)
    cache.reset()
    step(model, prompt(20), cache)
    step(model, prompt(1), cache)
    cache.check()


def test_a_first_forward_that_raises_half_way_is_noticed_too(model):
    cache = PagedCompactCache(**SMALL)
    handle = model.get_decoder().layers[1].mlp.register_forward_pre_hook(fail_once := Failing())
    with pytest.raises(RuntimeError, match="on purpose"):
        step(model, prompt(20), cache)
    handle.remove()
    assert fail_once.calls == 1
    with pytest.raises(RuntimeError, match="2 of 3 layers"):
        generate(model, prompt(20), cache, 3)


class Failing:
    calls = 0

    def __call__(self, *_):
        self.calls += 1
        raise RuntimeError("on purpose")


def test_a_step_that_fails_inside_a_layer_is_noticed(model, monkeypatch):
    cache = PagedCompactCache(**SMALL)
    step(model, prompt(20), cache)
    with monkeypatch.context() as patch:
        patch.setattr("kvpage.storage.LayerStorage.append", Failing())
        with pytest.raises(RuntimeError, match="on purpose"):
            step(model, prompt(1), cache)
    with pytest.raises(RuntimeError, match="0 of 3 layers"):
        step(model, prompt(1), cache)


def test_hooks_stay_while_one_cache_lives_and_go_with_the_last(model):
    first, second = PagedCompactCache(**SMALL), PagedCompactCache(model, **SMALL)
    step(model, prompt(20), first)
    count = len(hooks_of(model))
    del first
    gc.collect()
    assert len(hooks_of(model)) == count > 0
    step(model, prompt(20), second)
    del second
    gc.collect()
    assert hooks_of(model) == []


def test_nothing_keeps_a_cache_alive_after_an_exception(model):
    cache = PagedCompactCache(**SMALL)
    reference = weakref.ref(cache)
    handle = model.get_decoder().layers[1].self_attn.v_proj.register_forward_hook(Failing())
    with pytest.raises(RuntimeError, match="on purpose"):
        step(model, prompt(20), cache)
    handle.remove()
    del cache
    gc.collect()
    assert reference() is None


def test_a_cache_dies_without_the_garbage_collector(model):
    cache = PagedCompactCache(**SMALL)
    generate(model, prompt(20), cache, 100)
    reference = weakref.ref(cache)
    gc.disable()
    try:
        del cache
        assert reference() is None
    finally:
        gc.enable()


def test_attach_outlives_caches_and_detach_removes(model):
    kvpage.attach(model)
    cache = PagedCompactCache(**SMALL)
    step(model, prompt(20), cache)
    del cache
    gc.collect()
    assert hooks_of(model) != []
    cache = PagedCompactCache(**SMALL)
    step(model, prompt(20), cache)
    kvpage.detach(model)
    assert hooks_of(model) == []
    with pytest.raises(RuntimeError, match="detached"):
        step(model, prompt(1), cache)
    kvpage.attach(model)
    step(model, prompt(1), cache)
    assert cache.get_seq_length() == 21
    kvpage.detach(model)
    kvpage.detach(model)


def test_a_copy_of_a_hooked_model_is_not_hooked(model, tmp_path):
    cache = PagedCompactCache(model, **SMALL)
    twin = copy.deepcopy(model)
    own = PagedCompactCache(**SMALL)
    assert torch.equal(step(twin, prompt(20), own), step(model, prompt(20), cache))
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    expected = step(twin, prompt(20), PagedCompactCache(**SMALL))
    assert torch.equal(step(again, prompt(20), PagedCompactCache(**SMALL)), expected)


def test_another_model_called_first_does_not_confuse_a_cache_made_without_one(model):
    other = build("qwen3")
    cache = PagedCompactCache(**SMALL)
    step(other, prompt(5), DynamicCache())
    step(model, prompt(20), cache)
    assert hooks_of(other) == []
    assert cache.statistics(0).count.tolist() == [20]


def test_a_cache_never_used_leaves_nothing(model):
    PagedCompactCache(**SMALL)
    PagedCompactCache(model, **SMALL)


def test_training_mode_with_gradients_keeps_no_graph(model):
    model.train()
    cache = PagedCompactCache(**SMALL)
    model(prompt(20), **{cache_name(model): cache}).logits.sum().backward()
    assert not cache.statistics(0).query_mean.requires_grad
    model.eval()
