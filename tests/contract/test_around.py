"""What surrounds `generate`: streamers, stopping, training, compiled models, threads."""

import threading
import time

import pytest
import torch
from tiny import build, cache_name, generate, prompt
from transformers import MaxTimeCriteria, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from kvpage import PagedCompactCache

SMALL = {"budget": 64, "interval": 24, "recent": 16}


@pytest.fixture(autouse=True, params=["sdpa", "kvpage"])
def attention(request, monkeypatch):
    """What attends in every model built here."""
    monkeypatch.setattr("tiny.DEFAULT_ATTENTION", request.param)
    return request.param


@pytest.fixture(scope="module")
def expected():
    return generate(build("llama-gqa3-tied"), prompt(30), PagedCompactCache(**SMALL), 100)[0]


class Collect(BaseStreamer):
    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


def test_a_streamer_gets_every_token(expected):
    streamer = Collect()
    generate(build("llama-gqa3-tied"), prompt(30), PagedCompactCache(**SMALL), 100,
             streamer=streamer)  # fmt: skip
    assert streamer.tokens == expected[0].tolist()


class StopAt(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


def test_a_stopped_generation_goes_on_with_the_same_cache(expected):
    model = build("llama-gqa3-tied")
    cache, ids = PagedCompactCache(**SMALL), prompt(30)
    for length in (31, 60, 93, 130):
        stop = StoppingCriteriaList([StopAt(length)])
        ids = model.generate(ids, max_new_tokens=200, do_sample=False, stopping_criteria=stop,
                             **{cache_name(model): cache})  # fmt: skip
        assert ids.shape[1] == length
        assert cache.get_seq_length() == length - 1
    assert torch.equal(ids, expected)


def test_max_time_stops_and_leaves_a_sound_cache():
    model = build("llama-gqa3-tied")
    cache = PagedCompactCache(**SMALL)
    stop = StoppingCriteriaList([MaxTimeCriteria(0.3, initial_timestamp=time.time())])
    out = model.generate(prompt(30), max_new_tokens=100_000, do_sample=False,
                         stopping_criteria=stop, **{cache_name(model): cache})  # fmt: skip
    assert cache.get_seq_length() == out.shape[1] - 1
    cache.check()


@pytest.mark.parametrize("compiled", ["module", "forward"])
def test_a_compiled_model_gives_what_the_model_gives(compiled):
    """The cache itself is not compiled: the graph breaks at its hooks and its update."""
    torch.compiler.reset()
    model = build("llama-gqa3-tied")
    ids, options = prompt(80), {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
    name = cache_name(model)
    expected = model.generate(ids, **options, **{name: PagedCompactCache(**SMALL)})
    if compiled == "forward":
        model.forward = torch.compile(model.forward, backend="eager", dynamic=True)
    else:
        model = torch.compile(model, backend="eager", dynamic=True)
    cache = PagedCompactCache(**SMALL)
    got = model.generate(ids, **options, **{name: cache})
    assert torch.equal(got, expected)
    assert cache.report().compactions == 1
    assert not cache.is_compileable
    cache.check()


def test_threads_share_a_model_each_with_its_own_cache(expected):
    model = build("llama-gqa3-tied")
    results, errors = {}, []

    def work(i):
        try:
            cache = PagedCompactCache(**SMALL)
            results[i] = generate(model, prompt(30 + i), cache, 100)[0], cache.report()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert torch.equal(results[0][0], expected)
    for i in range(1, 4):
        alone = PagedCompactCache(**SMALL)
        assert torch.equal(results[i][0], generate(model, prompt(30 + i), alone, 100)[0])
        assert results[i][1].blocks_freed == alone.report().blocks_freed


def test_gradient_checkpointing_ignores_the_cache_as_transformers_does():
    model = build("llama-gqa3-tied").train()
    model.gradient_checkpointing_enable()
    cache = PagedCompactCache(model, **SMALL)
    model(prompt(30), **{cache_name(model): cache}).logits.sum().backward()
    assert cache.get_seq_length() == 0
    assert model.get_input_embeddings().weight.grad is not None


def test_gradients_of_a_first_forward_are_those_without_a_cache():
    plain, cached = build("qwen3").train(), build("qwen3").train()
    plain(prompt(30), use_cache=False).logits.square().sum().backward()
    cached(prompt(30), **{cache_name(cached): PagedCompactCache(**SMALL)}).logits.square().sum(
    ).backward()  # fmt: skip
    for a, b in zip(plain.parameters(), cached.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-4, rtol=1e-4)


def test_gradients_through_cached_tokens_are_refused_when_asked_for():
    model = build("llama-gqa3-tied").train()
    cache = PagedCompactCache(model, **SMALL)
    model(prompt(30), **{cache_name(model): cache})
    with pytest.raises(RuntimeError, match="gradients"):
        model(prompt(5), **{cache_name(model): cache})
    assert cache.get_seq_length() == 30
    model.eval()
    model(prompt(5), **{cache_name(model): cache})  # inference without no_grad is common: fine
    assert cache.get_seq_length() == 35
