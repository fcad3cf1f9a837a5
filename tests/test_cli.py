"""The command line, as one types it: what each option does, what it prints, how it ends."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
import transformers
from checkpoints import save_checkpoint, save_questions
from families import family, refused_model
from tiny import cache_name
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from kvpage import PagedCompactCache
from kvpage.cli import application, machine, streams
from kvpage.cli.generate import _show
from kvpage.evaluation.memory import FILLER
from kvpage.footprint import Footprint

CHAT = (
    "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli")
    save_checkpoint(path / "my-model")
    family("gemma3").save_pretrained(path / "slides")
    refused_model("MLA").config.save_pretrained(path / "refused")
    chatty = save_checkpoint(path / "chatty")
    tokenizer = AutoTokenizer.from_pretrained(chatty)
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(chatty)
    shutil.copytree(path / "my-model", path / "bare")
    (path / "bare" / "model.safetensors").unlink()
    save_questions(path / "questions.jsonl")
    (path / "text.txt").write_text(" ".join(FILLER * 12))
    return path


def save_adapter(path):
    """A LoRA adapter of random weights."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    lora = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    model = AutoModelForCausalLM.from_pretrained(path / "my-model", dtype=torch.float32)
    get_peft_model(model, lora).save_pretrained(path / "my-lora")


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


def test_infos_figures_come_of_one_look_at_the_memory(kvpage, monkeypatch):
    free = iter(range(2**40, 0, -(2**20)))
    monkeypatch.setattr(machine, "memory_of", lambda device: (next(free), 2**40))
    found = kvpage("info", "--model", "my-model", "--device", "cpu", "--json")
    beside = found["memory"]["bytes_free_beside_weights"]
    assert found["devices"][0]["bytes_free"] == beside + found["model"]["bytes_weights"]


def test_a_text_longer_than_the_model_is_made_for_is_noted(kvpage):
    made_for = AutoConfig.from_pretrained("my-model").max_position_embeddings
    info = ["info", "--model", "my-model", "--tokens"]
    found = kvpage(*info, made_for, "--json")
    assert found["model"]["max_position_embeddings"] == made_for
    assert found["trace"]["note"] is None
    note = f"{made_for + 1:,} tokens are more than the model's max_position_embeddings"
    assert kvpage(*info, made_for + 1, "--json")["trace"]["note"].startswith(note)
    shown = kvpage(*info, made_for + 1).stdout
    assert note in shown and "of statistics at the end" in shown


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


def test_bench_makes_its_folder_before_it_times_anything(kvpage, tmp_path, monkeypatch):
    out = tmp_path / "a" / "b"

    def interrupted(*arguments):
        assert out.is_dir()
        raise KeyboardInterrupt

    monkeypatch.setattr("kvpage.evaluation.speed.measured", interrupted)
    made_for = AutoConfig.from_pretrained("my-model").max_position_embeddings
    command = ["bench", "--model", "my-model", "--budgets", "none", "--out", out, "--steps", 4]
    longest = kvpage(*command, "--points", made_for, code=130)
    longer = kvpage(*command, "--points", f"9,{made_for + 1}", code=130)
    note = f"{made_for + 1:,} tokens are more than the model's max_position_embeddings"
    assert note in longer.stderr and "max_position_embeddings" not in longest.stderr


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


# kvpage generate

SETTINGS = {"budget": 48, "interval": 16, "block_size": 8, "sinks": 2, "recent": 8}
OPTIONS = [str(word) for key, x in SETTINGS.items() for word in (f"--{key.replace('_', '-')}", x)]
STORY = "The code of the green apple is 42 . " * 12
LONG = ["--max-new-tokens", "60"]


def generated(name, prompt, tokens=60, **settings):
    """What the model in a folder writes to a prompt, greedily, under `SETTINGS`."""
    model = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(name)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    cache = PagedCompactCache(model, **(SETTINGS | settings))
    out = model.generate(
        ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0, **{cache_name(model): cache}
    )
    return tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True), cache.report()


def test_generate_writes_the_text_alone_to_a_pipe_and_the_report_to_stderr(kvpage):
    text, report = generated("my-model", STORY)
    done = kvpage("generate", "--model", "my-model", STORY, *OPTIONS, *LONG)
    assert done.stdout.strip() == text and text
    lines = str(report).splitlines()
    assert report.compactions > 1 and lines[5:9] == done.stderr.splitlines()[-len(lines) + 5 :][:4]
    assert (
        kvpage("generate", "-m", "my-model", "-", *OPTIONS, *LONG, input=STORY).stdout.strip()
        == text
    )


@pytest.mark.parametrize(
    "changes",
    [{}, {"scorer": "streaming"}, {"sinks": 8}, {"recent": 24}, {"interval": 40}, {"budget": None}],
    ids=str,
)
def test_generates_json_is_what_a_cache_with_these_options_gives(kvpage, changes):
    text, report = generated("my-model", STORY, **changes)
    options = [word for key, x in changes.items() for word in (f"--{key}", x or "none")]
    found = kvpage("generate", "-m", "my-model", STORY, *OPTIONS, *options, *LONG, "--json")
    assert found["text"] == text and found["tokens"] == 60 and found["prompt_tokens"] == 108
    assert found["tokens_per_second"] == pytest.approx(60 / found["seconds"])
    timed = {"compaction_seconds": 0}
    assert found["report"] | timed == report.to_dict() | timed
    assert not found["interrupted"]


def test_sampling_goes_by_temperature_nucleus_and_seed(kvpage):
    def written(*options):
        command = ["generate", "-m", "my-model", "apple river", "--max-new-tokens", 20, *options]
        return kvpage(*command, "--json")["text"]

    warm = written("--temperature", 2.0)
    assert (
        warm
        == written("--temperature", 2.0, "--seed", 0)
        != written("--temperature", 2.0, "--seed", 1)
    )
    assert written("--temperature", 2.0, "--top-p", 0.0001) == written() != warm


def test_an_adapter_statistics_a_dtype_and_an_attention_are_taken(kvpage, folder):
    save_adapter(folder)
    command = ["generate", "-m", "my-model", STORY, *OPTIONS, *LONG, "--json"]
    plain = kvpage(*command)
    assert kvpage(*command, "--adapter", "my-lora")["text"] != plain["text"]
    assert kvpage(*command, "--attention", "kvpage", "--device", "cpu")["text"] == plain["text"]
    half = kvpage(*command, "--dtype", "bfloat16")["report"]
    assert 2 * half["bytes_reserved"] == plain["report"]["bytes_reserved"]
    calibrated = ["--dataset", "text.txt", "--out", "statistics.safetensors", "--max-tokens", 100]
    kvpage("calibrate", "-m", "my-model", *calibrated)
    with_stats = kvpage(*command, "--stats", "statistics.safetensors")["report"]
    assert plain["report"]["drift"] is None and with_stats["drift"] is not None


def test_a_prompt_goes_through_the_chat_template_unless_raw(kvpage):
    def tokens(*options):
        command = ["generate", "-m", "chatty", "apple river", "--max-new-tokens", 2, "--json"]
        return kvpage(*command, *options)["prompt_tokens"]

    assert (tokens("--raw"), tokens(), tokens("--system", "green stone")) == (2, 7, 12)


def rendered(*turns):
    roles = zip(("user", "assistant") * len(turns), turns, strict=False)
    text = "".join(f"{role} : {turn} <eos> " for role, turn in roles)
    return f"{text}assistant : "


def test_chat_goes_on_in_one_cache_as_if_all_had_been_one_prompt(kvpage):
    lines = "the green apple\n\nthe code of the river\nwhere is the stone\n"
    options = ["--budget", "none", "--max-new-tokens", 8, "--json"]
    found = kvpage("generate", "-m", "chatty", "--chat", *options, input=lines)
    first, second, third = found["turns"]
    asked = ("the green apple", "the code of the river", "where is the stone")
    assert tuple(turn["prompt"] for turn in found["turns"]) == asked
    whole = [asked[0]]
    for turn, more in zip((first, second, third), (*asked[1:], None), strict=True):
        text, _ = generated("chatty", rendered(*whole), 8, budget=None)
        assert turn["text"] == text
        whole += [text, more]
    assert third["prompt_tokens"] < 16
    all_ids = AutoTokenizer.from_pretrained("chatty")(rendered(*whole[:5])).input_ids
    assert found["report"]["seen_tokens"] == len(all_ids) + third["tokens"] - 1


def test_chat_obeys_report_reset_and_quit(kvpage):
    lines = "the green apple\n/report\n/reset\n/dance\nthe green apple\n/quit\nriver\n"
    done = kvpage("generate", "-m", "chatty", "--chat", "--max-new-tokens", 6, input=lines)
    one, two = done.stdout.splitlines()
    assert one == two and one
    assert "/dance: /report, /reset or /quit expected" in done.stderr
    assert "/reset: the cache is empty, the conversation starts anew" in done.stderr
    assert done.stderr.count("compactions") == 2
    assert kvpage("generate", "-m", "chatty", "--chat", "--json", input="")["turns"] == []


def interrupting(monkeypatch, at, signals=1):
    put, calls = streams._Several.put, []

    def once(self, value):
        calls.append(value)
        put(self, value)
        if len(calls) == at:
            for _ in range(signals):
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(streams._Several, "put", once)


def test_ctrl_c_ends_with_what_was_written_and_the_report(kvpage, monkeypatch):
    handler = signal.getsignal(signal.SIGINT)
    texts = [generated("my-model", STORY, tokens)[0] for tokens in (5, 6)]
    interrupting(monkeypatch, at=6)  # the prompt and 5 tokens; releases differ in what is first
    done = kvpage("generate", "-m", "my-model", STORY, *OPTIONS, *LONG, code=130)
    assert done.stdout.strip() in texts and "seen tokens" in done.stderr
    assert done.stderr.endswith("kvpage generate: interrupted\n")
    interrupting(monkeypatch, at=6)
    command = ["generate", "-m", "my-model", STORY, *OPTIONS, *LONG, "--json"]
    found = json.loads(kvpage(*command, code=130).stdout)
    assert found["interrupted"] and found["text"] == texts[found["tokens"] - 5]
    assert found["report"]["seen_tokens"] == 108 + found["tokens"] - 1
    interrupting(monkeypatch, at=6, signals=2)
    assert kvpage(*command, code=130).stdout == ""
    assert signal.getsignal(signal.SIGINT) is handler


def test_ctrl_c_stops_an_answer_of_a_chat_that_is_typed_and_the_chat_goes_on(kvpage, monkeypatch):
    monkeypatch.setattr(streams, "typed", lambda: True)
    interrupting(monkeypatch, at=4)
    command = ["generate", "-m", "chatty", "--chat", "--budget", "none", "--max-new-tokens", 9]
    lines = "the green apple\nthe code of the river\n"
    done = kvpage(*command, "--json", input=lines)
    assert [turn["interrupted"] for turn in done["turns"]] == [True, False]
    first, second = done["turns"]
    assert first["tokens"] in (3, 4) and second["tokens"] == 9 and not done["interrupted"]
    whole = rendered("the green apple", first["text"], "the code of the river")
    assert second["text"] == generated("chatty", whole, 9, budget=None)[0]
    interrupting(monkeypatch, at=4)
    assert "answer stopped; Ctrl-C or Ctrl-D" in kvpage(*command, input=lines).stderr


def test_ctrl_c_ends_a_chat_at_the_prompt_and_from_a_pipe(kvpage, monkeypatch):
    command = ["generate", "-m", "chatty", "--chat", "--max-new-tokens", 9]
    lines = "the green apple\nthe code of the river\n"
    interrupting(monkeypatch, at=4)
    found = json.loads(kvpage(*command, "--json", input=lines, code=130).stdout)
    assert found["interrupted"] and len(found["turns"]) == 1

    def at_the_prompt():
        raise KeyboardInterrupt

    monkeypatch.setattr("kvpage.cli.generate._read", at_the_prompt)
    done = kvpage(*command, code=130)
    assert "seen tokens" in done.stderr and done.stderr.endswith("kvpage generate: interrupted\n")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_there_is_no_live_view_beside_text_that_goes_to_a_process(folder, tmp_path, monkeypatch):
    cache, tokenizer = PagedCompactCache(), AutoTokenizer.from_pretrained(folder / "my-model")

    def display(to_pipe):
        with streams.streams(cache, tokenizer, False, to_pipe) as several:
            return several._streamers[0].display

    monkeypatch.setattr(sys, "stderr", Terminal())
    reading, writing = os.pipe()
    with open(writing, "w") as pipe, open(reading), (tmp_path / "text").open("w") as file:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert (display(to_pipe=True), display(to_pipe=False)) == ("none", "terminal")
        monkeypatch.setattr(sys, "stdout", file)
        assert display(to_pipe=True) == "terminal"
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        assert display(to_pipe=True) == "none"


def test_the_report_is_wrapped_between_words_on_a_narrow_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("COLUMNS", "40")
    report = PagedCompactCache().report()
    _show(report)
    lines = sys.stderr.getvalue().splitlines()
    assert max(map(len, lines)) <= 40
    words = [word for name, value in report.rows() for word in (*name.split(), *value.split())]
    assert sorted(" ".join(lines).split()) == sorted(words)


def test_on_a_terminal_a_live_view_shows_blocks_and_text(kvpage, monkeypatch):
    monkeypatch.setattr(streams, "on_screen", lambda: True)
    text, report = generated("my-model", STORY)
    done = kvpage("generate", "-m", "my-model", STORY, *OPTIONS, *LONG)
    shown = " ".join(done.stdout.split())
    assert shown.count(text) == 1 and "done: 60 tokens" in shown
    assert f"{report.blocks_used} blocks used" in shown


# what goes for all of them

DATA = ["--data", "text.txt"]
COMMANDS = {
    "info": [],
    "bench": [],
    "generate": ["hello"],
    "calibrate": ["--dataset", "text.txt", "--out", "never.safetensors"],
    "eval fidelity": DATA,
    "eval memory": [],
    "eval tasks": ["--data", "questions.jsonl"],
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


MODEL = ["--model", "my-model"]
TEXT = ["--dataset", "text.txt", "--out", "never.safetensors"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "--tokens", "9"], "--tokens: needs --model"),
        (["info", *MODEL, "--tokens", "9", "--prompt", "10"], "--prompt: at most --tokens, 9, "),
        (["info", *MODEL, "--device", "meta"], "--device: one of cpu"),
        (["info", *MODEL, "--budget", "few"], "--budget: a number or none expected, got 'few'"),
        (["info", *MODEL, "--scorer", "best"], "--scorer: one of 'sampled'"),
        (["bench", *MODEL, "--budgets", "9"], "--budgets: at least sinks + recent"),
        (["bench", *MODEL, "--budgets", "512,x"], "--budgets: a number or none expected, got 'x'"),
        (["bench", *MODEL, "--points", "5,x"], "--points: integers with commas expected"),
        (["generate", *MODEL, "x", "--budget", "512,99"], "--budget: a number or none expected"),
        (["generate", *MODEL, "x", "--budget", "9"], "--budget: at least sinks + recent"),
        (["generate", *MODEL, "x", "--scorer", "best"], "--scorer: one of 'sampled'"),
        (["calibrate", *MODEL, *TEXT, "--seq-len", "0"], "--seq-len: a positive number"),
        (["bench", *MODEL, "--points", "0,5"], "--points: positive"),
        (["generate", *MODEL], "PROMPT: a text, - for stdin, or --chat"),
        (["generate", *MODEL, "hello", "--chat"], "PROMPT: a text, - for stdin, or --chat"),
        (["generate", *MODEL, ""], "PROMPT: a text expected, got none"),
        (["generate", *MODEL, "--chat"], "--chat, --system: a tokenizer with a chat template"),
        (["generate", *MODEL, "--raw", "--chat"], "--raw: goes without"),
        (["generate", *MODEL, "hello", "--stats", "no.safetensors"], "--stats: no file no.safet"),
        (["generate", "--model", "slides", "hello"], "--model: no tokenizer in slides"),
        (["calibrate", "--model", "slides", *TEXT], "--model: no tokenizer in slides"),
        (["eval", "memory", *MODEL, "--tokenizer", "slides"], "--tokenizer: no tokenizer in slide"),
        (["bench", *MODEL, "--out", "text.txt"], "--out: text.txt: File exists"),
        (["bench", *MODEL, "--out", "text.txt/x"], "--out: text.txt/x: Not a directory"),
        (["calibrate", *MODEL, *TEXT[:3], "text.txt/x"], "--out: text.txt: File exists"),
        (["generate", *MODEL, "hello", "--adapter", "no-lora"], "--adapter: no folder no-lora"),
        (["generate", *MODEL, "hello", "--adapter", "slides"], "--adapter: slides: "),
        (["generate", *MODEL, "hello", "--attention", "best"], "--attention: best: "),
        (["generate", "--model", "bare", "hello"], "--model: bare: "),
        (["calibrate", *MODEL, "--dataset", "no.txt", "--out", "x"], "--dataset: no such file"),
        (["calibrate", *MODEL, "--dataset", "me/none", "--out", "x"], "--dataset: me/none: "),
        (["eval", "fidelity", *MODEL, "--data", "no.txt"], "--data: no.txt: No such file"),
        (["eval", "tasks", *MODEL, "--data", "me/none"], "--data: me/none: "),
        (["eval", "memory", *MODEL, "--tokenizer", "none"], "--tokenizer: no folder none"),
    ],
)
def test_so_is_what_is_wrong_with_any_other(kvpage, arguments, message):
    done = kvpage(*arguments, code=2)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("kvpage ")]
    assert line.startswith(f"kvpage {arguments[0]}: {message}")
    assert "Traceback" not in done.output


def test_the_statistics_file_is_named_once(kvpage):
    done = kvpage("generate", *MODEL, "hello", "--stats", "no.safetensors", code=2)
    assert done.stderr.splitlines()[-1].endswith("--stats: no file no.safetensors")


def test_calibrate_looks_for_the_file_before_it_asks_for_datasets(kvpage, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    command = ["calibrate", *MODEL, "--out", "never.safetensors", "--dataset"]
    assert "--dataset: no such file: no.txt" in kvpage(*command, "no.txt", code=2).stderr
    assert "needs `datasets`" in kvpage(*command, "text.txt", code=2).stderr


def test_too_little_memory_is_one_line_and_exit_code_1(kvpage, monkeypatch):
    def full(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")

    monkeypatch.setattr("kvpage.evaluation.speed.measured", full)
    done = kvpage("bench", *MODEL, *SMALL, "--budgets", 48, code=1)
    assert done.stderr.endswith(
        "kvpage bench: out of memory: CUDA out of memory. Tried to allocate 2 GiB\n"
    )


def test_fidelity_says_how_many_windows_the_text_had(kvpage, tmp_path):
    command = ["eval", "fidelity", *MODEL, *DATA, "--tokens", 100, "--budgets", 48, "--prompt", 32]
    command += ["--interval", 16, "--recent", 8, "--out", tmp_path, "--json"]
    words = len(AutoTokenizer.from_pretrained("my-model")(Path("text.txt").read_text()).input_ids)
    assert kvpage(*command, "--limit", 9)["notes"] == [
        f"text.txt: {words // 100} of 9 windows of 100 tokens"
    ]
    assert kvpage(*command, "--limit", 1)["notes"] == []


def test_help_has_an_example_of_every_command_and_the_exit_codes(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for command in COMMANDS:
        text = CliRunner().invoke(application(), [*command.split(), "--help"]).stdout
        assert f"kvpage {command} --model my-model" in text
        group = CliRunner().invoke(application(), [command.split()[0], "--help"]).stdout
        assert "Exit codes: 0 done" in group


def test_help_imports_neither_torch_nor_transformers():
    code = "import sys; from kvpage.cli import application; application()(['--help'], 'kvpage', "
    code += "standalone_mode=False); print({'torch', 'transformers'} & set(sys.modules))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert "generate" in done.stdout and done.stdout.endswith("set()\n")
