"""What is printed for people to read: tables and sentences that fit the terminal, or 80 columns where there is none."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

from rankwise.cli.layout import laid_out

if TYPE_CHECKING:
    from rich.console import Console


def terminal(*, stderr: bool = False) -> Console | None:
    """The terminal that a person looks at; None where the stream goes elsewhere, or without rich."""
    if not (sys.stderr if stderr else sys.stdout).isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console(stderr=stderr, highlight=False)
    return None if console.is_dumb_terminal or not console.is_terminal else console


def columns() -> int:
    """Columns that a line may have."""
    return shutil.get_terminal_size().columns


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], words: Container[str]) -> None:
    """Print a table, with a rule below its header on a terminal.

    Columns in `words` stand to the left; the others hold numbers, which stand to the right. No cell is ever cut.
    """
    console = terminal()
    for place, block in enumerate(laid_out(header, rows, words, columns())):
        if place:
            print()
        if console is None:
            print(*block.header, *block.body, sep="\n")
            continue
        letter = "─" if console.encoding.startswith("utf") else "-"
        rule = letter * max(map(len, (*block.header, *block.body)))
        console.print("\n".join(block.header), style="bold", markup=False, highlight=False, soft_wrap=True)
        console.print("\n".join([rule, *block.body]), markup=False, highlight=False, soft_wrap=True)


def say(text: str) -> None:
    """Print a sentence; words that are longer than a line, such as paths, stay whole."""
    print(wrapped(text))


def wrapped(text: str, indent: str = "", ending: str = "") -> str:
    """A text, whose paragraphs end at line breaks, in lines that fit.

    All lines of a paragraph but the first begin with `indent`, all but the last end with `ending`.
    """
    wrapper = textwrap.TextWrapper(
        columns() - len(ending), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(f"{ending}\n".join(wrapper.wrap(line)) for line in text.split("\n"))
