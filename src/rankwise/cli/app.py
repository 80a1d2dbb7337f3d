"""The commands, and what a user sees of an error: one line, and exit code 2 for a wrong argument."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Sequence

from rankwise.cli.command import HELP, QUIET, SEVERAL, UsageError, help_text, parse
from rankwise.cli.compare import compare
from rankwise.cli.compress import compress
from rankwise.cli.evaluate import evaluate
from rankwise.cli.heal import heal
from rankwise.cli.plan import plan
from rankwise.cli.report import report
from rankwise.cli.runs import presets, prune, sweep, train
from rankwise.cli.runs import run as run_preset
from rankwise.cli.saved import bench, export, sample
from rankwise.cli.tables import wrapped
from rankwise.errors import PartsFailedError, RankwiseError, nearest, shortened
from rankwise.version import VERSION

COMMANDS = {
    command.name: command
    for command in (
        run_preset, train, prune, compress, heal, evaluate, sample, compare, bench, export, sweep, report, presets,
        plan,
    )
}  # fmt: skip
WRONG, FAILED, INTERRUPTED, BROKEN_PIPE = 2, 1, 130, 141
"""Exit codes: the user's mistake, the machine's, Ctrl-C (SIGTERM: 143), and a reader of our output that went away."""
LONGEST = 900
"""Letters of a message, at most: it may quote a file."""
TRAINING = (run_preset.name, train.name, prune.name, sweep.name)
STOPPED = "Stopped; run the same command again to go on."


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    for stream in (sys.stdout, sys.stderr):
        # a text may hold letters that the terminal does not have
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    code = run(sys.argv[1:] if arguments is None else arguments)
    if SEVERAL:
        _leave(code)
    if code == INTERRUPTED:
        # nothing is left to do, so a second Ctrl-C need not wait for the interpreter
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if code == BROKEN_PIPE:
        # what is still in the buffers must not fail once more when the interpreter ends
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nowhere, stream.fileno())
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code. What no user can have caused is raised, with its traceback."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: None if QUIET else _say(f"warning: {message}")
            code, message = _run(list(arguments))
        if message and _may_report(code):
            _say(message)
        return code
    except BrokenPipeError:
        return BROKEN_PIPE
    except Exception:
        _may_report(FAILED)
        raise


def _run(arguments: list[str]) -> tuple[int, str]:
    """The exit code, and the line about an error."""
    try:
        _dispatch(arguments)
        sys.stdout.flush()
        return 0, ""
    except BrokenPipeError:
        raise
    except KeyboardInterrupt as error:
        # a shell's code for a process that a signal ended
        return 128 + getattr(error, "signal", signal.SIGINT), str(error) or STOPPED
    except RankwiseError as error:
        return FAILED if isinstance(error, PartsFailedError) else WRONG, str(error)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        return FAILED, f"{place}{error.strerror or error}"


def _dispatch(arguments: list[str]) -> None:
    name, *rest = arguments or HELP
    if name in HELP:
        print(_overview())
        return
    if name == "--version":
        print(f"rankwise {VERSION}")
        return
    if name not in COMMANDS:
        what = "option" if name.startswith("-") else "command"
        hint = nearest(name, [*COMMANDS, *HELP, "--version"])
        raise UsageError(f"There is no {what} `{name}`.{hint} `rankwise --help` lists the commands.")
    command = COMMANDS[name]
    if SEVERAL:
        _join(name)
    if any(word in HELP for word in (rest[: rest.index("--")] if "--" in rest else rest)):
        print(help_text(command, rest))
        return
    options = parse(command, rest)
    if command.experiment is not None:
        from rankwise.cli.settings import configured

        experiment = command.experiment(options)
        options.experiment = None if experiment is None else configured(experiment, options)
    command.run(options)


def _join(name: str) -> None:
    """Become one of several processes that train; only the first prints."""
    from rankwise.lab.training.ranks import own_ranks, refuse_several

    if QUIET:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if name not in TRAINING:
        refuse_several(f"`rankwise {name}`")
    own_ranks()


def _may_report(code: int) -> bool:
    """Whether this process tells of an error: of several, the first that has one."""
    if not SEVERAL:
        return True
    from rankwise.lab.training.ranks import has_joined, own_ranks

    return own_ranks().may_report() if has_joined() and code < INTERRUPTED else not QUIET


def _leave(code: int) -> None:
    """End one of several processes."""
    from rankwise.lab.training.ranks import has_joined, own_ranks

    if has_joined():
        own_ranks().leave(code)


def _overview() -> str:
    lines = [wrapped(f"  {command.name:<10}{command.about}", indent=" " * 12) for command in COMMANDS.values()]
    head = ["usage: rankwise COMMAND ...", "", "Make a language model as small as you ask.", ""]
    tail = wrapped("`rankwise COMMAND --help` says more. A first try, no download: rankwise run")
    return "\n".join([*head, *lines, "", tail])


def _say(message: str) -> None:
    line = f"rankwise: {shortened(message, LONGEST)}"
    # a terminal would break it inside words
    print(wrapped(line) if sys.stderr.isatty() else line, file=sys.stderr)
