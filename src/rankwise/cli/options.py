"""From the words of a command line to settings: `--training.lr 1e-3`, `--training.lr=1e-3`, `--method np-l0`."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Container, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rankwise.cli.command import Command, Options, Parser, UsageError, no_such_option
from rankwise.cli.tables import columns, wrapped

if TYPE_CHECKING:
    from rankwise.lab.tasks.base import Experiment

HELP = ("-h", "--help")
INDENT = 36


def parse(command: Command, arguments: Sequence[str]) -> Options:
    """What the arguments of a command say; `given` holds its settings, as (name, text or None)."""
    parser = Parser(command)
    if command.experiment is None:
        return parser.read(arguments)
    own, given = split(arguments, parser.options())
    options = parser.read(own)
    options.given, options.known = given, parser.options()
    return options


def split(arguments: Sequence[str], known: Container[str]) -> tuple[list[str], list[tuple[str, str | None]]]:
    """The words for a command's own parser, and the settings among them."""
    own: list[str] = []
    given: list[tuple[str, str | None]] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        if word == "--":
            return [*own, word, *words], given
        name, equals, value = word.partition("=")
        if not name.startswith("--") or name in known:
            own.append(word)
        elif equals:
            given.append((name[2:], value))
        else:
            # a number may be negative, but no value begins like an option
            given.append((name[2:], words.pop(0) if words and not words[0].startswith("--") else None))
    return own, given


def configured(experiment: Experiment, options: Options) -> Experiment:
    """The experiment with the settings that were given."""
    from rankwise.lab.experiments.fields import override, settings
    from rankwise.lab.tasks.base import check_seed

    names = [*settings(experiment), "method"]
    for name, text in options.given:
        if "." not in name and name not in names:
            raise _unknown(name, names, options.known)
        if text is None:
            raise UsageError(f"`--{name}` needs a value, but has none. Example: --{name} {_example(experiment, name)}.")
    changed = override(experiment, dict(options.given))
    check_seed(changed.seed)
    return changed


def _unknown(name: str, names: Sequence[str], known: Sequence[str]) -> UsageError:
    """A setting without its group is the likeliest slip."""
    groups = [f"--{setting}" for setting in names if setting.rpartition(".")[2] == name]
    if groups:
        return UsageError(f"There is no option `--{name}` here. Did you mean {' or '.join(groups)}?")
    return no_such_option(f"--{name}", [*known, *(f"--{setting}" for setting in names)])


def _example(experiment: Experiment, name: str) -> str:
    from rankwise.lab.experiments.fields import BOTH, settings

    known = settings(experiment)
    name = f"training.{name.removeprefix(f'{BOTH}.')}" if name.startswith(f"{BOTH}.") else name
    return as_text(known[name].value) if name in known else "VALUE"


def help_of(command: Command, arguments: Sequence[str]) -> str:
    """The help of a command; with the settings of what it is told to run, where it is told that."""
    text = Parser(command).format_help()
    if command.experiment is None:
        return text
    try:
        options = parse(command, [word for word in arguments if word not in HELP])
    except UsageError:
        # such as a missing argument: the help says which
        return text
    if options.target is None:
        return text
    experiment = configured(command.experiment(options), options)
    return f"{text}\n{chr(10).join(_settings_help(experiment))}\n"


def _settings_help(experiment: Experiment) -> Iterator[str]:
    from rankwise.lab.experiments.fields import BOTH, settings

    width = max(columns(), 2 * INDENT)
    yield wrapped(
        f"settings of {experiment.name}, with their values; --{BOTH}.NAME sets --base.NAME and --training.NAME:"
    )
    yield from _entry("method", experiment.method.name, "How it is pruned; see `rankwise plan --help`.", width)
    for setting in settings(experiment).values():
        yield from _entry(setting.name, as_text(setting.value), setting.about, width)


def _entry(name: str, value: str, about: str, width: int) -> Iterator[str]:
    left = f"  --{name} {value}"
    lines = textwrap.wrap(about, width - INDENT, break_on_hyphens=False)
    if len(left) >= INDENT - 1:
        yield left
        left = ""
    first, *rest = lines or [""]
    yield (left.ljust(INDENT) + first).rstrip()
    for line in rest:
        yield " " * INDENT + line


def as_text(value: Any) -> str:
    """A value as it is written on the command line; "..." for a group of settings."""
    if dataclasses.is_dataclass(value):
        return "..."
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(as_text, value)) or '""'
    return str(value).removeprefix("torch.")


def refuse_settings(options: Options, wrong: Callable[[str], bool], why: str) -> None:
    """Refuse settings of groups that the command has no use for."""
    for name, _ in options.given:
        if wrong(name.partition(".")[0]):
            raise UsageError(f"`--{name}` cannot be set here, for {why}. Leave it out.")
