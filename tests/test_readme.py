"""What scripts write into the pages is there, tables agree, and every public name is documented."""

import subprocess
import sys
from pathlib import Path

import pytest
from tiny import NEEDS_5_24

from kvpage.scorers import SCORERS

ROOT = Path(__file__).resolve().parents[1]
README, DOCS = ROOT / "README.md", ROOT / "docs"


@NEEDS_5_24
def test_the_table_of_architectures_is_what_its_script_prints():
    command = [sys.executable, str(DOCS / "architectures.py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.strip() in (DOCS / "architectures.md").read_text()


def tables_of(text):
    """The tables of a page: rows of cells by the names of the columns."""
    lines, found = text.splitlines(), []
    for i, line in enumerate(lines):
        if line.startswith("| ---"):
            names = cells(lines[i - 1])
            rows = []
            for row in lines[i + 1 :]:
                if not row.startswith("|"):
                    break
                rows.append(dict(zip(names, cells(row), strict=True)))
            found.append(rows)
    return found


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def block():
    """What the benchmark rewrites."""
    _, marked = (DOCS / "results.md").read_text().split("<!-- decode:begin -->")
    return marked.split("<!-- decode:end -->")[0]


def test_the_results_are_where_the_benchmark_rewrites_them():
    times, peaks = tables_of(block())
    assert {"seen", "`DynamicCache`", "`budget=None`", "`budget=1024`"} <= set(times[0])
    assert len(times) > 3 and {"seen", "weights only"} <= set(peaks[0])


def test_the_readmes_results_are_those_of_the_page_of_results():
    measured = {
        row["seen"]: row for row in tables_of(block())[0] if row["dtype, batch"] == "float32, 1"
    }
    costs = {
        row[""]: row
        for rows in tables_of((DOCS / "results.md").read_text())
        for row in rows
        if "" in row
    }
    section = README.read_text().split("## Results")[1].split("\n## ")[0]
    times, some_costs = tables_of(section)
    assert len(times) == 3 and len(some_costs) == 4
    for row in times:
        assert row.items() <= measured[row["seen"]].items()
    for row in some_costs:
        assert row == costs[row[""]]


@pytest.mark.parametrize("name", SCORERS)
def test_every_scorer_is_in_the_table_of_scorers(name):
    section = (DOCS / "budget.md").read_text().split("## Which tokens stay")[1].split("\n## ")[0]
    assert f'| `"{name}"` |' in section
