"""The commands, and what a user sees of an error: one line, and exit code 2 for a wrong argument."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from rankwise.cli.plan import plan
from rankwise.errors import RankwiseError

app = typer.Typer(name="rankwise", add_completion=False, no_args_is_help=True)
app.command()(plan)


@app.callback()
def rankwise() -> None:
    """Make a language model as small as you ask."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run the command line; the exit code."""
    try:
        return app(args=list(arguments), prog_name="rankwise", standalone_mode=False) or 0
    except typer.TyperException as error:
        message, code = error.format_message(), error.exit_code
    except RankwiseError as error:
        message, code = str(error), 2
    if message:
        print(f"rankwise: {' '.join(message.split())}", file=sys.stderr)
    return code
