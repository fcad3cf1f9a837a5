"""Every notebook runs from top to bottom, and what is committed of it is small and clean."""

import re
import shutil
from pathlib import Path

import nbformat
import pytest
from execute import execute

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
BYTES = 250_000
SECONDS = 300
PLACES = re.compile(r"/(root|home|tmp|work|Users|usr|opt|var)/|[A-Z]:\\\\")
"""Beginnings of paths that only one machine has."""
NOISE = re.compile(r"Warning|/s\]|Failed to load")

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def test_there_are_notebooks():
    assert NOTEBOOKS


@each_notebook
def test_it_runs_from_top_to_bottom(path, tmp_path):
    """In a copy of its folder and of the examples, by this interpreter, on one thread."""
    for folder in (FOLDER, ROOT / "examples"):
        results = shutil.ignore_patterns("kvpage-eval")  # or there is nothing left to measure
        shutil.copytree(folder, tmp_path / folder.name, ignore=results)
    copy = tmp_path / FOLDER.name / path.name
    wipe(copy)
    threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    outputs = outputs_of(execute(copy, SECONDS, **threads))
    assert outputs
    assert [output for output in outputs if output.output_type == "error"] == []
    assert [text for text in map(text_of, outputs) if "Warning" in text] == []


@each_notebook
def test_it_is_committed_as_execute_py_leaves_it(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.metadata.kernelspec.name == "python3"
    assert all(cell.metadata == {} for cell in notebook.cells)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert [output for output in outputs_of(notebook) if output.output_type == "error"] == []


@each_notebook
def test_cells_that_show_something_have_their_output(path):
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code" and shows(cell.source):
            assert cell.outputs, cell.source


@each_notebook
def test_what_is_committed_is_small_and_of_no_machine(path):
    assert path.stat().st_size < BYTES
    for output in outputs_of(nbformat.read(path, as_version=4)):
        assert not PLACES.search(text_of(output)), text_of(output)
        assert not NOISE.search(text_of(output)), text_of(output)


def wipe(path):
    """Outputs and counts out, so that what is there afterwards was made by the run."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    nbformat.write(notebook, path)


def outputs_of(notebook):
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def text_of(output):
    """Everything in it that is text, images left out."""
    if output.output_type == "stream":
        return output.text
    data = output.get("data", {})
    return "\n".join(str(value) for name, value in data.items() if not name.startswith("image/"))


def shows(source):
    """Whether a cell prints, or ends in an expression that stands alone."""
    last = source.rstrip().splitlines()[-1]
    alone = re.match(r"[\w.]+(\(.*\))?$", last) and not last.startswith(("assert", "import"))
    return "print(" in source or bool(alone)
