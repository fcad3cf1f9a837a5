"""Calibrated statistics are those of a direct computation; their files say what they are of."""

from __future__ import annotations

import json
import pickle
import warnings
from dataclasses import replace

import pytest
import torch
from calibrated import MODULES, assert_close, assert_same_sums, direct_totals, rows
from datasets import Dataset
from families import family
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kvpage import CalibratedStatistics, PagedCompactCache, calibrate, calibration
from kvpage.calibration import merge
from kvpage.layer_calibration import drift
from kvpage.recording import Recorder

FLOAT32 = 2e-6
"""Sums of float32 vectors whose forward was batched otherwise, relative to the largest sum."""


@pytest.fixture(scope="module")
def qwen3():
    return family("qwen3")


@pytest.fixture(scope="module")
def statistics(qwen3):
    return calibrate(qwen3, None, rows(9, 30, 5), dataset="random ids")


@pytest.mark.core
@pytest.mark.parametrize("name", MODULES)
def test_statistics_equal_a_direct_computation_with_pads_excluded(name):
    """Norms included, on rows of different lengths; layers with a window have none."""
    model, ids = family(name), rows(9, 30, 5, 61, 2)
    made = calibrate(model, None, ids, batch_size=2, seq_len=64)
    assert made.tokens == 107
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * 3
    assert list(made.layers) == [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    for i, layer in made.layers.items():
        assert layer.query_total.dtype == torch.float64 and layer.heads.all()
        expected = direct_totals(model, name, i, layer.rope.bands, ids)
        assert_close(layer.sums(), expected, FLOAT32)


@pytest.mark.core
def test_fused_projections_and_states_are_calibrated_too():
    """Not the same numbers as the cache's own only because rows are summed together."""
    for name in ("gpt-neox", "phi3-partial", "lfm2"):
        model, ids = family(name), rows(40)
        made = calibrate(model, None, ids)
        cache = PagedCompactCache(model)
        with torch.no_grad():
            model(torch.tensor(ids), past_key_values=cache)
        for i, layer in made.layers.items():
            live = cache.statistics(i)
            assert torch.allclose(live.query_mean[0].double(), layer.query_total / 40, atol=1e-6)
            assert torch.allclose(live.key_mean[0].double(), layer.key_total / 40, atol=1e-6)
            assert drift(layer, live).cosine.min() > 0.99999


def test_texts_are_cut_and_counted_up_to_max_tokens(qwen3):
    ids = rows(10, 25, 7, 30)
    made = calibrate(qwen3, None, ids, seq_len=8, max_tokens=40, batch_size=3)
    pieces = [row[start : start + 8] for row in ids for start in range(0, len(row), 8)]
    kept, left = [], 40
    for piece in pieces:
        kept.append(piece[:left])
        left -= len(kept[-1])
    expected = direct_totals(qwen3, "qwen3", 1, 8, [piece for piece in kept if piece])
    assert made.tokens == 40
    assert_close(made.layers[1].sums(), expected, FLOAT32)


def test_texts_dictionaries_and_ids_are_the_same_data(qwen3):
    texts = ["abc", "hello", "a"]

    def tokenizer(text):
        return {"input_ids": [ord(letter) % 90 for letter in text]}

    ids = [tokenizer(text)["input_ids"] for text in texts]
    expected = calibrate(qwen3, None, ids)
    for data in (
        texts,
        [{"body": text} for text in texts],
        [{"input_ids": row} for row in ids],
        [torch.tensor(row) for row in ids],
        Dataset.from_list([{"body": text} for text in texts]),
    ):
        made = calibrate(qwen3, tokenizer, data, text_field="body")
        assert_same_sums(made, expected, 0)


def test_other_attention_dtypes_and_adapters_are_calibrated(qwen3, statistics):
    """A cache's hooks and another's forwards do not meet; LoRA's part of a query is its own."""
    ids = rows(9, 30, 5)
    for attention in ("eager", "kvpage"):
        model = family("qwen3")
        model.set_attn_implementation(attention)
        assert_same_sums(calibrate(model, None, ids), statistics, 1e-5)
    low = calibrate(family("qwen3", dtype=torch.bfloat16), None, ids)
    assert_same_sums(low, statistics, 0.05)
    config = LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    tuned = get_peft_model(family("qwen3"), config).eval()
    made = calibrate(tuned, None, ids)
    expected = direct_totals(tuned.get_base_model(), "qwen3", 2, 8, ids)
    assert_close(made.layers[2].sums(), expected, FLOAT32)
    assert not torch.allclose(made.layers[2].query_total, statistics.layers[2].query_total)


def test_the_model_is_left_as_it_was(qwen3):
    before = {name: len(module._forward_hooks) for name, module in qwen3.named_modules()}
    calibrate(qwen3, None, rows(5))
    assert before == {name: len(module._forward_hooks) for name, module in qwen3.named_modules()}
    assert not any(before.values())


@pytest.mark.parametrize(
    ("data", "options", "error"),
    [
        ([], {}, "data: at least one token expected"),
        ("a text", {}, "data: an iterable of samples"),
        ({"train": []}, {}, "data: an iterable of samples .one split of a data set., got a dict"),
        (["a text"], {}, "tokenizer: one expected, as sample 0 is a text"),
        ([[1], [0.5]], {}, r"data: a text or token ids expected, sample 1 is \[0.5\]"),
        ([[{"role": "user"}]], {}, "data: a text or token ids expected, sample 0 is .*role"),
        ([{"text": None}], {}, "data: a text or token ids expected, sample 0 is None"),
        ([{"body": "x"}], {}, r"text_field: one of \['body'\] expected.*got 'text'"),
        ([[1]], {"max_tokens": 0}, "max_tokens: a positive number expected, got 0"),
        ([[1]], {"seq_len": 1.5}, "seq_len: a positive number expected, got 1.5"),
    ],
)
def test_bad_data_is_named(qwen3, data, options, error):
    with pytest.raises((ValueError, TypeError), match=error):
        calibrate(qwen3, None, data, **options)


def test_unfit_models_are_refused(qwen3):
    with pytest.raises(ValueError, match="eval mode expected"):
        calibrate(family("qwen3").train(), None, rows(5))
    with pytest.raises(ValueError, match="no layer of full attention"):
        calibrate(family("mistral-window"), None, rows(5))
    strange = family("llama")
    strange.model.rotary_emb.forward = lambda x, position_ids: (
        torch.ones(*position_ids.shape, 8),
        torch.zeros(*position_ids.shape, 8),
    )
    with pytest.raises(
        ValueError, match="layer 0 of LlamaModel: rotary embedding: the model's keys differ"
    ):
        calibrate(strange, None, rows(5))


def test_a_recorder_belongs_to_its_model(qwen3):
    recorder = Recorder(qwen3, {})
    other = PagedCompactCache(family("llama"))
    assert other is not None
    with pytest.raises(ValueError, match="records another model"):
        recorder.meet(other._meeting.key)


def test_a_file_has_the_statistics_bit_for_bit_and_says_what_they_are(qwen3, statistics, tmp_path):
    path = tmp_path / "new folder" / "statistics.safetensors"
    statistics.save(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = CalibratedStatistics.load(path, qwen3)
    assert_same_sums(loaded, statistics, 0)
    assert replace(loaded, layers={}) == replace(statistics, layers={})
    for i, layer in statistics.layers.items():
        assert torch.equal(loaded.layers[i].rope.inv_freq, layer.rope.inv_freq)
        assert loaded.layers[i].traits() == layer.traits()
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    plain = {"format": "kvpage-statistics", "format_version": "1", "architecture": "qwen3"}
    plain |= {"num_layers": "3", "tokens": "44", "dataset": "random ids"}
    assert plain.items() <= metadata.items() and len(metadata["fingerprint"]) == 64
    (rope,) = json.loads(metadata["ropes"])
    assert rope["pairing"] == "half" and len(rope["inv_freq"]) == 8
    traits = {"heads": 8, "kv_heads": 1, "head_dim": 16, "rope": 0}
    assert json.loads(metadata["layers"]) == [{"layer": i, **traits} for i in range(3)]
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("name", ["llama-dynamic", "gpt-neox", "cohere-norm", "smollm3", "gemma3"])
def test_files_of_every_kind_of_rope_come_back_and_fit_their_model(name, tmp_path):
    """Dynamic frequencies, which follow the length, included."""
    model = family(name)
    made = calibrate(model, None, rows(70))
    made.save(tmp_path / "x")
    loaded = CalibratedStatistics.load(tmp_path / "x", family(name))
    assert_same_sums(loaded, made, 0)


MISMATCHES = {
    "architecture: 'qwen3' in the statistics, 'llama' in the model": ("llama", {}),
    "num_layers: 3 in the statistics, 2 in the model": ("qwen3", {"num_hidden_layers": 2}),
    r"layers of full attention: \[0, 1, 2\] in the statistics, \[0, 1\] in": (
        "qwen3",
        {"num_hidden_layers": 2},
    ),
    r"heads: 8 in the statistics, 4 in the model \(layers \[0, 1, 2\]\)": (
        "qwen3",
        {"num_attention_heads": 4},
    ),
    "kv_heads: 1 in the statistics, 2 in the model": ("qwen3", {"num_key_value_heads": 2}),
    "head_dim: 16 in the statistics, 32 in the model": ("qwen3", {"head_dim": 32}),
    "rotated dimensions: 16 in the statistics, 32 in the model": ("qwen3", {"head_dim": 32}),
    r"inv_freq\[1\] of RoPE: 0.31622\d in the statistics, 0.177\d* in the model": (
        "qwen3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "attention_scaling: 1.0 in the statistics, 1.13863 in the model": (
        "qwen3",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "pairing: half in the statistics, interleaved in the model": ("cohere", {}),
}


@pytest.mark.parametrize("error", MISMATCHES)
def test_load_names_what_differs_from_the_model(statistics, tmp_path, error):
    name, traits = MISMATCHES[error]
    statistics.save(tmp_path / "x")
    with pytest.raises(ValueError, match=error):
        CalibratedStatistics.load(tmp_path / "x", family(name, **traits))


def test_other_weights_are_a_warning_and_other_dtypes_none(qwen3, statistics):
    tuned = family("qwen3")
    with torch.no_grad():
        tuned.model.layers[1].self_attn.q_proj.weight.mul_(1.1)
    with pytest.warns(UserWarning, match="made with other weights"):
        statistics.check(tuned)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        statistics.check(family("qwen3", dtype=torch.bfloat16))


def test_parts_merge_to_the_whole(qwen3, statistics):
    ids = rows(9, 30, 5)
    first = calibrate(qwen3, None, ids[:1], dataset="a")
    second = calibrate(qwen3, None, ids[1:], dataset="b")
    both = merge(first, second)
    assert both.dataset == "a, b" and both.tokens == 44
    assert_same_sums(both, statistics, 1e-6)
    expected = first.layers[2].key_total + second.layers[2].key_total
    assert torch.equal(both.layers[2].key_total, expected)


def test_merge_refuses_different_models_and_heads(statistics):
    with pytest.raises(ValueError, match="architecture: 'qwen3' in the first, 'llama' in the sec"):
        merge(statistics, calibrate(family("llama"), None, rows(5)))
    with pytest.raises(ValueError, match="other weights"):
        merge(statistics, replace(statistics, fingerprint="x"))
    fewer = statistics.layers | {1: statistics.layers[1].having({"heads": torch.zeros(8) > 0})}
    with pytest.raises(ValueError, match="other heads in layer 1"):
        merge(statistics, replace(statistics, layers=fewer))


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def write_malicious(path, victim, how):
    payload = {"metadata": {}, "stats": Malicious(victim)}
    if how == "torch":
        torch.save(payload, path)
    else:
        path.write_bytes(pickle.dumps(payload))


@pytest.mark.parametrize("how", ["torch", "pickle"])
@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_a_malicious_pickle_executes_nothing(tmp_path, how, ending):
    path, victim = tmp_path / f"statistics.{ending}", tmp_path / "victim"
    write_malicious(path, victim, how)
    with pytest.raises(ValueError, match="a safetensors file expected"):
        CalibratedStatistics.load(path)
    assert not victim.exists()
    with path.open("rb") as file:  # it would have, for who loads it the careless way
        torch.load(file, weights_only=False) if how == "torch" else pickle.load(file)
    assert victim.exists()


def test_damaged_and_foreign_files_are_refused(statistics, tmp_path):
    path = tmp_path / "x.safetensors"
    with pytest.raises(FileNotFoundError, match="no file"):
        CalibratedStatistics.load(path)
    statistics.save(path)
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)

    def refused(error, tensors=tensors, metadata=metadata):
        save_file(tensors, path, metadata=metadata)
        with pytest.raises(ValueError, match=error):
            CalibratedStatistics.load(path)

    refused("format 'kvpage-statistics' version 1 expected, .* has None", metadata=None)
    refused("has 'kvpage-statistics' version 2", metadata=metadata | {"format_version": "2"})
    refused("is damaged", metadata=metadata | {"ropes": "["})
    refused("is damaged.*no layer", metadata=metadata | {"layers": "[]"})
    name = "layers.1.query_total"
    refused("is damaged", tensors={n: t for n, t in tensors.items() if n != name})
    refused(f"{name}: finite", tensors=tensors | {name: tensors[name] * torch.nan})
    refused(f"{name}: finite", tensors=tensors | {name: tensors[name][:4].clone()})
    refused(f"{name}: finite", tensors=tensors | {name: tensors[name].float()})
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match="a safetensors file expected"):
        CalibratedStatistics.load(path)


class FakeHub:
    """Keeps the files of repositories in a folder, with the interface of the real one."""

    def __init__(self, folder):
        self.folder = folder

    def create_repo(self, repo_id, exist_ok, private=False):
        (self.folder / repo_id).mkdir(parents=True, exist_ok=exist_ok)

    def upload_file(self, path_or_fileobj, path_in_repo, repo_id, commit_message):
        assert " tokens" in commit_message
        target = self.folder / repo_id / path_in_repo
        target.write_bytes(path_or_fileobj.read_bytes())
        return f"https://hub/{repo_id}/{path_in_repo}"

    def download(self, repo_id, filename, revision):
        return str(self.folder / repo_id / filename)


def test_statistics_go_to_the_hub_and_come_back(qwen3, statistics, tmp_path, monkeypatch):
    hub = FakeHub(tmp_path)
    monkeypatch.setattr(calibration, "HfApi", lambda: hub)
    monkeypatch.setattr(calibration, "hf_hub_download", hub.download)
    url = statistics.push_to_hub("me/statistics", private=True)
    assert url == "https://hub/me/statistics/kvpage-statistics.safetensors"
    assert_same_sums(CalibratedStatistics.from_hub("me/statistics", qwen3), statistics, 0)


def test_drift_tells_a_file_made_without_q_norm(qwen3, statistics):
    cache = PagedCompactCache(qwen3)
    with torch.no_grad():
        qwen3(torch.tensor(rows(40, 40, seed=1)), past_key_values=cache)
    layer, live = statistics.layer(1), cache.statistics(1)
    same = drift(layer, live)
    expected = live.query_magnitude.mean(dim=0).sum(-1) / (
        layer.query_magnitude_total.sum(-1) / layer.count
    )
    assert torch.allclose(same.magnitude_ratio, expected.double(), rtol=1e-5)
    mean, then = live.query_mean.mean(dim=0).double(), layer.query_total
    cosine = (mean * then).sum(-1) / mean.norm(dim=-1) / then.norm(dim=-1)
    assert torch.allclose(same.cosine, cosine) and same.warning() is None
    without = layer.having(
        {name: 40 * layer.sums()[name] for name in ("query_total", "query_magnitude_total")}
    )
    assert torch.allclose(drift(without, live).cosine, same.cosine)
    text = drift(without, live).warning()
    assert text is not None and "are 0.02" in text and "without q-norm" in text
    missing = layer.having({"heads": torch.arange(8) < 2})
    assert drift(missing, live).magnitude_ratio.isnan().tolist() == [False] * 2 + [True] * 6


def test_a_layer_without_statistics_is_none(statistics):
    assert statistics.layer(0) is statistics.layers[0] and statistics.layer(9) is None
    empty = statistics.layers[0].having({"heads": torch.zeros(8, dtype=torch.bool)})
    assert replace(statistics, layers={0: empty}).layer(0) is None
