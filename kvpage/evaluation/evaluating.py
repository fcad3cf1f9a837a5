"""One call for a whole evaluation: run a study, resumed and split, and keep its table and plot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, Protocol

from tqdm import tqdm

from kvpage.evaluation.contenders import Contender
from kvpage.evaluation.runner import Processes, Record, Row, Subject, Work, run
from kvpage.evaluation.tables import markdown, save, terminal


class Study(Protocol):
    """What is measured: `TaskStudy`, `FidelityStudy`, `MemoryStudy`, or one of your own."""

    kind: ClassVar[str]
    """What it measures, in a word: the name of its files."""

    def works(self, subject: Subject, contenders: Sequence[Contender]) -> Iterable[Work]:
        """All there is to measure of one model."""

    def rows(self, records: Sequence[Record]) -> tuple[list[Row], list[str]]:
        """The table, one row per model and contender, and notes to stand below it."""


@dataclass(frozen=True)
class Evaluation:
    """What was found: rows of a table, notes below it, and the files that have them."""

    rows: list[Row]
    notes: list[str]
    files: list[Path]
    """The table as .md, .csv and .json, then the plots; written by the first process."""
    is_main: bool
    """Whether this process wrote them: the one that should print."""

    def __str__(self) -> str:
        return "\n\n".join([markdown(self.rows)] * bool(self.rows) + self.notes)

    _repr_markdown_ = __str__

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        return Group(*[terminal(self.rows)] * bool(self.rows), *map(Text, self.notes))


def evaluate(
    study: Study,
    subjects: Subject | Sequence[Subject],
    contenders: Sequence[Contender],
    out: str | PathLike[str] = "kvpage-eval",
    *,
    plot: bool = True,
    progress: bool = True,
) -> Evaluation:
    """Measure every contender on every subject, and write the table of it to the folder `out`.

    Results are kept there as they come: the same call again goes on where it was interrupted, and
    with more contenders measures only these. Under `accelerate launch` the processes share the
    work, and each returns all of it.

    subjects: one model or several, loaded one after the other; contenders: see `Contender.grid`;
    plot: draw it too, against budget and against bytes (needs matplotlib); progress: show a bar.
    Raises `ValueError` for a contender that no cache can be made of, before any model is loaded,
    and what the study raises for its data.
    """
    for contender in contenders:
        contender.check(oracle=study.kind == "fidelity")
    if plot:
        from kvpage.plot import budget_curves  # not there: say so before the work
    processes, folder, records = Processes(), Path(out), []
    for subject in [subjects] if isinstance(subjects, Subject) else subjects:
        works = list(study.works(subject, contenders))
        shown = progress and processes.rank == 0
        with tqdm(desc=Path(subject.path).name, disable=not shown, unit="step") as bar:

            def advance(done: int, total: int, bar: Any = bar) -> None:
                bar.total = total
                bar.update(done - bar.n)

            records += run(works, folder, advance)
        subject.release()
    rows, notes = study.rows(records)
    unbound = {row["budget"] for row in rows if not row["compactions"]} - {None}
    if unbound:
        budgets = ", ".join(map(str, sorted(unbound)))
        notes.append(f"where compactions are 0, nothing was evicted (budgets {budgets})")
    files = [folder / f"{study.kind}.{ending}" for ending in ("md", "csv", "json")]
    names = [f"{study.kind}-{x}.{e}" for x in ("budget", "kv_bytes") for e in ("svg", "png")]
    plots = [folder / name for name in names] if plot and rows else []
    if processes.rank == 0:
        save(rows, notes, folder, study.kind)
        for path in plots:
            against = path.stem.rpartition("-")[2]
            budget_curves(rows, against).savefig(path, dpi=200)
    return Evaluation(rows, notes, files + plots, processes.rank == 0)
