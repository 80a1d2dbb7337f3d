"""What a command is, and the parser of its own arguments: every mistake is one line."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from rankwise.cli.tables import wrapped
from rankwise.errors import RankwiseError, nearest

if TYPE_CHECKING:
    from rankwise.lab.tasks.base import Experiment

Options = argparse.Namespace


class UsageError(RankwiseError):
    """Words that the command line cannot make sense of."""


@dataclass(frozen=True)
class Command:
    """`rankwise NAME`."""

    name: str
    usage: str
    """What follows the name, in short."""
    about: str
    """One line."""
    details: str
    """What else its help says; an example at least."""
    arguments: Callable[[Parser], None]
    """Adds them to its parser."""
    run: Callable[[Options], None]
    experiment: Callable[[Options], Experiment] | None = None
    """What its settings are those of, for a command that takes settings. Its first argument is called `target`."""


class Parser(argparse.ArgumentParser):
    """The arguments of one command but its settings."""

    def __init__(self, command: Command) -> None:
        super().__init__(
            prog=f"rankwise {command.name}",
            usage=_usage(command),
            description=f"{wrapped(command.about)}\n\n{_details(command)}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            add_help=False,
        )
        command.arguments(self)

    def options(self) -> list[str]:
        """Its own options, as they are written."""
        return [text for action in self._actions for text in action.option_strings]

    def read(self, arguments: Sequence[str]) -> Options:
        """What the arguments say."""
        options, unknown = self.parse_known_args(arguments)
        if not unknown:
            return options
        word = unknown[0]
        if word.startswith("-"):
            raise no_such_option(word.partition("=")[0], self.options())
        raise UsageError(f"`{self.prog}` takes no further argument, but got {word!r}. See `{self.prog} --help`.")

    def error(self, message: str) -> NoReturn:
        """In the words of the other errors."""
        if found := re.fullmatch(r"argument (\S+): expected .* argument", message):
            message = f"`{found[1]}` needs a value. See `{self.prog} --help`."
        elif found := re.fullmatch(r"argument (\S+): (.*)", message):
            message = f"`{found[1]}` {found[2]}"
        elif found := re.fullmatch(r"the following arguments are required: (.*)", message):
            message = f"`{self.prog}` needs {found[1]}. See `{self.prog} --help`."
        raise UsageError(message)


def _usage(command: Command) -> str:
    """In lines that fit; what stands in brackets stays together."""
    bound = re.sub(r"\[[^]]*\]|--\S+ [A-Z]+", lambda found: found[0].replace(" ", "\0"), command.usage)
    lines = wrapped(f"usage: rankwise {command.name} {bound}", indent=" " * len("usage: "))
    return lines.removeprefix("usage: ").replace("\0", " ")


def _details(command: Command) -> str:
    """Paragraphs in lines that fit, each example in lines of its own."""
    paragraphs = re.sub(r"(?<!\n)\n(?!\n|example:)", " ", command.details).split("\n")
    return "\n".join(_example(line) if line.startswith("example:") else wrapped(line) for line in paragraphs)


def _example(line: str) -> str:
    """A command that stays one when it is copied, with every option beside its value."""
    bound = re.sub(r"(--\S+) (?=[^- ])", "\\1\0", line)
    return wrapped(bound, indent="    ", ending=" \\").replace("\0", " ")


def no_such_option(word: str, known: Sequence[str]) -> UsageError:
    """The error for an option that does not exist."""
    return UsageError(f"There is no option `{word}` here.{nearest(word, known)}")


def number(text: str) -> float:
    """An argument that is a number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, but is {text!r} instead.") from None


def whole_number(text: str) -> int:
    """An argument that is a whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, but is {text!r} instead.") from None


def one_of(*words: str) -> Callable[[str], str]:
    """An argument that is one of a few words."""

    def choose(text: str) -> str:
        if text not in words:
            raise argparse.ArgumentTypeError(
                f"must be one of {', '.join(words)}, but is {text!r} instead.{nearest(text, words)}"
            )
        return text

    return choose


def listed(kind: Callable[[str], float | str]) -> Callable[[str], list[float | str]]:
    """An argument that is a list with commas."""

    def read(text: str) -> list[float | str]:
        values = [kind(part.strip()) for part in text.split(",") if part.strip()]
        if not values:
            raise argparse.ArgumentTypeError(f"must be a list with commas, but is {text!r} instead.")
        return values

    return read
