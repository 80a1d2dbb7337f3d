"""What a command is: its arguments, the settings of the experiment it runs, and its help. Every mistake is one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from rankwise.cli.tables import columns, wrapped
from rankwise.errors import RankwiseError, nearest

if TYPE_CHECKING:
    from rankwise.lab.experiments.arms import AnyExperiment

T = TypeVar("T")

HELP = ("-h", "--help")
Options = SimpleNamespace
"""The values of a command's arguments by name. `given` holds its settings, as pairs of name and text or None."""
RULES: dict[Any, str] = {int: "a whole number", float: "a number"}
"""What errors call the types of arguments."""


class UsageError(RankwiseError):
    """The words on the command line do not make sense."""


@dataclass(frozen=True)
class Command:
    """`rankwise NAME`."""

    name: str
    about: str
    """One sentence, for the list of commands."""
    details: str
    """Paragraphs of the help, with one example at least: `example: rankwise NAME ...`."""
    arguments: Callable[[Parser], None]
    """Adds the arguments to the parser."""
    run: Callable[[Options], None]
    experiment: Callable[[Options], AnyExperiment] | None = None
    """For a command that takes settings: the experiment that they change. Its first argument is called `target`."""


@dataclass(frozen=True)
class Argument:
    """One argument of a command. The words are those of `argparse`."""

    name: str
    metavar: str = ""
    help: str = ""
    type: Callable[[str], Any] = str
    default: Any = None
    action: Literal["store", "store_true", "append"] = "store"
    nargs: Literal["", "?", "*", "+"] = ""
    required: bool = False

    @property
    def key(self) -> str:
        """The attribute of `Options` that holds the value."""
        return self.name.lstrip("-").replace("-", "_")

    @property
    def several(self) -> bool:
        """Whether it takes any number of words."""
        return self.nargs in ("*", "+")

    @property
    def needed(self) -> bool:
        """Whether it must be given."""
        return self.required if self.name.startswith("-") else self.nargs in ("", "+")

    @property
    def label(self) -> str:
        """How the help writes it: `--out FOLDER`, or `FOLDER` where it has no name."""
        return f"{self.name} {self.metavar}".strip() if self.name.startswith("-") else self.metavar

    @property
    def usage(self) -> str:
        """How the first line of the help writes it: in brackets, unless it must be given."""
        words = f"{self.label} ..." if self.several else self.label
        return words if self.needed else f"[{words}]"

    def read(self, text: str) -> Any:
        """The value that `text` stands for."""
        try:
            return convert(self.type, text)
        except UsageError as error:
            raise UsageError(f"`{self.name}` {error}") from None


class Parser:
    """Reads the words after the name of a command: options, settings, and one argument without a name."""

    def __init__(self, command: Command) -> None:
        self.command = command
        self.prog = f"rankwise {command.name}"
        self.arguments: dict[str, Argument] = {}
        command.arguments(self)
        (self.unnamed,) = (argument for name, argument in self.arguments.items() if not name.startswith("-"))

    def add_argument(self, name: str, **settings: Any) -> None:
        """Add an argument; `settings` are the fields of `Argument`."""
        self.arguments[name] = Argument(name, **settings)

    def parse(self, arguments: Sequence[str]) -> Options:
        """The values of all arguments. Settings of the experiment are kept as text, in `given`."""
        options = Options(given=[], known=[name for name in self.arguments if name.startswith("-")])
        for argument in self.arguments.values():
            setattr(options, argument.key, False if argument.action == "store_true" else argument.default)
        words, others, seen = list(arguments), [], set()
        while words:
            word = words.pop(0)
            name, equals, value = word.partition("=")
            if word == "--":
                others += words
                break
            if not word.startswith("-") or word == "-":
                others.append(word)
            elif name in self.arguments:
                seen.add(name)
                self._set(options, self.arguments[name], value if equals else None, words)
            elif self.command.experiment is not None and name.startswith("--"):
                options.given.append((name[2:], value if equals else _next_value(words)))
            else:
                raise _no_such_option(name, options.known)
        if len(others) > 1 and not self.unnamed.several:
            raise self._error(f"takes no further argument, but got {others[1]!r}")
        if others or self.unnamed.several:
            values = [self.unnamed.read(word) for word in others]
            setattr(options, self.unnamed.key, values if self.unnamed.several else values[0])
        seen |= {self.unnamed.name} if others else set()
        missing = [argument.label for name, argument in self.arguments.items() if argument.needed and name not in seen]
        if missing:
            raise self._error(f"needs {', '.join(missing)}")
        return options

    def _set(self, options: Options, argument: Argument, text: str | None, words: list[str]) -> None:
        """Set an option to `text`, or to the first of the words that follow it."""
        value: Any = True
        if argument.action == "store_true":
            if text is not None:
                raise UsageError(f"`{argument.name}` takes no value, but has {text!r}. Leave the value out.")
        else:
            text = _next_value(words) if text is None else text
            if text is None:
                raise UsageError(f"`{argument.name}` needs a value. See `{self.prog} --help`.")
            value = argument.read(text)
            if argument.action == "append":
                value = [*(getattr(options, argument.key) or []), value]
        setattr(options, argument.key, value)

    def _error(self, what: str) -> UsageError:
        return UsageError(f"`{self.prog}` {what}. See `{self.prog} --help`.")

    def help(self) -> str:
        """How the command is used, what it does, and its arguments."""
        words = [argument.usage for argument in self.arguments.values()]
        words += ["[--SETTING VALUE ...]"] if self.command.experiment is not None else []
        # each argument stays on one line
        usage = f"usage: {self.prog} {' '.join(word.replace(' ', chr(0)) for word in words)}"
        return "\n\n".join(
            [
                wrapped(usage, indent=" " * len("usage: ")).replace(chr(0), " "),
                wrapped(self.command.about),
                *map(_paragraph, self.command.details.split("\n\n")),
                "\n".join(["arguments:", *_entries([(a.label, a.help) for a in self.arguments.values()], 26)]),
            ]
        )


def _next_value(words: list[str]) -> str | None:
    """Take the next word, unless it begins like an option. A negative number is a value."""
    return words.pop(0) if words and not words[0].startswith("--") else None


def parse(command: Command, arguments: Sequence[str]) -> Options:
    """The values of the command's arguments."""
    return Parser(command).parse(arguments)


def configured(experiment: AnyExperiment, options: Options) -> AnyExperiment:
    """The experiment with the settings that were given."""
    from rankwise.lab.experiments.arms import check_seed
    from rankwise.lab.experiments.fields import BOTH, as_text, override, settings

    known = settings(experiment)
    for name, text in options.given:
        if "." not in name and name not in known and name != "method":
            # a setting without its group is the likeliest mistake
            full = [f"--{setting}" for setting in known if setting.rpartition(".")[2] == name]
            if full:
                raise UsageError(f"There is no option `--{name}` here. Did you mean {' or '.join(full)}?")
            raise _no_such_option(f"--{name}", [*options.known, *(f"--{setting}" for setting in known), "--method"])
        if text is None:
            like = known.get(f"training.{name.removeprefix(f'{BOTH}.')}" if name.startswith(f"{BOTH}.") else name)
            example = "VALUE" if like is None else as_text(like.value)
            raise UsageError(f"`--{name}` needs a value, but has none. Example: --{name} {example}.")
    changed = override(experiment, dict(options.given))
    check_seed(changed.seed)
    return changed


def refuse_settings(options: Options, refused: Callable[[str], bool], why: str) -> None:
    """Refuse settings of groups that the command has no use for."""
    for name, _ in options.given:
        if refused(name.partition(".")[0]):
            raise UsageError(f"`--{name}` cannot be set here, because {why}. Leave it out.")


def help_text(command: Command, arguments: Sequence[str]) -> str:
    """The help of a command, with the settings of the experiment where the arguments name one."""
    parser = Parser(command)
    text = parser.help()
    if command.experiment is None:
        return text
    try:
        options = parser.parse([word for word in arguments if word not in HELP])
    except UsageError:
        # such as a missing argument, which the help explains
        return text
    if options.target is None:
        return text
    return f"{text}\n\n{_settings_help(configured(command.experiment(options), options))}"


def _settings_help(experiment: AnyExperiment) -> str:
    from rankwise.lab.experiments.fields import BOTH, as_text, settings

    title = f"settings of {experiment.name} and their values; --{BOTH}.NAME sets --base.NAME and --training.NAME:"
    entries = [(f"--method {experiment.method.name}", "How it is pruned; see `rankwise plan --help`.")]
    entries += [(f"--{s.name} {as_text(s.value)}", s.about) for s in settings(experiment).values()]
    return "\n".join([wrapped(title), *_entries(entries, 36)])


def _entries(pairs: Sequence[tuple[str, str]], indent: int) -> Iterator[str]:
    """Names and what they mean in two columns; a long name has a line of its own."""
    for name, about in pairs:
        left = f"  {name}"
        beside = len(left) + 2 <= indent
        if not beside:
            yield left
        lines = wrapped(about, width=max(columns(), 2 * indent) - indent).split("\n")
        for place, line in enumerate(lines):
            yield ((left if beside and place == 0 else "").ljust(indent) + line).rstrip()


def _paragraph(text: str) -> str:
    """A paragraph in lines that fit. An example stays one command when it is copied."""
    if not text.startswith("example:"):
        return wrapped(" ".join(text.split()))
    return "\n".join(wrapped(line, indent="    ", ending=" \\") for line in text.splitlines())


def _no_such_option(name: str, known: Sequence[str]) -> UsageError:
    return UsageError(f"There is no option `{name}` here.{nearest(name, known)}")


def convert(kind: Callable[[str], T], text: str) -> T:
    """The value that a text stands for; `kind` is a type, or a function that raises `UsageError`."""
    try:
        return kind(text)
    except ValueError:
        raise UsageError(f"must be {RULES[kind]}, but is {text!r} instead.") from None


def one_of(*words: str) -> Callable[[str], str]:
    """The type of an argument that is one of a few words."""

    def read(text: str) -> str:
        if text not in words:
            raise UsageError(f"must be one of {', '.join(words)}, but is {text!r} instead.{nearest(text, words)}")
        return text

    return read


def listed(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """The type of an argument that is a list with commas."""

    def read(text: str) -> list[Any]:
        values = [convert(kind, part.strip()) for part in text.split(",") if part.strip()]
        if not values:
            raise UsageError(f"must be a list with commas, but is {text!r} instead.")
        return values

    return read
