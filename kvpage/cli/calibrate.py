"""kvpage calibrate: statistics of a model over a data set, in a file to share."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvpage import calibrating

BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}


def calibrate_command(
    model: Annotated[str, typer.Option(help="Hub id or folder.")],
    dataset: Annotated[str, typer.Option(help="Hub id, or a .jsonl, .txt or .parquet file.")],
    out: Annotated[Path, typer.Option(help="The safetensors file to write.")],
    config: Annotated[str | None, typer.Option(help="Configuration of a hub data set.")] = None,
    split: Annotated[str, typer.Option(help="Split of a hub data set.")] = "train",
    text_field: Annotated[str, typer.Option(help="The field with the text; not of .txt.")] = "text",
    max_tokens: Annotated[int, typer.Option(help="Where to stop; pads do not count.")] = 2**17,
    seq_len: Annotated[int, typer.Option(help="Longer texts are cut into such pieces.")] = 2048,
    batch_size: Annotated[int, typer.Option(help="Sequences per forward.")] = 4,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str | None, typer.Option(help="Default: the accelerator, if any.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Default: OUT with .partial appended; gone at the end.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the checkpoint, if any.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was done as JSON.")] = False,
) -> None:
    """Collect statistics of a model's queries and keys over a data set.

    Under `accelerate launch` the data set is split over the processes. Interrupted, the same
    command goes on where it was. Exit status: 0 done, 2 bad input, 130 interrupted.
    """
    checkpoint = checkpoint or out.with_name(f"{out.name}.partial")
    state, rank, processes = None, 0, 1
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from accelerate import PartialState

        state = PartialState(cpu=device == "cpu")
        rank, processes, device = state.process_index, state.num_processes, str(state.device)
    try:
        if not resume and rank == 0:
            _remove(checkpoint)
        if state is not None:
            state.wait_for_everyone()
        start = time.perf_counter()
        statistics = calibrating.calibrate(
            _model(model, dtype, device),
            AutoTokenizer.from_pretrained(model),
            _samples(dataset, config, split),
            max_tokens=max_tokens,
            seq_len=seq_len,
            batch_size=batch_size,
            text_field="text" if dataset.endswith(".txt") else text_field,
            dataset=Path(dataset).name if Path(dataset).exists() else dataset,
            checkpoint=checkpoint,
        )
        seconds = time.perf_counter() - start
        if rank == 0:
            statistics.save(out)
            _remove(checkpoint)
    except (ValueError, TypeError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo(f"interrupted; the same command goes on from {checkpoint}", err=True)
        raise typer.Exit(130) from None
    finally:
        if state is not None:
            state.destroy_process_group()
    if rank == 0:
        done = {"out": str(out), "tokens": statistics.tokens, "processes": processes}
        done["seconds"] = round(seconds, 3)
        text = f"{out}: {statistics.tokens:,} tokens, {len(statistics.layers)} layers"
        typer.echo(json.dumps(done) if as_json else f"{text}, {seconds:.1f} s")


def _remove(checkpoint: Path) -> None:
    """Remove the checkpoint, those of several processes included."""
    for path in (checkpoint, *checkpoint.parent.glob(f"{checkpoint.name}.*-of-*")):
        path.unlink(missing_ok=True)


def _model(name: str, dtype: str, device: str | None) -> Any:
    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise ValueError(f"dtype: auto, float32, bfloat16 or float16 expected, got {dtype!r}")
    if device is None:
        device = str(torch.accelerator.current_accelerator() or "cpu")
    loaded: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    return loaded.to(device).eval()


def _samples(name: str, config: str | None, split: str) -> Any:
    """The samples of a file, or of a data set of the hub, as they come."""
    try:
        from datasets import load_dataset
    except ModuleNotFoundError:
        raise ValueError("dataset: needs `datasets`: pip install 'kvpage[cli]'") from None

    path = Path(name)
    if not path.is_file():
        return load_dataset(name, config, split=split, streaming=True)
    if path.suffix not in BUILDERS:
        raise ValueError(f"dataset: a file of {', '.join(BUILDERS)} expected, got {name}")
    builder = BUILDERS[path.suffix]
    options = {"sample_by": "document"} if builder == "text" else {}
    return load_dataset(builder, data_files=str(path), split="train", streaming=True, **options)
