"""The command line."""

from __future__ import annotations

import typer

from kvpage.cli.calibrate import calibrate_command

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command("calibrate")(calibrate_command)


@app.callback()
def _kvpage() -> None:
    """A KV cache that runs a trace of any length in a fixed amount of memory."""


def main() -> None:
    """Run the command that the arguments name."""
    app()
