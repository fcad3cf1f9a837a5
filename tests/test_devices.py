"""Devices: each layer lives where its keys arrive, whoever put it there.

All on one CPU. Several devices are simulated (`Pretend`): real CPU tensors that carry the name of a
device, and operations that raise where torch would. So values, transformers and accelerate are
real; kernels, streams and transfers are not. Offload to disk, tensor parallelism and data-parallel
processes (gloo) are the real thing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed
from accelerate import Accelerator, dispatch_model
from families import family
from helpers import small_cache
from pretend import CPU, CUDA_0, CUDA_1, Pretend
from tiny import build, cache_name, generate, prompt
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from kvpage import PagedCompactCache, kernels
from kvpage.centroids import LayerStatistics, Vectors
from kvpage.compaction import Protection, select
from kvpage.kernels import reference
from kvpage.rope import Rope, RopeSource
from kvpage.scoring import Centroid, LiveTokens


@pytest.fixture(autouse=True)
def plain_torch(monkeypatch):
    """A pretended CUDA tensor is no business of Triton's."""
    for op in ("attention_mass", "score_tokens", "move_slots"):
        monkeypatch.setattr(kernels, op, getattr(reference, op))


SMALL = {"budget": 64, "interval": 24, "recent": 16, "trace": True}
NAME = "llama-gqa3-tied"


# Several devices, simulated.


def test_pretended_devices_refuse_what_real_ones_do():
    with Pretend() as pretend:
        one, two = torch.zeros(3, device=CUDA_0), torch.ones(3).to("cuda:1")
        assert (one + 1).device == one.view(3, 1).device == CUDA_0
        assert one[torch.tensor([0])].device == one.new_empty(2).device == CUDA_0
        assert (one.to(two) + two).device == CUDA_1 and one.double().cpu().device == CPU
        for mix in (lambda: one + two, lambda: torch.cat((one, torch.ones(3))), lambda: one[two]):
            with pytest.raises(RuntimeError, match="same device"):
                mix()
        assert len(pretend.moved) == 3


def by_age_and_norm(tokens):
    """A scorer of a user's, who relies on all being on one device."""
    keys = tokens.keys
    age = tokens.next_position[:, None, None] - torch.arange(keys.shape[2], device=keys.device)
    return keys.float().square().sum(dim=-1) - 0.01 * age


by_age_and_norm.needs_statistics = False
SCORERS = pytest.mark.parametrize(
    "scorer", ["knorm", "streaming", "random", by_age_and_norm], ids=lambda s: str(s)[:12]
)


def drive(cache, places, padded=False):
    """Feed `cache` random states, layer `i` on `places[i]`, and do all there is to do with it."""
    generator = torch.Generator().manual_seed(0)
    seen: list[Tensor] = []

    def feed(count, batch=3):
        for layer, place in enumerate(places):
            states = torch.randn(2, batch, 2, count, 8, generator=generator).to(place)
            seen.extend(cache.update(*states, layer))

    for count in (70, 1, 1, 50, *[1] * 40, 9):
        feed(count)
    cache.crop(-3)
    cache.reorder_cache(torch.tensor([2, 0, 0]).to(places[-1]))
    for count in (1, 30, *[1] * 20):
        feed(count)
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 3, 4]).to(places[0]))
    (twin,) = cache.fork(1)
    for _ in range(40):
        feed(1)
    assert cache.report().compactions >= 4
    cache.check()
    return [tensor.cpu() for tensor in (*seen, *(layer.keys for layer in twin.layers))]


@SCORERS
def test_a_cache_over_two_devices_holds_what_it_holds_on_one(scorer):
    expected = drive(small_cache(scorer=scorer), [CPU] * 4)
    places = [CUDA_0, CUDA_0, CUDA_1, CUDA_1]
    with Pretend() as pretend:
        cache = small_cache(scorer=scorer)
        got = drive(cache, places)
        pretend.moved = [tensor for tensor in pretend.moved if tensor.device != CPU]
        for layer, place in zip(cache.layers, places, strict=True):
            storage = layer.storage
            parts = (storage.keys, storage.values, layer.survivors, layer.keys, layer.values)
            assert {part.device for part in parts} == {place}
    assert all(torch.equal(one, two) for one, two in zip(got, expected, strict=True))


def test_only_positions_and_rows_move_between_devices():
    with Pretend() as pretend:
        cache = small_cache(scorer=by_age_and_norm, trace=True)
        for _ in range(150):
            for layer, place in enumerate((CUDA_0, CUDA_1)):
                states = torch.randn(2, 3, 2, 1, 8, device=place)
                cache.update(*states, layer)
            if cache.get_seq_length() == 100:
                cache.reorder_cache(torch.tensor([2, 0, 0], device=CUDA_1))
        assert pretend.moved and not any(tensor.is_floating_point() for tensor in pretend.moved)


def test_statistics_and_scores_stay_with_the_keys():
    rope = Rope(10_000.0 ** (-torch.arange(4, dtype=torch.float64) / 4))
    module = nn.Module()
    source = RopeSource(lambda module: rope, module, fixed=True)
    with Pretend() as pretend:
        collected = LayerStatistics(2, 4, 2, 8, source)
        for tokens in (200, 1, 30):
            real = torch.ones(2, tokens, dtype=torch.bool, device=CUDA_0)
            queries, keys = torch.randn(2, tokens, 32), torch.randn(2, tokens, 16)
            collected.add(Vectors(queries.to(CUDA_1), keys.to(CUDA_1), real))
        collected.crop(3)
        collected.select_rows(torch.tensor([1, 0]))
        pretend.moved.clear()
        statistics = collected.fork().read()
        tensors = [value for value in vars(statistics).values() if isinstance(value, Tensor)]
        assert len(tensors) == 5 and all(tensor.device == CUDA_1 for tensor in tensors)
        keys = torch.randn(2, 2, 50, 8, device=CUDA_1)
        positions = torch.arange(50, dtype=torch.int32, device=CUDA_1).expand(2, 2, -1)
        for place in (CPU, CUDA_0, CUDA_1):
            may_go = Protection(torch.tensor([4, 7], device=place), 8).candidates(positions)
            position = torch.tensor([50, 50], device=place)
            live = LiveTokens(0, keys, keys, positions, may_go, position, statistics)
            scores, moments = Centroid().together([live])
            kept = select(scores, positions, may_go, 20, moments)
            assert scores.device == kept.device == CUDA_1
        assert all(tensor.numel() <= 2 * rope.bands for tensor in pretend.moved)


# `device_map` over several devices, accelerate's own, on the simulated ones.


def spread(model, *devices):
    """accelerate's `dispatch_model`: decoder layer `i` on `devices[i]`, the rest on cuda:0."""
    layers = model.get_decoder().layers
    (path,) = (name for name, module in model.named_modules() if module is layers)
    leaves = [name for name, module in model.named_modules() if not any(module.children())]
    places = {name: "cuda:0" for name in leaves if name and not name.startswith(f"{path}.")}
    places |= {f"{path}.{i}": place for i, place in enumerate(devices)}
    return dispatch_model(model, places)


def padded(to=CPU):
    mask = torch.ones(3, 30, dtype=torch.long)
    mask[0, :7], mask[1, :29] = 0, 0
    return (prompt(30, batch=3) * mask).to(to), {"attention_mask": mask.to(to)}


RUNS = {
    "padded": padded,
    "beams": lambda to=CPU: (prompt(30, batch=2).to(to), {"num_beams": 2}),
    "chunked": lambda to=CPU: (prompt(150).to(to), {"prefill_chunk_size": 32}),
    "assisted": lambda to=CPU: (prompt(6).repeat(1, 5).to(to), {"prompt_lookup_num_tokens": 5}),
}


def tokens_of(model, cache, run, to=CPU):
    ids, kwargs = RUNS[run](to)
    options = {"max_new_tokens": 90, "min_new_tokens": 90, "do_sample": False}
    return model.generate(ids, **options, **kwargs, **{cache_name(model): cache})


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])
def test_a_model_over_two_devices_decodes_as_on_one(name, run):
    if (name, run) == ("lfm2", "assisted"):
        pytest.skip("transformers does no assisted decoding with recurrent states")
    scorer = by_age_and_norm if run == "beams" else "centroid"
    model = family(name)
    expected = PagedCompactCache(model, scorer=scorer, **SMALL)
    tokens = tokens_of(model, expected, run)
    assert expected.report().compactions > 0
    with Pretend():
        model = spread(family(name), "cuda:0", "cuda:1", "cuda:1")
        cache = PagedCompactCache(model, scorer=scorer, **SMALL)
        assert torch.equal(tokens_of(model, cache, run, to=CUDA_0).cpu(), tokens)
        cache.check()
        for layer in cache._stack.paged:
            place = CUDA_0 if layer is cache.layers[0] else CUDA_1
            parts = [layer.storage.keys, layer.storage.values]
            if layer.statistics is not None:
                statistics = layer.statistics.read()
                parts += [statistics.query_mean, statistics.key_mean, statistics.count]
            assert {part.device for part in parts} == {place}
    for one, two in zip(cache.trace, expected.trace, strict=True):
        assert all(map(torch.equal, one.positions, two.positions))


def test_layers_whose_weights_are_offloaded_are_cached_where_they_run():
    expected, _ = generate(build(NAME), prompt(30), PagedCompactCache(**SMALL), 100)
    with Pretend():
        model = spread(build(NAME), "cpu", "cuda:0", "cpu")
        assert model.get_decoder().layers[0].mlp.up_proj.weight.is_meta
        cache = PagedCompactCache(**SMALL)
        assert torch.equal(generate(model, prompt(30), cache, 100)[0].cpu(), expected)
        assert {layer.storage.keys.device for layer in cache.layers} == {CUDA_0}


# `device_map` with offload to disk, for real.


@pytest.mark.parametrize("budget", [None, 64])
def test_a_model_offloaded_to_disk_decodes_as_in_memory(budget, tmp_path):
    model = build(NAME)
    model.save_pretrained(tmp_path)
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk"}
    offloaded = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        device_map=places | {"model.norm": "disk"},
        offload_folder=tmp_path / "offload",
        dtype=torch.float32,
    )
    assert offloaded.model.layers[1].self_attn.q_proj.weight.is_meta
    hooks = count_hooks(offloaded)
    caches = [PagedCompactCache(**(SMALL | {"budget": budget})) for _ in range(2)]
    ids, logits = generate(model, prompt(30), caches[0], 120)
    got = generate(offloaded, prompt(30), caches[1], 120)
    assert torch.equal(got[0], ids)
    torch.testing.assert_close(got[1], logits, atol=1e-5, rtol=1e-4)
    assert caches[1].report().compactions == (0 if budget is None else 3)
    for layer in range(3):
        one, two = (cache.statistics(layer) for cache in caches)
        assert one.count.tolist() == two.count.tolist() == [149]
        torch.testing.assert_close(one.query_mean, two.query_mean)
    assert count_hooks(offloaded) > hooks
    del caches
    assert count_hooks(offloaded) == hooks


def count_hooks(model):
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


# Several processes, for real, over gloo.


def launch(module, options, role, folder):
    """Run this file's function `role` in two processes."""
    here = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    env = os.environ | {"PYTHONPATH": here, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "1"}
    command = [sys.executable, "-m", module, *options, __file__, role, str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def tensor_parallel(folder):
    """What one rank does: decode in every way, save tokens, trace, and heads held."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.float32)
    got = {}
    for run in RUNS:
        cache = PagedCompactCache(model, **SMALL)
        tokens = tokens_of(model.eval(), cache, run)
        cache.check()
        shapes = cache.layers[0].keys.shape[1], cache.statistics(0).query_mean.shape[1]
        got[run] = tokens, [event.positions for event in cache.trace], shapes
    torch.save(got, f"{folder}/{torch.distributed.get_rank()}.pt")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tensor_parallel")
    build(NAME).save_pretrained(folder)
    options = ["--standalone", "--nproc-per-node", "2"]
    return launch("torch.distributed.run", options, "tensor_parallel", folder)


@pytest.mark.parametrize("run", RUNS)
def test_each_tensor_parallel_rank_ranks_its_own_heads_as_one_process_does(ranks, run):
    model = build(NAME)
    cache = PagedCompactCache(model, **SMALL)
    expected = tokens_of(model, cache, run)
    for rank, results in enumerate(ranks):
        tokens, trace, shapes = results[run]
        assert torch.equal(tokens, expected)
        assert shapes == (1, 3)  # of 2 KV heads and 6 query heads
        assert len(trace) == len(cache.trace) > 0
        for mine, event in zip(trace, cache.trace, strict=True):
            for one, two in zip(mine, event.positions, strict=True):
                assert torch.equal(one, two[:, rank : rank + 1])


def data_parallel(folder):
    """What one process does: decode its part of the prompts."""
    torch.set_num_threads(1)
    accelerator, model = Accelerator(cpu=True), build(NAME)
    with accelerator.split_between_processes([0, 1, 2]) as seeds:
        found = {seed: decoded(model, seed) for seed in seeds}
    torch.save(found, f"{folder}/{accelerator.process_index}.pt")
    accelerator.end_training()


def decoded(model, seed):
    return generate(model, prompt(30, batch=2, seed=seed), PagedCompactCache(**SMALL), 80)


def test_accelerate_launch_decodes_in_two_processes_as_in_one(tmp_path):
    """`--cpu` starts one process on a machine without MPI; `--multi_gpu` starts two, and they
    talk over gloo when the script says `cpu=True`."""
    options = ["--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
    options += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    parts = launch("accelerate.commands.launch", options, "data_parallel", tmp_path)
    assert [list(part) for part in parts] == [[0, 1], [2]]
    for seed, (tokens, logits) in (parts[0] | parts[1]).items():
        expected = decoded(build(NAME), seed)
        assert torch.equal(tokens, expected[0]) and torch.equal(logits, expected[1])


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
