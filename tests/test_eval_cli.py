"""`kvpage eval` as a newcomer runs it: on a fine-tuned checkpoint and files of one's own."""

import json
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from checkpoints import save_checkpoint, save_questions, train_adapter
from tiny import build, cache_name
from typer.testing import CliRunner

from kvpage import PagedCompactCache
from kvpage.cli import application
from kvpage.evaluation import memory
from kvpage.evaluation.memory import FILLER, answered

ROOT = Path(__file__).resolve().parents[1]
SMALL = ["--interval", "32", "--recent", "16", "--device", "cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint, a LoRA adapter that learnt the questions, files named as in the docs."""
    path = tmp_path_factory.mktemp("cli")
    save_checkpoint(path / "my-model")
    save_questions(path / "questions.jsonl")
    train_adapter(path / "my-model", path / "questions.jsonl", path / "my-lora")
    (path / "text.txt").write_text(" ".join([*FILLER, *FILLER[::-1], *FILLER[::2]] * 3))
    (path / "empty.txt").write_text("\n")
    return path


def kvpage(folder, *arguments, launcher=(), code=0):
    """The output of a command line, which must end with `code`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, *launcher, "-m", "kvpage.cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def rows_of(done):
    return json.loads(done.stdout)["rows"]


def documented(start):
    """Command lines of docs/evaluate.md that start so, split."""
    text = (ROOT / "docs" / "evaluate.md").read_text()
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line) for line in lines if line.startswith(start)]


def test_the_documented_commands_work_on_a_fine_tuned_adapter_and_a_jsonl(folder):
    tasks, fidelity, memory = documented("kvpage eval ")
    done = kvpage(folder, *tasks[1:], "--device", "cpu", "--max-new-tokens", 4)
    assert "my-model + my-lora" in done.stdout and "3 by math-verify, 3 by string" in done.stdout
    table = (folder / "kvpage-eval" / "tasks.md").read_text()
    for cache in ("full | -", "512 | sampled", "1024 | sampled"):
        assert f"| my-model + my-lora | questions | {cache} | 6 | 1 | 1 [0.61, 1] |" in table
    kvpage(folder, *fidelity[1:], *SMALL, "--tokens", 240, "--prompt", 32, "--budgets", 64)
    for name in ("fidelity.csv", "fidelity-budget.png", "fidelity-kv_bytes.svg", "tasks.json"):
        assert (folder / "kvpage-eval" / name).stat().st_size > 0
    kvpage(folder, *memory[1:], *SMALL, "--lengths", 100, "--limit", 1)


def test_what_the_adapter_learnt_is_not_in_the_model(folder, monkeypatch):
    monkeypatch.chdir(folder)
    command = ["eval", "tasks", "--model", "my-model", "--data", "questions.jsonl", "--json"]
    command += ["--max-new-tokens", "4", "--budgets", "none,48", *SMALL]
    done = CliRunner().invoke(application(), command)
    assert [row["accuracy"] for row in json.loads(done.stdout)["rows"]] == [0.0, 0.0]


def test_fidelity_and_memory_run_on_a_text_of_ones_own(folder, monkeypatch):
    monkeypatch.chdir(folder)
    common = ["--model", "my-model", "--budgets", "48,80", "--scorers", "centroid,knorm", *SMALL]
    fidelity = ["--data", "text.txt", "--tokens", "240", "--prompt", "32", "--json"]
    done = CliRunner().invoke(application(), ["eval", "fidelity", *common, *fidelity])
    rows = rows_of(done)
    assert [(row["budget"], row["scorer"]) for row in rows] == [
        (48, "centroid"), (48, "knorm"), (80, "centroid"), (80, "knorm"),
    ]  # fmt: skip
    assert all(row["kl"] > 0 and 0 < row["mass_to_oracle"] <= 1.001 for row in rows)
    texts = ["--lengths", "150", "--limit", "2"]
    done = CliRunner().invoke(application(), ["eval", "memory", *common, *texts])
    assert "left out: my-model, recall at 150 tokens" in done.stdout
    found = json.loads((folder / "kvpage-eval" / "memory.json").read_text())
    assert found["rows"] == [] and len(found["notes"]) == 4


def test_two_processes_find_what_one_finds(folder):
    # --multi_gpu, on a CPU: with --cpu accelerate starts several processes by mpirun only.
    arguments = ["eval", "tasks", "--model", "my-model", "--adapter", "my-lora", "--json"]
    arguments += ["--data", "questions.jsonl", "--batch-size", "2", "--max-new-tokens", "6"]
    arguments += ["--budgets", "none,48", *SMALL, "--out"]
    one = kvpage(folder, *arguments, "one")
    launcher = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    two = kvpage(folder, *arguments, "two", launcher=launcher)
    assert rows_of(two) == rows_of(one)
    files = sorted((folder / "two").glob("results-*.jsonl"))
    lines = [file.read_text().splitlines() for file in files]
    assert [len(part) for part in lines] == [3, 3]
    whole = (folder / "one" / "results-0.jsonl").read_text().splitlines()
    assert sorted([*lines[0], *lines[1]]) == sorted(whole)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fidelity", "--data", "no.txt"], "no.txt"),
        (
            ["fidelity", "--data", "text.txt", "--budgets", "10"],
            "--budgets: at least sinks + recent",
        ),
        (["fidelity", "--data", "text.txt", "--budgets", "many"], "--budgets: a number or none"),
        (["fidelity", "--data", "text.txt", "--scorers", "best"], "--scorers: one of 'sampled'"),
        (["fidelity", "--data", "text.txt", "--tokens", "9999"], "--tokens: at most"),
        (["fidelity", "--data", "empty.txt"], "--data: text expected, but empty.txt is empty"),
        (["memory", "--tasks", "recall,juggling"], "--tasks: some of recall"),
        (["tasks", "--data", "text.txt"], "text.txt, line 1: JSON expected"),
        (["tasks", "--data", "questions.jsonl", "--seeds", "0,1"], "--seeds: one expected"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(folder, monkeypatch, arguments, message):
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(application(), ["eval", *arguments, "--model", "my-model"])
    assert done.exit_code == 2
    start = [line for line in done.stderr.splitlines() if line.startswith("kvpage eval: ")]
    assert len(start) == 1 and message in done.stderr


def test_an_adapter_of_another_model_is_one_line(folder, monkeypatch, tmp_path):
    monkeypatch.chdir(folder)
    build("qwen3").save_pretrained(tmp_path / "other")
    command = ["eval", "tasks", "--model", str(tmp_path / "other"), "--tokenizer", "my-model"]
    command += ["--adapter", "my-lora", "--data", "questions.jsonl", "--budgets", "none"]
    done = CliRunner().invoke(application(), [*command, "--out", str(tmp_path), *SMALL[-2:]])
    assert done.exit_code == 2
    (line,) = [line for line in done.stderr.splitlines() if "adapter" in line]
    assert line.startswith("kvpage eval: --adapter: my-lora does not fit ")
    assert re.search(r"other \(made for \S*my-model\)$", line)


def test_ctrl_c_keeps_what_was_done_and_says_how_to_go_on(folder, monkeypatch, tmp_path):
    monkeypatch.chdir(folder)
    command = ["eval", "memory", "--model", "my-model", "--lengths", "100", "--limit", "2"]
    command += ["--tasks", "recall", "--budgets", "48", "--full-at-least", "0", *SMALL]
    command += ["--out", str(tmp_path)]
    calls = []

    def once(*arguments):
        calls.append(arguments)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return answered(*arguments)

    monkeypatch.setattr(memory, "answered", once)
    stopped = CliRunner().invoke(application(), command)
    assert stopped.exit_code == 130 and "the same command goes on" in stopped.stderr
    assert len((tmp_path / "results-0.jsonl").read_text().splitlines()) == 2
    done = CliRunner().invoke(application(), command)
    assert done.exit_code == 0 and len(calls) == 4 + 2
    assert json.loads((tmp_path / "memory.json").read_text())["rows"][0]["samples"] == 2


def test_help_teaches_every_command(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert "eval" in CliRunner().invoke(application(), ["--help"]).stdout
    for command in ("fidelity", "memory", "tasks"):
        text = CliRunner().invoke(application(), ["eval", command, "--help"]).stdout
        assert all(option in text for option in ("--model", "--budgets", "--adapter", "--out"))


needs_harness = pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed")


@needs_harness
def test_the_harness_knows_kvpage_and_generates_under_the_budget(folder):
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import get_model

    import kvpage.evaluation.lm_eval  # noqa: F401, registers it

    text = (folder / "text.txt").read_text().replace(".", " .")[:600]
    model = str(folder / "my-model")
    options = {"pretrained": model, "device": "cpu", "max_length": 2048}
    options |= {"interval": 32, "recent": 16, "pin_prompt": False, "dtype": "float32"}

    def outputs(**more):
        lm = get_model("kvpage")(**options, **more)
        asked = [(text, {"until": ["zebra zebra"], "max_gen_toks": 40})]
        scored = [(text, " river stone"), ("The sky", text)]
        kinds = {"generate_until": asked, "loglikelihood": scored}
        made = {
            kind: [Instance(kind, {}, arguments, i) for i, arguments in enumerate(every)]
            for kind, every in kinds.items()
        }
        return (
            lm.generate_until(made["generate_until"]),
            lm.loglikelihood(made["loglikelihood"]),
            lm,
        )

    written, likelihoods, lm = outputs(budget="none")
    few_written, few_likelihoods, _ = outputs(budget=48, step=8)
    assert written != few_written
    hf = get_model("hf")(pretrained=model, device="cpu", max_length=2048, dtype="float32")
    exact = hf.loglikelihood([Instance("loglikelihood", {}, (text, " river stone"), 0)])
    assert likelihoods[0][0] == pytest.approx(exact[0][0], abs=1e-3)
    ids = torch.tensor([lm.tok_encode(text) + lm.tok_encode(" river stone")])
    cache = PagedCompactCache(lm.model, budget=48, interval=32, recent=16, pin_prompt=False)
    logits = []
    with torch.no_grad():
        for part in ids[:, :-1].split(8, dim=1):
            logits.append(lm.model(part, **{cache_name(lm.model): cache}).logits[0])
    found = torch.cat(logits).log_softmax(-1)[-2:].gather(1, ids[0, -2:, None]).sum()
    assert few_likelihoods[0][0] == pytest.approx(found.item(), abs=1e-3)
    assert few_likelihoods[0][0] != pytest.approx(likelihoods[0][0], abs=1e-3)


TASK = """
task: own
dataset_path: json
dataset_kwargs: {data_files: questions.jsonl}
test_split: train
output_type: generate_until
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{answer}}"
generation_kwargs: {max_gen_toks: 4}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@needs_harness
def test_the_documented_command_runs_the_harness_on_a_task_of_ones_own(folder):
    (folder / "own.yaml").write_text(TASK)
    (command,) = documented("python -m kvpage.evaluation.lm_eval")
    command = [word.replace("budget=1024", "budget=1024,max_length=2048") for word in command]
    command[command.index("gsm8k")] = "own"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(folder / "hub")}
    command = [sys.executable, *command[1:], "--include_path", ".", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    (row,) = [line for line in done.stdout.splitlines() if "exact_match" in line]
    assert "|    1|" in row


@needs_harness
def test_the_harness_refuses_what_the_cache_refuses(folder):
    from kvpage.evaluation.lm_eval import KvpageLM

    with pytest.raises(ValueError, match="budget: at least"):
        KvpageLM(str(folder / "my-model"), device="cpu", budget=3)
    with pytest.raises(ValueError, match="step: 1 to the interval, 128"):
        KvpageLM(str(folder / "my-model"), device="cpu", step=500)
