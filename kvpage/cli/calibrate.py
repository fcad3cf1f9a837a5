"""kvpage calibrate: statistics of a model over a data set, in a file to share."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpage.cli.options import (
    Dtype,
    Json,
    Model,
    errors,
    load,
    make_folder,
    naming,
    subject_of,
)

BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}


def calibrate_command(
    model: Model,
    dataset: Annotated[str, typer.Option(help="Hub id, or a .jsonl, .txt or .parquet file.")],
    out: Annotated[Path, typer.Option(help="The safetensors file to write.")],
    config: Annotated[str | None, typer.Option(help="Configuration of a hub data set.")] = None,
    split: Annotated[str, typer.Option(help="Split of a hub data set.")] = "train",
    text_field: Annotated[str, typer.Option(help="The field with the text; not of .txt.")] = "text",
    max_tokens: Annotated[int, typer.Option(help="Where to stop; pads do not count.")] = 2**17,
    seq_len: Annotated[int, typer.Option(help="Longer texts are cut into such pieces.")] = 2048,
    batch_size: Annotated[int, typer.Option(help="Sequences per forward.")] = 4,
    dtype: Dtype = "auto",
    device: Annotated[str | None, typer.Option(help="Default: the accelerator, if any.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Default: OUT with .partial appended; gone at the end.")
    ] = None,
    resume: Annotated[bool, typer.Option(help="Go on from the checkpoint, if any.")] = True,
    as_json: Json = False,
) -> None:
    """Collect statistics of a model's queries and keys over a data set.

    Under `accelerate launch` the data set is split over the processes. After Ctrl-C or a crash the
    same command goes on where it was.

    \b
    Examples:
      kvpage calibrate --model my-model --dataset text.txt --out statistics.safetensors
      kvpage generate --model my-model --stats statistics.safetensors "Once upon a time"

    Exit codes: 0 done, 1 out of memory, 2 bad input, 130 interrupted.
    """
    checkpoint = checkpoint or out.with_name(f"{out.name}.partial")
    state, rank, processes = None, 0, 1
    with errors("calibrate", f"interrupted; the same command goes on from {checkpoint}"):
        subject = subject_of(model, None, None, dtype, device)
        make_folder("--out", out.parent)
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            from accelerate import PartialState

            state = PartialState(cpu=device == "cpu")
            rank, processes = state.process_index, state.num_processes
            subject.device = str(state.device)
        try:
            if not resume and rank == 0:
                _remove(checkpoint)
            if state is not None:
                state.wait_for_everyone()
            from kvpage import calibrating

            start = time.perf_counter()
            with naming("--dataset", dataset):
                samples = _samples(dataset, config, split)
            statistics = calibrating.calibrate(
                load(subject),
                subject.tokenizer,
                samples,
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


def _samples(name: str, config: str | None, split: str) -> Any:
    """The samples of a file, or of a data set of the hub, as they come."""
    path = Path(name)
    if not path.is_file() and path.suffix in BUILDERS:
        raise ValueError(f"--dataset: no such file: {name}")
    if path.is_file() and path.suffix not in BUILDERS:
        raise ValueError(f"--dataset: a file of {', '.join(BUILDERS)} expected, got {name}")
    try:
        from datasets import load_dataset
    except ModuleNotFoundError:
        raise ValueError("--dataset: needs `datasets`: pip install 'kvpage[cli]'") from None

    if not path.is_file():
        return load_dataset(name, config, split=split, streaming=True)
    builder = BUILDERS[path.suffix]
    options = {"sample_by": "document"} if builder == "text" else {}
    return load_dataset(builder, data_files=str(path), split="train", streaming=True, **options)
