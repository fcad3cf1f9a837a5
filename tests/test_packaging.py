"""One version in every file that states it, and no extra that another file contradicts."""

import re
from importlib.metadata import metadata, requires
from pathlib import Path

import yaml

import kvpage

ROOT = Path(__file__).resolve().parents[1]


def test_changes_and_citation_are_of_this_version():
    heading = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heading is not None and heading[1] == kvpage.__version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == kvpage.__version__
    assert citation["license"] == metadata("kvpage")["License-Expression"]


def test_the_library_pins_no_release_of_torch():
    assert [name for name in requires("kvpage") if re.match(r"torch\b", name)] == ["torch>=2.6"]


def test_every_extra_that_is_named_exists():
    extras = set(metadata("kvpage").get_all("Provides-Extra"))
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("kvpage/**/*.py")]
    for path in texts:
        for names in re.findall(r"(?:kvpage|'\.|\"\.|-e \.)\[([a-z,]+)\]", path.read_text()):
            assert set(names.split(",")) <= extras, f"{path.name}: [{names}]"
