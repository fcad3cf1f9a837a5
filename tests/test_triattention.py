"""TriAttention's files: read without running what is in them, written as its code reads them."""

from __future__ import annotations

import pytest
import torch
from calibrated import assert_close, rows
from families import family
from test_calibration import write_malicious

from kvpage import PagedCompactCache, calibrate
from kvpage.layer_calibration import drift
from kvpage.triattention import load_triattention, save_triattention


@pytest.fixture(scope="module")
def qwen3():
    return family("qwen3")


def written_by_hand(path, heads, bands=8, **metadata):
    """A file as TriAttention's calibration writes it, of these `(layer, head)`; its stats."""
    generator = torch.Generator().manual_seed(0)
    stats = {
        f"layer{layer:02d}_head{head:02d}": {
            "q_mean_real": torch.randn(bands, generator=generator),
            "q_mean_imag": torch.randn(bands, generator=generator),
            "q_abs_mean": 2 + torch.rand(bands, generator=generator),
        }
        for layer, head in heads
    }
    metadata = {
        "num_traces": 3,
        "head_dim": 2 * bands,
        "rope_style": "half",
        "sampled_heads": [list(pair) for pair in heads],
    } | metadata
    torch.save({"metadata": metadata, "stats": stats}, path)
    return stats


def test_what_is_saved_reads_as_triattention_reads_it_and_comes_back(qwen3, tmp_path):
    statistics = calibrate(qwen3, None, rows(9, 30))
    save_triattention(statistics, tmp_path / "x.pt", attn_implementation="flash_attention_2")
    payload = torch.load(tmp_path / "x.pt", weights_only=True)
    metadata, stats = payload["metadata"], payload["stats"]
    assert metadata["sampled_heads"] == [[i, head] for i in range(3) for head in range(8)]
    assert (metadata["rope_style"], metadata["head_dim"]) == ("half", 16)
    assert metadata["attn_implementation"] == "flash_attention_2"
    entry, layer = stats["layer02_head05"], statistics.layers[2]
    mean = torch.complex(entry["q_mean_real"], entry["q_mean_imag"])
    expected = layer.query_total[5] / 39
    assert torch.allclose(mean.real.double(), expected[:8], rtol=1e-6)
    assert torch.allclose(mean.imag.double(), expected[8:], rtol=1e-6)
    assert entry["q_abs_mean"].dtype == torch.float32
    loaded = load_triattention(tmp_path / "x.pt", qwen3, tokens=39)
    for i, original in statistics.layers.items():
        back = loaded.layer(i)
        assert back is not None and back.key_total is None and back.key_magnitude_total is None
        own = {name: original.sums()[name] for name in back.sums()}
        assert_close(back.sums(), own, 1e-6)
    loaded.save(tmp_path / "x.safetensors")
    assert type(loaded).load(tmp_path / "x.safetensors", qwen3).layer(1).key_total is None


def test_pairs_of_interleaved_rope_are_told_apart(tmp_path):
    model = family("helium")
    statistics = calibrate(model, None, rows(20))
    save_triattention(statistics, tmp_path / "x.pt")
    payload = torch.load(tmp_path / "x.pt", weights_only=True)
    assert payload["metadata"]["rope_style"] == "interleaved"
    mean = payload["stats"]["layer01_head02"]["q_mean_imag"].double()
    assert torch.allclose(mean, statistics.layers[1].query_total[2, 1::2] / 20, rtol=1e-6)
    back = load_triattention(tmp_path / "x.pt", model, tokens=20)
    assert torch.allclose(back.layers[1].query_total, statistics.layers[1].query_total, rtol=1e-6)


def test_missing_heads_and_layers_are_marked(qwen3, tmp_path):
    stats = written_by_hand(tmp_path / "x.pt", [(0, 3), (0, 7), (2, 1)])
    loaded = load_triattention(tmp_path / "x.pt", qwen3, tokens=100)
    assert loaded.layer(1) is None and loaded.tokens == 100
    layer = loaded.layer(0)
    assert layer.heads.nonzero()[:, 0].tolist() == [3, 7]
    entry = stats["layer00_head07"]
    real, imaginary = layer.query_total[7, :8] / 100, layer.query_total[7, 8:] / 100
    assert torch.allclose(real.float(), entry["q_mean_real"])
    assert torch.allclose(imaginary.float(), entry["q_mean_imag"])
    assert torch.allclose((layer.query_magnitude_total[7] / 100).float(), entry["q_abs_mean"])
    assert (layer.query_total[0] == 0).all()
    save_triattention(loaded, tmp_path / "y.pt")
    again = torch.load(tmp_path / "y.pt", weights_only=True)
    assert again["metadata"]["sampled_heads"] == [[0, 3], [0, 7], [2, 1]]
    assert again["stats"].keys() == stats.keys()


def test_a_file_of_all_layers_serves_a_model_with_windows(tmp_path):
    model = family("gemma3")
    written_by_hand(tmp_path / "x.pt", [(layer, 0) for layer in range(3)])
    assert list(load_triattention(tmp_path / "x.pt", model).layers) == [1]


def test_a_file_made_without_q_norm_is_found_out(tmp_path):
    """Queries of `q_proj` in a model whose norm after it makes them larger, as trained ones do."""
    qwen3, heads = family("qwen3"), [(1, head) for head in range(8)]
    with torch.no_grad():
        qwen3.model.layers[1].self_attn.q_norm.weight.mul_(4)
    stats = written_by_hand(tmp_path / "x.pt", heads)
    ids, seen = torch.tensor(rows(50)), []
    projection = qwen3.model.layers[1].self_attn.q_proj
    hook = projection.register_forward_hook(lambda module, args, output: seen.append(output))
    cache = PagedCompactCache(qwen3)
    with torch.no_grad():
        qwen3(ids, past_key_values=cache)
    hook.remove()
    queries = seen[0][0].unflatten(-1, (8, 2, 8))  # [n, H, 2, F]
    for (_, head), entry in zip(heads, stats.values(), strict=True):
        entry["q_mean_real"], entry["q_mean_imag"] = queries[:, head].mean(dim=0)
        entry["q_abs_mean"] = queries[:, head].norm(dim=1).mean(dim=0)
    payload = {"metadata": {"rope_style": "half"}, "stats": stats}
    torch.save(payload, tmp_path / "x.pt")
    layer = load_triattention(tmp_path / "x.pt", qwen3).layer(1)
    text = drift(layer, cache.statistics(1)).warning()
    assert text is not None and "was the file made without q-norm" in text


@pytest.mark.parametrize("how", ["torch", "pickle"])
@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_a_malicious_pickle_executes_nothing(qwen3, tmp_path, how, ending):
    path, victim = tmp_path / f"statistics.{ending}", tmp_path / "victim"
    write_malicious(path, victim, how)
    with pytest.raises(ValueError, match="a file of tensors expected"):
        load_triattention(path, qwen3)
    assert not victim.exists()


def test_what_is_no_such_file_or_not_of_the_model_is_named(qwen3, tmp_path):
    path = tmp_path / "x.pt"

    def refused(error, model=qwen3, **options):
        with pytest.raises(ValueError, match=error):
            load_triattention(path, model, **options)

    with pytest.raises(FileNotFoundError):
        load_triattention(path, qwen3)
    path.write_text("no tensors")
    refused("a file of tensors expected")
    torch.save([1], path)
    refused("dictionaries .* expected")
    torch.save({"metadata": {}, "stats": {"x": 1}}, path)
    refused("keys such as 'layer00_head00' expected, got 'x'")
    torch.save({"metadata": {}, "stats": {"layer00_head00": 1}}, path)
    refused(r"layer 0: q_mean_real of head 0: finite \[8\] expected, got NoneType")
    torch.save({"metadata": {}, "stats": {}}, path)
    refused("has no head of layers")
    written_by_hand(path, [(0, 0), (5, 0)])
    refused(r"has layers \[5\], the model 3 layers")
    written_by_hand(path, [(0, 9)])
    refused("heads below 8 expected, got head 9")
    written_by_hand(path, [(0, 0)], bands=4)
    refused(r"finite \[8\] expected, got \[4\]")
    written_by_hand(path, [(0, 0)], rope_style="interleaved")
    refused("rope_style: 'half' expected, got 'interleaved'")
    written_by_hand(path, [(0, 0)])
    refused("RoPE on all 16 dimensions expected", family("gpt-neox"))
    refused("tokens: a positive number expected", tokens=0)


def test_what_its_files_cannot_hold_is_not_written(tmp_path):
    for name in ("gpt-neox", "cohere2"):
        statistics = calibrate(family(name), None, rows(9))
        with pytest.raises(ValueError, match="layers with RoPE on all dimensions expected"):
            save_triattention(statistics, tmp_path / "x.pt")
    assert not list(tmp_path.iterdir())
