"""What the README's scripts write is there, and of architectures what its script prints."""

import subprocess
import sys
from pathlib import Path

import torch
from families import family
from test_calibration import FakeHub
from tiny import NEEDS_5_24

import kvpage
from kvpage import calibration
from kvpage.scorers import SCORERS

ROOT = Path(__file__).resolve().parents[1]


@NEEDS_5_24
def test_the_table_of_architectures_is_what_its_script_prints():
    command = [sys.executable, str(ROOT / "docs" / "architectures.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.strip() in (ROOT / "README.md").read_text()


def test_the_results_are_where_the_benchmark_rewrites_them():
    text = (ROOT / "README.md").read_text()
    _, marked = text.split("<!-- decode:begin -->")
    block, _ = marked.split("<!-- decode:end -->")
    header, *rows = [line for line in block.splitlines() if "|" in line][:4]
    for column in ("seen", "`DynamicCache`", "`budget=None`", "`budget=1024`", "MiB"):
        assert column in header
    assert len(rows) == 3
    assert {row.count("|") for row in rows} == {header.count("|")}


def test_the_section_on_statistics_runs_as_it_stands(tmp_path, monkeypatch):
    """But for the hub, which is a folder here."""
    section = (ROOT / "README.md").read_text().split("### Statistics to share")[1]
    code = section.split("```python\n")[1].split("```")[0]
    hub = FakeHub(tmp_path)
    monkeypatch.setattr(calibration, "HfApi", lambda: hub)
    monkeypatch.setattr(calibration, "hf_hub_download", hub.download)
    monkeypatch.chdir(tmp_path)

    def tokenizer(text):
        return {"input_ids": [ord(letter) % 90 for letter in text]}

    names = {"kvpage": kvpage, "model": family("llama"), "tokenizer": tokenizer}
    exec(code, names)
    made = kvpage.CalibratedStatistics.load("statistics.safetensors", names["model"])
    assert made.tokens == sum(map(len, names["data"])) == 43
    assert torch.equal(made.layers[0].query_total, names["statistics"].layers[0].query_total)


def test_the_scorer_of_ones_own_runs_as_it_stands():
    section = (ROOT / "README.md").read_text().split("### Which tokens stay")[1]
    code = section.split("```python\n")[1].split("```")[0]
    names = {"kvpage": kvpage, "torch": torch, "model": family("llama")}
    exec(code, names | {"PagedCompactCache": kvpage.PagedCompactCache})


def test_the_readme_names_every_scorer():
    section = (ROOT / "README.md").read_text().split("### Which tokens stay")[1].split("###")[0]
    assert all(f'`"{name}"`' in section for name in SCORERS)
