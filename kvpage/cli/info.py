"""kvpage info: what this machine, model and version support, and what a trace will cost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpage.cli.options import (
    BAD_INPUT,
    BlockSize,
    Budget,
    Dtype,
    Interval,
    Json,
    Recent,
    Refused,
    Scorer,
    Sinks,
    beyond,
    budget_of,
    check_device,
    config_of,
    errors,
    footprint_of,
    positions_of,
    say,
    waiting,
)

if TYPE_CHECKING:
    from kvpage.footprint import Footprint


def info_command(
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Folder or hub id; its config is read, no weights."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Length of a trace: what would it cost?")
    ] = None,
    budget: Budget = "2048",
    prompt: Annotated[
        int, typer.Option(min=1, help="Tokens of --tokens that come at once, as the prompt.")
    ] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows decoded at once.")] = 1,
    scorer: Scorer = "sampled",
    interval: Interval = 128,
    block_size: BlockSize = 16,
    sinks: Sinks = 4,
    recent: Recent = 128,
    dtype: Dtype = "auto",
    device: Annotated[
        str | None,
        typer.Option(help="cpu, cuda, cuda:1, mps, ...", show_default="the accelerator"),
    ] = None,
    as_json: Json = False,
) -> None:
    """What this machine, model and version support; what a trace costs; whether it fits.

    With --model: whether kvpage supports it, its layers, and bytes per token. With --tokens, too:
    what keys and values take in transformers' DynamicCache, what in a PagedCompactCache with
    --budget, and the longest trace that fits beside the weights into the memory that is free.

    \b
    Examples:
      kvpage info
      kvpage info --model my-model --tokens 32768 --budget 1024

    Exit codes: 0 done, 2 bad input or a model that kvpage does not support.
    """
    with errors("info"):
        if tokens is not None and model is None:
            raise ValueError("--tokens: needs --model")
        if tokens is not None and prompt > tokens:
            raise ValueError(f"--prompt: at most --tokens, {tokens}, expected, got {prompt}")
        check_device(device)
        with waiting("looking around"):
            from kvpage.cli.machine import attention, devices, versions
            from kvpage.evaluation.runner import default_device

            found: dict[str, Any] = {"versions": versions(), "devices": devices()}
            found["attention"] = attention()
        refused = None
        if model is not None:
            try:
                with waiting(f"reading the config of {model}"):
                    config = config_of(model, dtype)
                    footprint = footprint_of(model, config, dtype)
            except Refused as error:
                refused = str(error)
                found["model"] = {"path": model, "supported": False, "reason": refused}
            else:
                positions = positions_of(config)
                found["model"] = {"path": model, **_about(footprint)}
                found["model"]["max_position_embeddings"] = positions
                options: dict[str, Any] = {"budget": budget_of(budget), "interval": interval}
                options |= {"block_size": block_size, "sinks": sinks, "recent": recent}
                options["scorer"] = scorer
                place = device or default_device()
                free = _free_on(place, found["devices"])
                cost = _Cost(footprint, place, free, prompt, batch_size, options)
                found["memory"] = cost.fits()
                if tokens is not None:
                    found["trace"] = {**cost.of(tokens), "note": beyond(tokens, positions)}
        if as_json:
            typer.echo(json.dumps(found))
        else:
            _print(found)
        if refused is not None:
            raise SystemExit(say("info", refused, BAD_INPUT))


def _about(footprint: Footprint) -> dict[str, Any]:
    windows = footprint.windows
    return {
        "architecture": footprint.name,
        "supported": True,
        "dtype": str(footprint.dtype).removeprefix("torch."),
        "full_layers": footprint.full_layers,
        "sliding_layers": len(windows),
        "window": windows[0] if windows else None,
        "state_layers": footprint.state_layers,
        "bytes_per_token": footprint.bytes_per_token,
        "bytes_weights": footprint.weights_bytes,
    }


def _free_on(device: str, devices: list[dict[str, Any]]) -> int:
    """Bytes free on one of the devices that are shown; `ValueError` naming --device for others."""
    import torch

    place = torch.device(device)
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    name = str(place) if place.type == "cuda" else place.type
    free = {row["device"]: int(row["bytes_free"]) for row in devices}
    if name not in free:
        raise ValueError(f"--device: one of {', '.join(free)} expected, got {device!r}")
    return free[name]


class _Cost:
    """What traces of a model cost on a device of which `free` bytes are free."""

    def __init__(
        self, footprint: Footprint, device: str, free: int, prompt: int, rows: int, options: Any
    ) -> None:
        self.footprint, self.rows, self.options = footprint, rows, {**options, "prompt": prompt}
        self.device, self.free = device, free - footprint.weights_bytes

    def fits(self) -> dict[str, Any]:
        """The longest traces, in tokens per row."""
        free = max(0, self.free)
        return {
            "device": self.device,
            "bytes_free_beside_weights": self.free,
            "batch_size": self.rows,
            "budget": self.options["budget"],
            "longest_dynamic": self.footprint.longest_dynamic(free, self.rows),
            "longest_paged": self.footprint.longest_paged(free, rows=self.rows, **self.options),
        }

    def of(self, tokens: int) -> dict[str, Any]:
        """Bytes of a trace of `tokens` tokens per row."""
        paged = self.footprint.paged_bytes(tokens, rows=self.rows, **self.options)
        dynamic = self.footprint.dynamic_bytes(tokens, self.rows)
        return {
            "tokens": tokens,
            "prompt": self.options["prompt"],
            "dynamic": {"bytes": dynamic, "fits": dynamic <= self.free},
            "paged": {
                "bytes_in_use": paged.in_use,
                "bytes_reserved": paged.reserved,
                "bytes_peak": paged.peak,
                "bytes_statistics": paged.statistics,
                "fits": paged.peak + paged.statistics <= self.free,
            },
        }


def _print(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _lines(found):
        table.add_row(name, text)
    console = Console(highlight=False)
    console = console if console.is_terminal else Console(width=120, highlight=False)
    console.print(table)


def _lines(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    from kvpage.compat import OLDEST, TESTED

    versions, attention = found["versions"], found["attention"]
    tested = f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, TESTED))}"
    word = "tested" if versions["transformers_tested"] else "not tested; tested are"
    yield "kvpage", versions["kvpage"]
    yield "torch", versions["torch"]
    yield "transformers", f"{versions['transformers']} ({word} {tested})"
    yield "python", versions["python"]
    for device in found["devices"]:
        free, total = _size(device["bytes_free"]), _size(device["bytes_total"])
        yield device["device"], f"{free} of {total} free ({device['name']})"
    yield "attention", ", ".join(attention["implementations"])
    backends = (f"{name}: {state}" for name, state in attention["backends"].items())
    yield "kvpage reads blocks by", "; ".join(backends)
    if "model" in found:
        yield "", ""
        yield from _model_lines(found["model"])
    if "memory" in found:
        yield from _memory_lines(found["memory"])
    if "trace" in found:
        yield "", ""
        yield from _trace_lines(found["trace"], found["memory"])


def _model_lines(model: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "model", model["path"]
    if not model["supported"]:
        yield "supported", f"no: {model['reason']}"
        return
    yield "architecture", f"{model['architecture']}, supported"
    kinds = [(model["full_layers"], "of full attention")]
    kinds.append((model["sliding_layers"], f"with a window of {model['window']} tokens"))
    kinds.append((model["state_layers"], "with a state of fixed size, not counted below"))
    yield "layers", ", ".join(f"{count} {kind}" for count, kind in kinds if count)
    yield "keys and values", f"{_size(model['bytes_per_token'])} per token ({model['dtype']})"
    yield "weights", _size(model["bytes_weights"])


def _memory_lines(memory: dict[str, Any]) -> Iterator[tuple[str, str]]:
    free = memory["bytes_free_beside_weights"]
    text = f"{_size(free)} free beside the weights" if free > 0 else "no room for the weights"
    yield f"on {memory['device']}", text
    rows = f" in each of {memory['batch_size']} rows" if memory["batch_size"] > 1 else ""
    yield "longest, DynamicCache", _tokens(memory["longest_dynamic"]) + rows
    yield f"longest, {_budget(memory)}", _tokens(memory["longest_paged"]) + rows


def _trace_lines(trace: dict[str, Any], memory: dict[str, Any]) -> Iterator[tuple[str, str]]:
    dynamic, paged = trace["dynamic"], trace["paged"]
    prompt = f", a prompt of {trace['prompt']:,} among them" if trace["prompt"] > 1 else ""
    yield "a trace of", f"{trace['tokens']:,} tokens{prompt}"
    yield "DynamicCache", f"{_size(dynamic['bytes'])}: {_fits(dynamic)}"
    text = f"{_size(paged['bytes_reserved'])} and {_size(paged['bytes_statistics'])} of statistics"
    peak = paged["bytes_peak"]
    most = f", {_size(peak)} at the peak" if peak > paged["bytes_reserved"] else ""
    yield _budget(memory), f"{text} at the end{most}: {_fits(paged)}"
    if trace["note"] is not None:
        yield "note", trace["note"]


def _budget(memory: dict[str, Any]) -> str:
    return "no budget" if memory["budget"] is None else f"budget={memory['budget']:,}"


def _fits(part: dict[str, Any]) -> str:
    return "fits" if part["fits"] else "does not fit"


def _tokens(count: int | None) -> str:
    return "any number of tokens" if count is None else f"{count:,} tokens"


def _size(count: int) -> str:
    from kvpage.report import readable

    return f"{count / 2**30:,.1f} GiB" if abs(count) >= 10 * 2**30 else readable(count)
