"""Run notebooks from top to bottom and keep their outputs, small and the same shape every time.

python notebooks/execute.py                           # all of them
python notebooks/execute.py notebooks/01_quickstart.ipynb
"""

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).parent
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
KINDS = ("image/svg+xml", "image/png", "text/html", "text/markdown", "text/plain")
"""From the richest: each output keeps the first it has, and its plain text."""


def execute(path: Path, seconds: int = 600, **environment: str) -> NotebookNode:
    """The notebook at `path`, run in its folder by the kernel of this interpreter.

    seconds: limit of a cell. Raises nbclient's `CellExecutionError` where a cell raises.
    """
    notebook = nbformat.read(path, as_version=4)
    manager = AsyncKernelManager(  # with no folder to look into, the native kernel is all there is
        kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[])
    )
    client = NotebookClient(
        notebook,
        km=manager,
        timeout=seconds,
        resources={"metadata": {"path": str(path.parent)}},
        record_timing=False,
        coalesce_streams=True,
    )
    asyncio.run(client.async_execute(cleanup_kc=True, env=os.environ | environment))
    return notebook


def tidy(notebook: NotebookNode) -> None:
    """Leave out what differs from run to run and says nothing: logs, times, widgets' states."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", nbformat.from_dict({})
        if cell.cell_type == "code":
            cell.outputs = [tidied(output) for output in cell.outputs if not is_log(output)]


def is_log(output: NotebookNode) -> bool:
    """Whether it is what libraries write beside the output: progress bars, complaints about the
    machine."""
    return output.output_type == "stream" and output.name == "stderr"


def tidied(output: NotebookNode) -> NotebookNode:
    """The output with one rich kind of data, and its plain text."""
    if "data" in output:
        kept = next((kind for kind in KINDS if kind in output.data), "text/plain")
        names = [name for name in (kept, "text/plain") if name in output.data]
        output.data = nbformat.from_dict({name: output.data[name] for name in names})
        output.metadata = nbformat.from_dict({})
    output.pop("transient", None)
    return output


def main(names: list[str]) -> int:
    paths: Any = [Path(name) for name in names] or sorted(FOLDER.glob("*.ipynb"))
    for path in paths:
        start = time.perf_counter()
        notebook = execute(path)
        tidy(notebook)
        nbformat.write(notebook, path)
        seconds, size = time.perf_counter() - start, path.stat().st_size / 1000
        print(f"{path.name}: {seconds:.0f} s, {size:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
