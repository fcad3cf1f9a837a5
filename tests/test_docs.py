"""Every code block of the README and of docs/ runs, or is listed here with the reason why not.

Python blocks of a page run in order, in one namespace that starts with `model`, `tokenizer`,
`inputs`, `torch` and `kvpage`; shell commands run in this process, in a folder that holds what the
pages speak of: `my-model`, `my-lora`, `questions.jsonl`, `text.txt`, `traces.jsonl`.
"""

from __future__ import annotations

import json
import re
import runpy
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from checkpoints import save_checkpoint, save_questions
from peft import LoraConfig, get_peft_model
from test_calibration import FakeHub
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import kvpage
from kvpage import architectures, calibration
from kvpage.cli import application
from kvpage.evaluation.memory import FILLER

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted((ROOT / "examples").rglob("*.md"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SHOWN = {"", "text"}
"""Languages of blocks that are there to be read."""

CI = ".ci/run runs it, in a fresh environment"
INSTALLS = "installs packages, as .ci/run does"
SITE = "builds this site, as .ci/run does"
NOT_RUN = {
    ("README.md", "python3 -m venv"): CI,
    ("README.md", "pip install"): INSTALLS,
    ("CONTRIBUTING.md", "python3 -m venv"): INSTALLS,
    ("CONTRIBUTING.md", ".venv/bin/python -m pytest"): "runs all tests",
    ("CONTRIBUTING.md", ".ci/run"): "runs all tests",
    ("docs/index.md", "pip install"): INSTALLS,
    ("docs/notebooks.md", "pip install"): INSTALLS,
    ("docs/evaluate.md", "pip install"): INSTALLS,
    ("docs/evaluate.md", "python -m kvpage.evaluation.lm_eval"): "tests/test_eval_cli.py runs it",
    ("docs/attention.md", 'token, position = torch.zeros(1, 1, dtype=torch.long, device="cuda")'): (
        "captures a graph on a GPU; tests/test_static.py replays recorded operations instead"
    ),
    ("docs/results.md", "OUT=gpu-results benchmarks/gpu.sh"): "needs a GPU",
    ("docs/development.md", "pip install"): INSTALLS,
    ("docs/development.md", "mkdocs"): SITE,
    ("docs/development.md", "python -m pytest tests/test_docs.py"): "runs this file",
    ("docs/new-architecture.md", "python docs/architectures.py --write"): (
        "runs every family; tests/test_readme.py runs it without --write"
    ),
}
"""Of a page, how lines of a shell block, or a whole Python block, start that do not run."""

SMALLER = {"max_new_tokens=32_768": "max_new_tokens=64", "HuggingFaceTB/SmolLM2-135M": "my-model"}
SMALLER['"examples/custom_generate"'] = repr(str(ROOT / "examples" / "custom_generate"))
"""What is put for what is too large, or not on this machine."""

SHORTER = {
    "kvpage calibrate": "--device cpu --max-tokens 400",
    "kvpage eval tasks": "--device cpu --max-new-tokens 4 --interval 32 --recent 16",
    "kvpage eval fidelity": "--device cpu --interval 32 --recent 16 --tokens 240 --prompt 32 "
    "--budgets 64",
    "kvpage eval memory": "--device cpu --interval 32 --recent 16 --lengths 100 --limit 1",
    "kvpage generate": "--max-new-tokens 4 --device cpu",
    "kvpage bench": "--points 40 --steps 2 --device cpu",
    "kvpage info": "--device cpu",
    "python examples/chat.py": "--model my-model --max-new-tokens 8",
    "python examples/evaluate_finetuned.py": "--device cpu --max-new-tokens 4 --interval 32 "
    "--recent 16",
}
"""Options added to shell commands, by how they start."""

TEMPLATE = (
    "{% for message in messages %}{{ message.role }} : {{ message.content }} {{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}Answer:{% endif %}"
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, its text, and the line it starts at."""

    page: str
    language: str
    text: str
    line: int

    def reason(self, start: str) -> tuple[str, str] | None:
        """The entry of `NOT_RUN` for what starts so."""
        entries = (entry for entry in NOT_RUN if entry[0] == self.page)
        return next((entry for entry in entries if start.startswith(entry[1])), None)


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(
            str(page.relative_to(ROOT)),
            found[1],
            found[2],
            text[: found.start(2)].count("\n") + 1,
        )
        for found in FENCE.finditer(text)
    ]


def commands_of(block: Block) -> list[str]:
    """The commands of a shell block, comments and continued lines resolved."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip() and not line.startswith("#")]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A folder with what a reader is supposed to have."""
    folder = tmp_path_factory.mktemp("docs")
    save_checkpoint(folder / "my-model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "my-model")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "my-model")
    save_questions(folder / "questions.jsonl")
    lora = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    get_peft_model(load(folder), lora).save_pretrained(folder / "my-lora")
    text = " ".join([*FILLER, *FILLER[::-1], *FILLER[::2]] * 3)
    (folder / "text.txt").write_text(text)
    (folder / "traces.jsonl").write_text(json.dumps({"text": text}) + "\n")
    return folder


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "my-model", dtype=torch.float32).eval()


@pytest.fixture
def names(files, tmp_path, monkeypatch):
    """The namespace that a page starts with, in such a folder, with a hub and a table to spoil."""
    folder = shutil.copytree(files, tmp_path / "reader")
    hub = FakeHub(tmp_path)
    monkeypatch.setattr(calibration, "HfApi", lambda: hub)
    monkeypatch.setattr(calibration, "hf_hub_download", hub.download)
    monkeypatch.setattr(architectures, "ARCHITECTURES", dict(architectures.ARCHITECTURES))
    monkeypatch.chdir(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "my-model")
    inputs = tokenizer(
        "Which one is the red one ? The code of the river is 7 .", return_tensors="pt"
    )
    model = load(folder)
    model.generation_config.eos_token_id = None  # as long as asked for, so that budgets bind
    torch.manual_seed(0)
    return {
        "model": model,
        "tokenizer": tokenizer,
        "inputs": inputs,
        "torch": torch,
        "kvpage": kvpage,
    }


def smaller(text: str) -> str:
    for large, small in SMALLER.items():
        text = text.replace(large, small)
    return text


def run_command(command: str, monkeypatch) -> None:
    """Run a shell command in this process; `accelerate launch -m` with one process."""
    command = smaller(command.removeprefix("accelerate launch -m "))
    command = re.sub(r"^kvpage\.cli ", "kvpage ", command)
    shorter = next((more for start, more in SHORTER.items() if command.startswith(start)), "")
    program, *arguments = shlex.split(f"{command} {shorter}", comments=True)
    if program == "kvpage":
        done = CliRunner().invoke(application(), arguments)
        assert done.exit_code == 0, f"{command}\n{done.output}\n{done.exception!r}"
        return
    assert program == "python" and arguments[0].endswith(".py"), f"can't run {command!r}"
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(ROOT / arguments[0]), run_name="__main__")
        raise SystemExit(0)
    assert not stopped.value.code, command


PAGES_WITH_CODE = [page for page in PAGES if any(b.language not in SHOWN for b in blocks_of(page))]


@pytest.mark.parametrize("page", PAGES_WITH_CODE, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_a_page_runs(page, names, monkeypatch):
    for block in blocks_of(page):
        if block.language == "python":
            if block.reason(block.text) is None:
                code = "\n" * (block.line - 1) + smaller(block.text)
                exec(compile(code, str(page), "exec"), names)
        elif block.language == "bash":
            for command in commands_of(block):
                if block.reason(command) is None:
                    run_command(command, monkeypatch)
        elif block.language == "json":
            json.loads(block.text)
        else:
            assert block.language in SHOWN, f"{block.page}: a block of {block.language!r}"


def test_what_is_not_run_is_there():
    met = set()
    for block in (block for page in PAGES for block in blocks_of(page)):
        starts = commands_of(block) if block.language == "bash" else [block.text]
        met |= {block.reason(start) for start in starts}
    assert set(NOT_RUN) <= met
    text = "\n".join(page.read_text() for page in PAGES)
    assert [large for large in SMALLER if large not in text] == []


def test_links_lead_to_files():
    for page in PAGES:
        text = FENCE.sub("", page.read_text())
        for target in re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", text):
            link = "".join(target).partition("#")[0]
            if link and not link.startswith("http"):
                assert (page.parent / link).exists(), f"{page.relative_to(ROOT)}: {link}"
