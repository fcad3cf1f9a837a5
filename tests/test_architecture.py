"""Imports run one way, and only the modules named here know transformers or Triton."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import kvpage

PACKAGE = Path(kvpage.__file__).parent
ORDER = [  # a module imports only from lines above its own
    {"blocks", "compat", "device", "rope", "settings", "positions", "kernels.moments"}
    | {"html", "transcript"}
    | {"kernels.triton_move_slots", "kernels.triton_paged_attention", "kernels.triton_write_kv"},
    {"kernels.reference", "kernels.triton_attention_mass", "kernels.triton_score_tokens"},
    {"summaries"},
    {"kernels", "ledger", "architectures", "centroids"},
    {"contract", "storage", "scoring", "places", "layer_calibration"},
    {"attention", "compaction", "calibration", "peers"},
    {"scorers"},
    {"hooks", "layer", "pins", "triattention"},
    {"attachments", "stack", "selection"},
    {"meeting", "recording", "priors"},
    {"calibrating"},
    {"forwards", "report"},
    {"decoding", "usage"},
    {"core"},
    {"cache", "footprint"},
    {"block_map", "displays", "survivors"},
    {"watch"},
    {"plot.style"},
    {"plot.budgets", "plot.distances", "plot.geometry", "plot.histories"}
    | {"plot.maps", "plot.survival"},
    {"plot"},
    {"kvpage"},
    {"evaluation.contenders", "evaluation.intervals", "evaluation.attention_mass"}
    | {"evaluation.runner", "evaluation.answers"},
    {"evaluation.fidelity", "evaluation.memory", "evaluation.tasks", "evaluation.lm_eval"}
    | {"evaluation.tables"},
    {"evaluation.texts", "evaluation.evaluating", "evaluation.speed"},
    {"evaluation"},
    {"cli.options", "cli.machine", "cli.conversation", "cli.streams"},
    {"cli.evaluate", "cli.calibrate", "cli.info", "cli.bench", "cli.generate"},
    {"cli"},
    {"cli.__main__"},
]
KNOW_TRANSFORMERS = {"architectures", "attachments", "attention", "cache", "compat", "layer"}
KNOW_TRANSFORMERS |= {"meeting", "recording", "cli.evaluate"}
KNOW_TRANSFORMERS |= {"evaluation.fidelity", "evaluation.runner", "footprint", "watch"}
KNOW_TRANSFORMERS |= {"cli.machine", "cli.options", "cli.streams", "cli.generate"}
KNOW_TRANSFORMERS |= {"evaluation.speed"}
KNOW_TRITON = {
    "kernels.triton_attention_mass",
    "kernels.triton_move_slots",
    "kernels.triton_paged_attention",
    "kernels.triton_score_tokens",
    "kernels.triton_write_kv",
}
SHARE_STATISTICS = {"calibrating", "calibration", "layer_calibration", "priors", "recording"}
SHARE_STATISTICS |= {"triattention"}
VIEWS = {
    "block_map",
    "displays",
    "footprint",
    "html",
    "survivors",
    "transcript",
    "usage",
    "watch",
}
TENSOR_FREE = {"blocks", "ledger", "settings"}


def imports(path: Path, on_import: bool = False) -> set[str]:
    """All modules that a file imports, or those it imports as it is imported itself."""
    found, tree = set(), ast.parse(path.read_text())
    for node in tree.body if on_import else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: absolute imports only"
            if node.module == "kvpage":
                found |= {f"kvpage.{alias.name}" for alias in node.names}
            else:
                found.add(node.module)
    return found


def modules() -> dict[str, set[str]]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        name = "kvpage" if name == "__init__" else name.removesuffix(".__init__")
        found[name] = imports(path)
    return found


def test_imports_run_one_way():
    rank = {name: i for i, names in enumerate(ORDER) for name in names}
    assert set(modules()) == set(rank)
    for name, imported in modules().items():
        for target in imported:
            if target.startswith("kvpage."):
                target = target.removeprefix("kvpage.")
                assert rank[target] < rank[name], f"{name} imports {target}"


def test_only_the_modules_named_know_transformers_and_triton():
    for name, imported in modules().items():
        roots = {target.split(".")[0] for target in imported}
        assert ("transformers" in roots) <= (name in KNOW_TRANSFORMERS), name
        assert ("triton" in roots) <= (name in KNOW_TRITON), name
        assert not (name in TENSOR_FREE and "torch" in roots), name


def test_importing_kvpage_does_not_import_triton():
    for path in PACKAGE.rglob("*.py"):
        if not path.name.startswith("triton_"):
            targets = imports(path, on_import=True)
            assert not targets & {"triton", *(f"kvpage.{name}" for name in KNOW_TRITON)}, path


def test_a_public_name_is_imported_by_its_first_use_and_no_sooner():
    code = "import kvpage, sys; assert 'torch' not in sys.modules; from kvpage import *"
    subprocess.run([sys.executable, "-c", code], check=True)
    homes = [name for names in kvpage._HOMES.values() for name in names]
    assert sorted(homes) == sorted(kvpage.__all__)
    for name in kvpage.__all__:
        assert getattr(kvpage, name).__name__ == name
    assert kvpage.plot.block_map and kvpage.evaluation.evaluate
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kvpage.nothing


def code_lines(path: Path) -> int:
    """Lines that are neither blank nor part of a docstring."""
    lines, documentation = path.read_text().splitlines(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            documentation |= set(range(node.lineno, node.end_lineno + 1))
    return sum(bool(line) and i not in documentation for i, line in enumerate(lines, 1))


def test_files_and_the_library_stay_small():
    paths = list(PACKAGE.rglob("*.py"))
    assert max(len(path.read_text().splitlines()) for path in paths) <= 360
    limits = {"kvpage": 4250, "statistics": 870, "kernels": 960, "evaluation": 1490, "cli": 1220}
    limits |= {"views": 850, "plot": 890}
    apart = dict.fromkeys(SHARE_STATISTICS, "statistics") | dict.fromkeys(VIEWS, "views")
    counts = dict.fromkeys(limits, 0)
    for path in paths:
        counts[apart.get(path.stem, path.parent.name)] += code_lines(path)
    assert {name: count for name, count in counts.items() if count > limits[name]} == {}


def test_the_tree_names_every_module():
    page = PACKAGE.parent / "docs" / "development.md"
    tree = page.read_text().split("## The tree")[1].split("## Tests")[0]
    for path in PACKAGE.glob("*.py"):
        assert path.name == "__init__.py" or f"  {path.name} " in tree, path.name
    for path in PACKAGE.glob("*/__init__.py"):
        assert f"  {path.parent.name}/ " in tree, path.parent.name
