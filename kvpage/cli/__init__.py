"""The command line: `kvpage info`, `generate`, `calibrate`, `eval` and `bench`."""

from __future__ import annotations

from typing import Any


def application() -> Any:
    """The typer app, with a sub-app or command of each module beside this."""
    import typer

    from kvpage.cli.bench import bench_command
    from kvpage.cli.calibrate import calibrate_command
    from kvpage.cli.evaluate import evaluate
    from kvpage.cli.generate import generate_command
    from kvpage.cli.info import info_command

    app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)
    app.callback()(_kvpage)
    app.command("info")(info_command)
    app.command("generate")(generate_command)
    app.command("calibrate")(calibrate_command)
    about = "What a budget costs a model in quality: fidelity, memory, tasks."
    app.add_typer(evaluate, name="eval", short_help=about)
    app.command("bench")(bench_command)
    return app


def _kvpage() -> None:
    """A KV cache for transformers that runs a trace of any length in a fixed memory.

    \b
    To begin with:
      kvpage info --model my-model --tokens 32768
      kvpage generate --model my-model "Why is the sky blue?" --budget 512
    """


def main() -> None:
    """Entry point of the script `kvpage`."""
    try:
        app = application()
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        raise SystemExit(f"kvpage: {error}: pip install 'kvpage[cli]'") from None
    app(prog_name="kvpage")
