"""`kvpage eval`: what a budget costs your model, on your data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kvpage.evaluation.contenders import Contender
    from kvpage.evaluation.evaluating import Study
    from kvpage.evaluation.runner import Subject

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""

evaluate = typer.Typer(
    no_args_is_help=True,
    help="What a budget costs a model: every model x budget x scorer in one table. Results are "
    "kept in --out as they come: the same command again goes on after a crash, and with more "
    "budgets adds to them. `accelerate launch -m kvpage.cli eval ...` splits the work.",
)

Models = Annotated[
    list[str], typer.Option("--model", help="Folder or hub id; repeat it to compare models.")
]
Adapter = Annotated[
    str | None, typer.Option(help="PEFT adapter (LoRA, ...) to put on every --model: folder or id.")
]
Tokenizer = Annotated[
    str | None, typer.Option(help="Folder or hub id.", show_default="the adapter's or the model's")
]
Budgets = Annotated[
    str, typer.Option(help="Live tokens to keep, with commas; `none` is the full cache.")
]
Scorers = Annotated[
    str,
    typer.Option(
        help="What ranks tokens, with commas: sampled, centroid, streaming, ...; `oracle`, which "
        "knows the attention to come, for fidelity."
    ),
]
Interval = Annotated[int, typer.Option(min=1, help="Tokens between two compactions.")]
Sinks = Annotated[int, typer.Option(min=0, help="First tokens that are never evicted.")]
Recent = Annotated[int, typer.Option(min=0, help="Latest tokens that are never evicted.")]
Out = Annotated[Path, typer.Option(help="Folder for results and tables (.md, .csv, .json).")]
Json = Annotated[bool, typer.Option("--json", help="Print the table as JSON, and nothing else.")]
Plot = Annotated[bool, typer.Option("--plot", help="Draw it, too, into --out (.svg and .png).")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, ...; auto: as the model was saved.")]
Device = Annotated[
    str | None,
    typer.Option(help="cpu, cuda, ...; auto: spread over all.", show_default="the accelerator"),
]


@evaluate.command()
def fidelity(
    model: Models,
    data: Annotated[str, typer.Option(help="Text: a file, or a .jsonl with a field `text`.")],
    tokens: Annotated[int, typer.Option(min=2, help="Length of a window of the text.")] = 4096,
    limit: Annotated[int, typer.Option(min=1, help="Windows at most.")] = 1,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the first forward.")] = 128,
    step: Annotated[int, typer.Option(min=1, help="Tokens of every other forward.")] = 16,
    adapter: Adapter = None,
    tokenizer: Tokenizer = None,
    budgets: Budgets = "256,512,1024",
    scorers: Scorers = "sampled",
    interval: Interval = 128,
    sinks: Sinks = 4,
    recent: Recent = 128,
    out: Out = Path("kvpage-eval"),
    json: Json = False,
    plot: Plot = False,
    dtype: Dtype = "auto",
    device: Device = None,
) -> None:
    """How far it writes from the full cache: KL, perplexity, attention kept.

    Long text goes through both caches token by token. Columns: KL(full || budget) of the next
    token in nats with a 95 % interval, change in perplexity, how often both find the same token
    likeliest, relative error of the attention outputs, share of the later attention that goes to
    what was kept, and that over an oracle's who sees the attention to come.
    """
    from kvpage.evaluation.texts import FidelityStudy

    with _errors():
        study = FidelityStudy(data, tokens, limit, prompt, step)
        subjects = _subjects(model, adapter, tokenizer, dtype, device)
        options = {"interval": interval, "sinks": sinks, "recent": recent}
        _run(study, subjects, _contenders(budgets, scorers, options), out, json, plot)


@evaluate.command()
def memory(
    model: Models,
    tasks: Annotated[
        str, typer.Option(help="With commas: recall, passkey, copying, state.")
    ] = "recall,passkey,copying,state",
    lengths: Annotated[str, typer.Option(help="Tokens of text, with commas.")] = "512,1024",
    limit: Annotated[int, typer.Option(min=1, help="Texts per task and length.")] = 10,
    full_at_least: Annotated[
        float, typer.Option(min=0, max=1, help="Leave out where the full cache scores less.")
    ] = 0.7,
    step: Annotated[int, typer.Option(min=1, help="Tokens of a forward.")] = 16,
    adapter: Adapter = None,
    tokenizer: Tokenizer = None,
    budgets: Budgets = "256,512",
    scorers: Scorers = "sampled",
    interval: Interval = 128,
    sinks: Sinks = 4,
    recent: Recent = 128,
    out: Out = Path("kvpage-eval"),
    json: Json = False,
    plot: Plot = False,
    dtype: Dtype = "auto",
    device: Device = None,
) -> None:
    """Does it remember what was evicted: recall, pass key, copying, state.

    Texts made up on the spot that ask at their end for what came long before: the code of a name,
    a pass key in filler, a list to be copied, the stack of a depth-first search. Only lengths at
    which the full cache succeeds are reported.
    """
    from kvpage.evaluation.memory import TASKS, MemoryStudy

    with _errors():
        names = tasks.split(",")
        if unknown := [name for name in names if name not in TASKS]:
            raise ValueError(f"--tasks: some of {', '.join(TASKS)} expected, got {unknown[0]!r}")
        sizes = [_integer("--lengths", size) for size in lengths.split(",")]
        study = MemoryStudy(names, sizes, limit, step, full_at_least)
        subjects = _subjects(model, adapter, tokenizer, dtype, device)
        options = {"interval": interval, "sinks": sinks, "recent": recent}
        _run(study, subjects, _contenders(budgets, scorers, options), out, json, plot)


@evaluate.command()
def tasks(
    model: Models,
    data: Annotated[
        str,
        typer.Option(
            help="Questions and answers: a .jsonl with the fields `question` (or `problem`) and "
            "`answer`, or a data set on the hub, `openai/gsm8k:main`."
        ),
    ],
    split: Annotated[str, typer.Option(help="Of a data set on the hub.")] = "test",
    limit: Annotated[int | None, typer.Option(min=1, help="Questions at most.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 512,
    batch_size: Annotated[int, typer.Option(min=1, help="Questions at once.")] = 8,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Nucleus to sample from.")] = 1.0,
    seeds: Annotated[str, typer.Option(help="With commas; an answer is sampled for each.")] = "0",
    pass_at: Annotated[str, typer.Option(help="k of pass@k, with commas, up to the seeds.")] = "1",
    template: Annotated[
        str | None,
        typer.Option(
            help="What to ask, with {question} in it.",
            show_default="reasoning and \\boxed{} for chat models, else 'Question: ... Answer:'",
        ),
    ] = None,
    adapter: Adapter = None,
    tokenizer: Tokenizer = None,
    budgets: Budgets = "none,512,1024",
    scorers: Scorers = "sampled",
    interval: Interval = 128,
    sinks: Sinks = 4,
    recent: Recent = 128,
    out: Out = Path("kvpage-eval"),
    json: Json = False,
    plot: Plot = False,
    dtype: Dtype = "auto",
    device: Device = None,
) -> None:
    """Does it still answer: GSM8K, MATH-500, AIME, or a .jsonl of yours.

    Accuracy with a 95 % interval, beside the tokens an answer took: under a small budget models
    tend to think longer. Mathematics is compared by math-verify, words letter by letter.
    """
    from kvpage.evaluation.tasks import TaskStudy, load_problems

    with _errors():
        study = TaskStudy(
            Path(data).stem,
            load_problems(data, split, limit),
            max_new_tokens,
            batch_size,
            [_integer("--seeds", seed) for seed in seeds.split(",")],
            temperature,
            top_p,
            template,
            [_integer("--pass-at", k) for k in pass_at.split(",")],
        )
        subjects = _subjects(model, adapter, tokenizer, dtype, device)
        options = {"interval": interval, "sinks": sinks, "recent": recent}
        _run(study, subjects, _contenders(budgets, scorers, options), out, json, plot)


class _errors:
    """Turns what a user got wrong into one line and exit code 2, Ctrl-C into a word and 130."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, ImportError):
            hint = f"{error}: pip install 'kvpage[eval]'"
            raise SystemExit(_say(hint, 2)) from error
        if isinstance(error, ValueError | OSError):
            raise SystemExit(_say(f"{error}", 2)) from error
        if isinstance(error, KeyboardInterrupt):
            word = "interrupted; what was done is kept: the same command goes on from here"
            raise SystemExit(_say(word, INTERRUPTED)) from None


def _say(text: str, code: int) -> int:
    typer.echo(f"kvpage eval: {text}", err=True)
    return code


def _integer(option: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{option}: integers with commas expected, got {text!r}") from None


def _contenders(budgets: str, scorers: str, options: dict[str, Any]) -> list[Contender]:
    from kvpage.evaluation.contenders import Contender

    full = ("none", "full")
    texts = [text.strip().lower() for text in budgets.split(",")]
    numbers = [None if text in full else _integer("--budgets", text) for text in texts]
    return Contender.grid(numbers, scorers.split(","), **options)


def _subjects(
    models: Sequence[str],
    adapter: str | None,
    tokenizer: str | None,
    dtype: str,
    device: str | None,
) -> list[Subject]:
    from kvpage.evaluation.runner import Subject

    return [Subject(model, adapter, tokenizer, dtype, device) for model in models]


def _run(
    study: Study,
    subjects: Sequence[Subject],
    contenders: Sequence[Contender],
    out: Path,
    json: bool,
    plot: bool,
) -> None:
    import json as encoder

    from rich.console import Console
    from transformers.utils import logging

    from kvpage.evaluation.evaluating import evaluate

    logging.disable_progress_bar()
    found = evaluate(study, subjects, contenders, out, plot=plot)
    if not found.is_main:
        return
    if json:
        typer.echo(encoder.dumps({"rows": found.rows, "notes": found.notes}))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    console.print(found)
    console.print(f"tables in {out}/{study.kind}.md, .csv, .json")
