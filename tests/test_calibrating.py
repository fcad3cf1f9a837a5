"""A calibration goes on where it stopped, adds up over processes, and runs as a command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from calibrated import assert_same_sums, direct_totals, rows
from families import family
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from kvpage import CalibratedStatistics, calibrate
from kvpage.cli import application

LENGTHS = (9, 30, 5, 61, 2, 17, 33, 8, 12)
SETTINGS = {"batch_size": 2, "seq_len": 40, "max_tokens": 150}
BATCHES = 4
"""Those that `LENGTHS` make under `SETTINGS`: rows of 9 30 | 5 40 | 21 2 | 17 26 tokens."""


@pytest.fixture
def model():
    return family("qwen3")


def forwards(model):
    """A list that grows with each forward of the model."""
    seen = []
    model.get_decoder().register_forward_pre_hook(lambda module, args: seen.append(1))
    return seen


def stopped_after(count, error):
    """The rows of `LENGTHS`, with `error` raised after `count` of them."""
    yield from rows(*LENGTHS)[:count]
    raise error


@pytest.mark.parametrize("error", [OSError("disk on fire"), KeyboardInterrupt()])
@pytest.mark.parametrize("every", [1, 2, 100])
def test_a_run_that_was_stopped_goes_on_and_equals_one_that_was_not(model, tmp_path, error, every):
    expected = calibrate(model, None, rows(*LENGTHS), **SETTINGS)
    counted, checkpoint = forwards(model), tmp_path / "partial"
    options = {"checkpoint": checkpoint, "checkpoint_every": every} | SETTINGS
    with pytest.raises(type(error)):
        calibrate(model, None, stopped_after(4, error), **options)
    assert len(counted) == 2 and list(tmp_path.iterdir()) == [checkpoint]
    assert_same_sums(calibrate(model, None, rows(*LENGTHS), **options), expected, 0)
    assert len(counted) == BATCHES
    assert_same_sums(calibrate(model, None, rows(*LENGTHS), **options), expected, 0)
    assert len(counted) == BATCHES


def test_a_forward_that_fails_counts_for_nothing(model, tmp_path):
    expected = calibrate(model, None, rows(*LENGTHS), **SETTINGS)
    options = {"checkpoint": tmp_path / "partial"} | SETTINGS
    calls = []

    def fail(module, args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    handle = model.get_decoder().layers[1].mlp.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, None, rows(*LENGTHS), **options)
    handle.remove()
    assert CalibratedStatistics.load(tmp_path / "partial", model).tokens == 84
    assert_same_sums(calibrate(model, None, rows(*LENGTHS), **options), expected, 0)


def test_a_checkpoint_of_something_else_is_refused(model, tmp_path):
    checkpoint = tmp_path / "partial"
    calibrate(model, None, rows(*LENGTHS), checkpoint=checkpoint, **SETTINGS)

    def refused(error, other=model, lengths=LENGTHS, seed=0, **changes):
        before = checkpoint.read_bytes()
        options = {"checkpoint": checkpoint} | SETTINGS | changes
        with pytest.raises(ValueError, match=error):
            calibrate(other, None, rows(*lengths, seed=seed), **options)
        assert checkpoint.read_bytes() == before

    refused(r"dtype\) \[150, 40, 2, 0, 1, .*, this is \[150, 20, 2, 0, 1, ", seq_len=20)
    refused("of another model or run.*bfloat16", family("qwen3", dtype=torch.bfloat16))
    refused("of another model or run", family("qwen2"))
    refused("made from other data", seed=1)
    refused("made from more data", lengths=LENGTHS[:2])
    (tmp_path / "partial").write_text("no statistics")
    refused("a safetensors file expected")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with its tokenizer, and data sets of several formats."""
    folder = tmp_path_factory.mktemp("cli")
    words = [f"w{i}" for i in range(90)]
    vocabulary = {word: i for i, word in enumerate([*words, "[UNK]"])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=plain).save_pretrained(folder / "model")
    family("qwen3").save_pretrained(folder / "model")
    texts = [" ".join(f"w{i}" for i in row) for row in rows(*LENGTHS)]
    with (folder / "data.jsonl").open("w") as file:
        file.writelines(json.dumps({"body": text}) + "\n" for text in texts)
    (folder / "data.txt").write_text("\n".join(texts))
    return folder


def arguments(folder, out, data="data.jsonl", **changes):
    options = {"model": folder / "model", "dataset": folder / data, "out": out}
    options |= {"text-field": "body", "device": "cpu"}
    options |= {"batch-size": 2, "seq-len": 40, "max-tokens": 150} | changes
    return ["calibrate"] + [str(word) for key, x in options.items() for word in (f"--{key}", x)]


def run(command):
    result = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return result


ROOT = str(Path(__file__).parents[1])
ENVIRONMENT = os.environ | {"PYTHONPATH": ROOT, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
ENVIRONMENT |= {"HF_DATASETS_OFFLINE": "1"}


def test_the_command_writes_the_statistics_of_a_model_over_a_file(folder):
    out = folder / "out" / "statistics.safetensors"
    command = [sys.executable, "-m", "kvpage.cli", *arguments(folder, out), "--json"]
    printed = json.loads(run(command).stdout)
    assert printed["out"] == str(out) and printed["tokens"] == 150
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    made = CalibratedStatistics.load(out, model)
    assert (made.dataset, made.model) == ("data.jsonl", "model")
    assert_same_sums(made, calibrate(model, None, rows(*LENGTHS), **SETTINGS), 0)
    assert list(out.parent.iterdir()) == [out]


def test_two_processes_equal_one(folder):
    """Each has half the batches; the parts are summed over gloo.

    (On a machine without a GPU `--multi_gpu` starts as many processes; `--cpu` would start one.)
    """
    one, two = folder / "one.safetensors", folder / "two.safetensors"
    assert CliRunner().invoke(application(), arguments(folder, one)).exit_code == 0
    launch = [
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
    ]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    command = [sys.executable, "-m", *launch, "-m", "kvpage.cli", *arguments(folder, two)]
    (printed,) = run([*command, "--json"]).stdout.splitlines()
    assert json.loads(printed)["processes"] == 2
    made, expected = CalibratedStatistics.load(two), CalibratedStatistics.load(one)
    assert made.tokens == expected.tokens == 150
    assert_same_sums(made, expected, 1e-14)
    assert not list(folder.glob("two.safetensors.*"))


def test_a_text_file_is_one_text(folder):
    out = folder / "text.safetensors"
    result = CliRunner().invoke(application(), arguments(folder, out, "data.txt"))
    assert result.exit_code == 0, result.output
    ids = [token for row in rows(*LENGTHS) for token in row][:150]
    pieces = [ids[start : start + 40] for start in range(0, 150, 40)]
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    expected = direct_totals(model, "qwen3", 0, 8, pieces)["query_total"]
    assert torch.allclose(CalibratedStatistics.load(out).layers[0].query_total, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"text-field": "content"}, "--text-field: one of ['body'] expected"),
        ({"max-tokens": "0"}, "--max-tokens: a positive number expected"),
        ({"dtype": "int8"}, "dtype: auto, float32, bfloat16 or float16 expected, got 'int8'"),
        ({"dataset": __file__}, "dataset: a file of .json, .jsonl, .parquet, .txt expected"),
    ],
)
def test_bad_input_is_one_line_and_exit_status_2(folder, changes, error):
    result = CliRunner().invoke(application(), arguments(folder, "none.safetensors", **changes))
    assert result.exit_code == 2 and error in result.stderr
    assert not (folder / "none.safetensors").exists()


def test_ctrl_c_leaves_a_checkpoint_that_the_same_command_goes_on_from(folder, monkeypatch):
    out, partial = folder / "late.safetensors", folder / "late.safetensors.partial"
    samples = [{"body": " ".join(f"w{i}" for i in row)} for row in rows(*LENGTHS)]

    def interrupted(*_args):
        yield from samples[:4]
        raise KeyboardInterrupt

    monkeypatch.setattr("kvpage.cli.calibrate._samples", interrupted)
    result = CliRunner().invoke(application(), arguments(folder, out))
    assert result.exit_code == 130 and str(partial) in result.stderr
    assert not out.exists() and CalibratedStatistics.load(partial).tokens == 84
    monkeypatch.setattr("kvpage.cli.calibrate._samples", lambda *_args: iter(samples))
    assert CliRunner().invoke(application(), arguments(folder, out)).exit_code == 0
    assert out.exists() and not partial.exists()
    assert CalibratedStatistics.load(out).tokens == 150
