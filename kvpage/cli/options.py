"""What the commands share: options, checks that name the option, and exit codes."""

from __future__ import annotations

import errno
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from kvpage.evaluation.runner import Subject
    from kvpage.footprint import Footprint

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
"""Exit codes beside 0; the last as shells have it after Ctrl-C."""

DTYPES = ("auto", "float32", "bfloat16", "float16")

Model = Annotated[str, typer.Option("--model", "-m", help="Folder of a checkpoint, or hub id.")]
Adapter = Annotated[
    str | None, typer.Option(help="PEFT adapter (LoRA, ...) to put on every --model: folder or id.")
]
Tokenizer = Annotated[
    str | None, typer.Option(help="Folder or hub id.", show_default="the adapter's or the model's")
]
Budget = Annotated[
    str, typer.Option(help="Live tokens that a compaction leaves; `none` never evicts.")
]
Scorer = Annotated[
    str, typer.Option(help="What ranks tokens: sampled, centroid, streaming, knorm, ...")
]
Interval = Annotated[int, typer.Option(min=1, help="Tokens between two compactions.")]
BlockSize = Annotated[int, typer.Option(min=1, help="Tokens per block.")]
Sinks = Annotated[int, typer.Option(min=0, help="First tokens that are never evicted.")]
Recent = Annotated[int, typer.Option(min=0, help="Latest tokens that are never evicted.")]
Dtype = Annotated[
    str, typer.Option(help="float32, bfloat16 or float16; auto: as the model was saved.")
]
Device = Annotated[
    str | None,
    typer.Option(
        help="cpu, cuda, cuda:1, mps, ...; auto: spread over all.", show_default="the accelerator"
    ),
]
Attention = Annotated[
    str | None,
    typer.Option(
        help="sdpa, eager, ...; kvpage: attention reads the blocks, without copies.",
        show_default="the model's own",
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object to stdout, and nothing else.")
]


ARGUMENTS = (
    *("budget", "scorer", "interval", "block_size", "sinks", "recent", "steps", "step", "lengths"),
    *("data", "max_tokens", "seq_len", "batch_size", "text_field", "checkpoint"),
    *("prompt", "seeds", "ks", "template"),
)
"""Names that errors of the library begin with, and of which options have the same, or as OPTIONS
says."""

OPTIONS = {
    "bench": {"budget": "budgets", "lengths": "points"},
    "calibrate": {"data": "dataset"},
    "eval": {"budget": "budgets", "ks": "pass-at", "scorer": "scorers"},
}


class Refused(ValueError):
    """A model that kvpage does not support, and why."""


def bundled(
    kind: type[Any], **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the fields of the dataclass `kind` as options; it gets them as one value, its
    first argument. defaults: others than those of `kind`."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(kind, include_extras=True)
        own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
        shared = []
        for each in fields(kind):
            default = inspect.Parameter.empty if each.default is MISSING else each.default
            default = defaults.get(each.name, default)
            option = inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=default)
            shared.append(option.replace(annotation=hints[each.name]))

        @functools.wraps(command)
        def run(**options: Any) -> None:
            bundle = kind(**{each.name: options.pop(each.name) for each in shared})
            command(bundle, **options)

        own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
        parameters = [*shared[:1], *own, *shared[1:]]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


@contextmanager
def errors(command: str, interrupted: str = "interrupted") -> Iterator[None]:
    """End a command as its help says: what the user got wrong is one line and exit code 2, memory
    that does not suffice one line and 1, Ctrl-C the line `interrupted` and 130."""
    try:
        yield
    except ImportError as error:
        extra = "eval" if command == "eval" else "cli"
        hint = f"{error}: pip install 'kvpage[{extra}]'"
        raise SystemExit(say(command, hint, BAD_INPUT)) from error
    except (ValueError, TypeError, OSError) as error:
        raise SystemExit(say(command, _with_option(command, error), BAD_INPUT)) from error
    except KeyboardInterrupt:
        raise SystemExit(say(command, interrupted, INTERRUPTED)) from None
    except (MemoryError, RuntimeError) as error:
        if not (isinstance(error, MemoryError) or "memory" in str(error).lower()):
            raise
        raise SystemExit(say(command, f"out of memory: {first_line(error)}", FAILED)) from error


def say(command: str, text: str, code: int = 0) -> int:
    """Print a line to stderr; returns `code`."""
    typer.echo(f"kvpage {command}: {text}", err=True)
    return code


def first_line(error: BaseException) -> str:
    """Of what an error says."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _with_option(command: str, error: BaseException) -> str:
    """The first line of an error, which names an option where it named an argument."""
    text = first_line(error)
    name, colon, rest = text.partition(":")
    if name not in ARGUMENTS or not colon:
        return text
    option = OPTIONS.get(command, {}).get(name, name)
    return f"--{option.replace('_', '-')}:{rest}"


@contextmanager
def naming(option: str, value: object) -> Iterator[None]:
    """Have errors of input that other libraries raise name the option at fault."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else None
        text = reason or first_line(error)
        if text.startswith((f"{option}:", f"{option.strip('-')}:")):
            raise
        text = text.removeprefix("statistics: ")
        named = text if text.endswith(f" {value}") else f"{value}: {text}"
        raise ValueError(f"{option}: {named}") from error


def make_folder(option: str, folder: Path) -> None:
    """Make a folder to write to, if there is none; `ValueError` naming the option if it can't be
    written to."""
    with naming(option, folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def integers(option: str, text: str) -> list[int]:
    """Of `1,2,3`."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option}: integers with commas expected, got {text!r}") from None


def budget_of(text: str, option: str = "--budget") -> int | None:
    """A number of tokens; `none` or `full` is the full cache."""
    if text.strip().lower() in ("none", "full"):
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{option}: a number or none expected, got {text!r}") from None


def check_device(device: str | None, auto: bool = False) -> None:
    """Raise `ValueError` naming --device unless torch can put a tensor there; auto: whether
    `"auto"` is taken."""
    import torch

    if device is None or (auto and device == "auto"):
        return
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device: can't use {device!r}: {first_line(error)}") from error


def positions_of(config: Any) -> int | None:
    """The longest text that a model is made for, as its config says; `None` if it does not."""
    found = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return found if isinstance(found, int) else None


def beyond(tokens: int, positions: int | None) -> str | None:
    """What to say of a text that is longer than the model is made for."""
    if positions is None or tokens <= positions:
        return None
    return f"{tokens:,} tokens are more than the model's max_position_embeddings, {positions:,}"


def check_place(option: str, name: str) -> None:
    """Raise `ValueError` for what is neither there nor looks like the id of a hub repository."""
    if not Path(name).exists() and (Path(name).is_absolute() or name.count("/") != 1):
        raise ValueError(f"{option}: no folder {name}, and a hub id has the form owner/name")


def config_of(model: str, dtype: str) -> Any:
    """The config of a model; `ValueError` names --model or --dtype where there is none."""
    from transformers import AutoConfig

    if dtype not in DTYPES:
        raise ValueError(
            f"--dtype: {', '.join(DTYPES[:-1])} or {DTYPES[-1]} expected, got {dtype!r}"
        )
    check_place("--model", model)
    path = Path(model)
    if path.exists() and not (path / "config.json").is_file():
        raise ValueError(f"--model: a folder with a config.json in it expected, got {model}")
    try:
        return AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        reason = first_line(error)
        where = model if path.exists() else f"no folder {model}, and not to be had from the hub"
        raise ValueError(f"--model: {where}: {reason}") from error


def footprint_of(model: str, config: Any, dtype: str) -> Footprint:
    """The shapes of a model, of its config alone; `Refused` if kvpage does not support it."""
    from kvpage.footprint import Footprint, without_weights

    try:
        return Footprint.of(without_weights(config, dtype))
    except (ValueError, TypeError) as error:
        raise Refused(f"--model: {model}: {first_line(error).removeprefix('model: ')}") from error


def subject_of(
    model: str,
    adapter: str | None,
    tokenizer: str | None,
    dtype: str,
    device: str | None,
    reads_text: bool = True,
) -> Subject:
    """A model to be loaded, once it is clear that there is one, that kvpage supports it and, where
    it `reads_text`, that it has a tokenizer."""
    from kvpage.evaluation.runner import Subject

    check_device(device, auto=True)
    for option, name in (("--adapter", adapter), ("--tokenizer", tokenizer)):
        if name is not None:
            check_place(option, name)
    footprint_of(model, config_of(model, dtype), dtype)
    found = Subject(model, adapter, tokenizer, dtype, device)
    if adapter is not None:
        from peft import PeftConfig

        with naming("--adapter", adapter):
            PeftConfig.from_pretrained(adapter)
    if reads_text:
        option, place = ("--tokenizer", tokenizer) if tokenizer else ("--model", model)
        own = adapter is not None and (Path(adapter) / "tokenizer_config.json").exists()
        if Path(place).is_dir() and not has_tokenizer(Path(place)) and (tokenizer or not own):
            raise ValueError(f"{option}: no tokenizer in {place}")
        with naming(option, place):
            found.tokenizer  # noqa: B018, loads it
    return found


def has_tokenizer(folder: Path) -> bool:
    """Whether any file in it is one that tokenizers are made of; without one, transformers makes
    an empty tokenizer of some kinds."""
    names = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "tekken.json")
    return any(True for name in names for _ in folder.glob(name))


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Show on stderr, in a terminal, that something takes its time."""
    from rich.console import Console
    from transformers.utils import logging

    logging.disable_progress_bar()
    with Console(stderr=True).status(what):
        yield


def load(subject: Subject, attention: str | None = None) -> Any:
    """The model of `subject`, with a sign of life while it loads; attention: to set it to."""
    with waiting(f"loading {subject.path}"), naming("--model", subject.path):
        model: Any = subject.model
    if attention is not None:
        from kvpage.attention import register

        register()
        with naming("--attention", attention):
            model.set_attn_implementation(attention)
    return model
