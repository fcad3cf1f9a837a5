"""What mkdocs does beside its plugins: formulas as MathML, the notebooks and the log as pages.

Formulas are written as `$...$` and `$$...$$`, which GitHub renders too; browsers show MathML by
themselves, so a page fetches no script.
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = "<!-- notebooks -->"
LOG = "benchmarks/LOG.md"
WIDE = ("results.md", "comparison.md", "architectures.md")
"""Pages of wide tables, which have no list of contents beside them."""

BAR = '<mo stretchy="false">&#x0007C;</mo>'
"""Of an absolute value: browsers set it as an operator, with space around."""

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)

IN_NOTEBOOK = re.compile(
    r"(?P<code><(pre|code|script|style)\b.*?</\2>)|\$\$(?P<block>.+?)\$\$|\$(?P<inline>[^$\n<]+)\$",
    re.DOTALL,
)
"""Formulas of a notebook, which come as they were written, and where none can be."""


def notebooks() -> list[Path]:
    """Those there are, in order."""
    return sorted((ROOT / "notebooks").glob("*.ipynb"))


def title_of(notebook: Path) -> str:
    """The first heading of a notebook, or its name."""
    for cell in json.loads(notebook.read_text())["cells"]:
        heading = re.search(r"^#\s+(.+)$", "".join(cell["source"]), re.MULTILINE)
        if cell["cell_type"] == "markdown" and heading is not None:
            return heading[1].strip()
    return notebook.stem


@event_priority(100)  # ahead of mkdocs-jupyter, which turns the notebooks into pages
def on_files(files: Files, config: MkDocsConfig) -> Files:
    outside = [path.relative_to(ROOT) for path in notebooks()] + [Path(LOG)]
    for path in outside:
        files.append(File(str(path), str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(text: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri in WIDE:
        page.meta["hide"] = ["toc"]
    lines = [f"- [{title_of(path)}](notebooks/{path.name})" for path in notebooks()]
    text = text.replace(NOTEBOOKS, "\n".join(lines))
    return text.replace(f"](../{LOG}", f"]({LOG}")


def on_page_content(text: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri.endswith(".ipynb"):
        return IN_NOTEBOOK.sub(_mathml_in_notebook, text)
    return FORMULA.sub(lambda found: _mathml(found[2], found[1] == "div"), text)


def _mathml_in_notebook(found: re.Match[str]) -> str:
    if found["code"] is not None:
        return found["code"]
    return _mathml(found["block"] or found["inline"], found["block"] is not None)


def _mathml(latex: str, block: bool) -> str:
    formula = convert(html.unescape(latex).strip(), display="block" if block else "inline")
    return formula.replace(BAR, BAR.replace("<mo", '<mo lspace="0" rspace="0"'))
