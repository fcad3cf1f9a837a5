"""`PagedCompactCache(stats=...)`: calibrated statistics at work in a run."""

import warnings
from pathlib import Path

import pytest
import torch
from families import family
from tiny import cache_name, generate, prompt

import kvpage
from kvpage import PagedCompactCache
from kvpage.calibration import CalibratedStatistics
from kvpage.priors import PRIOR_TOKENS
from kvpage.triattention import load_triattention, save_triattention

SMALL = {"budget": 64, "interval": 16, "recent": 16}


@pytest.fixture(scope="module")
def model():
    return family("llama")


@pytest.fixture(scope="module")
def stats(model):
    data = [prompt(200, seed=seed)[0] for seed in range(5)]
    return kvpage.calibrate(model, None, data, progress=False)


def feed(model, cache, tokens=100):
    model(prompt(tokens, seed=9), **{cache_name(model): cache})
    return cache


@torch.no_grad()
def test_without_online_the_runs_own_queries_change_nothing(model, stats):
    """Two texts: the same statistics, which are the calibrated ones."""
    layer = stats.layer(1)
    for tokens in (50, 100):
        cache = feed(model, PagedCompactCache(model, stats=stats, online=False, **SMALL), tokens)
        found = cache.statistics(1)
        expected = (layer.query_total / layer.count).float()
        torch.testing.assert_close(found.query_mean[0], expected, atol=1e-6, rtol=1e-6)
        expected = (layer.key_magnitude_total / layer.count).float()
        torch.testing.assert_close(found.key_magnitude[0], expected, atol=1e-6, rtol=1e-6)
        sample, share = found.prior_sample
        assert torch.equal(sample, layer.sample) and share.tolist() == [1.0]


@torch.no_grad()
def test_with_online_they_count_as_some_hundred_tokens_of_the_run(model, stats):
    layer = stats.layer(2)
    alone = feed(model, PagedCompactCache(model, **SMALL)).statistics(2)
    blended = feed(model, PagedCompactCache(model, stats=stats, **SMALL)).statistics(2)
    weight = min(PRIOR_TOKENS, float(layer.count))
    calibrated = (layer.query_total / layer.count).float()
    expected = (100 * alone.query_mean[0] + weight * calibrated) / (100 + weight)
    torch.testing.assert_close(blended.query_mean[0], expected, atol=1e-6, rtol=1e-6)
    assert float(blended.prior_sample[1]) == pytest.approx(weight / (100 + weight))


@pytest.mark.parametrize("scorer", ["sampled", "centroid"])
@pytest.mark.parametrize("online", [True, False])
def test_a_file_ranks_as_the_object_and_otherwise_than_none(model, stats, tmp_path, scorer, online):
    stats.save(tmp_path / "stats.safetensors")
    traces = []
    for given in (stats, tmp_path / "stats.safetensors", None):
        options = {"stats": given, "online": online or given is None, "scorer": scorer}
        cache = PagedCompactCache(model, trace=True, **options, **SMALL)
        generate(model, prompt(70), cache, 60)
        traces.append(torch.stack([layer for one in cache.trace for layer in one.positions]))
    assert torch.equal(traces[0], traces[1])
    assert not torch.equal(traces[0], traces[2])


def test_a_row_ranks_the_same_whatever_its_neighbours(model, stats):
    ids, real = prompt(70, batch=2), torch.ones(2, 70, dtype=torch.long)
    real[0, :23] = 0
    texts = []
    for rows in (slice(0, 2), slice(0, 1)):
        cache = PagedCompactCache(model, stats=stats, **SMALL)
        given = {"attention_mask": real[rows]}
        texts.append(generate(model, (ids * real)[rows], cache, 60, **given)[0][0])
    assert torch.equal(*texts)


@torch.no_grad()
def test_the_report_says_how_far_the_run_is_from_the_statistics(model, stats):
    """The calibrated text itself is not; another is."""
    same = kvpage.calibrate(model, None, [prompt(200, seed=0)[0]], progress=False)
    cache = PagedCompactCache(model, stats=same, **SMALL)
    assert cache.report().drift is None
    model(prompt(200, seed=0), **{cache_name(model): cache})
    report = cache.report()
    assert report.drift == pytest.approx(0, abs=1e-5)
    assert report.drift_magnitude == pytest.approx(1, abs=1e-5)
    assert feed(model, PagedCompactCache(model, stats=same, **SMALL)).report().drift > 0.01
    assert "drift from stats" in str(report) and report.to_dict()["drift"] == report.drift
    assert feed(model, PagedCompactCache(model, **SMALL)).report().drift is None


@torch.no_grad()
def test_statistics_that_cant_be_of_this_model_are_warned_of_once(model, stats):
    """As a file that was made without the model's q-norm."""
    layers = {
        i: layer.having({"query_magnitude_total": layer.query_magnitude_total / 10})
        for i, layer in stats.layers.items()
    }
    off = CalibratedStatistics(layers, stats.architecture, stats.num_layers)
    cache = feed(model, PagedCompactCache(model, stats=off, **SMALL))
    with pytest.warns(UserWarning, match=r"9.* times as large .* q-norm"):
        feed(model, cache, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        feed(model, cache, 40)
        feed(model, feed(model, PagedCompactCache(model, stats=stats, **SMALL)), 1)


@torch.no_grad()
def test_means_alone_serve_the_scorer_that_needs_no_more(model, stats, tmp_path):
    path = tmp_path / "theirs.pt"
    save_triattention(stats, path)
    theirs = load_triattention(path, model)
    cache = PagedCompactCache(model, stats=theirs, scorer="centroid", **SMALL)
    feed(model, feed(model, cache), 1)
    assert cache.report().compactions == 1
    cache = PagedCompactCache(model, stats=theirs, **SMALL)
    with pytest.raises(ValueError, match=r"stats: sampled queries expected .*'centroid'"):
        feed(model, cache)


def test_bad_arguments_are_named_before_anything_is_cached(model, stats, tmp_path):
    other = family("llama", num_key_value_heads=6)
    with pytest.raises(ValueError, match="statistics: not of this LlamaForCausalLM: kv_heads"):
        PagedCompactCache(other, stats=stats)
    cache = PagedCompactCache(stats=stats, **SMALL)  # the model is not known yet
    for _ in range(2):
        with torch.no_grad(), pytest.raises(ValueError, match="statistics: not of this"):
            feed(other, cache)
    assert cache.get_seq_length() == 0
    with pytest.raises(TypeError, match="stats: a path, CalibratedStatistics or None expected"):
        PagedCompactCache(stats={})
    with pytest.raises(TypeError, match="online: True or False expected, got 1"):
        PagedCompactCache(stats=stats, online=1)
    with pytest.raises(ValueError, match="online: True expected without stats"):
        PagedCompactCache(online=False)
    with pytest.raises(ValueError, match=r"stats: a scorer that uses them expected.*'knorm'"):
        PagedCompactCache(stats=stats, scorer="knorm")
    with pytest.raises(FileNotFoundError, match="statistics: no file"):
        PagedCompactCache(stats=Path(tmp_path / "none.safetensors"))
