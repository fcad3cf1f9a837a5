"""`kvpage eval`: what a budget costs your model, on your data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpage.cli.options import (
    Adapter,
    Device,
    Dtype,
    Interval,
    Json,
    Recent,
    Sinks,
    Tokenizer,
    budget_of,
    bundled,
    errors,
    integers,
    naming,
    subject_of,
)

if TYPE_CHECKING:
    from kvpage.evaluation.contenders import Contender
    from kvpage.evaluation.evaluating import Study
    from kvpage.evaluation.runner import Subject

evaluate = typer.Typer(
    no_args_is_help=True,
    help="What a budget costs a model: every model x budget x scorer in one table. Results are "
    "kept in --out as they come: the same command again goes on after a crash or Ctrl-C, and with "
    "other budgets measures only what is new. The table is of this command's budgets: to see all "
    "together, name all. `accelerate launch -m kvpage.cli eval ...` splits the work.\n\n"
    "Exit codes: 0 done, 1 out of memory, 2 bad input, 130 interrupted.",
)

INTERRUPTED = "interrupted; what was done is kept: the same command goes on from here"


@dataclass(frozen=True)
class Options:
    """What all of them take."""

    model: Annotated[list[str], typer.Option(help="Folder or hub id; repeat it to compare models.")]
    adapter: Adapter = None
    tokenizer: Tokenizer = None
    budgets: Annotated[
        str, typer.Option(help="Live tokens to keep, with commas; `none` is the full cache.")
    ] = "none,512,1024"
    scorers: Annotated[
        str,
        typer.Option(
            help="What ranks tokens, with commas: sampled, centroid, streaming, ...; `oracle`, "
            "which knows the attention to come, for fidelity."
        ),
    ] = "sampled"
    interval: Interval = 128
    sinks: Sinks = 4
    recent: Recent = 128
    out: Annotated[Path, typer.Option(help="Folder for results and tables (.md, .csv, .json).")] = (
        Path("kvpage-eval")
    )
    json: Json = False
    plot: Annotated[
        bool, typer.Option("--plot", help="Draw it, too, into --out (.svg and .png).")
    ] = False
    dtype: Dtype = "auto"
    device: Device = None

    def subjects(self) -> list[Subject]:
        """The models, once it is clear that all can be had."""
        return [
            subject_of(model, self.adapter, self.tokenizer, self.dtype, self.device)
            for model in self.model
        ]

    def contenders(self) -> list[Contender]:
        """The full cache once, and every scorer at every budget."""
        from kvpage.evaluation.contenders import Contender

        budgets = [budget_of(text, "--budgets") for text in self.budgets.split(",")]
        options: dict[str, Any] = {"interval": self.interval}
        options |= {"sinks": self.sinks, "recent": self.recent}
        return Contender.grid(budgets, self.scorers.split(","), **options)


@evaluate.command()
@bundled(Options, budgets="256,512,1024")
def fidelity(
    options: Options,
    data: Annotated[str, typer.Option(help="Text: a file, or a .jsonl with a field `text`.")],
    tokens: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Length of a window of the text.",
            show_default="4096, or all of a shorter text",
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Windows at most.")] = 1,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the first forward.")] = 128,
    step: Annotated[int, typer.Option(min=1, help="Tokens of every other forward.")] = 16,
) -> None:
    """How far it writes from the full cache: KL, perplexity, attention kept.

    Long text goes through both caches token by token. Columns: KL(full || budget) of the next
    token in nats with a 95 % interval, perplexity of the full cache and the change in it, how often
    both find the same token likeliest, relative error of the attention outputs, share of the later
    attention that goes to what was kept, and that over an oracle's who sees the attention to come.

    \b
    Example:
      kvpage eval fidelity --model my-model --data text.txt --scorers sampled,streaming --plot
    """
    with errors("eval", INTERRUPTED):
        from kvpage.evaluation.texts import FidelityStudy

        study = FidelityStudy(data, tokens, limit, prompt, step)
        with naming("--data", data):
            study.text  # noqa: B018, reads it
        contenders = options.contenders()
        _run(study, options.subjects(), contenders, options)


@evaluate.command()
@bundled(Options, budgets="256,512")
def memory(
    options: Options,
    tasks: Annotated[
        str, typer.Option(help="With commas: recall, passkey, copying, state.")
    ] = "recall,passkey,copying,state",
    lengths: Annotated[str, typer.Option(help="Tokens of text, with commas.")] = "512,1024",
    limit: Annotated[int, typer.Option(min=1, help="Texts per task and length.")] = 10,
    full_at_least: Annotated[
        float, typer.Option(min=0, max=1, help="Leave out where the full cache scores less.")
    ] = 0.7,
    step: Annotated[int, typer.Option(min=1, help="Tokens of a forward.")] = 16,
) -> None:
    """Does it remember what was evicted: recall, pass key, copying, state.

    Texts made up on the spot that ask at their end for what came long before: the code of a name,
    a pass key in filler, a list to be copied, the stack of a depth-first search. Only lengths at
    which the full cache succeeds are reported.

    \b
    Example:
      kvpage eval memory --model my-model --budgets 256,512 --lengths 1024,2048
    """
    with errors("eval", INTERRUPTED):
        from kvpage.evaluation.memory import TASKS, MemoryStudy

        names = tasks.split(",")
        if unknown := [name for name in names if name not in TASKS]:
            raise ValueError(f"--tasks: some of {', '.join(TASKS)} expected, got {unknown[0]!r}")
        study = MemoryStudy(names, integers("--lengths", lengths), limit, step, full_at_least)
        contenders = options.contenders()
        _run(study, options.subjects(), contenders, options)


@evaluate.command()
@bundled(Options)
def tasks(
    options: Options,
    data: Annotated[
        str,
        typer.Option(
            help="Questions and answers: a .jsonl with the fields `question` (or `problem`, "
            "`prompt`) and `answer` (or `expected_answer`, `solution`), or a data set on the hub, "
            "`openai/gsm8k:main`."
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
            show_default="{question} as it is, of a data set on the hub with a request to reason "
            "and to use \\boxed{}; without a chat template 'Question: ... Answer:'",
        ),
    ] = None,
) -> None:
    """Does it still answer: GSM8K, MATH-500, AIME, or a .jsonl of yours.

    Accuracy with a 95 % interval, beside the tokens an answer took: under a small budget models
    tend to think longer. Mathematics is compared by math-verify, words letter by letter.

    \b
    Example:
      kvpage eval tasks --model my-model --adapter my-lora --data questions.jsonl
    """
    with errors("eval", INTERRUPTED):
        from kvpage.evaluation.tasks import TaskStudy, load_problems

        with naming("--data", data):
            problems = load_problems(data, split, limit)
        study = TaskStudy(
            Path(data).stem,
            problems,
            max_new_tokens,
            batch_size,
            integers("--seeds", seeds),
            temperature,
            top_p,
            template,
            integers("--pass-at", pass_at),
        )
        contenders = options.contenders()
        _run(study, options.subjects(), contenders, options)


def _run(
    study: Study, subjects: list[Subject], contenders: list[Contender], options: Options
) -> None:
    import json

    from rich.console import Console
    from transformers.utils import logging

    from kvpage.evaluation.evaluating import evaluate

    logging.disable_progress_bar()
    try:
        found = evaluate(study, subjects, contenders, options.out, plot=options.plot)
    except ValueError as error:
        if str(error).startswith(("adapter:", "tokens:")):
            raise ValueError(f"--{error}") from error
        raise
    if not found.is_main:
        return
    if options.json:
        typer.echo(json.dumps({"rows": found.rows, "notes": found.notes}))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    console.print(found)
    console.print(f"tables in {options.out}/{study.kind}.md, .csv, .json")
