"""The command line, as one types it: what each option does, what it prints, how it ends."""

import json
from pathlib import Path

import psutil
import pytest
import torch
import transformers
from checkpoints import save_checkpoint
from families import family, refused_model
from tiny import cache_name
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from kvpage import PagedCompactCache
from kvpage.cli import application, machine
from kvpage.footprint import Footprint

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli")
    save_checkpoint(path / "my-model")
    family("gemma3").save_pretrained(path / "slides")
    refused_model("MLA").config.save_pretrained(path / "refused")
    return path


@pytest.fixture
def kvpage(folder, monkeypatch):
    """Run a command in the folder; returns what it printed, parsed where it ends in --json."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def run(*arguments, code=0, input=None):
        words = [str(word) for word in arguments]
        done = CliRunner().invoke(application(), words, input=input)
        assert done.exit_code == code, (done.output, done.exception)
        return json.loads(done.stdout) if "--json" in words and code == 0 else done

    return run


# kvpage info


def test_info_says_what_the_machine_has(kvpage):
    found = kvpage("info", "--json")
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["transformers"] == transformers.__version__
    cpu = found["devices"][0]
    assert cpu["device"] == "cpu" and cpu["bytes_total"] == psutil.virtual_memory().total
    assert {"sdpa", "eager", "kvpage"} <= set(found["attention"]["implementations"])
    assert "model" not in found
    text = kvpage("info").stdout
    assert torch.__version__ in text and "kvpage reads blocks by" in text


@torch.no_grad()
def test_info_predicts_what_a_run_of_the_model_reports(kvpage):
    options = ["--tokens", 150, "--prompt", 30, "--budget", 40, "--interval", 24, "--sinks", 2]
    options += ["--recent", 8, "--block-size", 8, "--batch-size", 2, "--scorer", "centroid"]
    trace = kvpage("info", "--model", "my-model", *options, "--json")["trace"]
    model = AutoModelForCausalLM.from_pretrained("my-model", dtype="auto")
    cache = PagedCompactCache(
        model, budget=40, interval=24, sinks=2, recent=8, block_size=8, scorer="centroid"
    )
    ids = torch.randint(3, 90, (2, 150))
    for part in (ids[:, :30], *ids[:, 30:].split(1, dim=1)):
        model(part, **{cache_name(model): cache})
    report = cache.report().to_dict()
    for name in ("bytes_in_use", "bytes_reserved", "bytes_peak", "bytes_statistics"):
        assert trace["paged"][name] == report[name]
    assert trace["dynamic"]["bytes"] == Footprint.of(model).dynamic_bytes(150, rows=2)


def test_info_says_whether_it_fits_and_how_much_would(kvpage, monkeypatch):
    footprint = Footprint.from_pretrained("my-model", "float32")
    free = footprint.weights_bytes + footprint.dynamic_bytes(700)
    monkeypatch.setattr(machine, "memory_of", lambda device: (free, free))
    options = ["--model", "my-model", "--device", "cpu", "--budget", "160", "--scorer", "streaming"]
    found = kvpage("info", *options, "--tokens", 701, "--json")
    assert found["memory"]["longest_dynamic"] == 700
    assert found["memory"]["longest_paged"] is None
    assert not found["trace"]["dynamic"]["fits"] and found["trace"]["paged"]["fits"]
    assert kvpage("info", *options, "--tokens", 700, "--json")["trace"]["dynamic"]["fits"]
    text = kvpage("info", *options, "--tokens", 701).stdout
    assert "700 tokens" in text and "any number of tokens" in text and "does not fit" in text
    half = kvpage("info", *options, "--dtype", "bfloat16", "--json")
    assert half["model"]["bytes_per_token"] == footprint.bytes_per_token // 2
    free = 100
    assert "no room for the weights" in kvpage("info", *options).stdout


def test_info_tells_layers_by_kind(kvpage):
    model = kvpage("info", "--model", "slides", "--json")["model"]
    assert (model["full_layers"], model["sliding_layers"], model["window"]) == (1, 2, 20)
    assert "1 of full attention, 2 with a window of 20" in kvpage("info", "-m", "slides").stdout


def test_info_gives_the_librarys_reason_for_what_it_refuses(kvpage):
    done = kvpage("info", "--model", "refused", code=2)
    assert "supported" in done.stdout and "multi-head latent attention (MLA)" in done.stderr
    found = json.loads(kvpage("info", "--model", "refused", "--json", code=2).stdout)["model"]
    assert not found["supported"] and "MLA" in found["reason"]


# kvpage bench

SMALL = ["--steps", 4, "--interval", 16, "--recent", 8, "--device", "cpu"]


def test_bench_times_every_cache_at_every_length(kvpage, folder):
    rows = kvpage(
        "bench", "--model", "my-model", "--budgets", "48,none", "--tokens", 160, *SMALL, "--json"
    )["rows"]
    caches = ["DynamicCache", "budget=48", "budget=none"]
    assert [(row["seen_tokens"], row["cache"]) for row in rows] == [
        (length, cache) for length in (20, 40, 80, 160) for cache in caches
    ]
    footprint = Footprint.from_pretrained("my-model", "float32")
    for row in rows:
        held = row["seen_tokens"] + 4 + 2  # two to warm up
        assert row["ms_per_token"] > 0 and row["speedup"] > 0
        if row["cache"] == "DynamicCache":
            assert row["kv_bytes"] == footprint.dynamic_bytes(held) and row["speedup"] == 1
        if row["cache"] == "budget=none":
            assert row["live_tokens"] == held
        if row["cache"] == "budget=48":
            assert row["live_tokens"] <= 48 + 16 or row["live_tokens"] == held
            compacts = row["seen_tokens"] >= 80
            assert (row["ms_compaction"] is not None) == compacts
    assert json.loads((folder / "kvpage-bench" / "bench.json").read_text())["rows"] == rows


@pytest.mark.parametrize("model", ["my-model", "slides"])
def test_bench_takes_points_rows_and_an_attention_and_shows_a_table(kvpage, tmp_path, model):
    done = kvpage(
        "bench", "--model", model, "--budgets", "48", "--points", "30,90", "--batch-size", 2,
        "--scorer", "streaming", "--attention", "kvpage", "--out", tmp_path, "--sinks", 2, *SMALL,
    )  # fmt: skip
    assert "budget=48" in done.stdout and "ms per token" in done.stdout
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert [row["seen_tokens"] for row in rows] == [30, 30, 90, 90]
    assert all(row["statistics_bytes"] == 0 for row in rows)  # streaming ranks by age
    footprint = Footprint.from_pretrained(model, "float32")
    assert rows[2]["kv_bytes"] == footprint.dynamic_bytes(96, rows=2)
    assert (tmp_path / "bench.md").read_text().count("\n") == 2 + 4


def test_ctrl_c_leaves_the_lengths_that_were_done(kvpage, tmp_path, monkeypatch):
    from kvpage.evaluation import speed

    measured, calls = speed.measured, []

    def second_time(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measured(*arguments)

    monkeypatch.setattr(speed, "measured", second_time)
    done = kvpage(
        "bench", "--model", "my-model", "--budgets", 48, "--points", "20,40", "--recent", 8,
        "--out", tmp_path, code=130,
    )  # fmt: skip
    assert f"the lengths that were done are in {tmp_path}" in done.stderr
    assert [
        row["seen_tokens"] for row in json.loads((tmp_path / "bench.json").read_text())["rows"]
    ] == [20, 20]


# what goes for all of them

COMMANDS = {
    "info": [],
    "bench": [],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no-model"], "--model: no folder no-model"),
        (["--model", "some/no-model"], "--model: no folder some/no-model, and not to be had"),
        (["--model", "."], "--model: a folder with a config.json in it expected, got ."),
        (["--model", "refused"], "--model: refused: 'deepseek_v3' has multi-head"),
        (["--model", "my-model", "--device", "xpu"], "--device: can't use 'xpu'"),
        (["--model", "my-model", "--device", "nonsense"], "--device: can't use 'nonsense'"),
        (["--model", "my-model", "--dtype", "int8"], "--dtype: auto, float32, bfloat16 or float16"),
    ],
)
def test_what_is_wrong_is_one_line_that_names_the_option(kvpage, command, arguments, message):
    done = kvpage(*command.split(), *arguments, *COMMANDS[command], code=2)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("kvpage ")]
    assert line.startswith(f"kvpage {command.split()[0]}: {message}")
    assert "Traceback" not in done.output


def test_help_has_an_example_of_every_command_and_the_exit_codes(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for command in COMMANDS:
        text = CliRunner().invoke(application(), [*command.split(), "--help"]).stdout
        assert f"kvpage {command} --model my-model" in text and "Exit codes: 0 done" in text
