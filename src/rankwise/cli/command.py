"""What a command is: a function, its arguments and its help. Every mistake is one line."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from rankwise.cli.tables import columns, wrapped
from rankwise.errors import InvalidValueError, RankwiseError, nearest

if TYPE_CHECKING:
    from rankwise.lab.tasks.base import Experiment

HELP = ("-h", "--help")
SEVERAL = "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")
"""Whether this is one of several processes, started by `torchrun` or another launcher."""
QUIET = SEVERAL and os.environ["RANK"] != "0"
"""Whether another one of them, the first, prints what there is to say."""
Options = SimpleNamespace
"""The values of a command's arguments by name; `subject` is the one without a name. `given` holds settings as pairs of
name and text or None, and `experiment` what they make of the command's experiment."""


class UsageError(RankwiseError):
    """The words on the command line do not make sense."""


@dataclass(frozen=True)
class Argument:
    """One argument of a command."""

    label: str
    """How help writes it: `--out FOLDER`, `--json` for a switch, `FOLDER` for the argument without a name."""
    help: str
    type: Any = str
    """What its text stands for, as a type hint that `parse_value` knows."""
    default: Any = None
    required: bool = False
    several: bool = False
    """Whether it may be given several times; its value is a list."""

    @property
    def name(self) -> str:
        return self.label.partition(" ")[0]

    @property
    def key(self) -> str:
        """The attribute of `Options` that holds the value."""
        return self.name.lstrip("-").replace("-", "_") if self.name.startswith("-") else "subject"

    @property
    def is_switch(self) -> bool:
        return self.label.startswith("--") and " " not in self.label

    def store(self, options: Options, text: str) -> None:
        """Set the value that a text stands for."""
        value = parse_value(self.type, text, self.name)
        if value == ():
            raise UsageError(f"`{self.name}` must be a list with commas, but is {text!r} instead.")
        setattr(options, self.key, [*(getattr(options, self.key) or []), value] if self.several else value)


@dataclass(frozen=True)
class Command:
    """`rankwise NAME`."""

    name: str
    about: str
    """One sentence, for the list of commands."""
    details: str
    """Paragraphs of the help, with one example at least: `example: rankwise NAME ...`."""
    arguments: tuple[Argument, ...]
    run: Callable[[Options], None]
    experiment: Callable[[Options], Experiment | None] | None
    """For a command that takes settings: the experiment that they change; None where there is none to change."""

    def error(self, what: str) -> UsageError:
        return UsageError(f"`rankwise {self.name}` {what}. See `rankwise {self.name} --help`.")


def command(
    *arguments: Argument, experiment: Callable[[Options], Experiment | None] | None = None
) -> Callable[[Callable[[Options], None]], Command]:
    """Make a command of a function; its docstring is the help."""

    def make(run: Callable[[Options], None]) -> Command:
        about, _, details = inspect.cleandoc(run.__doc__ or "").partition("\n\n")
        return Command(run.__name__, about, details, arguments, run, experiment)

    return make


def parse(command: Command, arguments: Sequence[str]) -> Options:
    """The values of a command's arguments. Settings of the experiment are kept as text, in `given`."""
    named = {argument.name: argument for argument in command.arguments if argument.name.startswith("-")}
    (unnamed,) = (argument for argument in command.arguments if argument.name not in named)
    options = Options(given=[], known=list(named))
    for each in command.arguments:
        setattr(options, each.key, False if each.is_switch else each.default)
    words, others = list(arguments), []
    while words:
        word = words.pop(0)
        name, equals, text = word.partition("=")
        if word == "--":
            others += words
            break
        if not word.startswith("-") or word == "-":
            others.append(word)
            continue
        argument = named.get(name)
        if argument is None and (command.experiment is None or not name.startswith("--")):
            raise no_such_option(name, options.known)
        if argument is not None and argument.is_switch:
            if equals:
                raise UsageError(f"`{name}` takes no value, but has {text!r}. Leave the value out.")
            setattr(options, argument.key, True)
            continue
        # the next word, unless it begins like an option: a negative number is a value
        value = text if equals else words.pop(0) if words and not words[0].startswith("--") else None
        if argument is None:
            options.given.append((name[2:], value))
        elif value is None:
            raise UsageError(f"`{name}` needs a value. See `rankwise {command.name} --help`.")
        else:
            argument.store(options, value)
    if len(others) > 1 and not unnamed.several:
        raise command.error(f"takes no further argument, but got {others[1]!r}")
    for word in others:
        unnamed.store(options, word)
    missing = [each.label for each in command.arguments if each.required and getattr(options, each.key) is None]
    if missing:
        raise command.error(f"needs {', '.join(missing)}")
    return options


def no_such_option(name: str, known: Sequence[str]) -> UsageError:
    return UsageError(f"There is no option `{name}` here.{nearest(name, known)}")


def parse_value(hint: Any, text: str, name: str) -> Any:
    """The value of type `hint` that a text stands for; `name` is what errors call it."""
    kinds = [kind for kind in members(hint) if not is_dataclass(kind)]
    if NoneType in kinds and text.lower() == "none":
        return None
    rules: list[str] = []
    words: list[str] = []
    for kind in (kind for kind in kinds if kind is not NoneType):
        if get_origin(kind) is tuple:
            item = get_args(kind)[0]
            return tuple(parse_value(item, part.strip(), name) for part in text.split(",") if part.strip())
        if get_origin(kind) is Literal:
            words += get_args(kind)
            if text in words:
                return text
            continue
        rule, read = READERS[kind.__name__]
        try:
            return read(text)
        except ValueError:
            rules.append(rule)
    if not rules and not words:
        raise RankwiseError(
            f"`{name}` must be none, or be set one by one, but is {text!r} instead. Example: --{name} none."
        )
    rules += [f"one of {', '.join(words)}" if len(words) > 1 else f'"{word}"' for word in words[:1]]
    raise UsageError(f"`{name}` must be {' or '.join(rules)}, but is {text!r} instead.{nearest(text, words)}")


def members(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _bool(text: str) -> bool:
    known = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if text.lower() not in known:
        raise InvalidValueError
    return known[text.lower()]


def _dtype(text: str) -> Any:
    import torch

    dtype = getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidValueError
    return dtype


READERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "bool": ("true or false", _bool),
    "int": ("a whole number", int),
    "float": ("a number", float),
    "str": ("a text", str),
    "Path": ("a path", Path),
    "dtype": ("a dtype of torch", _dtype),
}
"""How errors call a type, and how it is read from text."""


DTYPE = Argument(
    "--dtype DTYPE",
    "float32, bfloat16, float16 or auto, that of the folder. Default: auto.",
    Literal["auto", "float32", "bfloat16", "float16"],
)


def dtype_of(options: Options) -> Any:
    """The dtype of torch that `--dtype` names; None for that of the folder."""
    return None if options.dtype in (None, "auto") else _dtype(options.dtype)


def help_text(command: Command, arguments: Sequence[str]) -> str:
    """The help of a command, with the settings of the experiment where the arguments name one."""
    text = _usage(command)
    try:
        options = parse(command, [word for word in arguments if word not in HELP])
    except UsageError:
        # such as a missing argument, which the help explains
        return text
    if command.experiment is None or (options.subject is None and getattr(options, "config", None) is None):
        return text
    from rankwise.cli.settings import configured, settings_help

    experiment = command.experiment(options)
    return text if experiment is None else f"{text}\n\n{settings_help(configured(experiment, options))}"


def _usage(command: Command) -> str:
    """How a command is used, what it does, and its arguments."""
    words, details = [], command.details.split("\n\n")
    for each in command.arguments:
        word = f"{each.label} ..." if each.several and each.key == "subject" else each.label
        words.append(word if each.required else f"[{word}]")
        if command.experiment is not None and each.key == "subject":
            how = f"`rankwise {command.name} {each.label} --help` lists them."
            details.insert(0, f"Settings are changed by `--SETTING VALUE` or `--SETTING=VALUE`. {how}")
    words += ["[--SETTING VALUE ...]"] if command.experiment is not None else []
    # each argument stays on one line
    usage = f"usage: rankwise {command.name} {' '.join(word.replace(' ', chr(0)) for word in words)}"
    return "\n\n".join(
        [
            wrapped(usage, indent=" " * len("usage: ")).replace(chr(0), " "),
            wrapped(command.about),
            # an example stays one command when it is copied
            *(text if text.startswith("example:") else wrapped(" ".join(text.split())) for text in details),
            "\n".join(["arguments:", *entries([(each.label, each.help) for each in command.arguments], 26)]),
        ]
    )


def entries(pairs: Sequence[tuple[str, str]], indent: int) -> Iterator[str]:
    """Names and what they mean in two columns; a long name has a line of its own."""
    for name, about in pairs:
        left = f"  {name}"
        beside = len(left) + 2 <= indent
        if not beside:
            yield left
        lines = wrapped(about, width=max(columns(), 2 * indent) - indent).split("\n")
        for place, line in enumerate(lines):
            yield ((left if beside and place == 0 else "").ljust(indent) + line).rstrip()
