"""The commands, and what a user sees of an error: one line, and exit code 2 for a wrong argument."""

from __future__ import annotations

import linecache
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from rankwise.cli.bench import BENCH
from rankwise.cli.command import UsageError
from rankwise.cli.compress import COMPRESS
from rankwise.cli.export import EXPORT
from rankwise.cli.options import HELP, help_of, parse
from rankwise.cli.plan import PLAN
from rankwise.cli.presets import PRESETS
from rankwise.cli.report import REPORT
from rankwise.cli.runs import PRUNE, RUN, SWEEP, TRAIN
from rankwise.cli.saved import EVALUATE, SAMPLE
from rankwise.cli.tables import wrapped
from rankwise.errors import RankwiseError, nearest
from rankwise.version import VERSION

COMMANDS = {
    command.name: command
    for command in (RUN, TRAIN, PRUNE, COMPRESS, EVALUATE, SAMPLE, BENCH, EXPORT, SWEEP, REPORT, PRESETS, PLAN)
}
WRONG, FAILED, INTERRUPTED, BROKEN_PIPE = 2, 1, 130, 141
"""Exit codes: the user's mistake, the machine's, Ctrl-C, and a reader of our output that went away."""
STOPPED = "Stopped; run the same command again to go on."


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    for stream in (sys.stdout, sys.stderr):
        # a text may hold letters that the terminal does not have
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    code = run(sys.argv[1:] if arguments is None else arguments)
    if code == INTERRUPTED:
        # nothing is left to do: whoever presses Ctrl-C again need not wait for the interpreter
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if code == BROKEN_PIPE:
        # what is still in the buffers must not fail once more when the interpreter ends
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nowhere, stream.fileno())
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run the command line; the exit code."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code, message = _outcome(list(arguments))
        if message:
            _say(message)
        return code
    except BrokenPipeError:
        return BROKEN_PIPE


def _outcome(arguments: list[str]) -> tuple[int, str]:
    """The exit code of the command line, and what is said of an error."""
    try:
        _dispatch(arguments)
        sys.stdout.flush()
        return 0, ""
    except BrokenPipeError:
        raise
    except KeyboardInterrupt as error:
        return INTERRUPTED, str(error) or STOPPED
    except RankwiseError as error:
        return WRONG, str(error)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        return FAILED, f"{place}{error.strerror or error}"
    except (ValueError, TypeError, ImportError) as error:
        if not _on_purpose(error):
            raise
        return WRONG, str(error)


def _dispatch(arguments: list[str]) -> None:
    if not arguments or arguments[0] in HELP:
        print(_overview())
        return
    name, *rest = arguments
    if name == "--version":
        print(f"rankwise {VERSION}")
        return
    if name not in COMMANDS:
        what = "option" if name.startswith("-") else "command"
        hint = nearest(name, [*COMMANDS, *HELP, "--version"])
        raise UsageError(f"There is no {what} `{name}`.{hint} `rankwise --help` lists the commands.")
    command = COMMANDS[name]
    before = rest[: rest.index("--")] if "--" in rest else rest
    if any(word in HELP for word in before):
        print(help_of(command, rest), end="")
        return
    command.run(parse(command, rest))


def _overview() -> str:
    lines = [wrapped(f"  {command.name:<10}{command.about}", indent=" " * 12) for command in COMMANDS.values()]
    return "\n".join(
        [
            "usage: rankwise COMMAND ...",
            "",
            "Make a language model as small as you ask.",
            "",
            *lines,
            "",
            wrapped("`rankwise COMMAND --help` says more. A first try, no download: rankwise run"),
        ]
    )


def _on_purpose(error: Exception) -> bool:
    """Whether our own code raised it for the user to read; any other is a bug, and keeps its traceback."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return False
    file = trace.tb_frame.f_code.co_filename
    ours = Path(__file__).resolve().parents[1] in Path(file).resolve().parents
    return ours and linecache.getline(file, trace.tb_lineno).lstrip().startswith("raise ")


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    _say(f"warning: {message}")


def _say(message: str) -> None:
    print(f"rankwise: {' '.join(message.split())}", file=sys.stderr)
