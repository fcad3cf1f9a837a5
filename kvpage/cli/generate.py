"""kvpage generate: text from a model, with a live block meter."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpage.cli.options import (
    INTERRUPTED,
    Adapter,
    Attention,
    BlockSize,
    Budget,
    Device,
    Dtype,
    Interval,
    Json,
    Model,
    Recent,
    Scorer,
    Sinks,
    budget_of,
    errors,
    load,
    naming,
    say,
    subject_of,
)


def generate_command(
    model: Model,
    prompt: Annotated[
        str | None, typer.Argument(help="What to ask, or to continue; `-` reads it from stdin.")
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Take turns, in one cache: /report, /reset, /quit."),
    ] = False,
    system: Annotated[
        str | None, typer.Option(help="System prompt, for models with a chat template.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt, without the chat template.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 512,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Nucleus to sample from.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    budget: Budget = "2048",
    scorer: Scorer = "sampled",
    stats: Annotated[
        Path | None, typer.Option(help="Statistics that `kvpage calibrate` made.")
    ] = None,
    interval: Interval = 128,
    block_size: BlockSize = 16,
    sinks: Sinks = 4,
    recent: Recent = 128,
    adapter: Adapter = None,
    attention: Attention = None,
    dtype: Dtype = "auto",
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Write text under a budget, and watch the blocks of its cache.

    In a terminal a live view shows text, speed and blocks. Piped, stdout is the text alone; the
    report of the cache goes to stderr. A prompt goes through the model's chat template, if it has
    one. --chat keeps one cache over all turns; from a pipe, each line is a turn.

    \b
    Examples:
      kvpage generate --model my-model "Why is the sky blue?" --budget 512
      kvpage generate --model my-model --chat --system "Answer briefly."
      cat text.txt | kvpage generate --model my-model - --raw --max-new-tokens 64 --json

    Ctrl-C ends with what was written and the report; during an answer of a chat that is typed it
    stops that answer only. Exit codes: 0 done, 1 out of memory, 2 bad input, 130 interrupted.
    """
    with errors("generate"):
        from transformers import set_seed

        from kvpage.cache import PagedCompactCache
        from kvpage.cli.conversation import Conversation

        if chat == (prompt is not None):
            raise ValueError("PROMPT: a text, - for stdin, or --chat expected, one of them")
        if raw and (chat or system is not None):
            raise ValueError("--raw: goes without the template that --chat and --system need")
        text = sys.stdin.read() if prompt == "-" else prompt
        if text == "":
            raise ValueError("PROMPT: a text expected, got none")
        options: dict[str, Any] = {"budget": budget_of(budget), "scorer": scorer, "sinks": sinks}
        options |= {"interval": interval, "recent": recent, "block_size": block_size}
        PagedCompactCache(**options)  # before anything is loaded
        subject = subject_of(model, adapter, None, dtype, device)
        tokenizer = subject.tokenizer
        templated = chat or system is not None or (tokenizer.chat_template is not None and not raw)
        conversation = Conversation(tokenizer, system) if templated else None
        loaded = load(subject, attention)
        with naming("--stats", stats):
            cache = PagedCompactCache(loaded, stats=stats, **options)
        sampling: dict[str, Any] = {"do_sample": temperature > 0}
        if temperature > 0:
            sampling |= {"temperature": temperature, "top_p": top_p, "top_k": 0}
        writer = _Writer(loaded, tokenizer, cache, max_new_tokens, sampling, as_json)
        set_seed(seed)
        if text is not None:
            ids = tokenizer(text).input_ids if conversation is None else conversation.ask(text)
            answers = [writer.write(ids)]
            interrupted = answers[0].interrupted
        else:
            assert conversation is not None
            answers, interrupted = _chat(writer, conversation)
        _end(writer.cache.report(), answers, interrupted, chat, as_json)


@dataclass(frozen=True)
class Answer:
    """What the model wrote to a prompt."""

    prompt: str
    text: str
    prompt_tokens: int
    """Those that the cache had seen from the turns before are not among them."""
    ids: list[int]
    seconds: float
    interrupted: bool

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "text": self.text,
            "prompt_tokens": self.prompt_tokens,
            "tokens": len(self.ids),
            "seconds": self.seconds,
            "tokens_per_second": len(self.ids) / self.seconds if self.seconds else None,
            "interrupted": self.interrupted,
        }


class _Writer:
    """Writes answers, streamed to where they belong."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        cache: Any,
        max_new_tokens: int,
        sampling: dict[str, Any],
        as_json: bool,
    ) -> None:
        from transformers.utils import logging

        from kvpage.cli.streams import on_screen

        logging.set_verbosity_error()  # of sampling options that greedy decoding does not use
        self.model, self.tokenizer, self.cache = model, tokenizer, cache
        self.options = {"max_new_tokens": max_new_tokens, **sampling}
        self.to_screen = on_screen() and not as_json
        self.to_pipe = not self.to_screen and not as_json

    def write(self, ids: list[int], prompt: str = "") -> Answer:
        """Go on from `ids`, of which the cache may have seen the first ones."""
        from time import perf_counter

        import torch
        from transformers import StoppingCriteriaList

        from kvpage.cli.streams import Interruptible, streams
        from kvpage.compat import NEWEST

        seen, device = self.cache.get_seq_length(), next(self.model.parameters()).device
        given = torch.tensor([ids], device=device)
        pad = self.tokenizer.pad_token_id
        start = perf_counter()
        with (
            Interruptible() as stop,
            streams(self.cache, self.tokenizer, self.to_screen, self.to_pipe) as streamer,
        ):
            out = self.model.generate(
                input_ids=given,
                attention_mask=torch.ones_like(given),
                pad_token_id=self.tokenizer.eos_token_id if pad is None else pad,
                stopping_criteria=StoppingCriteriaList([stop]),
                streamer=streamer,
                **{NEWEST: self.cache},
                **self.options,
            )
        new = out[0, len(ids) :].tolist()
        text = self.tokenizer.decode(new, skip_special_tokens=True)
        seconds = perf_counter() - start
        return Answer(prompt, text, len(ids) - seen, new, seconds, stop.interrupted)


def _chat(writer: _Writer, conversation: Any) -> tuple[list[Answer], bool]:
    """Take turns until /quit, the end of the input or Ctrl-C; returns whether it was Ctrl-C.

    Where turns are typed, Ctrl-C during an answer stops that answer, and the chat goes on.
    """
    from kvpage.cli.streams import typed

    answers: list[Answer] = []
    try:
        while (line := _read()) is not None and line != "/quit":
            if line == "/report":
                _show(writer.cache.report())
            elif line == "/reset":
                writer.cache.reset()
                conversation.ids = []
                typer.echo("/reset: the cache is empty, the conversation starts anew", err=True)
            elif line.startswith("/"):
                typer.echo(f"{line}: /report, /reset or /quit expected", err=True)
            elif line:
                answers.append(writer.write(conversation.ask(line), line))
                conversation.answered(answers[-1].ids)
                if answers[-1].interrupted:
                    if not typed():
                        return answers, True
                    typer.echo("answer stopped; Ctrl-C or Ctrl-D here ends the chat", err=True)
    except KeyboardInterrupt:
        return answers, True
    return answers, False


def _read() -> str | None:
    """The next line; `None` at the end of the input."""
    from kvpage.cli.streams import on_screen, typed

    if typed() and on_screen():
        try:
            return input("> ").strip()
        except EOFError:
            return None
    line = sys.stdin.readline()
    return line.strip() if line else None


def _end(report: Any, answers: list[Answer], interrupted: bool, chat: bool, as_json: bool) -> None:
    """Print what is due at the end, and exit with 130 after Ctrl-C."""
    if as_json:
        about = {"report": report.to_dict(), "interrupted": interrupted}
        turns = [{"prompt": answer.prompt, **answer.to_dict()} for answer in answers]
        typer.echo(json.dumps({"turns": turns, **about} if chat else answers[0].to_dict() | about))
    else:
        typer.echo(err=True)
        _show(report)
    if interrupted:
        raise SystemExit(say("generate", "interrupted", INTERRUPTED))


def _show(report: Any) -> None:
    """Print a report to stderr; values that are too long for a terminal go on below themselves."""
    if not sys.stderr.isatty():
        typer.echo(str(report), err=True)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    for name, value in report.rows():
        table.add_row(name, value)
    Console(stderr=True, highlight=False, markup=False, emoji=False).print(table)
