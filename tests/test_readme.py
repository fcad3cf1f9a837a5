"""What the README's scripts write is there, and of architectures what its script prints."""

import subprocess
import sys
from pathlib import Path

from tiny import NEEDS_5_24

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
